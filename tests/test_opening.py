"""A finished run opened again: the same numbers, with and without its model; and every file that is none is refused."""

from __future__ import annotations

import copy
import json
import pickle  # noqa: TID251
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from programs import intercepts, make_intercepts, make_rate
from safetensors.torch import load_file, save_file
from torch import Tensor

import secure_fvi as sf
from secure_fvi import results
from secure_fvi.algorithms import base
from secure_fvi.algorithms.vertical.likelihoods import Gaussian
from secure_fvi.draws import SitePosterior, SitePosteriors
from secure_fvi.families.gaussian import Full
from secure_fvi.federated_model import Schema
from secure_fvi.summary import weighted_moments

pytestmark = pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")


def several(x: Tensor, y: Tensor | None = None, groups: int = 2) -> None:
    """A site of every kind of support, one of them within the bounds of another."""
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    inside = pyro.sample("inside", dist.Uniform(0.0, 2.0))
    share = pyro.sample("share", dist.Dirichlet(torch.ones(3)))
    scales = pyro.sample("scales", dist.LogNormal(torch.zeros(groups), 0.5).to_event(1))
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("records", len(x)):
        mean = beta[0] + beta[1] * x + share[0] + inside
        pyro.sample("y", dist.Normal(mean, 0.5 + tau + scales.sum()), obs=y)


def bounded(y: Tensor) -> None:
    tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
    level = pyro.sample("level", dist.Uniform(0.0, tau))
    with pyro.plate("records", len(y)):
        pyro.sample("y", dist.Normal(level, 1.0), obs=y)


_rng = torch.Generator().manual_seed(0)
SILOS: list[dict[str, Any]] = [
    {"x": torch.randn(n, generator=_rng), "y": torch.randn(n, generator=_rng)} for n in (20, 30, 25)
]
FEW = sf.SFVI(iterations=4)


def _fit(model: Any, silos: Any = SILOS, algorithm: Any = FEW, **options: Any) -> Any:
    return sf.fit(model, silos, algorithm, sf.Plain(), compile=False, **options)


@pytest.fixture(scope="module")
def fitted() -> sf.Result:
    return _fit(several, [{**silo, "groups": 2} for silo in SILOS])


@pytest.fixture
def folder(fitted: sf.Result, tmp_path: Path) -> Path:
    fitted.save(tmp_path / "run")
    return tmp_path / "run"


def _same(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_opened_without_a_model_it_is_the_same_but_for_predictions(fitted: sf.Result, folder: Path) -> None:
    again = sf.load(folder)
    assert again.to_json() == fitted.to_json() | {"saved": again.to_json()["saved"]}
    assert again.summary().to_dict() == fitted.summary().to_dict()
    assert str(again.summary()) == str(fitted.summary())
    assert _same(again.sample(50, seed=3), fitted.sample(50, seed=3))
    assert torch.equal(again.correlations().matrix, fitted.correlations().matrix)
    with pytest.raises(sf.InputError, match=r"opened without its model; give it: sf.load\(folder, model=...\)"):
        again.predict(SILOS[0])
    with pytest.raises(sf.InputError, match="the latents of silo 'silo-1' are at that silo"):
        again.local["silo-1"]


def test_opened_with_its_model_it_predicts_the_same(fitted: sf.Result, folder: Path) -> None:
    again = sf.load(folder, several, shared={"groups": 2})
    new = {"x": torch.linspace(-1, 1, 5)}
    assert _same(again.predict(new, n=7), fitted.predict(new, n=7))
    assert torch.equal(again.log_predictive(SILOS[0], n=7), fitted.log_predictive(SILOS[0], n=7))
    again.save(folder.parent / "twice")
    names = ("posterior.safetensors", "result.json")
    assert all((folder.parent / "twice" / n).read_bytes() == (folder / n).read_bytes() for n in names)


def test_another_model_is_refused(folder: Path) -> None:
    def other_bound(x: Tensor, y: Tensor | None = None, groups: int = 2) -> None:
        share = dist.Uniform(0.0, 2.5)
        with _Replaced("inside", share):
            several(x, y, groups)

    with pytest.raises(sf.InputError, match=r"no columns are given in shared=.*; of this run: groups"):
        sf.load(folder, several)
    with pytest.raises(sf.InputError, match="is not that of the run"):
        sf.load(folder, several, shared={"groups": 3})
    with pytest.raises(sf.InputError, match="is not that of the run"):
        sf.load(folder, other_bound, shared={"groups": 2})
    with pytest.raises(sf.InputError, match="does not take the data's names"):
        sf.load(folder, intercepts, shared={"groups": 2})


def _line(x: Tensor, y: Tensor | None = None) -> None:
    a, b = pyro.sample("a", dist.Normal(0.0, 5.0)), pyro.sample("b", dist.Normal(0.0, 5.0))
    with pyro.plate("records", len(x)):
        pyro.sample("y", dist.Normal(a + b * x, 1.0), obs=y)


def _steeper(x: Tensor, y: Tensor | None = None) -> None:
    a, b = pyro.sample("a", dist.Normal(0.0, 5.0)), pyro.sample("b", dist.Normal(0.0, 5.0))
    with pyro.plate("records", len(x)):
        pyro.sample("y", dist.Normal(10 * (a + b * x), 1.0), obs=y)


def test_another_program_of_the_same_sites_is_refused(tmp_path: Path) -> None:
    """It would predict other values. The controls: the program itself, and another where no one can know, which is
    warned of: under another Python, whose code is other, and of a file that says nothing."""
    _fit(_line, [{"x": silo["x"], "y": silo["y"]} for silo in SILOS]).save(tmp_path)
    with warnings.catch_warnings(action="error"):
        assert sf.load(tmp_path, _line).predict({"x": torch.zeros(2)}, n=3)
        with pytest.raises(sf.InputError, match="it has the same sites, and other code or constants"):
            sf.load(tmp_path, _steeper)
    for change in ({"python": "3.0", "digest": "another"}, None):
        _edit(program=change)(tmp_path)
        with pytest.warns(sf.SecureFVIWarning, match="cannot be told here"):
            assert sf.load(tmp_path, _steeper)


class _Replaced(pyro.poutine.messenger.Messenger):  # type: ignore[misc]
    def __init__(self, name: str, fn: Any) -> None:
        super().__init__()
        self.name, self.fn = name, fn

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] == self.name:
            msg["fn"] = self.fn


