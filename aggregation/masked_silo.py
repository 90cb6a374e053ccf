"""A silo's half of masked sums: refuses whatever could open its contribution."""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np

from secure_fvi import wire
from secure_fvi.aggregation.base import BlockTable, FloatArray
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
    unpack_any,
)
from secure_fvi.aggregation.onetime import (
    PAIR,
    SELF,
    Asked,
    Drawn,
    Secrets,
    Setup,
    draw,
    mask_key,
    open_envelope,
    own_key,
    pair_seeds,
    share_row,
    whole_key,
)
from secure_fvi.aggregation.prg import CHUNK_BYTES, Mask, MaskStream, apply_masks, digest
from secure_fvi.aggregation.ring import Ring
from secure_fvi.aggregation.roster import Identity, Roster, bitmap_of, check_missing
from secure_fvi.aggregation.session import Session
from secure_fvi.aggregation.store import MemoryStore, Overtaken, Still, Store
from secure_fvi.errors import InputError, ProtocolError

LABEL_USE = b"use-of-an-index"
LABEL_VALUES = b"values-of-an-index"
LABEL_QUESTION = b"survivors-of-a-question"
#: The slot of the secret of masks that stay in a total.
SPOIL = "spoil"
#: The slot of the newest index contributed to.
LAST = "last"
#: Which survivors of a question that it was asked a silo was shown: with it among them, or without.
_WITH, _WITHOUT = b"1", b"0"


class _Record(NamedTuple):
    """What a silo remembers of its contribution to an index."""

    table: bytes
    context: bytes
    cohort: bytes
    question: bytes
    most_missing: int


