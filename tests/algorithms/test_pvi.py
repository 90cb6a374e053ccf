"""PVI: exact posteriors of conjugate models under every schedule, q as the product of its sites, damping, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from programs import (
    Conjugate,
    likeliest_tau,
    make_clinics,
    make_intercepts,
    make_rate,
    make_slopes,
    unknown_tau,
)
from pvi_world import REGRESSION, World, build, logistic, make_regression
from torch import Tensor

import secure_fvi as sf
from secure_fvi.algorithms import local_fit
from secure_fvi.algorithms.local_fit import Carry, Inputs, StepBlock
from secure_fvi.algorithms.natural import Natural, from_moments, quadratic
from secure_fvi.errors import InputError
from secure_fvi.fitting import build_parties
from secure_fvi.models import six_cities

EXACT = {"local_optimizer": "closed_form", "family": "full"}
VISITS = {"schedule": "sequential", "reveal_changes": True}


def _close(got: Natural, want: Natural, tolerance: float = 1e-8) -> bool:
    scale = float(want.precision.abs().max())
    return bool(
        (got.precision - want.precision).abs().max() < tolerance * scale
        and ((got.mean() - want.mean()).abs() < tolerance).all()
    )


@pytest.mark.parametrize(
    ("options", "rounds"),
    [
        ({"damping": 1.0}, 1),
        (VISITS, 3),
        ({"schedule": "asynchronous", "buffer": 2, "damping": 1.0}, 6),
        ({"damping": "auto"}, 12),
    ],
)
def test_regression_with_known_noise_is_exact(options: dict[str, Any], rounds: int) -> None:
    """One synchronous round, one sequential pass, or as many rounds as it takes until every silo was asked."""
    silos, exact = make_regression((7, 30, 12))
    world = build(REGRESSION, silos, sf.PVI(rounds=rounds, **EXACT, **options))
    for _ in range(rounds):
        world.round()
    assert _close(world.state.q, exact, 1e-8 if options.get("damping") != "auto" else 1e-3)


@pytest.mark.slow  # 40 seconds
@pytest.mark.filterwarnings("ignore:pvi ended after 2 rounds")
def test_gains_of_many_records_do_not_narrow_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 60 children's gains that go as far as those of their means end with sds of q a tenth and less of what
    they are, as they once did: each round then narrower, until a change was past its bound. Randomness is fixed."""
    rows = six_cities.load().records
    silos = [{name: column[j::6][:60] for name, column in rows.items()} for j in range(2)]

    def sd() -> float:
        algorithm = sf.PVI(rounds=2, local_steps=250)
        result = sf.fit(six_cities.PROGRAM.model, silos, algorithm, sf.Plain(), seed=1, compile=False)
        return float(result.posterior["omega"].sd)

    monkeypatch.setattr(local_fit, "_NEWTON_TO", 0)  # by one draw a step
    assert 0.1 < sd() < 0.25
    monkeypatch.setattr(local_fit, "_QUIET", 1e9)
    assert sd() < 0.02


