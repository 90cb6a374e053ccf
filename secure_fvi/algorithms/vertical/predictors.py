"""What a silo has of its own: a predictor eta_j = g_j(x_j, theta_j) with its prior, and q(z_j | theta_j).

The program is a function of the silo's columns that returns eta (N,) or (N, C). Its `pyro.sample` sites are theta_j,
its `pyro.param` sites (a network's weights, say) are fitted as points. A silo chooses its program alone: nobody else
needs to know it (Hassan et al. 2024, sections 3.1, 5.2 and 5.3). A row of eta follows from the same row of the columns
(`check_predictor`); what a program is like, where theta_j starts and its prior come from made data.

z_j given theta_j: amortised (eq. 9), a network of the predictor, and of the response where silos know it, whose size
does not grow with the records; mean field (eq. 10), a mean and a scale for every record, free of theta_j.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyro
import torch
from pyro.distributions import HalfNormal, Normal
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import biject_to, transform_to
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._pytree import _broadcast_to_and_flatten, tree_flatten, tree_unflatten

from secure_fvi.density import param_constraint, param_start, running
from secure_fvi.errors import DataError, InputError, UntestedOperation, one_line
from secure_fvi.exported import untested_operations
from secure_fvi.families.gaussian import LOG_2PI
from secure_fvi.federated_model import Schema
from secure_fvi.options import check
from secure_fvi.program_contract import MADE, SPREAD, alike, in_parts, same
from secure_fvi.trees import Params

Program = Callable[..., Tensor]


def linear(columns: int = 1, scale: float = 1.0) -> Program:
    """eta = x beta with beta ~ N(0, scale^2): (D,), or (D, C) for C columns. The silo's data is `x` (N, D)."""

    def program(x: Tensor) -> Tensor:
        shape = (x.shape[-1],) if columns == 1 else (x.shape[-1], columns)
        beta = pyro.sample("beta", Normal(x.new_zeros(shape), scale).to_event(len(shape)))
        return x @ beta

    return program


def grouped_slopes(levels: int, scale: float = 1.0) -> Program:
    """Slopes by group: eta_i = x_i' beta[level_i], beta[r] ~ N(mu, sigma^2), mu ~ N(0, scale^2), sigma half-normal.

    The silo's data is `x` (N, D) and `level` (N,) with values 0 to levels - 1. Section 5.2 prints mu and sigma with
    the level as an index, where one draw a level could not tell them apart; figure 4 calls mu the global mean effect.
    """

    def program(x: Tensor, level: Tensor) -> Tensor:
        zero = x.new_zeros(x.shape[-1])
        mu = pyro.sample("mu", Normal(zero, scale).to_event(1))
        sigma = pyro.sample("sigma", HalfNormal(zero + scale).to_event(1))
        beta = pyro.sample("beta", Normal(mu.expand(levels, -1), sigma).to_event(2))
        return (x * beta[level]).sum(-1)

    return program


class _Site(NamedTuple):
    name: str
    shape: tuple[int, ...]  # unconstrained
    start: Tensor


