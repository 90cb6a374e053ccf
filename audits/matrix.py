"""Attacks by protections: one configuration's model under plain, masked, homomorphic and private sums.

Each attack says whether it fits the model, how much it will run, and gives its rows. `--all` takes those that fit.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from secure_fvi.aggregation import Masked, Plain
from secure_fvi.aggregation.base import SecureSum
from secure_fvi.aggregation.homomorphic import Homomorphic
from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.algorithms.vertical import Bernoulli, Vertical
from secure_fvi.algorithms.vertical.likelihoods import Likelihood
from secure_fvi.audits import attributes, epsilon, gradient_inversion, membership
from secure_fvi.audits.attributes import Attribute, released_rows
from secure_fvi.audits.base import AuditRow
from secure_fvi.audits.gradient_inversion import MATCHED_BATCHES, inversion_rows
from secure_fvi.audits.latent_studies import SIZES, LatentStudies, Told, property_rows, runs_with_many
from secure_fvi.audits.vertical import (
    LEAST_PEOPLE,
    Game,
    World,
    column_rows,
    columns_of,
    label_rows,
    matching_rows,
    member_row,
    play,
    record,
)
from secure_fvi.audits.worlds import PLAIN, Data, Protection, Workbench
from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel
from secure_fvi.models.vertical_programs import VerticalDataset
from secure_fvi.privacy.settings import DP, RecordDP, SiloDP
from secure_fvi.runs.directory import RunDirectory
from secure_fvi.runs.federation import Federation, VerticalFederation, federate
from secure_fvi.runs.reading import read

#: Pools of this many records are drawn for attacks that fit references.
_REFERENCE_RECORDS = 400


def protections(epsilons: Sequence[float], delta: float) -> list[Protection]:
    """Plain, masked and homomorphic sums, and record privacy under masks."""
    found = [Protection(s.kind, s, None) for s in (Plain(), Masked(), Homomorphic())]
    for level in epsilons:
        found.append(Protection(f"DP {level:g}", Masked(), RecordDP(epsilon=level, delta=delta, retries=0)))
    return found


def own_protections(
    aggregation: SecureSum, privacy: DP | None, epsilons: Sequence[float], delta: float
) -> list[Protection]:
    """A configuration's own sum, with all its options, and beside it its own privacy; DP of `epsilons` is under masks,
    and stands in for none."""
    found = [Protection(named(aggregation), aggregation)]
    if privacy is not None:
        found.append(Protection(f"own {epsilon.protection(privacy)}", aggregation, privacy))
    return found + [p for p in protections(epsilons, delta) if p.privacy is not None]


def named(aggregation: SecureSum) -> str:
    """Its kind, and what it has other than by default."""
    usual = type(aggregation)()
    of = [f.name for f in fields(aggregation)]  # type: ignore[arg-type]
    more = [f"{n} = {getattr(aggregation, n)}" for n in of if getattr(aggregation, n) != getattr(usual, n)]
    return ", ".join([aggregation.kind, *more])


@dataclass(frozen=True)
class Scale:
    """How much is run. Intervals shrink with the square root of `worlds` and `trials`.

    rounds: of each world. worlds: for the regressions, at the configuration's own sizes. individuals: silos of one
    record in each of two worlds. trials: runs of the game, half of which are guessed at. canary_runs: of each game with
    one canary, for the empirical epsilon, at most; canary_rounds: of each of these; unit: that canaries are of,
    "record" or "silo".
    """

    rounds: int = 12
    worlds: int = 50
    individuals: int = 50
    trials: int = 100
    canary_runs: int = 200
    canary_rounds: int = epsilon.ROUNDS
    unit: str | None = None


class Subject:
    """What is attacked: a configuration's model, algorithm and silos. `told` hears what is being done."""

    def __init__(
        self,
        model: FederatedModel,
        algorithm: Any,
        silos: Sequence[Data],
        *,
        simulated: bool,
        real_data: bool = False,
        scale: Scale | None = None,
        argument: str | None = None,
        attribute: Attribute | None = None,
        told: Told = lambda what: None,
    ) -> None:
        """`argument`: of the model, whose mean over a silo is a property to infer. `attribute`: of a record."""
        self.model, self.algorithm, self.silos, self.told = model, algorithm, list(silos), told
        self.scale = scale or Scale()
        self.simulated, self.real_data = simulated, real_data
        self.bench = Workbench(
            model, algorithm, silos, rounds=self.scale.rounds, worlds=self.scale.worlds, simulated=simulated,
            real_data=real_data,
        )  # fmt: skip
        self.studies = LatentStudies(self.bench, self.scale.individuals, self.scale.trials, told)
        self._argument, self._attribute, self.unit = argument, attribute, self.scale.unit

    @cached_property
    def attribute(self) -> Attribute | None:
        """As it was named, or the first argument that is a yes or no of each record."""
        if self._attribute is not None:
            self._attribute.read(self.bench.pool)
            return self._attribute
        for name in self.bench.pool:
            try:
                if 0 < Attribute(name).read(self.bench.pool).mean() < 1:
                    return Attribute(name)
            except InputError:
                continue
        return None

    @property
    def argument(self) -> str:
        """As it was named, or the model's last, which most models observe."""
        return self._argument or list(self.bench.pool)[-1]

    @cached_property
    def some(self) -> Data:
        """As many records as attacks with references are made on, the first of all silos in turn."""
        return {name: v[:_REFERENCE_RECORDS] for name, v in self.bench.pool.items()}

    @property
    def known(self) -> dict[str, str]:
        """All attacks, and what they are."""
        return {name: entry.about for name, entry in ATTACKS.items()}

    @property
    def sizes(self) -> str:
        return ", ".join(str(n) for n in self.bench.sizes[:20]) + " records"

    @property
    def scale_in_words(self) -> str:
        scale = self.scale
        return (
            f"{scale.worlds} worlds of {scale.rounds} rounds, {scale.trials} games, "
            f"{scale.canary_runs} runs with each canary"
        )

    def why_not(self, attack: str) -> str | None:
        """Why the attack does not fit, None where it does."""
        return ATTACKS[attack].why_not(self)

    def fitting(self) -> list[str]:
        """The attacks of `--all`."""
        return [name for name, entry in ATTACKS.items() if entry.in_all and entry.why_not(self) is None]

    @cached_property
    def dp(self) -> DP | str:
        """Privacy that canaries attack, of the unit that was asked for, or of what a run takes: of records, or of
        silos; why there is none, in words."""
        kinds: dict[str, DP] = {"record": RecordDP(noise_multiplier=1.0), "silo": SiloDP(noise_multiplier=1.0)}
        reasons = []
        for unit in [self.unit] if self.unit else list(kinds):
            reasons.append(epsilon.why_not(self.model, self.algorithm, self.silos, kinds[unit]))
            if reasons[-1] is None:
                return kinds[unit]
        return str(reasons[-1])

    def rows(self, attack: str, protections: Sequence[Protection]) -> list[AuditRow]:
        return ATTACKS[attack].rows(self, self.supported(attack, protections))

    def supported(self, attack: str, protections: Sequence[Protection]) -> list[Protection]:
        """Few-round algorithms take no record privacy here, but where the attack is on a claim of epsilon."""
        every = attack == epsilon.NAME or isinstance(self.algorithm, SFVI)
        return [p for p in protections if p.privacy is None or every]

    def work(self, attacks: Sequence[str], protections: Sequence[Protection]) -> int:
        """About how often `told` will be called."""
        return sum(ATTACKS[name].work(self, self.supported(name, protections)) for name in attacks)


