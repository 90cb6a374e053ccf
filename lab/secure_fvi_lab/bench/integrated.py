"""How often private intervals cover where a record has a latent: six cities, a child's intercept integrated out or not.

Truths around the estimates for the 537 children, children drawn from the model. Cells of `integrated`: the intercept is
integrated out in the program, by quadrature, so that all latents are global and the posterior counts the noise. All
children of a kind (smoke and four answers) have one gradient, which is clipped; SFVI's own step is run, mapped over the
fits of a cell (`test_the_bench_of_six_cities_has_the_programs_gradients_and_what_they_say_of_curvature`). `width`:
the mean sd over that of the posterior without privacy (Laplace's, of the same likelihood). `declared`: the same fits
with `least_information`. `curvature`: as a run is by default, children say their curvature and how long their gradients
are, by a clipping norm that is so much longer that as many are cut.

`kept`: what a run with a latent of each child would say, were it not refused. Children are those of one silo, their
steps the product's own. `off`: the mean over fits of what the total is off the likelihood's slope where it was asked,
late in the run and before noise, over the sd of that slope by the data: an interval that counts the noise alone is off
by as many sds of the posterior.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyro
import torch
from pyro.distributions import Bernoulli, Categorical, MixtureSameFamily, Normal
from torch import Tensor
from torch.func import hessian, vmap

from secure_fvi.aggregation import Plain
from secure_fvi.algorithms.natural import Natural
from secure_fvi.algorithms.noise_aware import Clipped
from secure_fvi.algorithms.sfvi import SFVI, Sent, SFVIProgram
from secure_fvi.algorithms.structured import Batch, Latents
from secure_fvi.federated_model import FederatedModel
from secure_fvi.fitting import build_parties
from secure_fvi.models import six_cities
from secure_fvi.objective import Curved
from secure_fvi.privacy.settings import RecordDP
from secure_fvi_lab.bench.coverage import (
    MADE,
    MADE_SEED,
    SURELY,
    answers_of,
    interval,
    moving,
    noise_of,
    of_each,
    of_intervals,
    places,
    whole_norm,
    why,
)
from secure_fvi_lab.machine import machine

SITES = ("1", "smoke", "age", "smoke x age", "omega")
#: beta and omega near the posterior means of the 537 children; truths are that and normals of this sd.
CENTRE, SPREAD, SMOKES = (-3.1, 0.45, -0.2, 0.08, -0.75), 0.15, 0.35
NODES, ROUNDS, LAST, RATE, DELTA, CLIP = 40, 1000, 0.5, 0.1, 1e-5, 4.0
EPSILONS, CHILDREN = (1.0, 3.0), (537, 5_370, 20_000)
#: Of cells with a latent of each child, which take a thousand times as long.
KEPT_FITS, KEPT_CHILDREN, KEPT_SAMPLES = 4, 537, 20
_AGE = torch.arange(-2, 2, dtype=torch.float64)
_AT, _WEIGHT = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(NODES))
_WEIGHT = _WEIGHT / _WEIGHT.sum()
_PRIOR = Natural(torch.zeros(5, dtype=torch.float64), torch.eye(5, dtype=torch.float64) / 100)
#: The 32 kinds of children.
KIND_SMOKE = torch.arange(2, dtype=torch.float64).repeat_interleave(16)
KIND_WHEEZE = torch.tensor([[k >> j & 1 for j in (3, 2, 1, 0)] for k in range(16)] * 2, dtype=torch.float64)


def integrated(smoke: Tensor, wheeze: Tensor) -> None:
    """`six_cities` with the children's intercepts integrated out."""
    beta = pyro.sample("beta", Normal(smoke.new_zeros(4), 10.0).to_event(1))
    omega = pyro.sample("omega", Normal(smoke.new_zeros(()), 10.0))
    level = (beta[0] + beta[1] * smoke).unsqueeze(-1) + torch.exp(-omega) * _AT.to(smoke)
    slope = (beta[2] + beta[3] * smoke).unsqueeze(-1) * _AGE.to(smoke)
    with pyro.plate("child", len(wheeze)):
        given = Bernoulli(logits=level.unsqueeze(-1) + slope.unsqueeze(-2)).to_event(1)
        nodes = Categorical(_WEIGHT.to(smoke).expand(len(wheeze), NODES))
        pyro.sample("wheeze", MixtureSameFamily(nodes, given), obs=wheeze)


