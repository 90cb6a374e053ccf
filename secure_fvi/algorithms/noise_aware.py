"""Posteriors under differential privacy that count its noise.

Broadcasts, noised totals and the noise's variance are public, so that integrating the noise out is post-processing: it
costs no budget, and nothing more leaves a silo. As in Alrawajfeh, Jalko and Honkela (AISTATS 2025) the trace of noised
gradients is the data; where they sample an optimum, here the prior is put back, as Bernstein and Sheldon (2019) do for
noised sufficient statistics. All silos' records are one Gaussian factor exp(s . z - z . H z / 2) near the posterior,
and

    SFVI   round t's total, at the broadcast z_t:  g_t = s - H z_t + noise    a regression of gradients on broadcasts
    PVI    the total of the first round:           (s, H) + noise             the sum of all sites

Given H, what was seen of s is normal: s = H z + r with r ~ N(0, H), the data's own spread, and noise of known variance.
With a Gaussian prior the posterior of z is then exact. H itself is known up to noise, and is drawn from its own
posterior given the slopes. Its prior knows no directions: eigenvectors are any, all alike, and each eigenvalue is even
in the logarithm by itself, down to where data say nothing. That is the reference prior of a covariance (Yang and Berger
1994), proper here since it ends (`_least`), or where a job declares that data tell more along every direction
(`least_information`): an assumption, which is dropped where what was seen rules it out. Above that it falls off by the
square: of a direction that the noise hides even logarithms would make nearly all draws more than is there. Where rounds
release H itself as well (`Released`) that is seen of it too. The middle of the mixture over draws, in its central 95%,
is the result: a normal of that interval in each number, with the mixture's correlations. Far out the mixture is wider.

Hidden directions. Along a direction of which no record says anything broadcasts are a walk of the noise, and the slope
on a walk looks like curvature. A prior that ties all directions to one size takes that for curvature, one that has
single columns in mind takes it so along a sum of columns, as of a duplicate or of an intercept and all levels of a
factor. With any direction free to be of none, intervals are as wide as the prior's along it. Where all directions of
SFVI together stand out from the noise no more than those of a walk there is none (`LEAST_SEEN`). Directions are alike
in the numbers' own units: where one is not told and priors differ much, draws of it lean into numbers whose prior is
narrow, which then seems to say something of it. There is none then either (`MOST_UNLIKE`).

No parabola. Broadcasts of variance S around their mean show gradients that are smoothed over them, which are zero
elsewhere: of a logistic regression further out, at estimates that are too large. To third order they are off by b =
T[S] / 2, T the third derivatives of the log-likelihood. At the eps at which intervals are wanted no test sees b in the
trace: a quadratic regression knows it with n / 2 times the variance of the slope itself. Its size is bounded. In the
mean over data, of a generalised linear model, T is the third moment of records' scores g (Bartlett 1953), so that by
the inequality of Cauchy and Schwarz b' H^-1 b <= sum E[(g' S g)^2] / 4. Scores are no longer than the clipping norm C;
with directions as a normal's, E[(g' S g)^2] is at most C^2 E[g' g] ((tr HS)^2 + 2 tr HSHS) / ((tr H)^2 + 2 tr HH). That
bound, a normal of that size in H's metric, is counted as one more noise of the slope; where it would be most of all
there is no interval (`MOST_BENT`). And H goes with z there: of a logistic regression it is least along a truth that is
far out, where a prior of which it says nothing would draw intervals to its own centre. Intervals hold both what follows
from the prior as it is, and as it would be around the broadcasts. A likelihood that is a parabola whatever the data, as
the server sees in the program, has neither. Its gradients are a line until they are cut, which those of a linear
regression are where broadcasts move a record's linear predictor by more than its own noise. Then totals leave more of
their line than noise does; or most broadcasts range over their priors; or, where the number of records N is public,
tr(HS) / N is more than 1 while totals vary more than the noise. In either case there is no interval (`_NO_LINE`,
`MOST_WANDER`, `MOST_SWAY`).

On their way. Rounds that still go from where the run began to where it ends are no sample around the end: along the way
gradients are cut, all on one side, or curved otherwise. At the end broadcasts answer the noise, so that means of totals
over halves of the rounds differ by less than that noise; if by more (chi-squared, `LEAST_ALIKE`), or if broadcasts
themselves still moved by more than they scatter (`MOST_MOVED`), there is no interval.
On a likelihood that is a parabola a run may walk about, and lines that are fitted to each half have to differ as well.
Where in the mean of the rounds the posterior's slope is more than noise and their scatter (`LEAST_ALIKE`) the mode is
found from afar, by the curvature: not by what rounds released of it, which is cut, and not at all where gradients are
cut there, or may be: on the way all are cut on one side, and a line over broadcasts that hardly move follows them.

Clipping. Let a record's gradient be cut by a factor c <= 1. If the cut scores are still zero in the mean at the truth
(residuals that are symmetric), their curvature H is E[c g g'] and their variance E[c^2 g g'] is no larger: intervals
are no narrower than they should be. Scores that are cut on one side more than on the other have another zero, which no
public number tells: under a clipping norm that cuts many records of a logistic regression, say. Its size is known from
measurements: in sds of the data about `_PULLED` times what cuts take off gradients over the root of what is left of
their squares, in the mean over records, times the square root of their number. Few that are cut to a small part of
themselves, as of a rare outcome, move it as far as many that are cut a little. What is left of their squares is the
curvature only if the model is right: residuals with heavy tails have less of it, and where H is seen to be less that
takes its place. Where records release how many are cut (`Clipped`) a normal of that size is counted as one more noise
of the slope, as what is no line is, and where it would be most of all there is no interval. Elsewhere that bias is not
counted.
How many at most are cut is told where their number N is public: by the same identity the trace of H is
N E[c g'g] = N E[min(g'g, C |g|)], which is at least N C^2 times the share of gradients longer than C, if the model is
right. Sites of PVI are cut as a whole, precision and shift alike: a likelihood to a power below 1, which
is wider.

Without privacy the same regression, of the same totals, tells by how much a diagonal q is too narrow (`widening`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from secure_fvi.algorithms.base import Problem
from secure_fvi.algorithms.kit import on_made
from secure_fvi.algorithms.natural import Natural, quadratic
from secure_fvi.exported import used_operations

#: Global dimensions at most: the curvature has as many squared.
UP_TO = 128
#: Mean over directions of the squared curvature over its error, from which on intervals are given, and the same for
#: each dimension of many. Along broadcasts that are a walk of the noise, of 1 to 60 dimensions and 300 or 1,000 rounds,
#: it was over that in about one of 100 runs; along curvature it grows with the rounds.
LEAST_SEEN, _SEEN_EACH = 12.0, 0.25
#: Largest whole numbers of made records on which it is looked at whether the likelihood is a parabola.
_WHOLES = 1, 2, 3
#: Probability that halves which are alike differ as much, down to which they count as alike.
LEAST_ALIKE = 0.01
#: How far mean broadcasts of the two halves may lie apart, in sds of the second half's, where that moves the slope.
MOST_MOVED = 3.0
#: Probability that as much information as was declared looks as little, down to which it is believed; of so many draws.
LEAST_LIKELY, _CHECKS = 0.01, 400
#: Variance of the slope that gradients which are no line may have, over that of data and noise, up to which they are.
MOST_BENT = 1.0
#: Gradients of a parabola, which are cut: sds of a sum of squares by which totals may be no line; broadcasts' sds over
#: their priors', in the median; and, where totals vary by more than so many times their noise, half of that, and the
#: variance of a record's linear predictor over broadcasts, over that of its own noise.
_NO_LINE, MOST_WANDER, MOST_VARIED, MOST_SWAY = 4.0, 1.0, 2.0, 1.0
#: Standard errors by which what rounds released of the curvature may fall short of the slope of their totals, and by
#: what, over the root of the dimension times that slope's error, it is worse to go by than the slope alone.
_SHORT, _WORSE = 2.33, 0.5
#: Share of records whose gradients are cut, up to which they may be told of from off the mode.
_FEW_CUT = 0.02
#: Share of records whose gradients of a parabola are cut, up to which they count as a line.
MOST_CUT = 0.5
#: Sds of the data by which cuts move the slope, over what `_moved` has of it.
_PULLED = 0.85
#: How much longer than the norm a cut gradient is, in norms; and one that is longer than 2, 4 and 8 times the norm,
#: beside that each time.
_LONGER = 0.4, 1.4, 2.7, 6.0
#: How many times priors' sds may differ where, in more than that share of draws, some direction is untold.
MOST_UNLIKE, _UNTOLD = 4.0, 0.05
#: Why there is none of PVI where the likelihood is no parabola.
NO_PARABOLA = (
    "the likelihood is no parabola, so that the noised sum of the sites of a round, each found around another q than "
    "the last, is not the likelihood's near the end; SFVI counts the noise there"
)
#: Why there is none of totals that no reader could use.
NOT_FINITE = "a broadcast or total is not finite, or too large to square"
#: Why a job without privacy declares no `least_information`.
NO_NOISE = "least_information is for intervals that count the noise of privacy; without privacy leave it out"
#: Why there is none of rounds of which that is seen.
ON_ITS_WAY = (
    "the rounds that are averaged began while the run was still on its way ({}); more iterations, a larger "
    "learning_rate, or a smaller average_last leave the way out"
)
#: Why there is none under a prior that is not.
NOT_NORMAL = (
    "the prior is not normal (in unconstrained space), and where the posterior is no normal stands for it; normal or "
    "log-normal priors are integrated, and others where data tell more than they do"
)
#: Draws of the curvature, in up to so many numbers together, and at least.
_DRAWS, _NUMBERS, _FEWEST = 160, 200_000, 32
#: The power of the likelihood under which they begin, and sweeps there and at its end; the share of draws that is worth
#: something after a step; the least ratio of powers of a step, and one that is none; pairs at most that each dimension
#: is in, in a sweep.
_POWER, _SETTLE, _WORTH, _STEP, _SAME_POWER, _TURNS = 1 / 300, 4, 0.5, 1.05, 1.001, 16
#: Share of noise off the diagonal from which it counts as more; of the most precise entry, up to which one is unseen.
_SPARED, _UNSEEN = 1e-9, 1e-8
_SEED = 20_250_503
#: Of an eigenvalue of H: the least, over the prior's curvature; points of its grid in the logarithm, and around where
#: the likelihood is largest; so many standard errors to either side. And half a normal's central 95%, in sds.
_LEAST, _FAR, _NEAR, _AROUND, _NEARLY, _CENTRAL = 1e-8, 16, 48, 6.0, 0.2, 1.959964
#: Share of the prior's variance from which an interval is mostly the prior's: a bit less than a duplicate's.
_MOSTLY = 0.4
#: The power by which an eigenvalue's prior falls off above what was declared: three in four are within twice that, and
#: on a grid of few points more.
_STEEP = 2.0
#: Rounds a dimension that `widening` asks for, the least eigenvalue of a curvature's correlations, and how many times
#: its expectation what error adds is taken off.
_ROUNDS_EACH, _LEAST_VALUE, _TAKEN_OFF = 3, 1e-8, 4.0


#: Standard errors that the number of records has to be over, for shares of it to be told.
_TOLD = 3.0
#: Of a norm that cuts few: the share that is longer, and that is longer than twice it.
FEW_CUT, FEW_FAR = 0.05, 0.01


class Clipped(NamedTuple):
    """Lengths of records' gradients, from noised counts, in the mean over rounds. Everyone may see it."""

    edges: tuple[float, ...]  # lengths between which records are counted; in the gradients' units
    shares: tuple[float, ...]  # of records in each place, one more than edges
    share: float  # of records whose gradient was cut
    error: float  # its standard error, of the noise
    records: float  # in all, with noise

    @classmethod
    def of(cls, edges: tuple[float, ...], counts: Tensor, variance: float) -> Clipped | None:
        """From noised counts (len(edges) + 1,) of records between the edges, the middle one of which is the norm to
        which gradients are cut; variance: of each count's noise. None: that hides the number of records."""
        records, places, cut = float(counts.sum()), len(counts), len(edges) // 2 + 1
        if not records >= _TOLD * math.sqrt(places * variance):
            return None
        shares, share = (counts / records).clamp(0, 1), float((counts[-cut:].sum() / records).clamp(0, 1))
        error = share_error(share, cut, places) * math.sqrt(variance) / records
        return cls(edges, tuple(shares.tolist()), share, error, records)

    def beyond(self, at: int) -> tuple[float, float]:
        """The share of records longer than that edge, and its standard error. Half of all places are of cut ones."""
        share, places = min(1.0, sum(self.shares[at + 1 :])), len(self.shares)
        return share, self.error * share_error(share, places - at - 1, places) / share_error(
            self.share, places // 2, places
        )

    @property
    def unit(self) -> int:
        """The edge at which gradients are cut."""
        return len(self.edges) // 2

    @property
    def enough(self) -> int | None:
        """The first edge past the norm beyond which few are, as far as counts tell; None: there is none."""
        last = len(self.edges) - 1
        for at in range(self.unit + 1, last + 1):
            far, error = self.beyond(min(at + 1, last))
            if self.beyond(at)[0] <= FEW_CUT and far <= FEW_FAR + 2 * error:
                return at
        return None

    def advice(self, norm: float) -> str:
        """Which clipping norm would cut few, of a run with this one, in words, as far as counts tell."""
        times, at = norm / self.edges[self.unit], self.enough
        if at is None:
            return f"take a longer clipping_norm: some are longer than {times * self.edges[-1]:.3g}"
        error = 2 * self.beyond(at)[1]
        return (
            f"take a clipping_norm of {times * self.edges[at]:.3g}, than which {FEW_CUT:.0%} at most "
            f"(+- {error:.0%}) are longer near where this run ended"
        )


