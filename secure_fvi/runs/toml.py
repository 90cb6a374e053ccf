"""A writer for the little TOML that a resolved configuration needs; the standard library reads it, within bounds."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dumps(table: Mapping[str, Any]) -> str:
    """`table` as TOML that `tomllib` reads back to an equal dict. None and empty tables are left out."""
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
            lines.append(f"{_key(key)} = {_value(value)}")
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
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    raise TypeError(f"TOML cannot hold a {type(value).__name__}")


_TOKENS = re.compile(
    r"""(?P<part>[A-Za-z0-9_-]++|"(?:\\.|[^"\\\n])*+"?|'[^'\n]*+'?)|(?P<dot>\.)|(?P<blank>[ \t]++)|(?P<other>[^"'.])""",
    re.DOTALL,
)
#: Names in a dotted key. The parser's time grows with the square: a few kilobytes of `a.a.a` would take hours.
_DEEPEST = 32


def loads(text: str) -> dict[str, Any]:
    """The table that TOML `text` holds. Raises ValueError for anything else, RecursionError for what nests too deep."""
    dots = 0
    for token in _TOKENS.finditer(text):
        if token.lastgroup == "dot":
            dots += 1
            if dots > _DEEPEST:
                raise ValueError(f"a key of more than {_DEEPEST} parts")
        elif token.lastgroup == "other":
            dots = 0
    return tomllib.loads(text)
