"""Canaries in runs of ours: put in front of the real gate, which clips, noises and charges them like anything else.

A Dirac canary hands the gate a vector along one coordinate, far longer than the clipping norm: the worst that a record
or a silo may do. Where many of them need coordinates of their own, the model gets latent variables that no data touch
(`padded`). An absent canary hands over nothing; an absent silo, whose place in the cohort everyone knows, zeros.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyro
import torch
from pyro.distributions import Normal
from torch import Tensor

from secure_fvi.aggregation import Masked, Plain
from secure_fvi.aggregation.base import FloatArray, SecureSum
from secure_fvi.algorithms.base import CLIP, ROUND_PHASE, Broadcast, Pending, Problem, ServerProgram, SiloProgram, Step
from secure_fvi.algorithms.sfvi import SFVI, WarmStart
from secure_fvi.audits.worlds import Data
from secure_fvi.federated_model import FederatedModel
from secure_fvi.fitting import build_parties
from secure_fvi.guarding import Books, build_guards
from secure_fvi.privacy.claim import claim
from secure_fvi.privacy.gate import Gate, RecordRelease, Release
from secure_fvi.privacy.noise import NoiseSource
from secure_fvi.privacy.settings import DP
from secure_fvi.privacy.terms import Terms
from secure_fvi.silo import Silo

#: Clipping norms that a Dirac canary asks for; it gets one.
PUSH = 1e3
_INERT = "audit_inert"
_CHUNK = 512
#: Silos' own coins follow from it, so that an adversary who knows all but the canary can be played.
_COINS = b"audit/coins"

#: What the adversary sees of a round: the broadcast and the released total (shared + side,), in natural units.
Watch = Callable[[Broadcast, FloatArray], None]


def inert_coordinates(problem: Problem) -> npt.NDArray[np.int64]:
    """Where a contribution to a `padded` model has the gradients of its inert latents."""
    start = 0
    for site in problem.layout.of("global"):
        if site.name == _INERT:
            return np.arange(start, start + site.size)
        start += site.size
    raise KeyError(_INERT)


@dataclass(frozen=True)
class Setting:
    """What is audited. rounds: of each run; the noise is planned for them, without retries.

    simulated: the data are made or published, and the noise follows from the runs' numbers.
    """

    model: FederatedModel
    algorithm: SFVI
    silos: Sequence[Data]
    privacy: DP
    simulated: bool
    rounds: int = 4

    @property
    def aggregation(self) -> SecureSum:
        """Whose totals the adversary sees; but with distributed noise, any sum has the same ones."""
        return Masked(consistency_check=False) if self.privacy.noise == "distributed" else Plain()

    def parties(self, silos: Sequence[Data], sampling_rate: float | None = None) -> Any:
        """As `build_parties`, for the shortened run, in which every silo takes part in every round."""
        algorithm = replace(self.algorithm, iterations=self.rounds, participation=1.0, warm_start=WarmStart())
        if sampling_rate is not None:
            algorithm = replace(algorithm, sampling_rate=sampling_rate)
        with warnings.catch_warnings():  # that a site does not reach the likelihood is what it is for
            warnings.filterwarnings("ignore", f"site '{_INERT}' does not reach")
            return build_parties(
                self.model, silos, algorithm, self.aggregation, compile=False, privacy=replace(self.privacy, retries=0),
                noise_key=_COINS,
            )  # fmt: skip


def padded(setting: Setting, count: int) -> Setting:
    """The same with `count` more global latents, of which no data depend."""
    model = setting.model

    def program(**data: Any) -> None:
        pyro.sample(_INERT, Normal(torch.zeros(count), 1.0).to_event(1))
        model.fn(**data)

    # The family of q(Z_G) is the server's own affair: silos send the same gradients whatever it is.
    algorithm = replace(setting.algorithm, family="diagonal")
    return replace(setting, model=FederatedModel(program, model.record_plate, model.silo_sites), algorithm=algorithm)


def colluding(setting: Setting, target: int) -> tuple[str, ...]:
    """Silos that leave their noise out, of those the claim does not count on: `target` is honest."""
    others = [f"silo-{j + 1}" for j in range(len(setting.silos)) if j != target]
    most = {"server": 0, "silo": len(others), "distributed": setting.privacy.colluders}[setting.privacy.noise]
    return tuple(others[max(len(others) - most, 0) :])


class Rig:
    """Parties that are built once and start afresh for each run, with noise of its own."""

    def __init__(self, setting: Setting, silos: Sequence[Data], shadow: Shadow, colluders: Sequence[str] = ()) -> None:
        """`colluders` leave out their noise. `shadow`: of the same setting; its traces serve here, too."""
        self._colluders = frozenset(colluders)
        self.server, self.engine, _ = setting.parties(silos)
        self._simulated, self._program = setting.simulated, self.server.program
        self.terms: Terms = self._program.terms[ROUND_PHASE]
        self._silo_program = shadow.program

    def run(
        self,
        key: str,
        watch: Watch,
        *,
        noise: float = 1.0,
        gates: Mapping[str, Callable[[Gate], Any]] | None = None,
        programs: Mapping[str, Callable[[SiloProgram], Any]] | None = None,
    ) -> None:
        """A whole run. `noise`: a factor on the noise behind the claim's back, for controls. `gates` and `programs`
        stand in front of the real ones of the silos that they name; what passes them meets the real gate."""
        server, silos = self.server, self.engine.silos
        source = NoiseSource(key.encode() if self._simulated else None)
        terms, silent = (
            {ROUND_PHASE: replace(self.terms, noise_multiplier=factor * self.terms.noise_multiplier)}
            for factor in (noise, 0.0)
        )
        honest, quiet = (
            build_guards(list(silos), self._program.tables, t, "audit", Books(), source).gates for t in (terms, silent)
        )
        server.program, server._noise = _Watched(self._program, terms, watch), source
        clip = self.terms.settings.clipping_norm
        server.state = server.state._replace(algorithm=self._program.init(), accepted={}, records=None, clip=clip)
        for name, silo in silos.items():
            gate = (quiet if name in self._colluders else honest)[name]
            start(silo, (gates or {}).get(name, lambda gate: gate)(gate), self._silo_program)
            silo.program = (programs or {}).get(name, lambda program: program)(self._silo_program)
        while not self.engine.run(server.round()).finished:
            pass

    @functools.cached_property
    def claim(self) -> dict[str, Any]:
        """Of the terms that were agreed, whatever noise was made."""
        return claim(self._program.terms, NoiseSource())

    @property
    def noise_sd(self) -> float:
        """Of a released number, clipping norms as units."""
        terms, placement = self.terms, self.terms.settings.noise
        noisy = terms.cohort - len(self._colluders)
        shares = {"server": 1.0, "silo": noisy, "distributed": noisy / max(terms.honest, 1)}[placement]
        return terms.noise_multiplier * math.sqrt(shares)


def start(silo: Silo, gate: Gate, program: SiloProgram) -> None:
    """Put the silo where it was before the first round."""
    silo.program, silo.gate = program, gate
    silo.begin()


def clip_of(message: Broadcast, terms: Terms) -> float:
    """The clipping norm of the round."""
    return message.scalars.get(CLIP, terms.settings.clipping_norm)


class _Watched:
    """A server's program that shows the adversary what it is given; `terms` may differ from those that were agreed."""

    def __init__(self, inner: ServerProgram, terms: Mapping[str, Terms], watch: Watch) -> None:
        self._inner, self.terms, self._watch = inner, terms, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def update(self, state: Any, message: Broadcast, total: FloatArray, scale: float) -> tuple[Any, Step]:
        self._watch(message, total)
        return self._inner.update(state, message, total, scale)


