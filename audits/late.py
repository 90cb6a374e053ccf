"""Worlds that begin late in a run of SFVI, so that a few rounds show what thousands would.

In the first hundreds of rounds latents have hardly moved, and what a silo sends says little about where they will end.
A late world begins at a q(Z_G) fitted beforehand, each silo's latents settled to it by rounds of its own that nobody
sees. What the server saw before is left out, so that attacks come out weaker than on whole runs, never stronger.

Where latents belong to records, those of the whole pool are settled at once, and a silo looks its records up: that
gives the targets of the attacks without the noise of short runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.aggregation.plain import Plain
from secure_fvi.algorithms.base import Broadcast, Posterior, SiloProgram
from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.compiled import choose_mode
from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel
from secure_fvi.fitting import build_parties, work_of
from secure_fvi.privacy.gate import Gate
from secure_fvi.server import Server
from secure_fvi.silo import Silo
from secure_fvi.trees import take, to_numpy

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
        compiled = choose_mode("auto", calls, work_of(silos, config)) == "compiled"
        server, engine, _ = build_parties(model, silos, long, Plain(), compile=compiled)
        while not engine.run(server.round()).finished:
            pass
        self.posterior: Posterior = server.program.posterior(server.state.algorithm)
        self._program: SiloProgram = long.silo(server.problem)
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
            silo.local = silo.local._replace(record=settled.record, silo=settled.silo)

    def latents(self, silo: Silo) -> FloatArray:
        """(N, n_record): means of the silo's latents given the fitted q(Z_G), whatever algorithm the silo runs."""
        if self._pool is not None:
            return to_numpy(take(self._pool[1].record_average, self._places(silo))["loc"])
        return to_numpy(self._settled(silo).record_average["loc"][: silo.size])

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
            _, local = self._program.contribute(message, local, silo.view._replace(turn=_FIRST + k), gate)
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
