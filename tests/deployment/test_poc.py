"""`secure-fvi poc`: what it has institutions type and hand over, what it makes, and its lines, typed elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from secure_fvi.cli import cli, main
from secure_fvi.cli.poc import HUB, NAMES, SETTINGS, Handed, Typed, _Machines, _names, plan
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.names import now
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.models.six_cities import load
from secure_fvi.runs.reading import read
from secure_fvi_lab.references import _with_tables

ROOT = Path(__file__).parents[2]
SITES = NAMES[:3]
TABLES = {site: f"{site}.csv" for site in SITES}


def test_a_site_types_nine_commands_and_hands_over_two_files_at_most() -> None:
    """Whichever it is, the one that agrees late too; with the setting of its environment."""
    steps = [step for section in plan(TABLES) for step in section.steps]
    for site in SITES:
        own = [step for step in steps if step[0] == site]
        assert 1 + sum(isinstance(step, Typed) for step in own) <= 9
        assert [step.files for step in own if isinstance(step, Handed)] == [
            f"site/{site}.request.toml", f"site/rosters/1.sig/{site}.sig",
        ]  # fmt: skip
    printed = CliRunner().invoke(cli, ["poc", "--plan"]).output
    assert [str(step) for step in steps] == [line.strip() for line in printed.splitlines() if _read(line)]


def test_a_plan_is_of_a_job_that_can_be(tmp_path: Path) -> None:
    """With one column misspelt it was printed to the end, and named a site that is none."""
    (tmp_path / "d.toml").write_text('format = 1\n[columns.bp]\nkind = "number"\nlow = 0\nhigh = 9\n')
    words = ["poc", "--plan", "--dictionary", str(tmp_path / "d.toml")]
    for site in ("a", "b", "c"):
        (tmp_path / f"{site}.csv").write_text(f"bp\n1\n2\n{ord(site) - 92}\n")
        words += ["--data", str(tmp_path / f"{site}.csv")]
    refused = CliRunner().invoke(cli, [*words, "--formula", "bpp ~ 1"])
    assert refused.exit_code
    assert not refused.output
    assert "no column 'bpp'; did you mean 'bp'?" in str(refused.exception)
    wrong = CliRunner().invoke(cli, [*words, "--formula", "bp ~ 1", "--set", "algorithm.name=pvj"])
    assert "did you mean 'pvi'?" in str(wrong.exception)
    done = CliRunner().invoke(cli, [*words, "--formula", "bp ~ 1"])
    assert done.exit_code == 0
    assert "`a$ ...` is typed at a" in done.output


def _read(line: str) -> re.Match[str] | None:
    """Who types, and what; or who hands over, to whom, and which files."""
    return re.fullmatch(r"  (\w+)(?:\$ (.*)| -> ([\w, ]+): (.*))", line)


def _make_folders(folder: Path) -> None:
    for who in (HUB, *SITES):
        (folder / who).mkdir(parents=True)
        (folder / who / "passphrase").touch(mode=0o600)
        (folder / who / "passphrase").write_text(f"of {who} alone\n")


def test_what_is_typed_about_keys_puts_a_roster_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process. The control: without a site's signature it is in force nowhere."""
    _make_folders(tmp_path)
    (tmp_path / HUB / "job.toml").touch()
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    machines = _Machines(tmp_path)
    for step in (step for section in plan(TABLES)[:4] for step in section.steps):
        if isinstance(step, Handed):
            machines._hand(step)
            continue
        monkeypatch.chdir(tmp_path / step.who)
        words = [w for word in step.line.split()[1:] for w in (sorted(map(str, Path().glob(word))) or [word])]
        if step.line.endswith("verify *.sig") and step.who != "south":  # which has its own
            left_out = CliRunner().invoke(cli, [w for w in words if w != "south.sig"])
            assert isinstance(left_out.exception, ProtocolError)
            assert "not signed by south" in str(left_out.exception)
        done = CliRunner().invoke(cli, words, input="y\n", catch_exceptions=False)
        assert done.exit_code == 0, done.output
    for who in (HUB, *SITES):
        assert Home(tmp_path / who / "site", f"of {who} alone").roster(now()).serial == 1


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be carried out, of which nothing is."""
    seen: list[Any] = []
    monkeypatch.setattr(_Machines, "carry_out", lambda self, steps: seen.extend(steps))
    return seen


def test_a_folder_an_institution_with_its_own_table_and_passphrase(tmp_path: Path, typed: list[Any]) -> None:
    folder = tmp_path / "made"
    done = CliRunner().invoke(cli, ["poc", "--folder", str(folder), "--port", str(_free())], catch_exceptions=False)
    assert "Each site has typed 8 commands and handed over 2 files" in done.output
    assert len(typed) == sum(len(section.steps) for section in plan(TABLES))
    held = {who: sorted(p.name for p in (folder / who).iterdir()) for who in (HUB, *SITES)}
    assert held == {HUB: ["job.toml", "passphrase"]} | {s: sorted([f"{s}.csv", "passphrase"]) for s in SITES}
    assert len({(folder / who / "passphrase").read_text() for who in held}) == len(held)
    assert {stat.S_IMODE((folder / who / "passphrase").stat().st_mode) for who in held} == {0o600}
    assert len({(folder / s / f"{s}.csv").read_text() for s in SITES}) == len(SITES)
    job, page = read(folder / HUB / "job.toml"), (ROOT / "docs" / "deployment.md").read_text()
    (shown,) = re.findall(r"^```toml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert tomllib.loads(shown) == tomllib.loads((folder / HUB / "job.toml").read_text())
    assert (job.model.options, {Path(s.data).name for s in job.silo}) == ({"most": {"rows": 4}}, {"at-site"})


def test_children_are_dealt_and_a_comparison_takes_each_sites_table(tmp_path: Path, typed: list[Any]) -> None:
    """Each of the 537 with four visits, once. The answer beside NUTS asks for the tables that the server had not."""
    folder = tmp_path / "made"
    done = CliRunner().invoke(cli, ["poc", "--folder", str(folder), "--port", str(_free())], catch_exceptions=False)
    rows = [line.split(",") for site in SITES for line in (folder / site / f"{site}.csv").read_text().split()[1:]]
    assert (len(rows), sum(int(row[3]) for row in rows)) == (4 * 537, int(load().records["wheeze"].sum()))
    given = shlex.split(done.output.splitlines()[-1])
    assert given[:3] == ["secure-fvi", "compare", str(folder / HUB / "run")]
    tables = dict(word.split("=") for word in given[4::2])
    assert tables == {site: str(folder / site / f"{site}.csv") for site in SITES}
    job = read(folder / HUB / "job.toml")
    paths = {site: Path(table) for site, table in tables.items()}
    assert [Path(s.data) for s in _with_tables(job, set(SITES), paths).silo] == list(paths.values())
    for wrong in ({}, {**paths, "west": tmp_path}):
        with pytest.raises(InputError, match="sites are east, north, south"):
            _with_tables(job, set(SITES), wrong)
    with pytest.raises(InputError, match="names its data itself"):
        _with_tables(job, set(), paths)


OWN = {"one": (2, 1), "two": (1, 1), "three": (1, 3)}  # rows of a site's first and second patient


@pytest.fixture
def tables(tmp_path: Path) -> list[str]:
    """Options that name three tables and their dictionary."""
    dictionary = '[columns.y]\nkind = "number"\nlow = 0\nhigh = 9\n[columns.who]\nkind = "id"\n'
    (tmp_path / "d.toml").write_text("format = 1\n" + dictionary)
    for k, (name, (a, b)) in enumerate(OWN.items()):
        rows = [f"{k + j},p{j >= a}" for j in range(a + b)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["y,who", *rows]) + "\n")
    files = [w for name in OWN for w in ("--data", str(tmp_path / f"{name}.csv"))]
    return [*files, "--dictionary", str(tmp_path / "d.toml"), "--formula", "y ~ 1 + (1 | who)"]


def test_tables_of_ones_own(tmp_path: Path, tables: list[str], typed: list[Any]) -> None:
    """Sites are called as their files; how many rows a record has at most is counted over all of them."""
    folder = tmp_path / "made"
    words = ["poc", "--folder", str(folder), "--port", str(_free()), *tables, "--set", "seed=7"]
    assert CliRunner().invoke(cli, words, catch_exceptions=False).exit_code == 0
    job = read(folder / HUB / "job.toml")
    assert (job.seed, [s.id for s in job.silo], job.model.options) == (7, list(OWN), {"most": {"rows": 3}})
    assert (folder / "two" / "two.csv").read_text() == (tmp_path / "two.csv").read_text()
    assert [s.line for s in typed if isinstance(s, Typed) and "allow" in s.line][-1].split()[-2] == "three.csv"


def test_files_of_one_name_are_called_as_their_folders(tmp_path: Path) -> None:
    """The control: of one folder they are numbered."""
    files = [tmp_path / where / "stays.csv" for where in ("north", "east", "south")]
    for file in (*files, tmp_path / "north" / "stays.parquet"):
        file.parent.mkdir(exist_ok=True)
        file.touch()
    assert _names(files) == dict(zip(("north", "east", "south"), files, strict=True))
    assert list(_names([*files, tmp_path / "north" / "stays.parquet"])) == [f"site-{k}" for k in (1, 2, 3, 4)]


@pytest.mark.parametrize("how", [["--missing", "drop"], ["--set", "model.options.missing=drop"]])
def test_what_is_done_with_gaps_is_typed_by_every_site(
    tmp_path: Path, tables: list[str], typed: list[Any], how: list[str]
) -> None:
    """The control: where nothing is said, the table with the gap is refused before anything is made."""
    (tmp_path / "one.csv").write_text("y,who\n1,p0\n,p0\n2,p1\n4,p1\n")
    words, folder = ["poc", "--port", str(_free()), *tables], tmp_path / "made"
    refused = CliRunner().invoke(cli, [*words, "--folder", str(folder)])
    assert "(--missing drop)" in str(refused.exception)
    assert not folder.exists()
    query = "SELECT * FROM data WHERE who <> 'it''s'"
    more = ["--folder", str(folder), "--query", query, *how]
    assert CliRunner().invoke(cli, [*words, *more], catch_exceptions=False).exit_code == 0
    allowed = [shlex.split(s.line) for s in typed if isinstance(s, Typed) and "allow" in s.line]
    assert len(allowed) == 3
    assert all(line[-5:] == ["--query", query, "--missing", "drop", "--without-dp"] for line in allowed)
    assert read(folder / HUB / "job.toml").model.options["missing"] == "drop"


@pytest.mark.parametrize("name", ["m.py", "my model; echo x.py", "it's {mine} $HOME.py", "a*b.py"])
def test_a_model_of_ones_own_goes_to_all_and_is_named_by_each(
    tmp_path: Path, tables: list[str], typed: list[Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whatever its file is called. The control is a shell that reads the name as it stands."""
    monkeypatch.setattr(shutil, "which", lambda name: name)
    model, folder = tmp_path / name, tmp_path / "made"
    model.write_text("def f(y): ...\n")
    words = ["poc", "--folder", str(folder), "--port", str(_free()), *tables[:6], "--function", f"{model}:f"]
    assert CliRunner().invoke(cli, words, catch_exceptions=False).exit_code == 0
    assert read(folder / HUB / "job.toml").model.function == str(folder / HUB / f"{name}:f")
    assert (folder / HUB / name).read_text() == model.read_text()
    (handed,) = (s for s in typed if isinstance(s, Handed) and "job.toml" in s.files)
    allowed = [s.line for s in typed if isinstance(s, Typed) and "allow" in s.line]
    assert len(allowed) == len(OWN)

    def words(line: str) -> list[str]:
        """As the shell of the folder in which the lines are typed has it."""
        said = subprocess.run(["sh", "-c", f"printf '%s\\n' {line}"], cwd=folder / HUB, capture_output=True, text=True)
        return said.stdout.splitlines()

    (folder / HUB / "axb.py").touch()
    assert words(handed.files) == ["roster.toml", "job.toml", name]
    assert all(words(line)[-3:] == ["--function", f"{name}:f", "--without-dp"] for line in allowed)
    assert (words(f"--function {name} --without-dp") == ["--function", name, "--without-dp"]) is (name == "m.py")
    for who in OWN:
        (folder / who / name).unlink(missing_ok=True)
    _Machines(folder)._hand(Handed(HUB, tuple(OWN), shlex.quote(name)))
    assert all((folder / who / name).exists() and not (folder / who / "axb.py").exists() for who in OWN)


