"""Every kind of sum: the total of those who answered, the same for plain and masked."""

import dataclasses
import hashlib
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import kstest
from sum_network import CONTEXT, carry, contribute, names, random_values, run_sum, table_of

from secure_fvi.aggregation import Block, BlockTable, Masked, Plain, plain
from secure_fvi.aggregation.masked_silo import MaskedSilo
from secure_fvi.aggregation.parties import local_parties
from secure_fvi.aggregation.plain import PlainSilo
from secure_fvi.aggregation.ring import Ring
from secure_fvi.aggregation.roster import Identity, Roster
from secure_fvi.aggregation.store import MemoryStore
from secure_fvi.errors import AggregationError, InputError, ProtocolError

KINDS = [
    Plain(),
    Masked(),
    Masked(bits=32),
    Masked(max_missing=1),
    Masked(max_missing=1, bits=32),
    Masked(max_missing=1, consistency_check=False),
    Masked(max_missing=1, batch=2),
]


@pytest.mark.parametrize("kind", KINDS, ids=repr)
@pytest.mark.parametrize("silos", [3, 5, 8])
def test_total_is_the_sum(kind, silos):
    ids, table = names(silos), table_of(50)
    server, parties = local_parties(kind, ids)
    for index in range(5):
        values = random_values(ids, table, seed=index)
        total = run_sum(server, parties, index, table, values)
        assert total.survivors == tuple(sorted(ids))
        tolerance = silos * 2.0**-25 * silos if getattr(kind, "bits", 64) == 32 else 1e-12
        np.testing.assert_allclose(total.values, sum(values.values()), rtol=0, atol=tolerance)
        assert total.values[-1] == sum(v[-1] for v in values.values())


@pytest.mark.parametrize("kind", [Plain(), Masked(), Masked(bits=32), Masked(max_missing=1)], ids=repr)
def test_totals_are_deterministic(kind):
    ids, table = names(5), table_of(30)
    values = random_values(ids, table)
    totals = []
    for order in (ids, ids[::-1]):
        server, parties = local_parties(kind, order)
        shuffled = {s: values[s] for s in order}
        totals.append(run_sum(server, parties, 3, table, shuffled).values.tobytes())
    assert totals[0] == totals[1]


def test_a_long_vector_takes_the_chunked_road():
    ids, table = names(3), table_of(100_003)
    values = random_values(ids, table)
    server, parties = local_parties(Masked(bits=32), ids)
    total = run_sum(server, parties, 0, table, values)
    np.testing.assert_allclose(total.values, sum(values.values()), rtol=0, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 10.5])
@pytest.mark.parametrize("kind", [Plain(), Masked()], ids=repr)
def test_a_bad_value_is_refused_and_the_index_stays_unused(kind, bad):
    ids, table = names(3), table_of(10)
    server, parties = local_parties(kind, ids)
    carry(server.prepare(0), parties)
    values = random_values(ids, table)
    spoilt = values[ids[0]].copy()
    spoilt[2] = bad
    with pytest.raises(AggregationError, match="'gradient'"):
        parties[ids[0]].contribute(0, ids, table, spoilt, CONTEXT)
    total = run_sum(server, parties, 0, table, values)
    np.testing.assert_allclose(total.values, sum(values.values()), atol=1e-12)


def test_several_tables_alternate():
    ids = names(4)
    server, parties = local_parties(Masked(), ids)
    tables = [table_of(5), table_of(9, bound=3.0)]
    for index in range(6):
        table = tables[index % 2]
        values = random_values(ids, table, seed=index, bound=3.0)
        total = run_sum(server, parties, index, table, values)
        np.testing.assert_allclose(total.values, sum(values.values()), atol=1e-12)


