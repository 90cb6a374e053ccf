"""Reading a Pyro program once: which sites it has, whose they are, and where a variational fit should start.

Discovery runs on made data of the shared schema, so the server and every silo find the same layout without
looking at a record.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from pyro.distributions import (
    Delta,
    Independent,
    LKJCholesky,
    MaskedDistribution,
    SineBivariateVonMises,
    Unit,
    VonMises,
    ZeroInflatedDistribution,
)
from pyro.distributions.torch_distribution import ExpandedDistribution, TorchDistributionMixin
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.distributions import biject_to, transform_to
from torch.overrides import TorchFunctionMode

from secure_fvi.density import Layout, Params, Role, Site, Start, param_constraint, param_start, running
from secure_fvi.errors import InputError, SecureFVIWarning, one_line
from secure_fvi.federated_model import FederatedModel, Schema
from secure_fvi.program_density import choice, has_no_density, record_dim, site_mask
from secure_fvi.randomness import seeded

#: Values of a record's discrete sites together, each of which is a run of the program in every step.
MOST_CHOICES = 64
_MEDIAN_DRAWS = 999  # for priors that have neither a finite mean nor a quantile function
#: Of a constrained site in unconstrained space: e^50 is no place to start from.
_FARTHEST_START = 50.0


#: What becomes of a site that has a value and is no record's.
_KNOWN = "; a parameter whose value is known is a number in the program, in place of a site with obs or pyro.condition"


class Discovery(Messenger):  # type: ignore[misc]
    """Sets each latent to where it starts and notes its shape and role."""

    def __init__(self, model: FederatedModel, records: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.model, self.records, self.dtype, self.device = model, records, dtype, device
        self.sites: list[Site] = []
        self.choices: list[tuple[str, int]] = []  # discrete sites, and how many values each has
        self.weighed: set[str] = set()  # sites in the record plate under poutine.scale
        self.values: dict[str, Tensor] = {}
        self.theta: Params = {}
        self.plates: set[str] = set()
        self.names: set[str] = set()  # of all sites
        self.observes = False  # anything in the record plate
        self.factors: set[str] = set()  # outside the record plate
        self.shapes: dict[str, tuple[int, ...]] = {}  # of the terms in the record plate
        self.how: dict[str, str] = {}  # the start of each latent site was found
        # By what is observed, the first site that observes it, and the tensor, so that no other takes its place.
        self.data_of: dict[tuple[Any, ...], tuple[str, Tensor]] = {}
        self.twice: list[tuple[str, str]] = []  # sites that observe the same

    def _pyro_param(self, msg: Any) -> None:
        name = msg["name"]
        if name not in self.theta:
            value = param_start(msg).to(self.dtype)
            constraint = param_constraint(msg)
            unconstrained = transform_to(constraint).inv(value)
            if not bool(constraint.check(value).all()) or not bool(torch.isfinite(unconstrained).all()):
                raise InputError(f"pyro.param '{name}' begins outside or on the edge of its constraint, {constraint}")
            self.theta[name] = unconstrained
        msg["value"] = transform_to(param_constraint(msg))(self.theta[name])

    def _pyro_sample(self, msg: Any) -> None:
        fn, name = msg["fn"], msg["name"]
        if has_no_density(msg):
            _check_whole(msg)
            return
        _check_kind(msg)
        if name in self.names:
            raise InputError(f"two sample statements are called '{name}'; give each its own name")
        self.names.add(name)
        self.plates |= {frame.name for frame in msg["cond_indep_stack"]}
        plate_dim = self._checked_record_dim(msg)
        if plate_dim:
            self.shapes[name] = tuple(fn.batch_shape)
            if isinstance(msg["scale"], Tensor) or msg["scale"] != 1:
                self.weighed.add(name)
        if msg["is_observed"]:
            self._observed(msg, plate_dim)
            return
        self._latent(msg, plate_dim)

    def _observed(self, msg: Any, plate_dim: int) -> None:
        fn, name, value = msg["fn"], msg["name"], msg["value"]
        self.observes |= plate_dim != 0
        if isinstance(fn, Unit):
            if not plate_dim:
                self.factors.add(name)
            return
        if not plate_dim:
            raise InputError(
                f"observed site '{name}' is outside the record plate '{self.model.record_plate}'; "
                f"data must belong to records{_KNOWN}"
            )
        wanted = tuple(fn.shape())
        if not isinstance(value, Tensor):
            raise InputError(f"observed site '{name}': obs is no tensor but {type(value).__name__}")
        same = value.data_ptr(), value.shape, value.stride()
        if (first := self.data_of.setdefault(same, (name, value))[0]) != name:
            self.twice.append((first, name))
        try:
            fits = torch.broadcast_shapes(value.shape, wanted) == torch.Size(wanted)
        except RuntimeError:
            fits = False
        if not fits:
            raise InputError(
                f"observed site '{name}': its data have shape {tuple(value.shape)} where the distribution has {wanted} "
                f"for {self.records} records; a column of shape (N, 1) beside one of (N,)? Use squeeze(-1) or "
                ".to_event(1)"
            )

    def _latent(self, msg: Any, plate_dim: int) -> None:
        fn, name = msg["fn"], msg["name"]
        if _is_discrete(fn):
            self._discrete(msg, plate_dim)
            return
        inner = fn
        while hasattr(inner, "base_dist"):
            if isinstance(inner, ZeroInflatedDistribution):
                raise InputError(
                    f"latent site '{name}' is 0 itself with a probability ({kind_of(inner)}), which no density has; "
                    "write a prior that is narrow around 0, such as Laplace or a horseshoe"
                )
            masked_inside = inner is not fn and isinstance(inner, MaskedDistribution)
            if masked_inside:
                raise InputError(f"latent site '{name}' has a mask inside to_event; write .to_event(...).mask(...)")
            inner = inner.base_dist
        if isinstance(inner, Delta):
            raise InputError(f"latent site '{name}' is a point (Delta); write pyro.deterministic")
        # By its support it is a real number, and has its density every 2 pi again.
        if isinstance(inner, VonMises | SineBivariateVonMises):
            raise InputError(
                f"latent site '{name}' is an angle ({kind_of(inner)}), which has no end; write Uniform(a, a + 2 pi), "
                "with a far from where the data are, and what the prior adds as a pyro.factor"
            )
        _check_unconstrained(name, fn)
        given = self.model.start.get(name)
        if given is None:
            value, unconstrained = self._centred(name, fn)
        else:
            self.how[name], value = "given", _given(name, given, fn, self.device).to(self.dtype)
            unconstrained = biject_to(fn.support).inv(value)
        msg["value"], msg["done"] = value, True
        self.values[name] = unconstrained
        self.sites.append(self._site(name, fn, unconstrained, plate_dim))

    def _discrete(self, msg: Any, plate_dim: int) -> None:
        """Note a site that the density sums out, at its first value; raises InputError for what it cannot."""
        fn, name = msg["fn"], msg["name"]
        what = f"latent site '{name}' is discrete ({kind_of(fn)})"
        if not plate_dim:
            raise InputError(
                f"{what} and belongs to no record: only a record's own can be summed out, since others make records "
                "depend on each other. Give weights a continuous prior in its place, or fit each of its values"
            )
        if not fn.has_enumerate_support:
            raise InputError(
                f"{what} and has no end of values to sum over; observe its marginal (GammaPoisson for a Poisson of a "
                "Gamma rate, say)"
            )
        if any(size != 1 for k, size in enumerate(fn.batch_shape) if k - len(fn.batch_shape) != plate_dim):
            raise InputError(
                f"{what} with several values a record; sum these out in the program: torch.logsumexp over their values "
                "in a pyro.factor, or dist.MixtureSameFamily"
            )
        if site_mask(msg) is not None:
            raise InputError(f"{what} and masked; mask what is observed instead")
        values = fn.enumerate_support(expand=False)
        self.choices.append((name, len(values)))
        together = math.prod(size for _, size in self.choices)
        if together > MOST_CHOICES:
            raise InputError(
                f"{what}: with the discrete sites before it a record has {together} values to sum over, {MOST_CHOICES} "
                "at most; sum them out in the program"
            )
        msg["value"], msg["done"] = choice(fn, 0), True

    def _centred(self, name: str, fn: Any) -> tuple[Tensor, Tensor]:
        """The centre of a prior in the model's space and unconstrained; 0 unconstrained where there is none."""
        transform = biject_to(fn.support)
        self.how[name], value = _centre(fn)
        if value is not None:
            return value.to(self.dtype), transform.inv(value.to(self.dtype))
        zero = torch.zeros(transform.inverse_shape(fn.shape()), dtype=self.dtype, device=self.device)
        return transform(zero), zero

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