def test_a_bound_that_another_site_sets_needs_the_model(tmp_path: Path) -> None:
    """Its support reads 'Interval(0, <tau at the centre>)' in the file; drawn by that it would be silently wrong."""
    silos = [{"y": silo["y"]} for silo in SILOS]
    fitted = _fit(bounded, silos)
    fitted.save(tmp_path)
    support = {s[0]: s[5] for s in json.loads((tmp_path / "result.json").read_text())["saved"]["sites"]}["level"]
    assert "Interval" in support
    again = sf.load(tmp_path)
    assert again.posterior["tau"].mean == fitted.posterior["tau"].mean
    for refused in (lambda: again.sample(3), again.summary):
        with pytest.raises(sf.InputError, match=r"'level' cannot be drawn without the model"):
            refused()
    assert _same(sf.load(tmp_path, bounded).sample(9), fitted.sample(9))


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def _unfinished(folder: Path) -> None:
    _empty(folder)
    (folder / "config.toml").write_text("seed = 1")


def _edit(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        found = json.loads((folder / "result.json").read_text())
        for key, value in changes.items():
            table = found["saved"] if key in found["saved"] else found
            table[key] = value
        (folder / "result.json").write_text(json.dumps(found))

    return edit


def _cut(name: str, share: float) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(share * len(content))])

    return cut


def _before_versions(folder: Path) -> None:
    found = json.loads((folder / "result.json").read_text())
    del found["saved"]
    (folder / "result.json").write_text(json.dumps(found))


def _of_another_run(folder: Path) -> None:
    tensors = load_file(folder / "posterior.safetensors")
    save_file({**tensors, "mean/tau": tensors["mean/tau"] + 1e-9}, folder / "posterior.safetensors")