@pytest.mark.slow
def test_diagonal_family_reaches_the_mean_field_posterior() -> None:
    """A product of Gaussians approximated coordinate by coordinate: exact mean, the conditional variances."""
    silos, exact = make_regression((7, 30, 12))
    options: Any = {**EXACT, "family": "diagonal", **VISITS}
    result = sf.fit(REGRESSION, silos, sf.PVI(rounds=300, **options), sf.Plain())
    torch.testing.assert_close(result.posterior["beta"].mean, exact.mean(), rtol=0, atol=1e-6)
    torch.testing.assert_close(result.posterior["beta"].sd, exact.precision.diagonal().rsqrt(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "make",
    [make_intercepts, *(pytest.param(m, marks=pytest.mark.slow) for m in (make_slopes, make_rate, make_clinics))],
)
def test_structured_models_reach_the_exact_posterior(make: Callable[[], Conjugate]) -> None:
    """Local latents, uneven silos, masked sums: 0.15 posterior sd in the mean, 10% in the sd, in six sums."""
    problem = make()
    result = sf.fit(problem.model, problem.silos, sf.PVI(rounds=6, local_steps=100))
    for site, mean in problem.mean.items():
        sd = problem.sd[site]
        assert ((result.posterior[site].mean - mean).abs() < 0.15 * sd).all()
        assert ((result.posterior[site].sd / sd - 1).abs() < 0.1).all()
    assert result.aggregation["kind"] == "masked"


@pytest.mark.slow
def test_torch_optimisers_and_sequential_visits() -> None:
    problem = make_slopes()
    algorithm = sf.PVI(rounds=6, local_optimizer="adam", local_steps=200, **VISITS)  # type: ignore[arg-type]
    result = sf.fit(problem.model, problem.silos, algorithm, sf.Plain())
    assert ((result.posterior["beta"].mean - problem.mean["beta"]).abs() < 0.15 * problem.sd["beta"]).all()
    assert ((result.posterior["beta"].sd / problem.sd["beta"] - 1).abs() < 0.1).all()


@pytest.mark.slow
def test_a_run_without_rounds_stops_by_itself() -> None:
    problem = make_intercepts()
    result = sf.fit(problem.model, problem.silos, sf.PVI(local_steps=150), sf.Plain())
    assert result.converged
    assert result.rounds < 15
    assert result.metrics["last_change_sd"] < 0.05


def test_masked_sums_give_the_same_as_plain_ones() -> None:
    silos, _ = make_regression((7, 30, 12))
    ends = []
    for sums in (sf.Plain(), sf.Masked()):
        world = build(REGRESSION, silos, sf.PVI(rounds=4, **EXACT), sums)  # type: ignore[arg-type]
        for _ in range(4):
            world.round()
        ends.append(world.state.q)
    assert not torch.equal(ends[0].precision, ends[1].precision)
    assert _close(ends[1], ends[0], 1e-5)  # steps of 2^-20 of an sd and less


LOSSES = [
    {"lost_before": ("silo-1",)},
    {"lost_after": ("silo-2",)},
    {"lost_before": ("silo-1", "silo-3")},
    {},
    {"lost_after": ("silo-1",), "lost_before": ("silo-2",)},
    {},
]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        VISITS,
        pytest.param({"schedule": "asynchronous", "buffer": 3}, marks=pytest.mark.slow),
    ],
)
def test_q_is_the_prior_times_the_sites_whatever_gets_lost(options: dict[str, Any]) -> None:
    """Broadcasts that do not arrive, answers that do not arrive, silos that are away for a while."""
    silos, exact = make_regression((7, 30, 12, 20))
    world = build(REGRESSION, silos, sf.PVI(rounds=100, **EXACT, **options))
    for losses in LOSSES:
        try:
            world.round(**losses)
        except sf.SecureFVIError:
            assert options  # a cohort of which nobody answered
        assert _close(world.product(), world.state.q, 1e-10)
    for _ in range(40):
        world.round()
        assert _close(world.product(), world.state.q, 1e-10)
    assert _close(world.state.q, exact, 1e-4)


def test_a_site_follows_the_sum_only_if_the_server_used_it() -> None:
    """The control of the test above: sites that took every change for used would not multiply to q."""
    silos, _ = make_regression((7, 30, 12))
    world = build(REGRESSION, silos, sf.PVI(rounds=10, damping=1.0, **EXACT))  # type: ignore[arg-type]
    world.round(lost_after=("silo-2",))
    sent = world.engine.silos["silo-2"].pending.local.change
    assert float(sent.precision.abs().max()) > 1
    assert not _close(world.product().plus(sent), world.state.q, 1e-3)
    assert _close(world.product(), world.state.q, 1e-10)


@pytest.mark.slow
def test_damping_keeps_q_proper_with_20_heterogeneous_silos() -> None:
    """Each silo sees one label and its own direction of the covariates; the largest damping is asked for."""
    rng = torch.Generator().manual_seed(3)
    silos = []
    for j in range(20):
        x = torch.randn(6, 4, generator=rng) * 0.3 + 2 * torch.randn(4, generator=rng)
        silos.append({"x": x, "y": torch.full((6,), float(j % 2))})
    model = sf.FederatedModel(logistic, "row")
    for damping in (1.0, "auto"):
        world = build(model, silos, sf.PVI(rounds=12, damping=damping, local_steps=40))  # type: ignore[arg-type]
        for _ in range(12):
            world.round()
            assert world.state.q.proper
            assert _close(world.product(), world.state.q, 1e-8)
        if damping == "auto":
            assert float(world.state.moved.max()) < 1.0


