"""Runs of one configuration on many made data sets, recorded: what an adversary learns an attack from.

A world is a set of silos with resampled records and fresh secrets. All worlds of a laboratory share one server seed,
which everyone may know, and one set of traces, so that a world costs little more than its rounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation.base import FloatArray, SecureSum
from secure_fvi.algorithms.base import LocalFit, Problem, ServerProgram, SiloProgram
from secure_fvi.audits.late import LateStart
from secure_fvi.audits.recording import Recorder
from secure_fvi.audits.transcript import Transcript
from secure_fvi.density import Layout
from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel
from secure_fvi.fitting import build_parties
from secure_fvi.privacy.settings import DP
from secure_fvi.server import Server
from secure_fvi.silo import Silo

Data = dict[str, Tensor]
#: A local fit of SFVI-Avg and PVI in an audit has so many steps, unless the configuration asks for fewer.
LOCAL_STEPS = 100


class Outcome(NamedTuple):
    """One world's run. `latents` is what the attacks are after."""

    transcript: Transcript
    latents: Mapping[str, FloatArray]  # by silo, (N_j, n_record): means of q(Z_L) at the mean of q(Z_G), on R^n
    layout: Layout


def shortened(algorithm: Any, rounds: int) -> Any:
    """The configuration for runs of `rounds` rounds, local fits cut to `LOCAL_STEPS` steps."""
    names = {f.name for f in dataclasses.fields(algorithm)}
    length = "iterations" if "iterations" in names else "rounds"
    if length not in names:
        raise InputError(f"algorithm '{algorithm.name}' has no number of rounds to set; audit sfvi, sfvi-avg or pvi")
    options: dict[str, Any] = {length: rounds}
    if "local_steps" in names:
        options["local_steps"] = min(LOCAL_STEPS, algorithm.local_steps)
    return dataclasses.replace(algorithm, **options)


class Laboratory:
    """Makes recorded runs of one model, algorithm, secure sum and privacy."""

    def __init__(
        self,
        model: FederatedModel,
        algorithm: Any,
        aggregation: SecureSum,
        privacy: DP | None = None,
        *,
        worlds: int,
        late: LateStart | None = None,
        targets: LateStart | None = None,
        simulated: bool,
        real_data: bool = False,
    ) -> None:
        """`worlds`: about how many runs it will make. `late`: where each begins, if not at the algorithm's start.
        `targets`: whose latents the attacks are after, if not those that the run itself ends with: a few rounds of
        SFVI-Avg or PVI leave these far from where they will be."""
        self.model, self.aggregation, self.privacy = model, aggregation, privacy
        self.algorithm = _Shared(algorithm, worlds)
        self._simulated, self._real_data = simulated, real_data
        self._late, self._targets = late, targets

    def run(self, silos: Sequence[Data], seed: int) -> Outcome:
        """A whole run. The silos' draws, and on simulated data the noise, follow from `seed`; masks never do."""
        noise_key = b"audit/%d" % seed if self._simulated and self.privacy is not None else None
        server, engine, guards = build_parties(
            self.model, silos, self.algorithm, self.aggregation, seed,
            privacy=self.privacy, noise_key=noise_key,
        )  # fmt: skip
        if self._late is not None:
            self._late.apply(server, list(engine.silos.values()))
        recorder = Recorder(server, engine, self.aggregation.kind, simulated=self._simulated, real_data=self._real_data)
        while not recorder.step().finished:
            pass
        guards.close("finished")
        for silo in engine.silos.values():
            silo.settle(server.state.accepted)
        wanted = self._targets.latents if self._targets is not None else lambda silo: _latents(silo, server)
        latents = {name: wanted(silo) for name, silo in engine.silos.items()}
        return Outcome(recorder.transcript(), latents, server.problem.layout)


class _Shared:
    """An algorithm whose halves are made once: they hold no data and no state, and so serve every world."""

    def __init__(self, algorithm: Any, worlds: int) -> None:
        self.configuration, self._worlds = algorithm, worlds
        self._server: ServerProgram | None = None
        self._silo: SiloProgram | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.configuration, name)

    @property
    def expected_calls(self) -> int:
        """Of all worlds together, for the choice to compile."""
        calls: int = self.configuration.expected_calls * self._worlds
        return calls

    def server(self, problem: Problem) -> ServerProgram:
        if self._server is None:
            self._server = self.configuration.server(problem)
        return self._server

    def silo(self, problem: Problem) -> SiloProgram:
        if self._silo is None:
            self._silo = self.configuration.silo(problem)
        return self._silo


def _latents(silo: Silo, server: Server) -> FloatArray:
    fit: LocalFit = silo.program.local_fit(silo.local)
    layout = server.problem.layout
    if not layout.size("record"):
        return np.zeros((silo.size, 0))
    posterior = server.program.posterior(server.state.algorithm)
    centre = posterior.eta["loc"]
    no_shift = centre.new_zeros(layout.size("global") + layout.size("silo"))
    means = fit.family.moments(fit.params, posterior.theta, silo.view.rows, centre, no_shift)["loc"]
    return means[: silo.size].detach().cpu().numpy().astype(np.float64)


def resampled(pool: Data, sizes: Sequence[int], seed: int) -> list[Data]:
    """Silos of these sizes, their records drawn from `pool` with replacement."""
    total = len(next(iter(pool.values())))
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randint(total, (sum(sizes),), generator=rng).split(list(sizes))
    return [{name: values[r] for name, values in pool.items()} for r in rows]


def pooled(silos: Sequence[Data]) -> Data:
    """All silos' records together. Raises InputError where a model's arguments have no row a record."""
    first = silos[0]
    if not all(isinstance(v, Tensor) and v.ndim for silo in silos for v in silo.values()):
        raise InputError("an audit resamples records: every argument of the model must have a row a record")
    return {name: torch.cat([silo[name] for silo in silos]) for name in first}
