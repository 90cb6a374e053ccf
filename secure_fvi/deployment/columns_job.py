"""A job whose silos hold different columns of the same people, between institutions: what comes before its first round.

A site's job is there in full once it is known who the people are and, where all know it, their response; until then it
answers the messages by which that is found out. From then on it is a job like any other.

    sorted     all files have the same people, sorted by identifier: each silo states the digest of its order
    matching   private matching over the job's own stream; the server is the matcher, and, where it has the response's
               file, a party with the list of that

The digest of the order, the number of people and the digest of a shared response stand in the session's name
(`JobOffer.within`): silos that were told different ones have no keys in common.

A response that lies at a silo is known to the silos alone: each other silo signs a key of its own for it, and the
server carries what that silo seals for each (HPKE, RFC 9180), which it cannot open.

state/jobs/JOB/response            a response that all silos know, sealed
               response.key        what opens the one that is sealed for this silo, sealed
               predictor           the digest of the silo's own program
               matching.evaluated  the silo's key, what it evaluated and for whom, sealed; gone when the job is over

That a job was matched stands in the site's log, which the server countersigns. The server's half is `columns_server`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from safetensors.torch import save
from torch import Tensor

from secure_fvi import wire
from secure_fvi.aggregation.prg import digest
from secure_fvi.aggregation.roster import Roster
from secure_fvi.aggregation.store import Sealer
from secure_fvi.algorithms.base import Posterior
from secure_fvi.algorithms.vertical.likelihoods import Likelihood
from secure_fvi.algorithms.vertical.predictors import check_predictor_at_silo
from secure_fvi.algorithms.vertical.steps import Response
from secure_fvi.algorithms.vertical.vertical import ColumnsProgram, Held, VerticalProblem
from secure_fvi.alignment import MatchingSilo, Normalisation, Prepared, prepare, sorted_order
from secure_fvi.building import Guards, derived_secret, device_named, numbers_of
from secure_fvi.column_silo import (
    VerticalLocalPosterior,
    check_whole,
    columns_of,
    predictor_of,
    response_of,
    view_of,
)
from secure_fvi.compiled import choose_mode
from secure_fvi.deployment.consortium import ConsortiumRoster
from secure_fvi.deployment.holding import HeldStore, open_held
from secure_fvi.deployment.job import JobOffer
from secure_fvi.deployment.policy import DataRule
from secure_fvi.deployment.session_messages import (
    CODEC,
    KNOWN,
    MATCH,
    Joined,
    Known,
    Learned,
    Open,
    Told,
    Wanted,
    columns_schema,
    pack_schema,
)
from secure_fvi.deployment.site_job import Cohort, SiteJob, _of_data, _of_the_job, threads_of
from secure_fvi.deployment.trail import MATCHED
from secure_fvi.engines.stream_messages import LONGEST
from secure_fvi.errors import DataError, InputError, PolicyError, ProtocolError, RecordError
from secure_fvi.federated_model import Schema
from secure_fvi.files import own_bytes, own_file, write_atomically
from secure_fvi.privacy.chain import signed
from secure_fvi.privacy.settings import DP, RecordDP
from secure_fvi.runs.columns import read_people, response_columns, silo_columns
from secure_fvi.runs.config import LIKELIHOODS, Alignment, Config, Model, build, named

_log = logging.getLogger(__name__)
STORE, _RESPONSE, _KEY = "matching.evaluated", "response", "response.key"
LABEL_KEY, LABEL_TOLD = b"secure-fvi/response-key/2/", b"secure-fvi/response-told/1/"
_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
MOST_PLACES = LONGEST // 32  # places in a list: its outputs are one message


def likelihood_of(model: Model) -> Likelihood:
    """The likelihood that a vertical job names. Raises InputError."""
    found: Likelihood = build(
        named(LIKELIHOODS, "model.likelihood", str(model.likelihood)), model.options, "model.options"
    )
    return found


def one_person(
    likelihood: Likelihood, offer: JobOffer, privacy: DP | None, dtype: torch.dtype, device: torch.device
) -> VerticalProblem:
    """A job's problem before it is known how many people there are: on it the job's options, and a silo's own program,
    are looked at before anybody's identifiers are tested for what cannot run."""
    return VerticalProblem(likelihood, tuple(offer.silos), 1, 0, dtype, device, "eager", privacy)


