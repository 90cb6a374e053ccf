"""What the server of a vertical job has, and does before its first round: it matches people and has the response told.

Under privacy a server that holds a private response is as a silo is: its own policy lists the job and the file, its own
ledger is charged before a pull leaves, and its log has that it was. In its folder of the job

response.noise      what its noise follows from, sealed: what is released again after a crash is the same, charged once
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save

from secure_fvi.aggregation.base import SecureSum, carry
from secure_fvi.aggregation.prg import derive_key
from secure_fvi.aggregation.store import Sealer
from secure_fvi.algorithms.vertical.steps import Response
from secure_fvi.algorithms.vertical.vertical import Held, VerticalProblem
from secure_fvi.alignment import Matcher, MatchingSilo, sorted_order
from secure_fvi.building import Guards, Machine, declared_job, device_named, warn_of_large_delta
from secure_fvi.column_silo import check_whole, response_of
from secure_fvi.columns import RESPONSE_HOLDER, VerticalResult, column_result
from secure_fvi.compiled import choose_mode
from secure_fvi.deployment.columns_job import (
    MOST_PLACES,
    STORE,
    check_many,
    holder_of,
    likelihood_of,
    matching_roster,
    one_person,
    read_aligned,
)
from secure_fvi.deployment.countersigning import Exchange, answer_of, hold_to_seen, open_ledger, open_trail, own_ledger
from secure_fvi.deployment.holding import open_held
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.job import JobOffer
from secure_fvi.deployment.names import now
from secure_fvi.deployment.policy import SitePolicy, data_set_with, read_policy
from secure_fvi.deployment.policy_check import check, check_terms, held_by_server
from secure_fvi.deployment.session_messages import (
    CODEC,
    KNOWN,
    MATCH,
    Known,
    Learned,
    Told,
    Wanted,
    columns_schema,
)
from secure_fvi.deployment.trail import CHARGED, Trail
from secure_fvi.driving import Run
from secure_fvi.errors import InputError, PolicyError, ProtocolError, RecordError
from secure_fvi.federated_model import Schema
from secure_fvi.files import own_bytes, own_file, write_atomically
from secure_fvi.privacy.gate import Gate, KeptNoise
from secure_fvi.privacy.settings import DP
from secure_fvi.runs.columns import response_columns
from secure_fvi.runs.config import Config, chosen

_log = logging.getLogger(__name__)
_NOISE = "response.noise"


def _kept_secret(path: Path, home: Home, job: str, begun: bool) -> bytes:
    """32 bytes of this site's own, sealed in `path`; drawn where there are none and the job was not `begun` with any.
    Raises RecordError."""
    sealer = Sealer(home.state_secret(), b"response-noise")
    remedy = "put its newest copy back: what was released before it was lost would get other noise"
    if not path.exists():
        if begun:
            raise RecordError(f"'{path}' is gone, from which noise of job '{job}' follows; {remedy}")
        write_atomically(path, sealer.seal(job, os.urandom(32)), private=True)
    with own_file(path, remedy):
        return sealer.open(job, path.read_bytes())


def _matching_goes_on(done: int, of: int) -> None:
    _log.info("matching: %d of %d places", done, of)


def _charged(trail: Trail) -> list[str]:
    """Jobs of whose response silos were told, charged to this site's ledger."""
    return [n for n, r in trail.chain.jobs.items() if CHARGED in r.omissions]


def _check_charged(home: Home, trail: Trail, known: Collection[str]) -> None:
    """Raises ProtocolError where the ledger, which knows of the jobs `known`, lacks one of `_charged`, and with it, it
    may be, the budget that one was charged to."""
    if lacking := [name for name in _charged(trail) if name not in known]:
        raise ProtocolError(
            f"the ledger of '{home.id}' is older than its log: it lacks job '{lacking[0]}', of whose response "
            "silos were told; a copy was restored, put the newest one back"
        )


class _Guarded(NamedTuple):
    """Of a private response under privacy: its gate, with this site's own ledger, and the noise."""

    gate: Gate
    noise: KeptNoise


