"""`secure-fvi data`: a draft reads back and codes the table it came from, and a check names rows and no cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from secure_fvi.cli import main
from secure_fvi.dictionary import Column, read_dictionary
from secure_fvi.errors import InputError
from secure_fvi.runs import wording
from secure_fvi.runs.config import parse, read
from secure_fvi.runs.federation import Federation, federate
from secure_fvi.tables import read_coded

ROWS = [f"P{i},{i + 100},{20.5 + i % 37},{i % 4},{['never', 'former', 'current'][i % 3]},{i % 2},{i % 3 == 0},"
        f"20{10 + i % 12}-03-0{1 + i % 9},{'NA' if i == 5 else i % 7}" for i in range(60)]  # fmt: skip
TABLE = "\n".join(["person,number,age,visits,smoke,wheeze,seen_before,day,siblings", *ROWS]) + "\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text(TABLE)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["data", *arguments])
    shown = capsys.readouterr()
    return int(str(ended.value.code or 0)), shown.out, shown.err


def test_a_draft_codes_its_own_table_and_says_that_it_discloses(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, said = run(capsys, "describe", "t.csv", "--output", "d.toml")
    assert code == 0
    assert "whoever gets the draft learns them" in said
    drafted = read_dictionary(folder / "d.toml")
    assert {name: column.kind for name, column in drafted.columns.items()} == {
        "person": "id", "number": "id", "age": "number", "visits": "integer", "smoke": "category", "wheeze": "boolean",
        "seen_before": "boolean", "day": "date", "siblings": "integer",
    }  # fmt: skip
    assert drafted["smoke"].levels == ("current", "former", "never")
    assert (drafted["age"].low, drafted["age"].high) == (20.0, 60.0)  # 20.5 to 56.5
    assert drafted["siblings"] == Column("integer", low=0, high=6, missing=("NA",))
    assert 'unit = ""' in (folder / "d.toml").read_text()
    assert "2010-01-01" in (folder / "d.toml").read_text()
    assert not any(f"P{i}" in (folder / "d.toml").read_text() for i in range(60))
    assert len(read_coded(folder / "t.csv", drafted, missing="drop").columns["age"]) == 59
    assert run(capsys, "check", "t.csv", "--dictionary", "d.toml", "--missing", "drop")[:2] == (
        0, f"60 rows, 9 columns in the dictionary {drafted.digest.hex()[:16]}\n"
        "column 'siblings': a gap in 1 row (6)\nit fits; 1 rows with a gap are left out\n",
    )  # fmt: skip
    code, _, said = run(capsys, "describe", "t.csv", "--output", "d.toml")
    assert (code, "is there already" in said) == (2, True)


def test_a_check_names_columns_and_rows_and_no_cells(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "describe", "t.csv", "--output", "d.toml")
    lines = TABLE.splitlines()
    lines[3] = lines[3].replace("current", "Quixote77")
    lines[8] = lines[8].replace("never", "Quixote77").replace("former", "Quixote77").replace("current", "Quixote77")
    lines[9] = lines[9].replace("P8", "P1")
    (folder / "t.csv").write_text("\n".join(lines) + "\n")
    code, out, err = run(capsys, "check", "t.csv", "--dictionary", "d.toml", "--missing", "drop")
    assert code == 2
    assert "column 'smoke': a level that the dictionary lacks in 2 rows (3, 8)" in out
    assert "column 'person': an id of an earlier row in 1 row (9)" in out
    assert "t.csv: 2 of 9 columns do not fit: person, smoke" in err
    assert "Quixote77" not in out + err
    # The row number is given on request for all.
    assert "2 rows (3 and 1 more)" in run(capsys, "check", "t.csv", "--dictionary", "d.toml", "--rows", "1")[1]


def test_a_query_and_further_tables(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "more.csv").write_text("person,group\n" + "".join(f"P{i},{'ab'[i % 2]}\n" for i in range(60)))
    query = "SELECT person, CAST(age AS DOUBLE) * 12 AS months, more.group FROM data JOIN more USING (person)"
    code, out, _ = run(capsys, "describe", "t.csv", "--query", query, "--table", "more=more.csv")
    assert code == 0
    assert out.count("[columns.") == 3
    assert "high = 700" in out
    for bad in ("more", "=x", "data=more.csv"):
        code, _, err = run(capsys, "describe", "t.csv", "--query", query, "--table", bad)
        assert (code, "NAME=FILE" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("describe", "none.csv"), "no file"),
        (("describe", "t.csv", "--query", "COPY data TO 'x.csv'"), "one SELECT"),
        (("check", "t.csv", "--dictionary", "none.toml"), "cannot read dictionary"),
        (("check", "t.csv", "--dictionary", "t.csv"), "not a TOML file"),
    ],
)
def test_bad_input_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
    assert not (folder / "x.csv").exists()


def test_a_run_in_one_process_reads_tables_likewise(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Paths are relative to the configuration; what stands side by side is one array."""
    (folder / "d.toml").write_text(
        'format = 1\n[columns.smoke]\nkind = "boolean"\nlevels = ["no", "yes"]\n'
        + "".join(f'[columns."wheeze[{k}]"]\nkind = "boolean"\n' for k in range(4))
    )
    rows = ["no,0,0,1,0,a", "yes,1,0,0,1,a", ",0,0,0,0,a", "no,1,1,1,1,b"]
    (folder / "one.csv").write_text("\n".join(["smoke,wheeze[0],wheeze[1],wheeze[2],wheeze[3],ward", *rows]) + "\n")
    (folder / "two.csv").write_text("smoke,wheeze[0],wheeze[1],wheeze[2],wheeze[3]\n1,0,1,0,1\n")
    coded = {"dictionary": "d.toml", "query": "SELECT * FROM data WHERE ward = 'a'", "missing": "drop"}
    silos = [{"id": "one", "data": "one.csv", **coded}, {"id": "two", "data": "two.csv"}]
    (folder / "job.toml").write_text(wording.dumps({"model": {"program": "six-cities"}, "silo": silos}))
    found = federate(read(folder / "job.toml"))
    assert isinstance(found, Federation)
    assert found.silos[0]["smoke"].tolist() == [0.0, 1.0]
    assert found.silos[0]["wheeze"].tolist() == [[0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 1.0]]
    assert found.silos[1]["wheeze"].tolist() == [[0.0, 1.0, 0.0, 1.0]]
    assert "those with a gap in 'smoke', 1, are left out" in caplog.text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"query": "SELECT 1"}, "query, tables and missing need a dictionary"),
        ({"missing": "drop"}, "query, tables and missing need a dictionary"),
        ({"missing": "keep", "dictionary": "d.toml"}, "missing = 'keep'"),
        ({"dictionary": "d.toml", "vertical": True}, "no dictionary is read"),
    ],
)
def test_a_silo_that_says_too_little_or_too_much_of_its_table_is_refused(more: dict[str, Any], said: str) -> None:
    more = dict(more)
    table: dict[str, Any] = {"model": {"program": "six-cities"}}
    if more.pop("vertical", False):
        table = {"model": {"likelihood": "bernoulli"}, "algorithm": {"name": "vertical"}, "response": {"data": "y.csv"}}
    with pytest.raises(InputError, match=said):
        parse(table | {"silo": [{"id": "one", "data": "one.csv", **more}]}, "job.toml")
