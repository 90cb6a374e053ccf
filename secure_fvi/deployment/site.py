"""A silo's or key holder's process: it dials the server, decides on what it is offered, answers, and writes down what
left."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from secure_fvi.deployment import session_messages as talk
from secure_fvi.deployment.consortium import Member
from secure_fvi.deployment.countersigning import SEEN, check_seen, ends, open_trail
from secure_fvi.deployment.countersigning import answer as countersign
from secure_fvi.deployment.deciding import FINISHED, OUTCOMES, Decision, decide
from secure_fvi.deployment.going import Stand, Teller, Unfit
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.job import offer_hash
from secure_fvi.deployment.names import now, printable
from secure_fvi.deployment.site_job import Local, SiteJob, job_folder
from secure_fvi.deployment.trail import Exchange
from secure_fvi.engines.stream_client import StreamClient
from secure_fvi.engines.stream_messages import LONGEST
from secure_fvi.errors import (
    BudgetError,
    DataError,
    InputError,
    JobError,
    PolicyError,
    ProtocolError,
    SecureFVIError,
    SessionLost,
    told,
)
from secure_fvi.files import own_file, own_files, write_atomically
from secure_fvi.key_files import TlsFiles
from secure_fvi.messages import ROUND
from secure_fvi.silo import UNANSWERABLE
from secure_fvi.wire import PROTOCOLS, agreed

if TYPE_CHECKING:
    from secure_fvi.deployment.holder_job import HolderJob

_log = logging.getLogger(__name__)
#: Rows of messages that were not answered, and how many of them a job may have.
REFUSED, _MOST_REFUSED = "refused", 1000
#: What a message, a policy, a ledger or a disk makes fail.
_NOT_OF_DATA = (ProtocolError, PolicyError, BudgetError, JobError, OSError)


class Site:
    """What stands between the stream and the jobs. For one thread."""

    def __init__(
        self, home: Home, local: Local | None = None, on_end: Callable[[str, Path | None], None] | None = None
    ):
        """`on_end` is told of a job that has ended and where a silo's own posterior lies. `local`: of a silo. Raises
        InputError for a server's folder."""
        if home.role == "server":
            raise InputError(f"'{home.path}' is the folder of a server, which dials nobody")
        self.home, self.local = home, local or Local()
        self._on_end = on_end
        self._hold = home.hold()
        self._trail = open_trail(home)
        self._server = "the server"
        with contextlib.suppress(SecureFVIError):  # whoever has no roster yet is told so when it dials
            self._server = server_of(home).id
        self._job: SiteJob | HolderJob | None = None
        self._stated = b""  # the last answer of the exchange in which records are countersigned
        self._met = False  # whether records were countersigned since this process took its last new job
        self._under: tuple[int, ...] = ()  # what roster and policy were when that was taken
        self._messages, self._busy = 0, False  # how many came, and whether the last is being answered
        self._teller = Teller(home.path, self._stand)

    def __repr__(self) -> str:
        return f"Site({self.home.id!r})"

    def handle(self, job: str, message: bytes) -> bytes:
        """The answer to one message about `job`; nothing leaves before the site's log has it. Raises RecordError where
        the folder's lock is gone."""
        self._messages, self._busy = self._messages + 1, True
        try:
            self.home.check_held(self._hold)
            return self._handle(job, message)
        finally:
            self._busy = False

    def _stand(self) -> Stand:
        """For any thread: between two messages a site waits for the server."""
        job, waiting = self._job, () if self._busy else (self._server,)
        stand = job.stand() if job is not None else Stand(phase="no job")
        return stand._replace(asked=self._messages, waiting=waiting)

    def _handle(self, job: str, message: bytes) -> bytes:
        kind = message[:1]
        if kind == SEEN:
            stated, self._stated = self._stated, b""  # the second message counts after the first alone
            answer = countersign(self.home, self._trail, server_of(self.home).id, message[1:])
            self._met = ends(stated, message[1:])
            self._stated = answer
            return answer
        if kind not in talk.STEPS:
            raise ProtocolError(f"{self.home.role} '{self.home.id}': a message of unknown kind")
        try:
            answer = self._answer(job, message)
        except SessionLost as error:
            self._trail.note(job, f"a session ends: {printable(str(error))}")
            raise
        except Exception as error:
            # A full disk, say: memory may be ahead of what was written, which alone counts.
            if not isinstance(error, SecureFVIError) or isinstance(error, OSError):
                self._let_go()
            self._note_refusal(job, kind, message, error)
            raise
        known = self._trail.chain.jobs.get(job)
        if known is not None and known.accepted:
            charged = self._job.charged(known.releases) if self._job is not None and kind == ROUND else ""
            self._trail.exchanges(job, [Exchange(self._server, talk.STEPS[kind], message, answer, charged)])
        return answer

    def _note_refusal(self, job: str, kind: bytes, message: bytes, error: Exception) -> None:
        """A row for a message that was not answered; after so many of a job, none: a server does not fill the disk."""
        known = self._trail.chain.jobs.get(job)
        if known is None or not known.accepted:
            return
        # `max_unanswered` counts the job. Once it has been let in, all that is no message's fault may follow from data.
        begun = self.home.role == "silo" and kind != talk.JOIN and not isinstance(error, _NOT_OF_DATA)
        if (begun or isinstance(error, DataError)) and UNANSWERABLE not in known.omissions:
            self._trail.omission(job, UNANSWERABLE, _for_trail(error))
        if known.omissions.get(REFUSED, 0) >= _MOST_REFUSED:
            return
        said = f"{talk.STEPS[kind]} of {len(message)} bytes, SHA-256 {hashlib.sha256(message).hexdigest()}"
        with contextlib.suppress(SecureFVIError, OSError):
            self._trail.omission(job, REFUSED, f"{said}: {_for_trail(error)}")

    def longest(self) -> int:
        """Bytes of the longest message that the server may send by now: by the tables of the job that is open."""
        return max(LONGEST, self._job.longest if self._job is not None else 0)

    def close(self) -> None:
        """Let go of the job, to be continued, and of the log."""
        self._teller.close()
        self._let_go()
        self._trail.close()
        self._hold.close()

    def _let_go(self) -> None:
        """Let go of the job in memory; its next message finds it in the site's folder."""
        if self._job is not None:
            self._job.close()
            self._job = None

    def _answer(self, job: str, message: bytes) -> bytes:
        kind, body = message[:1], message[1:]
        if self._job is not None and self._rules() != self._under:
            self._let_go()  # another roster was accepted since, or the policy edited: the offer is decided on anew
        if kind == talk.JOIN:
            return self._join(job, body)
        if kind == talk.OPEN:
            opened = talk.CODEC.unpack(body, talk.Open)
            return self._ended(job, opened) or talk.CODEC.pack(talk.Opened(self._opened(job, opened)))
        if kind == talk.END:
            return self._end(job, talk.CODEC.unpack(body, talk.End))
        return self._open_job(job).handle(message)

    def _join(self, job: str, offer: bytes) -> bytes:
        kept = job_folder(self.home, job) / "ended"
        if kept.exists():  # the server lost its connection, or itself, while the job was ending
            return talk.CODEC.pack(_said_at_the_end(kept))
        if self._job is None or self._job.decision.offer.job != job:
            self._take(job, offer)
        assert self._job is not None
        return talk.CODEC.pack(self._job.join())

    def _take(self, job: str, offer: bytes) -> None:
        """Decide on a job and build its party. Raises what `decide` and `SiteJob` raise."""
        self._let_go()
        self._under = self._rules()
        with own_files():  # of a ledger that cannot be read
            check_seen(self.home, self._trail)
        decision = decide(self.home, offer, self._trail, now(), met=self._met)
        self._met = False
        if decision.offer.job != job:
            raise ProtocolError(f"an offer of job '{decision.offer.job}' on the stream of job '{job}'")
        try:
            self._job = self._made(decision)
        except Exception as error:
            self._trail.note(job, f"the job cannot run here: {_for_trail(error)}")
            raise
        self._server = decision.offer.server
        write_atomically(self._job.folder / "offer", offer)
        _log.info("job '%s' of '%s' accepted", job, self._server)

    def _rules(self) -> tuple[int, ...]:
        """Tells the roster in force and the policy as it lies there from others."""
        with own_files():
            in_force = self.home.in_force
        try:
            seen = self.home.policy_file.stat()
        except FileNotFoundError:
            return (in_force,)
        return in_force, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns

    def _made(self, decision: Decision) -> SiteJob | HolderJob:
        if self.home.role == "holder":  # a site loads what it runs
            from secure_fvi.deployment.holder_job import HolderJob

            return HolderJob(self.home, decision, lambda: self._trail.chain.jobs[decision.offer.job].exchanges)
        kind: type[SiteJob] = SiteJob
        if decision.offer.config.vertical:
            from secure_fvi.deployment.columns_job import ColumnsJob as kind

        made = kind(self.home, decision, self.local, partial(self._trail.omission, decision.offer.job))
        said = made.cohort.note()
        if said is not None:
            self._trail.note(decision.offer.job, said, always=True)
            made.cohort.keep()
        torch.set_num_threads(made.threads)
        return made

    def _open_job(self, job: str) -> SiteJob | HolderJob:
        """The job in memory, or, after a restart of this process, from the offer that was accepted before."""
        if self._job is None or self._job.decision.offer.job != job:
            path = job_folder(self.home, job) / "offer"
            if not path.exists():
                raise ProtocolError(f"job '{job}' has not been offered to this site")
            self._take(job, self._kept_offer(job, path))
        assert self._job is not None
        return self._job

    def _kept_offer(self, job: str, path: Path) -> bytes:
        """The offer that was accepted, of whose hash the log has a row. Raises RecordError where it is another."""
        with own_file(path, "put its newest copy back, or start the server again, which offers the job anew"):
            offer, known = path.read_bytes(), self._trail.chain.jobs.get(job)
            found = offer_hash(offer)
            if known is not None and found != known.fields["offer"]:
                raise ValueError("another offer")
        return offer

    def _opened(self, job: str, message: talk.Open) -> bytes:
        found = self._open_job(job)
        offered = found.decision.offer.protocols
        agreed({"the session": [message.protocol], "the offer": offered, f"'{self.home.id}'": PROTOCOLS})
        return found.open(message)

    def _ended(self, job: str, message: talk.Open) -> bytes | None:
        """The answer of a job that has ended here; the session no longer matters."""
        path = job_folder(self.home, job) / "ended"
        if not path.exists():
            return None
        session = _said_at_the_end(path).session  # none where it was lost before the end
        return talk.CODEC.pack(talk.Opened(session or bytes(32)))

    def _end(self, job: str, message: talk.End) -> bytes:
        """Keep the result, let go of the secrets, and close the job in the log, in this order: what a kill left undone
        is done when the server says it again."""
        ended, known, path = job_folder(self.home, job) / "ended", self._trail.chain.jobs.get(job), None
        if ended.exists() and (known is None or known.outcome is not None):
            return talk.CODEC.pack(talk.Ended())
        found = self._open_job(job)
        if not ended.exists():
            path = found.end(message.accepted, message.posterior)
            write_atomically(ended, talk.CODEC.pack(found.join()))
        found.close(FINISHED)
        self._job = None
        self._trail.close_job(job, message.outcome if message.outcome in OUTCOMES else FINISHED)
        _log.info("job '%s' has ended%s", job, f"; this silo's own posterior: {path}" if path else "")
        if self._on_end is not None:
            self._on_end(job, path)
        return talk.CODEC.pack(talk.Ended())


