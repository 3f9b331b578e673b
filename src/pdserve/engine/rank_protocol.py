"""Messages between a worker and one of its rank processes, over a Unix socket that the rank inherits.

Frame: u32 little-endian length, then that many bytes of msgpack. Conversation: `RankStart`, answered by `RankReady`
(with descriptors of the rank's regions beside its first byte, see `pdserve.engine.rank_regions`) or `StartRefused`;
then any number of `RunPass`, each answered by `PassDone` or `RankFailed`, after which the rank exits. End of file on
either side ends both. All ranks are sent the same `RunPass`.
"""

import socket
from collections.abc import Iterator

import msgspec

from pdserve.engine.port import EngineSpec
from pdserve.errors import InternalError
from pdserve.schedule.batch import Batch, BatchResult

LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Far above the largest batch: 32 new sequences of 128 K tokens, 5 bytes a token, are 21 MB."""

MAX_REGIONS = 4
"""Of rank 0 with a drafter."""


class RankStart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="start"):
    spec: EngineSpec
    rank: int
    cpus: tuple[int, ...]
    """Of this rank alone."""
    rendezvous_fd: int | None
    """A file that all ranks inherited, in which they find each other; None for the only rank."""


class RankReady(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ready"):
    """The model is loaded."""


class StartRefused(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="refused"):
    """The spec can't be done; the operator reads `message`."""

    message: str


class RunPass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="run"):
    batch: Batch


class PassDone(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="done"):
    result: BatchResult
    """Of rank 0: with the sampled tokens; of the others: without."""


class RankFailed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="failed"):
    """The pass, or the start, met an error that is a bug; the rank is gone after it."""

    message: str
    lost_peer: bool
    """True when another rank was gone: this one is not the cause."""


RankRequest = RankStart | RunPass
RankReply = RankReady | StartRefused | PassDone | RankFailed

_encoder = msgspec.msgpack.Encoder()
request_decoder: "msgspec.msgpack.Decoder[RankRequest]" = msgspec.msgpack.Decoder(RankRequest)
reply_decoder: "msgspec.msgpack.Decoder[RankReply]" = msgspec.msgpack.Decoder(RankReply)


def encode_frame(message: RankRequest | RankReply) -> bytes:
    payload = _encoder.encode(message)
    if len(payload) > MAX_MESSAGE_BYTES:
        raise InternalError(f"a {type(message).__name__} of {len(payload)} bytes is over the bound")
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


def take_frames(received: bytearray) -> Iterator[bytes]:
    """The payloads of the whole frames in it, which are removed from it."""
    while len(received) >= LENGTH_BYTES:
        stop = LENGTH_BYTES + _frame_length(received[:LENGTH_BYTES])
        if len(received) < stop:
            return
        payload = bytes(received[LENGTH_BYTES:stop])
        del received[:stop]
        yield payload


def _frame_length(header: bytes | bytearray) -> int:
    length = int.from_bytes(header, "little")
    if length > MAX_MESSAGE_BYTES:
        raise InternalError(f"a message of {length} bytes between worker and rank is over the bound")
    return length


def receive_request(connection: socket.socket) -> RankRequest | None:
    """The next request, waiting for it; None at the end of the file, and when the worker was killed."""
    header = _receive_exactly(connection, LENGTH_BYTES)
    payload = _receive_exactly(connection, _frame_length(header)) if header is not None else None
    return request_decoder.decode(payload) if payload is not None else None


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes | None:
    received = bytearray()
    while len(received) < num_bytes:
        try:
            piece = connection.recv(num_bytes - len(received))
        except ConnectionResetError:  # a worker that was killed has left replies of ours unread
            return None
        if not piece:
            return None
        received += piece
    return bytes(received)
