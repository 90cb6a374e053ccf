"""Supports of our own, which `biject_to` knows, and the layout of a result names."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import Transform, biject_to, constraints, transform_to

#: Of log(y / unit): its slope far to the right, and the steps in which it is inverted.
_RIGHT, _STEPS = 0.25, 24


class ReachesZero(constraints.Constraint):
    """x > 0, as an sd that may be 0 as well as large, in `unit`s about as small as data tell apart.

    By its logarithm 0 would be infinitely far: where the likelihood at 0 is some share of the largest, the posterior
    had a tail e^z there, which no normal has. Here a density that is flat near 0 falls off as exp(-z^2 / 2).
    """

    def __init__(self, unit: float) -> None:
        self.unit = unit

    def check(self, value: Tensor) -> Tensor:
        return value > 0

    def __repr__(self) -> str:
        return f"ReachesZero(unit={self.unit!r})"


class ReachesFar(ReachesZero):
    """x > 0, as an sd of few groups, which may be 0 and may be very large.

    Given effects of k groups the posterior of the sd's logarithm l falls off as exp(-k l) on the right, which no normal
    does either. Here that is as exp(-k z^2 / 2), and what is left on the left is as by `ReachesZero`.
    """

    def __repr__(self) -> str:
        return f"ReachesFar(unit={self.unit!r})"


class _Sd(Transform):
    """y = unit exp(a(x)), a' = 1/4 + (sqrt(1 + x^2) - x) / 2: about linear around x = 0, y = unit."""

    domain = constraints.real
    bijective = True
    sign = 1

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.unit = unit
        self.codomain = ReachesZero(unit)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.unit == self.unit

    def _call(self, x: Tensor) -> Tensor:
        return self.unit * _log(x).exp()

    def _inverse(self, y: Tensor) -> Tensor:
        a = (y / self.unit).log()
        z = -1.0 - (-2 * a.clamp(max=0.0)).sqrt()  # a(z) is concave: Newton's steps from the left stay there
        for _ in range(_STEPS):
            z = z + (a - _log(z)) / _slope(z)
        return z

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        return _log(x) + _slope(x).log() + math.log(self.unit)


def _log(z: Tensor) -> Tensor:
    root = (1 + z.square()).sqrt()
    # z (root - z) without a difference of what is large and alike.
    bend = torch.where(z > 0, z / (root + z.clamp(min=0.0)), z * (root - z))
    return _RIGHT * z + 0.25 * (bend + torch.asinh(z))


def _slope(z: Tensor) -> Tensor:
    root = (1 + z.square()).sqrt()
    return _RIGHT + 0.5 * torch.where(z > 0, 1 / (root + z.clamp(min=0.0)), root - z)


class _FarSd(_Sd):
    """y = unit exp(a(x)), a' = sqrt(1 + x^2)."""

    def __init__(self, unit: float) -> None:
        super().__init__(unit)
        self.codomain = ReachesFar(unit)

    def _call(self, x: Tensor) -> Tensor:
        return self.unit * _far_log(x).exp()

    def _inverse(self, y: Tensor) -> Tensor:
        a = (y / self.unit).log()
        z = torch.minimum(a.abs(), (2 * a.abs()).sqrt())  # a(z) is odd, and convex on the right: from beyond
        for _ in range(_STEPS):
            z = z - (_far_log(z) - a.abs()) / (1 + z.square()).sqrt()
        return z.copysign(a)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        return _far_log(x) + 0.5 * x.square().log1p() + math.log(self.unit)


def _far_log(z: Tensor) -> Tensor:
    return 0.5 * (z * (1 + z.square()).sqrt() + torch.asinh(z))


@biject_to.register(ReachesFar)  # type: ignore[untyped-decorator]
@transform_to.register(ReachesFar)  # type: ignore[untyped-decorator]
def _of_far_sd(constraint: ReachesFar) -> _FarSd:
    return _FarSd(constraint.unit)


@biject_to.register(ReachesZero)  # type: ignore[untyped-decorator]
@transform_to.register(ReachesZero)  # type: ignore[untyped-decorator]
def _of_sd(constraint: ReachesZero) -> _Sd:
    return _Sd(constraint.unit)
