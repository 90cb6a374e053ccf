"""Private matching: the right people, all else counted, kills, lies, and a dictionary attack with its controls."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_fvi import alignment
from secure_fvi.aggregation.base import carry
from secure_fvi.aggregation.roster import Identity, Roster
from secure_fvi.aggregation.store import MemoryStore, SealedStore, SqliteStore, Store
from secure_fvi.alignment import CHECKS, Alignment, Matcher, MatchingSilo, Normalisation, align, prepare, sorted_order
from secure_fvi.errors import AggregationError, InputError, ProtocolError

CODEC = alignment._CODEC
Messages = Mapping[str, bytes]
Table = list[str | None]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of four places and four checks: several batches of few people."""
    monkeypatch.setattr(alignment, "BATCH", 4)
    monkeypatch.setattr(alignment, "CHECKS", 4)


class World:
    """A roster, and silos that can be made again over the same stores."""

    def __init__(self, tables: Mapping[str, Table], session: int = 0, **options: Any) -> None:
        """options: of every silo."""
        self.tables, self.options = dict(tables), options
        self.keys = {n: Identity(Ed25519PrivateKey.from_private_bytes(n.encode() * 32)) for n in sorted(tables)}
        members = tuple((n, k.public_key) for n, k in self.keys.items())
        self.roster = Roster(bytes([session]) * 32, members, min_cohort=2)
        self.stores: dict[str, Store] = {n: MemoryStore() for n in tables}
        self.seen: list[tuple[Messages, Messages]] = []
        self.start()

    def start(self) -> None:
        self.silos = {n: self.silo(n) for n in self.keys}

    def silo(self, name: str, **options: Any) -> MatchingSilo:
        secret = hashlib.sha256(self.roster.session + name.encode()).digest()
        options = {"secret": secret, "workers": 1, **self.options, **options}
        return MatchingSilo(
            self.roster, name, self.keys[name], prepare(self.tables[name]), self.stores[name], **options
        )

    def exchange(self, messages: Messages) -> dict[str, bytes]:
        replies = {n: self.silos[n].handle(m) for n, m in messages.items()}
        self.seen.append((messages, replies))
        return replies

    def match(self, exchange: Callable[[Messages], Messages] | None = None) -> alignment.Match:
        return carry(Matcher(self.roster).match(), exchange or self.exchange)

    def people(self) -> list[list[str | None]]:
        return [[self.tables[n][r] for r in silo.alignment().rows] for n, silo in self.silos.items()]

    def said(self, kind: type, where: str | None = None) -> list[Any]:
        """All messages of a kind, whoever sent them (to or from `where`)."""
        every = [(n, m) for pair in self.seen for side in pair for n, m in side.items()]
        return [CODEC.unpack(m, kind) for n, m in every if CODEC.kind_of(m) is kind and where in (None, n)]


TABLES: dict[str, Table] = {
    "a": ["ann", "bob", "cyd", "dan", "eve", "fay", "gus"],
    "b": ["gus", "Dan ", "hal", "ann", "ida", "eve"],
    "c": ["eve", "ann", "joe", "dan", "kim", "lou", "max", "ned", "oda", "fay"],
}
COMMON = {"ann", "dan", "eve"}


# ---- the right people ----


def test_the_group_is_ristretto255() -> None:
    """The published vectors of RFC 9496, appendices A.1 and A.3."""
    group = alignment._group()
    one = (1).to_bytes(32, "little")
    generator = "e2f2ae0a6abc4e71a884a961c500515f58e30b6aa582dd8db6a65945e08d2d76"
    assert group.crypto_scalarmult_ristretto255_base(one).hex() == generator
    text = b"Ristretto is traditionally a short shot of espresso coffee"
    point = "3066f82a1a747d45120d1740f14358531a8f04bbffe6a819f86dfe50f44a0a46"
    assert group.crypto_core_ristretto255_from_hash(hashlib.sha512(text).digest()).hex() == point


def test_an_output_is_what_all_keys_make_of_the_identifier(short: None) -> None:
    """The blinds are gone from it: anyone who holds all keys finds the same."""
    world = World(TABLES)
    world.match()
    element = b"\1ann"
    points = [alignment._times(s._key, alignment.hashed(element)) for s in world.silos.values()]
    for silo in world.silos.values():
        assert silo._by_output()[alignment.output(alignment.secret_of(element, points))] == element


def test_people_meet_in_one_order(short: None) -> None:
    world = World(TABLES)
    found = world.match()
    people = [[p.strip().lower() for p in silo if p] for silo in world.people()]
    assert people[0] == people[1] == people[2]
    assert set(people[0]) == COMMON
    assert len(people[0]) == found.matched == 3
    assert found.sizes == {"a": 7, "b": 6, "c": 10}
    assert {s.alignment().order for s in world.silos.values()} == {found.order}


def test_two_jobs_tell_whom_the_silo_lacks_that_only_one_of_them_has(short: None) -> None:
    """As before and after it left. The control is one job: of whom it lacks and of whom another lacks the first silo
    learns the same."""
    lists = {"clinic": ["a", "b", "c"], "bank": ["a", "b"], "registry": ["a", "c"]}

    def matched(*silos: str) -> set[str]:
        return {lists["clinic"][row] for row in align({s: lists[s] for s in silos})["clinic"].rows}

    before, after = matched("clinic", "bank", "registry"), matched("clinic", "bank")
    assert (before, after - before) == ({"a"}, {"b"})  # whom the registry lacks
    assert set(lists["clinic"]) - before == {"b", "c"}


