"""What the sites of a program have to keep to, of one that runs in this process: a graph does not say what they are.

Every latent has a gradient and no edge (`check_sites`), distributions take what they are given (`misplaced`), and a
program keeps nothing between its runs (`watched`). Pyro's validation is off while one runs; this stands in its place.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import constraints
from torch.overrides import TorchFunctionMode

from secure_fvi.algorithms.base import Problem
from secure_fvi.compiled import over_draws
from secure_fvi.density import Params, running
from secure_fvi.discovery import kind_of
from secure_fvi.errors import DataError, InputError, SecureFVIWarning
from secure_fvi.program_contract import MADE, SOME, Point, same
from secure_fvi.program_density import ALL_RECORDS, Evaluation, has_no_density
from secure_fvi.randomness import seeded

_FAR = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # and where an edge of log p is looked for
_EDGE = 1e6  # nats that log p falls there at least
_BELOW = 30.0  # nats under the start from which on an edge is where q does not come, or a logarithm that has run out
_FORBIDDEN = 1e8  # nats: what a pyro.factor under minus that much is taken to forbid
_HALVED = 6  # halves of a way that are looked at at once
_AROUND = 4  # points at each distance from where a run ran off
_PRIOR_DRAWS = 16  # in which a parameter is looked for that its distribution does not take


def check_sites(point: Point, rows: Params) -> None:
    """Raise InputError where a latent moves log p and no gradient says so; warn of one that moves nothing."""
    _check_gradients(point, rows)
    check_edges(point, rows)
    _warn_of_parameters(point.problem, rows)


def _check_gradients(point: Point, rows: Params) -> None:
    """Every latent and every pyro.param moves log p, and the gradient says by how much."""
    problem = point.problem
    latents = {name: value.detach().clone().requires_grad_() for name, value in point.latents().items()}
    theta = {name: value.detach().clone().requires_grad_() for name, value in point.theta.items()}
    with torch.enable_grad(), _Edges():
        run = problem.density.run(latents, theta, rows)
        total = terms_without(run)
    for name, leaf in latents.items():
        gradient = gradient_of(terms_without(run, name), leaf)
        _check_slope(point, rows, name, gradient)
        if name in run.masks:
            check_masked(name, run.masks[name], gradient)
    for name, leaf in theta.items():
        # An encoder's weights are pyro.params too, which log p does not know.
        if problem.model.encoder is None and gradient_of(total, leaf) is None:
            hint = "; a PyroModule's own torch parameters stay as they are: declare them with PyroParam or PyroSample"
            hint = "; give pyro.module(..., update_module_params=True)" if "$$$" in name else hint
            raise InputError(f"pyro.param '{name}' does not reach the log density{hint}")


class _Edges(Messenger):  # type: ignore[misc]
    """Refuses what is observed within bounds that latents move: log p falls off an edge there, which no gradient tells
    of, and no normal q stays on one side of it."""

    def _pyro_sample(self, msg: Any) -> None:
        if has_no_density(msg) or not msg["is_observed"]:
            return
        try:
            bounds = vars(base_constraint(msg["fn"].support)).values()
        except Exception:  # a distribution of the user's own, without one
            return
        if any(bound.requires_grad for bound in tensors_in(bounds)):
            raise InputError(
                f"observed site '{msg['name']}': what {kind_of(msg['fn'])} can take depends on latent sites, and its "
                "density ends where they say, which no gradient tells of. Take one with a tail, or make the bound a "
                "number"
            )


#: By which functions a program compares; the log density of one that compares nothing that follows from latents has no
#: edge but where a logarithm ends, which is none of its making.
_COMPARE = {"lt", "le", "gt", "ge", "eq", "ne", "where", "masked_fill", "sign", "heaviside", "relu", "clamp", "clip"}


class _Compares(TorchFunctionMode):
    """Whether a program compares values that follow from latents."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "").strip("_") in _COMPARE:
            self.seen |= any(t.requires_grad for t in tensors_in((args, *(kwargs or {}).values())))
        return func(*args, **(kwargs or {}))


