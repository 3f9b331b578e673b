"""Who a process is on control connections, and whom it believes: a certificate, its key, and the cluster's CA."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Paths of PEM files."""

    cert: str
    """Our certificate; those between it and the CA follow it."""
    key: str
    """Its private key, not encrypted: nobody is there to type a passphrase."""
    ca: str
    """Whose certificates are believed. Every one of them is let in, so it is a CA of the cluster's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Both ends show a certificate of the CA; TLS 1.3. Lifetime: the files are read once, when it is made."""

    files: TlsFiles
    listener: ssl.SSLContext = field(repr=False)
    dialler: ssl.SSLContext = field(repr=False)


def load_tls(files: TlsFiles) -> Tls:
    """Ready to use: the two ends have shaken hands with each other in memory.

    Raises: `ConfigError` when a file can't be read, the key is another certificate's, or the CA does not vouch for the
    certificate now.
    """
    tls = Tls(
        files=files,
        listener=_context(ssl.PROTOCOL_TLS_SERVER, files),
        dialler=_context(ssl.PROTOCOL_TLS_CLIENT, files),
    )
    try:
        _shake_hands(tls)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"--tls-cert {files.cert} would be refused: {error.verify_message}; "
            f"take a certificate that is valid now and signed by --tls-ca {files.ca}"
        ) from error
    except ssl.SSLError as error:
        raise ConfigError(f"--tls-cert {files.cert} can't be used for TLS 1.3: {error.reason}") from error
    return tls


def load_api_tls(*, cert: str, key: str) -> ssl.SSLContext:
    """For a listener that asks clients for no certificate. Raises: `ConfigError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_pair(context, cert=("--ssl-certfile", cert), key=("--ssl-keyfile", key))
    return context


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Workers come and go at any address, so a certificate says that its holder is of the cluster, not where.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    _load_pair(context, cert=("--tls-cert", files.cert), key=("--tls-key", files.key))
    _require_file("--tls-ca", files.ca)
    try:
        context.load_verify_locations(cafile=files.ca)
    except ssl.SSLError as error:
        raise ConfigError(f"--tls-ca {files.ca} holds no certificate in PEM form") from error
    return context


def _load_pair(context: ssl.SSLContext, *, cert: tuple[str, str], key: tuple[str, str]) -> None:
    """Each is a flag and the path it was given."""
    (cert_flag, cert_path), (key_flag, key_path) = cert, key
    _require_file(cert_flag, cert_path)
    _require_file(key_flag, key_path)
    try:
        context.load_cert_chain(cert_path, key_path, password=_no_passphrase)
    except _Encrypted as error:
        raise ConfigError(f"{key_flag} {key_path} is encrypted; write it without a passphrase") from error
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{key_flag} {key_path} is not the key of {cert_flag} {cert_path}") from error
        raise ConfigError(f"{cert_flag} {cert_path} or {key_flag} {key_path} is not in PEM form") from error


class _Encrypted(Exception):
    """A key asks for a passphrase."""


def _no_passphrase() -> str:
    raise _Encrypted


def _require_file(flag: str, path: str) -> None:
    """Raises: `ConfigError` when it can't be read."""
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path} can't be read: {error.strerror}") from error


def _shake_hands(tls: Tls) -> None:
    """As a listener and a dialler with these files would. Raises: `ssl.SSLError`."""
    to_listener, to_dialler = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        tls.dialler.wrap_bio(to_dialler, to_listener),
        tls.listener.wrap_bio(to_listener, to_dialler, server_side=True),
    ]
    # TLS 1.3 takes a hello, an answer, and a certificate back: each end is done at its second turn.
    for end in (*ends, *ends):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