class Entry(NamedTuple):
    """An attack as the command line knows it."""

    about: str
    rows: Callable[[Subject, Sequence[Protection]], list[AuditRow]]
    work: Callable[[Subject, Sequence[Protection]], int]
    why_not: Callable[[Subject], str | None]
    in_all: bool = True


# ---- whether an attack fits ----


def _with_argument(subject: Subject) -> str | None:
    known = subject.bench.pool
    return (
        None
        if subject.argument in known
        else f"the model has no argument '{subject.argument}'; choose {', '.join(known)}"
    )


def _with_latents(subject: Subject) -> str | None:
    return None if subject.bench.layout.size("record") else "the model has no latent site inside its record plate"


def _with_globals_only(subject: Subject) -> str | None:
    return None if subject.bench.all_global else "it is for models whose parameters are all global latents"


def _on_covariates(subject: Subject) -> str | None:
    if subject.bench.all_global and not {"x", "y"} <= subject.bench.pool.keys():
        return "the model has no arguments 'x' and 'y'"
    return _with_globals_only(subject)


def _with_attribute(subject: Subject) -> str | None:
    return None if subject.attribute is not None else "no argument is a yes or no of each record; name an --attribute"


def _private(subject: Subject) -> str | None:
    return subject.dp if isinstance(subject.dp, str) else None


