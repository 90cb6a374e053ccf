"""Membership inference on a released posterior: whose records was q(Z_G) fitted to?

The adversary holds the released q(Z_G), candidate records, and data of the same population, on which it fits reference
posteriors of its own, each to a random half. A record's signal is the log predictive density under q, as a logit.

lira    the target's signal beside the record's signals with and without it, both as normal (Carlini et al. 2022)
rmia    how often the record's likelihood ratio, target over references, beats that of others (Zarifzadeh et al. 2024)

Reference fits run side by side in one traced graph, mapped over runs: models without local latents only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import norm
from torch import Tensor
from torch.func import grad, vmap

from secure_fvi.aggregation import Masked, Plain
from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms.base import Posterior
from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.audits.base import CONTROL_CONFIDENCE, AuditRow, Control, Scored, judge
from secure_fvi.audits.scores import auc, auc_bound, told_at
from secure_fvi.audits.worlds import Data
from secure_fvi.compiled import Traced
from secure_fvi.discovery import read_layout
from secure_fvi.errors import InputError
from secure_fvi.families import Diagonal, GlobalFamily
from secure_fvi.federated_model import FederatedModel, read_data
from secure_fvi.fitting import check_schemas_agree, fit
from secure_fvi.optimizers import Optimizer
from secure_fvi.privacy.settings import DP
from secure_fvi.program_density import ProgramDensity
from secure_fvi.trees import Params, running_average

_DRAWS = 64  # of q, for predictive densities
_GAMMA = 2.0  # RMIA's threshold on ratios of likelihood ratios
_LEAST_SD = 1e-3  # of a record's signals, in logits


class References(NamedTuple):
    """Reference posteriors and who was in them."""

    eta: Params  # (M, ...) each
    inside: npt.NDArray[np.bool_]  # (M, N)


class Membership:
    """A model without local latents on a pool of records: its reference fits, signals and attacks."""

    def __init__(self, model: FederatedModel, pool: Mapping[str, Tensor], dtype: torch.dtype = torch.float64) -> None:
        schema, records = read_data(pool, "pool", dtype)
        layout, start = read_layout(model, check_schemas_agree({"pool": schema}), dtype)
        if layout.size("record") or layout.size("silo") or start.theta:
            raise InputError("membership is attacked in models whose parameters are all global latents")
        self.rows, self.size, self.start = records.rows, records.size, start
        self.density = ProgramDensity(model, layout, schema)
        self.family: GlobalFamily = Diagonal(layout.size("global"))

    def fit(self, inside: npt.NDArray[np.bool_], steps: int = 600, rate: float = 0.05, seed: int = 0) -> References:
        """Mean-field VI for each row of `inside` (M, N), all runs at once; q is averaged over the last quarter."""
        runs, optimizer = len(inside), Optimizer("adam", rate)
        eta = {k: v.expand(runs, *v.shape).clone() for k, v in self.family.init(self.start.z_global).items()}
        masks = torch.from_numpy(inside).to(self.start.z_global)
        step = Traced(self._step(optimizer), (None,) * 5, "traced")
        moments, average = optimizer.init(eta), eta
        noise = torch.Generator().manual_seed(seed)
        for t in range(steps):
            eps = torch.randn(runs, self.family.noise_size, generator=noise, dtype=masks.dtype)
            eta, moments = step(eta, moments, masks, eps, masks.new_tensor(1 - 0.99 * t / steps))
            late = t - 3 * steps // 4 + 1
            average = running_average(average, eta, late) if late > 0 else eta
        return References(average, inside)

    def signals(self, family: GlobalFamily, eta: Params, seed: int = 1) -> FloatArray:
        """(M, N) logit of each record's predictive density under each q, `eta` (M, ...); above 1 it counts as 1."""
        noise = torch.randn(
            _DRAWS, family.noise_size, generator=torch.Generator().manual_seed(seed), dtype=self.start.z_global.dtype
        )

        def one(eta: Params) -> Tensor:
            terms = vmap(lambda e: self._records(family.transform(eta, e)))(noise)
            return torch.logsumexp(terms, 0) - math.log(_DRAWS)

        log_p = torch.stack([one({k: v[m] for k, v in eta.items()}) for m in range(len(next(iter(eta.values()))))])
        log_p = log_p.clamp(max=-1e-9)
        logits: FloatArray = (log_p - torch.log(-torch.expm1(log_p))).numpy()
        return logits

    def lira(self, target: FloatArray, references: References, signals: FloatArray) -> FloatArray:
        """Log-likelihood ratio of each record's signal (N,), in against out, from the references' `signals` (M, N)."""
        self._check(references)
        parts = [np.where(w, signals, np.nan) for w in (references.inside, ~references.inside)]
        # Few runs a record: one sd for all, as Carlini et al. advise.
        sd = [max(float(np.sqrt(np.nanmean(np.nanvar(p, 0, ddof=1)))), _LEAST_SD) for p in parts]
        means = [np.nanmean(p, 0) for p in parts]
        ratio: FloatArray = norm.logpdf(target, means[0], sd[0]) - norm.logpdf(target, means[1], sd[1])
        return ratio

    def rmia(self, target: FloatArray, references: References, signals: FloatArray) -> FloatArray:
        """Share of other records z with LR(record, z) of at least gamma (N,): LR of p(x | target) / mean p(x)."""
        self._check(references)

        def log_p(logits: FloatArray) -> FloatArray:
            return -np.logaddexp(0.0, -logits)

        log_mean = np.logaddexp.reduce(log_p(signals), 0) - math.log(len(signals))
        ratio = log_p(target) - log_mean
        others = np.sort(ratio)
        # A rank says the same as comparing with every other record.
        return np.searchsorted(others, ratio - math.log(_GAMMA), side="right") / len(others) + 1e-9 * ratio

    def released(self, posterior: Posterior) -> FloatArray:
        """(N,) signals under a posterior as a fit returns it."""
        eta = {k: v.detach().unsqueeze(0) for k, v in posterior.eta.items()}
        return self.signals(posterior.family, eta)[0]

    def halves(self, runs: int, seed: int = 0) -> npt.NDArray[np.bool_]:
        """(runs, N): each record in exactly half of an even number of runs."""
        if runs < 4 or runs % 2:
            raise InputError(f"{runs} reference runs: give an even number of at least 4")
        rng = np.random.default_rng(seed)
        order = rng.random((runs, self.size)).argsort(0)
        inside: npt.NDArray[np.bool_] = order < runs // 2
        return inside

    def _step(self, optimizer: Optimizer) -> Any:
        def bound(eta: Params, held: Params, mask: Tensor, eps: Tensor) -> Tensor:
            z = self.family.transform(eta, eps)
            return (mask * self._records(z)).sum() + self.density.log_prior(z, {}) - self.family.log_prob(held, z)

        def step(eta: Params, moments: Params, masks: Tensor, eps: Tensor, scale: Tensor) -> tuple[Params, Params]:
            gradient = vmap(lambda e, m, n: grad(bound)(e, e, m, n))(eta, masks, eps)
            return optimizer.step(eta, gradient, moments, scale)

        return step

    def _records(self, z_global: Tensor) -> Tensor:
        """(N,) log p(record | Z_G)."""
        none = z_global.new_zeros(0)
        return self.density.evaluate(z_global, none, z_global.new_zeros(self.size, 0), {}, self.rows).records

    def _check(self, references: References) -> None:
        if (references.inside.sum(0) < 2).any() or ((~references.inside).sum(0) < 2).any():
            raise InputError("every record must be in at least two reference runs and out of two; see `halves`")


