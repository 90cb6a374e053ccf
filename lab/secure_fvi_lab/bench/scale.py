"""What a round costs of many records, and of many silos in one process: processor's time, memory, bytes written.

Steps are traced and not compiled, sums are masked. Memory is the most that this process ever had, so that one process
measures one size.
"""

from __future__ import annotations

import contextlib
import resource
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from secure_fvi.aggregation import Masked
from secure_fvi.algorithms.pvi import PVI
from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.algorithms.sfvi_avg import SFVIAvg
from secure_fvi.compiled import TRACE_AFTER_CALLS
from secure_fvi.deployment.holding import DurableSilo, open_held
from secure_fvi.errors import SecureFVIWarning
from secure_fvi.federated_model import FederatedModel
from secure_fvi.fitting import build_parties
from secure_fvi.privacy.settings import RecordDP
from secure_fvi_lab.machine import machine

_DIMENSIONS = 5
_FEW = 20  # records of each of many silos
_WARM_UP = TRACE_AFTER_CALLS + 5


def lines(found: dict[str, Any]) -> Iterator[str]:
    what = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in found["of"].items())
    yield f"{what}; {found['machine']}"
    for name, value in found.items():
        if isinstance(value, float):
            yield f"{name.replace('_', ' '):34} {value:10.2f}"


def _without(x: Tensor, y: Tensor) -> None:
    beta = pyro.sample("beta", dist.Normal(x.new_zeros(_DIMENSIONS), 1.0).to_event(1))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def _with(x: Tensor, y: Tensor) -> None:
    beta = pyro.sample("beta", dist.Normal(x.new_zeros(_DIMENSIONS), 1.0).to_event(1))
    with pyro.plate("row", len(y)):
        own = pyro.sample("own", dist.Normal(x.new_zeros(()), 1.0))
        pyro.sample("y", dist.Bernoulli(logits=x @ beta + own), obs=y)


def _data(records: int, seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(records, _DIMENSIONS, generator=rng, dtype=torch.float64)
    return {"x": x, "y": torch.bernoulli(torch.sigmoid(x.sum(1)), generator=rng)}


def measure_records(
    records: int, batch: int, latents: bool, private: bool, stored: bool, rounds: int, by: str, local_steps: int
) -> dict[str, Any]:
    """One silo of so many records among three of 1,000; its part alone is timed, the secure sum's messages included.

    Of SFVI-Avg and PVI, a step's share of a round of so many `local_steps`, all else in the round included.
    """
    torch.set_num_threads(1)
    sizes = (records, 1_000, 1_000, 1_000)
    share = batch / records
    warm_up = _WARM_UP if by == "sfvi" else 1
    total = rounds + warm_up
    algorithm: Any = {
        "sfvi": SFVI(iterations=total, sampling_rate=share),
        "sfvi-avg": SFVIAvg(rounds=total, local_steps=local_steps, sampling_rate=share, tolerance=1e-9),
        "pvi": PVI(rounds=total, local_steps=local_steps, sampling_rate=share),
    }[by]
    noise: Any = "silo" if by == "pvi" else "distributed"
    privacy = RecordDP(epsilon=3.0, delta=1e-7, clipping_norm=1.0, noise=noise, retries=0) if private else None
    model = FederatedModel(_with if latents else _without, "row")
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore", SecureFVIWarning)
        server, engine, _ = build_parties(
            model,
            [_data(size, seed) for seed, size in enumerate(sizes)],
            algorithm,
            Masked(),
            privacy=privacy,
            compile=False,
        )

        seconds, written = 0.0, 0
        big = engine.silos["silo-1"]
        held = open_held(Path(folder) / "state.sqlite", bytes(32)) if stored else None
        party: Any = DurableSilo(big, held) if held is not None else big
        for k in range(total):
            if k == warm_up:
                seconds, written = 0.0, _written()
            conversation = server.round()
            messages = next(conversation)
            with contextlib.suppress(StopIteration):
                while True:
                    answers = {}
                    for name, message in messages.items():
                        began = time.process_time()
                        answers[name] = (party if name == big.name else engine.silos[name]).handle(message)
                        if name == big.name:
                            seconds += time.process_time() - began
                    messages = conversation.send(answers)
        bytes_written = _written() - written
        if held is not None:
            held.close()
    return {
        "machine": machine(),
        "of": {by: "by", "records": records, "in_a_batch": batch, "rounds": rounds}
        | {name: "with" for name, is_so in (("latents", latents), ("record_privacy", private)) if is_so},
        "ms_of_the_processor_a_round": 1e3 * seconds / rounds,
        **({} if by == "sfvi" else {"ms_of_the_processor_a_local_step": 1e3 * seconds / rounds / local_steps}),
        **({"kb_written_a_round": bytes_written / rounds / 1e3} if stored else {}),
        "mb_at_most": _most(),
    }


def measure_silos(silos: int, rounds: int, missing: int) -> dict[str, Any]:
    """All parties of a masked job in this process, rounds after the first."""
    torch.set_num_threads(1)
    model = FederatedModel(_without, "row")
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureFVIWarning)
        server, engine, _ = build_parties(
            model,
            [_data(_FEW, seed) for seed in range(silos)],
            SFVI(iterations=rounds + 1),
            Masked(max_missing=missing),
            compile=False,
        )

    engine.run(server.round())
    until = time.process_time()
    for _ in range(rounds):
        engine.run(server.round())
    return {
        "machine": machine(),
        "of": {"silos": silos, "records_each": _FEW, "may_be_missing": missing, "rounds": rounds},
        "s_of_the_processor_until_round_2": until - began,
        "s_of_the_processor_a_round": (time.process_time() - until) / rounds,
        "mb_at_most": _most(),
    }


def _most() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _written() -> int:
    """Bytes that this process has handed to the system to write."""
    counted = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counted["wchar"])
