"""What an audit is made of: what the adversary sees, the attack, the score; and the row that they end in.

An audit that finds nothing says something only if it would have found what is there. So each comes with a positive
control, the same attack where the protection is missing, which it must catch, and a negative control, the same attack
on targets that the run never met, which it must not. A row whose controls fail is invalid; no row is ever "safe".
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy.typing as npt
from scipy.stats import norm

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.audits.transcript import Transcript
from secure_fvi.errors import InputError

#: Of the interval of every score, two-sided.
CONFIDENCE = 0.95
#: Of the intervals by which negative controls are judged: they are many, and each false alarm costs a row.
CONTROL_CONFIDENCE = 0.999

Groups = npt.NDArray[Any]


class Knowledge(Protocol):
    """What an adversary makes of what it sees: one row of numbers a silo, in the order of `transcript.silos`."""

    def __call__(self, transcript: Transcript) -> FloatArray: ...


class Estimate(NamedTuple):
    """A score with a confidence interval."""

    value: float
    low: float
    high: float

    def above(self, nothing: float) -> bool:
        """Whether the whole interval lies above what guessing gives."""
        return self.low > nothing


class Control(NamedTuple):
    """One control's score, and what was attacked."""

    estimate: Estimate
    what: str
    power: float | None = None  # of a positive control: probability that an audit of this size catches it


class Scored(NamedTuple):
    """What an attack that tells two kinds apart was right about."""

    truth: FloatArray  # (B,) 1 and 0
    scores: FloatArray  # (B,) large where it seems to be 1


@dataclass(frozen=True)
class AuditRow:
    """One line of audit.json. `low` and `high` bound the score with `CONFIDENCE`."""

    attack: str
    protection: str
    score: str
    value: float
    low: float
    high: float
    positive_control: float
    negative_control: float
    valid: bool
    finding: Literal["leaks", "nothing found", "invalid"]
    nothing: float  # the score of guessing
    detail: dict[str, Any] = field(default_factory=dict)
    scored: Scored | None = field(default=None, repr=False)  # of single records or runs: in exports alone

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "scored"}


def judge(
    attack: str,
    protection: str,
    score: str,
    estimate: Estimate,
    positive: Control,
    negative: Control,
    nothing: float = 0.0,
    scored: Scored | None = None,
    **detail: Any,
) -> AuditRow:
    """The row of an audit. Valid if the positive control lies above `nothing` and the negative one does not.

    `positive` is at `CONFIDENCE`, `negative` at `CONTROL_CONFIDENCE`.
    """
    caught, false_alarm = positive.estimate.above(nothing), negative.estimate.above(nothing)
    valid = caught and not false_alarm
    leaks = estimate.above(nothing)
    if positive.power is None:
        positive = positive._replace(power=_power(positive.estimate, nothing))
    detail |= {
        "positive_control": _described(positive, caught),
        "negative_control": _described(negative, false_alarm),
    }
    if not valid:
        detail["why_invalid"] = (
            "the attack reports a leak where there is none"
            if false_alarm
            else "the attack is too weak: it misses the same leak without protection; give it more worlds or rounds"
        )
    return AuditRow(
        attack,
        protection,
        score,
        *estimate,
        positive.estimate.value,
        negative.estimate.value,
        valid,
        "invalid" if not valid else "leaks" if leaks else "nothing found",
        nothing,
        detail,
        scored,
    )


def _power(estimate: Estimate, nothing: float) -> float:
    """Probability that an audit of this size finds what the interval's lower end says, by a normal approximation."""
    z = float(norm.ppf((1 + CONFIDENCE) / 2))
    sd = (estimate.high - estimate.low) / (2 * z)
    return float(norm.sf(z - (estimate.low - nothing) / sd)) if sd > 0 else float(estimate.low > nothing)


def _described(control: Control, caught: bool) -> dict[str, Any]:
    power = {} if control.power is None else {"power": control.power}
    low, high = control.estimate[1:]
    return {"what": control.what, "low": low, "high": high, "caught": caught, **power}


def check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise InputError(f"confidence must lie in (0, 1), not {confidence}")
