"""Differential privacy of vertical runs: what is noised, what is charged, and what an attacker on labels finds."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import secure_fvi as sf
from secure_fvi.algorithms.kit import Program
from secure_fvi.algorithms.vertical import Amortised, Bernoulli, Categorical, Integrated, MeanField, Poisson, Vertical
from secure_fvi.algorithms.vertical.steps import Incoming, Noise, SiloParams
from secure_fvi.algorithms.vertical.vertical import HIDDEN_PHASE, VerticalProgram
from secure_fvi.driving import Books, Parties
from secure_fvi.engines.local import LocalEngine
from secure_fvi.errors import AggregationError, BudgetError, InputError
from secure_fvi.fitting import build_parties
from secure_fvi.privacy.report import read_report

pytestmark = pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")

KEY = b"test"
RECORDS = 60


def _data() -> tuple[list[dict[str, Tensor]], Tensor]:
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(RECORDS, 4, generator=rng)
    y = torch.bernoulli(torch.sigmoid(2 * x[:, 0] - x[:, 2]), generator=rng)
    return [{"x": x[:, :2]}, {"x": x[:, 2:]}], y


def _parties(privacy: Any, **options: Any) -> Parties[LocalEngine]:
    silos, y = _data()
    config = Vertical(response="private", rounds=20, family="full", **options)
    return build_parties(
        sf.Columns(Bernoulli(), y),
        silos,
        config,
        sf.Masked(min_cohort=2),
        privacy=privacy,
        compile=False,
        noise_key=KEY,
    )


@pytest.mark.parametrize("auxiliary", [Amortised(), Integrated(), MeanField()])
def test_record_gradients_add_up_to_the_gradient(auxiliary: Any) -> None:
    parties = _parties(None, auxiliary=auxiliary)
    silo = parties.engine.silos["silo-1"]
    assert isinstance(silo.program, VerticalProgram)
    core, view = silo.program.core, silo.view
    rng = torch.Generator().manual_seed(0)

    def shaken(values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: v + 0.1 * torch.randn(v.shape, generator=rng) for k, v in values.items()}

    params = SiloParams(*map(shaken, silo.local.params))
    noise = Noise(torch.randn(core.family.noise_size, generator=rng), torch.randn(RECORDS, 1, generator=rng))
    sent, pull = torch.randn(RECORDS, 1, generator=rng), torch.randn(RECORDS, 1, generator=rng)
    incoming = Incoming(pull, torch.tensor(0.25), torch.zeros_like(pull), torch.zeros(1), torch.ones(()))
    weights = torch.ones(RECORDS)
    whole = core.gradient(params, view.rows, (), weights, noise, sent, incoming)
    by_record = core.gradient_by_record(params, view.rows, (), noise, sent, incoming)
    data_free = core.prior_gradient(params, noise.theta)
    for name, value in whole.shared.items():
        torch.testing.assert_close(by_record.shared[name].sum(0) + data_free[name], value, rtol=1e-9, atol=1e-9)
    for name, value in whole.record.items():
        torch.testing.assert_close(by_record.record[name], value, rtol=1e-9, atol=1e-9)


def test_one_persons_values_move_what_leaves_by_at_most_the_clipping_norm() -> None:
    """Same noise, one row replaced: the rows of z_j in the first round, and the noised gradient that the second round's
    follow from, move by at most C, also where a cell of it is no number. Without privacy they move by far more."""
    silos, y = _data()
    other = [dict(s) for s in silos]
    other[0]["x"] = other[0]["x"].clone()
    other[0]["x"][7] += 1000.0
    norm = 0.5
    privacy = sf.RecordDP(noise_multiplier=1e-9, clipping_norm=norm, noise="silo", delta=1e-5)
    config = Vertical(response="private", rounds=3, family="full", rho=0.1)

    def released(data: list[dict[str, Tensor]], protected: bool, cell: float = 0.0) -> tuple[Tensor, Tensor]:
        parties = build_parties(
            sf.Columns(Bernoulli(), y),
            data,
            config,
            sf.Plain(),
            privacy=privacy if protected else None,
            compile=False,
            noise_key=KEY,
        )
        silo, server = parties.engine.silos["silo-1"], parties.server
        silo.view.rows["x"] = silo.view.rows["x"].clone()
        silo.view.rows["x"][7, 0] += cell
        sums: list[Tensor] = []
        inner = silo.gate.hidden_sum

        def noted(phase: str, rows: Tensor) -> Tensor:
            sums.append(inner(phase, rows))
            return sums[-1]

        silo.gate.hidden_sum = noted  # type: ignore[method-assign]
        parties.engine.run(server.round())
        first = server.state.algorithm.total
        parties.engine.run(server.round())
        return first, sums[0] if sums else server.state.algorithm.total

    mine = released(silos, True)
    for found in (released(other, True), released(silos, True, torch.nan)):
        assert all(float((a - b).norm()) <= norm * (1 + 1e-9) for a, b in zip(mine, found, strict=True))
    for own, theirs in zip(released(silos, False), released(other, False), strict=True):  # the control
        assert float((own - theirs).norm()) > 10.0


def test_everything_is_charged_and_nothing_else_is_released(tmp_path: Any) -> None:
    """Two releases a round at each silo and two at the holder of the response; a budget that holds one job refuses the
    second; the bound and the silos' own convergence are not released."""
    silos, y = _data()
    privacy = sf.RecordDP(epsilon=4.0, delta=1e-4, clipping_norm=2.0, retries=4)
    config = Vertical(response="private", rounds=10, learning_rate=0.05)

    def run(job: str) -> Any:
        books = Books(tmp_path / "ledger.sqlite", "people", job)
        return sf.fit(
            sf.Columns(Bernoulli(), y),
            silos * 2,
            config,
            sf.Masked(min_cohort=3),
            privacy=privacy,
            books=books,
            compile=False,
        )

    result = run("first")
    claim = result.privacy
    assert claim["adjacency"] == "replace one"
    assert claim["protects"] == "a person's columns at one silo, and the response"
    assert 0 < claim["epsilon"] <= 4.0
    whole = claim["linked"]  # of a person whose columns at four silos and whose response change together
    assert (whole["records"], whole["epsilon"]) == (5, 5 * claim["epsilon"])
    assert whole["whose"] == "a person's columns at all 4 silos and its response"
    assert claim["releases"] == 2 * (10 + 2)
    assert result.elbo is None
    assert result.metrics["some_unsettled"] is None
    for party in ("silo-1", "response-holder"):
        report = read_report(tmp_path / "ledger.sqlite", party, None)
        assert "values that this institution holds of one person differ" in report.adjacency
        assert 0 < report.epsilon <= 4.0
    with pytest.raises(BudgetError):
        run("second")


