"""One iteration on six cities, timed: ours, Pyro's SVI, NumPyro's jitted SVI; and one local step of PVI on adult.

All contestants hold the same 537 children in float64 and estimate the ELBO from one draw an iteration; all are mean
field with Adam, except `*_default`, which is this library's own default (full covariance of the global sites,
record-level latents that depend on them). Blocks of iterations are interleaved, so that a machine that slows down slows
all, and the median block counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.distributions import Bernoulli, Normal
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from torch import Tensor

from secure_fvi.aggregation import Masked, Plain
from secure_fvi.algorithms.pvi import PVI
from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.families import Conditional
from secure_fvi.fitting import build_parties
from secure_fvi.models.base import Dataset, program
from secure_fvi_lab.machine import machine

_RATE = 0.001
#: A run long enough for `compile = "auto"` to compile.
_ITERATIONS = 100_000
_WARM_UP = 20

Block = Callable[[int], None]


def lines(found: dict[str, Any]) -> Iterator[str]:
    for name, milliseconds in (found.get("ms_per_iteration") or found["ms_per_step"]).items():
        text = "not installed" if milliseconds is None else f"{milliseconds:8.3f} ms"
        ratio = found["speed_relative_to_pyro_svi"].get(name)
        yield f"{name:16} {text}" + (f"   {ratio:6.1f} x Pyro's SVI" if ratio is not None else "")


def in_turn(blocks: Mapping[str, Block], warm_up: int, iterations: int, repeats: int) -> dict[str, float]:
    """Median milliseconds an iteration of each: blocks of iterations, all contestants' in turn, after `warm_up`."""
    times: dict[str, list[float]] = {name: [] for name in blocks}
    for block in blocks.values():
        block(warm_up)
    for _ in range(repeats):
        for name, block in blocks.items():
            began = time.perf_counter()
            block(iterations)
            times[name].append((time.perf_counter() - began) / iterations * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(repeats: int = 9, iterations: int = 100) -> dict[str, Any]:
    """Median milliseconds an iteration of each contestant, and its speed in multiples of Pyro's SVI."""
    # Tensors are too small here for a second thread to help anyone, and a busy machine would add its noise.
    torch.set_num_threads(1)
    data = program("six-cities").load()
    mean_field = SFVI(
        family="diagonal",
        iterations=_ITERATIONS,
        learning_rate=_RATE,
        local_family=Conditional(scale="diagonal", coupling=False),
    )
    default = SFVI(iterations=_ITERATIONS, learning_rate=_RATE)
    masked = Masked(consistency_check=False)
    contestants: dict[str, Block | None] = {
        "pyro_svi": _pyro(data),
        "numpyro_svi": _numpyro(data),
        "plain_1": _ours(data, mean_field, Plain(), 1),
        "masked_3": _ours(data, mean_field, masked, 3),
        "plain_1_default": _ours(data, default, Plain(), 1),
        "masked_3_default": _ours(data, default, masked, 3),
    }
    present = {name: block for name, block in contestants.items() if block is not None}
    medians = in_turn(present, _WARM_UP, iterations, repeats)
    return {
        "machine": machine(),
        "ms_per_iteration": {name: medians.get(name) for name in contestants},
        "speed_relative_to_pyro_svi": {name: medians["pyro_svi"] / ms for name, ms in medians.items()},
        "iterations_per_block": iterations,
        "blocks": repeats,
    }


def _ours(data: Dataset, algorithm: SFVI, aggregation: Plain | Masked, silos: int) -> Block:
    """Rounds of the driver that `fit` runs, all parties in this process."""
    rows = torch.arange(len(data)).tensor_split(silos)
    server, engine, _ = build_parties(
        program("six-cities").model,
        [{name: t[r] for name, t in data.records.items()} for r in rows],
        algorithm,
        aggregation,
        record_ids=[data.record_ids[r] for r in rows],
    )

    def block(iterations: int) -> None:
        for _ in range(iterations):
            engine.run(server.round())

    return block


def _pyro(data: Dataset) -> Block:
    model = program("six-cities").model.fn
    store = pyro.get_param_store()
    store.clear()
    pyro.set_rng_seed(0)
    svi = SVI(model, AutoNormal(model), Adam({"lr": _RATE}), Trace_ELBO())

    def block(iterations: int) -> None:
        for _ in range(iterations):
            svi.step(**data.records)

    return block


def _numpyro(data: Dataset) -> Block | None:
    """None where NumPyro is not installed; `pip install './lab[benchmark]'` in a checkout brings it."""
    try:
        import jax
        import numpyro
        from numpyro.infer import SVI as JaxSVI
        from numpyro.infer import Trace_ELBO as JaxELBO
        from numpyro.infer.autoguide import AutoNormal as JaxAutoNormal

        from secure_fvi_lab.posteriors.numpyro_programs import PROGRAMS
    except ImportError:
        return None
    jax.config.update("jax_enable_x64", True)
    jnp = jax.numpy

    model = PROGRAMS["six cities, 10 silos"]
    arrays = {name: jnp.asarray(t.numpy()) for name, t in data.records.items()}
    svi = JaxSVI(model, JaxAutoNormal(model), numpyro.optim.Adam(_RATE), JaxELBO())
    update = jax.jit(lambda state: svi.update(state, **arrays))
    state = svi.init(jax.random.PRNGKey(0), **arrays)

    def block(iterations: int) -> None:
        nonlocal state
        for _ in range(iterations):
            state, loss = update(state)
        jax.block_until_ready(loss)

    return block


# ---- One local step of PVI on adult, beside a step of Pyro's SVI on the same model, minibatch size and family ----
#
# Both are mean-field logistic regression of 32,561 records, minibatches of 128, one draw, Adam, float64, one thread. A
# block of ours is one round at the silo, so that drawing minibatches and everything else around the steps counts.

_BATCH, _STEPS = 128, 500
_OPTIMIZERS = ("natural", "adam")


def measure_local(data: Path | None, repeats: int) -> dict[str, Any]:
    """Median milliseconds a step, and speed in multiples of Pyro's SVI."""
    torch.set_num_threads(1)
    held = program("adult").load(data)
    blocks = {"pyro_svi": _pyro_batches(held), **{f"pvi_{name}": _pvi(held, name) for name in _OPTIMIZERS}}
    medians = in_turn(blocks, _STEPS, _STEPS, repeats)
    return {
        "machine": machine(),
        "ms_per_step": medians,
        "speed_relative_to_pyro_svi": {name: medians["pyro_svi"] / ms for name, ms in medians.items()},
        "batch": _BATCH,
        "steps_per_block": _STEPS,
        "blocks": repeats,
    }


def _pvi(data: Dataset, optimizer: str) -> Block:
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


def _pyro_batches(data: Dataset) -> Block:
    size = len(data)

    def model(x: Tensor, y: Tensor) -> None:
        weights = pyro.sample("weights", Normal(x.new_zeros(x.shape[-1]), 1.0).to_event(1))
        with pyro.plate("record", size, subsample_size=_BATCH) as at:
            pyro.sample("y", Bernoulli(logits=x[at] @ weights), obs=y[at])

    pyro.get_param_store().clear()
    pyro.set_rng_seed(0)
    svi = SVI(model, AutoNormal(model), Adam({"lr": 0.01}), Trace_ELBO())

    def block(steps: int) -> None:
        for _ in range(steps):
            svi.step(data.records["x"], data.records["y"])

    return block