def test_an_improper_step_is_cut_back() -> None:
    """A change that would take away more precision than q has is taken in part, and the silos are told which part."""
    silos, _ = make_regression((5, 5, 5))
    world = build(REGRESSION, silos, sf.PVI(rounds=9, damping=1.0, **EXACT))  # type: ignore[arg-type]
    message = world.server.program.broadcast(world.state, 1, 0)
    bad = Natural(torch.zeros(3), -10 * world.state.q.precision)
    stated = bad.pack() * world.server.program.families.per_unit(message.tensors["units"])  # type: ignore[attr-defined]
    total = torch.cat([stated, torch.tensor([0.0, 15.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0])]).numpy()
    after, step = world.server.program.update(world.state, message, total, 1.0)
    assert after.q.proper
    assert step.learning_rate == 1 / 16
    assert (after.kept == 1 / 16).all()
    assert (after.took == 1).all()


def test_a_silo_with_an_improper_cavity_tempers_it_says_so_and_comes_back() -> None:
    """Silo 2's site is made so negative that silo 1's cavity is -0.5 times its own site; q stays the product of sites.
    The answers are exact whatever the cavity, so that the run ends at the posterior, and only then is it at rest."""
    silos, exact = make_regression((5, 5, 5))
    world = build(REGRESSION, silos, sf.PVI(damping=1.0, **EXACT))  # type: ignore[arg-type]
    world.round()
    sites = {}
    for name, silo in world.engine.silos.items():
        box: Any = silo
        box.settle(world.server.state.accepted)
        message = world.server.program.broadcast(world.state, 2, {})
        box.local = box.program._settled(message, box.local, name)
        sites[name] = box.local.site
    bad = world.state.q.minus(sites["silo-1"]).precision + 0.5 * sites["silo-1"].precision
    less = Natural(torch.zeros(3, dtype=bad.dtype), -bad)
    other: Any = world.engine.silos["silo-2"]
    (part,) = other.local.parts
    other.local = other.local._replace(parts=(part._replace(site=part.site.plus(less)),))
    spoilt = world.state._replace(q=world.state.q.plus(less), stepped=torch.zeros(3))
    world.server.state = world.server.state._replace(algorithm=spoilt)
    assert world.state.q.proper
    assert not world.state.q.minus(sites["silo-1"]).proper
    world.round()
    assert world.state.last.tempered >= 1
    assert not world.server.program.at_rest(world.state)  # type: ignore[attr-defined]
    for _ in range(3):
        world.round()
    assert world.state.last.tempered == 0
    assert world.server.program.at_rest(world.state)  # type: ignore[attr-defined]
    assert _close(world.state.q, exact, 1e-6)


@pytest.mark.slow
def test_resumed_run_ends_where_the_whole_one_does(tmp_path: Path) -> None:
    problem = make_clinics()
    algorithm = sf.PVI(rounds=4, local_steps=20)
    whole = sf.fit(problem.model, problem.silos, algorithm, sf.Plain(), compile=False)

    class _Stop(Exception):
        pass

    def stop(progress: sf.Progress) -> None:
        if progress.round == 2:
            raise _Stop

    options: dict[str, Any] = {"checkpoint_dir": tmp_path, "checkpoint_seconds": 0.0, "compile": False}
    with pytest.raises(_Stop):
        sf.fit(problem.model, problem.silos, algorithm, sf.Plain(), on_round=stop, **options)
    resumed = sf.fit(problem.model, problem.silos, algorithm, sf.Plain(), resume=True, **options)
    assert torch.equal(resumed.posterior["mu"].mean, whole.posterior["mu"].mean)
    assert torch.equal(resumed.posterior["mu"].sd, whole.posterior["mu"].sd)


def _scaled(y: Tensor) -> None:
    """A prior that is no Gaussian in unconstrained space, on a scale."""
    mu = pyro.sample("mu", dist.StudentT(4.0, 0.0, 2.0))
    scale = pyro.sample("scale", dist.Gamma(3.0, 2.0))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Normal(mu, scale), obs=y)


def _wide(y: Tensor) -> None:
    """Thousands of weights and a half normal scale."""
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    weights = pyro.sample("weights", dist.Normal(torch.zeros(2000), 1.0).to_event(1))
    with pyro.plate("records", len(y)):
        pyro.sample("y", dist.Normal(weights.sum(-1), scale), obs=y)


