"""The experiment on MNIST shards: its splits, what counts as diverged, its table and plot; the quick run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quick_run import quick_run

from secure_fvi.models.base import Dataset
from secure_fvi_lab.experiments.pvi_mnist_shards import alike, diverged, plot, shards, table


def _row(**changed: Any) -> dict[str, Any]:
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
    assert not diverged(_row())
    assert diverged(_row(**changed))


def test_a_silo_has_two_shards_and_alike_ones_have_all_digits() -> None:
    rng = torch.Generator().manual_seed(0)
    y = torch.randint(10, (2000,), generator=rng)
    train = Dataset({"x": torch.zeros(2000, 4), "y": y}, torch.arange(2000))
    split = shards(train, 50, 0)
    assert {len(silo["y"]) for silo in split} == {40}
    assert sum(len(silo["y"].unique()) for silo in split) / 50 < 2.5  # a shard may lie across two digits
    assert all(len(silo["y"].unique()) == 10 for silo in alike(train, 5, 0))


def test_table_and_plot() -> None:
    rows = [_row(), _row(asked_damping=0.3, improper=[False, True, True]), _row(split="pooled", asked_damping=1.0)]
    ours = {"mean": 0.2, "sd": 0.0, "seeds": 1, "diverged": 0}
    text = table({"rows": rows, "ours": ours, "setting": "as said"})
    assert all(len(line) <= 120 for line in text.splitlines())
    assert "0 diverged" in text
    assert plot(rows)[:4] == b"\x89PNG"


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
