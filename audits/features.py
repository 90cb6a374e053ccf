"""What an onlooker can compute from a transcript, as one row of numbers a silo: `base.Knowledge`.

Numbers of a contribution are read as its kind of sum packs them: values in clear, ring elements under masks, words of a
ciphertext. They are averaged over a few stretches of the run, which is where the noise of the silos' own draws goes
and what moves with the run stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from secure_fvi.aggregation import homomorphic_messages, messages
from secure_fvi.aggregation.base import FloatArray
from secure_fvi.audits.transcript import Transcript
from secure_fvi.errors import InputError

#: Stretches of a run over which numbers are averaged.
STRETCHES = 4


def from_messages(transcript: Transcript) -> FloatArray:
    """(J, D): each silo's own contributions by phase and stretch, and the mean length of all that it sent."""
    by_phase: dict[str, list[FloatArray]] = {}
    for message, sent in zip(transcript.broadcasts(), transcript.contributions(), strict=True):
        size = transcript.tables[message.phase].size
        rows = [_numbers(transcript.aggregation, sent.get(silo), size) for silo in transcript.silos]
        by_phase.setdefault(message.phase, []).append(np.stack(rows))
    if not by_phase:
        raise InputError(f"'{transcript.seen_by}' sees no contribution; messages are attacked from the server's view")
    parts = [_stretches(np.stack(rows)) for rows in by_phase.values()]
    lengths = {silo: [e.size for e in transcript.entries if e.party == silo] for silo in transcript.silos}
    mean_length = np.array([[np.mean(lengths[silo])] for silo in transcript.silos])
    return np.concatenate([*(p.transpose(1, 0, 2).reshape(len(transcript.silos), -1) for p in parts), mean_length], 1)


def contributions_in_clear(transcript: Transcript) -> list[dict[str, FloatArray]]:
    """Each silo's numbers in each sum, as its kind of sum packs them: in clear only under plain sums."""
    return [
        {s: _numbers(transcript.aggregation, raw, transcript.tables[message.phase].size) for s, raw in sent.items()}
        for message, sent in zip(transcript.broadcasts(), transcript.contributions(), strict=True)
    ]


def from_totals(transcript: Transcript) -> FloatArray:
    """(J, D): the totals by phase and stretch, the same for each silo of a run."""
    by_phase: dict[str, list[FloatArray]] = {}
    for outcome in transcript.sums:
        by_phase.setdefault(outcome.phase, []).append(outcome.released)
    if not by_phase:
        raise InputError(f"'{transcript.seen_by}' sees no totals")
    row = np.concatenate([_stretches(np.stack(rows)).ravel() for rows in by_phase.values()])
    return np.tile(row, (len(transcript.silos), 1))


def from_both(transcript: Transcript) -> FloatArray:
    """Messages beside totals."""
    return np.concatenate([from_messages(transcript), from_totals(transcript)], 1)


def _stretches(values: FloatArray) -> FloatArray:
    """Means over stretches of the first axis, as far as there are numbers; 0 where a silo was not asked."""
    parts = np.array_split(values, min(STRETCHES, len(values)))
    present = [np.isfinite(p) for p in parts]
    sums = [np.where(there, p, 0.0).sum(0) for p, there in zip(parts, present, strict=True)]
    return np.stack([s / np.maximum(there.sum(0), 1) for s, there in zip(sums, present, strict=True)])


def _numbers(kind: str, raw: bytes | None, size: int) -> FloatArray:
    """(size,) numbers of one contribution; NaN where there is none."""
    if raw is None:
        return np.full(size, np.nan)
    if kind == "plain":
        return np.frombuffer(raw, "<f8")
    payload = messages.unpack(raw, messages.Contribution).payload
    if kind == "masked":
        dtype: npt.DTypeLike = "<i8" if len(payload) == 8 * size else "<i4"
        return _between_minus_one_and_one(np.frombuffer(payload, dtype))
    parts: Sequence[bytes] = homomorphic_messages.unpack(payload, homomorphic_messages.Ciphertexts).parts
    body = parts[0][len(parts[0]) // 2 :]  # past the header
    return _between_minus_one_and_one(np.frombuffer(body, "<i8", size))


def _between_minus_one_and_one(words: npt.NDArray[Any]) -> FloatArray:
    return words / float(2 ** (8 * words.dtype.itemsize - 1))
