"""Is q(Z_G) the posterior? The records' likelihood at points that all parties share, summed over silos, answers.

The slope of the bound (`stationarity`) is zero at the best Gaussian around one mode, for the q(Z_L | Z_G) that silos
have: it knows neither the posterior's shape, nor other modes, nor what those conditionals miss. Here each silo adds
log p(y_j | Z_G), its own latents integrated out numerically, at

- draws of q, half of them of a wider one: their weights p(y, Z_G) / q(Z_G) say what means and sds should be, and halves
  of the draws how well that is known;
- points far out, along each dimension and where signs, ends or components change places: one that is about as likely
  as q's own mean, or would make its sds larger if there is as much around it, with a valley between, is another mode;
- scouts, of few dimensions: quasi-random points all over the prior, wherever q is. They are draws too, of a uniform
  proposal, so that weights say which share of the posterior lies where q is not.

Only totals leave the silos, of nats relative to those at q's mean. Numbers that are too large to tell are hidden
(`hiding`), in a way that says little of the silo whose they are: at q's mean and its draws all are or none, along a
line all that are past a threshold which the silo draws for it, and of a shell of scouts all where one is past such a
threshold. Of many dimensions weights say nothing, and a run that is at rest there is not assessed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation.base import Block, BlockTable, FloatArray
from secure_fvi.algorithms import hiding
from secure_fvi.algorithms.base import Problem, SiloView
from secure_fvi.algorithms.natural import Natural
from secure_fvi.compiled import over_draws
from secure_fvi.density import Layout
from secure_fvi.families import LocalFamily, Params
from secure_fvi.families import conditional as gaussian_rows
from secure_fvi.families.gaussian import LOG_2PI
from secure_fvi.randomness import server_draws

WEIGHED = "weighed"
LinAlgError = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # torch does not export it to type checkers
#: What the final sum of a run that stops by itself is made of, in the words of a disclosure statement.
DISCLOSED_OF_SLOPE = "its part of the bound at the final q, and of that bound's slope"
DISCLOSED = (
    f"{DISCLOSED_OF_SLOPE}, and of the log-likelihood, relative to that at q's mean, at up to some thousand points "
    "around q and away from it, which all parties derive from q, and of few dimensions all over the prior; of numbers "
    "out of range, that they are"
)
#: A run may be called converged where means are at most so far off, in posterior sds, sds so much too small or too
#: large, in logs, and where the standard error of these is no larger.
MEAN_WITHIN, SD_WITHIN, PRECISE = 0.15, (-0.14, 0.12), 0.1
#: What is farther off than this, a mean in posterior sds or the log of an sd, is worth refining.
CLOSE = 0.05
_REMEDY = (
    "raise local_steps where a silo has latents of its own, or write the model in parameters whose posterior is nearer "
    "to normal (non-centred effects, sums in place of products); in a formula, let groups be local where each is at "
    "one silo, or give their sds priors that rule out what cannot be"
)
_BEGIN = (
    "begin at the mode that holds most: by the model's start, or, in PVI, by priors that are as narrow as that mode"
)
#: Draws of q in each of two halves, in antithetic pairs; keeps them apart from others.
HALF, _DRAWS = 256, 2**31 + 1
#: By how much half of the draws are wider, in one dimension.
_TAILS = 1.2
#: Dimensions up to which q is weighed.
UP_TO = 64
#: Dimensions that are searched along, and as many sds of q to either side.
_LINES, _FAR = 16, 40
#: Points on the way from q's mean to a mirrored one, and past it; supports of which the ends change places.
_BETWEEN, _INTERVALS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5), ("Interval", "IndependentConstraint(Interval")
#: One and two latents of a record or a silo are integrated out on a grid, by a trapezoidal sum: so many nodes for each,
#: and steps in t, with sinh(t) sds of q(Z_L | Z_G) (Takahasi and Mori 1974). Right to 1% where that sd is 6 times too
#: small or too large, of two latents 3 times.
_GRIDS = {1: (32, 0.25), 2: (12, 0.6)}
#: Newton's steps to where such a latent has its mode, their length at most, in sds there, and the shares of one that
#: are tried before none is taken: of a logistic likelihood whole ones may go to and fro.
_NEWTON, _STRIDE, _SHARES = 12, 5.0, (1.0, 0.4, 0.1)
#: More latents by draws, of two spreads in sds of q(Z_L | Z_G) by half, since that one may be too narrow, or beside the
#: place; by fewer where those of records are nested in a silo's.
_DRAWN, _NESTED, _SPREADS = 256, 64, (1.2, 3.0)
#: And by so many along lines: there means of draws are right, or too small, however far off q(Z_L | Z_G) is.
_ALONG_LINES = 32
#: Numbers of all evaluations together: fewer are many calls, each of which costs milliseconds; more leave the cache.
_AT_ONCE = 1_200_000
#: Nats of all silos together that are told, as a power of two.
_TOLD = 36
UP_TO_NATS = math.ldexp(1.0, _TOLD)
#: Nats, relative to those at q's mean, that are told along every line, as a power of two.
_ALWAYS = 20
#: Scouts, of up to so many dimensions, and how many there are in a shell. Of more dimensions
#: they are too few to meet anything.
_SCOUTS, _SCOUTED, _SHELL = 512, 6, 32
#: Scouts lie where no one dimension on its own costs the prior more nats than this, up to a power of two, of those from
#: and to the given ones. No prior's own round number: a tie could be rounded differently at two parties.
_BULK, _SCALES = 2.7, (-10, 20)
#: Farther than `_APART` + sqrt(n) sds from q's mean they may hold so much of the mass. By Markov's inequality tails
#: that have m of it there are taken for that in about m / _MISSED of runs at most.
_MISSED = 0.05
#: A point d sds, `_APART` at least, from q's mean is another mode, if its density is at least exp(-_LOWER) of that
#: there, or `_MATTERS` / d^2, so that a mode as wide as q adds that share to the variance, with a valley of
#: exp(-_VALLEY) between.
_APART, _LOWER, _VALLEY, _MATTERS = 4.0, 5.0, 1.5, 0.3


class Weighed(NamedTuple):
    """What the likelihood at draws of q and far from them says. Everyone may see it."""

    mean: float  # largest error of a reported mean, in posterior sds
    sd: float  # largest error of a reported sd, in logs: below zero, it is too small
    error: float  # of these two, one standard error
    apart: float | None = None  # sds of q from its mean to another mode; None: none was found
    log_weights: Tensor = torch.zeros(0)  # (2 HALF,) of the draws, up to a constant
    nats: float = 0.0  # by which that mode is likelier than q's mean
    share: float | None = None  # of the posterior's mass that scouts find away from q, where they found the mode
    where: str = ""  # values of the sites there
    joint: Tensor = torch.zeros(0)  # (points,) log p(y, z) at all of them, up to a constant; -inf: out of range

    def against(self) -> str | None:
        """Why q is not the posterior; None: within tolerance."""
        if self.apart is not None:
            by = f"{abs(self.nats):.0f} nats {'more' if self.nats > 0 else 'less'} likely"
            likely = "about as likely" if abs(self.nats) < _LOWER else by
            if self.share is not None:
                return (
                    f"points all over the prior find {self.share:.0%} of the posterior's mass elsewhere: near "
                    f"{self.where}, {self.apart:.0f} sds of q from its mean, a point is {likely}; {_BEGIN}"
                )
            return (
                f"another mode of the posterior, {likely}, lies {self.apart:.0f} sds of q away, near {self.where}, and "
                "q covers one alone; write the model so that it has one (a sign fixed, components in order, an angle "
                f"cut where no data are), or {_BEGIN}"
            )
        if not self.finite or self.error > PRECISE:
            return (
                "weighed by the likelihood of all records, draws of q do not even tell its means and sds: q is far "
                f"from the posterior; {_REMEDY}"
            )
        if self.mean <= MEAN_WITHIN and SD_WITHIN[0] <= self.sd <= SD_WITHIN[1]:
            return None
        return (
            f"weighed by the likelihood of all records, its means are {self.mean:.2g} sds off and its sds "
            f"{math.exp(self.sd):.2g} times what they should be (each at worst): no Gaussian is near the posterior, "
            f"or q has not settled; {_REMEDY}"
        )

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, self[:3]))

    @property
    def close(self) -> bool:
        """Whether nothing would be gained by weighing more draws."""
        return self.finite and self.mean <= CLOSE and abs(self.sd) <= CLOSE

    def details(self) -> dict[str, float | None]:
        mean, sd, error = self[:3] if self.finite else (None, None, None)
        other = {"other_mode_sd": self.apart, "mass_elsewhere": self.share}
        return {"mean_error_sd": mean, "sd_error_log": sd, "weighing_error_sd": error, **other}


class Points(NamedTuple):
    """Where the likelihood is asked for, the same at all parties."""

    eps: Tensor  # (2 HALF, n) standard normals, one half after the other
    mean: Tensor  # (n,) of q
    draws: Tensor  # (2 HALF, n) of q
    lines: list[Tensor]  # (count, n) each: a way from q's mean outwards
    scouts: Tensor  # (_SCOUTS or 0, n) uniform between `box`, the inner ones first
    box: Tensor  # (2, n) the least and the largest of each dimension

    @property
    def all(self) -> Tensor:
        return torch.cat([self.mean[None], self.draws, *self.lines, self.scouts])


def blocks(problem: Problem, family: str, local: LocalFamily) -> tuple[Block, ...]:
    """What a silo adds; nothing where q is not weighed: a mean field is not the posterior and does not claim to be, and
    a scale over all records of a silo leaves no records to weigh one by one."""
    layout = problem.layout
    if family != "full" or layout.size("global") > UP_TO or local.couples_records:
        return ()
    return (_block(problem),)


def _block(problem: Problem) -> Block:
    return hiding.block(WEIGHED, (_count(problem.layout),), UP_TO_NATS / len(problem.silos))


def asked(table: BlockTable) -> bool:
    """Whether a phase weighs q."""
    return any(block.name == WEIGHED for block in table.blocks)


def _lines(layout: Layout) -> list[int]:
    """How many points each line has."""
    return [_FAR] * (2 * min(layout.size("global"), _LINES)) + [len(_BETWEEN)] * len(_mirrors(layout))


def _shells(layout: Layout) -> list[int]:
    """How many scouts each shell has."""
    return [_SHELL] * (_SCOUTS // _SHELL if layout.size("global") <= _SCOUTED else 0)


def _count(layout: Layout) -> int:
    """How many points there are."""
    return 1 + 2 * HALF + sum(_lines(layout)) + sum(_shells(layout))


def spare(layout: Layout, count: int) -> int:
    """How many random numbers `as_told` takes for nats at `count` points."""
    return 2 * count + len(_lines(layout)) + len(_shells(layout)) if count else 0


def as_told(problem: Problem, nats: FloatArray, drawn: FloatArray) -> FloatArray:
    """A silo's nats at all points, as they leave. drawn: `spare` numbers in (0, 1).

    The threshold of a line is log-uniform between 2^`_ALWAYS` and what may be told: where along it nats pass a known
    one would tell how the likelihood of the silo that passes it first falls off. A shell of scouts has one too, and is
    hidden as a whole: which scouts pass it would tell along which directions it does.
    """
    lines, block = _lines(problem.layout), _block(problem)
    ways = [*lines, *_shells(problem.layout)]
    near, most = 1 + 2 * HALF, hiding.told_up_to(block)
    with np.errstate(invalid="ignore"):
        relative = nats - nats[0]
    least = min(2.0**_ALWAYS, most)
    thresholds = np.repeat(least * (most / least) ** drawn[: len(ways)], ways)
    all_near = np.full(near, hiding.past(relative[:near], most).any())
    far = np.concatenate([all_near, hiding.past(relative[near:], thresholds)])
    shells = far[near + sum(lines) :].reshape(-1, _SHELL)
    shells |= shells.any(1, keepdims=True)
    far |= not np.isfinite(nats[0])
    return hiding.hidden(relative, far, block, drawn[len(ways) :])


def points(problem: Problem, q: Natural) -> Points:
    half = server_draws(problem.seed).normals(_DRAWS, HALF * q.n)[0].reshape(2, HALF // 2, q.n)
    half = half / half.square().mean(1, keepdim=True).sqrt()
    half[:, ::2] *= _wide(q.n)
    eps = torch.cat([half, -half], 1).flatten(0, 1)
    mean, covariance = q.mean(), q.covariance()
    steps = torch.arange(1, _FAR + 1, dtype=torch.float64)[:, None]
    lines = [
        mean + sign * steps * covariance[i] / covariance[i, i].sqrt()
        for i in range(min(q.n, _LINES))
        for sign in (1, -1)
    ]
    share = torch.tensor(_BETWEEN, dtype=torch.float64)[:, None]
    lines += [mean + share * (matrix @ mean - mean) for matrix in _mirrors(problem.layout)]
    return Points(eps, mean, mean + eps @ q.factor().mT, lines, *_scouts(problem))


def _scouts(problem: Problem) -> tuple[Tensor, Tensor]:
    """`Points.scouts` and their `box`: of the model and the seed alone, so that no broadcast moves them."""
    start, n = problem.start.z_global.to("cpu", torch.float64), problem.layout.size("global")
    if not _shells(problem.layout):
        return start.new_zeros(0, n), start.new_zeros(2, n)

    def log_prior(z: Tensor) -> Tensor:
        return problem.density.log_prior(z, problem.start.theta)

    steps = torch.exp2(torch.arange(_SCALES[0], _SCALES[1] + 1, dtype=torch.float64))
    ends = torch.stack([-torch.eye(n, dtype=torch.float64), torch.eye(n, dtype=torch.float64)])
    away = start + ends[:, :, None] * steps[:, None]
    tried = torch.cat([start[None], away.reshape(-1, n)]).to(problem.device, problem.dtype)
    found = finite(over_draws(log_prior, tried).to("cpu", torch.float64))
    within = (found[1:] > found[0] - _BULK).reshape(2, n, len(steps))
    scale = torch.where(within, steps, steps[0]).amax(-1)
    box = start + torch.tensor([[-1.0], [1.0]], dtype=torch.float64) * scale
    shift = torch.from_numpy(server_draws(problem.seed).uniforms(_DRAWS + 2, n)[0, 0])
    u = (torch.quasirandom.SobolEngine(n).draw(_SCOUTS, dtype=torch.float64) + shift) % 1.0
    u = u[(u - 0.5).abs().amax(1).argsort(stable=True)]
    return box[0] + u * (box[1] - box[0]), box


@functools.lru_cache(maxsize=8)
def _mirrors(layout: Layout) -> list[Tensor]:
    """Maps (n, n) of unconstrained space under which posteriors are often the same: signs of a site, of an element, or
    of all, the ends of an interval (of an angle they meet), and components of a mixture that change places."""
    n, sites = layout.size("global"), layout.of("global")
    ends = itertools.accumulate(s.size for s in sites)
    at = {s.name: torch.arange(end - s.size, end) for s, end in zip(sites, ends, strict=True)}
    real = [at[s.name] for s in sites if s.support.startswith(("Real", "IndependentConstraint(Real"))]
    groups = [torch.cat(real)] if real else []
    groups += [*real] if len(real) > 1 else []
    groups += [i[None] for s in sites if s.support.startswith(_INTERVALS) for i in at[s.name]]
    groups += [i[None] for site in real if len(site) > 1 for i in site]
    maps = [torch.ones(n).index_fill(0, group, -1.0).diag().double() for group in groups[:_LINES]]
    lengths = {s.shape[-1] for s in sites if s.shape and 1 < s.shape[-1] <= 5}
    for k in sorted(lengths):
        for a in range(k - 1):
            order = torch.arange(n)
            signs = torch.ones(n, dtype=torch.float64)
            for s in sites:
                if s.shape and s.shape[-1] == k:
                    grid = at[s.name].reshape(s.shape).clone()
                    swapped = grid.clone()
                    swapped[..., a], swapped[..., a + 1] = grid[..., a + 1], grid[..., a]
                    order[grid.reshape(-1)] = swapped.reshape(-1)
                elif k == 2 and s.size == 1 and ("Simplex" in s.support or "Interval" in s.support):
                    signs[at[s.name]] = -1.0
            maps.append(signs[:, None] * torch.eye(n, dtype=torch.float64)[order])
    return maps


def _wide(n: int) -> float:
    """Half of the draws are of a q with sds so many times as large, where tails of the posterior show."""
    return 1 + _TAILS / math.sqrt(n)


class _Nodes(NamedTuple):
    """Where latents are integrated out, in sds of q(Z_L | Z_G)."""

    eps: Tensor  # (K, N or 1, n)
    log_weight: Tensor  # (K, N or 1): log of the volume that a node stands for


class Weigher:
    """A silo's log p(y_j | Z_G). It holds no data."""

    def __init__(self, problem: Problem, local: LocalFamily, silo: LocalFamily) -> None:
        self.problem, self.local, self.silo = problem, local, silo
        layout = problem.layout
        self.n_record, self.n_silo = layout.size("record"), layout.size("silo")
        self._adapts = True

    def __call__(
        self, q: Natural, at: Points, theta: Params, record: Params, silo: Params, view: SiloView, key: int
    ) -> FloatArray:
        """Nats at each of `at.all`, by all records of the silo, whatever they are: for `as_told`. `key` and the next
        two name the draws of its latents: for either half of the draws of q, and for lines. record, silo: parameters
        around q's mean.

        The halves are integrated on different nodes, so that they differ by integration's error as well.
        """

        def over(z: Tensor, which: int) -> Tensor:
            return self.at(q, z, which, key + which, theta, record, silo, view)

        near, rest, far = at.all.split([1 + HALF, HALF, len(at.all) - 1 - 2 * HALF])
        near, far = over(near, 0), over(torch.cat([at.mean[None], far]), 2)
        return torch.cat([near, over(rest, 1), far[1:] - far[0] + near[0]]).numpy()

    def at(
        self, q: Natural, z: Tensor, which: int, key: int, theta: Params, record: Params, silo: Params, view: SiloView
    ) -> Tensor:
        """Nats at each of z (S, n). which: nodes, 0 and 1 for two kinds that are as good, 2 for fewer; `key` names the
        draws that they are made of."""
        nodes = self._nodes(view, key, which)

        def over() -> Tensor:
            found = self._over(q, z, theta, record, silo, view, *nodes, adapts=self._adapts and which != 2)
            return found.to("cpu", torch.float64)

        try:
            try:
                return over()
            except (RuntimeError, NotImplementedError):  # a program without second derivatives
                if not self._adapts:
                    raise
                self._adapts = False
                return over()
        except (LinAlgError, ArithmeticError):
            # Whether its model can be computed at points far from q may depend on a silo's data: hidden, not refused.
            return torch.full((len(z),), math.nan, dtype=torch.float64)

    def _nodes(self, view: SiloView, key: int, which: int) -> tuple[_Nodes, _Nodes]:
        """For the latents of records and of the silo. which: as in `at`."""
        move = lambda t: t.to(self.problem.device, self.problem.dtype)  # noqa: E731
        found, nested = [], self.n_record > 0 and self.n_silo > 0
        for n, draws in ((self.n_record, view.record_draws), (self.n_silo, view.silo_draws)):
            if n == 0:
                nodes = _Nodes(torch.zeros(1, 1, 0), torch.zeros(1, 1))
            elif which < 2 and n in _GRIDS and not (nested and n > 1):
                nodes = _grid(n, bool(which))
            else:
                count = _ALONG_LINES if which == 2 else _NESTED if nested else _DRAWN
                nodes = _drawn(torch.from_numpy(draws.uniforms(key, n)), count)
            found.append(_Nodes(*map(move, nodes)))
        return found[0], found[1]

    def _over(
        self, q: Natural, z: Tensor, theta: Params, record: Params, silo: Params, view: SiloView, inner: _Nodes,
        outer: _Nodes, adapts: bool,
    ) -> Tensor:  # fmt: skip
        problem = self.problem
        move = lambda t: t.to(problem.device, problem.dtype)  # noqa: E731
        loc = move(q.mean())

        def one(z: Tensor) -> Tensor:
            return self._marginal(z, z - loc, theta, record, silo, view, inner, outer, adapts)

        numbers = len(inner.eps) * len(outer.eps) * len(view.weights) * max(1, self.n_record)
        size = max(1, _AT_ONCE // numbers)
        return torch.cat([over_draws(one, part) for part in move(z).split(size)]).detach()

    def _marginal(
        self, z: Tensor, shift: Tensor, theta: Params, record: Params, silo: Params, view: SiloView, inner: _Nodes,
        outer: _Nodes, adapts: bool,
    ) -> Tensor:  # fmt: skip
        evaluate, rows = self.problem.density.evaluate, view.rows
        own = self.silo.moments(silo, {}, {}, z, shift)
        if adapts and self.n_silo in _GRIDS and not self.n_record:

            def all_records(z_silo: Tensor) -> Tensor:
                terms = evaluate(z, z_silo[0], z.new_zeros(len(view.weights), 0), theta, rows)
                return (torch.where(view.weights > 0, terms.records, 0.0) * view.weights).sum() + terms.silo[None]

            own = _around_mode(all_records, own)

        def of_silo(eps: Tensor, log_weight: Tensor) -> Tensor:
            z_silo = gaussian_rows.transform(own, eps)
            off = z_silo[0] - silo["loc"][0] if silo else z_silo[0]
            moments = self.local.moments(record, theta, rows, z, torch.cat([shift, off]))
            if adapts and self.n_record in _GRIDS:
                moments = _around_mode(lambda z_record: evaluate(z, z_silo[0], z_record, theta, rows).records, moments)

            def of_record(eps: Tensor, log_weight: Tensor) -> tuple[Tensor, Tensor]:
                z_record = gaussian_rows.transform(moments, eps)
                terms = evaluate(z, z_silo[0], z_record, theta, rows)
                return terms.records + log_weight + moments["log_scale"].sum(-1), terms.silo

            records, silo_term = _each(of_record, *inner)
            total = torch.logsumexp(records, 0)
            total = torch.where(view.weights > 0, total, torch.zeros_like(total))
            return (total * view.weights).sum() + silo_term[0] + (log_weight + own["log_scale"].sum(-1)).sum()

        return torch.logsumexp(_each(of_silo, *outer), 0)


def _each(fn: Any, *args: Tensor) -> Any:
    """`fn` of each of args (K, ...), without mapping over a single one."""
    if len(args[0]) > 1:
        return over_draws(fn, *args)
    found = fn(*(arg[0] for arg in args))
    return tuple(value[None] for value in found) if isinstance(found, tuple) else found[None]


def _around_mode(log_density: Callable[[Tensor], Tensor], moments: Params) -> Params:
    """`moments` (rows; n of 1 or 2) moved to where `log_density`, of rows (N, n) to (N,), has its mode at this Z_G, and
    scaled by the curvature there: q(Z_L | Z_G) may be far off where Z_G is far from q's mean. By Newton's steps, the
    best of `_SHARES` of each; rows that are not curved downwards keep their scale, and such as run off keep all."""
    loc, log_scale = moments["loc"], moments["log_scale"]
    n, slope = loc.shape[-1], torch.func.grad(lambda z: log_density(z).sum())

    def curved(z: Tensor) -> tuple[Tensor, Tensor]:
        """Slopes (N, n) and a factor (N, n, n) of the inverse of minus the curvature."""
        # Backwards twice: forwards, where tangents are zero, PyTorch asks Python for their shapes in every operation.
        first_slope, pull = torch.func.vjp(slope, z)[:2]
        curve = -torch.stack([pull(z.new_zeros(z.shape).index_fill(1, k, 1.0))[0] for k in index], -1)
        a, c = curve[:, 0, 0], curve[:, -1, -1]
        b = 0.5 * (curve[:, 0, -1] + curve[:, -1, 0]) if n > 1 else torch.zeros_like(a)
        left = a - b.square() / c
        fine = (left > 0) & (c > 0)
        first, last = torch.where(fine, left, 1.0).rsqrt(), torch.where(fine, c, 1.0).rsqrt()
        if n == 1:
            return first_slope, torch.where(fine[:, None, None], first[:, None, None], before)
        made = torch.stack([first, torch.zeros_like(a), -b / torch.where(fine, c, 1.0) * first, last], -1)
        return first_slope, torch.where(fine[:, None, None], made.unflatten(-1, (2, 2)), before)

    index = [torch.tensor([k], device=loc.device) for k in range(n)]
    before = log_scale.exp().unsqueeze(-1) * moments.get("lower", torch.eye(n, dtype=loc.dtype, device=loc.device))
    at, height = loc, log_density(loc).nan_to_num(nan=-math.inf)
    for _ in range(_NEWTON):
        g, factor = curved(at)
        white = (factor.mT @ g.unsqueeze(-1)).squeeze(-1)
        length = white.norm(dim=-1, keepdim=True)
        step = (factor @ (white * (_STRIDE / length.clamp(min=_STRIDE))).unsqueeze(-1)).squeeze(-1)
        tried = torch.stack([at + share * step for share in _SHARES])
        heights = over_draws(log_density, tried).nan_to_num(nan=-math.inf)
        # The first of the highest, the place itself last: comparisons cost a tenth of argmax along so short an axis.
        best, top = tried[0], heights[0]
        for other, its in zip([*tried[1:], at], [*heights[1:], height], strict=True):
            higher = its > top
            best, top = torch.where(higher[..., None], other, best), torch.where(higher, its, top)
        at, height = best, top
    _, factor = curved(at)
    good = (at.isfinite().all(-1) & factor.isfinite().all(-1).all(-1))[:, None]
    scale = factor.diagonal(dim1=-2, dim2=-1)
    found = {"loc": torch.where(good, at, loc), "log_scale": torch.where(good, scale.log(), log_scale)}
    if "lower" in moments:
        found["lower"] = torch.where(good.unsqueeze(-1), factor / scale.unsqueeze(-1), moments["lower"])
    return found


def _grid(n: int, other: bool) -> _Nodes:
    """Of n latents. The `other` grid is half a step beside: where sums are wrong, they are the opposite way."""
    count, step = _GRIDS[n]
    t = (torch.arange(count) - (count - 1) / 2 + (0.25 if other else -0.25)).double() * step
    eps, log_weight = torch.sinh(t), (step * torch.cosh(t)).log()
    grids = [torch.cartesian_prod(*[side] * n).reshape(-1, n) for side in (eps, log_weight)]
    return _Nodes(grids[0][:, None], grids[1].sum(-1)[:, None])


def _drawn(shift: Tensor, count: int) -> _Nodes:
    """Quasi-random, of either spread by half, shifted around the unit cube by `shift` (1, N, n) in (0, 1): each node is
    an ordinary draw, and records' errors are independent."""
    n = shift.shape[-1]
    if n <= torch.quasirandom.SobolEngine.MAXDIM:
        even = torch.quasirandom.SobolEngine(n).draw(count, dtype=torch.float64)
    else:
        even = torch.from_numpy(server_draws(0).uniforms(_DRAWS + 1, count * n).reshape(count, n))
    normals = torch.special.ndtri(((even[:, None] + shift) % 1.0).clamp(2.0**-53, 1 - 2.0**-53))
    spread = torch.tensor(_SPREADS, dtype=torch.float64).repeat_interleave(count // 2)[:, None, None]
    eps = spread * normals
    parts = [-0.5 * ((eps / by).square() + LOG_2PI).sum(-1) - n * math.log(by) for by in _SPREADS]
    return _Nodes(eps, math.log(len(parts) / count) - functools.reduce(torch.logaddexp, parts))


def weighed(
    problem: Problem, q: Natural, theta: Params, at: Points, total: FloatArray, log_prior: Callable[[Tensor], Tensor]
) -> Weighed:
    """What the silos' total at `at.all` says, with the server's own part: the prior and q."""
    prior = over_draws(log_prior, at.all)
    block = _block(problem)
    told = np.where(hiding.unreadable(total, block), -math.inf, hiding.read(total, block))
    joint = torch.from_numpy(told) + finite(prior)
    log_q, wide = -0.5 * at.eps.square().sum(-1), _wide(q.n)
    log_drawn = torch.logaddexp(log_q, log_q / wide**2 - q.n * math.log(wide))
    log_w, log_v = joint[1 : 1 + len(at.draws)] - log_drawn, log_q - log_drawn
    values = reported(problem, at.draws, theta)
    halves = [errors(values[part], log_w[part], log_v[part]) for part in (slice(0, HALF), slice(HALF, None))]
    mean, sd = errors(values, log_w, log_v)
    error = max(float((a - b).abs().max()) / 2 for a, b in zip(*halves, strict=True))
    others = [*line_modes(at, joint, [q_part(q)]), *filter(None, [elsewhere(at, joint, *_of_draws(q, at, joint))])]
    found = Weighed(float(mean.abs().max()), float(sd[sd.abs().argmax()]), error, log_weights=log_w, joint=joint)
    if not others:
        return found
    other = max(others, key=lambda o: o.nats)
    return found._replace(apart=other.sds, nats=other.nats, share=other.share, where=named(problem, other.z, theta))


def finite(prior: Tensor) -> Tensor:
    """Log densities of a prior, -inf where one is no number or overflows: far out PyTorch's of 1 / x is +inf."""
    return prior.nan_to_num(nan=-math.inf, posinf=-math.inf)


def named(problem: Problem, z: Tensor, theta: Params) -> str:
    """The first few sites' values at z (n,), in words."""
    values = problem.density.constrain(z.to(problem.device, problem.dtype), theta)[0]
    some = [f"{name} = {', '.join(f'{v:.3g}' for v in value.flatten()[:4].tolist())}" for name, value in values.items()]
    return ", ".join(some[:4])


def reported(problem: Problem, z: Tensor, theta: Params) -> Tensor:
    """(S, numbers) of the global sites as a result gives them, but those that are constant (zeros of a triangle)."""
    values = over_draws(lambda z: problem.density.constrain(z, theta)[0], z.to(problem.device, problem.dtype))
    found = torch.cat([value.reshape(len(z), -1) for value in values.values()], 1).to("cpu", torch.float64)
    return found[:, (found != found[:1]).any(0)]


def errors(values: Tensor, log_w: Tensor, log_v: Tensor) -> tuple[Tensor, Tensor]:
    """By how much q's means are off, in posterior sds, and its sds, in logs; infinite where it cannot be told. log_w,
    log_v: weights of the draws that make them the posterior's, and q's."""
    (mean, sd), (own_mean, own_sd) = _moments(values, log_w), _moments(values, log_v)
    return ((own_mean - mean) / sd).nan_to_num(nan=math.inf), (own_sd / sd).log().nan_to_num(nan=math.inf)


def _moments(values: Tensor, log_w: Tensor) -> tuple[Tensor, Tensor]:
    share = log_w.softmax(0)
    mean = share @ values
    return mean, (share @ (values - mean).square()).sqrt()


class Part(NamedTuple):
    """A normal near a mode."""

    mean: Tensor  # (n,)
    factor: Tensor  # (n, n) of its covariance, lower triangular


def q_part(q: Natural) -> Part:
    return Part(q.mean(), q.factor())


class Other(NamedTuple):
    """Another mode, or a point near it."""

    sds: float  # from the nearest part's mean
    nats: float  # by which it is likelier than q's mean
    z: Tensor  # (n,)
    share: float | None = None  # as in `Weighed`
    line: int = -1  # on which it lies


def sds_from(parts: list[Part], z: Tensor) -> Tensor:
    """(S,) how far z (S, n) are from the nearest part's mean, in its sds."""
    off = [torch.linalg.solve_triangular(p.factor, (z - p.mean).mT, upper=False).norm(dim=0) for p in parts]
    return torch.stack(off).amin(0)


def line_modes(at: Points, joint: Tensor, parts: list[Part]) -> list[Other]:
    """Other modes along lines, the likeliest of each, that are far from all `parts`."""
    here, found, start = float(joint[0]), [], 1 + len(at.draws)
    for line, z in enumerate(at.lines):
        values, start = joint[start : start + len(z)], start + len(z)
        far = sds_from(parts, z)
        lowest = torch.cat([torch.full((1,), here, dtype=values.dtype), values]).cummin(0).values[:-1]
        least = here - (2 * far.log() - math.log(_MATTERS)).clamp(min=_LOWER)
        other = (far > _APART) & (values > least) & (lowest < torch.clamp(values, max=here) - _VALLEY)
        if bool(other.any()):
            k = int(torch.where(other, values, -math.inf).argmax())
            found.append(Other(float(far[k]), float(values[k]) - here, z[k], line=line))
    return found


def _of_draws(q: Natural, at: Points, joint: Tensor) -> tuple[list[Part], Tensor, Tensor, Tensor]:
    """The arguments of `elsewhere` for q and its own draws."""
    part, wide = q_part(q), _wide(q.n)
    square = sds_from([part], torch.cat([at.draws, at.scouts])).square()
    log_q = -0.5 * square - 0.5 * q.n * LOG_2PI - part.factor.diagonal().log().sum()
    log_wide = log_q + 0.5 * square * (1 - wide**-2) - q.n * math.log(wide)
    log_drawn = torch.logaddexp(log_q, log_wide) - math.log(2)
    return [part], at.draws, joint[1 : 1 + len(at.draws)], log_drawn


def elsewhere(
    at: Points, joint: Tensor, parts: list[Part], draws: Tensor, told: Tensor, log_drawn: Tensor
) -> Other | None:
    """The scout that holds most of the posterior's mass of those far from all `parts`, where all such hold `_MISSED` of
    it and more. told: log p(y, z) at `draws`; log_drawn: the log density of what these were drawn from, at them and
    the scouts.

    By the balance heuristic: each point, a draw or a scout, is weighed by the density of all of them together.
    """
    shares = _shares_of_scouts(at, joint, parts, draws, told, log_drawn)
    if not float(shares.sum()) > _MISSED:  # not so either where there are none, or none could be told
        return None
    best = int(shares.argmax())
    z = at.scouts[best]
    far, nats = float(sds_from(parts, z[None])), float(joint[best - len(at.scouts)] - joint[0])
    return Other(far, nats, z, float(shares.sum()))


def _shares_of_scouts(
    at: Points, joint: Tensor, parts: list[Part], draws: Tensor, told: Tensor, log_drawn: Tensor
) -> Tensor:
    """(scouts,) of the mass; 0 of those near a part."""
    if not len(at.scouts):
        return at.scouts.new_zeros(0)
    z, n = torch.cat([draws, at.scouts]), draws.shape[1]
    inside = ((z >= at.box[0]) & (z <= at.box[1])).all(1)
    log_scouts = math.log(len(at.scouts)) - (at.box[1] - at.box[0]).log().sum()
    by = torch.logaddexp(log_drawn + math.log(len(draws)), torch.where(inside, log_scouts, -math.inf))
    shares = (torch.cat([told, joint[-len(at.scouts) :]]) - by).softmax(0)[len(draws) :]
    return torch.where(sds_from(parts, at.scouts) > _APART + math.sqrt(n), shares, 0.0)


def modes(problem: Problem, q: Natural, seen: Weighed, most: int) -> list[Part] | None:
    """q, and a part of its size at each other mode that the final sum found, images of images among them; None: these
    are more than `most`."""
    at, own = points(problem, q), q_part(q)
    found = line_modes(at, seen.joint, [own])
    straight, parts = 2 * min(q.n, _LINES), [own]
    for part in parts:  # which grows
        images = mirrored(problem, part)
        for image in (images[o.line - straight] for o in found if o.line >= straight):
            if float(sds_from(parts, image.mean[None])) > _APART:
                parts.append(image)
        if len(parts) > most:
            return None
    shares = _shares_of_scouts(at, seen.joint, *_of_draws(q, at, seen.joint))
    heavy = [at.scouts[k] for k in shares.argsort(descending=True).tolist() if float(shares[k]) > _MISSED / most]
    for z in [o.z for o in sorted(found, key=lambda o: -o.nats) if o.line < straight] + heavy:
        if float(sds_from(parts, z[None])) > _APART:
            parts.append(Part(z, own.factor))
    return parts[:most]


def mirrored(problem: Problem, part: Part) -> list[Part]:
    """Its images under each map of `_mirrors`."""
    maps = _mirrors(problem.layout)
    return [Part(m @ part.mean, torch.linalg.cholesky(m @ part.factor @ part.factor.mT @ m.mT)) for m in maps]
