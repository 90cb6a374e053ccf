"""What secure sums are meant to reach, and what a run of the benchmark found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Name, limit, value, unit and whether it was met, for each target; null where its row was not measured."""
    headline = _find(rows, kind="masked", bits=32, neighbours=10, length=10**6, dropout=0.0)
    bfv = _find(rows, kind="homomorphic", length=10**5, dropout=0.0)
    thousand = [row for row in rows if row["kind"] == "masked" and row["silos"] == 1000 and row["length"] == 10**4]
    found = [
        _target(
            "1e6 values, 10 neighbours, w = 32: silo's time over the floor",
            _of(headline, lambda row: row["silo_ms"] / row["floor_ms"]),
            at_most=2,
        ),
        _target(
            "the same: Flower's client over ours",
            _of(headline, lambda row: row["flower_ms"] / row["silo_ms"] if row["flower_ms"] else None),
            at_least=4,
        ),
        _target(
            "the same: bytes up over the ring's payload",
            _of(headline, lambda row: row["bytes_up_per_silo"] / (row["length"] * row["bits"] / 8)),
            at_most=1.02,
        ),
    ]
    for check, limit in ((False, 1.5), (True, 4.0)):
        for store in ("memory", "sqlite"):
            row = _find(rows, kind="masked", silos=3, length=64, consistency_check=check, store=store)
            name = f"3 silos, 64 values, {'with' if check else 'without'} consistency check, {store}: a sum"
            # The durable times are shown beside, without a limit: they are the disk's.
            at_most = limit if store == "memory" else None
            found.append(_target(name, _of(row, lambda row: row["sum_with_refill_ms"]), at_most=at_most, unit="ms"))
    found += [
        _target(
            "BFV, 1e5 values: all parties' time over TenSEAL alone",
            _of(bfv, lambda row: row["sum_ms"] / row["tenseal_sum_ms"]),
            at_most=1.3,
        ),
        _target(
            "the same: one silo and the server over TenSEAL alone",
            _of(bfv, lambda row: (row["silo_ms"] + row["server_ms"]) / row["tenseal_ms"]),
            at_most=1.3,
        ),
        _target(
            "1,000 silos, 1e4 values: a sum of all parties, signature checks apart",
            max((_without_checks(row) for row in thousand), default=None),
            at_most=60,
            unit="s",
        ),
        _target(
            "1,000 silos, 1e4 values: signature checks of all parties",
            max((row["sum_ms"] / 1e3 - _without_checks(row) for row in thousand), default=None),
            unit="s",
        ),
    ]
    return found


def _without_checks(row: Row) -> float:
    """Seconds of one sum, all parties together, less their signature checks."""
    contributing = row["silos"] - round(row["dropout"] * row["silos"])
    return float(row["sum_ms"] - contributing * row["silo_checks_ms"] - row["server_checks_ms"]) / 1e3


def _find(rows: Sequence[Row], **wanted: object) -> Row | None:
    return next((row for row in rows if all(row[key] == value for key, value in wanted.items())), None)


def _of(row: Row | None, value: Callable[[Row], float | None]) -> float | None:
    return None if row is None else value(row)


def _target(
    name: str,
    value: float | None,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    unit: str = "",
) -> dict[str, Any]:
    met: bool | None = None
    if value is not None and at_most is not None:
        met = value <= at_most
    if value is not None and at_least is not None:
        met = value >= at_least
    rounded = None if value is None else round(value, 5)
    return {"name": name, "value": rounded, "unit": unit, "at_most": at_most, "at_least": at_least, "met": met}
