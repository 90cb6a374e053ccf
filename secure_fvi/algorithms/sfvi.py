"""Structured federated variational inference (Hassan et al. 2023, Algorithm 1): one secure sum a round.

    server:  draws eps_G, sends Z_G, d = Z_G - mu_G and theta
    silo:    draws eps_L, takes a step on its own eta_L, contributes gradients in Z_G, d and theta
    server:  adds L0 = log p(Z_G) / q(Z_G), pulls the total back through f_G, takes a step on eta_G and theta

The result does not depend on how records are spread over silos. The paper's Algorithm 1 writes the silo's term with
p(y | ...); it is p(y, Z_L | Z_G) / q(Z_L | Z_G), and the server's L0 enters its own step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from secure_fvi.algorithms.options import SCHEDULES, check_schedule
from secure_fvi.disclosure import Declaration, Sums, drawn
from secure_fvi.errors import InputError
from secure_fvi.families import Amortised, Conditional
from secure_fvi.optimizers import Optimizer

if TYPE_CHECKING:
    from secure_fvi.algorithms.base import Problem, ServerProgram, SiloProgram
    from secure_fvi.algorithms.sfvi_avg import SFVIAvg

#: The phase after the last round of a run that stops by itself: all silos at the final q.
FINISH = "finish"
_EXPECTED_ROUNDS = 5_000  # of a run that stops by itself


@dataclass(frozen=True)
class WarmStart:
    """Rounds of SFVI-Avg, of `local_steps` each, before the first round of SFVI (Hassan et al. 2023, S3.2).

    rounds: 0 for none. weights and total_records as in `SFVIAvg`; all else follows SFVI's own options.
    """

    rounds: int = 0
    local_steps: int = 1000
    weights: Literal["records", "equal"] = "records"
    total_records: int | None = None

    def __post_init__(self) -> None:
        if type(self.rounds) is not int or self.rounds < 0:
            raise InputError(f"warm_start.rounds must be a whole number of at least 0, not {self.rounds!r}")


@dataclass(frozen=True)
class SFVI:
    """Configuration. With every option at its default a model of moderate size converges and stops by itself.

    family: q(Z_G), "auto" is full up to 256 dimensions and diagonal above. importance_samples: K; 1 is the ELBO.
    iterations: rounds to run; None runs until the rule of `stopping` is met, at most max_iterations.
    schedule: of the learning rate over `iterations`, a name or a function of the share done; needs `iterations`.
    average_last: with `iterations` set, the share of last iterates that is averaged (0 keeps the last one).
    sampling_rate: each record joins a round with this probability. participation: share of silos asked a round.
    bound: largest absolute value of any element of a contribution; past it a silo refuses.
    local_learning_rate: of a silo's own latents; None is learning_rate. In minibatches, where a record's distribution
    takes a step only when the record is drawn, a larger one lets it keep up.
    start_spread: q(Z_G)'s mean begins at the prior's centre plus draws of this sd that all parties share, for hidden
    units and topics, which are all alike at the centre.
    warm_start: rounds of SFVI-Avg beforehand; they are not counted in iterations.
    """

    family: Literal["auto", "diagonal", "full", "low_rank"] = "auto"
    rank: int = 8
    importance_samples: int = 1
    iterations: int | None = None
    max_iterations: int = 30_000
    optimizer: str = "adam"
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float = 0.05
    local_learning_rate: float | None = None
    start_spread: float = 0.0
    schedule: str | Callable[[float], float] = "constant"
    average_last: float = 0.25
    sampling_rate: float = 1.0
    participation: float = 1.0
    bound: float = 2.0**30
    local_family: Conditional | Amortised = field(default_factory=Conditional)
    silo_family: Conditional = field(default_factory=Conditional)
    warm_start: WarmStart = field(default_factory=WarmStart)

    name = "sfvi"

    def __post_init__(self) -> None:
        if self.family not in ("auto", "diagonal", "full", "low_rank"):
            raise InputError(f"family '{self.family}' is unknown; choose auto, diagonal, full or low_rank")
        for option, least in (
            ("rank", 1),
            ("importance_samples", 1),
            ("iterations", 1),
            ("max_iterations", 1),
        ):
            value = getattr(self, option)
            if not (value is None and option == "iterations") and (type(value) is not int or value < least):
                raise InputError(f"{option} must be a whole number of at least {least}, not {value!r}")
        for option in ("sampling_rate", "participation"):
            if not 0 < getattr(self, option) <= 1:
                raise InputError(f"{option} must lie in (0, 1], not {getattr(self, option)}")
        if not 0 <= self.average_last <= 1:
            raise InputError(f"average_last must lie in [0, 1], not {self.average_last}")
        if isinstance(self.schedule, str):
            check_schedule("schedule", self.schedule)
        if self.schedule != "constant" and self.iterations is None:
            raise InputError("a learning-rate schedule needs `iterations`; without it the stopping rule sets the rate")
        Optimizer(self.optimizer, self.learning_rate, self.optimizer_options)
        if self.local_learning_rate is not None and not 0 < self.local_learning_rate < math.inf:
            raise InputError(f"local_learning_rate must be positive and finite, not {self.local_learning_rate}")
        if not 0 <= self.start_spread < math.inf:
            raise InputError(f"start_spread must be finite and not negative, not {self.start_spread}")
        if not (math.isfinite(self.bound) and self.bound > 0):
            raise InputError(f"bound must be positive and finite, not {self.bound}")
        if self.warm_start.rounds:
            self.averaging()

    @property
    def own_rounds(self) -> int:
        """At most, those of a warm start aside."""
        return self.iterations or self.max_iterations

    @property
    def most_rounds(self) -> int:
        return self.warm_start.rounds + self.own_rounds

    @property
    def expected_calls(self) -> int:
        before = self.averaging().expected_calls if self.warm_start.rounds else 0
        return before + (self.iterations or _EXPECTED_ROUNDS)

    def multiplier(self, round_: int) -> float:
        """Of the learning rate in a run of fixed length."""
        schedule = SCHEDULES[self.schedule] if isinstance(self.schedule, str) else self.schedule
        return float(schedule(round_ / self.own_rounds))

    def averaging(self) -> SFVIAvg:
        """The warm start as an algorithm. Raises InputError for what SFVI-Avg refuses."""
        from secure_fvi.algorithms.sfvi_avg import SFVIAvg

        return SFVIAvg(
            rounds=self.warm_start.rounds,
            local_steps=self.warm_start.local_steps,
            importance_samples=self.importance_samples,
            family=self.family,  # type: ignore[arg-type]  # it refuses the one that it lacks
            weights=self.warm_start.weights,
            tolerance=0.0,  # so that it makes all its rounds
            optimizer=self.optimizer,
            optimizer_options=self.optimizer_options,
            learning_rate=self.learning_rate,
            local_learning_rate=self.local_learning_rate,
            start_spread=self.start_spread,
            sampling_rate=self.sampling_rate,
            participation=self.participation,
            total_records=self.warm_start.total_records,
            bound=self.bound,
            local_family=self.local_family,
            silo_family=self.silo_family,
        )

    def declare(self, silos: int, private: bool) -> Declaration:
        from secure_fvi.algorithms.base import ROUND_PHASE

        what = "gradients of its part of the bound, in the global latents and the model's parameters, and that part"
        what += "; its number of records"
        own = Sums(ROUND_PHASE, self.own_rounds, what, *drawn(silos, self.participation))
        before = self.averaging().declare(silos, private).sums if self.warm_start.rounds else ()
        sums = (*(s for s in before if s.phase != FINISH), own)
        if not private and self.iterations is None:
            from secure_fvi.algorithms.weighing import DISCLOSED

            sums = (*sums, Sums(FINISH, 1, f"{DISCLOSED}; its number of records", silos))
        because = f"participation = {self.participation:g}"
        return Declaration(self.most_rounds, sums, "its own latents' posterior", False, self.sampling_rate, because)

    def server(self, problem: Problem) -> ServerProgram:
        """The server's half. Raises InputError for what the model or its privacy do not allow."""
        from secure_fvi.algorithms.sfvi_server import SFVIServer
        from secure_fvi.algorithms.sfvi_warm import WarmServer

        return WarmServer(self, problem) if self.warm_start.rounds else SFVIServer(self, problem)

    def silo(self, problem: Problem) -> SiloProgram:
        """The silos' half; it holds no data, so that all silos of a process share its traces."""
        from secure_fvi.algorithms.sfvi_silo import SFVISilo
        from secure_fvi.algorithms.sfvi_warm import WarmSilo

        return WarmSilo(self, problem) if self.warm_start.rounds else SFVISilo(self, problem)
