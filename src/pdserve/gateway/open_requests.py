"""The clients' requests that handlers work on, each with what it gave to workers."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from pdserve.gateway.request_record import RequestRecord
from pdserve.ids import RequestId


@dataclass(slots=True, kw_only=True)
class OpenRequest:
    request_id: RequestId
    record: RequestRecord
    work_ids: list[RequestId] = field(default_factory=list[RequestId])
    """One a prompt; also those that have ended."""


class OpenRequests:
    """Bounded by the connections of clients. Threads: the event loop's only."""

    def __init__(self) -> None:
        self._by_id: dict[RequestId, OpenRequest] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(self._by_id.values())

    def add(self, request: OpenRequest) -> None:
        self._by_id[request.request_id] = request

    def remove(self, request_id: RequestId) -> None:
        del self._by_id[request_id]
