"""Regression with known noise and a hand-driven federation, shared by the tests of PVI."""

from __future__ import annotations

from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import secure_fvi as sf
from secure_fvi.algorithms.natural import Natural
from secure_fvi.algorithms.pvi import FINISH, PVIState
from secure_fvi.engines.local import LocalEngine
from secure_fvi.fitting import build_parties
from secure_fvi.messages import ROUND
from secure_fvi.server import Server

NOISE = 0.7


def regression(x: Tensor, y: Tensor) -> None:
    """y ~ N(x beta, NOISE^2), beta ~ N(0, 2^2)."""
    beta = pyro.sample("beta", dist.Normal(x.new_zeros(x.shape[-1]), 2.0).to_event(1))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Normal(x @ beta, NOISE), obs=y)


REGRESSION = sf.FederatedModel(regression, "row")


def make_regression(sizes: tuple[int, ...], d: int = 3, seed: int = 0) -> tuple[list[dict[str, Tensor]], Natural]:
    """Silos whose covariates differ, and the exact posterior."""
    rng = torch.Generator().manual_seed(seed)
    silos, precision, shift = [], torch.eye(d) / 4.0, torch.zeros(d)
    beta = torch.randn(d, generator=rng)
    for j, n in enumerate(sizes):
        x = torch.randn(n, d, generator=rng) @ torch.randn(d, d, generator=rng) + 0.3 * j
        y = x @ beta + NOISE * torch.randn(n, generator=rng)
        silos.append({"x": x, "y": y})
        precision, shift = precision + x.T @ x / NOISE**2, shift + x.T @ y / NOISE**2
    return silos, Natural(shift, precision)


def near(a: Natural, b: Natural, tolerance: float) -> bool:
    scale = float(b.precision.abs().max())
    return all(float((x - y).abs().max()) < tolerance * scale for x, y in zip(a, b, strict=True))


class World(NamedTuple):
    """All parties of one fit, to be driven round by round."""

    server: Server
    engine: LocalEngine

    @property
    def state(self) -> PVIState:
        state: PVIState = self.server.state.algorithm
        return state

    def round(self, lost_before: tuple[str, ...] = (), lost_after: tuple[str, ...] = ()) -> None:
        """One round in which some silos never see the broadcast, and the answers of others never arrive."""
        exchanges = self.server.round()
        messages: Any = next(exchanges)
        try:
            while True:
                asked = {silo: m for silo, m in messages.items() if silo not in lost_before}
                replies = self.engine.exchange(asked)
                first = next(iter(messages.values()))[:1] == ROUND
                if first:
                    replies = {silo: r for silo, r in replies.items() if silo not in lost_after}
                messages = exchanges.send(replies)
        except StopIteration:
            pass

    def end_at(self, q: Natural) -> None:
        """As if one round was answered at this q, and the final sum came next."""
        self.server.state = self.server.state._replace(algorithm=self.state._replace(q=q, round=1, phase=FINISH))
        for silo in self.engine.silos.values():
            silo.local = silo.local._replace(asked=q.pack())

    def product(self) -> Natural:
        """The prior's factor times all silos' sites, as each silo would have it at the next broadcast."""
        message = self.server.program.broadcast(self.server.state.algorithm, 10**6, self.server.state.accepted)
        total = self.state.prior
        for name, silo in self.engine.silos.items():
            silo.settle(self.server.state.accepted)
            program: Any = silo.program
            total = total.plus(program.site(silo.local, message, name))
        return total


def build(
    model: sf.FederatedModel, silos: list[dict[str, Tensor]], algorithm: sf.PVI, sums: Any = None, seed: int = 0
) -> World:
    server, engine, _ = build_parties(model, silos, algorithm, sums or sf.Plain(), seed, compile=False)
    return World(server, engine)


def logistic(x: Tensor, y: Tensor) -> None:
    beta = pyro.sample("beta", dist.Normal(x.new_zeros(x.shape[-1]), 3.0).to_event(1))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)
