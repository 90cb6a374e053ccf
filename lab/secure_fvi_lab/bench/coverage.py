"""How often intervals that count the noise of privacy cover the truth, beside those of q, which take noise for data.

Ten coefficients from their prior, N(0, 1), rows of standard normal columns, a linear (noise of sd 1) or a logistic
response. SFVI: the server's own step, of the code that runs, mapped over all fits of a cell; records' gradients, which
for these models are a line of algebra, are clipped and get Gaussian noise of the multiplier that the job's terms name
(`test_the_bench_makes_the_rounds_of_a_fit` holds rounds to those of `sf.fit`). PVI: 200 silos, one round, their exact
sites, clipped and noised. Where noise hides the curvature there is no interval, and a fit counts as "not given".

Trials of an interval are coefficients, ten a fit; they are not quite independent. `best` is the mean sd over that of
the exact posterior for whoever knows the curvature of cut gradients, and adds up all rounds; where rounds release it
(`curvature_norm`), with the noise of gradients that share nothing but with counts of their lengths, as all here do
(`lengths_share`). `cut`: the share of records that these say are cut, in the mean over fits. `declared`: the same fits
with `least_information`, half of the least eigenvalue that any of a hundred made data sets has, of other truths and
rows; of adult, half of what its test set has, times records.

Cells of adult: the design of UCI Adult's 32,561 people, truths from the posterior of their incomes (Laplace's), incomes
drawn again. "114 columns" are the example's, "12 columns" ones that many people share.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from scipy.stats import binomtest
from torch import Tensor
from torch.func import vmap

from secure_fvi.aggregation import Plain
from secure_fvi.algorithms import noise_aware
from secure_fvi.algorithms.natural import Natural
from secure_fvi.algorithms.noise_aware import Clipped, NoiseAware
from secure_fvi.algorithms.sfvi import SFVI, SFVIProgram
from secure_fvi.algorithms.structured import global_units
from secure_fvi.compiled import Traced
from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel
from secure_fvi.fitting import build_parties
from secure_fvi.models import tabular, uci_adult
from secure_fvi.privacy.settings import RecordDP
from secure_fvi.privacy.terms import Extent, agree
from secure_fvi.trees import Params, merge, part
from secure_fvi_lab.machine import machine

Kind = Literal["linear", "logistic"]
DIMENSIONS, ROUNDS, DELTA, SILOS = 10, 300, 1e-5, 200
#: A norm that few gradients reach: a clipped logistic score is biased, and that is not what is measured.
CLIPPING: dict[Kind, float] = {"linear": 6.0, "logistic": 4.0}
#: And norms that more reach: a third of a linear regression's, 2 and 6% of a logistic one's.
MANY_CUT: tuple[tuple[Kind, float], ...] = (("linear", 3.0), ("logistic", 3.0), ("logistic", 2.2))
SITE = 160.0
EPSILONS, RECORDS = (0.3, 1.0, 3.0), (300, 3000)
RATE = 0.05
#: Rounds and learning rate with which broadcasts stray far: the noise of a round is longer, and steps are.
FAR, FAR_EPSILONS = (1000, 0.1), (1.0, 3.0)
#: Clipping norms of adult's cells, fits at most, and their settings.
ADULT, ADULT_FITS = {"12 columns": 4.0, "114 columns": 2.25}, {"12 columns": 1000, "114 columns": 20}
ADULT_EPSILON, ADULT_DELTA, ADULT_ROUNDS, ADULT_RATE = 1.0, 1e-6, 1000, 0.05
#: The twelve: the intercept, numbers in the example's units, and answers of which yes is 1 and no -1.
_NUMBERS = ("intercept", "age", "education-num", "capital-gain", "capital-loss", "hours-per-week")
_ANSWERS = (
    ("sex=Male",), ("marital-status=Married-civ-spouse",), ("native-country=United-States",), ("race=White",),
    ("workclass=Private",), ("occupation=Exec-managerial", "occupation=Prof-specialty"),
)  # fmt: skip
#: Made data sets by which `least_information` is declared, their seed, and the share of the least eigenvalue.
MADE, MADE_SEED, SURELY = 100, 20_261_130, 0.5
_PRIOR = Natural(torch.zeros(DIMENSIONS, dtype=torch.float64), torch.eye(DIMENSIONS, dtype=torch.float64))


def linear(x: Tensor, y: Tensor) -> None:
    beta = pyro.sample("beta", dist.Normal(torch.zeros(DIMENSIONS, dtype=x.dtype), 1.0).to_event(1))
    with pyro.plate("row", len(x)):
        pyro.sample("y", dist.Normal(x @ beta, 1.0), obs=y)


def logistic(x: Tensor, y: Tensor) -> None:
    beta = pyro.sample("beta", dist.Normal(torch.zeros(DIMENSIONS, dtype=x.dtype), 1.0).to_event(1))
    with pyro.plate("row", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


class Data(NamedTuple):
    beta: Tensor  # (B, n)
    x: Tensor  # (B, N, n), or (N, n) of all fits
    y: Tensor  # (B, N)


class Fits(NamedTuple):
    """Of B fits of one cell: broadcasts and totals of rounds, and where q ended."""

    z: Tensor  # (B, T, n)
    g: Tensor  # (B, T, n)
    h: Tensor  # (B, averaged, n, n) what rounds that are averaged released of the curvature; averaged 0: nothing
    clipped: list[Clipped | None]  # what their counts told
    mean: Tensor  # (B, n)
    sd: Tensor  # (B, n)


def lines(found: dict[str, Any]) -> Iterator[str]:
    numbers = f"{'covered (99% interval)':>24} {'by q':>6} {'best':>6} {'sd by noise':>12} {'hidden':>7}"
    yield f"{'cell':46} {'given':>9} {numbers}"
    for row in found["rows"]:
        name = f"{row['algorithm']} {row['kind']}, N = {row['records']}, epsilon {row['epsilon']:g}"
        for because, count in row.get("because", {}).items():
            yield f"  {count} of {row['fits']}: {because}"
        if row.get("rounds", ROUNDS) != ROUNDS:
            name += f", {row['rounds']} rounds"
        if row.get("curvature_norm"):
            name += ", curvature"
        if (cut := row.get("cut")) is not None:
            name += f", {cut:.1%} cut"
        if row["given"]:
            rest = f"{interval(row):>24} {row['by_q']:6.3f} {_widths(row)}"
        else:
            rest = f"{'-':>24} {row['by_q']:6.3f}"
        yield f"{name:46} {row['given']:4d}/{row['fits']:<4d} {rest}"
        if (said := row.get("declared")) is not None and said["given"]:
            name = f"  declared: least_information {said['least_information']:.3g}"
            yield f"{name:46} {said['given']:4d}/{said['fits']:<4d} {interval(said):>24} {'':6} {_widths(said)}"


def interval(row: dict[str, Any]) -> str:
    """What is covered, of a cell whose fits had intervals."""
    low, high = row["interval"]
    return f"{row['covered']:.3f} ({low:.3f}, {high:.3f})"


def _widths(row: dict[str, Any]) -> str:
    return f"{row['best']:6.2f} {row['noise_share']:11.0%} {row['hidden']:7.0%}"


def measure(
    fits: int, seed: int = 0, cells: Sequence[str] = ("default", "without", "pvi"), data: Path | None = None
) -> dict[str, Any]:
    """Cells of SFVI as it is by default, rounds releasing the curvature, and with norms that cut many; of SFVI without,
    also where broadcasts stray; of PVI; of adult, of the folder `data`. DESIGN's machine beside them."""
    of: list[tuple[Kind, int, float]] = [(k, n, e) for k in CLIPPING for n in RECORDS for e in EPSILONS]
    made: dict[str, list[Callable[[], dict[str, Any]]]] = {
        "default": [
            *(partial(sfvi_row, *cell, fits, seed, curvature_norm="auto") for cell in of),
            *(partial(sfvi_row, k, RECORDS[-1], EPSILONS[-1], fits, seed, curvature_norm="auto", norm=norm)
              for k, norm in MANY_CUT),
        ],
        "without": [
            *(partial(sfvi_row, *cell, fits, seed, declares=True) for cell in of),
            *(partial(sfvi_row, "logistic", RECORDS[-1], e, fits, seed, FAR, declares=True) for e in FAR_EPSILONS),
        ],
        "pvi": [partial(_pvi_row, e, fits, seed) for e in EPSILONS],
        "adult": [
            *(partial(_adult_row, columns, 0, fits, seed, data) for columns in ADULT),
            partial(_adult_row, "12 columns", "auto", fits, seed, data),
        ],
    }  # fmt: skip
    rows = [row() for kind in made if kind in cells for row in made[kind]]
    return {"machine": machine(), "delta": DELTA, "rows": rows}


