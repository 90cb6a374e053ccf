"""SFVI under privacy: the same gradients when noise is small, hidden states that stay hidden, jobs that are charged."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from programs import Conjugate, make_clinics, make_intercepts, make_slopes
from torch import Tensor

import secure_fvi as sf
from secure_fvi import fitting
from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms.kit import blocks_of
from secure_fvi.building import declared_job
from secure_fvi.errors import AggregationError, BudgetError, InputError, ProtocolError
from secure_fvi.fitting import build_parties
from secure_fvi.objective import flat_gradient, record_gradients, silo_gradient
from secure_fvi.privacy import gate as gate_module
from secure_fvi.privacy.accountants import of_group
from secure_fvi.privacy.accounting import smallest_budget
from secure_fvi.privacy.gate import Gate, NoiseSource
from secure_fvi.privacy.ledger import Budget, Ledger
from secure_fvi.privacy.ledger_account import verify
from secure_fvi.privacy.report import read_report
from secure_fvi.privacy.terms import Extent, agree
from secure_fvi.silo import Past

KEY = b"test"
#: Runs this short and noisy say that they have not converged; what they are tested for is something else.
pytestmark = pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("problem", [make_intercepts(), make_slopes(), make_clinics()])
def test_record_gradients_add_up_to_the_silos_gradient(problem: Conjugate, samples: int) -> None:
    algorithm = sf.SFVI(iterations=5, importance_samples=samples)
    server, engine, _ = build_parties(problem.model, problem.silos, algorithm, sf.Plain(), compile=False)
    silo = engine.silos["silo-2"]
    program: Any = silo.program
    view = silo.view
    of = server.problem.density, program.local_family, program.silo_family, program.samples
    whole = silo_gradient(*of)
    rng = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    n, rows = program.family.n, len(view.weights)
    record = {k: v + 0.1 * draw(*v.shape) for k, v in silo.local.record.items()}
    own = {k: v + 0.1 * draw(*v.shape) for k, v in silo.local.silo.items()}
    arguments = (
        draw(n), draw(n), {}, record, own, view.rows, view.weights,
        draw(program.samples, rows, program.n_record), draw(1, program.n_silo)[0],
    )  # fmt: skip
    expected = whole(*arguments)
    each = record_gradients(*of, True)(*arguments)
    data_free = whole(*arguments[:6], torch.zeros_like(view.weights), *arguments[7:])
    assert torch.allclose(each.rows.sum(0) + flat_gradient(data_free, True), flat_gradient(expected, True), atol=1e-9)
    assert torch.allclose(each.values.sum() + data_free.value, expected.value, atol=1e-9)
    for name, gradient in expected.local.items():
        assert torch.allclose(each.local[name], gradient, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "noise",
    ["distributed", pytest.param("silo", marks=pytest.mark.slow), pytest.param("server", marks=pytest.mark.slow)],
)
def test_with_little_noise_the_posterior_is_the_exact_one(noise: str) -> None:
    """A model with latents of all three levels, minibatches, the bound released: all paths of the gate."""
    problem = make_clinics()
    privacy = sf.RecordDP(noise_multiplier=1e-4, clipping_norm=200.0, noise=noise, objective_share=0.1)  # type: ignore[arg-type]
    algorithm = sf.SFVI(iterations=900, sampling_rate=0.7, average_last=0.5)
    result = sf.fit(problem.model, problem.silos, algorithm, privacy=privacy, noise_key=KEY, compile=False)
    for site, mean in problem.mean.items():
        assert ((result.posterior[site].mean - mean).abs() < 0.25 * problem.sd[site]).all()
        assert ((result.posterior[site].sd / problem.sd[site] - 1).abs() < 0.25).all()
    assert result.elbo is not None


def _means(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(torch.zeros(20), 1.0).to_event(1))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Normal(mu, 1.0).to_event(1), obs=y)


def test_q_does_not_count_the_noise_of_privacy() -> None:
    """What docs/privacy.md says of intervals of q: at epsilon .9 the means end 1.8 of their sds from the exact ones, in
    root mean square. The control, without noise: less than .05. Draws and noise are fixed."""
    y = torch.randn(200, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    algorithm = sf.SFVI(
        iterations=150, learning_rate=0.05, schedule="cosine", average_last=0.5, family="diagonal", curvature_norm=0
    )  # fmt: skip
    private = sf.RecordDP(noise_multiplier=50.0, clipping_norm=8.0, noise="silo", retries=0)
    off = {}
    for privacy, key in ((None, None), (private, KEY)):
        by = algorithm if privacy else replace(algorithm, curvature_norm="auto")  # which is of private jobs alone
        result = sf.fit(
            sf.FederatedModel(_means, "row"), [{"y": y}], by, sf.Plain(),
            privacy=privacy, noise_key=key, compile=False,
        )  # fmt: skip
        found = result.unaware["mu"]
        off[privacy] = float(((found.mean - y.sum(0) / 201) / found.sd).square().mean().sqrt())
        inside = (found.mean - y.sum(0) / 201).abs() < 1.96 * found.sd
    assert off[None] < 0.05
    assert 1.2 < off[private] < 2.5
    assert 12 <= int(inside.sum()) <= 16  # of the last, private fit


@pytest.mark.slow
def test_silo_privacy_with_little_noise_too() -> None:
    problem = make_clinics()
    privacy = sf.SiloDP(noise_multiplier=1e-4, clipping_norm=1e4)
    result = sf.fit(
        problem.model, problem.silos, sf.SFVI(iterations=900, average_last=0.5), privacy=privacy, compile=False
    )
    assert (result.posterior["mu"].mean - problem.mean["mu"]).abs() < 0.25 * problem.sd["mu"]
    assert result.elbo is None
    assert result.metrics["records"] is None


def small_job(**changes: Any) -> sf.RecordDP:
    return replace(sf.RecordDP(noise_multiplier=2.0), **changes)


def parties(privacy: Any, algorithm: Any = None, aggregation: Any = None, problem: Conjugate | None = None) -> Any:
    problem = problem or make_clinics()
    algorithm = algorithm or sf.SFVI(iterations=20, sampling_rate=0.5)
    aggregation = aggregation or sf.Masked()
    return build_parties(
        problem.model, problem.silos, algorithm, aggregation, compile=False, privacy=privacy, noise_key=KEY
    )


def test_the_start_of_local_states_is_without_data() -> None:
    _, engine, _ = parties(small_job())
    locals_ = [silo.local for silo in engine.silos.values()]
    for name, value in locals_[0].silo.items():
        assert all(torch.equal(value, other.silo[name]) for other in locals_)
    assert all((local.record["loc"] == locals_[0].record["loc"][0]).all() for local in locals_)


def test_two_sums_of_one_round_are_two_independent_samples() -> None:
    server, engine, _ = parties(small_job())
    silo = engine.silos["silo-2"]
    message = server.program.broadcast(server.state.algorithm, 1, 0)
    chunks = [silo.program.drawn(index, silo.view) for index in (message.sum_index, message.sum_index + 1)]
    assert set(chunks[0].tolist()) != set(chunks[1].tolist())


def test_a_sample_larger_than_a_block_is_never_cut() -> None:
    """With blocks of four rows, every row of each sample is in some block, once, and each has a spare row."""
    _, engine, _ = parties(small_job(), sf.SFVI(iterations=20, sampling_rate=0.1))
    silo = engine.silos["silo-2"]
    sizes = set()
    for index in range(50):
        pieces = blocks_of(silo.program.drawn(index, silo.view), silo.size, 4)
        sizes |= {len(p) for p in pieces}
        assert all(p[-1] == silo.size for p in pieces)
        rows = np.concatenate(pieces)
        kept = rows[rows < silo.size]
        assert sorted(kept) == sorted(silo.program.drawn(index, silo.view))
    assert len(sizes) == 1
    assert any(len(blocks_of(silo.program.drawn(i, silo.view), silo.size, 4)) > 1 for i in range(50))


def test_batches_do_not_follow_from_the_seed() -> None:
    problem = make_intercepts()

    def batches(**key: Any) -> list[list[int]]:
        _, engine, _ = build_parties(
            problem.model, problem.silos, sf.SFVI(iterations=20, sampling_rate=0.5), sf.Masked(), 7,
            compile=False, privacy=small_job(), **key,
        )  # fmt: skip
        silo = engine.silos["silo-2"]
        return [silo.program.drawn(i, silo.view).tolist() for i in range(5)]  # type: ignore[attr-defined]

    assert batches() != batches()
    assert batches(noise_key=KEY) == batches(noise_key=KEY)


@pytest.mark.parametrize(
    ("privacy", "algorithm", "aggregation", "why"),
    [
        (small_job(), sf.SFVI(), None, "give iterations"),
        (small_job(), sf.SFVI(iterations=9, local_family=sf.Conditional(scale="dense")), None, "record privacy needs"),
        (small_job(), None, sf.Plain(), "needs a masked or homomorphic sum"),
        (small_job(), None, sf.Homomorphic(scheme="ckks"), "needs exact sums"),
        (small_job(colluders=3), None, None, "needs an honest survivor"),
        (small_job(dropouts=1, colluders=2), None, None, "needs an honest survivor"),
    ],
)
def test_what_gives_no_guarantee_is_refused_before_any_round(
    privacy: Any, algorithm: Any, aggregation: Any, why: str
) -> None:
    with pytest.raises(InputError, match=why):
        parties(privacy, algorithm, aggregation)


@pytest.mark.parametrize(
    "bad",
    [
        {"epsilon": 0.0}, {"epsilon": -1.0}, {"epsilon": float("nan")}, {"epsilon": 1.0, "delta": 0.0},
        {"epsilon": 1.0, "delta": 1.0}, {"noise_multiplier": 0.0}, {"noise_multiplier": float("inf")}, {},
        {"epsilon": 1.0, "noise_multiplier": 1.0}, {"epsilon": 1.0, "clipping_norm": -1.0},
        {"epsilon": 1.0, "noise": "somewhere"}, {"epsilon": 1.0, "dropouts": -1}, {"epsilon": 1.0, "colluders": 0.5},
        {"epsilon": 1.0, "objective_share": 1.0},
    ],
)  # fmt: skip
def test_bad_numbers_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        sf.RecordDP(**bad)


def _lose(engine: Any, names: set[str]) -> None:
    """Silos that stop answering once the masks are shared."""
    exchange = engine.exchange

    def lossy(messages: Any) -> Any:
        replies = exchange(messages)
        lost = names if any(m[:1] == b"R" for m in messages.values()) else set()
        return {silo: reply for silo, reply in replies.items() if silo not in lost}

    engine.exchange = lossy


def test_planned_dropouts_leave_the_noise_that_was_counted_on_and_more_get_no_sum() -> None:
    problem = make_intercepts()
    rows = torch.cat([s["y"] for s in problem.silos])
    six = Conjugate(problem.model, [{"y": part} for part in rows.split(10)], problem.mean, problem.sd)
    privacy = small_job(dropouts=1, colluders=0)  # of unchecked sums that lack some, a lying server takes one colluder
    aggregation = sf.Masked(consistency_check=False)
    for lost, works in (({"silo-3"}, True), ({"silo-3", "silo-5"}, False)):
        server, engine, _ = parties(privacy, aggregation=aggregation, problem=six)
        engine.run(server.round())
        _lose(engine, lost)
        if works:
            engine.run(server.round())
            terms = server.program.terms["round"]
            survivors = len(engine.silos) - len(lost) - privacy.colluders
            assert survivors * terms.share_variance >= terms.event.event.variance * (1 - 1e-12)
        else:
            with pytest.raises(AggregationError):
                engine.run(server.round())


def test_a_job_is_charged_to_every_silos_ledger_and_a_second_one_does_not_fit(tmp_path: Path) -> None:
    problem = make_intercepts()
    path = tmp_path / "ledger.sqlite"
    algorithm = sf.SFVI(iterations=10, sampling_rate=0.5)
    privacy = sf.RecordDP(epsilon=3.0, delta=1e-3, retries=4)

    def run(job: str) -> sf.Result:
        books = sf.Books(path, "cohort-2026", job)
        return sf.fit(problem.model, problem.silos, algorithm, privacy=privacy, books=books, compile=False)

    result = run("first")
    assert result.privacy is not None
    assert 0.9 * 3.0 < result.privacy["epsilon"] <= 3.0
    assert result.privacy["record"] == "one row of the data"
    both = of_group(result.privacy["epsilon"], 1e-3, 2)
    assert (result.privacy["linked"]["epsilon"], result.privacy["linked"]["delta"]) == both
    assert "one record more: one row of the data. A person in several" in read_report(path, "silo-1").adjacency
    before = path.read_bytes()
    with pytest.raises(BudgetError, match=r"what would still fit|nothing of this kind"):
        run("second")
    verify(path)
    ledger = Ledger.open(path, "silo-1")
    assert set(ledger.chain.jobs) == {"first"}
    assert ledger.chain.jobs["first"].released["round"] >= 10
    assert path.read_bytes() == before or len(ledger.chain.jobs) == 1


def test_a_job_brings_a_budget_of_the_epsilon_that_it_states() -> None:
    """Where a data set has none, so that `max_epsilon` of a policy holds for it: not a thousandth more, as the smallest
    budget is found to (the control)."""
    for settings in (sf.RecordDP(epsilon=1.0), sf.RecordDP(epsilon=1.0, noise="silo"), sf.SiloDP(epsilon=0.3)):
        terms = {"round": agree(settings, 5, 1.0, 40, Extent(10, 0, 0))}
        job, budget = declared_job("job", "data", terms, "sfvi", NoiseSource())
        assert settings.epsilon == budget.epsilon < smallest_budget(job).epsilon


def test_people_with_several_records_are_covered_by_run_ledger_and_report_alike(tmp_path: Path) -> None:
    problem = make_intercepts()
    path = tmp_path / "ledger.sqlite"
    for name in ("silo-1", "silo-2", "silo-3"):
        Ledger.open(path, name, create=True).set_budget(Budget("cohort-2026", 1.0, 1e-3))
    privacy, books = sf.RecordDP(epsilon=1.0, delta=1e-3, retries=0, linked=3), sf.Books(path, "cohort-2026", "first")
    result = sf.fit(problem.model, problem.silos, sf.SFVI(iterations=5), privacy=privacy, books=books, compile=False)
    assert result.privacy is not None
    told = result.privacy["linked"]
    assert (told["records"], told["epsilon"], told["delta"]) == (3, result.privacy["epsilon"], 1e-3)
    report = read_report(path, "silo-1")
    assert report.jobs[0].epsilon == pytest.approx(told["epsilon"], rel=1e-6)
    assert "up to 3 here and elsewhere, counts as one" in report.adjacency
    alone = agree(replace(privacy, linked=1), 3, 1.0, 5, Extent(3, 0, 0))
    assert result.privacy["noise_multiplier"] == pytest.approx(3 * alone.noise_multiplier, rel=0.01)
    with pytest.raises(InputError, match="sampling_rate = 1"):
        agree(privacy, 3, 0.5, 5, Extent(3, 0, 0))


def test_a_ledger_restored_from_a_backup_is_refused_by_its_witnesses(tmp_path: Path) -> None:
    problem = make_intercepts()
    path = tmp_path / "ledger.sqlite"

    def run(job: str) -> None:
        privacy = sf.RecordDP(epsilon=0.5, delta=1e-3)
        sf.fit(
            problem.model, problem.silos, sf.SFVI(iterations=5), privacy=privacy, books=sf.Books(path, job=job),
            compile=False,
        )  # fmt: skip

    for silo in ("silo-1", "silo-2", "silo-3"):
        Ledger.open(path, silo, create=True).set_budget(Budget("data", 5.0, 1e-3))
    run("first")
    backup = path.read_bytes()
    run("second")
    gc.collect()  # as of a process that has ended: nobody has the file open
    for leftover in tmp_path.glob("ledger.sqlite-*"):
        leftover.unlink()
    path.write_bytes(backup)
    with pytest.raises(ProtocolError, match="rolled back"):
        run("third")


def _releases_over_crashes(folder: Path) -> int:
    """How often silo-1 paid, of a run of at most 4 + 2 releases that is kept after round 2 and dies after round 3."""
    problem, paid = make_intercepts(), 0
    given: dict[str, Any] = {"privacy": sf.RecordDP(epsilon=1.0, delta=1e-3, retries=2), "checkpoint_dir": folder}
    given |= {"checkpoint_seconds": 1e-9, "books": sf.Books(block=2), "compile": False}
    for death in range(6):
        run = sf.run(problem.model, problem.silos, sf.SFVI(iterations=4), resume=death > 0, **given)
        while run.server.rounds < 3:
            next(run)
        paid += run.engine.silos["silo-1"].gate.paid
    return paid


def test_a_private_run_without_a_ledger_has_its_retries_once_however_often_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder keeps the ledger. The control counts in memory, as runs in one process do: more than was planned."""
    folder = tmp_path / "kept"
    with pytest.raises(BudgetError, match="declared 6 releases of 'round', and all of them are used"):
        _releases_over_crashes(folder)
    assert verify(folder / "ledger.sqlite")[0].jobs["job"].released == {"round": 6}
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "books_of", lambda options, private: sf.Books())
        assert _releases_over_crashes(tmp_path / "memory") > 6