def test_what_is_wrong_is_one_line_and_nothing_is_made(
    tmp_path: Path, tables: list[str], typed: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The control is the test above."""
    port, folder, used = str(_free()), tmp_path / "made", tmp_path / "used"
    used.mkdir()
    sandboxed = shutil.which("bwrap")
    (used / "mine").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for words, said in (
            (["--folder", str(used)], "'" + str(used) + "' is in use"),
            (["--folder", str(used / "mine")], "is a file"),
            (["--folder", str(used / "mine" / "x")], "cannot write to --folder"),
            (["--port", str(taken.getsockname()[1])], "is taken; give another --port"),
            (["--data", str(tmp_path / "none.csv"), *tables], "no file"),
            (["--data", str(tmp_path / "d.toml"), *tables], "--data"),
            ([*tables, "--formula", "y ~ z"], "no column 'z'"),
            ([*tables, "--function", "m.py:f"], "no formula, family, dictionary"),
            ([*tables[:6], "--function", "m.py:f"], "bubblewrap" if sandboxed is None else "no file 'm.py'"),
            ([*tables, "--dictionary", str(tmp_path / "none.toml")], "none.toml"),
            ([*tables, "--family", "gauss"], "gauss"),
            (["--set", "algorithm"], "must look like table.key=value"),
            (tables[:2], "--data needs --formula and --dictionary"),
            (["--silos", "4", *tables], "--silos 4, and 3 tables"),
            ([*tables[:4], *tables[6:]], "a job needs 3 sites"),
            ([*tables[:4], *tables[2:4], *tables[6:]], "have the same data"),
            (["--missing", "drop"], "--missing is of tables"),
            (["--query", "SELECT 1"], "--query is of tables"),
        ):
            with pytest.raises(SystemExit) as stopped:
                main(["poc", "--folder", str(folder), "--port", port, *words])
            out, err = capsys.readouterr()
            assert (stopped.value.code, out, err.count("\n")) == (2, "", 1), words
            assert said in err
    assert not folder.exists()
    assert not typed
    (tmp_path / "one.csv").write_text("y,patient\n1,a\n")
    with pytest.raises(SystemExit):
        main(["poc", "--folder", str(folder), "--port", port, *tables])
    assert "silo 'one' (--data)" in capsys.readouterr().err
    assert not folder.exists()


def test_ended_from_outside_it_ends_what_it_started(tmp_path: Path) -> None:
    started = subprocess.Popen(["sleep", "60"], text=True)

    def work() -> None:
        with _Machines(tmp_path) as machines:
            machines._started.append(started)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        work()
    assert started.poll() == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def _free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


# ---- as people do it ----


def _type(text: str, folder: Path, before: Callable[[str], list[str]], hand: Callable[[Path, str], None]) -> list[int]:
    """Type and hand over what the lines of `text` say; how the server's commands ended. All others have to succeed.

    before: the words before a shell at an institution; hand: puts a file into an institution's folder."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SECURE_FVI_")} | SETTINGS
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment["PYTHONPATH"] = str(ROOT)
    servers, started = list[int](), list[int]()
    try:
        for who, line, takers, files in (found.groups() for t in text.splitlines() if (found := _read(t))):
            if line is None:
                paths = [p for name in files.split() for p in sorted((folder / who).glob(name))]
                assert len(paths) >= len(files.split())
                for path, taker in ((path, taker) for path in paths for taker in takers.split(", ")):
                    hand(path, taker)
                continue
            words = [*before(who), "bash", "-c", line]
            with (folder / f"{who}.said").open("a") as said:
                process = subprocess.Popen(
                    words, cwd=folder / who, env=environment, stdin=subprocess.PIPE, stdout=said, stderr=said,
                    start_new_session=True, text=True,
                )  # fmt: skip
                started.append(process.pid)
                try:
                    process.communicate("y\n", timeout=600)
                except subprocess.TimeoutExpired:
                    pytest.fail(f"{line}: {[log.read_text()[-500:] for log in folder.glob('*/silo.log')]}")
            if " server start " in line:
                servers.append(process.returncode)
            else:
                assert process.returncode == 0, line + (folder / f"{who}.said").read_text()
    finally:
        for group in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGTERM)
    return servers


