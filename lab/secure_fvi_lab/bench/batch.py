"""One full-batch iteration of SFVI over many silos with small networks: a loop over silos, and silos batched by `vmap`.

Both are held against the roofline of the step: the time that its matrix products take at the speed of a large one, or
that reading the images twice takes at the speed of a copy, whichever is longer; both measured here, in the same type.

`report` (`make gpu`) first fits small jobs on the CPU and on the device and compares where they end; only where
these are equal does it time anything. All of it is one JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from secure_fvi.aggregation import Plain
from secure_fvi.algorithms.base import Algorithm
from secure_fvi.algorithms.pvi import PVI
from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.algorithms.sfvi_avg import SFVIAvg
from secure_fvi.compiled import TRACE_AFTER_CALLS
from secure_fvi.errors import ProtocolError, SecureFVIWarning
from secure_fvi.families import Conditional
from secure_fvi.federated_model import FederatedModel
from secure_fvi.files import write_atomically
from secure_fvi.fitting import build_parties, fit
from secure_fvi.models import six_cities
from secure_fvi.models.hierarchical_network import hierarchical_network
from secure_fvi_lab.machine import commit, machine

_WARM_UP = TRACE_AFTER_CALLS + 3
_MEAN_FIELD = Conditional(scale="diagonal", coupling=False, varying_scale=False)
_HIDDEN, _PIXELS, _CLASSES = 64, 196, 10
_GEMM = {"cpu": 1024, "cuda": 8192}
_COPIED = 2**26  # numbers
#: Means of Z_G after some iterations, relative; sums are made in another order.
_AGREE = {torch.float64: 1e-8, torch.float32: 1e-3}


def lines(found: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{found['silos']} silos of {found['records']} images, {found['device']}, {found['dtype']}; "
        f"{found['gflop']:.2f} GFLOP an iteration"
    )
    for name, ms in found["ms"].items():
        yield f"{name:24} {ms:10.2f} ms   {100 * found['roofline_ms'] / ms:5.1f}% of the roofline"
    yield f"{'roofline':24} {found['roofline_ms']:10.2f} ms"
    yield f"batched over silos is {found['speed_up']:.1f} times as fast as the loop"


def measure(
    silos: int, records: int, device: torch.device, dtype: torch.dtype, rounds: int, compiled: bool
) -> dict[str, Any]:
    """Median ms an iteration of each way. Raises ProtocolError where the two do not find the same numbers."""
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    data = [
        {
            "x": torch.rand(records, _PIXELS, generator=rng, dtype=dtype),
            "y": torch.randint(_CLASSES, (records,), generator=rng),
        }
        for _ in range(silos)
    ]
    ms, ends, flops = {}, [], 0.0
    ways = [("loop", False, False), ("batched", True, False), ("batched, compiled", True, True)]
    for name, batched, compile_ in ways if compiled else ways[:2]:
        server, engine, _ = build_parties(
            hierarchical_network(_HIDDEN, _CLASSES).model,
            data,
            SFVI(iterations=rounds + _WARM_UP + 1, family="diagonal", silo_family=_MEAN_FIELD),
            Plain(),
            device=device,
            dtype=dtype,
            compile=compile_,
            batch_silos=batched,
        )
        run = lambda engine=engine, server=server: engine.run(server.round())  # noqa: E731
        ms[name] = 1e3 * statistics.median(_timed(run, rounds, device))
        ends.append(server.state.algorithm.eta["loc"].cpu())
        if not flops:
            with FlopCounterMode(display=False) as counter:
                run()
            flops = counter.get_total_flops()
    for name, end in zip(ms, ends, strict=True):
        error = float((end - ends[0]).abs().max() / ends[0].abs().max())
        if error > _AGREE[dtype]:
            raise ProtocolError(f"{name}: Z_G's mean differs from the loop's by {error:.1e} of its largest value")
    peak, bandwidth = _peak(device, dtype), _bandwidth(device, dtype)
    read = 2 * silos * records * _PIXELS * torch.empty((), dtype=dtype).element_size()
    return {
        "machine": machine() + (f", {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""),
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "silos": silos,
        "records": records,
        "ms": ms,
        "speed_up": ms["loop"] / min(ms.values()),
        "gflop": flops / 1e9,
        "peak_gflops": peak / 1e9,
        "copy_gb_s": bandwidth / 1e9,
        "roofline_ms": 1e3 * max(flops / peak, read / bandwidth),
    }


def _timed(run: Callable[[], Any], repeats: int, device: torch.device) -> list[float]:
    """Seconds of each call, once the device is done with it; the first calls do not count."""
    seconds = []
    for _ in range(_WARM_UP + repeats):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return seconds[_WARM_UP:]


def _peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large matrix product."""
    n = _GEMM[device.type]
    a = torch.rand(n, n, device=device, dtype=dtype)
    return float(2 * n**3 / min(_timed(lambda: a @ a, 5, device)))


