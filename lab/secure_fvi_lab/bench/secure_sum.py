"""`secure-fvi bench secure-sum`: what secure sums cost here, beside their floor, Flower's SecAgg+ and TenSEAL alone.

Each repetition of a row times one sum of ours and then its peers, so that a machine that slows down slows all; medians
count. Times are of the wall clock, all parties one after another on one thread. docs/benchmarks-secure-sum.md says what
is in each number.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track

from secure_fvi.aggregation import Block, BlockTable, Masked, Plain
from secure_fvi.aggregation.base import Exchanges, FloatArray, SumServer, SumSilo, Total
from secure_fvi.aggregation.graph import neighbourhood
from secure_fvi.aggregation.homomorphic import Homomorphic, WithHolder
from secure_fvi.aggregation.parties import local_parties
from secure_fvi.aggregation.roster import MAX_ATTEMPTS, Roster
from secure_fvi.aggregation.store import MemoryStore, SqliteStore, Store
from secure_fvi.errors import AggregationError, InputError, ProtocolError
from secure_fvi_lab.experiments import Row, legend, lines_of, panels
from secure_fvi_lab.machine import machine

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
    setting: Setting
    cases: tuple[Case, ...]


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
    work += [
        Work(Setting("whole", 3, 64, True, durable), (Case(64, 0, repeats, 16 if quick else 64),))
        for durable in (False, True)
    ]
    for setting in (
        Setting("plain", 11),
        *(Setting(k, 11, b) for k, b in (("masked", 32), ("masked", 64), ("whole", 32))),
    ):
        work.append(Work(setting, tuple(Case(n, 0, repeats) for n in (*lengths, 10**6))))
        # In a session of its own: what the parties keep for 1e7 values takes gigabytes, and is then let go.
        work += [Work(setting, (Case(n, 0, 3),)) for n in long]
    silos = [3, 30, 100] if quick else [3, 10, 30, 100, 300, 1000]
    for kind, bits in (("plain", 32), ("masked", 32), ("masked", 64), ("whole", 32)):
        for count in silos if bits == 32 else [30]:
            few = 5 if count <= 100 else 3
            cases = [Case(10**4, 0, few)]
            if count >= 10 and kind != "whole":
                cases.append(Case(10**4, count // 10, few))
            if count == 100 and kind == "masked":
                cases.append(Case(10**5, count // 10, 3))
            if not (quick and bits == 64):
                work.append(Work(Setting(kind, count, bits), tuple(cases)))
    bfv = [(10**4, 3), (10**5, 5)] if quick else [(10**3, 9), (10**4, 9), (10**5, 7), (10**6, 3)]
    work.append(Work(Setting("homomorphic", 3), tuple(Case(n, 0, count) for n, count in bfv)))
    if not quick:
        work.append(Work(Setting("homomorphic", 10), (Case(10**4, 0, 5), Case(10**4, 1, 5))))
    return work


def of_length(values: int) -> list[Work]:
    """The rows of so many values, 10 neighbours each, and no others."""
    kinds = [(kind, bits) for kind in ("masked", "whole") for bits in (32, 64)]
    return [Work(Setting(kind, 11, bits), (Case(values, 0, 3 if values >= _LONG else 9),)) for kind, bits in kinds]


def measure(quick: bool = False, work: list[Work] | None = None) -> dict[str, Any]:
    """Machine, rows, targets and notes, as `bench secure-sum --json` prints them; times in milliseconds. A bar on
    stderr, where that is a terminal, counts sessions.

    Raises AggregationError when any of the sums is wrong.
    """
    notes: list[str] = []
    work = _that_fits(plan(quick) if work is None else work, notes)
    began, load = time.perf_counter(), os.getloadavg()[0]
    rows: list[Row] = []
    console = Console(stderr=True)
    sessions = track(work, "sessions", console=console, transient=True, disable=not console.is_terminal)
    with Stopwatch() as watch, tempfile.TemporaryDirectory() as folder:
        Parties(Setting("masked", 3), watch).sum(64)  # whatever is compiled or loaded at first use is not a sum's time
        for at, item in enumerate(sessions):
            setting = item.setting
            within = Path(folder) / str(at)
            within.mkdir()
            try:
                parties = Parties(setting, watch, within if setting.durable else None)
            except ImportError as error:
                _note(notes, f"no {setting.kind} rows: {error}")
                continue
            rows += [_row(parties, case, notes) for case in item.cases]
            del parties
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


def _row(parties: Parties, case: Case, notes: list[str]) -> Row:
    """Time one row, ours and its peers in turn."""
    setting = parties.setting
    masked, homomorphic = setting.kind in ("masked", "whole"), setting.kind == "homomorphic"
    masks = setting.neighbours + (setting.kind == "masked")
    floor = Floor(case.length, setting.bits, masks) if masked else None
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
    return round(1000 * seconds, 4)


def _median_ms(seconds: list[float]) -> float | None:
    return _ms(statistics.median(seconds)) if seconds else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def command(as_json: bool, quick: bool, plot: str | None, values: int | None = None) -> None:
    """Measure, then print a table or JSON; `plot` names the PNG to draw. Raises InputError for a bad `plot`."""
    target = None if plot is None else Path(plot)
    if target is not None and (target.suffix != ".png" or target.is_dir() or not target.parent.is_dir()):
        raise InputError(f"--plot '{plot}': must be a .png file in a folder that exists")
    found = measure(quick, None if values is None else of_length(values))
    if target is not None:
        drawn(found["rows"]).savefig(target, dpi=150)
    print(json.dumps(found, indent=2) if as_json else "\n".join(lines(found)))


# ---- The tables of `bench secure-sum`, and what of them was aimed at ----

_HEAD = (
    "kind", "silos", "neighbours", "values", "lost", "silo", "checks", "server", "all", "exchanges", "bytes up",
    "floor", "silo/floor", "Flower", "Flower/silo", "TenSEAL",
)  # fmt: skip
_SESSION = ("setup_silo", "setup_server", "refill_silo", "refill_server")


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Rows, sessions, targets and notes of `measure`, for a terminal."""
    load, measured = found["load_average"], found["rows"]
    yield found["machine"]
    yield (
        f"{found['seconds']:.0f} s; load average {load['before']:.2f} before, {load['after']:.2f} after; every total "
        "was equal to NumPy's to the last bit"
    )
    yield from ["", *lines_of(_HEAD, map(_cells, measured)), ""]
    yield "Medians, ms. Silo: one silo, one sum; checks: of which signature checks; server: key holder included; all:"
    yield "all parties, one after another. Floor: keystreams and additions; Flower: one client's masking stage;"
    yield "TenSEAL: one silo and the server, no protocol. ~: each signature was checked once, and charged to all that"
    yield "check it. Below, apart from the sums: set-up once a session; refills, a sum's share of its batch's."
    sessions = {(_kind(row), row["silos"]): row for row in reversed(measured) if row["neighbours"]}
    shown = (
        (kind, f"{silos:,}", row["neighbours"], *(_number(row[f"{time}_ms"]) for time in _SESSION))
        for (kind, silos), row in reversed(sessions.items())
    )
    yield from ["", *lines_of((*_HEAD[:3], *_SESSION), shown), ""]
    yield from lines_of(("target", "limit", "found", ""), map(_target_cells, found["targets"]))
    yield from (f"note: {note}" for note in found["notes"])


