"""A site's paper trail: complete after a kill, and tampering of any kind is found and named."""

from __future__ import annotations

import dataclasses
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest
from deployment_world import NOW, World, open_witness

from secure_fvi.aggregation.roster import Identity
from secure_fvi.aggregation.store import MemoryStore
from secure_fvi.deployment import trail as trail_module
from secure_fvi.deployment.countersigning import open_ledger, open_trail
from secure_fvi.deployment.keeping import rotate_identity
from secure_fvi.deployment.policy import read_policy
from secure_fvi.deployment.trail import TRAIL, Exchange, JobEntry, Trail
from secure_fvi.deployment.trail_verify import compare, rows, verify
from secure_fvi.errors import InputError, ProtocolError, SecureFVIError
from secure_fvi.privacy.chain import link
from secure_fvi.privacy.witness import Witness

ENTRY = JobEntry("job-1", b"o" * 32, b"r" * 32, b"m" * 32, b"p" * 32, True, "", "cohort", 0.9, 1e-7)
MESSAGES = [(f"ask {i}".encode() * 50, f"answer {i}".encode() * 80) for i in range(12)]


class Pair:
    """North's log and the server's, after a job of twelve exchanges, and who signed what."""

    def __init__(self, folder: Path) -> None:
        self.site_file, self.server_file = folder / "north.sqlite", folder / "hub.sqlite"
        self.site_key, self.server_key = Identity(), Identity()
        self.site = Trail.open(self.site_file, "north", self.site_key, create=True)
        self.server = Trail.open(self.server_file, "hub", self.server_key, create=True)
        for log in (self.site, self.server):
            log.roster(1, b"r" * 32)
            log.job(ENTRY)
        self.site.policy(b"p" * 32)

    def exchange(self, asked: bytes, answer: bytes, heard: bytes | None = None, got: bytes | None = None) -> None:
        """The server asks, the site hears `heard` and answers, the server gets `got`."""
        self.site.exchanges("job-1", [Exchange("hub", "Contribution", heard or asked, answer, "gradient 1")])
        self.server.exchanges("job-1", [Exchange("north", "Contribution", answer if got is None else got, asked)])

    def close(self) -> None:
        self.site.close()
        self.server.close()


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    pair = Pair(tmp_path)
    for asked, answer in MESSAGES:
        pair.exchange(asked, answer)
    return pair


def tamper(path: Path, *statements: str) -> None:
    with sqlite3.connect(path) as connection:
        for statement in statements:
            assert connection.execute(statement).rowcount > 0
    connection.close()


def test_a_job_from_start_to_end(pair: Pair) -> None:
    pair.site.close_job("job-1", "finished")
    pair.close()
    chain = verify(pair.site_file, pair.site_key.public_key)
    record = chain.jobs["job-1"]
    assert (record.exchanges, record.releases, record.outcome) == (12, 12, "finished")
    assert record.bytes_received == sum(len(a) for a, _ in MESSAGES)
    assert record.bytes_sent == sum(len(b) for _, b in MESSAGES)
    assert (record.fields["epsilon"], record.fields["policy"]) == (0.9, b"p" * 32)
    found = compare(pair.site_file, pair.server_file)
    assert (found.agreed, found.lost_answers, found.unanswered) == (12, 0, 0)
    assert [row.kind for row in rows(pair.site_file)[1][:4]] == ["genesis", "roster", "job", "policy"]


