"""How a site stands, read from its folder: for `secure-fvi status`.

It reads what the site's processes write and needs none of them, so that it answers when they do not. No row of data and
no secret is in any of it.
"""

from __future__ import annotations

import datetime
from typing import Any, NamedTuple

from secure_fvi.deployment.countersigning import own_ledger
from secure_fvi.deployment.going import Going, Unfit, read_going
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.keeping import expiring
from secure_fvi.deployment.policy import read_policy
from secure_fvi.deployment.trail import TRAIL, JobRecord, TrailChain
from secure_fvi.errors import SecureFVIError
from secure_fvi.privacy.chain_file import ChainFile, ahead, follow_rows
from secure_fvi.privacy.ledger import Chain
from secure_fvi.privacy.ledger_account import account

_SOON = datetime.timedelta(days=30)


class BudgetLeft(NamedTuple):
    """Of one data set."""

    data_set: str
    epsilon: float
    remaining: float  # epsilon, as `ledger_account.Account` has it


class Status(NamedTuple):
    """A site as it stands."""

    id: str
    role: str
    roster: int | None  # serial of the one in force
    jobs: tuple[JobRecord, ...]  # in the order of their offers
    last: datetime.datetime | None  # of the log's newest row
    budgets: tuple[BudgetLeft, ...]
    expiring: tuple[str, ...]
    problems: tuple[str, ...]  # files that cannot be read or do not hang together; data that did not fit the newest job
    going: Going | None = None  # while a process of the site runs

    @property
    def current(self) -> JobRecord | None:
        """The job that goes on, or else the newest that was accepted."""
        jobs = {job.job: job for job in self.jobs if job.accepted}
        return jobs.get(self.going.job if self.going else "") or next(reversed(jobs.values()), None)

    def state(self, job: JobRecord) -> str:
        """In one word. A job that was given up has no end in the log, since it may go on by its id: the current one is
        open then, and one that was left for another unfinished."""
        if not job.accepted:
            return "refused"
        return job.outcome or ("open" if job is self.current else "unfinished")

    def quiet(self, now: datetime.datetime) -> float:
        """Seconds since the log's newest row; 0 where no job is open, or that is yet to come."""
        is_open = self.current is not None and self.current.outcome is None
        return max((now - self.last).total_seconds(), 0.0) if self.last is not None and is_open else 0.0


def read_status(home: Home, now: datetime.datetime) -> Status:
    """What can be read; what cannot is among the problems."""
    problems: list[str] = []

    def tried(read: Any, otherwise: Any) -> Any:
        try:
            return read()
        except SecureFVIError as error:
            problems.append(str(error))
            return otherwise

    chain = TrailChain(home.id)
    roster = tried(lambda: home.roster_by_public_keys(now).serial, None)
    tried(lambda: follow_log(home, chain), None)
    if home.policy_file.exists():  # a server has none
        tried(lambda: read_policy(home.policy_file), None)
    ledger = tried(lambda: own_ledger(home), None)
    budgets = tried(lambda: _budgets(ledger), ())
    problems += [said for found in (chain, ledger) if found is not None and (said := ahead(found, now.timestamp()))]
    soon = tried(lambda: tuple(line for needed, line in expiring(home, now, _SOON, keys=False) if needed), ())
    last = datetime.datetime.fromtimestamp(chain.time / 1e6, now.tzinfo) if chain.length else None
    jobs = tuple(chain.jobs.values())
    newest = {job.fields["data_set"]: job.job for job in jobs if job.accepted}  # one that was mended is forgotten
    for name in newest.values():
        said = tried(lambda name=name: Unfit(home.state_folder / "jobs" / name, home.id).said, "")
        problems += [said] if said else []
    going = read_going(home.path)
    return Status(home.id, home.role, roster, jobs, last, budgets, soon, tuple(problems), going)


def follow_log(home: Home, chain: TrailChain) -> None:
    """Take in this party's log, where it has one. Needs no key."""
    if not home.log_file.exists():
        return
    file = ChainFile(home.log_file, TRAIL, read_only=True)
    try:
        follow_rows(file, chain)
    finally:
        file.close()


def _budgets(chain: Chain | None) -> tuple[BudgetLeft, ...]:
    if chain is None:
        return ()
    found = [account(chain, data_set) for data_set in chain.budgets]
    return tuple(BudgetLeft(a.data_set, a.budget.epsilon, a.remaining) for a in found)
