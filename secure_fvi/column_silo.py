"""What one silo with columns of its own reads and checks, and the posterior of its own parameters."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation.base import SecureSum
from secure_fvi.algorithms.vertical.likelihoods import Likelihood
from secure_fvi.algorithms.vertical.predictors import Predictor, Program, check_predictor
from secure_fvi.algorithms.vertical.steps import Response
from secure_fvi.algorithms.vertical.vertical import ColumnsProgram, VerticalView
from secure_fvi.draws import SitePosterior, SitePosteriors, check_draws
from secure_fvi.errors import InputError
from secure_fvi.federated_model import Shared, as_tensor, data_columns, is_array
from secure_fvi.randomness import UNIT_ID, KeyedDraws, derive_key
from secure_fvi.silo import Silo
from secure_fvi.trees import Params, part

MOMENT_DRAWS, MOMENT_SEED = 20_000, 20_240_507


def check_whole(aggregation: SecureSum) -> None:
    """Raises InputError for sums that may lack a silo."""
    if getattr(aggregation, "max_missing", 0):
        raise InputError("max_missing must be 0: a sum that lacks one silo's columns predicts nobody")


def predictor_of(silo: str, program: Program, rows: Params, likelihood: Likelihood, alone: bool) -> Predictor:
    """Read and checked on made data. Raises InputError, which names the silo."""
    try:
        found = Predictor(program, rows, likelihood.columns)
        check_predictor(found, alone)
    except InputError as error:
        raise InputError(f"silo '{silo}': {error}") from error
    return found


def view_of(silo: str, rows: Params, response: Response | tuple[()], secret: bytes) -> VerticalView:
    size = len(next(iter(rows.values())))
    return VerticalView(
        silo,
        rows,
        response,
        size,
        KeyedDraws(secret, b"vertical/records/" + silo.encode(), np.arange(size)),
        KeyedDraws(secret, b"vertical/silo/" + silo.encode(), np.array([UNIT_ID])),
        int.from_bytes(derive_key(secret, b"vertical/start/" + silo.encode())[:7], "big"),
    )


def columns_of(
    silo: str, data: Mapping[str, Tensor | Shared], dtype: torch.dtype, device: torch.device, finite: bool = True
) -> tuple[Params, Params]:
    """The silo's rows and the values that they share, checked; numbers as `dtype`, whole numbers as they are. No value
    is quoted. finite: whether rows have to be; under record privacy one that is not counts as nothing."""

    def moved(value: Tensor) -> Tensor:
        return value.to(device, dtype) if value.is_floating_point() else value.to(device)

    data = data_columns(data, silo)
    shared = {name: moved(torch.as_tensor(v.tensor)) for name, v in data.items() if isinstance(v, Shared)}
    arrays = {name: v for name, v in data.items() if isinstance(v, Tensor) or is_array(v)}
    given = {name: as_tensor(v, f"silo '{silo}': '{name}'") for name, v in arrays.items()}
    given = {name: v.to(dtype) if v.dtype == torch.bool else v for name, v in given.items() if v.dim() > 0}
    if not given or len(given) + len(shared) < len(data):
        raise InputError(
            f"silo '{silo}': give its columns as a dict of tensors or arrays with one row a record, or as a frame"
        )
    sizes = {name: len(v) for name, v in given.items()}
    if len(set(sizes.values())) > 1:
        raise InputError(f"silo '{silo}': all tensors must have one row a record, but sizes are {sizes}")
    if not next(iter(sizes.values())):
        raise InputError(f"silo '{silo}': no records")
    rows = {}
    for name, value in given.items():
        if finite and value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise InputError(f"silo '{silo}': '{name}' holds NaN or infinite values; remove or impute them first")
        rows[name] = moved(value)
    return rows, shared


def response_of(
    likelihood: Likelihood, response: Tensor, offset: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Response:
    y = torch.as_tensor(response).to(device, dtype)
    likelihood.check(y)
    off = torch.zeros_like(y) if offset is None else torch.as_tensor(offset).to(device, dtype)
    if off.shape != y.shape or not bool(torch.isfinite(off).all()):
        raise InputError(f"the offset must be finite, one number a record, shape ({len(y)},)")
    return Response(y, off)


class VerticalLocalPosterior:
    """One silo's q(theta_j), or SOUL's draws, and the values of its `pyro.param`s. For that silo's eyes."""

    def __init__(self, silo: Silo) -> None:
        assert isinstance(silo.program, ColumnsProgram)
        self.silo, self._program, self._rows = silo.name, silo.program, silo.view.rows
        self._local, self.q = silo.local, silo.program.local_fit(silo.local)
        self.wrong_sds = silo.program.wrong_sds(silo.local)  # a line, where sds are

    def __repr__(self) -> str:
        return f"VerticalLocalPosterior('{self.silo}')"

    @property
    def posterior(self) -> SitePosteriors:
        """Mean and sd of each site of the silo's program, from a fixed set of draws."""
        draws = self.sample(MOMENT_DRAWS, MOMENT_SEED)
        return SitePosteriors({name: SitePosterior(d.mean(0), d.std(0)) for name, d in draws.items()})

    def sample(self, n: int, seed: int = 0) -> Params:
        """`n` draws of every site of the silo's program, (n, *shape), in its own space."""
        points = part(self.q, "point")
        return torch.func.vmap(lambda t: self._program.predictor.constrain(t, points))(self._thetas(n, seed))

    def eta(self, rows: Mapping[str, Tensor], n: int, seed: int = 0) -> Tensor:
        """`n` draws of the predictor (n, N, C) for columns `rows` (N, ...) of this silo."""
        theta = self._thetas(n, seed)
        moved, points = self._as_fitted(rows, theta), part(self.q, "point")
        predictor, alone = self._program.predictor, bool(self._program.terms)

        def draw(theta: Tensor) -> Tensor:  # as in the fit
            return (
                predictor.evaluate_alone(theta, points, moved) if alone else predictor.evaluate(theta, points, moved)[0]
            )

        return torch.func.vmap(draw)(theta)

    def _as_fitted(self, rows: Mapping[str, Tensor], theta: Tensor) -> Params:
        """Columns of new people, checked as the fit's were. Raises InputError for others than it had: a program whose
        rows are wider would give more people than there are."""
        given = data_columns(rows, self.silo)
        if given.keys() != self._rows.keys():
            raise InputError(f"silo '{self.silo}': give the columns {', '.join(self._rows)}, not {', '.join(given)}")
        found, _ = columns_of(self.silo, given, theta.dtype, theta.device)
        for name, fitted in self._rows.items():
            value, whole = found.get(name), not fitted.is_floating_point()
            if value is None or value.shape[1:] != fitted.shape[1:] or (whole and value.is_floating_point()):
                shape = ", ".join(["N", *map(str, fitted.shape[1:])])
                raise InputError(
                    f"silo '{self.silo}': '{name}' holds {'whole ' * whole}numbers of shape ({shape}), as in the fit"
                )
        return {name: found[name].to(fitted.dtype) for name, fitted in self._rows.items()}

    def _thetas(self, n: int, seed: int) -> Tensor:
        check_draws(n)
        return self._program.thetas(self._local, n, seed)
