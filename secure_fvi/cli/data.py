"""`secure-fvi data`: draft a dictionary from a table, and say what of a table does not fit one."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

if TYPE_CHECKING:
    from secure_fvi.dictionary import Column, Dictionary
    from secure_fvi.mixed_model import MixedModel
    from secure_fvi.tables import Coded, Opened

FILE = click.Path(path_type=Path)
#: A column with so many different texts or fewer, which repeat, is drafted as a category.
_MOST_LEVELS = 20
#: Texts that other programs write for a value that is not there, and a spreadsheet's errors, in small letters.
_CODES = (
    *("na", "n/a", "n.a.", "<na>", "nan", "nat", "null", ".", "-", "?"),
    *("#n/a", "#div/0!", "#value!", "#ref!", "#name?", "#num!", "#null!"),
)
#: Words that people write for one: among numbers and dates nothing else can be meant, among levels it can.
_WORDS = ("..", "--", "---", "missing", "n.d.", "nd", "nil", "none", "not available", "not done", "unknown")
_query = click.option("--query", metavar="SQL", help="One SELECT over the table, which it calls data.")
_tables = click.option(
    "--table", "tables", multiple=True, metavar="NAME=FILE", help="Another file of the query; may be repeated."
)


@click.group()
def data() -> None:
    """A site's table: draft its dictionary, and check it against one. Nothing leaves this machine."""


@data.command()
@click.argument("table", type=FILE)
@_query
@_tables
@click.option("--output", type=FILE, help="Write the draft there, where no file is yet. Printed otherwise.")
def describe(table: Path, query: str | None, tables: tuple[str, ...], output: Path | None) -> None:
    """Draft dictionary.toml from TABLE (CSV, Parquet, SQLite or DuckDB): kinds, levels and ranges, rounded
    outward; units are left blank.

    Levels and ranges are the table's own: whoever gets the draft learns them. Put what the study protocol says in their
    place. What is guessed (the order of levels, ids, codes for missing values) has a line 'review' that says so, and is
    not used until somebody has looked at it and deleted that line.
    """
    from secure_fvi.dictionary import NUMBER, Dictionary
    from secure_fvi.errors import DataError, InputError
    from secure_fvi.tables import opened

    if output is not None and output.exists():
        raise InputError(f"'{output}' is there already")
    with _about(table), opened(_files(table, tables), query) as found:
        if not found.fetch(f"SELECT 1 AS one FROM {found.rows} LIMIT 1")["one"].size:
            raise DataError("it has no rows, and a dictionary is drafted from what stands in them")
        if all(re.fullmatch(NUMBER, name) for name in found.types):
            raise DataError("all names of columns are numbers: is its first line a record? Put one with names above it")
        held = found.held()
        drafted = {name: _draft(held, name, f"c{i}") for i, name in enumerate(held.types)}
    text = Dictionary(drafted).to_toml(blank=("unit",)).rstrip("\n") + "\n"
    click.echo(
        "levels and ranges are this table's own, rare ones among them: whoever gets the draft learns them. Put "
        "what the protocol says in their place, fill in units, and delete columns that no job needs",
        err=True,
    )
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        file = output.open("x", encoding="utf-8")
    except FileExistsError:
        raise InputError(f"'{output}' is there already") from None
    except OSError as error:
        raise InputError(f"cannot write '{output}': {error.strerror}") from None
    try:
        with file:
            file.write(text)
    except OSError as error:  # as on a full disk, where half a dictionary would be in the next trial's way
        output.unlink(missing_ok=True)
        raise InputError(f"cannot write '{output}': {error.strerror}") from None
    guessed = [name for name, column in drafted.items() if column.review]
    look = f"look at {', '.join(guessed)} and delete their lines 'review', then" if guessed else "try it:"
    words = ["secure-fvi", "data", "check", str(table), "--dictionary", str(output)]
    words += ["--query", query] if query else []
    words += [word for other in tables for word in ("--table", other)]
    click.echo(f"{output}: {len(drafted)} columns; {look} {shlex.join(words)}")