class MaskedSilo:
    """One silo. `contribute` sees values; `handle` answers the server's requests or raises ProtocolError.

    With a durable store, a new object over the same store goes on where the old one was killed.
    """

    #: Whether a payload is a ciphertext, made anew each time, and not the ring's elements.
    encrypts = False

    def __init__(
        self,
        roster: Roster,
        silo_id: str,
        identity: Identity,
        store: Store | None = None,
        min_cohort: int | None = None,
        max_missing: int | None = None,
        questions: Store | None = None,
        unbound: bool = False,
    ) -> None:
        """`roster` is what this site agreed to; `min_cohort` the least it accepts (default: the roster's).

        `max_missing`: how many of a cohort it lets be missing from a total (default: the roster's; the smaller of both
        holds). `questions`: where it notes the survivors that it signed for a question, a store that outlives the
        session where questions do (default: `store`). `unbound`: whether sums may name no question, so that survivors
        are bound to their index alone and one question could be summed twice over other survivors: for parties of one
        process, which ask each index once.
        """
        if silo_id not in roster.places:
            raise InputError(f"silo '{silo_id}' is not in the roster")
        self._me = roster.places[silo_id]
        if roster.members[self._me][1] != identity.public_key:
            raise InputError(f"the roster holds another identity key for silo '{silo_id}'")
        if min_cohort is not None and roster.min_cohort < min_cohort:
            raise InputError(f"the roster's min_cohort {roster.min_cohort} is below this site's, {min_cohort}")
        self.silo_id = silo_id
        self._roster = roster
        self._identity = identity
        self._store = MemoryStore() if store is None else store
        self._state = SiloState(roster, self._me, identity, self._store)
        self._max_missing = roster.max_missing if max_missing is None else min(roster.max_missing, max_missing)
        self._questions = self._store if questions is None else questions
        # Where both are one, the next write to it settles what is claimed for a question.
        self._settle = self._questions is not self._store
        self._unbound = unbound
        self._ring = functools.cache(lambda table: Ring(table, roster.bits, roster.size))
        self._signed = (b"", b"")  # the set signed last and the signature, which need not be checked when it comes back
        self._handlers: dict[type, Callable[[Any], tuple[Any, ...]]] = {
            **self._state.handlers(),
            **({} if roster.whole else {SignRequest: self._on_sign, RevealRequest: self._on_reveal}),
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.silo_id!r})"

    def handle(self, message: bytes) -> bytes:
        """Answer one message of the server. The same message gets the same answer."""
        request = _read(message, self._roster.limit)
        handler = self._handlers.get(type(request))
        if handler is None:
            where = " where a total is of all or there is none" if self.whole else ""
            raise ProtocolError(f"a silo does not take {type(request).__name__}{where}")
        return pack(handler(request))

    def contribute(
        self,
        index: int,
        cohort: Sequence[str],
        table: BlockTable,
        values: FloatArray,
        context: bytes,
        question: bytes = b"",
        most_missing: int | None = None,
        past: Mapping[str, bytes] | None = None,
        spoiled: bool = False,
    ) -> bytes:
        """Masked ring elements of `values`; see `SumSilo.contribute`.

        Of a whole sum the masks are those shared with the neighbours in the cohort, which their keys name with all else
        that is asked. Where sums recover they are shared with all neighbours of the batch, whoever is in the cohort.
        Either way a server that names a smaller cohort to one silo removes no mask from it.
        """
        asked, bitmap = self._check_cohort(index, cohort)
        if len(context) != 32 or len(question) not in (0, 32):
            raise ProtocolError("a context has 32 bytes, and so has a question that is named")
        self._check_bound(index, question)
        batch = None if self.whole else self._state.batch_of(index)
        session = self._state.agreed.session if batch is None else batch.session
        assert session is not None
        session.check_survivors(asked)
        last = self._last_index()
        if index <= last:
            raise ProtocolError(f"sum index {index} was used already, or skipped")
        if batch is None:
            masks = self._whole_masks(session, Asked(index, bitmap, table.digest, context, question), asked, past or {})
        else:
            if self._store.get(f"{SURVIVORS}/{index}") is not None:
                raise ProtocolError(f"the survivors of sum {index} were named already; this silo is too late")
            masks = batch.masks(index, table.digest, context)
        own, spoiled = None, spoiled and self.spoils
        if spoiled or (values.shape == table.some.shape and values[table.some].any()):
            own = self._own_mask(session, Asked(index, bitmap, table.digest, context, question))
            if spoiled:
                masks, own = [*masks, own], None
        payload = self._payload(table, values, masks, own)
        inside = sent = hashlib.sha256(payload).digest()
        if self.encrypts and batch is not None:
            # What a retry after a crash must repeat. Encryption is random: there it is the values themselves, keyed.
            inside = digest(LABEL_VALUES, batch.self_seed(index), values.tobytes())
        if batch is None:
            self._claim_question(index, question, sorted(asked), sorted(asked))
        self._use(index, batch, digest(LABEL_USE, table.digest, context, bitmap, question, inside))
        named = b"" if batch is None else batch.digest
        signature = self._identity.sign(
            session.contribution_statement(named, index, self._me, bitmap, table.digest, context, question, sent)
        )
        message = pack(Contribution(index, question, payload, signature))  # type: ignore[arg-type]
        kept: dict[str, bytes] = {}
        if batch is None:
            self._forget_uses(last, index)
        else:
            most = self._max_missing if most_missing is None else min(self._max_missing, most_missing)
            kept[f"{CONTRIBUTED}/{index}"] = msgpack.packb(_Record(table.digest, context, bitmap, question, most))
        self._put(kept, index, last)
        return message

    def _put(self, kept: Mapping[str, bytes], index: int, last: int) -> None:
        """Write down a contribution: only if no other process has contributed since `last` was the newest index, nor
        was told the survivors of this one."""
        named: Still = {} if self.whole else {f"{SURVIVORS}/{index}": None}
        try:
            self._store.put(kept, {LAST: index}, {LAST: last, **named})
        except Overtaken:
            raise ProtocolError(f"sum {index}: another process has gone on meanwhile") from None

    @property
    def spoils(self) -> bool:
        """See `SumSilo.spoils`."""
        return True

    @property
    def whole(self) -> bool:
        """See `SumSilo.whole`."""
        return self._roster.whole

    @property
    def keys(self) -> bytes:
        """See `SumSilo.keys`."""
        return self._state.binding if self.whole else b""

    def _own_mask(self, session: Session, asked: Asked) -> Mask:
        """One that nobody else has, so that it stays in the total: the same for a contribution that is made again."""
        return Mask(own_key(session, self._store.claim(SPOIL, os.urandom(32)), asked), False)

    def _whole_masks(
        self, session: Session, asked: Asked, cohort: frozenset[int], past: Mapping[str, bytes]
    ) -> list[Mask]:
        """One for each neighbour in the cohort; none of them comes off but in the total of all."""
        me, ids, secrets = self._me, self._roster.ids, self._state.agreed.pair_secrets
        peers = [v for v in session.neighbours(me) if v in cohort]
        if not peers:
            raise ProtocolError(f"silo '{self.silo_id}' has no neighbour in the cohort of sum {asked.sum_index}")
        return [Mask(whole_key(session, secrets[v], me, v, asked, past.get(ids[v], b"")), me > v) for v in peers]

    def _forget_uses(self, last: int, index: int) -> None:
        """Let go, now and then, of claims on indices up to `last`, below which this store contributes to none."""
        if 0 <= last // _KEPT_USES < index // _KEPT_USES:
            first = last // _KEPT_USES * _KEPT_USES
            self._store.drop([f"{USED}/{i}" for i in range(first, last + 1)])

    def _use(self, index: int, batch: SiloBatch | None, what: bytes) -> None:
        """Claim the masks of an index for what they cover, before it leaves; once claimed they cover nothing else.

        The claim binds at once, whatever else a store holds back: a process that was killed before its answer was
        written can repeat the same answer, and no other process over this store can make another. It is on the disk
        with the answer, before that leaves.
        """
        if self._store.claim(f"{USED}/{index}", what, settle=False) != what:
            raise ProtocolError(f"sum index {index} was used already, by another process or before a crash")
        if batch is not None:
            self._state.check_live(batch)
        if index <= self._last_index():
            raise ProtocolError(f"sum index {index} was used already, or skipped")

    def _last_index(self) -> int:
        """The newest index contributed to; read from the store, over which another process may stand. It rises alone: a
        process that stood still while another went on does not bring back an index whose claim was let go of."""
        return self._store.risen(LAST)

    def _check_cohort(self, index: int, cohort: Sequence[str]) -> tuple[frozenset[int], bytes]:
        """The places of the cohort, also as a bitmap. Raises ProtocolError where this silo is not to contribute."""
        if self.silo_id not in cohort:
            raise ProtocolError(f"silo '{self.silo_id}' is not in the cohort of sum {index}")
        asked = _places(self._roster.ids, tuple(cohort))
        if len(asked.places) != len(cohort):
            raise ProtocolError(f"the cohort of sum {index} does not fit the roster")
        if len(cohort) < self._roster.min_cohort:
            raise ProtocolError(
                f"the cohort of sum {index} has {len(cohort)} silos, below min_cohort = {self._roster.min_cohort}"
            )
        return asked

    def _payload(
        self, table: BlockTable, values: FloatArray, masks: Sequence[Mask], own: Mask | None
    ) -> bytes | memoryview:
        """`values` under `masks`; `own` is for what is not zero of blocks of "some"."""
        out = _masked(self._ring(table), values, masks)
        if own is not None:
            at = table.some & (values != 0)
            part = out[at]
            apply_masks(part, [own])
            out[at] = part
        return out.view(np.uint8).data

    def _named(self, request: SignRequest | RevealRequest, signed: bool) -> tuple[SiloBatch, tuple[int, ...], bytes]:
        """The batch, the survivors, and the statement that names them out of their cohort.

        signed: T silos of the roster have signed the statement, each after this same check.
        Raises ProtocolError for a set that this silo would not have named.
        """
        index, roster = request.sum_index, self._roster
        self._check_bound(index, request.question)
        batch = self._state.batch_of(index)
        survivors = roster.members_of(request.survivors)
        record = self._record(index)
        most = self._max_missing if record is None else min(self._max_missing, record.most_missing)
        check_missing(roster, index, request.cohort, survivors, most)
        if not batch.depositors.issuperset(survivors):
            raise ProtocolError(f"a survivor of sum {index} has no secrets for it")
        batch.session.check_survivors(survivors)
        if record is not None:
            if (record.table, record.context) != (request.table, request.context):
                raise ProtocolError(f"sum {index} is of another block table or another broadcast")
            if record.cohort != request.cohort:
                raise ProtocolError(f"sum {index} is of another cohort than the one that was asked")
            if record.question != request.question:
                raise ProtocolError(f"sum {index} answers another question")
        elif self._me in survivors:
            raise ProtocolError(f"silo '{self.silo_id}' did not contribute to sum {index}")
        elif not signed:
            self._check_proofs(request, batch, survivors)
        return batch, survivors, batch.session.survivors_statement(batch.digest, request)

    def _record(self, index: int) -> _Record | None:
        kept = self._store.get(f"{CONTRIBUTED}/{index}")
        return None if kept is None else _Record(*wire.own(kept, "what a silo remembers of its contribution"))

    def _newest(self, index: int) -> _Record | None:
        """Of the newest sum contributed to; `index` is one of them."""
        return self._record(max(index, self._last_index()))

    def _check_bound(self, index: int, question: bytes) -> None:
        if not question and not self._unbound:
            raise ProtocolError(f"sum {index} names no question, to which its survivors would be bound")

    def _check_proofs(self, request: SignRequest | RevealRequest, batch: SiloBatch, survivors: tuple[int, ...]) -> None:
        """A silo that was not asked, or did not answer, takes cohort and question from the survivors' own hands."""
        index, roster = request.sum_index, self._roster
        if not len(survivors) == len(request.payloads) == len(request.proofs):
            raise ProtocolError(f"sum {index} needs each survivor's own signature on what it sent")
        for place, payload, proof in zip(survivors, request.payloads, request.proofs, strict=True):
            statement = batch.session.contribution_statement(
                batch.digest,
                index,
                place,
                request.cohort,
                request.table,
                request.context,
                request.question,
                payload,
            )
            if not roster.verify(place, proof, statement):
                raise ProtocolError(f"silo '{roster.ids[place]}' did not sign that it contributed to this sum {index}")

    def _claim(self, request: SignRequest | RevealRequest, batch: SiloBatch, statement: bytes) -> None:
        """Write down the survivors before anything leaves; the first set named for an index is the only one, and so is
        the first for a question, over all its indices."""
        index, roster = request.sum_index, self._roster
        # Read first, so that the claim rests on what is looked at next.
        last = self._last_index()
        record, newest = self._record(index), self._newest(index)
        if record is not None and (newest is None or newest.question != record.question):
            # What a total lacks is counted when the next question comes; nothing may change after it.
            raise ProtocolError(f"sum {index} is over: silo '{self.silo_id}' has answered a later question")
        held = self._store.get(f"{SURVIVORS}/{index}")
        if held not in (None, statement):
            raise ProtocolError(f"other survivors of sum {index} were named before")
        if held is None:
            members = (roster.members_of(m) for m in (request.cohort, request.survivors))
            self._claim_question(index, request.question, *members)
        try:
            if held is None and self._store.claim(f"{SURVIVORS}/{index}", statement, still={LAST: last}) != statement:
                raise ProtocolError(f"other survivors of sum {index} were named before")
        except Overtaken:
            raise ProtocolError(f"sum {index}: silo '{self.silo_id}' has answered another meanwhile") from None
        self._state.check_live(batch)

    def _claim_question(self, index: int, question: bytes, cohort: Sequence[int], survivors: Sequence[int]) -> None:
        """Write down whose terms this question's total has, if it is named; of a whole sum all of the cohort's."""
        if not question:
            return
        mine = _of_a_question(self._roster.ids, tuple(cohort), tuple(survivors))
        if self._questions.claim(_question_slot(question), mine, self._settle) != mine:
            raise ProtocolError(f"sum {index}: other survivors of this question were named before, at another index")

    def absent_from(self, question: bytes) -> tuple[str, ...] | None:
        """See `SumSilo.absent_from`. Without the consistency check nobody signed what it was shown."""
        held = self._questions.get(_question_slot(question))
        return None if held is None else tuple(wire.own(held[32:], "the survivors of a question"))

    def shown(self, question: bytes) -> bool | None:
        """See `SumSilo.shown`; None for whole sums, and without the consistency check."""
        signed = self._roster.consistency_check and not self.whole
        return self._questions.get(_shown_slot(question)) == _WITH if signed else None

    def left_out(self, question: bytes) -> bool | None:
        """See `SumSilo.left_out`; None for whole sums, and without the consistency check."""
        signed = self._roster.consistency_check and not self.whole
        return self._questions.get(_shown_slot(question)) == _WITHOUT if signed else None

    def _on_sign(self, request: SignRequest) -> SetSignature:
        if not self._roster.consistency_check:
            raise ProtocolError("this session has no consistency check")
        batch, _, statement = self._named(request, signed=False)
        self._claim(request, batch, statement)
        self._signed = statement, self._identity.sign(statement)
        return SetSignature(request.sum_index, self._signed[1])

    def _on_reveal(self, request: RevealRequest) -> Shares:
        checked = self._roster.consistency_check
        batch, survivors, statement = self._named(request, signed=checked)
        if checked:
            self._roster.check_signed(request.signers, request.signatures, statement, (self._me, *self._signed))
        # After the signatures: a request that nobody signed must not decide which set is the only one.
        self._claim(request, batch, statement)
        index, there = request.sum_index, frozenset(survivors)
        shares = batch.shares(index, there)
        if checked and request.question and self._me in self._roster.members_of(request.cohort):
            self._questions.claim(_shown_slot(request.question), _WITH if self._me in there else _WITHOUT, self._settle)
        if not checked or self._me not in there:
            return Shares(index, shares, b"", [])
        # Signed by T silos, these survivors are the only ones: what t holders would open anyhow may be said at once.
        return Shares(index, shares, batch.self_seed(index), batch.seeds_with(index, there))


