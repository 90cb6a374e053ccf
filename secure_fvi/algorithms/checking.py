"""A posterior predictive check of a formula whose tables lie apart: numbers of the response, observed and replicated,
are added up after the last sum (Gelman, Meng and Stern, Statistica Sinica 1996, section 2.3).

    server:  once the fit has ended, and not unconverged, sends `replicates` draws of the posterior of global sites,
             with what the final sum's broadcast named
    silo:    runs the model forward at each, effects of its own groups drawn anew, and contributes the numbers of
             `MixedModel.numbers`: of its table, and of each replicate

A silo answers at no other point than one near the q at which it answered the final sum, whose parameters the broadcast
repeats (`Silo` holds it to them): far out, where slopes are steps, totals would count the rows beyond each, and say
where each record's covariates lie. Near q they tell what that sum's likelihoods do; a policy lists both as one.

A program around that of the fit, whose messages stay what they are. The silo's own randomness makes its replicates.
Under differential privacy there is no such sum: a table's own numbers have no noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from secure_fvi.algorithms import hiding
from secure_fvi.algorithms.base import FINISH, Broadcast, LocalFit, Pending, Phase, Posterior, SiloView, Step, Verdict
from secure_fvi.algorithms.kit import Answer, Program, RecordAnswer, RowAnswer, Sum, Totals
from secure_fvi.algorithms.weighing import q_part, sds_from
from secure_fvi.disclosure import Sums
from secure_fvi.errors import InputError, ProtocolError

#: The phase, its block, and the draws that its broadcast carries.
CHECK, REPLICATED, DRAWS = "check", "replicated", "draws"
#: Of a number over all silos, in the response's standardised unit; a silo with one beyond its share hides them all.
_UP_TO = 2.0**40
#: Draws at most, and how many sds of the final q beyond those that a normal has they may lie from its mean.
_MOST, _BEYOND = 1000, 8.0
#: To how much a total over all silos is known (`hiding.read`), in that unit.
STEP = 2.0**-8


def declared(replicates: int | None, silos: int) -> tuple[Sums, ...]:
    """The check's sum, where there is one."""
    if replicates is None:
        return ()
    what = (
        "numbers of its response, of the table and of replicates that the model makes at points that the server names: "
        "rows, records, sums and sums of squares of values and of records' means, and rows at each level, or at 0"
    )
    return (Sums(CHECK, 1, what, silos, besides=True, likelihood=True),)


def within(n: int) -> float:
    """How many of q's sds draws of n dimensions may lie from its mean."""
    return math.sqrt(n) + _BEYOND


class CheckedState(NamedTuple):
    """The server's state: of the fit, and of the check."""

    own: Any
    checking: bool  # whether the check's sum comes next
    named: dict[str, Tensor]  # what the final sum's broadcast named
    numbers: dict[str, Tensor]  # and its scalars
    totals: Tensor  # (1 + replicates, numbers): of the tables, then of replicates; NaN where they are not known

    @property
    def phase(self) -> str:
        return CHECK if self.checking else str(getattr(self.own, "phase", ""))


