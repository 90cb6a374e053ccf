from pathlib import Path

import pytest
from command_line import CommandLine


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """The command line in a folder of its own, which also holds config.toml, model.py, a.csv, b.csv and c.csv."""
    return CommandLine(tmp_path, capsys)


@pytest.fixture(autouse=True)
def _reports(request: pytest.FixtureRequest) -> None:
    """Without pictures, but where a test asks for them."""
    if "drawn" not in request.fixturenames:
        request.getfixturevalue("undrawn")


@pytest.fixture
def drawn() -> None:
    """Reports have their pictures."""
