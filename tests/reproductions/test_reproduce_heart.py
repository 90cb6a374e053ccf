"""The pieces of `secure-fvi reproduce heart`: folds, the split NN's gradient, what a batched round learns from what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quick_run import is_picture, quick_run
from torch import Tensor
from torch.nn.functional import logsigmoid

from secure_fvi.algorithms.vertical import Amortised, Bernoulli, Predictor, Vertical, VerticalServer, VerticalSilo
from secure_fvi.algorithms.vertical.steps import Incoming, Moments, Noise, Response
from secure_fvi.compiled import Mode
from secure_fvi.errors import InputError
from secure_fvi.models.heart import Heart, bayesian_network, split_network
from secure_fvi.optimizers import Optimizer
from secure_fvi_lab.experiments.heart import (
    PAPER,
    HierarchicalRound,
    SplitRound,
    SplitSilo,
    Task,
    by_fold,
    logistic,
    make_folds,
    png,
    table,
    task_of,
)

ADAM = Optimizer("adam", 0.05)


def _data(n: int = 60, seed: int = 0) -> Heart:
    rng = torch.Generator().manual_seed(seed)
    x = tuple(torch.randn(n, d, generator=rng, dtype=torch.float64) for d in (3, 4))
    y = (torch.rand(n, generator=rng) < torch.sigmoid(3 * x[0][:, 0] - 3 * x[1][:, 1])).double()
    return Heart(x, tuple(torch.ones(d, dtype=torch.bool) for d in (3, 4)), y, torch.arange(n))


def _train(n: int = 60, runs: int = 2) -> Tensor:
    return torch.stack([torch.arange(n) % 10 != r for r in range(runs)])


def test_every_record_is_tested_once_and_folds_are_stratified() -> None:
    y = (torch.arange(118) % 3 == 0).double()
    folds = make_folds(y, 2)
    assert folds.test.shape == (20, 118)
    for seed in range(2):
        test, inner = folds.test[10 * seed : 10 * seed + 10], folds.inner[10 * seed : 10 * seed + 10]
        assert test.sum(0).tolist() == [1] * 118
        assert not (test & inner).any()
        shares = torch.stack([y[t].sum() for t in test])
        assert float(shares.max() - shares.min()) <= 1
    assert not torch.equal(folds.test[:10], folds.test[10:])


def test_scores_by_fold() -> None:
    probability = torch.tensor([[0.9, 0.9, 0.2, 0.5]])
    y, held = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([[True, True, True, False]])
    accuracy, log_p, wrong = by_fold(probability, y, held)
    assert float(accuracy) == pytest.approx(200 / 3)
    assert float(log_p) == pytest.approx(torch.tensor([0.9, 0.1, 0.8]).log().mean().item(), rel=1e-5)
    assert wrong.tolist() == [pytest.approx(torch.tensor(0.1).log().item(), rel=1e-5)]


def test_the_split_gradient_is_that_of_the_joint_network() -> None:
    """Autograd through both networks at once; records of weight 0 add nothing."""
    data, weights = _data(), _train()[0].double()
    silos = [
        SplitSilo(Predictor(split_network((4, 2), seed=j, bayesian=False), {"x": x}), ADAM)
        for j, x in enumerate(data.x)
    ]
    start = [silo.init()[0] for silo in silos]
    leaves = [{k: v.clone().requires_grad_() for k, v in p.items()} for p in start]
    joint = sum(silo.draw(p, {"x": x})[:, 0] for silo, p, x in zip(silos, leaves, data.x, strict=True))
    (weights * logsigmoid((2 * data.y - 1) * joint)).sum().backward()
    s = torch.stack([silo.draw(p, {"x": x}) for silo, p, x in zip(silos, start, data.x, strict=True)]).sum(0)
    server = VerticalServer(Bernoulli(), ADAM, torch.float64)
    pull = server.respond(Response(data.y, torch.zeros(60)), s, torch.zeros(1), weights).pull
    for silo, points, leaf, x in zip(silos, start, leaves, data.x, strict=True):
        found = silo.gradient(points, {"x": x}, weights, pull)
        for name, value in leaf.items():
            assert value.grad is not None
            torch.testing.assert_close(found[name], value.grad)
        moved = silo.update(points, ADAM.init(points), {"x": x}, weights, pull, torch.tensor(1.0))[0]
        assert all(not torch.equal(moved[k], points[k]) for k in points)


def test_a_split_nn_takes_points_only() -> None:
    predictor = Predictor(split_network(), {"x": torch.zeros(2, 3)})
    with pytest.raises(InputError, match=r"no pyro\.sample"):
        SplitSilo(predictor, ADAM)


def _hierarchical(task: Task, steps: int = 1, sampled: bool = True, mode: Mode = "traced") -> HierarchicalRound:
    config = Vertical(rho=0.5, response="private", family="diagonal", auxiliary=Amortised((4,)), local_steps=steps)

    def program(seed: int) -> Any:
        return bayesian_network((4,), linear=True) if sampled else split_network((4, 2), seed=seed)

    return HierarchicalRound(config, Bernoulli(), program, task, ADAM, mode, 0.3)


def test_labels_and_columns_of_held_out_records_change_nothing() -> None:
    """Control: a training record's label does."""
    data, train = _data(), _train(runs=1)
    held, kept = (~train[0]).double(), torch.nn.functional.one_hot(torch.tensor(5), 60).double()

    def end(y: Tensor, shift: Tensor) -> Tensor:
        x = tuple(v + shift.unsqueeze(1) for v in data.x)
        return _hierarchical(task_of(data._replace(x=x, y=y), train), mode="eager").fit(2).params[0].shared["theta/loc"]

    nothing = torch.zeros(60)
    flipped = end((data.y - held).abs(), 3 * held)
    assert torch.equal(end(data.y, nothing), flipped)
    assert not torch.equal(end(data.y, nothing), end((data.y - kept).abs(), nothing))


