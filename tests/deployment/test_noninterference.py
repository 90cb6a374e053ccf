"""What anybody sees of a deployed job, totals aside, does not go by one record.

Two worlds differ in a record of one silo, 'east'. In both each total is replaced by that of the first run, so that what
totals disclose is the same. All else is compared byte by byte: each message that a silo hears or says, what lies at the
server and at each site afterwards, the server's results, every line of the logs. What is drawn anew in each run (keys,
nonces, masks, noise, times) differs between runs of one world too; so a byte tells of the record if it is one and the
same in all runs of one world, one and the same in all of the other, and not the same in both. Of bytes at random one in
2^32 does so by chance in three runs of each world, of the last of a signature, which has 17 values, one in 70,000: what
is found is looked for again in three more runs of each, so that a false alarm comes less often than once in 10^9.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from columns_run import AT_SILO, MASKED, MATCHED, SHARED, ColumnsJob, shuffled
from consortium_run import SILOS, Job
from deployment_world import World, new_world
from safetensors.torch import save
from test_unfit_data import PRIVACY, SFVI, Study

from secure_fvi import server as server_of
from secure_fvi.aggregation.base import Total
from secure_fvi.deployment import columns_job
from secure_fvi.deployment.deciding import Decision
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.site import Site
from secure_fvi.deployment.site_job import Local

Seen = dict[str, list[bytes]]  # by where, in pieces
Made = Callable[[World, Path], tuple[Job, Path]]  # a job, and the file in which the worlds differ
Change = Callable[[list[str]], list[str]]  # of a table's lines
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


def seen_of(root: Path, said: list[tuple[str, bytes, bytes]], log: list[str]) -> Seen:
    """Of a job that has run below `root`: all but the tables, which are a site's own."""
    found: Seen = {"log": [line.encode() for line in sorted(log)]}
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
    """By where, what tells the two worlds apart: a byte of a piece; or, where its length goes by chance, a word."""
    found = dict[str, set[Any]]()
    for name in set[str]().union(*(seen.keys() for world in worlds for seen in world)):
        sides = [[seen.get(name, []) for seen in world] for world in worlds]
        if len({len(one) for side in sides for one in side}) > 1:  # as lines of a log
            sides = [[[b"\n".join(one)] for one in side] for side in sides]
        for at, piece in enumerate(zip(*(one for side in sides for one in side), strict=True)):
            half = len(piece) // 2
            if tells := _bytes(piece, half) if len(set(map(len, piece))) == 1 else _words(piece, half):
                found.setdefault(name, set()).update((at, *what) for what in tells)
    return found


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


@pytest.fixture
def telling(first_world: World, tmp_path: Path, few_draws: None, caplog: Any) -> Telling:
    """What tells of a change, of a job, with a key holder or without."""
    caplog.set_level(logging.DEBUG, "secure_fvi")

    def run(make: Made, change: Change | None, totals: Totals, base: World) -> Seen:
        root, said, handle = tmp_path / "x" / str(len(list(tmp_path.glob("x/*")))), list[Any](), Site.handle
        (root / "job").mkdir(parents=True)
        job, table = make(base.copy(root / "world"), root / "job")
        if change is not None:
            table.write_text("\n".join(change(table.read_text().splitlines())) + "\n")

        def heard(self: Site, id_: str, message: bytes) -> bytes:
            reply = handle(self, id_, message)
            said.append((self.home.id, message, reply))
            return reply

        caplog.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Site, "handle", heard)
            patch.setattr(server_of, "_wrapped", totals.wrapped)
            job.run(local=Local())
        return seen_of(root, said, [r.getMessage().replace(str(root), "") for r in caplog.records])

    def found(case: Case, most: int = 6) -> dict[str, set[Any]]:
        base = new_world(tmp_path / "holder", holder=True) if case.holder else first_world
        totals, worlds = Totals(), (list[Seen](), list[Seen]())
        for at in range(most):  # in turns, so that no world has the even seconds
            for which in (at % 2, 1 - at % 2):
                worlds[which].append(run(case.make, case.change if which else None, totals, base))
                totals.at = 0
            if at >= 2 and not (last := told(worlds)).keys() - case.own:
                break
        return last

    return found