class Children(NamedTuple):
    truth: Tensor  # (B, 5)
    kinds: Tensor  # (B, 32) how many of each
    smoke: Tensor  # (B, N)
    wheeze: Tensor  # (B, N, 4)


def drawn(children: int, fits: int, rng: torch.Generator) -> Children:
    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=rng, dtype=torch.float64)

    normal = torch.randn(fits, 5, generator=rng, dtype=torch.float64)
    truth = torch.tensor(CENTRE, dtype=torch.float64) + SPREAD * normal
    smoke = (uniform(fits, children) < SMOKES).double()
    b = torch.exp(-truth[:, 4:]) * torch.randn(fits, children, generator=rng, dtype=torch.float64)
    level = truth[:, :1] + truth[:, 1:2] * smoke + b
    logits = level.unsqueeze(-1) + (truth[:, 2:3] + truth[:, 3:4] * smoke).unsqueeze(-1) * _AGE
    wheeze = (uniform(*logits.shape) < logits.sigmoid()).double()
    return Children(truth, counted(smoke, wheeze), smoke, wheeze)


def counted(smoke: Tensor, wheeze: Tensor) -> Tensor:
    """(B, 32) children of each kind."""
    kind = (16 * smoke + wheeze @ torch.tensor([8.0, 4.0, 2.0, 1.0], dtype=torch.float64)).long()
    return torch.stack([k.bincount(minlength=32) for k in kind]).double()


def scores(z: Tensor) -> Tensor:
    """(B, 32, 5) gradients of the kinds' log-likelihood at z (B, 5)."""
    smoke, answers = KIND_SMOKE[::16].reshape(1, 2, 1, 1), KIND_WHEEZE[:16]
    level, slope, omega = z[:, :2], z[:, 2:4], z[:, 4]
    b = torch.exp(-omega).reshape(-1, 1, 1, 1) * _AT.reshape(1, 1, -1, 1)

    def by_smoke(part: Tensor) -> Tensor:
        return part[:, 0].reshape(-1, 1, 1, 1) + part[:, 1].reshape(-1, 1, 1, 1) * smoke

    logits = by_smoke(level) + b + by_smoke(slope) * _AGE  # fits, smoke, nodes, ages
    chance = logits.sigmoid()
    log_p = torch.einsum("bsjt,kt->bskj", logits, answers) - torch.nn.functional.softplus(logits).sum(-1).unsqueeze(2)
    share = (log_p + _WEIGHT.log()).softmax(-1)  # fits, smoke, answers, nodes
    left = answers.sum(1).reshape(1, 1, -1, 1) - chance.sum(-1).unsqueeze(2)
    sloped = (answers @ _AGE).reshape(1, 1, -1, 1) - (chance @ _AGE).unsqueeze(2)
    one, age = (share * left).sum(-1), (share * sloped).sum(-1)
    of_omega = -(share * left * b[:, :, :, 0].unsqueeze(2)).sum(-1)
    smokes = smoke.squeeze(-1)
    return torch.stack([one, one * smokes, age, age * smokes, of_omega], -1).reshape(len(z), 32, 5)


def posterior(count: Tensor) -> tuple[Tensor, Tensor]:
    """Modes (B, 5) and precisions (B, 5, 5) without privacy."""

    def log_p(z: Tensor, count: Tensor) -> Tensor:
        level = (z[0] + z[1] * KIND_SMOKE).unsqueeze(-1) + torch.exp(-z[4]) * _AT
        logits = level.unsqueeze(-1) + ((z[2] + z[3] * KIND_SMOKE).unsqueeze(-1) * _AGE).unsqueeze(1)
        each = torch.einsum("kjt,kt->kj", logits, KIND_WHEEZE) - torch.nn.functional.softplus(logits).sum(-1)
        return (count * torch.logsumexp(each + _WEIGHT.log(), 1)).sum() - z.square().sum() / 200

    z, curved = torch.tensor(CENTRE, dtype=torch.float64).expand(len(count), 5), vmap(hessian(log_p))
    for _ in range(30):
        slope = torch.einsum("bk,bkn->bn", count, scores(z)) - z / 100
        step = torch.linalg.solve(curved(z, count), slope)
        z = z - step * (0.5 / step.norm(dim=1, keepdim=True)).clamp(max=1)
    return z, -curved(z, count)


