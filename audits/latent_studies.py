"""Attacks on local latents, by protection: regressions on worlds, the same by size of a silo, and the game.

Worlds are run once and serve all attacks that look at them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.aggregation.homomorphic import Homomorphic
from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.audits.base import (
    CONFIDENCE,
    CONTROL_CONFIDENCE,
    AuditRow,
    Control,
    Estimate,
    Groups,
    Knowledge,
    Scored,
    judge,
)
from secure_fvi.audits.features import Seen, from_both, from_messages, from_totals, messages_of, totals_of
from secure_fvi.audits.scores import (
    advantage,
    auc,
    cross_fitted,
    gain,
    nearer,
    power_of_advantage,
    r_squared,
    ridge,
    told_at,
)
from secure_fvi.audits.worlds import (
    MASKED,
    OWN,
    PLAIN,
    Data,
    Each,
    Laboratory,
    Outcome,
    Protection,
    Workbench,
    per_record,
    resampled,
    silent,
)
from secure_fvi.errors import InputError
from secure_fvi.privacy.accountants import of_group

_LOOKS: dict[str, Knowledge] = {"messages and totals": from_both, "totals alone": from_totals}
Told = Callable[[str], None]

#: Individuals a silo, silos a world, worlds: for the attack "sizes".
SIZES = ((1, 50, 2), (10, 50, 2), (100, 5, 20), (537, 3, 30))


def runs_with_many(protection: Protection) -> bool:
    """Whether worlds of very many silos are run under it: ciphertexts of all of them take minutes."""
    return protection.privacy is None and not isinstance(protection.aggregation, Homomorphic)


def _renamed(found: list[AuditRow], start: str) -> list[AuditRow]:
    return [replace(row, attack=row.attack.replace("latents by", f"{start},")) for row in found]


class LatentStudies:
    """Of one configuration. `told` hears what is being done, once a world."""

    def __init__(self, bench: Workbench, individuals: int, trials: int, told: Told) -> None:
        """`individuals`: silos of one record in each of two worlds. `trials`: runs of the game."""
        self.bench, self.told = bench, told
        self.individuals, self.trials = individuals, trials
        self._samples: dict[tuple[str, str, int, bool], Sample] = {}
        self._plays: dict[str, Plays] = {}

    def latents(self, protection: Protection) -> list[AuditRow]:
        """The means of silos' latents at the configuration's own sizes, from the rounds that worlds show and from those
        at a run's other end."""
        other = "first rounds" if isinstance(self.bench.full, SFVI) else "late rounds"
        out = []
        for end in (False, True):
            found, control = (self._at_own_sizes(p, end) for p in (protection, PLAIN))
            told = rows(protection.name, found, control, worlds=self.bench.worlds, rounds=self.bench.rounds)
            out += _renamed(told, f"latents, {other}") if end else told
        return out

    def one_by_one(self, protection: Protection) -> list[AuditRow]:
        """Silos of one individual."""
        sizes = [1] * self.individuals
        own = self._sample(PLAIN, sizes, OWN)
        found, control = (by_silo(self._sample(p, sizes, 0).hinted(own)) for p in (protection, PLAIN))
        return _renamed(rows(protection.name, found, control, rounds=self.bench.rounds), "individuals")

    def _at_own_sizes(self, protection: Protection, other_end: bool) -> Sample:
        found, own = (
            self._sample(p, self.bench.sizes, at, other_end=other_end) for p, at in ((protection, 0), (PLAIN, OWN))
        )
        return found.hinted(own)

    def by_size(self) -> list[AuditRow]:
        """Records and silos' means by the size of a silo, under plain sums; silos of a few are groups by themselves."""
        out = []
        for records, silos, worlds in SIZES:
            sizes = [records] * silos
            own, found = (self._sample(PLAIN, sizes, first, worlds) for first in (OWN, 0))
            found = found.hinted(own)
            found = by_silo(found) if worlds < 10 else found
            out += rows(f"plain, {records} a silo", found, found, rounds=self.bench.rounds)
        wanted = ("silo mean, messages and totals", "single records, messages and totals")
        return _renamed([row for row in out if row.attack.endswith(wanted)], "by size of a silo")

    def _sample(
        self, protection: Protection, sizes: list[int], first: int, worlds: int | None = None, other_end: bool = False
    ) -> Sample:
        key = (protection.name, str(sizes), first, other_end)
        if key not in self._samples:
            count = worlds or (2 if max(sizes) == 1 else self.bench.worlds)
            laboratory = self.bench.laboratory(protection, count * len(sizes), other_end=other_end)
            what = f"{protection.name}: worlds of {len(sizes)} silos"
            self._samples[key] = collect(
                laboratory,
                lambda seed: resampled(self.bench.pool, sizes, seed),
                range(first, first + count),
                each=lambda: self.told(what),
            )
        return self._samples[key]

    def game(self, protection: Protection) -> list[AuditRow]:
        """One record's two candidates."""
        detail: dict[str, Any] = {"rounds": self.bench.rounds, "silo_records": self.bench.sizes[0]}
        privacy, allowed = protection.privacy, None
        if privacy is not None and privacy.epsilon is not None:
            detail["bound"] = bound(privacy.epsilon, privacy.delta)
            allowed = of_group(privacy.epsilon, privacy.delta, 2)
        return game_rows(protection.name, self._played(protection), self._played(PLAIN), allowed, **detail)

    def _played(self, protection: Protection) -> Plays:
        if protection.name not in self._plays:
            laboratory = self.bench.laboratory(protection, self.trials * len(self.bench.sizes))
            what = f"{protection.name}: the game"
            self._plays[protection.name] = play(
                laboratory, self._game, range(self.trials), _LOOKS, each=lambda: self.told(what)
            )
        return self._plays[protection.name]

    @property
    def _game(self) -> Game:
        """The first record of the first silo is one of the two whose latents lie farthest apart in one plain run."""
        if not hasattr(self, "_chosen"):
            outcome = self.bench.laboratory(PLAIN, 1).run(self.bench.silos, 0)
            names = [f"silo-{j + 1}" for j in range(len(self.bench.silos))]
            means = torch.cat([torch.from_numpy(outcome.latents[name].mean) for name in names])
            if not means.shape[1]:
                raise InputError("the model has no latent site inside its record plate, so there is no game to play")
            ends = (int(means[:, 0].argmin()), int(means[:, 0].argmax()))
            candidates = tuple({name: v[at : at + 1] for name, v in self.bench.pool.items()} for at in ends)
            self._chosen = Game(tuple(self.bench.silos), 0, 0, (candidates[0], candidates[1]))
        return self._chosen


