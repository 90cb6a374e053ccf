"""How well a silo's messages give away the posterior means of its latent variables.

The adversary knows the latents of other worlds' silos (it has made such worlds itself) and learns from them what a
silo's messages and the totals say about the mean of its latents. Under masks the totals stay in sight, so what masking
promises is not that nothing is learnt: it is that messages with totals say no more than totals alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.audits.base import CONFIDENCE, CONTROL_CONFIDENCE, AuditRow, Control, Estimate, Groups, judge
from secure_fvi.audits.features import Seen, from_messages, from_totals, messages_of, totals_of
from secure_fvi.audits.scores import auc, cross_fitted, gain, r_squared, ridge
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
    silent,
)
from secure_fvi.errors import InputError


@dataclass(frozen=True)
class Sample:
    """Silos of many worlds: what the server saw of each, and its latents, or another property of it."""

    messages: FloatArray  # (S, D)
    totals: FloatArray  # (S, D')
    target: FloatArray  # (S, n_record) mean of Z_L over the silo's records, or (S, 1)
    records: tuple[FloatArray, ...]  # latents record by record: (N_j, n_record); none for other properties
    world: Groups  # (S,)
    raw: tuple[int, int]  # the first so many columns of messages, and of totals, add up over silos

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
        return replace(self, target=self.target[order], records=tuple(self.records[i] for i in order if self.records))


def collect(
    laboratory: Laboratory,
    draw: Callable[[int], list[Data]],
    seeds: Iterable[int],
    each: Callable[[], None] = lambda: None,
) -> Sample:
    """Run a world for each seed on the silos that `draw` makes of it. `each` is told when one is done."""
    messages: list[Seen] = []
    totals: list[Seen] = []
    target, records, world = [], [], []
    for seed in seeds:
        outcome: Outcome = laboratory.run(draw(seed), seed)
        transcript = outcome.transcript
        values = [outcome.latents[silo] for silo in transcript.silos]
        if not values[0].shape[1]:
            raise InputError("the model has no latent site inside its record plate, so there is nothing to recover")
        messages.append(messages_of(transcript, outcome.layout))
        totals.append(totals_of(transcript, outcome.layout))
        records += values
        target += [v.mean(0) for v in values]
        world += [seed] * len(values)
        each()
    return Sample(
        np.concatenate([m.values for m in messages]),
        np.concatenate([t.values for t in totals]),
        np.stack(target),
        tuple(records),
        np.array(world),
        (messages[0].raw, totals[0].raw),
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
OF_MEDIANS: Line = ("above the median, messages and totals", "AUC", 0.5, Guesses.above_median, Guesses.above_median)
_OF_LATENTS = (*((f"silo mean, {line[0]}", *line[1:]) for line in OF_A_MEAN), OF_RECORDS)


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