class CheckedProgram(Program):
    """A fit by `config`, and its check."""

    def setup(self) -> None:
        problem, self._replicates = self.problem, self.config.replicates
        if problem.privacy is not None:
            raise InputError(
                "replicates: under differential privacy tables are not compared, which have no noise; leave it out"
            )
        self._numbers = problem.model.numbers
        if not self._numbers or problem.layout.theta:
            raise InputError(
                "replicates: which numbers of a table to compare is known for formulas alone; leave it out"
            )
        if self._replicates > _MOST:
            raise InputError(f"replicates: at most {_MOST}, not {self._replicates}")
        self._own: Any = replace(self.config, replicates=None).server(problem)
        if FINISH not in self._own.parts:
            raise InputError(
                "replicates: draws are near the q of a final sum, which this run has none of: leave out the fixed "
                "number of iterations, or replicates"
            )
        self._final: Sum = self._own.parts[FINISH]

    def sums(self) -> dict[str, Sum]:
        rounds = Phase(range(self._own.most_rounds + 1), ends=True)
        shape = 1 + self._replicates, self._numbers
        self._block = hiding.block(REPLICATED, shape, _UP_TO / len(self.problem.silos))
        sent = {**self._final.sent, DRAWS: (self._replicates, self.problem.layout.size("global"))}
        check = Sum((self._block,), rounds, sent, scalars=self._final.scalars, known=self._final.known)
        return {**self._own.parts, CHECK: check}

    def cohort(self, round_: int) -> tuple[str, ...]:
        return self._own.cohort(round_)

    def asked(self, round_: int, phase: str) -> tuple[str, ...]:
        return self.problem.silos if phase == CHECK else self._own.asked(round_, phase)

    # ---- server ----

    def init(self) -> CheckedState:
        nothing = torch.full((1 + self._replicates, self._numbers), math.nan, dtype=torch.float64)
        named = {
            name: like.detach().cpu() if isinstance(like, Tensor) else torch.zeros(like, dtype=torch.float64)
            for name, like in self._final.sent.items()
        }
        numbers = {name: torch.zeros((), dtype=torch.float64) for name in self._final.scalars}
        return CheckedState(self._own.init(), False, named, numbers, nothing)

    def broadcast(self, state: CheckedState, index: int, accepted: Mapping[str, int]) -> Broadcast:
        if not state.checking:
            return self._own.broadcast(state.own, index, accepted)
        draws = self.posterior(state).draws(self._replicates, self.problem.seed).to("cpu", torch.float64)
        numbers = {name: float(value) for name, value in state.numbers.items()}
        named = Broadcast(self.rounds(state), index, accepted, self.problem.silos, numbers, dict(state.named), CHECK)
        q = self._own.named_q(named)
        far = (sds_from([q_part(q)], draws) / (0.999 * within(q.n))).clamp(min=1.0)
        draws = q.mean() + (draws - q.mean()) / far[:, None]
        return named._replace(tensors={**state.named, DRAWS: draws})

    def step(self, state: CheckedState, message: Broadcast, sums: Totals, scale: float) -> tuple[CheckedState, Step]:
        if message.phase == CHECK:
            state = state._replace(checking=False)
            told = sums[REPLICATED]
            if scale == 1 and not hiding.unreadable(told, self._block).any():  # of all silos
                totals = hiding.read(told, self._block, len(self.problem.silos))
                state = state._replace(totals=torch.from_numpy(totals))
            return state, Step(math.nan, 0.0, None, CHECK, True)
        if message.phase == FINISH:
            named = {name: message.tensors[name].detach().cpu() for name in state.named}
            numbers = {name: torch.tensor(float(message.scalars[name]), dtype=torch.float64) for name in state.numbers}
            state = state._replace(named=named, numbers=numbers)
        own, step = self._own.step(state.own, message, sums, scale)
        checking = step.finished and self._own.verdict(own).converged is not False
        return state._replace(own=own, checking=checking), step._replace(finished=step.finished and not checking)

    def replicated(self, state: CheckedState) -> Tensor | None:
        return None if bool(state.totals.isnan().any()) else state.totals

    def rounds(self, state: CheckedState) -> int:
        return self._own.rounds(state.own)

    def posterior(self, state: CheckedState) -> Posterior:
        return self._own.posterior(state.own)

    def verdict(self, state: CheckedState) -> Verdict:
        return self._own.verdict(state.own)

    def metrics(self, state: CheckedState) -> dict[str, float | None]:
        return self._own.metrics(state.own)

    # ---- silo ----

    def init_local(self, view: SiloView) -> Any:
        return self._own.init_local(view)

    def local_fit(self, local: Any) -> LocalFit:
        return self._own.local_fit(local)

    def commit(self, local: Any, pending: Pending, accepted: int) -> Any:
        return self._own.commit(local, pending, accepted)

    def answer(self, message: Broadcast, local: Any, view: SiloView) -> Answer | RecordAnswer | RowAnswer:
        if message.phase != CHECK:
            return self._own.answer(message, local, view)
        q, draws = self._own.named_q(message), message.tensors[DRAWS].to("cpu", torch.float64)
        if not bool((sds_from([q_part(q)], draws) <= within(q.n)).all()):
            raise ProtocolError(
                f"silo '{view.silo}': the draws that the server names for the check are not near the final q: one is "
                f"more than {within(q.n):.0f} sds off"
            )
        rows = {name: value[: view.size] for name, value in view.rows.items()}
        count = math.prod(self._block.shape)
        first, *others = hiding.uniforms(view, 1 + count)
        try:
            at = self.move(message.tensors[DRAWS])
            found = self.problem.model.replicated(self.problem, at, rows, int(first * 2**53)).numpy().ravel()
        except (ValueError, RuntimeError):  # what distributions say of a point that is none of theirs
            found = np.full(count // 2, math.inf)
        return Answer({REPLICATED: hiding.all_or_none(found, self._block, view, np.array(others))}, local)
