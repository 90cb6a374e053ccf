"""The probes that try to read a silo's numbers: each attacks a subject of `protocol_contract` and counts successes.

Every function gives the attempts at one subject and the bounds of the numbers that were tried for; `protocol` sets
beside them what the same gives against a weak copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.audits.protocol_contract import (
    REFUSALS,
    Attempt,
    CheatedServer,
    Forgery,
    Impersonated,
    Session,
    Signatures,
    Subject,
    random_values,
)
from secure_fvi.audits.protocol_uniformity import difference

Between = Literal["nothing", "a later sum", "restart", "backup of the silo", "backups of all"]
Played = tuple[list[Attempt], FloatArray]

_SEED = 20_231_127


def context_of(number: int) -> bytes:
    """The hash of an imagined broadcast."""
    return hashlib.sha256(b"secure-fvi/audit/broadcast" + number.to_bytes(8, "big")).digest()


def attempt(action: Callable[[], FloatArray | None], truth: FloatArray, decoy: FloatArray) -> Attempt:
    """What `action` reads; a refusal reads nothing."""
    try:
        return Attempt(action(), truth, decoy)
    except REFUSALS as error:
        return Attempt(None, truth, decoy, _plain(str(error)))


def _plain(refusal: str) -> str:
    """A refusal without the numbers and names in it, so that equal ones are counted together."""
    return " ".join("..." if any(c.isdigit() for c in word) else word for word in refusal.split())


def asked_twice(subject: Subject[Session], trials: int, between: Between, same_broadcast: bool) -> Played:
    """One silo is asked twice for one sum; the server subtracts what it got.

    Success: the difference of the two inputs. `between` the two answers the silo is started again, from what it
    stored, or from a backup that was taken before the first.
    """
    session, rng = subject.open(), np.random.default_rng(_SEED)
    attempts = []
    for index in range(0, 2 * trials, 2):
        session.prepare(index)
        victim = session.silos[index // 2 % len(session.silos)]
        one, two, decoy = (random_values(rng, session.table) for _ in range(3))
        backup = session.backup()
        first = session.contribute(victim, index, one, context_of(2 * index))
        if between == "restart":
            session.restart(victim)
        elif between == "a later sum":
            session.prepare(index + 1)
            session.contribute(victim, index + 1, decoy, context_of(2 * index + 2))
        elif between != "nothing":
            session.restore(backup, session.silos if between == "backups of all" else [victim])
        again = context_of(2 * index + (not same_broadcast))
        attempts.append(
            attempt(partial(_difference, session, victim, index, first, two, again), one - two, one - decoy)
        )
    return attempts, 2 * session.table.bounds


def _difference(
    session: Session, victim: str, index: int, first: bytes, values: FloatArray, context: bytes
) -> FloatArray:
    second = session.contribute(victim, index, values, context)
    return session.decode(difference(session.words(first), session.words(second), session.modulus))


def two_broadcasts(subject: Subject[Session], trials: int) -> Played:
    """One silo is shown another broadcast than all others. Success: a total with its answer in it."""
    session, rng = subject.open(), np.random.default_rng(_SEED)
    attempts = []
    for index in range(trials):
        session.prepare(index)
        victim = session.silos[index % len(session.silos)]
        values = {silo: random_values(rng, session.table) for silo in session.silos}
        messages = {
            silo: session.contribute(silo, index, v, context_of(2 * index + (silo == victim)))
            for silo, v in values.items()
        }
        truth = np.sum(list(values.values()), axis=0)
        decoy = truth - values[victim] + random_values(rng, session.table)
        attempts.append(attempt(partial(session.total, index, messages, context_of(2 * index)), truth, decoy))
    return attempts, len(session.silos) * session.table.bounds


Plan = Literal[
    "in one request", "in two requests", "around a restart", "around a backup of all", "around a backup of one",
    "too few signatures", "old signatures", "survivors below min_cohort", "each half told another set",
]  # fmt: skip


def both_secrets(subject: Subject[CheatedServer], trials: int, plan: Plan) -> Played:
    """The server asks for what opens a silo's own mask and what opens its pairwise ones, then opens its contribution.

    Success: the victim's input. Below min_cohort one colluder gives its seeds, too. Around a backup silos forget what
    they answered in between. So they do where signatures are too few, or those of an earlier sum that the victim
    missed: signatures are then all that stands in the way. Told different things, each half is joined by the colluders.
    """
    session, rng = subject.open(), np.random.default_rng(_SEED)
    attempts = []
    for index in range(1, 2 * trials, 2):
        session.prepare(index)
        honest = [silo for silo in session.silos if silo not in session.colluders]
        victim = honest[index // 2 % len(honest)]
        rest = [silo for silo in session.silos if silo != victim]
        if plan == "old signatures":
            for silo in rest:
                session.contribute(silo, index - 1, random_values(rng, session.table), context_of(index - 1))
            session.ask(index - 1, rest, context_of(index - 1))
        values, decoy = ({s: random_values(rng, session.table) for s in session.silos} for _ in range(2))
        messages = {s: session.contribute(s, index, values[s], context_of(index)) for s in session.silos}
        refusals = _ask_for_both(session, index, victim, rest, plan)
        colluders = rest[:1] if plan == "survivors below min_cohort" else []
        read = session.open(victim, index, messages[victim], context_of(index), colluders)
        attempts.append(Attempt(read, values[victim], decoy[victim], _plain(refusals[-1]) if refusals else ""))
    return attempts, session.table.bounds


def _ask_for_both(session: CheatedServer, index: int, victim: str, rest: list[str], plan: Plan) -> list[str]:
    """One plan's requests; the refusals."""
    context, everyone = context_of(index), session.silos
    if plan == "in one request":
        return session.ask_both(index, victim, context)
    if plan == "survivors below min_cohort":
        return session.ask(index, [victim, *rest[:1]], context)
    if plan == "each half told another set":
        honest = [silo for silo in everyone if silo not in session.colluders]
        middle = (len(honest) + 1) // 2
        refusals = session.ask(index, everyone, context, holders={*honest[:middle], *session.colluders})
        return refusals + session.ask(index, rest, context, holders={*honest[middle:], *session.colluders})
    first: Signatures = "short" if plan == "too few signatures" else "asked"
    backup = session.backup()
    refusals = session.ask(index, everyone, context, first)
    if plan == "around a restart":
        for silo in everyone:
            session.restart(silo)
    elif plan != "in two requests":
        session.restore(backup, rest[:1] if plan == "around a backup of one" else everyone)
    return refusals + session.ask(index, rest, context, "old" if plan == "old signatures" else first)


def keys_of_its_own(subject: Subject[Impersonated], trials: int, how: Forgery) -> Played:
    """The server shows a silo keys of its own for all its peers. Success: the silo's input."""
    rng = np.random.default_rng(_SEED)
    attempts = []
    for at in range(trials):
        session = subject.open()
        victim = session.silos[at % len(session.silos)]
        values, decoy = random_values(rng, session.table), random_values(rng, session.table)
        attempts.append(attempt(partial(session.impersonate, victim, how, values, context_of(at)), values, decoy))
    return attempts, session.table.bounds
