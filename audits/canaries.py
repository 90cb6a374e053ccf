"""Canaries in runs of ours: put in front of the real gate, which clips, noises and charges them like anything else.

A Dirac canary hands the gate a vector along one coordinate, far longer than the clipping norm: the worst that a record
or a silo may do. Where many of them need coordinates of their own, the model gets latent variables that no data touch
(`padded`). An absent canary hands over nothing; an absent silo, whose place in the cohort everyone knows, zeros.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyro
import torch
from pyro.distributions import Normal
from scipy.optimize import brentq
from scipy.stats import binom
from torch import Tensor

from secure_fvi.aggregation import Masked, Plain
from secure_fvi.aggregation.base import FloatArray, SecureSum
from secure_fvi.algorithms.base import CLIP, ROUND_PHASE, Broadcast, Pending, Problem, ServerProgram, SiloProgram, Step
from secure_fvi.algorithms.sfvi import SFVI, WarmStart
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

    def play(self, seed: int, each_side: int, noise: float = 1.0) -> tuple[OneRun, OneRun]:
        """The bound of one run in which the `each_side` highest scores are called in and the lowest out; and what the
        same scores prove of coins that were tossed again, which is nothing."""
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
            rate = self.setting.algorithm.sampling_rate
            owner = np.resize(self._homes, self.canaries)
            gates = {names[j]: _with_canaries(coordinates[inside & (owner == j)], rate, rng) for j in self._homes}
            self._rig.run(f"one run {seed}", watch, noise=noise, gates=gates)
        coins = (inside, rng.random(self.canaries) < 0.5)
        found, nothing = (guess(scores, coin, each_side, self.setting.privacy.delta) for coin in coins)
        return found, nothing


class InOrOut:
    """One canary that is in every other run.

    kind "dirac": a vector along the first coordinate, as one more record of the first silo or one more silo. kind
    "real": a record in or out of its silo's data, by default the one whose gradient is longest at the start; or a
    silo's own contribution in or out of the sum.
    """

    def __init__(self, setting: Setting, kind: Kind, silo: int = 0, record: int | None = None) -> None:
        self.setting, self.kind, self._by_silo = setting, kind, setting.privacy.unit == "silo"
        self._rate = 1.0 if self._by_silo else setting.algorithm.sampling_rate
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
# A lower bound on epsilon from one training run (Steinke, Nasr and Jagielski 2023, Theorem 5.2 and its Algorithm 1)
#
# m canaries are each put in with probability 1/2 by the auditor's own coin. From what the run released the attack
# guesses for some of them, fixed in number beforehand, whether they were in. If the run is (epsilon, delta)-private,
# the number of correct guesses is, up to delta, at most Binomial(r, e^eps / (1 + e^eps)); a run that is guessed better
# than that is not as private as epsilon says.

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