def program_of(model: FederatedModel, epsilon: float, samples: int = 1, curvature: bool = False) -> SFVIProgram:
    """curvature: SFVI's defaults, with gradients cut to CLIP."""
    default = SFVI()
    whole = whole_norm(CLIP, default.curvature_share) if curvature else CLIP
    privacy = RecordDP(epsilon=epsilon, delta=DELTA, clipping_norm=whole, noise="silo", retries=0)
    algorithm = SFVI(
        family="full", iterations=ROUNDS, average_last=LAST, learning_rate=RATE, importance_samples=samples,
        lengths_share=default.lengths_share if curvature else 0, curvature_norm="auto" if curvature else 0,
    )  # fmt: skip
    rows = {name: value[:4] for name, value in six_cities.load().records.items()}
    parties = build_parties(model, [rows], algorithm, Plain(), privacy=privacy, noise_key=b"bench", compile=False)
    program = parties.server.program
    assert isinstance(program, SFVIProgram)
    return program


class Fits(NamedTuple):
    """Of B fits: broadcasts and totals of rounds, where q ended, and the share of children whose gradient was cut."""

    z: Tensor  # (B, T, 5)
    g: Tensor  # (B, T, 5) noised
    off: Tensor  # (B, T, 5) without noise, less the likelihood's slope at z
    h: Tensor  # (B, averaged, 5, 5) what rounds that are averaged released of the curvature; averaged 0: nothing
    clipped: list[Clipped | None]  # what their counts told
    mean: Tensor  # (B, 5)
    sd: Tensor  # (B, 5)
    cut: float


def simulated(program: SFVIProgram, data: Children, variance: float, rng: torch.Generator) -> Fits:
    fits, config, own = len(data.truth), program.config, bool(program.n_record)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    start = program.init()
    eta, moments = (of_each(of, fits) for of in (start.eta, start.moments))
    average = {f"eta/{name}": v for name, v in eta.items()}
    move, draw = moving(program), vmap(program._draw)
    eps = start.eps.expand(fits, -1)
    z, shift = draw(eta, eps)
    children = data.smoke.shape[1]
    centre = program.problem.start.z_record[:1].expand(children if own else 0, -1)
    latents = program.first_latents(centre, program.problem.start.z_silo)
    record, state = (
        {name: v.expand(fits, *v.shape).clone() for name, v in of.items()}
        for of in (latents.record, latents.record_moments)
    )
    ones, rows = torch.ones_like(data.smoke), {"smoke": data.smoke, "wheeze": data.wheeze}
    one, nothing = torch.ones((), dtype=torch.float64), torch.zeros(1, 0, dtype=torch.float64)

    def of_children(*args: Any) -> Any:
        z, shift, record, state, rows, weights, eps = args
        own, batch = Latents(record, state, {}, {}), Batch(rows, weights, eps, nothing)
        return program._step.together(Sent(z, shift, {}), own, batch, one)

    step, averaged, cut = vmap(of_children), 0, 0.0
    asked, totals, off, released = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
    lengths, curved, sd = program.lengths, program.curved, math.sqrt(variance)
    edges = torch.tensor(lengths.edges if lengths else (), dtype=torch.float64)
    counts = torch.zeros(fits, len(edges) + 1, dtype=torch.float64)
    for round_ in range(config.iterations):
        exact = scores(z)
        gradients, weights = exact, data.kinds
        if own:
            eps_record = normal(fits, program.samples, children, 1)
            gradients, _, record, state = step(z, shift, record, state, rows, ones, eps_record)
            weights = ones
        share = (CLIP / gradients.norm(dim=-1)).clamp(max=1) * weights
        total = torch.einsum("bk,bkn->bn", share, gradients)
        late = round_ >= config.iterations * (1 - config.average_last)
        averaged, cut = averaged + late, cut + late * float(((share < weights) * weights).sum() / weights.sum())
        if late and lengths is not None:
            counts += places(gradients.norm(dim=-1), edges, weights) + sd / lengths.unit * normal(*counts.shape)
        if late and curved is not None:
            exactly = torch.einsum("bk,bknm->bnm", weights, curvatures(z, curved))
            released.append(exactly + sd / curved.unit * noise_of(fits, z.shape[1], rng))
        asked.append(z)
        off.append(total[:, :5] - torch.einsum("bk,bkn->bn", data.kinds, exact))
        total = total + math.sqrt(variance) * normal(*total.shape)
        totals.append(total[:, :5])
        factors = torch.tensor([1.0, config.multiplier(round_), 1 / max(averaged, 1)], dtype=torch.float64)
        path = total[:, 5:] if own else torch.zeros_like(total)
        following = normal(fits, program.family.noise_size)
        eta, moments, average = move(eta, moments, average, eps, total[:, :5], path, factors)
        eps = following
        z, shift = draw(eta, eps)
    ended = {name.removeprefix("eta/"): value for name, value in average.items()}
    z, g, apart = (torch.stack(part, 1) for part in (asked, totals, off))
    h = torch.stack(released, 1) if released else z.new_zeros(fits, 0, 0, 0)
    told: list[Clipped | None] = [None] * fits
    if lengths is not None:
        told = [Clipped.of(lengths.edges, of / averaged, (sd / lengths.unit) ** 2 / averaged) for of in counts]
    return Fits(z, g, apart, h, told, ended["loc"], vmap(program.family.stddev)(ended), cut / averaged)


