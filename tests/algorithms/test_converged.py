"""Converged means converged: there is no third outcome but right within tolerance, or not called converged.

The attacks are runs that were once wrong and said "converged": local fits that run off, cavities that are improper,
silos that pull opposite ways, silos that are absent, averages of posteriors that have settled elsewhere.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from programs import make_intercepts
from pvi_world import NOISE, REGRESSION, World, build, make_regression
from torch import Tensor

import secure_fvi as sf
from secure_fvi.aggregation.base import UNABLE
from secure_fvi.algorithms import local_fit, stationarity
from secure_fvi.algorithms.base import Posterior
from secure_fvi.algorithms.final_server import Rest
from secure_fvi.algorithms.natural import Natural, from_moments, to_eta
from secure_fvi.algorithms.pvi import FINISH, MARGIN, PVIProgram, tempered
from secure_fvi.errors import AggregationError
from secure_fvi.fitting import build_parties
from secure_fvi.results import Result

EXACT: Any = {"local_optimizer": "closed_form", "family": "full"}
SIZES = (7, 30, 12)


def quiet_fit(*args: Any, **options: Any) -> Result:
    """`fit`, whose warnings are part of the outcome here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sf.SecureFVIWarning)
        return sf.fit(*args, **options)


# ---- the slope at the final q ----


def _exact() -> Natural:
    """The posterior in float64, from the numbers that the fits see."""
    silos, _ = make_regression(SIZES)
    x, y = (torch.cat([s[name] for s in silos]).double() for name in ("x", "y"))
    return Natural(x.T @ y / NOISE**2, x.T @ x / NOISE**2 + torch.eye(3).double() / 4)


def _rest_at(q: Natural) -> Any:
    """What the final sum says of q, whatever the silos' sites are."""
    silos, _ = make_regression(SIZES)
    world = build(REGRESSION, silos, sf.PVI(**EXACT))
    world.end_at(q)
    world.round()
    return world.state.rest


#: The mean so many sds off, and sds so many times the posterior's.
NEAR = list(itertools.product([0.0, 0.1, 0.5], [1.0, 1.25, 0.75]))
FAR = [(0.02, 1.0), (0.0, 0.5), (3.0, 1.0), (3.0, 1.3)]


@pytest.mark.parametrize(
    ("off", "wide"),
    [pytest.param(*at, marks=[pytest.mark.slow] * (k % 2)) for k, at in enumerate([*NEAR, *FAR])],
)
@pytest.mark.later("0.0-0.75", "0.0-1.0", "0.1-1.25", "0.5-0.75", "0.5-1.0")
def test_slope_and_weights_say_how_far_q_is_from_the_posterior(off: float, wide: float) -> None:
    """Of a Gaussian posterior one undamped step is the whole way, whatever the draws: of q's mean, in its sds, and of
    the logs of these. Weights, which no slope and no family of q enters, say the same near q within .05 posterior
    sds."""
    exact = _exact()
    covariance = wide**2 * exact.covariance()
    sds = covariance.diagonal().sqrt()
    rest = _rest_at(from_moments(exact.mean() + off * sds * torch.tensor([1.0, 0.0, 0.0]), covariance))
    furthest = max(off, abs(math.log(wide)))
    assert rest.step == pytest.approx(furthest, abs=1e-6)
    assert rest.stationary == (furthest < 0.15)
    if (off, wide) in NEAR:
        weighed = rest.weighed
        assert weighed.mean == pytest.approx(off * wide, abs=0.05)
        assert weighed.sd == pytest.approx(math.log(wide), abs=0.05)
        assert weighed.apart is None
        assert (weighed.against() is None) == (off < 0.15 and wide == 1)


