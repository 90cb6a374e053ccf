"""Attacks on vertical runs: labels from pulls, columns from what is sent, with and without protection."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.integrate import trapezoid
from scipy.linalg import qr
from torch import Tensor

import secure_fvi as sf
from secure_fvi.aggregation.base import SecureSum
from secure_fvi.algorithms.vertical import Bernoulli, Gaussian, Likelihood, Poisson, Vertical, shared_batch
from secure_fvi.algorithms.vertical.likelihoods import slopes
from secure_fvi.audits.scores import RATES, auc, auc_bound, tpr_bound
from secure_fvi.audits.vertical import (
    LABEL_ATTACKS,
    Game,
    World,
    _each_round,
    column_rows,
    guess_labels,
    label_rows,
    matching_rows,
    member_row,
    play,
    pulls,
    record,
)
from secure_fvi.errors import InputError
from secure_fvi.fitting import build_parties
from secure_fvi.models.vertical_programs import VerticalDataset, linear, make_data
from secure_fvi.privacy.accountants import of_group

EPSILON, DELTA = 1.0, 1e-5


def _made(kind: str, people: int = 400) -> tuple[VerticalDataset, Bernoulli, Vertical, SecureSum, sf.RecordDP | None]:
    """Three silos with a private response, or with one that silos alone know."""
    made, ids = make_data(0, people, 6), ("bank", "clinic", "insurer")
    silos = {n: {"x": x} for n, x in zip(ids, made.by_silo(3), strict=True)}
    data = VerticalDataset(silos, dict.fromkeys(ids, linear), made.y)
    response: Any = "silos" if kind == "silos" else "private"
    config = Vertical(response=response, rho=1.0, rounds=60, learning_rate=0.05)
    privacy = sf.RecordDP(epsilon=EPSILON, delta=DELTA, clipping_norm=2.0) if kind == "dp" else None
    return data, Bernoulli(), config, sf.Plain() if kind == "plain" else sf.Masked(), privacy


@functools.lru_cache(maxsize=4)
def _world(kind: str) -> World:
    return record(*_made(kind), simulated=True)


@functools.lru_cache(maxsize=6)
def _game(kind: str, whole: bool) -> Game:
    return play(*_made(kind, 480), whole=whole, simulated=True)


def test_a_private_response_is_given_away_without_privacy() -> None:
    """The paper's second setting: masks protect the silos, not the labels. AUC of at least .99 by sign, by cosine."""
    for kind in ("plain", "masked"):
        rows = {row.attack: row for row in label_rows(kind, _world(kind), _world("plain"), None, DELTA)}
        assert set(rows) == {f"labels, {attack}" for attack in LABEL_ATTACKS}
        assert all(row.valid and row.finding == "leaks" for row in rows.values())
        assert rows["labels, sign"].value >= 0.99
        assert rows["labels, cosine"].value >= 0.99


def test_under_privacy_the_labels_stay_below_the_bound() -> None:
    for row in label_rows("DP", _world("dp"), _world("plain"), EPSILON, DELTA):
        assert row.valid
        assert row.value <= row.detail["bound"]
        assert row.value < 0.65


def test_columns() -> None:
    """From a silo's own z_j in a plain sum; under masks from totals alone; under privacy from neither."""
    plain, masked, private = (
        {r.attack: r for r in column_rows(kind, _world(kind), _world("plain"))} for kind in ("plain", "masked", "dp")
    )
    assert plain["columns from messages"].value > 0.9
    assert masked["columns from messages"].finding == "nothing found"
    assert masked["columns from totals"].finding == "leaks"
    assert all(row.finding == "nothing found" and row.valid for row in private.values())


@pytest.mark.slow
def test_totals_tell_columns_whoever_knows_the_response() -> None:
    """As of a private response; a sum after the rounds is no round of theirs."""
    rows = {r.attack: r for r in column_rows("masked", _world("silos"), _world("plain"))}
    assert rows["columns from totals"].finding == "leaks"


