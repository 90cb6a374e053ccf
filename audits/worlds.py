"""Runs of one configuration on many made data sets, recorded: what an adversary learns an attack from.

A world is a set of silos with resampled records and fresh secrets. All worlds of a laboratory share one server seed,
which everyone may know, and one set of traces, so that a world costs little more than its rounds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation import Masked, Plain
from secure_fvi.aggregation.base import FloatArray, SecureSum, Total
from secure_fvi.aggregation.homomorphic import WithHolder
from secure_fvi.aggregation.key_holder import KEY_HOLDER
from secure_fvi.algorithms.base import Broadcast, LocalFit, Pending, Posterior, Problem
from secure_fvi.algorithms.kit import Program
from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.audits.transcript import SET_UP, Entry, Sum, Transcript
from secure_fvi.building import work_of
from secure_fvi.compiled import choose_mode
from secure_fvi.density import Layout
from secure_fvi.discovery import read_layout
from secure_fvi.driving import Parties, Run
from secure_fvi.engines.local import LocalEngine
from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel, read_data
from secure_fvi.fitting import build_parties
from secure_fvi.messages import ROUND, decode_broadcast
from secure_fvi.privacy.gate import Gate
from secure_fvi.privacy.settings import DP
from secure_fvi.server import Server
from secure_fvi.silo import Silo
from secure_fvi.trees import take, to_numpy

Data = dict[str, Tensor]
#: A local fit of SFVI-Avg and PVI in an audit has so many steps, unless the configuration asks for fewer.
LOCAL_STEPS = 100


class Normals(NamedTuple):
    """A normal a record, on R^n. A silo's own; audits know it, since they made the data."""

    mean: FloatArray  # (N, n_record)
    covariance: FloatArray  # (N, n_record, n_record)


class Outcome(NamedTuple):
    """One world's run. `latents` is what the attacks are after."""

    transcript: Transcript
    latents: Mapping[str, Normals]  # by silo: q(Z_L) of its records at the mean of q(Z_G)
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
        late: LateStart | int = 0,
        targets: LateStart | None = None,
        simulated: bool,
        real_data: bool = False,
    ) -> None:
        """`worlds`: about how many runs it will make. `late`: where each begins, if not at the algorithm's start; or
        how many rounds at its beginning are not recorded.
        `targets`: whose latents the attacks are after, if not those that the run itself ends with: a few rounds of
        SFVI-Avg or PVI leave these far from where they will be."""
        self.model, self.aggregation, self.privacy = model, aggregation, privacy
        self.algorithm = Shared(algorithm, worlds)
        self._simulated, self._real_data = simulated, real_data
        self._late, self._targets = late, targets

    def run(self, silos: Sequence[Data], seed: int) -> Outcome:
        """A whole run. The silos' draws, and on simulated data the noise, follow from `seed`; masks never do."""
        noise_key = b"audit/%d" % seed if self._simulated and self.privacy is not None else None
        server, engine, guards = build_parties(
            self.model, silos, self.algorithm, self.aggregation, seed,
            privacy=self.privacy, noise_key=noise_key,
        )  # fmt: skip
        if isinstance(self._late, LateStart):
            self._late.apply(server, list(engine.silos.values()))
        rounds = Run(Parties(server, engine, guards), lambda _: None)
        if isinstance(self._late, int):
            for _ in range(self._late):
                next(rounds)
        recorder = Recorder(server, engine, self.aggregation.kind, simulated=self._simulated, real_data=self._real_data)
        for _ in rounds:
            pass
        latents = {name: self._latents(silo, server) for name, silo in engine.silos.items()}
        return Outcome(recorder.transcript(), latents, server.problem.layout)

    def _latents(self, silo: Silo, server: Server) -> Normals:
        if self._targets is not None:
            return self._targets.latents(silo)
        posterior = server.program.posterior(server.state.algorithm)
        return _of_records(silo.program.local_fit(silo.local), posterior, server.problem.layout, silo)


class Shared:
    """An algorithm whose halves are made once: they hold no data and no state, and so serve every world."""

    def __init__(self, algorithm: Any, worlds: int) -> None:
        self.configuration, self._worlds = algorithm, worlds
        self._server: Program | None = None
        self._silo: Program | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.configuration, name)

    @property
    def expected_calls(self) -> int:
        """Of all worlds together, for the choice to compile."""
        calls: int = self.configuration.expected_calls * self._worlds
        return calls

    def server(self, problem: Problem) -> Program:
        if self._server is None:
            self._server = self.configuration.server(problem)
        return self._server

    def silo(self, problem: Problem) -> Program:
        if self._silo is None:
            self._silo = self.configuration.silo(problem)
        return self._silo


