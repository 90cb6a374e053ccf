"""Protocol audits: every probe breaks the copy that lacks what it is after, and reads what is truly there."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import kstest

import secure_fvi
from secure_fvi.aggregation import Block, BlockTable, Masked
from secure_fvi.aggregation.homomorphic import Homomorphic
from secure_fvi.aggregation.homomorphic_schemes import BFV_PRIME
from secure_fvi.aggregation.masked_silo import MaskedSilo
from secure_fvi.audits import protocol, protocol_weak
from secure_fvi.audits.protocol import HomomorphicSubject, decrypted_alone, opened_by_others
from secure_fvi.audits.protocol_contract import Attempt, attempts_row, random_values, tally
from secure_fvi.audits.protocol_masked import BeforeSetUp, MaskedSubject
from secure_fvi.audits.protocol_probes import (
    ALONE,
    FALSE_ALARM,
    NEIGHBOURS,
    ROUNDS,
    SILOS,
    CipherKeys,
    Mersenne,
    asked_twice,
    both_secrets,
    collisions_row,
    context_of,
    difference,
    keys_of_its_own,
    p_value,
    p_values,
    repeats_row,
    search,
    search_row,
    two_broadcasts,
    uniformity_row,
)
from secure_fvi.errors import InputError, ProtocolError

OURS = MaskedSubject()
LONG = BlockTable((Block("records", (1,), 1e6, integer=True), Block("gradient", (2047,), 10.0)))
NOTHING, LEAKS = "nothing found", "leaks"


def held(row: Any, finding: str = NOTHING) -> None:
    """A valid row whose weak copy fell to every attempt."""
    assert json.loads(json.dumps(row.to_json()))["valid"]
    assert row.positive_control == 1
    assert row.negative_control == 0
    assert row.finding == finding
    assert row.value == (finding == LEAKS)


class TestSecrets:
    @pytest.mark.parametrize(
        ("plan", "weaken", "refusal"),
        [
            # Who has named one set signs no other, so that the second set is short of signatures.
            ("in one request", "talkative", "does not fit the roster"),
            ("in two requests", "forgetful", "of the roster are needed"),
            ("around a restart", "forgetful", "of the roster are needed"),
            ("around a backup of one", "forgetful", "of the roster are needed"),
            ("too few signatures", "credulous", "of the roster are needed"),
            ("old signatures", "credulous", "is not valid here"),
            ("survivors below min_cohort", "small_cohorts", "below min_cohort"),
        ],
    )
    def test_refused_and_the_weak_copy_opened(self, plan: Any, weaken: str, refusal: str) -> None:
        copy = getattr(protocol_weak, weaken)(OURS)
        row = attempts_row(plan, OURS, copy, partial(both_secrets, trials=5, plan=plan))
        held(row)
        (reason,) = row.detail["refusals"]
        assert refusal in reason

    @pytest.mark.parametrize("count", [4, 7, 10])
    def test_lies_to_halves_take_a_third_of_the_silos(self, count: int) -> None:
        ours, most = replace(OURS, count=count), (count - 1) // 3
        for colluders, hits in ((most, 0), (most + 1, 3)):
            subject = protocol_weak.in_league(ours, colluders)
            attempts, bounds = both_secrets(subject, 3, "each half told another set")
            assert tally(attempts, bounds).hits == hits

    def test_stores_restored_from_a_backup_are_a_limit(self) -> None:
        play = partial(both_secrets, trials=5, plan="around a backup of all")
        held(attempts_row("backup", OURS, protocol_weak.forgetful(OURS), play), LEAKS)

    def test_larger_rosters_and_narrower_rings(self) -> None:
        ours = replace(OURS, count=7, config=Masked(bits=32, max_missing=4))
        weak = protocol_weak.forgetful(ours)
        # Resolution of 32 bits is some 1e-8 of the bound, more than what is asked of 64.
        for subject, hits in ((ours, 0), (weak, 5)):
            attempts, bounds = both_secrets(subject, 5, "in two requests")
            near = [a for a in attempts if a.read is not None and (np.abs(a.read - a.truth) < 1e-7 * bounds).all()]
            assert len(near) == hits

    def test_too_few_or_too_many_silos(self) -> None:
        for count in (3, 33):
            with pytest.raises(InputError, match="4 to 32 silos"):
                MaskedSubject(count=count)
        with pytest.raises(InputError, match="leave nobody"):
            MaskedSubject(colluders=4)


class TestReplay:
    @pytest.mark.parametrize("between", ["nothing", "a later sum", "restart"])
    def test_a_second_answer_is_refused(self, between: Any) -> None:
        play = partial(asked_twice, trials=4, between=between, same_broadcast=True)
        row = attempts_row("twice", OURS, protocol_weak.forgetful(OURS), play)
        held(row)
        assert "used already" in next(iter(row.detail["refusals"]))

    def test_around_a_backup_another_broadcast_gives_noise_and_the_same_one_the_difference(self) -> None:
        for same, weak, finding in (
            (False, protocol_weak.forgetful_and_blind(OURS), NOTHING),
            (True, protocol_weak.forgetful(OURS), LEAKS),
        ):
            play = partial(asked_twice, trials=4, between="backup of the silo", same_broadcast=same)
            held(attempts_row("twice", OURS, weak, play), finding)

    def test_two_broadcasts_give_no_total(self) -> None:
        held(attempts_row("two", OURS, protocol_weak.blind(OURS), partial(two_broadcasts, trials=4)))


class TestKeys:
    @pytest.mark.parametrize("how", ["forged", "borrowed", "old session", "old set-up"])
    def test_keys_without_the_right_signature(self, how: Any) -> None:
        play = partial(keys_of_its_own, trials=4, how=how)
        row = attempts_row(how, BeforeSetUp(OURS), BeforeSetUp(protocol_weak.credulous(OURS)), play)
        held(row)
        assert "not signed with its identity" in next(iter(row.detail["refusals"]))

    def test_another_roster_at_a_restart(self) -> None:
        weak = BeforeSetUp(protocol_weak.without_durable_state(OURS))
        row = attempts_row("roster", BeforeSetUp(OURS), weak, partial(keys_of_its_own, trials=4, how="other roster"))
        held(row)
        assert "another session" in next(iter(row.detail["refusals"]))


class TestRandomness:
    @pytest.mark.parametrize(
        ("again", "weaken"),
        [
            ("sessions seeded alike", "global_generator"),
            ("forks of one process", "global_generator"),
            ("a backup restored", "counted"),
        ],
    )
    def test_masks_do_not_repeat(self, again: Any, weaken: str) -> None:
        held(repeats_row(OURS, getattr(protocol_weak, weaken)(OURS), again, 3))

    def test_the_callers_generators_are_left_as_they_were(self) -> None:
        np.random.seed(3)
        expected = np.random.RandomState(3).bytes(8)
        repeats_row(OURS, protocol_weak.global_generator(OURS), "sessions seeded alike", 1)
        assert np.random.bytes(8) == expected

    def test_many_masks_of_one_session(self) -> None:
        # 512 masks of 12 bits: about 30 repeats are expected, none with chance e^-32.
        row = collisions_row(OURS, protocol_weak.few_bits(OURS, CipherKeys(12)), 512)
        assert row.valid
        assert row.value == 0
        assert row.positive_control > 0.02
        assert row.detail["bits_excluded"] == pytest.approx(15.4, abs=0.1)

    @pytest.mark.parametrize("seeds", [CipherKeys(12), Mersenne(16)])
    def test_seeds_of_few_bits_are_found(self, seeds: Any) -> None:
        held(search_row(OURS, protocol_weak.few_bits(OURS, seeds), seeds, 6))

    @pytest.mark.slow
    def test_seeds_of_24_bits_are_found(self) -> None:
        seeds = Mersenne(24)
        held(search_row(OURS, protocol_weak.few_bits(OURS, seeds), seeds, 20))

    def test_first_words_are_those_of_the_streams(self) -> None:
        chosen = np.array([0, 1, 77, 2**24 - 1, 2**32 - 1], np.uint64)
        for seeds in (CipherKeys(32), Mersenne(32)):
            assert seeds.first(chosen).tolist() == [int(seeds.stream(int(s), 3)[0]) for s in chosen]

    def test_a_seed_outside_the_space_is_not_found(self) -> None:
        seeds, session = Mersenne(10), OURS.open()
        values = random_values(np.random.default_rng(0), session.table)
        words = session.ring.encode(values)
        inside, outside = (words + seeds.stream(s, words.size) for s in (2**10 - 1, 2**10))
        found = search(seeds, [inside, outside], session.decode, session.table.bounds)
        assert found[0] is not None
        np.testing.assert_allclose(found[0], values, atol=1e-9)
        assert found[1] is None


class TestUniformity:
    def test_views_of_ours_and_of_the_copies(self) -> None:
        ours, seen = replace(OURS, table=LONG), dict[str, Any]()
        for kind, weaken in (
            (ALONE, protocol_weak.unmasked),
            (NEIGHBOURS, protocol_weak.scalar),
            (ROUNDS, protocol_weak.reused),
            (SILOS, protocol_weak.same_for_all),
        ):
            row = uniformity_row(kind, ours, weaken(ours), 6, seen)
            held(row)
            assert row.detail["false_alarm"] == pytest.approx(row.detail["attempts"] * FALSE_ALARM)

    def test_a_generator_of_few_seeds_passes_which_is_what_the_search_is_for(self) -> None:
        ours = replace(OURS, table=LONG)
        weak = protocol_weak.few_bits(ours, Mersenne(16))
        for kind in (ALONE, NEIGHBOURS, ROUNDS, SILOS):
            assert uniformity_row(kind, weak, protocol_weak.unmasked(ours), 2, {}).value == 0

    def test_only_its_own_kind_of_view_shows_a_reused_mask(self) -> None:
        ours = replace(OURS, table=LONG)
        weak = protocol_weak.reused(ours)
        assert uniformity_row(ALONE, weak, protocol_weak.unmasked(ours), 3, {}).value == 0
        assert uniformity_row(ROUNDS, weak, protocol_weak.unmasked(ours), 3, {}).value == 1

    @pytest.mark.parametrize("modulus", [2**32, 2**64, BFV_PRIME])
    def test_p_values_are_uniform(self, modulus: int) -> None:
        # 300 views; Kolmogorov-Smirnov at a false alarm of 1e-4 for each of 4 tests (the fifth is discrete).
        rng = np.random.default_rng(modulus % 2**32)
        found = [p_values(rng.integers(0, modulus, 2048, np.uint64), modulus) for _ in range(300)]
        for test in ("bits", "bytes", "distribution", "serial correlation"):
            assert kstest([f[test] for f in found], "uniform").pvalue > 1e-4
        assert min(f["repeated words"] for f in found) > 1e-6

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda w: np.where(np.arange(w.size) % 50 == 0, 0, w),  # one word in fifty is plain
            lambda w: w & np.uint64(2**64 - 2**8),  # a byte that masks do not reach
            lambda w: w >> np.uint64(1),  # a generator of 63 bits
            lambda w: np.repeat(w[: w.size // 2], 2),  # each mask word used twice
            lambda w: np.concatenate([w[: w.size // 2]] * 2),
        ],
    )
    def test_small_flaws_show(self, spoil: Any) -> None:
        words = np.random.default_rng(1).integers(0, 2**64, 4096, np.uint64)
        assert p_value(words, 2**64) > FALSE_ALARM
        assert p_value(spoil(words), 2**64) < FALSE_ALARM

    @pytest.mark.parametrize("modulus", [2**32, 2**64, BFV_PRIME])
    def test_differences_stay_in_the_ring(self, modulus: int) -> None:
        a, b = np.array([0, 5, modulus - 1], np.uint64), np.array([1, 5, 0], np.uint64)
        assert difference(a, b, modulus).tolist() == [modulus - 1, 0, modulus - 1]

    def test_too_few_words(self) -> None:
        with pytest.raises(InputError, match="too few"):
            p_values(np.zeros(100, np.uint64), 2**64)


class TestKeyHolder:
    MASKS_OFF = HomomorphicSubject("homomorphic, no masks", Homomorphic(masks=False))

    @pytest.mark.parametrize("asked", ["no signatures", "too few signatures", "all signatures", "after its sum"])
    def test_one_ciphertext(self, asked: Any) -> None:
        weak = replace(self.MASKS_OFF, name="weak", holder=protocol_weak.ObligingHolder)
        play = partial(decrypted_alone, trials=2, asked=asked)
        held(attempts_row(asked, HomomorphicSubject(), weak, play))
        if asked in ("all signatures", "after its sum"):  # where masks alone might have hidden it
            held(attempts_row(asked, self.MASKS_OFF, weak, play), LEAKS if asked == "all signatures" else NOTHING)

    def test_nobody_else_has_the_key(self) -> None:
        ours = HomomorphicSubject()
        row = attempts_row("key", ours, replace(ours, shared_key=True), partial(opened_by_others, sums=1))
        assert row.valid
        assert row.value == 0
        assert row.positive_control == 0.8  # four silos of five parties

    def test_what_the_key_holder_would_see_is_uniform(self) -> None:
        ours, bare = (replace(s, table=LONG) for s in (HomomorphicSubject(), self.MASKS_OFF))
        held(uniformity_row(ALONE, ours, bare, 1, {}))

    def test_ckks_is_refused(self) -> None:
        with pytest.raises(InputError, match="are for scheme = 'bfv'"):
            HomomorphicSubject(config=Homomorphic(scheme="ckks"))


class TestWeakCopies:
    @pytest.mark.parametrize(
        "weaken",
        ["forgetful", "blind", "forgetful_and_blind", "talkative", "credulous", "small_cohorts",
         "without_durable_state"],
    )  # fmt: skip
    def test_copies_weak_in_rules_still_add_up(self, weaken: str) -> None:
        session = getattr(protocol_weak, weaken)(OURS).open()
        rng = np.random.default_rng(2)
        values = {silo: random_values(rng, session.table) for silo in session.silos}
        messages = {s: session.contribute(s, 0, v, context_of(0)) for s, v in values.items()}
        total = session.total(0, messages, context_of(0))
        np.testing.assert_allclose(total, np.sum(list(values.values()), axis=0), atol=1e-9)

    def test_nothing_but_audits_imports_them(self) -> None:
        root = Path(secure_fvi.__file__).parent
        for folder in (root, *(root / name for name in ("aggregation", "privacy", "models"))):
            for path in folder.rglob("*.py"):
                if "audits" not in path.relative_to(root).parts:
                    assert "protocol_weak" not in path.read_text(encoding="utf-8"), path


class Scalar:
    """A foreign implementation, with nothing of ours in it: masks of one number a tensor, from 16 bits."""

    name = "foreign"

    def open(self) -> ScalarSession:
        return ScalarSession()


class ScalarSession:
    silos, table, modulus = ("a", "b", "c"), LONG, 2**64

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def prepare(self, index: int) -> None:
        pass

    def contribute(self, silo: str, index: int, values: Any, context: bytes) -> bytes:
        words = np.rint(values * 2.0**30).astype(np.int64).view(np.uint64)
        return bytes((words + self._rng.integers(0, 2**64, dtype=np.uint64)).astype("<u8").tobytes())

    def words(self, message: bytes) -> Any:
        return np.frombuffer(message, "<u8").astype(np.uint64)

    def decode(self, words: Any) -> Any:
        return words.view(np.int64) * 2.0**-30

    def total(self, index: int, messages: Mapping[str, bytes], context: bytes) -> Any:
        raise ProtocolError("masks do not cancel")

    def restart(self, silo: str) -> None:
        pass

    def backup(self) -> Any:
        return None

    def restore(self, backup: Any, silos: Any) -> None:
        pass


class Remote:
    """A silo of which the auditor has the bytes alone, as behind an engine."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        silo = MaskedSilo(*arguments, **options)
        self.handle, self.contribute = silo.handle, silo.contribute


