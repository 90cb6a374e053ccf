"""Empirical epsilon of a configuration: what canaries prove, beside what its accountant claims, as rows of an audit.

A row's value is a lower bound on epsilon at the job's delta, its upper end the claim. The finding is "leaks" where the
bound exceeds the claim: then the claim is false, with the row's confidence. The positive control is the same attack
where noise is missing behind the accountant's back, which must be found out; the negative one tosses the coins again.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyro
import torch
from pyro.distributions import Normal
from scipy.optimize import brentq
from scipy.stats import beta, binom, norm
from torch import Tensor

from secure_fvi.aggregation import Masked, Plain
from secure_fvi.aggregation.base import FloatArray, SecureSum
from secure_fvi.algorithms.base import CLIP, ROUND_PHASE, Broadcast, Pending, Problem, ServerProgram, SiloProgram, Step
from secure_fvi.algorithms.sfvi import SFVI, WarmStart
from secure_fvi.audits.base import CONFIDENCE, CONTROL_CONFIDENCE, AuditRow, Control, Estimate, check_confidence, judge
from secure_fvi.audits.worlds import Data, pooled
from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel
from secure_fvi.fitting import build_parties
from secure_fvi.guarding import Books, build_guards
from secure_fvi.privacy.gate import Gate, RecordRelease, Release
from secure_fvi.privacy.noise import NoiseSource
from secure_fvi.privacy.settings import DP
from secure_fvi.privacy.terms import Terms, claim
from secure_fvi.silo import Silo

#: The attack's name on the command line, and its score in audit.json.
NAME, SCORE = "epsilon", "epsilon (lower bound)"
#: Canaries by unit, and guesses on either side by method. Canary silos are parties of their own and cost as much. Who
#: assumes nothing makes few guesses and the surest ones; with a trade-off curve more are of use.
CANARIES = {"record": 10_000, "silo": 100}
GUESSES: dict[OneRunMethod, dict[str, int]] = {
    "one run": {"record": 50, "silo": 25},
    "one run, gaussian": {"record": 500, "silo": 25},
}
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
    rows = _one_run_rows(replace(settings, rounds=max(rounds, ONE_RUN_ROUNDS)), told)
    for kind in _KINDS:
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
                method=method,
                assumption=best.assumption,
                canaries=game.canaries,
                guesses=best.guesses,
                right=best.correct,
                **({} if best.mu is None else {"mu": best.mu}),
            )
        )
    return out


def _several_runs_rows(setting: Setting, kind: Kind, runs: int, told: Told) -> list[AuditRow]:
    game = InOrOut(setting, kind)
    what = f"{'Dirac' if kind == 'dirac' else 'real'} {setting.privacy.unit} in or out"
    found = game.scores(range(runs), each=lambda: told(what))
    control = game.scores(range(runs), 0.0, lambda: told(f"{what}, {_words(0.0)}"))
    delta, out = setting.privacy.delta, []
    for method, name in _METHODS.items():
        if method == "gaussian" and setting.sampled:
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


# ---- Canaries in runs of ours ----
#
# They are put in front of the real gate, which clips, noises and charges them like anything else. A Dirac canary hands
# the gate a vector along one coordinate, far longer than the clipping norm: the worst that a record or a silo may do.
# Where many of them need coordinates of their own, the model gets latent variables that no data touch (`padded`). An
# absent canary hands over nothing; an absent silo, whose place in the cohort everyone knows, zeros.

#: Clipping norms that a Dirac canary asks for; it gets one.
PUSH = 1e3
_INERT = "audit_inert"
_CHUNK = 512
#: Silos' own coins follow from it, so that an adversary who knows all but the canary can be played.
_COINS = b"audit/coins"

#: What the adversary sees of a round: the broadcast and the released total (shared + side,), in natural units.
Watch = Callable[[Broadcast, FloatArray], None]


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

    model: FederatedModel
    algorithm: SFVI
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
        """How often a record is in a round's batch, where records are what is protected."""
        return self.algorithm.sampling_rate if self.privacy.unit == "record" else 1.0

    @property
    def aggregation(self) -> SecureSum:
        """Whose totals the adversary sees; but with distributed noise, any sum has the same ones."""
        return Masked(consistency_check=False) if self.privacy.noise == "distributed" else Plain()

    def parties(self, silos: Sequence[Data], sampling_rate: float | None = None) -> Any:
        """As `build_parties`, for the shortened run, in which every silo takes part in every round."""
        algorithm = replace(self.algorithm, iterations=self.rounds, participation=1.0, warm_start=WarmStart())
        if sampling_rate is not None:
            algorithm = replace(algorithm, sampling_rate=sampling_rate)
        with warnings.catch_warnings():  # that a site does not reach the likelihood is what it is for
            warnings.filterwarnings("ignore", f"site '{_INERT}' does not reach")
            return build_parties(
                self.model, silos, algorithm, self.aggregation, compile=False, privacy=replace(self.privacy, retries=0),
                noise_key=_COINS,
            )  # fmt: skip


