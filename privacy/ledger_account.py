"""What a ledger says about a data set, for reports: budget, jobs, spent and remaining. Reading needs no key.

Everything here is public within the federation.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from secure_fvi.errors import InputError
from secure_fvi.privacy.chain_file import ChainFile
from secure_fvi.privacy.ledger_state import BudgetRecord, Chain, JobRecord, read_chain
from secure_fvi.privacy.ledger_terms import LEDGER, Budget


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


def read_ledger(path: str | os.PathLike[str], silo: str | None = None) -> dict[str, Chain]:
    """The chains in the file, or that of `silo`, by silo id; links and newest signatures are checked.

    Raises InputError where there is none, ProtocolError for one that was tampered with.
    """
    file = ChainFile(Path(path), LEDGER, read_only=True)
    try:
        chains = {s: read_chain(file, s) for s in (file.silos() if silo is None else [silo])}
    finally:
        file.close()
    if not chains or any(not c.length for c in chains.values()):
        raise InputError(f"'{path}' holds no ledger" + (f" of silo '{silo}'" if silo is not None else ""))
    return chains


def account(chain: Chain, data_set: str) -> Account:
    """The state of `data_set`; raises InputError if the chain has no budget for it."""
    from secure_fvi.privacy.accounting import epsilon_of_rdp, filter_of

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
