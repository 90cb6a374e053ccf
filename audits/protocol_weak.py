"""Copies of the masked sums that lack one protection each: what protocol audits must be able to break.

FOR AUDITS ONLY. Nothing here may carry data, and nothing outside `secure_fvi.audits` may import it. Copies that only
change how words are masked do not complete sums; they are looked at, and searched, before that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import numpy as np

from secure_fvi.aggregation.homomorphic_schemes import Decrypted, DecryptRequest, pack
from secure_fvi.aggregation.homomorphic_schemes import unpack as unpack_encrypted
from secure_fvi.aggregation.key_holder import KeyHolder
from secure_fvi.aggregation.masked import Masked
from secure_fvi.aggregation.masked_silo import LAST, MaskedSilo
from secure_fvi.aggregation.messages import RevealRequest, SetSignature, Shares, SignRequest
from secure_fvi.aggregation.prg import Mask, apply_masks, keystream
from secure_fvi.aggregation.ring import RingArray
from secure_fvi.aggregation.roster import Roster
from secure_fvi.aggregation.store import NONE, Still
from secure_fvi.audits.protocol_masked import Apply, AuditStore, MaskedSubject
from secure_fvi.audits.protocol_probes import Seeds
from secure_fvi.errors import ProtocolError

# Masks


def unmasked(subject: MaskedSubject) -> MaskedSubject:
    return replace(subject, name="no masks", masking=lambda: lambda words, masks: None)


def scalar(subject: MaskedSubject) -> MaskedSubject:
    def apply(words: RingArray, masks: Sequence[Mask]) -> None:
        one = np.zeros(1, words.dtype)
        apply_masks(one, masks)
        words += one

    return replace(subject, name="one number as the mask of a whole tensor", masking=lambda: apply)


def reused(subject: MaskedSubject) -> MaskedSubject:
    def masking() -> Apply:
        first: list[Mask] = []

        def apply(words: RingArray, masks: Sequence[Mask]) -> None:
            first.extend(masks if not first else ())
            apply_masks(words, first)

        return apply

    return replace(subject, name="the masks of one sum used in all", masking=masking)


def same_for_all(subject: MaskedSubject) -> MaskedSubject:
    return replace(subject, name="the same mask at all silos", masking=_counted)


def counted(subject: MaskedSubject) -> MaskedSubject:
    return replace(subject, name="masks that follow from the number of the sum", masking=_counted)


def _counted() -> Apply:
    calls = 0

    def apply(words: RingArray, masks: Sequence[Mask]) -> None:
        nonlocal calls
        calls += 1
        apply_masks(words, [Mask(hashlib.sha256(calls.to_bytes(8, "big")).digest(), False)])

    return apply


def global_generator(subject: MaskedSubject) -> MaskedSubject:
    def apply(words: RingArray, masks: Sequence[Mask]) -> None:
        apply_masks(words, [Mask(np.random.bytes(32), False)])

    return replace(subject, name="masks from NumPy's global generator", masking=lambda: apply)


def few_bits(subject: MaskedSubject, seeds: Seeds) -> MaskedSubject:
    """Every mask key is folded to as many bits as `seeds` has, as to the Mersenne Twister's 32."""

    def apply(words: RingArray, masks: Sequence[Mask]) -> None:
        for key, negative in masks:
            folded = int.from_bytes(keystream(key, 8), "big") % 2**seeds.bits
            stream = seeds.stream(folded, words.size).astype(words.dtype)
            (np.subtract if negative else np.add)(words, stream, out=words)

    return replace(subject, name=seeds.name, masking=lambda: apply)


# Memory


class ForgetfulStore(AuditStore):
    """Does not remember which survivors were named, nor which index was used last."""

    def claim(self, slot: str, value: bytes, settle: bool = True, still: Still = NONE) -> bytes:
        return value if slot.startswith(("survivors/", "used/")) else super().claim(slot, value, settle)

    def put(self, slots: Mapping[str, bytes], rising: Mapping[str, int] = NONE, still: Still = NONE) -> None:
        super().put(slots, rising)

    def risen(self, slot: str) -> int:
        return -1