class TestForeign:
    def test_silos_behind_an_engine(self) -> None:
        ours = replace(OURS, silo=Remote)
        play = partial(both_secrets, trials=4, plan="survivors below min_cohort")
        weak = protocol_weak.small_cohorts(ours)
        held(attempts_row("min_cohort", ours, weak, play))

    def test_a_wrapped_implementation_is_audited_by_the_same_probe(self) -> None:
        ours = replace(OURS, table=LONG)
        row = uniformity_row(NEIGHBOURS, Scalar(), protocol_weak.scalar(ours), 3, {})
        assert row.valid
        assert row.finding == LEAKS
        again = partial(asked_twice, trials=4, between="nothing", same_broadcast=True)
        row = attempts_row("twice", Scalar(), protocol_weak.forgetful(ours), again)
        assert row.valid
        assert row.finding == NOTHING  # another mask each time, as bad as it is


def test_a_missed_control_makes_a_row_invalid() -> None:
    play = partial(both_secrets, trials=4, plan="in two requests")
    row = attempts_row("both", OURS, replace(OURS, name="as strong as ours"), play)
    assert not row.valid
    assert row.finding == "invalid"


def test_what_was_never_put_in_counts_against_the_probe() -> None:
    one, other, bounds = np.ones(3), np.zeros(3), np.ones(3)
    counted = tally([Attempt(one, one, other), Attempt(other, one, other), Attempt(None, one, other)], bounds)
    assert counted[:3] == (1, 1, 3)


