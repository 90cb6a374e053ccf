"""The data door: tables as an institution keeps them, read by DuckDB and coded by a dictionary.

CSV, Parquet, SQLite and DuckDB files, and one SELECT over them; columns in memory are coded by the same routine.
Nothing is written, no file is read but those that are named, no network is used and no extension is loaded, whatever
the query says: external access is off but for those paths, the configuration is locked, and a query is looked through
before it runs (`_check_query`).

A cell that does not fit its dictionary is refused before any round. What says so names the column, counts rows and
gives their numbers, and is for the site alone; it holds no cell's content, and errors of DuckDB, whose texts do, are
put in other words.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import dataclasses
import itertools
import json
import os
import re
import sqlite3
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from secure_fvi.dictionary import DATE, NUMBER, TOLD_APART, Column, Dictionary, Missing, folded
from secure_fvi.errors import DataError, InputError, SecureFVIWarning
from secure_fvi.federated_model import check_aligned, is_gap
from secure_fvi.runs.config import OTHERS, RECORD_ID, TABLE
from secure_fvi.runs.wording import nearest

if TYPE_CHECKING:
    import duckdb

#: A dictionary, or what makes one of the columns' names.
Coding = Dictionary | Callable[[Iterable[str]], Dictionary]

#: What DuckDB may hold at once, and how long it may take.
MEMORY, SECONDS = "2GB", 600
#: On one thread rows come in the same order every time. On several they do not where anything is joined, and DuckDB
#: joins a long list in IN, as ours of gaps: beyond 122,880 rows, ids were those of other rows than a table's numbers.
THREADS = "1"
_ONLY = "a query is one SELECT over the tables that are named"
#: What a query may have of DuckDB's syntax tree: nodes, and functions in place of a table.
_NODES = {"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"}
_FUNCTIONS = {"unnest", "range", "generate_series"}
#: Functions of a value that a query may call: DuckDB's own whose results follow from their arguments, but for two that
#: look at DuckDB, the clock's, and those of its macros that are plain expressions. A file's macros are none of these.
_CONSISTENT = """SELECT function_name FROM duckdb_functions() WHERE internal AND NOT starts_with(function_name, '__')
    AND function_type IN ('scalar', 'aggregate', 'window') AND coalesce(stability, 'CONSISTENT') = 'CONSISTENT'"""
#: Those that make one value of a row's: the macros of a list's elements too, and what there is in place of a table as
#: well.
_OF_A_ROW = """SELECT function_name FROM duckdb_functions() WHERE internal AND function_name <> 'unnest' GROUP BY ALL
    HAVING bool_or(function_type = 'scalar') AND bool_and(function_type IN ('scalar', 'table'))
    OR bool_and(function_type = 'macro') AND regexp_matches(function_name, '^(list|array)_')"""
_OF_ITSELF = {"version", "json_serialize_plan"}
_CLOCK = {"current_date", "get_current_time", "get_current_timestamp", "now", "today", "transaction_timestamp"}
_MACROS = {
    "ago", "date_add", "days_in_month", "fdiv", "fmod", "generate_subscripts", "geomean", "geometric_mean", "if",
    "json", "map_contains_entry", "map_contains_value", "md5_number_lower", "md5_number_upper", "nullif",
    "regexp_split_to_table", "split_part", "wavg", "weighted_avg",
}  # fmt: skip
#: Of these, what makes one value of several rows, or several rows.
_OF_ROWS = {"generate_subscripts", "geomean", "geometric_mean", "regexp_split_to_table", "wavg", "weighted_avg"}
_MACROS_OF_LISTS = ("list_", "array_")
#: What follows from the order of the rows, unless an ORDER BY in it says which; and what does whatever is said.
_ORDERED = {
    "any_value", "arbitrary", "array_agg", "fill", "first", "first_value", "group_concat", "lag", "last", "last_value",
    "lead", "list", "listagg", "nth_value", "ntile", "row_number", "string_agg", "variant_group_object",
}  # fmt: skip
_ANY_ORDER = {"approx_quantile", "approx_top_k", "lttb", "reservoir_quantile"}
#: What a file holds of SQL that a query of its names would run: views, and tables with computed columns.
_OWN_SQL = """SELECT lower(database_name), lower(schema_name), lower(view_name) FROM duckdb_views() WHERE NOT internal
    UNION ALL SELECT lower(database_name), lower(schema_name), lower(table_name) FROM duckdb_tables()
    WHERE contains(sql, 'GENERATED ALWAYS AS')"""
#: How many tables have no column of the name by which DuckDB tells a row's place.
_WITHOUT_ROWID = """SELECT count(*) FROM (SELECT 1 FROM duckdb_columns() WHERE NOT internal
    GROUP BY database_oid, schema_oid, table_oid HAVING count(*) FILTER (lower(column_name) = 'rowid') = 0)"""
#: What the names of DuckDB's own views begin with.
_OWN_VIEWS = ("duckdb_", "pragma_", "sqlite_", "pg_")
_MARKS = ",;\t|"
#: Of a record of a CSV under privacy of records: lines and characters at most. DuckDB takes 2 MB.
_MOST_LINES, _MOST_CHARACTERS = 64, 1 << 19
#: Rows that a message names.
_NAMED = 5
#: A Parquet file under privacy of records. What DuckDB checks of a column as it reads it, where one cell fails all of
#: the file: times of day, moments in milliseconds, which it multiplies, JSON, what stands for shapes, and numbers of
#: as many bytes as each takes. And why such a column is not there.
_PARQUET = "read_parquet({}, hive_partitioning=false, utf8_validation='replace')"
_CHECKED_AS_READ = re.compile(
    r"TIME(_.*|Type.*)?|TIMESTAMP_MILLIS|TimestampType.*MILLIS=Milli.*|JSON|JsonType.*|BSON|BsonType.*|Geo.*|"
    r"VARIANT|VariantType.*|BYTE_ARRAY DECIMAL",
    re.IGNORECASE,
)
_UNREAD = (
    " that can be read cell by cell: of a Parquet file times of day, moments in milliseconds and JSON are read as a "
    "whole or not at all; write it as text, as a date, or in microseconds"
)
#: Functions of SQLite that raise at no value: all that a view in its file may call under privacy of records.
_RAISE_NOTHING = {
    "avg", "coalesce", "count", "date", "datetime", "ifnull", "iif", "instr", "julianday", "length", "lower", "ltrim",
    "max", "min", "nullif", "round", "rtrim", "strftime", "substr", "substring", "time", "total", "trim", "typeof",
    "upper",
}  # fmt: skip
_OF_VIEWS = (
    "a view or computed column in it may fail at one cell, and all others would go with it: write that in the query, "
    "or store the result as a table"
)
#: SQL for the characters that may stand about a cell's text.
_BLANKS = "' ' || chr(9) || chr(10) || chr(13) || chr(160)"
_NUMERIC = re.compile(r"U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?|FLOAT|DOUBLE|DECIMAL.*")
_NESTED = re.compile(r".*\[\d*\]|STRUCT.*|MAP.*|UNION.*|BLOB|BIT|VARIANT|GEOMETRY.*")
#: Numpy's types of a coded column.
_TYPES = {"number": np.float64, "boolean": np.float64, "date": np.float64, "integer": np.int64, "category": np.int64}
_UNREADABLE = {
    "number": "no number",
    "integer": "no whole number of at most 15 digits",
    "boolean": "neither of its two values",
    "category": "a level that the dictionary lacks",
    "date": "no date such as 2024-12-31",
    "id": "an id as a float, of fewer digits than tell ids apart,",
}
#: Texts that other programs write for a value that is not there, in small letters; and numbers, as whole of an id.
CODES = ("na", "n/a", "#n/a", "<na>", "nan", "nat", "null", "none", ".", "-", "?")
_NO_ID = r"-(1|7+|8+|9+)(\.0*)?"
#: Up to where whole numbers of DuckDB's types of floats differ; and how other programs write a float of more.
_FLOATS = {"FLOAT": 2**24, "DOUBLE": TOLD_APART}
_ROUNDED = r"[+-]?([0-9]+([.,][0-9]*)?[eE]\+0*(1[1-9]|[2-9][0-9]|[1-9][0-9]{2})|[0-9]{16,}\.[0-9]*)"
#: What some countries' programs write in place of the point.
_COMMA = "a comma in a number"
_OUTSIDE = "a value outside its range"
_NO_NAME = "a usual code for a missing value in place of an id"
_DECIMAL = r"regexp_full_match({text}, '[+-]?[0-9]+(,[0-9]+|(,[0-9]{{3}})+([.][0-9]+)?)')"
#: How to come by text in UTF-8.
_CONVERT = ": save it as 'CSV UTF-8', or convert it, as by iconv -f {0} -t UTF-8 OLD.csv > NEW.csv"


class Finding(NamedTuple):
    """What does not fit. rows: their numbers, from 1, in the order of the table or of the query's result."""

    column: str
    what: str
    rows: npt.NDArray[np.int64]

    def line(self, most: int = _NAMED) -> str:
        """One line without a cell's content, with at most so many rows' numbers."""
        rows = "row" if len(self.rows) == 1 else "rows"
        return f"column '{self.column}': {self.what} in {len(self.rows)} {rows} ({_listed(self.rows, most)})"


def _listed(rows: Sequence[int] | npt.NDArray[np.int64], most: int = _NAMED) -> str:
    more = f" and {len(rows) - most} more" if len(rows) > most else ""
    return ", ".join(str(row) for row in rows[:most]) + more


GAP = "a gap"
_AGAIN = "an id of an earlier row"


def is_nested(kind: str) -> bool:
    """Whether a column of this type of DuckDB's holds lists, structures or bytes."""
    return _NESTED.fullmatch(kind) is not None


