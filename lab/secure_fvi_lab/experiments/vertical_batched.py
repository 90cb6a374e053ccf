"""Vertical rounds of silos of equal shape in one call, for experiments on data that may be pooled.

All parties of a round, the server included, are one traced function: the silos' halves mapped by vmap, the sums plain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

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
    """The data of all parties."""

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
