"""Files that an operator names for TLS: what is wrong with them is said at start, in one line."""

import argparse
import datetime
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from tests.pure.certificates import Authority

from pdserve.cli.tls import add_tls_flags, requested_tls, tls_flags
from pdserve.config.tls import TlsFiles, load_api_tls, load_tls
from pdserve.errors import ConfigError

YESTERDAY = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def files(authority: Authority) -> TlsFiles:
    return authority.files()


def arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_tls_flags(parser)
    return parser.parse_args(flags)


def test_flags_that_fit_survive_the_way_to_a_child(files: TlsFiles) -> None:
    flags = ("--tls-cert", files.cert, "--tls-key", files.key, "--tls-ca", files.ca)
    tls = requested_tls(arguments(*flags))
    assert tls is not None
    assert (tls.files, tls_flags(tls)) == (files, flags)


def test_flags_left_out_ask_for_no_tls() -> None:
    assert requested_tls(arguments()) is None
    assert tls_flags(None) == ()


def test_flags_given_in_part_are_refused_with_those_that_are_missing(files: TlsFiles) -> None:
    with pytest.raises(ConfigError, match="add --tls-key and --tls-ca"):
        requested_tls(arguments("--tls-cert", files.cert))


@pytest.mark.parametrize("field", ["cert", "key", "ca"])
def test_file_that_is_missing_or_no_pem_is_named(files: TlsFiles, tmp_path: Path, field: str) -> None:
    with pytest.raises(ConfigError, match=f"--tls-{field} /nowhere can't be read: No such file"):
        load_tls(replace(files, **{field: "/nowhere"}))
    (tmp_path / "text").write_text("no PEM")
    with pytest.raises(ConfigError, match=rf"--tls-{field} {tmp_path}/text .*in PEM form"):
        load_tls(replace(files, **{field: str(tmp_path / "text")}))


def test_key_of_another_certificate_is_refused(authority: Authority, files: TlsFiles) -> None:
    with pytest.raises(ConfigError, match=r"--tls-key .*other\.key is not the key of --tls-cert"):
        load_tls(replace(files, key=authority.files("other").key))


def test_key_with_a_passphrase_is_refused(files: TlsFiles, tmp_path: Path) -> None:
    """Nobody is asked for one: a worker that waits for a terminal never starts."""
    key = load_pem_private_key(Path(files.key).read_bytes(), password=None)
    encrypted = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"sesame"))
    (tmp_path / "encrypted.key").write_bytes(encrypted)
    with pytest.raises(ConfigError, match=r"encrypted\.key is encrypted; write it without a passphrase"):
        load_tls(replace(files, key=str(tmp_path / "encrypted.key")))


def test_certificate_that_expired_is_refused(authority: Authority) -> None:
    with pytest.raises(ConfigError, match="certificate has expired"):
        load_tls(authority.files("old", not_after=YESTERDAY))


def test_certificate_of_another_authority_is_refused(files: TlsFiles, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"would be refused: .*signed by --tls-ca"):
        load_tls(replace(files, ca=Authority(tmp_path, "other").ca))


def test_pair_for_clients_needs_no_authority_and_must_fit(authority: Authority, files: TlsFiles) -> None:
    load_api_tls(cert=files.cert, key=files.key)
    with pytest.raises(ConfigError, match=r"--ssl-keyfile .* is not the key of --ssl-certfile"):
        load_api_tls(cert=files.cert, key=authority.files("other").key)