def directions(point: Point) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each latent site, where it is, and a random direction from there, and its opposite."""
    rng = torch.Generator().manual_seed(1)
    for site, at in point.latents().items():
        direction = torch.randn(at.shape, generator=rng, dtype=torch.float64).to(at)
        yield site, at, direction
        yield site, at, -direction


def check_edges(point: Point, rows: Params, silo: str | None = None) -> None:
    """Refuse an edge off which the terms of records fall as a latent moves, by a pyro.factor of -inf or -1e10, say:
    what `_Edges` refuses, by hand. One of global factors alone may lie where q does not come: the fit tells of it."""
    density, latents = point.problem.density, point.latents()
    if point.problem.model.edgeless:
        return
    leaves = {name: value.detach().clone().requires_grad_() for name, value in latents.items()}
    with torch.enable_grad(), _Compares() as compares:
        terms = _observed_terms(density.run(leaves, point.theta, rows))
    if not compares.seen:
        return
    here = {name: float(value.detach()) for name, value in terms.items()}

    for latent, at, direction in directions(point):

        def own(far: Tensor, latent: str = latent, at: Tensor = at, direction: Tensor = direction) -> Params:
            return _observed_terms(density.run({**latents, latent: at + far * direction}, point.theta, rows))

        near, before = 0.0, here
        for far in _FAR:
            found = _alone(own, far, at)
            if not found:
                break
            for site in found:
                if not _fallen(before[site], found[site]):
                    continue
                ends, between = (near, far), (before[site], found[site])
                for _ in range(60 // _HALVED):  # to where the two are one number
                    fars = [*ends, *_halved(ends)]
                    values = dict(zip(fars, _together(own, fars, at), strict=True))
                    # PyTorch maps some operations wrongly: only what it gives again is believed.
                    known = all(
                        math.isclose(values[e].get(site, math.nan), v) for e, v in zip(ends, between, strict=True)
                    )
                    for _ in range(_HALVED):
                        middle = 0.5 * sum(ends)
                        value = (values[middle] if known else _alone(own, middle, at)).get(site, between[1])
                        if _fallen(between[0], value):
                            ends, between = (ends[0], middle), (between[0], value)
                        else:
                            ends, between = (middle, ends[1]), (value, between[1])
                if _fallen(*between) and max(between) > here[site] - _BELOW:
                    where, error = ("", InputError) if silo is None else (f"silo '{silo}': ", DataError)
                    raise error(
                        f"{where}site '{site}': its log density falls off an edge that '{latent}' moves, of which no "
                        "gradient tells, and no normal q stays on one side of it. Take a distribution with a tail, or "
                        f"a penalty that grows smoothly; where the edge is a number, give '{latent}' a prior that ends "
                        "there"
                    )
            near, before = far, found


def _halved(ends: tuple[float, float], depth: int = _HALVED) -> list[float]:
    """All numbers to which `depth` bisections between `ends` may come."""
    middle = 0.5 * sum(ends)
    sides = [(ends[0], middle), (middle, ends[1])] if depth > 1 else []
    return [middle, *(each for side in sides for each in _halved(side, depth - 1))]


def _alone(own: Callable[[Tensor], Params], far: float, like: Tensor) -> dict[str, float]:
    """`own` of so far out; nothing where the program fails there, which is no edge of its log density."""
    with contextlib.suppress(Exception), torch.no_grad():
        return {name: float(value) for name, value in own(torch.tensor(far).to(like)).items()}
    return {}


def _together(own: Callable[[Tensor], Params], fars: Sequence[float], like: Tensor) -> list[dict[str, float]]:
    """As `_alone` at each of `fars`; nothing at all where the program fails at one."""
    with contextlib.suppress(Exception), torch.no_grad():
        found = over_draws(own, torch.tensor(fars, dtype=torch.float64).to(like))
        values = {name: value.tolist() for name, value in found.items()}
        return [{name: value[k] for name, value in values.items()} for k in range(len(fars))]
    return [{} for _ in fars]


def _observed_terms(run: Evaluation) -> Params:
    """Terms of records, each site's together, but for their latents' own."""
    named = [name for name in run.own if name not in run.latents and (name in run.in_records or name == ALL_RECORDS)]
    return {name: run.own[name] for name in named}


def _fallen(a: float, b: float) -> bool:
    """Whether of two values of a log density one lies so far under the other as beyond an edge. Where one is none, as
    far out where numbers have run out, nothing is known."""
    if math.isnan(a) or math.isnan(b):
        return False
    return abs(a - b) > _EDGE if np.isfinite([a, b]).all() else a != b


def _warn_of_parameters(problem: Problem, rows: Params) -> None:
    """Warn where values that priors can take make a parameter what its distribution does not take: a scale below 0.
    Seen in that many draws of all sites, so that one in ten is missed with probability 0.2. What is so at the start is
    refused by a silo, on its data."""
    point, begins = Point(problem, MADE, spread=0.0), _Parameters(far=False)
    with contextlib.suppress(Exception), torch.enable_grad(), begins:
        problem.density.run(point.latents(), point.theta, rows)
    for seed in range(_PRIOR_DRAWS):
        looks, own = _Parameters(), running(problem.dtype, problem.device)
        with contextlib.suppress(Exception), seeded(seed), torch.enable_grad(), looks, own:
            problem.model.fn(**rows, **problem.schema.constants)
        if looks.said and not begins.said:
            warnings.warn(
                f"{looks.said} for values that priors allow, where log p is none, or of another model. {REMEDY}",
                SecureFVIWarning,
                stacklevel=2,
            )
            return


class _Parameters(Messenger):  # type: ignore[misc]
    """Looks at parameters of all sites that follow from latents."""

    def __init__(self, far: bool = True) -> None:
        """far: where numbers may have run out of digits, so that 0 and what is none are passed over."""
        super().__init__()
        self.said, self.far, self.by = "", far, ""
        self.latents: Params = {}

    def _pyro_sample(self, msg: Any) -> None:
        if has_no_density(msg) or self.said:
            return
        for name, constraint, given, bad in bad_parameters(msg["fn"]):
            if constraint.event_dim > 1:
                continue  # a matrix is not taken apart
            nearly = torch.nextafter(given.detach(), torch.full_like(given, np.inf))
            number = ~torch.isnan(given if given.dim() == bad.dim() else given.sum(-1))
            if not self.far or bool((~constraint.check(nearly) & number).any()):
                self.by = _names(given, self.latents)
                self.said = (
                    f"site '{msg['name']}' has a {name} that {kind_of(msg['fn'])} does not take "
                    f"({described(constraint)}){f', by {self.by},' if self.by else ''}"
                )
                return

    def _pyro_post_sample(self, msg: Any) -> None:
        drawn = not msg["is_observed"] and not has_no_density(msg)
        if drawn and isinstance(msg["value"], Tensor) and msg["value"].is_floating_point():
            self.latents[msg["name"]] = msg["value"] = msg["value"].detach().requires_grad_()


def _names(value: Tensor, latents: Params, all_used: bool = False) -> str:
    """The latent sites that a value follows from, in quotes; those that do not move it there too, if `all_used`."""
    if not value.requires_grad or not latents:
        return ""
    uneven = torch.arange(1.0, value.numel() + 1).to(value)  # shares of a whole have a sum that nothing moves
    found = torch.autograd.grad(
        (value.reshape(-1) * uneven).sum(), list(latents.values()), retain_graph=True, allow_unused=True
    )
    used = [g is not None and (all_used or bool((g != 0).any())) for g in found]
    return ", ".join(f"'{name}'" for name, one in zip(latents, used, strict=True) if one)


def terms_without(run: Evaluation, site: str | None = None) -> Tensor:
    """The terms of all sites but one."""
    return sum((term for name, term in run.own.items() if name != site), torch.zeros(()))


def gradient_of(value: Tensor, leaf: Tensor) -> Tensor | None:
    """None where `leaf` has no part in `value`."""
    if not value.requires_grad:
        return None
    return torch.autograd.grad(value, leaf, retain_graph=True, allow_unused=True)[0]


def _check_slope(point: Point, rows: Params, site: str, gradient: Tensor | None) -> None:
    """The gradient of all but the site's own prior against a difference along a random direction."""
    density, latents = point.problem.density, point.latents()
    precise = point.problem.dtype == torch.float64
    step, floor = (1e-5, 1e-6) if precise else (1e-2, 1e-2)
    at = latents[site]
    rng = torch.Generator().manual_seed(1)
    direction = torch.randn(at.shape, generator=rng, dtype=torch.float64).to(at)

    def value(distance: float) -> float:
        with torch.no_grad():
            run = density.run({**latents, site: at + distance * direction}, point.theta, rows)
            return float(terms_without(run, site))

    high, low = value(step), value(-step)
    slope = (high - low) / (2 * step)
    told = 0.0 if gradient is None else float((gradient * direction).sum())
    if not np.isfinite([slope, told]).all():
        return
    off = abs(slope - told) > 0.05 * (abs(slope) + abs(told)) + floor * (1 + abs(high))
    flat = gradient is None or not bool(gradient.any())
    if off or (flat and _in_steps(point, rows, site, direction)):
        raise InputError(
            f"site '{site}' does not reach the likelihood: the log density changes with its value and the gradient "
            "does not say so. detach(), .item(), no_grad(), rounding or NumPy cuts it off; use tensor operations"
        )
    own = site.removesuffix("_unobserved")
    if own != site and f"{own}_observed" in density.run(latents, point.theta, rows).own:
        return  # Pyro's own, of obs_mask
    if gradient is None and point.problem.model.encoder is None:  # which may read it
        warnings.warn(
            f"site '{site}' does not reach the likelihood: on made data nothing that is observed depends on it, and q "
            "stays at its prior. Leave it out, and draw it afterwards with result.predict",
            SecureFVIWarning,
            stacklevel=2,
        )


