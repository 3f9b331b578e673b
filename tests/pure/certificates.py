"""Certificates made for one test run, on disk as an operator has them."""

import datetime
from pathlib import Path

import trustme

from pdserve.config.tls import TlsFiles


class Authority:
    """A CA of its own; `folder` gets its files."""

    def __init__(self, folder: Path, name: str = "cluster") -> None:
        self._ca = trustme.CA()
        self._folder = folder
        self._name = name
        self.ca = str(folder / f"{name}-ca.pem")
        self._ca.cert_pem.write_to_path(self.ca)

    def files(self, holder: str = "worker", *, not_after: datetime.datetime | None = None) -> TlsFiles:
        """A certificate, its key, and this CA."""
        issued = self._ca.issue_cert(f"{holder}.test", not_after=not_after)
        cert, key = (self._folder / f"{self._name}-{holder}.{end}" for end in ("pem", "key"))
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(key)
        return TlsFiles(cert=str(cert), key=str(key), ca=self.ca)