def _other_shape(folder: Path) -> None:
    tensors = load_file(folder / "posterior.safetensors")
    save_file({**tensors, "eta/lower": tensors["eta/lower"][1:]}, folder / "posterior.safetensors")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_empty, "holds no run: there is no result.json"),
        (_unfinished, "has not finished; continue it with --resume"),
        (_before_versions, "format 1 is read here, and this is an earlier one"),
        (_edit(format=2), "format 1 is read here, and this is 2"),
        (_edit(saved=[]), "format 1 is read here"),
        (_edit(family="cauchy"), "family 'cauchy' is unknown"),
        (_edit(family="auto"), "is damaged"),
        (_edit(sites=[["tau"]]), "is damaged"),
        (_edit(posterior={"tau": 1}), "is damaged"),
        (_edit(dtype="torch.float8"), "is damaged"),
        (_edit(theta={"a": 10**400}), "is damaged"),
        (lambda f: (f / "result.json").write_text("[" * 200_000), "damaged: no JSON"),
        (_cut("result.json", 0.7), "damaged: no JSON"),
        (_cut("result.json", 0.0), "damaged: no JSON"),
        (_cut("posterior.safetensors", 0.9), "is damaged"),
        (_cut("posterior.safetensors", 0.0), "is damaged"),
        (lambda f: (f / "posterior.safetensors").unlink(), "holds no posterior.safetensors"),
        (lambda f: (f / "result.json").write_text("[]"), "damaged: no table"),
        (_of_another_run, "are of two runs"),
        (_other_shape, "is damaged"),
    ],
)
def test_what_is_no_finished_run_is_refused_in_one_line(folder: Path, spoil: Any, words: str) -> None:
    sf.load(folder)  # the control
    spoil(folder)
    with pytest.raises(sf.InputError, match=words) as raised:
        sf.load(folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("role", ["silo", "record"])
def test_sizes_that_a_file_names_take_no_memory(folder: Path, role: str) -> None:
    """A petabyte of latents that were never in the folder. The control: no machine has it."""
    with pytest.raises(RuntimeError):
        torch.zeros(10**15)
    found = json.loads((folder / "result.json").read_text())
    _edit(sites=[*found["saved"]["sites"], ["z", role, [10**15], 0, 0, "Real()"]])(folder)
    assert sf.load(folder).sample(3)["tau"].shape == (3,)


def test_shapes_are_compared_before_anything_of_them_is_made(
    folder: Path, fitted: sf.Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a family of so many sites would hold, and records that a model would be traced with: of a file that fits,
    the control, the former is made where it takes no memory, and none of the latter is beyond a limit."""
    seen: list[str] = []
    init = Full.init

    def noted(family: Full, loc: Tensor) -> Any:
        seen.append(loc.device.type)
        return init(family, loc)

    monkeypatch.setattr(Full, "init", noted)
    sf.load(folder, several, shared={"groups": 2})
    assert seen == ["meta"]
    _edit(fields=[["x", [], "torch.float64"], ["y", [10**12], "torch.float64"]])(folder)
    monkeypatch.setattr(Schema, "dummy_rows", lambda *_: pytest.fail("made"))
    with pytest.raises(sf.InputError, match="is damaged"):
        sf.load(folder, several, shared={"groups": 2})


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(sf.InputError, match="there is no folder"):
        sf.load(tmp_path / "none")


def test_a_file_of_pickled_code_is_not_run(folder: Path, tmp_path: Path) -> None:
    """The control: unpickled, it would make a file."""

    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "exploded",)

    content = pickle.dumps(Bomb())
    for name in ("posterior.safetensors", "result.json"):
        (folder / name).write_bytes(content)
        with pytest.raises(sf.InputError, match="damaged"):
            sf.load(folder)
    assert not (tmp_path / "exploded").exists()
    pickle.loads(content)  # noqa: S301
    assert (tmp_path / "exploded").exists()


@pytest.mark.later
def test_a_run_without_a_posterior_or_an_assessment_opens_as_it_is(tmp_path: Path) -> None:
    """FedAvg's point, and a private run."""
    silos = [{"y": silo["y"]} for silo in SILOS]
    point = _fit(_level, silos, sf.FedAvg(rounds=2))
    private = _fit(_level, silos, FEW, privacy=sf.RecordDP(noise_multiplier=1.0, noise="silo"), noise_key=bytes(32))
    assert private.converged is None
    assert "not assessed: " in private.summary().heading
    assert "a point, without spread" in point.summary().heading
    for name, result in (("point", point), ("private", private)):
        result.save(tmp_path / name)
        again = sf.load(tmp_path / name, _level)
        assert again.converged == result.converged
        assert again.privacy == result.privacy
        assert str(again.summary()) == str(result.summary())
        assert _same(again.sample(4), result.sample(4))


def _level(y: Tensor) -> None:
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    with pyro.plate("records", len(y)):
        pyro.sample("y", dist.Normal(level, 1.0), obs=y)


def test_a_run_over_columns_opens_without_the_silos_own(tmp_path: Path) -> None:
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(2))
    model = sf.Columns(Gaussian(), x.sum(1))
    fitted = _fit(model, [{"x": x[:, :1]}, {"x": x[:, 1:]}], sf.Vertical(rounds=4))
    fitted.save(tmp_path)
    again = sf.load(tmp_path)
    assert _same(again.sample(9), fitted.sample(9))
    assert again.summary().to_dict() == fitted.summary().to_dict()
    assert set(again.summary().to_dict()) == {"intercept", "sigma"}
    with pytest.raises(sf.InputError, match="its predictors are at the silos"):
        sf.load(tmp_path, several)
    with pytest.raises(sf.InputError, match="silos of columns predict together"):
        again.predict({"x": x})
    copied = pickle.loads(pickle.dumps(fitted))  # noqa: S301
    assert _same(copied.sample(9), fitted.sample(9))


# ---- pickle and copy ----


def test_a_result_whose_program_was_traced_is_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secure_fvi.compiled.TRACE_AFTER_CALLS", 0)
    traced = _fit(_level, [{"y": silo["y"]} for silo in SILOS], sf.PVI(rounds=2, local_steps=2))
    graph = traced.problem.density._graph  # type: ignore[attr-defined]
    with pytest.raises(SyntaxError):
        pickle.loads(pickle.dumps(graph._run.__self__))  # noqa: S301 - the control
    assert _same(pickle.loads(pickle.dumps(traced)).sample(9), traced.sample(9))  # noqa: S301


def test_a_pickled_result_draws_and_predicts_and_holds_no_record(fitted: sf.Result) -> None:
    content = pickle.dumps(fitted)
    again = pickle.loads(content)  # noqa: S301
    assert _same(again.sample(9), fitted.sample(9))
    assert _same(again.predict({"x": torch.ones(2)}, n=3), fitted.predict({"x": torch.ones(2)}, n=3))
    with pytest.raises(sf.InputError, match="neither saved nor pickled"):
        again.local["silo-1"]
    record = SILOS[1]["y"][3:4].numpy().tobytes()
    assert record not in content
    assert record in pickle.dumps(SILOS), "the control"


def test_a_copy_has_numbers_of_its_own_and_the_same_silos(fitted: sf.Result) -> None:
    again = copy.deepcopy(fitted)
    again.variational.eta["loc"].add_(1.0)
    assert (again.sample(5)["beta"] != fitted.sample(5)["beta"]).all()
    assert again.local is fitted.local
    assert copy.copy(fitted).sample(1).keys() == fitted.sample(1).keys()


def test_a_model_that_pickle_cannot_name_is_refused_in_one_line() -> None:
    problem = make_intercepts()
    within = sf.FederatedModel(lambda y: intercepts(y), "person")
    fitted = _fit(within, problem.silos)
    with pytest.raises(sf.InputError, match=r"cannot be pickled with its model, .*<lambda>.*: define the program at"):
        pickle.dumps(fitted)
    assert copy.deepcopy(fitted).rounds == fitted.rounds
    assert pickle.dumps(_fit(problem.model, problem.silos)), "the control"


def test_a_program_with_numbers_of_another_type_is_pickled() -> None:
    fitted = _fit(_mixed, [{"x": silo["x"], "y": silo["y"]} for silo in SILOS])
    again = pickle.loads(pickle.dumps(fitted))  # noqa: S301
    assert _same(again.predict(SILOS[0], n=2), fitted.predict(SILOS[0], n=2))


_SINGLE = torch.ones(1, 1, dtype=torch.float32)


def _mixed(x: Tensor, y: Tensor) -> None:
    b = pyro.sample("b", dist.Normal(torch.zeros(1), 1.0).to_event(1))
    with pyro.plate("records", len(y)):
        pyro.sample("y", dist.Normal((x.unsqueeze(-1) @ _SINGLE) @ b, 1.0), obs=y)


def test_a_model_with_theta_and_record_latents_opens(tmp_path: Path) -> None:
    problem = make_rate()
    fitted = _fit(problem.model, problem.silos)
    fitted.save(tmp_path)
    again = sf.load(tmp_path, problem.model)
    assert _same(again.predict(problem.silos[0], n=3), fitted.predict(problem.silos[0], n=3))


def test_weighted_draws_are_kept_and_opened(tmp_path: Path) -> None:
    fitted = _fit(several, [{**silo, "groups": 2} for silo in SILOS])
    z = fitted.variational.draws(200, 3).double()
    weights = torch.rand(200, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    numbers = {"khat": 0.3, "ess": 150.0, "log_evidence": -80.0, "integration_error": 0.0}
    posterior = fitted.variational._replace(refined=base.Refined(z=z, weights=weights / weights.sum(), **numbers))
    draws = results.refined_draws(fitted.problem, posterior)
    assert draws is not None
    moments = {name: SitePosterior(*weighted_moments(d, draws.weights)) for name, d in draws.draws.items()}
    refined = replace(fitted, variational=posterior, refined=draws, posterior=SitePosteriors(moments))
    refined.save(tmp_path)
    for again in (sf.load(tmp_path), sf.load(tmp_path, several, {"groups": 2})):
        assert "k-hat 0.30, effective sample size 150" in str(again.summary())
        tables = (table.summary().rows for table in (again, refined, fitted))
        for mine, theirs, before in zip(*tables, strict=True):
            assert mine[1:6] == pytest.approx(theirs[1:6], rel=1e-12)
            assert mine[1:6] != pytest.approx(before[1:6], rel=1e-12), "the control: q's are others"
        assert _same(again.sample(30), refined.sample(30))
    tensors = load_file(tmp_path / "posterior.safetensors")
    save_file({**tensors, "refined/weights": 2 * tensors["refined/weights"]}, tmp_path / "posterior.safetensors")
    with pytest.raises(sf.InputError, match="is damaged"):
        sf.load(tmp_path)
