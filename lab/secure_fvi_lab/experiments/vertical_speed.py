"""Milliseconds a step: vertical rounds of two silos in one process beside Pyro's SVI on the same augmented model."""

from __future__ import annotations

import time
from typing import Any

import pyro
import torch
from pyro.distributions import Bernoulli as PyroBernoulli
from pyro.distributions import Normal
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from torch import Tensor

from secure_fvi.algorithms.vertical import Amortised, Bernoulli, MeanField, Vertical
from secure_fvi.algorithms.vertical.silo import Response
from secure_fvi.runs.marginals import seeded
from secure_fvi_lab.experiments.vertical_batched import VerticalRound

_WARM = 50


def step_times(x: Tensor, y: Tensor, steps: int, rho: float = 1.0) -> dict[str, float]:
    """From columns x (J, N, D). Compilation and the first steps are not counted; SVI has a mean-field guide."""
    found = {"pyro_svi": _pyro(x, y, steps, rho)}
    for name, config in (
        ("vertical_mean_field", Vertical(rho=rho, response="private", family="diagonal", auxiliary=MeanField())),
        ("vertical_amortised", Vertical(rho=rho, response="private", auxiliary=Amortised())),
        ("vertical_power_amortised", Vertical(model="power", rho=rho, auxiliary=Amortised())),
    ):
        rounds = VerticalRound(config, Bernoulli(), x, Response(y, torch.zeros_like(y)), 0.02, "compiled")
        generator = torch.Generator().manual_seed(0)
        state, scale = rounds.init(generator), torch.tensor(1.0)
        for r, (noise, eps) in enumerate(rounds.noises(_WARM + steps, generator)):
            if r == _WARM:
                began = time.perf_counter()
            state, _ = rounds.step(state, noise, eps, scale)
        found[name] = 1000 * (time.perf_counter() - began) / steps
    return found


def _pyro(x: Tensor, y: Tensor, steps: int, rho: float) -> float:
    """The same model in Pyro: latents b, beta_j and z_j, observed y."""

    def model() -> None:
        total: Any = pyro.sample("b", Normal(x.new_zeros(()), 1.0))
        for j, columns in enumerate(x):
            beta = pyro.sample(f"beta_{j}", Normal(x.new_zeros(x.shape[2]), 1.0).to_event(1))
            with pyro.plate(f"records_{j}", len(y)):
                total = total + pyro.sample(f"z_{j}", Normal(columns @ beta, rho))
        with pyro.plate("records", len(y)):
            pyro.sample("y", PyroBernoulli(logits=total), obs=y)

    with seeded(0), pyro.validation_enabled(False), pyro.get_param_store().scope():
        svi = SVI(model, AutoNormal(model), Adam({"lr": 0.02}), Trace_ELBO())
        for _ in range(_WARM):
            svi.step()
        began = time.perf_counter()
        for _ in range(steps):
            svi.step()
        return 1000 * (time.perf_counter() - began) / steps
