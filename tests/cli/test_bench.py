"""`bench step` measures every contestant and says so in the agreed form; what it measures is not asserted."""

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import CommandLine

import secure_fvi as sf
from secure_fvi_lab.bench import batch


@pytest.mark.slow
def test_bench_step_prints_the_agreed_json(cli: CommandLine) -> None:
    answer = cli("bench", "step", "--json", "--repeats", "1", "--iterations", "2")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert found["machine"]
    times = found["ms_per_iteration"]
    assert {"pyro_svi", "numpyro_svi", "plain_1", "masked_3"} <= times.keys()
    assert all(ms > 0 for name, ms in times.items() if name != "numpyro_svi")


def test_bench_gpu_compares_before_it_times(cli: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What `make gpu` calls, on the CPU. A device that computes something else is found, and nothing is timed there."""
    monkeypatch.setattr(batch, "_COMPARED", {"SFVI": (sf.SFVI(iterations=3), False, False)})
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