def drawn(kind: Kind, records: int, fits: int, rng: torch.Generator) -> Data:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    beta, x = normal(fits, DIMENSIONS), normal(fits, records, DIMENSIONS)
    mean = (x @ beta.unsqueeze(-1)).squeeze(-1)
    if kind == "linear":
        return Data(beta, x, mean + normal(fits, records))
    return Data(beta, x, (torch.rand(fits, records, generator=rng, dtype=torch.float64) < mean.sigmoid()).double())


def program_of(
    kind: Kind, privacy: RecordDP, rounds: int, rate: float = RATE, curvature_norm: float | Literal["auto"] = 0
) -> SFVIProgram:
    """SFVI on the model of a cell."""
    model = FederatedModel({"linear": linear, "logistic": logistic}[kind], record_plate="row")
    return _program(model, DIMENSIONS, privacy, rounds, rate, curvature_norm)


def _program(
    model: FederatedModel,
    columns: int,
    privacy: RecordDP,
    rounds: int,
    rate: float,
    curvature_norm: float | Literal["auto"] = 0,
) -> SFVIProgram:
    """That all silos are here changes no number."""
    rows = {"x": torch.zeros(2, columns, dtype=torch.float64), "y": torch.zeros(2, dtype=torch.float64)}
    algorithm = SFVI(
        family="full", iterations=rounds, average_last=0.8, learning_rate=rate, curvature_norm=curvature_norm
    )  # fmt: skip
    parties = build_parties(model, [rows], algorithm, Plain(), privacy=privacy, noise_key=b"bench", compile=False)
    program = parties.server.program
    assert isinstance(program, SFVIProgram)
    return program


