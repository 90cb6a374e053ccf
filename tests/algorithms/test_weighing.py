"""What weighs q at the end of a run: the marginal likelihood of a silo, errors of means and sds, and other modes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import secure_fvi as sf
from secure_fvi.aggregation.base import BlockTable
from secure_fvi.algorithms import weighing
from secure_fvi.algorithms.natural import from_moments
from secure_fvi.algorithms.pvi import FINISH, PVIProgram
from secure_fvi.algorithms.weighing import WEIGHED, Weigher, points
from secure_fvi.fitting import build_parties
from secure_fvi.results import Result

SIZES = (6, 4, 5)


def _quiet(program: Any, silos: list[dict[str, Tensor]], algorithm: Any, **options: Any) -> Result:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sf.SecureFVIWarning)
        return sf.fit(program, silos, algorithm, sf.Plain(), compile=False, threads=1, **options)


def _rows(seed: int, centre: float = 0.0) -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    return [{"y": centre + torch.randn(n, generator=rng, dtype=torch.float64)} for n in SIZES]


# ---- a silo's marginal likelihood ----


def _nested(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
    own = pyro.sample("own", dist.Normal(0.0, 0.7))
    with pyro.plate("records", len(y)):
        effect = pyro.sample("effect", dist.Normal(0.0, 0.5))
        pyro.sample("y", dist.Normal(mu + own + effect, 0.4), obs=y)


@pytest.mark.parametrize("log_scale", [-0.5, -2.5])
@pytest.mark.parametrize("spreads", [(1.2, 3.0), (1.2, 1.2)])
def test_latents_are_integrated_out_whatever_their_conditionals(
    monkeypatch: pytest.MonkeyPatch, log_scale: float, spreads: tuple[float, float]
) -> None:
    """Of two levels of normal latents, whose q(Z_L | Z_G) are as before the first fit, no gains and a width that is too
    large or a quarter of the true one: the log marginal likelihood up to a constant, to .4 nats (.27 measured). The
    control: without the wide half of the draws, the narrow conditionals are wrong by more than twice that (1.3)."""
    monkeypatch.setattr(weighing, "_SPREADS", spreads)
    silos = _rows(3)
    server, engine, _ = build_parties(
        sf.FederatedModel(_nested, silo_sites=("own",)), silos, sf.PVI(family="full"), sf.Plain(), compile=False
    )
    problem, silo = server.problem, engine.silos["silo-1"]
    program, y = silo.program, silos[0]["y"]
    assert isinstance(program, PVIProgram)
    own = program.fit.init(silo.view)
    record = {**own.record, "log_scale": torch.full_like(own.record["log_scale"], log_scale)}
    record["loc"] = torch.cat([y, y[:1]])[:, None] * 0.5
    at_silo = {**own.silo, "log_scale": torch.full_like(own.silo["log_scale"], log_scale)}
    q = from_moments(torch.zeros(1).double(), torch.full((1, 1), 0.16).double())
    at = points(0, q, problem.layout)
    weigher = Weigher(problem, program.families.local, program.families.silo)
    found = torch.from_numpy(weigher(q, at, {}, record, at_silo, silo.view, 0))[1 : 1 + len(at.draws)]
    covariance = 0.41 * torch.eye(len(y)) + 0.49
    marginal = dist.MultivariateNormal(at.draws.expand(-1, len(y)), covariance).log_prob(y)
    error = found - marginal
    spread = float(error[at.eps[:, 0].abs() < 2][: len(at.eps) // 3].std())
    if spreads[1] > 2:
        assert spread < 0.4
    elif log_scale < -2:
        assert spread > 0.8


# ---- other modes ----


def _two_signs(y: Tensor) -> None:
    a = pyro.sample("a", dist.Normal(0.0, 2.0))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Normal(a**2, 1.0), obs=y)


def _one_sign(y: Tensor) -> None:
    a = pyro.sample("a", dist.LogNormal(0.0, 2.0))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Normal(a**2, 1.0), obs=y)


def _sum_of_signs(y: Tensor) -> None:
    """Two factors of a product: only both signs together change places."""
    a = pyro.sample("a", dist.Normal(1.0, 1.0))
    b = pyro.sample("b", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Normal((a - 1) * b.sum(), 1.0), obs=y)


def _components(ordered: bool) -> Callable[[Tensor], None]:
    def program(y: Tensor) -> None:
        low = pyro.sample("low", dist.Normal(torch.tensor([-1.0, 1.0]), 3.0).to_event(1))
        at = torch.stack([low[..., 0], low[..., 0] + low[..., 1].exp()], -1) if ordered else low
        with pyro.plate("r", len(y)):
            pyro.sample(
                "y", dist.MixtureSameFamily(dist.Categorical(torch.full((2,), 0.5)), dist.Normal(at, 0.5)), obs=y
            )

    return program


def _far_apart(y: Tensor) -> None:
    """Two groups that each look like outliers to the other: no symmetry says where the second mode is."""
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Cauchy(mu, 0.2), obs=y)


def _heavy_tail(y: Tensor) -> None:
    """One mode and a long tail to the left, in the logarithm of tau."""
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfCauchy(1.0))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Normal(mu, (tau**2 + 1).sqrt()), obs=y)


def _mixed(apart: float) -> list[dict[str, Tensor]]:
    silos = _rows(5)
    sides = torch.arange(sum(SIZES)) % 2 - 0.5
    sides[-1] = 0.0
    parts = sides.split(SIZES)
    return [{"y": 0.3 * s["y"] + apart * part} for s, part in zip(silos, parts, strict=True)]


@pytest.mark.parametrize(
    ("program", "silos", "several"),
    [
        pytest.param(_two_signs, _rows(1, 3.0), True, id="signs"),
        pytest.param(_one_sign, _rows(1, 3.0), False, id="one sign"),
        pytest.param(_components(False), _mixed(4.0), True, id="components"),
        pytest.param(_components(True), _mixed(4.0), False, id="components in order"),
        pytest.param(_far_apart, _mixed(6.0), True, id="two groups of outliers"),
        pytest.param(_far_apart, _mixed(0.1), False, id="one group"),
        pytest.param(_heavy_tail, _rows(2), False, id="a long tail"),
    ],
)
def test_another_mode_is_found_and_nothing_else(
    program: Callable[..., None], silos: list[dict[str, Tensor]], several: bool
) -> None:
    result = _quiet(program, silos, sf.PVI(local_steps=80, max_rounds=25))
    assert (result.convergence["other_mode_sd"] is not None) == several
    if several:
        assert result.converged is False
        assert result.convergence["other_mode_sd"] > 4


@pytest.mark.parametrize("latents", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_program_that_cannot_be_mapped_is_weighed(latents: bool) -> None:
    """Pyro's ordered logistic works in place; it is evaluated one by one."""

    def program(y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("r", len(y)):
            own = pyro.sample("own", dist.Normal(0.0, 0.3)) if latents else 0.0
            pyro.sample("y", dist.OrderedLogistic(mu + own, torch.tensor([-1.0, 1.0])), obs=y)

    silos = [{"y": torch.arange(2) % 3} for _ in range(3)]
    result = _quiet(program, silos, sf.PVI(local_steps=20, max_rounds=3))
    assert result.convergence["mean_error_sd"] < 1


# ---- where q is not weighed ----


@pytest.mark.parametrize(
    ("algorithm", "weighs"),
    [(sf.PVI(), True), (sf.PVI(rounds=3), False), (sf.PVI(family="diagonal"), False), (sf.SFVI(), True)],
)
def test_only_runs_that_stop_by_themselves_are_weighed(algorithm: Any, weighs: bool) -> None:
    server, _, _ = build_parties(sf.FederatedModel(_heavy_tail, "r"), _rows(2), algorithm, sf.Plain(), compile=False)
    table = server.program.tables.get(FINISH, BlockTable(()))
    assert (WEIGHED in {block.name for block in table.blocks}) == weighs


def test_under_privacy_no_likelihood_is_summed() -> None:
    algorithm, privacy = sf.PVI(rounds=3, family="full"), sf.SiloDP(noise_multiplier=1.0, clipping_norm=1.0)
    server, _, _ = build_parties(
        sf.FederatedModel(_heavy_tail, "r"), _rows(2), algorithm, sf.Masked(), compile=False, privacy=privacy
    )
    assert all(block.name != WEIGHED for table in server.program.tables.values() for block in table.blocks)
