"""`secure-fvi data`: draft a dictionary from a table, and say what of a table does not fit one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from secure_fvi.dictionary import Column
    from secure_fvi.tables import Opened

FILE = click.Path(path_type=Path)
#: A column with so many different texts or fewer, which repeat, is drafted as a category.
_MOST_LEVELS = 20
#: Texts that other programs write for a value that is not there.
_CODES = ("NA", "N/A", "NaN", "nan", "NULL", "null", ".", "-", "?")
_query = click.option("--query", metavar="SQL", help="One SELECT over the table, which it calls data.")
_tables = click.option(
    "--table", "tables", multiple=True, metavar="NAME=FILE", help="Another file of the query; may be repeated."
)
_debug = click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")


@click.group()
def data() -> None:
    """A site's table: draft its dictionary, and check it against one. Nothing leaves this machine."""


@data.command()
@click.argument("table", type=FILE)
@_query
@_tables
@click.option("--output", type=FILE, help="Write the draft there, where no file is yet. Printed otherwise.")
@_debug
def describe(table: Path, query: str | None, tables: tuple[str, ...], output: Path | None, debug: bool) -> None:
    """Draft dictionary.toml from TABLE (CSV, Parquet, JSON, SQLite or DuckDB): kinds, levels and ranges, rounded
    outward; units are left blank.

    Levels and ranges are the table's own: whoever gets the draft learns them. Put what the study protocol says in their
    place.
    """
    from secure_fvi.dictionary import Dictionary
    from secure_fvi.errors import InputError
    from secure_fvi.tables import opened

    with opened(_files(table, tables), query) as found:
        drafted = {name: _draft(found, f"c{i}") for i, name in enumerate(found.types)}
    text = Dictionary(drafted).to_toml(blank=("unit",))
    click.echo(
        "levels and ranges are this table's own, rare ones among them: whoever gets the draft learns them. Put "
        "what the protocol says in their place, fill in units, and delete columns that no job needs",
        err=True,
    )
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise InputError(f"'{output}' is there already") from None
    except OSError as error:
        raise InputError(f"cannot write '{output}': {error.strerror}") from None
    click.echo(f"{output}: {len(drafted)} columns; try it: secure-fvi data check {table} --dictionary {output}")


@data.command()
@click.argument("table", type=FILE)
@click.option("--dictionary", "coding", type=FILE, required=True, help="dictionary.toml.")
@_query
@_tables
@click.option("--missing", type=click.Choice(["refuse", "drop"]), default="refuse", show_default=True, help="Of gaps.")
@click.option("--rows", type=click.IntRange(1), default=20, show_default=True, help="Row numbers to print a line.")
@_debug
def check(
    table: Path, coding: Path, query: str | None, tables: tuple[str, ...], missing: str, rows: int, debug: bool
) -> None:
    """Say which rows of TABLE do not fit the dictionary, by column, without printing what they hold. Exits 2 where a
    job would be refused."""
    from secure_fvi.dictionary import read_dictionary
    from secure_fvi.errors import DataError
    from secure_fvi.tables import GAP, check_table, opened

    dictionary, files = read_dictionary(coding), _files(table, tables)
    found = check_table(files, dictionary, query)
    with opened(files, query) as held:
        others = [name for name in held.types if name not in dictionary.columns]
    click.echo(f"{found.read} rows, {len(dictionary.columns)} columns in the dictionary {dictionary.digest.hex()[:16]}")
    if others:
        click.echo(f"not in the dictionary, so never read: {', '.join(others)}")
    for finding in found.findings:
        click.echo(finding.line(rows))
    wrong = {f.column for f in found.findings if missing == "refuse" or f.what != GAP}
    gaps = {int(row) for f in found.findings if f.what == GAP for row in f.rows}
    if wrong:
        raise DataError(
            f"{table}: {len(wrong)} of {len(dictionary.columns)} columns do not fit: {', '.join(sorted(wrong))}"
        )
    if len(gaps) == found.read:
        raise DataError(f"{table}: no row is without a gap")
    click.echo(f"it fits; {len(gaps)} rows with a gap are left out" if gaps else "it fits")


