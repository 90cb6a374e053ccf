"""Choices of vertical federated inference, and what all parties derive from them.

    augmented (3.2)   z_j ~ N(eta_j, rho^2), y ~ p(y | sum_j z_j)
    power (3.3)       z_j ~ N(eta_j, rho^2), log-likelihood sum_j w_j log p(y | eta_j + sum_{k != j} z_k), w_j = 1/J

Section numbers are those of Hassan et al. (2024). rho is a standard deviation. The power likelihood is not normalised:
its bound may not be compared with another model's as evidence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from secure_fvi.aggregation.base import Block, BlockTable
from secure_fvi.algorithms.options import SCHEDULES, Schedule, check_schedule
from secure_fvi.algorithms.vertical.auxiliary import Amortised, Auto, Integrated, MeanField
from secure_fvi.algorithms.vertical.likelihoods import Likelihood
from secure_fvi.algorithms.vertical.marginal import marginal
from secure_fvi.disclosure import Declaration, Sums, drawn
from secure_fvi.errors import InputError
from secure_fvi.optimizers import Optimizer

#: The sums of one round: z_j, and in the power-likelihood model what the others need of silo j's likelihood.
AUXILIARY_PHASE, SLOPE_PHASE = "auxiliary", "slope"


class RunShape:
    """What follows from the model and the number of rounds, in variational runs and in SOUL."""

    model: Literal["augmented", "power"]
    rounds: int

    @property
    def is_power(self) -> bool:
        return self.model == "power"

    @property
    def phases(self) -> tuple[str, ...]:
        """The sums of a round, in order."""
        return (AUXILIARY_PHASE, SLOPE_PHASE) if self.is_power else (AUXILIARY_PHASE,)

    @property
    def most_rounds(self) -> int:
        return self.rounds

    @property
    def expected_calls(self) -> int:
        """Traced calls a silo makes."""
        return 2 * self.rounds


@dataclass(frozen=True)
class Vertical(RunShape):
    """One model, one family and one run.

    response: who knows y: "shared" by silos and server, or "private" to the server.
    family: of theta_j, as in `families.global_family`; "auto" is diagonal where batches are drawn, since their noise
    accumulates in correlations that few records inform. auxiliary: of z_j given theta_j.
    local_steps: updates a silo makes between two exchanges, for the same s. damping: share of their change that is
    kept; None keeps all of one step and 1/J of several, since J silos answer the same s at once.
    weight_concentration: Dirichlet prior of the likelihood weights w_j; None keeps them at 1/J. At 1 the prior is flat
    and a single silo takes all the weight.
    batch_size: records a round, the same at all parties by a shared seed; None uses all.
    rounds: how many; a run that has not settled by then says so. schedule: of the learning rate over them.
    average_last: the share of last iterates that is averaged.
    participation: share of silos asked in a round; an absent silo's last z_j stays in the sum, for at most
    max_staleness rounds: then it is asked again whatever the draw (augmented-variable model, all records a round).
    bound: largest absolute value of an element of a contribution; past it a silo refuses.
    """

    model: Literal["augmented", "power"] = "augmented"
    rho: float = 1.0
    response: Literal["shared", "private"] = "shared"
    family: Literal["auto", "diagonal", "full", "low_rank"] = "auto"
    auxiliary: Amortised | MeanField | Integrated | Auto = field(default_factory=Auto)
    local_steps: int = 1
    damping: float | None = None
    weight_concentration: float | None = None
    batch_size: int | None = None
    rounds: int = 4000
    learning_rate: float = 0.02
    schedule: Schedule = "linear"
    average_last: float = 0.25
    optimizer: str = "adam"
    participation: float = 1.0
    max_staleness: int = 0
    bound: float = 2.0**20

    name: ClassVar[str] = "vertical"
    importance_samples: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_response(self.model, self.response)
        for name in ("rho", "bound"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} must be positive and finite, not {getattr(self, name)}")
        for name in ("local_steps", "rounds", "batch_size"):
            value = getattr(self, name)
            if not (value is None and name == "batch_size") and (type(value) is not int or value < 1):
                raise InputError(f"{name} must be a whole number of at least 1, not {value!r}")
        if self.damping is not None and not 0 < self.damping <= 1:
            raise InputError(f"damping, the share of a change that is kept, lies in (0, 1], not {self.damping}")
        if self.weight_concentration is not None:
            if not self.is_power:
                raise InputError("likelihood weights belong to the power-likelihood model; use model = 'power'")
            if not 1 <= self.weight_concentration < math.inf:
                raise InputError(f"weight_concentration must be at least 1, not {self.weight_concentration}")
        if self.is_power and isinstance(self.auxiliary, Integrated):
            raise InputError(
                "in the power-likelihood model each silo sees the others' z, so that nobody can integrate it out; "
                "use an amortised or mean-field auxiliary"
            )
        check_schedule("schedule", self.schedule)
        if not 0 <= self.average_last <= 1:
            raise InputError(f"average_last must lie in [0, 1], not {self.average_last}")
        Optimizer(self.optimizer, self.learning_rate)
        self._check_staleness()

    def _check_staleness(self) -> None:
        if not 0 < self.participation <= 1:
            raise InputError(f"participation must lie in (0, 1], not {self.participation}")
        if type(self.max_staleness) is not int or self.max_staleness < 0:
            raise InputError(f"max_staleness must be a whole number of at least 0, not {self.max_staleness!r}")
        if (self.participation < 1) != (self.max_staleness > 0):
            raise InputError("participation below 1 and max_staleness above 0 belong together: give both or neither")
        if self.max_staleness and (self.is_power or self.batch_size is not None):
            raise InputError(
                "silos may be absent from rounds in the augmented-variable model with all records in each round only: "
                "the power likelihood needs every silo's slope, and a batch z_j that were sent before"
            )

    def declare(self, silos: int, private: bool) -> Declaration:
        return row_sums(self.phases, self.rounds, silos, self.participation, private)

    def resolved(self, likelihood: Likelihood) -> Vertical:
        """With the auxiliary family that is used. Raises InputError where `likelihood` cannot be integrated."""
        possible = not self.is_power and marginal(likelihood, 1.0) is not None
        if isinstance(self.auxiliary, Integrated) and not possible:
            raise InputError(
                f"a {type(likelihood).__name__} likelihood cannot be integrated over z; use another auxiliary"
            )
        if not isinstance(self.auxiliary, Auto):
            return self
        return replace(self, auxiliary=Integrated() if possible else Amortised())

    def seen_by_holder(self, likelihood: Likelihood, silos: int) -> Likelihood:
        """What the holder of the response takes derivatives of, in the sum that it gets from `silos` silos."""
        if not isinstance(self.auxiliary, Integrated):
            return likelihood
        found = marginal(likelihood, math.sqrt(silos) * self.rho, self.auxiliary.nodes)
        assert found is not None
        return found

    @property
    def family_in_use(self) -> str:
        return "diagonal" if self.family == "auto" and self.batch_size is not None else self.family

    def multiplier(self, round_: int) -> float:
        """Of the learning rate."""
        return float(SCHEDULES[self.schedule](round_ / self.rounds))

    def averages(self, round_: int) -> bool:
        """Whether the iterate after `round_` enters the average."""
        return round_ >= self.rounds * (1 - self.average_last)

    def kept(self, silos: int) -> float:
        """The damping in force among `silos` silos."""
        if self.damping is not None:
            return self.damping
        return 1.0 if self.local_steps == 1 else 1.0 / silos

    def tables(self, records: int, columns: int, gamma_size: int) -> dict[str, BlockTable]:
        weights = self.weight_concentration is not None
        return block_tables(self.model, records, columns, gamma_size, self.bound, weights)


_WITH_Z = ", its part of the objective, whether its own parameters still drift, its weight where weights are learned"


def row_sums(phases: tuple[str, ...], rounds: int, silos: int, participation: float, private: bool) -> Declaration:
    """What vertical sums are: every total has a row a record, what the silos' columns together say of a person."""
    what = {
        AUXILIARY_PHASE: "its auxiliary variable of each person" + ("" if private else _WITH_Z),
        SLOPE_PHASE: "its slope of the likelihood at each person, its gradient in the shared parameters gamma, and its "
        "weighted part of the log-likelihood",
    }
    sums = tuple(Sums(phase, rounds, what[phase], *drawn(silos, participation)) for phase in phases)
    keeps = "its parameters' posterior"
    return Declaration(rounds, sums, keeps, because=f"participation = {participation:g}")


