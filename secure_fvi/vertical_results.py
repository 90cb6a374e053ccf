"""What a vertical fit returns: q(gamma), which everyone may see, and each silo's own q(theta_j), which is its own."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from secure_fvi.aggregation.base import Block, BlockTable, SecureSum, carry
from secure_fvi.algorithms.base import Posterior
from secure_fvi.algorithms.vertical.config import Vertical
from secure_fvi.algorithms.vertical.frame import VerticalProblem
from secure_fvi.algorithms.vertical.silo_program import VerticalSiloProgram
from secure_fvi.algorithms.vertical.soul import Soul
from secure_fvi.algorithms.vertical.soul_program import SoulSiloProgram
from secure_fvi.driving import Rounds
from secure_fvi.errors import InputError
from secure_fvi.files import write_atomically
from secure_fvi.fitting import number_or_none
from secure_fvi.guarding import Guards
from secure_fvi.privacy.gate import Gate
from secure_fvi.results import RunSummary, SitePosterior, SitePosteriors, assessed
from secure_fvi.silo import Silo
from secure_fvi.trees import Params, part, to_numpy

if TYPE_CHECKING:
    from secure_fvi.vertical_fitting import VerticalParties


_MOMENT_DRAWS = 20_000
_MOMENT_SEED = 20_240_507


class VerticalLocalPosterior:
    """One silo's q(theta_j), or SOUL's draws, and the values of its `pyro.param`s. For that silo's eyes."""

    def __init__(self, silo: Silo) -> None:
        assert isinstance(silo.program, VerticalSiloProgram | SoulSiloProgram)
        self.silo, self._program, self._rows = silo.name, silo.program, silo.view.rows
        self._local, self.q = silo.local, silo.program.local_fit(silo.local)

    def __repr__(self) -> str:
        return f"VerticalLocalPosterior('{self.silo}')"

    @property
    def likelihood_weight(self) -> float:
        """w_j of the power likelihood in its last round; 0 in the augmented-variable model."""
        if isinstance(self._program, SoulSiloProgram):
            return self._program.core.share if self._program.config.is_power else 0.0
        return float(self._local.answered.share)

    @property
    def posterior(self) -> SitePosteriors:
        """Mean and sd of each site of the silo's program, from a fixed set of draws."""
        draws = self.sample(_MOMENT_DRAWS, _MOMENT_SEED)
        return SitePosteriors({name: SitePosterior(d.mean(0), d.std(0)) for name, d in draws.items()})

    def sample(self, n: int, seed: int = 0) -> Params:
        """`n` draws of every site of the silo's program, (n, *shape), in its own space."""
        points = part(self.q, "point")
        return torch.func.vmap(lambda t: self._program.predictor.constrain(t, points))(self._thetas(n, seed))

    def eta(self, rows: Mapping[str, Tensor], n: int, seed: int = 0) -> Tensor:
        """`n` draws of the predictor (n, N, C) for columns `rows` (N, ...) of this silo."""
        theta = self._thetas(n, seed)
        moved = {
            name: value.to(theta) if value.is_floating_point() else value.to(theta.device)
            for name, value in rows.items()
        }
        if moved.keys() != self._rows.keys():
            raise InputError(f"silo '{self.silo}': give the columns {', '.join(self._rows)}, not {', '.join(moved)}")
        points = part(self.q, "point")
        predictor, alone = self._program.predictor, bool(self._program.frame.terms)

        def draw(theta: Tensor) -> Tensor:  # as in the fit
            return (
                predictor.evaluate_alone(theta, points, moved) if alone else predictor.evaluate(theta, points, moved)[0]
            )

        return torch.func.vmap(draw)(theta)

    def _thetas(self, n: int, seed: int) -> Tensor:
        if n < 1:
            raise InputError(f"the number of draws must be at least 1, not {n}")
        return self._program.thetas(self._local, n, seed)