#: What all silos of one process are sent, keys and nonces of them all, is read once, and is one object. It is public.
_read = functools.lru_cache(maxsize=1)(unpack_any)


class _Asked(NamedTuple):
    places: frozenset[int]
    bitmap: bytes


@functools.lru_cache(maxsize=4)
def _places(ids: tuple[str, ...], cohort: tuple[str, ...]) -> _Asked:
    """The places of a cohort: fewer than it names, where not all of these stand once in the roster's `ids`. This and
    the next are public, and the same for all silos of a process."""
    members = frozenset(cohort)
    places = frozenset(at for at, name in enumerate(ids) if name in members)
    return _Asked(places, bitmap_of(places, len(ids)))


@functools.lru_cache(maxsize=4)
def _of_a_question(ids: tuple[str, ...], cohort: tuple[int, ...], survivors: tuple[int, ...]) -> bytes:
    """What a silo writes down of whose terms the total of a question has."""
    named = [[ids[p] for p in places] for places in (cohort, survivors)]
    absent: bytes = msgpack.packb(sorted(set(named[0]) - set(named[1])))
    return digest(LABEL_QUESTION, msgpack.packb(named)) + absent


def _question_slot(question: bytes) -> str:
    return f"question/{question.hex()}"


def _shown_slot(question: bytes) -> str:
    return f"shown/{question.hex()}"


