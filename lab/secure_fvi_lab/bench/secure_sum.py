"""`secure-fvi bench secure-sum`: what secure sums cost here, beside their floor, Flower's SecAgg+ and TenSEAL alone.

Each repetition of a row times one sum of ours and then its peers, so that a machine that slows down slows all; medians
count. Times are of the wall clock, all parties one after another on one thread. docs/benchmarks-secure-sum.md says what
is in each number.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from secure_fvi.errors import InputError
from secure_fvi_lab.bench.sum_parties import (
    CHECKED_ONE_BY_ONE,
    Floor,
    Flower,
    FlowerTimes,
    Parties,
    Setting,
    Stopwatch,
    SumTimes,
    TenSEAL,
    TenSEALTimes,
)
from secure_fvi_lab.bench.sum_table import print_tables, targets
from secure_fvi_lab.machine import processor

#: Called with the share of the work done, in [0, 1], and what is being measured.
Report = Callable[[float, str], None]
Row = dict[str, Any]

_LONG = 10**7
_MEMORY_FOR_LONG_ROWS = 12 * 2**30
_PACKAGES = ("numpy", "cryptography", "galois", "flwr", "tenseal")


@dataclass(frozen=True)
class Case:
    """One row: `repeats` repetitions of `sums` sums each, of `length` values a silo, after one that warms up."""

    length: int
    lost: int = 0  # silos that fall silent before they contribute
    repeats: int = 5
    sums: int = 1


@dataclass(frozen=True)
class Work:
    """Rows that share a session."""

    setting: Setting
    cases: tuple[Case, ...]

    @property
    def seconds(self) -> float:
        """Roughly how long it takes; for the estimate of the time left only."""
        s = self.setting
        if s.kind == "homomorphic":
            a_value, a_silo = 2.5e-6, 0.01
        else:
            a_value, a_silo = 2e-9 * (s.neighbours + 5) * s.bits / 32, 0.001 + 2e-5 * s.neighbours
        setup = 0.1 + s.silos * s.neighbours * (6e-4 if s.kind == "masked" else 1e-2)
        sums = sum((c.repeats + 1) * c.sums * (s.silos * (a_silo + a_value * c.length)) for c in self.cases)
        flower = sum((c.repeats + 1) * c.sums * 9e-9 * s.neighbours * c.length for c in self.cases)
        return setup + sums + flower


def plan(quick: bool) -> list[Work]:
    """The rows: lengths for 10 neighbours, silos for 1e4 values, the steady state of three silos."""
    lengths = [10**3, 10**5] if quick else [10**3, 10**4, 10**5]
    long = [] if quick else [_LONG]
    repeats = 5 if quick else 9
    work = [
        Work(Setting("masked", 3, 64, check, durable), (Case(64, 0, repeats, 16 if quick else 64),))
        for check in (False, True)
        for durable in (False, True)
    ]
    for setting in (Setting("plain", 11), Setting("masked", 11, 32), Setting("masked", 11, 64)):
        work.append(Work(setting, tuple(Case(n, 0, repeats) for n in (*lengths, 10**6))))
        # In a session of its own: what the parties keep for 1e7 values takes gigabytes, and is then let go.
        work += [Work(setting, (Case(n, 0, 3),)) for n in long]
    silos = [3, 30, 100] if quick else [3, 10, 30, 100, 300, 1000]
    for kind, bits in (("plain", 32), ("masked", 32), ("masked", 64)):
        for count in silos if bits == 32 else [30]:
            few = 5 if count <= 100 else 3
            cases = [Case(10**4, 0, few), *([Case(10**4, count // 10, few)] if count >= 10 else [])]
            if count == 100 and kind == "masked":
                cases.append(Case(10**5, count // 10, 3))
            if not (quick and bits == 64):
                work.append(Work(Setting(kind, count, bits), tuple(cases)))
    bfv = [(10**4, 3), (10**5, 5)] if quick else [(10**3, 9), (10**4, 9), (10**5, 7), (10**6, 3)]
    work.append(Work(Setting("homomorphic", 3), tuple(Case(n, 0, count) for n, count in bfv)))
    if not quick:
        work.append(Work(Setting("homomorphic", 10), (Case(10**4, 0, 5), Case(10**4, 1, 5))))
    return work


def measure(quick: bool = False, report: Report | None = None, work: list[Work] | None = None) -> dict[str, Any]:
    """Machine, rows, targets and notes, as `bench secure-sum --json` prints them; times in milliseconds.

    Raises AggregationError when any of the sums is wrong.
    """
    report = report or (lambda share, what: None)
    notes: list[str] = []
    work = _that_fits(plan(quick), notes) if work is None else work
    began, load = time.perf_counter(), os.getloadavg()[0]
    rows: list[Row] = []
    whole, done = sum(item.seconds for item in work), 0.0
    with Stopwatch() as watch, tempfile.TemporaryDirectory() as folder:
        _warm_up(watch)
        for at, item in enumerate(work):
            setting = item.setting
            what = f"{setting.kind}, {setting.silos} silos"
            report(done / whole, what)
            within = Path(folder) / str(at)
            within.mkdir()
            try:
                parties = Parties(setting, watch, within if setting.durable else None)
            except ImportError as error:
                _note(notes, f"no {setting.kind} rows: {error}")
                continue
            left = len(item.cases)
            for case in item.cases:
                what = f"{setting.kind}, {setting.silos} silos, {case.length:,} values"
                report(done / whole, what)
                rows.append(_row(parties, case, notes))
                done += item.seconds / left
            del parties
        report(1.0, "")
    return {
        "machine": machine(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "load_average": {"before": load, "after": os.getloadavg()[0]},
        "seconds": time.perf_counter() - began,
        "quick": quick,
        "rows": rows,
        "targets": targets(rows),
        "notes": notes,
    }


def _that_fits(work: list[Work], notes: list[str]) -> list[Work]:
    """Without the longest rows on a machine that they would fill: 11 silos take up to 8 GB for 1e7 values."""
    memory = _memory()
    if memory is None or memory >= _MEMORY_FOR_LONG_ROWS:
        return work
    short = [item for item in work if all(case.length < _LONG for case in item.cases)]
    if len(short) < len(work):
        _note(
            notes, f"no rows of {_LONG:,} values: they take up to 8 GB, and this machine has {memory / 2**30:.0f} GiB"
        )
    return short


def _memory() -> int | None:
    """Bytes of memory; None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def _warm_up(watch: Stopwatch) -> None:
    """One small sum: whatever is compiled or loaded at first use is not a sum's time."""
    Parties(Setting("masked", 3), watch).sum(64)