def _in_steps(point: Point, rows: Params, site: str, direction: Tensor) -> bool:
    """Whether log p, without the site's own prior, changes farther away although no gradient there says so: of what is
    rounded the gradient is zero everywhere, of a hinge on one side alone."""
    density, latents, values = point.problem.density, point.latents(), []
    for distance in (0.0, -10.0, -2.0, -0.7, 0.7, 2.0, 10.0):
        leaf = (latents[site] + distance * direction).detach().requires_grad_()
        with torch.enable_grad():
            value = terms_without(density.run({**latents, site: leaf}, point.theta, rows), site)
        gradient = gradient_of(value, leaf)
        if gradient is not None and bool(gradient.any()):
            return False
        values.append(float(value.detach()))
    return bool(np.isfinite(values).all()) and float(np.ptp(values)) > 1e-3 * (1 + abs(values[0]))


def check_masked(site: str, mask: Tensor, gradient: Tensor | None, silo: str | None = None) -> None:
    """What a mask takes out has no prior left, so that nothing may depend on it."""
    if gradient is None:
        return
    used = (gradient.reshape((*mask.shape, -1)) != 0).any(-1)
    if bool((used & ~mask).any()):
        error, where = (InputError, "") if silo is None else (DataError, f"silo '{silo}': ")
        raise error(
            f"{where}site '{site}' is masked where the rest of the model uses it: a mask takes its prior away. Give it "
            "a wide prior instead, or mask what is observed"
        )


