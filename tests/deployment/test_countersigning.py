"""Records that are shorter than what another member has seen, or that do not continue it, stop a job."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from consortium_run import SILOS, Job
from deployment_world import NOW, World, open_witness
from fuzzing import Opened, opened_job, reopened

from secure_fvi.aggregation.base import carry
from secure_fvi.aggregation.roster import Identity
from secure_fvi.aggregation.store import SqliteStore
from secure_fvi.algorithms.pvi import part_views
from secure_fvi.deployment import countersigning, keeping, site_job
from secure_fvi.deployment import site as site_of
from secure_fvi.deployment.countersigning import (
    answer,
    check_seen,
    countersign,
    open_ledger,
    open_trail,
)
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.keeping import install, succeed
from secure_fvi.deployment.site import Site
from secure_fvi.deployment.site_job import Local, SiteJob
from secure_fvi.deployment.trail import BROADCAST, TRAIL, Exchange, JobEntry, Trail
from secure_fvi.deployment.trail_verify import verify
from secure_fvi.errors import ProtocolError, RecordError
from secure_fvi.privacy import witness
from secure_fvi.privacy.chain import ChainKind
from secure_fvi.privacy.ledger import Budget
from secure_fvi.privacy.ledger_account import verify as verify_ledger
from secure_fvi.privacy.ledger_terms import LEDGER
from secure_fvi.privacy.witness import stated_key
from secure_fvi.server import ServerState

SITES = ("north", "south")


def meet(
    world: World, alter: Callable[[str, bytes], bytes] = lambda site, reply: reply, log: Trail | None = None
) -> None:
    """What happens at the start of a job. alter: what a site sends in place of its answer; log: the server's, where it
    is another."""
    hub = world.homes["hub"]

    def exchange(messages: Mapping[str, bytes]) -> dict[str, bytes]:
        replies = {}
        for site, message in messages.items():
            with closing(open_trail(world.homes[site])) as trail:
                replies[site] = alter(site, answer(world.homes[site], trail, "hub", message[1:]))
        return replies

    with closing(open_trail(hub)) as trail:
        countersign(hub, hub.roster(NOW), trail if log is None else log, SITES, exchange)


def write(home: Home, what: str) -> None:
    with closing(open_trail(home)) as trail:
        trail.note("job", what)


def spend(home: Home, epsilon: float) -> None:
    with closing(open_ledger(home)) as ledger:
        ledger.set_budget(Budget("cohort", epsilon, 1e-6, "record"))


def restore(home: Home, backup: Path, *names: str) -> None:
    """Put back the files of `backup`, as an administrator would: those that were made since are gone."""
    for name in names or ("audit-log.sqlite", "ledger.sqlite"):
        for path in home.path.glob(f"{name}*"):
            path.unlink()
        for path in backup.glob(f"{name}*"):
            shutil.copy(path, home.path)


@pytest.fixture
def met(world: World, tmp_path: Path) -> World:
    """Two silos and a server with records, after one job; `tmp_path / "old"` holds copies from before it."""
    for name in (*SITES, "hub"):
        home = world.homes[name]
        write(home, "before")
        if name != "hub":
            spend(home, 1.0)
        shutil.copytree(home.path, tmp_path / "old" / name)
        write(home, "since")
        if name != "hub":
            spend(home, 2.0)
    meet(world)
    return world


@pytest.mark.parametrize(
    ("back", "words"),
    [
        (["ledger.sqlite"], "the ledger of silo 'north' was rolled back"),
        (["audit-log.sqlite"], "the audit-log of silo 'north' was rolled back"),
        ([], "the ledger of 'north' is gone"),
        (None, ""),
    ],
    ids=["ledger", "log", "no ledger", "control"],
)
def test_a_site_notices_by_itself_which_of_its_records_was_put_back(
    met: World, tmp_path: Path, back: list[str] | None, words: str
) -> None:
    """Each alone, without a word of anybody's."""
    home = met.homes["north"]
    if back:
        restore(home, tmp_path / "old" / "north", *back)
    elif back is not None:
        home.ledger_file.unlink()
    with closing(open_trail(home)) as trail, pytest.raises(ProtocolError, match=words) if words else nullcontext():
        check_seen(home, trail)


