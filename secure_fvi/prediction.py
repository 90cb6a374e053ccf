"""Posterior predictive draws: the Pyro program run forward under draws of the global sites."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.distributions import transform_to

from secure_fvi.algorithms.base import Posterior, Problem
from secure_fvi.density import Params, param_constraint, running
from secure_fvi.errors import InputError
from secure_fvi.federated_model import read_data
from secure_fvi.results import draw_unconstrained


class _Forward(Messenger):  # type: ignore[misc]
    """Global sites take given values, all other sites are drawn, observed ones too."""

    def __init__(self, values: Mapping[str, Tensor], theta: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values, self.theta = values, theta
        self.observed: Params = {}

    def _pyro_param(self, msg: Any) -> None:
        msg["value"] = transform_to(param_constraint(msg))(self.theta[msg["name"]])

    def _pyro_sample(self, msg: Any) -> None:
        fn, name = msg["fn"], msg["name"]
        if isinstance(fn, _Subsample):
            return
        if name in self.values:
            msg["value"] = self.values[name]
        elif msg["is_observed"]:
            msg["value"] = self.observed[name] = fn.sample()
        else:
            msg["value"] = fn.sample()
        msg["done"] = True


def predict(problem: Problem, posterior: Posterior, data: Mapping[str, Any], n: int, seed: int) -> Params:
    """See `Result.predict`."""
    schema, records = read_data(data, "predict", problem.dtype)
    if schema.fields != problem.schema.fields:
        want = {name: shape for name, shape, _ in problem.schema.fields}
        raise InputError(f"predict needs the tensors of the fit, of these shapes a record: {want}")
    if n < 1:
        raise InputError(f"the number of draws must be at least 1, not {n}")
    rows = {name: value.to(problem.device) for name, value in records.rows.items()}
    draws: list[Params] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for z in draw_unconstrained(posterior, n, seed):
            values, _ = problem.density.constrain(z, posterior.theta)
            with running(problem.dtype, problem.device), torch.no_grad(), _Forward(values, posterior.theta) as run:
                problem.model.fn(**rows, **problem.schema.constants)
            draws.append(run.observed)
    return {name: torch.stack([d[name] for d in draws]) for name in draws[0]}
