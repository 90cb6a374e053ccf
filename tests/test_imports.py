"""Who imports whom: the contracts of pyproject.toml hold, and each is broken by an import that it is against."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
CONTRACTS = {contract["name"] for contract in _TOOLS["importlinter"]["contracts"]}
#: By contract: a module, and what it may not import, even in a function.
AGAINST = {
    "The core never imports the lab": ("secure_fvi/wire.py", "secure_fvi_lab.machine"),
    "Layers": ("secure_fvi/privacy/gate.py", "secure_fvi.runs.wording"),
    "A fit in one process needs nothing of sites, runs or the command line": (
        "secure_fvi/driving.py",
        "secure_fvi.deployment.names",
    ),
    "Sites load no plots, reports or audits": ("secure_fvi/deployment/names.py", "secure_fvi.plots"),
    "A silo's job loads what it runs": ("secure_fvi/silo.py", "secure_fvi.results"),
    "A site's process loads nothing of a server's": ("secure_fvi/column_silo.py", "secure_fvi.results"),
    "Algorithms do not import each other": ("secure_fvi/algorithms/sfvi.py", "secure_fvi.algorithms.pvi"),
    "No circles": ("secure_fvi/aggregation/ring.py", "secure_fvi.aggregation.masked"),
}
_LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def _lint(root: Path) -> tuple[int, dict[str, str]]:
    """Exit status, and KEPT or BROKEN by contract, of the packages and contracts in `root`."""
    done = subprocess.run(
        [sys.executable, "-c", _LINT, "--no-cache", "--no-logo"],
        cwd=root, env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'lab'}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, dict(re.findall(r"^(.+) (KEPT|BROKEN)$", done.stdout, re.MULTILINE))


def test_contracts_hold() -> None:
    assert _lint(ROOT) == (0, dict.fromkeys(CONTRACTS, "KEPT"))


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("house")
    shutil.copy(ROOT / "pyproject.toml", root)
    for package in ("secure_fvi", "lab/secure_fvi_lab"):
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def test_every_contract_is_attacked() -> None:
    assert set(AGAINST) == CONTRACTS


@pytest.mark.later
@pytest.mark.parametrize("contract", AGAINST)
def test_a_contract_is_broken_by_what_it_is_against(contract: str, copied: Path) -> None:
    file, module = AGAINST[contract]
    source = (copied / file).read_text()
    (copied / file).write_text(f"{source}\n\ndef _late():\n    import {module}\n")
    code, found = _lint(copied)
    (copied / file).write_text(source)
    assert (code, found[contract]) == (1, "BROKEN")


def test_the_core_does_not_import_the_lab_by_its_name_either() -> None:
    """Which the graph of imports would not see: `import_module("...")`."""
    files = [f for folder in ("", "*/", "*/*/") for f in (ROOT / "secure_fvi").glob(f"{folder}*.py")]
    assert len(files) > 150
    assert not [f for f in files if "secure_fvi_lab" in f.read_text()]
    assert any("secure_fvi_lab" in f.read_text() for f in (ROOT / "lab").rglob("*.py")), "the control"


def test_nothing_private_of_opacus_is_used() -> None:
    """It may change in any version, and what clips and counts here must be the same in all of the range."""
    private = re.compile(r"^\s*from opacus\S* import .*\b_[a-z]", re.MULTILINE)
    files = [*(ROOT / "secure_fvi").glob("*/*.py"), *(ROOT / "lab").rglob("*.py")]
    assert not [f for f in files if private.search(f.read_text())]
    assert private.search("from opacus.optimizers.optimizer import _mark_as_processed"), "the control"


@pytest.mark.later
def test_a_sites_process_loads_what_its_job_names() -> None:
    """SFVI, masked sums and a function, named in its configuration; the control: a formula's maker loads formulas."""
    code = """if True:
        import sys
        from secure_fvi.deployment import site
        from secure_fvi.runs.config import MODELS, chosen, named, parse
        silos = [{"id": name, "data": f"{name}.csv"} for name in "abc"]
        named_by = {"model": {"function": "model.py:model"}, "algorithm": {"name": "sfvi"}}
        chosen(parse({**named_by, "aggregation": {"kind": "masked"}, "silo": silos}, "test"))
        others = "aggregation.masked_server aggregation.homomorphic aggregation.key_holder algorithms.pvi alignment "
        others += "columns deployment.columns_server deployment.serving driving engines.local engines.stream_server "
        others += "fitting formula mixed_model results server "
        others += "algorithms.final_server algorithms.refining_server algorithms.stopping discovery program_sites"
        there = lambda: print(*(name for name in others.split() if f"secure_fvi.{name}" in sys.modules))
        there(); named(MODELS, "model", "formula"); there()"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["", "formula mixed_model"], done.stderr


@pytest.mark.later
@pytest.mark.parametrize("command", ["run JOB --out out", "server start JOB --home hub --out out", "audit JOB --list"])
def test_what_is_wrong_with_a_configuration_is_said_before_pytorch_is_loaded(command: str, tmp_path: Path) -> None:
    """In a process without PyTorch. The control is a file with nothing wrong, of which that one is missed."""
    code = "import sys; sys.modules['torch'] = None; from secure_fvi.cli import main; main()"
    good = (ROOT / "examples" / "six_cities.toml").read_text()
    found = []
    for text in ("[model", 'seed = 1\nsede = 2\n[model]\nprogram = "six-cities"\n', good):
        (tmp_path / "job.toml").write_text(text)
        words = [str(tmp_path / "job.toml") if word == "JOB" else word for word in command.split()]
        done = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        found.append(done.stderr)
    assert "not a TOML file" in found[0]
    assert "sede" in found[1]
    assert "torch" in found[2]


@pytest.mark.later
def test_a_fit_loads_nothing_that_few_fits_use() -> None:
    """Opacus, PyTorch's compiler, sympy, galois and numba cost as much time as all else together. The control: making
    the field of shares loads the last two."""
    ask = "print(*sorted({'opacus', 'torch._dynamo', 'sympy', 'galois', 'numba', 'duckdb'} & set(sys.modules)))"
    field = "from secure_fvi.aggregation import shamir; shamir._field()"
    code = f"import sys, secure_fvi as sf; sf.fit; {ask}; {field}; {ask}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["", "galois numba"]
