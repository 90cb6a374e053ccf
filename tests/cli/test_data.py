"""`secure-fvi data`: a draft reads back and codes the table it came from, and a check names rows and no cells."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import secure_fvi as sf
from secure_fvi.cli import main
from secure_fvi.dictionary import Column, Dictionary, read_dictionary
from secure_fvi.errors import InputError
from secure_fvi.fitting import build_parties
from secure_fvi.runs import wording
from secure_fvi.runs.config import parse
from secure_fvi.runs.federation import Federation, federate
from secure_fvi.runs.reading import read
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
    code, out, said = run(capsys, "describe", "t.csv", "--output", "d.toml")
    assert code == 0
    assert "whoever gets the draft learns them" in said
    assert "look at person, number, smoke and delete their lines 'review', then secure-fvi data check" in out
    assert (folder / "d.toml").read_text().endswith("]\n")
    code, out, said = run(capsys, "check", "t.csv", "--dictionary", "d.toml", "--missing", "drop")
    assert (code, out) == (2, "")
    assert "'smoke' (levels are in the order of the alphabet" in said
    review(folder / "d.toml")
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
        "column 'siblings': a gap in 1 row (6)\nit fits; 1 row with a gap is left out\n",
    )  # fmt: skip
    code, _, said = run(capsys, "describe", "t.csv", "--output", "d.toml")
    assert (code, said) == (2, "secure-fvi: 'd.toml' is there already\n")  # and nothing of a draft


def review(path: Path) -> None:
    """As somebody does who finds nothing to mend."""
    path.write_text("\n".join(line for line in path.read_text().splitlines() if not line.startswith("review")) + "\n")


STRAY = [
    ([20, 45.5, 80, 61, 33] * 6, [999, -9], ("-9", "999"), (20, 80)),
    ([20, 45.5, 80, 61, 33] * 6, [-99], ("-99",), (20, 80)),
    ([0, 1, 1, 0] * 5, [9], ("9",), (None, None)),  # a boolean with its code
    ([0, 3, 6, 4, 1] * 5, [77, 99], ("77", "99"), (0, 6)),
    ([*range(0, 99, 2)] * 2, [99], (), (0, 100)),  # the control: nothing stands apart
    ([-12, 3.5, 20, 31] * 5, [-9], (), (-20, 40)),
    ([0, 1, 2, 3] * 5, [7], (), (0, 7)),  # a count may be
    ([5, 6, 7, 8, 9, 10] * 3, [], (), (5, 10)),
]  # fmt: skip


@pytest.mark.later
@pytest.mark.parametrize(("values", "stray", "missing", "ends"), STRAY)
def test_codes_for_missing_values_do_not_stretch_a_range(
    folder: Path, capsys: pytest.CaptureFixture[str], values: list[float], stray: list[float], missing: Any, ends: Any
) -> None:
    """With them in the range, an age in years has a prior as wide as if 999 were one, and its effect is gone."""
    (folder / "s.csv").write_text("\n".join(["x,who", *(f"{v},p{i}" for i, v in enumerate([*values, *stray, *stray]))]))
    assert run(capsys, "describe", "s.csv", "--output", "s.toml")[0] == 0
    drafted = read_dictionary(folder / "s.toml")["x"]
    assert set(drafted.missing) == set(missing)
    assert (drafted.low, drafted.high) == ends
    assert ("codes of a missing value" in drafted.review) == bool(missing)
    with pytest.raises(
        InputError, match=r"draft in 'who' \(taken" if not missing else r"draft in 'x' \(.* taken for codes"
    ):
        read_coded(folder / "s.csv", read_dictionary(folder / "s.toml"), missing="drop")
    review(folder / "s.toml")
    kept = read_coded(folder / "s.csv", read_dictionary(folder / "s.toml"), missing="drop").columns["x"]
    assert sorted(kept) == sorted([*values, *([] if missing else [*stray, *stray])])


IDS = [
    ([10**30 + i for i in range(60)], "id", "more than 15 digits"),
    ([10**16 + i % 9 for i in range(60)], "id", "more than 15 digits"),
    ([-(10**20) - i for i in range(60)], "id", "more than 15 digits"),
    ([f"{10**16 + i}.5" for i in range(60)], "number", "more than 15 digits"),
    ([*range(59), 10**18], "number", "more than 15 digits"),
    ([f"1.{i}E+17" for i in range(60)], "number", "more than 15 digits"),
    ([10**11 + 7 * (i % 25) for i in range(60)], "integer", "whole numbers of 12 digits: ids"),
    ([f"{i % 25:05d}" for i in range(60)], "id", "a 0 in front"),
    ([f"{i % 7:03d}" for i in range(60)], "category", "a 0 in front"),
    ([f"0{i % 2}" for i in range(60)], "category", "a 0 in front"),
    ([i if i % 3 else f"P{i}" for i in range(60)], "id", "numbers with texts among them"),
    ([20240101 + i % 28 for i in range(60)], "integer", "dates without marks"),
    # The controls: what are numbers has no line to delete.
    ([1980 + i % 25 for i in range(60)], "integer", ""),
    ([f"0.{i % 25}" for i in range(60)], "number", ""),
    ([f"{i % 3}.{i % 25:02d}" for i in range(60)], "number", ""),
]  # fmt: skip


def test_ids_are_not_drafted_as_numbers_without_a_word(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As numbers two patients' would be one, or 007 be 7."""
    rows = zip(*(cells for cells, _, _ in IDS), strict=True)
    names = [f"c{k}" for k in range(len(IDS))]
    (folder / "i.csv").write_text("\n".join(",".join(map(str, row)) for row in (names, *rows)))
    assert run(capsys, "describe", "i.csv", "--output", "i.toml")[0] == 0
    drafted = read_dictionary(folder / "i.toml").columns
    for name, (_, kind, said) in zip(names, IDS, strict=True):
        assert (drafted[name].kind, bool(drafted[name].review)) == (kind, bool(said)), name
        assert said in drafted[name].review
    review(folder / "i.toml")
    read_coded(folder / "i.csv", read_dictionary(folder / "i.toml"))