def share_error(share: float, some: int, places: int) -> float:
    """The error of the share that is in `some` of all places, each with noise, in that of one place over all."""
    return math.sqrt(some * (1 - share) ** 2 + (places - some) * share**2)


class NoiseAware(NamedTuple):
    """The posterior of Z_G that counts the noise of privacy (`noise_aware`), a normal. Everyone may see it."""

    mean: Tensor  # (n_global,), float64, in unconstrained space
    covariance: Tensor  # (n_global, n_global)
    without: Tensor  # (n_global, n_global) of the same data, had there been no noise
    error: float  # standard error of the likelihood's curvature, over the curvature
    rounds: int  # that it was learned from
    cut: float = math.nan  # share of records (or silos) whose gradients are cut, at most; NaN: nothing public tells
    hidden: Tensor | None = None  # (n_global,) whether more than 40% of the prior's variance is left
    assumed: float | None = None  # the job's `least_information`, on which it rests
    dropped: float | None = None  # the same where totals rule it out, so that nothing rests on it
    #: Whether what cutting the gradients that `Clipped` tells of may move is counted: not of a likelihood that is a
    #: parabola, where cuts move nothing if residuals are as the model has them, and where they are skewed do.
    pulled: bool = False


class Released(NamedTuple):
    """The curvature that rounds released, H itself and noise: a mean, weighed as in `Trace`. For everyone."""

    weight: float  # 0: none was
    h: Tensor  # (n, n), float64; (0, 0) of a job that releases none
    squares: float  # of its n (n + 1) / 2 numbers about the mean, those off the diagonal twice


