"""pvi-mnist and pvi-mnist-shards: splits, what counts as diverged, tables and plots; the quick runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quick_run import is_picture, quick_run

from secure_fvi.models.base import Dataset
from secure_fvi_lab.experiments.pvi_mnist import (
    AIMS,
    FULL,
    _line,
    alike,
    curves,
    diverged,
    pvi,
    shards,
    shards_plot,
    shards_table,
    table,
)


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
    assert is_picture(curves(rows, AIMS))


def test_the_aim_is_met_once_all_seeds_have_met_it() -> None:
    rows = [_row(0, 1.04), _row(1, 1.09)]  # errors at the looks: 0.06 and 0.01, 0.01 and under
    assert _line(FULL[0], rows)["aim_met_at"] == 20
    assert _line(FULL[0], rows[1:])["aim_met_at"] == 10


def test_a_batch_is_that_many_images() -> None:
    assert pvi(FULL[0], 6000).sampling_rate == pytest.approx(FULL[0].batch / 6000)
    assert pvi(FULL[0], 10).sampling_rate == 1.0


@pytest.mark.slow
def test_the_quick_run_learns(tmp_path: Path) -> None:
    """A sixth of the images; an error of .9 is guessing."""
    content = quick_run("pvi-mnist", "mnist", tmp_path)
    found = {line["setting"]: line["error"]["mean"] for line in content["lines"]}
    assert found["10 silos, alike"] < 0.15
    assert found["20 silos, two digits"] < 0.5


# ---- pvi-mnist-shards ----


def _shards_row(**changed: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "split": "label shards", "silos": 100, "asked_damping": "auto", "seed": 0, "error": [0.6, 0.3, 0.2],
        "log_likelihood": [-2.1, -1.5, -0.9], "damping": [0.01, 0.02, 0.03], "halvings": [0, 0, 0],
        "skipped": [0, 0, 0], "improper": [False] * 3, "finite": [True] * 3, "last_change_sd": [9.0, 4.0, None],
    }  # fmt: skip
    return {**row, **changed}


@pytest.mark.parametrize(
    "changed",
    [
        {"improper": [False, True, False]},
        {"finite": [True, True, False]},
        {"error": [0.6, 0.2, 0.5]},
        {"log_likelihood": [-2.1, -1.5, -2.4]},
    ],
)
def test_each_sign_of_divergence_counts(changed: dict[str, Any]) -> None:
    assert not diverged(_shards_row())
    assert diverged(_shards_row(**changed))


def test_a_silo_has_two_shards_and_alike_ones_have_all_digits() -> None:
    rng = torch.Generator().manual_seed(0)
    y = torch.randint(10, (2000,), generator=rng)
    train = Dataset({"x": torch.zeros(2000, 4), "y": y}, torch.arange(2000))
    split = shards(train, 50, 0)
    assert {len(silo["y"]) for silo in split} == {40}
    assert sum(len(silo["y"].unique()) for silo in split) / 50 < 2.5  # a shard may lie across two digits
    assert all(len(silo["y"].unique()) == 10 for silo in alike(train, 5, 0))


def test_the_table_and_the_plot_of_shards() -> None:
    diverging = _shards_row(asked_damping=0.3, improper=[False, True, True])
    rows = [_shards_row(), diverging, _shards_row(split="pooled", asked_damping=1.0)]
    ours = {"mean": 0.2, "sd": 0.0, "seeds": 1, "diverged": 0}
    text = shards_table({"rows": rows, "ours": ours, "setting": "as said"})
    assert all(len(line) <= 120 for line in text.splitlines())
    assert "0 diverged" in text
    assert is_picture(shards_plot(rows))


@pytest.mark.slow
def test_the_quick_run_converges_and_its_control_does_not(tmp_path: Path) -> None:
    """30 silos: one to two minutes on 2 shared CPU cores. An error of .9 is guessing."""
    content = quick_run("pvi-mnist-shards", "mnist", tmp_path)
    by_damping = {row["asked_damping"]: row for row in content["rows"] if row["split"] == "label shards"}
    assert content["ours"]["diverged"] == 0
    assert content["ours"]["mean"] < 0.35
    assert max(by_damping["auto"]["damping"]) > 1.5 / 30
    assert diverged(by_damping[1.0])
    assert by_damping[1.0]["error"][-1] > content["ours"]["mean"]
