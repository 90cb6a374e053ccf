"""Runs under privacy from the command line: charged, reported, refused when spent, continued after a kill."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
import torch
from command_line import CommandLine

from secure_fvi import compiled, fitting
from secure_fvi.checkpoints import latest_round
from secure_fvi.errors import InputError
from secure_fvi.privacy import gate
from secure_fvi.privacy.gate import Gate
from secure_fvi.privacy.ledger import Ledger
from secure_fvi.privacy.ledger_account import verify
from secure_fvi.runs import report
from secure_fvi.runs.directory import RunDirectory
from secure_fvi.runs.federation import federate
from secure_fvi.runs.reading import read
from secure_fvi.runs.records import schema_beforehand, silo_part
from secure_fvi_lab import references
from secure_fvi_lab.references import Draws

pytestmark = pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")

PRIVACY = """
[privacy]
unit = "record"
epsilon = 4.0
delta = 1e-3
clipping_norm = 5.0
"""


def private(cli: CommandLine, more: str = "") -> None:
    cli.change('kind = "plain"', 'kind = "masked"')
    cli.change("iterations = 120", "iterations = 40\nsampling_rate = 0.5")
    cli.config.write_text(cli.config.read_text() + PRIVACY + more)


def test_a_private_run_says_what_it_guarantees_and_keeps_its_ledger(cli: CommandLine) -> None:
    private(cli)
    answer = cli.run()
    assert answer.code == 0, answer
    result = json.loads((cli.folder / "out" / "result.json").read_text())
    assert result["elbo"] is None
    assert result["metrics"]["records"] is None
    privacy = result["privacy"]
    assert privacy["unit"] == "record"
    assert 3.6 < privacy["epsilon"] <= 4.0
    assert {"delta", "accountant", "noise"} <= privacy.keys()
    assert cli("budget", "verify", cli.folder / "out" / "ledger.sqlite").code == 0
    report = cli("budget", "report", cli.folder / "out" / "ledger.sqlite", "--silo", "a", "--format", "json")
    told = json.loads(report.out)
    assert told["epsilon"] <= told["budget"]["epsilon"] if isinstance(told["budget"], dict) else told["budget"]
    assert len(told["jobs"]) == 1
    page = (cli.folder / "out" / "report.html").read_text()
    assert "epsilon" in page.lower()


def test_a_configuration_is_charged_to_one_ledger_wherever_it_is_typed(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its ledger lies where its tables are looked for; before, another folder to type in was another budget. The
    control is one that is typed, which lies where it is typed."""
    private(cli, 'ledger = "site.sqlite"\n')
    cli.change("iterations = 40", "iterations = 4")
    assert cli.run(out="first").code == 0
    assert (cli.folder / "site.sqlite").exists()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert cli.run(out="second").code == 3
    assert not list(elsewhere.iterdir())
    assert cli.run("--set", "privacy.ledger=typed.sqlite", out="third").code == 0
    assert (elsewhere / "typed.sqlite").exists()
    (cli.folder / "site.sqlite").rename(elsewhere / "site.sqlite")  # where an earlier version had it
    lost = cli.run(out="fourth")
    assert lost.code == 2
    assert "has what was spent: move it to" in lost.err
    assert not (cli.folder / "site.sqlite").exists()


