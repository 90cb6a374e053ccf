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

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from secure_fvi.errors import InputError
from secure_fvi.families import Amortised, Conditional
from secure_fvi.optimizers import Optimizer

if TYPE_CHECKING:
    from secure_fvi.algorithms.base import Problem
    from secure_fvi.algorithms.pvi_server import PVIServer
    from secure_fvi.algorithms.pvi_silo import PVISilo

#: Local optimisers that are no `torch.optim` class.
CLOSED_FORM, NATURAL = "closed_form", "natural"


@dataclass(frozen=True)
class PVI:
    """Configuration.

    rounds: secure sums to make; under "sequential" one silo's visit is a round. None: until no site moves q by
    `tolerance` posterior standard deviations, at most `max_rounds`.
    schedule: "synchronous", all silos a round; "asynchronous", `buffer` silos drawn a round, so that the rest may be
    busy or away; "sequential", one after the other. A sequential schedule shows the server each silo's change of its
    site, which is its posterior alone: it needs `reveal_changes = True` and a sum that admits a cohort of one.
    damping: share of the change that is taken. "auto" begins at one over the silos asked, which keeps q proper whatever
    they send, doubles while changes shrink and halves when they grow; a step after which q is improper is cut back.
    local_steps: of the local fit in a round; a silo's first fit takes four times as many. local_optimizer:
    "natural" (natural gradients on q; the silo's own latents by Adam), "closed_form" (a likelihood that is Gaussian in
    Z_G, no local latents), or a `torch.optim` class.
    learning_rate: first step of the local fit: share of the natural gradient, or torch's rate in posterior standard
    deviations; it falls to a twentieth over the round. None: 0.3 and 0.05. local_learning_rate: of the silo's latents.
    sampling_rate: share of records in a local step, drawn without replacement. importance_samples: K; 1 is the ELBO.
    bound: largest absolute value of any element of a contribution; past it a silo refuses.
    """

    rounds: int | None = None
    max_rounds: int = 60
    tolerance: float = 0.05
    schedule: Literal["synchronous", "sequential", "asynchronous"] = "synchronous"
    buffer: int = 3
    reveal_changes: bool = False
    damping: float | Literal["auto"] = "auto"
    family: Literal["auto", "diagonal", "full"] = "auto"
    importance_samples: int = 1
    local_steps: int = 500
    local_optimizer: str = NATURAL
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float | None = None
    local_learning_rate: float = 0.05
    theta_learning_rate: float = 0.1
    sampling_rate: float = 1.0
    bound: float = 2.0**30
    local_family: Conditional | Amortised = field(default_factory=Conditional)
    silo_family: Conditional = field(default_factory=Conditional)

    name = "pvi"

    def __post_init__(self) -> None:
        if self.schedule not in ("synchronous", "sequential", "asynchronous"):
            raise InputError(f"schedule '{self.schedule}' is unknown; choose synchronous, sequential or asynchronous")
        if self.family not in ("auto", "diagonal", "full"):
            raise InputError(f"family '{self.family}' has no sites; choose auto, diagonal or full")
        for option in ("rounds", "max_rounds", "buffer", "importance_samples", "local_steps"):
            value = getattr(self, option)
            if not (value is None and option == "rounds") and (type(value) is not int or value < 1):
                raise InputError(f"{option} must be a whole number of at least 1, not {value!r}")
        if self.schedule == "sequential" and not self.reveal_changes:
            raise InputError(
                "a sequential schedule shows the server each silo's change of its site, from which it can compute that "
                "silo's own posterior; say reveal_changes = true to accept this, or use schedule = 'synchronous'"
            )
        if self.damping != "auto" and not (isinstance(self.damping, (int, float)) and 0 < self.damping <= 1):
            raise InputError(f"damping must be 'auto' or lie in (0, 1], not {self.damping!r}")
        if not 0 < self.sampling_rate <= 1:
            raise InputError(f"sampling_rate must lie in (0, 1], not {self.sampling_rate}")
        for option in ("tolerance", "local_learning_rate", "theta_learning_rate", "bound"):
            if not (math.isfinite(getattr(self, option)) and getattr(self, option) > 0):
                raise InputError(f"{option} must be positive and finite, not {getattr(self, option)}")
        if self.learning_rate is not None and not 0 < self.learning_rate < math.inf:
            raise InputError(f"learning_rate must be positive and finite, not {self.learning_rate}")
        if self.local_optimizer not in (CLOSED_FORM, NATURAL):
            if not Optimizer(self.local_optimizer, self.first_rate, self.optimizer_options).traceable:
                raise InputError(f"local_optimizer '{self.local_optimizer}' cannot be traced; choose adam or sgd")
        elif self.optimizer_options:
            raise InputError(f"local_optimizer '{self.local_optimizer}' takes no optimizer_options")
        if self.local_optimizer == NATURAL and self.first_rate > 1:
            raise InputError(f"learning_rate must be at most 1 for natural gradients, not {self.learning_rate}")

    @property
    def first_rate(self) -> float:
        if self.learning_rate is not None:
            return self.learning_rate
        return 0.3 if self.local_optimizer == NATURAL else 0.05

    @property
    def most_rounds(self) -> int:
        return self.rounds or self.max_rounds

    @property
    def expected_calls(self) -> int:
        return 1 if self.local_optimizer == CLOSED_FORM else (self.rounds or 10) * self.local_steps

    def server(self, problem: Problem) -> PVIServer:
        """The server's half. Raises InputError for what the model or its privacy do not allow."""
        from secure_fvi.algorithms.pvi_server import PVIServer

        return PVIServer(self, problem)

    def silo(self, problem: Problem) -> PVISilo:
        """The silos' half; it holds no data, so that all silos of a process share its traces."""
        from secure_fvi.algorithms.pvi_silo import PVISilo

        return PVISilo(self, problem)
