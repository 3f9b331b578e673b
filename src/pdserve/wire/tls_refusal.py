"""What the two ends of a control connection say when one wants TLS and the other does not, or does not believe it."""

import ssl

import aiohttp

TLS_REQUIRED_STATUS = 426
"""Upgrade Required: the answer to who dials without TLS."""

_ADVICE = "start both ends with --tls-cert, --tls-key and --tls-ca, and dial https:// at the --control-port"

TLS_REQUIRED = f"control connections come in TLS here; {_ADVICE}"

NOT_IN_TLS = (
    f"HTTP/1.1 {TLS_REQUIRED_STATUS} Upgrade Required\r\nUpgrade: TLS/1.3\r\nConnection: close\r\n"
    f"Content-Type: text/plain\r\nContent-Length: {len(TLS_REQUIRED)}\r\n\r\n{TLS_REQUIRED}"
).encode()
"""The whole answer on a port where nothing but TLS is served."""


def needs_tls(url: str) -> str:
    return f"{url} takes control connections in TLS only; {_ADVICE}"


def has_no_tls(url: str) -> str:
    return f"{url} does not speak TLS, and we have --tls-cert; {_ADVICE}"


def distrust_of(url: str, error: BaseException) -> str | None:
    """Why TLS with `url` failed for good; None where the connection just ended."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = error.certificate_error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"the certificate of {url} is refused: {cause.verify_message}; it needs one of our --tls-ca"
    if isinstance(cause, ssl.SSLError):
        return has_no_tls(url) if cause.reason == "WRONG_VERSION_NUMBER" else f"TLS with {url} failed: {cause.reason}"
    return None


def end_of(url: str, error: BaseException) -> str:
    """What a lost connection to `url` may mean besides."""
    cut = isinstance(error, aiohttp.ServerDisconnectedError | ConnectionResetError) or isinstance(
        error.__cause__, ConnectionResetError
    )
    if cut and url.startswith("https://"):
        return f"can't reach {url}: it closed the connection; does it want a certificate? {_ADVICE}"
    return f"can't reach {url}: {error}"
