"""Latents by replaying the protocol: which records, draws and start would have made a silo send this?

All that a silo sends in a plain run of SFVI follows from what the server broadcast, the silo's records, the state its
latents' distributions began in and its draws eps_L. The adversary knows the first and searches for the rest: it runs
the silo's own steps on guessed records, start and draws, and moves these until what comes out is what was seen. It
knows the model, the algorithm and the population, not the silo's secret. Where the run begins late, starts of silos in
worlds of its own tell it what a start looks like.

A silo's step is followed exactly, and its derivative taken as that of a shift: Adam's steps have nearly one length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms.base import Broadcast
from secure_fvi.algorithms.sfvi import SFVI, Sent, SFVIProgram
from secure_fvi.algorithms.structured import local_units
from secure_fvi.audits.base import CONTROL_CONFIDENCE, AuditRow, Control, judge
from secure_fvi.audits.features import contributions_in_clear, from_both
from secure_fvi.audits.scores import cross_fitted, r_squared, ridge
from secure_fvi.audits.transcript import Transcript
from secure_fvi.audits.worlds import OWN, PLAIN, Each, Workbench, per_record, resampled, silent
from secure_fvi.compiled import Traced
from secure_fvi.errors import InputError
from secure_fvi.families import Params
from secure_fvi.fitting import build_parties
from secure_fvi.objective import record_gradients
from secure_fvi.trees import merge, part, running_average, to_numpy

_NARROWEST = 1e-3  # sd of a number of the start over the adversary's own silos
_PRIOR = 1e-4  # weight of squared eps and of squared deviations of the start


@dataclass(frozen=True)
class Search:
    """Starts of the search for each silo, steps of Adam, their rate."""

    starts: int = 32
    steps: int = 600
    learning_rate: float = 0.2
    seed: int = 0


class Found(NamedTuple):
    """What the search ends with, for J silos of N records."""

    latents: FloatArray  # (J, N, n_record) means at the last broadcast's mean of Z_G
    rows: Params  # (J * N, ...) records
    loss: FloatArray  # (J,) squared error in what was seen, in units of its own mean square


class Replayer:
    """Replays a silo's part in runs of `bench`, in which each silo has `records` records."""

    def __init__(self, bench: Workbench, records: int = 1) -> None:
        if not isinstance(bench.algorithm, SFVI):
            raise InputError(f"runs of SFVI are replayed, not of '{bench.algorithm.name}'")
        own = resampled(bench.pool, [records] * max(len(bench.sizes), 30), OWN)
        server, engine, _ = build_parties(bench.model, own, bench.algorithm, PLAIN[1], OWN)
        self.problem, self.records = server.problem, records
        program = next(iter(engine.silos.values())).program
        if not isinstance(program, SFVIProgram):
            raise InputError("a run after a warm start is not replayed; leave warm_start.rounds at 0")
        self.program = program
        if not program.n_record or program.n_silo:
            raise InputError("what is replayed are latents of records; the model must have those and no silo's own")
        if bench.algorithm.sampling_rate < 1:
            raise InputError("a silo that draws batches by its secret is not replayed; use sampling_rate = 1")
        bench.late.apply(server, list(engine.silos.values()))
        begun = [silo.local.record for silo in engine.silos.values()]
        states = {name: torch.cat([b[name][:records] for b in begun]).detach() for name in begun[0]}
        self._centre = {name: v.mean(0) for name, v in states.items()}
        self._spread = {name: v.std(0).clamp(min=_NARROWEST) for name, v in states.items()}
        self._ranges = {n: (v.min(0).values, v.max(0).values) for n, v in bench.pool.items() if v.is_floating_point()}
        if len(self._ranges) < len(bench.pool):
            raise InputError("whole numbers among the records cannot be searched for by gradients")
        families = program.local_family, program.silo_family
        self._gradients = record_gradients(self.problem.density, *families, program.samples, program.couples)
        self._round = Traced(self._round_function, (None,) * 9, "traced", by_shape=True)

    def find(self, transcript: Transcript, search: Search, each: Each = silent) -> Found:
        """Search for all silos of a plain transcript at once; of each silo's starts the best is kept."""
        messages, target, scale = self._seen(transcript)
        silos, starts = target.shape[1], search.starts
        target = target.repeat_interleave(starts, 1)
        free = self._begin(len(messages), silos * starts * self.records, search)
        optimizer = torch.optim.Adam(list(free.values()), lr=search.learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, search.steps)
        for _ in range(search.steps):
            slopes = self._pass(messages, target, scale, free)[2]
            for name, value in free.items():
                value.grad = slopes[name]
            optimizer.step()
            schedule.step()
            each()
        loss, average, _ = self._pass(messages, target, scale, free)
        best = loss.reshape(silos, starts).argmin(1) + torch.arange(silos) * starts
        keep = (best[:, None] * self.records + torch.arange(self.records)).reshape(-1)
        rows = {name: v[keep] for name, v in self._rows(part(free, "data")).items()}
        last = messages[-1]
        centre = torch.as_tensor(last.tensors["z_global"]) - torch.as_tensor(last.tensors["shift"])
        theta = {name: torch.as_tensor(last.tensors[f"theta/{name}"]) for name in self.program.theta_start}
        chosen = {name: v[keep] for name, v in average.items()}
        means = self.program.local_family.moments(chosen, theta, rows, centre, torch.zeros_like(centre))["loc"]
        return Found(to_numpy(means).reshape(silos, self.records, -1), rows, to_numpy(loss[best]))

    def error(self, transcript: Transcript, free: Params) -> FloatArray:
        """(J,) the loss of given guesses, of which "data/..." are logits of places between the population's least and
        largest values, "start/..." (J * N, ...) deviations in units of the spread of the adversary's own silos, and
        "eps/draws" (T, K, J * N, n_record)."""
        return to_numpy(self._pass(*self._seen(transcript), free)[0])

    def start_of(self, state: Params) -> Params:
        """A state of a silo's latents as `error` wants it, "start/..."."""
        return {f"start/{name}": (v - self._centre[name]) / self._spread[name] for name, v in state.items()}

    def _seen(self, transcript: Transcript) -> tuple[list[Broadcast], Tensor, Tensor]:
        """Broadcasts; gradients and bound of each silo in each round (T, J, D) in units of their scale; the scale."""
        if transcript.aggregation != "plain":
            raise InputError(f"under {transcript.aggregation} sums no silo's own contribution is in sight")
        messages, rounds = transcript.broadcasts(), []
        names = [b.name for b in self.program.gradient_blocks] + ["objective"]
        for message, sent in zip(messages, contributions_in_clear(transcript), strict=True):
            blocks = [transcript.tables[message.phase].split(sent[silo]) for silo in transcript.silos]
            rounds.append([np.concatenate([np.ravel(b[name]) for name in names]) for b in blocks])
        seen = torch.from_numpy(np.array(rounds))
        scale = seen.square().mean((0, 1)).sqrt().clamp(min=1e-12)
        return messages, seen / scale, scale

    def _begin(self, rounds: int, rows: int, search: Search) -> Params:
        """Where the search begins: "data/...", "start/..." and "eps/draws", for `rows` rows."""
        rng = torch.Generator().manual_seed(search.seed)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64)

        data = {name: noise(rows, *low.shape) for name, (low, _) in self._ranges.items()}
        start = {name: 0.3 * noise(rows, *v.shape) for name, v in self._centre.items()}
        eps = 0.3 * noise(rounds, self.program.samples, rows, self.program.n_record)
        return merge(data=data, start=start, eps={"draws": eps})

    def _rows(self, data: Params) -> Params:
        """Records between the population's least and largest values."""
        return {n: low + (high - low) * torch.sigmoid(data[n]) for n, (low, high) in self._ranges.items()}

    def _pass(
        self, messages: list[Broadcast], target: Tensor, scale: Tensor, free: Params
    ) -> tuple[Tensor, Params, Params]:
        """One replay: the loss (P,) of each of P guesses, their averaged distributions, and where to move."""
        data, begun = part(free, "data"), part(free, "start")
        state = {name: self._centre[name] + self._spread[name] * v for name, v in begun.items()}
        moments, average, averaged = self.program.local_optimizer.init(state), state, 0
        loss, draws = torch.zeros(target.shape[1]).to(target), []
        slopes: Params = {}
        for t, message in enumerate(messages):
            sent, rate = self.program.sent(message), self.program.scalar(message.scalars["scale"])
            error, by_state, by_data, by_eps, state, moments = self._round(
                sent, state, moments, data, free["eps/draws"][t], target[t], scale, rate, self.program.scalar(1.0)
            )  # fmt: skip
            averaged = averaged + 1 if message.scalars["averaging"] > 0 else 0
            average = running_average(average, state, averaged)
            loss = loss + error / len(messages)
            moved = merge(data=by_data, start={n: self._spread[n] * v for n, v in by_state.items()})
            slopes = {name: slopes[name] + v for name, v in moved.items()} if slopes else moved
            draws.append(by_eps)
        slopes["eps/draws"] = torch.stack(draws)
        held = {name: 2 * _PRIOR * v for name, v in free.items() if not name.startswith("data/")}
        return loss, average, {name: v + held[name] if name in held else v for name, v in slopes.items()}

    def _round_function(
        self, sent: Sent, state: Params, moments: Params, data: Params, eps: Tensor, target: Tensor, scale: Tensor,
        rate: Tensor, one: Tensor,
    ) -> tuple[Tensor, Params, Params, Tensor, Params, Params]:  # fmt: skip
        """The silo's step on guesses, its error (P,), and the error's derivatives in state, data and draws."""
        weights = one.expand(eps.shape[1])
        nothing = eps.new_zeros(1, 0)

        def error(state: Params, data: Params, eps: Tensor) -> tuple[Tensor, tuple[Tensor, Params]]:
            g = self._gradients(*sent, state, {}, self._rows(data), weights, eps, nothing)
            seen = torch.cat([g.rows, g.values.unsqueeze(-1)], -1)
            total = seen.reshape(-1, self.records, seen.shape[-1]).sum(1)
            errors = (total / scale - target).square().mean(-1)
            return errors.sum(), (errors, g.local)

        slopes, (errors, local) = torch.func.grad(error, (0, 1, 2), has_aux=True)(state, data, eps)
        stepped, moments = self.program.local_optimizer.step(state, local, moments, rate, local_units(state))
        return errors, *slopes, stepped, moments