def _is_discrete(fn: Any) -> bool:
    with contextlib.suppress(NotImplementedError):  # of what has no support, which is refused for that
        return fn.has_enumerate_support or bool(getattr(fn.support, "is_discrete", False))
    return False


def _check_whole(msg: Any) -> None:
    """A plate takes all of its records."""
    fn = msg["fn"]
    if isinstance(fn, _Subsample) and fn.subsample_size not in (None, fn.size):
        raise InputError(f"plate '{msg['name']}' subsamples; leave minibatches to the algorithm (sampling_rate)")


def _check_kind(msg: Any) -> None:
    fn = msg["fn"]
    if isinstance(fn, torch.distributions.Distribution) and not isinstance(fn, TorchDistributionMixin):
        raise InputError(
            f"site '{msg['name']}' has a distribution of torch.distributions; take it from pyro.distributions"
        )


#: What to write in place of a latent that no map from unconstrained numbers reaches.
_DIRECTION = "write it as n / n.norm(dim=-1, keepdim=True) of Normal numbers n, by pyro.deterministic"
_INSTEAD = {
    "Wishart": "write its factor as sds times correlations, sd.unsqueeze(-1) * LKJCholesky(d, 1), with a prior of each",
    "ProjectedNormal": _DIRECTION,
    "VonMises3D": _DIRECTION,
}


