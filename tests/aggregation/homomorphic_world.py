"""Honest parties of a homomorphic sum with every message in the tests' hands."""

import hashlib

import numpy as np
from sum_network import CONTEXT, carry, names, random_values, table_of

from secure_fvi.aggregation.homomorphic import Homomorphic, WithHolder
from secure_fvi.aggregation.homomorphic_schemes import Ciphertexts, Decrypted, DecryptRequest, PrimeRing, pack, unpack
from secure_fvi.aggregation.messages import Contribution
from secure_fvi.aggregation.messages import pack as pack_masked
from secure_fvi.aggregation.messages import unpack as unpack_masked

VICTIM = 1


class World:
    """Prepared parties; `requests` logs what the key holder was asked."""

    def __init__(self, count=4, table=None, values=None, **options):
        self.ids = sorted(names(count))
        self.table = table or table_of(12)
        self.stores = {}
        options.setdefault("max_missing", count - 2)
        self.config = Homomorphic(**options)
        self.server, self.silos, self.holder = self.config.parties(self.ids, self._store)
        self.roster = self.server._roster
        self.values = values or random_values(self.ids, self.table, seed=5)
        self.requests = []
        self.local = WithHolder(self.server, self._ask)
        carry(self.local.prepare(0), self.silos)

    def _store(self, party):
        from secure_fvi.aggregation.store import MemoryStore

        return self.stores.setdefault(party, MemoryStore())

    def _ask(self, message):
        self.requests.append(message)
        return self.holder.handle(message)

    @property
    def victim(self):
        return self.ids[VICTIM]

    def contribute(self, index=0, question=b""):
        return {
            s: self.silos[s].contribute(index, self.ids, self.table, self.values[s], CONTEXT, question)
            for s in self.ids
        }

    def total(self, messages, index=0, lost=()):
        return carry(self.local.total(index, self.ids, self.table, messages, CONTEXT), self.silos, lost)

    def signed_contribution(self, silo, payload, index=0):
        """`payload` in the name of `silo`, which signs it."""
        inner, roster = self.silos[silo], self.roster
        batch, everyone = inner._state.batch_of(index), roster.bitmap(frozenset(range(roster.size)))
        fields = (everyone, self.table.digest, CONTEXT, b"", hashlib.sha256(payload).digest())
        statement = batch.session.contribution_statement(batch.digest, index, roster.places[silo], *fields)
        return pack_masked(Contribution(index, b"", payload, inner._identity.sign(statement)))

    def parts_of(self, message):
        """The ciphertexts of one contribution."""
        return unpack(unpack_masked(message, Contribution).payload, Ciphertexts).parts

    def signed_request(self, messages, index=0):
        """The honest request to the holder, with T signatures, withheld from it."""
        held = []

        def withhold(message):
            held.append(message)
            return b""

        server = WithHolder(self.server, withhold)
        try:
            carry(server.total(index, self.ids, self.table, messages, CONTEXT), self.silos)
        except Exception:
            assert held, "the server did not get as far as the key holder"
        return unpack(held[-1], DecryptRequest)

    def opened(self, answer):
        """The holder's slots."""
        return np.frombuffer(unpack(answer, Decrypted).values, "<i8")

    def decoded(self, answer):
        """What the holder's slots say, no mask removed."""
        return PrimeRing(self.table, self.roster.size).decode(self.opened(answer), ())

    def ask_for_victim(self, messages, index=0):
        """The attack: signatures of an honest sum over the ciphertexts of one silo alone."""
        request = self.signed_request(messages, index)
        return self.holder.handle(pack(request._replace(parts=self.parts_of(messages[self.victim]))))


def is_input(decoded, values):
    return bool(np.allclose(decoded, values, rtol=0, atol=1e-9))
