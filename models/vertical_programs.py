"""The shipped vertical programs: simulated logistic and Poisson regressions, heart disease, adult income."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import torch
from pyro.distributions import HalfNormal, Normal
from torch import Tensor

from secure_fvi.errors import InputError
from secure_fvi.models import heart, uci_adult, vertical_poisson
from secure_fvi.models.base import VERTICAL

# ---- Simulated logistic regression whose columns are spread over silos (Hassan et al. 2024, section 5.1) ----

RECORDS, COLUMNS = 500, 20


class Data(NamedTuple):
    x: Tensor  # (N, p)
    y: Tensor  # (N,)
    beta: Tensor  # (p,) truth

    def by_silo(self, silos: int) -> Tensor:
        """(J, N, p / J)."""
        return self.x.reshape(len(self.x), silos, -1).movedim(1, 0).contiguous()


def make_data(seed: int, records: int = RECORDS, columns: int = COLUMNS) -> Data:
    """Standard normal columns and coefficients; the linear predictor of each record has standard normal noise."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(records, columns, generator=rng, dtype=torch.float64)
    beta = torch.randn(columns, generator=rng, dtype=torch.float64)
    noise = torch.randn(records, generator=rng, dtype=torch.float64)
    y = torch.bernoulli(torch.sigmoid(x @ beta + noise), generator=rng)
    return Data(x, y, beta)


def linear(x: Tensor) -> Tensor:
    """eta = x beta with beta ~ N(0, 1), x (N, D)."""
    beta = pyro.sample("beta", Normal(x.new_zeros(x.shape[-1]), 1.0).to_event(1))
    return x @ beta


# ----
# What a shipped vertical program is: silos' columns of the same people, a program for each, and the response


@dataclass(frozen=True)
class VerticalDataset:
    """Aligned records: row i is the same person everywhere."""

    silos: Mapping[str, dict[str, Tensor]]  # by id, the arguments of the silo's predictor, (N, ...)
    predictors: Mapping[str, Callable[..., Tensor]]  # by id, a Pyro program that returns eta
    response: Tensor  # (N,)
    offset: Tensor | None = None  # (N,)

    def __post_init__(self) -> None:
        if set(self.silos) != set(self.predictors):
            raise InputError("each silo needs its predictor")


@dataclass(frozen=True)
class VerticalProgram:
    """What `[model] program = "..."` names in a vertical run. `load` as in `models.base.Program`."""

    name: str
    description: str
    likelihood: str  # as in `[model] likelihood`
    load: Callable[..., VerticalDataset]
    likelihood_options: Mapping[str, Any] = field(default_factory=dict)
    scaled_by_records: bool = False  # `load` estimates scales from all people, which no epsilon covers


def vertical_program(name: str) -> VerticalProgram:
    """The program called `name`, one of `base.VERTICAL`."""
    module, attribute = VERTICAL[name].split(":")
    found: VerticalProgram = getattr(importlib.import_module(module), attribute)
    return found


#: Who would hold which answers of the census: five silos of adult.
ADULT_SILOS = {
    "registry": ("age", "race", "sex", "native-country"),
    "employer": ("workclass", "occupation", "hours-per-week"),
    "school": ("education", "education-num"),
    "household": ("marital-status", "relationship", "fnlwgt"),
    "bank": ("capital-gain", "capital-loss"),
}


def slopes_by_level(x: Tensor, level: Tensor) -> Tensor:
    """eta_i = x_i' beta[level_i] with beta[r] ~ N(mu, sigma^2): x (N, D), level (N,), priors of `vertical_poisson`."""
    zero = x.new_zeros(x.shape[-1])
    mu = pyro.sample("mu", Normal(zero, vertical_poisson.SCALE).to_event(1))
    sigma = pyro.sample("sigma", HalfNormal(zero + vertical_poisson.SCALE).to_event(1))
    beta = pyro.sample("beta", Normal(mu.expand(vertical_poisson.LEVELS, -1), sigma).to_event(2))
    return (x * beta[level]).sum(-1)


