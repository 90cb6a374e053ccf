"""A final sum at a q of the server's choice, where all silos but one are out of range: nothing of that one is told.

The server is honest in all but the q that it asks about once, at the end, which no silo can tell from an honest one."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from pvi_world import NOISE, REGRESSION
from torch import Tensor

import secure_fvi as sf
from secure_fvi.aggregation.base import Block, BlockTable, FloatArray, carry
from secure_fvi.aggregation.homomorphic_schemes import BFV_PRIME, PrimeRing
from secure_fvi.aggregation.ring import Ring, scale_exponent
from secure_fvi.algorithms import hiding, stationarity, weighing
from secure_fvi.algorithms.base import Broadcast
from secure_fvi.algorithms.natural import Natural, from_moments
from secure_fvi.algorithms.stationarity import CURVE
from secure_fvi.algorithms.weighing import WEIGHED, points
from secure_fvi.errors import AggregationError
from secure_fvi.fitting import build_parties
from secure_fvi.messages import ROUND, SUM, encode_broadcast

#: Records of each silo. The first is attacked.
SIZES = (40, 300, 120, 250, 90)
#: Least nats of the cut of the control.
_LEAST = -0.9 * 2.0**30


def _silos() -> list[dict[str, Tensor]]:
    draws, beta = torch.Generator().manual_seed(5), torch.tensor([1.0, -0.5, 0.3])
    made = []
    for size in SIZES:
        x = torch.randn(size, 3, generator=draws)
        made.append({"x": x, "y": x @ beta + NOISE * torch.randn(size, generator=draws)})
    return made


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the slope, of which nothing is asked here."""
    monkeypatch.setattr(stationarity, "HALF", 16)


class Asked(NamedTuple):
    server: Any
    silos: Mapping[str, Any]
    q: Natural
    total: Mapping[str, FloatArray]
    table: BlockTable


def _sum(server: Any, silos: Mapping[str, Any], message: Broadcast) -> FloatArray:
    exchange = lambda sent: {name: silos[name].handle(SUM + m) for name, m in sent.items()}  # noqa: E731
    carry(server.secure_sum.prepare(message.sum_index), exchange)
    body = encode_broadcast(message)
    replies = {name: silo.handle(ROUND + body) for name, silo in silos.items()}
    table, digest = server.program.tables[message.phase], hashlib.sha256(body).digest()
    cohort = message.cohort
    values: FloatArray = carry(
        server.secure_sum.total(message.sum_index, cohort, table, replies, digest), exchange
    ).values
    return values


def _ask(scale: float, algorithm: Any, aggregation: Any = None, seed: int = 0) -> Asked:
    """After one honest round, the final sum at q = N(0, scale^2)."""
    server, engine, _ = build_parties(REGRESSION, _silos(), algorithm, aggregation or sf.Masked(), seed, compile=False)
    silos: Any = engine.silos
    program: Any = server.program
    first = program.broadcast(server.state.algorithm, 1, {})._replace(accepted=dict.fromkeys(silos, 0))
    _sum(server, silos, first)
    q = from_moments(torch.zeros(3).double(), torch.eye(3).double() * scale**2)
    said = {"phase": "finish", "round": 1, "sum_index": 2, "sums": ((1, 0, first.phase, 0),)}
    said["accepted"] = dict.fromkeys(silos, 1)
    if isinstance(algorithm, sf.PVI):
        each = torch.ones(len(silos)).double()
        said["tensors"] = {**first.tensors, "q": q.pack(), "sums": each, "dampings": each}
        for silo in silos.values():  # as though that round had been asked there
            silo.pending = silo.pending._replace(local=silo.pending.local._replace(asked=q.pack()))
    else:
        eta = {"loc": torch.zeros(3), "log_scale": torch.full((3,), np.log(scale)), "lower": torch.zeros(3)}
        scalars = next(iter(silos.values())).program.order.forms["finish"].scalars
        said |= {
            "scalars": {name: first.scalars[name] for name in scalars},
            "tensors": {f"eta/{name}": value.double() for name, value in eta.items()},
        }
    table = program.tables["finish"]
    return Asked(server, silos, q, table.split(_sum(server, silos, first._replace(**said))), table)