class Trace(NamedTuple):
    """Sums over rounds, each weighed by one over its noise's variance. Of broadcasts and totals; for everyone."""

    rounds: int
    weight: float  # of all rounds
    z: Tensor  # (n,) mean broadcast, float64
    g: Tensor  # (n,) mean total
    zz: Tensor  # (n, n) squares of broadcasts about the mean
    gz: Tensor  # (n, n) products, a row a gradient's
    gg: Tensor  # (n,) squares of totals about the mean
    norms: float = math.nan  # records or silos of the last total, times the square of the clipping norm; NaN: unknown
    curved: Released = Released(0.0, torch.zeros(0, 0, dtype=torch.float64), 0.0)


def nothing_seen(n: int, curved: bool = False) -> Trace:
    """Before the first round; n = 0 where nothing will be. curved: rounds will release the curvature as well."""
    vector, square = torch.zeros(n, dtype=torch.float64), torch.zeros(n, n, dtype=torch.float64)
    return Trace(
        0, 0.0, vector, vector, square, square, vector, curved=Released(0.0, square if curved else square[:0, :0], 0.0)
    )


def seen(
    trace: Trace, z: Tensor, g: Tensor, variance: float, norms: float = math.nan,
    h: Tensor | None = None, h_variance: float = 1.0,
) -> Trace:  # fmt: skip
    """With a round more: its broadcast z (n,), its total g (n,), the variance of the noise in each number, and
    `Trace.norms`; h (n, n): the curvature that it released, with noise of that variance on the diagonal and half of it
    off."""
    z, g, one = z.to(trace.z), g.to(trace.g), 1 / variance
    weight = trace.weight + one
    off_z, off_g, share = z - trace.z, g - trace.g, one / weight
    kept = one * (1 - share)
    return Trace(
        trace.rounds + 1,
        weight,
        trace.z + share * off_z,
        trace.g + share * off_g,
        trace.zz + kept * torch.outer(off_z, off_z),
        trace.gz + kept * torch.outer(off_g, off_z),
        trace.gg + kept * off_g.square(),
        norms,
        trace.curved if h is None else _with(trace.curved, h.to(trace.z), 1 / h_variance),
    )


def _with(curved: Released, h: Tensor, one: float) -> Released:
    weight = curved.weight + one
    off, share = h - curved.h, one / weight
    return Released(weight, curved.h + share * off, curved.squares + one * (1 - share) * float(off.square().sum()))


