"""No engine accepts a job that another refuses: every value of every option, at the door of each, without a round.

Doors: `fit` (`build_parties`), a silo's process (`SiteJob`), a server's (`remote_federation`, then what it builds once
all have joined), FLARE's carrier, and the key holder (`HolderJob`). They build all that they build, but for keys
of secure sums and ledgers, which no option decides on; a model is traced once. `EXCEPTIONS` are the honest ones.
"""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pyro
import pytest
import torch
from pyro.distributions import Normal
from torch import Tensor

import secure_fvi as sf
from secure_fvi import fitting
from secure_fvi.aggregation import Plain
from secure_fvi.aggregation.parties import local_parties
from secure_fvi.algorithms import natural
from secure_fvi.algorithms.base import Problem
from secure_fvi.algorithms.local_fit import LocalFitOptions
from secure_fvi.building import Guards, Machine, build_problem
from secure_fvi.deployment import holder_job, serving, site_job
from secure_fvi.disclosure import disclose
from secure_fvi.errors import InputError, PolicyError
from secure_fvi.federated_model import read_data
from secure_fvi.fitting import check_schemas_agree
from secure_fvi.privacy.gate import NoiseSource
from secure_fvi.runs.config import AGGREGATIONS, ALGORITHMS, PRIVACIES, Config, chosen, named, parse
from secure_fvi.silo import silo_view

SILOS = ("east", "north", "south", "west")
#: What runs in one process alone, and why.
EXCEPTIONS = {
    "vertical programs": "they bring all silos' columns; between sites each silo has a file, and the job an alignment",
    "run.batch_silos": "silos of one process compute together; between sites there is nothing to put together",
}
#: What an algorithm needs to be a job at all, under privacy too.
BASES: dict[str, dict[str, Any]] = {
    "bcm": {},
    "fedavg": {"rounds": 2, "weights": "equal", "total_records": 40},
    "fedvi": {"rounds": 2, "weights": "equal"},
    "pvi": {"rounds": 2},
    "sfvi": {"iterations": 3},
    "sfvi-avg": {"rounds": 2, "weights": "equal", "total_records": 40, "family": "diagonal"},
    "streaming-vb": {"reveal_changes": True, "passes": 2},
    "vcl": {"reveal_changes": True},
}
SUMS: tuple[dict[str, Any], ...] = (
    {"kind": "plain"},
    {"kind": "masked"},
    {"kind": "masked", "consistency_check": False},
    {"kind": "homomorphic"},
    {"kind": "homomorphic", "masks": False},
    {"kind": "homomorphic", "scheme": "ckks"},
)
PRIVACY: tuple[dict[str, Any] | None, ...] = (
    None,
    {"unit": "record", "noise_multiplier": 2.0},
    {"unit": "record", "noise_multiplier": 2.0, "noise": "silo"},
    {"unit": "silo", "noise_multiplier": 2.0},
    {"unit": "silo", "noise_multiplier": 2.0, "noise": "server", "target_quantile": 0.5},
)
OF_LOCAL_FIT = {f.name for f in dataclasses.fields(LocalFitOptions)}
STRINGS = {"optimizer": ("adam", "sgd", "lbfgs"), "local_optimizer": ("natural", "closed_form", "gradient", "adam")}


def _values(name: str, hint: Any) -> Iterator[Any]:
    """The values of an option that matter: every name, both truths, and numbers at and around the edges."""
    if get_origin(hint) in (types.UnionType, Union):
        for part in get_args(hint):
            yield from _values(name, part)
    elif get_origin(hint) is Literal:
        yield from get_args(hint)
    elif hint is bool:
        yield from (False, True)
    elif hint is int:
        yield from (0, 1, 5)
    elif hint is float:
        yield from (0.0, 0.3, 1.0)
    elif hint is str:
        yield from STRINGS.get(name, ())
    elif dataclasses.is_dataclass(hint):
        for field, inner in get_type_hints(hint).items():
            for value in _values(field, inner):
                yield {field: value}


def _one_at_a_time(cls: type[Any]) -> Iterator[dict[str, Any]]:
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        for value in _values(field.name, hints[field.name]):
            yield {field.name: value}


