"""Flags for certificates on control connections."""

import argparse
import ssl

from pdserve.config.tls import Tls, TlsFiles, load_api_tls, load_tls
from pdserve.errors import ConfigError


def add_tls_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("TLS on control connections; all three or none")
    group.add_argument("--tls-cert", metavar="PEM", help="certificate of this process, from the cluster's own CA")
    group.add_argument("--tls-key", metavar="PEM", help="its private key")
    group.add_argument("--tls-ca", metavar="PEM", help="the CA; whoever has a certificate of it is let in")


def add_api_tls_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("TLS for clients; both or none")
    group.add_argument("--ssl-certfile", metavar="PEM", help="certificate that clients are shown on --port")
    group.add_argument("--ssl-keyfile", metavar="PEM", help="its private key")


def requested_api_tls(arguments: argparse.Namespace) -> ssl.SSLContext | None:
    """None without the flags. Raises: `ConfigError` when one is missing, or the files are of no use."""
    cert, key = arguments.ssl_certfile, arguments.ssl_keyfile
    if not cert and not key:
        return None
    if not cert or not key:
        raise ConfigError("TLS for clients takes --ssl-certfile and --ssl-keyfile together")
    return load_api_tls(cert=cert, key=key)


def requested_tls(arguments: argparse.Namespace) -> Tls | None:
    """None without the flags. Raises: `ConfigError` when some are missing, or the files are of no use."""
    given = {flag: getattr(arguments, flag) for flag in ("tls_cert", "tls_key", "tls_ca")}
    if not any(given.values()):
        return None
    missing = [f"--{flag.replace('_', '-')}" for flag, path in given.items() if not path]
    if missing:
        raise ConfigError(f"TLS takes --tls-cert, --tls-key and --tls-ca together: add {' and '.join(missing)}")
    return load_tls(TlsFiles(cert=arguments.tls_cert, key=arguments.tls_key, ca=arguments.tls_ca))


def control_port(arguments: argparse.Namespace, tls: Tls | None, *, default: int) -> int:
    """Where control connections come in with `tls`. Raises: `ConfigError` when a port is given without it."""
    if arguments.control_port is None:
        return default
    if tls is None:
        raise ConfigError(
            "--control-port is for control connections in TLS: give --tls-cert, --tls-key and --tls-ca too"
        )
    return arguments.control_port


def tls_flags(tls: Tls | None) -> tuple[str, ...]:
    """The flags, spelled out for a child."""
    if tls is None:
        return ()
    return ("--tls-cert", tls.files.cert, "--tls-key", tls.files.key, "--tls-ca", tls.files.ca)
