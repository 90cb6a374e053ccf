"""What vertical experiments share: rounds of silos of equal shape in one call, for data that may be pooled, and what
NUTS samples beside them.

All parties of a round, the server included, are one traced function: the silos' halves mapped by vmap, the sums plain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pyro
import torch
from pyro.distributions import Normal
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import logsigmoid

from secure_fvi.algorithms.vertical import (
    Likelihood,
    Predictor,
    Soul,
    SoulSilo,
    Vertical,
    VerticalServer,
    VerticalSilo,
    linear,
)
from secure_fvi.algorithms.vertical.predictors import Program
from secure_fvi.algorithms.vertical.soul import gamma_step
from secure_fvi.algorithms.vertical.steps import Draw, Incoming, Moments, Noise, Response, ServerParams, SiloParams
from secure_fvi.compiled import Mode, Traced
from secure_fvi.optimizers import Optimizer
from secure_fvi.trees import Params, part, running_average
from secure_fvi_lab.references import Draws, sample_nuts

_BLOCK = 100  # rounds whose noise is drawn at once
_POINTS = 200  # of the bound over the rounds


class Fit(NamedTuple):
    """Where a run ended; theta of all silos in one vector of length n."""

    draws: Tensor  # (draws, n)
    mean: Tensor  # (n,)
    sd: Tensor  # (n,)
    bounds: Tensor  # (points,) the bound over the rounds, nats, each a mean of several; empty for SOUL


class State(NamedTuple):
    """Of all parties; the silos' tensors have a first axis of length J."""

    params: SiloParams
    moments: Moments
    server: ServerParams


class Known(NamedTuple):
    rows: Params  # (J, N, ...) each
    response: Response