@dataclass(frozen=True, repr=False, kw_only=True)
class VerticalResult(RunSummary):
    """A fitted vertical model. `posterior` is gamma's; each silo's coefficients are in `local`, for that silo alone."""

    problem: VerticalProblem = field(repr=False)
    config: Vertical | Soul = field(repr=False)
    secure_sum: SecureSum = field(repr=False)
    variational: Posterior = field(repr=False)
    local: Mapping[str, VerticalLocalPosterior]  # by silo, where the silos are in this process

    def sample(self, n: int, seed: int = 0) -> Params:
        """`n` draws of the shared parameters, (n, *shape), in the model's own space."""
        return self.problem.likelihood.constrain(self._gamma(n, seed))

    def predict(
        self, silos: Mapping[str, Mapping[str, Tensor]], offset: Tensor | None = None, n: int = 200, seed: int = 0
    ) -> Params:
        """Posterior predictive draws of the response of new people: {"y": (n, N)}. Arguments as in `log_predictive`."""
        s, gamma = self._predictors(silos, offset, n, seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return {"y": self.problem.likelihood.distribution(s, gamma).sample()}

    def log_predictive(
        self,
        silos: Mapping[str, Mapping[str, Tensor]],
        response: Tensor,
        offset: Tensor | None = None,
        n: int = 200,
        seed: int = 0,
    ) -> Tensor:
        """Log predictive density of each new person's response, nats (N,): log of the mean over `n` draws.

        silos: each silo's columns of the new people, by id, aligned. The silos send draws of their predictors into one
        secure sum; its total, (n, N, C), is seen by who asks. The auxiliary noise of the model is part of the
        predictive. A privacy guarantee of the fit covers the people it was fitted to, not the columns of new ones.
        """
        s, gamma = self._predictors(silos, offset, n, seed)
        found = self.problem.likelihood.distribution(s, gamma).log_prob(response.to(s))
        return torch.logsumexp(found, 0) - math.log(n)

    def save(self, directory: str | Path) -> None:
        """result.json and posterior.safetensors (q(gamma)); under silos/, a file of each silo's own posterior."""
        directory = Path(directory)
        own = directory / "silos"
        own.mkdir(parents=True, exist_ok=True)
        for number, (name, local) in enumerate(sorted(self.local.items())):
            sites = {s: {"mean": p.mean.tolist(), "sd": p.sd.tolist()} for s, p in local.posterior.items()}
            # The silo's name may be any text, so it goes into the file, not into its name.
            content = json.dumps({"silo": name, "posterior": sites}, indent=2).encode()
            write_atomically(own / f"{number:04d}.json", content)
            write_atomically(own / f"{number:04d}.safetensors", save(_plain(local.q), {"silo": name}))
        tensors = {f"eta/{k}": v for k, v in self.variational.eta.items()}
        for site, moments in self.posterior.items():
            tensors |= {f"mean/{site}": moments.mean, f"sd/{site}": moments.sd}
        family = {"family": self.variational.family.name}
        write_atomically(directory / "posterior.safetensors", save(_plain(tensors), family))
        write_atomically(directory / "result.json", json.dumps(self.to_json(), indent=2).encode())

    def _gamma(self, n: int, seed: int) -> Tensor:
        if n < 1:
            raise InputError(f"the number of draws must be at least 1, not {n}")
        return self.variational.draws(n, seed)

    def _predictors(
        self, silos: Mapping[str, Mapping[str, Tensor]], offset: Tensor | None, n: int, seed: int
    ) -> tuple[Tensor, Tensor]:
        """Draws of s + offset (n, N, C), the auxiliary variables' noise included, and of gamma (n, n_gamma)."""
        names = self.problem.silos
        if set(silos) != set(names):
            raise InputError(f"give the new people's columns of each silo: {', '.join(names)}")
        etas = {name: self.local[name].eta(silos[name], n, seed + j) for j, name in enumerate(names)}
        if len({e.shape for e in etas.values()}) > 1:
            raise InputError("all silos must give columns of the same number of people")
        s = sum_of_predictors(self.secure_sum, etas, self.config.bound)
        noisy = len(names) - 1 if self.config.is_power else len(names)
        rng = torch.Generator().manual_seed(seed)
        s = s + self.config.rho * math.sqrt(noisy) * torch.randn(s.shape, generator=rng, dtype=torch.float64).to(s)
        if offset is not None:
            s = s + offset.to(s).unsqueeze(-1)
        return s, self._gamma(n, seed)


def vertical_result(
    parties: VerticalParties, config: Vertical | Soul, aggregation: SecureSum, rounds: Rounds
) -> VerticalResult:
    """The result of a finished run. Warns with SecureFVIWarning where `assessed` does."""
    server, engine = parties.server, parties.engine
    state = server.state.algorithm
    variational = server.program.posterior(state)
    verdict = assessed(server.program.verdict(state), config.name, server.rounds)
    gamma = variational.draws(_MOMENT_DRAWS, _MOMENT_SEED)
    draws = parties.problem.likelihood.constrain(gamma)
    tail = np.array(rounds.objectives)
    return VerticalResult(
        algorithm=config.name,
        seed=parties.problem.seed,
        silos=list(parties.problem.silos),
        rounds=server.rounds,
        seconds=rounds.seconds,
        # What SOUL climbs is a joint density, not a bound.
        elbo=None if isinstance(config, Soul) else number_or_none(tail.mean()),
        **verdict,
        posterior=SitePosteriors({k: SitePosterior(v.mean(0), v.std(0)) for k, v in draws.items()}),
        theta={},
        metrics={
            "elbo_sd": number_or_none(tail.std()),
            **server.program.metrics(state),
            "records": parties.problem.records,
            "execution": parties.problem.mode,
        },
        aggregation={
            "kind": aggregation.kind,
            "exchanges": engine.exchanges,
            "bytes_up_per_silo": max(engine.bytes_up.values()),
            "bytes_down_per_silo": max(engine.bytes_down.values()),
        },
        privacy=_claim(parties.server, parties.holder),
        problem=parties.problem,
        config=config,
        secure_sum=aggregation,
        variational=variational,
        local={name: VerticalLocalPosterior(silo) for name, silo in engine.silos.items()},
    )


def _claim(server: Any, holder: Guards | None) -> dict[str, Any] | None:
    """Each silo's guarantee for a person's columns, and whether the label has the same."""
    found: dict[str, Any] | None = server.claim()
    if found is not None:
        found["protects"] = "a person's columns at one silo" + (", and the response" if holder is not None else "")
    return found


def _plain(tensors: Mapping[str, Tensor]) -> Params:
    return {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}


# ---- One secure sum outside a fit: the silos' predictors of new people ----

_PHASE = "predict"


def sum_of_predictors(aggregation: SecureSum, etas: Mapping[str, Tensor], bound: float) -> Tensor:
    """The total of each silo's `etas`, all of one shape. Raises AggregationError past `bound`, as in a fit."""
    names = tuple(sorted(etas))
    first = etas[names[0]]
    table = BlockTable((Block("eta", tuple(first.shape), bound),))
    server, silos = aggregation.local_parties(names)
    context = hashlib.sha256(repr((_PHASE, tuple(first.shape))).encode()).digest()

    def answer(messages: Mapping[str, bytes]) -> dict[str, bytes]:
        return {name: silos[name].handle(message) for name, message in messages.items()}

    carry(server.prepare(1), answer)
    sent = {}
    for name in names:
        gate = Gate(name, {_PHASE: table})
        gate.begin(1, _PHASE)
        release = gate.release(to_numpy(etas[name]).reshape(-1))
        sent[name] = silos[name].contribute(release.sum_index, names, table, release.values, context)
    total = carry(server.total(1, names, table, sent, context), answer)
    return torch.from_numpy(total.values.reshape(first.shape)).to(first)