#: A column's cells in turn, the kind that they are drafted as, its codes for missing values, and what is asked.
WRITTEN: list[tuple[list[str], str, tuple[str, ...], str]] = [
    (["08:30", "12:00", "23:15", "00:10"], "id", (), "times of day or durations"),
    (["mild", "a\x1b[2K", "severe"], "id", (), "line ends or controls"),
    (["mild", "a\u00a0b", "a\tb"], "category", (), "order of the alphabet"),
    (["8:30:05", "25:10:00", "112:00:59"], "id", (), "epoch(CAST(CAST("),
    (["8:30 AM", "11:05 pm"], "id", (), "strptime("),
    (["2024-01-05T08:30:00Z", "2024-01-06T00:00:00+02:00"], "id", (), "where the day is enough"),
    (["2024-01-05T00:00", "2024-12-06"], "date", (), ""),
    (["01-Jan-2024", "3 May 2024"], "id", (), "dates in another form"),
    (["2021-03-05", "05/03/2021"], "id", (), "dates in another form"),
    (["Yes", "No", "Yes"], "category", (), ""),
    (["TRUE", "false"], "boolean", (), ""),
    (["Yes", "yes", "no"], "category", (), "'Yes' and 'yes' differ in case alone, and are"),
    (["Jos\u00e9", "Jose\u0301", "Ana"], "category", (), "or in how accents and blanks are stored, and are"),
    (["Jos\u00e9", "Jose", "Ana"], "category", (), "order of the alphabet"),  # the control
    (["yes"], "category", (), "one value alone"),
    (["0"], "boolean", (), "one value alone"),
    (["27.5"], "number", (), "one value alone"),
    (["1,137", "12", "13,400"], "id", (), "numbers with a comma"),
    (["1.137", "12", "13.400"], "number", (), "three digits behind every point"),
    (["1.137,50", "12,5"], "id", (), "numbers with points between thousands"),
    (['{"day":0}', '{"day":1}'], "id", (), "objects or lists, of which no kind is"),
    (['["a","b"]'] * 4, "id", (), "objects or lists, of which no kind is"),
    (["[low]", "[high]"], "category", (), ""),  # the control
    (["1 137", "12"], "id", (), "numbers with blanks or quotes"),
    (["12,50 €", "3,00 €"], "id", (), "a sign or a unit"),
    (["$12.50", "$3"], "id", (), "a sign or a unit"),
    (["12%", "30%", "4.5%"], "id", (), "a sign or a unit"),
    (["70 kg", "81.5 kg"], "id", (), "a sign or a unit"),
    (["<0.1", "0.3", "0.5", ">100"], "id", (), "numbers with < or >"),
    (["1.5", "#N/A", "2.25", "2.5", "2.75", "3"], "number", ("#N/A",), ""),
    (["1.5", "#DIV/0!", "2.25", "na", "2.75", "3"], "number", ("#DIV/0!", "na"), ""),
    (["1.5", "n.a.", "2.25", "unknown", "2.75", "3"], "number", ("n.a.", "unknown"), "words among numbers"),
    (["a", "b", "unknown"], "category", (), "'unknown' among levels"),
    (["mild", "none", "severe"], "category", (), "order of the alphabet"),
    (["1", "2", "3", "4", "5"], "integer", (), "codes of a category"),
    (["1.5", "x y", *(f"{k}.5" for k in range(20))], "id", (), "most cells are numbers"),
]


