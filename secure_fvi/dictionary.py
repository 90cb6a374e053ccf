"""The dictionary of a table: of each column its kind, levels, unit, range and scale, agreed on before anybody looks.

Coding follows from the dictionary alone and never from the rows at hand, so that a site which lacks a level has its
column all the same. Whoever gets a dictionary reads levels and ranges: what stands in it is public.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import datetime
import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from secure_fvi.errors import InputError
from secure_fvi.files import read_bytes
from secure_fvi.options import Says, check
from secure_fvi.runs import wording
from secure_fvi.runs.config import RECORD_ID
from secure_fvi.runs.wording import nearest, unknown_key

Kind = Literal["number", "integer", "category", "boolean", "id", "date"]
Missing = Literal["refuse", "drop"]
Texts = Annotated[tuple[str, ...], Says('must be a list of texts, such as ["no", "yes"]')]
Text = Annotated[str, Says("must be text")]
Flag = Annotated[bool, Says("must be true or false")]
Finite = Annotated[float, Field(allow_inf_nan=False), Says("must be a finite number")]
Spread = Annotated[float, Field(gt=0, allow_inf_nan=False), Says("must be positive and finite")]

#: Dates are coded as days since this one.
DAY_ZERO = datetime.date(1970, 1, 1)
#: What a cell's text has to be, in ASCII, to be a number or a date.
NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
DATE = r"\d{4}-\d{2}-\d{2}([ T]00:00(:00(\.0+)?)?)?"
#: Whole numbers from here on are not told apart as floating point ones.
TOLD_APART = 2**53
#: Kinds that have a range, a centre and a scale.
MEASURED = ("number", "integer", "date")
#: What a site may say in its own way: it changes how cells are written, not what they mean.
_SITES_OWN = ("missing", "description", "review")
_FORMAT = 1
#: Of a dictionary's file, which may be another's: some hundred thousand levels, read in seconds.
MOST_BYTES, MOST_COLUMNS = 4 << 20, 10_000


@dataclass(frozen=True)
class Column:
    """One column.

    levels: of a category, in the order of their codes 0, 1, ...; of a boolean, if given, the texts for false and true.
    low, high: the least and greatest value allowed, a date's in days since 1970-01-01. centre, scale: what
    standardises it, in its own unit. missing: texts that stand for a value that is not there, beside the empty cell.
    shared: its groups span silos. unique: no value stands twice. at_most: another column, which bounds it in each row
    (successes by trials). review: what somebody who knows the table has to look at before the column is used.
    Raises InputError that names the field.
    """

    kind: Kind
    levels: Texts = ()
    unit: Text = ""
    low: Finite | None = None
    high: Finite | None = None
    centre: Finite | None = None
    scale: Spread | None = None
    missing: Texts = ()
    description: Text = ""
    shared: Flag = False
    unique: Flag = False
    at_most: Text = ""
    review: Text = ""

    def __post_init__(self) -> None:
        for name, value in vars(self).copy().items():
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        check(self)
        for name in ("low", "high", "centre", "scale"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, float(value) + 0.0)  # one zero, not two
        self._check_levels()
        self._check_range()
        if self.shared and self.kind not in ("category", "integer", "id"):
            raise InputError(f"shared is for groups (category, integer, id), not for kind {self.kind}")
        if self.unique and self.kind not in ("integer", "id"):
            raise InputError(f"unique is for an id or an integer, not for kind {self.kind}")
        if self.at_most and self.kind not in ("number", "integer"):
            raise InputError(f"at_most is for a number or an integer, not for kind {self.kind}")

    def _check_levels(self) -> None:
        if self.kind == "category" and not self.levels:
            raise InputError("a category needs levels: every value that it may have, at any silo")
        if self.levels and self.kind not in ("category", "boolean"):
            raise InputError(f"levels are for a category or a boolean, not for kind {self.kind}")
        if self.kind == "boolean" and len(self.levels) not in (0, 2):
            raise InputError("levels of a boolean are two, for false and for true")
        for code in self.missing:
            if not isinstance(code, str):
                raise InputError('missing must be a list of texts, such as ["-9", "NA"]')
            if code.strip() not in ("", code):
                raise InputError(f"code {code!r} for missing has blanks at an end, which no cell has: leave them out")
            if self.kind in ("number", "integer") and re.fullmatch(r"[+-]?\d+,\d+", code):
                raise InputError(f"code {code!r} for missing has a comma in a number: write a point")
        seen, missing = set[str](), frozenset(self.missing)
        for level in self.levels:
            if not isinstance(level, str):
                raise InputError("levels must be a list of texts")
            if not level or level != level.strip():
                raise InputError(f"level {level!r} is empty or has blanks at an end")
            if has_controls(level):  # it stands in tables that people read, and its writer is somebody else
                raise InputError(f"level {level!r} has a control character, as a line's end: recode it in a query")
            if level in seen:
                raise InputError(f"level {level!r} stands twice")
            if level in missing:
                raise InputError(f"{level!r} is both a level and a code for missing")
            seen.add(level)

    def _check_range(self) -> None:
        for name in ("low", "high", "centre", "scale"):
            if getattr(self, name) is not None and self.kind not in MEASURED:
                raise InputError(f"{name} is for a number, an integer or a date, not for kind {self.kind}")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise InputError("low is above high")


def folded(text: str) -> str:
    """Text but for case, and for how accents and blanks are stored, which nobody sees."""
    return unicodedata.normalize("NFKC", text).casefold()


def has_controls(text: str) -> bool:
    """Whether it holds what begins a line or moves a cursor."""
    return not text.isprintable() and any(unicodedata.category(c) in ("Cc", "Zl", "Zp") and c != "\t" for c in text)


@dataclass(frozen=True)
class Dictionary:
    """Columns by name. Raises InputError, which names the column, for one that cannot be meant."""

    columns: Mapping[str, Column]

    def __post_init__(self) -> None:
        if not isinstance(self.columns, Mapping) or not self.columns:
            raise InputError("a dictionary needs at least one column")
        object.__setattr__(self, "columns", dict(self.columns))
        for name, column in self.columns.items():
            if not isinstance(name, str) or not name.strip() or not name.isprintable():
                raise InputError(f"a column's name must be text that can be read, not {name!r}")
            if not isinstance(column, Column):
                raise InputError(f"column '{name}' must be a Column, not a {type(column).__name__}")
            if column.at_most:
                bound = self[column.at_most]
                if bound.kind not in ("number", "integer"):
                    raise InputError(f"column '{name}': at_most names '{column.at_most}', of kind {bound.kind}")

    def __hash__(self) -> int:
        return hash(self.digest)

    def __getitem__(self, name: str) -> Column:
        """A column. Raises InputError with the nearest known name."""
        if name not in self.columns:
            raise InputError(f"the dictionary has no column '{name}'{nearest(name, self.columns)}")
        return self.columns[name]

    @property
    def all_different(self) -> list[str]:
        """Columns of which no value stands twice: those that are unique, and records' own ids."""
        own = {RECORD_ID} if RECORD_ID in self.columns and self[RECORD_ID].kind != "id" else set()
        return [name for name, column in self.columns.items() if column.unique or name in own]

    def check_reviewed(self, names: Iterable[str]) -> None:
        """Raise InputError where one of these columns is a draft that nobody has looked at."""
        drafts = [f"'{name}' ({self[name].review})" for name in names if self[name].review]
        if drafts:
            raise InputError(
                f"the dictionary is a draft in {'; '.join(drafts)}: mend what is wrong and delete the line 'review'"
            )

    def differences(self, other: Dictionary) -> list[str]:
        """Columns of this dictionary that `other` lacks or means otherwise, with what differs, for a message: a job's
        dictionary against a site's. What is each site's own does not count, but for codes for missing: a site may have
        more, and one that the job has and the site lacks would be read as a value there. No value is named, and of
        `other` no column."""
        found = []
        for name, column in self.columns.items():
            if name not in other.columns:
                found.append(f"'{name}' is not there")
                continue
            names = [f.name for f in dataclasses.fields(Column) if f.name not in _SITES_OWN]
            unlike = [n for n in names if getattr(column, n) != getattr(other.columns[name], n)]
            unlike += [] if set(column.missing) <= set(other.columns[name].missing) else ["missing"]
            if unlike:
                found.append(f"'{name}' differs in {', '.join(unlike)}")
        return found

    @property
    def digest(self) -> bytes:
        """32 bytes, the same wherever columns have the same names and mean the same: their order, descriptions and
        codes for missing values are left out, since these are each site's own."""
        said = {
            name: {k: v for k, v in dataclasses.asdict(column).items() if k not in _SITES_OWN}
            for name, column in self.columns.items()
        }
        content = json.dumps(said, sort_keys=True, ensure_ascii=True, allow_nan=False)
        return hashlib.sha256(b"secure-fvi/dictionary/1/" + content.encode()).digest()

    def to_toml(self, blank: Sequence[str] = ()) -> str:
        """The file that reads back to this dictionary; fields named `blank` stand in it to be filled in."""
        columns = {name: _written(column, blank) for name, column in self.columns.items()}
        return wording.dumps({"format": _FORMAT, "columns": columns})

    def to_table(self) -> dict[str, Any]:
        """What its file holds, in the one form that a job carries and a model's hash is over: names and codes for
        missing sorted, dates in days, without descriptions."""
        said = {name: dataclasses.asdict(column) for name, column in sorted(self.columns.items())}
        default = {f.name: f.default for f in dataclasses.fields(Column)}
        columns = {
            name: {k: v for k, v in fields.items() if k != "description" and v != default[k]}
            | ({"missing": tuple(sorted(fields["missing"]))} if fields["missing"] else {})
            for name, fields in said.items()
        }
        listed = {n: {k: list(v) if isinstance(v, tuple) else v for k, v in c.items()} for n, c in columns.items()}
        return {"format": _FORMAT, "columns": listed}


