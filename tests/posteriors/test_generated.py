"""Generated hierarchical programs and deals of records, whose posteriors linear algebra knows: right within tolerance,
or not called converged. There is no third outcome.

y = X beta + an effect of the silo + an effect of the record + noise, all normal, with known scales. Effects are there
or not, records are dealt in order, by value or by a column, columns are collinear or on scales apart, and priors wide
or narrow. Tolerance: means within .1 posterior sds, sds within 10%.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

import secure_fvi as sf
from secure_fvi.errors import AggregationError, SecureFVIWarning

MEAN_IN_SD, SD_SHARE = 0.1, 0.1


class Case(NamedTuple):
    """What hypothesis chooses; the numbers follow from `seed`."""

    seed: int
    columns: int
    sizes: tuple[int, ...]
    deal: str  # in order, by value of y, by the last column
    noise: float
    width: float  # of the prior of beta
    spread: float  # decades between columns' scales
    record: float  # sd of records' own effects, 0: there are none
    silo: float  # sd of silos' own effects, 0: there are none
    together: float  # correlation of the columns
    optimizer: str


@st.composite
def cases(draw: Any) -> Case:
    record, silo = draw(st.sampled_from([0.0, 0.0, 0.5])), draw(st.sampled_from([0.0, 0.0, 0.7]))
    exact = [] if record or silo else ["closed_form"]
    return Case(
        seed=draw(st.integers(0, 2**31 - 1)),
        columns=draw(st.integers(1, 5)),
        sizes=tuple(draw(st.lists(st.integers(1, 12), min_size=3, max_size=6))),
        deal=draw(st.sampled_from(["order", "value", "column"])),
        noise=draw(st.sampled_from([0.3, 1.0, 3.0])),
        width=draw(st.sampled_from([0.5, 3.0, 30.0])),
        spread=draw(st.sampled_from([0.0, 1.0, 3.0])),
        record=record,
        silo=silo,
        together=draw(st.sampled_from([0.0, 0.5, 0.99])),
        optimizer=draw(st.sampled_from(["natural", *exact])),
    )


class Built(NamedTuple):
    model: sf.FederatedModel
    silos: list[dict[str, Tensor]]
    mean: Tensor
    sd: Tensor


def build(case: Case) -> Built:
    """The program, the silos' records, and the posterior of beta by all of them together."""
    rng = torch.Generator().manual_seed(case.seed)
    normal = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)  # noqa: E731
    n, d, sizes = sum(case.sizes), case.columns, list(case.sizes)
    x = (1 - case.together) ** 0.5 * normal(n, d) + case.together**0.5 * normal(n, 1)
    scale = torch.logspace(-case.spread / 2, case.spread / 2, d, dtype=torch.float64) if d > 1 else torch.ones(1)
    width = case.width / scale
    beta = width * normal(d)
    member = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    y = (x * scale) @ beta + case.record * normal(n) + case.noise * normal(n)
    keys = {"order": torch.arange(n), "value": y, "column": x[:, -1]}
    order = keys[case.deal].argsort()
    x, y = (x * scale)[order], y[order] + case.silo * normal(len(sizes))[member]

    def program(x: Tensor, y: Tensor) -> None:
        beta = pyro.sample("beta", dist.Normal(torch.zeros(d), width).to_event(1))
        own = pyro.sample("own", dist.Normal(0.0, case.silo)) if case.silo else 0.0
        with pyro.plate("records", len(y)):
            effect = pyro.sample("effect", dist.Normal(0.0, case.record)) if case.record else 0.0
            pyro.sample("y", dist.Normal(x @ beta + own + effect, case.noise), obs=y)

    same = (member[:, None] == member).double()
    covariance = (case.noise**2 + case.record**2) * torch.eye(n) + case.silo**2 * same
    weighted = torch.linalg.solve(covariance, x).T
    posterior = torch.linalg.inv(weighted @ x + (1 / width**2).diag())
    model = sf.FederatedModel(program, silo_sites=("own",) if case.silo else ())
    silos = [{"x": a, "y": b} for a, b in zip(x.split(sizes), y.split(sizes), strict=True)]
    return Built(model, silos, posterior @ (weighted @ y), posterior.diagonal().sqrt())


def outcome(case: Case) -> bool:
    """Whether the run is called converged; fails if it is and is wrong, or if it is not, or is refused, and does not
    say why."""
    built = build(case)
    algorithm = sf.PVI(local_optimizer=case.optimizer, family="full")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureFVIWarning)
        try:
            result = sf.fit(built.model, built.silos, algorithm, compile=False, threads=1)
        except AggregationError as refused:  # a number that is too large to tell
            if "lower learning_rate" in str(refused):
                return False
            raise
    if not result.converged:
        assert len(result.convergence["reason"]) > 40
        return False
    found = result.posterior["beta"]
    error = float(((found.mean - built.mean) / built.sd).abs().max())
    ratio = found.sd / built.sd
    assert error < MEAN_IN_SD, f"converged, {error:.2f} sds off: {result.convergence}"
    assert float((ratio - 1).abs().max()) < SD_SHARE, f"converged, sds {ratio.tolist()} of the posterior's"
    return True


def _hold(count: int, least: float, start: int = 0) -> None:
    outcomes: list[bool] = []

    @seed(start)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(cases())
    def each(case: Case) -> None:
        outcomes.append(outcome(case))

    each()
    print(f"{sum(outcomes)} of {len(outcomes)} converged, none of them wrong")
    assert sum(outcomes) >= least * len(outcomes)


@pytest.mark.slow  # half a minute; one that was wrong once is of the first tier
def test_generated_programs_are_right_or_not_called_converged() -> None:
    _hold(2, 0.5)


@pytest.mark.slow  # ten minutes each on one core
@pytest.mark.parametrize("hundred", range(10))
def test_a_thousand_generated_programs(hundred: int) -> None:
    _hold(100, 0.8, 1 + hundred)


#: Once at rest and wrong: columns decades apart beside effects of records, and effects of silos under wide priors.
ONCE_WRONG = [
    Case(128968939, 3, (3, 3, 9, 8, 3), "order", 0.3, 0.5, 3.0, 0.5, 0.0, 0.0, "natural"),  # sds .58 of the truth
    Case(5659, 1, (10, 10, 3, 10, 7, 7), "order", 3.0, 30.0, 1.0, 0.0, 0.7, 0.0, "natural"),  # 62 sds off
    Case(2954935, 5, (1, 1, 10, 7, 4, 9), "value", 3.0, 3.0, 0.0, 0.0, 0.7, 0.5, "natural"),  # .81 sds off
]


@pytest.mark.parametrize("case", [ONCE_WRONG[1], *(pytest.param(c, marks=pytest.mark.slow) for c in ONCE_WRONG[::2])])
def test_those_that_were_once_wrong_are_right(case: Case) -> None:
    assert outcome(case)


def test_the_line_can_be_crossed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the exact posterior of other data is a silently wrong answer, and the check says so."""
    case = Case(1, 2, (6, 6, 6), "order", 1.0, 3.0, 0.0, 0.0, 0.0, 0.0, "closed_form")
    assert outcome(case)
    true = build(case)
    monkeypatch.setitem(globals(), "build", lambda _: true._replace(mean=true.mean + 0.5 * true.sd))
    with pytest.raises(AssertionError, match="sds off"):
        outcome(case)
