"""A point in place of a distribution: what algorithms without uncertainty return."""

from __future__ import annotations

import math

from torch import Tensor

from secure_fvi.trees import Params


class Point:
    """All mass at `loc` (n,). `families.gaussian.GlobalFamily`; it needs no noise, and every draw is the point."""

    name = "point"

    def __init__(self, n: int) -> None:
        self.n = n

    @property
    def noise_size(self) -> int:
        return 0

    def init(self, loc: Tensor) -> Params:
        return {"loc": loc.clone()}

    def transform(self, eta: Params, eps: Tensor) -> Tensor:
        return eta["loc"].clone()

    def log_prob(self, eta: Params, z: Tensor) -> Tensor:
        """0 () at the point, -inf elsewhere: against the counting measure, not Lebesgue's."""
        return z.new_zeros(()).masked_fill((z != eta["loc"]).any(), -math.inf)

    def covariance(self, eta: Params) -> Tensor:
        return eta["loc"].new_zeros(self.n, self.n)

    def stddev(self, eta: Params) -> Tensor:
        return eta["loc"].new_zeros(self.n)
