"""Every model of the gallery, dealt to silos and fitted under masked sums: within tolerance of the exact posterior, or
not called converged, with a reason. There is no third outcome.

Tolerance: means within .1 posterior sds, sds within 10%. Refusing is not winning: an entry that ends converged today
has to do so tomorrow, and those that do not stand in `NOT_YET`. `pytest -s` prints a line an entry.
"""

from __future__ import annotations

import time
import warnings

import pytest
import torch

import secure_fvi as sf
from secure_fvi.algorithms import natural, prior, refining_server
from secure_fvi.errors import AggregationError, BoundError, SecureFVIWarning
from secure_fvi.results import Result
from secure_fvi_lab.posteriors.gallery import ENTRIES, POSTERIORDB, exact, reference, wrong_by

MEAN_IN_SD, SD_SHARE = 0.1, 0.1
#: Entries that may end as not converged, each with what stops it.
NOT_YET = {
    "poisson GLMM": "draws around what silos fitted of its 40 latents integrate these with half a nat of error",
    "an angle at its cut": "3% of the mass are at the other end of its interval, where a second mode is found",
}
#: Entries that end with a refusal, each with its cause: a silo that sent a share of a change that is too large, as it
#: did once, would let a server single it out.
REFUSED = {"raw scales": "a prior sd of 1,000 beside a posterior sd of 1e-5: a first change of 1e15 units and more"}
#: What the first tier fits, by what `sf.PVI()` says: likelihoods, priors, scales and deals of each kind, several modes,
#: one that is refused and one that may end as not converged. The others are of the second.
FIRST = (
    "diamonds, reduced", "radon, reduced", "eight schools", "funnel", "two modes", "two camps", "negative binomial",
    "Student-t regression", "censored by factor", "autoregression, ragged", "separation", "a silo of zeros",
    "raw scales", "an angle at its cut", "shared groups of a funnel",
)  # fmt: skip


def fit(name: str, seed: int = 0) -> Result:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureFVIWarning)
        return sf.fit(
            ENTRIES[name].program, ENTRIES[name].silos, sf.PVI(), sf.Masked(), seed=seed, compile=False, threads=1
        )


def check(name: str) -> None:
    began = time.process_time()
    if name in REFUSED:
        with pytest.raises(AggregationError, match=r"its part of 'change' .* scale the data"):
            fit(name)
        return
    result = fit(name)
    error, least, most = wrong_by(name, result.posterior)
    took = time.process_time() - began
    line = f"{name}: converged={result.converged}, {error:.3f} sds, sds x {least:.2f} to {most:.2f}, {took:.1f} s"
    print(line if result.converged else f"{line}; {result.convergence['reason']}")
    if result.converged:
        assert error < MEAN_IN_SD, line
        assert least > 1 - SD_SHARE, line
        assert most < 1 + SD_SHARE, line
        return
    assert len(result.convergence["reason"]) > 40  # a cause and a remedy
    assert name in NOT_YET, f"{line}; {result.convergence['reason']}"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FIRST)) for n in ENTRIES])
def test_right_or_not_called_converged_by_default(name: str) -> None:
    check(name)


def test_one_sum_that_misses_a_tail_is_not_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside its records' mode this posterior has one of little mass, and much of the variance. The control: the first
    sum is taken at its word, with the first seed that shows it: which one does hangs by a processor's last bits, and so
    whether it ends converged or says that it has not."""
    name = "against the prior"

    def share(seed: int) -> float:
        result = fit(name, seed=seed)
        return wrong_by(name, result.posterior)[1] if result.converged else 1.0

    with monkeypatch.context() as patched:
        patched.setattr(refining_server, "_CONFIRMED", 1)
        seed = next((seed for seed in (1, 9, 0, 3, 5, 7) if share(seed) < 0.92), None)
    assert seed is not None
    assert share(seed) > 0.9


def test_a_step_of_the_priors_own_leaves_q_where_records_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the prior's step takes what q has left, and a silo's fit from there is out of all bounds."""
    name = "against the prior"
    result = fit(name, seed=17)
    assert result.converged
    error, least, most = wrong_by(name, result.posterior)
    assert error < 0.05
    assert least > 0.95
    assert most < 1.05
    monkeypatch.setattr(
        prior, "accept", lambda q, change, damping, _, tried: natural.accept(q, change, damping, 1.0, tried)
    )  # fmt: skip
    with pytest.raises(BoundError, match="'objective' is not finite or exceeds"):
        fit(name, seed=17)


def test_refusing_is_not_winning() -> None:
    """The floor reached today, each of which the test above asserts to end converged: 53 of 56 in all, of which the
    first tier fits 13. The aim is four in five."""
    assert len(ENTRIES) >= 56
    assert set(NOT_YET) | set(FIRST) | set(REFUSED) <= set(ENTRIES)
    assert len(set(FIRST) - set(NOT_YET) - set(REFUSED)) >= 13
    assert len(set(ENTRIES) - set(NOT_YET) - set(REFUSED)) >= 53
    assert set(FIRST) & set(NOT_YET)
    assert set(FIRST) & set(REFUSED)


@pytest.mark.parametrize(
    "name",
    ["eight schools", "funnel", "collinear columns", "beta-binomial", "autoregression, ragged", "banana", "abundance"],
)
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