@pytest.mark.later
@pytest.mark.parametrize(
    ("stage", "check"),
    [("contribute", True), ("sign", True), ("reveal", True), ("contribute", False), ("reveal", False)],
)
def test_dropout_at_each_stage_of_a_sum(stage, check):
    ids, table = names(7), table_of(20)
    server, parties = local_parties(Masked(consistency_check=check, max_missing=2), ids)
    values = random_values(ids, table)
    away = set(ids[2:4])
    present = {s: v for s, v in values.items() if stage != "contribute" or s not in away}
    lost = {"contribute": [], "sign": [away, away], "reveal": [(), away] if check else [away]}[stage]
    total = run_sum(server, parties, 0, table, present, lost=lost)
    assert total.survivors == tuple(sorted(present))
    np.testing.assert_allclose(total.values, sum(present.values()), atol=1e-12)
    # The next sum has everybody again.
    after = run_sum(server, parties, 1, table, values)
    np.testing.assert_allclose(after.values, sum(values.values()), atol=1e-12)


@pytest.mark.later
@pytest.mark.parametrize("step", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("check", [True, False])
def test_dropout_at_each_stage_of_preparation(step, check):
    """Exchanges of a first `prepare`: keys, key set, deposits, delivery, activation."""
    ids, table = names(7), table_of(20)
    server, parties = local_parties(Masked(consistency_check=check, max_missing=1), ids)
    away = ids[4]
    carry(server.prepare(0), parties, lost=[() if s != step else (away,) for s in range(5)])
    values = random_values(ids, table)
    messages = {}
    for silo, v in values.items():
        try:
            messages.update(contribute(parties, 0, table, {silo: v}, ids))
        except ProtocolError:
            assert silo == away
    total = carry(server.total(0, ids, table, messages, CONTEXT), parties)
    assert set(total.survivors) == set(messages) >= set(ids) - {away}
    np.testing.assert_allclose(total.values, sum(values[s] for s in messages), atol=1e-12)


def test_a_silo_that_missed_a_delivery_catches_up():
    ids, table = names(5), table_of(20)
    server, parties = local_parties(Masked(max_missing=1), ids)
    carry(server.prepare(0), parties, lost=[(), (), (), (ids[1],)])
    rest = {s: v for s, v in random_values(ids, table).items() if s != ids[1]}
    assert len(run_sum(server, parties, 0, table, rest).survivors) == 4
    assert len(run_sum(server, parties, 1, table, random_values(ids, table)).survivors) == 5


@pytest.mark.parametrize("most", [0, 1])
def test_a_sampled_cohort_sums_its_members_only(most):
    ids, table = names(8), table_of(20)
    server, parties = local_parties(Masked(max_missing=most), ids)
    values = random_values(ids, table)
    for index, cohort in enumerate([ids[:3], ids[2:7], ids]):
        cohort_values = {s: values[s] for s in cohort}
        total = run_sum(server, parties, index, table, cohort_values, cohort=cohort)
        assert total.survivors == tuple(sorted(cohort))
        np.testing.assert_allclose(total.values, sum(cohort_values.values()), atol=1e-12)


@pytest.mark.parametrize("most", [0, 1])
def test_abandoned_indices_are_skipped(most):
    ids, table = names(3), table_of(20)
    server, parties = local_parties(Masked(batch=4, max_missing=most), ids)
    for index in (0, 3, 4, 13, 40, 70, 200):
        values = random_values(ids, table, seed=index)
        total = run_sum(server, parties, index, table, values)
        np.testing.assert_allclose(total.values, sum(values.values()), atol=1e-12)


def test_too_few_get_no_sum():
    ids, table = names(4), table_of(20)
    server, parties = local_parties(Masked(max_missing=1), ids)
    values = random_values(ids, table)
    with pytest.raises(AggregationError, match="min_cohort = 3"):
        run_sum(server, parties, 0, table, {s: values[s] for s in ids[:2]})


@pytest.mark.parametrize("count", [1, 2])
def test_a_roster_below_min_cohort_is_refused(count):
    with pytest.raises(InputError, match=f"at least 3 silos, got {count}"):
        local_parties(Masked(), names(count))


@pytest.mark.parametrize("count", [3, 4, 9])
def test_min_cohort_may_be_everybody(count):
    ids, table = names(count), table_of(6)
    server, parties = local_parties(Masked(min_cohort=count), ids)
    values = random_values(ids, table)
    total = run_sum(server, parties, 0, table, values)
    np.testing.assert_allclose(total.values, sum(values.values()), atol=1e-12)
    with pytest.raises(
        AggregationError, match=f"1 of the {count} silos asked are missing.*nothing usable of '{ids[0]}'"
    ):
        run_sum(server, parties, 1, table, {s: values[s] for s in ids[1:]})


def test_two_silos_need_the_explicit_setting():
    with pytest.raises(InputError, match="set min_cohort = 2 to accept that"):
        local_parties(Masked(), names(2))
    ids, table = names(2), table_of(20)
    server, parties = local_parties(Masked(min_cohort=2), ids)
    values = random_values(ids, table)
    total = run_sum(server, parties, 0, table, values)
    np.testing.assert_allclose(total.values, sum(values.values()), atol=1e-12)


@pytest.mark.parametrize(
    "options", [{"min_cohort": 1}, {"max_missing": -1}, {"bits": 16}, {"batch": 0}, {"batch": 10_000}]
)
def test_bad_options_are_refused(options):
    with pytest.raises(InputError):
        local_parties(Masked(**options), names(4))


def test_equal_silo_ids_are_refused():
    with pytest.raises(InputError, match="ids must differ"):
        local_parties(Masked(), ["a", "b", "a"])


def test_steady_state_takes_one_exchange_and_one_or_two_more_where_sums_recover():
    ids, table = names(4), table_of(20)
    for most, check, expected in ((0, False, 0), (0, True, 0), (1, False, 1), (1, True, 2)):
        server, parties = local_parties(Masked(consistency_check=check, max_missing=most), ids)
        values = random_values(ids, table)
        run_sum(server, parties, 0, table, values)
        asked = []

        class Counting:
            def __init__(self, silo, log=asked):
                self._silo, self._log = silo, log

            def handle(self, message):
                self._log.append(message)
                return self._silo.handle(message)

        counting = {s: Counting(p) for s, p in parties.items()}
        carry(server.prepare(1), counting)
        assert asked == []
        messages = contribute(parties, 1, table, values)
        carry(server.total(1, ids, table, messages, CONTEXT), counting)
        assert len(asked) == expected * len(ids)  # besides the contribution itself


def test_upload_is_the_ring_payload_and_little_more():
    ids, table = names(3), BlockTable((Block("b", (1000,), 1.0),))
    server, parties = local_parties(Masked(bits=32), ids)
    carry(server.prepare(0), parties)
    message = parties[ids[0]].contribute(0, ids, table, np.zeros(1000), CONTEXT)
    assert 4000 <= len(message) <= 1.02 * 4000


@pytest.mark.parametrize("kind", [Plain(), Masked(), Masked(max_missing=1)], ids=repr)
def test_a_used_index_a_wrong_shape_and_a_stranger_are_refused(kind):
    ids, table = names(3), table_of(6)
    server, parties = local_parties(kind, ids)
    carry(server.prepare(0), parties)
    values = random_values(ids, table)
    silo = parties[ids[0]]
    with pytest.raises(AggregationError, match="expected 6 values"):
        silo.contribute(0, ids, table, values[ids[0]][:-1], CONTEXT)
    with pytest.raises(ProtocolError, match="not in the cohort"):
        silo.contribute(0, ids[1:], table, values[ids[0]], CONTEXT)
    silo.contribute(0, ids, table, values[ids[0]], CONTEXT)
    with pytest.raises(ProtocolError, match="used already"):
        silo.contribute(0, ids, table, values[ids[0]], CONTEXT)


def test_plain_sums_skip_what_is_missing_or_malformed_and_need_one_answer():
    ids, table = names(3), table_of(6)
    server, parties = local_parties(Plain(), ids)
    messages = contribute(parties, 0, table, random_values(ids, table))
    messages[ids[0]] = messages[ids[0]][:-1]
    total = carry(server.total(0, ids, table, messages, CONTEXT), parties)
    assert total.survivors == tuple(sorted(ids[1:]))
    with pytest.raises(AggregationError, match="no silo answered"):
        carry(server.total(1, ids, table, {}, CONTEXT), parties)
    with pytest.raises(ProtocolError):
        parties[ids[0]].handle(b"")


def test_a_sum_that_was_not_prepared_or_is_of_an_old_batch_is_an_error():
    ids, table = names(3), table_of(6)
    with pytest.raises(AggregationError, match="was not prepared"):
        carry(local_parties(Masked(), ids)[0].total(0, ids, table, {}, CONTEXT), {})
    server, parties = local_parties(Masked(batch=2, max_missing=1), ids)
    with pytest.raises(AggregationError, match="was not prepared"):
        carry(server.total(0, ids, table, {}, CONTEXT), parties)
    carry(server.prepare(0), parties)
    with pytest.raises(AggregationError, match="sum 2 was not prepared"):  # in a session that is there
        carry(server.total(2, ids, table, {}, CONTEXT), parties)
    for index in (2, 4):
        carry(server.prepare(index), parties)
    with pytest.raises(AggregationError, match="old batch"):
        carry(server.prepare(0), parties)
    with pytest.raises(InputError, match="cannot be negative"):
        carry(server.prepare(-1), parties)


SOME = BlockTable((Block("change", (2,), 8.0), Block("far", (3,), 1.0, integer=True, rows="some")))


@pytest.mark.parametrize("kind", [Plain(), Masked(), Masked(bits=32), Masked(max_missing=1)], ids=repr)
def test_a_total_says_whether_some_silos_is_not_zero(kind):
    """In all kinds of sums alike, however many silos' are; the other blocks are as ever."""
    ids = names(4)
    server, parties = local_parties(kind, ids)
    values = {s: np.array([1.5, -0.25, 0.0, s == ids[1], s != ids[0]]) for s in ids}
    total = run_sum(server, parties, 0, SOME, values).values
    np.testing.assert_allclose(total[:2], [6.0, -1.0], atol=1e-3)
    assert total[2:].tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", [Masked(), Masked(bits=32), Masked(max_missing=1)], ids=repr)
def test_a_total_does_not_say_how_many_silos_are_not_zero(kind, own, monkeypatch):
    """One of four, or all: the ring element that a server adds up is uniform. In the control no silo has a mask of its
    own, and the element is the number of silos."""
    ids, read = names(4), {}
    monkeypatch.setattr(Ring, "decode", lambda self, total, survivors: total.astype(np.float64) / 2.0**self.bits)
    if not own:
        monkeypatch.setattr(MaskedSilo, "_own_mask", lambda self, session, asked: None)
    server, parties = local_parties(kind, ids)
    for index in range(60):
        on = 1 if index % 2 else 4
        values = {s: np.array([1.5, -0.25, 0.0, k < on, k < on]) for k, s in enumerate(ids)}
        total = run_sum(server, parties, index, SOME, values).values
        assert total[2] == 0
        read.setdefault(on, []).extend(total[3:])
    if not own:
        assert [set(np.array(read[on]) * 2.0 ** getattr(kind, "bits", 64)) for on in (1, 4)] == [{1.0}, {4.0}]
        return
    for found in read.values():  # 60 of each: the chance of a false alarm is 2 x 1e-4
        assert kstest(found, "uniform").pvalue > 1e-4
        assert len(set(found)) == len(found)


def test_whether_some_silos_is_not_zero_is_asked_of_whole_numbers():
    with pytest.raises(InputError, match="block 'far': whether some silo's is not zero is asked of whole numbers"):
        Block("far", (), 1.0, rows="some")


def test_only_what_hides_whose_it_is_can_be_spoilt():
    """A plain contribution that counts for nothing would tell the server whose data could not answer."""
    assert not any(silo.spoils for silo in local_parties(Plain(), names(3))[1].values())
    assert all(silo.spoils for silo in local_parties(Masked(), names(3))[1].values())


def test_a_kind_that_is_none_has_no_parties():
    with pytest.raises(InputError, match="aggregation 'none' has no parties"):
        local_parties(SimpleNamespace(kind="none"), names(3))


def test_rosters_that_make_no_sense_are_refused():
    session, keys = bytes(32), [bytes([i]) * 32 for i in range(3)]
    members = tuple(zip("abc", keys, strict=True))
    assert Roster(session, members).size == 3
    for arguments in (
        {"members": members[::-1]},
        {"members": (*members[:2], ("c", keys[0]))},
        {"members": (*members[:2], ("c", b"short"))},
        {"session": b"short"},
        {"bits": 16},
        {"min_cohort": 1},
        {"max_missing": -1},
        {"max_missing": 0.5},
    ):
        with pytest.raises(InputError):
            Roster(**{"session": session, "members": members} | arguments)


def test_a_roster_hash_covers_every_setting():
    session, members = bytes(32), tuple((s, bytes([i]) * 32) for i, s in enumerate("abcd"))
    base = Roster(session, members)
    others = [
        Roster(bytes([1]) * 32, members),
        Roster(session, members[:3]),
        Roster(session, (*members[:3], ("d", bytes([9]) * 32))),
        Roster(session, members, min_cohort=4),
        Roster(session, members, max_missing=1),
        Roster(session, members, bits=32),
        Roster(session, members, consistency_check=False),
        Roster(session, members, batch=8),
        Roster(session, members, corrupt=0.2),
        Roster(session, members, lost=0.2),
        Roster(session, members, key_holder=b"holder"),
    ]
    assert len({base.hash, *(r.hash for r in others)}) == 12
    assert Roster(session, members, corrupt=0, lost=0).hash == Roster(session, members, corrupt=0.0, lost=0.0).hash


def test_no_exchange_is_empty_while_a_silo_stays_away():
    ids, table = names(5), table_of(6)
    server, parties = local_parties(Masked(max_missing=1), ids)
    rest = {s: p for s, p in parties.items() if s != ids[1]}
    carry(server.prepare(0), parties, lost=[(), (), (), (ids[1],)])  # it has deposited, then it is gone
    values = random_values(ids, table)
    sizes = []

    def watched(exchanges):
        try:
            messages = next(exchanges)
            while True:
                sizes.append(len(messages))
                messages = exchanges.send({s: rest[s].handle(m) for s, m in messages.items() if s in rest})
        except StopIteration as end:
            return end.value

    for index in range(12):
        watched(server.prepare(index))
        messages = contribute(rest, index, table, {s: values[s] for s in rest}, ids)
        total = watched(server.total(index, ids, table, messages, CONTEXT))
        assert total.survivors == tuple(sorted(rest))
    assert min(sizes) > 0
    assert sizes.count(1) == 4  # tried again before sums 1, 2, 4 and 8


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (np.full(3, np.nan), "its part of 'a' is not finite or past the bound"),
        (np.array([0.0, 0.0, 9.0]), "its part of 'b' is not finite or past the bound"),
        (np.zeros(4), "64 bytes, where 56 are expected"),
    ],
)
def test_a_plain_sum_leaves_out_what_does_not_fit_and_names_its_silo(
    bad: np.ndarray, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    table = BlockTable((Block("a", (2,), 2.0), Block("b", (1,), 2.0)))
    server, silos = local_parties(Plain(), ["x", "y", "z"])
    sent = {n: s.contribute(1, ["x", "y", "z"], table, np.ones(3), b"") for n, s in silos.items()}
    spoilt = bad.tobytes() + bytes(plain.SALT)
    total = carry(server.total(1, ["x", "y", "z"], table, {**sent, "y": spoilt}, b""), lambda m: {})
    assert total.survivors == ("x", "z")
    assert total.values.tolist() == [2.0, 2.0, 2.0]
    assert f"silo 'y' is left out: {why}" in caplog.text
    with pytest.raises(AggregationError, match="silo 'y' sent what does not fit"):
        carry(server.total(1, ["y"], table, {"y": spoilt}, b""), lambda m: {})
    assert carry(server.total(1, ["x", "y", "z"], table, sent, b""), lambda m: {}).survivors == ("x", "y", "z")


@pytest.mark.parametrize("salted", [True, False], ids=["salted", "control"])
def test_no_guess_at_a_plain_term_can_be_tried_on_its_digest(salted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's audit log, which all members are handed, has the SHA-256 of each silo's answer: of a plain count
    another silo tried all numbers, and under noise = "server", whose epsilon holds against everybody but the server,
    both values of the one record that it did not know. Nor are equal terms seen to be, such as zeros of a silo without
    records. The control is the values alone."""
    table, ids = BlockTable((Block("records", (), 2.0**31, integer=True),)), ["x", "y", "z"]
    server, silos = local_parties(Plain(), ids)
    sent = [
        {n: s.contribute(index, ids, table, np.array([157.0]), CONTEXT, bytes([index]) * 32) for n, s in silos.items()}
        for index in (1, 2)
    ]
    guesses = {hashlib.sha256(np.array([float(n)]).tobytes()).digest(): n for n in range(1000)}
    messages = [message if salted else message[: -plain.SALT] for both in sent for message in both.values()]
    logged = [hashlib.sha256(message).digest() for message in messages]
    assert [guesses.get(digest) for digest in logged] == [None if salted else 157] * 6
    assert len(set(logged)) == (6 if salted else 1)
    assert carry(server.total(1, ids, table, sent[0], b""), lambda m: {}).values.tolist() == [471.0]
    store = MemoryStore()
    again = [PlainSilo("x", store).contribute(1, ids, table, np.ones(1), CONTEXT) for _ in range(2)]
    assert again[0] == again[1]  # a silo that was killed makes the same bytes


@pytest.mark.parametrize("once", [True, False], ids=["once in a process", "by each"])
def test_a_signature_is_checked_once_in_one_process(once):
    """Where parties say that they share what they found: of a recovering sum of seven each signature is checked by one
    of them; the control is that each does it. What was never found right is refused in both: a signature of another
    member, of another statement, and one with a bit turned."""
    ids, checks = names(7), [0]

    class Counted:
        def __init__(self, key):
            self.key = key

        def verify(self, *args):
            checks[0] += 1
            self.key.verify(*args)

    server, silos = local_parties(Masked(max_missing=2), ids, check_once=once)
    roster = server._roster
    roster.__dict__["_keys"] = tuple(map(Counted, roster._keys))
    table = BlockTable((Block("g", (2,), 1.0),))
    carry(server.prepare(0), silos)
    checks[0] = 0
    values = {silo: np.full(2, 0.5) for silo in ids}
    messages = contribute(silos, 0, table, values)
    total = carry(server.total(0, ids, table, messages, CONTEXT), silos)
    assert np.allclose(total.values, 3.5)
    assert checks[0] <= 2 * 7 if once else checks[0] > 4 * 7
    identity = Identity()
    other = Masked().roster({**{s: Identity().public_key for s in ids}, "x": identity.public_key})
    other = dataclasses.replace(other, checked=set())
    place, signed = other.places["x"], identity.sign(b"this")
    for _ in range(2):
        assert other.verify(place, signed, b"this")
        assert not other.verify(place, signed, b"that")
        assert not other.verify(0, signed, b"this")
        assert not other.verify(place, signed[:-1] + bytes([signed[-1] ^ 1]), b"this")
