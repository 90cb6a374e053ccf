"""What both halves of a vertical run derive alike: batches, blocks and, under privacy, the terms of each release."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secure_fvi.aggregation.base import Block, BlockTable
from secure_fvi.algorithms.base import Order, Phase, choose_cohort, form
from secure_fvi.algorithms.vertical.config import AUXILIARY_PHASE, SLOPE_PHASE, Vertical, shared_batch
from secure_fvi.algorithms.vertical.likelihoods import Likelihood
from secure_fvi.algorithms.vertical.silo import Response
from secure_fvi.algorithms.vertical.soul import Soul
from secure_fvi.compiled import Mode
from secure_fvi.errors import InputError
from secure_fvi.privacy.settings import DP, RecordDP
from secure_fvi.privacy.terms import REPLACE, Extent, Terms, agree
from secure_fvi.randomness import KeyedDraws
from secure_fvi.trees import Params

#: What a silo, or the response's holder, spends on its own noised gradients; nothing of it is sent.
HIDDEN_PHASE = "hidden"
#: What the response's holder releases: dlog p / ds of each record.
PULL_PHASE = "pull"


class VerticalProblem(NamedTuple):
    """What all parties know before the first round."""

    likelihood: Likelihood
    silos: tuple[str, ...]  # all ids, sorted
    records: int  # N, the people that all silos hold
    seed: int
    dtype: torch.dtype
    device: torch.device
    mode: Mode
    privacy: DP | None = None


class VerticalView(NamedTuple):
    """What a silo's half may use. Never leaves the silo."""

    silo: str
    rows: Params  # (N, ...): the silo's columns
    response: Response | tuple[()]  # () where it is private
    size: int  # N
    record_draws: KeyedDraws
    silo_draws: KeyedDraws
    start_seed: int  # of the amortising network's weights
    turn: int = 0  # the silo's own count of questions, from 0: what keys its draws


class VerticalFrame:
    """A configuration bound to a problem."""

    def __init__(self, config: Vertical | Soul, problem: VerticalProblem) -> None:
        self.config, self.problem = config, problem
        self.columns, self.gamma_size = problem.likelihood.columns, problem.likelihood.gamma_size
        #: A round's batch is asked for by everything that takes rows, and two rounds are in work at a time.
        self.batch = functools.lru_cache(maxsize=2)(self._batch)
        self.batch_records = min(config.batch_size or problem.records, problem.records)
        self.all_records = self.batch_records == problem.records
        self.weight = problem.records / self.batch_records
        self.terms = self._terms(self.batch_records * self.columns, config.phases)
        self.tables: Mapping[str, BlockTable] = config.tables(self.batch_records, self.columns, self.gamma_size)
        if self.terms:
            self.tables = {AUXILIARY_PHASE: self.terms[AUXILIARY_PHASE].table(self.z_blocks, [])}
        self._cohorts, self._last = list[tuple[str, ...]](), dict.fromkeys(problem.silos, -1)
        phase = Phase(range(config.rounds), config.rounds)
        rows, gamma = (self.batch_records, self.columns), (self.gamma_size,)
        forms = {
            AUXILIARY_PHASE: form({"pull": rows, "curvature": ()}, "scale", "averaging", "value"),
            SLOPE_PHASE: form({"sum": rows, "gamma": gamma}, "scale", "averaging", "mass"),
        }
        self.order = Order(dict.fromkeys(config.phases, phase), lambda round_, _: self.cohort(round_), forms)

    def cohort(self, round_: int) -> tuple[str, ...]:
        """The silos asked in a round: by a public coin, and all whose last z_j has reached the bound on staleness."""
        problem, config = self.problem, self.config
        while len(self._cohorts) <= round_:
            at = len(self._cohorts)
            drawn = choose_cohort(problem.silos, config.participation, problem.seed, at)
            due = [s for s, last in self._last.items() if last < 0 or at - last > config.max_staleness]
            self._cohorts.append(tuple(sorted({*drawn, *due})))
            self._last |= dict.fromkeys(self._cohorts[at], at)
        return self._cohorts[round_]

    @property
    def z_blocks(self) -> list[Block]:
        """One row a record: z_j, and in the other direction the pull on it."""
        return [Block("auxiliary", (self.batch_records, self.columns), self.config.bound)]

    def _batch(self, round_: int) -> Tensor | None:
        """Positions of the records of a round; None for all."""
        if self.all_records:
            return None
        at = shared_batch(self.problem.seed, round_, self.problem.records, self.batch_records)
        return torch.from_numpy(at).to(self.problem.device)

    def weights(self) -> Tensor:
        """(B,) what each record of a batch stands for."""
        return torch.full((self.batch_records,), self.weight, dtype=self.problem.dtype, device=self.problem.device)

    def move(self, value: Any) -> Tensor:
        """A tensor or array of numbers, as this run computes with it."""
        return torch.as_tensor(value).to(self.problem.device, self.problem.dtype)

    def response_terms(self) -> dict[str, Terms]:
        """What the holder of a private response releases: pulls on each record, and through them its own noised
        gradient in gamma. It adds all of the noise itself; its norm is the clipping norm too."""
        if not self.terms:
            return {}
        terms = self.terms[AUXILIARY_PHASE]
        alone = dataclasses.replace(terms.settings, noise="silo", epsilon=None, noise_multiplier=terms.noise_multiplier)
        pull = dataclasses.replace(terms, settings=alone, resolution=0)
        return {PULL_PHASE: pull, HIDDEN_PHASE: dataclasses.replace(pull, extent=Extent(0, self.gamma_size, 0))}

    def _terms(self, shared: int, phases: tuple[str, ...]) -> dict[str, Terms]:
        """One person's columns at one silo enter each round twice: in theta_j's noised gradient and in its row of z_j.
        Batches are known to all, so that they amplify nothing; every round is charged."""
        privacy, config = self.problem.privacy, self.config
        if privacy is None:
            return {}
        if isinstance(config, Soul):
            raise InputError("SOUL's draws of theta_j are not private, and z_j follows them; use the vertical rounds")
        if not isinstance(privacy, RecordDP):
            raise InputError(
                "vertical silos hold parts of the same people: protect a person's columns and label with "
                "privacy.unit = 'record' (adjacency: one person's values replaced)"
            )
        if privacy.objective_share or privacy.public_counts:
            raise InputError(
                "a vertical run under privacy releases z_j alone: leave out objective_share, public_counts"
            )
        for option, refused in (("model", config.is_power), ("local_steps", config.local_steps > 1)):
            if refused:
                raise InputError(
                    f"{option} = {getattr(config, option)!r} is not available under privacy: noise is added to one "
                    "gradient and one row of z_j a round; use the augmented-variable model with local_steps = 1"
                )
        if config.max_staleness:
            raise InputError(
                "a silo whose last z_j stays in the sum is not available under privacy: set max_staleness = 0"
            )
        both = agree(privacy, len(self.problem.silos), 1.0, 2 * config.rounds, Extent(shared, 0, 0))
        # The retries that were paid for in `both` go to each of the two.
        rows = dataclasses.replace(both, rounds=config.rounds, adjacency=REPLACE)
        rows = dataclasses.replace(rows, settings=dataclasses.replace(privacy, retries=privacy.retries // 2))
        alone = dataclasses.replace(rows.settings, noise="silo", epsilon=None, noise_multiplier=both.noise_multiplier)
        hidden = dataclasses.replace(rows, settings=alone, resolution=0, extent=Extent(0, 1, 0))
        return {AUXILIARY_PHASE: rows, HIDDEN_PHASE: hidden}