def decimal_comma(text: str) -> str:
    """SQL for whether a text is a number with a comma in it."""
    return _DECIMAL.format(text=text)


def with_points(name: str) -> str:
    """How a column's decimal commas become points, and commas between thousands none."""
    said = identifier(name)
    return (
        f"where it parts thousands, write replace({said}, ',', '') AS {said}, and where that is the decimal comma, "
        f"points, by the query SELECT * REPLACE (replace({said}, ',', '.') AS {said}) FROM {TABLE}"
    )


class Coded(NamedTuple):
    """A table coded by its dictionary. Seen by its site alone.

    columns (N,): numbers, dates (days since 1970-01-01) and booleans (0, 1) as float64, whole numbers as int64,
    categories as the places of their levels, ids as places in `names`, sorted; a column `record_id` keeps its numbers.
    findings: what does not fit, gaps among it. left_out: rows with a gap that were left out, by column. spoilt: what
    was left out that is refused otherwise, a line each, which names rows and no cell's content.
    """

    columns: dict[str, npt.NDArray[Any]]
    names: dict[str, list[str]]
    read: int
    left_out: dict[str, int]
    findings: tuple[Finding, ...]
    spoilt: tuple[str, ...] = ()

    def of_rows(self, where: npt.NDArray[np.bool_]) -> Coded:
        """Those rows (N,) alone, with the names that they have."""
        columns, names = _renumbered({name: values[where] for name, values in self.columns.items()}, self.names)
        return self._replace(columns=columns, names=names)


def read_coded(
    files: Path | Mapping[str, Path],
    dictionary: Coding,
    query: str | None = None,
    missing: Missing = "refuse",
    only: Iterable[str] | None = None,
    spoilt: str | None = None,
) -> Coded:
    """The columns of `dictionary` (of those, `only`), coded. Raises DataError, which names columns and rows.

    files: one, called `data` in `query`, or several by name. In a query the columns of CSV files are text, and those of
    SQLite have the types with which they are declared.
    Rows with a gap in a column that is read are refused, or, with missing = "drop", left out and counted. spoilt: each
    row with a cell that does not fit, and each that cannot be read (`opened`), is left out, whatever others are, and so
    are all rows whose id stands twice in the column of that name, where a row is a record; "" where it is not. None may
    be left. So a record follows from its own row, or counts as nothing, and no refusal tells of it.
    """
    found = check_table(files, dictionary, query, only, spoilt is not None)
    if spoilt is not None:
        return _unspoilt(found, missing, spoilt)
    if not isinstance(dictionary, Dictionary):  # of numbers and ids, as a table without one is read
        if wrong := [finding.line() for finding in found.findings if finding.column not in found.names]:
            raise DataError(
                f"each cell has to be a number: {'; '.join(wrong)}; fill them in, or leave those rows out of the file"
            )
        return _fitting(found._replace(findings=()), missing)._replace(findings=found.findings)
    return _fitting(found, missing, remedy(found.findings))


def _unspoilt(found: Coded, missing: Missing, own: str) -> Coded:
    """The rows that fit, none perhaps. A record whose `own` id stands in another one goes with it: to keep the first
    would let a record that joins take the place of one that is there. In another column that is unique nobody looks for
    values that stand twice: there a record would take as many away as it has such values."""
    fits, said = np.ones(found.read, dtype=bool), list(found.spoilt)
    for finding in found.findings:
        if finding.what == _AGAIN and finding.column != own:
            continue
        fits[finding.rows - 1] = False
        if finding.what == _AGAIN:
            values = found.columns[finding.column]
            fits &= ~np.isin(values, values[finding.rows - 1])
        if finding.what != GAP or missing == "refuse":
            said.append(finding.line())
    left_out = _gaps(found) if missing == "drop" else {}
    return found.of_rows(fits)._replace(left_out=left_out, findings=(), spoilt=tuple(said))


def with_gaps(files: Path | Mapping[str, Path], coding: Coding) -> Coded:
    """Every row of a table of numbers and ids, NaN in cells of numbers that do not fit, of which `spoilt` says: for
    rows that have to stay where they are. An id of a Parquet file that may be no UTF-8 is a gap. Raises DataError for
    a table that cannot be read at all."""
    # Of SQLite and Parquet a cell alone is left out; of a file of lines it would be a line.
    paths = files.values() if isinstance(files, Mapping) else [files]
    formats = {_format(_regular(Path(path))) for path in paths}
    found = check_table(files, coding, spoilt=formats <= {"sqlite", "parquet"})
    columns = {n: v if n in found.names else v.astype(np.float64) for n, v in found.columns.items()}
    of_ids = [finding for finding in found.findings if finding.column in found.names]
    for name, texts in found.names.items() if "parquet" in formats else ():  # whose '?' may stand for other letters
        of_ids += _finding(name, GAP, np.array(["?" in text for text in texts], bool)[found.columns[name]])
    wrong = [finding for finding in found.findings if finding.column not in found.names and finding.what != _AGAIN]
    for finding in wrong:
        columns[finding.column][finding.rows - 1] = np.nan
    lines = tuple(finding.line() for finding in wrong)
    return found._replace(columns=columns, findings=tuple(of_ids), spoilt=(*found.spoilt, *lines))


def _gaps(found: Coded) -> dict[str, int]:
    return {f.column: len(f.rows) for f in found.findings if f.what == GAP}


def _fitting(found: Coded, missing: Missing, cure: str = "") -> Coded:
    """The rows that fit. cure: what to do about cells that do not. Raises DataError, which names columns and rows,
    where one is wrong or none is left."""
    wrong = [f for f in found.findings if missing == "refuse" or f.what != GAP]
    if wrong:
        gaps = all(f.what == GAP for f in wrong)
        hint = '; leave those rows out with missing = "drop" (--missing drop), or fill them' if gaps else cure
        raise DataError(f"it does not fit its dictionary: {'; '.join(f.line() for f in wrong)}{hint}")
    whole = np.ones(found.read, dtype=bool)
    for finding in found.findings:
        whole[finding.rows - 1] = False
    if not whole.any():
        raise DataError(_none_left(found) if found.read else "it has no records; leave the silo out")
    if whole.all():
        return found
    return found.of_rows(whole)._replace(left_out=_gaps(found), findings=())


def _none_left(found: Coded) -> str:
    most = sorted(_gaps(found).items(), key=lambda gap: -gap[1])
    columns = ", ".join(f"'{name}' has {gaps}" for name, gaps in most[:_NAMED])
    return f"no row without a gap, of {found.read}: {columns}; leave out what is empty here, at all sites, or fill it"


def remedy(findings: Iterable[Finding]) -> str:
    """ "; ..." where something puts right what does not fit."""
    found = {f.what: f.column for f in findings}
    if _COMMA in found:
        return f"; {with_points(found[_COMMA])}"
    if _NO_NAME in found:
        return (
            f"; all these rows would be one: name the codes in missing = [...] of '{found[_NO_NAME]}' in the "
            "dictionary, or, where they are ids, write all ids with a letter in front"
        )
    if found.get(_AGAIN) == RECORD_ID:
        return (
            f"; a '{RECORD_ID}' that is a whole number or unique is the records' own, all different: where a record "
            'has several rows, give it kind = "id" in the dictionary, without unique'
        )
    if _AGAIN in found:
        own = identifier(found[_AGAIN])
        return (
            f"; '{found[_AGAIN]}' is unique in the dictionary: leave the copies out, as by the query SELECT DISTINCT "
            f"ON ({own}) * FROM {TABLE} ORDER BY ALL, or, where these are several rows of one, delete unique there"
        )
    if _UNREADABLE["boolean"] in found:
        name = found[_UNREADABLE["boolean"]]
        own = identifier(name)
        return (
            f"; truth values are true and false, or 1 and 0: where cells of '{name}' say it "
            'otherwise, name what they say in the dictionary, no before yes, as in levels = ["no", "yes"]; cells that '
            "are stored as truth values say true and false alone; where one table says it otherwise than the "
            f"dictionary, its query puts that right, as by SELECT * REPLACE (CASE {own} WHEN 'NO' THEN 'no' WHEN 'YES' "
            f"THEN 'yes' ELSE {own} END AS {own}) FROM {TABLE}"
        )
    if _UNREADABLE["date"] in found:
        return "; a date is written 2024-12-31: where a time of day follows, the first 10 characters are its day"
    if (name := found.get(_UNREADABLE["integer"], RECORD_ID)) != RECORD_ID:
        return f"; where '{name}' names patients or groups, that is kind = \"id\" in the dictionary"
    if _UNREADABLE["id"] in found:
        return "; write ids as text or as whole numbers"
    for what, cure in ((_OUTSIDE, "widen low or high"), (_UNREADABLE["category"], "add it to levels")):
        if what in found:
            return (
                f"; where '{found[what]}' can be so, {cure} in the dictionary, which is one for all sites; where it is "
                f"a slip, correct it, or leave such rows out by a query{_spelt(found[what]) if cure[0] == 'a' else ''}"
            )
    return ""


def _spelt(name: str) -> str:
    """What to do about another spelling of a level, which in `levels` would be a level beside it."""
    own = identifier(name)
    return (
        "; another spelling of a level, as 1.0 of 1 or m of M, is not to be added: it would be a group beside it; "
        f"write SELECT * REPLACE (CASE {own} WHEN '1.0' THEN '1' ELSE {own} END AS {own}) FROM {TABLE}"
    )


def check_table(
    files: Path | Mapping[str, Path],
    dictionary: Coding,
    query: str | None = None,
    only: Iterable[str] | None = None,
    spoilt: bool = False,
) -> Coded:
    """The same with all that does not fit among `findings`; values there are 0. Raises DataError for a table that
    cannot be read at all or lacks a column. spoilt: as of `opened`."""
    with opened(files, query, spoilt) as table:
        found = _checked(table, dictionary, only, not spoilt)
        return found._replace(spoilt=tuple(table.left_out)) if spoilt else found


