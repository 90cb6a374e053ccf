"""The damping that PVI finds itself, the control in which a fixed one of 1 leaves q improper, and a network's start."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from pvi_world import NOISE, REGRESSION, World, build, make_regression
from scipy.optimize import brentq
from torch import Tensor

import secure_fvi as sf
from secure_fvi.aggregation.base import BlockTable
from secure_fvi.algorithms import pvi
from secure_fvi.algorithms.base import Broadcast, Step
from secure_fvi.algorithms.local_fit import Families, first_start
from secure_fvi.algorithms.natural import Natural, distance, from_moments
from secure_fvi.algorithms.pvi import accept, distance_moved, pace
from secure_fvi.draws import draw_global
from secure_fvi.errors import AggregationError, ProtocolError
from secure_fvi.messages import ROUND, encode_broadcast
from secure_fvi.models.bnn import bayesian_network, class_log_probs, score
from secure_fvi.privacy.gate import Gate

#: Local fits of a network on a handful of records.
FITS: dict[str, Any] = {
    "family": "diagonal", "local_optimizer": "adam", "learning_rate": 0.05, "local_steps": 25, "start_spread": 0.3,
}  # fmt: skip
MODEL = bayesian_network(hidden=5, classes=4)
CORNERS = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])


def corners(silos: int, count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """One class a silo, around its corner of a square."""
    rng = torch.Generator().manual_seed(seed)
    labels = [torch.full((count,), j % 4) for j in range(silos)]
    return [{"x": CORNERS[y] + 0.3 * torch.randn(count, 2, generator=rng), "y": y} for y in labels]


def _scored(world: World, silos: list[dict[str, Tensor]]) -> tuple[float, float]:
    x, y = (torch.cat([s[name] for s in silos]) for name in ("x", "y"))
    posterior = world.server.program.posterior(world.state)
    return score(class_log_probs(draw_global(world.server.problem, posterior, 100, 0), x), y)


@pytest.mark.slow
def test_damping_is_found_where_a_fixed_one_leaves_q_improper(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 silos of one class each. The control takes steps of 1 whatever comes of them, as the paper's update does."""
    silos = corners(8, 8)
    guarded = build(MODEL, silos, sf.PVI(rounds=20, **FITS))
    taken = []
    for _ in range(14):
        guarded.round()
        taken.append(guarded.state.damping)
        assert guarded.state.q.proper
        assert torch.isfinite(guarded.state.q.mean()).all()
    assert taken[0] == 1 / 8
    assert max(taken) > 1 / 8
    accuracy, log_likelihood = _scored(guarded, silos)
    assert accuracy > 0.9
    assert log_likelihood > -0.9  # guessing: -1.39

    monkeypatch.setattr(pvi, "accept", lambda q, change, damping, safe: (q.plus(change, damping), damping, 0))
    control = build(MODEL, silos, sf.PVI(rounds=20, damping=1.0, **FITS))
    proper = True
    for _ in range(14):
        control.round()
        proper = proper and control.state.q.proper
        if not proper:
            break
    assert not proper


@pytest.mark.slow
def test_a_network_needs_a_start_that_silos_share() -> None:
    """4 silos that are alike, with all classes each. Without it every silo numbers its hidden units as its noise has
    it, and the average of their networks knows nothing. Guessing has -log 4 = -1.39 nats; seeds differ by .1."""
    labels = torch.arange(12) % 4
    rng = torch.Generator().manual_seed(0)
    silos = [{"x": CORNERS[labels] + 0.3 * torch.randn(12, 2, generator=rng), "y": labels} for _ in range(4)]
    log_likelihood = {}
    for spread in (0.5, 0.0):
        world = build(MODEL, silos, sf.PVI(rounds=9, damping=0.25, **{**FITS, "start_spread": spread}))
        world.round()
        log_likelihood[spread] = _scored(world, silos)[1]
    assert log_likelihood[0.5] > -1.15
    assert log_likelihood[0.0] < -1.3


def test_the_first_start_is_public_and_follows_from_the_seed() -> None:
    q = from_moments(torch.tensor([1.0, -2.0]), torch.tensor([[4.0, 1.0], [1.0, 9.0]]))
    start = first_start(q, 0.1, seed=3)
    assert torch.equal(start.precision, q.precision)
    assert torch.equal(start.mean(), first_start(q, 0.1, seed=3).mean())
    assert not torch.equal(start.mean(), first_start(q, 0.1, seed=4).mean())
    steps = torch.stack([(first_start(q, 0.1, s).mean() - q.mean()) / (0.1 * q.stddev()) for s in range(400)])
    assert float(steps.square().mean()) == pytest.approx(1.0, abs=0.2)  # 800 squares of normals: sd .05
    assert first_start(q, 0.0, seed=3) is q


