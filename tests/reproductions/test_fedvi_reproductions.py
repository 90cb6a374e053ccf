"""The experiments with FedVI: methods on made-up clients, scores, the bound, table, plot, resuming; the quick runs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from quick_run import is_picture, quick_run

from secure_fvi.algorithms.fedavg import FedAvg
from secure_fvi.cli import main
from secure_fvi.errors import InputError
from secure_fvi.models.fedvi import Client, Network, start
from secure_fvi_lab.experiments import Request
from secure_fvi_lab.experiments.fedvi import (
    Tuning,
    _line,
    fedrep,
    from_fedavg,
    largest_loss,
    margin,
    pac_bayes_bound,
    plot,
    run,
    scores,
    smoothed_loss,
    table,
    tau_plot,
    tau_table,
    writers_plan,
)

NETWORK = Network(3, (1, 6, 6), (4,), 10, 8, dropout=(0.0, 0.0))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _clients(count: int, seed: int = 0) -> list[Client]:
    """Three classes by which third of the picture is bright; every other client has labels 1 and 2 swapped."""
    rng = torch.Generator().manual_seed(seed)
    out = []
    for k in range(count):
        shown = torch.randint(3, (20,), generator=rng)
        x = torch.randint(60, (20, 1, 6, 6), generator=rng, dtype=torch.uint8)
        for row, third in enumerate(shown.tolist()):
            x[row, :, :, 2 * third : 2 * third + 2] += 180
        y = (3 - shown) % 3 if k % 2 else shown
        out.append(Client(x[:12], y[:12], x[12:], y[12:]))
    return out


@pytest.mark.slow
def test_methods_that_see_labels_learn_the_swap() -> None:
    """FedRep on 6 clients; a new client with its own labels does better than its parity allows without: 2/3 at most."""
    clients = _clients(6)
    tuning = Tuning(steps=40, learning_rate=0.5, neighbours=3)
    predict = fedrep(NETWORK, clients[:4], tuning, FedAvg(15, 2, 0.3), 0, lambda text: None)
    assert scores(predict, clients[4:]).accuracy > 0.85
    methods = from_fedavg(NETWORK, start(NETWORK, personal=False), tuning)
    found = {name: scores(predict, clients).accuracy for name, predict in methods.items()}
    assert found["FedAvg"] < 0.7
    assert min(found["FedAvg+"], found["DITTO"], found["KNN-Per"]) > 0.8


def test_scores() -> None:
    """Three right with confidence 0.8, one wrong with 0.6: gaps of 0.2 x 3 / 4 and 0.6 / 4."""
    log_probs = torch.log(torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.8, 0.2], [0.6, 0.4]]))
    y = torch.tensor([0, 0, 0, 1])
    client = Client(torch.zeros(0), torch.zeros(0), torch.zeros(4, 1), y)
    found = scores(lambda c: log_probs, [client])
    assert found.accuracy == 0.75
    assert found.log_loss == pytest.approx(-(3 * math.log(0.8) + math.log(0.4)) / 4)
    assert found.calibration == pytest.approx(0.2 * 0.75 + 0.6 * 0.25)


# ---- the bound ----


def test_the_bound_at_its_best_eta() -> None:
    """Within 7% of the minimum over all eta, 2 sqrt(K b^2 / 8 n) (a grid of powers of two costs that at most)."""
    found = pac_bayes_bound(0.3, 5.0, 400, 2.0, 0.05)
    assert found is not None
    best = 2 * math.sqrt((5.0 + math.log(37 / 0.05)) * 4.0 / (8 * 400))
    assert found.value == pytest.approx(0.3 + found.complexity + found.slack)
    assert best <= found.value - 0.3 <= 1.07 * best


def test_where_the_bound_is_not_finite_there_is_none() -> None:
    assert pac_bayes_bound(0.3, math.inf, 400, 2.0) is None  # a point estimate of theta
    assert pac_bayes_bound(0.3, 5.0, 400, math.inf) is None  # a log loss that is not smoothed
    with pytest.raises(InputError, match="divergence of at least 0"):
        pac_bayes_bound(0.3, -1.0, 400, 2.0)


def test_the_smoothed_loss_is_bounded() -> None:
    log_probs = torch.tensor([[0.0, -math.inf], [0.0, -math.inf]])
    found = smoothed_loss(log_probs, torch.tensor([0, 1]))
    assert found.tolist() == pytest.approx([-math.log(0.975), largest_loss(2)])
    with pytest.raises(InputError, match="floor"):
        smoothed_loss(log_probs, torch.tensor([0, 1]), 1.0)


def test_the_bound_holds_on_drawn_data() -> None:
    """Posterior chosen from 50 coin flips, Bernoulli predictions on a grid under a flat prior: of 300 draws at most 5%
    may break it, and the control, the same without KL and slack, is broken often."""
    rng = np.random.default_rng(0)
    grid = np.linspace(0.1, 0.9, 17)
    broken, control = 0, 0
    for _ in range(300):
        p = rng.uniform(0.2, 0.8)
        flips = rng.random(50) < p
        losses = -(flips.mean() * np.log(grid) + (1 - flips.mean()) * np.log(1 - grid))
        q = np.exp(-50 * losses) / np.exp(-50 * losses).sum()
        true = float(q @ -(p * np.log(grid) + (1 - p) * np.log(1 - grid)))
        found = pac_bayes_bound(float(q @ losses), float(q @ np.log(q * 17 + 1e-300)), 50, -math.log(0.1))
        assert found is not None
        broken += true > found.value
        control += true > found.empirical
    assert broken <= 15
    assert control > 60


# ---- the experiment ----


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")
def test_an_experiment_that_was_stopped_goes_on(tmp_path: Path) -> None:
    """A tiny plan; the second call makes no client and fits nothing, and says the same."""
    plan = writers_plan(True)._replace(network=NETWORK, taking_part=4, new=2)
    plan = plan._replace(
        fedvi=type(plan.fedvi)(rounds=4), fedavg=type(plan.fedavg)(rounds=4, local_steps=1, prior=False, tolerance=0.0)
    )
    said: list[str] = []
    request = Request(True, None, said.append, tmp_path)
    first = run(plan, lambda folder, seed: _clients(6, seed), request)
    assert any("FedVI" in line for line in said)

    def none(folder: Path | None, seed: int) -> list[Client]:
        raise AssertionError("everything is there already")

    second = run(plan, none, request)
    assert second["rows"] == first["rows"]
    assert second["ours"] == first["ours"]
    text = table({**first, "machine": "one"})
    assert all(len(line) <= 100 for line in text.splitlines()[:8])
    assert "FedVI above FedAvg" in text
    assert is_picture(plot(first))


@pytest.mark.slow
def test_the_quick_run_on_writers(tmp_path: Path) -> None:
    content = quick_run("fedvi-writers", "mnist", tmp_path)
    assert content["ours"]["accuracy"]["FedVI"]["new"]["mean"] > 0.5  # guessing is 0.1
    assert content["rows"][0]["bound"]["value"] > content["rows"][0]["bound"]["test"]


def test_margins_are_of_the_same_seed() -> None:
    """Seeds that differ by 20 points move both methods alike."""
    found = {("FedVI", 0): 0.6, ("FedAvg", 0): 0.5, ("FedAvg", 1): 0.72, ("FedVI", 1): 0.8}
    rows = [{"method": method, "seed": seed, "new": {"accuracy": a}} for (method, seed), a in found.items()]
    mine = margin(rows, "new")
    assert (mine["mean"], mine["sd"]) == (pytest.approx(0.09), pytest.approx(0.01 * math.sqrt(2)))


@pytest.mark.later
def test_a_line_a_tau() -> None:
    rows = [
        {
            "tau": 0.1, "seed": seed, "taking_part": 0.8 + 0.02 * seed, "new": 0.7, "log_loss": 0.5, "rate": 4.0,
            "bound": {"value": 2.0, "test": 0.6},
        }
        for seed in (0, 1)
    ]  # fmt: skip
    line = _line(0.1, rows)
    assert line["gap"]["mean"] == pytest.approx(0.11)
    assert line["gap"]["sd"] == pytest.approx(0.02 / math.sqrt(2))
    content = {
        "lines": [{**line, "tau": 0.0}, line],
        "ours": {"seeds": 2},
        "seconds": 1,
        "machine": "m",
        "setting": "s",
    }
    assert tau_table(content).splitlines()[2].split()[:3] == ["0.1", "81.0", "(1.4)"]
    assert is_picture(tau_plot(content))


@pytest.mark.slow
def test_the_quick_run_by_tau(tmp_path: Path) -> None:
    """At tau = 10 nothing of a client's records is left in its beta."""
    lines = quick_run("fedvi-tau", "mnist", tmp_path)["lines"]
    assert [line["tau"] for line in lines] == [0.0, 1e-3, 10.0]
    rates = [line["rate"]["mean"] for line in lines]
    assert rates[0] > rates[1] > 10 * rates[2]
    assert lines[2]["bound"]["mean"] < lines[0]["bound"]["mean"]


_CONFIGURATION = """
[model]
program = "writers-simulated"

[data]
writers = 6
size = 20

[partition]
by_client = true
count = 6

[algorithm]
name = "fedvi"
rounds = 4
participation = 0.5
tau = 0.001

[aggregation]
kind = "masked"

[run]
dtype = "float32"
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")
def test_a_run_from_a_configuration(tmp_path: Path) -> None:
    """Two minutes, nearly all of it after the last round: the report of 48,000 weights."""
    data = os.environ.get("SECURE_FVI_DATA")
    if not data or not (Path(data) / "mnist").is_dir():
        pytest.skip("SECURE_FVI_DATA holds no mnist")
    (tmp_path / "config.toml").write_text(_CONFIGURATION)
    with pytest.raises(SystemExit) as stop:
        main(["run", str(tmp_path / "config.toml"), "--out", str(tmp_path / "out"), "--data", data])
    assert stop.value.code == 4  # four rounds are too few to tell
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["algorithm"], result["rounds"], len(result["silos"])) == ("fedvi", 4, 6)
    assert result["metrics"]["rate_per_client"] > 0
