"""A rank process: `python -m pdserve.engine.rank FD`, where FD is the socket to the worker.

Ends when the worker's end of the socket closes, in the middle of a pass too, so that no rank outlives its worker.
"""

import logging
import os
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

from pdserve.engine.rank_protocol import (
    PassDone,
    RankFailed,
    RankReady,
    RankReply,
    RankStart,
    RunPass,
    StartRefused,
    encode_frame,
    receive_request,
)
from pdserve.engine.shape import sharding_of
from pdserve.errors import ConfigError, InternalError
from pdserve.model.config import read_config

_log = logging.getLogger(__name__)


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s rank %(message)s")
    # Ctrl-C goes to the whole process group; the worker decides when its rank ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_exit_with_worker, args=(connection,), daemon=True).start()
    try:
        return _serve(connection)
    except ConfigError as error:
        _send(connection, StartRefused(message=error.message))
        return 2
    except Exception as error:
        lost_peer = isinstance(error.__cause__, ConnectionError)
        if not lost_peer:
            _log.exception("rank_failed")
        _send(connection, RankFailed(message=f"{type(error).__name__}: {error}", lost_peer=lost_peer))
        return 1


def _exit_with_worker(connection: socket.socket) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def _send(connection: socket.socket, reply: RankReply) -> None:
    """To nobody when the worker is gone: the next read tells."""
    with suppress(ConnectionError):
        connection.sendall(encode_frame(reply))


def _serve(connection: socket.socket) -> int:
    start = receive_request(connection)
    if not isinstance(start, RankStart):
        raise InternalError(f"the first request must be a start, not {type(start).__name__}")
    config = read_config(Path(start.spec.model_dir))
    sharding = sharding_of(config, start.spec)
    # Before torch starts its threads, which inherit the mask.
    if start.cpus:
        os.sched_setaffinity(0, start.cpus)

    from pdserve.engine.loading import load_rank

    loaded = load_rank(config, sharding.rank_layout, start)
    frame = encode_frame(RankReady())
    # The descriptors travel with the first byte; a partial send after it carries none.
    sent = socket.send_fds(connection, [frame], [region.fd for region in loaded.regions.all])
    connection.sendall(frame[sent:])
    while (request := receive_request(connection)) is not None:
        if not isinstance(request, RunPass):
            raise InternalError(f"a {type(request).__name__} came where a pass was due")
        _send(connection, PassDone(result=loaded.runner.run(request.batch)))
    return 0


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    # Without the destructors of torch.distributed, which may abort when other ranks are gone.
    os._exit(exit_code)
