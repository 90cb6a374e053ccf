"""The gate under privacy: one record moves a release by at most the clipping norm, and nothing goes around it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.random import PCG64
from programs import make_slopes
from torch import Tensor

import secure_fvi as sf
from secure_fvi.aggregation.base import Block
from secure_fvi.aggregation.ring import Ring
from secure_fvi.errors import AggregationError, BudgetError, InputError, ProtocolError, RecordError
from secure_fvi.fitting import build_parties
from secure_fvi.privacy.events import PoissonSampled, Skellam
from secure_fvi.privacy.gate import SYSTEM_SOURCE, Gate, NoiseSource, RecordRelease, curated
from secure_fvi.privacy.settings import DP, RecordDP, SiloDP
from secure_fvi.privacy.terms import Extent, Terms, agree

SHARED, HIDDEN = 4, 2
TEST_KEY = NoiseSource(b"test")


def record_terms(noise: str = "distributed", side: int = 0, clip: float = 2.0, multiplier: float = 1.0) -> Terms:
    share = 0.2 if side else 0.0
    asked = RecordDP(noise_multiplier=multiplier, clipping_norm=clip, noise=noise, objective_share=share)  # type: ignore[arg-type]
    return agree(asked, 3, 0.5, 10, Extent(SHARED, HIDDEN, side))


def make_gate(terms: Terms, noise: NoiseSource = TEST_KEY, paid: list[int] | None = None) -> Gate:
    shared = Block("direct", (terms.extent.shared,), 1.0)
    charge = (paid if paid is not None else []).append
    return Gate("here", {"round": terms.table([shared], [])}, {"round": terms}, lambda _, index: charge(index), noise)


def releases(gate: Gate, rows: Tensor, objective: Tensor | None = None, index: int = 1) -> RecordRelease:
    values = torch.zeros(len(rows)) if objective is None else objective
    gate.begin(index, "round", gate.terms.cohort)  # type: ignore[union-attr]
    return gate.release_records([(rows, values)], None, [])


def joint(gate: Gate, out: RecordRelease) -> np.ndarray:
    """Everything noised, shared and hidden, in natural units."""
    terms, clip = gate.terms, gate.terms.settings.clipping_norm  # type: ignore[union-attr]
    return np.concatenate([out.release.values * terms.step(clip), out.hidden.numpy()])  # type: ignore[union-attr]


anything = st.floats(allow_nan=True, allow_infinity=True, width=64)


@settings(max_examples=60, deadline=None)
@given(arrays(np.float64, (5, SHARED + HIDDEN), elements=anything), st.sampled_from(["distributed", "silo", "server"]))
def test_one_record_moves_the_release_by_at_most_the_clipping_norm(rows: np.ndarray, noise: str) -> None:
    """Same noise with and without the first record, whatever it holds: shared and hidden parts together."""
    terms = record_terms(noise)
    gate = make_gate(terms)
    data = torch.from_numpy(rows)
    with_it, without = joint(gate, releases(gate, data)), joint(gate, releases(gate, data[1:], index=1))
    rounding = (terms.step(2.0) if terms.resolution else 2.0**-20 * 2.0) * np.sqrt(terms.dimension)
    assert np.isfinite(with_it).all()
    assert np.linalg.norm(with_it - without) <= 2.0 + rounding


def test_the_event_allows_for_rounding() -> None:
    terms = record_terms()
    event = terms.event
    assert isinstance(event, PoissonSampled)
    assert isinstance(event.event, Skellam)
    assert event.event.l2 == terms.resolution + np.sqrt(terms.dimension)
    assert event.event.variance == (terms.noise_multiplier * terms.resolution) ** 2


def test_gradient_and_objective_share_one_clipping_norm() -> None:
    terms = record_terms("silo", side=1, clip=3.0)
    gate = make_gate(terms)
    loud = torch.full((1, SHARED + HIDDEN), 1e6)
    empty = joint(gate, releases(gate, loud[:0]))
    moved = joint(gate, releases(gate, loud, torch.tensor([-1e9]))) - empty
    assert np.linalg.norm(moved) == pytest.approx(3.0, abs=1e-5)
    side = moved[SHARED]
    assert side == pytest.approx(-3.0 * np.sqrt(0.2), abs=1e-5)
    assert terms.in_clear(np.append(np.zeros(SHARED), side), 3.0)[-1] == pytest.approx(-10.0, abs=1e-4)


def test_records_that_are_not_finite_count_as_zero_and_are_counted_here_only() -> None:
    gate = make_gate(record_terms("silo"))
    rows = torch.randn(4, SHARED + HIDDEN, dtype=torch.float64)
    clean = joint(gate, releases(gate, rows))
    spoiled = torch.cat([rows, torch.full((1, SHARED + HIDDEN), float("nan"))])
    spoiled = torch.cat([spoiled, torch.tensor([[0.0, float("inf"), 0.0, 0.0, 0.0, 0.0]])])
    assert np.array_equal(joint(gate, releases(gate, spoiled)), clean)
    assert gate.dropped == 2


def test_chunks_add_up_to_one_release_with_one_draw_of_noise() -> None:
    gate = make_gate(record_terms("silo"))
    rows = torch.randn(6, SHARED + HIDDEN, dtype=torch.float64)
    whole = joint(gate, releases(gate, rows))
    gate.begin(1, "round", 3)
    pieces = [(part, torch.zeros(len(part))) for part in rows.split(2)]
    assert np.allclose(joint(gate, gate.release_records(pieces, None, [])), whole, atol=1e-12)


def test_nothing_goes_around_the_gate() -> None:
    terms = record_terms()
    paid: list[int] = []
    gate = make_gate(terms, paid=paid)
    rows = torch.zeros(1, SHARED + HIDDEN)
    gate.begin(5, "round", 3)
    with pytest.raises(AggregationError, match="a record at a time"):
        gate.release(np.zeros(SHARED))
    with pytest.raises(ProtocolError, match="releases once"):  # the refused attempt used the index up
        gate.release_records([(rows, torch.zeros(1))], None, [])
    with pytest.raises(ProtocolError, match="planned for 3"):
        gate.begin(6, "round", 2)
    gate.begin(7, "round", 3)
    with pytest.raises(AggregationError, match="5 gradients for 6"):
        gate.release_records([(rows[:, :-1], torch.zeros(1))], None, [])
    assert paid == []
    releases(gate, rows, index=8)
    assert paid == [8]
    with pytest.raises(AggregationError, match="needs its ledger"):
        Gate("here", {"round": gate.table}, {"round": terms})


@pytest.mark.parametrize(
    ("error", "raised"), [(BudgetError("spent"), BudgetError), (InputError("the ledger was moved"), RecordError)]
)
def test_nothing_is_released_where_nothing_is_left_or_charged(error: Exception, raised: type[Exception]) -> None:
    """A ledger that cannot be used is not taken for a fault of the data, of which a silo under privacy says nothing."""

    def broke(phase: str, index: int) -> None:
        raise error

    gate = make_gate(record_terms())
    gate._charge = broke
    with pytest.raises(raised, match=str(error)):
        releases(gate, torch.zeros(1, SHARED + HIDDEN))
    assert gate.paid == 0


def test_noise_is_new_in_every_release_and_ignores_torch_seeds() -> None:
    gate = make_gate(record_terms(), NoiseSource())
    rows = torch.zeros(0, SHARED + HIDDEN)
    torch.manual_seed(0)
    first = joint(gate, releases(gate, rows))
    torch.manual_seed(0)
    assert not np.array_equal(first, joint(gate, releases(gate, rows)))
    assert NoiseSource().status == SYSTEM_SOURCE
    assert "TEST KEY" in repr(TEST_KEY)


def _spread(terms: Terms, asked: DP, silos: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise of one sum over `silos` with no records: shared part summed, hidden part of one of them."""
    total, hidden = np.zeros(terms.extent.shared), np.zeros(0)
    for j in range(silos):
        table = terms.table([Block("direct", (size,), 1.0)], [])
        gate = Gate(f"s{j}", {"round": table}, {"round": terms}, lambda *_: None, TEST_KEY)
        out = releases(gate, torch.zeros(0, terms.extent.shared + terms.extent.hidden))
        total += out.release.values * terms.step(asked.clipping_norm)
        hidden = out.hidden.numpy()
    return total, hidden