def _check_unconstrained(name: str, fn: Any) -> None:
    """Raises InputError, with what to write, where a support has no map from unconstrained numbers or a distribution no
    density."""
    try:
        transform = biject_to(fn.support)
        zero = torch.zeros(transform.inverse_shape(fn.shape()))
        if bool(torch.isfinite(transform(zero)).all()):
            fn.log_prob(transform(zero))
            return
        why = f"has a support with no end, {fn.support}, whose middle is no number"
    except NotImplementedError:
        why = "has no density, or a support that is not made of unconstrained numbers"
    by_factor = (
        "write ImproperUniform(constraints.real, (), ()) in its place, or constraints.positive or what else it has, "
        "and what the prior says as a pyro.factor"
    )
    kind = kind_of(fn)
    raise InputError(f"latent site '{name}' ({kind}) {why}; {_INSTEAD.get(kind, by_factor)}")


def _centre(fn: Any) -> tuple[str, Tensor | None]:
    """The prior mean, median, or median of draws: the first that is a finite place to start from inside the support,
    and which; None, "nowhere". Of correlations, whose mean none of them is, that they are none, which counts among
    draws."""
    inner = fn
    while isinstance(inner, Independent):
        inner = inner.base_dist
    if isinstance(inner, LKJCholesky):
        return "draws", torch.eye(fn.shape()[-1]).expand(fn.shape()).clone()

    def drawn() -> Tensor:
        with seeded(0):
            return fn.sample((_MEDIAN_DRAWS,)).median(0).values

    def unconstrained() -> Tensor:  # of a support in which the median of each number need not lie, as on a simplex
        transform = biject_to(fn.support)
        with seeded(0):
            centre: Tensor = transform(transform.inv(fn.sample((_MEDIAN_DRAWS,))).median(0).values)
        return centre

    ways = (("mean", lambda: fn.mean), ("median", lambda: fn.icdf(torch.full(fn.shape(), 0.5))))
    for how, attempt in (*ways, ("draws", drawn), ("draws", unconstrained)):
        try:
            value: Tensor = attempt().detach().expand(fn.shape()).clone()
        except (NotImplementedError, AttributeError, RuntimeError):  # of some mixtures Pyro cannot draw many at once
            continue
        if not bool(torch.isfinite(value).all()) or not bool(fn.support.check(value).all()):
            continue
        at = biject_to(fn.support).inv(value)
        near = at.shape == value.shape and torch.equal(at, value)
        if near or bool((at.abs() <= _FARTHEST_START).all()):
            return how, value
    return "nowhere", None


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


def _discover(model: FederatedModel, rows: Params, constants: dict[str, Any], dtype: torch.dtype) -> Discovery:
    some = next(iter(rows.values()))
    found = Discovery(model, some.shape[0], dtype, some.device)
    with running(dtype, some.device), torch.no_grad(), found as run:
        model.fn(**rows, **constants)
    return run


