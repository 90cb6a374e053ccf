"""Attacks by protections: one configuration's model under plain, masked, homomorphic and private sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from secure_fvi.aggregation import Homomorphic, Masked, Plain
from secure_fvi.aggregation.base import SecureSum
from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.audits import distinguishing
from secure_fvi.audits.base import Attack, AuditRow, Knowledge
from secure_fvi.audits.distinguishing import Game, Plays, play
from secure_fvi.audits.features import from_both, from_totals
from secure_fvi.audits.late import LateStart
from secure_fvi.audits.local_latents import Sample, by_silo, collect, rows
from secure_fvi.audits.regressors import ATTACKS
from secure_fvi.audits.worlds import Data, Laboratory, pooled, resampled, shortened
from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel
from secure_fvi.privacy.settings import DP, RecordDP

_LOOKS: dict[str, Knowledge] = {"messages and totals": from_both, "totals alone": from_totals}
#: Worlds whose number says so are the adversary's own, and those in which it learns nothing but where to begin.
_OWN, _ELSEWHERE = 1_000_000, 2_000_000
Told = Callable[[str], None]


class Protection(NamedTuple):
    name: str
    aggregation: SecureSum
    privacy: DP | None


@dataclass(frozen=True)
class Scale:
    """How much is run. Intervals shrink with the square root of `worlds` and `trials`.

    rounds: of each world. worlds: for the regressions, at the configuration's own sizes. individuals: silos of one
    record in each of two worlds. trials: runs of the game, half of which are guessed at.
    """

    rounds: int = 12
    worlds: int = 50
    individuals: int = 50
    trials: int = 100


#: Individuals a silo, silos a world, worlds: for the attack "sizes".
_SIZES = ((1, 50, 2), (10, 50, 2), (100, 5, 20), (537, 3, 30))

#: Attacks by the name that the command line knows.
NAMES = {
    "latents": "ridge regression from messages and totals to the means of silos' latents",
    "latents-network": "the same by a small neural network",
    "individuals": "ridge regression where a silo is one individual",
    "sizes": "ridge regression under plain sums, by the number of individuals in a silo",
    "game": "which of two values did one individual's data, and with it its latent, take",
}


def _for_many(protection: Protection) -> bool:
    """Whether worlds of very many silos are run under it: ciphertexts of all of them take minutes."""
    return protection.privacy is None and not isinstance(protection.aggregation, Homomorphic)


def _renamed(found: list[AuditRow], start: str) -> list[AuditRow]:
    return [replace(row, attack=row.attack.replace("latents by", f"{start},")) for row in found]


def protections(epsilons: Sequence[float], delta: float) -> list[Protection]:
    """Plain, masked and homomorphic sums, and record privacy under masks."""
    found = [Protection(s.kind, s, None) for s in (Plain(), Masked(), Homomorphic())]
    for epsilon in epsilons:
        found.append(Protection(f"DP {epsilon:g}", Masked(), RecordDP(epsilon=epsilon, delta=delta, retries=0)))
    return found


class Matrix:
    """The audits of one configuration. `told` hears what is being done, once a world."""

    def __init__(
        self,
        model: FederatedModel,
        algorithm: Any,
        silos: Sequence[Data],
        *,
        simulated: bool,
        real_data: bool = False,
        scale: Scale | None = None,
        told: Told = lambda what: None,
    ) -> None:
        if len(silos) < 3:
            raise InputError(f"{len(silos)} silos: masked sums, which are audited beside plain ones, need at least 3")
        self.model, self.silos, self.scale, self.told = model, list(silos), scale or Scale(), told
        self.pool = pooled(silos)
        self.sizes = [len(next(iter(s.values()))) for s in silos]
        self.algorithm = shortened(algorithm, self.scale.rounds)
        self._simulated, self._real_data = simulated, real_data
        self._full = algorithm
        self._late = self._begin()
        self._samples: dict[tuple[str, str, int], Sample] = {}
        self._plays: dict[str, Plays] = {}

    def _begin(self) -> LateStart:
        elsewhere = resampled(self.pool, self.sizes, _ELSEWHERE)
        worlds = 8 * (self.scale.worlds + self.scale.trials)
        config = self._full if isinstance(self._full, SFVI) else SFVI()
        return LateStart(self.model, config, elsewhere, worlds, pool=self.pool)

    def supports(self, protection: Protection) -> bool:
        """Whether the algorithm can be run so: few-round algorithms take no record privacy here."""
        return protection.privacy is None or isinstance(self._full, SFVI)

    def work(self, attacks: Sequence[str], protections: Sequence[Protection]) -> int:
        """How often `told` will be called."""
        kinds = [p for p in protections if self.supports(p)]
        worlds = 0
        if {"latents", "latents-network"} & set(attacks):
            worlds += self.scale.worlds * (len({"plain", *(p.name for p in kinds)}) + 1)
        if "individuals" in attacks:
            worlds += 2 * (len({"plain", *(p.name for p in kinds if _for_many(p))}) + 1)
        if "sizes" in attacks:
            worlds += 2 * sum(worlds for _, _, worlds in _SIZES)
        if "game" in attacks:
            worlds += self.scale.trials * len({"plain", *(p.name for p in kinds)})
        return worlds

    def rows(self, attack: str, protection: Protection) -> list[AuditRow]:
        """Raises InputError for an unknown attack. No rows where the pair makes no sense."""
        if attack not in NAMES:
            raise InputError(f"attack '{attack}' is unknown; choose {', '.join(NAMES)}")
        if not self.supports(protection) or (attack == "individuals" and not _for_many(protection)):
            return []
        plain = Protection("plain", Plain(), None)
        if attack == "sizes":
            return self._size_rows(plain) if protection.name == plain.name else []
        if attack == "game":
            return self._game_rows(ATTACKS["ridge"], protection, plain)
        learner = ATTACKS["network" if attack == "latents-network" else "ridge"]
        sizes = [1] * self.scale.individuals if attack == "individuals" else self.sizes
        own = self._sample(plain, sizes, _OWN)
        found, control = (self._sample(p, sizes, 0).hinted(own) for p in (protection, plain))
        if attack == "individuals":
            found, control = by_silo(found), by_silo(control)
        out = rows(learner, protection.name, found, control, rounds=self.scale.rounds, worlds=self.scale.worlds)
        return _renamed(out, "individuals") if attack == "individuals" else out

    def _laboratory(self, protection: Protection, worlds: int) -> Laboratory:
        sfvi = isinstance(self._full, SFVI)
        return Laboratory(
            self.model,
            self.algorithm,
            protection.aggregation,
            protection.privacy,
            worlds=worlds,
            late=self._late if sfvi else None,
            # Those of a settled fit: noise that moves a short run moves its own latents, too.
            targets=self._late,
            simulated=self._simulated,
            real_data=self._real_data,
        )

    def _size_rows(self, plain: Protection) -> list[AuditRow]:
        """Records and silos' means by the size of a silo; silos of a few are groups by themselves."""
        out = []
        for records, silos, worlds in _SIZES:
            sizes = [records] * silos
            own, found = (self._sample(plain, sizes, first, worlds) for first in (_OWN, 0))
            found = found.hinted(own)
            found = by_silo(found) if worlds < 10 else found
            out += rows(ATTACKS["ridge"], f"plain, {records} a silo", found, found, rounds=self.scale.rounds)
        wanted = ("silo mean, messages and totals", "single records, messages and totals")
        return _renamed([row for row in out if row.attack.endswith(wanted)], "by size of a silo")

    def _sample(self, protection: Protection, sizes: list[int], first: int, worlds: int | None = None) -> Sample:
        key = (protection.name, str(sizes), first)
        if key not in self._samples:
            count = worlds or (2 if max(sizes) == 1 else self.scale.worlds)
            laboratory = self._laboratory(protection, count * len(sizes))
            what = f"{protection.name}: worlds of {len(sizes)} silos"
            self._samples[key] = collect(
                laboratory,
                lambda seed: resampled(self.pool, sizes, seed),
                range(first, first + count),
                each=lambda: self.told(what),
            )
        return self._samples[key]

    def _game_rows(self, attack: Attack, protection: Protection, plain: Protection) -> list[AuditRow]:
        detail: dict[str, Any] = {"rounds": self.scale.rounds, "silo_records": self.sizes[0]}
        if protection.privacy is not None and protection.privacy.epsilon is not None:
            detail["bound"] = distinguishing.bound(protection.privacy.epsilon, protection.privacy.delta)
        found, control = self._played(protection), self._played(plain)
        return distinguishing.rows(attack, protection.name, found, control, **detail)

    def _played(self, protection: Protection) -> Plays:
        if protection.name not in self._plays:
            laboratory = self._laboratory(protection, self.scale.trials * len(self.sizes))
            what = f"{protection.name}: the game"
            self._plays[protection.name] = play(
                laboratory, self._game, range(self.scale.trials), _LOOKS, each=lambda: self.told(what)
            )
        return self._plays[protection.name]

    @property
    def _game(self) -> Game:
        """The first record of the first silo is one of the two whose latents lie farthest apart in one plain run."""
        if not hasattr(self, "_chosen"):
            outcome = self._laboratory(Protection("plain", Plain(), None), 1).run(self.silos, 0)
            names = [f"silo-{j + 1}" for j in range(len(self.silos))]
            means = torch.cat([torch.from_numpy(outcome.latents[name]) for name in names])
            if not means.shape[1]:
                raise InputError("the model has no latent site inside its record plate, so there is no game to play")
            ends = (int(means[:, 0].argmin()), int(means[:, 0].argmax()))
            candidates = tuple({name: v[at : at + 1] for name, v in self.pool.items()} for at in ends)
            self._chosen = Game(tuple(self.silos), 0, 0, (candidates[0], candidates[1]))
        return self._chosen