@pytest.mark.later
@pytest.mark.parametrize(("dropouts", "colluders"), [(0, 0), (2, 1)])
def test_variance_of_the_summed_noise(dropouts: int, colluders: int) -> None:
    """1e6 draws: the variance of J / honest times the design within 1%, seven standard errors (1e-12 false alarms).

    Exactly as many silos as are counted on add up to the design.
    """
    size = 1_000_000
    asked = RecordDP(noise_multiplier=1.5, clipping_norm=0.7, dropouts=dropouts, colluders=colluders)
    terms = agree(asked, 6, 0.1, 10, Extent(size, 0, 0))
    total, _ = _spread(terms, asked, terms.honest, size)
    assert total.var() == pytest.approx((1.5 * 0.7) ** 2, rel=0.01)
    assert abs(total.mean()) < 5 * 1.5 * 0.7 / 1000


@pytest.mark.parametrize("noise", ["distributed", "silo", "server"])
def test_hidden_coordinates_get_all_of_the_noise_at_the_silo(noise: str) -> None:
    """200,000 draws, 1.5% is five standard errors: false alarm below 1e-6."""
    size = 200_000
    asked = RecordDP(noise_multiplier=2.0, noise=noise)  # type: ignore[arg-type]
    terms = agree(asked, 5, 1.0, 10, Extent(1, size, 0))
    _, hidden = _spread(terms, asked, 1, 1)
    assert hidden.var() == pytest.approx(4.0, rel=0.015)


