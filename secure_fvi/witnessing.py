"""Silos countersign each other's ledgers when a job starts and when it ends, where one process plays them all.

A chain cannot tell by itself that its tail was cut or that it is an old copy; another party that has seen it can. The
statements and receipts are the bytes that institutions would exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from secure_fvi.aggregation.store import SqliteStore
from secure_fvi.privacy.ledger import Ledger
from secure_fvi.privacy.ledger_keys import key_path, load_key
from secure_fvi.privacy.witness import Witness

#: Others that countersign a ledger: enough that one of them is honest, few enough to cost nothing.
WITNESSES = 2


def countersign(path: Path, ledgers: Mapping[str, Ledger]) -> None:
    """Have each ledger in the file `path` countersigned by the silos that follow it in the order of their names.

    Raises ProtocolError, before anything is charged if called then, for a ledger that was cut or rolled back.
    """
    names = sorted(ledgers)
    others = {
        name: [names[(i + k) % len(names)] for k in range(1, min(WITNESSES, len(names) - 1) + 1)]
        for i, name in enumerate(names)
    }
    for witness_name in names:
        identity = load_key(key_path(path, witness_name))
        store = SqliteStore(key_path(path, witness_name).with_suffix(".seen"))
        witness = Witness(witness_name, identity, store)
        for name, asked in others.items():
            if witness_name in asked:
                ledger = ledgers[name]
                key = ledger.chain.public_key
                receipt = witness.countersign(ledger.statement(witness.length(key)), key)
                ledger.add_receipt(receipt, identity.public_key)
        store.close()