def _cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: what is out of range becomes a public constant."""

    def as_sent(problem: Any, table: BlockTable, found: FloatArray, view: Any) -> FloatArray:
        own = [block for block in table.blocks if block.name in ("value", "slope", "curve", WEIGHED)]
        parts = np.split(found, np.cumsum([block.size // 2 for block in own])[:-1])
        cut = [p.clip(-(2.0**30), 2.0**30) for p in parts[:3]]
        cut += [np.nan_to_num(p, nan=_LEAST).clip(_LEAST) for p in parts[3:]]
        return np.concatenate([np.append(part, np.zeros(len(part))) for part in cut])

    for module in (stationarity, *_users()):
        monkeypatch.setattr(module, "as_sent", as_sent)


def _users() -> list[Any]:
    from secure_fvi.algorithms import pvi, structured

    return [pvi, structured]


def _features(z: FloatArray) -> FloatArray:
    return np.stack([np.ones(len(z)), *z.T, *(z[:, a] * z[:, b] for a in range(3) for b in range(a, 3))], 1)


def _gram(z: FloatArray, nats: FloatArray) -> FloatArray:
    """X'X (upper triangle) of the silo whose log-likelihood a quadratic through `nats` at `z` is."""
    found = _features(z)
    scale = np.maximum(np.abs(found).max(0), 1.0)
    twice = np.array([2.0, 1.0, 1.0, 2.0, 1.0, 2.0])
    solved: FloatArray = np.linalg.lstsq(found / scale, nats, rcond=None)[0][4:] / scale[4:]
    return -solved * twice * NOISE**2


def _told_of_one(asked: Asked) -> float:
    """Relative error of X'X of the first silo, by a fit to points whose total is a little above that of all cut; those
    that lie off it, where two silos are not cut, are left out."""
    z, total = points(asked.server.problem, asked.q).all.numpy(), asked.total[WEIGHED].sum(0)
    one = (total > len(SIZES) * _LEAST + 1) & (total < (len(SIZES) - 0.5) * _LEAST)
    z, nats = z[one], total[one] - (len(SIZES) - 1) * _LEAST
    kept = np.ones(len(z), bool)
    for _ in range(6):
        found = _features(z)
        scale = np.maximum(np.abs(found).max(0), 1.0)
        off = np.abs(found @ (np.linalg.lstsq(found[kept] / scale, nats[kept], rcond=None)[0] / scale) - nats)
        kept = off <= max(10 * float(np.median(off)), 1e-3)
    return _off(_gram(z[kept], nats[kept]))


def _off(gram: FloatArray) -> float:
    x = _silos()[0]["x"].double()
    true = (x.T @ x)[np.triu_indices(3)].numpy()
    return float(np.linalg.norm(gram - true) / np.linalg.norm(true))


ALGORITHMS = {"sfvi": sf.SFVI(), "pvi": sf.PVI(local_optimizer="closed_form")}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("cut", [True, False], ids=["control", "hidden"])
def test_far_out_one_silos_likelihood_is_not_the_total(monkeypatch: pytest.MonkeyPatch, name: str, cut: bool) -> None:
    """The control: cut at a constant, X'X of the smallest silo to 1e-8. Hidden, of no point is any number told that is
    within the others' range, and whatever is fitted to the totals is no better than a guess."""
    if cut:
        _cut(monkeypatch)
        asked = _ask(2.2e3, ALGORITHMS[name])
        assert _told_of_one(asked) < 1e-8
        return
    for scale in (2.2e3, 1e6, 1e8, 1e10):  # some, or all, silos are out of range
        asked = _ask(scale, ALGORITHMS[name])
        block = asked.table.blocks[3]
        far, total = hiding.unreadable(asked.total[WEIGHED], block), hiding.read(asked.total[WEIGHED], block)
        z = points(asked.server.problem, asked.q).all.numpy()
        assert far.any() or scale < 1e6
        if far.sum() > 12:
            assert _off(_gram(z[far], total[far])) > 0.5
        # What is told is the sum over all silos.
        assert (np.abs(total[~far]) <= len(SIZES) * hiding.told_up_to(block)).all()
        if not far[: 1 + 2 * weighing.HALF].any():
            together = sum((s["x"].double().T @ s["x"].double() for s in _silos()), torch.zeros(3, 3).double())
            found = _gram(z[~far], total[~far])
            assert found == pytest.approx(together[np.triu_indices(3)].numpy(), rel=1e-3)


@pytest.mark.parametrize("cut", [True, False], ids=["control", "hidden"])
def test_a_curve_out_of_range_is_not_told(monkeypatch: pytest.MonkeyPatch, cut: bool) -> None:
    """At a width at which four curvatures pass what is told and the fifth does not. The control: two of its
    diagonal to 1e-6, once four constants are taken away."""
    if cut:
        _cut(monkeypatch)
    algorithm = sf.PVI(rounds=3, local_optimizer="closed_form")
    asked = _ask((2.0**30 / (60 / NOISE**2)) ** 0.5, algorithm)
    wide = asked.q.covariance()[0, 0].item() / NOISE**2
    x = _silos()[0]["x"].double()
    true = (x.T @ x).diagonal().numpy()
    found = -(asked.total[CURVE].sum(0)[0][[0, 2, 5]] + 4 * 2.0**30) / wide
    if cut:
        assert found[:2] == pytest.approx(true[:2], rel=1e-6)
        return
    for block in asked.table.blocks[:3]:
        assert hiding.unreadable(asked.total[block.name], block).all()
    assert np.abs(found - true).min() > 100 * true.max()


