"""What `verify` finds, case by case, beside a ledger that nobody touched, and what it cannot without receipts."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from ledger_world import Clock, gaussian_job, new_ledger, tamper

from secure_fvi.aggregation.roster import Identity
from secure_fvi.aggregation.store import MemoryStore
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.privacy.chain import Row, link
from secure_fvi.privacy.ledger import Budget, Ledger
from secure_fvi.privacy.ledger_account import verify
from secure_fvi.privacy.ledger_terms import LEDGER
from secure_fvi.privacy.witness import Witness


def fill(folder: Path, releases: int = 4, clock: Clock | None = None, **more: Any) -> Ledger:
    """Rows: 1 genesis, 2 budget, 3 job, 4..7 releases, 8 close."""
    ledger = new_ledger(folder, clock=clock or Clock(), **more)
    job = ledger.open_job(gaussian_job())
    for index in range(releases):
        job.charge("gradient", index, bytes([index]) * 32)
    job.close("finished")
    return ledger


def rewrite(folder: Path, seq: int, change: Callable[[Row], Row], rehash: bool = False) -> None:
    """Change the stored row `seq`; with `rehash`, as one would who knows how hashes are made but has no key."""
    connection = sqlite3.connect(folder / "ledger.sqlite")
    columns = "seq, previous, time, kind, body, hash, signature"
    rows = [Row(*r) for r in connection.execute(f"SELECT {columns} FROM rows ORDER BY seq")]
    with connection:
        previous = b""
        for row in rows[seq - 1 :]:
            new = change(row) if row.seq == seq else row
            if rehash:
                new = new._replace(previous=previous or row.previous)
                new = new._replace(hash=link(LEDGER, new.previous, new.content(LEDGER, "a")))
                previous = new.hash
            connection.execute(
                "UPDATE rows SET previous = ?, time = ?, kind = ?, body = ?, hash = ?, signature = ? WHERE seq = ?",
                (*new[1:], row.seq),
            )
    connection.close()


def change_body(**fields: Any) -> Callable[[Row], Row]:
    return lambda row: row._replace(body=msgpack.packb({**row.fields(), **fields}))


def renumber_without(folder: Path, seq: int) -> None:
    tamper(folder, f"DELETE FROM rows WHERE seq = {seq}")
    for later in range(seq + 1, 9):
        tamper(folder, f"UPDATE rows SET seq = {later - 1} WHERE seq = {later}")


def swap(folder: Path, one: int, two: int) -> None:
    tamper(folder, *(f"UPDATE rows SET seq = {b} WHERE seq = {a}" for a, b in ((one, 99), (two, one), (99, two))))


def swap_signatures(folder: Path) -> None:
    tamper(folder, "UPDATE rows SET signature = (SELECT signature FROM rows WHERE seq = 5) WHERE seq = 6")


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a job that asks for less": (
        lambda d: rewrite(d, 3, change_body(terms=[["gradient", {"kind": "gaussian", "noise_multiplier": 1e3}, 1]])),
        "row 3: its content is not what was hashed",
    ),
    "a larger budget": (lambda d: rewrite(d, 2, change_body(epsilon=9.0)), "row 2: its content is not what was hashed"),
    "a larger budget, hashed anew": (
        lambda d: rewrite(d, 2, change_body(epsilon=9.0), rehash=True),
        "row 2: its signature is not by this silo's key",
    ),
    "a body that SQLite keeps as text": (
        lambda d: tamper(d, "UPDATE rows SET body = CAST(x'ff01' AS TEXT) WHERE seq = 3"),
        "row 3: its content is not what was hashed",
    ),
    "another time": (lambda d: tamper(d, "UPDATE rows SET time = time + 1 WHERE seq = 4"), "row 4: its content is not"),
    "another kind": (lambda d: tamper(d, "UPDATE rows SET kind = 'note' WHERE seq = 4"), "row 4: its content is not"),
    "content of another type": (
        lambda d: tamper(d, "UPDATE rows SET body = 'x' WHERE seq = 4"),
        "row 4: its content is",
    ),
    "another hash": (lambda d: tamper(d, "UPDATE rows SET hash = 'x' WHERE seq = 4"), "row 4: its content is not"),
    "another link": (
        lambda d: tamper(d, "UPDATE rows SET previous = x'00' WHERE seq = 4"),
        "row 4: it does not follow",
    ),
    "a foreign signature": (swap_signatures, "row 6: its signature is not by this silo's key"),
    "no signature": (
        lambda d: tamper(d, "UPDATE rows SET signature = '' WHERE seq = 8"),
        "row 8: its signature is not",
    ),
    "removed": (lambda d: tamper(d, "DELETE FROM rows WHERE seq = 5"), "row 6: row 5 is missing: a row was removed"),
    "removed and renumbered": (lambda d: renumber_without(d, 5), "row 5: it does not follow the row before"),
    "the first removed": (lambda d: tamper(d, "DELETE FROM rows WHERE seq = 1"), "row 2: row 1 is missing"),
    "reordered": (lambda d: swap(d, 5, 6), "row 5: it does not follow the row before"),
    "given to another silo": (lambda d: tamper(d, "UPDATE rows SET silo = 'b'"), "silo 'b', row 1: its content is not"),
}


@pytest.mark.parametrize("case", [None, *CASES])
def test_what_was_done_to_a_ledger_is_found_and_named(tmp_path: Path, case: str | None) -> None:
    fill(tmp_path).close()
    if case is None:  # the control: nobody touched it
        (chain,) = verify(tmp_path / "ledger.sqlite")
        assert (chain.length, len(chain.jobs)) == (8, 1)
        return
    act, words = CASES[case]
    act(tmp_path)
    with pytest.raises(ProtocolError) as found:
        verify(tmp_path / "ledger.sqlite")
    assert words in str(found.value)


@pytest.mark.parametrize("case", [None, *CASES])
def test_what_was_done_to_a_ledger_is_found_as_it_is_opened(tmp_path: Path, case: str | None) -> None:
    """But a foreign signature of a row before the newest, whose own answers for what that row says. The control: a
    ledger that nobody touched."""
    fill(tmp_path).close()
    if case is not None:
        CASES[case][0](tmp_path)
    as_it_was = case in (None, "a foreign signature")
    with contextlib.nullcontext() if as_it_was else pytest.raises((InputError, ProtocolError)):
        Ledger.open(tmp_path / "ledger.sqlite", "a").close()


def forge(ledger: Ledger, kind: str, body: dict[str, Any], time: int | None = None) -> None:
    """A row that the silo's key signs although the ledger would not write it."""
    if time is not None:
        ledger._now = lambda: time  # type: ignore[method-assign]
    with contextlib.suppress(InputError, ProtocolError), ledger._transaction():
        ledger._append(kind, body)


