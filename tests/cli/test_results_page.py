"""`secure-fvi results`: the committed page is what the committed files make; files that are none are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from secure_fvi.cli import main
from secure_fvi.errors import InputError
from secure_fvi_lab.results import page, read

ROOT = Path(__file__).parents[2]
COMMITTED = Path("benchmarks/results")
CONTENT: dict[str, Any] = {
    "name": "vertical-adult",
    "paper": "none: the paper's data sets are small",
    "ours": {"mean": 0.00123, "sd": 0.0004, "seeds": 3},
    "seconds": 1234.5,
    "bytes": 4096,
    "machine": "a machine",
    "setting": "some people",
    "pooled": -0.32,
    "target": 0.003,
    "rows": [{"silos": 5, "seed": 0, "log_likelihood": -0.321, "bytes_up_per_round": 4096.0, "seconds": 60.0}],
}


def _write(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "vertical-adult.json"
    file.write_text(json.dumps({key: v for key, v in {**CONTENT, **changes}.items() if v is not ...}))
    return file


def test_the_committed_page_is_what_the_committed_files_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert (ROOT / "docs" / "results.md").read_text() == page([COMMITTED])
    assert all(read(file)["name"] == file.stem for file in COMMITTED.glob("*.json"))


def test_a_page(tmp_path: Path) -> None:
    _write(tmp_path / "a", quick=True)
    out = tmp_path / "page.md"
    with pytest.raises(SystemExit) as stop:
        main(["results", str(tmp_path / "a"), "--out", str(out)])
    assert stop.value.code == 0
    text = out.read_text()
    assert "| [vertical-adult](#vertical-adult), quick | 0.00123 (0.0004) | 3 | 1,234 | 4,096 |\n" in text
    assert "- Paper: none: the paper's data sets are small.\n" in text
    assert "- Machine: a machine.\n" in text
    assert "pooled model -0.32000 nats a person" in text  # the experiment's own table


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"name": "vertical-adults"}, "is no experiment"), ({"machine": ...}, "has no 'machine'")],
)
def test_a_file_that_is_none(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    _write(tmp_path / "a", **changes)
    with pytest.raises(InputError, match=said):
        page([tmp_path / "a"])


def test_files_that_are_not_there_or_there_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["results", str(tmp_path)])
    assert stop.value.code == 2
    assert "holds no NAME.json" in capsys.readouterr().err
    _write(tmp_path / "a")
    _write(tmp_path / "b")
    with pytest.raises(InputError, match="another result of 'vertical-adult'"):
        page([tmp_path / "a", tmp_path / "b"])
    (tmp_path / "a" / "vertical-adult.json").write_text("{")
    with pytest.raises(InputError, match="not a JSON file"):
        page([tmp_path / "a"])
