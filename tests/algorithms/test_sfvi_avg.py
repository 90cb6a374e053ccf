"""SFVI-Avg: merges are barycenters, local runs are scaled and anchored right, posteriors come near the exact one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import Conjugate, make_clinics, make_intercepts, make_slopes, unknown_tau
from pvi_world import REGRESSION, make_regression
from torch import Tensor

import secure_fvi as sf
from secure_fvi import silo as silo_module
from secure_fvi.algorithms.base import choose_cohort
from secure_fvi.algorithms.sfvi_avg import (
    Gaussian,
    Point,
    SFVIAvgProgram,
    after_iteration,
    bures_term,
    full_parameters,
    trusted_barycenter,
)
from secure_fvi.algorithms.structured import Batch
from secure_fvi.engines.local import LocalEngine
from secure_fvi.errors import AggregationError, InputError
from secure_fvi.families import conditional as gaussian_rows
from secure_fvi.fitting import build_parties
from secure_fvi.models.six_cities import PROGRAM as SIX_CITIES
from secure_fvi.server import Server


def _pooled(problem: Conjugate) -> list[dict[str, Tensor]]:
    return [{name: torch.cat([s[name] for s in problem.silos]) for name in problem.silos[0]}]


def _parties(problem: Conjugate, algorithm: sf.SFVIAvg, aggregation: Any = None) -> tuple[Server, LocalEngine]:
    server, engine, _ = build_parties(problem.model, problem.silos, algorithm, aggregation or sf.Plain(), compile=False)
    return server, engine


def _run_rounds(server: Server, engine: LocalEngine, rounds: int) -> None:
    while server.rounds < rounds and not engine.run(server.round()).finished:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_intercepts, make_slopes])
def test_one_silo_recovers_the_conjugate_posterior(make: Callable[[], Conjugate]) -> None:
    """Nothing is averaged: 0.1 posterior sd in the mean, 10% in the sd; it stops by itself."""
    problem = make()
    result = sf.fit(problem.model, _pooled(problem), sf.SFVIAvg(local_steps=500), sf.Plain(), compile=True)
    assert result.converged
    for site, mean in problem.mean.items():
        assert ((result.posterior[site].mean - mean).abs() < 0.1 * problem.sd[site]).all()
        assert ((result.posterior[site].sd / problem.sd[site] - 1).abs() < 0.1).all()


@pytest.mark.slow
def test_uneven_silos_come_near_the_posterior_and_know_their_own_latents() -> None:
    """Silos of 7, 40 and 13 under masks: 0.25 posterior sd. The latents refer to the last merge, not to their own q."""
    problem = make_intercepts()
    result = sf.fit(problem.model, problem.silos, sf.SFVIAvg(local_steps=250), compile=True)
    assert (result.posterior["mu"].mean - problem.mean["mu"]).abs() < 0.25 * problem.sd["mu"]
    assert (result.posterior["mu"].sd / problem.sd["mu"] - 1).abs() < 0.15
    assert result.metrics["records"] == 60
    kept = 0.49 / (0.49 + 0.25 / 3)
    for number, silo in enumerate(problem.silos):
        exact = kept * (silo["y"].mean(1) - problem.mean["mu"])
        drawn = result.local[f"silo-{number + 1}"].sample(4000)["b"].mean(0)
        assert ((drawn - exact).abs() < 0.08).all()  # sd of a posterior 0.29, of a mean of draws 0.005


@pytest.mark.usefixtures("few_draws")
@pytest.mark.slow
def test_final_local_steps_fit_latents_to_the_last_merge_and_move_nothing_else() -> None:
    """After one round of five local steps they are far from their exact conditionals; 300 final steps take them there.
    Posterior sds: 0.29."""
    problem = make_intercepts()

    def fit(steps: int) -> tuple[Tensor, float]:
        algorithm = sf.SFVIAvg(rounds=1, local_steps=5, final_local_steps=steps, tolerance=0.0)
        with pytest.warns(sf.SecureFVIWarning, match="without converging"):
            result = sf.fit(problem.model, problem.silos, algorithm, sf.Plain(), compile=False)
        kept, mean = 0.49 / (0.49 + 0.25 / 3), result.posterior["mu"].mean
        drawn = [result.local[f"silo-{j + 1}"].sample(2000)["b"].mean(0) for j in range(len(problem.silos))]
        exact = [kept * (silo["y"].mean(1) - mean) for silo in problem.silos]
        return result.variational.eta["loc"], float((torch.cat(drawn) - torch.cat(exact)).abs().max())

    (before, far), (after, near) = fit(0), fit(300)
    assert torch.equal(before, after)
    assert far > 0.5
    assert near < 0.15


@pytest.mark.parametrize("weights", ["records", "equal"])
@pytest.mark.slow
def test_weights_are_those_asked_for(weights: str) -> None:
    """At a constant rate silos go to their own optimum, the silo's mean; the merge averages those.

    The smallest silo is shifted, so that the two ways of averaging are 0.3 apart. What is left of the way to go
    halves from round to round: 0.03 after five.
    """
    made = make_intercepts()
    silos = [{"y": s["y"] + (1.5 if n == 0 else 0.0)} for n, s in enumerate(made.silos)]
    problem = made._replace(silos=silos)
    server, engine = _parties(problem, sf.SFVIAvg(local_steps=300, decay=1.0, weights=weights))  # type: ignore[arg-type]
    _run_rounds(server, engine, 5)
    means = torch.stack([s["y"].mean() for s in silos])
    counts = torch.tensor([float(len(s["y"])) for s in silos])
    by = {"records": float(counts @ means / counts.sum()), "equal": float(means.mean())}
    assert abs(by["records"] - by["equal"]) > 0.3
    assert float(server.state.algorithm.eta["loc"][0]) == pytest.approx(by[weights], abs=0.03)


# ---- the merge ----


def _own_gaussians(engine: LocalEngine, family: Any) -> list[Gaussian]:
    """What the silos ended their local runs with; only a test may look."""
    found = []
    for silo in engine.silos.values():
        assert silo.pending is not None
        local = silo.pending.local
        found.append(Gaussian(local.anchor.numpy(), local.covariance))
    return found


def test_the_full_merge_is_the_barycenter_of_the_silos() -> None:
    """Mean, and covariance after eight sums, against POT to 1e-6; masked sums of 64 bits."""
    problem = make_slopes()
    server, engine = _parties(problem, sf.SFVIAvg(local_steps=60, bures_iterations=8), sf.Masked())
    _run_rounds(server, engine, 1)
    own = _own_gaussians(engine, server.program)
    sizes = np.array([len(s["x"]) for s in problem.silos], float)
    reference = trusted_barycenter(own, sizes / sizes.sum())
    merged = server.program.posterior(server.state.algorithm)
    np.testing.assert_allclose(merged.eta["loc"].numpy(), reference.mean, atol=1e-6)
    covariance = merged.family.covariance(merged.eta).numpy()
    np.testing.assert_allclose(covariance, reference.covariance, rtol=1e-6, atol=1e-8)
    assert np.linalg.norm(own[0].covariance - own[1].covariance) > 1e-4  # they did differ
    assert server.state.last_index == 1 + 8  # the count, and a sum an iteration


def test_one_iteration_a_round_has_the_same_fixed_point() -> None:
    """Round after round with silos that do not move: one sum each, and the barycenter to 1e-6."""
    rng = np.random.default_rng(0)
    factors = rng.normal(size=(3, 4, 4))
    own = [Gaussian(np.zeros(4), f @ f.T + 0.2 * np.eye(4)) for f in factors]
    weights = np.array([7, 40, 13])
    covariance = 0.01 * np.eye(4)
    for _ in range(30):
        terms = [bures_term(g.covariance, int(w), covariance) for g, w in zip(own, weights, strict=True)]
        covariance = after_iteration(covariance, np.sum(terms, 0) / weights.sum())
        eta = full_parameters(torch.zeros(4), covariance)
    reference = trusted_barycenter(own, weights / weights.sum())
    np.testing.assert_allclose(covariance, reference.covariance, rtol=1e-6, atol=1e-7)
    from secure_fvi.families import Full

    np.testing.assert_allclose(Full(4).covariance(eta).numpy(), covariance, rtol=1e-10)


@pytest.mark.later
def test_a_server_names_at_which_covariance_silos_are_asked() -> None:
    """The same one for all: by the q that it sends, and within a round by what it says that the total was, which each
    silo takes as it is. The control, an honest server's: it follows from the total."""
    problem, chosen = make_intercepts(), np.array([[1e-3]])
    server, engine = _parties(problem, sf.SFVIAvg(local_steps=1, bures_iterations=3), sf.Masked())

    def asked() -> Any:
        first, *others = [silo.pending.local.at for silo in engine.silos.values()]  # type: ignore[union-attr]
        assert all(np.array_equal(first, other) for other in others)
        return first

    while server.state.algorithm.phase != "bures":
        engine.run(server.round())
    honest = server.state.algorithm.merging.covariance
    engine.run(server.round())
    np.testing.assert_allclose(asked(), honest, rtol=1e-6)
    state = server.state.algorithm
    told = state.merging._replace(root=bures_term(chosen, 1, asked()))
    server.state = server.state._replace(algorithm=state._replace(merging=told))
    engine.run(server.round())
    np.testing.assert_allclose(asked(), chosen, rtol=1e-6, atol=1e-12)


