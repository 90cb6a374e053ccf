"""Floors of tables of accuracy: silos do not see each other but where a method says so."""

from __future__ import annotations

import torch
from torch import Tensor

from secure_fvi_lab.experiments.floors import Plan, Task, accuracy, fitted, plans

N, STEPS = 200, 40


def _task(swapped: int | None = None) -> Task:
    """Three silos of points on a line, the class by the sign; at silo `swapped` the classes are the other way round."""
    x = torch.randn(3, N, 1, generator=torch.Generator().manual_seed(1))
    y = (x[..., 0] > 0).long()
    if swapped is not None:
        y[swapped] = 1 - y[swapped]

    def predict(w: dict[str, Tensor], x: Tensor) -> Tensor:
        return x @ w["slope"]

    return Task(predict, {"slope": torch.zeros(1, 2)}, x, y, list(zip(x, y, strict=True)))


def _plan(own_steps: int = 0) -> Plan:
    return Plan("a", "b", lambda folder, seed: _task(), 4, STEPS // 4, N, own_steps=own_steps)


def _score(task: Task, method: str, plan: Plan) -> float:
    return accuracy(task, fitted(task, plan, method, torch.Generator().manual_seed(0)))


def test_every_method_finds_what_silos_agree_on() -> None:
    plan = _plan(own_steps=10)
    for method in ("silo alone", "FedAvg", "FedAvg, own steps", "pooled"):
        assert _score(_task(), method, plan) == 1.0, method


def test_a_silo_alone_knows_its_own_classes_and_an_average_does_not() -> None:
    task, plan = _task(swapped=2), _plan(own_steps=200)
    assert _score(task, "silo alone", plan) == 1.0
    for method in ("FedAvg", "pooled"):  # two silos outvote the third
        assert abs(_score(task, method, plan) - 2 / 3) < 1e-6
    assert _score(task, "FedAvg, own steps", plan) == 1.0


def test_silos_that_step_at_once_step_as_each_would_alone() -> None:
    task, plan, rng = _task(swapped=1), _plan(), torch.Generator()
    together = fitted(task, plan, "silo alone", rng)["slope"]
    for j in range(3):
        one = task._replace(x=task.x[j : j + 1], y=task.y[j : j + 1])
        torch.testing.assert_close(fitted(one, plan, "silo alone", rng)["slope"][0], together[j])


def test_every_table_of_accuracy_by_images_has_a_silo_alone_and_a_pooled_fit() -> None:
    methods: dict[str, set[str]] = {}
    for plan in plans(quick=False):
        methods.setdefault(plan.table, set()).update(plan.methods)
    for table in ("hbnn-mnist", "multinomial-mnist", "pvi-mnist-shards", "bench privacy"):
        assert {"silo alone", "FedAvg", "pooled"} <= methods[table]
    assert {"silo alone", "pooled"} <= methods["fedvi-writers"]  # FedAvg is a line of that table
