"""What an onlooker can compute from a transcript, as one row of numbers a silo: `base.Knowledge`.

Numbers of a contribution are read as its kind of sum packs them: values in clear, ring elements under masks, words of a
ciphertext. They are averaged over a few stretches of the run, which is where the noise of the silos' own draws goes
and what moves with the run stays.

From numbers in clear, and from totals, more is computed before the average, where it says more than the numbers do:

- of PVI's change of a factor, how it would move the mean and covariance of the q that was sent;
- of the gradient in a matrix of coefficients, the log norms of its rows and columns. One record's gradient there is an
  outer product of a residual and an input; with an input on the simplex, its log up to a constant is read off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from secure_fvi.aggregation import homomorphic_schemes, messages
from secure_fvi.aggregation.base import BlockTable, FloatArray
from secure_fvi.algorithms.base import Broadcast
from secure_fvi.algorithms.natural import Natural, packed_size, unpack
from secure_fvi.audits.transcript import Transcript
from secure_fvi.density import Layout
from secure_fvi.errors import InputError

#: Stretches of a run over which numbers are averaged.
STRETCHES = 4
#: Matrices of coefficients with a longer side are left alone.
_LONGEST = 256
#: Standard deviations of q beyond which moves of its moments are drawn together (arsinh).
_UNIT = 1 / 3


class Seen(NamedTuple):
    """Numbers a silo, (J, D)."""

    values: FloatArray
    raw: int  # the first so many are averages of the numbers themselves, which add up over silos


def messages_of(transcript: Transcript, layout: Layout | None = None) -> Seen:
    """Each silo's own contributions by phase and stretch, and the mean length of all that it sent."""
    by_phase: dict[str, list[tuple[FloatArray, FloatArray]]] = {}
    for message, sent in zip(transcript.broadcasts(), transcript.contributions(), strict=True):
        table = transcript.tables[message.phase]
        rows = [_numbers(transcript.aggregation, sent.get(silo), table.size) for silo in transcript.silos]
        clear = transcript.aggregation == "plain"
        more = [_derived(row, table, message, layout) if clear else _NOTHING for row in rows]
        by_phase.setdefault(message.phase, []).append((np.stack(rows), np.stack(more)))
    if not by_phase:
        raise InputError(f"'{transcript.seen_by}' sees no contribution; messages are attacked from the server's view")
    raw, derived = _by_silo(by_phase, transcript, len(transcript.silos))
    lengths = {silo: [e.size for e in transcript.entries if e.party == silo] for silo in transcript.silos}
    mean_length = np.array([[np.mean(lengths[silo])] for silo in transcript.silos])
    return Seen(np.concatenate([raw, derived, mean_length], 1), raw.shape[1])


def totals_of(transcript: Transcript, layout: Layout | None = None) -> Seen:
    """The totals by phase and stretch, the same for each silo of a run."""
    by_phase: dict[str, list[tuple[FloatArray, FloatArray]]] = {}
    sent = {message.sum_index: message for message in transcript.broadcasts()}
    for outcome in transcript.sums:
        more = _derived(outcome.released, transcript.tables[outcome.phase], sent[outcome.sum_index], layout)
        by_phase.setdefault(outcome.phase, []).append((outcome.released[None], more[None]))
    if not by_phase:
        raise InputError(f"'{transcript.seen_by}' sees no totals")
    raw, derived = _by_silo(by_phase, transcript, 1)
    return Seen(np.repeat(np.concatenate([raw, derived], 1), len(transcript.silos), 0), raw.shape[1])


def from_messages(transcript: Transcript) -> FloatArray:
    """`messages_of` without what needs the model's layout."""
    return messages_of(transcript).values


def from_totals(transcript: Transcript) -> FloatArray:
    """`totals_of` without what needs the model's layout."""
    return totals_of(transcript).values


def from_both(transcript: Transcript) -> FloatArray:
    return np.concatenate([from_messages(transcript), from_totals(transcript)], 1)


def contributions_in_clear(transcript: Transcript) -> list[dict[str, FloatArray]]:
    """Each silo's numbers in each sum, as its kind of sum packs them: in clear only under plain sums."""
    return [
        {s: _numbers(transcript.aggregation, raw, transcript.tables[message.phase].size) for s, raw in sent.items()}
        for message, sent in zip(transcript.broadcasts(), transcript.contributions(), strict=True)
    ]


