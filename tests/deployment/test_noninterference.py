"""What anybody sees of a deployed job, totals aside, does not go by one record.

Two worlds differ in a record of one silo, 'east'. In both each total is replaced by that of the first run, so that what
totals disclose is the same. All else is compared byte by byte: each message that a silo hears or says, what lies at the
server and at each site afterwards, the server's results, every line of the logs. What is drawn anew in each run (keys,
nonces, masks, noise, times) differs between runs of one world too; so a byte tells of the record if it is one and the
same in all runs of one world, one and the same in all of the other, and not the same in both. Of bytes at random one in
2^32 does so by chance in three runs of each world; of those of few values more do, of the labels of people in an order
that is drawn anew one in 32. So what is found is looked for again in more runs, up to twelve of each world, where
one such label in 2^23 is found by chance.

A case is a row of `CASES`: jobs, a change, what is done meanwhile (`whole`, `silo_killed`, ...), and what may go by the
record, since it stays at its site. What a site logs while it answers is for its own people, and apart from other lines.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from columns_run import AT_SILO, MASKED, MATCHED, SHARED, VERTICAL, ColumnsJob, shuffled
from consortium_run import SILOS, Job, Sites
from deployment_world import World, new_world
from programs import ENCODED
from safetensors.torch import save
from test_unfit_data import FLOORS, PRIVACY, SFVI, Study

from secure_fvi import server as server_of
from secure_fvi.aggregation.base import Total
from secure_fvi.checkpoints import Checkpoints
from secure_fvi.deployment import columns_job, holding, serving, site_job
from secure_fvi.deployment.deciding import Decision
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.policy import rule_of
from secure_fvi.deployment.session_messages import END, JOIN, MATCH, OPEN
from secure_fvi.deployment.site import Site
from secure_fvi.deployment.site_job import Local
from secure_fvi.driving import Progress
from secure_fvi.engines import stream_client
from secure_fvi.engines.stream_messages import MESSAGE, REFUSAL, reason
from secure_fvi.errors import DataError, SecureFVIError
from secure_fvi.messages import ROUND, SUM, decode_broadcast
from secure_fvi.runs.records import settled

Seen = dict[str, list[bytes]]  # by where, in pieces
Made = Callable[[World, Path], tuple[Job, Path]]  # a job, and the file in which the worlds differ
Change = Callable[[list[str]], list[str]]  # of a table's lines
Done = Callable[[Job, pytest.MonkeyPatch], None]  # runs a job, to which something happens
Telling = Callable[..., dict[str, set[Any]]]


class Totals:
    """Those of the first run, in any other as well."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.at: int | None = None

    def wrapped(self, exchanges: Any) -> Any:
        found = yield from _wrapped(exchanges)
        if not isinstance(found, Total):
            return found
        if self.at is None:
            self.kept.append(found.values)
            return found
        self.at += 1
        return found._replace(values=self.kept[self.at - 1].copy())


_wrapped = server_of._wrapped


def pieces(path: Path) -> list[bytes]:
    """Of a database its cells; of tensors the values, hashed, and what their header says, in order; else itself."""
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        size = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:size])
        header["__metadata__"] = sorted(header.get("__metadata__", {}).items())
        values = [data[at : at + 8] for at in range(size, len(data), 8)]  # of a number's bytes some have few values
        digests = [hashlib.sha256(value).digest()[:4] for value in values]
        return [b"".join(digests), repr(sorted(header.items())).encode()]
    if not data.startswith(b"SQLite format 3"):
        return [data]
    with closing(sqlite3.connect(path)) as base:
        tables = [name for (name,) in base.execute("select name from sqlite_master where type = 'table' order by name")]
        rows = [row for table in tables for row in base.execute(f"select * from {table}")]
    return [cell if isinstance(cell, bytes) else repr(cell).encode() for row in rows for cell in row]


def seen_of(root: Path, said: list[tuple[str, bytes, bytes]], logs: Mapping[str, list[str]]) -> Seen:
    """Of jobs that have run below `root`: all but the tables, which are a site's own."""
    found: Seen = {name: [line.encode() for line in sorted(lines)] for name, lines in logs.items()}
    for site, message, reply in said:
        kind = message[:1].decode()
        found.setdefault(f"to {site}, {kind}", []).append(message)
        found.setdefault(f"from {site}, {kind}", []).append(reply)
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        where = path.relative_to(root)
        if path.suffix == ".csv" or path.name.endswith(("-wal", "-shm")):
            continue
        found.setdefault(re.sub("[0-9a-f]{24,}", "ID", str(where)), []).extend(pieces(path))
    return found