def test_the_order_follows_from_keys_and_not_from_tables(short: None) -> None:
    ids = {n: list(t) for n, t in TABLES.items()}
    first, again, other = (align(ids, secret=s) for s in (b"s" * 32, b"s" * 32, b"t" * 32))
    turned = align({n: t[::-1] for n, t in ids.items()}, secret=b"s" * 32)

    def people(found: Mapping[str, Alignment], tables: Mapping[str, Table]) -> Table:
        return [tables["a"][r] for r in found["a"].rows]

    assert people(first, ids) == people(again, ids) == people(turned, {n: t[::-1] for n, t in ids.items()})
    assert first["a"].order == again["a"].order
    assert first["a"].order != other["a"].order
    orders = {tuple(people(align(ids), ids)) for _ in range(8)}  # of 6; all the same once in 280,000 runs
    assert len(orders) > 1


ids = st.lists(st.one_of(st.none(), st.sampled_from("abcdefgh"), st.text(max_size=3)), max_size=12)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.tuples(ids, ids, ids))
def test_alignment_is_the_intersection_of_unique_ids(tables: tuple[Table, ...]) -> None:
    rule = Normalisation()
    normal = [[rule.apply(i) or "" for i in t] for t in tables]
    expected = set.intersection(*({i for i in t if i and t.count(i) == 1} for t in normal))
    with mock.patch.multiple(alignment, BATCH=5, CHECKS=2):
        found = align(dict(zip("abc", tables, strict=True)))
    rows = [[normal[j][r] for r in f.rows] for j, f in enumerate(found.values())]
    assert rows[0] == rows[1] == rows[2]
    assert set(rows[0]) == expected
    assert len(rows[0]) == len(expected)


def test_everything_left_out_is_counted() -> None:
    first = ["1", "2", "2 ", None, "  ", "3", "0042", "7.0"]
    found = align({"a": first, "b": ["1", "2", "42", "7", "3"]})
    mine = found["a"]
    assert (mine.matched, mine.unmatched, mine.missing, mine.invalid, mine.duplicated) == (2, 2, 2, 0, 2)
    assert mine.hints == {"leading zeros": 1, "ends in .0": 1, "punctuation or inner spaces": 1}
    assert set(mine.rows.tolist()) == {0, 5}
    assert mine.rows.dtype == np.int64
    dates = align({s: ["2001-02-03", "2001-02-30", None] for s in "ab"}, Normalisation(rules=("date",)))
    assert (dates["a"].matched, dates["a"].missing, dates["a"].invalid) == (1, 1, 1)
    assert align({"a": ["1-2"], "b": []}, Normalisation(rules=("postcode",)))["a"].hints == {}


def test_empty_lists_and_lists_without_common_people() -> None:
    for tables in ({"a": [], "b": []}, {"a": ["x"], "b": []}, {"a": ["x"], "b": ["y"], "c": ["x"]}):
        found = align(tables)
        assert [f.matched for f in found.values()] == [0] * len(tables)
        assert {f.rows.shape for f in found.values()} == {(0,)}
    with pytest.raises(InputError, match="at least two silos"):
        align({"a": ["x"]})


def test_several_columns_make_one_identifier() -> None:
    rule = Normalisation(rules=("name", "date", "postcode"))
    one = [("O'Brien", "2001-02-03", "SW1A 1AA"), ("Łęcka", "20010203", "00-950"), ("Roe", None, "1"), ("a", "x", "1")]
    other = [("LECKA", "2001/02/03", "00950"), ("obrien", "2001-02-03", "sw1a1aa"), ("Roe", "2001-02-03", "1")]
    found = align({"a": one, "b": other}, rule)
    assert found["a"].rows.tolist() in ([0, 1], [1, 0])
    assert (found["a"].missing, found["a"].invalid) == (1, 1)
    split = Normalisation(rules=("text", "text"))
    assert split.apply(("ab", "c")) != split.apply(("a", "bc"))


# ---- normalisation ----


@pytest.mark.parametrize(
    ("rule", "texts", "written"),
    [
        ("text", ["ＡＢ１", " ab1 "], "ab1"),
        ("text", ["Straße", "STRASSE"], "strasse"),
        ("text", ["007"], "007"),
        ("name", ["O'Brien-Smith", "o brien smith", "OBRIENSMITH"], "obriensmith"),
        ("name", ["Łęcka", "Lecka", "LE\u0328CKA"], "lecka"),
        ("name", ["Müller", "MULLER"], "muller"),
        ("name", ["Mueller"], "mueller"),
        ("name", ["Sørensen", "sorensen"], "sorensen"),
        ("name", ["कि"], "कि"),  # a vowel sign is no accent
        ("name", ["שָׁלוֹם", "שלום"], "שלום"),  # vowel points are left out as often as not
        ("date", ["2001-02-03", "20010203", "2001/02/03", "2001.02.03", " 2001-02-03 "], "2001-02-03"),
        ("date", ["2001-02-03 00:00:00", "2001-02-03T00:00:00.000"], "2001-02-03"),
        ("date", ["2001-02-30", "3.2.2001", "2001-2-3", "01-02-03", "2001-02/03", "2001-02-03 12:00", "soon"], None),
        ("date-dmy", ["3.2.2001", "03/02/2001", "2001-02-03"], "2001-02-03"),
        ("date-mdy", ["2/3/2001", "02-03-2001", "2001-02-03"], "2001-02-03"),
        ("date-mdy", ["13/3/2001", "2/3/01"], None),
        ("postcode", ["SW1A 1AA", "sw1a1aa", "SW1A-1AA"], "sw1a1aa"),
        ("postcode", ["01067"], "01067"),
        ("gb.nhs", ["943 476 5870", "9434765870", "943-476-5870"], "9434765870"),
        ("gb.nhs", ["943 476 5871", "943 476 587"], None),
        ("fr.nir", ["2 95 10 99 126 111 93"], "295109912611193"),
        ("fr.nir", ["295109912611194"], None),
        ("luhn", ["79927398714"], None),
        ("luhn", ["7992 739 8713"], "79927398713"),
        ("verhoeff", ["236 3", "2363"], "2363"),
        ("verhoeff", ["2364"], None),
        ("iso7064.mod_97_10", ["99991234567890121414 90"], "9999123456789012141490"),
        ("iso7064.mod_97_10", ["9999123456789012141491"], None),
    ],
)  # fmt: skip
def test_each_rule(rule: str, texts: list[str], written: str | None) -> None:
    assert [Normalisation(rules=(rule,)).apply(t) for t in texts] == [written] * len(texts)