def padded(setting: Setting, count: int) -> Setting:
    """The same with `count` more global latents, of which no data depend."""
    model = setting.model

    def program(**data: Any) -> None:
        pyro.sample(_INERT, Normal(torch.zeros(count), 1.0).to_event(1))
        model.fn(**data)

    # The family of q(Z_G) is the server's own affair: silos send the same gradients whatever it is.
    algorithm = replace(setting.algorithm, family="diagonal")
    return replace(setting, model=FederatedModel(program, model.record_plate, model.silo_sites), algorithm=algorithm)


def colluding(setting: Setting, target: int) -> tuple[str, ...]:
    """Silos that leave their noise out, of those the claim does not count on: `target` is honest."""
    others = [f"silo-{j + 1}" for j in range(len(setting.silos)) if j != target]
    most = {"server": 0, "silo": len(others), "distributed": setting.privacy.colluders}[setting.privacy.noise]
    return tuple(others[max(len(others) - most, 0) :])


class Rig:
    """Parties that are built once and start afresh for each run, with noise of its own."""

    def __init__(self, setting: Setting, silos: Sequence[Data], shadow: Shadow, colluders: Sequence[str] = ()) -> None:
        """`colluders` leave out their noise. `shadow`: of the same setting; its traces serve here, too."""
        self._colluders = frozenset(colluders)
        self.server, self.engine, _ = setting.parties(silos)
        self._simulated, self._program = setting.simulated, self.server.program
        self.terms: Terms = self._program.terms[ROUND_PHASE]
        self._silo_program = shadow.program

    def run(
        self,
        key: str,
        watch: Watch,
        *,
        noise: float = 1.0,
        gates: Mapping[str, Callable[[Gate], Any]] | None = None,
        programs: Mapping[str, Callable[[SiloProgram], Any]] | None = None,
    ) -> None:
        """A whole run. `noise`: a factor on the noise behind the claim's back, for controls. `gates` and `programs`
        stand in front of the real ones of the silos that they name; what passes them meets the real gate."""
        server, silos = self.server, self.engine.silos
        source = NoiseSource(key.encode() if self._simulated else None)
        terms, silent = (
            {ROUND_PHASE: replace(self.terms, noise_multiplier=factor * self.terms.noise_multiplier)}
            for factor in (noise, 0.0)
        )
        honest, quiet = (
            build_guards(list(silos), self._program.tables, t, "audit", Books(), source).gates for t in (terms, silent)
        )
        server.program, server._noise = _Watched(self._program, terms, watch), source
        clip = self.terms.settings.clipping_norm
        server.state = server.state._replace(algorithm=self._program.init(), accepted={}, records=None, clip=clip)
        for name, silo in silos.items():
            gate = (quiet if name in self._colluders else honest)[name]
            start(silo, (gates or {}).get(name, lambda gate: gate)(gate), self._silo_program)
            silo.program = (programs or {}).get(name, lambda program: program)(self._silo_program)
        while not self.engine.run(server.round()).finished:
            pass

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


def start(silo: Silo, gate: Gate, program: SiloProgram) -> None:
    """Put the silo where it was before the first round."""
    silo.program, silo.gate = program, gate
    silo.begin()


def clip_of(message: Broadcast, terms: Terms) -> float:
    return message.scalars.get(CLIP, terms.settings.clipping_norm)


class _Watched:
    """A server's program that shows the adversary what it is given; `terms` may differ from those that were agreed."""

    def __init__(self, inner: ServerProgram, terms: Mapping[str, Terms], watch: Watch) -> None:
        self._inner, self.terms, self._watch = inner, terms, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def update(self, state: Any, message: Broadcast, total: FloatArray, scale: float) -> tuple[Any, Step]:
        self._watch(message, total)
        return self._inner.update(state, message, total, scale)