def told(worlds: tuple[list[Seen], list[Seen]]) -> dict[str, set[Any]]:
    """By where, what tells the two worlds apart: how many pieces there are, or how long one is; a byte of it; or, where
    its length goes by chance, a word."""
    found = dict[str, set[Any]]()
    for name in set[str]().union(*(seen.keys() for world in worlds for seen in world)):
        sides = [[seen.get(name, []) for seen in world] for world in worlds]
        if name != "log" and _apart([[len(one) for one in side] for side in sides]):  # a silo dials again by chance
            found.setdefault(name, set()).add(("pieces", *(len(side[0]) for side in sides)))
        if len({len(one) for side in sides for one in side}) > 1:  # as lines of a log
            sides = [[[b"\n".join(one)] for one in side] for side in sides]
        for at, piece in enumerate(zip(*(one for side in sides for one in side), strict=True)):
            half = len(piece) // 2
            lengths = [len(one) for one in piece]
            if _apart([lengths[:half], lengths[half:]]):
                found.setdefault(name, set()).add((at, "length", lengths[0], lengths[half]))
            if tells := _bytes(piece, half) if len(set(map(len, piece))) == 1 else _words(piece, half):
                found.setdefault(name, set()).update((at, *what) for what in tells)
    return found


def _apart(sides: list[list[int]]) -> bool:
    """Whether a number is one and the same in each world, and not in both."""
    return [len(set(side)) for side in sides] == [1, 1] and sides[0][0] != sides[1][0]


def _bytes(piece: tuple[bytes, ...], half: int) -> set[tuple[Any, ...]]:
    stacked = np.stack([np.frombuffer(one, np.uint8) for one in piece]).reshape(2, half, -1)
    alike = (stacked == stacked[:, :1]).all((0, 1))
    return {(int(k),) for k in np.flatnonzero(alike & (stacked[0, 0] != stacked[1, 0]))}


def _words(piece: tuple[bytes, ...], half: int) -> set[tuple[Any, ...]]:
    """Of what is no text, long ones."""
    text = all(one.isascii() for one in piece)
    words = [set(re.findall(rb"[\w.+-]+" if text else rb"[\w.+-]{6,}", one)) for one in piece]
    sides = words[:half], words[half:]
    return {(k, w) for k in (0, 1) for w in set.intersection(*sides[k]) - set[bytes]().union(*sides[1 - k])}


class Logs(logging.Handler):
    """Lines, those apart that a site writes while it answers a message."""

    def __init__(self, root: Path) -> None:
        super().__init__(logging.DEBUG)
        self.at, self.lines, self._root = threading.local(), dict[str, list[str]](), str(root)

    def emit(self, record: logging.LogRecord) -> None:
        site = getattr(self.at, "site", None)
        where = "log" if site is None else f"log of {site}"
        line = re.sub("[0-9a-f]{24,}", "ID", record.getMessage().replace(self._root, ""))
        self.lines.setdefault(where, []).append(line)


@pytest.fixture
def telling(first_world: World, tmp_path: Path, few_draws: None, caplog: Any) -> Telling:
    """What tells of a change, of jobs, with a key holder or without."""
    caplog.set_level(logging.DEBUG, "secure_fvi")
    logger = logging.getLogger("secure_fvi")

    def run(case: Case, changed: bool, totals: Totals, base: World) -> Seen:
        root, said = tmp_path / "x" / str(len(list(tmp_path.glob("x/*")))), list[Any]()
        answered = stream_client.answered
        root.mkdir(parents=True)
        world, logs = base.copy(root / "world"), Logs(root)

        def heard(handle: Any, id_: str, message: bytes) -> tuple[int, bytes]:
            logs.at.site = handle.__self__.home.id
            try:
                status, reply = answered(handle, id_, message)
            finally:
                site, logs.at.site = logs.at.site, None
            said.append((site, message, bytes([status]) + reply))
            return status, reply

        logger.addHandler(logs)
        try:
            for at, make in enumerate(case.jobs):
                folder = root / f"job{at}"
                folder.mkdir()
                job, table = make(world, folder)
                if changed and at >= case.since:
                    table.write_text("\n".join(case.change(table.read_text().splitlines())) + "\n")
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(stream_client, "answered", heard)
                    patch.setattr(server_of, "_wrapped", totals.wrapped)
                    case.done(job, patch)
        finally:
            logger.removeHandler(logs)
        return seen_of(root, said, logs.lines)

    def found(case: Case, most: int = 12) -> dict[str, set[Any]]:
        base = new_world(tmp_path / "own", case.holder, case.west) if case.holder or case.west else first_world
        totals, worlds = Totals(), (list[Seen](), list[Seen]())
        for at in range(most):  # in turns, so that no world has the even seconds
            for which in (at % 2, 1 - at % 2):
                worlds[which].append(run(case, bool(which), totals, base))
                totals.at = 0
            if at >= 2 and not case.beyond(last := told(worlds)):
                break
        return last

    return found


# ---- What is done to a job


def whole(job: Job, patch: pytest.MonkeyPatch) -> None:
    """Nothing."""
    job.run(local=Local())


class Ended(BaseException):
    """A process ends."""


