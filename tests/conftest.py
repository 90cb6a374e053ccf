"""Shared settings of the tests."""

from __future__ import annotations

import functools
import gc
import hashlib
import logging
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from secure_fvi import building, data_contract
from secure_fvi.program_contract import SOME, Point, spread_out
from secure_fvi.program_density import ProgramDensity

torch.set_default_dtype(torch.float64)
# Small kernels on few cores: more threads only wait for each other.
torch.set_num_threads(1)
# pytest listens to loggers that hand nothing on; PyTorch then writes down every tensor of a trace, with the stack.
logging.getLogger("torch.__trace").propagate = True
# A collection of garbage goes through all that the imports have made, a fifth of a second each time: they make none.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`later("a", "b")`: these cases of a test are of the second tier, beside cheaper ones of the same claim; `later`
    alone: a test of seconds on which no claim rests."""
    unknown = set[tuple[str, str]]()
    for item in items:
        if (mark := item.get_closest_marker("later")) is not None:
            unknown |= {(item.nodeid.partition("[")[0], case) for case in mark.args}
    for item in items:
        mark, case = item.get_closest_marker("later"), getattr(item, "callspec", None)
        if mark is not None and not mark.args:
            item.add_marker(pytest.mark.slow)
        elif mark is not None and case is not None and case.id in mark.args:
            unknown.discard((item.nodeid.partition("[")[0], case.id))
            item.add_marker(pytest.mark.slow)
    if unknown and not any("::" in arg for arg in config.args):
        raise pytest.UsageError(f"no such cases of tests: {sorted(unknown)}")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 10, 10)


#: Where programs stand that keep their contract and that many tests share, each with the same data.
_SHARED = (
    "programs", "pvi_world", "fedvi_world", "test_every_algorithm", "test_conditional_sensitivity", "test_noise_aware",
    "test_noised_fit", "test_private_sfvi", "test_label_switching", "test_newton_steps", "test_weighing",
    "secure_fvi.models.six_cities", "secure_fvi.models.tabular", "secure_fvi_lab.bench.coverage",
)  # fmt: skip


def _once(check: Callable[..., Any], found: Callable[..., Any]) -> Callable[..., Any]:
    """`check` of a shared program once a process for the same start and data: it is most of what the parties of a short
    run cost. What it returns follows by `found`. What it refuses it is asked again."""
    passed = set[Any]()

    def told(values: Mapping[str, Any]) -> Any:
        return tuple(
            (name, value.shape, value.dtype, value.numpy().tobytes()) for name, value in sorted(values.items())
        )

    @functools.wraps(check)
    def checked(problem: Any, *args: Any) -> Any:
        fn, start = problem.model.fn, problem.start
        if getattr(fn, "__module__", "") not in _SHARED or "<" in fn.__qualname__ or problem.schema.constants:
            return check(problem, *args)
        if type(problem.density) is not ProgramDensity or problem.device.type != "cpu":
            return check(problem, *args)
        at = told({**start.theta, "/g": start.z_global, "/s": start.z_silo, "/r": start.z_record})
        what = (fn, problem.layout, problem.schema.fields, problem.dtype, type(problem.privacy), at)
        key = hashlib.sha256(repr((what, [told(a) if isinstance(a, Mapping) else a for a in args])).encode()).digest()
        if key in passed:
            return found(problem, *args)
        answer = check(problem, *args)
        passed.add(key)
        return answer

    return checked


def _looked_at(problem: Any, rows: Mapping[str, Any], size: int, silo: str) -> Any:
    few = spread_out(size, SOME)
    return Point(problem, len(few)), {name: value[few] for name, value in rows.items()}


building.check_program = _once(building.check_program, lambda *_: None)
data_contract.check_parts = _once(data_contract.check_parts, _looked_at)


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The final q is weighed and refined once, and its slope told, by an eighth of the draws, and of the points far
    from it a quarter of those along lines, and nobody looks for latents' other modes: where a test asks nothing of
    it."""
    monkeypatch.setattr("secure_fvi.algorithms.stationarity.HALF", 16)
    monkeypatch.setattr("secure_fvi.algorithms.weighing.HALF", 32)
    monkeypatch.setattr("secure_fvi.algorithms.weighing._SCOUTS", 64)
    monkeypatch.setattr("secure_fvi.algorithms.weighing._FAR", 10)
    monkeypatch.setattr("secure_fvi.algorithms.weighing._FIRST", 4)
    monkeypatch.setattr("secure_fvi.algorithms.weighing._IMAGES", 32)
    monkeypatch.setattr("secure_fvi.algorithms.weighing._looked", lambda *args: args[-1])
    monkeypatch.setattr("secure_fvi.algorithms.refining.DRAWS", 128)
    monkeypatch.setattr("secure_fvi.algorithms.refining.SUMS", 1)
    monkeypatch.setattr("secure_fvi.algorithms.refining.MORE", 1)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports have no pictures, which are most of what a short run costs."""
    from secure_fvi.runs import report

    names = [name for name in vars(report.plots) if not name.startswith("_")]
    monkeypatch.setattr(report, "plots", SimpleNamespace(**dict.fromkeys(names, lambda *_: None)))
    monkeypatch.setattr(report, "_picture", lambda figure, alt: report.Picture(report.Markup(""), alt))


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run as they are: in runs of a few steps a trace costs more than all calls, and gives the same numbers
    (`test_compiled.py`)."""
    monkeypatch.setattr("secure_fvi.compiled.TRACE_AFTER_CALLS", 10**9)
