"""Messages that would become far more than they are: refused by their shape, before anything is built of them."""

from __future__ import annotations

import ast
import contextlib
import json
import random
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

import msgpack
import numpy as np
import pytest
import torch
from safetensors.torch import save

from secure_fvi import wire
from secure_fvi.aggregation import Block, BlockTable, Masked, messages
from secure_fvi.aggregation.base import carry
from secure_fvi.aggregation.messages import Contribution, KeySet, Shares, pack, unpack, unpack_any
from secure_fvi.aggregation.parties import local_parties
from secure_fvi.deployment.names import Table, parse_table
from secure_fvi.dictionary import read_dictionary
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.runs import wording
from secure_fvi.runs.directory import RunDirectory
from secure_fvi.runs.reading import override, read
from secure_fvi.wire import Limit

ROOT = Path(__file__).parents[1]
MANY = b"\xdd" + (1 << 20).to_bytes(4, "big") + b"\x90" * (1 << 20)

# CPU seconds and megabytes that each decoder takes for 16 MB, and what it says; at last the control.
_BOMBS = """
import json, time, msgpack
from secure_fvi import alignment, wire
from secure_fvi.aggregation import homomorphic_schemes, messages
from secure_fvi.deployment import countersigning, job, session_messages
from secure_fvi.engines import letters, stream_messages
from secure_fvi.messages import decode_broadcast
from secure_fvi.privacy import witness
from secure_fvi.privacy.chain import Row

import safetensors.torch  # loaded when tensors are first read: not a message's cost

N = 16 << 20
def many(unit, n):
    return b"\\xdd" + (n // len(unit)).to_bytes(4, "big") + unit * (n // len(unit))
units = [b"\\x90", b"\\x80", b"\\xa1a", b"\\xc4\\x00", b"\\x91" * 64 + b"\\xc0", b"\\xd4\\x05x", b"\\x01"]
units.append(b"\\xc4\\x20" + bytes(32))
codecs = {"masked": messages.unpack_any, "homomorphic": homomorphic_schemes.unpack_any,
          "session": session_messages.CODEC.unpack_any, "stream": stream_messages.CODEC.unpack_any,
          "countersigning": countersigning._CODEC.unpack_any, "offer": job._CODEC.unpack_any,
          "witness": witness._CODEC.unpack_any, "letter": letters.CODEC.unpack_any,
          "matching": alignment._CODEC.unpack_any}
plain = {"broadcast": decode_broadcast, "schema": session_messages.unpack_schema,
         "tensors": lambda d: wire.tensors(d, "x"),
         "row": lambda d: Row(1, b"", 0, "job", d, b"", b"").fields()}
bombs = [many(u, N) for u in units]
cases = [(name, read, bomb) for name, read in {**codecs, **plain}.items() for bomb in bombs]
def begun(codec, kind, *before):                       # a message of this kind, as far as these of its fields
    tag, fields = codec._schemas[kind]
    return bytes([0x92 + len(fields), messages.VERSION, tag]) + b"".join(before)
masked, none, digest = messages._CODEC, b"\\xc4\\x00", b"\\xc4\\x20" + bytes(32)
starts = {"key set": begun(masked, messages.KeySet, b"\\x00", b"\\xc4\\x01x"),
          "shares": begun(masked, messages.Shares, b"\\x00"),
          "contribution": begun(masked, messages.Contribution, b"\\x00", none),
          "reveal": begun(masked, messages.RevealRequest, b"\\x00", none, none, digest, digest, none),
          "ciphertexts": begun(homomorphic_schemes._CODEC, homomorphic_schemes.Ciphertexts)}
for bomb in bombs:                                 # inside a message of the right kind, where a list may stand
    for name, start in starts.items():
        codec = homomorphic_schemes if name == "ciphertexts" else messages
        cases.append(("field of " + name, codec.unpack_any, start + bomb))
    cohort = b"\\x9a\\x05\\x01\\x01\\x91\\x01\\xc4\\x20" + bytes(32) + bomb + b"\\x80\\x80\\xa1a\\x90"
    cases.append(("broadcast's cohort", decode_broadcast, cohort))
one = '{"dtype":"F64","shape":[0],"data_offsets":[0,0]}'
header = ("{" + ",".join(f'"{i}":{one}' for i in range(1 << 18)) + "}").encode()
cases.append(("tensors", lambda d: wire.tensors(d, "x"), len(header).to_bytes(8, "little") + header))
rows = []
def size():                                            # a resource usage's starts at the peak of whoever forked it
    return int(next(row for row in open("/proc/self/status") if row.startswith("VmHWM")).split()[1]) / 1024
def fresh():
    open("/proc/self/clear_refs", "w").write("5")      # the peak starts again at what is held now
    return size()
messages.unpack_any(messages.pack(messages.Done()))
for name, read, data in cases:
    before, seconds = fresh(), []
    for _ in range(3):                             # the shortest counts: others share the cores and their caches
        began = time.process_time()
        try:
            read(data)
            said = "taken"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        seconds.append(time.process_time() - began)
        if seconds[-1] < 0.1:
            break
    rows.append([name, min(seconds), size() - before, said])
before, began = fresh(), time.process_time()
kept = msgpack.unpackb(many(b"\\x90", 1 << 23))
print(json.dumps([rows, time.process_time() - began, size() - before]))
"""


