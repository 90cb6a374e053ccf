"""A whole run through the command line: files, folder, resumption, report, comparison."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine
from markupsafe import escape
from programs import make_intercepts

import secure_fvi as sf
from secure_fvi.algorithms import refining
from secure_fvi.cli import _show_warning, main
from secure_fvi.deployment.model_hash import package_digest
from secure_fvi.driving import Progress
from secure_fvi.errors import InputError
from secure_fvi.progress import RunProgress
from secure_fvi.runs.config import parse
from secure_fvi.runs.directory import RunDirectory
from secure_fvi.runs.reading import read
from secure_fvi.runs.report import INTERVAL, MetricsLog, read_metrics
from secure_fvi.runs.running import execute
from secure_fvi.runs.watching import snapshot

# 120 rounds of the small model are too few to converge, which the run says; the tests do not need more.
pytestmark = pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")

#: Where it is no matter how many rounds there are.
FEW = ("--set", "algorithm.iterations=3")
FILES = {"config.toml", "run.json", "metrics.jsonl", "result.json", "posterior.safetensors", "marginals.json"}


@pytest.mark.later
def test_a_run_writes_its_files_and_a_second_one_is_refused(cli: CommandLine) -> None:
    answer = cli.run()
    assert answer.code == 0, answer.err
    assert "mu" in answer.out
    out = cli.folder / "out"
    assert FILES | {"report.html", "table.csv", "checkpoint"} == {path.name for path in out.iterdir()}

    result = json.loads((out / "result.json").read_text())
    assert result["silos"] == ["a", "b", "c"]
    assert result["rounds"] == 120
    assert result["metrics"]["records"] == 20
    assert [row["round"] for row in read_metrics(out / "metrics.jsonl")] == [50, 100, 120]
    run, page = json.loads((out / "run.json").read_text()), (out / "report.html").read_text()
    assert run["engine"] == "one process"
    assert all(run[key] in page for key in ("job", "began", "version", "data_sha256", "model"))
    assert run["package"] == package_digest().hex()
    assert run["package"][:16] in page
    assert "All parties ran in one process here" in page

    cli.refused("finished run", "another folder")
    answer = cli.run("--resume")
    assert answer.code == 0
    assert "is finished" in answer.out


@pytest.mark.later
def test_the_written_configuration_repeats_the_run(cli: CommandLine) -> None:
    assert cli.run("--set", "seed=9", "--set", "algorithm.learning_rate=0.1", "--quiet", *FEW).code == 0
    written = cli.folder / "out" / "config.toml"
    assert tomllib.loads(written.read_text())["algorithm"]["learning_rate"] == 0.1
    assert cli("run", written, "--out", cli.folder / "again", "--quiet").code == 0
    for name in ("posterior.safetensors", "config.toml"):
        assert (cli.folder / "again" / name).read_bytes() == (cli.folder / "out" / name).read_bytes()


def test_quiet_says_nothing(cli: CommandLine) -> None:
    answer = cli.run("--quiet", *FEW)
    assert (answer.code, answer.out) == (0, "")


def interrupt(cli: CommandLine, after: int) -> None:
    """Run until round `after` and stop as an interrupted process would."""

    def stop(progress: Progress) -> None:
        if progress.round == after:
            raise KeyboardInterrupt

    config = read(cli.config, ["run.checkpoint_seconds=1e-9"])
    with pytest.raises(KeyboardInterrupt):
        execute(config, RunDirectory(cli.folder / "out"), on_round=stop)


@pytest.mark.parametrize(
    ("provenance", "said"), [({}, "the data are not those"), ({"roster": "ab"}, "the installed secure_fvi")]
)
def test_what_is_not_as_it_began_is_named(tmp_path: Path, provenance: dict[str, str], said: str) -> None:
    """A server has no records: what it began with is the model, by its hash."""
    table = {"model": {"program": "six_cities"}, "silo": [{"id": name, "data": "at-site"} for name in "abc"]}
    run = RunDirectory(tmp_path / "run")
    run.begin(parse(table, "job"), "one", provenance)
    run.check_data("one")
    with pytest.raises(InputError, match=said):
        run.check_data("another")


def test_an_interrupted_run_is_continued_to_the_same_posterior(cli: CommandLine) -> None:
    cli.change("iterations = 120", "iterations = 102")
    assert cli.run("--quiet", out="whole").code == 0
    interrupt(cli, after=70)
    cli.refused("unfinished run", "--resume")
    cli.refused("seed = 3", "not 4", more=("--resume", "--set", "seed=4"))
    cli.refused("algorithm.learning_rate", more=("--resume", "--set", "algorithm.learning_rate=0.5"))
    assert cli.run("--resume", "--quiet").code == 0
    out, whole = cli.folder / "out", cli.folder / "whole"
    assert (out / "posterior.safetensors").read_bytes() == (whole / "posterior.safetensors").read_bytes()
    assert [row["round"] for row in read_metrics(out / "metrics.jsonl")] == [50, 70, 100, 102]


@pytest.mark.later
def test_other_data_are_not_taken_for_the_run_that_began(cli: CommandLine) -> None:
    interrupt(cli, after=20)
    path = cli.folder / "a.csv"
    path.write_text(path.read_text() + "1.0,2.0\n")
    cli.refused("data are not those", more=("--resume",))


def test_resume_begins_where_there_is_nothing_yet(cli: CommandLine) -> None:
    answer = cli.run("--resume", "--quiet", *FEW)
    assert (answer.code, answer.out) == (0, "")
    assert "holds no run to continue: one begins" in answer.err
    assert (cli.folder / "out" / "result.json").exists()


def test_a_folder_with_other_files_is_left_alone(cli: CommandLine) -> None:
    out = cli.folder / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    cli.refused("other files")
    cli.refused("is a file", out="a.csv")


@pytest.mark.parametrize("out", ["a.csv/out", "/proc/none/out", "out/" + 300 * "x"])
def test_a_folder_that_cannot_be_made_is_refused_before_data_are_read(cli: CommandLine, out: str) -> None:
    (cli.folder / "b.csv").unlink()
    for line in (("run",), ("audit", "--attack", "individuals")):
        answer = cli(line[0], cli.config, *line[1:], "--out", cli.folder / out)
        assert answer.code == 2
        assert "cannot write to --out" in answer.err
        assert not (cli.folder / "out").exists()
    cli.refused("cannot write to --out", out=out, more=("--resume",))
    assert "b.csv" in cli.run().err  # the control: what is read then


@pytest.mark.later
def test_a_folder_in_use_is_refused(cli: CommandLine) -> None:
    interrupt(cli, after=20)
    holder = RunDirectory(cli.folder / "out")
    holder.begin(holder.read_config(), "", {})
    cli.refused("another process", more=("--resume",))
    holder.release()


def progress(round_: int) -> Progress:
    return Progress(round_, 1000, -1.0 * round_, 0.1, None, 10 * round_, 20 * round_, "approach", 3)


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for round_ in range(1, 4 * INTERVAL + 1):
        log.add(progress(round_))
    log.close(None)
    with path.open("a") as file:
        file.write('{"round": 25')  # torn by a crash

    log = MetricsLog(path, resumed_from=2 * INTERVAL + 7)
    log.add(progress(2 * INTERVAL + 8))
    log.close(progress(2 * INTERVAL + 8))
    rows = read_metrics(path)
    assert [row["round"] for row in rows] == [INTERVAL, 2 * INTERVAL, 2 * INTERVAL + 8]
    assert rows[0]["objective"] == pytest.approx(-(INTERVAL + 1) / 2)
    # The engine's counters are part of the checkpoint, so its totals are those of all pieces.
    assert rows[2]["bytes_up"] == 10 * (2 * INTERVAL + 8)
    assert rows[2]["seconds"] >= rows[1]["seconds"]


@pytest.mark.parametrize(("most", "lines"), [(2 * INTERVAL, [1, 2, 3]), (2 * INTERVAL + 1, [3])])
def test_a_run_of_few_rounds_has_a_line_for_each(tmp_path: Path, most: int, lines: list[int]) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for round_ in (1, 2, 3):
        log.add(progress(round_)._replace(max_rounds=most))
    log.close(progress(3))
    assert [row["round"] for row in read_metrics(tmp_path / "metrics.jsonl")] == lines


@pytest.mark.slow
def test_compare_pools_the_data_and_says_so(cli: CommandLine) -> None:
    assert cli.run("--quiet").code == 0
    out = cli.folder / "out"
    page = (out / "report.html").read_bytes()
    answer = cli("compare", out, "--draws", "200")
    assert answer.code == 0, answer.err
    assert "pooled" in answer.out
    comparison = json.loads((out / "compare.json").read_text())
    result = json.loads((out / "result.json").read_text())
    assert comparison["reference"] == "nuts"
    assert comparison["sites"].keys() == {"mu", "tau"}
    for site, row in comparison["sites"].items():
        assert row["run_mean"] == pytest.approx(result["posterior"][site]["mean"])
        assert row["mean_error_in_sd"] == pytest.approx((row["run_mean"] - row["mean"]) / row["sd"])
        assert row["sd_ratio"] == pytest.approx(row["run_sd"] / row["sd"])
    assert (out / "report.html").read_bytes() == page


@pytest.mark.usefixtures("drawn")
def test_the_report_fetches_nothing(cli: CommandLine) -> None:
    assert cli.run("--quiet", *FEW).code == 0
    html = (cli.folder / "out" / "report.html").read_text()
    assert "http:" not in html
    assert "https:" not in html
    assert "<script" not in html
    sources = re.findall(r"(?:src|href)\s*=\s*[\"']([^\"']{0,30})", html)
    assert len(sources) == 3
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert "not assessed" in html
    assert "its length was fixed (iterations = 3)" in html
    assert "sees each silo" in html  # what plain sums mean


@pytest.mark.later
@pytest.mark.usefixtures("few_draws", "untraced")
@pytest.mark.parametrize(
    ("length", "code", "standing"),
    [("max_iterations = 12", 4, "not converged"), ("iterations = 12", 0, "not assessed")],
)
def test_every_display_says_how_a_run_ended(cli: CommandLine, length: str, code: int, standing: str) -> None:
    """Table, result.json, report and watch page; 4 for a run that ended without converging, again on --resume.
    Twelve rounds of a model that needs thousands."""
    cli.change("iterations = 120", length)
    answer = cli.run()
    assert answer.code == code
    assert f"12 rounds, {standing}" in answer.out
    out = cli.folder / "out"
    result = json.loads((out / "result.json").read_text())
    assert result["converged"] is ({4: False, 0: None}[code])
    reason = result["convergence"]["reason"]
    assert reason in answer.out.replace("\n", " ")
    html = (out / "report.html").read_text()
    assert f"<b>{standing}</b>" in html
    assert f"{standing.capitalize()}: {escape(reason)}" in html
    assert (snapshot(out)["standing"], snapshot(out)["reason"]) == (standing, reason)
    assert cli.run("--resume").code == code


@pytest.mark.usefixtures("few_draws")
def test_a_run_that_converged_exits_0(cli: CommandLine) -> None:
    """The control: a model that PVI fits in a few rounds."""
    cli.change("model.py:means", "model.py:one_mean")
    cli.change('name = "sfvi"\niterations = 120', 'name = "pvi"\nlocal_steps = 150')
    answer = cli.run()
    assert answer.code == 0, answer
    assert ", converged" in answer.out
    assert json.loads((cli.folder / "out" / "result.json").read_text())["converged"] is True
    assert "<b>converged</b>" in (cli.folder / "out" / "report.html").read_text()


def test_a_command_says_a_warning_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Though job and parties each make the model. Controls: another one; the next command."""
    for texts, lines in ((["a", "a", "b"], 2), (["a"], 1)):
        with pytest.raises(SystemExit):
            main(["--version"])
        for text in texts:
            _show_warning(text, sf.SecureFVIWarning, "", 0)
        assert capsys.readouterr().err.count("secure-fvi: warning: ") == lines


