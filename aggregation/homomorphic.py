"""Homomorphic sums as the user configures them: encrypted for a key holder, masked inside the plaintext.

    silo                                server                              key holder
                                        asks for the key            <->     public key, signed; in the roster's hash
    takes the roster's key only  <-     hands it on
    E(input + masks)             ->     adds ciphertexts
    signature on survivors       ->     T signatures, E(total + masks) ->   decrypts once an index
    shares of b or of e          ->     masks removed, total        <-      total + masks

Keys, graph, signatures and recovery are those of masked sums (masked.py), over Z_p instead of Z_2^w. With masks
off the shares are never asked for and the key holder sees the totals. What it protects: docs/threat-model.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from secure_fvi.aggregation.base import BlockTable, Exchanges, FloatArray, Form, Seat, SumSilo, T, Total, check_silo_ids
from secure_fvi.aggregation.homomorphic_schemes import (
    BFV,
    BFV_HALF,
    CKKS,
    DECRYPTIONS,
    CentredArray,
    Ciphertexts,
    Decrypted,
    DecryptRequest,
    HolderKey,
    HolderKeyRequest,
    PrimeRing,
    PublicContext,
    RealSlots,
    Scheme,
    SecretContext,
    kind_of,
    pack,
    scheme_named,
    unpack,
)
from secure_fvi.aggregation.key_holder import (
    KEY_HOLDER,
    KeyHolder,
    KeyWornOut,
    check_holder_key,
    decrypted_statement,
    holder_entry,
    holder_signed,
)
from secure_fvi.aggregation.masked import Masked
from secure_fvi.aggregation.masked_server import Agreed, MaskedServer, Sent, decoded
from secure_fvi.aggregation.masked_silo import MaskedSilo
from secure_fvi.aggregation.messages import Done
from secure_fvi.aggregation.prg import Mask
from secure_fvi.aggregation.roster import Identity, Roster
from secure_fvi.aggregation.session import number
from secure_fvi.aggregation.store import MemoryStore, Store
from secure_fvi.errors import AggregationError, InputError, ProtocolError
from secure_fvi.options import Count, Fraction, Whole, check
from secure_fvi.wire import Limit


@dataclass(frozen=True)
class Homomorphic:
    """Sums of ciphertexts that one key holder, neither aggregator nor silo, can decrypt.

    `scheme`: "bfv" sums exactly; "ckks" releases totals with noise of some 1e-5 of each block's bound, for which
    see homomorphic_flooding.py. `masks`: inside the plaintext, so that neither the key holder nor anyone who
    hands it a single ciphertext learns more than totals (None: on for bfv; ckks cannot have them). With
    masks off the aggregator is trusted to add honestly. `min_cohort`, `max_missing`, `max_differences`, `batch`,
    `corrupt`, `lost`: see `Masked`.
    """

    scheme: str = "bfv"
    masks: bool | None = None
    min_cohort: Whole = 3
    max_missing: Whole = 0
    max_differences: Whole = 0
    batch: Count | None = None
    corrupt: Fraction = 0.1
    lost: Fraction = 0.1

    def __post_init__(self) -> None:
        check(self)
        scheme = scheme_named(self.scheme)
        if self.masks and scheme is not BFV:
            raise InputError("masks = true needs scheme = 'bfv': masks are uniform modulo a prime, CKKS has reals")
        self.beneath()

    def beneath(self, bits: Literal[32, 64] = 64) -> Masked:
        """The masked sums whose keys, graph and signatures these use. `bits` is of no account: values lie in Z_p."""
        return Masked(
            min_cohort=self.min_cohort,
            max_missing=self.max_missing,
            bits=bits,
            batch=self.batch,
            corrupt=self.corrupt,
            lost=self.lost,
        )

    @property
    def kind(self) -> str:
        return "homomorphic"

    @property
    def masked(self) -> bool:
        """Whether masks are on."""
        return scheme_named(self.scheme) is BFV if self.masks is None else self.masks

    def roster(
        self, identity_keys: Mapping[str, bytes], holder_identity_key: bytes, holder_public_key: bytes
    ) -> Roster:
        """The roster of `identity_keys` (by silo id) and of the key holder's two keys, of a fresh session.

        Raises InputError when there are fewer silos than `min_cohort`.
        """
        entry = holder_entry(holder_identity_key, scheme_named(self.scheme), self.masked, holder_public_key)
        return replace(self.beneath().roster(identity_keys), key_holder=entry)

    def parties(
        self, silo_ids: Sequence[str], store: Callable[[str], Store] | None = None
    ) -> tuple[HomomorphicServer, dict[str, SumSilo], KeyHolder]:
        """The three kinds of parties, apart, with fresh keys; `store` by silo id, "" and `KEY_HOLDER`."""
        make = store or (lambda _: MemoryStore())
        scheme: Scheme = scheme_named(self.scheme)
        identities = {silo: Identity() for silo in check_silo_ids(silo_ids)}
        holder_identity, key = Identity(), SecretContext(scheme)
        public_keys = {silo: identity.public_key for silo, identity in identities.items()}
        roster = self.roster(public_keys, holder_identity.public_key, key.public_bytes)
        silos: dict[str, SumSilo] = {
            silo: HomomorphicSilo(roster, silo, identity, self, make(silo), unbound=True)
            for silo, identity in identities.items()
        }
        holder = KeyHolder(roster, holder_identity, key, self.masked, make(KEY_HOLDER))
        return HomomorphicServer(roster, scheme, self.masked, make("")), silos, holder

    @property
    def form(self) -> Form:
        return "homomorphic" if self.masked else "homomorphic-unmasked"

    def codec(self, silos: int) -> Callable[[BlockTable], PrimeRing | RealSlots]:
        """Slots of the scheme's plaintexts."""
        return functools.partial(slots_of, scheme_named(self.scheme), silos)

    def at_silo(self, seat: Seat) -> SumSilo:
        """One silo's half."""
        roster, silo, identity, store, least, missing, questions = seat
        assert roster is not None
        return HomomorphicSilo(
            roster, silo, identity, self, store, min_cohort=least, max_missing=missing, questions=questions
        )


