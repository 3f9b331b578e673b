"""The drafts of a fleet: how many a pass tries, how often they are right, and what they cost."""

import hashlib
import math
import struct
from dataclasses import dataclass

from pdserve.config.speculation import MAX_NUM_DRAFT_TOKENS, Drafter, Speculation
from pdserve.errors import ConfigError
from pdserve.ids import Incarnation, SequenceId
from pdserve.perfmodel.port import PassShape, PerfModel
from pdserve.simulate.fleet.silence import TOKEN_ID

WRONG_TOKEN_ID = TOKEN_ID + 1
"""Of a draft that is not what the model samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """As a multi-token prediction head drafts, on prefill and decode workers alike.

    Raises: `ConfigError` when a number can't be.
    """

    num_drafts: int
    """At most, of each sequence in a pass; 0: a token a pass."""
    acceptance: float = 0.0
    """The probability that a draft is right when all before it in its pass were."""
    drafter_layers: float = 1.0
    """Layers of the model that take as long as those of the drafter. A multi-token prediction head is one layer like
    those of its model (arXiv 2412.19437, section 2.2)."""
    output_head_layers: float = 1.0
    """As many as the output head, which each draft runs once more. That of DeepSeek-R1 is 1.9 GB of bfloat16, and a
    pass reads 0.6 GB of a layer for one token, 4.7 GB for 16."""
    seed: int = 0
    """Of which drafts are right."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_drafts <= MAX_NUM_DRAFT_TOKENS:
            raise ConfigError(
                f"{self.num_drafts} drafts a pass are outside [0, {MAX_NUM_DRAFT_TOKENS}]; 1 to 5 are usual"
            )
        if not 0 <= self.acceptance <= 1:
            raise ConfigError(f"drafts can't be accepted with a probability of {self.acceptance:g}; give 0 to 1")
        for num_layers in (self.drafter_layers, self.output_head_layers):
            if not 0 <= num_layers < math.inf:
                raise ConfigError(f"drafting can't take as long as {num_layers:g} layers; give 0 or more")

    @property
    def speculation(self) -> Speculation | None:
        """As the settings of the workers have it."""
        if self.num_drafts == 0:
            return None
        return Speculation(drafter=Drafter.MTP, num_draft_tokens=self.num_drafts)

    @property
    def num_tried(self) -> int:
        """Tokens of a decoding sequence that a pass computes: the last known one and its drafts."""
        return 1 + self.num_drafts

    @property
    def tokens_per_pass(self) -> float:
        """That a sequence gets in the mean, where all drafts are tried."""
        return sum(self.acceptance**num_right for num_right in range(self.num_tried))

    def pass_s(self, perf: PerfModel, shape: PassShape, *, num_layers: int) -> float:
        """With the time of drafting, a share of the pass. One without decode tokens runs the drafter once and without
        the output head, over the prompt, for the drafter's own cache."""
        if shape.num_decode_tokens:
            num_more = self.num_drafts * (self.drafter_layers + self.output_head_layers)
        else:
            num_more = min(1, self.num_drafts) * self.drafter_layers
        return perf.pass_s(shape) * (1 + num_more / num_layers)

    def __str__(self) -> str:
        count = "1 draft" if self.num_drafts == 1 else f"{self.num_drafts} drafts"
        return (
            f"{count} a pass, each taken to be right {self.acceptance:.0%} of the time where those before it were: "
            f"{self.tokens_per_pass:.2f} tokens a decode pass"
        )


NO_DRAFTS = Drafting(num_drafts=0)


class RankDrafter:
    """Drafts of the sequences of one data parallel rank.

    Which are right depends on the rank, the sequence and how long it is: on nothing that other ranks do meanwhile.
    """

    def __init__(self, drafting: Drafting, incarnation: Incarnation, dp_rank: int) -> None:
        self._drafting = drafting
        self._key = struct.pack("<qqq", drafting.seed % 2**63, incarnation, dp_rank)
        self._drafts = tuple(
            (TOKEN_ID,) * num_right + (WRONG_TOKEN_ID,) * (drafting.num_drafts - num_right)
            for num_right in range(drafting.num_tried)
        )
        """By how many are right."""

    def drafts(self, sequence_id: SequenceId, num_tokens: int) -> tuple[int, ...]:
        """Of what comes after so many tokens."""
        place = struct.pack("<qq", sequence_id, num_tokens)
        digest = hashlib.blake2b(place, key=self._key, digest_size=8).digest()
        drawn = (int.from_bytes(digest) >> 11) / 2**53
        acceptance, num_right = self._drafting.acceptance, 0
        chance = acceptance
        while num_right < self._drafting.num_drafts and drawn < chance:
            num_right += 1
            chance *= acceptance
        return self._drafts[num_right]
