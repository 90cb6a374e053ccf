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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from secure_fvi.aggregation.base import BlockTable, Exchanges, SumServer, SumSilo, T, Total, check_silo_ids
from secure_fvi.aggregation.homomorphic_schemes import BFV, Scheme, SecretContext, scheme_named
from secure_fvi.aggregation.homomorphic_server import HomomorphicServer
from secure_fvi.aggregation.homomorphic_silo import HomomorphicSilo
from secure_fvi.aggregation.key_holder import KEY_HOLDER, KeyHolder, holder_entry
from secure_fvi.aggregation.masked import Masked
from secure_fvi.aggregation.roster import Identity, Roster
from secure_fvi.aggregation.store import MemoryStore, Store
from secure_fvi.errors import InputError, ProtocolError


@dataclass(frozen=True)
class Homomorphic:
    """Sums of ciphertexts that one key holder, neither aggregator nor silo, can decrypt.

    `scheme`: "bfv" sums exactly; "ckks" releases totals with noise of some 1e-5 of each block's bound, for which
    see homomorphic_flooding.py. `masks`: inside the plaintext, so that neither the key holder nor anyone who
    hands it a single ciphertext learns more than totals (None: on for bfv; ckks cannot have them). With
    masks off the aggregator is trusted to add honestly. `min_cohort`, `max_missing`, `batch`, `corrupt`, `lost`: see
    `Masked`.
    """

    scheme: str = "bfv"
    masks: bool | None = None
    min_cohort: int = 3
    max_missing: int = 0
    batch: int | None = None
    corrupt: float = 0.1
    lost: float = 0.1

    def __post_init__(self) -> None:
        scheme = scheme_named(self.scheme)
        if self.masks and scheme is not BFV:
            raise InputError("masks = true needs scheme = 'bfv': masks are uniform modulo a prime, CKKS has reals")
        self.beneath()

    def beneath(self, bits: int = 64) -> Masked:
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

        Raises InputError when there are fewer silos than `min_cohort`, or one has the key holder's name.
        """
        if KEY_HOLDER in identity_keys:
            raise InputError(f"'{KEY_HOLDER}' is the key holder's name; a silo needs another id")
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
            silo: HomomorphicSilo(roster, silo, identity, scheme, self.masked, make(silo), unbound=True)
            for silo, identity in identities.items()
        }
        holder = KeyHolder(roster, holder_identity, key, self.masked, make(KEY_HOLDER))
        return HomomorphicServer(roster, scheme, self.masked, make("")), silos, holder

    def local_parties(
        self, silo_ids: Sequence[str], store: Callable[[str], Store] | None = None
    ) -> tuple[SumServer, dict[str, SumSilo]]:
        """Both halves for the engine that runs all parties in one process; the server's reaches the holder."""
        server, silos, holder = self.parties(silo_ids, store)
        return WithHolder(server, holder.handle), silos


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

    def total(
        self,
        index: int,
        cohort: Sequence[str],
        table: BlockTable,
        contributions: Mapping[str, bytes],
        context: bytes,
    ) -> Exchanges[Total]:
        """See `HomomorphicServer.total`."""
        return self._carry(self.server.total(index, cohort, table, contributions, context))

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
