"""Mutated messages of every kind to every decoder and party: answers or refusals, in time; a refusal changes nothing.

Seconds here, in every commit, and a minute more in the second tier; an hour by `make fuzz SECONDS=3600`, or as long as
FUZZ_SECONDS says.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from pathlib import Path

import fuzzing
import pytest
from deployment_world import World, new_world
from fuzzing import Machine, Outcome

from secure_fvi.aggregation.messages import Codec
from secure_fvi.aggregation.ring import Ring
from secure_fvi.aggregation.roster import Roster
from secure_fvi.errors import ProtocolError

DATA = Path(os.environ["SECURE_FVI_DATA"]) if os.environ.get("SECURE_FVI_DATA") else None


def clean(outcome: Outcome, least: int) -> None:
    assert not outcome.faults, outcome
    assert outcome.counts["refused"] >= least


def test_decoders() -> None:
    clean(fuzzing.fuzz_decoders(2.0, 1), 100)


def test_parties_of_secure_sums() -> None:
    clean(fuzzing.fuzz_machines(3.0, 1), 30)


@pytest.mark.parametrize("seed", [1, 2])
def test_sites(world: World, tmp_path: Path, seed: int) -> None:
    clean(fuzzing.fuzz_sites(world, tmp_path, DATA, 1.0, seed), 10)


def test_every_example_is_a_valid_one_and_of_each_kind_there_is_one() -> None:
    """Mutations of what is refused anyway would find nothing, and of what is not said where sums are whole, no more."""
    found = fuzzing.decoders()
    for name, (read, pool) in found.items():
        for example in pool:
            read(example)
        assert pool, name
    codecs = {name: pool for name, (read, pool) in found.items() if hasattr(getattr(read, "__self__", None), "kind_of")}
    assert len(codecs) == 9
    for name, pool in codecs.items():
        codec: Codec = found[name][0].__self__  # type: ignore[attr-defined]
        assert {codec.kind_of(example) for example in pool} == set(codec._schemas), name


def test_the_fuzzer_finds_faults() -> None:
    """The control: parties that stumble over a byte, or forget before they refuse."""
    seen: list[bytes] = []

    def stumbles(message: bytes) -> None:
        if b"\x90" in message:
            raise IndexError

    def forgets(message: bytes) -> None:
        seen.append(message)
        raise ProtocolError("no")

    outcome = Outcome(Counter(), {})
    machines = [Machine("one", stumbles, lambda: None), Machine("other", forgets, lambda: len(seen))]
    for machine in machines:
        fuzzing.fuzz_machine(machine, fuzzing.sum_messages(), 100, random.Random(1), outcome)
    assert {f.split(":")[0] for f in outcome.faults} == {"one", "other"}


def test_the_fuzzer_finds_wrong_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a server that asks for no signature on a contribution, and takes any total as possible."""
    verify = Roster.verify

    def credulous(self: Roster, place: int, signature: bytes, statement: bytes) -> bool:
        return sys._getframe(1).f_code.co_name == "admit" or verify(self, place, signature, statement)

    def shifted(message: bytes, rng: random.Random) -> bytes:
        """A bit of a contribution's ring elements, which stand before its signature."""
        return message if message[2] != 11 else message[:-76] + bytes([message[-76] ^ 1]) + message[-75:]

    monkeypatch.setattr(Roster, "verify", credulous)
    monkeypatch.setattr(fuzzing, "mutated", shifted)
    monkeypatch.setattr(Ring, "_check_range", lambda *arguments: None)
    rng, outcome, corpus = random.Random(1), Outcome(Counter(), {}), fuzzing.sum_messages()
    for _ in range(60):
        fuzzing.server_run(rng, corpus, outcome)
    assert set(outcome.faults) == {"masked server: a wrong total"}


@pytest.mark.slow
def test_for_as_long_as_one_likes(world: World, tmp_path: Path) -> None:
    def sites(seconds: float, seed: int) -> Outcome:
        return fuzzing.fuzz_sites(world, tmp_path, DATA, seconds, seed)

    def more_sites(seconds: float, seed: int) -> Outcome:
        (tmp_path / "more").mkdir()
        return fuzzing.fuzz_sites(new_world(tmp_path / "others"), tmp_path / "more", DATA, seconds, seed + 1)

    seconds, seed = float(os.environ.get("FUZZ_SECONDS", "60")), int(os.environ.get("FUZZ_SEED", "2"))
    found = []
    for share, fuzz in ((0.4, fuzzing.fuzz_decoders), (0.4, fuzzing.fuzz_machines), (0.1, sites), (0.1, more_sites)):
        found.append(fuzz(share * seconds, seed))
        print(fuzz.__name__, dict(found[-1].counts), found[-1].faults, flush=True)
    for outcome in found:
        clean(outcome, 100)
