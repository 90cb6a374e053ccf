"""Partitioned VI whose noise is in the steps of local fits (`PVI(private="steps")`): what it costs, and what it gives.

That each step moves by a clipping norm at most is in test_conditional_sensitivity.py.
"""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from programs import make_intercepts
from torch import Tensor

import secure_fvi as sf
from secure_fvi.aggregation.base import Block, FloatArray
from secure_fvi.algorithms import noised_fit
from secure_fvi.audits import epsilon
from secure_fvi.cli.policy import disclosure_lines
from secure_fvi.disclosure import disclose
from secure_fvi.errors import AggregationError, BudgetError, InputError, ProtocolError
from secure_fvi.fitting import build_parties
from secure_fvi.privacy.gate import Gate, NoiseSource
from secure_fvi.privacy.ledger import Ledger
from secure_fvi.privacy.ledger_terms import Budget
from secure_fvi.privacy.plan import plan
from secure_fvi.privacy.report import read_report
from secure_fvi.privacy.terms import Extent, Terms, agree
from secure_fvi_lab.bench import coverage, pvi_private

CHANGE, NUMBERS, STEPS, CLIP = 5, 3, 4, 2.0
pytestmark = pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")


def stepped(multiplier: float = 1.5, rate: float = 1.0, rounds: int = 3) -> Terms:
    asked = sf.RecordDP(noise_multiplier=multiplier, clipping_norm=CLIP, noise="silo", retries=0)
    return agree(asked, 3, rate, rounds, Extent(CHANGE, NUMBERS, 0), STEPS)


def make_gate(terms: Terms, noise: NoiseSource | None = None, paid: list[int] | None = None) -> Gate:
    charge = (paid if paid is not None else []).append
    tables = {"round": terms.table([Block("change", (CHANGE,), 1.0)], [])}
    gate = Gate("here", tables, {"round": terms}, lambda _, index: charge(index), noise or NoiseSource(b"test"))
    gate.begin(1, "round", 3)
    return gate


def sums_of(gate: Gate, rows: Tensor, index: int = 1) -> list[FloatArray]:
    """Those of a fit that looks at `rows` in each step."""
    found: list[FloatArray] = []

    def fit(noised_sum: Any) -> FloatArray:
        found.extend(noised_sum([rows]).numpy() for _ in range(STEPS))
        return np.zeros(CHANGE)

    gate.begin(index, "round", 3)
    gate.release_fit(fit)
    return found


def test_each_step_has_all_of_the_noise_and_one_of_its_own() -> None:
    """2,000 numbers of known sd: the false alarm of 4.9 standard errors is one in a million."""
    gate = make_gate(stepped(), NoiseSource())
    noise = np.array([sums_of(gate, torch.zeros(0, NUMBERS), k) for k in range(1, 168)])
    assert noise.std() == pytest.approx(1.5 * CLIP, rel=4.9 / np.sqrt(2 * noise.size))
    by_step = noise.swapaxes(0, 1).reshape(STEPS, -1)
    assert np.abs(np.corrcoef(by_step) - np.eye(STEPS)).max() < 4.9 / np.sqrt(by_step.shape[1])
    alike = make_gate(stepped(), NoiseSource(b"key"))
    one = sums_of(alike, torch.zeros(0, NUMBERS))
    assert len({tuple(s) for s in one}) == STEPS


def test_records_of_a_step_are_clipped_and_what_is_not_finite_counts_as_nothing() -> None:
    gate = make_gate(stepped())
    rows = torch.tensor([[3e9, 0.0, 0.0], [0.0, 1.0, 0.0], [float("nan")] * 3])
    with_rows, without = sums_of(gate, rows), sums_of(gate, torch.zeros(0, NUMBERS))
    assert gate.dropped == STEPS
    for a, b in zip(with_rows, without, strict=True):
        assert a - b == pytest.approx([CLIP, 1.0, 0.0], abs=1e-4)  # a number is rounded to a grid of its noise


def test_a_party_of_unfit_data_sends_what_noise_alone_leads_to() -> None:
    gate = make_gate(stepped())
    without = sums_of(gate, torch.zeros(0, NUMBERS))
    gate.deaf = True
    assert np.array_equal(sums_of(gate, torch.ones(7, NUMBERS)), without)
    gate.begin(2, "round", 3)
    with pytest.raises(AggregationError, match="could not be made"):  # a change of nothing, without noise, would tell
        gate.release_nothing()


