"""SFVI-Avg (Hassan et al. 2023, Algorithm 2): many local steps, then a Wasserstein average, in a few secure sums.

    server:  sends eta_G and theta
    silo:    fits its own copy of (eta_G, theta) and its eta_L, as if the other records were like its own
    server:  the W2 barycenter of the silos' q(Z_G), the mean of their theta, from one total

Each silo maximises L0 + (N / N_j) L_j. The paper scales log p(y_j, Z_Lj | Z_G) but not -log q(Z_Lj | Z_G), which runs
off in models with record-level latents; here all of L_j is scaled (`scale_entropy`). However many rounds it takes,
the result stays approximate: it averages posteriors of silos (docs/sfvi-avg.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.disclosure import Declaration, Sums, drawn
from secure_fvi.errors import InputError
from secure_fvi.families import Amortised, Conditional
from secure_fvi.optimizers import TRACEABLE

if TYPE_CHECKING:
    from secure_fvi.algorithms.base import Problem
    from secure_fvi.algorithms.sfvi_avg_server import SFVIAvgServer
    from secure_fvi.algorithms.sfvi_avg_silo import SFVIAvgSilo

#: Phases. COUNT once, before the first round; MERGE, and BURES where asked for, every round; FINISH once.
COUNT, MERGE, BURES, FINISH = "count", "merge", "bures", "finish"
#: Draws of Z_G at which silos estimate their part of the bound at the q(Z_G) that they were sent: before and after all
#: rounds, and in each round, where it shows how a run goes and costs as much as so many steps.
BOUND_DRAWS, ROUND_DRAWS = 16, 4
#: The learning rate falls to this share of itself within a round.
LEAST_RATE = 0.1
#: The learning rate falls from round to round once a merge has moved q by less than SETTLED, in posterior sds, and
#: either by less than SHRINKING times the longest of the last WATCHED, or these together by less than the longest.
SETTLED, SHRINKING, WATCHED = 1.0, 0.1, 3
#: Rounds at falling rates that a run does at least.
REFINED = 4


def bound_draws(phase: str) -> int:
    """At how many draws of Z_G the bound is estimated in a phase."""
    return ROUND_DRAWS if phase == MERGE else BOUND_DRAWS


@dataclass(frozen=True)
class SFVIAvg:
    """Configuration. With every option at its default a model of moderate size stops by itself, or says it has not.

    rounds: at most. local_steps: a silo's steps a round. The first rounds go far. Once merges move q by less than
    SETTLED, and no longer at an even pace one way, the learning rate falls by the factor `decay` from round to round:
    silos stray less from each other, and with that the error of averaging falls. The run ends after REFINED such
    rounds when a merge moves q by less than `tolerance`: the largest of the moves of its means in posterior sds, of its
    log sds, and of theta relative to 1 + |theta|. Within a round the rate falls linearly to a tenth.
    importance_samples: K; 1 is the ELBO. family: of q(Z_G); "auto" is full up to 256 dimensions, diagonal above.
    weights: of a silo in the merge, its number of records or 1, as in the paper. scale_entropy: False leaves the
    entropy of the silo's own latents unscaled, which is the paper's text, for comparison. bures_iterations: secure sums
    a round for the barycenter of full covariances; one is enough, since the next round goes on where it ended.
    barycenter: "secure" takes it from totals; "trusted" shows the server each silo's own q(Z_G) and number of records,
    and needs a plain sum.
    sampling_rate: each record joins a local step with this probability. average_last: share of a round's last iterates
    that a silo averages. persistent: silos keep their optimisers' state from round to round. participation: share of
    silos asked a round. total_records: N, where it is public; otherwise it is counted by one more secure sum. bound:
    largest absolute value of any element of a contribution. local_learning_rate and start_spread as in `SFVI`.
    final_local_steps: after the last merge, a silo's steps on its own latents alone, whose fit otherwise is to its own
    copy of q(Z_G): they cost no exchange. Silos' weights of their own (personal networks) gain much by it.
    """

    rounds: int = 20
    local_steps: int = 2000
    importance_samples: int = 1
    family: Literal["auto", "diagonal", "full"] = "auto"
    weights: Literal["records", "equal"] = "records"
    scale_entropy: bool = True
    tolerance: float = 0.1
    bures_iterations: int = 1
    barycenter: Literal["secure", "trusted"] = "secure"
    optimizer: str = "adam"
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float = 0.05
    local_learning_rate: float | None = None
    start_spread: float = 0.0
    decay: float = 0.2
    average_last: float = 0.5
    persistent: bool = True
    sampling_rate: float = 1.0
    participation: float = 1.0
    total_records: int | None = None
    bound: float = 2.0**30
    final_local_steps: int = 0
    local_family: Conditional | Amortised = field(default_factory=Conditional)
    silo_family: Conditional = field(default_factory=Conditional)

    name = "sfvi-avg"

    def __post_init__(self) -> None:
        family: str = self.family
        if family == "low_rank":
            raise InputError(
                "family 'low_rank' has no barycenter: that of low-rank Gaussians is not low rank; "
                "choose auto, diagonal or full, or the algorithm sfvi"
            )
        if self.weights not in ("records", "equal"):
            raise InputError(f"weights '{self.weights}' is unknown; choose records or equal")
        if self.barycenter not in ("secure", "trusted"):
            raise InputError(f"barycenter '{self.barycenter}' is unknown; choose secure or trusted")
        if self.reveals_silos and self.bures_iterations != 1:
            raise InputError("a trusted barycenter is taken at once; leave bures_iterations at 1")
        for option in ("rounds", "local_steps", "bures_iterations", "total_records"):
            value = getattr(self, option)
            if not (value is None and option == "total_records") and (type(value) is not int or value < 1):
                raise InputError(f"{option} must be a whole number of at least 1, not {value!r}")
        if type(self.final_local_steps) is not int or self.final_local_steps < 0:
            raise InputError(f"final_local_steps must be a whole number of at least 0, not {self.final_local_steps!r}")
        if not 0 < self.decay <= 1:
            raise InputError(f"decay must lie in (0, 1], not {self.decay}")
        if not 0 <= self.tolerance < math.inf:
            raise InputError(f"tolerance must be at least 0 and finite, not {self.tolerance}")
        if not self.scale_entropy and self.importance_samples != 1:
            raise InputError("scale_entropy = False is the paper's text, which has importance_samples = 1 only")
        if self.optimizer not in TRACEABLE:
            self.steps()  # names an unknown optimiser as such
            raise InputError(f"optimizer '{self.optimizer}' cannot be traced; choose one of {', '.join(TRACEABLE)}")
        self.steps()

    def steps(self) -> SFVI:
        """What a silo's local steps share with SFVI. Raises InputError for what SFVI refuses."""
        return SFVI(
            family=self.family,
            importance_samples=self.importance_samples,
            iterations=self.rounds * self.local_steps,
            optimizer=self.optimizer,
            optimizer_options=self.optimizer_options,
            learning_rate=self.learning_rate,
            local_learning_rate=self.local_learning_rate,
            start_spread=self.start_spread,
            average_last=self.average_last,
            sampling_rate=self.sampling_rate,
            participation=self.participation,
            bound=self.bound,
            local_family=self.local_family,
            silo_family=self.silo_family,
        )

    @property
    def reveals_silos(self) -> bool:
        """Whether the server is to see single silos' terms."""
        return self.barycenter == "trusted"

    @property
    def most_rounds(self) -> int:
        return self.rounds

    @property
    def expected_calls(self) -> int:
        return self.rounds * (self.local_steps + ROUND_DRAWS) + self.final_local_steps

    @property
    def keys_a_round(self) -> int:
        """How many numbers are set aside to name a silo's draws for one question."""
        return self.local_steps + BOUND_DRAWS

    def averaged(self, step: int, steps: int) -> int:
        """Iterates in the average of the last ones after one of `steps` local steps; at most 1 before that begins."""
        first = min(steps - 1, math.ceil(steps * (1 - self.average_last)))
        return step - first + 1

    def declare(self, silos: int, private: bool) -> Declaration:
        asked, cohort = drawn(silos, self.participation)
        bound = "its part of the bound and its number of records"
        merged = "the change of its own copy of q and of the model's parameters, times its weight"
        sums = [Sums(MERGE, self.rounds, f"{merged}; {bound}", asked, cohort)]
        if not private:
            if self.total_records is None:
                sums.insert(0, Sums(COUNT, 1, bound, silos))
            if self.bures_iterations > 1 and self.family != "diagonal":
                again = self.rounds * (self.bures_iterations - 1)
                sums.append(
                    Sums(
                        BURES,
                        again,
                        "its covariance, as one iteration sees it; its weight, which is its number of records",
                        asked,
                        cohort,
                    )
                )
            from secure_fvi.algorithms.weighing import DISCLOSED

            sums.append(Sums(FINISH, 1, f"{bound}; {DISCLOSED}", silos))
        keeps = "its own latents' posterior and its optimiser's state"
        share = 1 - (1 - self.sampling_rate) ** self.local_steps
        because = f"barycenter = '{self.barycenter}', participation = {self.participation:g}"
        return Declaration(self.rounds, tuple(sums), keeps, self.reveals_silos, share, because)

    def server(self, problem: Problem) -> SFVIAvgServer:
        """The server's half. Raises InputError for what the model or its privacy do not allow."""
        from secure_fvi.algorithms.sfvi_avg_server import SFVIAvgServer

        return SFVIAvgServer(self, problem)

    def silo(self, problem: Problem) -> SFVIAvgSilo:
        """The silos' half; it holds no data, so that all silos of a process share its traces."""
        from secure_fvi.algorithms.sfvi_avg_silo import SFVIAvgSilo

        return SFVIAvgSilo(self, problem)
