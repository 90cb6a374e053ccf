"""Every model of the gallery, dealt to silos and fitted under masked sums: within tolerance of the exact posterior, or
not called converged, with a reason. The one entry in `WRONG` is held as a known failure, strictly.

Tolerance: means within .2 posterior sds, sds within 15%; `LOOSER` names where the best Gaussian is further off than
that. Refusing is not winning: an entry that ends converged today has to do so tomorrow, and those that do not stand in
`NOT_YET`. `pytest -s` prints a line an entry.
"""

from __future__ import annotations

import json
import time
import warnings
from typing import Any

import pytest
import torch
from gallery import ENTRIES, HERE, POSTERIORDB, exact

import secure_fvi as sf
from secure_fvi.errors import SecureFVIWarning
from secure_fvi.results import Result

#: Minutes, and not all of it holds yet: `make gallery`.
pytestmark = pytest.mark.slow

EXACT: dict[str, Any] = json.loads((HERE / "exact.json").read_text())
MEAN_IN_SD, SD_SHARE = 0.2, 0.15
#: A Gaussian in unconstrained space is not that posterior: what its optimum leaves in means (sds) and in sds.
LOOSER: dict[str, tuple[float, float]] = {"beta-binomial": (0.2, 0.25)}  # the best Gaussian of its log-size: .80
#: Entries that end as not converged in the quick fits today, each with what stops it.
NOT_YET = {
    "eight schools": "silos still move q after all rounds",
    "mesquite, raw": "silos still move q after all rounds",
    "radon, reduced": "silos still move q after all rounds",
    "surgical": "silos still move q after all rounds, from InverseGamma(.001, .001)",
    "raw scales": "silos still move q after all rounds",
    "normal mixture, cut by value": "an improper cavity in the last round",
}
#: Called converged and wrong: a mode of two was found, which no slope at the answer tells from the whole.
WRONG = ("two modes",)
#: Not in the quick tier: minutes on one core, or not yet run through there.
HEAVY = (
    "kidiq, raw", "kidscore_momhs", "kidscore_momiq", "logmesquite", "nes1996, by age", "diamonds, reduced",
    "eight schools, centred", "poisson GLMM", "six cities, 10 silos",
)  # fmt: skip
#: A twelfth of the default steps a fit, for seconds; `FULL` is what `sf.PVI()` says.
QUICK, FULL = sf.PVI(local_steps=80, max_rounds=20), sf.PVI()


def fit(name: str, algorithm: Any) -> Result:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureFVIWarning)
        return sf.fit(ENTRIES[name].program, ENTRIES[name].silos, algorithm, sf.Masked(), compile=False, threads=1)


def reference(name: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    if stated := ENTRIES[name].stated:
        moments = POSTERIORDB[stated]
        return {
            site: (torch.tensor(moments["mean"][site]), torch.tensor(moments["sd"][site])) for site in moments["mean"]
        }
    return {site: (torch.tensor(m["mean"]), torch.tensor(m["sd"])) for site, m in EXACT[name].items()}


def wrong_by(name: str, result: Result) -> tuple[float, float, float]:
    """The largest error of a mean, in posterior sds; the smallest and the largest ratio of sds."""
    error, ratios = 0.0, []
    for site, (mean, sd) in reference(name).items():
        found = result.posterior[site]
        error = max(error, float(((found.mean - mean) / sd).abs().max()))
        ratios.append((found.sd / sd).reshape(-1))
    ratio = torch.cat(ratios)
    return error, float(ratio.min()), float(ratio.max())


def check(name: str, algorithm: Any) -> None:
    began = time.process_time()
    result = fit(name, algorithm)
    error, least, most = wrong_by(name, result)
    took = time.process_time() - began
    line = f"{name}: converged={result.converged}, {error:.3f} sds, sds x {least:.2f} to {most:.2f}, {took:.1f} s"
    print(line if result.converged else f"{line}; {result.convergence['reason']}")
    if result.converged:
        mean_in_sd, sd_share = LOOSER.get(name, (MEAN_IN_SD, SD_SHARE))
        assert error < mean_in_sd, line
        assert 1 - sd_share < least, line
        assert most < 1 + sd_share, line
        return
    assert len(result.convergence["reason"]) > 40  # a cause and a remedy
    assert name in NOT_YET, f"{line}; {result.convergence['reason']}"


def _marked(name: str) -> Any:
    wrong = pytest.mark.xfail(strict=True, raises=AssertionError, reason="one mode of two, called converged")
    return pytest.param(name, marks=[pytest.mark.slow] * (name in HEAVY) + [wrong] * (name in WRONG))


@pytest.mark.parametrize("name", [_marked(name) for name in ENTRIES])
def test_right_or_not_called_converged(name: str) -> None:
    check(name, QUICK)


@pytest.mark.slow  # a minute an entry
@pytest.mark.parametrize("name", ENTRIES)
def test_right_or_not_called_converged_by_default(name: str) -> None:
    check(name, FULL)


def test_refusing_is_not_winning() -> None:
    """The floor reached today: 12 of 19 quick entries, each of which the test above asserts to end converged. The aim
    is four in five."""
    assert len(ENTRIES) >= 20
    assert set(LOOSER) | set(NOT_YET) | set(WRONG) | set(HEAVY) <= set(ENTRIES)
    assert len(set(ENTRIES) - set(HEAVY) - set(NOT_YET) - set(WRONG)) >= 12


@pytest.mark.parametrize("name", ["eight schools", "funnel", "collinear columns", "beta-binomial"])
def test_the_committed_moments_are_those_of_the_program(name: str) -> None:
    """Two ways that share no code: the quadrature again, and, of eight schools, posteriordb's reference draws."""
    for site, (mean, sd) in exact(name).items():
        torch.testing.assert_close(mean, reference(name)[site][0], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(sd, reference(name)[site][1], rtol=1e-6, atol=1e-9)
    if name == "eight schools":
        stated = POSTERIORDB["eight_schools_noncentred"]
        for site, (mean, sd) in reference(name).items():
            assert float((mean - stated["mean"][site]).abs()) < 0.05 * float(sd)
            assert float(sd) == pytest.approx(stated["sd"][site], rel=0.05)
