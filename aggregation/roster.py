"""The roster: who takes part in a session, with which identity keys and under which settings.

Every silo pins the roster that its site agreed to; all that is signed later names the roster's hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from secure_fvi.aggregation.base import check_silo_ids
from secure_fvi.aggregation.graph import Neighbourhood, least_signatures, neighbourhood
from secure_fvi.aggregation.prg import digest
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.wire import Limit

LABEL_ROSTER = b"roster"

#: Set-ups that a silo takes part in: each gives a cheating server a try at the graph's order.
MAX_ATTEMPTS = 8
#: Signatures of each member that are remembered as right at a time.
_REMEMBERED = 16


@dataclass(frozen=True)
class Roster:
    """One session's members and settings. Public; equal at all parties, or their hashes differ."""

    session: bytes  # 32 random bytes that no other session has
    members: tuple[tuple[str, bytes], ...]  # (silo id, Ed25519 public key of 32 bytes), sorted by id
    min_cohort: int = 3
    max_missing: int = 0  # silos of a cohort that may be missing from its total; with 0 sums are whole (see `whole`)
    bits: int = 64
    consistency_check: bool = True
    batch: int = 64  # indices whose secrets are shared at once
    corrupt: float = 0.1  # shares of the silos assumed, for the k-regular graph
    lost: float = 0.1
    key_holder: bytes = b""  # identity key and public-key hash of a homomorphic sum's key holder, or nothing
    #: Digests of signatures that were found right, where all parties are in this process and one check is enough for
    #: all of them; None: each checks what it is shown.
    checked: set[bytes] | None = field(default=None, compare=False, repr=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        ids = check_silo_ids(m for m, _ in self.members)
        if tuple(m for m, _ in self.members) != ids:
            raise InputError("the roster's members must be sorted by id")
        if len({k for _, k in self.members}) != len(ids) or any(len(k) != 32 for _, k in self.members):
            raise InputError("each silo of the roster needs its own Ed25519 public key of 32 bytes")
        if len(self.session) != 32:
            raise InputError("a session is named by 32 bytes")
        if self.bits not in (32, 64):
            raise InputError(f"bits must be 32 or 64, not {self.bits}")
        if self.min_cohort < 2:
            raise InputError(f"min_cohort must be at least 2, not {self.min_cohort}; a sum of one is no sum")
        if type(self.max_missing) is not int or self.max_missing < 0:
            raise InputError(f"max_missing must be a whole number of silos, 0 or more, not {self.max_missing!r}")
        if not 1 <= self.batch <= 4096:
            raise InputError(f"batch must lie in 1..4096 indices, not {self.batch}")
        if len(ids) < self.min_cohort:
            hint = (
                "; with two silos each learns the other's term; set min_cohort = 2 to accept that"
                if len(ids) == 2
                else ""
            )
            raise InputError(f"masked sums need at least {self.min_cohort} silos, got {len(ids)}{hint}")
        object.__setattr__(self, "size", len(ids))

    @cached_property
    def hash(self) -> bytes:
        """SHA-256 over everything above: 32 bytes."""
        members = [[m, k] for m, k in self.members]
        settings = [
            self.min_cohort,
            self.max_missing,
            self.bits,
            self.consistency_check,
            self.batch,
            float(self.corrupt),
            float(self.lost),
        ]
        return digest(LABEL_ROSTER, msgpack.packb([self.session, members, settings, self.key_holder]))

    @cached_property
    def ids(self) -> tuple[str, ...]:
        return tuple(m for m, _ in self.members)

    @cached_property
    def places(self) -> dict[str, int]:
        """Place in the roster by silo id."""
        return {m: at for at, m in enumerate(self.ids)}

    @cached_property
    def _keys(self) -> tuple[Ed25519PublicKey, ...]:
        return tuple(Ed25519PublicKey.from_public_bytes(k) for _, k in self.members)

    @property
    def whole(self) -> bool:
        """Whether a total is of its whole cohort or there is none: pairwise masks alone, one exchange, no recovery.

        Under a key holder the recovering path is taken, whose self masks hide totals from it.
        """
        return self.max_missing == 0 and not self.key_holder

    @property
    def orders(self) -> int:
        """Orders of the ring of which a cheating server may see one and go on: where silos sign no batch, it can show
        each a key set of its own at each attempt. Sums that recover count one."""
        return MAX_ATTEMPTS * self.size if self.whole else 1

    @property
    def signatures_needed(self) -> int:
        """T: two sets cannot both have that many signatures below n/3 colluders."""
        return least_signatures(self.size)

    @cached_property
    def neighbourhood(self) -> Neighbourhood:
        """Degree and threshold of the graph."""
        return neighbourhood(self.size, self.corrupt, self.lost, self.orders)

    @cached_property
    def limit(self) -> Limit:
        """The longest message of a masked sum's set-up, refill and recovery among so many; contributions follow from
        their table. Per member keys, digests and signatures, per neighbour what a batch seals and shares."""
        near = self.neighbourhood.k + 1
        return Limit(4096 + 512 * self.size + near * (512 + 256 * self.batch), max(self.size, self.batch, 16))

    def verify(self, place: int, signature: bytes, statement: bytes) -> bool:
        """Whether member `place` signed `statement`."""
        seen = b""
        if self.checked is not None:
            seen = hashlib.sha256(self.members[place][1] + len(signature).to_bytes(8) + signature + statement).digest()
            if seen in self.checked:
                return True
        try:
            self._keys[place].verify(signature, statement)
        except InvalidSignature:
            return False
        if self.checked is not None:
            if len(self.checked) >= _REMEMBERED * self.size:
                self.checked.clear()
            self.checked.add(seen)
        return True

    def check_signed(
        self, signers: bytes, signatures: Sequence[bytes], statement: bytes, own: tuple[int, bytes, bytes] | None = None
    ) -> None:
        """Raise ProtocolError unless T members, a bitmap, signed the statement, and all signatures are right.

        own: a place, and the statement and signature that it has itself just made.
        """
        members = self.members_of(signers)
        if len(members) != len(signatures):
            raise ProtocolError("a signature of each signer is needed")
        if len(members) < self.signatures_needed:
            raise ProtocolError(f"{len(members)} signatures; {self.signatures_needed} of the roster are needed")
        for place, signature in zip(members, signatures, strict=True):
            if (place, statement, signature) != own and not self.verify(place, signature, statement):
                raise ProtocolError(f"the signature of silo '{self.ids[place]}' is not valid here")

    def bitmap(self, places: frozenset[int]) -> bytes:
        """A set of members, as in messages."""
        return bitmap_of(places, self.size)

    def members_of(self, bitmap: bytes) -> tuple[int, ...]:
        """The members in `bitmap`, ascending; raises ProtocolError for a wrong length or a stray bit."""
        return _members(self.size, bitmap)


def bitmap_of(places: frozenset[int], size: int) -> bytes:
    """A set of members of a roster of `size`, as in messages."""
    bits = 0
    for place in places:
        bits |= 1 << place
    return bits.to_bytes((size + 7) // 8, "little")


@lru_cache(maxsize=16)
def _members(size: int, bitmap: bytes) -> tuple[int, ...]:
    """See `Roster.members_of`. The same sets are named over and over, and a large one takes a while."""
    bits = int.from_bytes(bitmap, "little")
    if len(bitmap) != (size + 7) // 8 or bits >> size:
        raise ProtocolError("a set of members does not fit the roster")
    return tuple(at for at in range(size) if bits >> at & 1)


def check_missing(roster: Roster, index: int, cohort: bytes, survivors: tuple[int, ...], max_missing: int) -> None:
    """Raise ProtocolError for survivors too few, out of the cohort (a bitmap), or with more of it missing than allowed.

    Missing is who is in the cohort and not in the total.
    """
    asked = roster.members_of(cohort)
    if len(survivors) < roster.min_cohort:
        raise ProtocolError(f"sum {index} has {len(survivors)} survivors, below min_cohort = {roster.min_cohort}")
    if not set(asked).issuperset(survivors):
        raise ProtocolError(f"a survivor of sum {index} is not in its cohort")
    missing = len(asked) - len(survivors)
    if missing > max_missing:
        raise ProtocolError(
            f"sum {index}: {missing} of the {len(asked)} silos asked are missing, past max_missing = {max_missing}"
        )


class Identity:
    """A silo's long-term Ed25519 key. Signs only; never encrypts, never leaves."""

    def __init__(self, private_key: Ed25519PrivateKey | None = None) -> None:
        self._private = private_key or Ed25519PrivateKey.generate()
        self.public_key = self._private.public_key().public_bytes_raw()

    def sign(self, statement: bytes) -> bytes:
        return self._private.sign(statement)

    def __repr__(self) -> str:
        return "Identity(...)"