def _cells(row: Row) -> list[str]:
    shared = "~" if row["checks_shared"] else ""
    return [
        _kind(row),
        f"{row['silos']:,}",
        str(row["neighbours"] or ""),
        _power(row["length"]),
        f"{row['dropout']:.0%}" if row["dropout"] else "",
        _number(row["silo_ms"]),
        shared + _number(row["silo_checks_ms"]) if row["silo_checks_ms"] else "",
        _number(row["server_ms"]),
        _number(row["sum_ms"]),
        str(row["exchanges"]),
        f"{row['bytes_up_per_silo']:,}",
        _number(row["floor_ms"]),
        _ratio(row["silo_ms"], row["floor_ms"]),
        _number(row["flower_ms"]),
        _ratio(row["flower_ms"], row["silo_ms"]),
        _number(row["tenseal_ms"]),
    ]


def _kind(row: Row) -> str:
    """`masked w=32 no check, sqlite`, and so on."""
    if row["kind"] not in ("masked", "whole"):
        return {"homomorphic": "BFV", "plain": "plain"}[row["kind"]]
    check = " no check" if row["kind"] == "masked" and not row["consistency_check"] else ""
    return f"{row['kind']} w={row['bits']}{check}{'' if row['store'] == 'memory' else ' ' + row['store']}"


