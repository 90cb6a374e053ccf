"""Federated averaging (McMahan et al. 2017, Algorithm 1): a point estimate, by local steps and averages.

    server:  sends w, the global latents (unconstrained) and theta
    silo:    takes `local_steps` gradient steps from w on its own mean log posterior, contributes N_j x the change
    server:  adds the weighted mean of the changes to w, by SGD with momentum

A silo's objective is F_j = (sum_i log p(y_i | w) + (N_j / N) log p(w)) / N_j, so that sum_j (N_j / N) F_j is the log
posterior over N: with one local step a round this is gradient ascent on it, and where silos agree more steps come to
its maximum too. Where they do not, more local steps settle elsewhere (docs/fedavg.md). The maximum is taken in the
unconstrained space, log Jacobians included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from secure_fvi.algorithms.schedules import Schedule, check_schedule
from secure_fvi.disclosure import Declaration, Sums, drawn
from secure_fvi.errors import InputError

if TYPE_CHECKING:
    from secure_fvi.algorithms.base import Problem
    from secure_fvi.algorithms.fedavg_server import FedAvgServer
    from secure_fvi.algorithms.fedavg_silo import FedAvgSilo

#: Phases. COUNT once, before the first round, where N is needed; AVERAGE every round.
COUNT, AVERAGE = "count", "average"


@dataclass(frozen=True)
class FedAvg:
    """Configuration.

    rounds: at most; the run ends when an average change is below `tolerance`: its largest element, over
    learning_rate x local_steps where that is below 1, so that a small rate alone is no convergence.
    learning_rate: of local gradient steps on the mean log posterior of a record. server_learning_rate and
    server_momentum: of the server's step along the average change; server_schedule: how its rate falls over `rounds`,
    as SFVI's. prior: False leaves log p(w) out (maximum likelihood). weights: of a silo in the average, its number of
    records, or 1. sampling_rate: each record joins a local step with this probability. participation: share of silos
    asked a round. total_records: N, where it is public; otherwise it is counted by one more secure sum, if the prior
    needs it. bound: largest absolute value of any element of a contribution.
    """

    rounds: int = 500
    local_steps: int = 10
    learning_rate: float = 0.1
    server_learning_rate: float = 1.0
    server_momentum: float = 0.0
    server_schedule: Schedule = "constant"
    tolerance: float = 1e-4
    prior: bool = True
    weights: Literal["records", "equal"] = "records"
    sampling_rate: float = 1.0
    participation: float = 1.0
    total_records: int | None = None
    bound: float = 2.0**30

    name = "fedavg"
    importance_samples = 1
    without_prior = "prior = False"

    def __post_init__(self) -> None:
        check_counts(self, "rounds", "local_steps", "total_records")
        check_positive(self, "learning_rate", "server_learning_rate", "bound")
        for option in ("sampling_rate", "participation"):
            if not 0 < getattr(self, option) <= 1:
                raise InputError(f"{option} must lie in (0, 1], not {getattr(self, option)}")
        check_server(self)

    @property
    def most_rounds(self) -> int:
        return self.rounds

    @property
    def expected_calls(self) -> int:
        return self.rounds * (self.local_steps + 1)

    @property
    def reach(self) -> float:
        """How far the local steps of a round may come, of a whole step."""
        return min(1.0, self.learning_rate * self.local_steps)

    def declare(self, silos: int, private: bool) -> Declaration:
        sums = averaged_sums(self, silos, private)
        share = 1 - (1 - self.sampling_rate) ** self.local_steps
        return Declaration(self.rounds, sums, "nothing", False, share, f"participation = {self.participation:g}")

    def server(self, problem: Problem) -> FedAvgServer:
        """The server's half. Raises InputError for what the model or its privacy do not allow."""
        from secure_fvi.algorithms.fedavg_frame import FedAvgFrame
        from secure_fvi.algorithms.fedavg_server import FedAvgServer

        return FedAvgServer(FedAvgFrame(self, problem))

    def silo(self, problem: Problem) -> FedAvgSilo:
        """The silos' half; it holds no data, so that all silos of a process share its traces."""
        from secure_fvi.algorithms.fedavg_silo import FedAvgSilo

        return FedAvgSilo(self, problem)


def averaged_sums(config: Any, silos: int, private: bool) -> tuple[Sums, ...]:
    """The sums of what averages changes: a count where N is needed and not public, then a round each."""
    what = "the change of its own copy of the point, times its weight, its part of the objective, its number of records"
    sums = (Sums(AVERAGE, config.rounds, what, *drawn(silos, config.participation)),)
    if config.prior and config.total_records is None and not private:
        return (Sums(COUNT, 1, "its number of records", silos), *sums)
    return sums


def check_counts(config: Any, *options: str) -> None:
    """Raise InputError for an option that is no whole number of at least 1, or that is None and may not be."""
    for option in options:
        value = getattr(config, option)
        if not (value is None and option == "total_records") and (type(value) is not int or value < 1):
            raise InputError(f"{option} must be a whole number of at least 1, not {value!r}")


def check_positive(config: Any, *options: str) -> None:
    """Raise InputError for an option that is not a positive number."""
    for option in options:
        if not 0 < getattr(config, option) < math.inf:
            raise InputError(f"{option} must be positive and finite, not {getattr(config, option)}")


def check_server(config: Any) -> None:
    """Raise InputError for a bad weighting, momentum, schedule or tolerance."""
    if config.weights not in ("records", "equal"):
        raise InputError(f"weights '{config.weights}' is unknown; choose records or equal")
    if not 0 <= config.server_momentum < 1:
        raise InputError(f"server_momentum must lie in [0, 1), not {config.server_momentum}")
    check_schedule("server_schedule", config.server_schedule)
    if not 0 <= config.tolerance < math.inf:
        raise InputError(f"tolerance must be at least 0 and finite, not {config.tolerance}")
