"""Malformed bytes to and from the parties of homomorphic sums: refused, without a crash of any."""

import contextlib
import ctypes
import importlib.util
import os
import re
import struct
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgpack
import numpy as np
import pytest
from homomorphic_world import World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sum_network import CONTEXT, carry, run_sum

from secure_fvi.aggregation import homomorphic_schemes as schemes
from secure_fvi.aggregation.homomorphic import Homomorphic, HomomorphicServer, HomomorphicSilo, WithHolder
from secure_fvi.aggregation.homomorphic_schemes import (
    BFV,
    BFV_HALF,
    CKKS,
    DECRYPTIONS,
    DEGREE,
    MAX_KEY_BYTES,
    Ciphertexts,
    Decrypted,
    DecryptRequest,
    HolderKey,
    HolderKeyRequest,
    PublicContext,
    SecretContext,
    _check_parameters,
    pack,
    unpack,
    unpack_any,
)
from secure_fvi.aggregation.key_holder import KeyHolder, KeyWornOut, decrypted_statement, holder_entry
from secure_fvi.aggregation.messages import Contribution, Done
from secure_fvi.aggregation.messages import pack as pack_masked
from secure_fvi.aggregation.messages import unpack as unpack_masked
from secure_fvi.aggregation.roster import Identity
from secure_fvi.aggregation.store import MemoryStore
from secure_fvi.errors import AggregationError, InputError, ProtocolError


@cache
def public(scheme):
    return PublicContext(scheme, SecretContext(scheme).public_bytes)


@cache
def ciphertext(scheme):
    return public(scheme).encrypt(np.arange(10).astype(scheme.dtype))[0]


@cache
def world():
    """One run whose messages the tests damage; nothing below leaves a trace in it."""
    w = World(3)
    w.total(w.contribute())
    return w


