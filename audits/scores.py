"""Scores with intervals. Each states what its interval rests on.

Rates of right guesses have exact (Clopper and Pearson 1934) intervals, the area under the ROC curve that of DeLong et
al. (1988), R^2 the percentile bootstrap over groups of rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.stats import beta, binom, norm, rankdata

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.audits.base import CONFIDENCE, Estimate, Groups, check_confidence
from secure_fvi.errors import InputError

_RESAMPLES = 4000
_SEED = 20_231_207


def proportion(right: int, trials: int, confidence: float = CONFIDENCE) -> Estimate:
    """A probability from independent trials, with its Clopper-Pearson interval."""
    check_confidence(confidence)
    if not 0 <= right <= trials or trials < 1:
        raise InputError(f"{right} of {trials} trials cannot be")
    tail = (1 - confidence) / 2
    low = 0.0 if right == 0 else float(beta.ppf(tail, right, trials - right + 1))
    high = 1.0 if right == trials else float(beta.ppf(1 - tail, right + 1, trials - right))
    return Estimate(right / trials, low, high)


def advantage(right: int, trials: int, confidence: float = CONFIDENCE) -> Estimate:
    """Of guesses at fair coins: 2 P(right) - 1, which 0 is without knowledge and 1 with certainty.

    For a fair coin it is true-positive rate less false-positive rate, the membership advantage of Yeom et al. (2018).
    """
    return Estimate(*(2 * p - 1 for p in proportion(right, trials, confidence)))


def power_of_advantage(estimate: Estimate, trials: int) -> float:
    """Probability that `trials` guesses, right as often as the interval's lower end says, give an advantage above 0."""
    least = next((k for k in range(trials + 1) if advantage(k, trials).low > 0), trials + 1)
    return float(binom.sf(least - 1, trials, (1 + estimate.low) / 2))


def auc(truth: FloatArray, guesses: FloatArray, groups: Groups, confidence: float = CONFIDENCE) -> Estimate:
    """Area under the ROC curve of `guesses` (B,) for `truth` (B,) of 0 and 1. Rows must be independent.

    DeLong's variance on the logit scale. Where all pairs are in order, or all the wrong way round, that variance is
    zero, and the bound is Clopper and Pearson's for as many disjoint pairs as there are.
    """
    check_confidence(confidence)
    inside, outside = guesses[truth > 0.5], guesses[truth <= 0.5]
    m, n = len(inside), len(outside)
    if not m or not n:
        raise InputError(f"an AUC needs both kinds of rows, got {m} and {n}")
    above, below = _placements(inside, outside)
    area = float(above.mean())
    if min(m, n) < 2 or area in (0.0, 1.0):
        pairs = min(m, n)
        bound = proportion(pairs if area > 0.5 else 0, pairs, confidence)
        return Estimate(area, min(bound.low, area), max(bound.high, area))
    sd = math.sqrt(above.var(ddof=1) / m + below.var(ddof=1) / n)
    reach = norm.ppf((1 + confidence) / 2) * sd / (area * (1 - area))
    centre = math.log(area / (1 - area))
    return Estimate(area, _logistic(centre - reach), _logistic(centre + reach))


def auc_gain(truth: FloatArray, better: FloatArray, base: FloatArray, confidence: float = CONFIDENCE) -> Estimate:
    """By how much the AUC of `better` exceeds that of `base`, both for the same rows: DeLong et al. (1988), paired.

    Rows (B,) must be independent, with at least two of each kind.
    """
    check_confidence(confidence)
    inside = truth > 0.5
    m, n = int(inside.sum()), int((~inside).sum())
    if min(m, n) < 2:
        raise InputError(f"a difference of AUCs needs two rows of each kind, got {m} and {n}")
    (above, below), (base_above, base_below) = (_placements(g[inside], g[~inside]) for g in (better, base))
    difference = float(above.mean() - base_above.mean())
    sd = math.sqrt((above - base_above).var(ddof=1) / m + (below - base_below).var(ddof=1) / n)
    reach = float(norm.ppf((1 + confidence) / 2)) * sd
    return Estimate(difference, difference - reach, difference + reach)