class _Discover(Messenger):  # type: ignore[misc]
    """Runs the program once with each site at its prior mean (or at zero, unconstrained) and notes what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.sites: list[_Site] = []
        self.points: Params = {}

    def _pyro_param(self, msg: Any) -> None:
        name = msg["name"]
        transform = transform_to(param_constraint(msg))
        if name not in self.points:
            self.points[name] = transform.inv(param_start(msg))
        msg["value"] = transform(self.points[name])

    def _pyro_sample(self, msg: Any) -> None:
        fn, name = msg["fn"], msg["name"]
        if msg["is_observed"]:
            raise InputError(f"predictor: site '{name}' is observed; the response belongs to the likelihood")
        if fn.has_enumerate_support or getattr(fn.support, "is_discrete", False):
            raise InputError(f"predictor: latent site '{name}' is discrete; sum it out of the program")
        transform = biject_to(fn.support)
        unconstrained = torch.zeros(transform.inverse_shape(fn.shape()))
        mean = _mean(fn)
        if mean is not None and bool(torch.isfinite(mean).all()) and bool(fn.support.check(mean).all()):
            unconstrained = transform.inv(mean)
        msg["value"], msg["done"] = transform(unconstrained), True
        self.sites.append(_Site(name, tuple(unconstrained.shape), unconstrained.reshape(-1)))


class _Evaluate(Messenger):  # type: ignore[misc]
    """Puts given unconstrained values into the sites and adds up the prior."""

    def __init__(self, latents: Params, points: Params) -> None:
        super().__init__()
        self.latents, self.points = latents, points
        self.values: Params = {}
        self.log_prior: list[Tensor] = []

    def _pyro_param(self, msg: Any) -> None:
        msg["value"] = transform_to(param_constraint(msg))(self.points[msg["name"]])

    def _pyro_sample(self, msg: Any) -> None:
        fn, name = msg["fn"], msg["name"]
        transform = biject_to(fn.support)
        value = transform(self.latents[name])
        self.log_prior.append(fn.log_prob(value).sum())
        self.log_prior.append(transform.log_abs_det_jacobian(self.latents[name], value).sum())
        msg["value"], msg["done"] = value, True
        self.values[name] = value


class Predictor:
    """A program read on made data of a silo's columns. Stays at the silo, and holds no value of `rows`.

    `n` is the length of theta_j, unconstrained; `start` (n,) the centre of its prior; `points` the start of the
    `pyro.param`s, unconstrained. Raises InputError for a program that cannot serve as a predictor.
    """

    def __init__(self, program: Program, rows: Params, columns: int = 1) -> None:
        self.program, self.columns = program, columns
        self.schema = Schema(tuple((n, tuple(v.shape[1:]), v.dtype) for n, v in rows.items()), {})
        self._device = next(iter(rows.values())).device
        self._dtype = next((r.dtype for r in rows.values() if r.is_floating_point()), torch.get_default_dtype())
        two, three = self._discover(2), self._discover(3)
        if [s[:2] for s in two.sites] != [s[:2] for s in three.sites]:
            raise InputError("predictor: a latent site grows with the number of records; latents must belong to groups")
        self._sites = two.sites
        empty = torch.zeros(0, dtype=self._dtype, device=self._device)
        self.start = torch.cat([empty, *(s.start.to(self._dtype) for s in two.sites)])
        self.points = {name: value.to(self._dtype) for name, value in two.points.items()}
        self.n = len(self.start)

    def made(self, count: int) -> Params:
        """`count` rows of made data, all alike."""
        return {name: value.to(self._device) for name, value in self.schema.dummy_rows(count).items()}

    def _discover(self, count: int) -> _Discover:
        rows = self.made(count)
        try:
            with running(self._dtype, self._device), torch.no_grad(), _Discover() as run:
                eta = self.program(**rows)
        except InputError:
            raise
        except Exception as error:  # the program is the user's: anything may come
            raise InputError(f"predictor: fails on made data ({type(error).__name__}: {one_line(error)})") from error
        shape = tuple(eta.shape) if isinstance(eta, Tensor) else ()
        if shape not in {(count,), (count, self.columns)} or (len(shape) == 1 and self.columns > 1):
            raise InputError(
                f"predictor: returns shape {shape} for {count} records; it should be ({count}, "
                f"{self.columns})" + (f" or ({count},)" if self.columns == 1 else "")
            )
        return run

    def evaluate(self, theta: Tensor, points: Params, rows: Params) -> tuple[Tensor, Tensor]:
        """eta (N, C) and log p(theta) (), nats, at theta (n,)."""
        eta, run = self._run(theta, points, rows)
        return eta.reshape(-1, self.columns), sum(run.log_prior, theta.new_zeros(()))

    def evaluate_alone(self, theta: Tensor, points: Params, rows: Params) -> Tensor:
        """eta (N, C), each row evaluated by itself."""

        def one(row: Params) -> Tensor:
            return self.evaluate(theta, points, {name: value.unsqueeze(0) for name, value in row.items()})[0].squeeze(0)

        found: Tensor = each_alone(one, 0, len(next(iter(rows.values()))))(rows)
        return found

    def log_prior(self, theta: Tensor, points: Params) -> Tensor:
        """log p(theta) (), nats, from made data: no row has a part in it."""
        return self.evaluate(theta, points, self.made(2))[1]

    def constrain(self, theta: Tensor, points: Params) -> Params:
        """theta_j by site in the program's own space, from made data."""
        return self._run(theta, points, self.made(2))[1].values

    def by_site(self, theta: Tensor) -> Params:
        """What is given of each element of theta_j (n,), by site."""
        sizes = [torch.Size(s.shape).numel() for s in self._sites]
        pieces = theta.split(sizes) if sizes else ()
        return {s.name: piece.reshape(s.shape) for s, piece in zip(self._sites, pieces, strict=True)}

    def _run(self, theta: Tensor, points: Params, rows: Params) -> tuple[Tensor, _Evaluate]:
        with running(theta.dtype, theta.device), _Evaluate(self.by_site(theta), points) as run:
            return self.program(**rows), run