def _said_at_the_end(path: Path) -> talk.Joined:
    with own_file(path, "put its newest copy back; the job is over here, and its result is in `results`"):
        return talk.CODEC.unpack(path.read_bytes(), talk.Joined)


def _for_trail(error: Exception) -> str:
    """What the paper trail says of an error: others read it, so that of all that may follow from data there is one
    sentence, and counts, lines and paths stand in the process's own log alone."""
    if isinstance(error, ProtocolError | PolicyError | BudgetError | JobError):
        return printable(told(error))
    return type(error).__name__ if isinstance(error, OSError) else DataError.TOLD


def run_site(
    home: Home, address: str, local: Local | None = None, once: bool = False, stop: threading.Event | None = None
) -> None:
    """Serve jobs of the server at `address` until stopped, or until the first has ended. Raises ProtocolError where the
    two sites do not admit each other, and DataError after a single job that a silo's data did not fit and that went on
    all the same, under differential privacy."""
    ended: list[str] = []

    def on_end(job: str, path: Path | None) -> None:
        if once:
            ended.append(job)
            client.stop()

    site = Site(home, local, on_end)
    client = client_of(home, address, server_of(home).id, site.handle)
    client.longest = site.longest
    if stop is not None:

        def watch() -> None:
            stop.wait()
            client.stop()
            client.hang_up()

        threading.Thread(target=watch, daemon=True).start()
    try:
        client.run()
    finally:
        site.close()
    if ended and (said := Unfit(job_folder(home, ended[0]), home.id).said):
        raise DataError(said)


def server_of(home: Home) -> Member:
    """The server that the roster in force names. Raises InputError where it names none."""
    server = next(iter(home.roster(now()).of_role("server")), None)
    if server is None:
        raise InputError("the roster names no server")
    return server


def client_of(home: Home, address: str, server: str, handle: Callable[[str, bytes], bytes]) -> StreamClient:
    """This site's way to the member `server` at `address`, by the site's files as they are at each connection."""

    def tls() -> TlsFiles:
        return home.credentials([home.roster(now()).member(server)])

    def check(certificate: bytes) -> None:
        member = home.roster(now()).whose(certificate, now(), "server")
        if member.id != server:
            raise ProtocolError(f"the certificate is of '{member.id}', not of '{server}'")

    return StreamClient(
        address,
        tls,
        lambda: home.roster(now()).tls_name(server),
        check,
        lambda: home.roster(now()).hash,
        handle,
        home,
        server,
    )