def code_columns(
    table: Any,
    dictionary: Dictionary,
    missing: Missing = "refuse",
    only: Iterable[str] | None = None,
    every_id: bool = True,
) -> Coded:
    """As `read_coded`, of a table in memory: a dict of columns, or a pandas, polars or Arrow table. every_id: whether
    repeats are looked for in columns of ids that are not `only` too."""
    ids = dictionary.all_different if every_id else []
    with _held(table, list(dictionary.columns if only is None else {*only, *ids})) as held:
        found = _checked(held, dictionary, only, every_id)
    return _fitting(found, missing, remedy(f for f in found.findings if f.what != _COMMA))  # there is no query


def _checked(table: Opened, coding: Coding, only: Iterable[str] | None, every_id: bool) -> Coded:
    """every_id: in columns of ids that are not `only` too, where the table has them, repeats are looked for, since rows
    that stand twice count twice in any model. Of gaps and ranges there nothing is said: nobody uses these columns."""
    if table.unread and not isinstance(coding, Dictionary):  # of which all columns are wanted
        raise DataError(f"'{table.unread[0]}' is no column{_UNREAD}")
    dictionary = coding if isinstance(coding, Dictionary) else coding(table.types)
    wanted = list(dictionary.columns if only is None else only)
    for name in wanted:
        dictionary[name]
    for name in wanted:
        if name not in table.types:
            # Where none of the names is there, the first line may be no header but a record.
            headed = any(n in table.types for n in wanted)
            hint = nearest(name, table.types) if headed else "; does its first line name the columns?"
            if name in table.unread:
                hint = _UNREAD
            elif alike := [n for n in table.types if n.lower() == name.lower()]:
                hint = f"; there is '{alike[0]}', in other letters: write it so in the dictionary, or rename it"
            raise DataError(f"the table has no column '{name}'{hint}")
    ids = dictionary.all_different
    others = [name for name in ids if every_id and name in table.types and name not in wanted]
    for name in [*wanted, *others]:
        if is_nested(table.types[name]):
            raise DataError(f"column '{name}' holds lists, structures or bytes; take them apart in the query")
    dictionary.check_reviewed(wanted)
    values, status = _fetched(table, {name: dictionary[name] for name in [*wanted, *others]})
    findings = [f for name in wanted for f in _findings(name, dictionary[name], status[name])]
    names: dict[str, list[str]] = {}
    for name in wanted:
        column, fits = dictionary[name], status[name] == 0
        if name in ids:
            findings += _repeated(name, values[name], fits)
        if column.at_most in values:
            above = fits & (status[column.at_most] == 0) & (values[name] > values[column.at_most])
            findings += _finding(name, f"a value above '{column.at_most}'", above)
    for name in others:
        findings += _finding(name, _UNREADABLE[dictionary[name].kind], np.isin(status[name], (2, 4)))
        findings += _repeated(name, values.pop(name), np.isin(status[name], (0, 3)))
    for name in wanted:
        if dictionary[name].kind == "id":
            values[name], names[name] = _coded_ids(values[name])
            _warn_of_letters(name, names[name])
    return Coded(values, names, len(status[wanted[0]]), {}, tuple(findings))


def made_row(columns: Mapping[str, Column]) -> Coded:
    """A table of one row that is nobody's: of each column a value that it may have, 1 where that is one."""
    values, names = {}, {}
    for name, column in columns.items():
        low = -np.inf if column.low is None else column.low
        value = 0.0 if column.kind in ("category", "id") else float(np.clip(1.0, low, column.high))
        values[name] = np.array([value]).astype(_TYPES.get(column.kind, np.int64))
        if column.kind == "id":
            names[name] = ["1"]
    return Coded(values, names, 1, {}, ())


# ---- findings ----


def _fetched(
    table: Opened, columns: Mapping[str, Column]
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, npt.NDArray[np.uint8]]]:
    """By column: what was read, texts of ids and 0 for what cannot be, and how it went (0: it fits)."""
    coded, out = [], []
    for i, (name, column) in enumerate(columns.items()):
        cell, kind = f"c{list(table.types).index(name)}", table.types[name]
        coded += [f"TRY({_value(cell, column, kind)}) AS r{i}", cell]
        fits, nothing = [f"r{i} IS NOT NULL", *_inside(f"r{i}", column)], "''" if column.kind == "id" else "0"
        gap = _gap(cell, column, kind)
        text = column.kind in ("number", "integer") and kind == "VARCHAR"
        comma = decimal_comma(_text(cell, kind)) if text else "false"
        if column.missing:
            fits.append(f"NOT coalesce({gap}, false)")
        # A gap is looked for where a cell does not fit: in most there is none, and texts take their time.
        code = _is_code(_text(cell, kind)) if column.kind == "id" else "false"
        wrong = f"WHEN {gap} THEN 1 WHEN {comma} THEN 4 WHEN {code} THEN 5 WHEN r{i} IS NULL THEN 2 ELSE 3"
        how = f"CASE WHEN {' AND '.join(fits)} THEN 0 {wrong} END"
        # What is past a type's range, such as abs() of its least number, fails for its own cell and not for the table.
        out += [f"coalesce(r{i}, {nothing}) AS v{i}", f"coalesce(TRY({how}), 2)::UTINYINT AS s{i}"]
    found = table.fetch(f"SELECT {', '.join(out)} FROM (SELECT {', '.join(dict.fromkeys(coded))} FROM {table.rows})")
    values, status = {}, {}
    for i, (name, column) in enumerate(columns.items()):
        dtype = _TYPES.get(column.kind)
        values[name] = found[f"v{i}"] if dtype is None else found[f"v{i}"].astype(dtype, copy=False)
        status[name] = found[f"s{i}"]
    return values, status


def _text(cell: str, kind: str) -> str:
    """SQL for a cell as text without blanks at its ends; whole numbers have no point, however they are stored."""
    if _NUMERIC.fullmatch(kind):
        whole = f"{cell} = trunc({cell}) AND abs(CAST({cell} AS DOUBLE)) < {TOLD_APART}"
        text = f"WHEN {whole} THEN CAST(TRY_CAST({cell} AS BIGINT) AS VARCHAR) ELSE CAST({cell} AS VARCHAR)"
        return f"CASE {f'WHEN isnan({cell}) THEN NULL ' if kind in _FLOATS else ''}{text} END"
    return f"trim(CAST({cell} AS VARCHAR), {_BLANKS})"


def _number(cell: str, kind: str) -> str:
    """SQL for a cell as a number, NULL where it is none. 3_12 is a label: DuckDB alone reads 312."""
    if _NUMERIC.fullmatch(kind):
        return f"CAST({cell} AS DOUBLE)"
    text = cell if kind == "VARCHAR" else f"CAST({cell} AS VARCHAR)"
    return f"CASE WHEN NOT contains({text}, '_') THEN TRY_CAST({text} AS DOUBLE) END"


def _gap(cell: str, column: Column, kind: str) -> str:
    """SQL for whether a cell is empty, NaN in a column of numbers, or a code for missing."""
    gap = [f"{cell} IS NULL"]
    if _NUMERIC.fullmatch(kind):
        gap.append(f"isnan(CAST({cell} AS DOUBLE))")
    else:
        gap.append(f"{_text(cell, kind)} = ''")
    if column.missing:
        gap.append(f"{_text(cell, kind)} IN ({', '.join(map(_quoted, column.missing))})")
        if column.kind == "date":  # whose cell may have a time of day, 00:00
            text = _text(cell, kind)
            day = f"CASE WHEN regexp_full_match({text}, {_quoted(DATE)}) THEN left({text}, 10) END"
            gap.append(f"coalesce({day} IN ({', '.join(map(_quoted, column.missing))}), false)")
    codes = [f"{float(code)!r}::DOUBLE" for code in column.missing if re.fullmatch(NUMBER, code)]
    if codes and column.kind not in ("id", "category"):
        gap.append(f"coalesce({_number(cell, kind)} IN ({', '.join(codes)}), false)")
    return " OR ".join(f"({g})" for g in gap)


def _value(cell: str, column: Column, kind: str) -> str:
    """SQL for the coded value, NULL where there is none."""
    text, number = _text(cell, kind), _number(cell, kind)
    if column.kind == "id":
        told_apart = f"abs({cell}) < {_FLOATS[kind]}" if kind in _FLOATS else "true"
        if not _NUMERIC.fullmatch(kind):
            told_apart = f"NOT regexp_full_match({text}, {_quoted(_ROUNDED)})"
        return f"CASE WHEN {text} <> '' AND {told_apart} AND NOT {_is_code(text)} THEN {text} END"
    if column.kind == "category":
        levels = ", ".join(map(_quoted, column.levels))
        return f"CAST(enum_code(TRY_CAST({text} AS ENUM({levels}))) AS BIGINT)"
    if column.kind == "date":
        dated = f"regexp_full_match({text}, {_quoted(DATE)})"
        return f"CASE WHEN {dated} THEN CAST(TRY_CAST(left({text}, 10) AS DATE) - DATE '1970-01-01' AS DOUBLE) END"
    if column.kind == "boolean":
        if column.levels:
            no, yes = map(_quoted, _of_truth(column.levels) if kind == "BOOLEAN" else column.levels)
            return f"CASE {text} WHEN {no} THEN 0 WHEN {yes} THEN 1 END"
        no, yes = (f"{number} = {i} OR lower({text}) = '{word}'" for i, word in enumerate(("false", "true")))
        return f"CASE WHEN {no} THEN 0 WHEN {yes} THEN 1 END"
    if column.kind == "number":
        return f"CASE WHEN isfinite({number}) THEN {number} END"
    whole = f"isfinite({number}) AND {number} = trunc({number}) AND abs({number}) < {TOLD_APART}"
    return f"CASE WHEN {whole} THEN CAST({number} AS BIGINT) END"