def test_a_private_run_goes_on_with_the_ledger_that_it_was_charged_to_alone(tmp_path: Path) -> None:
    """A folder whose ledger is gone, books of another name and a second beginning are refused, and charge nothing."""
    problem, kept = make_intercepts(), tmp_path / "kept"
    privacy = sf.RecordDP(epsilon=1.0, delta=1e-3)

    def run(books: sf.Books | None = None, **more: Any) -> Any:
        return sf.run(
            problem.model, problem.silos, sf.SFVI(iterations=4), privacy=privacy, books=books, checkpoint_dir=kept,
            checkpoint_seconds=0.0, compile=False, **more,
        )  # fmt: skip

    next(run())
    before = _files(tmp_path)
    with pytest.raises(InputError, match="holds a private run and what it was charged: go on with it by resume=True"):
        run()
    with pytest.raises(InputError, match="knows nothing of job 'other', which has rounds behind it"):
        run(sf.Books(kept / "ledger.sqlite", job="other"), resume=True)
    with pytest.raises(InputError, match="knows nothing of job 'job'"):
        run(sf.Books(tmp_path / "elsewhere.sqlite"), resume=True)
    assert _files(tmp_path) == before
    assert run(resume=True).result().rounds == 4  # the control
    (kept / "ledger.sqlite").unlink()
    with pytest.raises(InputError, match="knows nothing of job 'job'"):
        run(resume=True)


