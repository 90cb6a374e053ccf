"""Alignment: the right people, everything else counted, and a dictionary attack with its control."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_fvi.alignment import AlignmentKey, Normalisation, Prepared, adopt, match, prepare, tag
from secure_fvi.errors import InputError, ProtocolError

KEY = AlignmentKey(bytes(range(32)))
JOB = "job-1"


def _align(*tables: list[str | None]) -> list[list[str | None]]:
    """The ids of every silo in the common order."""
    prepared = [prepare(ids, KEY, JOB, f"s{j}") for j, ids in enumerate(tables)]
    common = match([p.message for p in prepared])
    return [[ids[r] for r in adopt(p, common.tags).rows] for ids, p in zip(tables, prepared, strict=True)]


def test_the_tag_is_hmac_sha256() -> None:
    """RFC 4231, test case 2."""
    expected = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
    assert tag(b"Jefe", "what do ya want for nothing?").hex() == expected


def test_records_meet() -> None:
    a, b = _align(["ann", "bob", "cyd", "dan"], ["dan", "eve", "Bob ", "ann"])
    assert sorted(x or "" for x in a) == ["ann", "bob", "dan"]
    assert [x and x.strip().lower() for x in a] == [x and x.strip().lower() for x in b]


ids = st.lists(st.one_of(st.none(), st.sampled_from("abcdefgh"), st.text(max_size=3)), max_size=12)


@settings(max_examples=150, deadline=None)
@given(st.tuples(ids, ids, ids))
def test_alignment_is_the_intersection_of_unique_ids(tables: tuple[list[str | None], ...]) -> None:
    rule = Normalisation()
    normal = [[rule.apply(i) if i is not None else "" for i in t] for t in tables]
    expected = set.intersection(*({i for i in t if i and t.count(i) == 1} for t in normal))
    found = _align(*tables)
    for table in found:
        assert [rule.apply(i or "") for i in table] == [rule.apply(i or "") for i in found[0]]
    assert {rule.apply(i or "") for i in found[0]} == expected


def test_everything_left_out_is_counted() -> None:
    first: list[str | None] = ["1", "2", "2 ", None, "  ", "3", "0042", "7.0"]
    prepared = [prepare(first, KEY, JOB, "a"), prepare(["1", "2", "42", "7", "3"], KEY, JOB, "b")]
    common = match([p.message for p in prepared])
    assert common.records == {"a": 8, "b": 5}
    assert common.unmatched == {"a": 2, "b": 3}
    assert (common.missing["a"], common.duplicated["a"]) == (2, 2)
    mine = adopt(prepared[0], common.tags)
    assert (mine.matched, mine.unmatched, mine.missing, mine.duplicated) == (2, 2, 2, 2)
    assert mine.hints == {"leading zeros": 1, "ends in .0": 1, "punctuation or inner spaces": 1}
    assert set(mine.rows.tolist()) == {0, 5}
    assert mine.rows.dtype == np.int64
    with pytest.raises(InputError, match="2 lack a partner, 2 have no id and 2 share one"):
        adopt(prepared[0], common.tags, complete=True)


def test_different_normalisation_or_keys_are_refused() -> None:
    mine = prepare(["a"], KEY, JOB, "a")
    for other in (
        prepare(["a"], KEY, JOB, "b", Normalisation(casefold=False)),
        prepare(["a"], AlignmentKey.generate(), JOB, "b"),
    ):
        with pytest.raises(InputError, match="different keys or normalise"):
            match([mine.message, other.message])
    with pytest.raises(InputError, match="different jobs"):
        match([mine.message, prepare(["a"], KEY, "job-2", "b").message])
    alike = [Normalisation(drop="-. "), Normalisation(drop=" .--")]
    match([prepare(["a-1"], KEY, JOB, str(k), rule).message for k, rule in enumerate(alike)])


def test_dropped_characters() -> None:
    rule = Normalisation(drop="- ()")
    assert rule.apply("(07) 3138-2000") == rule.apply("0731382000")
    assert Normalisation().apply("ＡＢ１") == "ab1"
    assert Normalisation().apply("Straße") == Normalisation().apply("STRASSE")


def test_bad_input() -> None:
    with pytest.raises(InputError, match="random bytes"):
        AlignmentKey(b"a password")
    with pytest.raises(InputError, match="must be text"):
        prepare([7], KEY, JOB, "a")  # type: ignore[list-item]
    with pytest.raises(InputError, match="unicode_form"):
        Normalisation("NFX")  # type: ignore[arg-type]
    assert "0001" not in repr(KEY)
    assert repr(KEY) == "AlignmentKey(...)"


def _change(**changes: object) -> bytes:
    fields = msgpack.unpackb(prepare(["a", "b"], KEY, JOB, "b").message)
    packed: bytes = msgpack.packb(fields | changes)
    return packed


@pytest.mark.parametrize(
    "message",
    [
        b"\xc1",
        msgpack.packb([1]),
        _change(extra=1),
        _change(tags=[b"short"]),
        _change(tags=[bytes(32), bytes(32)]),
        _change(tags=[b"\x01" * 32, bytes(32)]),
        _change(missing=-1),
        _change(missing=True),
        _change(check=b""),
        _change(silo="a"),
    ],
)
def test_malformed_messages_are_refused(message: bytes) -> None:
    with pytest.raises(ProtocolError):
        match([prepare(["a"], KEY, JOB, "a").message, message])


def test_a_silo_refuses_tags_it_never_sent() -> None:
    mine: Prepared = prepare(["a", "b"], KEY, JOB, "a")
    tags = sorted(mine.rows)
    for wrong in ([bytes(32)], tags[::-1], [tags[0], tags[0]]):
        with pytest.raises(ProtocolError):
            adopt(mine, wrong)


# ---- what the matcher can do with what it sees ----

SPACE = [f"{n:05d}" for n in range(3000)]  # ids of few digits: every one can be tried
TABLE = SPACE[100:200]


def _dictionary_attack(message: bytes, guessed_key: AlignmentKey) -> int:
    """How many of the silo's ids the holder of `message` names, trying all ids under a key."""
    seen = set(msgpack.unpackb(message)["tags"])
    key = guessed_key.derive(JOB, b"tag")
    return sum(tag(key, identity) in seen for identity in SPACE)


def test_a_dictionary_attack_needs_the_key() -> None:
    message = prepare(TABLE, KEY, JOB, "a").message
    assert _dictionary_attack(message, KEY) == len(TABLE)  # the control: a matcher that knows the key names everyone
    assert _dictionary_attack(message, AlignmentKey.generate()) == 0
    seen = set(msgpack.unpackb(message)["tags"])
    plain = [HMAC(bytes(32), SHA256()) for _ in SPACE]
    for code, identity in zip(plain, SPACE, strict=True):
        code.update(identity.encode())
    assert not seen & {code.finalize() for code in plain}  # nor does a key of zeros help


def test_tags_of_two_jobs_cannot_be_linked() -> None:
    tags = [set(msgpack.unpackb(prepare(TABLE, KEY, job, "a").message)["tags"]) for job in ("job-1", "job-2")]
    assert not tags[0] & tags[1]
    assert len(tags[0]) == len(TABLE)


def test_the_message_tells_nothing_about_the_order_of_the_table() -> None:
    assert prepare(TABLE, KEY, JOB, "a").message == prepare(TABLE[::-1], KEY, JOB, "a").message
