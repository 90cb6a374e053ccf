"""Variational families: q(Z_G), held by the server, and q(Z_L | Z_G), which never leaves a silo."""

from secure_fvi.families.conditional import Amortised, Conditional, LocalFamily
from secure_fvi.families.gaussian import Diagonal, Full, GlobalFamily, LowRank, Params, global_family

__all__ = [
    "Amortised",
    "Conditional",
    "Diagonal",
    "Full",
    "GlobalFamily",
    "LocalFamily",
    "LowRank",
    "Params",
    "global_family",
]
