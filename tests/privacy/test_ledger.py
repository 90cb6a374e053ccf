"""The ledger enforces: a job is charged whole or refused, releases are counted before they leave, retries are free."""

from __future__ import annotations

import itertools
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from ledger_world import BUDGET, Clock, gaussian_job, job_of, new_ledger, tamper

from secure_fvi.aggregation.roster import Identity
from secure_fvi.errors import BudgetError, InputError, ProtocolError, RecordError, SecureFVIError, SecureFVIWarning
from secure_fvi.key_files import key_path
from secure_fvi.privacy import chain, chain_file
from secure_fvi.privacy.chain import is_time
from secure_fvi.privacy.events import Gaussian
from secure_fvi.privacy.ledger import Budget, Job, Ledger, OpenJob, Term, read_ledger
from secure_fvi.privacy.ledger_account import account, entries, verify
from secure_fvi.privacy.report import read_report


def test_a_job_is_charged_whole_and_nothing_comes_back(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    job = ledger.open_job(gaussian_job())
    before = account(ledger.chain, "adult")
    job.charge("gradient", 0)
    job.close("stopped early")
    after = account(ledger.chain, "adult")
    assert (before.epsilon, before.remaining) == (after.epsilon, after.remaining)
    assert 0.6 < before.epsilon < 0.7
    assert after.jobs[0].released == {"gradient": 1}
    assert after.jobs[0].outcome == "stopped early"


@pytest.mark.parametrize(
    "changes",
    [
        ["PRAGMA user_version = 99"],
        ["ALTER TABLE rows RENAME TO kept", "CREATE VIEW rows AS SELECT * FROM kept WHERE seq = 0"],
        ["CREATE TRIGGER fewer AFTER INSERT ON rows BEGIN DELETE FROM rows; END"],
        ["DROP TABLE rows"],
        [],
    ],
)
def test_a_file_of_another_form_is_no_ledger(tmp_path: Path, changes: list[str]) -> None:
    """Of another version, or with a program of somebody's in it: neither read nor written. The control is the ledger as
    it was made, and that SQLite takes each change."""
    new_ledger(tmp_path).close()
    tamper(tmp_path, *changes)
    path = tmp_path / "ledger.sqlite"
    if not changes:
        assert read_ledger(path)["a"].length == 2
        return
    for read in (lambda: read_ledger(path), lambda: Ledger.open(path, "a")):
        with pytest.raises(InputError, match="is no ledger of this version"):
            read()


def test_a_job_that_does_not_fit_is_refused_with_numbers_and_nothing_is_written(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    ledger.open_job(gaussian_job())
    length = ledger.chain.length
    asked = job_of("next", ("gradient", Gaussian(40.0), 100), ("metrics", Gaussian(100.0), 10))
    with pytest.raises(BudgetError) as refused:
        ledger.open_job(asked)
    text = str(refused.value)
    for words in ("silo 'a'", "data set 'adult'", "epsilon 1 at delta 1e-05", "0.652 is spent", "job 'next' asks for"):
        assert words in text
    with pytest.raises(BudgetError, match="would still fit"):
        ledger.check_job(asked)
    assert ledger.chain.length == length
    # What it offers does fit, and one release more does not.
    fits = int(re.search(r"(\d+) of 100 releases of 'gradient'", text)[1])  # type: ignore[index]
    factor = float(re.search(r"with noise ([\d.]+) times", text)[1])  # type: ignore[index]
    metrics = ("metrics", Gaussian(100.0), 10)
    with pytest.raises(BudgetError):
        ledger.check_job(job_of("more", ("gradient", Gaussian(40.0), fits + 1), metrics))
    ledger.check_job(job_of("fits", ("gradient", Gaussian(40.0), fits), metrics))
    with pytest.raises(BudgetError):
        ledger.check_job(
            job_of("louder", ("gradient", Gaussian(39.5 * factor), 100), ("metrics", Gaussian(99.0 * factor), 10))
        )
    quiet = job_of("fits", ("gradient", Gaussian(40.0 * factor), 100), ("metrics", Gaussian(100.0 * factor), 10))
    ledger.check_job(quiet)
    assert ledger.chain.length == length
    ledger.open_job(quiet)
    verify(tmp_path / "ledger.sqlite")


def test_a_budget_that_is_used_up_offers_nothing(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    ledger.open_job(gaussian_job(noise=40.7))
    ledger.set_budget(Budget("adult", 0.99, 1e-5))
    with pytest.raises(BudgetError, match="nothing of this kind fits any more"):
        ledger.open_job(gaussian_job("next", noise=1.0, count=1))


def test_a_data_set_without_a_budget_says_how_to_set_one(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path, budget=None)
    with pytest.raises(BudgetError, match=r"secure-fvi budget set .*ledger.sqlite --silo a --data-set adult"):
        ledger.open_job(gaussian_job())
    ledger.open_job(gaussian_job(), default_budget=BUDGET)
    assert ledger.chain.budget("adult") == BUDGET
    # The site's budget counts, not what a later job brings.
    with pytest.raises(BudgetError, match="epsilon 1 at"):
        ledger.open_job(gaussian_job("next", noise=40.0), default_budget=Budget("adult", 50.0, 1e-5))
    with pytest.raises(InputError, match="default_budget is for data set 'other'"):
        ledger.open_job(gaussian_job("next"), default_budget=Budget("other", 50.0, 1e-5))


def test_a_refused_job_does_not_leave_its_default_budget_behind(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path, budget=None)
    with pytest.raises(BudgetError):
        ledger.open_job(gaussian_job(noise=1.0), default_budget=BUDGET)
    assert ledger.chain.budgets == {}


def test_budgets_are_raised_and_lowered_and_nothing_is_forgotten(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    ledger.open_job(gaussian_job("one"))
    with pytest.raises(BudgetError):
        ledger.open_job(gaussian_job("two", noise=50.0))
    ledger.set_budget(Budget("adult", 3.0, 1e-5))
    ledger.open_job(gaussian_job("two", noise=50.0))
    ledger.set_budget(Budget("adult", 0.5, 1e-5))
    with pytest.raises(BudgetError, match="is spent by 2 jobs"):
        ledger.open_job(gaussian_job("three", noise=1000.0))
    with pytest.raises(InputError, match="unit of data set 'adult' is 'record'"):
        ledger.set_budget(Budget("adult", 0.5, 1e-5, "silo"))
    found = account(ledger.chain, "adult")
    assert [b.epsilon for _, _, b in found.history] == [1.0, 3.0, 0.5]
    assert found.remaining == 0
    verify(tmp_path / "ledger.sqlite")


def test_setting_the_same_budget_again_writes_nothing(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    length = ledger.chain.length
    ledger.set_budget(BUDGET)
    assert ledger.chain.length == length


def test_delta_too_large_for_the_population_is_warned_about(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path, budget=None)
    with pytest.warns(SecureFVIWarning, match="not below 1 / 100000 records"):
        ledger.set_budget(BUDGET, records=100_000)
    ledger.set_budget(BUDGET, records=99_000)
    ledger.set_budget(Budget("b", 1.0, 0.1, "silo"), records=99_000)


def test_data_sets_are_counted_apart(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    ledger.set_budget(Budget("other", 1.0, 1e-5))
    ledger.open_job(gaussian_job("one"))
    ledger.open_job(gaussian_job("two", data_set="other"))
    assert account(ledger.chain, "adult").epsilon == account(ledger.chain, "other").epsilon
    assert [r.job.job for r in ledger.chain.charged("other")] == ["two"]


def test_the_same_job_goes_on_and_another_of_its_name_does_not(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    first = ledger.open_job(gaussian_job(description={"placement": "silo", "public": ["cohort"]}))
    first.charge("gradient", 0, b"x")
    first.close("stopped")
    ledger.close()
    ledger = Ledger.open(tmp_path / "ledger.sqlite", "a")
    again = ledger.open_job(gaussian_job(description={"placement": "silo", "public": ["cohort"]}))
    assert (again.left("gradient"), again.last_index("gradient")) == (99, 0)
    again.charge("gradient", 1, b"y")
    assert again.left("gradient") == 98
    assert len(ledger.chain.jobs) == 1
    for field, other in {
        "terms": gaussian_job(count=99, description={"placement": "silo", "public": ["cohort"]}),
        "description": gaussian_job(description={"placement": "server", "public": ["cohort"]}),
        "data_set": gaussian_job(data_set="b", description={"placement": "silo", "public": ["cohort"]}),
    }.items():
        with pytest.raises(InputError, match=f"was charged with another '{field}'"):
            ledger.open_job(other)


def test_units_do_not_mix(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    with pytest.raises(InputError, match=r"protects the unit 'silo'.*counts 'record'"):
        ledger.open_job(gaussian_job(unit="silo"))


def _open(folder: Path, block: int = 1, count: int = 100) -> OpenJob:
    return new_ledger(folder).open_job(gaussian_job(count=count), block=block)


@pytest.mark.parametrize("block", [1, 3, 1000])
def test_no_more_than_declared_is_released(tmp_path: Path, block: int) -> None:
    job = _open(tmp_path, block, count=10)
    for index in range(10):
        job.charge("gradient", 2 * index, bytes([index]) * 32)
        assert job.left("gradient") == 9 - index
    with pytest.raises(BudgetError, match="declared 10 releases of 'gradient', and all of them are used"):
        job.charge("gradient", 20, b"new")
    job.charge("gradient", 18, bytes([9]) * 32)  # a retry stays free
    verify(tmp_path / "ledger.sqlite")


@pytest.mark.parametrize("block", [1, 4])
def test_retries_are_free_for_the_same_bytes_only(tmp_path: Path, block: int) -> None:
    job = _open(tmp_path, block)
    for index in range(3):
        job.charge("gradient", index, bytes([index]) * 32)
    left = job.left("gradient")
    job.charge("gradient", 2, bytes([2]) * 32)
    job.charge("gradient", 0, bytes([0]) * 32)
    assert job.left("gradient") == left
    with pytest.raises(ProtocolError, match="release 1 of 'gradient' was charged already, for other bytes"):
        job.charge("gradient", 1, b"y" * 32)
    with pytest.raises(ProtocolError, match="needs an index above 2"):
        job.charge("gradient", 1)  # without a digest nobody knows that the bytes are the same
    job.charge("gradient", 5)
    for digest in (None, b"z"):
        with pytest.raises(ProtocolError, match="charged already"):
            job.charge("gradient", 5, digest)
    with pytest.raises(ProtocolError, match="release 4 of 'gradient'"):
        job.charge("gradient", 4, b"late")
    assert job.left("gradient") == left - 1


def test_phases_count_apart(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    job = ledger.open_job(job_of("job", ("gradient", Gaussian(100.0), 5), ("metrics", Gaussian(100.0), 1)))
    job.charge("gradient", 7)
    job.charge("metrics", 2)
    with pytest.raises(BudgetError):
        job.charge("metrics", 3)
    with pytest.raises(InputError, match="declared no phase 'loss'; it declared gradient, metrics"):
        job.charge("loss", 9)
    job.charge("gradient", 8)


def test_a_crash_within_a_block_counts_too_much_and_never_too_little(tmp_path: Path) -> None:
    job = _open(tmp_path, block=16)
    for index in range(5):
        job.charge("gradient", index, bytes([index]) * 32)
    # Gone without close: what comes next knows of 16.
    again = Ledger.open(tmp_path / "ledger.sqlite", "a").open_job(gaussian_job(), block=16)
    assert again.left("gradient") == 84
    again.charge("gradient", 0, bytes([0]) * 32)  # the block's own row names this one
    assert again.left("gradient") == 84
    again.charge("gradient", 4, bytes([4]) * 32)  # this one it does not remember: charged once more
    assert again.left("gradient") == 83
    assert len(list(entries(tmp_path / "ledger.sqlite", "a", "adult"))) == 4  # budget, job, two blocks


def test_a_block_touches_no_disk_but_its_first(tmp_path: Path) -> None:
    job = _open(tmp_path, block=16)
    lengths = []
    for index in range(33):
        job.charge("gradient", index)
        lengths.append(read_ledger(tmp_path / "ledger.sqlite")["a"].length)
    assert [b - a for a, b in itertools.pairwise(lengths)].count(1) == 2
    assert lengths[-1] == lengths[0] + 2


def test_two_handles_of_one_job_share_its_count(tmp_path: Path) -> None:
    one = _open(tmp_path, count=3)
    two = Ledger.open(tmp_path / "ledger.sqlite", "a").open_job(gaussian_job(count=3))
    one.charge("gradient", 0, b"a")
    two.charge("gradient", 0, b"a")
    with pytest.raises(ProtocolError, match="for other bytes"):
        two.charge("gradient", 0, b"b")
    two.charge("gradient", 1, b"b")
    one.charge("gradient", 2, b"c")
    for job in (one, two):
        with pytest.raises(BudgetError):
            job.charge("gradient", 3, b"d")


def test_two_silos_in_one_file(tmp_path: Path) -> None:
    a, b = new_ledger(tmp_path, "a"), new_ledger(tmp_path, "b/ä")
    a.open_job(gaussian_job()).charge("gradient", 0)
    assert b.chain.jobs == {}
    b.open_job(gaussian_job()).charge("gradient", 0)
    assert {s: c.length for s, c in read_ledger(tmp_path / "ledger.sqlite").items()} == {"a": 4, "b/ä": 4}
    assert [c.silo for c in verify(tmp_path / "ledger.sqlite")] == ["a", "b/ä"]
    assert key_path(tmp_path / "ledger.sqlite", "b/ä").is_file()


def test_a_ledger_of_another_silo(tmp_path: Path) -> None:
    new_ledger(tmp_path)
    path = tmp_path / "ledger.sqlite"
    with pytest.raises(InputError, match="a ledger of another silo"):
        Ledger.open(path, "a", Identity())
    with pytest.raises(InputError, match="holds no ledger of silo 'b'"):
        Ledger.open(path, "b")
    with pytest.raises(InputError, match="there is no ledger"):
        Ledger.open(tmp_path / "none.sqlite", "a")
    assert not (tmp_path / "none.sqlite").exists()
    (tmp_path / "text").write_text("no database at all " * 100)
    with pytest.raises(InputError, match="is no ledger"):
        Ledger.open(tmp_path / "text", "a", create=True)


def test_a_missing_key_is_not_replaced(tmp_path: Path) -> None:
    new_ledger(tmp_path).close()
    key_path(tmp_path / "ledger.sqlite", "a").unlink()
    with pytest.raises(InputError, match="cannot read the signing key"):
        Ledger.open(tmp_path / "ledger.sqlite", "a", create=True)


def test_keys_are_encrypted_when_there_is_a_passphrase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.sqlite"
    new_ledger(tmp_path, passphrase="correct horse").close()
    pem = key_path(path, "a").read_bytes()
    assert b"ENCRYPTED" in pem
    with pytest.raises(InputError, match="is encrypted; set SECURE_FVI_PASSPHRASE"):
        Ledger.open(path, "a")
    with pytest.raises(InputError, match="passphrase is wrong") as refused:
        Ledger.open(path, "a", passphrase="battery")
    assert "battery" not in str(refused.value)
    monkeypatch.setenv("SECURE_FVI_PASSPHRASE", "correct horse")
    assert Ledger.open(path, "a").chain.length == 2


def test_only_the_owner_reads_the_files(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        job = _open(tmp_path)
        job.charge("gradient", 0)
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*")}
    assert modes.pop("a.pub") & 0o444
    assert modes.pop("ledger.sqlite.keys") == 0o700
    assert {"ledger.sqlite", "ledger.sqlite-wal", "a.pem"} <= modes.keys()
    assert set(modes.values()) == {0o600}


@pytest.mark.parametrize("time", [1e15, True, "2020", b"2020", None, -1, 253_402_300_800_000_000])
def test_what_a_row_of_a_file_may_hold_in_place_of_a_time_is_none(time: object) -> None:
    """The control is the last microsecond that dates have."""
    assert not is_time(time)
    assert is_time(253_402_300_799_999_999)


@pytest.mark.parametrize("year", [1969, 10_000])
def test_a_clock_that_reads_no_date_writes_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, year: int) -> None:
    """The control writes one: its ledger was verified, and no report of it could be made."""
    clock, path = Clock(), tmp_path / "ledger.sqlite"
    ledger = new_ledger(tmp_path, clock=clock)
    job, length = ledger.open_job(gaussian_job()), ledger.chain.length
    right, clock.now = clock.now, {1969: -1.0, 10_000: 253_402_300_800.0}[year]
    with pytest.raises(RecordError, match="which is no date; set the clock right"):
        job.charge("gradient", 0)
    clock.now = right
    job.charge("gradient", 0)
    assert verify(path)[0].length == length + 1
    if year == 10_000:
        with monkeypatch.context() as without:
            for module in (chain, chain_file):
                without.setattr(module, "is_time", lambda time: True)
            clock.now = 253_402_300_800.0
            job.close("finished")
            assert verify(path)[0].length == length + 2
            with pytest.raises(ValueError, match="year 10000 is out of range"):
                read_report(path)
        with pytest.raises(ProtocolError, match=f"row {length + 2}: its time is no date"):
            verify(path)


def test_a_clock_that_runs_backwards_is_refused_and_a_small_step_is_waited_out(tmp_path: Path) -> None:
    clock = Clock()
    job = new_ledger(tmp_path, clock=clock).open_job(gaussian_job())
    clock.now -= 290
    job.charge("gradient", 0)
    clock.now -= 20
    with pytest.raises(
        RecordError, match=r"the clock runs backwards: it reads 2027-01-15 07:54:50 UTC.*08:00:00 UTC; set"
    ):
        job.charge("gradient", 1)
    clock.now += 1000
    job.charge("gradient", 1)
    times = [e.time for e in entries(tmp_path / "ledger.sqlite", "a", "adult")]
    assert times == sorted(times)
    assert times[-1] - times[0] == 690_000_000
    verify(tmp_path / "ledger.sqlite")


def test_rows_that_vanish_from_under_a_running_job_stop_it(tmp_path: Path) -> None:
    job = _open(tmp_path)
    job.charge("gradient", 0)
    tamper(tmp_path, "DELETE FROM rows WHERE seq = 4")
    with pytest.raises(ProtocolError, match="rows vanished"):
        job.charge("gradient", 1)


def test_an_altered_ledger_is_not_opened(tmp_path: Path) -> None:
    new_ledger(tmp_path).close()
    tamper(tmp_path, "UPDATE rows SET time = time + 1 WHERE seq = 1")
    with pytest.raises(ProtocolError, match=r"row 1: .*altered"):
        Ledger.open(tmp_path / "ledger.sqlite", "a")


def test_a_write_that_fails_charges_nothing_and_says_so(tmp_path: Path) -> None:
    job = _open(tmp_path)
    tamper(tmp_path, "ALTER TABLE rows RENAME TO gone")
    with pytest.raises(SecureFVIError, match="nothing was charged, so nothing may leave"):
        job.charge("gradient", 0)
    tamper(tmp_path, "ALTER TABLE gone RENAME TO rows")
    job.charge("gradient", 0)
    assert job.left("gradient") == 99


TERMS = (Term("g", Gaussian(1.0), 1),)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Budget("d", 0.0, 1e-5),
        lambda: Budget("d", float("nan"), 1e-5),
        lambda: Budget("d", float("inf"), 1e-5),
        lambda: Budget("d", True, 1e-5),
        lambda: Budget("d", 1.0, 0.0),
        lambda: Budget("d", 1.0, 1.0),
        lambda: Budget("d", 1.0, float("nan")),
        lambda: Budget("", 1.0, 1e-5),
        lambda: Budget("a\nb", 1.0, 1e-5),
        lambda: Budget("d", 1.0, 1e-5, "row"),
        lambda: Term("g", Gaussian(1.0), 0),
        lambda: Term("g", Gaussian(1.0), 1.5),  # type: ignore[arg-type]
        lambda: Term("g", Gaussian(1.0), True),
        lambda: Term("g", 1.0, 1),  # type: ignore[arg-type]
        lambda: Term(" ", Gaussian(1.0), 1),
        lambda: Job("", "d", "record", 1e-5, TERMS),
        lambda: Job("j", "d", "record", 1e-5, ()),
        lambda: Job("j", "d", "record", 1e-5, TERMS * 2),
        lambda: Job("j", "d", "record", 2.0, TERMS),
        lambda: Job("j", "d", "rows", 1e-5, TERMS),
        lambda: Job("j", "d", "record", 1e-5, TERMS, {"x": object()}),  # type: ignore[dict-item]
        lambda: Job("j", "d", "record", 1e-5, TERMS, {"x": float("nan")}),
        lambda: Job("j", "d", "record", 1e-5, TERMS, {"x": 2**64}),
    ],
)
def test_bad_numbers_and_names_are_refused(make: object) -> None:
    with pytest.raises(InputError):
        make()  # type: ignore[operator]


def test_bad_releases_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    for block in (0, -1, 1.0, True, 10**7):
        with pytest.raises(InputError, match="block must lie"):
            ledger.open_job(gaussian_job(), block=block)  # type: ignore[arg-type]
    assert ledger.chain.jobs == {}
    job = ledger.open_job(gaussian_job())
    for index in (-1, 1.0, True, 2**63):
        with pytest.raises(InputError, match="index"):
            job.charge("gradient", index)  # type: ignore[arg-type]
    for digest in (b"", b"x" * 65, "text"):
        with pytest.raises(InputError, match="digest"):
            job.charge("gradient", 0, digest)  # type: ignore[arg-type]
    assert job.left("gradient") == 100


def test_nothing_heavy_is_imported_to_go_on_with_a_job(tmp_path: Path) -> None:
    _open(tmp_path).charge("gradient", 0)
    code = f"""
import sys
from secure_fvi.privacy.events import Gaussian
from secure_fvi.privacy.ledger import Job, Ledger, Term
job = Job("job", "adult", "record", 1e-5, (Term("gradient", Gaussian(60.0), 100),))
Ledger.open({str(tmp_path / "ledger.sqlite")!r}, "a").open_job(job).charge("gradient", 1)
print([m for m in ("torch", "pyro", "opacus", "dp_accounting", "scipy") if m in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout == "[]\n"


def test_reading_for_reports(tmp_path: Path) -> None:
    job = _open(tmp_path)
    job.charge("gradient", 0)
    job.close("finished")
    path = tmp_path / "ledger.sqlite"
    chain = read_ledger(path, "a")["a"]
    assert [e.kind for e in entries(path, "a", "adult")] == ["budget", "job", "release", "close"]
    assert entries(path, "a", "other") == []
    with pytest.raises(InputError, match="knows no data set 'other'; it knows adult"):
        account(chain, "other")
    with pytest.raises(InputError, match="holds no ledger of silo 'b'"):
        read_ledger(path, "b")
    tamper(tmp_path, "UPDATE rows SET signature = '' WHERE seq = 5")
    for read in (lambda: read_ledger(path), lambda: entries(path, "a", "adult")):
        with pytest.raises(ProtocolError, match="row 5: its signature"):
            read()


def test_no_secret_shows_in_a_repr(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    job = ledger.open_job(gaussian_job())
    assert "PrivateKey" not in repr(ledger) + repr(job) + repr(vars(ledger))