class ForgetfulSilo(MaskedSilo):
    """Contributes to one index as often as it is asked."""

    def _last_index(self) -> int:
        return -1

    def _put(self, kept: Mapping[str, bytes], index: int, last: int) -> None:
        self._store.put(kept, {LAST: index})


def forgetful(subject: MaskedSubject) -> MaskedSubject:
    return replace(subject, name="silos that forget what they answered", store=ForgetfulStore, silo=ForgetfulSilo)


def blind(subject: MaskedSubject) -> MaskedSubject:
    """Nothing in it depends on the broadcast."""
    return replace(subject, name="masks that ignore the broadcast", context=lambda context: bytes(32))


def forgetful_and_blind(subject: MaskedSubject) -> MaskedSubject:
    name = "silos that forget, and masks that ignore the broadcast"
    return replace(forgetful(blind(subject)), name=name)


# Consent


class TalkativeSilo(MaskedSilo):
    """Takes a request that names two sets of survivors, and answers for both."""

    def _on_reveal(self, request: RevealRequest) -> Shares:
        width = (self._roster.size + 7) // 8
        if len(request.survivors) != 2 * width:
            return super()._on_reveal(request)
        batch = self._state.batch_of(request.sum_index)
        rows: list[bytes] = []
        for part in (request.survivors[:width], request.survivors[width:]):
            rows += batch.shares(request.sum_index, frozenset(self._roster.members_of(part)))
        return Shares(request.sum_index, rows, b"", [])


def talkative(subject: MaskedSubject) -> MaskedSubject:
    return replace(subject, name="silos that answer for two survivor sets in one message", silo=TalkativeSilo)


class CredulousRoster(Roster):
    """Takes any 64 bytes for a signature, and one of them for enough."""

    def verify(self, place: int, signature: bytes, statement: bytes) -> bool:
        return True

    @property
    def signatures_needed(self) -> int:
        return 1


def _credulous(roster: Roster) -> Roster:
    return CredulousRoster(**{f.name: getattr(roster, f.name) for f in fields(roster) if f.init})


def credulous(subject: MaskedSubject) -> MaskedSubject:
    return replace(subject, name="silos that check no signature", believes=_credulous)


def small_cohorts(subject: MaskedSubject) -> MaskedSubject:
    config: Masked = replace(subject.config, min_cohort=2)
    return replace(subject, name="min_cohort = 2", config=config)


def without_durable_state(subject: MaskedSubject) -> MaskedSubject:
    return replace(subject, name="silos that keep nothing over a restart", durable=False)


# Colluders


class ColludingSilo(MaskedSilo):
    """Signs and reveals whatever the server asks."""

    def _on_sign(self, request: SignRequest) -> SetSignature:
        index, batch = request.sum_index, self._state.batch_of(request.sum_index)
        _, cohort, survivors, table, context, question, *_ = request
        statement = batch.session.survivors_statement(batch.digest, index, cohort, survivors, table, context, question)
        return SetSignature(index, self._identity.sign(statement))

    def _on_reveal(self, request: RevealRequest) -> Shares:
        survivors = frozenset(self._roster.members_of(request.survivors))
        batch = self._state.batch_of(request.sum_index)
        return Shares(request.sum_index, batch.shares(request.sum_index, survivors), b"", [])


def in_league(subject: MaskedSubject, colluders: int) -> MaskedSubject:
    """Not a weak copy below a third of the silos: what the protocol withstands."""
    name = f"{colluders} of {subject.count} silos in league with the server"
    return replace(subject, name=name, colluders=colluders, colluder=ColludingSilo)


# The key holder


class ObligingHolder(KeyHolder):
    """Decrypts whatever it is sent, as often as it is sent."""

    def handle(self, message: bytes) -> bytes:
        request = unpack_encrypted(message, DecryptRequest) if _asks(message) else None
        if request is None:
            return super().handle(message)
        slots = self._key.decrypt(self._reader.read(request.parts, request.size))
        return pack(Decrypted(request.sum_index, slots.astype("<i8").tobytes(), bytes(64)))


def _asks(message: bytes) -> bool:
    try:
        unpack_encrypted(message, DecryptRequest)
    except ProtocolError:
        return False
    return True