def _of_records(fit: LocalFit, posterior: Posterior, layout: Layout, silo: Silo) -> Normals:
    """q(Z_L) of a silo's records at the mean of q(Z_G)."""
    centre = posterior.eta["loc"]
    if not layout.size("record"):
        return Normals(np.zeros((silo.size, 0)), np.zeros((silo.size, 0, 0)))
    no_shift = centre.new_zeros(layout.size("global") + layout.size("silo"))
    moments = fit.family.moments(fit.params, posterior.theta, silo.view.rows, centre, no_shift)
    mean, sd = (to_numpy(v[: silo.size]) for v in (moments["loc"], moments["log_scale"].exp()))
    count, n = mean.shape
    root = np.broadcast_to(np.eye(n), (count, n, n))
    if "dense" in moments:
        root = to_numpy(moments["dense"][: count * n]).reshape(count, n, -1)
    elif "lower" in moments:
        root = to_numpy(moments["lower"][:count])
    root = sd[..., None] * root
    return Normals(mean, root @ root.transpose(0, 2, 1))


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


# ---- Worlds that begin late in a run of SFVI, so that a few rounds show what thousands would ----
#
# In the first hundreds of rounds latents have hardly moved, and what a silo sends says little about where they will
# end.
# A late world begins at a q(Z_G) fitted beforehand, each silo's latents settled to it by rounds of its own that nobody
# sees. What the server saw before is left out, so that attacks come out weaker than on whole runs, never stronger.
#
# Where latents belong to records, those of the whole pool are settled at once, and a silo looks its records up: that
# gives the targets of the attacks without the noise of short runs.

#: Numbers the rounds of settling, which must not share draws with those of the run.
_FIRST = 1 << 30
#: In which the latents of all records of a pool settle.
_POOL_ROUNDS = 1000


