"""What every handler that generates holds around its work."""

import asyncio
import logging
from collections.abc import Generator
from contextlib import contextmanager

from pdserve.errors import PdserveError
from pdserve.gateway.errors import failure_of
from pdserve.gateway.failures import RequestFailed
from pdserve.gateway.hub import Hub
from pdserve.gateway.request_record import RequestRecord
from pdserve.ids import RequestId

_log = logging.getLogger(__name__)


@contextmanager
def request_scope(request_id: RequestId, record: RequestRecord, hub: Hub) -> Generator[None]:
    """Every way out of here ends the record, and leaves nothing of the request in the hub (rule H7)."""
    try:
        yield
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
        hub.release(request_id)
        _log.debug("request_ended request_id=%s outcome=%s", request_id, record.outcome)