def test_each_keeps_the_others_receipts(met: World) -> None:
    write(met.homes["north"], "more")
    meet(met)  # what has grown is countersigned again
    assert len(verify(met.homes["north"].log_file).receipts) == 2
    assert len(verify_ledger(met.homes["north"].ledger_file)[0].receipts) == 2
    assert len(verify(met.homes["hub"].log_file).receipts) == 4


@pytest.mark.parametrize("record", ["audit-log", "ledger"])
def test_a_silos_backup_is_refused_by_the_silo(met: World, tmp_path: Path, record: str) -> None:
    north = met.homes["north"]
    other = {"audit-log": "ledger.sqlite", "ledger": "audit-log.sqlite"}[record]
    (tmp_path / "old" / "north" / other).unlink()
    for path in north.path.glob(f"{other}*"):  # only one of the two is old
        shutil.copy(path, tmp_path / "old" / "north")
    restore(north, tmp_path / "old" / "north")
    with pytest.raises(ProtocolError, match=f"the {record} of silo 'north' was rolled back"):
        meet(met)


@pytest.mark.parametrize("record", ["audit-log", "ledger"])
def test_a_silo_that_hides_its_backup_is_refused_by_the_server(
    met: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str
) -> None:
    own = countersigning._check_own
    monkeypatch.setattr(countersigning, "_check_own", lambda r, p, k, receipts: own(r, p, k, []))
    write(met.homes["north"], "control")
    restore(met.homes["north"], tmp_path / "old" / "north")
    with pytest.raises(ProtocolError, match=r"of silo 'north'.*(rolled back|must say how)"):
        meet(met)


LOG, BUDGETS, SEEN = "audit-log.sqlite", "ledger.sqlite", "seen.sqlite"
LABELS = {LOG: TRAIL.name, BUDGETS: LEDGER.name}


@pytest.mark.parametrize("old", [(LOG,), (BUDGETS,), (LOG, BUDGETS), (LOG, BUDGETS, SEEN)], ids="+".join)
def test_a_backup_that_the_server_covers_up_is_refused_by_the_silo(
    met: World, tmp_path: Path, old: tuple[str, ...]
) -> None:
    """The server shows what it had seen when the copy was made. The control is a whole folder that is old, of which a
    site cannot know: see the page."""
    north, hub = met.homes["north"], met.homes["hub"]
    for home in (north, hub):
        shutil.copytree(home.path, tmp_path / "then" / home.id)
    write(north, "later")
    spend(north, 3.0)
    meet(met)
    restore(north, tmp_path / "then" / "north", *old)
    slots = [f"{LABELS[name]}/{north.identity().public_key.hex()}" for name in old if name in LABELS]
    with closing(SqliteStore(tmp_path / "then" / "hub" / SEEN)) as then, closing(SqliteStore(hub.seen_file)) as seen:
        seen.put({s: then.get(s) or b"" for slot in slots for s in (slot, f"{slot}/receipt")})
    what = "audit-log" if LOG in old else "ledger"
    whole = SEEN in old
    with nullcontext() if whole else pytest.raises(ProtocolError, match=f"the {what} of silo 'north' was rolled back"):
        meet(met)