def _changes(step: float, noise: float, rates: Tensor, seed: int = 0) -> tuple[Natural, Natural, Natural]:
    """The third change and the two before it, of a q whose mean goes to 0 in steps of `step` x `rates`."""
    rng = torch.Generator().manual_seed(seed)
    at, found = torch.ones(len(rates)), []
    for _ in range(3):
        change = -rates * at
        found.append(Natural(change + noise * torch.randn(len(rates), generator=rng), torch.zeros(len(rates))))
        at = at + step * change
    return found[2], found[1], found[0]


@pytest.mark.parametrize("noise", [0.0, 0.7])
def test_pace_sees_an_overshoot_through_noise(noise: float) -> None:
    """3,000 directions. Steps that leave nearly all of the way may grow, by the more where that is plain; steps past
    twice the way in a third of the directions are halved, though the noise lowers both cosines."""
    q = Natural(torch.zeros(3000), torch.ones(3000))
    rates = torch.ones(3000)
    assert pace(q, *_changes(0.02, noise, rates)) == (1.25 if noise else 4.0)
    rates[:1000] = 3.0
    assert pace(q, *_changes(0.6, noise, rates)) == 0.5


def test_pace_doubles_where_changes_shrink_and_waits_where_they_are_noise() -> None:
    q = Natural(torch.zeros(3000), torch.ones(3000))
    assert pace(q, *_changes(0.4, 0.0, torch.ones(3000))) == 2.0
    assert pace(q, *_changes(0.0, 50.0, torch.ones(3000))) == 1.0


def test_a_step_may_take_three_quarters_of_a_precision_unless_it_is_an_average() -> None:
    q, change = Natural(torch.zeros(2), torch.ones(2)), Natural(torch.zeros(2), torch.tensor([5.0, -0.9]))
    assert accept(q, change, 1.0, safe=0.5)[1:] == (0.5, 1)
    assert accept(q, change, 1.0, safe=1.0)[1:] == (1.0, 0)
    assert accept(q, Natural(q.shift, -q.precision), 1.0, safe=1.0)[1:] == (0.5, 1)
    hopeless = Natural(q.shift, torch.full((2,), -torch.inf))
    assert accept(q, hopeless, 1.0, safe=1.0)[0] is q


def test_the_distance_of_an_improper_change_is_drawn_out_from_what_was_taken() -> None:
    q, change = Natural(torch.zeros(1), torch.ones(1)), Natural(torch.ones(1), torch.tensor([-2.0]))
    assert distance_moved(q, change, 0.25) == pytest.approx(0.25 / 0.5 / 0.25)
    assert distance_moved(q, Natural(torch.ones(1), torch.zeros(1)), 0.25) == pytest.approx(1.0)
    assert distance_moved(q, change, 0.0) == float("inf")


# ---- a server that weighs silos ----


def _by_silo(message: Broadcast, index: int, silo: str) -> float:
    """Control: each silo reads an entry of its own, as it did once."""
    at = sorted(("silo-1", "silo-2", "silo-3")).index(silo)
    return float(message.tensors["dampings"][at]) if index else 0.0


