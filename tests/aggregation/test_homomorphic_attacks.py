"""Attacks on homomorphic sums; each beside the control that succeeds once the protection is off."""

import math
from dataclasses import replace

import numpy as np
import pytest
from homomorphic_world import VICTIM, World, is_input
from scipy import stats
from sum_network import CONTEXT, names, random_values, run_sum, table_of
from tenseal import sealapi

from secure_fvi.aggregation import Block, BlockTable, base, homomorphic, key_holder
from secure_fvi.aggregation import homomorphic_schemes as schemes
from secure_fvi.aggregation.homomorphic import Homomorphic, HomomorphicSilo, WithHolder
from secure_fvi.aggregation.homomorphic_schemes import (
    BFV,
    BFV_PRIME,
    CKKS,
    DECRYPTIONS,
    Decrypted,
    DecryptRequest,
    HolderKey,
    PrimeRing,
    PublicContext,
    SecretContext,
    error_bound,
    flood,
    flooding_sd,
    pack,
    secure_normal,
    step_exponent,
    unpack,
)
from secure_fvi.aggregation.key_holder import KEY_HOLDER, LABEL_HOLDER_ADVERT, KeyHolder, holder_entry
from secure_fvi.aggregation.messages import Done
from secure_fvi.aggregation.prg import digest
from secure_fvi.aggregation.roster import Identity
from secure_fvi.errors import AggregationError, ProtocolError


class TestKeySubstitution:
    """The server hands a silo a key whose secret half it has."""

    def attack(self, world, attacker, signer):
        """The victim's values under the attacker's key."""
        signature = signer.sign(digest(LABEL_HOLDER_ADVERT, world.roster.hash))
        victim = world.silos[world.victim]
        victim._key = None  # as if the honest key had not come first
        victim.handle(pack(HolderKey(attacker.public_bytes, signature)))
        message = victim.contribute(0, world.ids, world.table, world.values[world.victim], CONTEXT)
        reader = PublicContext(BFV, attacker.public_bytes)
        slots = attacker.decrypt(reader.read(world.parts_of(message), world.table.size))
        return victim._codec(world.table).decode(slots, ())

    def test_refused_whoever_signs_it(self):
        world = World(masks=False)
        for signer in (Identity(), world.holder._identity):
            with pytest.raises(ProtocolError, match="another encryption key"):
                self.attack(world, SecretContext(BFV), signer)

    @pytest.mark.parametrize("looked", [True, False], ids=["", "control"])
    def test_no_byte_of_another_key_is_read(self, monkeypatch, looked):
        def read(*_):
            raise AssertionError("it was read")

        world = World()
        monkeypatch.setattr(key_holder, "PublicContext", read)
        if not looked:
            monkeypatch.setattr(key_holder, "holder_entry", lambda *_: world.roster.key_holder)
            monkeypatch.setattr(key_holder, "holder_signed", lambda *_: True)
        with pytest.raises(ProtocolError, match="another encryption key") if looked else pytest.raises(AssertionError):
            key_holder.check_holder_key(world.roster, BFV, True, HolderKey(b"no key", bytes(64)))

    def test_the_right_key_of_another_session_is_refused(self):
        world = World()
        message = HolderKey(world.holder._key.public_bytes, world.holder._identity.sign(b"something else"))
        with pytest.raises(ProtocolError, match="not signed by the roster's key holder"):
            world.silos[world.victim].handle(pack(message))

    def test_a_known_key_is_not_replaced(self):
        world = World()
        with pytest.raises(ProtocolError, match="another encryption key"):
            world.silos[world.victim].handle(pack(HolderKey(SecretContext(BFV).public_bytes, bytes(64))))
        total = world.total(world.contribute())
        np.testing.assert_allclose(total.values, sum(world.values.values()), atol=1e-12)

    def test_a_roster_of_another_key_shares_no_set_up_with_the_others(self):
        # The server shows one silo a roster with its own key: what that silo signs names the other roster.
        attacker, signer = SecretContext(BFV), Identity()
        config = Homomorphic(masks=False, max_missing=1)
        ids = sorted(names(4))
        server, silos, holder = config.parties(ids)
        identity = silos[ids[VICTIM]]._identity
        entry = holder_entry(signer.public_key, BFV, False, attacker.public_bytes)
        other = replace(server._roster, key_holder=entry)
        victim = silos[ids[VICTIM]] = HomomorphicSilo(other, ids[VICTIM], identity, config, unbound=True)
        advert = pack(HolderKey(attacker.public_bytes, signer.sign(digest(LABEL_HOLDER_ADVERT, other.hash))))
        assert victim.handle(advert) == pack(Done())
        values = random_values(ids, table_of(12))
        local = WithHolder(server, holder.handle)
        rest = {s: v for s, v in values.items() if s != ids[VICTIM]}
        total = run_sum(local, silos, 0, table_of(12), rest)
        np.testing.assert_allclose(total.values, sum(rest.values()), atol=1e-12)
        with pytest.raises(ProtocolError, match="unknown here"):
            victim.contribute(0, ids, table_of(12), values[ids[VICTIM]], CONTEXT)

    @pytest.mark.later
    def test_control_without_the_check_the_input_is_open_and_masks_still_hide_it(self, monkeypatch):
        monkeypatch.setattr(
            homomorphic, "check_holder_key", lambda r, scheme, m, key: PublicContext(scheme, key.public_key)
        )
        for masks in (False, True):
            world = World(masks=masks)
            opened = self.attack(world, SecretContext(BFV), Identity())
            assert is_input(opened, world.values[world.victim]) is not masks

    @pytest.mark.parametrize("scheme", [BFV, CKKS])
    def test_a_key_of_other_parameters_or_with_its_secret_half_is_refused(self, scheme):
        other = CKKS if scheme is BFV else BFV
        with pytest.raises(ProtocolError, match="other parameters"):
            PublicContext(scheme, SecretContext(other).public_bytes)
        with pytest.raises(ProtocolError, match="nothing more"):
            PublicContext(scheme, SecretContext(scheme).to_bytes())