def curvatures(z: Tensor, curved: Curved) -> Tensor:
    """(B, 32, 5, 5) what a child of each kind says of its curvature at z (B, 5), by its cut gradient. A mixture's score
    has as its derivative the parts' mean derivative and the covariance of their scores."""
    smoke, answers, b = KIND_SMOKE[::16], KIND_WHEEZE[:16], torch.exp(-z[:, 4:]) * _AT
    level, slope = (z[:, k : k + 1] + z[:, k + 1 : k + 2] * smoke for k in (0, 2))
    of_age = slope.reshape(-1, 2, 1, 1) * _AGE
    logits = level.reshape(-1, 2, 1, 1) + b.reshape(-1, 1, NODES, 1) + of_age  # fits, smoke, nodes, ages
    chance = logits.sigmoid()
    one = torch.ones_like(chance)
    smokes = smoke.reshape(1, 2, 1, 1) * one
    along = torch.stack([one, smokes, _AGE * one, _AGE * smokes, -b.reshape(-1, 1, NODES, 1) * one], -1)
    left = answers.reshape(16, 1, 4) - chance.unsqueeze(2)  # fits, smoke, answers, nodes, ages
    log_p = torch.einsum("bsjt,at->bsaj", logits, answers) - torch.nn.functional.softplus(logits).sum(-1).unsqueeze(2)
    share = (log_p + _WEIGHT.log()).softmax(-1)
    score = torch.einsum("bsajt,bsjtn->bsajn", left, along)
    mean = torch.einsum("bsaj,bsajn->bsan", share, score)
    flat = torch.einsum("bsjt,bsjtn,bsjtm->bsjnm", chance * (1 - chance), along, along)
    curvature = torch.einsum("bsaj,bsjnm->bsanm", share, flat) - torch.einsum(
        "bsaj,bsajn,bsajm->bsanm", share, score, score
    )
    curvature = curvature + mean.unsqueeze(-1) * mean.unsqueeze(-2)
    curvature[..., 4, 4] -= (share * left.sum(-1) * b.reshape(-1, 1, 1, NODES)).sum(-1)
    long = mean.norm(dim=-1)[..., None, None]
    onto = torch.eye(5, dtype=z.dtype) - mean.unsqueeze(-1) * mean.unsqueeze(-2) / long.square()
    curvature = torch.where(long > curved.gradient, curved.gradient / long * onto @ curvature, curvature)
    curvature = (curvature + curvature.mT) / 2
    size = curvature.norm(dim=(-2, -1), keepdim=True)
    return (curvature * (curved.norm / size).clamp(max=1)).reshape(-1, 32, 5, 5)


def lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"{'cell':40} {'given':>9} {'covered (99% interval)':>24} {'by q':>6} {'width':>6} {'cut':>6}"
    for row in found["rows"]:
        name = f"{row['latents']}, N = {row['children']}, epsilon {row['epsilon']:g}"
        rest = interval(row) if row["given"] else ""
        width = f"{row['width']:.2f}" if row["given"] else ""
        given = f"{row['given']:4d}/{row['fits']:<4d}"
        yield f"{name:40} {given} {rest:>24} {row['by_q']:6.3f} {width:>6} {row['cut']:6.3f}"
        for because, count in row["because"].items():
            yield f"  {count} of {row['fits']}: {because}"
        if (said := row["declared"])["given"]:
            name = f"  declared: {said['least_information']:.3g}"
            yield f"{name:40} {said['given']:4d}/{row['fits']:<4d} {interval(said):>24} {'':6} {said['width']:6.2f}"
        if "off" in row:
            yield "  off, in sds: " + ", ".join(f"{s} {v:+.2f}" for s, v in zip(SITES, row["off"], strict=True))


def measure(fits: int, seed: int = 0) -> dict[str, Any]:
    cells = [(kind, n, e, fits) for kind in ("integrated", "curvature") for n in CHILDREN for e in EPSILONS]
    cells.append(("kept", KEPT_CHILDREN, EPSILONS[-1], min(fits, KEPT_FITS)))
    rows = [measured(*cell, seed) for cell in cells]
    return {"machine": machine(), "rounds": ROUNDS, "delta": DELTA, "clipping_norm": CLIP, "rows": rows}


def measured(
    latents: str, children: int, epsilon: float, fits: int, seed: int, declares: bool = True
) -> dict[str, Any]:  # fmt: skip
    """A cell, as `lines` has it. declares: also with `least_information`."""
    rng = torch.Generator().manual_seed(seed)
    kept = latents == "kept"
    model = six_cities.PROGRAM.model if kept else FederatedModel(integrated, record_plate="child")
    program = program_of(model, epsilon, KEPT_SAMPLES if kept else 1, latents == "curvature")
    privacy = program.problem.privacy
    assert isinstance(privacy, RecordDP)
    variance = program.terms["round"].variance(1, privacy.clipping_norm)
    data = drawn(children, fits, rng)
    found = simulated(program, data, variance, rng)
    first, floor = math.ceil(ROUNDS * (1 - LAST)), declared(children) if declares else None
    answers, narrowed = answers_of(program, found, first, variance, floor, _PRIOR, False)
    _, precision = posterior(data.kinds)
    own = torch.linalg.inv(precision).diagonal(dim1=1, dim2=2).sqrt()
    row: dict[str, Any] = {
        "because": why(answers),
        "latents": latents, "children": children, "epsilon": epsilon, "fits": fits,
        "by_q": float(((found.mean - data.truth).abs() < 1.96 * found.sd).double().mean()), "cut": found.cut,
    }  # fmt: skip
    if kept:
        slope = found.off[:, first:].mean(1)
        row["off"] = (torch.linalg.solve(precision, slope.unsqueeze(-1)).squeeze(-1) / own).mean(0).tolist()
    row |= of_intervals(answers, data.truth, own)
    if declares:
        row["declared"] = {"least_information": floor, **of_intervals(narrowed, data.truth, own)}
    return row


def declared(children: int) -> float:
    """Half of the least eigenvalue of the information that any of a hundred made data sets has."""
    made = drawn(children, MADE, torch.Generator().manual_seed(MADE_SEED))
    information = posterior(made.kinds)[1] - _PRIOR.precision
    return SURELY * float(torch.linalg.eigvalsh(information).min())
