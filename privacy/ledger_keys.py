"""Where the keys that sign ledgers lie: `<ledger>.keys/<silo>.pem`, public halves beside them in `.pub` files."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

from secure_fvi.key_files import PASSPHRASE_VARIABLE, create_key, load_key, load_public_key

__all__ = ["PASSPHRASE_VARIABLE", "create_key", "key_path", "load_key", "load_public_key"]


def key_path(ledger: str | os.PathLike[str], silo: str) -> Path:
    """Where the private key of `silo` lies beside `ledger`. Characters that no file name should have are escaped."""
    ledger = Path(ledger)
    return ledger.with_name(ledger.name + ".keys") / (quote(silo, safe=" ") + ".pem")
