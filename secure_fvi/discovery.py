"""Reading a Pyro program once: which sites it has, whose they are, and where a variational fit should start.

Discovery runs on made data of the shared schema, so the server and every silo find the same layout without
looking at a record.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.distributions import biject_to, transform_to

from secure_fvi.density import Layout, Params, Role, Site, param_constraint, record_dim, running
from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel, Schema

_MEDIAN_DRAWS = 999  # for priors that have neither a finite mean nor a quantile function


class Start(NamedTuple):
    """Unconstrained values at the centre of the prior, or where the model is told to start."""

    z_global: Tensor  # (n_global,)
    z_silo: Tensor  # (n_silo,)
    z_record: Tensor  # (N, n_record)
    theta: Params


class _Discover(Messenger):  # type: ignore[misc]
    """Sets each latent to where it starts and notes its shape and role."""

    def __init__(self, model: FederatedModel, records: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.model, self.records, self.dtype, self.device = model, records, dtype, device
        self.sites: list[Site] = []
        self.values: dict[str, Tensor] = {}
        self.theta: Params = {}
        self.plates: set[str] = set()

    def _pyro_param(self, msg: Any) -> None:
        name, args = msg["name"], msg["args"]
        if name not in self.theta:
            if len(args) < 2:
                raise InputError(f"pyro.param '{name}' has no initial value where it is first used")
            init = args[1]() if callable(args[1]) else args[1]
            value = torch.as_tensor(init).detach().to(self.dtype)
            self.theta[name] = transform_to(param_constraint(msg)).inv(value)
        msg["value"] = transform_to(param_constraint(msg))(self.theta[name])

    def _pyro_sample(self, msg: Any) -> None:
        fn, name = msg["fn"], msg["name"]
        if isinstance(fn, _Subsample):
            if fn.subsample_size not in (None, fn.size):
                raise InputError(f"plate '{name}' subsamples; leave minibatches to the algorithm (sampling_rate)")
            return
        self.plates |= {frame.name for frame in msg["cond_indep_stack"]}
        plate_dim = self._checked_record_dim(msg)
        if msg["is_observed"]:
            if not plate_dim:
                raise InputError(
                    f"observed site '{name}' is outside the record plate '{self.model.record_plate}'; "
                    "data must belong to records"
                )
            return
        if fn.has_enumerate_support or getattr(fn.support, "is_discrete", False):
            raise InputError(f"latent site '{name}' is discrete ({type(fn).__name__}); sum it out of the model")
        given = self.model.start.get(name)
        value = (_centre(fn) if given is None else _given(name, given, fn, self.device)).to(self.dtype)
        unconstrained = biject_to(fn.support).inv(value)
        msg["value"], msg["done"] = value, True
        self.values[name] = unconstrained
        self.sites.append(self._site(name, fn, unconstrained, plate_dim))

    def _checked_record_dim(self, msg: Any) -> int:
        for frame in msg["cond_indep_stack"]:
            if frame.name == self.model.record_plate and frame.size != self.records:
                raise InputError(
                    f"record plate '{frame.name}' has size {frame.size} where the data has {self.records} records; "
                    "its size is the number of records"
                )
        return record_dim(msg, self.model.record_plate)

    def _site(self, name: str, fn: Any, unconstrained: Tensor, plate_dim: int) -> Site:
        event_dim = unconstrained.dim() - len(fn.batch_shape)
        shape, role = unconstrained.shape, "silo" if name in self.model.silo_sites else "global"
        if plate_dim:
            if role == "silo":
                raise InputError(f"silo site '{name}' is inside the record plate '{self.model.record_plate}'")
            role = "record"
            axis = unconstrained.dim() + plate_dim - event_dim
            shape = shape[:axis] + shape[axis + 1 :]
        return Site(name, role, tuple(shape), event_dim, plate_dim, str(fn.support))  # type: ignore[arg-type]

    def flat(self, role: Role) -> Tensor:
        """Values of one role as the layout orders them: (n,) or, for records, (N, n)."""
        parts = []
        for site in self.sites:
            if site.role == role:
                value = self.values[site.name]
                if role == "record":
                    value = value.movedim(site.plate_dim - site.event_dim, 0)
                    parts.append(value.reshape(self.records, -1))
                else:
                    parts.append(value.reshape(-1))
        empty = torch.zeros((self.records, 0) if role == "record" else (0,), dtype=self.dtype, device=self.device)
        return torch.cat(parts, -1) if parts else empty


def _centre(fn: Any) -> Tensor:
    """The prior mean where there is a finite one inside the support, the median otherwise."""
    for attempt in (lambda: fn.mean, lambda: fn.icdf(torch.full(fn.shape(), 0.5))):
        try:
            value: Tensor = attempt()
        except (NotImplementedError, AttributeError):
            continue
        if bool(torch.isfinite(value).all()) and bool(fn.support.check(value).all()):
            return value.detach().expand(fn.shape()).clone()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        draws = fn.sample((_MEDIAN_DRAWS,))
    return draws.median(0).values.detach()


def _given(name: str, value: float | Tensor, fn: Any, device: torch.device) -> Tensor:
    """A value of `FederatedModel.start` in the shape of its site."""
    try:
        found = torch.as_tensor(value, dtype=torch.float64, device=device).detach().expand(fn.shape())
    except (RuntimeError, TypeError, ValueError):
        raise InputError(f"start of site '{name}' cannot be given the site's shape {tuple(fn.shape())}") from None
    inside = bool(fn.support.check(found).all())
    if not inside or not bool(torch.isfinite(biject_to(fn.support).inv(found)).all()):  # on its edge, or infinite
        raise InputError(f"start of site '{name}' is outside its support, {fn.support}")
    return found.clone()


def _discover(model: FederatedModel, rows: Params, constants: dict[str, Any], dtype: torch.dtype) -> _Discover:
    some = next(iter(rows.values()))
    found = _Discover(model, some.shape[0], dtype, some.device)
    with running(dtype, some.device), torch.no_grad(), found as run:
        model.fn(**rows, **constants)
    return run


def read_layout(model: FederatedModel, schema: Schema, dtype: torch.dtype) -> tuple[Layout, Start]:
    """The sites of a model, found on made data; raises InputError for what cannot be federated."""
    _check_arguments(model, schema)
    runs = {}
    for count in (2, 3):
        try:
            runs[count] = _discover(model, schema.dummy_rows(count), schema.constants, dtype)
        except InputError:
            raise
        except Exception as error:  # the program is the user's: anything may come
            name = getattr(model.fn, "__name__", "model")
            raise InputError(
                f"{name} fails on made data of the given shapes ({type(error).__name__}: {_one_line(error)})"
            ) from error
    run, other = runs[2], runs[3]
    if model.record_plate not in run.plates:
        have = ", ".join(f"'{p}'" for p in sorted(run.plates)) or "none"
        raise InputError(f"the model has no plate '{model.record_plate}' with a site in it; its plates: {have}")
    for mine, theirs in zip(run.sites, other.sites, strict=True):
        if mine.shape != theirs.shape:
            raise InputError(
                f"latent site '{mine.name}' grows with the number of records but is not inside the record plate "
                f"'{model.record_plate}'"
            )
    names = [s.name for s in run.sites]
    for site in model.silo_sites:
        if site not in names:
            raise InputError(f"silo site '{site}' does not exist; latent sites: {', '.join(names) or 'none'}")
    for site in model.start:
        if site not in names:
            raise InputError(f"start names '{site}', which is no latent site; these are: {', '.join(names) or 'none'}")
    layout = Layout(tuple(run.sites), tuple((n, tuple(v.shape)) for n, v in run.theta.items()))
    if layout.size("global") == 0:
        raise InputError("the model has no global latent site; there is nothing to fit together")
    return layout, _start(run)


def start_at_silo(
    model: FederatedModel, rows: Params, constants: Mapping[str, Any], dtype: torch.dtype, silo: str
) -> Start:
    """The same start with a silo's own records. Seen by that silo only; errors quote nothing of its data."""
    try:
        return _start(_discover(model, rows, dict(constants), dtype))
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"silo '{silo}': the model fails on its data ({type(error).__name__})") from None


def _start(run: _Discover) -> Start:
    return Start(run.flat("global"), run.flat("silo"), run.flat("record"), run.theta)


def _check_arguments(model: FederatedModel, schema: Schema) -> None:
    names = [f[0] for f in schema.fields] + list(schema.constants)
    try:
        inspect.signature(model.fn).bind(**dict.fromkeys(names))
    except TypeError as error:
        raise InputError(f"the model function does not take the data's names {sorted(names)}: {error}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