def _masked(ring: Ring, values: FloatArray, masks: Sequence[Mask]) -> np.ndarray[Any, Any]:
    """Encoded and masked values; long vectors go through encoder and ciphers chunk by chunk, in the cache."""
    if values.nbytes <= CHUNK_BYTES or values.shape != (ring.table.size,):
        out = ring.encode(values)
        apply_masks(out, masks)
        return out
    out = np.empty(ring.table.size, ring.dtype)
    stream = MaskStream(masks, ring.dtype)
    for start in range(0, out.size, stream.chunk):
        part = slice(start, min(start + stream.chunk, out.size))
        ring.encode_part(values, part, out[part])
        stream.apply(out[part])
    return out


# ---- A silo's keys and batches: how they come about, and how they outlive a crash ----
#
# All of it is written to the store before the answer that rests on it leaves. The store then holds private keys
# and shares: a site encrypts it at rest by handing over a `Store` that does so.

_KEPT_BATCHES = 2
#: Indices stay below 2^63, the most that a message can name.
_LAST_BATCH = 2**50
#: Claims on indices of whole sums are let go of by so many.
_KEPT_USES = 64
#: Slots that a silo keeps for each index of the kept batches.
CONTRIBUTED, SURVIVORS, USED = "contributed", "survivors", "used"


