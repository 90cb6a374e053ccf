"""What a centralised reference returns, and the global state of PyTorch and Pyro that it borrows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import pyro
import torch
from torch import Tensor


class Draws(NamedTuple):
    """Draws of the global sites in the model's own space."""

    sites: dict[str, Tensor]  # (chains, draws, *shape) each
    r_hat: float | None  # largest split R-hat over all global elements, unconstrained; None for independent draws
    ess: float  # smallest effective sample size over all global elements
    seconds: float


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Constants that a program makes without a dtype get this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Pyro draws from the global generators; they are seeded here and left as they were found."""
    before = pyro.util.get_rng_state()
    pyro.set_rng_seed(seed)
    try:
        yield
    finally:
        pyro.util.set_rng_state(before)
