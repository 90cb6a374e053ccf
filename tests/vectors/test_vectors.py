"""The vectors are what the parties say, an independent reading of docs/protocol.md passes them, and it notices whatever
is altered in them. Which alterations the parties themselves do not notice is a list: none of them changes a total."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from make_vectors import FOLDER, SCENARIOS, THREE, WHOLE, Scenario, Sent, play, text
from verifier import KINDS, Verifier, Wrong, verify

from secure_fvi.aggregation.messages import _SCHEMAS
from secure_fvi.errors import AggregationError

FIELDS = {kind.__name__: kind._fields for kind in _SCHEMAS}  # type: ignore[attr-defined]


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())  # type: ignore[no-any-return]


def altered(value: Any, name: str) -> Any:
    """The smallest change of one field: a number is one more, a bit is flipped, of a list in its first element."""
    if isinstance(value, bytes):
        return bytes([value[0] ^ 1]) + value[1:] if value else bytes(32)
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, dict):
        (key, first), *rest = value.items()
        return {key: altered(first, name), **dict(rest)}
    if isinstance(value, list):
        return [altered(value[0], name), *value[1:]] if value else [bytes(64 if name == "proofs" else 32)]
    return value + 1


def alterations(message: bytes) -> Iterator[tuple[str, str, bytes]]:
    """Kind, field and what it becomes."""
    fields = msgpack.unpackb(message)
    kind = KINDS[fields[1] - 1]
    for at, (name, value) in enumerate(zip(("version", "tag", *FIELDS[kind]), fields, strict=True)):
        yield kind, name, msgpack.packb([*fields[:at], altered(value, name), *fields[at + 1 :]])


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_the_files_are_what_the_parties_say(scenario: Scenario) -> None:
    made = play(scenario)
    assert not made.refusals
    assert not made.faults
    assert text(made.vector) == (FOLDER / f"{scenario.name}.json").read_text(), "run make_vectors.py, if it is meant"


@pytest.mark.parametrize("name", [s.name for s in SCENARIOS])
def test_an_independent_reading_passes(name: str) -> None:
    vector = read(name)
    seen = verify(vector)
    assert seen.total(max(seen.sums)) == vector["sums"][-1]["total"]


def test_the_vectors_have_every_message_and_every_way_to_a_secret() -> None:
    kinds = {row[2] for s in SCENARIOS for row in read(s.name)["messages"]}
    assert kinds == set(KINDS) == set(FIELDS)
    for name, index, b_of, e_of in (("three", 1, 1, 2), ("ring", 0, 24, 5)):
        seen = verify(read(name))
        assert b_of in seen.contributions[index]
        assert not {b_of, e_of} & (seen.shown[index].keys() - {2})
        assert e_of not in seen.contributions[index]
        assert b_of in seen.near[e_of]  # so that no survivor tells the seed of these two


def test_it_reads_nothing_of_ours() -> None:
    tree = ast.parse(Path(FOLDER / "verifier.py").read_text())
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    foreign = {name.partition(".")[0] for name in names}
    assert foreign == {
        "__future__", "collections", "cryptography", "fractions", "functools", "hashlib", "itertools", "json", "math",
        "msgpack", "pathlib", "typing",
    }  # fmt: skip


@pytest.mark.parametrize("name", [s.name for s in SCENARIOS])
def test_it_notices_each_field_of_each_message(name: str) -> None:
    """Of 33 silos' messages, the first three of each kind."""
    vector = read(name)
    seen, tried, kinds = Verifier(vector), 0, dict.fromkeys(KINDS, 0)
    for sender, receivers, kind, packed in vector["messages"]:
        message = bytes.fromhex(packed)
        kinds[kind] += 1
        for _, _, other in alterations(message) if "ring" not in name or kinds[kind] <= 3 else ():
            with pytest.raises(Wrong):
                seen.take(sender, receivers, kind, other)
            tried += 1
        seen.take(sender, receivers, kind, message)  # the control: as it was, it is taken, after all of those
    assert seen.total(min(seen.sums)) == vector["sums"][0]["total"]
    assert tried > (150 if "whole" not in name else 60)


def test_a_past_of_another_account_is_noticed() -> None:
    """Of any two silos, at any sum that has one, and where there was none. The last sum's masks hold it as well."""
    sums = read("whole")["sums"]
    assert [len(one.get("pasts", ())) for one in sums] == [0, 3, 6]
    for at, other in [(1, 2), (2, 5)]:
        vector = read("whole")
        named = vector["sums"][at]["pasts"][other]
        named[2] = named[2][:-1] + ("0" if named[2][-1] != "0" else "1")
        with pytest.raises(Wrong, match="what both were asked before"):
            verify(vector)
    vector["sums"][2]["pasts"].pop()
    with pytest.raises(Wrong, match="what both were asked before"):
        verify(vector)