def _target_cells(target: Row) -> tuple[str, ...]:
    unit = f" {target['unit']}" if target["unit"] else ""
    limits = (("<=", target["at_most"]), (">=", target["at_least"]))
    limit = "".join(f"{sign} {value:g}{unit}" for sign, value in limits if value is not None)
    value = "not measured" if target["value"] is None else f"{target['value']:.4g}{unit}"
    return target["name"], limit, value, {True: "met", False: "not met", None: ""}[target["met"]]


def _power(count: int) -> str:
    """1e6 for a million; other numbers in full."""
    digits = len(str(count)) - 1
    return f"1e{digits}" if digits > 2 and count == 10**digits else str(count)


def _number(ms: float | None) -> str:
    """Two or three significant digits, without an exponent; at least a microsecond."""
    if ms is None:
        return ""
    return f"{ms:,.0f}" if ms >= 100 else f"{max(ms, 0.001):.{2 if ms < 0.1 else 3}g}"


def _ratio(above: float | None, below: float | None) -> str:
    if above is None or not below:
        return ""
    return f"{above / below:,.0f}" if above >= 10 * below else f"{above / below:.2f}"


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What secure sums are meant to reach: name, limit, value, unit and whether it was met, for each target; null where
    its row was not measured."""
    headline = _find(rows, kind="masked", bits=32, neighbours=10, length=10**6, dropout=0.0)
    bfv = _find(rows, kind="homomorphic", length=10**5, dropout=0.0)
    thousand = [row for row in rows if row["kind"] == "masked" and row["silos"] == 1000 and row["length"] == 10**4]
    payload = {**headline, "payload": headline["length"] * headline["bits"] / 8} if headline else None
    both = {**bfv, "both_ms": bfv["silo_ms"] + bfv["server_ms"]} if bfv else None
    apart = max((_without_checks(row) for row in thousand), default=None)
    checks = max((row["sum_ms"] / 1e3 - _without_checks(row) for row in thousand), default=None)
    floor = _over(headline, "silo_ms", "floor_ms")
    found = [
        _target("1e6 values, 10 neighbours, w = 32: silo's time over the floor", floor, 2),
        _target("the same: Flower's client over ours", _over(headline, "flower_ms", "silo_ms"), at_least=4),
        _target("the same: bytes up over the ring's payload", _over(payload, "bytes_up_per_silo", "payload"), 1.02),
    ]
    for kind, bits in (("whole", 32), ("whole", 64), ("masked", 32), ("masked", 64)):
        long = _find(rows, kind=kind, bits=bits, neighbours=10, length=_LONG, dropout=0.0)
        name = f"1e7 values, 10 neighbours, {'whole' if kind == 'whole' else 'recovers'}, w = {bits}: over the floor"
        found.append(_target(name, _over(long, "silo_ms", "floor_ms"), 2))
    for check, limit in ((False, 1.5), (True, 4.0)):
        for store in ("memory", "sqlite"):
            row = _find(rows, kind="masked", silos=3, length=64, consistency_check=check, store=store)
            name = f"3 silos, 64 values, {'with' if check else 'without'} consistency check, {store}: a sum"
            # The durable times are shown beside, without a limit: they are the disk's.
            at_most = limit if store == "memory" else None
            found.append(_target(name, None if row is None else row["sum_with_refill_ms"], at_most, unit="ms"))
    for store in ("memory", "sqlite"):
        row = _find(rows, kind="whole", silos=3, length=64, store=store)
        name = f"3 silos, 64 values, whole, {store}: a sum"
        found.append(_target(name, None if row is None else row["sum_ms"], unit="ms"))
    return [
        *found,
        _target("BFV, 1e5 values: all parties' time over TenSEAL alone", _over(bfv, "sum_ms", "tenseal_sum_ms"), 1.3),
        _target("the same: one silo and the server over TenSEAL alone", _over(both, "both_ms", "tenseal_ms"), 1.3),
        _target("1,000 silos, 1e4 values: a sum of all parties, signature checks apart", apart, 60, unit="s"),
        _target("1,000 silos, 1e4 values: signature checks of all parties", checks, unit="s"),
    ]


def _without_checks(row: Row) -> float:
    """Seconds of one sum, all parties together, less their signature checks."""
    contributing = row["silos"] - round(row["dropout"] * row["silos"])
    return float(row["sum_ms"] - contributing * row["silo_checks_ms"] - row["server_checks_ms"]) / 1e3


def _find(rows: Sequence[Row], **wanted: object) -> Row | None:
    return next((row for row in rows if all(row[key] == value for key, value in wanted.items())), None)


def _over(row: Row | None, above: str, below: str) -> float | None:
    return row[above] / row[below] if row and row[above] else None


def _target(
    name: str, value: float | None, at_most: float | None = None, at_least: float | None = None, unit: str = ""
) -> dict[str, Any]:
    met = None
    if value is not None and (at_most is not None or at_least is not None):
        met = value <= at_most if at_most is not None else value >= (at_least or 0.0)
    rounded = None if value is None else round(value, 5)
    return {"name": name, "value": rounded, "unit": unit, "at_most": at_most, "at_least": at_least, "met": met}


# ---- The plot of `bench secure-sum`: time a silo against length, and against the number of silos ----

_INK, _OURS, _OURS_64, _FLOWER, _BFV = "#1f2937", "#2563eb", "#7aa5f7", "#d97706", "#0f766e"
_PLAIN, _SERVER = "#9ca3af", "#9333ea"
_OF_LENGTH, _OF_SILOS = 11, 10**4


def drawn(rows: Sequence[Row]) -> Figure:
    figure, (left, right) = panels(1, 2, 9.6, 5.2)
    _against_length(left, rows)
    _against_silos(right, rows)
    for axes in (left, right):
        axes.set(xscale="log", yscale="log")
        axes.grid(color="#e5e7eb", lw=0.6)
        legend(axes, axes, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    return figure


def _against_length(axes: Axes, rows: Sequence[Row]) -> None:
    axes.set(title="One silo, one sum: 10 neighbours (BFV: 3 silos)", xlabel="values", ylabel="ms")
    long = [row for row in rows if not row["dropout"] and row["length"] >= 1000]
    masked = [row for row in long if row["kind"] == "masked" and row["silos"] == _OF_LENGTH]
    narrow = [row for row in masked if row["bits"] == 32]
    wide = [row for row in masked if row["bits"] == 64]
    bfv = [row for row in long if row["kind"] == "homomorphic" and row["silos"] == 3]
    plain = [row for row in long if row["kind"] == "plain" and row["silos"] == _OF_LENGTH]
    _line(axes, bfv, "length", "silo_ms", "BFV and masks", color=_BFV, marker="o")
    _line(axes, bfv, "length", "tenseal_silo_ms", "TenSEAL alone", color=_BFV, ls=":")
    _line(axes, narrow, "length", "flower_ms", "Flower SecAgg+, one client", color=_FLOWER, marker="s")
    _line(axes, wide, "length", "silo_ms", "masked, w = 64", color=_OURS_64, marker="o")
    _line(axes, narrow, "length", "silo_ms", "masked, w = 32", color=_OURS, marker="o")
    _line(axes, narrow, "length", "floor_ms", "floor: AES-CTR, additions (w = 32)", color=_INK, ls=":")
    _line(axes, plain, "length", "silo_ms", "plain", color=_PLAIN, marker="o")


def _against_silos(axes: Axes, rows: Sequence[Row]) -> None:
    axes.set(title="Masked sums of 1e4 values, w = 32", xlabel="silos", ylabel="ms")
    swept = [row for row in rows if row["kind"] == "masked" and row["bits"] == 32 and row["length"] == _OF_SILOS]
    swept = [{**row, "own_ms": row["silo_ms"] - row["silo_checks_ms"]} for row in swept if row["silos"] != _OF_LENGTH]
    whole = [row for row in swept if not row["dropout"]]
    lost = [row for row in swept if row["dropout"]]
    _line(axes, lost, "silos", "server_ms", "server, 10% of the silos lost", color=_SERVER, marker="s")
    _line(axes, whole, "silos", "server_ms", "server, none lost", color=_SERVER, marker="s", ls="--", mfc="white")
    _line(axes, whole, "silos", "silo_ms", "one silo", color=_OURS, marker="o")
    _line(axes, whole, "silos", "own_ms", "one silo, signature checks apart", color=_OURS_64, marker="o")
    _line(axes, whole, "silos", "floor_ms", "floor", color=_INK, ls=":")


def _line(axes: Axes, rows: Sequence[Row], x: str, y: str, label: str, **style: Any) -> None:
    points = sorted({row[x]: row[y] for row in rows if row[y]}.items())
    if points:
        axes.plot([p[0] for p in points], [p[1] for p in points], label=label, **style)


# ---- All parties of a sum in one process, each on its own stopwatch, and every total checked against NumPy's ----
#
# Values are multiples of 2^-10 in [-1, 1]: any ring and any order of float64 additions sums them without error, so that
# a total is either equal to NumPy's to the last bit or wrong.

P = ParamSpec("P")
T = TypeVar("T")

#: Above this many silos one process cannot check every signature once a silo in reasonable time; see `Stopwatch`.
CHECKED_ONE_BY_ONE = 32


@dataclass(frozen=True)
class Setting:
    """One session of parties. `bits` is the ring's width; `durable` keeps state in SQLite files."""

    kind: str  # "plain", "masked" (sums that recover), "whole" (masked ones that lack nobody), "homomorphic"
    silos: int
    bits: int = 64
    consistency_check: bool = True
    durable: bool = False

    @property
    def neighbours(self) -> int:
        """Silos with which each silo masks."""
        if self.kind == "plain":
            return 0
        return neighbourhood(self.silos, 0.1, 0.1, MAX_ATTEMPTS * self.silos if self.kind == "whole" else 1).k