def test_a_draft_is_right_or_asks_however_a_column_is_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[cells[i % len(cells)] for cells, *_ in WRITTEN] for i in range(66)]
    with (folder / "w.csv").open("w", newline="") as file:
        csv.writer(file).writerows([[f"c{k}" for k in range(len(WRITTEN))], *rows])
    assert run(capsys, "describe", "w.csv", "--output", "w.toml")[0] == 0
    drafted = read_dictionary(folder / "w.toml").columns
    for (cells, kind, missing, asked), column in zip(WRITTEN, drafted.values(), strict=True):
        assert (column.kind, column.missing, bool(column.review)) == (kind, missing, bool(asked)), cells
        assert asked in column.review
    review(folder / "w.toml")
    read_coded(folder / "w.csv", read_dictionary(folder / "w.toml"), missing="drop")


def test_a_record_is_no_line_of_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "n.csv").write_text("1,2.5\n3,4.5\n")
    code, out, said = run(capsys, "describe", "n.csv")
    assert (code, out, "is its first line a record" in said) == (2, "", True)
    (folder / "n.csv").write_text("id,2001\n3,4.5\n")
    assert run(capsys, "describe", "n.csv")[0] == 0


def test_a_date_with_a_time_of_day_is_answered_with_the_remedy(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "d.csv").write_text("x\n2020-01-01T08:30\n2020-01-02\n")
    (folder / "d.toml").write_text(Dictionary({"x": Column("date", low=0, high=20000)}).to_toml())
    code, _, said = run(capsys, "check", "d.csv", "--dictionary", "d.toml")
    assert (code, "the first 10 characters are its day" in said) == (2, True)
    assert (
        run(capsys, "check", "d.csv", "--dictionary", "d.toml", "--query", "SELECT left(x, 10) AS x FROM data")[0] == 0
    )


def test_what_a_draft_says_to_write_is_a_cure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "w.csv").write_text("a;b;c;d;e\n8:30;1:30 PM;1.137,50;1 137;70 kg\n25:00;2:00 AM;12,5;12;81.5 kg\n")
    run(capsys, "describe", "w.csv", "--output", "w.toml")
    found = {"a": [8.5, 25.0], "b": [13.5, 2.0], "c": [1137.5, 12.5], "d": [1137.0, 12.0], "e": [70.0, 81.5]}
    for name, column in read_dictionary(folder / "w.toml").columns.items():
        query = re.findall("SELECT .* FROM data", column.review)[0]
        coded = read_coded(folder / "w.csv", Dictionary({name: Column("number")}), query)
        assert list(coded.columns[name]) == found[name]
    typed = "SELECT TIME '08:30' AS a, [1, 2] AS b FROM data"
    run(capsys, "describe", "w.csv", "--query", typed, "--output", "t.toml")
    drafted = read_dictionary(folder / "t.toml")
    again = re.findall(r"REPLACE \(.*?\) FROM", drafted["a"].review)[0]
    query = f"SELECT * {again} ({typed})"
    assert read_coded(folder / "w.csv", Dictionary({"a": Column("number")}), query).columns["a"][0] == 8.5
    assert "take them apart" in drafted["b"].review
    (folder / "days.csv").write_text("day\n31.12.2024\n01.02.2023\n")
    run(capsys, "describe", "days.csv", "--output", "days.toml")
    query = re.findall("SELECT .* FROM data", read_dictionary(folder / "days.toml")["day"].review)[0]
    coded = read_coded(folder / "days.csv", Dictionary({"day": Column("date")}), query)
    assert [str(np.datetime64(int(day), "D")) for day in coded.columns["day"]] == ["2024-12-31", "2023-02-01"]


