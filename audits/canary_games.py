"""Games with canaries, on whole private runs: many canaries in one run, or one canary in or out of many runs.

The adversary sees every broadcast and every released total, and knows the canary, all records and the coins of their
silos. It does not know the noise, nor in which batches the canary was. As many silos as the claim does not count on
work for it and leave their noise out: under noise = "silo" all but the canary's. It adds up log-likelihood ratios of
Gaussian noise: the most powerful score where the noise is Gaussian.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms.base import Broadcast
from secure_fvi.audits.canaries import (
    RecordCanaries,
    Rig,
    Setting,
    Shadow,
    SiloCanary,
    clip_of,
    colluding,
    inert_coordinates,
    padded,
)
from secure_fvi.audits.one_run import OneRun, guess
from secure_fvi.audits.worlds import Data, pooled
from secure_fvi.errors import InputError

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
