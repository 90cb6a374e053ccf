"""Attacks on local latents, by protection: regressions on worlds, the same by size of a silo, and the game.

Worlds are run once and serve all attacks that look at them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from secure_fvi.aggregation import Homomorphic
from secure_fvi.audits import distinguishing
from secure_fvi.audits.base import Attack, AuditRow, Knowledge
from secure_fvi.audits.distinguishing import Game, Plays, play
from secure_fvi.audits.features import from_both, from_totals
from secure_fvi.audits.information import information_rows
from secure_fvi.audits.local_latents import Sample, by_silo, collect, rows
from secure_fvi.audits.regressors import ATTACKS
from secure_fvi.audits.workbench import OWN, PLAIN, Protection, Workbench
from secure_fvi.audits.worlds import resampled
from secure_fvi.errors import InputError

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
        self._samples: dict[tuple[str, str, int], Sample] = {}
        self._plays: dict[str, Plays] = {}

    def latents(self, learner: str, protection: Protection) -> list[AuditRow]:
        """The means of silos' latents at the configuration's own sizes."""
        found, control = self._at_own_sizes(protection), self._at_own_sizes(PLAIN)
        return rows(
            ATTACKS[learner], protection.name, found, control, worlds=self.bench.worlds, rounds=self.bench.rounds
        )

    def information(self, protection: Protection) -> list[AuditRow]:
        """What is seen tells about them, in nats."""
        return information_rows(protection.name, self._at_own_sizes(protection), self._at_own_sizes(PLAIN))

    def one_by_one(self, protection: Protection) -> list[AuditRow]:
        """Silos of one individual."""
        sizes = [1] * self.individuals
        own = self._sample(PLAIN, sizes, OWN)
        found, control = (by_silo(self._sample(p, sizes, 0).hinted(own)) for p in (protection, PLAIN))
        return _renamed(
            rows(ATTACKS["ridge"], protection.name, found, control, rounds=self.bench.rounds), "individuals"
        )

    def _at_own_sizes(self, protection: Protection) -> Sample:
        return self._sample(protection, self.bench.sizes, 0).hinted(self._sample(PLAIN, self.bench.sizes, OWN))

    def by_size(self) -> list[AuditRow]:
        """Records and silos' means by the size of a silo, under plain sums; silos of a few are groups by themselves."""
        out = []
        for records, silos, worlds in SIZES:
            sizes = [records] * silos
            own, found = (self._sample(PLAIN, sizes, first, worlds) for first in (OWN, 0))
            found = found.hinted(own)
            found = by_silo(found) if worlds < 10 else found
            out += rows(ATTACKS["ridge"], f"plain, {records} a silo", found, found, rounds=self.bench.rounds)
        wanted = ("silo mean, messages and totals", "single records, messages and totals")
        return _renamed([row for row in out if row.attack.endswith(wanted)], "by size of a silo")

    def _sample(self, protection: Protection, sizes: list[int], first: int, worlds: int | None = None) -> Sample:
        key = (protection.name, str(sizes), first)
        if key not in self._samples:
            count = worlds or (2 if max(sizes) == 1 else self.bench.worlds)
            laboratory = self.bench.laboratory(protection, count * len(sizes))
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
        privacy = protection.privacy
        if privacy is not None and privacy.epsilon is not None:
            detail["bound"] = distinguishing.bound(privacy.epsilon, privacy.delta)
        attack: Attack = ATTACKS["ridge"]
        return distinguishing.rows(attack, protection.name, self._played(protection), self._played(PLAIN), **detail)

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
            means = torch.cat([torch.from_numpy(outcome.latents[name]) for name in names])
            if not means.shape[1]:
                raise InputError("the model has no latent site inside its record plate, so there is no game to play")
            ends = (int(means[:, 0].argmin()), int(means[:, 0].argmax()))
            candidates = tuple({name: v[at : at + 1] for name, v in self.bench.pool.items()} for at in ends)
            self._chosen = Game(tuple(self.bench.silos), 0, 0, (candidates[0], candidates[1]))
        return self._chosen
