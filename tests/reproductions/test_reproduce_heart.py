"""The pieces of `secure-fvi reproduce heart`: folds, scores, and what is learned from what."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quick_run import is_picture, quick_run
from torch import Tensor

from secure_fvi.algorithms.vertical import Amortised, Vertical
from secure_fvi.models.heart import Heart, bayesian_network
from secure_fvi_lab.experiments.heart import (
    _FULL,
    PAPER,
    Folds,
    _Hierarchical,
    by_fold,
    columns_of,
    logistic,
    make_folds,
    png,
    probabilities,
    split_fit,
    table,
)


def _data(n: int = 60, seed: int = 0) -> Heart:
    rng = torch.Generator().manual_seed(seed)
    x = tuple(torch.randn(n, d, generator=rng, dtype=torch.float64) for d in (3, 4))
    y = (torch.rand(n, generator=rng) < torch.sigmoid(3 * x[0][:, 0] - 3 * x[1][:, 1])).double()
    return Heart(x, tuple(torch.ones(d, dtype=torch.bool) for d in (3, 4)), y, torch.arange(n))


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


def _variant(rounds: int) -> _Hierarchical:
    config = Vertical(
        rho=0.5, response="private", family="diagonal", auxiliary=Amortised((4,)), rounds=rounds, learning_rate=0.05,
        average_last=0.0,
    )  # fmt: skip
    return _Hierarchical(config, lambda seed: bayesian_network((4,), linear=True), 0.3)


def test_labels_and_columns_of_held_out_records_change_nothing() -> None:
    """Control: a training record's label does."""
    data, train = _data(), torch.arange(60) % 10 != 0
    held, kept = (~train).double(), torch.nn.functional.one_hot(torch.tensor(5), 60).double()

    def end(y: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        rows = columns_of(data._replace(x=tuple(v + shift.unsqueeze(1) for v in data.x), y=y), train)
        run = _variant(2).begun(rows, 0)
        for _ in run:
            pass
        return probabilities(run, rows.whole, 5).still[train], split_fit(rows, 0, 2, [2])[0][train]

    nothing = torch.zeros(60)
    first = end(data.y, nothing)
    other, control = end((data.y - held).abs(), 3 * held), end((data.y - kept).abs(), nothing)
    for network in range(2):
        assert torch.equal(first[network], other[network])
        assert not torch.equal(first[network], control[network])


@pytest.mark.slow
def test_the_hierarchical_network_learns_what_columns_of_both_silos_say() -> None:
    """Bayes accuracy of this problem is about .87; .8 on 200 held-out records is three standard errors below it.

    The split NN fits its 300 records closely and predicts others worse, as in the paper.
    """
    data = _data(500, seed=1)
    test = torch.stack([torch.arange(500) < 200] * 2)
    found, _, _, cost = _variant(150).fit(_FULL._replace(draws=50), data, Folds(test, test))
    assert float(by_fold(found.still, data.y, test)[0].mean()) > 80
    assert cost.at[-1] == 150
    assert len(cost.at) == len(cost.log_likelihood)
    assert float((found.still - found.noisy).abs().max()) > 1e-3
    fitted = torch.stack([split_fit(columns_of(data, ~t), number, 2000, [2000])[0] for number, t in enumerate(test)])
    assert float(by_fold(fitted, data.y, ~test)[0].mean()) > 90
    assert float(by_fold(fitted, data.y, test)[1].mean()) < float(by_fold(found.still, data.y, test)[1].mean())
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
