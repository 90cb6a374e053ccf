"""What the numbers of a report mean, and what they do not cover, for readers who are not statisticians."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from secure_fvi.privacy.ledger_terms import Budget
from secure_fvi.privacy.terms import REPLACE

_ALWAYS = (
    "Other data sets. This account is of one data set of one institution. A person who is also in another data set, "
    "here or elsewhere, has those losses on top.",
    "The same person in several institutions. Each institution's guarantee is about its own records; someone in m "
    "of them is a group of m records: epsilon is m times as large and delta up to (exp(m epsilon) - 1) / "
    "(exp(epsilon) - 1) times, since institutions that share the noise of one total do not add it m times. No ledger "
    "sees the others'.",
    "What can be learned about people in general. A model that shows that smoking causes cancer says something about "
    "a smoker, whether or not that person's record was used.",
    "The institution's own staff and computers, which hold the data in the clear.",
    "Wrong or malicious inputs. A participant that sends made-up numbers can spoil the result; privacy accounting "
    "neither prevents nor detects it.",
    "Side channels: how long computations take, when messages arrive, how much memory is used, what crashes and logs "
    "elsewhere show.",
    "Releases that bypass secure-fvi: summary tables, figures, talks and earlier studies on the same data.",
)


def adjacency(unit: str, declared: Collection[object] = ()) -> str:
    """What neighbouring data sets are, for jobs that `declared` these adjacencies."""
    if unit == "silo":
        return "Two federations are neighbours if one has one institution more, with everything in it."
    replaced = (
        "Two data sets are neighbours if the values that this institution holds of one person differ: its columns, or "
        "the response. Who is in the data is known to all institutions."
    )
    added = (
        "Two data sets are neighbours if one has one record more: one individual with all of its rows. "
        "A person entered twice counts as two."
    )
    if REPLACE not in declared:
        return added
    if set(declared) == {REPLACE}:
        return replaced
    return (
        f"Of jobs over different columns of the same people: {replaced} Of all others: {added} A changed person is one "
        "removed and one added, so that for it those others count twice."
    )


def composition(budgets: Sequence[Budget]) -> str:
    """How jobs add up, and which statement is the guarantee; all budgets that a job may have met, the last in force."""
    bound = bound_of(budgets)
    epsilons, deltas = ", ".join(f"{b.epsilon:g}" for b in budgets), ", ".join(f"{b.delta:g}" for b in budgets)
    held = (
        f"total fits. The budget was changed after the first job (epsilon {epsilons}; delta {deltas}): all jobs so far "
        f"are within {bound}, the largest epsilon and the sum of the deltas of these {len(budgets)} budgets, provided "
        "that their changes did not depend on results. What is asked later is bounded by it only if nobody changes the "
        "budget again."
        if len(budgets) > 1
        else f"total fits: whatever was and will be asked, all jobs together are within {bound}."
    )
    return (
        "Within a job every release was declared before the first, and its epsilon is for all of them. Across jobs, "
        f"each of which may depend on earlier results, Renyi DP curves add up and a filter admits a job only while the "
        f"{held} The epsilon spent so far is the same sum converted at the same delta, as if this list of jobs had "
        "been fixed beforehand."
    )


class Bound(NamedTuple):
    """What all jobs of a data set together are within: (epsilon, delta)."""

    epsilon: float
    delta: float

    def __str__(self) -> str:
        nothing = ", which promises nothing" if self.delta >= 1 else ""
        return f"epsilon {self.epsilon:.6g} at delta {self.delta:.3g}{nothing}"


def bound_of(budgets: Sequence[Budget]) -> Bound:
    """What bounds everything that was charged under these budgets (docs/ledger.md, "A budget that is changed").

    One that was lowered bounds none of what was charged before, and each may fail with its own delta.
    """
    return Bound(max(b.epsilon for b in budgets), min(1.0, math.fsum(b.delta for b in budgets)))


def not_covered(unit: str, jobs: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the guarantee leaves open, in general and for these jobs' declarations (see `report._facts`)."""
    found = list(_ALWAYS)
    if unit == "record":
        found.append("Groups. For a family of k records the epsilon is k times as large, and the delta grows further.")
    if any(job["sampled"] for job in jobs):
        found.append(
            "Anyone who can see who took part in a round. The epsilon counts on batches that are drawn in secret; "
            "against the institution's own machines, or anyone who watches them, it is that of unsampled rounds."
        )
    if any(job["noise"] == "server" for job in jobs):
        found.append(
            "The server. It adds the noise itself and sees totals before that; the guarantee holds against everyone "
            "who sees results, not against the server or whoever breaks into it."
        )
    if any(job["noise"] == "distributed" for job in jobs):
        most = max((job["colluders"] for job in jobs if isinstance(job["colluders"], int)), default=None)
        counted = f"no more than {most} of them" if most is not None else "no more of them than declared"
        found.append(
            "More collusion than was planned for. Institutions share the noise; the epsilon assumes that "
            f"{counted} subtract their own share from the result or leave it out."
        )
    if any(job["noise"] is None for job in jobs):
        found.append("Jobs that did not declare where their noise is added: ask who could see totals without it.")
    public = sorted({str(p) for job in jobs for p in job["public"] or ()})
    if public:
        found.append(f"What was declared public and left without noise: {', '.join(public)}.")
    if any(job["floating"] for job in jobs):
        found.append(
            "Floating-point noise. Gaussian noise in floating point is not exactly the Gaussian of the proofs; its "
            "last bits may say more than the epsilon allows. Noise on integers ('distributed') has no such gap."
        )
    if any(isinstance(job["rng"], str) and "TEST" in job["rng"] for job in jobs):
        found.insert(0, "ANYTHING AT ALL where noise was made with a test key: it can be replayed and subtracted.")
    return found