def test_help_needs_no_torch() -> None:
    code = (
        "import sys, secure_fvi.cli\n"
        "heavy = {'torch', 'pyro', 'pydantic', 'matplotlib', 'numpy', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("command", ["", "run", "compare", "bench step"])
def test_help(cli: CommandLine, command: str) -> None:
    answer = cli(*command.split(), "--help")
    assert answer.code == 0
    assert "Usage: secure-fvi" in answer.out


def test_no_pace_of_rounds_tells_when_the_final_sums_are_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor that the run is done with its rounds. Control: of a job without such sums nothing is said of them."""
    monkeypatch.setattr("secure_fvi.progress._LINE_SECONDS", 0.0)
    for ending in (False, None):
        shown = RunProgress(False)
        shown.update(progress(1)._replace(ending=ending))
        shown.update(progress(2)._replace(ending=ending, objective=-12345.0))
        left = capsys.readouterr().err
        assert ", bound -12345.00, " in left  # the round's own: a mean over rounds would move long after q is at rest
        assert "s at this pace if it takes all 1000 rounds" in left
        assert ("and the final sums after it" in left) == (ending is False)
    shown.update(progress(2)._replace(ending=True))
    last = capsys.readouterr().err
    assert "the rounds are done; weighing the answer by final sums" in last
    assert "at this pace" not in last
    assert " done\n" not in last  # where this process began among these sums
    shown.update(progress(2)._replace(ending=True, finals=(1, 8)))
    assert "weighing the answer by final sums, 1 of at most 8 done\n" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_says_when_its_rounds_are_done() -> None:
    """Once the last is, and not before, and which of the sums after it are. Control: where none comes after them."""
    problem = make_intercepts()

    def counted(algorithm: Any) -> list[tuple[int, int] | None]:
        return [p.finals for p in sf.run(problem.model, problem.silos, algorithm, sf.Plain(), compile=False)]

    assert counted(sf.PVI(rounds=3, local_steps=5)) == [None, None, (0, 1), (1, 1)]
    found = counted(sf.PVI(local_steps=5))
    assert found[-1] is not None
    assert [f[0] for f in found if f] == list(range(found[-1][0] + 1))
    assert found[-1][0] <= found[-1][1] == 1 + refining.MORE
    assert counted(sf.SFVI(iterations=3)) == [None] * 3

    def ends(algorithm: Any) -> list[bool | None]:
        return [p.ending for p in sf.run(problem.model, problem.silos, algorithm, sf.Plain(), compile=False)]

    assert ends(sf.PVI(rounds=3, local_steps=5)) == [False, False, True, True]
    assert ends(sf.SFVI(iterations=3)) == [None] * 3
