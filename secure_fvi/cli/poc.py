"""`secure-fvi poc`: a consortium of processes on this machine, made and run by the commands that institutions type.

Nothing here joins or fits: `plan` is a list of lines to be typed and of files to be handed over, and `poc` types them.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from secure_fvi.errors import InputError, SecureFVIError

if TYPE_CHECKING:
    from secure_fvi.runs.config import Config

FILE = click.Path(path_type=Path)
HUB, HOME, PASSPHRASE, LOOPBACK = "hub", "site", "passphrase", "127.0.0.1"
#: What everybody sets before the first command, beside the words of `plan`.
SETTINGS = {"SECURE_FVI_HOME": HOME, "SECURE_FVI_KEY_FILE": PASSPHRASE}
NAMES = ("north", "south", "east", "west", "coast", "hills", "lakes", "plains", "isles", "dales")
FORMULA, FAMILY = "wheeze ~ smoke * age + (1 | child)", "bernoulli"
DICTIONARY = """\
format = 1

[columns.wheeze]
kind = "boolean"

[columns.smoke]
kind = "boolean"
levels = ["no", "yes"]

[columns.age]
kind = "number"
unit = "years"
low = 7
high = 10

[columns.child]
kind = "id"
"""
_NEEDED = ("grpc", "formulaic", "matplotlib")
_BEHIND = " 2> silo.log &"
_REFUSED, _NOT_CONVERGED = 1, 4


class Typed(NamedTuple):
    """A line that somebody at `who` types, in that institution's folder. shown: whether `poc` prints what it says."""

    who: str
    line: str
    shown: bool = False
    ends: tuple[int, ...] = (0,)  # exit codes

    def __str__(self) -> str:
        return f"{self.who}$ {self.line}"


class Handed(NamedTuple):
    """Files of the giver's folder that the others get, into theirs: by mail, say."""

    giver: str
    takers: tuple[str, ...]
    files: str

    def __str__(self) -> str:
        return f"{self.giver} -> {', '.join(self.takers)}: {self.files}"


class Section(NamedTuple):
    title: str
    steps: tuple[Typed | Handed, ...]

    def __str__(self) -> str:
        return "\n".join([self.title, *(f"  {step}" for step in self.steps)])


def plan(
    tables: dict[str, str], host: str = LOOPBACK, port: int = 8443, function: str | None = None,
    read: Mapping[str, str] | None = None,
) -> list[Section]:  # fmt: skip
    """What is typed from nothing to a finished job. tables: by site, the file in its folder; function: as FILE.py:NAME,
    where the model is no formula; read: the query and what is done with gaps, as `policy allow` has them. The last site
    agrees late."""
    sites, address = tuple(tables), f"{host}:{port}"
    first, late = sites[0], sites[-1]
    everybody = (HUB, *sites)

    def at_each(names: Sequence[str], line: str, shown: Sequence[str] = ()) -> list[Typed]:
        words = {"model": shlex.quote(function or ""), **{k: shlex.quote(v) for k, v in (read or {}).items()}}
        typed = {n: line.format(site=n, table=shlex.quote(tables.get(n, "")), **words) for n in names}
        return [Typed(name, line, name in shown) for name, line in typed.items()]

    own, files = (" --function {model}", f" {shlex.quote(function.rpartition(':')[0])}") if function else ("", "")
    coded = "".join(f" --{name} {{{name}}}" for name in read or ())
    allow = f"secure-fvi policy allow job.toml --data {{table}}{own}{coded} --without-dp"
    offer = f"secure-fvi server start job.toml --out run --listen {address}"
    log = "audit-log.sqlite"
    evidence = f"secure-fvi audit-log verify {HOME}/{log} --roster {HOME}/rosters/1.toml --against {log}"
    return [
        Section("Each makes its keys, and hands its request to whoever writes the roster", (
            Typed(HUB, f"secure-fvi keys init --id {HUB} --role server --address {host}"),
            *at_each(sites, "secure-fvi keys init --id {site} --role silo"),
            *(Handed(site, (HUB,), f"{HOME}/{site}.request.toml") for site in sites),
        )),
        Section("The hub writes the roster, and hands it out with the job", (
            Typed(HUB, f"secure-fvi keys roster make {HOME}/{HUB}.request.toml *.request.toml "
                       "--consortium study --out roster.toml"),
            Handed(HUB, sites, f"roster.toml job.toml{files}"),
        )),
        Section("All read its code to each other by telephone; each answers y, and hands over its signature", (
            *at_each(everybody, "secure-fvi keys roster sign roster.toml", (first,)),
            *(Handed(site, (HUB,), f"{HOME}/rosters/1.sig/{site}.sig") for site in sites),
        )),
        Section("The hub hands all signatures out; each puts the roster in force", (
            *at_each((HUB,), "secure-fvi keys roster verify *.sig"),
            Handed(HUB, sites, f"{HOME}/rosters/1.sig/*.sig"),
            *at_each(sites, "secure-fvi keys roster verify *.sig", (first,)),
        )),
        Section(f"Each site reads what the job discloses and answers y: all but {late}, for now",
                tuple(at_each(sites[:-1], allow, (first,)))),
        Section(f"Sites dial in, and the hub offers the job. {late}'s policy does not allow it: nothing is computed", (
            *at_each(sites, f"secure-fvi silo start --server {address} --once{_BEHIND}"),
            Typed(HUB, offer, True, (_REFUSED,)),
        )),
        Section(f"{late} has read it too; the hub offers the job again", (
            *at_each((late,), allow),
            Typed(HUB, offer, True, (0, _NOT_CONVERGED)),
        )),
        Section("What left each site, by its own log: bytes are counted, never kept", tuple(
            at_each(everybody, "secure-fvi status", everybody))),
        Section("Evidence: each site's log beside the hub's, and the report that the hub has signed", (
            Handed(HUB, sites, f"{HOME}/{log} run/report.html run/evidence.json run/report.sig"),
            *at_each(sites, evidence, sites),
            *at_each(sites, "secure-fvi report verify report.html", sites),
        )),
    ]  # fmt: skip