class RecordCanaries:
    """A gate whose silo has Dirac canaries among its records, each in a round's batch with probability `rate`."""

    def __init__(self, gate: Gate, coordinates: npt.NDArray[np.int64], rate: float, rng: np.random.Generator) -> None:
        self._gate, self._coordinates, self._rate, self._rng = gate, coordinates, rate, rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gate, name)

    def release_records(
        self, chunks: Iterable[tuple[Tensor, Tensor]], data_free: Tensor | None, public: Sequence[float]
    ) -> RecordRelease:
        joined = self._coordinates[self._rng.random(len(self._coordinates)) < self._rate]

        def everybody() -> Iterator[tuple[Tensor, Tensor]]:
            yield from chunks
            for at in range(0, len(joined), _CHUNK):
                yield self._rows(joined[at : at + _CHUNK])

        return self._gate.release_records(everybody(), data_free, public)

    def _rows(self, coordinates: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        terms = self._gate.terms
        assert terms is not None
        rows = torch.zeros(len(coordinates), terms.extent.shared + terms.extent.hidden, dtype=torch.float64)
        rows[torch.arange(len(rows)), torch.from_numpy(coordinates)] = PUSH * terms.settings.clipping_norm
        return rows, torch.zeros(len(rows), dtype=torch.float64)


class SiloCanary:
    """The program of a silo that hands over a Dirac vector instead of what it was to compute, or zeros."""

    def __init__(self, inner: SiloProgram, coordinate: int | None) -> None:
        self._inner, self._coordinate = inner, coordinate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def contribute(self, message: Broadcast, local: Any, view: Any, gate: Gate) -> tuple[Release, Any]:
        assert gate.terms is not None
        values = np.zeros(gate.terms.extent.shared)
        if self._coordinate is not None:
            values[self._coordinate] = PUSH * clip_of(message, gate.terms)
        return gate.release(values), local


class Shadow:
    """What silos would release without noise: what an adversary works out who knows their records and their coins."""

    def __init__(self, setting: Setting, silos: Sequence[Data], *, only: Sequence[int], always: bool = False) -> None:
        """`only`: which of the silos. always: every record is in every batch."""
        _, engine, _ = setting.parties(silos, 1.0 if always else None)
        self._silos = [engine.silos[f"silo-{j + 1}"] for j in only]
        self.program = self._silos[0].program  # one for all silos; it holds no data
        self.terms = replace(self.program.terms[ROUND_PHASE], noise_multiplier=0.0)
        terms = {ROUND_PHASE: self.terms}
        self._gates = [Gate(s.name, s.program.tables, terms, _free) for s in self._silos]

    def start(self) -> None:
        for silo, gate in zip(self._silos, self._gates, strict=True):
            start(silo, gate, self.program)

    def total(self, message: Broadcast) -> FloatArray:
        """(shared,) the clipped sum that answers the broadcast, in natural units."""
        out = np.zeros(self.terms.extent.shared)
        for silo in self._silos:
            silo.settle(message.accepted)
            turn = silo.past.turn + 1  # the real silo answers every question, as this one does
            silo.gate.begin(message.sum_index, message.phase, self.terms.cohort, message.scalars.get(CLIP), turn)
            view = silo.view._replace(turn=turn)
            release, local = silo.program.contribute(message, silo.local, view, silo.gate)
            silo.pending, silo.past = Pending(message.sum_index, local), silo.past._replace(turn=turn)
            out += release.values[: len(out)] * self.terms.step(clip_of(message, self.terms))
        return out

    def record_norms(self, message: Broadcast) -> FloatArray:
        """Norms of the records' gradients before clipping, by silo and place."""
        self.start()
        gates = [_Measured(gate) for gate in self._gates]
        for silo, gate in zip(self._silos, gates, strict=True):
            silo.gate = gate
        self.total(message)
        return np.concatenate([gate.norms[: silo.size] for gate, silo in zip(gates, self._silos, strict=True)])


class _Measured:
    """A gate that notes the norms of the records' gradients."""

    norms: FloatArray

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gate, name)

    def release_records(
        self, chunks: Iterable[tuple[Tensor, Tensor]], data_free: Tensor | None, public: Sequence[float]
    ) -> RecordRelease:
        kept = list(chunks)
        self.norms = torch.cat([rows.norm(dim=1) for rows, _ in kept]).numpy()
        return self._gate.release_records(kept, data_free, public)


def _free(phase: str, index: int) -> None:
    """Charges nothing: nothing leaves."""


# ----
# Games with canaries, on whole private runs: many canaries in one run, or one canary in or out of many runs
#
# The adversary sees every broadcast and every released total, and knows the canary, all records and the coins of their
# silos. It does not know the noise, nor in which batches the canary was. As many silos as the claim does not count on
# work for it and leave their noise out: under noise = "silo" all but the canary's. It adds up log-likelihood ratios of
# Gaussian noise: the most powerful score where the noise is Gaussian.

