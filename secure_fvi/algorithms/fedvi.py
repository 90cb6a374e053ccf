"""FedVI (Vedadi et al. 2023): many small clients, a hierarchical model, and inference of what is a client's own.

    theta ~ t,    beta_k ~ r,    y_ik ~ l(y | f(theta, beta_k, x_ik))                                         (1)

    server:  sends theta to clients drawn for the round
    client:  E epochs of minibatches, each cut in two: q(beta_k | x of the support, theta), by the model's encoder, is
             what the labels of the query are predicted with; contributes n_k and n_k x the change of theta
    server:  SGD with momentum along the mean change

A step of client k is on the objective of equation (8) a record,

    mean over the query of E_q[-log l(y_i | f(theta, beta, x_i))] + tau / n_k KL(q(beta) || r) + gamma / N KL(q || t)

so that tau = gamma = 1 is the ELBO upper bound, and gamma = 0 the paper's flat prior on theta. A client keeps nothing
between rounds: a new one infers beta from its own unlabelled records. docs/fedvi.md says what each party sees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from secure_fvi.algorithms.fedavg import averaged_sums, check_counts, check_positive, check_server
from secure_fvi.algorithms.schedules import Schedule
from secure_fvi.disclosure import Declaration
from secure_fvi.errors import InputError

if TYPE_CHECKING:
    from secure_fvi.algorithms.base import Problem
    from secure_fvi.algorithms.fedvi_server import FedVIServer
    from secure_fvi.algorithms.fedvi_silo import FedVISilo


@dataclass(frozen=True)
class FedVI:
    """Configuration.

    rounds: of which each asks a share `participation` of the clients. epochs and batch_size: of local training; a batch
    is half support, half query. learning_rate: of local gradient steps on the objective a record, nats.
    server_learning_rate and server_momentum: of the server's step along the mean change; server_schedule: how its rate
    falls over `rounds`, as SFVI's.
    tau, gamma: weights of the local and the global regulariser. theta: "point", or "gaussian" for a posterior with
    independent elements that starts with standard deviation `start_scale`.
    weights: of a client in the mean, n_k, or 1. total_records: N for gamma above 0, where it is public; otherwise it is
    counted by one more secure sum. tolerance: a round whose mean change is below it, an element and a whole step, ends
    the run. bound: largest absolute value of any element of a contribution.
    """

    rounds: int = 500
    epochs: int = 1
    batch_size: int = 256
    learning_rate: float = 0.05
    server_learning_rate: float = 1.0
    server_momentum: float = 0.9
    server_schedule: Schedule = "constant"
    participation: float = 1.0
    tau: float = 1e-3
    gamma: float = 0.0
    theta: Literal["point", "gaussian"] = "point"
    start_scale: float = 0.01
    weights: Literal["records", "equal"] = "records"
    total_records: int | None = None
    tolerance: float = 0.0
    bound: float = 2.0**30

    name = "fedvi"
    importance_samples = 1
    without_prior = "gamma = 0"

    def __post_init__(self) -> None:
        if self.theta not in ("point", "gaussian"):
            raise InputError(f"theta '{self.theta}' is unknown; choose point or gaussian")
        check_counts(self, "rounds", "epochs", "batch_size", "total_records")
        check_positive(self, "learning_rate", "server_learning_rate", "start_scale", "bound")
        check_server(self)
        if self.batch_size < 2:
            raise InputError("batch_size must be at least 2: one record for the support, one for the query")
        if not 0 < self.participation <= 1:
            raise InputError(f"participation must lie in (0, 1], not {self.participation}")
        for option in ("tau", "gamma"):
            if not 0 <= getattr(self, option) < math.inf:
                raise InputError(f"{option} must be at least 0 and finite, not {getattr(self, option)}")

    @property
    def prior(self) -> bool:
        """Whether theta's prior counts."""
        return self.gamma > 0

    @property
    def reach(self) -> float:
        """How far a local step may come, of a whole one."""
        return min(1.0, self.learning_rate)

    @property
    def most_rounds(self) -> int:
        return self.rounds

    @property
    def expected_calls(self) -> int:
        return max(1, round(self.rounds * self.epochs * self.participation))

    def declare(self, silos: int, private: bool) -> Declaration:
        because = f"participation = {self.participation:g}"
        return Declaration(self.rounds, averaged_sums(self, silos, private), "nothing", because=because)

    def server(self, problem: Problem) -> FedVIServer:
        """The server's half. Raises InputError for what the model or its privacy do not allow."""
        from secure_fvi.algorithms.fedvi_server import FedVIServer

        return FedVIServer(self, problem)

    def silo(self, problem: Problem) -> FedVISilo:
        """The clients' half; it holds no data, so that all clients of a process share its traces."""
        from secure_fvi.algorithms.fedvi_silo import FedVISilo

        return FedVISilo(self, problem)
