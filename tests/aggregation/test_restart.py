"""Parties that are killed and come back over the same store; retries; the durable store itself."""

import sqlite3
import stat
from contextlib import closing

import numpy as np
import pytest
from sum_network import CONTEXT, carry, contribute, names, random_values, table_of

from secure_fvi.aggregation import Masked
from secure_fvi.aggregation.masked_server import MaskedServer
from secure_fvi.aggregation.masked_silo import MaskedSilo
from secure_fvi.aggregation.roster import Identity
from secure_fvi.aggregation.store import MemoryStore, SqliteStore
from secure_fvi.errors import AggregationError, InputError, ProtocolError


class Deployment:
    """Parties over stores that outlive them."""

    def __init__(self, count=4, make_store=lambda name: MemoryStore(), **options):
        options.setdefault("max_missing", 1)
        self.ids = names(count)
        self.identities = {s: Identity() for s in self.ids}
        self.roster = Masked(**options).roster({s: i.public_key for s, i in self.identities.items()})
        self.stores = {s: make_store(s) for s in [*self.ids, "server"]}
        self.silos = {s: self.silo(s) for s in self.ids}
        self.server = MaskedServer(self.roster, self.stores["server"])

    def silo(self, name):
        return MaskedSilo(self.roster, name, self.identities[name], self.stores[name], unbound=True)

    def restart(self):
        self.silos = {s: self.silo(s) for s in self.ids}
        self.server = MaskedServer(self.roster, self.stores["server"])


def sqlite_in(folder):
    return lambda name: SqliteStore(folder / f"{name}.sqlite")


@pytest.mark.parametrize("most", [0, 1])
@pytest.mark.parametrize("count", [4, pytest.param(35, marks=pytest.mark.slow)])
def test_all_parties_restart_between_and_within_sums(count, most):
    # 35 silos without assumed losses are on a 2-regular graph, so that nonces and order are restored too.
    d = Deployment(count, batch=2, corrupt=0.0, lost=0.0, max_missing=most)
    assert d.roster.neighbourhood.complete == (count == 4)
    table = table_of(12)
    for index in range(5 if count == 4 else 3):
        values = random_values(d.ids, table, seed=index)
        carry(d.server.prepare(index), d.silos)
        d.restart()
        messages = contribute(d.silos, index, table, values)
        d.restart()
        total = carry(d.server.total(index, d.ids, table, messages, CONTEXT), d.silos)
        d.restart()
        np.testing.assert_allclose(total.values, sum(values.values()), atol=1e-12)


def test_a_silo_restarts_during_preparation(tmp_path):
    d = Deployment(4, sqlite_in(tmp_path))
    table = table_of(12)
    victim = d.ids[1]
    exchanges = d.server.prepare(0)
    messages = next(exchanges, None)
    steps = 0
    while messages is not None:
        replies = {s: d.silos[s].handle(m) for s, m in messages.items()}
        d.silos[victim] = d.silo(victim)
        # A retry after the crash is answered with the same bytes.
        assert d.silos[victim].handle(messages[victim]) == replies[victim]
        steps += 1
        try:
            messages = exchanges.send(replies)
        except StopIteration:
            messages = None
    assert steps == 5
    values = random_values(d.ids, table)
    contributions = contribute(d.silos, 0, table, values)
    total = carry(d.server.total(0, d.ids, table, contributions, CONTEXT), d.silos)
    np.testing.assert_allclose(total.values, sum(values.values()), atol=1e-12)


def test_a_used_index_stays_used_after_a_restart(tmp_path):
    d = Deployment(4, sqlite_in(tmp_path))
    table = table_of(12)
    carry(d.server.prepare(0), d.silos)
    values = random_values(d.ids, table)
    contribute(d.silos, 3, table, values)
    d.restart()
    for silo in d.ids:
        with pytest.raises(ProtocolError, match="used already"):
            d.silos[silo].contribute(3, d.ids, table, values[silo], CONTEXT)


def test_reveal_is_repeated_byte_for_byte(tmp_path):
    d = Deployment(4, sqlite_in(tmp_path))
    table = table_of(12)
    carry(d.server.prepare(0), d.silos)
    messages = contribute(d.silos, 0, table, random_values(d.ids, table))
    exchanges = d.server.total(0, d.ids, table, messages, CONTEXT)
    requests = next(exchanges)
    signed = {s: d.silos[s].handle(m) for s, m in requests.items()}
    reveal = exchanges.send(signed)
    shares = {s: d.silos[s].handle(m) for s, m in reveal.items()}
    d.restart()
    assert {s: d.silos[s].handle(m) for s, m in requests.items()} == signed
    assert {s: d.silos[s].handle(m) for s, m in reveal.items()} == shares


def test_a_server_that_restarts_keeps_to_the_survivors_it_named():
    d = Deployment(5)
    table = table_of(12)
    values = random_values(d.ids, table)
    carry(d.server.prepare(0), d.silos)
    messages = contribute(d.silos, 0, table, values)
    first = {s: messages[s] for s in d.ids[:4]}
    next(d.server.total(0, d.ids, table, first, CONTEXT))  # names them, then dies
    d.restart()
    total = carry(d.server.total(0, d.ids, table, messages, CONTEXT), d.silos)
    assert total.survivors == tuple(sorted(first))
    np.testing.assert_allclose(total.values, sum(values[s] for s in first), atol=1e-12)


