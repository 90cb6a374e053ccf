"""What both halves of FedAvg, and of what averages as it does, derive from the model: parameters and blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from torch import Tensor

from secure_fvi.aggregation.base import Block, BlockTable
from secure_fvi.algorithms.base import Posterior, Problem, choose_cohort, cohort_size, form, one_phase
from secure_fvi.algorithms.fedavg import AVERAGE, COUNT
from secure_fvi.algorithms.schedules import Schedule
from secure_fvi.errors import InputError
from secure_fvi.families.gaussian import GlobalFamily
from secure_fvi.families.point import Point
from secure_fvi.privacy.settings import RecordDP, SiloDP
from secure_fvi.privacy.terms import Extent, Terms, agree
from secure_fvi.trees import Params, merge, part

ETA, THETA, RECORDS, SILOS, OBJECTIVE = "eta", "theta", "records", "silos", "objective"


class Averaging(Protocol):
    """What the frame and the server's half read of a configuration."""

    @property
    def name(self) -> str: ...
    @property
    def rounds(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def server_learning_rate(self) -> float: ...
    @property
    def server_momentum(self) -> float: ...
    @property
    def server_schedule(self) -> Schedule: ...
    @property
    def tolerance(self) -> float: ...
    @property
    def prior(self) -> bool: ...
    @property
    def weights(self) -> Literal["records", "equal"]: ...
    @property
    def participation(self) -> float: ...
    @property
    def total_records(self) -> int | None: ...
    @property
    def bound(self) -> float: ...
    @property
    def reach(self) -> float:
        """What `tolerance` is relative to."""
        ...

    without_prior: str  # the option that leaves the prior out, for a message


class FedAvgFrame:
    """A configuration bound to a problem. Every party builds the same one."""

    #: Totals that a round reports beside the change, nats; none under silo privacy.
    reported: tuple[str, ...] = (OBJECTIVE,)

    def __init__(self, config: Averaging, problem: Problem) -> None:
        self.config, self.problem = config, problem
        self.privacy = problem.privacy
        self.check_latents()
        self.family, eta = self.start_of_family()
        start = merge(**{ETA: eta, THETA: dict(sorted(problem.start.theta.items()))})
        self.start: Params = {name: self.move(value) for name, value in start.items()}
        self.by_records = config.weights == "records"
        self.counts_first = config.prior and config.total_records is None
        if self.privacy is not None:
            self._check_private()
        self.changes = tuple(Block(name, tuple(v.shape), config.bound) for name, v in self.start.items())
        self.tables, self.terms = self._tables()
        before = {COUNT: problem.silos} if self.counts_first else None
        forms = {phase: form(self.start, "prior", terms=self.terms.get(phase)) for phase in (COUNT, AVERAGE)}
        self.order = one_phase(AVERAGE, config.rounds, self.cohort, forms, before)

    def cohort(self, round_: int) -> tuple[str, ...]:
        """The silos asked in a round."""
        return choose_cohort(self.problem.silos, self.config.participation, self.problem.seed, round_)

    def check_latents(self) -> None:
        layout = self.problem.layout
        local = [site.name for role in ("record", "silo") for site in layout.of(role)]
        if local:
            raise InputError(
                f"fedavg is for models without local latents, and this one has {', '.join(local)}; sum them out of "
                "the model, or use sfvi-avg"
            )

    def start_of_family(self) -> tuple[GlobalFamily, Params]:
        """What the averaged point stands for, and where it starts."""
        family = Point(self.problem.layout.size("global"))
        return family, family.init(self.problem.start.z_global)

    def objective(self, point: Params, reported: Mapping[str, float]) -> float:
        """log p(y | w) + log p(w) in nats, from the totals that were reported of `point`."""
        posterior = self.posterior(point)
        prior = self.problem.density.log_prior(posterior.eta["loc"], posterior.theta) if self.config.prior else 0
        return reported[OBJECTIVE] + float(prior)

    def posterior(self, point: Params) -> Posterior:
        return Posterior(self.family, part(point, ETA), part(point, THETA))

    def _check_private(self) -> None:
        if isinstance(self.privacy, RecordDP):
            raise InputError(
                f"{self.config.name} takes no record privacy: its local steps see whole records again and again "
                "without noise; use unit = 'silo', or the algorithm sfvi"
            )
        if self.by_records:
            raise InputError(
                f"under silo privacy {self.config.name} needs weights = 'equal': numbers of records are not released"
            )
        if self.counts_first:
            raise InputError(
                f"under silo privacy {self.config.name} needs total_records, a public figure for all silos' records "
                f"together, or {self.config.without_prior}, since counting them would release their number"
            )

    def _tables(self) -> tuple[dict[str, BlockTable], dict[str, Terms]]:
        config = self.config
        if isinstance(self.privacy, SiloDP):
            extent = Extent(sum(b.size for b in self.changes), 0, int(self.privacy.target_quantile is not None))
            cohort = cohort_size(len(self.problem.silos), config.participation)
            terms = agree(self.privacy, cohort, 1.0, config.rounds, extent)
            return {AVERAGE: terms.table(self.changes, [])}, {AVERAGE: terms}
        counts = (Block(RECORDS, (), 2.0**31, integer=True), Block(SILOS, (), 1.0, integer=True))
        tables = {COUNT: BlockTable(counts)} if self.counts_first else {}
        reported = [Block(name, (), config.bound) for name in self.reported]
        tables[AVERAGE] = BlockTable((*counts, *reported, *self.changes))
        return tables, {}

    def move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.problem.device, self.problem.dtype)
