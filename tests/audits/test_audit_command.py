"""`secure-fvi audit`: from a configuration to audit.json and audit.html, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from secure_fvi.cli import main

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


@pytest.mark.slow
def test_the_files_of_an_audit(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "audit"
    assert run(str(config), "--attack", "game", "--trials", "60", "--epsilon", "1", "--out", str(out)) == 0
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
    assert "which of two values" in capsys.readouterr().out


def test_bad_input(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "audit")
    for arguments, message in (
        ([], "no attack is named"),
        (["--attack", "magic"], "attack 'magic' is unknown; choose latents"),
        (["--attack", "game", "--trials", "3"], "--trials of at least 20"),
    ):
        assert run(str(config), *arguments, "--out", out) == 2
        assert message in capsys.readouterr().err
    config.write_text(CONFIG.replace("[179, 179, 179]", "[300, 237]"))
    assert run(str(config), "--attack", "game", "--out", out) == 2
    assert "need at least 3" in capsys.readouterr().err
    assert not Path(out).exists()


def test_files_of_an_institution_need_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[2] / "examples" / "own_model" / "own_model.toml"
    assert run(str(path), "--attack", "game", "--out", str(tmp_path / "audit")) == 2
    assert "--real-data" in capsys.readouterr().err
