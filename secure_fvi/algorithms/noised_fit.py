"""A silo's local fit by steps that are noised one by one: DP-SGD inside of the fit (Heikkila et al. 2023, section 4).

For each step the gate is given gradients in Z_G at one draw of q, a row for each record of a Poisson sample, and gives
back their clipped, noised sum. All else of a step follows from that sum, from what is public and from coins: the
gradients of q's mean and of its scales are both functions of that one vector and the draw, so that n numbers a step are
noised, whatever the family, and eight that count gradients by their lengths (`objective.Lengths`). What these say is
kept of the last half of the steps: on its way from where it began a fit meets gradients that say nothing of its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from secure_fvi.algorithms.base import SiloView
from secure_fvi.algorithms.kit import FEWEST_ROWS, Rows, blocks_of, evaluated, joined, rows_at_once, warn_one_by_one
from secure_fvi.algorithms.local_fit import LEAST_RATE, STRATA, Families, Fitted, OwnState, SiloFit, from_fit
from secure_fvi.algorithms.natural import Natural
from secure_fvi.compiled import TracedOnMade, threads
from secure_fvi.exported import GraphDensity, untested_operations
from secure_fvi.objective import Lengths, RecordGradients, record_gradients
from secure_fvi.privacy.gate import NoisedSum
from secure_fvi.trees import Params, take

#: Share of a fit's steps, the last ones, of which it is kept how long records' gradients are.
TOLD = 0.5


class RowGradients:
    """Gradients of log p(y_i | Z_G) in Z_G, of each record alone to the last bit, and how long each is; for models
    without own latents. It holds no data, so that all silos of a process share its traces."""

    def __init__(self, families: Families, lengths: Lengths | None = None) -> None:
        self.problem, self.move = families.problem, families.move
        self.told = 0 if lengths is None else len(lengths.edges) + 1
        of = families.problem.density, families.local, families.silo, 1, False
        self._alone = record_gradients(*of, mapped=False, lengths=lengths)
        self._gradients = record_gradients(*of, lengths=lengths)
        self._run = TracedOnMade(self._function, self._made, families.problem.mode)
        self._length, self._looked = rows_at_once(families.n), False

    def __call__(self, z: Tensor, key: int, rate: float, view: SiloView) -> Iterator[Tensor]:
        """Of a Poisson sample of this rate, whose coins `key` names: (B, n + told) each, rows of zeros among them."""
        self._look(z)
        run: Callable[..., Tensor] | None = None

        def step(rows: Rows) -> Tensor:
            nonlocal run
            at = torch.from_numpy(rows).to(self.problem.device)
            args = z, take(view.rows, at), view.weights[at]
            with threads(1):  # several would cut a block into parts at places of their own
                if run is None:  # once a step: how many blocks there are is of data
                    run = self._run.ready(*args)
                return run(*args)

        for rows in blocks_of(joined(view, key, rate), view.size, self._length):
            found, _, _ = evaluated(rows, step, view.size)
            if found is not None:
                yield found

    def _look(self, z: Tensor) -> None:
        """As SFVI does (`SFVIProgram._look`): with operations that are not known to keep records apart when they are
        mapped, records are evaluated in a loop from here on."""
        fixed = self._looked and isinstance(self.problem.density, GraphDensity)  # it uses the same at each z
        if fixed or self._run.traced or self._gradients is self._alone:
            return
        self._looked = True
        found = untested_operations(lambda: self._by(self._alone, *self._of_made(z, 1)))
        if found:
            self._gradients, self._run.mode, self._length = self._alone, "eager", FEWEST_ROWS
            warn_one_by_one(found)

    def _function(self, z: Tensor, rows: Params, weights: Tensor) -> Tensor:
        return self._by(self._gradients, z, rows, weights)

    @staticmethod
    def _by(gradients: Callable[..., RecordGradients], z: Tensor, rows: Params, weights: Tensor) -> Tensor:
        nothing = z.new_zeros(1, len(weights), 0)
        return gradients(z, torch.zeros_like(z), {}, {}, {}, rows, weights, nothing, z.new_zeros(1, 0)).rows

    def _made(self, z: Tensor, rows: Params, weights: Tensor) -> tuple[Tensor, Params, Tensor]:
        return self._of_made(z, len(weights))

    def _of_made(self, z: Tensor, count: int) -> tuple[Tensor, Params, Tensor]:
        """Made records in place of the silo's own."""
        made = {n: v.to(self.problem.device) for n, v in self.problem.schema.dummy_rows(max(2, count)).items()}
        rows = {n: (self.move(v) if v.is_floating_point() else v)[:count] for n, v in made.items()}
        return z, rows, self.move(torch.ones(count))


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
            held = shift - (precision @ z if precision.dim() == 2 else precision * z)
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