def test_no_step_goes_around_what_is_charged() -> None:
    paid: list[int] = []
    gate, kept = make_gate(stepped(), paid=paid), list[Any]()

    def keeps(noised_sum: Any) -> FloatArray:
        kept.append(noised_sum)
        return np.zeros(CHANGE)

    gate.release_fit(keeps)
    assert paid == [1]
    with pytest.raises(AggregationError, match="asks for another"):
        kept[0]([])
    gate.begin(2, "round", 3)
    with pytest.raises(AggregationError, match="4 noised steps asks for another"):
        gate.release_fit(lambda noised_sum: np.stack([noised_sum([]) for _ in range(STEPS + 1)]))
    with pytest.raises(ProtocolError, match="releases once"):
        gate.release_fit(keeps)
    gate.begin(3, "round", 3)
    with pytest.raises(AggregationError, match="2 gradients for 3"):
        gate.release_fit(lambda noised_sum: noised_sum([torch.zeros(1, 2)]).numpy())
    gate.begin(4, "round", 3)
    with pytest.raises(AggregationError, match=r"where .* were declared"):
        gate.release_fit(lambda noised_sum: np.zeros(CHANGE + 1))
    assert paid == [1, 2, 3]  # of the last no record was looked at


@pytest.mark.parametrize("other", ["change", "records", "hidden", "fit of a change"])
def test_terms_of_steps_are_those_of_no_other_release(other: str) -> None:
    gate = make_gate(stepped())
    if other == "fit of a change":
        asked = sf.RecordDP(noise_multiplier=1.5, clipping_norm=CLIP, noise="silo", retries=0)
        gate = make_gate(agree(asked, 3, 1.0, 3, Extent(CHANGE, 0, 0)))
    ways: dict[str, Any] = {
        "change": lambda: gate.release_change(torch.zeros(CHANGE)),
        "records": lambda: gate.release_records([], None, []),
        "hidden": lambda: gate.hidden_sum("round", torch.zeros(2, NUMBERS)),
        "fit of a change": lambda: gate.release_fit(lambda _: np.zeros(CHANGE)),
    }
    with pytest.raises(AggregationError):
        ways[other]()


# ---- runs ----


def _regression(x: Tensor, y: Tensor) -> None:
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Normal(x @ beta, 1.0), obs=y)


MODEL = sf.FederatedModel(_regression, "row")


def _rows(count: int = 60, silos: int = 3) -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(4)
    x = torch.randn(count, 2, generator=rng, dtype=torch.float64)
    y = x @ torch.tensor([0.5, -0.3], dtype=torch.float64) + torch.randn(count, generator=rng, dtype=torch.float64)
    return [{"x": x[j::silos], "y": y[j::silos]} for j in range(silos)]


def dp(**options: Any) -> sf.RecordDP:
    return sf.RecordDP(**{"noise_multiplier": 2.0, "clipping_norm": 4.0, "noise": "silo", "retries": 0, **options})


def by_steps(**options: Any) -> sf.PVI:
    rate = {} if "local_optimizer" in options else {"scale_rate": 0.5}
    return sf.PVI(**{"rounds": 2, "private": "steps", "local_steps": 5, **rate, **options})


def _wide(x: Tensor, y: Tensor) -> None:
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 10.0).to_event(1))
    with pyro.plate("row", len(x)):
        pyro.sample("y", dist.Normal(x @ beta, 1.0), obs=y)


