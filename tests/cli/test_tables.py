"""The tables that commands print."""

import pytest

from secure_fvi.cli.tables import print_posterior


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
