"""A dictionary is read and written without loss, and refuses what cannot be meant in a line that names the column."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_fvi.dictionary import MOST_BYTES, MOST_COLUMNS, Column, Dictionary, dictionary_of, read_dictionary
from secure_fvi.errors import InputError
from secure_fvi.runs import wording
from secure_fvi.runs.config import parse

FILE = """
format = 1

[columns.age]
kind = "number"
unit = "years"
low = 0
high = 120
centre = 60
scale = 10

[columns.smoke]
kind = "category"
levels = ["never", "former", "current"]
missing = ["9", "unknown"]

[columns.admitted]
kind = "date"
low = 2020-01-01
high = 2024-12-31

[columns.child]
kind = "id"

[columns.r]
kind = "integer"
low = 0
at_most = "n"

[columns.n]
kind = "integer"
low = 1
"""


def parsed(text: str, source: str) -> Dictionary:
    return dictionary_of(wording.read_toml(text.encode(), source), source)


def test_a_dictionary_of_another_is_read_in_bounded_time(tmp_path: Path) -> None:
    """Levels were counted one by one over all: 200,000 took an hour. A file has a length, and a number of columns, from
    which on nothing of it is parsed. The control is one just below."""
    levels = tuple(f"level {k}" for k in range(200_000))
    began = time.process_time()
    assert len(Column("category", levels=levels).levels) == 200_000
    assert time.process_time() - began < 20
    with pytest.raises(InputError, match="level 'level 7' stands twice"):
        Column("category", levels=(*levels, "level 7"))
    path = tmp_path / "d.toml"
    path.write_text(FILE + "#" * (MOST_BYTES - len(FILE)))
    assert "age" in read_dictionary(path).columns
    path.write_text(FILE + "#" * (MOST_BYTES - len(FILE) + 1))
    with pytest.raises(InputError, match=r"d\.toml' has more than 4194304 bytes"):
        read_dictionary(path)
    many = "".join(f'[columns.c{k}]\nkind = "id"\n' for k in range(MOST_COLUMNS + 1))
    with pytest.raises(InputError, match="10001 columns, of which a dictionary may have 10000"):
        parsed(f"format = 1\n{many}", "theirs")


def test_a_formula_of_a_job_has_a_length() -> None:
    """The control is one that is as long as it may be."""
    table = {
        "model": {"formula": "y ~ x" + " " * 9_995, "dictionary": "d.toml"},
        "silo": [{"id": "a", "data": "a.csv"}],
    }
    assert len(parse(table, "job").model.formula or "") == 10_000
    table["model"] = {"formula": "y ~ x" + " " * 9_996, "dictionary": "d.toml"}
    with pytest.raises(InputError, match="10000 characters"):
        parse(table, "job")


def test_a_file_reads_as_it_says_and_writes_back_the_same(tmp_path: Path) -> None:
    (tmp_path / "d.toml").write_text(FILE)
    found = read_dictionary(tmp_path / "d.toml")
    assert found["age"] == Column("number", unit="years", low=0.0, high=120.0, centre=60.0, scale=10.0)
    assert found["smoke"].levels == ("never", "former", "current")
    assert found["admitted"].low == 18262.0  # days from 1970-01-01 to 2020-01-01
    assert list(found.columns) == ["age", "smoke", "admitted", "child", "r", "n"]
    written = found.to_toml()
    assert "low = 2020-01-01" in written
    assert parsed(written, "again") == found


_NAMES = st.text(st.characters(min_codepoint=32, max_codepoint=0x24F, exclude_categories=["Cc"]), min_size=1).filter(
    lambda name: bool(name.strip()) and name.isprintable()
)
_FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)
_COLUMNS = st.one_of(
    st.builds(
        lambda kind, ends, scale, text: Column(kind, low=min(ends), high=max(ends), scale=scale, description=text),
        st.sampled_from(["number", "integer", "date"]), st.tuples(_FINITE, _FINITE), st.floats(1e-3, 1e3), st.text(),
    ),
    st.lists(_NAMES.map(str.strip), min_size=1, unique=True).map(lambda levels: Column("category", tuple(levels))),
    st.builds(Column, st.just("id"), shared=st.booleans(), unique=st.booleans(),
              missing=st.tuples(st.text().map(str.strip))),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(_NAMES, _COLUMNS, min_size=1, max_size=4))
def test_every_dictionary_survives_its_file(columns: dict[str, Column]) -> None:
    found = Dictionary(columns)
    again = parsed(found.to_toml(), "written")
    assert again == found
    assert again.digest == found.digest


def test_the_digest_is_of_what_is_meant_not_of_how_it_is_written() -> None:
    found = parsed(FILE, "f")
    columns = dict(found.columns)
    turned = Dictionary(dict(reversed(columns.items())))
    assert turned.digest == found.digest
    assert Dictionary(columns | {"age": replace(columns["age"], missing=("-9",), description="at entry")}).digest == (
        found.digest
    )
    for name, field, value in (
        ("age", "high", 121), ("age", "unit", "months"), ("age", "scale", 11), ("age", "kind", "integer"),
        ("smoke", "levels", ("former", "never", "current")), ("child", "shared", True), ("child", "unique", True),
    ):  # fmt: skip
        changed = Dictionary(columns | {name: replace(columns[name], **{field: value})})
        assert changed.digest != found.digest, f"{name}.{field} does not count"
    assert Dictionary({n: c for n, c in columns.items() if n != "child"}).digest != found.digest


def test_what_a_site_means_otherwise_than_a_job_is_named() -> None:
    job = parsed(FILE, "f")
    columns = dict(job.columns)
    own = columns | {"age": replace(columns["age"], missing=("-9",)), "more": Column("id")}
    assert job.differences(Dictionary(own)) == []
    columns["smoke"] = replace(columns["smoke"], levels=("never", "current", "former"))
    columns["Age"] = columns.pop("age")
    assert job.differences(Dictionary(columns)) == [
        "'age' is not there",
        "'smoke' differs in levels",
    ]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "numeric"}, "kind 'numeric' is unknown; choose number, integer"),
        ({"kind": "category"}, "a category needs levels"),
        ({"kind": "category", "levels": [1, 2]}, "levels must be a list of texts"),
        ({"kind": "category", "levels": ["a", "a"]}, "level 'a' stands twice"),
        ({"kind": "category", "levels": ["a", " b"]}, "level ' b' is empty or has blanks"),
        ({"kind": "category", "levels": ["a", "b\x1b[2K"]}, "has a control character, as a line's end"),
        ({"kind": "boolean", "levels": ["no", "yes\nage  9.99"]}, "has a control character"),
        ({"kind": "category", "levels": ["a", "b"], "missing": ["b"]}, "both a level and a code for missing"),
        ({"kind": "number", "levels": ["a"]}, "levels are for a category or a boolean"),
        ({"kind": "boolean", "levels": ["no", "yes", "perhaps"]}, "two, for false and for true"),
        ({"kind": "number", "low": "0"}, "low must be a finite number"),
        ({"kind": "number", "low": float("inf")}, "low must be a finite number"),
        ({"kind": "number", "low": True}, "low must be a finite number"),
        ({"kind": "number", "low": 2, "high": 1}, "low is above high"),
        ({"kind": "number", "scale": 0}, "scale must be positive"),
        ({"kind": "category", "levels": ["a"], "low": 0}, "low is for a number"),
        ({"kind": "number", "shared": True}, "shared is for groups"),
        ({"kind": "number", "unique": True}, "unique is for an id"),
        ({"kind": "id", "shared": 1}, "shared must be true or false"),
        ({"kind": "integer", "at_most": "m"}, "no column 'm'"),
        ({"kind": "integer", "at_most": "c"}, "at_most names 'c', of kind id"),
        ({"kind": "id", "missing": "NA"}, "missing must be a list of texts"),
        ({"kind": "number", "missing": [-9]}, "missing must be a list of texts"),
        ({"kind": "number", "missing": ["-9 "]}, "code '-9 ' for missing has blanks at an end"),
        ({"kind": "number", "missing": ["-9,0"]}, "code '-9,0' for missing has a comma"),
        ({"kind": "id", "unit": 3}, "unit must be text"),
    ],
)
def test_a_column_that_cannot_be_meant_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Dictionary({"x": Column(**fields), "c": Column("id")})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "f: format = 1 must stand at its top"),
        ("format = 2\n[columns.a]\nkind = 'id'", "f: format = 1"),
        ("format = 1", r"f: it needs a table \[columns.NAME\]"),
        ("format = 1\n[columns]", "f: a dictionary needs at least one column"),
        ("format = 1\n[columns.a]\nlevels = []", "f: 'columns.a.kind' is missing"),
        ("format = 1\n[columns.a]\nkind = 'id'\nlevel = []", "f: unknown key 'columns.a.level'; did you mean 'levels'"),
        ("format = 1\n[columns.a]\nkind = 'numbr'", "f: columns.a: kind 'numbr' is unknown"),
        ("format = 1\n[columns.a]\nkind = 'number'\nlow = 2020-01-01", "f: columns.a: low must be a finite number"),
        ("format = 1\n[colums.a]\nkind = 'id'", "f: unknown key 'colums'; did you mean 'columns'"),
        ("format = 1\n[columns]\na = 3", "f: columns.a must be a table"),
        ("format 1", "f: not a TOML file"),
    ],
)
def test_a_file_that_is_no_dictionary_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parsed(text, "f")


def test_an_unknown_column_is_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match="no column 'smoek'; did you mean 'smoke'"):
        parsed(FILE, "f")["smoek"]