def as_model(model: FederatedModel | Callable[..., Any], schema: Schema, dtype: torch.dtype) -> FederatedModel:
    """The model as a run takes it. Raises InputError for what is none.

    A bare Pyro function is one whose record plate is the plate around all that it observes, of as many elements as
    there are records. A program with tensors of its own of another floating point type than the data, where PyTorch
    refuses to multiply the two, is run with both in the run's type.
    """
    if not isinstance(model, FederatedModel) and not callable(model):
        raise InputError(f"the model must be an sf.FederatedModel or a Pyro function, not {type(model).__name__}")
    fn = model.fn if isinstance(model, FederatedModel) else model
    _check_arguments(fn, schema)
    try:
        plates, alone = _plates(fn, schema, dtype)
    except InputError:
        if isinstance(model, FederatedModel):
            return model  # to be refused by `read_layout`, which knows more
        raise
    except (Exception, SystemExit) as error:  # of sys.exit() in a program a session knows nothing
        if not _is_about_types(error):
            if isinstance(model, FederatedModel):
                return model
            raise _fails(fn, error) from error
        fn = _InOneType(fn, dtype)
        return as_model(replace(model, fn=fn) if isinstance(model, FederatedModel) else fn, schema, dtype)
    if isinstance(model, FederatedModel):
        return model
    if alone is not None:
        raise InputError(
            f"observed site '{alone}' is in no plate of as many elements as there are records: what is observed, or "
            f"conditioned on, belongs to records{_KNOWN}"
        )
    if len(plates) != 1:
        have = f"; there are: {', '.join(sorted(plates))}" if plates else ""
        raise InputError(
            f"which plate of '{_name(fn)}' counts records is not clear: one around all that it observes, of as many "
            f"elements as there are records{have}. Name it: sf.FederatedModel({_name(fn)}, record_plate=...)"
        )
    return FederatedModel(fn, plates.pop())