#: By which a number decides what is computed of others.
_DECIDING = frozenset(
    """
    abs amax amin argmax argmin argsort bitwise_and bitwise_not bitwise_or bitwise_xor bucketize ceil clamp clamp_max
    clamp_min cummax cummin eq floor floor_divide fmax fmin fmod frac ge gt hardsigmoid hardswish hardtanh heaviside
    isfinite isinf isnan kthvalue le leaky_relu logical_and logical_not logical_or logical_xor lt masked_fill
    masked_scatter masked_select max maximum median min minimum ne nonzero relu remainder round searchsorted sgn sign
    signbit softshrink sort threshold topk trunc where
    """.split()  # noqa: SIM905
)


def deciding_operations(call: Callable[[], Any]) -> list[str]:
    """The operations that `call` uses by which a number decides what is computed of others: of a log density, where one
    function of the latents passes into another, as between records of two kinds."""
    return sorted({name.removesuffix("_") for name in used_operations(call)[0]} & _DECIDING)


def straight(problem: Problem) -> bool | None:
    """Whether the log-likelihood is a parabola in Z_G, of a model without other latents. None: PyTorch has no second
    derivative of the program.

    Not where a number decides between functions (`deciding_operations`), of which made records may meet one alone, as
    of a censored outcome; nor where it is none for records of other whole numbers, such as a kind."""
    log_p, at = on_made(problem)
    try:
        if quadratic(log_p, at, True, problem.dtype) is None:
            return False
    except RuntimeError:  # NotImplementedError is one
        return None
    whole = any(not dtype.is_floating_point for _, _, dtype in problem.schema.fields)
    if whole and problem.device.type != "cpu":  # where a number past a table's end is no error that one survives
        return False
    return not deciding_operations(lambda: log_p(at)) and all(_bends_nowhere(problem, largest) for largest in _WHOLES)


def _bends_nowhere(problem: Problem, largest: int) -> bool:
    """Whether it is a parabola on made records of whole numbers up to `largest`, or the program takes none of these."""
    log_p, at = on_made(problem, largest)
    try:
        return quadratic(log_p, at, True, problem.dtype) is not None
    except (RuntimeError, IndexError, ValueError):
        return True


class _Told(NamedTuple):
    """What was seen of the curvature H, in a basis of its own."""

    basis: Tensor  # (n, n) orthogonal
    estimate: Tensor  # (n, n) symmetric
    precision: Tensor  # (n, n) of each entry's noise
    strayed: Tensor  # (n,) variance of broadcasts along the basis, times the longest gradient; 0: a line


def of_gradients(
    trace: Trace,
    half: Trace,
    prior: Natural,
    norm: float,
    line: bool = False,
    sampled: bool = False,
    floor: float | None = None,
    cuts: tuple[Clipped, float] | None = None,
) -> NoiseAware | str:
    """The posterior from the trace of noised gradients, `half` that of its first rounds; or why there is none.

    norm: the clipping norm of records (or silos; of these NaN where they are to reach none). line: whether the
    likelihood is a parabola whatever the data. sampled: whether totals are of other records each round. floor: the
    job's `least_information`. cuts: what is told of those that are cut, and the job's clipping norm, of which `norm` is
    what it leaves gradients.
    """
    n = len(trace.z)
    if not all(bool(of.isfinite().all()) for of in (*trace[2:7], trace.curved.h, *half[2:7])):
        return NOT_FINITE
    freedom = n * (trace.rounds - 1) - n * (n + 1) / 2
    if freedom <= 0 or trace.rounds <= n or min(half.rounds, trace.rounds - half.rounds) < 2:
        return f"{trace.rounds} rounds that are averaged are too few for {n} dimensions"
    told, left = _regressed(trace)
    # Minibatches, and gradients that are no lines, leave more than the noise of privacy: never less is counted.
    excess = max(1.0, left / freedom)
    rest = _since(half, trace)
    may_walk = line and min(half.rounds, rest.rounds) > n + 1
    moved = (half.z - rest.z).abs() / (rest.zz.diagonal() / rest.weight).sqrt()
    far = not line and float(moved.max()) > MOST_MOVED
    prior = Natural(*_full(prior))
    if far or max(_alike(half, rest, line) for line in (False, may_walk)) < LEAST_ALIKE:
        return ON_ITS_WAY.format("their two halves differ by more than noise")
    off = 0.0 if sampled else (left - freedom) / math.sqrt(2 * freedom)
    if line and (why := _cut_everywhere(told, trace, prior, norm, freedom, off)):
        return (
            f"broadcasts stray so far that gradients are cut wherever they are ({why}); a smaller learning_rate, "
            'schedule = "cosine" or more records keep them near'
        )
    if _ended(trace, told, prior, excess) < LEAST_ALIKE:  # the mode is found from afar, by the curvature
        many = cuts is None or cuts[0].share - 2 * cuts[0].error > _FEW_CUT
        if many and not math.isnan(norm):
            return ON_ITS_WAY.format(
                "their mean is off the mode by more than they scatter, and gradients are cut there"
            )
        trace = trace._replace(curved=trace.curved._replace(weight=0.0))  # of what rounds release some is cut
    strayed = (0.0 if line else norm) * told.precision.diagonal() / trace.weight
    told = _with_released(told._replace(precision=told.precision / excess, strayed=strayed), trace)
    apart = float((told.estimate.diagonal().square() * told.precision.diagonal()).mean())
    least = max(LEAST_SEEN, _SEEN_EACH * n)
    if apart < least:
        return (
            "the noise hides how curved the likelihood is (squares of the curvature over its standard error are "
            f"{apart:.2g} in the mean, {least:g} at least); more records, a larger epsilon or more rounds, all near "
            "the end, would tell it"
        )
    if line and cuts is not None and cuts[0].share - 2 * cuts[0].error > MOST_CUT:
        return (
            f"gradients of {cuts[0].share:.0%} of records are cut, so that they may be no line over broadcasts; "
            f"{cuts[0].advice(cuts[1])}; or a smaller learning_rate would do"
        )
    cuts = None if line else cuts
    found = _integrated(told, trace.g, trace.z, 1 / trace.weight, excess, prior, trace.rounds, floor, cuts)
    if isinstance(found, str):
        return found
    cut = math.nan if math.isnan(trace.norms) else min(1.0, float(told.estimate.diagonal().sum()) / trace.norms)
    return found._replace(cut=cut, pulled=cuts is not None)


