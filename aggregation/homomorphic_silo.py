"""A silo's half of homomorphic sums: a masked silo whose payload is encrypted for the key holder."""

from __future__ import annotations

from collections.abc import Sequence

from secure_fvi.aggregation.base import BlockTable, FloatArray
from secure_fvi.aggregation.homomorphic_flooding import RealSlots
from secure_fvi.aggregation.homomorphic_messages import Ciphertexts, HolderKey, kind_of, pack, unpack
from secure_fvi.aggregation.homomorphic_schemes import BFV, PublicContext, Scheme
from secure_fvi.aggregation.key_holder import check_holder_key
from secure_fvi.aggregation.masked_silo import MaskedSilo
from secure_fvi.aggregation.messages import Done
from secure_fvi.aggregation.modular import PrimeRing
from secure_fvi.aggregation.prg import Mask
from secure_fvi.aggregation.roster import Identity, Roster
from secure_fvi.aggregation.store import MemoryStore, Store
from secure_fvi.errors import InputError, ProtocolError

_HOLDER_KEY = "holder_key"


class SlotCodecs:
    """Encoders between values and slots, one for each block table; equal at silos and server."""

    def __init__(self, scheme: Scheme, terms: int) -> None:
        self._scheme = scheme
        self._terms = terms
        self._known: dict[bytes, PrimeRing | RealSlots] = {}

    def __call__(self, table: BlockTable) -> PrimeRing | RealSlots:
        """The codec of `table`; raises InputError when an integer block cannot be summed exactly."""
        codec = self._known.get(table.digest)
        if codec is None:
            make = PrimeRing if self._scheme is BFV else RealSlots
            codec = self._known[table.digest] = make(table, self._terms)
        return codec


def check_roster(roster: Roster) -> None:
    """Raise InputError unless `roster` names a key holder and has its sums signed."""
    if len(roster.key_holder) != 64:
        raise InputError("the roster of a homomorphic sum must name the key holder")
    if not roster.consistency_check:
        raise InputError("homomorphic sums need the consistency check: the key holder asks for its signatures")


class HomomorphicSilo:
    """One silo. Holds the public encryption key only, and takes no other than the one that its roster names."""

    def __init__(
        self,
        roster: Roster,
        silo_id: str,
        identity: Identity,
        scheme: Scheme,
        masks: bool,
        store: Store | None = None,
        min_cohort: int | None = None,
        max_missing: int | None = None,
        questions: Store | None = None,
        unbound: bool = False,
    ) -> None:
        """`roster`, `scheme` and `masks` are what this site agreed to; for the rest see `MaskedSilo`."""
        check_roster(roster)
        if masks and scheme is not BFV:
            raise InputError("masks need scheme = 'bfv'")
        self.silo_id = silo_id
        self._roster = roster
        self._scheme = scheme
        self._masks = masks
        self._store = MemoryStore() if store is None else store
        self._inner = MaskedSilo(
            roster, silo_id, identity, self._store, min_cohort, self._seal, max_missing, questions, unbound
        )
        self._codecs = SlotCodecs(scheme, roster.size)
        kept = self._store.get(_HOLDER_KEY)
        self._key: PublicContext | None = None
        if kept is not None:
            self._key = check_holder_key(roster, scheme, masks, unpack(kept, HolderKey))

    def __repr__(self) -> str:
        return f"HomomorphicSilo({self.silo_id!r})"

    def handle(self, message: bytes) -> bytes:
        """Answer one message of the server: the key holder's key, or those of masked sums."""
        if kind_of(message) is not HolderKey:
            return self._inner.handle(message)
        key = unpack(message, HolderKey)
        # Checked even if one is known: a server that tries another is told so.
        accepted = check_holder_key(self._roster, self._scheme, self._masks, key)
        if self._key is None:
            self._store.put({_HOLDER_KEY: message})
            self._key = accepted
        return pack(Done())

    def contribute(
        self,
        index: int,
        cohort: Sequence[str],
        table: BlockTable,
        values: FloatArray,
        context: bytes,
        question: bytes = b"",
        most_missing: int | None = None,
    ) -> bytes:
        """Ciphertexts of the values, masked where masks are on; see `SumSilo.contribute`."""
        return self._inner.contribute(index, cohort, table, values, context, question, most_missing)

    def missing_from(self, question: bytes) -> int | None:
        """See `SumSilo.missing_from`."""
        return self._inner.missing_from(question)

    def shown(self, question: bytes) -> bool | None:
        """See `SumSilo.shown`."""
        return self._inner.shown(question)

    def outgoing(self, index: int) -> bytes:
        """The stored bytes of the latest contribution, for a retry; ProtocolError for another sum's."""
        return self._inner.outgoing(index)

    def _seal(self, table: BlockTable, values: FloatArray, masks: Sequence[Mask]) -> bytes:
        if self._key is None:
            raise ProtocolError("the key holder's key has not come in")
        slots = self._codecs(table).encode(values, masks if self._masks else ())
        return pack(Ciphertexts(self._key.encrypt(slots)))
