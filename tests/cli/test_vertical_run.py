"""`secure-fvi run` where silos hold different columns of the same people."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import CommandLine

from secure_fvi.errors import InputError
from secure_fvi.runs.federation import VerticalFederation, federate
from secure_fvi.runs.reading import read

N = 40


def _people() -> tuple[list[str], torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(5)
    x = torch.randn(N, 3, generator=rng)
    y = torch.bernoulli(torch.sigmoid(2 * x[:, 0] - 2 * x[:, 2]), generator=rng)
    return [f"P-{1000 + i}" for i in range(N)], x, y


def _write(path: Path, header: list[str], rows: list[list[Any]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def _federation(folder: Path) -> Path:
    """Two silos and an outcome, in different orders; one person is missing at each, and one id stands twice."""
    ids, x, y = _people()
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1)).tolist()
    bank = [[ids[i], float(x[i, 0]), float(x[i, 1])] for i in range(N) if i != 3]
    clinic = [[ids[i].lower().replace("-", " "), float(x[i, 2])] for i in order if i != 4]
    _write(folder / "bank.csv", ["person", "income", "debt"], [*bank, [ids[7], 0.0, 0.0]])
    _write(folder / "clinic.csv", ["person", "dose"], clinic)
    _write(folder / "outcome.csv", ["person", "died"], [[ids[i], int(y[i])] for i in reversed(range(N))])
    (folder / "clinic.py").write_text(
        "import pyro\nfrom pyro.distributions import Normal\n\n\n"
        "def effect(dose):\n    return dose * pyro.sample('slope', Normal(0.0, 2.0))\n"
    )
    config = folder / "run.toml"
    config.write_text(
        """
[model]
likelihood = "bernoulli"

[model.options]
intercept_scale = 2.0

[[silo]]
id = "bank"
data = "bank.csv"

[[silo]]
id = "clinic"
data = "clinic.csv"
predictor = "clinic.py:effect"

[response]
data = "outcome.csv"
column = "died"

[alignment]
column = "person"
drop = "- "

[algorithm]
name = "vertical"
response = "private"
rho = 0.2
rounds = 400
learning_rate = 0.05

[algorithm.auxiliary]
kind = "amortised"
hidden = [4]