def gone(lines: list[str]) -> list[str]:
    """The last one."""
    return lines[:-1]


def another(column: int, values: tuple[str, str] = ("0", "1")) -> Change:
    """A cell of the fifth record: the one of these that it is not."""

    def changed(lines: list[str]) -> list[str]:
        cells = lines[5].split(",")
        cells[column] = values[cells[column] == values[0]]
        return [*lines[:5], ",".join(cells), *lines[6:]]

    return changed


def children(privacy: Any, algorithm: Any = SFVI) -> Made:
    """Between three sites, each with 20 of them; a change is of one at east."""

    def made(world: World, folder: Path) -> tuple[Job, Path]:
        study = Study(world, folder / "study", privacy, algorithm)
        return study.job, study.table

    return made


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
        return built, built.files[silo]

    return made


def _digest_of_the_table(self: Decision, home: Home) -> bytes:
    table = home.path / "own.csv"
    return hashlib.sha256(table.read_bytes() if table.exists() else b"").digest()


def _without_salt(tensors: dict[str, torch.Tensor], *rest: Any) -> bytes:
    return save({k: torch.zeros_like(v) if k == "salt" else v for k, v in tensors.items()}, *rest)


PVI: dict[str, Any] = {"name": "pvi", "rounds": 2, "local_steps": 3}
AVG: dict[str, Any] = {"name": "sfvi-avg", "rounds": 2, "local_steps": 3, "family": "diagonal", "weights": "equal"}
OWN = {**PRIVACY["record"], "noise": "silo"}
NUMBER = another(1, ("0.5", "0.25"))


class Case(NamedTuple):
    """knowing: whose own posterior, which stays at its site, may go by the record."""

    make: Made
    change: Change
    knowing: tuple[str, ...] = ("east",)
    holder: bool = False

    @property
    def own(self) -> set[str]:
        return {f"world/{silo}/results/ID.safetensors" for silo in self.knowing}


CASES = {
    "a record leaves, of records' privacy": Case(children(PRIVACY["record"]), gone),
    "a record is another, exact sums": Case(children(None), another(1)),
    "a label, response at a silo": Case(columns("east", **AT_SILO, aggregation=MASKED), another(3), SILOS),
    "a record leaves, of silos' privacy": Case(children(PRIVACY["silo"]), gone),
    "a record leaves, changes": Case(children(OWN, PVI), gone),
    "a record is another, PVI": Case(children(None, PVI), another(2)),
    "a record is another, averages": Case(children(PRIVACY["silo"], {**AVG, "total_records": 60}), another(2)),
    "a predictor": Case(columns("north", **AT_SILO, aggregation=MASKED), NUMBER, ("north",)),
    "a predictor, one response for all": Case(
        columns("south", algorithm=SHARED, aggregation=MASKED), NUMBER, ("south",)
    ),
    "a predictor, a key holder": Case(
        columns("south", algorithm=SHARED, aggregation={"kind": "homomorphic"}), NUMBER, ("south",), True
    ),
    "a person that no other has": Case(
        matched, lambda lines: [*lines[:-1], lines[-1].replace("p 2", "q 9")], ("north",)
    ),
}  # fmt: skip
FIRST = 3
SLOW = pytest.mark.slow


@pytest.mark.parametrize("case", [*list(CASES)[:FIRST], *(pytest.param(c, marks=SLOW) for c in list(CASES)[FIRST:])])
def test_totals_aside_nothing_goes_by_one_record(telling: Telling, case: str) -> None:
    assert telling(CASES[case]).keys() <= CASES[case].own


@pytest.mark.parametrize(
    "case", [pytest.param("a record leaves, of records' privacy", marks=SLOW), "a label, response at a silo"]
)
def test_control_what_goes_by_one_record_is_found(telling: Telling, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """A digest of its table in what a site says of its policy; labels without bytes at random beside them, which
    silos' digests then tell, to the server and in every log."""
    monkeypatch.setattr(Decision, "stated_policy", _digest_of_the_table)
    monkeypatch.setattr(columns_job, "save", _without_salt)
    found = telling(CASES[case], most=3).keys()
    assert "from east, J" in found if "leaves" in case else {"from north, K", "world/hub/audit-log.sqlite"} <= found