def _zeros_and_ones(seen: npt.NDArray[Any], most: int) -> list[npt.NDArray[Any]]:
    """The columns of zeros and ones in the span of what was `seen` of each person (N, R), of at most `most` dimensions:
    as many people as there are dimensions, each a zero or a one, say what all others have."""
    left, sizes, _ = np.linalg.svd(seen, full_matrices=False)
    base = left[:, : min(most, int((sizes > 1e-6 * sizes[0]).sum()))]
    people = qr(base.T, pivoting=True)[2][: base.shape[1]]
    solved = base @ np.linalg.inv(base[people])
    tried = (solved @ np.array(bits) for bits in itertools.product((0.0, 1.0), repeat=len(people)))
    return [v.round() for v in tried if v.max() > 0.5 and np.minimum(abs(v), abs(v - 1)).max() < 0.01]


def _sums_behind(pulled: npt.NDArray[Any], model: Likelihood, config: Vertical, y: Tensor) -> npt.NDArray[Any]:
    """(N, R) the sums of predictors, and the intercept, at which people with the response `y` (N,) have such pulls,
    which fall as the sum rises; nan where no sum is so."""
    likelihood = config.resolved(model).seen_by_holder(model, 3)
    pull, y = torch.from_numpy(pulled.reshape(-1)), y.repeat_interleave(pulled.shape[1])
    low = torch.full((len(pull), 1), -25.0).double()
    high, nothing, weights = -low / 2, torch.zeros_like(pull), torch.ones_like(pull)
    for _ in range(60):
        middle = (low + high) / 2
        at = slopes(likelihood, y, nothing, middle, pull.new_zeros(1), weights).predictor
        low, high = torch.where(at > pull[:, None], middle, low), torch.where(at > pull[:, None], high, middle)
    inside = (low > -24.9) & (low < 12.4)
    found: npt.NDArray[Any] = torch.where(inside, low, torch.nan).reshape(pulled.shape).numpy()
    return found


@pytest.mark.parametrize("kind", ["yes or no", "normal", "dp"])
def test_totals_tell_columns_of_yes_and_no_to_who_knows_nobody(kind: str) -> None:
    """Of three silos with one such column each, all are read off masked totals of an honest run, for each person
    exactly: by the server from sums, and by every silo from pulls. The controls: normal columns in their place, of
    which none is found, and the same under privacy."""
    people, rng = 300, np.random.default_rng(8)
    secret = (rng.random((people, 3)) < (0.5, 0.2, 0.05)).astype(float)
    normal = rng.normal(size=(people, 6))
    columns = normal[:, :3] if kind == "normal" else secret
    ids = ("bank", "clinic", "insurer")
    silos = {n: {"x": torch.from_numpy(np.stack([columns[:, j], normal[:, 3 + j]], 1))} for j, n in enumerate(ids)}
    y = torch.from_numpy((normal[:, 3] + secret[:, 0] + rng.logistic(size=people) > 0).astype(float))
    data, config = VerticalDataset(silos, dict.fromkeys(ids, linear), y), Vertical(response="private", rounds=30)
    privacy = sf.RecordDP(epsilon=8.0, delta=DELTA, clipping_norm=2.0) if kind == "dp" else None
    transcript = record(data, Bernoulli(), config, sf.Masked(), privacy, simulated=True).transcript
    by_server = _zeros_and_ones(_each_round(transcript, None), 6)
    pulled = pulls(transcript)
    labels = torch.from_numpy(pulled[:, 0] > 0).double()
    by_silo = _zeros_and_ones(pulled if kind == "dp" else _sums_behind(pulled, Bernoulli(), config, labels), 7)
    for found in (by_server, by_silo):
        told = [any(np.array_equal(v, column) for v in found) for column in secret.T]
        assert told == [kind == "yes or no"] * 3
    assert len(by_server) == (3 if kind == "yes or no" else 0)