RELEASE = {"job": "job", "phase": "gradient", "index": 99, "digest": None, "count": 1}
JOB = gaussian_job("huge", noise=1.0).to_body()
UNKNOWN_EVENT = {**JOB, "terms": [["gradient", {"kind": "laplace", "scale": 1.0}, 1]]}
SIGNED_CASES: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "a job past the budget": ("job", JOB, ProtocolError, "row 9: job 'huge' exceeds the budget of data set 'adult'"),
    "a job twice": ("job", gaussian_job().to_body(), ProtocolError, "row 9: job 'job' is charged twice"),
    "a job without a budget": (
        "job",
        gaussian_job("x", data_set="b").to_body(),
        ProtocolError,
        "row 9: job 'x' has no budget of its unit",
    ),
    "too many releases": ("release", {**RELEASE, "count": 97}, ProtocolError, "more often than the 100 declared"),
    "an index again": ("release", {**RELEASE, "index": 3}, ProtocolError, "row 9: index 3 of 'gradient' is not above"),
    "a release of no job": ("release", {**RELEASE, "job": "x"}, ProtocolError, "a job that was not charged"),
    "another unit": (
        "budget",
        Budget("adult", 1.0, 1e-5, "silo").to_body(),
        ProtocolError,
        "row 9: it changes the unit",
    ),
    "a second genesis": ("genesis", {"silo": "a", "public_key": bytes(32)}, ProtocolError, "row 9: a chain has one"),
    "an unknown kind of row": ("consent", {}, InputError, "row 9: its kind 'consent' is unknown to this version"),
    "an unknown event": ("job", UNKNOWN_EVENT, InputError, "row 9: unknown event 'laplace'; known are gaussian"),
    "a later policy": (
        "budget",
        {**Budget("adult", 1.0, 1e-5).to_body(), "policy": "rdp-filter/2"},
        InputError,
        "row 9: a budget of policy 'rdp-filter/2'",
    ),
}


@pytest.mark.parametrize("case", SIGNED_CASES)
def test_rows_that_the_silo_itself_should_not_have_written(tmp_path: Path, case: str) -> None:
    kind, body, error, words = SIGNED_CASES[case]
    ledger = fill(tmp_path)
    forge(ledger, kind, body)
    ledger.close()
    with pytest.raises(error) as found:
        verify(tmp_path / "ledger.sqlite")
    assert words in str(found.value)
    if case != "a job past the budget":  # which only the accountant can tell
        with pytest.raises(error):
            Ledger.open(tmp_path / "ledger.sqlite", "a")


def test_a_signed_row_of_an_earlier_time(tmp_path: Path) -> None:
    ledger = fill(tmp_path)
    forge(ledger, "release", RELEASE, time=1)
    with pytest.raises(ProtocolError, match="row 9: its time is before that of the row before"):
        verify(tmp_path / "ledger.sqlite")


def test_a_chain_made_with_another_key_is_found_when_the_key_is_pinned(tmp_path: Path) -> None:
    for name in ("real", "false"):
        (tmp_path / name).mkdir()
    real = fill(tmp_path / "real")
    fill(tmp_path / "false", releases=1)
    key = real.chain.public_key
    assert verify(tmp_path / "real" / "ledger.sqlite", "a", key)[0].length == 8
    with pytest.raises(ProtocolError, match=r"row 1: the chain belongs to key .*, not to"):
        verify(tmp_path / "false" / "ledger.sqlite", "a", key)
    verify(tmp_path / "false" / "ledger.sqlite")  # consistent in itself: only the pinned key tells


