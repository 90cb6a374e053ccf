"""Property 2.2 (a) of the paper at PVI's fixed point, and q's bound: both are the evidence on a conjugate model."""

from __future__ import annotations

import math

import torch
from pvi_world import NOISE, REGRESSION, build, make_regression
from torch.distributions import MultivariateNormal

import secure_fvi as sf
from secure_fvi.algorithms.natural import Natural


def test_local_free_energies_add_up_to_the_global_one() -> None:
    """sum of F_m(q*) + log Z_q* = F(q*) = log p(y), to 1e-8 nats."""
    silos, _ = make_regression((7, 9, 12))
    world = build(REGRESSION, silos, sf.PVI(rounds=3, damping=1.0, local_optimizer="closed_form", family="full"))
    world.round()
    q, prior = world.state.q, world.state.prior
    asked = world.server.program.broadcast(world.state, 10**6, 1)
    message = asked._replace(accepted=world.server.state.accepted, cohort=tuple(sorted(world.engine.silos)))
    mean, covariance = q.mean(), q.covariance()
    total = torch.zeros(())
    for name, data in zip(sorted(world.engine.silos), silos, strict=True):
        silo = world.engine.silos[name]
        silo.settle(world.server.state.accepted)
        site: Natural = silo.program.site(silo.local, message, name)  # type: ignore[attr-defined]
        residual = data["y"] - data["x"] @ mean
        spread = ((data["x"] @ covariance) * data["x"]).sum()
        likelihood = -0.5 * (residual.square().sum() + spread) / NOISE**2
        likelihood = likelihood - len(residual) * (math.log(NOISE) + 0.5 * math.log(2 * math.pi))
        own = site.shift @ mean - 0.5 * (site.precision @ mean @ mean + (site.precision * covariance).sum())
        total = total + likelihood - own
    total = total + q.log_normaliser() - prior.log_normaliser()
    x, y = torch.cat([s["x"] for s in silos]), torch.cat([s["y"] for s in silos])
    cover = 4.0 * x @ x.T + NOISE**2 * torch.eye(len(y))
    evidence = MultivariateNormal(torch.zeros(len(y)), cover).log_prob(y)
    torch.testing.assert_close(total, evidence, rtol=0, atol=1e-8)
