"""Empirical epsilon of a configuration: what canaries prove, beside what its accountant claims, as rows of an audit.

A row's value is a lower bound on epsilon at the job's delta, its upper end the claim. The finding is "leaks" where the
bound exceeds the claim: then the claim is false, with the row's confidence. The positive control is the same attack
where noise is missing behind the accountant's back, which must be found out; the negative one tosses the coins again.
"""

from __future__ import annotations

import bisect
import functools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyro
import torch
from pyro.distributions import Normal
from scipy.optimize import brentq
from scipy.stats import beta, binom, chi2, norm, shapiro
from scipy.stats import t as student
from torch import Tensor

from secure_fvi.aggregation import Masked, Plain
from secure_fvi.aggregation.base import FloatArray, SecureSum
from secure_fvi.algorithms.base import CLIP, Broadcast, Pending, Problem, Step
from secure_fvi.algorithms.kit import Program
from secure_fvi.algorithms.natural import packed_size, unpack
from secure_fvi.algorithms.sfvi import SFVI, WarmStart
from secure_fvi.algorithms.vertical.vertical import HIDDEN_PHASE
from secure_fvi.audits.base import (
    CONFIDENCE,
    CONTROL_CONFIDENCE,
    AuditRow,
    Control,
    Estimate,
    Scored,
    check_confidence,
    judge,
)
from secure_fvi.audits.worlds import Data, Shared, pooled, shortened
from secure_fvi.columns import Columns
from secure_fvi.driving import Books, build_guards
from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel
from secure_fvi.fitting import build_parties
from secure_fvi.privacy.gate import Gate, NoiseSource, RecordRelease, Release
from secure_fvi.privacy.settings import DP
from secure_fvi.privacy.terms import REPLACE, Terms
from secure_fvi.server import claim
from secure_fvi.silo import Silo

#: The attack's name on the command line, and its score in audit.json.
NAME, SCORE = "epsilon", "epsilon (lower bound)"
#: Canaries by unit, and guesses on either side by method. Canary silos are parties of their own and cost as much. Who
#: assumes nothing makes few guesses and the surest ones; with a trade-off curve more are of use.
CANARIES = {"record": 10_000, "silo": 100}
GUESSES: dict[OneRunMethod, dict[str, int]] = {
    "one run": {"record": 50, "silo": 25},
    "one run, gaussian": {"record": 500, "silo": 25},
    "one run, independent": {"record": 1500, "silo": 25},
}
ONE_RUN_ROUNDS, ROUNDS = 12, 3
#: Shares of the runs after which games with one canary are looked at, and end where a claim is contradicted.
LOOKS = (0.25, 0.5, 1.0)
#: The noise of the fault whose chance to be found each row tells.
FAULT = 0.5
#: Kinds of canary, and what each is called before "record" or "silo".
_KINDS: dict[Kind, str] = {"dirac": "Dirac", "real": "real", "aimed": "real"}
_METHODS: dict[Method, str] = {
    "clopper-pearson": "Clopper-Pearson",
    "gaussian": "Gaussian DP",
    "normal": "normal scores",
}
_POWER_TRIALS = 100
Told = Callable[[str], None]


def work(runs: int) -> int:
    """How often `told` will be called, at most."""
    return 2 + (2 * len(_KINDS) + 1) * runs


def why_not(model: FederatedModel | Columns, algorithm: Any, silos: Sequence[Data], privacy: DP) -> str | None:
    """Why no run under `privacy` can be audited so, None where one can."""
    try:
        Setting(model, algorithm, silos, _any_noise(privacy), True, 1).parties(silos)
    except InputError as error:
        return str(error)
    return None


