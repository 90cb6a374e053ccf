"""Options of a silo's local fit, shared by partitioned VI and the baselines that it is compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from secure_fvi.errors import InputError
from secure_fvi.families import Amortised, Conditional
from secure_fvi.optimizers import Optimizer

#: Local optimisers that are no `torch.optim` class.
CLOSED_FORM, NATURAL, FIXED_POINT, GRADIENT = "closed_form", "natural", "fixed_point", "gradient"
#: Those without noise of their own, for models without local latents.
EXACT = (CLOSED_FORM, FIXED_POINT, GRADIENT)

#: A silo's first fit takes so many times the steps, since its own latents start from nothing.
FIRST_FIT = 4
#: Steps over which early stopping looks at a fit, and windows that it waits: a fit makes so many steps at least.
WINDOW, PATIENCE = 50, 2
EARLIEST_STOP = WINDOW * (PATIENCE + 1)


@dataclass(frozen=True, kw_only=True)
class LocalFitOptions:
    """How a silo fits q(Z_G), and its own latents, by steps that need no exchange. All by keyword.

    family: of q(Z_G); "auto" is full up to 256 dimensions, diagonal above.
    importance_samples: K; 1 is the ELBO.
    start_spread: a silo's first fit begins at the mean of q plus this share of its standard deviations times draws that
    all silos share (0.1 for networks, whose hidden units are all alike at the prior's mean).
    local_steps: of the local fit in a round; a silo's first fit takes four times as many. local_optimizer:
    "natural" (natural gradients on q, as always on the silo's own latents), a `torch.optim` class, or, without local
    latents, "closed_form" (a likelihood that is Gaussian in Z_G), "fixed_point" and "gradient" (steps in natural
    parameters with expectations over fixed draws; few dimensions, since they take second derivatives).
    learning_rate: first step of the local fit: share of the natural gradient, or torch's rate in posterior standard
    deviations, which fall to a twentieth over the round; constant for "fixed_point", whose damping it is, and
    "gradient". None: 0.3, 0.05, 0.5 and 0.1. local_learning_rate: of the silo's latents, a sixth of the share of their
    natural gradient, and Adam's for an encoder or a dense scale.
    scale_rate: of "natural", share of the learning rate by which q's scales move. For networks, where a draw of
    thousands of weights says little about the curvature of one: 0.1 or so. Scales that follow its noise come out too
    small, since the noise of a logarithm raises the mean of what it is the logarithm of.
    decay: factor of the learning rate of q from fit to fit, so that rounds end with less noise than they began with.
    theta_learning_rate: of `pyro.param`s, by Adam, a step a round.
    alpha: of power EP (Algorithm 2), whose limit 0 is the variational fit; above 0 with "closed_form" only, since the
    moments of other tilted distributions have no closed form. It matters to a diagonal family.
    early_stopping: every fit begins with a tight q and ends when the expected log-likelihood no longer rises: for
    mean-field networks, which prune their units otherwise; q is then no optimum of the bound.
    sampling_rate: share of records in a local step, drawn without replacement.
    bound: largest absolute value of any element of a contribution; past it a silo refuses.
    """

    family: Literal["auto", "diagonal", "full"] = "auto"
    importance_samples: int = 1
    start_spread: float = 0.0
    local_steps: int = 1000
    local_optimizer: str = NATURAL
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float | None = None
    scale_rate: float = 1.0
    decay: float = 1.0
    local_learning_rate: float = 0.05
    theta_learning_rate: float = 0.1
    alpha: float = 0.0
    early_stopping: bool = False
    sampling_rate: float = 1.0
    bound: float = 2.0**30
    local_family: Conditional | Amortised = field(default_factory=Conditional)
    silo_family: Conditional = field(default_factory=Conditional)

    def __post_init__(self) -> None:
        if self.family not in ("auto", "diagonal", "full"):
            raise InputError(f"family '{self.family}' has no sites; choose auto, diagonal or full")
        self.check_counts("importance_samples", "local_steps")
        self.check_positive("local_learning_rate", "theta_learning_rate", "bound")
        if not 0 <= self.start_spread < math.inf:
            raise InputError(f"start_spread must be finite and not negative, not {self.start_spread}")
        if not 0 < self.sampling_rate <= 1:
            raise InputError(f"sampling_rate must lie in (0, 1], not {self.sampling_rate}")
        if self.learning_rate is not None and not 0 < self.learning_rate < math.inf:
            raise InputError(f"learning_rate must be positive and finite, not {self.learning_rate}")
        for name in ("scale_rate", "decay"):
            if not 0 < getattr(self, name) <= 1:
                raise InputError(f"{name} must lie in (0, 1], not {getattr(self, name)}")
        if self.scale_rate < 1 and self.local_optimizer != NATURAL:
            raise InputError(f"scale_rate is for local_optimizer = '{NATURAL}', not '{self.local_optimizer}'")
        if self.decay < 1 and self.local_optimizer in EXACT:
            raise InputError(f"local_optimizer '{self.local_optimizer}' has no noise that a decay would lower")
        if self.local_optimizer not in (*EXACT, NATURAL):
            if not Optimizer(self.local_optimizer, self.first_rate, self.optimizer_options).traceable:
                raise InputError(f"local_optimizer '{self.local_optimizer}' cannot be traced; choose adam or sgd")
        elif self.optimizer_options:
            raise InputError(f"local_optimizer '{self.local_optimizer}' takes no optimizer_options")
        if self.local_optimizer in (NATURAL, FIXED_POINT) and self.first_rate > 1:
            raise InputError(f"learning_rate must be at most 1 for {self.local_optimizer}, not {self.learning_rate}")
        if self.local_optimizer in EXACT and self.sampling_rate < 1:
            raise InputError(f"local_optimizer '{self.local_optimizer}' takes all records; use sampling_rate = 1")
        if not 0 <= self.alpha <= 1 or (self.alpha and self.local_optimizer != CLOSED_FORM):
            raise InputError(f"alpha must lie in [0, 1], and above 0 needs '{CLOSED_FORM}', not {self.alpha}")
        if self.local_optimizer in EXACT and self.early_stopping:
            raise InputError(f"local_optimizer '{self.local_optimizer}' has no tight start to stop from")

    @property
    def first_rate(self) -> float:
        if self.learning_rate is not None:
            return self.learning_rate
        return {NATURAL: 0.3, FIXED_POINT: 0.5, GRADIENT: 0.1}.get(self.local_optimizer, 0.05)

    @property
    def fitted_share(self) -> float:
        """Of a silo's records, in expectation, that a local fit has seen."""
        steps = min(self.local_steps, EARLIEST_STOP) if self.early_stopping else self.local_steps
        return 1 - (1 - self.sampling_rate) ** steps

    def shared(self) -> dict[str, Any]:
        """The options above, for another algorithm that has them too."""
        return {f.name: getattr(self, f.name) for f in fields(LocalFitOptions)}

    def traced_calls(self, fits: int) -> int:
        """Traced calls of a silo that makes so many local fits."""
        return 1 if self.local_optimizer in EXACT else fits * self.local_steps

    def check_counts(self, *options: str, optional: bool = False) -> None:
        """Raise InputError unless each is a whole number of at least 1, or None where it may be left out."""
        for option in options:
            value = getattr(self, option)
            if not (value is None and optional) and (type(value) is not int or value < 1):
                raise InputError(f"{option} must be a whole number of at least 1, not {value!r}")

    def check_positive(self, *options: str) -> None:
        """Raise InputError unless each is positive and finite."""
        for option in options:
            value = getattr(self, option)
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"{option} must be positive and finite, not {value}")