def each_alone(fn: Callable[..., Any], in_dims: Any, count: int) -> Callable[..., Any]:
    """`fn` of one row, mapped over `count` rows by `vmap`: none can enter another one's result, whatever `fn` does.

    Of several rows UntestedOperation is raised where `fn` uses, for a made row, an operation that no test has found
    to keep apart what is mapped (`exported.untested_operations`), or fails there: what it uses is not known then. What
    is being traced has no numbers to look with: it was looked at before (`by_record`).
    """
    mapped = torch.func.vmap(fn, in_dims=in_dims)

    def run(*args: Any) -> Any:
        if count > 1 and get_proxy_mode() is None:
            _look(lambda: fn(*_made_row(in_dims, args)))
        return mapped(*args)

    return run


def _look(call: Callable[[], Any]) -> None:
    if found := untested_operations(call):
        raise UntestedOperation(
            f"it uses {', '.join(found)}, which PyTorch is not known to keep apart for rows that are mapped"
        )


def _made_row(in_dims: Any, args: Any) -> tuple[Any, ...]:
    """What is mapped without an axis of rows, in values that are nobody's, as `Schema.dummy_rows` has them."""
    leaves, spec = tree_flatten(args)
    axes = _broadcast_to_and_flatten(in_dims, spec)
    assert axes is not None  # or `vmap` would not have it
    made = [
        leaf if axis is None else torch.full_like(leaf.select(axis, 0), 1 if leaf.is_floating_point() else 0)
        for leaf, axis in zip(leaves, axes, strict=True)
    ]
    found: tuple[Any, ...] = tree_unflatten(made, spec)
    return found


def _mean(fn: Any) -> Tensor | None:
    try:
        return fn.mean.expand(fn.shape()).clone()
    except (NotImplementedError, AttributeError):
        return None


# ---- Variational families for the auxiliary variables, q(z_j | theta_j); their parameters never leave the silo ----


@dataclass(frozen=True)
class Amortised:
    """z = eta + rho m + rho exp(t) tau with (m, t) by a network of eta and the response's features.

    `hidden` units a layer, tanh. The last layer starts at zero, so that q(z | theta) starts as the prior.
    """

    hidden: tuple[int, ...] = (16,)

    def __post_init__(self) -> None:
        if isinstance(self.hidden, list):
            object.__setattr__(self, "hidden", tuple(self.hidden))
        check(self)
        if any(type(h) is not int or h < 1 for h in self.hidden):
            raise InputError(f"hidden holds the units of each layer, whole numbers from 1 on, not {self.hidden!r}")

    def build(self, columns: int, features: int, rho: float) -> AmortisedAuxiliary:
        return AmortisedAuxiliary((columns + features, *self.hidden, 2 * columns), rho)


