"""SFVI-Avg's options: the trusted barycenter, minibatches, and when a run may say that it has settled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from programs import Conjugate, make_clinics, make_intercepts, make_slopes
from torch import Tensor

import secure_fvi as sf
from secure_fvi.algorithms.sfvi_avg import (
    SETTLED,
    WATCHED,
    Factors,
    Point,
    SFVIAvgProgram,
    own_row,
    trusted_merge,
)
from secure_fvi.errors import AggregationError, InputError
from secure_fvi.families import Full, global_family
from secure_fvi.fitting import build_parties


def _after_rounds(problem: Conjugate, rounds: int, **options: Any) -> tuple[SFVIAvgProgram, Any]:
    algorithm = sf.SFVIAvg(**options)
    server, engine, _ = build_parties(problem.model, problem.silos, algorithm, sf.Plain(), compile=False)
    while server.rounds < rounds and not engine.run(server.round()).finished:
        pass
    assert isinstance(server.program, SFVIAvgProgram)
    return server.program, server.state.algorithm


# ---- the trusted barycenter ----


@pytest.mark.parametrize("family", [pytest.param("full", marks=pytest.mark.slow), "diagonal"])
@pytest.mark.parametrize("weights", ["records", pytest.param("equal", marks=pytest.mark.slow)])
@pytest.mark.later("records-diagonal")
def test_trusted_equals_secure(family: str, weights: str) -> None:
    """One merge of the same local runs; the secure path iterates 25 times. 1e-6: POT stops at moves below 1e-11."""
    options: dict[str, Any] = {"local_steps": 15, "family": family, "weights": weights}
    secure_iterations = 25 if family == "full" else 1
    _, trusted = _after_rounds(make_slopes(), 1, barycenter="trusted", **options)
    program, secure = _after_rounds(make_slopes(), 1, bures_iterations=secure_iterations, **options)
    torch.testing.assert_close(trusted.eta["loc"], secure.eta["loc"], rtol=1e-9, atol=1e-9)
    covariances = [program.family.covariance(state.eta) for state in (trusted, secure)]
    torch.testing.assert_close(*covariances, rtol=1e-6, atol=1e-9)
    if family == "full":  # one iteration of the secure path is not yet there
        _, once = _after_rounds(make_slopes(), 1, **options)
        assert not torch.allclose(program.family.covariance(once.eta), covariances[0], rtol=1e-3)


def _silos(rng: np.random.Generator, family: Any, weights: dict[str, int]) -> dict[str, Any]:
    """The total of a plain sum of random silos' rows."""
    total: dict[str, Any] = {}
    for silo, weight in weights.items():
        start = family.init(torch.zeros(family.n, dtype=torch.float64))
        eta = {name: value + torch.from_numpy(rng.normal(size=value.shape)) for name, value in start.items()}
        for name, value in own_row(family, eta, weight, silo, tuple(weights)).items():
            total[name] = total.get(name, 0) + value
    return total


def test_a_silo_that_is_lost_has_no_weight_in_the_trusted_merge() -> None:
    rng = np.random.default_rng(0)
    family = global_family("full", 3)
    all_three = _silos(rng, family, {"a": 5, "b": 20, "c": 10})
    without = {name: value.copy() for name, value in all_three.items()}
    for value in without.values():
        value[1] = 0
    found = trusted_merge(without, full=True)
    two = {name: value[[0, 2]] for name, value in all_three.items()}
    expected = trusted_merge(two, full=True)
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-12)
    np.testing.assert_allclose(found.covariance, expected.covariance, rtol=1e-12)
    assert not np.allclose(trusted_merge(all_three, full=True).mean, found.mean, atol=1e-3)
    with pytest.raises(AggregationError, match="add up to nothing"):
        trusted_merge({name: 0 * value for name, value in all_three.items()}, full=True)