def _ended(trace: Trace, told: _Told, prior: Natural, excess: float) -> float:
    """The probability that the posterior's mean slope is as long if noise and broadcasts' scatter are all of it, as at
    the end of a run."""
    slope = trace.g + prior.shift - prior.precision @ trace.z
    unseen = told.precision < _UNSEEN * told.precision.max()
    curvature = told.basis @ told.estimate.masked_fill(unseen, 0) @ told.basis.mT
    spread = curvature @ trace.zz @ curvature / trace.rounds + excess * torch.eye(len(slope)).to(slope)
    return _over(float(slope @ torch.linalg.solve(spread, slope)) * trace.weight, len(slope))


def _cut_everywhere(told: _Told, trace: Trace, prior: Natural, norm: float, freedom: float, off: float) -> str:
    """Whether broadcasts stray so far that gradients of a parabola, which are cut, are no line; in words, or nothing.
    off: sds by which the line leaves more squares than noise does."""
    if off > _NO_LINE:
        return "totals are no line over them"
    varied = float(trace.gg.sum()) > MOST_VARIED * freedom
    moved = float((told.estimate.diagonal() * told.precision.diagonal()).sum()) / trace.weight
    if varied and (sway := moved * norm**2 / trace.norms) > MOST_SWAY:
        return f"a record's linear predictor moves by {math.sqrt(sway):.2g} sds of its noise"
    wander = (trace.zz.diagonal() / trace.weight / torch.linalg.inv(prior.precision).diagonal()).sqrt().median()
    far = wander > (0.5 * MOST_WANDER if varied else MOST_WANDER)
    return f"half of them move by {wander:.2g} and more of their priors' sds" if far else ""


def _since(half: Trace, whole: Trace) -> Trace:
    """Of the rounds after `half`."""
    weight = whole.weight - half.weight
    z, g = ((whole.weight * of - half.weight * had) / weight for of, had in ((whole.z, half.z), (whole.g, half.g)))
    both, off_z, off_g = half.weight * weight / whole.weight, z - half.z, g - half.g
    zz = whole.zz - half.zz - both * torch.outer(off_z, off_z)
    gz = whole.gz - half.gz - both * torch.outer(off_g, off_z)
    gg = whole.gg - half.gg - both * off_g.square()
    return Trace(whole.rounds - half.rounds, weight, z, g, zz, gz, gg)


def _alike(one: Trace, other: Trace, line: bool) -> float:
    """The probability that totals of two halves differ as much if all that moves their means is the noise; `line`: or
    that the lines fitted to each do, in the gradient where the other's broadcasts are in the mean. Noise is taken for
    what is left in that of the two in which it is less."""
    n, found = len(one.z), []
    for trace in (one, other):
        inverse = torch.linalg.pinv(trace.zz, hermitian=True) if line else torch.zeros_like(trace.zz)
        slope, off = trace.gz @ inverse, other.z - trace.z
        left = float(trace.gg.sum() - (slope * trace.gz).sum()) / (n * (trace.rounds - 1 - n * line))
        found.append((trace.g + slope @ off, 1 / trace.weight + float(off @ inverse @ off), left))
    (here, early, more), (there, late, less) = found
    apart = float((here - there).square().sum()) / ((early + late) * max(1.0, min(more, less)))
    return _over(apart, n)


def _over(square: float, freedom: int) -> float:
    """The probability that chi-squared of such freedom is over that."""
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(square / 2).double()))


def _regressed(trace: Trace) -> tuple[_Told, float]:
    """The symmetric H of least squares, entries' precisions at noise of variance 1, and the squares that it leaves."""
    weights, basis = torch.linalg.eigh(trace.zz)
    weights = weights.clamp(min=0)
    slope = -(basis.mT @ trace.gz @ basis)
    both = weights + weights.unsqueeze(-1)
    estimate, precision = (slope + slope.mT) / both.clamp(min=1e-300), both.clone()
    estimate.diagonal().copy_(slope.diagonal() / weights.clamp(min=1e-300))
    precision.diagonal().copy_(weights)
    whole = basis @ estimate @ basis.mT
    left = float(trace.gg.sum()) + 2 * float((whole * trace.gz).sum()) + float((whole @ trace.zz * whole).sum())
    return _Told(basis, estimate, precision, torch.zeros_like(weights)), left


def _with_released(told: _Told, trace: Trace) -> _Told:
    """With the curvature that rounds released, unless the slope of totals shows more of it, and by more than that is
    uncertain itself: much of what was released is cut then. Minibatches leave more than its noise there too."""
    weight, h, squares = trace.curved
    if weight == 0:
        return told
    n = len(h)
    sure = weight / max(1.0, squares / ((trace.rounds - 1) * n * (n + 1) / 2)) * (2 - torch.eye(n).to(h))
    precision, also = told.precision + sure, told.basis.mT @ h @ told.basis
    both = (told.precision * sure / precision).tril()  # one over the variance of their difference, each number once
    size = float((both * also.square()).sum())
    short = float((both * also * (told.estimate - also)).sum()) / size if size else 0.0  # of it, as a share
    if short > max(_SHORT / math.sqrt(size or 1.0), _WORSE * math.sqrt(n) * _error(told)):
        return told
    return told._replace(estimate=(told.precision * told.estimate + sure * also) / precision, precision=precision)