class WithHolder:
    """A server whose messages to the key holder are carried here, for engines that know silos only.

    `holder` is the way to the key holder, bytes to bytes: a method of the object in one process, a connection's
    otherwise. It raises ProtocolError where the holder refuses.
    """

    def __init__(self, server: HomomorphicServer, holder: Callable[[bytes], bytes]) -> None:
        self.server = server
        self._holder = holder
        self._observers: list[Callable[[Literal["down", "up"], bytes], None]] = []

    def __repr__(self) -> str:
        return "WithHolder(...)"

    def observe(self, observer: Callable[[Literal["down", "up"], bytes], None]) -> None:
        """Let `observer` hear every message to the key holder ("down") and every answer ("up") from now on."""
        self._observers.append(observer)

    def prepare(self, index: int) -> Exchanges[None]:
        """See `HomomorphicServer.prepare`."""
        return self._carry(self.server.prepare(index))

    def total(self, *asked: Any, **more: Any) -> Exchanges[Total]:
        """See `HomomorphicServer.total`."""
        return self._carry(self.server.total(*asked, **more))

    def _carry(self, exchanges: Exchanges[T]) -> Exchanges[T]:
        """Pass on what goes to silos; answer what goes to the key holder."""
        try:
            messages = next(exchanges)
            while True:
                to_silos = {peer: m for peer, m in messages.items() if peer != KEY_HOLDER}
                replies: dict[str, bytes] = dict((yield to_silos)) if to_silos else {}
                if KEY_HOLDER in messages:
                    try:
                        replies[KEY_HOLDER] = self._ask(messages[KEY_HOLDER])
                    except ProtocolError:
                        replies.pop(KEY_HOLDER, None)
                messages = exchanges.send(replies)
        except StopIteration as end:
            result: T = end.value
            return result

    def _ask(self, message: bytes) -> bytes:
        for observer in self._observers:
            observer("down", message)
        reply = self._holder(message)
        for observer in self._observers:
            observer("up", reply)
        return reply


# ---- A silo's half of homomorphic sums: a masked silo whose payload is encrypted for the key holder ----

_HOLDER_KEY = "holder_key"


def slots_of(scheme: Scheme, terms: int, table: BlockTable) -> PrimeRing | RealSlots:
    """The encoder between values of `table` and slots; raises InputError when an integer block cannot be summed
    exactly."""
    return PrimeRing(table, terms) if scheme is BFV else RealSlots(table, terms)