[aggregation]
kind = "masked"
min_cohort = 2
"""
    )
    return config


@pytest.mark.later
@pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")
def test_files_joined_by_id(cli: CommandLine, tmp_path: Path) -> None:
    """Rows stand in three orders and ids are written differently: the effects come out with their signs only if the
    right rows meet. 37 people are left: two are missing somewhere, and one stands twice."""
    config = _federation(tmp_path)
    assert cli("run", config, "--out", tmp_path / "out", "--quiet").code == 0
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert set(result["posterior"]) == {"intercept"}
    assert result["metrics"]["alignment"] == {
        "bank": {"matched": 37, "unmatched": 1, "missing": 0, "invalid": 0, "duplicated": 2},
        "clinic": {"matched": 37, "unmatched": 2, "missing": 0, "invalid": 0, "duplicated": 0},
        "response": {"matched": 37, "unmatched": 3, "missing": 0, "invalid": 0, "duplicated": 0},
    }
    own = {}
    for path in (tmp_path / "out/silos").glob("*.json"):
        content = json.loads(path.read_text())
        own[content["silo"]] = content["posterior"]
    assert set(own["bank"]) == {"beta"}
    assert own["bank"]["beta"]["mean"][0] > 0.5
    assert own["clinic"]["slope"]["mean"] < -0.5
    assert "income" not in (tmp_path / "out/report.html").read_text().split("<pre", 1)[0]
    assert "finished" in cli("run", config, "--out", tmp_path / "out", "--resume").out


@pytest.mark.slow
def test_several_columns_join_rows_and_the_order_repeats(tmp_path: Path) -> None:
    """Names and dates in two ways of writing; no cell of them is taken for a number."""
    config = _federation(tmp_path)
    _write(tmp_path / "bank.csv", ["name", "born", "income"], [["Ann", "2001-02-03", 1], ["Bob", "2001-02-04", 2]])
    _write(tmp_path / "clinic.csv", ["name", "born", "dose"], [["BOB", "4.2.2001", 4], ["ann", "3.2.2001", 3]])
    _write(tmp_path / "outcome.csv", ["name", "born", "died"], [["ann", "20010203", 1], ["bob", "20010204", 0]])
    joined = ['alignment.column=["name", "born"]', 'alignment.rules=["name", "date-dmy"]']
    found, again, other = (federate(read(config, [*joined, f"seed={seed}"]), None) for seed in (1, 1, 2))
    assert isinstance(found, VerticalFederation)
    income, dose = found.data.silos["bank"]["x"].flatten().tolist(), found.data.silos["clinic"]["dose"].tolist()
    assert (income, dose, found.data.response.tolist()) in (([1, 2], [3, 4], [1, 0]), ([2, 1], [4, 3], [0, 1]))
    assert found.digest() == again.digest()
    assert found.provenance()["alignment"] == again.provenance()["alignment"] != other.provenance()["alignment"]
    # Who knows all but one of the people would try the last: under privacy the digest is not shown.
    private = [f"privacy.{said}" for said in ('unit="record"', "epsilon=4.0", "delta=1e-3", "clipping_norm=1.0")]
    assert "alignment" not in federate(read(config, [*joined, "seed=1", *private]), None).provenance()


def test_files_that_are_sorted_are_taken_as_they_are(tmp_path: Path) -> None:
    """One process checks them as sites do; the control is a row that stands elsewhere, and one of somebody else."""
    config, ids = _federation(tmp_path), ["P-1", "P-2", "P-3"]
    for name, column in (("bank", "income"), ("clinic", "dose"), ("outcome", "died")):
        _write(tmp_path / f"{name}.csv", ["person", column], [[i, at % 2] for at, i in enumerate(ids)])
    found = federate(read(config, ['alignment.how="sorted"']), None)
    assert isinstance(found, VerticalFederation)
    assert found.data.silos["clinic"]["dose"].tolist() == found.data.response.tolist() == [0, 1, 0]
    for others, words in (
        (["P-1", "P-3", "P-2"], "alignment: the file of 'clinic': rows are not sorted"),
        (["P-1", "P-2", "P-4"], "alignment: the files of 'bank' and 'clinic' are not of the same people in one order"),
    ):
        _write(tmp_path / "clinic.csv", ["person", "dose"], [[i, 0] for i in others])
        with pytest.raises(InputError, match=words):
            federate(read(config, ['alignment.how="sorted"']), None)


@pytest.mark.later
def test_a_silo_has_the_response_in_its_own_file(tmp_path: Path) -> None:
    """It is no predictor there. The control: of the same file, without that, it is."""
    config, at_silo = _federation(tmp_path), ["algorithm.response=silos", "algorithm.auxiliary={kind='integrated'}"]
    for name, column in (("bank", ["income", "died"]), ("clinic", ["dose"])):
        _write(tmp_path / f"{name}.csv", ["person", *column], [[f"P-{i}", *[i % 2] * len(column)] for i in range(3)])
    config.write_text(config.read_text().replace('data = "outcome.csv"', 'silo = "bank"'))
    found = federate(read(config, at_silo), None)
    assert isinstance(found, VerticalFederation)
    assert found.data.silos["bank"]["x"].flatten().tolist() == found.data.response.tolist()
    _write(tmp_path / "outcome.csv", ["person", "died"], [[f"P-{i}", i % 2] for i in range(3)])
    config.write_text(config.read_text().replace('silo = "bank"', 'data = "outcome.csv"'))
    control = federate(read(config, []), None)
    assert isinstance(control, VerticalFederation)
    assert control.data.silos["bank"]["x"].shape == (3, 2)
    config.write_text(config.read_text().replace('data = "outcome.csv"', 'silo = "bank"'))
    for settings, words in (
        (
            ["response.silo=school", *at_silo],
            r"response.silo = 'school': no \[\[silo\]\] has this id",
        ),
        ([], "algorithm.response = 'private': the response lies at a silo; set 'silos'"),
    ):
        with pytest.raises(InputError, match=words):
            read(config, settings)
    _write(tmp_path / "bank.csv", ["person", "died"], [[f"P-{i}", i % 2] for i in range(3)])
    with pytest.raises(InputError, match="'bank' has no column but the response"):
        federate(read(config, at_silo), None)


@pytest.mark.later
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("response.column=dead", "response.column = 'dead'"),
        ("alignment.column=id", "the table has no column 'id'"),
        ('alignment.column=["person", "debt"]', "the table has no column 'debt'"),
        ('alignment.rules=["nhs"]', "alignment: rule 'nhs' is unknown"),
        ('alignment.rules=["text", "date"]', "of 1 columns, and 2 rules"),
        ("model.likelihood=binomial", "model.likelihood = 'binomial'"),
        ("algorithm.model=power", "needs the response at every silo"),
        (
            "algorithm.response=silos",
            "the response has a file of the server's (response.data); set 'shared'",
        ),
        ("response.silo=bank", "names the file with the outcome (data), or the silo whose file has it (silo)"),
        ("algorithm.name=sfvi", "is for vertical runs"),
        ("algorithm.auxiliary.kind=full", "algorithm.auxiliary.kind = 'full'"),
        ("partition.count=2", "[partition]"),
        ("model.options.scale=2", "model.options.scale"),
    ],
)
def test_bad_settings_end_in_one_line(cli: CommandLine, tmp_path: Path, setting: str, words: str) -> None:
    cli.config = _federation(tmp_path)
    cli.refused(words, more=("--set", setting))


def test_a_vertical_program_needs_a_vertical_algorithm(cli: CommandLine) -> None:
    cli.config.write_text('[model]\nprogram = "vertical-logistic"\n[partition]\ncount = 2\n')
    cli.refused("algorithm.name = 'vertical'")
