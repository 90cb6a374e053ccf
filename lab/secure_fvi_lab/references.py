"""The centralised reference that variational fits are judged by, on the silos' data in one process: the No-U-Turn
sampler; and a finished run beside it.

For NUTS Pyro builds the potential; its value and gradient are traced and compiled into one call, because through Pyro's
handlers one leapfrog step of a small model costs twenty times what its arithmetic does. Record-level sites of a
location-scale family are sampled non-centred, and the global sites get a dense mass matrix: on six cities that
gives five times as many effective draws for the same number of leapfrog steps.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS
from pyro.infer.mcmc.util import initialize_model
from pyro.infer.reparam import LocScaleReparam
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from secure_fvi.compiled import threads
from secure_fvi.deployment.job import AT_SITE
from secure_fvi.errors import InputError, SecureFVIError
from secure_fvi.federated_model import FederatedModel, Shared
from secure_fvi.files import write_atomically
from secure_fvi.runs.config import Config
from secure_fvi.runs.directory import RunDirectory
from secure_fvi.runs.federation import Federation, federate
from secure_fvi.runs.marginals import marginals

Program = Callable[[], None]


class Draws(NamedTuple):
    """Draws of the global sites in the model's own space."""

    sites: dict[str, Tensor]  # (chains, draws, *shape) each
    r_hat: float  # largest split R-hat over all global elements, unconstrained
    ess: float  # smallest effective sample size over all global elements
    seconds: float


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Constants that a program makes without a dtype get this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Pyro draws from the global generators; they are seeded here and left as they were found."""
    before = pyro.util.get_rng_state()
    pyro.set_rng_seed(seed)
    try:
        yield
    finally:
        pyro.util.set_rng_state(before)


# ---- The No-U-Turn sampler ----


class _Potential(NamedTuple):
    """-log p(Z, y) over (Z_G, Z_rest), both flat and unconstrained."""

    function: Callable[[Tensor, Tensor], Tensor]
    value_and_gradient: Callable[[Tensor, Tensor], tuple[tuple[Tensor, Tensor], Tensor]]
    sizes: tuple[int, int]
    constrain: Callable[[Tensor], dict[str, Tensor]]  # (..., n_global) to sites


def sample_nuts(
    program: Program,
    record_plate: str,
    global_sites: list[str],
    dtype: torch.dtype = torch.float64,
    chains: int = 2,
    warmup: int = 300,
    draws: int = 1000,
    seed: int = 0,
    on_chain: Callable[[int], None] | None = None,
) -> Draws:
    """Sample `program`. Raises SecureFVIError when no starting point has a finite density."""
    began = time.monotonic()
    with default_dtype(dtype), pyro.validation_enabled(False), seeded(seed):
        potential = _build(non_centred(program, record_plate), global_sites)
        found = []
        for chain in range(chains):
            if on_chain is not None:
                on_chain(chain)
            pyro.set_rng_seed(seed * 1000 + chain + 1)
            found.append(_chain(potential, warmup, draws))
        z = torch.stack(found)
        r_hat = split_gelman_rubin(z, chain_dim=0, sample_dim=1).max()
        ess = effective_sample_size(z, chain_dim=0, sample_dim=1).min()
        sites = potential.constrain(z)
    return Draws(sites, float(r_hat), float(ess), time.monotonic() - began)


def _build(program: Program, global_sites: list[str]) -> _Potential:
    start, by_site, transforms, _ = initialize_model(program)
    names = [*global_sites, *(name for name in start if name not in global_sites)]
    shapes = [start[name].shape for name in names]
    lengths = [start[name].numel() for name in names]
    n_global = sum(lengths[: len(global_sites)])

    def function(z_global: Tensor, rest: Tensor) -> Tensor:
        pieces = torch.cat([z_global, rest]).split(lengths)
        value: Tensor = by_site({n: z.reshape(s) for n, z, s in zip(names, pieces, shapes, strict=True)})
        return value

    def constrain(z_global: Tensor) -> dict[str, Tensor]:
        pieces = z_global.split(lengths[: len(global_sites)], dim=-1)
        batch = z_global.shape[:-1]
        return {
            name: transforms[name].inv(piece.reshape(*batch, *shape))
            for name, piece, shape in zip(global_sites, pieces, shapes, strict=False)
        }

    sizes = (n_global, sum(lengths) - n_global)
    return _Potential(function, _compiled(function, sizes), sizes, constrain)


def _compiled(
    function: Callable[[Tensor, Tensor], Tensor], sizes: tuple[int, int]
) -> Callable[[Tensor, Tensor], tuple[tuple[Tensor, Tensor], Tensor]]:
    """Gradient and value in one call, as fast as this machine can; the plain function where tracing fails."""
    plain = torch.func.grad_and_value(function, argnums=(0, 1))
    example = (torch.zeros(sizes[0]), torch.zeros(sizes[1]))
    try:
        graph: Any = make_fx(plain)(*example)
        if shutil.which("c++"):
            graph = torch.compile(graph)
        graph(*example)
    except Exception:
        # A program with Python control flow on values cannot be traced; it is then only slower.
        return plain
    faster: Callable[[Tensor, Tensor], tuple[tuple[Tensor, Tensor], Tensor]] = graph
    return faster


def _chain(potential: _Potential, warmup: int, draws: int) -> Tensor:
    """One chain's draws of Z_G, unconstrained, (draws, n_global)."""

    class Evaluate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z_global: Tensor, rest: Tensor) -> Tensor:
            gradient, value = potential.value_and_gradient(z_global.detach(), rest.detach())
            ctx.save_for_backward(*gradient)
            return value

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            first, second = ctx.saved_tensors
            return grad * first, grad * second

    def energy(z: dict[str, Tensor]) -> Tensor:
        value: Tensor = Evaluate.apply(z["global"], z.get("rest", torch.zeros(0)))
        return value

    kernel = NUTS(potential_fn=energy, full_mass=[("global",)])
    sampler = MCMC(kernel, draws, warmup, initial_params=_start(potential), disable_progbar=True)
    sampler.run()
    kept: Tensor = sampler.get_samples()["global"]
    return kept