@pytest.mark.usefixtures("few_draws")
def test_the_reported_bound_is_that_of_all_silos_at_the_final_q() -> None:
    """Of a Gaussian posterior the bound is the log evidence. The control: one silo less, and it is another number."""
    silos, _ = make_regression(SIZES)
    result = sf.fit(REGRESSION, silos, sf.PVI(damping=1.0, **EXACT), sf.Plain())
    x, y = (torch.cat([s[name] for s in silos]).double() for name in ("x", "y"))
    evidence = dist.MultivariateNormal(torch.zeros(len(y)).double(), 4 * x @ x.T + NOISE**2 * torch.eye(len(y)))
    assert result.elbo == pytest.approx(float(evidence.log_prob(y)), abs=1e-4)
    assert result.converged
    fewer = sf.fit(REGRESSION, silos[:2], sf.PVI(damping=1.0, **EXACT), sf.Plain())
    assert abs(fewer.elbo - result.elbo) > 1.0  # type: ignore[operator]


# ---- rounds at rest ----


def _totals(world: World, change: Natural, **counts: float) -> Any:
    """A round's total of three silos, made up."""
    names = ("objective", "records", "skipped", "tempered", "moving")
    values = [counts.get(name, 0.0) for name in names]
    present = torch.tensor([1.0, 1.0, counts.get("third", 1.0)])
    return torch.cat([change.pack(), torch.tensor(values), present, torch.zeros(UNABLE.size)]).double().numpy()


@pytest.mark.parametrize("trouble", [{}, {"moving": 1}, {"skipped": 1}, {"tempered": 1}, {"third": 0.0}])
def test_a_sum_of_nothing_is_no_rest(trouble: dict[str, float]) -> None:
    """The sum of changes is nothing in every case: silos that pull opposite ways, that could not fit, that tempered,
    that are absent. The control is the first: then it is rest, after two rounds."""
    silos, _ = make_regression(SIZES)
    world = build(REGRESSION, silos, sf.PVI(**EXACT))
    program: Any = world.server.program
    state = world.state
    for round_ in range(2):
        assert not program.at_rest(state)
        message = program.broadcast(state, round_ + 1, {})
        none = Natural(torch.zeros(3), torch.zeros(3, 3))
        state, step = program.update(state, message, _totals(world, none, **trouble), 1.0)
        assert not step.finished
    assert program.at_rest(state) == (not trouble)
    if trouble:
        assert program.verdict(state).converged is False


@pytest.mark.parametrize("schedule", ["synchronous", "sequential"])
def test_fits_that_run_off_are_refused_or_end_as_not_converged(monkeypatch: pytest.MonkeyPatch, schedule: Any) -> None:
    """The case of diamonds: nobody could fit. Of several silos none stands aside with a zero, which would make the
    total the others': it says once that it cannot. Where a sum is of one silo anyway, the warning says so."""

    def runs_off(self: Any, *args: Any) -> Any:
        own = args[5]
        return local_fit.Fitted(args[3], float("nan"), {}, own, torch.ones(3, dtype=torch.bool))

    monkeypatch.setattr(local_fit.SiloFit, "_at", runs_off)
    silos, _ = make_regression(SIZES)
    algorithm = sf.PVI(max_rounds=3, schedule=schedule, reveal_changes=schedule == "sequential")
    if schedule == "synchronous":
        with pytest.raises(AggregationError, match=r"'silo-1': its local fit ran off in round 0; lower learning_rate"):
            sf.fit(REGRESSION, silos, algorithm, sf.Plain())
        return
    with pytest.warns(sf.SecureFVIWarning, match=r"some silo could not fit.*lower learning_rate"):
        result = sf.fit(REGRESSION, silos, algorithm, sf.Plain())
    assert result.converged is False
    assert result.convergence["some_skipped"] == 1
    assert result.to_json()["converged"] is False


# ---- tempering ----


def test_a_tempered_cavity_is_proper_and_a_proper_one_is_left() -> None:
    q = Natural(torch.ones(2).double(), torch.tensor([[2.0, 0.3], [0.3, 1.0]]).double())
    half = Natural(q.shift, 0.5 * q.precision)
    cavity, share = tempered(q, half)
    assert share == 1.0
    assert torch.equal(cavity.precision, q.minus(half).precision)
    nearly = Natural(q.shift, (1 - 1e-6) * q.precision)  # a silo that alone knows everything but the prior
    assert tempered(q, nearly)[1] == 1.0
    too_much = Natural(q.shift, torch.tensor([[5.0, 0.0], [0.0, -1.0]]).double())
    cavity, share = tempered(q, too_much)
    assert 0 < share < 1
    factor = q.factor()
    assert float(torch.linalg.eigvalsh(factor.mT @ cavity.precision @ factor).min()) == pytest.approx(MARGIN)
    flat = Natural(q.shift, q.precision.diagonal())
    cavity, share = tempered(flat, Natural(flat.shift, 4 * flat.precision))
    assert (cavity.precision / flat.precision).min() == pytest.approx(MARGIN)