# ---- A game on one record: which of two values did this individual take? ----
#
# The adversary knows everything but one record and the silos' secrets: the model, every other record, and that the
# one in question is either the first candidate or the second. A fair coin decides; the run is made with fresh
# secrets; the adversary looks at what the server saw and guesses. It has learnt to guess on runs that it made itself.
# Under (epsilon, delta)-differential privacy for adding or removing a record no adversary can win by more than
# `bound`.


@dataclass(frozen=True)
class Game:
    """The silos, which record is in question, and its two candidates (one row each)."""

    silos: tuple[Data, ...]
    silo: int
    record: int
    candidates: tuple[Data, Data]

    def world(self, which: int) -> list[Data]:
        """The silos with candidate `which` in place."""
        changed = {name: values.clone() for name, values in self.silos[self.silo].items()}
        for name, value in self.candidates[which].items():
            changed[name][self.record] = value[0]
        return [changed if j == self.silo else dict(data) for j, data in enumerate(self.silos)]


@dataclass(frozen=True)
class Plays:
    """Runs of a game: by what the adversary may look at, its features, and how the coins fell."""

    features: dict[str, FloatArray]  # (T, D) each
    coins: FloatArray  # (T,) of 0 and 1
    played: int  # the first so many are the adversary's own, the rest are guessed at

    def shuffled(self) -> Plays:
        """The same runs with coins that were tossed again: nothing can be guessed. For negative controls."""
        again = np.random.default_rng(4).integers(0, 2, len(self.coins)).astype(np.float64)
        return Plays(self.features, again, self.played)


def play(
    laboratory: Laboratory,
    game: Game,
    seeds: Iterable[int],
    looks: dict[str, Knowledge],
    own: float = 0.5,
    each: Callable[[], None] = lambda: None,
) -> Plays:
    """One run a seed; the share `own` of them the adversary may learn from. The coins follow the seeds."""
    coins: list[float] = []
    seen: dict[str, list[FloatArray]] = {name: [] for name in looks}
    for seed in seeds:
        coin = int(np.random.default_rng([seed, 1]).integers(2))
        transcript = laboratory.run(game.world(coin), seed).transcript
        place = transcript.silos.index(f"silo-{game.silo + 1}")
        for name, look in looks.items():
            seen[name].append(look(transcript)[place])
        coins.append(float(coin))
        each()
    if len(coins) < 20:
        raise InputError(f"{len(coins)} runs of a game say little; play at least 20")
    return Plays({name: np.stack(rows) for name, rows in seen.items()}, np.array(coins), round(own * len(coins)))


