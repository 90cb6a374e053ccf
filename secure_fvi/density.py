"""The log density of a federated model, split by who owns which part, as a pure function of tensors.

log p(Z_G) + sum_j [ log p(Z_Sj | Z_G) + sum_i log p(y_ji, Z_Lji | Z_G, Z_Sj) ]

Discrete sites of a record are summed out: log sum_z p(y_ji, Z_Lji, z | Z_G, Z_Sj), a run of the program for each z.
All latents are unconstrained (`biject_to` of each site's support), with the log Jacobian inside each term.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import pyro
import torch
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.constraints import Constraint

from secure_fvi.errors import DataError, InputError
from secure_fvi.federated_model import FederatedModel, Schema
from secure_fvi.trees import Params as Params

Role = Literal["global", "silo", "record"]

#: Pyro's stack of handlers, its switch of validation and PyTorch's default type are one for all threads, so that
#: programs run one at a time.
_ONE_AT_A_TIME = threading.RLock()
#: Of PyTorch's own gradient of a cumulative product over many values at once (every Dirichlet): nobody can act on it.
warnings.filterwarnings("ignore", "An output with one or more elements was resized", UserWarning)


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


class LogDensity:
    """The split log density of one model for one schema: of a program (`program_density.ProgramDensity`), or of a graph
    that was made of one elsewhere (`exported.GraphDensity`).

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

    def often(self, start: Start, theta: Params, rows: Params) -> None:
        """At a silo: it is going to be evaluated there again and again, on these rows (N, ...)."""

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

    def chosen(self) -> list[dict[str, int]]:
        """All values of the discrete sites together, by site; one, of none, where there are none."""
        names = [name for name, _ in self.layout.choices]
        each = itertools.product(*(range(size) for _, size in self.layout.choices))
        return [dict(zip(names, values, strict=True)) for values in each]

    def _run_on_dummy(
        self, z_global: Tensor, theta: Params, z_silo: Tensor | None = None, densities: bool = True
    ) -> Any:
        # Two records: a single one would be specialised away when the shapes are symbolic.
        rows = {n: v.to(z_global.device) for n, v in self.schema.dummy_rows(2).items()}
        z_silo = z_global.new_zeros(self.layout.size("silo")) if z_silo is None else z_silo
        z_record = z_global.new_zeros(2, self.layout.size("record"))
        return self._run(z_global, z_silo, z_record, theta, rows, densities)

    def start_at(self, problem: Any, rows: Params, size: int, silo: str) -> Start:
        """Where a fit begins at a silo, from its own records (N + 1, ...), the last a spare one, and whether these fit
        the model. Seen by that silo only. Raises DataError, which counts rows and quotes no value."""
        raise NotImplementedError

    def check_sites(self, point: Any, rows: Params) -> None:
        """Raises InputError where a site does not keep its contract; where none is known, nothing."""

    def misplaced(self, problem: Any, z_global: Tensor | None = None, rows: Params | None = None) -> str:
        """Why a run came to numbers that are none, in words; "" where nothing is seen, or no site is known."""
        return ""

    def differing(self, point: Any, rows: Params, part: Tensor) -> set[str]:
        """The sites of records that have other terms among some of the rows than among all, where sites are known."""
        return set()

    def by_choice(
        self, z_global: Tensor, z_silo: Tensor, z_record: Tensor, theta: Params, rows: Params
    ) -> tuple[Tensor, list[Params]]:
        """At a silo: log p(y_i, Z_Li, z | Z_G, Z_S) in nats, (C, N), for each of the C values of the discrete sites
        together, and these values by site, (N, ...)."""
        raise NotImplementedError

    def run(self, latents: Params, theta: Params, rows: Params, densities: bool = True) -> Any:
        """One run at unconstrained latents by site; of what is known of sites."""
        raise NotImplementedError

    def _run(
        self, z_global: Tensor, z_silo: Tensor, z_record: Tensor, theta: Params, rows: Params, densities: bool = True
    ) -> Any:
        split = self.layout.split
        latents = {**split(z_global, "global"), **split(z_silo, "silo"), **split(z_record, "record")}
        return self.run(latents, theta, rows, densities)


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