@click.command()
@click.option("--silos", type=click.IntRange(3, len(NAMES)), help="Institutions, without --data; 3 unless said.")
@click.option("--folder", default="runs/poc", show_default=True, type=FILE, help="What is made; new or empty.")
@click.option("--data", "files", multiple=True, type=FILE, help="A site's own table (CSV, Parquet), three at least.")
@click.option("--formula", help=f'What is fitted, such as "{FORMULA}".')
@click.option("--family", help="gaussian, bernoulli, poisson, ordinal, ...")
@click.option("--dictionary", type=FILE, help="What the columns of --data are (TOML).")
@click.option("--query", metavar="SQL", help="One SELECT over each site's table, which it calls data.")
@click.option("--missing", type=click.Choice(["refuse", "drop"]), help="Of rows with a gap; refused unless said.")
@click.option("--function", metavar="FILE.py:NAME", help="A Pyro model in place of a formula; needs bubblewrap.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="A key of the job, such as seed=7.")
@click.option("--port", type=click.IntRange(1, 65535), default=8443, show_default=True, help="On 127.0.0.1.")
@click.option("--plan", "only_plan", is_flag=True, help="Print what would be typed, and do nothing.")
def poc(
    silos: int | None,
    folder: Path,
    files: tuple[Path, ...],
    dictionary: Path | None,
    overrides: tuple[str, ...],
    port: int,
    only_plan: bool,
    **model: str | None,
) -> None:
    """Join several institutions on this machine and run a job between them: a server and a process a site, as in life.

    Prints who types which command and which file goes to whom, runs just that, and leaves a folder an institution.
    Where no tables are given, the children of a published study are dealt over them. Everything stays on this machine.
    """
    began, read = time.monotonic(), _read(model.pop("query"), model.pop("missing"), overrides)
    asked = {key: said for key, said in model.items() if said is not None}
    _check_asked(silos, files, dictionary, {**asked, **read})
    said = bool(files or asked or overrides)
    sites = _names(files) if files else dict.fromkeys(NAMES[: silos or 3], Path("dealt.csv"))
    tables = {site: f"{site}{path.suffix}" for site, path in sites.items()}
    function = Path(asked["function"]).name if "function" in asked else None
    sections, checks = plan(tables, port=port, function=function, read=read), False
    if not only_plan:
        _check_machine(folder, port, asked)
    with tempfile.TemporaryDirectory() as scratch:
        if not files:
            sites = _dealt(Path(scratch), tuple(sites))
            dictionary = Path(scratch) / "dictionary.toml"
            dictionary.write_text(DICTIONARY)
            asked = asked if "formula" in asked else {"formula": FORMULA, "family": FAMILY, **asked}
            overrides = ("run.compile=false", *overrides)  # which does not pay for so few rounds
        if "function" not in asked and not any(o.startswith(("privacy", "algorithm.name")) for o in overrides):
            overrides, checks = ("algorithm.replicates=100", *overrides), True
        # A plan of a job that cannot be is none; that of the study's own, with nothing said, can.
        job = _job(sites, asked, dictionary, overrides, read) if said or not only_plan else ""
        if only_plan:
            click.echo(_opening(tables, checks) + "\n\n" + "\n\n".join(map(str, sections)))
            return
        _lay_out(folder, tables, sites, asked, job)
    click.echo(_opening(tables, checks))
    with _Machines(folder) as machines:
        for section in sections:
            click.echo(f"\n{section.title}")
            # Lines that several institutions type, each when it likes, go together.
            for _, steps in groupby(section.steps, lambda s: s.line.split()[1:4] if isinstance(s, Typed) else s):
                machines.carry_out(list(steps))
    own = [step for section in sections for step in section.steps if step[0] == list(sites)[-1]]
    typed = sum(isinstance(step, Typed) for step in own)
    click.echo(
        f"\nEach site has typed {typed} commands and handed over {len(own) - typed} files; all in "
        f"{time.monotonic() - began:.0f} s. The report: {folder / HUB / 'run' / 'report.html'}. The folders stay: "
        f"{', '.join(str(folder / who) for who in (HUB, *sites))}. "
        "Where the tables may be pooled, as here, this sets the answer beside NUTS (secure-fvi-lab):\n  "
        + shlex.join(_compared(folder, tables))
    )


def _check_asked(silos: int | None, files: Sequence[Path], dictionary: Path | None, model: dict[str, str]) -> None:
    """Raises InputError for options that do not go together."""
    if "function" in model and (len(model) > 1 or dictionary or not files):
        raise InputError("--function needs --data, and no formula, family, dictionary, query or missing")
    if files and "function" not in model and ("formula" not in model or dictionary is None):
        raise InputError(
            "--data needs --formula and --dictionary; `secure-fvi data describe TABLE` drafts a dictionary"
        )
    if files and len(files) < 3:
        many = f"{len(files)} tables" if len(files) > 1 else "one table"
        raise InputError(f"--data names {many}; a job needs 3 sites or more, a table each")
    if files and silos not in (None, len(files)):
        raise InputError(f"--silos {silos}, and {len(files)} tables by --data: each is a site, leave --silos out")
    for name in ("query", "missing") if not files else ():
        if name in model:
            raise InputError(f"--{name} is of tables: give these too, by --data")
    if not files and dictionary is not None:
        raise InputError("--dictionary is of tables: give these too, by --data")


def _check_machine(folder: Path, port: int, model: dict[str, str]) -> None:
    """Raises InputError where the folder or the port is in use, and for what is not installed."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise ModuleNotFoundError(name=missing[0])  # the command line knows what brings it
    if "function" in model and shutil.which("bwrap") is None:
        raise InputError("a model of one's own runs in a sandbox: apt-get install bubblewrap")
    from secure_fvi.runs.directory import check_folder

    check_folder(folder, "--folder")
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"'{folder}' is in use; give another --folder, or remove it")
    try:
        socket.create_server((LOOPBACK, port)).close()
    except OSError:
        raise InputError(f"port {port} of this machine is taken; give another --port") from None


def _lay_out(folder: Path, tables: dict[str, str], sites: dict[str, Path], model: dict[str, str], job: str) -> None:
    """What everybody has before the first command: a table a site, the job at the hub, a passphrase each."""
    try:
        for who in (HUB, *sites):
            (folder / who).mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise InputError(f"cannot make '{folder}': {error.strerror}") from None
    for who in (HUB, *sites):
        (folder / who / PASSPHRASE).touch(mode=0o600)
        (folder / who / PASSPHRASE).write_text(secrets.token_hex(16) + "\n")
    for site, path in sites.items():
        shutil.copyfile(path, folder / site / tables[site])
    (folder / HUB / "job.toml").write_text(job)
    if "function" in model:
        shutil.copy(model["function"].rpartition(":")[0], folder / HUB)


def _names(files: Sequence[Path]) -> dict[str, Path]:
    """Tables by site: each is called as its file is, or its folder, where that can be. Raises InputError for a file
    that is not there."""
    from secure_fvi.deployment.names import check_id

    if gone := [path for path in files if not path.is_file()]:
        raise InputError(f"--data: no file '{gone[0]}'")
    for names in ([path.stem for path in files], [path.absolute().parent.name for path in files]):
        with contextlib.suppress(ValueError):
            if len({HUB, *map(check_id, names)}) == len(names) + 1:
                return dict(zip(names, files, strict=True))
    return {f"site-{k + 1}": path for k, path in enumerate(files)}


def _dealt(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """A table a site: the children of six cities (Fitzmaurice and Laird 1993) at random, a row a visit."""
    from secure_fvi.models.six_cities import VISITS, load

    children = list(zip(*(records.tolist() for records in load().records.values()), strict=True))
    random.Random(1).shuffle(children)
    dealt = {name: folder / f"{name}.csv" for name in names}
    for k, path in enumerate(dealt.values()):
        rows = [
            f"c{child},{visit.removeprefix('age_')},{'yes' if smoke else 'no'},{answer:g}"
            for child, (smoke, wheeze) in enumerate(children[k :: len(names)])
            for visit, answer in zip(VISITS, wheeze, strict=True)
        ]
        path.write_text("\n".join(["child,age,smoke,wheeze", *rows]) + "\n")
    return dealt


def _read(query: str | None, missing: str | None, overrides: Sequence[str]) -> dict[str, str]:
    """How each site's table is read, where that is said. Raises InputError."""
    from secure_fvi.runs.reading import override

    said: dict[str, Any] = {"model": {"options": {}}}
    for text in overrides:
        override(said, text)
    model = said["model"]
    options = model.get("options") if isinstance(model, dict) else None
    missing = missing or (options.get("missing") if isinstance(options, dict) else None)
    return {name: str(how) for name, how in (("query", query), ("missing", missing)) if how not in (None, "refuse")}


def _job(
    sites: dict[str, Path], model: dict[str, str], dictionary: Path | None, overrides: Sequence[str],
    read: Mapping[str, str],
) -> str:  # fmt: skip
    """The job as the hub writes it. Raises InputError and DataError for tables that a formula does not fit, by site."""
    from secure_fvi.dictionary import read_dictionary
    from secure_fvi.runs import wording
    from secure_fvi.runs.config import chosen, parse
    from secure_fvi.runs.federation import check_files_differ
    from secure_fvi.runs.reading import override

    table: dict[str, Any] = {
        "model": dict(model),
        "silo": [
            {"id": s, "data": str(p), **{k: v for k, v in read.items() if k == "query"}} for s, p in sites.items()
        ],
    }
    if dictionary is not None:
        options = {"missing": read["missing"]} if "missing" in read else {}
        table["model"] |= {"options": options, "dictionary": read_dictionary(dictionary).to_table()}
    for text in overrides:
        override(table, text)
    config = parse(table, "the job")
    chosen(config)
    check_files_differ(config.silo)
    if config.model.function is not None:
        path, _, name = config.model.function.rpartition(":")
        if not Path(path).is_file():
            raise InputError(f"--function: no file '{path}'")
        table["model"]["function"] = f"{Path(path).name}:{name}"
    else:
        table["model"]["options"] = _settled(config)
    table["silo"] = [{"id": site, "data": "at-site"} for site in sites]
    return wording.dumps(table)


def _settled(config: Config) -> dict[str, Any]:
    """The options of a formula, with the most rows of a record and groups of a silo that its tables come to; under
    privacy nothing is looked up, and what lacks is refused."""
    from secure_fvi.runs.config import chosen
    from secure_fvi.runs.records import formula_model, formula_rows

    model, options = formula_model(config.model), config.model.options
    laid = model.prepared({silo.id: formula_rows(silo, "--data", model) for silo in config.silo})
    some = next(iter(laid.values()))
    most = {"rows": some["present"].shape[1]} if model.record_label else {}
    most |= {t.of.label: some[f"n{k}"] for k, t in enumerate(model.of.terms) if t.place == "silo"}
    if most and config.privacy is None:
        options = {**options, "most": {**most, **options.get("most", {})}}
    formula_model(config.model.model_copy(update={"options": options})).check_apart(chosen(config)[2])
    return options


def _compared(folder: Path, tables: dict[str, str]) -> list[str]:
    named = (word for site, table in tables.items() for word in ("--table", f"{site}={folder / site / table}"))
    return ["secure-fvi", "compare", str(folder / HUB / "run"), *named]


def _opening(tables: dict[str, str], checks: bool) -> str:
    had = "; ".join(f"{site} has {table}" for site, table in tables.items())
    settings = " ".join(f"{name}={value}" for name, value in SETTINGS.items())
    first = next(iter(tables))
    return (
        f"Each institution has a folder. {HUB}, which runs the server, has written job.toml; {had}; each has a "
        f"passphrase of its own in the file {PASSPHRASE}.\n"
        f"`{first}$ ...` is typed at {first}, in its folder; `{first} -> {HUB}: FILE` is handed over, by mail say. "
        f"Each first types:\n  export {settings}"
        + "\nWith `replicates` in job.toml one more sum, after the fit, sets the tables beside what the model makes."
        * checks
    )


class _Machines:
    """The institutions: lines are typed in their folders, here. Ends all that was started when it is left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[str]] = []
        self._silos: dict[str, subprocess.Popen[str]] = {}
        # Several processes on one machine's cores: a second thread in each would wait for the others'.
        kept = {k: v for k, v in os.environ.items() if not k.startswith("SECURE_FVI_")}
        self._environment = {"OMP_NUM_THREADS": "1", **kept, **SETTINGS}

    def __enter__(self) -> _Machines:
        self._before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)
        for process in self._started:
            process.terminate()
        for process in self._started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()

    def carry_out(self, steps: Sequence[Typed | Handed]) -> None:
        """What is typed or handed over at one time. Raises SecureFVIError where a command does not end as it should."""
        begun = [self._start(step) if isinstance(step, Typed) else None for step in steps]
        for step, process in zip(steps, begun, strict=True):
            click.echo(f"  {step}")
            if isinstance(step, Handed):
                self._hand(step)
            elif process is not None:
                self._follow(step, process)

    def _hand(self, step: Handed) -> None:
        for path in _matching(self._folder / step.giver, shlex.split(step.files)):
            for taker in step.takers:
                shutil.copy(self._folder / step.giver / path, self._folder / taker)

    def _start(self, step: Typed) -> subprocess.Popen[str] | None:
        """The process of a line, whose questions are answered y; None where it goes on by itself, as a silo's does."""
        where, behind = self._folder / step.who, step.line.endswith(_BEHIND)
        words = _matching(where, shlex.split(step.line.removesuffix(_BEHIND))[1:])
        with (where / "silo.log").open("w") if behind else contextlib.nullcontext(subprocess.PIPE) as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", "from secure_fvi.cli import main; main()", *words],
                cwd=where, env=self._environment, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
                text=True,
            )  # fmt: skip
        self._started.append(process)
        if behind:
            self._silos[step.who] = process
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as answers:
            answers.write("y\n")
        return None if behind else process

    def _follow(self, step: Typed, process: subprocess.Popen[str]) -> None:
        """To the end of what was typed; what it says is shown."""
        threading.Thread(target=self._watch, args=(process,), daemon=True).start()
        last = ""
        assert process.stdout is not None
        with process.stdout as said:
            for line in said:
                last = line.strip() or last
                if step.shown:
                    click.echo("    " + line.rstrip().replace("[y/N]: ", "[y/N]: y\n    "))
        why = last or "it says nothing"
        if process.wait() in step.ends:
            return
        for who in self._failed():
            log = (self._folder / who / "silo.log").read_text().strip().splitlines()
            step, why = Typed(who, "secure-fvi silo start"), log[-1] if log else why
        raise SecureFVIError(f"{step}: {why.removeprefix('secure-fvi: ')} (what was made is in '{self._folder}')")

    def _failed(self) -> list[str]:
        return [who for who, process in self._silos.items() if process.poll()]

    def _watch(self, process: subprocess.Popen[str]) -> None:
        """A server waits for whoever is away: where a site's process has failed, that would be for good."""
        while process.poll() is None:
            if self._failed():
                process.terminate()
                return
            time.sleep(0.2)


def _matching(folder: Path, words: Sequence[str]) -> list[str]:
    """As a shell does it: a pattern stands for the files in `folder` that match, or for itself. A file of that name is
    meant where there is one."""
    looked = {w: "*" in w and not (folder / w).exists() for w in words}
    found = [sorted(str(p.relative_to(folder)) for p in folder.glob(w)) if looked[w] else [] for w in words]
    return [name for w, names in zip(words, found, strict=True) for name in names or [w]]
