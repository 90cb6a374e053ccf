"""The log density of a federated model, split by who owns which part, as a pure function of tensors.

log p(Z_G) + sum_j [ log p(Z_Sj | Z_G) + sum_i log p(y_ji, Z_Lji | Z_G, Z_Sj) ]

Discrete sites of a record are summed out: log sum_z p(y_ji, Z_Lji, z | Z_G, Z_Sj), a run of the program for each z.
All latents are unconstrained (`biject_to` of each site's support), with the log Jacobian inside each term. The
Pyro program runs once an evaluation under one effect handler; `secure_fvi.compiled` then removes Pyro
from the loop by tracing.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pyro
import torch
from pyro.distributions import Delta, MaskedDistribution, Unit
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.distributions import Categorical, biject_to, constraints, transform_to
from torch.distributions.constraints import Constraint

from secure_fvi.errors import DataError, InputError
from secure_fvi.federated_model import FederatedModel, Schema
from secure_fvi.later import Later
from secure_fvi.trees import Params as Params

if TYPE_CHECKING:
    from secure_fvi import data_contract, program_sites
else:  # which read a program by running it: of one that was traced in a sandbox the graph alone is here
    data_contract, program_sites = Later("secure_fvi.data_contract"), Later("secure_fvi.program_sites")

Role = Literal["global", "silo", "record"]

#: Pyro's stack of handlers, its switch of validation and PyTorch's default type are one for all threads, so that
#: programs run one at a time.
_ONE_AT_A_TIME = threading.RLock()
#: Of PyTorch's own gradient of a cumulative product over many values at once (every Dirichlet): nobody can act on it.
warnings.filterwarnings("ignore", "An output with one or more elements was resized", UserWarning)
_LOG_2_PI = math.log(2 * math.pi)
#: Among a run's own terms that of all record sites together, where discrete ones are summed out; no site's name.
ALL_RECORDS = ""


class Site(NamedTuple):
    """A latent site in unconstrained space."""

    name: str
    role: Role
    shape: tuple[int, ...]  # unconstrained; for a record site: of one record
    event_dim: int  # of the unconstrained value
    plate_dim: int  # batch dimension of the record plate (negative), 0 outside it
    support: str  # text of the constraint

    @property
    def size(self) -> int:
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class Layout:
    """Where each latent site stands in the flat vectors Z_G (n_global,), Z_S (n_silo,), Z_L (N, n_record)."""

    sites: tuple[Site, ...]
    theta: tuple[tuple[str, tuple[int, ...]], ...]  # name and unconstrained shape of each pyro.param
    choices: tuple[tuple[str, int], ...] = ()  # discrete sites of a record, summed out, and how many values each has

    def of(self, role: Role) -> tuple[Site, ...]:
        return tuple(s for s in self.sites if s.role == role)

    def size(self, role: Role) -> int:
        return sum(s.size for s in self.of(role))

    def split(self, z: Tensor, role: Role) -> Params:
        """Flat (..., n) to {site: (..., *shape)}; record sites get their record axis where the plate wants it."""
        out, sites = {}, self.of(role)
        # One operation for all: the gradient of a slice is as long as the whole, that of a split is not.
        for site, piece in zip(sites, z.split([site.size for site in sites], -1), strict=True):
            value = piece.reshape((*z.shape[:-1], *site.shape))
            if role == "record":
                value = value.movedim(z.dim() - 2, site.plate_dim - site.event_dim)
            out[site.name] = value
        return out


class Start(NamedTuple):
    """Unconstrained values at the centre of the prior, or where the model is told to start."""

    z_global: Tensor  # (n_global,)
    z_silo: Tensor  # (n_silo,)
    z_record: Tensor  # (N, n_record)
    theta: Params


class LogTerms(NamedTuple):
    """Values of one evaluation, in nats."""

    shared: Tensor  # () log p(Z_G)
    silo: Tensor  # () log p(Z_S | Z_G)
    records: Tensor  # (N,) log p(y_i, Z_i | Z_G, Z_S)


class Evaluation(Messenger):  # type: ignore[misc]
    """Puts given unconstrained values into the latent sites and adds up the log densities by role.

    A latent that a mask takes out of log p is a standard normal of its own instead: q then has something to follow,
    and at the optimum the two cancel. `program_contract.py` refuses programs in which anything else depends on its
    value.
    """

    def __init__(
        self,
        model: FederatedModel,
        latents: Mapping[str, Tensor],
        theta: Mapping[str, Tensor],
        densities: bool = True,
        chosen: Mapping[str, int] | None = None,
    ) -> None:
        """densities: False for values alone, which more programs can be mapped over. chosen: which of its values each
        discrete site takes, in all records."""
        super().__init__()
        self.densities, self.chosen = densities, chosen or {}
        self.model, self.latents, self.theta = model, latents, theta
        self.constrained: Params = {}  # record sites with the record first
        self.terms: dict[Role, list[Tensor]] = {"global": [], "silo": [], "record": []}
        self.own: Params = {}  # each site's own term, summed; of records with discrete sites `ALL_RECORDS` alone
        self.in_records: set[str] = set()
        self.factors: set[str] = set()  # sites of pyro.factor
        self.values: Params = {}  # of discrete sites, the record first
        self.masks: Params = {}  # of latent sites that have one: where they count, in the shape of their term

    def _pyro_param(self, msg: Any) -> None:
        name = msg["name"]
        value = transform_to(param_constraint(msg))(self.theta[name])
        msg["value"] = self.constrained[name] = value

    def _pyro_sample(self, msg: Any) -> None:
        fn, name = msg["fn"], msg["name"]
        if has_no_density(msg):
            return
        plate_dim = record_dim(msg, self.model.record_plate)
        if not self.densities and msg["is_observed"]:
            return
        if msg["is_observed"]:
            term = scale_and_mask(fn.log_prob(observed_value(msg)), msg["scale"], msg["mask"])
        elif name in self.chosen:
            msg["value"], msg["done"] = choice(fn, self.chosen[name]), True
            if not self.densities:
                return
            term = fn.log_prob(msg["value"])
            self.values[name] = msg["value"].movedim(plate_dim - fn.event_dim, 0)
        else:
            if name not in self.latents:
                raise InputError(
                    f"site '{name}' is there or not, as values of other latents will have it; a model has the same "
                    "sites always. Give them all, and choose between their values with torch.where"
                )
            transform, unconstrained = biject_to(fn.support), self.latents[name]
            value = transform(unconstrained)
            msg["value"], msg["done"] = value, True
            self.constrained[name] = value.movedim(plate_dim - fn.event_dim, 0) if plate_dim else value
            if not self.densities:
                return
            term = scale_and_mask(fn.log_prob(value), msg["scale"], msg["mask"])
            term = term + transform.log_abs_det_jacobian(unconstrained, value)
            mask = site_mask(msg)
            if mask is not None:
                alone = (-0.5 * (unconstrained.square() + _LOG_2_PI)).reshape((*fn.batch_shape, -1)).sum(-1)
                self.masks[name] = mask.to(term.device).expand(term.shape)
                term = torch.where(self.masks[name], term, alone)
        self.own[name] = term.sum()
        if isinstance(fn, Unit):
            self.factors.add(name)
        if plate_dim:
            self.in_records.add(name)
            self.terms["record"].append(term.movedim(plate_dim, 0).reshape(term.shape[plate_dim], -1).sum(1))
        else:
            self.terms["silo" if name in self.model.silo_sites else "global"].append(term.sum())


@contextlib.contextmanager
def running(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """How a Pyro program is run here: constants that it makes have the run's type and device, and no validation
    (it would branch on values, which cannot be traced; `data_contract.py` looks at the data instead)."""
    with _ONE_AT_A_TIME:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with pyro.validation_enabled(False), device if device.type != "cpu" else contextlib.nullcontext():
                yield
        finally:
            torch.set_default_dtype(before)


def has_no_density(msg: Any) -> bool:
    """Whether a sample statement is a plate, a `pyro.deterministic` or what `poutine.reparam` puts in a latent site's
    place (a masked Delta, whose value follows from another site), which add nothing to log p."""
    fn = msg["fn"]
    follows = isinstance(fn, MaskedDistribution) and fn._mask is False and isinstance(fn.base_dist, Delta)
    return isinstance(fn, _Subsample) or follows or bool((msg["infer"] or {}).get("_deterministic"))


def choice(fn: Any, k: int) -> Tensor:
    """The k-th value of a discrete distribution, in its shape."""
    value: Tensor = fn.enumerate_support(expand=False)[k].expand(fn.batch_shape + fn.event_shape)
    return value


def site_mask(msg: Any) -> Tensor | None:
    """Where a site counts, by `poutine.mask` and `.mask()` together, in its batch shape; None: everywhere."""
    found = [msg["mask"]]
    if isinstance(msg["fn"], MaskedDistribution):
        found.append(msg["fn"]._mask)
    masks = [torch.as_tensor(m) for m in found if m is not None and m is not True]
    return masks[0].logical_and(masks[-1]) if masks else None


def observed_value(msg: Any) -> Tensor:
    """What is observed at a site, as its density takes it: whole numbers and truth values as floating point ones,
    except where they are labels, and a value inside the support where a mask says that there is none: a code such as -9
    has no density, and its gradient would not be a number."""
    fn, value, mask = msg["fn"], msg["value"], site_mask(msg)
    inner = fn
    while hasattr(inner, "base_dist"):
        inner = inner.base_dist
    shipped = type(inner).__module__.startswith(("torch.distributions", "pyro.distributions"))
    if shipped and not value.is_floating_point() and not isinstance(inner, Categorical):
        value = value.to(torch.get_default_dtype())
    if mask is None or not shipped or mask.dim() == 0:
        return value
    if inner.support.is_discrete:
        inside: Tensor = torch.zeros_like(value)
    else:
        transform = biject_to(fn.support)
        inside = transform(value.new_zeros(transform.inverse_shape(value.shape)))
    return torch.where(mask.reshape(mask.shape + (1,) * fn.event_dim), value, inside)


def record_dim(msg: Any, record_plate: str) -> int:
    """The batch dimension (negative) of the record plate around a site, 0 when it is outside."""
    return next((frame.dim for frame in msg["cond_indep_stack"] if frame.name == record_plate), 0)


def param_constraint(msg: Any) -> Constraint:
    """The constraint that a `pyro.param` statement names, real numbers by default; of a PyroModule's PyroParam, which
    names none, that under which the module has put it into Pyro's store."""
    name = msg["name"]
    if _from_module(msg):
        return pyro.get_param_store()._constraints[name]
    return msg["kwargs"].get("constraint", constraints.real)