def test_a_store_of_another_session_is_refused():
    d = Deployment(4)
    other = Deployment(4)
    with pytest.raises(InputError, match="another session"):
        MaskedSilo(other.roster, d.ids[0], other.identities[d.ids[0]], d.stores[d.ids[0]])
    with pytest.raises(InputError, match="another session"):
        MaskedServer(other.roster, d.stores["server"])


def test_a_silo_without_its_store_takes_no_part_but_the_others_go_on():
    d = Deployment(5)
    table = table_of(12)
    values = random_values(d.ids, table)
    carry(d.server.prepare(0), d.silos)
    d.stores[d.ids[0]] = MemoryStore()
    d.silos[d.ids[0]] = d.silo(d.ids[0])
    with pytest.raises(ProtocolError):
        contribute(d.silos, 0, table, values)
    rest = {s: values[s] for s in d.ids[1:]}
    messages = contribute(d.silos, 0, table, rest)
    total = carry(d.server.total(0, d.ids, table, messages, CONTEXT), d.silos)
    np.testing.assert_allclose(total.values, sum(rest.values()), atol=1e-12)


@pytest.mark.parametrize("durable", [True, False])
def test_store_contract(tmp_path, durable):
    store = SqliteStore(tmp_path / "s.sqlite") if durable else MemoryStore()
    assert store.get("a") is None
    assert store.claim("a", b"1") == b"1"
    assert store.claim("a", b"2") == b"1"
    store.put({"a": b"3", "b": b""})
    assert (store.get("a"), store.get("b")) == (b"3", b"")
    store.drop(["a", "missing"])
    assert store.claim("a", b"4") == b"4"
    if durable:
        again = SqliteStore(tmp_path / "s.sqlite")
        assert (again.get("a"), again.get("b")) == (b"4", b"")
        assert stat.S_IMODE((tmp_path / "s.sqlite").stat().st_mode) == 0o600


def test_a_failed_write_of_several_slots_changes_none(tmp_path):
    store = SqliteStore(tmp_path / "s.sqlite")
    with pytest.raises(Exception, match="NOT NULL"):
        store.put({"a": b"1", "b": None})
    assert store.get("a") is None
    store.put({"a": b"2"})
    assert store.get("a") == b"2"


class _Kept(SqliteStore):
    """As a store was: what is dropped stays in SQLite's log beside the file."""

    def drop(self, slots):
        with self._transaction():
            self._connection.executemany("DELETE FROM slots WHERE slot = ?", [(s,) for s in slots])


@pytest.mark.parametrize("kind", [SqliteStore, _Kept], ids=["", "control"])
def test_a_disk_holds_the_secrets_and_shares_of_two_batches(tmp_path, kind):
    """Whoever takes the file and its log finds no others. The control: each batch since the session began."""
    d, slots = Deployment(4, lambda name: kind(tmp_path / f"{name}.sqlite"), batch=1), {}
    stolen = tmp_path / f"{d.ids[1]}.sqlite"
    for index in range(4):
        carry(d.server.prepare(index), d.silos)
        with closing(sqlite3.connect(stolen)) as reader:
            kept = reader.execute("SELECT slot, value FROM slots").fetchall()
        slots |= {slot: bytes(value)[:200] for slot, value in kept if slot.startswith(("batch/", "delivery/"))}
    files = b"".join(path.read_bytes() for path in tmp_path.glob(f"{stolen.name}*"))
    found = {slot.rpartition("/")[2] for slot, value in slots.items() if value in files}
    assert found == (set("23") if kind is SqliteStore else set("0123"))


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("step", [0, 1, 2, 3, 4])
def test_a_preparation_that_lost_too_many_is_taken_up_again(step, restart):
    d = Deployment(5)
    table = table_of(12)
    values = random_values(d.ids, table)
    away = set(d.ids[:3])
    with pytest.raises(AggregationError, match="2 of 5 silos answered, 4 are needed"):
        carry(d.server.prepare(0), d.silos, [() if at < step else away for at in range(6)])
    if restart:
        d.restart()
    carry(d.server.prepare(0), d.silos)
    messages = contribute(d.silos, 0, table, values)
    total = carry(d.server.total(0, d.ids, table, messages, CONTEXT), d.silos)
    assert total.survivors == tuple(sorted(d.ids))
    np.testing.assert_allclose(total.values, sum(values.values()), atol=1e-12)


def test_waiting_for_silos_uses_up_no_set_up():
    d = Deployment(4)
    for _ in range(20):
        with pytest.raises(AggregationError, match="set-up: 1 of 4 silos answered, 3 are needed"):
            carry(d.server.prepare(0), {d.ids[0]: d.silos[d.ids[0]]})
    carry(d.server.prepare(0), d.silos)
    assert d.server._state.session.members == (0, 1, 2, 3)