def test_what_a_draft_can_only_guess_is_left_open(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grades = ["mild", "none", "severe"]
    rows = [
        f"{5 + i % 7}.{i % 10},{1 + i % 2},2024{1 + i % 9:02}15,{1 + i % 28}/3/2024,{grades[i % 3]},"
        f"{1 + i % 25},{30 + i % 25},{2001 + i % 9}-03-{1 + i % 28:02},{2001 + i % 9}-03-{1 + i % 28:02}"
        for i in range(40)
    ]
    rows[4] = rows[4].replace("9.4", "51234")
    rows[5] = rows[5][:-10] + "9999-12-31"
    (folder / "g.csv").write_text("\n".join(["dose,arm,plain,day,grade,patient,age,seen,closed", *rows]))
    run(capsys, "describe", "g.csv", "--output", "g.toml")
    drafted = read_dictionary(folder / "g.toml").columns
    assert (drafted["dose"].low, drafted["dose"].high) == (None, None)
    assert (drafted["closed"].low, drafted["closed"].high) == (None, None)  # what stands for no date yet
    assert None not in (drafted["seen"].low, drafted["seen"].high)
    words = {"dose": "high left out", "arm": "two values", "plain": "dates without marks", "day": "another form",
             "grade": "order of the alphabet", "patient": "every number from 1 to 25 is there",
             "closed": "high left out"}  # fmt: skip
    assert all(said in drafted[name].review for name, said in words.items())
    assert not drafted["age"].review


def test_a_check_by_a_formula_looks_at_what_its_fit_reads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "describe", "t.csv", "--output", "d.toml")
    review(folder / "d.toml")
    (folder / "t.csv").write_text(TABLE.replace("NA", "many"))
    assert run(capsys, "check", "t.csv", "--dictionary", "d.toml")[0] == 2
    code, out, _ = run(capsys, "check", "t.csv", "--dictionary", "d.toml", "--formula", "wheeze ~ age + (1 | person)")
    assert (code, out.splitlines()[1:]) == (
        0,
        ["of these the formula uses age, person, wheeze, with family bernoulli", "it fits"],
    )


REFUSED = {
    "wheeze ~ (wheeze | person)": "the response 'wheeze' stands on both sides",
    "wheeze ~ (1 | day)": "'day' is a date and names no groups",
    "wheeze ~ (1 | age)": "'age' is a number and names no groups",
    "wheeze ~ (1 + age | person) + (1 | person)": "'(Intercept)' varies twice by person",
    "age | trials(visits) ~ day": "trials(...) go with family binomial",
    "person ~ age": "family gaussian needs a number",
}


def test_a_check_by_a_formula_refuses_what_its_fit_refuses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The control is the test above. A family by name is the fit's own."""
    run(capsys, "describe", "t.csv", "--output", "d.toml")
    review(folder / "d.toml")
    words = ["check", "t.csv", "--dictionary", "d.toml", "--formula"]
    for formula, said in REFUSED.items():
        code, out, err = run(capsys, *words, formula)
        assert (code, out, said in err) == (2, "", True), err
    taken = run(capsys, *words, "visits ~ age", "--family", "poisson")
    assert (taken[0], "with family poisson" in taken[1]) == (0, True)
    refused = run(capsys, *words, "age ~ day", "--family", "poisson")
    assert (refused[0], "family poisson needs" in refused[2]) == (2, True)


