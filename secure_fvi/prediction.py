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


# ----
# What a client does with a fitted FedVI model: infer what is its own from unlabelled records, and predict with it
#
# Nothing here leaves the client, and the server has no part in it: a client that never took part does the same.


class Personal:
    """The fitted model as one client sees it. `loc`, `scale` (n_silo,): its q(beta) in unconstrained space, at the
    centre of q(theta)."""

    def __init__(self, problem: Problem, posterior: Posterior, rows: Params) -> None:
        self._problem, self._posterior, self._rows = problem, posterior, rows
        self.loc, self.scale = self._infer(posterior.eta["loc"])

    def __repr__(self) -> str:
        return f"Personal({len(self.loc)} latents)"

    def sample(self, n: int, seed: int = 0) -> Params:
        """`n` draws of the global and the client's own sites, (n, *shape) each, in the model's own space."""
        if n < 1:
            raise InputError(f"the number of draws must be at least 1, not {n}")
        constrain, theta = self._problem.density.constrain, self._posterior.theta
        centres = self._posterior.draws(n, seed)
        draws = [{**constrain(z, theta)[0], **self._local(z, seed + k)} for k, z in enumerate(centres)]
        return {name: torch.stack([d[name] for d in draws]) for name in draws[0]}

    def predict(self, data: Mapping[str, Any], n: int = 200, seed: int = 0) -> Params:
        """Posterior predictive draws for the client's records, (n, ...) for every observed site."""
        return predict(self._problem, self._posterior, data, n, seed, self._local)

    def log_predictive(self, data: Mapping[str, Any], n: int = 200, seed: int = 0) -> Tensor:
        """Log predictive density of each record of `data`, in nats (N,): log of the mean over `n` draws."""
        return log_predictive(self._problem, self._posterior, data, n, seed, self._local)

    def _infer(self, z: Tensor) -> tuple[Tensor, Tensor]:
        encoder = self._problem.model.encoder
        assert encoder is not None  # `personalise` checks
        sites, theta = self._problem.density.constrain(z, self._posterior.theta)
        present = z.new_ones(len(next(iter(self._rows.values()))))
        with torch.no_grad():
            return encoder.fn({**sites, **theta}, present, **self._rows)

    def _local(self, z: Tensor, seed: int) -> Params:
        """A draw of the client's sites that goes with a draw of the global ones."""
        loc, scale = self._infer(z)
        eps = torch.randn(len(loc), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        rows = {name: v.to(z.device) for name, v in self._problem.schema.dummy_rows(2).items()}
        z_silo, none = loc + scale * eps.to(loc), z.new_zeros(2, 0)
        return self._problem.density.constrain_local(z, z_silo, none, self._posterior.theta, rows)


def personalise(problem: Problem, posterior: Posterior, unlabelled: Mapping[str, Tensor]) -> Personal:
    """The client's view of the model, from records without labels: the tensors that the model's encoder asks for.

    Raises InputError for a model without an encoder, and for records that are not of the fit's shapes.
    """
    encoder = problem.model.encoder
    if encoder is None:
        raise InputError("this model has no encoder; only a fit by fedvi can be made a client's own from its records")
    if set(unlabelled) != set(encoder.fields):
        raise InputError(f"the encoder asks for {', '.join(encoder.fields)}, not {', '.join(sorted(unlabelled))}")
    fields = {name: (shape, dtype) for name, shape, dtype in problem.schema.fields}
    rows = {}
    for name, value in unlabelled.items():
        shape, dtype = fields[name]
        if tuple(value.shape[1:]) != shape or len(value) == 0:
            raise InputError(f"'{name}' must have at least one row of shape {shape}, not {tuple(value.shape)}")
        if value.dtype.is_floating_point != dtype.is_floating_point:
            raise InputError(f"'{name}' must be {dtype}, not {value.dtype}")
        rows[name] = value.to(problem.device, dtype)
    return Personal(problem, posterior, rows)
