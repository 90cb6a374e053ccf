"""The baselines of PVI from a configuration, on a model whose prior is not Gaussian."""

from __future__ import annotations

import json

import pytest
from command_line import CommandLine


@pytest.mark.parametrize(
    ("name", "options", "rounds", "sums"),
    [
        pytest.param("bcm", 'prior = "split"', 1, 2, marks=pytest.mark.slow),
        ("vcl", "reveal_changes = true", 3, 3),
        pytest.param("streaming-vb", "reveal_changes = true\npasses = 2", 6, 6, marks=pytest.mark.slow),
    ],
)
@pytest.mark.later("vcl-reveal_changes = true-3-3")
def test_a_run_ends_after_its_sums(cli: CommandLine, name: str, options: str, rounds: int, sums: int) -> None:
    cli.change('name = "sfvi"\niterations = 120', f'name = "{name}"\nlocal_steps = 15\n{options}')
    answer = cli.run()
    assert answer.code == 0, answer.err
    result = json.loads((cli.folder / "out" / "result.json").read_text())
    assert (result["algorithm"], result["rounds"], result["aggregation"]["exchanges"]) == (name, rounds, sums)
    assert result["elbo"] is None
    assert result["posterior"]["tau"]["sd"] > 0


def test_sequential_visits_need_consent(cli: CommandLine) -> None:
    cli.change('name = "sfvi"\niterations = 120', 'name = "vcl"')
    cli.refused("algorithm", "reveal_changes = true")