def _again(patch: pytest.MonkeyPatch, when: Callable[[], bool] = lambda: True) -> None:
    """A silo's process that has ended is started anew, if and once this is so."""
    run = Sites._run

    def anew(self: Sites, silo: str) -> None:
        try:
            run(self, silo)
        except Ended:
            if when():
                run(self, silo)

    patch.setattr(Sites, "_run", anew)


def _dies(
    patch: pytest.MonkeyPatch, silo: str, kind: bytes = ROUND, index: int = 2, left: Path | None = None
) -> list[bytes]:
    """The silo, once it has worked out an answer to such a message, of a round to that of sum `index`, and before that
    leaves. left: where its folder is copied to then. What is returned fills when it has."""
    handle, dead = Site.handle, list[bytes]()

    def dying(self: Site, id_: str, message: bytes) -> bytes:
        reply = handle(self, id_, message)
        meant = self.home.id == silo and message[:1] == kind and not dead
        if meant and (kind != ROUND or decode_broadcast(message[1:]).sum_index == index):
            dead.append(kind)
            if left is not None:
                shutil.copytree(self.home.path, left)
            raise Ended
        return reply

    patch.setattr(Site, "handle", dying)
    return dead


def silo_killed(kind: bytes, index: int = 2, silo: str = "east") -> Done:
    """As `_dies`; what lies in its folder then is looked at as well."""

    def done(job: Job, patch: pytest.MonkeyPatch) -> None:
        dead = _dies(patch, silo, kind, index, job.world.root.parent / "left")
        _again(patch)
        job.run(local=Local())
        assert dead

    return done


def charged_and_killed(job: Job, patch: pytest.MonkeyPatch, silo: str = "east") -> None:
    """The silo, of sum 2, between the charge and what it draws then."""
    handle, dead = holding.DurableSilo.handle, list[bool]()

    def dying(self: holding.DurableSilo, message: bytes) -> bytes:
        meant = self.silo.name == silo and message[:1] == ROUND and not dead
        if meant and decode_broadcast(message[1:]).sum_index == 2:
            dead.append(True)
            self.silo.handle(message)
            raise Ended
        return handle(self, message)

    patch.setattr(holding.DurableSilo, "handle", dying)
    _again(patch)
    job.run(local=Local())
    assert dead


def server_killed(restarted: bool, round_: int = 2) -> Done:
    """With a round's answers, before it has written anything of them; `restarted`: its machine and all others'."""

    def done(job: Job, patch: pytest.MonkeyPatch) -> None:
        save = Checkpoints.save

        def dying(self: Checkpoints, at: int, parties: Any) -> None:
            if at == round_:
                raise Ended
            save(self, at, parties)

        with patch.context() as stopping:
            stopping.setattr(Checkpoints, "save", dying)
            with pytest.raises(Ended):
                job.run(local=Local())
        for module in (holding, serving) if restarted else ():
            patch.setattr(module, "boot_id", lambda: b"another start of the machine")
        job.run(local=Local())

    return done


def lost(silo: str, back: int | None = None) -> Done:
    """It ends once it has its part of sum 2, before that leaves; the server goes on without it, or, at a round, waits
    until it is there again."""

    def done(job: Job, patch: pytest.MonkeyPatch) -> None:
        dead, returns = _dies(patch, silo), threading.Event()
        _again(patch, lambda: back is not None and (returns.wait(60) or True))

        def on_round(progress: Progress) -> None:
            if progress.round == back and not returns.is_set():
                returns.set()
                time.sleep(2.0)

        job.run(local=Local(), on_round=on_round)
        assert dead
        assert returns.is_set() == (back is not None)

    return done


def refused_first(silo: str) -> Done:
    """By this silo, whose policy wants another algorithm at first; so that the others have joined already."""

    def done(job: Job, patch: pytest.MonkeyPatch) -> None:
        policy = job.world.homes[silo].policy_file
        allowed = policy.read_text()
        policy.write_text(re.sub(r"(?m)^algorithms = .*", 'algorithms = ["bcm"]', allowed))
        with pytest.raises(SecureFVIError, match="is not accepted"):
            job.run(local=Local())
        policy.write_text(allowed)
        job.run(local=Local())

    return done


def fails(words: str) -> Done:
    """It ends in a refusal, whose text is the same in both worlds as far as anybody but the site hears of it."""

    def done(job: Job, patch: pytest.MonkeyPatch) -> None:
        with pytest.raises(SecureFVIError, match=words) as caught:
            job.run(local=Local())
        (job.folder / "refusal").write_text(str(caught.value))

    return done


# ---- Jobs, and what differs


def gone(lines: list[str]) -> list[str]:
    """The last one."""
    return lines[:-1]


def turned(lines: list[str]) -> list[str]:
    """All records, in another order."""
    return [lines[0], *reversed(lines[1:])]


