"""Attacks by protections: one configuration's model under plain, masked, homomorphic and private sums.

Each attack says whether it fits the model, how much it will run, and gives its rows. `--all` takes those that fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from secure_fvi.aggregation import Masked, Plain
from secure_fvi.aggregation.homomorphic import Homomorphic
from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.audits import attributes, epsilon, gradient_inversion, membership, protocol
from secure_fvi.audits.attributes import Attribute, released_rows
from secure_fvi.audits.base import AuditRow
from secure_fvi.audits.gradient_inversion import MATCHED_BATCHES, inversion_rows
from secure_fvi.audits.latent_studies import SIZES, LatentStudies, Told, property_rows, runs_with_many
from secure_fvi.audits.replay import replay_rows
from secure_fvi.audits.worlds import PLAIN, Data, Protection, Workbench
from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel
from secure_fvi.privacy.settings import RecordDP

#: Pools of this many records are drawn for attacks that fit references.
_REFERENCE_RECORDS = 400


def protections(epsilons: Sequence[float], delta: float) -> list[Protection]:
    """Plain, masked and homomorphic sums, and record privacy under masks."""
    found = [Protection(s.kind, s, None) for s in (Plain(), Masked(), Homomorphic())]
    for level in epsilons:
        found.append(Protection(f"DP {level:g}", Masked(), RecordDP(epsilon=level, delta=delta, retries=0)))
    return found


@dataclass(frozen=True)
class Scale:
    """How much is run. Intervals shrink with the square root of `worlds` and `trials`.

    rounds: of each world. worlds: for the regressions, at the configuration's own sizes. individuals: silos of one
    record in each of two worlds. trials: runs of the game, half of which are guessed at. canary_runs: of each game with
    one canary, for the empirical epsilon.
    """

    rounds: int = 12
    worlds: int = 50
    individuals: int = 50
    trials: int = 100
    canary_runs: int = 200


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
        self._argument, self._attribute = argument, attribute

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

    def rows(self, attack: str, protections: Sequence[Protection]) -> list[AuditRow]:
        return ATTACKS[attack].rows(self, self.supported(protections))

    def supported(self, protections: Sequence[Protection]) -> list[Protection]:
        """Few-round algorithms take no record privacy here."""
        return [p for p in protections if p.privacy is None or isinstance(self.algorithm, SFVI)]

    def work(self, attacks: Sequence[str], protections: Sequence[Protection]) -> int:
        """About how often `told` will be called."""
        return sum(ATTACKS[name].work(self, self.supported(protections)) for name in attacks)


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


def _always(subject: Subject) -> None:
    return None


def _with_latents(subject: Subject) -> str | None:
    return None if subject.bench.layout.size("record") else "the model has no latent site inside its record plate"


def _replayable(subject: Subject) -> str | None:
    return _with_latents(subject) or (None if isinstance(subject.algorithm, SFVI) else "it replays sfvi only")


def _with_globals_only(subject: Subject) -> str | None:
    return None if subject.bench.all_global else "it is for models whose parameters are all global latents"


def _on_covariates(subject: Subject) -> str | None:
    if subject.bench.all_global and not {"x", "y"} <= subject.bench.pool.keys():
        return "the model has no arguments 'x' and 'y'"
    return _with_globals_only(subject)


def _with_attribute(subject: Subject) -> str | None:
    return None if subject.attribute is not None else "no argument is a yes or no of each record; name an --attribute"


def _for_sfvi(subject: Subject) -> str | None:
    return None if isinstance(subject.algorithm, SFVI) else "it audits sfvi under record privacy"


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
    rows = []
    for protection in _claims(found):
        if protection.privacy is not None:
            rows += epsilon.epsilon_rows(
                subject.model, subject.algorithm, subject.silos, protection.privacy, simulated=subject.simulated,
                real_data=subject.real_data, runs=subject.scale.canary_runs, told=subject.told,
            )  # fmt: skip
    return rows


def _kinds(found: Sequence[Protection]) -> list[str]:
    return [p.name for p in found if p.privacy is None and p.name in protocol.KINDS]


def _membership(subject: Subject, found: Sequence[Protection]) -> list[AuditRow]:
    private = [(p.name, p.privacy) for p in found if p.privacy is not None]
    return membership.membership_rows(subject.model, subject.some, private, told=subject.told)


def _study(subject: Subject, found: Sequence[Protection]) -> list[AuditRow]:
    return gradient_inversion.study(
        subject.model, subject.bench.pool, runs=20, each=lambda: subject.told("gradients of batches")
    )


def _inversion(subject: Subject, found: Sequence[Protection]) -> list[AuditRow]:
    return inversion_rows(subject.model, subject.bench.pool, each=lambda: subject.told("records that fit gradients"))


def _replay(subject: Subject, found: Sequence[Protection]) -> list[AuditRow]:
    return replay_rows(subject.bench, each=lambda: subject.told("the protocol again"))


ATTACKS: dict[str, Entry] = {
    "latents": Entry(
        "ridge regression from messages and totals to the means of silos' latents",
        _each(lambda s, p: s.studies.latents(p)), _worlds, _with_latents,
    ),
    "information": Entry(
        "mutual information of messages with those means, up to its cap",
        _each(lambda s, p: s.studies.information(p)), lambda s, f: 0, _with_latents, in_all=False,
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
    "replay": Entry(
        "search for the latents that would make one individual's silo send what it sent", _replay, lambda s, f: 600,
        _replayable, in_all=False,
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
        _for_sfvi,
    ),
    "protocol": Entry(
        "probes of the secure sum itself: seeds, uniformity, replay, both secrets, keys",
        lambda s, found: protocol.protocol_rows(s.told, _kinds(found)),
        lambda s, found: protocol.work(_kinds(found)), _always,
    ),
}  # fmt: skip
