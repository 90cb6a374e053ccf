"""`secure-fvi reproduce` refuses what it does not know; sfvi-avg runs from a configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import CommandLine

from secure_fvi.cli import main


def _refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_unknown_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    err = _refused(["reproduce", "sfvi-six-citys", "--out", str(out)], capsys)
    assert "did you mean 'sfvi-six-cities'" in err
    assert err.count("\n") == 1
    assert not out.exists()


def test_out_must_be_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out"
    file.touch()
    assert "is a file; give a folder" in _refused(["reproduce", "sfvi-six-cities", "--out", str(file)], capsys)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")
@pytest.mark.usefixtures("few_draws")
def test_sfvi_avg_from_a_configuration(cli: CommandLine) -> None:
    cli.change('name = "sfvi"\niterations = 120', 'name = "sfvi-avg"\nrounds = 2\nlocal_steps = 20')
    answer = cli.run()
    result = json.loads((cli.folder / "out" / "result.json").read_text())
    more = int(result["convergence"].get("refined_sums", 0))
    assert answer.code == (0 if result["converged"] else 4)  # two rounds are too few, unless q could be refined
    assert (result["algorithm"], result["rounds"], result["aggregation"]["exchanges"]) == ("sfvi-avg", 2, 4 + more)
