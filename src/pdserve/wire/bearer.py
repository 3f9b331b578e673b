"""The bearer token that a request carries: a client's API key, or the cluster's secret."""

import hmac

from aiohttp import web


def bearer_headers(token: str | None) -> dict[str, str]:
    """What a request is sent with; nothing when there is no token."""
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def authorised(request: web.BaseRequest, secret: str | None) -> bool:
    """Whether the request carries `secret` as its bearer token; always, when there is no secret. Constant time."""
    if secret is None:
        return True
    given = request.headers.get("Authorization", "")
    return hmac.compare_digest(
        given.encode("utf-8", "surrogateescape"), f"Bearer {secret}".encode("utf-8", "surrogateescape")
    )