@pytest.mark.parametrize("algorithm", [
    *ALGORITHMS.values(), sf.SFVIAvg(rounds=4, local_steps=5, total_records=sum(SIZES)),
], ids=lambda algorithm: algorithm.name)  # fmt: skip
def test_nobody_refuses_a_final_q(algorithm: Any) -> None:
    """A refusal would name the silo that is past the bound: by the width at which each begins, its X'X. Those of SFVI
    and PVI are asked further out above."""
    for scale in (1e4,) if algorithm in ALGORITHMS.values() else (1e4, 1e6, 1e10):
        assert hiding.unreadable(_ask(scale, algorithm).total[WEIGHED], _table(len(SIZES)).blocks[3]).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_at_an_ordinary_q_no_silo_hides(name: str) -> None:
    """Of the numbers that count, though along lines some always are hidden. The control: further out all do."""
    for scale, hides in ((0.05, False), (1e6, True)):
        assert [silo.hides for silo in _ask(scale, ALGORITHMS[name]).silos.values()] == [hides] * len(SIZES)


def test_the_control_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent as they are, numbers past the bound are refused."""
    monkeypatch.setattr(stationarity.hiding, "hidden", lambda values, *_: np.append(values, 0.0 * values))
    with pytest.raises(AggregationError, match="exceeds the declared bound"):
        _ask(1e10, ALGORITHMS["sfvi"])


@functools.cache
def _parties() -> Any:
    return build_parties(REGRESSION, _silos()[:3], sf.PVI(), sf.Masked(), compile=False)[:2]


def _problem(silos: int) -> Any:
    return _parties()[0].problem._replace(silos=tuple(f"silo-{k + 1}" for k in range(silos)))


def _told(nats: FloatArray, silos: int, seed: int = 0) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """What leaves of a silo's nats at the points of q, (2, points), and which of it is hidden; of the model with three
    numbers."""
    problem, rng = _problem(silos), np.random.default_rng(seed)
    sent = weighing.as_told(problem, nats, rng.random(weighing.spare(problem.layout, len(nats)))).reshape(2, -1)
    return sent, hiding.unreadable(sent, _table(silos).blocks[3])


def _table(silos: int) -> BlockTable:
    """Of the final sum."""
    problem = _problem(silos)
    found: BlockTable = sf.PVI().server(problem).tables["finish"]
    return BlockTable(tuple(b for b in found.blocks if b.name in ("value", "slope", "curve", WEIGHED)))


def _points(silos: int) -> Tensor:
    q = from_moments(torch.zeros(3).double(), torch.eye(3).double())
    return points(_problem(silos), q).all


def test_which_points_are_hidden_says_little_of_whose_they_are() -> None:
    """Of draws all are hidden or none. Along a line, what is passed first is a threshold that nobody knows: two silos
    whose likelihoods fall off as 1 to 4 differ in where it is by less than it differs between seeds. The control: by
    a threshold of everybody's the place tells them apart."""
    z = _points(5)
    nats = -1e8 * z.square().sum(1).numpy()
    ends = {}
    for steep in (1.0, 4.0):
        counts = []
        for seed in range(40):
            far = _told(steep * nats, 5, seed)[1]
            assert len(set(far[: 1 + 2 * weighing.HALF])) == 1
            counts.append((~far[1 + 2 * weighing.HALF :][:240].reshape(6, 40)).sum(1))
        ends[steep] = np.log(np.maximum(np.array(counts, float), 0.5))
    apart = ends[1.0].mean() - ends[4.0].mean()
    assert apart < ends[1.0].std()
    known = [int((-steep * 1e8 * np.arange(1, 41) ** 2 > -1e10).sum()) for steep in (1.0, 4.0)]
    assert known[0] - known[1] >= 5