def _of_truth(levels: Sequence[str]) -> list[str]:
    """Levels as DuckDB writes a truth value, where they are names of one; those that are not stand for none."""
    known = {"true": "true", "1": "true", "false": "false", "0": "false"}
    return [known.get(level.lower(), "") for level in levels]


def _is_code(text: str) -> str:
    """SQL for whether a text that stands for an id is what programs write where there is none."""
    listed = ", ".join(map(_quoted, CODES))
    return f"(lower({text}) IN ({listed}) OR regexp_full_match({text}, {_quoted(_NO_ID)}))"


def _inside(value: str, column: Column) -> list[str]:
    bounds = ((">=", column.low), ("<=", column.high))
    return [f"{value} {sign} {bound!r}::DOUBLE" for sign, bound in bounds if bound is not None]


def _findings(name: str, column: Column, status: npt.NDArray[np.uint8]) -> list[Finding]:
    return [
        *_finding(name, GAP, status == 1),
        *_finding(name, _UNREADABLE[column.kind], status == 2),
        *_finding(name, _COMMA, status == 4),
        *_finding(name, _NO_NAME, status == 5),
        *_finding(name, _OUTSIDE, status == 3),
    ]


def _finding(name: str, what: str, where: npt.NDArray[np.bool_]) -> list[Finding]:
    rows = np.flatnonzero(where) + 1
    return [Finding(name, what, rows)] if len(rows) else []


def _repeated(name: str, values: npt.NDArray[Any], fits: npt.NDArray[np.bool_]) -> list[Finding]:
    """Every row whose value stands in an earlier one."""
    seen: set[Any] = set()
    again = np.zeros(len(values), dtype=bool)
    for at in np.flatnonzero(fits):
        before = len(seen)
        seen.add(values[at])
        again[at] = len(seen) == before
    return _finding(name, _AGAIN, again)


