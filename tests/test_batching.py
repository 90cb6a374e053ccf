"""Silos that compute together: the same numbers as one after the other, whatever can and cannot be mapped."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from programs import clinics, rate
from torch import Tensor

import secure_fvi as sf
from secure_fvi.compiled import Traced
from secure_fvi.engines.local import Mapped, run_together
from secure_fvi.errors import ProtocolError
from secure_fvi.fitting import build_parties

CLINICS = sf.FederatedModel(clinics, "person", ("u",))
#: Three silos of one size, two of another, one alone.
SIZES = (6, 6, 6, 4, 4, 9)


def _silos(sizes: tuple[int, ...] = SIZES) -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(5)
    return [{"y": torch.rand(n, generator=rng, dtype=torch.float64) + 0.5} for n in sizes]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    return [t for part in value for t in _tensors(part)] if isinstance(value, list | tuple) else []


def _ends(algorithm: Any, batched: bool, rounds: int, model: sf.FederatedModel = CLINICS) -> list[Tensor]:
    """The server's numbers and all silos' own after some rounds."""
    server, engine, _ = build_parties(model, _silos(), algorithm, sf.Masked(), compile=False, batch_silos=batched)
    for _ in range(rounds):
        engine.run(server.round())
    return _tensors([server.state.algorithm, [engine.silos[name].local for name in sorted(engine.silos)]])


@pytest.fixture
def mapped_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many silos each mapped call stood for."""
    seen: list[int] = []
    inner = Mapped._mapped

    def counted(self: Mapped, calls: list[tuple[Any, ...]]) -> list[Any]:
        seen.append(len(calls))
        return inner(self, calls)

    monkeypatch.setattr(Mapped, "_mapped", counted)
    return seen


@pytest.mark.parametrize(
    ("algorithm", "rounds"),
    [
        (sf.SFVI(iterations=20), 20),
        pytest.param(sf.SFVI(iterations=20, importance_samples=2), 5, marks=pytest.mark.slow),
        pytest.param(sf.SFVIAvg(rounds=2, local_steps=5), 2, marks=pytest.mark.slow),
        pytest.param(sf.PVI(rounds=2, local_steps=5), 2, marks=pytest.mark.slow),
    ],
    ids=lambda v: getattr(v, "name", None),
)
@pytest.mark.later("sfvi-20")
def test_the_same_numbers_to_rounding(algorithm: Any, rounds: int, mapped_calls: list[int]) -> None:
    """Silos of three sizes under masked sums, state of every party; and two of the sizes did run mapped."""
    alone = _ends(algorithm, False, rounds)
    assert mapped_calls == []
    together = _ends(algorithm, True, rounds)
    assert len(alone) == len(together)
    for a, b in zip(alone, together, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-11)
    # A silo's own fits in PVI end when they are done: two silos may have no step left at the same time.
    assert set(mapped_calls) in ([{2, 3}, {3}] if algorithm.name == "pvi" else [{2, 3}])


@pytest.mark.slow
def test_one_seed_of_minibatches(mapped_calls: list[int]) -> None:
    """Batches of a round differ in size over silos: who has the same runs together, the others alone."""
    algorithm = sf.SFVI(iterations=5, sampling_rate=0.5)
    for a, b in zip(_ends(algorithm, False, 5), _ends(algorithm, True, 5), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-11)
    assert mapped_calls


def branching(y: Tensor) -> None:
    """What is done depends on the data's values, which a mapped function cannot see."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with pyro.plate("person", len(y)):
        pyro.sample("y", dist.Normal(mu, 1.0 if float(y.sum()) > 0 else 2.0), obs=y)


def test_what_cannot_be_mapped_runs_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    model = sf.FederatedModel(branching, "person")
    alone = _ends(sf.SFVI(iterations=3), False, 3, model)
    with caplog.at_level(logging.WARNING):
        together = _ends(sf.SFVI(iterations=3), True, 3, model)
    assert "cannot be mapped over silos; they run one by one" in caplog.text
    for a, b in zip(alone, together, strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")
def test_fit_says_the_same() -> None:
    model, silos = sf.FederatedModel(rate, "person"), _silos()
    found = [
        sf.fit(model, silos, sf.SFVI(iterations=3), compile=False, batch_silos=batched) for batched in (False, True)
    ]
    for a, b in zip(*(r.posterior["rate"] for r in found), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def _double(x: Tensor) -> Tensor:
    return 2 * x


class TestScheduler:
    """`run_together` itself."""

    def test_calls_of_one_kind_meet_whatever_the_order(self, mapped_calls: list[int]) -> None:
        """One silo calls twice, one three times with a change of shape in between, one never."""
        fn = Traced(_double, (None,), "eager")

        def work(*sizes: int) -> Callable[[], list[float]]:
            return lambda: [float(fn(torch.full((size,), float(size))).sum()) for size in sizes]

        found = run_together({"a": work(2, 3), "b": work(2, 4, 3), "c": work(), "d": work(2, 3)})
        assert found == {"a": [8.0, 18.0], "b": [8.0, 32.0, 18.0], "c": [], "d": [8.0, 18.0]}
        assert mapped_calls == [3, 2]  # b's 4 and last 3 come alone

    def test_a_failure_ends_all(self) -> None:
        fn = Traced(_double, (None,), "eager")
        after: list[str] = []

        def bad() -> None:
            fn(torch.ones(2))
            raise ProtocolError("silo 'b' refuses")

        def good() -> None:
            fn(torch.ones(2))
            fn(torch.ones(2))
            after.append("done")

        with pytest.raises(ProtocolError, match="silo 'b' refuses"):
            run_together({"a": good, "b": bad})
        assert after == []
        assert float(fn(torch.ones(1))) == 2.0  # outside, calls are made at once again
