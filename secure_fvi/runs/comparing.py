"""A finished run beside a centralised fit of the same model to the pooled data: compare.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from secure_fvi.compiled import threads
from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel
from secure_fvi.files import write_atomically
from secure_fvi.runs.directory import RunDirectory
from secure_fvi.runs.draws import Draws
from secure_fvi.runs.federation import Federation, federate
from secure_fvi.runs.marginals import marginals
from secure_fvi.runs.pooling import Program, pooled_program

Reference = Literal["nuts", "svi"]


def compare(
    directory: Path,
    reference: Reference = "nuts",
    data_dir: Path | None = None,
    chains: int = 2,
    draws: int = 1000,
    on_progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Fit the reference, write compare.json and return its content.

    Per site: mean and sd of the reference, run_mean and run_sd, mean_error_in_sd = (run_mean - mean) / sd and
    sd_ratio = run_sd / sd, all in the site's own shape. Where the model has `pyro.param`s the reference is
    the posterior given the run's values of them. Raises InputError when the folder holds no finished run.
    """
    run = RunDirectory(directory)
    result = run.read_result()
    federation = federate(run.read_config(), data_dir)
    if not isinstance(federation, Federation):
        raise InputError(
            "compare pools records of one model; 'reproduce vertical-logistic' sets vertical runs beside pooled fits"
        )
    run.check_data(federation.digest())
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
    write_atomically(directory / "compare.json", json.dumps(content, indent=2).encode())
    return content


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
        from secure_fvi.runs.nuts import sample_nuts

        return sample_nuts(
            program,
            model.record_plate,
            sites,
            dtype,
            chains=chains,
            draws=draws,
            on_chain=lambda chain: say(f"NUTS, chain {chain + 1} of {chains}"),
        )
    from secure_fvi.runs.pyro_svi import sample_svi

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
