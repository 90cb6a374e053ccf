"""Rounds of split networks for many training sets at once, for experiments on data that may be pooled.

A run is one training set with its own start and noise. All runs, silos and the server are one traced function: runs
mapped by vmap, silos of different columns one after the other, sums plain. Records that a run does not train on have
weight 0: they add nothing to any gradient, and are predicted like the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from secure_fvi.algorithms.vertical import Likelihood, Predictor, Vertical, VerticalServer, VerticalSilo
from secure_fvi.algorithms.vertical.predictors import Program
from secure_fvi.algorithms.vertical.server import Answer, ServerParams
from secure_fvi.algorithms.vertical.silo import Draw, Incoming, Moments, Noise, Response, SiloParams
from secure_fvi.algorithms.vertical.split_nn import SplitSilo
from secure_fvi.compiled import Mode, Traced
from secure_fvi.optimizers import Optimizer
from secure_fvi.trees import Params, part
from secure_fvi_lab.experiments.vertical_batched import stack

_BLOCK = 20  # rounds whose noise is drawn at once

#: A silo's program from the seed of a run.
Programs = Callable[[int], Program]


class Task(NamedTuple):
    """R runs over N records of J silos."""

    rows: tuple[Params, ...]  # J dicts of (R, N, ...)
    weights: Tensor  # (R, N)
    response: Response  # (N,)

    @property
    def runs(self) -> int:
        return self.weights.shape[0]


class State(NamedTuple):
    """Of all parties; every tensor has a first axis of length R."""

    params: tuple[SiloParams, ...]
    moments: tuple[Moments, ...]
    server: ServerParams


class HierarchicalRound:
    """Rounds of `Vertical` in the augmented-variable model; theta starts `spread` sds of noise off its prior's mean."""

    def __init__(
        self, config: Vertical, likelihood: Likelihood, programs: Programs, task: Task, optimizer: Optimizer,
        mode: Mode, spread: float = 0.0,
    ) -> None:  # fmt: skip
        self.config, self.likelihood, self.task, self.spread = config, likelihood, task, spread
        self.dtype, self.optimizer = task.weights.dtype, optimizer
        self._predictors = [
            [Predictor(programs(1000 * j + r), {k: v[r] for k, v in rows.items()}) for r in range(task.runs)]
            for j, rows in enumerate(task.rows)
        ]
        count = len(task.rows)
        self.silos = [VerticalSilo(config, likelihood, p[0], count, optimizer) for p in self._predictors]
        self.server = VerticalServer(likelihood, optimizer, self.dtype)
        self.step: Callable[..., tuple[State, Tensor]] = Traced(self._round, (None,) * 4, mode)

    def init(self, generator: torch.Generator) -> State:
        """Points start at their programs' own values, one program a run."""
        params, moments, records = [], [], self.task.weights.shape[1]
        for silo, predictors in zip(self.silos, self._predictors, strict=True):
            found = []
            for predictor in predictors:
                shared, record = silo.init(records, generator)[0]
                loc = shared["theta/loc"]
                shared["theta/loc"] = loc + self.spread * torch.randn(len(loc), generator=generator, dtype=loc.dtype)
                points = {f"point/{name}": value for name, value in predictor.points.items()}
                found.append(SiloParams({**shared, **points}, record))
            params.append(stack(found))
            moments.append(Moments(*(self.optimizer.init(p) for p in params[-1])))
        eta = stack([self.server.init().eta] * self.task.runs)
        return State(tuple(params), tuple(moments), ServerParams(eta, self.optimizer.init(eta)))

    def noises(self, rounds: int, generator: torch.Generator) -> Iterator[tuple[tuple[Noise, ...], Tensor]]:
        """The silos' noise and the server's, for each round."""
        r, n = self.task.weights.shape

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=self.dtype)

        for start in range(0, rounds, _BLOCK):
            size = min(_BLOCK, rounds - start)
            silos = [(normal(size, r, s.family.noise_size), normal(size, r, n, 1)) for s in self.silos]
            gamma = normal(size, r, self.server.family.noise_size)
            for k in range(size):
                yield tuple(Noise(theta[k], z[k]) for theta, z in silos), gamma[k]

    def fit(
        self, rounds: int, seed: int = 0, decay: bool = False, at: Collection[int] = (),
        see: Callable[[int, State], None] | None = None,
    ) -> State:  # fmt: skip
        """Adam at a constant rate, or one that falls linearly to nothing; `see` is called after the rounds in `at`."""
        generator = torch.Generator().manual_seed(seed)
        state = self.init(generator)
        for r, (noise, eps) in enumerate(self.noises(rounds, generator)):
            scale = torch.tensor(1.0 - 0.99 * r / rounds if decay else 1.0, dtype=self.dtype)
            state, _ = self.step(state, noise, eps, scale)
            if see is not None and r + 1 in at:
                see(r + 1, state)
        return state

    def predict(self, state: State, draws: int, seed: int = 1) -> tuple[Tensor, Tensor]:
        """Probabilities (R, N) of y = 1 under q(theta), q(gamma): z_j at eta_j, and z_j ~ N(eta_j, rho^2)."""
        generator, noise_sd = torch.Generator().manual_seed(seed), math.sqrt(len(self.silos)) * self.config.rho
        still, noisy = torch.zeros_like(self.task.weights), torch.zeros_like(self.task.weights)
        for noise, eps in self.noises(draws, generator):
            s = vmap(self._centre)(state.params, state.server.eta, self.task.rows, noise, eps)
            still += torch.sigmoid(s) / draws
            noisy += torch.sigmoid(s + noise_sd * torch.randn(s.shape, generator=generator, dtype=s.dtype)) / draws
        return still, noisy

    def _centre(self, params: Any, eta: Params, rows: Any, noise: Any, eps: Tensor) -> Tensor:
        """sum_j eta_j + offset + intercept (N,) of one run."""
        total = self.task.response.offset + self.server.gamma(eta, eps)[0]
        for silo, q, columns, e in zip(self.silos, params, rows, noise, strict=True):
            shared = SiloParams(*q).shared
            theta = silo.family.transform(part(shared, "theta"), Noise(*e).theta)
            total = total + silo.predictor.evaluate(theta, part(shared, "point"), columns)[0][:, 0]
        return total

    def _round(self, state: State, noise: tuple[Noise, ...], eps: Tensor, scale: Tensor) -> tuple[State, Tensor]:
        """Algorithm 1. Optimisers step on the stacked runs, element by element: vmap has no rule for them."""
        weights, response = self.task.weights, self.task.response
        known: Any = response if self.config.response == "shared" else ()
        state = State(*state)
        params, moments = [SiloParams(*q) for q in state.params], [Moments(*m) for m in state.moments]
        server, noise = ServerParams(*state.server), tuple(Noise(*e) for e in noise)
        parties = list(zip(self.silos, params, self.task.rows, noise, strict=True))
        draws = [Draw(*vmap(_drawing(silo, known))(q, x, weights, e)) for silo, q, x, e in parties]
        s = torch.stack([d.z for d in draws]).sum(0)
        gamma = vmap(self.server.gamma)(server.eta, eps)
        answer = Answer(*vmap(lambda s, g, w: self.server.respond(response, s, g, w))(s, gamma, weights))
        one = torch.ones_like(answer.value)
        incoming = Incoming(answer.pull, answer.curvature, torch.zeros_like(s), gamma, one)
        ends = []
        for (silo, q, x, e), m, d in zip(parties, moments, draws, strict=True):
            new = q
            for _ in range(self.config.local_steps):
                found = SiloParams(*vmap(_gradient(silo, known))(new, x, weights, e, d.z, incoming))
                new, m = silo.ascend(new, m, found, SiloParams(*vmap(silo.units)(new)), scale)
            ends.append((SiloParams(*(_lerp(a, b, silo.kept) for a, b in zip(q, new, strict=True))), m))
        in_eta, own = vmap(self.server.gradient)(server.eta, answer.gamma, eps)
        server = self.server.ascend(server, in_eta, vmap(self.server.units)(server.eta), scale)
        bound = answer.value + own + torch.stack([d.local for d in draws]).sum(0)
        return State(tuple(q for q, _ in ends), tuple(m for _, m in ends), server), bound


