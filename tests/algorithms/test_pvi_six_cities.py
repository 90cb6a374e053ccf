"""Structured PVI on six cities against global VI (SFVI, same family and bound). Prints the row of docs/pvi.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import secure_fvi as sf
from secure_fvi.models.six_cities import PROGRAM


def _stack(result: sf.Result, part: str) -> torch.Tensor:
    return torch.cat([getattr(result.posterior[site], part).flatten() for site in ("beta", "omega")])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")
def test_few_rounds_come_near_global_vi() -> None:
    """Silos of 300 and 237: 8 synchronous rounds, or 3 sequential passes, within 0.35 posterior sd; sd within 20%.

    Measured errors are 0.14 and 0.19; the bound leaves room for the noise of the local fits.
    """
    data = PROGRAM.load()
    order = torch.randperm(537, generator=torch.Generator().manual_seed(0))
    silos = [{k: v[rows] for k, v in data.records.items()} for rows in order.split([300, 237])]

    def fit(algorithm: Any) -> sf.Result:
        return sf.fit(PROGRAM.model, silos, algorithm, sf.Plain(), compile=False)

    reference = fit(sf.SFVI(iterations=8000, schedule="cosine"))
    mean, sd = _stack(reference, "mean"), _stack(reference, "sd")
    visits: Any = {"schedule": "sequential", "reveal_changes": True}
    for name, algorithm in (("synchronous", sf.PVI(rounds=8)), ("sequential", sf.PVI(rounds=6, **visits))):
        result = fit(algorithm)
        error = ((_stack(result, "mean") - mean) / sd).abs().max()
        print(name, result.rounds, float(error), result.aggregation, reference.aggregation)
        assert error < 0.35
        assert ((_stack(result, "sd") / sd - 1).abs() < 0.2).all()