def test_a_step_that_spoilt_a_cavity_is_taken_back_by_half_and_sites_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silo says in the second round that it tempered: half of the first step is undone, at the server and, with its
    next broadcast, at the silos, so that q stays the prior times the sites. The control: nobody says so."""
    silos, _ = make_regression(SIZES)
    reported = PVIProgram._reported

    def tempering(self: Any, *args: Any) -> Any:
        return {**reported(self, *args), "tempered": 1.0}

    for attacked, share in ((True, 0.5), (False, 1.0)):
        world = build(REGRESSION, silos, sf.PVI(damping=1.0, **EXACT))
        prior = world.state.q
        world.round()
        whole = world.state.q
        with monkeypatch.context() as patch:
            if attacked:
                patch.setattr(PVIProgram, "_reported", tempering)
            world.round()
        expected = prior.plus(whole.minus(prior), share)
        torch.testing.assert_close(world.state.q.precision, expected.precision)
        assert world.state.undone == int(attacked)
        assert world.state.last.tempered == (1 if attacked else 0)
        for _ in range(2):
            got = world.product()
            torch.testing.assert_close(got.precision, world.state.q.precision)
            torch.testing.assert_close(got.shift, world.state.q.shift)
            world.round()
        torch.testing.assert_close(world.state.q.precision, whole.precision)


@pytest.mark.usefixtures("few_draws")
def test_what_a_likelihood_does_not_depend_on_it_says_nothing_of() -> None:
    """Eight group means as global sites, two a silo. Noise of local fits in the other groups' precisions, small beside
    the posterior's, was large beside the prior's, and left every silo's cavity improper."""
    world = build(GROUPS.model, GROUPS.silos, sf.PVI(max_rounds=5, local_steps=50))
    world.round()
    message = world.server.program.broadcast(world.state, 10**6, {})
    for j, silo in enumerate(world.engine.silos.values()):
        silo.settle(world.server.state.accepted)
        program: Any = silo.program
        site = program.site(silo.local, message, silo.name)
        others = torch.tensor([k for k in range(8) if k // 2 != j])
        assert (site.precision[others] == 0).all()
        assert (site.shift[others] == 0).all()
        assert float(site.precision.abs().max()) > 0.1


# ---- models that were silently wrong ----


class Case(NamedTuple):
    model: sf.FederatedModel
    silos: list[dict[str, Tensor]]
    mean: dict[str, Tensor]
    sd: dict[str, Tensor]
    tolerance: float  # posterior sds of the mean, and of the log of the sd


def _groups() -> Case:
    """Normal group means with wide priors, known noise: exact."""
    rng = torch.Generator().manual_seed(4)
    group = torch.arange(8).repeat_interleave(6)
    y = 2.0 + torch.randn(8, generator=rng)[group] + 0.75 * torch.randn(48, generator=rng)

    def program(group: Tensor, y: Tensor) -> None:
        alpha = pyro.sample("alpha", dist.Normal(y.new_zeros(8), 10.0).to_event(1))
        with pyro.plate("row", len(y)):
            pyro.sample("y", dist.Normal(alpha[group], 0.75), obs=y)

    precision = 6 / 0.75**2 + 0.01
    sums = torch.zeros(8).index_add(0, group, y) / 0.75**2
    silos = [{"group": group[12 * j : 12 * j + 12], "y": y[12 * j : 12 * j + 12]} for j in range(4)]
    mean, sd = {"alpha": sums / precision}, {"alpha": torch.full((8,), precision**-0.5)}
    return Case(sf.FederatedModel(program, "row"), silos, mean, sd, 0.15)


GROUPS = _groups()


def _collinear() -> Case:
    """Twelve columns that are powers of one another, on scales a thousandfold apart, known noise: exact."""
    rng = torch.Generator().manual_seed(5)
    u = torch.rand(240, 1, generator=rng, dtype=torch.float64) * 2 - 1
    x = torch.cat([u**k for k in range(1, 5)] + [torch.randn(240, 8, generator=rng, dtype=torch.float64)], 1)
    x = x * torch.logspace(-1.5, 1.5, 12, dtype=torch.float64)
    y = x @ (torch.randn(12, generator=rng, dtype=torch.float64) / x.std(0)) + 0.1 * torch.randn(240, generator=rng)

    def program(x: Tensor, y: Tensor) -> None:
        beta = pyro.sample("beta", dist.Normal(x.new_zeros(12), 30.0).to_event(1))
        with pyro.plate("row", len(y)):
            pyro.sample("y", dist.Normal(x @ beta, 0.1), obs=y)

    precision = x.T @ x / 0.01 + torch.eye(12) / 900
    exact = Natural(x.T @ y / 0.01, precision)
    silos = [{"x": x[j::4], "y": y[j::4]} for j in range(4)]
    return Case(sf.FederatedModel(program, "row"), silos, {"beta": exact.mean()}, {"beta": exact.stddev()}, 0.15)


def _cut_by_value() -> Case:
    """A mixture of two normals with known sds, cut to three silos by value; moments on a fine grid."""
    rng = torch.Generator().manual_seed(6)
    low, high = -1.5 + torch.randn(40, generator=rng), 1.5 + torch.randn(60, generator=rng)
    y = torch.cat([low, high]).sort().values.double()

    def log_joint(a: Tensor, gap: Tensor) -> Tensor:
        one, two = dist.Normal(a[..., None], 1.0).log_prob(y), dist.Normal((a + gap)[..., None], 1.0).log_prob(y)
        mixed = torch.logaddexp(one + torch.tensor(0.4).log(), two + torch.tensor(0.6).log()).sum(-1)
        return mixed + dist.Normal(0.0, 2.0).log_prob(a) + dist.LogNormal(1.0, 1.0).log_prob(gap)

    def program(y: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(y.new_zeros(()), 2.0))
        gap = pyro.sample("gap", dist.LogNormal(y.new_ones(()), 1.0))
        weights = dist.Categorical(y.new_tensor([0.4, 0.6]))
        with pyro.plate("row", len(y)):
            pyro.sample("y", dist.MixtureSameFamily(weights, dist.Normal(torch.stack([a, a + gap]), 1.0)), obs=y)

    a, gap = torch.meshgrid(torch.linspace(-4, 2, 301).double(), torch.linspace(0.02, 6, 301).double(), indexing="ij")
    density = log_joint(a, gap)
    weight = (density - density.max()).exp()
    weight = weight / weight.sum()
    mean = {"a": (weight * a).sum(), "gap": (weight * gap).sum()}
    sd = {k: (weight * (v - mean[k]) ** 2).sum().sqrt() for k, v in (("a", a), ("gap", gap))}
    silos = [{"y": part} for part in y.split([30, 40, 30])]
    return Case(sf.FederatedModel(program, "row"), silos, mean, sd, 0.25)


def _apart() -> Case:
    """Silos that each see a direction of their own: an average of their posteriors is nowhere near the product."""
    silos, _ = make_regression((12, 12, 12), seed=1)
    precision, shift = torch.eye(3).double() / 4, torch.zeros(3).double()
    for j, silo in enumerate(silos):
        x = 0.1 * silo["x"].double()
        x[:, j] += 2.0 * (1 - 2 * (torch.arange(12) % 2))
        silo["x"], silo["y"] = x, silo["y"].double()
        precision, shift = precision + x.T @ x / NOISE**2, shift + x.T @ silo["y"] / NOISE**2
    exact = Natural(shift, precision)
    return Case(REGRESSION, silos, {"beta": exact.mean()}, {"beta": exact.stddev()}, 0.2)


def wrong_by(case: Case, result: Result) -> float:
    """The largest error, in posterior sds, and in the log of the sds."""
    errors = []
    for site, mean in case.mean.items():
        got, sd = result.posterior[site], case.sd[site]
        errors += [float(((got.mean - mean) / sd).abs().max()), float((got.sd / sd).log().abs().max())]
    return max(errors)


def test_advice_follows_from_what_ended_the_run() -> None:
    """A run that settled by itself and whose q is not at rest was told to raise a limit that it never met."""
    silos, _ = make_regression(SIZES)
    world = build(REGRESSION, silos, sf.SFVI(max_iterations=700))  # type: ignore[arg-type]
    program: Any = world.server.program

    def said(**of: Any) -> str:
        state: Any = world.state
        return str(program.verdict(state._replace(**of)).said)

    settled = world.state.monitor._replace(converged=True)  # type: ignore[attr-defined]
    moving = Rest(step=0.4, error=0.01, objective=-3.0)
    assert "raise max_iterations (now 700)" in said(round=700, rest=moving)
    assert "give priors that say more" in said(monitor=settled, rest=moving)
    assert "max_iterations" not in said(monitor=settled, rest=moving)
    assert "run it again, with all silos" in said(monitor=settled, rest=moving, lost=3)


@pytest.mark.parametrize(
    ("make", "algorithm", "must"),
    [
        pytest.param(lambda: GROUPS, sf.PVI(local_steps=200), True, marks=pytest.mark.slow),
        pytest.param(_collinear, sf.PVI(local_steps=200, max_rounds=30), False, marks=pytest.mark.slow),
        pytest.param(_cut_by_value, sf.PVI(local_steps=150, max_rounds=12), False, marks=pytest.mark.slow),
        (_apart, sf.PVI(local_steps=200), True),
    ],
)
def test_right_or_not_called_converged(make: Callable[[], Case], algorithm: Any, must: bool) -> None:
    """No third outcome. `must`: whether the run has to converge besides."""
    case = make()
    result = quiet_fit(case.model, case.silos, algorithm, sf.Plain())
    if result.converged:
        assert wrong_by(case, result) < case.tolerance, (wrong_by(case, result), result.convergence)
    else:
        assert len(result.convergence["reason"]) > 40  # a cause and a remedy
    if must:
        assert result.converged, (wrong_by(case, result), result.convergence)


@pytest.mark.slow  # half a minute
def test_an_average_that_has_settled_is_not_called_the_posterior() -> None:
    """The merges themselves are at rest, which used to be enough, and q is wrong: that is the attack. It is refused, or
    refined to what is right."""
    case = _apart()
    result = quiet_fit(case.model, case.silos, sf.SFVIAvg(local_steps=150), sf.Plain())
    assert result.metrics["movement"] < 0.1
    reason = result.convergence["reason"]
    assert "merges have settled, but at the final q the slope of the bound over all records would still move" in reason
    assert ("approximate by construction: use pvi or sfvi" in reason) is not result.converged
    assert result.convergence["step_sd"] > 0.2
    assert result.converged is (result.refined is not None)
    assert (wrong_by(case, result) < case.tolerance) == result.converged


# ---- runs that nobody assesses ----


@pytest.mark.parametrize(
    ("algorithm", "option"),
    [(sf.PVI(rounds=2, **EXACT), "rounds = 2"), (sf.SFVI(iterations=30), "iterations = 30")],
)
def test_a_fixed_length_is_not_assessed(algorithm: Any, option: str) -> None:
    silos, _ = make_regression(SIZES)
    result = quiet_fit(REGRESSION, silos, algorithm, sf.Plain())
    assert result.converged is None
    assert option in result.convergence["reason"]
    assert "converged=None" in repr(result)


@pytest.mark.later
def test_a_short_fixed_run_that_was_still_drifting_warns() -> None:
    problem = make_intercepts()
    with pytest.warns(sf.SecureFVIWarning, match="still drifting"):
        result = sf.fit(problem.model, problem.silos, sf.SFVI(iterations=40), sf.Plain())
    assert result.converged is None
    assert result.convergence["moving"]


def test_private_runs_are_not_assessed_and_release_no_counts() -> None:
    silos, _ = make_regression((30, 30, 30))
    algorithm = sf.PVI(rounds=2, damping=0.3, **EXACT)
    privacy = sf.SiloDP(epsilon=50.0, delta=1e-5, clipping_norm=5.0, noise="silo")
    program = build(REGRESSION, silos, algorithm).server.program
    assert set(program.tables) == {"round", "finish"}
    result = quiet_fit(REGRESSION, silos, algorithm, sf.Masked(), privacy=privacy, noise_key=bytes(32))
    assert result.converged is None
    assert "differential privacy" in result.convergence["reason"]
    server: Any = PVIProgram(algorithm, result.problem)
    assert set(server.tables) == {"round"}
    assert {b.name for b in server.tables["round"].blocks} <= {"change", "side"}


def test_baselines_are_not_assessed() -> None:
    silos, _ = make_regression(SIZES)
    result = sf.fit(REGRESSION, silos, sf.BCM(**EXACT), sf.Plain())
    assert result.converged is None
    assert "approximate by construction" in result.convergence["reason"]


@pytest.mark.usefixtures("few_draws")
def test_a_silo_that_is_absent_at_the_end_is_no_convergence() -> None:
    """The rounds were at rest; one silo does not answer the final sum. The control: all answer."""
    for lost, expected in (((), True), (("silo-2",), False)):
        silos, _ = make_regression(SIZES)
        world = build(REGRESSION, silos, sf.PVI(damping=1.0, **EXACT))
        for _ in range(9):
            if world.state.phase == FINISH:
                break
            world.round()
        assert world.state.phase == FINISH
        world.round(lost_after=lost)
        verdict = world.server.program.verdict(world.state)
        assert verdict.converged is expected
        assert expected or "missing" in verdict.reason


def test_the_posterior_of_a_natural_factor_is_what_eta_says() -> None:
    """The two forms of q that the check meets are one distribution."""
    from secure_fvi.algorithms.stationarity import as_natural
    from secure_fvi.families import global_family

    exact = _exact()
    found = Posterior(global_family("full", 3), to_eta(exact), {})
    again = as_natural(found.family, found.eta)
    torch.testing.assert_close(again.precision, exact.precision)
    torch.testing.assert_close(again.shift, exact.shift)


@pytest.mark.later
@pytest.mark.parametrize("n_silo", [0, 1])
def test_the_slope_at_many_draws_at_once_is_that_at_each(n_silo: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the rounding of sums, and so where its gradient has been traced. The control: other draws have another one."""

    def program(y: Tensor) -> None:
        level = pyro.sample("mu", dist.Normal(0.0, 3.0))
        own = pyro.sample("own", dist.Normal(0.0, 0.7)) if n_silo else 0.0
        with pyro.plate("records", len(y)):
            pyro.sample("y", dist.StudentT(3.0, level + own, 0.4), obs=y)

    model = sf.FederatedModel(program, silo_sites=("own",) if n_silo else ())
    rows = [{"y": torch.linspace(-1, 1, n, dtype=torch.float64)} for n in (6, 4)]
    silo = build_parties(model, rows, sf.PVI(family="full"), sf.Plain(), compile=False).engine.silos["silo-1"]
    assert isinstance(silo.program, PVIProgram)
    fit = silo.program.fit
    own, q = fit.init(silo.view), from_moments(torch.zeros(1).double(), torch.full((1, 1), 0.16).double())

    def slope(seed: int) -> np.typing.NDArray[np.float64]:
        eps = stationarity.final_draws(seed, 1, full=True)
        return fit.at_the_end(eps, 1, {}, q, own, silo.view, weighs=False)

    found = [slope(0) for _ in range(2)]
    monkeypatch.setattr(stationarity, "TRACE_AFTER_CALLS", 0)
    found.append(slope(0))
    monkeypatch.setattr(stationarity, "_AT_ONCE", 0)
    for each in found:
        np.testing.assert_allclose(each, slope(0), rtol=1e-12, atol=1e-12)
    assert np.abs(found[0] - slope(1)).max() > 1e-6