def epsilon_rows(
    model: FederatedModel | Columns,
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
    """Rows of the attack under `privacy`, noise planned for `rounds` rounds without retries.

    runs: of each game with one canary, half of them with it; fewer where a claim is contradicted before. Canaries of
    one run are for SFVI, and real canaries for all but vertical runs. Raises InputError for what no run takes, for
    fewer than 20 runs, and for data that are neither made nor released for an audit.
    """
    if runs < 20:
        raise InputError(f"attack '{NAME}' needs at least 20 runs, not {runs}")
    if not simulated and not real_data:
        raise InputError(
            "an audit of runs on real data handles single records; say so with real_data = True (--real-data) after "
            "the institutions have agreed, or audit a run on simulated data"
        )
    settings = Setting(model, algorithm, silos, replace(privacy, retries=0), simulated, rounds)
    rows = []
    if settings.by_gradients:
        rows += _one_run_rows(replace(settings, rounds=max(rounds, ONE_RUN_ROUNDS)), told)
    for kind in list(_KINDS)[: 1 if isinstance(model, Columns) else None]:
        rows += _several_runs_rows(settings, kind, runs, told)
    return rows


def _one_run_rows(setting: Setting, told: Told) -> list[AuditRow]:
    """One run, and one with less noise as control; what their scores prove by each method."""
    unit, delta, out = setting.privacy.unit, setting.privacy.delta, []
    game = OneRunGame(setting, CANARIES[unit])
    missing = 0.25 if unit == "record" else 0.0
    told(f"{game.canaries} canaries in one run")
    found = game.play(1)
    told(f"{game.canaries} canaries in one run, {_words(missing)}")
    control = game.play(2, missing)
    for method, sides in GUESSES.items():
        if method != "one run" and setting.sampled:
            continue
        best, caught, nothing = (
            guess(*played, sides[unit], delta, method) for played in (found, control, found.tossed_again())
        )
        out.append(
            _row(
                f"Dirac {unit}s in {method.replace('gaussian', 'Gaussian DP')}",
                setting,
                game.claim,
                (best.epsilon, caught.epsilon, nothing.epsilon),
                missing,
                functools.partial(game.power, each_side=sides[unit], method=method),
                method=method,
                assumption=best.assumption,
                scored=Scored(found.inside.astype(np.float64), found.scores),
                canaries=game.canaries,
                guesses=best.guesses,
                right=best.correct,
                **({} if best.mu is None else {"mu": best.mu}),
            )
        )
    return out


def _several_runs_rows(setting: Setting, kind: Kind, runs: int, told: Told) -> list[AuditRow]:
    """Looked at after a few runs and again after more, and at an end where the claim is contradicted."""
    game = InOrOut(setting, kind)
    what = f"{_KINDS[kind]} {setting.privacy.unit} in or out" + (", aiming server" if kind == "aimed" else "")
    delta, claimed = setting.privacy.delta, float(game.claim["epsilon"])
    methods = [m for m in _METHODS if m == "clopper-pearson" or not setting.sampled]
    found, made = Scores(np.zeros(0), np.zeros(0)), 0
    for made, confidence in looks(runs):
        found = found.more(game.scores(range(sum(map(len, found)), made), each=lambda: told(what)))
        best = {method: bound(*found, delta, method, confidence) for method in methods}
        if max(b.epsilon for b in best.values()) > claimed:
            break
    control = game.scores(range(made), 0.0, lambda: told(f"{what}, {_words(0.0)}"))
    beside: dict[str, dict[str, Any]] = {}
    if kind == "aimed":  # the same canary where the server does what it is there for
        other = InOrOut(setting, "real", *game.target)
        scores = other.scores(range(made), each=lambda: told(f"{what}: the same without aim"))
        plain = {method: bound(*scores, delta, method).epsilon for method in best}
        beside = {method: {"without_aim": proved, "moves": game.moves} for method, proved in plain.items()}
    return [
        _row(
            f"{what}, {_METHODS[method]}",
            setting,
            game.claim,
            (
                b.epsilon,
                bound(*control, delta, method).epsilon,
                bound(*found.shuffled(), delta, method, CONTROL_CONFIDENCE).epsilon,
            ),
            0.0,
            functools.partial(game.power, runs=runs, method=method),
            method=method,
            assumption=b.assumption,
            scored=Scored(np.arange(2).repeat([len(some) for some in found]).astype(np.float64), np.concatenate(found)),
            runs=made,
            runs_at_most=runs,
            **({} if b.rates is None else {"rates": b.rates._asdict()}),
            **({} if b.mu is None else {"mu": b.mu}),
            **({"normal_p": normal_p(found)} if method == "normal" else {}),
            **beside.get(method, {}),
        )
        for method, b in best.items()
    ]


def looks(runs: int) -> list[tuple[int, float]]:
    """After how many runs a game is looked at, and with what confidence each bound: all hold together at `CONFIDENCE`.

    Alpha spending (Lan and DeMets 1983): by share t of the runs alpha t^2 is spent (Kim and DeMets 1987), so that the
    last look keeps most of it. A union bound over looks asks nothing of how their scores depend.
    """
    made = [max(20, round(share * runs)) for share in LOOKS]
    spent = [0.0, *((n / made[-1]) ** 2 for n in made)]
    told = {n: 1 - (1 - CONFIDENCE) * (b - a) for n, a, b in zip(made, spent, spent[1:], strict=False) if b > a}
    return list(told.items())


def _row(
    attack: str,
    setting: Setting,
    claim: Mapping[str, Any],
    epsilons: tuple[float, float, float],
    missing: float,
    power: Callable[[float], float],
    **detail: Any,
) -> AuditRow:
    """`power`: the chance that noise times a factor is found by an audit of this size."""
    claimed = float(claim["epsilon"])
    found, caught, nothing = (Estimate(e, e, max(e, claimed)) for e in epsilons)
    detail |= {"power": {_words(FAULT): power(FAULT)}}
    shown = {
        k: claim[k] for k in ("unit", "delta", "accountant", "noise", "mechanism", "noise_multiplier", "colluders")
    }
    row = judge(
        attack,
        protection(setting.privacy),
        SCORE,
        found,
        Control(caught, f"the same attack, {_words(missing)}", power(missing)),
        Control(nothing, "the same scores, with the coins tossed again"),
        claimed,
        claim=claimed,
        rounds=setting.rounds,
        algorithm=setting.algorithm.name,
        clipping_norm=setting.privacy.clipping_norm,
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
# Both need an upper bound on FPR and one on FNR, each at half the error that is allowed, so that both hold together;
# the mirrored test needs no more than these two.
#
# - `normal` (after Andrew et al., ICLR 2024, who read epsilon off normals that are fitted to canaries' scores): scores
#   that are N(a, r^2) without and N(b, s^2) with the canary prove (b - a) / max(r, s)-Gaussian DP, by thresholds in the
#   tail of the wider one. Two runs that differ in the canary alone, their noise made from one key, show b - a at once,
#   and what is left is the spread of a normal, which a dozen runs tell.

Method = Literal["clopper-pearson", "gaussian", "normal"]

#: What must be true of the mechanism for the bound to be one, by method.
ASSUMPTIONS: dict[Method, str] = {
    "clopper-pearson": "none",
    "gaussian": "the mechanism's trade-off curve is that of a Gaussian",
    "normal": "scores are normal, with the canary and without it",
}
#: Share of the runs by which the threshold is chosen.
OWN_SHARE = 0.2
_GRID = 201
#: Pairs of runs from which it is learnt what a canary moves.
_PILOTS = 4


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
    """What the runs prove, under `assumption`."""

    epsilon: float
    assumption: str
    rates: Rates | None  # of the test, where the method has one
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
    if method not in ("clopper-pearson", "gaussian"):
        raise InputError(f"method '{method}' is unknown; choose clopper-pearson, gaussian")
    fpr, fnr = rates.upper(confidence)
    if method == "gaussian":
        mu = max(0.0, float(norm.isf(fpr) - norm.ppf(fnr)))
        return Bound(epsilon_of_gaussian(mu, delta), ASSUMPTIONS[method], rates, mu)
    return Bound(max(float(_log_ratios(fpr, fnr, delta)), 0.0), ASSUMPTIONS[method], rates)


def bound(
    outside: FloatArray, inside: FloatArray, delta: float, method: Method, confidence: float = CONFIDENCE
) -> Bound:
    """The bound from scores (T0,) of runs without the canary and (T1,) of runs with it, large where it seems in.

    The first `OWN_SHARE` of each choose the threshold, the rest are counted; of normals all are.
    """
    if method == "normal":
        return _bound_of_normals(outside, inside, delta, confidence)
    own_out, own_in = (int(OWN_SHARE * len(scores)) for scores in (outside, inside))
    if min(own_out, own_in) < 2:
        raise InputError(f"{len(outside)} runs without and {len(inside)} with the canary are too few; make 10 of each")
    rest_out, rest_in = outside[own_out:], inside[own_in:]
    sizes = len(rest_out), len(rest_in)
    threshold = _threshold(outside[:own_out], inside[:own_in], sizes, delta, method, confidence)
    rates = Rates(int((rest_in > threshold).sum()), sizes[1], int((rest_out > threshold).sum()), sizes[0])
    return bound_of_rates(rates, delta, method, confidence)


def _bound_of_normals(outside: FloatArray, inside: FloatArray, delta: float, confidence: float) -> Bound:
    """The k-th runs without and with the canary are a pair, whose noise may be the same. Most of the error that is
    allowed is for the two spreads (chi-squared); the rest is for the mean of the pairs' differences (Student)."""
    check_confidence(confidence)
    pairs, error = min(len(outside), len(inside)), 1 - confidence
    if pairs < 5:
        raise InputError(f"{len(outside)} runs without and {len(inside)} with the canary are too few; make 5 of each")
    both = np.stack([outside[:pairs], inside[:pairs]])
    gaps, freedom = both[1] - both[0], pairs - 1
    gap = gaps.mean() - student.isf(error / 10, freedom) * gaps.std(ddof=1) / math.sqrt(pairs)
    spread = both.std(1, ddof=1).max() * math.sqrt(freedom / chi2.ppf(0.45 * error, freedom))
    mu = min(max(0.0, float(gap)) / max(float(spread), 1e-300), _LARGEST_MU)
    return Bound(epsilon_of_gaussian(mu, delta), ASSUMPTIONS["normal"], None, mu)


def normal_p(scores: Scores) -> float:
    """Shapiro and Wilk's p-value of the scores less their means, the smaller of the two: small, they are not normal."""
    return min(float(shapiro(some[:5000]).pvalue) if np.ptp(some) > 0 else 1.0 for some in scores)


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


# ---- Canaries in runs of ours ----
#
# They are put in front of the real gate, which clips, noises and charges them like anything else. A Dirac canary hands
# the gate a vector along one coordinate, far longer than the clipping norm, which changes its sign from round to round:
# the worst that a record or a silo may do, and noise that two rounds share cancels out. Where many of them need
# coordinates of their own, the model gets latent variables that no data touch (`padded`). An absent canary hands over
# nothing; an absent silo, whose place in the cohort everyone knows, zeros; an absent record of which all that a silo
# says depends, and a person whose values are replaced, the opposite vector. The claim holds whatever all others hand
# over, and beside a Dirac canary they hand over nothing.

#: Clipping norms that a Dirac canary asks for; it gets one, or half of one either way.
PUSH = 1e3
_INERT = "audit_inert"
_CHUNK = 512
#: Silos' own coins follow from it, so that an adversary who knows all but the canary can be played.
_COINS = b"audit/coins"
#: All silos take part in all rounds, and no run ends early.
_IN_EVERY_ROUND: dict[str, Any] = {"participation": 1.0, "warm_start": WarmStart(), "delay": 0}

#: What the adversary sees of a round: the broadcast and the released total (shared + side,), in natural units.
Watch = Callable[[Broadcast, FloatArray], None]
#: What a server says in place of a broadcast.
Aim = Callable[[Broadcast], Broadcast]


def inert_coordinates(problem: Problem) -> npt.NDArray[np.int64]:
    """Where a contribution to a `padded` model has the gradients of its inert latents."""
    start = 0
    for site in problem.layout.of("global"):
        if site.name == _INERT:
            return np.arange(start, start + site.size)
        start += site.size
    raise KeyError(_INERT)


@dataclass(frozen=True)
class Setting:
    """What is audited. rounds: of each run; the noise is planned for them, without retries.

    simulated: the data are made or published, and the noise follows from the runs' numbers.
    """

    model: FederatedModel | Columns
    algorithm: Any
    silos: Sequence[Data]
    privacy: DP
    simulated: bool
    rounds: int = 4

    @property
    def sampled(self) -> bool:
        """A sampled Gaussian has another trade-off curve, for which methods that assume a Gaussian's prove nothing."""
        return self.rate < 1

    @property
    def rate(self) -> float:
        """How often a record is in a round's batch, where records are what is protected, and batches are secret."""
        return self.algorithm.sampling_rate if self.privacy.unit == "record" and self.by_gradients else 1.0

    @property
    def by_gradients(self) -> bool:
        """Whether a silo sums over its records what the gate clips one by one: PVI's change is of all together, and
        vertical silos release a row a person."""
        return isinstance(self.algorithm, SFVI)

    @functools.cached_property
    def _shortened(self) -> Any:
        algorithm = shortened(self.algorithm, self.rounds)
        names = {f.name for f in fields(algorithm)}
        whole = _IN_EVERY_ROUND | ({"schedule": "synchronous"} if "delay" in names else {})
        return replace(algorithm, **{name: value for name, value in whole.items() if name in names})

    @functools.cached_property
    def _shared(self) -> Shared:
        """For parties of one number of silos, which all compute by one set of traces."""
        return Shared(self._shortened, 1)

    @property
    def aggregation(self) -> SecureSum:
        """Whose totals the adversary sees; but with distributed noise, any sum has the same ones."""
        return Masked(consistency_check=False, min_cohort=2) if self.privacy.noise == "distributed" else Plain()

    def parties(self, silos: Sequence[Data], sampling_rate: float | None = None) -> Any:
        """As `build_parties`, for the shortened run, in which every silo takes part in every round."""
        algorithm: Any = self._shortened
        if getattr(algorithm, "private", "") == "steps":
            raise InputError(
                "private = 'steps': no canary is played within a silo's own fit, whose steps alone have noise; audit "
                "sfvi, which noises the same gradients, or private = 'changes'"
            )
        if sampling_rate is not None:
            algorithm = replace(algorithm, sampling_rate=sampling_rate)
        elif not isinstance(self.model, Columns):
            algorithm = self._shared
        with warnings.catch_warnings():  # that a site does not reach the likelihood is what it is for
            warnings.filterwarnings("ignore", f"site '{_INERT}' does not reach")
            return build_parties(
                self.model, silos, algorithm, self.aggregation, compile=False, privacy=replace(self.privacy, retries=0),
                noise_key=_COINS,
            )  # fmt: skip


def padded(setting: Setting, count: int) -> Setting:
    """The same with `count` more global latents, of which no data depend."""
    model = setting.model
    assert isinstance(model, FederatedModel)

    def program(**data: Any) -> None:
        pyro.sample(_INERT, Normal(torch.zeros(count), 1.0).to_event(1))
        model.fn(**data)

    # The family of q(Z_G) is the server's own affair: silos send the same gradients whatever it is.
    algorithm = setting.algorithm
    algorithm = replace(algorithm, family="diagonal") if hasattr(algorithm, "family") else algorithm
    wider = FederatedModel(program, model.record_plate, model.silo_sites, model.encoder)
    return replace(setting, model=wider, algorithm=algorithm)


def colluding(setting: Setting, target: int) -> tuple[str, ...]:
    """Silos that leave their noise out, of those the claim does not count on: `target` is honest."""
    others = [f"silo-{j + 1}" for j in range(len(setting.silos)) if j != target]
    most = {"server": 0, "silo": len(others), "distributed": setting.privacy.colluders}[setting.privacy.noise]
    return tuple(others[max(len(others) - most, 0) :])


class Rig:
    """Parties that are built once and start afresh for each run, with noise of its own."""

    def __init__(self, setting: Setting, silos: Sequence[Data], colluders: Sequence[str] = ()) -> None:
        """`colluders` leave out their noise."""
        self._colluders = frozenset(colluders)
        self._secret = b"" if setting.simulated else os.urandom(32)
        self.server, self.engine, _ = setting.parties(silos)
        self._setting, self._program = setting, self.server.program
        self._programs = {name: silo.program for name, silo in self.engine.silos.items()}
        self.phase: str = next(iter(self._program.terms))
        self.terms: Terms = self._program.terms[self.phase]

    def run(
        self,
        key: str,
        watch: Watch,
        noise: float = 1.0,
        programs: Mapping[str, Callable[[Program], Any]] = {},
        aim: Aim | None = None,
    ) -> None:
        """A whole run. `noise`: a factor on the noise behind the claim's back, for controls. `programs` stand in front
        of the real ones of the silos that they name; what passes them meets the real gate. `aim`: what a server says
        in place of its first question, in every round."""
        server, silos, of = self.server, self.engine.silos, self._program
        source = NoiseSource(self._secret + key.encode())

        def with_noise(terms: Mapping[str, Terms], factor: float) -> dict[str, Terms]:
            return {p: replace(t, noise_multiplier=factor * t.noise_multiplier) for p, t in terms.items()}

        terms = with_noise(of.terms, noise)
        honest, quiet = (
            build_guards(list(silos), of.tables, t, "audit", Books(), source).gates
            for t in (terms, with_noise(of.terms, 0.0))
        )
        # No canary listens to what the server makes of a total, and who aims makes nothing of it.
        idle = len(programs) == len(silos) or aim is not None
        server.program = _Watched(of, terms, watch, idle, aim)
        server._noise = _Counted(self._secret + key.encode(), server.state.last_index)
        clip = self.terms.settings.clipping_norm
        server.state = server.state._replace(algorithm=of.init(), accepted={}, answered={}, records=None, clip=clip)
        for name, silo in silos.items():
            start(silo, (quiet if name in self._colluders else honest)[name], self._programs[name])
            silo.program = programs.get(name, lambda program: program)(silo.program)
        for _ in range(self._setting.rounds):  # also where q has come to rest
            self.engine.run(server.round())

    @functools.cached_property
    def claim(self) -> dict[str, Any]:
        """Of the terms that were agreed, whatever noise was made."""
        return claim(self._program.terms, NoiseSource())

    @property
    def noise_sd(self) -> float:
        """Of a released number, clipping norms as units."""
        terms, placement = self.terms, self.terms.settings.noise
        noisy = terms.cohort - len(self._colluders)
        shares = {"server": 1.0, "silo": noisy, "distributed": noisy / max(terms.honest, 1)}[placement]
        return terms.noise_multiplier * math.sqrt(shares)


def start(silo: Silo, gate: Any, program: Program) -> None:
    """Put the silo where it was before the first round."""
    silo.program, silo.gate = program, gate
    silo.begin()


def clip_of(message: Broadcast, terms: Terms) -> float:
    return message.scalars.get(CLIP, terms.settings.clipping_norm)


class _Counted(NoiseSource):
    """Of the server, whose indices go on from run to run: counted from the run's first."""

    def __init__(self, key: bytes, last: int) -> None:
        super().__init__(key)
        self._last = last

    def generator(self, party: str, number: int, *purpose: str) -> np.random.Generator:
        return super().generator(party, number - self._last, *purpose)


class _Watched:
    """A server's program that shows the adversary what it is given; `terms` may differ from those that were agreed.
    idle: it counts rounds and makes nothing of what it is given. aim: what it says instead."""

    def __init__(self, inner: Program, terms: Mapping[str, Terms], watch: Watch, idle: bool, aim: Aim | None) -> None:
        self._inner, self.terms, self._watch, self._idle, self._done = inner, terms, watch, idle, 0
        self._aim = aim or (lambda said: said)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def broadcast(self, state: Any, index: int, accepted: Mapping[str, int]) -> Broadcast:
        said = self._aim(self._inner.broadcast(state, index, accepted))
        return said._replace(round=self._done) if self._idle else said

    def update(self, state: Any, message: Broadcast, total: FloatArray, scale: float) -> tuple[Any, Step]:
        self._watch(message, total)
        self._done += 1
        if self._idle:
            return state, Step(math.nan, 0.0, None, message.phase, False)
        return self._inner.update(state, message, total, scale)


class Canaries:
    """The program of a silo that hands over Dirac vectors instead of what it was to compute, or nothing of them."""

    def __init__(
        self, inner: Program, inside: npt.NDArray[np.int64] | None, batch: tuple[float, Any] | None = None
    ) -> None:
        """inside: coordinates of the canaries that are there; None for a silo that has none, in or out. batch: they are
        records that are clipped one by one, each in a round's batch with this probability, by this generator."""
        self._inner, self._inside, self._batch = inner, inside, batch
        #: Sums of the last round that the silo kept, noised, clipping norms as units.
        self.kept: FloatArray = np.zeros(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def contribute(self, message: Broadcast, local: Any, view: Any, gate: Gate) -> tuple[Release, Any]:
        terms = gate.terms
        assert terms is not None
        push, there = PUSH * sign(message) * clip_of(message, terms), self._inside
        if self._batch is not None and there is not None:
            rate, rng = self._batch
            joined = there[rng.random(len(there)) < rate]
            chunks = (self._rows(joined[at : at + _CHUNK], push, terms) for at in range(0, len(joined), _CHUNK))
            public = [0.0] * (gate.table.size - terms.extent.shared - terms.extent.side)
            return gate.release_records(chunks, None, public).release, local
        values = np.zeros(terms.extent.shared)
        if terms.settings.unit == "silo":
            values[[] if there is None else there] = push
            return gate.release(values), local
        if there is not None:
            values[0] = push if len(there) else -push
        if terms.adjacency != REPLACE:
            return gate.release_change(torch.from_numpy(values)), local
        rows = torch.from_numpy(values).reshape(view.size, -1)
        self.kept = gate.hidden_sum(HIDDEN_PHASE, rows[:, :1]).numpy() / clip_of(message, terms)
        return gate.release_rows(rows), local

    @staticmethod
    def _rows(coordinates: npt.NDArray[np.int64], push: float, terms: Terms) -> tuple[Tensor, Tensor]:
        rows = torch.zeros(len(coordinates), terms.extent.shared + terms.extent.hidden, dtype=torch.float64)
        rows[torch.arange(len(rows)), torch.from_numpy(coordinates)] = push
        return rows, torch.zeros(len(rows), dtype=torch.float64)


def sign(message: Broadcast) -> int:
    """Of Dirac canaries in a round."""
    return 1 - 2 * (message.round % 2)


class Shadow:
    """What silos would release without noise: what an adversary works out who knows their records and their coins."""

    def __init__(self, setting: Setting, silos: Sequence[Data], *, only: Sequence[int], always: bool = False) -> None:
        """`only`: which of the silos. always: every record is in every batch."""
        _, engine, _ = setting.parties(silos, 1.0 if always else None)
        self._silos = [engine.silos[f"silo-{j + 1}"] for j in only]
        program = self._silos[0].program
        terms = {phase: replace(t, noise_multiplier=0.0) for phase, t in program.terms.items()}
        self.terms = next(iter(terms.values()))
        self._gates = [_Said(Gate(s.name, s.program.tables, terms, _free)) for s in self._silos]

    def start(self) -> None:
        for silo, gate in zip(self._silos, self._gates, strict=True):
            start(silo, gate, silo.program)

    def total(self, message: Broadcast, said: FloatArray | None = None) -> FloatArray:
        """(shared,) the clipped sum that answers the broadcast, in natural units.

        said: of one silo, what it is known to have answered with noise, which its state may follow."""
        out, step = np.zeros(self.terms.extent.shared), self.terms.step(clip_of(message, self.terms))
        for silo in self._silos:
            silo.settle(message.accepted)
            turn = silo.past.turn + 1  # the real silo answers every question, as this one does
            gate: Any = silo.gate
            gate.begin(message.sum_index, message.phase, self.terms.cohort, message.scalars.get(CLIP), turn)
            gate.said = None if said is None else said / step
            view = silo.view._replace(turn=turn)
            _, local = silo.program.contribute(message, silo.local, view, gate)
            silo.pending, silo.past = Pending(message.sum_index, local), silo.past._replace(turn=turn)
            out += gate.found[: len(out)] * step
        return out

    def record_norms(self, message: Broadcast) -> FloatArray:
        """Norms of the records' gradients before clipping, by silo and place."""
        self.start()
        self.total(message)
        return np.concatenate([g.norms[: silo.size] for g, silo in zip(self._gates, self._silos, strict=True)])


class _Said:
    """A gate that notes what it would let out, and lets out what was said instead."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self.said = gate, None
        self.found, self.norms = np.zeros(0), np.zeros(0)  # and norms of the records' gradients

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gate, name)

    def release(self, values: FloatArray) -> Release:
        return self._noted(self._gate.release(values))

    def release_change(self, change: Tensor) -> Release:
        return self._noted(self._gate.release_change(change))

    def release_records(
        self, chunks: Iterable[tuple[Tensor, Tensor]], data_free: Tensor | None, public: Sequence[float]
    ) -> RecordRelease:
        kept = list(chunks)
        self.norms = torch.cat([rows.norm(dim=1) for rows, _ in kept]).numpy()
        found = self._gate.release_records(kept, data_free, public)
        return found._replace(release=self._noted(found.release))

    def _noted(self, release: Release) -> Release:
        self.found = release.values
        if self.said is None:
            return release
        return release._replace(values=np.concatenate([self.said, release.values[len(self.said) :]]))


def _free(phase: str, index: int) -> None:
    """Charges nothing: nothing leaves."""


# ----
# Games with canaries, on whole private runs: many canaries in one run, or one canary in or out of many runs
#
# The adversary sees every broadcast and every released total, and knows the canary, all records and the coins of their
# silos. It does not know the noise, nor in which batches the canary was. As many silos as the claim does not count on
# work for it and leave their noise out: under noise = "silo" all but the canary's. It adds up log-likelihood ratios of
# Gaussian noise: the most powerful score where the noise is Gaussian.

# A server that aims names, in place of its own, the point at which the canary moves the silo's clipped sum most: it
# makes nothing of what it is told, and the checks of silos let every point pass.

Kind = Literal["dirac", "real", "aimed"]
#: How far it looks for a point, in sds of q, and in how many directions at random besides the canary's own.
_REACHES, _WAYS = (1.0, 3.0, 10.0, 30.0, 100.0), 6


class Scores(NamedTuple):
    """Of runs without and with the canary, large where it seems to be in."""

    outside: FloatArray  # (T0,)
    inside: FloatArray  # (T1,)

    def more(self, others: Scores) -> Scores:
        """Those of later runs after these."""
        return Scores(*map(np.concatenate, zip(self, others, strict=True)))

    def shuffled(self) -> Scores:
        """The same runs in two halves made at random: nothing can be found. For negative controls."""
        mixed = np.random.default_rng(7).permutation(np.concatenate(self))
        return Scores(mixed[: len(self.outside)], mixed[len(self.outside) :])


class Seen(NamedTuple):
    """One noised number or more, of a run: what is left of it without the canary, the canary, and the noise."""

    left: FloatArray
    own: FloatArray
    sd: float


class Played(NamedTuple):
    """Of one run, by canary."""

    scores: FloatArray  # (m,) above 0 where it seems to be in
    inside: npt.NDArray[np.bool_]  # (m,)

    def tossed_again(self) -> Played:
        """The same scores beside coins on which they do not depend: nothing can be found. For negative controls."""
        return Played(self.scores, np.random.default_rng(7).random(len(self.inside)) < 0.5)


class OneRunGame:
    """Many Dirac canaries in one run, each in with probability 1/2, one coordinate each.

    As records they are spread over the silos; as silos they join the federation, and the claim is that of the larger.
    """

    def __init__(self, setting: Setting, canaries: int) -> None:
        self.setting, self.canaries = setting, canaries
        self._real = len(setting.silos)
        extra = canaries if setting.privacy.unit == "silo" else 0
        silos = [*setting.silos, *([first_record(setting.silos[0])] * extra)]
        colluders = colluding(setting, 0)
        # Canary records sit in the silos that make noise.
        self._homes = [f"silo-{j + 1}" for j in range(self._real) if f"silo-{j + 1}" not in colluders]
        self._rig = Rig(padded(setting, canaries), silos, colluders)

    @property
    def claim(self) -> dict[str, Any]:
        """What such a run claims, by its accountant."""
        return self._rig.claim

    def play(self, seed: int, noise: float = 1.0) -> Played:
        """One run. `noise`: a factor on it behind the claim's back, for controls."""
        rng = np.random.default_rng([seed, 5])
        inside = rng.random(self.canaries) < 0.5
        coordinates = inert_coordinates(self._rig.server.problem)
        scores, nobody, rate = np.full(self.canaries, -self.setting.rounds / 2), coordinates[:0], self.setting.rate
        names, by_silo = list(self._rig.engine.silos), self.setting.privacy.unit == "silo"

        def watch(message: Broadcast, total: FloatArray) -> None:
            scores[:] += sign(message) * total[coordinates]

        if by_silo:
            there = {f"silo-{self._real + k + 1}": coordinates[k : k + 1] for k in np.flatnonzero(inside)}
        else:
            owner = np.resize(np.arange(len(self._homes)), self.canaries)
            there = {name: coordinates[inside & (owner == j)] for j, name in enumerate(self._homes)}
        batch = None if by_silo else (rate, rng)
        programs = {n: functools.partial(Canaries, inside=there.get(n, nobody), batch=batch) for n in names}
        self._rig.run(f"one run {seed}", watch, noise, programs)
        return Played(scores, inside)

    def power(self, factor: float, each_side: int, method: OneRunMethod) -> float:
        """The chance that a run of this size, its noise times `factor`, contradicts its claim: by made scores."""
        rng, rig, rounds = np.random.default_rng(8), self._rig, self.setting.rounds
        claimed, counts = self.claim["epsilon"], (self.canaries, 2 * each_side)
        sd = factor * math.sqrt(rounds) * rig.noise_sd

        def beyond(right: int) -> bool:
            return lower_bound(*counts, right, self.setting.privacy.delta, method=method).epsilon > claimed

        least = bisect.bisect_left(range(2 * each_side + 1), True, key=beyond)
        found = 0
        for _ in range(_POWER_TRIALS):
            inside = rng.random(self.canaries) < 0.5
            scores = rng.binomial(rounds, self.setting.rate * inside) + sd * rng.standard_normal(self.canaries)
            found += right_guesses(scores - rounds / 2, inside, each_side, method) >= least
        return found / _POWER_TRIALS


class InOrOut:
    """One canary that is in every other run.

    kind "dirac": of the first silo, a record's vector along the first coordinate or a silo's along all. kind "real": a
    record in or out of its silo's data, by default the one whose gradient is longest at the start; or a silo's own
    contribution in or out of the sum. kind "aimed": the same, of an ordinary record, where the server asks about a
    point that it chose for it.
    """

    def __init__(self, setting: Setting, kind: Kind, silo: int = 0, record: int | None = None) -> None:
        self.setting, self.kind, self._by_silo = setting, kind, setting.privacy.unit == "silo"
        self._rate = setting.rate
        worlds = [list(setting.silos)] * 2
        if kind != "dirac":
            if not self._by_silo:
                if record is None:
                    silo, record = _by_gradient(setting, longest=kind == "real")
                pair = _moved_last(setting.silos[silo], record)
                worlds = [[d if j == silo else kept for j, kept in enumerate(setting.silos)] for d in pair[::-1]]
            self._shadows = [Shadow(setting, worlds[0], only=[j for j in range(len(worlds[0])) if j != silo])]
            if not self._by_silo:
                self._shadows.append(Shadow(setting, worlds[0], only=[silo]))
            if setting.sampled:  # what it does whatever the batch, alone in its silo
                alone = {name: values[-1:] for name, values in worlds[1][silo].items()}
                alone_there = [alone] * len(setting.silos)
                free = replace(setting, privacy=_any_noise(setting.privacy))
                self._shadows.append(Shadow(free, alone_there, only=[silo], always=True))
        colluders = colluding(setting, silo)
        without = Rig(setting, worlds[0], colluders)
        same = kind == "dirac" or self._by_silo
        self._worlds = (without, without if same else Rig(setting, worlds[1], colluders))
        self._silo, self._aim = f"silo-{silo + 1}", None
        #: Silo and place of the canary.
        self.target = silo, record
        if kind == "aimed":
            self._aim, self.moves = _aimed(setting, worlds, silo)

    @property
    def claim(self) -> dict[str, Any]:
        """What such a run claims, by its accountant."""
        return self._worlds[0].claim

    def scores(self, seeds: range, noise: float = 1.0, each: Callable[[], None] = lambda: None) -> Scores:
        """One run a seed, with the canary where it is odd; its noise is that of the even seed before it."""
        found: tuple[list[float], list[float]] = ([], [])
        for seed in seeds:
            found[seed % 2].append(self._score(seed, bool(seed % 2), noise))
            each()
        return Scores(np.array(found[0]), np.array(found[1]))

    def _score(self, seed: int, inside: bool, noise: float) -> float:
        seen = self._play(f"{self.kind} {seed // 2} {noise}", seed, inside, noise)
        if not self.setting.sampled:
            seen = [s._replace(own=own) for s, own in zip(seen, self._learned, strict=True)]
        if inside:
            self._squares = [float(s.own @ s.own) / s.sd**2 for s in seen]
        return sum(float(evidence(s.left @ s.own, s.own @ s.own, s.sd, self._rate)) for s in seen)

    @functools.cached_property
    def _learned(self) -> list[FloatArray]:
        """By how much the canary moves what is left of each number, whoever's message it moves: the mean over runs with
        it and without, of the same noise, that are used for nothing else."""
        runs = [[self._play(f"pilot {k}", k, inside, 1.0) for k in range(_PILOTS)] for inside in (True, False)]
        there, gone = (np.array([[seen.left for seen in run] for run in some]).mean(0) for some in runs)
        return list(there - gone)

    def _play(self, key: str, seed: int, inside: bool, noise: float) -> list[Seen]:
        rig, found = self._worlds[inside], list[Seen]()
        programs: dict[str, Callable[[Program], Any]] = {}
        if self.kind != "dirac":
            for shadow in self._shadows:
                shadow.start()
            if self._by_silo and not inside:
                programs = {self._silo: lambda program: Canaries(program, None)}
        else:
            batch, nobody = (self._rate, np.random.default_rng([seed, 6])), np.zeros(0, dtype=np.int64)
            by_sum = not self._by_silo and self.setting.by_gradients
            there = dict.fromkeys(rig.engine.silos, nobody if by_sum else None)
            there[self._silo] = np.arange(rig.terms.extent.shared if self._by_silo else 1)[: None if inside else 0]
            programs = {
                name: functools.partial(Canaries, inside=at, batch=batch if by_sum else None)
                for name, at in there.items()
            }

        def watch(message: Broadcast, total: FloatArray) -> None:
            sd = rig.noise_sd * clip_of(message, rig.terms)
            found.append(Seen(*(self._along if self.kind == "dirac" else self._unexplained)(rig, message, total), sd))
            for silo in rig.engine.silos.values() if self.kind == "dirac" else ():
                if len(silo.program.kept):  # charged as if everyone saw it
                    found.append(Seen(silo.program.kept + sign(message) / 2, np.zeros(1), rig.terms.noise_multiplier))

        rig.run(key, watch, noise, programs, self._aim)
        return found

    def power(self, factor: float, runs: int, method: Method) -> float:
        """The chance that a game of so many runs, its noise times `factor`, contradicts its claim at the last look: by
        made scores, of a canary as long as in the last run that had it."""
        rng, claimed, found = np.random.default_rng(8), self.claim["epsilon"], 0
        squares, inside = np.array(self._squares), np.arange(runs) % 2 == 1
        for _ in range(_POWER_TRIALS):
            joined = (rng.random((runs, len(squares))) < self._rate) & inside[:, None]
            noise = rng.standard_normal(((runs + 1) // 2, len(squares))).repeat(2, 0)[:runs]
            inner = squares * joined + factor * np.sqrt(squares) * noise
            scores = evidence(inner, squares, 1.0, self._rate).sum(1)
            made = bound(scores[~inside], scores[inside], self.setting.privacy.delta, method, looks(runs)[-1][1])
            found += made.epsilon > claimed
        return found / _POWER_TRIALS

    def _along(self, rig: Rig, message: Broadcast, total: FloatArray) -> tuple[FloatArray, FloatArray]:
        """What is left of a total without the canary, and what that adds where it is in the batch, both (n,): along all
        coordinates where it is all that a silo says, for each may be bounded alone; else along the first."""
        n = rig.terms.extent.shared if self._by_silo else 1
        own = np.full(n, sign(message) * rig.terms.norms(clip_of(message, rig.terms))[0] / math.sqrt(n))
        either_way = not (self._by_silo or self.setting.by_gradients)
        return total[:n] + own / 2 if either_way else total[:n], own

    def _unexplained(self, rig: Rig, message: Broadcast, total: FloatArray) -> tuple[FloatArray, FloatArray]:
        """What is left of a total without the canary, as the adversary works it out, and what that adds where it is in
        the batch, zeros of what it has to learn: (shared,)."""
        others, *own = self._shadows
        left = total[: rig.terms.extent.shared] - others.total(message)
        if not self._by_silo:
            # Of noise at the server a silo's state knows nothing.
            left = left - own[0].total(message, None if rig.terms.settings.noise == "server" else left)
        return left, own[1].total(message) if self.setting.sampled else np.zeros(len(left))


def evidence(inner: FloatArray, square: FloatArray | float, sd: float, rate: float) -> FloatArray:
    """The log-likelihood ratio of totals for a canary of squared norm `square` that is in them with probability `rate`;
    `inner` is its product with what is left of a total."""
    ratio = (inner - square / 2) / sd**2
    return ratio if rate == 1 else np.logaddexp(math.log1p(-rate), math.log(rate) + ratio)


def first_record(silo: Data) -> Data:
    """A silo of two records, the first one twice."""
    return {name: values[:1].expand(2, *values.shape[1:]).clone() for name, values in silo.items()}


def _any_noise(privacy: DP) -> DP:
    """For what adds no noise, so that none need be planned."""
    return replace(privacy, epsilon=None, noise_multiplier=1.0)


def _moved_last(data: Data, record: int) -> tuple[Data, Data]:
    """The silo with the record at its end, and without it: the others keep their places, and with them their coins."""
    size = len(next(iter(data.values())))
    if not 0 <= record < size or size < 2:
        raise InputError(f"record {record} cannot leave a silo of {size}; choose 0 to {size - 1} of at least 2")
    others = [i for i in range(size) if i != record]
    return {n: v[[*others, record]] for n, v in data.items()}, {n: v[others] for n, v in data.items()}


def _by_gradient(setting: Setting, longest: bool) -> tuple[int, int]:
    """Silo and place of the record with the longest gradient at the first broadcast, or with one of median length."""
    pooled(setting.silos)  # refuses arguments that have no row a record
    algorithm = setting.algorithm if setting.by_gradients else SFVI()
    algorithm = replace(algorithm, curvature_norm=0, lengths_share=0)  # which have gradients cut before the gate
    setting = replace(setting, algorithm=algorithm, privacy=_any_noise(setting.privacy))
    shadow = Shadow(setting, setting.silos, only=range(len(setting.silos)), always=True)
    norms = shadow.record_norms(_first_broadcast(setting))
    at = int(norms.argsort()[-1 if longest else len(norms) // 2])
    sizes = [len(next(iter(s.values()))) for s in setting.silos]
    for silo, size in enumerate(sizes):
        if at < size:
            return silo, at
        at -= size
    raise AssertionError("unreachable")


def _aimed(setting: Setting, worlds: Sequence[Sequence[Data]], silo: int) -> tuple[Aim, tuple[float, float]]:
    """The point at which the silo's clipped sum, of its state at the start, differs most between two worlds (a silo's
    own from nothing), of some along the difference at the server's own point and some at random; and by how much it
    differs at the server's own point and there, in clipping norms."""
    free = replace(setting, privacy=_any_noise(setting.privacy))
    by_silo = setting.privacy.unit == "silo"
    shadows = [Shadow(free, w, only=[silo], always=free.sampled) for w in worlds[: 1 if by_silo else 2]]
    server, _, _ = free.parties(free.silos)
    first: Broadcast = server.program.broadcast(server.state.algorithm, 1, {})
    posterior = server.program.posterior(server.state.algorithm)
    centre, sd = posterior.eta["loc"], posterior.family.stddev(posterior.eta)

    def moved(message: Broadcast) -> FloatArray:
        found = []
        for shadow in shadows:
            shadow.start()
            found.append(shadow.total(message) / clip_of(message, shadow.terms))
        return np.nan_to_num(found[-1] - (0 if by_silo else found[0]))

    own = moved(first)
    ways = torch.randn(_WAYS, len(centre), generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    along = torch.from_numpy(own[: len(centre)].copy()) / sd.to("cpu", torch.float64)
    ways = torch.cat([torch.stack([along, -along]), ways])
    points = [centre + reach * sd * (way / way.norm().clamp(min=1e-12)).to(sd) for reach in _REACHES for way in ways]
    far = [float(np.linalg.norm(moved(_naming(first, point)))) for point in points]
    best, before = int(np.argmax(far)), float(np.linalg.norm(own))
    if far[best] <= before:
        return lambda said: said, (before, before)
    return functools.partial(_naming, point=points[best]), (before, far[best])


def _naming(message: Broadcast, point: Tensor) -> Broadcast:
    """The same question about another point: of z_G, or of where q is."""
    tensors = dict(message.tensors)
    if "z_global" in tensors:
        centre = tensors["z_global"] - tensors["shift"]
        tensors |= {"z_global": point.to(centre), "shift": point.to(centre) - centre}
    elif "q" in tensors:
        n = len(tensors["units"])
        q = unpack(tensors["q"], n, len(tensors["q"]) == packed_size(n, True))
        at = point.to(q.precision)
        tensors["q"] = q._replace(shift=q.precision @ at if q.full else q.precision * at).pack()
    else:
        tensors["eta/loc"] = point.to(tensors["eta/loc"])
    return message._replace(tensors=tensors)


def _first_broadcast(setting: Setting) -> Broadcast:
    server, _, _ = setting.parties(setting.silos)
    found: Broadcast = server.program.broadcast(server.state.algorithm, 1, {})
    return found


# ----
# A lower bound on epsilon from one training run
#
# m canaries are each put in with probability 1/2 by the auditor's own coin. From what the run released the attack
# guesses for some of them, fixed in number beforehand, whether they were in, and a run that is guessed too well is not
# as private as epsilon says.
#
# - `one run` (Steinke, Nasr and Jagielski 2023, Theorem 5.2 and its Algorithm 1): if the run is (epsilon, delta)-
#   private, the number of correct guesses is, up to delta, at most Binomial(r, e^eps / (1 + e^eps)).
# - `one run, gaussian` (Mahloujifar, Melis and Chaudhuri, ICML 2025, "Auditing f-DP in one run"): the trade-off curve
#   bounds the chance of each number of correct guesses by that of one guess more. It is a bound only where the curve is
#   that of mu-Gaussian DP, and then proves about half again as much.

# - `one run, independent` (Xiang, Wang, Xiao, Tian and Wang 2025, "Tight privacy audit in one run"): where canaries are
#   told apart independently of each other, so are right guesses, given the score above which guesses are made; that
#   is an order statistic, and how often a guess above it is right follows from the curve. A run that leaks of all its
#   canaries at once, or of none, is not covered, whatever the curve of each.

OneRunMethod = Literal["one run", "one run, gaussian", "one run, independent"]
#: Values of the order statistic over which its chance of a right guess is averaged.
_CUTS = (np.arange(100) + 0.5) / 100
_LARGEST, _LARGEST_MU = 50.0, 10.0
_STANDARD = NormalDist()


class OneRun(NamedTuple):
    """What one run proves, under `assumption`: with the stated confidence it is not (epsilon, delta)-private below
    `epsilon`."""

    epsilon: float
    guesses: int
    correct: int
    assumption: str = ASSUMPTIONS["clopper-pearson"]
    mu: float | None = None  # of Gaussian DP, where the method has one


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


def beyond_gaussian(mu: float, canaries: int, guesses: int, correct: int, allowed: float) -> float:
    """Over 0 where no run under mu-Gaussian DP lets `correct` or more guesses be right more often than `allowed`.

    Suppose that it does, and let a canary be drawn at random. Then r, the chance that it is guessed right in a run with
    more than i right guesses, and w, that it is guessed wrong in one with at least i, start at i = `correct` from
    shares of `allowed`; by Gaussian DP w is at least Phi(Phi^-1(r) - mu) for r of one guess more, and what w gains r
    gains i / (guesses - i) times. In the end both cannot be more than the share of canaries that are guessed at all;
    by how much they are is what is returned.
    """
    share = guesses / canaries
    right, wrong = (allowed * share * n / guesses for n in (correct, guesses - correct))
    for i in range(correct - 1, -1, -1):
        if right + wrong > share:
            break
        least = _STANDARD.cdf(_STANDARD.inv_cdf(right) - mu)
        if least > wrong:
            right, wrong = right + i / (guesses - i) * (least - wrong), least
    return right + wrong - share


def chance_of_right(mu: float, canaries: int, guesses: int, correct: int) -> float:
    """The probability that `correct` or more guesses are right, those of the highest absolute scores, where each canary
    shifts a normal of its own by mu: E[P(Binomial(guesses, p(W)) >= correct)], W ~ Beta the share of canaries above
    the cut, p(W) how often those are told right."""
    if guesses == canaries:
        return float(binom.sf(correct - 1, guesses, norm.cdf(mu / 2)))
    share = beta.isf(_CUTS, guesses + 1, canaries - guesses)
    low, high = np.zeros(len(share)), np.full(len(share), 60.0)
    for _ in range(40):  # by halves: the cut above which that share of absolute scores is
        cut = (low + high) / 2
        more = norm.sf(cut - mu / 2) + norm.sf(cut + mu / 2) > share
        low, high = np.where(more, cut, low), np.where(more, high, cut)
    right, wrong = norm.sf(low - mu / 2), norm.sf(low + mu / 2)
    return float(binom.sf(correct - 1, guesses, right / (right + wrong)).mean())


@functools.lru_cache
def lower_bound(
    canaries: int,
    guesses: int,
    correct: int,
    delta: float,
    confidence: float = CONFIDENCE,
    method: OneRunMethod = "one run",
) -> OneRun:
    """The largest epsilon that the guesses contradict at `confidence`; 0 where they contradict none.

    Raises InputError for counts that cannot be.
    """
    if not 0 <= correct <= guesses <= canaries or guesses < 1:
        raise InputError(f"{correct} right of {guesses} guesses on {canaries} canaries cannot be")
    if not (0 <= delta < 1 and 0 < confidence < 1):
        raise InputError(f"delta = {delta} and confidence = {confidence} must lie in (0, 1)")
    allowed, counts = 1 - confidence, (canaries, guesses, correct)
    if method == "one run, gaussian":
        mu = _largest(lambda mu: beyond_gaussian(mu, *counts, allowed), _LARGEST_MU)
        return OneRun(epsilon_of_gaussian(mu, delta), guesses, correct, ASSUMPTIONS["gaussian"], mu)
    if method == "one run, independent":
        mu = _largest(lambda mu: allowed - chance_of_right(mu, *counts), _LARGEST_MU)
        assumption = f"{ASSUMPTIONS['gaussian']}, and canaries are told apart independently"
        return OneRun(epsilon_of_gaussian(mu, delta), guesses, correct, assumption, mu)
    return OneRun(_largest(lambda epsilon: allowed - p_value(epsilon, delta, *counts), _LARGEST), guesses, correct)


def _largest(against: Callable[[float], float], most: float) -> float:
    """The largest value from 0 to `most` that the guesses contradict, where `against` is over 0; 0 where none is."""
    if against(0.0) <= 0:
        return 0.0
    return most if against(most) > 0 else float(brentq(against, 0.0, most, xtol=1e-10))


def guess(
    scores: FloatArray,
    inside: npt.NDArray[np.bool_],
    each_side: int,
    delta: float,
    method: OneRunMethod = "one run",
) -> OneRun:
    """Call the `each_side` highest scores in and the lowest out, or as many of the highest absolute scores; `each_side`
    is fixed before scores are seen."""
    right = right_guesses(scores, inside, each_side, method)
    return lower_bound(len(scores), 2 * each_side, right, delta, method=method)


def right_guesses(scores: FloatArray, inside: npt.NDArray[np.bool_], each_side: int, method: OneRunMethod) -> int:
    """How many of the `each_side` highest scores are in, and of the lowest out, or those that lie farthest from 0."""
    if method == "one run, independent":
        farthest = np.argsort(-np.abs(scores), kind="stable")[: 2 * each_side]
        return int(((scores > 0) == inside)[farthest].sum())
    order = np.argsort(scores, kind="stable")
    return int(inside[order[-each_side:]].sum() + (~inside[order[:each_side]]).sum())
