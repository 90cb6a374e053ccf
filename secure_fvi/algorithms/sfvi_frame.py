"""What both halves of SFVI derive from the model: families, optimiser, the blocks of a contribution."""

from __future__ import annotations

import torch
from torch import Tensor

from secure_fvi.aggregation.base import Block, BlockTable
from secure_fvi.algorithms import stationarity, weighing
from secure_fvi.algorithms.base import ROUND_PHASE, Form, Problem, choose_cohort, cohort_size, form, one_phase
from secure_fvi.algorithms.sfvi import FINISH, SFVI
from secure_fvi.errors import InputError
from secure_fvi.families import Params, global_family
from secure_fvi.families.conditional import ENCODER
from secure_fvi.optimizers import Optimizer
from secure_fvi.privacy.settings import RecordDP, SiloDP
from secure_fvi.privacy.terms import Extent, Terms, agree
from secure_fvi.randomness import start_draws
from secure_fvi.trees import merge


class SFVIFrame:
    """A configuration bound to a problem. Every party builds the same one."""

    def __init__(self, config: SFVI, problem: Problem) -> None:
        self.config, self.problem = config, problem
        layout, samples = problem.layout, config.importance_samples
        n_global, n_record, n_silo = (layout.size(r) for r in ("global", "record", "silo"))
        self.n_record, self.n_silo = n_record, n_silo
        self.family = global_family(config.family, n_global, config.rank)
        self.local_family = config.local_family.build(n_record, n_global + n_silo, samples)
        self.silo_family = config.silo_family.build(n_silo, n_global, 1)
        self.optimizer = Optimizer(config.optimizer, config.learning_rate, config.optimizer_options)
        own_rate = config.local_learning_rate or config.learning_rate
        self.local_optimizer = Optimizer(config.optimizer, own_rate, config.optimizer_options)
        self.samples = samples if n_record else 1
        self.by_record = isinstance(problem.privacy, RecordDP)
        self.by_row = config.sampling_rate < 1 or self.by_record
        self._check()
        self.theta_start = {**problem.start.theta, **self.local_family.init_theta(problem.dtype)}
        self.couples = self.local_family.sees_shift or self.silo_family.sees_shift
        n = self.family.n
        shapes: dict[str, tuple[int, ...]] = {"direct": (n,), **({"path": (n,)} if self.couples else {})}
        shapes |= {f"theta/{name}": tuple(v.shape) for name, v in sorted(self.theta_start.items())}
        self.gradient_blocks = tuple(Block(name, shape, config.bound) for name, shape in shapes.items())
        self.terms = self._terms()
        self.terms_by_phase = {ROUND_PHASE: self.terms} if self.terms is not None else {}
        self.table = self._table()
        self.tables = {ROUND_PHASE: self.table}
        if self.terms is None and config.iterations is None and self.family.name in ("diagonal", "full"):
            final = stationarity.blocks(self.family.n, self.family.name == "full", config.bound)
            final += weighing.blocks(problem, self.family.name, self.local_family)
            self.tables[FINISH] = BlockTable((*final, Block("records", (), 2.0**31, integer=True)))
        self.order = one_phase(
            ROUND_PHASE, config.own_rounds, self.cohort, self._forms(),
            last={FINISH} & self.tables.keys(), silos=problem.silos,
        )  # fmt: skip

    def cohort(self, round_: int) -> tuple[str, ...]:
        """The silos asked in a round."""
        return choose_cohort(self.problem.silos, self.config.participation, self.problem.seed, round_)

    def _check(self) -> None:
        config, privacy = self.config, self.problem.privacy
        if any(name.startswith(ENCODER) for name in self.problem.start.theta):
            raise InputError(f"no pyro.param may start with '{ENCODER}'")
        if self.by_row and not self.optimizer.traceable:
            raise InputError(
                f"optimizer '{config.optimizer}' has no step count by record; for minibatches and record privacy use "
                "adam or sgd"
            )
        if self.local_family.couples_records:
            if self.by_record:
                raise InputError(
                    "a dense local scale couples all records of a silo; record privacy needs another scale"
                )
            if self.by_row:
                raise InputError(
                    "a dense local scale couples all records of a silo; use sampling_rate = 1 or another scale"
                )
        if privacy is not None and config.iterations is None:
            raise InputError(
                "under differential privacy give iterations: a job is charged for all its rounds beforehand"
            )

    def _terms(self) -> Terms | None:
        privacy, config = self.problem.privacy, self.config
        if privacy is None:
            return None
        shared = sum(b.size for b in self.gradient_blocks)
        hidden = sum(v.numel() for v in self.silo_family.init(torch.zeros(1, self.n_silo)).values())
        if isinstance(privacy, RecordDP):
            extent = Extent(shared, hidden, int(privacy.objective_share > 0))
        else:
            extent = Extent(shared, 0, int(isinstance(privacy, SiloDP) and privacy.target_quantile is not None))
        cohort = cohort_size(len(self.problem.silos), config.participation)
        return agree(privacy, cohort, config.sampling_rate, config.own_rounds, extent)

    def _table(self) -> BlockTable:
        records = Block("records", (), 2.0**31, integer=True)
        if self.terms is None:
            return BlockTable((*self.gradient_blocks, Block("objective", (), self.config.bound), records))
        return self.terms.table(self.gradient_blocks, [records])

    def _forms(self) -> dict[str, Form]:
        theta, n = {f"theta/{name}": value for name, value in self.theta_start.items()}, (self.family.n,)
        sent = form({"z_global": n, "shift": n, **theta}, "scale", "averaging", "stage", terms=self.terms)
        return {ROUND_PHASE: sent, FINISH: form(merge(eta=self.start(), theta=self.theta_start))}

    def start(self) -> Params:
        """eta_G before the first round. Everyone may see it."""
        draws = self.config.start_spread * start_draws(self.problem.seed, self.family.n)
        return self.family.init(self.move(self.problem.start.z_global + draws.to(self.problem.start.z_global)))

    @property
    def rate(self) -> float:
        """What a released sum over records has to be divided by."""
        return self.config.sampling_rate if self.by_record else 1.0

    def move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.problem.device, self.problem.dtype)

    def scalar(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=self.problem.dtype, device=self.problem.device)


def mean_units(stddev: Tensor) -> Tensor:
    """The unit in which a mean takes its steps: 1, or the posterior sd where that is larger.

    Means of wide posteriors would otherwise creep, since an adaptive optimiser's steps have the length of the
    learning rate whatever the scale of the parameter.
    """
    return stddev.clamp(min=1.0)


def local_units(params: Params) -> Params:
    return {"loc": mean_units(params["log_scale"].exp())} if params else {}