class SiloState:
    """Answers the messages of set-up and refill; hands out the batch of an index once it is agreed on."""

    def __init__(self, roster: Roster, me: int, identity: Identity, store: Store) -> None:
        """Take up what `store` holds. Raises InputError when that is another session's."""
        if store.claim("roster", roster.hash) != roster.hash:
            raise InputError("the store holds the state of another session; a new session needs its own")
        self.roster = roster
        self.me = me
        self.identity = identity
        self.store = store
        self._setup: Setup | None = None
        self._batches: dict[int, SiloBatch] = {}
        self._restore()

    def __repr__(self) -> str:
        return "SiloState(...)"

    def _restore(self) -> None:
        data = self.store.get("setup")
        if data is None:
            return
        self._setup = Setup.restore(self.roster, self.me, self.identity, data)
        for number in wire.own(self.store.get("batches") or b"\x90", "the silo's list of batches"):
            kept = self.store.get(self._slot("batch", number))
            if kept is None or self._setup.session is None:
                continue
            batch = SiloBatch.restore(self._setup.session, self.me, kept, self._setup.pair_secrets)
            delivery = self.store.get(self._slot("delivery", number))
            if delivery is not None:
                batch.accept(unpack(delivery, Deliver))
            batch.active = self.store.get(self._slot("active", number)) is not None
            self._batches[number] = batch

    def _slot(self, kind: str, number: int) -> str:
        """Where `kind` of a batch is kept. Another set-up has other batches of the same numbers."""
        assert self._setup is not None
        return f"{kind}/{self._setup.attempt}/{number}"

    def _keep_setup(self, setup: Setup) -> None:
        self.store.put({"setup": setup.to_bytes()})

    # Set-up

    def on_keys_request(self, request: KeysRequest) -> KeyAdvert:
        """Fresh keys for a new attempt, which makes an end of the batches of the one before."""
        if self._setup is not None and request.attempt <= self._setup.attempt:
            if request.attempt < self._setup.attempt:
                raise ProtocolError("an old set-up")
            return self._setup.advert
        fresh = Setup.fresh(self.roster, self.me, self.identity, request)
        # Claimed: two processes over one store hand out the same keys, and take the same key set.
        held = self.store.claim(f"keys/{request.attempt}", fresh.to_bytes())
        setup = Setup.restore(self.roster, self.me, self.identity, held)
        for number in list(self._batches):
            self._forget(number)
        self._keep_setup(setup)
        self._setup = setup
        return setup.advert

    def on_key_set(self, request: KeySet) -> NonceReveal:
        setup = self._current_setup()
        slot = f"key_set/{setup.attempt}"
        reveal = setup.accept_keys(request, lambda: unpack(self.store.claim(slot, pack(request)), KeySet))
        self._keep_setup(setup)
        return reveal

    def on_nonces(self, request: Nonces) -> Done:
        setup = self._current_setup()
        setup.accept_nonces(request)
        self._keep_setup(setup)
        return Done()

    @property
    def binding(self) -> bytes:
        """The session's; empty before it is fixed."""
        session = None if self._setup is None else self._setup.session
        return b"" if session is None else session.binding

    @property
    def agreed(self) -> Setup:
        """Whose session is fixed; ProtocolError before that."""
        setup = self._current_setup()
        if setup.session is None:
            raise ProtocolError("keys are not exchanged yet")
        return setup

    def _current_setup(self) -> Setup:
        if self._setup is None:
            raise ProtocolError("no keys were asked for yet")
        return self._setup

    # Batches

    def on_deposit_request(self, request: DepositRequest) -> Deposit:
        """Draw the secrets of a batch; asked again, hand out the same deposit."""
        setup = self.agreed
        assert setup.session is not None
        batch = self._batches.get(request.batch)
        if batch is None:
            if self._batches and request.batch < max(self._batches):
                raise ProtocolError("an old batch")
            if request.batch > _LAST_BATCH:
                raise ProtocolError("a batch past the last")
            drawn = draw(setup.session, self.me, request.batch, setup.pair_secrets)
            signature = self.identity.sign(setup.session.deposit_statement(self.me, drawn.deposit))
            drawn = drawn._replace(deposit=drawn.deposit._replace(signature=signature))
            fresh = SiloBatch(setup.session, self.me, drawn, setup.pair_secrets)
            # Claimed: of two processes over one store, both use the secrets that the first has drawn.
            mine = fresh.to_bytes()
            held = self.store.claim(self._slot("batch", request.batch), mine)
            first = held == mine
            batch = fresh if first else SiloBatch.restore(setup.session, self.me, held, setup.pair_secrets)
            self.check_live(batch)
            self._batches[request.batch] = batch
            for number in sorted(self._batches)[:-_KEPT_BATCHES]:
                self._forget(number)
            self.store.put({"batches": msgpack.packb(sorted(self._batches))})
        return batch.deposit

    def _forget(self, number: int) -> None:
        """What is forgotten can be revealed to nobody, and is drawn and used no more."""
        # First the mark, then the claims: who finds a claim free once it is dropped finds the mark as well.
        self.store.claim(self._slot("over", number), b"1")
        del self._batches[number]
        first = number * self.roster.batch
        indices = range(first, first + self.roster.batch)
        claims = [f"{kind}/{i}" for i in indices for kind in (CONTRIBUTED, SURVIVORS, USED)]
        self.store.drop([*claims, *(self._slot(kind, number) for kind in ("batch", "delivery", "active"))])

    def check_live(self, batch: SiloBatch) -> None:
        """Raise ProtocolError for a batch that was forgotten, be it by another process over this store.

        To be called after what claims a slot of the batch: what was claimed before may have been dropped with it.
        """
        if self.store.get(self._slot("over", batch.number)) is not None:
            raise ProtocolError(f"batch {batch.number} is over")

    def on_deliver(self, request: Deliver) -> BatchSignature:
        """Hold the shares; sign the batch, which with the consistency check waits for T signatures."""
        batch = self._numbered(request.batch)
        slot = self._slot("delivery", batch.number)
        batch.accept(request, lambda: unpack(self.store.claim(slot, pack(request)), Deliver))
        self.check_live(batch)
        if not self.roster.consistency_check:
            self._activate(batch)
        signed = self.roster.consistency_check
        unheld = self.roster.bitmap(batch.unheld)
        signature = self.identity.sign(batch.statement) if signed else b""
        complaint = self.identity.sign(batch.session.unheld_statement(batch.digest, unheld))
        return BatchSignature(request.batch, unheld, signature, complaint)

    def _activate(self, batch: SiloBatch) -> None:
        self.store.put({self._slot("active", batch.number): b"1"})
        batch.active = True

    def on_activate(self, request: Activate) -> Done:
        batch = self._numbered(request.batch)
        self.roster.check_signed(request.signers, request.signatures, batch.statement)
        self._activate(batch)
        return Done()

    def _numbered(self, number: int) -> SiloBatch:
        batch = self._batches.get(number)
        if batch is None:
            raise ProtocolError(f"batch {number} is unknown here")
        return batch

    def batch_of(self, index: int) -> SiloBatch:
        """The batch of an index; raises ProtocolError unless it is agreed on."""
        batch = self._numbered(index // self.roster.batch)
        if not batch.active:
            raise ProtocolError(f"batch {batch.number} is not agreed on yet")
        return batch

    def handlers(self) -> dict[type, Any]:
        """Which message goes to which method."""
        keys = {KeysRequest: self.on_keys_request, KeySet: self.on_key_set, Nonces: self.on_nonces}
        if self.roster.whole:
            return keys
        batches = {DepositRequest: self.on_deposit_request, Deliver: self.on_deliver, Activate: self.on_activate}
        return {**keys, **batches}


# ---- What one silo keeps of a batch of indices: its own secrets, neighbours' seeds, the shares it holds ----


class SiloBatch:
    """From the drawing of secrets to the last share revealed."""

    def __init__(self, session: Session, me: int, drawn: Drawn, pair_secrets: Mapping[int, bytes]) -> None:
        self.session = session
        self.me = me
        self.number = drawn.deposit.batch
        self.active = False
        self.depositors: frozenset[int] = frozenset()
        self.digest = b""
        self._pair_secrets = pair_secrets
        self._drawn = drawn
        self.deposit = drawn.deposit
        self._held: dict[int, Secrets] = {} if drawn.own_shares is None else {me: drawn.own_shares}
        # By neighbour, ascending: seeds of all indices; whether the mask is subtracted.
        self._peers: dict[int, tuple[bytes, bool]] = {}
        self._owners: list[int] = []  # whose shares this silo may be asked for, ascending
        self._delivery: Deliver | None = None

    def __repr__(self) -> str:
        return f"SiloBatch({self.number})"

    def to_bytes(self) -> bytes:
        """What was drawn, secrets included: for the store alone."""
        own = b"" if self._drawn.own_shares is None else self._drawn.own_shares.tobytes()
        return bytes(msgpack.packb([self._drawn.self_seeds, own, pack(self.deposit)]))

    @classmethod
    def restore(cls, session: Session, me: int, data: bytes, pair_secrets: Mapping[int, bytes]) -> SiloBatch:
        """The batch as it was drawn when `data` was made by `to_bytes`."""
        self_seeds, own, deposit = wire.own(data, "a batch of the silo")
        shares = np.frombuffer(own, np.uint8).reshape(-1, 2, 32) if own else None
        return cls(session, me, Drawn(self_seeds, shares, unpack(deposit, Deposit)), pair_secrets)

    def accept(self, delivery: Deliver, first: Callable[[], Deliver] | None = None) -> None:
        """Take in the shares. Raises ProtocolError for a delivery that does not fit or is a second one.

        first: claims this delivery, once it is found to fit, and returns the one that was claimed first.
        An envelope that is not authentic, or whose shares are not those that their owner committed to, is left out:
        this silo then holds no share of that owner.
        """
        if self._delivery is not None:
            if delivery != self._delivery:
                raise ProtocolError(f"batch {self.number} was delivered already, with other content")
            return
        session, roster = self.session, self.session.roster
        depositors = roster.members_of(delivery.depositors)
        if not set(session.members).issuperset(depositors) or self.me not in depositors:
            raise ProtocolError("the depositors of a batch must be members of the key set, this silo among them")
        needed = max(roster.min_cohort, roster.signatures_needed if roster.consistency_check else 0)
        if len(depositors) < needed:
            raise ProtocolError(f"a batch of {len(depositors)} silos; at least {needed} are needed")
        own = session.deposit_digest(self.me, self.deposit)
        if len(delivery.digests) != len(depositors) or own != delivery.digests[depositors.index(self.me)]:
            raise ProtocolError("the digests of a batch do not fit its depositors")
        present = frozenset(depositors)
        senders = [v for v in session.neighbours(self.me) if v in present]
        if not len(delivery.envelopes) == len(delivery.share_digests) == len(senders):
            raise ProtocolError("a batch needs one envelope, with its digest, from each neighbour that deposited")
        if first is not None and first() != delivery:
            raise ProtocolError(f"batch {self.number} was delivered already, with other content")
        for sender, envelope, named in zip(senders, delivery.envelopes, delivery.share_digests, strict=True):
            secret = self._pair_secrets[sender]
            shares = open_envelope(session, self.number, sender, self.me, secret, envelope)
            if shares is not None:
                row = share_row(session, self.number, sender, self.me, shares.tobytes())
                if hmac.compare_digest(hashlib.sha256(row).digest(), named):
                    self._held[sender] = shares
            seeds = pair_seeds(session, self.number, secret, self.me, sender)
            self._peers[sender] = seeds, self.me > sender
        self._owners = [v for v in session.holders(self.me) if v in present]
        self.depositors = present
        self.digest = session.batch_digest(self.number, delivery.depositors, delivery.digests)
        self._delivery = delivery

    @property
    def statement(self) -> bytes:
        """What this silo signs before the batch is used; ProtocolError before the shares are delivered."""
        if self._delivery is None:
            raise ProtocolError(f"batch {self.number} is not delivered yet")
        return self.session.batch_statement(self.digest)

    def masks(self, index: int, table: bytes, context: bytes) -> list[Mask]:
        """The self mask and one for each neighbour, which the later of the two in the roster subtracts."""
        at = index % self.session.roster.batch
        masks = [Mask(self._key(index, table, context, self.self_seed(index)), False)]
        for seeds, negative in self._peers.values():
            seed = seeds[32 * at : 32 * at + 32]
            masks.append(Mask(self._key(index, table, context, seed), negative))
        return masks

    def self_seed(self, index: int) -> bytes:
        """b of an index: secret."""
        at = index % self.session.roster.batch
        return self._drawn.self_seeds[32 * at : 32 * at + 32]

    def _key(self, index: int, table: bytes, context: bytes, seed: bytes) -> bytes:
        return mask_key(self.session, self.digest, index, table, context, seed)

    @property
    def unheld(self) -> frozenset[int]:
        """The owners of whom this silo should hold shares and holds none."""
        return frozenset(self._owners) - self._held.keys()

    def seeds_with(self, index: int, survivors: frozenset[int]) -> list[bytes]:
        """The seeds of an index shared with the neighbours that did not survive, ascending."""
        at = 32 * (index % self.session.roster.batch)
        return [seeds[at : at + 32] for v, (seeds, _) in self._peers.items() if v not in survivors]

    def shares(self, index: int, survivors: frozenset[int]) -> list[bytes]:
        """One share per owner: of b for a survivor, of e for a dropped one, never of both."""
        at = index % self.session.roster.batch
        out = []
        for owner in self._owners:
            held = self._held.get(owner)
            kind = SELF if owner in survivors else PAIR
            out.append(b"" if held is None else held[at, kind].tobytes())
        return out
