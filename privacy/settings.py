"""What a user asks for: differential privacy for a record or for a silo, and where its noise is added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from secure_fvi.errors import InputError
from secure_fvi.options import Count, Fraction, Inside, Positive, Whole, check

Placement = Literal["distributed", "silo", "server"]
Unit = Literal["record", "silo"]
#: Norms and bounds lie between these, so that no square, quotient or step of them leaves double precision.
_LEAST, _MOST = 1e-30, 1e30
#: Noise, over the clipping norm: less covers nothing at all, more leaves nothing, and neither can be accounted for.
_LEAST_NOISE, _MOST_NOISE = 1e-12, 1e12
#: Longest step of the logarithm of an adaptive clipping norm, in a round that found all contributions on one side.
_MOST_RATE = 10.0


@dataclass(frozen=True, kw_only=True)
class DP:
    """What both units have in common. Adjacency: one unit added or removed.

    Give `epsilon`, and the noise is calibrated for the whole job, or give `noise_multiplier`, the standard deviation
    of the noise over `clipping_norm`. noise: "distributed" (each silo adds a Skellam share inside the ring; needs
    a masked or homomorphic sum), "silo" (each adds all of it), "server" (the trusted aggregator adds it).
    dropouts: silos that a round may lose; with distributed noise a sum with fewer survivors is refused.
    colluders: silos whose noise the adversary may know. retries: sums beyond the rounds, for what is abandoned or lost
    to a crash and made again; they are charged like any other.
    """

    epsilon: Positive | None = None
    delta: Inside = 1e-5
    noise_multiplier: Positive | None = None
    clipping_norm: Positive = 1.0
    noise: Placement = "distributed"
    dropouts: Whole = 0
    colluders: Whole = 1
    retries: Whole = 20

    unit: ClassVar[Unit]  # who is protected; each subclass says

    def __post_init__(self) -> None:
        check(self)
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise InputError("give either epsilon, for the whole job, or noise_multiplier")
        _check_scale("clipping_norm", self.clipping_norm)
        if self.noise_multiplier is not None:
            _check_scale("noise_multiplier", self.noise_multiplier, _LEAST_NOISE, _MOST_NOISE)


def exact_totals(privacy: DP | None) -> bool:
    """Whether the server sees totals without noise: there is none, or it is what the server adds to what leaves it."""
    return privacy is None or privacy.noise == "server"


def check_device(privacy: DP | None, device: object) -> None:
    """Raise InputError for record privacy on a GPU: that records do not move each other's numbers was tested on CPUs
    alone, and the claim rests on it."""
    if isinstance(privacy, RecordDP) and str(device).startswith("cuda"):
        raise InputError(
            "record privacy with device = 'cuda': that a record moves no other record's numbers there was not tested, "
            "and a claim of epsilon rests on it; use the CPU"
        )


def _check_scale(name: str, value: float, least: float = _LEAST, most: float = _MOST) -> None:
    if not least <= value <= most:
        raise InputError(f"{name} must lie in [{least:g}, {most:g}], not {value}")


@dataclass(frozen=True, kw_only=True)
class RecordDP(DP):
    """The unit is a record with its own latent variables: a row of the data, or all rows that the model's group calls
    one (`FederatedModel.group`, the record of a formula); an individual where that is what it stands for.

    objective_share: share of the squared sensitivity spent on releasing the bound (0: it is not released), of which
    each record's term is cut to +- objective_bound nats. public_counts: the numbers of records are declared
    public and travel without noise; otherwise nobody is told them. linked: records of one person at most, in one silo
    or in several; epsilon and delta are then of all of them, whoever has fewer being covered as well.
    """

    objective_share: Fraction = 0.0
    objective_bound: Positive = 10.0
    public_counts: bool = False
    linked: Count = 1

    unit: ClassVar[Unit] = "record"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_scale("objective_bound", self.objective_bound)


@dataclass(frozen=True, kw_only=True)
class SiloDP(DP):
    """The unit is a silo with everything in it: each whole contribution is clipped.

    target_quantile: the clipping norm follows this quantile of the contributions' norms (Andrew et al. 2021), from
    `clipping_norm` on, by steps of `quantile_rate` in its logarithm; `quantile_share` of the squared sensitivity
    pays for counting the contributions below it. None keeps the norm fixed.
    """

    target_quantile: Inside | None = None
    quantile_rate: Positive = 0.2
    quantile_share: Fraction = 0.1

    unit: ClassVar[Unit] = "silo"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantile_rate > _MOST_RATE:
            raise InputError(f"quantile_rate must be at most {_MOST_RATE:g}, not {self.quantile_rate}")
        if self.target_quantile is not None and self.quantile_share == 0:
            raise InputError("an adaptive clipping norm needs a quantile_share above 0 to be paid from")
