"""Whatever bytes come in, a codec makes a message of them or raises the peer's error, and never takes much memory.

For more of it: `python -m tests.pure.test_wire_fuzz --messages 1000000 --seed 1`.
"""

import argparse
import contextlib
import random
import sys
import time
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pure.wire_mutations import LYING_HEADERS, Mutator, crammed, messages_of

from pdserve.errors import RemoteProtocolError
from pdserve.wire.cluster import GatewayToWorker, WorkerToGateway
from pdserve.wire.codec import (
    MAX_MESSAGE_BYTES,
    Codec,
    decode_side_codec,
    gateway_codec,
    prefill_side_codec,
    worker_codec,
)
from pdserve.wire.peer import DecodeToPrefill, Message, PrefillToDecode

RECEIVERS: dict[str, tuple[Codec[Any], object]] = {
    "gateway": (gateway_codec(), WorkerToGateway),
    "worker": (worker_codec(), GatewayToWorker),
    "prefill side": (prefill_side_codec(), DecodeToPrefill),
    "decode side": (decode_side_codec(), PrefillToDecode),
}
MESSAGES_A_SEED = 50


def is_taken(codec: Codec[Any], received: bytes) -> bool:
    """Whether the bytes are a message; what is one goes out again as it came."""
    try:
        message = codec.decode(received, peer="p")
    except RemoteProtocolError as error:
        assert error.peer == "p"
        return False
    assert isinstance(message, Message)
    sent = codec.encode(message)
    assert codec.encode(codec.decode(sent, peer="p")) == sent
    return True


@settings(max_examples=30)
@given(seed=st.integers(0, 2**63))
@pytest.mark.parametrize("receiver", RECEIVERS)
def test_mutated_messages_are_messages_or_the_peers_error(receiver: str, seed: int) -> None:
    codec, union = RECEIVERS[receiver]
    mutator = Mutator(union, random.Random(seed))
    for _ in range(MESSAGES_A_SEED):
        is_taken(codec, mutator.next())


@settings(max_examples=200)
@given(received=st.binary(max_size=512))
@pytest.mark.parametrize("receiver", RECEIVERS)
def test_arbitrary_bytes_are_messages_or_the_peers_error(receiver: str, received: bytes) -> None:
    is_taken(RECEIVERS[receiver][0], received)


@pytest.mark.parametrize("receiver", RECEIVERS)
def test_mutations_reach_every_message_and_both_outcomes(receiver: str) -> None:
    """Else the tests above would show little."""
    codec, union = RECEIVERS[receiver]
    mutator = Mutator(union, random.Random(1))
    taken: set[str] = set()
    num_taken = 0
    for _ in range(2000):
        received = mutator.next()
        if is_taken(codec, received):
            num_taken += 1
            taken.add(type(codec.decode(received, peer="p")).__name__)
    assert taken == {message.cls.__name__ for message in messages_of(union)}
    assert 200 < num_taken < 1800


BOMBS = [
    *(header for header in LYING_HEADERS),
    *(b"\x82\xa4type\xafWorkerHeartbeat\xa5loads" + header for header in LYING_HEADERS),
    *(b"\x82\xa4type\xa5Grant\xa9token_ids" + header for header in LYING_HEADERS),
    b"\xdd\xff\xff\xff\xff" * 1000,
    b"\x91" * 100_000,
    b"\x81\xa4type" * 10_000,
]


@pytest.mark.parametrize("receiver", RECEIVERS)
def test_bytes_that_claim_gigabytes_take_no_more_than_they_have(receiver: str) -> None:
    codec, _ = RECEIVERS[receiver]
    for bomb in BOMBS:
        assert memory_of(codec, bomb) < 64 * 1024 + 2 * len(bomb)


@pytest.mark.parametrize("receiver", RECEIVERS)
def test_message_crammed_with_the_least_elements_takes_a_small_multiple_of_its_bytes(receiver: str) -> None:
    """A pair of two small numbers takes the most: 96 bytes where it is made, for the 3 that came."""
    codec, union = RECEIVERS[receiver]
    num_crammed = 0
    for message in messages_of(union):
        for value in crammed(message, num_elements=20_000):
            received = msgspec.msgpack.encode(value)
            assert memory_of(codec, received) < 36 * len(received), message.cls.__name__
            num_crammed += 1
    assert num_crammed > 0 or receiver == "decode side"


def memory_of(codec: Codec[Any], received: bytes) -> int:
    """The most bytes that decoding takes at a time, besides the received ones."""
    tracemalloc.start()
    try:
        with contextlib.suppress(RemoteProtocolError):
            codec.decode(received, peer="p")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000, help="of all receivers together")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    started = time.monotonic()
    num_taken = 0
    most_bytes = 0
    mutators = [(codec, Mutator(union, random.Random(arguments.seed))) for codec, union in RECEIVERS.values()]
    for index in range(arguments.messages):
        codec, mutator = mutators[index % len(mutators)]
        received = mutator.next()
        if index % 1000 < len(mutators):
            most_bytes = max(most_bytes, memory_of(codec, received))
        try:
            num_taken += is_taken(codec, received)
        except BaseException:
            sys.stdout.write(f"message {index} of seed {arguments.seed}: {received.hex()}\n")
            raise
    sys.stdout.write(
        f"messages={arguments.messages} taken={num_taken} refused={arguments.messages - num_taken} crashes=0 "
        f"seconds={time.monotonic() - started:.0f} most_traced_bytes={most_bytes} bound={MAX_MESSAGE_BYTES}\n"
    )


if __name__ == "__main__":
    main()
