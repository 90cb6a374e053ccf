"""The loop over rounds that all algorithms share: progress, checkpoints, the end of a job."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from secure_fvi.algorithms.base import Step
from secure_fvi.engines.local import LocalEngine
from secure_fvi.guarding import Guards
from secure_fvi.runs.checkpoint import load_checkpoint, save_checkpoint
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


class Rounds(NamedTuple):
    """How a run went, for its result."""

    objectives: tuple[float, ...]  # of the last rounds, nats
    seconds: float


def drive(
    server: Server,
    engine: LocalEngine,
    guards: Guards,
    algorithm: Any,
    private: bool,
    block: int,
    checkpoint_dir: Path | None,
    checkpoint_seconds: float,
    resume: bool,
    on_round: Callable[[Progress], None] | None,
    began: float,
) -> Rounds:
    """Rounds until the algorithm is finished, with checkpoints; `began` is a time of the monotonic clock."""
    done = _restore(server, engine, checkpoint_dir) if resume and checkpoint_dir is not None else _NOTHING_DONE
    server.skip_to(guards.last_index)
    began -= done.seconds
    objectives = list(done.objectives)
    last_save = time.monotonic()
    finished = done.finished
    while not finished:
        step = engine.run(server.round())
        finished = step.finished
        objectives = [*objectives[-_OBJECTIVE_ROUNDS + 1 :], step.objective]
        due = checkpoint_dir is not None and time.monotonic() - last_save >= checkpoint_seconds
        if private:  # a round that is run again is released, and paid for, again
            due = server.rounds % block == 0
        if checkpoint_dir is not None and (due or finished):
            _save(server, engine, checkpoint_dir, tuple(objectives), finished, time.monotonic() - began)
            last_save = time.monotonic()
        if on_round is not None:
            on_round(_progress(server, engine, algorithm, step))
    guards.close("finished")
    for silo in engine.silos.values():
        silo.settle(server.state.accepted)
    return Rounds(tuple(objectives), time.monotonic() - began)


class _Done(NamedTuple):
    """What the loop itself must remember."""

    objectives: tuple[float, ...]
    finished: bool
    seconds: float
    exchanges: int
    bytes_up: dict[str, int]
    bytes_down: dict[str, int]


_NOTHING_DONE = _Done((), False, 0.0, 0, {}, {})


def _restore(server: Server, engine: LocalEngine, directory: Path) -> _Done:
    templates: dict[str, Any] = {f"silo/{name}": silo.local for name, silo in engine.silos.items()}
    states = load_checkpoint(directory, {"server": server.state, "run": _NOTHING_DONE, **templates})
    if states is None:
        return _NOTHING_DONE
    server.state = states["server"]
    for name, silo in engine.silos.items():
        silo.local = states[f"silo/{name}"]
    done: _Done = states["run"]
    engine.exchanges, engine.bytes_up, engine.bytes_down = done.exchanges, done.bytes_up, done.bytes_down
    return done


def _save(
    server: Server, engine: LocalEngine, directory: Path, objectives: tuple[float, ...], finished: bool, seconds: float
) -> None:
    for silo in engine.silos.values():
        silo.settle(server.state.accepted)
    done = _Done(objectives, finished, seconds, engine.exchanges, engine.bytes_up, engine.bytes_down)
    locals_ = {f"silo/{name}": silo.local for name, silo in engine.silos.items()}
    save_checkpoint(directory, server.rounds, {"server": server.state, "run": done, **locals_})


def _progress(server: Server, engine: LocalEngine, algorithm: Any, step: Step) -> Progress:
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
    )