class RecordCanaries:
    """A gate whose silo has Dirac canaries among its records, each in a round's batch with probability `rate`."""

    def __init__(self, gate: Gate, coordinates: npt.NDArray[np.int64], rate: float, rng: np.random.Generator) -> None:
        self._gate, self._coordinates, self._rate, self._rng = gate, coordinates, rate, rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gate, name)

    def release_records(
        self, chunks: Iterable[tuple[Tensor, Tensor]], data_free: Tensor | None, public: Sequence[float]
    ) -> RecordRelease:
        joined = self._coordinates[self._rng.random(len(self._coordinates)) < self._rate]

        def everybody() -> Iterator[tuple[Tensor, Tensor]]:
            yield from chunks
            for at in range(0, len(joined), _CHUNK):
                yield self._rows(joined[at : at + _CHUNK])

        return self._gate.release_records(everybody(), data_free, public)

    def _rows(self, coordinates: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        terms = self._gate.terms
        assert terms is not None
        rows = torch.zeros(len(coordinates), terms.extent.shared + terms.extent.hidden, dtype=torch.float64)
        rows[torch.arange(len(rows)), torch.from_numpy(coordinates)] = PUSH * terms.settings.clipping_norm
        return rows, torch.zeros(len(rows), dtype=torch.float64)


class SiloCanary:
    """The program of a silo that hands over a Dirac vector instead of what it was to compute, or zeros."""

    def __init__(self, inner: SiloProgram, coordinate: int | None) -> None:
        self._inner, self._coordinate = inner, coordinate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def contribute(self, message: Broadcast, local: Any, view: Any, gate: Gate) -> tuple[Release, Any]:
        assert gate.terms is not None
        values = np.zeros(gate.terms.extent.shared)
        if self._coordinate is not None:
            values[self._coordinate] = PUSH * clip_of(message, gate.terms)
        return gate.release(values), local


class Shadow:
    """What silos would release without noise: what an adversary works out who knows their records and their coins."""

    def __init__(self, setting: Setting, silos: Sequence[Data], *, only: Sequence[int], always: bool = False) -> None:
        """`only`: which of the silos. always: every record is in every batch."""
        _, engine, _ = setting.parties(silos, 1.0 if always else None)
        self._silos = [engine.silos[f"silo-{j + 1}"] for j in only]
        self.program = self._silos[0].program  # one for all silos; it holds no data
        self.terms = replace(self.program.terms[ROUND_PHASE], noise_multiplier=0.0)
        terms = {ROUND_PHASE: self.terms}
        self._gates = [Gate(s.name, s.program.tables, terms, _free) for s in self._silos]

    def start(self) -> None:
        for silo, gate in zip(self._silos, self._gates, strict=True):
            start(silo, gate, self.program)

    def total(self, message: Broadcast) -> FloatArray:
        """(shared,) the clipped sum that answers the broadcast, in natural units."""
        out = np.zeros(self.terms.extent.shared)
        for silo in self._silos:
            silo.settle(message.accepted)
            turn = silo.past.turn + 1  # the real silo answers every question, as this one does
            silo.gate.begin(message.sum_index, message.phase, self.terms.cohort, message.scalars.get(CLIP), turn)
            view = silo.view._replace(turn=turn)
            release, local = silo.program.contribute(message, silo.local, view, silo.gate)
            silo.pending, silo.past = Pending(message.sum_index, local), silo.past._replace(turn=turn)
            out += release.values[: len(out)] * self.terms.step(clip_of(message, self.terms))
        return out

    def record_norms(self, message: Broadcast) -> FloatArray:
        """Norms of the records' gradients before clipping, by silo and place."""
        self.start()
        gates = [_Measured(gate) for gate in self._gates]
        for silo, gate in zip(self._silos, gates, strict=True):
            silo.gate = gate
        self.total(message)
        return np.concatenate([gate.norms[: silo.size] for gate, silo in zip(gates, self._silos, strict=True)])


class _Measured:
    """A gate that notes the norms of the records' gradients."""

    norms: FloatArray

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gate, name)

    def release_records(
        self, chunks: Iterable[tuple[Tensor, Tensor]], data_free: Tensor | None, public: Sequence[float]
    ) -> RecordRelease:
        kept = list(chunks)
        self.norms = torch.cat([rows.norm(dim=1) for rows, _ in kept]).numpy()
        return self._gate.release_records(kept, data_free, public)


def _free(phase: str, index: int) -> None:
    """Charges nothing: nothing leaves."""
