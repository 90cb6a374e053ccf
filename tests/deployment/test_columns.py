"""Vertical jobs between institutions: the posterior of one process, byte for byte; kills; what policies refuse."""

from __future__ import annotations

import csv
import dataclasses
import errno
import functools
import hashlib
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyro
import pytest
import torch
from columns_run import (
    AT_SILO,
    MASKED,
    MATCHED,
    PEOPLE,
    PLAIN,
    SHARED,
    SORTED,
    TWO,
    VERTICAL,
    ColumnsJob,
    aligned,
    census,
    owned,
    shuffled,
    write,
)
from consortium_run import SILOS, Job, Sites, met
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from deployment_world import NOW, World, new_world
from pyro.distributions import Normal
from safetensors.torch import load_file, save

from secure_fvi import columns as columns_in_process
from secure_fvi import wire
from secure_fvi.aggregation import Masked
from secure_fvi.aggregation.base import carry
from secure_fvi.aggregation.prg import digest
from secure_fvi.algorithms.base import Broadcast
from secure_fvi.algorithms.vertical.steps import Response
from secure_fvi.algorithms.vertical.vertical import Held, VerticalProblem
from secure_fvi.alignment import _CODEC, Matcher, MatchingSilo, SizeRequest
from secure_fvi.checkpoints import Checkpoints
from secure_fvi.cli.policy import _alignment_lines, _lines
from secure_fvi.columns import RESPONSE_HOLDER
from secure_fvi.deployment import columns_job, columns_server, serving, site_job
from secure_fvi.deployment import holding as holding_module
from secure_fvi.deployment.columns_job import _SUITE, _response, read_aligned
from secure_fvi.deployment.columns_job import ColumnsJob as SiteColumns
from secure_fvi.deployment.columns_server import ServerColumns, _one_order
from secure_fvi.deployment.countersigning import open_trail
from secure_fvi.deployment.deciding import job_entry
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.job import JobOffer, make_offer, sign_offer
from secure_fvi.deployment.model_hash import manifest
from secure_fvi.deployment.policy import read_policy
from secure_fvi.deployment.policy_check import check, held_by_server
from secure_fvi.deployment.session_messages import (
    CODEC,
    END,
    JOIN,
    KNOWN,
    MATCH,
    OPEN,
    Joined,
    Known,
    Learned,
    Open,
    Told,
    Wanted,
    columns_schema,
    schema_digest,
    unpack_schema,
)
from secure_fvi.deployment.site import Site
from secure_fvi.deployment.site_job import Cohort, Local, check_supported
from secure_fvi.deployment.trail import CHARGED
from secure_fvi.deployment.trail import MATCHED as COUNTED
from secure_fvi.deployment.trail_verify import _exchanges, compare, verify
from secure_fvi.dictionary import Column, Dictionary
from secure_fvi.disclosure import DISCLOSURES
from secure_fvi.driving import Progress
from secure_fvi.engines.stream_server import StreamServer
from secure_fvi.errors import (
    BudgetError,
    DataError,
    InputError,
    JobError,
    PolicyError,
    ProtocolError,
    RecordError,
    SecureFVIError,
)
from secure_fvi.federated_model import Schema
from secure_fvi.messages import ROUND, decode_broadcast
from secure_fvi.models.vertical_poisson import SCALE, Areas, simulate
from secure_fvi.models.vertical_programs import Data, make_data
from secure_fvi.privacy.gate import Gate, KeptNoise, NoiseSource
from secure_fvi.privacy.ledger_account import verify as verify_ledger
from secure_fvi.runs.config import Alignment, Config, Model, chosen, parse
from secure_fvi.runs.directory import RunDirectory, read_json
from secure_fvi.runs.federation import disclosure_of
from secure_fvi.silo import UNANSWERABLE
from secure_fvi.tables import check_table
from secure_fvi_lab.bench.world import HUB, Parties, allow, posterior
from secure_fvi_lab.experiments.vertical_poisson import sample
from secure_fvi_lab.references import sample_nuts


def nothing_left(world: World) -> None:
    """No silo kept a secret of the job, nor the response."""
    for silo in SILOS:
        (folder,) = (world.homes[silo].state_folder / "jobs").iterdir()
        kept = ["cohort", "ended", "offer", "predictor", "session", "sessions"]
        assert sorted(p.name for p in folder.iterdir()) == kept