class TestDecryptedTwice:
    """A second decryption of an index: of one silo's ciphertexts, with the signatures of the honest sum."""

    def second(self, world, messages):
        world.total(messages)
        request = unpack(world.requests[-1], DecryptRequest)
        return world.holder.handle(pack(request._replace(parts=world.parts_of(messages[world.victim]))))

    @pytest.mark.parametrize("restart", [False, True])
    def test_refused(self, restart):
        world = World(masks=False)
        messages = world.contribute()
        if restart:
            world.total(messages)
            old = world.holder
            world.holder = KeyHolder(world.roster, old._identity, old._key, False, world.stores[KEY_HOLDER])
            request = unpack(world.requests[-1], DecryptRequest)
            with pytest.raises(ProtocolError, match="decrypted already"):
                world.holder.handle(pack(request._replace(parts=world.parts_of(messages[world.victim]))))
        else:
            with pytest.raises(ProtocolError, match="decrypted already"):
                self.second(world, messages)

    def test_the_same_request_gets_the_same_bytes_until_the_next_index(self):
        for scheme in ("bfv", "ckks"):
            table = BlockTable((Block("b", (5,), 10.0),))
            world = World(scheme=scheme, table=table, values={f"silo-{7 * i:04d}": np.ones(5) for i in range(4)})
            world.total(world.contribute())
            first = world.requests[-1]
            assert world.holder.handle(first) == world.holder.handle(first)
            run_sum(world.local, world.silos, 1, table, world.values)
            with pytest.raises(ProtocolError, match="decrypted already"):
                world.holder.handle(first)

    def test_control_a_holder_that_forgets_opens_the_input(self):
        world = World(masks=False)
        messages = world.contribute()
        world.total(messages)
        world.stores[KEY_HOLDER].drop(["decrypted/0", "answer/0"])
        request = unpack(world.requests[-1], DecryptRequest)
        answer = world.holder.handle(pack(request._replace(parts=world.parts_of(messages[world.victim]))))
        assert is_input(world.decoded(answer), world.values[world.victim])