def misplaced(problem: Problem, z_global: Tensor | None = None, rows: Params | None = None) -> str:
    """Which site has no log density, or a parameter that it does not take, and by which latents, at `z_global`
    (n_global,), by default the start, or else around it: why a run came to numbers that are none. "" where nothing is
    seen, and of a traced program, whose sites are not known. rows: a silo's, whose reader is that silo alone; made ones
    where there are none."""
    given = rows or {name: value.to(problem.device) for name, value in problem.schema.dummy_rows(MADE).items()}
    rng, centre = torch.Generator().manual_seed(0), problem.start.z_global if z_global is None else z_global
    point = Point(problem, len(next(iter(given.values()))), spread=0.0)
    went = "" if z_global is None else " where the fit went"
    for radius in (0.0, 0.01, 0.1, 0.3, 1.0, 3.0):
        for _ in range(_AROUND if radius else 1):
            step = radius * torch.randn(centre.shape, generator=rng, dtype=torch.float64)
            point.z_global = (centre.to("cpu", torch.float64) + step).to(problem.device, problem.dtype)
            looks = _Parameters()
            with contextlib.suppress(Exception), torch.enable_grad(), looks:
                run = problem.density.run(point.latents(), point.theta, given)
                formula = problem.model.identity is not None  # whose user wrote no distribution
                if looks.said:
                    cure = f": {_OF_FORMULAS}" if formula else f". {REMEDY}" if looks.by else ""
                    return f"{looks.said}{went}{cure}"
                for name in sorted(run.own, key=lambda name: name in run.latents):
                    if said := _unbounded(name, run, looks.latents, formula, went):
                        return said
            point = point.of(torch.arange(min(len(point.z_record), SOME)))
            given = {name: value[:SOME] for name, value in given.items()}
    return ""


