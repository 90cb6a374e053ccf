"""One local step of PVI on adult, timed beside a step of Pyro's SVI on the same model, minibatch size and family.

Both are mean-field logistic regression of 32,561 records, minibatches of 128, one draw, Adam, float64, one thread. A
block of ours is one round at the silo, so that drawing minibatches and everything else around the steps counts.
Blocks are interleaved, and the median counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.distributions import Bernoulli, Normal
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import Tensor

from secure_fvi.aggregation import Plain
from secure_fvi.algorithms.pvi import PVI
from secure_fvi.fitting import build_parties
from secure_fvi.models.base import Dataset, program
from secure_fvi_lab.bench.step import Block, in_turn
from secure_fvi_lab.machine import machine

_BATCH, _STEPS = 128, 500
_OPTIMIZERS = ("natural", "adam")


def lines(found: dict[str, Any]) -> Iterator[str]:
    """For a terminal, one a contestant."""
    for name, ms in found["ms_per_step"].items():
        yield f"{name:14}{ms:8.3f} ms{found['speed_relative_to_pyro_svi'][name]:8.1f} x Pyro's SVI"
    yield found["machine"]


def measure(data_dir: Path | None, repeats: int) -> dict[str, Any]:
    """Median milliseconds a step, and speed in multiples of Pyro's SVI."""
    torch.set_num_threads(1)
    data = program("adult").load(data_dir)
    blocks = {"pyro_svi": _pyro(data), **{f"pvi_{name}": _ours(data, name) for name in _OPTIMIZERS}}
    medians = in_turn(blocks, _STEPS, _STEPS, repeats)
    return {
        "machine": machine(),
        "ms_per_step": medians,
        "speed_relative_to_pyro_svi": {name: medians["pyro_svi"] / ms for name, ms in medians.items()},
        "batch": _BATCH,
        "steps_per_block": _STEPS,
        "blocks": repeats,
    }


def _ours(data: Dataset, optimizer: str) -> Block:
    """Rounds of one silo after its first, which takes longer."""
    algorithm = PVI(
        rounds=10_000,
        family="diagonal",
        local_optimizer=optimizer,
        local_steps=_STEPS,
        sampling_rate=_BATCH / len(data),
    )
    server, engine, _ = build_parties(program("adult").model, [data.records], algorithm, Plain(), compile=True)
    engine.run(server.round())

    def block(steps: int) -> None:
        assert steps == _STEPS
        engine.run(server.round())

    return block


def _pyro(data: Dataset) -> Block:
    size = len(data)

    def model(x: Tensor, y: Tensor) -> None:
        weights = pyro.sample("weights", Normal(x.new_zeros(x.shape[-1]), 1.0).to_event(1))
        with pyro.plate("record", size, subsample_size=_BATCH) as at:
            pyro.sample("y", Bernoulli(logits=x[at] @ weights), obs=y[at])

    pyro.get_param_store().clear()
    pyro.set_rng_seed(0)
    svi = SVI(model, AutoNormal(model), pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())

    def block(steps: int) -> None:
        for _ in range(steps):
            svi.step(data.records["x"], data.records["y"])

    return block
