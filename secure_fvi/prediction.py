"""Posterior predictive draws and densities: the Pyro program run forward under draws of the global sites."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from pyro.distributions import Unit
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.distributions import transform_to

from secure_fvi.algorithms.base import Posterior, Problem
from secure_fvi.density import Params, has_no_density, observed_value, param_constraint, record_dim, running
from secure_fvi.errors import InputError
from secure_fvi.federated_model import read_data


class _Forward(Messenger):  # type: ignore[misc]
    """Global sites take given values, all other latent sites are drawn; observed ones are drawn, or scored."""

    def __init__(self, values: Mapping[str, Tensor], theta: Mapping[str, Tensor], record_plate: str | None) -> None:
        super().__init__()
        self.values, self.theta, self.record_plate = values, theta, record_plate
        self.observed: Params = {}
        self.log_prob: list[Tensor] = []  # (N,) each; with a record plate only

    def _pyro_param(self, msg: Any) -> None:
        msg["value"] = transform_to(param_constraint(msg))(self.theta[msg["name"]])

    def _pyro_sample(self, msg: Any) -> None:
        fn, name = msg["fn"], msg["name"]
        scored = self.record_plate is not None
        dim = record_dim(msg, self.record_plate) if self.record_plate is not None else 0
        # A factor cannot be drawn; what stands outside the record plate is no part of a record's density.
        if isinstance(fn, _Subsample) or (isinstance(fn, Unit) and not dim) or (scored and has_no_density(msg)):
            return
        if name in self.values:
            msg["value"] = self.values[name]
        elif not msg["is_observed"]:
            msg["value"] = fn.sample()
        elif not scored:
            msg["value"] = self.observed[name] = fn.sample()
        else:
            term = scale_and_mask(fn.log_prob(observed_value(msg)), msg["scale"], msg["mask"])
            self.log_prob.append(term.movedim(dim, 0).reshape(term.shape[dim], -1).sum(1))
        msg["done"] = True


#: A draw of the silo's own sites that goes with a draw of Z_G, from a seed.
Local = Callable[[Tensor, int], Params]


def predict(
    problem: Problem, posterior: Posterior, data: Mapping[str, Any], n: int, seed: int, local: Local | None = None
) -> Params:
    """See `Result.predict`. local: where a silo's own sites come from; None: their prior."""
    draws = [run.observed for run in _runs(problem, posterior, data, n, seed, None, local)]
    return {name: torch.stack([d[name] for d in draws]) for name in draws[0]}


def log_predictive(
    problem: Problem, posterior: Posterior, data: Mapping[str, Any], n: int, seed: int, local: Local | None = None
) -> Tensor:
    """See `Result.log_predictive`. local: as for `predict`."""
    runs = _runs(problem, posterior, data, n, seed, problem.model.record_plate, local)
    scores = torch.stack([torch.stack(run.log_prob).sum(0) for run in runs])
    return torch.logsumexp(scores, 0) - math.log(n)


def _runs(
    problem: Problem,
    posterior: Posterior,
    data: Mapping[str, Any],
    n: int,
    seed: int,
    record_plate: str | None,
    local: Local | None,
) -> Iterator[_Forward]:
    schema, records = read_data(data, "predict", problem.dtype)
    if schema.fields != problem.schema.fields:
        want = {name: shape for name, shape, _ in problem.schema.fields}
        raise InputError(f"predict needs the tensors of the fit, of these shapes a record: {want}")
    if n < 1:
        raise InputError(f"the number of draws must be at least 1, not {n}")
    rows = {name: value.to(problem.device) for name, value in records.rows.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for k, z in enumerate(posterior.draws(n, seed)):
            values, _ = problem.density.constrain(z, posterior.theta)
            if local is not None:
                values = {**values, **local(z, seed + k)}
            forward = _Forward(values, posterior.theta, record_plate)
            with running(problem.dtype, problem.device), torch.no_grad(), forward as run:
                problem.model.fn(**rows, **problem.schema.constants)
            yield run