def _coded_ids(texts: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Places (N,) in the sorted names, and the names."""
    names = sorted(set(texts))
    place = {name: i for i, name in enumerate(names)}
    return np.fromiter((place[t] for t in texts), np.int64, len(texts)), names


def _warn_of_letters(name: str, ids: Sequence[str]) -> None:
    """Of ids that case, or how accents are stored, alone tell apart, as of one person who was typed in twice."""
    if alike := len(ids) - len({folded(text) for text in ids}):
        warnings.warn(
            f"column '{name}': {alike} of {len(ids)} ids are others in upper or lower case, or in how accents and "
            "blanks are stored, and taken for different ones; where they are the same, say so by the query, as "
            "lower(nfc_normalize(...))",
            SecureFVIWarning,
            stacklevel=2,
        )


def _renumbered(
    columns: dict[str, npt.NDArray[Any]], names: Mapping[str, list[str]]
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, list[str]]]:
    """Ids without the names that no row has any longer."""
    kept = {}
    for name, texts in names.items():
        left, columns[name] = np.unique(columns[name], return_inverse=True)
        kept[name] = [texts[i] for i in left]
    return columns, kept


# ---- opening: what may be read, and what a query may say ----


#: A name that no table has.
_HELD = '"rows, held"'


@dataclasses.dataclass(frozen=True)
class Opened:
    """Tables that were let in. rows: SQL for the rows in use, with columns c0, c1, ...; types: DuckDB's, by name;
    left_out: what could not be read before the query saw it; unread: columns that were not let in (`_by_cells`)."""

    connection: duckdb.DuckDBPyConnection
    rows: str
    types: dict[str, str]
    left_out: Sequence[str] = ()
    unread: Sequence[str] = ()

    def fetch(self, sql: str) -> dict[str, npt.NDArray[Any]]:
        """Columns of `sql`, which is our own; missing ones masked."""
        return self.connection.execute(sql).fetchnumpy()

    def held(self) -> Opened:
        """The same with its rows in memory, if they fit: each statement reads and plans the whole table otherwise."""
        try:
            self.connection.execute(f"CREATE TABLE {_HELD} AS SELECT * FROM {self.rows}")
        except _duckdb().Error:  # too large; what is wrong with it the next statement says
            return self
        return dataclasses.replace(self, rows=f"{_HELD} AS rows_in_use")


@contextmanager
def opened(
    files: Path | Mapping[str, Path],
    query: str | None = None,
    spoilt: bool = False,
) -> Iterator[Opened]:
    """The rows of `query` over `files`, or of the only table in them. Raises DataError for a file that cannot be read
    and InputError for a query that is not one plain SELECT. spoilt: lines of a CSV that cannot be read are
    left out; cells of SQLite of another type than their column's, and what the query cannot work out of a row
    (`_tried`), are gaps."""
    named = {TABLE: files} if not isinstance(files, Mapping) else dict(files)
    paths = {name: _regular(Path(path)) for name, path in named.items()}
    duckdb = _duckdb()
    config: dict[str, Any] = {
        "memory_limit": MEMORY,
        "max_execution_time": str(int(1000 * SECONDS)),
        "temp_directory": "",
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "allow_community_extensions": "false",
        "allow_extension_repositories": "forbidden",
        "allow_persistent_secrets": "false",
        "python_enable_replacements": "false",
        "threads": THREADS,
    }
    with (
        contextlib.ExitStack() as copies,
        _in_other_words(paths.values()),
        duckdb.connect(":memory:", config=config) as connection,
    ):
        connection.execute("SET enable_progress_bar = false")  # it would go to the standard output
        connection.execute("SET TimeZone = 'UTC'")  # the machine's would decide on which day a time lies
        # A TRY_CAST that is done while a CSV is read is none any more: it fails, or its line counts as unreadable.
        # What stands twice within TRY, or is looked for in a long list, is worked out outside of it, and fails there.
        more = ",common_subexpressions,in_clause" if spoilt else ""
        connection.execute(f"SET disabled_optimizers = 'type_pushdown{more}'")
        left_out: list[str] | None = [] if spoilt else None
        shown = {p: p if left_out is None else copies.enter_context(_readable(p, left_out)) for p in paths.values()}
        parquet = [_quoted(str(p)) for p in paths.values() if spoilt and _format(p) == "parquet"]
        unread = [name for where in parquet for name, _, checked in _columns_of(connection, where) if checked]
        tables = [
            table
            for name, path in paths.items()
            for table in _let_in(connection, name, path, shown[path], query, left_out)
        ]
        # DuckDB's own files are attached by now, and attached they stay.
        paths_sql = ", ".join(_quoted(str(shown[p])) for p in paths.values() if _format(p) not in ("duckdb", "sqlite"))
        connection.execute(f"SET allowed_paths = [{paths_sql}]")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
        if query is None:
            if len(tables) != 1:
                raise InputError(f"it holds {len(tables)} tables ({', '.join(tables[:10])}): give a query over them")
            query = f"SELECT * FROM {tables[0]}"
        tree = _syntax(connection, query)
        _check_query(connection, tree, list(paths))
        inner = query.strip().rstrip(";")
        _check_names(connection, tree)
        try:
            described = connection.execute(f"DESCRIBE SELECT * FROM (\n{inner}\n)").fetchall()
        except duckdb.BinderException:
            if gone := [name for name in unread if name in inner]:
                raise InputError(f"the query cannot be carried out: '{gone[0]}' is no column{_UNREAD}") from None
            raise
        types = {row[0]: str(row[1]) for row in described}
        aliases = ", ".join(f"c{i}" for i in range(len(described)))
        if spoilt:
            cells = ", ".join(_without_least(f"c{i}", kind) for i, kind in enumerate(types.values()))
            inner = f"SELECT {cells} FROM (\n{_tried(connection, tree)}\n) AS tried({aliases})"
            connection.execute(f"DESCRIBE SELECT * FROM (\n{inner}\n)")
        if _united(tree):
            inner = f"SELECT * FROM (\n{inner}\n) ORDER BY ALL"
        yield Opened(connection, f"(\n{inner}\n) AS rows_in_use({aliases})", types, left_out or (), unread)


@contextmanager
def _held(table: Any, wanted: Sequence[str]) -> Iterator[Opened]:
    """Columns in memory as a table of DuckDB's: numbers as they are, all else as text. Raises InputError for what is no
    table."""
    names = getattr(table, "column_names", None) or (list(table) if isinstance(table, Mapping) else None)
    names = names if names is not None else getattr(table, "columns", None)
    if names is None or hasattr(table, "collect"):
        raise InputError(
            f"a table is a dict of columns, or a pandas, polars or Arrow table, not {type(table).__name__}"
        )
    names = [str(name) for name in names]
    if isinstance(table, Mapping):
        check_aligned(table[name] for name in names if name in wanted)
    cells = {f"c{i}": _cells(table[name], name) for i, name in enumerate(names) if name in wanted}
    sizes = {names[int(c[1:])]: len(values) for c, values in cells.items()}
    if len(set(sizes.values())) > 1:
        raise DataError(f"columns of different lengths: {', '.join(f'{n} {s}' for n, s in sizes.items())}")
    config = {"python_enable_replacements": "false", "threads": THREADS}
    duckdb = _duckdb()
    with _in_other_words(), duckdb.connect(":memory:", config=config) as connection:
        connection.execute("SET enable_progress_bar = false")
        types = dict.fromkeys(names, "")
        if cells:
            connection.register("held", cells)
            described = connection.execute("DESCRIBE SELECT * FROM held").fetchall()
            types |= {names[int(row[0][1:])]: str(row[1]) for row in described}
        text = {c: "" if values.dtype.kind != "O" else "::VARCHAR" for c, values in cells.items()}
        columns = ", ".join(f"{c}{cast} AS {c}" for c, cast in text.items())
        types |= {names[int(c[1:])]: "VARCHAR" for c, cast in text.items() if cast}
        yield Opened(connection, f"(SELECT {columns} FROM held)", types)


def _cells(values: Any, name: str) -> npt.NDArray[Any]:
    """A column in memory (rows,): numbers and truth values as they are, all else as text, None for a gap."""
    values = values.detach().cpu() if hasattr(values, "detach") else values  # a tensor
    if str(getattr(values, "dtype", "")).removeprefix("torch.") in ("float16", "bfloat16"):
        raise DataError(f"column '{name}' is of half precision, which tells few numbers apart; give float32 or float64")
    found = values.to_numpy() if hasattr(values, "to_numpy") else values.numpy() if hasattr(values, "numpy") else values
    found = found if isinstance(found, np.ndarray) else np.array(found, dtype=object)
    if found.ndim == 0:
        raise DataError(f"column '{name}' is no list of cells but a {type(values).__name__}")
    if found.ndim != 1:
        raise DataError(f"column '{name}' has more than one cell a row")
    if np.ma.is_masked(found):
        masked, found = np.ma.getmaskarray(found), np.ma.getdata(found).astype(object)
        found[masked] = None
    if found.dtype.kind in "biuf":
        short = found.dtype == np.float32  # whose digits the ids in it are told apart by
        return np.ascontiguousarray(found, np.float64 if found.dtype.kind == "f" and not short else None)
    cells = found.astype("datetime64[us]").astype(object) if found.dtype.kind == "M" else found
    out = np.empty(len(cells), dtype=object)
    out[:] = [None if is_gap(c) else _written(c) for c in cells]
    return out


def _written(cell: Any) -> str:
    """A cell as its table would write it."""
    if isinstance(cell, (bool, np.bool_)):
        return "true" if cell else "false"
    if isinstance(cell, (float, np.floating)):
        number = float(cell)
        return str(int(number)) if number.is_integer() and abs(number) < TOLD_APART else repr(number)
    return str(cell)


@cache
def _built_in(functions: str) -> frozenset[str]:
    """Names of DuckDB's own functions, by a query of them where no file is attached."""
    with _duckdb().connect(":memory:") as connection:
        return frozenset(name for (name,) in connection.execute(functions).fetchall())


def _syntax(connection: duckdb.DuckDBPyConnection, query: str) -> Any:
    """The syntax tree of a query, as DuckDB writes it down. Raises InputError unless it is one SELECT."""
    try:
        statements = connection.extract_statements(query)
        parsed = connection.execute("SELECT json_serialize_sql(?)", [query]).fetchall()[0][0]
    except Exception as error:
        raise InputError(f"{_ONLY}, and this cannot be parsed: {_first_line(error)}") from None
    tree = json.loads(parsed)
    if len(statements) != 1 or tree.get("error"):
        raise InputError(f"{_ONLY}; this is something else")
    return tree


def _sql(connection: duckdb.DuckDBPyConnection, tree: Any) -> str:
    """The query of a syntax tree."""
    return str(connection.execute("SELECT json_deserialize_sql(?::JSON)", [json.dumps(tree)]).fetchall()[0][0])


def _check_query(connection: duckdb.DuckDBPyConnection, tree: Any, known: Iterable[str]) -> None:
    """Raises InputError unless a query reads nothing but tables that were let in, as `known`."""
    parts = list(_parts(tree))
    own = {str(entry.get("key")) for part in parts for entry in (part.get("cte_map") or {}).get("map", ())}
    given, own = {name.lower() for name in known}, {name.lower() for name in own}
    named_here = {name for name in own if not name.startswith(_OWN_VIEWS)}
    attached = connection.execute("SELECT lower(database_name) FROM duckdb_databases()").fetchall()
    files = given.intersection(*zip(*attached, strict=True))  # without one there is nothing to list, which takes 8 ms
    written = {row for row in connection.execute(_OWN_SQL).fetchall() if row[0] in given} if files else set()
    called = _built_in(_CONSISTENT) - _OF_ITSELF | _CLOCK | _MACROS | _FUNCTIONS
    for part in parts:
        kind = part.get("type")
        if isinstance(kind, str) and kind.endswith("_NODE") and kind not in _NODES:
            raise InputError(f"{_ONLY}; this holds {kind.removesuffix('_NODE').replace('_', ' ')}")
        if kind == "SHOW_REF":
            raise InputError(f"{_ONLY}; this asks about DuckDB itself")
        function = str(part.get("function_name") or "").lower()
        if function and kind != "TABLE_FUNCTION":
            known_here = function in called or function.startswith(_MACROS_OF_LISTS)
            if not known_here or part.get("schema") or part.get("catalog"):
                raise InputError(f"{_ONLY}; '{function}' is no function of its arguments alone, or a file's own")
        if kind == "TABLE_FUNCTION":
            function = part.get("function", {}).get("function_name", "")
            if function not in _FUNCTIONS:
                raise InputError(f"{_ONLY}; this reads from the function '{function}'")
        if kind == "BASE_TABLE":
            named = part["qualified_name"]["path"]
            first = named[0].lower()  # the name of a CTE is no schema, and stands for nothing outside its scope
            if first not in given and (len(named) > 1 or first not in named_here):
                raise InputError(f"{_ONLY}; this reads from '{'.'.join(named)}' (known: {', '.join(known)})")
            lower = tuple(connection.execute("SELECT lower(?)", [name]).fetchall()[0][0] for name in named)
            if any(lower in (of, (of[0], of[2])) for of in written):
                raise InputError(
                    f"'{'.'.join(named)}' is a view or has computed columns, by SQL that stands in its file and is not "
                    "looked through: write that in the query, or store the result as a table"
                )
        rowid = str((part.get("column_names") or [""])[-1]).lower() == "rowid"
        if rowid and connection.execute(_WITHOUT_ROWID).fetchone() != (0,):
            raise InputError(f"{_ONLY}, whose result follows from their content; this has 'rowid', the place of a row")
        if what := _unordered(part):
            raise InputError(f"{_ONLY}, whose result follows from their content; this has {what}")


def _check_names(connection: duckdb.DuckDBPyConnection, tree: Any) -> None:
    """Raise InputError where a SELECT of a query that was looked through (`_check_query`) has two columns of one name:
    whoever reads from it gets the first, without a word."""
    top = tree["statements"][0]["node"]
    outer = (top.get("cte_map") or {}).get("map") or []
    for part in _parts(top):
        if part.get("type") not in ("SELECT_NODE", "SET_OPERATION_NODE"):
            continue
        own = [] if part is top else (part.get("cte_map") or {}).get("map") or []
        described = _described(connection, part | {"cte_map": {"map": [*outer, *own]}})
        if described is None:
            continue
        names = [name for name, _ in described]
        lower = [name.lower() for name in names]
        if twice := [name for name in names if lower.count(name.lower()) > 1]:
            name = identifier(twice[0])
            raise InputError(
                f"two columns of the query's result, or of a part of it, have the same name '{twice[0]}': write "
                f"* REPLACE (... AS {name}) or * EXCLUDE ({name}), join by USING, or give one another name"
            )


def _described(connection: duckdb.DuckDBPyConnection, part: Any) -> list[tuple[str, str]] | None:
    """Names and types of the columns of a part of a query; None of one that has no meaning by itself, such as one that
    looks at the row outside."""
    try:
        text = _sql(connection, {"error": False, "statements": [{"node": part}]})
        return [(row[0], str(row[1])) for row in connection.execute(f"DESCRIBE {text}").fetchall()]
    except _duckdb().Error:
        return None


#: What of a query stands for true or false, beside parts of AND and OR.
_TRUTHS = {"where_clause", "having", "qualify", "filter", "condition", "when_expr"}


def _tried(connection: duckdb.DuckDBPyConnection, tree: Any) -> str:
    """A query that was looked through, with TRY_CAST for CAST, and of what stands for true or false, and TRY about what
    it works out of a row's cells, or compares them with, for which DuckDB casts them: NULL where these are not for
    that, so that the row fails alone. As the query alone says, not any row."""
    alone = _built_in(_OF_A_ROW) | _MACROS - _OF_ROWS
    joined = any(part.get("type") == "JOIN" or part.get("class") == "SUBQUERY" for part in _parts(tree))
    as_truth = _syntax(connection, "SELECT TRY_CAST(1 AS BOOLEAN)")["statements"][0]["node"]["select_list"][0]

    def truth(part: Any) -> Any:
        """Where DuckDB would cast a text unasked; a comparison is one already, by which tables may be joined."""
        known = part is None or part["class"] in ("COMPARISON", "BETWEEN", "CONJUNCTION")
        return part if known else {**as_truth, "child": part}

    def tried(part: Any) -> tuple[Any, bool]:
        """It, and whether TRY may stand about it: nothing in it is of several rows."""
        if isinstance(part, list):
            found = [tried(item) for item in part]
            return [item for item, _ in found], all(may for _, may in found)
        if not isinstance(part, dict):
            return part, True
        held = {key: tried(value) for key, value in part.items()}
        made, kind = {key: value for key, (value, _) in held.items()}, part.get("class")
        may = all(may for _, may in held.values()) and kind not in ("SUBQUERY", "WINDOW") and "from_table" not in part
        if kind == "CAST":
            made["try_cast"] = True
        if kind == "CONJUNCTION" or part.get("type") == "OPERATOR_NOT":
            made["children"] = [truth(child) for child in made["children"]]
        if kind == "FUNCTION" and part["function_name"].lower() == "if":  # a macro, of CASE
            given = "arguments" if "arguments" in made else "children"  # of DuckDB's versions
            first, *others = made[given]
            named = {**first, "expression": truth(first["expression"])} if "expression" in first else truth(first)
            made[given] = [named, *others]
        for name in _TRUTHS & made.keys():
            made[name] = truth(made[name])
        if kind == "LAMBDA":
            made["lhs"] = part["lhs"]  # names of parameters
        if part.get("type") == "TABLE_FUNCTION":
            return _tabled(part, *held["function"]), False
        if kind == "FUNCTION" and may:
            may = part["function_name"].lower() in alone
        compared = kind in ("COMPARISON", "BETWEEN") and (not joined or _fixed(part))
        if may and (compared or kind in ("FUNCTION", "OPERATOR", "CASE")):
            made = {"class": "OPERATOR", "type": "OPERATOR_TRY", "alias": part["alias"], "children": [made]}
        return made, may

    return _sql(connection, _of_one_type(connection, tried(tree)[0]))


def _tabled(part: Mapping[str, Any], function: Any, may: bool) -> dict[str, Any]:
    """What stands in place of a table, with its `function` as it was gone through; may: whether TRY stands about that.
    A table is nothing that can be tried: one that counts from what cells say is made of a list, which is."""
    if not may:  # whose arguments are
        return {**part, "function": function}
    (bare,) = function["children"]
    if _constant(bare):
        return {**part, "function": bare}
    given = "arguments" if "arguments" in bare else "children"  # of DuckDB's versions
    one = {**bare[given][0], "expression": function} if given == "arguments" else function
    rows = {**bare, "function_name": "unnest", given: [one]}
    if "qualified_name" in bare:
        rows["qualified_name"] = {**bare["qualified_name"], "path": ["unnest"]}
    return {**part, "alias": part["alias"] or bare["function_name"], "function": rows}


#: What each WITH outside of a part of a query names.
_Scope = tuple[Sequence[Any], ...]


def _of_one_type(connection: duckdb.DuckDBPyConnection, part: Any, scope: _Scope = ()) -> Any:
    """With TRY_CAST where the sides of a UNION, EXCEPT or INTERSECT have other types than it has, to which DuckDB would
    cast them unasked: a cell that is none of those is a gap."""
    if isinstance(part, list):
        return [_of_one_type(connection, item, scope) for item in part]
    if not isinstance(part, dict):
        return part
    known = list[Any]()
    for entry in (part.get("cte_map") or {}).get("map") or ():
        known = [*known, _of_one_type(connection, entry, (*scope, known))]
    within = (*scope, known)
    made = {key: _of_one_type(connection, value, within) for key, value in part.items() if key != "cte_map"}
    if "cte_map" in part:
        made["cte_map"] = {**part["cte_map"], "map": known}
    if part.get("type") != "SET_OPERATION_NODE":
        return made
    whole = _described(connection, _within(connection, made, scope))
    if whole is None:
        return made
    for name in ("children",) if "children" in made else ("left", "right"):  # of DuckDB's versions
        sides = made[name] if name == "children" else [made[name]]
        cast = [_side(connection, side, part["setop_type"], whole, within) for side in sides]
        made[name] = cast if name == "children" else cast[0]
    return made


def _side(
    connection: duckdb.DuckDBPyConnection, side: Any, how: str, whole: Sequence[tuple[str, str]], scope: _Scope
) -> Any:
    """One side of a set operation, whose columns are `whole`, in the types of these."""
    own = _described(connection, _within(connection, side, scope))
    if own is None:
        return side
    by_name = {name.lower(): kind for name, kind in whole}
    kinds = [by_name[name.lower()] for name, _ in own] if "NAME" in how else [kind for _, kind in whole]
    if kinds == [kind for _, kind in own]:
        return side
    of_side = [(f"c{i}", identifier(name), kind) for i, ((name, _), kind) in enumerate(zip(own, kinds, strict=True))]
    cells = ", ".join(f"TRY_CAST({cell} AS {kind}) AS {name}" for cell, name, kind in of_side)
    names = ", ".join(cell for cell, *_ in of_side)
    return _over(connection, f"SELECT {cells} FROM (SELECT 1) AS side({names})", side)


def _within(connection: duckdb.DuckDBPyConnection, part: Any, scope: _Scope) -> Any:
    """A part of a query with what it may name of the WITHs outside of it."""
    for known in reversed([known for known in scope if known]):
        part = {**_over(connection, "SELECT * FROM (SELECT 1) AS part", part), "cte_map": {"map": known}}
    return part


def _over(connection: duckdb.DuckDBPyConnection, query: str, part: Any) -> Any:
    """A query, with a part of another in place of what it selects from."""
    made = _syntax(connection, query)["statements"][0]["node"]
    made["from_table"]["subquery"]["node"] = part
    return made


def _united(tree: Any) -> bool:
    """Whether a query holds a UNION without ALL, which begins with one side or the other, whatever is said."""
    return any(part.get("setop_all") is False or part.get("union_all") is False for part in _parts(tree))


def _fixed(comparison: Mapping[str, Any]) -> bool:
    """Whether a side of it is the same in all rows: others may be what tables are joined by, which DuckDB does not do
    quickly by what is tried."""
    sides = [comparison[side] for side in ("left", "right", "lower", "upper") if side in comparison]
    return any(map(_constant, sides))


def _constant(tree: Any) -> bool:
    """Whether it names no column."""
    return all(part.get("class") != "COLUMN_REF" for part in _parts(tree))


def _unordered(part: Mapping[str, Any]) -> str:
    """What in this part of a query follows from chance, or from the order of the rows; empty where nothing does."""
    if part.get("sample"):
        return "a sample of rows: take rows by what is in them, as by hash(id) % 10 = 0"
    changes = part.get("modifiers") or ()
    kinds = {change["type"] for change in changes}
    if "ORDER_MODIFIER" not in kinds:
        if "LIMIT_MODIFIER" in kinds:
            return "LIMIT or OFFSET without ORDER BY"
        if any(change.get("distinct_on_targets") for change in changes):
            return "DISTINCT ON without ORDER BY"
    if part.get("ref_type") == "POSITIONAL" or part.get("nearest_approx"):
        return "a join of rows by their places"
    name = str(part.get("function_name") or "").lower()
    orders = part.get("orders") or part.get("arg_orders") or (part.get("order_bys") or {}).get("orders") or ()
    ordered = [order for order in orders if order["expression"]["class"] != "CONSTANT"]
    if part.get("key_targets"):
        return "a recursion USING KEY, of which the last row of a key counts"
    if name in _ANY_ORDER:
        return f"'{name}', which follows from the order of the rows"
    if name in _ORDERED and not ordered:
        return f"'{name}' without ORDER BY in it"
    if part.get("class") == "WINDOW" and not ordered and f"{part['start']} {part['end']}".count("_ROWS"):
        return "a window of ROWS without ORDER BY"
    return ""


def _parts(tree: Any) -> Iterator[dict[str, Any]]:
    below = [tree]
    while below:
        part = below.pop()
        if isinstance(part, dict):
            yield part
            below += part.values()
        elif isinstance(part, list):
            below += part


def _regular(path: Path) -> Path:
    """Where a file lies. Raises InputError for a database's address, and DataError for no file, or for a name by which
    DuckDB would look for others."""
    if re.match(r"(postgres(ql)?|mysql|https?|s3|gs|az|hf|odbc|jdbc)s?:", str(path)):
        raise InputError(
            f"'{str(path).partition(':')[0]}' is not read: it needs a network and an extension of DuckDB that is not "
            "part of it and is never fetched; write the rows to a Parquet or CSV file there and name that"
        )
    try:
        found = path.resolve(strict=True)
    except OSError as error:
        absent = isinstance(error, FileNotFoundError)
        raise DataError(f"no file '{path}'{_beside(path)}" if absent else f"cannot read '{path}'") from None
    if not found.is_file():
        raise DataError(f"'{path}' is no file")
    if set("*?[]{}") & set(str(found)):
        raise DataError(f"'{path}' has one of *?[]{{}} in its name, which stands for other files; rename it")
    return found


def _beside(path: Path) -> str:
    """The table with the nearest name in the same folder, where it has any; or that there is no such folder."""
    if not path.parent.is_dir():
        return f": there is no folder '{path.parent}'"
    with contextlib.suppress(OSError):
        return nearest(path.name, sorted(p.name for p in path.parent.iterdir() if p.suffix.lower() in ENDINGS))
    return ""


_FORMATS = {
    ".csv": "csv", ".tsv": "csv", ".txt": "csv", ".parquet": "parquet", ".duckdb": "duckdb", ".sqlite": "sqlite",
    ".sqlite3": "sqlite",
}  # fmt: skip
#: Endings of the files that this module reads.
ENDINGS = (*_FORMATS, ".db")


def _format(path: Path) -> str:
    if path.suffix.lower() == ".db":
        with path.open("rb") as file:
            start = file.read(16)
        return "sqlite" if start.startswith(b"SQLite format 3") else "duckdb"
    if path.suffix.lower() not in _FORMATS:
        cure = OTHERS.get(path.suffix.lower())
        raise DataError(f"'{path}': must end in {', '.join(ENDINGS)}{f': {cure}' if cure else ''}")
    return _FORMATS[path.suffix.lower()]


def _let_in(
    connection: duckdb.DuckDBPyConnection,
    name: str,
    path: Path,
    shown: Path,
    query: str | None,
    left_out: list[str] | None,
) -> list[str]:
    """Make the tables of a file known as `name`, or `name.TABLE` where it holds several; what a query calls them.
    shown: where DuckDB is to read it. left_out: is told of what cannot be read, and is refused without it."""
    kind, where, table = _format(path), _quoted(str(shown)), identifier(name)
    if kind == "duckdb":
        connection.execute(f"ATTACH {where} AS {table} (READ_ONLY)")
        held = connection.execute(
            "SELECT schema_name, table_name FROM duckdb_tables() WHERE database_name = ? UNION ALL SELECT schema_name, "
            "view_name FROM duckdb_views() WHERE database_name = ? AND NOT internal ORDER BY ALL",
            [name, name],
        ).fetchall()
        return [".".join(map(identifier, (name, *parts))) for parts in held]
    if kind == "sqlite":
        return _copied(connection, name, path, query, left_out)
    if kind == "csv":
        columns, mark = _header(path, left_out is not None)
        # In parallel it begins a part of 8 MB in quotes, too, where these hold what looks like lines, and fails. One
        # after the other it takes no note of a quote that stays open, of which `_readable` leaves none.
        rows = (
            f"read_csv({where}, auto_detect=false, header=true, delim={_quoted(mark)}, quote='\"', escape='\"', "
            "strict_mode=true, null_padding=false, hive_partitioning=false, "
            f"parallel={'true' if left_out is None else 'false'}, columns={_texts(columns)})"
        )
    elif left_out is None:
        rows = f"read_parquet({where}, hive_partitioning=false)"
    else:
        rows = _by_cells(connection, where)
    connection.execute(f"CREATE VIEW {table} AS SELECT * FROM {rows}")
    return [table]


def _by_cells(connection: duckdb.DuckDBPyConnection, where: str) -> str:
    """A Parquet file with the columns of which one cell takes no other away, as its schema alone says. What is no UTF-8
    has '?' in its place, and the least moment is a gap."""
    kept = [
        _without_least(identifier(name), kind) for name, kind, checked in _columns_of(connection, where) if not checked
    ]
    if not kept:
        raise DataError(f"no column of it is one{_UNREAD}")
    return f"(SELECT {', '.join(kept)} FROM {_PARQUET.format(where)})"


def _without_least(cell: str, kind: str) -> str:
    """SQL for a cell; NULL for the least moment of 64 bits, on which DuckDB's casts fail whatever is tried."""
    return (
        f"CASE WHEN {cell} >= '-infinity'::{kind} THEN {cell} END AS {cell}" if kind.startswith("TIMESTAMP") else cell
    )


def _columns_of(connection: duckdb.DuckDBPyConnection, where: str) -> list[tuple[str, str, bool]]:
    """Of each column of a Parquet file its name and DuckDB's type, and whether DuckDB checks it as it reads it, or what
    it holds."""
    said = "converted_type, logical_type, duckdb_type, type || ' ' || converted_type"
    schema = connection.execute(f"SELECT num_children, {said} FROM parquet_schema({where})").fetchall()
    described = connection.execute(f"DESCRIBE SELECT * FROM {_PARQUET.format(where)}").fetchall()
    places = iter(schema[1:])  # behind the root: each part, and behind it those that it holds

    def checked() -> bool:
        children, *types = next(places)
        inner = [checked() for _ in range(children or 0)]
        return any(inner) or any(_CHECKED_AS_READ.fullmatch(t) for t in types if t is not None)

    return [(name, kind, checked() or _CHECKED_AS_READ.fullmatch(kind) is not None) for name, kind, *_ in described]


@contextmanager
def _readable(path: Path, left_out: list[str]) -> Iterator[Path]:
    """Where DuckDB is to read a file some lines of which cannot be read, as long as this lasts: of a CSV a copy in
    memory, of the records that can be read, in their order. DuckDB's own reader can leave lines out, but not each for
    itself: an open quote took all lines behind it, one of very many cells all memory, and with it all records.
    left_out: is told of the others' lines."""
    if _format(path) != "csv":
        yield path
        return
    columns, mark = _header(path, True)
    until, numbers = time.monotonic() + SECONDS, list[int]()
    with os.fdopen(os.memfd_create("table", os.MFD_CLOEXEC), "w", encoding="utf-8", newline="") as copy:
        rows = csv.writer(copy, delimiter=mark, lineterminator="\n", quoting=csv.QUOTE_ALL)
        rows.writerow(columns)
        for number, cells in _records(path, mark, len(columns)):
            if cells is None:
                numbers.append(number)
            else:
                rows.writerow(cells)
            if number % 1024 == 0 and time.monotonic() > until:
                raise DataError(f"reading it takes more than {SECONDS:g} seconds")
        copy.flush()
        if numbers:
            left_out.append(f"'{path}': lines that cannot be read, {_listed(numbers)}")
        yield Path(f"/proc/self/fd/{copy.fileno()}")


def _records(path: Path, mark: str, width: int) -> Iterator[tuple[int, list[str] | None]]:
    """Of a CSV behind its header: at which line a record begins, and its `width` cells, or None where it cannot be
    read. Where no record begins that ends within `_MOST_LINES`, that line alone is left out, and the next begins anew:
    how others are read follows from a record only if it was not written by the rules of quotes, and then for those
    lines at most."""
    with path.open(encoding="latin-1", newline="") as file:
        end = "\r" if file.readline(1 << 20).endswith("\r") else "\n"
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline=end) as file:
        header = csv.reader(iter(file.readline, ""), delimiter=mark)
        next(header, None)
        number, ahead = header.line_num + 1, deque[str | None]()  # None: a line that is too long

        def fill(lines: int) -> bool:
            while len(ahead) < lines and (line := file.readline(_MOST_CHARACTERS)):
                whole = line.endswith(end) or len(line) < _MOST_CHARACTERS
                ahead.append(line if whole else None)
                while not whole:
                    line = file.readline(_MOST_CHARACTERS)
                    whole = line.endswith(end) or not line
            return len(ahead) >= lines

        def from_here() -> Iterator[str]:
            characters = 0
            for at in range(_MOST_LINES):
                line = ahead[at] if fill(at + 1) else None
                if line is None or characters + len(line) > _MOST_CHARACTERS:
                    return
                characters += len(line)
                yield line

        while fill(1):
            cells, lines = _record(ahead[0], from_here(), mark)
            if cells == [] and width == 1:
                cells = [""]  # a blank line is no record, but of one column a gap
            if cells != []:
                yield number, cells if cells and len(cells) == width and _is_text(cells) else None
            number += lines
            for _ in range(lines):
                ahead.popleft()