def check_roster(roster: Roster) -> None:
    """Raise InputError unless `roster` names a key holder, with whose name no silo takes its messages, and has its sums
    signed."""
    if KEY_HOLDER in roster.ids:
        raise InputError(f"'{KEY_HOLDER}' is the key holder's name in encrypted sums; a silo needs another id")
    if len(roster.key_holder) != 64:
        raise InputError("the roster of a homomorphic sum must name the key holder")
    if not roster.consistency_check:
        raise InputError("homomorphic sums need the consistency check: the key holder asks for its signatures")


class HomomorphicSilo(MaskedSilo):
    """A masked silo whose payload is encrypted. Holds the public encryption key only, and takes no other than the one
    that its roster names."""

    encrypts = True

    def __init__(
        self,
        roster: Roster,
        silo_id: str,
        identity: Identity,
        sums: Homomorphic,
        store: Store | None = None,
        **more: Any,
    ) -> None:
        """`roster` and `sums` are what this site agreed to; for `more` see `MaskedSilo`."""
        check_roster(roster)
        super().__init__(roster, silo_id, identity, store, **more)
        self._scheme, self._masks = scheme_named(sums.scheme), sums.masked
        self._codec = functools.cache(functools.partial(slots_of, self._scheme, roster.size))
        kept = self._store.get(_HOLDER_KEY)
        self._key: PublicContext | None = None
        if kept is not None:
            self._key = check_holder_key(roster, self._scheme, self._masks, unpack(kept, HolderKey))

    def handle(self, message: bytes) -> bytes:
        """Answer one message of the server: the key holder's key, or those of masked sums."""
        if kind_of(message) is not HolderKey:
            return super().handle(message)
        key = unpack(message, HolderKey)
        # Checked even if one is known: a server that tries another is told so.
        accepted = check_holder_key(self._roster, self._scheme, self._masks, key)
        if self._key is None:
            self._store.put({_HOLDER_KEY: message})
            self._key = accepted
        return pack(Done())

    @property
    def spoils(self) -> bool:
        """See `SumSilo.spoils`."""
        return self._masks

    def _payload(self, table: BlockTable, values: FloatArray, masks: Sequence[Mask], own: Mask | None) -> bytes:
        if self._key is None:
            raise ProtocolError("the key holder's key has not come in")
        slots = self._codec(table).encode(values, masks if self._masks else (), own)
        return pack(Ciphertexts(self._key.encrypt(slots)))


# ---- The server's half of homomorphic sums: adds ciphertexts, asks the key holder for the total, unmasks it ----

_SPENT = "ckks/spent"


