"""Reading, overriding, writing back."""

import importlib
import os
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from secure_fvi.runs import wording
from secure_fvi.runs.config import Config, parse
from secure_fvi.runs.federation import Federation, federate
from secure_fvi.runs.reading import override, read
from secure_fvi.runs.records import read_table

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_each_example_is_usable_and_survives_being_written_out(path: Path) -> None:
    config = read(path)
    folder = os.environ.get("SECURE_FVI_DATA")
    if config.model.program in ("adult", "heart") and not folder:
        pytest.skip("SECURE_FVI_DATA is not set")
    data = Path(folder) if folder else None
    federation = federate(config, data)
    again = federate(parse(tomllib.loads(federation.config.to_toml()), "again"), data)
    assert again.config.to_toml() == federation.config.to_toml()
    assert again.algorithm == federation.algorithm
    assert again.aggregation == federation.aggregation
    assert again.privacy == federation.privacy
    assert again.digest() == federation.digest()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=3", 3),
        ("a.b=3.5", 3.5),
        ("a.b=true", True),
        ("a.b=[1, 2]", [1, 2]),
        ('a.b="x=y"', "x=y"),
        ("a.b=x=y", "x=y"),
        ("a.b=plain text", "plain text"),
        ("a.b=1\nc=2", "1\nc=2"),
    ],
)
def test_overrides_are_toml_values_or_strings(text: str, value: object) -> None:
    table: dict[str, object] = {"a": {"c": 1}}
    override(table, text)
    assert table == {"a": {"c": 1, "b": value}}


def test_toml_writer_is_read_back_to_the_same() -> None:
    table = {
        "text": 'quote " backslash \\ line\nend é \x7f \U0001f600',
        "numbers": [1, -2.5, 1e-05, 1e300, float("inf")],
        "odd key": {"inner": {"deep": True}},
        "rows": [{"id": "a", "x": 1}, {"id": "b", "nested": {"y": [[1], [2]]}}],
    }
    assert tomllib.loads(wording.dumps(table)) == table


def six_cities(**partition: object) -> Federation:
    return federate(parse({"model": {"program": "six-cities"}, "partition": partition}, "test"))


def test_a_partition_deals_every_record_once() -> None:
    whole = six_cities(count=1)
    parts = six_cities(count=5)
    assert [len(ids) for ids in parts.record_ids] == [108, 108, 107, 107, 107]
    assert torch.equal(torch.cat(parts.record_ids).sort().values, torch.arange(537))
    order = torch.cat(parts.record_ids)
    for name in ("smoke", "wheeze"):
        together = torch.cat([silo[name] for silo in parts.silos])
        assert torch.equal(together, whole.silos[0][name][order])


def test_a_partition_follows_its_seed() -> None:
    base = {"model": {"program": "six-cities"}}
    by_run = [federate(parse({**base, "seed": s, "partition": {"count": 2}}, "t")).digest() for s in (1, 2)]
    fixed = [federate(parse({**base, "seed": s, "partition": {"count": 2, "seed": 1}}, "t")).digest() for s in (1, 2)]
    assert by_run[0] != by_run[1]
    assert fixed[0] == fixed[1] == by_run[0]


def test_defaults_are_written_out() -> None:
    config: Config = six_cities(count=3).config
    assert config.aggregation.kind == "masked"
    assert config.aggregation.options["min_cohort"] == 3
    assert config.algorithm.options["importance_samples"] == 1
    assert config.run.threads == 1


def test_arrays_in_three_formats_agree(tmp_path: Path) -> None:
    y = np.array([[1.0, 2.0], [3.0, 4.5], [5.0, 6.0]])
    x, ids = np.array([0.0, 1.0, 0.0]), np.array([4, 2, 9])
    rows = [f"{a},{i},{v},{u}" for a, i, (u, v) in zip(x, ids, y, strict=True)]
    (tmp_path / "t.csv").write_text("\n".join(["x,record_id,y[1],y[0]", *rows, ""]))
    np.savez(tmp_path / "t.npz", x=x, y=y, record_id=ids)
    save_file({k: torch.from_numpy(v) for k, v in (("x", x), ("y", y), ("record_id", ids))}, tmp_path / "t.safetensors")
    expected = read_table(tmp_path / "t.npz", "k")
    assert torch.equal(expected["y"], torch.from_numpy(y))
    for kind in ("csv", "safetensors"):
        found = read_table(tmp_path / f"t.{kind}", "k")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert all(found[name].dtype == expected[name].dtype for name in expected)


def test_what_configurations_name_is_there() -> None:
    """By "module:name", which no type checker reads: each is loaded where it is used alone."""
    from secure_fvi.runs import config as options

    tables = [value for value in vars(options).values() if isinstance(value, dict)]
    names = {name for table in tables for name in table.values() if isinstance(name, str) and ":" in name}
    names = {name for name in names if name.startswith("secure_fvi")}
    assert len(names) > 15
    for name in sorted(names):
        module, _, attribute = name.partition(":")
        assert hasattr(importlib.import_module(module), attribute), name
