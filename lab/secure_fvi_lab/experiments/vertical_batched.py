"""What vertical experiments share: fits of silos of equal shape, and what NUTS samples beside them."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pyro
import torch
from pyro.distributions import Normal
from torch import Tensor
from torch.nn.functional import logsigmoid

import secure_fvi as sf
from secure_fvi.algorithms.vertical import Integrated, Likelihood, Vertical, linear
from secure_fvi.algorithms.vertical.predictors import Program
from secure_fvi.algorithms.vertical.soul import Soul
from secure_fvi.algorithms.vertical.steps import Response
from secure_fvi.compiled import Mode
from secure_fvi.errors import SecureFVIWarning
from secure_fvi.trees import Params
from secure_fvi_lab.references import Draws, sample_nuts

_POINTS, _DRAWS = 200, 4000  # of the bound over the rounds; of the posterior
#: What stands for the pooled model, y ~ p(y | sum_j eta_j): a rho that nobody could see, integrated out.
POOLED = Vertical(rho=1e-3, response="private", auxiliary=Integrated())


class Fit(NamedTuple):
    """Where a run ended, and how long it took; sites of all silos, which share one program."""

    sites: Params  # (draws, J, ...) each
    bounds: Tensor  # (points,) the bound over the rounds, nats, each a mean of several; NaN for SOUL
    seconds: float  # traces and compilation included


def fit(
    config: Vertical | Soul, likelihood: Likelihood, rows: Params, response: Response, mode: Mode,
    program: Program | None = None,
) -> Fit:  # fmt: skip
    """The algorithm that ships, in plain sums, for J silos with `rows` (J, N, ...) each; `program` is the silos'
    predictor, by default linear in x."""
    began, count = time.monotonic(), len(next(iter(rows.values())))
    silos = [{name: value[j] for name, value in rows.items()} for j in range(count)]
    model = sf.Columns(likelihood, response.y, [program or linear(likelihood.columns)] * count, response.offset)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureFVIWarning)  # NUTS says more than the rule for settling
        run = sf.run(model, silos, config, sf.Plain(), compile=mode == "compiled")
        bounds = torch.tensor([progress.objective for progress in run])
        result = run.result()
    of_silos = [result.local[name].sample(_DRAWS, seed) for seed, name in enumerate(sorted(result.local))]
    every = max(1, len(bounds) // _POINTS)
    return Fit(
        {name: torch.stack([draws[name] for draws in of_silos], 1) for name in of_silos[0]},
        bounds[: len(bounds) // every * every].reshape(-1, every).mean(1),
        time.monotonic() - began,
    )


# ---- Logistic regression with the auxiliary variables integrated out: what NUTS samples ----
#
# Given theta, a record's likelihood depends on f = b + x' theta alone in both models, with e_j ~ N(0, 1):
#
#     augmented   log E sigma(+-(f + rho sum_j e_j))
#     power       log E prod_j sigma(+-(f + rho sum_{k != j} e_k))^(1/J)
#
# So theta's posterior needs no draw of the J N auxiliary variables: it is sampled in p + 1 dimensions, the function
# above read from a table. Only in this form is NUTS on ten silos (5,000 auxiliary variables) beyond doubt about mixing.

#: The table: f from -REACH to REACH in steps; it goes on linearly outside.
REACH, STEP = 60.0, 0.2
_NODES = 4001  # of one-dimensional integrals, over ten standard deviations to each side
_QUASI_DRAWS = 2**13  # of integrals in J > 2 dimensions


def log_marginal(model: str, rho: float, silos: int) -> Callable[[Tensor], Tensor]:
    """log p(y = 1 | f), elementwise, for `model` "pooled", "augmented" or "power"; p(y = 0 | f) is that at -f."""
    if model == "pooled":
        return logsigmoid
    grid = torch.arange(-REACH, REACH + STEP / 2, STEP, dtype=torch.float64).requires_grad_()
    values = _augmented(grid, rho, silos) if model == "augmented" else _power(grid, rho, silos)
    (slopes,) = torch.autograd.grad(values.sum(), grid)
    return _Hermite(values.detach(), slopes)


def sample(
    model: str, rho: float, x: Tensor, y: Tensor, silos: int, chains: int, warmup: int, draws: int, seed: int = 0
) -> Draws:
    """NUTS on (b, beta): sites `b` () and `beta` (p,), both N(0, 1), from columns x (N, p) of all silos together."""
    log_likelihood = log_marginal(model, rho, silos)
    sign = 2 * y - 1

    def program() -> None:
        b = pyro.sample("b", Normal(x.new_zeros(()), 1.0))
        beta = pyro.sample("beta", Normal(x.new_zeros(x.shape[1]), 1.0).to_event(1))
        pyro.factor("y", log_likelihood(sign * (b + x @ beta)).sum())

    return sample_nuts(program, "records", ["b", "beta"], x.dtype, chains, warmup, draws, seed)


def soul_mode(x: Tensor, y: Tensor, noise: float, iterations: int = 30) -> Tensor:
    """beta (p,) at which SOUL on the augmented-variable model ends: its mean given the mode of z, by Newton's method.

    z enters through s = b + x beta + noise e with noise = sqrt(J) rho, all priors standard normal. Given z, beta is
    Gaussian, so that its mean at z's mode is its part of the joint mode.
    """
    n, p = x.shape
    design = torch.cat([x, noise * torch.eye(n, dtype=x.dtype), x.new_ones(n, 1)], 1)
    return logistic_mode(design, y, iterations)[0][:p]


def logistic_mode(x: Tensor, y: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Mode (p,) of logistic regression with coefficients N(0, 1), by Newton's method, and minus the Hessian (p, p)."""
    w, eye = x.new_zeros(x.shape[1]), torch.eye(x.shape[1], dtype=x.dtype)
    for _ in range(iterations):
        mean = torch.sigmoid(x @ w)
        hessian = x.T @ (x * (mean * (1 - mean)).unsqueeze(-1)) + eye
        w = w + torch.linalg.solve(hessian, x.T @ (y - mean) - w)
    return w, hessian