@pytest.mark.parametrize("rule", ["text", "name", "date", "date-dmy", "postcode", "gb.nhs", "luhn"])
def test_nothing_is_missing_and_not_wrong(rule: str) -> None:
    assert [Normalisation(rules=(rule,)).apply(t) for t in (None, "", "  ")] == [""] * 3


def test_dropped_characters() -> None:
    rule = Normalisation(drop="- ()")
    assert rule.apply("(07) 3138-2000") == rule.apply("0731382000")
    assert Normalisation(drop="-. ").text() == Normalisation(drop=" .--").text()
    assert Normalisation(strip=False, casefold=False).apply(" A") == " A"


def test_bad_input() -> None:
    with pytest.raises(InputError, match="must be text"):
        prepare([7])  # type: ignore[list-item]
    with pytest.raises(InputError, match="must be text"):
        prepare([("a", 7)], Normalisation(rules=("text", "text")))  # type: ignore[list-item]
    with pytest.raises(InputError, match="of 2 columns, and 1 rules"):
        prepare([("a", "b")])
    with pytest.raises(InputError, match="unicode_form"):
        Normalisation(unicode_form="NFX")  # type: ignore[arg-type]
    for rule in ("nhs", "gb.xyz", "../os", "util", "gb.nhs.x"):
        with pytest.raises(InputError, match=f"rule '{rule}' is unknown"):
            Normalisation(rules=(rule,))
    with pytest.raises(InputError, match="at least one"):
        Normalisation(rules=())


def test_no_secret_and_no_identifier_is_shown() -> None:
    world = World(TABLES)
    silo = world.silos["a"]
    silo.handle(CODEC.pack(alignment.SizeRequest()))
    assert repr(silo) == "MatchingSilo('a')"
    assert repr(silo._prepared) == "Prepared(7 identifiers)"


