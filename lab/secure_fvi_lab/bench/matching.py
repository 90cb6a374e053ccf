"""What private matching costs: identifiers a second, all silos in one process, and what libsodium's calls alone do."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from secure_fvi import alignment
from secure_fvi.errors import SecureFVIError
from secure_fvi_lab.machine import commit, processor

_CALLS = 4000


def measure(ids: int, silos: int) -> dict[str, Any]:
    """Each silo holds `ids` identifiers, of which each next one lacks a tenth. Raises unless exactly those that all
    hold are found. Seconds of the clock, which other work on the machine lengthens, and of the processor, over all
    threads."""
    if silos < 2 or ids < 10 * silos:
        raise SecureFVIError("two silos and ten identifiers for each are needed at least")
    tables = {f"s{j}": [f"{i + j * (ids // 10):09d}" for i in range(ids)] for j in range(silos)}
    expected = max(ids - (silos - 1) * (ids // 10), 0)
    clock, used = time.perf_counter(), time.process_time()
    found = alignment.align(tables)
    clock, used = time.perf_counter() - clock, time.process_time() - used
    people = [[tables[s][row] for row in f.rows] for s, f in found.items()]
    if len(people[0]) != expected or any(p != people[0] for p in people):
        raise SecureFVIError("the people found are not those that all silos hold")
    places = silos * (ids + alignment.CHECKS)
    return {
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "commit": commit(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "ids": ids,
        "silos": silos,
        "matched": expected,
        "seconds": clock,
        "processor seconds": used,
        "processor us an identifier": used / places * 1e6,
        "identifiers a processor second": places / used,
        "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "us a call": _calls(),
        "calls at once": {str(threads): _at_once(threads) for threads in (1, 2)},
    }


def _calls() -> dict[str, float]:
    """Processor microseconds of a call of each kind: a lower bound of what a place costs."""
    group, wide = alignment._group(), os.urandom(64)
    point, scalar = group.crypto_core_ristretto255_random(), group.crypto_core_ristretto255_scalar_random()
    kinds = {
        "hash to the group": lambda: group.crypto_core_ristretto255_from_hash(wide),
        "multiply": lambda: group.crypto_scalarmult_ristretto255(scalar, point),
        "invert a scalar": lambda: group.crypto_core_ristretto255_scalar_invert(scalar),
    }
    found = {}
    for name, call in kinds.items():
        began = time.process_time()
        for _ in range(_CALLS):
            call()
        found[name] = (time.process_time() - began) / _CALLS * 1e6
    return found


def _at_once(threads: int) -> float:
    """Processor seconds a second of multiplications in so many threads: above 1 they do not wait for Python's lock."""
    group = alignment._group()
    point, scalar = group.crypto_core_ristretto255_random(), group.crypto_core_ristretto255_scalar_random()

    def work(_: int) -> None:
        for _ in range(_CALLS):
            group.crypto_scalarmult_ristretto255(scalar, point)

    clock, used = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    return (time.process_time() - used) / (time.perf_counter() - clock)


def lines(found: dict[str, Any]) -> Iterator[str]:
    load = "unknown" if found["load"] is None else f"{found['load']:.1f}"
    yield f"{found['machine']}, load {load}"
    yield f"{found['silos']} silos x {found['ids']} identifiers, {found['matched']} in common, found exactly"
    for name in (
        "seconds",
        "processor seconds",
        "processor us an identifier",
        "identifiers a processor second",
        "peak MB",
    ):
        yield f"{name:44} {found[name]:10.1f}"
    for name, us in found["us a call"].items():
        yield f"{name + ', us':44} {us:10.1f}"
    for threads, ratio in found["calls at once"].items():
        yield f"{'processors busy with ' + threads + ' thread(s)':44} {ratio:10.2f}"
