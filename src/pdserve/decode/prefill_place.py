"""Where a prompt is prefilled: by which prefill worker, or why on the decode worker itself."""

from pdserve.decode.request import LocalReason, Request
from pdserve.ids import Incarnation
from pdserve.transfer.receiver import Receiver

MAX_HANDOFF_RETRIES = 1
"""A failed handoff is asked of one more prefill worker. To prefill here is slower than that for a long prompt, but it
depends on nobody, and each further failure would cost the client as much time as the first."""


def reason_from_the_start(request: Request, *, needs_prefill_worker: bool) -> LocalReason | None:
    """Why no prefill worker is even asked.

    `needs_prefill_worker`: prompts are prefilled here for want of one alone, unless they have one token.
    """
    if request.resumes_apart:
        return LocalReason.RESUMED
    if len(request.token_ids_of(request.lead)) < 2:
        return LocalReason.ROUTED
    if request.generate.sampling.num_prompt_logprobs is not None:
        return LocalReason.PROMPT_LOGPROBS
    if request.generate.prefill is None:
        return LocalReason.NO_PREFILL_WORKER if needs_prefill_worker else LocalReason.ROUTED
    return None


def next_place(request: Request, receiver: Receiver, *, dp_rank: int) -> Incarnation | LocalReason:
    """The prefill worker to ask now: the one that the gateway chose, and after it another one that is connected."""
    failure = request.handoff_failure
    if failure is None:
        chosen = request.generate.prefill
        candidates = [chosen.incarnation] if chosen is not None and receiver.is_connected(chosen.incarnation) else []
    elif len(request.asked_peers) <= MAX_HANDOFF_RETRIES:
        candidates = _other_peers(request, receiver)
    else:
        candidates = []
    if not candidates:
        return failure or LocalReason.NO_PREFILL_WORKER
    if not receiver.accepts_handoffs(dp_rank):
        return failure or LocalReason.QUARANTINE
    return candidates[0]


def _other_peers(request: Request, receiver: Receiver) -> list[Incarnation]:
    """Connected ones that were not asked, those with the fewest open handoffs first."""
    sessions = sorted(receiver.sessions, key=lambda session: (len(session.handoffs), session.incarnation))
    peers = [session.incarnation for session in sessions if receiver.is_connected(session.incarnation)]
    return [peer for peer in peers if peer not in request.asked_peers]