def test_what_a_site_keeps_of_its_log_is_on_the_disk_first(met: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of exchanges may be lost to a power cut until they are synced; were they counted before, the log would be
    called an old copy. The control: they are not synced when the server asks."""
    north, keep, seen = met.homes["north"], witness.Witness.keep, list[int]()
    with closing(open_trail(north)) as trail:
        trail.job(JobEntry("job", bytes(32), bytes(32), bytes(32), bytes(32), accepted=True))
        trail.exchanges("job", [Exchange("hub", "broadcast", b"question", b"answer")])
        assert trail._unsynced == 1

        def kept(self: witness.Witness, *how_far: Any) -> None:
            seen.append(trail._unsynced)
            keep(self, *how_far)

        monkeypatch.setattr(witness.Witness, "keep", kept)
        message = countersigning._CODEC.pack(_shown(met.homes["hub"], north))
        answer(north, trail, "hub", message)
    assert seen == [0, 0]  # of log and ledger


def _shown(hub: Home, site: Home) -> countersigning.Seen:
    """What an honest server shows of a site."""
    key, found = site.identity().public_key, []
    for kind in (TRAIL, LEDGER):
        with closing(SqliteStore(hub.seen_file)) as store:
            found.append([witness.Witness("hub", hub.identity(), store, kind).receipt(key)])
    return countersigning.Seen(*found)


def test_a_ledger_that_is_gone_is_missed_where_the_server_hides_that_it_saw_one(met: World) -> None:
    """The control: a site that had none."""
    north = met.homes["north"]
    north.ledger_file.unlink()
    with closing(SqliteStore(north.seen_file)) as store:
        keys = countersigning.records_keys(north, north.roster(NOW), "hub")
        with pytest.raises(ProtocolError, match="the ledger of 'north' is gone: this site had one"):
            countersigning._ledger(north, "hub", keys, [], store)
        store.drop([f"ledger/{north.identity().public_key.hex()}"])
        assert countersigning._ledger(north, "hub", keys, [], store) == b""


def test_a_ledger_that_is_gone_is_missed(met: World) -> None:
    """With what the site itself had seen of it: by the server, which has seen it too."""
    for path in (*met.homes["south"].path.glob("ledger.sqlite*"), *met.homes["south"].path.glob(f"{SEEN}*")):
        path.unlink()
    with pytest.raises(ProtocolError, match="the ledger of 'south' is gone: the server has seen one"):
        meet(met)


def test_a_ledger_begun_anew_is_noticed(met: World) -> None:
    for path in met.homes["south"].path.glob("ledger.sqlite*"):
        path.unlink()
    for epsilon in (5.0, 6.0, 7.0, 8.0):  # as long as the old one
        spend(met.homes["south"], epsilon)
    with pytest.raises(ProtocolError, match="the ledger of silo 'south' was rolled back"):
        meet(met)


def test_a_servers_backup_is_noticed(met: World, tmp_path: Path) -> None:
    restore(met.homes["hub"], tmp_path / "old" / "hub")
    with pytest.raises(ProtocolError, match="the audit-log of silo 'hub' was rolled back"):
        meet(met)


def test_receipts_of_another_record_count_for_nothing(met: World) -> None:
    """A server that says it saw north's log where it saw its own."""
    north, hub = met.homes["north"], met.homes["hub"]
    with closing(open_trail(hub)) as trail:
        forged = trail.statement()
        message = countersigning._CODEC.pack(countersigning.Seen([forged], []))
    with closing(open_trail(north)) as trail, pytest.raises(ProtocolError):
        answer(north, trail, "hub", message)
    meet(met)  # and the log is usable


def made_up(kind: ChainKind, liar: Home, owner: Home) -> bytes:
    """A receipt by `liar`, under another's name, of a million rows of the `owner`."""
    keys = liar.identity().public_key, owner.identity().public_key
    said = witness.Countersignature("south", keys[0], owner.id, keys[1], 10**6, bytes([7]) * 32, 1, bytes(64), b"")
    signature = liar.identity().sign(kind.label("receipt") + witness._received(said))
    return witness._CODEC.pack(said._replace(signature=signature))


def test_a_site_that_makes_a_receipt_up_is_named_and_ends_nobodys_log(met: World) -> None:
    hub, north = met.homes["hub"], met.homes["north"]

    def lie(site: str, reply: bytes) -> bytes:
        if site == "north" and countersigning._CODEC.kind_of(reply) is countersigning.Stated:
            stated = countersigning._CODEC.unpack(reply, countersigning.Stated)
            return countersigning._CODEC.pack(stated._replace(receipts=[made_up(TRAIL, north, hub)]))
        return reply

    with pytest.raises(ProtocolError, match=r"^'north' sent a receipt that it made up, so the fault is its own"):
        meet(met, lie)
    write(hub, "and goes on")
    meet(met)


def test_an_answer_that_is_none_is_named_and_ends_nobodys_log(met: World) -> None:
    """Which of three sites had sent it, nobody was told. The control: an exchange of answers as they are."""
    for kind in (countersigning.Stated, countersigning.Receipt):

        def spoil(site: str, reply: bytes, kind: type = kind) -> bytes:
            return b"none" if site == "north" and countersigning._CODEC.kind_of(reply) is kind else reply

        with pytest.raises(ProtocolError, match=r"^the answer of 'north': "):
            meet(met, spoil)
    meet(met)


@pytest.mark.parametrize("record", ["audit-log", "ledger", "no ledger"])
def test_a_server_that_makes_a_receipt_up_is_named_and_ends_nobodys_record(met: World, record: str) -> None:
    hub, north = met.homes["hub"], met.homes["north"]
    if record == "no ledger":  # "the ledger is gone" was said on the server's word
        north.ledger_file.unlink()
    kind = TRAIL if record == "audit-log" else LEDGER
    receipts = [made_up(kind, hub, north)]
    genuine = open_witness(hub).receipt(north.identity().public_key)
    seen = countersigning.Seen(receipts if kind is TRAIL else [genuine], receipts if kind is LEDGER else [])
    with closing(open_trail(north)) as trail:
        with pytest.raises(ProtocolError, match=r"^'hub' sent a receipt that it made up"):
            answer(north, trail, "hub", countersigning._CODEC.pack(seen))
        trail.note("job", "and goes on")
    spend(north, 3.0)


@pytest.mark.parametrize("control", [False, True])
def test_a_log_begun_anew_under_a_key_that_never_was(
    met: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control: bool
) -> None:
    """A server makes a key of its own, signs that its identity follows it, and begins a second log under it, without
    what stood in the first. No roster names that key, so that no site takes the succession; where one lies there still,
    the second log is not countersigned. In the control both happen."""
    hub, never = met.homes["hub"], Identity()
    file = tmp_path / "hub.succession.toml"
    file.write_bytes(succeed("hub", never, hub.identity(), NOW))
    for site in SITES:
        if control:
            monkeypatch.setattr(keeping, "_check_succession", lambda *_: None)
            install(met.homes[site], file, NOW)
            continue
        with pytest.raises(ProtocolError, match=r"no roster .* as what 'hub' was before"):
            install(met.homes[site], file, NOW)
        (met.homes[site].path / "successions").mkdir(exist_ok=True)
        shutil.copy(file, met.homes[site].path / "successions")
    own = countersigning._check_own
    monkeypatch.setattr(countersigning, "_check_own", lambda r, *of: 0 if r.chain.silo == "hub" else own(r, *of))
    if control:
        monkeypatch.setattr(
            countersigning, "_countersigned", lambda witness, said, *_: witness.countersign(said, stated_key(said))
        )
    with closing(Trail.open(tmp_path / "second.sqlite", "hub", never, create=True)) as second:
        second.roster(1, bytes(32))
        if control:
            meet(met, log=second)
            assert len(second.chain.receipts) == 2
            return
        with pytest.raises(ProtocolError, match=r"'hub' states records under key .*, which did not follow"):
            meet(met, log=second)


def test_an_identity_that_followed_one_follows_no_other(
    met: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a site that has no roster of before, which would say whom it followed. The control: the same again."""
    monkeypatch.setattr(Home, "accepted_rosters", lambda _: iter(()))
    hub, first, file = met.homes["hub"].identity(), Identity(), tmp_path / "hub.succession.toml"
    for before in (first, first, Identity()):
        file.write_bytes(succeed("hub", before, hub, NOW))
        refused = pytest.raises(ProtocolError, match="'hub' was somebody else before; one of the two is forged")
        with nullcontext() if before is first else refused:
            install(met.homes["north"], file, NOW)
    monkeypatch.undo()
    meet(met)


def test_a_key_that_was_lost_is_followed_by_the_one_that_all_have_signed(met: World) -> None:
    """Its log begins anew under that one, with no word of the one before."""
    assert met.roster is not None
    hub, after = met.homes["hub"], Identity()
    keys = (after.public_key,)
    with closing(SqliteStore(met.homes["north"].seen_file)) as store:
        by = witness.Witness("north", met.homes["north"].identity(), store, TRAIL)
        assert by.key_of("hub") == hub.identity().public_key
        with closing(Trail.open(met.root / "after.sqlite", "hub", after, create=True)) as log:
            log.roster(2, bytes(32))
            assert countersigning._countersigned(by, log.statement(), keys, "hub")
        assert by.key_of("hub") == after.public_key
        with closing(open_trail(hub)) as first, pytest.raises(ProtocolError, match="which did not follow"):
            countersigning._countersigned(by, first.statement(), (*keys, hub.identity().public_key), "hub")


# ---- A running job, which no meeting of records stands before ----


def _no_answer_written(trail: Trail, job: str, seen: Sequence[Exchange]) -> None:
    """`Trail.exchanges` of a disk that is full once a question was answered."""
    if any(e.step == BROADCAST for e in seen):
        raise RecordError("no room")
    _exchanges(trail, job, seen)


_exchanges = Trail.exchanges


def _copied(world: World, into: Path) -> None:
    for name in SILOS:
        shutil.copytree(world.homes[name].path, into / name)


def _put_back(world: World, copy: Path, *names: str) -> None:
    for name in SILOS:
        home = world.homes[name].path
        files = [n for n in names if n != "state"]
        if files:
            restore(world.homes[name], copy / name, *files)
        if "state" in names:
            shutil.rmtree(home / "state")
            shutil.copytree(copy / name / "state", home / "state")


def _asked_again(found: Opened, made: Job, sites: Callable[[], dict[str, Site]]) -> None:
    """A lying server begins another session of the job, without records being countersigned, and asks all its rounds.
    Raises what the sites refuse it with."""
    found.sites.update(sites())
    try:
        again = reopened(found, made)
        for _ in range(2):
            carry(again.server.round(), again.exchange)
    finally:
        for site in found.sites.values():
            site.close()


@pytest.mark.parametrize(
    ("back", "words"),
    [
        (("ledger.sqlite", "state"), r"the ledger of silo '\w+' was rolled back"),
        (("ledger.sqlite", "state", "seen.sqlite"), r"the ledger of '\w+' is older than its log, which has 2 answers"),
        (("ledger.sqlite", "audit-log.sqlite", "state"), r"the ledger of silo '\w+' was rolled back"),
        (("ledger.sqlite", "audit-log.sqlite", "state", "seen.sqlite"), None),  # the whole folder: see the page
    ],
    ids=["ledger and state", "all but the log", "all but what the site has seen", "all"],
)
@pytest.mark.parametrize("rule", [True, False], ids=["", "control"])
def test_a_running_jobs_budget_is_not_spent_twice(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: tuple[str, ...], words: str | None, rule: bool
) -> None:
    """Put back from a copy of before its rounds, made since records were countersigned last, with a server that asks
    for none, since the job is not new. The control is a site that looks at neither what it has kept of them nor what
    its log says was charged: each round is released twice, and charged once."""
    if not rule:
        monkeypatch.setattr(site_of, "check_seen", lambda *_: None)
        monkeypatch.setattr(site_job, "hold_to_seen", lambda *_: None)
        monkeypatch.setattr(site_job, "kept_charged", lambda *_: 0)
        monkeypatch.setattr(site_of, "Exchange", lambda *what: Exchange(*what[:4]))
    dp = {"unit": "record", "epsilon": 3.0, "delta": 1e-6, "data_set": "data"}
    made = Job(world, tmp_path, algorithm={"name": "sfvi", "iterations": 2, "family": "diagonal"}, privacy=dp)
    found = opened_job(made, None)

    def sites() -> dict[str, Site]:
        return {name: Site(world.homes[name], Local()) for name in SILOS}

    for site in found.sites.values():
        site.close()
    _copied(world, tmp_path / "copy")
    found.sites.update(sites())
    for _ in range(2):
        carry(found.server.round(), found.exchange)
    for site in found.sites.values():
        site.close()
    _put_back(world, tmp_path / "copy", *back)
    with nullcontext() if words is None or not rule else pytest.raises(ProtocolError, match=words):
        _asked_again(found, made, sites)


class _Asked:
    """A private job of three rounds that a lying server asks. `east` is the site whose files are put back."""

    def __init__(self, world: World, folder: Path) -> None:
        dp = {"unit": "record", "epsilon": 3.0, "delta": 1e-6, "data_set": "data"}
        self.made = Job(world, folder, algorithm={"name": "sfvi", "iterations": 3, "family": "diagonal"}, privacy=dp)
        self.found, self.home = opened_job(self.made, None), world.homes["east"]
        self.state = self.home.state_folder / "jobs" / self.found.job

    def sent(self) -> list[npt.NDArray[np.float64]]:
        carry(self.found.server.round(), self.found.exchange)
        answers = [self.found.silo(name).answer for name in SILOS]
        return [answer.values for answer in answers if answer is not None]

    def put_back(self, copy: Path, *names: str) -> None:
        """The job's state, and files of the site's folder, while its process is not there."""
        self.found.sites["east"].close()
        shutil.rmtree(self.state)
        shutil.copytree(copy / self.state.relative_to(self.home.path), self.state)
        if names:
            restore(self.home, copy, *names)
        self.found.sites["east"] = Site(self.home, Local())

    def again(self, before: ServerState) -> list[npt.NDArray[np.float64]]:
        """The question that the server asked when it was at `before`, under another index."""
        self.found.server.state = before._replace(last_index=self.found.server.state.last_index)
        return self.sent()

    def begun(self, copy: Path) -> ServerState:
        """Where the server is after a round, of which the site's files are copied while its process is not there."""
        self.sent()
        self.found.sites["east"].close()
        shutil.copytree(self.home.path, copy)
        self.found.sites["east"] = Site(self.home, Local())
        return self.found.server.state

    def killed_before_its_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Asks; the site's process ends between what it keeps of the answer and the row of its log."""
        with monkeypatch.context() as full:
            full.setattr(Trail, "exchanges", _no_answer_written)
            with pytest.raises(RecordError):
                self.sent()
        self.found.sites["east"].close()
        self.found.sites["east"] = Site(self.home, Local())

    def close(self) -> None:
        for site in self.found.sites.values():
            site.close()


def test_a_silo_whose_state_is_put_back_answers_no_question_anew(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ledger and log are the newest, and a lying server that has a total asks its question again: the others send what
    they sent, noise included, so that from total to total one share alone is another, whatever the silo's ledger was
    charged. Asked twice it is refused twice. The control, a site that does not look, is asked first."""
    asked = _Asked(world, tmp_path)
    asked.sent()
    before = asked.found.server.state
    shutil.copytree(asked.home.path, tmp_path / "copy")
    first = asked.sent()
    check = SiteJob._check_newest
    monkeypatch.setattr(SiteJob, "_check_newest", lambda *_: None)
    asked.put_back(tmp_path / "copy")
    again = asked.again(before)
    assert [np.array_equal(a, b) for a, b in zip(first, again, strict=True)] == [False, True, True]
    monkeypatch.setattr(SiteJob, "_check_newest", check)
    asked.put_back(tmp_path / "copy")
    for _ in range(2):
        with pytest.raises(ProtocolError, match="the state of this job at 'east' is older than its log, which has 2"):
            asked.again(before)
    asked.close()


@pytest.mark.parametrize("rule", [True, False], ids=["", "control"])
@pytest.mark.parametrize("lost", ["put back", "not written"])
def test_so_it_is_where_the_log_lacks_that_answer_too(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str, rule: bool
) -> None:
    """The log was put back with the state, or its row was not written before the process ended, so that what was asked
    again left without a word of the charge. The control is a site that does not keep how many answers were charged."""
    if not rule:
        monkeypatch.setattr(site_job, "kept_charged", lambda *_: 0)
    asked = _Asked(world, tmp_path)
    before = asked.begun(tmp_path / "copy")
    if lost == "not written":
        asked.killed_before_its_row(monkeypatch)
        monkeypatch.setattr(site_of, "Exchange", lambda *what: Exchange(*what[:4]))
        first = asked.again(before)
    else:
        first = asked.sent()
    asked.put_back(tmp_path / "copy", *(["audit-log.sqlite"] if lost == "put back" else []))
    if rule:
        with pytest.raises(ProtocolError, match=r"older than what was seen of it \(seen.sqlite\), which has 2"):
            asked.again(before)
    else:
        same = [np.array_equal(a, b) for a, b in zip(first, asked.again(before), strict=True)]
        assert same == [False, True, True]
    asked.close()


@pytest.mark.parametrize("rule", [True, False], ids=["", "control"])
def test_a_log_whose_row_a_kill_left_out_has_that_charge_once_it_is_asked_for_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: bool
) -> None:
    """The process ended between what the site keeps of the answer and the row of its log. That row, written when the
    answer is asked for again, says that it was charged: so the state is not put back with what the site has seen. The
    control goes by what was kept, so that the log lacks the charge for good."""
    asked = _Asked(world, tmp_path)
    before = asked.begun(tmp_path / "copy")
    asked.killed_before_its_row(monkeypatch)
    if not rule:
        monkeypatch.setattr(SiteJob, "charged", lambda *_: "")
    first = asked.again(before)
    asked.put_back(tmp_path / "copy", "seen.sqlite")
    if rule:
        with pytest.raises(ProtocolError, match="the state of this job at 'east' is older than its log, which has 2"):
            asked.again(before)
    else:
        same = [np.array_equal(a, b) for a, b in zip(first, asked.again(before), strict=True)]
        assert same == [False, True, True]
    asked.close()


def test_a_silo_whose_state_was_lost_goes_on_once_it_is_put_back(world: World, tmp_path: Path) -> None:
    """A server that opens another session meanwhile takes its place in no file."""
    asked = _Asked(world, tmp_path)
    before = asked.found.server.state
    first = asked.sent()
    asked.found.sites["east"].close()
    for path in asked.state.glob("*.sqlite"):
        shutil.move(path, tmp_path / path.name)
    asked.found.sites["east"] = Site(asked.home, Local())
    with pytest.raises(ProtocolError, match="it was restored from a copy, or is gone; put the newest one back"):
        reopened(asked.found, asked.made)
    asked.found.sites["east"].close()
    for path in tmp_path.glob("*.sqlite"):
        shutil.move(path, asked.state)
    asked.found.sites["east"] = Site(asked.home, Local())
    assert all(np.array_equal(a, b) for a, b in zip(first, asked.again(before), strict=True))
    asked.close()


@pytest.mark.parametrize("rule", [True, False], ids=["", "control"])
def test_a_silo_whose_secret_is_gone_goes_on_under_no_other(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: bool
) -> None:
    """Of partitioned VI each virtual client's change is clipped for itself, which bounds a record that is one's for
    good. The control draws another secret, by which the records would be dealt anew."""
    asked = _Asked(world, tmp_path)
    if not rule:
        monkeypatch.setattr(SiteJob, "_check_no_session", lambda *_: None)

    def parts() -> list[int]:
        return [part.size for part in part_views(asked.found.silo("east").view, 4)]

    asked.sent()
    before = parts()
    asked.found.sites["east"].close()
    (asked.state / "secret").unlink()
    asked.found.sites["east"] = Site(asked.home, Local())
    if rule:
        with pytest.raises(ProtocolError, match=r"the secret of this job at 'east', .* is gone"):
            asked.sent()
    else:
        asked.sent()
        assert parts() != before
    asked.close()


def test_a_ledger_that_a_kill_left_without_a_row_is_begun_anew(world: World) -> None:
    """SQLite makes the file before anything is in it. One that had rows is missed all the same."""
    home = world.homes["north"]
    home.ledger_file.touch()
    with closing(open_trail(home)) as trail:
        check_seen(home, trail)
    spend(home, 1.0)
    meet(world)
    for path in home.path.glob("ledger.sqlite*"):
        path.unlink()
    home.ledger_file.touch()
    with (
        closing(open_trail(home)) as trail,
        pytest.raises(ProtocolError, match="the ledger of silo 'north' was rolled back"),
    ):
        check_seen(home, trail)