class TestOneSilosCiphertext:
    """A ciphertext of one silo handed to the key holder."""

    def forged(self, world, messages, signers):
        """A request for the victim's ciphertexts with the first `signers` of the honest signatures."""
        request = world.signed_request(messages)
        places = world.roster.members_of(request.signers)[:signers]
        return request._replace(
            signers=world.roster.bitmap(frozenset(places)),
            signatures=request.signatures[:signers],
            parts=world.parts_of(messages[world.victim]),
        )

    @pytest.mark.later
    @pytest.mark.parametrize("signers", [0, 1, 2])
    def test_refused_with_fewer_than_t_signatures(self, signers):
        world = World(masks=False)
        assert world.roster.signatures_needed == 3
        with pytest.raises(ProtocolError, match=f"{signers} signatures; 3 of the roster are needed"):
            world.holder.handle(pack(self.forged(world, world.contribute(), signers)))

    def test_refused_with_signatures_on_something_else(self):
        world = World(masks=False)
        request = self.forged(world, world.contribute(), 3)
        everyone = frozenset(range(4))
        others = {
            "index": request._replace(sum_index=1),
            "survivors": request._replace(survivors=world.roster.bitmap(everyone - {0})),
            "table": request._replace(table=bytes(32)),
            "broadcast": request._replace(context=bytes(32)),
            "key set": request._replace(key_set=bytes(32)),
            "batch": request._replace(batch=bytes(32)),
            "question": request._replace(question=bytes(32)),
            "one bit": request._replace(
                signatures=[bytes([request.signatures[0][0] ^ 1]) + request.signatures[0][1:], *request.signatures[1:]]
            ),
        }
        for changed in others.values():
            with pytest.raises(ProtocolError, match="signature of silo"):
                world.holder.handle(pack(changed))

    @pytest.mark.parametrize("held", [True, False])
    def test_more_ciphertexts_than_the_signed_table_has_are_refused(self, monkeypatch, held):
        """Those of all silos, one after another, for the signatures of one sum. The control: a holder that believes the
        number it is told opens each silo's input at once."""
        if not held:
            monkeypatch.setattr(
                key_holder, "size_of", lambda packed, digest: base.size_of(packed, base.table_digest(packed))
            )
        table = table_of(BFV.slots)
        world = World(masks=False, table=table)
        messages = world.contribute()
        parts = [part for s in world.ids for part in world.parts_of(messages[s])]
        request = world.signed_request(messages)
        other = table_of(len(parts) * BFV.slots).packed
        for forged in (request._replace(parts=parts), request._replace(parts=parts, blocks=other)):
            says = "are needed" if forged.blocks == table.packed else "not those of the table that was signed"
            if not held and forged.blocks == other:
                opened = world.opened(world.holder.handle(pack(forged))).reshape(len(world.ids), -1)
                for s, slots in zip(world.ids, opened, strict=True):
                    assert is_input(PrimeRing(table, world.roster.size).decode(slots, ()), world.values[s])
                return
            with pytest.raises(ProtocolError, match=says):
                world.holder.handle(pack(forged))
        assert is_input(world.total(messages).values, sum(world.values.values()))

    def test_refused_when_one_signature_is_given_several_times(self):
        world = World(masks=False)
        request = self.forged(world, world.contribute(), 3)
        with pytest.raises(ProtocolError, match="signature of silo"):
            world.holder.handle(pack(request._replace(signatures=request.signatures[:1] * 3)))
        with pytest.raises(ProtocolError, match="a signature of each signer"):
            world.holder.handle(pack(request._replace(signatures=request.signatures[:1])))

    def test_refused_below_min_cohort_even_if_all_sign(self):
        world = World(masks=False)
        request = world.signed_request(world.contribute())
        alone = world.roster.bitmap(frozenset({VICTIM}))
        session = world.server._state.session
        statement = session.survivors_statement(request.batch, request._replace(survivors=alone))
        signatures = [
            world.silos[world.ids[place]]._identity.sign(statement)
            for place in world.roster.members_of(request.signers)
        ]
        with pytest.raises(ProtocolError, match="below min_cohort = 3"):
            world.holder.handle(pack(request._replace(survivors=alone, signatures=signatures)))

    def test_control_without_signatures_and_masks_the_input_is_open(self, monkeypatch):
        monkeypatch.setattr(KeyHolder, "_check_signatures", lambda self, request: None)
        world = World(masks=False)
        messages = world.contribute()
        answer = world.holder.handle(pack(self.forged(world, messages, 0)))
        assert is_input(world.decoded(answer), world.values[world.victim])


