"""A server's process: it offers a job to the silos, opens the session, drives the rounds, and goes on after a crash."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from safetensors.torch import save

from secure_fvi import __version__
from secure_fvi.aggregation.base import SecureSum, SumServer
from secure_fvi.aggregation.graph import least_signatures
from secure_fvi.aggregation.key_holder import KeyWornOut
from secure_fvi.aggregation.messages import M
from secure_fvi.aggregation.parties import PlainServer, server_half
from secure_fvi.algorithms.base import Problem
from secure_fvi.building import Guards, Machine, build_problem, strong_enough
from secure_fvi.checkpoints import STORE_FILE, Checkpoints, latest_round
from secure_fvi.compiled import threads as with_threads
from secure_fvi.deployment import session_messages as talk
from secure_fvi.deployment.certificates import pem_of
from secure_fvi.deployment.countersigning import SEEN, answer_of, countersign, open_trail, own_ledger, seen_heads
from secure_fvi.deployment.deciding import FINISHED, job_entry, over
from secure_fvi.deployment.evidence import Evidence, sign_report, write_evidence
from secure_fvi.deployment.fence import KeptTrace, model_for
from secure_fvi.deployment.going import Stand, Teller
from secure_fvi.deployment.holding import boot_id, open_store
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.job import JobOffer, make_offer, offer_hash, read_offer, sign_offer, silo_ids
from secure_fvi.deployment.model_hash import manifest
from secure_fvi.deployment.names import now
from secure_fvi.deployment.site_job import check_supported
from secure_fvi.deployment.trail import TRAIL, Exchange, Trail
from secure_fvi.disclosure import Disclosure, check_carried, disclose
from secure_fvi.driving import NOTHING_DONE, Books, Parties, Progress, Run
from secure_fvi.engines.remote import Line, Patience
from secure_fvi.engines.stream_messages import LONGEST
from secure_fvi.engines.stream_server import StreamServer
from secure_fvi.errors import AggregationError, InputError, ProtocolError, RecordError, SessionLost
from secure_fvi.exported import Elsewhere
from secure_fvi.federated_model import FederatedModel, Schema
from secure_fvi.files import own_bytes, own_file, write_atomically
from secure_fvi.fitting import check_schemas_agree, result_of
from secure_fvi.messages import SUM
from secure_fvi.mixed_model import MixedModel
from secure_fvi.privacy.gate import NoiseSource
from secure_fvi.privacy.ledger_terms import LEDGER
from secure_fvi.results import Result
from secure_fvi.runs.config import Config, Engine, chosen
from secure_fvi.runs.directory import EVIDENCE, SIGNATURE, RunDirectory, read_json
from secure_fvi.runs.federation import FederationBase, written_out
from secure_fvi.runs.marginals import standing
from secure_fvi.runs.records import settled
from secure_fvi.server import Server
from secure_fvi.trees import merge, plain
from secure_fvi.wire import agreed

if TYPE_CHECKING:
    from secure_fvi.algorithms.kit import Program
    from secure_fvi.deployment.columns_server import ServerColumns

_log = logging.getLogger(__name__)
_BEGIN = "put its newest copy back; without one, remove it, and another session is opened"
_MOST_SESSIONS = 100  # opened anew in one process; a machine that restarts more often needs another remedy


def remote_federation(
    config: Config,
    home: Home,
    folder: RunDirectory,
    listen: str,
    on_listening: Callable[[Hub], None] | None = None,
    sandbox: Literal["required", "off"] = "required",
) -> RemoteFederation:
    """What `config` is to the silos of the roster. sandbox: as in a site's policy.

    Raises InputError for what runs in one process alone so far.
    """
    if home.role != "server":
        raise InputError(f"'{home.path}' is the folder of a {home.role}; a server's is needed here")
    config = settled(config)
    algorithm, aggregation, privacy = chosen(config)
    check_supported(config)
    disclosed = disclose(algorithm, aggregation, privacy, len(silo_ids(config) or ()))
    check_carried(disclosed, config.engine or Engine())
    columns: ServerColumns | None = None
    model: Any = None
    if config.vertical:
        from secure_fvi.deployment.columns_server import ServerColumns

        columns = ServerColumns(config, algorithm, aggregation)
        at = home.roster(now())
        columns.check_allowed(make_offer(config, at, home.id, manifest(config).hash, now(), "asked"), home)
        description = f"{config.model.likelihood} response of predictors summed over {disclosed.silos} silos"
    else:
        kept = KeptTrace(folder.checkpoints / "trace", home.state_secret)
        model, description = model_for(config, sandbox, None, None, home.path, kept=kept)
    if isinstance(model, MixedModel):
        model.check_apart(privacy)
    threads = 1 if config.run.threads == "auto" else config.run.threads
    complete = written_out(config, threads, algorithm, aggregation, privacy)
    return RemoteFederation(
        complete,
        description,
        algorithm,
        aggregation,
        privacy,
        model,
        config.run.threads,
        home,
        folder,
        listen,
        on_listening,
        columns=columns,
    )


@dataclass(frozen=True)
class RemoteFederation(FederationBase):
    """A run whose silos are elsewhere: this process holds no data, but in a vertical job a response that it has."""

    model: FederatedModel | Elsewhere  # None of a vertical job
    silo_threads: Any  # as the user wrote it: each silo chooses by its own work
    home: Home
    folder: RunDirectory
    listen: str
    on_listening: Callable[[Hub], None] | None = None  # told once silos can dial in
    carrier: Callable[..., Any] = StreamServer  # made with what a StreamServer takes
    columns: ServerColumns | None = None  # of a vertical job

    @property
    def disclosed(self) -> Disclosure:
        """As every party derives it from the options."""
        return disclose(self.algorithm, self.aggregation, self.privacy, len(silo_ids(self.config) or ()))

    def digest(self) -> str:
        """Of the model, and the response's file where this process has one: the data are the silos'."""
        own = b"" if self.columns is None else self.columns.digest
        return hashlib.sha256(b"remote/" + manifest(self.config).hash + own).hexdigest()

    def problem(self, schema: Schema, silos: Sequence[str]) -> Any:
        """What all parties know once silos have agreed on `schema`."""
        config = self.config
        machine = Machine(config.run.device, self.dtype, config.run.compile)
        if self.columns is not None:
            return self.columns.problem(schema, silos, config.seed, self.privacy, machine)
        return build_problem(self.model, schema, self.algorithm, silos, config.seed, self.privacy, machine)

    def concluded(self, done: Run[Any], aggregation: SecureSum) -> Any:
        """The result of a run that has ended."""
        if self.columns is not None:
            return self.columns.result(done, aggregation)
        return result_of(done.server, done.engine, self.algorithm, aggregation, done)

    def provenance(self) -> dict[str, str]:
        roster, engine = self.home.roster(now()), self.config.engine or Engine()
        return {
            "engine": "NVIDIA FLARE" if engine.kind == "flare" else "mutual-TLS streams",
            "server": self.home.id,
            "roster": roster.hash.hex(),
            "roster_number": str(roster.serial),
            "model": manifest(self.config).hash.hex(),
        }

    def seal(self, folder: RunDirectory) -> None:
        """Sign the files of the run; those of a run that an earlier version finished hold nothing to be signed for."""
        path, begun = folder.path, folder.read_run()["roster"]
        if (path / SIGNATURE).exists() or not (path / EVIDENCE).exists():
            return
        roster = next((r for r in self.home.accepted_rosters() if r.hash.hex() == begun), None)
        if roster is None:
            raise InputError(f"roster {begun[:16]}..., under which the job in '{path}' ran, was in force here no more")
        sign_report(path, roster, self.home.id, self.home.identity_in(roster))

    def fit(self, **common: Any) -> Result:
        """Run it; `common` holds the options that all runs share."""
        with self.home.hold():
            hub = Hub(self, common["on_round"])
            if self.on_listening is not None:
                self.on_listening(hub)
            try:
                return hub.run()
            finally:
                hub.close()


def program_of(federation: RemoteFederation, problem: Problem) -> Program:
    """The server's half of the algorithm. Raises InputError for one that shows more than the job discloses, or that
    its sums cannot carry."""
    algorithm, aggregation, columns = federation.algorithm, federation.aggregation, federation.columns
    program: Program = algorithm.server(problem) if columns is None else columns.program(problem)
    federation.disclosed.of_program(program.tables, program.terms, aggregation)
    return program


def most_sums(program: Program, silos: int) -> int:
    """More sums than a job under differential privacy has: each was charged by somebody, or ended a session, or lies
    between two such as one of a phase that releases nothing."""
    declared = sum(terms.releases for terms in program.terms.values())
    return len(program.tables) * (silos * declared + _MOST_SESSIONS)


def last_charged(joined: Mapping[str, talk.Joined], known: int, sums: int) -> int:
    """The last sum that any ledger has charged, by what the silos said; -1 for none.

    Raises ProtocolError that names one which says that it was more than `sums` past `known`.
    """
    for silo, its in sorted(joined.items()):
        if its.last_index - 1 > known + sums:
            raise ProtocolError(
                f"'{silo}' says that its ledger has charged sum {its.last_index - 1} of this job, which can have come "
                f"to {known + sums} at most: look at the ledger of '{silo}' before it takes part again"
            )
    return max(its.last_index for its in joined.values()) - 1


def _read(party: str, reply: bytes, kind: type[M]) -> M:
    """What `party` answered. Raises ProtocolError that names it."""
    with answer_of(party):
        return talk.CODEC.unpack(reply, kind)


class _Parties(NamedTuple):
    server: Server
    aggregation: SecureSum


class Hub:
    """One job at the server, from offer to result."""

    def __init__(self, federation: RemoteFederation, on_round: Callable[[Progress], None] | None) -> None:
        self._of, self._on_round = federation, on_round
        home, config = federation.home, federation.config
        self._kept = federation.folder.checkpoints
        self._kept.mkdir(exist_ok=True)
        self._roster = home.roster(now())
        needed = federation.aggregation.kind == "homomorphic"
        self._holder = talk.key_holder_of(self._roster).id if needed else None
        self._trail: Trail = open_trail(home)
        self.offer, self._signed = self._make_offer()
        self._states = open_store(self._kept / STORE_FILE)
        self._checkpoints = Checkpoints(self._kept, store=self._states)
        self._sums: Any = None
        self._guards = Guards({})  # of a response that this process holds, and guards
        self._policies: dict[str, str] = {}  # what each who joined says of its policy
        engine = config.engine or Engine()
        least = least_silos(federation.aggregation, len(self.offer.silos), not federation.disclosed.exact)
        self._patience = Patience(engine.on_loss, engine.deadline, least)
        tls = home.credentials([*self._roster.of_role("silo"), *self._roster.of_role("holder")])
        line = Line(self.offer.silos, self.offer.job, home, self._patience, [self._holder] if self._holder else [])
        self.engine = federation.carrier(line, federation.listen, tls, self._admit, self._roster.hash)
        self.engine.sends = lambda messages: self._write_down(messages, dict.fromkeys(messages))
        self.engine.watch = self._write_down
        self._at = ("joining", 0, 0)  # phase, round, and how many there are at most
        self._teller = Teller(home.path, self._stand)
        for member in self._roster.members.values():  # whom TLS turns away without a word
            try:
                self._roster.whose(pem_of(member.x509), now())
            except ProtocolError as error:
                _log.warning("%s, by the clock of this machine: compare it with the others'", error)
        _log.info("listening at port %d", self.engine.port)
        write_atomically(self._kept / "port", str(self.engine.port).encode())

    def close(self) -> None:
        """Let go of the port and of files; the job may go on later."""
        self._teller.close()
        self.engine.close()
        self._let_go()
        (self._kept / "port").unlink(missing_ok=True)
        self._trail.close()
        self._states.close()
        if self._sums is not None:
            self._sums.close()

    def _let_go(self) -> None:
        """Of this site's own ledger."""
        for ledger in self._guards.holder.ledgers.values() if self._guards.holder is not None else ():
            ledger.close()

    def run(self) -> Result:
        """All of the job. Raises ProtocolError where a silo refuses it, naming the silo and its reason."""
        for _ in range(_MOST_SESSIONS):
            self._let_go()
            try:
                return self._session()
            except (SessionLost, KeyWornOut) as error:
                if isinstance(error, KeyWornOut):  # all still have the session, and have to leave it
                    (self._kept / "session").unlink()
                _log.warning("%s; opening it", error)
                self._trail.note(self.offer.job, str(error))
        raise ProtocolError(f"{_MOST_SESSIONS} sessions were lost; see the silos' logs")

    def _session(self) -> Result:
        """Join, open, and drive to the end of the job or of the session."""
        began, of = time.monotonic(), self._of
        joined = self._join()
        with with_threads(of.threads):
            server, aggregation = self._open(joined)
            going: Run[Result] = Run(
                Parties(server, self.engine, self._guards), lambda done: of.concluded(done, aggregation),
                self._checkpoints, resume=True, block=Books().block, began=began,
            )  # fmt: skip
            for progress in going:
                self._at = (progress.phase, progress.round, progress.max_rounds)
                if self._on_round is not None:
                    self._on_round(progress)
            result = going.result()
            self._end(server, result)
        return result

    def _join(self) -> dict[str, talk.Joined]:
        """Everybody's answer to the offer. The first time all have to accept it."""
        # Whoever belongs to the job is waited for at its start, whatever is done about later losses.
        fresh = latest_round(self._kept) is None
        self.engine.patience = Patience("wait") if fresh else self._patience
        self._countersign()
        replies = self._ask_holder(talk.JOIN + self._signed)
        replies |= self.engine.exchange(dict.fromkeys(self.offer.silos, talk.JOIN + self._signed))
        return {silo: _read(silo, reply, talk.Joined) for silo, reply in replies.items()}

    def _open(self, joined: Mapping[str, talk.Joined]) -> _Parties:
        """The server's parties, once all who joined are in one session: the one that was open, or a new one."""
        of, offer = self._of, self.offer
        self._policies = {site: its.policy.hex() for site, its in joined.items()}
        silos = sorted(joined.keys() - {self._holder})
        schemas = {}
        for silo in silos:
            with answer_of(silo):
                schemas[silo] = talk.unpack_schema(joined[silo].schema)
        if of.columns is None:
            schema = check_schemas_agree(schemas)
        else:
            schema = of.columns.agreed(schemas, offer, of.home, self._kept, self.engine.exchange)
        problem = of.problem(schema, offer.silos)
        if of.columns is not None:
            self._guards = of.columns.guard(problem, offer, of.home, self._kept, self._trail)
        program, noise = program_of(of, problem), NoiseSource(None)
        tables = program.tables.values()
        self.engine.longest = max(LONGEST, talk.longest_message(tables, len(offer.silos), of.aggregation))
        aggregation = strong_enough(of.aggregation, of.disclosed)
        start = Server(problem, program, PlainServer(offer.silos), noise).state
        states = self._checkpoints.load({"server": start, "run": NOTHING_DONE})
        decided = states["server"].last_index if states is not None else 0
        over = states is not None and bool(states["run"].finished)  # silos may have closed the job already
        charged = self._charged(joined, decided, program) if program.terms else 0
        message = self._kept_session(joined)
        if message is None:
            least, missing = getattr(aggregation, "min_cohort", 1), getattr(aggregation, "max_missing", 0)
            holder, nonces = joined[self._holder].nonce if self._holder else b"", [joined[s].nonce for s in silos]
            spoken = {"the offer": offer.protocols} | {f"'{who}'": j.protocols for who, j in joined.items()}
            message = talk.Open(
                silos, nonces, talk.schema_digest(schema), decided, holder, least, missing, agreed(spoken)
            )
            write_atomically(self._kept / "session", boot_id().ljust(64, b"\0") + talk.CODEC.pack(message))
            if program.terms:  # before a silo is in the session: whoever goes on in it asks above the same sum
                write_atomically(self._kept / "charged", max(charged, 0).to_bytes(8, "big"))
        session = self._name(message)
        replies = self._ask_holder(talk.OPEN + talk.CODEC.pack(message))
        replies |= self.engine.exchange(dict.fromkeys(silos, talk.OPEN + talk.CODEC.pack(message)))
        for party, reply in replies.items():
            if _read(party, reply, talk.Opened).session != session and not over:
                raise ProtocolError(f"'{party}' opened another session")
        self._patience = self._patience._replace(least=least_silos(aggregation, len(offer.silos), private=False))
        self.engine.patience = self._patience
        server = Server(problem, program, self._sum(session, aggregation, message.holder), noise)
        if program.terms:  # what was released under old secrets is released anew, and charged
            server.skip_to(self._believed())
        return _Parties(server, aggregation)

    def _charged(self, joined: Mapping[str, talk.Joined], decided: int, program: Program) -> int:
        """The last sum that any silo's ledger says it has charged; `decided`: the last that is known here.

        Raises ProtocolError that names a silo whose word no sums of this job can make true. What was believed before is
        kept, so that who came after it is not blamed.
        """
        return last_charged(joined, max(decided, self._believed()), most_sums(program, len(self.offer.silos)))

    def _believed(self) -> int:
        """The last sum charged before the session that was opened last, by the silos' word then."""
        path = self._kept / "charged"
        return int.from_bytes(own_bytes(path, 8), "big") if path.exists() else 0

    def _end(self, server: Server, result: Result) -> None:
        """Tell the silos, so that each keeps its own posterior; under `drop`, one that is away does not learn of it."""
        self._countersign()
        posterior = save(plain(merge(eta=result.variational.eta, theta=result.variational.theta)))
        accepted, outcome = server.state.accepted, f"{FINISHED}, {standing(result.to_json())}"
        messages = {
            s: talk.END + talk.CODEC.pack(talk.End(outcome, accepted.get(s, 0), posterior)) for s in self.offer.silos
        }
        replies = self.engine.exchange(messages)
        replies |= self._ask_holder(talk.END + talk.CODEC.pack(talk.End(outcome, 0, b"")))
        for party, reply in replies.items():
            _read(party, reply, talk.Ended)
        if not over(self._trail.chain.jobs[self.offer.job].outcome):
            self._trail.close_job(self.offer.job, outcome)
        write_evidence(self._of.folder.path, self._evidence())
        if self._of.columns is not None:
            self._of.columns.forget(self._kept)

    # ---- parts ----

    def _evidence(self) -> Evidence:
        """What the report is to state, once the job has ended."""
        home, roster, offer = self._of.home, self._roster, self.offer
        sites = {*offer.silos, *([self._holder] if self._holder else [])}
        seen = (seen_heads(home, roster, kind) for kind in (TRAIL, LEDGER))
        logs, ledgers = ({name: head for name, head in heads.items() if name in sites} for heads in seen)
        logs[home.id] = (self._trail.chain.length, self._trail.chain.head)
        if self._guards.holder is not None and (chain := own_ledger(home)) is not None:
            ledgers[home.id] = (chain.length, chain.head)
        _, opened = self._opened()
        return Evidence.model_validate({
            "format": 1, "job": offer.job, "offer": offer.hash.hex(), "server": home.id, "model": offer.model.hex(),
            "roster": {"number": roster.serial, "hash": roster.hash.hex(),
                       "signed_by": {m.id: m.identity for m in roster.members.values()}},
            "versions": {"secure_fvi": __version__, "package": offer.package.hex(), "protocol": opened.protocol},
            "policies": self._policies,
            **{name: {member: {"rows": length, "head": head.hex()} for member, (length, head) in sorted(heads.items())}
               for name, heads in (("logs", logs), ("ledgers", ledgers))},
        })  # fmt: skip

    def _stand(self) -> Stand:
        asked, waiting = self.engine.waiting()
        name = f"{self._of.folder.path.resolve().name}: {self._of.description}"
        return Stand(self.offer.job, name, *self._at, asked, tuple(waiting))

    def _make_offer(self) -> tuple[JobOffer, bytes]:
        """The offer of this job, the same bytes however often the server is started."""
        of, path, home = self._of, self._kept / "offer", self._of.home
        if path.exists():
            signed = path.read_bytes()
            with own_file(path):
                offer_hash(signed)
            known = {r.fields["offer"] for r in self._trail.chain.jobs.values()}
            offer = read_offer(signed, self._roster, home.id, now(), known)
            self._log_offer(offer)
            return offer, signed
        job = read_json(of.folder.path / "run.json")["job"]
        self._check_not_offered(job, path)
        threads = of.config.run.model_copy(update={"threads": of.silo_threads})
        config = of.config.model_copy(update={"run": threads, "engine": None})
        offer = make_offer(config, self._roster, home.id, manifest(of.config).hash, now(), job)
        signed = sign_offer(offer, home.identity_in(self._roster))
        write_atomically(path, signed)
        self._log_offer(offer)
        return offer, signed

    def _check_not_offered(self, job: str, path: Path) -> None:
        """Raises RecordError for a job that was: under another offer its sites go on in no session of it."""
        if job in self._trail.chain.jobs:
            raise RecordError(
                f"'{path}' is gone, with which job '{job}' was offered; put its newest copy back, or begin another job"
            )

    def _log_offer(self, offer: JobOffer) -> None:
        chain = self._trail.chain
        if chain.roster != self._roster.hash:
            self._trail.roster(self._roster.serial, self._roster.hash)
        if offer.job not in chain.jobs:
            self._trail.job(job_entry(offer, bytes(32), accepted=True))

    def _admit(self, certificate: bytes) -> str:
        return self._of.home.roster(now()).whose(certificate, now(), "silo", "holder").id

    def _countersign(self) -> None:
        """Before any record of a site grows further: whether it is the one that was seen before."""
        sites = [*self.offer.silos, *([self._holder] if self._holder else [])]

        def exchange(messages: Mapping[str, bytes]) -> dict[str, bytes]:
            to_silos = {site: m for site, m in messages.items() if site != self._holder}
            replies = self._ask_holder(messages[self._holder]) if self._holder and self._holder in messages else {}
            return replies | self.engine.exchange(to_silos)

        countersign(self._of.home, self._roster, self._trail, sites, exchange)

    def _write_down(self, messages: Mapping[str, bytes], replies: Mapping[str, bytes | None]) -> None:
        """Those who answered, and, before anything goes out, all with nothing in place of answers: a site may have
        written down what it was asked when this process is killed."""
        first = next(iter(messages.values()), b"")
        if first[:1] == SEEN:  # receipts are rows of their own
            return
        step = talk.STEPS.get(first[:1], talk.STEPS[SUM])
        rows = [Exchange(silo, step, reply, messages[silo]) for silo, reply in replies.items()]
        self._trail.exchanges(self.offer.job, rows)

    def _kept_session(self, joined: Mapping[str, talk.Joined]) -> talk.Open | None:
        """The session that was open, if every silo that joined still has it and this machine was not restarted."""
        path = self._kept / "session"
        if not path.exists():
            return None
        boot, message = self._opened()
        session = self._name(message)
        same = boot == boot_id().ljust(64, b"\0") and all(j.session == session for j in joined.values())
        return message if same and (self._kept / f"{session.hex()}.sqlite").exists() else None

    def _opened(self) -> tuple[bytes, talk.Open]:
        """The session that was opened last, and the start of the machine in which it was."""
        path = self._kept / "session"
        with own_file(path, _BEGIN):
            content = path.read_bytes()
            return content[:64], talk.CODEC.unpack(content[64:], talk.Open)

    def _name(self, message: talk.Open) -> bytes:
        return talk.session_of(self._roster, self.offer.within(message.schema), message, self._of.aggregation)

    def _ask_holder(self, message: bytes) -> dict[str, bytes]:
        """The key holder's reply, where the job needs one."""
        return {self._holder: self.engine.ask(self._holder, message)} if self._holder else {}

    def _ask_sum(self, message: bytes) -> bytes:
        """The key holder's reply to a message of the secure sum."""
        try:
            (reply,) = self._ask_holder(SUM + message).values()
        except ProtocolError as error:  # which the sum would take for a silence
            raise AggregationError(f"key holder {error}") from None
        return reply

    def _sum(self, session: bytes, aggregation: SecureSum, holder: bytes) -> SumServer:
        if self._sums is not None:
            self._sums.close()
        for path in self._kept.glob("*.sqlite*"):
            if path.name.split(".")[0] not in (Path(STORE_FILE).stem, session.hex()):
                path.unlink()
        self._sums = open_store(self._kept / f"{session.hex()}.sqlite")
        opened = talk.OpenSession(self._roster, session, self.offer.silos, aggregation, holder)
        return server_half(aggregation, self.offer.silos, talk.session_roster(*opened), self._sums, self._ask_sum)


def least_silos(aggregation: SecureSum, silos: int, private: bool) -> int:
    """Silos without which no sum comes about. private: how many may be missing follows from noise, not known yet."""
    masks = aggregation.beneath(64)
    if masks is None:
        return 1
    present = 0 if private else silos - masks.max_missing
    return max(masks.min_cohort, present, least_signatures(silos) if masks.consistency_check else 0)