class _Hermite:
    """Cubic Hermite interpolation of a table; error of order STEP^4."""

    def __init__(self, values: Tensor, slopes: Tensor) -> None:
        self.values, self.slopes = values, slopes * STEP

    def __call__(self, f: Tensor) -> Tensor:
        at = ((f + REACH) / STEP).clamp(0, len(self.values) - 1.001)
        low = at.detach().floor().long()
        t = at - low
        v0, v1 = self.values[low], self.values[low + 1]
        s0, s1 = self.slopes[low], self.slopes[low + 1]
        u = 1 - t
        inside = v0 * (1 + 2 * t) * u * u + s0 * t * u * u + v1 * t * t * (3 - 2 * t) - s1 * t * t * u
        return inside + (f + REACH).clamp(max=0) * self.slopes[0] / STEP


def _augmented(f: Tensor, rho: float, silos: int) -> Tensor:
    """The sum of z is normal around x' theta with variance J rho^2."""
    return _expectation(lambda e: logsigmoid(f.unsqueeze(-1) + math.sqrt(silos) * rho * e))


def _power(f: Tensor, rho: float, silos: int) -> Tensor:
    if silos == 2:  # each silo's factor sees the other's draw alone: two equal integrals
        return 2 * _expectation(lambda e: 0.5 * logsigmoid(f.unsqueeze(-1) + rho * e))
    sobol = torch.quasirandom.SobolEngine(silos, scramble=True, seed=0).draw(_QUASI_DRAWS, dtype=torch.float64)
    e = torch.special.ndtri(sobol.clamp(1e-12, 1 - 1e-12))
    others = rho * (e.sum(1, keepdim=True) - e)
    chunks = [torch.logsumexp(logsigmoid(v[:, None, None] + others).mean(-1), -1) for v in f.split(8)]
    return torch.cat(chunks) - math.log(_QUASI_DRAWS)


def _expectation(log_integrand: Callable[[Tensor], Tensor]) -> Tensor:
    """log E exp(log_integrand(e)), e ~ N(0, 1), by the trapezoidal rule, which is spectrally exact here."""
    e = torch.linspace(-10, 10, _NODES, dtype=torch.float64)
    weights: Any = -0.5 * e.square() - 0.5 * math.log(2 * math.pi) + math.log(20 / (_NODES - 1))
    return torch.logsumexp(log_integrand(e) + weights, -1)