class TestRows:
    def test_unknown_kinds_and_no_trials(self) -> None:
        with pytest.raises(InputError, match="no kind of sum 'quantum'"):
            protocol.protocol_rows(lambda what: None, ["quantum"])
        with pytest.raises(InputError, match="at least one trial"):
            protocol.protocol_rows(lambda what: None, ["masked"], trials=0)
        assert protocol.protocol_rows(lambda what: None, ["plain"]) == []

    @pytest.mark.slow
    def test_all_rows_within_their_time(self, capsys: pytest.CaptureFixture[str]) -> None:
        from secure_fvi.audits.report import table

        began, heard = time.process_time(), list[str]()
        rows = protocol.protocol_rows(heard.append, ["masked", "homomorphic"])
        seconds = time.process_time() - began
        with capsys.disabled():
            print()
            print(table(rows))
            for row in rows:
                if "search_seconds" in row.detail:
                    print(f"{row.attack}: all tried in {row.detail['search_seconds']:.2f} s")
            print(f"{len(rows)} rows, {seconds:.0f} s of CPU time")
        assert len(heard) == len(rows) == protocol.work(["masked", "homomorphic"])
        assert all(row.valid for row in rows)
        assert {r.attack for r in rows if r.finding == LEAKS} == {
            "asked twice, by one broadcast, around a backup",
            "both secrets, around a backup of all",
            "one ciphertext to the key holder, all signatures",
        }
        assert all("note" in r.detail for r in rows if r.finding == LEAKS)
