"""Wasserstein barycenters of Gaussians, from totals alone (Hassan et al. 2023, section 3.2).

The barycenter of N(mu_j, Sigma_j) with weights w_j has the weighted mean of the mu_j and the covariance S with

    S = sum_j w_j (S^1/2 Sigma_j S^1/2)^1/2,

reached by S <- S^-1/2 T^2 S^-1/2, T the right side (Alvarez-Esteban et al. 2016). T is a sum over silos: every
iteration is one secure sum, and one release. Of few silos, several totals tell the covariances apart
(docs/threat-model.md); iterations are therefore capped, at the silos too. For diagonal covariances sigma is the
weighted mean of the sigma_j: one sum, no iteration.

Weights are w_j = n_j / sum n_j, with n_j a count (records, or 1 for equal weights) that is summed with the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from secure_fvi.aggregation.base import Block, BlockTable, FloatArray
from secure_fvi.errors import AggregationError, InputError

WEIGHT, MEAN, SD, ROOT = "weight", "mean", "sd", "root"


class Gaussian(NamedTuple):
    """A mean (d,) and a covariance (d, d)."""

    mean: FloatArray
    covariance: FloatArray


class Bounds(NamedTuple):
    """What every silo's Gaussian keeps to; the blocks' bounds derive from it. Public, equal at all parties."""

    mean: float  # largest |mu_i|
    variance: float  # largest eigenvalue of Sigma_j; for diagonal Gaussians the largest variance
    weight: int = 1  # largest count n_j


class Barycenter(NamedTuple):
    """What the server ends with."""

    gaussian: Gaussian
    iterations: int  # secure sums, each a release
    change: float  # of the covariance in the last iteration, relative, Frobenius
    converged: bool


def trusted_barycenter(gaussians: list[Gaussian], weights: FloatArray | None = None) -> Gaussian:
    """The barycenter by POT, for parties that may see all Gaussians. `weights` (J,) add up to 1 (None: equal)."""
    import ot

    means = np.stack([g.mean for g in gaussians])
    covariances = np.stack([g.covariance for g in gaussians])
    mean, covariance = ot.gaussian.bures_wasserstein_barycenter(
        means, covariances, weights=weights, num_iter=1000, eps=1e-11
    )
    return Gaussian(np.asarray(mean), np.asarray(covariance))


# Diagonal Gaussians: one sum


def diagonal_blocks(dimension: int, bounds: Bounds) -> BlockTable:
    """The blocks of the one sum that diagonal Gaussians need: weight, n mu (d,), n sigma (d,)."""
    return BlockTable(
        (
            Block(WEIGHT, (1,), bounds.weight, integer=True),
            Block(MEAN, (dimension,), bounds.weight * bounds.mean),
            Block(SD, (dimension,), bounds.weight * math.sqrt(bounds.variance)),
        )
    )


def diagonal_contribution(mean: FloatArray, sd: FloatArray, weight: int = 1) -> FloatArray:
    """A silo's term of that sum, from its own mean and sd (d,)."""
    return np.concatenate([[float(weight)], weight * mean, weight * sd])


