"""The tables that commands print."""

from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.errors import MarkupError

from secure_fvi import plots
from secure_fvi.cli import tables
from secure_fvi.cli.tables import print_posterior
from secure_fvi.runs.marginals import marginals


@pytest.mark.parametrize(("size", "shown", "note"), [(60, 60, ""), (25_000, 60, "and 24940 more, in result.json")])
def test_a_networks_weights_do_not_fill_the_screen(
    size: int, shown: int, note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = {
        "algorithm": "sfvi",
        "aggregation": {"kind": "plain"},
        "rounds": 3,
        "seconds": 1.0,
        "converged": False,
        "posterior": {"w": {"mean": [0.5] * size, "sd": [1.0] * size}},
    }
    print_posterior(result)
    out = capsys.readouterr().out
    assert out.count("w[") == shown
    assert note in out
    assert ("more, in" in out) == bool(note)


def test_a_sites_name_is_text_in_tables_and_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names that rich reads as markup, and matplotlib as mathematics. The control: read so, they end the last step."""
    name, formula = "a[/x][red]b", "$\\frac$"
    result: dict[str, Any] = {
        "algorithm": "sfvi", "aggregation": {"kind": "plain"}, "rounds": 3, "seconds": 1.0, "converged": False,
        "convergence": {"reason": f"site '{name}' moved"}, "posterior": {name: {"mean": 0.5, "sd": 1.0}},
    }  # fmt: skip
    print_posterior(result)
    assert capsys.readouterr().out.count(name) == 2
    draws = marginals({formula: torch.linspace(-2.0, 2.0, 50)})
    assert plots.svg(plots.marginal_panels(draws, None, ""))
    monkeypatch.setattr(tables, "plain_console", Console)
    with pytest.raises(MarkupError):
        print_posterior(result)
    figure = Figure()
    figure.subplots().set(title=formula)
    with pytest.raises(ValueError, match="frac"):
        plots.svg(figure)


@pytest.mark.parametrize("kind", ["no privacy", "not counted", "counted", "point"])
def test_the_terminal_says_of_a_private_run_what_its_sds_count(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It printed sds that do not count the noise without a word on it, and of a point sds of 0."""
    counts = kind == "counted"
    sds = {"count_noise": counts, "because": "noise hides all"} | ({"cut_at_most": None} if counts else {})
    result: dict[str, Any] = {
        "algorithm": "sfvi", "aggregation": {"kind": "masked"}, "rounds": 3, "seconds": 1.0, "converged": None,
        "posterior": {"b": {"mean": [0.5, 1.5], "sd": [0.0] * 2 if kind == "point" else [0.25] * 2}},
        "privacy": None if kind == "no privacy" else {"unit": "record", "sds": sds},
    }  # fmt: skip
    if counts:
        result["noise"] = {"sd": {"b": [0.125, 0.125]}}
    print_posterior(result)
    said = capsys.readouterr().out
    assert ("do not count the noise of privacy, so that intervals are too short: noise hides all" in said) == (
        kind == "not counted"
    )
    assert ("sds and quantiles count the noise of privacy" in said) == counts
    assert ("of it noise" in said) == ("0.125" in said) == counts
    assert ("moved the point is not known" in said) == (kind == "point")
    assert (" sd " in said) == (kind != "point")
