"""A site that keeps a table: its policy's dictionary and query code it, what does not fit is refused before any round
and told to nobody else, and a cohort that changed is refused or said."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from consortium_run import Job, met
from deployment_world import NOW, World
from safetensors import safe_open

from secure_fvi.deployment.job import make_offer, portable, sign_offer
from secure_fvi.deployment.model_hash import manifest
from secure_fvi.deployment.session_messages import CODEC, JOIN, Joined
from secure_fvi.deployment.site import Site
from secure_fvi.deployment.site_job import Local
from secure_fvi.errors import DataError, ProtocolError, RecordError
from secure_fvi.models.base import program

DICTIONARY = """
format = 1
[columns.smoke]
kind = "boolean"
levels = ["no", "yes"]
"""
DICTIONARY += "".join(f'[columns."wheeze[{k}]"]\nkind = "boolean"\n' for k in range(4))
_SILOS = [{"id": name, "data": "own.csv"} for name in ("east", "north", "south")]


class Door:
    """East's folder with a table of 40 children, of whom the query takes 39, and its site's answers."""

    def __init__(self, world: World, folder: Path, **rule: Any) -> None:
        self.home, self.hub = world.homes["east"], world.homes["hub"]
        self.job = Job(
            world, folder, partition=None, silo=_SILOS, algorithm={"name": "sfvi", "iterations": 5},
            aggregation={"kind": "masked"},
        )  # fmt: skip
        self.table = self.home.path / "own.csv"
        records = program("six-cities").load().records
        rows = [
            ["no", "yes"][int(records["smoke"][i])] + "," + ",".join(str(int(v)) for v in records["wheeze"][i])
            for i in range(0, 537, 14)
        ]
        self.lines = ["id,smoke," + ",".join(f"wheeze[{k}]" for k in range(4))]
        self.lines += [f"{i},{row}" for i, row in enumerate([*rows, "no,0,0,0,0"])]
        self.write(self.lines)
        (self.home.path / "d.toml").write_text(DICTIONARY)
        self.allow(**rule)

    def write(self, lines: list[str]) -> None:
        self.table.write_text("\n".join(lines) + "\n")

    def allow(self, **rule: Any) -> None:
        wanted = {
            "id": "data",
            "path": "own.csv",
            "dictionary": "d.toml",
            "query": "SELECT * FROM data WHERE id <> '7'",
        }
        self.job.allow("east", data=[{k: v for k, v in (wanted | rule).items() if v is not None}])

    def join(self, name: str) -> Joined:
        """The site's answer to a job called `name`, by a process of its own."""
        roster, config = self.hub.roster(NOW), self.job.config
        offer = make_offer(config, roster, "hub", manifest(config).hash, NOW, name)
        site = Site(self.home, Local())
        try:
            met(self.hub, site)
            return CODEC.unpack(site.handle(name, JOIN + sign_offer(offer, self.hub.identity())), Joined)
        finally:
            site.close()

    def log(self) -> str:
        held = b"".join(path.read_bytes() for path in self.home.path.rglob("audit-log.sqlite*"))
        return held.decode("latin-1")


@pytest.mark.later
def test_a_site_reads_its_table_by_the_policys_dictionary_and_query(world: World, tmp_path: Path) -> None:
    door = Door(world, tmp_path)
    assert door.join("one").nonce
    (cohort,) = set(re.findall(r"rows of data set 'data': cohort ([0-9a-f]{64})", door.log()))
    # The row that the query leaves out does not count; any other does.
    door.write([line for line in door.lines if not line.startswith("7,")])
    assert door.join("two").nonce
    assert f"{cohort}, as in job 'one'" in door.log()
    door.write(door.lines[:-1])
    assert door.join("three").nonce
    assert "other rows than in job 'two'" in door.log()


@pytest.mark.later
def test_a_changed_cohort_is_refused_where_it_is_pinned(world: World, tmp_path: Path) -> None:
    door = Door(world, tmp_path, cohort="pinned")
    assert door.join("one").nonce
    door.write([door.lines[0], *reversed(door.lines[1:])])
    assert door.join("turned").nonce
    door.write(door.lines[:-1])
    with pytest.raises(DataError, match="the rows of data set 'data' are not those") as caught:
        door.join("two")
    found = re.search(r'cohort = "([0-9a-f]{64})"', str(caught.value))
    assert found is not None
    assert found[1] not in door.log()
    door.allow(cohort=found[1])
    assert door.join("three").nonce


