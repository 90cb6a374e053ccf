"""The chain that is a privacy ledger, and its kinds of row beyond those of every chain."""

from __future__ import annotations

from secure_fvi.privacy.chain import ChainKind

LEDGER = ChainKind(
    name="ledger",
    remedy="`secure-fvi budget set` makes one",
    on_failure="nothing was charged, so nothing may leave",
    otherwise="count the budget as spent",
)
BUDGET, JOB, RELEASE, CLOSE = "budget", "job", "release", "close"