@data.command()
@click.argument("table", type=FILE)
@click.option("--dictionary", "coding", type=FILE, required=True, help="dictionary.toml.")
@_query
@_tables
@click.option("--missing", type=click.Choice(["refuse", "drop"]), default="refuse", show_default=True, help="Of gaps.")
@click.option("--rows", type=click.IntRange(1), default=20, show_default=True, help="Row numbers to print a line.")
@click.option(
    "--formula",
    help="Look at the columns that it uses alone, at the formula as its fit does, and for what few rows have.",
)
@click.option("--family", help="Of --formula; the first that its response can have unless given.")
@click.option("--shared", multiple=True, metavar="GROUP", help="Of --formula, a group that spans sites.")
def check(
    table: Path,
    coding: Path,
    query: str | None,
    tables: tuple[str, ...],
    missing: Literal["refuse", "drop"],
    rows: int,
    formula: str | None,
    **of: Any,
) -> None:
    """Say which rows of TABLE do not fit the dictionary, by column, without printing what they hold. Exits 2 where a
    job would be refused: one that reads every column of the dictionary, or the fit of --formula."""
    from secure_fvi.deployment.names import printable
    from secure_fvi.dictionary import read_dictionary
    from secure_fvi.errors import DataError, InputError
    from secure_fvi.tables import GAP, check_table, opened, read_coded, remedy

    dictionary, files = read_dictionary(coding), _files(table, tables)
    if of["family"] is not None and formula is None:
        raise InputError("--family is of a --formula: give that too")
    model = None if formula is None else _model(formula, dictionary, **of)
    used = list(dictionary.columns) if model is None else model.columns
    with _about(table):
        found = check_table(files, dictionary, query, used)
        with opened(files, query) as held:
            others = [name for name in held.types if name not in dictionary.columns]
        if not found.read:
            raise DataError("it has no rows")
    read = f"{found.read} row{'s' * (found.read != 1)}"
    click.echo(f"{read}, {len(dictionary.columns)} columns in the dictionary {dictionary.digest.hex()[:16]}")
    if model is not None:
        click.echo(f"of these the formula uses {', '.join(used)}, with family {model.family}")
    if others:
        click.echo(f"not in the dictionary, so never read: {', '.join(map(printable, others))}")
    for finding in found.findings:
        click.echo(finding.line(rows))
    wrong = {f.column for f in found.findings if missing == "refuse" or f.what != GAP}
    gaps = {int(row) for f in found.findings if f.what == GAP for row in f.rows}
    if wrong:
        hint = remedy(found.findings)
        raise DataError(
            f"{table}: {len(wrong)} of {len({*used, *wrong})} columns do not fit: {', '.join(sorted(wrong))}{hint}"
        )
    if len(gaps) == found.read:
        raise DataError(f"{table}: no row is without a gap")
    if model is not None:
        with _about(table):
            coded = read_coded(files, dictionary, query, missing, used)
            _check_records(coded, model, table.name)
            if few := model.few_said(coded.columns):
                click.echo(printable(few, 20_000), err=True)  # levels are the dictionary's
            if none := model.weightless(coded.columns):
                click.echo(
                    f"{none} row{'s' * (none > 1)} of weight 0, which a fit counts among rows and learns nothing of"
                )
    many = f"{len(gaps)} rows with a gap are" if len(gaps) > 1 else "1 row with a gap is"
    click.echo(f"it fits; {many} left out" if gaps else "it fits")


def _model(formula: str, dictionary: Dictionary, family: str | None, shared: tuple[str, ...]) -> MixedModel:
    """The model that a fit of the formula would be of. Raises InputError."""
    from secure_fvi.errors import InputError
    from secure_fvi.formula import FAMILIES, parse, response_of
    from secure_fvi.mixed_model import glmm

    for name in FAMILIES if family is None else ():
        with suppress(InputError):
            response_of(parse(formula), name, dictionary)
            family = name
            break
    return glmm(formula, family or "gaussian", dictionary=dictionary, shared=shared)


def _check_records(found: Coded, model: MixedModel, name: str) -> None:
    """Raise InputError where the formula's records do not fit it, or repeat each other, as its fit does."""
    import torch

    from secure_fvi.federated_model import check_repeats, read_data

    laid = model.prepared({name: found})[name]
    check_repeats(read_data(laid, name, torch.float64)[1].rows, name, model.columns)


@contextmanager
def _about(table: Path) -> Iterator[None]:
    """Errors with the file in front."""
    from secure_fvi.errors import InputError

    try:
        yield
    except InputError as error:
        raise error if str(table) in str(error) else type(error)(f"{table}: {error}") from None