@pytest.mark.parametrize("steps", [1, 2])
def test_a_batched_round_is_a_round_of_the_silos_themselves(steps: int) -> None:
    task = task_of(_data(), _train())
    parties = _hierarchical(task, steps, sampled=False)
    generator = torch.Generator().manual_seed(0)
    state = parties.init(generator)
    noise, eps = next(parties.noises(1, generator))
    end, _ = parties._round(state, noise, eps, torch.tensor(0.5))
    for r in range(task.runs):
        silos = [VerticalSilo(parties.config, Bernoulli(), silo.predictor, 2, ADAM) for silo in parties.silos]
        params = [type(p)(*({k: v[r] for k, v in part.items()} for part in p)) for p in state.params]
        rows = [{"x": columns["x"][r]} for columns in task.rows]
        own = [Noise(*(e[r] for e in n)) for n in noise]
        weights, one = task.weights[r], torch.tensor(1.0)
        draws = [s.draw(p, x, (), weights, e) for s, p, x, e in zip(silos, params, rows, own, strict=True)]
        total = draws[0].z + draws[1].z
        server = VerticalServer(Bernoulli(), ADAM, torch.float32)
        first = server.init()
        gamma = server.gamma(first.eta, eps[r])
        answer = server.respond(task.response, total, gamma, weights)
        incoming = Incoming(answer.pull, answer.curvature, torch.zeros_like(total), gamma, one)
        for j, silo in enumerate(silos):
            new, _ = silo.update(
                params[j],
                Moments(*(ADAM.init(p) for p in params[j])),
                rows[j],
                (),
                weights,
                own[j],
                incoming,
                torch.tensor(0.5),
            )
            for name, value in new.shared.items():
                torch.testing.assert_close(end.params[j].shared[name][r], value, rtol=1e-4, atol=1e-6)
        eta = server.update(first, answer.gamma, eps[r], torch.tensor(0.5))[0].eta
        for name, value in eta.items():
            torch.testing.assert_close(end.server.eta[name][r], value, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_hierarchical_network_learns_what_columns_of_both_silos_say() -> None:
    """Bayes accuracy of this problem is about .87; .8 on 200 held-out records is three standard errors below it.

    The split NN fits its 300 records closely and predicts others worse, as in the paper.
    """
    data = _data(500, seed=1)
    train = torch.stack([torch.arange(500) >= 200] * 2)
    parties = _hierarchical(task_of(data, train))
    seen: list[int] = []
    still, noisy = parties.predict(parties.fit(100, decay=True, at=[80], see=lambda r, state: seen.append(r)), 50)
    assert float(by_fold(still, data.y, ~train)[0].mean()) > 80
    assert seen == [80]
    assert float((still - noisy).abs().max()) > 1e-3
    fitted = SplitRound(
        Bernoulli(), lambda s: split_network((4,), seed=s, bayesian=False), parties.task, ADAM, "traced"
    )
    points = fitted.predict(fitted.fit(100))
    assert float(by_fold(points, data.y, train)[0].mean()) > 90
    assert float(by_fold(points, data.y, ~train)[1].mean()) < float(by_fold(still, data.y, ~train)[1].mean())
    assert float(by_fold(logistic(data, make_folds(data.y, 1)), data.y, make_folds(data.y, 1).test)[0].mean()) > 80


def test_table_and_plot() -> None:
    numbers = {"accuracy": 86.0, "sd_over_folds": 3.0, "log_likelihood": -0.35, "wrong": -1.5}
    row = {"method": "points, rho 1", "seeds": 1, "log_likelihood_noisy": -0.36, **numbers}
    curve = {"curve": {"exchanges": [1, 2], "log_likelihood": [-0.6, -0.4]}}
    rows = [{**row, "method": "split NN", **curve}, row]
    content = {"rows": rows, "paper": {"points, rho 1": {"accuracy": 86.39, "log_likelihood": -0.36}}}
    assert "86.39 / -0.36" in table(content)
    assert is_picture(png(rows, PAPER))


@pytest.mark.slow
def test_the_quick_run_reaches_the_papers_table(tmp_path: Path) -> None:
    """One assignment; an accuracy over 918 patients has a standard error of 1.1 points: 1.5 below the paper's fails."""
    content = quick_run("heart", "heart_failure_prediction", tmp_path)
    by_name = {r["method"]: r for r in content["rows"]}
    assert by_name["sampled, rho 1"]["accuracy"] > 84.9
    assert by_name["sampled, rho 1"]["log_likelihood"] > -0.38
    assert by_name["split NN"]["log_likelihood"] < by_name["points, rho 1"]["log_likelihood"]