def widening(trace: Trace, sd: Tensor, prior: Tensor) -> Tensor | None:
    """(n,) by how many times the normal posterior of the same curvature is wider than the best diagonal q, whose sds
    are those given all other dimensions; at least 1. None: the rounds do not tell. sd: q's, (n,), a scale alone.
    prior: its curvature (n, n). It follows from broadcasts and totals; everyone may see it.

    What random entries of the curvature, as large as the regression's error, would seem to add is taken off.
    """
    n, sd = len(sd), sd.to(trace.z)
    freedom = n * (trace.rounds - 1) - n * (n + 1) / 2
    if trace.rounds < _ROUNDS_EACH * n or freedom <= 0:
        return None
    over, times = torch.outer(sd, sd).reciprocal(), torch.outer(sd, sd.reciprocal())
    scaled = trace._replace(zz=trace.zz * over, gz=trace.gz * times, gg=trace.gg * sd.square())
    told, left = _regressed(scaled)
    whole = told.basis @ told.estimate @ told.basis.mT + prior.to(sd) / over
    size = whole.diagonal()
    if not (size > 0).all():
        return None
    error = max(left, 0.0) / freedom * float(told.precision.diagonal().reciprocal().mean()) / float(size.mean()) ** 2
    values, vectors = torch.linalg.eigh(whole / torch.outer(size, size).sqrt())
    # A direction that the error hides is no narrower than it: what is told is too little there.
    values = values.clamp(min=max(math.sqrt(n * error), _LEAST_VALUE))
    ratio = (vectors.square() / values).sum(1)
    return (ratio - _TAKEN_OFF * n * error).clamp(min=1).sqrt()


def of_sites(total: Natural, variance: float, prior: Natural, floor: float | None = None) -> NoiseAware | str:
    """The posterior from the noised sum of all sites (n + n (n + 1) / 2 numbers). floor: `least_information`."""
    n = total.n
    if not bool(total.pack().isfinite().all()):
        return NOT_FINITE
    at = torch.zeros(n, dtype=torch.float64)
    told = _Told(torch.eye(n).double(), total.precision, torch.full((n, n), 1 / variance).double(), at)
    return _integrated(told, total.shift, at, variance, 1.0, Natural(*_full(prior)), 1, floor)


def _full(prior: Natural) -> tuple[Tensor, Tensor]:
    return prior.shift, prior.precision if prior.full else torch.diag(prior.precision)


def _error(told: _Told) -> float:
    """The standard error of H along a direction, root mean square, over H's mean; infinite where that is not over 0."""
    inside = told.precision.diagonal()
    size = float((told.estimate.diagonal() * inside).sum() / inside.sum())
    return float(inside.reciprocal().mean().sqrt()) / size if size > 0 else math.inf


def _ruled_out(told: _Told, floor: float) -> bool:
    """Whether what was seen of H rules out that it is `floor` at least along every direction.

    Where it is, the least eigenvalue of what was seen, less that floor, is no less than that of the noise (Weyl).
    Entries are weighed so that all of the diagonal have noise of variance 1.
    """
    seen = (told.precision.diagonal() > _UNSEEN * told.precision.max()).nonzero().squeeze(1)
    at = torch.meshgrid(seen, seen, indexing="ij")
    sizes, weights = told.precision[at].rsqrt(), torch.outer(*2 * [told.precision.diagonal()[seen].pow(0.25)])
    off = (told.estimate[at] - floor * torch.eye(len(seen)).to(sizes)) * weights
    noise = _normals((_CHECKS, len(seen), len(seen)), np.random.default_rng(_SEED)) * sizes * weights
    as_low = torch.linalg.eigvalsh(noise)[:, 0] <= torch.linalg.eigvalsh(off)[0]
    return float(as_low.double().mean()) < LEAST_LIKELY


def _lost(clipped: Clipped) -> float:
    """What cuts take off gradients, in norms, in the mean over records. Of those that are longer than 2, 4 and 8 times
    the norm, as far as these are more than two standard errors, each time: few are, and of none noise would make some.
    """
    lost = _LONGER[0] * math.sqrt(max(0.0, clipped.share**2 - clipped.error**2))
    for at, more in enumerate(_LONGER[1:], clipped.unit + 1):
        far, error = clipped.beyond(at)
        if far <= 2 * error:
            break
        lost += more * far
    return lost


def _moved(clipped: Clipped, trace: Tensor | None = None) -> Tensor:
    """Sds of the data by which cut gradients may move the slope, as if what is cut lay on one side of one direction; of
    curvatures with traces (K,), each, or () of that which gradients have if the model is right."""
    unit, lost = clipped.unit, _lost(clipped)
    norm, whole = clipped.edges[unit], itertools.pairwise([0.0, *clipped.edges[: unit + 1]])
    left = sum(s * ((low + high) / 2 / norm) ** 2 for s, (low, high) in zip(clipped.shares, whole, strict=False))
    squares = torch.tensor(left + clipped.share + lost, dtype=torch.float64)
    if trace is not None:
        squares = torch.minimum(squares, trace / (clipped.records * norm**2))
    return _PULLED * lost * (clipped.records / squares.clamp(min=1e-300)).sqrt()


