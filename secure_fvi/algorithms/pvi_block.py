"""Consecutive local steps of PVI as one pure function, traced and compiled: calls cost more than small steps do."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from secure_fvi.algorithms.pvi_frame import PVIFrame
from secure_fvi.algorithms.pvi_local import gains_times, natural_step, reanchored_records, reanchored_silo, split_theta
from secure_fvi.algorithms.pvi_steps import GlobalSteps
from secure_fvi.algorithms.sfvi_frame import local_units
from secure_fvi.compiled import Traced
from secure_fvi.families import Params
from secure_fvi.objective import silo_gradient

#: Steps in a block at most. Records' latents stay out of longer blocks: a batch's would have to be written back first.
_LONGEST = 5
#: Natural gradients of a silo's latents go so many times as far as its learning rate says, which is Adam's.
_NATURAL = 6.0


class Carry(NamedTuple):
    """What goes from step to step."""

    q: Params  # state of the optimiser of q(Z_G)
    record: Params  # of the batch's records, (B, ...) each
    record_moments: Params
    silo: Params  # (1, ...) each
    silo_moments: Params
    phi: Params  # weights of the silo's own encoder
    phi_moments: Params
    average: Params  # of what a fit reports, over its last iterates
    moved: Tensor  # (n_global + n_silo,) by which the means of Z_G and Z_S went on in this block


class Inputs(NamedTuple):
    """What a block of S steps takes besides; in minibatches each step has its own rows."""

    cavity: tuple[Tensor, Tensor]  # shift (n_global,) and precision
    theta: Params
    rows: Params  # (N + 1, ...) each, or (S, B, ...) in minibatches
    weights: Tensor  # (N + 1,) or (B,)
    eps: Tensor  # (S, noise of q(Z_G))
    eps_record: Tensor  # (S, K, B, n_record)
    eps_silo: Tensor  # (S, 1, n_silo)
    schedule: Tensor  # (S, 3): shares of the rates of q and of own latents, weight of the iterate in the average


class Block:
    """Local steps of one model and configuration."""

    def __init__(self, frame: PVIFrame, steps: GlobalSteps) -> None:
        self.frame, self.steps, self.optimizer = frame, steps, frame.local_optimizer
        self.minibatch = frame.by_row
        self.length = _divisor(frame.config.local_steps) if not frame.n_record else 1
        self._gradient = silo_gradient(frame.problem.density, frame.local_family, frame.silo_family, frame.samples)
        by_shape = frame.local_family.couples_records
        record, rows, draws = (None, None, None) if by_shape else (0, int(self.minibatch), 2)
        axes = (
            None,
            record,
            record,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            rows,
            record,
            None,
            draws,
            None,
            None,
        )
        self._traced = Traced(self._run, axes, frame.problem.mode, by_shape)

    def __call__(self, carry: Carry, inputs: Inputs) -> Carry:
        return Carry(*self._traced(*carry, *inputs))

    def _own(
        self, params: Params, gradient: Params, moments: Params, rate: Tensor, root: Tensor, silo: Params | None = None
    ) -> tuple[Params, Params]:
        """The parameters of latents, and the optimiser's state, after a step.

        Its gains are those of white noise, w in w R^-1 d with R = `root` of q(Z_G), so that a step means the same
        whatever the units of Z_G: in raw units it is nothing to a narrow one, and tears a wide one apart. silo: of
        Z_S, which is a part of d to records.
        """
        spread = silo["log_scale"][0].exp() if silo else root.new_ones(0)
        if not params:
            return params, moments
        back = torch.linalg.inv(root) if root.dim() == 2 else 1 / root
        params = gains_times(params, root, spread)
        gradient = gains_times(gradient, back.mT if root.dim() == 2 else back, 1 / spread)
        if "dense" in params:
            params, moments = self.optimizer.step(params, gradient, moments, rate, local_units(params))
        else:
            params = natural_step(params, gradient, _NATURAL * self.optimizer.learning_rate * rate)
        return gains_times(params, back, 1 / spread), moments

    def observed(self, q: Params, value: Tensor, theta: Params, gradient: Tensor) -> Params:
        """What a fit reports, averaged over its last iterates. gradient: of the silo's term in Z_G (n,)."""
        root = self.steps.root(q)
        covariance = root @ root.mT if root.dim() == 2 else root.square()
        seen = {"loc": self.steps.loc(q), "covariance": covariance, "value": value.reshape(1)}
        seen |= {"touched": gradient.abs()}
        return seen | {f"theta/{name}": gradient for name, gradient in theta.items()}

    def _run(self, *args: object) -> Carry:
        n = len(Carry._fields)
        carry, inputs = Carry(*args[:n]), Inputs(*args[n:])  # type: ignore[arg-type]
        carry = carry._replace(moved=torch.zeros_like(carry.moved))
        for k in range(self.length):
            rows = {name: value[k] for name, value in inputs.rows.items()} if self.minibatch else inputs.rows
            carry = self._one(carry, inputs, rows, k)
        return carry

    def _one(self, carry: Carry, inputs: Inputs, rows: Params, k: int) -> Carry:
        q, record, silo, phi = carry.q, carry.record, carry.silo, carry.phi
        z = self.steps.draw(q, inputs.eps[k])
        g = self._gradient(
            z, z - self.steps.loc(q), {**inputs.theta, **phi}, record, silo, rows, inputs.weights,
            inputs.eps_record[k], inputs.eps_silo[k],
        )  # fmt: skip
        shift, precision = inputs.cavity
        held = shift - (precision @ z if precision.dim() == 2 else precision * z)
        own_rate = inputs.schedule[k, 1]
        after = self.steps.step(q, inputs.eps[k], g.direct + g.path + held, inputs.schedule[k, 0])
        root = self.steps.root(q)
        local = {name: _by_record(value, inputs.weights) for name, value in g.local.items()}
        record, record_moments = self._own(record, local, carry.record_moments, own_rate, root, silo)
        silo, silo_moments = self._own(silo, g.silo, carry.silo_moments, own_rate, root)
        # The silo's latents move along with the mean of Z_G, as their conditionals say they do: held back, they would
        # turn a Newton step on the marginal likelihood into a step of EM, which is slow where much is unobserved.
        silo, moved = reanchored_silo(silo, self.steps.loc(after) - self.steps.loc(q), self.frame.n_silo)
        record = reanchored_records(record, moved)
        shared, phi_gradient = split_theta(g.theta, inputs.theta)
        phi, phi_moments = self.optimizer.step(phi, phi_gradient, carry.phi_moments, own_rate)
        seen = self.observed(after, g.value, shared, g.direct + g.path)
        average = {name: torch.lerp(old, seen[name], inputs.schedule[k, 2]) for name, old in carry.average.items()}
        return Carry(after, record, record_moments, silo, silo_moments, phi, phi_moments, average, carry.moved + moved)


def _by_record(gradient: Tensor, weights: Tensor) -> Tensor:
    """A gradient of records' own parameters (B, ...) as of all records, where a batch stands for more than it has."""
    return gradient / weights.clamp(min=1.0).reshape(-1, *[1] * (gradient.dim() - 1))


def _divisor(steps: int) -> int:
    """The longest block that fits the steps of a fit without a rest."""
    return max(length for length in range(1, _LONGEST + 1) if steps % length == 0)
