"""What the server receives is uniform whatever the silos put in: chi-square over bytes, whose false alarm is 1e-9 a
look, of which there are some hundred."""

import itertools
import random

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from sum_network import CONTEXT, carry

from secure_fvi.aggregation import Block, BlockTable, Masked, masked_silo
from secure_fvi.aggregation.masked_silo import MaskedSilo, SiloBatch
from secure_fvi.aggregation.messages import Contribution, Deposit, Shares, unpack, unpack_any
from secure_fvi.aggregation.parties import local_parties
from secure_fvi.aggregation.prg import Mask

FALSE_ALARM = 1e-9
TABLE = BlockTable((Block("g", (20_000,), 1.0),))


def p_value(data, width=1):
    """Upper tail of the chi-square of equal byte frequencies, one table for each byte position of a word."""
    rows = np.frombuffer(data, np.uint8).reshape(-1, width)
    statistic = 0.0
    for column in rows.T:
        counts = np.bincount(column, minlength=256)
        expected = len(column) / 256
        statistic += float(((counts - expected) ** 2 / expected).sum())
    return float(chi2.sf(statistic, 255 * width))


class View:
    """Everything the server receives in some sums of constant inputs, by what it is."""

    def __init__(self, count=4, bits=32, inputs=None, totals=True, most=0):
        inputs = inputs if inputs is not None else np.zeros(TABLE.size)
        ids = [f"s{i}" for i in range(count)]
        server, silos = local_parties(Masked(bits=bits, max_missing=most), ids)
        self.bits = bits
        self.payloads, self.shares, self.sealed, self.envelopes = [], [], [], []

        class Watched:
            def __init__(self, silo, view):
                self._silo, self._view = silo, view

            def handle(self, data):
                reply = self._silo.handle(data)
                message = unpack_any(reply)
                if isinstance(message, Deposit):
                    self._view.sealed.append(message.sealed_seeds + message.commitments)
                    self._view.envelopes += message.envelopes
                if isinstance(message, Shares):
                    self._view.shares += message.shares
                return reply

        watched = {s: Watched(p, self) for s, p in silos.items()}
        carry(server.prepare(0), watched)
        for index in range(2):
            messages = {s: silos[s].contribute(index, ids, TABLE, inputs, CONTEXT) for s in ids}
            self.payloads.append({s: unpack(m, Contribution).payload for s, m in messages.items()})
            if totals:
                carry(server.total(index, ids, TABLE, messages, CONTEXT), watched)


@pytest.mark.parametrize("most", [0, 1])
@pytest.mark.parametrize(("bits", "level"), [(32, 0.0), (64, 1.0), (32, -0.5)])
def test_each_contribution_is_uniform_in_every_byte_position(bits, level, most):
    view = View(bits=bits, inputs=np.full(TABLE.size, level), most=most)
    for row in view.payloads:
        for payload in row.values():
            assert p_value(payload, bits // 8) > FALSE_ALARM


@pytest.mark.parametrize("most", [0, 1])
def test_control_without_masks_constants_show(monkeypatch, most):
    monkeypatch.setattr(*((SiloBatch, "masks") if most else (MaskedSilo, "_whole_masks")), lambda *arguments: [])
    for payload in View(totals=False, most=most).payloads[0].values():
        assert p_value(payload, 4) < FALSE_ALARM


@pytest.mark.parametrize("most", [0, 1])
def test_masks_do_not_follow_from_generators_that_a_program_seeds(monkeypatch, most):
    """Of two sessions that were seeded alike. The control: masks from NumPy's own."""

    def seeded():
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        return View(totals=False, most=most).payloads[0]

    def same():
        first, second = seeded(), seeded()
        return [first[silo] == second[silo] for silo in first]

    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        assert not any(same())
        where = (SiloBatch, "masks") if most else (MaskedSilo, "_whole_masks")
        monkeypatch.setattr(*where, lambda *arguments: [Mask(np.random.bytes(32), False)])
        assert all(same())
    finally:
        random.setstate(before[0]), np.random.set_state(before[1]), torch.set_rng_state(before[2])


def test_control_one_unmasked_byte_in_a_hundred_shows():
    payload = bytearray(next(iter(View().payloads[0].values())))
    payload[::100] = bytes(len(payload[::100]))
    assert p_value(bytes(payload)) < FALSE_ALARM


@pytest.mark.parametrize("most", [0, 1])
def test_sums_and_differences_of_contributions_are_uniform(most):
    """No strict subset of one sum's contributions, and no pair of sums, cancels masks; where sums recover, not all of
    them either, which of a whole sum are the total."""
    view = View(most=most)
    first, second = ({s: np.frombuffer(p, "<u4") for s, p in row.items()} for row in view.payloads)
    for size in (2, 3, 4) if most else (2, 3):
        for chosen in itertools.combinations(first, size):
            assert p_value(sum(first[s] for s in chosen).tobytes(), 4) > FALSE_ALARM
    assert most or not sum(first.values()).any()
    for silo in first:
        assert p_value((first[silo] - second[silo]).tobytes(), 4) > FALSE_ALARM


@pytest.mark.parametrize("most", [0, 1])
def test_control_a_mask_used_in_two_sums_shows_in_their_difference(monkeypatch, most):
    if most:
        masks = SiloBatch.masks
        monkeypatch.setattr(SiloBatch, "masks", lambda self, index, *rest: masks(self, 0, *rest))
    else:
        key = masked_silo.whole_key
        monkeypatch.setattr(
            masked_silo, "whole_key", lambda s, p, u, v, asked, past: key(s, p, u, v, asked._replace(sum_index=0), past)
        )
    first, second = View(totals=False, most=most).payloads
    for silo, payload in first.items():
        difference = np.frombuffer(payload, "<u4") - np.frombuffer(second[silo], "<u4")
        assert p_value(difference.tobytes(), 4) < FALSE_ALARM


def test_shares_seals_and_envelopes_are_uniform():
    view = View(count=6, most=1)
    assert p_value(b"".join(view.shares)) > FALSE_ALARM
    assert p_value(b"".join(view.sealed)) > FALSE_ALARM
    assert p_value(b"".join(view.envelopes)) > FALSE_ALARM
    # 2 sums, 6 holders, 6 owners; none twice.
    assert len(set(view.shares)) == len(view.shares) == 72


def test_the_test_itself_keeps_its_false_alarm_rate():
    """500 truly uniform inputs: p-values are uniform (Kolmogorov-Smirnov, false alarm 1e-6)."""
    rng = np.random.default_rng(0)
    values = np.sort([p_value(rng.bytes(40_000), 4) for _ in range(500)])
    steps = np.arange(1, 501) / 500
    distance = max(np.abs(steps - values).max(), np.abs(steps - 1 / 500 - values).max())
    assert distance < 2.69 / np.sqrt(500)  # sqrt(-ln(1e-6 / 2) / 2) = 2.69