def _predictor(x: Tensor, z: Tensor) -> Tensor:
    """(B, N), by z (B, n)."""
    return z @ x.mT if x.dim() == 2 else (x @ z.unsqueeze(-1)).squeeze(-1)


def of_each(of: Params, fits: int) -> Params:
    """These tensors for each of so many fits, counts of steps aside, which all fits share."""
    return {name: v.expand(fits, *v.shape).clone() if v.dim() else v.clone() for name, v in of.items()}


def moving(program: SFVIProgram) -> Callable[..., tuple[Params, Params, Params]]:
    """The server's step of all fits together: its gradient mapped over fits, and its optimiser, which takes each number
    by itself. Traced: rounds are many and alike."""
    pulled, units = vmap(program._pull_back, (0, None, 0, 0, 0, None)), vmap(partial(global_units, program.family))

    def move(
        eta: Params, moments: Params, average: Params, eps: Tensor, direct: Tensor, path: Tensor, factors: Tensor
    ) -> tuple[Params, Params, Params]:
        gradient = merge(eta=pulled(eta, {}, eps, direct, path, {}).eta)
        params, moments = program.optimizer.step(merge(eta=eta), gradient, moments, factors[1], units(eta))
        average = {name: old + factors[2] * (params[name] - old) for name, old in average.items()}
        return part(params, "eta"), moments, average

    return Traced(move, (None,) * 7, "traced")