def another(column: int, values: tuple[str, str] = ("0", "1")) -> Change:
    """A cell of the fifth record: the one of these that it is not."""

    def changed(lines: list[str]) -> list[str]:
        cells = lines[5].split(",")
        cells[column] = values[cells[column] == values[0]]
        return [*lines[:5], ",".join(cells), *lines[6:]]

    return changed


def to(line: str, at: int = -1) -> Change:
    """This line in place of that one."""
    return lambda lines: [*lines[:at], line, *(lines[at:][1:])]


#: Of a data set over all jobs.
BUDGET: dict[str, Any] = {"epsilon": 20.0, "delta": 1e-4}


def children(privacy: Any, algorithm: Any = SFVI, first: Change = list, **tables: Any) -> Made:
    """Between all sites, each with 20 of them; a change is of one at east, beside that in both worlds, `first`."""

    def made(world: World, folder: Path) -> tuple[Job, Path]:
        silos = sorted(name for name, home in world.homes.items() if home.role == "silo")
        budget = {} if privacy is None else {**BUDGET, "unit": privacy["unit"]}
        study = Study(world, folder / "study", privacy, algorithm, tables, silos, **budget)
        if "escrow" in world.homes:
            study.job.allow("escrow")
            for name in (*silos, "escrow"):
                policy = world.homes[name].policy_file
                policy.write_text(
                    policy.read_text().replace('["homomorphic"]', '["homomorphic", "homomorphic-unmasked"]')
                )
        study.table.write_text("\n".join(first(study.table.read_text().splitlines())) + "\n")
        return study.job, study.table

    return made


def encoded(privacy: Any) -> Made:
    """Between clients whose latents a model's encoder tells from their records; a change is of one at east."""

    def made(world: World, folder: Path) -> tuple[Job, Path]:
        algorithm = {"name": "fedvi", "rounds": 2, "weights": "equal", "batch_size": 4}
        job = Job(
            world, folder, allow=False, partition=None, silo=[{"id": s, "data": "own.csv"} for s in SILOS],
            algorithm=algorithm, privacy=privacy, aggregation=MASKED,
        )  # fmt: skip
        values = torch.randn(3, 20, 2, generator=torch.Generator().manual_seed(1))
        for name, rows in zip(SILOS, values.tolist(), strict=True):
            (world.homes[name].path / "own.csv").write_text("\n".join(["x,y", *(f"{x},{y}" for x, y in rows), ""]))
            (world.homes[name].path / "d.toml").write_text(numbers("xy"))
            data = {"id": "data", "path": "own.csv", "dictionary": "d.toml"}
            job.allow(name, data=[data], privacy=FLOORS, disclosures=["final_likelihood", "sampled_records"])
        return job, world.homes["east"].path / "own.csv"

    return made


def with_encoder(job: Job, patch: pytest.MonkeyPatch) -> None:
    """No configuration says an encoder: the model is put in place of the one that it names."""
    for module in (site_job, serving):
        patch.setattr(module, "model_for", lambda *_, **__: (ENCODED, "a model"))
    whole(job, patch)


def numbers(names: str) -> str:
    """A dictionary of these columns."""
    columns = (f'[columns.{name}]\nkind = "number"\ncentre = 0.0\nscale = 1.0\n' for name in names)
    return "format = 1\n" + "".join(columns)


def matched(world: World, folder: Path) -> tuple[Job, Path]:
    """Of people that sites match; a change is of one whom north alone has."""
    built = ColumnsJob(world, folder, algorithm=SHARED, aggregation=MASKED, alignment=MATCHED)
    shuffled(built)
    lines = built.files["north"].read_text().splitlines()
    lines.remove(own := next(line for line in lines if line.startswith("p 2010")))
    built.files["north"].write_text("\n".join([*lines, own]) + "\n")
    return built, built.files["north"]


def columns(silo: str, **job: Any) -> Made:
    """Of 40 people at three sites; a change is of one's columns at this site."""

    def made(world: World, folder: Path) -> tuple[Job, Path]:
        built = ColumnsJob(world, folder, **job)
        for name in SILOS:
            rule = BUDGET if built.config.privacy is not None else None
            built.allow(name, rule, disclosures=["person_rows", "sampled_records"])
        return built, built.files[silo]

    return made


COLUMNS_DP: dict[str, Any] = {
    "alignment": MATCHED, "algorithm": {**SHARED, "rounds": 4},
    "privacy": {"unit": "record", "epsilon": 8.0, "delta": 1e-5, "clipping_norm": 1.0, "data_set": "data"},
}  # fmt: skip


def outcome(world: World, folder: Path) -> tuple[Job, Path]:
    """As by `columns`, whose outcome the server has, which tells it with noise; a change is of one's."""
    built = ColumnsJob(world, folder, **{**COLUMNS_DP, "algorithm": {**VERTICAL, "rounds": 4}}, aggregation=MASKED)
    assert built.config.alignment is not None
    alignment = built.config.alignment.model_dump(mode="json")
    data = {"id": "data", "path": str(built.files["response"]), "alignment": alignment, "fewest": 20}
    Job.allow(built, "hub", data=[data])
    return built, built.files["response"]