def silo_gate(asked: SiloDP, cohort: int = 4) -> Gate:
    side = int(asked.target_quantile is not None)
    return make_gate(agree(asked, cohort, 1.0, 10, Extent(SHARED, 0, side)))


def whole(gate: Gate, values: Sequence[float], clip: float | None = None) -> np.ndarray:
    gate.begin(1, "round", 4, clip)
    return gate.release(np.array(values)).values


def test_a_whole_contribution_is_clipped_under_silo_privacy() -> None:
    gate = silo_gate(SiloDP(noise_multiplier=1.0, clipping_norm=2.0, noise="silo"))
    nothing = whole(gate, [0.0] * SHARED)
    assert np.linalg.norm(whole(gate, [3e8, 4e8, 0.0, 0.0]) - nothing) == pytest.approx(2.0, abs=1e-5)
    assert np.allclose(whole(gate, [0.3, 0.4, 0.0, 0.0]) - nothing, [0.3, 0.4, 0, 0], atol=1e-6)
    assert np.array_equal(whole(gate, [np.nan, 0.0, 0.0, 0.0]), nothing)


def test_counting_below_the_norm_is_paid_from_the_same_norm() -> None:
    asked = SiloDP(noise_multiplier=1.0, clipping_norm=2.0, noise="silo", target_quantile=0.5, quantile_share=0.1)
    gate = silo_gate(asked)
    gate.begin(1, "round", 4, 2.0)
    loud = gate.release(np.array([1e9, 0.0, 0.0, 0.0])).values
    gate.begin(1, "round", 4, 2.0)
    quiet = gate.release(np.zeros(SHARED)).values
    one_more = loud - quiet
    assert np.linalg.norm(one_more[:SHARED]) == pytest.approx(2.0 * np.sqrt(0.9), abs=1e-5)
    # above the norm counts -1/2, below it +1/2: a silo that joins moves the count by half, so 2 * 0.1 ** 0.5 / 1.0
    assert one_more[SHARED] == pytest.approx(-2 * 2.0 * np.sqrt(0.1), abs=1e-5)
    terms = gate.terms
    assert terms is not None
    assert sum(n**2 for n in terms.norms(2.0)) == pytest.approx(4.0)


def test_the_clipping_norm_follows_the_quantile() -> None:
    """Fifty silos with norms of median 3; the norm starts 30 times too large. Noise of the count is in it."""
    asked = SiloDP(noise_multiplier=0.5, clipping_norm=90.0, noise="silo", target_quantile=0.5)
    terms = agree(asked, 50, 1.0, 300, Extent(SHARED, 0, 1))
    rng = np.random.default_rng(0)
    norms, clip, path = 3.0 * np.exp(rng.standard_normal(50)), 90.0, []
    for _ in range(300):
        main, side = terms.norms(clip)
        noise = rng.standard_normal() * 0.5 * np.sqrt(50) * clip
        below = terms.in_clear(np.append(np.zeros(4), ((norms <= main) - 0.5).sum() * 2 * side + noise), clip)[-1]
        clip = terms.next_clip(below, 50, clip)
        path.append(main)
    assert np.median(path[100:]) == pytest.approx(np.median(norms), rel=0.25)