def test_libsodium_is_not_left_in_the_temporary_folder(tmp_path: Path) -> None:
    code = "from secure_fvi import alignment as a; assert len(a.hashed(b'x')) == 32"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)}, check=True)
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_folder_that_lets_nothing_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rbcl.py").write_text("raise OSError(1, 'Operation not permitted')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [m for m in sys.modules if m.partition(".")[0] == "rbcl"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(InputError, match=r"Operation not permitted\); set TMPDIR"):
        alignment._group.__wrapped__()


# ---- a dictionary attack ----

SPACE: Table = [f"{n:04d}" for n in range(400)]  # ids of few digits: every one can be tried
GUESSES = {"a": SPACE[95:115], "b": SPACE[125:155:2], "c": SPACE[135:160]}
TARGET = SPACE[100:140]


def _attacked(honest: str) -> World:
    """All but one silo list what they guess, and the matcher is with them."""
    world = World({**GUESSES, honest: TARGET}, largest=CHECKS + len(TARGET))
    world.match()
    return world


def _named(world: World, honest: str, parts: Callable[[bytes], Iterable[list[bytes]]]) -> set[str]:
    """Whom of the honest silo's people the colluders name, from all parts of F(x) that `parts` proposes."""
    (sent,) = world.said(alignment.Outputs, honest)
    seen = set(alignment._split(sent.outputs))
    elements = {str(s): b"\1" + str(s).encode() for s in SPACE}
    return {
        s for s, e in elements.items() if any(alignment.output(alignment.secret_of(e, p)) in seen for p in parts(e))
    }


def _keyed_hashes(key: bytes, table: Table) -> set[bytes]:
    """The matching that was here before: HMAC-SHA256 under a key that the silos share."""

    def tag(identifier: str | None) -> bytes:
        code = HMAC(key, SHA256())
        code.update(str(identifier).encode())
        return code.finalize()

    return {tag(identifier) for identifier in table}


def test_the_control_keyed_hashes_are_opened_by_one_colluder() -> None:
    """Each silo has the key: one of them with the matcher lists the other's people, without asking anyone anything."""
    key = bytes(range(32))
    seen = _keyed_hashes(key, TARGET)
    assert [i for i in SPACE if _keyed_hashes(key, [i]) <= seen] == TARGET


@pytest.mark.later
@pytest.mark.parametrize("honest", ["a", "b", "c"])
def test_colluders_test_no_more_identifiers_than_they_committed_to(honest: str) -> None:
    world = _attacked(honest)
    others = [n for n in world.silos if n != honest]
    (outputs,) = world.said(alignment.Outputs, honest)
    theirs = {o for n in others for o in alignment._split(world.said(alignment.Outputs, n)[0].outputs)}
    guessed = {g for n in others for g in GUESSES[n]}
    checks = alignment.CHECKS
    # By the protocol: those whom they listed, each at the price of a place of a list that was signed for.
    assert len(set(alignment._split(outputs.outputs)) & theirs) == len(guessed & set(TARGET)) + checks
    assert 0 < len(guessed & set(TARGET)) < len(TARGET)

    # Beyond it: their own keys, and whatever the honest silo has evaluated for them, in the place of its part.
    def keys(element: bytes, of: Iterable[str]) -> dict[str, bytes]:
        return {n: alignment._times(world.silos[n]._key, alignment.hashed(element)) for n in of}

    unblinded = []
    for name in others:
        silo = world.silos[name]
        for at, element in enumerate(silo._list):
            blinded = alignment._split(world.said(alignment.Blinded, name)[0].points)[at]
            evaluated = alignment._times(world.silos[honest]._key, blinded)
            unblind = alignment._group().crypto_core_ristretto255_scalar_invert(
                alignment._scalar(silo._blinds, element)
            )
            unblinded.append(alignment._times(unblind, evaluated))
    sent = {p for e in world.said(alignment.Evaluated, honest) for points in e.points for p in alignment._split(points)}
    assert len(unblinded) == len(sent) == sum(len(GUESSES[n]) + checks for n in others)

    def proposed(element: bytes) -> Iterable[list[bytes]]:
        known = keys(element, others)
        return ([{**known, honest: p}[n] for n in world.silos] for p in unblinded)

    assert _named(world, honest, proposed) == guessed & set(TARGET)
    # The control: with the honest silo's key as well, the same search names everyone.
    every = _named(world, honest, lambda e: [list(keys(e, world.silos).values())])
    assert every == set(TARGET)


@pytest.mark.parametrize("restarted", [False, True])
def test_no_further_evaluation_is_to_be_had(restarted: bool) -> None:
    """Each is signed as it should be, by a silo that lies about what it signs."""
    world = _attacked("c")
    if restarted:
        world.silos["c"] = world.silo("c")
    honest, session = world.silos["c"], world.silos["a"]._agreed_session()
    fresh = b"".join(alignment.hashed(b"\1" + str(s).encode()) for s in SPACE[: session.sizes[0]])

    def asked(batch: int, owner: int, points: bytes, signer: str = "a") -> bytes:
        signature = world.keys[signer].sign(session.blinded(owner, batch, points))
        return CODEC.pack(alignment.EvaluateRequest(batch, [owner], [points], [signature]))

    for message, words in (
        (asked(0, 0, fresh), "silo 'a', batch 0: other points were evaluated for these places"),
        (asked(1, 0, fresh[:32]), "silo 'a', batch 1: not as many points"),
        (asked(0, 0, fresh[:-32]), "not as many points"),
        (asked(0, 0, fresh + fresh[:32]), "not as many points"),
        (asked(0, 0, b""), "not as many points"),
        (asked(0, 1, fresh[: 32 * session.sizes[1]]), "silo 'b' did not sign batch 0"),
        (asked(0, 2, fresh), "for the other silos"),
        (asked(0, 9, fresh), "for the other silos"),
        (asked(0, 0, fresh[:32] * session.sizes[0]), "a point stands twice"),
    ):
        with pytest.raises(ProtocolError, match=words):
            honest.handle(message)
    larger = session.sizes[0] + 5
    statement = alignment._size_statement(world.roster, 0, larger, honest._rule)
    said = world.said(alignment.Sizes)[0]
    sizes, signatures = [larger, *said.sizes[1:]], [world.keys["a"].sign(statement), *said.signatures[1:]]
    with pytest.raises(ProtocolError, match="other sizes were agreed"):
        honest.handle(CODEC.pack(alignment.Sizes(sizes, signatures)))
    repeated = next(m["c"] for m, _ in world.seen if CODEC.kind_of(m.get("c", b"")) is alignment.EvaluateRequest)
    (before,) = world.said(alignment.Evaluated, "c")
    assert CODEC.unpack(honest.handle(repeated), alignment.Evaluated) == before  # the same, for the same points


def test_a_list_that_is_longer_than_allowed_is_refused() -> None:
    world = World({"a": list("xyz"), "b": ["x"]}, largest=CHECKS + 2)
    with pytest.raises(ProtocolError, match=f"'a' has a list of {CHECKS + 3} places .* 'b' allows {CHECKS + 2}"):
        world.match()
    assert world.stores["b"].get("matching/sizes") is None
    World({"a": list("xyz"), "b": ["x"]}, largest=CHECKS + 3).match()


# ---- what each party learns ----


def test_messages_are_as_long_for_other_people(short: None) -> None:
    """Kinds, lengths and receivers follow from sizes and the number in common: with other people of as many nothing
    else changes, and with one more in common the last lists alone."""

    def lengths(tables: Mapping[str, Table]) -> list[list[tuple[str, int]]]:
        world = World(tables)
        world.match()
        return [[(n, len(m)) for n, m in side.items()] for pair in world.seen for side in pair]

    others: dict[str, Table] = {n: [f"x{p}" for p in t] for n, t in TABLES.items()}
    assert lengths(others) == lengths(TABLES)
    more = {**TABLES, "b": ["gus", "dan", "fay", "ann", "ida", "eve"]}
    differ = [i for i, (x, y) in enumerate(zip(lengths(TABLES), lengths(more), strict=True)) if x != y]
    assert len(differ) == 1
    world = World(TABLES)
    world.match()
    assert {CODEC.kind_of(m) for m in world.seen[differ[0] // 2][0].values()} == {alignment.Common}


def test_what_a_silo_is_sent(short: None) -> None:
    """Sizes, the others' blinded points, evaluations of its own, the outputs that all have, signatures; no output of
    another's that it lacks. The points are new in every session and at every silo, whomever they stand for."""
    worlds = [World(TABLES, session) for session in (1, 2)]
    for world in worlds:
        world.match()
    alike = {n: list(TABLES["a"]) for n in "ab"}
    twins = World(alike, 3)
    twins.match()

    def blinded(world: World, name: str | None = None) -> list[bytes]:
        return [p for m in world.said(alignment.Blinded, name) for p in alignment._split(m.points)]

    points = [p for world in (*worlds, twins) for p in blinded(world)]
    assert len(points) == len(set(points)) == 2 * (23 + 3 * 4) + 2 * 11
    world = worlds[0]
    own = {n: set(silo._by_output()) for n, silo in world.silos.items()}
    everyones = set.intersection(*own.values())
    for name, outputs in own.items():
        to = [m[name] for m, _ in world.seen if name in m]
        held = {m[at : at + 32] for m in to for at in range(len(m) - 31)}
        assert held & set.union(*own.values()) == everyones <= outputs
        kinds = {CODEC.kind_of(m) for m in to}
        assert kinds == set(world.silos[name]._handlers)


def test_what_the_matcher_sees_says_nothing_of_who(short: None) -> None:
    """Overlaps of every group of silos in number; under other keys nothing that it was sent comes again."""
    first, other = World(TABLES, 1), World(TABLES, 2)
    for world in (first, other):
        world.match()
    outputs = [[set(alignment._split(w.said(alignment.Outputs, n)[0].outputs)) for n in TABLES] for w in (first, other)]
    assert not set.union(*outputs[0]) & set.union(*outputs[1])
    overlaps = {(i, j): len(outputs[0][i] & outputs[0][j]) - 4 for i in range(3) for j in range(i)}
    assert overlaps == {(1, 0): 4, (2, 0): 4, (2, 1): 3}  # fay and gus are with two; docs/vertical-alignment.md says so
    assert all(sorted(m.outputs[i : i + 32] for i in range(0, len(m.outputs), 32)) == alignment._split(m.outputs)
               for m in first.said(alignment.Outputs))  # fmt: skip


def test_a_matcher_with_a_list_knows_where_each_of_it_is(short: None) -> None:
    """As the server of a job that holds the response: not only whom all hold, but silo by silo. Of others it has
    outputs that it cannot make. The control is a session in which it had no list."""
    world, without = World(TABLES, 1), World(TABLES, 2)
    for either in (world, without):
        either.match()
    own = {o: e[1:].decode() for o, e in world.silos["c"]._by_output().items() if e[0] == 1}
    sent = {n: alignment._split(world.said(alignment.Outputs, n)[0].outputs) for n in "ab"}
    found = {n: {own[o] for o in outputs if o in own} for n, outputs in sent.items()}
    assert found == {"a": {"ann", "dan", "eve", "fay"}, "b": COMMON}  # fay is at one of the two
    assert {n: len(set(outputs) - set(own)) for n, outputs in sent.items()} == {"a": 3 + 4, "b": 3 + 4}  # and checks
    assert not own.keys() & {o for n in "ab" for o in alignment._split(without.said(alignment.Outputs, n)[0].outputs)}


# ---- kills ----


class _Dying:
    """A store of a process that is killed at its n-th write: before it, or as soon as it is done."""

    def __init__(self, inner: Store, at: int, before: bool) -> None:
        self._inner, self._left, self._before = inner, at, before

    def _write(self, write: Callable[[], Any]) -> Any:
        self._left -= 1
        if self._left == 0 and self._before:
            raise KeyboardInterrupt
        done = write()
        if self._left == 0:
            raise KeyboardInterrupt
        return done

    def claim(self, slot: str, value: bytes, settle: bool = True) -> bytes:
        found: bytes = self._write(lambda: self._inner.claim(slot, value, settle))
        return found

    def put(self, slots: Mapping[str, bytes]) -> None:
        self._write(lambda: self._inner.put(slots))

    def get(self, slot: str) -> bytes | None:
        return self._inner.get(slot)

    def drop(self, slots: Iterable[str]) -> None:
        self._inner.drop(slots)


def _evaluated(world: World) -> dict[tuple[str, int], set[bytes]]:
    """By silo and owner, the points that the silo was asked to evaluate and did."""
    found: dict[tuple[str, int], set[bytes]] = {}
    for messages, replies in world.seen:
        for name, message in messages.items():
            if CODEC.kind_of(message) is alignment.EvaluateRequest and name in replies:
                request = CODEC.unpack(message, alignment.EvaluateRequest)
                for owner, points in zip(request.owners, request.points, strict=True):
                    found.setdefault((name, owner), set()).update(alignment._split(points))
    return found


@pytest.mark.parametrize("before", [True, False])
def test_a_silo_killed_at_any_write_goes_on(short: None, before: bool) -> None:
    whole = World(TABLES)
    whole.match()
    expected = {n: s.alignment() for n, s in whole.silos.items()}
    kills = 0
    for at in range(1, 100):
        world = World(TABLES)
        world.stores["b"] = MemoryStore()
        inner = world.stores["b"]
        world.stores["b"] = _Dying(inner, at, before)
        try:
            world.silos["b"] = world.silo("b")
            world.match()
        except KeyboardInterrupt:
            kills += 1
        else:
            break
        world.stores["b"] = inner
        world.silos["b"] = world.silo("b", secret=None)  # it is in the store, or was never used
        world.match()
        found = {n: s.alignment() for n, s in world.silos.items()}
        if at > 1 or not before:
            assert {n: f.order for n, f in found.items()} == {n: f.order for n, f in expected.items()}
            assert all(np.array_equal(f.rows, expected[n].rows) for n, f in found.items())
        assert {len(f.rows) for f in found.values()} == {3}
        sizes = [len(s._list) for s in world.silos.values()]
        assert all(len(points) == sizes[owner] for (_, owner), points in _evaluated(world).items())
    assert kills == 15


@pytest.mark.later
def test_all_parties_killed_between_any_two_exchanges(short: None, tmp_path: Path) -> None:
    """Stores on the disk, sealed; once sizes are agreed the batches that are done are not asked for again."""
    whole = World(TABLES)
    whole.match()
    secret, steps = os.urandom(32), len(whole.seen)
    for stop in range(1, steps, 4):
        world = World(TABLES)

        def opened(folder: Path, world: World = world) -> list[SqliteStore]:
            files = {n: SqliteStore(folder / f"{n}.sqlite") for n in TABLES}
            world.stores = {n: SealedStore(f, secret, n.encode()) for n, f in files.items()}
            world.start()
            return list(files.values())

        def until(messages: Messages, world: World = world, stop: int = stop) -> dict[str, bytes]:
            if len(world.seen) == stop:
                raise KeyboardInterrupt
            return world.exchange(messages)

        folder = tmp_path / str(stop)
        folder.mkdir()
        files = opened(folder)
        with pytest.raises(KeyboardInterrupt):
            world.match(until)
        for file in files:
            file.close()
        begun, files = len(world.seen), opened(folder)
        world.match()
        assert {n: s.alignment().order for n, s in world.silos.items()} == {
            n: s.alignment().order for n, s in whole.silos.items()
        }
        assert len(world.seen) - begun <= steps - max(stop - 5, 0)
        sizes = [len(s._list) for s in world.silos.values()]
        assert all(len(points) == sizes[owner] for (_, owner), points in _evaluated(world).items())
        for file in files:
            file.close()
    raw = b"".join(p.read_bytes() for p in tmp_path.rglob("*.sqlite*"))
    assert not any(b"\1" + str(i).encode() in raw for t in TABLES.values() for i in t)


def test_a_silo_that_does_not_answer_is_named_and_waited_for(short: None) -> None:
    world = World(TABLES)

    def without_b(messages: Messages) -> dict[str, bytes]:
        return world.exchange({n: m for n, m in messages.items() if n != "b" or len(world.seen) < 4})

    with pytest.raises(AggregationError, match="no answer from b; match again"):
        world.match(without_b)
    assert world.match().matched == 3


def test_other_identifiers_after_a_restart_are_refused(short: None) -> None:
    world = World(TABLES)
    world.match()
    world.silo("a")
    world.tables["a"] = [*TABLES["a"][:-1], "zoe"]
    with pytest.raises(InputError, match="silo 'a': its store was begun with other identifiers"):
        world.silo("a")


def test_a_session_has_keys_of_its_own(short: None) -> None:
    """Whoever keeps a secret, or a store, for two sessions has two keys all the same, or is refused."""
    first, other = World(TABLES, 1, secret=bytes(32)), World(TABLES, 2, secret=bytes(32))
    assert first.silos["a"]._key != other.silos["a"]._key
    assert first.silos["a"]._blinds != other.silos["a"]._blinds
    assert first.silos["a"]._list != other.silos["a"]._list
    other.stores["a"] = first.stores["a"]
    with pytest.raises(InputError, match="or another session; a new"):
        other.silo("a")


# ---- lies ----


def _altered(kind: type, change: Callable[[Any], Any], world: World, whom: str | None = None) -> Callable[..., Any]:
    """An exchange that changes messages of a kind on their way."""

    def one(name: str, message: bytes) -> bytes:
        if CODEC.kind_of(message) is not kind or whom not in (None, name):
            return message
        return CODEC.pack(change(CODEC.unpack(message, kind)))

    def exchange(messages: Messages) -> dict[str, bytes]:
        replies = world.exchange({n: one(n, m) for n, m in messages.items()})
        return {n: one(n, m) for n, m in replies.items()}

    return exchange


def _flipped(signature: bytes) -> bytes:
    return bytes([signature[0] ^ 1]) + signature[1:]


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        (alignment.Size, lambda m: m._replace(size=m.size + 1), "did not sign the size"),
        (alignment.Size, lambda m: m._replace(signature=_flipped(m.signature)), "did not sign the size"),
        (alignment.Sizes, lambda m: m._replace(sizes=m.sizes[1:]), "of all silos of the roster"),
        (alignment.Sizes, lambda m: m._replace(sizes=m.sizes[::-1]), "did not sign the size"),
        (alignment.Blinded, lambda m: m._replace(signature=_flipped(m.signature)), "did not sign batch 0"),
        (alignment.Blinded, lambda m: m._replace(points=m.points[32:] + m.points[:32]), "did not sign batch 0"),
        (alignment.EvaluateRequest, lambda m: m._replace(signatures=m.signatures[1:]), "needs owners, each once"),
        (alignment.Evaluated, lambda m: m._replace(signatures=m.signatures[1:]), "did not evaluate for each"),
        (alignment.Evaluated, lambda m: m._replace(points=m.points[::-1]), "did not sign its evaluation"),
        (alignment.Evaluations, lambda m: m._replace(points=m.points[1:]), "of all other silos are needed"),
        (alignment.Evaluations, lambda m: m._replace(batch=9), "has no batch 9"),
        (alignment.Evaluations, lambda m: m._replace(signatures=m.signatures[::-1]), "did not sign its evaluation"),
        (alignment.Outputs, lambda m: m._replace(outputs=m.outputs[32:]), "as many outputs as it signed for"),
        (alignment.Outputs, lambda m: m._replace(outputs=m.outputs[::-1]), "sorted, each once|did not sign its"),
        (alignment.Outputs, lambda m: m._replace(signature=_flipped(m.signature)), "did not sign its outputs"),
        (alignment.Common, lambda m: m._replace(outputs=bytes(32) + m.outputs), "that this silo never sent"),
        (alignment.Common, lambda m: m._replace(outputs=m.outputs + m.outputs[-32:]), "sorted, each once"),
        (alignment.Common, lambda m: m._replace(outputs=m.outputs[1:]), "32 bytes each"),
        (alignment.Common, lambda m: m._replace(outputs=b""), "4 of the 4 checks"),
        (alignment.Ordered, lambda m: m._replace(signature=_flipped(m.signature)), "did not sign this order"),
        (alignment.Agreed, lambda m: m._replace(signatures=m.signatures[1:]), "signatures of all silos"),
    ],
)
def test_what_was_altered_on_its_way_is_refused(
    short: None, kind: type, change: Callable[[Any], Any], words: str
) -> None:
    world = World(TABLES)
    with pytest.raises(ProtocolError, match=words):
        world.match(_altered(kind, change, world))
    for silo in world.silos.values():
        with pytest.raises(ProtocolError, match="not agreed on an order"):
            silo.alignment()


NO_POINTS = {"identity": bytes(32), "not canonical": b"\xff" * 32, "negative": b"\1" + bytes(31)}


@pytest.mark.parametrize("point", NO_POINTS)
def test_a_signed_point_that_is_none_is_refused(short: None, point: str) -> None:
    """From the owner of a list, and from one that evaluates."""
    world = World(TABLES)
    bad, times, blind = NO_POINTS[point], alignment._times, world.silos["a"]._blind

    def blinded(batch: int) -> Any:
        good = blind(batch)
        points = bad + good.points[32:]
        return good._replace(points=points, statement=world.silos["a"]._agreed_session().blinded(0, batch, points))

    with mock.patch.object(world.silos["a"], "_blind", blinded):  # noqa: SIM117
        with pytest.raises(ProtocolError, match="silo 'a', batch 0: a point of a matching is no point"):
            world.match()
    world = World(TABLES)
    key = world.silos["b"]._key

    def evaluated(scalar: bytes, at: bytes) -> bytes:
        return bad if scalar == key and at not in hashes else times(scalar, at)

    hashes = {alignment.hashed(e) for e in world.silos["b"]._list}
    with mock.patch.object(alignment, "_times", evaluated):  # noqa: SIM117
        with pytest.raises(ProtocolError, match="from silo 'b': a point of a matching is no point"):
            world.match()


def _lying(world: World, share: float) -> None:
    """Silo b evaluates this share of the others' points with another key."""
    silo, times, draw = world.silos["b"], alignment._times, random.Random(3)
    key, other = silo._key, alignment._scalar(bytes(32), b"another")
    hashes = {alignment.hashed(e) for e in silo._list}

    def evaluated(scalar: bytes, at: bytes) -> bytes:
        lies = scalar == key and at not in hashes and draw.random() < share
        return times(other if lies else scalar, at)

    with mock.patch.object(alignment, "_times", evaluated):
        world.match()


@pytest.mark.parametrize("share", [1.0, 0.1])
def test_a_silo_that_evaluates_with_two_keys_is_noticed(share: float) -> None:
    """It sees blinded points and cannot spare the checks: two lists of 64, a tenth of them wrong, are all right once in
    (0.9^128)^-1 = 700,000 times."""
    world = World({n: [f"{i}" for i in range(100)] for n in "abc"})
    with pytest.raises(ProtocolError, match="of the 64 checks, which every silo holds, are not common"):
        _lying(world, share)


def test_the_control_without_checks_people_are_lost_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment, "CHECKS", 0)
    world = World({n: [f"{i}" for i in range(100)] for n in "abc"})
    _lying(world, 0.1)
    people = world.people()
    assert people[0] == people[1] == people[2]  # whoever meets is one person still
    assert len(people[0]) < 95