def check_response(model: str, response: str) -> None:
    """Raise InputError for a model or a setting that does not exist, and for two that do not go together."""
    if model not in ("augmented", "power"):
        raise InputError(f"model '{model}' is unknown; choose augmented or power")
    if response not in ("shared", "private"):
        raise InputError(f"response '{response}' is unknown; choose shared or private")
    if model == "power" and response == "private":
        raise InputError(
            "the power-likelihood model needs the response at every silo, since each evaluates the likelihood; "
            "use model = 'augmented' where the response is private, or share it"
        )


def block_tables(
    model: str, records: int, columns: int, gamma_size: int, bound: float, weights: bool
) -> dict[str, BlockTable]:
    """The blocks of each phase for `records` records a round; every party derives the same.

    `local` is the part of the objective that needs no other silo, nats; `mass`, with learned `weights`, the sum of
    unnormalised weights.
    """
    first = [
        Block("auxiliary", (records, columns), bound),
        Block("local", (), bound * records),
        Block("unsettled", (), 1.0),  # 1 from a silo whose own parameters still drift
    ]
    if weights:
        first.append(Block("mass", (), bound))
    tables = {AUXILIARY_PHASE: BlockTable(tuple(first))}
    if model == "power":
        tables[SLOPE_PHASE] = BlockTable(
            (
                Block("slope", (records, columns), bound),
                Block("gamma", (gamma_size,), bound * records),
                Block("value", (), bound * records),
            )
        )
    return tables


def shared_batch(seed: int, round_: int, records: int, size: int | None) -> npt.NDArray[np.int64]:
    """Positions of the records of a round, sorted, drawn without replacement: the same at every party.

    Everyone knows who takes part, so that subsampling amplifies no privacy guarantee. Terms of records are to be
    weighted by records / size.
    """
    if size is None or size >= records:
        return np.arange(records)
    rng = np.random.default_rng([abs(seed), round_])
    return np.sort(rng.choice(records, size, replace=False)).astype(np.int64)
