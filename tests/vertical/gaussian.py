"""Linear regression with known noise, whose joint posterior of theta and z is Gaussian and known in closed form."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import secure_fvi as sf
from secure_fvi.aggregation.base import SecureSum
from secure_fvi.algorithms.vertical import Gaussian, Likelihood, Vertical
from secure_fvi.algorithms.vertical.steps import Response
from secure_fvi.columns import VerticalResult
from secure_fvi.trees import Params

SIGMA = 0.8


class Regression(NamedTuple):
    silos: list[Params]
    response: Response
    gamma: Tensor  # intercept 0 and log SIGMA, held


class Joint(NamedTuple):
    """Posterior of (theta_1, ..., theta_J, z_1, ..., z_J)."""

    mean: Tensor
    precision: Tensor
    n_theta: int

    def theta_mean(self) -> Tensor:
        return self.mean[: self.n_theta]

    def theta_sd(self) -> Tensor:
        """With z integrated out."""
        return torch.linalg.inv(self.precision).diagonal()[: self.n_theta].sqrt()

    def mean_field_sd(self, widths: list[int]) -> Tensor:
        """Of the best q(theta_j) with full covariance when z and the other silos are independent of it."""
        parts, start = [], 0
        for width in widths:
            block = self.precision[start : start + width, start : start + width]
            parts.append(torch.linalg.inv(block).diagonal().sqrt())
            start += width
        return torch.cat(parts)


class KnownNoise(Gaussian):
    """y ~ N(predictor, SIGMA^2) without an intercept: gamma is a standard normal number that nothing depends on."""

    gamma_size = 1

    def log_prob(self, y: Tensor, predictor: Tensor, gamma: Tensor) -> Tensor:
        return super().log_prob(y, predictor, _known(gamma))

    def log_prior(self, gamma: Tensor) -> Tensor:
        return -0.5 * gamma.square().sum()

    def curvature(self, predictor: Tensor, gamma: Tensor) -> Tensor:
        return super().curvature(predictor, _known(gamma))

    def constrain(self, gamma: Tensor) -> Params:
        return {"nothing": gamma[..., 0]}


def _known(gamma: Tensor) -> Tensor:
    return torch.stack([gamma.new_zeros(()), gamma.new_tensor(SIGMA).log()])


def fit(
    silos: list[Params],
    response: Response,
    config: Vertical,
    likelihood: Likelihood | None = None,
    aggregation: SecureSum | None = None,
    predictors: list[Any] | None = None,
) -> VerticalResult:
    """`sf.fit` without compilation, in a plain sum by default."""
    return sf.fit(
        sf.Columns(likelihood or KnownNoise(), response.y, predictors, response.offset),
        silos,
        config,
        aggregation or sf.Plain(),
        compile=False,
    )


def means(result: VerticalResult) -> Tensor:
    """Of all q(theta_j), unconstrained."""
    return torch.cat([result.local[s].q["theta/loc"] for s in result.silos])


def sds(result: VerticalResult) -> Tensor:
    return torch.cat([result.local[s].sample(20_000)["beta"].std(0) for s in result.silos])


def make(widths: list[int], records: int, seed: int = 0) -> Regression:
    rng = torch.Generator().manual_seed(seed)
    silos = [{"x": torch.randn(records, w, generator=rng)} for w in widths]
    eta = sum((s["x"] @ torch.randn(s["x"].shape[1], generator=rng) for s in silos), torch.zeros(records))
    y = eta + SIGMA * torch.randn(records, generator=rng)
    return Regression(silos, Response(y, torch.zeros(records)), torch.tensor([0.0, SIGMA]).log().nan_to_num(neginf=0.0))


def joint(problem: Regression, rho: float, power: bool) -> Joint:
    """theta ~ N(0, 1), z_j ~ N(x_j theta_j, rho^2), and the Gaussian likelihood of either model."""
    x = [s["x"] for s in problem.silos]
    n, silos, n_theta = len(problem.response.y), len(x), sum(m.shape[1] for m in x)
    size = n_theta + n * silos
    eye = torch.eye(n)
    eta, z, start = [], [], 0
    for j, columns in enumerate(x):
        e, a = torch.zeros(n, size), torch.zeros(n, size)
        e[:, start : start + columns.shape[1]] = columns
        a[:, n_theta + j * n : n_theta + (j + 1) * n] = eye
        eta.append(e)
        z.append(a)
        start += columns.shape[1]
    precision = torch.zeros(size, size)
    precision[:n_theta, :n_theta] = torch.eye(n_theta)
    for e, a in zip(eta, z, strict=True):
        precision += (a - e).T @ (a - e) / rho**2
    shift, total = torch.zeros(size), torch.stack(z).sum(0)
    designs = [(total, 1.0)] if not power else [(e + total - a, 1.0 / silos) for e, a in zip(eta, z, strict=True)]
    for design, weight in designs:
        precision += weight * design.T @ design / SIGMA**2
        shift += weight * design.T @ problem.response.y / SIGMA**2
    return Joint(torch.linalg.solve(precision, shift), precision, n_theta)
