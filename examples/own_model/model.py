"""A statistician's own model: systolic blood pressure of patients at three visits, in three hospitals.

An ordinary Pyro function of one silo's data. Nothing in it knows about federation: `own_model.toml` says that
`hospital` belongs to a silo and that the plate `patient` counts records.
"""

import pyro
import torch
from pyro.distributions import HalfNormal, Normal


def blood_pressure(treated: torch.Tensor, pressure: torch.Tensor) -> None:
    """`treated` (N,) is 0 or 1, `pressure` (N, 3) is in mmHg."""
    level = pyro.sample("level", Normal(130.0, 20.0))
    effect = pyro.sample("effect", Normal(0.0, 10.0))
    between = pyro.sample("between", HalfNormal(20.0))  # standard deviation between patients
    within = pyro.sample("within", HalfNormal(20.0))  # standard deviation between visits of a patient
    hospital = pyro.sample("hospital", Normal(0.0, 5.0))
    with pyro.plate("patient", len(treated)):
        own = pyro.sample("own", Normal(0.0, between))
        mean = level + hospital + effect * treated + own
        pyro.sample("pressure", Normal(mean.unsqueeze(-1), within).expand(pressure.shape).to_event(1), obs=pressure)