def test_masks_are_of_the_pasts_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a reader who takes the last sum's to be those of the one before."""
    vector, real = read("whole"), Verifier.past
    monkeypatch.setattr(Verifier, "past", lambda self, index, *pair: real(self, min(index, 2), *pair))
    for named in vector["sums"][2]["pasts"]:
        named[2] = vector["sums"][1]["pasts"][0][2]  # of that one sum, the same of any two
    with pytest.raises(Wrong, match="values under their masks"):
        verify(vector)


def test_it_notices_each_field_of_each_broadcast() -> None:
    """Though the context be that of what was altered. The control: as they are, they are taken."""
    verify(read("whole"))
    for at in range(3):
        vector = read("whole")
        fields = msgpack.unpackb(bytes.fromhex(vector["sums"][at]["broadcast"]))
        for place, value in enumerate(fields):
            packed = msgpack.packb([*fields[:place], altered(value, ""), *fields[place + 1 :]])
            vector["sums"][at] |= {"broadcast": packed.hex(), "context": sha256(packed).hexdigest()}
            with pytest.raises(Wrong, match=r"cohort|sum|question|used|answered"):
                verify(vector)


@pytest.mark.parametrize("part", ["total", "values", "derived", "a message left out", "a message twice", "blocks"])
@pytest.mark.parametrize("name", ["three", "whole"])
def test_it_notices_what_stands_beside_the_messages(part: str, name: str) -> None:
    vector = read(name)
    if part == "total":
        vector["sums"][1]["total"][0] += 2.0**-30
    elif part == "values":
        vector["sums"][0]["values"]["east"][3] += 2.0**-30
    elif part == "derived":
        vector["derived"]["order"].reverse()
    elif part == "blocks":
        vector["blocks"][0][2] += 1.0
    else:
        at = next(i for i, row in enumerate(vector["messages"]) if row[2] == "Contribution")
        vector["messages"][at : at + 1] = [vector["messages"][at]] * 2 if part == "a message twice" else []
    with pytest.raises(Wrong):
        verify(vector)


#: What an honest receiver takes altered. It reads none of these there, or has another way to the same secret. The first
#: alone is a message of whole sums.
UNNOTICED = {
    ("KeySet", "signatures"): "its own: it knows its key. The others refuse the key set",
    ("SignRequest", "payloads"): "sent to a contributor, which knows cohort and question by itself",
    ("SignRequest", "proofs"): "the same",
    ("RevealRequest", "payloads"): "T signatures on the survivors stand in their place",
    ("RevealRequest", "proofs"): "the same",
    ("Shares", "shares"): "survivors told their secrets, each as committed to; shares are looked at where one did not",
    ("Shares", "own"): "of a silo that is no survivor: there is nothing of its own to tell",
    ("Shares", "seeds"): "the same",
}


@pytest.mark.parametrize("scenario", [THREE, WHOLE], ids=lambda s: s.name)
def test_what_the_parties_do_not_notice(scenario: Scenario) -> None:
    """Each field of each message to and from two silos altered on its way, one at a time: noticed by a refusal, a fault
    that the server names, or a sum that does not come about; or listed above. Never a wrong total."""
    deliveries: list[Sent] = []
    play(scenario, lambda sent: deliveries.append(sent) or sent.message)  # type: ignore[func-returns-value]
    found, tried = set(), 0
    for nth, sent in enumerate(deliveries):
        for kind, field, other in alterations(sent.message):
            if field in ("version", "tag") or "north" in (sent.sender, *sent.to):
                continue
            turn, tried = count(), tried + 1
            try:
                made = play(
                    scenario, lambda s, turn=turn, nth=nth, other=other: other if next(turn) == nth else s.message
                )  # type: ignore[misc]
            except AggregationError:
                continue
            sums = made.vector["sums"]
            for one in sums:
                assert np.allclose(one["total"], sum(map(np.array, one["values"].values())), rtol=0, atol=1e-12)
            if not made.refusals and not made.faults:
                assert [len(one["values"]) for one in sums] == ([3, 2] if scenario is THREE else [4, 3, 4])
                found.add((kind, field))
    assert tried > (120 if scenario is THREE else 40)
    assert found == (set(UNNOTICED) if scenario is THREE else {("KeySet", "signatures")})
