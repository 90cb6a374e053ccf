"""One job at one silo: what of it is kept in the site's folder, and how its party is built from that.

state/jobs/JOB/offer       the offer that was accepted
               cohort      the digest of the rows that the job began with
               unfit       under differential privacy: what is wrong with the site's data, for its own people
               secret      from which the silo draws its samples (32 bytes, sealed)
               session     the session that is open: every silo's fresh bytes
               SESSION.sqlite    the party's state and its secrets of that session, sealed
results/JOB.safetensors    the silo's own posterior, for its eyes alone
state/cohorts.json         by data set: the digest of the rows that its last job used, their columns, and that job; of
                           the last by a formula without differential privacy, how many rows there were, and were left
                           out
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from safetensors.torch import save
from torch import Tensor

from secure_fvi import wire
from secure_fvi.aggregation.base import SecureSum, SumSilo
from secure_fvi.aggregation.plain import PlainSilo
from secure_fvi.aggregation.store import Sealer
from secure_fvi.algorithms.base import Posterior, SiloView
from secure_fvi.building import (
    Guards,
    Machine,
    build_problem,
    declared_job,
    derived_secret,
    device_named,
    silo_secret,
    strong_enough,
    warn_of_large_delta,
    work_of,
)
from secure_fvi.compiled import choose_threads
from secure_fvi.deployment.countersigning import hold_to_seen, keep_charged, kept_charged, open_ledger
from secure_fvi.deployment.deciding import Decision
from secure_fvi.deployment.fence import KeptTrace, model_for
from secure_fvi.deployment.going import Stand, Unfit
from secure_fvi.deployment.holding import DurableSilo, HeldStore, boot_id, open_held
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.job import JobOffer, check_job_id
from secure_fvi.deployment.policy import DataRule, files_of
from secure_fvi.deployment.policy_check import check_terms
from secure_fvi.deployment.session_messages import (
    CODEC,
    Joined,
    Open,
    OpenSession,
    longest_message,
    pack_schema,
    schema_digest,
    session_of,
    session_roster,
    silo_sum,
)
from secure_fvi.disclosure import disclose
from secure_fvi.draws import LocalPosterior
from secure_fvi.errors import DataError, InputError, JobError, PolicyError, ProtocolError, RecordError, SessionLost
from secure_fvi.federated_model import Records, Schema, check_repeats, cohort_digest, order_digest, read_data
from secure_fvi.files import make_private, own_bytes, own_file, sync_folder, write_atomically
from secure_fvi.messages import ROUND, decode_broadcast
from secure_fvi.privacy.gate import Charge, Gate, NoiseSource
from secure_fvi.privacy.settings import RecordDP, exact_totals
from secure_fvi.runs.config import RECORD_ID, Config, chosen, title
from secure_fvi.runs.records import file_of, formula_part, formula_rows_alone, schema_beforehand, silo_part
from secure_fvi.silo import UNANSWERABLE, Limits, Silo, silo_view
from secure_fvi.trees import part, plain

if TYPE_CHECKING:
    from secure_fvi.mixed_model import MixedModel

_DRAWS = 1000
_log = logging.getLogger(__name__)
#: The survivors that were signed for each question, over all sessions.
_QUESTIONS, _COHORTS = "questions.signed", "cohorts.json"
#: Begins the digest of a job's rows, in their order.
_COHORT = b"\x02"
_TRACE = "trace"
#: Sessions of a job that a site opens: each is another order of the ring, which a server sees before anything is sent.
MOST_SESSIONS = 64
#: Answers of a silo that a server may leave unused, and one more for every ten that it used; honest ones lose few.
_LEFT_OUT = 3


class Local(NamedTuple):
    """How a silo runs jobs. data_dir: of shipped programs' data.

    repeatable: draw from the job's seed, as one process with all parties does. The server can then work the draws
    out, so it is for tests.
    """

    data_dir: Path | None = None
    repeatable: bool = False


def check_supported(config: Config) -> None:
    """Raises InputError for what runs in one process alone so far."""
    if config.vertical and config.model.likelihood is None:
        raise InputError(
            f"model.program = '{config.model.program}': its silos' columns come with the program, in one process; "
            "between sites a vertical job has a likelihood, and [[silo]] tables"
        )
    if config.vertical and config.alignment is None:
        raise InputError(
            "between sites a vertical job needs [alignment]: nothing else says that rows are of one person"
        )
    if config.alignment is not None and config.privacy is not None and config.alignment.how == "sorted":
        raise InputError(
            "alignment.how = 'sorted' under privacy: whoever knows all of the people but one would try the last on the "
            "digest of their order; match them (how = 'matching')"
        )
    if config.run.batch_silos:
        raise InputError("run.batch_silos: silos compute together in one process alone")


def threads_of(config: Config, work: int) -> int:
    """Of PyTorch. A job may ask for more than this machine has: so many that the process ends."""
    threads = config.run.threads
    return choose_threads(work) if threads == "auto" else min(threads, os.cpu_count() or 1)


def job_folder(home: Home, job: str) -> Path:
    """Where a job is kept."""
    check_job_id(job)
    return home.state_folder / "jobs" / job


class SiteJob:
    """A job that this site has accepted. Holds the silo's data while the process lives."""

    def __init__(self, home: Home, decision: Decision, local: Local, tell: Callable[[str, str], None]) -> None:
        """Reads the data, agrees on terms and opens the ledger. Raises InputError (of all that follows from the data
        DataError), PolicyError and BudgetError. `tell`
        writes into the site's log what a silo has to say of the server (`Silo.on_event`).

        Under differential privacy data that do not fit end no job, since that would tell of them without noise or
        charge: see `_records`, and `Unfit` for what the site itself is told."""
        self.home, self.decision, self._tell, self._local = home, decision, tell, local
        with _of_the_job():
            self._chosen = chosen(decision.offer.config)
            check_supported(decision.offer.config)
            self.disclosed = disclose(*self._chosen, len(decision.offer.silos))
            device_named(decision.offer.config.run.device)
        self.folder = job_folder(home, decision.offer.job)
        make_private(self.folder)
        self._privacy, self.unfit = self._chosen[2], Unfit(self.folder, home.id, decision.offer.data_set)
        self._fresh = FreshBytes(self.folder / "fresh")
        self.party: DurableSilo | None = None
        self._store: HeldStore | None = None
        self._questions: HeldStore | None = None
        self.session = b""
        self._given_up = False  # the session that is open is not to be gone on with
        #: Answers that it was charged for, as the log has it or, where rows of that were lost, what was kept of it.
        self._paid = decision.charged
        if self._privacy is not None:
            self._paid = max(self._paid, kept_charged(home, decision.offer.job))
        self._build(decision.local_config(home.id))

    def _build(self, config: Config) -> None:
        """Read the data, trace the model, and build what answers rounds."""
        home, decision, (algorithm, aggregation, privacy) = self.home, self.decision, self._chosen
        hidden = [home.path, *decision.policy.files, *files_of(config)]
        offer, kept = decision.offer, KeptTrace(self.folder / _TRACE, home.state_secret)
        model, _ = model_for(config, decision.policy.sandbox, offer.model, offer.package, *hidden, kept=kept)
        dtype = config.run.torch_dtype
        own = self._records(config, self._local, model, dtype)
        self.schema, self.cohort, ids_are_own = own.schema, own.cohort, own.ids_are_own
        work = work_of([own.records.rows], algorithm, privacy)
        self.threads = threads_of(config, work)
        self.problem = build_problem(
            model,
            self.schema,
            algorithm,
            decision.offer.silos,
            config.seed,
            privacy,
            Machine(config.run.device, dtype, config.run.compile, work),
        )
        with _of_the_job():
            self.program = self._family = algorithm.silo(self.problem)
        self._agree(aggregation, algorithm, own.records.size)

        def derived() -> bytes:
            return derived_secret(config.seed, b"all" if ids_are_own else b"silo/" + home.id.encode())

        self.secret = self._drawn(derived)
        self.view = self._view(own)

    def _agree(self, aggregation: SecureSum, algorithm: Any, records: int) -> None:
        """On the terms of the program, and open the ledger for them."""
        terms = self.program.terms
        with _of_the_job():
            self.disclosed = self.disclosed.of_program(self.program.tables, terms, aggregation)
        check_terms(terms, self.decision.policy)
        warn_of_large_delta(terms, {self.home.id: records})
        self.guards = self._guards(algorithm.name, NoiseSource(None))
        self.aggregation = strong_enough(aggregation, self.disclosed)

    @property
    def longest(self) -> int:
        """Bytes of the longest message of this job that the server may send."""
        return longest_message(self.program.tables.values(), len(self.decision.offer.silos), self.aggregation)

    def stand(self) -> Stand:
        """How the job stands here, for any thread: the round of the last answer."""
        offer, party = self.decision.offer, self.party
        begun = party is not None and party.silo.past.asked.round >= 0
        at = min(party.silo.past.asked.round + 1, self.disclosed.rounds) if party is not None and begun else 0
        phase = "rounds" if begun else "joining"
        return Stand(offer.job, title(offer.config), phase, at, self.disclosed.rounds)

    def join(self) -> Joined:
        """What the server needs to know of this silo."""
        if self.party is None:
            self.restore()
        session = b"" if self._given_up else self.session
        policy = self.decision.stated_policy(self.home)
        last = self.guards.last_index + 1
        return Joined(pack_schema(self.schema), self._fresh.draw(), session, last, policy=policy)

    def open(self, message: Open) -> bytes:
        """Open the session that `message` describes, or go on in it; 32 bytes that name it."""
        if not set(message.silos) <= set(self.decision.offer.silos):
            raise ProtocolError("a session of other silos than the job's")
        if message.schema != schema_digest(self.schema):
            raise ProtocolError("the schema that the server agreed on is not that of this silo's data")
        if self.party is None:
            self.restore()
        roster, offer = self.decision.roster, self.decision.offer
        try:
            session = session_of(roster, offer.within(message.schema), message, self.aggregation)
            session_roster(roster, session, offer.silos, self.aggregation, message.holder)
        except InputError as error:  # of job and roster, and no fault of the data
            raise ProtocolError(str(error)) from None
        if session == self.session:
            return session
        found = dict(zip(message.silos, message.nonces, strict=True))
        if not self._fresh.take(found.get(self.home.id, b"")):
            raise SessionLost("the session does not rest on this silo's fresh bytes")
        counted = self.folder / "sessions"
        with own_file(counted):
            opened = int(counted.read_text()) if counted.exists() else 0
        if opened >= MOST_SESSIONS:
            raise ProtocolError(f"{MOST_SESSIONS} sessions of this job were opened here, as many as may be")
        write_atomically(counted, str(opened + 1).encode())
        store = self._new_store(session)
        if self.party is not None:
            self.party.carry_over(store)
        elif (old := self._kept_store()) is not None:  # of before a restart of the machine
            self._held(self._silo(PlainSilo(self.home.id)), self._kept_session()[0], old).carry_over(store)
            old.close()
        if self._store is not None:
            self._store.close()
        self._begin(session, store, message.holder)
        write_atomically(self.folder / "session", CODEC.pack(message))  # of one that was refused nothing is kept
        for path in self.folder.glob("*.sqlite*"):  # secrets of sessions that are over
            if not path.name.startswith(session.hex()):
                path.unlink()
        return session

    def restore(self) -> None:
        """Go on in the session that was open when the process ended, unless the machine was restarted since."""
        store = self._kept_store()
        if store is None:
            return
        if not store.same_boot():
            store.close()
            return
        session, holder = self._kept_session()
        self._begin(session, store, holder)

    def handle(self, message: bytes) -> bytes:
        """A message of a round. Raises SessionLost where no session is open."""
        if self.party is None:
            self.restore()
        if self.party is None:
            raise SessionLost("no session is open here")
        self._check_charge(message)
        answer = self.party.handle(message)
        if self.guards.jobs and (answers := sum(self.party.silo.past.answers)) > self._paid:
            keep_charged(self.home, self.decision.offer.job, answers)
            self._paid = answers
        return answer

    def charged(self, logged: int) -> str:
        """What the ledger was charged with for the last answer, for the log, which has `logged` such answers and knows
        by them if it, or the state, is an older copy; empty where it has this one. One that is asked for again it has
        not where the process ended before its row was written."""
        past = self.party.silo.past if self.party is not None else None
        if past is None or not self.guards.jobs or sum(past.answers) <= logged:
            return ""
        return f"{list(self.program.order.phases)[past.asked.place]} {past.made}"

    def end(self, accepted: int, posterior: bytes) -> Path:
        """Keep the silo's own posterior; where it lies."""
        if self.party is None:
            self.restore()
        if self.party is None:
            raise SessionLost("no session is open here")
        tensors = wire.tensors(posterior, "the posterior that the server sent")
        eta, theta = (part(dict(tensors), name) for name in ("eta", "theta"))
        expected = self._family.blank()
        family = expected.family
        known = (wire.same_form(eta, expected.eta), wire.same_form(theta, expected.theta))
        if not all(known) or len(eta) + len(theta) < len(tensors):  # the rest of the file is this silo's own
            raise ProtocolError("the posterior that the server sent is not of this job's model")
        self.party.settle(accepted)
        kept = dict(tensors) | self._own(Posterior(family, eta, theta))
        folder = self.home.path / "results"
        make_private(folder)
        path = folder / f"{self.decision.offer.job}.safetensors"
        about = {"cohort": self.cohort.digest.hex(), "policy": self.decision.policy.hash.hex()}
        content = save(plain(kept), about)
        write_atomically(path, content, private=True)
        return path

    def _own(self, posterior: Posterior) -> dict[str, Tensor]:
        """Means and sds of this silo's own latents at the posterior that the server named; nothing where its data do
        not let them be worked out there, which the server is not to hear."""
        assert self.party is not None
        if self.unfit.whole or all(site.role == "global" for site in self.problem.layout.sites):
            return {}
        try:
            drawn = LocalPosterior(self.party.silo, self.problem, posterior).sample(_DRAWS)
        except Exception as error:
            _log.warning("this silo's own latents cannot be worked out at the end (%s)", type(error).__name__)
            return {}
        return {k: v for n, d in drawn.items() for k, v in ((f"mean/{n}", d.mean(0)), (f"sd/{n}", d.std(0)))}

    def close(self, outcome: str | None = None) -> None:
        """Let go of files; with an outcome the job is over, and its secrets are removed."""
        if outcome is not None:
            self.guards.close(outcome)
        else:
            for ledger in self.guards.ledgers.values():
                ledger.close()
        for store in (self._store, self._questions):
            if store is not None:
                store.close()
        self.party = self._store = self._questions = None
        if outcome is not None:
            for path in (
                *self.folder.glob("*.sqlite*"),
                *self.folder.glob(f"{_QUESTIONS}*"),
                self.folder / "secret",
                self.folder / "fresh",
                self.folder / _TRACE,
            ):
                path.unlink(missing_ok=True)

    # ---- parts ----

    def _records(self, config: Config, local: Local, model: Any, dtype: torch.dtype) -> _Own:
        """The site's own records. Under record privacy those that cannot be read are left out, each for itself. Where
        none can be read under differential privacy, the job goes on with none, to its end; but for what no two tables
        that differ in one record differ in, and where records alone say the schema: that is refused, and counted.
        Raises DataError."""
        home, decision, by_record = self.home, self.decision, isinstance(self._privacy, RecordDP)
        formula = cast("MixedModel", model) if config.model.formula is not None else None
        left_out: list[str] = []

        def read(known: Schema | None) -> _Own:
            # Rows as they were read, whatever the job's own options leave out of them, or where totals are exact other
            # formulas' columns: or else of two jobs one would be over other rows, as its digest says, where one record
            # does not fit it, and a pinned one over none.
            used: Mapping[str, Any]
            left, as_read, beside = None, dict[str, Tensor](), ""
            if formula is not None:
                rows, found = formula_part(config, home.id, formula, *([left_out] if by_record else []))
                ids, own, used = torch.arange(len(rows["y"])), False, found.columns
                if exact_totals(self._privacy):
                    left = found.read, found.read - len(found.columns[formula.columns[0]])
                    if by_record:
                        used, (file, _) = formula_rows_alone(config, home.id, formula).columns, file_of(config, home.id)
                        listed = [(m.formula, m.family, m.options) for m in file.fitting]
                        beside = repr((file.complete, listed))
            else:
                more = (left_out, as_read) if by_record else ()
                rows, ids, own = silo_part(config, home.id, local.data_dir, *more)
                used = as_read or ({**rows, RECORD_ID: ids} if own else rows)
            schema, records = read_data(rows, home.id, dtype)
            if known is not None and schema_digest(known) != schema_digest(schema):
                raise DataError("its records say another schema than job, dictionary and names of columns do")
            if not own:
                with self._told_alone():
                    check_repeats(records.rows, home.id, used)
            beside += order_digest(used)
            cohort = Cohort(home, decision.offer, self.folder, used, decision.data, left, beside)
            return _Own(schema, records, ids, own, cohort)

        if self._privacy is None:
            with _of_data(home.id):
                return read(None)
        known, why = None, ""
        try:
            known = schema_beforehand(config, home.id, formula, dtype)
        except Exception as error:
            why = str(error) if isinstance(error, InputError) else type(error).__name__
        if not self.unfit.whole or known is None:
            try:
                with _of_data(home.id):
                    found = read(known)
            except DataError as error:
                if known is None:
                    _log.error("%s; the job is refused for it, and its server told that much, since %s", error, why)
                    raise
                self.unfit.tell(error, whole=True)
            else:
                for line in left_out:
                    self.unfit.tell(line)
                return found
        assert known is not None
        names = formula.columns if formula is not None else [name for name, *_ in known.fields]
        return self._nobodys(known, Cohort(home, decision.offer, self.folder, names, decision.data), 1 - by_record)

    @contextlib.contextmanager
    def _told_alone(self) -> Iterator[None]:
        """Under record privacy the site is told what is wrong with records that were read, and nothing stops for it."""
        try:
            yield
        except Exception as error:
            if not isinstance(self._privacy, RecordDP):
                raise
            self.unfit.tell(error)

    def _nobodys(self, schema: Schema, cohort: Cohort, size: int) -> _Own:
        """In place of records that are not used: so many made ones."""
        return _Own(schema, Records(schema.dummy_rows(size), size), torch.arange(size), False, cohort)

    def _view(self, own: _Own) -> SiloView:
        """What the program may use of the site's records; under privacy, of none, where they do not fit it: one by one
        they always do, and what is left then is that all of them take too much memory."""

        def view(own: _Own, unfit: Callable[[Exception], None] | None) -> SiloView:
            with _of_data(self.home.id):
                return silo_view(self.home.id, self.problem, own.records, own.ids.numpy(), self.secret, unfit)

        if self.unfit.whole:
            return view(own, lambda _: None)
        by_record = isinstance(self._privacy, RecordDP)
        try:
            return view(own, self.unfit.tell if by_record else None)
        except DataError as error:
            if self._privacy is None:
                raise
            self.unfit.tell(error, whole=True)
            return view(self._nobodys(own.schema, own.cohort, 1 - by_record), lambda _: None)

    def _check_charge(self, message: bytes) -> None:
        """Raises SessionLost for a sum that the ledger has charged and whose answer was not kept: the process was
        killed in between. The noise is gone, so the contribution is made anew, at a new index."""
        assert self.party is not None
        if not self.guards.jobs or message[:1] != ROUND or self.party.answered(message):
            return
        index = decode_broadcast(message[1:]).sum_index
        if index <= self.guards.last_index:
            self._given_up = True
            raise SessionLost(f"sum {index} was charged, and its answer is not there")

    def _begin(self, session: bytes, store: HeldStore, holder: bytes) -> None:
        """Raises ProtocolError where the silo's state is not that which ledger and log know of; no session is open
        then."""
        self.party = self._store = None
        try:
            party = self._held(self._silo(self._sum(session, store, holder)), session, store)
            self._check_newest(party)
        except BaseException:
            store.close()
            raise
        self.party, self._store, self.session, self._given_up = party, store, session, False

    def _held(self, silo: Silo, session: bytes, store: HeldStore) -> DurableSilo:
        """The silo with what the `store` of a session holds of it. Raises RecordError where that cannot be read."""
        with own_file(self.folder / f"{session.hex()}.sqlite"):
            return DurableSilo(silo, store)

    def _check_newest(self, party: DurableSilo) -> None:
        """Raises ProtocolError where the ledger, or the state, is an older copy. A silo whose state is would answer a
        question anew that was answered: with another sample and share of the noise, and others with the same, so that
        the two totals' noise differs by one share alone. Without privacy that alone is noticed which has no answer,
        where the log has some."""
        if not self.guards.jobs:
            if self.decision.answered and not sum(party.silo.past.answers):
                raise ProtocolError(
                    f"the state of this job at '{self.home.id}' is gone, of whose answers its log has "
                    f"{self.decision.answered}; put its newest copy back, or begin another job"
                )
            return
        if party.newest > max(self.guards.last_index, 0):
            raise ProtocolError(
                f"the ledger of '{self.home.id}' is older than its state of this job, which knows of sum "
                f"{party.newest}: the ledger was restored from a copy; put the newest one back"
            )
        if sum(party.silo.past.answers) < self._paid:
            raise ProtocolError(
                f"the state of this job at '{self.home.id}' is older than {self._knows} answers that were charged: it "
                "was restored from a copy, or is gone; put the newest one back, or begin another job"
            )

    @property
    def _knows(self) -> str:
        """Which of this site's files has how many answers of the job."""
        file = "its log" if self._paid == self.decision.charged else "what was seen of it (seen.sqlite)"
        return f"{file}, which has {self._paid}"

    def _silo(self, secure_sum: SumSilo) -> Silo:
        policy, private = self.decision.policy, bool(self.program.terms)
        # Under privacy the gate asks for whole cohorts: the noise was planned for them. Other sites may allow less than
        # this one: what the job says that its sums may lack, and how many of them, is what all agreed to.
        exact = self.disclosed.exact
        missing = min(policy.max_missing(exact) or 0, self.disclosed.missing)
        # In a plain sum the server has every term anyway.
        plain = self.aggregation.kind == "plain"
        unused = None if plain else policy.max_missing(exact)
        # Totals that the server sees with noise, planned for those that may be missing, tell no more by differences.
        lacking = exact and not plain
        limits = Limits(policy.max_rounds, missing, self.disclosed.differences, lacking, _LEFT_OUT, unused)
        name, gate, released = self.home.id, self.guards.gates[self.home.id], self.guards.released(self.home.id)

        def begun() -> Silo:
            # Under record privacy a program sums over no records; under silo privacy it may make anything of them.
            silent = self.unfit.whole and self.view.size > 0
            with _of_data(name):  # the algorithm's own start
                return Silo(name, self.program, self.view, secure_sum, gate, limits, released, silent)

        try:
            silo = begun()
        except DataError as error:
            if not private or not isinstance(self.view, SiloView):
                raise
            self.unfit.tell(error, whole=True)
            self.view = self._view(self._nobodys(self.schema, self.cohort, 1))
            silo = begun()
        silo.on_event = self._tell
        silo.on_unfit = functools.partial(self.unfit.tell, spoilt=True)
        silo.hides = self.unfit.hid
        if silo.keeps_to_itself:
            silo.on_hidden = functools.partial(self.unfit.tell, hid=True)
        elif not plain:
            silo.on_hidden = self._hid
        others = self.unfit.others
        if silo.keeps_to_itself and (self.unfit.spoilt or len(others) >= policy.max_unanswered):
            silo.past = silo.past._replace(failed=True)
            if not self.unfit.spoilt:
                silo.on_unfit(
                    f"{len(others)} jobs asked what the records of '{self.unfit.data_set}' could not answer "
                    f"(max_unanswered = {policy.max_unanswered}), the last '{others[-1]}', so that no other is "
                    "answered; see why there, and raise it to answer more"
                )
        return silo

    def _hid(self, what: str) -> None:
        """Where others see that a total is none: in the log as well, and for the silo of another session of the job."""
        self.unfit.tell(what, hid=True)
        self._tell(UNANSWERABLE, what)

    def _sum(self, session: bytes, store: HeldStore, holder: bytes) -> SumSilo:
        roster, least = self.decision.roster, self.decision.policy.min_cohort
        silos, identity = self.decision.offer.silos, self.home.identity_in(roster)
        missing = self.decision.policy.max_missing(self.disclosed.exact)
        if self._questions is None:  # it outlives sessions: for one question one set of survivors is signed
            begun = (self.folder / "session").exists()
            secret = self.home.state_secret()
            self._questions = open_held(self.folder / _QUESTIONS, secret, power_safe=True, begun=begun)
        opened = OpenSession(roster, session, silos, self.aggregation, holder)
        return silo_sum(opened, store, self.home.id, identity, least, missing, self._questions)

    def _guards(self, algorithm: str, noise: NoiseSource) -> Guards:
        terms, silo, offer = self.program.terms, self.home.id, self.decision.offer
        if not terms:
            return Guards({silo: self._gate(None, noise)})
        job, budget = declared_job(offer.job, offer.data_set, terms, algorithm, noise, self.decision.exact_jobs)
        ledger = open_ledger(self.home, self.decision.policy)
        opened = ledger.open_job(job, default_budget=budget)

        def charge(phase: str, index: int) -> None:
            opened.charge(phase, index)
            hold_to_seen(self.home, ledger)  # until the job ends nobody else sees this row

        guards = Guards({silo: self._gate(charge, noise)}, (opened,), {silo: ledger})
        if guards.released(silo) < self._paid:
            raise ProtocolError(
                f"the ledger of '{silo}' is older than {self._knows} answers of this job that were charged: it was "
                "restored from a copy; put the newest one back"
            )
        return guards

    def _gate(self, charge: Charge | None, noise: NoiseSource) -> Gate:
        silos, rows = self.decision.offer.silos, self.disclosed.rows
        terms = self.program.terms
        return Gate(self.home.id, self.program.tables, terms, charge, noise, silos=silos, rows_of_silos=rows)

    def _drawn(self, derived: Callable[[], bytes]) -> bytes:
        """The secret from which the silo draws."""
        return self._secret(silo_secret(derived, bool(self.program.terms), None) if self._local.repeatable else None)

    def _secret(self, wanted: bytes | None) -> bytes:
        path, job = self.folder / "secret", self.decision.offer.job
        sealer = Sealer(self.home.state_secret(), b"sampling-secret")
        if not path.exists():
            self._check_no_session()
            secret = os.urandom(32) if wanted is None else wanted
            write_atomically(path, sealer.seal(job, secret), private=True)
        with own_file(path):
            return sealer.open(job, path.read_bytes())

    def _check_no_session(self) -> None:
        """Raises ProtocolError where a session was opened and the secret is gone. Under another one records would fall
        into other parts than those whose states the silo keeps, so that one record moved two of them."""
        if (self.folder / "session").exists() and not (self.folder / "ended").exists():
            raise ProtocolError(
                f"the secret of this job at '{self.home.id}', from which its samples and the parts of its records "
                "follow, is gone; put it back, or begin another job"
            )

    def _kept_session(self) -> tuple[bytes, bytes]:
        """The session that was open, and the hash of its encryption key, if any."""
        path = self.folder / "session"
        if not path.exists():
            return b"", b""
        with own_file(path):
            message = CODEC.unpack(path.read_bytes(), Open)
        session = session_of(
            self.decision.roster, self.decision.offer.within(message.schema), message, self.aggregation
        )
        return session, message.holder

    def _kept_store(self) -> HeldStore | None:
        session, _ = self._kept_session()
        path = self.folder / f"{session.hex()}.sqlite"
        return open_held(path, self.home.state_secret(), begun=True) if session and path.exists() else None

    def _new_store(self, session: bytes) -> HeldStore:
        path = self.folder / f"{session.hex()}.sqlite"
        store = open_held(path, self.home.state_secret())
        store.same_boot()
        return store