def _files(table: Path, others: tuple[str, ...]) -> dict[str, Path]:
    from secure_fvi.errors import InputError
    from secure_fvi.runs.config import TABLE

    files = {TABLE: table}
    for other in others:
        name, mark, path = other.partition("=")
        if not mark or not name or not path or name in files:
            raise InputError(f"--table '{other}': must look like NAME=FILE, with a name of its own")
        files[name] = Path(path)
    return files


# ---- a draft ----

#: Numbers that other programs write for a value that is not there: -1, and sevens, eights and nines of either sign.
_SENTINELS = (-1.0, *(sign * float(digit * length) for sign in (-1, 1) for digit in "789" for length in range(1, 6)))
#: How far from the others such a number lies, in their range, and one of a single digit, which may be a count; and any
#: other number, in the range of their middle half.
_APART, _APART_DIGIT, _FAR = 0.25, 2.0, 20.0
#: The least that the middle half of dates is taken to span, days.
_YEAR = 365.0
#: Whole numbers that may be dates without marks; and from where on others may be ids.
_AS_DATES, _AS_IDS = (19_000_101, 21_001_231), 10**8


#: How numbers, dates and times are written that no kind reads as such: a pattern of the whole text, which letters of
#: any size match. A comma in a number is `decimal_comma`'s.
_FORMS = {
    "other_days": r"\d{1,2}[./-]\d{1,2}[./-]\d{2,4}|\d{4}[./]\d{1,2}[./]\d{1,2}"
    r"|\d{1,2}[ ./-]?[a-z]{3,9}\.?[ ,./-]*\d{2,4}|[a-z]{3,9}\.? \d{1,2},? \d{4}",
    "times": r"\d{4}-\d{2}-\d{2}[ t]\d{2}:\d{2}.*",
    "clocks": r"\d{1,3}:\d{2}(:\d{2}([.,]\d+)?)?",
    "halves": r"\d{1,2}(:\d{2}){0,2} ?[ap]\.?m\.?",
    "points": r"[+-]?[1-9]\d{0,2}(\.\d{3})+(,\d+)?",
    "blanks": r"[+-]?[1-9]\d{0,2}([ ’''\x{A0}\x{202F}]\d{3})+([.,]\d+)?",
    "small": r"[+-]?([1-9]\d{0,2}|0)([.,]\d{1,2})?",
    "signs": r"[$€£¥]\s?[+-]?\d+([.,]\d+)*|[+-]?\d+([.,]\d+)*\s?([%‰€£¥$]|[a-zµ°][^\d\s]{0,9})",
    "limits": r"[<>≤≥]=?\s*\d+([.,]\d+)?",
    "zeros": r"[+-]?0\d+(\.\d*)?",
    "long": r"[+-]?\d{16,}",
    "nested": r"\{\}|\{\".*\}|\[\]|\[[\"{\[\d+-].*\]",
}


