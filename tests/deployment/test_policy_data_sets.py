"""One file under two names would have two budgets, or a budget and exact totals: no policy names it twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from secure_fvi.deployment.keeping import TEMPLATE
from secure_fvi.deployment.policy import check_one_name, read_policy
from secure_fvi.errors import InputError
from secure_fvi.runs import wording

_BUDGET = {"epsilon": 1.0, "delta": 1e-6}


def _read(folder: Path, *data: dict[str, object]) -> list[str]:
    path = folder / "policy.toml"
    path.write_text(wording.dumps(wording.loads(TEMPLATE) | {"data": list(data)}))
    path.chmod(0o600)
    return list(read_policy(path).data)


@pytest.mark.parametrize("how", ["name", "dots", "symbolic link", "hard link", "beside it", "not there"])
def test_no_file_stands_under_two_names(tmp_path: Path, how: str) -> None:
    """The control: another file under the second name, with the same content, which is read."""
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    own, other = folder / "own.csv", folder / "other.csv"
    for file in (own, other):
        file.write_text("x\n1\n")
    first = {"id": "asthma", "path": "own.csv", **_BUDGET}
    assert _read(folder, first, {"id": "second", "path": "other.csv"}) == ["asthma", "second"]
    assert _read(folder, first, {"id": "second", "path": "none.csv"}) == ["asthma", "second"]
    policy = read_policy(folder / "policy.toml")
    check_one_name(policy, own, "asthma")
    with pytest.raises(InputError, match="is read by data set 'asthma', and may not be by 'third'"):
        check_one_name(policy, own, "third")
    second: dict[str, object] = {"id": "second", "path": "own.csv"}
    if how == "dots":
        second["path"] = f"../{folder.name}/own.csv"
    elif "link" in how:
        other.unlink()
        other.symlink_to(own) if how == "symbolic link" else os.link(own, other)
        second["path"] = "other.csv"
    elif how == "beside it":
        second |= {"path": "other.csv", "dictionary": "d.toml", "tables": {"more": "own.csv"}}
    elif how == "not there":
        own.unlink()
    with pytest.raises(InputError, match="is read by data set"):
        _read(folder, first, second)
