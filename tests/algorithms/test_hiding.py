"""A final sum at a q of the server's choice, where all silos but one are out of range: nothing of that one is told.

The server is honest in all but the q that it asks about once, at the end, which no silo can tell from an honest one."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from pvi_world import NOISE, REGRESSION
from torch import Tensor

import secure_fvi as sf
from secure_fvi.aggregation.base import BlockTable, FloatArray, carry
from secure_fvi.algorithms import hiding, stationarity, weighing
from secure_fvi.algorithms.base import Broadcast
from secure_fvi.algorithms.natural import Natural, from_moments
from secure_fvi.algorithms.stationarity import CURVE
from secure_fvi.algorithms.weighing import WEIGHED, points
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
    said = {"phase": "finish", "round": 1, "sum_index": 2, "sums": ((1, 0, "round", 0),)}
    said["accepted"] = dict.fromkeys(silos, 1)
    if isinstance(algorithm, sf.PVI):
        each = torch.ones(len(silos)).double()
        said["tensors"] = {**first.tensors, "q": q.pack(), "sums": each, "dampings": each}
    else:
        eta = {"loc": torch.zeros(3), "log_scale": torch.full((3,), np.log(scale)), "lower": torch.zeros(3)}
        said |= {"scalars": {}, "tensors": {f"eta/{name}": value.double() for name, value in eta.items()}}
    table = program.tables["finish"]
    return Asked(server, silos, q, table.split(_sum(server, silos, first._replace(**said))), table)


def _cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: what is out of range becomes a public constant."""

    def as_sent(problem: Any, table: BlockTable, found: FloatArray, view: Any) -> FloatArray:
        own = sum(block.size for block in table.blocks if block.name in ("value", "slope", "curve"))
        nats = np.nan_to_num(found[own:], nan=_LEAST).clip(_LEAST)
        return np.concatenate([found[:own].clip(-(2.0**30), 2.0**30), nats])

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
    z, total = points(0, asked.q, asked.server.problem.layout).all.numpy(), asked.total[WEIGHED]
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
        total, bound = asked.total[WEIGHED], asked.table.blocks[3].bound
        far = hiding.unreadable(total, bound)
        z = points(0, asked.q, asked.server.problem.layout).all.numpy()
        if far.sum() > 12:
            assert _off(_gram(z[far], total[far])) > 0.5
        # What is told is the sum over all silos.
        assert (np.abs(total[~far]) <= len(SIZES) * hiding.told_up_to(bound)).all()
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
    found = -(asked.total[CURVE][0][[0, 2, 5]] + 4 * 2.0**30) / wide
    if cut:
        assert found[:2] == pytest.approx(true[:2], rel=1e-6)
        return
    for block in asked.table.blocks[:3]:
        assert hiding.unreadable(asked.total[block.name], block.bound).all()
    assert np.abs(found - true).min() > 100 * true.max()


@functools.cache
def _problem(silos: int) -> Any:
    return build_parties(REGRESSION, _silos()[:silos], sf.PVI(), sf.Masked(), compile=False)[0].problem


def _told(nats: FloatArray, silos: int, seed: int = 0) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """What leaves of a silo's nats at the points of q, and which of it is hidden; of the model with three numbers."""
    problem, rng = _problem(silos), np.random.default_rng(seed)
    sent = weighing.as_told(problem, nats, rng.random(weighing.spare(problem.layout, len(nats))))
    return sent, hiding.unreadable(sent, 2.0**52 / silos)


def _points(silos: int) -> Tensor:
    q = from_moments(torch.zeros(3).double(), torch.eye(3).double())
    return points(0, q, _problem(silos).layout).all


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


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e12, -1e30])
@pytest.mark.parametrize("where", [0, 7, 600])
def test_whatever_a_silo_finds_it_sends_a_number_within_the_bound(bad: float, where: int) -> None:
    nats = np.linspace(-5.0, 5.0, len(_points(5)))
    nats[where] = bad
    sent, far = _told(nats, 5)
    assert np.isfinite(sent).all()
    assert np.abs(sent).max() <= 2.0**52 / 5
    assert far[where] or (where == 0 and far.all())
    assert far.sum() == {0: len(nats), 7: 1 + 2 * weighing.HALF, 600: 1}[where] or where == 0


def test_the_same_question_is_answered_with_the_same_numbers_and_another_with_others() -> None:
    _, engine, _ = build_parties(REGRESSION, _silos(), sf.PVI(), sf.Masked(), compile=False)
    view = engine.silos["silo-1"].view
    first, again, other = (hiding.uniforms(view._replace(turn=turn), 5) for turn in (3, 3, 4))
    assert (first == again).all()
    assert (first != other).all()
    others = hiding.uniforms(engine.silos["silo-2"].view._replace(turn=3), 5)
    assert (first != others).all()