def _integrated(
    told: _Told,
    g: Tensor,
    at: Tensor,
    variance: float,
    excess: float,
    prior: Natural,
    rounds: int,
    floor: float | None,
    cuts: tuple[Clipped, float] | None = None,
) -> NoiseAware | str:
    """g (n,) is s - H at, with noise of `variance` times 1 + (excess - 1) H / (mean of H's eigenvalues). cuts: what is
    told of gradients whose cuts may move s, and the job's clipping norm."""
    dropped = floor if floor is not None and _ruled_out(told, floor) else None
    floor = floor if dropped is None else None
    values, vectors = _curvatures(told, float(prior.precision.diagonal().mean()), floor or 0.0)
    curvatures = torch.linalg.eigvalsh(prior.precision)
    unlike, untold = float(curvatures[-1] / curvatures[0]) ** 0.5, (values.amin(1) < curvatures[0]).double().mean()
    if unlike > MOST_UNLIKE and untold > _UNTOLD:
        return (
            f"the noise hides some direction, and priors' sds differ by {unlike:.2g} times ({MOST_UNLIKE:g} at most "
            "then); columns of one scale with priors alike would do, or more records, a larger epsilon or more rounds"
        )
    drawn, vectors = _made(vectors, values), told.basis @ vectors
    spread = variance * (1 + (excess - 1) * values / values.mean(1, keepdim=True).clamp(min=1e-300))
    strayed = _bent(drawn, told.strayed)
    moved = torch.zeros_like(strayed) if cuts is None else _moved(cuts[0], values.sum(1)).square()
    bent = (strayed + moved).unsqueeze(1) * values
    share = float(bent.mean() / (values + spread).mean())
    if not share <= MOST_BENT and cuts is not None and float(moved.mean()) > float(strayed.mean()):
        return (
            "so many records' gradients are cut, or may be by the noised count of them, that means may be off by more "
            f"than data and noise leave open; {cuts[0].advice(cuts[1])}"
        )
    if not share <= MOST_BENT:
        return (
            "broadcasts stray so far that totals may be no line over them "
            f"(which may move the slope by {math.sqrt(share):.2g} of its sds by data and noise); a smaller "
            'learning_rate, schedule = "cosine" or more records keep them near'
        )
    spread = spread + bent
    gain = values / (values + spread)
    information = prior.precision + _made(vectors, gain * values)
    curved = _made(vectors, values)
    pull = (_made(vectors, gain) @ (g + curved @ at).unsqueeze(-1)).squeeze(-1)
    covariances = torch.linalg.inv(information)
    # Around the prior's centre; and, of what is no parabola, around the broadcasts'.
    centres = [prior.shift, prior.precision @ at][: 1 + bool(told.strayed.any())]
    means, *others = [(covariances @ (centre + pull).unsqueeze(-1)).squeeze(-1) for centre in centres]
    off = means - means.mean(0)
    covariance = covariances.mean(0) + off.mT @ off / len(drawn)
    sds = covariances.diagonal(dim1=1, dim2=2).sqrt()
    lows, highs = zip(*(_central(each, sds) for each in (means, *others)), strict=True)
    low, high = torch.stack(lows).amin(0), torch.stack(highs).amax(0)
    mean, sd = 0.5 * (low + high), (high - low) / (2 * _CENTRAL)
    times = sd / covariance.diagonal().sqrt()
    covariance = covariance * torch.outer(times, times)
    without = torch.linalg.inv(prior.precision + curved).mean(0)
    most = _MOSTLY * torch.linalg.inv(prior.precision).diagonal()
    hidden = covariance.diagonal() > most
    covariance, without = _symmetric(covariance), _symmetric(without)
    return NoiseAware(mean, covariance, without, _error(told), rounds, hidden=hidden, assumed=floor, dropped=dropped)


def _bent(drawn: Tensor, strayed: Tensor) -> Tensor:
    """(K,) variance of the slope by gradients that are no line, at most, over the curvature, of draws of it."""

    def fourth(of: Tensor) -> Tensor:  # moment of the length of a normal of that covariance
        return of.diagonal(dim1=1, dim2=2).sum(1).square() + 2 * of.square().sum((1, 2))

    size, root = drawn.diagonal(dim1=1, dim2=2).sum(1).clamp(min=0), strayed.sqrt()
    return size * fourth(drawn * torch.outer(root, root)) / (4 * drawn.shape[1] * fourth(drawn).clamp(min=1e-300))


def _made(vectors: Tensor, values: Tensor) -> Tensor:
    """Matrices (K, n, n) of these eigenvectors, as columns, and eigenvalues (K, n)."""
    return (vectors * values.unsqueeze(1)) @ vectors.mT


def _symmetric(matrix: Tensor) -> Tensor:
    return 0.5 * (matrix + matrix.mT)