def test_a_prior_whose_curvature_does_not_fit_is_refused() -> None:
    model = sf.FederatedModel(_wide, "records")
    with pytest.raises(InputError, match=r"prior of the 2001 global dimensions is not Gaussian.*log-normal"):
        sf.fit(model, [{"y": torch.zeros(3)}] * 3, sf.PVI(rounds=1), compile=False)


@pytest.mark.slow
def test_priors_that_are_not_gaussian_have_their_own_site() -> None:
    """Against global VI of the same family (SFVI), 0.1 posterior sd."""
    rng = torch.Generator().manual_seed(5)
    silos = [{"y": 1.0 + 1.3 * torch.randn(n, generator=rng)} for n in (4, 9, 6)]
    model = sf.FederatedModel(_scaled, "row")
    reference = sf.fit(model, silos, sf.SFVI(iterations=3000, schedule="cosine"), sf.Plain())
    result = sf.fit(model, silos, sf.PVI(rounds=10, local_steps=200), sf.Plain())
    for site, (mean, sd) in reference.posterior.items():
        assert (result.posterior[site].mean - mean).abs() < 0.1 * sd
        assert (result.posterior[site].sd / sd - 1).abs() < 0.1


@pytest.mark.slow
def test_local_posterior_is_relative_to_the_mean_it_was_fitted_at() -> None:
    """Intercepts given mu: (0.49 * 3 (ybar - mu)) / (0.25 + 3 * 0.49); draws, 4 standard errors."""
    problem = make_intercepts()
    result = sf.fit(problem.model, problem.silos, sf.PVI(rounds=4, local_steps=200), sf.Plain())
    draws = result.local["silo-2"].sample(4000)["b"]
    shrink = 3 * 0.49 / (0.25 + 3 * 0.49)
    expected = shrink * (problem.silos[1]["y"].mean(1) - problem.mean["mu"])
    error = draws.std(0) / 4000**0.5
    assert ((draws.mean(0) - expected).abs() < 4 * error + 0.02).all()


@pytest.mark.slow
def test_theta_is_learned_by_empirical_bayes() -> None:
    silos = make_intercepts().silos
    result = sf.fit(sf.FederatedModel(unknown_tau, "person"), silos, sf.PVI(rounds=30, local_steps=40), sf.Plain())
    best = likeliest_tau(torch.cat([s["y"] for s in silos]))
    assert result.theta["tau"].item() == pytest.approx(best, rel=0.15)


@pytest.mark.slow
def test_each_silo_keeps_its_own_encoder() -> None:
    torch.manual_seed(0)
    problem = make_intercepts()
    amortised = sf.Amortised(torch.nn.Linear(4, 2), features=lambda rows: rows["y"], see_global=True)
    result = sf.fit(problem.model, problem.silos, sf.PVI(rounds=5, local_steps=200, local_family=amortised), sf.Plain())
    assert (result.posterior["mu"].mean - problem.mean["mu"]).abs() < 0.15 * problem.sd["mu"]
    assert not result.variational.theta
    assert result.local["silo-1"].sample(3)["b"].shape == (3, 7)


@pytest.mark.slow
def test_minibatches_of_the_local_fit() -> None:
    problem = make_intercepts()
    algorithm = sf.PVI(rounds=4, local_optimizer="adam", sampling_rate=0.5, local_steps=200)
    result = sf.fit(problem.model, problem.silos, algorithm, sf.Plain())
    assert (result.posterior["mu"].mean - problem.mean["mu"]).abs() < 0.3 * problem.sd["mu"]