@pytest.mark.later
def test_a_check_counts_rows_of_weight_0(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The control: of a formula without weights, or where none is 0."""
    run(capsys, "describe", "t.csv", "--output", "d.toml")
    review(folder / "d.toml")
    for formula, said in (
        ("age | weights(visits) ~ smoke", "15 rows of weight 0, which a fit counts among rows and learns nothing of\n"),
        ("age | weights(1 + visits) ~ smoke", ""),
        ("age ~ smoke", ""),
    ):
        code, out, _ = run(capsys, "check", "t.csv", "--dictionary", "d.toml", "--formula", formula)
        assert (code, "".join(line + "\n" for line in out.splitlines() if "weight 0" in line)) == (0, said)


@pytest.mark.later
def test_a_check_warns_of_what_few_records_have_and_one_total_shows_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One patient at one site has drug a, two at two sites have b: of an honest job's first total one coordinate is the
    first one's outcome, and of the two no one's. The control: a check of a formula without drugs warns of nothing."""
    columns: dict[str, Any] = {
        "y": {"kind": "number", "centre": 120.0, "scale": 20.0}, "x": {"kind": "number", "low": 0.0, "high": 1.0},
        "drug": {"kind": "category", "levels": ["none", "a", "b"]}, "ward": {"kind": "integer", "low": 0, "high": 3},
    }  # fmt: skip
    rng, sites = np.random.default_rng(1), []
    for n, held in ((40, {"a": 3, "b": 5}), (50, {"b": 7}), (60, {})):
        drug = np.array(["none"] * n, dtype=object)
        for level, row in held.items():
            drug[row] = level
        sites.append({"y": rng.normal(120, 20, n).round(1), "x": rng.uniform(0, 1, n).round(3), "drug": drug,
                      "ward": np.where(np.arange(n) < 4, 1, 2)})  # fmt: skip
    rows = ["y,x,drug,ward", *(",".join(map(str, row)) for row in zip(*sites[0].values(), strict=True))]
    (folder / "s.csv").write_text("\n".join(rows) + "\n")
    (folder / "s.toml").write_text(wording.dumps({"format": 1, "columns": columns}))

    def warned(*more: str) -> str:
        code, _, said = run(capsys, "check", "s.csv", "--dictionary", "s.toml", "--formula", *more)
        assert code == 0
        return said

    assert warned("y ~ x") == ""
    assert "here have another value of 'ward' than most (4)." in warned("y ~ x + ward")
    assert "'drug' = a (1), 'drug' = b (1). Where no" in warned("y ~ x + drug")
    assert "records here have a group of 'ward' (4)." in warned("y ~ x + (1 | ward)", "--shared", "ward")
    assert "a group of" not in warned("y ~ x + (1 | ward)")
    said = wording.dumps({"format": 1, "columns": {**columns, "ward": {**columns["ward"], "shared": True}}})
    (folder / "s.toml").write_text(said)  # of which all parties' dictionary says it
    assert "records here have a group of 'ward' (4)." in warned("y ~ x + (1 | ward)")

    model: Any = sf.glmm("y ~ x + drug", "gaussian", dictionary=columns, most={"rows": 1})
    server, engine, _ = build_parties(model, sites, sf.SFVI(iterations=3), sf.Masked(), compile=False)
    program: Any = server.program
    step, seen = program.step, list[Any]()
    program.step = lambda *a: (seen.append((a[1], {k: np.array(v) for k, v in a[2].items()})), step(*a))[1]
    engine.run(server.round())
    (message, sums), none = seen[0], torch.zeros(0).double()
    z = message.tensors["z_global"].double().requires_grad_(True)

    def gradient(y: float, x: float, level: str) -> np.ndarray:
        """What a record of these adds to the total; it is linear in y."""
        made = {"y": np.array([y]), "x": np.array([x]), "drug": np.array([level], dtype=object)}
        laid = {k: torch.as_tensor(v) for k, v in model.prepared({"t": made})["t"].items()}
        laid = {k: v.double() if v.is_floating_point() else v for k, v in laid.items()}
        value = program.problem.density.evaluate(z, none, torch.zeros(1, 0).double(), {}, laid).records.sum()
        return np.asarray(torch.autograd.grad(value, z)[0])

    for level, site, row in (("a", 0, 3), ("b", 0, 5), ("b", 1, 7)):
        y, x = sites[site]["y"][row], sites[site]["x"][row]
        moved = [np.abs(gradient(y, x, name) - gradient(y + 50, x, name)) for name in (level, "none")]
        at = int(np.argmax(np.where(moved[1] < 1e-12, moved[0], 0)))
        low, high = gradient(0.0, x, level)[at], gradient(1.0, x, level)[at]
        assert (abs((sums["direct"][at] - low) / (high - low) - y) < 1e-3) == (level == "a")


@pytest.mark.later
def test_a_check_by_a_formula_sees_a_table_joined_to_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the fit does, by the table's own names. Rows of a group as well. The control: once."""
    rows = [f"{20 + i}.5,{i / 7},{i % 4}" for i in range(12)]
    (folder / "twice.csv").write_text("\n".join(["age,y,site", *rows, *rows]))
    (folder / "once.csv").write_text("\n".join(["age,y,site", *rows]))
    number = 'kind = "number"\nlow = 0\nhigh = 100\ncentre = 50\nscale = 10'
    text = f"format = 1\n[columns.age]\n{number}\n[columns.y]\n{number}\n[columns.site]\nkind = 'id'\n"
    (folder / "t.toml").write_text(text)

    def checked(table: str, formula: str) -> tuple[int, str]:
        code, _, err = run(capsys, "check", table, "--dictionary", "t.toml", "--formula", formula)
        return code, err

    code, said = checked("twice.csv", "y ~ age")
    assert (code, "12 of 24 rows repeat another one in all of 'age', 'y':" in said) == (2, True)
    assert "a column record_id with unique = true in the dictionary" in said
    own = "\n".join(["age,y,site,record_id", *(f"{row},{k}" for k, row in enumerate([*rows, *rows]))])
    (folder / "own.csv").write_text(own)
    (folder / "t.toml").write_text(text + "[columns.record_id]\nkind = 'id'\n")
    assert checked("own.csv", "y ~ age")[0] == 2
    (folder / "t.toml").write_text(text + "[columns.record_id]\nkind = 'id'\nunique = true\n")
    assert checked("own.csv", "y ~ age")[0] == 0
    (folder / "own.csv").write_text(own.replace(",23", ",22"))
    assert "record_id; a 'record_id' that is" in checked("own.csv", "y ~ age")[1]
    (folder / "t.toml").write_text(text)
    assert checked("once.csv", "y ~ age")[0] == checked("once.csv", "y ~ age + (1 | site)")[0] == 0
    code, said = checked("twice.csv", "y ~ age + (1 | site)")
    assert (code, "rows repeat another one of the same group in all of" in said) == (2, True)


def test_a_check_names_columns_and_rows_and_no_cells(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "describe", "t.csv", "--output", "d.toml")
    review(folder / "d.toml")
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


def test_a_title_above_the_names_is_told_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "new.csv").write_text("Report of 2024\n\nage,x\n1,2\n")
    assert "a title above the columns' names has to go" in run(capsys, "describe", "new.csv")[2]
    (folder / "new.csv").write_text("age,x\n1,2\n3,4,5\n")  # the control: names in the first line
    said = run(capsys, "describe", "new.csv")[2]
    assert "line 3 has not as many cells" in said
    assert "a title above" not in said


