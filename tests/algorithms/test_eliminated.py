"""Silos' own latents integrated out around their mode, in partitioned VI of formulas."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pvi_world import World
from torch import Tensor

import secure_fvi as sf
from secure_fvi.algorithms import local_fit
from secure_fvi.algorithms.local_fit import Families, _balanced, _pairs, at_mean, marginal_gradient
from secure_fvi.algorithms.natural import Natural
from secure_fvi.algorithms.pvi import PVIProgram
from secure_fvi.dictionary import Column, Dictionary
from secure_fvi.families import conditional
from secure_fvi.fitting import build_parties

COLUMNS = {
    "y": Column("number", centre=0, scale=2), "x": Column("number", centre=0, scale=1), "ward": Column("id"),
    "item": Column("id"),
}  # fmt: skip
NESTED, CROSSED = "y ~ x + (1 | ward) + (1 | ward:item)", "y ~ x + (1 | ward) + (1 | item)"


@functools.cache
def _made(crossed: bool) -> tuple[PVIProgram, dict[str, Tensor]]:
    """What PVI runs at silos of three wards and eight items, two rows each, and the rows of the first."""
    tables = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        item = np.repeat(np.arange(8), 2)
        ward = rng.integers(0, 3, 16) if crossed else item % 3
        x = rng.normal(size=16)
        y = 1 + 0.5 * x + rng.normal(size=3)[ward] + rng.normal(size=8)[item] + rng.normal(size=16)
        tables.append({"y": y, "x": x, "ward": ward, "item": item})
    model = sf.glmm(CROSSED if crossed else NESTED, dictionary=Dictionary(COLUMNS))
    with pytest.MonkeyPatch.context() as patch:  # where q begins is no matter here
        patch.setattr("secure_fvi.algorithms.prior._START_STEPS", 1)
        going = sf.run(model, tables, sf.PVI(rounds=1, local_steps=2), compile=False, threads=1)
    laid = model.prepared(dict(zip("abc", tables, strict=True)))["a"]
    return going.server.program, {name: v for name, v in laid.items() if isinstance(v, Tensor)}  # type: ignore[return-value]


def _exact(program: PVIProgram, rows: Mapping[str, Tensor], z: Tensor) -> tuple[float, Tensor]:
    """log p(y | Z_G) as the normal distribution of all rows together that it is, in y's unit, and its gradient."""
    z = z.clone().requires_grad_()
    at = program.problem.density.constrain(z, {})[0]
    there = rows["present"] > 0
    item = torch.arange(len(there))[:, None].expand(there.shape)[there]
    sds = [s for name, s in at.items() if name.startswith("sd_")]
    same = [(g[:, None] == g).double() for g in (rows["g0"][there], item)]
    cov = sum(s**2 * one for s, one in zip(sds, same, strict=True)) + at["sigma"] ** 2 * torch.eye(len(item)).double()
    value = torch.distributions.MultivariateNormal((rows["x"] @ at["b"])[there], cov).log_prob(rows["y"][there])
    value.backward()
    assert z.grad is not None
    in_unit = int(there.sum()) * math.log(program.problem.model.of.response.scale)  # type: ignore[attr-defined]
    return float(value.detach()) - in_unit, z.grad


@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.later("False")
def test_of_a_normal_likelihood_nothing_is_approximated(crossed: bool) -> None:
    """Value and slope of log p(y | Z_G), near and far, from wherever the mode is looked for. The slope's mean over all
    signs is exact, and of nested groups each of these is. The control: of crossed ones it is not."""
    program, rows = _made(crossed)
    assert program.families.eliminates
    density, n = program.problem.density, program.families.n
    weights = torch.ones(len(rows["y"]), dtype=torch.float64)
    start = {name: v + 1e3 for name, v in program.families.silo.init(torch.zeros(1, 3).double()).items()}
    rng = torch.Generator().manual_seed(0)
    gradient, spread = marginal_gradient(density), 0.0
    for far in (0.3, 1.0, 3.0):
        z = far * torch.randn(n, generator=rng, dtype=torch.float64)
        value, slope = _exact(program, rows, z)
        found = [
            gradient(z, 0 * z, {}, {}, start, rows, weights, torch.zeros(1, len(weights), 0), torch.tensor([signs]))
            for signs in itertools.product((-1.0, 1.0), repeat=3)
        ]
        assert all(float(g.value) == pytest.approx(value, rel=1e-9) for g in found)
        slopes = torch.stack([g.direct for g in found])
        torch.testing.assert_close(slopes.mean(0), slope, rtol=1e-7, atol=1e-8)
        spread = max(spread, float((slopes - slope).abs().max()))
    assert (spread > 1e-3) == crossed


