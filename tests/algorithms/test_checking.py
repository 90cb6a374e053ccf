"""A predictive check of tables that lie apart: totals of `MixedModel.check`, by one more sum; what it must not tell."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import secure_fvi as sf
from secure_fvi import silo as silo_module
from secure_fvi.algorithms import checking, hiding
from secure_fvi.algorithms.base import FINISH, Broadcast, Step
from secure_fvi.algorithms.checking import CHECK, DRAWS, REPLICATED, CheckedProgram
from secure_fvi.algorithms.kit import Answer
from secure_fvi.checkpoints import Checkpoints
from secure_fvi.driving import Run
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.fitting import build_parties
from secure_fvi.messages import ROUND

DICTIONARY = {
    "falls": {"kind": "integer", "low": 0, "high": 10_000_000},
    "age": {"kind": "number", "low": 0, "high": 1000, "centre": 0.0, "scale": 1.0},
    "ward": {"kind": "category", "levels": ["a", "b", "c"]},
}


def tables(zeros: float = 0.0) -> list[dict[str, Any]]:
    """Three sites whose counts are Poisson's, but for a share of `zeros`."""
    rng = np.random.default_rng(4)
    found = []
    for rows in (40, 30, 50):
        age = rng.uniform(0, 1, rows)
        falls = rng.poisson(np.exp(1.2 + 0.8 * age)) * (rng.uniform(size=rows) >= zeros)
        found.append({"falls": falls, "age": age, "ward": rng.choice(["a", "b", "c"], rows)})
    return found


def model() -> sf.MixedModel:
    return sf.glmm("falls ~ age", "poisson", dictionary=DICTIONARY)


def checked(algorithm: Any, silos: list[dict[str, Any]]) -> sf.Result:
    return sf.fit(model(), silos, algorithm, compile=False)


@pytest.mark.later
@pytest.mark.parametrize(
    "algorithm",
    [sf.PVI(replicates=120), sf.SFVIAvg(rounds=2, local_steps=20, tolerance=0.0, replicates=120)],
)
def test_totals_are_those_of_all_tables(algorithm: Any) -> None:
    silos = tables()
    result = checked(algorithm, silos)
    assert result.replicated is not None
    assert result.replicated.shape == (121, model().numbers)
    rows = {row.name: row for row in result.problem.model.compared(result.replicated, 3).rows}
    falls = np.concatenate([silo["falls"] for silo in silos])
    assert rows["mean"].observed == pytest.approx(falls.mean(), rel=1e-12)
    assert rows["sd"].observed == pytest.approx(falls.std(), rel=1e-12)
    assert rows["share of 0"].observed == np.mean(falls == 0)
    assert torch.equal(result.replicated, result.replicated.round())  # counts, and a row is a record
    alike = {row.name: row for row in result.problem.model.check(result, dict(zip("abc", silos, strict=True))).rows}
    for name, row in alike.items():  # of other draws and other noise: a width of .1 of an interval's error
        assert rows[name].replicated == pytest.approx(row.replicated, abs=0.35 * (row.high - row.low))
    said = result.to_json()["check"]
    assert (said["replicates"], said["rows"][0]["name"]) == (120, "mean")
    without = sf.fit(model(), silos, replace(algorithm, replicates=None), compile=False)
    assert torch.equal(without.posterior["b"].mean, result.posterior["b"].mean)  # of a fit that is what it was
    assert without.replicated is None
    assert "check" not in without.to_json()


@pytest.mark.later
def test_tables_that_the_model_does_not_make_are_told_of() -> None:
    """Half of the counts are zero whatever the rate. The control: those that are not."""
    for zeros in (0.0, 0.5):
        result = checked(sf.PVI(replicates=100), tables(zeros))
        said = str(result.problem.model.compared(result.replicated, 3))
        assert ("the model makes no tables like these" in said and "'share of 0'" in said) == bool(zeros)


