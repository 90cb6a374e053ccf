"""Vertical runs under record privacy: a person's numbers follow from that person's, to the last bit (`by_record`).

Attacks by programs that make a last bit loud, between two worlds in which one person's values differ. Each has a
control, the mechanism that was shipped once, in which the attack succeeds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from test_conditional_sensitivity import NOISE, columns_world, gaps
from test_isolation import Stabilised
from torch import Tensor

import secure_fvi as sf
from secure_fvi import compiled
from secure_fvi.algorithms.vertical import Bernoulli, MeanField, Vertical, steps
from secure_fvi.compiled import TRACE_AFTER_CALLS, Traced
from secure_fvi.errors import InputError
from secure_fvi.fitting import build_parties

ROUNDS = 4
WEIGHTS = torch.randn(16, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64)[:, :1]


def _rounding(x: Tensor) -> Tensor:
    """Nothing but the last bits of a product (N,), which depend on how many rows are multiplied together."""
    h, weights = torch.cat([x * (1 + 0.1 * k) for k in range(8)], -1).sin(), WEIGHTS.to(x)
    return ((h @ weights) - (h.unsqueeze(-1) * weights).sum(-2)).sum(-1)


def _fails_and_amplifies(x: Tensor) -> Tensor:
    """Where z > 0.3 a last bit counts 1e18 times; `cholesky` fails for the person whose values are large."""
    z = pyro.sample("z", dist.Normal(0.0, 2.0))
    bad = torch.where(x[:, 0] > 20, -1.0, 1.0)
    nothing = torch.linalg.cholesky(torch.diag_embed(torch.stack([torch.ones_like(bad), bad], -1))).sum((-1, -2)) * 0
    return z + nothing + torch.relu(z - 0.3) * 1e18 * _rounding(x)


def _one_by_one(rows: Any, step: Any, spare: int) -> Any:
    """`by_record.evaluated` as it was: where one fails, all others are evaluated in another shape."""
    with contextlib.suppress(Exception):
        return step(rows), rows, 0
    found, kept = [], []
    for row in rows[rows < spare]:
        with contextlib.suppress(Exception):
            found.append(compiled.flatten(step(np.array([row]))))
            kept.append(row)
    return [torch.cat(parts) for parts in zip(*found, strict=True)], np.array(kept), 0


def _failing_gaps() -> Any:
    found = gaps(lambda changed: columns_world(changed, _fails_and_amplifies, 7, ROUNDS, learning_rate=10.0), ROUNDS)
    assert len(found) == 2 * ROUNDS - 1
    return found


def test_a_person_on_whom_a_predictor_fails_moves_no_other() -> None:
    found = _failing_gaps()
    assert 0.3 < found.max() <= 1 + 1e-9


def _stabilised(x: Tensor) -> Tensor:
    z = pyro.sample("z", dist.Normal(0.0, 2.0))
    shifted: Tensor = Stabilised.apply(x[:, 0])  # type: ignore[no-untyped-call]
    return z * shifted


def test_a_predictor_with_rules_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of how it is mapped over people. The control, where nobody looks at that: one person moves all others' rows."""

    def build(changed: bool) -> Any:
        return columns_world(changed, _stabilised, 7, ROUNDS)

    with pytest.raises(InputError, match=r"evaluates each row alone.*Stabilised"):
        build(False)
    monkeypatch.setattr("secure_fvi.exported._PACKAGE", "")  # taken for the package's own
    assert gaps(build, ROUNDS).max() > 2


def _catches(x: Tensor) -> Tensor:
    """Mapped over people, a number cannot be read."""
    z = pyro.sample("z", dist.Normal(0.0, 2.0))
    try:
        float(x.sum())
        return z * x[:, 0]
    except RuntimeError:
        return z * Stabilised.apply(x[:, 0])  # type: ignore[no-untyped-call]


def test_a_predictor_that_goes_another_way_where_it_is_mapped_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control, where nobody minds what failed and was caught: one person moves all others' rows."""

    def build(changed: bool) -> Any:
        return columns_world(changed, _catches, 7, ROUNDS)

    with pytest.raises(InputError, match="it catches that __float__ fails"):
        build(False)
    monkeypatch.setattr(compiled.Calls, "failed", property(lambda self: set(), lambda *_: None), raising=False)
    assert gaps(build, ROUNDS).max() > 2


def test_people_evaluated_again_in_another_shape_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(steps, "evaluated", _one_by_one)
    assert _failing_gaps().max() > 2