def _start(potential: _Potential, attempts: int = 100) -> dict[str, Tensor]:
    for _ in range(attempts):
        first, rest = (2 * torch.rand(size) - 1 for size in potential.sizes)
        if torch.isfinite(potential.function(first, rest)):
            return {"global": first, "rest": rest} if len(rest) else {"global": first}
    raise SecureFVIError(f"NUTS found no starting point with a finite density in {attempts} attempts")


# ---- All silos' data in one process, for the centralised fit that a federated one is compared with ----
#
# This is for data that may be pooled: simulations, published data, a rehearsal.


def pooled_program(
    model: FederatedModel, silos: Sequence[Mapping[str, Any]], silo_ids: Sequence[str], theta: Mapping[str, Tensor]
) -> Program:
    """A Pyro program without arguments that is the joint model of all silos, with theta held at the given values.

    Without silo-level sites the records are simply put together. With them the program runs once a silo: global
    sites are drawn at the first and shared by the others, and all other sites carry the silo's id in their names.
    """
    if not model.silo_sites:
        together = {name: _together([silo[name] for silo in silos]) for name in silos[0]}

        def program() -> None:
            with _Fixed(theta):
                model.fn(**together)

        return program

    plain = [{name: v.tensor if isinstance(v, Shared) else v for name, v in silo.items()} for silo in silos]

    def program_by_silo() -> None:
        values: dict[str, Any] = {}
        for silo, data in zip(silo_ids, plain, strict=True):
            with _Fixed(theta), _OneSilo(silo, model, values):
                model.fn(**data)

    return program_by_silo


def _together(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Shared):
        return first.tensor
    return torch.cat(list(parts)) if isinstance(first, Tensor) else first


def is_record_site(site: Any, record_plate: str) -> bool:
    """Whether a site of a trace, or a message about one, lies in the record plate (of any silo)."""
    frames = site["cond_indep_stack"]
    return any(frame.name == record_plate or frame.name.endswith(f"/{record_plate}") for frame in frames)


def non_centred(program: Program, record_plate: str) -> Program:
    """Record-level sites of location-scale families as loc + scale * standardised."""
    with poutine.block():
        trace = poutine.trace(program).get_trace()
    config = {}
    for name, site in trace.nodes.items():
        if site["type"] == "sample" and not site["is_observed"] and is_record_site(site, record_plate):
            base = site["fn"]
            while isinstance(base, torch.distributions.Independent):
                base = base.base_dist
            if {"loc", "scale"} <= set(base.arg_constraints) and base.support is torch.distributions.constraints.real:
                config[name] = LocScaleReparam(0.0)
    reparametrised: Program = poutine.reparam(program, config=config)
    return reparametrised