class VerticalRound:
    """Rounds of `Vertical` with one local step, for J silos with `rows` (J, N, ...) each.

    With `pooled`, z_j is eta_j itself: no augmentation. `program` is the silos' predictor, by default linear in x.
    `like`, of equal arguments but for the data, lends its compiled step.
    """

    def __init__(
        self,
        config: Vertical,
        likelihood: Likelihood,
        rows: Params,
        response: Response,
        rate: float,
        mode: Mode,
        pooled: bool = False,
        program: Program | None = None,
        like: VerticalRound | None = None,
    ) -> None:
        self.config, self.likelihood, self.pooled = config, likelihood, pooled
        x = next(iter(rows.values()))
        self.known, self.count, self.records = Known(rows, response), x.shape[0], x.shape[1]
        first = {name: value[0] for name, value in self.known.rows.items()}
        predictor = Predictor(program or linear(likelihood.columns), first, likelihood.columns)
        self.optimizer = Optimizer("adam", rate)
        self.silo = VerticalSilo(config, likelihood, predictor, self.count, self.optimizer)
        self.server = VerticalServer(likelihood, self.optimizer, x.dtype)
        self._weights = torch.ones(self.records, dtype=x.dtype)
        self._step: Callable[..., tuple[State, Tensor]] = like._step if like else Traced(self._round, (None,) * 5, mode)

    def step(self, state: State, noise: Noise, eps: Tensor, scale: Tensor) -> tuple[State, Tensor]:
        """One round: the new state, and the bound before it, nats."""
        return self._step(self.known, state, noise, eps, scale)

    def init(self, generator: torch.Generator) -> State:
        params = stack([self.silo.init(self.records, generator)[0] for _ in range(self.count)])
        moments = Moments(*(self.optimizer.init(p, by_row=True) for p in params))
        return State(params, moments, self.server.init())

    def noises(self, rounds: int, generator: torch.Generator) -> Iterator[tuple[Noise, Tensor]]:
        """The silos' noise, stacked, and the server's, for each round."""
        n_theta, n_gamma = self.silo.family.noise_size, self.server.family.noise_size
        for start in range(0, rounds, _BLOCK):
            size = min(_BLOCK, rounds - start)
            theta = torch.randn(size, self.count, n_theta, generator=generator)
            z = torch.randn(size, self.count, self.records, self.likelihood.columns, generator=generator)
            gamma = torch.randn(size, n_gamma, generator=generator)
            yield from ((Noise(a, b), c) for a, b, c in zip(theta, z, gamma, strict=True))

    def fit(self, rounds: int, seed: int = 0, draws: int = 4000) -> Fit:
        """Adam at a rate that falls linearly; parameters averaged over the last quarter of the rounds."""
        generator = torch.Generator().manual_seed(seed)
        state, bounds, average = self.init(generator), [], dict[str, Tensor]()
        for r, (noise, eps) in enumerate(self.noises(rounds, generator)):
            state, bound = self.step(state, noise, eps, torch.tensor(1.0 - 0.99 * r / rounds))
            bounds.append(bound)
            if r >= 3 * rounds // 4:
                average = running_average(average, state.params.shared, r - 3 * rounds // 4 + 1)
        theta, family = part(average, "theta"), self.silo.family
        eps = torch.randn(draws, self.count, family.noise_size, generator=generator)
        found = vmap(vmap(family.transform), in_dims=(None, 0))(theta, eps).flatten(1)
        every = max(1, rounds // _POINTS)
        trace = torch.stack(bounds)[: rounds // every * every].reshape(-1, every).mean(1)
        return Fit(found, theta["loc"].flatten(), vmap(family.stddev)(theta).flatten(), trace)

    def _round(self, known: Known, state: State, noise: Noise, eps: Tensor, scale: Tensor) -> tuple[State, Tensor]:
        known, (params, moments, server) = Known(known[0], Response(*known[1])), State(*state)
        gamma = self.server.gamma(server.eta, eps)
        if self.pooled:
            shared, gamma_gradient, value = self._pooled(known, params, noise, gamma)
            gradient = SiloParams(shared, {name: torch.zeros_like(v) for name, v in params.record.items()})
        else:
            y, weights = known.response, self._weights
            draws = Draw(*vmap(lambda p, rows, e: self.silo.draw(p, rows, y, weights, e))(params, known.rows, noise))
            incoming, gamma_gradient, value = self._exchange(known.response, draws, gamma)
            gradient = SiloParams(
                *vmap(lambda p, rows, *rest: self.silo.gradient(p, rows, y, weights, *rest))(
                    params, known.rows, noise, draws.z, incoming
                )
            )
            value = value + draws.local.sum()
        units = SiloParams(*vmap(self.silo.units)(params))
        params, moments = self.silo.ascend(params, moments, gradient, units, scale)
        server, own = self.server.update(server, gamma_gradient, eps, scale)
        return State(params, moments, server), value + own

    def _exchange(self, response: Response, draws: Draw, gamma: Tensor) -> tuple[Incoming, Tensor, Tensor]:
        """What the silos get back (stacked), the gradient in gamma, and the likelihood's part of the bound."""
        s, j = draws.z.sum(0), self.count
        h = self.server.curvature(response.offset, s, gamma).expand(j)
        gammas = gamma.expand(j, -1)
        if not self.config.is_power:
            answer = self.server.respond(response, s, gamma, self._weights)
            pull = answer.pull.expand(j, *answer.pull.shape)
            return Incoming(pull, h, torch.zeros_like(pull), gammas, torch.ones_like(h)), answer.gamma, answer.value
        share = torch.full_like(h, 1.0 / j)
        own, in_gamma, value, _ = vmap(lambda d, w: self.silo.slope(d, response, self._weights, s, gamma, w))(
            draws, share
        )
        incoming = Incoming(own.sum(0) - own, h * (1 - share), s - draws.z, gammas, share)
        return incoming, in_gamma.sum(0), value.sum()

    def _pooled(self, known: Known, params: SiloParams, noise: Noise, gamma: Tensor) -> tuple[Params, Tensor, Tensor]:
        """Sticking-the-landing gradients and the bound for y ~ p(y | sum_j eta_j)."""
        family, held = self.silo.family, part(params.shared, "theta")

        def bound(shared: Params, gamma: Tensor) -> tuple[Tensor, Tensor]:
            theta = vmap(family.transform)(part(shared, "theta"), noise.theta)
            eta, log_prior = vmap(lambda t, rows: self.silo.predictor.evaluate(t, {}, rows))(theta, known.rows)
            log_q = vmap(family.log_prob)(held, theta).sum()
            predictor = eta.sum(0) + known.response.offset.unsqueeze(-1)
            value = self.likelihood.log_prob(known.response.y, predictor, gamma).sum() + log_prior.sum() - log_q
            return value, value

        (shared, in_gamma), value = torch.func.grad(bound, argnums=(0, 1), has_aux=True)(params.shared, gamma)
        return shared, in_gamma, value


class SoulRound:
    """Rounds of `Soul` for J silos with columns x (J, N, D)."""

    def __init__(
        self, config: Soul, likelihood: Likelihood, x: Tensor, response: Response, rate: float, mode: Mode
    ) -> None:
        self.config, self.likelihood, self.rows, self.response = config, likelihood, {"x": x}, response
        self.count, self.records = x.shape[0], x.shape[1]
        predictor = Predictor(linear(likelihood.columns), {"x": x[0]}, likelihood.columns)
        self.silo = SoulSilo(config, likelihood, predictor, self.count)
        self.server = VerticalServer(likelihood, Optimizer("adam", rate), x.dtype)
        self.step: Callable[..., Any] = Traced(self._round, (None,) * 7, mode)

    def fit(self, rounds: int, seed: int = 0) -> Fit:
        """The first half of the rounds is thrown away; the last draw of each later round is kept."""
        generator = torch.Generator().manual_seed(seed)
        n, j, config = self.silo.predictor.n, self.count, self.config
        theta = self.silo.predictor.start.expand(j, -1).clone()
        z = torch.zeros(j, self.records, self.likelihood.columns)
        gamma = torch.zeros(self.likelihood.gamma_size)
        moments = self.server.optimizer.init({"gamma": gamma})
        lengths = torch.stack(
            [
                self.silo.largest_curvature(
                    z[k], torch.zeros_like(z[k]), {"x": self.rows["x"][k]}, self.response, gamma, generator
                )
                for k in range(j)
            ]
        )
        kept = []
        for r in range(rounds):
            noise = torch.randn(j, config.draws, n, generator=generator)
            theta, z, gamma, moments = self.step(
                theta, z, gamma, moments, noise, config.step / lengths, torch.tensor(config.rate(r))
            )
            if 2 * r >= rounds:
                kept.append(theta.flatten())
        draws = torch.stack(kept)
        return Fit(draws, draws.mean(0), draws.std(0), torch.zeros(0))

    def _round(
        self, theta: Tensor, z: Tensor, gamma: Tensor, moments: Params, noise: Tensor, step: Tensor, rate: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Params]:
        s, y = z.sum(0), self.response

        def langevin(theta: Tensor, z: Tensor, rows: Params, noise: Tensor, step: Tensor) -> Tensor:
            return self.silo.langevin(theta, z, s - z, rows, y, gamma, noise, step)

        thetas = vmap(langevin)(theta, z, self.rows, noise, step)
        mean_eta = vmap(self.silo.mean_eta)(thetas, self.rows)
        h = self.server.curvature(y.offset, s, gamma)
        if self.config.is_power:
            own, in_gamma = vmap(lambda t, z, rows: self.silo.slope(t, s - z, rows, y, gamma))(thetas, z, self.rows)
            pull, gradient = own.sum(0) - own, in_gamma.sum(0)
        else:
            answer = self.server.respond(y, s, gamma, torch.ones_like(y.y))
            pull, gradient = answer.pull.expand_as(z), answer.gamma
        z = vmap(lambda z, eta, pull: self.silo.move(z, eta, pull, h, rate))(z, mean_eta, pull)
        gamma, moments = gamma_step(self.likelihood, self.server.optimizer, gamma, moments, gradient, rate)
        return thetas[:, -1], z, gamma, moments


def stack(items: list[Any]) -> Any:
    """NamedTuples of dicts of tensors, or dicts, with a new first axis."""
    first = items[0]
    if isinstance(first, dict):
        return {name: torch.stack([item[name] for item in items]) for name in first}
    return type(first)(*(stack(list(parts)) for parts in zip(*items, strict=True)))


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