def test_noise_under_a_test_key_is_not_resumed_as_the_operating_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds whose noise can be replayed would be reported as protected. The control says nothing of the source, as
    before, and reports them so."""
    problem = make_intercepts()

    def run(folder: str, **more: Any) -> Any:
        return sf.run(
            problem.model, problem.silos, sf.SFVI(iterations=4), privacy=sf.RecordDP(epsilon=1.0, delta=1e-3),
            checkpoint_dir=tmp_path / folder, checkpoint_seconds=0.0, compile=False, **more,
        )  # fmt: skip

    next(run("kept", noise_key=KEY))
    with pytest.raises(InputError, match=r"noise = TEST KEY: .*, not ChaCha20, keyed by the operating system"):
        run("kept", resume=True)
    assert "TEST KEY" in run("kept", resume=True, noise_key=KEY).result().privacy["rng"]
    kept = {p.name: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert not any(KEY.hex().encode() in b or b"b'test'" in b for b in kept.values())
    with monkeypatch.context() as patch:
        patch.setattr(NoiseSource, "status", "ChaCha20")
        next(run("silent", noise_key=KEY))
        assert run("silent", resume=True).result().privacy["rng"] == "ChaCha20"


def _files(folder: Path) -> set[str]:
    return {str(p) for p in folder.rglob("*")}


def test_no_silo_is_charged_where_one_of_them_refuses(tmp_path: Path) -> None:
    problem = make_intercepts()
    path = tmp_path / "ledger.sqlite"
    Ledger.open(path, "silo-3", create=True).set_budget(Budget("data", 0.01, 1e-5))
    with pytest.raises(BudgetError, match=r"0\.01"):
        sf.fit(
            problem.model, problem.silos, sf.SFVI(iterations=10), privacy=small_job(), books=sf.Books(path),
            compile=False,
        )  # fmt: skip
    assert Ledger.open(path, "silo-1").chain.jobs == {}


def test_a_delta_of_one_over_n_is_warned_about() -> None:
    with pytest.warns(sf.SecureFVIWarning, match="silo-2.*not below 1 / N"):
        parties(small_job(delta=0.03))


def test_homomorphic_sums_carry_the_noise_too() -> None:
    server, engine, _ = parties(small_job(), aggregation=sf.Homomorphic())
    step = engine.run(server.round())
    assert server.rounds == 1
    assert np.isnan(step.objective)


def test_no_secret_of_a_private_job_is_in_a_repr() -> None:
    _, engine, guards = parties(small_job())
    silo = engine.silos["silo-1"]
    shown = repr((silo, silo.gate, guards.gates, silo.view.record_draws))
    assert KEY.hex() not in shown
    assert str(KEY) not in shown


def _wards(y: Tensor) -> None:
    s = pyro.sample("s", dist.Normal(0.0, 1.0))
    u = pyro.sample("u", dist.Normal(0.0, s.exp()))
    with pyro.plate("person", len(y)):
        pyro.sample("y", dist.Normal(u, s.exp()), obs=y)


def _spread_where_priors_pass_the_bound(monkeypatch: pytest.MonkeyPatch) -> float:
    """The sd, over 60 draws of the noise, of one total of six silos at a point that a lying server names: where the
    slope of the prior of a silo's own latents passes what a block has room for, at all silos but one."""
    rng, silos = torch.Generator().manual_seed(1), 6
    data = [{"y": torch.randn(5, generator=rng)} for _ in range(silos)]
    privacy = sf.RecordDP(noise_multiplier=4.0, clipping_norm=1.0, retries=1000)
    server, engine, _ = build_parties(
        sf.FederatedModel(_wards, "person", ("u",)), data, sf.SFVI(iterations=2), sf.Masked(),
        compile=False, privacy=privacy, noise_key=KEY,
    )  # fmt: skip
    program: Any = server.program
    first, parties = server.state, engine.silos
    start = {name: silo.local for name, silo in parties.items()}
    found: list[float] = []
    monkeypatch.setattr(program, "update", lambda state, message, total, scale: found.append(total[0]) or 1 / 0)
    index = 0

    def total(s: float, key: int) -> float:
        nonlocal index
        index += 1
        algorithm = first.algorithm._replace(z_global=torch.full_like(first.algorithm.z_global, s))
        server.state = first._replace(algorithm=algorithm, last_index=index)
        for name, silo in parties.items():
            silo.local, silo.pending, silo.past, silo.answer = start[name], None, Past(), None
            silo.gate._noise = NoiseSource(b"%d" % key)
        with pytest.raises(ZeroDivisionError):
            engine.run(server.round())
        return found[-1]

    terms = program.terms["round"]
    room, low, s = terms.room * terms.step(1.0), -8.0, -8.0
    while total(s, 0) < (silos - 0.5) * room:
        low, s = s, s - 1
    while low - s > 0.1:
        middle = (low + s) / 2
        low, s = (low, middle) if total(middle, 0) >= (silos - 0.5) * room else (middle, s)
    assert total(s, 0) < (silos - 0.01) * room  # one silo is within
    return float(np.std([total(s, key) for key in range(60)], ddof=1))


