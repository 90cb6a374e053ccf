"""Results and checkpoints: what is saved, drawn and predicted, and that a resumed run repeats itself."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from programs import make_intercepts, make_rate
from safetensors.torch import load_file

import secure_fvi as sf
from secure_fvi import fitting
from secure_fvi.checkpoints import Checkpoints, latest_round
from secure_fvi.draws import draw_global
from secure_fvi.errors import InputError, SecureFVIWarning


@pytest.fixture(scope="module")
def result() -> sf.Result:
    problem = make_rate()
    return sf.fit(problem.model, problem.silos, sf.SFVI(iterations=400, schedule="cosine"))


@pytest.mark.slow
def test_samples_have_the_posterior_moments(result: sf.Result) -> None:
    """20,000 draws of a log-normal posterior: its mean within 4.5 standard errors, false alarm 7e-6."""
    draws = result.sample(20_000, seed=3)["rate"]
    error = draws.std() / len(draws) ** 0.5
    assert (draws.mean() - result.posterior["rate"].mean).abs() < 4.5 * error + 4.5 * error
    assert (draws > 0).all()


@pytest.mark.later
def test_draws_too_many_for_memory_are_made_in_parts(result: sf.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same distribution in parts of 300: mean and sd within 5 standard errors of those at once."""
    whole = result.sample(20_000)["rate"]
    monkeypatch.setattr("secure_fvi.draws.NUMBERS_AT_ONCE", 300)
    parts = result.sample(20_000)["rate"]
    assert parts.shape == whole.shape
    assert parts.unique().numel() == 20_000  # no part repeats another
    assert (parts.mean() - whole.mean()).abs() < 5 * (2 / 20_000) ** 0.5 * whole.std()
    assert (parts.std() / whole.std() - 1).abs() < 5 * (2 / 20_000) ** 0.5
    assert draw_global(result.problem, result.variational, 3, 0, sites=()) == {}


def test_predictions_cover_new_records(result: sf.Result) -> None:
    """log y is normal around log rate with variance 0.41 plus the posterior's: the mean within 5 standard errors."""
    draws = result.predict({"y": torch.ones(50)}, n=200)["y"]
    assert draws.shape == (200, 50)
    logs = draws.log()
    truth = result.variational.eta["loc"].item()
    assert logs.mean().item() == pytest.approx(truth, abs=5 * (0.41 / 10_000 + 0.01 / 200) ** 0.5)
    assert logs.var().item() == pytest.approx(0.41, rel=0.1)


@pytest.mark.slow
def test_the_log_predictive_density_is_that_of_the_draws() -> None:
    """A conjugate model without local sites: the exact predictive density is known."""
    prior = sf.FederatedModel(_known_noise)
    y = torch.tensor([0.5, 1.0, 1.5, 2.0], dtype=torch.float64)
    fitted = sf.fit(prior, [{"y": y}], sf.SFVI(), sf.Plain(), compile=False)
    mean, sd = fitted.posterior["mu"].mean, fitted.posterior["mu"].sd
    new = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    exact = torch.distributions.Normal(mean, (sd**2 + 0.25).sqrt()).log_prob(new)
    assert torch.allclose(fitted.log_predictive({"y": new}, n=4000), exact, atol=0.05)


