"""The clients' half of FedVI: minibatches of support and query, and the change of theta that came of them.

A client keeps nothing from round to round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms.base import Broadcast, LocalFit, Pending, Problem, SiloView
from secure_fvi.algorithms.fedavg import COUNT
from secure_fvi.algorithms.fedavg_frame import RECORDS, SILOS
from secure_fvi.algorithms.fedvi import FedVI
from secure_fvi.algorithms.fedvi_frame import DISTORTION, RATE, FedVIFrame, gaussian_kl
from secure_fvi.compiled import Traced
from secure_fvi.errors import InputError
from secure_fvi.privacy.gate import Gate, Release
from secure_fvi.trees import Params, take, to_numpy

IntArray = npt.NDArray[np.int64]
#: Steps of one round that have random numbers of their own: three draws each.
_MOST_STEPS = 2**16


class _Half(NamedTuple):
    """Support or query of one batch."""

    rows: Params  # (m, ...), noise for the encoder's model included
    present: Tensor  # (m,): 0 for rows that fill up


class FedVISilo:
    """`algorithms.base.SiloProgram`."""

    def __init__(self, config: FedVI, problem: Problem) -> None:
        self.config, self.problem = config, problem
        self.frame = FedVIFrame(config, problem)
        self.tables, self.terms, self.order = self.frame.tables, self.frame.terms, self.frame.order
        self._gradient = Traced(self._gradient_function, (None, 0, 0, None, None, None), problem.mode)

    def init_local(self, view: SiloView) -> tuple[()]:
        return ()

    def contribute(self, message: Broadcast, local: tuple[()], view: SiloView, gate: Gate) -> tuple[Release, tuple[()]]:
        values: dict[str, FloatArray] = {RECORDS: np.array(float(view.size)), SILOS: np.array(1.0)}
        if message.phase != COUNT:
            sent = {name: self.frame.move(message.tensors[name]) for name in self.frame.start}
            own, distortion, rate = self._run(sent, message, view)
            weight = view.size if self.frame.by_records else 1
            values |= {DISTORTION: np.array(view.size * distortion), RATE: np.array(rate)}
            values |= {name: weight * to_numpy(own[name] - value) for name, value in sent.items()}
        # Under privacy the gate adds its side coordinate itself.
        chosen = [values[b.name] for b in self.tables[message.phase].blocks if b.name in values]
        return gate.release(np.concatenate([np.ravel(v) for v in chosen])), ()

    def commit(self, local: tuple[()], pending: Pending, accepted: int) -> tuple[()]:
        return ()

    def local_fit(self, local: tuple[()]) -> LocalFit:
        raise InputError("fedvi keeps no local state; use result.personalise(records without labels)")

    def _run(self, point: Params, message: Broadcast, view: SiloView) -> tuple[Params, float, float]:
        """The point after the local steps; means over the steps of the query's negative log-likelihood, nats a record,
        and of KL(q(beta) || r), nats."""
        config, seen = self.config, []
        weights = self.frame.move(torch.tensor([config.tau / view.size, config.gamma * message.scalars["prior"]]))
        n_global = self.frame.family.noise_size
        for step, (support, query) in enumerate(self._batches(view)):
            key = 3 * (view.turn * _MOST_STEPS + step)
            eps = self.frame.move(view.silo_draws.normals(key, n_global + self.problem.layout.size("silo"))[0])
            gradient, terms = self._gradient(
                point,
                self._half(support, view, self.frame.encoder.fields, key + 1),
                self._half(query, view, tuple(view.rows), key + 2),
                eps[:n_global],
                eps[n_global:],
                weights,
            )
            point = {name: w - config.learning_rate * gradient[name] for name, w in point.items()}
            seen.append(terms)
        distortion, rate = torch.stack(seen).double().mean(0).tolist()
        return point, distortion, rate

    def _batches(self, view: SiloView) -> Iterator[tuple[IntArray, IntArray]]:
        """Support and query rows (m,) by step, in batches as even as can be, filled up with the spare row of weight
        zero. A client with one record has it in both."""
        config = self.config
        for epoch in range(config.epochs):
            drawn = view.batch_draws.uniforms(view.turn * config.epochs + epoch, 1)[0, : view.size, 0]
            for batch in np.array_split(np.argsort(drawn), -(-view.size // config.batch_size)):
                half = len(batch) // 2
                support, query = (batch[:half], batch[half:]) if half else (batch, batch)
                yield np.pad(support, (0, len(query) - len(support)), constant_values=view.size), query

    def _half(self, at: IntArray, view: SiloView, fields: Sequence[str], key: int) -> _Half:
        chosen = torch.from_numpy(at).to(self.problem.device)
        rows = take({name: view.rows[name] for name in fields}, chosen)
        noise = self.frame.encoder.noise
        if noise:
            # What the silo's secret seeds may come from a faster generator: it moves training only.
            seed = int(view.silo_draws.uniforms(key, 1)[0, 0, 0] * 2**53)
            rng = torch.Generator().manual_seed(seed)
            for name, shape in sorted(noise.items()):
                rows[name] = self.frame.move(torch.rand(len(at), *shape, generator=rng))
        return _Half(rows, view.weights[chosen])

    def _gradient_function(
        self, point: Params, support: _Half, query: _Half, eps_global: Tensor, eps_silo: Tensor, weights: Tensor
    ) -> tuple[Params, Tensor]:
        """Of equation (8) a record; and the query's mean negative log-likelihood and KL(q(beta) || r), nats (2,)."""
        density, frame = self.problem.density, self.frame

        def loss(point: Params) -> tuple[Tensor, Tensor]:
            family, eta, theta = frame.posterior(point)
            z = family.transform(eta, eps_global)
            sites, parameters = density.constrain(z, theta)
            loc, scale = frame.encoder.fn({**sites, **parameters}, support.present, **support.rows)
            no_latents = z.new_zeros(len(query.present), 0)
            terms = density.evaluate(z, loc + scale * eps_silo, no_latents, theta, query.rows)
            distortion = -(query.present * terms.records).sum() / query.present.sum()
            signs = torch.where(eps_silo < 0, -1.0, 1.0).to(scale)
            rate = gaussian_kl(loc, scale, signs, lambda beta: density.log_silo_prior(z, beta, theta))
            total = distortion + weights[0] * rate
            if self.config.prior:
                total = total + weights[1] * frame.global_rate(point)
            return total, torch.stack([distortion, rate]).detach()

        found: tuple[Params, Any] = torch.func.grad(loss, has_aux=True)(point)
        return found