DAMAGE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("scheme", [BFV, CKKS], ids=lambda s: s.name)
class TestCiphertexts:
    @given(data=st.data())
    @DAMAGE
    def test_damage_is_refused_or_reads_as_another_ciphertext(self, scheme, data):
        good = ciphertext(scheme)
        # The first bytes hold the structure; further on are coefficients, of which any within the modulus will do.
        at = data.draw(st.integers(0, 200) | st.integers(0, len(good) - 1))
        damaged = bytearray(good)
        kind = data.draw(st.sampled_from(["flip", "cut", "noise", "overwrite", "grow"]))
        if kind == "flip":
            damaged[at] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            damaged = damaged[:at]
        elif kind == "noise":
            damaged = bytearray(data.draw(st.binary(max_size=300)))
        elif kind == "overwrite":
            damaged[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
        else:
            damaged += data.draw(st.binary(min_size=1, max_size=100))
        try:
            vectors = public(scheme).read([bytes(damaged)], 10)
        except ProtocolError:
            return
        total = public(scheme).read([good], 10)
        public(scheme).add(total, vectors)
        assert total[0].size() == 10

    def test_sizes_are_guarded(self, scheme):
        good = ciphertext(scheme)
        refused = [
            ([good, good], 10),
            ([], 10),
            ([good], 11),
            ([good], 9),
            ([good], scheme.slots + 10),
            ([good], 2**62),
            ([good + bytes(scheme.max_ciphertext_bytes)], 10),
            ([b""], 10),
            ([good], 0),
        ]
        for parts, size in refused:
            with pytest.raises(ProtocolError):
                public(scheme).read(parts, size)
        for parts in ([good + bytes(scheme.max_ciphertext_bytes)], [b""]):
            with pytest.raises(ProtocolError, match="of the wrong length"):
                public(scheme).read(parts, 10)
        assert len(public(scheme).read([good], 10)) == 1

    def test_another_schemes_ciphertext_is_refused(self, scheme):
        other = CKKS if scheme is BFV else BFV
        with pytest.raises(ProtocolError):
            public(scheme).read([ciphertext(other)], 10)

    def test_keys_that_are_none_are_refused(self, scheme):
        good = SecretContext(scheme).public_bytes
        for bad in (b"", b"nothing", good[: len(good) // 2], bytes(1000), os.urandom(1000), bytes(MAX_KEY_BYTES + 1)):
            with pytest.raises(ProtocolError, match=r"too long" if len(bad) > MAX_KEY_BYTES else r"cannot be read"):
                PublicContext(scheme, bad)
        with pytest.raises(ProtocolError, match="other parameters"):
            SecretContext.from_bytes(scheme, SecretContext(CKKS if scheme is BFV else BFV).to_bytes())


def _zstd(content: bytes) -> bytes:
    library = ctypes.CDLL(importlib.util.find_spec("_tenseal_cpp").origin)
    library.ZSTD_compress.restype = ctypes.c_size_t
    room = 4096 + len(content)
    out = ctypes.create_string_buffer(room)
    size = (ctypes.c_size_t(room), content, ctypes.c_size_t(len(content)), 1)
    written = library.ZSTD_compress(out, *size)
    assert written < room
    return ctypes.string_at(out, written)


def _frame(content: bytes) -> bytes:
    packed = _zstd(content)
    return bytes.fromhex("5ea1100403020000") + (16 + len(packed)).to_bytes(8, "little") + packed


def _peak(read) -> int:
    """Megabytes that `read` takes at its height, of this process; whatever it raises is left out."""

    def high(name: str) -> int:
        return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) >> 10

    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what earlier tests left to be used again
    Path("/proc/self/clear_refs").write_text("5")
    before = high("VmRSS")
    with contextlib.suppress(Exception):
        read()
    return high("VmHWM") - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory's height is read from /proc")
class TestBombs:
    """A few kilobytes that stand for 130 MB: many ciphertexts, or keys beside the public one, of compressed zeros."""

    def test_a_ciphertext_takes_no_more_than_an_honest_one(self, monkeypatch):
        reader = public(BFV)
        (_, sizes), (_, frame) = schemes._fields(ciphertext(BFV))
        plain = schemes._numbers(frame, BFV.primes)[16:]
        many = [(0x0A, sizes), *[(0x12, _frame(plain[:97] + bytes(len(plain) - 97)))] * 250]
        longer, nested = plain + bytes(1 << 20), plain[:73] + _frame(plain[89:] + bytes(1 << 20))
        bomb = schemes._joined(many)
        others = [schemes._joined([(0x0A, sizes), (0x12, _frame(content))]) for content in (longer, nested)]
        for bad in (bomb, *others):
            with pytest.raises(ProtocolError, match="cannot be read"):
                reader.read([bad], 10)
        assert len(bomb) < 1 << 16
        assert _peak(lambda: reader.read([bomb], 10)) < 10
        monkeypatch.setattr(schemes, "_one_vector", lambda scheme, data: data)  # the control: TenSEAL itself
        assert _peak(lambda: reader.read([bomb], 10)) > 100
        for taken in others:
            reader.read([taken], 10)

    def test_a_key_takes_no_more_than_an_honest_one(self):
        (_, parameters), (_, inner) = schemes._fields(SecretContext(BFV).public_bytes)
        inside = schemes._fields(inner)
        key = schemes._numbers(inside[0][1], BFV.primes + 1)
        zeros = key[: 16 + 97] + bytes(len(key) - 16 - 97)
        some = (struct.pack("<Q", 4) + zeros * 4) * 300  # more than earlier tests left in SEAL's own pool
        galois = key[16:48] + struct.pack("<Q", DEGREE) + some + bytes(8 * (DEGREE - 300))
        bomb = schemes._joined([(0x0A, parameters), (0x12, schemes._joined([*inside, (0x2A, _frame(galois))]))])
        del galois, some
        assert len(bomb) < MAX_KEY_BYTES
        with pytest.raises(ProtocolError, match="nothing more"):
            PublicContext(BFV, bomb)
        assert _peak(lambda: PublicContext(BFV, bomb)) < 10
        assert _peak(lambda: schemes._tenseal().context_from(bomb, n_threads=1)) > 100  # the control

    def test_a_key_of_more_than_its_parts_stand_for_is_refused(self):
        (_, parameters), (_, inner) = schemes._fields(SecretContext(BFV).public_bytes)
        inside, known = schemes._fields(inner), schemes._unpacked(parameters, 17 + 24 * 6)[16:]
        key = schemes._numbers(inside[0][1], BFV.primes + 1)[16:]
        for frames in (
            (_frame(known + bytes(1 << 20)), inside[0][1]),
            (parameters, _frame(key + bytes(1 << 20))),
            (parameters, _frame(key[:73] + _frame(key[89:]))),
        ):
            bad = schemes._joined([(0x0A, frames[0]), (0x12, schemes._joined([(0x0A, frames[1]), *inside[1:]]))])
            with pytest.raises(ProtocolError, match="is damaged"):
                PublicContext(BFV, bad)


def _with(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


class TestOneForm:
    """What is wrong with others' bytes is found before TenSEAL has them: each fault alone, beside right bytes."""

    def test_a_ciphertext_has_one_form(self):
        (_, sizes), (_, frame) = schemes._fields(ciphertext(BFV))
        plain = schemes._numbers(frame, BFV.primes)
        inner = 16 + schemes._BEFORE_NUMBERS
        assert schemes._numbers(plain, BFV.primes) == plain
        assert schemes._one_vector(BFV, schemes._joined([(0x0A, sizes), (0x12, plain)]))
        for fields, says in (
            ([(0x0A, sizes), (0x12, plain), (0x19, bytes(8))], "not one ciphertext"),
            ([(0x0A, sizes + bytes(4)), (0x12, plain)], "more than one size"),
        ):
            with pytest.raises(ValueError, match=says):
                schemes._one_vector(BFV, schemes._joined(fields))
        for bad, says in (
            (_with(plain, inner + 16, bytes(8)), "another number of numbers"),
            (_with(plain, inner, bytes(3)), "not a frame without compression"),
            (_with(plain, 0, bytes(3)), "not a frame"),
            (_with(plain, 8, bytes(8)), "not a frame"),
            (_with(plain, 5, b"\x01"), "compressed in another way"),
            (_with(plain, 5, b"\x02"), "not what it stands for"),  # and no zstd
            (_frame(plain[16:-8]), "not what it stands for"),  # shorter
        ):
            with pytest.raises(ValueError, match=says):
                schemes._numbers(bad, BFV.primes)
        assert schemes._varint(b"\xff" * 9 + b"\x01", 0) == (2**64 - 1, 10)
        with pytest.raises(ValueError, match="a number without end"):
            schemes._varint(b"\xff" * 11, 0)

    def test_a_key_has_one_form(self):
        """The last two TenSEAL is asked about: it reads a key of other parameters as one, and this file does not."""
        (_, frame), (_, inner) = schemes._fields(SecretContext(BFV).public_bytes)
        parameters, ts = schemes._unpacked(frame, 17 + (BFV.primes + 2) * 24), schemes._tenseal()
        assert PublicContext(BFV, schemes._joined([(0x0A, parameters), (0x12, inner)])).scheme is BFV
        for fields, says in (
            ([(0x12, inner), (0x0A, parameters)], "cannot be read"),
            ([(0x0A, parameters), (0x12, inner), (0x1A, b"")], "nothing more"),
            ([(0x0A, _with(parameters, 16 + 17, bytes(3))), (0x12, inner)], "is damaged"),
            ([(0x0A, _with(parameters, 17, bytes(8))), (0x12, inner)], "cannot be read"),
        ):
            with pytest.raises(ProtocolError, match=says):
                PublicContext(BFV, schemes._joined(fields))
        other = ts.context(ts.SCHEME_TYPE.BFV, DEGREE, 1032193, n_threads=1).serialize(True, False, False, False)
        assert schemes._read_key(BFV, other).has_public_key()
        with pytest.raises(ProtocolError, match="other parameters than bfv"):
            PublicContext(BFV, other)


class TestMessages:
    def samples(self):
        request = unpack(world().requests[-1], DecryptRequest)
        key = world().holder.handle(pack(HolderKeyRequest()))
        return [pack(request), key, world().holder.handle(pack(request)), pack(Ciphertexts([b"a"]))]

    def test_schemas_are_strict(self):
        for sample in self.samples():
            fields = msgpack.unpackb(sample)
            variants = [[*fields, 0], fields[:-1], [1, *fields[1:]], [2, 99, *fields[2:]], fields[0], None]
            for at in range(2, len(fields)):
                variants += [[*fields[:at], wrong, *fields[at + 1 :]] for wrong in (None, -1, 1.5, "text", {}, [None])]
            for variant in variants:
                with pytest.raises(ProtocolError):
                    unpack_any(msgpack.packb(variant))
            with pytest.raises(ProtocolError):
                unpack_any(sample[:-1])

    def test_the_holder_takes_its_own_messages_only(self):
        for message in (
            pack(Done()),
            pack(HolderKey(b"", bytes(64))),
            pack_masked(Contribution(0, b"", b"", bytes(64))),
            b"",
            b"x",
        ):
            with pytest.raises(ProtocolError):
                world().holder.handle(message)

    def test_silos_take_no_message_of_the_holders(self):
        silo = world().silos[world().ids[0]]
        for message in (pack(HolderKeyRequest()), world().requests[-1], pack(Ciphertexts([]))):
            with pytest.raises(ProtocolError):
                silo.handle(message)

    @given(data=st.data())
    @DAMAGE
    def test_damaged_requests_never_crash_the_holder(self, data):
        honest = unpack(world().requests[-1], DecryptRequest)
        field = data.draw(st.sampled_from(["survivors", "signers", "parts", "cohort", "signatures", "blocks"]))
        value = {
            "survivors": st.binary(max_size=3),
            "signers": st.binary(max_size=3),
            "parts": st.lists(st.binary(max_size=30), max_size=3),
            "cohort": st.binary(max_size=3),
            "signatures": st.lists(st.binary(min_size=64, max_size=64), max_size=4),
            "blocks": st.binary(max_size=60),
        }[field]
        drawn = data.draw(value.filter(lambda v: v != getattr(honest, field)))
        with pytest.raises(ProtocolError):
            world().holder.handle(pack(honest._replace(**{field: drawn})))

    def test_a_refused_request_does_not_use_up_the_index(self):
        w = World(3)
        messages = w.contribute()
        request = w.signed_request(messages)
        for parts in ([], [b"nothing"], request.parts * 2):
            with pytest.raises(ProtocolError):
                w.holder.handle(pack(request._replace(parts=parts)))
        total = w.total(messages)
        np.testing.assert_allclose(total.values, sum(w.values.values()), atol=1e-12)


class TestContributions:
    def test_a_malformed_contribution_is_a_dropout(self):
        w = World(4)
        bad = w.ids[2]
        payloads = [
            b"",
            pack(Ciphertexts([])),
            pack(Ciphertexts([b"nothing"])),
            pack(Ciphertexts(public(BFV).encrypt(np.arange(3)))),
            pack(Ciphertexts(public(BFV).encrypt(np.arange(12)) * 2)),
            pack(Ciphertexts(public(CKKS).encrypt(np.arange(12.0)))),
        ]
        for index, payload in enumerate(payloads):
            messages = w.contribute(index)
            messages[bad] = w.signed_contribution(bad, payload, index)
            total = w.total(messages, index)
            assert bad not in total.survivors
            np.testing.assert_allclose(total.values, sum(w.values[s] for s in total.survivors), atol=1e-12)
            assert bad in w.server.faults

    def test_a_contribution_that_was_changed_on_the_way_is_noticed(self):
        # A well-formed ciphertext of other values in the silo's name: its signature names what it sent.
        w = World(4)
        messages = w.contribute()
        parts = w.server._key.encrypt(np.arange(12))
        sent = unpack_masked(messages[w.ids[2]], Contribution)
        messages[w.ids[2]] = pack_masked(sent._replace(payload=pack(Ciphertexts(parts))))
        total = w.total(messages)
        assert w.ids[2] not in total.survivors
        assert "did not sign" in w.server.faults[w.ids[2]]
        total = run_sum(w.local, w.silos, 1, w.table, w.values)
        np.testing.assert_allclose(total.values, sum(w.values.values()), atol=1e-12)


class TestTheServer:
    """What the aggregator refuses of the key holder; the sum then succeeds with its true answer."""

    @pytest.mark.parametrize(
        ("values", "reason"),
        [
            (lambda v: v[:-8], "does not fit the sum"),
            (lambda v: v + bytes(8), "does not fit the sum"),
            (lambda v: (BFV_HALF + 1).to_bytes(8, "little") + v[8:], "is out of the ring"),
            (lambda v: (-BFV_HALF - 1).to_bytes(8, "little", signed=True) + v[8:], "is out of the ring"),
        ],
    )
    def test_an_answer_that_the_holder_signed_and_that_cannot_be_is_refused(self, values, reason):
        w = World(3)
        messages = w.contribute()

        def lie(message):
            reply = unpack(w.holder.handle(message), Decrypted)
            changed = values(reply.values)
            statement = decrypted_statement(w.roster, unpack(message, DecryptRequest), changed)
            return pack(Decrypted(0, changed, w.holder._identity.sign(statement)))

        with pytest.raises(AggregationError, match=reason):
            carry(WithHolder(w.server, lie).total(0, w.ids, w.table, messages, CONTEXT), w.silos)
        np.testing.assert_allclose(w.total(messages).values, sum(w.values.values()), atol=1e-12)

    def test_another_key_than_the_rosters_ends_the_preparation(self):
        w = World(3)
        server = HomomorphicServer(w.roster, BFV, True)
        key = unpack(w.holder.handle(pack(HolderKeyRequest())), HolderKey)
        lying = WithHolder(server, lambda _: pack(key._replace(public_key=SecretContext(BFV).public_bytes)))
        with pytest.raises(AggregationError, match="another encryption key"):
            carry(lying.prepare(0), w.silos)
        with pytest.raises(AggregationError, match="sum 0 was not prepared"):
            carry(server.total(0, w.ids, w.table, {}, CONTEXT), w.silos)

    def test_a_server_started_again_needs_the_key_anew(self):
        """It keeps batches and no key. The control is a preparation."""
        w = World(3)
        messages, party = w.contribute(), {id(store): name for name, store in w.stores.items()}[id(w.server._store)]
        w.server = HomomorphicServer(w.roster, BFV, True, w.stores[party])
        w.local = WithHolder(w.server, w._ask)
        with pytest.raises(AggregationError, match="sum 0 was not prepared"):
            w.total(messages)
        carry(w.local.prepare(0), w.silos)
        np.testing.assert_allclose(w.total(messages).values, sum(w.values.values()), atol=1e-12)

    def test_a_worn_key_is_found_before_anybody_contributes(self):
        w = World(3, scheme="ckks")
        w.server._spent = DECRYPTIONS
        with pytest.raises(KeyWornOut, match="a new session is needed"):
            carry(w.local.prepare(1), w.silos)


class TestSetUp:
    def test_a_roster_for_other_sums_is_refused_by_silo_and_server(self):
        w = World(3)
        silo, identity = w.ids[0], w.silos[w.ids[0]]._identity
        for roster, reason in (
            (replace(w.roster, key_holder=b""), "must name the key holder"),
            (replace(w.roster, consistency_check=False), "need the consistency check"),
        ):
            with pytest.raises(InputError, match=reason):
                HomomorphicServer(roster, BFV, True)
            with pytest.raises(InputError, match=reason):
                HomomorphicSilo(roster, silo, identity, Homomorphic())

    def test_the_holder_is_no_silo_and_keeps_to_its_session(self):
        w = World(3)
        key, silo = w.holder._key, w.silos[w.ids[0]]._identity
        with pytest.raises(InputError, match="another key holder, another key or other settings"):
            KeyHolder(w.roster, Identity(), key, True)
        roster = replace(w.roster, key_holder=holder_entry(silo.public_key, BFV, True, key.public_bytes))
        with pytest.raises(InputError, match="must not be a silo"):
            KeyHolder(roster, silo, key, True)
        store = MemoryStore()
        KeyHolder(w.roster, w.holder._identity, key, True, store)
        with pytest.raises(InputError, match="the state of another session"):
            KeyHolder(replace(w.roster, session=bytes(32)), w.holder._identity, key, True, store)

    def test_two_holders_over_one_store_decrypt_one_total_each_index(self):
        class Late(MemoryStore):
            """Shows what is claimed only to who claims it: another process was between look and claim."""

            def get(self, slot):
                return None if slot.startswith(("decrypted/", "answer/")) else super().get(slot)

        w = World(4)
        request = w.signed_request(w.contribute())
        w.holder._store = Late()
        w.holder.handle(pack(request))
        other = request._replace(parts=w.parts_of(w.contribute(1)[w.ids[0]]))
        with pytest.raises(ProtocolError, match="was decrypted already"):
            w.holder.handle(pack(other))

    def test_what_seal_cannot_read_or_add_is_a_refusal(self):
        with pytest.raises(ProtocolError, match="cannot be read"):
            _check_parameters(BFV, object())
        ours = public(BFV)
        one = ours.read([ciphertext(BFV)], 10)
        with pytest.raises(ProtocolError, match="cannot be added"):
            ours.add(one, [*one, *one])