def test_a_refusal_is_written_down(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    refused = dataclasses.replace(ENTRY, job="job-2", accepted=False, reason="epsilon is 9 (at most 1)")
    pair.site.job(refused)
    assert pair.site.chain.jobs["job-2"].fields["reason"] == "epsilon is 9 (at most 1)"
    pair.site.job(dataclasses.replace(refused, accepted=True))  # the policy was changed, and it is offered again
    pair.site.exchanges("job-2", [Exchange("hub", "x", b"a", b"b")])
    pair.close()
    assert verify(pair.site_file).jobs["job-2"].accepted


def test_what_a_server_left_out_is_counted(tmp_path: Path) -> None:
    """This silo's answers, and silos of a cohort; of a job that was decided on."""
    pair = Pair(tmp_path)
    for kind, what in (("left out", "sum 3: 1 in all"), ("difference", "round 4 lacks silos"), ("left out", "sum 9")):
        pair.site.omission("job-1", kind, what)
    with pytest.raises(ProtocolError, match="not decided on"):
        pair.site.omission("job-2", "left out", "sum 1")
    pair.close()
    assert verify(pair.site_file).jobs["job-1"].omissions == {"left out": 2, "difference": 1}


def test_messages_are_not_in_the_log(pair: Pair) -> None:
    pair.close()
    content = pair.site_file.read_bytes()
    assert b"answer 3" not in content
    assert b"ask 3" not in content


@pytest.mark.parametrize("column", ["previous", "body", "hash", "signature"])
def test_an_altered_row_is_found(pair: Pair, column: str) -> None:
    pair.close()
    verify(pair.site_file)
    other = f"CASE substr({column}, -1) WHEN x'00' THEN x'01' ELSE x'00' END"
    tamper(
        pair.site_file,
        f"UPDATE rows SET {column} = CAST(substr({column}, 1, length({column}) - 1) || {other} AS BLOB) WHERE seq = 9",
    )
    with pytest.raises(ProtocolError, match=r"audit-log of silo 'north', row 9: "):
        verify(pair.site_file)


def test_a_file_that_is_no_log_is_not_read(pair: Pair, tmp_path: Path) -> None:
    """A mailed file whose `rows` is a view without an end held `audit-log verify` for good. The control: SQLite reads
    as many of its rows as are asked for."""
    endless = (
        "CREATE VIEW rows AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT 'hub' AS silo, "
        "i AS seq, x'' AS previous, 0 AS time, 'x' AS kind, x'' AS body, x'' AS hash, x'' AS signature FROM n"
    )
    with sqlite3.connect(tmp_path / "view.sqlite") as connection:
        connection.executescript(f"{endless}; PRAGMA user_version = 1")
    assert len(connection.execute("SELECT silo FROM rows LIMIT 5000").fetchall()) == 5000
    connection.close()
    with pytest.raises(InputError, match="is no audit-log of this version"):
        verify(tmp_path / "view.sqlite")
    pair.close()
    verify(pair.site_file)
    last = rows(pair.site_file)[1][-1]
    for other in (last._replace(time="x"), last._replace(body=5)):  # hashed so by who may write into the log
        hashed = link(TRAIL, other.previous, other.content(TRAIL, "north"))
        change = "UPDATE rows SET time = ?, body = ?, hash = ? WHERE seq = ?"
        with sqlite3.connect(pair.site_file) as connection:
            connection.execute(change, (other.time, other.body, hashed, other.seq))
        connection.close()
        with pytest.raises(ProtocolError, match="not well-formed"):
            verify(pair.site_file)
    with sqlite3.connect(pair.server_file) as connection:
        connection.execute("CREATE TRIGGER more AFTER INSERT ON rows BEGIN DELETE FROM rows; END")
    connection.close()
    with pytest.raises(InputError, match="is no audit-log of this version"):
        verify(pair.server_file)


def test_the_last_row_of_a_write_answers_for_those_before(pair: Pair) -> None:
    """The server's rows of one exchange with three silos: one signature, which no cut and no change gets around."""
    pair.server.exchanges("job-1", [Exchange(silo, "x", b"answer", b"ask") for silo in ("east", "north", "south")])
    pair.close()
    assert [bool(row.signature) for row in rows(pair.server_file)[1][-4:]] == [True, False, False, True]
    verify(pair.server_file, pair.server_key.public_key)
    party, found = rows(pair.server_file)
    fields = found[-2].fields()
    body = bytes(msgpack.packb({**fields, "sent": fields["received"]}))
    forged = found[-2]._replace(body=body)
    digest = link(TRAIL, forged.previous, forged.content(TRAIL, party))
    with sqlite3.connect(pair.server_file) as connection:
        change = "UPDATE rows SET body = ?, hash = ? WHERE seq = ?"
        connection.execute(change, (body, digest, forged.seq))
        connection.execute("UPDATE rows SET previous = ? WHERE seq = ?", (digest, forged.seq + 1))
    connection.close()
    with pytest.raises(ProtocolError, match="row 18: its content is not what was hashed"):
        verify(pair.server_file)
    tamper(pair.server_file, "DELETE FROM rows WHERE seq = 18")
    with pytest.raises(ProtocolError, match="row 17: its signature is not by this silo's key"):
        verify(pair.server_file)


@pytest.mark.parametrize("change", ["time = time + 1", "kind = 'note'", "seq = 900"])
def test_altered_facts_are_found(pair: Pair, change: str) -> None:
    pair.close()
    tamper(pair.site_file, f"UPDATE rows SET {change} WHERE seq = 9")
    with pytest.raises(ProtocolError, match=r"audit-log of silo 'north', row (9|10): "):
        verify(pair.site_file)


def test_a_removed_row_is_found(pair: Pair) -> None:
    pair.close()
    tamper(pair.site_file, "DELETE FROM rows WHERE seq = 9")
    with pytest.raises(ProtocolError, match="row 9 is missing: a row was removed"):
        verify(pair.site_file)
    tamper(pair.site_file, "UPDATE rows SET seq = seq - 1 WHERE seq > 9")
    with pytest.raises(ProtocolError, match="row 9: it does not follow the row before"):
        verify(pair.site_file)


def test_reordered_rows_are_found(pair: Pair) -> None:
    pair.close()
    tamper(
        pair.site_file,
        "UPDATE rows SET seq = 1000 WHERE seq = 8",
        "UPDATE rows SET seq = 8 WHERE seq = 9",
        "UPDATE rows SET seq = 9 WHERE seq = 1000",
    )
    with pytest.raises(ProtocolError, match="row 8: it does not follow the row before"):
        verify(pair.site_file)


def test_a_row_inserted_with_another_key_is_found(pair: Pair) -> None:
    pair.close()
    forged = Trail.open(pair.site_file.with_name("forged.sqlite"), "north", Identity(), create=True)
    forged.close()
    with pytest.raises(ProtocolError, match="the chain belongs to key"):
        verify(pair.site_file.with_name("forged.sqlite"), pair.site_key.public_key)
    with pytest.raises(InputError, match="was created with another key"):
        Trail.open(pair.site_file, "north", Identity())


def test_a_cut_tail_is_found_by_the_countersigned_head(pair: Pair) -> None:
    witness = Witness("south", Identity(), MemoryStore(), TRAIL)
    key = witness._identity.public_key
    receipt = witness.countersign(pair.site.statement(), pair.site_key.public_key)
    pair.site.add_receipt(receipt, key)
    pair.close()
    verify(pair.site_file, receipts=[receipt], witness_keys=[key])
    tamper(pair.site_file, "DELETE FROM rows WHERE seq > 12")
    verify(pair.site_file)  # a chain alone cannot tell
    with pytest.raises(ProtocolError, match=r"row 13: missing; the receipt of witness 'south' shows 16 rows"):
        verify(pair.site_file, receipts=[receipt], witness_keys=[key])
    with pytest.raises(ProtocolError, match="by a key that is not accepted here"):
        verify(pair.site_file, receipts=[receipt], witness_keys=[Identity().public_key])
    again = Trail.open(pair.site_file, "north", pair.site_key)
    with pytest.raises(ProtocolError, match="the audit-log of silo 'north' was rolled back"):
        again.check_receipts([receipt], [key])
    with pytest.raises(ProtocolError, match="rolled back"):
        again.note("job-1", "goes on")


def test_a_log_written_anew_is_found(pair: Pair) -> None:
    witness = Witness("south", Identity(), MemoryStore(), TRAIL)
    receipt = witness.countersign(pair.site.statement(), pair.site_key.public_key)
    pair.close()
    pair.site_file.unlink()
    for name in ("-wal", "-shm"):
        pair.site_file.with_name(pair.site_file.name + name).unlink(missing_ok=True)
    anew = Trail.open(pair.site_file, "north", pair.site_key, create=True)
    anew.job(ENTRY)
    for _ in range(20):
        anew.note("job-1", "nothing happened")
    anew.close()
    verify(pair.site_file)
    with pytest.raises(ProtocolError, match="row 16: not the row that the receipt of witness 'south' shows"):
        verify(pair.site_file, receipts=[receipt])


def test_a_ledger_and_a_log_of_one_key_are_not_mixed_up(pair: Pair, tmp_path: Path) -> None:
    """A witness of ledgers refuses a log's statement, so that neither stands for the other."""
    key = pair.site_key.public_key
    assert Witness("south", Identity(), MemoryStore(), TRAIL).countersign(pair.site.statement(), key)
    with pytest.raises(ProtocolError, match="not signed with the key that the roster names"):
        Witness("south", Identity(), MemoryStore()).countersign(pair.site.statement(), key)


def test_an_answer_altered_on_the_way_is_found(pair: Pair) -> None:
    compare(pair.site_file, pair.server_file)
    pair.exchange(b"ask", b"answer", got=b"forged answer")
    with pytest.raises(ProtocolError, match=r"'hub' says that 'north' answered message .* not in the log of 'north'"):
        compare(pair.site_file, pair.server_file)


def test_a_request_altered_on_the_way_is_found(pair: Pair) -> None:
    pair.exchange(b"ask", b"answer", heard=b"another ask")
    with pytest.raises(ProtocolError, match=r"'north' was asked message .* which 'hub' does not say it sent"):
        compare(pair.site_file, pair.server_file)


def test_an_answer_that_the_site_left_out_is_found(pair: Pair) -> None:
    pair.server.exchanges("job-1", [Exchange("north", "x", b"answer", b"ask")])
    with pytest.raises(ProtocolError, match="left out of the site's log"):
        compare(pair.site_file, pair.server_file)


def test_losses_on_the_way_are_counted(pair: Pair) -> None:
    pair.site.exchanges("job-1", [Exchange("hub", "x", b"ask", b"lost answer")])
    pair.server.exchanges("job-1", [Exchange("north", "x", None, b"ask"), Exchange("north", "x", None, b"unheard")])
    pair.exchange(*MESSAGES[0])  # a retry: the same bytes again
    found = compare(pair.site_file, pair.server_file)
    assert (found.agreed, found.lost_answers, found.unanswered) == (12, 1, 1)


def test_a_question_is_in_the_servers_log_before_its_answer(pair: Pair) -> None:
    """Written down before it went, and again with its answer: one exchange, and no loss. Of a server that was killed in
    between the first row is there, and the logs agree. The control: one that had written nothing yet is found."""
    chain, before = pair.server.chain, dataclasses.replace(pair.server.chain.jobs["job-1"])
    pair.server.exchanges("job-1", [Exchange("north", "x", None, b"ask")])
    pair.exchange(b"ask", b"answer")
    after = chain.jobs["job-1"]
    counts = [(r.exchanges, r.bytes_sent, r.bytes_received) for r in (before, after)]
    assert [b - a for a, b in zip(*counts, strict=True)] == [1, len(b"ask"), len(b"answer")]
    assert compare(pair.site_file, pair.server_file).lost_answers == 0
    pair.site.exchanges("job-1", [Exchange("hub", "x", b"next", b"its answer")])
    with pytest.raises(ProtocolError, match="which 'hub' does not say it sent"):
        compare(pair.site_file, pair.server_file)
    pair.server.exchanges("job-1", [Exchange("north", "x", None, b"next")])
    assert compare(pair.site_file, pair.server_file).lost_answers == 1


def test_a_server_that_tells_of_another_job_is_found(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.exchange(*MESSAGES[0])
    compare(pair.site_file, pair.server_file)
    pair.server.job(dataclasses.replace(ENTRY, offer=b"x" * 32))
    with pytest.raises(ProtocolError, match="'north' and 'hub' have another 'offer' for job 'job-1'"):
        compare(pair.site_file, pair.server_file)


def test_logs_of_other_jobs_are_not_compared(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Pair(tmp_path / "other")
    other.server.job(dataclasses.replace(ENTRY, job="job-2"))
    with pytest.raises(InputError, match="have no job in common"):
        compare(other.site_file, other.server_file)
    other.server.exchanges("job-2", [Exchange("north", "x", b"a", b"b")])
    for one, job in ((pair, "job-1"), (other, "job-2")):
        with pytest.raises(ProtocolError, match=f"job '{job}': '(north|hub)' has exchanges with"):
            compare(one.site_file, other.server_file)


def test_an_exchange_needs_an_accepted_job(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    with pytest.raises(ProtocolError, match="a job that was not decided on"):
        pair.site.exchanges("job-9", [Exchange("hub", "x", b"a", b"b")])
    with pytest.raises(ProtocolError, match="a job that was not decided on"):
        pair.site.close_job("job-9", "finished")
    pair.site.job(dataclasses.replace(ENTRY, job="job-2", accepted=False, reason="no"))
    with pytest.raises(ProtocolError, match="job 'job-2', which was refused"):
        pair.site.exchanges("job-2", [Exchange("hub", "x", b"a", b"b")])
    pair.close()
    assert verify(pair.site_file).length == 5  # nothing of it was written


def test_full_disk_means_that_nothing_leaves(pair: Pair) -> None:
    connection = pair.site._file._connection
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")
    many = [Exchange("hub", "x", b"ask %d" % i, b"answer") for i in range(200)]
    with pytest.raises(SecureFVIError, match="what is not written down may not leave"):
        pair.site.exchanges("job-1", many)
    length = pair.site.chain.length
    assert length == 16
    connection.execute("PRAGMA max_page_count = 1000000")
    pair.site.note("job-1", "space again")
    assert pair.site.chain.length == length + 1
    pair.close()
    verify(pair.site_file)


def test_rows_are_forced_in_groups(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges wait for each other, the job's rows do not."""
    forced: list[bool] = []
    file = pair.site._file
    original: Callable[..., object] = file.transaction

    def watched(durable: bool = True) -> object:
        forced.append(durable)
        return original(durable)

    monkeypatch.setattr(file, "transaction", watched)
    monkeypatch.setattr(trail_module, "SYNC_ROWS", 5)
    monkeypatch.setattr(trail_module, "SYNC_SECONDS", 1e9)
    pair.site.note("job-1", "start")
    for i in range(10):
        pair.site.exchanges("job-1", [Exchange("hub", "x", b"%d" % i, b"answer")])
    assert forced == [True, *[False] * 4, True, *[False] * 4, True]
    monkeypatch.setattr(trail_module, "SYNC_SECONDS", 0.0)
    pair.site.exchanges("job-1", [Exchange("hub", "x", b"late", b"answer")])
    assert forced[-1]


WORKER = """
import sys
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.countersigning import open_trail
from secure_fvi.deployment.trail import Exchange, JobEntry
from pathlib import Path

log = open_trail(Home(Path(sys.argv[1])))
log.job(JobEntry("job-1", b"o" * 32, b"r" * 32, b"m" * 32, b"p" * 32, True))
for i in range(10**6):
    log.exchanges("job-1", [Exchange("hub", "x", b"ask %d" % i, b"answer %d" % i)])
    print(i, flush=True)
"""


def test_a_killed_site_has_written_down_all_that_it_sent(world: World) -> None:
    home = world.homes["north"]
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(home.path)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None
    sent = 0
    for line in process.stdout:
        sent = int(line) + 1
        if sent == 40:
            process.send_signal(signal.SIGKILL)
            break
    sent += len(process.stdout.read().splitlines())
    process.wait()
    written = verify(home.log_file, home.identity().public_key).jobs["job-1"].exchanges
    assert sent <= written <= sent + 1
    log = open_trail(home)
    log.note("job-1", "goes on")
    log.close()
    verify(home.log_file)


def test_two_processes_may_write_one_log(pair: Pair) -> None:
    second = Trail.open(pair.site_file, "north", pair.site_key)
    for i in range(5):
        pair.site.exchanges("job-1", [Exchange("hub", "x", b"first %d" % i, b"answer")])
        second.exchanges("job-1", [Exchange("hub", "x", b"second %d" % i, b"answer")])
    second.close()
    pair.close()
    assert verify(pair.site_file).jobs["job-1"].exchanges == 22


def test_records_stay_with_the_identity_that_began_them(world: World) -> None:
    home = world.homes["north"]
    open_trail(home).close()
    first = home.identity().public_key
    rotate_identity(home, NOW)
    (home.path / "old").mkdir()
    for name in ("identity.pem", "identity.pub"):
        stem, suffix = name.split(".")
        (home.path / name).rename(home.path / "old" / f"{stem}-then.{suffix}")
        (home.path / "next" / name).rename(home.path / name)
    assert home.identity().public_key != first
    log = open_trail(home)
    log.note("", "after the rotation")
    log.close()
    assert verify(home.log_file).public_key == first


def test_the_ledger_takes_its_budgets_from_the_policy(world: World) -> None:
    home = world.homes["north"]
    path = home.policy_file
    path.write_text(
        "format = 1\nrosters = []\nalgorithms = []\naggregations = []\nmin_cohort = 3\nmax_rounds = 0\n"
        "[privacy]\nmax_epsilon = 1.0\nmax_delta = 1e-6\nmin_noise_multiplier = 0.3\n"
        '[[data]]\nid = "cohort"\nepsilon = 3.0\ndelta = 1e-6\n[[data]]\nid = "free"\n'
    )
    path.chmod(0o600)
    ledger = open_ledger(home, read_policy(path))
    budget = ledger.chain.budget("cohort")
    assert budget is not None
    assert (budget.epsilon, budget.delta, budget.unit) == (3.0, 1e-6, "record")
    assert ledger.chain.budget("free") is None
    assert ledger.chain.public_key == home.identity().public_key
    length = ledger.chain.length
    ledger.close()
    assert open_ledger(home, read_policy(path)).chain.length == length


def test_a_site_witnesses_with_its_own_identity(world: World) -> None:
    north, south = world.homes["north"], world.homes["south"]
    log, witness = open_trail(north), open_witness(south)
    key = north.identity().public_key
    receipt = witness.countersign(log.statement(witness.length(key)), key)
    log.add_receipt(receipt, south.identity().public_key)
    log.close()
    assert len(verify(north.log_file).receipts) == 1
    assert open_witness(south).length(key) == 1