def _draft(table: Opened, name: str, cell: str, codes: tuple[str, ...] = _CODES) -> Column:
    """A column as it seems. What the cells are is seen by DuckDB; levels, ends of ranges and codes for missing values
    alone come out."""
    from secure_fvi.dictionary import DATE, Column, has_controls
    from secure_fvi.tables import decimal_comma, is_nested

    if is_nested(table.types[name]):
        return Column("id", review="lists, structures or bytes, of which no kind is: take them apart in a query")
    text = f"trim(CAST({cell} AS VARCHAR))"
    listed, words = (", ".join(f"'{code}'" for code in some) for some in (codes, _WORDS))
    parsed = f"TRY_CAST({text} AS DOUBLE)"
    number = f"CASE WHEN NOT contains({text}, '_') AND isfinite({parsed}) THEN {parsed} END"
    day = f"CASE WHEN regexp_full_match({text}, '{DATE}') THEN TRY_CAST(left({text}, 10) AS DATE) END"
    rows = f"""(SELECT t, n, d FROM (SELECT {text} AS t, {number} AS n, {day} AS d FROM {table.rows})
                WHERE t <> '' AND lower(t) NOT IN ({listed}))"""
    used = table.fetch(f"SELECT DISTINCT {text} AS t FROM {table.rows} WHERE lower({text}) IN ({listed}) ORDER BY ALL")
    stray = _stray(table, rows)
    missing = (*map(str, used["t"]), *(f"{code:g}" for code in stray))
    left = f"WHERE n IS NULL OR n NOT IN ({', '.join(map(repr, stray))})" if stray else ""
    forms = ", ".join(
        f"count(t) FILTER (regexp_full_match(lower(t), '{form}')) AS {kind}" for kind, form in _FORMS.items()
    )
    about: dict[str, Any] = {
        name: values[0]
        for name, values in table.fetch(
            f"""SELECT count(t) AS cells, count(n) AS numbers, count(d) AS days, count(DISTINCT t) AS different,
            count(DISTINCT n) AS kinds, coalesce(bool_and(n = trunc(n) AND abs(n) < 1e15), false) AS whole,
            min(n) AS low, max(n) AS high, quantile_cont(n, 0.25) AS lower, quantile_cont(n, 0.75) AS upper,
            CAST(min(d) - DATE '1970-01-01' AS DOUBLE) AS first, CAST(max(d) - DATE '1970-01-01' AS DOUBLE) AS last,
            quantile_cont(CAST(d - DATE '1970-01-01' AS DOUBLE), 0.25) AS early,
            quantile_cont(CAST(d - DATE '1970-01-01' AS DOUBLE), 0.75) AS late, {forms},
            count(n) FILTER (abs(n) >= 1e15) AS large, count(t) FILTER ({decimal_comma("t")}) AS commas,
            count(t) FILTER (lower(t) IN ({words})) AS words,
            count(DISTINCT regexp_replace(t, '[0-9.,+-]', '', 'g')) AS signs_of,
            count(DISTINCT lower(t)) FILTER (lower(t) NOT IN ('true', 'false', '0', '1')) AS others
            FROM {rows} {left}"""
        ).items()
    }
    cells, different = int(about["cells"]), int(about["different"])
    measured = max(about["numbers"], about["days"])
    if about["words"] and measured and measured + about["words"] == cells:
        column = _draft(table, name, cell, (*codes, *_WORDS))
        return replace(
            column, review=_both("words among numbers or dates taken for codes of a missing value", column.review)
        )
    review = f"{' and '.join(f'{c:g}' for c in stray)} taken for codes of a missing value" if stray else ""
    if not cells:
        return Column("id", missing=missing, review="empty in this table")
    if not about["others"] and different <= 2:
        alone = _ALONE if different == 1 else ""
        return Column("boolean", missing=missing, review=_both(review, alone))
    if about["days"] == cells:
        first, last, early, late = (float(about[name]) for name in ("first", "last", "early", "late"))
        if far := _far(first, last, early, late, max(late - early, _YEAR)):
            return Column("date", missing=missing, review=far)
        low, high = _years(first, last)
        # A prior is as wide as the range says: of ten days in a year it would draw the effect of a day to 0.
        wide = high - low > 4 * (last - first + 1)
        return Column("date", low=low, high=high, missing=missing, review=_WIDE if wide else "")
    if about["numbers"] == cells and not about["zeros"]:
        return _number(about, missing, review)
    zeros = "numbers with a 0 in front, taken for text: of a number they are lost" if about["zeros"] else ""
    if form := _form(about, name):
        return Column("id", missing=missing, review=_both(review, form))
    review = _both(review, zeros)
    if different <= 3 or (different <= _MOST_LEVELS and 2 * different < cells):
        levels = table.fetch(f"SELECT DISTINCT {text} AS t FROM {table.rows} WHERE {text} <> '' ORDER BY ALL")["t"]
        found = tuple(str(v) for v in levels if str(v) not in missing)
        if any(map(has_controls, found)):
            return Column(
                "id", missing=missing, review="texts with line ends or controls, which no level has: recode them"
            )
        return Column("category", found, missing=missing, review=_both(review, _levels(found)))
    guess = "taken for an id: it may be text, or numbers with texts among them"
    if 2 * about["numbers"] > cells:
        guess += (
            "; most cells are numbers: where the others stand for a value that is not there, list them in missing and "
            "write kind = 'number'"
        )
    return Column("id", missing=missing, unique=different == cells, review=review or guess)


_ALONE = "one value alone stands in this table: what else may be there, at any site?"


