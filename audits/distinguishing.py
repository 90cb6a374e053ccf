"""A game on one record: which of two values did this individual take?

The adversary knows everything but one record and the silos' secrets: the model, every other record, and that the one in
question is either the first candidate or the second. A fair coin decides; the run is made with fresh secrets; the
adversary looks at what the server saw and guesses. It has learnt to guess on runs that it made itself. Under
(epsilon, delta)-differential privacy for adding or removing a record no adversary can win by more than `bound`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.audits.base import CONFIDENCE, CONTROL_CONFIDENCE, Attack, AuditRow, Control, Estimate, Knowledge, judge
from secure_fvi.audits.scores import advantage, auc, power_of_advantage, tpr_at_fpr
from secure_fvi.audits.worlds import Data, Laboratory
from secure_fvi.errors import InputError


@dataclass(frozen=True)
class Game:
    """The silos, which record is in question, and its two candidates (one row each)."""

    silos: tuple[Data, ...]
    silo: int
    record: int
    candidates: tuple[Data, Data]

    def world(self, which: int) -> list[Data]:
        """The silos with candidate `which` in place."""
        changed = {name: values.clone() for name, values in self.silos[self.silo].items()}
        for name, value in self.candidates[which].items():
            changed[name][self.record] = value[0]
        return [changed if j == self.silo else dict(data) for j, data in enumerate(self.silos)]


@dataclass(frozen=True)
class Plays:
    """Runs of a game: by what the adversary may look at, its features, and how the coins fell."""

    features: dict[str, FloatArray]  # (T, D) each
    coins: FloatArray  # (T,) of 0 and 1
    played: int  # the first so many are the adversary's own, the rest are guessed at

    def shuffled(self) -> Plays:
        """The same runs with coins that were tossed again: nothing can be guessed. For negative controls."""
        again = np.random.default_rng(4).integers(0, 2, len(self.coins)).astype(np.float64)
        return Plays(self.features, again, self.played)


def play(
    laboratory: Laboratory,
    game: Game,
    seeds: Iterable[int],
    looks: dict[str, Knowledge],
    own: float = 0.5,
    each: Callable[[], None] = lambda: None,
) -> Plays:
    """One run a seed; the share `own` of them the adversary may learn from. The coins follow the seeds."""
    coins: list[float] = []
    seen: dict[str, list[FloatArray]] = {name: [] for name in looks}
    for seed in seeds:
        coin = int(np.random.default_rng([seed, 1]).integers(2))
        transcript = laboratory.run(game.world(coin), seed).transcript
        place = transcript.silos.index(f"silo-{game.silo + 1}")
        for name, look in looks.items():
            seen[name].append(look(transcript)[place])
        coins.append(float(coin))
        each()
    if len(coins) < 20:
        raise InputError(f"{len(coins)} runs of a game say little; play at least 20")
    return Plays({name: np.stack(rows) for name, rows in seen.items()}, np.array(coins), round(own * len(coins)))


@dataclass(frozen=True)
class Guessed:
    """How an attack did on the runs it had not learnt from."""

    truth: FloatArray
    scores: FloatArray
    right: int

    @property
    def trials(self) -> int:
        return len(self.truth)

    def advantage(self, confidence: float = CONFIDENCE) -> Estimate:
        return advantage(self.right, self.trials, confidence)


def guess(attack: Attack, plays: Plays, look: str) -> Guessed:
    """Scores above 1/2 are guesses for the second candidate."""
    x, k = plays.features[look], plays.played
    scores = attack(x[:k], plays.coins[:k], x[k:])
    truth = plays.coins[k:]
    return Guessed(truth, scores, int(((scores > 0.5) == (truth > 0.5)).sum()))


def bound(epsilon: float, delta: float) -> float:
    """The largest advantage in this game under (epsilon, delta) for adding or removing a record.

    The game replaces one, which is a removal and an addition: (2 epsilon, (1 + e^epsilon) delta), and under (e, d) no
    test has an advantage above (e^e - 1 + 2 d) / (e^e + 1) (Kairouz et al. 2015).
    """
    if epsilon > 300:
        return 1.0
    twice, failing = 2 * epsilon, (1 + math.exp(epsilon)) * delta
    return min(1.0, (math.expm1(twice) + 2 * failing) / (math.exp(twice) + 1))


def rows(
    attack: Attack, protection: str, plays: Plays, unprotected: Plays, fpr: float = 0.1, **detail: Any
) -> list[AuditRow]:
    """Advantage for each way to look at the runs, with AUC and the true-positive rate at `fpr` in the detail.

    `unprotected`: the same game under plain sums, whose `messages` are the positive control of every way to look.
    """
    strongest = guess(attack, unprotected, "messages and totals")
    caught = strongest.advantage()
    power = power_of_advantage(caught, strongest.trials)
    nothing = guess(attack, unprotected.shuffled(), "messages and totals").advantage(CONTROL_CONFIDENCE)
    out = []
    for look in plays.features:
        found = guess(attack, plays, look)
        area = auc(found.truth, found.scores, found.truth)
        rate = tpr_at_fpr(found.truth, found.scores, fpr).rate
        more = {"trials": found.trials, "auc": list(area), f"tpr_at_fpr_{fpr:g}": list(rate), **detail}
        out.append(
            judge(
                f"which of two values, by {attack.name}: {look}",
                protection,
                "advantage",
                found.advantage(),
                Control(caught, "the same game under plain sums, from messages and totals", power),
                Control(nothing, "plain sums, with the coins tossed again"),
                **more,
            )
        )
    return out