def test_the_diagonal_merge_averages_means_and_sds() -> None:
    problem = make_slopes()
    silo_ends: dict[str, tuple[Tensor, Tensor]] = {}
    server, engine = _parties(problem, sf.SFVIAvg(local_steps=40, family="diagonal"))
    program = next(iter(engine.silos.values())).program
    plain_run = program.run  # type: ignore[attr-defined]

    def watched(*args: Any) -> Any:
        end, average = plain_run(*args)
        silo_ends[args[-1].silo] = (average.shared["eta/loc"], average.shared["eta/log_scale"].exp())
        return end, average

    program.run = watched  # type: ignore[attr-defined]
    _run_rounds(server, engine, 1)
    w = torch.tensor([float(s.size) for s in engine.silos.values()])
    w = w / w.sum()
    merged = server.program.posterior(server.state.algorithm).eta
    for at, value in enumerate((merged["loc"], merged["log_scale"].exp())):
        expected = sum(wj * silo_ends[name][at] for wj, name in zip(w, engine.silos, strict=True))
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.usefixtures("untraced")
@pytest.mark.slow
def test_masked_equals_plain() -> None:
    ends = []
    for aggregation in (sf.Plain(), sf.Masked()):
        server, engine = _parties(make_slopes(), sf.SFVIAvg(local_steps=8, bures_iterations=2), aggregation)
        _run_rounds(server, engine, 2)
        ends.append(server.state.algorithm.eta)
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-6, atol=1e-6)


