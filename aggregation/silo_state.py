"""A silo's keys and batches: how they come about, and how they outlive a crash.

All of it is written to the store before the answer that rests on it leaves. The store then holds private keys
and shares: a site encrypts it at rest by handing over a `Store` that does so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

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
CONTRIBUTED, SURVIVORS = "contributed", "survivors"


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
        for number in msgpack.unpackb(self.store.get("batches") or b"\x90"):
            kept = self.store.get(f"batch/{number}")
            if kept is not None and self._setup.session is not None:
                self._batches[number] = SiloBatch.restore(self._setup.session, self.me, kept, self._setup.pair_secrets)

    def _keep(self, batch: SiloBatch) -> None:
        self.store.put({f"batch/{batch.number}": batch.to_bytes(), "batches": msgpack.packb(sorted(self._batches))})

    def _keep_setup(self, setup: Setup) -> None:
        self.store.put({"setup": setup.to_bytes()})

    # Set-up

    def on_keys_request(self, request: KeysRequest) -> KeyAdvert:
        """Fresh keys for a new attempt, which makes an end of the batches of the one before."""
        if self._setup is not None and request.attempt <= self._setup.attempt:
            if request.attempt < self._setup.attempt:
                raise ProtocolError("an old set-up")
            return self._setup.advert
        setup = Setup.fresh(self.roster, self.me, self.identity, request)
        for number in list(self._batches):
            self._forget(number)
        self._keep_setup(setup)
        self._setup = setup
        return setup.advert

    def on_key_set(self, request: KeySet) -> NonceReveal:
        setup = self._current_setup()
        reveal = setup.accept_keys(request)
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
            batch = SiloBatch(setup.session, self.me, drawn, setup.pair_secrets)
            self._batches[request.batch] = batch
            for number in sorted(self._batches)[:-_KEPT_BATCHES]:
                self._forget(number)
            self._keep(batch)
        return batch.deposit

    def _forget(self, number: int) -> None:
        """What is forgotten can be revealed to nobody."""
        del self._batches[number]
        first = number * self.roster.batch
        indices = range(first, first + self.roster.batch)
        self.store.drop([f"{kind}/{i}" for i in indices for kind in (CONTRIBUTED, SURVIVORS)])
        self.store.drop([f"batch/{number}"])

    def on_deliver(self, request: Deliver) -> BatchSignature:
        """Hold the shares; sign the batch, which with the consistency check waits for T signatures."""
        batch = self._numbered(request.batch)
        batch.accept(request)
        if not self.roster.consistency_check:
            batch.active = True
        self._keep(batch)
        signed = self.roster.consistency_check
        return BatchSignature(request.batch, self.identity.sign(batch.statement) if signed else b"")

    def on_activate(self, request: Activate) -> Done:
        batch = self._numbered(request.batch)
        statement = batch.statement
        signers = self.roster.members_of(request.signers)
        self.check_signatures(signers, request.signatures, [statement] * len(signers))
        batch.active = True
        self._keep(batch)
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
        statements: Sequence[bytes],
        own: tuple[bytes, bytes] = (b"", b""),
    ) -> None:
        """Raise ProtocolError unless T members signed, each its statement, and all signatures are right.

        own: a statement and the signature that this silo itself has just made of it.
        """
        if not len(signers) == len(signatures) == len(statements):
            raise ProtocolError("a signature of each signer is needed")
        if len(signers) < self.roster.signatures_needed:
            raise ProtocolError(f"{len(signers)} signatures; {self.roster.signatures_needed} of the roster are needed")
        for place, signature, statement in zip(signers, signatures, statements, strict=True):
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