def replay_rows(
    bench: Workbench, silos: int = 40, coordinate: int = 0, search: Search | None = None, each: Each = silent
) -> list[AuditRow]:
    """A row for the latents of silos of one record in one plain run, and one for each argument's mean over a record.

    Beside the latents' R^2 stands that of a ridge regression that learnt from the same run's other silos. There is no
    run with less protection than a plain one, so that each row is its own positive control. Negative control: the
    guesses for other silos.
    """
    if silos < 10:
        raise InputError(f"{silos} silos: an interval needs at least 10")
    replayer, how = Replayer(bench), search or Search()
    drawn = resampled(bench.pool, [1] * silos, 0)
    outcome = bench.laboratory(PLAIN, silos, own_latents=True).run(drawn, 0)
    names = outcome.transcript.silos
    found = replayer.find(outcome.transcript, how, each)
    order = [int(name.removeprefix("silo-")) - 1 for name in names]
    latents = np.array([outcome.latents[name].mean[0, coordinate] for name in names])
    groups = np.arange(silos)
    linear = cross_fitted(ridge, from_both(outcome.transcript), latents, groups)
    pairs = {"posterior mean of the latent": (latents, found.latents[:, 0, coordinate])}
    for name in found.rows:
        truth = np.concatenate([per_record(drawn[j][name]) for j in order])
        pairs[f"mean of '{name}' in the record"] = (truth, per_record(found.rows[name]))
    beside: dict[str, Any] = {"ridge": list(r_squared(latents, linear, groups))}
    return [
        judge(
            f"one individual a silo, by replay: {what}",
            "plain",
            "R^2",
            estimate := r_squared(truth, guesses, groups),
            Control(estimate, "itself: plain sums"),
            Control(r_squared(truth, np.roll(guesses, 1), groups, CONTROL_CONFIDENCE), "other silos' guesses"),
            silos=silos,
            rounds=bench.rounds,
            starts=how.starts,
            median_loss=float(np.median(found.loss)),
            **(beside if truth is latents else {}),
        )
        for what, (truth, guesses) in pairs.items()
    ]