def _placements(inside: FloatArray, outside: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Of each row inside the share of rows outside that it beats, and of each row outside that of rows that beat it."""
    m, n = len(inside), len(outside)
    ranks = rankdata(np.concatenate([inside, outside]))
    return (ranks[:m] - rankdata(inside)) / n, 1 - (ranks[m:] - rankdata(outside)) / m


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def tpr_at_fpr(truth: FloatArray, guesses: FloatArray, fpr: float) -> tuple[Estimate, float]:
    """True-positive rate (Clopper and Pearson's interval) and threshold: the k-th largest guess outside, k =
    floor(fpr (n + 1)), which a fresh row outside passes with a probability of at most `fpr` (a conformal bound,
    whatever the distribution); infinite where the rows outside are too few for so low a rate."""
    inside, outside = guesses[truth > 0.5], np.sort(guesses[truth <= 0.5])
    if not len(inside) or not 0 < fpr < 1:
        raise InputError(f"a rate at fpr = {fpr} over {len(inside)} rows cannot be")
    k = math.floor(fpr * (len(outside) + 1) + 1e-9)
    threshold = float(outside[-k]) if k else math.inf
    return proportion(int((inside > threshold).sum()), len(inside)), threshold


# ---- What (epsilon, delta) allows any test ----

#: False-positive rates at which true-positive rates are stated beside what is allowed, where rows are enough for it.
RATES = (0.01, 0.1)
#: An epsilon above it excludes nothing, and its exponential would leave double precision.
_EXCLUDES = 300.0


def tpr_bound(epsilon: float, delta: float, fpr: float) -> float:
    """Largest true-positive rate of any test between neighbours at a false-positive rate of `fpr`."""
    if epsilon > _EXCLUDES:
        return 1.0
    return min(1.0, delta + math.exp(epsilon) * fpr, 1 - math.exp(-epsilon) * (1 - delta - fpr))


def auc_bound(epsilon: float, delta: float) -> float:
    """Largest AUC of any test between neighbours.

    The ROC curve lies under min(delta + e^eps x, 1 - e^-eps (1 - delta - x)), whose area this is.
    """
    return 1 - (1 - delta) ** 2 / (1 + math.exp(min(epsilon, _EXCLUDES)))


def told_at(truth: FloatArray, guesses: FloatArray, allowed: tuple[float, float] | None) -> dict[str, Any]:
    """For a row's detail: true-positive rates at `RATES`, under an (epsilon, delta) beside what its trade-off curve
    allows, and the same as a note in words."""
    detail, words = dict[str, Any](), list[str]()
    for rate in RATES:
        found, threshold = tpr_at_fpr(truth, guesses, rate)
        if threshold == math.inf:  # too few rows for so low a rate
            continue
        detail[f"tpr_at_fpr_{rate:g}"] = list(found)
        word = f"at a false-positive rate of {rate:g}: {found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"
        if allowed is not None:
            most = detail[f"tpr_bound_at_fpr_{rate:g}"] = tpr_bound(*allowed, rate)
            word += f", at most {most:.2f} under epsilon {allowed[0]:.3g}"
        words.append(word)
    return detail | {"note": "True-positive rate " + "; ".join(words or ["of too few rows"]) + "."}


def r_squared(truth: FloatArray, guesses: FloatArray, groups: Groups, confidence: float = CONFIDENCE) -> Estimate:
    """1 - squared errors / squared deviations from the mean; guessing the mean gives 0, worse guesses less.

    Rows (B,), or (B, C) for all columns together, each about its own mean. Percentile bootstrap over whole groups, with
    a fixed seed.
    """
    return _bootstrap(_moments(truth, guesses), _columns(truth, groups), _r_squared, confidence)


def nearer(guesses: FloatArray, blind: FloatArray, groups: Groups, confidence: float = CONFIDENCE) -> Estimate:
    """1 - mean distance of guesses (B,) / mean distance (B,) of those made without seeing anything, from one truth.
    Bootstrap as for `r_squared`."""
    return _bootstrap(np.column_stack([guesses, blind]), groups, lambda sums: 1 - sums[:, 0] / sums[:, 1], confidence)


def gain(
    truth: FloatArray, better: FloatArray, base: FloatArray, groups: Groups, confidence: float = CONFIDENCE
) -> Estimate:
    """How much R^2 of the guesses `better` exceeds that of `base`, or 0, which guessing the mean gives, where `base` is
    worse than that. By a bootstrap of both together."""
    rows = np.column_stack([_moments(truth, better), ((truth - base) ** 2).ravel()])

    def difference(sums: FloatArray) -> FloatArray:
        return _r_squared(sums) - np.maximum(_r_squared(sums[:, [0, 1, 2, 4]]), 0)

    return _bootstrap(rows, _columns(truth, groups), difference, confidence)


def _moments(truth: FloatArray, guesses: FloatArray) -> FloatArray:
    centred = (truth - truth.mean(0)).ravel()
    return np.column_stack([np.ones(len(centred)), centred, centred**2, ((truth - guesses) ** 2).ravel()])


def _columns(truth: FloatArray, groups: Groups) -> Groups:
    """The group of each number of `truth`."""
    return np.repeat(groups, truth.size // len(truth))


def _r_squared(sums: FloatArray) -> FloatArray:
    count, first, second, errors = sums.T[:4]
    spread = second - first**2 / count
    return np.asarray(1 - errors / np.where(spread > 0, spread, np.nan))


@functools.lru_cache(maxsize=4)
def _resamples(groups: int) -> FloatArray:
    """How often each group is drawn in each resample, (_RESAMPLES, groups)."""
    rng = np.random.default_rng(_SEED)
    return rng.multinomial(groups, np.full(groups, 1 / groups), _RESAMPLES).astype(np.float64)


def _bootstrap(
    rows: FloatArray, groups: Groups, statistic: Callable[[FloatArray], FloatArray], confidence: float
) -> Estimate:
    check_confidence(confidence)
    names, at = np.unique(groups, return_inverse=True)
    if len(names) < 10:
        raise InputError(f"a bootstrap over {len(names)} groups means little; use at least 10")
    by_group = np.zeros((len(names), rows.shape[1]))
    np.add.at(by_group, at, rows)
    value = float(statistic(by_group.sum(0, keepdims=True))[0])
    if math.isnan(value):
        raise InputError("all targets are the same, so nothing can be recovered")
    found = statistic(_resamples(len(names)) @ by_group)
    tail = (1 - confidence) / 2
    low, high = np.nanquantile(found, [tail, 1 - tail])
    return Estimate(value, float(low), float(high))


# ---- The attack that learns from silos whose answers the adversary knows: a ridge regression ----

#: Standard deviations at which a column is cut off.
_FARTHEST = 4.0
_PENALTIES = np.logspace(-4, 6, 31)
_COLUMNS = (8, 32, 128)
_FOLDS, CROSS_FOLDS = 4, 5


def ridge(known: FloatArray, answers: FloatArray, unknown: FloatArray) -> FloatArray:
    """Linear regression on standardised columns: all of them, those that correlate most with the answers, or none.

    From examples whose answer the adversary knows to guesses (B,) for `unknown` (B, D). How many columns is decided by
    cross-validation, columns being chosen anew in each fold; the penalty by the exact leave-one-out error given them.
    """
    told = known.min(0) < known.max(0)
    x, new = standardised(known[:, told], unknown[:, told])
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


def cross_fitted(attack: Attack, x: FloatArray, y: FloatArray, groups: Groups) -> FloatArray:
    """Guesses (B,) for every row from an attack that was trained on other groups. Folds follow a fixed seed."""
    names = np.unique(groups)
    if len(names) < 2 * CROSS_FOLDS:
        raise InputError(f"{len(names)} groups for {CROSS_FOLDS} folds; an attack needs at least {2 * CROSS_FOLDS}")
    fold_of = dict(zip(names, np.random.default_rng(1).permutation(len(names)) % CROSS_FOLDS, strict=True))
    fold = np.array([fold_of[g] for g in groups])
    out = np.empty(len(y))
    for k in range(CROSS_FOLDS):
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