def _files(table: Path, others: tuple[str, ...]) -> dict[str, Path]:
    from secure_fvi.errors import InputError
    from secure_fvi.tables import TABLE

    files = {TABLE: table}
    for other in others:
        name, mark, path = other.partition("=")
        if not mark or not name or not path or name in files:
            raise InputError(f"--table '{other}': must look like NAME=FILE, with a name of its own")
        files[name] = Path(path)
    return files


# ---- a draft ----


def _draft(table: Opened, cell: str) -> Column:
    """A column as it seems. What the cells are is seen by DuckDB; levels and ends of ranges alone come out."""
    from secure_fvi.dictionary import Column

    text = f"trim(CAST({cell} AS VARCHAR))"
    codes = ", ".join(f"'{code}'" for code in _CODES)
    parsed = f"TRY_CAST({text} AS DOUBLE)"
    number = f"CASE WHEN NOT contains({text}, '_') AND isfinite({parsed}) THEN {parsed} END"
    is_day = rf"regexp_full_match({text}, '\d{{4}}-\d{{2}}-\d{{2}}( 00:00:00)?')"
    day = f"CASE WHEN {is_day} THEN TRY_CAST({text} AS DATE) END"
    seen = table.fetch(
        f"""SELECT count(t) AS cells, count(n) AS numbers, count(d) AS days, count(DISTINCT t) AS different,
            coalesce(bool_and(n = trunc(n) AND abs(n) < 1e15), false) AS whole, min(n) AS low, max(n) AS high,
            CAST(min(d) - DATE '1970-01-01' AS DOUBLE) AS first, CAST(max(d) - DATE '1970-01-01' AS DOUBLE) AS last,
            count(DISTINCT lower(t)) FILTER (lower(t) NOT IN ('true', 'false', '0', '1')) AS others
            FROM (SELECT t, n, d FROM (SELECT {text} AS t, {number} AS n, {day} AS d FROM {table.rows})
                  WHERE t <> '' AND t NOT IN ({codes}))"""
    )
    about: dict[str, Any] = {name: values[0] for name, values in seen.items()}
    used = table.fetch(f"SELECT DISTINCT {text} AS t FROM {table.rows} WHERE {text} IN ({codes}) ORDER BY ALL")["t"]
    missing = tuple(map(str, used))
    cells, different = int(about["cells"]), int(about["different"])
    if not cells:
        return Column("id", missing=missing, description="empty in this table")
    if not about["others"] and different <= 2:
        return Column("boolean", missing=missing)
    if about["days"] == cells:
        low, high = _years(float(about["first"]), float(about["last"]))
        return Column("date", low=low, high=high, missing=missing)
    if about["numbers"] == cells:
        low, high = _outward(float(about["low"]), float(about["high"]))
        if about["whole"] and different == cells > _MOST_LEVELS:
            return Column("id", missing=missing, unique=True)
        return Column("integer" if about["whole"] else "number", low=low, high=high, missing=missing)
    if different <= 3 or (different <= _MOST_LEVELS and 2 * different < cells):
        levels = table.fetch(f"SELECT DISTINCT {text} AS t FROM {table.rows} WHERE {text} <> '' ORDER BY ALL")["t"]
        return Column("category", tuple(str(v) for v in levels if str(v) not in missing), missing=missing)
    return Column("id", missing=missing, unique=different == cells)


def _outward(low: float, high: float) -> tuple[float, float]:
    """Both ends at the next multiple of a power of ten of a tenth to the whole of their distance, or size."""
    size = high - low or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(size) - 1e-9)
    return math.floor(low / step) * step, math.ceil(high / step) * step


def _years(first: float, last: float) -> tuple[float, float]:
    """The first and last day of the years of two days since 1970-01-01."""
    import datetime

    from secure_fvi.dictionary import DAY_ZERO

    years = [(DAY_ZERO + datetime.timedelta(days=d)).year for d in (first, last)]
    ends = datetime.date(years[0], 1, 1), datetime.date(years[1], 12, 31)
    return float((ends[0] - DAY_ZERO).days), float((ends[1] - DAY_ZERO).days)
