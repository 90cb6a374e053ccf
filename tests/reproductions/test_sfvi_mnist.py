"""multinomial-mnist and hbnn-mnist: what they keep, table and plot; the quick runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from quick_run import is_picture, quick_run

import secure_fvi as sf
from secure_fvi.algorithms.base import Posterior, Problem
from secure_fvi.models.multinomial import multinomial_regression
from secure_fvi_lab.experiments import Request
from secure_fvi_lab.experiments.sfvi_mnist import Job, plot, run, summary, table

SILOS = [{"x": torch.eye(3), "y": torch.arange(3)}, {"x": -torch.eye(3), "y": torch.arange(3)}]


def _look(problem: Problem, posterior: Posterior, local: Mapping[str, object]) -> dict[str, Any]:
    return {"test": float(posterior.eta["loc"].sum()), "train": float(len(local))}


def _job(**options: Any) -> Job:
    algorithm = sf.SFVI(**{"iterations": 6, **options})
    what = {"setting": "2 x 3", "method": "SFVI", "seed": 0}
    return Job(what, multinomial_regression(classes=3), algorithm, SILOS, 0, looks=3)


@pytest.mark.slow
def test_a_fit_that_has_ended_is_not_made_again(tmp_path: Path) -> None:
    said: list[str] = []
    request = Request(False, None, said.append, tmp_path)
    first = run(_job(), _look, request)
    assert [point["round"] for point in first["curve"]] == [2, 4, 6]
    assert first["test"] == first["curve"][-1]["test"]
    assert first["bytes_up"] > 0
    told = len(said)
    again = run(_job(), _look, request)
    assert again == first
    assert len(said) == told
    other = run(
        _job(learning_rate=0.2), _look, Request(False, None, said.append, tmp_path)
    )  # another configuration is another fit
    assert other["test"] != first["test"]


@pytest.mark.slow
def test_a_fit_that_was_stopped_goes_on(tmp_path: Path) -> None:
    """Stopped by an error when it is looked at in round 4; checkpoints are taken after every round here."""
    whole = run(_job(), _look, Request(False, None, lambda text: None))

    def stops(problem: Problem, posterior: Posterior, local: Mapping[str, object]) -> dict[str, Any]:
        if len(said) == 2:
            raise KeyboardInterrupt
        return _look(problem, posterior, local)

    said: list[str] = []
    request = Request(False, None, said.append, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secure_fvi_lab.experiments.sfvi_mnist._CHECKPOINT", 0.0)
        with pytest.raises(KeyboardInterrupt):
            run(_job(), stops, request)
        resumed = run(_job(), _look, request)
    assert resumed["test"] == whole["test"]
    assert [point["round"] for point in resumed["curve"]] == [2, 6]  # a look that failed is not made up for


def _row(method: str, seed: int, test: float) -> dict[str, Any]:
    curve = [{"round": r, "test": test - 0.1 / r} for r in (1, 2)]
    return {
        "setting": "25 x 200", "method": method, "seed": seed, "test": test, "train": 0.9, "rounds": 50,
        "bytes_up": 1_500_000, "bytes_down": 500_000, "seconds": 60.0, "curve": curve,
    }  # fmt: skip


def test_the_table_and_the_plot_of_both() -> None:
    rows = [_row("SFVI", 0, 0.80), _row("SFVI", 1, 0.84), _row("PVI", 0, 0.70)]
    lines = summary(rows, ("setting", "method"))
    assert [line["test"]["seeds"] for line in lines] == [2, 1]
    assert lines[0]["test"]["mean"] == pytest.approx(0.82)
    content = {
        "lines": [{**line, "paper": paper} for line, paper in zip(lines, ({"test": 84.0}, {}), strict=True)],
        "rows": rows, "seconds": 180.0, "machine": "one", "setting": "as said",
    }  # fmt: skip
    first = table(content).splitlines()[1]
    assert "82.0 (2.8)" in first
    assert "84.0" in first
    assert "2.0" in first  # MB
    assert is_picture(plot(content))


@pytest.mark.slow
def test_the_quick_multinomial_regression(tmp_path: Path) -> None:
    """Guessing is 0.1."""
    content = quick_run("multinomial-mnist", "mnist", tmp_path)
    found = {line["method"]: line["test"]["mean"] for line in content["lines"]}
    assert found["SFVI"] > 0.85
    assert found["SFVI-Avg"] > 0.80
    assert found["PVI"] > 0.60
    assert found["independent"] < found["SFVI"]


@pytest.mark.slow
def test_the_quick_networks(tmp_path: Path) -> None:
    """Always the silo's own digit is 0.9."""
    content = quick_run("hbnn-mnist", "mnist", tmp_path)
    found = {line["method"]: line["test"]["mean"] for line in content["lines"]}
    assert found["mixed, SFVI"] > 0.92
    assert found["mixed at 0.3, SFVI-Avg, own steps"] > max(0.9, found["mixed at 0.3, SFVI-Avg"])
    assert content["rows"][0]["images"] == 1000
