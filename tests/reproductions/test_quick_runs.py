"""Quick runs of the experiments that have no tests of their own here: they end, and say what every one is to say."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from quick_run import quick_run

from secure_fvi.cli import main
from secure_fvi_lab.experiments import experiment


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("floors", "mnist"),
        ("sfvi-six-cities", ""),
        ("sfvi-warm-start", ""),
        ("pvi-six-cities", ""),
        ("vertical-logistic", ""),
        ("vertical-adult", "uci_adult"),
    ],
)
def test_the_quick_run(tmp_path: Path, name: str, needs: str) -> None:
    content = quick_run(name, needs, tmp_path)
    assert {"mean", "sd", "seeds", "what"} <= content["ours"].keys()
    assert math.isfinite(content["ours"]["mean"])
    table = experiment(name).table(content)
    assert table.count("\n") >= 2


@pytest.mark.parametrize(
    ("name", "folder"),
    [(name, "mnist") for name in ("multinomial-mnist", "hbnn-mnist", "pvi-mnist")]
    + [("prodlda-20news", "20newsgroups"), ("pvi-uci", "")],
)
def test_it_says_where_the_data_would_have_to_be(
    name: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SECURE_FVI_DATA", raising=False)
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", name, "--out", str(tmp_path / "out"), *(["--data", str(tmp_path)] if folder else [])])
    assert stop.value.code == 2
    said = f"no folder '{folder}'" if folder else "give --data DIR or set SECURE_FVI_DATA"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