@pytest.mark.parametrize(("last", "asked"), [("2020-01-10", True), ("2020-09-10", False)])
def test_days_that_are_a_small_part_of_their_years_are_asked_about(
    folder: Path, capsys: pytest.CaptureFixture[str], last: str, asked: bool
) -> None:
    (folder / "new.csv").write_text(f"seen\n2020-01-01\n2020-01-05\n{last}\n")
    out = run(capsys, "describe", "new.csv")[1]
    assert ("whose length makes the prior" in out) == asked
    assert "low = 2020-01-01\nhigh = 2020-12-31" in out


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
    twice = {"id": "again", "data": str(folder / "sub" / ".." / "two.csv")}
    (folder / "job.toml").write_text(wording.dumps({"model": {"program": "six-cities"}, "silo": [*silos, twice]}))
    (folder / "sub").mkdir()
    with pytest.raises(InputError, match="silos 'two' and 'again' have the same data"):
        federate(read(folder / "job.toml"))


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


#: What newcomers' first tables are like, and what they are told to do.
DOORS: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "Latin-1": ("y,n\n1,Müller\n".encode("latin-1"), ("not a CSV file in UTF-8", "iconv -f WINDOWS-1252 -t UTF-8")),
    "UTF-16": ("y,n\n1,Müller\n".encode("utf-16"), ("not a CSV file in UTF-8", "iconv -f UTF-16 -t UTF-8")),
    "names alone": (b"y,n\n", ("it has no rows",)),
    "decimal commas between commas": (b"y,n\n1,5,2\n", ("line 2 has not as many cells", "decimal comma, needs quotes")),
    "decimal commas": (b"y;n\n1,5;2\n2,5;3\n", ("columns do not fit: y", "replace(\"y\", ',', '.')")),
}  # fmt: skip


