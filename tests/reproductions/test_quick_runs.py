"""Quick runs of the experiments that have no tests of their own here: they end, and say what every one is to say."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path

import pytest
from quick_run import quick_run

from secure_fvi_lab.experiments import REPRODUCTIONS


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
    table = import_module(REPRODUCTIONS[name]).table(content)
    assert str(table).count("\n") >= 2
