"""The messages between a worker and the gateway, on one connection per worker. See `docs/wire.md`.

The worker dials `/cluster` of the gateway and sends `Join`; the gateway answers `Welcome` or `JoinRefused`.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Annotated

import msgspec

from pdserve.config.role import Role
from pdserve.ids import Incarnation, RequestId, WorkerId
from pdserve.sampling import SamplingParams, TokenLogprobs
from pdserve.wire.peer import Message

MAX_LOADS = 1024
"""Data parallel ranks of one worker. The least load is one byte on the wire and 96 in memory."""


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How full one data parallel rank of a worker is; sent with each heartbeat."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    """Prompt tokens not computed yet."""
    num_free_pages: int = 0
    num_pages: int = 0
    num_quarantined_pages: int = 0


class Join(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    protocol_version: int
    worker_id: WorkerId
    incarnation: Incarnation
    role: Role
    url: str
    """Where the worker's own HTTP server is reached by other workers, such as `http://10.0.0.7:8101`."""
    model_name: str
    model_fingerprint: str
    max_model_len: int
    lease_s: float
    tensor_parallel_size: int
    """Ranks of each data parallel rank; shown to operators, nothing is decided on it."""
    loads: Annotated[tuple[Load, ...], msgspec.Meta(max_length=MAX_LOADS)]
    """By data parallel rank; at least one."""


class Welcome(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    incarnation: Incarnation
    """The gateway's."""
    heartbeat_s: float
    """How often the worker must send `WorkerHeartbeat`; the gateway sends `GatewayHeartbeat` as often."""


class JoinRefused(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    message: str


class WorkerHeartbeat(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    sender: Incarnation
    loads: Annotated[tuple[Load, ...], msgspec.Meta(max_length=MAX_LOADS)]
    """By data parallel rank; as many as at the join."""
    num_prefill_peers: int = 0
    """Prefill workers that a decode worker is connected to."""
    draining: bool = False
    """It finishes what it has, takes no request and no grant any more, and will `Leave`."""


class GatewayHeartbeat(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    sender: Incarnation


class PrefillTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prefill worker that the gateway chose for a request."""

    worker_id: WorkerId
    incarnation: Incarnation
    url: str


class PrefillPool(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Gateway to decode workers, at each change: who prefills, so that connections are there before they are needed."""

    members: tuple[PrefillTarget, ...]


MAX_CHOICES = 128
"""OpenAI's bound of `n`."""


MAX_TOLD_TOKENS = 2**20
"""In a `Generate`, of all choices: at 5 bytes each, 5 of the 8 MiB that a message may have."""


class Told(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the client has of one choice, from workers that were lost: the answer goes on from there."""

    token_ids: tuple[int, ...] = ()
    """Of all deltas that were delivered; none where it is finished."""
    num_text_chars: int = 0
    num_entries: int = 0
    is_finished: bool = False


def resumes_apart(told: Sequence[Told]) -> bool:
    """Several choices go on, no longer from the prompt alone: each is prefilled by itself, on the decode worker."""
    unfinished = [choice for choice in told if not choice.is_finished]
    return len(unfinished) > 1 and any(choice.token_ids for choice in unfinished)


class Generate(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Gateway to decode worker: one prompt. The worker owns the request from here on."""

    request_id: RequestId
    receiver: Incarnation
    dp_rank: int
    """The data parallel rank that decodes it."""
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    num_choices: int = 1
    """Answers wanted. Choice i is what a request for one answer with `seed + i` would get; its prompt is computed once
    and its pages are shared. At most `MAX_CHOICES`."""
    told: Annotated[tuple[Told, ...], msgspec.Meta(max_length=MAX_CHOICES)] = ()
    """By choice: none of it is told again. Empty: the client has nothing of any choice."""
    num_prompt_logprobs_told: int = 0
    prefill: PrefillTarget | None
    """None: prefill locally."""
    timeout_s: float
    traced: bool = False


class Abort(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Gateway to decode worker: the client is gone. No answer is expected; `Generated` may still cross it."""

    request_id: RequestId
    receiver: Incarnation


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


class PrefillPlace(Enum):
    REMOTE = "remote"
    LOCAL = "local"


class TokenEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is said of one token of an answer, where the request asks for logprobs."""

    text_offset: int
    """The character of the answer at which the token's text begins."""
    logprobs: TokenLogprobs


class Delta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """New tokens of one choice of a request; or, without tokens, of its prompt."""

    request_id: RequestId
    choice_index: int = 0
    token_ids: tuple[int, ...]
    text: str
    """Never ends inside a character; may lag behind the tokens. Excludes a stop string and everything after it."""
    entries: tuple[TokenEntry, ...] = ()
    """Of the tokens whose text begins in `text`: they lag behind `token_ids` as the text does."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt tokens from the second on, in order, before the first delta with tokens; of choice 0 alone."""
    finish_reason: FinishReason | None = None
    """Of the choice; the request ends with its last choice."""
    prefill: PrefillPlace | None = None
    """With the first delta: where the prompt was prefilled."""


MAX_GENERATED_ENTRIES = 4096
"""In a `Generated` of several deltas, prompt tokens too; an entry with the 20 likeliest tokens takes some 330 bytes."""


class Generated(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Worker to gateway, once a step, or several times when there are many entries: what the step produced."""

    sender: Incarnation
    deltas: tuple[Delta, ...]


class FailureKind(Enum):
    """Why a request ended without an answer; the gateway maps it to an HTTP status."""

    CAPACITY = "capacity"
    """429."""
    TIMEOUT = "timeout"
    """504."""
    INVALID = "invalid"
    """400: the worker found the request impossible (for example longer than its KV cache)."""
    INTERNAL = "internal"
    """500."""
    SHUTTING_DOWN = "shutting_down"
    """503."""


class Failed(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Worker to gateway: the request ended without an answer, or its answer broke off."""

    sender: Incarnation
    request_id: RequestId
    kind: FailureKind
    message: str
    retry_after_s: float | None = None


class Leave(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Worker to gateway: it stops in good order, and every request that it had has ended."""

    sender: Incarnation


WorkerToGateway = Join | WorkerHeartbeat | Generated | Failed | Leave
GatewayToWorker = Welcome | JoinRefused | GatewayHeartbeat | PrefillPool | Generate | Abort