class _Own(NamedTuple):
    """A site's records as a job uses them. Never leaves the site."""

    schema: Schema
    records: Records
    ids: Tensor
    ids_are_own: bool
    cohort: Cohort


class Cohort:
    """The rows that a job uses, by a digest that only this site can make (`federated_model.cohort_digest`): others who
    read it in the log learn whether rows changed, and nothing of them.

    Raises DataError where they are not those that the job began with here, or that the policy asks for; PolicyError
    where that is so for the columns that a job without differential privacy reads, which is no fault of the rows.

    rows: of a job that uses none the names of columns alone; no later job is held to these, and the log says of them
    what it would of rows that have changed: their digest is another for other columns, and of another data set. left:
    of a formula's job whose totals the server sees exactly, how many rows there are and how many of them were left out.
    beside: by what else of the policy's these rows are left out, and in which order they stand, which the job began
    with too.
    """

    def __init__(
        self, home: Home, offer: JobOffer, folder: Path, rows: Mapping[str, Any] | Collection[str],
        rule: DataRule | None, left: tuple[int, int] | None = None, beside: str = "",
    ) -> None:  # fmt: skip
        key = hashlib.blake2b(b"secure-fvi/cohort/1", key=home.state_secret(), digest_size=32).digest()
        self._none = not isinstance(rows, Mapping)
        if isinstance(rows, Mapping):
            self.digest = cohort_digest(rows, key)
        else:
            said = repr((offer.data_set, sorted(rows))).encode()
            self.digest = hashlib.blake2b(said, key=key, digest_size=32, person=b"fvi no rows/1").digest()
        held = hashlib.blake2b(self.digest + beside.encode(), digest_size=32).digest() if beside else self.digest
        self._held = _COHORT + held
        self._job, self._data_set, self._path = offer.job, offer.data_set, folder / "cohort"
        self._before, self._left = home.state_folder / _COHORTS, left
        self._kept = _cohorts(home)
        self._begun = None
        if self._path.exists():
            if self._path.stat().st_size == len(held):
                raise RecordError(
                    f"'{self._path}' is of an earlier version, which held a job to its rows in any order; "
                    "begin another job"
                )
            self._begun = own_bytes(self._path, len(self._held))
        if self._none:
            return
        self._columns = sorted(rows)
        if self._begun is not None and self._begun != self._held:
            raise DataError(
                f"silo '{home.id}': its rows are not those that the job began with, or in another order; put them back"
            )
        # Under differential privacy no refusal may follow from whether the rows could be read.
        self._check(home.id, rule.cohort if rule is not None else "said", offer.config.privacy is None)

    def _check(self, silo: str, wanted: str, told: bool) -> None:
        kept = self._kept.get(self._data_set, {})
        known = kept.get("digest", self.digest.hex())
        asked = known if wanted == "pinned" else wanted
        if wanted != "said" and self.digest.hex() != asked:
            before = kept.get("columns", self._columns) if known == asked else self._columns
            if told and before != self._columns:
                said = f"job '{self._job}' is outside the policy of '{silo}': data set '{self._data_set}' is held to "
                said += "the rows of a job that read other columns (cohort)"
                own = f"{', '.join(before)} of job '{kept['job']}', and not {', '.join(self._columns)}"
                raise PolicyError(f"{said}: {own}", said)
            raise DataError(
                f"silo '{silo}': the rows of data set '{self._data_set}' are not those that its policy wants (cohort "
                f'{asked[:16]}...); to use these, set its cohort = "{self.digest.hex()}"'
            )

    def note(self) -> str | None:
        """What the log is to say, once a job."""
        if self._begun is not None:
            return None
        said = f"rows of data set '{self._data_set}': cohort {self.digest.hex()}"
        before = self._kept.get(self._data_set)
        if before is None:
            return said
        digest, job = before.get("said") or (before["digest"], before["job"])
        return f"{said}, {'as in' if digest == self.digest.hex() else 'other rows than in'} job '{job}'"

    def keep(self) -> None:
        """Hold the job, and with cohort = "pinned" later ones, to these rows."""
        if self._begun is None:
            found = {"digest": self.digest.hex(), "job": self._job}
            held = self._kept.setdefault(self._data_set, {"left": None})
            held["said"] = list(found.values())  # which may be of no rows
            if not self._none:
                held |= found if self._left is None else {**found, "left": [*self._left, self._job]}
                held["columns"] = self._columns
            write_atomically(self._before, json.dumps(self._kept).encode())
            write_atomically(self._path, self._held)
            self._begun = self._held


