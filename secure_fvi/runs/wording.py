"""Error messages about configuration: one line that says what is wrong, where, and what would be right."""

from __future__ import annotations

import datetime
import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from secure_fvi.errors import InputError, visible

#: Kinds of value that no file can hold; an option that takes them as well is not described by them.
_NOT_IN_FILES = {"callable_type", "is_instance_of"}
#: Plain words for pydantic's types of error; anything else keeps its own words.
_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "list_type": "a list",
    "model_type": "a table",
    "dict_type": "a table",
    "mapping_type": "a table",
    "greater_than_equal": "at least {ge}",
    "greater_than": "greater than {gt}",
    "less_than": "less than {lt}",
    "literal_error": "{expected}",
    "string_too_short": "a string that is not empty",
    "string_pattern_mismatch": "of the form {pattern}",
    "too_short": "a list that is not empty",
}


def nearest(name: object, allowed: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for the closest of `allowed`, or nothing."""
    known = list(allowed)
    alike = [one for one in known if one.casefold() == str(name).casefold()]  # in other letters
    close = alike or difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def unknown_key(where: str, name: str, allowed: Iterable[str]) -> str:
    """The message for a key that does not exist in table `where` ("" at the top level)."""
    options = sorted(allowed)
    key = f"{where}.{name}" if where else name
    return f"unknown key '{key}'{nearest(name, options)} (allowed: {', '.join(options) or 'none'})"


def dotted(path: Sequence[str | int]) -> str:
    """("silo", 1, "data") as "silo[1].data"."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


def first_error(
    error: ValidationError, given: Any, where: str = "", allowed: Mapping[str, Iterable[str]] | None = None
) -> str:
    """The first mistake that `error` reports about the parsed value `given`, in one line.

    `where` is the dotted key of `given` itself; `allowed` holds the keys of each table, by dotted key, for
    naming those that an unknown one may have meant.
    """
    rows = error.errors(include_url=False)
    # A misspelt key comes before the key that is missing because of it.
    row = next((r for r in rows if r["type"] == "extra_forbidden"), rows[0])
    path = _existing(row["loc"], given)
    key = ".".join(part for part in (where, dotted(path)) if part)
    if row["type"] == "extra_forbidden":
        keys = (allowed or {}).get(".".join(step for step in path[:-1] if isinstance(step, str)), ())
        return unknown_key(dotted(path[:-1]), str(path[-1]), keys)
    if row["type"] == "missing":
        return f"'{'.'.join(part for part in (key, str(row['loc'][-1])) if part)}' is missing"
    if row["type"] == "value_error":
        text = str(row["ctx"]["error"])
        return f"{key}: {text}" if key else text
    same = [r for r in rows if _existing(r["loc"], given) == path and r["type"] not in _NOT_IN_FILES]
    wanted = " or ".join(dict.fromkeys(_wanted(r) for r in same))
    hint = "".join(nearest(r["input"], _choices(r)) for r in same)
    return f"{key} = {_shown(row['input'])}: must be {wanted}{hint}"


def _existing(loc: Sequence[str | int], given: Any) -> tuple[str | int, ...]:
    """The part of a pydantic location that is a path in the data; what follows names a branch of a union."""
    path: list[str | int] = []
    for step in loc:
        if isinstance(given, Mapping) and step in given:
            given = given[str(step)]
        elif isinstance(given, list) and isinstance(step, int) and step < len(given):
            given = given[step]
        else:
            break
        path.append(step)
    return tuple(path)


def _choices(row: Any) -> list[str]:
    if row["type"] != "literal_error":
        return []
    return [part.strip(" '") for part in row["ctx"]["expected"].replace(" or ", ",").split(",")]


def _wanted(row: Any) -> str:
    if row["type"] in _WANTED:
        return _WANTED[row["type"]].format(**row.get("ctx", {}))
    return str(row["msg"]).removeprefix("Input should be ")


def _shown(value: Any) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 60 else text[:57] + "..."


# ----
# A writer for the little TOML that a resolved configuration needs; the standard library reads it, within bounds

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*+"')


def dumps(table: Mapping[str, Any]) -> str:
    """`table` as TOML that `loads` reads back to an equal dict. None and empty tables are left out."""
    lines: list[str] = []
    _write(table, (), lines)
    return "\n".join(lines).strip() + "\n"


def _write(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    inner = []
    for key, value in table.items():
        if value is None:
            continue
        if isinstance(value, Mapping) or _is_table_array(value):
            inner.append((key, value))
        else:
            line = f"{_key(key)} = {_value(value)}"
            if _crowded(line):
                line = _QUOTED.sub(lambda quoted: quoted[0].replace(".", r"\u002e"), line)
            lines.append(line)
    for key, value in inner:
        name = ".".join(_key(k) for k in (*path, key))
        if not isinstance(value, Mapping):
            for row in value:
                lines += ["", f"[[{name}]]"]
                _write(row, (*path, key), lines)
        elif value:
            lines += ["", f"[{name}]"]
            _write(value, (*path, key), lines)


def _is_table_array(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    # JSON's escapes are valid in TOML's basic strings; TOML alone forbids a bare DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    raise TypeError(f"TOML cannot hold a {type(value).__name__}")


#: A dot that may part two names of a dotted key, and is not the last one that does: what follows is a quote, or a bare
#: name and another dot.
_DOT = re.compile(r"""\.(?=[ \t]*+(?:["']|[A-Za-z0-9_-]++[ \t]*+\.))""")
#: Such dots in a line. The parser's time grows with the square of a key's parts: a few kilobytes of `a.a.a` would take
#: hours.
_MOST_DOTS = 64
#: Characters of a text: what a dictionary, the longest of our tables, may have.
_LONGEST = 4 << 20


def loads(text: str) -> dict[str, Any]:
    """The table that TOML `text` holds. Raises ValueError for anything else, RecursionError for what nests too deep.

    A key stands on one line, whatever is quoted before it or in it, and each of its dots but the last is a `_DOT`: no
    line of few has a long key. Decimal numbers have none.
    """
    if len(text) > _LONGEST:
        raise ValueError(f"a table of more than {_LONGEST} characters")
    if text.startswith("\ufeff"):
        raise ValueError("it begins with a byte order mark: save it as UTF-8 without one")
    if _crowded(text):
        raise ValueError(
            f"a key of more than {_MOST_DOTS} parts, or a line of as many dots within words: break the line"
        )
    table = tomllib.loads(text)
    _check_numbers(table)
    return table


def read_toml(content: bytes, source: str) -> dict[str, Any]:
    """`loads` of a file's content. Raises InputError, prefixed with `source`, for what is no TOML."""
    try:
        return loads(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise InputError(f"{source}: not a TOML file: not UTF-8 text") from None
    except (ValueError, RecursionError) as error:  # a TOMLDecodeError, or a number beyond all measure
        raise InputError(f"{source}: not a TOML file: {visible(str(error).splitlines()[0])[:200]}") from None


def _check_numbers(table: Mapping[str, Any]) -> None:
    """Raises ValueError for a whole number that TOML knows none of: as one of Python's it is past every float."""
    left: list[Any] = [table]
    while left:
        value = left.pop()
        if isinstance(value, int) and abs(value) > 1 << 64:
            raise ValueError("a whole number of more than 64 bits")
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _crowded(text: str) -> bool:
    count = end = 0
    for dot in _DOT.finditer(text):
        count = 1 if text.find("\n", end, dot.start()) >= 0 else count + 1
        end = dot.end()
        if count > _MOST_DOTS:
            return True
    return False
