"""Records from gradients: exact for one, stopped by batches, not stopped by them over many rounds."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from programs import make_intercepts

import secure_fvi as sf
from secure_fvi.audits.gradient_inversion import (
    MATCHED,
    Matcher,
    Search,
    distances,
    gradients,
    inversion_rows,
    matched,
    study,
)
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
            np.testing.assert_allclose(gradient / gradient[0], data["x"][j], rtol=1e-8, atol=1e-8)  # x[0] is 1
    masked = Laboratory(MODEL, sf.SFVI(iterations=3), sf.Masked(), worlds=1, simulated=True).run(silos, 1).transcript
    with pytest.raises(InputError, match="no silo's own gradient"):
        gradients(masked, "silo-1")


def test_the_span_holds_the_batch_and_nobody_else() -> None:
    rng = np.random.default_rng(0)
    inside, outside = rng.standard_normal((4, 30)), rng.standard_normal((5, 30))
    seen = rng.standard_normal((10, 4)) @ inside
    assert distances(seen, inside).max() < 1e-8
    assert distances(seen, outside).min() > 0.5


@pytest.mark.slow
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


# ---- Gradient matching: one record at once, a batch from several rounds, and nothing for batches in one round ----


def test_gradients_are_those_of_the_run() -> None:
    """What the search matches is what the silo sends, to the last digits."""
    data = people(12, 5)
    silos = [{n: v[j * 4 : j * 4 + 4] for n, v in data.items()} for j in range(3)]
    seen = Laboratory(MODEL, sf.SFVI(iterations=3), sf.Plain(), worlds=1, simulated=True).run(silos, 1).transcript
    matcher = Matcher(MODEL, data)
    for message, expected in zip(seen.broadcasts(), gradients(seen, "silo-2"), strict=True):
        got = matcher.gradient(torch.as_tensor(message.tensors["z_global"]), silos[1])
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


def test_guesses_are_matched_to_records() -> None:
    rng = np.random.default_rng(0)
    truth = rng.standard_normal((5, 8))
    order = rng.permutation(5)
    best, cosines = matched(2 * truth[order] + 1e-3 * rng.standard_normal((5, 8)), truth)
    np.testing.assert_allclose(best, 2 * truth, atol=0.01)
    assert cosines.min() > 0.999


@pytest.mark.parametrize(("rounds", "found"), [(1, False), (8, True)])
def test_two_records_come_back_from_several_rounds(rounds: int, found: bool) -> None:
    data = people(300, 6)
    silos = [{n: v[j : j + 2] for n, v in data.items()} for j in (0, 2, 4)]
    seen = Laboratory(MODEL, sf.SFVI(iterations=rounds), sf.Plain(), worlds=1, simulated=True).run(silos, 1).transcript
    matcher = Matcher(MODEL, data)
    places = torch.stack([torch.as_tensor(b.tensors["z_global"]) for b in seen.broadcasts()])
    told = torch.from_numpy(gradients(seen, "silo-1"))
    guesses = matcher.invert(places, told, 2, {"y": silos[0]["y"]}, Search(4, 150, 100), 0)
    assert (matched(matcher.centred(guesses), matcher.centred(silos[0]["x"]))[1].min() > MATCHED) == found


@pytest.mark.slow
def test_rows() -> None:
    """10 runs. A share of 0 of 10 has an upper end of .31, one of 10 of 10 a lower end of .69."""
    search = Search(starts=2, steps=80, polish=60)
    rows = inversion_rows(MODEL, people(300, 6), (1, 2), (1, 8), runs=10, search=search)
    found = {(row.attack.split(", ")[1], row.protection[-1], row.score[:5]): row for row in rows}
    assert all(row.valid for row in rows)
    assert found["1 round", "1", "share"].value == 1.0
    assert found["1 round", "2", "share"].finding == "nothing found"
    assert found["8 rounds", "2", "share"].value > 0.7
    assert found["1 round", "2", "R^2 o"].high < 0.9 < found["8 rounds", "2", "R^2 o"].value
    assert found["8 rounds", "2", "R^2 o"].negative_control < 0


def test_unknown_labels_are_searched_for() -> None:
    data = people(300, 6)
    silos = [{n: v[j : j + 1] for n, v in data.items()} for j in range(3)]
    seen = Laboratory(MODEL, sf.SFVI(iterations=2), sf.Plain(), worlds=1, simulated=True).run(silos, 1).transcript
    matcher = Matcher(MODEL, data)
    places = torch.stack([torch.as_tensor(b.tensors["z_global"]) for b in seen.broadcasts()])
    found = matcher.invert(places, torch.from_numpy(gradients(seen, "silo-1")), 1, {}, Search(4, 200, 100), 0)
    np.testing.assert_allclose(found, silos[0]["x"], atol=0.05)


def test_bad_input() -> None:
    data = people(20, 4)
    with pytest.raises(InputError, match="begin with 1"):
        inversion_rows(MODEL, data, (2, 4))
    with pytest.raises(InputError, match="at least 10"):
        inversion_rows(MODEL, data, runs=3)
    problem = make_intercepts()
    with pytest.raises(InputError, match="parameters are all global"):
        Matcher(problem.model, problem.silos[0])


@pytest.mark.slow
@pytest.mark.parametrize("known", [("y",), ()])
def test_matching_on_adult(known: tuple[str, ...]) -> None:
    """2,000 people. Batches of 2 and 4 are read off from 32 rounds, and from one round none."""
    from secure_fvi.models.uci_adult import load

    folder = os.environ.get("SECURE_FVI_DATA")
    if not folder or not (Path(folder) / "uci_adult").is_dir():
        pytest.skip("SECURE_FVI_DATA holds no uci_adult")
    order = torch.randperm(32561, generator=torch.Generator().manual_seed(0))[:2000]
    rows = inversion_rows(MODEL, {n: v[order] for n, v in load(Path(folder)).records.items()}, known=known)
    for row in rows:
        share = row.detail["share_of_all_records"]
        print(f"{row.attack:<44} {row.protection:<18} {row.score[:5]} {row.value:.3f} [{row.low:.3f}, {row.high:.3f}]"
              f" of all records {share:.3f}")  # fmt: skip
    shares = {(r.attack.split(", ")[1], r.protection[-1]): r for r in rows if r.score.startswith("share")}
    assert all(row.valid for row in rows)
    assert shares["1 round", "1"].value == 1.0
    assert all(shares["1 round", b].value == 0.0 for b in "248")
    assert shares["32 rounds", "2"].low > 0.5