def simulated(
    program: SFVIProgram, kind: Kind, data: Data, sd: float, rng: torch.Generator, alike: bool = False
) -> Fits:
    """All rounds of all fits. sd: of the noise in each number of a total. alike: with the job's own public draws, the
    same in all fits, in place of draws of their own."""
    fits, config, curved, lengths = len(data.beta), program.config, program.curved, program.lengths
    assert lengths is not None
    clip, edges = lengths.gradient, torch.tensor(lengths.edges, dtype=torch.float64)
    start = program.init()
    eta, moments = (of_each(of, fits) for of in (start.eta, start.moments))
    average = {f"eta/{name}": v for name, v in eta.items()}
    move, draw = moving(program), vmap(program.family.transform)
    eps, norms = start.eps.expand(fits, -1), data.x.norm(dim=-1)
    z = draw(eta, eps)
    broadcasts, totals, released = [], [], []
    averaged, counts = 0, torch.zeros(fits, len(edges) + 1, dtype=torch.float64)
    for round_ in range(config.iterations):
        mean = _predictor(data.x, z)
        residual = data.y - (mean if kind == "linear" else mean.sigmoid())
        cut = residual * (clip / (residual.abs() * norms)).clamp(max=1.0)
        noise = torch.randn(z.shape, generator=rng, dtype=torch.float64)
        total = (cut @ data.x if data.x.dim() == 2 else (cut.unsqueeze(1) @ data.x).squeeze(1)) + sd * noise
        broadcasts.append(z)
        totals.append(total)
        averaged += round_ >= config.iterations * (1 - config.average_last)
        if averaged:
            counts += places(residual.abs() * norms, edges)
            counts += sd / lengths.unit * torch.randn(counts.shape, generator=rng, dtype=torch.float64)
        if averaged and curved is not None:
            weight = torch.ones_like(mean) if kind == "linear" else mean.sigmoid() * (-mean).sigmoid()
            weight = weight * (residual.abs() * norms < clip)
            weight = weight.minimum(curved.norm / norms.square())
            released.append(_summed(data, weight) + sd / curved.unit * noise_of(fits, z.shape[1], rng))
        factors = torch.tensor([1.0, config.multiplier(round_), 1 / max(averaged, 1)], dtype=torch.float64)
        following = torch.randn(fits, program.family.noise_size, generator=rng, dtype=torch.float64)
        if alike:
            following = program._noise(round_ + 1).expand(fits, -1)
        eta, moments, average = move(eta, moments, average, eps, total, torch.zeros_like(total), factors)
        eps, z = following, draw(eta, following)
    ended = {name.removeprefix("eta/"): value for name, value in average.items()}
    sds = vmap(program.family.stddev)(ended)
    h = torch.stack(released, 1) if released else z.new_zeros(fits, 0, 0, 0)
    told = [Clipped.of(lengths.edges, of / averaged, (sd / lengths.unit) ** 2 / averaged) for of in counts]
    return Fits(torch.stack(broadcasts, 1), torch.stack(totals, 1), h, told, ended["loc"], sds)


def places(length: Tensor, edges: Tensor, weights: Tensor | float = 1.0) -> Tensor:
    """(B, len(edges) + 1): how many records, of lengths (B, N), are between the edges."""
    up_to = torch.stack([(weights * (length <= edge)).sum(1) for edge in edges] + [(weights + 0 * length).sum(1)], 1)
    return up_to.diff(dim=1, prepend=torch.zeros_like(up_to[:, :1]))


def _summed(data: Data, weight: Tensor) -> Tensor:
    """(B, n, n): sums over rows of x x', times weights (B, N)."""
    rows = data.x if data.x.dim() == 3 else [data.x] * len(weight)
    return torch.stack([x.mT @ (each.unsqueeze(1) * x) for x, each in zip(rows, weight, strict=True)])


def noise_of(fits: int, n: int, rng: torch.Generator) -> Tensor:
    """(B, n, n) symmetric, of variance 1 on the diagonal and a half off it."""
    drawn = torch.randn(fits, n, n, generator=rng, dtype=torch.float64).tril()
    return (drawn + drawn.mT) / math.sqrt(2) * (1 + (math.sqrt(0.5) - 1) * torch.eye(n))


def whole_norm(clip: float, share: float) -> float:
    """The clipping norm that cuts gradients to `clip`; of its square the curvature has that share, lengths theirs."""
    return clip / math.sqrt((1 - share) * (1 - SFVI().lengths_share))