def _by_silo(
    by_phase: dict[str, list[tuple[FloatArray, FloatArray]]], transcript: Transcript, silos: int
) -> tuple[FloatArray, FloatArray]:
    """(J, D) means over stretches of the numbers and of what was computed from them, phase after phase: the same D for
    all runs of a program, however many sums each took to end."""
    never = {name: [(np.zeros((silos, table.size)), np.zeros((silos, 0)))] for name, table in transcript.tables.items()}
    phases, sides = {**never, **by_phase}, []
    for side in (0, 1):
        parts = [_stretches(np.stack([row[side] for row in rows])) for rows in phases.values()]
        sides.append(np.concatenate([p.transpose(1, 0, 2).reshape(p.shape[1], -1) for p in parts], 1))
    return sides[0], sides[1]


_NOTHING = np.zeros(0)


def _derived(row: FloatArray, table: BlockTable, message: Broadcast, layout: Layout | None) -> FloatArray:
    """(D,) what the numbers say when read as what they are."""
    blocks = table.split(row)
    found = []
    if "change" in blocks and "q" in message.tensors:
        found.append(_moved(blocks["change"], message.tensors["q"].to(torch.float64)))
    if "direct" in blocks and layout is not None:
        found.append(_norms(blocks["direct"], layout))
    return np.concatenate(found) if found else _NOTHING


def _moved(change: FloatArray, packed: torch.Tensor) -> FloatArray:
    """How a change of a Gaussian factor moves the mean and covariance of q, in sds of q; 0 where none is proper."""
    n = next(n for n in range(1, len(packed) + 1) if len(packed) in (packed_size(n, True), packed_size(n, False)))
    full = len(packed) == packed_size(n, True) and n > 1
    q, factor = unpack(packed, n, full), unpack(torch.from_numpy(change.copy()), n, full)
    after = q.plus(factor)
    if not np.isfinite(change).all():
        return np.full(len(packed), np.nan)
    if not (q.proper and after.proper):
        return np.zeros(len(packed))
    sd = q.stddev()
    unit = torch.outer(sd, sd) if full else sd**2
    moved = Natural((after.mean() - q.mean()) / sd, (after.covariance() - q.covariance()) / unit)
    return np.arcsinh(moved.pack().numpy() / _UNIT)


def _norms(gradient: FloatArray, layout: Layout) -> FloatArray:
    """Log norms of the rows and columns of the gradient in each global site that is a matrix."""
    found, start = [_NOTHING], 0
    for site in layout.of("global"):
        if len(site.shape) == 2 and min(site.shape) > 1 and max(site.shape) <= _LONGEST:
            block = gradient[start : start + site.size].reshape(site.shape)
            found += [np.log(np.linalg.norm(block, axis=axis) + 1e-12) for axis in (0, 1)]
        start += site.size
    return np.concatenate(found)


def _stretches(values: FloatArray) -> FloatArray:
    """Means over stretches of the first axis; 0 where a silo was not asked, and past the last of fewer."""
    parts = np.array_split(values, min(STRETCHES, len(values)))
    present = [np.isfinite(p) for p in parts]
    sums = [np.where(there, p, 0.0).sum(0) for p, there in zip(parts, present, strict=True)]
    means = np.stack([s / np.maximum(there.sum(0), 1) for s, there in zip(sums, present, strict=True)])
    return np.concatenate([means, np.zeros((STRETCHES - len(means), *means.shape[1:]))])


def _numbers(kind: str, raw: bytes | None, size: int) -> FloatArray:
    """(size,) numbers of one contribution; NaN where there is none."""
    if raw is None:
        return np.full(size, np.nan)
    if kind == "plain":
        return np.frombuffer(raw, "<f8", size)  # what stands behind is drawn at random
    payload = messages.unpack(raw, messages.Contribution).payload
    if kind == "masked":
        dtype: npt.DTypeLike = "<i8" if len(payload) == 8 * size else "<i4"
        return _between_minus_one_and_one(np.frombuffer(payload, dtype))
    parts: Sequence[bytes] = homomorphic_schemes.unpack(payload, homomorphic_schemes.Ciphertexts).parts
    body = parts[0][len(parts[0]) // 2 :]  # past the header
    return _between_minus_one_and_one(np.frombuffer(body, "<i8", size))


def _between_minus_one_and_one(words: npt.NDArray[Any]) -> FloatArray:
    return words / float(2 ** (8 * words.dtype.itemsize - 1))
