"""FedVI: a step is equation (8)'s, labels of the support do not matter, new clients predict from unlabelled records."""

from __future__ import annotations

import dataclasses
import re
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fedvi_world import MODEL, SHIFT_SD, clients, encode, program
from torch import Tensor
from torch.distributions import Normal, kl_divergence

import secure_fvi as sf
from secure_fvi.algorithms.fedvi import FedVIProgram, gaussian_kl
from secure_fvi.errors import InputError
from secure_fvi.fitting import build_parties, result_of

pytestmark = pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _parties(silos: list[dict[str, Tensor]], **options: Any) -> Any:
    """Not traced: that costs more than the few steps of a test."""
    server, engine, _ = build_parties(MODEL, silos, sf.FedVI(**options), sf.Plain(), compile=False)
    for silo in engine.silos.values():
        silo.program._gradient.mode = "eager"  # type: ignore[attr-defined]
    return server, engine


def _point(server: Any) -> dict[str, Tensor]:
    point: dict[str, Tensor] = server.state.algorithm.average.point
    return point


def test_the_divergence_is_exact_for_independent_gaussians() -> None:
    rng = torch.Generator().manual_seed(0)
    loc, scale = torch.randn(5, generator=rng), torch.rand(5, generator=rng) + 0.1
    signs = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])
    prior = Normal(0.3, 0.8)
    found = gaussian_kl(loc, scale, signs, lambda z: prior.log_prob(z).sum())
    torch.testing.assert_close(found, kl_divergence(Normal(loc, scale), prior).sum())