def _check_finished(folder: Path) -> None:
    result = json.loads((folder / HUB / "run" / "result.json").read_text())
    assert result["converged"] is True
    assert result["silos"] == sorted(SITES)
    for site in SITES:
        said = (folder / f"{site}.said").read_text()
        assert "' agree on " in said
        assert said.endswith("\nverified\n")


@pytest.mark.slow
def test_what_it_prints_works_when_it_is_typed_in_clean_folders(tmp_path: Path) -> None:
    """Verbatim, from the tables, the job and passphrases alone; and the folder that it leaves is a consortium's."""
    made, clean = tmp_path / "made", tmp_path / "clean"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "from secure_fvi.cli import main; main()", "poc", "--folder", str(made)]
    done = subprocess.run(
        [*command, "--port", str(_free())], env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    for words in ("is outside this site's policy", "stays at a silo", "odds ratio", "finished, converged", "agree on"):
        assert words in done.stdout
    assert "PRIVATE" not in done.stdout
    _make_folders(clean)
    shutil.copy(made / HUB / "job.toml", clean / HUB)
    for site in SITES:
        shutil.copy(made / site / f"{site}.csv", clean / site)
    servers = _type(done.stdout, clean, lambda who: [], lambda path, taker: shutil.copy(path, clean / taker))
    assert servers == [1, 0]
    _check_finished(clean)
    for who in (HUB, *SITES):
        assert Home(made / who / "site", (made / who / "passphrase").read_text().strip()).roster(now()).serial == 1


def _user(who: str) -> str:
    return str(21001 + (HUB, *SITES).index(who))


def _can() -> bool:
    """Whether this process may make network namespaces, and other users may run this Python."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("setpriv"):
        return False
    # `env` between them: setpriv itself still has root's capabilities when it looks for the program.
    user = ["setpriv", "--reuid", "21001", "--regid", "21001", "--clear-groups", "env"]
    if subprocess.run([*user, sys.executable, "-c", ""], capture_output=True, check=False, cwd="/").returncode != 0:
        return False
    made = subprocess.run(["ip", "netns", "add", "fvi-probe"], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", "fvi-probe"], capture_output=True, check=False)
    return made


@pytest.fixture
def machines() -> Iterator[Path]:
    """A folder that other users may enter (pytest's own are for one user), a user and a network namespace for each
    institution, on one bridge: the hub's address ends in 1."""
    path = Path(tempfile.mkdtemp(prefix="fvi-"))
    path.chmod(0o755)

    def ip(line: str) -> None:
        subprocess.run(["ip", *line.split()], check=True)

    try:
        for at, who in enumerate((HUB, *SITES), 1):
            ip(f"netns add fvi-{who}")
            ip(f"-n fvi-{who} link set lo up")
            if who == HUB:
                ip("-n fvi-hub link add br0 type bridge")
            else:
                ip(f"-n fvi-hub link add v-{who} type veth peer name eth0 netns fvi-{who}")
                ip(f"-n fvi-hub link set v-{who} master br0 up")
            device = "br0" if who == HUB else "eth0"
            ip(f"-n fvi-{who} addr add 10.77.0.{at}/24 dev {device}")
            ip(f"-n fvi-{who} link set {device} up")
        yield path
    finally:
        shutil.rmtree(path)
        for who in (HUB, *SITES):
            subprocess.run(["ip", "netns", "del", f"fvi-{who}"], capture_output=True, check=False)


@pytest.mark.slow
@pytest.mark.skipif(not _can(), reason="needs root, ip, setpriv, and a Python that all may run")
def test_typed_on_machines_of_their_own(machines: Path, typed: list[Any]) -> None:
    """None can read another's files, and nothing travels but what the stream carries and what is handed over."""
    made = machines / "made"
    CliRunner().invoke(cli, ["poc", "--folder", str(made), "--port", str(_free())], catch_exceptions=False)

    def before(who: str) -> list[str]:
        user = ["setpriv", "--reuid", _user(who), "--regid", _user(who), "--clear-groups"]
        return ["ip", "netns", "exec", f"fvi-{who}", *user, "env", f"HOME={made / who}"]

    def hand(path: Path, taker: str) -> None:
        shutil.copy(path, made / taker)
        shutil.chown(made / taker / path.name, int(_user(taker)), int(_user(taker)))

    made.chmod(0o755)
    for who in (HUB, *SITES):
        for path in (made / who, *(made / who).iterdir()):
            shutil.chown(path, int(_user(who)), int(_user(who)))
    text = "\n".join(map(str, plan(TABLES, "10.77.0.1")))
    assert _type(text, made, before, hand) == [1, 0]
    _check_finished(made)
    for one, other in (("south", "north/north.csv"), (HUB, "north/site/site.toml")):
        words = ["cat", str(made / other)]
        assert subprocess.run([*before(one), *words], capture_output=True, check=False).returncode != 0
        assert subprocess.run([*before("north"), *words], capture_output=True, check=False).returncode == 0