@settings(max_examples=40, deadline=None)
@given(arrays(np.float64, SHARED, elements=anything), arrays(np.float64, SHARED, elements=anything))
def test_a_record_turns_a_silos_change_into_any_other(change: np.ndarray, other: np.ndarray) -> None:
    """Parameter perturbation: whatever the silo arrives at without it, the release moves by at most the norm, but for
    the rounding after the noise, to 2^-20 sd."""
    asked = RecordDP(noise_multiplier=1.0, clipping_norm=2.0, noise="silo")
    gate = make_gate(agree(asked, 3, 1.0, 10, Extent(SHARED, 0, 0)))
    released = []
    for values in (change, other):
        gate.begin(1, "round", 3)
        released.append(gate.release_change(torch.from_numpy(values)).values)
    assert np.linalg.norm(released[0] - released[1]) <= 2.0 + 1e-5


def test_one_change_needs_terms_without_sampling() -> None:
    gate = make_gate(record_terms())
    gate.begin(1, "round", 3)
    with pytest.raises(AggregationError, match="not those of one change"):
        gate.release_change(torch.zeros(SHARED))


def test_a_phase_that_sends_nothing_is_a_local_step_with_all_of_the_noise() -> None:
    """DP optimisation at the silo: every coordinate stays, is noised in full, and is charged."""
    asked = RecordDP(noise_multiplier=1.0, clipping_norm=2.0)
    terms = agree(asked, 3, 0.5, 10, Extent(0, SHARED, 0))
    paid: list[int] = []
    gate = Gate("here", {"local": terms.table([], [])}, {"local": terms}, lambda _, i: paid.append(i), NoiseSource())
    gate.begin(4, "local", 3)
    out = gate.release_records([(torch.zeros(1, SHARED), torch.zeros(1))], None, [])
    assert out.release.values.size == 0
    assert out.hidden.shape == (SHARED,)
    assert (out.hidden != 0).all()
    assert paid == [4]


def test_a_server_cannot_set_a_norm_that_was_fixed() -> None:
    gate = silo_gate(SiloDP(noise_multiplier=1.0, clipping_norm=2.0, noise="silo"))
    assert np.array_equal(whole(gate, [1e9, 0, 0, 0], clip=1e6), whole(gate, [1e9, 0, 0, 0]))
    adaptive = silo_gate(SiloDP(noise_multiplier=1.0, target_quantile=0.5))
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ProtocolError, match="no number that the agreed one can arrive at"):
            adaptive.begin(1, "round", 4, bad)


def test_a_server_cannot_name_a_norm_for_which_floating_point_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a norm of 1e-320 a step of the lattice is 0: what is divided by it is as large as it can be in every
    coordinate. The control lets the norm pass: four coordinates are 2 norms long, where 1 is charged."""
    asked = SiloDP(noise_multiplier=1.0, noise="distributed", target_quantile=0.5)
    terms = agree(asked, 4, 1.0, 10, Extent(SHARED, 0, 1))

    def shown(self: Gate, hidden: int) -> Any:
        return lambda total: torch.from_numpy(np.clip(total.numpy() / terms.step(self._clip), -terms.room, terms.room))

    def length(clip: float) -> float:
        gate = make_gate(terms)
        gate.begin(1, "round", 4, clip)
        return float(np.linalg.norm(gate.release(np.ones(SHARED)).values[:SHARED])) / terms.resolution

    monkeypatch.setattr(Gate, "_noiser", shown)
    for clip in (1.0, 2.0**-20, 2.0**20):
        assert length(clip) <= 1 + 1e-6
    for clip in (1e-320, 2.0**-21, 2.0**21):
        with pytest.raises(ProtocolError, match="no number that"):
            length(clip)
    monkeypatch.setattr(Terms, "clips_to", lambda self, clip: True)
    with np.errstate(divide="ignore", invalid="ignore"):
        assert length(1e-320) > 1.9


def test_what_a_sum_rounds_before_the_servers_noise_is_within_the_norm() -> None:
    """20,000 coordinates of a record near half a step each: in 32 bits many of them move a whole step, and the total by
    3 norms. Such a job is refused by every engine; in 64 bits what is rounded is less than the norm leaves room for."""
    asked = RecordDP(noise_multiplier=2.0, clipping_norm=1.0, noise="server")
    terms = agree(asked, 50, 1.0, 10, Extent(20_000, 0, 0))
    table = terms.table([Block("direct", (20_000,), 1.0)], [])
    others = 3 * np.random.default_rng(0).standard_normal(20_000)
    record = np.full(20_000, terms.norms(1.0)[0] / np.sqrt(20_000))

    def moved(bits: int) -> float:
        ring = Ring(table, bits, 50)
        return float(np.linalg.norm(ring.decode(ring.encode(others + record) - ring.encode(others))))

    terms.check_rounding(Ring(table, 64, 50).resolution)
    assert 0.999 < moved(64) <= 1
    assert moved(32) > 2.5  # the control: what was allowed once
    with pytest.raises(InputError, match=r"round what they add up, before any noise.*use bits = 64"):
        terms.check_rounding(Ring(table, 32, 50).resolution)


def test_jobs_whose_sums_round_before_the_servers_noise_are_refused() -> None:
    """The control is each silo's own noise, which comes before."""
    problem = make_slopes()

    def build(noise: Any, bits: Any) -> None:
        dp = RecordDP(noise_multiplier=2.0, noise=noise)
        build_parties(problem.model, problem.silos, sf.SFVI(iterations=2), sf.Masked(bits=bits), privacy=dp)

    for noise, bits in (("silo", 32), ("server", 64)):
        build(noise, bits)
    with pytest.raises(InputError, match="noise = 'server': these sums round"):
        build("server", 32)


