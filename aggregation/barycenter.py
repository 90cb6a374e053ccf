"""Wasserstein barycenters of Gaussians, from totals alone (Hassan et al. 2023, section 3.2).

The barycenter of N(mu_j, Sigma_j) with weights w_j has the weighted mean of the mu_j and the covariance S with

    S = sum_j w_j (S^1/2 Sigma_j S^1/2)^1/2,

reached by S <- S^-1/2 T^2 S^-1/2, T the right side (Alvarez-Esteban et al. 2016). T is a sum over silos: every
iteration is one secure sum, and one release. Of few silos, several totals tell the covariances apart
(docs/threat-model.md). For diagonal covariances sigma is the weighted mean of the sigma_j: one sum, no iteration.
`algorithms.sfvi_avg` is the protocol.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.errors import AggregationError

#: The block of an iteration: a silo's term as its upper triangle.
ROOT = "root"


class Gaussian(NamedTuple):
    """A mean (d,) and a covariance (d, d)."""

    mean: FloatArray
    covariance: FloatArray


def trusted_barycenter(gaussians: list[Gaussian], weights: FloatArray | None = None) -> Gaussian:
    """The barycenter by POT, for parties that may see all Gaussians. `weights` (J,) add up to 1 (None: equal)."""
    import ot

    means = np.stack([g.mean for g in gaussians])
    covariances = np.stack([g.covariance for g in gaussians])
    mean, covariance = ot.gaussian.bures_wasserstein_barycenter(
        means, covariances, weights=weights, num_iter=1000, eps=1e-11
    )
    return Gaussian(np.asarray(mean), np.asarray(covariance))


def bures_term(own: FloatArray, weight: int, covariance: FloatArray) -> FloatArray:
    """n T_j for Sigma_j = `own` at S = `covariance`, both (d, d): an upper triangle."""
    root = matrix_root(covariance)
    return weight * pack_symmetric(matrix_root(root @ own @ root))


def after_iteration(covariance: FloatArray, mean: FloatArray) -> FloatArray:
    """S^-1/2 T^2 S^-1/2 for T = `mean`, the upper triangle of the silos' weighted mean. Raises AggregationError for one
    that no Gaussians have: not positive definite."""
    t = unpack_symmetric(mean, covariance.shape[0])
    if not np.isfinite(t).all() or (found := np.linalg.eigh(t)).eigenvalues[0] <= 0:
        raise AggregationError("the total of a barycenter's iteration is not positive definite")
    values, vectors = found
    inverse_root = matrix_root(covariance, inverse=True)
    half = inverse_root @ ((vectors * values) @ vectors.T)
    return half @ half.T


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