def read_aligned(
    path: Path, key: str, alignment: Alignment, spoilt: list[str] | None = None
) -> tuple[dict[str, Tensor], Prepared, list[Any]]:
    """A file's columns but for its identifiers; these as they are matched; and as they stand. Raises InputError.
    spoilt: is told of cells that cannot be read, which are NaN."""
    table, ids = read_people(path, key, alignment.columns, spoilt)
    return table, prepare(ids, build(Normalisation, alignment.options, "alignment")), ids


def matching_roster(roster: ConsortiumRoster, offer: JobOffer) -> Roster:
    """Who takes part in the matching of a job: its silos, and the server with the list of the response's file, if it
    has that."""
    names = sorted({*offer.silos, *([] if holder_of(offer.config) else [offer.server])})
    members = tuple((name, roster.member(name).identity_key) for name in names)
    return Roster(digest(b"matching-job", offer.hash), members, min_cohort=2)


def holder_of(config: Config) -> str | None:
    """The silo that has the response; None where the server has it."""
    return config.response.silo if config.response is not None else None


def check_many(offer: JobOffer, site: str, rule: DataRule, people: int) -> None:
    """Raises PolicyError where so few people are matched that the server may have chosen them. All know how many they
    are."""
    if people < rule.fewest:
        raise PolicyError(
            f"job '{offer.job}' is outside the policy of '{site}': {people} people were matched, and data set "
            f"'{offer.data_set}' takes no fewer than {rule.fewest} (fewest): totals over a few whom the server has "
            "named are close to one person's"
        )


def _key_statement(offer: JobOffer, silo: str, key: bytes, people: bytes) -> bytes:
    """people: `ColumnsJob._listed_by` of the silo, which is known to who lists them."""
    return digest(b"response-key", offer.hash, silo.encode(), key, people)


def _told_statement(offer: JobOffer, order: bytes, known: bytes) -> bytes:
    return digest(b"response-told", offer.hash, order, known)


# ---- at a site ----


