"""Records from gradients: exact for one, stopped by batches, not stopped by them over many rounds."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import secure_fvi as sf
from secure_fvi.audits.gradient_inversion import distances, gradients, invert, study
from secure_fvi.audits.worlds import Laboratory
from secure_fvi.errors import InputError
from secure_fvi.models.tabular import MODEL


def people(count: int, columns: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(count, columns, generator=rng, dtype=torch.float64)
    x[:, 0] = 1.0
    return {"x": x, "y": (torch.rand(count, generator=rng) < 0.5).double()}


def test_one_record_is_read_off_exactly() -> None:
    data = people(3, 20)
    silos = [{name: v[j : j + 1] for name, v in data.items()} for j in range(3)]
    plain = Laboratory(MODEL, sf.SFVI(iterations=3), sf.Plain(), worlds=1, simulated=True).run(silos, 1).transcript
    for j in range(3):
        for gradient in gradients(plain, f"silo-{j + 1}"):
            np.testing.assert_allclose(invert(gradient), data["x"][j], rtol=1e-8, atol=1e-8)
            unit = data["x"][j] / data["x"][j].norm()
            assert abs(float(torch.from_numpy(invert(gradient, None)) @ unit)) == pytest.approx(1.0)
    masked = Laboratory(MODEL, sf.SFVI(iterations=3), sf.Masked(), worlds=1, simulated=True).run(silos, 1).transcript
    with pytest.raises(InputError, match="no silo's own gradient"):
        gradients(masked, "silo-1")
    with pytest.raises(InputError, match="of zero"):
        invert(np.zeros(3))


def test_the_span_holds_the_batch_and_nobody_else() -> None:
    rng = np.random.default_rng(0)
    inside, outside = rng.standard_normal((4, 30)), rng.standard_normal((5, 30))
    seen = rng.standard_normal((10, 4)) @ inside
    assert distances(seen, inside).max() < 1e-8
    assert distances(seen, outside).min() > 0.5


def test_batches_stop_reading_but_not_the_span() -> None:
    """20 runs: shares have Clopper-Pearson intervals of 95%."""
    found = {(r.attack, r.protection): r for r in study(MODEL, people(400, 12), (1, 4), runs=20, rounds=8)}
    reading, span = "one gradient read as a record", "a record in the span of the gradients"
    assert found[reading, "plain, batch of 1"].value == 1.0
    assert found[reading, "plain, batch of 4"].finding == "nothing found"
    assert found[span, "plain, batch of 4"].value == 1.0
    assert all(row.valid for row in found.values())


@pytest.mark.slow
def test_adult() -> None:
    from secure_fvi.models.uci_adult import load

    folder = os.environ.get("SECURE_FVI_DATA")
    if not folder or not (Path(folder) / "uci_adult").is_dir():
        pytest.skip("SECURE_FVI_DATA holds no uci_adult")
    found = study(MODEL, load(Path(folder)).records, runs=60, rounds=100)
    for row in found:
        print(f"{row.attack:<40} {row.protection:<20} {row.value:.3f} [{row.low:.3f}, {row.high:.3f}] {row.finding}")
    by_batch = {row.protection: row for row in found if row.score != "AUC"}
    assert by_batch["plain, batch of 1"].value == 1.0
    assert all(by_batch[f"plain, batch of {b}"].value == 0.0 for b in (2, 8, 64))
    assert next(r for r in found if r.score == "AUC" and r.protection == "plain, batch of 64").low > 0.6