@pytest.mark.parametrize("case", list(DOORS))
def test_a_newcomers_table_is_answered_with_a_remedy(
    folder: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    content, said = DOORS[case]
    (folder / "new.csv").write_bytes(content)
    (folder / "d.toml").write_text('format = 1\n[columns.y]\nkind = "number"\n')
    code, _, err = run(capsys, "check", "new.csv", "--dictionary", "d.toml")
    assert (code, err.count("\n")) == (2, 1)
    assert all(words in err for words in ("new.csv", *said))
    if case != "decimal commas":
        assert run(capsys, "describe", "new.csv")[0] == 2


@pytest.mark.later
def test_the_remedies_are_cures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Control: without them the same tables are refused, as the test before this one says."""
    (folder / "d.toml").write_text('format = 1\n[columns.y]\nkind = "number"\nlow = 1\nhigh = 3\n')
    (folder / "commas.csv").write_text('"y";"a,b,c,d"\n1,5;2\n2,5;3\n')  # marks in quotes are no marks
    query = """SELECT * REPLACE (replace("y", ',', '.') AS "y") FROM data"""
    drafted = run(capsys, "describe", "commas.csv")[1]
    assert query.replace('"', '\\"') in drafted
    assert wording.loads(drafted)["columns"]["y"]["kind"] == "id"
    assert run(capsys, "check", "commas.csv", "--dictionary", "d.toml", "--query", query)[0] == 0
    rows = [f'"{1 + i},{100 + i},{200 + i}",{["a", "-9", "b"][i % 3]},2024-03-{1 + i % 28:02d}T10:{i:02d}:00+02:00'
            for i in range(40)]  # fmt: skip
    (folder / "thousands.csv").write_text("\n".join(["y,code,at", *rows]))
    drafted = wording.loads(run(capsys, "describe", "thousands.csv")[1])["columns"]
    assert drafted["code"]["review"].startswith("-9 among words: codes of a missing value?")
    parts = "replace(\"y\", ',', '') AS \"y\""
    assert parts in drafted["y"]["review"]
    day = drafted["at"]["review"]
    query = day[day.index("SELECT") :].replace("REPLACE (", f"REPLACE ({parts}, ")
    whole = '[columns.y]\nkind = "integer"\nlow = 1100200\nhigh = 40139239\n[columns.at]\nkind = "date"\n'
    (folder / "e.toml").write_text(f"format = 1\n{whole}")
    assert "a comma in a number in 40 rows" in run(capsys, "check", "thousands.csv", "--dictionary", "e.toml")[1]
    assert run(capsys, "check", "thousands.csv", "--dictionary", "e.toml", "--query", query)[0] == 0
    (folder / "named.csv").write_text("y,who\n1,K-1\n2,K-2\n")
    for kind, code in (("integer", 2), ("id", 0)):
        (folder / "f.toml").write_text(f'format = 1\n[columns.who]\nkind = "{kind}"\n')
        found, _, err = run(capsys, "check", "named.csv", "--dictionary", "f.toml")
        assert (found, 'kind = "id"' in err) == (code, bool(code))
    (folder / "latin.csv").write_text("y,n\n1,Müller\n", encoding="utf-8")
    assert run(capsys, "check", "latin.csv", "--dictionary", "d.toml")[0] == 0


def test_a_file_that_is_not_there_is_answered_with_the_nearest(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "visits_2024.csv").write_text(TABLE)
    assert "did you mean 'visits_2024.csv'?" in run(capsys, "describe", "visit_2024.csv")[2]
    assert "did you mean" not in run(capsys, "describe", "else.parquet")[2]
    assert "there is no folder 'tables'" in run(capsys, "describe", "tables/t.csv")[2]