def regression(**tables: Any) -> Made:
    """Of the rows that three sites have, by a formula; a change is of one at north, whose file is as for columns."""

    def made(world: World, folder: Path) -> tuple[Job, Path]:
        built = ColumnsJob(world, folder, allow=False)
        (folder / "rows.toml").write_text(ROWS)
        job = Job(
            world, folder, allow=False, model={"formula": "a ~ b", "dictionary": "rows.toml"}, partition=None,
            silo=[{"id": s, "data": str(built.files[s])} for s in SILOS],
            **{"algorithm": SFVI, "aggregation": MASKED, **tables},
        )  # fmt: skip
        job.config = settled(job.config)
        for name in SILOS:
            (world.homes[name].path / "rows.toml").write_text(ROWS)
            data = {"id": "data", "path": str(built.files[name]), "dictionary": "rows.toml"}
            data |= {**BUDGET, "unit": tables["privacy"]["unit"]} if "privacy" in tables else {}
            job.allow(
                name, data=[data], model=[rule_of(job.config.model)], disclosures=["final_likelihood"], privacy=FLOORS
            )
        return job, built.files["north"]

    return made


ROWS = numbers("ab") + '[columns.person]\nkind = "id"\n'


def _without_salt(tensors: dict[str, torch.Tensor], *rest: Any) -> bytes:
    return save({k: torch.zeros_like(v) if k == "salt" else v for k, v in tensors.items()}, *rest)


PVI: dict[str, Any] = {"name": "pvi", "rounds": 2, "local_steps": 3}
AVG: dict[str, Any] = {"name": "sfvi-avg", "rounds": 2, "local_steps": 3, "family": "diagonal", "weights": "equal"}
OWN = {**PRIVACY["record"], "noise": "silo"}
NUMBER = another(1, ("0.5", "0.25"))


#: A silo's state while a job lasts, of each of its records: its length goes by how many these are, and no byte does.
SEALED = "left/state/jobs/ID/ID.sqlite"


class Case(NamedTuple):
    """jobs: one after the other, in worlds that differ from job `since` on. holder, west: with a key holder, with a
    fourth silo. knowing: whose own posterior, which stays at its site, may go by the record. besides: what else may,
    each with its reason."""

    jobs: tuple[Made, ...]
    change: Change
    knowing: tuple[str, ...] = ("east",)
    holder: bool = False
    west: bool = False
    done: Done = whole
    since: int = 0
    besides: tuple[str, ...] = ()

    def beyond(self, found: Mapping[str, set[Any]]) -> set[str]:
        """Where something tells that may not."""
        folders = "left", *(f"world/{silo}" for silo in self.knowing)
        own = {f"{folder}/results/ID.safetensors" for folder in folders} | set(self.besides)
        lengths = {name for name, tells in found.items() if all("length" in tell for tell in tells)} & {SEALED}
        return found.keys() - own - lengths


PRIVATE, EXACT = (children(PRIVACY["record"]),), (children(None),)
SOME = columns("north", algorithm=SHARED, aggregation=MASKED)
LABELS = (columns("east", **AT_SILO, aggregation=MASKED),)
FEDAVG = {"name": "fedavg", "rounds": 2, "local_steps": 3, "weights": "equal", "total_records": 120}
SIX = {**SFVI, "iterations": 6}
LACKING: dict[str, Any] = {
    "aggregation": {"kind": "masked", "max_missing": 1, "max_differences": 9},
    "engine": {"on_loss": "drop", "deadline": 2.0},
}
FOUR = (children(None, SIX, **LACKING),)
#: What a site writes for its own people of data that do not fit: the file stays there, and so does the line. Where none
#: of its rows are used, `cohorts.json` has no digest of them.
ITS_OWN = ("log of east", "world/east/state/jobs/ID/unfit")
LOG = "world/east/audit-log.sqlite"
VCL: dict[str, Any] = {"name": "vcl", "reveal_changes": True}
PLAIN_SUMS = {"aggregation": {"kind": "plain"}}
TERMS = ("from east, R",)
AT_NORTH = ("log of north", "world/north/state/jobs/ID/unfit")
STEPS = {**PVI, "private": "steps", "sampling_rate": 0.5, "scale_rate": 0.2}
FAR = another(1, ("1e300", "1e300"))
LONG, UNLIKELY = "no,0,1,0,0,1", "maybe,0,1,0,0"

