"""What both halves of FedAvg derive from the model: the parameters, and the blocks of a contribution."""

from __future__ import annotations

from torch import Tensor

from secure_fvi.aggregation.base import Block, BlockTable
from secure_fvi.algorithms.base import Problem, cohort_size
from secure_fvi.algorithms.fedavg import AVERAGE, COUNT, FedAvg
from secure_fvi.errors import InputError
from secure_fvi.families.point import Point
from secure_fvi.privacy.settings import RecordDP, SiloDP
from secure_fvi.privacy.terms import Extent, Terms, agree
from secure_fvi.trees import Params

Z, THETA, RECORDS, SILOS, OBJECTIVE = "z", "theta/", "records", "silos", "objective"


class FedAvgFrame:
    """A configuration bound to a problem. Every party builds the same one."""

    def __init__(self, config: FedAvg, problem: Problem) -> None:
        self.config, self.problem = config, problem
        layout, self.privacy = problem.layout, problem.privacy
        local = [site.name for role in ("record", "silo") for site in layout.of(role)]
        if local:
            raise InputError(
                f"fedavg is for models without local latents, and this one has {', '.join(local)}; sum them out of "
                "the model, or use sfvi-avg"
            )
        self.family = Point(layout.size("global"))
        start = {Z: problem.start.z_global} | {THETA + n: v for n, v in sorted(problem.start.theta.items())}
        self.start: Params = {name: self.move(value) for name, value in start.items()}
        self.by_records = config.weights == "records"
        self.counts_first = config.prior and config.total_records is None
        if self.privacy is not None:
            self._check_private()
        self.changes = tuple(Block(name, tuple(v.shape), config.bound) for name, v in self.start.items())
        self.tables, self.terms = self._tables()

    def _check_private(self) -> None:
        if isinstance(self.privacy, RecordDP):
            raise InputError(
                "fedavg takes no record privacy: its local steps see whole records again and again without noise; "
                "use unit = 'silo', or the algorithm sfvi"
            )
        if self.by_records:
            raise InputError("under silo privacy fedavg needs weights = 'equal': numbers of records are not released")
        if self.counts_first:
            raise InputError(
                "under silo privacy fedavg needs total_records, a public figure for all silos' records together, or "
                "prior = False, since counting them would release their number"
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
        tables[AVERAGE] = BlockTable((*counts, Block(OBJECTIVE, (), config.bound), *self.changes))
        return tables, {}

    def move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.problem.device, self.problem.dtype)

    def theta(self, point: Params) -> Params:
        return {name.removeprefix(THETA): value for name, value in point.items() if name.startswith(THETA)}