# ---- attacks, one protection after the other ----


def _each(one: Callable[[Subject, Protection], list[AuditRow]]) -> Callable[..., list[AuditRow]]:
    return lambda subject, found: [row for protection in found for row in one(subject, protection)]


def _worlds(subject: Subject, found: Sequence[Protection]) -> int:
    return subject.scale.worlds * (len({PLAIN[0], *(p.name for p in found)}) + 1)


def _many(found: Sequence[Protection]) -> list[Protection]:
    return [p for p in found if runs_with_many(p)]


def _properties(subject: Subject, found: Sequence[Protection]) -> list[AuditRow]:
    return property_rows(subject.bench, subject.argument, found, lambda: subject.told("drawn sizes and mixes"))


def _attributes(subject: Subject, found: Sequence[Protection]) -> list[AuditRow]:
    assert subject.attribute is not None
    name = subject.attribute.argument
    told = lambda: subject.told(f"'{name}' of single records")  # noqa: E731
    rows = attributes.attribute_rows(subject.bench, subject.attribute, _many(found), each=told)
    if subject.bench.all_global:
        rows += released_rows(subject.model, subject.some, subject.attribute, each=told)
    return rows


def _claims(found: Sequence[Protection]) -> list[Protection]:
    """With privacy; of several epsilons the smallest, since a larger one takes more runs to contradict."""
    private = [p for p in found if p.privacy is not None]
    return sorted(private, key=lambda p: (p.privacy and p.privacy.epsilon) or 0.0)[:1]


def _epsilons(subject: Subject, found: Sequence[Protection]) -> list[AuditRow]:
    rows: list[AuditRow] = []
    for protection in _claims(found):
        asked, unit = protection.privacy, subject.dp
        assert asked is not None
        assert not isinstance(unit, str)
        privacy, taken = asked, epsilon.why_not(subject.model, subject.algorithm, subject.silos, asked) is None
        if not taken or (subject.unit or asked.unit) != asked.unit:  # of what it takes, or was asked for
            privacy = replace(unit, epsilon=asked.epsilon, noise_multiplier=None, delta=asked.delta)
        rows += epsilon.epsilon_rows(
            subject.model, subject.algorithm, subject.silos, privacy, simulated=subject.simulated,
            real_data=subject.real_data, runs=subject.scale.canary_runs, rounds=subject.scale.canary_rounds,
            told=subject.told,
        )  # fmt: skip
    return rows


def _membership(subject: Subject, found: Sequence[Protection]) -> list[AuditRow]:
    private = [(p.name, p.privacy) for p in found if p.privacy is not None]
    return membership.membership_rows(subject.model, subject.some, private, told=subject.told)


def _study(subject: Subject, found: Sequence[Protection]) -> list[AuditRow]:
    return gradient_inversion.study(
        subject.model, subject.bench.pool, runs=20, each=lambda: subject.told("gradients of batches")
    )


def _inversion(subject: Subject, found: Sequence[Protection]) -> list[AuditRow]:
    return inversion_rows(subject.model, subject.bench.pool, each=lambda: subject.told("records that fit gradients"))