def _bandwidth(device: torch.device, dtype: torch.dtype) -> float:
    """Bytes a second read by a copy, which writes as many."""
    a: Tensor = torch.rand(_COPIED // (1 if device.type == "cuda" else 8), device=device, dtype=dtype)
    return float(2 * a.numel() * a.element_size() / min(_timed(a.clone, 5, device)))


# ---- make gpu ----

#: Of a mean after some rounds in float64, relative to the largest: sums are made in another order.
_EQUAL = 1e-7
#: What is fitted on both devices: algorithm, whether silos run as one. Protected records are refused on a GPU.
_COMPARED: dict[str, tuple[Algorithm, bool]] = {
    "SFVI": (SFVI(iterations=50), False),
    "SFVI, 4 samples": (SFVI(iterations=50, importance_samples=4), False),
    "SFVI, batches": (SFVI(iterations=50, sampling_rate=0.25), False),
    "SFVI, silos as one": (SFVI(iterations=50), True),
    "SFVI-Avg": (SFVIAvg(rounds=2, local_steps=25), False),
    "PVI": (PVI(rounds=2, local_steps=50), False),
}


def report(device: str, quick: bool, out: Path) -> None:
    """Equality first, then speed; one JSON in `out`. Raises ProtocolError, and writes nothing, where they disagree."""
    where = torch.device(device)
    began = time.perf_counter()
    equal = {name: _apart(*job, where) for name, job in _COMPARED.items()}
    for name, apart in equal.items():
        click.echo(f"{name:26} ends {apart:.1e} from the CPU's, of its largest value")
        if not apart <= _EQUAL:
            raise ProtocolError(f"{name}: on {device} the posterior ends {apart:.1e} from the CPU's; nothing is timed")
    sizes = [(4, 50)] if quick else [(50, 200), (50, 1200)]
    kinds = [torch.float32] if quick else [torch.float32, torch.float64]
    rounds = 3 if quick else 20
    rows = [measure(silos, n, where, kind, rounds, not quick) for silos, n in sizes for kind in kinds]
    on_cpu = [] if where.type == "cpu" else [measure(*sizes[0], torch.device("cpu"), kinds[0], rounds, True)]
    found = {
        "machine": rows[0]["machine"],
        "device": device,
        "quick": quick,
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda},
        "commit": commit(),
        "equal_within": _EQUAL,
        "largest_relative_difference": equal,
        "batch": rows,
        "batch_on_the_cpu_beside": on_cpu,
        "peak_bytes": torch.cuda.max_memory_allocated(where) if where.type == "cuda" else None,
        "seconds": time.perf_counter() - began,
    }
    write_atomically(out, json.dumps(found, indent=2).encode() + b"\n")
    click.echo(f"written: {out}")


def _apart(algorithm: Algorithm, batched: bool, device: torch.device) -> float:
    """How far q's means end from the CPU's after the same rounds on six cities, as a share of their largest."""
    data = six_cities.load().records
    model = FederatedModel(six_cities.six_cities, record_plate="child")
    silos = [{name: value[j::3] for name, value in data.items()} for j in range(3)]
    ends = []
    for where in (torch.device("cpu"), device):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SecureFVIWarning)  # a few rounds do not converge, and need not
            result = fit(model, silos, algorithm, seed=1, device=where, batch_silos=batched)
        ends.append(result.variational.eta["loc"].double().cpu())
    return float((ends[0] - ends[1]).abs().max() / ends[0].abs().max())
