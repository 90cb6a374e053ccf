"""`bench step` measures every contestant and says so in the agreed form; what it measures is not asserted."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import CommandLine
from scipy.stats import chisquare

import secure_fvi as sf
from secure_fvi_lab.bench import batch, calibration, posteriors


@pytest.mark.slow
def test_bench_step_prints_the_agreed_json(cli: CommandLine) -> None:
    answer = cli("bench", "step", "--json", "--repeats", "1", "--iterations", "2")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert found["machine"]
    times = found["ms_per_iteration"]
    assert {"pyro_svi", "numpyro_svi", "plain_1", "masked_3"} <= times.keys()
    assert all(ms > 0 for name, ms in times.items() if name != "numpyro_svi")


@pytest.mark.slow  # what one types where there is a GPU
def test_bench_gpu_compares_before_it_times(cli: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What `make gpu` calls, on the CPU. A device that computes something else is found, and nothing is timed there."""
    monkeypatch.setattr(batch, "_COMPARED", {"SFVI": (sf.SFVI(iterations=3), False)})
    made = subprocess.run(
        ["make", "-n", "--no-print-directory", "gpu", "DEVICE=cpu"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True,
    ).stdout.replace("\\\n", " ")  # fmt: skip
    assert "-m pytest -m gpu" in made
    words = shlex.split(made.rpartition('bench()"')[2])
    out = tmp_path / "gpu.json"
    words[words.index("--out") + 1] = str(out)
    answer = cli("bench", *words)
    assert answer.code == 0, answer.err
    found = json.loads(out.read_text())
    assert found["largest_relative_difference"] == {"SFVI": 0.0}
    assert all(row["speed_up"] > 0 for row in found["batch"])
    out.unlink()

    fits = []

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = sf.fit(*args, **kwargs)
        fits.append(result)
        if len(fits) == 2:
            result.variational.eta["loc"] += torch.full((), 1e-5)
        return result

    monkeypatch.setattr(batch, "fit", wrong)
    answer = cli("bench", "gpu", "--device", "cpu", "--quick", "--out", str(out))
    assert answer.code == 1
    assert "nothing is timed" in answer.err
    assert not out.exists()


@pytest.mark.slow
def test_bench_posteriors_measures_an_entry_and_says_what_is_missing(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "numpyro", None)
    answer = cli("bench", "posteriors", "--json", "--quick", "--peers", "--entry", "two camps")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert "pip install 'secure-fvi-lab[benchmark]'" in found["peers"]
    (row,) = found["entries"]["two camps"].values()
    assert row["converged"] is True
    assert row["error"] < 0.1 > abs(row["most"] - 1)
    assert row["exchanges"] > row["rounds"] > 0
    refused = cli("bench", "posteriors", "--entry", "two caps")
    assert refused.code != 0
    assert "no entry 'two caps'" in refused.err


def test_bench_posteriors_counts_what_is_silently_wrong() -> None:
    """Converged and beyond tolerance; the control is as far off and says so itself."""
    right = {"converged": True, "error": 0.05, "least": 0.95, "most": 1.05, "exchanges": 20, "seconds": 3.0}
    wrong, honest = {**right, "error": 0.3}, {**right, "converged": False, "least": 0.5}
    refused = {"converged": False, "said": "refused: a bound", "seconds": 1.0}
    rows = dict(zip("abcd", ({"secure-fvi": r} for r in (right, wrong, honest, refused)), strict=True))
    found = {"entries": rows, "machine": "this", "commit": None, "peers": None}
    first, second, *_ = posteriors.lines(found)
    assert first == "2 of 4 converged, 1 of these within 0.1 sds and 10%; 1 silently wrong (over .2 sds or 15%)"
    assert second == "medians: 20 exchanges, 3.0 s"
    for row in rows.values():
        row["NUTS"] = {**wrong, "error": 0.01, "seconds": 6.0}
    rows["d"].pop("NUTS")
    (beside,) = [line for line in posteriors.lines(found) if line.startswith("NUTS")]
    assert (
        beside
        == "NUTS: 3 of 3 within 0.1 sds and 10%, 6.0 s at the median; ours of these 3.0 s, and 0.50 times as long"
    )


@pytest.mark.parametrize("width", [1.0, 1.5])
def test_bench_calibration_calls_off_draws_that_are_too_narrow(width: float) -> None:
    """The control is ranks among draws as wide as what they are ranked with. 300 fits; a fixed seed, for which ranks
    that are right are called off in one of a hundred."""
    rng = torch.Generator().manual_seed(0)
    true = width * torch.randn(300, 1, generator=rng)
    ranks = (torch.randn(300, calibration.DRAWS, generator=rng) < true).sum(1).tolist()
    counts = calibration.counted(ranks)
    assert sum(counts) == 300
    assert len(counts) == calibration.BINS
    p = float(chisquare(counts).pvalue)
    assert calibration.off_of({"a": p, "b": 0.5}) == (["a"] if width > 1 else [])


@pytest.mark.slow
def test_bench_calibration_ranks_what_made_the_data(cli: CommandLine) -> None:
    answer = cli("bench", "calibration", "--json", "--sets", "10", "--model", "mean and sd")
    assert answer.code == 0, answer.err
    (row,) = json.loads(answer.out)["models"].values()
    assert {len(row["ranks"][n]) for n in ("mu", "sigma")} == {10 - len(row["refused"])}
    assert row["converged"] >= 8
    refused = cli("bench", "calibration", "--model", "mean")
    assert refused.code != 0
    assert "no model 'mean'" in refused.err


@pytest.mark.slow
def test_bench_records_and_one_process_say_what_a_round_costs(cli: CommandLine) -> None:
    answer = cli(
        "bench", "records", "--json", "--records", "1000", "--batch", "20", "--latents", "--stored", "--rounds", "2"
    )
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert found["of"] == {"sfvi": "by", "records": 1000, "in_a_batch": 20, "rounds": 2, "latents": "with"}
    assert 0 < found["kb_written_a_round"] < 1_000
    answer = cli("bench", "one-process", "--silos", "4", "--rounds", "1")
    assert answer.code == 0, answer.err
    assert "s of the processor a round" in answer.out
