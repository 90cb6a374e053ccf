"""What `secure-fvi audit` was asked for, and the processes that do it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from secure_fvi.algorithms.vertical import Bernoulli, Vertical
from secure_fvi.algorithms.vertical.likelihoods import Likelihood
from secure_fvi.audits.attributes import Attribute
from secure_fvi.audits.base import AuditRow
from secure_fvi.audits.matrix import Scale, Subject
from secure_fvi.audits.vertical import World, column_rows, label_rows, record
from secure_fvi.audits.worlds import PLAIN, Protection
from secure_fvi.errors import InputError
from secure_fvi.models.vertical_programs import VerticalDataset
from secure_fvi.runs.config import read
from secure_fvi.runs.directory import RunDirectory
from secure_fvi.runs.federation import Federation, VerticalFederation, federate

# ---- Attacks by protections for vertical runs: a configuration's own run, recorded under each protection ----

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
        return ATTACKS

    @property
    def sizes(self) -> str:
        return f"{len(self.data.silos)} with columns of {len(self.data.response)} people"

    @property
    def scale_in_words(self) -> str:
        return f"one run of {self.rounds} rounds under each protection"

    def rows(self, attack: str, protections: Sequence[Protection]) -> list[AuditRow]:
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
        return [name for name in ATTACKS if self.why_not(name) is None]

    def work(self, attacks: Sequence[str], protections: Sequence[Protection]) -> int:
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


Federations: TypeAlias = Federation | VerticalFederation
Subjects: TypeAlias = Subject | VerticalSubject


class Order(NamedTuple):
    """What was asked for, for every process to make its own subject of."""

    source: Path
    overrides: tuple[str, ...]
    data: Path | None
    rounds: int | None
    worlds: int
    individuals: int
    trials: int
    canary_runs: int
    argument: str | None
    attribute: str | None
    real_data: bool

    def subject(self, told: Callable[[str], None]) -> tuple[Federations, Subjects]:
        """What is attacked, for this process. Raises InputError for what cannot be."""
        torch.set_num_threads(1)
        federation = _federation(self.source, self.overrides, self.data)
        simulated = is_simulated(federation)
        if not (simulated or self.real_data):
            raise InputError(
                f"'{self.source}' reads files of its own; if their institutions agree to an audit of them, say "
                "--real-data"
            )
        if not isinstance(federation, Federation):
            return federation, _vertical(federation, self.rounds, simulated, self.real_data, told)
        scale = Scale(self.rounds or Scale.rounds, self.worlds, self.individuals, self.trials, self.canary_runs)
        return federation, Subject(
            federation.model, federation.algorithm, federation.silos, simulated=simulated, real_data=self.real_data,
            scale=scale, argument=self.argument, attribute=_attribute(self.attribute), told=told,
        )  # fmt: skip


def is_simulated(federation: Federations) -> bool:
    """Shipped programs read published or made data."""
    return federation.config.model.program is not None


def check(subject: Subjects, attack: str) -> None:
    """Raises InputError for an attack that is unknown or does not fit."""
    if attack not in subject.known:
        raise InputError(f"attack '{attack}' is unknown; choose {', '.join(subject.known)}")
    reason = subject.why_not(attack)
    if reason is not None:
        raise InputError(f"attack '{attack}' does not fit: {reason}")


#: Attacks of a line share the worlds that they run, so that one process takes them all. The longest lines first.
_TOGETHER = (
    ("latents", "information", "individuals", "sizes", "replay", "game"),
    ("epsilon",),
    ("properties", "attributes"),
    ("gradients", "inversion", "membership"),
    ("protocol",),
)


def attacked(
    order: Order,
    subject: Subjects,
    chosen: list[str],
    found: list[Protection],
    workers: int,
    show: Callable[[int], None],
) -> list[AuditRow]:
    """The rows of the `chosen` attacks in their order, under the protections `found`.

    By `subject`, or where several `workers` have something to do each by a subject of its own; then `show` is told how
    many worlds are done in all.
    """
    lines = [[n for n in line if n in chosen] for line in _TOGETHER]
    lines = [line for line in lines if line] or [chosen]
    if workers == 1 or len(lines) == 1:
        return [row for name in chosen for row in subject.rows(name, found)]
    context = multiprocessing.get_context("spawn")
    done = context.Value("i", 0)
    rows: dict[str, list[AuditRow]] = {}
    with ProcessPoolExecutor(min(workers, len(lines)), context, _begin, (done,)) as pool:
        waiting = {pool.submit(_line, order, line, found) for line in lines}
        while waiting:
            finished, waiting = wait(waiting, timeout=1.0, return_when=FIRST_COMPLETED)
            show(done.value)
            for future in finished:
                rows |= future.result()
    return [row for name in chosen for row in rows[name]]


_done: Any = None  # in a worker: the count of worlds of all workers


def _begin(done: Any) -> None:
    global _done
    _done = done


def _count(what: str) -> None:
    with _done.get_lock():
        _done.value += 1


def _line(order: Order, attacks: list[str], found: list[Protection]) -> dict[str, list[AuditRow]]:
    _, subject = order.subject(_count)
    return {name: subject.rows(name, found) for name in attacks}


def _federation(source: Path, overrides: tuple[str, ...], data: Path | None) -> Federations:
    if source.is_dir():
        if overrides:
            raise InputError("--set is for configuration files; a run is audited as it was")
        found = federate(RunDirectory(source).read_config(), data)
    else:
        found = federate(read(source, overrides), data)
    assert isinstance(found, Federations)
    return found


def _vertical(
    federation: VerticalFederation, rounds: int | None, simulated: bool, real_data: bool, told: Callable[[str], None]
) -> VerticalSubject:
    if not isinstance(federation.algorithm, Vertical):
        raise InputError(f"no attack is for algorithm.name = '{federation.algorithm.name}'; audit 'vertical'")
    likelihood, algorithm = federation.likelihood, federation.algorithm
    return VerticalSubject(likelihood, federation.data, algorithm, rounds or ROUNDS, simulated, real_data, told)


def _attribute(text: str | None) -> Attribute | None:
    if text is None:
        return None
    name, *columns = text.split(":")
    if len(columns) > 2 or not all(column.isdigit() for column in columns):
        raise InputError(f"--attribute {text}: write NAME, NAME:COLUMN or NAME:COLUMN:COMPLEMENT, columns from 0")
    return Attribute(name, *(int(column) for column in columns))
