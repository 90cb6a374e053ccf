"""The hash that names a model: one changed byte in its source or in what it imports changes it, its place does not."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from secure_fvi.deployment import model_hash
from secure_fvi.deployment.model_hash import ModelManifest, closure, manifest, package_digest
from secure_fvi.errors import InputError
from secure_fvi.runs.config import parse

MODEL = """
from __future__ import annotations
from typing import TYPE_CHECKING

import numpy as np
import pyro
import shared_parts
from shared_package.inner import scale

if TYPE_CHECKING:
    import never_imported


def model(y):
    import late_parts
    return pyro.sample("mu", late_parts.prior(scale))
"""
PARTS = {
    "shared_parts.py": "from deep_parts import depth\n",
    "deep_parts.py": "depth = 1\n",
    "late_parts.py": "def prior(s):\n    return s\n",
    "shared_package/__init__.py": "outer = 1\n",
    "shared_package/inner.py": "from . import sibling\nfrom .sibling import scale\n",
    "shared_package/sibling.py": "scale = 1.0\n",
    "shared_package/unused.py": "other = 1\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shared_package").mkdir()
    for name, text in PARTS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def of(folder: Path, **tables: Any) -> ModelManifest:
    table = {
        "model": {"function": str(folder / "model.py") + ":model"},
        "silo": [{"id": "a", "data": "a.csv"}],
        **tables,
    }
    return manifest(parse(table, "test"))


def test_the_sources_are_those_that_run(folder: Path) -> None:
    found = of(folder)
    assert sorted(found.sources) == [
        "<model>",
        "deep_parts",
        "late_parts",
        "shared_package",
        "shared_package.inner",
        "shared_package.sibling",
        "shared_parts",
    ]
    assert sorted(found.versions) == ["numpy", "pyro-ppl", "python", "secure-fvi", "torch"]
    for name in PARTS:  # nothing of it was imported to find that out
        assert Path(name).stem not in sys.modules


@pytest.mark.parametrize("name", ["model.py", *(n for n in PARTS if "unused" not in n)])
def test_one_byte_of_any_source_changes_the_hash(folder: Path, name: str) -> None:
    before = of(folder)
    text = (folder / name).read_text()
    (folder / name).write_text(text + " ")
    after = of(folder)
    assert after.hash != before.hash
    assert len(before.differences(after)) == 1
    (folder / name).write_text(text)
    assert of(folder).hash == before.hash


def test_what_does_not_run_does_not_count(folder: Path) -> None:
    before = of(folder).hash
    (folder / "shared_package" / "unused.py").write_text("other = 2\n")
    assert of(folder).hash == before


def test_the_place_does_not_count(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.copy(folder / "model.py", elsewhere / "other_name.py")
    config = parse({"model": {"function": "x.py:model"}, "silo": [{"id": "a", "data": "a.csv"}]}, "test")
    assert manifest(config, f"{elsewhere / 'other_name.py'}:model").hash == of(folder).hash
    assert manifest(config, f"{elsewhere / 'other_name.py'}:another").hash != of(folder).hash


@pytest.mark.parametrize(
    "tables",
    [
        {"algorithm": {"name": "sfvi", "bound": 10.0}},
        {"algorithm": {"name": "sfvi", "iterations": 10, "curvature_norm": 2.0}},
        {"privacy": {"unit": "record", "epsilon": 1.0, "clipping_norm": 3.0}},
        {"privacy": {"unit": "record", "epsilon": 1.0, "objective_bound": 3.0}},
    ],
)
def test_bounds_count(folder: Path, tables: dict[str, Any]) -> None:
    plain = {"privacy": {"unit": "record", "epsilon": 1.0}} if "privacy" in tables else {}
    assert of(folder, **tables).hash != of(folder, **plain).hash


def test_other_settings_do_not_count(folder: Path) -> None:
    privacy = {"unit": "record", "epsilon": 1.0}
    a = of(folder, privacy=privacy, algorithm={"name": "sfvi", "iterations": 10})
    b = of(folder, privacy={**privacy, "epsilon": 2.0}, algorithm={"name": "sfvi", "iterations": 20}, seed=7)
    assert a.hash == b.hash


def test_roles_count(folder: Path) -> None:
    model = {"function": str(folder / "model.py") + ":model"}
    base = of(folder, model=model).hash
    assert of(folder, model={**model, "record_plate": "people"}).hash != base
    assert of(folder, model={**model, "silo_sites": ["shop"]}).hash != base
    assert of(folder, model={**model, "start": {"mu": 0.5}}).hash != base


def test_versions_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = of(folder)
    monkeypatch.setattr(model_hash, "public_version", lambda name: "0.0" if name == "torch" else "1.0")
    after = of(folder)
    assert after.versions["torch"] == "0.0"
    assert "version of torch" in before.differences(after)
    assert after.hash != before.hash


def test_a_missing_import_counts(folder: Path) -> None:
    before = of(folder).hash
    (folder / "late_parts.py").write_text("try:\n    import not_here_at_all\nexcept ImportError:\n    pass\n")
    missing = of(folder)
    assert "missing:not_here_at_all" in missing.versions
    assert missing.hash != before


@pytest.mark.parametrize(
    "line",
    [
        "__import__('os')",
        "import importlib\nimportlib.import_module('os')",
        "exec('x = 1')",
        "eval('1')",
        "from builtins import exec as run",
        "import builtins",
        "b = __builtins__",
        "from types import FunctionType",
        "from importlib.machinery import SourceFileLoader",
        "import pickle",
        "import torch\ntorch.load('x')",
        "import ctypes",
        "import subprocess",
        "import sys\nsys.path.insert(0, 'x')",
        "import os\nos.system('true')",
        "f = getattr(object, 'ex' + 'ec')",
        "from typing import TYPE_CHECKING\nTYPE_CHECKING = True",
        "from elsewhere import TYPE_CHECKING",
        "x = ().__class__.__base__.__subclasses__()",
    ],
)
def test_code_that_cannot_be_followed_is_refused(folder: Path, line: str) -> None:
    (folder / "deep_parts.py").write_text(line + "\n")
    with pytest.raises(InputError, match=r"deep_parts.py', line \d: (calls|imports|names) "):
        of(folder)


@pytest.mark.parametrize("line", ["import re\nx = re.compile('a')", "def f(net):\n    return net.eval()", "import os"])
def test_harmless_namesakes_are_not(folder: Path, line: str) -> None:
    (folder / "deep_parts.py").write_text(line + "\n")
    assert of(folder)


def test_source_that_is_none_is_named(folder: Path) -> None:
    (folder / "deep_parts.py").write_text("def (:\n")
    with pytest.raises(InputError, match=r"deep_parts.py' is no Python source"):
        of(folder)
    with pytest.raises(InputError, match="no file"):
        of(folder, model={"function": str(folder / "gone.py") + ":model"})


def test_a_shipped_program_is_hashed_with_what_it_imports() -> None:
    def program(name: str) -> ModelManifest:
        return manifest(parse({"model": {"program": name}, "partition": {"count": 3}}, "test"))

    found = program("six-cities")
    assert {"secure_fvi.models.six_cities", "secure_fvi.models.base", "secure_fvi.federated_model"} <= set(
        found.sources
    )
    assert found.hash != program("adult").hash
    assert program("six-cities").hash == found.hash


def test_a_shipped_program_that_was_altered_has_another_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a copy of the package, since the one that runs is not for tests to edit."""
    import secure_fvi

    copy = tmp_path / "secure_fvi"
    source = Path(secure_fvi.__file__).parent
    for name in ("__init__.py", "errors.py", "federated_model.py", "models/__init__.py", "models/base.py"):
        (copy / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(source / name, copy / name)
    shutil.copy(source / "models" / "six_cities.py", copy / "models" / "six_cities.py")
    spec = secure_fvi.__spec__
    assert spec is not None
    monkeypatch.setattr(spec, "submodule_search_locations", [str(copy)])
    monkeypatch.setattr(spec, "origin", str(copy / "__init__.py"))
    before = closure("secure_fvi.models.six_cities").sources
    assert len(before) >= 6
    with (copy / "models" / "base.py").open("a") as file:
        file.write("\n")
    after = closure("secure_fvi.models.six_cities").sources
    assert [name for name in before if before[name] != after[name]] == ["secure_fvi.models.base"]


def test_the_installed_package_counts(folder: Path, tmp_path: Path) -> None:
    """A gate that multiplies its noise by nothing is another gate, whichever model is fitted."""
    import secure_fvi

    copy = tmp_path / "secure_fvi"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(secure_fvi.__file__).parent, copy, ignore=ignored)
    assert package_digest(copy) == package_digest() == of(folder).package
    (copy / "__pycache__").mkdir()
    (copy / "__pycache__" / "gate.cpython-311.pyc").write_bytes(b"anything")
    (copy / "notes.md").write_text("no code")
    package_digest.cache_clear()
    assert package_digest(copy) == package_digest()
    gate = copy / "privacy" / "gate.py"
    gate.write_text(gate.read_text() + "\nNOISE = 0.0\n")
    package_digest.cache_clear()
    altered = package_digest(copy)
    assert altered != package_digest()
    config = parse({"model": {"program": "six-cities"}, "partition": {"count": 3}}, "test")
    assert manifest(config, None, altered).hash != manifest(config).hash
    assert manifest(config, None, altered).differences(manifest(config)) == ["the installed secure_fvi"]
