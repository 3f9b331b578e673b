"""What the gateway was told about one request, held against what the model answers without any handoff."""

from dataclasses import dataclass, field

from tests.pure.handoff_rules import RuleBroken
from tests.pure.toy_model import reference_tokens

from pdserve.kv.layout import KvLayout
from pdserve.wire.cluster import FailureKind, FinishReason, Generate, PrefillPlace

PATIENT_S = 100_000.0
"""The timeout of a request that must not end in one: everything that it waits for has a deadline of its own."""


@dataclass(slots=True)
class Story:
    """What the gateway was told about one request."""

    generate: Generate
    layout: KvLayout
    """Of the model that answers it."""
    token_ids: list[int] = field(default_factory=list[int])
    endings: list[str] = field(default_factory=list[str])
    place: PrefillPlace | None = None


def require_true_story(story: Story) -> None:
    """H7, H8: at most one ending, and a patient client gets an answer; tokens as without any handoff."""
    generate = story.generate
    wanted = reference_tokens(story.layout, generate.prompt_token_ids, generate.sampling.max_tokens)
    if len(story.endings) > 1 or (generate.timeout_s == PATIENT_S and story.endings == [FailureKind.TIMEOUT.value]):
        raise RuleBroken(f"H7: {generate.request_id} ended {story.endings}")
    if tuple(story.token_ids) != wanted[: len(story.token_ids)]:
        raise RuleBroken(f"H8: {generate.request_id} answered {story.token_ids}, not {wanted}")
    if story.endings == [FinishReason.LENGTH.value] and len(story.token_ids) != len(wanted):
        raise RuleBroken(f"H8: {generate.request_id} finished after {len(story.token_ids)} of {len(wanted)} tokens")