@dataclass(frozen=True)
class Guessed:
    """How an attack did on the runs it had not learnt from."""

    truth: FloatArray
    scores: FloatArray
    right: int

    @property
    def trials(self) -> int:
        return len(self.truth)

    def advantage(self, confidence: float = CONFIDENCE) -> Estimate:
        return advantage(self.right, self.trials, confidence)


def guess(plays: Plays, look: str) -> Guessed:
    """Scores above 1/2 are guesses for the second candidate."""
    x, k = plays.features[look], plays.played
    scores = ridge(x[:k], plays.coins[:k], x[k:])
    truth = plays.coins[k:]
    return Guessed(truth, scores, int(((scores > 0.5) == (truth > 0.5)).sum()))


def bound(epsilon: float, delta: float) -> float:
    """The largest advantage in this game under (epsilon, delta) for adding or removing a record.

    The game replaces one, which is a removal and an addition: (2 epsilon, (1 + e^epsilon) delta), and under (e, d) no
    test has an advantage above (e^e - 1 + 2 d) / (e^e + 1) (Kairouz et al. 2015).
    """
    if epsilon > 300:
        return 1.0
    twice, failing = of_group(epsilon, delta, 2)
    return min(1.0, (math.expm1(twice) + 2 * failing) / (math.exp(twice) + 1))


def game_rows(
    protection: str, plays: Plays, unprotected: Plays, allowed: tuple[float, float] | None = None, **detail: Any
) -> list[AuditRow]:
    """Advantage for each way to look at the runs, with AUC and true-positive rates in the detail.

    allowed: the (epsilon, delta) of a replaced record. `unprotected`: the same game under plain sums, whose `messages`
    are the positive control of every way to look.
    """
    strongest = guess(unprotected, "messages and totals")
    caught = strongest.advantage()
    power = power_of_advantage(caught, strongest.trials)
    nothing = guess(unprotected.shuffled(), "messages and totals").advantage(CONTROL_CONFIDENCE)
    out = []
    for look in plays.features:
        found = guess(plays, look)
        area = auc(found.truth, found.scores, found.truth)
        more = {"trials": found.trials, "auc": list(area), **told_at(found.truth, found.scores, allowed), **detail}
        out.append(
            judge(
                f"which of two values, by ridge: {look}",
                protection,
                "advantage",
                found.advantage(),
                Control(caught, "the same game under plain sums, from messages and totals", power),
                Control(nothing, "plain sums, with the coins tossed again"),
                scored=Scored(found.truth, found.scores),
                **more,
            )
        )
    return out


# ---- How well a silo's messages give away the posterior means of its latent variables ----
#
# The adversary knows the latents of other worlds' silos (it has made such worlds itself) and learns from them what a
# silo's messages and the totals say about the mean of its latents. Under masks the totals stay in sight, so what
# masking promises is not that nothing is learnt: it is that messages with totals say no more than totals alone.


@dataclass(frozen=True)
class Sample:
    """Silos of many worlds: what the server saw of each, and its latents, or another property of it."""

    messages: FloatArray  # (S, D)
    totals: FloatArray  # (S, D')
    target: FloatArray  # (S, n_record) mean of Z_L over the silo's records, or (S, 1)
    records: tuple[FloatArray, ...]  # means record by record: (N_j, n_record); none for other properties
    world: Groups  # (S,)
    raw: tuple[int, int]  # the first so many columns of messages, and of totals, add up over silos
    spread: FloatArray | None = None  # (S, n_record, n_record) covariance of the posterior whose mean `target` is

    @property
    def both(self) -> FloatArray:
        return np.concatenate([self.messages, self.totals], 1)

    def hinted(self, own: Sample) -> Sample:
        """With a column for each latent beside the totals: what a ridge regression trained on the contributions
        of the adversary's `own` worlds makes of the average contribution of these, which the totals give it.

        `own` must share no world with this sample. Where its contributions have other blocks, nothing is added.
        """
        silos = np.array([np.sum(self.world == w) for w in self.world])[:, None]
        if len(silos) == 0 or own.raw[0] != self.raw[1]:
            return self
        known, average = own.messages[:, : own.raw[0]], self.totals[:, : self.raw[1]] / silos
        hints = [ridge(known, answers, average) for answers in own.target.T]
        return replace(self, totals=np.column_stack([self.totals, *hints]))

    def shuffled(self) -> Sample:
        """The same messages with the latents of other worlds: nothing can be learnt. For negative controls."""
        order = _cyclic(self.world)
        records = tuple(self.records[i] for i in order if self.records)
        spread = None if self.spread is None else self.spread[order]
        return replace(self, target=self.target[order], records=records, spread=spread)


