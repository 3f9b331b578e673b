"""How a worker guesses tokens ahead. The answers are the same with and without; only the time to get them differs."""

from dataclasses import dataclass
from enum import Enum

from pdserve.errors import ConfigError

DEFAULT_NUM_DRAFT_TOKENS = 4
"""vLLM's and SGLang's examples guess 3 to 5."""

MAX_NUM_DRAFT_TOKENS = 16
"""A guess so far ahead is seldom right, and each costs as much as a token."""


class Drafter(Enum):
    NGRAM = "ngram"
    """What followed the last tokens when they came before in the sequence. Needs no model."""
    DRAFT_MODEL = "draft"
    """A smaller model with the same tokenizer."""
    MTP = "mtp"
    """The multi-token prediction module that a DeepSeek-V3 checkpoint brings."""
    EAGLE = "eagle"
    """A head of one layer that reads the model's hidden states, from a directory of its own."""


NEEDS_MODEL_DIR = frozenset({Drafter.DRAFT_MODEL, Drafter.EAGLE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Raises: `ConfigError` when the parts do not go together."""

    drafter: Drafter
    model_dir: str | None = None
    """Of the draft model or the head."""
    num_draft_tokens: int = DEFAULT_NUM_DRAFT_TOKENS
    """The most guesses in one pass of one sequence."""

    def __post_init__(self) -> None:
        if (self.model_dir is not None) != (self.drafter in NEEDS_MODEL_DIR):
            wants = "needs" if self.drafter in NEEDS_MODEL_DIR else "takes no"
            raise ConfigError(f"speculation by {self.drafter.value} {wants} model directory")
        if not 1 <= self.num_draft_tokens <= MAX_NUM_DRAFT_TOKENS:
            raise ConfigError(
                f"{self.num_draft_tokens} draft tokens are outside [1, {MAX_NUM_DRAFT_TOKENS}]; 3 to 5 are usual"
            )

    @property
    def needs_engine(self) -> bool:
        """Whether the drafter is a model, which runs in the engine and has a KV cache, on prefill workers too."""
        return self.drafter is not Drafter.NGRAM