class SumTimes(NamedTuple):
    """What one sum cost: seconds, exchanges, bytes. Signature checks are part of their party's time."""

    silo: float  # mean over contributing silos
    contribute: float  # of which encoding, masking, packing
    silo_checks: float  # of which signature checks
    server: float  # the key holder included
    server_checks: float
    holder: float
    together: float  # all parties, one after another
    refill: float  # one-time secrets that this sum happened to need, all parties; not in the above
    exchanges: int
    bytes_up: float  # mean over contributing silos


class PrepareTimes(NamedTuple):
    """Set-up and refills, seconds; signature checks included."""

    silo: float  # mean over silos
    server: float


class Stopwatch:
    """Seconds by party. As a context it also times signature checks, wherever they happen.

    With `share`, a signature that several parties check is checked once, and what that took is charged to each
    of them: 1,000 silos that check 667 signatures each would take this process over a minute a sum.
    """

    def __init__(self) -> None:
        self.share = False
        self.seconds: dict[str, float] = defaultdict(float)
        self.checks: dict[str, float] = defaultdict(float)
        self.charged = 0.0  # seconds not spent, but charged
        self._checking = 0.0  # seconds of signature checks, spent or charged
        self._known: dict[tuple[int, bytes, bytes], tuple[bool, float]] = {}
        self._verify = Roster.verify

    def __enter__(self) -> Self:
        verify = self._verify

        def timed(roster: Roster, place: int, signature: bytes, statement: bytes) -> bool:
            key = (place, signature, statement)
            if self.share and (known := self._known.get(key)) is not None:
                self.charged += known[1]
                self._checking += known[1]
                return known[0]
            began = time.perf_counter()
            right = verify(roster, place, signature, statement)
            took = time.perf_counter() - began
            self._checking += took
            if self.share:
                self._known[key] = right, took
            return right

        Roster.verify = timed  # type: ignore[method-assign, assignment]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Roster.verify = self._verify  # type: ignore[method-assign]

    def __call__(self, party: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do `work` on `party`'s time."""
        charged, checking = self.charged, self._checking
        began = time.perf_counter()
        try:
            return work(*args, **kwargs)
        finally:
            self.seconds[party] += time.perf_counter() - began + self.charged - charged
            self.checks[party] += self._checking - checking

    def reset(self) -> None:
        self.seconds.clear()
        self.checks.clear()

    def new_session(self, share: bool) -> None:
        """Forget the signatures of the session before."""
        self._known.clear()
        self.share = share


class Parties:
    """The parties of one `Setting`, from set-up to the last sum."""

    def __init__(self, setting: Setting, watch: Stopwatch, folder: Path | None = None) -> None:
        """`folder` takes the SQLite files of a durable setting."""
        self.setting = setting
        self.ids = [f"silo-{at:04d}" for at in range(setting.silos)]
        self._watch = watch
        self._server, self._silos, self.batch = self._make(folder)
        self._exchanges = 0
        self._bytes_up = 0
        self._tables: dict[int, tuple[BlockTable, FloatArray]] = {}
        self._expected: dict[tuple[int, int], FloatArray] = {}
        watch.new_session(share=setting.silos > CHECKED_ONE_BY_ONE)
        self.setup = self._prepare(0)
        # The first index of the second batch: no set-up, a refill alone.
        refill = self._prepare(self.batch)
        self.refill = PrepareTimes(refill.silo / self.batch, refill.server / self.batch)
        self._index = self.batch

    def _make(self, folder: Path | None) -> tuple[SumServer, Mapping[str, SumSilo], int]:
        """Server, silos by id, and the number of sums that one refill lasts."""
        setting = self.setting
        stores = iter(range(setting.silos + 2))

        def store(_: str) -> Store:
            return MemoryStore() if folder is None else SqliteStore(folder / f"{next(stores)}.sqlite")

        if setting.kind == "plain":
            server, silos = local_parties(Plain(), self.ids)
            return server, silos, 1
        if setting.kind in ("masked", "whole"):
            most = 0 if setting.kind == "whole" else max(len(self.ids) - 3, 1)
            bits: Any = setting.bits
            kind = Masked(max_missing=most, bits=bits, consistency_check=setting.consistency_check)
            server, silos = local_parties(kind, self.ids, store)
            # The batch follows from the number of silos; the keys of this second roster are nobody's.
            return server, silos, kind.roster({silo: silo.encode().ljust(32) for silo in self.ids}).batch
        inner, silos, holder = Homomorphic(batch=4, max_missing=max(len(self.ids) - 3, 0)).parties(self.ids, store)
        return WithHolder(inner, lambda message: self._watch("holder", holder.handle, message)), silos, 4

    def sum(self, length: int, lost: int = 0) -> SumTimes:
        """One sum of `length` values a silo; `lost` silos fall silent before they contribute.

        Raises AggregationError for a total that is not NumPy's.
        """
        watch, index = self._watch, self._index
        self._index += 1
        table, base = self._table(length)
        context = hashlib.sha256(index.to_bytes(8, "big")).digest()
        present = self.ids[lost:]
        watch.reset()
        began = time.perf_counter()
        self._carry(self._server.prepare(index), self.ids)
        refill = time.perf_counter() - began
        watch.reset()
        charged = watch.charged
        self._exchanges, self._bytes_up = 1, 0
        began = time.perf_counter()
        messages = {}
        for at, silo in enumerate(present, lost):
            values = base[at : at + length]
            messages[silo] = watch("silos", self._silos[silo].contribute, index, self.ids, table, values, context)
        contribute = watch.seconds["silos"]
        total = self._carry(self._server.total(index, self.ids, table, messages, context), present)
        together = time.perf_counter() - began + watch.charged - charged
        self._check(total, length, lost)
        count = len(present)
        return SumTimes(
            silo=watch.seconds["silos"] / count,
            contribute=contribute / count,
            silo_checks=watch.checks["silos"] / count,
            server=watch.seconds["server"],
            server_checks=watch.checks["server"],
            holder=watch.seconds["holder"],
            together=together,
            refill=refill,
            exchanges=self._exchanges,
            bytes_up=(self._bytes_up + sum(map(len, messages.values()))) / count,
        )

    def _prepare(self, index: int) -> PrepareTimes:
        self._watch.reset()
        self._carry(self._server.prepare(index), self.ids)
        return PrepareTimes(self._watch.seconds["silos"] / self.setting.silos, self._watch.seconds["server"])

    def _table(self, length: int) -> tuple[BlockTable, FloatArray]:
        """The table of `length` values, and the array of which silo j contributes [j, j + length)."""
        if length not in self._tables:
            rng = np.random.default_rng(length)
            base: FloatArray = np.ldexp(rng.integers(-1024, 1025, length + self.setting.silos), -10).astype(np.float64)
            self._tables[length] = BlockTable((Block("values", (length,), 1.0),)), base
        return self._tables[length]

    def _carry(self, exchanges: Exchanges[T], reachable: list[str]) -> T:
        """Run `exchanges` with the silos that are `reachable`."""
        within, watch = set(reachable), self._watch
        step: Callable[[], Mapping[str, bytes]] = partial(next, exchanges)
        try:
            while True:
                messages = watch("server", step)
                replies = {}
                for silo in messages.keys() & within:
                    try:
                        replies[silo] = watch("silos", self._silos[silo].handle, messages[silo])
                    except ProtocolError as error:
                        raise AggregationError(f"an honest message was refused: {error}") from error
                    self._bytes_up += len(replies[silo])
                self._exchanges += 1
                step = partial(exchanges.send, replies)
        except StopIteration as end:
            result: T = end.value
            return result

    def _check(self, total: Total, length: int, lost: int) -> None:
        """Raise AggregationError unless survivors and total are what they must be."""
        if (length, lost) not in self._expected:
            base = self._table(length)[1]
            expected = np.zeros(length)
            for at in range(lost, self.setting.silos):
                expected += base[at : at + length]
            self._expected[length, lost] = expected
        if total.survivors != tuple(self.ids[lost:]) or not np.array_equal(total.values, self._expected[length, lost]):
            raise AggregationError(f"the {self.setting.kind} sum of {length} values is wrong; its time means nothing")


# ---- What secure sums are measured against, in the same process: the floor, Flower's SecAgg+, TenSEAL alone ----

#: Keystream and sum of a chunk stay in the second-level cache together.
_CHUNK = 1 << 17
#: Defaults of Flower's SecAggPlusWorkflow.
_CLIPPING_RANGE, _QUANTIZATION_RANGE, _MODULUS_RANGE, _MAX_WEIGHT = 8.0, 1 << 22, 1 << 32, 1000.0
#: TenSEAL's parameters here: ring degree, and a plaintext prime of 58 bits.
_DEGREE = 8192


class Floor:
    """AES-256-CTR keystreams, added up in Z_2^bits: what masking cannot do without. No encoding, keys or messages."""

    def __init__(self, length: int, bits: int, masks: int) -> None:
        self._dtype = np.dtype(np.uint32 if bits == 32 else np.uint64)
        self._length = length
        self._keys = [os.urandom(32) for _ in range(masks)]
        self._zeros = bytes(min(_CHUNK, length * self._dtype.itemsize))
        self.total = np.zeros(0, self._dtype)

    def run(self) -> float:
        """Seconds. The sum of the keystreams is left in `total`, for tests."""
        began = time.perf_counter()
        encryptors = [Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor() for key in self._keys]
        total = np.zeros(self._length, self._dtype)
        buffer = bytearray(len(self._zeros) + 15)
        stream = np.frombuffer(buffer, self._dtype, len(self._zeros) // self._dtype.itemsize)
        for start in range(0, self._length, stream.size):
            part = total[start : start + stream.size]
            zeros = self._zeros if part.size == stream.size else self._zeros[: part.nbytes]
            for encryptor in encryptors:
                encryptor.update_into(zeros, buffer)
                np.add(part, stream[: part.size], out=part)
        took = time.perf_counter() - began
        self.total = total
        return took


class FlowerTimes(NamedTuple):
    """Seconds of one client."""

    client: float  # weighting, quantisation, masks, their addition, modulus, serialisation
    masks: float  # of which generating masks


class Flower:
    """A client's `collect masked vectors` stage of SecAgg+, by Flower's own functions in Flower's own order.

    Left out, in Flower's favour: key agreement with each neighbour, and the decryption of the shares it sent.
    """

    def __init__(self, length: int, neighbours: int) -> None:
        """Raises ImportError where Flower is not installed."""
        # Flower looks outside on its own account unless it is told not to.
        for name in ("FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK"):
            os.environ.setdefault(name, "0" if name.endswith("ENABLED") else "1")
        package = "flwr.common.secure_aggregation"
        self._arithmetic: Any = importlib.import_module(f"{package}.ndarrays_arithmetic")
        self._quantize: Any = importlib.import_module(f"{package}.quantization").quantize
        self._generate: Any = importlib.import_module(f"{package}.secaggplus_utils").pseudo_rand_gen
        self._serialise: Any = importlib.import_module("flwr.common").ndarray_to_bytes
        self._values = np.random.default_rng(2).uniform(-1, 1, length).astype(np.float32)
        self._seeds = [os.urandom(32) for _ in range(neighbours + 1)]

    def run(self) -> FlowerTimes:
        """Time one client. Half of its neighbours come before it in the order that decides signs."""
        arithmetic, masking = self._arithmetic, 0.0
        began = time.perf_counter()
        weight = round(1.0 / _MAX_WEIGHT * _QUANTIZATION_RANGE)
        weighted = arithmetic.parameters_multiply([self._values], weight / _QUANTIZATION_RANGE)
        vector = self._quantize(weighted, _CLIPPING_RANGE, _QUANTIZATION_RANGE)
        vector = arithmetic.factor_combine(weight, vector)
        shapes = [part.shape for part in vector]
        for at, seed in enumerate(self._seeds):
            start = time.perf_counter()
            mask = self._generate(seed, _MODULUS_RANGE, shapes)
            masking += time.perf_counter() - start
            # The first is the private mask, which is added.
            combine = arithmetic.parameters_subtraction if at % 2 else arithmetic.parameters_addition
            vector = combine(vector, mask)
        vector = arithmetic.parameters_mod(vector, _MODULUS_RANGE)
        for part in vector:
            self._serialise(part)
        return FlowerTimes(time.perf_counter() - began, masking)


class TenSEALTimes(NamedTuple):
    """Seconds of a sum by TenSEAL alone."""

    silo: float  # encrypt and serialise, mean over silos
    server: float  # read, add and decrypt

    def together(self, silos: int) -> float:
        return silos * self.silo + self.server


class TenSEAL:
    """BFV with this package's parameters on one thread, as TenSEAL's documentation uses it; no masks, no protocol."""

    def __init__(self, length: int, silos: int) -> None:
        """Raises ImportError where TenSEAL is not installed."""
        self._ts: Any = importlib.import_module("tenseal")
        prime = importlib.import_module("secure_fvi.aggregation.homomorphic_schemes").BFV_PRIME
        self._secret = self._ts.context(self._ts.SCHEME_TYPE.BFV, _DEGREE, prime, n_threads=1)
        self._public = self._ts.context_from(self._secret.serialize(True, False, False, False), n_threads=1)
        largest = prime // (2 * silos) - 1
        rng = np.random.default_rng(1)
        self._values = [rng.integers(-largest, largest + 1, length) for _ in range(silos)]

    def run(self) -> TenSEALTimes:
        """Time one sum. Raises AggregationError for a total that is not NumPy's."""
        ts, began, sent = self._ts, time.perf_counter(), []
        for values in self._values:
            parts = (values[at : at + _DEGREE] for at in range(0, values.size, _DEGREE))
            sent.append([ts.bfv_vector(self._public, part).serialize() for part in parts])
        encrypted = time.perf_counter()
        total: list[Any] = []
        for parts_sent in sent:
            vectors = [ts.bfv_vector_from(self._public, data) for data in parts_sent]
            if total:
                for left, right in zip(total, vectors, strict=True):
                    left.add_(right)
            else:
                total = vectors
        for vector in total:
            vector.link_context(self._secret)
        result = np.concatenate([np.array(vector.decrypt(), np.int64) for vector in total])
        ended = time.perf_counter()
        if not np.array_equal(result, np.sum(self._values, axis=0)):
            raise AggregationError("TenSEAL's own sum is wrong; its time means nothing")
        return TenSEALTimes((encrypted - began) / len(self._values), ended - encrypted)