def test_silos_are_not_told_two_orders(short: None) -> None:
    """A matcher that leaves a person out at one silo alone is found by the signatures; one that leaves the same person
    out at all is not: docs/vertical-alignment.md says so."""
    world = World(TABLES)
    world.match()
    checks = {o for o, e in world.silos["a"]._by_output().items() if e[0] == 0}

    def less(message: Any) -> Any:
        kept = list(alignment._split(message.outputs))
        kept.remove(next(o for o in kept if o not in checks))
        return message._replace(outputs=b"".join(kept))

    world = World(TABLES)
    with pytest.raises(ProtocolError, match=r"did not sign this order, .*, or the matcher, which carried that"):
        world.match(_altered(alignment.Common, less, world, "a"))
    world = World(TABLES)

    def signed(messages: Messages) -> dict[str, bytes]:
        return _altered(alignment.Common, less, world)(messages)

    world.match(signed)
    assert {len(p) for p in world.people()} == {2}
    with pytest.raises(ProtocolError, match="another common order was signed"):
        world.match()


@pytest.mark.parametrize("proved", [True, False])
def test_a_silo_that_copies_anothers_outputs_holds_nobody(
    short: None, monkeypatch: pytest.MonkeyPatch, proved: bool
) -> None:
    """One that lists strangers hands the matcher the outputs of another as its own. All checks are among them. The
    control is a signature on the order alone, which it can make: all whom the others share are then matched."""
    if not proved:
        monkeypatch.setattr(alignment._Session, "held", lambda self, silo, common, secrets: self.order(common))
    world = World({**TABLES, "a": [f"nobody {k}" for k in range(6)]})
    key, other = world.keys["a"], world.silos["b"]

    def exchange(messages: Messages) -> dict[str, bytes]:
        asked = CODEC.unpack_any(next(iter(messages.values())))
        if not isinstance(asked, alignment.OutputsRequest | alignment.Common | alignment.Agreed):
            return world.exchange(messages)
        replies = {n: world.silos[n].handle(m) for n, m in messages.items() if n != "a"}
        session = other._agreed_session()
        if isinstance(asked, alignment.OutputsRequest):
            copied = CODEC.unpack(replies["b"], alignment.Outputs).outputs
            mine: Any = alignment.Outputs(copied, key.sign(session.outputs(0, copied)))
        elif isinstance(asked, alignment.Common):
            mine = alignment.Ordered(key.sign(session.held(0, asked.outputs, bytes(len(asked.outputs)))))
        else:
            mine = alignment.Ready(0)
        return {**replies, "a": CODEC.pack(mine)}

    if not proved:
        world.match(exchange)
        assert [len(world.silos[n].alignment().rows) for n in "bc"] == [3, 3]
        return
    with pytest.raises(ProtocolError, match="'a' did not sign this order, as who lists all of these people can"):
        world.match(exchange)
    with pytest.raises(ProtocolError, match="not agreed on an order"):
        other.alignment()


