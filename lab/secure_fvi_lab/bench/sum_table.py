"""The table of `bench secure-sum`, and what of it was aimed at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def print_tables(found: dict[str, Any], console: Console | None = None) -> None:
    """Rows, targets and notes of `measure` on stdout."""
    console = console or Console()
    rows = _rows(found["rows"])
    # A narrow terminal breaks lines rather than numbers.
    console.width = max(console.width, Measurement.get(console, console.options.update(max_width=400), rows).maximum)
    load = found["load_average"]
    console.print(found["machine"], highlight=False, soft_wrap=True)
    console.print(
        f"{found['seconds']:.0f} s; load average {load['before']:.2f} before, {load['after']:.2f} after; every total "
        "was equal to NumPy's to the last bit",
        highlight=False,
        soft_wrap=True,
    )
    console.print(rows)
    console.print(
        "Medians, ms. Silo: one silo, one sum; checks: of which signature checks; server: key holder included; all:\n"
        "all parties, one after another. Floor: keystreams and additions; Flower: one client's masking stage;\n"
        "TenSEAL: one silo and the server, no protocol. ~: each signature was checked once, and charged to all that\n"
        "check it.",
        highlight=False,
        style="dim",
    )
    console.print(_sessions(found["rows"]))
    console.print(
        "Ms, apart from the sums: set-up once a session; refills of one-time secrets, a sum's share of its batch's.",
        highlight=False,
        style="dim",
    )
    console.print(_targets(found["targets"]))
    for note in found["notes"]:
        console.print(f"note: {note}", highlight=False, soft_wrap=True)


def _rows(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("\nkind", no_wrap=True)
    for heading in (
        "\nsilos",
        "neigh-\nbours",
        "\nvalues",
        "\nlost",
        "\nsilo",
        "of which\nchecks",
        "\nserver",
        "\nall",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("ex-\nchanges", "bytes up\na silo", "\nfloor", "silo /\nfloor", "\nFlower", "Flower\n/ silo"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("\nTenSEAL", justify="right", no_wrap=True)
    last = None
    for row in rows:
        session = [row[key] for key in ("kind", "bits")]
        if last is not None and session != last:
            table.add_section()
        last = session
        table.add_row(
            kind_of(row),
            f"{row['silos']:,}",
            str(row["neighbours"]) if row["neighbours"] else "",
            _power(row["length"]),
            f"{row['dropout']:.0%}" if row["dropout"] else "",
            _number(row["silo_ms"]),
            _checks(row),
            _number(row["server_ms"]),
            _number(row["sum_ms"]),
            str(row["exchanges"]),
            f"{row['bytes_up_per_silo']:,}",
            _number(row["floor_ms"]),
            _ratio(row["silo_ms"], row["floor_ms"]),
            _number(row["flower_ms"]),
            _ratio(row["flower_ms"], row["silo_ms"]),
            _number(row["tenseal_ms"]),
        )
    return table


def _sessions(rows: list[dict[str, Any]]) -> Table:
    """Set-up and refills, one line a session with keys to agree on."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("\nkind", no_wrap=True)
    for heading in ("\nsilos", "neigh-\nbours", "set-up,\nsilo", "set-up,\nserver", "refill,\nsilo", "refill,\nserver"):
        table.add_column(heading, justify="right", no_wrap=True)
    shown = set()
    for row in rows:
        session = (kind_of(row), row["silos"])
        if session in shown or not row["neighbours"]:
            continue
        shown.add(session)
        times = (
            _number(row[key]) for key in ("setup_silo_ms", "setup_server_ms", "refill_silo_ms", "refill_server_ms")
        )
        table.add_row(kind_of(row), f"{row['silos']:,}", str(row["neighbours"]), *times)
    return table


def kind_of(row: dict[str, Any]) -> str:
    """`masked w=32 no check, sqlite`, and so on."""
    if row["kind"] == "homomorphic":
        return "BFV"
    if row["kind"] == "plain":
        return "plain"
    check = "" if row["consistency_check"] else " no check"
    return f"masked w={row['bits']}{check}{'' if row['store'] == 'memory' else ' ' + row['store']}"


def _targets(targets: list[dict[str, Any]]) -> Table:
    table = Table()
    table.add_column("target")
    for heading in ("limit", "found", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for target in targets:
        unit = f" {target['unit']}" if target["unit"] else ""
        limit = "" if target["at_most"] is None else f"<= {target['at_most']:g}{unit}"
        limit = limit if target["at_least"] is None else f">= {target['at_least']:g}{unit}"
        value = "not measured" if target["value"] is None else f"{target['value']:.4g}{unit}"
        met = {True: "[green]met[/]", False: "[red]not met[/]", None: ""}[target["met"]]
        table.add_row(target["name"], limit, value, met)
    return table


def _power(count: int) -> str:
    """1e6 for a million; other numbers in full."""
    digits = len(str(count)) - 1
    return f"1e{digits}" if digits > 2 and count == 10**digits else str(count)


def _checks(row: dict[str, Any]) -> str:
    """Time of signature checks, with a tilde where it was charged; see `Stopwatch`."""
    return ("~" if row["checks_shared"] else "") + _number(row["silo_checks_ms"]) if row["silo_checks_ms"] else ""


def _number(ms: float | None) -> str:
    """Two or three significant digits, without an exponent; at least a microsecond."""
    if ms is None:
        return ""
    return f"{ms:,.0f}" if ms >= 100 else f"{max(ms, 0.001):.{2 if ms < 0.1 else 3}g}"


def _ratio(above: float | None, below: float | None) -> str:
    if above is None or not below:
        return ""
    return f"{above / below:,.0f}" if above >= 10 * below else f"{above / below:.2f}"


# ---- What secure sums are meant to reach, and what a run of the benchmark found ----

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
