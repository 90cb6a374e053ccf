"""A lower bound on epsilon from one training run (Steinke, Nasr and Jagielski 2023, Theorem 5.2 and its Algorithm 1).

m canaries are each put in with probability 1/2 by the auditor's own coin. From what the run released the attack
guesses for some of them, fixed in number beforehand, whether they were in. If the run is (epsilon, delta)-private, the
number of correct guesses is, up to delta, at most Binomial(r, e^eps / (1 + e^eps)); a run that is guessed better than
that is not as private as epsilon says.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.stats import binom

from secure_fvi.errors import InputError
from secure_fvi.privacy.accounting import epsilon
from secure_fvi.privacy.events import Gaussian

_LARGEST = 50.0


class OneRun(NamedTuple):
    """What one run proves: with the stated confidence the mechanism is not (epsilon, delta)-private below `epsilon`."""

    epsilon: float
    delta: float
    confidence: float
    canaries: int
    guesses: int
    correct: int


def p_value(epsilon: float, delta: float, canaries: int, guesses: int, correct: int) -> float:
    """Largest probability that an (epsilon, delta)-private run lets `correct` or more of the guesses be right."""
    q = 1 / (1 + math.exp(-epsilon))
    beta = float(binom.sf(correct - 1, guesses, q))
    if delta == 0 or correct == 0:
        return min(1.0, beta)
    i = np.arange(1, correct + 1)
    inside = binom.cdf(correct - 1, guesses, q) - binom.cdf(correct - i - 1, guesses, q)
    alpha = float((inside / i).max())
    return min(1.0, beta + 2 * canaries * delta * alpha)


def lower_bound(canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95) -> OneRun:
    """The largest epsilon that the guesses contradict at `confidence`; 0 where they contradict none.

    Raises InputError for counts that cannot be.
    """
    if not 0 <= correct <= guesses <= canaries or guesses < 1:
        raise InputError(f"{correct} right of {guesses} guesses on {canaries} canaries cannot be")
    if not (0 <= delta < 1 and 0 < confidence < 1):
        raise InputError(f"delta = {delta} and confidence = {confidence} must lie in (0, 1)")
    allowed = 1 - confidence

    def excess(epsilon: float) -> float:
        return p_value(epsilon, delta, canaries, guesses, correct) - allowed

    epsilon = 0.0
    if excess(0.0) < 0:
        epsilon = _LARGEST if excess(_LARGEST) < 0 else float(brentq(excess, 0.0, _LARGEST, xtol=1e-10))
    return OneRun(epsilon, delta, confidence, canaries, guesses, correct)


def guess(scores: npt.NDArray[np.float64], inside: npt.NDArray[np.bool_], each_side: int, delta: float) -> OneRun:
    """Call the `each_side` highest scores in and the lowest out; `each_side` is fixed before scores are seen."""
    order = np.argsort(scores, kind="stable")
    correct = int(inside[order[-each_side:]].sum() + (~inside[order[:each_side]]).sum())
    return lower_bound(len(scores), 2 * each_side, correct, delta)


class GaussianStudy(NamedTuple):
    """What the bound says of a Gaussian mechanism whose epsilon is known."""

    truth: float
    bounds: npt.NDArray[np.float64]  # (repeats,)

    @property
    def median(self) -> float:
        return float(np.median(self.bounds))

    @property
    def above_truth(self) -> float:
        """Share of repeats whose bound exceeds the truth: at most 1 - confidence, if the bound is one."""
        return float((self.bounds > self.truth).mean())


def gaussian_study(
    sigma: float = 1.0,
    canaries: int = 10_000,
    each_side: int = 100,
    repeats: int = 200,
    delta: float = 1e-5,
    seed: int = 1,
) -> GaussianStudy:
    """Audit a mechanism that releases each canary's bit plus N(0, sigma^2): Dirac canaries, seen one by one.

    2 `each_side` guesses are made, a number fixed beforehand. The truth is the mechanism's epsilon at `delta`.
    """
    rng = np.random.default_rng(seed)
    bounds = np.empty(repeats)
    for k in range(repeats):
        inside = rng.random(canaries) < 0.5
        scores = inside + sigma * rng.standard_normal(canaries)
        bounds[k] = guess(scores, inside, each_side, delta).epsilon
    return GaussianStudy(epsilon(Gaussian(sigma), delta, "pld"), bounds)
