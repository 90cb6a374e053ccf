"""NumPyro's programs, which `secure-fvi bench posteriors --peers` puts beside ours, are the gallery's own models."""

import pyro
import pytest
import torch

import secure_fvi as sf
from secure_fvi_lab.posteriors.gallery import ENTRIES, Entry, reference

numpyro = pytest.importorskip("numpyro", reason="secure-fvi-lab[benchmark]")
from numpyro.infer.util import log_density  # noqa: E402

from secure_fvi_lab.posteriors import numpyro_programs  # noqa: E402

#: Laid out otherwise there: rows of a county, and components that are summed out.
OTHERWISE = {"radon, 85 counties in 8 silos", "radon, a silo a county", "labels switch"}
TWINS = [name for name in ENTRIES if name not in OTHERWISE and numpyro_programs.twin(name)]


def _pyros(entry: Entry, values: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """The log density of all records and latents at `values`, others drawn from their priors, and all of them."""
    program = entry.program.fn if isinstance(entry.program, sf.FederatedModel) else entry.program
    pyro.set_rng_seed(0)
    trace = pyro.poutine.trace(pyro.poutine.condition(program, values)).get_trace(**entry.rows)
    sites = {n: s for n, s in trace.nodes.items() if s["type"] == "sample" and type(s["fn"]).__name__ != "_Subsample"}
    latents = {n: s["value"] for n, s in sites.items() if n in values or not s["is_observed"]}
    return float(trace.log_prob_sum()), latents


@pytest.mark.parametrize("name", TWINS)
def test_both_libraries_say_the_same_density(name: str) -> None:
    """At reference means, and record latents from their priors there."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        ours, latents = _pyros(ENTRIES[name], {site: mean for site, (mean, _) in reference(name).items()})
    finally:
        torch.set_default_dtype(before)
    theirs, _ = log_density(numpyro_programs.twin(name), (), {}, {n: v.numpy() for n, v in latents.items()})
    assert float(theirs) == pytest.approx(ours, rel=1e-6, abs=1e-4)
