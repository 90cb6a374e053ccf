"""Partitioned variational inference (Ashman et al. 2022, Algorithm 1), few rounds instead of thousands.

    q(Z_G) = p(Z_G) x product over silos j of t_j(Z_G)

    server:  sends q
    silo:    takes its site out, q / t_j (the cavity), and fits q to cavity x its own likelihood by many steps that need
             no exchange; contributes the change of its site, in natural parameters
    server:  adds the damped sum of changes to q

"Structured" PVI: where a silo has latents of its own, its site stands for its marginal likelihood: the local fit
maximises E_q[log p(y_j, Z_L | Z_G) - log q(Z_L | Z_G)] - KL(q || cavity) over q and q(Z_L | Z_G) together. A fixed
point is a local optimum of global VI (Property 2.2), whatever the partition.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from secure_fvi.algorithms.local_fit_options import LocalFitOptions
from secure_fvi.disclosure import Cohort, Declaration, Sums
from secure_fvi.errors import InputError

if TYPE_CHECKING:
    from secure_fvi.algorithms.base import Problem
    from secure_fvi.algorithms.pvi_server import PVIServer
    from secure_fvi.algorithms.pvi_silo import PVISilo

#: The phase after the last round: all silos at the final q.
FINISH = "finish"


@dataclass(frozen=True, kw_only=True)
class PVI(LocalFitOptions):
    """Configuration. The options of a silo's local fit are those of `LocalFitOptions`.

    rounds: secure sums to make; under "sequential" one silo's visit is a round. None: until no site moves q by
    `tolerance` posterior standard deviations, at most `max_rounds`.
    schedule: "synchronous", all silos a round; "asynchronous", `buffer` silos a round, so that the rest may be busy or
    away; "sequential", one after the other. A sequential schedule shows the server each silo's change of its site,
    which is its posterior alone: it needs `reveal_changes = True` and a sum that admits a cohort of one.
    delay: of the asynchronous schedule, simulated: local fits take 0 to `delay` rounds, by silo, drawn by the seed, and
    the `buffer` that are done first answer. A change fitted against the q of `a` rounds ago counts 1 / (1 + a). 0:
    fits end within a round, and the silos of a round are drawn.
    damping: share of the change that is taken. "auto" begins at one over the silos asked, which keeps q proper whatever
    they send, grows while successive changes point the same way and halves when they turn; a step after which q is
    improper is cut back.
    theta_updates: "round", a step along the gradient of the free energy after every round; "converged", only after
    rounds in which no site moved q by `tolerance` (paper, Appendix A: the inner loop run to convergence).
    virtual_clients: disjoint parts of a silo's records, each with a site of its own; for models without local latents.
    Refused under `RecordDP`.
    """

    rounds: int | None = None
    max_rounds: int = 60
    tolerance: float = 0.05
    schedule: Literal["synchronous", "sequential", "asynchronous"] = "synchronous"
    buffer: int = 3
    delay: int = 0
    reveal_changes: bool = False
    damping: float | Literal["auto"] = "auto"
    theta_updates: Literal["round", "converged"] = "round"
    virtual_clients: int = 1

    name = "pvi"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule not in ("synchronous", "sequential", "asynchronous"):
            raise InputError(f"schedule '{self.schedule}' is unknown; choose synchronous, sequential or asynchronous")
        self.check_counts("rounds", optional=True)
        self.check_counts("max_rounds", "buffer", "virtual_clients")
        if type(self.delay) is not int or self.delay < 0:
            raise InputError(f"delay must be a whole number of rounds, 0 or more, not {self.delay!r}")
        if self.delay and self.schedule != "asynchronous":
            raise InputError(
                "delay is for schedule = 'asynchronous': in the others every silo answers on this round's q"
            )
        if self.schedule == "sequential" and not self.reveal_changes:
            raise InputError(
                "a sequential schedule shows the server each silo's change of its site, from which it can compute that "
                "silo's own posterior; say reveal_changes = true to accept this, or use schedule = 'synchronous'"
            )
        if self.damping != "auto" and not (isinstance(self.damping, (int, float)) and 0 < self.damping <= 1):
            raise InputError(f"damping must be 'auto' or lie in (0, 1], not {self.damping!r}")
        if self.theta_updates not in ("round", "converged"):
            raise InputError(f"theta_updates '{self.theta_updates}' is unknown; choose round or converged")
        self.check_positive("tolerance")

    @property
    def most_rounds(self) -> int:
        return self.rounds or self.max_rounds

    @property
    def expected_calls(self) -> int:
        return self.traced_calls(self.rounds or 10)

    def declare(self, silos: int, private: bool) -> Declaration:
        from secure_fvi.algorithms.base import ROUND_PHASE
        from secure_fvi.algorithms.weighing import DISCLOSED, DISCLOSED_OF_SLOPE

        asked = {"synchronous": silos, "sequential": 1, "asynchronous": min(self.buffer, silos)}[self.schedule]
        names: dict[str, Cohort] = {"synchronous": "all", "sequential": "sequential", "asynchronous": "asynchronous"}
        what = "the change of its site, in natural parameters, its part of the bound and its number of records"
        sums: tuple[Sums, ...] = (Sums(ROUND_PHASE, self.most_rounds, what, asked, names[self.schedule]),)
        if not private:
            counts = "; whether it could fit, tempered its cavity, or would move q further"
            final = f"{DISCLOSED if self.rounds is None else DISCLOSED_OF_SLOPE}; its number of records"
            sums = (dataclasses.replace(sums[0], what=what + counts), Sums(FINISH, 1, final, silos))
        because = f"schedule = '{self.schedule}'"
        if self.schedule == "asynchronous":
            because += f", buffer = {self.buffer}"
        keeps = "its site and its own latents' posterior"
        return Declaration(self.most_rounds, sums, keeps, False, self.fitted_share, because)

    def server(self, problem: Problem) -> PVIServer:
        """The server's half. Raises InputError for what the model or its privacy do not allow."""
        from secure_fvi.algorithms.pvi_server import PVIServer

        return PVIServer(self, problem)

    def silo(self, problem: Problem) -> PVISilo:
        """The silos' half; it holds no data, so that all silos of a process share its traces."""
        from secure_fvi.algorithms.pvi_silo import PVISilo

        return PVISilo(self, problem)
