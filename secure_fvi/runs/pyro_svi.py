"""Pyro's own SVI on the pooled model: the centralised fit that a user of Pyro would run.

Its guide is a joint Gaussian over all latents, record-level sites non-centred: with full covariance up to 100
dimensions, of low rank above, since a full one over the 542 latents of six cities has not converged after 6000 steps.
There the guide is itself off by 0.8 (beta[0]) to 1.3 (omega) posterior sds: NUTS is the yardstick, this is a
comparison of methods.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pyro
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoLowRankMultivariateNormal, AutoMultivariateNormal
from pyro.infer.autoguide.initialization import init_to_mean
from pyro.optim import ClippedAdam

from secure_fvi.runs.draws import Draws, default_dtype, seeded
from secure_fvi.runs.pooling import Program, non_centred

#: Largest number of latents with a full covariance, and the rank above it.
_FULL_UP_TO, _RANK = 100, 10


def sample_svi(
    program: Program,
    record_plate: str,
    global_sites: list[str],
    dtype: torch.dtype = torch.float64,
    steps: int = 4000,
    draws: int = 4000,
    seed: int = 0,
    on_step: Callable[[int], None] | None = None,
) -> Draws:
    """Fit the guide by `steps` steps of Adam and draw the global sites from it."""
    began = time.monotonic()
    with default_dtype(dtype), pyro.validation_enabled(False), seeded(seed), pyro.get_param_store().scope():
        program = non_centred(program, record_plate)
        trace = pyro.poutine.util.prune_subsample_sites(pyro.poutine.trace(program).get_trace())
        size = sum(trace.nodes[name]["value"].numel() for name in trace.stochastic_nodes)
        start = {"init_loc_fn": init_to_mean, "init_scale": 0.05}
        guide = (
            AutoMultivariateNormal(program, **start)
            if size <= _FULL_UP_TO
            else AutoLowRankMultivariateNormal(program, rank=_RANK, **start)
        )
        # The learning rate falls from 0.02 to a hundredth of it.
        svi = SVI(program, guide, ClippedAdam({"lr": 0.02, "lrd": 0.01 ** (1 / steps)}), Trace_ELBO())
        for step in range(steps):
            svi.step()
            if on_step is not None:
                on_step(step)
        with torch.no_grad():
            found = Predictive(guide, num_samples=draws, return_sites=global_sites)()
        shapes = {name: trace.nodes[name]["value"].shape for name in global_sites}
        sites = {name: found[name].detach().reshape(1, draws, *shapes[name]) for name in global_sites}
    return Draws(sites, None, float(draws), time.monotonic() - began)