def collect(
    laboratory: Laboratory,
    draw: Callable[[int], list[Data]],
    seeds: Iterable[int],
    each: Callable[[], None] = lambda: None,
) -> Sample:
    """Run a world for each seed on the silos that `draw` makes of it. `each` is told when one is done."""
    messages: list[Seen] = []
    totals: list[Seen] = []
    target, records, spread, world = [], [], [], []
    for seed in seeds:
        outcome: Outcome = laboratory.run(draw(seed), seed)
        transcript = outcome.transcript
        values = [outcome.latents[silo] for silo in transcript.silos]
        if not values[0].mean.shape[1]:
            raise InputError("the model has no latent site inside its record plate, so there is nothing to recover")
        messages.append(messages_of(transcript, outcome.layout))
        totals.append(totals_of(transcript, outcome.layout))
        records += [v.mean for v in values]
        target += [v.mean.mean(0) for v in values]
        spread += [v.covariance.mean(0) / len(v.mean) for v in values]
        world += [seed] * len(values)
        each()
    return Sample(
        np.concatenate([m.values for m in messages]),
        np.concatenate([t.values for t in totals]),
        np.stack(target),
        tuple(records),
        np.array(world),
        (messages[0].raw, totals[0].raw),
        np.stack(spread),
    )


def by_silo(sample: Sample) -> Sample:
    """Each silo a group of its own: for worlds of so many silos that the totals hardly tie one to another."""
    return replace(sample, world=np.arange(len(sample.target)))