def sfvi_row(
    kind: Kind, records: int, epsilon: float, fits: int, seed: int, pace: tuple[int, float] = (ROUNDS, RATE),
    declares: bool = False, curvature_norm: float | Literal["auto"] = 0, norm: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A cell of SFVI. pace: rounds and learning rate; declares: also with `least_information`; curvature_norm: rounds
    release the curvature; norm: to which gradients are cut, in place of one that few reach. `strayed`: the sd of a
    row's linear predictor over the broadcasts that are averaged."""
    (rounds, rate), clip = pace, CLIPPING[kind] if norm is None else norm
    rng = torch.Generator().manual_seed(seed)
    share = SFVI().curvature_share if curvature_norm else 0.0
    whole = whole_norm(clip, share)
    privacy = RecordDP(epsilon=epsilon, delta=DELTA, clipping_norm=whole, noise="silo", retries=0)
    program = program_of(kind, privacy, rounds, rate, curvature_norm)
    variance = program.terms["round"].variance(1, whole)
    data = drawn(kind, records, fits, rng)
    found = simulated(program, kind, data, math.sqrt(variance), rng)
    first = math.ceil(rounds * (1 - program.config.average_last))
    floor = declared(kind, records) if declares else None
    answers, narrowed = _answers(program, found, first, variance, floor)
    q = (found.mean - data.beta).abs() < 1.96 * found.sd
    best = _best_sd(*_cut(kind, data, clip), (1 - share) * variance / rounds)
    cut = [told.share for told in found.clipped if told is not None]
    strayed = float(found.z[:, first:].var(1).sum(1).mean().sqrt())
    return {
        "algorithm": "SFVI", "kind": kind, "records": records, "rounds": rounds, "rate": rate, "strayed": strayed,
        "curvature_norm": curvature_norm, **_told(answers, data.beta, q, best), **_of(privacy), "because": why(answers),
        "cut": sum(cut) / len(cut) if cut else None,
        **({} if floor is None else {"declared": _declared(floor, narrowed, data.beta, q, best)}),
    }  # fmt: skip


def declared(kind: Kind, records: int) -> float:
    """What a job can say of its data's information before it has any."""
    made = drawn(kind, records, MADE, torch.Generator().manual_seed(MADE_SEED))
    return SURELY * float(torch.linalg.eigvalsh(_cut(kind, made, CLIPPING[kind])[0]).min())


def _declared(floor: float, answers: list[Any], beta: Tensor, q: Tensor, best: Tensor) -> dict[str, Any]:
    return {"least_information": floor, **_told(answers, beta, q, best)}


def traced(
    z: Tensor, g: Tensor, variance: float, h: Tensor | None = None, unit: float = 1.0
) -> tuple[noise_aware.Trace, noise_aware.Trace]:
    """Of rounds' broadcasts and totals (rounds, n), and of the first half of them; h (rounds, n, n): what they released
    of the curvature, in numbers of that `unit`."""
    trace = half = noise_aware.nothing_seen(z.shape[1], h is not None)
    for k, (at, total) in enumerate(zip(z, g, strict=True)):
        of = None if h is None else h[k]
        trace = noise_aware.seen(trace, at, total, variance, h=of, h_variance=variance / unit**2)
        half = trace if 2 * k < len(z) else half
    return trace, half


def _answers(
    program: SFVIProgram, found: Fits, first: int, variance: float, floor: float | None
) -> tuple[list[NoiseAware | str], list[NoiseAware | str]]:
    """`answers_of` the cells here."""
    one = torch.eye(found.mean.shape[1], dtype=torch.float64)
    line = bool(noise_aware.straight(program.problem))
    return answers_of(program, found, first, variance, floor, Natural(0 * one[0], one), line)


def answers_of(
    program: SFVIProgram, found: Any, first: int, variance: float, floor: float | None, prior: Natural, line: bool
) -> tuple[list[NoiseAware | str], list[NoiseAware | str]]:
    """Of the rounds from `first` on of `found`, Fits of any model: without `least_information`, and where it is
    `floor`, if any."""
    answers, narrowed, curved, lengths = (
        list[NoiseAware | str](),
        list[NoiseAware | str](),
        program.curved,
        program.lengths,
    )
    privacy = program.problem.privacy
    assert isinstance(privacy, RecordDP)
    norm = privacy.clipping_norm if lengths is None else lengths.gradient
    for z, g, h, told in zip(found.z[:, first:], found.g[:, first:], found.h, found.clipped, strict=True):
        seen = traced(z, g, variance) if curved is None else traced(z, g, variance, h, curved.unit)
        said = *seen, prior, norm, line, False
        cuts = None if told is None else (told, privacy.clipping_norm)
        answers.append(noise_aware.of_gradients(*said, None, cuts))
        if floor is not None:
            narrowed.append(noise_aware.of_gradients(*said, floor, cuts))
    return answers, narrowed


def laplace(kind: Kind, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mode (n,) of the posterior of x (N, n) and y (N,) under N(0, 1), by Newton, and its precision there (n, n):
    exact of a linear response."""
    z, one = torch.zeros(x.shape[1], dtype=x.dtype), torch.eye(x.shape[1], dtype=x.dtype)
    precision = one
    for _ in range(1 if kind == "linear" else 30):
        mean = x @ z if kind == "linear" else (x @ z).sigmoid()
        weight = torch.ones_like(mean) if kind == "linear" else mean * (1 - mean)
        precision = x.mT @ (weight.unsqueeze(1) * x) + one
        z = z + torch.linalg.solve(precision, x.mT @ (y - mean) - z)
    return z, precision


def _adult(columns: str, data: Path | None, split: str = "train") -> tuple[Tensor, Tensor]:
    """Design (32561, n) and incomes (32561,); of the test set 16,281 people."""
    if data is None:
        raise InputError("--adult reads 'uci_adult' from a folder: give --data DIR or set SECURE_FVI_DATA")
    people = uci_adult.load(data, split).records
    x, where = people["x"], {name: at for at, name in enumerate(uci_adult.feature_names())}
    if columns == "12 columns":
        answers = [2 * x[:, [where[name] for name in names]].sum(1) - 1 for names in _ANSWERS]
        x = torch.stack([*(x[:, where[name]] for name in _NUMBERS), *answers], 1)
    return x, people["y"]


def _adult_row(
    columns: str, curvature_norm: float | Literal["auto"], fits: int, seed: int, data: Path | None
) -> dict[str, Any]:
    x, y = _adult(columns, data)
    fits, clip, rng = min(fits, ADULT_FITS[columns]), ADULT[columns], torch.Generator().manual_seed(seed)
    centre, precision = laplace("logistic", x, y)
    root = torch.linalg.cholesky(torch.linalg.inv(precision))
    beta = centre + torch.randn(fits, len(centre), generator=rng, dtype=x.dtype) @ root.mT
    incomes = (torch.rand(fits, len(x), generator=rng, dtype=x.dtype) < (beta @ x.mT).sigmoid()).double()
    drawn_again = Data(beta, x, incomes)
    share = SFVI().curvature_share if curvature_norm else 0.0
    whole = whole_norm(clip, share)
    privacy = RecordDP(epsilon=ADULT_EPSILON, delta=ADULT_DELTA, clipping_norm=whole, noise="silo", retries=0)
    program = _program(tabular.MODEL, x.shape[1], privacy, ADULT_ROUNDS, ADULT_RATE, curvature_norm)
    variance = program.terms["round"].variance(1, whole)
    found = simulated(program, "logistic", drawn_again, math.sqrt(variance), rng)
    first = math.ceil(ADULT_ROUNDS * (1 - program.config.average_last))
    others, earned = _adult(columns, data, "test")
    other = Data(laplace("logistic", others, earned)[0].unsqueeze(0), others, earned.unsqueeze(0))
    least = float(torch.linalg.eigvalsh(_cut("logistic", other, clip)[0][0])[0])
    floor = max(SURELY * least * len(x) / len(others), 1e-9)
    answers, narrowed = _answers(program, found, first, variance, floor)
    q = (found.mean - beta).abs() < 1.96 * found.sd
    given = any(not isinstance(answer, str) for answer in answers)
    best = _best_sd(*_cut("logistic", drawn_again, clip), (1 - share) * variance / ADULT_ROUNDS) if given else found.sd
    return {
        "algorithm": f"adult, {columns},", "kind": "logistic", "records": len(x), "curvature_norm": curvature_norm,
        "because": why(answers),
        **_told(answers, beta, q, best), "declared": _declared(floor, narrowed, beta, q, best), **_of(privacy),
        "cut": sum(told.share for told in found.clipped if told is not None) / fits,
    }  # fmt: skip


def _pvi_row(epsilon: float, fits: int, seed: int) -> dict[str, Any]:
    records, n = RECORDS[-1], DIMENSIONS
    rng = torch.Generator().manual_seed(seed)
    privacy = RecordDP(epsilon=epsilon, delta=DELTA, clipping_norm=SITE, noise="distributed", retries=0)
    packed = n + n * (n + 1) // 2
    variance = agree(privacy, SILOS, 1.0, 1, Extent(packed, 0, 0)).variance(SILOS, SITE)
    data = drawn("linear", records, fits, rng)
    x, y = data.x.reshape(fits, SILOS, -1, n), data.y.reshape(fits, SILOS, -1, 1)
    precision = x.mT @ x
    rows, cols = torch.tril_indices(n, n)
    sites = torch.cat([(x.mT @ y).squeeze(-1), precision[..., rows, cols]], -1)
    sites = sites * (SITE / 2 / sites.norm(dim=-1, keepdim=True)).clamp(max=1.0)
    noise = torch.randn(fits, packed, generator=rng, dtype=torch.float64)
    totals = sites.sum(1) + math.sqrt(variance) * noise
    answers, narrowed, q, floor = [], [], [], declared("linear", records)
    for total, beta in zip(totals, data.beta, strict=True):
        lower = torch.zeros(n, n, dtype=torch.float64)
        lower[rows, cols] = total[n:]
        seen = Natural(total[:n], lower + lower.tril(-1).mT)
        answers.append(noise_aware.of_sites(seen, variance, _PRIOR))
        narrowed.append(noise_aware.of_sites(seen, variance, _PRIOR, floor))
        whole = seen.plus(_PRIOR)
        q.append((whole.mean() - beta).abs() < 1.96 * whole.stddev() if whole.proper else beta < -math.inf)
    best, inside = _best_sd(precision.sum(1), precision.sum(1), variance), torch.stack(q)
    return {
        "algorithm": "PVI", "kind": "linear", "records": records, **_of(privacy),
        **_told(answers, data.beta, inside, best), "declared": _declared(floor, narrowed, data.beta, inside, best),
    }  # fmt: skip


def _cut(kind: Kind, data: Data, clip: float) -> tuple[Tensor, Tensor]:
    """(B, n, n) curvature, and variance, of the sum of records' cut gradients at the truth."""
    mean = _predictor(data.x, data.beta)
    weight = torch.ones_like(mean) if kind == "linear" else mean.sigmoid() * (-mean).sigmoid()
    residual = data.y - (mean if kind == "linear" else mean.sigmoid())
    most = clip / data.x.norm(dim=-1)
    weight = weight * (residual.abs() < most)
    squares = residual.abs().minimum(most).square()
    return _summed(data, weight), _summed(data, squares)


def _best_sd(curvature: Tensor, own: Tensor, variance: float) -> Tensor:
    """(B, n) sds of the exact posteriors where the curvature (B, n, n) is known, and a shift has variance `own` by the
    data and `variance` by noise."""
    one = torch.eye(own.shape[-1], dtype=own.dtype)
    spread = own + variance * one
    told = curvature @ torch.linalg.solve(spread, curvature)
    return torch.linalg.inv(one + told).diagonal(dim1=1, dim2=2).sqrt()


def why(answers: list[Any]) -> dict[str, int]:
    """Of fits without intervals, how many for which reason."""
    return dict(Counter(answer.split(" (")[0] for answer in answers if isinstance(answer, str)))


def _of(privacy: RecordDP) -> dict[str, Any]:
    return {"epsilon": privacy.epsilon, "clipping_norm": privacy.clipping_norm}


def of_intervals(answers: list[NoiseAware | str], truth: Tensor, own: Tensor) -> dict[str, Any]:
    """In how many fits there are intervals, how often those of 95% cover the `truth` (fits, n), with Clopper and
    Pearson's interval of 99%, and how wide they are beside sds that are `own` (fits, n)."""
    at = [k for k, found in enumerate(answers) if not isinstance(found, str)]
    given = [found for found in answers if not isinstance(found, str)]
    if not given:
        return {"given": 0}
    mean = torch.stack([found.mean for found in given])
    sd = torch.stack([found.covariance.diagonal().sqrt() for found in given])
    inside = (mean - truth[at]).abs() < 1.96 * sd
    tested = binomtest(int(inside.sum()), inside.numel()).proportion_ci(0.99, "exact")
    found = {"given": len(given), "covered": float(inside.double().mean())}
    return found | {"interval": [float(tested.low), float(tested.high)], "width": float((sd / own[at]).mean())}


def _told(answers: list[NoiseAware | str], beta: Tensor, q: Tensor, best: Tensor) -> dict[str, Any]:
    told = {"fits": len(answers), "by_q": float(q.double().mean()), **of_intervals(answers, beta, best)}
    given = [answer for answer in answers if not isinstance(answer, str)]
    if not given:
        return told
    sd = torch.stack([answer.covariance.diagonal().sqrt() for answer in given])
    without = torch.stack([answer.without.diagonal().sqrt() for answer in given])
    hidden = torch.stack([torch.as_tensor(answer.hidden) for answer in given])
    told["best"] = told.pop("width")
    return told | {
        "hidden": float(hidden.double().mean()),
        "noise_share": float(((sd.square() - without.square()).clamp(min=0).sqrt() / sd).mean()),
    }