def test_a_sum_that_is_off_by_more_than_the_noise_is_refused() -> None:
    """CKKS floods totals by a share of each bound, which under record privacy has room for a million norms: 22 norms of
    noise that no interval counted. The controls: BFV, and a silo as the unit, whose bound is its one norm."""
    for unit, scheme, refused in ((RecordDP, "ckks", True), (RecordDP, "bfv", False), (SiloDP, "ckks", False)):
        terms = agree(unit(noise_multiplier=2.0, noise="silo"), 4, 1.0, 10, Extent(SHARED, 0, 0))
        steps = sf.Homomorphic(scheme=scheme).codec(4)(terms.table([Block("x", (SHARED,), 1.0)], [])).resolution
        with pytest.raises(InputError, match="off by more than the noise") if refused else contextlib.nullcontext():
            terms.check_rounding(steps)
        assert bool(steps.max() > 5 * terms.noise_multiplier) is refused  # of norms: what was let in once


def test_an_adaptive_norm_stays_where_the_servers_noise_covers_rounding() -> None:
    asked = SiloDP(noise_multiplier=1.0, noise="server", target_quantile=0.5, quantile_rate=10.0)
    terms = agree(asked, 4, 1.0, 10, Extent(SHARED, 0, 1))
    table = terms.table([Block("x", (SHARED,), 1.0)], [])
    terms.check_rounding(Ring(table, 64, 4).resolution)
    clip = 1.0
    for _ in range(50):
        clip = terms.next_clip(2.0, 4, clip)
    assert clip == 2.0**-8
    assert terms.clips_to(clip)
    assert not terms.clips_to(clip / 2)
    low = np.zeros(SHARED), terms.norms(clip)[0] * np.eye(1, SHARED)[0]
    steps = Ring(table, 64, 4).resolution
    rounded = [np.rint(v / steps[:SHARED]) * steps[:SHARED] for v in low]
    assert np.linalg.norm(rounded[1] - rounded[0]) <= clip


@pytest.mark.parametrize("bad", [1e-320, 1e-31, 1e31])
def test_norms_and_bounds_leave_room_to_floating_point(bad: float) -> None:
    with pytest.raises(InputError, match=r"clipping_norm must lie in \[1e-30, 1e\+30\]"):
        RecordDP(noise_multiplier=1.0, clipping_norm=bad)
    with pytest.raises(InputError, match="objective_bound must lie in"):
        RecordDP(noise_multiplier=1.0, objective_bound=bad)


# ---- The last bits of noise ----


def ziggurat() -> np.ndarray:
    """The widths of numpy's 256 layers, (256,), from its output: a normal is 52 random bits times a layer's width."""
    words, found = PCG64(1).random_raw(60_000), np.zeros(256)
    bits, layers = (words >> 9) & np.uint64(2**52 - 1), words & np.uint64(0xFF)
    for layer in range(256):
        made = Counter[float]()
        for at in np.flatnonzero((layers == layer) & (bits > 2**50))[:40]:
            normal, rounded = abs(np.random.Generator(PCG64(1).advance(int(at))).standard_normal()), float(bits[at])
            near = normal / rounded
            made.update(float(w) for w in np.nextafter(near, [0, near, 1]) if rounded * w == normal)
        found[layer] = made.most_common(1)[0][0]  # others: of numbers that were rejected for the next ones
    return found