ATTACKS: dict[str, Entry] = {
    "latents": Entry(
        "ridge regression from messages and totals to the means of silos' latents",
        _each(lambda s, p: s.studies.latents(p)), lambda s, found: 2 * _worlds(s, found), _with_latents,
    ),
    "individuals": Entry(
        "ridge regression where a silo is one individual",
        lambda s, found: [row for p in _many(found) for row in s.studies.one_by_one(p)],
        lambda s, found: 2 * (len({PLAIN[0], *(p.name for p in _many(found))}) + 1), _with_latents,
    ),
    "sizes": Entry(
        "ridge regression under plain sums, by the number of individuals in a silo",
        lambda s, found: s.studies.by_size(), lambda s, f: 2 * sum(worlds for _, _, worlds in SIZES), _with_latents,
        in_all=False,
    ),
    "game": Entry(
        "which of two values did one individual's data, and with it its latent, take",
        _each(lambda s, p: s.studies.game(p)),
        lambda s, found: s.scale.trials * len({PLAIN[0], *(p.name for p in found)}), _with_latents,
    ),
    "properties": Entry(
        "a silo's number of records, and the mean of an argument over them",
        _properties, _worlds, _with_argument,
    ),
    "attributes": Entry(
        "one attribute of a record that is known otherwise",
        _attributes, lambda s, found: 4 * (len(_many(found)) + 1), _with_attribute,
    ),
    "gradients": Entry(
        "records read off gradients, and recognised in their span",
        _study, lambda s, f: 20 * len(gradient_inversion.BATCHES), _on_covariates,
    ),
    "inversion": Entry(
        "records that would have given a batch's gradient",
        _inversion, lambda s, f: 24 * len(MATCHED_BATCHES), _on_covariates, in_all=False,
    ),
    "membership": Entry(
        "whose records was the released posterior fitted to (LiRA, RMIA)",
        _membership, lambda s, found: 3 * len(found), _with_globals_only,
    ),
    "epsilon": Entry(
        "what canaries prove about epsilon, beside the claim",
        _epsilons, lambda s, found: epsilon.work(s.scale.canary_runs) * len(_claims(found)),
        _private,
    ),
}  # fmt: skip


# ---- Attacks by protections for vertical runs: a configuration's own run, recorded under each protection ----

#: Of each run.
ROUNDS = 60

VERTICAL_ATTACKS = {
    "labels": "labels of people off the broadcast gradients, by sign, size and direction",
    "columns": "a silo's predictor off its own messages and off the totals",
    "membership": "who takes part, off totals and pulls and by private matching",
    "epsilon": "what a canary proves about epsilon, beside the claim",
}