def test_no_point_that_a_server_names_takes_shares_of_noise_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The total has all of the noise, 4, whatever follows from no record: cut before it. The control cuts after it, as
    was shipped: five of six silos then say a constant, and the total has one share of five."""
    assert _spread_where_priors_pass_the_bound(monkeypatch) > 3.2
    noiser = Gate._noiser

    def shipped(self: Gate, hidden: int, free: Any = 0.0) -> Any:
        def noised(total: Tensor) -> Tensor:
            out = noiser(self, hidden)(total)
            out[hidden:] += torch.as_tensor(free)
            return out

        return noised

    monkeypatch.setattr(Gate, "_noiser", shipped)
    assert _spread_where_priors_pass_the_bound(monkeypatch) < 2.4


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("noise", ["silo", "distributed"])
def test_a_point_where_silos_own_latents_have_no_density_is_a_messages_fault(
    noise: Any, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows from no record is no number there: nothing is charged, and the honest question is answered. The
    control looks at it where it leaves, as was shipped: all silos paid, and their own data were said to be why."""
    problem = make_clinics()
    privacy = sf.RecordDP(noise_multiplier=4.0, clipping_norm=1.0, noise=noise, retries=5)
    server, engine, _ = build_parties(
        problem.model, problem.silos, sf.SFVI(iterations=4), sf.Masked(), compile=False, privacy=privacy, noise_key=KEY
    )
    engine.run(server.round())
    honest, silo = server.state, engine.silos["silo-1"]
    named = honest.algorithm._replace(z_global=torch.full_like(honest.algorithm.z_global, 1e200))
    server.state = honest._replace(algorithm=named)
    if not checked:
        monkeypatch.setattr(gate_module.np, "isfinite", np.ones_like)
    with pytest.raises(AggregationError if not checked else ProtocolError, match=None if not checked else "whatever"):
        engine.run(server.round())
    monkeypatch.undo()
    assert (silo.past.failed, silo.gate.paid) == ((False, 1) if checked else (True, 2))
    server.state = honest
    with nullcontext() if checked else pytest.raises(ProtocolError, match="its data could not answer"):
        engine.run(server.round())


