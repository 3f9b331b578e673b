"""How the two ends of a connection prove to each other that they know the cluster secret, without sending it.

    dialled                               dialler
      | -- nonce of 32 bytes ---------------> |
      | <- nonce of 32 bytes, proof --------- |
      | -- proof ---------------------------> |   or the connection is closed with `REFUSED`

A proof is an HMAC-SHA256 under the secret over who proves it, for which conversation, and both nonces. So it is worth
nothing on another connection, at the other end, or on another endpoint. The dialled end proves itself last: who knows
nothing gets nothing to try secrets on. Neither end has taken a message before; see `docs/wire.md`.
"""

import hmac
import secrets
from enum import Enum

import aiohttp
from aiohttp import web

from pdserve.errors import AuthenticationError, PeerLost
from pdserve.wire.codec import Conversation

SUBPROTOCOL = "pdserve-hmac-sha256"
"""What a dialler that has a secret asks for, and one that has none does not."""

REFUSED = 4401
"""The close code of a wrong proof, from the range that WebSocket leaves to applications; after HTTP's 401."""

NONCE_BYTES = 32
PROOF_BYTES = 32

_LABEL = b"pdserve control connection"


class End(Enum):
    """Of a connection."""

    DIALLED = b"dialled"
    DIALLER = b"dialler"


def proof(secret: str, end: End, conversation: Conversation, *, dialled_nonce: bytes, dialler_nonce: bytes) -> bytes:
    """What `end` sends to show that it knows `secret`."""
    # No two inputs are told alike: the nonces have a fixed length, and nothing before them holds a zero byte.
    told = b"\0".join((_LABEL, end.value, conversation.value.encode(), dialled_nonce + dialler_nonce))
    return hmac.digest(secret.encode("utf-8", "surrogateescape"), told, "sha256")


def asks_for_proof(request: web.BaseRequest) -> bool:
    """Whether who sent the upgrade has a secret."""
    offers = ",".join(request.headers.getall("Sec-WebSocket-Protocol", ()))
    return SUBPROTOCOL in (offer.strip() for offer in offers.split(","))


async def authenticate_dialler(connection: web.WebSocketResponse, secret: str, conversation: Conversation) -> None:
    """The dialled end. Requires: the caller's deadline. Raises: `AuthenticationError`, `PeerLost`."""
    dialled_nonce = secrets.token_bytes(NONCE_BYTES)
    await connection.send_bytes(dialled_nonce)
    answer = await _receive(connection, num_bytes=NONCE_BYTES + PROOF_BYTES, peer="the dialler")
    dialler_nonce, given = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    wanted = proof(secret, End.DIALLER, conversation, dialled_nonce=dialled_nonce, dialler_nonce=dialler_nonce)
    if not hmac.compare_digest(given, wanted):
        raise AuthenticationError("the proof is wrong: its cluster secret is another one")
    ours = proof(secret, End.DIALLED, conversation, dialled_nonce=dialled_nonce, dialler_nonce=dialler_nonce)
    await connection.send_bytes(ours)


async def authenticate_dialled(
    connection: aiohttp.ClientWebSocketResponse, secret: str, conversation: Conversation, *, url: str
) -> None:
    """The dialler's end. Requires: the caller's deadline. Raises: `AuthenticationError`, `PeerLost`."""
    if connection.protocol != SUBPROTOCOL:
        raise AuthenticationError(f"{url} does not ask for the cluster secret; set PDSERVE_CLUSTER_SECRET there too")
    dialled_nonce = await _receive(connection, num_bytes=NONCE_BYTES, peer=url)
    dialler_nonce = secrets.token_bytes(NONCE_BYTES)
    ours = proof(secret, End.DIALLER, conversation, dialled_nonce=dialled_nonce, dialler_nonce=dialler_nonce)
    await connection.send_bytes(dialler_nonce + ours)
    given = await _receive(connection, num_bytes=PROOF_BYTES, peer=url)
    wanted = proof(secret, End.DIALLED, conversation, dialled_nonce=dialled_nonce, dialler_nonce=dialler_nonce)
    if not hmac.compare_digest(given, wanted):
        raise AuthenticationError(f"{url} did not prove that it knows our cluster secret; both ends need the same one")


async def _receive(
    connection: web.WebSocketResponse | aiohttp.ClientWebSocketResponse, *, num_bytes: int, peer: str
) -> bytes:
    incoming = await connection.receive()
    if incoming.type is aiohttp.WSMsgType.BINARY and len(incoming.data) == num_bytes:
        return incoming.data
    if incoming.type is aiohttp.WSMsgType.CLOSE and incoming.data == REFUSED:
        raise AuthenticationError(f"{peer} refuses our cluster secret; both ends need the same one")
    if incoming.type in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.ERROR):
        raise AuthenticationError(f"{peer} sent something else than the {num_bytes} bytes of a proof")
    raise PeerLost(f"{peer} left before it was authenticated", peer=peer)
