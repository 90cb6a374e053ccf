"""SFVI: exact posteriors without tuning, invariance to the partition, and every option that changes a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from programs import (
    Conjugate,
    intercepts,
    likeliest_tau,
    make_clinics,
    make_intercepts,
    make_rate,
    make_slopes,
    unknown_tau,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import secure_fvi as sf
from secure_fvi.aggregation.base import UNABLE
from secure_fvi.errors import InputError, SecureFVIWarning
from secure_fvi.fitting import build_parties
from secure_fvi.models.six_cities import PROGRAM as SIX_CITIES
from secure_fvi.randomness import KeyedDraws
from secure_fvi.states import Moved, pack_state, unpack_state


@pytest.mark.parametrize(
    "make",
    [make_intercepts, *(pytest.param(m, marks=pytest.mark.slow) for m in (make_slopes, make_rate, make_clinics))],
)
def test_defaults_recover_conjugate_posteriors(make: Callable[[], Conjugate]) -> None:
    """Uneven silos, masked sums, no option set: 0.1 posterior sd in the mean, 10% in the sd, stops by itself."""
    problem = make()
    result = sf.fit(problem.model, problem.silos, sf.SFVI())
    assert result.converged
    for site, mean in problem.mean.items():
        sd = problem.sd[site]
        assert ((result.posterior[site].mean - mean).abs() < 0.1 * sd).all()
        assert ((result.posterior[site].sd / sd - 1).abs() < 0.1).all()
    assert result.aggregation["kind"] == "masked"


def _split(data: dict[str, Tensor], ids: Tensor, sizes: list[int]) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    parts = {name: torch.split(value, sizes) for name, value in data.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(len(sizes))], list(torch.split(ids, sizes))


def _trajectory(sizes: list[int], aggregation: object, rounds: int = 60, **options: object) -> Tensor:
    data = SIX_CITIES.load()
    order = torch.randperm(537, generator=torch.Generator().manual_seed(0))[:60]
    silos, ids = _split({k: v[order] for k, v in data.records.items()}, data.record_ids[order], sizes)
    algorithm = sf.SFVI(iterations=rounds, average_last=0.0, **options)  # type: ignore[arg-type]
    server, engine, _ = build_parties(SIX_CITIES.model, silos, algorithm, aggregation, record_ids=ids, compile=False)  # type: ignore[arg-type]
    for _ in range(rounds):
        engine.run(server.round())
    return torch.cat([v.flatten() for _, v in sorted(server.state.algorithm.eta.items())])


PARTITIONS = [[20, 40], [5, 30, 25], [10, 4, 16, 18, 12]]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"importance_samples": 3}])
def test_partition_does_not_matter(options: dict[str, object]) -> None:
    """1, 2, 3 and 5 silos of the same records: the same trajectory to 1e-8 relative. Of minibatches it is not:
    who is in one follows from each silo's own secret."""
    whole = _trajectory([60], sf.Plain(), **options)
    for sizes in PARTITIONS:
        torch.testing.assert_close(_trajectory(sizes, sf.Plain(), **options), whole, rtol=1e-8, atol=1e-8)


