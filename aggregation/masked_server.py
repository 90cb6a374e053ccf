"""The server's half of masked sums: names survivors, has their masks opened, adds."""

from __future__ import annotations

import functools
import hashlib
import hmac
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgpack
import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from secure_fvi import wire
from secure_fvi.aggregation import shamir
from secure_fvi.aggregation.base import BlockTable, Exchanges, FloatArray, Total
from secure_fvi.aggregation.messages import (
    Activate,
    BatchSignature,
    Contribution,
    Deliver,
    Deposit,
    DepositRequest,
    Done,
    KeyAdvert,
    KeySet,
    KeysRequest,
    NonceReveal,
    Nonces,
    RevealRequest,
    SetSignature,
    Shares,
    SignRequest,
    pack,
    unpack,
)
from secure_fvi.aggregation.onetime import ROW, mask_key, open_seeds, sealed_length, seed_row, share_row
from secure_fvi.aggregation.prg import Mask, apply_masks
from secure_fvi.aggregation.ring import Ring
from secure_fvi.aggregation.roster import MAX_ATTEMPTS, Roster, check_missing
from secure_fvi.aggregation.session import (
    Secret,
    Session,
    advert_statement,
    graph_order,
    key_set_hash,
    nonce_commitment,
    secret_commitment,
)
from secure_fvi.aggregation.store import MemoryStore, Store
from secure_fvi.errors import AggregationError, InputError, ProtocolError
from secure_fvi.wire import Limit

_UNSHOWN = "unshown"


class Sent(NamedTuple):
    """One silo's contribution, its signature verified."""

    payload: bytes
    digest: bytes  # of the payload
    signature: bytes


class Admitted(NamedTuple):
    """The contributions to one index that count, by place, ascending, and the question that all of them answer."""

    cohort: bytes
    question: bytes
    sent: dict[int, Sent]


class Agreed(NamedTuple):
    """Survivors of one index, as signed, and what each of them sent (by place)."""

    batch: ServerBatch
    request: RevealRequest
    payloads: dict[int, bytes]
    sent: dict[int, Sent]