def diagonal_from_total(table: BlockTable, total: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Mean and sd (d,) of the barycenter. Raises AggregationError for a total of no weight."""
    blocks = table.split(total)
    weight = _positive_weight(blocks)
    return blocks[MEAN] / weight, blocks[SD] / weight


# Full covariances: one sum an iteration


def full_blocks(covariance: FloatArray, bounds: Bounds, first: bool) -> BlockTable:
    """The blocks of one iteration at S = `covariance`: weight, n mu (d,) in the first only, and n T_j.

    T_j = (S^1/2 Sigma_j S^1/2)^1/2 travels as its upper triangle, d (d+1) / 2 values, each at most the root of
    the largest eigenvalues of S (at most its trace) and Sigma_j. The trace is summed exactly and the root is
    correctly rounded, so that all machines derive the same table.
    """
    d = covariance.shape[0]
    largest = bounds.weight * math.sqrt(math.fsum(np.diag(covariance).tolist()) * bounds.variance)
    root = Block(ROOT, (d * (d + 1) // 2,), largest)
    weight = Block(WEIGHT, (1,), bounds.weight, integer=True)
    mean = (Block(MEAN, (d,), bounds.weight * bounds.mean),) if first else ()
    return BlockTable((weight, *mean, root))


def full_contribution(own: Gaussian, weight: int, covariance: FloatArray, first: bool) -> FloatArray:
    """A silo's term of one iteration at S = `covariance`: the only function here that sees its Gaussian."""
    term = bures_term(own.covariance, weight, covariance)
    return np.concatenate([[float(weight)], weight * own.mean if first else [], term])


def bures_term(own: FloatArray, weight: int, covariance: FloatArray) -> FloatArray:
    """n T_j for Sigma_j = `own` at S = `covariance`, both (d, d): an upper triangle."""
    root = matrix_root(covariance)
    return weight * pack_symmetric(matrix_root(root @ own @ root))


def next_covariance(covariance: FloatArray, table: BlockTable, total: FloatArray) -> FloatArray:
    """S^-1/2 T^2 S^-1/2 from a total, at the server and at every silo alike.

    Raises AggregationError for a total that no Gaussians have: no weight, or T not positive definite.
    """
    blocks = table.split(total)
    return after_iteration(covariance, blocks[ROOT] / _positive_weight(blocks))


def after_iteration(covariance: FloatArray, mean: FloatArray) -> FloatArray:
    """S^-1/2 T^2 S^-1/2 for T = `mean`, the upper triangle of the silos' weighted mean. Raises AggregationError for one
    that no Gaussians have: not positive definite."""
    t = unpack_symmetric(mean, covariance.shape[0])
    values, vectors = np.linalg.eigh(t)
    if not (np.isfinite(values).all() and values[0] > 0):
        raise AggregationError("the total of a barycenter's iteration is not positive definite")
    inverse_root = matrix_root(covariance, inverse=True)
    half = inverse_root @ ((vectors * values) @ vectors.T)
    return half @ half.T


def relative_change(old: FloatArray, new: FloatArray) -> float:
    """Frobenius norm of the difference over that of `new`."""
    return float(np.linalg.norm(new - old) / np.linalg.norm(new))


def mean_from_total(table: BlockTable, total: FloatArray) -> FloatArray:
    """The barycenter's mean (d,) from the first iteration's total."""
    blocks = table.split(total)
    return blocks[MEAN] / _positive_weight(blocks)


def check_start(covariance: FloatArray) -> None:
    """Raise InputError unless `covariance` can be iterated from: symmetric and positive definite."""
    square = covariance.ndim == 2 and covariance.shape[0] == covariance.shape[1]
    if not square or not np.isfinite(covariance).all() or not np.array_equal(covariance, covariance.T):
        raise InputError("the start of a barycenter must be a finite symmetric matrix")
    if np.linalg.eigvalsh(covariance)[0] <= 0:
        raise InputError("the start of a barycenter must be positive definite")


def matrix_root(matrix: FloatArray, inverse: bool = False) -> FloatArray:
    """The symmetric root of a symmetric positive semidefinite `matrix` (d, d), or the inverse of the root."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    roots = np.sqrt(np.maximum(values, 0.0))
    root: FloatArray = (vectors * (1 / roots if inverse else roots)) @ vectors.T
    return root


def pack_symmetric(symmetric: FloatArray) -> FloatArray:
    """The upper triangle of a symmetric matrix (d, d), rows one after the other, (d (d + 1) / 2,)."""
    return symmetric[np.triu_indices(symmetric.shape[0])]


def unpack_symmetric(upper: FloatArray, d: int) -> FloatArray:
    """The symmetric matrix (d, d) of an upper triangle; inverse of `pack_symmetric`."""
    out = np.zeros((d, d))
    out[np.triu_indices(d)] = upper
    return out + np.triu(out, 1).T


def _positive_weight(blocks: Mapping[str, FloatArray]) -> float:
    weight = float(blocks[WEIGHT][0])
    if weight <= 0:
        raise AggregationError("the weights of a barycenter add up to nothing")
    return weight
