"""Split NN: each silo's network answers the same slope, one step an exchange (Hassan et al. 2024, section 5.3).

    draw      z_j = f(x_j; phi_j) (N, C), which the silo adds to the secure sum: the limit rho = 0, weights as points
    update    one ascent step on phi_j along the pull dlog p(y | s)/ds of the server (`VerticalServer.respond`)

Nothing is sampled: z_j tells what the network outputs, and several steps a round would need a new s each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from secure_fvi.algorithms.vertical.predictors import Predictor
from secure_fvi.errors import InputError
from secure_fvi.optimizers import Optimizer
from secure_fvi.trees import Params


class SplitSilo:
    """Pure functions of one silo's columns; the predictor's `pyro.param` sites are phi_j."""

    def __init__(self, predictor: Predictor, optimizer: Optimizer) -> None:
        if predictor.n:
            raise InputError("a split NN fits points: its program must have pyro.param sites only, no pyro.sample")
        self.predictor, self.optimizer = predictor, optimizer

    def init(self) -> tuple[Params, Params]:
        """phi_j, and the optimiser's state for it."""
        return self.predictor.points, self.optimizer.init(self.predictor.points)

    def draw(self, points: Params, rows: Params) -> Tensor:
        """z_j (N, C)."""
        return self.predictor.evaluate(self.predictor.start, points, rows)[0]

    def update(
        self, points: Params, moments: Params, rows: Params, weights: Tensor, pull: Tensor, scale: Tensor
    ) -> tuple[Params, Params]:
        """One step from the pull (N, C) and the records' weights (N,), `scale` () times the learning rate."""
        return self.ascend(points, self.gradient(points, rows, weights, pull), moments, scale)

    def gradient(self, points: Params, rows: Params, weights: Tensor, pull: Tensor) -> Params:
        """Of sum_i weights_i log p(y_i | s_i) in phi_j, exactly."""

        def pulled(points: Params) -> Tensor:
            return (weights.unsqueeze(-1) * pull * self.draw(points, rows)).sum()

        return torch.func.grad(pulled)(points)

    def ascend(self, points: Params, gradient: Params, moments: Params, scale: Tensor) -> tuple[Params, Params]:
        """One step of the optimiser: element by element, so that runs can be stacked."""
        return self.optimizer.step(points, gradient, moments, scale)