def test_silos_that_normalise_differently_are_told(short: None) -> None:
    world = World(TABLES)
    rule = Normalisation(casefold=False)
    world.silos["b"] = MatchingSilo(world.roster, "b", world.keys["b"], prepare(TABLES["b"], rule))
    with pytest.raises(InputError, match="'a' and 'b' normalise identifiers differently"):
        world.match()


def test_turns_and_strangers(short: None) -> None:
    world = World(TABLES)
    silo = world.silos["a"]
    for message in (alignment.BlindRequest(0), alignment.OutputsRequest(), alignment.Common(b"")):
        with pytest.raises(ProtocolError, match="no sizes were agreed yet"):
            silo.handle(CODEC.pack(message))
    with pytest.raises(ProtocolError, match="on an order that was named before"):
        silo.handle(CODEC.pack(alignment.Agreed([bytes(64)] * 3)))
    with pytest.raises(ProtocolError, match="does not take Ready"):
        silo.handle(CODEC.pack(alignment.Ready(0)))
    with pytest.raises(InputError, match="'x' is not in the roster"):
        MatchingSilo(world.roster, "x", world.keys["a"], prepare([]))
    with pytest.raises(InputError, match="another identity key"):
        MatchingSilo(world.roster, "a", world.keys["b"], prepare([]))
    said = [CODEC.unpack(s.handle(CODEC.pack(alignment.SizeRequest())), alignment.Size) for s in world.silos.values()]
    silo.handle(CODEC.pack(alignment.Sizes([s.size for s in said], [s.signature for s in said])))
    with pytest.raises(ProtocolError, match="is not evaluated to its end"):
        silo.handle(CODEC.pack(alignment.OutputsRequest()))
    with pytest.raises(ProtocolError, match="silo 'b': expected Size, got Ready"):
        world.match(lambda messages: {n: CODEC.pack(alignment.Ready(0)) if n == "b" else world.silos[n].handle(m)
                                      for n, m in messages.items()})  # fmt: skip