Kind = Literal["dirac", "real"]


class Scores(NamedTuple):
    """Of runs without and with the canary, large where it seems to be in."""

    outside: FloatArray  # (T0,)
    inside: FloatArray  # (T1,)

    def shuffled(self) -> Scores:
        """The same runs in two halves made at random: nothing can be found. For negative controls."""
        mixed = np.random.default_rng(7).permutation(np.concatenate(self))
        return Scores(mixed[: len(self.outside)], mixed[len(self.outside) :])


class Played(NamedTuple):
    """Of one run, by canary."""

    scores: FloatArray  # (m,) large where it seems to be in
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
        wider = padded(setting, canaries)
        colluders = colluding(setting, 0)
        # Canary records sit in the silos that make noise.
        self._homes = [j for j in range(self._real) if f"silo-{j + 1}" not in colluders]
        self._rest = Shadow(wider, silos, only=range(self._real))
        self._rig = Rig(wider, silos, self._rest, colluders)

    @property
    def claim(self) -> dict[str, Any]:
        """What such a run claims, by its accountant."""
        return self._rig.claim

    def play(self, seed: int, noise: float = 1.0) -> Played:
        """One run. `noise`: a factor on it behind the claim's back, for controls."""
        rng = np.random.default_rng([seed, 5])
        inside = rng.random(self.canaries) < 0.5
        coordinates = inert_coordinates(self._rig.server.problem)
        scores = np.zeros(self.canaries)

        def watch(message: Broadcast, total: FloatArray) -> None:
            scores[:] += (total[: self._rig.terms.extent.shared] - self._rest.total(message))[coordinates]

        self._rest.start()
        names = [f"silo-{j + 1}" for j in range(self._real + self.canaries)]
        if self.setting.privacy.unit == "silo":
            programs = {
                names[self._real + k]: _as_canary(int(coordinates[k]) if inside[k] else None)
                for k in range(self.canaries)
            }
            self._rig.run(f"one run {seed}", watch, noise=noise, programs=programs)
        else:
            rate = self.setting.rate
            owner = np.resize(self._homes, self.canaries)
            gates = {names[j]: _with_canaries(coordinates[inside & (owner == j)], rate, rng) for j in self._homes}
            self._rig.run(f"one run {seed}", watch, noise=noise, gates=gates)
        return Played(scores, inside)


class InOrOut:
    """One canary that is in every other run.

    kind "dirac": a vector along the first coordinate, as one more record of the first silo or one more silo. kind
    "real": a record in or out of its silo's data, by default the one whose gradient is longest at the start; or a
    silo's own contribution in or out of the sum.
    """

    def __init__(self, setting: Setting, kind: Kind, silo: int = 0, record: int | None = None) -> None:
        self.setting, self.kind, self._by_silo = setting, kind, setting.privacy.unit == "silo"
        self._rate = setting.rate
        outside = inside = list(setting.silos)
        everyone = range(len(outside))
        others: Sequence[int] = everyone
        if self._by_silo and kind == "dirac":
            silo = len(outside)
            outside = inside = [*outside, first_record(outside[0])]
        elif self._by_silo:
            others = [j for j in everyone if j != silo]
            self._own = Shadow(setting, outside, only=[silo])
        elif kind == "real":
            if record is None:
                silo, record = _longest(setting)
            with_it, without = _moved_last(outside[silo], record)
            inside, outside = ([w if j == silo else d for j, d in enumerate(setting.silos)] for w in (with_it, without))
            # What the canary does, wherever it is: alone in its silo, in every batch.
            alone = {name: values[-1:] for name, values in with_it.items()}
            self._own = Shadow(_any_noise(setting), [alone] * len(outside), only=[silo], always=True)
        self._rest = Shadow(setting, outside, only=others)
        colluders = colluding(setting, silo)
        without_it = Rig(setting, outside, self._rest, colluders)
        self._worlds = (without_it, without_it if inside is outside else Rig(setting, inside, self._rest, colluders))
        self._silo = f"silo-{silo + 1}"

    @property
    def claim(self) -> dict[str, Any]:
        """What such a run claims, by its accountant."""
        return self._worlds[0].claim

    def scores(self, seeds: range, noise: float = 1.0, each: Callable[[], None] = lambda: None) -> Scores:
        """One run a seed, with the canary where it is odd."""
        found: tuple[list[float], list[float]] = ([], [])
        for seed in seeds:
            found[seed % 2].append(self._score(seed, bool(seed % 2), noise))
            each()
        return Scores(np.array(found[0]), np.array(found[1]))

    def _score(self, seed: int, inside: bool, noise: float) -> float:
        rig, score = self._worlds[inside], 0.0
        if self.kind == "real":
            self._own.start()
        self._rest.start()

        def watch(message: Broadcast, total: FloatArray) -> None:
            nonlocal score
            clip, shared = clip_of(message, rig.terms), rig.terms.extent.shared
            if self.kind == "real":
                own = self._own.total(message)
            else:
                own = np.zeros(shared)
                own[0] = rig.terms.norms(clip)[0]
            left = total[:shared] - self._rest.total(message)
            score += evidence(float(left @ own), float(own @ own), rig.noise_sd * clip, self._rate)

        gates, programs = {}, {}
        if self._by_silo and (self.kind == "dirac" or not inside):
            programs = {self._silo: _as_canary(0 if inside else None)}
        elif self.kind == "dirac" and inside:
            coins = np.random.default_rng([seed, 6])
            gates = {self._silo: _with_canaries(np.zeros(1, dtype=np.int64), self._rate, coins)}
        rig.run(f"{self.kind} {seed} {noise}", watch, noise=noise, gates=gates, programs=programs)
        return score


