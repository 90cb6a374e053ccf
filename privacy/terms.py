"""What a job releases and how it is protected, in numbers that all parties derive alike before the first round.

One number, the clipping norm, sets the blocks' bounds, the noise, the sensitivity and the ledger's event, so that
they cannot disagree. With distributed noise everything happens on a lattice of `resolution` steps a clipping norm:
clipped sums are rounded to it, Skellam shares are integers, and the ring adds exactly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from secure_fvi.aggregation.base import Block, BlockTable, FloatArray
from secure_fvi.errors import InputError
from secure_fvi.privacy.events import Event, Gaussian, PoissonSampled, Repeated, Skellam
from secure_fvi.privacy.settings import DP, RecordDP, SiloDP

if TYPE_CHECKING:
    from secure_fvi.privacy.gate import NoiseSource

#: Records of one silo in one batch up to which a sum is never cut; a larger one is cut coordinate by coordinate.
_CAPACITY = 2.0**20
#: Standard deviations of noise that a block has room for beyond the sum. Past them lie 1e-900 of all draws.
_ROOM = 64.0
#: Binary logarithm of the noise's standard deviation in lattice steps: fine enough that rounding costs little, coarse
#: enough that Poisson draws of half its square are exact in double precision.
_NOISE_BITS = 17
#: Binary logarithm of the finest lattice; many silos' sums of it are still exact integers.
_FINEST_BITS = 24
#: Share of the clipping norm that is left to what a sum rounds before the server adds its noise.
_ROUNDED = 2.0**-12
#: How far an adaptive norm may fall where the server adds the noise: what a sum rounds stays as it is.
_LEAST_AT_SERVER = 2.0**-8
#: What neighbouring data sets differ in.
ADD_OR_REMOVE, REPLACE = "add or remove one", "replace one"
#: Block of the side coordinate by what it counts.
OBJECTIVE, BELOW_NORM = "objective", "below_norm"


class Extent(NamedTuple):
    """The coordinates of one release."""

    shared: int  # summed over silos
    hidden: int  # gradients of silo-level latents: noised like the others, never sent
    side: int  # 1 where the objective or the count below the norm is released


@dataclass(frozen=True)
class Terms:
    """The terms of a job. Public: they go to the ledger and the report."""

    settings: DP
    noise_multiplier: float  # sd of the noise that is counted on, over the clipping norm
    sampling_rate: float
    rounds: int
    cohort: int  # silos asked in a round
    extent: Extent
    resolution: int  # lattice steps a clipping norm; 0 off the lattice
    adjacency: str = ADD_OR_REMOVE
    record: str = "one row of the data"  # what one record is, in words
    #: Noised sums of which a release is made, which then has no noise of its own; 0: it is a noised sum itself.
    steps: int = 0

    @property
    def releases(self) -> int:
        return self.rounds + self.settings.retries

    @property
    def honest(self) -> int:
        """Silos whose noise the guarantee counts on."""
        return self.cohort - self.settings.dropouts - self.settings.colluders

    @property
    def dimension(self) -> int:
        return sum(self.extent)

    @property
    def event(self) -> Event:
        """One release."""
        one = self._sum
        return Repeated(one, self.steps) if self.steps else one

    @property
    def job(self) -> Event:
        """All releases that may be made."""
        return Repeated(self._sum, self.releases * max(1, self.steps))

    @property
    def _sum(self) -> Gaussian | Skellam | PoissonSampled:
        """One noised sum."""
        mechanism = _mechanism(self.noise_multiplier, self.resolution, self.dimension, linked_by(self.settings))
        return mechanism if self.sampling_rate == 1 else PoissonSampled(self.sampling_rate, mechanism)

    @property
    def side_share(self) -> float:
        """Share of the squared clipping norm that the side coordinate has."""
        settings = self.settings
        if not self.extent.side:
            return 0.0
        return settings.objective_share if isinstance(settings, RecordDP) else _silo(settings).quantile_share

    @property
    def side_bound(self) -> float:
        """Largest absolute value of one unit's side coordinate, in its own units: nats, or half a count."""
        return self.settings.objective_bound if isinstance(self.settings, RecordDP) else 0.5

    def norms(self, clip: float) -> tuple[float, float]:
        """Clipping norms of the gradient and of the side coordinate; their squares add up to that of what one unit may
        move: clip, less what the sum may round where noise is added after it."""
        most = clip * (1 - _ROUNDED) if self.rounded_before_noise else clip
        return most * math.sqrt(1 - self.side_share), most * math.sqrt(self.side_share)

    @property
    def rounded_before_noise(self) -> bool:
        """Whether a sum's own rounding is of what has no noise yet, so that it adds to what one unit moves."""
        return self.settings.noise == "server"

    def check_rounding(self, steps: FloatArray) -> None:
        """Raise InputError where a sum of these `steps` (size,), by element, rounds more before the server's noise than
        the clipping norm leaves room for: a unit moves each element by up to a step more than by itself. And where it
        is off by more than the noise, as CKKS's is, by a share of each bound: nothing counts that."""
        noised = steps[: self.extent.shared + self.extent.side]
        if float(noised.max(initial=0.0)) > self.noise_multiplier * (self.resolution or self.settings.clipping_norm):
            raise InputError(
                "these sums are off by more than the noise that privacy asks for, which no interval counts: use "
                "scheme = 'bfv', masked sums, or bits = 64"
            )
        if self.rounded_before_noise and math.sqrt(float(noised @ noised)) > _ROUNDED * self._least_norm:
            raise InputError(
                "noise = 'server': these sums round what they add up, before any noise, by more than the clipping norm "
                "leaves room for; use bits = 64 or scheme = 'bfv', or noise = 'silo'"
            )

    def step(self, clip: float) -> float:
        """What one unit of a released number stands for."""
        return clip / self.resolution if self.resolution else 1.0

    @property
    def share_variance(self) -> float:
        """Variance of one silo's Skellam share, in squared lattice steps."""
        return (self.noise_multiplier * self.resolution) ** 2 / self.honest

    @property
    def full_variance(self) -> float:
        """Variance of the noise that hidden coordinates get at the silo alone, in squared lattice steps."""
        return (self.noise_multiplier * self.resolution) ** 2

    def variance(self, survivors: int, clip: float) -> float:
        """Of the noise in each number of a total of `survivors` silos, in natural units."""
        placed = {"distributed": survivors / max(self.honest, 1), "silo": survivors, "server": 1}[self.settings.noise]
        return placed * (self.noise_multiplier * clip) ** 2

    @property
    def room(self) -> float:
        """Largest sum, before noise, that a block of `table` holds, in released units."""
        records = _CAPACITY if self.settings.unit == "record" else 1.0
        return records * (self.resolution or self._largest_norm)

    @property
    def adaptive(self) -> bool:
        """Whether the clipping norm follows a quantile."""
        return isinstance(self.settings, SiloDP) and self.settings.target_quantile is not None

    @property
    def _largest_norm(self) -> float:
        return self.settings.clipping_norm * (_CAPACITY if self.adaptive else 1.0)

    @property
    def _least_norm(self) -> float:
        if not self.adaptive:
            return self.settings.clipping_norm
        return self.settings.clipping_norm * (_LEAST_AT_SERVER if self.rounded_before_noise else 1 / _CAPACITY)

    def table(self, blocks: Sequence[Block], public: Sequence[Block]) -> BlockTable:
        """The blocks of a release: `blocks` and the side coordinate, clipped and noised, then what is public."""
        bound = self.room + _ROOM * max(1.0, self.noise_multiplier) * (self.resolution or self._largest_norm)
        noised = [*blocks, *([Block(self.side_name, (), 1.0)] if self.extent.side else [])]
        out = [replace(b, bound=float(math.ceil(bound)), integer=self.resolution > 0) for b in noised]
        shown = public if isinstance(self.settings, RecordDP) and self.settings.public_counts else ()
        return BlockTable((*out, *shown))

    @property
    def side_name(self) -> str:
        return OBJECTIVE if isinstance(self.settings, RecordDP) else BELOW_NORM

    def in_clear(self, values: FloatArray, clip: float) -> FloatArray:
        """A total in natural units. Its first coordinates were noised, those after them are public."""
        noised = self.extent.shared + self.extent.side
        out = values.copy()
        out[:noised] *= self.step(clip)
        if self.extent.side:
            out[noised - 1] *= self.side_bound / self.norms(clip)[1]
        return out

    def clips_to(self, clip: float) -> bool:
        """Whether a server may name this clipping norm: one that `next_clip` can arrive at. In others floating point
        has no room: a step of the lattice that is 0 would make whatever is divided by it as large as it can be."""
        return self._least_norm <= clip <= self.settings.clipping_norm * _CAPACITY

    def next_clip(self, below: float, cohort: int, clip: float) -> float:
        """The next clipping norm, from the noisy count below it less half the cohort."""
        settings = _silo(self.settings)
        if settings.target_quantile is None:
            return clip
        quantile = min(max(below / cohort + 0.5, 0.0), 1.0)
        moved = clip * math.exp(-settings.quantile_rate * (quantile - settings.target_quantile))
        largest = settings.clipping_norm * _CAPACITY
        return min(max(moved, self._least_norm), largest)