@pytest.mark.parametrize(
    ("options", "aggregation", "privacy", "message"),
    [
        ({}, sf.Masked(), None, "hide it in name only"),
        ({}, sf.Homomorphic(), None, "Use a plain sum"),
        ({"family": "diagonal"}, sf.Plain(), sf.SiloDP(epsilon=8.0, noise="silo"), "barycenter = 'secure'"),
    ],
)
def test_a_trusted_barycenter_is_refused(options: Any, aggregation: Any, privacy: Any, message: str) -> None:
    problem = make_intercepts()
    algorithm = sf.SFVIAvg(barycenter="trusted", **options)
    with pytest.raises(InputError, match=message):
        sf.fit(problem.model, problem.silos, algorithm, aggregation, privacy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"barycenter": "pot"}, "choose secure or trusted"),
        ({"barycenter": "trusted", "bures_iterations": 2}, "leave bures_iterations at 1"),
        ({"sampling_rate": 0.0}, "sampling_rate must lie in"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sf.SFVIAvg(**options)


# ---- minibatches ----


@pytest.mark.slow
def test_minibatches_come_where_the_full_batch_does() -> None:
    """One silo, so that nothing is averaged: within 0.25 posterior sds of the exact mean at half the records a step.

    The noise of a batch of q N of N records is about sqrt((1 - q) / q) posterior sds of an unrelaxed gradient; the last
    rounds' rates, 0.2^5 of the first, average it over thousands of steps. Full batch: 0.1 (test_sfvi_avg).
    """
    problem = make_intercepts()
    rows = [{"y": torch.cat([s["y"] for s in problem.silos])}]
    algorithm = sf.SFVIAvg(local_steps=500, sampling_rate=0.5)
    result = sf.fit(problem.model, rows, algorithm, sf.Plain(), compile=True)
    assert result.converged
    assert (result.posterior["mu"].mean - problem.mean["mu"]).abs() < 0.25 * problem.sd["mu"]
    assert (result.posterior["mu"].sd / problem.sd["mu"] - 1).abs() < 0.15


@pytest.mark.slow
def test_a_batch_stands_for_all_records() -> None:
    """Steps on batches, scaled by 1 / q, have the full batch's as their mean: 5 standard errors of 300 batches.

    Plain gradient steps at the same eps; false alarm below 1e-5.
    """
    problem = make_slopes()
    algorithm = sf.SFVIAvg(sampling_rate=0.3, optimizer="sgd", learning_rate=1e-3)
    _, engine, _ = build_parties(problem.model, problem.silos, algorithm, sf.Plain(), compile=False)
    silo = engine.silos["silo-2"]
    program: Any = silo.program
    local = silo.local
    eta = program.family.init(local.anchor)
    shared = {f"eta/{name}": value for name, value in eta.items()}
    at = Point(shared, local.moments, local.latents)

    def step(batch: Any) -> Tensor:
        own = at._replace(own=at.own.taken(program.at(batch)))
        return program._call(own, silo.view, 0, batch, Factors(1.5, 1.0, 1.0))[0].shared["eta/loc"] - eta["loc"]

    whole = step(None)
    batches = torch.stack([step(program.drawn(key, silo.view)) for key in range(1, 301)])
    error = batches.std(0) / 300**0.5
    assert ((batches.mean(0) - whole).abs() < 5 * error).all()
    assert error.max() < 0.1 * whole.abs().max()  # so that a factor of q would be seen


@pytest.mark.later
def test_records_outside_a_batch_keep_their_state() -> None:
    """After one local step those in the batch have moved and counted a step, the rest have not."""
    problem = make_clinics()
    algorithm = sf.SFVIAvg(local_steps=1, sampling_rate=0.4, average_last=1.0)
    server, engine, _ = build_parties(problem.model, problem.silos, algorithm, sf.Plain(), compile=False)
    silo = engine.silos["silo-2"]
    before = silo.local
    engine.run(server.round())
    engine.run(server.round())
    assert silo.pending is not None
    after = silo.pending.local
    steps = after.record_moments["loc/step"].flatten()[: silo.size]
    moved = (after.record["loc"] != before.record["loc"]).any(-1)[: silo.size]
    assert set(steps.tolist()) == {0.0, 1.0}
    assert torch.equal(moved, steps == 1)


def test_a_dense_scale_takes_no_minibatches() -> None:
    problem = make_intercepts()
    algorithm = sf.SFVIAvg(sampling_rate=0.5, local_family=sf.Conditional(scale="dense"))
    with pytest.raises(InputError, match="dense local scale"):
        sf.fit(problem.model, problem.silos, algorithm)


# ---- when a run has settled ----


def _merges(program: SFVIAvgProgram, locs: list[Tensor]) -> int:
    """How many merges at falling rates a server counts that adopts these means."""
    state = program.init()
    sd = 0.1 * torch.ones(program.family.n)
    for loc in locs:
        eta = {"loc": loc, "log_scale": sd.log(), "lower": state.eta["lower"]}
        state, _ = program._adopt(state, eta, {})
    return state.settled


def test_small_merges_one_way_are_no_arrival() -> None:
    """Means that walk on by 0.5 posterior sds a merge never settle; the same steps to and fro do after WATCHED."""
    server, _, _ = build_parties(make_slopes().model, make_slopes().silos, sf.SFVIAvg(), sf.Plain(), compile=False)
    program: Any = server.program
    assert isinstance(program.family, Full)
    step = 0.05 * torch.tensor([1.0, 0.3])
    assert SETTLED > 0.5
    assert _merges(program, [k * step for k in range(12)]) == 0
    to_and_fro = [(k % 2) * step for k in range(12)]
    assert _merges(program, to_and_fro) == 12 - WATCHED + 1