def read_dictionary(path: Path) -> Dictionary:
    """The dictionary in the TOML file `path`. Raises InputError with the file, the column and what is wrong."""
    content = read_bytes(Path(path), "dictionary", MOST_BYTES)
    return dictionary_of(wording.read_toml(content.removeprefix(codecs.BOM_UTF8), str(path)), str(path))


def dictionary_of(table: Mapping[str, Any], source: str) -> Dictionary:
    """The dictionary in `table`, what a TOML file held; a column may be a `Column` already. Raises InputError, prefixed
    with `source`."""
    for key in table:
        if key not in ("format", "columns"):
            raise InputError(f"{source}: {unknown_key('', key, ('format', 'columns'))}")
    if table.get("format") != _FORMAT:
        raise InputError(f"{source}: format = {_FORMAT} must stand at its top")
    columns = table.get("columns")
    if not isinstance(columns, dict):
        raise InputError(f"{source}: it needs a table [columns.NAME] for each column")
    if len(columns) > MOST_COLUMNS:
        raise InputError(f"{source}: {len(columns)} columns, of which a dictionary may have {MOST_COLUMNS}")
    try:
        return Dictionary({n: c if isinstance(c, Column) else _column(n, c) for n, c in columns.items()})
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def _column(name: str, given: Any) -> Column:
    if not isinstance(given, dict):
        raise InputError(f"columns.{name} must be a table")
    known = [f.name for f in dataclasses.fields(Column)]
    for key in given:
        if key not in known:
            raise InputError(unknown_key(f"columns.{name}", key, known))
    if "kind" not in given:
        raise InputError(f"'columns.{name}.kind' is missing")
    dated = {k: _days(v) if given["kind"] == "date" and k in ("low", "high", "centre") else v for k, v in given.items()}
    try:
        return Column(**dated)
    except InputError as error:
        raise InputError(f"columns.{name}: {error}") from None


def _days(value: Any) -> Any:
    """Days since 1970-01-01, of a date as TOML writes it."""
    if isinstance(value, str):  # as a job's configuration keeps it
        with contextlib.suppress(ValueError):
            value = datetime.date.fromisoformat(value)
    is_date = isinstance(value, datetime.date) and not isinstance(value, datetime.datetime)
    return float((value - DAY_ZERO).days) if is_date else value


def _written(column: Column, blank: Sequence[str]) -> dict[str, Any]:
    """The fields that say more than their defaults, whole numbers and dates as people write them."""
    said = {f.name: getattr(column, f.name) for f in dataclasses.fields(column)}
    said = {
        f.name: said[f.name]
        for f in dataclasses.fields(column)
        if said[f.name] != f.default or (f.name in blank and column.kind in ("number", "integer"))
    }
    for name in ("low", "high", "centre"):
        value = said.get(name)
        if value is not None and value.is_integer() and abs(value) < TOLD_APART:
            said[name] = _as_date(value) if column.kind == "date" else int(value)
    return said


def _as_date(days: float) -> datetime.date | float:
    try:
        return DAY_ZERO + datetime.timedelta(days=days)
    except OverflowError:
        return days