def load_logistic(
    data_dir: Path | None = None, silos: int = 2, records: int = RECORDS, columns: int = COLUMNS, seed: int = 0
) -> VerticalDataset:
    """`x` (N, columns / silos) a silo; nothing is read from `data_dir`."""
    if silos < 1 or records < 1 or columns % silos:
        raise InputError(f"columns = {columns} must be spread evenly over silos = {silos}, and records be at least 1")
    data = make_data(seed, records, columns)
    ids = [f"silo-{j + 1}" for j in range(silos)]
    parts = data.by_silo(silos)
    return VerticalDataset({n: {"x": parts[j]} for j, n in enumerate(ids)}, dict.fromkeys(ids, linear), data.y)


def load_poisson(
    data_dir: Path | None = None, areas: int = vertical_poisson.AREAS, rho: float = 1.0, seed: int = 0
) -> VerticalDataset:
    """Areas simulated with auxiliary noise `rho`; `x` (N, 2) and `level` (N,) at both silos."""
    data = vertical_poisson.simulate(seed, rho, areas)
    ids = [f"silo-{j + 1}" for j in range(len(data.x))]
    rows = {n: {"x": data.x[j], "level": data.level} for j, n in enumerate(ids)}
    return VerticalDataset(rows, dict.fromkeys(ids, slopes_by_level), data.y, data.offset)


def load_heart(
    data_dir: Path | None = None, network: str = "linear", hidden: tuple[int, ...] = (8,), seed: int = 0
) -> VerticalDataset:
    """All 918 patients, numbers as z-scores, missing ones marked.

    network: "linear" has a linear part beside the network and all weights sampled, which predicts best (docs/heart.md);
    "last-layer" is the paper's, weights as points but for the last layer (`hidden` 8, 8, 2 there).
    """
    if network not in ("linear", "last-layer"):
        raise InputError(f"network = '{network}' is unknown; choose linear or last-layer")
    data = heart.load(data_dir, missing=True)
    everyone = torch.ones(len(data.y), dtype=torch.bool)
    ids = ("clinic-1", "clinic-2")
    rows = {
        n: {"x": heart.standardise(x, numeric, everyone)}
        for n, x, numeric in zip(ids, data.x, data.numeric, strict=True)
    }
    if network == "linear":
        return VerticalDataset(rows, dict.fromkeys(ids, heart.bayesian_network(tuple(hidden))), data.y)
    predictors = {n: heart.split_network(tuple(hidden), seed=seed + j) for j, n in enumerate(ids)}
    return VerticalDataset(rows, predictors, data.y)


def load_adult(
    data_dir: Path | None = None, split: str = "train", records: int | None = None, silos: int = 5
) -> VerticalDataset:
    """The first `records` people; each silo holds the indicators of its own questions (ADULT_SILOS)."""
    if not 1 <= silos <= len(ADULT_SILOS):
        raise InputError(f"silos = {silos}: must be from 1 to {len(ADULT_SILOS)}")
    found = uci_adult.load(data_dir, split)
    x, y = found.records["x"][:records], found.records["y"][:records]
    names = uci_adult.feature_names()
    questions = list(ADULT_SILOS.items())
    held = dict(questions[: silos - 1]) | {questions[silos - 1][0]: sum((q for _, q in questions[silos - 1 :]), ())}
    rows = {
        silo: {"x": x[:, [i for i, name in enumerate(names) if name.split("=")[0] in columns]].contiguous()}
        for silo, columns in held.items()
    }
    return VerticalDataset(rows, dict.fromkeys(rows, linear), y)


LOGISTIC = VerticalProgram(
    "vertical-logistic", "logistic regression, simulated columns spread over silos", "bernoulli", load_logistic
)
POISSON = VerticalProgram(
    "vertical-poisson",
    "Poisson regression of simulated area counts with slopes by remoteness, columns at two silos",
    "poisson",
    load_poisson,
    {"intercept_scale": vertical_poisson.SCALE},
)
HEART = VerticalProgram(
    "heart", "heart disease from networks at two clinics that hold different columns", "bernoulli", load_heart,
    scaled_by_records=True,
)  # fmt: skip
ADULT = VerticalProgram(
    "vertical-adult", "logistic regression of income, census answers spread over five silos", "bernoulli", load_adult
)