def test_sixteen_megabytes_of_nothing_cost_next_to_nothing() -> None:
    """At most 20 MB and an eighth of the control's processor time each (a twenty-fifth was measured), whatever they are
    repetitions of and where they stand. The control: half of that, read by MessagePack at once, takes over 100 MB."""
    done = subprocess.run([sys.executable, "-c", _BOMBS], capture_output=True, text=True, check=True)
    rows, control_seconds, control_megabytes = json.loads(done.stdout)
    assert len(rows) > 130
    for name, seconds, megabytes, said in rows:
        assert said.startswith("ProtocolError: "), (name, said)
        assert ("field '" in said) >= name.startswith("field of"), (name, said)  # it came as far as that
        assert seconds < control_seconds / 8, (name, seconds, control_seconds)
        assert megabytes < 20, (name, megabytes)
    assert control_megabytes > 100


def test_nothing_else_reads_messagepack() -> None:
    """So that no place is forgotten: whoever unpacks goes through `wire`."""
    found = []
    for folder in ("secure_fvi", "aggregation", "privacy", "audits", "models", "lab"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text()
            for node in ast.walk(ast.parse(source)) if "unpack" in source.lower() else ():
                name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
                if name in ("unpackb", "Unpacker", "unpack_from") and "struct" not in ast.dump(node):
                    found.append(path.relative_to(ROOT).as_posix())
    assert set(found) == {"secure_fvi/wire.py"}


def test_a_receiver_bounds_a_message_by_what_it_knows() -> None:
    long = pack(KeySet(0, b"x", [bytes(32)] * 200, [bytes(32)] * 200, [bytes(64)] * 200))
    assert len(unpack_any(long, Limit(items=200))[2]) == 200
    for limit in (Limit(items=199), Limit(bytes=len(long) - 1)):
        with pytest.raises(ProtocolError):
            unpack_any(long, limit)
    short = pack(Shares(0, [b""] * 20, b"", []))
    with pytest.raises(ProtocolError, match="'shares'"):
        unpack(short, Shares, Limit(items=19))


def test_parties_of_a_sum_know_how_long_its_messages_are() -> None:
    """A contribution a little longer than its table is left out by its length; a silo takes no message that is longer
    than those of so many members. The control: honest ones, of a table larger than all that, go through."""
    ids, table, context = [f"s{i}" for i in range(4)], BlockTable((Block("g", (50_000,), 1.0),)), bytes(32)
    server, silos = local_parties(Masked(max_missing=1), ids)

    def exchange(asked: dict[str, bytes]) -> dict[str, bytes]:
        return {s: silos[s].handle(m) for s, m in asked.items()}

    carry(server.prepare(0), exchange)
    sent = {s: silos[s].contribute(0, ids, table, np.ones(table.size), context) for s in ids}
    fields = unpack(sent["s3"], Contribution)
    sent["s3"] = pack(fields._replace(payload=bytes(fields.payload) + bytes(1 << 20)))
    try:
        survivors = carry(server.total(0, ids, table, sent, context), exchange).survivors
        assert survivors == ("s0", "s1", "s2")
    finally:
        assert "bytes, where at most" in server.faults["s3"]
    with pytest.raises(ProtocolError, match="where at most"):
        silos["s0"].handle(pack(Shares(0, [bytes(32)] * 100_000, b"", [])))


def test_shapes_and_values_say_the_same() -> None:
    """What is long is walked over first, and what is short built first: both take the same."""
    table = wire.Row(wire.whole(), wire.Listed(wire.binary(2)), wire.Mapped(wire.plain), wire.text(5), wire.flag)
    good = [1, [b"ab", b"cd"], {"a": 1.5, "b": None}, "text", True]
    bad = [
        [1, [b"ab", b"c"], {}, "", True], [-1, [], {}, "", True], [1, [], {}, "", 1], [1, [], {}, "longer than", False],
        [1, [], {"a": []}, "", True], [1, {}, {}, "", True], [1, [], {}, ""], [1, ["ab"], {}, "", True], {}, None, 3,
    ]  # fmt: skip
    for padding in (0, wire.SHORT):
        shape = wire.Row(wire.binary(), table)
        assert wire.decode(msgpack.packb([bytes(padding), good]), shape) == [bytes(padding), good]
        for value in bad:
            with pytest.raises(ProtocolError):
                wire.decode(msgpack.packb([bytes(padding), value]), shape)
        with pytest.raises(ProtocolError):
            wire.decode(msgpack.packb([bytes(padding), good]) + b"\x00", shape)


class Case(NamedTuple):
    shape: wire.Shape
    right: list[object]
    wrong: list[object]  # which a walk over the bytes sees
    by_value: list[object]  # which is seen when the value is there


SHAPES = {
    # A table of one entry has the same bytes behind its head.
    "row": Case(
        wire.Row(wire.whole(), wire.flag), [[1, True]], [[1], [1, True, 1], [1, 1], {1: True}, b"12"], [[-1, True]]
    ),
    "list": Case(wire.Listed(wire.whole(9), 3, 1), [[1], [1, 2, 3]], [[], [1] * 4, [[1]], {1: 2}, b"1", None], [[9]]),
    "list of binary": Case(wire.Listed(wire.binary(2)), [[], [b"ab"] * 3], [[b"ab", b"abc"], [b"ab", "ab"], b"ab"], []),
    "list of long ones": Case(wire.Listed(wire.binary(300)), [[bytes(300)] * 2], [[bytes(300), bytes(299)]], []),
    "table": Case(wire.Mapped(wire.real), [{}, {"a": 1, "b": 0.5}], [{"a": "1"}, {b"a": 1}, [], ["a", 1], 1], []),
    "number": Case(wire.whole(5, 2), [2, 4], [2.0, True, "2", None, [2]], [1, 5]),
    "one of": Case(wire.one_of(0, 1, b"ab"), [0, 1, b"ab"], [1.0, True, b"abc", "ab"], [2, b"a", b"xy"]),
    "one of two": Case(wire.one_of(0, 1), [0, 1], [False, 0.0, b""], [2]),
    "binary": Case(wire.binary(most=3), [b"", b"abc"], [b"abcd", "abc", 3, [b"a"]], []),
    "binary of two": Case(wire.binary(2, 4), [b"ab", b"abcd"], [b"", b"abcde", "ab"], [b"abc"]),
    "text": Case(wire.text(3, 1), ["a", "\xe4\xf6\xfc", "a\nb"], ["", "a" * 13, b"abc", 1], ["abcd"]),
    "printable text": Case(wire.text(3, printable=True), ["", "abc"], [b"abc"], ["a\nb", "a\x00"]),
    "plain": Case(wire.plain, [None, True, 1, 0.5, "a"], [b"a", [], {}], []),
}  # fmt: skip


def _walked(shape: wire.Shape, data: bytes) -> bool:
    walk = wire.begun(data, wire.Limit(items=100))
    return wire.fits(walk, shape) and wire.ended(walk)


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_walked_over_is_what_is_built(name: str) -> None:
    """Each shape refuses by itself, before what is long is built and after: a walk never refuses what is right."""
    shape, right, wrong, by_value = SHAPES[name]
    for value in right:
        data = msgpack.packb(value)
        assert shape(value), value
        assert _walked(shape, data), value
        assert not _walked(shape, data[:-1])
        assert not _walked(shape, data + b"\x00")
    for value in [*wrong, *by_value]:
        assert not shape(value), value
    for value in wrong:
        assert not _walked(shape, msgpack.packb(value)), value
    assert not _walked(shape, b"\xc1")  # a byte that MessagePack does not have


def test_anything_has_few_parts_and_is_not_deep() -> None:
    for value in ([1, [2]], {"a": 1}):
        assert _walked(wire.Anything(4, 3), msgpack.packb(value))
    for value in ([1] * 4, [[[[1]]]], {"a": [1, 2, 3]}, [1, msgpack.Timestamp(1)]):
        assert not _walked(wire.Anything(4, 3), msgpack.packb(value)), value
    assert _walked(wire.Anything(4, 3, extended=True), msgpack.packb([1, msgpack.Timestamp(1)]))


def test_a_walk_takes_no_more_than_stands_there() -> None:
    """Heads that state more bytes or elements than follow, and lists longer than the receiver expects."""
    short = (b"", b"\xc4", b"\xc4\x05abc", b"\xdc\x00", b"\x95\x01", b"\x83\xa1a\x01", b"\xd9\x09a", b"\xd4\x01")
    for data in short:
        assert not wire.fits(wire.begun(data, wire.Limit()), wire.Anything(100, extended=True)), data
    for value in ([1, 2, 3], {"a": 1, "b": 2, "c": 3}):
        shape = wire.Listed(wire.whole()) if isinstance(value, list) else wire.Mapped(wire.whole())
        for items, taken in ((3, True), (2, False)):
            assert wire.fits(wire.begun(msgpack.packb(value), wire.Limit(items=items)), shape) == taken
    for data in ("text", None, [1]):
        with pytest.raises(ProtocolError, match="must be bytes of at most 2 GiB"):
            wire.begun(data, wire.Limit())


def test_an_array_has_as_many_elements_as_it_says() -> None:
    """Whoever goes over them one by one is told no number that the bytes cannot hold."""
    for head in (b"\x93", b"\xdc\x00\x03", b"\xdd\x00\x00\x00\x03"):
        assert wire.array(wire.begun(head + b"\x01\x02\x03", wire.Limit())) == 3
        for cut in (head + b"\x01\x02", head, head[:-1]):
            assert wire.array(wire.begun(cut, wire.Limit())) is None, cut


def test_bytes_may_state_their_length_at_length() -> None:
    """A list of short ones is gone over at once, where all state their length in one byte; else one by one."""
    listed, long = wire.Row(wire.Listed(wire.binary(2)), wire.whole()), b"\xc5\x00\x02"
    for data in (b"\xc4\x02ab\xc4\x02cd", long + b"ab" + long + b"cd", b"\xc4\x02ab" + long + b"cd"):
        assert wire.decode(b"\x92\x92" + data + b"\x01", listed) == [[b"ab", b"cd"], 1]
        assert wire.fits(wire.begun(b"\x92\x92" + data + b"\x01", wire.Limit()), listed)
        assert not wire.fits(wire.begun(b"\x92\x93" + data + b"\x01", wire.Limit()), listed)


def test_parties_that_speak_no_common_version_are_named() -> None:
    assert wire.agreed({"server": (9, 10), "north": (10, 11)}) == 10
    with pytest.raises(ProtocolError, match="server 9 or 10, north 11"):
        wire.agreed({"server": (9, 10), "north": (11,)})


def test_a_long_message_that_is_out_of_shape_is_never_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building it would come to the same refusal, and is what costs. The control: one in shape is built."""
    built = []
    monkeypatch.setattr(messages, "_built", lambda data: built.append(data) or msgpack.unpackb(data))
    good = Contribution(3, b"", bytes(2 * wire.SHORT), bytes(64))
    for bad in (
        pack(good._replace(signature=bytes(63))),
        pack(good._replace(sum_index="3")),  # type: ignore[arg-type]
        pack(good) + b"\x00",
        pack(good)[:-1],
    ):
        with pytest.raises(ProtocolError):
            unpack_any(bad)
    listed, long = wire.Listed(wire.binary()), [bytes(wire.SHORT)] * 2
    monkeypatch.setattr(wire, "built", lambda data: built.append(data) or msgpack.unpackb(data))
    for bad in ([*long, 1], {1: long}):
        with pytest.raises(ProtocolError, match="is not of the form"):
            wire.decode(msgpack.packb(bad), listed)
    assert built == []
    assert unpack_any(pack(good)) == good
    assert wire.decode(msgpack.packb(long), listed) == long
    assert len(built) == 2


def test_own_files_are_checked_too() -> None:
    assert wire.own(msgpack.packb([1, {2: b"x"}]), "the state") == [1, {2: b"x"}]
    for damaged in (b"", b"\xc1", msgpack.packb([1])[:-1], msgpack.packb(1) + b"\x00", b"\x91" * 100 + b"\xc0"):
        with pytest.raises(InputError, match="the state is damaged"):
            wire.own(damaged, "the state")


def test_safetensors_are_few_and_have_a_short_header() -> None:
    data = save({f"eta/{i}": torch.zeros(2) for i in range(5)})
    assert len(wire.tensors(data, "a posterior", 5)) == 5
    longer = (wire._LONGEST_HEADER + 1).to_bytes(8, "little") + b" " * (wire._LONGEST_HEADER + 1)
    for bad in (b"", longer, (9).to_bytes(8, "little") + b"{}"):
        with pytest.raises(ProtocolError, match="too long a header"):
            wire.tensors(bad, "a posterior", 5)
    for bad in (save({f"eta/{i}": torch.zeros(2) for i in range(6)}), b"", data[:20], b"\xff" * 40):
        with pytest.raises(ProtocolError, match="a posterior"):
            wire.tensors(bad, "a posterior", 5)


#: What may stand before a long key, so that a reader who follows quotes takes the key for the inside of a string.
BEFORE = ("x = 1\n", '# "\\\n', '# """\n', "# '''\n", 'x = {k = """ " """, ', "x = '\"'\r\n", 'x = ["\'", {')