@pytest.mark.later
def test_what_is_kept_of_a_silos_latents_is_their_posterior() -> None:
    """At a Z_G that is known, by its normal equations; and how the mean follows Z_G, by the mean at another one."""
    program, rows = _made(False)
    density, silo = program.problem.density, program.families.silo.init(torch.zeros(1, 3).double())
    weights = torch.ones(len(rows["y"]), dtype=torch.float64)
    z = torch.linspace(-0.5, 0.5, program.families.n, dtype=torch.float64)

    def kept(z: Tensor) -> dict[str, Tensor]:
        return at_mean(density, z, {}, silo, rows, weights)

    def log_p(u: Tensor) -> Tensor:
        terms = density.evaluate(z, u, z.new_zeros(len(weights), 0), {}, rows)
        return terms.records.sum() + terms.silo

    zero = torch.zeros(3, dtype=torch.float64)
    precision = -torch.func.hessian(log_p)(zero)
    moments = program.families.silo.moments(kept(z), {}, {}, z, 0 * z)
    torch.testing.assert_close(moments["loc"][0], torch.linalg.solve(precision, torch.func.grad(log_p)(zero)))
    factor = conditional.transform(moments, torch.eye(3).double()[:, None])[:, 0] - moments["loc"]
    torch.testing.assert_close(factor.mT @ factor, torch.linalg.inv(precision))
    by = 1e-5 * torch.ones_like(z)
    change = (kept(z + by)["loc"] - kept(z - by)["loc"])[0] / 2
    torch.testing.assert_close(kept(z)["coupling"][0] @ by, change, rtol=1e-5, atol=1e-10)


def test_where_it_is_not_sound_latents_are_fitted_as_before() -> None:
    """Under a likelihood that is not log-concave, in minibatches, by a family of one's own choice, and by an optimiser
    of one draw."""
    problem = _made(True)[0].problem
    assert Families(sf.PVI(), problem).eliminates
    for options in (
        {"sampling_rate": 0.5}, {"silo_family": sf.Conditional(scale="diagonal")}, {"local_optimizer": "adam"}
    ):  # fmt: skip
        assert not Families(sf.PVI(**options), problem).eliminates  # type: ignore[arg-type]
    assert not sf.glmm(CROSSED, "student", dictionary=Dictionary(COLUMNS)).concave


def _wards(x: Tensor, y: Tensor, ward: Tensor) -> None:
    b = pyro.sample("b", dist.Normal(torch.zeros(2), 3.0).to_event(1))
    spread = pyro.sample("spread", dist.LogNormal(0.0, 0.5))
    u = pyro.sample("u", dist.Normal(torch.zeros(3), spread).to_event(1))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Normal(b[0] + b[1] * x + u[ward], 0.5), obs=y)


def test_under_privacy_they_are_integrated_out_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """With next to no noise q is where it is without privacy. The control: by steps of their own it is not."""
    rng = torch.Generator().manual_seed(0)
    silos = []
    for _ in range(2):
        x, ward = torch.randn(30, generator=rng), torch.arange(30) % 3
        silos.append({"x": x, "y": 1 + x + torch.randn(3, generator=rng)[ward] + 0.5 * torch.randn(30, generator=rng)})
        silos[-1]["ward"] = ward
    model = sf.FederatedModel(_wards, silo_sites=("u",), record_plate="row")
    monkeypatch.setattr(sf.FederatedModel, "concave", True)
    privacy = sf.SiloDP(noise_multiplier=1e-6, clipping_norm=1e4, noise="silo")

    def fitted(privacy: sf.SiloDP | None = None) -> Natural:
        given: Any = {} if privacy is None else {"privacy": privacy, "noise_key": b"k" * 32}
        algorithm = sf.PVI(rounds=1, damping=1.0, local_steps=50)
        server, engine, _ = build_parties(model, silos, algorithm, sf.Plain(), compile=False, **given)
        world = World(server, engine)
        world.round()
        q: Natural = world.state.q
        return q

    plain = fitted()
    root = torch.linalg.cholesky(torch.linalg.inv(plain.precision))

    def off(q: Natural) -> tuple[float, float]:
        """How far its mean is, in sds, and its precision, in that of the plain one."""
        turned = root.mT @ q.precision @ root
        return float(((q.mean() - plain.mean()) / plain.stddev()).abs().max()), float(
            (turned - torch.eye(3)).abs().max()
        )

    found = off(fitted(privacy))
    monkeypatch.setattr(local_fit, "eliminates", lambda problem: False)
    by_steps = off(fitted(privacy))
    print(found, by_steps)
    assert max(found) < 0.1
    assert max(by_steps) > 0.3


