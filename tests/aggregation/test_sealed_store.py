"""What lies on the disk tells nothing, and cannot be moved or altered unnoticed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from secure_fvi.aggregation.store import MemoryStore, SealedStore, SqliteStore
from secure_fvi.errors import InputError

SECRET = bytes(range(32))


def test_it_is_a_store() -> None:
    store = SealedStore(MemoryStore(), SECRET, b"one")
    assert store.get("a") is None
    assert store.claim("a", b"first") == b"first"
    assert store.claim("a", b"second") == b"first"
    store.put({"a": b"third", "b": b""})
    assert (store.get("a"), store.get("b")) == (b"third", b"")
    store.drop(["a", "none"])
    assert store.get("a") is None


def test_another_object_over_the_same_file_reads_it(tmp_path: Path) -> None:
    inner = SqliteStore(tmp_path / "s.sqlite")
    SealedStore(inner, SECRET, b"one").put({"a": b"value"})
    assert SealedStore(inner, SECRET, b"one").get("a") == b"value"


def test_the_disk_does_not_hold_the_value(tmp_path: Path) -> None:
    value = os.urandom(64)
    for wrapped, expected in ((False, True), (True, False)):  # the first is the control: the search finds it
        folder = tmp_path / str(wrapped)
        folder.mkdir()
        inner = SqliteStore(folder / "s.sqlite")
        (SealedStore(inner, SECRET, b"one") if wrapped else inner).put({"a": value})
        assert any(value in path.read_bytes() for path in folder.iterdir()) is expected
        inner.close()


def test_equal_values_look_different() -> None:
    inner = MemoryStore()
    store = SealedStore(inner, SECRET, b"one")
    store.put({"a": b"value"})
    before = inner.get("a")
    store.put({"a": b"value"})
    assert inner.get("a") != before


@pytest.mark.parametrize("attack", ["another key", "another store", "another slot", "a flipped bit", "cut short"])
def test_what_was_moved_or_altered_is_refused(attack: str) -> None:
    inner = MemoryStore()
    SealedStore(inner, SECRET, b"one").put({"a": b"value"})
    reader = SealedStore(
        inner,
        bytes(32) if attack == "another key" else SECRET,
        b"two" if attack == "another store" else b"one",
    )
    slot, sealed = "a", inner.get("a") or b""
    if attack == "another slot":
        slot = "b"
        inner.put({"b": sealed})
    elif attack == "a flipped bit":
        inner.put({"a": sealed[:-1] + bytes([sealed[-1] ^ 1])})
    elif attack == "cut short":
        inner.put({"a": sealed[:20]})
    with pytest.raises(InputError, match="sealed"):
        reader.get(slot)
    inner.put({"a": sealed})
    assert SealedStore(inner, SECRET, b"one").get("a") == b"value"
