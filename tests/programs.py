"""Small Pyro programs with known posteriors, shared by the tests."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import secure_fvi as sf


class Conjugate(NamedTuple):
    """A model, data for uneven silos, and the exact posterior of its global sites."""

    model: sf.FederatedModel
    silos: list[dict[str, Tensor]]
    mean: dict[str, Tensor]
    sd: dict[str, Tensor]


SIZES = (7, 40, 13)


def intercepts(y: Tensor) -> None:
    """y_ik = mu + b_i + noise: (N, 3)."""
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    with pyro.plate("person", y.shape[0]):
        b = pyro.sample("b", dist.Normal(0.0, 0.7))
        pyro.sample("y", dist.Normal(mu + b.unsqueeze(-1), 0.5 * torch.ones(3)).to_event(1), obs=y)


def unknown_tau(y: Tensor) -> None:
    """`intercepts` with the sd of b a point, which begins at 0.3."""
    tau = pyro.param("tau", torch.tensor(0.3), constraint=dist.constraints.positive)
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    with pyro.plate("person", len(y)):
        b = pyro.sample("b", dist.Normal(0.0, tau))
        pyro.sample("y", dist.Normal(mu + b.unsqueeze(-1), 0.5 * torch.ones(3)).to_event(1), obs=y)


def likeliest_tau(rows: Tensor) -> float:
    """Where the marginal likelihood of `unknown_tau` is largest, to 0.005: a grid on the closed form."""

    def evidence(tau: float) -> float:
        v = torch.kron(torch.eye(len(rows)), tau**2 * torch.ones(3, 3) + 0.25 * torch.eye(3)) + 100.0
        return float(dist.MultivariateNormal(torch.zeros(rows.numel()), v).log_prob(rows.flatten()))

    return max((float(tau) for tau in torch.linspace(0.3, 1.2, 181)), key=evidence)


def slopes(x: Tensor, y: Tensor) -> None:
    """Random intercepts and slopes: x and y are (N, 4)."""
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 10.0).to_event(1))
    with pyro.plate("person", len(y)):
        b = pyro.sample("b", dist.Normal(torch.zeros(2), torch.tensor([0.8, 0.4])).to_event(1))
        coefficients = beta + b
        mean = coefficients[..., :1] + coefficients[..., 1:] * x
        pyro.sample("y", dist.Normal(mean, 0.6).to_event(1), obs=y)


def rate(y: Tensor) -> None:
    """A positive global site: log y_i = log rate + b_i + noise, y (N,)."""
    scale = pyro.sample("rate", dist.LogNormal(1.0, 2.0))
    with pyro.plate("person", len(y)):
        b = pyro.sample("b", dist.Normal(0.0, 0.5))
        pyro.sample("y", dist.LogNormal(scale.log() + b, 0.4), obs=y)


def clinics(y: Tensor) -> None:
    """A silo-level site between the global one and the records: y_i = mu + u + b_i + noise, y (N,)."""
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    u = pyro.sample("u", dist.Normal(0.0, 0.6))
    with pyro.plate("person", len(y)):
        b = pyro.sample("b", dist.Normal(0.0, 0.5))
        pyro.sample("y", dist.Normal(mu + u + b, 0.5), obs=y)


def _shifted(x: Tensor, y: Tensor) -> None:
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    pyro.sample("weight", dist.Normal(0.0, 1.0))
    shift = pyro.sample("shift", dist.Normal(torch.zeros(1), 1.0).to_event(1))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Normal(slope * x + shift, 0.5), obs=y)


def _encode(values: dict[str, Tensor], present: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return (values["weight"] * (present * x).sum() / present.sum()).reshape(1), torch.ones(1).to(x)


#: A silo's own latents by an encoder of all its records.
ENCODED = sf.FederatedModel(_shifted, "row", ("shift",), sf.SiloEncoder(_encode, ("x",)))


def _gaussian(
    design: list[Tensor], covariances: list[Tensor], y: list[Tensor], prior_sd: float
) -> tuple[Tensor, Tensor]:
    """Posterior mean and sd of beta for y_j ~ N(X_j beta, V_j), beta ~ N(0, prior_sd^2)."""
    d = design[0].shape[1]
    precision, shift = torch.eye(d) / prior_sd**2, torch.zeros(d)
    for x, v, obs in zip(design, covariances, y, strict=True):
        precision = precision + x.T @ torch.linalg.solve(v, x)
        shift = shift + x.T @ torch.linalg.solve(v, obs)
    return torch.linalg.solve(precision, shift), torch.linalg.inv(precision).diagonal().sqrt()


def make_intercepts(seed: int = 1) -> Conjugate:
    rng = torch.Generator().manual_seed(seed)
    silos = [
        {"y": 1.5 + 0.7 * torch.randn(n, 1, generator=rng) + 0.5 * torch.randn(n, 3, generator=rng)} for n in SIZES
    ]
    rows = torch.cat([s["y"] for s in silos])
    v = 0.49 * torch.ones(3, 3) + 0.25 * torch.eye(3)
    mean, sd = _gaussian([torch.ones(3, 1)] * len(rows), [v] * len(rows), list(rows), 10.0)
    return Conjugate(sf.FederatedModel(intercepts, "person"), silos, {"mu": mean[0]}, {"mu": sd[0]})


def make_slopes(seed: int = 2, sizes: tuple[int, ...] = SIZES) -> Conjugate:
    rng = torch.Generator().manual_seed(seed)
    silos = []
    for n in sizes:
        x = torch.randn(n, 4, generator=rng)
        b = torch.randn(n, 2, generator=rng) * torch.tensor([0.8, 0.4]) + torch.tensor([-1.0, 0.5])
        silos.append({"x": x, "y": b[:, :1] + b[:, 1:] * x + 0.6 * torch.randn(n, 4, generator=rng)})
    designs, covariances, ys = [], [], []
    for silo in silos:
        for x, y in zip(silo["x"], silo["y"], strict=True):
            design = torch.stack([torch.ones(4), x], 1)
            designs.append(design)
            covariances.append(design @ torch.diag(torch.tensor([0.64, 0.16])) @ design.T + 0.36 * torch.eye(4))
            ys.append(y)
    mean, sd = _gaussian(designs, covariances, ys, 10.0)
    return Conjugate(sf.FederatedModel(slopes, "person"), silos, {"beta": mean}, {"beta": sd})


def make_rate(seed: int = 3) -> Conjugate:
    rng = torch.Generator().manual_seed(seed)
    silos = [{"y": (0.8 + 0.64 * torch.randn(n, generator=rng)).exp()} for n in SIZES]
    logs = torch.cat([s["y"] for s in silos]).log()
    variance = 1 / (1 / 4.0 + len(logs) / 0.41)
    mean = variance * (1.0 / 4.0 + logs.sum() / 0.41)
    variance = torch.tensor(variance)
    level = (mean + variance / 2).exp()
    return Conjugate(
        sf.FederatedModel(rate, "person"), silos, {"rate": level}, {"rate": level * (variance.exp() - 1).sqrt()}
    )


def make_clinics(seed: int = 4) -> Conjugate:
    rng = torch.Generator().manual_seed(seed)
    silos = [{"y": -2.0 + 0.6 * torch.randn(1, generator=rng) + 0.7 * torch.randn(n, generator=rng)} for n in SIZES]
    covariances = [0.36 * torch.ones(n, n) + 0.5 * torch.eye(n) for n in SIZES]
    mean, sd = _gaussian([torch.ones(n, 1) for n in SIZES], covariances, [s["y"] for s in silos], 10.0)
    return Conjugate(sf.FederatedModel(clinics, "person", ("u",)), silos, {"mu": mean[0]}, {"mu": sd[0]})


def reachable_tensors(root: object) -> list[Tensor]:
    """Every tensor and array that can be reached from an object, modules and types left out."""
    seen: set[int] = set()
    stack: list[Any] = [root]
    found = []
    while stack:
        value = stack.pop()
        if id(value) in seen or isinstance(value, type) or type(value).__name__ == "module":
            continue
        seen.add(id(value))
        if type(value) in (Tensor, torch.nn.Parameter):  # not a tracer's stand-in, which has no values
            found.append(value)
        elif isinstance(value, np.ndarray) and value.dtype == np.float64:
            found.append(torch.from_numpy(value.copy()))
        if callable(value) and hasattr(value, "__globals__"):
            stack.extend(c.cell_contents for c in value.__closure__ or () if c is not None)
            continue
        stack.extend(gc.get_referents(value))
    return found


def altered(content: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """What was traced of a program, with other words of it."""
    length = int.from_bytes(content[:8], "big")
    table = json.loads(content[8 : 8 + length])
    change(table)
    text = json.dumps(table).encode()
    return len(text).to_bytes(8, "big") + text + content[8 + length :]