class ServerColumns:
    """What the server of a vertical job has: its likelihood, and the file of the response, unless a silo has that."""

    def __init__(self, config: Config, algorithm: Any, aggregation: SecureSum) -> None:
        """Reads the file, if there is one. Raises InputError, naming the key."""
        assert config.alignment is not None
        assert config.response is not None
        check_whole(aggregation)
        self.alignment, self.likelihood = config.alignment, likelihood_of(config.model)
        self.algorithm = algorithm.resolved(self.likelihood)
        self.holder, self.digest = holder_of(config), b""
        self._response: Response | None = None
        self._policy: SitePolicy | None = None  # of a response that its own ledger guards
        self._guarded: _Guarded | None = None
        self._largest = MOST_PLACES
        if config.response.data is None:
            return
        path, key = Path(config.response.data), "response.data"
        table, self._prepared, _ = read_aligned(path, key, config.alignment)
        self._columns, _ = response_columns(config.response, table)
        # All of it, before anybody hears of the job: what is wrong with one person's is nobody else's to know.
        response_of(self.likelihood, *self._columns, torch.float64, torch.device("cpu"))
        self.digest, self._path = hashlib.sha256(path.read_bytes()).digest(), path

    def check_allowed(self, offer: JobOffer, home: Home) -> None:
        """Whether this site's own policy and ledger let it tell silos of the response. Raises PolicyError,
        ProtocolError for a ledger that is older than the log, and InputError also for options that privacy does not
        allow. A response without a budget needs no policy where the job has no differential privacy."""
        privacy, where = chosen(offer.config)[2], torch.device("cpu")
        self.algorithm.program(one_person(self.likelihood, offer, privacy, torch.float64, where))
        if self.holder is not None:
            return
        if held_by_server(offer.config):
            self._policy = read_policy(home.policy_file)
            rule = check(offer, self._policy, "server", home.roster(now()), home.id)
            assert rule is not None
            if data_set_with(self._policy.data, self._path) != rule.id:
                raise PolicyError(
                    f"the policy of '{home.id}' has '{rule.path}' as data set '{rule.id}', and response.data is "
                    "another file: a response has one name and one budget"
                )
            self._largest = min(MOST_PLACES, rule.largest)
            return
        policy = read_policy(home.policy_file) if home.policy_file.exists() else None
        name = None if policy is None else data_set_with(policy.data, self._path)
        if policy is None or name is None:
            return
        chain = own_ledger(home)
        if home.log_file.exists():
            with closing(open_trail(home)) as trail:
                _check_charged(home, trail, () if chain is None else chain.jobs)
        budget = policy.data[name].budget or (None if chain is None else chain.budget(name))
        if budget is not None:
            raise PolicyError(
                f"response.data is data set '{name}' of '{home.id}', which has a budget of epsilon {budget.epsilon:g}, "
                f"and algorithm.response = '{self.algorithm.response}' of this job tells silos the labels "
                "without noise; it takes response = 'private' and [privacy]"
            )

    def guard(self, problem: VerticalProblem, offer: JobOffer, home: Home, folder: Path, trail: Trail) -> Guards:
        """Charge the whole job to this site's ledger, where it guards the response, or go on with it; what to close in
        the end. folder: what this process keeps. Raises PolicyError and BudgetError, and ProtocolError for a ledger
        that is older than the log, or than this site has seen it."""
        if self._policy is None:
            return Guards({})
        rule = self._policy.data[offer.data_set]
        check_many(offer, home.id, rule, problem.records)
        tables, terms = self.algorithm.program(problem).of_holder()
        check_terms(terms, self._policy)
        warn_of_large_delta(terms, {home.id: problem.records})
        begun = offer.job in _charged(trail)
        noise = KeptNoise(_kept_secret(folder / _NOISE, home, offer.job, begun))
        job, budget = declared_job(offer.job, offer.data_set, terms, self.algorithm.name, noise)
        ledger = open_ledger(home, self._policy)
        try:
            _check_charged(home, trail, ledger.chain.jobs)
            hold_to_seen(home, ledger)
            opened = ledger.open_job(job, default_budget=budget)
        except BaseException:
            ledger.close()
            raise
        if not begun:
            trail.omission(offer.job, CHARGED, f"response of data set '{offer.data_set}'")

        def charge(phase: str, index: int) -> None:
            if not opened.paid_for(phase, noise.digest):  # in a new session silos mask anew what they had released
                opened.charge(phase, index, noise.digest)
                hold_to_seen(home, ledger)  # until the job ends nobody else sees this row

        gate = Gate(RESPONSE_HOLDER, tables, terms, charge, noise)
        self._guarded = _Guarded(gate, noise)
        holder = Guards({RESPONSE_HOLDER: gate}, (opened,), {home.id: ledger}, lambda: hold_to_seen(home, ledger))
        return Guards({}, holder=holder)

    def agreed(
        self, joined: Mapping[str, Schema], offer: JobOffer, home: Home, folder: Path, exchange: Exchange
    ) -> Schema:
        """Find out who the people are, and tell all silos the response where they share it; the schema that the session
        is bound to. joined: what each silo says of its rows, nothing before they are matched. folder: what this process
        keeps. exchange: one message to each silo, and its answer. Raises ProtocolError that names a silo."""
        matched = self.alignment.how == "matching"
        if self.holder is not None:
            order, people = self._carried(offer, home, folder, exchange) if matched else _one_order(joined)
            return columns_schema(people, order, self._passed_on(joined, folder, exchange))
        order, rows = self._matched(offer, home, folder, exchange) if matched else self._sorted(joined, offer)
        at = torch.from_numpy(rows)
        y, offset = (None if c is None else c[at] for c in self._columns)
        assert y is not None
        self._response = response_of(self.likelihood, y, offset, torch.float64, torch.device("cpu"))
        if self.algorithm.response != "shared":
            return columns_schema(len(rows), order)
        # Logs, which others are handed, and the session's name have its digest, on which labels would be tried.
        salt = {"salt": derive_key(home.state_secret(), b"response-salt", offer.hash).hex()}
        content = save({name: value.contiguous().clone() for name, value in self._response._asdict().items()}, salt)
        known, told = hashlib.sha256(content).digest(), folder / "told"
        if not told.exists():  # silos keep it; one that has ended the job meanwhile has no more use for it
            replies = exchange(dict.fromkeys(offer.silos, KNOWN + CODEC.pack(Known(content))))
            for silo, reply in replies.items():
                with answer_of(silo):
                    if CODEC.unpack(reply, Learned).digest != known:
                        raise ProtocolError(f"'{silo}' has learned another response")
            write_atomically(told, known)
        return columns_schema(len(rows), order, known)

    def forget(self, folder: Path) -> None:
        """Once the job is over: the key of matching, what was evaluated with it, and what noise followed from."""
        for path in (*folder.glob(f"{STORE}*"), *folder.glob(_NOISE)):
            path.unlink()

    def problem(
        self, schema: Schema, silos: Sequence[str], seed: int, privacy: DP | None, machine: Machine
    ) -> VerticalProblem:
        """What all parties know before the first round."""
        device, people = device_named(machine.device), schema.constants["people"]
        mode = choose_mode(machine.compile, self.algorithm.expected_calls * len(silos), machine.work)
        return VerticalProblem(self.likelihood, tuple(silos), people, seed, machine.dtype, device, mode, privacy)

    def program(self, problem: Any) -> Any:
        """The server's half, with the response, if it is here."""
        known = self._response and Response(*(c.to(problem.device, problem.dtype) for c in self._response))
        gate, noise = self._guarded or (None, None)
        return self.algorithm.program(problem, Held(known, gate, noise.name if noise is not None else None))

    def result(self, done: Run[Any], aggregation: SecureSum) -> VerticalResult:
        """Of a run that has ended."""
        return column_result(done, self.algorithm, aggregation)

    def _carried(self, offer: JobOffer, home: Home, folder: Path, exchange: Exchange) -> tuple[bytes, int]:
        """The order and how many people are in it, by matching in which this process is the matcher, without a list.
        Kept, since silos that have ended the job answer no more."""
        path = folder / "people"
        if not path.exists():

            def answered(messages: Mapping[str, bytes]) -> dict[str, bytes]:
                return exchange({name: MATCH + message for name, message in messages.items()})

            roster = matching_roster(home.roster(now()), offer)
            found = carry(Matcher(roster).match(_matching_goes_on), answered)
            if not found.matched:
                raise InputError("alignment: no identifier stands in all files; is it written alike everywhere?")
            _log.info("people: %d matched", found.matched)
            write_atomically(path, found.order + found.matched.to_bytes(8, "big"))
        kept = own_bytes(path, 40)
        return kept[:32], int.from_bytes(kept[32:], "big")

    def _passed_on(self, joined: Mapping[str, Schema], folder: Path, exchange: Exchange) -> bytes:
        """The digest of the response, once the silo that has it has told it to every other, sealed for each."""
        assert self.holder is not None
        told = folder / "told"
        if told.exists():
            return own_bytes(told, 32)
        known = {}
        for silo, schema in sorted(joined.items()):
            said = schema.constants
            if silo == self.holder:
                continue
            if "key" not in said:  # it was told before this process was started again
                known[silo] = _bytes_of(silo, said, "response")
                continue
            wanted = Wanted(silo, _bytes_of(silo, said, "key"), _bytes_of(silo, said, "signature"))
            (sealed,) = exchange({self.holder: KNOWN + CODEC.pack(wanted)}).values()
            with answer_of(self.holder):
                CODEC.unpack(sealed, Told)
            (reply,) = exchange({silo: KNOWN + sealed}).values()
            with answer_of(silo):
                known[silo] = CODEC.unpack(reply, Learned).digest
        if len(set(known.values())) != 1:
            raise ProtocolError(f"silos have learned different responses: {', '.join(sorted(known))}")
        digest = next(iter(known.values()))
        write_atomically(told, digest)
        return digest

    def _matched(self, offer: JobOffer, home: Home, folder: Path, exchange: Exchange) -> tuple[bytes, Any]:
        """Order and rows of the response's file, by matching in which this process is the matcher and a party."""
        agreed = home.roster(now())
        roster, identity = matching_roster(agreed, offer), home.identity_in(agreed)
        store = open_held(folder / STORE, home.state_secret(), power_safe=True, job=offer.job)
        try:
            own = MatchingSilo(roster, home.id, identity, self._prepared, store, self._largest)

            def answered(messages: Mapping[str, bytes]) -> dict[str, bytes]:
                there = {name: MATCH + message for name, message in messages.items() if name != home.id}
                replies = exchange(there) if there else {}
                mine = messages.get(home.id)
                return replies if mine is None else {**replies, home.id: own.handle(mine)}

            try:
                found = own.alignment()
            except ProtocolError:  # not agreed on yet
                carry(Matcher(roster).match(_matching_goes_on), answered)
                found = own.alignment()
        finally:
            store.close()
        if not found.matched:
            raise InputError("alignment: no identifier stands in all files; is it written alike everywhere?")
        _log.info("people: %d matched; of response.data %d unmatched", found.matched, found.unmatched)
        return found.order, found.rows

    def _sorted(self, joined: Mapping[str, Schema], offer: JobOffer) -> tuple[bytes, Any]:
        try:
            order = sorted_order(self._prepared, offer.hash)
        except InputError as error:
            raise InputError(f"response.data: {error}") from None
        people = len(self._prepared.rows)
        wanted = columns_schema(people, order).constants
        for silo, schema in sorted(joined.items()):
            if any(schema.constants.get(name) != wanted[name] for name in ("people", "order")):
                raise ProtocolError(
                    f"silo '{silo}' does not hold the people of response.data in the same order: one file has others, "
                    "or identifiers are written differently; align the files, or match (alignment.how = 'matching')"
                )
        return order, np.arange(people)


def _one_order(joined: Mapping[str, Schema]) -> tuple[bytes, int]:
    """The order that all silos state, and how many people are in it."""
    stated = {s: (_bytes_of(s, its.constants, "order"), its.constants.get("people")) for s, its in joined.items()}
    first, *others = sorted(stated)
    for silo in others:
        if stated[silo] != stated[first]:
            raise ProtocolError(
                f"silos '{first}' and '{silo}' do not hold the same people in the same order: one file has others, or "
                "identifiers are written differently; align the files, or match (alignment.how = 'matching')"
            )
    order, people = stated[first]
    if type(people) is not int or people < 1:
        raise ProtocolError(f"'{first}' does not say how many people it holds")
    return order, people


def _bytes_of(silo: str, said: Mapping[str, Any], name: str) -> bytes:
    """What a silo states in hexadecimal. Raises ProtocolError that names it."""
    try:
        return bytes.fromhex(said[name])
    except (KeyError, TypeError, ValueError):
        raise ProtocolError(f"'{silo}' does not state its {name}") from None
