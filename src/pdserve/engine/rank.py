"""The rank process: `python -m pdserve.engine.rank FD`, where FD is the socket to the worker.

Ends when the worker's end of the socket closes, in the middle of a pass too, so that no rank outlives its worker.
"""

import logging
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path

from pdserve.engine.port import EngineInfo, EngineSpec
from pdserve.engine.rank_protocol import (
    PassDone,
    PassFailed,
    RankReady,
    RankReply,
    RankStart,
    RunPass,
    StartRefused,
    encode_frame,
    receive_request,
)
from pdserve.errors import ConfigError, InternalError
from pdserve.kv.layout import DTYPE_BYTES, KvLayout
from pdserve.model.checkpoint import fingerprint
from pdserve.model.config import ModelConfig, read_config

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
        _log.exception("rank_failed")
        _send(connection, PassFailed(message=f"{type(error).__name__}: {error}"))
        return 1


def _exit_with_worker(connection: socket.socket) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def _send(connection: socket.socket, reply: RankReply) -> None:
    connection.sendall(encode_frame(reply))


def _serve(connection: socket.socket) -> int:
    start = receive_request(connection)
    if not isinstance(start, RankStart):
        raise InternalError(f"the first request must be a start, not {type(start).__name__}")
    spec = start.spec
    model_dir = Path(spec.model_dir)
    config = read_config(model_dir)
    layout = kv_layout(config, spec)
    # Before torch starts its threads, which inherit the mask.
    if spec.cpus:
        os.sched_setaffinity(0, spec.cpus)

    from pdserve.engine.kv_storage import tail_slot_bytes
    from pdserve.engine.loading import load_runner

    runner, storage = load_runner(model_dir, config, layout, spec)
    info = EngineInfo(
        layout=layout,
        num_pages=spec.num_pages,
        num_tail_slots=spec.num_tail_slots,
        tail_slot_bytes=tail_slot_bytes(hidden_dim=config.hidden_dim, dtype=spec.dtype),
        max_model_len=config.max_model_len,
        model_fingerprint=fingerprint(model_dir, config),
        pid=os.getpid(),
    )
    regions = (storage.kv_region, storage.tail_region, storage.counter_region)
    frame = encode_frame(RankReady(info=info))
    # The descriptors travel with the first byte; a partial send after it carries none.
    sent = socket.send_fds(connection, [frame], [region.fd for region in regions])
    connection.sendall(frame[sent:])
    while (request := receive_request(connection)) is not None:
        if not isinstance(request, RunPass):
            raise InternalError(f"a {type(request).__name__} came where a pass was due")
        _send(connection, PassDone(result=runner.run(request.batch)))
    return 0


def kv_layout(config: ModelConfig, spec: EngineSpec) -> KvLayout:
    if spec.dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype {spec.dtype!r} is not supported; known are {', '.join(DTYPE_BYTES)}")
    return KvLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_slots=spec.page_slots,
        dtype=spec.dtype,
    )


if __name__ == "__main__":
    sys.exit(main())