#: What makes a fit of a formula run off.
_OF_FORMULAS = (
    "the data are far from what the dictionary or the priors say, or an offset is in a unit in which it is large. See "
    "that low, high, centre and scale of the columns are what occurs, give priors, or lower learning_rate"
)


def _unbounded(name: str, run: Evaluation, latents: Params, formula: bool, went: str) -> str:
    """A site whose term is no number, -inf, or so low that something was to forbid it. went: where, in words."""
    term = run.own[name]
    value, by_hand = float(term.detach()), name in run.factors
    if np.isfinite(value) and (value > -_FORBIDDEN or not by_hand):
        return ""
    sites = _names(term, latents, all_used=True)
    low = f"is {'no number' if np.isnan(value) else f'{value:g}'}{went}{f', by {sites}' if sites else ''}"
    if formula:
        return f"the log density of '{name}' {low}: {_OF_FORMULAS}"
    return (
        f"the log density of site '{name}' {low}: a bound that "
        "moves with latents (a pyro.factor of -inf, say), or the logarithm or root of what they make less than 0. No "
        "normal q stays on one side of it: take a distribution with a tail or a penalty that grows smoothly, and "
        "priors that end where log p does"
    )


#: What makes a site's parameter what it has to be.
REMEDY = "Give these priors that cannot (HalfNormal, Dirichlet in place of Normal), or take exp() or softmax() of them"


def bad_parameters(fn: Any) -> Iterator[tuple[str, Any, Tensor, Tensor]]:
    """Parameters of a distribution that it does not take: name, constraint, value, and where it is not kept."""
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    for name, constraint in getattr(fn, "arg_constraints", {}).items():
        given = vars(fn).get(name)
        if constraint.is_discrete or not isinstance(given, Tensor):
            continue
        try:
            bad = ~constraint.check(given)
        except Exception:  # a constraint of the user's own, or one that depends on others
            continue
        if bool(bad.any()):
            yield name, constraint, given, bad
    for part in vars(fn).values():
        if isinstance(part, torch.distributions.Distribution):  # of a mixture
            yield from bad_parameters(part)


def base_constraint(support: Any) -> Any:
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return support


def described(support: Any) -> str:
    """What a support takes, in words; bounds that are the model's numbers, not a silo's."""
    base = base_constraint(support)
    low, high = (getattr(base, name, None) for name in ("lower_bound", "upper_bound"))
    numbers = [None if b is None or (isinstance(b, Tensor) and b.numel() > 1) else f"{float(b):g}" for b in (low, high)]
    if isinstance(base, type(constraints.boolean)):
        return "0 and 1 alone"
    if "multinomial" in type(base).__name__:
        return "whole numbers of at least 0 that add up to its total_count"
    if isinstance(base, constraints.integer_interval):
        upper = numbers[1] if numbers[1] is not None else "its own number of trials"
        return f"whole numbers from {numbers[0]} to {upper}"
    if isinstance(base, type(constraints.nonnegative_integer)):
        return f"whole numbers of at least {numbers[0]}"
    if isinstance(base, constraints.greater_than):
        return f"numbers above {numbers[0] or 'its bound'}"
    if isinstance(base, constraints.greater_than_eq):
        return f"numbers of at least {numbers[0] or 'its bound'}"
    if isinstance(base, constraints.interval | constraints.half_open_interval):
        return f"numbers from {numbers[0] or 'its bound'} to {numbers[1] or 'its bound'}"
    if isinstance(base, type(constraints.simplex)):
        return "shares of at least 0 that add up to 1"
    return f"values in its support, {type(base).__name__.strip('_')}"