@pytest.mark.later
@pytest.mark.filterwarnings("ignore:.*unassessed")
def test_a_fit_that_nobody_assessed_is_not_blamed_on_the_model_alone() -> None:
    """A round from the start. The control: one that converged."""
    short = sf.PVI(rounds=1, local_steps=5, replicates=20)
    for algorithm, assessed in ((short, False), (sf.PVI(replicates=20), True)):
        result = checked(algorithm, tables(0.5))
        assert (result.converged is True) == assessed
        said = result.to_json()["check"]["said"]
        assert "another family or term may" in said
        assert ("or a fit that converged" in said) != assessed


@pytest.mark.later
def test_a_run_that_has_not_converged_is_not_checked() -> None:
    """The control is every other test here."""
    with pytest.warns(sf.SecureFVIWarning, match="max_rounds"):
        result = checked(sf.PVI(max_rounds=1, replicates=10), tables())
    assert result.converged is False
    assert result.replicated is None


def test_whole_totals_come_back_whole() -> None:
    """Also under a mask's quarters of a step, of 3 silos. The control: read without them, no row at 0 is some."""
    block = hiding.block(REPLICATED, (2,), 2.0**40 / 3)
    told = [np.array([0.0, rows]) for rows in (3.0, 0.0, 9000.0)]
    sent = [hiding.hidden(t, np.zeros(2, dtype=bool), block, np.zeros(4)).reshape(2, 2) for t in told]
    total = np.sum(sent, 0)
    assert hiding.read(total, block, 3).tolist() == [0.0, 9003.0]
    assert hiding.read(total, block)[0] > 0


@pytest.mark.later
@pytest.mark.parametrize(("scale", "told"), [(1.0, True), (20_000.0, False)])
def test_sds_that_totals_do_not_tell_are_left_out(scale: float, told: bool) -> None:
    """Of a response that varies by a twenty thousandth of what its dictionary says. The control: the same, well said;
    and what the totals would have told, which is no such sd."""
    rng = np.random.default_rng(2)
    silos = [{"ph": 7.0 + rng.normal(size=n), "ward": rng.choice(["a", "b"], n)} for n in (40, 30, 50)]
    dictionary = {
        "ph": {"kind": "number", "low": 0, "high": 14, "centre": 0.0, "scale": scale},
        "ward": {"kind": "category", "levels": ["a", "b"]},
    }
    of = sf.glmm("ph ~ ward", "gaussian", dictionary=dictionary)
    result = sf.fit(of, silos, sf.PVI(replicates=40), compile=False)
    check = of.checked(result)
    assert check is not None
    rows = {row.name: row.observed for row in check.rows}
    sd = float(np.concatenate([silo["ph"] for silo in silos]).std())
    assert ("sd" in rows, check.small) == ((True, ()) if told else (False, ("sd",)))
    assert ("'sd': too small to tell from totals" in check.said) != told
    naive = {row.name: row.observed for row in of.compared(result.replicated, 3).rows}["sd"]
    assert (naive == pytest.approx(sd, rel=0.01)) == told
    assert rows["mean"] == pytest.approx(7.0, abs=1.0)


def test_no_scale_is_asked_for_of_a_response_that_takes_none() -> None:
    """Of truth values in few groups, whose sd totals do not tell. The control: of numbers it is asked for."""
    columns = {
        "ok": {"kind": "boolean"}, "ph": {"kind": "number", "low": 0, "high": 14},
        "ward": {"kind": "category", "levels": ["a", "b"]},
    }  # fmt: skip
    for formula, family, asked in (
        ("ok ~ 1 + (1 | ward)", "bernoulli", False),
        ("ph ~ 1 + (1 | ward)", "gaussian", True),
    ):
        of = sf.glmm(formula, family, dictionary=columns)
        totals = torch.tensor([[40.0, 2.0, 20.0, 20.0, 1.0, 0.5]] * 3, dtype=torch.float64)
        said = of.compared(totals, 3, step=2.0**-8).said
        assert "by ward': too small to tell from totals" in said
        assert ("give the response a centre and a scale" in said) == asked


