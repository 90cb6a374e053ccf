"""How well a silo's messages give away the posterior means of its latent variables.

The adversary knows the latents of other worlds' silos (it has made such worlds itself) and learns from them what a
silo's messages and the totals say about the mean of its latents. Under masks the totals stay in sight, so what masking
promises is not that nothing is learnt: it is that messages with totals say no more than totals alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.audits.base import CONFIDENCE, CONTROL_CONFIDENCE, Attack, AuditRow, Control, Estimate, Groups, judge
from secure_fvi.audits.features import Seen, messages_of, totals_of
from secure_fvi.audits.regressors import Ridge, cross_fitted
from secure_fvi.audits.scores import gain, r_squared
from secure_fvi.audits.worlds import Data, Laboratory, Outcome
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
        hints = [Ridge()(known, answers, average) for answers in own.target.T]
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
    """One attack's guesses for every silo of a sample, from messages and totals and from totals alone."""

    def __init__(self, attack: Attack, sample: Sample) -> None:
        self.sample = sample
        self.both, self.totals = (
            np.stack([cross_fitted(attack, seen, answers, sample.world) for answers in sample.target.T], 1)
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


def rows(attack: Attack, protection: str, sample: Sample, unprotected: Sample, **detail: Any) -> list[AuditRow]:
    """The rows of one attack: what messages with totals, totals alone and messages beyond totals give away.

    `unprotected` is the same study under plain sums, which is the positive control.
    """
    found, plain, nothing = (Guesses(attack, s) for s in (sample, unprotected, unprotected.shuffled()))
    lines = (
        ("silo mean, messages and totals", "R^2", Guesses.from_both),
        ("silo mean, totals alone", "R^2", Guesses.from_totals),
        ("silo mean, messages beyond totals", "gain in R^2", Guesses.beyond_totals),
        ("single records, messages and totals", "R^2", Guesses.of_records),
    )
    out = []
    for what, score, measure in lines:
        control = Guesses.from_both if measure is Guesses.from_totals else measure
        detail = {"silos": len(sample.target), "records_a_silo": len(sample.records[0]), **detail}
        out.append(
            judge(
                f"latents by {attack.name}: {what}",
                protection,
                score,
                measure(found),
                Control(control(plain), "the same attack under plain sums"),
                Control(control(nothing, CONTROL_CONFIDENCE), "plain sums, with the latents of other worlds"),
                **detail,
            )
        )
    return out


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