def test_threads_change_nothing() -> None:
    table: Sequence[str] = [f"{i}" for i in range(300)]
    found = []
    for workers in (1, 3):
        world = World({"a": list(table), "b": list(table[::-1])}, workers=workers)
        found.append(world.match().order)
    assert found[0] == found[1]


def test_files_that_are_sorted_state_one_digest() -> None:
    """Of their people as they are matched, however written; the same people in another order, others, other rules and
    another job have others. What cannot be compared so is counted."""
    rule = Normalisation(drop="-")
    first = sorted_order(prepare(["P-1", "P-2", "Q3"], rule), b"job")
    assert first == sorted_order(prepare([" p1", "P2", "q-3"], rule), b"job")
    others = [
        sorted_order(prepare(ids, form), bound)
        for ids, form, bound in (
            (["P-1", "P-2", "Q4"], rule, b"job"),
            (["P-1", "P-2"], rule, b"job"),
            (["P-1", "P-2", "Q3"], Normalisation(drop="- "), b"job"),
            (["P-1", "P-2", "Q3"], rule, b"another job"),
        )
    ]
    assert len({first, *others}) == len(others) + 1
    for ids, words in (
        (["b", "a", "c", "b2"], "not sorted by their identifier: 2 stand before a smaller one"),
        (["a", None, "b"], "1 rows have no identifier"),
        (["a", "b", "B"], "2 rows share theirs with another"),
    ):
        with pytest.raises(InputError, match=words):
            sorted_order(prepare(ids))
    with pytest.raises(InputError, match="1 rows have one that breaks its rule"):
        sorted_order(prepare(["2001-02-30", "2001-03-01"], Normalisation(rules=("date",))))
