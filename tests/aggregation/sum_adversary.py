"""A cheating server for the attack tests: it has all messages and follows no rule but arithmetic."""

from __future__ import annotations

import dataclasses
import hashlib
import sys

import numpy as np
from sum_network import CONTEXT, carry, contribute, names, random_values, table_of

from secure_fvi.aggregation import Masked, shamir
from secure_fvi.aggregation.masked_server import MaskedServer
from secure_fvi.aggregation.masked_silo import MaskedSilo
from secure_fvi.aggregation.messages import Contribution, RevealRequest, Shares, SignRequest, pack, unpack
from secure_fvi.aggregation.onetime import mask_key, open_seeds
from secure_fvi.aggregation.prg import Mask, apply_masks
from secure_fvi.aggregation.ring import Ring
from secure_fvi.aggregation.roster import Identity, Roster
from secure_fvi.aggregation.store import MemoryStore

TABLE = table_of(12)
EMPTY = {SignRequest: (), RevealRequest: (b"", [])}


class World:
    """Honest silos over stores that outlive them, prepared for sums, and what the server holds of them."""

    def __init__(self, count=4, prepared=True, **options):
        options.setdefault("max_missing", count - 2)  # the most permissive setting
        self.ids = sorted(names(count))
        self.identities = {s: Identity() for s in self.ids}
        roster = Masked(**options).roster({s: i.public_key for s, i in self.identities.items()})
        self.roster = dataclasses.replace(roster, checked=set())  # a right signature is right for all parties here
        self.stores = {s: MemoryStore() for s in self.ids}
        self.restart_silos()
        self.server = MaskedServer(self.roster)
        self.values = random_values(self.ids, TABLE, seed=5)
        if prepared:
            carry(self.server.prepare(0), self.silos)

    def restart_silos(self):
        self.silos = {s: MaskedSilo(self.roster, s, self.identities[s], self.stores[s], unbound=True) for s in self.ids}

    @property
    def batch(self):
        return self.server._state.batches[0]

    @property
    def session(self):
        return self.server._state.session

    def contribute(self, index=0, ids=None, context=CONTEXT, cohort=None):
        values = {s: self.values[s] for s in (ids or self.ids)}
        return contribute(self.silos, index, TABLE, values, cohort=cohort, context=context)

    def total(self, messages, index=0, context=CONTEXT, lost=()):
        return carry(self.server.total(index, self.ids, TABLE, messages, context), self.silos, lost)

    def reveal_request(self, survivors, index=0, context=CONTEXT):
        """A request without signatures, as sessions without the consistency check take it."""
        return pack(self.named(RevealRequest, survivors, index, context)._replace(signers=b""))

    def sign_request(self, survivors, index=0, context=CONTEXT, **fields):
        """A request to sign the survivors, out of a cohort of all."""
        return pack(self.named(SignRequest, survivors, index, context, **fields))

    def named(self, kind, survivors, index=0, context=CONTEXT, **fields):
        """A `SignRequest` or `RevealRequest` of these survivors of a cohort of all, without signatures."""
        everyone, bitmap = (self.roster.bitmap(frozenset(s)) for s in (range(self.roster.size), survivors))
        request = kind(index, everyone, bitmap, TABLE.digest, context, b"", [], [], *EMPTY[kind])
        return request._replace(**fields)

    def with_proofs(self, request, messages):
        """`request` with the survivors' own signatures on what they sent, from their `messages`."""
        sent = [unpack(messages[self.ids[p]], Contribution) for p in self.roster.members_of(request.survivors)]
        payloads = [hashlib.sha256(m.payload).digest() for m in sent]
        return request._replace(payloads=payloads, proofs=[m.signature for m in sent])

    def shares_of(self, owner, holder, reply):
        """The share of `owner`'s secret in `holder`'s reply, by position."""
        shares = unpack(reply, Shares).shares
        return self.session.position(owner, holder), shares[self.batch.held_by(holder).index(owner)]

    def recover(self, shares):
        """A secret from shares by position (as many as the threshold are used)."""
        positions = tuple(sorted(p for p, share in shares.items() if share))[: self.session.threshold]
        rows = np.frombuffer(b"".join(shares[p] for p in positions), np.uint8)
        return shamir.recover(positions, rows.reshape(len(positions), 32)).tobytes()

    def seeds_under(self, owner, e, index=0):
        """The pairwise seeds that `owner` sealed under e."""
        return open_seeds(self.session, owner, index, e, self.batch.deposits[owner].sealed_seeds)

    def open_contribution(self, owner, payload, b, seeds, index=0, context=CONTEXT, session=None, digest=None):
        """What `payload` says once the masks of b (None: not removed) and of the pairwise `seeds` are removed."""
        session, digest = session or self.session, digest or self.batch.digest
        ring = Ring(TABLE, self.roster.bits, self.roster.size)
        values = np.frombuffer(payload, ring.dtype).copy()
        masks = [] if b is None else [Mask(mask_key(session, digest, index, TABLE.digest, context, b), True)]
        for other, seed in seeds.items():
            key = mask_key(session, digest, index, TABLE.digest, context, seed)
            masks.append(Mask(key, owner < other))
        apply_masks(values, masks)
        return ring.decode(values)


def is_input(decoded, values):
    """Whether the adversary has a silo's input."""
    return bool(np.allclose(decoded, values, rtol=0, atol=1e-9))


def payload_of(message):
    """The masked ring elements of a contribution."""
    return unpack(message, Contribution).payload


class Tampering:
    """A silo whose messages somebody on the way may change."""

    def __init__(self, silo, request=lambda data: data, reply=lambda data: data):
        self._silo, self._request, self._reply = silo, request, reply

    def handle(self, message):
        return self._reply(self._silo.handle(self._request(message)))

    def contribute(self, *arguments, **named):
        return self._reply(self._silo.contribute(*arguments, **named))


def exact(world, ids=None):
    """The true sum."""
    return sum(world.values[s] for s in (ids or world.ids))


def unsigned(monkeypatch):
    """A server that takes any contribution as signed, and any total as possible."""
    verify = Roster.verify

    def credulous(self, place, signature, statement):
        asker = sys._getframe(1).f_code.co_name
        return asker == "admit" or verify(self, place, signature, statement)

    monkeypatch.setattr(Roster, "verify", credulous)
    monkeypatch.setattr(Ring, "_check_range", lambda *arguments: None)