def test_silo_privacy_keeps_sites_and_q_together() -> None:
    """What counts as a silo's change is what it released: clipped, and with its own noise."""
    silos, _ = make_regression((20, 20, 20, 20))
    privacy = sf.SiloDP(noise_multiplier=0.1, clipping_norm=5.0, noise="silo")
    algorithm = sf.PVI(rounds=5, damping=0.5, **EXACT)  # type: ignore[arg-type]
    server, engine, _ = build_parties(REGRESSION, silos, algorithm, sf.Plain(), privacy=privacy, noise_key=b"k" * 32)
    world = World(server, engine)
    for _ in range(5):
        world.round()
        assert world.state.q.proper
        assert _close(world.product(), world.state.q, 1e-8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "sequential"}, "shows the server each silo's change"),
        ({"schedule": "random"}, "schedule 'random' is unknown"),
        ({"family": "low_rank"}, "has no sites"),
        ({"damping": 1.5}, "damping must be 'auto' or lie in"),
        ({"local_optimizer": "newton"}, "optimizer 'newton' is unknown"),
        ({"local_optimizer": "natural", "learning_rate": 2.0}, "at most 1"),
        ({"rounds": 0}, "rounds must be a whole number"),
        ({"sampling_rate": 0.0}, "sampling_rate must lie"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sf.PVI(**options)


def test_what_cannot_be_done_is_refused_before_it_begins() -> None:
    problem = make_intercepts()
    with pytest.raises(InputError, match="without local latents"):
        sf.fit(problem.model, problem.silos, sf.PVI(rounds=1, **EXACT))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="without local latents"):
        sf.fit(problem.model, problem.silos, sf.PVI(rounds=1, virtual_clients=2))
    silos = [{"x": torch.ones(5, 1), "y": torch.ones(5)}] * 3
    model = sf.FederatedModel(logistic, "row")
    with pytest.raises(InputError, match="not quadratic"):
        sf.fit(model, silos, sf.PVI(rounds=1, **EXACT))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="to show the server each silo's own term"):
        sf.fit(model, silos, sf.PVI(rounds=3, **VISITS), sf.Masked())  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_quadratic_is_known_as_one_in_either_precision(dtype: torch.dtype) -> None:
    """At 50 scales: rounding in float32 moves second derivatives more than float64's tolerance allows. A cubic or
    quartic term of a thousandth is seen in both."""
    at, bent = torch.zeros(100, dtype=torch.float64), 0
    for scale in torch.linspace(-3.0, 0.0, 50, dtype=dtype).exp():

        def log_normal(z: Tensor, power: int, scale: Tensor = scale) -> Tensor:
            x = z.to(dtype) / scale
            return (-0.5 * x.square() - (1e-3 * x**power if power else 0.0)).sum().double()

        found = quadratic(lambda z: log_normal(z, 0), at, False, dtype)
        assert found is not None
        torch.testing.assert_close(found.precision, torch.full_like(at, float(scale)) ** -2, rtol=1e-5, atol=0)
        bent += sum(quadratic(lambda z, p=power: log_normal(z, p), at, False, dtype) is None for power in (3, 4))
    assert bent == 100


def test_moments_and_natural_parameters_are_inverse() -> None:
    rng = torch.Generator().manual_seed(0)
    root = torch.randn(4, 4, generator=rng)
    covariance, mean = root @ root.T + torch.eye(4), torch.randn(4, generator=rng)
    q = from_moments(mean, covariance)
    torch.testing.assert_close(q.mean(), mean)
    torch.testing.assert_close(q.covariance(), covariance)


@pytest.mark.filterwarnings("ignore:pvi ended after 1 rounds")
@pytest.mark.slow
def test_steps_one_by_one_are_those_of_a_block_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager and then traced, in minibatches. Control: with another seed no bit is the same."""
    silos, _ = make_regression((20, 30, 25))
    calls: list[int] = []
    begin, step = StepBlock.__init__, StepBlock._run

    def counted(self: StepBlock, *args: Any) -> Any:
        calls.append(len(Inputs(*args[len(Carry._fields) :]).eps))
        return step(self, *args)

    def fitted(one_by_one: bool, seed: int = 2) -> Tensor:
        def made(self: StepBlock, *args: Any) -> None:
            begin(self, *args)
            self._one_by_one = self._one_by_one and one_by_one

        calls.clear()
        monkeypatch.setattr(StepBlock, "__init__", made)
        monkeypatch.setattr(StepBlock, "_run", counted)
        algorithm = sf.PVI(rounds=1, local_steps=30, sampling_rate=0.5)
        result = sf.fit(REGRESSION, silos, algorithm, sf.Plain(), seed=seed, compile=False)
        assert (max(calls) == 1) == one_by_one
        return torch.cat([result.posterior["beta"].mean, result.posterior["beta"].sd])

    found = fitted(True)
    assert torch.equal(found, fitted(False))
    assert not torch.isclose(found, fitted(True, seed=3), rtol=1e-12).any()
