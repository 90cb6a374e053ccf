"""The attack that learns from silos whose answers the adversary knows: a ridge regression."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.audits.base import Groups
from secure_fvi.errors import InputError

#: Standard deviations at which a column is cut off.
_FARTHEST = 4.0
_PENALTIES = np.logspace(-4, 6, 31)
_COLUMNS = (8, 32, 128)
_FOLDS = 4


def ridge(known: FloatArray, answers: FloatArray, unknown: FloatArray) -> FloatArray:
    """Linear regression on standardised columns: all of them, those that correlate most with the answers, or none.

    From examples whose answer the adversary knows to guesses (B,) for `unknown` (B, D). How many columns is decided by
    cross-validation, columns being chosen anew in each fold; the penalty by the exact leave-one-out error given them.
    """
    x, new = standardised(known, unknown)
    sizes = [x.shape[1], *(k for k in _COLUMNS if k < x.shape[1])]
    fold = np.random.default_rng(2).permutation(len(x)) % _FOLDS
    errors = np.zeros(1 + len(sizes))
    for k in range(_FOLDS):
        inside, truth = fold != k, answers[fold == k]
        guesses = _by_size(x[inside], answers[inside], x[~inside], sizes)
        errors += [((truth - guess) ** 2).sum() for guess in guesses]
    best = int(np.argmin(errors))
    return _by_size(x, answers, new, sizes[best - 1 : best])[-1]


def _by_size(x: FloatArray, answers: FloatArray, new: FloatArray, sizes: Sequence[int]) -> list[FloatArray]:
    """What is made of `new` without any column, and with the `sizes` that correlate most with the answers."""
    mean = answers.mean()
    order = np.argsort(-np.abs(x.T @ (answers - mean)), kind="stable")
    fits = [_fitted(x[:, order[:k]], answers - mean, new[:, order[:k]]) for k in sizes]
    return [np.full(len(new), mean), *(np.asarray(mean + fit) for fit in fits)]


def _fitted(x: FloatArray, centred: FloatArray, new: FloatArray) -> FloatArray:
    """Ridge regression with the penalty of the least leave-one-out error."""
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    projected = u.T @ centred
    errors = []
    for penalty in _PENALTIES:
        shrunk = s**2 / (s**2 + penalty)
        leverage = (u**2 * shrunk).sum(1) + 1 / len(x)
        residuals = (centred - u @ (shrunk * projected)) / np.maximum(1 - leverage, 1e-9)
        errors.append((residuals**2).mean())
    penalty = _PENALTIES[int(np.argmin(errors))]
    return np.asarray(new @ (vt.T @ (s / (s**2 + penalty) * projected)))


Attack = Callable[[FloatArray, FloatArray, FloatArray], FloatArray]


def cross_fitted(attack: Attack, x: FloatArray, y: FloatArray, groups: Groups, folds: int = 5) -> FloatArray:
    """Guesses (B,) for every row from an attack that was trained on other groups. Folds follow a fixed seed."""
    names = np.unique(groups)
    if len(names) < 2 * folds:
        raise InputError(f"{len(names)} groups for {folds} folds; an attack needs at least {2 * folds}")
    fold_of = dict(zip(names, np.random.default_rng(1).permutation(len(names)) % folds, strict=True))
    fold = np.array([fold_of[g] for g in groups])
    out = np.empty(len(y))
    for k in range(folds):
        out[fold == k] = attack(x[fold != k], y[fold != k], x[fold == k])
    return out


def standardised(known: FloatArray, unknown: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Both in standard deviations of `known` from its mean, cut off at `_FARTHEST`; 0 in columns that do not vary."""
    mean, sd = known.mean(0), known.std(0)
    varies = sd > 1e-12 * (1 + np.abs(mean))
    sd = np.where(varies, sd, 1.0)
    # One contribution far out, as importance weights make them, must not decide a regression.
    scaled = ((v - mean) * varies / sd for v in (known, unknown))
    first, second = (np.clip(v, -_FARTHEST, _FARTHEST) for v in scaled)
    return first, second
