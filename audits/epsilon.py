"""Empirical epsilon of a configuration: what canaries prove, beside what its accountant claims, as rows of an audit.

A row's value is a lower bound on epsilon at the job's delta, its upper end the claim. The finding is "leaks" where the
bound exceeds the claim: then the claim is false, with the row's confidence. The positive control is the same attack
where noise is missing behind the accountant's back, which must be found out; the negative one tosses the coins again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.stats import beta, norm

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.audits.base import CONFIDENCE, CONTROL_CONFIDENCE, AuditRow, Control, Estimate, check_confidence, judge
from secure_fvi.audits.canaries import InOrOut, Kind, OneRunGame, Scores, Setting
from secure_fvi.audits.worlds import Data
from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel
from secure_fvi.privacy.settings import DP

#: The attack's name on the command line, and its score in audit.json.
NAME, SCORE = "epsilon", "epsilon (lower bound)"
#: Canaries and guesses on either side, by unit. Canary silos are parties of their own and cost as much.
ONE_RUN = {"record": (5000, 50), "silo": (100, 25)}
ONE_RUN_ROUNDS, ROUNDS = 12, 3
_KINDS: tuple[Kind, ...] = ("dirac", "real")
_METHODS: dict[Method, str] = {"clopper-pearson": "Clopper-Pearson", "gaussian": "Gaussian DP"}
Told = Callable[[str], None]


def work(runs: int) -> int:
    """How often `told` will be called."""
    return 2 + 2 * len(_KINDS) * runs


def epsilon_rows(
    model: FederatedModel,
    algorithm: Any,
    silos: Sequence[Data],
    privacy: DP,
    *,
    simulated: bool,
    real_data: bool = False,
    runs: int = 400,
    rounds: int = ROUNDS,
    told: Told = lambda what: None,
) -> list[AuditRow]:
    """Rows of the attack for SFVI under `privacy`, noise planned for `rounds` rounds without retries.

    runs: of each game with one canary, half of them with it. Raises InputError for other algorithms, for fewer than 20
    runs, and for data that are neither made nor released for an audit.
    """
    if not isinstance(algorithm, SFVI):
        raise InputError(f"attack '{NAME}' audits sfvi under privacy, not {algorithm.name}")
    if runs < 20:
        raise InputError(f"attack '{NAME}' needs at least 20 runs, not {runs}")
    if not simulated and not real_data:
        raise InputError(
            "an audit of runs on real data handles single records; say so with real_data = True (--real-data) after "
            "the institutions have agreed, or audit a run on simulated data"
        )
    settings = Setting(model, algorithm, silos, replace(privacy, retries=0), simulated, rounds)
    rows = [_one_run_row(replace(settings, rounds=max(rounds, ONE_RUN_ROUNDS)), told)]
    for kind in _KINDS:
        rows += _several_runs_rows(settings, kind, runs, told)
    return rows


def _one_run_row(setting: Setting, told: Told) -> AuditRow:
    canaries, each_side = ONE_RUN[setting.privacy.unit]
    game = OneRunGame(setting, canaries)
    missing = 0.25 if setting.privacy.unit == "record" else 0.0
    told(f"{canaries} canaries in one run")
    found, nothing = game.play(1, each_side)
    told(f"{canaries} canaries in one run, {_words(missing)}")
    caught, _ = game.play(2, each_side, missing)
    return _row(
        f"Dirac {setting.privacy.unit}s in one run",
        setting,
        game.claim,
        (found.epsilon, caught.epsilon, nothing.epsilon),
        missing,
        method="one run",
        assumption="none",
        canaries=canaries,
        guesses=found.guesses,
        right=found.correct,
    )


def _several_runs_rows(setting: Setting, kind: Kind, runs: int, told: Told) -> list[AuditRow]:
    game = InOrOut(setting, kind)
    what = f"{'Dirac' if kind == 'dirac' else 'real'} {setting.privacy.unit} in or out"
    found = game.scores(range(runs), each=lambda: told(what))
    control = game.scores(range(runs), 0.0, lambda: told(f"{what}, {_words(0.0)}"))
    delta, out = setting.privacy.delta, []
    # A sampled Gaussian has another trade-off curve, for which the second method proves nothing.
    sampled = setting.privacy.unit == "record" and setting.algorithm.sampling_rate < 1
    for method, name in _METHODS.items():
        if method == "gaussian" and sampled:
            continue

        def proven(scores: Scores, confidence: float = CONFIDENCE, method: Method = method) -> Any:
            return bound(*scores, delta, method, confidence)

        best = proven(found)
        out.append(
            _row(
                f"{what}, {name}",
                setting,
                game.claim,
                (best.epsilon, proven(control).epsilon, proven(found.shuffled(), CONTROL_CONFIDENCE).epsilon),
                0.0,
                method=method,
                assumption=best.assumption,
                runs=runs,
                rates=best.rates._asdict(),
                **({} if best.mu is None else {"mu": best.mu}),
            )
        )
    return out


def _row(
    attack: str,
    setting: Setting,
    claim: Mapping[str, Any],
    epsilons: tuple[float, float, float],
    missing: float,
    **detail: Any,
) -> AuditRow:
    claimed = float(claim["epsilon"])
    found, caught, nothing = (Estimate(e, e, max(e, claimed)) for e in epsilons)
    shown = {
        k: claim[k] for k in ("unit", "delta", "accountant", "noise", "mechanism", "noise_multiplier", "colluders")
    }
    row = judge(
        attack,
        protection(setting.privacy),
        SCORE,
        found,
        Control(caught, f"the same attack, {_words(missing)}"),
        Control(nothing, "the same scores, with the coins tossed again"),
        claimed,
        claim=claimed,
        rounds=setting.rounds,
        **shown,
        **detail,
    )
    if caught.low <= claimed:
        row.detail["why_invalid"] = (
            f"an attack of this size proves {caught.low:.3g} where noise is missing and cannot contradict a claim of "
            f"{claimed:.3g}; give it more runs, or audit a smaller epsilon"
        )
    return row


def protection(privacy: DP) -> str:
    """As the table of an audit names it."""
    size = f"noise {privacy.noise_multiplier:g}" if privacy.epsilon is None else f"{privacy.epsilon:g}"
    return f"{'silo ' if privacy.unit == 'silo' else ''}DP {size}"


def _words(missing: float) -> str:
    return "noise off" if missing == 0 else f"noise times {missing:g}"


# ---- A lower bound on epsilon from repeated runs of a game in which one canary is in or out ----
#
# From scores of runs with and without the canary comes one test ("in where the score exceeds t"), whose threshold is
# chosen on runs of its own, and from the test's two rates on the other runs a bound by one of two methods:
#
# - `clopper-pearson` (Jagielski et al. 2020; Nasr et al. 2021): under (epsilon, delta) TPR <= e^epsilon FPR + delta,
# and
#   the same for TNR and FNR. It assumes nothing of the mechanism, and T runs cannot prove more than about log T.
# - `gaussian` (Nasr et al. 2023): mu >= Phi^-1(1 - FPR) - Phi^-1(FNR), made an epsilon by the exact formula of
#   mu-Gaussian DP (Dong et al. 2022, Corollary 2.13). It is a bound only where the trade-off curve of the mechanism is
#   that of a Gaussian, and then far stronger.
#
# Both methods need an upper bound on FPR and one on FNR, each at half the error that is allowed, so that both hold
# together; the mirrored test needs no more than these two.

Method = Literal["clopper-pearson", "gaussian"]

#: What must be true of the mechanism for the bound to be one, by method.
ASSUMPTIONS: dict[Method, str] = {
    "clopper-pearson": "none",
    "gaussian": "the mechanism's trade-off curve is that of a Gaussian",
}
#: Share of the runs by which the threshold is chosen.
OWN_SHARE = 0.2
_GRID = 201


class Rates(NamedTuple):
    """How often a test said "in": of `inside` runs with the canary and of `outside` runs without it."""

    true_positives: int
    inside: int
    false_positives: int
    outside: int

    def upper(self, confidence: float) -> tuple[float, float]:
        """Upper bounds (FPR, FNR) that hold together with `confidence` (Clopper and Pearson, one-sided each)."""
        tail = (1 - confidence) / 2
        misses = self.inside - self.true_positives
        return float(_upper(self.false_positives, self.outside, tail)), float(_upper(misses, self.inside, tail))


class Bound(NamedTuple):
    """What the runs prove with `confidence`, under `assumption`."""

    epsilon: float
    delta: float
    confidence: float
    method: Method
    assumption: str
    rates: Rates
    mu: float | None = None  # of Gaussian DP, where the method has one


def epsilon_of_gaussian(mu: float, delta: float) -> float:
    """The epsilon of mu-Gaussian DP at `delta`, exactly."""
    if not 0 < delta < 1:
        raise InputError(f"delta must lie in (0, 1), not {delta}")

    def excess(epsilon: float) -> float:
        ends = norm.logcdf([mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu])
        return float(math.exp(ends[0]) - math.exp(epsilon + ends[1])) - delta

    if mu <= 0 or excess(0.0) <= 0:
        return 0.0
    largest = mu * mu / 2 + mu * float(norm.isf(delta))  # where the first term alone is delta
    return float(brentq(excess, 0.0, largest + 1e-9, xtol=1e-10))


def bound_of_rates(rates: Rates, delta: float, method: Method, confidence: float = CONFIDENCE) -> Bound:
    """The bound from the rates of one test that was fixed beforehand; 0 where they prove nothing.

    Raises InputError for counts that cannot be, and for an unknown method.
    """
    check_confidence(confidence)
    if not (0 <= rates.true_positives <= rates.inside and 0 <= rates.false_positives <= rates.outside):
        raise InputError(f"{rates} cannot be: a rate counts runs among those that were made")
    if min(rates.inside, rates.outside) < 1:
        raise InputError("a bound from several runs needs runs with the canary and runs without it")
    if not 0 <= delta < 1:
        raise InputError(f"delta must lie in [0, 1), not {delta}")
    if method not in ASSUMPTIONS:
        raise InputError(f"method '{method}' is unknown; choose {', '.join(ASSUMPTIONS)}")
    fpr, fnr = rates.upper(confidence)
    if method == "gaussian":
        mu = max(0.0, float(norm.isf(fpr) - norm.ppf(fnr)))
        found = epsilon_of_gaussian(mu, delta)
        return Bound(found, delta, confidence, method, ASSUMPTIONS[method], rates, mu)
    found = max(float(_log_ratios(fpr, fnr, delta)), 0.0)
    return Bound(found, delta, confidence, method, ASSUMPTIONS[method], rates)


def bound(
    outside: FloatArray, inside: FloatArray, delta: float, method: Method, confidence: float = CONFIDENCE
) -> Bound:
    """The bound from scores (T0,) of runs without the canary and (T1,) of runs with it, large where it seems in.

    The first `OWN_SHARE` of each choose the threshold, the rest are counted.
    """
    own_out, own_in = (int(OWN_SHARE * len(scores)) for scores in (outside, inside))
    if min(own_out, own_in) < 2:
        raise InputError(f"{len(outside)} runs without and {len(inside)} with the canary are too few; make 10 of each")
    rest_out, rest_in = outside[own_out:], inside[own_in:]
    sizes = len(rest_out), len(rest_in)
    threshold = _threshold(outside[:own_out], inside[:own_in], sizes, delta, method, confidence)
    rates = Rates(int((rest_in > threshold).sum()), sizes[1], int((rest_out > threshold).sum()), sizes[0])
    return bound_of_rates(rates, delta, method, confidence)


def _threshold(
    outside: FloatArray, inside: FloatArray, sizes: tuple[int, int], delta: float, method: Method, confidence: float
) -> float:
    """Where the bound from runs as many as `sizes` would be largest, by kernel estimates of both distributions.

    Nothing rests on their being right: what they choose is tried on other runs.
    """
    least = 1e-6 * max(float(np.ptp(np.concatenate([outside, inside]))), 1e-300)
    widths = [max(1.06 * float(s.std(ddof=1)) * len(s) ** -0.2, least) for s in (outside, inside)]
    ends = [end for s, h in zip((outside, inside), widths, strict=True) for end in (s.min() - 2 * h, s.max() + 2 * h)]
    grid = np.linspace(min(ends), max(ends), _GRID)
    tail = (1 - confidence) / 2
    fpr, fnr = (
        _upper(np.rint(norm.cdf(sign * (s - grid[:, None]) / h).mean(1) * n), n, tail)
        for sign, s, h, n in zip((1, -1), (outside, inside), widths, sizes, strict=True)
    )
    found = norm.isf(fpr) - norm.ppf(fnr) if method == "gaussian" else _log_ratios(fpr, fnr, delta)
    best = np.flatnonzero(found >= found.max() - 1e-12)
    return float(grid[best[len(best) // 2]])  # the middle of a plateau


def _upper(events: FloatArray | int, trials: int, tail: float) -> FloatArray:
    """One-sided Clopper-Pearson bounds on rates."""
    with np.errstate(invalid="ignore"):
        return np.where(np.equal(events, trials), 1.0, beta.isf(tail, np.add(events, 1), np.subtract(trials, events)))


def _log_ratios(fpr: FloatArray | float, fnr: FloatArray | float, delta: float) -> FloatArray:
    """log((TPR - delta) / FPR) or, where that is more, its mirror log((TNR - delta) / FNR); -inf for none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        both = [np.log(np.maximum(1 - miss - delta, 0.0) / alarm) for miss, alarm in ((fnr, fpr), (fpr, fnr))]
    return np.maximum(*both)