def test_a_step_is_equation_8s() -> None:
    """One client, one step: the change against the gradient of the objective written out, by autograd, 1e-10."""
    silo, options = clients(1)[0], {"rounds": 1, "learning_rate": 0.1, "tau": 0.7, "gamma": 2.0, "total_records": 12}
    server, engine = _parties([silo], **options)
    view, half = engine.silos["silo-1"].view, engine.silos["silo-1"].program
    assert isinstance(half, FedVIProgram)
    ((support, query),) = half._batches(view)
    assert sorted([*support.tolist(), *query.tolist()]) == list(range(12))
    eps = view.silo_draws.normals(0, 1)[0]
    x, y = silo["x"].double(), silo["y"].double()
    w = torch.tensor([0.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)  # by the order of sampling
    loc, scale = encode({"encoder": w[1:]}, torch.ones(6), x[support])
    predicted = w[0] * x[query, 0] + loc + scale * eps
    distortion = -Normal(predicted, 0.5).log_prob(y[query]).mean()
    rate = kl_divergence(Normal(loc, scale), Normal(0.0, SHIFT_SD)).sum()
    prior = Normal(torch.tensor([0.0, 0.0, -1.0]), 1.0).log_prob(w).sum()
    loss = distortion + 0.7 / 12 * rate - 2.0 / 12 * prior
    (gradient,) = torch.autograd.grad(loss, w)
    engine.run(server.round())
    torch.testing.assert_close(_point(server)["eta/loc"], (w - 0.1 * gradient).detach(), rtol=0, atol=1e-10)
    metrics = server.program.metrics(server.state.algorithm)
    assert metrics["distortion"] == pytest.approx(12 * distortion.item(), rel=1e-9)
    assert metrics["rate_per_client"] == pytest.approx(rate.item(), rel=1e-9)


def test_labels_of_the_support_do_not_matter() -> None:
    """What the server is sent after one step is the same to the bit; the control, a label of the query, changes it."""
    silo = clients(1)[0]
    server, engine = _parties([silo], rounds=1)
    support, query = next(iter(engine.silos["silo-1"].program._batches(engine.silos["silo-1"].view)))
    engine.run(server.round())
    seen = []
    for rows in (support, query):
        other = {**silo, "y": silo["y"].clone()}
        other["y"][rows] += 5.0
        again, engine = _parties([other], rounds=1)
        engine.run(again.round())
        seen.append(torch.equal(_point(again)["eta/loc"], _point(server)["eta/loc"]))
    assert seen == [True, False]


def test_batches_use_each_record_once_an_epoch() -> None:
    silo = _parties(clients(1, size=7), rounds=1, epochs=2, batch_size=4)[1].silos["silo-1"]
    batches = list(silo.program._batches(silo.view._replace(turn=3)))
    assert len(batches) == 4
    for epoch in (batches[:2], batches[2:]):
        rows = [r for s, q in epoch for r in (*s, *q) if r < 7]
        assert sorted(rows) == list(range(7))
        assert all(len(s) == len(q) for s, q in epoch)
    silo = _parties(clients(1, size=1), rounds=1)[1].silos["silo-1"]
    (single,) = list(silo.program._batches(silo.view))
    assert [part.tolist() for part in single] == [[0], [0]]


@pytest.fixture(scope="module")
def fitted() -> sf.Result:
    """Twenty clients, three a round."""
    algorithm = sf.FedVI(rounds=30, learning_rate=0.1, participation=0.15, server_momentum=0.0, tau=1.0)
    server, engine = _parties(clients(20), **dataclasses.asdict(algorithm))
    for _ in range(30):
        step = engine.run(server.round())
    assert step.finished
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done: Any = types.SimpleNamespace(objectives=(), seconds=0.0)
        return result_of(server, engine, algorithm, sf.Plain(), done)


def test_a_new_client_predicts_from_unlabelled_records(fitted: sf.Result) -> None:
    """A model that knows the shifts has a mean log density of -0.73 nats, one that does not -1.5."""
    slope, encoder = fitted.posterior["slope"].mean, fitted.posterior["encoder"].mean
    assert float(slope) == pytest.approx(0.7, abs=0.2)
    assert float(encoder[0]) == pytest.approx(1.0, abs=0.3)
    new = clients(5, seed=1)
    told = torch.cat([fitted.personalise({"x": c["x"]}).log_predictive(c, 8) for c in new]).mean()
    untold = torch.cat([fitted.log_predictive(c, 8) for c in new]).mean()
    assert told > -1.1
    assert told > untold + 0.2
    personal = fitted.personalise({"x": new[0]["x"]})
    draws = personal.sample(60)
    assert draws["shift"].shape == (60, 1)
    assert float(draws["shift"].mean()) == pytest.approx(float(personal.loc), abs=5 * float(personal.scale) / 7)
    assert personal.predict(new[0], n=3)["y"].shape == (3, 12)


def test_what_the_result_reports(fitted: sf.Result) -> None:
    metrics = fitted.metrics
    assert metrics["objective"] == pytest.approx(-metrics["distortion"] - 20 * metrics["rate_per_client"])
    assert metrics["rate_per_client"] > 0
    assert fitted.elbo is None
    with pytest.raises(InputError, match="keeps no local state"):
        fitted.local["silo-1"].sample(1)


@pytest.mark.slow
def test_masked_sums_are_plain_ones() -> None:
    options = sf.FedVI(rounds=2, batch_size=6)
    plain, masked = (sf.fit(MODEL, clients(4), options, kind, compile=False) for kind in (sf.Plain(), sf.Masked()))
    torch.testing.assert_close(plain.variational.eta["loc"], masked.variational.eta["loc"], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_traced_steps_are_those_of_the_program() -> None:
    server, engine = _parties(clients(4), rounds=5)
    for _ in range(5):
        engine.run(server.round())
    traced = sf.fit(MODEL, clients(4), sf.FedVI(rounds=5), sf.Plain(), compile=False)
    assert traced.metrics["execution"] == "traced"
    torch.testing.assert_close(traced.variational.eta["loc"], _point(server)["eta/loc"], rtol=0, atol=1e-10)


def test_a_posterior_over_theta_goes_to_its_prior_where_only_that_counts() -> None:
    """gamma = 400: KL(q(theta) || t) falls, q's scale rises from 0.3 towards t's 1; with gamma = 0 it does not."""
    rates, scales = [], []
    for gamma in (400.0, 0.0):
        options = {"gamma": gamma, "theta": "gaussian", "start_scale": 0.3, "learning_rate": 0.01}
        server, engine = _parties(clients(1), rounds=10, server_momentum=0.0, total_records=12, **options)
        frame = server.program
        before = float(frame.global_rate(_point(server)))
        for _ in range(10):
            engine.run(server.round())
        rates.append(float(frame.global_rate(_point(server))) - before)
        scales.append(float(_point(server)["eta/log_scale"].exp().min()))
    assert rates[0] < -1.0
    assert scales[0] > 0.7
    assert scales[1] < 0.4
    eta = server.program.posterior(server.state.algorithm).eta
    prior = Normal(torch.tensor([0.0, 0.0, -1.0]), 1.0)
    closed = kl_divergence(Normal(eta["loc"], eta["log_scale"].exp()), prior).sum()
    assert float(frame.global_rate(_point(server))) == pytest.approx(float(closed), rel=1e-9)


class _KilledError(Exception):
    pass


@pytest.mark.slow
def test_a_killed_run_ends_where_an_unbroken_one_does(tmp_path: Path) -> None:
    algorithm = sf.FedVI(rounds=8, participation=0.5, gamma=0.1)
    whole = sf.fit(MODEL, clients(6), algorithm, sf.Plain(), compile=False)

    def kill(progress: sf.Progress) -> None:
        if progress.round == 4:
            raise _KilledError

    keep: dict[str, Any] = {"checkpoint_dir": tmp_path, "checkpoint_seconds": 0.0, "compile": False}
    with pytest.raises(_KilledError):
        sf.fit(MODEL, clients(6), algorithm, sf.Plain(), on_round=kill, **keep)
    resumed = sf.fit(MODEL, clients(6), algorithm, sf.Plain(), resume=True, **keep)
    assert torch.equal(resumed.variational.eta["loc"], whole.variational.eta["loc"])


@pytest.mark.slow
def test_client_privacy_noises_the_change_and_releases_nothing_else() -> None:
    """Little noise: 0.01 of a clipping norm of 1 a client, 12 clients, 5 rounds: 0.003 a round."""
    algorithm = sf.FedVI(rounds=5, weights="equal", server_momentum=0.0)
    privacy = sf.SiloDP(noise_multiplier=0.01, clipping_norm=1.0, noise="silo")
    plain = sf.fit(MODEL, clients(12), algorithm, sf.Plain(), compile=False)
    noised = sf.fit(MODEL, clients(12), algorithm, sf.Masked(), privacy, compile=False, noise_key=b"n" * 32)
    error = (noised.variational.eta["loc"] - plain.variational.eta["loc"]).abs().max()
    assert 1e-6 < error < 0.02 * 5
    assert noised.privacy is not None
    assert noised.privacy["releases"] == 5 + privacy.retries
    assert all(noised.metrics[name] is None for name in ("objective", "distortion", "rate_per_client", "records"))


@pytest.mark.parametrize(
    ("options", "privacy", "message"),
    [
        ({}, sf.RecordDP(epsilon=1.0, noise="silo"), "fedvi takes no record privacy"),
        ({}, sf.SiloDP(epsilon=8.0, noise="silo"), "fedvi needs weights = 'equal'"),
        ({"weights": "equal", "gamma": 1.0}, sf.SiloDP(epsilon=8.0, noise="silo"), "total_records.* or gamma = 0"),
    ],
)
def test_privacy_that_cannot_be_had_is_refused(options: dict[str, Any], privacy: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_parties(MODEL, clients(3), sf.FedVI(**options), sf.Plain(), privacy=privacy)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (sf.FederatedModel(program, "person", ("shift",)), "needs a model with silo_sites and an encoder"),
        (sf.FederatedModel(program, "person", ("shift",), sf.SiloEncoder(encode, ("z",))), "asks for 'z'"),
        (sf.FederatedModel(program, "person", ("shift",), sf.SiloEncoder(encode, ("x", "y"))), "labels included"),
    ],
)
def test_models_that_do_not_fit_are_refused(model: sf.FederatedModel, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_parties(model, clients(3), sf.FedVI(), sf.Plain())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"theta": "full"}, "choose point or gaussian"),
        ({"epochs": 0}, "epochs must be a whole number of at least 1"),
        ({"batch_size": 1}, "batch_size must be at least 2"),
        ({"tau": -1.0}, "tau must be at least 0"),
        ({"gamma": float("inf")}, "gamma must be at least 0"),
        ({"participation": 1.5}, "participation must lie in"),
        ({"start_scale": 0.0}, "start_scale must be positive"),
        ({"server_momentum": 1.0}, "server_momentum must lie in"),
        ({"server_schedule": "steps"}, "server_schedule 'steps' is unknown"),
        ({"weights": "size"}, "choose records or equal"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sf.FedVI(**options)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ({"z": torch.zeros(3, 2)}, "the encoder asks for x"),
        ({"x": torch.zeros(3, 5)}, "at least one row of shape"),
        ({"x": torch.zeros(0, 2)}, "at least one row of shape"),
        ({"x": torch.zeros(3, 2, dtype=torch.int64)}, "must be torch.float64"),
    ],
)
def test_records_that_do_not_fit_are_refused(fitted: sf.Result, records: dict[str, Tensor], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fitted.personalise(records)


def test_only_a_run_that_is_level_has_converged() -> None:
    """On made-up objectives a record, of 100 rounds: rising and falling by a standard deviation a quarter, fallen and
    level since, level in noise that hides .02 nats, of 12 rounds alone; and with none released. The control is one side
    of the difference to the quarter before against its error, which takes what fell, and what is too noisy, for level.
    """
    server, engine = _parties(clients(1), rounds=100)
    engine.run(server.round())
    state = server.state.algorithm
    noise = torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    state = state._replace(average=state.average._replace(round=100))
    rising, falling, level = (
        state._replace(objectives=0.004 * (noise + slope * torch.arange(100))) for slope in (0.4, -0.4, 0.0)
    )
    fallen = level._replace(objectives=level.objectives - 5.0 * (torch.arange(100) > 30))
    faster = level._replace(objectives=-torch.exp(torch.arange(100) / 2.0).double())
    noisy = level._replace(objectives=100 * level.objectives)
    short = level._replace(average=level.average._replace(round=12))
    for of, words in (
        (rising, "still rising when the rounds were over, by 0.04.* raise rounds"),
        (falling, "fell, by 0.1.* lower learning_rate"),
        (faster, "fell, by .* lower learning_rate"),
        (fallen, "fell, by 5.* lower learning_rate"),
        (noisy, "not assessed: .* raise rounds"),
        (short, "not assessed: .* raise rounds"),
    ):
        verdict = server.program.verdict(of)
        assert verdict.converged is False
        assert re.search(words, verdict.reason), verdict.reason
        late, before = of.objectives[75:], of.objectives[50:75]
        if any(of is other for other in (falling, faster, fallen, noisy)):  # the control
            assert late.mean() - before.mean() < 3 * ((late.var() + before.var()) / 25).sqrt()
    assert server.program.verdict(level).converged is True
    silent = rising._replace(average=rising.average._replace(reported={}))
    assert server.program.verdict(silent).converged is None