class LateStart:
    """Where late worlds of one model and configuration begin."""

    def __init__(
        self,
        model: FederatedModel,
        config: SFVI,
        silos: Sequence[dict[str, Tensor]],
        worlds: int,
        rounds: int = 1000,
        settling: int = 120,
        pool: dict[str, Tensor] | None = None,
    ) -> None:
        """Fit q(Z_G) to `silos` by `rounds` plain rounds, unrecorded. `settling`: a silo's own rounds in each of
        about `worlds` worlds; with a `pool` that all silos' records are from, half as many after the pool's."""
        long = dataclasses.replace(config, iterations=rounds)
        calls = len(silos) * (rounds + worlds * settling)
        compiled = choose_mode("auto", calls, work_of(silos, config, None)) == "compiled"
        server, engine, guards = build_parties(model, silos, long, Plain(), compile=compiled)
        for _ in Run(Parties(server, engine, guards), lambda _: None):
            pass
        self.posterior: Posterior = server.program.posterior(server.state.algorithm)
        self._program: Program = next(iter(engine.silos.values())).program  # whose trace serves all
        self._layout = server.problem.layout
        self._known: dict[bytes, Any] = {}
        self._pool: tuple[dict[bytes, int], Any] | None = None
        self._tensors = self._draws(settling)
        frame = getattr(self._program, "frame", None)
        if (
            pool is not None
            and frame is not None
            and not (server.problem.layout.size("silo") or frame.local_family.couples_records)
        ):
            everybody = build_parties(model, [pool], long, Plain(), compile=compiled)[1].silos["silo-1"]
            self._tensors = self._draws(_POOL_ROUNDS)
            settled = self._settle(everybody, self._program.init_local(everybody.view))
            self._pool = ({key: i for i, key in enumerate(_rows(everybody))}, settled)
            self._tensors = self._draws(settling // 2)

    def apply(self, server: Server, silos: Sequence[Silo]) -> None:
        """Put parties that have not begun there."""
        program: Any = server.program
        begun = program.init_at(self.posterior.eta, self.posterior.theta)
        server.state = server.state._replace(algorithm=begun)
        for silo in silos:
            settled = self._settled(silo)
            record = {name: value.clone() for name, value in settled.record.items()}  # its steps write into them
            silo.local = silo.local._replace(record=record, silo=settled.silo)

    def latents(self, silo: Silo) -> Normals:
        """Of the silo's records given the fitted q(Z_G), whatever algorithm the silo runs."""
        fit = self._program.local_fit(self._settled(silo) if self._pool is None else self._pool[1])
        if self._pool is not None:
            fit = fit._replace(params=take(fit.params, self._places(silo)))
        return _of_records(fit, self.posterior, self._layout, silo)

    def _places(self, silo: Silo) -> Tensor:
        """Where the silo's records stand in the pool."""
        assert self._pool is not None
        try:
            return torch.tensor([self._pool[0][key] for key in _rows(silo)], device=silo.view.weights.device)
        except KeyError:
            raise InputError(f"silo '{silo.name}' has a record that is not in the pool of this late start") from None

    def _draws(self, count: int) -> list[dict[str, Tensor]]:
        """What the server of a settled run would send in `count` rounds."""
        family, eta = self.posterior.family, self.posterior.eta
        eps = torch.randn(count, family.noise_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        theta = {f"theta/{name}": value for name, value in self.posterior.theta.items()}
        draws = [family.transform(eta, e.to(eta["loc"])) for e in eps]
        return [{"z_global": z, "shift": z - eta["loc"], **theta} for z in draws]

    def _settled(self, silo: Silo) -> Any:
        """The silo's latents after rounds in which q(Z_G) stands still. Worlds run again under other protections."""
        key = _fingerprint(silo)
        if key not in self._known:
            local: Any = self._program.init_local(silo.view)
            if self._pool is not None:
                there = take(self._pool[1].record, self._places(silo))
                spare = {name: torch.cat([there[name], v[silo.size :]]) for name, v in local.record.items()}
                local = local._replace(record=spare)
            self._known[key] = self._settle(silo, local)
        return self._known[key]

    def _settle(self, silo: Silo, local: Any) -> Any:
        """Contributions go nowhere."""
        gate = Gate(silo.name, self._program.tables)
        for k, tensors in enumerate(self._tensors):
            late = 2 * k >= len(self._tensors)  # the mean of the last half is what `latents` tells
            scalars = {"scale": 1.0, "averaging": float(late), "stage": 0.0}
            message = Broadcast(_FIRST + k, k + 1, {silo.name: k}, (silo.name,), scalars, tensors)
            gate.begin(message.sum_index, message.phase)
            _, after = self._program.contribute(message, local, silo.view._replace(turn=_FIRST + k), gate)
            local = self._program.commit(local, Pending(message.sum_index, after), message.sum_index)
        return local


def _rows(silo: Silo) -> list[bytes]:
    """Each record's content."""
    rows = [silo.view.rows[name][: silo.size].cpu().numpy() for name in sorted(silo.view.rows)]
    return [b"".join(values[i].tobytes() for values in rows) for i in range(silo.size)]


def _fingerprint(silo: Silo) -> bytes:
    """The same for the same records with the same draws: worlds are run again under other protections."""
    view, digest = silo.view, hashlib.sha256(silo.name.encode())
    for name in sorted(view.rows):
        digest.update(view.rows[name].cpu().numpy().tobytes())
    for draws in (view.record_draws, view.silo_draws):
        digest.update(draws.uniforms(_FIRST, 1).tobytes())
    return digest.digest()


# ---- Notes every message and total of a run (`sf.run`), without touching the protocol's own code ----


class Recorder:
    """A server and its engine, of `sf.run` or `fitting.build_parties`, watched from now on.

    `simulated` is the caller's statement that the data are made, resampled from published data, or published. On
    anything else a transcript is refused unless `real_data` is set, since it holds all that the audits warn of.
    """

    def __init__(
        self, server: Server, engine: LocalEngine, aggregation: str, *, simulated: bool, real_data: bool = False
    ) -> None:
        if not simulated and not real_data:
            raise InputError(
                "a transcript of a run on real data holds what the server could attack; say so with real_data = True "
                "(--real-data) after the institutions have agreed, or audit a run on simulated data"
            )
        self._server, self._engine, self._aggregation = server, engine, aggregation
        self._simulated = simulated
        self._entries: list[Entry] = []
        self._sums: list[Sum] = []
        self._began = time.monotonic()
        self._phase = SET_UP
        server.observe(self)
        engine.watch = self._exchanged
        if isinstance(server.secure_sum, WithHolder):
            server.secure_sum.observe(lambda direction, body: self._note(direction, KEY_HOLDER, body))

    def transcript(self) -> Transcript:
        program, problem = self._server.program, self._server.problem
        return Transcript(
            getattr(program, "name", type(getattr(program, "config", program)).__name__),
            self._aggregation,
            problem.silos,
            dict(program.tables),
            tuple(self._entries),
            tuple(self._sums),
            self._simulated,
        )

    def _exchanged(self, messages: Mapping[str, bytes], replies: Mapping[str, bytes]) -> None:
        first = next(iter(messages.values()), b"")
        if first[:1] == ROUND:  # the same bytes for all
            self._phase = decode_broadcast(first[1:]).phase
        for direction, bodies in (("down", messages), ("up", replies)):
            for silo, body in bodies.items():
                self._note(direction, silo, body)

    def _note(self, direction: Any, party: str, body: bytes) -> None:
        seconds = time.monotonic() - self._began
        self._entries.append(Entry(self._server.rounds, self._phase, direction, party, body, len(body), seconds))

    def total(self, index: int, total: Total) -> None:
        values = total.values.copy()
        self._sums.append(Sum(self._server.rounds, index, self._phase, total.survivors, values, values))

    def released(self, index: int, values: FloatArray) -> None:
        self._sums[-1] = self._sums[-1]._replace(released=values.copy())
        self._phase = SET_UP


# ----
# Where worlds of attacks on one configuration come from: its records, its sizes, and laboratories for each protection.
#
# Worlds of SFVI begin late in a run (`late`), those of other algorithms at their first round; at its other end, those
# of SFVI begin at the first round, and of others the last third of a longer run is seen.


class Protection(NamedTuple):
    """What a run is protected by, as the table of an audit names it."""

    name: str
    aggregation: SecureSum
    privacy: DP | None = None


PLAIN, MASKED = Protection("plain", Plain()), Protection("masked", Masked())
#: Worlds whose number says so are the adversary's own, and that in which it learns nothing but where to begin.
OWN, ELSEWHERE = 1_000_000, 2_000_000
Each = Callable[[], None]


def silent() -> None:
    """For callers that want no progress."""


class Workbench:
    """One configuration, for attacks that make worlds of it."""

    def __init__(
        self,
        model: FederatedModel,
        algorithm: Any,
        silos: Sequence[Data],
        *,
        rounds: int = 12,
        worlds: int = 50,
        simulated: bool = True,
        real_data: bool = False,
        late: LateStart | None = None,
    ) -> None:
        """`rounds` of each world; about `worlds` worlds under each protection, which interval widths follow.
        `late`: where worlds begin, if not at a fit that is made for it."""
        if len(silos) < 3:
            raise InputError(f"{len(silos)} silos: masked sums, which are audited beside plain ones, need at least 3")
        self.model, self.full, self.worlds, self.rounds = model, algorithm, worlds, rounds
        self.algorithm = shortened(algorithm, rounds)
        self.silos, self.pool = list(silos), pooled(silos)
        self.sizes = [len(next(iter(s.values()))) for s in silos]
        schema, _ = read_data(self.pool, "pool", torch.float64)
        self.layout, self.start = read_layout(model, schema, torch.float64)
        self._simulated, self._real_data = simulated, real_data
        self._late = late

    @property
    def all_global(self) -> bool:
        """Whether the model's parameters are all global latents."""
        return not (self.layout.size("record") or self.layout.size("silo") or self.start.theta)

    @property
    def records(self) -> int:
        return sum(self.sizes)

    @property
    def late(self) -> LateStart:
        """Fitted when it is first asked for."""
        if self._late is None:
            config = self.full if isinstance(self.full, SFVI) else SFVI()
            elsewhere = resampled(self.pool, self.sizes, ELSEWHERE)
            self._late = LateStart(self.model, config, elsewhere, 8 * self.worlds, pool=self.pool)
        return self._late

    def laboratory(self, protection: Protection, worlds: int | None = None, other_end: bool = False) -> Laboratory:
        """Under `protection`. The latents that worlds tell are those of a settled fit, since what moves a short run
        moves its own latents, too."""
        sfvi = isinstance(self.full, SFVI)
        unseen = 2 * self.rounds if other_end and not sfvi else 0
        return Laboratory(
            self.model,
            shortened(self.full, unseen + self.rounds) if unseen else self.algorithm,
            protection.aggregation,
            protection.privacy,
            worlds=worlds or self.worlds * len(self.sizes),
            late=self.late if sfvi and not other_end else unseen,
            targets=self.late if self.layout.size("record") else None,
            simulated=self._simulated,
            real_data=self._real_data,
        )


def per_record(values: Any) -> FloatArray:
    """(N,): mean over each record's own numbers of an argument (N, ...)."""
    return np.asarray(values.reshape(len(values), -1).double().mean(1).cpu().numpy(), np.float64)