def _exact(silos: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = (torch.cat([s[name] for s in silos]) for name in ("x", "y"))
    covariance = torch.linalg.inv(torch.eye(2, dtype=torch.float64) + x.mT @ x)
    return covariance @ x.mT @ y, covariance.diagonal().sqrt()


@pytest.mark.parametrize("options", [{}, {"family": "diagonal", "sampling_rate": 0.5}])
def test_with_little_noise_the_posterior_is_the_exact_one(options: Any) -> None:
    """The control: at a norm that cuts gradients it is not."""
    silos, ends = _rows(), []
    mean, sd = _exact(silos)
    for norm in (100.0, 0.02):
        algorithm = by_steps(rounds=6, local_steps=60, learning_rate=0.1, **options)
        privacy = dp(noise_multiplier=1e-5, clipping_norm=norm)
        # By fresh coins of batches the first is .08 to .16 in most runs, and was over .3 in one.
        result = sf.fit(MODEL, silos, algorithm, sf.Plain(), privacy=privacy, noise_key=b"k")
        found = torch.as_tensor(result.posterior["beta"].mean).double()
        ends.append(float(((found - mean) / sd).abs().max()))
    assert ends[0] < 0.3 < 1 < ends[1]


def test_the_result_says_that_its_sds_do_not_count_the_noise() -> None:
    result = sf.fit(MODEL, _rows(), by_steps(), sf.Plain(), privacy=dp())
    assert result.privacy is not None
    assert result.privacy["sds"]["count_noise"] is False
    assert "steps of silos' own fits" in result.privacy["sds"]["because"]
    assert "do not count the noise of privacy" in str(result.summary())


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_it_says_how_many_gradients_it_cut_and_names_a_norm(rate: float) -> None:
    """By noised counts; the same run whose records do not say their lengths says nothing. At the norm that is named few
    are cut, and nothing is said."""
    silos, told = _rows(1500), []
    rows = {name: torch.cat([silo[name] for silo in silos]) for name in ("x", "y")}
    for norm, share in ((1.0, 0.01), (4.0, 0.01), (1.0, 0)):
        algorithm = by_steps(local_steps=40, scale_rate=0.2, sampling_rate=rate, lengths_share=share)
        privacy = dp(noise_multiplier=2.8, clipping_norm=norm)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", sf.SecureFVIWarning)
            result = sf.fit(MODEL, silos, algorithm, sf.Plain(), privacy=privacy, noise_key=b"k", compile=False)
        assert result.privacy is not None
        told += [str(w.message) for w in seen if "were cut" in str(w.message)]
        assert len(told) == 1
        if not share:
            assert "clipped" not in result.privacy
            continue
        beta = torch.as_tensor(result.posterior["beta"].mean).double()
        lengths = ((rows["y"] - rows["x"] @ beta).unsqueeze(1) * rows["x"]).norm(dim=1)
        cut, found = float((lengths > norm * math.sqrt(1 - share)).double().mean()), result.privacy["clipped"]
        assert found["error"] < 0.05
        assert abs(found["share"] - cut) < 3 * found["error"] + 0.01
        assert abs(found["records"] - 1500) < 0.5 * 1500
        assert f"{found['share']:.1%} (+- " in str(result.summary())
    assert "clipping_norm = 1 " in told[0]
    assert re.search(r"take a clipping_norm of 4, than which \d+% at most \(\+- \d+%\) are longer", told[0])


@pytest.mark.parametrize("from_the_start", [False, True])
def test_what_is_cut_on_the_way_is_not_told(from_the_start: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An intercept five units from where the fit begins, where each gradient is cut: near the end next to none is, as
    is told, and no longer norm is named, which would be more noise for nothing. The control: of all steps a tenth of
    the records and more."""
    rng = torch.Generator().manual_seed(4)
    x = torch.cat([torch.ones(1500, 1), torch.randn(1500, 1, generator=rng)], 1).double()
    y = x @ torch.tensor([5.0, -0.3]).double() + torch.randn(1500, generator=rng).double()
    if from_the_start:
        monkeypatch.setattr(noised_fit, "TOLD", 1.0)
    algorithm = by_steps(rounds=1, local_steps=150, learning_rate=0.1, scale_rate=0.2, damping=1.0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", sf.SecureFVIWarning)
        result = sf.fit(
            sf.FederatedModel(_wide, record_plate="row"), [{"x": x, "y": y}], algorithm, sf.Plain(),
            privacy=dp(noise_multiplier=4.0), noise_key=b"k", compile=False,
        )  # fmt: skip
    assert result.privacy is not None
    beta = torch.as_tensor(result.posterior["beta"].mean).double()
    lengths = ((y - x @ beta).unsqueeze(1) * x).norm(dim=1)
    cut, found = float((lengths > 4.0 * math.sqrt(0.99)).double().mean()), result.privacy["clipped"]
    assert cut < 0.03
    assert (abs(found["share"] - cut) < 3 * found["error"] + 0.01) != from_the_start
    assert any("were cut" in str(w.message) for w in seen) == from_the_start


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_plan_run_ledger_and_report_give_one_number(rate: float, tmp_path: Path) -> None:
    """The noise that is planned is what a run takes, and what a ledger of that epsilon admits, and none of 1% less. The
    control is the plan of as many rounds of one sum."""
    rounds, steps, retries, most = 2, 5, 1, 2.0
    path = tmp_path / "ledger.sqlite"
    algorithm = by_steps(rounds=rounds, local_steps=steps, sampling_rate=rate)
    privacy = dp(noise_multiplier=None, epsilon=most, retries=retries)
    for name in ("silo-1", "silo-2", "silo-3"):
        Ledger.open(path, name, create=True).set_budget(Budget("cohort", most, 1e-5))
    result = sf.fit(MODEL, _rows(), algorithm, privacy=privacy, books=sf.Books(path, "cohort", "first"), compile=False)
    planned = plan(delta=1e-5, epsilon=most, sampling_rate=rate, rounds=rounds * steps, retries=retries * steps)
    assert result.privacy is not None
    assert result.privacy["noise_multiplier"] == pytest.approx(planned.noise_multiplier, rel=0.01)
    (job,) = read_report(path, "silo-1").jobs
    assert job.epsilon == pytest.approx(result.privacy["epsilon"], rel=1e-6)
    (term,) = job.terms
    assert (term["count"], term["event"]["count"]) == (rounds + retries, steps)
    tighter = tmp_path / "tighter.sqlite"
    Ledger.open(tighter, "silo-1", create=True).set_budget(Budget("cohort", 0.99 * most, 1e-5))
    with pytest.raises(BudgetError):
        sf.fit(MODEL, _rows(60, 1), algorithm, sf.Plain(), privacy=privacy, books=sf.Books(tighter, "cohort", "first"))
    once = plan(delta=1e-5, epsilon=most, sampling_rate=rate, rounds=rounds, retries=retries)
    assert once.noise_multiplier < 0.9 * planned.noise_multiplier


def test_what_does_not_fit_is_refused() -> None:
    def build(algorithm: Any, privacy: Any, model: Any = MODEL, silos: Any = None) -> None:
        build_parties(model, silos or _rows(), algorithm, sf.Masked(), privacy=privacy, compile=False)

    with pytest.raises(InputError, match="goes with RecordDP alone"):
        build(by_steps(), None)
    with pytest.raises(InputError, match="goes with RecordDP alone"):
        build(by_steps(), sf.SiloDP(noise_multiplier=1.0, noise="silo"))
    for noise in ("distributed", "server"):
        with pytest.raises(InputError, match="use noise = 'silo'"):
            build(by_steps(rounds=1), dp(noise=noise))
    with pytest.raises(InputError, match="takes no parts"):
        build(by_steps(virtual_clients=2), dp())
    with pytest.raises(InputError, match="makes steps"):
        build(by_steps(local_optimizer="closed_form"), dp())
    problem = make_intercepts()
    with pytest.raises(InputError, match="without local latents"):
        build(by_steps(), dp(), problem.model, problem.silos)
    with pytest.raises(InputError, match=r"a scale_rate of at most 0\.5, 0\.2 by measurement"):
        by_steps(scale_rate=1.0)
    with pytest.raises(InputError, match="give rounds"):
        build(by_steps(rounds=None), dp())


def test_a_policy_is_told_where_the_noise_is() -> None:
    server, _, _ = build_parties(MODEL, _rows(), by_steps(), sf.Masked(), privacy=dp(), compile=False)
    found = disclose(by_steps(), sf.Masked(), dp(), 3)
    whole = found.of_program(server.program.tables, server.program.terms, sf.Masked())
    said = "\n".join(disclosure_lines(whole))
    assert "without noise of its own: it follows from 5 sums over records that the silo noises in full" in said
    assert "noise: Gaussian, 2 times the clipping norm 4" in said
    assert "in each of 5 steps of a silo's own fit" in said
    without = "\n".join(disclosure_lines(disclose(sf.PVI(rounds=2), sf.Masked(), dp(), 3)))
    assert "steps of a silo's" not in without


def test_an_audit_of_canaries_says_that_it_plays_none_there() -> None:
    """The control is the other mode."""
    made = dp(noise_multiplier=1.0)
    assert "no canary is played within a silo's own fit" in str(epsilon.why_not(MODEL, by_steps(), _rows(), made))
    assert epsilon.why_not(MODEL, sf.PVI(rounds=1), _rows(), made) is None


def _sent(scale: float, key: bytes) -> list[FloatArray]:
    """What silo 1 handed to its half of the sum."""
    silos = _rows()
    silos[0] = {name: v * scale for name, v in silos[0].items()}
    server, engine, _ = build_parties(MODEL, silos, by_steps(), sf.Plain(), privacy=dp(), compile=False, noise_key=key)
    sent, half = list[FloatArray](), engine.silos["silo-1"]._sum
    contribute = half.contribute
    half.contribute = lambda i, cohort, table, values, *rest: (  # type: ignore[method-assign]
        sent.append(np.array(values)) or contribute(i, cohort, table, values, *rest)
    )
    for _ in range(2):
        engine.run(server.round())
    return sent


def test_nothing_that_leaves_is_without_noise() -> None:
    """Every number is another under another key of the noise; the control is the same key."""
    one, again, other = _sent(1.0, b"k" * 32), _sent(1.0, b"k" * 32), _sent(1.0, b"o" * 32)
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert all((a != b).all() for a, b in zip(one, other, strict=True))


def _told(noise: float) -> float:
    """How far apart the q of one round are in a mean, in sds, in worlds with and without a record whose gradients are
    all longer than the norm. noise: a factor on what is made."""
    found = []
    for joined in (False, True):
        silos = _rows(9)
        if joined:
            one = {
                "x": torch.tensor([[100.0, 0.0]], dtype=torch.float64),
                "y": torch.tensor([1e4], dtype=torch.float64),
            }
            silos[0] = {name: torch.cat([v, one[name]]) for name, v in silos[0].items()}
        algorithm = by_steps(rounds=1, local_steps=STEPS, learning_rate=0.01, family="diagonal")
        privacy = dp(noise_multiplier=math.sqrt(STEPS), clipping_norm=30.0)
        server, engine, _ = build_parties(MODEL, silos, algorithm, sf.Plain(), privacy=privacy, compile=False)
        silo: Any = engine.silos["silo-1"]
        message = server.program.broadcast(server.program.init(), 1, dict.fromkeys(engine.silos, 0))
        terms = {name: replace(t, noise_multiplier=noise * t.noise_multiplier) for name, t in silo.gate._terms.items()}
        gate, means = Gate("silo-1", silo.program.tables, terms, lambda *_: None), []
        for run in range(RUNS):
            gate.begin(run + 1, "round", 3, turn=run)
            said = silo.program.contribute(message, silo.local, silo.view._replace(turn=run), gate)[0].values
            packed = message.tensors["q"]
            q = server.program.families.unpack(packed + torch.from_numpy(said[: len(packed)]))
            means.append(float(q.mean()[0]))
        found.append(np.array(means))
    return float(abs(found[0].mean() - found[1].mean()) / math.sqrt((found[0].var() + found[1].var()) / 2))


RUNS = 100


def test_a_record_tells_no_more_than_was_charged() -> None:
    """Two normals a sd apart are what these steps are charged as; the difference of two means over 100 runs has a
    standard error of 0.14, so that the false alarm is one in a million. The control makes a third of the noise."""
    assert 0.3 < _told(1.0) < 1.7
    assert _told(1 / 3) > 2.0


def test_the_bench_makes_whole_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few rows. The posterior that it compares with is that of a run without privacy."""
    monkeypatch.setattr(pvi_private, "RECORDS", 90)
    monkeypatch.setattr(pvi_private, "EPSILONS", (3.0,))
    rows = pvi_private.measure(2, kinds=("linear",), modes=("changes", "steps"), counts=(3,))["rows"]
    assert [(row["mode"], row["counted"]) for row in rows] == [("changes", 2), ("steps", 0)]
    assert all(math.isfinite(row["error"]) for row in rows)
    data = coverage.drawn("logistic", 400, 1, torch.Generator().manual_seed(2))
    mean, covariance, _ = pvi_private._posterior("logistic", data.x[0], data.y[0])
    model = sf.FederatedModel(coverage.logistic, "row")
    found = sf.fit(model, [{"x": data.x[0], "y": data.y[0]}], sf.PVI(), sf.Plain(), compile=False).posterior["beta"]
    sd = covariance.diagonal().sqrt()
    assert float(((torch.as_tensor(found.mean) - mean).abs() / sd).max()) < 0.4
    assert float((torch.as_tensor(found.sd) / sd).log().abs().max()) < 0.15