def _form(about: Mapping[str, Any], name: str) -> str:
    """What to do about numbers, dates or times that are written as no kind reads them; empty where they are none."""
    from secure_fvi.tables import identifier, with_points

    column = identifier(name)
    cells, numbers = about["cells"], about["numbers"]
    if about["commas"] and about["commas"] + numbers == cells:
        return f"numbers with a comma: {with_points(name)}"
    for kind, mark, keep in (("points", "points", "0-9,+-"), ("blanks", "blanks or quotes", "0-9.,+-")):
        if about[kind] and about[kind] + about["small"] == cells:
            without = f"replace(regexp_replace({column}, '[^{keep}]', '', 'g'), ',', '.')"
            return f"numbers with {mark} between thousands: take them out {_by_query(column, without)}"
    if about["other_days"] and about["other_days"] + about["days"] == cells:
        taken = _by_query(column, f"CAST(strptime({column}, '%d.%m.%Y') AS DATE)")
        return f"dates in another form: take them {taken}, which is of 31.12.2024; of 12/31/2024 write '%m/%d/%Y'"
    if about["times"] == cells:
        first = f"left(CAST({column} AS VARCHAR), 10)"
        day = _by_query(column, first)
        return f"times of day, which no kind has: where the day is enough, as it is written, take it {day}"
    if about["clocks"] == cells or about["halves"] == cells:
        span = f"CAST(CAST({column} AS VARCHAR) AS INTERVAL)"
        if about["halves"]:
            span = f"CAST(strptime({column}, '%I:%M %p') AS TIME)"
        hours = _by_query(column, f"epoch({span}) / 3600")
        return (
            f"times of day or durations, which no kind has: as hours {hours}; of a clock 23:30 is far from 00:30 then"
        )
    if about["signs"] == cells and about["signs_of"] == 1:
        bare = _by_query(column, f"regexp_replace({column}, '[^0-9.,+-]', '', 'g')")
        return f"numbers with a sign or a unit about them: take it off {bare}; a comma has to become a point or go, too"
    if about["nested"] == cells:
        inside = f"SELECT *, {column} ->> '$.KEY' AS KEY FROM data"
        return f"objects or lists, of which no kind is: take them apart by the query {inside} (of a list '$[0]')"
    if about["limits"] and numbers and about["limits"] + numbers == cells:
        return "numbers with < or > among them, as beyond what can be measured: say in a query what stands for these"
    return ""


def _by_query(column: str, what: str) -> str:
    return f"by the query SELECT * REPLACE ({what} AS {column}) FROM data"


def _levels(found: Sequence[str]) -> str:
    """What to look at of the levels of a category, in the order of the alphabet."""
    from secure_fvi.dictionary import NUMBER, folded

    said, small = "", list(map(folded, found))
    stand_ins = [v for v in found if re.fullmatch(NUMBER, v) and float(v) in _SENTINELS]
    stand_ins = stand_ins if any(not re.search(r"\d", v) for v in found) else []
    if stand_ins or (words := [v for v in found if v.lower() in _WORDS]):
        many = f"{' and '.join(stand_ins)} among words" if stand_ins else f"'{' and '.join(words)}' among levels"
        said = f"{many}: codes of a missing value? Put such into missing, out of levels"
    if len(set(small)) < len(found):
        alike = " and ".join(f"'{v}'" for v in found if small.count(folded(v)) > 1)
        other = len({v.lower() for v in found}) > len(set(small))
        stored, one = (", or in how accents and blanks are stored", "nfc_normalize(...)") if other else ("", "...")
        said = _both(
            said,
            f"{alike} differ in case alone{stored}, and are other levels: make them one by lower({one}) in a query",
        )
    if len(found) == 1:
        said = _both(said, _ALONE)
    if len(found) > 2:
        order = "levels are in the order of the alphabet: put them in theirs, the level to compare with first"
        said = _both(said, order)
    return said


def _far(low: float, high: float, lower: float, upper: float, middle: float) -> str:
    """What is said where an end lies far from the middle half of the cells, `lower` to `upper`; empty elsewhere."""
    ends = [name for name, by in (("low", lower - low), ("high", high - upper)) if by > _FAR * middle]
    if not ends:
        return ""
    return (
        f"{' and '.join(ends)} left out, since the table's lies far from the rest: a code, or a slip? Give low and high"
    )


