"""What a ledger says about a data set, for reports: budget, jobs, spent and remaining. Reading needs no key.

Everything here is public within the federation.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.privacy.accounting import epsilon_of_rdp, filter_of, job_curve
from secure_fvi.privacy.chain import Row
from secure_fvi.privacy.chain_file import ChainFile, shown_by, verify_chain
from secure_fvi.privacy.ledger import BudgetRecord, Chain, JobRecord
from secure_fvi.privacy.ledger_terms import JOB, LEDGER, Budget
from secure_fvi.privacy.witness import check_receipt


class Account(NamedTuple):
    """One data set of one silo. Times: microseconds since 1970, UTC."""

    silo: str
    data_set: str
    budget: Budget  # in force
    history: tuple[BudgetRecord, ...]  # oldest first
    jobs: tuple[JobRecord, ...]  # in the order of their charging
    curve: NDArray[np.float64]  # total Renyi DP of all jobs over accounting.ORDERS, nats
    epsilon: float  # of that curve at the budget's delta by plain conversion, for information
    remaining: float  # epsilon, at the budget's delta, of the largest Gaussian release that still fits
    length: int  # rows of the silo's whole chain
    head: bytes  # hash of the newest: 32 bytes


class Entry(NamedTuple):
    """A row that concerns a data set. fields: as written, see ledger_state."""

    seq: int
    time: int
    kind: str
    fields: dict[str, Any]


def account(chain: Chain, data_set: str) -> Account:
    """The state of `data_set`; raises InputError if the chain has no budget for it."""
    budget = chain.budget(data_set)
    if budget is None:
        known = ", ".join(chain.budgets) or "none"
        raise InputError(f"the ledger of silo '{chain.silo}' knows no data set '{data_set}'; it knows {known}")
    jobs = chain.charged(data_set)
    rule = filter_of(budget, [r.job for r in jobs])
    return Account(
        silo=chain.silo,
        data_set=data_set,
        budget=budget,
        history=tuple(chain.budgets[data_set]),
        jobs=tuple(jobs),
        curve=rule.spent,
        epsilon=epsilon_of_rdp(rule.spent, budget.delta),
        remaining=rule.remaining(),
        length=chain.length,
        head=chain.head,
    )


def entries(path: str | os.PathLike[str], silo: str, data_set: str) -> list[Entry]:
    """The rows of `silo` that concern `data_set`, oldest first: budgets, jobs, their releases and closings.

    Checked like `read_ledger`.
    """
    file, chain, found = ChainFile(Path(path), LEDGER, read_only=True), Chain(silo), []
    try:
        for row in file.rows(silo):
            chain.follow(row)
            fields = row.fields()
            record = chain.jobs.get(fields.get("job", ""))
            if (record.job.data_set if record else fields.get("data_set")) == data_set:
                found.append(Entry(row.seq, row.time, row.kind, fields))
        chain.check_head()
    finally:
        file.close()
    return found


# ---- Checking a ledger from the outside: every row, every signature, every budget. Needs no private key ----
#
# What a chain alone cannot show is that its newest rows were cut off, or that an old copy was put back; receipts of
# witnesses can (`witness`).


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
    newest = list(chain.jobs.values())[-1]
    before = [r.job for r in chain.charged(newest.job.data_set)[:-1]]
    asked = job_curve(newest.job)
    # Curves differ in their last digits from machine to machine, and a job may have used its budget up to the last.
    if filter_of(newest.budget, before, asked).order_for(asked * (1 - 1e-9)) is None:
        raise ProtocolError(
            f"ledger of silo '{chain.silo}', row {row.seq}: job '{newest.job.job}' exceeds the budget of data set "
            f"'{newest.job.data_set}', {newest.budget}"
        )