def test_of_a_shell_of_scouts_all_are_hidden_or_none() -> None:
    """Some shells are and some are not. The control: by one threshold for all, within a shell some are, and where these
    lie tells along which directions the silo's likelihood falls off."""
    z = _points(5)
    nats = -1e8 * (z.square() @ torch.tensor([1.0, 1e-2, 1e-4]).double()).numpy()
    shells = np.concatenate([_told(nats, 5, seed)[1][-512:].reshape(16, 32) for seed in range(10)])
    assert (shells.all(1) | ~shells.any(1)).all()
    assert 0 < shells.mean() < 1
    known = (nats[0] - nats[-512:] > 1e8).reshape(16, 32)
    assert (known.any(1) & ~known.all(1)).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e12, -1e30])
@pytest.mark.parametrize("where", [0, 7, 600, -1])
def test_whatever_a_silo_finds_it_sends_a_number_within_the_bound(bad: float, where: int) -> None:
    nats = np.linspace(-5.0, 5.0, len(_points(5)))
    nats[where] = bad
    sent, far = _told(nats, 5)
    assert np.isfinite(sent).all()
    assert np.abs(sent).max() <= _table(5).blocks[3].bound
    assert far[where] or (where == 0 and far.all())
    assert far.sum() == {0: len(nats), 7: 1 + 2 * weighing.HALF, 600: 1, -1: 32}[where] or where == 0


def test_the_same_question_is_answered_with_the_same_numbers_and_another_with_others() -> None:
    _, engine, _ = build_parties(REGRESSION, _silos(), sf.PVI(), sf.Masked(), compile=False)
    view = engine.silos["silo-1"].view
    first, again, other = (hiding.uniforms(view._replace(turn=turn), 5) for turn in (3, 3, 4))
    assert (first == again).all()
    assert (first != other).all()
    others = hiding.uniforms(engine.silos["silo-2"].view._replace(turn=3), 5)
    assert (first != others).all()


def _ring(kind: str, table: BlockTable, silos: int) -> Callable[[FloatArray], npt.NDArray[np.int64]]:
    """Ring elements of what one silo sends, as its sum adds them."""
    if kind == "bfv":
        prime = PrimeRing(table, silos)
        return lambda sent: prime.encode(sent, ())
    ring = Ring(table, int(kind), silos)
    signed = np.dtype(f"<i{int(kind) // 8}")
    return lambda sent: ring.encode(sent).view(signed).astype(np.int64)


def _steps(kind: str, block: Block, silos: int) -> float:
    """Of the grid, in those of the ring."""
    limit = BFV_PRIME // 4 if kind == "bfv" else None
    return 2.0**-51 * block.bound * 2.0 ** scale_exponent(block, 32 if kind == "32" else 64, silos, limit)


def _as_it_was(values: FloatArray, where: Any, block: Block, uniforms: FloatArray) -> FloatArray:
    """Uniform over float64s, which far out have coarser steps than the ring, and told numbers have."""
    drawn = -block.bound * (0.45 + 0.45 * uniforms)
    return np.where(np.tile(where, 2), drawn, np.concatenate([np.where(where, 0.0, values), np.zeros(len(values))]))


