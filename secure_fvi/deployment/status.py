"""How a site stands, read from its folder: for `secure-fvi status`, for Prometheus, for a health check.

It reads what the site's processes write and needs none of them, so that it answers when they do not. No row of data and
no secret is in any of it.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from secure_fvi.deployment.going import Going, Unfit, read_going, seconds_since
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.keeping import expiring
from secure_fvi.deployment.names import now as clock
from secure_fvi.deployment.policy import read_policy
from secure_fvi.deployment.trail import TRAIL, JobRecord, TrailChain
from secure_fvi.errors import InputError, SecureFVIError
from secure_fvi.privacy.chain_file import ChainFile, follow_rows
from secure_fvi.privacy.ledger import read_ledger
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
        """Seconds since the log's newest row; 0 where no job is open."""
        is_open = self.current is not None and self.current.outcome is None
        return (now - self.last).total_seconds() if self.last is not None and is_open else 0.0


class Reader:
    """Reads one site's folder again and again; of the log only what is new."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._chain = TrailChain(home.id)
        self._one_at_a_time = threading.Lock()  # each request of `Monitor` has a thread

    def read(self, now: datetime.datetime) -> Status:
        """What can be read; what cannot is among the problems."""
        with self._one_at_a_time:
            return self._read(now)

    def _read(self, now: datetime.datetime) -> Status:
        problems: list[str] = []

        def tried(read: Any, otherwise: Any) -> Any:
            try:
                return read()
            except SecureFVIError as error:
                problems.append(str(error))
                return otherwise

        roster = tried(lambda: self.home.roster_by_public_keys(now).serial, None)
        tried(self._follow, None)
        if self.home.policy_file.exists():  # a server has none
            tried(lambda: read_policy(self.home.policy_file), None)
        budgets = tried(self._budgets, ())
        soon = tried(lambda: tuple(line for needed, line in expiring(self.home, now, _SOON, keys=False) if needed), ())
        last = datetime.datetime.fromtimestamp(self._chain.time / 1e6, now.tzinfo) if self._chain.length else None
        jobs = tuple(self._chain.jobs.values())
        going = read_going(self.home.path)
        newest = {job.fields["data_set"]: job.job for job in jobs if job.accepted}  # one that was mended is forgotten
        for name in newest.values():
            said = Unfit(self.home.state_folder / "jobs" / name, self.home.id).said
            problems += [said] if said else []
        return Status(self.home.id, self.home.role, roster, jobs, last, budgets, soon, tuple(problems), going)

    def _follow(self) -> None:
        if not self.home.log_file.exists():
            return
        file = ChainFile(self.home.log_file, TRAIL, read_only=True)
        try:
            follow_rows(file, self._chain)
        finally:
            file.close()

    def _budgets(self) -> tuple[BudgetLeft, ...]:
        if not self.home.ledger_file.exists():
            return ()
        chain = read_ledger(self.home.ledger_file, self.home.id)[self.home.id]
        found = [account(chain, data_set) for data_set in chain.budgets]
        return tuple(BudgetLeft(a.data_set, a.budget.epsilon, a.remaining) for a in found)


class SiteCollector(Collector):
    """The status as metrics of Prometheus."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def collect(self) -> Iterator[Metric]:
        """Read anew at each scrape."""
        now = clock()
        status = self._reader.read(now)
        labels = ["job"]
        counters = {
            "exchanges": "Messages that a job's log has, in and out",
            "bytes_received": "Bytes received for a job",
            "bytes_sent": "Bytes sent for a job",
        }
        for name, about in counters.items():
            family = CounterMetricFamily(f"secure_fvi_{name}", about, labels=labels)
            for job in status.jobs:
                family.add_metric([job.job], getattr(job, name))
            yield family
        states = GaugeMetricFamily("secure_fvi_job_state", "1 for the state a job is in", labels=["job", "state"])
        for job in status.jobs:
            states.add_metric([job.job, status.state(job)], 1)
        yield states
        quiet = GaugeMetricFamily("secure_fvi_quiet_seconds", "Since the log's newest row, while a job is open")
        quiet.add_metric([], status.quiet(now))
        yield quiet
        rounds = GaugeMetricFamily("secure_fvi_round", "The round of the job that runs", labels=labels)
        most = GaugeMetricFamily("secure_fvi_rounds", "Rounds of the job that runs, at most", labels=labels)
        waited = GaugeMetricFamily(
            "secure_fvi_waiting_seconds", "Since a member was asked, or a site waits for its server", labels=["member"]
        )
        if (going := status.going) is not None:
            if going.job:
                rounds.add_metric([going.job], going.round)
                most.add_metric([going.job], going.rounds)
            for member in going.waiting:
                waited.add_metric([member], seconds_since(going, now))
        yield from (rounds, most, waited)
        left = GaugeMetricFamily(
            "secure_fvi_budget_remaining_epsilon", "Left of a data set's budget", labels=["data_set"]
        )
        for budget in status.budgets:
            left.add_metric([budget.data_set], budget.remaining)
        yield left
        for name, count in (("expiring", len(status.expiring)), ("problems", len(status.problems))):
            gauge = GaugeMetricFamily(f"secure_fvi_{name}", f"Lines under '{name}' of secure-fvi status")
            gauge.add_metric([], count)
            yield gauge


class Monitor(ThreadingHTTPServer):
    """Answers GET /metrics and GET /health on one address, and nothing else."""

    daemon_threads = True

    def __init__(self, home: Home, address: tuple[str, int], patience: float = 600.0) -> None:
        """/health is 503 where a file is wrong, or an open job has been quiet for `patience` seconds."""
        self.reader, self.patience = Reader(home), patience
        self.registry = CollectorRegistry()
        self.registry.register(SiteCollector(Reader(home)))
        try:
            super().__init__(address, _Handler)
        except OSError as error:
            raise InputError(f"cannot listen at {address[0]}:{address[1]}: {error.strerror}") from None

    def health(self) -> tuple[bool, str]:
        """Whether all is well, and if not, why: for whoever reaches the port, so that problems, which may count rows
        and name columns and files, are counted alone."""
        now = clock()
        status = self.reader.read(now)
        if status.problems:
            return False, f"problems: {len(status.problems)}; `secure-fvi status` says which"
        if status.quiet(now) > self.patience:
            return False, f"an open job has been quiet for {status.quiet(now):.0f} s"
        return True, "ok"


class _Handler(BaseHTTPRequestHandler):
    server: Monitor
    timeout = 10.0  # seconds for a request: one that says nothing keeps no thread
    server_version, sys_version = "secure-fvi", ""

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._send(HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self.server.registry))
        elif self.path == "/health":
            well, why = self.server.health()
            status = HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE
            self._send(status, "text/plain; charset=utf-8", f"{why}\n".encode())
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"/metrics or /health\n")

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is no news."""