def _drawing(silo: VerticalSilo, known: Any) -> Callable[..., Draw]:
    return lambda params, rows, weights, noise: silo.draw(params, rows, known, weights, noise)


def _gradient(silo: VerticalSilo, known: Any) -> Callable[..., SiloParams]:
    return lambda params, rows, weights, noise, sent, incoming: silo.gradient(
        params, rows, known, weights, noise, sent, incoming
    )


def _lerp(old: Params, new: Params, kept: float) -> Params:
    return new if kept == 1 else {name: torch.lerp(value, new[name], kept) for name, value in old.items()}


class SplitRound:
    """Rounds of the split NN; the server has no parameters."""

    def __init__(
        self, likelihood: Likelihood, programs: Programs, task: Task, optimizer: Optimizer, mode: Mode
    ) -> None:
        self.likelihood, self.task, self.dtype = likelihood, task, task.weights.dtype
        predictors = [
            [Predictor(programs(1000 * j + r), {k: v[r] for k, v in rows.items()}) for r in range(task.runs)]
            for j, rows in enumerate(task.rows)
        ]
        self._silos = [[SplitSilo(p, optimizer) for p in of_silo] for of_silo in predictors]
        self.silos = [of_silo[0] for of_silo in self._silos]
        self.server = VerticalServer(likelihood, optimizer, self.dtype)
        self.gamma = torch.zeros(likelihood.gamma_size, dtype=self.dtype)
        self.step: Callable[..., Any] = Traced(self._round, (None,) * 3, mode)

    def fit(self, rounds: int, at: Collection[int] = (), see: Callable[[int, Any], None] | None = None) -> Any:
        """Adam at a constant rate."""
        points = tuple(stack([silo.init()[0] for silo in of_silo]) for of_silo in self._silos)
        moments = tuple(silo.optimizer.init(p) for silo, p in zip(self.silos, points, strict=True))
        scale = torch.ones((), dtype=self.dtype)
        for r in range(rounds):
            points, moments = self.step(points, moments, scale)
            if see is not None and r + 1 in at:
                see(r + 1, points)
        return points

    def predict(self, points: tuple[Params, ...]) -> Tensor:
        """(R, N)."""
        return torch.sigmoid(vmap(self._sum)(points, self.task.rows)[..., 0])

    def _sum(self, points: tuple[Params, ...], rows: tuple[Params, ...]) -> Tensor:
        drawn = [silo.draw(p, x) for silo, p, x in zip(self.silos, points, rows, strict=True)]
        return torch.stack(drawn).sum(0)

    def _round(self, points: tuple[Params, ...], moments: tuple[Params, ...], scale: Tensor) -> Any:
        weights = self.task.weights
        s = vmap(self._sum)(points, self.task.rows)
        pull = vmap(lambda s, w: self.server.respond(self.task.response, s, self.gamma, w).pull)(s, weights)
        ends = [
            silo.ascend(p, vmap(silo.gradient)(p, x, weights, pull), m, scale)
            for silo, p, m, x in zip(self.silos, points, moments, self.task.rows, strict=True)
        ]
        return tuple(p for p, _ in ends), tuple(m for _, m in ends)