def _record(line: str | None, lines: Iterator[str], mark: str) -> tuple[list[str] | None, int]:
    """The cells of the record that begins with `line`, the first of `lines`, and how many of these it has."""
    if line is None:
        return None, 1
    if '"' not in line and len(line) <= csv.field_size_limit():
        bare = line.rstrip("\r\n")
        return (None if "\r" in bare or "\n" in bare else bare.split(mark) if bare else []), 1
    reader = csv.reader(lines, delimiter=mark, strict=True, skipinitialspace=True)
    try:
        return next(reader), reader.line_num
    except (csv.Error, StopIteration):
        return None, 1


def _is_text(cells: list[str]) -> bool:
    """Whether the bytes of all were UTF-8."""
    try:
        "".join(cells).encode()
    except UnicodeEncodeError:
        return False
    return True


def _header(path: Path, spoilt: bool) -> tuple[list[str], str]:
    """The names in the first line of a CSV, and what stands between them. spoilt: whatever the lines behind it hold."""
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape" if spoilt else "strict") as file:
            line = re.sub('"[^"]*"', "", file.readline(1 << 20))
            mark = max(_MARKS, key=line.count)
            file.seek(0)
            names = [name.strip() for name in next(csv.reader(file, delimiter=mark), [])]
        "".join(names).encode()
    except UnicodeError:
        with path.open("rb") as raw:
            marked = raw.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        raise DataError(f"not a CSV file in UTF-8{_CONVERT.format('UTF-16' if marked else 'WINDOWS-1252')}") from None
    except csv.Error:
        raise DataError(
            "not a CSV file: the first line must name the columns, and a name there is longer than 131,072 characters; "
            "is a quote left open?"
        ) from None
    if not any(names):
        raise DataError("the first line must name the columns")
    if re.fullmatch("sep=.?", "".join(names), re.IGNORECASE):
        raise DataError("the first line must name the columns: it is Excel's 'sep=', delete that line")
    lower = [name.lower() for name in names]
    if not lower[0] and all(lower[1:]):
        raise DataError(
            "column names must not be empty, and that of column 1 is: numbers of rows, as R and pandas write them? "
            "Leave them out by write.csv(..., row.names = FALSE) or to_csv(..., index=False), or give the column a name"
        )
    for at, name in enumerate(lower, 1):
        if not name or lower.count(name) > 1:
            raise DataError(
                f"column names must differ, not in case alone, and not be empty; that of column {at} in the first line "
                f"{'stands there twice' if name else 'is empty'}: give it a name of its own, or delete the column"
            )
    return names, mark


