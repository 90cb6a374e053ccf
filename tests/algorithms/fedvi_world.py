"""A small model for FedVI: clients differ in a shift that their unlabelled records tell, and that flips the labels."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import secure_fvi as sf

SHIFT_SD = 1.0


def program(x: Tensor, y: Tensor) -> None:
    """y = slope x_0 + shift + noise; the encoder's two weights are global sites that the data's law does not use."""
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    pyro.sample("encoder", dist.Normal(torch.tensor([0.0, -1.0]), 1.0).to_event(1))
    shift = pyro.sample("shift", dist.Normal(torch.zeros(1), SHIFT_SD).to_event(1))
    with pyro.plate("person", len(y)):
        pyro.sample("y", dist.Normal(slope * x[:, 0] + shift, 0.5), obs=y)


def encode(values: dict[str, Tensor], present: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The shift is `encoder`_0 times the mean of x_1, give or take exp(`encoder`_1)."""
    mean = (present * x[:, 1]).sum() / present.sum()
    weight, log_scale = values["encoder"].unbind()
    return (weight * mean).unsqueeze(0), log_scale.exp().unsqueeze(0)


MODEL = sf.FederatedModel(program, "person", ("shift",), sf.SiloEncoder(encode, ("x",)))


def clients(count: int, size: int = 12, seed: int = 0) -> list[dict[str, Tensor]]:
    """x_1 is the client's shift and noise of sd 0.3; slope 0.7."""
    rng = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(count):
        shift = torch.randn(1, generator=rng)
        x = torch.randn(size, 2, generator=rng) * torch.tensor([1.0, 0.3]) + torch.stack([torch.zeros(1), shift], 1)
        out.append({"x": x, "y": 0.7 * x[:, 0] + shift + 0.5 * torch.randn(size, generator=rng)})
    return out