class _Lossy(LocalEngine):
    """Delivers nothing to the silos in `away`."""

    away: tuple[str, ...] = ()

    def exchange(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        return super().exchange({s: m for s, m in messages.items() if s not in self.away})


@pytest.mark.later
def test_a_silo_lost_in_the_first_sum_of_a_merge_has_no_weight_in_the_rest() -> None:
    problem = make_slopes()
    server, engine = _parties(problem, sf.SFVIAvg(local_steps=60, bures_iterations=8))
    lossy = _Lossy(engine.silos)
    lossy.run(server.round())  # the count
    lossy.away = ("silo-2",)
    lossy.run(server.round())
    lossy.away = ()
    _run_rounds(server, lossy, 1)
    there = [engine.silos[name].pending for name in ("silo-1", "silo-3")]
    own = [Gaussian(p.local.anchor.numpy(), p.local.covariance) for p in there if p is not None]
    reference = trusted_barycenter(own, np.array([7, 13]) / 20)
    merged = server.program.posterior(server.state.algorithm)
    np.testing.assert_allclose(merged.eta["loc"].numpy(), reference.mean, atol=1e-6)
    np.testing.assert_allclose(merged.family.covariance(merged.eta).numpy(), reference.covariance, rtol=1e-6, atol=1e-8)
    assert server.state.algorithm.records == 60


@pytest.mark.usefixtures("few_draws", "untraced")
@pytest.mark.slow
def test_latents_refer_to_the_last_merge_where_the_last_sum_is_not_made() -> None:
    """A silo is lost there, so that nobody's answer is used. The control is that silo, which did not hear of the last
    q."""
    server, engine = _parties(make_slopes(), sf.SFVIAvg(rounds=1, local_steps=20, tolerance=0.0))
    lossy = _Lossy(engine.silos)
    while server.state.algorithm.phase != "finish":
        lossy.run(server.round())
    lossy.away = ("silo-2",)
    assert lossy.run(server.round()).finished
    merged = server.program.posterior(server.state.algorithm).eta["loc"]
    for name, silo in engine.silos.items():
        silo.settle(server.state.accepted)
        assert torch.equal(silo.local.anchor, merged) is (name != "silo-2")


@pytest.mark.slow
def test_a_merge_of_a_drawn_cohort_is_that_cohorts() -> None:
    """Three of six silos a round, at a constant rate: the mean of their own optima, within 0.02.

    Those means differ by far more from round to round (0.1 and more), so a merge knows the silos drawn only.
    """
    problem = make_intercepts()
    silos = [{"y": part} for part in torch.split(_pooled(problem)[0]["y"], 10)]
    algorithm = sf.SFVIAvg(local_steps=300, participation=0.5, decay=1.0)
    server, engine, _ = build_parties(problem.model, silos, algorithm, sf.Plain(), compile=False)
    own = {name: float(data["y"].mean()) for name, data in zip(engine.silos, silos, strict=True)}
    found, expected = [], []
    for round_ in range(5):
        _run_rounds(server, engine, round_ + 1)
        cohort = choose_cohort(tuple(own), 3, 0, round_)
        found.append(float(server.state.algorithm.eta["loc"][0]))
        expected.append(sum(own[name] for name in cohort) / 3)
    assert found[2:] == pytest.approx(expected[2:], abs=0.02)
    assert max(expected[2:]) - min(expected[2:]) > 0.1
    assert server.state.algorithm.records == 60


# ---- local runs ----


def _problem(made: Conjugate) -> Any:
    server, _ = _parties(made, sf.SFVIAvg())
    return server.problem


def test_scaling_stands_for_copies_of_the_records() -> None:
    """One step at N / N_j = 2 moves eta_G as a step at 1 does whose records all occur twice; at 1 it does not."""
    made = make_slopes(sizes=(5,))
    problem = _problem(made)
    program = SFVIAvgProgram(sf.SFVIAvg(optimizer="sgd", learning_rate=1e-3), problem)
    rng = torch.Generator().manual_seed(0)
    eta = program.family.init(problem.start.z_global)
    shared = {f"eta/{name}": value for name, value in eta.items()}
    eps, eps_record = torch.randn(2, generator=rng), torch.randn(1, 5, 2, generator=rng)
    record = program.local_family.init(torch.randn(5, 2, generator=rng))

    def step(copies: float, times: int) -> dict[str, Tensor]:
        rows = {name: value.repeat(times, 1) for name, value in made.silos[0].items()}
        latents = {n: v.repeat(times, *[1] * (v.dim() - 1)) for n, v in record.items()}
        at = Point(shared, program.optimizer.init(shared), program.fresh(latents, {}))
        batch = Batch(rows, torch.ones(5 * times), eps_record.repeat(1, times, 1), torch.zeros(1, 0))
        after, _ = program.step_function(at, batch, eps, torch.tensor([copies, 1.0, 1.0]))
        return after.shared

    scaled, copied, plain = step(2.0, 1), step(1.0, 2), step(1.0, 1)
    for name, value in copied.items():
        torch.testing.assert_close(scaled[name], value, rtol=1e-10, atol=1e-12)
    assert (scaled["eta/loc"] - plain["eta/loc"]).abs().max() > 1e-4


@pytest.mark.slow
def test_anchoring_leaves_conditionals_as_they_were() -> None:
    """q(Z_S | Z_G) and q(Z_i | Z_G, Z_S) at a fixed point, before and after mu_G has moved."""
    server, engine = _parties(make_clinics(), sf.SFVIAvg(local_steps=80))
    _run_rounds(server, engine, 1)
    silo = engine.silos["silo-2"]
    silo.settle(server.state.accepted)
    program: Any = silo.program
    before = silo.local
    after = program.anchored(before, before.anchor + 0.7)
    assert before.silo["coupling"].abs().min() > 0.01
    assert before.record["coupling"].abs().mean() > 0.01
    z_global, z_silo = torch.tensor([0.3]), torch.tensor([-0.4])

    def moments(local: Any) -> list[Tensor]:
        shift = z_global - local.anchor
        own = program.silo_family.moments(local.silo, {}, {}, z_global, shift)
        both = torch.cat([shift, z_silo - local.silo["loc"][0]])
        records = program.local_family.moments(local.record, {}, {}, z_global, both)
        return [gaussian_rows.transform(m, torch.ones_like(m["loc"])) for m in (own, records)]

    for old, new in zip(moments(before), moments(after), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-12, atol=1e-12)
    assert (after.record["loc"] - before.record["loc"]).abs().max() > 0.01


@pytest.mark.slow
def test_the_papers_text_runs_off_on_six_cities() -> None:
    """Entropy left unscaled: omega leaves for beyond 1 (posterior -0.68, sd 0.04); scaled, it stays within 0.2."""
    records = SIX_CITIES.load().records
    order = torch.randperm(537, generator=torch.Generator().manual_seed(0))
    silos = [{name: value[at] for name, value in records.items()} for at in order.split([300, 237])]
    omega = {}
    for scaled in (True, False):
        algorithm = sf.SFVIAvg(local_steps=1000, scale_entropy=scaled)
        server, engine, _ = build_parties(SIX_CITIES.model, silos, algorithm, sf.Plain(), compile=True)
        _run_rounds(server, engine, 3)
        omega[scaled] = float(server.state.algorithm.eta["loc"][4])
    assert abs(omega[True] + 0.68) < 0.2
    assert omega[False] > 1.0


@pytest.mark.slow
def test_theta_is_averaged_near_what_sfvi_finds() -> None:
    rows = _pooled(make_intercepts())[0]["y"]
    silos = [{"y": part} for part in rows.split(30)]
    model = sf.FederatedModel(unknown_tau, "person")
    result = sf.fit(model, silos, sf.SFVIAvg(local_steps=250), sf.Plain(), compile=True)
    reference = sf.fit(model, silos, sf.SFVI(iterations=2000), sf.Plain(), compile=False)
    assert result.theta["tau"].item() == pytest.approx(reference.theta["tau"].item(), rel=0.06)
    assert reference.theta["tau"].item() > 0.5  # it started at 0.3


# ---- the run ----


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("options", [{}, {"bures_iterations": 3}])
@pytest.mark.slow
def test_a_killed_run_ends_where_an_unbroken_one_does(options: dict[str, Any], tmp_path: Path) -> None:
    """Stopped between phases after the second round and resumed from the checkpoint: the same bits."""
    problem = make_clinics()
    algorithm = sf.SFVIAvg(rounds=4, local_steps=10, tolerance=10.0, **options)

    class _KilledError(Exception):
        pass

    calls = 0

    def kill(_: sf.Progress) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise _KilledError

    def fit(**more: Any) -> sf.Result:
        with pytest.warns(sf.SecureFVIWarning):
            return sf.fit(problem.model, problem.silos, algorithm, compile=False, **more)

    whole = fit()
    keep = {"checkpoint_dir": tmp_path, "checkpoint_seconds": 0.0}
    with pytest.raises(_KilledError):
        sf.fit(problem.model, problem.silos, algorithm, compile=False, on_round=kill, **keep)  # type: ignore[arg-type]
    resumed = fit(resume=True, **keep)
    assert resumed.rounds == whole.rounds == 4
    for name, value in whole.variational.eta.items():
        assert torch.equal(resumed.variational.eta[name], value)


@pytest.mark.slow  # of another algorithm: test_sfvi.py
@pytest.mark.usefixtures("few_draws")
def test_a_run_that_has_not_settled_says_so() -> None:
    problem = make_intercepts()
    with pytest.warns(sf.SecureFVIWarning, match="without converging"):
        result = sf.fit(problem.model, problem.silos, sf.SFVIAvg(rounds=1, local_steps=50), sf.Plain())
    assert not result.converged
    assert result.metrics["movement"] > 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "low_rank"}, "has no barycenter"),
        ({"family": "lowrank"}, "family 'lowrank' is unknown"),
        ({"weights": "size"}, "choose records or equal"),
        ({"rounds": 0}, "rounds must be a whole number of at least 1"),
        ({"local_steps": 1.5}, "local_steps must be a whole number"),
        ({"final_local_steps": -1}, "final_local_steps must be a whole number"),
        ({"total_records": 0}, "total_records must be"),
        ({"decay": 0.0}, "decay must lie in"),
        ({"tolerance": -1.0}, "tolerance must be at least 0"),
        ({"scale_entropy": False, "importance_samples": 5}, "importance_samples = 1 only"),
        ({"optimizer": "nadam"}, "choose one of adam"),
        ({"optimizer": "adm"}, "optimizer 'adm' is unknown"),
        ({"participation": 0.0}, "participation must lie in"),
        ({"bound": -1.0}, "bound must lie in"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sf.SFVIAvg(**options)


# ---- privacy ----


@pytest.mark.slow  # noise and charge: test_every_algorithm.py, test_sfvi_avg_warm.py
def test_silo_privacy_noises_the_change() -> None:
    """Twelve silos, little noise: the run ends near the posterior, and every merge was charged."""
    problem = make_intercepts()
    silos = [{"y": part} for part in torch.split(_pooled(problem)[0]["y"], 5)]
    algorithm = sf.SFVIAvg(
        rounds=6, local_steps=200, family="diagonal", weights="equal", total_records=60, tolerance=10.0
    )
    privacy = sf.SiloDP(noise_multiplier=0.02, clipping_norm=1.0, noise="silo")
    with pytest.warns(sf.SecureFVIWarning):
        result = sf.fit(
            problem.model, silos, algorithm, sf.Masked(), privacy, compile=False, batch_silos=True, noise_key=b"n" * 32
        )
    assert (result.posterior["mu"].mean - problem.mean["mu"]).abs() < 0.5 * problem.sd["mu"]
    assert result.elbo is None
    assert result.metrics["records"] is None
    assert result.privacy is not None


@pytest.mark.parametrize(
    ("options", "privacy", "message"),
    [
        ({}, sf.RecordDP(epsilon=1.0), "takes no record privacy"),
        ({}, sf.SiloDP(epsilon=8.0), "family = 'diagonal'"),
        ({"family": "diagonal"}, sf.SiloDP(epsilon=8.0), "weights = 'equal'"),
        ({"family": "diagonal", "weights": "equal"}, sf.SiloDP(epsilon=8.0), "needs total_records"),
        (
            {"family": "diagonal", "weights": "equal", "final_local_steps": 10},
            sf.SiloDP(epsilon=8.0),
            "no broadcast follows the last merge",
        ),
    ],
)
def test_privacy_that_cannot_be_had_is_refused(options: dict[str, Any], privacy: Any, message: str) -> None:
    problem = make_intercepts()
    with pytest.raises(InputError, match=message):
        sf.fit(problem.model, problem.silos, sf.SFVIAvg(**options), privacy=privacy)


@pytest.mark.parametrize("named", [True, False])
def test_linear_algebra_of_numpy_fails_by_a_line_of_ours(named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a fit ran off, as PyTorch's does. The control knows PyTorch's error alone, and NumPy's comes out bare."""
    if not named:
        monkeypatch.setattr(silo_module, "_NOT_COMPUTED", (ArithmeticError, silo_module.LinAlgError))
    silos, error = make_regression((5, 6, 7))[0], AggregationError if named else np.linalg.LinAlgError
    words = (
        r"the model cannot be computed on its data in round \d+ \(LinAlgError\); rescale the data, lower learning_rate"
    )
    with pytest.raises(error, match=words if named else "did not converge"):
        sf.fit(REGRESSION, silos, sf.SFVIAvg(rounds=5, local_steps=3, learning_rate=1e3), sf.Plain(), compile=False)