class AmortisedAuxiliary:
    """`Amortised` for fixed sizes."""

    integrated = False

    def __init__(self, widths: tuple[int, ...], rho: float) -> None:
        self.widths, self.log_rho, self.rho = widths, math.log(rho), rho

    def init(self, records: int, generator: torch.Generator, dtype: torch.dtype) -> tuple[Params, Params]:
        shared, last = {}, len(self.widths) - 2
        for layer, (n_in, n_out) in enumerate(zip(self.widths, self.widths[1:], strict=False)):
            weight = torch.randn(n_in, n_out, generator=generator, dtype=dtype) / math.sqrt(n_in)
            shared[f"weight{layer}"] = torch.zeros_like(weight) if layer == last else weight
            shared[f"bias{layer}"] = weight.new_zeros(n_out)
        return shared, {}

    def moments(self, shared: Params, record: Params, eta: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        hidden, layers = torch.cat([eta, features], -1), len(self.widths) - 1
        for layer in range(layers):
            hidden = hidden @ shared[f"weight{layer}"] + shared[f"bias{layer}"]
            hidden = hidden.tanh() if layer < layers - 1 else hidden
        shift, log_ratio = hidden.chunk(2, -1)
        return eta + self.rho * shift, self.log_rho + log_ratio


@dataclass(frozen=True)
class MeanField:
    """z = loc + exp(log_scale) tau, one of each a record and column; starts at mean 0 with scale rho."""

    def build(self, columns: int, features: int, rho: float) -> MeanFieldAuxiliary:
        return MeanFieldAuxiliary(columns, rho)


class MeanFieldAuxiliary:
    """`MeanField` for fixed sizes."""

    integrated = False

    def __init__(self, columns: int, rho: float) -> None:
        self.columns, self.rho = columns, rho

    def init(self, records: int, generator: torch.Generator, dtype: torch.dtype) -> tuple[Params, Params]:
        loc = torch.zeros(records, self.columns, dtype=dtype)
        return {}, {"loc": loc, "log_scale": torch.full_like(loc, math.log(self.rho))}

    def moments(self, shared: Params, record: Params, eta: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        return record["loc"], record["log_scale"]


@dataclass(frozen=True)
class Integrated:
    """No q(z_j | theta_j): silos send eta_j, and the holder of the response integrates the sum of z_j out.

    By quadrature with `nodes` (`vertical.marginal`); augmented-variable model, responses of one column.
    """

    nodes: int = 32
    integrated = True

    def __post_init__(self) -> None:
        if type(self.nodes) is not int or self.nodes < 2:
            raise InputError(f"nodes of a quadrature must be a whole number of at least 2, not {self.nodes!r}")

    def build(self, columns: int, features: int, rho: float) -> Integrated:
        return self  # there is nothing to fit

    def init(self, records: int, generator: torch.Generator, dtype: torch.dtype) -> tuple[Params, Params]:
        return {}, {}

    def moments(self, shared: Params, record: Params, eta: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        return eta, torch.full_like(eta, -math.inf)


@dataclass(frozen=True)
class Auto:
    """`Integrated` in a fit where the likelihood has it, the paper's `Amortised` otherwise."""

    def build(self, columns: int, features: int, rho: float) -> AmortisedAuxiliary:
        return Amortised().build(columns, features, rho)


def log_normal(x: Tensor, loc: Tensor, log_scale: Tensor) -> Tensor:
    """log density of independent normals over the columns of x (N, C): (N,), nats."""
    return (-0.5 * (((x - loc) * (-log_scale).exp()).square() + LOG_2PI) - log_scale).sum(-1)


# ---- its contract ----

_ROWS = (
    "a row of eta depends on other rows: together and in parts, the same people have another one. A program that "
    "standardises, lags, sorts or counts over rows is another model in every batch; work such numbers out before, "
    "under privacy not from these people, and pass them as a column, or with sf.Shared where they are the same for all"
)
_NOT_MAPPED = "which this program does not allow"
_NO_COURSE = "values must not decide on its course (.item(), `if`, boolean indexing)"
_ROW_PRIOR = (
    "the prior of its sites depends on rows; pass what it needs with sf.Shared (a scale, the number of groups), under "
    "privacy nothing that was worked out from these people"
)


def check_predictor(predictor: Predictor, alone: bool) -> None:
    """Raise InputError where a predictor does not keep its contract; on made data. `alone`: a row is evaluated by
    itself in the fit, by `vmap`."""
    theta, points = _near(predictor)
    rows = _varied(predictor, theta, points)
    first, again = (predictor.evaluate(theta, points, rows)[0] for _ in range(2))
    if not same(first, again):
        raise InputError(
            "predictor: another eta each time it is run: it draws numbers, or changes its own state; draw with "
            "pyro.sample alone"
        )
    bad, _, in_prior = _coupled(predictor, rows)
    if in_prior:
        raise InputError(f"predictor: {_ROW_PRIOR}")
    if bad:
        raise InputError(f"predictor: {_ROWS}")
    try:  # of which a posterior is made when all rounds are over
        torch.func.vmap(lambda draw: predictor.constrain(draw, points))(torch.stack([theta, theta]))
    except Exception as error:
        raise InputError(
            f"predictor: draws of its sites are mapped, by torch.func.vmap, {_NOT_MAPPED} ({type(error).__name__}): "
            f"{_NO_COURSE}"
        ) from error
    if not alone:
        return
    try:
        mapped = predictor.evaluate_alone(theta, points, rows)
    except Exception as error:
        untested = f": {error}" if isinstance(error, UntestedOperation) else ""
        raise InputError(
            f"predictor: record-level privacy evaluates each row alone, by torch.func.vmap, {_NOT_MAPPED} "
            f"({type(error).__name__}{untested}): {_NO_COURSE}, nor may it count on several rows"
        ) from error
    if not same(mapped, first):
        raise InputError(f"predictor: {_ROWS}")


def check_predictor_at_silo(predictor: Predictor, rows: Params, silo: str) -> None:
    """The same contract on a silo's own rows, without privacy: there no row would be evaluated alone. Raises
    DataError, which counts rows."""
    try:
        bad, looked_at, in_prior = _coupled(predictor, rows)
    except Exception as error:
        raise DataError(f"silo '{silo}': the predictor fails on part of its data ({type(error).__name__})") from None
    if in_prior:
        raise DataError(f"silo '{silo}': predictor: {_ROW_PRIOR}")
    if bad:
        raise DataError(f"silo '{silo}': predictor: in {bad} of {looked_at} rows looked at, {_ROWS}")


def _near(predictor: Predictor) -> tuple[Tensor, Params]:
    """theta_j and the `pyro.param`s around their start."""
    rng = torch.Generator().manual_seed(0)

    def around(value: Tensor) -> Tensor:
        return value + SPREAD * torch.randn(value.shape, generator=rng, dtype=torch.float64).to(value)

    return around(predictor.start), {name: around(value) for name, value in predictor.points.items()}


def _varied(predictor: Predictor, theta: Tensor, points: Params) -> Params:
    """Made rows that differ and are not in order: numbers from 1 to 2; whole ones 0 and 1, or all 0 where the program
    looks up no 1."""
    rng, made = torch.Generator().manual_seed(1), predictor.made(MADE)
    for name, value in made.items():
        if value.is_floating_point():
            unordered = torch.rand(value.shape, generator=rng, dtype=torch.float64).sort(0).values[[2, 0, 3, 1]]
            made[name] = value + unordered.to(value)
    order = torch.arange(MADE) % 2
    whole = {
        name: order.reshape(-1, *[1] * (value.dim() - 1)).expand(value.shape).to(value)
        for name, value in made.items()
        if not value.is_floating_point()
    }
    try:
        predictor.evaluate(theta, points, made | whole)
    except Exception:
        return made
    return made | whole


def _coupled(predictor: Predictor, rows: Params) -> tuple[int, int, bool]:
    """How many rows have another eta among some of the rows than among all, of how many that were looked at; whether
    the prior depends on rows."""
    theta, points = _near(predictor)
    with torch.no_grad():
        whole, prior = predictor.evaluate(theta, points, rows)
        in_prior = not same(prior, predictor.log_prior(theta, points))
        bad, looked_at = torch.zeros(2, len(whole), dtype=torch.bool, device=whole.device)

        def evaluate(part: Tensor) -> tuple[Tensor, Tensor]:
            return predictor.evaluate(theta, points, {name: value[part] for name, value in rows.items()})

        if len(whole) > 1:
            for part, (found, own) in in_parts(evaluate, len(whole)):
                bad[part] |= True if found.shape != whole[part].shape else ~alike(found, whole[part]).all(-1)
                looked_at[part] = True
                in_prior |= not same(own, prior)
    return int(bad.sum()), int(looked_at.sum()), in_prior