def _curvatures(told: _Told, prior: float, floor: float = 0.0) -> tuple[Tensor, Tensor]:
    """Draws of H's posterior, in told's basis: eigenvalues (K, n) and eigenvectors (K, n, n). prior: its curvature.
    floor: H's least eigenvalue is declared to be no less.

    Sequential Monte Carlo (Del Moral, Doucet and Jasra 2006): from the likelihood to a small power, under which any
    direction may be one of no curvature, to the likelihood itself, at each power some sweeps of Gibbs' sampler. One
    chain at the likelihood would stay with the directions that it began with.
    """
    n, rng = len(told.estimate), np.random.default_rng(_SEED)
    # What no broadcast moved along is taken for none.
    unseen = told.precision < _UNSEEN * told.precision.max()
    precision = torch.where(unseen, told.precision.new_tensor(prior**-2), told.precision)
    told = told._replace(estimate=told.estimate.masked_fill(unseen, 0), precision=precision)
    most = float((told.estimate.diagonal() + _AROUND * told.precision.diagonal().rsqrt()).max())
    least = _Least(max(floor, _least(prior, most)), _STEEP if floor else 0.0)
    many, power = max(_FEWEST, min(_DRAWS, _NUMBERS // n**2)), _POWER
    noise = _normals((many, n, n), rng) / (power * told.precision).sqrt()
    values, vectors = torch.linalg.eigh(told.estimate + noise)
    values = values.clamp(min=least.value)
    for _ in range(_SETTLE):
        values, vectors = _swept(told, power, least, values, vectors, rng)
    while power < 1:
        off = _made(vectors, values) - told.estimate
        fits = -0.5 * (told.precision * off.square()).triu().sum((1, 2))
        power, weights = _raised(fits, power)
        at = (torch.arange(many) + float(rng.random())) / many
        kept = torch.searchsorted(weights.cumsum(0), at.to(weights)).clamp(max=many - 1)
        values, vectors = _swept(told, power, least, values[kept], vectors[kept], rng)
    for _ in range(_SETTLE):
        values, vectors = _swept(told, power, least, values, vectors, rng)
    return values, vectors


class _Least(NamedTuple):
    """Where the prior of an eigenvalue ends, and by what power of it the prior falls off faster than 1 / v."""

    value: float
    steep: float


def _least(prior: float, most: float) -> float:
    """The least eigenvalue. most: the largest that may be; where nothing is known three quarters of what is between, in
    the logarithm, are less than the prior's curvature."""
    return prior * min(_LEAST, (prior / most) ** 3)


def _raised(fits: Tensor, power: float) -> tuple[float, Tensor]:
    """The next power, and draws' weights (K,), of which a share `_WORTH` is still worth something."""

    def weights(to: float) -> Tensor:
        return ((to - power) * fits).softmax(0)

    low, high = min(1.0, _STEP * power), 1.0
    while high / low > _SAME_POWER:
        middle = math.sqrt(low * high)
        enough = 1 / float(weights(middle).square().sum()) >= _WORTH * len(fits)
        low, high = (middle, high) if enough else (low, middle)
    return high, weights(high)


def _swept(
    told: _Told, power: float, least: _Least, values: Tensor, vectors: Tensor, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Draws after a sweep of Gibbs' sampler, of the likelihood to that power.

    With W = diag(weight) the logarithm of a regression's likelihood is tr(H B) - tr(H W H) / 2, a sum over eigenvectors
    u of v u'Bu - v^2 u'Wu / 2. So each eigenvalue v is normal, times its prior, and the angle by which two eigenvectors
    turn in their plane is von Mises', twice. Where entries off the diagonal have more noise than that (sums of sites),
    a normal for each takes the rest off: exp(s x^2 / 2) is the mean of exp(x sqrt(s) y) over normal y.
    """
    n, weight = vectors.shape[-1], told.precision.diagonal()
    both = weight + weight.unsqueeze(-1)
    linear, spare = 0.5 * both * told.estimate, (both - told.precision).fill_diagonal_(0).clamp(min=0)
    if bool((spare > _SPARED * both).any()):
        off = _made(vectors, values) - told.estimate
        linear = linear + 0.5 * (spare * off + (spare / power).sqrt() * _normals(off.shape, rng))
    turned = linear @ vectors  # B u, which turns with u: by these, entries of u'Bu and u'Wu are sums of products
    quadratic = (weight.unsqueeze(-1) * vectors.square()).sum(1)
    values = _values(power * quadratic, power * (vectors * turned).sum(1), least, rng)
    # Draws last, for numbers that are read together lie together; before them a number of each pair's, and after it the
    # other's, both with their B u.
    v, every = values.mT.contiguous(), torch.stack([vectors, turned]).permute(3, 0, 2, 1).contiguous()
    first, second = _pairings(n, rng)[:, :_TURNS].unbind()
    weight = weight.unsqueeze(-1)
    for i, j in zip(first, second, strict=True):
        a, b = every[i], every[j]
        less, more = 0.5 * (v[i].square() - v[j].square()), v[j] - v[i]
        (u, bu), (w, bw) = a.unbind(1), b.unbind(1)
        across = less * ((u - w) * (u + w) * weight).sum(1) + more * (u * bu - w * bw).sum(1)
        along = less * (u * w * weight).sum(1) + more * (u * bw).sum(1)
        middle, sure = torch.atan2(-along, -0.5 * across), power * torch.hypot(0.5 * across, along)
        angle = 0.5 * torch.from_numpy(rng.vonmises(middle.numpy(), sure.numpy()))
        cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
        every[i], every[j] = (cos * a).addcmul_(sin, b), (cos * b).addcmul_(sin, a, value=-1)
    return values, every[:, 0].permute(2, 1, 0)


def _pairings(n: int, rng: np.random.Generator) -> Tensor:
    """(2, rounds, pairs): all pairs of n, in rounds of a tournament in random order; each round's are of different
    numbers."""
    seats = rng.permutation(n + n % 2)
    turns, places = rng.permutation(len(seats) - 1), np.arange(len(seats) - 1)
    ring = seats[1 + (places - turns[:, None]) % len(places)]
    ring = np.concatenate([np.full((len(turns), 1), seats[0]), ring], 1)
    pairs = np.stack([ring, ring[:, ::-1]])[:, :, : len(seats) // 2]
    present = np.broadcast_to((pairs < n).all(0), pairs.shape)  # of an odd number one rests in each round
    return torch.from_numpy(pairs[present].reshape(2, len(turns), n // 2))


def _values(precision: Tensor, linear: Tensor, end: _Least, rng: np.random.Generator) -> Tensor:
    """Draws (K, n) of numbers with density exp(linear v - precision v^2 / 2) v^(-1 - steep) from the least on, on a
    grid each: of logarithms up to where the exponent begins to matter, and from there even."""
    least, steep = end
    at, error = linear / precision, precision.rsqrt()
    # Where the likelihood is largest below `least`, it falls off from there, by as much, within this.
    up = at.clamp(min=0)
    most = (up + torch.hypot((least - up).clamp(min=0), _AROUND * error)).unsqueeze(-1)
    near = torch.maximum(at - _AROUND * error, _NEARLY * error).clamp(min=least).unsqueeze(-1)
    low, high = (torch.linspace(0, 1, points, dtype=torch.float64) for points in (_FAR + 1, _NEAR))
    lows, highs = low[:-1] * (2 - low[:-1]) * (near / least).log() + math.log(least), near + (most - near) * high
    grid, log = torch.cat([lows.exp(), highs], -1), torch.cat([lows, highs.log()], -1)
    width = torch.cat([log[..., 1:2] - log[..., :1], log[..., 2:] - log[..., :-2], log[..., -1:] - log[..., -2:-1]], -1)
    fits = -0.5 * (grid - at.unsqueeze(-1)).square() * precision.unsqueeze(-1) - steep * log
    under = (width * (fits - fits.amax(-1, keepdim=True)).exp()).cumsum(-1)
    chosen = torch.searchsorted(under, torch.from_numpy(rng.random((*at.shape, 1))) * under[..., -1:])
    return grid.gather(-1, chosen.clamp(max=grid.shape[-1] - 1)).squeeze(-1)


def _normals(shape: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    """Symmetric matrices (K, n, n)."""
    drawn = torch.from_numpy(rng.standard_normal(shape))
    return drawn.triu() + drawn.triu(1).mT


def _central(means: Tensor, sds: Tensor) -> tuple[Tensor, Tensor]:
    """Ends (n,) of the central 95% of mixtures of normals (K, n), to a thousandth of the narrowest."""
    ends = []
    for share in (0.025, 0.975):
        low, high = (means - 10 * sds).amin(0), (means + 10 * sds).amax(0)
        for _ in range(math.ceil(math.log2(max(1.0, float(((high - low) / sds.amin(0)).max())))) + 10):
            middle = 0.5 * (low + high)
            under = torch.special.ndtr((middle - means) / sds).mean(0) < share
            low, high = torch.where(under, middle, low), torch.where(under, high, middle)
        ends.append(0.5 * (low + high))
    return ends[0], ends[1]
