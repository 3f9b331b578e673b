"""Bytes to messages and back: msgpack, typed, bounded. Nothing is unpickled, no class is chosen by the peer."""

from enum import Enum
from typing import Generic, TypeVar

import msgspec

from pdserve.errors import LocalProtocolError, RemoteProtocolError
from pdserve.units import MIB
from pdserve.wire.cluster import GatewayToWorker, WorkerToGateway
from pdserve.wire.peer import DecodeToPrefill, Message, PrefillToDecode

MAX_MESSAGE_BYTES = 8 * MIB
"""A grant of a 1,000,000-token prompt takes 5 bytes a token and 5 a page of 16: 5.4 MB."""

T = TypeVar("T")


class Conversation(Enum):
    """Between whom a connection is."""

    CLUSTER = "cluster"
    """A worker and the gateway."""
    PEER = "peer"
    """A decode worker and a prefill worker."""


class Codec(Generic[T]):
    """Encodes any message, decodes only the union it was made for."""

    def __init__(self, incoming: object, conversation: Conversation) -> None:
        self.conversation = conversation
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(incoming)  # pyright: ignore[reportArgumentType]

    def encode(self, message: Message) -> bytes:
        """Raises: `LocalProtocolError` when the message is over the bound."""
        encoded = self._encoder.encode(message)
        if len(encoded) > MAX_MESSAGE_BYTES:
            raise LocalProtocolError(
                f"{type(message).__name__} has {len(encoded)} bytes, the most is {MAX_MESSAGE_BYTES}"
            )
        return encoded

    def decode(self, data: bytes, *, peer: str) -> T:
        """Raises: `RemoteProtocolError` when the bytes are no message of the union."""
        if len(data) > MAX_MESSAGE_BYTES:
            raise RemoteProtocolError(f"message of {len(data)} bytes, the most is {MAX_MESSAGE_BYTES}", peer=peer)
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise RemoteProtocolError(f"malformed message: {error}", peer=peer) from error


def decode_side_codec() -> "Codec[PrefillToDecode]":
    return Codec(PrefillToDecode, Conversation.PEER)


def prefill_side_codec() -> "Codec[DecodeToPrefill]":
    return Codec(DecodeToPrefill, Conversation.PEER)


def worker_codec() -> "Codec[GatewayToWorker]":
    return Codec(GatewayToWorker, Conversation.CLUSTER)


def gateway_codec() -> "Codec[WorkerToGateway]":
    return Codec(WorkerToGateway, Conversation.CLUSTER)