def _known_noise(y: torch.Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("records", len(y)):
        pyro.sample("y", dist.Normal(mu, 0.5), obs=y)


def test_predict_refuses_other_data(result: sf.Result) -> None:
    with pytest.raises(InputError, match="predict needs the tensors of the fit"):
        result.predict({"y": torch.ones(5, 2)})


def test_unknown_sites_are_named(result: sf.Result) -> None:
    with pytest.raises(InputError, match="no global site 'b'; there are: rate"):
        result.posterior["b"]


def test_saved_files_hold_the_contract(result: sf.Result, tmp_path: Path) -> None:
    result.save(tmp_path)
    saved = json.loads((tmp_path / "result.json").read_text())
    assert {"algorithm", "seed", "silos", "rounds", "seconds", "elbo", "posterior", "theta", "metrics"} <= saved.keys()
    assert saved["aggregation"].keys() == {"kind", "exchanges", "bytes_up_per_silo", "bytes_down_per_silo"}
    assert saved["privacy"] is None
    assert saved["posterior"]["rate"]["mean"] == pytest.approx(result.posterior["rate"].mean.item())
    tensors = load_file(tmp_path / "posterior.safetensors")
    assert torch.equal(tensors["eta/loc"], result.variational.eta["loc"])


class _Killed(Exception):
    pass


@pytest.mark.parametrize(
    "options", [pytest.param({"iterations": 60}, marks=pytest.mark.slow), {"iterations": 36, "sampling_rate": 0.5}]
)
@pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")
@pytest.mark.later("options1")
def test_a_resumed_run_ends_in_the_same_bytes(tmp_path: Path, options: dict[str, Any]) -> None:
    problem = make_intercepts()

    def fit(folder: Path, **more: Any) -> bytes:
        got = sf.fit(
            problem.model, problem.silos, sf.SFVI(**options), checkpoint_dir=folder / "checkpoint",
            checkpoint_seconds=0.0, compile=False, **more,
        )  # fmt: skip
        got.save(folder)
        return (folder / "posterior.safetensors").read_bytes()

    whole = fit(tmp_path / "whole")

    def kill(progress: sf.Progress) -> None:
        if progress.round == 23:
            raise _Killed

    with pytest.raises(_Killed):
        fit(tmp_path / "killed", on_round=kill)
    assert latest_round(tmp_path / "killed" / "checkpoint") == 23
    rounds: list[int] = []
    assert fit(tmp_path / "killed", resume=True, on_round=lambda p: rounds.append(p.round)) == whole
    assert rounds[0] == 24


def test_a_checkpoint_of_other_silos_is_refused(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, 0.0)
    kept.save(1, {"server": (1, torch.ones(2)), "silo/a": (torch.zeros(1),)})
    with pytest.raises(InputError, match="another set of silos"):
        kept.load({"server": (1, torch.ones(2))})


def test_a_crash_while_a_checkpoint_is_written_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor between two phases of one round. Nobody else may read what lies there."""
    kept, template = Checkpoints(tmp_path, 0.0), {"server": (1, torch.ones(2))}
    for value in (1.0, 2.0, 3.0):
        kept.save(7, {"server": (1, torch.full((2,), value))})
    assert latest_round(tmp_path) == 7

    def crash(text: str) -> bytes:
        raise OSError("no power")

    with monkeypatch.context() as broken:
        broken.setattr("secure_fvi.checkpoints.json.dumps", crash)
        with pytest.raises(OSError, match="no power"):
            Checkpoints(tmp_path, 0.0, {"seed": "1"}).save(8, {"server": (1, torch.full((2,), 4.0))})
    loaded = kept.load(template)
    assert loaded is not None
    assert torch.equal(loaded["server"][1], torch.full((2,), 3.0))
    assert [p.name for p in tmp_path.iterdir()] == ["state.sqlite"]
    assert (tmp_path / "state.sqlite").stat().st_mode & 0o077 == 0


def test_a_checkpoint_of_an_earlier_version_is_refused_and_not_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "LATEST").write_text("round-000000007")
    with pytest.raises(InputError, match="of an earlier version"):
        _begin(tmp_path, resume=True)


def test_the_programs_constants_take_the_runs_type() -> None:
    """A model that builds constants runs in float64 although PyTorch's default is float32."""
    problem = make_intercepts()
    torch.set_default_dtype(torch.float32)
    try:
        server, engine, _ = fitting.build_parties(
            problem.model, problem.silos, sf.SFVI(iterations=9), sf.Plain(), compile=False
        )
        engine.run(server.round())
    finally:
        torch.set_default_dtype(torch.float64)
    assert server.state.algorithm.eta["loc"].dtype == torch.float64
    assert engine.silos["silo-1"].pending.local.record["loc"].dtype == torch.float64  # type: ignore[union-attr]


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize(
    "algorithm",
    [sf.PVI(local_steps=40), sf.SFVI(max_iterations=120)],
    ids=["pvi", "sfvi"],
)
@pytest.mark.slow  # by the command line: test_run.py
def test_a_run_that_has_ended_and_assessed_itself_is_resumed_to_the_same_words(algorithm: Any, tmp_path: Path) -> None:
    """As a string, which is what one types; and what was found of the final q comes back from the checkpoint."""
    problem = make_intercepts()

    def fit(**more: Any) -> sf.Result:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SecureFVIWarning)
            return sf.fit(
                problem.model, problem.silos, algorithm, sf.Plain(), compile=False,
                checkpoint_dir=str(tmp_path), checkpoint_seconds=0.0, **more,
            )  # fmt: skip

    first, again = fit(), fit(resume=True)
    assert "weighed" in str(first.convergence) or first.convergence["step_sd"] is not None
    assert again.convergence == first.convergence
    assert again.to_json() | {"seconds": 0} == first.to_json() | {"seconds": 0}


def _begin(folder: Path, **more: Any) -> sf.Run[sf.Result]:
    """Silos of three records; a round is made and kept."""
    data = torch.arange(9.0).reshape(3, 3)
    given: dict[str, Any] = {"model": _normal(1.0), "silos": [{"y": y} for y in data]}
    given |= {"algorithm": sf.SFVI(iterations=3), "aggregation": sf.Masked(), "seed": 4}
    run = sf.run(**{**given, "compile": False, "checkpoint_dir": folder, "checkpoint_seconds": 0.0, **more})
    next(run)
    return run