def _jobs(algorithm: str) -> Iterator[dict[str, Any]]:
    """Each option alone, without privacy and with either unit's; each kind of sum with each privacy, and each option of
    these."""
    base = {"name": algorithm, **BASES[algorithm]}
    for change in _one_at_a_time(named(ALGORITHMS, "", algorithm)):
        of_local_fit = next(iter(change)) in OF_LOCAL_FIT and algorithm in ("bcm", "pvi", "streaming-vb", "vcl")
        if of_local_fit and algorithm != "pvi":
            continue
        for dp in (None,) if of_local_fit else (None, PRIVACY[2], PRIVACY[3]):
            yield {"algorithm": {**base, **change}, "aggregation": SUMS[1], "privacy": dp}
    for sums, dp in itertools.product(SUMS, PRIVACY):
        yield {"algorithm": base, "aggregation": sums, "privacy": dp}
    for kind in AGGREGATIONS:
        for change in _one_at_a_time(named(AGGREGATIONS, "", kind)):
            yield {"algorithm": base, "aggregation": {"kind": kind, **change}, "privacy": None}
    for unit in PRIVACIES:
        for change in _one_at_a_time(named(PRIVACIES, "", unit)):
            dp = {"unit": unit, "noise_multiplier": 2.0, **change}
            if "epsilon" in change:
                del dp["noise_multiplier"]
            yield {"algorithm": base, "aggregation": SUMS[1], "privacy": dp}


def _config(job: Mapping[str, Any], **more: Any) -> Config:
    table = {
        "model": {"program": "six-cities"},  # never looked up: `world` puts its own model there
        "partition": {"ids": list(SILOS), "count": len(SILOS)},
        "run": {"compile": False},
        **job,
        **more,
    }
    return parse({k: v for k, v in table.items() if v is not None}, "job")


def _mean(x: Tensor, y: Tensor) -> None:
    mu = pyro.sample("mu", Normal(0.0, 5.0))
    with pyro.plate("records", len(y)):
        pyro.sample("y", Normal(mu, 1.0), obs=y)


def _shifted(x: Tensor, y: Tensor) -> None:
    mu = pyro.sample("mu", Normal(0.0, 5.0))
    shift = pyro.sample("shift", Normal(0.0, 1.0))
    with pyro.plate("records", len(y)):
        pyro.sample("y", Normal(mu + shift, 1.0), obs=y)


def _encode(x: Tensor) -> Any:
    return {"shift": Normal(x.mean(), 1.0)}


