"""What TLS needs of a site."""

from __future__ import annotations

from typing import NamedTuple


class TlsFiles(NamedTuple):
    """PEM: private key, certificate, the authority's certificate. The key does not show in a repr."""

    private_key: bytes
    certificate: bytes
    authority: bytes

    def __repr__(self) -> str:
        return "TlsFiles(...)"
