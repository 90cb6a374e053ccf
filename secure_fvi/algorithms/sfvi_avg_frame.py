"""What both halves of SFVI-Avg derive from the model: phases, blocks, and the arithmetic of covariances.

A contribution is a weight times the change of a silo's parameters from those that it was sent, so that without
privacy nothing is lost, and under silo privacy what is clipped is the change. A full covariance travels as the term of
one Bures iteration at S, the covariance that was sent (aggregation.barycenter); the change form would not help it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation.barycenter import ROOT, WEIGHT, Gaussian, full_contribution, next_covariance
from secure_fvi.aggregation.base import Block, BlockTable, FloatArray
from secure_fvi.algorithms import stationarity, weighing
from secure_fvi.algorithms.base import ITERATION, Form, Order, Phase, Problem, choose_cohort, cohort_size, form
from secure_fvi.algorithms.sfvi_avg import BURES, COUNT, FINISH, MERGE, SFVIAvg
from secure_fvi.algorithms.sfvi_avg_trusted import LARGEST, trusted_blocks
from secure_fvi.algorithms.sfvi_frame import SFVIFrame
from secure_fvi.errors import InputError
from secure_fvi.families import Params
from secure_fvi.privacy.settings import RecordDP, SiloDP
from secure_fvi.privacy.terms import Extent, Terms, agree
from secure_fvi.trees import merge

#: A merged sd is at least this share of the one before: noise must not make it negative.
LEAST_SD = 0.1

RECORDS, SILOS, LOC, SD, OBJECTIVE, THETA = "records", "silos", "loc", "sd", "objective", "theta/"


class SFVIAvgFrame:
    """A configuration bound to a problem. Every party builds the same one."""

    def __init__(self, config: SFVIAvg, problem: Problem) -> None:
        self.config, self.problem = config, problem
        privacy = problem.privacy
        if isinstance(privacy, RecordDP):
            raise InputError(
                "sfvi-avg takes no record privacy: its local steps see whole records again and again without noise; "
                "use unit = 'silo', or the algorithm sfvi"
            )
        self.base = SFVIFrame(config.steps(), problem._replace(privacy=None))
        self.family = self.base.family
        self.full = self.family.name == "full"
        self.theta_start = self.base.theta_start
        self.private = isinstance(privacy, SiloDP)
        self.trusted = config.reveals_silos
        if self.trusted and self.family.n > LARGEST:
            raise InputError(
                f"a trusted barycenter is for at most {LARGEST} global dimensions, not {self.family.n}; use "
                "barycenter = 'secure', which is one sum for family = 'diagonal'"
            )
        if self.private:
            self._check_private()
        self.changes = self._changes()
        self.tables, self.terms = self._tables()
        phases = {p: phase for p, phase in self._phases().items() if p in self.tables}
        self.order = Order(phases, self.cohort, {p: self._form(p) for p in phases})

    def cohort(self, round_: int, phase: str) -> tuple[str, ...]:
        """The silos asked for one of a round's sums: all of them before the first round and after the last."""
        if phase not in (MERGE, BURES):
            return self.problem.silos
        return choose_cohort(self.problem.silos, self.config.participation, self.problem.seed, round_)

    def _phases(self) -> dict[str, Phase]:
        rounds, again = self.config.rounds, range(1, self.config.bures_iterations)
        return {
            COUNT: Phase(range(1), 1, counts=False),
            MERGE: Phase(range(rounds), rounds),
            BURES: Phase(range(rounds), rounds * len(again), again),
            FINISH: Phase(range(1, rounds + 1), 1, ends=True, counts=False),
        }

    def _form(self, phase: str) -> Form:
        known = {"records": self.config.total_records}
        if phase == BURES:
            n = self.family.n
            return form({ROOT: (n * (n + 1) // 2,)}, "records", "rate", ITERATION, known=known)
        sent = merge(eta=self.base.start(), theta=self.theta_start)
        return form(sent, "records", "rate", terms=self.terms.get(phase), known=known)

    @property
    def counts_first(self) -> bool:
        return self.config.total_records is None

    @property
    def by_records(self) -> bool:
        return self.config.weights == "records"

    def _check_private(self) -> None:
        if self.trusted:
            raise InputError("under silo privacy sfvi-avg needs barycenter = 'secure'")
        if self.full:
            raise InputError("under silo privacy sfvi-avg needs family = 'diagonal': noise breaks a Bures iteration")
        if self.by_records:
            raise InputError("under silo privacy sfvi-avg needs weights = 'equal': numbers of records are not released")
        if self.config.final_local_steps:
            raise InputError("under silo privacy no broadcast follows the last merge; leave final_local_steps at 0")
        if self.counts_first:
            raise InputError(
                "under silo privacy sfvi-avg needs total_records, a public figure for all silos' records together, "
                "since counting them would release their number"
            )

    def _changes(self) -> tuple[Block, ...]:
        """What every merge sums besides weights, roots and the objective."""
        bound, n = self.config.bound, self.family.n
        shapes: dict[str, tuple[int, ...]] = {} if self.trusted else {LOC: (n,), **({} if self.full else {SD: (n,)})}
        shapes |= {THETA + name: tuple(v.shape) for name, v in sorted(self.theta_start.items())}
        return tuple(Block(name, shape, bound) for name, shape in shapes.items())

    def _tables(self) -> tuple[dict[str, BlockTable], dict[str, Terms]]:
        if self.private:
            terms = self._terms()
            return {MERGE: terms.table(self.changes, [])}, {MERGE: terms}
        records = Block(RECORDS, (), 2.0**31, integer=True)
        weight = records if self.by_records else Block(SILOS, (), 1.0, integer=True)
        n, bound = self.family.n, self.config.bound
        objective = Block(OBJECTIVE, (), bound)
        root = (Block(ROOT, (n * (n + 1) // 2,), bound),) if self.full else ()
        silos = trusted_blocks(len(self.problem.silos), n, self.full, bound) if self.trusted else root
        counts = (records,) if self.by_records else (records, weight)
        tables = {COUNT: BlockTable((records, objective))} if self.counts_first else {}
        tables[MERGE] = BlockTable((*counts, objective, *self.changes, *silos))
        if self.full and self.config.bures_iterations > 1:
            tables[BURES] = BlockTable((weight, *root))
        final = stationarity.blocks(n, self.full, bound)
        final += weighing.blocks(self.problem, self.family.name, self.base.local_family)
        tables[FINISH] = BlockTable((records, objective, *final))
        return tables, {}

    def _terms(self) -> Terms:
        privacy, config = self.problem.privacy, self.config
        assert isinstance(privacy, SiloDP)
        extent = Extent(sum(b.size for b in self.changes), 0, int(privacy.target_quantile is not None))
        return agree(privacy, cohort_size(len(self.problem.silos), config.participation), 1.0, config.rounds, extent)

    def weight(self, records: int) -> int:
        """A silo's weight in the merge."""
        return records if self.by_records else 1

    def total_weight(self, blocks: dict[str, FloatArray], scale: float) -> float:
        """Of the silos in a total, or, under privacy, their number, which the server knows anyway."""
        if self.private:
            return float(round(len(self.problem.silos) / scale))
        return float(blocks[RECORDS if self.by_records else SILOS])

    def after_iteration(self, covariance: FloatArray, root: FloatArray) -> FloatArray:
        """S of the next Bures iteration, from S (n, n) and the mean of the silos' terms, a packed triangle."""
        table = BlockTable((Block(WEIGHT, (1,), 1.0, integer=True), Block(ROOT, root.shape, self.config.bound)))
        return next_covariance(covariance, table, np.concatenate([[1.0], root]))


def bures_term(own: FloatArray, weight: int, at: FloatArray) -> FloatArray:
    """weight (S^1/2 Sigma_j S^1/2)^1/2, packed, for Sigma_j = `own` and S = `at` (n, n)."""
    gaussian = Gaussian(np.zeros(len(own)), own)
    return full_contribution(gaussian, weight, at, first=False)[1:]


def full_parameters(loc: Tensor, covariance: FloatArray) -> Params:
    """eta of the full family with this mean (n,) and covariance (n, n). Raises InputError where it is no covariance."""
    matrix = torch.from_numpy(covariance)
    factor, info = torch.linalg.cholesky_ex(0.5 * (matrix + matrix.T))
    if int(info) or not bool(factor.isfinite().all()):
        raise InputError("the merged covariance is not positive definite; lower learning_rate or rescale the data")
    scale = factor.diagonal()
    rows, columns = torch.tril_indices(len(scale), len(scale), -1)
    lower = (factor / scale.unsqueeze(-1))[rows, columns]
    return {"loc": loc, "log_scale": scale.log().to(loc), "lower": lower.to(loc)}
