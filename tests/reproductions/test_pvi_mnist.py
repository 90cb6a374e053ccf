"""pvi-mnist: its table and plot; the quick run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from quick_run import quick_run

from secure_fvi.cli import main
from secure_fvi_lab.experiments.pvi_mnist import AIMS, FULL, _line, curves, pvi, table


def _row(seed: int, test: float) -> dict[str, Any]:
    curve = [{"round": r, "test": test - 0.1 / r, "log_likelihood": -0.1} for r in (1, 2)]
    return {
        "setting": "10 silos, alike", "split": "alike", "silos": 10, "seed": seed, "test": test, "rounds": 180,
        "log_likelihood": -0.05, "bytes_up": 1_500_000, "bytes_down": 500_000, "seconds": 60.0, "curve": curve,
    }  # fmt: skip


def test_the_table_and_the_plot() -> None:
    rows = [_row(0, 0.98), _row(1, 0.99)]
    line = _line(FULL[0], rows)
    assert line["error"]["mean"] == pytest.approx(0.015)
    assert line["communications"] == 10 * FULL[0].rounds
    assert line["aim_met_at"] is None  # at the looks: 0.88 and 0.93, 0.89 and 0.94
    text = table({"lines": [line], "setting": "as said"})
    assert "0.0150" in text.splitlines()[1]
    assert all(len(each) <= 140 for each in text.splitlines())
    assert curves(rows, AIMS)[:4] == b"\x89PNG"


def test_the_aim_is_met_once_all_seeds_have_met_it() -> None:
    rows = [_row(0, 1.04), _row(1, 1.09)]  # errors at the looks: 0.06 and 0.01, 0.01 and under
    assert _line(FULL[0], rows)["aim_met_at"] == 20
    assert _line(FULL[0], rows[1:])["aim_met_at"] == 10


def test_a_batch_is_that_many_images() -> None:
    assert pvi(FULL[0], 6000).sampling_rate == pytest.approx(FULL[0].batch / 6000)
    assert pvi(FULL[0], 10).sampling_rate == 1.0


def test_it_is_refused_without_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", "pvi-mnist", "--out", str(tmp_path / "out"), "--data", str(tmp_path)])
    assert stop.value.code == 2
    assert "no folder 'mnist'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_quick_run_learns(tmp_path: Path) -> None:
    """A sixth of the images; an error of .9 is guessing."""
    content = quick_run("pvi-mnist", "mnist", tmp_path)
    found = {line["setting"]: line["error"]["mean"] for line in content["lines"]}
    assert found["10 silos, alike"] < 0.15
    assert found["20 silos, two digits"] < 0.5