class _Plates(Discovery):
    """Notes the plates around each observed site; refuses what it could not read these from."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.around: dict[str, set[str]] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if has_no_density(msg):
            _check_whole(msg)
            return
        _check_kind(msg)
        if msg["is_observed"]:
            if msg["cond_indep_stack"] or not isinstance(msg["fn"], Unit):
                plates = {frame.name for frame in msg["cond_indep_stack"] if frame.size == self.records}
                self.around[msg["name"]] = plates
        elif not _is_discrete(msg["fn"]):
            msg["value"], msg["done"] = self._centred(msg["name"], msg["fn"])[0], True


def _plates(fn: Callable[..., Any], schema: Schema, dtype: torch.dtype) -> tuple[set[str], str | None]:
    """The plates around all that is observed, of as many elements as there are records; an observed site in none."""
    found: list[set[str]] = []
    alone = None
    for count in (2, 3):
        rows = schema.dummy_rows(count)
        run = _Plates(FederatedModel(fn), count, dtype, next(iter(rows.values())).device)
        with running(dtype, run.device), torch.no_grad(), run:
            fn(**rows, **schema.constants)
        if not run.around:
            raise InputError(f"{_name(fn)} observes nothing; give obs= to a site in the record plate")
        found += run.around.values()
        alone = next((name for name, plates in run.around.items() if not plates), alone)
    return set.intersection(*found) if found else set(), alone


def _is_about_types(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(
        word in str(error) for word in ("same dtype", "expected scalar type", "dtypes", "same data type")
    )


class _InOneType:
    """A program with operations that take numbers of one type alone given them in the run's."""

    def __init__(self, fn: Callable[..., Any], dtype: torch.dtype) -> None:
        self.fn, self.dtype = fn, dtype
        functools.update_wrapper(self, fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Casts(self.dtype):
            return self.fn(*args, **kwargs)


class _Casts(TorchFunctionMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if not _is_about_types(error):
                raise
            return func(*_cast(args, self.dtype), **_cast(kwargs or {}, self.dtype))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(v, dtype) for v in value)
    return {k: _cast(v, dtype) for k, v in value.items()} if isinstance(value, dict) else value


def read_layout(model: FederatedModel, schema: Schema, dtype: torch.dtype) -> tuple[Layout, Start]:
    """The sites of a model, found on made data; raises InputError for what cannot be federated. Warns with
    SecureFVIWarning of a prior that has no centre."""
    _check_arguments(model.fn, schema)
    runs = {}
    for count in (2, 3):
        try:
            runs[count] = _discover(model, schema.dummy_rows(count), schema.constants, dtype)
        except InputError:
            raise
        except (Exception, SystemExit) as error:  # the program is the user's: anything may come
            raise _fails(model.fn, error) from error
    run, other = runs[2], runs[3]
    if model.record_plate not in run.plates:
        have = ", ".join(f"'{p}'" for p in sorted(run.plates)) or "none"
        raise InputError(f"the model has no plate '{model.record_plate}' with a site in it; its plates: {have}")
    _check_growth(model, run, other)
    names = [s.name for s in run.sites]
    for site in model.silo_sites:
        if site not in names and site not in run.factors:
            raise InputError(f"silo site '{site}' does not exist; latent sites: {', '.join(names) or 'none'}")
    for site in model.start:
        if site not in names:
            raise InputError(f"start names '{site}', which is no latent site; these are: {', '.join(names) or 'none'}")
    if not run.observes:
        raise InputError("the model observes nothing; give obs= to a site in the record plate")
    if run.choices and run.weighed:
        raise InputError(
            f"site '{min(run.weighed)}' is weighed by poutine.scale beside the discrete site '{run.choices[0][0]}': "
            "it is not clear what the sum over its values weighs; repeat records, or sum it out in the program"
        )
    if run.choices != other.choices:
        raise InputError("how many values a discrete site has depends on the number of records")
    theta = tuple((n, tuple(v.shape)) for n, v in run.theta.items())
    layout = Layout(tuple(run.sites), theta, tuple(run.choices))
    if layout.size("global") == 0:
        within = ", ".join(site.name for site in run.sites if site.role == "record")
        owned = (
            f" ({within}: in the record plate, and so a record's own; a PyroSample belongs to where it is first read)"
        )
        hint = owned if within else ""
        raise InputError(f"the model has no global latent site; there is nothing to fit together{hint}")
    for first, second in run.twice:
        warnings.warn(
            f"sites '{first}' and '{second}' observe the same column: every record counts twice",
            SecureFVIWarning,
            stacklevel=2,
        )
    for site in (name for name, how in run.how.items() if how == "nowhere"):
        warnings.warn(
            f"the prior of site '{site}' has no finite centre to start from; the fit begins at 0 in unconstrained "
            "space. Say where with start={...}, or take a prior that says more",
            SecureFVIWarning,
            stacklevel=2,
        )
    return layout, start_of(run)


def _check_growth(model: FederatedModel, run: Discovery, other: Discovery) -> None:
    """Refuse what depends on the number of records outside the record plate, or twice inside it."""
    if [s.name for s in run.sites] != [s.name for s in other.sites] or run.names != other.names:
        raise InputError(
            "the model has other sites for 2 records than for 3; use one vectorised statement in the record plate "
            f"'{model.record_plate}' instead of one a record"
        )
    for mine, theirs in zip(run.sites, other.sites, strict=True):
        if mine.shape != theirs.shape:
            raise InputError(
                f"latent site '{mine.name}' grows with the number of records but is not inside the record plate "
                f"'{model.record_plate}'"
                if mine.role != "record"
                else f"record-level site '{mine.name}' has shape {mine.shape} a record at 2 records, "
                f"{theirs.shape} at 3: a column of shape (N, 1) beside one of (N,)?"
            )
    for name, shape in run.shapes.items():
        if sum(a != b for a, b in zip(shape, other.shapes[name], strict=True)) > 1:
            raise InputError(
                f"site '{name}' has shape {shape} for 2 records: every record beside every other. "
                "Is a column of shape (N, 1) beside one of (N,)? Use squeeze(-1), or .to_event(1)"
            )
    for name, value in run.theta.items():
        if name not in other.theta or value.shape != other.theta[name].shape:
            raise InputError(f"pyro.param '{name}' depends on the number of records; it belongs to everybody")


def start_of(run: Discovery) -> Start:
    """Where the latents that a program was read with begin."""
    return Start(run.flat("global"), run.flat("silo"), run.flat("record"), run.theta)


def _check_arguments(fn: Callable[..., Any], schema: Schema) -> None:
    if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn):
        raise InputError(
            f"{_name(fn)} does nothing when it is called: it yields, or is async; write an ordinary function"
        )
    names = [f[0] for f in schema.fields] + list(schema.constants)
    try:
        inspect.signature(fn).bind(**dict.fromkeys(names))
    except (TypeError, ValueError) as error:
        raise InputError(f"the model function does not take the data's names {sorted(names)}: {error}") from None


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", "model")


def kind_of(fn: Any) -> str:
    """What a distribution is called, without the wrappers around it; LogNormal, of a normal's draws, is none."""
    while isinstance(fn, Independent | MaskedDistribution | ExpandedDistribution):
        fn = fn.base_dist
    return type(fn).__name__


def _fails(fn: Callable[..., Any], error: BaseException) -> InputError:
    said = f": {line}" if (line := one_line(error)) else ""
    hint = ""
    if _is_about_types(error):
        hint = "; numbers that the program brings along must be of the run's dtype (torch.float64)"
    return InputError(f"{_name(fn)} fails on made data of the given shapes ({type(error).__name__}{said}){hint}")