def _number(about: dict[str, Any], missing: tuple[str, ...], review: str) -> Column:
    """A column of numbers alone."""
    from secure_fvi.dictionary import Column

    whole, low, high = bool(about["whole"]), float(about["low"]), float(about["high"])
    kind: Any = "integer" if whole else "number"
    lower, upper = float(about["lower"]), float(about["upper"])
    middle = upper - lower
    if whole and about["different"] == about["cells"] > _MOST_LEVELS:
        guess = "taken for an id, since no number stands twice"
        return Column("id", missing=missing, unique=True, review=_both(review, guess))
    if about["long"] == about["cells"]:
        guess = "taken for an id: whole numbers of more than 15 digits, of which a number loses the last ones"
        return Column("id", missing=missing, unique=about["different"] == about["cells"], review=_both(review, guess))
    if about["large"]:
        guess = "numbers of more than 15 digits, which lose the last ones: ids, which are kind = 'id', and text?"
        review = _both(review, guess)
    elif whole and low >= _AS_IDS and not _AS_DATES[0] <= low <= high <= _AS_DATES[1]:
        review = _both(review, f"whole numbers of {len(f'{low:.0f}')} digits: ids, which are kind = 'id'?")
    if middle > 0 and (far := _far(low, high, lower, upper, middle)):
        return Column(kind, missing=missing, review=_both(review, far))
    if whole and about["kinds"] == 2:
        review = _both(review, "two values: a boolean or a category with levels, or a number?")
    if whole and _AS_DATES[0] <= low <= high <= _AS_DATES[1]:
        review = _both(review, "dates without marks? Write them as 2024-12-31 in a query")
    if low == high:
        review = _both(review, _ALONE)
    if whole and low == 1 and 2 < about["kinds"] == high <= _MOST_LEVELS and 2 * high < about["cells"]:
        guess = f"every number from 1 to {high:g} is there: a number, or codes of a category, which are its levels?"
        review = _both(review, guess)
    if not whole and about["points"] and about["points"] + about["small"] == about["cells"]:
        guess = (
            "three digits behind every point: numbers such as 1.234, or thousands, whose points are to be taken out in "
            "a query?"
        )
        review = _both(review, guess)
    if whole and low in (0, 1) and _MOST_LEVELS < about["kinds"] == high - low + 1:
        guess = (
            f"every number from {low:g} to {high:g} is there: a number, or names of patients, which are kind = 'id'?"
        )
        review = _both(review, guess)
    low, high = _outward(low, high)
    return Column(kind, low=low, high=high, missing=missing, review=review)


def _both(review: str, more: str) -> str:
    """Two things to look at, or the one that there is."""
    return f"{review}; {more}" if review and more else review or more


def _stray(table: Opened, rows: str) -> list[float]:
    """Of `_SENTINELS` those that stand beside the other numbers: below 0 where nothing else is, or further from the
    next than a part of the others' range."""
    listed = ", ".join(map(repr, _SENTINELS))
    seen = table.fetch(f"SELECT DISTINCT n FROM {rows} WHERE n IN ({listed})")["n"]
    rest = table.fetch(f"SELECT min(n) AS low, max(n) AS high, count(n) AS n FROM {rows} WHERE n NOT IN ({listed})")
    if not len(seen) or not rest["n"][0]:
        return []
    low, high = float(rest["low"][0]), float(rest["high"][0])
    found = []
    for side, end in ((1, high), (-1, low)):
        beyond = [v for v in sorted(map(float, seen), key=lambda v: side * v) if side * (v - end) > 0]
        for k, value in enumerate(beyond):
            apart = (_APART_DIGIT if 0 < value < 10 else _APART) * (high - low)
            if side * (value - end) > max(1.0, apart) or value < 0 <= low:
                found += beyond[k:]  # and whatever lies beyond it
                break
            end = value
    return found


def _outward(low: float, high: float) -> tuple[float, float]:
    """Both ends at the next multiple of a power of ten of a tenth to the whole of their distance, or size."""
    size = high - low or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(size) - 1e-9)
    return math.floor(low / step) * step, math.ceil(high / step) * step


_WIDE = "the table's days are a small part of these years, whose length makes the prior: give low and high of the study"


def _years(first: float, last: float) -> tuple[float, float]:
    """The first and last day of the years of two days since 1970-01-01."""
    import datetime

    from secure_fvi.dictionary import DAY_ZERO

    years = [(DAY_ZERO + datetime.timedelta(days=d)).year for d in (first, last)]
    ends = datetime.date(years[0], 1, 1), datetime.date(years[1], 12, 31)
    return float((ends[0] - DAY_ZERO).days), float((ends[1] - DAY_ZERO).days)
