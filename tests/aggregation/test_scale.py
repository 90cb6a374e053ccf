"""Sums at the sizes that issue 3 names. Slow; each prints how long its parts took, and asserts exactness only."""

import time

import numpy as np
import pytest
from sum_network import CONTEXT, carry, contribute, names

from secure_fvi.aggregation import Block, BlockTable, Masked
from secure_fvi.aggregation.parties import local_parties
from secure_fvi.aggregation.roster import Roster


class Clock:
    """Processor time, and how much of it went into checking signatures."""

    def __init__(self, monkeypatch):
        self.checking = 0.0
        self.marks = []
        verify = Roster.verify

        def timed(roster, *arguments):
            start = time.process_time()
            try:
                return verify(roster, *arguments)
            finally:
                self.checking += time.process_time() - start

        monkeypatch.setattr(Roster, "verify", timed)
        self.mark()

    def mark(self):
        """The end of one part, the start of the next."""
        self.marks.append((time.process_time(), self.checking))

    def parts(self):
        """For each part: seconds without signature checks, seconds of signature checks."""
        steps = np.diff(np.array(self.marks), axis=0)
        return [f"{total - checks:.1f} s + {checks:.1f} s of signature checks" for total, checks in steps]


class Lost(frozenset):
    """Silos that do not answer. met: whether one of them was asked."""

    met = False

    def __contains__(self, silo):
        found = super().__contains__(silo)
        self.met = self.met or found
        return found


def run(monkeypatch, count, size, stage):
    """One sum with 10% lost at `stage`; the survivors' total must be exact to the ring's resolution."""
    ids = names(count)
    away = Lost(ids[::10])
    server, silos = local_parties(Masked(bits=32, batch=2, max_missing=len(away)), ids)
    table = BlockTable((Block("g", (size,), 1.0), Block("n", (1,), 1000.0, integer=True)))
    rng = np.random.default_rng(0)
    values = {s: np.append(rng.uniform(-1, 1, size), float(rng.integers(1000))) for s in ids}
    present = {s: v for s, v in values.items() if stage != "contribute" or s not in away}
    clock = Clock(monkeypatch)
    carry(server.prepare(0), silos)
    clock.mark()
    messages = contribute(silos, 0, table, present)
    lost = {"sign": [away, away], "reveal": [(), away]}.get(stage, [])
    total = carry(server.total(0, ids, table, messages, CONTEXT), silos, lost)
    assert away.met or stage == "nowhere"
    clock.mark()
    prepared, summed = clock.parts()
    print(f"\n{server.neighbourhood}")
    print(
        f"{count} silos, {size} values, 10% lost at {stage}; processor time of all parties: "
        f"set-up and one refill {prepared}; one sum {summed}"
    )
    assert total.survivors == tuple(sorted(present))
    exact = sum(present.values())
    # Each term is rounded to a step of 2^-24 (100 silos) or 2^-21 (1,000) at most: half a step a term.
    assert np.abs(total.values - exact)[:-1].max() <= count * 2.0**-21 / 2
    assert total.values[-1] == exact[-1]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["nowhere", "contribute", "sign", "reveal"])
def test_a_hundred_silos_lose_a_tenth(monkeypatch, stage):
    run(monkeypatch, 100, 100_000, stage)


@pytest.mark.slow
def test_a_thousand_silos_on_the_regular_graph(monkeypatch):
    run(monkeypatch, 1000, 10_000, "contribute")