def _normal(scale: float) -> Any:
    def fn(y: torch.Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, scale))
        with pyro.plate("r", len(y)):
            pyro.sample("y", dist.Normal(mu, _SD), obs=y)

    return fn


_SD = 1.0


def _other(y: torch.Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Normal(mu, 2 * _SD), obs=y)


_ROWS = torch.arange(9.0).reshape(3, 3)
#: What a run is resumed with, and what of it the refusal names.
_DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 5}, "seed = 4, not 5"),
    "type": ({"dtype": torch.float32}, "dtype = torch.float64, not torch.float32"),
    "option": ({"algorithm": sf.SFVI(iterations=3, learning_rate=0.1)}, "algorithm.learning_rate = 0.05, not 0.1"),
    "length": ({"algorithm": sf.SFVI(iterations=4)}, "algorithm.iterations = 3, not 4"),
    "algorithm": ({"algorithm": sf.PVI()}, "algorithm = SFVI, not PVI"),
    "family": (
        {"algorithm": sf.SFVI(iterations=3, silo_family=sf.Conditional(coupling=False))},
        "another algorithm.silo_family",
    ),
    "sum": ({"aggregation": sf.Masked(bits=32)}, "aggregation.bits = 64, not 32"),
    "kind of sum": ({"aggregation": sf.Plain()}, "aggregation = Masked, not Plain"),
    "privacy": ({"privacy": sf.SiloDP(epsilon=9.0)}, "privacy = None, not SiloDP"),
    "names": ({"silo_ids": ["a", "b", "c"]}, "silos = silo-1, silo-2, silo-3, not a, b, c"),
    "program": ({"model": _other}, "another model"),
    "constant of a program": ({"model": _normal(2.0)}, "another model"),
    "role": ({"model": sf.FederatedModel(_normal(1.0), "r", start={"mu": 1.0})}, "another model"),
    "value": ({"silos": [{"y": y} for y in _ROWS + torch.eye(3)[:, :1] * 1e-9]}, "another data of silo 'silo-1'"),
    "order": ({"silos": [{"y": y} for y in _ROWS.flip(0)]}, "another data of silo 'silo-1', another data of silo"),
    "record": ({"silos": [{"y": y[:3 - j]} for j, y in enumerate(_ROWS)]}, "another data of silo 'silo-2'"),
    "ids": ({"record_ids": list(torch.arange(9).reshape(3, 3))}, "record_ids"),
}  # fmt: skip


@pytest.mark.later
@pytest.mark.parametrize("what", _DIFFERENT)
def test_a_run_is_resumed_with_what_it_was_begun_with_or_not_at_all(what: str, tmp_path: Path) -> None:
    _begin(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    changed, words = _DIFFERENT[what]
    with pytest.raises(InputError, match=re.escape(words)) as raised:
        _begin(tmp_path, resume=True, **changed)
    assert "\n" not in str(raised.value)
    assert before == {p.name: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


def test_a_constant_that_a_program_names_is_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _begin(tmp_path)
    monkeypatch.setitem(globals(), "_SD", 2.0)
    with pytest.raises(InputError, match="another model"):
        _begin(tmp_path, resume=True)


def test_what_changes_no_result_may_differ_in_a_resumed_run(tmp_path: Path) -> None:
    """The control: the same run, its function and data made anew, in arrays, on other threads."""
    _begin(tmp_path)
    silos = [{"y": y.numpy()} for y in _ROWS]
    run = _begin(tmp_path, resume=True, silos=silos, model=_normal(1.0), threads=2, batch_silos=True)
    assert run.server.rounds == 2


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((sf.Vertical(),), {}, "vertical does not fit this model"),
        ((sf.PVI,), {}, "algorithm must be one, such as"),
        (("pvi",), {}, "algorithm must be one, such as"),
        ((sf.Masked(),), {}, "algorithm must be one, such as"),
        ((sf.PVI(), sf.Masked), {}, "give sf.Plain"),
        ((sf.PVI(),), {"checkpoint_dir": 3}, "must be the path of a folder"),
        ((sf.PVI(),), {"checkpoint_dir": __file__}, "must be the path of a folder"),
        ((sf.PVI(),), {"resume": True}, "resume needs checkpoint_dir"),
    ],
)  # fmt: skip
def test_arguments_in_the_wrong_place_are_refused_in_one_line(arguments: Any, options: Any, words: str) -> None:
    problem = make_intercepts()
    with pytest.raises(InputError, match=words) as raised:
        sf.run(problem.model, problem.silos, *arguments, **options)
    assert "\n" not in str(raised.value)
