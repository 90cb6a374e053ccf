"""Shared settings of the tests."""

from __future__ import annotations

import gc

import pytest
import torch

torch.set_default_dtype(torch.float64)
# Small kernels on few cores: more threads only wait for each other.
torch.set_num_threads(1)
# A collection of garbage goes through all that the imports have made, a fifth of a second each time: they make none.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The final q is weighed and refined once, and its slope told, by an eighth of the draws, and of the points far
    from it a quarter of those along lines, of latents' other modes at two points and along fewer lines: where a test
    asks nothing of it."""
    monkeypatch.setattr("secure_fvi.algorithms.stationarity.HALF", 16)
    monkeypatch.setattr("secure_fvi.algorithms.weighing.HALF", 32)
    monkeypatch.setattr("secure_fvi.algorithms.weighing._SCOUTS", 64)
    monkeypatch.setattr("secure_fvi.algorithms.weighing._FAR", 10)
    monkeypatch.setattr("secure_fvi.algorithms.weighing._FIRST", 4)
    monkeypatch.setattr("secure_fvi.algorithms.weighing._IMAGES", 32)
    monkeypatch.setattr("secure_fvi.algorithms.weighing._SCANNED", (60, 20))
    monkeypatch.setattr("secure_fvi.algorithms.weighing._LOOKS", 2)
    monkeypatch.setattr("secure_fvi.algorithms.refining.DRAWS", 128)
    monkeypatch.setattr("secure_fvi.algorithms.refining.SUMS", 1)
    monkeypatch.setattr("secure_fvi.algorithms.refining.MORE", 1)


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run as they are: in runs of a few steps a trace costs more than all calls, and gives the same numbers
    (`test_compiled.py`)."""
    monkeypatch.setattr("secure_fvi.compiled.TRACE_AFTER_CALLS", 10**9)