class TestMasksInsideThePlaintext:
    """A server that collects honest signatures, then hands over one silo's ciphertexts as the total."""

    TABLE = BlockTable((Block("values", (8192,), 1.0),))

    def slots(self, masks):
        values = {f"silo-{7 * i:04d}": np.full(8192, 0.25) for i in range(4)}
        world = World(table=self.TABLE, values=values, masks=masks)
        messages = world.contribute()
        answer = world.ask_for_victim(messages)
        return world, answer

    def chi_square(self, slots):
        """Over 64 equal parts of the ring; chi-square of 63 degrees for uniform slots."""
        counts = np.bincount((slots.astype(object) % BFV_PRIME * 64 // BFV_PRIME).astype(int), minlength=64)
        return float(np.sum((counts - slots.size / 64) ** 2 / (slots.size / 64)))

    def test_the_holder_opens_uniform_noise(self):
        world, answer = self.slots(masks=True)
        low, high = stats.chi2.ppf([1e-6, 1 - 1e-6], 63)  # two-sided false alarm 2e-6
        assert low < self.chi_square(world.opened(answer)) < high
        assert not is_input(world.decoded(answer), world.values[world.victim])
        # Correlation with a constant input is undefined; the mean of uniform residues is within 5 sd of 0 (6e-7).
        assert abs(world.opened(answer).astype(float).mean()) < 5 * BFV_PRIME / np.sqrt(12 * 8192)

    def test_control_without_masks_it_opens_the_input(self):
        world, answer = self.slots(masks=False)
        assert self.chi_square(world.opened(answer)) > stats.chi2.ppf(1 - 1e-6, 63)
        assert is_input(world.decoded(answer), world.values[world.victim])

    def test_the_honest_total_is_noise_to_the_holder_too(self):
        values = {f"silo-{7 * i:04d}": np.full(8192, 0.25) for i in range(4)}
        world = World(table=self.TABLE, values=values)
        answers = []
        handle = world.holder.handle
        world.holder.handle = lambda message: answers.append(handle(message)) or answers[-1]
        total = world.total(world.contribute())
        np.testing.assert_allclose(total.values, 1.0, atol=1e-12)
        low, high = stats.chi2.ppf([1e-6, 1 - 1e-6], 63)
        assert low < self.chi_square(world.opened(answers[-1])) < high


class TestForgedAnswers:
    def total_with(self, change):
        world = World()
        messages, handle = world.contribute(), world.holder.handle
        world.holder.handle = lambda message: change(handle(message))
        return world.total(messages)

    @pytest.mark.later
    def test_an_answer_of_somebody_else_is_refused(self):
        def another(answer):
            reply = unpack(answer, Decrypted)
            return pack(reply._replace(values=bytes(len(reply.values))))

        with pytest.raises(AggregationError, match="not the key holder's"):
            self.total_with(another)
        with pytest.raises(AggregationError, match="not the key holder's"):
            self.total_with(lambda answer: pack(unpack(answer, Decrypted)._replace(sum_index=1)))
        with pytest.raises(AggregationError, match="MessagePack"):
            self.total_with(lambda answer: answer[:-1])


class TestOneSilosCraftedTerm:
    """A silo's term is (0, D), which nobody can tell from a ciphertext: the honest total has D times the key in it."""

    def crafted(self, honest, constant):
        """An honest ciphertext's bytes with nothing but `constant` in the second polynomial."""
        (sizes, frame), primes = (value for _, value in schemes._fields(honest)), BFV.primes
        plain = bytearray(schemes._numbers(frame, primes))
        numbers = np.zeros((2, primes, schemes.DEGREE), "<u8")
        moduli = SecretContext(BFV)._context.seal_context().data.key_context_data().parms().coeff_modulus()
        numbers[1, :, 0] = [constant % m.value() for m in moduli[:primes]]
        plain[-numbers.nbytes :] = numbers.tobytes()
        return schemes._joined([(schemes._SIZES, sizes), (schemes._OBJECT, bytes(plain))])

    def opened(self, key, public, terms):
        """What the key holder makes of the sum of these terms, as a polynomial's coefficients."""
        vectors = [public.read([term], BFV.slots) for term in terms]
        for other in vectors[1:]:
            public.add(vectors[0], other)
        slots, plain = key.decrypt(vectors[0]), sealapi.Plaintext()
        sealapi.BatchEncoder(key._context.seal_context().data).encode([int(v) % BFV_PRIME for v in slots], plain)
        return np.array([plain[i] for i in range(plain.coeff_count())], dtype=object)

    def test_one_silos_crafted_term_gives_its_server_the_secret_key(self):
        key = SecretContext(BFV)
        public = PublicContext(BFV, key.public_bytes)
        moduli = key._context.seal_context().data.key_context_data().parms().coeff_modulus()
        delta = math.prod(m.value() for m in moduli[: BFV.primes]) // BFV_PRIME
        term, nothing = (public.encrypt(np.full(BFV.slots, v, np.int64))[0] for v in (7, 0))
        found = self.opened(key, public, [term, self.crafted(nothing, delta)])
        found[0] = (found[0] - 7) % BFV_PRIME  # the total is a constant here
        assert set(found.tolist()) == {0, 1, BFV_PRIME - 1}  # the key, coefficient by coefficient
        # The control: an honest term in its place. Of the constant 7 all other coefficients are 0.
        assert np.count_nonzero(self.opened(key, public, [term, nothing])) == 1 < np.count_nonzero(found)


class TestApproximateDecryption:
    """CKKS: what a decryption says of the key, before and after flooding."""

    def sum_of(self, terms, seed):
        key = SecretContext(CKKS)
        public = PublicContext(CKKS, key.public_bytes)
        rows = np.random.default_rng(seed).uniform(-1, 1, (terms, CKKS.slots))
        vectors = [public.read(public.encrypt(row), CKKS.slots) for row in rows]
        for other in vectors[1:]:
            public.add(vectors[0], other)
        return key.decrypt(vectors[0]), rows.sum(axis=0)

    @pytest.mark.later
    @pytest.mark.parametrize("terms", [1, 3, 20])
    def test_the_error_stays_below_its_bound_and_the_bound_is_not_idle(self, terms):
        for seed in range(3):
            raw, exact = self.sum_of(terms, seed)
            error = np.linalg.norm(raw - exact)
            assert error < error_bound(terms) < 30 * error

    def test_the_released_total_says_nothing_of_the_error(self):
        raw, exact = self.sum_of(3, 0)
        error = raw - exact
        # |correlation| of 4,096 independent pairs is above 5/64 with probability 6e-7.
        released = np.ldexp(flood(raw, 3).astype(float), step_exponent(3)) - exact
        assert abs(np.corrcoef(released, error)[0, 1]) < 5 / 64
        # The control: without flooding it is the error, an equation in the key for every slot.
        assert np.corrcoef(raw - exact, error)[0, 1] > 0.999
        # With flooding as low as the error itself the two are told together.
        weak = raw + np.std(error) * secure_normal(raw.size) - exact
        assert np.corrcoef(weak, error)[0, 1] > 0.5

    def test_the_noise_is_normal_with_the_stated_sd(self):
        noise = secure_normal(100_000)
        assert stats.kstest(noise, "norm").pvalue > 1e-6  # false alarm 1e-6
        steps = flood(np.zeros(100_000), 3)
        square = np.sum(np.ldexp(steps.astype(float), step_exponent(3)) ** 2) / flooding_sd(3) ** 2
        low, high = stats.chi2.ppf([1e-6, 1 - 1e-6], 100_000)
        assert low < square < high * (1 + 1 / 12)

    def test_decryptions_under_one_key_are_counted(self):
        table = BlockTable((Block("b", (5,), 10.0),))
        world = World(scheme="ckks", table=table, values={f"silo-{7 * i:04d}": np.ones(5) for i in range(4)})
        world.stores[KEY_HOLDER].put({"spent": (DECRYPTIONS - 1).to_bytes(8, "big")})
        world.total(world.contribute())
        with pytest.raises(AggregationError, match="refused"):
            run_sum(world.local, world.silos, 1, table, world.values)
        with pytest.raises(ProtocolError, match=f"more than {DECRYPTIONS} ciphertexts"):
            world.holder.handle(world.requests[-1])