def tensors_in(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


# ---- What a program keeps outside of itself, between its runs: a list that it fills, a counter, an array ----
#
# Such a program is another model at every party and in every run, and the log density need not show it at once: what
# was worked out from made data, or from the first silo's, is used at the others.

#: Containers within containers, and functions that functions call, that are looked into; elements of each.
_DEEP, _ELEMENTS = 3, 1000
#: Whose objects' attributes are not looked at.
_LIBRARIES = {
    *sys.stdlib_module_names,
    "numpy",
    "opacus",
    "pandas",
    "polars",
    "pyro",
    "scipy",
    "secure_fvi",
    "torch",
} - {"__main__"}
#: What a module's name holds before there is one.
_ABSENT = object()
#: Bytes of an array up to which its numbers are compared.
_BYTES = 2**20


@contextlib.contextmanager
def watched(model: Any) -> Iterator[None]:
    """Warns with SecureFVIWarning where a program, run meanwhile, has changed what its closure or its module's names
    hold."""
    fn = getattr(model, "fn", model)
    before = _held(fn)
    yield
    after = _held(fn)
    changed = sorted(name for name, value in before.items() if after.get(name) != value)
    if changed:
        warnings.warn(
            f"the program changes what it holds outside of itself ({', '.join(changed)}): what one run leaves there, "
            "of made data or of another silo, the next one finds. Work such values out before the fit, and pass them "
            "with sf.Shared",
            SecureFVIWarning,
            stacklevel=3,
        )


def _held(fn: Any, deep: int = _DEEP) -> dict[str, Any]:
    """By name, a mark of each variable that a function, and those of its module that it calls, finds outside."""
    fn = inspect.unwrap(fn) if callable(fn) else fn
    if isinstance(fn, types.MethodType):
        return {"self": _mark(fn.__self__, _DEEP), **_held(fn.__func__, deep)}
    if not isinstance(fn, types.FunctionType):
        call = getattr(type(fn), "forward" if isinstance(fn, torch.nn.Module) else "__call__", None)
        own = {"self": _mark(fn, _DEEP)} if _keeps(fn) else {}
        return {**own, **_held(call, deep)} if isinstance(call, types.FunctionType) else own
    names = {name: fn.__globals__.get(name, _ABSENT) for name in fn.__code__.co_names}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not filled yet
            names[name] = cell.cell_contents
    names |= {f"default of {k}": value for k, value in enumerate(fn.__defaults__ or ())}
    names |= {f"default of {k}": value for k, value in (fn.__kwdefaults__ or {}).items()}
    found = {name: _mark(value, _DEEP) for name, value in names.items()} | {"its attributes": _mark(fn, _DEEP)}
    for value in names.values():
        if (
            deep
            and isinstance(value, types.FunctionType | torch.nn.Module)
            and getattr(value, "__module__", "") == fn.__module__
        ):
            found = {**_held(value, deep - 1), **found}
    return found


def _mark(value: Any, deep: int) -> Any:
    """Equal for what has not changed."""
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes() if value.nbytes <= _BYTES and value.dtype != object else id(value)
    if isinstance(value, (int, float, complex, str, bytes, type(None))):
        return repr(value)
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        items = [*value.items()] if isinstance(value, dict) else [*value]
        inner = [_mark(item, deep - 1) for item in items[:_ELEMENTS]] if deep else ()
        return type(value), len(items), tuple(inner)
    if deep and _keeps(value):
        own = {name: held for name, held in vars(value).items() if not name.startswith("__")}
        state = [*value.buffers(), *value.parameters()] if isinstance(value, torch.nn.Module) else []
        return id(value), _mark(own, deep), _mark(state, 1)
    return id(value)


def _keeps(value: Any) -> bool:
    """Whether attributes of it may be the program's own: of a function, a module of a network, a class or an object of
    one that is no library's. What a library's objects have, caches say, changes as they are read."""
    if isinstance(value, types.FunctionType | torch.nn.Module | types.SimpleNamespace):
        return True
    module = getattr(value if isinstance(value, type) else type(value), "__module__", "")
    return module.partition(".")[0] not in _LIBRARIES


def differing(point: Point, rows: Params, part: Tensor) -> set[str]:
    """The sites of records that have other terms among some of the rows than among all. Where discrete sites are
    summed out none is known by itself."""
    some, few = point.of(part), {name: value[part] for name, value in rows.items()}
    runs = [p.problem.density.run(p.latents(), p.theta, r) for p, r in ((point, rows), (some, few))]
    names = [name for name in runs[0].own if name in runs[0].in_records]
    terms = zip(names, *(run.terms["record"] for run in runs), strict=False)
    return {name for name, whole, found in terms if not same(found, whole[part])}