def _mean_of(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


class _Totals:
    """What a server sees of masked sums."""

    def __init__(self) -> None:
        self.seen: list[FloatArray] = []

    def total(self, index: int, total: Any) -> None:
        self.seen.append(total.values.copy())

    def released(self, index: int, values: FloatArray) -> None:
        """With the noise, for others."""


def _seen_at(points: FloatArray, silos: list[dict[str, Tensor]], privacy: Any) -> dict[str, FloatArray]:
    """Totals by block (K, ...), as a server sees them that names these points (K,)."""
    job = sf.SFVI(iterations=len(points))
    model, sums = sf.FederatedModel(_mean_of, "row"), sf.Masked()
    server, engine, _ = build_parties(model, silos, job, sums, compile=False, privacy=privacy, noise_key=KEY)
    totals = _Totals()
    server._observers = (*server._observers, totals)
    for z in points:
        state = server.state.algorithm
        named = state._replace(z_global=torch.tensor([z]).to(state.z_global), shift=torch.zeros_like(state.shift))
        server.state = server.state._replace(algorithm=named)
        engine.run(server.round())
    return {
        name: np.stack([server.program.tables["round"].split(total)[name] for total in totals.seen])
        for name in server.program.tables["round"].split(totals.seen[0])
    }


def _outcomes(seed: int = 7) -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    return [{"y": 1.5 * torch.randn(4, generator=rng, dtype=torch.float64)} for _ in range(3)]


def test_a_server_that_adds_the_noise_reads_records_off_the_cut() -> None:
    """Its totals are of gradients that were cut to the norm, 1: at which of its points each is tells the record. The
    control is the job without privacy, whose totals are a line in the point."""
    silos, points = _outcomes(), np.linspace(-4, 4, 160)
    step = float(points[1] - points[0])
    bends = {}
    for privacy in (sf.RecordDP(noise_multiplier=50.0, clipping_norm=1.0, noise="server", retries=0), None):
        slopes = _seen_at(points, silos, privacy)["direct"].reshape(-1)
        bends[privacy is None] = np.diff(slopes, 2) / step
    assert np.abs(bends[True]).max() < 1e-4
    read = points[1:-1][bends[False] > 0.3] - 1
    off = [np.abs(read - float(y)).min() for silo in silos for y in silo["y"]]
    assert np.mean(np.array(off) <= 2 * step) > 0.9


def test_a_server_that_adds_the_noise_to_silos_reads_silos_off_the_cut() -> None:
    """Likewise of what each silo says as a whole: the mean of its records, and how many there are."""
    silos, points = _outcomes(), np.linspace(-4, 4, 160)
    step = float(points[1] - points[0])
    slopes = _seen_at(points, silos, sf.SiloDP(noise_multiplier=50.0, clipping_norm=1.0, noise="server", retries=0))
    bends = np.diff(slopes["direct"].reshape(-1), 2) / step
    off = [np.abs(points[1:-1][bends > 1] - (float(s["y"].mean()) + 1 / 4)).min() for s in silos]
    assert max(off) <= 2 * step


def test_a_server_that_adds_the_noise_sees_no_exact_counts_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many records' gradients are how long adds up to their number, which nobody declared public. The control tells
    it there as well, as was shipped."""
    privacy = sf.RecordDP(noise_multiplier=50.0, clipping_norm=1.0, noise="server", retries=0)
    assert set(_seen_at(np.zeros(1), _outcomes(), privacy)) == {"direct"}
    monkeypatch.setattr("secure_fvi.algorithms.sfvi.exact_totals", lambda _: False)
    counts = _seen_at(np.zeros(1), _outcomes(), privacy)["lengths"]
    assert abs(counts.sum() / 0.1 - 12) < 0.01
