"""Ring encoding: exact, never wraps, refuses what does not fit and says which block."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_fvi.aggregation import Block, BlockTable
from secure_fvi.aggregation.ring import Ring, scale_exponent
from secure_fvi.errors import AggregationError, InputError


def ring_of(*blocks: Block, bits: int = 64, terms: int = 3) -> Ring:
    return Ring(BlockTable(blocks), bits, terms)


@given(
    bound=st.floats(1e-200, 1e200),
    bits=st.sampled_from([32, 64]),
    terms=st.integers(1, 5000),
)
def test_scale_is_the_largest_that_cannot_wrap(bound, bits, terms):
    block = Block("b", (1,), bound)
    e = scale_exponent(block, bits, terms)
    numerator, denominator = bound.as_integer_ratio()

    def fits(exponent):
        # terms * (bound * 2^e + 1) <= 2^(bits-2) - 1, in exact integers
        left = terms * (numerator * 2 ** max(exponent, 0) + denominator * 2 ** max(-exponent, 0))
        return left <= (2 ** (bits - 2) - 1) * denominator * 2 ** max(-exponent, 0)

    assert fits(e)
    assert not fits(e + 1)


@given(
    data=st.data(),
    bits=st.sampled_from([32, 64]),
    terms=st.integers(2, 40),
    bound=st.floats(1e-6, 1e6),
)
@settings(max_examples=60)
def test_sum_of_encodings_is_the_sum_within_the_resolution(data, bits, terms, bound):
    ring = ring_of(Block("b", (5,), bound), bits=bits, terms=terms)
    edge = st.sampled_from([-bound, bound, 0.0])
    element = edge | st.floats(-bound, bound)
    rows = data.draw(st.lists(st.lists(element, min_size=5, max_size=5), min_size=terms, max_size=terms))
    total = np.zeros(5, ring.dtype)
    for row in rows:
        total += ring.encode(np.array(row))
    exact = np.array([math.fsum(c) for c in zip(*rows, strict=True)])
    tolerance = terms * ring.resolution / 2 + 2**-50 * terms * bound
    assert (np.abs(ring.decode(total) - exact) <= tolerance).all()


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("sign", [-1, 1])
def test_all_terms_at_the_bound_do_not_wrap(bits, sign):
    ring = ring_of(Block("b", (1,), 0.7), bits=bits, terms=1000)
    total = sum((ring.encode(np.array([sign * 0.7])) for _ in range(1000)), np.zeros(1, ring.dtype))
    assert ring.decode(total)[0] == pytest.approx(sign * 700, rel=1e-5 if bits == 32 else 1e-14)


def test_one_term_more_than_declared_is_what_would_wrap():
    # The control of the test above: the room is used up, so eight times the terms do leave the ring.
    ring = ring_of(Block("b", (1,), 0.7), bits=32, terms=1000)
    total = sum((ring.encode(np.array([0.7])) for _ in range(8000)), np.zeros(1, ring.dtype))
    assert abs(ring.decode(total)[0] - 5600) > 100


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 10.000001, -11.0])
def test_refusal_names_block_and_bound_but_not_the_value(bad):
    ring = ring_of(Block("fine", (2,), 100.0), Block("clipped", (2,), 10.0))
    with pytest.raises(AggregationError) as refusal:
        ring.encode(np.array([99.0, -99.0, 1.0, bad]))
    message = str(refusal.value)
    assert "'clipped'" in message
    assert ("past its bound" in message) == math.isfinite(bad)
    assert "10" in message.replace(repr(bad), "")
    assert repr(bad) not in message


@pytest.mark.parametrize("at", [0, 100_000, 200_000])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1.0001, -1.0001])
def test_refusal_reaches_all_of_a_long_vector(at, bad):
    ring = ring_of(Block("long", (200_001,), 1.0), Block("next", (3,), 9.0), bits=32)
    values = np.append(np.zeros(200_001), [9.0, -9.0, 9.0])
    ring.encode(values)
    values[at] = bad
    with pytest.raises(AggregationError, match="'long'"):
        ring.encode(values)


def test_long_vectors_are_encoded_as_short_ones():
    # Chunks within a block, chunks across blocks and single elements take different roads to the same result.
    blocks = [
        Block("a", (40_000,), 1.0),
        Block("n", (30_000,), 1e6, integer=True),
        Block("b", (7,), 1e-3),
        Block("c", (50_000,), 5.0),
    ]
    rng = np.random.default_rng(0)
    parts = [rng.uniform(-b.bound, b.bound, b.size) for b in blocks]
    parts[1] = np.rint(parts[1])
    ring, values = ring_of(*blocks), np.concatenate(parts)
    scaled = [p * 2.0 ** scale_exponent(b, 64, 3) for b, p in zip(blocks, parts, strict=True)]
    expected = np.rint(np.concatenate(scaled)).astype(np.int64).view(np.uint64)
    assert (ring.encode(values) == expected).all()
    values[50_000] += 0.5
    with pytest.raises(AggregationError, match=r"'n'.*fraction"):
        ring.encode(values)


def test_integer_blocks_are_exact_and_refuse_fractions_and_bounds_that_cannot_fit():
    ring = ring_of(Block("count", (2,), 1e9, integer=True), bits=64, terms=100)
    total = sum((ring.encode(np.array([999_999_999.0, -1.0])) for _ in range(100)), np.zeros(2, ring.dtype))
    assert ring.decode(total).tolist() == [99_999_999_900.0, -100.0]
    with pytest.raises(AggregationError, match=r"'count'.*fraction"):
        ring.encode(np.array([0.5, 1.0]))
    with pytest.raises(InputError, match=r"'count'.*does not fit"):
        ring_of(Block("count", (1,), 1e9, integer=True), bits=32, terms=100)
    with pytest.raises(InputError, match="'count'"):
        ring_of(Block("count", (1,), 2.0**52, integer=True), bits=64, terms=3)


@pytest.mark.parametrize("shape", [(3,), (2, 2), (5,), ()])
def test_wrong_shape_is_refused(shape):
    with pytest.raises(AggregationError, match="expected 4 values"):
        ring_of(Block("b", (4,), 1.0)).encode(np.zeros(shape))


def test_a_fraction_within_a_long_integer_block_is_refused():
    ring = ring_of(Block("n", (40_000,), 1e6, integer=True))
    values = np.ones(40_000)
    ring.encode(values)
    values[20_000] += 0.5
    with pytest.raises(AggregationError, match=r"'n'.*fraction"):
        ring.encode(values)


def test_a_ring_of_another_width_or_of_too_many_terms_is_refused():
    with pytest.raises(InputError, match="bits must be 32 or 64, not 16"):
        ring_of(Block("b", (1,), 1.0), bits=16)
    ring_of(Block("b", (1,), 1.0), bits=32, terms=2**28)
    with pytest.raises(InputError, match="a sum of 1073741824 terms does not fit in 32 bits"):
        ring_of(Block("b", (1,), 1.0), bits=32, terms=2**30)