def test_the_exact_posterior_is_set_beside_a_private_run_where_asked_alone(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is for whoever may see the data, so not in the report. The control is `--exact`."""
    private(cli)
    cli.change("iterations = 40", "iterations = 4")
    assert cli.run().code == 0
    out = cli.folder / "out"
    answer = cli("compare", out)
    assert answer.code == 2
    assert "is private, and the reference is the exact posterior of the pooled data" in answer.err
    assert not (out / "compare.json").exists()
    exact = Draws({site: 1 + torch.rand(2, 100) for site in ("mu", "tau")}, 1.0, 100.0, 1.0)
    monkeypatch.setattr(references, "_fit", lambda *_: exact)
    assert cli("compare", out, "--exact").code == 0
    assert (out / "compare.json").stat().st_mode & 0o077 == 0
    page = (out / "report.html").read_bytes()
    report.write_report(out)
    assert (out / "report.html").read_bytes() == page


def test_what_a_private_run_shows_follows_from_data_through_noise_alone(
    cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever knows all records but one tries guesses at that one: a digest of the data, where a run shows one, tells
    which is right, and threads how many records there are. The control is the same run without privacy."""
    monkeypatch.setattr(compiled, "_ONE_THREAD_BELOW", 1)

    def shown(name: str) -> tuple[str, RunDirectory]:
        found = federate(read(cli.config))
        guess, folder = found.digest(), RunDirectory(tmp_path / name)
        folder.begin(found.config, guess, {})
        told = [p.read_text() for p in folder.path.iterdir() if p.suffix in (".json", ".toml")]
        assert len(told) == 2
        folder.check_data(guess)
        with pytest.raises(InputError, match="not those that the run"):
            folder.check_data("other")
        folder.release()
        return "\n".join(told).replace(guess, "THE GUESS IS RIGHT"), folder

    open_, _ = shown("open")
    assert "THE GUESS IS RIGHT" in open_
    assert f"threads = {torch.get_num_threads()}" in open_
    private(cli)
    closed, folder = shown("private")
    assert "THE GUESS IS RIGHT" not in closed
    assert "threads = 1" in closed
    assert (folder.path / "data.key").stat().st_mode & 0o077 == 0
    folder.discard()
    assert not folder.path.exists()


def _said_alike(
    self: Gate, hidden: int, free: object = 0.0, purpose: tuple[str, ...] = ()
) -> Callable[[torch.Tensor], torch.Tensor]:
    """In place of noise: a silo releases the same whatever its data are."""
    terms, name = self.terms, f"{self.silo} {self._turn} {''.join(purpose)}".encode()
    assert terms is not None
    rng, step = np.random.default_rng(list(name)), terms.resolution or 1
    return lambda total: torch.from_numpy(np.rint(3 * step * rng.standard_normal(len(total))))


@pytest.mark.parametrize("model", [pytest.param("means", marks=pytest.mark.slow), "shop_means"])
def test_files_of_a_private_run_say_what_was_released_alone(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """All that is for others at the end, in two worlds of which one has 100 records more, far out, where what silos
    release is the same: it is the same but for times. The control is the same run without privacy."""
    few = ("--set", "algorithm.iterations=6")
    cli.change("means", model)
    if model == "shop_means":
        cli.change('record_plate = "person"', 'record_plate = "person"\nsilo_sites = ["shop"]')

    rows = (cli.folder / "a.csv").read_text()
    more = rows + _FAR_OUT
    assert _shown(cli, "open", rows, *few)["result.json"] != _shown(cli, "open, more", more, *few)["result.json"]
    private(cli)
    monkeypatch.setattr(Gate, "_noiser", _said_alike)
    assert _shown(cli, "private", rows, *few) == _shown(cli, "private, more", more, *few)


_FIT = {"rounds": "3", "local_steps": "5"}
_PUBLIC = {"weights": '"equal"', "total_records": "100"}
_SILO = ("silo", "distributed")
OTHERS: dict[str, tuple[str, tuple[str, str], dict[str, str], str]] = {
    "changes": ("pvi", ("record", "silo"), _FIT, "means"),
    "parts": ("pvi", ("record", "distributed"), {**_FIT, "virtual_clients": "3"}, "one_mean"),
    "steps": ("pvi", ("record", "silo"), {**_FIT, "private": '"steps"', "scale_rate": "0.2"}, "one_mean"),
    "pvi of silos": ("pvi", ("silo", "silo"), _FIT, "means"),
    "sfvi-avg": ("sfvi-avg", _SILO, {**_FIT, **_PUBLIC, "family": '"diagonal"'}, "means"),
    "fedavg": ("fedavg", _SILO, {**_FIT, **_PUBLIC}, "one_mean"),
    "server": ("sfvi", ("record", "server"), {"iterations": "6", "sampling_rate": "0.5"}, "means"),
    "sfvi of silos": ("sfvi", _SILO, {"iterations": "6"}, "means"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_so_do_those_of_other_algorithms(cli: CommandLine, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """A silo's coins are the same in both worlds: a private run draws them anew. Where the server adds the noise, it
    is what the server's says that is the same."""
    name, (unit, noise), options, model = OTHERS[case]
    said = "".join(f"{key} = {value}\n" for key, value in {"name": f'"{name}"', **options}.items())
    cli.change("model.py:means", f"model.py:{model}")
    cli.change('kind = "plain"', 'kind = "masked"')
    cli.change('name = "sfvi"\niterations = 120\n', said)
    cli.config.write_text(cli.config.read_text() + PRIVACY.replace("record", unit) + f'noise = "{noise}"\n')
    monkeypatch.setattr(Gate, "_noiser", _said_alike)
    monkeypatch.setattr(fitting, "silo_secret", lambda derived, *_: derived())
    if noise == "server":
        monkeypatch.setattr(gate, "with_gaussian", lambda values, generator, sd: np.zeros_like(values))
    rows = (cli.folder / "a.csv").read_text()
    assert _shown(cli, "private", rows) == _shown(cli, "private, more", rows + _FAR_OUT)


_FAR_OUT = "99,99\n" * 100


def _shown(cli: CommandLine, folder: str, rows: str, *options: str) -> dict[str, str]:
    """Files for others of a run in which silo a has these rows, but for times."""
    (cli.folder / "a.csv").write_text(rows)
    answer, out = cli.run(*options, out=folder), cli.folder / folder
    assert answer.code == 0, answer
    told = {p.name: p.read_bytes().decode("latin1") for p in out.iterdir() if p.is_file() and p.suffix in _TOLD}
    assert {"report.html", "table.csv", "result.json", "metrics.jsonl", "posterior.safetensors"} <= told.keys()
    return {name: _TIMES.sub("", text) for name, text in {**told, "said": answer.out}.items()}


#: Files of a run's folder that are for others; and what of them no two runs have in common.
_TOLD = {".html", ".csv", ".json", ".jsonl", ".toml", ".safetensors"}
_TIMES = re.compile(r'"seconds": [\d.e+-]+|\d+ s\b|[0-9a-f]{32,}|\d{4}-\d\d-\d\d[T \d:.+-]*|(open|private)(, more)?')


def test_no_record_changes_anothers_row(cli: CommandLine, tmp_path: Path) -> None:
    """Ids are coded by their places among those of the table: one more patient, of a ward that comes first by name, is
    another ward for all. Under record privacy such a table is refused; categories, coded by the dictionary, are not."""

    def wards(column: str) -> list[list[int]]:
        (tmp_path / "dictionary.toml").write_text(
            f'format = 1\n[columns.y]\nkind = "number"\n[columns.ward]\n{column}\n', encoding="utf-8"
        )
        found = []
        for name, first in (("without", ""), ("with", "0.5,east\n")):
            path = tmp_path / f"{name}.csv"
            path.write_text(f"y,ward\n{first}1.0,north\n2.0,west\n3.0,north\n", encoding="utf-8")
            text = cli.config.read_text().replace('"a.csv"', f'"{path}"\ndictionary = "{tmp_path / "dictionary.toml"}"')
            (tmp_path / "job.toml").write_text(text, encoding="utf-8")
            found.append(silo_part(read(tmp_path / "job.toml"), "a")[0]["ward"].tolist()[-3:])
        return found

    levels = 'kind = "category"\nlevels = ["east", "north", "west"]'
    assert wards('kind = "id"') == [[0, 1, 0], [1, 2, 1]]  # the control: without privacy
    assert wards(levels) == [[1, 2, 1], [1, 2, 1]]
    private(cli)
    assert wards(levels) == [[1, 2, 1], [1, 2, 1]]
    with pytest.raises(InputError, match=r"silo\[0\].data: column 'ward' is an id, whose numbers follow from"):
        wards('kind = "id"')


def test_a_schema_follows_from_no_record(cli: CommandLine, tmp_path: Path) -> None:
    """Job, dictionary and names of columns say it, as all the records do that can be read, and none of those that
    cannot. The control: arrays, which are refused."""
    cells = {"y": ["1.0", "2", "x"], "x[0]": ["1", "2", "3"], "x[1]": ["1", "2", "3"], "ward": ["e", "w", "?"]}
    cells["record_id"] = ["1", "2", "3"]
    dictionary = 'format = 1\n[columns.y]\nkind = "number"\n[columns.ward]\nkind = "category"\nlevels = ["e", "w"]\n'
    (tmp_path / "d.toml").write_text(
        dictionary + '[columns."x[0]"]\nkind = "integer"\n[columns."x[1]"]\nkind = "number"\n'
    )
    private(cli)

    def config(name: str, coded: bool) -> Any:
        more = f'\ndictionary = "{tmp_path / "d.toml"}"' if coded else ""
        (tmp_path / "job.toml").write_text(cli.config.read_text().replace('"a.csv"', f'"{tmp_path / name}"{more}'))
        return read(tmp_path / "job.toml")

    for ending in ("csv", "parquet", "sqlite"):
        for coded in (True, False):
            held = {n: c for n, c in cells.items() if coded or n != "ward"}
            lines = [",".join(row) for row in [held, *zip(*held.values(), strict=True)]]
            (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
            if ending == "parquet":
                duckdb.sql(f"SELECT * FROM read_csv('{tmp_path}/t.csv', all_varchar = true)").to_parquet(
                    f"{tmp_path}/t.parquet"
                )
            if ending == "sqlite":
                (tmp_path / "t.sqlite").unlink(missing_ok=True)
                with closing(sqlite3.connect(tmp_path / "t.sqlite")) as file, file:
                    file.execute(f"CREATE TABLE t ({', '.join(map(json.dumps, held))})")
                    marks = ", ".join("?" * len(held))
                    file.executemany(f"INSERT INTO t VALUES ({marks})", list(zip(*held.values(), strict=True)))
            job, spoilt = config(f"t.{ending}", coded), list[str]()
            rows, ids, _ = silo_part(job, "a", None, spoilt)
            assert len(spoilt) == (2 if coded else 1)
            assert ids.tolist() == ([0, 1] if coded else [1, 2])
            known = schema_beforehand(job, "a", None, torch.float64)
            assert [(n, tuple(t.shape[1:]), t.dtype) for n, t in sorted(rows.items())] == list(known.fields)
            for bad in (b"\xff", b"\r", b"\xff\r", b'"') if ending == "csv" else ():
                lines[1] = lines[1].replace("1.0", "1")
                (tmp_path / "t.csv").write_bytes("\n".join([*lines, ""]).encode() + lines[1].encode() + bad + b"\n")
                assert schema_beforehand(job, "a", None, torch.float64) == known
    np.savez(tmp_path / "t.npz", y=np.array([1.0, np.nan, 3.0]), record_id=np.array([1, 2, 2]))
    job, spoilt = config("t.npz", False), []
    with pytest.raises(InputError, match="is seen in it alone"):
        schema_beforehand(job, "a", None, torch.float64)
    assert silo_part(job, "a", None, spoilt)[1].tolist() == [1]
    np.savez(tmp_path / "t.npz", y=np.array([1.0, 1e39, 3.0]), record_id=np.arange(3))
    for dtype, left in (("float64", [0, 1, 2]), ("float32", [0, 2])):  # the rows that were read are no job's to choose
        of = job.model_copy(update={"run": job.run.model_copy(update={"dtype": dtype})})
        assert silo_part(of, "a", None, spoilt, as_read := {})[1].tolist() == left
        assert as_read["y"].tolist() == [1.0, 1e39, 3.0]
        exact = of.privacy.model_copy(update={"noise": "server"})  # or else its totals would be without one record
        assert silo_part(of.model_copy(update={"privacy": exact}), "a", None, spoilt)[1].tolist() == [0, 2]
    for name, why in (("none.csv", "no file"), ("t.csv", "no column 'ward'; did you mean")):
        (tmp_path / "t.csv").write_text("y,x[0],x[1],wards\n")
        with pytest.raises(InputError, match=why):
            schema_beforehand(config(name, True), "a", None, torch.float64)


def test_an_exhausted_budget_exits_with_3_and_writes_nothing(cli: CommandLine) -> None:
    ledger = cli.folder / "site.sqlite"
    for silo in "abc":
        set_ = ("budget", "set", ledger, "--silo", silo, "--data-set", "people", "--epsilon", 4.0, "--delta", 1e-3)
        assert cli(*set_).code == 0
    private(cli, f'ledger = "{ledger}"\ndata_set = "people"\n')
    assert cli.run(out="first").code == 0
    assert (cli.folder / "first" / "ledger.sqlite").exists()
    answer = cli.run(out="second")
    assert answer.code == 3
    assert answer.err.count("\n") == 1
    assert "budget of data set 'people'" in answer.err
    assert not (cli.folder / "second").exists()
    for silo in "abc":
        assert len(Ledger.open(ledger, silo).chain.jobs) == 1


def test_bad_privacy_options_are_refused(cli: CommandLine) -> None:
    private(cli)
    cli.change("epsilon = 4.0", "epsilon = -1.0")
    cli.refused("privacy.epsilon = -1.0: must be greater than 0")
    cli.change("epsilon = -1.0", "epsilom = 1.0")
    cli.refused("epsilom", "did you mean 'epsilon'")
    cli.change("epsilom = 1.0", "epsilon = 1.0")
    cli.change('unit = "record"', 'unit = "person"')
    cli.refused("privacy.unit", "record, silo")


def _start(cli: CommandLine) -> subprocess.Popen[bytes]:
    code = "from secure_fvi.cli import main; main()"
    command = [sys.executable, "-c", code, "run", str(cli.config), "--out", "out", "--resume", "--quiet"]
    with (cli.folder / "errors").open("ab") as errors:
        return subprocess.Popen(command, cwd=cli.folder, env=os.environ, stderr=errors)


@pytest.mark.slow
def test_killed_and_resumed_never_releases_more_than_was_charged(cli: CommandLine) -> None:
    """Two kills after a checkpoint; the ledger verifies each time, and the resumed run ends within its charge."""
    private(cli)
    cli.change("iterations = 40", "iterations = 400")
    kept: Path = cli.folder / "out" / "checkpoint"
    rng = random.Random(5)
    for _ in range(2):
        process = _start(cli)
        deadline = time.monotonic() + 120
        before = latest_round(kept)
        while process.poll() is None and time.monotonic() < deadline:
            if latest_round(kept) != before:
                break
            time.sleep(0.01)
        time.sleep(rng.random() * 0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        verify(cli.folder / "out" / "ledger.sqlite")
    assert _start(cli).wait() == 0, (cli.folder / "errors").read_text()
    verify(cli.folder / "out" / "ledger.sqlite")
    record = Ledger.open(cli.folder / "out" / "ledger.sqlite", "a").chain.jobs
    assert len(record) == 1
    job = next(iter(record.values()))
    assert 400 < job.released["round"] <= 420
    assert json.loads((cli.folder / "out" / "result.json").read_text())["rounds"] == 400