class Doors:
    """Every way in. Each takes a job's table and raises InputError where it is refused."""

    def __init__(self, model: sf.FederatedModel, rows: Mapping[str, dict[str, Tensor]]) -> None:
        self.model, self.rows = model, rows
        self.floor = types.SimpleNamespace(min_noise_multiplier=0.0, dp="optional")
        self.schema = check_schemas_agree({n: read_data(r, n, torch.float64)[0] for n, r in rows.items()})

    def said(self, job: Mapping[str, Any], folder: Path) -> dict[str, str]:
        """What each door says against the job; nothing where it lets it in. FLARE's build what the server's does, and
        the holder, who has no model, hears of options alone: they are left out where the model decided."""
        found = {
            "fit": _refusal(self.local, job),
            "silo": _refusal(self.silo, job, folder),
            "server": _refusal(self.server, job),
        }
        options = _refusal(self.carried, job, kind="flare")
        homomorphic = job["aggregation"]["kind"] == "homomorphic"
        if options or not found["fit"]:
            found["flare"] = options
        if homomorphic and (options or not found["fit"]):
            found["holder"] = _refusal(self.holder, job, folder)
        return found

    def local(self, job: Mapping[str, Any]) -> None:
        algorithm, sums, dp = chosen(_config(job))
        fitting.build_parties(
            self.model, list(self.rows.values()), algorithm, sums, silo_ids=SILOS, compile=False, privacy=dp
        )

    def silo(self, job: Mapping[str, Any], folder: Path) -> None:
        config = _config(job)
        home = types.SimpleNamespace(
            id="north", path=folder, state_folder=folder, seen_file=folder / "seen.sqlite",
            state_secret=lambda: bytes(32),
        )  # fmt: skip
        policy = types.SimpleNamespace(privacy=self.floor, sandbox="off", files=())
        offer = types.SimpleNamespace(job="a", silos=SILOS, config=config, data_set="data", model=b"", package=b"")
        decision = types.SimpleNamespace(
            offer=offer, policy=policy, local_config=lambda _: config, data=None, charged=0
        )  # fmt: skip
        site_job.SiteJob(home, decision, site_job.Local(), lambda *_: None)  # type: ignore[arg-type]

    def carried(self, job: Mapping[str, Any], **engine: str) -> serving.RemoteFederation:
        home: Any = types.SimpleNamespace(role="server", path="hub", state_secret=lambda: bytes(32))
        folder: Any = types.SimpleNamespace(checkpoints=Path("none"))
        return serving.remote_federation(_config(job, **({"engine": engine} if engine else {})), home, folder, "")

    def server(self, job: Mapping[str, Any]) -> None:
        of = self.carried(job)
        privacy, dtype = of.privacy, torch.float64
        problem = serving.build_problem(
            of.model, self.schema, of.algorithm, SILOS, 0, privacy, Machine("cpu", dtype, False)
        )  # fmt: skip
        serving.program_of(of, problem)

    def holder(self, job: Mapping[str, Any], folder: Path) -> None:
        home = types.SimpleNamespace(id="escrow", state_folder=folder)
        offer = types.SimpleNamespace(job="a", silos=SILOS, config=_config(job))
        holder_job.HolderJob(home, types.SimpleNamespace(offer=offer), lambda: 0)  # type: ignore[arg-type]


@pytest.fixture
def doors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Doors:
    """With everything that no option decides on made cheap: keys, ledgers, the model's tracing."""
    generator = torch.Generator().manual_seed(0)
    rows = {n: {"x": torch.randn(5, generator=generator), "y": torch.randn(5, generator=generator)} for n in SILOS}
    fedvi = request.getfixturevalue("algorithm") == "fedvi"
    model = (
        sf.FederatedModel(_shifted, "records", ("shift",), sf.SiloEncoder(_encode, ("x",)))
        if fedvi
        else sf.FederatedModel(_mean, "records")
    )
    found = Doors(model, rows)
    traced: list[Problem] = []

    def problem(model: Any, schema: Any, algorithm: Any, silos: Any, seed: Any, privacy: Any, here: Any) -> Problem:
        if not traced:
            traced.append(build_problem(model, schema, algorithm, silos, seed, privacy, here))
        return traced[0]._replace(privacy=privacy)

    monkeypatch.setattr(fitting, "local_parties", lambda _, ids, **_more: local_parties(Plain(), ids))
    for module in (fitting, site_job, serving):
        monkeypatch.setattr(module, "build_problem", problem)
    for module in (site_job, serving):
        monkeypatch.setattr(module, "model_for", lambda *_, **__: (model, "a model"))
    monkeypatch.setattr(site_job, "silo_part", lambda config, silo, *_: (rows[silo], torch.arange(5), True))

    def gates(job: site_job.SiteJob, _: str, noise: NoiseSource) -> Guards:
        return Guards({job.home.id: job._gate((lambda *_: None) if job.program.terms else None, noise)})

    monkeypatch.setattr(site_job.SiteJob, "_guards", gates)
    priors, quadratic = dict[bool, Any](), natural.quadratic  # of one model

    def prior(fn: Any, at: Any, full: bool, dtype: Any) -> Any:
        if full not in priors:
            priors[full] = quadratic(fn, at, full, dtype)
        return priors[full]

    monkeypatch.setattr("secure_fvi.algorithms.prior.quadratic", prior)
    views: dict[str, Any] = {}  # records are read against the model once: no option decides on that

    def view(silo: str, *rest: Any) -> Any:
        if silo not in views:
            views[silo] = silo_view(silo, *rest)
        return views[silo]

    for module in (fitting, site_job):
        monkeypatch.setattr(module, "silo_view", view)
    return found