def _row(parties: Parties, case: Case, notes: list[str]) -> Row:
    """Time one row, ours and its peers in turn."""
    setting = parties.setting
    masked, homomorphic = setting.kind == "masked", setting.kind == "homomorphic"
    floor = Floor(case.length, setting.bits, setting.neighbours + 1) if masked else None
    flower = _flower(case.length, setting.neighbours, notes) if masked else None
    tenseal = TenSEAL(case.length, setting.silos) if homomorphic else None
    ours: list[SumTimes] = []
    floors: list[float] = []
    flowers: list[FlowerTimes] = []
    tenseals: list[TenSEALTimes] = []
    for repeat in range(case.repeats + 1):
        several = [parties.sum(case.length, case.lost) for _ in range(case.sums)]
        mean = SumTimes._make(statistics.fmean(column) for column in zip(*several, strict=True))
        bare = floor.run() if floor else None
        client = flower.run() if flower else None
        alone = tenseal.run() if tenseal else None
        if not repeat:
            continue
        ours.append(mean._replace(exchanges=several[0].exchanges))
        floors += [] if bare is None else [bare]
        flowers += [] if client is None else [client]
        tenseals += [] if alone is None else [alone]
    median = SumTimes._make(statistics.median(column) for column in zip(*ours, strict=True))
    # Blocks of many sums meet their refills as they come; a row of few sums meets none.
    refill = median.refill
    if case.sums < parties.batch:
        refill = setting.silos * parties.refill.silo + parties.refill.server
    return {
        "kind": setting.kind,
        "silos": setting.silos,
        "length": case.length,
        "neighbours": setting.neighbours,
        "dropout": case.lost / setting.silos,
        "silo_ms": _ms(median.silo),
        "server_ms": _ms(median.server),
        "exchanges": int(median.exchanges),
        "bytes_up_per_silo": round(median.bytes_up),
        "floor_ms": _median_ms(floors),
        "flower_ms": _median_ms([t.client for t in flowers]),
        "tenseal_ms": _median_ms([t.silo + t.server for t in tenseals]),
        "bits": setting.bits if masked else None,
        "consistency_check": setting.consistency_check if masked or homomorphic else None,
        "store": "sqlite" if setting.durable else "memory",
        "repeats": case.repeats,
        "contribute_ms": _ms(median.contribute),
        "silo_checks_ms": _ms(median.silo_checks),
        "server_checks_ms": _ms(median.server_checks),
        "checks_shared": setting.silos > CHECKED_ONE_BY_ONE and masked,
        "holder_ms": _ms(median.holder) if homomorphic else None,
        "sum_ms": _ms(median.together),
        "sum_with_refill_ms": _ms(median.together + refill),
        "setup_silo_ms": _ms(parties.setup.silo),
        "setup_server_ms": _ms(parties.setup.server),
        "refill_silo_ms": _ms(parties.refill.silo),
        "refill_server_ms": _ms(parties.refill.server),
        "flower_masks_ms": _median_ms([t.masks for t in flowers]),
        "tenseal_silo_ms": _median_ms([t.silo for t in tenseals]),
        "tenseal_sum_ms": _median_ms([t.together(setting.silos) for t in tenseals]),
    }


def _flower(length: int, neighbours: int, notes: list[str]) -> Flower | None:
    try:
        return Flower(length, neighbours)
    except ImportError:
        _note(notes, "no times of Flower: it is not installed (`pip install flwr==1.41.*`)")
        return None


def _note(notes: list[str], text: str) -> None:
    if text not in notes:
        notes.append(text)


def _ms(seconds: float) -> float:
    """Milliseconds, to the microsecond's tenth."""
    return round(1000 * seconds, 4)


def _median_ms(seconds: list[float]) -> float | None:
    return _ms(statistics.median(seconds)) if seconds else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine() -> str:
    """Processor, cores, memory, operating system and Python in one line."""
    size = _memory()
    memory = "" if size is None else f", {size / 2**30:.0f} GiB"
    return f"{processor()}, {os.cpu_count()} cores{memory}, {platform.system()}, Python {platform.python_version()}"


def command(as_json: bool, quick: bool, plot: str | None) -> None:
    """Measure, then print a table or JSON; `plot` names the PNG to draw. Raises InputError for a bad `plot`."""
    target = None if plot is None else Path(plot)
    if target is not None and (target.suffix != ".png" or target.is_dir() or not target.parent.is_dir()):
        raise InputError(f"--plot '{plot}': must be a .png file in a folder that exists")
    with progress_bar() as report:
        found = measure(quick, report)
    if target is not None:
        from secure_fvi_lab.bench.sum_plot import png

        target.write_bytes(png(found["rows"]))
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        print_tables(found)


@contextmanager
def progress_bar() -> Iterator[Report]:
    """A bar with the time left on stderr, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left about"))
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("", total=1.0)
        yield lambda share, what: bar.update(task, completed=min(share, 1.0), description=what)