def test_draws_of_a_step_have_the_moments_of_the_normal() -> None:
    half = torch.randn(8, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    eps = _pairs(_balanced(half))
    torch.testing.assert_close(eps.mean(0), torch.zeros(5).double())
    torch.testing.assert_close(eps.mT @ eps / len(eps), torch.eye(5).double())


def _nested_study() -> tuple[sf.FederatedModel, list[dict[str, Any]]]:
    """Three sites of 4 wards, of each 12 patients, of each 3 visits."""
    tables = []
    for seed in (1, 2, 3):
        drawn, rows = random.Random(seed), []
        for ward in range(4):
            of_ward = drawn.gauss(0, 1.5)
            for patient in range(12):
                of_patient = drawn.gauss(0, 2)
                for _ in range(3):
                    x = drawn.uniform(0, 10)
                    y = 8 + 0.5 * x + of_ward + of_patient + drawn.gauss(0, 2)
                    rows.append((round(y, 3), round(x, 2), f"w{ward}", f"{ward}-{patient}"))
        tables.append(dict(zip(("y", "x", "ward", "patient"), map(list, zip(*rows, strict=True)), strict=True)))
    columns = {
        "y": Column("number", low=-10, high=30), "x": Column("number", low=0, high=10),
        "ward": Column("category", levels=("w0", "w1", "w2", "w3")), "patient": Column("id"),
    }  # fmt: skip
    return sf.glmm("y ~ x + (1 | ward / patient)", dictionary=Dictionary(columns), local=("ward",)), tables


def _crossed_study() -> tuple[sf.FederatedModel, list[dict[str, Any]]]:
    """Three sites of 6 wards and 8 items, counts in 150 rows."""
    rng, tables = np.random.default_rng(12), []
    for _ in range(3):
        of_ward, of_item = 0.5 * rng.normal(size=6), 0.4 * rng.normal(size=8)
        rows = []
        for _ in range(150):
            ward, item = rng.integers(6), rng.integers(8)
            x = rng.uniform(0, 4)
            count = int(rng.poisson(math.exp(0.4 + 0.25 * x + of_ward[ward] + of_item[item])))
            rows.append((count, round(x, 2), f"w{ward}", f"i{item}"))
        tables.append(dict(zip(("y", "x", "ward", "item"), map(list, zip(*rows, strict=True)), strict=True)))
    columns = {
        "y": Column("integer", low=0, high=100), "x": Column("number", low=0, high=4),
        "ward": Column("category", levels=tuple(f"w{k}" for k in range(6))),
        "item": Column("category", levels=tuple(f"i{k}" for k in range(8))),
    }  # fmt: skip
    formula = "y ~ x + (1 | ward) + (1 | item)"
    return sf.glmm(formula, "poisson", dictionary=Dictionary(columns), local=("ward", "item")), tables


#: By name, posterior mean and sd by NumPyro's NUTS on all rows together under the same priors, 2 x 8,000 draws, of an
#: effective sample size of 2,400 at least: its means are known to .02 sds.
_NUTS = {
    "nested": {
        "(Intercept)": (9.2113, 0.5883), "x": (0.4817, 0.0395), "sd(ward) (Intercept)": (1.7306, 0.5073),
        "sd(ward:patient) (Intercept)": (2.0960, 0.1768), "sigma": (2.0691, 0.0871),
    },
    "crossed": {
        "(Intercept)": (0.5544, 0.2155), "x": (0.2250, 0.0230), "sd(ward) (Intercept)": (0.8041, 0.1600),
        "sd(item) (Intercept)": (0.3643, 0.0702),
    },
}  # fmt: skip


@pytest.mark.slow  # a minute of the processor or two, each
@pytest.mark.parametrize("study", ["nested", "crossed"])
def test_groups_inside_silos_are_fitted_by_default(study: str) -> None:
    """Where steps of the wards' own ran off in the first round."""
    model, tables = {"nested": _nested_study, "crossed": _crossed_study}[study]()
    result = sf.fit(model, tables, seed=0)
    assert (result.algorithm, result.converged) == ("pvi", True), result.convergence["reason"]
    assert result.rounds < 10
    found = model.readable(result.sample(20_000))
    assert found is not None
    assert found.keys() == _NUTS[study].keys()
    off = {n: ((float(found[n].mean()) - m) / sd, float(found[n].std()) / sd) for n, (m, sd) in _NUTS[study].items()}
    print(off)
    assert all(abs(mean) < 0.1 and abs(ratio - 1) < 0.1 for mean, ratio in off.values()), off
