"""`secure-fvi bench secure-sum`: what it prints, and that a wrong sum is not timed. No time is asserted."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from command_line import CommandLine

from secure_fvi.aggregation import Masked, Total
from secure_fvi.aggregation.masked_server import MaskedServer
from secure_fvi.aggregation.parties import PlainServer
from secure_fvi.aggregation.prg import keystream
from secure_fvi.aggregation.roster import Identity, Roster
from secure_fvi.errors import AggregationError
from secure_fvi_lab.bench import secure_sum as bench
from secure_fvi_lab.bench.secure_sum import (
    Case,
    Floor,
    Parties,
    Setting,
    Stopwatch,
    TenSEAL,
    Work,
    drawn,
    measure,
    plan,
    targets,
)

CONTRACT = {
    *("kind", "silos", "length", "neighbours", "dropout", "silo_ms", "server_ms", "exchanges", "bytes_up_per_silo"),
    *("floor_ms", "flower_ms", "tenseal_ms"),
}
ADDED = {
    *("bits", "consistency_check", "store", "repeats", "contribute_ms", "silo_checks_ms", "server_checks_ms"),
    *("checks_shared", "holder_ms", "sum_ms", "sum_with_refill_ms", "setup_silo_ms", "setup_server_ms"),
    *("refill_silo_ms", "refill_server_ms", "flower_masks_ms", "tenseal_silo_ms", "tenseal_sum_ms"),
}
TINY = [
    Work(Setting("plain", 10), (Case(100, 0, 1), Case(100, 1, 1))),
    Work(Setting("masked", 10, 32), (Case(100, 0, 1), Case(100, 1, 1))),
    Work(Setting("masked", 3, 64, False), (Case(100, 0, 1, 2),)),
    Work(Setting("masked", 3, 64, True, True), (Case(100, 0, 1),)),
    Work(Setting("whole", 3, 64), (Case(100, 0, 1),)),
]
HAVE_FLOWER = importlib.util.find_spec("flwr") is not None


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(bench, "plan", lambda quick: TINY)


@pytest.fixture
def no_flower(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "flwr"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "flwr", None)


def test_json_has_the_keys_of_the_contract(tiny, cli: CommandLine):
    answer = cli("bench", "secure-sum", "--json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert found.keys() >= {"machine", "rows"}
    assert isinstance(found["machine"], str)
    assert len(found["rows"]) == 7
    for row in found["rows"]:
        assert row.keys() == CONTRACT | ADDED
        assert row["silo_ms"] > 0
        assert row["server_ms"] > 0
    plain, lost, masked, masked_lost, unchecked, durable, whole = found["rows"]
    assert [row["exchanges"] for row in found["rows"]] == [1, 1, 3, 3, 2, 3, 1]
    assert [row["dropout"] for row in found["rows"]] == [0, 0.1, 0, 0.1, 0, 0, 0]
    assert plain["bytes_up_per_silo"] == lost["bytes_up_per_silo"] == 832
    assert 800 < whole["bytes_up_per_silo"] < unchecked["bytes_up_per_silo"]
    assert 400 < masked["bytes_up_per_silo"] < masked_lost["bytes_up_per_silo"] + 100 < 1500
    assert (plain["neighbours"], masked["neighbours"], unchecked["neighbours"], whole["neighbours"]) == (0, 9, 2, 2)
    assert plain["floor_ms"] is plain["flower_ms"] is plain["tenseal_ms"] is masked["tenseal_ms"] is None
    assert masked["floor_ms"] > 0
    assert masked["silo_checks_ms"] > 0
    assert unchecked["silo_checks_ms"] == whole["silo_checks_ms"] == 0
    assert (unchecked["store"], durable["store"]) == ("memory", "sqlite")


@pytest.mark.later
def test_the_table_names_targets_and_no_bar_without_a_terminal(tiny, cli: CommandLine):
    answer = cli("bench", "secure-sum", "--plot", str(cli.folder / "sums.png"))
    assert answer.code == 0
    assert answer.err == ""
    assert "masked w=32" in answer.out
    assert "not measured" in answer.out
    assert (cli.folder / "sums.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["sums.pdf", "nowhere/sums.png"])
def test_a_bad_plot_file_is_refused_before_anything_is_measured(cli: CommandLine, name):
    answer = cli("bench", "secure-sum", "--plot", str(cli.folder / name))
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert "--plot" in answer.err


@pytest.mark.skipif(not HAVE_FLOWER, reason="Flower is not installed")
def test_flower_is_timed():
    row = measure(work=[Work(Setting("masked", 3, 32), (Case(100, 0, 1),))])["rows"][0]
    assert 0 < row["flower_masks_ms"] < row["flower_ms"]


def test_without_flower_its_times_are_null(no_flower):
    found = measure(work=TINY[1:2])
    assert [row["flower_ms"] for row in found["rows"]] == [None, None]
    assert [row["flower_masks_ms"] for row in found["rows"]] == [None, None]
    assert [note for note in found["notes"] if "Flower" in note] == found["notes"] != []
    assert found["rows"][0]["floor_ms"] > 0


def test_homomorphic_rows_stand_beside_tenseal_alone():
    pytest.importorskip("tenseal")
    row = measure(work=[Work(Setting("homomorphic", 3), (Case(100, 0, 1),))])["rows"][0]
    assert row.keys() == CONTRACT | ADDED
    assert row["exchanges"] == 3
    assert row["holder_ms"] < row["server_ms"]
    assert row["tenseal_silo_ms"] < row["tenseal_ms"] < row["tenseal_sum_ms"]
    assert row["floor_ms"] is row["flower_ms"] is None


def test_without_tenseal_homomorphic_rows_are_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "tenseal", None)
    found = measure(work=[Work(Setting("homomorphic", 3), (Case(100, 0, 1),)), TINY[0]])
    assert [row["kind"] for row in found["rows"]] == ["plain", "plain"]
    assert "homomorphic" in found["notes"][0]


@pytest.mark.parametrize(
    ("server", "setting"), [(PlainServer, Setting("plain", 3)), (MaskedServer, Setting("masked", 3))]
)
def test_a_wrong_total_raises(monkeypatch, server, setting):
    right = server.total

    def off(self, *arguments):
        total = yield from right(self, *arguments)
        values = total.values.copy()
        values[-1] = np.nextafter(values[-1], np.inf)  # the least error there can be
        return Total(values, total.survivors)

    with Stopwatch() as watch:
        Parties(setting, watch).sum(100)
        monkeypatch.setattr(server, "total", off)
        with pytest.raises(AggregationError, match="is wrong"):
            Parties(setting, watch).sum(100)


def test_signatures_checked_once_are_charged_to_all_that_check_them(monkeypatch):
    real, calls = Roster.verify, []

    def counted(roster, *arguments):
        calls.append(arguments)
        return real(roster, *arguments)

    monkeypatch.setattr(Roster, "verify", counted)
    with Stopwatch() as watch:
        assert Roster.verify is not counted
        assert Parties(Setting("masked", 4), watch).sum(100).silo_checks > 0
        assert len(set(calls)) < len(calls)
        calls.clear()
        monkeypatch.setattr("secure_fvi_lab.bench.secure_sum.CHECKED_ONE_BY_ONE", 3)
        parties = Parties(Setting("masked", 4), watch)
        times = parties.sum(100)
        assert len(set(calls)) == len(calls)
        assert times.silo_checks > 0
        assert times.server_checks > 0
        assert times.together >= times.server + 4 * times.silo
    assert Roster.verify is counted


def test_a_forged_signature_stays_forged_when_checks_are_shared():
    identity = Identity()
    roster = Masked().roster({name: Identity().public_key for name in "bc"} | {"a": identity.public_key})
    with Stopwatch() as watch:
        watch.new_session(share=True)
        assert [roster.verify(0, bytes(64), b"statement") for _ in range(3)] == [False] * 3
        assert [roster.verify(0, identity.sign(b"statement"), b"statement") for _ in range(3)] == [True] * 3


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("length", [100, 40_000])  # one chunk, and several of which the last is shorter
def test_the_floor_adds_whole_keystreams(bits, length):
    floor = Floor(length, bits, 3)
    floor.run()
    dtype = np.dtype(f"u{bits // 8}")
    streams = [np.frombuffer(keystream(key, floor.total.nbytes), dtype) for key in floor._keys]
    np.testing.assert_array_equal(floor.total, np.sum(streams, axis=0, dtype=dtype))


def test_a_wrong_total_of_tenseal_raises():
    ts = pytest.importorskip("tenseal")
    bare = TenSEAL(10_000, 3)
    bare.run()
    bare._ts = SimpleNamespace(
        bfv_vector=lambda context, part: ts.bfv_vector(context, part + (part.size == 10_000 - 8192)),
        bfv_vector_from=ts.bfv_vector_from,
    )
    with pytest.raises(AggregationError, match="TenSEAL"):
        bare.run()


def test_plans_end_in_their_rows():
    for quick in (False, True):
        cases = [(item.setting, case) for item in plan(quick) for case in item.cases]
        kinds = {setting.kind for setting, _ in cases}
        assert kinds == {"plain", "masked", "whole", "homomorphic"}
        assert all(case.lost * 3 < setting.silos for setting, case in cases)
        headline = [c for s, c in cases if s == Setting("masked", 11, 32) and (c.length, c.lost) == (10**6, 0)]
        assert len(headline) == 1
    lengths = {case.length for item in plan(False) for case in item.cases}
    silos = {item.setting.silos for item in plan(False)}
    assert {10**3, 10**7} <= lengths
    assert {3, 1000} <= silos


def test_a_small_machine_is_spared_the_longest_rows(monkeypatch):
    notes: list[str] = []
    monkeypatch.setattr(bench, "_memory", lambda: 8 * 2**30)
    fits = bench._that_fits(plan(False), notes)
    assert max(case.length for item in fits for case in item.cases) == 10**6
    assert "10,000,000" in notes[0]
    monkeypatch.setattr(bench, "_memory", lambda: None)
    assert bench._that_fits(plan(False), []) == plan(False)


def test_targets_say_when_they_are_not_met():
    row = {
        "kind": "masked",
        "silos": 11,
        "length": 10**6,
        "neighbours": 10,
        "dropout": 0.0,
        "bits": 32,
        "consistency_check": True,
        "store": "memory",
        "silo_ms": 10.0,
        "floor_ms": 4.0,
        "flower_ms": 30.0,
        "bytes_up_per_silo": 4_000_500,
    }
    ratio, flower, upload, *rest = targets([row])
    assert (ratio["value"], ratio["met"]) == (2.5, False)
    assert (flower["value"], flower["met"]) == (3.0, False)
    assert (upload["value"], upload["met"]) == (1.00012, True)
    assert {target["met"] for target in rest} == {None}
    assert targets([{**row, "flower_ms": None}])[1]["met"] is None


def test_the_plot_is_drawn_from_whatever_rows_there_are():
    assert len(drawn([]).axes) == 2