class HomomorphicServer(MaskedServer):
    """The aggregator. Holds the public encryption key; its exchanges address the key holder as `KEY_HOLDER`.

    Keys, signatures and recovery from dropouts are those of masked sums; so is the store.
    """

    def __init__(self, roster: Roster, scheme: Scheme, masks: bool, store: Store | None = None) -> None:
        check_roster(roster)
        super().__init__(roster, store)
        self._scheme = scheme
        self._masks = masks
        self._codec = functools.cache(functools.partial(slots_of, scheme, roster.size))
        self._key: PublicContext | None = None
        self._key_message = b""
        self._spent = int.from_bytes(self._store.get(_SPENT) or b"", "big")
        self._widest = 1  # ciphertexts of the largest total so far
        self._has_key: set[str] = set()
        self._retry_at = 0
        self._faults: dict[str, str] = {}

    @property
    def faults(self) -> Mapping[str, str]:
        """By silo id, why its latest bad reply was taken for a dropout."""
        return {**super().faults, **self._faults}

    def prepare(self, index: int) -> Exchanges[None]:
        """As for masked sums; before the first sum also the key holder's key, fetched, checked, handed to all.

        Raises KeyWornOut where a CKKS key may not last for this sum: nobody has contributed to it yet.
        """
        if self._scheme is CKKS and self._spent + self._widest > DECRYPTIONS:
            raise KeyWornOut(f"{self._spent} ciphertexts were decrypted under one CKKS key; a new session is needed")
        if self._key is None:
            replies = yield {KEY_HOLDER: pack(HolderKeyRequest())}
            message = _holder_reply(replies)
            try:
                self._key = check_holder_key(self._roster, self._scheme, self._masks, unpack(message, HolderKey))
            except ProtocolError as error:
                raise AggregationError(str(error)) from None
            self._key_message = message
        missing = [silo for silo in self._roster.ids if silo not in self._has_key]
        if missing and index >= self._retry_at:
            replies = yield dict.fromkeys(missing, self._key_message)
            for silo in missing:
                try:
                    unpack(replies.get(silo, b""), Done)
                except ProtocolError as error:
                    self._faults[silo] = str(error) if silo in replies else "no answer to the key holder's key"
                    continue
                self._has_key.add(silo)
                self._faults.pop(silo, None)
            # Those that stay away are tried again after 1, 2, 4, ... sums, so that they cost little.
            self._retry_at = 2 * index + 1
        yield from super().prepare(index)

    def total(
        self,
        index: int,
        cohort: Sequence[str],
        table: BlockTable,
        contributions: Mapping[str, bytes],
        context: bytes,
        question: bytes | None = None,
    ) -> Exchanges[Total]:
        """The sum over those whose contribution arrived; errors as for masked sums, or when the holder refuses.

        Three exchanges: signatures, decryption, and the signatures shown to all, who answer with shares.
        """
        codec = self._codec(table)
        if self._key is None:
            raise AggregationError(f"sum {index} was not prepared")
        admitted = self.admit(index, cohort, table, contributions, context, None, question)
        readable, added = self._read(admitted.sent, table)
        agreed = yield from self.agree(index, table, context, admitted._replace(sent=readable))
        if agreed.sent.keys() != readable.keys():
            added = self._read(agreed.sent, table)[1]
        values = yield from self._decrypt(agreed, table, added)
        masks: list[Mask] = []
        if self._masks:
            masks = yield from self.masks_left(agreed)
        else:
            yield from self.show(agreed)
        survivors = tuple(self._roster.ids[place] for place in agreed.payloads)
        return Total(decoded(index, lambda: codec.decode(values, masks, len(survivors))), survivors)

    def _read(self, sent: Mapping[int, Sent], table: BlockTable) -> tuple[dict[int, Sent], list[Any]]:
        """The contributions whose ciphertexts can be read, by place, and the sum of these."""
        assert self._key is not None
        readable: dict[int, Sent] = {}
        added: list[Any] = []
        parts = self._scheme.ciphertexts(table.size)
        limit = Limit(4096 + parts * (self._scheme.max_ciphertext_bytes + 16), max(parts, 1))
        for place, one in sent.items():
            try:
                vectors = self._key.read(unpack(one.payload, Ciphertexts, limit).parts, table.size)
                if added:
                    self._key.add(added, vectors)
                else:
                    added = vectors
            except ProtocolError as error:
                self._faults[self._roster.ids[place]] = str(error)
                continue
            readable[place] = one
        return readable, added

    def _decrypt(self, agreed: Agreed, table: BlockTable, added: list[Any]) -> Exchanges[CentredArray]:
        """What the key holder makes of the sum of ciphertexts."""
        signed, index = agreed.request, agreed.request.sum_index
        request = DecryptRequest(
            index,
            agreed.batch.session.key_set,
            agreed.batch.digest,
            signed.cohort,
            signed.survivors,
            signed.table,
            signed.context,
            signed.question,
            signed.signers,
            signed.signatures,
            table.packed,
            [vector.serialize() for vector in added],
        )
        self._spent, self._widest = self._spent + len(added), max(self._widest, len(added))
        self._store.put({_SPENT: number(self._spent)})
        replies = yield {KEY_HOLDER: pack(request)}
        try:
            reply = unpack(_holder_reply(replies), Decrypted, Limit(4096 + 8 * table.size))
        except ProtocolError as error:
            raise AggregationError(f"sum {index}: {error}") from None
        statement = decrypted_statement(self._roster, request, reply.values)
        if reply.sum_index != index or not holder_signed(self._roster, reply.signature, statement):
            raise AggregationError(f"sum {index}: the answer is not the key holder's")
        if len(reply.values) != 8 * table.size:
            raise AggregationError(f"sum {index}: the key holder's answer does not fit the sum")
        values: CentredArray = np.frombuffer(reply.values, "<i8")
        if self._scheme is BFV and ((values > BFV_HALF) | (values < -BFV_HALF)).any():
            raise AggregationError(f"sum {index}: the key holder's answer is out of the ring")
        return values


def _holder_reply(replies: Mapping[str, bytes]) -> bytes:
    if KEY_HOLDER not in replies:
        raise AggregationError("the key holder did not answer, or refused")
    return replies[KEY_HOLDER]