def _cohorts(home: Home) -> dict[str, Any]:
    path = home.state_folder / _COHORTS
    with own_file(path, "put its newest copy back; without one, remove it, and pinned rows are the next job's"):
        found: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
        return dict(found)


def check_left_out(home: Home, data_set: str, rows: int, left_out: int) -> None:
    """Raise InputError where a job without differential privacy left out another number of so many rows: by a formula
    that was agreed to since, say. The sets that two policies leave out are one within the other, so that a number tells
    them apart where only formulas were added, or taken away."""
    before = _cohorts(home).get(data_set, {}).get("left")
    if before is not None and before[0] == rows and before[1] != left_out:
        raise InputError(
            f"job '{before[2]}' left out {before[1]} of the {rows} rows of data set '{data_set}', and with the "
            f"formulas that this policy would list {left_out} are left out, as their columns have gaps. Exact "
            "totals of both tell these rows' part alone, one patient's where it is one: fill the "
            "gaps, or leave the columns out; if that may be told, edit the policy by hand"
        )


@contextlib.contextmanager
def _of_data(silo: str) -> Iterator[None]:
    """Whatever goes wrong with a site's own file or records follows from them: a DataError, of one kind for all. What
    the site itself keeps of its jobs is no such file, and what its policy or the offer itself says of a job is of
    neither."""
    try:
        yield
    except (DataError, JobError, RecordError, PolicyError):
        raise
    except Exception as error:
        what = str(error) if isinstance(error, InputError) else f"its data cannot be read ({type(error).__name__})"
        raise DataError(f"silo '{silo}': {what}") from error


@contextlib.contextmanager
def _of_the_job() -> Iterator[None]:
    """What is said of options that do not go together, with a model or with this machine, follows from the offer and
    from names and types of columns, which the server is told."""
    try:
        yield
    except DataError:
        raise
    except InputError as error:
        raise JobError(str(error)) from error


# ----
# A silo's fresh bytes from JOIN to OPEN, kept for a process that ends in between; they open one session, once

_SIZE = 32


class FreshBytes:
    """In `path`, with the system's boot id: a file that a restart of the machine brought back is not used."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def draw(self) -> bytes:
        """32 bytes that no session has rested on."""
        fresh = os.urandom(_SIZE)
        write_atomically(self._path, fresh + boot_id())
        return fresh

    def take(self, named: bytes) -> bool:
        """Whether `named` are the bytes drawn last, which then are used up."""
        kept = self._path.read_bytes() if self._path.exists() else b""
        if not hmac.compare_digest(kept[:_SIZE], named) or kept[_SIZE:] != boot_id():
            return False
        self._path.unlink()
        sync_folder(self._path.parent)
        return True