def _fails(*_: Any) -> Any:
    raise RuntimeError("a record's fault")


@pytest.mark.parametrize("how", ["nobody's", "fails"])
@pytest.mark.parametrize("auxiliary", [Amortised(), MeanField()])
def test_an_answer_without_data_is_charged_as_others_are(
    auxiliary: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How often a silo's ledger was charged others see, by its length: of a silo whose data cannot be used it is as
    long. The control has what is sent charged alone, as was shipped."""

    def paid() -> tuple[int, ...]:
        parties = _parties(sf.RecordDP(noise_multiplier=2.0, clipping_norm=1.0), auxiliary=auxiliary)
        silo = parties.engine.silos["silo-2"]
        silo._silent = how == "nobody's"
        for round_ in range(4):
            with pytest.MonkeyPatch.context() as patched:
                if how == "fails" and round_ == 2:
                    patched.setattr(VerticalProgram, "contribute", _fails)
                parties.engine.run(parties.server.round())
        return tuple(silo.gate.paid for silo in parties.engine.silos.values())

    assert paid() == (7, 7)
    monkeypatch.setattr(VerticalProgram, "silence", Program.silence)
    if how == "nobody's":
        assert paid() == (7, 4)
    else:  # the patch above is of all silos
        assert paid() == (6, 6)


def test_a_private_response_is_noised_before_it_is_broadcast() -> None:
    """An attacker reads labels off the sign of the pull: always right without privacy, near chance at epsilon = 1."""
    _, y = _data()

    def accuracy(privacy: Any) -> float:
        parties = _parties(privacy)
        right = []
        for _ in range(5):
            parties.engine.run(parties.server.round())
            pull = parties.server.state.algorithm.pull[:, 0]
            right.append(float(((pull > 0) == (y > 0.5)).double().mean()))
        return float(np.mean(right))

    assert accuracy(None) == 1.0  # the control
    assert accuracy(sf.RecordDP(epsilon=1.0, delta=1e-4, clipping_norm=2.0, colluders=0)) < 0.65


@pytest.mark.parametrize(
    ("options", "privacy", "words"),
    [
        ({"model": "power", "response": "shared"}, {}, "augmented"),
        ({"local_steps": 2}, {}, "local_steps"),
        ({"damping": 0.5}, {}, "damping = 0.5"),
        ({"max_staleness": 2, "participation": 0.9}, {}, "max_staleness"),
        ({}, {"objective_share": 0.1}, "objective_share"),
        ({}, {"public_counts": True}, "public_counts"),
    ],
)
def test_what_privacy_refuses(options: dict[str, Any], privacy: dict[str, Any], words: str) -> None:
    silos, y = _data()
    config = Vertical(**{"response": "private", **options})
    with pytest.raises(InputError, match=words):
        sf.fit(sf.Columns(Bernoulli(), y), silos, config, privacy=sf.RecordDP(epsilon=1.0, **privacy))


class _Fails(Bernoulli):
    """On one label, where a matrix cannot be factorised."""

    def check(self, y: Tensor) -> None:
        pass

    def log_prob(self, y: Tensor, predictor: Tensor, gamma: Tensor) -> Tensor:
        return torch.linalg.cholesky((2 - y).reshape(-1, 1, 1))[:, 0, 0].log() - predictor[:, 0].square()


def test_a_label_on_which_a_likelihood_fails_counts_as_nothing() -> None:
    """The holder's pulls come out all the same, that person's as noise. The control has no privacy, and stops."""
    silos, y = _data()
    y[7] = 5.0
    config = Vertical(response="private", rounds=3, auxiliary=MeanField(), learning_rate=0.1)
    for privacy in (sf.RecordDP(noise_multiplier=1e-9, clipping_norm=1.0, noise="silo"), None):
        parties = build_parties(
            sf.Columns(_Fails(), y), silos, config, sf.Plain(), privacy=privacy, compile=False, noise_key=KEY
        )
        if privacy is None:
            with pytest.raises(torch.linalg.LinAlgError):
                parties.engine.run(parties.server.round())
            continue
        parties.engine.run(parties.server.round())
        pull = parties.server.state.algorithm.pull[:, 0].abs()
        assert float(pull[7]) < 1e-6
        assert float(pull.median()) > 0.01


def test_a_likelihood_that_fails_on_every_label_is_refused() -> None:
    class Never(_Fails):
        def log_prob(self, y: Tensor, predictor: Tensor, gamma: Tensor) -> Tensor:
            return predictor[:, 0] if bool((y > 0).any()) else predictor[:, 0] * 2

    silos, y = _data()
    config, privacy = Vertical(response="private", rounds=3), sf.RecordDP(noise_multiplier=1.0, noise="silo")
    with pytest.raises(InputError, match="likelihood of each record alone"):
        build_parties(sf.Columns(Never(), y), silos, config, sf.Plain(), privacy=privacy)


def test_no_offset_is_broadcast_without_noise() -> None:
    """The curvature is the largest rate: of one person with a large offset. Zero under privacy; the control tells."""
    silos, y = _data()
    offset = torch.zeros(RECORDS)
    offset[7] = 5.0
    config = Vertical(response="private", rounds=3, rho=0.1, auxiliary=MeanField())
    for privacy in (sf.RecordDP(noise_multiplier=1.0, noise="silo"), None):
        found = []
        for off in (torch.zeros(RECORDS), offset):
            parties = build_parties(
                sf.Columns(Poisson(), y, offset=off),
                silos,
                config,
                sf.Plain(),
                privacy=privacy,
                compile=False,
                noise_key=KEY,
            )
            parties.engine.run(parties.server.round())
            found.append(float(parties.server.state.algorithm.curvature))
        assert found == [0.0, 0.0] if privacy is not None else found[1] > 10 * found[0]


def test_several_classes_that_silos_know_are_answered_under_privacy() -> None:
    """The network's features of a label, a record at a time: no record counts as nothing."""
    silos, y = _data()
    privacy = sf.RecordDP(noise_multiplier=1.0, noise="silo")
    parties = build_parties(
        sf.Columns(Categorical(3), y + (y > 0.5)), silos, Vertical(rounds=3), sf.Plain(), privacy=privacy, compile=False
    )
    for _ in range(2):
        parties.engine.run(parties.server.round())
    assert [silo.gate.dropped for silo in parties.engine.silos.values()] == [0, 0]


def test_silo_privacy_is_refused() -> None:
    silos, y = _data()
    with pytest.raises(InputError, match="record"):
        sf.fit(sf.Columns(Bernoulli(), y), silos, Vertical(), privacy=sf.SiloDP(epsilon=1.0))


def test_the_gate_gives_no_hidden_sum_without_terms() -> None:
    gate = _parties(None).guards.gates["silo-1"]
    gate.begin(1, "auxiliary")
    with pytest.raises(AggregationError):
        gate.hidden_sum(HIDDEN_PHASE, torch.zeros(3, 2))


def test_rows_tell_a_product_of_two_silos_columns_by_the_square_root_of_the_people() -> None:
    """What is released a row a person, each silo by itself, leaves an error of 4 sigma^2 / sqrt(N) in the mean product
    of two columns within 1. The control, a total over people that is noised once: 2 sigma / N. docs/vertical.md."""
    rng, sigma, found = np.random.default_rng(1), 4.2, list[tuple[float, float]]()
    for people in (1000, 16_000):
        rows, once = [], []
        for _ in range(60):
            one = rng.uniform(-1, 1, people)
            other = 0.5 * one + 0.5 * rng.uniform(-1, 1, people)
            noised = [column + 2 * sigma * rng.standard_normal(people) for column in (one, other)]
            rows.append(noised[0] @ noised[1] / people - one @ other / people)
            once.append(2 * sigma * rng.standard_normal() / people)
        found.append((float(np.std(rows)), float(np.std(once))))
        assert found[-1] == pytest.approx((4 * sigma**2 / people**0.5, 2 * sigma / people), rel=0.3)
    assert found[0][0] / found[1][0] < 6 < 10 < found[0][1] / found[1][1]


@pytest.mark.parametrize("rate", [0.05, 1000.0])
def test_a_private_run_that_runs_off_ends_by_a_line(rate: float) -> None:
    """Nothing of the bound is released, but the shared parameters follow from what is noised: it went on to the end,
    spent its budget, and gave a posterior of no numbers. The control is a rate at which they stay finite."""
    silos, _ = _data()
    parties = build_parties(
        sf.Columns(Poisson(), torch.ones(RECORDS)),
        silos,
        Vertical(response="private", rounds=20, learning_rate=rate),
        sf.Masked(min_cohort=2),
        privacy=sf.RecordDP(noise_multiplier=2.0, clipping_norm=1.0),
        compile=False,
        noise_key=KEY,
    )
    with contextlib.ExitStack() as stack:
        if rate > 1:
            words = r"q of the shared parameters is not finite in round \d+; lower learning_rate"
            stack.enter_context(pytest.raises(InputError, match=words))
        for _ in range(20):
            parties.engine.run(parties.server.round())
    assert (parties.server.rounds < 20) == (rate > 1)