CASES = {
    "a record leaves, of records' privacy": Case(PRIVATE, gone),
    "a record is another, exact sums": Case(EXACT, another(1)),
    "a label, response at a silo": Case(LABELS, another(3), SILOS),
    "killed at a round, exact sums": Case(EXACT, another(1), done=silo_killed(ROUND)),
    "a record leaves, of silos' privacy": Case((children(PRIVACY["silo"]),), gone),
    "a record leaves, changes": Case((children(OWN, PVI),), gone),
    "a record is another, PVI": Case((children(None, PVI),), another(2)),
    "a record is another, averages": Case((children(PRIVACY["silo"], {**AVG, "total_records": 60}),), another(2)),
    "a predictor": Case((columns("north", **AT_SILO, aggregation=MASKED),), NUMBER, ("north",)),
    "a predictor, one response for all": Case(
        (columns("south", algorithm=SHARED, aggregation=MASKED),), NUMBER, ("south",)
    ),
    "a predictor, a key holder": Case(
        (columns("south", algorithm=SHARED, aggregation={"kind": "homomorphic"}),), NUMBER, ("south",), True
    ),
    "a person that no other has": Case(
        (matched,), lambda lines: [*lines[:-1], lines[-1].replace("p 2", "q 9")], ("north",)
    ),
    # Something happens meanwhile.
    "killed as it joins": Case(PRIVATE, gone, done=silo_killed(JOIN)),
    "killed as a session opens": Case(PRIVATE, gone, done=silo_killed(OPEN)),
    "killed at the end": Case(PRIVATE, gone, done=silo_killed(END)),
    "killed at a round, of records' privacy": Case(PRIVATE, gone, done=silo_killed(ROUND)),
    "another is killed": Case(PRIVATE, gone, done=silo_killed(ROUND, silo="north")),
    "charged and killed": Case(PRIVATE, gone, done=charged_and_killed),
    "charged and killed, of silos' privacy": Case((children(PRIVACY["silo"]),), gone, done=charged_and_killed),
    "charged and killed, changes": Case((children(OWN, PVI),), gone, done=charged_and_killed),
    "the server is killed": Case(PRIVATE, gone, done=server_killed(False)),
    "all machines start again": Case(PRIVATE, gone, done=server_killed(True)),
    "all machines start again, exact sums": Case(EXACT, another(1), done=server_killed(True)),
    "all machines start again, PVI": Case((children(None, PVI),), another(2), done=server_killed(True)),
    "the server is killed, a label": Case(LABELS, another(3), SILOS, done=server_killed(True)),
    "refused by another silo first": Case(PRIVATE, gone, done=refused_first("south")),
    "refused by its own silo first": Case(PRIVATE, gone, done=refused_first("east")),
    # Data do not fit.
    "a line cannot be read": Case(PRIVATE, to(LONG), besides=ITS_OWN),
    "a cell is not known, of records' privacy": Case(PRIVATE, to(UNLIKELY), besides=ITS_OWN),
    "a cell is not known, of silos' privacy": Case(
        (children(PRIVACY["silo"]),), to(UNLIKELY), besides=(*ITS_OWN, "world/east/state/cohorts.json")
    ),
    "far too large a number, of records' privacy": Case(
        (regression(privacy=PRIVACY["record"]),), FAR, ("north",), besides=AT_NORTH
    ),
    "far too large a number, of silos' privacy": Case(
        (regression(privacy=PRIVACY["silo"]),), FAR, ("north",), besides=AT_NORTH
    ),
    "far too large a number, changes": Case(
        (regression(privacy=OWN, algorithm=PVI),), FAR, ("north",), besides=AT_NORTH
    ),
    "far too large a number, steps": Case(
        (regression(privacy=OWN, algorithm=STEPS),), FAR, ("north",), besides=AT_NORTH
    ),
    "far too large a number in a column": Case((columns("north", **COLUMNS_DP),), FAR, ("north",), besides=AT_NORTH),
    # That they do not is told, a bit, of a job without privacy: these are two worlds of which it is.
    "refused for one record or another": Case(
        (children(None, first=to(UNLIKELY)),), to(LONG), done=fails("its data do not fit the model"),
        besides=("log of east",),
    ),
    # Other kinds.
    "bcm": Case((children(None, {"name": "bcm"}),), another(2)),
    "fedavg": Case((regression(privacy=PRIVACY["silo"], algorithm=FEDAVG),), gone, ("north",)),
    "fedvi": Case((encoded(PRIVACY["silo"]),), gone, done=with_encoder),
    "a record is another, fedvi": Case((encoded(None),), another(1, ("0.5", "0.25")), done=with_encoder),
    "steps": Case((regression(privacy=OWN, algorithm=STEPS),), gone, ("north",)),
    "parts": Case((regression(privacy=PRIVACY["record"], algorithm={**PVI, "virtual_clients": 4}),), gone, ("north",)),
    "a record is another, parts": Case((regression(algorithm={**PVI, "virtual_clients": 4}),), NUMBER, ("north",)),
    "averages of full covariances": Case(
        (children(None, {**AVG, "family": "full", "bures_iterations": 2}),), another(2)
    ),
    "a sample, and its bound": Case(
        (children({**PRIVACY["record"], "objective_share": 0.2}, {**SFVI, "sampling_rate": 0.5}),), gone
    ),
    "a norm that adapts": Case((children({**PRIVACY["silo"], "target_quantile": 0.5}),), gone),
    "noise of the server's": Case((children({**PRIVACY["record"], "noise": "server"}),), gone),
    # In plain sums the server has each term.
    "vcl": Case((children(None, VCL, **PLAIN_SUMS),), another(2), besides=TERMS),
    "streaming": Case((children(None, {**VCL, "name": "streaming-vb"}, **PLAIN_SUMS),), another(2), besides=TERMS),
    "ciphertexts": Case((children(PRIVACY["record"], aggregation={"kind": "homomorphic"}),), gone, holder=True),
    "ciphertexts, no masks": Case(
        (children(None, aggregation={"kind": "homomorphic", "masks": False}),), another(1), holder=True
    ),
    "ckks": Case(
        (children({**PRIVACY["silo"], "noise": "silo"}, aggregation={"kind": "homomorphic", "scheme": "ckks"}),), gone,
        holder=True,
    ),
    "weighed and refined": Case(
        (children(None, {"name": "pvi", "local_steps": 25, "max_rounds": 30}),), another(2)
    ),
    "plain sums, of records' privacy": Case(
        (children({**PRIVACY["record"], "noise": "silo"}, aggregation={"kind": "plain"}),), gone
    ),
    # Of four silos one is lost, comes back, or is not asked.
    "lost": Case(FOUR, another(2), west=True, done=lost("west")),
    "lost, the changed one": Case(FOUR, another(2), west=True, done=lost("east")),
    "lost and back": Case(FOUR, another(2), west=True, done=lost("west", 4)),
    "lost and back, the changed one": Case(FOUR, another(2), west=True, done=lost("east", 4)),
    "lost and back, of records' privacy": Case(
        (children({**PRIVACY["record"], "dropouts": 1}, SIX, **LACKING),), gone, west=True, done=lost("east", 4)
    ),
    "left out in turns": Case((children(None, {**SIX, "participation": 0.75}),), another(2), west=True),
    "left out in turns, PVI": Case(
        (children(None, {**PVI, "schedule": "asynchronous", "reveal_changes": True}),), another(2), west=True
    ),
    # Columns of the same people.
    "matched, a predictor": Case((matched,), another(1, ("0.5", "0.25")), ("north",)),
    "matched, killed": Case((matched,), another(1, ("0.5", "0.25")), ("north",), done=silo_killed(MATCH, silo="north")),
    "a predictor, of records' privacy": Case((columns("north", **COLUMNS_DP),), NUMBER, ("north",)),
    "a predictor, private, killed": Case(
        (columns("north", **COLUMNS_DP),), NUMBER, ("north",), done=silo_killed(ROUND, 3, "north")
    ),
    "a cell that is a number or none": Case(
        (columns("north", **COLUMNS_DP),), another(1, ("none", "-")), ("north",),
        besides=AT_NORTH,
    ),
    "soul": Case(
        (columns("north", algorithm={"name": "soul", "rounds": 6, "response": "private"}, aggregation=MASKED),),
        NUMBER, ("north",),
    ),
    "batches, several local steps": Case(
        (columns("north", algorithm={**VERTICAL, "batch_size": 16, "local_steps": 2}, aggregation=MASKED),),
        NUMBER, ("north",),
    ),
    "a formula": Case((regression(),), NUMBER, ("north",)),
    "a formula, replicates": Case((regression(algorithm={**PVI, "replicates": 20}),), NUMBER, ("north",)),
    "two of the same people": Case(
        (SOME, columns("north", **AT_SILO, aggregation=MASKED)), NUMBER, ("north",)
    ),
    "columns, then rows": Case((SOME, regression()), NUMBER, ("north",)),
    "columns, then rows, of records' privacy": Case(
        (columns("north", **COLUMNS_DP), regression(privacy=PRIVACY["record"])), NUMBER, ("north",)
    ),
    "rows, then columns": Case((regression(), SOME), NUMBER, ("north",)),
    "rows in another order, matched": Case((matched,), turned, ("north",)),
    "a label at the server, of records' privacy": Case((outcome,), another(1), ()),
    # One job after another. The second is over other rows, which the site's own log says, and no message.
    "a record leaves between jobs": Case(
        (*PRIVATE, *PRIVATE), gone, since=1, besides=(LOG,)
    ),
    "a record leaves between jobs, exact sums": Case(
        (*EXACT, *EXACT), another(2), since=1, besides=(LOG,)
    ),
    "records' privacy, then changes": Case((*PRIVATE, children(OWN, PVI)), gone),
}  # fmt: skip
FIRST, SLOW = 4, pytest.mark.slow