def _silo(settings: DP) -> SiloDP:
    assert isinstance(settings, SiloDP)
    return settings


def linked_by(settings: DP) -> int:
    """How many units change together at most, for all of which the guarantee is."""
    return settings.linked if isinstance(settings, RecordDP) else 1


def _mechanism(noise_multiplier: float, resolution: int, dimension: int, linked: int) -> Gaussian | Skellam:
    """A release, of which `linked` records move what each moves alone at most, wherever they are: norms add up."""
    if not resolution:
        return Gaussian(noise_multiplier / linked)
    # Rounding the sum moves each coordinate of a difference by less than one step.
    l2 = resolution + math.sqrt(dimension)
    l1 = min(math.sqrt(dimension) * l2, l2 * l2)
    return Skellam((noise_multiplier * resolution) ** 2, linked * l1, linked * l2)


def _resolution(noise_multiplier: float) -> int:
    return int(2 ** min(max(0, math.floor(_NOISE_BITS - math.log2(noise_multiplier))), _FINEST_BITS))


@functools.lru_cache(maxsize=64)
def agree(settings: DP, cohort: int, sampling_rate: float, rounds: int, extent: Extent, steps: int = 0) -> Terms:
    """The terms of a job over `cohort` silos a round. Raises InputError where they give no guarantee."""
    honest = cohort - settings.dropouts - settings.colluders
    distributed = settings.noise == "distributed"
    if distributed and honest < 1:
        raise InputError(
            f"distributed noise needs an honest survivor: of {cohort} silos, {settings.dropouts} may drop out "
            f"and {settings.colluders} may collude; add silos, or use noise = 'silo'"
        )
    rate = sampling_rate if settings.unit == "record" else 1.0
    releases, linked = (rounds + settings.retries) * max(1, steps), linked_by(settings)
    if linked > 1 and rate < 1:
        raise InputError(
            f"linked = {linked} with sampling_rate = {rate:g}: how many of a person's records are in a batch differs, "
            "for which the ledger has no bound but that of groups; leave linked out, and take epsilon and delta from "
            "`secure-fvi budget plan --linked`, or use sampling_rate = 1"
        )

    def job(noise_multiplier: float, resolution: int) -> Event:
        mechanism = _mechanism(noise_multiplier, resolution, sum(extent), linked)
        return Repeated(mechanism if rate == 1 else PoissonSampled(rate, mechanism), releases)

    noise, resolution = settings.noise_multiplier, 0
    if noise is None:
        from secure_fvi.privacy.accounting import solve_noise

        assert settings.epsilon is not None
        # By the ledger's own filter: a job for epsilon fits a budget of epsilon, and a plan says what will be charged.
        noise = solve_noise(lambda z: job(z, 0), settings.epsilon, settings.delta)
        if distributed:
            fine = resolution = _resolution(noise)
            noise = solve_noise(lambda z: job(z, fine), settings.epsilon, settings.delta)
    elif distributed:
        resolution = _resolution(noise)
    if distributed and noise * resolution > 2.0 ** (_NOISE_BITS + 0.5):
        raise InputError(
            f"distributed noise of {noise:.3g} clipping norms is past what shares can be drawn for, {2**_NOISE_BITS}: "
            "Poisson numbers that large have no last digits, and totals would show the data's; ask for a larger "
            "epsilon, or use noise = 'silo'"
        )
    return Terms(settings, noise, rate, rounds, cohort, extent, resolution, steps=steps)