def _copied(
    connection: duckdb.DuckDBPyConnection,
    name: str,
    path: Path,
    query: str | None,
    left_out: list[str] | None,
) -> list[str]:
    """Copy the tables of a SQLite file that the query may mean into memory: the extension that reads them in place is
    no part of DuckDB. In a query whole numbers and numbers are of the type with which their column is declared, and all
    else is text, as all is without a query: SQLite's cells have types of their own, and a column's that followed from
    its cells would let one record change what the query says of the others."""
    connection.execute(f"CREATE SCHEMA {identifier(name)}")
    until = time.monotonic() + SECONDS
    file = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    file.text_factory = _text_of
    file.set_progress_handler(lambda: time.monotonic() > until, 100_000)
    made = []
    try:
        held = file.execute(
            "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%' ORDER BY name"
        ).fetchall()
        if left_out is not None:
            file.set_authorizer(_raises_nothing)
        for (inner,) in held:
            if query is None or re.search(rf"(?<!\w){re.escape(inner)}(?!\w)", query, re.IGNORECASE):
                made.append(f"{identifier(name)}.{identifier(inner)}")
                _copy(connection, file, inner, made[-1], query is not None, left_out)
    finally:
        file.close()
    return made


def _raises_nothing(action: int, _: str | None, name: str | None, *__: str | None) -> int:
    """Whether SQLite may do what the SQL of a view asks for: of functions, such as raise at no cell."""
    raises = action == sqlite3.SQLITE_FUNCTION and name is not None and name.lower() not in _RAISE_NOTHING
    return sqlite3.SQLITE_DENY if raises else sqlite3.SQLITE_OK