def _refusal(act: Callable[..., object], *arguments: Any, **named: Any) -> str:
    try:
        act(*arguments, **named)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("algorithm", BASES)
def test_no_engine_accepts_what_another_refuses(algorithm: str, doors: Doors, tmp_path: Path) -> None:
    accepted = refused = 0
    for job in _jobs(algorithm):
        said = doors.said(job, tmp_path)
        assert len(set(said.values())) == 1, (job, said)
        accepted, refused = accepted + (not said["fit"]), refused + bool(said["fit"])
    assert accepted > 1  # what visits one silo after the other runs under plain sums alone
    assert refused > 30


@pytest.mark.parametrize("algorithm", ["sfvi-avg"])
def test_a_check_that_stands_in_one_door_only_is_found(
    algorithm: str, doors: Doors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: a silo that does not ask what a job discloses takes the trusted barycenter under masked sums."""
    trusted = {"name": "sfvi-avg", "rounds": 1, "family": "diagonal", "barycenter": "trusted"}
    job = {"algorithm": trusted, "aggregation": SUMS[1], "privacy": None}
    assert len(set(doors.said(job, tmp_path).values())) == 1

    def unasked(algorithm: Any, sums: Any, dp: Any, silos: int) -> Any:
        return disclose(algorithm, Plain(), dp, silos)

    monkeypatch.setattr(site_job, "disclose", unasked)
    said = doors.said(job, tmp_path)
    assert not said["silo"]
    assert "each silo's own term (barycenter = 'trusted'" in said["fit"]


@pytest.mark.parametrize("algorithm", ["sfvi"])
def test_the_exceptions_are_refused_where_they_cannot_run(algorithm: str, doors: Doors, tmp_path: Path) -> None:
    """And run where they can, as tests of their own show (test_batching.py, test_columns.py, tests/vertical)."""
    assert len(EXCEPTIONS) == 2
    job = {"algorithm": {"name": "sfvi"}, "run": {"batch_silos": True}}
    for door in (doors.silo, doors.holder):
        assert "run.batch_silos" in _refusal(door, {**job, "aggregation": SUMS[3]}, tmp_path)
    assert "run.batch_silos" in _refusal(doors.server, job)
    vertical = {
        "model": {"program": "heart"}, "algorithm": {"name": "vertical"}, "partition": None,
        "aggregation": SUMS[3],
    }  # fmt: skip
    for door in (doors.silo, doors.holder):
        assert "come with the program, in one process" in _refusal(door, vertical, tmp_path)
    assert "come with the program, in one process" in _refusal(doors.server, vertical)


@pytest.mark.parametrize("algorithm", ["sfvi"])
def test_a_site_holds_its_floor_against_the_noise_that_it_derives(algorithm: str, doors: Doors, tmp_path: Path) -> None:
    """Whatever the offer's options were taken for. The control: at the floor itself."""
    job = {"algorithm": {"name": "sfvi", "iterations": 3}, "aggregation": SUMS[1], "privacy": PRIVACY[1]}
    for least, refused in ((2.0, False), (2.5, True)):
        doors.floor.min_noise_multiplier = least
        with pytest.raises(PolicyError, match=r"multiplier of 2, .* at least 2\.5") if refused else nullcontext():
            doors.silo(job, tmp_path)
    doors.floor.dp = "required"
    with pytest.raises(PolicyError, match="adds no noise"):
        doors.silo({**job, "privacy": None}, tmp_path)


@pytest.mark.parametrize("algorithm", ["sfvi"])
@pytest.mark.parametrize("own_ids", [False, True])
def test_a_site_refuses_a_file_joined_to_itself(
    algorithm: str, doors: Doors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_ids: bool
) -> None:
    """Unless ids of its own say that these are different people."""
    rows = {n: v.repeat(2) for n, v in {"x": torch.randn(60), "y": torch.randn(60)}.items()}
    monkeypatch.setattr(site_job, "silo_part", lambda *_: (rows, torch.arange(120), own_ids))
    said = _refusal(doors.silo, {"algorithm": {"name": "sfvi", "iterations": 3}}, tmp_path)
    assert ("60 of 120 rows repeat another one" in said) == (not own_ids)