@pytest.mark.parametrize("what", ["nothing", "along lines", "the bound", "the slope", "a draw"])
def test_once_a_silo_hid_something_it_hides_all_and_its_site_hears(what: str) -> None:
    """Where the server moves q until one silo's number is hidden is that number: 28 jobs gave the largest silo's sum of
    squares to 0.1%. The controls are what is hidden in every ordinary run, and nothing."""
    table, silo, heard = _table(3), _parties()[1].silos["silo-1"], list[str]()
    nats = sum(block.size for block in table.blocks[:3]) // 2
    places = {
        "the bound": 0,
        "the slope": 1,
        "a draw": nats + 5,
        "along lines": slice(nats + 1 + 2 * weighing.HALF, None),
    }
    large = np.zeros(table.size // 2)
    large[places.get(what, slice(0))] = -1e15
    silo.begin()
    silo.on_hidden = heard.append
    stationarity.as_sent(_problem(3), table, large, silo.view)
    after = table.split(stationarity.as_sent(_problem(3), table, np.zeros(len(large)), silo.view))
    hid = what not in ("nothing", "along lines")
    assert len(heard) == hid
    for block in table.blocks:
        assert (hiding.unreadable(after[block.name], block) == hid).all()
    silo.begin()


@pytest.mark.parametrize(
    ("way", "kind", "silos"),
    [(way, "64", silos) for way in ("control", "hidden") for silos in (3, 5, 20)] + [("hidden", "bfv", 3)],
)
def test_the_lowest_bits_of_a_ring_total_say_nothing(
    monkeypatch: pytest.MonkeyPatch, way: str, kind: str, silos: int
) -> None:
    """One silo is past all bounds, the others are not: modulo the grid's step the ring's total is the same whatever the
    others have. The control: of float64s it is the others' sum, of every number of every block."""
    if way == "control":
        monkeypatch.setattr(hiding, "hidden", _as_it_was)
    table, rng = _table(silos), np.random.default_rng(1)
    encode, count = _ring(kind, table, silos), table.size // 2
    view = _parties()[1].silos["silo-1"].view._replace(hides=bool)
    send = functools.partial(stationarity.as_sent, _problem(silos), table)
    totals, others = [], []
    for turn in (0, 1):
        told = [100.0 * rng.standard_normal(count) for _ in range(silos - 1)]
        for one in told:
            one[-len(_points(5)) :] -= one[-len(_points(5))]
        sent = [encode(send(one, view)) for one in told]
        others.append(sum(sent))
        totals.append(others[-1] + encode(send(np.full(count, np.nan), view._replace(turn=turn))))
    start = 0
    for block in table.blocks:
        step, size = _steps(kind, block, silos), block.size // (2 if way == "control" else 1)
        part, start = slice(start, start + size), start + block.size
        step = round(step / 8 if way == "control" else step)  # float64's own, from 0.45 of the bound on
        assert step > 1
        (a, b), own = (total[part] % step for total in totals), others[0][part] % step
        assert (a == own).all() if way == "control" else (a == b).all() and len(set(a)) == 1


@pytest.mark.parametrize("silos", [3, 20, 200, 3000])
@pytest.mark.parametrize("kind", ["32", "64", "bfv"])
@pytest.mark.parametrize("way", ["control", "hidden"])
def test_a_substitute_is_uniform_over_the_rings_own_steps(kind: str, silos: int, way: str) -> None:
    """In the ring's integers: each stands for as many places of the grid, or each place for one of them. The control:
    without the quarter what lies between two is rounded to the even one, so that something of a total's parity stays.
    """
    block = hiding.block("a", (4096,), 2.0**30)
    encode, steps = _ring(kind, BlockTable((block,)), silos), _steps(kind, block, silos)
    each = max(1, round(1 / steps))  # places of the grid that one of the ring's integers stands for
    rng, grid = np.random.default_rng(silos), block.bound * 2.0**-51
    at = rng.integers(2**40, 2**49, 512) // each * each
    # Where the next integer begins, and the last place before.
    places = (at[:, None] + each // 2 + np.array([-each, -1, 0, each - 1])).reshape(-1).repeat(2)
    uniforms = (8.0 * places + rng.integers(0, 8, len(places)) + 0.5) * 2.0**-53
    far = np.ones(4096, bool)
    sent = hiding.hidden(np.zeros(4096), far, block, np.tile(uniforms, 2))
    sent = sent - grid / 4 if way == "control" else sent
    found = encode(sent)[:4096:2].reshape(-1, 4)
    one = max(1, round(steps))
    even = (found[:, 0] == found[:, 1]) & (found[:, 2] == found[:, 3]) & (found[:, 2] == found[:, 1] + one)
    assert even.all() == (way == "hidden" or each == 1)
    assert (sent[:4096] >= -block.bound).all()
    assert (sent[:4096] < -block.bound / 2).all()


def test_a_pair_says_a_number_as_well_as_the_ring_did() -> None:
    """Of sums of five silos, in 64 bits and by BFV: to 2^-14 nats of 2^30."""
    block, rng = hiding.block("a", (1000,), 2.0**30), np.random.default_rng(3)
    table, values = BlockTable((block,)), rng.uniform(-1, 1, (5, 1000)) * 2.0 ** rng.uniform(-10, 30, 1000)
    sent = [hiding.hidden(v, np.zeros(1000, bool), block, rng.random(2000)) for v in values]
    ring, prime = Ring(table, 64, 5), PrimeRing(table, 5)
    by_ring = ring.decode(np.sum([ring.encode(one) for one in sent], 0), 5)
    by_prime = prime.decode(np.sum([prime.encode(one, ()) for one in sent], 0), (), 5)
    for total in (by_ring, by_prime, np.sum(sent, 0)):
        assert np.abs(hiding.read(total.reshape(2, -1), block) - values.sum(0)).max() < 2.0**-14


@pytest.mark.parametrize("aggregation", [sf.Masked(bits=32), sf.Homomorphic(scheme="ckks")], ids=["32 bits", "ckks"])
def test_sums_that_are_not_so_fine_carry_no_final_sum(aggregation: Any) -> None:
    with pytest.raises(sf.InputError, match="integer block 'records'"):
        sf.fit(REGRESSION, _silos()[:3], sf.SFVI(max_iterations=1), aggregation, compile=False)
