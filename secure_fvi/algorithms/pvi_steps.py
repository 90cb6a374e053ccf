"""One step of a silo's fit of q(Z_G) to its tilted distribution, cavity x likelihood: natural gradients, or any torch
optimiser.

Both take one draw Z_G = f(eps), the gradients of the silo's term in Z_G (`objective.SiloGradient`: with the silo's
latents held, and along them) and the cavity's gradient there, and subtract log q's: sticking the landing, so that the
noise vanishes where q meets the tilted distribution. Pure functions that can be traced.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from secure_fvi.algorithms.local_fit_options import NATURAL
from secure_fvi.algorithms.natural import Natural
from secure_fvi.algorithms.pvi_frame import PVIFrame
from secure_fvi.families.gaussian import INITIAL_SCALE, Full, Params
from secure_fvi.objective import vjp
from secure_fvi.optimizers import Optimizer
from secure_fvi.trees import merge, part

#: Longest natural step: of the mean, in standard deviations by dimension, and of half the log covariance.
_MEAN_STEP, _SCALE_STEP = 0.5, 0.3


class GlobalSteps(Protocol):
    """The local optimiser of q(Z_G). Its state is a dict of tensors."""

    def init(self, q: Natural, tight: bool) -> Params:
        """Start at q, or, on the first visit, at its mean with a tight scale."""
        ...

    def loc(self, state: Params) -> Tensor:
        """The mean (n,)."""
        ...

    def draw(self, state: Params, eps: Tensor) -> Tensor:
        """Z_G (n,)."""
        ...

    def step(self, state: Params, eps: Tensor, gradient: Tensor, scale: Tensor) -> Params:
        """The next state, from the gradient of log (cavity x likelihood) in Z_G; `scale`: share of the first rate."""
        ...

    def root(self, state: Params) -> Tensor:
        """R with covariance R R', (n, n), or (n,) standard deviations."""
        ...


def global_steps(frame: PVIFrame) -> GlobalSteps:
    """The optimiser that the configuration names."""
    if frame.config.local_optimizer == NATURAL:
        return NaturalSteps(frame)
    return TorchSteps(frame)


def _tight(q: Natural) -> tuple[Tensor, Tensor]:
    """Mean of q, and the scale at most 1 of a first step."""
    sd = q.stddev().clamp(max=1.0)
    return q.mean(), torch.diag(sd) if q.full else sd


def _times(factor: Tensor, x: Tensor) -> Tensor:
    return factor @ x if factor.dim() == 2 else factor * x


class NaturalSteps:
    """Natural gradients (paper, section 3.3, damped), by the exponential map in the coordinates Z_G = loc + F eps.

    With the whitened score s = F' grad log (tilted / q), E[s] and E[eps s'] are the natural gradients of mean and
    covariance; loc += rate F s and F <- F exp(rate / 2 sym(eps s')). To first order this is the update of natural
    parameters; unlike it, it keeps the covariance positive definite (Glasmachers et al. 2010), and it needs no inverse.
    """

    def __init__(self, frame: PVIFrame) -> None:
        self.frame, self.rate, self.scale_rate = frame, frame.first_rate, frame.config.scale_rate

    def init(self, q: Natural, tight: bool) -> Params:
        loc, factor = _tight(q) if tight else (q.mean(), q.factor())
        return {"loc": self.frame.move(loc), "factor": self.frame.move(factor * (INITIAL_SCALE if tight else 1.0))}

    def loc(self, state: Params) -> Tensor:
        return state["loc"]

    def draw(self, state: Params, eps: Tensor) -> Tensor:
        return state["loc"] + _times(state["factor"], eps)

    def step(self, state: Params, eps: Tensor, gradient: Tensor, scale: Tensor) -> Params:
        factor, rate = state["factor"], scale * self.rate
        score = _times(factor.mT if factor.dim() == 2 else factor, gradient) + eps
        mean_step = rate * score
        if factor.dim() == 1:
            mean_step = mean_step.clamp(-_MEAN_STEP, _MEAN_STEP)
            grow = self.scale_rate * (0.5 * rate * eps * score).clamp(-_SCALE_STEP, _SCALE_STEP)
            return {"loc": state["loc"] + factor * mean_step, "factor": factor * grow.exp()}
        longest = _MEAN_STEP * eps.shape[0] ** 0.5
        mean_step = mean_step * (longest / mean_step.norm().clamp(min=longest))
        outer = torch.outer(eps, score)
        grow = 0.25 * rate * (outer + outer.mT)
        grow = self.scale_rate * grow * (_SCALE_STEP / grow.norm().clamp(min=_SCALE_STEP))
        return {
            "loc": state["loc"] + factor @ mean_step,
            "factor": factor + factor @ (grow + 0.5 * grow @ grow),
        }

    def root(self, state: Params) -> Tensor:
        return state["factor"]


class TorchSteps:
    """A torch optimiser on the parameters of q in coordinates whitened by the q that was sent.

    Steps then have the size of posterior standard deviations, whatever the units of the model.
    """

    def __init__(self, frame: PVIFrame) -> None:
        config = frame.config
        self.frame, self.family = frame, frame.family
        self.optimizer = Optimizer(config.local_optimizer, config.first_rate, config.optimizer_options)

    def init(self, q: Natural, tight: bool) -> Params:
        loc, base = _tight(q) if tight else (q.mean(), q.factor())
        eta = self.family.init(self.frame.move(torch.zeros_like(loc)))
        if not tight:
            eta["log_scale"] = torch.zeros_like(eta["log_scale"])
        centre = {"loc": self.frame.move(loc), "factor": self.frame.move(base)}
        return merge(base=centre, eta=eta, moments=self.optimizer.init(eta))

    def loc(self, state: Params) -> Tensor:
        return state["base/loc"] + _times(state["base/factor"], state["eta/loc"])

    def draw(self, state: Params, eps: Tensor) -> Tensor:
        u = self.family.transform(part(state, "eta"), eps)
        return state["base/loc"] + _times(state["base/factor"], u)

    def step(self, state: Params, eps: Tensor, gradient: Tensor, scale: Tensor) -> Params:
        eta, base = part(state, "eta"), state["base/factor"]
        back = base.mT if base.dim() == 2 else base
        u, transform_vjp = vjp(lambda eta: self.family.transform(eta, eps), eta)
        log_q, log_q_vjp = vjp(lambda u: self.family.log_prob(eta, u), u)
        (q_score,) = log_q_vjp(torch.ones_like(log_q))
        (eta_gradient,) = transform_vjp(_times(back, gradient) - q_score)
        eta, moments = self.optimizer.step(eta, eta_gradient, part(state, "moments"), scale)
        return merge(base=part(state, "base"), eta=eta, moments=moments)

    def root(self, state: Params) -> Tensor:
        base, eta = state["base/factor"], part(state, "eta")
        if isinstance(self.family, Full):
            return base @ self.family.root(eta)
        return base * self.family.stddev(eta)