# ---- What a job guarantees, as `result.json` and the row of a job in the ledger state it ----


def description(by_phase: Mapping[str, Terms], noise: NoiseSource) -> dict[str, Any]:
    """How the noise is made, in numbers of the first phase: for the ledger's job row and the report."""
    terms = next(iter(by_phase.values()))
    settings = terms.settings
    distributed = settings.noise == "distributed"
    public = ["number of silos", "silos that answered"]
    by_record = settings.unit == "record" and terms.adjacency == ADD_OR_REMOVE
    if isinstance(settings, RecordDP) and settings.public_counts:
        public.append("number of records")
    return {
        "adjacency": terms.adjacency,
        **({"record": terms.record} if by_record else {}),
        **({"linked_records": linked_by(settings)} if linked_by(settings) > 1 else {}),
        "noise": settings.noise,
        "mechanism": "skellam" if terms.resolution else "gaussian",
        "noise_multiplier": terms.noise_multiplier,
        "clipping_norm": settings.clipping_norm,
        "clipping": "adaptive" if terms.adaptive else "fixed",
        "sampling_rate": terms.sampling_rate,
        "rounds": terms.rounds,
        "releases": sum(t.releases for t in by_phase.values()),
        **({"steps": terms.steps} if terms.steps else {}),
        "silos_counted_on": terms.honest if distributed else 1,
        "colluders": settings.colluders if distributed else 0,
        "dropouts": settings.dropouts,
        "public": public,
        "rng": noise.status,
    }