def test_a_job_goes_on_with_the_rows_that_it_began_with_alone(world: World, tmp_path: Path) -> None:
    """In their order, by which what is kept of each record is found. A job that an earlier version held to its rows in
    any order is refused by that, and not for its data."""
    door = Door(world, tmp_path)
    assert door.join("one").nonce
    assert door.join("one").nonce
    for lines in (door.lines[:-1], [door.lines[0], *reversed(door.lines[1:])]):
        door.write(lines)
        with pytest.raises(DataError, match="are not those that the job began with"):
            door.join("one")
    door.write(door.lines)
    assert door.join("one").nonce
    (kept,) = (door.home.state_folder / "jobs").glob("*/cohort")
    kept.write_bytes(kept.read_bytes()[1:])
    with pytest.raises(RecordError, match="is of an earlier version"):
        door.join("one")


@pytest.mark.later
@pytest.mark.parametrize(
    ("rows", "rule", "said"),
    [
        (["40,maybe,0,0,1,0"], {}, r"column 'smoke': neither of its two values in 1 row \(40\)"),
        (["40,yes,0,0,2,0"], {}, r"column 'wheeze\[2\]': neither of its two values in 1 row \(40\)"),
        (["40,yes,0,,1,0"], {}, r"column 'wheeze\[1\]': a gap in 1 row \(40\)"),
        (["40,,0,0,1,0", "41,maybe,0,0,1,0"], {"missing": "drop"}, "column 'smoke': neither"),
        ([], {"query": "SELECT * FROM 'other.csv'"}, "this reads from 'other.csv'"),
        ([], {"dictionary": "none.toml"}, "cannot read dictionary"),
        ([], {"path": "none.csv"}, "no file"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_round_and_told_to_nobody(
    world: World, tmp_path: Path, rows: list[str], rule: dict[str, Any], said: str
) -> None:
    door = Door(world, tmp_path, **rule)
    door.write([*door.lines, *rows])
    with pytest.raises(DataError, match=rf"silo 'east': .*{said}"):
        door.join("one")
    log = door.log()
    assert "its data do not fit the model" in log
    for secret in ("maybe", "smoke", "wheeze[", "column", "other.csv", "none.", "own.csv"):
        assert secret not in log
    assert "rows of data set" not in log


@pytest.mark.later
def test_rows_with_a_gap_are_left_out_where_the_policy_says_so(world: World, tmp_path: Path) -> None:
    door = Door(world, tmp_path)
    assert door.join("whole").nonce
    door.write([*door.lines, "40,,0,0,1,0", "41,yes,0,0,,0"])
    with pytest.raises(DataError, match='missing = "drop"'):
        door.join("refused")
    door.allow(missing="drop")
    assert door.join("dropped").nonce
    assert "as in job 'whole'" in door.log()


@pytest.mark.later
@pytest.mark.parametrize("more", [{"query": "SELECT 1"}, {"dictionary": "d.toml"}, {"tables": {"x": "/etc/passwd"}}])
def test_a_server_names_neither_query_nor_dictionary_nor_tables(
    world: World, tmp_path: Path, more: dict[str, Any]
) -> None:
    """Whatever a configuration says of a silo's table stays out of the offer; one with it in is refused."""
    door = Door(world, tmp_path)
    silos = tuple(s.model_copy(update={"dictionary": "d.toml", **more}) for s in door.job.config.silo)
    config = door.job.config.model_copy(update={"silo": silos})
    assert portable(config, "data") == portable(door.job.config, "data")
    offer = make_offer(config, door.hub.roster(NOW), "hub", manifest(config).hash, NOW, "one")
    forged = dataclasses.replace(offer, config=config)
    site = Site(door.home, Local())
    try:
        with pytest.raises(ProtocolError, match="names files"):
            site.handle("one", JOIN + sign_offer(forged, door.hub.identity()))
    finally:
        site.close()


@pytest.mark.later
def test_the_result_says_which_rows_it_rests_on(world: World, tmp_path: Path) -> None:
    job = Job(world, tmp_path, algorithm={"name": "sfvi", "iterations": 1}, aggregation={"kind": "masked"})
    job.run()
    for name in ("east", "north", "south"):
        (path,) = (world.homes[name].path / "results").glob("*.safetensors")
        with safe_open(path, "pt") as file:
            cohort = file.metadata()["cohort"]
        held = b"".join(p.read_bytes() for p in world.homes[name].path.rglob("audit-log.sqlite*"))
        assert f"cohort {cohort}".encode() in held