class _Failing(Bernoulli):
    """On one label; the pull on the others holds nothing but last bits."""

    def check(self, y: Tensor) -> None:
        pass

    def log_prob(self, y: Tensor, predictor: Tensor, gamma: Tensor) -> Tensor:
        nothing = torch.linalg.cholesky((2 - y).reshape(-1, 1, 1))[:, 0, 0] * 0
        return nothing + predictor[:, 0] * 1e18 * _rounding(torch.cat([predictor, predictor + 1], -1)).detach()


def _pulls(label: float) -> Tensor:
    """What the response's holder makes of everyone's label but the eighth's, before clipping and noise."""
    x, y = torch.randn(40, 4, generator=torch.Generator().manual_seed(3)), torch.ones(40)
    y[7] = label
    config = Vertical(response="private", rounds=3, auxiliary=MeanField())
    parties = _parties(config, x, y, _Failing())
    program: Any = parties.server.program
    s = torch.randn(40, 1, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found = program._slopes_alone(program.response, s, torch.zeros(1, dtype=torch.float64))
    assert bool(found.predictor[7].isnan()) == (label > 1)
    return torch.cat([found.predictor[:7], found.predictor[8:]])


def _parties(config: Vertical, x: Tensor, y: Tensor, likelihood: Bernoulli, private: bool = True) -> Any:
    dp = sf.RecordDP(noise_multiplier=NOISE, clipping_norm=1.0, noise="silo", retries=0) if private else None
    return build_parties(
        sf.Columns(likelihood, y), [{"x": x[:, :2]}, {"x": x[:, 2:]}], config, sf.Plain(), privacy=dp, compile=True,
        noise_key=b"k" * 32,
    )  # fmt: skip


def test_a_label_on_which_a_likelihood_fails_moves_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = _pulls(1.0)
    assert torch.equal(_pulls(5.0), usual)
    monkeypatch.setattr(steps, "evaluated", _one_by_one)  # the control
    assert float((_pulls(5.0) - usual).abs().max()) > 2


@contextlib.contextmanager
def _watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[bool], list[Any]]]:
    """Of each function that is traced, whether it was shown somebody's 50; and what was compiled."""
    shown, made = list[bool](), list[Any]()
    trace = Traced._trace

    def watched(self: Traced, key: Any, args: Any, flat: list[Tensor]) -> Any:
        shown.append(any(bool((t == 50).any()) for t in flat))
        return trace(self, key, args, flat)

    with monkeypatch.context() as patched:
        patched.setattr(Traced, "_trace", watched)
        patched.setattr(compiled, "_compile", lambda graph, *_: (made.append(graph), graph)[1])
        yield shown, made


def test_nobody_decides_on_what_is_traced_or_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under record privacy what sees people is traced on made data, and not compiled; in the control, without privacy,
    it is on people's. A compiled function rounds otherwise, and whether it is kept followed from one person's values:
    releases then moved by 4.7 norms."""
    x, y = torch.full((40, 4), 50.0), torch.ones(40)
    config = Vertical(response="private", rounds=TRACE_AFTER_CALLS + 2, auxiliary=MeanField())
    for private in (True, False):
        parties = _parties(config, x, y, Bernoulli(), private)
        with _watched(monkeypatch) as (shown, made):
            for _ in range(config.rounds if private else 2):
                parties.engine.run(parties.server.round())
        program: Any = parties.engine.silos["silo-1"].program
        if private:
            assert program._draws_alone.traced.traced
            assert program._gradients.traced.traced
            assert program._ascend.traced
            assert not any(shown)
            assert len(shown) >= 3
            assert len(made) <= 2  # the gradient of the prior, and the server's step on what was noised
        else:
            assert any(shown)
            assert len(made) > 3


@pytest.mark.parametrize("count", [1, 40, 513])
def test_blocks_have_one_shape_whatever_the_people(count: int) -> None:
    shapes = list[int]()

    def function(shared: Tensor, records: Tensor) -> Tensor:
        shapes.append(len(records))
        if bool((records > 20).any()):
            raise RuntimeError
        return records * shared

    apart = steps.ByRecord(function, lambda n: torch.ones(n, dtype=torch.float64), "eager", "it")
    records = torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected, size = records * 3, {1: 1, 40: 40, 513: 257}[count]
    for k in (None, 0, count - 1):
        if k is not None:
            records[k], expected[k] = 50.0, torch.nan
        found = apart(torch.tensor(3.0, dtype=torch.float64), records)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert set(shapes) == {2, size}  # two made records, of which it is seen how all are evaluated
