"""What every handler that generates holds around its work."""

import asyncio
import logging
from collections.abc import Generator
from contextlib import contextmanager

from pdserve.errors import PdserveError
from pdserve.gateway.dispatcher import Work
from pdserve.gateway.errors import failure_of
from pdserve.gateway.failures import RequestFailed
from pdserve.gateway.hub import Hub
from pdserve.gateway.open_requests import OpenRequest
from pdserve.gateway.request_record import RequestRecord
from pdserve.gateway.token_stream import TokenStream
from pdserve.ids import RequestId

_log = logging.getLogger(__name__)


class Works:
    """What one client's request has given to workers: as many works as it has prompts."""

    def __init__(self, hub: Hub, submitted: list[RequestId]) -> None:
        """`submitted` is filled with their ids."""
        self._hub = hub
        self._submitted = submitted

    def submit(self, work: Work) -> TokenStream:
        """Raises: `RequestFailed`, and then nothing of this work is pending."""
        self._submitted.append(work.request_id)
        return self._hub.submit(work)

    def release(self) -> None:
        """End those that have not ended."""
        for request_id in self._submitted:
            self._hub.release(request_id)


@contextmanager
def request_scope(request_id: RequestId, record: RequestRecord, hub: Hub) -> Generator[Works]:
    """Every way out of here ends the record, and leaves none of its works in the hub (rule H7)."""
    open_request = OpenRequest(request_id=request_id, record=record)
    works = Works(hub, open_request.work_ids)
    hub.open_requests.add(open_request)
    try:
        yield works
    except PdserveError as error:
        record.failed(failure_of(error))
        raise
    except RequestFailed as error:
        record.failed(error.failure)
        raise
    except (asyncio.CancelledError, ConnectionError):
        record.cancelled()
        raise
    finally:
        works.release()
        hub.open_requests.remove(request_id)
        _log.debug("request_ended request_id=%s outcome=%s", request_id, record.outcome)