def test_partition_does_not_matter_under_masks() -> None:
    """The same under masked sums of 64 bits, to 1e-6."""
    whole = _trajectory([60], sf.Plain(), 30)
    for sizes in PARTITIONS[1:]:
        masked = sf.Masked(min_cohort=2, consistency_check=False)
        torch.testing.assert_close(_trajectory(sizes, masked, 30), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.later
def test_silos_that_share_no_ids_draw_differently() -> None:
    """The control of the invariance: without record ids the draws belong to silos, and the partition shows."""
    data = SIX_CITIES.load()
    ends = []
    for sizes in ([60], [20, 40]):
        silos, _ = _split({k: v[:60] for k, v in data.records.items()}, data.record_ids[:60], sizes)
        server, engine, _ = build_parties(SIX_CITIES.model, silos, sf.SFVI(iterations=20), sf.Plain(), compile=False)
        for _ in range(20):
            engine.run(server.round())
        ends.append(server.state.algorithm.eta["loc"])
    assert (ends[0] - ends[1]).abs().max() > 1e-3


def test_absent_records_are_frozen() -> None:
    """In a minibatch round, records that took no part keep their parameters and their optimiser state."""
    problem = make_intercepts()
    algorithm = sf.SFVI(iterations=5, sampling_rate=0.3)
    server, engine, _ = build_parties(problem.model, problem.silos, algorithm, sf.Plain(), compile=False)
    silo = engine.silos["silo-2"]
    before = silo.local.record["loc"].clone()  # steps write into it
    engine.run(server.round())
    silo.settle(server.state.accepted)
    moved = (silo.local.record["loc"] != before).any(-1)[:-1]
    counted = silo.local.record_moments["loc/step"].flatten()[:-1] > 0
    assert 0 < moved.sum() < len(moved)
    assert torch.equal(moved, counted)


def _batched(records: int, rate: float, iterations: int, average_last: float = 0.25, by: Any = None) -> Any:
    """A silo of so many records with a latent each, and its server."""

    def program(y: torch.Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("row", len(y)):
            own = pyro.sample("own", dist.Normal(mu, 1.0))
            pyro.sample("y", dist.Normal(own, 1.0), obs=y)

    data = [{"y": torch.linspace(-1, 1, records, dtype=torch.float64)}, {"y": torch.ones(3, dtype=torch.float64)}]
    algorithm = by or sf.SFVI(iterations=iterations, sampling_rate=rate, average_last=average_last)
    server, engine, _ = build_parties(sf.FederatedModel(program, "row"), data, algorithm, sf.Plain(), compile=False)
    return server, engine, engine.silos["silo-1"]


class Made(TorchDispatchMode):
    """Notes the sizes of tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        schema = func._schema
        if not schema.is_mutable and not any(r.alias_info for r in schema.returns):
            several = found if isinstance(found, tuple | list) else [found]
            self.sizes += [value.numel() for value in several if isinstance(value, torch.Tensor)]
        return found


def test_averages_of_records_that_stand_still_are_the_means_of_all_iterates() -> None:
    """A record's average is brought up to date when it moves, or is read; the control is to add up every iterate."""
    server, engine, silo = _batched(60, 0.1, 12, average_last=0.75)
    sums, count = 0.0, 0
    for round_ in range(12):
        engine.run(server.round())
        silo.settle(server.state.accepted)
        if round_ >= 3:
            sums, count = sums + silo.local.record["loc"], count + 1
        expected = sums / count if count else silo.local.record["loc"]
        torch.testing.assert_close(silo.local.average_at(None)["loc"], expected, rtol=1e-12, atol=1e-14)
    assert (silo.local.seen == 0).any()  # some were never drawn
    # What was stored of those that moved last, and not in the last round, is no mean of all.
    assert not torch.allclose(silo.local.record_average["loc"], expected, rtol=1e-12, atol=1e-14)


def test_a_step_that_does_not_count_leaves_every_row_as_it_was() -> None:
    """Whatever the server says first: rows are written where they lie, and said to count, and not, in turn."""
    server, engine, silo = _batched(60, 0.1, 12, average_last=1.0)
    for _ in range(3):
        engine.run(server.round())
    silo.settle(server.state.accepted)
    before = {name: value.clone() for name, value in silo.local.by_row.items()}
    engine.run(server.round())
    pending, local = silo.pending, silo.local
    assert isinstance(pending.local, Moved)
    assert all(torch.equal(silo.local.by_row[name], value) for name, value in before.items())
    after = silo.program.commit(local, pending, pending.sum_index)
    there = {name: value.clone() for name, value in after.by_row.items()}
    assert {name for name, value in before.items() if not torch.equal(there[name], value)} >= {"record/loc", "seen"}
    kept = unpack_state(pack_state(pending.local), local, Path("a file"))
    for moved in (pending.local, kept):
        assert moved.into(local, False) is local
        assert all(torch.equal(local.by_row[name], value) for name, value in before.items())
        found = moved.into(local, True)
        assert (found.averaged, found.steps) == (4, 4)
        assert all(torch.equal(found.by_row[name], value) for name, value in there.items())


@pytest.mark.parametrize("rate", [0.01, 1.0])
def test_a_batch_makes_nothing_of_the_size_of_the_silo(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5,000 records no operation gives 1,000 numbers, nor is as much drawn; the control is a round of all."""
    server, engine, silo = _batched(5_000, rate, 8, average_last=1.0)
    for _ in range(3):
        engine.run(server.round())
    uniforms = KeyedDraws.uniforms

    def drawing(self: KeyedDraws, *args: Any, **kwargs: Any) -> Any:
        found = uniforms(self, *args, **kwargs)
        made.sizes.append(found.size)
        return found

    monkeypatch.setattr(KeyedDraws, "uniforms", drawing)
    with Made() as made:
        for _ in range(3):
            engine.run(server.round())
            silo.settle(server.state.accepted)
    assert (max(made.sizes) < 1_000) is (rate < 1)


@pytest.mark.later
@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("rate", [0.01, 1.0])
@pytest.mark.parametrize("algorithm", [sf.SFVIAvg, sf.PVI])
def test_a_local_step_makes_nothing_of_the_size_of_the_silo(algorithm: Any, rate: float) -> None:
    """A round of twice the steps makes no more tensors of 5,000 numbers; the control are steps of all records."""
    counts = []
    for steps in (10, 20):
        server, engine, _ = _batched(5_000, rate, 0, by=algorithm(rounds=1, local_steps=steps, sampling_rate=rate))
        with Made() as made:
            engine.run(server.round())
            if algorithm is sf.SFVIAvg:  # whose first sum counts records
                engine.run(server.round())
        counts.append(sum(size >= 5_000 for size in made.sizes))
    assert counts[0] > 0
    assert (counts[0] == counts[1]) is (rate < 1), counts


def test_minibatch_gradients_are_unbiased() -> None:
    """Mean of 500 sampled contributions less full ones of the same draws; 4.5 standard errors, false alarm 1e-5."""
    problem = make_intercepts()
    sums: dict[float, list[np.ndarray]] = {1.0: [], 0.3: []}
    for rate in sums:
        algorithm = sf.SFVI(iterations=10, sampling_rate=rate, local_family=sf.Conditional(coupling=False))
        server, engine, _ = build_parties(problem.model, problem.silos[1:2], algorithm, sf.Plain(), compile=False)
        silo = engine.silos["silo-1"]
        message = server.program.broadcast(server.state.algorithm, 1, 0)
        for round_ in range(500):
            silo.gate.begin(round_, "round")
            view = silo.view._replace(turn=round_)
            release, _ = silo.program.contribute(message._replace(round=round_), silo.local, view, silo.gate)
            sums[rate].append(release.values)
    apart = (np.array(sums[0.3]) - np.array(sums[1.0]))[:, : -1 - UNABLE.size]
    assert (np.abs(apart.mean(0)) < 4.5 * apart.std(0) / len(apart) ** 0.5).all()


@pytest.mark.slow
def test_sampled_silos_reach_the_same_posterior() -> None:
    """Half of six silos a round, scaled up by 2: the conjugate posterior of all of them."""
    problem = make_intercepts()
    rows = torch.cat([s["y"] for s in problem.silos])
    silos = [{"y": part} for part in torch.split(rows, 10)]
    algorithm = sf.SFVI(iterations=2000, participation=0.5, average_last=0.7)
    result = sf.fit(problem.model, silos, algorithm, sf.Masked(consistency_check=False))
    assert (result.posterior["mu"].mean - problem.mean["mu"]).abs() < 0.25 * problem.sd["mu"]
    assert (result.posterior["mu"].sd / problem.sd["mu"] - 1).abs() < 0.25


@pytest.mark.slow
def test_theta_is_learned_by_empirical_bayes() -> None:
    silos = make_intercepts().silos
    result = sf.fit(sf.FederatedModel(unknown_tau, "person"), silos, sf.SFVI(iterations=1500), sf.Plain())
    best = likeliest_tau(torch.cat([s["y"] for s in silos]))
    assert result.theta["tau"].item() == pytest.approx(best, rel=0.03)


@pytest.mark.slow
def test_amortised_family_learns_its_network() -> None:
    """One linear layer holds the exact conditional of the intercepts given the record and Z_G."""
    torch.manual_seed(0)
    problem = make_intercepts()
    network = torch.nn.Linear(4, 2)
    amortised = sf.Amortised(network, features=lambda rows: rows["y"], see_global=True)
    result = sf.fit(problem.model, problem.silos, sf.SFVI(iterations=2000, schedule="cosine", local_family=amortised))
    assert (result.posterior["mu"].mean - problem.mean["mu"]).abs() < 0.1 * problem.sd["mu"]
    assert (result.posterior["mu"].sd / problem.sd["mu"] - 1).abs() < 0.1
    assert any(name.startswith("encoder.") for name in result.variational.theta)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["low_rank", "diagonal", "full"])
def test_every_global_family_fits(family: str) -> None:
    problem = make_slopes()
    algorithm = sf.SFVI(family=family, rank=1, iterations=1200, schedule="cosine")  # type: ignore[arg-type]
    result = sf.fit(problem.model, problem.silos, algorithm, sf.Plain())
    assert ((result.posterior["beta"].mean - problem.mean["beta"]).abs() < 0.15 * problem.sd["beta"]).all()
    if family != "diagonal":
        assert ((result.posterior["beta"].sd / problem.sd["beta"] - 1).abs() < 0.15).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "scale", ["diagonal", pytest.param("block", marks=pytest.mark.slow), pytest.param("dense", marks=pytest.mark.slow)]
)
def test_every_local_scale_fits(scale: str) -> None:
    """Small silos: a dense factor has the square of the records' parameters, and their noise."""
    problem = make_slopes(sizes=(5, 6, 7))
    local = sf.Conditional(scale=scale)  # type: ignore[arg-type]
    algorithm = sf.SFVI(iterations=1500, schedule="cosine", local_family=local)
    result = sf.fit(problem.model, problem.silos, algorithm, sf.Plain())
    assert ((result.posterior["beta"].mean - problem.mean["beta"]).abs() < 0.15 * problem.sd["beta"]).all()


@pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop"])
def test_other_optimisers_run(optimizer: str) -> None:
    problem = make_intercepts()
    rate = {"sgd": 0.0003}.get(optimizer, 0.02)
    algorithm = sf.SFVI(iterations=1000, optimizer=optimizer, learning_rate=rate)
    result = sf.fit(problem.model, problem.silos, algorithm, sf.Plain())
    assert (result.posterior["mu"].mean - problem.mean["mu"]).abs() < 0.5 * problem.sd["mu"]


@pytest.mark.usefixtures("few_draws")
def test_a_run_that_has_not_converged_says_so() -> None:
    problem = make_intercepts()
    with pytest.warns(SecureFVIWarning, match="without converging"):
        result = sf.fit(problem.model, problem.silos, sf.SFVI(max_iterations=50, family="diagonal"), sf.Plain())
    assert not result.converged


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "fancy"}, "family 'fancy' is unknown; choose auto"),
        ({"importance_samples": 0}, "importance_samples must be a whole number of at least 1"),
        ({"sampling_rate": 1.5}, "sampling_rate must lie in"),
        ({"optimizer": "adm"}, "optimizer 'adm' is unknown; choose one of"),
        ({"optimizer_options": {"bta": 1}}, "does not take these options"),
        ({"learning_rate": -1.0}, "learning_rate must be positive"),
        ({"schedule": "cosine"}, "needs `iterations`"),
        ({"bound": float("nan")}, "bound must lie in"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        sf.SFVI(**options)  # type: ignore[arg-type]


def test_a_contribution_past_its_bound_is_refused_and_not_quoted() -> None:
    problem = make_intercepts()
    with pytest.raises(sf.SecureFVIError, match=r"exceeds the declared bound 0\.001") as caught:
        sf.fit(problem.model, problem.silos, sf.SFVI(iterations=1, bound=1e-3))
    assert "silo 'silo-1'" in str(caught.value)


def test_dense_scale_refuses_what_it_cannot_do() -> None:
    problem = make_intercepts()
    dense = sf.Conditional(scale="dense")
    with pytest.raises(InputError, match="couples all records"):
        sf.fit(problem.model, problem.silos, sf.SFVI(sampling_rate=0.5, local_family=dense))
    with pytest.raises(InputError, match="couples records"):
        sf.fit(problem.model, problem.silos, sf.SFVI(importance_samples=2, local_family=dense))


@pytest.mark.slow
def test_same_seed_same_posterior_other_seed_another() -> None:
    model = sf.FederatedModel(intercepts, "person")
    silos = make_intercepts().silos
    ends = []
    for seed in (0, 0, 1):
        server, engine, _ = build_parties(model, silos, sf.SFVI(iterations=8), sf.Masked(), seed, compile=False)
        for _ in range(8):
            engine.run(server.round())
        ends.append(server.state.algorithm.eta["loc"])
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])