def evidence(inner: float, square: float, sd: float, rate: float) -> float:
    """The log-likelihood ratio of one total for a canary of squared norm `square` that is in it with probability
    `rate`; `inner` is its product with what is left of the total."""
    ratio = (inner - square / 2) / sd**2
    return ratio if rate == 1 else float(np.logaddexp(math.log1p(-rate), math.log(rate) + ratio))


def first_record(silo: Data) -> Data:
    """A silo of two records, the first one twice."""
    return {name: values[:1].expand(2, *values.shape[1:]).clone() for name, values in silo.items()}


def _as_canary(coordinate: int | None) -> Callable[[Any], Any]:
    return lambda program: SiloCanary(program, coordinate)


def _with_canaries(coordinates: Any, rate: float, rng: np.random.Generator) -> Callable[[Any], Any]:
    return lambda gate: RecordCanaries(gate, coordinates, rate, rng)


def _any_noise(setting: Setting) -> Setting:
    """For a shadow that differs from the run in its sampling: it adds no noise, so that none need be planned."""
    return replace(setting, privacy=replace(setting.privacy, epsilon=None, noise_multiplier=1.0))


def _moved_last(data: Data, record: int) -> tuple[Data, Data]:
    """The silo with the record at its end, and without it: the others keep their places, and with them their coins."""
    size = len(next(iter(data.values())))
    if not 0 <= record < size or size < 2:
        raise InputError(f"record {record} cannot leave a silo of {size}; choose 0 to {size - 1} of at least 2")
    others = [i for i in range(size) if i != record]
    return {n: v[[*others, record]] for n, v in data.items()}, {n: v[others] for n, v in data.items()}


def _longest(setting: Setting) -> tuple[int, int]:
    """Silo and place of the record with the longest gradient at the first broadcast."""
    pooled(setting.silos)  # refuses arguments that have no row a record
    shadow = Shadow(_any_noise(setting), setting.silos, only=range(len(setting.silos)), always=True)
    norms = shadow.record_norms(_first_broadcast(setting))
    at, sizes = int(norms.argmax()), [len(next(iter(s.values()))) for s in setting.silos]
    for silo, size in enumerate(sizes):
        if at < size:
            return silo, at
        at -= size
    raise AssertionError("unreachable")


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

OneRunMethod = Literal["one run", "one run, gaussian"]
_LARGEST, _LARGEST_MU = 50.0, 10.0
_STANDARD = NormalDist()


class OneRun(NamedTuple):
    """What one run proves, under `assumption`: with the stated confidence it is not (epsilon, delta)-private below
    `epsilon`."""

    epsilon: float
    delta: float
    confidence: float
    canaries: int
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
        epsilon = epsilon_of_gaussian(mu, delta)
        return OneRun(epsilon, delta, confidence, *counts, ASSUMPTIONS["gaussian"], mu)
    epsilon = _largest(lambda epsilon: allowed - p_value(epsilon, delta, *counts), _LARGEST)
    return OneRun(epsilon, delta, confidence, *counts)


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
    """Call the `each_side` highest scores in and the lowest out; `each_side` is fixed before scores are seen."""
    order = np.argsort(scores, kind="stable")
    correct = int(inside[order[-each_side:]].sum() + (~inside[order[:each_side]]).sum())
    return lower_bound(len(scores), 2 * each_side, correct, delta, method=method)
