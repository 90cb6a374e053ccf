"""A silo's local fit by steps that are noised one by one: DP-SGD inside of the fit (Heikkila et al. 2023, section 4).

For each step the gate is given gradients in Z_G at one draw of q, a row for each record of a Poisson sample, and gives
back their clipped, noised sum. All else of a step follows from that sum, from what is public and from coins: the
gradients of q's mean and of its scales are both functions of that one vector and the draw, so that n numbers a step are
noised, whatever the family, and eight that count gradients by their lengths (`objective.Lengths`). What these say is
kept of the last half of the steps: on its way from where it began a fit meets gradients that say nothing of its end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from secure_fvi.algorithms.base import SiloView
from secure_fvi.algorithms.kit import EachAlone, Rows, joined
from secure_fvi.algorithms.local_fit import LEAST_RATE, STRATA, Families, Fitted, OwnState, SiloFit, from_fit
from secure_fvi.algorithms.natural import Natural, times
from secure_fvi.objective import Lengths, record_gradients
from secure_fvi.privacy.gate import NoisedSum
from secure_fvi.trees import Params, take

#: Share of a fit's steps, the last ones, of which it is kept how long records' gradients are.
TOLD = 0.5


class RowGradients:
    """Gradients of log p(y_i | Z_G) in Z_G, of each record alone to the last bit, and how long each is; for models
    without own latents. It holds no data, so that all silos of a process share its traces."""

    def __init__(self, families: Families, lengths: Lengths | None = None) -> None:
        self.problem = families.problem
        self.told = 0 if lengths is None else len(lengths.edges) + 1
        of = families.problem.density, families.local, families.silo, 1, False
        gradients = functools.partial(record_gradients, *of, lengths=lengths)
        self._rows = EachAlone(self.problem, gradients, _taken, lambda g, *_: g.rows, self._made, families.n)

    def __call__(self, z: Tensor, key: int, rate: float, view: SiloView) -> Iterator[Tensor]:
        """Of a Poisson sample of this rate, whose coins `key` names: (B, n + told) each, rows of zeros among them."""

        def args(rows: Rows) -> tuple[Tensor, Params, Tensor]:
            at = torch.from_numpy(rows).to(self.problem.device)
            return z, take(view.rows, at), view.weights[at]

        for found, _, _ in self._rows(joined(view, key, rate), view.size, args):
            if found is not None:
                yield found

    def _made(self, count: int | None, z: Tensor, rows: Params, weights: Tensor) -> tuple[Tensor, Params, Tensor]:
        """So many made records, None for as many, in place of the silo's own."""
        count = len(weights) if count is None else count
        made = {n: v.to(rows[n]) for n, v in self.problem.schema.dummy_rows(count).items()}
        return z, made, weights.new_ones(count)


def _taken(z: Tensor, rows: Params, weights: Tensor) -> tuple[Any, ...]:
    """What gradients take of a model without own latents."""
    return z, torch.zeros_like(z), {}, {}, {}, rows, weights, z.new_zeros(1, len(weights), 0), z.new_zeros(1, 0)


class NoisedFit:
    """The local fits by noised steps of all silos of a process."""

    def __init__(self, fit: SiloFit, lengths: Lengths | None = None) -> None:
        assert fit.block is not None
        self.fit, self.families, self.config = fit, fit.families, fit.config
        self.steps = fit.block.steps
        #: The first step whose records' lengths are kept.
        self.told_from = min(round((1 - TOLD) * self.config.local_steps), self.config.local_steps - 1)
        self.gradients = RowGradients(fit.families, lengths)

    def __call__(
        self, turn: int, q: Natural, cavity: Natural, own: OwnState, view: SiloView, noised_sum: NoisedSum
    ) -> tuple[Fitted, Tensor]:
        """q fitted to cavity x likelihood, from q, by `local_steps` steps; and what noised sums told in the mean of
        their records' lengths (told,) over the last half of the steps, in float64. `turn` names draws: the silo's own
        count.

        A fit that runs off is not begun again, which would cost as much: the next ones are at a tenth of the rate."""
        families, steps, count = self.families, self.steps, self.config.local_steps
        first, rate = turn * count, self.config.sampling_rate
        state = steps.init(q, tight=own.visits == 0)
        shift, precision = families.move(cavity.shift), families.move(cavity.precision)
        average: Params = {}
        told_of = count - self.told_from
        lengths = torch.zeros(self.gradients.told, dtype=torch.float64)
        schedule = self.fit.schedule(count, own.visits, own.share)
        for step, eps in enumerate(self._draws(first, count, view)):
            z = steps.draw(state, eps)
            total = noised_sum(self.gradients(z, first + step, rate, view)) / rate
            if step >= self.told_from:
                lengths += total[q.n :].to("cpu", torch.float64) / told_of
            total = families.move(total[: q.n])
            held = shift - times(precision, z)
            state = steps.step(state, eps, total + held, schedule[step, 0])
            root = steps.root(state)
            seen = {"loc": steps.loc(state), "covariance": root @ root.mT if root.dim() == 2 else root.square()}
            weight = schedule[step, 2]
            average = {name: torch.lerp(average.get(name, value), value, weight) for name, value in seen.items()}
        loc, covariance = (average[name].to("cpu", torch.float64) for name in ("loc", "covariance"))
        ended = from_fit(loc, covariance)
        share = own.share if ended is not None else max(LEAST_RATE, own.share / 10)
        after = own._replace(anchor=steps.loc(state).to("cpu", torch.float64), visits=own.visits + 1, share=share)
        value = math.nan if ended is None else 0.0
        at = cavity if ended is None else ended
        return Fitted(at, value, {}, after, torch.ones(q.n, dtype=torch.bool)), lengths

    def _draws(self, first: int, count: int, view: SiloView) -> Iterator[Tensor]:
        """Standard normals of each step's draw of q (noise,), stratified over some steps."""
        width = self.families.shared.noise_size
        for start in range(0, count, STRATA):
            drawn = view.silo_draws.stratified(first + start, width, min(STRATA, count - start))
            yield from self.families.move(drawn[:, 0])