class _Fixed(Messenger):  # type: ignore[misc]
    """Holds each `pyro.param` at its fitted value: the reference takes the posterior given theta."""

    def __init__(self, theta: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.theta = theta

    def _pyro_param(self, msg: Any) -> None:
        if msg["name"] in self.theta:
            msg["value"], msg["done"] = self.theta[msg["name"]], True


class _OneSilo(Messenger):  # type: ignore[misc]
    """One silo's pass through the program: global sites keep the value of the first pass, others get a prefix."""

    def __init__(self, silo: str, model: FederatedModel, values: dict[str, Any]) -> None:
        super().__init__()
        self.silo, self.model, self.values = silo, model, values

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        in_plate = is_record_site(msg, self.model.record_plate)
        # Plates of one name and different sizes would be taken for one plate by handlers outside.
        msg["cond_indep_stack"] = tuple(
            frame._replace(name=f"{self.silo}/{frame.name}") for frame in msg["cond_indep_stack"]
        )
        is_plate = type(msg["fn"]).__name__ == "_Subsample"
        if in_plate or is_plate or name in self.model.silo_sites:
            msg["name"] = f"{self.silo}/{name}"
        elif name in self.values:
            # Its density was counted at the first silo, so handlers outside do not hear of it again.
            msg["value"], msg["done"], msg["stop"] = self.values[name], True, True

    def _pyro_post_sample(self, msg: Any) -> None:
        self.values.setdefault(msg["name"], msg["value"])


# ---- A finished run beside a centralised fit of the same model to the pooled data: compare.json ----


def compare(
    directory: Path,
    data_dir: Path | None = None,
    chains: int = 2,
    draws: int = 1000,
    on_progress: Callable[[str], None] | None = None,
    exact: bool = False,
    tables: Mapping[str, Path] | None = None,
) -> dict[str, Any]:
    """Fit the reference, write compare.json and return its content.

    Per site: mean and sd of the reference, run_mean and run_sd, mean_error_in_sd = (run_mean - mean) / sd and
    sd_ratio = run_sd / sd, all in the site's own shape; of a formula by its parameters too, in the table's units. Where
    the model has `pyro.param`s the reference is the posterior given the run's values of them. exact: of a private run
    too, whose noise the reference goes around; no budget is charged. tables: by silo, of a run whose server had none of
    them. Raises InputError when the folder holds no finished run, or a private one, and where the number of records
    says that the tables are other ones.
    """
    run = RunDirectory(directory)
    result, config = run.read_result(), run.read_config()
    if config.privacy is not None and not exact:
        raise InputError(
            f"the run in '{directory}' is private, and the reference is the exact posterior of the pooled data, "
            "without noise and charged to no budget: with --exact it is written to compare.json, for whoever may see "
            "the data"
        )
    elsewhere = {silo.id for silo in config.silo if Path(silo.data).name == AT_SITE}
    federation = federate(_with_tables(config, elsewhere, tables or {}), data_dir)
    if not isinstance(federation, Federation):
        raise InputError(
            "compare pools records of one model; 'reproduce vertical-logistic' sets vertical runs beside pooled fits"
        )
    counted, here = result["metrics"].get("records"), sum(len(next(iter(rows.values()))) for rows in federation.silos)
    if not elsewhere:
        run.check_data(federation.digest())
    elif counted is not None and counted != here:
        raise InputError(f"the tables have {here} records, and the run had {counted:g}")
    sites = list(result["posterior"])
    say = on_progress or (lambda _: None)
    with threads(federation.threads):
        found = _fit(federation, result, sites, chains, draws, say)
    content = {
        "reference": "nuts",
        "seconds": found.seconds,
        "draws": next(iter(found.sites.values())).flatten(0, 1).shape[0],
        "r_hat": found.r_hat,
        "ess": found.ess,
        "sites": {site: _row(found.sites[site].flatten(0, 1), result["posterior"][site]) for site in sites},
    }
    flat = {site: found.sites[site].flatten(0, 1) for site in sites}
    named = federation.model.readable(flat)
    content["marginals"] = marginals(flat if named is None else named)
    if named is not None and "parameters" in result:
        content["parameters"] = {name: _row(draws, result["parameters"][name]) for name, draws in named.items()}
    write_atomically(directory / "compare.json", json.dumps(content, indent=2).encode(), private=exact)
    return content


def _with_tables(config: Config, elsewhere: set[str], tables: Mapping[str, Path]) -> Config:
    """`config` with a file for each silo whose data were at its site. Raises InputError for too few and too many."""
    if set(tables) != elsewhere:
        raise InputError(
            f"the run had its data at its sites: give the table of each, by --table SILO=FILE; sites are "
            f"{', '.join(sorted(elsewhere))}"
            if elsewhere
            else "--table: this run names its data itself"
        )
    silos = [s.model_copy(update={"data": str(tables[s.id])}) if s.id in tables else s for s in config.silo]
    return config.model_copy(update={"silo": tuple(silos)})


def _fit(
    federation: Federation,
    result: dict[str, Any],
    sites: list[str],
    chains: int,
    draws: int,
    say: Callable[[str], None],
) -> Draws:
    model: FederatedModel = federation.model
    dtype = torch.float64
    theta = {name: torch.tensor(value, dtype=dtype) for name, value in result["theta"].items()}
    silos = [
        {n: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in silo.items()}
        for silo in federation.silos
    ]
    program: Program = pooled_program(model, silos, federation.silo_ids, theta)
    return sample_nuts(
        program, model.record_plate, sites, dtype, chains=chains, draws=draws,
        on_chain=lambda chain: say(f"NUTS, chain {chain + 1} of {chains}"),
    )  # fmt: skip


def _row(draws: Tensor, run: dict[str, Any]) -> dict[str, Any]:
    mean, sd = draws.mean(0), draws.std(0)
    run_mean = torch.tensor(run["mean"], dtype=draws.dtype)
    run_sd = torch.tensor(run["sd"], dtype=draws.dtype)
    values = {
        "mean": mean,
        "sd": sd,
        "run_mean": run_mean,
        "run_sd": run_sd,
        "mean_error_in_sd": (run_mean - mean) / sd,
        "sd_ratio": run_sd / sd,
    }
    return {name: value.tolist() for name, value in values.items()}
