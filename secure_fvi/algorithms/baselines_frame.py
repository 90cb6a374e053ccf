"""What both halves of a baseline derive from the model: PVI's frame without sites, the phases and their blocks."""

from __future__ import annotations

from secure_fvi.aggregation.base import Block, BlockTable
from secure_fvi.algorithms.base import ROUND_PHASE, Problem, form, one_phase
from secure_fvi.algorithms.baselines import BCM, COUNT, Baseline
from secure_fvi.algorithms.pvi import PVI
from secure_fvi.algorithms.pvi_frame import PVIFrame
from secure_fvi.errors import InputError
from secure_fvi.privacy.settings import RecordDP


class BaselineFrame:
    """A configuration bound to a problem. Every party builds the same one.

    `base` is PVI with the same schedule: families, who is asked in a round, and what a job under privacy costs.
    """

    def __init__(self, config: Baseline, problem: Problem) -> None:
        self.config, self.problem = config, problem
        if isinstance(problem.privacy, RecordDP):
            raise InputError(f"{config.name} takes no record privacy; use SiloDP, whose unit is the silo, or SFVI")
        if problem.start.theta:
            raise InputError(f"{config.name} learns no pyro.param; use PVI")
        self.split = isinstance(config, BCM) and config.prior == "split"
        self.public_records = config.total_records if isinstance(config, BCM) else None
        self.counts_first = self.split and self.public_records is None
        if self.counts_first and problem.privacy is not None:
            raise InputError(
                "under silo privacy bcm with prior = 'split' needs total_records, a public figure for all silos' "
                "records together, since counting them would release their number"
            )
        self.all_at_once = isinstance(config, BCM)
        self.rounds = config.most_rounds if self.all_at_once else config.most_rounds * len(problem.silos)
        self.base = PVIFrame(self._as_pvi(), problem)
        self.terms = self.base.terms_by_phase
        self.tables = self._tables()
        before = {COUNT: problem.silos} if self.counts_first else None
        scalars, sent = (["records"] if self.split else []), {"q": (self.base.packed,)}
        known, phases = {"records": self.public_records}, (COUNT, ROUND_PHASE)
        forms = {phase: form(sent, *scalars, terms=self.terms.get(phase), known=known) for phase in phases}
        self.order = one_phase(ROUND_PHASE, self.rounds, self.base.cohort, forms, before)

    def _as_pvi(self) -> PVI:
        if self.all_at_once:
            return PVI(rounds=self.rounds, damping=1.0, **self.config.shared())
        return PVI(rounds=self.rounds, schedule="sequential", reveal_changes=True, **self.config.shared())

    def _tables(self) -> dict[str, BlockTable]:
        if self.base.terms is not None:
            return {ROUND_PHASE: self.base.terms.table(self.base.released, [])}
        records = Block("records", (), 2.0**31, integer=True)
        skipped = Block("skipped", (), 1.0, integer=True)  # silos whose local fit ran off: they change nothing
        # A single silo's number of records is nobody's business; all silos' tells whether one was lost.
        counts = (records, skipped) if self.all_at_once else (skipped,)
        tables = {ROUND_PHASE: BlockTable((*self.base.released, *counts))}
        return {COUNT: BlockTable((records,)), **tables} if self.counts_first else tables