def tiered(cases: Iterable[str], first: int) -> list[Any]:
    return [case if at < first else pytest.param(case, marks=SLOW) for at, case in enumerate(cases)]


@pytest.mark.parametrize("case", tiered(CASES, FIRST))
def test_totals_aside_nothing_goes_by_one_record(telling: Telling, case: str) -> None:
    assert not CASES[case].beyond(telling(CASES[case]))


def _table(home: Home) -> bytes:
    tables = [home.path / "own.csv", *home.path.parents[1].glob(f"job0/{home.id}.csv")]
    return b"".join(path.read_bytes() for path in tables if path.exists())


def _table_again(home: Home) -> bytes:
    """Where a session was open."""
    return _table(home) if any(home.state_folder.glob("jobs/*/session")) else b""


def _unfit(home: Home) -> bytes:
    return bytes(len(list(home.state_folder.glob("jobs/*/unfit"))))


def _other_rows(home: Home) -> bytes:
    return bytes([len({path.read_bytes() for path in home.state_folder.glob("jobs/*/cohort")})])


def joining(of: Callable[[Home], bytes]) -> Callable[[pytest.MonkeyPatch], None]:
    """A site with a break says this of itself, by a digest, in place of its policy's, when it joins."""
    return lambda patch: patch.setattr(Decision, "stated_policy", lambda _, home: hashlib.sha256(of(home)).digest())


