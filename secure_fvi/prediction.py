"""Posterior predictive draws and densities: the Pyro program run forward under draws of the global sites."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from pyro.distributions import Unit
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.distributions import transform_to

from secure_fvi.algorithms.base import Posterior, Problem
from secure_fvi.density import (
    Params,
    choice,
    has_no_density,
    observed_value,
    param_constraint,
    param_start,
    record_dim,
    running,
)
from secure_fvi.discovery import kind_of
from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel, read_data


class _Forward(Messenger):  # type: ignore[misc]
    """Global sites take given values, all other latent sites are drawn; observed ones are drawn, or scored."""

    def __init__(
        self,
        values: Mapping[str, Tensor],
        theta: Mapping[str, Tensor] | None,
        record_plate: str | None,
        latents: Collection[str] = (),
        chosen: Mapping[str, int] | None = None,
    ) -> None:
        """theta: None for each `pyro.param` as it begins. record_plate: of what is scored; None: nothing is. latents:
        what was not observed in the fit; all else is now, whatever stands in `obs`. chosen: values of discrete sites,
        which are scored."""
        super().__init__()
        self.values, self.theta, self.record_plate = values, theta, record_plate
        self.latents, self.chosen = latents, chosen or {}
        self.observed: Params = {}
        self.drawn: Params = {}  # latent sites
        self.log_prob: list[Tensor] = []  # (N,) each; with a record plate only

    def _pyro_param(self, msg: Any) -> None:
        if self.theta is None:
            msg["value"] = param_start(msg)
        else:
            msg["value"] = transform_to(param_constraint(msg))(self.theta[msg["name"]])

    def _pyro_sample(self, msg: Any) -> None:
        fn, name = msg["fn"], msg["name"]
        scored = self.record_plate is not None
        dim = record_dim(msg, self.record_plate) if self.record_plate is not None else 0
        # What stands outside the record plate is no part of a record's density.
        if isinstance(fn, _Subsample) or (isinstance(fn, Unit) and not dim) or (scored and has_no_density(msg)):
            return
        if has_no_density(msg):  # deterministic: its value follows from the others, in the shape that it has
            self.observed[name] = msg["value"]
        elif name in self.values:
            msg["value"] = self.values[name]
        elif name in self.chosen:
            msg["value"] = choice(fn, self.chosen[name])
            self._score(fn.log_prob(msg["value"]), dim)
        elif name in self.latents or (not msg["is_observed"] and scored):
            msg["value"] = self.drawn[name] = _drawn(fn, name)
        elif not scored:
            msg["value"] = self.observed[name] = _drawn(fn, name)
        else:
            self._score(scale_and_mask(fn.log_prob(observed_value(msg)), msg["scale"], msg["mask"]), dim)
        msg["done"] = True

    def _score(self, term: Tensor, dim: int) -> None:
        self.log_prob.append(term.movedim(dim, 0).reshape(term.shape[dim], -1).sum(1))


def _drawn(fn: Any, name: str) -> Tensor:
    try:
        value: Tensor = fn.sample()
    except NotImplementedError:
        raise InputError(
            f"site '{name}' ({kind_of(fn)}) has a density and no draws: a prior that is improper, or an Unit factor, "
            "says nothing of what would be seen; give it a distribution that can be drawn"
        ) from None
    return value


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
    values = len(problem.density.chosen())
    scores = torch.stack([torch.stack(run.log_prob).sum(0) for run in runs])
    return torch.logsumexp(scores, 0) - math.log(len(scores) // values)


def _runs(
    problem: Problem,
    posterior: Posterior,
    data: Mapping[str, Any],
    n: int,
    seed: int,
    record_plate: str | None,
    local: Local | None,
) -> Iterator[_Forward]:
    """The program run forward for each of `n` draws; where it is scored, once for each value of discrete sites."""
    if n < 1:
        raise InputError(f"the number of draws must be at least 1, not {n}")
    rows, missing = _rows(problem, data, record_plate is not None)
    layout, scored = problem.layout, record_plate is not None
    latents = {site.name for site in layout.sites} | ({name for name, _ in layout.choices} if not scored else set())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for k, z in enumerate(posterior.draws(n, seed)):
            values, _ = problem.density.constrain(z, posterior.theta)
            if local is not None:
                values = {**values, **local(z, seed + k)}
            for chosen in problem.density.chosen() if scored else [{}]:
                forward = _Forward(values, posterior.theta, record_plate, latents, chosen)
                with running(problem.dtype, problem.device), torch.no_grad(), forward as run:
                    _call(problem.model.fn, {**rows, **problem.schema.constants}, missing)
                yield run


def _rows(problem: Problem, data: Mapping[str, Any], scored: bool) -> tuple[Params, list[str]]:
    """The columns that are given, and the names of those that are not, to be predicted."""
    given = {k: v for k, v in data.items() if v is not None} if isinstance(data, Mapping) else data
    schema, records = read_data(given, "predict", problem.dtype)
    want = {name: (shape, dtype) for name, shape, dtype in problem.schema.fields}
    have = {name: (shape, dtype) for name, shape, dtype in schema.fields}
    missing = sorted(want.keys() - have.keys())
    if have != {name: want.get(name) for name in have} or (scored and missing):
        shapes = {name: shape for name, (shape, _) in want.items()}
        raise InputError(f"predict needs the tensors of the fit, of these shapes a record: {shapes}")
    return {name: value.to(problem.device) for name, value in records.rows.items()}, missing


def _call(fn: Callable[..., Any], data: Mapping[str, Any], missing: list[str]) -> None:
    """Run a program, with None for what is missing, unless it has a default of its own."""
    parameters = inspect.signature(fn).parameters
    absent = [name for name in missing if name not in parameters or parameters[name].default is inspect.Parameter.empty]
    try:
        fn(**data, **dict.fromkeys(absent))
    except InputError:
        raise
    except Exception as error:
        if not missing:
            raise
        names = ", ".join(f"'{name}'" for name in missing)
        raise InputError(
            f"the program does not run without {names} ({type(error).__name__}): where obs=None is to be predicted, it "
            f"must take sizes from other columns; or give {names} any values, which draws replace"
        ) from error


def prior_predictive(
    model: FederatedModel | Callable[..., Any],
    data: Mapping[str, Any],
    n: int = 200,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Params:
    """`n` draws of all sites of a program from its prior, (n, *shape) each in its own space: what it says before any
    data are seen.

    `data` are the program's arguments: columns, `sf.Shared` values and numbers, as in `fit`. What it observes is drawn,
    whatever is given for it; `y=None`, or no y, will do where the program takes its sizes from other columns. Each
    `pyro.param` is as it begins. Nothing is sent and nobody's data are looked at but for shapes and covariates.

    Raises InputError for a prior that cannot be drawn (ImproperUniform) and a program that weighs by `pyro.factor`.
    """
    if n < 1:
        raise InputError(f"the number of draws must be at least 1, not {n}")
    fn = model.fn if isinstance(model, FederatedModel) else model
    if not callable(fn):
        raise InputError(f"the model must be an sf.FederatedModel or a Pyro function, not {type(fn).__name__}")
    given = {k: v for k, v in data.items() if v is not None} if isinstance(data, Mapping) else data
    schema, records = read_data(given, "prior_predictive", dtype)
    have = records.rows.keys() | schema.constants.keys()
    missing = [k for k, p in inspect.signature(fn).parameters.items() if k not in have and p.kind not in _VARIABLE]
    draws = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(n):
            with running(dtype, torch.device("cpu")), torch.no_grad(), _Prior() as run:
                _call(fn, {**records.rows, **schema.constants}, missing)
            draws.append(run.observed)
    return {name: torch.stack([d[name] for d in draws]) for name in draws[0]}


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class _Prior(_Forward):
    """Every site is drawn."""

    def __init__(self) -> None:
        super().__init__({}, None, None)

    def _pyro_sample(self, msg: Any) -> None:
        if isinstance(msg["fn"], Unit):
            raise InputError(
                f"pyro.factor '{msg['name']}' weighs what is drawn, and draws from the prior have no weights; write it "
                "as a distribution"
            )
        super()._pyro_sample(msg)


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
