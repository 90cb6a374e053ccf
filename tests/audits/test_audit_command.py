"""`secure-fvi audit`: from a configuration to audit.json and audit.html, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from secure_fvi.aggregation import Masked
from secure_fvi.aggregation.homomorphic import Homomorphic
from secure_fvi.audits.matrix import ATTACKS, own_protections
from secure_fvi.audits.worlds import Protection
from secure_fvi.cli import main
from secure_fvi.privacy.settings import SiloDP

CONFIG = """
seed = 1
[model]
program = "six-cities"
[partition]
sizes = [179, 179, 179]
[algorithm]
name = "sfvi"
[aggregation]
kind = "masked"
"""
KEYS = {"attack", "protection", "score", "value", "low", "high", "positive_control", "negative_control", "valid"}


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["audit", *arguments])
    return int(stopped.value.code or 0)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return path


def test_what_is_attacked_is_the_jobs_own_sum_and_its_own_privacy() -> None:
    """And not sums of its kind as they are by default, whose rows said "nothing found" of another mechanism."""
    own = Homomorphic(scheme="ckks", masks=False), SiloDP(epsilon=20.0, delta=1e-3, clipping_norm=5.0, noise="silo")
    bare, private = own_protections(*own, (), 1e-5)
    assert bare == Protection("homomorphic, scheme = ckks, masks = False", own[0])
    assert private == Protection("own silo DP 20", *own)
    usual = own_protections(Masked(), None, (2.0,), 1e-5)  # the control
    assert [p.name for p in usual] == ["masked", "DP 2"]


@pytest.mark.slow
def test_the_files_of_an_audit(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "audit"
    assert run(str(config), "--attack", "game", "--trials", "60", "--epsilon", "1", "--export", "--out", str(out)) == 0
    content = json.loads((out / "audit.json").read_text())
    rows = content["rows"]
    assert all(row.keys() >= KEYS for row in rows)
    assert {row["protection"] for row in rows} == {"masked", "DP 1"}
    assert all(row["low"] <= row["value"] <= row["high"] for row in rows)
    assert all(row["valid"] for row in rows)
    private = [row for row in rows if row["protection"] == "DP 1"]
    assert all(row["low"] < row["detail"]["bound"] for row in private)
    page = (out / "audit.html").read_text()
    assert "http" not in page.replace("http://www.w3.org", "")
    assert all(row["attack"] in page for row in rows)
    assert "under epsilon 2." in page  # of a record that is replaced, two
    assert len(list((out / "leakpro").iterdir())) == len(list((out / "privacy_meter").iterdir())) == len(rows)
    assert "which of two values" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("example", "set_", "unit", "message"),
    [
        ("vertical_logistic", "seed=1", "silo", "canaries are of --unit record"),
        ("six_cities", "algorithm.name=sfvi-avg", "record", "'epsilon' does not fit: sfvi-avg takes no record privacy"),
        ("six_cities", "algorithm.name=sfvi-avg", "silo", "'epsilon' does not fit: under silo privacy sfvi-avg needs"),
    ],
)
def test_canaries_of_a_unit_that_no_run_protects_are_refused(
    example: str, set_: str, unit: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(__file__).parents[2] / "examples" / f"{example}.toml"
    out = tmp_path / "audit"
    assert run(str(path), "--attack", "epsilon", "--unit", unit, "--set", set_, "--out", str(out)) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_bad_input(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "audit")
    for arguments, message in (
        ([], "no attack is named"),
        (["--attack", "magic"], "attack 'magic' is unknown; choose latents"),
        (["--attack", "game", "--trials", "3"], "'--trials': 3 is not in the range x>=20"),
        (
            ["--attack", "gradients"],
            "attack 'gradients' does not fit: it is for models whose parameters are all global",
        ),
        (["--attack", "attributes", "--attribute", "smoke:a"], "write NAME, NAME:COLUMN"),
        (["--attack", "attributes", "--attribute", "wheeze"], "no yes or no of each record"),
        (["--attack", "attributes", "--attribute", "tall"], "no argument 'tall'; choose"),
        (["--attack", "properties", "--argument", "tall"], "no argument 'tall'; choose"),
    ):
        assert run(str(config), *arguments, "--out", out) == 2
        assert message in capsys.readouterr().err
    config.write_text(CONFIG.replace("[179, 179, 179]", "[300, 237]"))
    assert run(str(config), "--attack", "game", "--out", out) == 2
    assert "need at least 3" in capsys.readouterr().err
    assert not Path(out).exists()


def test_without_a_folder_for_the_report(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(config), "--attack", "game") == 2
    assert "--out is missing" in capsys.readouterr().err


def test_the_list_tells_what_fits(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(config), "--list") == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines.keys() == ATTACKS.keys()
    assert "all global latents" in lines["membership"]
    assert "[" not in lines["game"]


VERTICAL = """
seed = 1
[model]
program = "vertical-logistic"
[data]
silos = 3
records = 200
columns = 6
[algorithm]
name = "vertical"
response = "private"
learning_rate = 0.05
[aggregation]
kind = "masked"
"""


@pytest.mark.slow
def test_a_vertical_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "vertical.toml"
    path.write_text(VERTICAL)
    out = tmp_path / "audit"
    chosen = [word for name in ("labels", "columns", "membership") for word in ("--attack", name)]
    assert run(str(path), *chosen, "--epsilon", "1", "--out", str(out)) == 0
    rows = {(r["attack"], r["protection"]): r for r in json.loads((out / "audit.json").read_text())["rows"]}
    assert {protection for _, protection in rows} == {"masked", "DP 1", "private matching"}
    everything = rows["membership, totals: all of a person", "DP 1"]["detail"]
    assert everything["institutions"] == 4
    assert 0.9 < everything["tpr_bound_at_fpr_0.1"] < 1
    assert "at most 0.27 under epsilon 1" in (out / "audit.html").read_text()
    assert rows["labels, sign", "masked"]["value"] >= 0.99
    private = rows["labels, sign", "DP 1"]
    assert private["value"] < private["detail"]["bound"]
    assert "columns from totals" in capsys.readouterr().out
    path.write_text(VERTICAL.replace('response = "private"\n', ""))
    assert run(str(path), "--attack", "labels", "--out", str(out)) == 2
    assert "every silo is given the labels" in capsys.readouterr().err


def test_files_of_an_institution_need_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[2] / "examples" / "own_model" / "own_model.toml"
    assert run(str(path), "--attack", "game", "--out", str(tmp_path / "audit")) == 2
    assert "--real-data" in capsys.readouterr().err
