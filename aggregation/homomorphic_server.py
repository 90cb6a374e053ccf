"""The server's half of homomorphic sums: adds ciphertexts, asks the key holder for the total, unmasks it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from secure_fvi.aggregation.base import BlockTable, Exchanges, Total
from secure_fvi.aggregation.homomorphic_flooding import DECRYPTIONS
from secure_fvi.aggregation.homomorphic_messages import (
    Ciphertexts,
    Decrypted,
    DecryptRequest,
    HolderKey,
    HolderKeyRequest,
    pack,
    unpack,
)
from secure_fvi.aggregation.homomorphic_schemes import BFV, CKKS, PublicContext, Scheme
from secure_fvi.aggregation.homomorphic_silo import SlotCodecs, check_roster
from secure_fvi.aggregation.key_holder import (
    KEY_HOLDER,
    KeyWornOut,
    check_holder_key,
    decrypted_statement,
    holder_signed,
)
from secure_fvi.aggregation.masked_server import Agreed, MaskedServer, Sent, decoded
from secure_fvi.aggregation.messages import Done
from secure_fvi.aggregation.modular import BFV_HALF, CentredArray
from secure_fvi.aggregation.prg import Mask
from secure_fvi.aggregation.roster import Roster
from secure_fvi.aggregation.session import number
from secure_fvi.aggregation.store import MemoryStore, Store
from secure_fvi.errors import AggregationError, ProtocolError
from secure_fvi.wire import Limit

_SPENT = "ckks/spent"


class HomomorphicServer:
    """The aggregator. Holds the public encryption key; its exchanges address the key holder as `KEY_HOLDER`.

    Keys, signatures and recovery from dropouts are those of masked sums; so is the store.
    """

    def __init__(self, roster: Roster, scheme: Scheme, masks: bool, store: Store | None = None) -> None:
        check_roster(roster)
        self._roster = roster
        self._scheme = scheme
        self._masks = masks
        self._store = MemoryStore() if store is None else store
        self._inner = MaskedServer(roster, self._store)
        self._codecs = SlotCodecs(scheme, roster.size)
        self._key: PublicContext | None = None
        self._key_message = b""
        self._spent = int.from_bytes(self._store.get(_SPENT) or b"", "big")
        self._widest = 1  # ciphertexts of the largest total so far
        self._has_key: set[str] = set()
        self._retry_at = 0
        self._faults: dict[str, str] = {}

    @property
    def neighbourhood(self) -> str:
        """Degree, threshold and failure probabilities of the graph of masks, in words."""
        return self._inner.neighbourhood

    @property
    def faults(self) -> Mapping[str, str]:
        """By silo id, why its latest bad reply was taken for a dropout."""
        return {**self._inner.faults, **self._faults}

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
        yield from self._inner.prepare(index)

    def total(
        self,
        index: int,
        cohort: Sequence[str],
        table: BlockTable,
        contributions: Mapping[str, bytes],
        context: bytes,
    ) -> Exchanges[Total]:
        """The sum over those whose contribution arrived; errors as for masked sums, or when the holder refuses.

        Three exchanges: signatures, decryption, and the signatures shown to all, who answer with shares.
        """
        codec = self._codecs(table)
        if self._key is None:
            raise AggregationError(f"sum {index} was not prepared")
        admitted = self._inner.admit(index, cohort, table, contributions, context, None)
        readable, added = self._read(admitted.sent, table)
        agreed = yield from self._inner.agree(index, table, context, admitted._replace(sent=readable))
        if agreed.sent.keys() != readable.keys():
            added = self._read(agreed.sent, table)[1]
        values = yield from self._decrypt(agreed, table, added)
        masks: list[Mask] = []
        if self._masks:
            masks = yield from self._inner.masks_left(agreed)
        else:
            yield from self._inner.show(agreed)
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
            table.size,
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