def test_what_cannot_be_compared_is_refused() -> None:
    silos = tables()
    with pytest.raises(InputError, match="under differential privacy tables are not compared"):
        sf.fit(
            model(), silos, sf.SFVI(iterations=3, sampling_rate=0.5, replicates=10),
            privacy=sf.RecordDP(epsilon=1.0, delta=1e-5, clipping_norm=1.0), compile=False,
        )  # fmt: skip

    def program(y: torch.Tensor) -> None:
        import pyro
        import pyro.distributions as dist

        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("records", len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    rows = [{"y": torch.randn(9, generator=torch.Generator().manual_seed(k))} for k in range(3)]
    with pytest.raises(InputError, match="for formulas alone"):
        sf.fit(program, rows, sf.PVI(replicates=10), compile=False)
    with pytest.raises(InputError, match="replicates"):
        sf.PVI(replicates=0)
    for algorithm, said in (
        (sf.PVI(replicates=1001), "at most 1000"), (sf.SFVI(iterations=3, replicates=9), "leave out the fixed number"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            sf.fit(model(), tables(), algorithm, compile=False)


def asked_at(program: CheckedProgram, draws: torch.Tensor, index: int = 1, accepted: Any = None) -> Broadcast:
    """A check at these points, and at the prior's q."""
    begun = program._own.broadcast(program._own.init(), 1, {})
    named = {name: begun.tensors[name] for name in program._final.sent}
    return Broadcast(1, index, accepted or {}, program.problem.silos, {}, {**named, DRAWS: draws}, CHECK)


def test_a_server_that_asks_far_out_reads_no_single_silo(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused; and were it not, at a point where the ages of all silos but one make counts that no table holds
    the total says nothing. The control: were out-of-range numbers zero, it would be that silo's own rows, sums and
    squares."""
    silos = [{**t, "age": t["age"] * 0 + age} for t, age in zip(tables(), (0.0, 1.0, 1.0), strict=True)]
    parties = build_parties(model(), silos, sf.PVI(replicates=2), sf.Plain(), compile=False)
    program = parties.server.program
    assert isinstance(program, CheckedProgram)
    far = torch.tensor([[1.0, 60.0]] * 2, dtype=torch.float64)
    message = asked_at(program, far)
    for silo in parties.engine.silos.values():
        with pytest.raises(ProtocolError, match="draws that the server names for the check are not near the final q"):
            program.answer(message, silo.local, silo.view)
    monkeypatch.setattr(checking, "within", lambda *_: math.inf)
    sent, own = [], {}
    for name, silo in parties.engine.silos.items():
        found = program.answer(message, silo.local, silo.view)
        assert isinstance(found, Answer)
        sent.append(found.blocks[REPLICATED])
        at = program.move(far)
        own[name] = model().replicated(
            program.problem, at, {n: v[: silo.view.size] for n, v in silo.view.rows.items()}, 1
        )
    total = np.sum(sent, 0)
    assert hiding.unreadable(total, program._block).all()
    out = [bool((numbers.abs() > hiding.told_up_to(program._block)).any()) for numbers in own.values()]
    assert out == [False, True, True]
    control = sum(
        torch.where(numbers.abs() > hiding.told_up_to(program._block), 0.0, numbers) for numbers in own.values()
    )
    first = next(iter(own.values()))
    assert torch.equal(control[1:, 2:4], first[1:, 2:4])
    assert float(first[1, 2]) > 0


def _falls() -> tuple[Any, list[dict[str, Any]], torch.Tensor]:
    """A model, three silos' people with their ages, and a step before each age."""
    of = sf.glmm("fell ~ age", "bernoulli", dictionary={
        "fell": {"kind": "boolean"}, "age": {"kind": "number", "low": 0, "high": 100, "centre": 0.0, "scale": 1.0},
    })  # fmt: skip
    rng = np.random.default_rng(1)
    silos = [{"fell": rng.integers(0, 2, n).astype(bool), "age": rng.integers(20, 60, n) + 0.0} for n in (20, 15, 12)]
    steps = torch.arange(20, 61, dtype=torch.float64) - 0.5
    return of, silos, steps


@pytest.mark.parametrize("held", [True, False])
def test_a_check_at_other_points_is_refused_and_would_tell_rows(held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slopes that are steps count the rows past each age, so that one total would tell all ages. The control: a silo
    that answers at any points, before any other question, as was shipped."""
    of, silos, steps = _falls()
    parties = build_parties(of, silos, sf.PVI(replicates=len(steps)), sf.Masked(), compile=False)
    program = parties.server.program
    assert isinstance(program, CheckedProgram)
    far = 1e7 * torch.stack([-steps, torch.ones_like(steps)], 1)
    assert [site.name for site in program.problem.layout.of("global")] == ["b"]
    monkeypatch.setattr(program, "broadcast", lambda state, index, accepted: asked_at(program, far, index, accepted))
    seen: list[Any] = []
    monkeypatch.setattr(program, "step", lambda state, message, sums, scale: seen.append(sums) or 1 / 0)
    if not held:
        monkeypatch.setattr(checking, "within", lambda *_: math.inf)
        monkeypatch.setattr(silo_module.Silo, "_final", lambda self, past, broadcast: past.final)
    with pytest.raises(ProtocolError if held else ZeroDivisionError, match="was not asked" if held else "zero"):
        parties.engine.run(parties.server.round())
    assert bool(seen) != held
    if not held:
        past = hiding.read(seen[0][REPLICATED], program._block, 3)[1:, 2]
        ages = np.sort(np.concatenate([silo["age"] for silo in silos]))
        assert np.repeat(steps[:-1] + 0.5, np.rint(past[:-1] - past[1:]).astype(int)).tolist() == ages.tolist()


@pytest.mark.parametrize("led", [True, False])
def test_where_the_final_q_is_the_servers_a_check_tells_rows(led: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not protected, as the threat model says: SFVI's final sum may name any q, so that steps near it are answered and
    two sums, before any round, count the rows past each age. The control: the same steps, far from the q named."""
    of, silos, steps = _falls()
    parties = build_parties(of, silos, sf.SFVI(replicates=len(steps)), sf.Masked(), compile=False)
    program = parties.server.program
    assert isinstance(program, CheckedProgram)
    q = {name: value.clone() for name, value in program._final.sent.items() if isinstance(value, torch.Tensor)}
    assert q.keys() == program._final.sent.keys()
    if led:
        q["eta/loc"], q["eta/log_scale"] = torch.tensor([-4000.0, 100.0]), torch.full((2,), math.log(500.0))
    seen: list[Any] = []

    def asked(state: Any, index: int, accepted: Any) -> Broadcast:
        message = Broadcast(1, index, accepted, program.problem.silos, {}, q, FINISH)
        draws = 100.0 * torch.stack([-steps, torch.ones_like(steps)], 1)
        return message._replace(phase=CHECK, tensors={**q, DRAWS: draws}) if seen else message

    def kept(state: Any, message: Broadcast, sums: Any, scale: float) -> Any:
        seen.append(sums)
        return state, Step(math.nan, 0.0, None, CHECK, False)

    monkeypatch.setattr(program, "broadcast", asked)
    monkeypatch.setattr(program, "step", kept)
    parties.engine.run(parties.server.round())
    if not led:
        with pytest.raises(ProtocolError, match="are not near the final q"):
            parties.engine.run(parties.server.round())
        return
    parties.engine.run(parties.server.round())
    past = hiding.read(seen[1][REPLICATED], program._block, 3)[1:, 2]
    ages = np.sort(np.concatenate([silo["age"] for silo in silos]))
    assert np.repeat(steps[:-1] + 0.5, np.rint(past[:-1] - past[1:]).astype(int)).tolist() == ages.tolist()


@pytest.mark.parametrize("forgotten", ["what the final sum named", "that it tells a likelihood"])
def test_a_sum_after_the_final_one_cannot_forget_what_holds_it(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the check did when it was new. The control is every other job."""
    if forgotten == "that it tells a likelihood":
        declared = checking.declared
        monkeypatch.setattr(
            checking, "declared", lambda *args: tuple(replace(said, likelihood=False) for said in declared(*args))
        )
    else:
        sums = CheckedProgram.sums
        monkeypatch.setattr(
            CheckedProgram, "sums",
            lambda self: {name: one._replace(sent={}) if name == CHECK else one for name, one in sums(self).items()},
        )  # fmt: skip
    with pytest.raises(TypeError, match="'check' is asked after 'finish'"):
        build_parties(model(), tables(), sf.PVI(replicates=5), sf.Masked(), compile=False)


@pytest.mark.later
def test_encrypted_totals_are_the_plain_ones() -> None:
    plain, encrypted = (
        sf.fit(model(), tables(), sf.PVI(replicates=20), sums, compile=False).replicated
        for sums in (sf.Plain(), sf.Homomorphic())
    )
    assert plain is not None
    assert encrypted is not None
    assert torch.equal(plain, encrypted)
    assert float(plain[0, 0]) == 120


@pytest.mark.later
@pytest.mark.filterwarnings("ignore:.*unassessed")
def test_a_check_that_lacks_a_silo_tells_nothing_and_the_fit_stands() -> None:
    """Its answer is lost: numbers of three tables of four would be held against all. The control: none is lost."""
    algorithm = sf.SFVIAvg(rounds=2, local_steps=5, tolerance=0.0, replicates=20)
    fourth = tables()[0]
    silos = [*tables(), {**fourth, "age": fourth["age"] / 2}]
    found = []
    for lost in (True, False):
        parties = build_parties(model(), silos, algorithm, sf.Masked(max_missing=1), compile=False)
        while parties.server.state.algorithm.phase != CHECK:
            parties.engine.run(parties.server.round())
        before = parties.server.program.posterior(parties.server.state.algorithm)
        exchanges = parties.server.round()
        messages = next(exchanges)
        with contextlib.suppress(StopIteration):
            while True:
                replies = parties.engine.exchange(messages)
                if lost and next(iter(messages.values()))[:1] == ROUND:
                    del replies["silo-2"]
                messages = exchanges.send(replies)
        state = parties.server.state.algorithm
        after = parties.server.program.posterior(state)
        assert torch.equal(before.draws(5, 1), after.draws(5, 1))
        found.append(parties.server.program.replicated(state))
    assert found[0] is None
    assert found[1] is not None
    assert float(found[1][0, 0]) == sum(len(silo["age"]) for silo in silos)


@pytest.mark.later
@pytest.mark.filterwarnings("ignore:.*unassessed")
def test_a_run_that_stops_before_its_check_makes_it(tmp_path: Path) -> None:
    algorithm = sf.SFVIAvg(rounds=2, local_steps=5, tolerance=0.0, replicates=20)
    first, again = (build_parties(model(), tables(), algorithm, sf.Plain(), compile=False) for _ in range(2))
    kept = Checkpoints(tmp_path, 0.0)
    run = Run(first, lambda _: None, kept)
    while first.server.state.algorithm.phase != CHECK:
        next(run)
    rest = Run(again, lambda _: None, kept, resume=True)
    assert again.server.state.algorithm.phase == CHECK
    assert again.server.program.replicated(again.server.state.algorithm) is None
    next(run)
    next(rest)
    whole, resumed = (p.server.program.replicated(p.server.state.algorithm) for p in (first, again))
    assert whole is not None
    assert resumed is not None
    assert torch.equal(whole, resumed)
