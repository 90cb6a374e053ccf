"""Which commands there are: the core's, and those of packages beside it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints

import click
import pytest
from command_line import CommandLine

import secure_fvi.cli

GROUP = "secure_fvi.commands"


def _installed(monkeypatch: pytest.MonkeyPatch, **commands: str) -> None:
    """As if these were all entry points of the environment."""
    found = EntryPoints(EntryPoint(name, value, GROUP) for name, value in commands.items())
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **by: found.select(**by))


@pytest.mark.parametrize("command", ["bench", "compare", "reproduce", "results"])
@pytest.mark.parametrize("more", [(), ("step", "--json"), ("--help",)])
def test_without_the_lab_one_line_says_what_to_install(
    command: str, more: tuple[str, ...], cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _installed(monkeypatch)
    code, out, err = cli(command, *more)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"'{command}' is a command of secure-fvi-lab, which is not installed: pip install ./lab" in err
    assert f"\n  {command} " not in cli("--help").out
    assert "No such command 'benchmark'" in cli("benchmark").err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("run", "x.toml", "--out", "x"), "interrupted; continue with --resume"),
        (("server", "start", "x.toml"), "interrupted; the same command goes on"),
        (("keys", "roster", "sign"), "interrupted"),
    ],
)
def test_who_is_interrupted_is_told_what_that_command_can_do(
    command: tuple[str, ...], said: str, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(**_: object) -> None:
        raise click.Abort

    monkeypatch.setattr(secure_fvi.cli.cli, "main", interrupted)
    assert cli(*command) == (130, "", f"secure-fvi: {said}\n")


def test_with_the_lab_its_commands_are_listed_and_run(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, bench="secure_fvi_lab.bench.commands:bench")
    assert "Measure speed on this machine." in cli("--help").out
    assert "secure-sum" in cli("bench", "--help").out


def test_another_package_replaces_no_command_of_ours(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, run="antigravity:nothing", other="secure_fvi_lab.bench.commands:bench")
    assert "CONFIG" in cli("run", "--help").out
    assert "secure-sum" in cli("other", "--help").out, "the control: a name of its own is taken"
    assert "antigravity" not in sys.modules


def test_what_cannot_be_loaded_leaves_the_others(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, bench="secure_fvi.nowhere:bench", broken="secure_fvi.errors:nothing")
    out = cli("--help").out
    assert "(cannot be loaded)" in out
    assert "  run " in out
    for name in ("bench", "broken"):
        code, _, err = cli(name, "step")
        assert (code, err.count("\n")) == (2, 1)
        assert f"'{name}' cannot be loaded" in err


@pytest.mark.later
def test_help_and_import_load_nothing_heavy() -> None:
    """What makes a start slow, and all of what another package brings, stays away until it is asked for."""
    heavy = ("torch", "pyro", "numpy", "opacus", "tenseal", "ot", "matplotlib", "cryptography", "rich", "grpc")
    script = "import sys\n{}\nprint(sorted(m for m in sys.modules if m.partition('.')[0] in {!r}), file=sys.stderr)"
    run = "from secure_fvi.cli import main\ntry:\n    main({!r})\nexcept SystemExit:\n    pass"
    for code, wanted in (
        ("import secure_fvi", "[]"),
        (run.format(["--help"]), "[]"),
        (run.format(["run", "--help"]), "[]"),
        ("import secure_fvi.fitting", "'torch'"),
    ):
        text = script.format(code, heavy)
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
        assert wanted in done.stderr, (code, done.stderr)


def test_core_commands_are_had_without_a_look_at_entry_points(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secure_fvi.cli, "_others", lambda: pytest.fail("looked"))
    assert cli("silo", "--help").code == 0
    with pytest.raises(BaseException, match="looked"):
        cli("bench")


def _without(library: str, code: str) -> subprocess.CompletedProcess[str]:
    """`code` in a Python that has everything but `library`."""
    script = f"import sys\nsys.modules[{library!r}] = None\n{code}"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.later
@pytest.mark.parametrize(
    ("library", "said", "code"),
    [
        ("matplotlib", "this needs matplotlib: pip install '.[report]' in a checkout", 2),
        # The control: what is no extra of ours is not said to be one.
        ("safetensors", "(an error in the model or in secure-fvi; --debug shows where)", 1),
    ],
)
def test_a_run_that_lacks_a_library_says_so_before_it_begins(
    library: str, said: str, code: int, cli: CommandLine
) -> None:
    before = sorted(cli.folder.iterdir())
    arguments = ["run", str(cli.config), "--out", str(cli.folder / "out")]
    done = _without(library, f"from secure_fvi.cli import main; main({arguments!r})")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.stderr
    assert said in done.stderr
    assert sorted(cli.folder.iterdir()) == before


@pytest.mark.later
def test_commands_of_a_site_name_the_extra_that_they_lack() -> None:
    arguments = ["silo", "start", "--home", "h", "--server", "a:1"]
    done = _without("grpc", f"from secure_fvi.cli import main; main({arguments!r})")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "secure-fvi: this needs grpc: pip install '.[distributed]' in a checkout\n"


@pytest.mark.later
def test_a_site_needs_no_plots() -> None:
    done = _without("matplotlib", "import secure_fvi.deployment.site, secure_fvi.deployment.serving")
    assert done.returncode == 0, done.stderr
    done = _without("matplotlib", "import secure_fvi.runs.report")
    assert "No module named 'matplotlib" in done.stderr or "import of matplotlib halted" in done.stderr, "the control"