class World:
    """A ledger and a witness that countersigned its rows 1 to 8; then two more rows."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger.sqlite"
        self.ledger = fill(folder)
        self.witness = Witness("b", Identity(), MemoryStore())
        self.key = self.witness._identity.public_key
        self.receipt = self.countersign()
        with (
            contextlib.closing(sqlite3.connect(self.path)) as file,
            contextlib.closing(sqlite3.connect(folder / "old")) as copy,
        ):
            file.backup(copy)

    def countersign(self) -> bytes:
        key = self.ledger.chain.public_key
        return self.witness.countersign(self.ledger.statement(self.witness.length(key)), key)


def test_a_cut_tail_is_found_with_a_receipt_only(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.ledger.close()
    assert verify(world.path, receipts=[world.receipt])[0].length == 8
    tamper(tmp_path, "DELETE FROM rows WHERE seq > 6")
    assert verify(world.path)[0].length == 6  # a chain alone does not know its end
    with pytest.raises(ProtocolError, match=r"row 7: missing; the receipt of witness 'b' shows 8 rows, 6 are here"):
        verify(world.path, receipts=[world.receipt])
    ledger = Ledger.open(world.path, "a", clock=Clock())
    with pytest.raises(ProtocolError, match="was rolled back: a witness has seen rows"):
        ledger.check_receipts([world.receipt], [world.key])
    length = ledger.chain.length
    for act in (
        lambda: ledger.set_budget(Budget("adult", 2.0, 1e-5)),
        lambda: ledger.open_job(gaussian_job("next", noise=1e3)),
        lambda: ledger.open_job(gaussian_job()),
    ):
        with pytest.raises(ProtocolError, match="was rolled back"):
            act()
    assert ledger.chain.length == length


def test_an_old_copy_put_back_is_found_with_a_newer_receipt(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.ledger.open_job(gaussian_job("more", noise=1e3))
    newer = world.countersign()
    world.ledger.close()
    assert verify(world.path, receipts=[world.receipt, newer])[0].length == 9
    shutil.copy(tmp_path / "old", world.path)
    assert verify(world.path)[0].length == 8
    with pytest.raises(ProtocolError, match="rows were cut off, or an old copy was put back"):
        verify(world.path, receipts=[newer])


def test_a_history_written_anew_with_the_silos_own_key_is_found_with_a_receipt(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.ledger.close()
    tamper(tmp_path, "DELETE FROM rows WHERE seq > 3")
    ledger = Ledger.open(world.path, "a", clock=Clock())
    job = ledger.open_job(gaussian_job())
    for index in range(6):
        job.charge("gradient", index, b"anew")
    assert verify(world.path)[0].length == 9
    with pytest.raises(ProtocolError, match="row 8: not the row that the receipt of witness 'b' shows"):
        verify(world.path, receipts=[world.receipt])
    with pytest.raises(ProtocolError, match="was rolled back"):
        ledger.check_receipts([world.receipt], [world.key])


def test_receipts_about_others_and_forged_ones(tmp_path: Path) -> None:
    world = World(tmp_path)
    (tmp_path / "other").mkdir()
    other = fill(tmp_path / "other")
    foreign = Witness("c", Identity(), MemoryStore())
    about_other = foreign.countersign(other.statement(), other.chain.public_key)
    with pytest.raises(ProtocolError, match="about a ledger of another key"):
        verify(world.path, receipts=[about_other])
    with pytest.raises(ProtocolError, match="by a key that is not accepted here"):
        verify(world.path, receipts=[world.receipt], witness_keys=[foreign._identity.public_key])
    broken = bytearray(world.receipt)
    broken[-1] ^= 1
    with pytest.raises(ProtocolError, match="wrong signature"):
        verify(world.path, receipts=[bytes(broken)])
    # None of these makes the ledger itself refuse.
    for bad, key in ((bytes(broken), world.key), (about_other, foreign._identity.public_key), (world.receipt, b"")):
        with pytest.raises(ProtocolError):
            world.ledger.check_receipts([bad], [key])
    world.ledger.open_job(gaussian_job("next", noise=1e3))


def test_an_empty_or_missing_ledger(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no ledger"):
        verify(tmp_path / "ledger.sqlite")
    fill(tmp_path).close()
    with pytest.raises(InputError, match="holds no ledger of silo 'b'"):
        verify(tmp_path / "ledger.sqlite", "b")
    new_ledger(tmp_path, "b")
    with pytest.raises(InputError, match="2 ledgers; say whose key"):
        verify(tmp_path / "ledger.sqlite", public_key=bytes(32))
    tamper(tmp_path, "DELETE FROM rows")
    with pytest.raises(InputError, match="holds no ledger"):
        verify(tmp_path / "ledger.sqlite")