@pytest.mark.parametrize("own_entries", [False, True])
@pytest.mark.parametrize("named", [(1.0, 1.0, 1.0), (1.0, 7.0, 8.0), (2.0, 1.0, 1.0)])
def test_a_server_cannot_weigh_one_silos_change(
    own_entries: bool, named: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks again at the same q, and says that q took one silo's change and no other's: the second total then lacks
    that change alone, and their difference is it. Dampings are named by sum, so that all changes of a total count
    alike, and the difference is a share of the total. In the control each silo has an entry of its own."""
    if own_entries:
        monkeypatch.setattr(pvi, "damping_of", _by_silo)
    silos, _ = make_regression((7, 30, 12))
    world = build(REGRESSION, silos, sf.PVI(rounds=4, damping=1.0, local_optimizer="closed_form", family="full"))
    message = world.server.program.broadcast(world.state, 1, {})
    changes, totals = [], []
    for round_ in range(2):
        told = {"sums": torch.tensor(named), "dampings": torch.tensor([0.5, 0.0, 0.0])} if round_ else {}
        asked = message._replace(
            round=round_, sum_index=round_ + 1, accepted=dict.fromkeys(world.engine.silos, round_),
            sums=((1, 0, "round", 0),) if round_ else (), tensors={**message.tensors, **told},
        )  # fmt: skip
        sent = [np.frombuffer(s.handle(ROUND + encode_broadcast(asked))) for s in world.engine.silos.values()]
        changes.append([torch.from_numpy(values[:9].copy()) for values in sent])
        totals.append(torch.stack(changes[-1]).sum(0))
    lacking, victim = totals[0] - totals[1], changes[0][0]
    if own_entries:
        torch.testing.assert_close(2 * lacking, victim, rtol=1e-9, atol=1e-9)
    else:
        share = float(lacking @ totals[0] / (totals[0] @ totals[0]))
        torch.testing.assert_close(lacking, share * totals[0], rtol=1e-9, atol=1e-9)
        assert share == pytest.approx(0.5 if named[0] == 1.0 else 0.0, abs=1e-9)


# ---- a server that states units of its own ----


def _of_anything(self: Any, message: Broadcast, silo: str) -> Tensor:
    """Control: whatever units are sent."""
    per_unit: Tensor = self.per_unit(message.tensors["units"])
    return per_unit


def _shared(bound: float) -> Any:
    """Control: past the bound a silo sends a share of its change, as large as it may be, and keeps the rest."""
    release = Gate.release

    def share(self: Gate, values: Any) -> Any:
        most = float(np.abs(values[:9]).max()) / (0.9 * bound)
        return release(self, np.concatenate([values[:9] / max(1.0, most), values[9:]]))

    return share


@pytest.mark.parametrize("cut", [False, True], ids=["refused", "control"])
def test_a_server_cannot_let_one_silo_alone_send_a_share(cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In units between the two largest silos' changes, the largest alone is past the bound. It says so, once, and
    answers nothing else; in the control it sends less of its change, and the total is short of that alone."""
    silos, _ = make_regression((7, 30, 12))
    world = build(REGRESSION, silos, sf.PVI(rounds=4, local_optimizer="closed_form", family="full"))
    message = world.server.program.broadcast(world.state, 1, {})
    bound = world.server.program.tables["round"].blocks[0].bound
    own = [float((s["x"].T @ s["x"] / NOISE**2).abs().max()) for s in silos]
    units = torch.full((3,), (0.9 * bound / (sorted(own)[-1] * sorted(own)[-2]) ** 0.5) ** 0.5, dtype=torch.float64)
    asked = message._replace(accepted=dict.fromkeys(world.engine.silos, 0), tensors={**message.tensors, "units": units})
    if cut:
        monkeypatch.setattr(Families, "told_per_unit", _of_anything)
        monkeypatch.setattr(Gate, "release", _shared(bound))
        sent = [np.frombuffer(s.handle(ROUND + encode_broadcast(asked)))[:9] for s in world.engine.silos.values()]
        most = [float(np.abs(values).max()) for values in sent]
        assert max(most) == pytest.approx(0.9 * bound)
        return
    for silo in world.engine.silos.values():
        with pytest.raises(ProtocolError, match="the units of a change are not those of the q that was sent"):
            silo.handle(ROUND + encode_broadcast(asked))
        assert not silo.past.failed
    monkeypatch.setattr(Families, "told_per_unit", _of_anything)  # and where units are right and a change is large
    largest = world.engine.silos["silo-2"]
    with pytest.raises(AggregationError, match=r"its part of 'change' .* exceeds the declared bound"):
        largest.handle(ROUND + encode_broadcast(asked))
    assert largest.past.failed
    with pytest.raises(ProtocolError, match="its data could not answer a question before"):
        largest.handle(ROUND + encode_broadcast(message._replace(accepted=asked.accepted)))


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_units_a_factor_of_two_off_are_another_machines_rounding(factor: float) -> None:
    silos, _ = make_regression((7, 30, 12))
    world = build(REGRESSION, silos, sf.PVI(rounds=4, local_optimizer="closed_form", family="full"))
    message = world.server.program.broadcast(world.state, 1, {})
    tensors = {**message.tensors, "units": factor * message.tensors["units"]}
    asked = message._replace(accepted=dict.fromkeys(world.engine.silos, 0), tensors=tensors)
    assert world.engine.silos["silo-1"].handle(ROUND + encode_broadcast(asked))


class Searching:
    """A server that leaves all changes but a share of the first round's, and names a q of another precision each round.

    It looks at what the totals say of `flag`."""

    def __init__(self, world: World, flag: str, damping: float) -> None:
        self._inner: Any = world.server.program
        self._world, self._flag, self._damping = world, flag, damping
        self.precision, self.asked, self.first, self.said = 0.0, 0, 0, 0
        world.server.program = self
        world.engine.run(world.server.round())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def ask(self, precision: float) -> int:
        """What the total says of the flag there."""
        self.precision = precision
        self._world.engine.run(self._world.server.round())
        return self.said

    def broadcast(self, state: Any, index: int, accepted: Any) -> Broadcast:
        said: Broadcast = self._inner.broadcast(state, index, accepted)._replace(round=self.asked)
        if not self.first:
            return said
        q = Natural(torch.zeros(1, dtype=torch.float64), torch.full((1, 1), self.precision, dtype=torch.float64))
        sums = torch.full_like(said.tensors["sums"], float(self.first))
        named = {"q": q.pack(), "units": self._inner.families.units(q), "sums": sums}
        named["dampings"] = torch.full_like(sums, self._damping)
        return said._replace(tensors={**said.tensors, **named})

    def update(self, state: Any, message: Broadcast, total: Any, scale: float) -> tuple[Any, Step]:
        self.said = int(self._inner.tables[message.phase].split(total)[self._flag])
        self.first, self.asked = self.first or message.sum_index, self.asked + 1
        return state, Step(0.0, 0.0, None, message.phase, False)


@pytest.mark.parametrize(
    ("flag", "damping", "guard"),
    [(pvi.TEMPERED, 1.0, g) for g in ("both", "some", "none")] + [(pvi.MOVING, 0.5, g) for g in ("both", "some")],
)
def test_what_a_round_says_of_silos_is_no_search_for_single_sites(
    monkeypatch: pytest.MonkeyPatch, flag: str, damping: float, guard: str
) -> None:
    """A silo tempers its cavity where q is no more precise than its own site, and would move q where that is not far
    more precise than its change. Totals say whether some silo did, and each says so anew two times. some: as often as
    it turns; by halves the largest silo's precision is read to a thousandth, and no other's. none: and totals count
    silos; every one's is."""
    silos, _ = make_regression((8, 12, 17), d=1)

    def fitted(self: Any, message: Broadcast, k: int, part: Any, view: Any) -> Any:  # exactly, in no time
        x = view.rows["x"][: view.size].double()
        site = Natural(torch.zeros(1, dtype=torch.float64), x.mT @ x / NOISE**2)
        _, share = pvi.tempered(self.families.unpack(message.tensors["q"]), part.site)
        return pvi.Finished(site, 0.0, {}, True, share < 1), part.own, 0

    monkeypatch.setattr(pvi.PVIProgram, "_fitted", fitted)
    if guard != "both":
        monkeypatch.setattr(pvi, "_MOST_TURNS", 10**6)
    if guard == "none":
        monkeypatch.setattr(BlockTable, "told", lambda self, sum_: sum_)
    server = Searching(build(REGRESSION, silos, sf.PVI(local_optimizer="closed_form", family="full")), flag, damping)
    known = {p: server.ask(p) for p in (0.1, 1e5)}
    assert list(known.values()) == [3 if guard == "none" else 1, 0]
    while server.asked < (48 if guard == "none" else 20):
        places = sorted(known)
        a, b = max(((a, b) for a, b in pairwise(places) if known[a] != known[b]), key=lambda at: at[1] / at[0])
        known[(a * b) ** 0.5] = server.ask((a * b) ** 0.5)
    found = [(a * b) ** 0.5 for a, b in pairwise(sorted(known)) if known[a] != known[b]]
    each = sorted(float((s["x"].double().square().sum()) / NOISE**2) for s in silos)
    turns = [_turns_at(flag, damping, own) for own in each]
    read = [any(abs(at / own - 1) < 1e-3 for at in found) for own in turns]
    assert read == {"both": [False] * 3, "some": [False, False, True], "none": [True] * 3}[guard]


def _turns_at(flag: str, damping: float, precision: float) -> float:
    """The precision of q at which a silo of this own one turns."""
    if flag == pvi.TEMPERED:
        return damping * precision
    zero, left = torch.zeros(1, dtype=torch.float64), torch.full((1, 1), (1 - damping) * precision, dtype=torch.float64)
    change = Natural(zero, left)

    def further(at: float) -> float:
        q = Natural(zero, torch.full((1, 1), math.exp(at), dtype=torch.float64))
        return distance(q, q.plus(change)) - sf.PVI().tolerance

    return math.exp(brentq(further, math.log(precision) - 5, math.log(precision) + 10))