class MaskedServer:
    """The aggregator. Holds no secret: what it sees is what docs/threat-model.md says it may see.

    With a durable store, a new object over the same store goes on where the old one was killed.
    """

    def __init__(self, roster: Roster, store: Store | None = None) -> None:
        self._roster = roster
        self._store = MemoryStore() if store is None else store
        self._state = ServerState(roster, self._store)
        self._ring = functools.cache(lambda table: Ring(table, roster.bits, roster.size))
        #: By silo whose term is in a sum and that was not shown who signed it, what it is to be shown; over restarts.
        kept = wire.own(self._store.get(_UNSHOWN) or b"\x80", "the server's list of what silos were not shown")
        self._unshown: dict[int, RevealRequest] = {place: unpack(r, RevealRequest) for place, r in kept.items()}

    @property
    def neighbourhood(self) -> str:
        """Degree, threshold and failure probabilities of the graph, in words."""
        return str(self._roster.neighbourhood)

    @property
    def faults(self) -> Mapping[str, str]:
        """By silo id, why its latest bad reply was taken for a dropout."""
        return self._state.faults

    @property
    def proofs(self) -> Mapping[str, bytes]:
        """By silo id, what shows to anyone that it dealt wrong shares (`convicts`)."""
        return {self._roster.ids[place]: proof for place, proof in self._state.left_out.items()}

    def prepare(self, index: int) -> Exchanges[None]:
        """Set-up before the first sum; where sums recover, a refill before the first index of each batch; otherwise
        nothing.

        Raises AggregationError when too few silos answer to go on.
        """
        if index < 0:
            raise InputError(f"a sum index cannot be negative: {index}")
        state = self._state
        if state.session is None:
            yield from state.set_up()
        if self._roster.whole:
            yield from state.bring_up()
            return
        number = index // self._roster.batch
        if self._unshown:  # before a refill, at which silos forget the batch of an older sum
            # A silo takes no further question before it has seen who signed the sum with its term in it.
            replies = yield from state.ask_each(self._unshown, Shares)
            self._remember({p: r for p, r in self._unshown.items() if p not in replies})
        batch = state.batches.get(number)
        if batch is None:
            if state.batches and number < max(state.batches):
                raise AggregationError(f"the secrets of sum {index} are of an old batch")
            batch = yield from state.refill(number)
        if not state.active_enough(batch) or batch.catch_up_due(index):
            yield from state.deliver(batch, batch.lagging)

    def total(
        self,
        index: int,
        cohort: Sequence[str],
        table: BlockTable,
        contributions: Mapping[str, bytes],
        context: bytes,
        question: bytes | None = None,
    ) -> Exchanges[Total]:
        """The sum over those whose contribution arrived; one exchange, or two with the consistency check. Of whole sums
        no exchange, and the sum over the cohort.

        Raises AggregationError when fewer than min_cohort contributed, too few signed, or too few revealed; of whole
        sums, which names them, when anybody's is missing.
        """
        roster, ring = self._roster, self._ring(table)
        length = table.size * ring.dtype.itemsize
        admitted = self.admit(index, cohort, table, contributions, context, length, question)
        payloads, masks = {p: s.payload for p, s in admitted.sent.items()}, list[Mask]()
        if roster.whole:
            self._check_all(index, admitted, contributions)
        else:
            agreed = yield from self.agree(index, table, context, admitted)
            payloads, masks = agreed.payloads, (yield from self.masks_left(agreed))
        total = np.zeros(table.size, ring.dtype)
        for payload in payloads.values():
            np.add(total, np.frombuffer(payload, ring.dtype), out=total)
        apply_masks(total, masks)
        values = decoded(index, lambda: ring.decode(total, len(payloads)))
        return Total(values, tuple(roster.ids[p] for p in payloads))

    def _check_all(self, index: int, admitted: Admitted, came: Collection[str]) -> None:
        """Raise AggregationError, which names them and says what is wrong, where contributions of a whole sum are
        missing."""
        ids, missing = self._roster.ids, [p for p in self._roster.members_of(admitted.cohort) if p not in admitted.sent]
        if missing or not admitted.sent:
            wrong = [ids[p] for p in missing[:3] if ids[p] in came and ids[p] in self.faults]
            why = "".join(f"; '{silo}' sent {self.faults[silo]}" for silo in wrong)
            raise AggregationError(
                f"sum {index}: {len(missing)} of the {len(missing) + len(admitted.sent)} silos asked are missing, past "
                f"max_missing = 0; nothing usable of {_some([ids[p] for p in missing])}{why}"
            )

    def admit(
        self,
        index: int,
        cohort: Sequence[str],
        table: BlockTable,
        contributions: Mapping[str, bytes],
        context: bytes,
        length: int | None,
        question: bytes | None = None,
    ) -> Admitted:
        """The contributions of the cohort that their silos signed, with payloads of `length` bytes (None: any), to
        `question`.

        The others count as dropouts; `faults` says why. Raises AggregationError where no question was named here and
        no more than half of the silos agree on one: who of them lies nobody can say.
        """
        roster, batch = self._roster, None if self._roster.whole else self._batch(index)
        session = self._state.session if batch is None else batch.session
        if session is None:
            raise AggregationError(f"sum {index} was not prepared")
        named, present = (b"", frozenset(session.members)) if batch is None else (batch.digest, batch.present)
        places = sorted(roster.places[silo] for silo in set(cohort) & roster.places.keys())
        asked = roster.bitmap(frozenset(places))
        limit = None if length is None else Limit(length + 4096)
        found: dict[int, tuple[bytes, Sent]] = {}
        left_out = set() if batch is None else self._state.left_out.keys() | batch.left_out
        for place in places:
            if roster.ids[place] not in contributions or place in left_out:
                continue
            try:
                message = unpack(contributions[roster.ids[place]], Contribution, limit)
            except ProtocolError as error:
                self._state.fault(place, str(error))
                continue
            right_length = length is None or len(message.payload) == length
            if message.sum_index != index or not right_length or place not in present:
                self._state.fault(place, "a contribution of another sum or another length")
                continue
            sent = Sent(message.payload, hashlib.sha256(message.payload).digest(), message.signature)
            statement = session.contribution_statement(
                named, index, place, asked, table.digest, context, message.question, sent.digest
            )
            if not roster.verify(place, sent.signature, statement):
                self._state.fault(place, f"a contribution that it did not sign, or not for this sum {index}")
                continue
            found[place] = message.question, sent
        # All answer one broadcast, and so one question.
        asks, count = max(Counter(q for q, _ in found.values()).items(), key=lambda c: c[1], default=(b"", 1))
        if question is not None:
            asks = question
        elif 2 * count <= len(found):
            who = _some([roster.ids[p] for p in found])
            raise AggregationError(f"sum {index}: {who} answer different questions, and none that most of them do")
        for place in [p for p, (answered, _) in found.items() if answered != asks]:
            self._state.fault(place, "a contribution to another question than was asked")
            del found[place]
        return Admitted(asked, asks, {place: sent for place, (_, sent) in found.items()})

    def agree(self, index: int, table: BlockTable, context: bytes, admitted: Admitted) -> Exchanges[Agreed]:
        """Name the survivors among those who sent something, and have them signed."""
        roster, batch = self._roster, self._batch(index)
        survivors = self._name_survivors(index, admitted, batch)
        sent = {p: admitted.sent[p] for p in survivors}
        request = RevealRequest(
            index,
            admitted.cohort,
            roster.bitmap(frozenset(survivors)),
            table.digest,
            context,
            admitted.question,
            [],
            [],
            b"",
            [],
        )
        if roster.consistency_check:
            request = yield from self._sign(request, batch, sent)
        return Agreed(batch, request, {p: s.payload for p, s in sent.items()}, sent)

    def _batch(self, index: int) -> ServerBatch:
        batch = self._state.batches.get(index // self._roster.batch)
        if batch is None:
            raise AggregationError(f"sum {index} was not prepared")
        return batch

    def masks_left(self, agreed: Agreed) -> Exchanges[list[Mask]]:
        """Have shares revealed; what is still to be applied to the sum of the payloads."""
        batch, request, payloads, _ = agreed
        reveals = yield from self.show(agreed)
        try:
            return masks_left(
                batch, request.sum_index, payloads, reveals, request.table, request.context, self._state.fault
            )
        except Convicted as found:
            self._state.leave_out(found.place, str(found), found.proof)
            raise

    def show(self, agreed: Agreed) -> Exchanges[dict[int, Shares]]:
        """Show all silos who signed the survivors, so that who was asked knows whether its answer is used; their
        shares."""
        batch, request, _, sent = agreed
        index = request.sum_index
        asked: dict[int, RevealRequest] = dict.fromkeys(sorted(batch.active), request)
        if not self._roster.consistency_check:
            asked = _with_proofs(asked, sent)
        reveals = yield from self._state.ask_each(asked, Shares)
        for place in [p for p, reply in reveals.items() if reply.sum_index != index]:
            self._state.fault(place, "shares of another sum")
            del reveals[place]
        if self._roster.consistency_check:
            late = sorted(sent.keys() - reveals.keys())
            self._remember({**self._unshown, **dict.fromkeys(late, request)})
        return reveals

    def _remember(self, unshown: dict[int, RevealRequest]) -> None:
        """What silos are to be shown yet, but for sums whose batch is over: silos have forgotten them."""
        batch, batches = self._roster.batch, self._state.batches
        unshown = {place: r for place, r in unshown.items() if r.sum_index // batch in batches}
        if unshown != self._unshown:
            self._unshown = unshown
            self._store.put({_UNSHOWN: msgpack.packb({place: pack(r) for place, r in unshown.items()})})

    def _name_survivors(self, index: int, admitted: Admitted, batch: ServerBatch) -> tuple[int, ...]:
        """Store the survivors, then go on with the stored ones: a second call cannot name others."""
        roster, sent = self._roster, admitted.sent
        if len(sent) < roster.min_cohort:
            raise AggregationError(
                f"sum {index}: {len(sent)} silos contributed, at least min_cohort = {roster.min_cohort} are needed"
            )
        slot, bitmap = f"survivors/{index}", roster.bitmap(frozenset(sent))
        if self._store.get(slot) is None:
            # Silos would refuse these; before they are stored there can still be others.
            try:
                check_missing(roster, index, admitted.cohort, tuple(sent), roster.max_missing)
                batch.session.check_survivors(sent.keys())
            except ProtocolError as error:
                absent = [roster.ids[p] for p in roster.members_of(admitted.cohort) if p not in sent]
                told = str(error).removeprefix(f"sum {index}: ")
                raise AggregationError(f"sum {index}: {told}; nothing usable of {_some(absent)}") from None
        survivors = roster.members_of(self._store.claim(slot, bitmap))
        if not sent.keys() >= set(survivors):
            raise AggregationError(f"sum {index}: a contribution of the survivors named before is missing")
        return survivors

    def _sign(self, request: RevealRequest, batch: ServerBatch, sent: Mapping[int, Sent]) -> Exchanges[RevealRequest]:
        """Collect signatures on the survivors."""
        roster, session = self._roster, batch.session
        statement = session.survivors_statement(batch.digest, request)
        ask = SignRequest(*request[:8])
        replies = yield from self._state.ask_each(
            _with_proofs(dict.fromkeys(sorted(batch.active), ask), sent), SetSignature
        )
        signed: dict[int, bytes] = {}
        for place, reply in sorted(replies.items()):
            if reply.sum_index != request.sum_index or not roster.verify(place, reply.signature, statement):
                self._state.fault(place, "a wrong signature on the survivors")
                continue
            signed[place] = reply.signature
        needed = roster.signatures_needed
        if len(signed) < needed:
            raise AggregationError(
                f"sum {request.sum_index}: {len(signed)} of {roster.size} silos signed the survivors, "
                f"{needed} are needed"
            )
        signers = sorted(signed)[:needed]
        return request._replace(signers=roster.bitmap(frozenset(signers)), signatures=[signed[s] for s in signers])


R = TypeVar("R", SignRequest, RevealRequest)


def _with_proofs(requests: Mapping[int, R], sent: Mapping[int, Sent]) -> dict[int, R]:
    """The requests by place; to a silo that sent nothing itself, with what the survivors signed."""
    proofs = [sent[p].digest for p in sorted(sent)], [sent[p].signature for p in sorted(sent)]
    return {
        place: request if place in sent else request._replace(payloads=proofs[0], proofs=proofs[1])
        for place, request in requests.items()
    }


def decoded(index: int, decode: Callable[[], FloatArray]) -> FloatArray:
    """The decoded total; AggregationError, which names the sum, for one that cannot be."""
    try:
        return decode()
    except AggregationError as error:
        raise AggregationError(f"sum {index}: {error}") from None


def _some(silos: Sequence[str]) -> str:
    """A few names of many."""
    names = ", ".join(f"'{silo}'" for silo in silos[:3])
    return names if len(silos) <= 3 else f"{names} and {len(silos) - 3} others"


# ---- The server's session and batches: set-up, refill, and how they outlive a crash ----

M = TypeVar("M", bound=tuple[Any, ...])
_KEPT_BATCHES = 2


class ServerState:
    """Runs set-up and refills; a reply that is missing, malformed or refused counts as a dropout."""

    def __init__(self, roster: Roster, store: Store) -> None:
        """Take up what `store` holds. Raises InputError when that is another session's."""
        if store.claim("roster", roster.hash) != roster.hash:
            raise InputError("the store holds the state of another session; a new session needs its own")
        self.roster = roster
        self.store = store
        self.session: Session | None = None
        self.batches: dict[int, ServerBatch] = {}
        self._keys: tuple[KeySet, Nonces] | None = None
        self._ready: set[int] = set()  # members known to have the session
        self.faults: dict[str, str] = {}
        self.left_out: dict[int, bytes] = {}  # silos that take part no more, with the proof of why
        self._restore()

    def leave_out(self, place: int, reason: str, proof: bytes) -> None:
        """Take no more contributions and deposits of a silo that dealt wrong shares, as `proof` shows to anyone."""
        self.left_out[place] = proof
        self.store.put({"left_out": msgpack.packb(self.left_out)})
        self.fault(place, reason)

    def _restore(self) -> None:
        left_out = wire.own(self.store.get("left_out") or b"\x80", "the server's list of silos left out")
        self.left_out = {place: proof for place, proof in left_out.items() if proof}  # once also on others' word
        key_set, nonces = (self.store.get(slot) for slot in ("key_set", "nonces"))
        if key_set is None or nonces is None:
            return
        self._keys = unpack(key_set, KeySet), unpack(nonces, Nonces)
        self.session = self._session_of(*self._keys)
        for number in wire.own(self.store.get("batches") or b"\x90", "the server's list of batches"):
            kept = self.store.get(f"batch/{number}")
            if kept is None:
                continue
            deposits, signatures, active, *left_out = wire.own(kept, "a batch of the server")
            batch = ServerBatch(self.session, number, {place: unpack(d, Deposit) for place, d in deposits.items()})
            batch.signatures.update(signatures)
            batch.active.update(active)
            batch.left_out.update(*left_out)
            self.batches[number] = batch

    def _session_of(self, key_set: KeySet, nonces: Nonces) -> Session:
        roster = self.roster
        members = roster.members_of(key_set.members)
        named = key_set_hash(roster, key_set.attempt, key_set.members, key_set.public_keys, key_set.nonce_commitments)
        complete = roster.neighbourhood.complete
        order = members if complete else graph_order(named, members, nonces.nonces)
        return Session(roster, named, members, order)

    def _keep(self, batch: ServerBatch) -> None:
        self.batches[batch.number] = batch
        gone = sorted(self.batches)[:-_KEPT_BATCHES]
        for old in gone:
            del self.batches[old]
        deposits = {place: pack(d) for place, d in batch.deposits.items()}
        state = [deposits, batch.signatures, sorted(batch.active), sorted(batch.left_out)]
        self.store.put({f"batch/{batch.number}": msgpack.packb(state), "batches": msgpack.packb(sorted(self.batches))})
        first = [old * self.roster.batch for old in gone]
        indices = [i for f in first for i in range(f, f + self.roster.batch)]
        self.store.drop([*(f"batch/{old}" for old in gone), *(f"survivors/{i}" for i in indices)])

    def set_up(self) -> Exchanges[None]:
        """Exchange keys; on a k-regular graph also nonces, and anew unless all are revealed."""
        roster = self.roster
        failures: Counter[int] = Counter()
        for attempt in range(int.from_bytes(self.store.get("attempt") or b"", "big"), MAX_ATTEMPTS):
            asked = [p for p in range(roster.size) if failures[p] < 2]
            adverts = yield from self.ask(asked, KeysRequest(attempt), KeyAdvert)
            members = tuple(p for p in sorted(adverts) if self._usable(p, attempt, adverts[p]))
            self._require(members, "set-up")
            bitmap = roster.bitmap(frozenset(members))
            columns = [list(c) for c in zip(*(adverts[m][1:] for m in members), strict=True)]
            key_set = KeySet(attempt, bitmap, *columns)
            # Asked again, silos repeat their adverts; the attempt is used up once a key set is shown.
            self.store.put({"attempt": (attempt + 1).to_bytes(8, "big")})
            named = key_set_hash(roster, attempt, bitmap, key_set.public_keys, key_set.nonce_commitments)
            reveals = yield from self.ask(members, key_set, NonceReveal)
            reveals = {m: r for m, r in reveals.items() if self._opens(m, r, adverts[m], named)}
            nonces = Nonces(attempt, [])
            if roster.neighbourhood.complete:
                self._ready.update(reveals)
            elif len(reveals) < len(members):
                # Who fails twice between its advert and its nonce cannot keep the others from a set-up.
                failures.update(set(members) - reveals.keys())
                continue
            else:
                nonces = Nonces(attempt, [reveals[m].nonce for m in members])
                self._ready.update((yield from self.ask(members, nonces, Done)))
            self._keys = key_set, nonces
            self.session = self._session_of(key_set, nonces)
            self.store.put({"key_set": pack(key_set), "nonces": pack(nonces)})
            return
        raise AggregationError(f"no set-up in {MAX_ATTEMPTS} attempts: silos dropped out between its exchanges")

    def _usable(self, place: int, attempt: int, advert: KeyAdvert) -> bool:
        """Whether the silos will take this advert; one that they refuse would cost all of them the set-up."""
        statement = advert_statement(self.roster, attempt, place, advert.public_key, advert.nonce_commitment)
        if advert.attempt != attempt or not self.roster.verify(place, advert.signature, statement):
            self.fault(place, "a key that is not signed for this set-up")
            return False
        try:
            X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(advert.public_key))
        except ValueError:
            self.fault(place, "an unusable key")
            return False
        return True

    def _opens(self, place: int, reveal: NonceReveal, advert: KeyAdvert, key_set: bytes) -> bool:
        """Whether a nonce is the one committed to, for this key set."""
        if (reveal.attempt, reveal.key_set) != (advert.attempt, key_set):
            self.fault(place, "a nonce for another key set")
            return False
        commitment = nonce_commitment(self.roster, advert.attempt, place, reveal.nonce)
        if not hmac.compare_digest(commitment, advert.nonce_commitment):
            self.fault(place, "a nonce that it did not commit to")
            return False
        return True

    def bring_up(self) -> Exchanges[None]:
        """Send the session to members that missed it; after a restart of the server, to all."""
        assert self.session is not None
        late = set(self.session.members) - self._ready
        if not late or self._keys is None:
            return
        key_set, nonces = self._keys
        answered: Iterable[int] = yield from self.ask(sorted(late), key_set, NonceReveal)
        if nonces.nonces:
            answered = yield from self.ask(sorted(answered), nonces, Done)
        self._ready.update(answered)

    def refill(self, number: int) -> Exchanges[ServerBatch]:
        """Collect the deposits of a batch, and fix who made one."""
        session = self.session
        assert session is not None
        yield from self.bring_up()
        asked = [p for p in session.members if p not in self.left_out]
        deposits = yield from self.ask(asked, DepositRequest(number), Deposit)
        for place in list(deposits):
            if not _well_formed(session, place, number, deposits[place]):
                self.fault(place, "a deposit of the wrong form or without its signature")
                del deposits[place]
        self._require(deposits, "refill")
        batch = ServerBatch(session, number, deposits)
        ids = self.roster.ids
        for one, other in batch.at_odds():
            for place, its in ((one, other), (other, one)):
                self.fault(place, f"its seeds and those of '{ids[its]}' differ; one of the two sent wrong ones")
        if outvoted := self._outvoted(batch):
            batch = ServerBatch(session, number, {p: d for p, d in deposits.items() if p not in outvoted})
        # Stored, then named: whoever is told of these depositors takes no others.
        self._keep(batch)
        return batch

    def _outvoted(self, batch: ServerBatch) -> set[int]:
        """Depositors whose seeds differ from those of most of their neighbours, where enough remain without them.

        They are left out of this batch without the consistency check: survivors do not tell their seeds there, so that
        one such silo that then says nothing would stop each sum.
        """
        if self.roster.consistency_check:
            return set()
        found = set()
        for place, odds in Counter(p for pair in batch.at_odds() for p in pair).items():
            if 2 * odds > len(batch.present.intersection(batch.session.neighbours(place))):
                found.add(place)
        return found if self._can_spare(batch, found) else set()

    def active_enough(self, batch: ServerBatch) -> bool:
        """Whether enough silos have their shares for a sum to succeed."""
        return len(batch.active) >= self._needed

    def deliver(self, batch: ServerBatch, places: Iterable[int]) -> Exchanges[None]:
        """Hand each of `places` its shares; with the consistency check, then the signatures on the batch."""
        roster, number = self.roster, batch.number
        replies = yield from self.ask_each({p: batch.delivery(p) for p in places}, BatchSignature)
        for place, reply in list(replies.items()):
            signed = not roster.consistency_check or roster.verify(place, reply.signature, batch.statement)
            if reply.batch != number or not signed:
                self.fault(place, "a wrong signature on the batch, or one of another batch")
                del replies[place]
        self._hear_complaints(batch, replies)
        if not roster.consistency_check:
            batch.active.update(replies)
            self._keep(batch)
            self._require(batch.active, "refill")
            return
        batch.signatures.update((place, reply.signature) for place, reply in replies.items())
        signers = sorted(batch.signatures)[: roster.signatures_needed]
        self._require(batch.signatures, "refill")
        activate = Activate(number, roster.bitmap(frozenset(signers)), [batch.signatures[s] for s in signers])
        done = yield from self.ask(replies, activate, Done)
        batch.active.update(done)
        self._keep(batch)
        self._require(batch.active, "refill")

    def _hear_complaints(self, batch: ServerBatch, replies: Mapping[int, BatchSignature]) -> None:
        """Leave out of this batch owners of whom too many holders say they were dealt no shares that fit.

        Nobody could open their masks if it is true; one liar, with another silo away, can say it of all others, so that
        none is left out where too few would remain for any sum. A proof comes when masks are to be opened.
        """
        session, roster = batch.session, self.roster
        for place, reply in replies.items():
            statement = session.unheld_statement(batch.digest, reply.unheld)
            if not roster.verify(place, reply.complaint, statement):
                self.fault(place, "a complaint about shares that it did not sign, which is not heard")
                continue
            try:
                batch.unheld[place] = frozenset(roster.members_of(reply.unheld)) & set(batch.held_by(place))
            except ProtocolError as error:
                self.fault(place, str(error))
        doubted = set()
        for owner in batch.depositors:
            holders = [h for h in session.holders(owner) if h in batch.present]
            without = [h for h in holders if owner in batch.unheld.get(h, ())]
            if without and owner not in self.left_out:
                said = ", ".join(f"'{roster.ids[h]}'" for h in without[:3]) + (
                    " and others" if len(without) > 3 else ""
                )
                self.fault(
                    owner, f"{len(without)} of {len(holders)} holders were dealt no shares that fit, as {said} say"
                )
                if len(holders) - len(without) < session.threshold:
                    doubted.add(owner)
        doubted |= batch.left_out
        if self._can_spare(batch, doubted):
            batch.left_out = doubted

    def _can_spare(self, batch: ServerBatch, places: set[int]) -> bool:
        """Whether sums of this batch come about without `places`."""
        return len(batch.present - places - self.left_out.keys()) >= self._needed

    def _require(self, present: Collection[int], stage: str) -> None:
        if len(present) < self._needed:
            missing = [silo for place, silo in enumerate(self.roster.ids) if place not in present]
            raise AggregationError(
                f"{stage}: {len(present)} of {self.roster.size} silos answered, {self._needed} are needed; nothing "
                f"usable of {_some(missing)}"
            )

    @property
    def _needed(self) -> int:
        """Silos without which no sum of all of them comes about."""
        roster = self.roster
        signatures = roster.signatures_needed if roster.consistency_check else 0
        return max(signatures, roster.min_cohort, roster.size - roster.max_missing)

    # Exchanges

    def ask(self, places: Iterable[int], message: tuple[Any, ...], kind: type[M]) -> Exchanges[dict[int, M]]:
        """Send one message to several silos; the well-formed replies by place."""
        data = pack(message)
        return (yield from self._exchange(dict.fromkeys(places, data), kind))

    def ask_each(self, messages: Mapping[int, tuple[Any, ...]], kind: type[M]) -> Exchanges[dict[int, M]]:
        """Send each silo its own message; the well-formed replies by place."""
        packed = {id(m): pack(m) for m in {id(m): m for m in messages.values()}.values()}
        return (yield from self._exchange({p: packed[id(m)] for p, m in messages.items()}, kind))

    def _exchange(self, messages: Mapping[int, bytes], kind: type[M]) -> Exchanges[dict[int, M]]:
        ids = self.roster.ids
        if not messages:
            return {}
        replies = yield {ids[place]: data for place, data in messages.items()}
        out: dict[int, M] = {}
        for place in messages:
            data = replies.get(ids[place])
            if data is None:
                continue
            try:
                out[place] = unpack(data, kind, self.roster.limit)
            except ProtocolError as error:
                self.fault(place, str(error))
        return out

    def fault(self, place: int, reason: str) -> None:
        self.faults[self.roster.ids[place]] = reason


def _well_formed(session: Session, place: int, number: int, deposit: Deposit) -> bool:
    count = session.roster.batch
    return (
        deposit.batch == number
        and len(deposit.commitments) == 64 * count
        and len(deposit.sealed_seeds) == count * sealed_length(session, place)
        and len(deposit.envelopes) == len(session.neighbours(place))
        and [len(row) for row in deposit.seed_rows] == [ROW * count] * len(session.neighbours(place))
        and [len(row) for row in deposit.share_rows] == [2 * ROW * count] * len(session.holders(place))
        and session.roster.verify(place, deposit.signature, session.deposit_statement(place, deposit))
    )


# ---- The batch of deposits, and the removal of masks by what survivors and dropouts left ----


class ServerBatch:
    """Deposits of one batch: public, but envelopes and sealed seeds are closed to the server."""

    def __init__(self, session: Session, number: int, deposits: Mapping[int, Deposit]) -> None:
        self.session = session
        self.number = number
        self.deposits = dict(deposits)
        self.depositors = tuple(sorted(deposits))
        self.present = frozenset(deposits)
        self._digests = [session.deposit_digest(p, deposits[p]) for p in self.depositors]
        self._bitmap = session.roster.bitmap(self.present)
        self.digest = session.batch_digest(number, self._bitmap, self._digests)
        self.statement = session.batch_statement(self.digest)
        self.signatures: dict[int, bytes] = {}
        self.active: set[int] = set()
        self.unheld: dict[int, frozenset[int]] = {}  # by holder, whose shares it says were dealt wrong or not at all
        self.left_out: set[int] = set()  # whose masks too few say they could open: no proof, so for this batch alone
        self._next_catch_up = number * session.roster.batch + 1

    def delivery(self, receiver: int) -> Deliver:
        """What `receiver` gets: the batch's digests, and its envelope from each neighbour that deposited."""
        session = self.session
        senders = [v for v in session.neighbours(receiver) if v in self.present]
        envelopes = [self.deposits[v].envelopes[session.neighbours(v).index(receiver)] for v in senders]
        rows = [self.deposits[v].share_rows[session.position(v, receiver) - 1] for v in senders]
        digests = [hashlib.sha256(row).digest() for row in rows]
        return Deliver(self.number, self._bitmap, self._digests, envelopes, digests)

    @property
    def lagging(self) -> list[int]:
        """Depositors that did not confirm the delivery yet."""
        return sorted(self.present - self.active)

    def catch_up_due(self, index: int) -> bool:
        """Whether to try the lagging ones again: after 1, 2, 4, ... sums, so that the lost cost little."""
        if len(self.active) == len(self.present) or index < self._next_catch_up:
            return False
        first = self.number * self.session.roster.batch
        self._next_catch_up = first + 2 * (index - first)
        return True

    def held_by(self, holder: int) -> list[int]:
        """The owners of the shares in `holder`'s answer, in its order."""
        return [v for v in self.session.holders(holder) if v in self.present]

    def opens(self, owner: int, index: int, kind: Secret, secret: bytes) -> bool:
        """Whether `secret` is the b or e of `index` that `owner` committed to."""
        made = secret_commitment(self.session.binding, owner, index, kind, secret)
        return hmac.compare_digest(made, self.commitment(owner, index, kind))

    def is_share(self, owner: int, holder: int, index: int, kind: Secret, share: bytes) -> bool:
        """Whether `share` is the one of b or e that `owner` committed to for `holder`."""
        entry = 2 * (index % self.session.roster.batch) + kind.column
        row = self.deposits[owner].share_rows[self.session.position(owner, holder) - 1]
        made = share_row(self.session, self.number, owner, holder, share, entry)
        return hmac.compare_digest(made, row[ROW * entry : ROW * entry + ROW])

    def is_seed(self, member: int, neighbour: int, index: int, seed: bytes) -> bool:
        """Whether `member` committed to `seed` as the one of `index` that it shares with `neighbour`."""
        entry = index % self.session.roster.batch
        row = self.deposits[member].seed_rows[self.session.neighbours(member).index(neighbour)]
        made = seed_row(self.session, self.number, member, neighbour, seed, entry)
        return hmac.compare_digest(made, row[ROW * entry : ROW * entry + ROW])

    def is_sealed(self, owner: int, index: int, e: bytes) -> bool:
        """Whether `owner` sealed, under the e that it committed to, the seeds of `index` that it committed to."""
        try:
            sealed = open_seeds(self.session, owner, index, e, self.deposits[owner].sealed_seeds)
        except ProtocolError:
            return False
        return all(self.is_seed(owner, v, index, seed) for v, seed in sealed.items())

    def at_odds(self) -> list[tuple[int, int]]:
        """Pairs of neighbours that committed to different seeds: one of each two is wrong."""
        rows = {
            (p, v): self.deposits[p].seed_rows[at]
            for p in self.depositors
            for at, v in enumerate(self.session.neighbours(p))
        }
        return [(p, v) for (p, v), row in rows.items() if p < v and (v, p) in rows and rows[v, p] != row]

    def commitment(self, owner: int, index: int, kind: Secret) -> bytes:
        """What `owner` committed to for its b or e of `index`."""
        at = 32 * (2 * (index % self.session.roster.batch) + kind.column)
        return self.deposits[owner].commitments[at : at + 32]


def masks_left(
    batch: ServerBatch,
    index: int,
    payloads: Mapping[int, bytes],
    reveals: Mapping[int, Shares],
    table: bytes,
    context: bytes,
    fault: Callable[[int, str], None] = lambda place, reason: None,
) -> list[Mask]:
    """What is to be applied to the ring sum of the survivors' payloads to leave the sum of their values.

    `payloads` by survivor, `reveals` by who answered. `fault` hears of those that sent what they had not committed to.
    Raises Convicted for a silo whose shares do not open its own commitment, or that sealed other seeds than it
    committed to; AggregationError when a secret cannot be recovered or does not match its commitment.
    """
    session = batch.session
    dropped = [d for d in batch.depositors if d not in payloads and any(v in payloads for v in session.neighbours(d))]
    own = {v: reveals[v].own for v in payloads if v in reveals and reveals[v].own}
    for v in [v for v in own if not batch.opens(v, index, Secret.SELF, own[v])]:
        fault(v, "a seed of its self mask that it did not commit to")
        del own[v]
    seeds = _told_seeds(batch, index, payloads.keys(), reveals, fault)
    needed = {d: [v for v in session.neighbours(d) if v in payloads and (v, d) not in seeds] for d in dropped}
    wanted = dict.fromkeys([v for v in payloads if v not in own], Secret.SELF)
    wanted |= {d: Secret.PAIR for d, lacking in needed.items() if lacking}
    secrets = _recover(batch, index, wanted, reveals, fault)

    def key(seed: bytes) -> bytes:
        return mask_key(session, batch.digest, index, table, context, seed)

    # What a survivor added is subtracted, and the other way round.
    masks = [Mask(key(own.get(v) or secrets[v]), True) for v in payloads]
    for d, lacking in needed.items():
        if lacking:
            if not batch.is_sealed(d, index, secrets[d]):
                right = _right_shares(batch, index, d, Secret.PAIR, _shares_by_owner(batch, [d], reveals)[d])
                what = f"the seeds that silo '{session.roster.ids[d]}' sealed are not those that it committed to"
                raise _convicted(batch, index, d, Secret.PAIR, right, what)
            seeds |= _sealed_seeds(batch, index, d, secrets[d], lacking)
        masks += [Mask(key(seeds[v, d]), v < d) for v in session.neighbours(d) if v in payloads]
    return masks


def _told_seeds(
    batch: ServerBatch,
    index: int,
    survivors: Collection[int],
    reveals: Mapping[int, Shares],
    fault: Callable[[int, str], None],
) -> dict[tuple[int, int], bytes]:
    """By survivor and dropped neighbour, the seeds that survivors told themselves, as they had committed to them.

    Whatever the dropped one sealed: a survivor knows best which masks it has put on.
    """
    found: dict[tuple[int, int], bytes] = {}
    for v in sorted(set(survivors) & reveals.keys()):
        away = [d for d in batch.session.neighbours(v) if d in batch.present and d not in survivors]
        told = reveals[v].seeds
        if told and len(told) != len(away):
            fault(v, "seeds that do not fit the survivors")
            continue
        for d, seed in zip(away, told, strict=False):
            if batch.is_seed(v, d, index, seed):
                found[v, d] = seed
            else:
                fault(v, f"a seed, shared with '{batch.session.roster.ids[d]}', that it did not commit to")
    return found


def _sealed_seeds(
    batch: ServerBatch, index: int, dropped: int, e: bytes, lacking: Sequence[int]
) -> dict[tuple[int, int], bytes]:
    """The seeds that `dropped` sealed and shares with `lacking`, who are silent; each as the latter committed to it."""
    session, ids = batch.session, batch.session.roster.ids
    sealed = open_seeds(session, dropped, index, e, batch.deposits[dropped].sealed_seeds)
    for v in lacking:
        if not batch.is_seed(v, dropped, index, sealed[v]):
            raise AggregationError(
                f"sum {index}: the seed that silo '{ids[dropped]}' sealed is not the one that '{ids[v]}' committed to, "
                "and both are silent"
            )
    return {(v, dropped): sealed[v] for v in lacking}


class Convicted(AggregationError):
    """A silo dealt shares, each as it had committed to, that do not open its own commitment, or open a secret under
    which it sealed other seeds than it had committed to. `proof` shows it."""

    def __init__(self, message: str, place: int, proof: bytes) -> None:
        super().__init__(message)
        self.place, self.proof = place, proof


#: A deposit, the index, which of its two secrets, and so many positions with the shares that were dealt to them.
_PROOF = wire.Row(
    wire.binary(),
    wire.whole(),
    wire.one_of(*(kind.value for kind in Secret)),
    wire.Listed(wire.whole(shamir.MAX_HOLDERS + 1, 1)),
    wire.Listed(wire.binary(32)),
)


def convicts(session: Session, place: int, proof: bytes) -> bool:
    """Whether `proof` shows that the silo at `place` dealt wrong shares or sealed wrong seeds: anyone can tell from its
    signed deposit.

    Raises ProtocolError for what is no proof of that form.
    """
    packed, index, named, positions, shares = wire.decode(proof, _PROOF, what="a proof")
    kind = Secret(named)
    deposit = unpack(packed, Deposit)
    batch = ServerBatch(session, deposit.batch, {place: deposit})
    holders = session.holders(place)
    return (
        session.roster.verify(place, deposit.signature, session.deposit_statement(place, deposit))
        and index // session.roster.batch == deposit.batch
        and len(set(positions)) == len(positions) == len(shares) == session.threshold
        and max(positions) <= len(holders)
        and all(
            batch.is_share(place, holders[at - 1], index, kind, share)
            for at, share in zip(positions, shares, strict=True)
        )
        and not _stands(batch, place, index, kind, _combined(positions, shares))
    )


def _stands(batch: ServerBatch, owner: int, index: int, kind: Secret, secret: bytes) -> bool:
    """Whether what `owner`'s shares say is what it committed to, with what it sealed under that."""
    opens = batch.opens(owner, index, kind, secret)
    return opens and (kind is not Secret.PAIR or batch.is_sealed(owner, index, secret))


def _convicted(
    batch: ServerBatch, index: int, owner: int, kind: Secret, right: Mapping[int, bytes], what: str
) -> AggregationError:
    """What to raise: Convicted, or, where nobody else would be convinced, no more than an error. right: shares, by
    position, each as the owner committed to. what: it has done."""
    positions = sorted(right)[: batch.session.threshold]
    shares = [right[p] for p in positions]
    proof: bytes = msgpack.packb([pack(batch.deposits[owner]), index, kind.value, positions, shares])
    if not convicts(batch.session, owner, proof):  # this party's own copy of the deposit may be damaged
        return AggregationError(f"sum {index}: {what}")
    return Convicted(f"sum {index}: {what}; it is left out from now on", owner, proof)


def _combined(positions: Sequence[int], shares: Sequence[bytes]) -> bytes:
    """The secrets, one after another, of which the holder at each position has one row of shares."""
    stacked = np.frombuffer(b"".join(shares), np.uint8).reshape(len(positions), -1)
    return shamir.recover(tuple(positions), stacked).tobytes()


def _recover(
    batch: ServerBatch,
    index: int,
    wanted: Mapping[int, Secret],
    reveals: Mapping[int, Shares],
    fault: Callable[[int, str], None],
) -> dict[int, bytes]:
    """The wanted secret (b or e) of each owner, checked against its commitment."""
    if not wanted:
        return {}
    session, ids = batch.session, batch.session.roster.ids
    found = _shares_by_owner(batch, wanted, reveals, fault)
    secrets = _combined_by_owner(batch, index, wanted, found)
    # Only where shares do not open what their owner committed to is it worth knowing whose they are.
    for owner in [o for o in wanted if not batch.opens(o, index, wanted[o], secrets[o])]:
        holders, kind = session.holders(owner), wanted[owner]
        right = _right_shares(batch, index, owner, kind, found[owner])
        for at in sorted(found[owner].keys() - right.keys()):
            fault(holders[at - 1], f"a share of '{ids[owner]}' that is not the one it was dealt")
        secrets |= _combined_by_owner(batch, index, [owner], {owner: right})
        if not batch.opens(owner, index, kind, secrets[owner]):
            what = f"the shares that silo '{ids[owner]}' dealt do not open its commitment"
            raise _convicted(batch, index, owner, kind, right, what)
    return secrets


def _shares_by_owner(
    batch: ServerBatch,
    wanted: Collection[int],
    reveals: Mapping[int, Shares],
    fault: Callable[[int, str], None] = lambda place, reason: None,
) -> dict[int, dict[int, bytes]]:
    """The shares of each wanted owner that came in, by position."""
    found: dict[int, dict[int, bytes]] = defaultdict(dict)
    for holder, reply in reveals.items():
        owners = batch.held_by(holder)
        if len(owners) != len(reply.shares):
            fault(holder, "shares that do not fit those it holds")
            continue
        for owner, one in zip(owners, reply.shares, strict=True):
            if one and owner in wanted:
                found[owner][batch.session.position(owner, holder)] = one
    return found


def _right_shares(
    batch: ServerBatch, index: int, owner: int, kind: Secret, found: Mapping[int, bytes]
) -> dict[int, bytes]:
    """Those of an owner's shares, by position, that are as it committed to."""
    holders = batch.session.holders(owner)
    return {at: one for at, one in found.items() if batch.is_share(owner, holders[at - 1], index, kind, one)}


def _combined_by_owner(
    batch: ServerBatch, index: int, owners: Iterable[int], found: Mapping[int, Mapping[int, bytes]]
) -> dict[int, bytes]:
    """What the first t shares of each owner, by position, add up to. AggregationError where there are fewer."""
    t = batch.session.threshold
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for owner in owners:
        shares = found.get(owner, {})
        if len(shares) < t:
            silo = batch.session.roster.ids[owner]
            raise AggregationError(f"sum {index}: {len(shares)} shares of silo '{silo}' came in, {t} are needed")
        groups[tuple(sorted(shares)[:t])].append(owner)
    secrets: dict[int, bytes] = {}
    for positions, together in groups.items():
        rows = [b"".join(found[owner][p] for owner in together) for p in positions]
        recovered = _combined(positions, rows)
        secrets |= {owner: recovered[32 * at : 32 * at + 32] for at, owner in enumerate(together)}
    return secrets
