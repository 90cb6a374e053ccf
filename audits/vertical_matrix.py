"""Attacks by protections for vertical runs: a configuration's own run, recorded under each protection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from secure_fvi.algorithms.vertical import Bernoulli, Vertical
from secure_fvi.algorithms.vertical.likelihoods import Likelihood
from secure_fvi.audits.base import AuditRow
from secure_fvi.audits.vertical import World, column_rows, label_rows, record
from secure_fvi.audits.workbench import PLAIN, Protection
from secure_fvi.models.vertical_base import VerticalDataset

#: Of each run.
ROUNDS = 60

ATTACKS = {
    "labels": "labels of people off the broadcast gradients, by sign, size and direction",
    "columns": "a silo's predictor off its own messages and off the totals",
}


@dataclass
class VerticalSubject:
    """What is attacked. Each protection is run once, for `rounds` rounds."""

    likelihood: Likelihood
    data: VerticalDataset
    algorithm: Vertical
    rounds: int
    simulated: bool
    real_data: bool
    told: Callable[[str], None] = lambda what: None

    def __post_init__(self) -> None:
        self._worlds: dict[str, World] = {}

    @property
    def known(self) -> dict[str, str]:
        """All attacks, and what they are."""
        return ATTACKS

    @property
    def sizes(self) -> str:
        """The silos, for readers."""
        return f"{len(self.data.silos)} with columns of {len(self.data.response)} people"

    @property
    def scale_in_words(self) -> str:
        """For readers."""
        return f"one run of {self.rounds} rounds under each protection"

    def rows(self, attack: str, protections: Sequence[Protection]) -> list[AuditRow]:
        """Of one attack that fits."""
        rows: list[AuditRow] = []
        for protection in protections:
            found, control = self._world(protection), self._world(PLAIN)
            if attack == "columns":
                rows += column_rows(protection.name, found, control)
                continue
            privacy = protection.privacy
            epsilon, delta = (None, 0.0) if privacy is None else (privacy.epsilon, privacy.delta)
            rows += label_rows(protection.name, found, control, epsilon, delta)
        return rows

    def why_not(self, attack: str) -> str | None:
        """Why the configuration cannot be attacked so, None where it can."""
        if self.algorithm.is_power or self.algorithm.batch_size is not None:
            return "it follows people over rounds of the augmented-variable model with all records in each"
        if attack == "labels" and self.algorithm.response != "private":
            return "the response is shared, so that every silo is given the labels"
        if attack == "labels" and not isinstance(self.likelihood, Bernoulli):
            return "labels are attacked in Bernoulli models"
        return None

    def fitting(self) -> list[str]:
        """The attacks of `--all`."""
        return [name for name in ATTACKS if self.why_not(name) is None]

    def work(self, attacks: Sequence[str], protections: Sequence[Protection]) -> int:
        """How often `told` will be called."""
        return self.rounds * len({PLAIN[0], *(p.name for p in protections)}) if attacks else 0

    def _world(self, protection: Protection) -> World:
        name, aggregation, privacy = protection
        if name not in self._worlds:
            config = replace(self.algorithm, rounds=self.rounds)
            self._worlds[name] = record(
                self.data, self.likelihood, config, aggregation, privacy, simulated=self.simulated,
                real_data=self.real_data, each=lambda: self.told(f"{name}: the run"),
            )  # fmt: skip
        return self._worlds[name]