def param_start(msg: Any) -> Tensor:
    """Where a `pyro.param` begins, in its own space. Raises InputError where nothing says so."""
    if _from_module(msg):
        return pyro.get_param_store()[msg["name"]].detach()
    if len(msg["args"]) < 2:
        raise InputError(f"pyro.param '{msg['name']}' has no initial value where it is first used")
    start = msg["args"][1]
    return torch.as_tensor(start() if callable(start) else start).detach()


def _from_module(msg: Any) -> bool:
    return len(msg["args"]) < 2 and msg["name"] in pyro.get_param_store()


class LogDensity:
    """The split log density of one model for one schema.

    The schema is shared, so the server builds the same object as the silos; only a silo ever calls
    `evaluate` with data.
    """

    def __init__(self, model: FederatedModel, layout: Layout, schema: Schema) -> None:
        self.model, self.layout, self.schema = model, layout, schema

    def evaluate(self, z_global: Tensor, z_silo: Tensor, z_record: Tensor, theta: Params, rows: Params) -> LogTerms:
        """Z_G (n_global,), Z_S (n_silo,), Z_L (N, n_record), theta unconstrained, `rows` of N records."""
        terms = self._run(z_global, z_silo, z_record, theta, rows).terms
        zero = z_global.new_zeros(())
        return LogTerms(
            sum(terms["global"], zero),
            sum(terms["silo"], zero),
            sum(terms["record"], zero.expand(z_record.shape[-2])),
        )

    def start_at(self, problem: Any, rows: Params, size: int, silo: str) -> Start:
        """Where a fit begins at a silo, from its own records (N + 1, ...), the last a spare one, and whether these fit
        the model. Seen by that silo only. Raises DataError, which counts rows and quotes no value."""
        return data_contract.read_at_silo(problem, rows, size, silo)

    def check_sites(self, point: Any, rows: Params) -> None:
        """Raises InputError where one does not keep its contract (`program_sites`)."""
        program_sites.check_sites(point, rows)

    def misplaced(self, problem: Any, z_global: Tensor | None = None, rows: Params | None = None) -> str:
        """Why a run came to numbers that are none, in words (`program_sites`); "" where nothing is seen."""
        return program_sites.misplaced(problem, z_global, rows)

    def log_prior(self, z_global: Tensor, theta: Params) -> Tensor:
        """log p_theta(Z_G), in nats, from made data: the server's part."""
        return sum(self._run_on_dummy(z_global, theta).terms["global"], z_global.new_zeros(()))

    def log_silo_prior(self, z_global: Tensor, z_silo: Tensor, theta: Params) -> Tensor:
        """log p_theta(Z_S | Z_G), in nats (), from made data."""
        return sum(self._run_on_dummy(z_global, theta, z_silo).terms["silo"], z_global.new_zeros(()))

    def constrain(self, z_global: Tensor, theta: Params) -> tuple[Params, Params]:
        """Global sites and theta in the model's own space, for one Z_G (n_global,)."""
        values = self._run_on_dummy(z_global, theta, densities=False).constrained
        return (
            {site.name: values[site.name] for site in self.layout.of("global")},
            {name: values[name] for name, _ in self.layout.theta},
        )

    def constrain_local(
        self, z_global: Tensor, z_silo: Tensor, z_record: Tensor, theta: Params, rows: Params
    ) -> Params:
        """At a silo: its own sites in the model's space; record sites are (N, ...), the record first."""
        values = self._run(z_global, z_silo, z_record, theta, rows, densities=False).constrained
        return {s.name: values[s.name] for s in self.layout.sites if s.role != "global"}

    def check_global_density(self, rows: Params, silo: str, start: Tensor) -> None:
        """At a silo: refuse a model whose global densities depend on the silo's data; looked at near `start` (n,).

        The server's L0 is computed on made data and would miss them.
        """
        some = next(iter(rows.values()))
        dtype = next((r.dtype for r in rows.values() if r.is_floating_point()), torch.get_default_dtype())
        probe = torch.linspace(-0.5, 0.5, self.layout.size("global"), dtype=dtype, device=some.device)
        probe = probe + start.to(probe)
        theta = {n: probe.new_full(shape, 0.1) for n, shape in self.layout.theta}
        z_record = probe.new_zeros(some.shape[0], self.layout.size("record"))
        real = self.evaluate(probe, probe.new_zeros(self.layout.size("silo")), z_record, theta, rows).shared
        if not torch.allclose(real, self.log_prior(probe, theta), rtol=1e-6, atol=1e-8, equal_nan=True):
            raise DataError(
                f"silo '{silo}': the prior of a global site depends on the data; move what depends on data "
                f"into the plate '{self.model.record_plate}', or share it with sf.Shared"
            )

    def run(self, latents: Params, theta: Params, rows: Params, densities: bool = True) -> Evaluation:
        """One run of the program at unconstrained latents by site, record sites with their plate where it wants it.

        Of a program with discrete sites one for each of their values together, whose record terms are summed out.
        """
        chosen = self.chosen()
        if not densities or len(chosen) == 1:
            return self._once(latents, theta, rows, densities, chosen[0])
        runs = [self._once(latents, theta, rows, densities, one) for one in chosen]
        found = runs[0]
        found.terms["record"] = [torch.stack([torch.stack(run.terms["record"]).sum(0) for run in runs]).logsumexp(0)]
        found.own = {name: term for name, term in found.own.items() if name not in found.in_records}
        found.own[ALL_RECORDS] = found.terms["record"][0].sum()
        return found

    def by_choice(
        self, z_global: Tensor, z_silo: Tensor, z_record: Tensor, theta: Params, rows: Params
    ) -> tuple[Tensor, list[Params]]:
        """At a silo: log p(y_i, Z_Li, z | Z_G, Z_S) in nats, (C, N), for each of the C values of the discrete sites
        together, and these values by site, (N, ...)."""
        split = self.layout.split
        latents = {**split(z_global, "global"), **split(z_silo, "silo"), **split(z_record, "record")}
        runs = [self._once(latents, theta, rows, True, one) for one in self.chosen()]
        return torch.stack([torch.stack(run.terms["record"]).sum(0) for run in runs]), [run.values for run in runs]

    def chosen(self) -> list[dict[str, int]]:
        """All values of the discrete sites together, by site; one, of none, where there are none."""
        names = [name for name, _ in self.layout.choices]
        each = itertools.product(*(range(size) for _, size in self.layout.choices))
        return [dict(zip(names, values, strict=True)) for values in each]

    def _once(
        self, latents: Params, theta: Params, rows: Params, densities: bool, chosen: Mapping[str, int]
    ) -> Evaluation:
        some = next(iter(latents.values()))
        with running(some.dtype, some.device), Evaluation(self.model, latents, theta, densities, chosen) as run:
            self.model.fn(**rows, **self.schema.constants)
        return run

    def _run_on_dummy(
        self, z_global: Tensor, theta: Params, z_silo: Tensor | None = None, densities: bool = True
    ) -> Evaluation:
        # Two records: a single one would be specialised away when the shapes are symbolic.
        rows = {n: v.to(z_global.device) for n, v in self.schema.dummy_rows(2).items()}
        z_silo = z_global.new_zeros(self.layout.size("silo")) if z_silo is None else z_silo
        z_record = z_global.new_zeros(2, self.layout.size("record"))
        return self._run(z_global, z_silo, z_record, theta, rows, densities)

    def _run(
        self, z_global: Tensor, z_silo: Tensor, z_record: Tensor, theta: Params, rows: Params, densities: bool = True
    ) -> Evaluation:
        split = self.layout.split
        latents = {**split(z_global, "global"), **split(z_silo, "silo"), **split(z_record, "record")}
        return self.run(latents, theta, rows, densities)
