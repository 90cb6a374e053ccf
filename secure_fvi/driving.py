"""The loop over rounds that all algorithms share: progress, checkpoints, the end of a job."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from secure_fvi.algorithms.base import Step
from secure_fvi.checkpoints import Checkpoints
from secure_fvi.engines.transport import Transport
from secure_fvi.guarding import Guards
from secure_fvi.server import Server

_OBJECTIVE_ROUNDS = 200  # the reported bound is the mean over so many last rounds


class Progress(NamedTuple):
    """Told to `on_round` after every round. Derived from broadcasts and totals, except for the byte counts."""

    round: int
    max_rounds: int
    objective: float
    learning_rate: float
    r_hat: float | None
    bytes_up: int  # over all silos, since the start
    bytes_down: int
    phase: str
    cohort: int  # silos in the newest sum


class Rounds(NamedTuple):
    """How a run went, for its result."""

    objectives: tuple[float, ...]  # of the last rounds, nats
    seconds: float


def drive(
    server: Server,
    engine: Transport,
    guards: Guards,
    algorithm: Any,
    private: bool,
    block: int,
    checkpoints: Checkpoints | None,
    resume: bool,
    on_round: Callable[[Progress], None] | None,
    began: float,
) -> Rounds:
    """Rounds until the algorithm is finished, with checkpoints; `began` is a time of the monotonic clock."""
    skipped = max(server.state.last_index, guards.last_index)
    done = _restore(server, engine, checkpoints) if resume and checkpoints is not None else NOTHING_DONE
    server.skip_to(skipped)
    began -= done.seconds
    objectives = list(done.objectives)
    last_save = time.monotonic()
    finished = done.finished
    while not finished:
        step = engine.run(server.round())
        finished = step.finished
        objectives = [*objectives[-_OBJECTIVE_ROUNDS + 1 :], step.objective]
        if checkpoints is not None:
            due = time.monotonic() - last_save >= checkpoints.seconds
            if private and checkpoints.seconds > 0:  # a round that is run again is released, and paid for, again
                due = server.rounds % block == 0
            if due or finished:
                _save(server, engine, checkpoints, tuple(objectives), finished, time.monotonic() - began)
                last_save = time.monotonic()
        if on_round is not None:
            on_round(_progress(server, engine, algorithm, step))
    guards.close("finished")
    engine.silo_states(server.state.accepted)
    return Rounds(tuple(objectives), time.monotonic() - began)


class _Done(NamedTuple):
    """What the loop itself must remember."""

    objectives: tuple[float, ...]
    finished: bool
    seconds: float
    exchanges: int
    bytes_up: dict[str, int]
    bytes_down: dict[str, int]


NOTHING_DONE = _Done((), False, 0.0, 0, {}, {})


def _restore(server: Server, engine: Transport, checkpoints: Checkpoints) -> _Done:
    templates: dict[str, Any] = {f"silo/{name}": silo.kept for name, silo in engine.silos.items()}
    states = checkpoints.load({"server": server.state, "run": NOTHING_DONE, **templates})
    if states is None:
        return NOTHING_DONE
    server.state = states["server"]
    engine.restore_silos({name: states[f"silo/{name}"] for name in engine.silos})
    done: _Done = states["run"]
    engine.exchanges, engine.bytes_up, engine.bytes_down = done.exchanges, done.bytes_up, done.bytes_down
    return done


def _save(
    server: Server,
    engine: Transport,
    checkpoints: Checkpoints,
    objectives: tuple[float, ...],
    finished: bool,
    seconds: float,
) -> None:
    locals_ = {f"silo/{name}": state for name, state in engine.silo_states(server.state.accepted).items()}
    done = _Done(objectives, finished, seconds, engine.exchanges, engine.bytes_up, engine.bytes_down)
    checkpoints.save(server.rounds, {"server": server.state, "run": done, **locals_})


def _progress(server: Server, engine: Transport, algorithm: Any, step: Step) -> Progress:
    return Progress(
        server.rounds,
        # What visits silos one after the other knows its rounds only once it knows the silos.
        getattr(server.program, "most_rounds", algorithm.most_rounds),
        step.objective,
        step.learning_rate,
        step.r_hat,
        sum(engine.bytes_up.values()),
        sum(engine.bytes_down.values()),
        step.phase,
        sum(index == server.state.last_index for index in server.state.accepted.values()),
    )
