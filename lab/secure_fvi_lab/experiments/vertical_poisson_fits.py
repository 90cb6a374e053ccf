"""The variational fits of section 5.2 beside each other, each for silos of equal shape in one process.

In the first three the silos send z_j, drawn from q(z_j | theta_j). In the last two they send eta_j at a draw of
theta_j, and the server, which holds the response, integrates the auxiliary variables out: what it answers is still one
derivative a record. That mu is integrated out as well is a choice of each silo's own program.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch

from secure_fvi.algorithms.vertical import (
    Amortised,
    Likelihood,
    MeanField,
    Poisson,
    Predictor,
    Vertical,
    grouped_slopes,
)
from secure_fvi.algorithms.vertical.predictors import Program
from secure_fvi.algorithms.vertical.silo import Response
from secure_fvi.compiled import Mode
from secure_fvi.models.vertical_poisson import LEVELS, SCALE, SILOS, Areas, slopes_without_mu
from secure_fvi_lab.experiments.vertical_batched import Fit, VerticalRound
from secure_fvi_lab.experiments.vertical_poisson_targets import Levels, poisson_lognormal, with_mu

PRIVATE, SHARED, MEAN_FIELD = "amortised", "amortised, response", "mean field"
MARGINAL, INTEGRATED = "z integrated", "z and mu integrated"
TRUE_MODEL = "true model, mean field"
VARIANTS = (PRIVATE, SHARED, MEAN_FIELD, MARGINAL, INTEGRATED)
_RATE = 0.02


class Found(NamedTuple):
    levels: Levels
    fit: Fit
    seconds: float  # compilation included where the variant is fitted for the first time


class Fits:
    """Fits of any variant to data sets of one size; each variant is compiled once."""

    def __init__(self, mode: Mode, rounds: int, rounds_pooled: int) -> None:
        self.mode, self.rounds, self.rounds_pooled = mode, rounds, rounds_pooled
        self._known: dict[tuple[str, float], VerticalRound] = {}

    def run(self, variant: str, data: Areas, rho: float) -> Found:
        """`rho` has no meaning for TRUE_MODEL."""
        began, pooled = time.monotonic(), variant in (MARGINAL, INTEGRATED, TRUE_MODEL)
        likelihood: Likelihood = Poisson(SCALE)
        if variant in (MARGINAL, INTEGRATED):
            likelihood = poisson_lognormal(math.sqrt(SILOS) * rho, SCALE)
        config = Vertical(
            rho=rho,
            response="shared" if variant == SHARED else "private",
            family="diagonal" if variant == TRUE_MODEL else "auto",
            auxiliary=MeanField() if variant == MEAN_FIELD else Amortised(),
        )
        program: Program = slopes_without_mu if variant == INTEGRATED else grouped_slopes(LEVELS, SCALE)
        level = data.level.expand(SILOS, -1).contiguous()
        rounds = VerticalRound(
            config,
            likelihood,
            data.x,
            Response(data.y, data.offset),
            _RATE,
            self.mode,
            pooled=pooled,
            program=program,
            more={"level": level},
            like=self._known.get((variant, rho)),
        )
        self._known[variant, rho] = rounds
        fit = rounds.fit(self.rounds_pooled if pooled else self.rounds)
        return Found(_levels(program, data, fit), fit, time.monotonic() - began)


def _levels(program: Program, data: Areas, fit: Fit) -> Levels:
    """Draws of mu and beta from draws of q."""
    rows = {"x": data.x[0], "level": data.level}
    predictor = Predictor(program, rows)
    theta = fit.draws.reshape(len(fit.draws) * SILOS, predictor.n)
    sites = torch.func.vmap(lambda t: predictor.constrain(t, {}))(theta)
    found = {name: value.reshape(-1, SILOS, *value.shape[1:]) for name, value in sites.items()}
    if "mu" in found:
        return Levels(found["mu"], found["beta"])
    return with_mu(found["sigma"], found["mean"], found["contrast"], seed=0)