@pytest.fixture
def matched(monkeypatch: pytest.MonkeyPatch) -> dict[str, npt.NDArray[np.int64]]:
    """Rows in the common order by party, once they are known."""
    found: dict[str, npt.NDArray[np.int64]] = {}
    inner = MatchingSilo.alignment

    def seen(self: MatchingSilo) -> Any:
        alignment = inner(self)
        found["response" if self.silo_id == "hub" else self.silo_id] = alignment.rows
        return alignment

    monkeypatch.setattr(MatchingSilo, "alignment", seen)
    return found


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("response", ["private", pytest.param("shared", marks=pytest.mark.slow)])
def test_people_are_matched_within_the_job(world: World, tmp_path: Path, matched: Any, response: str) -> None:
    """Over the job's own stream, before its first round; the posterior is that of one process over rows in the order
    that was found, the logs have each message, and the keys of matching are gone."""
    job = ColumnsJob(world, tmp_path, alignment=MATCHED, algorithm={**VERTICAL, "response": response})
    shuffled(job)
    remote = job.run()
    assert {len(rows) for rows in matched.values()} == {PEOPLE - 4}
    assert remote == aligned(job, matched)
    owned(job, world)
    nothing_left(world)
    assert not list((tmp_path / "remote" / "checkpoint").glob("matching*"))
    for silo in SILOS:
        found = compare(world.homes[silo].log_file, world.homes["hub"].log_file)
        assert (found.lost_answers, found.unanswered) == (0, 0)
        (rows,) = _exchanges(world.homes[silo].log_file)[1].values()
        assert sum(row.step == "matching" for row in rows) == 8
        assert set(map(str, range(1000, 1000 + PEOPLE))).isdisjoint(
            text for path in (tmp_path / "remote").rglob("*.json") for text in path.read_text().split('"')
        )


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
def test_a_site_hears_that_its_sds_are_too_small(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """East's and north's first columns are nearly one, so that q, a product, is too narrow for both: each log has it
    once. The control is south, whose columns are its own."""
    job = ColumnsJob(world, tmp_path, algorithm={**VERTICAL, "rounds": 300})
    with job.files["east"].open(newline="") as east, job.files["north"].open(newline="") as north:
        own, theirs = list(csv.reader(east)), list(csv.reader(north))
    alike = [[r[0], str(float(t[1]) + 0.1 * float(r[1])), r[2]] for r, t in zip(own[1:], theirs[1:], strict=True)]
    write(job.files["east"], own[0], alike)
    job.run()
    said = [r.getMessage() for r in caplog.records if "q is a product over silos" in r.getMessage()]
    assert len(said) == 2
    assert all("beta" in line for line in said)


def _joined(stack: ExitStack, world: World, job: str, signed: bytes) -> tuple[dict[str, Site], dict[str, Any]]:
    """The sites that have joined, until the stack closes, and what each said of itself."""
    sites = {s: stack.enter_context(closing(Site(world.homes[s], Local()))) for s in SILOS}
    said = {}
    for silo, site in sites.items():
        met(world.homes["hub"], site)
        said[silo] = unpack_schema(CODEC.unpack(site.handle(job, JOIN + signed), Joined).schema).constants
    return sites, said


def test_a_server_that_carries_the_response_cannot_open_it(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for it under keys of its own and in the name of others, passes on what is for another silo, and makes a
    response up. The control: where nobody looks at the signature of a key, it opens the labels."""
    job, hub = ColumnsJob(world, tmp_path, **AT_SILO), world.homes["hub"]
    offer = make_offer(job.config, hub.roster(NOW), "hub", manifest(job.config).hash, NOW)
    signed, own = sign_offer(offer, hub.identity()), X25519PrivateKey.generate()
    mine = own.public_key().public_bytes_raw()
    with ExitStack() as stack:
        sites, said = _joined(stack, world, offer.job, signed)
        assert "key" not in said["east"]
        keys = {s: (bytes.fromhex(said[s]["key"]), bytes.fromhex(said[s]["signature"])) for s in ("north", "south")}

        def tell(silo: str, message: Any) -> Any:
            return CODEC.unpack_any(sites[silo].handle(offer.job, KNOWN + CODEC.pack(message)))

        for wanted, words in (
            (Wanted("north", mine, keys["north"][1]), "is not signed by 'north'"),
            (Wanted("north", mine, hub.identity().sign(b"x")), "is not signed by 'north'"),
            (Wanted("north", *keys["south"]), "is not signed by 'north'"),
            (Wanted("hub", mine, keys["north"][1]), "and 'hub' is none"),
        ):
            with pytest.raises(ProtocolError, match=words):
                tell("east", wanted)
        with pytest.raises(ProtocolError, match="not told in this way"):
            tell("north", Wanted("south", *keys["south"]))
        for_north, for_south = (tell("east", Wanted(s, *keys[s])) for s in ("north", "south"))
        with pytest.raises(ProtocolError, match="is not sealed for this silo"):
            tell("south", for_north)
        with pytest.raises(ProtocolError, match="not told in this way"):
            tell("south", Known(b"x"))
        order = bytes.fromhex(said["north"]["order"])
        info = digest(b"response-sealed", offer.hash, order, b"south")
        made_up = _SUITE.encrypt(b"x", X25519PublicKey.from_public_bytes(keys["south"][0]), info)
        with pytest.raises(ProtocolError, match="the response is not signed by 'east'"):
            tell("south", Told(made_up, for_south.signature))
        assert tell("north", for_north) == tell("south", for_south)
        assert tell("north", for_north) == tell("south", for_south)  # told again after a lost answer
        monkeypatch.setattr("secure_fvi.deployment.columns_job.signed", lambda *_: True)
        for_me = tell("east", Wanted("north", mine, bytes(64)))
        stolen = _SUITE.decrypt(for_me.sealed, own, digest(b"response-sealed", offer.hash, order, b"north"))
        assert wire.tensors(bytes(stolen), "x")["y"].sum() > 1
        with pytest.raises(ProtocolError, match="the key of 'north' is none"):
            tell("east", Wanted("north", bytes(32), bytes(64)))
        with pytest.raises(ProtocolError, match="another response was sent for this job before"):
            tell("south", Told(made_up, for_south.signature))


@pytest.mark.parametrize("bound", [True, False])
def test_a_silo_that_copies_the_digest_of_an_order_is_told_no_response(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: bool
) -> None:
    """It lists strangers, and the server, to which all state the digest of their people, hands it that of another silo.
    The control is a key that is signed without the people: the labels are sealed for it."""
    job, hub = ColumnsJob(world, tmp_path, **AT_SILO), world.homes["hub"]
    job.files["north"].write_text(job.files["north"].read_text().replace("P-", "Q-"))
    offer = make_offer(job.config, hub.roster(NOW), "hub", manifest(job.config).hash, NOW)
    signed = sign_offer(offer, hub.identity())
    if not bound:
        monkeypatch.setattr(SiteColumns, "_listed_by", lambda self, silo: b"")
    with ExitStack() as stack:
        sites = {s: stack.enter_context(closing(Site(world.homes[s], Local()))) for s in SILOS}

        def joined(silo: str) -> Mapping[str, Any]:
            met(hub, sites[silo])
            return unpack_schema(CODEC.unpack(sites[silo].handle(offer.job, JOIN + signed), Joined).schema).constants

        order = joined("east")["order"]
        inner = columns_job.sorted_order
        monkeypatch.setattr(
            columns_job, "sorted_order",
            lambda prepared, of: bytes.fromhex(order) if of == offer.hash else inner(prepared, of),
        )  # fmt: skip
        said = joined("north")
        assert said["order"] == order
        wanted = Wanted("north", bytes.fromhex(said["key"]), bytes.fromhex(said["signature"]))
        monkeypatch.setattr(columns_job, "sorted_order", inner)
        with pytest.raises(ProtocolError, match="as who lists the same people can") if bound else nullcontext():
            assert sites["east"].handle(offer.job, KNOWN + CODEC.pack(wanted))


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
def test_a_response_at_a_silo_reaches_silos_and_no_server(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, matched: Any
) -> None:
    """Matched without a list of the server's; the posterior is that of one process, byte for byte, no secret is left,
    and nothing that the server sent or was sent holds the labels. The control: told without a seal, they are found."""
    carried, deliver, content = list[bytes](), StreamServer._deliver, list[bytes]()

    def watched(self: StreamServer, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        replies = deliver(self, messages)
        carried.extend([*messages.values(), *replies.values()])
        return replies

    def kept(self: SiteColumns, told: bytes) -> bytes:
        content.append(told)
        return learn(self, told)

    learn = SiteColumns._learn
    monkeypatch.setattr(StreamServer, "_deliver", watched)
    monkeypatch.setattr(SiteColumns, "_learn", kept)
    job = ColumnsJob(world, tmp_path, alignment=MATCHED, **AT_SILO)
    shuffled(job)
    remote = job.run()
    assert set(matched) == set(SILOS)
    labels = wire.tensors(content[0], "x")["y"].numpy().tobytes()
    assert len(set(content)) == 1
    assert any(labels in told for told in content)
    assert not any(labels in message for message in carried)
    assert not any(hashlib.sha256(labels).digest() in message for message in carried)
    assert remote == aligned(job, matched)
    owned(job, world)
    nothing_left(world)


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("at", range(1, 9))
def test_a_silo_that_is_killed_while_people_are_matched(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, matched: Any, at: int
) -> None:
    """At its `at`-th message of matching: it evaluates no place for anybody a second time, for its store has what it
    did; the control is a store that was put away, with which the job is over."""
    job, seen = ColumnsJob(world, tmp_path, alignment=MATCHED), list[bytes]()
    shuffled(job)

    def when(self: Site, job: str, message: bytes) -> bool:
        if self.home.id == "north" and message[:1] == MATCH:
            seen.append(message)
        return len(seen) == at and seen[-1] is message

    dead = killed_once(monkeypatch, Site, "handle", when)
    remote = job.run()
    assert dead
    assert remote == aligned(job, matched)


def losing(monkeypatch: pytest.MonkeyPatch, at: bytes, pattern: str, lost: Callable[[Path], object]) -> None:
    """Once it has answered a message of kind `at`, north's process ends, and `lost` comes over files of the job."""
    handle = Site.handle

    def ending(self: Site, name: str, message: bytes) -> bytes:
        answer = handle(self, name, message)
        if self.home.id == "north" and message[:1] == at:
            self._let_go()
            for path in (self.home.state_folder / "jobs").glob(f"*/{pattern}"):
                lost(path)
        return answer

    monkeypatch.setattr(Site, "handle", ending)


@pytest.mark.slow
@pytest.mark.parametrize("emptied", [False, True])
def test_a_silo_without_its_record_of_evaluations_matches_no_more(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emptied: bool
) -> None:
    """A new key would be another chance to test identifiers. `test_a_silo_that_is_killed_while_people_are_matched` is
    the control: with the record it goes on. An empty store is a new one to SQLite, and to the control, which is asked
    for its sizes again."""
    job = ColumnsJob(world, tmp_path, alignment=MATCHED)
    lost = (lambda path: path.write_bytes(b"")) if emptied else Path.unlink
    losing(monkeypatch, MATCH, "matching.evaluated*", lost)
    words = "RecordError; the site's log says more" if emptied else "what it evaluated for them is gone: a new job is"
    with pytest.raises(ProtocolError, match=words):
        job.run("lost")
    if emptied:
        inner = holding_module.open_held
        monkeypatch.setattr(columns_job, "open_held", lambda *a, begun=False, **more: inner(*a, **more))
        with pytest.raises(ProtocolError, match="no sizes were agreed yet"):
            job.run("control")


@pytest.mark.later
@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("name", ["response", "matching.evaluated"])
def test_a_file_of_a_columns_job_that_is_gone_is_named(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Once a session was opened: the site heard that people and response were not known yet, at each start of the
    server. The control is the file put back, with which the job goes on."""

    def stop(progress: Progress) -> None:
        if progress.round == 3:
            raise Stopped

    job = ColumnsJob(world, tmp_path, alignment=MATCHED, algorithm=SHARED)
    with pytest.raises(Stopped):
        job.run(on_round=stop)
    (path,) = (world.homes["north"].state_folder / "jobs").glob(f"*/{name}")
    kept = path.read_bytes()
    path.unlink()
    with pytest.raises(ProtocolError, match="RecordError; the site's log says more"):
        job.run()
    assert f"'{path.parent}' is gone, or an older copy; put its newest copy back" in caplog.text
    path.write_bytes(kept)
    assert job.run()


@pytest.mark.later
@pytest.mark.parametrize("rule", [True, False], ids=["", "control"])
@pytest.mark.parametrize("name", ["response", "predictor"])
def test_an_emptied_file_of_a_columns_job_counts_against_no_data(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, rule: bool
) -> None:
    """The server hears that it is the site's own record. In the controls it hears that data do not fit, and the job
    counts; or that the site's predictor is another."""
    words = {"response": "data do not fit", "predictor": "its predictor is not that"}[name]
    if not rule:
        monkeypatch.setattr(columns_job, "own_file", lambda path: nullcontext())
        monkeypatch.setattr(columns_job, "own_bytes", lambda path, length: path.read_bytes())
    job = ColumnsJob(world, tmp_path, algorithm={**SHARED, "rounds": 2})
    losing(monkeypatch, KNOWN, name, lambda path: path.write_bytes(b""))
    with pytest.raises(ProtocolError, match="RecordError; the site's log says more" if rule else words):
        job.run()
    (record,) = verify(world.homes["north"].log_file).jobs.values()
    assert (UNANSWERABLE in record.omissions) == (not rule and name == "response")


@pytest.mark.parametrize("rule", [True, False], ids=["", "control"])
def test_a_disk_that_is_full_as_a_response_is_told_is_no_fault_of_the_data(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: bool
) -> None:
    """The silo that has it tells it once there is space, and its site counts no job that its data could not answer. In
    the control to keep it is taken for reading data: the job counts, and the server hears that data do not fit."""
    job, hub, write_whole = ColumnsJob(world, tmp_path, **AT_SILO), world.homes["hub"], columns_job.write_atomically
    if not rule:
        learn = SiteColumns._learn

        def as_data(self: SiteColumns, content: bytes) -> bytes:
            with columns_job._of_data("east"):
                return learn(self, content)

        monkeypatch.setattr(SiteColumns, "_learn", as_data)
    offer = make_offer(job.config, hub.roster(NOW), "hub", manifest(job.config).hash, NOW)
    signed = sign_offer(offer, hub.identity())

    def full(path: Path, content: bytes, private: bool = False) -> None:
        if path.name == "response":
            raise OSError(errno.ENOSPC, "No space left on device")
        write_whole(path, content, private)

    with ExitStack() as stack:
        sites, said = _joined(stack, world, offer.job, signed)
        wanted = Wanted("north", *(bytes.fromhex(said["north"][name]) for name in ("key", "signature")))
        with monkeypatch.context() as disk:
            disk.setattr(columns_job, "write_atomically", full)
            with pytest.raises(OSError if rule else DataError):
                sites["east"].handle(offer.job, KNOWN + CODEC.pack(wanted))
        assert CODEC.unpack(sites["east"].handle(offer.job, KNOWN + CODEC.pack(wanted)), Told)
        log = sites["east"]._trail.chain.jobs[offer.job]
        assert (UNANSWERABLE in log.omissions) == (not rule)


@pytest.mark.later
def test_how_often_and_against_how_long_a_list_a_site_is_matched(world: World, tmp_path: Path) -> None:
    """Refusals by what the policy counts, which a state folder that was put back, or is gone, makes no smaller; the
    control is every other test here."""
    job = ColumnsJob(world, tmp_path, alignment=MATCHED)
    job.allow("north", {"largest": PEOPLE + 63})
    with pytest.raises(ProtocolError, match=f"a list of {PEOPLE + 64} places .* silo 'north' allows {PEOPLE + 63}"):
        job.run("first")
    job.allow("north", {"fewest": PEOPLE + 1})  # the server compares the lists, and may name one person
    with pytest.raises(ProtocolError, match=f"{PEOPLE} people were matched, .* no fewer than {PEOPLE + 1}"):
        job.run("few")
    shutil.rmtree(world.homes["north"].state_folder)
    job.allow("north", {"matchings": 1})
    with pytest.raises(ProtocolError, match=r"data set 'data' was matched for 2 jobs \(matchings = 1\), each of which"):
        job.run("second")


@pytest.mark.later
@pytest.mark.parametrize("once_joined", [False, True])
def test_a_job_that_another_site_refuses_uses_up_no_matching(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, once_joined: bool
) -> None:
    """South's policy is of other columns, and nobody is matched: put right, the next job is matched, by sites that
    allow one. In the control jobs count once a site has joined them, and after one that came to nothing none is."""
    inner = SiteColumns._begin_matching

    def counted(self: SiteColumns) -> None:
        inner(self)
        if not self._counted:
            self._tell(COUNTED, "people")

    if once_joined:
        monkeypatch.setattr(SiteColumns, "_begin_matching", counted)
    job = ColumnsJob(world, tmp_path, alignment=MATCHED, algorithm={**SHARED, "rounds": 2})
    job.allow("north", {"matchings": 1})
    job.allow("south", {"alignment": {**SORTED, "column": "name"}})
    with pytest.raises(ProtocolError, match="silo 'south' refused"):
        job.run("refused")
    job.allow("south")
    with pytest.raises(ProtocolError, match="was matched for 1 jobs") if once_joined else nullcontext():
        job.run("matched")
    with pytest.raises(ProtocolError, match=r"was matched for 1 jobs \(matchings = 1\)"):
        job.run("another")


@pytest.mark.later
@pytest.mark.parametrize("gone", [True, False])
def test_a_job_is_matched_once_whatever_became_of_its_folder(world: World, tmp_path: Path, gone: bool) -> None:
    """The site's log has that it was: a folder that is gone, or of before, would have it matched under another key. The
    control is one that is there."""
    job, hub, home = ColumnsJob(world, tmp_path, alignment=MATCHED), world.homes["hub"], world.homes["east"]
    offer = make_offer(job.config, hub.roster(NOW), "hub", manifest(job.config).hash, NOW)
    for again in (False, True):
        with closing(Site(home, Local())) as site:
            met(hub, site)
            site.handle(offer.job, JOIN + sign_offer(offer, hub.identity()))
            assert (site._job._matching is None) is (again and gone)  # type: ignore[union-attr]
            assert site._stand().phase == "joining"  # for who asks how it stands before people are known
            if not again:
                site.handle(offer.job, MATCH + _CODEC.pack(SizeRequest()))
            if again and gone:
                with pytest.raises(ProtocolError, match="what it evaluated for them is gone: a new job is needed"):
                    site.handle(offer.job, MATCH)
        if gone:
            shutil.rmtree(home.state_folder)
    if not gone:
        (home.state_folder / "jobs" / offer.job / "predictor").write_bytes(bytes(32))
        with closing(Site(home, Local())) as site:
            met(hub, site)
            with pytest.raises(PolicyError, match="its predictor is not that which the job began with"):
                site.handle(offer.job, JOIN + sign_offer(offer, hub.identity()))


def test_explain_says_how_many_identifiers_all_others_test(world: World, tmp_path: Path) -> None:
    """`largest` bounds each list. The control: files in one order, where nobody's list is tested against another."""
    found, other = (
        "\n".join(_alignment_lines(ColumnsJob(world, tmp_path, allow=False, alignment=how).config))
        for how in (MATCHED, SORTED)
    )
    assert f"all together at most {len(SILOS)} times 'largest'" in found  # the other silos' lists, and the server's
    alone = "\n".join(_alignment_lines(ColumnsJob(world, tmp_path, False, **AT_SILO, alignment=MATCHED).config))
    assert f"all together at most {len(SILOS) - 1} times 'largest'" in alone  # whose server has no list
    assert ["its own file which silos hold it" in text for text in (found, alone)] == [True, False]
    assert "largest" not in other
    assert ["from two jobs of which one lacks a silo" in text for text in (found, other)] == [True, False]


@pytest.mark.parametrize(
    ("sums", "job", "tried"),
    [
        ({"masks": False}, {"algorithm": SHARED}, True),
        ({"scheme": "ckks", "masks": False}, {"algorithm": SHARED}, True),
        ({}, {"algorithm": SHARED}, False),
        ({"masks": False}, AT_SILO, False),
    ],
)
def test_explain_says_that_a_key_holder_of_unmasked_sums_can_try_labels(
    world: World, tmp_path: Path, sums: dict[str, Any], job: dict[str, Any], tried: bool
) -> None:
    """It has the totals, of which and the labels a broadcast is made, and hears its digest. The controls: masks, under
    which it has no total; a response at a silo, of which no broadcast is made."""
    made = ColumnsJob(world, tmp_path, False, **job, aggregation={"kind": "homomorphic", **sums})
    found = "\n".join(_lines(disclosure_of(made.config)))
    assert ("the key holder, who has the totals, can try the labels" in found) == tried
    assert ("; the key holder\n" in found) == bool(sums)


def _spoil(job: ColumnsJob, site: str, cell: str) -> None:
    """Put `cell` where the first number of the seventh person is."""
    lines = [line.split(",") for line in job.files[site].read_text().splitlines()]
    lines[7][1] = cell
    job.files[site].write_text("\n".join(map(",".join, lines)) + "\n")


@pytest.mark.parametrize("private", [True, False])
def test_a_cell_that_is_no_number_is_one_persons_alone(world: World, tmp_path: Path, private: bool) -> None:
    """Whether a site joins would tell of that person, without noise. The control is a job without privacy, which the
    site does not join."""
    privacy = {"unit": "record", "epsilon": 1.0, "delta": 1e-5, "clipping_norm": 1.0, "data_set": "data"}
    more: dict[str, Any] = {"privacy": privacy} if private else {}
    job = ColumnsJob(world, tmp_path, alignment=MATCHED, algorithm={**VERTICAL, "response": "shared"}, **more)
    hub, home = world.homes["hub"], world.homes["east"]
    _spoil(job, "east", "none")
    offer = make_offer(job.config, hub.roster(NOW), "hub", manifest(job.config).hash, NOW)
    with closing(Site(home, Local())) as site:
        met(hub, site)
        with nullcontext() if private else pytest.raises(DataError):
            site.handle(offer.job, JOIN + sign_offer(offer, hub.identity()))
    unfit = home.state_folder / "jobs" / offer.job / "unfit"
    assert unfit.exists() == private  # told to the site alone


@pytest.mark.parametrize("private", [True, False])
def test_a_cell_of_bytes_in_a_sqlite_file_is_one_persons_alone(world: World, tmp_path: Path, private: bool) -> None:
    """Likewise, of a file of which ids and columns were read apart, the ids as if nobody's cell could be wrong. The
    controls: a job without privacy, and that reading, both of which refuse the table."""
    privacy = {"unit": "record", "epsilon": 1.0, "delta": 1e-5, "clipping_norm": 1.0, "data_set": "data"}
    more: dict[str, Any] = {"privacy": privacy} if private else {}
    job = ColumnsJob(world, tmp_path, alignment=MATCHED, algorithm={**VERTICAL, "response": "shared"}, **more)
    hub, home, path = world.homes["hub"], world.homes["east"], tmp_path / "east.sqlite"
    with closing(sqlite3.connect(path)) as file, job.files["east"].open(newline="") as table:
        file.execute("CREATE TABLE people (person TEXT, a REAL, b REAL)")
        file.executemany("INSERT INTO people VALUES (?, ?, ?)", list(csv.reader(table))[1:])
        file.execute("UPDATE people SET a = x'00' WHERE person = 'P-1007'")
        file.commit()
    job.allow("east", {"path": str(path)})
    offer = make_offer(job.config, hub.roster(NOW), "hub", manifest(job.config).hash, NOW)
    with closing(Site(home, Local())) as site:
        met(hub, site)
        with nullcontext() if private else pytest.raises(DataError):
            site.handle(offer.job, JOIN + sign_offer(offer, hub.identity()))
        assert (UNANSWERABLE in site._trail.chain.jobs[offer.job].omissions) != private
    with pytest.raises(DataError, match="another type"):
        check_table(path, Dictionary({"person": Column("id")}))


def _pin(home: Home, cohort: str) -> None:
    """Have the policy want these rows of its data set."""
    text = home.policy_file.read_text()
    home.policy_file.write_text(text.replace("[[data]]\n", f'[[data]]\ncohort = "{cohort}"\n'))


@pytest.mark.later
@pytest.mark.parametrize("private", [True, False])
def test_rows_that_a_policy_does_not_want_are_nobodys_under_privacy(
    world: World, tmp_path: Path, private: bool
) -> None:
    """One person's value is another than in the job before: a site that did not join would tell of it, without noise.
    It answers with noise alone. The control is a job without privacy, which the site does not join."""
    privacy = {"unit": "record", "epsilon": 0.1, "delta": 1e-5, "clipping_norm": 1.0, "data_set": "data"}
    more: dict[str, Any] = {"privacy": privacy} if private else {}
    job = ColumnsJob(world, tmp_path, alignment=MATCHED, algorithm={**VERTICAL, "response": "shared"}, **more)
    hub, home = world.homes["hub"], world.homes["east"]
    _pin(home, "pinned")
    for spoilt in (False, True):
        if spoilt:
            _spoil(job, "east", "9.25")
        offer = make_offer(job.config, hub.roster(NOW), "hub", manifest(job.config).hash, NOW)
        with closing(Site(home, Local())) as site:
            met(hub, site)
            with pytest.raises(DataError) if spoilt and not private else nullcontext():
                site.handle(offer.job, JOIN + sign_offer(offer, hub.identity()))
                assert site._job is not None
                assert site._job.unfit.whole == spoilt  # told to the site alone


BRANCHES = """import pyro
from pyro.distributions import Normal


def effect(a, b):
    slope = pyro.sample("slope", Normal(0.0, 1.0))
    return a * slope if slope > 0.05 else b * slope
"""


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("looked", [True, False], ids=["", "control"])
def test_a_predictor_of_which_no_posterior_can_be_drawn_is_refused_before_the_rounds(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked: bool
) -> None:
    """By a line to its site; nobody's records are said to be at fault. In the control nobody looks: all rounds are
    carried, and the end is answered all the same, with q and without its moments."""
    if not looked:
        monkeypatch.setattr("secure_fvi.column_silo.check_predictor", lambda *_: None)
    own = tmp_path / "own.py"
    own.write_text(BRANCHES)
    silos = [{"id": s, "data": str(tmp_path / f"{s}.csv")} for s in SILOS]
    silos[0]["predictor"] = f"{own}:effect"
    job = ColumnsJob(world, tmp_path, silo=silos, algorithm={**VERTICAL, "rounds": 2}, run={"compile": False})
    job.allow("east", {"predictor": silos[0]["predictor"]}, sandbox="off")
    with pytest.raises(ProtocolError, match="silo 'east' refused") if looked else nullcontext():
        job.run()
    (record,) = verify(world.homes["east"].log_file).jobs.values()
    assert UNANSWERABLE not in record.omissions
    kept = [set(load_file(path)) for path in (world.homes["east"].path / "results").glob("*.safetensors")]
    assert [("own/theta/loc" in names, "mean/slope" in names) for names in kept] == [(True, False)] * (not looked)


@pytest.mark.parametrize("rule", [True, False], ids=["", "control"])
def test_options_that_do_not_go_together_are_refused_before_people_are_matched(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: bool
) -> None:
    """Of a server that does not look at them itself: the site says that they are the job's, and nobody's identifiers
    are tested. In the control they are looked at once people are matched, and the job counts as one that the site's
    records could not answer."""
    if not rule:
        alone = columns_job.one_person
        monkeypatch.setattr(columns_job, "one_person", lambda of, offer, privacy, *more: alone(of, offer, None, *more))
    privacy = {"unit": "record", "epsilon": 5.0, "delta": 1e-6, "clipping_norm": 1.0}
    job = ColumnsJob(world, tmp_path, alignment=MATCHED, algorithm={**VERTICAL, "local_steps": 2}, privacy=privacy)
    hub = world.homes["hub"]
    roster = hub.roster(NOW)
    offer = make_offer(job.config, roster, "hub", manifest(job.config).hash, NOW)
    signed = sign_offer(offer, hub.identity())
    people = read_aligned(job.files["response"], "response.data", job.config.alignment)[1]  # type: ignore[arg-type]
    parties = columns_job.matching_roster(roster, offer)
    own = MatchingSilo(parties, "hub", hub.identity(), people)
    with ExitStack() as stack:
        sites = {s: stack.enter_context(closing(Site(world.homes[s], Local()))) for s in SILOS}
        for site in sites.values():
            met(hub, site)

        def join(silo: str) -> bytes:
            return sites[silo].handle(offer.job, JOIN + signed)

        if rule:
            with pytest.raises(JobError, match="local_steps = 2 is not available under privacy"):
                join("east")
        else:
            for silo in SILOS:
                assert join(silo)
            carry(
                Matcher(parties).match(),
                lambda asked: {
                    n: own.handle(m) if n == "hub" else sites[n].handle(offer.job, MATCH + m) for n, m in asked.items()
                },
            )
            opening = Open(list(SILOS), [bytes(32)] * 3, bytes(32), 0)
            with pytest.raises(InputError, match="local_steps = 2 is not available under privacy"):
                sites["east"].handle(offer.job, OPEN + CODEC.pack(opening))
        log = sites["east"]._trail.chain.jobs[offer.job].omissions
        assert (COUNTED in log, UNANSWERABLE in log) == (not rule, not rule)


@pytest.mark.parametrize("rule", [True, False], ids=["", "control"])
def test_jobs_of_other_columns_close_no_data_set_that_is_pinned(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: bool
) -> None:
    """A vertical job, whose rows are pinned, and a program's, which reads other columns of the same file: three offers
    of that are refused by the policy. In the control they are jobs that the records could not answer, after which the
    first is not let in either."""
    if not rule:
        held_to = Cohort._check
        monkeypatch.setattr(Cohort, "_check", lambda self, silo, wanted, told: held_to(self, silo, wanted, False))
    vertical, own = ColumnsJob(world, tmp_path), tmp_path / "own.py"
    for path in vertical.files.values():
        path.write_text(path.read_text().replace("P-", ""))  # every cell of a program's table is a number
    own.write_text(
        "import pyro\nfrom pyro.distributions import Normal\n\n\ndef program(person, a, b):\n"
        "    mu = pyro.sample('mu', Normal(0.0, 1.0))\n    with pyro.plate('records', len(a)):\n"
        "        pyro.sample('y', Normal(mu, 1.0), obs=a)\n"
    )
    (tmp_path / "other").mkdir()
    model = {"function": f"{own}:program", "record_plate": "records"}
    silos = [{"id": s, "data": str(vertical.files[s])} for s in SILOS]
    other = Job(world, tmp_path / "other", False, model=model, partition=None, silo=silos, algorithm={"name": "sfvi"})
    hashes = [manifest(job.config).hash.hex() for job in (vertical, other)]
    vertical.allow(
        "east", {"cohort": "pinned"}, algorithms=["vertical", "sfvi"], sandbox="off", disclosures=list(DISCLOSURES),
        model=[{"hash": hashes[0]}, {"hash": hashes[1], "function": model["function"]}],
    )  # fmt: skip
    hub = world.homes["hub"]
    with closing(Site(world.homes["east"], Local())) as site:

        def join(job: Job) -> Joined:
            offer = make_offer(job.config, hub.roster(NOW), "hub", manifest(job.config).hash, NOW)
            met(hub, site)
            return CODEC.unpack(site.handle(offer.job, JOIN + sign_offer(offer, hub.identity())), Joined)

        assert join(vertical).nonce
        for _ in range(3):
            with pytest.raises(PolicyError if rule else DataError, match="other columns" if rule else "not those"):
                join(other)
        with nullcontext() if rule else pytest.raises(PolicyError, match="max_unanswered = 3"):
            assert join(vertical).nonce


def test_an_outcome_with_gaps_is_refused_by_rows_and_a_remedy_that_is_there(tmp_path: Path) -> None:
    """A table of a vertical job has no dictionary, so that no option leaves its rows out. The control has no gap."""
    file = tmp_path / "t.csv"
    for cells, words in (("1", ""), ("", "column 'died': a gap in 1 row (2); fill them in, or leave"), ("no", "(2)")):
        file.write_text(f"person,died\na b,0\nc  d,{cells}\n")
        with nullcontext() if not words else pytest.raises(InputError) as refused:
            assert set(read_aligned(file, "response.data", Alignment(column="person"))[0]) == {"died"}
        assert refused is None or words in str(refused.value)
        assert refused is None or "each cell has to be a number" in str(refused.value)


@pytest.mark.slow
def test_a_private_job_is_charged_to_the_ledgers(world: World, tmp_path: Path) -> None:
    """Of a shared response: each round is two releases of each silo, its own noised gradient and its rows. One person's
    cell that is no number ends no job and tells nobody but the site."""
    privacy = {"unit": "record", "epsilon": 8.0, "delta": 1e-5, "clipping_norm": 1.0, "data_set": "data"}
    job = ColumnsJob(
        world, tmp_path, alignment=MATCHED, privacy=privacy, algorithm={**VERTICAL, "response": "shared", "rounds": 4}
    )
    _spoil(job, "east", "none")
    _pin(world.homes["south"], "0" * 64)  # other rows than its policy wants: noise alone, charged as an answer is
    job.run()
    for silo in SILOS:
        (chain,) = verify_ledger(world.homes[silo].ledger_file, silo)
        (record,) = chain.jobs.values()
        assert record.released == {"auxiliary": 4, "hidden": 3}


@pytest.mark.slow
def test_adult_over_five_silos_in_processes_of_their_own(tmp_path: Path) -> None:
    """30,000 people of the census, in batches of 512, the outcome at the server: posterior and each silo's own are
    those of one process, byte for byte, and a silo uploads 8 bytes a person of the batch and its sum's overhead. The
    control: another seed's posterior is another."""
    rounds, batch = 40, 512
    job = census(tmp_path, rounds=rounds, batch_size=batch)
    parties = Parties(tmp_path / "parties", job, [silo["id"] for silo in job["silo"]])
    for silo in parties.silos:
        allow(parties.homes[silo], parties.config, disclosures=["person_rows", "sampled_records"])
    try:
        for party in parties.homes:
            parties.start(party)
        assert parties.wait(HUB, 1200) in (0, 4), parties.log(HUB)[-2000:]
        time.sleep(2.0)  # the silos keep their own once the server has their last answers
    finally:
        parties.stop()
    assert (parties.out / "posterior.safetensors").read_bytes() == posterior(parties.config, kept_in=tmp_path / "alone")
    assert posterior(parse({**job, "seed": 4}, "another")) != (parties.out / "posterior.safetensors").read_bytes()
    alone = sorted((tmp_path / "alone" / "silos").glob("*.safetensors"))
    for silo, file in zip(parties.silos, alone, strict=True):
        (kept,) = (parties.homes[silo].path / "results").glob("*.safetensors")
        assert all(torch.equal(load_file(kept)[f"own/{name}"], value) for name, value in load_file(file).items())
    up = read_json(parties.out / "result.json")["aggregation"]["bytes_up_per_silo"]
    assert 8 * batch * rounds < up < 2 * 8 * batch * rounds


class Paper(NamedTuple):
    """A model of the vertical paper as a job of three silos. tables: by file, a column's name and its numbers."""

    model: dict[str, Any]
    tables: dict[str, dict[str, torch.Tensor]]
    algorithm: dict[str, Any]
    predictor: str = ""  # a silo's own program of its columns

    def job(self, world: World, folder: Path) -> ColumnsJob:
        silos, offset = [], {"offset": "offset"} if "offset" in self.tables["response"] else {}
        for silo in SILOS:
            own, columns = folder / f"{silo}.py", [c for c in self.tables[silo] if c != "level"]
            own.write_text(self.predictor.format(all=", ".join(self.tables[silo]), columns=", ".join(columns)))
            silos.append({"id": silo, "data": str(folder / f"{silo}.csv")})
            silos[-1] |= {"predictor": f"{own}:effect"} if self.predictor else {}
        response = {"data": str(folder / "response.csv"), "column": "y", **offset}
        changes = {"model": self.model, "silo": silos, "response": response, "algorithm": self.algorithm}
        job = ColumnsJob(world, folder, **changes)
        for name, columns_of in self.tables.items():
            rows = zip(*(values.tolist() for values in columns_of.values()), strict=True)
            write(job.files[name], ["person", *columns_of], [[f"P-{1000 + i}", *row] for i, row in enumerate(rows)])
        for silo in silos if self.predictor else ():
            job.allow(silo["id"], {"predictor": silo["predictor"]}, sandbox="off")
        return job


def _columns(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"c{i}": column for i, column in enumerate(x.T)}


def paper_logistic() -> tuple[Paper, Data]:
    data = make_data(3, 200, 6)
    tables = {s: _columns(data.x[:, 2 * j : 2 * j + 2]) for j, s in enumerate(SILOS)} | {"response": {"y": data.y}}
    algorithm = {**VERTICAL, "rho": 0.05, "rounds": 1000, "learning_rate": 0.05}
    return Paper({"likelihood": "bernoulli"}, tables, algorithm), data


def paper_poisson() -> tuple[Paper, Areas]:
    """The first silo's columns at one site, the second one's at two."""
    data = simulate(100, 1.0, 400)
    parts = (data.x[0], data.x[1, :, :1], data.x[1, :, 1:])
    tables = {s: {**_columns(x), "level": data.level} for s, x in zip(SILOS, parts, strict=True)}
    tables["response"] = {"y": data.y, "offset": data.offset}
    model = {"likelihood": "poisson", "options": {"intercept_scale": SCALE}}
    algorithm = {**VERTICAL, "rho": 3**-0.5, "rounds": 800, "learning_rate": 0.05}
    program = (
        "import torch\n\nfrom secure_fvi.models.vertical_programs import slopes_by_level\n\n\ndef effect({all}):\n"
        "    return slopes_by_level(torch.stack([{columns}], -1), level.long())\n"
    )
    return Paper(model, tables, algorithm, program), data


def paper_heart() -> tuple[Paper, None]:
    """Its network, weights as points but for the last layer's, over made-up columns."""
    x = torch.randn(120, 11, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    parts = (x[:, :5], x[:, 5:8], x[:, 8:])
    tables = {s: _columns(part) for s, part in zip(SILOS, parts, strict=True)}
    tables["response"] = {"y": (x[:, 0] * x[:, 6] > 0).double()}
    program = (
        "import torch\n\nfrom secure_fvi.models.heart import split_network\n\n\ndef effect({all}):\n"
        "    return split_network((8, 8, 2))(torch.stack([{columns}], -1))\n"
    )
    return Paper({"likelihood": "bernoulli"}, tables, VERTICAL, program), None


def nuts_logistic(data: Data) -> list[torch.Tensor]:
    """Draws of the silos' coefficients on joined columns, by silo."""

    def program() -> None:
        b = pyro.sample("b", Normal(data.x.new_zeros(()), 1.0))
        beta = pyro.sample("beta", Normal(data.x.new_zeros(6), 1.0).to_event(1))
        pyro.factor("y", torch.distributions.Bernoulli(logits=b + data.x @ beta).log_prob(data.y).sum())

    beta = sample_nuts(program, "records", ["b", "beta"], chains=1, warmup=200, draws=800).sites["beta"].flatten(0, 1)
    return list(beta.split(2, 1))


def nuts_poisson(data: Areas) -> list[torch.Tensor]:
    beta = sample(data, 1.0, 150, 400)[0].beta
    return [beta[:, 0], beta[:, 1, :, :1], beta[:, 1, :, 1:]]


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize(
    ("model", "nuts"), [(paper_logistic, nuts_logistic), (paper_poisson, nuts_poisson), (paper_heart, None)]
)
def test_the_papers_three_models_between_institutions(world: World, tmp_path: Path, model: Any, nuts: Any) -> None:
    """Hassan et al. (2024), sections 5.1 to 5.3: the posterior of one process, byte for byte, also each silo's own; and
    that of NUTS on joined columns, for which a network has too many modes. `pytest -s` prints how far off it is."""
    paper, data = model()
    job = paper.job(world, tmp_path)
    assert job.run() == job.local()
    own = owned(job, world)
    if nuts is None:
        return
    draws = nuts(data)
    both = [(own[silo], of) for silo, of in zip(SILOS, draws, strict=True)]
    error = torch.cat([((found["mean/beta"] - of.mean(0)) / of.std(0)).flatten().abs() for found, of in both])
    width = torch.cat([(found["sd/beta"] / of.std(0)).flatten() for found, of in both]).mean()
    print(f"{model.__name__}: {error.mean():.2f} sd from NUTS, {error.max():.2f} at most; sds {width:.2f} of NUTS's")
    assert error.mean() < 0.2
    assert 0.85 < width < 1.15


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("response", ["private", "shared"])
def test_the_posterior_is_that_of_one_process(world: World, tmp_path: Path, response: str) -> None:
    """Masked sums, the response at the server, or made known to all. Each silo keeps its own coefficients, which are
    those of one process too; the server has none of them. Logs agree, and no secret is left."""
    job = ColumnsJob(world, tmp_path, algorithm={**VERTICAL, "response": response})
    assert job.run() == job.local()
    assert owned(job, world)["east"]["mean/beta"].shape == (2,)
    assert not list((tmp_path / "remote" / "silos").iterdir())
    nothing_left(world)
    for silo in SILOS:
        found = compare(world.homes[silo].log_file, world.homes["hub"].log_file)
        assert (found.lost_answers, found.unanswered) == (0, 0)
        assert found.agreed > VERTICAL["rounds"]  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "aggregation", "model"),
    [
        ({"name": "soul", "rounds": 12, "response": "private"}, MASKED, {"likelihood": "poisson"}),
        ({"name": "soul", "rounds": 12, "model": "power"}, MASKED, {"likelihood": "bernoulli"}),
        ({**VERTICAL, "model": "power", "response": "shared"}, MASKED, {"likelihood": "bernoulli"}),
        ({**VERTICAL, "auxiliary": {"kind": "amortised"}, "response": "shared"}, PLAIN, {"likelihood": "gaussian"}),
        ({**VERTICAL, "batch_size": 16, "local_steps": 2}, MASKED, {"likelihood": "categorical", **TWO}),
        ({**VERTICAL, "participation": 0.6, "max_staleness": 2}, PLAIN, {"likelihood": "bernoulli"}),
    ],
)  # fmt: skip
def test_every_kind_of_vertical_job_is_carried(
    world: World, tmp_path: Path, algorithm: dict[str, Any], aggregation: dict[str, Any], model: dict[str, Any]
) -> None:
    job = ColumnsJob(world, tmp_path, algorithm=algorithm, aggregation=aggregation, model=model)
    for site in SILOS:
        job.allow(site, disclosures=["person_rows", "changing_cohorts", "sampled_records"])
    assert job.run() == job.local()
    owned(job, world)


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
def test_homomorphic_sums_carry_columns_too(tmp_path: Path, matched: Any) -> None:
    """With a key holder, who has no part in matching; the posterior is that of one process."""
    world = new_world(tmp_path / "world", holder=True)
    algorithm = {**VERTICAL, "rounds": 3, "response": "shared"}
    job = ColumnsJob(world, tmp_path, alignment=MATCHED, algorithm=algorithm, aggregation={"kind": "homomorphic"})
    shuffled(job)
    remote = job.run()
    assert remote == aligned(job, matched)


def test_what_a_policy_does_not_list_is_refused_by_name(world: World, tmp_path: Path) -> None:
    """By the one function that judges jobs, in a world whose policies allow this one: the control."""
    job = ColumnsJob(world, tmp_path)
    home = world.homes["north"]
    roster, server = home.roster(NOW), "hub"

    def said(rule: dict[str, Any] | None = None, config: Config = job.config, **changes: Any) -> str:
        job.allow("north", rule, **changes)
        offer = make_offer(config, roster, server, manifest(job.config).hash, NOW)
        try:
            check(offer, read_policy(home.policy_file), "silo", roster, "north")
        except PolicyError as error:
            return str(error)
        return ""

    assert said() == ""
    own = {"predictor": "own.py:effect"}
    text = said(own, sandbox="off")
    assert "its predictor here is all columns, linearly, (data set 'data' lists a program of its own)" in text
    assert str(home.path) not in text  # a server hears it
    silos = tuple(s.model_copy(update=own if s.id == "north" else {}) for s in job.config.silo)
    theirs = job.config.model_copy(update={"silo": silos})
    assert "its predictor here is a program (data set 'data' lists none)" in said(config=theirs)
    assert said(own, theirs, sandbox="off") == ""
    assert "would run in the process that holds this site's keys and data, and sandbox = 'required'" in said(
        own, theirs
    )
    for rule, words in (
        ({"alignment": None}, "and data set 'data' lists no alignment"),
        ({"alignment": {**SORTED, "column": "name"}}, "it finds people by column = 'person', how = 'sorted' (data set"),
        (
            {"alignment": {**SORTED, "rules": ["gb.nhs"]}},
            "lists column = 'person', how = 'sorted', rules = ['gb.nhs'])",
        ),
        ({"alignment": {"column": "person"}}, "lists column = 'person', how = 'matching')"),
        ({"path": None, "alignment": None}, "data set 'data' has no path, and a vertical job reads a file"),
    ):
        assert words in said(rule)
    assert "'person_rows' by name = 'vertical', auxiliary = Auto()" in said(disclosures=[])
    for words in ("R^2 1.00", "auxiliary kind 'amortised'", "[privacy] alone", "not three", "whether it takes part"):
        assert words in said(disclosures=[])
    assert "tell the other silos nothing as the outcome (data set 'data' lists 'died')" in said({"response": ["died"]})
    written, its = job.config.model_dump(mode="json", exclude_none=True), {"silo": "north", "column": "b"}
    at_silo = parse({**written, **AT_SILO, "response": its}, "job")
    assert "tell the other silos 'b' as the outcome (data set 'data' lists nothing)" in said(config=at_silo)
    assert said({"response": ["b"]}, at_silo) == ""
    other = manifest(job.config.model_copy(update={"model": Model(likelihood="poisson")})).hash.hex()
    assert "is not accepted (allowed: " in said(model=[{"hash": other}])


@pytest.mark.later
def test_people_in_another_order_are_refused(world: World, tmp_path: Path) -> None:
    """One silo has other people than the response's file, in as many rows; and a file whose rows are not sorted is its
    site's to hear of. The control is every other test here."""
    job = ColumnsJob(world, tmp_path)
    lines = job.files["south"].read_text().splitlines()
    job.files["south"].write_text("\n".join([*lines[:-1], lines[-1].replace("P-", "Q-")]) + "\n")
    with pytest.raises(
        ProtocolError, match=r"silo 'south' does not hold the people of response.data in the same order"
    ):
        job.run("first")
    job.files["south"].write_text("\n".join([lines[0], *reversed(lines[1:])]) + "\n")
    with pytest.raises(ProtocolError, match="silo 'south' refused: its data do not fit the model"):
        job.run("second")


@pytest.mark.later
@pytest.mark.parametrize(
    ("how", "spoil", "words"),
    [
        (MATCHED, lambda lines: lines[:1], "it has no records"),
        (MATCHED, lambda lines: [], "the first line must name the columns"),
        (MATCHED, lambda lines: [lines[0].replace("person", "id"), *lines[1:]], "the table has no column 'person'"),
        (MATCHED, lambda lines: [*lines[:-1], lines[-1].replace("P", "\xc4")], "not a CSV file in UTF-8: save it as"),
        (SORTED, lambda lines: [*lines, lines[-1]], "2 rows share theirs with another"),
        (SORTED, lambda lines: [lines[0], "," + lines[1].partition(",")[2], *lines[2:]], "1 rows have no identifier"),
        (SORTED, lambda lines: [lines[0], *reversed(lines[1:])], "39 stand before a smaller one"),
    ],
)
def test_files_that_name_no_people_are_refused_by_a_line(
    world: World, tmp_path: Path, how: dict[str, str], spoil: Callable[[list[str]], list[str]], words: str
) -> None:
    """To the site alone, before anything of it is written down. The control: the file put right, the same offer is
    joined."""
    job, hub, home = ColumnsJob(world, tmp_path, alignment=how), world.homes["hub"], world.homes["east"]
    right = job.files["east"].read_text()
    job.files["east"].write_bytes("".join(f"{line}\n" for line in spoil(right.splitlines())).encode("latin-1"))
    offer = make_offer(job.config, hub.roster(NOW), "hub", manifest(job.config).hash, NOW)
    with closing(Site(home, Local())) as site:
        met(hub, site)
        with pytest.raises(DataError, match=words) as refused:
            site.handle(offer.job, JOIN + sign_offer(offer, hub.identity()))
        assert "P-1000" not in str(refused.value)
        folder = home.state_folder / "jobs" / offer.job
        assert not any((folder / name).exists() for name in ("cohort", "matching.evaluated", "session"))
        job.files["east"].write_text(right)
        assert site.handle(offer.job, JOIN + sign_offer(offer, hub.identity()))


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
def test_a_server_stopped_while_people_are_matched_goes_on_whatever_the_order_of_rows(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, matched: Any
) -> None:
    """A site's rows stand in another order when it is started again: people are found by their ids, and the posterior
    is that of one process. The control: with other people, or another cell, it does not go on."""
    deliver, count = StreamServer._deliver, [0]

    def stopping(self: StreamServer, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        if next(iter(messages.values()))[:1] == MATCH:
            count[0] += 1
            if count[0] == 5:
                raise Stopped
        return deliver(self, messages)

    job = ColumnsJob(world, tmp_path, alignment=MATCHED)
    shuffled(job)
    monkeypatch.setattr(StreamServer, "_deliver", stopping)
    with pytest.raises(Stopped):
        job.run()
    first, *rows = job.files["east"].read_text().splitlines()
    for others in (rows[1:], [rows[0][:-1] + ("1" if rows[0][-1] != "1" else "2"), *rows[1:]]):
        job.files["east"].write_text("".join(f"{line}\n" for line in (first, *others)))
        with pytest.raises(ProtocolError, match="silo 'east' refused: its data do not fit"):
            job.run()
    job.files["east"].write_text("".join(f"{line}\n" for line in (first, *reversed(rows))))
    assert job.run() == aligned(job, matched)
    owned(job, world)


def test_silos_in_another_order_are_refused_by_a_server_without_a_list() -> None:
    """The control is that they state one order."""
    one, other = (columns_schema(PEOPLE, hashlib.sha256(which).digest()) for which in (b"one", b"other"))
    assert _one_order({"east": one, "north": one}) == (hashlib.sha256(b"one").digest(), PEOPLE)
    with pytest.raises(ProtocolError, match="silos 'east' and 'north' do not hold the same people in the same order"):
        _one_order({"north": other, "east": one})
    with pytest.raises(ProtocolError, match="'east' does not state its order"):
        _one_order({"north": one, "east": Schema((), {"people": PEOPLE, "order": 3})})
    for people in (None, 0, True, "40"):
        with pytest.raises(ProtocolError, match="'east' does not say how many people it holds"):
            _one_order({"east": Schema((), {**one.constants, "people": people})})


def test_a_response_at_a_silo_cannot_be_tried_by_its_digest(world: World, tmp_path: Path) -> None:
    """The server, which hears the digest that all silos state, would have the labels by trying them. With bytes at
    random it does not: two of the same labels have two digests. The control is one that silos are told by the server,
    which has it anyhow."""
    columns, _, _ = holding(ColumnsJob(world, tmp_path, False, **AT_SILO))
    labels = {"y": torch.ones(3).double(), "offset": torch.zeros(3).double()}
    read = functools.partial(_response, columns.likelihood, people=3, dtype=torch.float64, device=torch.device("cpu"))
    for salt in ({}, {"salt": torch.zeros(31, dtype=torch.uint8)}):
        with pytest.raises(ProtocolError, match="no 32 bytes at random, without which its digest would tell it"):
            read(content=save({**labels, **salt}), salted=True)
    assert torch.equal(read(content=save(labels)).y, labels["y"])
    one, other = (save({**labels, "salt": torch.full((32,), at, dtype=torch.uint8)}) for at in (1, 2))
    assert hashlib.sha256(one).digest() != hashlib.sha256(other).digest()
    assert torch.equal(read(content=one, salted=True).y, read(content=other, salted=True).y)
    with pytest.raises(ProtocolError, match="the response is not of 2 people"):
        read(content=one, salted=True, people=2)
    with pytest.raises(ProtocolError, match="a Bernoulli response holds only 0 and 1"):
        read(content=save({**labels, "y": 2 * labels["y"]}))


@pytest.mark.parametrize("salted", [True, False])
def test_a_response_that_silos_share_cannot_be_tried_on_a_log(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, salted: bool
) -> None:
    """The server's log, and each silo's, have the SHA-256 of the message by which silos are told, and a key holder has
    it in the schema's: of files that are sorted, who knows all labels but some tries these. It is told alike after a
    restart. The control has no bytes at random beside the labels."""
    columns, offer, home = holding(ColumnsJob(world, tmp_path, False, algorithm=SHARED))
    monkeypatch.setattr(columns, "_sorted", lambda *_: (bytes(32), np.arange(PEOPLE)))
    if not salted:
        monkeypatch.setattr(columns_server, "save", lambda tensors, *_: save(tensors))
    told = list[bytes]()

    def exchange(messages: Mapping[str, bytes]) -> dict[str, bytes]:
        told.append(messages["north"])
        content = CODEC.unpack(messages["north"][1:], Known).response
        assert set(wire.tensors(content, "the response", 3)) == {"y", "offset"}
        return dict.fromkeys(messages, CODEC.pack(Learned(hashlib.sha256(content).digest())))

    for _ in range(2):
        columns.agreed({}, offer, home, tmp_path, exchange)
        (tmp_path / "told").unlink()
    assert told[0] == told[1]
    y = torch.tensor(
        [float(line.split(",")[1]) for line in (tmp_path / "response.csv").read_text().split()[1:]]
    ).double()
    guessed = KNOWN + CODEC.pack(Known(save({"y": y, "offset": torch.zeros_like(y)})))
    assert (guessed == told[0]) == (not salted)


@pytest.mark.parametrize("another", [True, False])
def test_a_silo_that_says_to_have_learned_another_response_is_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, another: bool
) -> None:
    """Before the session is bound to it. The control learns what it was told."""
    columns, offer, home = holding(ColumnsJob(world, tmp_path, False, algorithm=SHARED))
    monkeypatch.setattr(columns, "_sorted", lambda *_: (bytes(32), np.arange(PEOPLE)))

    def exchange(messages: Mapping[str, bytes]) -> dict[str, bytes]:
        told = {s: CODEC.unpack(m[1:], Known).response + (b"x" if another and s == "north" else b"")
                for s, m in messages.items()}  # fmt: skip
        return {s: CODEC.pack(Learned(hashlib.sha256(content).digest())) for s, content in told.items()}

    with pytest.raises(ProtocolError, match="'north' has learned another response") if another else nullcontext():
        columns.agreed({}, offer, home, tmp_path, exchange)
    assert (tmp_path / "told").exists() is not another


def test_a_servers_own_file_in_no_order_is_named(world: World, tmp_path: Path) -> None:
    job = ColumnsJob(world, tmp_path, False)
    first, *rows = job.files["response"].read_text().splitlines()
    job.files["response"].write_text("\n".join([first, *reversed(rows)]) + "\n")
    columns, offer, home = holding(job)
    with pytest.raises(InputError, match=r"response.data: .*39 stand before a smaller one"):
        columns.agreed({}, offer, home, tmp_path, lambda _: {})


def test_sums_that_lack_a_silo_are_of_no_vertical_job(world: World, tmp_path: Path) -> None:
    """Nobody is predicted without one silo's columns: refused by the server, and by a silo that is offered them."""
    job = ColumnsJob(world, tmp_path, False)
    algorithm, whole, _ = chosen(job.config)
    lacking = Masked(max_missing=1)
    with pytest.raises(InputError, match="a sum that lacks one silo's columns predicts nobody"):
        ServerColumns(job.config, algorithm, lacking)
    assert ServerColumns(job.config, algorithm, whole)  # the control
    silo = SimpleNamespace(home=None, decision=SimpleNamespace(offer=None), _chosen=(algorithm, lacking, None))
    with pytest.raises(InputError, match="a sum that lacks one silo's columns predicts nobody"):
        SiteColumns._build(silo, job.config)  # type: ignore[arg-type]


@pytest.mark.parametrize("coupled", [True, False])
def test_a_predictor_that_mixes_this_silos_rows_is_its_sites_to_hear_of(
    world: World, tmp_path: Path, coupled: bool
) -> None:
    """What only its own rows show, negative numbers here: one person's sum would be of others. The control does not."""
    program = tmp_path / "own.py"
    program.write_text(
        "import pyro\nfrom pyro.distributions import Normal\n\n\ndef effect(a):\n    return (a + "
        f"{'(a < 0).double().sum()' if coupled else '0.0'}) * pyro.sample('slope', Normal(0.0, 2.0))\n"
    )
    job, hub, own = ColumnsJob(world, tmp_path), world.homes["hub"], {"predictor": f"{program}:effect"}
    silos = tuple(s.model_copy(update=own if s.id == "north" else {}) for s in job.config.silo)
    job.config = job.config.model_copy(update={"silo": silos})
    job.allow("north", own, sandbox="off")
    offer = make_offer(job.config, hub.roster(NOW), "hub", manifest(job.config).hash, NOW)
    with closing(Site(world.homes["north"], Local())) as site:
        met(hub, site)
        with pytest.raises(DataError, match=r"predictor: in .* rows looked at") if coupled else nullcontext():
            site.handle(offer.job, JOIN + sign_offer(offer, hub.identity()))


def test_a_predictor_is_that_which_the_job_began_with(tmp_path: Path) -> None:
    """A site's own program, of which nobody else has a hash: its SHA-256 lies in clear, as the page says. The control:
    put back, the job goes on."""
    page = (Path(__file__).parents[2] / "docs" / "threat-model-deployment.md").read_text()
    assert "SHA-256 of the site's own predictor" in page.partition("\n## At rest\n")[2].partition("\n## ")[0]
    program, job = tmp_path / "own.py", SimpleNamespace(folder=tmp_path, home=SimpleNamespace(id="north"))
    for text, same in (("1", True), ("1", True), ("2", False), ("1", True)):
        program.write_text(text)
        refused = pytest.raises(PolicyError, match="its predictor is not that which the job began with")
        with nullcontext() if same else refused:
            SiteColumns._check_predictor(job, f"{program}:effect")  # type: ignore[arg-type]
    guesses = [hashlib.sha256(f"{program}:effect{n}".encode()).digest() for n in range(9)]
    assert (tmp_path / "predictor").read_bytes() == guesses[1]


@pytest.mark.parametrize("told", ["alike", "apart"])
def test_a_server_that_carries_a_response_sees_that_silos_have_the_same(
    world: World, tmp_path: Path, told: str
) -> None:
    """Else it would bind the session to what one of them has, and no sum would be made. The control is one digest."""
    columns, _, _ = holding(ColumnsJob(world, tmp_path, False, **AT_SILO))
    joined = {s: Schema((), {} if s == "east" else {"key": "00", "signature": "00"}) for s in SILOS}

    def exchange(messages: Mapping[str, bytes]) -> dict[str, bytes]:
        (silo,) = messages
        known = hashlib.sha256(silo.encode() if told == "apart" else b"").digest()
        return {silo: CODEC.pack(Told(b"sealed", bytes(64)) if silo == "east" else Learned(known))}

    if told == "alike":
        assert columns._passed_on(joined, tmp_path, exchange) == hashlib.sha256(b"").digest()
    else:
        with pytest.raises(ProtocolError, match="silos have learned different responses: north, south"):
            columns._passed_on(joined, tmp_path, exchange)
    assert (tmp_path / "told").exists() == (told == "alike")


def test_nothing_is_told_of_a_response_before_it_is_known_of_whom(world: World, tmp_path: Path) -> None:
    """Sealed for no order, it would be of whatever people the silo that opens it lists. The control is a silo whose
    file is sorted, in `test_a_server_that_carries_the_response_cannot_open_it`."""
    job, hub = ColumnsJob(world, tmp_path, **AT_SILO, alignment=MATCHED), world.homes["hub"]
    offer = make_offer(job.config, hub.roster(NOW), "hub", manifest(job.config).hash, NOW)
    with closing(Site(world.homes["east"], Local())) as site:
        met(hub, site)
        site.handle(offer.job, JOIN + sign_offer(offer, hub.identity()))
        wanted = KNOWN + CODEC.pack(Wanted("north", bytes(32), bytes(64)))
        with pytest.raises(ProtocolError, match="not known yet, and so not whose response it is"):
            site.handle(offer.job, wanted)
        with pytest.raises(ProtocolError, match="who the people are, or their response, is not known yet"):
            site.handle(offer.job, ROUND)
        with pytest.raises(ProtocolError, match="who the people are, or their response, is not known yet"):
            site._job.end(0, b"")  # type: ignore[union-attr]


@pytest.mark.parametrize("at", [{}, AT_SILO], ids=["server", "silo"])
def test_files_of_no_common_person_are_named_at_the_server(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: dict[str, Any]
) -> None:
    """Before silos refuse so few people by their policies, which would say nothing of how ids are written. The control
    is one person."""
    columns, offer, home = holding(ColumnsJob(world, tmp_path, False, alignment=MATCHED, **at))
    for people in (0, 1):
        found = SimpleNamespace(matched=people, unmatched=0, order=bytes(32), rows=np.arange(people))
        monkeypatch.setattr(columns_server, "carry", lambda *_, found=found: found)
        monkeypatch.setattr(MatchingSilo, "alignment", lambda _, found=found: found)
        with nullcontext() if people else pytest.raises(InputError, match="no identifier stands in all files"):
            (columns._carried if at else columns._matched)(offer, home, tmp_path, lambda _: {})
        assert (tmp_path / "people").exists() == bool(at and people)


def test_what_vertical_jobs_cannot_do_between_institutions_is_refused() -> None:
    """By the function that servers, silos and key holders ask; the control is a job that they take."""
    table = {
        "model": {"likelihood": "bernoulli"},
        "silo": [{"id": s, "data": "at-site"} for s in SILOS],
        "response": {"data": "at-site"},
        "alignment": MATCHED,
        "algorithm": VERTICAL,
        "privacy": {"unit": "record", "epsilon": 1.0, "delta": 1e-6},
    }

    def said(**changes: Any) -> str:
        try:
            check_supported(parse({k: v for k, v in {**table, **changes}.items() if v is not None}, "job"))
        except InputError as error:
            return str(error)
        return ""

    shared = {**VERTICAL, "response": "shared"}
    assert said() == said(privacy=None) == said(algorithm=shared) == ""
    assert "would try the last on the digest of their order" in said(algorithm=shared, alignment=SORTED)
    assert "needs [alignment]: nothing else says that rows are of one person" in said(privacy=None, alignment=None)
    program = {"model": {"program": "heart"}, "silo": None, "response": None, "alignment": None, "privacy": None}
    assert "its silos' columns come with the program, in one process" in said(**program)

    def held(**changes: Any) -> bool:
        return held_by_server(parse({k: v for k, v in {**table, **changes}.items() if v is not None}, "job"))

    assert held()  # and by the server's own ledger then, but by none where
    assert not held(privacy=None)
    assert not held(algorithm=shared)  # silos are told it
    assert not held(**{**program, "privacy": table["privacy"]})


@pytest.mark.slow
def test_silos_that_were_told_different_responses_share_no_key(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server gives one silo another response, names to it the schema that goes with that, and takes what it answers
    for right. The control: where the session's name does not follow from the schema, it gets its totals."""

    def cheating(self: StreamServer, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        sent = dict(messages)
        body = sent.get("north", b"")
        if body[:1] == KNOWN:
            known = wire.tensors(CODEC.unpack(body[1:], Known).response, "x")
            lie = save({"y": 1 - known["y"], "offset": known["offset"]})
            sent["north"] = KNOWN + CODEC.pack(Known(lie))
            told.append(hashlib.sha256(lie).digest())
        if body[:1] == OPEN:
            opened = CODEC.unpack(body[1:], Open)
            schema = columns_schema(PEOPLE, orders[-1], told[-1])
            sent["north"] = OPEN + CODEC.pack(opened._replace(schema=schema_digest(schema)))
        replies = deliver(self, sent)
        if body[:1] == JOIN:
            joined = CODEC.unpack(replies["north"], Joined)
            orders.append(bytes.fromhex(unpack_schema(joined.schema).constants["order"]))
        if body[:1] in (KNOWN, OPEN):
            replies["north"] = replies["south"]
        return replies

    deliver, told, orders = StreamServer._deliver, list[bytes](), list[bytes]()
    monkeypatch.setattr(StreamServer, "_deliver", cheating)
    job = ColumnsJob(world, tmp_path, algorithm={**VERTICAL, "response": "shared"})
    with pytest.raises(SecureFVIError, match="2 of 3 silos answered, 3 are needed; nothing usable of 'north'"):
        job.run("lies")
    monkeypatch.setattr(JobOffer, "within", lambda self, schema: self.hash)
    assert job.run("control")


@pytest.mark.slow
def test_a_silos_own_predictor_is_held_to(world: World, tmp_path: Path) -> None:
    """A program of the site's own gives what it gives in one process. Edited while the job is under way it is refused,
    by name, and put back the job goes on."""
    program = tmp_path / "own.py"
    program.write_text(
        "import pyro\nfrom pyro.distributions import Normal\n\n\ndef effect(a):\n"
        "    return a * pyro.sample('slope', Normal(0.0, 2.0))\n"
    )
    job = ColumnsJob(world, tmp_path)
    own = {"predictor": f"{program}:effect"}
    silos = tuple(s.model_copy(update=own if s.id == "north" else {}) for s in job.config.silo)
    job.config = job.config.model_copy(update={"silo": silos})
    job.allow("north", own, sandbox="off")

    def stop(progress: Progress) -> None:
        if progress.round == 3:
            raise Stopped

    with pytest.raises(Stopped):
        job.run(on_round=stop)
    before = program.read_text()
    program.write_text(before.replace("2.0", "3.0"))
    with pytest.raises(ProtocolError, match="its predictor is not that which the job began with"):
        job.run()
    program.write_text(before)
    assert job.run() == job.local()
    assert owned(job, world)["north"]["mean/slope"].shape == ()


#: Of a private response under privacy, which the server's own ledger guards.
GUARDED: dict[str, Any] = {
    "alignment": {"column": "person", "drop": "- "},
    "algorithm": {**VERTICAL, "rounds": 4},
    "privacy": {"unit": "record", "epsilon": 8.0, "delta": 1e-5, "clipping_norm": 1.0, "data_set": "data"},
}


def guarding(job: ColumnsJob, rule: dict[str, Any] | None = None, **changes: Any) -> None:
    """Have the server's policy list the response's file, with `rule` of the data set."""
    alignment = job.config.alignment
    assert alignment is not None
    data = {"id": "data", "path": str(job.files["response"]), "alignment": alignment.model_dump(mode="json")}
    data |= {"fewest": PEOPLE // 2, **(rule or {})}
    Job.allow(job, "hub", data=[data], **{"disclosures": ["person_rows"], **changes})


def holding(job: ColumnsJob) -> tuple[ServerColumns, JobOffer, Home]:
    """What the server has of the job, before anybody hears of it."""
    home = job.world.homes["hub"]
    algorithm, aggregation, privacy = chosen(job.config)
    model = bytes(32) if privacy is None else manifest(job.config).hash
    offer = make_offer(job.config, home.roster(NOW), "hub", model, NOW, "one")
    return ServerColumns(job.config, algorithm, aggregation), offer, home


@pytest.mark.later
def test_a_server_tells_of_a_response_what_its_policy_and_ledger_allow(world: World, tmp_path: Path) -> None:
    """Refusals before anybody is asked; the control is a policy that lists the job, and a job without privacy on a
    response that has no budget."""

    def said(job: ColumnsJob) -> str:
        columns, offer, home = holding(job)
        try:
            columns.check_allowed(offer, home)
        except SecureFVIError as error:
            return str(error)
        return ""

    steps = {**GUARDED, "algorithm": {**VERTICAL, "response": "shared", "local_steps": 2}}
    assert "local_steps = 2 is not available under privacy" in said(ColumnsJob(world, tmp_path, False, **steps))
    job = ColumnsJob(world, tmp_path, allow=False, **GUARDED)
    assert "policy init" in said(job)
    with pytest.raises(InputError, match="policy init"):
        serving.remote_federation(job.config, world.homes["hub"], RunDirectory(tmp_path / "run"), "127.0.0.1:0")
    guarding(job)
    assert said(job) == ""
    guarding(job, {"path": str(job.files["east"])})
    assert "response.data is another file: a response has one name and one budget" in said(job)
    guarding(job, {"id": "other"}, privacy={"max_epsilon": 1.0, "max_delta": 1e-4, "min_noise_multiplier": 0.1})
    assert "its epsilon is 8 (at most 1)" in said(job)
    assert "data set 'data' is not offered (allowed: other)" in said(job)
    exact = [
        ColumnsJob(world, tmp_path, False, alignment=MATCHED, algorithm={**VERTICAL, "response": response})
        for response in ("private", "shared")
    ]
    assert [said(one) for one in exact] == ["", ""]  # its file has another name in the policy, without a budget
    guarding(job, {"epsilon": 1.0, "delta": 1e-6})
    for one, response in zip(exact, ("private", "shared"), strict=True):
        assert f"which has a budget of epsilon 1, and algorithm.response = '{response}'" in said(one)


def test_what_a_server_releases_of_a_response_is_charged_once(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Charged on disk before it is there; after a crash the same numbers under the same sum are the same bytes, and
    free, and other numbers are refused. The control: with noise made anew the bytes differ. A ledger from a backup of
    the running job, or that is gone, is refused, and so is a job past the budget, or of few people. The control of the
    first is a server that keeps nothing of its ledger as it charges."""
    job = ColumnsJob(world, tmp_path, allow=False, **GUARDED)
    columns, offer, home = holding(job)
    guarding(job)
    columns.check_allowed(offer, home)
    folder, trail = tmp_path / "kept", open_trail(home)
    folder.mkdir()
    trail.job(job_entry(offer, bytes(32), accepted=True))
    privacy, where = chosen(job.config)[2], torch.device("cpu")
    problem = VerticalProblem(columns.likelihood, SILOS, PEOPLE, 1, torch.float64, where, "eager", privacy)

    def released(rows: torch.Tensor, index: int, columns: ServerColumns = columns) -> bytes:
        """In a process of its own."""
        guards = columns.guard(problem, offer, home, folder, trail)
        assert guards.holder is not None
        (ledger,) = guards.holder.ledgers.values()
        gate, noise = columns._guarded or (None, None)
        assert gate is not None
        gate.begin(index, "pull", len(SILOS), turn=noise.name(rows) if noise is not None else None)
        try:
            hidden = gate.hidden_sum("hidden", rows)
            return gate.release_rows(rows).values.tobytes() + hidden.numpy().tobytes()
        finally:
            ledger.close()

    def charged() -> dict[str, int]:
        (chain,) = verify_ledger(home.ledger_file, "hub")
        return dict(chain.jobs["one"].released)

    rows = torch.randn(PEOPLE, 1, generator=torch.Generator().manual_seed(1)).double()
    first = released(rows, 1)
    copied = home.ledger_file.read_bytes()
    assert released(rows, 1) == first
    assert charged() == {"pull": 1, "hidden": 1}
    with pytest.raises(ProtocolError, match="release 1 of 'hidden' was charged already, for other bytes"):
        released(rows + 1e-9, 1)
    assert released(rows, 2) == first  # under another sum, in a session that was opened since
    assert charged() == {"pull": 1, "hidden": 1}
    assert released(2 * rows, 2) != first
    assert charged() == {"pull": 2, "hidden": 2}
    noise = KeptNoise(bytes(32))
    draws = [noise.generator("x", noise.name(r)).normal() for r in (rows, rows, rows + 1e-9)]
    assert draws[0] == draws[1] != draws[2]
    again = [NoiseSource(bytes(32)).generator("x", 1).normal() for _ in range(2)]  # by the sum: of any numbers
    assert again[0] == again[1]
    kept = (folder / "response.noise").read_bytes()
    (folder / "response.noise").unlink()
    with pytest.raises(RecordError, match=r"response.noise' is gone, from which noise of job 'one' follows; put its"):
        released(rows, 1)
    drawn = columns_server._kept_secret
    with monkeypatch.context() as patched:
        patched.setattr(columns_server, "_kept_secret", lambda *given: drawn(*given[:3], False))
        with pytest.raises(ProtocolError, match="charged already, for other bytes"):
            released(rows, 1)
    (folder / "response.noise").write_bytes(kept)
    newest = home.ledger_file.read_bytes()
    for wal in home.path.glob("ledger.sqlite-*"):
        wal.unlink()
    home.ledger_file.write_bytes(copied)
    with pytest.raises(ProtocolError, match=r"the ledger .* was rolled back"):
        released(rows, 3)
    with monkeypatch.context() as patched:
        patched.setattr(columns_server, "hold_to_seen", lambda *_: None)
        assert released(3 * rows, 2) != first
        assert charged() == {"pull": 2, "hidden": 2}  # of three that were made
    home.ledger_file.unlink()
    with pytest.raises(ProtocolError, match="the ledger of 'hub' is older than its log: it lacks job 'one'"):
        released(rows, 3)
    # So it is for a job without privacy, which would tell of what has a budget in that ledger alone.
    exact = ColumnsJob(world, tmp_path, False, alignment=MATCHED, algorithm={**VERTICAL, "response": "shared"})
    asked = holding(exact)
    home.ledger_file.unlink(missing_ok=True)
    with pytest.raises(ProtocolError, match="the ledger of 'hub' is older than its log: it lacks job 'one'"):
        asked[0].check_allowed(*asked[1:])
    home.ledger_file.write_bytes(newest)
    with pytest.raises(PolicyError, match=r"which has a budget of epsilon 7.99.*, and algorithm\.response = 'shared'"):
        asked[0].check_allowed(*asked[1:])
    few = problem._replace(records=PEOPLE // 2 - 1)
    with pytest.raises(PolicyError, match=r"19 people were matched, .* no fewer than 20 \(fewest\)"):
        columns.guard(few, offer, home, folder, trail)
    guarding(job, {"epsilon": 9.0, "delta": 1e-4})
    columns.check_allowed(offer, home)
    with monkeypatch.context() as patched:
        floor = columns._policy.privacy.model_copy(update={"min_noise_multiplier": 1000.0})  # type: ignore[union-attr]
        patched.setattr(columns._policy, "privacy", floor)
        with pytest.raises(PolicyError, match="at least 1000"):
            columns.guard(problem, dataclasses.replace(offer, job="two"), home, tmp_path, trail)
    with pytest.raises(BudgetError, match="silo 'hub' refuses"):
        columns.guard(problem, dataclasses.replace(offer, job="two"), home, tmp_path, trail)


def test_that_two_releases_of_a_response_are_equal_says_nothing_of_it(world: World, tmp_path: Path) -> None:
    """Silos that collude choose sums at which somebody's slope rounds alike in two rounds if the label is 1, and not if
    it is 0. The control: noise that is named by slopes alone is then alike as well, which tells the label."""
    job = ColumnsJob(
        world, tmp_path, False, **{**GUARDED, "algorithm": {**VERTICAL, "auxiliary": {"kind": "amortised"}}}
    )
    algorithm, aggregation, privacy = chosen(job.config)
    columns, where = ServerColumns(job.config, algorithm, aggregation), torch.device("cpu")
    problem = VerticalProblem(columns.likelihood, SILOS, 1, 1, torch.float64, where, "eager", privacy)
    program = columns.program(problem)
    tables, terms = program.of_holder()
    noise, gamma = KeptNoise(bytes(32)), torch.zeros(program.gamma_size).double()
    for label in (1.0, 0.0):
        response = Response(torch.tensor([label]).double(), torch.zeros(1).double())
        found, by_slopes = list[bytes](), list[int]()
        for round_, s in enumerate((-40.0, -60.0)):
            gate = Gate(RESPONSE_HOLDER, tables, terms, lambda *_: None, noise)
            program.set_server(Held(response, gate, noise.name))
            sums = torch.full((1, 1), s).double()
            asked = Broadcast(0, round_ + 1, {}, SILOS, {}, {}, "auxiliary")
            found.append(program._guarded(asked, response, sums, gamma)[0].numpy().tobytes())
            by_slopes.append(noise.name(program._slopes_alone(response, sums, gamma).predictor))
        assert found[0] != found[1]
        assert (by_slopes[0] == by_slopes[1]) == (label == 1.0)


def same_noise(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, ...]]:
    """Noise and samples of all parties follow from a test key; that of the response's holder from how often it drew,
    which is returned."""
    made = Counter[tuple[str, ...]]()

    def generator(self: NoiseSource, party: str, number: int, *purpose: str) -> np.random.Generator:
        if party == RESPONSE_HOLDER and not isinstance(self, KeptNoise):
            made[purpose] += 1
            number = made[purpose]
        return inner(NoiseSource(b"test"), party, number, *purpose)

    inner = NoiseSource.generator
    monkeypatch.setattr(NoiseSource, "generator", generator)
    for module in (columns_in_process, site_job):
        monkeypatch.setattr(module, "silo_secret", lambda derived, *_: derived())
    return made


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
def test_a_private_response_is_guarded_by_the_servers_ledger(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, matched: Any
) -> None:
    """The posterior is that of one process, byte for byte, under one test key; ledger, log, report and evidence of the
    server say so."""
    made = same_noise(monkeypatch)
    monkeypatch.setattr(KeptNoise, "generator", lambda self, *named: NoiseSource(None).generator(*named))
    job = ColumnsJob(world, tmp_path, **GUARDED)
    guarding(job)
    shuffled(job)
    remote = job.run()
    assert made == {(): 4, ("hidden",): 4}
    made.clear()
    assert remote == aligned(job, matched)
    home = world.homes["hub"]
    (chain,) = verify_ledger(home.ledger_file, "hub")
    (record,) = chain.jobs.values()
    assert record.released == {"pull": 4, "hidden": 4}
    assert record.outcome == "finished"
    evidence = read_json(tmp_path / "remote" / "evidence.json")
    assert evidence["ledgers"]["hub"] == {"rows": chain.length, "head": chain.head.hex()}
    with closing(open_trail(home)) as trail:
        assert CHARGED in next(iter(trail.chain.jobs.values())).omissions
    result = read_json(tmp_path / "remote" / "result.json")
    assert result["privacy"]["protects"] == "a person's columns at one silo, and the response"
    assert not list((tmp_path / "remote" / "checkpoint").glob("response*"))


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("restarted", [False, True])
def test_a_server_that_is_killed_after_it_charged_a_response(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    """With nothing of the round written down. Started again it releases the same, charged once; so it does where its
    machine was restarted, and silos mask anew, under another sum, what they had released. The job has no retries."""
    same_noise(monkeypatch)
    save, released, stopped = Checkpoints.save, Gate.release_rows, list[int]()
    pulls = list[bytes]()

    def kept(self: Gate, rows: torch.Tensor) -> Any:
        found = released(self, rows)
        if self.silo == RESPONSE_HOLDER:
            pulls.append(found.values.tobytes())
        return found

    def stopping(self: Checkpoints, round_: int, parties: Mapping[str, Any]) -> None:
        if round_ == 2 and not stopped:
            stopped.append(round_)
            raise Stopped
        save(self, round_, parties)

    monkeypatch.setattr(Checkpoints, "save", stopping)
    monkeypatch.setattr(Gate, "release_rows", kept)
    job = ColumnsJob(world, tmp_path, **GUARDED)
    guarding(job)
    with pytest.raises(Stopped):
        job.run()
    if restarted:
        for module in (holding_module, serving):
            monkeypatch.setattr(module, "boot_id", lambda: b"another start of the machine")
    job.run()
    (chain,) = verify_ledger(world.homes["hub"].ledger_file, "hub")
    (record,) = chain.jobs.values()
    assert record.released == {"pull": 4, "hidden": 4}
    assert pulls[1] == pulls[2]
    assert (len(pulls), len(set(pulls))) == (5, 4)


class Killed(BaseException):
    """The end of a silo's process; in a thread of a test it passes all that catches errors."""


def killed_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: Callable[..., bool]) -> list[str]:
    """`owner.name` of one silo ends its process the first time that `when` says so, before it has answered: the process
    is started again. What is returned is not empty once it has happened."""
    inner, run, dead = getattr(owner, name), Sites._run, list[str]()

    def dying(self: Any, *args: Any) -> Any:
        answer = inner(self, *args)
        if not dead and when(self, *args):
            dead.append(name)
            raise Killed
        return answer

    def started_again(self: Sites, silo: str) -> None:
        try:
            run(self, silo)
        except Killed:
            run(self, silo)

    monkeypatch.setattr(owner, name, dying)
    monkeypatch.setattr(Sites, "_run", started_again)
    return dead


def north(kind: bytes, sum_index: int = 0) -> Callable[..., bool]:
    def when(self: Site, job: str, message: bytes) -> bool:
        right = self.home.id == "north" and message[:1] == kind
        return right and (kind != ROUND or decode_broadcast(message[1:]).sum_index == sum_index)

    return when


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("response", ["shared", "north", "east"])
@pytest.mark.parametrize("at", [JOIN, KNOWN, OPEN, ROUND, END], ids=repr)
def test_a_silo_that_is_killed_goes_on(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: bytes, response: str
) -> None:
    """After it has worked out an answer and before that has left; whether the server tells the response, this silo
    does, or is told it by another."""
    changes: dict[str, Any] = {"algorithm": {**VERTICAL, "response": "shared"}}
    if response in SILOS:
        changes = {**AT_SILO, "response": {"silo": response, "column": "died"}}
    job = ColumnsJob(world, tmp_path, **changes)
    dead = killed_once(monkeypatch, Site, "handle", north(at, 5))
    assert job.run() == job.local()
    assert dead
    owned(job, world)
    nothing_left(world)


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("at_silo", [False, True])
def test_a_server_that_was_stopped_goes_on(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_silo: bool
) -> None:
    """In the same session, and in a new one after its machine was restarted."""

    def stop(progress: Progress) -> None:
        if progress.round == 5:
            raise Stopped

    job = ColumnsJob(world, tmp_path, **AT_SILO) if at_silo else ColumnsJob(world, tmp_path, algorithm=SHARED)
    with pytest.raises(Stopped):
        job.run(on_round=stop)
    for module in (holding_module, serving):
        monkeypatch.setattr(module, "boot_id", lambda: b"another start of the machine")
    assert job.run() == job.local()
    owned(job, world)


class Stopped(Exception):
    """The end of the server's process, between two rounds."""
