"""Is q(Z_G) the posterior? The records' likelihood at points that all parties share, summed over silos, answers.

The slope of the bound (`stationarity`) is zero at the best Gaussian around one mode, for the q(Z_L | Z_G) that silos
have: it knows neither the posterior's shape, nor other modes, nor what those conditionals miss. Here each silo adds
log p(y_j | Z_G), its own latents integrated out numerically, at

- draws of q, half of them of a wider one: their weights p(y, Z_G) / q(Z_G) say what means and sds should be, and halves
  of the draws how well that is known;
- points far out, along each dimension and where signs, ends, angles or components change places, one or two at a time
  (`mirrors`): one that is about as likely as q's own mean, or would make its sds larger if there is as much around it,
  with a valley between, is another mode;
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
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation.base import Block, BlockTable, FloatArray
from secure_fvi.algorithms import hiding
from secure_fvi.algorithms.base import Problem, SiloView
from secure_fvi.algorithms.eliminated import (
    FROM_AFAR,
    SHARES,
    Joint,
    eliminates,
    joint_of,
    likeliest,
    near_mode,
    silo_params,
)
from secure_fvi.algorithms.natural import Natural
from secure_fvi.compiled import Traced, flatten, over_draws, structure
from secure_fvi.density import Layout, LogTerms, Site
from secure_fvi.families import LocalFamily, Params
from secure_fvi.families import conditional as gaussian_rows
from secure_fvi.families.gaussian import LOG_2PI, unit_lower
from secure_fvi.randomness import server_draws

WEIGHED = "weighed"
LinAlgError = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # torch does not export it to type checkers
#: What the final sum of a run that stops by itself is made of, in the words of a disclosure statement.
DISCLOSED_OF_SLOPE = "its part of the bound at the final q, and of that bound's slope"
DISCLOSED = (
    f"{DISCLOSED_OF_SLOPE}, and of the log-likelihood, relative to that at q's mean, at points around q and "
    "away from it (up to 11,921), which all parties derive from q, and of few dimensions all over the prior; of "
    "numbers out of range, that they are"
)
#: Draws of q in each of two halves, in antithetic pairs; keeps them apart from others.
HALF, _DRAWS = 256, 2**31 + 1
#: By how much half of the draws are wider, in one dimension.
_TAILS = 1.2
#: Dimensions up to which q is weighed.
UP_TO = 128
#: As many sds of q each dimension is searched along, to either side.
_FAR = 40
#: Points on the way from q's mean to a mirrored one, and past it, for the first few mirrors, and for all others.
_BETWEEN, _HALFWAY = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5), (0.5, 1.0)
#: How many those first are at most, and how many of the others one q has.
_FIRST, _IMAGES = 24, 512
#: Supports of which the ends change places, and on which an angle turns; of which signs change.
_INTERVALS = ("Interval", "IndependentConstraint(Interval")
REALS = ("Real", "IndependentConstraint(Real")
#: Components of a mixture at most, along an axis or by names.
COMPONENTS = 8
#: One and two latents of a record or a silo are integrated out on a grid, by a trapezoidal sum: so many nodes for each,
#: and steps in t, with sinh(t) sds of q(Z_L | Z_G) (Takahasi and Mori 1974). Right to 1% where that sd is 6 times too
#: small or too large, of two latents 3 times.
_GRIDS = {1: (32, 0.25), 2: (12, 0.6)}
#: Of one latent of a record below one of a silo's: right to 1% where that sd is 4 times too small or large. And as many
#: of Newton's steps to the record's mode, at each of the silo's nodes.
_NESTED_GRID, _NESTED_STEPS = (16, 0.5), 3
#: Length at most, in sds there, of Newton's steps to where such a latent has its mode.
_STRIDE = 5.0
#: A step that is shorter is the last: Newton's next one would be some 1e-8 sds.
_AT_REST = 1e-4
#: Where the mean of q(Z_L | Z_G) has no density, as a logit of hundreds may have none, steps begin at the likeliest of
#: these shares of it: far from q's mean it goes on in a straight line.
_NEARER = (0.5, 0.25, 0.1, 0.03, 0.0)
#: More latents by draws, of two spreads in sds of q(Z_L | Z_G) by half, since that one may be too narrow, or beside the
#: place; by fewer where those of records are nested in a silo's.
_DRAWN, _NESTED, _SPREADS = 256, 64, (1.2, 3.0)
#: Of a silo's latents in which log p is concave, of such spreads in sds by the curvature at the mode: by so many, and
#: where there are few latents. One of Newton's steps leads there: where it is not enough draws are weighed less evenly.
_CLIMBED, _CLIMBED_OF_FEW, _FEW, _CLIMBED_SPREADS = 32, 8, 8, (1.0, 1.4)
#: And by so many along lines: there means of draws are right, or too small, however far off q(Z_L | Z_G) is.
_ALONG_LINES = 32
#: Where latents' other modes are looked for: so many nodes along each ray, of one latent and of more, from how many sds
#: on and up to sinh of how much; the highest peaks of each; rays beside the axes; at how many points Z_G.
_SCANNED, _FROM, _REACH, _PEAKS, _RAYS, _LOOKS = (300, 60), 0.5, 9.0, (3, 1), 8, 3
#: Other modes of a record at most; they count if they are so many sds apart, and so many nats less heavy at most, or,
#: of more than two latents, where nobody climbs to them, less likely.
_OTHERS, _OFF, _HEAVY, _UNCLIMBED = 7, 2.5, 12.0, 30.0
#: Degrees of freedom of what shares an integrand out between its modes.
_SHARED = 3.0
#: Numbers of all evaluations together: fewer are many calls, each of which costs milliseconds; more leave the cache.
AT_ONCE = 1_200_000
#: Nats of all silos together that are told, as a power of two.
_TOLD = 36
UP_TO_NATS = math.ldexp(1.0, _TOLD)
#: Nats, relative to those at q's mean, that are told along every line, as a power of two.
_ALWAYS = 20
#: Scouts, of up to so many dimensions, and how many there are in a shell. Of more dimensions
#: they are too few to meet anything.
_SCOUTS, SCOUTED, _SHELL = 512, 6, 32
#: How many sds from q's mean another mode is, at least, and how many nats deep the valley between.
APART, VALLEY = 4.0, 1.5
#: Scouts lie where no one dimension on its own costs the prior more nats than this, up to a power of two, of those from
#: and to the given ones. No prior's own round number: a tie could be rounded differently at two parties.
_BULK, _SCALES = 2.7, (-10, 20)


class Points(NamedTuple):
    """Where the likelihood is asked for, the same at all parties."""

    eps: Tensor  # (2 HALF, n) standard normals, one half after the other
    mean: Tensor  # (n,) of q
    draws: Tensor  # (2 HALF, n) of q
    lines: list[Tensor]  # (count, n) each: a way from q's mean outwards, along dimensions first
    mirrors: list[Mirror]  # of the other lines
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
    return (block_of(problem),)


def block_of(problem: Problem) -> Block:
    return hiding.block(WEIGHED, (_count(problem.layout),), UP_TO_NATS / len(problem.silos))


def asked(table: BlockTable) -> bool:
    """Whether a phase weighs q."""
    return any(block.name == WEIGHED for block in table.blocks)


def _lines(layout: Layout) -> list[int]:
    """How many points each line has."""
    first, others = mirrors(layout)
    ways = [_FAR] * (2 * layout.size("global")) + [len(_BETWEEN)] * len(first)
    return ways + [len(_HALFWAY)] * min(len(others), _IMAGES)


def _shells(layout: Layout) -> list[int]:
    """How many scouts each shell has."""
    return [_SHELL] * (_SCOUTS // _SHELL if layout.size("global") <= SCOUTED else 0)


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
    lines, block = _lines(problem.layout), block_of(problem)
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


def too_large(problem: Problem, nats: FloatArray) -> bool:
    """Whether a number is hidden that is told of an ordinary q: along lines and of shells many are not."""
    with np.errstate(invalid="ignore"):
        near = nats[: 1 + 2 * HALF] - nats[0]
    return bool(hiding.past(near, hiding.told_up_to(block_of(problem))).any())


def points(problem: Problem, q: Natural) -> Points:
    half = server_draws(problem.seed).normals(_DRAWS, HALF * q.n)[0].reshape(2, HALF // 2, q.n)
    half = half / half.square().mean(1, keepdim=True).sqrt()
    half[:, ::2] *= wide(q.n)
    eps = torch.cat([half, -half], 1).flatten(0, 1)
    mean, covariance = q.mean(), q.covariance()
    steps = torch.arange(1, _FAR + 1, dtype=torch.float64)[:, None]
    lines = [mean + sign * steps * covariance[i] / covariance[i, i].sqrt() for i in range(q.n) for sign in (1, -1)]
    first, others = mirrors(problem.layout)
    images = _images(first, mean)
    lines += [mean + torch.tensor(_BETWEEN, dtype=torch.float64)[:, None] * (z - mean) for z in images]
    some, images = _apart(q, others)
    lines += [mean + torch.tensor(_HALFWAY, dtype=torch.float64)[:, None] * (z - mean) for z in images]
    return Points(eps, mean, mean + eps @ q.factor().mT, lines, [*first, *some], *_scouts(problem))


def _apart(q: Natural, others: list[Mirror]) -> tuple[list[Mirror], Tensor]:
    """The first `_IMAGES` of them that take q's mean far enough to be another mode, and where to; for want of so many
    such that leave it where it is."""
    images = _images(others, q.mean())
    far = (sds_from([q_part(q)], images) > APART).nonzero()[:_IMAGES, 0].tolist() if others else []
    rest = min(len(others), _IMAGES) - len(far)
    return [others[k] for k in far] + [_same(q.n)] * rest, torch.cat([images[far], q.mean().expand(rest, q.n)])


def first_log_prior(problem: Problem, z: Tensor) -> Tensor:
    """(S,) at z (S, n), with theta as the run began."""
    at = z.to(problem.device, problem.dtype)
    prior = over_draws(lambda z: problem.density.log_prior(z, problem.start.theta), at)
    return finite(prior.to("cpu", torch.float64))


def _scouts(problem: Problem) -> tuple[Tensor, Tensor]:
    """`Points.scouts` and their `box`: of the model and the seed alone, so that no broadcast moves them."""
    start, n = problem.start.z_global.to("cpu", torch.float64), problem.layout.size("global")
    if not _shells(problem.layout):
        return start.new_zeros(0, n), start.new_zeros(2, n)

    steps = torch.exp2(torch.arange(_SCALES[0], _SCALES[1] + 1, dtype=torch.float64))
    ends = torch.stack([-torch.eye(n, dtype=torch.float64), torch.eye(n, dtype=torch.float64)])
    away = start + ends[:, :, None] * steps[:, None]
    tried = torch.cat([start[None], away.reshape(-1, n)])
    found = first_log_prior(problem, tried)
    within = (found[1:] > found[0] - _BULK).reshape(2, n, len(steps))
    scale = torch.where(within, steps, steps[0]).amax(-1)
    box = start + torch.tensor([[-1.0], [1.0]], dtype=torch.float64) * scale
    shift = torch.from_numpy(server_draws(problem.seed).uniforms(_DRAWS + 2, n)[0, 0])
    u = (torch.quasirandom.SobolEngine(n).draw(_SCOUTS, dtype=torch.float64) + shift) % 1.0
    u = u[(u - 0.5).abs().amax(1).argsort(stable=True)]
    return box[0] + u * (box[1] - box[0]), box


class Mirror(NamedTuple):
    """A map of unconstrained space that is its own inverse, under which posteriors are often the same: dimensions
    change places, then signs; then angles turn by half, and components of a simplex change places."""

    order: Tensor  # (n,)
    signs: Tensor  # (n,)
    turned: Tensor = torch.zeros(0, dtype=torch.long)  # dimensions on an interval of which the ends meet
    shares: tuple[tuple[Tensor, int, int], ...] = ()  # dimensions (..., K - 1) of simplexes, and two components

    @property
    def rigid(self) -> bool:
        return not len(self.turned) and not self.shares

    def __call__(self, z: Tensor) -> Tensor:
        """The image of z (n,)."""
        z = self.signs * z[self.order]
        if len(self.turned):
            at = (torch.sigmoid(z[self.turned]) + 0.5).remainder(1.0).clamp(_EDGE, 1 - _EDGE)
            z = z.index_put((self.turned,), torch.logit(at))
        for where, a, b in self.shares:
            simplex = torch.distributions.StickBreakingTransform()
            parts = simplex(z[where])
            order = torch.arange(parts.shape[-1])
            order[a], order[b] = b, a
            z = z.index_put((where,), simplex.inv(parts[..., order]))
        return z


#: How near to its cut an angle is taken for a point within.
_EDGE = 1e-5


def _same(n: int) -> Mirror:
    return Mirror(torch.arange(n), torch.ones(n, dtype=torch.float64))


def _images(maps: list[Mirror], z: Tensor) -> Tensor:
    """(maps, n) of z (n,)."""
    if not maps:
        return z.new_zeros(0, len(z))
    found = torch.stack([m.signs for m in maps]) * z[torch.stack([m.order for m in maps])]
    for k, m in enumerate(maps):
        if not m.rigid:
            found[k] = m(z)
    return found


@functools.lru_cache(maxsize=8)
def mirrors(layout: Layout) -> tuple[list[Mirror], list[Mirror]]:
    """Of Z_G, those that are the likeliest first, to be looked at closely, and others:

    - signs of all, of a site, of sites whose names differ in one part (`load1`, `load2`), of a row or a column, of an
      element; an interval's ends; and two of these at once;
    - components of a mixture that change places, along an axis of that length or as sites whose names differ in one
      part, with the shares that a simplex or an interval has;
    - angles, on an interval, that turn by half, alone, with one sign, and with components that change places.
    """
    n, sites = layout.size("global"), layout.of("global")
    ends = itertools.accumulate(s.size for s in sites)
    at = {s.name: torch.arange(end - s.size, end) for s, end in zip(sites, ends, strict=True)}
    named = by_names(sites)
    real = [at[s.name] for s in sites if s.support.startswith(REALS)]
    ends_of = [i[None] for s in sites if s.support.startswith(_INTERVALS) for i in at[s.name]]
    alike = [
        torch.cat([at[s.name] for s in of.values()])
        for of in named.values()
        if all(s.support.startswith(REALS) for s in of.values())
    ]
    slices = [
        at[s.name].reshape(s.shape).select(axis, k).flatten()
        for s in sites if s.support.startswith(REALS)
        for axis in range(len(s.shape) if len(s.shape) > 1 else 0) for k in range(s.shape[axis])
    ]  # fmt: skip
    elements = [i[None] for site in real for i in site]
    ones = torch.ones(n, dtype=torch.float64)
    signs = lambda group: ones.index_fill(0, group, -1.0)  # noqa: E731
    flips = [*([torch.cat(real)] if real else []), *real, *ends_of, *alike, *slices, *elements]
    places = torch.arange(n)
    singles = [Mirror(places, signs(group)) for group in flips]
    swaps = list(_swaps(sites, at, named))
    halves = [Mirror(places, ones, turned) for turned in ends_of]
    halves += [Mirror(places, signs(group), turned) for turned in ends_of for group in [*real, *alike, *slices]]
    halves += [Mirror(places, signs(group), turned) for turned in ends_of for group in elements]
    halves += [
        m._replace(turned=turned)
        for turned in ends_of
        for m in swaps
        if m.rigid and m.signs[turned] > 0 and m.order[turned] == turned
    ]
    wholes = [*real, *ends_of, *alike, *slices]
    pairs = [*itertools.combinations(wholes, 2), *itertools.combinations([*ends_of, *elements], 2)]
    double = [Mirror(places, signs(one) * signs(other)) for one, other in pairs]
    found: dict[str, Mirror] = {}
    for m in [*singles[:16], *swaps, *halves, *singles[16:], *double]:
        found.setdefault(str([t.tolist() for t in m[:3]] + [(w.tolist(), a, b) for w, a, b in m.shares]), m)
    found.pop(str([places.tolist(), ones.tolist(), []]), None)
    maps = list(found.values())
    return maps[:_FIRST], maps[_FIRST:]


def by_names(sites: Iterable[Site]) -> dict[Any, dict[str, Site]]:
    """Sites of one shape and support whose names differ in one part (`b1` and `b2`, `mu_low` and `mu_high`, `sA` and
    `sB`), two at least, by that part."""
    found: dict[Any, dict[str, Site]] = defaultdict(dict)
    for s in sites:
        for part in re.finditer(r"\d+|[A-Z]?[a-z]+|[A-Z]+", s.name):
            found[s.name[: part.start()], s.name[part.end() :], s.shape, s.support][part.group()] = s
    return {stem: of for stem, of in found.items() if len(of) > 1}


def _swaps(sites: tuple[Site, ...], at: dict[str, Tensor], named: dict[Any, dict[str, Site]]) -> Iterator[Mirror]:
    """Components that change places: two next to each other along an axis of their number, or two labels of names."""
    n = sum(s.size for s in sites)
    bounded = [at[s.name] for s in sites if s.size == 1 and ("Simplex" in s.support or "Interval" in s.support)]

    def simplexes(k: int, a: int, b: int) -> tuple[tuple[Tensor, int, int], ...]:
        of = [at[s.name].reshape(s.shape) for s in sites if "Simplex" in s.support and s.shape[-1] == k - 1 > 1]
        return tuple((where, a, b) for where in of)

    def with_shares(order: Tensor, shares: tuple[tuple[Tensor, int, int], ...], k: int) -> Iterator[Mirror]:
        same = torch.ones(n, dtype=torch.float64)
        stays = [p for p in bounded if int(order[p]) == int(p)] if k == 2 else []
        if stays:
            yield Mirror(order, same.index_fill(0, torch.cat(stays), -1.0), shares=shares)
        yield Mirror(order, same, shares=shares)
        if shares:
            yield Mirror(order, same)
        for p in stays if len(stays) > 1 else []:
            yield Mirror(order, same.index_fill(0, p, -1.0), shares=shares)

    def along(order: Tensor, k: int, a: int, b: int, first: bool) -> Tensor:
        """With the axes of k, of each site the last or the first of them, swapped as well."""
        order = order.clone()
        for s in sites:
            axes = [axis for axis, length in enumerate(s.shape) if length == k and "Simplex" not in s.support]
            if axes:
                grid = at[s.name].reshape(s.shape)
                to = torch.arange(k)
                to[a], to[b] = b, a
                order[grid.flatten()] = order[grid.index_select(axes[0] if first else axes[-1], to).flatten()]
        return order

    lengths = {length for s in sites for length in s.shape if "Simplex" not in s.support}
    for k in sorted(length for length in lengths if 1 < length <= COMPONENTS):
        for a in range(k - 1):
            for first in (False, True):
                yield from with_shares(along(torch.arange(n), k, a, a + 1, first), simplexes(k, a, a + 1), k)
    labels: dict[tuple[str, str], list[dict[str, Site]]] = defaultdict(list)
    for of in named.values():
        if len(of) <= COMPONENTS:
            for two in itertools.combinations(sorted(of), 2):
                labels[two].append(of)
    for (one, other), stems in sorted(labels.items()):
        order = torch.arange(n)
        for of in stems:
            order[at[of[one].name]], order[at[of[other].name]] = at[of[other].name], at[of[one].name]
        of = max(stems, key=len)
        k, (a, b) = len(of), sorted(map(sorted(of).index, (one, other)))
        for whole in (order, along(order, k, a, b, False)):
            yield from with_shares(whole, simplexes(k, a, b), k)


def wide(n: int) -> float:
    """Half of the draws are of a q with sds so many times as large, where tails of the posterior show."""
    return 1 + _TAILS / math.sqrt(n)


class _Nodes(NamedTuple):
    """Where latents are integrated out, in sds of q(Z_L | Z_G)."""

    eps: Tensor  # (K, N or 1, n)
    log_weight: Tensor  # (K, N or 1): log of the volume that a node stands for


class _Others(NamedTuple):
    """Where latents have several modes: how far from q(Z_L | Z_G)'s mean each is, 0 where a row has fewer; no modes:
    one is all that any row has."""

    record: Tensor = torch.zeros(0)  # (modes, N, n_record)
    silo: Tensor = torch.zeros(0)  # (modes, 1, n_silo)


class Weigher:
    """A silo's log p(y_j | Z_G). It holds no data."""

    def __init__(self, problem: Problem, local: LocalFamily, silo: LocalFamily) -> None:
        self.problem, self.local, self.silo = problem, local, silo
        layout = problem.layout
        self.n_record, self.n_silo = layout.size("record"), layout.size("silo")
        self._adapts, self.concave = True, eliminates(problem)
        mode = "traced" if problem.mode == "compiled" else problem.mode
        self.of_silo = Traced(self._curved_of_silo, (None, None, 0, 0, None, None), mode)
        self.of_records = Traced(self._curved_of_records, (None, None, None, 0, 0, 0), mode)

    def __call__(
        self, q: Natural, at: Points, theta: Params, record: Params, silo: Params, view: SiloView, key: int
    ) -> FloatArray:
        """Nats at each of `at.all`, by all records of the silo, whatever they are: for `as_told`. `key` and the next
        two name the draws of its latents: for either half of the draws of q, mirrored points with the first, and for
        lines along dimensions and scouts. record, silo: parameters around q's mean.

        The halves are integrated on different nodes, so that they differ by integration's error as well.
        """

        def over(z: Tensor, which: int) -> Tensor:
            return self.at(q, z, which, key + which, theta, record, silo, view)

        straight = len(at.lines) - len(at.mirrors)
        lines = torch.cat([at.mean.new_zeros(0, q.n), *at.lines[:straight]])
        images = torch.cat([at.mean.new_zeros(0, q.n), *at.lines[straight:]])
        moved = (images != at.mean).any(1)
        half, rest = at.draws.split(HALF)
        near, beyond = over(torch.cat([at.mean[None], half, images[moved]]), 0).split([1 + HALF, int(moved.sum())])
        of_images = near[:1].repeat(len(images))
        of_images[moved] = beyond
        far = over(torch.cat([at.mean[None], lines, at.scouts]), 2)
        along, of_scouts = (far[1:] - far[0] + near[0]).split([len(lines), len(at.scouts)])
        return torch.cat([near, over(rest, 1), along, of_images, of_scouts]).numpy()

    def at(
        self, q: Natural, z: Tensor, which: int, key: int, theta: Params, record: Params, silo: Params, view: SiloView
    ) -> Tensor:
        """Nats at each of z (S, n). which: nodes, 0 and 1 for two kinds that are as good, 2 for fewer; `key` names the
        draws that they are made of."""
        self.problem.density.often(view.start, theta, view.rows)
        try:
            loc = q.mean().to(self.problem.device, self.problem.dtype)
            latents = _Latents(self, loc, theta, record, silo, view)
            try:
                return self._over(latents, z, self._nodes(view, key, which), which)
            except RuntimeError:  # NotImplementedError is one: a program without second derivatives
                if not self._adapts:
                    raise
                self._adapts = False
                return self._over(latents, z, self._nodes(view, key, which), which)
        except (LinAlgError, ArithmeticError):
            # Whether its model can be computed at points far from q may depend on a silo's data: hidden, not refused.
            return torch.full((len(z),), math.nan, dtype=torch.float64)

    def _curved_of_silo(
        self, z: Tensor, theta: Params, rows: Params, weights: Tensor, own: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`_curved` of a silo's own latents (1, n_silo), of one without latents of records, at z (n,)."""
        joint = joint_of(self.problem.density, theta, rows, weights)
        return _curved(lambda own: joint(own[0], z)[None], own, before)

    def _curved_of_records(
        self, z: Tensor, z_silo: Tensor, theta: Params, rows: Params, own: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`_curved` of records' latents (N, n_record), at z (n,) and z_silo (n_silo,)."""
        evaluate = self.problem.density.evaluate
        return _curved(lambda own: evaluate(z, z_silo, own, theta, rows).records, own, before)

    def _nodes(self, view: SiloView, key: int, which: int) -> tuple[_Nodes, _Nodes]:
        """For the latents of records and of the silo. which: as in `at`."""
        move = lambda t: t.to(self.problem.device, self.problem.dtype)  # noqa: E731
        found, nested = [], self.n_record > 0 and self.n_silo > 0
        for n, draws in ((self.n_record, view.record_draws), (self.n_silo, view.silo_draws)):
            if n == 0:
                nodes = _Nodes(torch.zeros(1, 1, 0), torch.zeros(1, 1))
            elif which < 2 and n in _GRIDS and not (nested and n > 1):
                nodes = _grid(n, bool(which), nested)
            elif self.concave and self._adapts and draws is view.silo_draws:
                count = _CLIMBED_OF_FEW if n <= _FEW else _CLIMBED
                nodes = _drawn(torch.from_numpy(draws.uniforms(key, n)), count, _CLIMBED_SPREADS)
            else:
                count = _ALONG_LINES if which == 2 else _NESTED if nested else _DRAWN
                nodes = _drawn(torch.from_numpy(draws.uniforms(key, n)), count)
            found.append(_Nodes(*map(move, nodes)))
        return found[0], found[1]

    def _over(self, latents: _Latents, z: Tensor, nodes: tuple[_Nodes, _Nodes], which: int) -> Tensor:
        adapts = self._adapts and (self.concave or which != 2)
        # Nodes follow the modes of latents of the silo, and of records.
        of_silo = (self.n_silo in _GRIDS or self.concave) and not self.n_record
        climbs = adapts and of_silo, adapts and self.n_record in _GRIDS
        z = z.to(self.problem.device, self.problem.dtype)
        if any(climbs) and not self.concave:
            latents = latents.with_graph()
        rule = _Rule(*nodes, *climbs, latents.others(z, *climbs) if which != 2 else _Others())
        modes = max(1, len(rule.others.record)) * max(1, len(rule.others.silo))
        numbers = len(rule.inner.eps) * len(rule.outer.eps) * len(latents.view.weights) * max(1, self.n_record) * modes
        if self.concave:  # groups of rows, which are integrated out in the program
            numbers *= max(value[0].numel() for value in latents.view.rows.values())
        found = [
            over_draws(lambda z, modes: latents.marginal(z, modes, rule), part, latents.modes(part, rule))
            for part in z.split(max(1, AT_ONCE // numbers))
        ]
        return torch.cat(found).detach().to("cpu", torch.float64)


class _Rule(NamedTuple):
    """How a silo's latents are integrated out: those of records on the `inner` nodes, its own on the `outer` ones."""

    inner: _Nodes
    outer: _Nodes
    climbs_silo: bool  # whether nodes follow the modes of the silo's own latents
    climbs_record: bool
    others: _Others


class _Latents(NamedTuple):
    """A silo's latents and records: their density and their q, given Z_G, a z (n,)."""

    weigher: Weigher
    loc: Tensor  # (n,) q's mean of Z_G, on the problem's device
    theta: Params
    record: Params  # parameters around that mean
    silo: Params
    view: SiloView
    graph: Callable[..., tuple[Tensor, Tensor]] | None = None  # of the weigher's `of_silo` or `of_records`

    def with_graph(self) -> _Latents:
        """With slopes and curvatures in the latents, of a silo's if there are none of records."""
        none, weigher = self.loc.new_zeros(1, self.weigher.n_silo), self.weigher
        loc = (self.of_records(self.loc, none) if weigher.n_record else self.of_silo(self.loc))["loc"]
        before = torch.eye(loc.shape[-1], dtype=loc.dtype, device=loc.device).expand(len(loc), -1, -1)
        if weigher.n_record:
            args = self.loc, none[0], *self.data[:2], loc, before
            return self._replace(graph=weigher.of_records.graph(*args, mapped=(0, 1, 4, 5)))
        return self._replace(graph=weigher.of_silo.graph(self.loc, *self.data, loc, before, mapped=(0, 4, 5)))

    @property
    def data(self) -> tuple[Params, Params, Tensor]:
        return self.theta, self.view.rows, self.view.weights

    def modes(self, z: Tensor, rule: _Rule) -> list[Params]:
        """The modes that nodes follow at each of z (S, n), with S first; none where they follow none, or such of
        records above each of a silo's own nodes."""
        if rule.climbs_silo and not self.weigher.concave:
            moments = _moved(over_draws(self.of_silo, z), rule.others.silo)
            return [_around_mode(self.density_of_silo, each, of=(z,)) for each in moments]
        if rule.climbs_record and not self.weigher.n_silo:
            none = z.new_zeros(len(z), 1, 0)
            moments = _moved(over_draws(self.of_records, z, none), rule.others.record)
            return [_around_mode(self.density_of_records, each, of=(z, none)) for each in moments]
        return []

    def marginal(self, z: Tensor, modes: list[Params], rule: _Rule) -> Tensor:
        """log p(y_j | z), nats. modes: of `modes`, at this z."""
        owns = [self.of_silo(z)]
        if self.weigher.concave and rule.climbs_silo:
            owns = [self._near_mode(z)]
        elif rule.climbs_silo:
            owns = modes

        def at(eps: Tensor, log_weight: Tensor, own: int) -> Tensor:
            z_silo, weight = _at(owns, own, eps, log_weight)
            return self._given(z, z_silo, modes if rule.climbs_record else [], rule) + weight.sum()

        found = [_each(functools.partial(at, own=k), *rule.outer) for k in range(len(owns))]
        return torch.logsumexp(torch.cat(found), 0)

    def _given(self, z: Tensor, z_silo: Tensor, modes: list[Params], rule: _Rule) -> Tensor:
        """log p(y_j, z_silo | z). modes: of records' latents, where they are known."""
        weights = self.view.weights
        if not modes:
            modes, density = _moved(self.of_records(z, z_silo), rule.others.record), self.density_of_records(z, z_silo)
            modes = [_around_mode(density, each, _NESTED_STEPS) for each in modes] if rule.climbs_record else modes

        def at(eps: Tensor, log_weight: Tensor, mode: int) -> tuple[Tensor, Tensor]:
            z_record, weight = _at(modes, mode, eps, log_weight)
            terms = self._terms(z, z_silo, z_record)
            return terms.records + weight, terms.silo

        found = [_each(functools.partial(at, mode=k), *rule.inner) for k in range(len(modes))]
        total = torch.logsumexp(torch.cat([records for records, _ in found]), 0)
        total = torch.where(weights > 0, total, torch.zeros_like(total))
        return (total * weights).sum() + found[0][1][0]

    def _near_mode(self, z: Tensor) -> Params:
        """Moments of a silo's latents, in which log p is concave, around their mode or near it."""
        own = self.of_silo(z)
        found = silo_params(*near_mode(self.joint(), own["loc"][0], z), own)
        if "lower" in own:
            found["lower"] = unit_lower(found["lower"], self.weigher.n_silo)
        return found

    def _terms(self, z: Tensor, z_silo: Tensor, z_record: Tensor) -> LogTerms:
        return self.weigher.problem.density.evaluate(z, z_silo[0], z_record, self.theta, self.view.rows)

    def joint(self) -> Joint:
        """log p(y_j, Z_S | Z_G) of a silo without latents of records."""
        return joint_of(self.weigher.problem.density, self.theta, self.view.rows, self.view.weights)

    def density_of_silo(self, z: Tensor) -> _Density:
        """Of its own latents (1, n_silo), of a silo without latents of records: (1,)."""
        joint, graph = self.joint(), self.graph
        curved = None if graph is None else functools.partial(graph, z, *self.data)
        return _Density(lambda z_silo: joint(z_silo[0], z)[None], curved)

    def density_of_records(self, z: Tensor, z_silo: Tensor) -> _Density:
        """Of records' latents (N, n_record): (N,)."""
        graph = self.graph
        curved = None if graph is None else functools.partial(graph, z, z_silo[0], *self.data[:2])
        return _Density(lambda z_record: self._terms(z, z_silo, z_record).records, curved)

    def of_silo(self, z: Tensor) -> Params:
        """q(Z_S | Z_G)."""
        return self.weigher.silo.moments(self.silo, {}, {}, z, z - self.loc)

    def of_records(self, z: Tensor, z_silo: Tensor) -> Params:
        """q(Z_L | Z_G, Z_S)."""
        off = z_silo[0] - self.silo["loc"][0] if self.silo else z_silo[0]
        shift = torch.cat([z - self.loc, off])
        return self.weigher.local.moments(self.record, self.theta, self.view.rows, z, shift)

    def others(self, z: Tensor, climbs_silo: bool, climbs_record: bool) -> _Others:
        """Where latents have other modes, at q's mean or at some of z (S, n)."""
        found, n_record = _Others(), self.weigher.n_record
        if (not n_record and not self.weigher.n_silo) or self.weigher.concave:
            return found
        for z_g in torch.cat([self.loc[None], z[:: max(1, len(z) // (_LOOKS - 1))]])[:_LOOKS]:
            own = self.of_silo(z_g)
            if n_record:
                density = self.density_of_records(z_g, own["loc"])
                counted = lambda z, f=density.of: torch.where(self.view.weights > 0, f(z), -math.inf)  # noqa: E731
                moments = self.of_records(z_g, own["loc"])
                found = found._replace(record=_looked(counted, density, moments, climbs_record, found.record))
            else:
                density = self.density_of_silo(z_g)
                found = found._replace(silo=_looked(density.of, density, own, climbs_silo, found.silo))
        return found


class _Density(NamedTuple):
    """A log density of latents, a row each."""

    of: Callable[[Tensor], Tensor]  # (N, n) to (N,)
    by_graph: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None  # `curved`, if there is one

    def curved(self, z: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Slopes (N, n) and a factor (N, n, n) of the inverse of minus the curvature, or `before` where a row is not
        curved downwards."""
        return self.by_graph(z, before) if self.by_graph else _curved(self.of, z, before)


def _moved(moments: Params, off: Tensor) -> list[Params]:
    """`moments` at each of `off` (modes, rows, n) from their mean; without these, as they are."""
    return [{**moments, "loc": moments["loc"] + by} for by in off] or [moments]


def _at(modes: list[Params], k: int, eps: Tensor, log_weight: Tensor) -> tuple[Tensor, Tensor]:
    """A node of the k-th of `modes`: latents (rows, n), and the log of the volume (rows,) that it stands for, times the
    share of the integrand there that is this mode's. Shares add up to 1 wherever that is, and are smooth."""
    z, weight = gaussian_rows.transform(modes[k], eps), log_weight + modes[k]["log_scale"].sum(-1)
    if len(modes) == 1:
        return z, weight
    n = z.shape[-1]

    def log_share(moments: Params) -> Tensor:
        scale = moments["log_scale"].sum(-1)
        square = -2 * (gaussian_rows.log_prob(moments, z) + scale) - n * LOG_2PI
        return -0.5 * (_SHARED + n) * torch.log1p(square / _SHARED) - scale

    logs = torch.stack([log_share(moments) for moments in modes])
    return z, weight + logs[k] - torch.logsumexp(logs, 0)


class _Known:
    """The modes (rows, n) that latents are known to have at one Z_G, the main one first; of other rows, which have no
    such one, the main one in its place. height: log density, -inf of rows that do not count."""

    def __init__(self, modes: list[Params], offs: list[Tensor], height: Callable[[Tensor], Tensor]) -> None:
        self.modes, self.offs, self.height, self.main = modes, offs, height, modes[0]
        self.filled = [torch.ones_like(offs[0][:, 0], dtype=torch.bool), *((off != 0).any(-1) for off in offs[1:])]
        self.top = height(self.main["loc"])

    def matters(self, mode: Params, climbs: bool) -> Tensor:
        """(rows,) whether a mode holds more than a tiny share, if nobody knows it."""
        its = self.height(mode["loc"])
        if climbs:
            return its + mode["log_scale"].sum(-1) > self.top + self.main["log_scale"].sum(-1) - _HEAVY
        between = [self.height(torch.lerp(self.main["loc"], mode["loc"], share)) for share in (0.25, 0.5, 0.75)]
        valley = torch.stack(between).amin(0) < torch.minimum(its, self.top) - VALLEY
        return (its > self.top - _UNCLIMBED) & valley

    def add(self, mode: Params, off: Tensor, new: Tensor) -> None:
        """A mode of `new` rows, `off` from the mean of q, where it is none of those known."""
        for k in range(1 + _OTHERS):
            if not bool(new.any()):
                return
            if k == len(self.offs):
                self.offs.append(torch.zeros_like(off))
                self.modes.append(self.main)
                self.filled.append(torch.zeros_like(new))
            apart, free = _beside(self.modes[k], mode) > _OFF, ~self.filled[k]
            taken = new & free
            self.offs[k] = torch.where(taken[:, None], off, self.offs[k])
            self.modes[k] = {name: torch.where(_like(taken, v), mode[name], v) for name, v in self.modes[k].items()}
            self.filled[k] = self.filled[k] | taken
            new = new & ~free & apart
        if bool(new.any()):
            raise ArithmeticError("latents have more modes than are integrated around")


def _looked(
    counted: Callable[[Tensor], Tensor], density: _Density, moments: Params, climbs: bool, known: Tensor
) -> Tensor:
    """`known` (modes, rows, n) as in `_Others`, and modes more that rows have here, if these hold more than a
    tiny share. counted: of `density`, -inf for rows that do not count."""

    def of(off: list[Tensor]) -> list[Params]:
        """The modes that are `off` from the mean of q(Z_L | Z_G), each of them."""
        there = [{**moments, "loc": moments["loc"] + by} for by in off]
        if not climbs:
            return there
        modes, at_once = list[Params](), max(1, AT_ONCE // max(1, len(SHARES) * moments["loc"].numel()))
        for first in range(0, len(there), at_once):
            some = there[first : first + at_once]
            stacked = {name: torch.stack([each[name] for each in some]) for name in moments}
            found = _around_mode(lambda: density, stacked, of=())
            modes += [{name: value[k] for name, value in found.items()} for k in range(len(some))]
        return modes

    def height(z: Tensor) -> Tensor:
        return counted(z).nan_to_num(nan=-math.inf, posinf=-math.inf)

    modes = of(list(known)) or of([torch.zeros_like(moments["loc"])])
    found = _Known(modes, list(known.unbind(0)) or [modes[0]["loc"] - moments["loc"]], height)
    places = [
        torch.where((peak > -math.inf)[:, None], place, found.main["loc"]) - moments["loc"]
        for place, peak in _peaks(height, found.main)
        if bool((peak > found.top - 5 * _UNCLIMBED).any())
    ]
    for there in of(places):
        found.add(there, there["loc"] - moments["loc"], found.matters(there, climbs))
    return torch.stack(found.offs) if len(found.offs) > 1 else known


def _like(rows: Tensor, x: Tensor) -> Tensor:
    return rows.reshape(-1, *[1] * (x.dim() - 1))


def _peaks(height: Callable[[Tensor], Tensor], main: Params) -> Iterator[tuple[Tensor, Tensor]]:
    """Places (rows, n) where latents may have another mode than the `main` one, and heights (rows,), -inf where there
    is none: the highest along rays from there, and its reflections at 0."""
    loc = main["loc"]
    n = loc.shape[-1]
    along = torch.linspace(0, _REACH, _SCANNED[n > 1] + 1, dtype=torch.float64)[1:].sinh().to(loc)
    rays = torch.eye(n, dtype=torch.float64)
    if n > 1:
        even = torch.quasirandom.SobolEngine(n).draw(_RAYS + 1, dtype=torch.float64)[1:].clamp(1e-3, 1 - 1e-3)
        rays = torch.cat([rays, torch.nn.functional.normalize(torch.special.ndtri(even), dim=1)])
    size = max(1, AT_ONCE // max(1, loc.numel()))
    for ray in torch.cat([rays, -rays]).to(loc):
        eps = (along[:, None] * ray)[:, None]
        parts = [over_draws(lambda e: height(gaussian_rows.transform(main, e)), part) for part in eps.split(size)]
        heights = torch.cat(parts)
        inner = heights[1:-1]
        peak = (inner >= heights[:-2]) & (inner > heights[2:]) & (along[1:-1, None] > _FROM)
        tops = torch.where(peak, inner, -math.inf).topk(_PEAKS[n > 1], 0)
        for top, at in zip(*tops, strict=True):
            yield gaussian_rows.transform(main, eps[1 + at, 0]), top
    signs = itertools.islice(itertools.product((1.0, -1.0), repeat=n), 1, 8) if n <= 3 else [(-1.0,) * n]
    for sign in signs:
        place = loc * loc.new_tensor(sign)
        yield place, height(place)


def _beside(a: Params, b: Params) -> Tensor:
    """(rows,) how far apart two modes are, in the sds of the narrower one."""
    by = torch.minimum(a["log_scale"], b["log_scale"]).exp()
    return ((a["loc"] - b["loc"]) / by).norm(dim=-1)


def _each(fn: Any, *args: Any) -> Any:
    """`fn` of each of args (K, ...), without mapping over a single one."""
    tensors = flatten(args)
    if len(tensors[0]) > 1:
        return over_draws(fn, *args)
    found = fn(*structure(args)(iter([t[0] for t in tensors])))
    return structure(found)(iter([t[None] for t in flatten(found)]))


def _around_mode(
    density: _Density | Callable[..., _Density], moments: Params, steps: int = FROM_AFAR,
    of: tuple[Tensor, ...] | None = None,
) -> Params:  # fmt: skip
    """`moments` (rows; n of 1 or 2) moved to where `density` has its mode at this Z_G, and scaled by the curvature
    there: q(Z_L | Z_G) may be far off where Z_G is far from q's mean. By Newton's steps, the best of `SHARES` of each;
    rows that are not curved downwards keep their scale, and such as run off keep all.

    of: there are K `moments` (K, rows, ...), whose `density` is that of `of` (K, ...); steps end where all rows are at
    rest. None: there is one, and this is within a function that is mapped over Z_G, where nobody sees whether they are.
    """

    def run(fn: Any, *args: Any) -> Any:
        if isinstance(density, _Density):
            return fn(density, *args)
        return _each(lambda of, *args: fn(density(*of), *args), of, *args)

    loc, log_scale = moments["loc"], moments["log_scale"]
    eye = torch.eye(loc.shape[-1], dtype=loc.dtype, device=loc.device)
    before = log_scale.exp().unsqueeze(-1) * moments.get("lower", eye)
    at, height = run(_nearer, loc)
    for _ in range(steps):
        at, height, rests = run(_stepped, at, height, before)
        if of is not None and bool(rests.all()):
            break
    _, factor = run(_Density.curved, at, before)
    good = (at.isfinite().all(-1) & factor.isfinite().all(-1).all(-1))[..., None]
    scale = factor.diagonal(dim1=-2, dim2=-1)
    found = {"loc": torch.where(good, at, loc), "log_scale": torch.where(good, scale.log(), log_scale)}
    if "lower" in moments:
        found["lower"] = torch.where(good.unsqueeze(-1), factor / scale.unsqueeze(-1), moments["lower"])
    return found


def _nearer(density: _Density, loc: Tensor) -> tuple[Tensor, Tensor]:
    """Where Newton's steps begin (N, n), and the log density there."""
    height = density.of(loc).nan_to_num(nan=-math.inf, neginf=-math.inf)
    nearer = torch.stack([loc * share for share in _NEARER])
    heights = over_draws(density.of, nearer).nan_to_num(nan=-math.inf, neginf=-math.inf)
    return likeliest(loc, height, nearer, torch.where(height == -math.inf, heights, -math.inf))


def _stepped(density: _Density, at: Tensor, height: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """After one of Newton's steps, with `before` (N, n, n) for a factor where rows are not curved downwards: places and
    heights, and which rows (N,) are at rest, for the step was short, or none was taken."""
    g, factor = density.curved(at, before)
    white = (factor.mT @ g.unsqueeze(-1)).squeeze(-1)
    length = white.norm(dim=-1, keepdim=True)
    step = (factor @ (white * (_STRIDE / length.clamp(min=_STRIDE))).unsqueeze(-1)).squeeze(-1)
    tried = torch.stack([at + share * step for share in SHARES])
    heights = over_draws(density.of, tried).nan_to_num(nan=-math.inf)
    after, its = likeliest(tried[0], heights[0], [*tried[1:], at], [*heights[1:], height])
    return after, its, (length[:, 0] < _AT_REST) | (after == at).all(-1)


def _curved(log_density: Callable[[Tensor], Tensor], z: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """`_Density.curved`."""
    # Backwards twice: forwards, where tangents are zero, PyTorch asks Python for their shapes in every operation.
    n = z.shape[-1]
    of_sum = torch.func.grad(lambda z: log_density(z).sum())
    slope, pull = torch.func.vjp(of_sum, z)[:2]
    index = [torch.tensor([k], device=z.device) for k in range(n)]
    curve = -torch.stack([pull(z.new_zeros(z.shape).index_fill(1, k, 1.0))[0] for k in index], -1)
    a, c = curve[:, 0, 0], curve[:, -1, -1]
    b = 0.5 * (curve[:, 0, -1] + curve[:, -1, 0]) if n > 1 else torch.zeros_like(a)
    left = a - b.square() / c
    fine = (left > 0) & (c > 0)
    first, last = torch.where(fine, left, 1.0).rsqrt(), torch.where(fine, c, 1.0).rsqrt()
    if n == 1:
        return slope, torch.where(fine[:, None, None], first[:, None, None], before)
    made = torch.stack([first, torch.zeros_like(a), -b / torch.where(fine, c, 1.0) * first, last], -1)
    return slope, torch.where(fine[:, None, None], made.unflatten(-1, (2, 2)), before)


def _grid(n: int, other: bool, nested: bool = False) -> _Nodes:
    """Of n latents. The `other` grid is half a step beside: where sums are wrong, they are the opposite way."""
    count, step = _NESTED_GRID if nested else _GRIDS[n]
    t = (torch.arange(count) - (count - 1) / 2 + (0.25 if other else -0.25)).double() * step
    eps, log_weight = torch.sinh(t), (step * torch.cosh(t)).log()
    grids = [torch.cartesian_prod(*[side] * n).reshape(-1, n) for side in (eps, log_weight)]
    return _Nodes(grids[0][:, None], grids[1].sum(-1)[:, None])


def _drawn(shift: Tensor, count: int, spreads: tuple[float, ...] | None = None) -> _Nodes:
    """Quasi-random, an equal share of each of `spreads` (None: `_SPREADS`), shifted around the unit cube by `shift`
    (1, N, n) in (0, 1): each node is an ordinary draw, and records' errors are independent."""
    spreads = spreads or _SPREADS
    n = shift.shape[-1]
    if n <= torch.quasirandom.SobolEngine.MAXDIM:
        even = torch.quasirandom.SobolEngine(n).draw(count, dtype=torch.float64)
    else:
        even = torch.from_numpy(server_draws(0).uniforms(_DRAWS + 1, count * n).reshape(count, n))
    normals = torch.special.ndtri(((even[:, None] + shift) % 1.0).clamp(2.0**-53, 1 - 2.0**-53))
    spread = torch.tensor(spreads, dtype=torch.float64).repeat_interleave(count // len(spreads))[:, None, None]
    eps = spread * normals
    parts = [-0.5 * ((eps / by).square() + LOG_2PI).sum(-1) - n * math.log(by) for by in spreads]
    return _Nodes(eps, math.log(len(parts) / count) - functools.reduce(torch.logaddexp, parts))


def finite(prior: Tensor) -> Tensor:
    """Log densities of a prior, -inf where one is no number or overflows: far out PyTorch's of 1 / x is +inf."""
    return prior.nan_to_num(nan=-math.inf, posinf=-math.inf)


class Part(NamedTuple):
    """A normal near a mode."""

    mean: Tensor  # (n,)
    factor: Tensor  # (n, n) of its covariance, lower triangular


def q_part(q: Natural) -> Part:
    return Part(q.mean(), q.factor())


def sds_from(parts: list[Part], z: Tensor) -> Tensor:
    """(S,) how far z (S, n) are from the nearest part's mean, in its sds."""
    off = [torch.linalg.solve_triangular(p.factor, (z - p.mean).mT, upper=False).norm(dim=0) for p in parts]
    return torch.stack(off).amin(0)


def lines_of(at: Points, joint: Tensor) -> tuple[Tensor, Tensor]:
    """Of the lines along dimensions, both ways: steps (2 _FAR + 1,) in q's sds, log p(y, z) there (n, 2 _FAR + 1)."""
    n, start = len(at.mean), 1 + len(at.draws)
    ways = joint[start : start + 2 * n * _FAR].reshape(n, 2, _FAR)
    steps = torch.arange(1, _FAR + 1, dtype=joint.dtype)
    values = torch.cat([joint[0].expand(n, 1), ways[:, 0], ways[:, 1]], 1)
    return torch.cat([steps.new_zeros(1), steps, -steps]), values


def mirrored(by: Mirror, part: Part) -> Part:
    """Its image, to first order."""
    factor = torch.func.jacrev(by.__call__)(part.mean) @ part.factor
    factor, info = torch.linalg.cholesky_ex(factor @ factor.mT)
    return Part(by(part.mean), part.factor if int(info) else factor)  # at the cut of an angle there is no slope


def mirrored_near(maps: list[Mirror], part: Part, z: Tensor, most: float) -> Iterator[Part]:
    """Images of a part whose means z (n,) may be within `most` of their sds."""
    back = sds_from([part], _images(maps, z)) <= most  # a mirror is its own inverse, and keeps distances if it is rigid
    for by, within in zip(maps, back.tolist(), strict=True):
        if within or not by.rigid:
            yield mirrored(by, part)
