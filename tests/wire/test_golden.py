"""The bytes of every message and of what is written to disk or signed, as they were: a change of them comes with a
change of the number by which the other side, or a later version, tells them apart.

SECURE_FVI_GOLDEN=write writes them anew, but only where that number has changed, or for what is new.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from secure_fvi import alignment, messages, states, wire
from secure_fvi.aggregation import homomorphic_schemes
from secure_fvi.aggregation import messages as sum_messages
from secure_fvi.aggregation.base import Block, BlockTable
from secure_fvi.aggregation.onetime import Asked, whole_key
from secure_fvi.aggregation.roster import Roster
from secure_fvi.aggregation.session import Session, advert_statement
from secure_fvi.aggregation.store import MemoryStore
from secure_fvi.algorithms.base import Broadcast, Pending
from secure_fvi.deployment import countersigning, holding, job, session_messages
from secure_fvi.engines import letters, stream_messages
from secure_fvi.errors import ProtocolError
from secure_fvi.federated_model import Schema
from secure_fvi.privacy import witness
from secure_fvi.privacy.chain import make_row
from secure_fvi.privacy.ledger import Budget
from secure_fvi.privacy.ledger_terms import LEDGER
from secure_fvi.silo import Answer, Past, shared_past

GOLDEN = Path(__file__).with_name("golden.json")
CODECS = {
    "countersigning": countersigning._CODEC,
    "homomorphic sum": homomorphic_schemes._CODEC,
    "letter": letters.CODEC,
    "masked sum": sum_messages._CODEC,
    "matching": alignment._CODEC,
    "offer": job._CODEC,
    "session": session_messages.CODEC,
    "stream": stream_messages.CODEC,
    "greeting": stream_messages.GREETINGS,
    "witness": witness._CODEC,
}
#: The first that a field takes is its sample: what says most comes first.
SAMPLES: list[Any] = [
    [bytes([1]) * 32, bytes([2]) * 32], [bytes([3]) * 64], [b"first", b"second"], ["east", "north"], [4, 5],
    bytes([6]) * 64, bytes([7]) * 32, b"some bytes", 8, 3, 2, 1, 0, "text", 0.5, True, [], {}, b"", None,
]  # fmt: skip
#: What tells the bytes below a heading apart.
NUMBERS = {
    "message": sum_messages.VERSION,
    "greeting": stream_messages.GREETING_FORM,
    "broadcast": messages.VERSION,
    "state": (holding._VERSION, states._PACKED),
    "statement": sum_messages.VERSION,
    "row": LEDGER.label("link").decode(),
}


def _sample(check: Callable[[Any], bool]) -> Any:
    return next(value for value in SAMPLES if check(value))


def _of_codecs() -> dict[str, bytes]:
    found = {}
    for name, codec in CODECS.items():
        for kind, (_, checks) in codec._schemas.items():
            made = kind(*map(_sample, checks))
            heading = name if name in NUMBERS else f"message/{name}"
            found[f"{heading}/{kind.__name__}"] = packed = codec.pack(made)
            assert codec.unpack_any(packed) == made
    return found


def _statements() -> dict[str, bytes]:
    """What is signed, and what keys and masks are derived with."""
    roster = Roster(bytes([9]) * 32, tuple((s, bytes([i]) * 32) for i, s in enumerate(("a", "b", "c"), 1)))
    session = Session(roster, bytes(32), range(3), range(3))
    table = BlockTable((Block("g", (2, 3), 4.0), Block("n", (), 100.0, integer=True)))
    matching = alignment._Session(roster, bytes([1]) * 32, (70, 64, 64))
    blinded = matching.blinded(0, 0, bytes([2]) * 32)
    named = (bytes([1]) * 32, 7, b"\x07", b"\x07", table.digest, bytes([2]) * 32, bytes([3]) * 32)
    whole = Asked(7, b"\x07", table.digest, bytes([2]) * 32, bytes([3]) * 32)
    past = bytes.fromhex(shared_past(shared_past("", 3, "05" * 32, "07" * 32), 5, "06" * 32, "08" * 32))
    return {
        "roster": roster.hash,
        "table": table.digest,
        "key": advert_statement(roster, 0, 1, bytes([4]) * 32, bytes([5]) * 32),
        "batch": session.batch_statement(bytes([6]) * 32),
        "matching size": alignment._size_statement(roster, 0, 70, bytes([1]) * 32),
        "matching blinded": blinded,
        "matching evaluated": matching.evaluated(1, blinded, bytes([3]) * 32),
        "matching outputs": matching.outputs(0, bytes([4]) * 32),
        "matching order": matching.order(bytes([4]) * 32),
        "matching held": matching.held(1, bytes([4]) * 32, bytes([5]) * 32),
        "matching output": alignment.output(alignment.secret_of(b"x", [bytes([6]) * 32, bytes([7]) * 32])),
        "unheld": session.unheld_statement(bytes([6]) * 32, b"\x05"),
        "survivors": session.survivors_statement(named[0], sum_messages.SignRequest(*named[1:], [], [])),
        "shared past": past,
        "whole mask": whole_key(session, bytes([1]) * 32, 2, 0, whole, past),
        "whole contribution": session.contribution_statement(b"", 7, 1, *whole[1:], bytes([8]) * 32),
        "contribution": session.contribution_statement(
            named[0], 7, 1, b"\x07", table.digest, named[5], named[6], bytes([8]) * 32
        ),
    }


def _stored() -> dict[str, bytes]:
    state = {"a": torch.arange(3.0), "b": (1, "two", None, np.arange(2)), "c": {"d": True}}
    body = Budget("adult", 1.0, 1e-5).to_body()
    row = make_row(LEDGER, "north", 2, bytes(32), 1_700_000_000_000_000, "budget", body)
    schema = Schema((("x", (3,), torch.float64), ("n", (), torch.int64)), {"level": 2, "at": torch.ones(2)})
    asked = Broadcast(
        3, 4, {"a": 2, "b": 1}, ("a", "b"), {"scale": 0.5}, {"z": torch.tensor([1.0, 2.0]), "i": torch.ones(2, 1)}
    )
    return {
        "broadcast/round": messages.encode_broadcast(asked),
        "broadcast/question": messages.question_digest(asked),
        "broadcast/schema": session_messages.pack_schema(schema),
        "state/any": states.pack_state(state),
        "state/past": states.pack_state(Past()),
        **{f"state/{name}": packed for name, packed in _of_a_silo().items()},
        "row/budget": row.hash + row.body,
    }


class _Rows(NamedTuple):
    rows: dict[str, torch.Tensor]

    def with_rows(self, rows: dict[str, torch.Tensor]) -> _Rows:
        return _Rows(rows)


def _of_a_silo() -> dict[str, bytes]:
    """What a silo keeps: a whole state, an answer, and a record of what moved since the one before."""
    moved = states.Moved(torch.tensor([1]), {"a": torch.zeros(1, 2)}, {"a": torch.ones(1, 2)}, _Rows({}))
    silo: Any = SimpleNamespace(past=Past(turn=4), local=_Rows({"a": torch.zeros(2, 2)}), decided=6)
    silo.pending, silo.answer = Pending(7, moved), Answer(bytes(32), np.arange(2.0), b"masked")
    held = holding.DurableSilo(silo, holding.HeldStore(MemoryStore(), lambda: None))
    held._written, held._number = Pending(6, moved._replace()), 3
    record = held._record()
    assert record is not None
    return {"whole": held._state(3), "answer": held._answer(), "record": record}


def _found() -> dict[str, str]:
    every = _of_codecs() | {f"statement/{k}": v for k, v in _statements().items()} | _stored()
    return {k: v.hex() if len(v) <= 100 else hashlib.sha256(v).hexdigest() for k, v in sorted(every.items())}


def _compared(golden: dict[str, Any], found: dict[str, str], numbers: dict[str, Any]) -> list[str]:
    """What differs without a number that says so, or is gone."""
    same = {h for h, n in numbers.items() if golden["numbers"].get(h) == n}
    return [name for name, was in golden["bytes"].items() if found.get(name) != was and name.partition("/")[0] in same]


def test_bytes_change_with_their_number_alone() -> None:
    found = _found()
    numbers = json.loads(json.dumps(NUMBERS))
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {"numbers": {}, "bytes": {}}
    assert _compared(golden, found, numbers) == []
    if os.environ.get("SECURE_FVI_GOLDEN") == "write":
        GOLDEN.write_text(json.dumps({"numbers": numbers, "bytes": found}, indent=1) + "\n")
        golden = json.loads(GOLDEN.read_text())
    assert golden["bytes"] == found, "what is new or has a new number: SECURE_FVI_GOLDEN=write, and say so in the log"
    assert golden["numbers"] == numbers


@pytest.mark.parametrize("change", ["a field", "a kind that is gone"])
def test_the_control_finds_a_change(change: str) -> None:
    found = _found()
    golden = {"numbers": json.loads(json.dumps(NUMBERS)), "bytes": dict(found)}
    name = "message/masked sum/Contribution"
    if change == "a field":
        found[name] = found[name][:-2] + "00"
    else:
        del found[name]
    assert _compared(golden, found, golden["numbers"]) == [name]
    golden["numbers"]["message"] -= 1
    assert _compared(golden, found, json.loads(json.dumps(NUMBERS))) == []


def test_a_release_that_speaks_a_version_more_still_says_what_this_one_understands() -> None:
    """Its messages begin with the version of their form, not with the newest: before, each of them was refused by who
    speaks the older version alone, whatever the two had agreed on. The control: a form of the newest version."""
    path = Path(sum_messages.__file__)
    spec = importlib.util.spec_from_file_location("secure_fvi_of_tomorrow", path)
    assert spec is not None
    assert spec.loader is not None
    tomorrow = importlib.util.module_from_spec(spec)
    newest = wire.PROTOCOLS[-1] + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "PROTOCOLS", (*wire.PROTOCOLS, newest))
        spec.loader.exec_module(tomorrow)
    ours = sum_messages.KeysRequest(3)
    assert tomorrow.pack(tomorrow.KeysRequest(3)) == sum_messages.pack(ours)
    assert tuple(tomorrow.unpack_any(sum_messages.pack(ours))) == ours
    refused = tomorrow.Codec(tomorrow._SCHEMAS, newest)
    with pytest.raises(ProtocolError, match=f"a message of version {newest}; this side speaks"):
        sum_messages.unpack_any(refused.pack(tomorrow.KeysRequest(3)))
    assert all(codec._version <= wire.PROTOCOLS[0] for codec in CODECS.values())
