"""A job with homomorphic sums in which the key holder is a real site, and all that its server says is the test's."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from consortium_run import HOLDER, SILOS, SIX_CITIES, met
from deployment_world import NOW, World

from secure_fvi.aggregation import Block, BlockTable
from secure_fvi.aggregation.base import FloatArray, Total, carry
from secure_fvi.aggregation.homomorphic import Homomorphic, WithHolder
from secure_fvi.aggregation.homomorphic_schemes import Ciphertexts, Decrypted, DecryptRequest, PrimeRing, pack, unpack
from secure_fvi.aggregation.messages import Contribution
from secure_fvi.aggregation.messages import unpack as unpack_masked
from secure_fvi.aggregation.parties import server_half
from secure_fvi.aggregation.store import MemoryStore
from secure_fvi.deployment.consortium import ConsortiumRoster
from secure_fvi.deployment.job import make_offer, sign_offer
from secure_fvi.deployment.session_messages import (
    CODEC,
    JOIN,
    OPEN,
    Joined,
    Open,
    Opened,
    OpenSession,
    session_of,
    session_roster,
    silo_sum,
)
from secure_fvi.deployment.site import Site
from secure_fvi.errors import AggregationError
from secure_fvi.messages import SUM
from secure_fvi.runs import wording
from secure_fvi.runs.config import parse

CONTEXT = hashlib.sha256(b"a broadcast").digest()
TABLE = BlockTable((Block("gradient", (5,), 10.0),))
VALUES: Mapping[str, FloatArray] = {s: np.arange(5.0) / 3 - i for i, s in enumerate(SILOS)}
CONFIG = {**SIX_CITIES, "algorithm": {"name": "sfvi", "iterations": 5}}
POLICY = {
    "format": 1,
    "algorithms": [],
    "aggregations": ["homomorphic", "homomorphic-unmasked"],
    "min_cohort": 3,
    "max_rounds": 5,
    "privacy": {"max_epsilon": 1.0, "max_delta": 1e-6, "min_noise_multiplier": 1.0},
}


class Held:
    """The job, the holder's site, and silos and server of the session that was opened last."""

    def __init__(self, world: World, **options: Any) -> None:
        """options: of the sums."""
        self.world, self.home, self.sums = world, world.homes[HOLDER], Homomorphic(**options)
        hub = world.homes["hub"]
        self.roster: ConsortiumRoster = hub.roster(NOW)
        self.allow()
        config = parse({**CONFIG, "aggregation": {"kind": "homomorphic", **options}}, "test")
        self.offer = make_offer(config, self.roster, "hub", bytes(32), NOW)  # models are not the holder's concern
        self.signed = sign_offer(self.offer, hub.identity())
        self.site = Site(self.home)
        self.requests: list[bytes] = []

    def allow(self, **changes: Any) -> None:
        """Write the holder's policy, which allows this job unless `changes` say otherwise."""
        self.home.policy_file.write_text(wording.dumps({**POLICY, "rosters": [self.roster.hash.hex()], **changes}))
        self.home.policy_file.chmod(0o600)

    def restart(self) -> None:
        """The holder's process ends, and another begins."""
        self.site.close()
        self.site = Site(self.home)

    @property
    def folder(self) -> Path:
        return self.home.state_folder / "jobs" / self.offer.job

    def join(self) -> Joined:
        met(self.world.homes["hub"], self.site)
        return CODEC.unpack(self.site.handle(self.offer.job, JOIN + self.signed), Joined)

    def opening(self, holder: bytes, min_cohort: int = 3) -> Open:
        """An OPEN with fresh bytes of the silos."""
        return Open(list(SILOS), [os.urandom(32) for _ in SILOS], bytes(32), 0, holder, min_cohort)

    def open(self, **changes: int) -> None:
        """Joined, and a new session opened by all."""
        message = self.opening(self.join().nonce, **changes)
        self.opened = CODEC.unpack(self.site.handle(self.offer.job, OPEN + CODEC.pack(message)), Opened)
        self.parties(message, self.roster)

    def parties(self, message: Open, roster: ConsortiumRoster) -> None:
        """Silos and server of the session in `message`, each with what it knows itself."""
        session = session_of(roster, self.offer.hash, message, self.sums)
        shared = OpenSession(roster, session, SILOS, self.sums, message.holder)
        homes = self.world.homes
        self.silos = {s: silo_sum(shared, MemoryStore(), s, homes[s].identity(), 3) for s in SILOS}
        server = server_half(self.sums, SILOS, session_roster(*shared), MemoryStore(), self.ask)
        assert isinstance(server, WithHolder)
        self.server = server

    def ask(self, message: bytes) -> bytes:
        """What the server says to the holder, as it is."""
        self.requests.append(message)
        return self.site.handle(self.offer.job, SUM + message)

    def prepare(self, index: int) -> None:
        carry(self.server.prepare(index), self._exchange)

    def contribute(self, index: int) -> dict[str, bytes]:
        question = hashlib.sha256(index.to_bytes(8, "big")).digest()
        return {s: self.silos[s].contribute(index, SILOS, TABLE, v, CONTEXT, question) for s, v in VALUES.items()}

    def total(self, index: int, contributions: Mapping[str, bytes] | None = None) -> Total:
        """One sum of VALUES, from its preparation on."""
        if contributions is None:
            self.prepare(index)
            contributions = self.contribute(index)
        return carry(self.server.total(index, SILOS, TABLE, contributions, CONTEXT), self._exchange)

    def withheld(self, index: int) -> tuple[DecryptRequest, Sequence[bytes]]:
        """What an honest server would ask for this sum, with all signatures, and north's own ciphertexts."""
        self.prepare(index)
        contributions = self.contribute(index)
        held: list[bytes] = []

        def keep(message: bytes) -> bytes:
            held.append(message)
            return b""

        server = WithHolder(self.server.server, keep)
        with contextlib.suppress(AggregationError):  # it gets no answer
            carry(server.total(index, SILOS, TABLE, contributions, CONTEXT), self._exchange)
        own = unpack(unpack_masked(contributions["north"], Contribution).payload, Ciphertexts).parts
        return unpack(held[-1], DecryptRequest), own

    def decrypted(self, request: DecryptRequest) -> FloatArray:
        """The values that the holder gives for `request`; no mask is removed."""
        answer = unpack(self.site.handle(self.offer.job, SUM + pack(request)), Decrypted)
        return PrimeRing(TABLE, len(SILOS)).decode(np.frombuffer(answer.values, "<i8"), ())

    def _exchange(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        return {silo: self.silos[silo].handle(message) for silo, message in messages.items()}
