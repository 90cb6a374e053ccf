"""What one silo is shown by a server that invents everybody else."""

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from sum_adversary import TABLE, payload_of
from sum_network import CONTEXT

from secure_fvi.aggregation import masked_server, onetime
from secure_fvi.aggregation.messages import (
    Deposit,
    DepositRequest,
    KeyAdvert,
    KeySet,
    KeysRequest,
    pack,
    unpack,
)
from secure_fvi.aggregation.session import Session, key_set_hash

VICTIM = 1


class FakeWorld:
    """What one silo is shown: a session in which everybody else's X25519 key is the adversary's."""

    def __init__(self, world, members):
        self.world, self.members = world, members
        self.victim = world.silos[world.ids[VICTIM]]
        self.private = {m: X25519PrivateKey.generate() for m in members if m != VICTIM}

    def attack(self):
        """Set-up, refill and one contribution of the victim, all by the adversary; what it then reads."""
        world, roster = self.world, self.world.roster
        advert = unpack(self.victim.handle(pack(KeysRequest(0))), KeyAdvert)
        rows = []
        for m in self.members:
            if m == VICTIM:
                rows.append((advert.public_key, advert.nonce_commitment, advert.signature))
            else:
                rows.append((self.private[m].public_key().public_bytes_raw(), bytes([m]) * 32, bytes(64)))
        bitmap = roster.bitmap(frozenset(self.members))
        key_set = KeySet(0, bitmap, *([list(c) for c in zip(*rows, strict=True)]))
        self.victim.handle(pack(key_set))
        named = key_set_hash(roster, 0, bitmap, key_set.public_keys, key_set.nonce_commitments)
        session = Session(roster, named, self.members, self.members)
        public = X25519PublicKey.from_public_bytes(advert.public_key)
        secrets = {m: key.exchange(public) for m, key in self.private.items()}

        deposit = unpack(self.victim.handle(pack(DepositRequest(0))), Deposit)
        shares = {}
        for m, envelope in zip(session.neighbours(VICTIM), deposit.envelopes, strict=True):
            opened = onetime.open_envelope(session, 0, VICTIM, m, secrets[m], envelope)
            shares[session.position(VICTIM, m)] = opened[0, 0].tobytes()

        deposits = {VICTIM: deposit}
        for m in secrets:
            any_secrets = dict.fromkeys(session.members, bytes(32)) | {VICTIM: secrets[m]}
            deposits[m] = onetime.draw(session, m, 0, any_secrets).deposit
        batch = masked_server.ServerBatch(session, 0, deposits)
        self.victim.handle(pack(batch.delivery(VICTIM)))
        message = self.victim.contribute(0, world.ids, TABLE, world.values[world.ids[VICTIM]], CONTEXT)

        positions = tuple(sorted(shares))[: session.threshold]
        rows = np.frombuffer(b"".join(shares[p] for p in positions), np.uint8).reshape(-1, 32)
        b = masked_server.shamir.recover(positions, rows).tobytes()
        seeds = {m: onetime.pair_seeds(session, 0, secrets[m], VICTIM, m)[:32] for m in secrets}
        return world.open_contribution(VICTIM, payload_of(message), b, seeds, session=session, digest=batch.digest)
