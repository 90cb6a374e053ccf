"""What a client does with a fitted FedVI model: infer what is its own from unlabelled records, and predict with it.

Nothing here leaves the client, and the server has no part in it: a client that never took part does the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from secure_fvi.algorithms.base import Posterior, Problem
from secure_fvi.errors import InputError
from secure_fvi.prediction import log_predictive, predict
from secure_fvi.trees import Params


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
