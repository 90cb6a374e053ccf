"""docs/end-to-end.md, followed to the letter: from a Pyro function to a deployed run under a budget, and evidence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pages import run_page


@pytest.mark.slow
def test_the_page_works_as_it_stands(tmp_path: Path) -> None:
    done = run_page("end-to-end.md", tmp_path, 900, 9)
    logs = "\n".join(p.read_text()[-2000:] for p in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stderr[-3000:] + logs
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["rounds"], result["silos"]) == (400, ["east", "north", "south"])
    assert result["privacy"]["epsilon"] <= 3.0
    assert not (tmp_path / "second" / "result.json").exists()
    refusals = [(tmp_path / f"{site}.second.log").read_text() for site in ("north", "south", "east")]
    assert any("the budget of data set 'data' is epsilon 3" in text for text in refusals)
    assert done.stdout.count("' agree on ") == 3
    assert (tmp_path / "audit" / "audit.html").is_file()
    assert "PRIVATE" not in done.stdout + done.stderr