def _counts(pulled: npt.NDArray[Any], config: Vertical) -> npt.NDArray[Any]:
    """(N,) the counts at which everybody's sums, over the rounds, are in one space of few dimensions. It is found from
    some of those whose pulls are all below zero, most of whom have a count of none."""
    sums = [_sums_behind(pulled, Poisson(), config, torch.full((len(pulled),), float(y))) for y in range(12)]
    rng, none, best = np.random.default_rng(1), np.flatnonzero(pulled.max(1) < 0), np.zeros((len(pulled), 1))
    explained = -1
    for _ in range(200):
        space = np.linalg.svd(sums[0][rng.choice(none, 7, replace=False)], full_matrices=False)[2]
        left = np.stack([np.linalg.norm(s - s @ space.T @ space, axis=1) for s in sums], 1)
        if (count := int((np.nan_to_num(left, nan=1.0) < 1e-6).any(1).sum())) > explained:
            explained, best = count, np.nan_to_num(left, nan=1.0)
    return best.argmin(1)


@pytest.mark.parametrize("private", [False, True])
def test_pulls_tell_values_to_a_silo_that_knows_no_other_predictor(private: bool) -> None:
    """Of a response at the server: numbers nearly, by the first pull, when predictors are still small; counts exactly,
    as all pulls of a person have to follow from one. The control is the same run under privacy."""
    people, rng, ids = 200, np.random.default_rng(0), ("bank", "clinic", "insurer")
    columns = rng.normal(size=(people, 6))
    silos = {n: {"x": torch.from_numpy(x)} for n, x in zip(ids, np.split(columns, 3, 1), strict=True)}
    mean = 0.4 * columns.sum(1)
    config = Vertical(response="private", rounds=20, rho=0.5)
    privacy = sf.RecordDP(epsilon=EPSILON, delta=DELTA, clipping_norm=2.0) if private else None

    def seen(model: Likelihood, y: npt.NDArray[Any]) -> npt.NDArray[Any]:
        data = VerticalDataset(silos, dict.fromkeys(ids, linear), torch.from_numpy(y))
        return pulls(record(data, model, config, sf.Masked(), privacy, simulated=True).transcript)

    numbers = mean + rng.normal(size=people)
    first = np.corrcoef(seen(Gaussian(), numbers)[:, 0], numbers)[0, 1] ** 2
    assert first < 0.1 if private else first > 0.97, first
    counts = rng.poisson(np.exp(mean - 0.5)).clip(max=11).astype(float)
    pulled = seen(Poisson(), counts)
    if private:
        assert np.corrcoef(pulled.mean(1), counts)[0, 1] ** 2 < 0.1
    else:
        assert (_counts(pulled, config) == counts).mean() > 0.99


