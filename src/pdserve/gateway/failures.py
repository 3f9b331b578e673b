"""What a client is told when its request fails, and the failures that a gateway finds by itself."""

import math
from dataclasses import dataclass

from pdserve.cluster.view import ClusterView
from pdserve.config.role import Role
from pdserve.ids import WorkerId

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
OVERLOADED = "overloaded_error"

RETRY_AFTER_S = 1.0
"""A lost worker's lease is over, or a new worker has joined, within about this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An HTTP status and an OpenAI error body."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    @property
    def body(self) -> dict[str, object]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


class RequestFailed(Exception):
    """Carries a `Failure` from where a request ended to where the client is answered."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


SHUTTING_DOWN = Failure(
    status=503,
    type=SERVER_ERROR,
    code="shutting_down",
    message="the gateway is shutting down; try again",
    retry_after_s=RETRY_AFTER_S,
)

TIMED_OUT = Failure(status=504, type=SERVER_ERROR, code="timeout", message="the request took too long")

BODY_TIMED_OUT = Failure(
    status=408, type=INVALID_REQUEST, code="timeout", message="the body did not arrive in time; send it at once"
)

CLIENT_TOO_SLOW = Failure(
    status=429,
    type=OVERLOADED,
    code="client_too_slow",
    message="the client reads more slowly than tokens are generated",
)

BUG = Failure(
    status=500, type=SERVER_ERROR, code="internal_error", message="internal error; the gateway's log has more"
)


def no_worker(view: ClusterView, *, num_refused: int = 0) -> Failure:
    """Nobody is there to take a request, however few there are: 503, where a full worker is 429.

    `num_refused` workers tried to join, and none has since.
    """
    advice = "start one with `pdserve worker --role decode --join URL`"
    if any(worker.draining for worker in view.workers if worker.role is not Role.PREFILL):
        message = f"no decode worker takes requests: all that are there drain and will stop; {advice}"
    elif num_refused:
        message = f"no decode worker has joined: {num_refused} tried and were refused; the gateway's log says why"
    else:
        message = f"no decode worker has joined; {advice}"
    return Failure(status=503, type=SERVER_ERROR, code="no_worker", message=message, retry_after_s=RETRY_AFTER_S)


def broke_protocol(worker_id: WorkerId, what: str) -> Failure:
    return Failure(
        status=502,
        type=SERVER_ERROR,
        code="protocol_error",
        message=f"worker {worker_id} {what}; its answer is not to be trusted",
    )


def too_many_pending(max_pending: int) -> Failure:
    return _over_capacity(f"{max_pending} requests are pending")


def too_many_posted(max_posted: int) -> Failure:
    """Before its body is read."""
    return _over_capacity(f"{max_posted} requests are being sent or answered")


def too_many_body_bytes(max_bytes: int) -> Failure:
    return _over_capacity(f"bodies that are being sent come to {max_bytes} bytes")


def _over_capacity(what: str) -> Failure:
    return Failure(
        status=429,
        type=OVERLOADED,
        code="over_capacity",
        message=f"{what}, the most this gateway takes; try again later",
        retry_after_s=RETRY_AFTER_S,
    )


def worker_lost(worker_id: WorkerId) -> Failure:
    return Failure(
        status=503,
        type=SERVER_ERROR,
        code="worker_lost",
        message=f"worker {worker_id} was lost while it answered; try again",
        retry_after_s=RETRY_AFTER_S,
    )