#: Of a type by which a SQLite column is declared: what it holds, and how that is called in DuckDB.
_DECLARED = (
    (re.compile("INT"), int, "BIGINT"),
    (re.compile("CHAR|CLOB|TEXT"), str, "VARCHAR"),
    (re.compile("BLOB"), bytes, "BLOB"),
    (re.compile(r"REAL|FLOA|DOUB|\b(NUM|NUMERIC|NUMBER|DEC|DECIMAL)\b"), float, "DOUBLE"),
)


def _declared(words: str) -> tuple[type, str]:
    return next(((held, kind) for part, held, kind in _DECLARED if part.search(words.upper())), (str, "VARCHAR"))


def _text_of(cell: bytes) -> str | bytes:
    """A text cell of SQLite's; one that is not UTF-8 is bytes, and so of another type than its column's."""
    try:
        return cell.decode()
    except UnicodeDecodeError:
        return cell


def _copy(
    connection: duckdb.DuckDBPyConnection,
    file: sqlite3.Connection,
    inner: str,
    table: str,
    typed: bool,
    left_out: list[str] | None,
) -> None:
    """typed: by the columns' declared types. A cell of another is a gap, and `left_out` is told of it. Raises DataError
    for it where that is None."""
    rows = file.execute(f"SELECT * FROM {identifier(inner)}")
    columns = [d[0] for d in rows.description]
    known = file.execute("SELECT name, type, hidden FROM pragma_table_xinfo(?)", (inner,)).fetchall()
    if left_out is not None and any(hidden > 1 for *_, hidden in known):  # computed, by SQL that nobody looks through
        raise DataError(_OF_VIEWS)
    said = {name: kind for name, kind, _ in known}
    declared = [_declared(said.get(c) or "") for c in columns]
    types = [kind if typed or kind == "BLOB" else "VARCHAR" for _, kind in declared]
    made = ", ".join(f"{identifier(c)} {t}" for c, t in zip(columns, types, strict=True))
    connection.execute(f"CREATE TABLE {table} ({made})")
    wrong: dict[str, list[int]] = {}
    begin = 1
    kinds = [bytes if t == "BLOB" else d[0] if typed else str for t, d in zip(types, declared, strict=True)]
    while block := rows.fetchmany(50_000):
        cells = {}
        for i, values in enumerate(zip(*block, strict=True)):
            bad = [at for at, cell in enumerate(values) if not _holds(kinds[i], cell)]
            if bad:
                wrong.setdefault(columns[i], []).extend(begin + at for at in bad)
            cells[f"c{i}"] = _as_objects(values, types[i])
            cells[f"c{i}"][bad] = None
        begin += len(block)
        connection.register("block", cells)
        casts = ", ".join(f"CAST(c{i} AS {t})" for i, t in enumerate(types))
        connection.execute(f"INSERT INTO {table} SELECT {casts} FROM block")
        connection.unregister("block")
    if wrong:
        lines = [Finding(c, f"no {said.get(c) or 'text'}", np.array(at)).line() for c, at in wrong.items()]
        if left_out is not None:
            left_out.append(f"table '{inner}': {'; '.join(lines)}")
            return
        raise DataError(
            f"table '{inner}': cells of another type than their column is declared with, {'; '.join(lines)}: query a "
            "view of the table, which leaves out such columns or casts them, as by CAST(... AS TEXT)"
        )


def _holds(held: type, cell: Any) -> bool:
    """Whether a column has such a cell: a text column any but bytes, which no dictionary can code."""
    if cell is None or held is bytes:
        return True
    return not isinstance(cell, bytes) if held is str else isinstance(cell, (int, held))


def _as_objects(values: Sequence[Any], kind: str) -> npt.NDArray[Any]:
    """Cells as text; of those in a column of bytes it is copied alone that they are there, as no bytes."""
    array = np.empty(len(values), dtype=object)
    array[:] = [None if v is None else b"" if kind == "BLOB" else _written(v) for v in values]
    return array


# ---- words ----


def _duckdb() -> Any:
    try:
        import duckdb
    except ModuleNotFoundError:
        raise InputError("tables are read by DuckDB, which is not installed: pip install 'duckdb>=2.0'") from None
    return duckdb


@contextmanager
def _in_other_words(paths: Iterable[Path] = ()) -> Iterator[None]:
    """DuckDB's and SQLite's errors quote the line or cell that they stumbled on: what is said of them here does not.
    paths: of the files that are read."""
    duckdb = _duckdb()
    try:
        yield
    except RecursionError:
        raise InputError("the query's expressions nest too deep") from None
    except duckdb.InterruptException:
        raise DataError(f"reading it takes more than {SECONDS:g} seconds") from None
    except duckdb.OutOfMemoryException:
        raise DataError(f"reading it takes more than {MEMORY} of memory") from None
    except (duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException, duckdb.PermissionException) as e:
        said = _first_line(e)
        cure = "; cells of CSV are text: write CAST(age AS DOUBLE) of a number" * ("VARCHAR" in said)
        raise InputError(f"the query cannot be carried out: {said}{cure}") from None
    except duckdb.ConversionException:
        raise DataError(
            "the query casts a cell to what it is not; use TRY_CAST, or leave it to the dictionary"
        ) from None
    except duckdb.Error as error:
        raise DataError(_why_unreadable(error, list(paths))) from None
    except sqlite3.DatabaseError as error:
        if "not authorized" in str(error):  # at a view's SQL, before any cell is read
            raise DataError(_OF_VIEWS) from None
        if not isinstance(error, sqlite3.OperationalError):
            raise DataError(f"it cannot be read as SQLite ({type(error).__name__})") from None
        slow = str(error) == "interrupted"
        raise DataError(
            f"reading it takes more than {SECONDS:g} seconds" if slow else "it is locked or damaged"
        ) from None
    except sqlite3.Error as error:
        raise DataError(f"it cannot be read as SQLite ({type(error).__name__})") from None


#: What DuckDB says of a line of a CSV, after that line.
_OF_LINE = re.compile(
    r"^(?:Expected Number of Columns: (?P<named>\d+) Found: (?P<found>\d+)|(?P<quote>Value with unterminated quote)"
    r"|(?P<coded>Invalid unicode)|(?P<long>Maximum line size))",
    re.MULTILINE,
)


def _why_unreadable(error: Exception, paths: Sequence[Path]) -> str:
    """What DuckDB stumbled on: which file of several, and its line, without a word of its content."""
    text = str(error)
    path = next((p for p in paths if str(p) in text), paths[0] if len(paths) == 1 else None)
    about, kind = f"'{path}': " if path is not None and len(paths) > 1 else "", path and _format(path)
    line = re.search(r"CSV Error on Line: (\d+)", text)
    if line is not None:
        return f"{about}line {line[1]} {_wrong_line(list(_OF_LINE.finditer(text))[-1:])}"
    if path is not None and kind == "csv":
        return about + (_other_end(path) or "it cannot be read as CSV: save it anew, as 'CSV UTF-8'")
    known = {"parquet": " as Parquet", "duckdb": " as DuckDB's", "sqlite": " as SQLite"}
    return f"{about}it cannot be read{known.get(kind or '', '')} ({type(error).__name__})"


def _wrong_line(said: Sequence[re.Match[str]]) -> str:
    found = said[0].groupdict() if said else {}
    if found.get("coded"):
        return f"is not UTF-8 text{_CONVERT.format('WINDOWS-1252')}"
    if found.get("quote"):
        return 'has a quote that is not closed at the end of its cell: within quotes a quote is written twice, ""'
    if found.get("long"):
        return "is longer than the 2,000,000 bytes that a line may have; is a quote before it left open?"
    cells, columns = int(found.get("found") or 0), int(found.get("named") or 0)
    what = "the mark in it, as a decimal comma," if cells >= columns else "a line's end in it"
    title = "; a title above the columns' names has to go" if columns == 1 < cells else ""
    return f"has not as many cells ({cells}) as columns are named ({columns}): one with {what} needs quotes{title}"


_ENDS = {b"\r\n": "CR LF", b"\n": "LF", b"\r": "CR"}


def _other_end(path: Path) -> str:
    """Of a CSV some lines of which end otherwise than its first one, which is the first of them; "" of another."""
    before, rest, inside, line = b"", b"", False, 1
    with path.open("rb") as file:
        for read in itertools.chain(iter(lambda: file.read(1 << 20), b""), [b""]):
            block = rest + read
            rest = b"\r" if read and block.endswith(b"\r") else b""  # its LF may be in the next block
            for mark in re.findall(rb'"|\r\n|\n|\r', block[: len(block) - len(rest)]):
                if mark == b'"':
                    inside = not inside
                elif not inside and before not in (b"", mark):
                    convert = "tr -s '\\r' '\\n' < OLD" if b"\r" in (before, mark) else "sed 's/\\r$//' OLD"
                    return (
                        f"line {line} ends in {_ENDS[mark]} and those before it in {_ENDS[before]}: give all lines one "
                        f"end, as by {convert}.csv > NEW.csv, or save it anew"
                    )
                else:
                    before, line = before if inside else mark, line + 1
    return ""


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:300]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def identifier(name: str) -> str:
    """A column's name as SQL takes it."""
    return '"' + name.replace('"', '""') + '"'


def _texts(columns: Sequence[str]) -> str:
    return "{" + ", ".join(f"{_quoted(c)}: 'VARCHAR'" for c in columns) + "}"