class ColumnsJob(SiteJob):
    """A vertical job at one silo."""

    def _build(self, config: Config) -> None:
        """Read the data; the rest comes once the people are known. Raises as `SiteJob` does, and PolicyError where the
        data set was matched for as many jobs as its site allows."""
        home, offer, (algorithm, aggregation, _) = self.home, self.decision.offer, self._chosen
        assert config.alignment is not None
        self.guards, self.aggregation = Guards({}), aggregation
        self._config, self._dtype = config, config.run.torch_dtype
        with _of_the_job():
            check_whole(aggregation)
            self._likelihood = likelihood_of(config.model)
            self._algorithm = algorithm.resolved(self._likelihood)
            where = device_named(config.run.device)
            alone = one_person(self._likelihood, offer, self._privacy, self._dtype, where)
            self._algorithm.program(alone)
        at = next(j for j, s in enumerate(config.silo) if s.id == home.id)
        silo, key, by_record = config.silo[at], f"silo[{at}]", isinstance(self._privacy, RecordDP)
        spoilt: list[str] = []
        with _of_data(home.id):
            read = read_aligned(Path(silo.data), f"{key}.data", config.alignment, spoilt if by_record else None)
        for line in spoilt:
            self.unfit.tell(line)
        table, self._prepared, ids = read
        table, outcome = self._outcome_of(config, table)
        self._check_predictor(silo.predictor)
        rows, function = silo_columns(silo.predictor, key, table, self._likelihood.columns)
        with _of_data(home.id):
            self._table, _ = columns_of(home.id, rows, self._dtype, where, finite=not by_record)
            named = np.frombuffer(b"".join(hashlib.sha256(repr(i).encode()).digest() for i in ids), np.uint8)
            used = {**rows, **outcome, "ids": named.reshape(-1, 32)}
            try:
                self.cohort = Cohort(home, offer, self.folder, used, self.decision.data)
            except DataError as error:
                if not by_record:
                    raise
                self.unfit.tell(error, whole=True)
        if by_record and self.unfit.whole:  # they go into no answer (`Silo.silent`), and what is asked gets noise
            self.cohort = Cohort(home, offer, self.folder, list(used), self.decision.data)
        private = self._privacy is not None
        self._predictor = predictor_of(home.id, function, self._table, self._likelihood, private)
        self._algorithm.program(alone, self._predictor)
        self._work = 0 if private else numbers_of([rows])
        self.threads = threads_of(config, self._work)
        self._matching: MatchingSilo | None = None
        self._evaluated: HeldStore | None = None
        self._counted = self.decision.matched
        self._order, self._rows, ordered = b"", np.arange(len(self._prepared.rows)), dict[str, Any]()
        if config.alignment.how == "matching":
            self._begin_matching()
        else:
            with _of_data(home.id):
                self._order = sorted_order(self._prepared, offer.hash)
            ordered = columns_schema(len(self._rows), self._order).constants
        self.schema = Schema((), {**ordered, **self._offered_key()})
        self._settled = False
        self._settle()

    def _check_predictor(self, predictor: str | None) -> None:
        """Hold the job to the program that it began with: a file of the site's own, which nobody else has a hash of.
        Raises PolicyError for another one."""
        name = predictor or ""
        file = Path(name.rpartition(":")[0])
        said = hashlib.sha256(name.encode() + (file.read_bytes() if file.is_file() else b"")).digest()
        path = self.folder / "predictor"
        if path.exists() and own_bytes(path, len(said)) != said:
            raise PolicyError(
                f"silo '{self.home.id}': its predictor is not that which the job began with; put that file back"
            )
        write_atomically(path, said)

    @property
    def longest(self) -> int:
        return super().longest if self._settled else LONGEST

    def join(self) -> Joined:
        if self._settle():
            return super().join()
        policy = self.decision.stated_policy(self.home)
        return Joined(pack_schema(self.schema), self._fresh.draw(), b"", 0, policy=policy)

    def open(self, message: Open) -> bytes:
        self._check_settled()
        return super().open(message)

    def handle(self, message: bytes) -> bytes:
        """A message of matching, the response, or a message of a round."""
        kind, body = message[:1], message[1:]
        if kind == MATCH:
            return self._matched(body)
        if kind == KNOWN:
            return CODEC.pack(self._on_response(CODEC.unpack_any(body)))
        self._check_settled()
        return super().handle(message)

    def end(self, accepted: int, posterior: bytes) -> Path:
        self._check_settled()
        return super().end(accepted, posterior)

    def close(self, outcome: str | None = None) -> None:
        super().close(outcome)
        if self._evaluated is not None:
            self._evaluated.close()
            self._evaluated = self._matching = None
        if outcome is not None:
            for path in (*self.folder.glob(f"{STORE}*"), self.folder / _RESPONSE, self.folder / _KEY):
                path.unlink(missing_ok=True)

    def _check_settled(self) -> None:
        """Raises ProtocolError before people and response are known, and RecordError once a session was opened, by
        which they were."""
        if not self._settle():
            if (self.folder / "session").exists():
                files = f"'{STORE}' or '{_RESPONSE}' in '{self.folder}'"
                raise RecordError(f"{files} is gone, or an older copy; put its newest copy back, or begin another job")
            raise ProtocolError(f"silo '{self.home.id}': who the people are, or their response, is not known yet")

    def _own(self, posterior: Posterior) -> dict[str, Tensor]:
        """Means and sds of this silo's own parameters, where its program lets them be worked out, and q(theta_j)."""
        assert self.party is not None
        silo, program = self.party.silo, self.program
        assert isinstance(program, ColumnsProgram)
        q = {f"own/{name}": value for name, value in program.local_fit(silo.local).items()}
        try:
            local = VerticalLocalPosterior(silo)
            moments = {f"{of}/{n}": getattr(p, of) for n, p in local.posterior.items() for of in ("mean", "sd")}
        except Exception as error:
            _log.warning("this silo's own coefficients cannot be worked out at the end (%s)", type(error).__name__)
            return q
        if local.wrong_sds:
            _log.warning("%s", local.wrong_sds)
        return moments | q

    # ---- who the people are ----

    def _settle(self) -> bool:
        """Build what answers rounds, if people and response are known by now; whether they are."""
        if self._settled:
            return True
        shared = self._algorithm.response != "private"
        content = self._kept_response() if shared else b""
        if (shared and content is None) or not self._aligned():
            return False
        config, people = self._config, len(self._rows)
        silos, where = tuple(self.decision.offer.silos), device_named(config.run.device)
        known: Response | tuple[()] = ()
        if content:
            known = _response(self._likelihood, content, people, self._dtype, where, self._salted)
        mode = choose_mode(config.run.compile, self._algorithm.expected_calls * len(silos), self._work)
        self.problem = VerticalProblem(  # type: ignore[assignment]
            self._likelihood, silos, people, config.seed, self._dtype, where, mode, self._privacy
        )
        at = torch.from_numpy(self._rows).to(where)
        rows = {name: value[at] for name, value in self._table.items()}
        if self._privacy is None:
            check_predictor_at_silo(self._predictor, rows, self.home.id)
        self.program = self._algorithm.program(self.problem, self._predictor)
        nothing = torch.zeros(0, dtype=self._dtype, device=where)
        self._family = self._algorithm.program(self.problem, Held(Response(nothing, nothing)))
        self._agree(self._chosen[1], self._algorithm, people)
        owner = b"silo/" + self.home.id.encode()
        self.secret = self._drawn(lambda: derived_secret(config.seed, owner))
        self.view = view_of(self.home.id, rows, known, self.secret)  # type: ignore[assignment]
        self.schema = columns_schema(people, self._order, hashlib.sha256(content).digest() if content else b"")
        self._settled = True
        return True

    def _aligned(self) -> bool:
        """Whether the order is known; then it and this silo's rows in it are there."""
        if not self._order and self._matching is not None:
            with contextlib.suppress(ProtocolError):  # not agreed on yet
                found = self._matching.alignment()
                offer, rule = self.decision.offer, self.decision.data
                assert rule is not None
                check_many(offer, self.home.id, rule, found.matched)
                self._order, self._rows = found.order, found.rows
                _log.info(
                    "people: %d matched; of this site's %d unmatched, %d without an identifier, %d that break the rule"
                    ", %d that stand more than once%s", found.matched, found.unmatched, found.missing, found.invalid,
                    found.duplicated, "".join(f"; {count} with {hint}" for hint, count in found.hints.items()),
                )  # fmt: skip
        return bool(self._order)

    def _begin_matching(self) -> None:
        """Make the silo's party, or go on with it. A store of a job that was matched is not begun anew where it is
        gone: its key would be another, and what it had counted is lost."""
        home, offer, rule = self.home, self.decision.offer, self.decision.data
        store = self.folder / STORE
        if self.decision.matched and not store.exists():
            return
        assert rule is not None
        self._evaluated = open_held(store, home.state_secret(), power_safe=True, begun=self.decision.matched)
        roster, identity = self.decision.roster, home.identity_in(self.decision.roster)
        session = matching_roster(roster, offer)
        with _of_data(home.id):  # other identifiers than the store was begun with
            self._matching = MatchingSilo(session, home.id, identity, self._prepared, self._evaluated, rule.largest)

    def _matched(self, message: bytes) -> bytes:
        """The answer to a message of matching. Before the first the job is counted in the site's log among those that
        the data set is matched for: until all silos have joined it there is none, and nobody's identifiers are
        tested."""
        if self._matching is None:
            raise ProtocolError(
                f"silo '{self.home.id}': the people of this job are not matched, or what it evaluated for them is "
                "gone: a new job is needed"
            )
        if not self._counted:
            self._tell(MATCHED, f"people of data set '{self.decision.offer.data_set}'")
            self._counted = True
        return self._matching.handle(message)

    # ---- the response ----

    @property
    def _salted(self) -> bool:
        """Whether the response is one that the server must not try by its digest."""
        return not self._algorithm.server_knows

    def _outcome_of(self, config: Config, table: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """A table's columns without the response, and that where it lies here: y and offset, a row a row. Raises
        DataError for one that the likelihood does not take."""
        self._outcome: Response | None = None
        if config.response is None or config.response.silo != self.home.id:
            return table, {}
        with _of_data(self.home.id):
            (y, offset), table = response_columns(config.response, table)
            self._outcome = response_of(self._likelihood, y, offset, torch.float64, torch.device("cpu"))
        return table, {f"response/{name}": value for name, value in self._outcome._asdict().items()}

    def _offered_key(self) -> dict[str, str]:
        """The key for which the silo that has the response seals it, and its signature, for the server to carry there;
        nothing where no silo tells it to this one."""
        home, offer = self.home, self.decision.offer
        if holder_of(offer.config) in (None, home.id):
            return {}
        path = self.folder / _KEY
        if not path.exists():
            fresh = X25519PrivateKey.generate().private_bytes_raw()
            write_atomically(path, self._sealer.seal(self._key_slot, fresh), private=True)
        key = self._opener().public_key().public_bytes_raw()
        statement = _key_statement(offer, home.id, key, self._listed_by(home.id))
        signature = home.identity_in(self.decision.roster).sign(LABEL_KEY + statement)
        return {"key": key.hex(), "signature": signature.hex()}

    def _listed_by(self, silo: str) -> bytes:
        """Of files that are sorted, the digest of all people in the name of `silo`: the server, to which the order's is
        stated, could hand that to a silo that lists others. Nothing where people are matched: all signed that they list
        them."""
        assert self._config.alignment is not None
        if self._config.alignment.how == "matching":
            return b""
        return sorted_order(self._prepared, digest(b"response-listed", self.decision.offer.hash, silo.encode()))

    def _opener(self) -> X25519PrivateKey:
        path = self.folder / _KEY
        with own_file(path):
            return X25519PrivateKey.from_private_bytes(self._sealer.open(self._key_slot, path.read_bytes()))

    @property
    def _key_slot(self) -> str:
        return f"{self.decision.offer.job}/{_KEY}"

    def _on_response(self, message: Any) -> Learned | Told:
        """What the server says of the response, by where that lies. Raises ProtocolError for what the job has not."""
        holder, here = holder_of(self.decision.offer.config), self.home.id
        shared = self._algorithm.response == "shared"
        taken = {Known: shared, Wanted: holder == here, Told: holder not in (None, here)}
        if not taken.get(type(message), False):
            raise ProtocolError("the response of this job is not told in this way")
        if not self._aligned():
            raise ProtocolError("who the people are is not known yet, and so not whose response it is")
        if isinstance(message, Wanted):
            return self._tell_response(message)
        return Learned(self._learn(self._opened(message) if isinstance(message, Told) else message.response))

    def _tell_response(self, wanted: Wanted) -> Told:
        """The response, sealed for a silo of the job that signed for its key."""
        home, offer, roster = self.home, self.decision.offer, self.decision.roster
        if wanted.silo not in offer.silos or wanted.silo == home.id:
            raise ProtocolError(f"the response is for the other silos of the job, and '{wanted.silo}' is none")
        people = self._listed_by(wanted.silo)
        statement = _key_statement(offer, wanted.silo, wanted.key, people)
        if not signed(roster.member(wanted.silo).identity_key, LABEL_KEY, statement, wanted.signature):
            as_who = " as who lists the same people can sign it" if people else ""
            raise ProtocolError(f"the key for the response is not signed by '{wanted.silo}'{as_who}")
        content = self._kept_response()
        if content is None:
            assert self._outcome is not None
            own = {name: value[torch.from_numpy(self._rows)] for name, value in self._outcome._asdict().items()}
            salt = torch.frombuffer(bytearray(os.urandom(32)), dtype=torch.uint8)
            content = save({**own, "salt": salt})
            with _of_data(home.id):  # what is wrong with it is this site's alone; to keep it is the disk's
                self._read(content)
        told = _told_statement(offer, self._order, self._learn(content))
        try:
            sealed = _SUITE.encrypt(
                content, X25519PublicKey.from_public_bytes(wanted.key), self._sealed_for(wanted.silo)
            )
        except ValueError:
            raise ProtocolError(f"the key of '{wanted.silo}' is none") from None
        return Told(sealed, home.identity_in(roster).sign(LABEL_TOLD + told))

    def _opened(self, told: Told) -> bytes:
        """The response that its silo sealed for this one."""
        offer, holder = self.decision.offer, holder_of(self.decision.offer.config)
        assert holder is not None
        try:
            content = _SUITE.decrypt(told.sealed, self._opener(), self._sealed_for(self.home.id))
        except (InvalidTag, ValueError):
            raise ProtocolError(f"what is said to be the response of '{holder}' is not sealed for this silo") from None
        statement = _told_statement(offer, self._order, hashlib.sha256(content).digest())
        key = self.decision.roster.member(holder).identity_key
        if not signed(key, LABEL_TOLD, statement, told.signature):
            raise ProtocolError(f"the response is not signed by '{holder}'")
        return bytes(content)

    def _sealed_for(self, silo: str) -> bytes:
        """What the seal is bound to."""
        return digest(b"response-sealed", self.decision.offer.hash, self._order, silo.encode())

    def _learn(self, content: bytes) -> bytes:
        """Keep the response that all silos know; its digest. Once: another one is refused."""
        kept = self._kept_response()
        if kept is not None and kept != content:
            raise ProtocolError("another response was sent for this job before")
        self._read(content)
        if kept is None:
            write_atomically(self.folder / _RESPONSE, self._sealer.seal(self.decision.offer.job, content), private=True)
        self._settle()
        return hashlib.sha256(content).digest()

    def _read(self, content: bytes) -> Response:
        """Raises ProtocolError where it is no response of these people."""
        where = torch.device("cpu")
        return _response(self._likelihood, content, len(self._rows), self._dtype, where, self._salted)

    @property
    def _sealer(self) -> Sealer:
        return Sealer(self.home.state_secret(), b"shared-response")

    def _kept_response(self) -> bytes | None:
        path = self.folder / _RESPONSE
        with own_file(path):
            return self._sealer.open(self.decision.offer.job, path.read_bytes()) if path.exists() else None


def _response(
    likelihood: Likelihood, content: bytes, people: int, dtype: torch.dtype, device: torch.device, salted: bool = False
) -> Response:
    """A response as it came. salted: with bytes at random. Raises ProtocolError for what is none, or not of so many
    people."""
    found = wire.tensors(content, "the response", 3)
    if salted and found.pop("salt", torch.zeros(0)).shape != (32,):
        raise ProtocolError("the response has no 32 bytes at random, without which its digest would tell it")
    if found.keys() != {"y", "offset"} or any(t.shape != (people,) for t in found.values()):
        raise ProtocolError(f"the response is not of {people} people")
    try:
        return response_of(likelihood, found["y"], found["offset"], dtype, device)
    except InputError as error:
        raise ProtocolError(str(error)) from None
