"""A fit that is looked at after every round, as learning curves need it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from secure_fvi.aggregation.base import SecureSum
from secure_fvi.algorithms.base import Algorithm, Posterior
from secure_fvi.compiled import choose_threads, threads
from secure_fvi.federated_model import Data, FederatedModel
from secure_fvi.fitting import build_parties, work_of

T = TypeVar("T")


class Followed(NamedTuple):
    """What a run cost, and where it ended."""

    posterior: Posterior
    seconds: float
    exchanges: int
    bytes_up: int  # of the silo that sent most
    bytes_down: int


def follow(
    model: FederatedModel,
    silos: Sequence[Data],
    algorithm: Algorithm,
    aggregation: SecureSum,
    seed: int,
    look: Callable[[Posterior], T],
) -> tuple[list[T], Followed]:
    """`fit` without what a published experiment has no use for (checkpoints, privacy): `look` at the posterior after
    each round, phases that count records aside. Raises what `fit` raises."""
    began = time.monotonic()
    server, engine, _ = build_parties(model, silos, algorithm, aggregation, seed)
    program, seen, finished = server.program, [], False
    with threads(choose_threads(work_of(silos, algorithm))):
        while not finished:
            before = server.rounds
            finished = engine.run(server.round()).finished
            if server.rounds > before:
                seen.append(look(program.posterior(server.state.algorithm)))
    posterior = program.posterior(server.state.algorithm)
    up, down = max(engine.bytes_up.values()), max(engine.bytes_down.values())
    return seen, Followed(posterior, time.monotonic() - began, engine.exchanges, up, down)