@dataclass
class VerticalSubject:
    """What is attacked. Each protection is run once, for `rounds` rounds, for `membership` twice more, over half of the
    people."""

    likelihood: Likelihood
    data: VerticalDataset
    algorithm: Vertical
    rounds: int
    simulated: bool
    real_data: bool
    canaries: Scale
    told: Callable[[str], None] = lambda what: None

    def __post_init__(self) -> None:
        self._worlds: dict[str, World] = {}
        self._games: dict[tuple[str, bool], Game] = {}

    @property
    def known(self) -> dict[str, str]:
        return VERTICAL_ATTACKS

    @property
    def sizes(self) -> str:
        return f"{len(self.data.silos)} with columns of {len(self.data.response)} people"

    @property
    def scale_in_words(self) -> str:
        return f"one run of {self.rounds} rounds under each protection"

    def rows(self, attack: str, protections: Sequence[Protection]) -> list[AuditRow]:
        if attack == epsilon.NAME:
            return [row for p in _claims(protections) for row in self._epsilons(p)]
        rows: list[AuditRow] = []
        for protection in protections:
            privacy = protection.privacy
            of = (None, 0.0) if privacy is None else (privacy.epsilon, privacy.delta)
            if attack == "membership":
                games = [[self._game(p, whole) for p in (protection, PLAIN)] for whole in (False, True)]
                rows += [member_row(protection.name, found, control, *of) for found, control in games]
            elif attack == "columns":
                rows += column_rows(protection.name, self._world(protection), self._world(PLAIN))
            else:
                rows += label_rows(protection.name, self._world(protection), self._world(PLAIN), *of)
        return rows + (matching_rows() if attack == "membership" else [])

    def _epsilons(self, protection: Protection) -> list[AuditRow]:
        assert protection.privacy is not None
        model, silos = columns_of(self.data, self.likelihood)
        return epsilon.epsilon_rows(
            model, self.algorithm, silos, protection.privacy, simulated=self.simulated,
            real_data=self.real_data, runs=self.canaries.canary_runs, rounds=self.canaries.canary_rounds,
            told=self.told,
        )  # fmt: skip

    def why_not(self, attack: str) -> str | None:
        """Why the configuration cannot be attacked so, None where it can."""
        if attack == epsilon.NAME:
            model, silos = columns_of(self.data, self.likelihood)
            return epsilon.why_not(model, self.algorithm, silos, RecordDP(noise_multiplier=1.0))
        if self.algorithm.is_power or self.algorithm.batch_size is not None:
            return "it follows people over rounds of the augmented-variable model with all records in each"
        if attack == "membership" and len(self.data.response) < LEAST_PEOPLE:
            return f"it needs {LEAST_PEOPLE} people, half of whom take part"
        if attack == "labels" and self.algorithm.response != "private":
            return "the response is shared, so that every silo is given the labels"
        if attack == "labels" and not isinstance(self.likelihood, Bernoulli):
            return "labels are attacked in Bernoulli models"
        return None

    def fitting(self) -> list[str]:
        return [name for name in VERTICAL_ATTACKS if self.why_not(name) is None]

    def work(self, attacks: Sequence[str], protections: Sequence[Protection]) -> int:
        runs = 2 * self.canaries.canary_runs * (epsilon.NAME in attacks)
        worlds = bool({"labels", "columns"} & set(attacks)) + 2 * ("membership" in attacks)
        return runs + self.rounds * len({PLAIN[0], *(p.name for p in protections)}) * worlds

    def _world(self, protection: Protection) -> World:
        name, aggregation, privacy = protection
        if name not in self._worlds:
            config = replace(self.algorithm, rounds=self.rounds)
            self._worlds[name] = record(
                self.data, self.likelihood, config, aggregation, privacy, simulated=self.simulated,
                real_data=self.real_data, each=lambda: self.told(f"{name}: the run"),
            )  # fmt: skip
        return self._worlds[name]

    def _game(self, protection: Protection, whole: bool) -> Game:
        name, aggregation, privacy = protection
        if (name, whole) not in self._games:
            config = replace(self.algorithm, rounds=self.rounds)
            self._games[name, whole] = play(
                self.data, self.likelihood, config, aggregation, privacy, whole=whole, simulated=self.simulated,
                real_data=self.real_data, each=lambda: self.told(f"{name}: one of two people in each place"),
            )  # fmt: skip
        return self._games[name, whole]


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
    canary_rounds: int
    unit: str | None
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
        scale = Scale(
            self.rounds or Scale.rounds, self.worlds, self.individuals, self.trials, self.canary_runs,
            self.canary_rounds, self.unit,
        )  # fmt: skip
        if not isinstance(federation, Federation):
            if self.unit == "silo":
                raise InputError("vertical silos hold parts of the same people: canaries are of --unit record")
            return federation, _vertical(federation, self.rounds, simulated, self.real_data, scale, told)
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
    ("latents", "individuals", "sizes", "game"),
    ("epsilon",),
    ("properties", "attributes"),
    ("gradients", "inversion", "membership"),
    ("labels", "columns"),
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
    federation: VerticalFederation, rounds: int | None, simulated: bool, real_data: bool, scale: Scale,
    told: Callable[[str], None],
) -> VerticalSubject:  # fmt: skip
    if not isinstance(federation.algorithm, Vertical):
        raise InputError(f"no attack is for algorithm.name = '{federation.algorithm.name}'; audit 'vertical'")
    likelihood, algorithm = federation.likelihood, federation.algorithm
    return VerticalSubject(likelihood, federation.data, algorithm, rounds or ROUNDS, simulated, real_data, scale, told)


def _attribute(text: str | None) -> Attribute | None:
    if text is None:
        return None
    name, *columns = text.split(":")
    if len(columns) > 2 or not all(column.isdigit() for column in columns):
        raise InputError(f"--attribute {text}: write NAME, NAME:COLUMN or NAME:COLUMN:COMPLEMENT, columns from 0")
    return Attribute(name, *(int(column) for column in columns))
