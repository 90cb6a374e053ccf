"""How a learning rate falls over a run of fixed length."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from secure_fvi.errors import InputError

Schedule = Literal["constant", "linear", "cosine", "exponential"]
#: Factor on the learning rate after a share `t` in [0, 1) of the rounds.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda t: 1.0,
    "linear": lambda t: 1.0 - 0.99 * t,
    "cosine": lambda t: 0.005 + 0.4975 * (1 + math.cos(math.pi * t)),
    "exponential": lambda t: 0.01**t,
}


def check_schedule(option: str, name: str) -> None:
    """Raise InputError, which names the option, for a schedule that there is not."""
    if name not in SCHEDULES:
        raise InputError(f"{option} '{name}' is unknown; choose {', '.join(SCHEDULES)}")
