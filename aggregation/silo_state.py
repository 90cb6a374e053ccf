"""A silo's keys and batches: how they come about, and how they outlive a crash.

All of it is written to the store before the answer that rests on it leaves. The store then holds private keys
and shares: a site encrypts it at rest by handing over a `Store` that does so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from secure_fvi import wire
from secure_fvi.aggregation.masked_setup import Setup
from secure_fvi.aggregation.messages import (
    Activate,
    BatchSignature,
    Deliver,
    Deposit,
    DepositRequest,
    Done,
    KeyAdvert,
    KeySet,
    KeysRequest,
    NonceReveal,
    Nonces,
    pack,
    unpack,
)
from secure_fvi.aggregation.onetime import draw
from secure_fvi.aggregation.roster import Identity, Roster
from secure_fvi.aggregation.silo_batch import SiloBatch
from secure_fvi.aggregation.store import Store
from secure_fvi.errors import InputError, ProtocolError

_KEPT_BATCHES = 2
#: Indices stay below 2^63, the most that a message can name.
_LAST_BATCH = 2**50
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

    def _current_setup(self) -> Setup:
        if self._setup is None:
            raise ProtocolError("no keys were asked for yet")
        return self._setup

    # Batches

    def on_deposit_request(self, request: DepositRequest) -> Deposit:
        """Draw the secrets of a batch; asked again, hand out the same deposit."""
        setup = self._current_setup()
        if setup.session is None:
            raise ProtocolError("keys are not exchanged yet")
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
        self.store.drop([f"{kind}/{i}" for i in indices for kind in (CONTRIBUTED, SURVIVORS, USED)])
        self.store.drop([self._slot(kind, number) for kind in ("batch", "delivery", "active")])

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
        return BatchSignature(request.batch, unheld, self.identity.sign(batch.statement) if signed else b"")

    def _activate(self, batch: SiloBatch) -> None:
        self.store.put({self._slot("active", batch.number): b"1"})
        batch.active = True

    def on_activate(self, request: Activate) -> Done:
        batch = self._numbered(request.batch)
        statement = batch.statement
        signers = self.roster.members_of(request.signers)
        self.check_signatures(signers, request.signatures, statement)
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

    def check_signatures(
        self,
        signers: Sequence[int],
        signatures: Sequence[bytes],
        statement: bytes,
        own: tuple[bytes, bytes] = (b"", b""),
    ) -> None:
        """Raise ProtocolError unless T members signed the statement, and all signatures are right.

        own: a statement and the signature that this silo itself has just made of it.
        """
        if len(signers) != len(signatures):
            raise ProtocolError("a signature of each signer is needed")
        if len(signers) < self.roster.signatures_needed:
            raise ProtocolError(f"{len(signers)} signatures; {self.roster.signatures_needed} of the roster are needed")
        for place, signature in zip(signers, signatures, strict=True):
            mine = place == self.me and (statement, signature) == own
            if not mine and not self.roster.verify(place, signature, statement):
                raise ProtocolError(f"the signature of silo '{self.roster.ids[place]}' is not valid here")

    def handlers(self) -> dict[type, Any]:
        """Which message goes to which method."""
        return {
            KeysRequest: self.on_keys_request,
            KeySet: self.on_key_set,
            Nonces: self.on_nonces,
            DepositRequest: self.on_deposit_request,
            Deliver: self.on_deliver,
            Activate: self.on_activate,
        }