# ----
# Membership inference as rows of an audit: the posterior that a run released, with and without record privacy

_REFERENCES = 16
_ROUNDS = 600  # of the audited fit, as many as the references have steps
_SILOS = 3
#: How often each member counts in the positive control's posterior.
_COPIES = 10


def membership_rows(
    model: FederatedModel,
    pool: Data,
    private: Sequence[tuple[str, DP]] = (),
    *,
    seed: int = 9,
    told: Callable[[str], None] = lambda what: None,
) -> list[AuditRow]:
    """LiRA and RMIA on a posterior that was fitted to those of `pool` that coins chose, without privacy and under each
    `private` (name, settings). Sums that only hide messages release the same posterior, so they have no rows.

    Positive control: a posterior to which each member counts ten times, as a model that overfits has it. Negative:
    memberships drawn again.
    """
    attack = Membership(model, pool)
    told("reference posteriors")
    references = attack.fit(attack.halves(_REFERENCES))
    signals = attack.signals(attack.family, references.eta)
    rng = np.random.default_rng(seed)
    # By independent coins: so far as others' go, a record is added or not, which is what privacy speaks of.
    member = rng.random(attack.size) < 0.5
    told("a posterior that overfits")
    heavy = attack.fit(member[None] * np.int64(_COPIES))  # type: ignore[arg-type]  # a record counts so many times
    caught = attack.signals(attack.family, heavy.eta)[0]
    again = rng.permutation(member)
    people = np.arange(attack.size)
    attacks: dict[str, Callable[[FloatArray], FloatArray]] = {
        "LiRA": lambda seen: attack.lira(seen, references, signals),
        "RMIA": lambda seen: attack.rmia(seen, references, signals),
    }
    rows = []
    for name, privacy in (("none", None), *private):
        told(f"{name}: a released posterior")
        allowed = None if privacy is None or privacy.epsilon is None else (privacy.epsilon, privacy.delta)
        bound = {} if allowed is None else {"bound": auc_bound(*allowed)}
        released = _released(model, pool, member, privacy, attack)
        for kind, guesses in attacks.items():
            truth, scores = member.astype(np.float64), guesses(released)
            rows.append(
                judge(
                    f"members by {kind}: released posterior",
                    name,
                    "AUC",
                    auc(truth, scores, people),
                    Control(auc(truth, guesses(caught), people), f"each member counts {_COPIES} times"),
                    Control(auc(again.astype(np.float64), scores, people, CONTROL_CONFIDENCE), "members drawn again"),
                    0.5,
                    records=attack.size,
                    references=_REFERENCES,
                    **bound,
                    scored=Scored(truth, scores),
                    **told_at(truth, scores, allowed),
                )
            )
    return rows


def _released(
    model: FederatedModel, pool: Data, member: npt.NDArray[np.bool_], privacy: DP | None, attack: Membership
) -> FloatArray:
    """(N,) signals under the posterior of a run over three silos that share the members."""
    at = np.flatnonzero(member)
    silos = [{name: v[at[j::_SILOS]] for name, v in pool.items()} for j in range(_SILOS)]
    config = SFVI(family="diagonal", iterations=_ROUNDS, schedule="linear")
    return attack.released(fit(model, silos, config, Plain() if privacy is None else Masked(), privacy).variational)
