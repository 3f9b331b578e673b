"""Every error that pdserve raises on purpose.

PdserveError
├── ConfigError                what the operator asked for can't be done; nothing was started
├── RequestError               what the client asked for can't be done; carries the field's name
│   ├── InvalidField           a field has a wrong type or value
│   ├── UnsupportedField       a field is known, but not supported
│   ├── ModelNotFound          no such model is served here
│   └── ContextOverflow        the prompt, or prompt plus max_tokens, is longer than the context
├── AuthenticationError        the key is missing or wrong
├── WireError                  a message broke the protocol
│   ├── LocalProtocolError     we broke it: a bug
│   └── RemoteProtocolError    the peer broke it
├── FabricError                a libfabric operation failed; carries operation, errno, peer
├── HandoffError               one handoff failed; the request may be retried
│   ├── HandoffTimeout         a deadline passed
│   ├── HandoffCancelled       somebody cancelled it
│   ├── PeerLost               the other side is gone
│   └── LayoutMismatch         the two sides do not describe the same KV cache
├── CapacityError              full; expected; come back after `retry_after_s`
└── InternalError              a bug
"""

from typing import final


class PdserveError(Exception):
    """The root. `message` says what happened and what to do about it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


@final
class ConfigError(PdserveError):
    """What the operator asked for can't be done. The CLI prints one line and exits with 2."""


class RequestError(PdserveError):
    """What the client asked for can't be done. `param` names the field, in the client's words."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@final
class InvalidField(RequestError):
    pass


@final
class UnsupportedField(RequestError):
    pass


@final
class ModelNotFound(RequestError):
    pass


@final
class ContextOverflow(RequestError):
    pass


@final
class AuthenticationError(PdserveError):
    pass


class WireError(PdserveError):
    """A message broke the protocol. `peer` is the worker or address at the other end."""

    def __init__(self, message: str, *, peer: str | None = None) -> None:
        super().__init__(message)
        self.peer = peer


@final
class LocalProtocolError(WireError):
    pass


@final
class RemoteProtocolError(WireError):
    pass


@final
class FabricError(PdserveError):
    """A libfabric operation failed. `errno` is libfabric's positive error number, 0 when it gave none."""

    def __init__(self, message: str, *, operation: str, errno: int = 0, peer: str | None = None) -> None:
        super().__init__(message)
        self.operation = operation
        self.errno = errno
        self.peer = peer


class HandoffError(PdserveError):
    """One handoff failed; the request itself may be retried on another peer or locally."""

    def __init__(self, message: str, *, peer: str | None = None, request_id: str | None = None) -> None:
        super().__init__(message)
        self.peer = peer
        self.request_id = request_id


@final
class HandoffTimeout(HandoffError):
    pass


@final
class HandoffCancelled(HandoffError):
    pass


@final
class PeerLost(HandoffError):
    pass


@final
class LayoutMismatch(HandoffError):
    """The two sides differ in `field`; both values are kept."""

    def __init__(self, *, field: str, ours: object, theirs: object, peer: str | None = None) -> None:
        super().__init__(f"KV caches differ in {field}: ours is {ours!r}, the peer's is {theirs!r}", peer=peer)
        self.field = field
        self.ours = ours
        self.theirs = theirs


@final
class CapacityError(PdserveError):
    """Something bounded is full. Expected under load: shed or retry after `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@final
class InternalError(PdserveError):
    """A bug in pdserve; please report it with the log."""
