"""`secure-fvi budget set` and `verify`: made, raised, checked; what is wrong is one line and an exit code."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from command_line import CommandLine

from secure_fvi.aggregation.roster import Identity
from secure_fvi.aggregation.store import MemoryStore
from secure_fvi.privacy.events import Gaussian
from secure_fvi.privacy.ledger import Job, Ledger, Term
from secure_fvi.privacy.witness import Witness

JOB = Job("job", "adult", "record", 1e-5, (Term("gradient", Gaussian(60.0), 100),))


def set_budget(cli: CommandLine, *more: object, epsilon: object = 1.0, delta: object = 1e-5) -> tuple[int, str, str]:
    arguments = ("--silo", "a", "--data-set", "adult", "--epsilon", epsilon, "--delta", delta)
    return cli("budget", "set", cli.folder / "ledger.sqlite", *arguments, *more)


def verify(cli: CommandLine, *more: object) -> tuple[int, str, str]:
    return cli("budget", "verify", cli.folder / "ledger.sqlite", *more)


def test_a_ledger_is_made_used_and_verified(cli: CommandLine, tmp_path: Path) -> None:
    code, out, err = set_budget(cli)
    assert (code, err) == (0, "")
    assert "epsilon 1 at delta 1e-05" in out
    public = tmp_path / "ledger.sqlite.keys" / "a.pub"
    assert str(public) in out
    ledger = Ledger.open(tmp_path / "ledger.sqlite", "a")
    ledger.open_job(JOB).charge("gradient", 0)
    witness = Witness("b", Identity(), MemoryStore())
    (tmp_path / "receipt").write_bytes(witness.countersign(ledger.statement(), ledger.chain.public_key))
    (tmp_path / "b.pub").write_text(witness._identity.public_key.hex())
    ledger.close()
    code, out, err = verify(
        cli,
        "--silo",
        "a",
        "--public-key",
        public,
        "--receipts",
        tmp_path / "receipt",
        "--witness-key",
        tmp_path / "b.pub",
    )
    assert (code, err) == (0, "")
    assert "4 rows, 1 job" in out
    assert "not pinned" not in out
    assert "1 receipt" in out

    with sqlite3.connect(tmp_path / "ledger.sqlite") as file:
        file.execute("DELETE FROM rows WHERE seq = 4")
    file.close()
    assert verify(cli)[0] == 0
    code, out, err = verify(cli, "--receipts", tmp_path / "receipt")
    assert (code, out) == (1, "")
    assert "row 4: missing; the receipt of witness 'b' shows 4 rows" in err
    assert err.count("\n") == 1


def test_an_altered_row_exits_1_and_is_named(cli: CommandLine, tmp_path: Path) -> None:
    set_budget(cli)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as file:
        file.execute("UPDATE rows SET body = x'80' WHERE seq = 2")
    file.close()
    for code, out, err in (verify(cli), set_budget(cli, epsilon=2.0)):
        assert (code, out) == (1, "")
        assert "silo 'a', row 2: its content is not what was hashed" in err


def test_a_budget_is_raised_but_keeps_its_unit(cli: CommandLine, tmp_path: Path) -> None:
    set_budget(cli)
    assert set_budget(cli, epsilon=3.0)[0] == 0
    chain = Ledger.open(tmp_path / "ledger.sqlite", "a").chain
    assert [b.epsilon for _, _, b in chain.budgets["adult"]] == [1.0, 3.0]
    code, _, err = set_budget(cli, "--unit", "silo")
    assert code == 2
    assert "is 'record' and cannot become 'silo'" in err


@pytest.mark.parametrize(
    ("epsilon", "delta", "words"),
    [
        (0, 1e-5, "epsilon must be"),
        ("nan", 1e-5, "epsilon must be"),
        (1, 0, "delta must"),
        (1, 1, "delta must"),
        ("x", 1e-5, "x"),
    ],
)
def test_bad_numbers_exit_2_and_make_nothing(cli: CommandLine, epsilon: object, delta: object, words: str) -> None:
    code, out, err = set_budget(cli, epsilon=epsilon, delta=delta)
    assert (code, out) == (2, "")
    assert words in err
    assert not (cli.folder / "ledger.sqlite").exists()
    assert not (cli.folder / "ledger.sqlite.keys").exists()


@pytest.mark.filterwarnings("default::secure_fvi.errors.SecureFVIWarning")
def test_delta_is_compared_with_the_population(cli: CommandLine) -> None:
    code, _, err = set_budget(cli, "--records", 1000, delta=0.01)
    assert code == 0
    assert "warning: delta 0.01 is not below 1 / 1000 records" in err
    assert set_budget(cli, "--records", 1000, delta=1e-4)[2] == ""


def test_files_that_are_not_there_or_are_something_else(cli: CommandLine, tmp_path: Path) -> None:
    code, _, err = verify(cli)
    assert code == 2
    assert "there is no ledger" in err
    set_budget(cli)
    (tmp_path / "text").write_text("no key")
    for option, words in (
        ("--public-key", "is no public key"),
        ("--witness-key", "is no public key"),
        ("--receipts", "cannot read the receipt"),
    ):
        code, _, err = verify(cli, option, tmp_path / ("none" if option == "--receipts" else "text"))
        assert code == 2
        assert words in err
    code, _, err = verify(cli, "--receipts", tmp_path / "text")
    assert code == 1
    assert "not well-formed" in err
    code, _, err = verify(cli, "--silo", "b")
    assert code == 2
    assert "holds no ledger of silo 'b'" in err
    code, _, err = verify(cli, "--public-key", Path(_foreign_key(tmp_path)))
    assert code == 1
    assert "row 1: the chain belongs to key" in err


def test_a_key_with_a_passphrase(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECURE_FVI_PASSPHRASE", "correct horse")
    assert set_budget(cli)[0] == 0
    monkeypatch.delenv("SECURE_FVI_PASSPHRASE")
    code, _, err = set_budget(cli, epsilon=2.0)
    assert code == 2
    assert "is encrypted; set SECURE_FVI_PASSPHRASE" in err
    assert verify(cli)[0] == 0  # needs no private key


def test_bench_ledger_measures_each_block_length(cli: CommandLine, tmp_path: Path) -> None:
    code, out, _ = cli("bench", "ledger", "--json", "--releases", 20, "--folder", tmp_path)
    assert code == 0
    found = json.loads(out)["ms"]
    assert {"charge, block 1", "charge, block 16", "verify 28 rows"} <= found.keys()
    assert cli("bench", "ledger", "--folder", tmp_path / "none")[0] == 2


def _foreign_key(folder: Path) -> Path:
    path = folder / "foreign.pub"
    path.write_text(Identity().public_key.hex() + "\n")
    return path
