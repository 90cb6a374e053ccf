"""Is q(Z_G) a stationary point of the bound over all silos' records? One secure sum at the end of a run answers.

With Z_G = mu + F eps, F F' the covariance, and s = F' grad log (p(Z_G) x product of silos' likelihoods / q(Z_G)), the
bound's natural gradient at q is E[s] for the mean and E[eps s'] for the scale; both are zero at a fixed point of global
VI, whoever found it (Ashman et al. 2022, equation 3). They say where one undamped step would go:

    precision -> F^-T (1 - E[eps s']) F^-1,   mean -> mu + F (1 - E[eps s'])^-1 E[s]

All parties use the same draws, so that at a Gaussian posterior s is zero draw by draw. The draws come in two halves,
whose difference is the Monte-Carlo error. A silo's own latents are held where its last fit left them; its gradient in
Z_G then is that of its marginal likelihood's bound, up to what they are from their optimum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation.base import Block, BlockTable, FloatArray
from secure_fvi.algorithms import hiding
from secure_fvi.algorithms.base import Problem, SiloView
from secure_fvi.algorithms.kit import Rows
from secure_fvi.algorithms.natural import Natural, from_moments, times
from secure_fvi.algorithms.weighing import as_told, spare, too_large
from secure_fvi.compiled import TRACE_AFTER_CALLS, Traced, over_draws
from secure_fvi.families import GlobalFamily, LocalFamily, Params
from secure_fvi.families.gaussian import lower
from secure_fvi.objective import SiloFunction, silo_gradient
from secure_fvi.randomness import server_draws
from secure_fvi.trees import take

#: What Z_G is off q's mean by; the records' parameters, rows, weights, eps_L and eps_S.
_Draw = tuple[Tensor, tuple[Params, Params, Tensor, Tensor, Tensor]]
#: Keeps these draws apart from those of rounds.
_DRAWS = 2**31
#: Numbers of all draws of a half together, beyond which there are fewer draws.
_MOST = 2_000_000
#: Draws of a half where nothing else is said, in antithetic pairs.
HALF = 128
#: Numbers of all draws together that are worked on at once.
_AT_ONCE = 200_000
VALUE, SLOPE, CURVE = "value", "slope", "curve"
#: Blocks whose numbers are hidden all or none, and how much less of a slope is told than of the bound.
TOLD_TOGETHER, _STEEPEST = ((VALUE,), (SLOPE, CURVE)), 2.0**10


def as_natural(family: GlobalFamily, eta: Params) -> Natural:
    """q(Z_G) in natural parameters, float64 on the CPU; of a diagonal or a full family."""
    loc = eta["loc"].to("cpu", torch.float64)
    if family.name == "diagonal":
        return from_moments(loc, family.stddev(eta).to("cpu", torch.float64).square())
    return from_moments(loc, family.covariance(eta).to("cpu", torch.float64))


def blocks(n: int, full: bool, most: float) -> tuple[Block, ...]:
    """What a silo adds: its part of the bound, and of E[s] and E[eps s'] in each half; the former is told up to
    `most` nats, the latter up to a `_STEEPEST` of that."""
    curve, steep = n * (n + 1) // 2 if full else n, most / _STEEPEST
    return (
        hiding.block(VALUE, (), most),
        hiding.block(SLOPE, (2, n), steep),
        hiding.block(CURVE, (2, curve), steep),
    )


def final_draws(seed: int, n: int, full: bool, few: bool = False) -> Tensor:
    """(2 halves, count, n) standard normals in antithetic pairs, the same at all parties. few: where only the bound is
    asked for.

    The second moments of each half are exactly those of the normal: of a Gaussian posterior the step is then exact too.
    A full covariance of n dimensions takes three pairs for each; of very many dimensions there are fewer draws.
    """
    pairs = 4 if few else max(3 * n if full else 0, min(HALF // 2, max(4, _MOST // n)))
    half = server_draws(seed).normals(_DRAWS, 2 * pairs * n)[0].reshape(2, pairs, n)
    if full and pairs > n:
        root = torch.linalg.cholesky(half.mT @ half / pairs)
        half = torch.linalg.solve_triangular(root.mT, half, upper=True, left=False)
    else:
        half = half / half.square().mean(1, keepdim=True).sqrt()
    return torch.cat([half, -half], 1)


def as_sent(problem: Problem, table: BlockTable, found: FloatArray, view: SiloView) -> FloatArray:
    """A silo's `found` for the blocks above and of `weighing`, as it may leave (`hiding`). Where one number of its
    slope is past what is told all of them are hidden: which ones are would say more. And all of `found` is where an
    earlier answer had such a number."""
    blocks, sent = {b.name: b for b in table.blocks}, []
    found = np.full_like(found, np.nan) if view.hides(False) else found
    own = sum(blocks[name].size for group in TOLD_TOGETHER for name in group)
    nats = found[own // 2 :]
    drawn = hiding.uniforms(view, own + spare(problem.layout, len(nats)))
    values, rest = found[: own // 2], drawn[:own]
    for group in TOLD_TOGETHER:
        most, size = hiding.told_up_to(blocks[group[0]]), sum(blocks[name].size for name in group) // 2
        far = hiding.past(values[:size], most).any()
        view.hides(bool(far))
        for block in map(blocks.__getitem__, group):
            (mine, values), (its, rest) = np.split(values, [block.size // 2]), np.split(rest, [block.size])
            sent.append(hiding.hidden(mine, np.full(len(mine), far), block, its))
    if len(nats):
        view.hides(too_large(problem, nats))
        sent.append(as_told(problem, nats, drawn[own:]))
    return np.concatenate(sent)


class SiloSlope:
    """A silo's terms. It holds no data, so that the silos of a process share its traces."""

    def __init__(
        self, problem: Problem, local: LocalFamily, silo: LocalFamily, samples: int, of: SiloFunction | None = None
    ) -> None:
        """of: the gradient of another bound than theirs."""
        gradient = of or silo_gradient(problem.density, local, silo, samples)

        def run(*args: Any) -> tuple[Tensor, Tensor]:
            g = gradient(*args)
            return g.value, g.direct + g.path

        by_shape = local.couples_records
        record, drawn = (None, None) if by_shape else (0, 1)
        axes = (None, None, None, record, None, record, record, drawn, None)
        mode = "traced" if problem.mode == "compiled" else problem.mode  # too few calls to pay for compiling
        self._gradient, self._calls = Traced(run, axes, mode, by_shape), 0  # of many draws at once
        self._move: Callable[[Tensor], Tensor] = lambda t: t.to(problem.device, problem.dtype)

    def __call__(
        self, q: Natural, eps: Tensor, theta: Params, silo: Params, inputs: Iterable[tuple[Any, ...]]
    ) -> FloatArray:
        """eps: of `final_draws`. silo: parameters of its own latents, around q's mean. inputs: for each draw those of
        the records, rows, weights, eps_L and eps_S."""
        loc, factor = self._move(q.mean()), q.factor()
        shifts = [self._move(times(factor, e)) for e in eps.flatten(0, 1)]
        value, found = 0.0, []
        for group in _alike(zip(shifts, inputs, strict=True)):
            shift, eps_record, eps_silo = map(torch.stack, zip(*[(s, *own[3:]) for s, own in group], strict=True))
            values, slopes = self._of(loc + shift, shift, theta, silo, group[0][1][:3], eps_record, eps_silo)
            for of_draw in values.tolist():
                value += of_draw
            found.append(slopes.to("cpu", torch.float64))
        slopes = torch.cat(found).reshape(eps.shape)
        return np.concatenate([[value / len(shifts)], *packed(q, eps, slopes)])

    def _of(
        self, z: Tensor, shift: Tensor, theta: Params, silo: Params, own: tuple[Params, Params, Tensor],
        eps_record: Tensor, eps_silo: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Values (S,) and slopes (S, n) at draws (S, ...). own: the records' parameters, rows and weights."""
        record, rows, weights = own
        args = (theta, record, silo, rows, weights)
        if len(z) == 1:
            value, slope = self._gradient(z[0], shift[0], *args, eps_record[0], eps_silo[0])
            return value[None], slope[None]
        self._calls += 1
        of_one = self._gradient.fn
        if self._calls > TRACE_AFTER_CALLS:
            of_one = self._gradient.graph(z[0], shift[0], *args, eps_record[0], eps_silo[0], mapped=(0, 1, 7, 8))
        found: tuple[Tensor, Tensor] = over_draws(
            lambda z, shift, eps_record, eps_silo: of_one(z, shift, *args, eps_record, eps_silo),
            z, shift, eps_record, eps_silo,
        )  # fmt: skip
        return found


def _alike(draws: Iterable[_Draw]) -> Iterator[list[_Draw]]:
    """Draws one after the other that have the same records, as many as are worked on at once."""
    group: list[_Draw] = []
    for draw in draws:
        shift, (record, rows, weights, eps_record, _) = draw
        numbers = sum(t.numel() for t in (shift, weights, eps_record, *rows.values()))
        same = group and all(a is b for a, b in zip(group[0][1][:3], (record, rows, weights), strict=True))
        if group and not (same and numbers * (len(group) + 1) <= _AT_ONCE):
            yield group
            group = []
        group.append(draw)
    if group:
        yield group


class _Frame(Protocol):
    """What `silo_inputs` reads of an algorithm's frame."""

    @property
    def samples(self) -> int: ...
    @property
    def n_record(self) -> int: ...
    @property
    def n_silo(self) -> int: ...
    def move(self, tensor: Tensor) -> Tensor: ...


def silo_inputs(
    frame: _Frame, record: Params, view: SiloView, keys: Iterable[int], batches: Iterable[Rows] | None = None
) -> Iterator[tuple[Params, Params, Tensor, Tensor, Tensor]]:
    """For `SiloSlope`, by all records of the silo, or by a minibatch for each draw; each key names a draw of eps_L and
    eps_S, and is used once."""
    samples, n = frame.samples, frame.n_record
    for key, batch in zip(keys, itertools.repeat(None) if batches is None else batches, strict=False):
        own, rows, weights = record, view.rows, view.weights
        if batch is not None:
            at = torch.from_numpy(batch).to(weights.device)
            own, rows = take(record, at), take(view.rows, at)
            weights = weights.new_full((len(batch),), view.size / len(batch))
        eps_record = view.record_draws.normals(key, samples * n, batch).reshape(len(weights), samples, n)
        eps_silo = view.silo_draws.normals(key, frame.n_silo)
        yield own, rows, weights, frame.move(eps_record.transpose(0, 1).contiguous()), frame.move(eps_silo)


def packed(q: Natural, eps: Tensor, gradients: Tensor) -> tuple[FloatArray, FloatArray]:
    """Means over each half of F' g and of the symmetric part of eps (F' g)', flattened."""
    factor = q.factor()
    slopes = gradients.to(torch.float64) @ factor if q.full else gradients.to(torch.float64) * factor
    if not q.full:
        return slopes.mean(1).flatten().numpy(), (eps * slopes).mean(1).flatten().numpy()
    curves = [lower(0.5 * (e.mT @ s + s.mT @ e) / len(e)) for e, s in zip(eps, slopes, strict=True)]
    return slopes.mean(1).flatten().numpy(), torch.cat(curves).numpy()