def unmakeable(released: np.ndarray, sd: float, widths: np.ndarray) -> int:
    """How many of the numbers near 0, where the sampler leaves gaps, no normal times `sd` is."""
    near = np.abs(released[np.abs(released) < 2.0**-11 * sd])[:, None]
    bits = np.rint(near / sd / widths)
    return sum(
        not ((bits[row] + np.arange(-3, 4)[:, None]) * widths * sd == near[row]).any() for row in range(len(near))
    )


@pytest.mark.parametrize("at", ["silo", "server"])
def test_the_last_bits_of_noise_tell_nothing(monkeypatch: pytest.MonkeyPatch, at: Any) -> None:
    """Is a record there, where all others are zero? By numbers that the sampler cannot make, of one release of 20,000.

    The control does not round. False alarm: binomial counts of some 160 numbers differ by 6 standard deviations, 1e-9.
    """
    size, widths = 20_000, ziggurat()
    terms = agree(RecordDP(epsilon=1.0, delta=1e-6, noise=at), 3, 1.0, 1, Extent(size, 0, 0))
    blocks = terms.table([Block("direct", (size,), 1.0)], [])
    row = np.random.default_rng(0).normal(size=(1, size))
    nothing = torch.zeros(5, size, dtype=torch.float64)
    there = torch.cat([nothing, torch.from_numpy(row / np.linalg.norm(row))])

    def release(rows: Tensor, seed: int) -> np.ndarray:
        source = NoiseSource(b"%d" % seed)
        gate = Gate("here", {"round": blocks}, {"round": terms}, lambda phase, index: None, source)
        return curated(releases(gate, rows).release.values, terms, 1.0, source, 1)

    def counts() -> tuple[list[int], list[int]]:
        found = [
            [unmakeable(release(rows, seed), terms.noise_multiplier, widths) for seed in range(20)]
            for rows in (nothing, there)
        ]
        return found[0], found[1]

    without, with_it = counts()
    assert abs(sum(with_it) - sum(without)) < 6 * np.sqrt(2 * 160 / 4)
    step = 2.0 ** (np.floor(np.log2(terms.noise_multiplier)) - 20)
    values = release(there, 0) / step
    assert np.array_equal(values, np.rint(values))
    monkeypatch.setattr("secure_fvi.privacy.gate._GRID_BITS", -200)
    without, with_it = counts()
    assert max(without) < 3
    assert sum(number >= 3 for number in with_it) >= 16


def test_noise_in_shares_is_no_larger_than_its_last_digits_are_drawn() -> None:
    """Poisson numbers past 2^53 are multiples of a power of two: whatever epsilon says, a total modulo that is the
    data's. The control: terms that `agree` refuses, under which one record more is told with certainty, by any draw."""
    settings = RecordDP(noise_multiplier=1e9, delta=1e-5, clipping_norm=1.0, noise="distributed")
    with pytest.raises(InputError, match="past what shares can be drawn for"):
        agree(settings, 3, 1.0, 1, Extent(1, 0, 0))
    planned = agree(replace(settings, noise_multiplier=1e3), 3, 1.0, 1, Extent(1, 0, 0))

    def last_digits(terms: Terms, records: int) -> set[int]:
        tables, found = {"round": terms.table([Block("g", (1,), 1.0)], ())}, set()
        gate = Gate("a", tables, {"round": terms}, lambda *_: None, NoiseSource(b"last digits"))
        for index in range(20):
            gate.begin(index, "round", 3)
            rows = torch.full((records, 1), 5.0, dtype=torch.float64), torch.zeros(records, dtype=torch.float64)
            found.add(int(gate.release_records([rows], None, ()).release.values[0]) % 32)
        return found

    unsafe = replace(planned, noise_multiplier=1e9, resolution=1, settings=settings)
    assert (last_digits(unsafe, 37), last_digits(unsafe, 38)) == ({37 % 32}, {38 % 32})
    assert len(last_digits(planned, 37)) > 5