class Guesses:
    """The regression's for every silo of a sample, from messages and totals and from totals alone."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.both, self.totals = (
            np.stack([cross_fitted(ridge, seen, answers, sample.world) for answers in sample.target.T], 1)
            for seen in (sample.both, sample.totals)
        )

    def from_both(self, confidence: float = CONFIDENCE) -> Estimate:
        """R^2 of the silo's mean from messages and totals."""
        return r_squared(self.sample.target, self.both, self.sample.world, confidence)

    def from_totals(self, confidence: float = CONFIDENCE) -> Estimate:
        """R^2 of the silo's mean from totals alone."""
        return r_squared(self.sample.target, self.totals, self.sample.world, confidence)

    def of_records(self, confidence: float = CONFIDENCE) -> Estimate:
        """R^2 of single records' values, for each of which the guess is that of its silo."""
        sizes = [len(r) for r in self.sample.records]
        values = np.concatenate(self.sample.records)
        return r_squared(values, np.repeat(self.both, sizes, 0), np.repeat(self.sample.world, sizes), confidence)

    @cached_property
    def distances(self) -> FloatArray:
        """(S, 2): 2-Wasserstein distances, in the latents' own units, of the posterior of a silo's mean latent from the
        attack's guess, and from the guess of who sees nothing: normals about the guessed mean and about the mean of
        other groups' silos, as wide as those are on average. Given Z_G; records are independent there."""
        import ot

        sample, spread = self.sample, self.sample.spread
        assert spread is not None
        where = np.unique(sample.world, return_inverse=True)[1]
        rows = np.column_stack([np.ones(len(where)), sample.target, spread.reshape(len(where), -1)])
        sums = np.zeros((where.max() + 1, rows.shape[1]))
        np.add.at(sums, where, rows)
        others = (sums.sum(0) - sums)[where]
        n = sample.target.shape[1]
        mean, wide = others[:, 1 : 1 + n] / others[:, :1], (others[:, 1 + n :] / others[:, :1]).reshape(-1, n, n)
        far = lambda guess: ot.gaussian.bures_wasserstein_distance(  # noqa: E731
            sample.target, guess, spread, wide, paired=True
        )
        return np.column_stack([far(self.both), far(mean)])

    def of_posteriors(self, confidence: float = CONFIDENCE) -> Estimate:
        """By what share the attack comes nearer to the posterior of a silo's mean latent than who sees nothing."""
        return nearer(self.distances[:, 0], self.distances[:, 1], self.sample.world, confidence)

    def in_units(self, plain: Guesses) -> dict[str, Any]:
        """Mean distances: what they are by this attack, by the same without protection, and for who sees nothing."""
        means = (self.distances[:, 0], plain.distances[:, 0], self.distances[:, 1])
        names = ("wasserstein", "wasserstein_plain", "wasserstein_of_nothing")
        return {name: float(values.mean()) for name, values in zip(names, means, strict=True)}

    def beyond_totals(self, confidence: float = CONFIDENCE) -> Estimate:
        """By how much messages raise the R^2 that totals alone reach."""
        return gain(self.sample.target, self.both, self.totals, self.sample.world, confidence)

    def above_median(self, confidence: float = CONFIDENCE) -> Estimate:
        """AUC for "above the median", from one silo of each world, of which each has equally many: those are
        independent."""
        target, first = self.sample.target[:, 0], np.unique(self.sample.world, return_index=True)[1]
        chosen = first + np.arange(len(first)) % (len(target) // len(first))
        above = (target > np.median(target)).astype(np.float64)
        return auc(above[chosen], self.both[chosen, 0], chosen, confidence)


#: What is measured, its score, what that gives for guesses by chance, and what the controls are measured by.
Line = tuple[str, str, float, Callable[..., Estimate], Callable[..., Estimate]]
_BOTH, _TOTALS, _BEYOND = Guesses.from_both, Guesses.from_totals, Guesses.beyond_totals
OF_A_MEAN: tuple[Line, ...] = (
    ("messages and totals", "R^2", 0.0, _BOTH, _BOTH),
    ("totals alone", "R^2", 0.0, _TOTALS, _BOTH),
    ("messages beyond totals", "gain in R^2", 0.0, _BEYOND, _BEYOND),
)
OF_RECORDS: Line = ("single records, messages and totals", "R^2", 0.0, Guesses.of_records, Guesses.of_records)
OF_POSTERIORS: Line = (
    "posterior of the silo mean, messages and totals", "share of Wasserstein distance", 0.0,
    Guesses.of_posteriors, Guesses.of_posteriors,
)  # fmt: skip
OF_MEDIANS: Line = ("above the median, messages and totals", "AUC", 0.5, Guesses.above_median, Guesses.above_median)
_OF_LATENTS = (*((f"silo mean, {line[0]}", *line[1:]) for line in OF_A_MEAN), OF_RECORDS, OF_POSTERIORS)


def rows(protection: str, sample: Sample, unprotected: Sample, **detail: Any) -> list[AuditRow]:
    """What messages with totals, totals alone and messages beyond totals give away of latents. `unprotected` is the
    same study under plain sums, which is the positive control."""
    detail = {"silos": len(sample.target), "records_a_silo": len(sample.records[0]), **detail}
    other = "plain sums, with the latents of other worlds"
    return rows_of("latents by ridge", protection, _OF_LATENTS, (sample, unprotected), other, **detail)


def rows_of(
    about: str, protection: str, lines: Iterable[Line], samples: tuple[Sample, Sample], other: str, **detail: Any
) -> list[AuditRow]:
    """A row a line, of a sample and the same under plain sums. `other`: what the negative control is."""
    found, plain, nothing = map(Guesses, (*samples, samples[1].shuffled()))
    return [
        judge(
            f"{about}: {what}",
            protection,
            score,
            measure(found),
            Control(strongest(plain), "the same attack under plain sums"),
            Control(strongest(nothing, CONTROL_CONFIDENCE), other),
            guessing,
            **(found.in_units(plain) if measure is Guesses.of_posteriors else {}),
            **detail,
        )
        for what, score, guessing, measure, strongest in lines
    ]


def _cyclic(world: Groups) -> Groups:
    """For each silo the one at the same place in the next world (or, within one world, the next silo)."""
    names = np.unique(world)
    if len(names) == len(world):
        return np.roll(np.arange(len(world)), 1)
    places = {name: np.flatnonzero(world == name) for name in names}
    following = dict(zip(names, np.roll(names, 1), strict=True))
    order = np.empty(len(world), np.int64)
    for name, here in places.items():
        there = places[following[name]]
        order[here] = there[np.arange(len(here)) % len(there)]
    return order


# ---- What a silo's messages give away about the silo as a whole: how many records it has, and how they are mixed ----
#
# The adversary makes worlds of its own in which sizes and mixes are drawn, learns from them by a ridge regression,
# and guesses those of others. Where counts are summed as well, a plain contribution holds the silo's own, masked ones
# leave the total; in both, sums of gradients grow with the number of records and turn with their mix.

#: A silo has between half and one and a half times the mean number of records of the configuration's silos.
_SMALLEST, _LARGEST = 0.5, 1.5
#: Share of a silo's records whose `argument` lies above the pool's median.
_SHARES = (0.1, 0.9)


def draw(pool: Data, silos: int, mean_size: float, argument: str, seed: int) -> list[Data]:
    """Silos of random sizes whose mix of records by `argument` is random as well."""
    values = per_record(pool[argument])
    above = np.flatnonzero(values > np.median(values))
    below = np.flatnonzero(values <= np.median(values))
    if not len(above):  # more than half of the records have the largest value
        above, below = np.flatnonzero(values == values.max()), np.flatnonzero(values < values.max())
    if not len(below):
        raise InputError(f"'{argument}' is the same for all records, so there is no mix to guess")
    rng = np.random.default_rng([seed, 5])
    found = []
    for _ in range(silos):
        size = max(2, int(rng.integers(int(_SMALLEST * mean_size), int(_LARGEST * mean_size) + 1)))
        many = rng.binomial(size, rng.uniform(*_SHARES))
        rows = torch.from_numpy(np.concatenate([rng.choice(above, many), rng.choice(below, size - many)]))
        found.append({name: v[rows] for name, v in pool.items()})
    return found


def collect_properties(
    bench: Workbench, protection: Protection, argument: str, first: int = 0, each: Each = silent
) -> dict[str, Sample]:
    """What is seen, for each property, on the same worlds: "size" in records, "mix" the mean of `argument`."""
    laboratory = bench.laboratory(protection)
    properties: dict[str, Callable[[Data], float]] = {
        "size": lambda data: float(len(data[argument])),
        "mix": lambda data: float(per_record(data[argument]).mean()),
    }
    messages, totals, world = [], [], []
    targets: dict[str, list[float]] = {name: [] for name in properties}
    for seed in range(first, first + bench.worlds):
        silos = draw(bench.pool, len(bench.sizes), bench.records / len(bench.sizes), argument, seed)
        transcript = laboratory.run(silos, seed).transcript
        where = {f"silo-{j + 1}": data for j, data in enumerate(silos)}
        messages.append(from_messages(transcript))
        totals.append(from_totals(transcript))
        for name, told in properties.items():
            targets[name] += [told(where[silo]) for silo in transcript.silos]
        world += [seed] * len(silos)
        each()
    seen, sums = np.concatenate(messages), np.concatenate(totals)
    raw = (seen.shape[1] - 1, sums.shape[1])  # without the mean length of messages
    return {n: Sample(seen, sums, np.array(t)[:, None], (), np.array(world), raw) for n, t in targets.items()}


def property_rows(
    bench: Workbench,
    argument: str,
    protections: Sequence[Protection] = (PLAIN, MASKED),
    each: Each = silent,
) -> list[AuditRow]:
    """Rows for both properties under each protection. Positive control: plain sums.

    `argument`: the model's argument whose mean is the mix. `each` is told when a world is done; there are
    `bench.worlds` of them for each protection, for the plain control and for the adversary's hint.
    """
    if argument not in bench.pool:
        raise InputError(f"the model has no argument '{argument}'; choose {', '.join(bench.pool)}")
    own = collect_properties(bench, PLAIN, argument, OWN, each)
    plain = collect_properties(bench, PLAIN, argument, 0, each)
    rows = []
    for protection in protections:
        found = plain if protection.name == PLAIN[0] else collect_properties(bench, protection, argument, 0, each)
        for name in found:
            about = "size of a silo" if name == "size" else f"mean of '{argument}' in a silo"
            hinted, control = (s[name].hinted(own[name]) for s in (found, plain))
            rows += rows_of(
                about, protection.name, (*OF_A_MEAN, OF_MEDIANS), (hinted, control),
                "plain sums, with other worlds' silos to guess", silos=len(hinted.target), rounds=bench.rounds,
                standard_deviation=float(hinted.target.std()),
            )  # fmt: skip
    return rows
