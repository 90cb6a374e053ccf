"""A finished run beside a centralised fit of the same model to the pooled data: compare.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from secure_fvi.compiled import threads
from secure_fvi.deployment.job import AT_SITE
from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel
from secure_fvi.files import write_atomically
from secure_fvi.runs.config import Config
from secure_fvi.runs.directory import RunDirectory
from secure_fvi.runs.federation import Federation, federate
from secure_fvi.runs.marginals import marginals
from secure_fvi_lab.references import Draws, Program, pooled_program, sample_nuts, sample_svi

Reference = Literal["nuts", "svi"]


def compare(
    directory: Path,
    reference: Reference = "nuts",
    data_dir: Path | None = None,
    chains: int = 2,
    draws: int = 1000,
    on_progress: Callable[[str], None] | None = None,
    exact: bool = False,
    tables: Mapping[str, Path] | None = None,
) -> dict[str, Any]:
    """Fit the reference, write compare.json and return its content.

    Per site: mean and sd of the reference, run_mean and run_sd, mean_error_in_sd = (run_mean - mean) / sd and
    sd_ratio = run_sd / sd, all in the site's own shape. Where the model has `pyro.param`s the reference is
    the posterior given the run's values of them. exact: of a private run too, whose noise the reference goes around; no
    budget is charged. tables: by silo, of a run whose server had none of them. Raises InputError when the folder holds
    no finished run, or a private one, and where the number of records says that the tables are other ones.
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
        found = _fit(federation, result, sites, reference, chains, draws, say)
    content = {
        "reference": reference,
        "seconds": found.seconds,
        "draws": next(iter(found.sites.values())).flatten(0, 1).shape[0],
        "r_hat": found.r_hat,
        "ess": found.ess,
        "sites": {site: _row(found.sites[site].flatten(0, 1), result["posterior"][site]) for site in sites},
        "marginals": marginals({site: found.sites[site].flatten(0, 1) for site in sites}),
    }
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
    reference: Reference,
    chains: int,
    draws: int,
    say: Callable[[str], None],
) -> Draws:
    model: FederatedModel = federation.model
    dtype = torch.float64
    theta = {name: torch.tensor(value, dtype=dtype) for name, value in result["theta"].items()}
    silos = [{name: _cast(v, dtype) for name, v in silo.items()} for silo in federation.silos]
    program: Program = pooled_program(model, silos, federation.silo_ids, theta)
    if reference == "nuts":
        return sample_nuts(
            program,
            model.record_plate,
            sites,
            dtype,
            chains=chains,
            draws=draws,
            on_chain=lambda chain: say(f"NUTS, chain {chain + 1} of {chains}"),
        )
    steps = 4000
    return sample_svi(
        program,
        model.record_plate,
        sites,
        dtype,
        steps=steps,
        on_step=lambda step: say(f"SVI, step {step} of {steps}") if step % 200 == 0 else None,
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


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
