"""All parties of a vertical run in one process, one silo after the other, through real sums of blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation import Plain
from secure_fvi.aggregation.base import BlockTable, Exchanges, SecureSum, SumServer, SumSilo
from secure_fvi.algorithms.vertical import (
    AUXILIARY_PHASE,
    SLOPE_PHASE,
    Likelihood,
    Predictor,
    Vertical,
    VerticalServer,
    VerticalSilo,
    linear,
    shared_batch,
)
from secure_fvi.algorithms.vertical.server import ServerParams
from secure_fvi.algorithms.vertical.silo import Draw, Incoming, Moments, Noise, Response, SiloParams
from secure_fvi.algorithms.vertical.weights import share, weight_gradient
from secure_fvi.compiled import Traced
from secure_fvi.optimizers import Optimizer
from secure_fvi.trees import Params, put, take


class Local(NamedTuple):
    """What a silo keeps."""

    params: SiloParams
    moments: Moments
    logit: Tensor


class World:
    """`silos` are dicts of columns; all hold the same people in the same order."""

    def __init__(
        self,
        config: Vertical,
        likelihood: Likelihood,
        silos: Sequence[Params],
        response: Response,
        programs: Sequence[Any] | None = None,
        rate: float = 0.05,
        seed: int = 0,
        fixed_gamma: Tensor | None = None,
        sums: SecureSum | None = None,
    ) -> None:
        self.config, self.likelihood, self.rows, self.response = config, likelihood, silos, response
        self.records, self.seed, self.count = len(response.y), seed, len(silos)
        self.columns, self.fixed_gamma = likelihood.columns, fixed_gamma
        programs = programs or [linear(self.columns)] * len(silos)
        predictors = [Predictor(p, rows, self.columns) for p, rows in zip(programs, silos, strict=True)]
        optimizer = Optimizer("adam", rate)
        self.server = VerticalServer(likelihood, optimizer, torch.float64)
        self.silos = [VerticalSilo(config, likelihood, p, len(silos), optimizer) for p in predictors]
        self.update = [Traced(s.update, (None,) * 8, "traced", by_shape=True) for s in self.silos]
        self.draw = [Traced(s.draw, (None,) * 5, "traced", by_shape=True) for s in self.silos]
        self.generator = torch.Generator().manual_seed(seed)
        zero = torch.zeros(())
        self.locals = [Local(*s.init(self.records, self.generator), zero) for s in self.silos]
        self.gamma_params: ServerParams = self.server.init()
        self.ids = [f"s{j}" for j in range(self.count)]
        self.parties: tuple[SumServer, Mapping[str, SumSilo]] = (sums or Plain()).local_parties(self.ids)
        self.index = self.round = 0
        self.means = torch.cat([loc.params.shared["theta/loc"] for loc in self.locals])

    def run(self, rounds: int, schedule: Callable[[float], float] = lambda t: 1.0 - 0.99 * t) -> list[float]:
        """The bound of each round, nats. `means` are averages over the last quarter."""
        bounds, kept = [], []
        for r in range(rounds):
            bounds.append(self.step(schedule(r / rounds)))
            if 4 * r >= 3 * rounds:
                kept.append(torch.cat([loc.params.shared["theta/loc"] for loc in self.locals]))
        self.means = torch.stack(kept).mean(0)
        return bounds

    def step(self, scale: float) -> float:
        """One round: Algorithm 1, or 2."""
        size = self.config.batch_size
        batch = torch.from_numpy(shared_batch(self.seed, self.round, self.records, size))
        weights = torch.full((len(batch),), self.records / len(batch))
        at = batch if size is not None else None
        response = Response(self.response.y[batch], self.response.offset[batch])
        known: Any = response if self.config.response == "shared" else ()
        tables = self.config.tables(len(batch), self.columns, self.likelihood.gamma_size)
        rows = [take(r, at) for r in self.rows]
        params = [SiloParams(loc.params.shared, take(loc.params.record, at)) for loc in self.locals]
        moments = [Moments(loc.moments.shared, take(loc.moments.record, at)) for loc in self.locals]
        noise = [self._noise(silo, len(batch)) for silo in self.silos]
        draws = [Draw(*f(p, r, known, weights, e)) for f, p, r, e in zip(self.draw, params, rows, noise, strict=True)]
        total = self._sum(
            tables[AUXILIARY_PHASE], [self._first(d, loc) for d, loc in zip(draws, self.locals, strict=True)]
        )
        s = torch.from_numpy(total["auxiliary"])
        eps = torch.randn(self.server.family.noise_size, generator=self.generator)
        gamma = self.server.gamma(self.gamma_params.eta, eps) if self.fixed_gamma is None else self.fixed_gamma
        h = self.server.curvature(response.offset, s, gamma)
        if self.config.is_power:
            shares = [self._share(loc, total) for loc in self.locals]
            seconds = [
                silo.slope(d, response, weights, s, gamma, w)
                for silo, d, w in zip(self.silos, draws, shares, strict=True)
            ]
            after = self._sum(tables[SLOPE_PHASE], [{"slope": a, "gamma": b, "value": c} for a, b, c, _ in seconds])
            everything, value = torch.from_numpy(after["slope"]), float(after["value"])
            gamma_gradient = torch.from_numpy(after["gamma"])
            incoming = [
                Incoming(everything - second[0], h * (1 - w), s - d.z, gamma, w)
                for second, d, w in zip(seconds, draws, shares, strict=True)
            ]
            logits = [
                self._logit(loc, w, second[3], value, scale)
                for loc, w, second in zip(self.locals, shares, seconds, strict=True)
            ]
        else:
            answer = self.server.respond(response, s, gamma, weights)
            gamma_gradient, value = answer.gamma, float(answer.value)
            one = torch.ones(())
            incoming = [Incoming(answer.pull, answer.curvature, torch.zeros_like(s), gamma, one)] * self.count
            logits = [loc.logit for loc in self.locals]
        step = torch.tensor(scale)
        for j, update in enumerate(self.update):
            p, m = update(params[j], moments[j], rows[j], known, weights, noise[j], incoming[j], step)
            old = self.locals[j]
            self.locals[j] = Local(
                SiloParams(p.shared, put(old.params.record, at, p.record)),
                Moments(m.shared, put(old.moments.record, at, m.record)),
                logits[j],
            )
        gamma_value = 0.0
        if self.fixed_gamma is None:
            self.gamma_params, shared = self.server.update(self.gamma_params, gamma_gradient, eps, step)
            gamma_value = float(shared)
        self.round += 1
        return float(total["local"]) + value + gamma_value

    def sds(self) -> Tensor:
        parts = []
        for silo, local in zip(self.silos, self.locals, strict=True):
            theta = {k.removeprefix("theta/"): v for k, v in local.params.shared.items() if k.startswith("theta/")}
            parts.append(silo.family.stddev(theta))
        return torch.cat(parts)

    def shares(self) -> Tensor:
        return torch.stack([loc.logit for loc in self.locals]).softmax(0)

    def _noise(self, silo: VerticalSilo, records: int) -> Noise:
        theta = torch.randn(silo.family.noise_size, generator=self.generator)
        return Noise(theta, torch.randn(records, self.columns, generator=self.generator))

    def _first(self, draw: Draw, local: Local) -> dict[str, Tensor]:
        blocks = {"auxiliary": draw.z, "local": draw.local}
        return blocks if self.config.weight_concentration is None else {**blocks, "mass": local.logit.exp()}

    def _share(self, local: Local, total: Mapping[str, Any]) -> Tensor:
        if self.config.weight_concentration is None:
            return torch.tensor(1.0 / self.count)
        return share(local.logit, torch.tensor(float(total["mass"])))

    def _logit(self, local: Local, weight: Tensor, own: Tensor, mean: float, scale: float) -> Tensor:
        """A plain gradient step; log p is on the scale of the number of records."""
        a = self.config.weight_concentration
        if a is None:
            return local.logit
        found = weight_gradient(weight, own, torch.tensor(mean), a, self.count)
        return local.logit + scale * (0.5 * found / (a - 1 + 10)).clamp(-0.2, 0.2)

    def _sum(self, table: BlockTable, contributions: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        """A secure sum; blocks past their bound are refused by it."""
        server, silos = self.parties
        self.index += 1
        flat = {
            name: np.concatenate([blocks[b.name].detach().numpy().reshape(-1) for b in table.blocks])
            for name, blocks in zip(self.ids, contributions, strict=True)
        }
        self._drive(server.prepare(self.index), silos)
        sent = {n: silos[n].contribute(self.index, self.ids, table, v, bytes(32)) for n, v in flat.items()}
        total = self._drive(server.total(self.index, self.ids, table, sent, bytes(32)), silos)
        return table.split(total.values)

    @staticmethod
    def _drive(exchange: Exchanges[Any], silos: Mapping[str, SumSilo]) -> Any:
        replies = None
        while True:
            try:
                asked = next(exchange) if replies is None else exchange.send(replies)
            except StopIteration as stop:
                return stop.value
            replies = {name: silos[name].handle(message) for name, message in asked.items()}
