"""Vertical federated inference: silos hold different columns of the same people (Hassan et al. 2024)."""

from secure_fvi.algorithms.vertical.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson
from secure_fvi.algorithms.vertical.predictors import (
    Amortised,
    Auto,
    Integrated,
    MeanField,
    Predictor,
    grouped_slopes,
    linear,
)
from secure_fvi.algorithms.vertical.steps import VerticalServer, VerticalSilo
from secure_fvi.algorithms.vertical.vertical import AUXILIARY_PHASE, SLOPE_PHASE, Vertical, shared_batch

__all__ = [
    "AUXILIARY_PHASE",
    "SLOPE_PHASE",
    "Amortised",
    "Auto",
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Integrated",
    "Likelihood",
    "MeanField",
    "Poisson",
    "Predictor",
    "Vertical",
    "VerticalServer",
    "VerticalSilo",
    "grouped_slopes",
    "linear",
    "shared_batch",
]