def test_labels_that_silos_alone_know_are_not_in_what_the_server_sees() -> None:
    """Labels of coins, which columns say nothing of. The server sees sums of predictors of all people, whose means say
    what the model fitted. The control: gradients of batches, by which such sums would move too, and which silos that
    are not told the response sum up, are a system of equations for the labels, which is solved exactly. So batches are
    refused."""
    people, rounds, rng = 16, 20, torch.Generator().manual_seed(3)
    x = torch.randn(people, 2, generator=rng).double()
    y = torch.bernoulli(torch.full((people,), 0.5), generator=rng).double()
    config = Vertical(response="silos", rounds=rounds, learning_rate=0.05)
    silos = [{"x": column} for column in x.split(1, 1)]
    parties = build_parties(sf.Columns(Bernoulli(), y), silos, config, sf.Plain(), compile=False)
    likelihood = config.resolved(Bernoulli()).seen_by_holder(Bernoulli(), 2)
    seen, equations, told = np.zeros((rounds, people)), np.zeros((rounds, people)), np.zeros(rounds)
    for at in range(rounds):
        parties.engine.run(parties.server.round())
        total, who = parties.server.state.algorithm.total, shared_batch(0, at, people, 8)
        seen[at], s = total[:, 0].numpy(), total[torch.from_numpy(who)]

        def pull(labels: Tensor, s: Tensor = s) -> Tensor:
            nothing = torch.zeros_like(labels)
            return slopes(likelihood, labels, nothing, s, s.new_zeros(1), torch.ones_like(labels)).predictor[:, 0]

        if_one, if_none = (pull(torch.full((8,), value).double()) for value in (1.0, 0.0))
        equations[at, who] = (if_one - if_none).numpy()
        told[at] = float((pull(y[torch.from_numpy(who)]) - if_none).sum())

    def score(guess: npt.NDArray[Any]) -> float:
        return float(auc(y.numpy(), guess, np.arange(people)).value)

    assert score(np.linalg.lstsq(equations, told, rcond=None)[0]) == 1.0
    assert max(score(seen[half:].mean(0)) for half in (0, rounds // 2)) < 0.8


@pytest.mark.parametrize("response", ["private", "silos"])
def test_no_server_names_how_long_a_silos_steps_are(response: Any) -> None:
    """Nor which rounds are averaged: both follow from the round. Steps of 2^20 times the job's, as a server could name,
    tell what moved a predictor past the noise of its draws. The control is another sum, or pull, which is its to name,
    and moves them."""
    rng = torch.Generator().manual_seed(4)
    y = torch.bernoulli(torch.full((20,), 0.5), generator=rng).double()
    silos = [{"x": torch.randn(20, 2, generator=rng).double()} for _ in range(3)]
    config = Vertical(response=response, rounds=3, learning_rate=0.05)

    def totals(**named: Any) -> list[Tensor]:
        parties = build_parties(sf.Columns(Bernoulli(), y), silos, config, sf.Masked(), compile=False)
        broadcast, found = parties.server.program.broadcast, list[Tensor]()

        def lying(*state: Any) -> Any:
            said = broadcast(*state)
            tensors = {n: v * named.get("times", 1) for n, v in said.tensors.items()}
            scalars = {**said.scalars, **{n: v for n, v in named.items() if n in said.scalars}}
            return said._replace(scalars=scalars, tensors=tensors)

        parties.server.program.broadcast = lying  # type: ignore[method-assign]
        for _ in range(config.rounds):
            parties.engine.run(parties.server.round())
            found.append(parties.server.state.algorithm.total)
        return found

    honest = totals()
    assert all(map(torch.equal, honest, totals(scale=2.0**20, averaging=1.0)))
    assert not all(map(torch.equal, honest, totals(times=-1)))


@pytest.mark.parametrize("lies", [False, True])
def test_the_last_sum_of_a_response_at_a_silo_tells_labels_by_its_digits(lies: bool) -> None:
    """q(gamma) follows from labels and from sums that the server knows, by no noise: one that knows all labels but six
    has these, and one that names sums those of six people of its choice, of whom it knows nobody's, nor the others',
    but how many ones there are among these. The control: to three digits, as a table prints it, several answers fit."""
    people, rounds, rng = 50, 8, torch.Generator().manual_seed(4)
    y = torch.bernoulli(torch.full((people,), 0.5), generator=rng).double()
    silos = [{"x": torch.randn(people, 2, generator=rng).double()} for _ in range(3)]
    config = Vertical(response="silos", rounds=rounds, learning_rate=0.05)
    parties = build_parties(sf.Columns(Bernoulli(), y), silos, config, sf.Masked(), compile=False)
    program, sums, broadcast = parties.server.program, list[Tensor](), parties.server.program.broadcast
    named = torch.full((people, 1), -44.0).double()  # so far out that a pull is the label
    named[:6, 0] = -4.0 - torch.arange(6).double()  # and not quite, for each of these by so much

    def lying(*state: Any) -> Any:
        said = broadcast(*state)
        sums.append(named if lies else said.tensors["sum"])
        return said._replace(tensors={"sum": sums[-1]})

    program.broadcast = lying  # type: ignore[method-assign]
    for _ in range(rounds + 1):
        parties.engine.run(parties.server.round())
    average = parties.server.state.algorithm.average
    told = torch.cat([average["loc"], average["log_scale"]])
    core = program._gamma_core()

    def if_so(labels: Tensor) -> Tensor:
        q, kept = core.init(), list[Tensor]()
        for at in range(rounds):
            noise, scale = program._gamma_noise(at), told.new_tensor(config.multiplier(at))
            gamma = core.gamma(q.eta, noise)
            zero = torch.zeros_like(labels)
            found = slopes(core.likelihood, labels, zero, sums[at + 1], gamma, torch.ones_like(labels))
            q = core.update(q, found.gamma, noise, scale)[0]
            kept += [torch.cat([q.eta["loc"], q.eta["log_scale"]])] * config.averages(at)
        return torch.stack(kept).mean(0)

    others = y[6:].sort().values if lies else y[6:]
    bits = [torch.tensor(b).double() for b in itertools.product((0.0, 1.0), repeat=6)]
    off = torch.stack([(if_so(torch.cat([b, others])) - told).abs().max() for b in bits])
    assert torch.equal(bits[int(off.argmin())], y[:6])
    assert float(off.min()) < 1e-10 < 1e-8 < float(off.sort().values[1])
    assert int((off < 1e-3).sum()) > 1


@pytest.mark.parametrize("whole", [False, True])
def test_totals_tell_who_takes_part(whole: bool) -> None:
    """Two people of whom one has a place, told apart by totals and pulls: always under masks, about as often as a coin
    at epsilon = 1, and then at most as often as (epsilon, delta) allows, of three silos and the response together four
    times epsilon. The control is in each row: the same game in plain sums, and coins tossed again. Noise is drawn anew:
    an AUC of .65 of coins is 4 standard errors, once in 30,000 runs."""
    masked, private = (
        member_row(kind, _game(kind, whole), _game("plain", whole), of, DELTA)
        for kind, of in (("masked", None), ("dp", EPSILON))
    )
    assert masked.valid
    assert masked.finding == "leaks"
    assert masked.value > 0.99
    assert "bound" not in masked.detail
    assert private.valid
    assert private.value < 0.65 < private.detail["bound"]
    assert private.detail["institutions"] == (4 if whole else 1)
    for rate in RATES:
        assert private.detail[f"tpr_at_fpr_{rate:g}"][0] < masked.detail[f"tpr_at_fpr_{rate:g}"][0]
        assert rate < private.detail[f"tpr_bound_at_fpr_{rate:g}"] < 1
    assert private.detail["tpr_at_fpr_0.1"][1] < private.detail["tpr_bound_at_fpr_0.1"]


def test_matching_tells_of_a_list_and_of_nobody_else() -> None:
    """All parties but one, which pool what they have: of identifiers that they list each is known to be in that one's
    list or not, of others nothing. The control, a keyed hash that silos share, is opened for all."""
    listed, others = matching_rows()
    assert listed.valid
    assert others.valid
    assert (listed.value, listed.finding) == (1.0, "leaks")
    assert (others.value, others.finding) == (0.5, "nothing found")
    assert listed.positive_control == others.positive_control == 1.0
    assert "no differential privacy bounds it" in listed.detail["note"]


def test_true_positives_stay_under_the_curve() -> None:
    """Of a mechanism that attains it, randomised response, and of groups of records by their composition."""
    for epsilon in (0.5, 2.0):
        right = np.exp(epsilon) / (1 + np.exp(epsilon))
        assert tpr_bound(epsilon, 0.0, 1 - right) == pytest.approx(right)
        assert tpr_bound(epsilon, 0.0, 0.0) == 0.0
        assert tpr_bound(epsilon, 0.1, 1.0) == 1.0
    assert of_group(1.0, 1e-5, 1) == pytest.approx((1.0, 1e-5))
    assert of_group(0.5, 1e-5, 3) == pytest.approx((1.5, 1e-5 * (1 + np.exp(0.5) + np.exp(1.0))))
    assert of_group(0.0, 0.4, 3) == (0.0, 1.0)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.0), (1.0, 1e-3), (4.0, 0.05)])
def test_the_bound_is_the_area_under_the_curve(epsilon: float, delta: float) -> None:
    x = np.linspace(0, 1, 200_001)
    curve = np.minimum(1.0, np.minimum(delta + np.exp(epsilon) * x, 1 - np.exp(-epsilon) * (1 - delta - x)))
    assert auc_bound(epsilon, delta) == pytest.approx(trapezoid(curve, x), abs=1e-5)


def test_bad_input() -> None:
    with pytest.raises(InputError, match="unknown"):
        guess_labels("guess", np.ones((4, 2)), np.array([0.0, 1.0, 0.0, 1.0]))
