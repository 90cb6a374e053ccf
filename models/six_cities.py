"""Wheezing children of the six cities study: a Bayesian logistic mixed model (Hassan et al. 2023, S3.1).

Data: G. M. Fitzmaurice and N. M. Laird (1993), "A likelihood-based method for analysing longitudinal binary
responses", Biometrika 80, 141-151. 537 children were seen yearly from age 7 to 10; all that the model uses of
a child is whether the mother smoked and the four answers, so `six_cities_counts.csv` holds how many children
there are of each of the 2 x 16 kinds.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pyro
import torch
from pyro.distributions import Bernoulli, Normal
from torch import Tensor

from secure_fvi.federated_model import FederatedModel
from secure_fvi.models.base import Dataset, Program

COUNTS = Path(__file__).with_name("six_cities_counts.csv")
VISITS = ("age_7", "age_8", "age_9", "age_10")


def six_cities(smoke: Tensor, wheeze: Tensor) -> None:
    """The model for N children.

    `smoke` (N,) is 1 for a smoking mother, `wheeze` (N, 4) is 1 for a wheezing child. Global sites: `beta`
    (4,), the coefficients of 1, smoke, age and smoke x age on the logit scale, and `omega`, with exp(-omega)
    the standard deviation of the children's intercepts `b`. Age is in years, 0 at nine.
    """
    beta = pyro.sample("beta", Normal(smoke.new_zeros(4), 10.0).to_event(1))
    omega = pyro.sample("omega", Normal(smoke.new_zeros(()), 10.0))
    age = torch.arange(-2, 2, dtype=smoke.dtype, device=smoke.device)
    with pyro.plate("child", len(wheeze)):
        b = pyro.sample("b", Normal(0.0, torch.exp(-omega)))
        intercept = beta[0] + beta[1] * smoke + b
        slope = beta[2] + beta[3] * smoke
        logits = intercept.unsqueeze(-1) + slope.unsqueeze(-1) * age
        pyro.sample("wheeze", Bernoulli(logits=logits).to_event(1), obs=wheeze)


def load(data_dir: Path | None = None) -> Dataset:
    """The 537 children, from the table that is shipped; `data_dir` is not needed.

    The table's rows are sorted by (smoke, age_7, ..., age_10). A child's id is its place when each row is
    written out as often as it counts: 0 to 349 have mothers who did not smoke, 350 to 536 mothers who did.
    Float64, `smoke` (537,) and `wheeze` (537, 4).
    """
    with COUNTS.open(newline="") as file:
        rows = [{key: int(value) for key, value in row.items()} for row in csv.DictReader(file)]
    copies = torch.tensor([row["children"] for row in rows])
    smoke = torch.tensor([row["smoke"] for row in rows], dtype=torch.float64)
    wheeze = torch.tensor([[row[visit] for visit in VISITS] for row in rows], dtype=torch.float64)
    records = {
        "smoke": smoke.repeat_interleave(copies, dim=0),
        "wheeze": wheeze.repeat_interleave(copies, dim=0),
    }
    return Dataset(records, torch.arange(int(copies.sum())))


PROGRAM = Program(
    name="six-cities",
    description="logistic mixed model of wheezing children (537 children, 4 visits)",
    model=FederatedModel(six_cities, record_plate="child"),
    load=load,
)
