"""What SFVI and SFVI-Avg share: q(Z_G, Z_S, Z_L) = q(Z_G) prod_j q(Z_Sj | Z_G) prod_i q(Z_i | Z_G, Z_Sj) of one model.

Families, optimisers and starts by the options, a silo's draws and its steps on its own latents, and the final sum,
which tells how far q is from a stationary point of the bound, and from the posterior (`stationarity`, `weighing`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation.base import Block, BlockTable
from secure_fvi.algorithms import refining, stationarity, weighing
from secure_fvi.algorithms.base import FINISH, ITERATION, Broadcast, LocalFit, Posterior, SiloView, Verdict
from secure_fvi.algorithms.kit import Blocks, Program, Rows, Sum, Totals, joined
from secure_fvi.algorithms.natural import Natural
from secure_fvi.algorithms.refining import REFINE, REFINED, Refiner
from secure_fvi.algorithms.stationarity import SiloSlope, as_natural, as_sent, final_draws, silo_inputs
from secure_fvi.algorithms.weighing import Weigher, points
from secure_fvi.errors import InputError
from secure_fvi.families import GlobalFamily, Params, global_family
from secure_fvi.families.conditional import ENCODER
from secure_fvi.later import Later
from secure_fvi.objective import SiloGradient
from secure_fvi.optimizers import Optimizer, mean_units
from secure_fvi.optimizers import local_units as local_units
from secure_fvi.randomness import server_draws, start_draws
from secure_fvi.trees import part, take

if TYPE_CHECKING:
    from secure_fvi.algorithms import final_server, refining_server
else:
    final_server = Later("secure_fvi.algorithms.final_server")
    refining_server = Later("secure_fvi.algorithms.refining_server")

RECORDS, OBJECTIVE = "records", "objective"


class Latents(NamedTuple):
    """Distributions of a silo's own latents, and their optimiser's state. Never leaves the silo."""

    record: Params  # variational parameters of its records, (N + 1, ...) each
    record_moments: Params
    silo: Params  # of its silo-level latents, (1, ...) each
    silo_moments: Params

    def taken(self, at: Tensor | None) -> Latents:
        """With the records at these rows alone; None: all."""
        return self._replace(record=take(self.record, at), record_moments=take(self.record_moments, at))


class Batch(NamedTuple):
    """Records in a step, and what is drawn for it. Never leaves the silo."""

    rows: Params  # (B, ...) each
    weights: Tensor  # (B,): what each counts, 0 for the spare row
    eps_record: Tensor  # (K, B, n_record)
    eps_silo: Tensor  # (1, n_silo)


#: Axes of records in `Latents` and `Batch`, for `Traced`; of families that couple records there are none.
LATENTS_AXES, BATCH_AXES = (0, 0, None, None), (0, 0, 1, None)


class StructuredProgram(Program):
    """A structured model's families and what follows from them, the same at every party."""

    def setup(self) -> None:
        config, problem = self.config, self.problem
        samples = config.importance_samples
        n_global, self.n_record, self.n_silo = (problem.layout.size(r) for r in ("global", "record", "silo"))
        self.family = self.family_of(n_global)
        self.local_family = config.local_family.build(self.n_record, n_global + self.n_silo, samples)
        self.silo_family = config.silo_family.build(self.n_silo, n_global, 1)
        self.samples = samples if self.n_record else 1
        self.optimizer = Optimizer(config.optimizer, config.learning_rate, config.optimizer_options)
        own_rate = config.local_learning_rate or config.learning_rate
        self.local_optimizer = Optimizer(config.optimizer, own_rate, config.optimizer_options)
        self.by_row = config.sampling_rate < 1 or self.by_record
        self._check_families()
        self.theta_start: Params = {**problem.start.theta, **self.local_family.init_theta(problem.dtype)}
        self.couples = self.local_family.sees_shift or self.silo_family.sees_shift
        self.public_draws = server_draws(problem.seed)
        self._slope = SiloSlope(problem, self.local_family, self.silo_family, self.samples)
        self._weigher = Weigher(problem, self.local_family, self.silo_family)
        self._refiner = Refiner(problem, self._weigher)

    def family_of(self, n: int) -> GlobalFamily:
        return global_family(self.config.family, n)

    def _check_families(self) -> None:
        if any(name.startswith(ENCODER) for name in self.problem.start.theta):
            raise InputError(f"no pyro.param may start with '{ENCODER}'")
        if self.by_row and self.local_family.couples_records:
            less = "record privacy needs another scale" if self.by_record else "use sampling_rate = 1 or another scale"
            raise InputError(f"a dense local scale couples all records of a silo; {less}")

    def start(self) -> Params:
        """eta_G before the first round. Everyone may see it."""
        draws = self.config.start_spread * start_draws(self.problem.seed, self.family.n)
        return self.family.init(self.move(self.problem.start.z_global + draws.to(self.problem.start.z_global)))

    def moved_theta(self) -> Params:
        """theta before the first round."""
        return {name: self.move(value) for name, value in self.theta_start.items()}

    def blank(self) -> Posterior:
        return Posterior(self.family, self.start(), self.moved_theta())

    def scalar(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=self.problem.dtype, device=self.problem.device)

    def lacks(self, message: Broadcast, scale: float) -> bool:
        """Whether silos that were asked are not in a total of this `scale`."""
        return scale * len(message.cohort) > len(self.problem.silos) * (1 + 1e-9)

    # ---- at a silo ----

    def fresh(self, record: Params, silo: Params) -> Latents:
        """These distributions with an optimiser that starts anew."""
        init = self.local_optimizer.init
        return Latents(record, init(record, by_row=self.by_row), silo, init(silo))

    def first_latents(self, z_record: Tensor, z_silo: Tensor) -> Latents:
        """Around these values (N + 1, n_record) and (n_silo,)."""
        return self.fresh(
            self.local_family.init(self.move(z_record)), self.silo_family.init(self.move(z_silo).unsqueeze(0))
        )

    def stepped(self, at: Latents, gradient: SiloGradient, rate: Tensor) -> Latents:
        """After a step on both levels, `rate` times as long as usual."""
        step = self.local_optimizer.step
        record = step(at.record, gradient.local, at.record_moments, rate, local_units(at.record))
        return Latents(*record, *step(at.silo, gradient.silo, at.silo_moments, rate, local_units(at.silo)))

    def drawn(self, key: int, view: SiloView) -> Rows | None:
        """Rows of a Poisson sample (B,); None: all."""
        return joined(view, key, self.config.sampling_rate)

    def batch(self, key: int, view: SiloView, rows: Rows | None, eps_silo: Tensor, chance: float = 1.0) -> Batch:
        """These rows, None for all, each of which had this `chance`. `key` names their draws, which are used once."""
        at, eps = self.at(rows), self.move(view.record_draws.normals(key, self.samples * self.n_record, rows))
        eps = eps.reshape(len(eps), self.samples, self.n_record).transpose(0, 1).contiguous()
        weights = view.weights if at is None else view.weights[at] / chance
        return Batch(take(view.rows, at), weights, eps, eps_silo)

    def at(self, rows: Rows | None) -> Tensor | None:
        """Rows, where tensors are."""
        return None if rows is None else torch.from_numpy(rows).to(self.problem.device)

    def fit_of(self, record: Params, silo: Params) -> LocalFit:
        return LocalFit(self.local_family, record, self.silo_family, silo, self.samples)

    # ---- the final sum ----

    def final_blocks(self) -> tuple[Block, ...]:
        """Of a diagonal or a full family, number of records aside."""
        found = stationarity.blocks(self.family.n, self.family.name == "full", self.config.bound)
        return found + weighing.blocks(self.problem, self.family.name, self.local_family)

    def named_q(self, message: Broadcast) -> Natural:
        """The q that a final sum's broadcast names, or one that repeats its parameters."""
        return as_natural(self.family, part(self.received(message, message.tensors), "eta"))

    def final_answer(self, sent: Params, record: Params, silo: Params, view: SiloView, first: int) -> Blocks:
        """The silo's terms at the q(Z_G) and theta that were `sent`, with its latents as they are reported. Keys from
        `first` on name draws, which are used once."""
        q, theta = as_natural(self.family, part(sent, "eta")), part(sent, "theta")
        eps = final_draws(self.problem.seed, q.n, q.full)
        keys = range(first, first + eps.shape[0] * eps.shape[1])
        found = self._slope(q, eps, theta, silo, silo_inputs(self, record, view, keys))
        table = BlockTable(self.final_blocks())
        if weighing.asked(table):
            where = points(self.problem, q)
            found = np.concatenate([found, self._weigher(q, where, theta, record, silo, view, keys.stop)])
        return table.split(as_sent(self.problem, table, found, view))

    def rest(self, found: Posterior, sums: Totals) -> final_server.Rest:
        """What the final sum over all silos says of `found`."""
        q = as_natural(self.family, found.eta)
        eps = final_draws(self.problem.seed, q.n, q.full)
        log_prior = self._log_prior(found.theta)
        return final_server.at_rest(self.problem, q, found.theta, log_prior, eps, sums, self.config.bound)

    def _log_prior(self, theta: Params) -> Callable[[Tensor], Tensor]:
        return lambda z: self.problem.density.log_prior(self.move(z), theta).to("cpu", torch.float64)

    # ---- and those that refine it ----

    @property
    def _judge(self) -> refining_server.Refiner:
        return refining_server.Refiner(self.problem, self._weigher)

    def with_refining(self, sums: dict[str, Sum]) -> dict[str, Sum]:
        """With the sums after the final one, where that one weighs q."""
        final = sums[FINISH]
        if not weighing.asked(BlockTable(final.blocks)):
            return sums
        records = [block for block in final.blocks if block.name == RECORDS]
        more = self._refiner.sum(final.when.rounds, final.sent, *records)
        more = more._replace(scalars=(*final.scalars, *more.scalars), known=final.known)
        return {**sums, REFINE: more}

    def refining_message(self, final: Broadcast, state: refining_server.Refining) -> Broadcast:
        """The broadcast of the final sum as one for the next sum."""
        scalars = {**final.scalars, ITERATION: float(state.sums)}
        tensors = {**final.tensors, refining.PROPOSAL: state.proposal}
        return final._replace(scalars=scalars, tensors=tensors, phase=REFINE)

    def first_refining(
        self, found: Posterior, rest: final_server.Rest, of_q: Verdict, settled: bool
    ) -> refining_server.Refining | None:
        """What comes after the final sum; None: nothing. settled: whether theta is where it ends."""
        if REFINE not in self.tables or not (settled or not found.theta):
            return None
        return self._judge.begun(as_natural(self.family, found.eta), rest, of_q.converged is True)

    def refined(
        self, state: refining_server.Refining, found: Posterior, message: Broadcast, sums: Totals, absent: bool
    ) -> refining_server.Refining:
        """After such a sum; absent: whether a silo was."""
        q, log_prior = as_natural(self.family, found.eta), self._log_prior(found.theta)
        return self._judge.step(state, message, sums, q, found.theta, log_prior, absent)

    def refining_answer(self, message: Broadcast, sent: Params, record: Params, silo: Params, view: SiloView) -> Blocks:
        """The silo's term of it."""
        q, theta = as_natural(self.family, part(sent, "eta")), part(sent, "theta")
        nats = self._refiner.nats(message, q, theta, record, silo, view)
        return {REFINED: self._refiner.told(nats, view)}


#: Entries of a row of a full scale matrix from which on their steps are shortened.
_LONG_ROW = 4


def global_units(family: GlobalFamily, eta: Params) -> Params:
    """The units in which q(Z_G) takes its steps, by parameter, "eta/..." each.

    An adaptive optimiser moves every entry of a full scale matrix by the learning rate, in directions that are mostly
    noise: over n rows of up to n entries the bound loses by n^2 times the square of such a step. Steps of long rows are
    shorter by their length, so that it loses no more in many dimensions than in few.
    """
    units = {"eta/loc": mean_units(family.stddev(eta))}
    if "lower" in eta and family.n > _LONG_ROW + 1:
        rows = torch.tril_indices(family.n, family.n, -1, device=eta["lower"].device)[0].to(eta["lower"])
        units["eta/lower"] = (_LONG_ROW / rows).clamp(max=1.0)
    return units
