"""How much of the silos' changes q takes: found during the run, and cut back where q would be improper.

One over the silos asked is an average of their local posteriors, hence proper, and slow. The paper searched for more by
hand (section 5.3, E.3).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from secure_fvi.algorithms.natural import Natural, distance

#: Halvings of a step after which q stays where it is.
_HALVINGS = 30
#: A step beyond one over the silos asked may take at most this share of q's precision in any direction.
_MOST_LOST = 0.75
#: Shares of the agreement with the change before last under which a step is halved, and from which the next is longer.
_TURNING, _ALIKE = 0.75, 0.95
#: An agreement under _NOISE tells nothing. Changes that shrink to a share of _SHRINKING allow a longer step too; that
#: they grow says little, since they are measured in standard deviations of a q that sharpens.
_NOISE, _SHRINKING = 0.2, 0.8


def pace(q: Natural, now: Natural, last: Natural, earlier: Natural) -> float:
    """By which factor the damping should change, from the sums of changes of this round and of the two before.

    A step that is too long turns the next change round in some directions, long before q becomes improper. Noise of the
    local fits hides that in the cosine with the last change, but not in its ratio to the cosine with the one before:
    noise lowers both alike, while what turns round twice agrees again.
    """
    mean, scale = _coordinates(q, now)
    mean_last, scale_last = _coordinates(q, last)
    first, second = _cosine(mean, mean_last), _cosine(mean, _coordinates(q, earlier)[0])
    told = second > _NOISE
    if first < (_TURNING * second if told else -_NOISE):
        return 0.5
    if first >= 0 and torch.cat([mean, scale]).norm() < _SHRINKING * torch.cat([mean_last, scale_last]).norm():
        return 2.0
    return 1.25 if first > _ALIKE * (second if told else 1.0) else 1.0


def accept(q: Natural, change: Natural, damping: float, safe: float) -> tuple[Natural, float, int]:
    """q after the largest step of `damping`, `damping` / 2, ... that is proper and sane, its size (0 for none), and the
    halvings it took.

    A step up to `safe` need only be proper: one over the silos asked is an average of their local posteriors, where
    nothing is late.
    """
    for halving in range(_HALVINGS):
        step = damping * 0.5**halving
        after = q.plus(change, step)
        if after.proper and (step <= safe or _least_kept(q, change, step) > 1 - _MOST_LOST):
            return after, step, halving
    return q, 0.0, _HALVINGS


def distance_moved(q: Natural, change: Natural, taken: float) -> float:
    """Standard deviations by which the whole change moves q: in a straight line from the share that was taken, where q
    would be improper; infinite where none was."""
    whole = distance(q, q.plus(change))
    if math.isfinite(whole) or not taken:
        return whole
    return distance(q, q.plus(change, taken)) / taken


def _least_kept(q: Natural, change: Natural, step: float) -> float:
    """Smallest ratio of the new to the old precision over all directions."""
    if not q.full:
        return float((1 + step * change.precision / q.precision).min())
    factor = q.factor()
    return float(torch.linalg.eigvalsh(factor.mT @ change.precision @ factor).min()) * step + 1


def _coordinates(q: Natural, change: Natural) -> tuple[Tensor, Tensor]:
    """A small change of q in natural parameters as one of its mean, in standard deviations (n,), and of its scale."""
    mean, factor = q.mean(), q.factor()
    if not q.full:
        return factor * (change.shift - change.precision * mean), change.precision * factor.square() / math.sqrt(2)
    moved = factor.mT @ (change.shift - change.precision @ mean)
    return moved, (factor.mT @ change.precision @ factor).flatten() / math.sqrt(2)


def _cosine(a: Tensor, b: Tensor) -> float:
    """1 where either is nothing."""
    lengths = float(a.norm() * b.norm())
    return float(a @ b) / lengths if lengths else 1.0