def test_dotted_keys_of_a_table_cost_no_time() -> None:
    """Its parser takes the square of a key's parts: the fuzzer found 12 s for 12 kB. The control: a fifth of the parts
    take it twice as long as any refusal, behind a comment whose quote was once taken for a string's."""
    began = time.process_time()
    tomllib.loads('# "\\\n' + ".".join(["a"] * 4000) + " = 1")
    control = time.process_time() - began
    for before in BEFORE:
        for key in ("a.b", '"=".a', "'.' . x", r'"\"".a', '".,."', "'. ,a. ,'"):
            text = before + ".".join([key] * 20_000) + " = 1"
            began = time.process_time()
            with pytest.raises(ValueError, match="a key of more than"):
                wording.loads(text)
            assert time.process_time() - began < control / 2, before


def test_no_text_whatever_gets_a_long_key_to_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 random texts, where four parts are long. The control: without the rule the parser comes to longer keys."""
    longest, parse_key = 0, tomllib._parser.parse_key  # type: ignore[attr-defined]

    def watched(src: str, pos: int) -> tuple[int, tuple[str, ...]]:
        nonlocal longest
        end, key = parse_key(src, pos)
        longest = max(longest, len(key))
        return end, key

    monkeypatch.setattr(tomllib._parser, "parse_key", watched)  # type: ignore[attr-defined]
    monkeypatch.setattr(wording, "_MOST_DOTS", 2)
    parts = ("a.", ". 1", '".,.".', "' . '. ", 'a."."', ".")
    pieces = (*parts, *parts, *"\"'\\#,=\n", '"""', "'''", "\r\n", "= 1\n", "x = {", "[", "]", "x = ")
    rng = random.Random(5)
    texts = ["".join(rng.choices(pieces, k=rng.randint(5, 25))) for _ in range(20_000)]
    for reader, at_most in ((wording.loads, 4), (tomllib.loads, 100)):
        longest = 0
        for text in texts:
            with contextlib.suppress(ValueError, RecursionError):
                reader(text)
        assert longest <= at_most
    assert longest > 4


def test_tables_of_many_dots_are_written_so_that_they_are_read() -> None:
    values = [0.1, 1.5] * 100
    assert wording.loads(f"x = {values}\ny.z = '{'a.' * 40}'\n") == {"x": values, "y": {"z": "a." * 40}}
    codes, oids = [f"I{i}.{i}" for i in range(500)], ["2.16.840.1.113883.6.96"] * 100
    table = {"codes": codes, "oids": oids, "said": 'a.b. "c.' * 100 + "\\", "in": {"x.y." * 99: [oids, 0.5]}}
    assert wording.loads(wording.dumps(table)) == table
    assert wording.dumps({"codes": codes}) == f"codes = {json.dumps(codes)}\n"


def test_every_reader_of_tables_has_that_rule(tmp_path: Path) -> None:
    folders = ("secure_fvi", "aggregation", "privacy", "models", "audits")
    assert [p.name for f in folders for p in (ROOT / f).rglob("*.py") if "tomllib" in p.read_text()] == ["wording.py"]
    bomb = '# "\\\n' + ".".join(["a"] * 300) + " = 1\n"
    (tmp_path / "config.toml").write_text(bomb)
    for reader in (read, lambda path: RunDirectory(path.parent).read_config(), read_dictionary):
        with pytest.raises(InputError, match="a key of more than"):
            reader(tmp_path / "config.toml")
    with pytest.raises(InputError, match="a key of more than"):
        parse_table(bomb.encode(), Table, "it")
    table: dict[str, object] = {}
    override(table, f"x=1\n{bomb}")
    assert len(str(table["x"])) == len(bomb) + 1  # no TOML of ours: a string