def going_on(patch: pytest.MonkeyPatch) -> None:
    """A site with a break writes a digest of its table into its log when another process of its goes on with a job."""
    kept = Site._kept_offer

    def found(self: Site, job: str, path: Path) -> bytes:
        self._trail.note(job, hashlib.sha256(_table(self.home)).hexdigest(), always=True)
        return kept(self, job, path)

    patch.setattr(Site, "_kept_offer", found)


def summing(patch: pytest.MonkeyPatch) -> None:
    """And this one when it says whose sum it was."""
    answer = Site._answer

    def noting(self: Site, job: str, message: bytes) -> bytes:
        if message[:1] == SUM:
            self._trail.note(job, hashlib.sha256(_table(self.home)).hexdigest(), always=True)
        return answer(self, job, message)

    patch.setattr(Site, "_answer", noting)


def saying_why(patch: pytest.MonkeyPatch) -> None:
    """This one refuses its server by the words that are for itself."""

    def why(handle: Any, job: str, message: bytes) -> tuple[int, bytes]:
        try:
            return MESSAGE, handle(job, message)
        except DataError as error:
            return REFUSAL, reason(str(error))

    patch.setattr(stream_client, "answered", why)
    patch.setitem(CASES, REFUSED, CASES[REFUSED]._replace(done=fails("smoke|line")))


REFUSED = "refused for one record or another"
#: A break, and where it is found.
CONTROLS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "killed at a round, exact sums": (going_on, LOG),
    "a record leaves, of records' privacy": (joining(_table), "from east, J"),
    "charged and killed": (going_on, LOG),
    "the server is killed": (joining(_table_again), "from east, J"),
    "all machines start again": (joining(_table_again), "from east, J"),
    "lost": (summing, LOG),
    "lost and back, the changed one": (going_on, LOG),
    "refused by another silo first": (joining(_table), "from east, J"),
    "a line cannot be read": (joining(_unfit), "from east, J"),
    REFUSED: (saying_why, "from east, J"),
    "a record leaves between jobs": (joining(_other_rows), "from east, J"),
    "columns, then rows": (joining(_table), "from north, J"),
    "matched, killed": (going_on, "world/north/audit-log.sqlite"),
}


@pytest.mark.parametrize("case", tiered(CONTROLS, 1))
def test_control_what_goes_by_one_record_is_found(telling: Telling, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    plant, where = CONTROLS[case]
    plant(monkeypatch)
    assert where in CASES[case].beyond(telling(CASES[case], most=3))


def test_control_labels_without_a_salt_are_found(telling: Telling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bytes at random beside labels silos' digests tell them, to the server and in every log."""
    monkeypatch.setattr(columns_job, "save", _without_salt)
    assert {"from north, K", "world/hub/audit-log.sqlite"} <= telling(CASES["a label, response at a silo"], 3).keys()


@pytest.mark.parametrize("control", [False, True])
def test_lengths_and_numbers_tell(control: bool) -> None:
    """Of pieces whose bytes are all drawn anew."""
    worlds = [[{"a": [os.urandom(20 + control * which)] * (1 + control * which)} for _ in range(3)] for which in (0, 1)]
    found = told((worlds[0], worlds[1]))
    assert bool(found) == control
    assert not control or ("pieces", 1, 2) in found["a"]
    lengths = [[{"a": [os.urandom(20 + control * which)]} for _ in range(3)] for which in (0, 1)]
    assert bool(found := told((lengths[0], lengths[1]))) == control
    assert not control or (0, "length", 20, 21) in found["a"]
