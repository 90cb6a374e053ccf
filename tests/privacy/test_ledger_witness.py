"""Countersigning: a witness confirms what continues what it saw, and nothing else; malformed bytes are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_world import gaussian_job, new_ledger, tamper

from secure_fvi.aggregation.roster import Identity
from secure_fvi.aggregation.store import MemoryStore, SqliteStore
from secure_fvi.errors import ProtocolError, SecureFVIError
from secure_fvi.privacy import witness as witness_module
from secure_fvi.privacy.chain import NOTHING
from secure_fvi.privacy.ledger import Budget, Ledger, OpenJob
from secure_fvi.privacy.ledger_account import verify
from secure_fvi.privacy.ledger_terms import LEDGER
from secure_fvi.privacy.witness import Countersignature, Witness, WitnessFault, check_receipt


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return new_ledger(tmp_path)


@pytest.fixture
def job(ledger: Ledger) -> OpenJob:
    return ledger.open_job(gaussian_job())


@pytest.fixture
def witness(tmp_path: Path) -> Witness:
    return Witness("b", Identity(), SqliteStore(tmp_path / "witness.sqlite"))


def ask(ledger: Ledger, witness: Witness) -> bytes:
    key = ledger.chain.public_key
    return witness.countersign(ledger.statement(witness.length(key)), key)


def test_a_job_from_start_to_end(tmp_path: Path, ledger: Ledger, job: OpenJob, witness: Witness) -> None:
    receipts = [ask(ledger, witness)]
    ledger.add_receipt(receipts[0], witness._identity.public_key)
    for index in range(3):
        job.charge("gradient", index)
    job.close("finished")
    receipts.append(ask(ledger, witness))
    assert [check_receipt(r).length for r in receipts] == [3, 8]
    assert witness.length(ledger.chain.public_key) == 8
    assert ledger.chain.receipts == receipts[:1]
    ledger.check_receipts(receipts, [witness._identity.public_key])
    verify(tmp_path / "ledger.sqlite", receipts=receipts, witness_keys=[witness._identity.public_key])


def test_a_witness_that_restarts_remembers(tmp_path: Path, ledger: Ledger, job: OpenJob, witness: Witness) -> None:
    ask(ledger, witness)
    again = Witness("b", Identity(), SqliteStore(tmp_path / "witness.sqlite"))
    assert again.length(ledger.chain.public_key) == 3
    job.charge("gradient", 0)
    assert check_receipt(ask(ledger, again)).length == 4


def test_the_same_state_is_confirmed_again(ledger: Ledger, witness: Witness) -> None:
    assert check_receipt(ask(ledger, witness)).head == check_receipt(ask(ledger, witness)).head


def test_a_shorter_ledger_is_refused(tmp_path: Path, ledger: Ledger, job: OpenJob, witness: Witness) -> None:
    job.charge("gradient", 0)
    ask(ledger, witness)
    key = ledger.chain.public_key
    ledger.close()
    tamper(tmp_path, "DELETE FROM rows WHERE seq = 4")
    cut = Ledger.open(tmp_path / "ledger.sqlite", "a")
    for since in (0, 3, 4):
        with pytest.raises(ProtocolError, match="was rolled back: it has 3 rows, 4 were seen"):
            witness.countersign(cut.statement(since), key)
    assert witness.length(key) == 4


@pytest.mark.parametrize("looked", [True, False])
def test_a_silo_that_kept_how_far_it_was_writes_to_no_older_copy(tmp_path: Path, looked: bool) -> None:
    """What was charged since would be spent twice: so it is in the control, where nobody looks at what was kept."""
    before = new_ledger(tmp_path)
    before.close()
    copy = (tmp_path / "ledger.sqlite").read_bytes()
    ledger = Ledger.open(tmp_path / "ledger.sqlite", "a")
    ledger.open_job(gaussian_job(noise=40.7))  # all of the budget
    own, key = Witness("a", Identity(), MemoryStore(), LEDGER), ledger.chain.public_key
    own.keep(key, ledger.chain.length, ledger.chain.head)
    ledger.check_holds(*own.seen(key))
    ledger.close()
    (tmp_path / "ledger.sqlite").write_bytes(copy)
    ledger = Ledger.open(tmp_path / "ledger.sqlite", "a")
    if looked:
        with pytest.raises(ProtocolError, match="the ledger of silo 'a' was rolled back"):
            ledger.check_holds(*own.seen(key))
        with pytest.raises(ProtocolError, match="was rolled back"):
            ledger.open_job(gaussian_job("again", noise=40.7))
    else:
        ledger.open_job(gaussian_job("again", noise=40.7))


@pytest.mark.parametrize("more", [0, 2])
def test_another_history_of_the_silos_own_key_is_refused(
    tmp_path: Path, ledger: Ledger, job: OpenJob, witness: Witness, more: int
) -> None:
    job.charge("gradient", 0, b"one")
    ask(ledger, witness)
    key = ledger.chain.public_key
    ledger.close()
    tamper(tmp_path, "DELETE FROM rows WHERE seq = 4")
    anew = Ledger.open(tmp_path / "ledger.sqlite", "a")
    job = anew.open_job(gaussian_job())
    for index in range(1 + more):
        job.charge("gradient", index, b"another")
    with pytest.raises(ProtocolError, match="contradicts what was seen"):
        ask(anew, witness)
    # Nor does it help to state the rows since another length, or rows of the old history.
    for since in (0, 3):
        with pytest.raises(ProtocolError, match="must say how it continues the 4 rows"):
            witness.countersign(anew.statement(since), key)
    assert witness.length(key) == 4


def test_a_statement_is_bound_to_its_key(tmp_path: Path, ledger: Ledger, witness: Witness) -> None:
    (tmp_path / "other").mkdir()
    other = new_ledger(tmp_path / "other")
    for statement, key in ((other.statement(), ledger.chain.public_key), (ledger.statement(), bytes(32))):
        with pytest.raises(ProtocolError, match="not signed with the key that the roster names"):
            witness.countersign(statement, key)
    assert witness.length(ledger.chain.public_key) == 0


@pytest.mark.later
@settings(deadline=None)
@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_any_flipped_bit_is_refused(tmp_path_factory: pytest.TempPathFactory, position: int, bit: int) -> None:
    ledger = new_ledger(tmp_path_factory.mktemp("flip"))
    key = ledger.chain.public_key
    witness = Witness("b", Identity(), MemoryStore())
    for data, read in (
        (ledger.statement(), lambda d: witness.countersign(d, key)),
        (Witness("c", Identity(), MemoryStore()).countersign(ledger.statement(), key), check_receipt),
    ):
        broken = bytearray(data)
        broken[position % len(data)] ^= 1 << bit
        with pytest.raises(ProtocolError):
            read(bytes(broken))
    assert witness.length(key) == 0
    ledger.close()


@given(st.binary(max_size=200) | st.lists(st.integers() | st.binary() | st.text()).map(lambda x: _packed([1, 1, *x])))
def test_malformed_bytes_are_refused(data: bytes) -> None:
    for read in (check_receipt, lambda d: Witness("b", Identity(), MemoryStore()).countersign(d, bytes(32))):
        with pytest.raises(ProtocolError):
            read(data)


def _packed(values: list[object]) -> bytes:
    try:
        return bytes(msgpack.packb(values))
    except OverflowError:
        return b""


def made_up(liar: Identity, ledger: Ledger, stated: bytes = bytes(64), **changed: Any) -> bytes:
    """A receipt that only its witness signed: of rows that `ledger` never had, under the signature `stated`."""
    chain = ledger.chain
    said = Countersignature("b", liar.public_key, chain.silo, chain.public_key, 50, bytes([7]) * 32, 1, stated, b"")
    said = said._replace(**changed)
    signature = liar.sign(LEDGER.label("receipt") + witness_module._received(said))
    return witness_module._CODEC.pack(said._replace(signature=signature))


def signature_of(ledger: Ledger) -> bytes:
    return witness_module._CODEC.unpack(ledger.statement(), witness_module.Statement).signature


@pytest.mark.parametrize(
    "changed", [{}, {"length": 2}, {"length": 10**6}, {"length": 0, "head": NOTHING}, {"silo": "another"}, {"time": 2}]
)
def test_a_witness_that_makes_rows_up_is_named_and_the_ledger_stays_usable(
    tmp_path: Path, ledger: Ledger, changed: dict[str, Any]
) -> None:
    """Once a receipt was the word of the witness alone, and any witness could end a ledger."""
    liar = Identity()
    for stated in (bytes(64), signature_of(ledger), liar.sign(b"anything")):
        receipt = made_up(liar, ledger, stated, **changed)
        for read in (
            lambda r=receipt: ledger.check_receipts([r], [liar.public_key]),
            lambda r=receipt: ledger.add_receipt(r, liar.public_key),
            lambda r=receipt: verify(tmp_path / "ledger.sqlite", receipts=[r], witness_keys=[liar.public_key]),
            lambda r=receipt: verify(tmp_path / "ledger.sqlite", receipts=[r]),
        ):
            with pytest.raises(WitnessFault, match="never signed: the witness made it up") as caught:
                read()
            assert f"key {liar.public_key.hex()[:16]}" in str(caught.value)
    ledger.set_budget(Budget("adult", 4.0, 1e-5))
    verify(tmp_path / "ledger.sqlite")


def test_control_a_witness_s_word_alone_would_end_an_honest_ledger(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    liar, real = Identity(), witness_module.signed
    owner = ledger.chain.public_key
    monkeypatch.setattr(witness_module, "signed", lambda key, *of: key == owner or real(key, *of))
    with pytest.raises(ProtocolError, match="was rolled back"):
        ledger.check_receipts([made_up(liar, ledger)], [liar.public_key])
    with pytest.raises(ProtocolError, match="was rolled back"):
        ledger.set_budget(Budget("adult", 4.0, 1e-5))


def test_a_receipt_row_must_be_about_this_ledger(tmp_path: Path, ledger: Ledger, witness: Witness) -> None:
    (tmp_path / "other").mkdir()
    other = new_ledger(tmp_path / "other")
    receipt = ask(other, witness)
    length = ledger.chain.length
    with pytest.raises(SecureFVIError, match="about another ledger"):
        ledger.add_receipt(receipt, witness._identity.public_key)
    assert ledger.chain.length == length
    assert "private" not in repr(witness).lower()
