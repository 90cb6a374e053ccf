"""Checking a ledger from the outside: every row, every signature, every budget. Needs no private key.

What a chain alone cannot show is that its newest rows were cut off, or that an old copy was put back; receipts of
witnesses can (`witness`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.privacy.chain import Row
from secure_fvi.privacy.chain_file import ChainFile
from secure_fvi.privacy.chain_verify import shown_by, verify_chain
from secure_fvi.privacy.ledger_chain import JOB, LEDGER
from secure_fvi.privacy.ledger_state import Chain
from secure_fvi.privacy.witness import check_receipt


def verify(
    path: str | os.PathLike[str],
    silo: str | None = None,
    public_key: bytes | None = None,
    receipts: Iterable[bytes] = (),
    witness_keys: Iterable[bytes] | None = None,
) -> list[Chain]:
    """Check all chains of the file, or that of `silo`, and return them.

    public_key: of 32 bytes; pins the key of the chain. receipts: bytes from `Witness.countersign`. witness_keys: the
    keys whose receipts count; by default each receipt's own, since all hold what the ledger's own key has signed.
    Raises ProtocolError that names the first bad row and what is wrong with it; InputError for a file or row that
    this version cannot read.
    """
    keys = None if witness_keys is None else frozenset(witness_keys)
    shown = [check_receipt(data, keys) for data in receipts]
    file = ChainFile(Path(path), LEDGER, read_only=True)
    try:
        silos = file.silos() if silo is None else [silo]
        if public_key is not None and len(silos) > 1:
            raise InputError(f"'{path}' holds {len(silos)} ledgers; say whose key it is by its silo")
        chains = [
            verify_chain(file, Chain(s), public_key, [r for r in shown if r.silo == s], _check_budget) for s in silos
        ]
    finally:
        file.close()
    if not chains:
        raise InputError(f"'{path}' holds no ledger")
    for receipt in shown:
        if receipt.silo not in silos:
            raise ProtocolError(f"{shown_by(receipt)} is about a ledger of silo '{receipt.silo}', which is not here")
    return chains


def _check_budget(chain: Chain, row: Row) -> None:
    if row.kind != JOB:
        return
    from secure_fvi.privacy.accounting import filter_of, job_curve

    newest = list(chain.jobs.values())[-1]
    before = [r.job for r in chain.charged(newest.job.data_set)[:-1]]
    asked = job_curve(newest.job)
    # Curves differ in their last digits from machine to machine, and a job may have used its budget up to the last.
    if filter_of(newest.budget, before, asked).order_for(asked * (1 - 1e-9)) is None:
        raise ProtocolError(
            f"ledger of silo '{chain.silo}', row {row.seq}: job '{newest.job.job}' exceeds the budget of data set "
            f"'{newest.job.data_set}', {newest.budget}"
        )
