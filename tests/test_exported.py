"""A program as a graph: the same numbers as the program, and nothing but tensor operations can be said in it."""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import programs
import pyro
import pyro.distributions as dist
import pytest
import torch
from programs import altered
from torch import Tensor

import secure_fvi as sf
from secure_fvi import exported
from secure_fvi.algorithms.refining import REFINE
from secure_fvi.compiled import agree
from secure_fvi.deployment import fenced
from secure_fvi.deployment.fenced import _framed, export
from secure_fvi.errors import InputError
from secure_fvi.exported import GraphDensity, Program, read_program
from secure_fvi.federated_model import FederatedModel, Schema, read_data
from secure_fvi.fitting import build_parties
from secure_fvi.later import Later
from secure_fvi.messages import ROUND, decode_broadcast
from secure_fvi.silo import Silo

#: Short fits.
pytestmark = [
    pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning"), pytest.mark.usefixtures("few_draws")
]  # fmt: skip


class Traced:
    """What the fence is to `build_problem`, without a fence."""

    def __init__(self, model: FederatedModel) -> None:
        self._model = model
        self.roles = FederatedModel(_never, model.record_plate, model.silo_sites)

    def exported(self, schema: Schema, dtype: torch.dtype) -> Program:
        return read_program(export(self._model, schema, dtype), schema)


def _never(**_: Any) -> None:
    raise AssertionError("the program's own code was run")


def fitted(model: Any, made: programs.Conjugate, algorithm: Any, **options: Any) -> dict[str, Tensor]:
    result = sf.fit(model, made.silos, algorithm, sf.Plain(), seed=4, compile=False, **options)
    return {**result.variational.eta, **result.variational.theta}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """What a silo takes of modules that are loaded when they are used, and what others do; phases that were asked."""
    found, at = {who: set[str]() for who in ("silo", "server", "fence", "phases")}, ["server"]
    load, handle, begin, export = Later.__getattr__, Silo.handle, GraphDensity.start_at, Traced.exported

    def noted(module: Any, wanted: str) -> Any:
        found[at[-1]].add(module._name.rpartition(".")[2])
        return load(module, wanted)

    def by(who: str, call: Callable[..., Any], *args: Any) -> Any:
        at.append(who)
        try:
            return call(*args)
        finally:
            at.pop()

    def handled(silo: Silo, message: bytes) -> bytes:
        found["phases"] |= {decode_broadcast(message[1:]).phase} if message[:1] == ROUND else set()
        by("silo", silo.program.blank)  # which a site holds the end of a job against
        return by("silo", handle, silo, message)

    monkeypatch.setattr(Later, "__getattr__", noted)
    monkeypatch.setattr(Silo, "handle", handled)
    monkeypatch.setattr(GraphDensity, "start_at", lambda *args: by("silo", begin, *args))
    monkeypatch.setattr(Traced, "exported", lambda *args: by("fence", export, *args))
    return found


def check_taken(taken: dict[str, set[str]]) -> None:
    """Of a program that a sandbox has traced a silo loads no server's half and no reader of programs; the server, which
    is the control, loads the former alone."""
    readers = {"data_contract", "discovery", "program_density", "program_sites"}
    assert REFINE in taken["phases"]
    assert taken["silo"] == set()
    assert {"final_server", "refining_server"} <= taken["server"] - readers == taken["server"]
    assert taken["fence"] & readers


@pytest.mark.slow
def test_the_final_sum_of_the_graph_is_that_of_the_program(taken: dict[str, set[str]]) -> None:
    """Without latents of records: the likelihood was counted as often as there are records."""
    model, y = FederatedModel(plain), torch.linspace(-1, 2, 12, dtype=torch.float64)
    data, algorithm = [{"y": part} for part in y.split([5, 4, 3])], sf.SFVIAvg(rounds=2, local_steps=25)
    found = [sf.fit(Traced(model), data, algorithm, sf.Plain(), seed=4, compile=False)]
    check_taken(taken)
    found += [sf.fit(model, data, algorithm, sf.Plain(), seed=4, compile=False)]
    ours, theirs = (result.convergence["log_evidence"] for result in found)
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [sf.SFVI(max_iterations=2), sf.PVI(max_rounds=2, local_steps=2)])
def test_a_silo_of_a_traced_program_takes_no_servers_half(
    algorithm: Any, taken: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secure_fvi.algorithms.refining_server.worthwhile", lambda rest: rest.seen is not None)
    y = torch.linspace(-1, 2, 12, dtype=torch.float64)
    sf.fit(Traced(FederatedModel(plain)), [{"y": part} for part in y.split([5, 4, 3])], algorithm, compile=False)
    check_taken(taken)


@pytest.mark.parametrize(
    ("make", "algorithm"),
    [
        pytest.param(programs.make_intercepts, sf.SFVI(iterations=24), marks=pytest.mark.slow),
        (programs.make_clinics, sf.SFVI(iterations=12, importance_samples=3)),
        pytest.param(programs.make_rate, sf.SFVIAvg(rounds=2, local_steps=25), marks=pytest.mark.slow),
        pytest.param(programs.make_slopes, sf.PVI(rounds=2, local_steps=25), marks=pytest.mark.slow),
    ],
)
@pytest.mark.later("make_clinics-algorithm1")
def test_a_fit_of_the_graph_is_the_fit_of_the_program(make: Callable[[], programs.Conjugate], algorithm: Any) -> None:
    """Past the step from which calls are traced again (`TRACE_AFTER_CALLS`)."""
    made = make()
    graph, program = (fitted(model, made, algorithm) for model in (Traced(made.model), made.model))
    for name, value in program.items():
        assert torch.allclose(graph[name], value, rtol=1e-4, atol=1e-6), name
    assert not torch.allclose(program["loc"], fitted(made.model, made, sf.SFVI(iterations=1))["loc"])


@pytest.mark.later
def test_under_record_privacy_each_record_is_alone_in_the_graph() -> None:
    made = programs.make_intercepts()
    algorithm = sf.SFVI(iterations=12, sampling_rate=0.5)
    privacy = sf.RecordDP(epsilon=50.0, delta=1e-3, noise="server", clipping_norm=1.0)
    found = [fitted(m, made, algorithm, privacy=privacy, noise_key=bytes(32)) for m in (Traced(made.model), made.model)]
    assert torch.allclose(found[0]["loc"], found[1]["loc"], rtol=1e-4, atol=1e-6)


def plain(y: Tensor) -> None:
    m = pyro.sample("m", dist.Normal(0.0, 2.0))
    with pyro.plate("records", len(y)):
        pyro.sample("y", dist.Normal(m, 1.0), obs=y)


def correlated(y: Tensor) -> None:
    scale = pyro.sample("s", dist.HalfCauchy(torch.ones(2)).to_event(1))
    factor = pyro.sample("L", dist.LKJCholesky(2, 1.5))
    with pyro.plate("records", len(y)):
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(2), scale_tril=scale.diag_embed() @ factor),
                    obs=torch.stack([y, y], -1))  # fmt: skip


def mixture(y: Tensor) -> None:
    share = pyro.sample("w", dist.Dirichlet(torch.ones(3)))
    mean = pyro.sample("m", dist.Normal(torch.zeros(3), 2.0).to_event(1))
    with pyro.plate("records", len(y)):
        pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(share), dist.Normal(mean, 1.0)), obs=y)


def writes(y: Tensor) -> None:
    m = pyro.sample("m", dist.Normal(0.0, 2.0))
    level = torch.zeros(3)
    level[1] = 2.0
    with pyro.plate("records", len(y)):
        pyro.sample("y", dist.StudentT(4.0, m + level.sum(), 1.0), obs=y)


def looks_at_values(y: Tensor) -> None:
    m = pyro.sample("m", dist.Normal(0.0, 2.0))
    with pyro.plate("records", len(y)):
        pyro.sample("y", dist.Normal(m + 1 if y.sum() > 3 else m, 1.0), obs=y)


def counts_records(y: Tensor) -> None:
    m = pyro.sample("m", dist.Normal(0.0, 2.0))
    with pyro.plate("records", len(y)):
        pyro.sample("y", dist.Normal(m * 2 if len(y) > 4 else m, 1.0), obs=y)


def draws(y: Tensor) -> None:
    m = pyro.sample("m", dist.Normal(0.0, 2.0))
    with pyro.plate("records", len(y)):
        pyro.sample("y", dist.Normal(m + torch.randn(()), 1.0), obs=y)


def schema_of(y: Tensor) -> Schema:
    return read_data({"y": y}, "a", torch.float64)[0]


LINE = schema_of(torch.zeros(3))


@pytest.mark.later
@pytest.mark.parametrize("fn", [plain, correlated, mixture, writes])
def test_usual_programs_can_be_traced(fn: Any) -> None:
    """`export` compares values, gradients and starts itself, for 1, 2 and 5 records; `read_program` all shapes."""
    model = FederatedModel(fn)
    assert read_program(export(model, LINE, torch.float64), LINE).layout.size("global") > 0


def many_columns(y: Tensor, **columns: Tensor) -> None:
    m = pyro.sample("m", dist.Normal(0.0, 2.0))
    with pyro.plate("records", len(y)):
        pyro.sample("y", dist.Normal(m * sum(columns.values()), 1.0), obs=y)


def test_many_columns_are_no_loop_over_records() -> None:
    """What the tracer looks at in each column was counted with the program's own calls, and a dozen were too many."""
    schema = Schema(tuple((name, (), torch.float64) for name in "abcdefghijkly"), {})
    content = export(FederatedModel(many_columns, record_plate="records"), schema, torch.float64)
    assert read_program(content, schema).layout.size("global") == 1


def looks_at_draws(y: Tensor) -> None:
    m = pyro.sample("m", dist.Normal(0.0, 2.0))
    with pyro.plate("records", len(y)):
        pyro.sample("y", dist.Normal(m, 1.0 if bool((y > 0.0).all()) else 2.0), obs=y)


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (looks_at_values, "is not a sum over records"),
        (looks_at_draws, "the model cannot be traced: values decide on what it computes"),
        (counts_records, "the model cannot be traced"),
        (draws, "draws random numbers by itself"),
    ],
)
def test_what_a_graph_cannot_say_is_refused(fn: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        export(FederatedModel(fn), LINE, torch.float64)


def without_a_centre(y: Tensor) -> None:
    m = pyro.sample("m", dist.Normal(0.0, 2.0))
    with pyro.plate("records", len(y)):
        factor = pyro.sample("L", dist.LKJCholesky(2, 1.5))
        pyro.sample("y", dist.Normal(m + factor[..., 1, 0], 1.0), obs=y)


@pytest.mark.parametrize(
    ("differs", "says"),
    [
        ((), ""),  # the control
        ((0,), "its graph computes something else for 1 records"),
        ((6,), "its start depends on values of the data"),
    ],
)
def test_a_graph_that_is_not_the_program_is_refused(
    differs: tuple[int, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients of 1, 2 and 5 records, then start and parameters, each compared in its turn."""
    turn = itertools.count()
    monkeypatch.setattr(fenced, "agree", lambda ours, theirs: agree(ours, theirs) and next(turn) not in differs)
    with pytest.raises(InputError, match=f"the model cannot be traced: {says}") if says else nullcontext():
        export(FederatedModel(plain), LINE, torch.float64)


def test_what_cannot_be_written_down_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record's latent that starts nowhere, an encoder, a number of another kind, a graph that fails."""
    with pytest.raises(InputError, match="record site 'L' has a prior without mean and quantiles; give its start"):
        export(FederatedModel(without_a_centre, record_plate="records"), LINE, torch.float64)
    with pytest.raises(InputError, match="a program with an encoder cannot be exported"):
        export(SimpleNamespace(encoder=plain), LINE, torch.float64)  # type: ignore[arg-type]
    graph = torch.fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (graph.placeholder("x"), 1j)),))
    with pytest.raises(InputError, match="an argument of type complex"):
        fenced._encode("evaluate", torch.fx.GraphModule({}, graph), {})
    monkeypatch.setattr(fenced, "read_program", lambda *_: SimpleNamespace(evaluate=lambda *_: 1 / 0))
    with pytest.raises(InputError, match="cannot be traced: with 1 records: ZeroDivisionError"):
        export(FederatedModel(plain), LINE, torch.float64)


def counted(y: Tensor) -> None:
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with pyro.plate("records", len(y)):
        pyro.sample("y", dist.Poisson(rate), obs=y)


@pytest.mark.later
@pytest.mark.parametrize("traced", [True, False])
def test_data_that_do_not_fit_are_refused_with_and_without_the_program(traced: bool) -> None:
    model = FederatedModel(counted)
    good = [{"y": torch.arange(5.0)}, {"y": torch.arange(7.0)}]
    bad = [good[0], {"y": torch.tensor([1.0, -2.0, 0.5, 3.0])}]
    algorithm = sf.SFVI(iterations=2)
    assert sf.fit(Traced(model) if traced else model, good, algorithm, sf.Plain())
    with pytest.raises(InputError, match=r"'silo-2': .*not fit site 'y' in 2 of 4 rows: Poisson takes whole"):
        sf.fit(Traced(model) if traced else model, bad, algorithm, sf.Plain())


def masked(y: Tensor, seen: Tensor) -> None:
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with pyro.plate("records", len(y)):
        pyro.sample("y", dist.Poisson(rate).mask(seen > 0), obs=y)


@pytest.mark.parametrize("traced", [True, False])
def test_a_code_that_a_distribution_masks_fits_with_and_without_the_program(traced: bool) -> None:
    """A graph looked at the masks of handlers alone. The control: where it is not masked, it does not fit."""
    data = {"y": torch.tensor([1.0, -9.0, 4.0]), "seen": torch.tensor([1.0, 0.0, 1.0])}
    model = Traced(FederatedModel(masked)) if traced else FederatedModel(masked)
    assert sf.fit(model, [data], sf.SFVI(iterations=2), sf.Plain())
    with pytest.raises(InputError, match="not fit site 'y' in 1 of 3 rows: Poisson takes whole"):
        sf.fit(model, [{**data, "seen": torch.ones(3)}], sf.SFVI(iterations=2), sf.Plain())


def by_group(y: Tensor, of: Tensor, score: Tensor) -> None:
    level = pyro.sample("level", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("records", len(y)):
        pyro.sample("y", dist.Normal(level[of] + (score[:, 1] - score[:, 0]), 1.0), obs=y)


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("of", torch.tensor([0, -1, 2, -1]), "'silo-2': 'of' is an index, and less than 0, in 2 of 4 rows"),
        (
            "score",
            torch.tensor([[1, 2], [3, 2], [2, 2], [0, 9]]).byte(),
            "'silo-2': 'score' goes past .* in 1 of 4 rows",
        ),
    ],
)
def test_whole_numbers_that_a_graph_would_take_for_others_are_refused(
    column: str, value: Tensor, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: where nobody follows columns the last group, and 255 for -1, are taken without a word."""
    model = Traced(FederatedModel(by_group))
    rows = {"y": torch.ones(4), "of": torch.tensor([0, 1, 2, 1]), "score": torch.tensor([[1, 2]] * 4).byte()}
    silos = [rows, {**rows, column: value}]
    with pytest.raises(InputError, match=says):
        sf.fit(model, silos, sf.SFVI(iterations=2), sf.Plain())
    assert sf.fit(model, [rows, rows], sf.SFVI(iterations=2), sf.Plain())
    monkeypatch.setattr(exported, "_Columns", lambda *_: nullcontext())
    assert sf.fit(model, silos, sf.SFVI(iterations=2), sf.Plain())


@pytest.fixture(scope="module")
def content() -> bytes:
    return export(FederatedModel(plain), LINE, torch.float64)


@pytest.mark.parametrize(
    "node",
    [
        ["aten.from_file.default", ["/etc/passwd"], {}],
        ["aten.empty.memory_format", [[1000]], {}],
        ["aten.as_strided.default", [{"at": 0}, [9], [1], 0], {}],
        ["aten.add_.Tensor", [{"at": 0}, 1], {}],
        ["aten.add.out", [{"at": 0}, 1], {"out": {"at": 0}}],
        ["aten.randn.default", [[3]], {}],
        ["aten.linalg_lu_solve.default", [{"at": 0}, {"at": 0}, {"at": 0}], {}],
        ["aten.native_group_norm.default", [{"at": 0}, None, None, 9, 9, 9, 3, 0.1], {}],
        ["aten.mul.left_t", [[1], 10**12], {}],
        ["aten.set_.source_Tensor", [{"at": 0}, {"at": 1}], {}],
        ["prims.device_put.default", [{"at": 0}, "cpu"], {}],
        ["profiler._record_function_enter.default", ["x"], {}],
        ["size.__import__", ["os"], {}],
        ["os.system", ["true"], {}],
        ["size.mul", [[1], 10**12], {}],
        ["size.mod", ["%1000000000d", 1], {}],
        ["aten.__class__.default", [], {}],
        ["aten.add.__init__", [], {}],
        ["aten.zeros.default", [[2]], {"device": "cuda"}],
        ["aten.neg.default", [{"at": 10**9}], {}],
        ["aten.neg.default", [{"at": -1}], {}],
        ["aten.neg.default", [{"const": "../x"}], {}],
        ["aten.neg.default", [{"pickle": "x"}], {}],
        ["aten.neg.default", [[[[[[{"at": 0}]]]]]], {}],
    ],
)
def test_nothing_else_can_be_said(content: bytes, node: list[Any]) -> None:
    """The control: a harmless operation in the same place is read."""
    assert read_program(
        altered(content, lambda t: t["evaluate"]["nodes"].append(["aten.neg.default", [{"at": 0}], {}])), LINE
    )
    with pytest.raises(InputError, match="what was traced of the model is not valid"):
        read_program(altered(content, lambda t: t["evaluate"]["nodes"].append(node)), LINE)


def test_sizes_do_not_grow_without_end(content: bytes) -> None:
    """Forty squarings would be a number of 10^12 digits. The control: a few, of a small number."""

    def squared(table: Any, times: int) -> None:
        nodes, first = table["evaluate"]["nodes"], table["evaluate"]["inputs"] + len(table["evaluate"]["nodes"])
        nodes += [["size.add", [2, 1], {}]]
        nodes += [["size.mul", [{"at": first + i}, {"at": first + i}], {}] for i in range(times)]

    assert read_program(altered(content, lambda t: squared(t, 4)), LINE)
    began = time.process_time()
    with pytest.raises(InputError, match="a size past all data"):
        read_program(altered(content, lambda t: squared(t, 40)), LINE)
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update(version=2),
        lambda t: t.update(extra=1),
        lambda t: t["sites"][0].__setitem__(1, "record"),
        lambda t: t["sites"][0].__setitem__(2, [2]),
        lambda t: t["sites"].append(t["sites"][0]),
        lambda t: t["evaluate"]["outputs"].pop(),
        lambda t: t["evaluate"]["outputs"].__setitem__(2, 0),
        lambda t: t["recentre"].update(inputs=2),
        lambda t: t.update(dtype="complex64"),
    ],
)
def test_another_shape_than_the_layouts_is_refused(content: bytes, change: Any) -> None:
    with pytest.raises(InputError, match="what was traced of the model is not valid"):
        read_program(altered(content, change), LINE)


def test_spoilt_bytes_are_refused_or_harmless(content: bytes) -> None:
    rng, refused = random.Random(0), 0
    for _ in range(150):
        spoilt = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
        try:
            read_program(bytes(spoilt[: rng.choice([len(spoilt), rng.randrange(len(spoilt))])]), LINE)
        except InputError:
            refused += 1
    assert refused > 75
    assert read_program(_framed(*_parts(content)), LINE)


def _parts(content: bytes) -> tuple[Any, Any]:
    from safetensors.torch import load

    length = int.from_bytes(content[:8], "big")
    return json.loads(content[8 : 8 + length]), load(content[8 + length :])


def _chained(first: list[Any], step: Callable[[int], list[Any]], count: int) -> Callable[[Any], None]:
    """Adds to the density's graph a node, and `count` more, each of the last one's place."""

    def add(table: Any) -> None:
        graph = table["evaluate"]
        graph["nodes"].append(first)
        for _ in range(count):
            graph["nodes"].append(step(graph["inputs"] + len(graph["nodes"]) - 1))

    return add


BOMBS: dict[str, tuple[Callable[[Any], None], str]] = {
    "sizes squared in turn": (
        _chained(["size.add", [3, 0], {}], lambda at: ["size.mul", [{"at": at}, {"at": at}], {}], 60),
        "a size past all data",
    ),
    "too many operations": (
        _chained(["size.add", [3, 0], {}], lambda at: ["size.add", [{"at": at}, 1], {}], 20_000),
        "more than 20000 operations",
    ),
    "a tensor that is too large": (
        _chained(["aten.full.default", [[1 << 27], 0.0], {}], lambda at: ["aten.neg.default", [{"at": at}], {}], 0),
        "too large on made data",
    ),
    "one that grows": (
        _chained(
            ["aten.full.default", [[64, 1], 0.0], {}],
            lambda at: ["aten.repeat.default", [{"at": at}, [8, 8]], {}], 9,
        ),
        "too large on made data",
    ),
    "one element of a million axes": (
        _chained(
            ["aten.full.default", [[1], 1e9], {}],
            lambda at: ["aten.mvlgamma.default", [{"at": at}, 10**6], {}], 1,
        ),
        "more than 1000 axes of mvlgamma",
    ),
    "as many as a mask says, for each of many rows": (
        lambda t: t["evaluate"]["nodes"].extend(
            [
                ["aten.ones.default", [[6000]], {}],
                ["aten.ge.Scalar", [{"at": (at := t["evaluate"]["inputs"] + len(t["evaluate"]["nodes"]))}, 0], {}],
                ["aten.zeros.default", [[6000, 1]], {"dtype": {"dtype": "torch.int64"}}],
                ["aten.ones.default", [[6000, 1]], {}],
                ["aten.index.Tensor", [{"at": at + 3}, [{"at": at + 1}, {"at": at + 2}]], {}],
            ]
        ),
        "too large on made data",
    ),
    "a list, repeated": (
        lambda t: t["evaluate"]["nodes"].extend(
            [
                ["aten.zeros.default", [[2]], {}],
                ["aten.split.Tensor", [{"at": (at := t["evaluate"]["inputs"] + len(t["evaluate"]["nodes"]))}, 1], {}],
                ["size.mul", [{"at": at + 1}, 1 << 24], {}],
            ]
        ),
        "sizes that are none",
    ),
    "an exponential of large numbers": (
        _chained(
            ["aten.full.default", [[9, 9], 1e300], {}],
            lambda at: ["aten.linalg_matrix_exp.default", [{"at": at}], {}], 1,
        ),
        "not among the operations",
    ),
    "many that are large": (
        _chained(["aten.full.default", [[1 << 22], 0.0], {}], lambda at: ["aten.neg.default", [{"at": at}], {}], 40),
        "too large on made data",
    ),
}  # fmt: skip


@pytest.mark.later
@pytest.mark.parametrize("case", BOMBS)
def test_a_graph_that_would_take_all_time_or_memory_is_refused_before_it_does(case: str, content: bytes) -> None:
    """The control is the same graph with one harmless step of the kind."""
    bomb, why = BOMBS[case]
    began = time.process_time()  # others share the cores
    with pytest.raises(InputError, match=why):
        read_program(altered(content, bomb), LINE)
    assert time.process_time() - began < 5
    read_program(altered(content, _chained(["aten.full.default", [[9], 0.0], {}], lambda at: [], 0)), LINE)


def test_a_graph_that_takes_too_long_on_made_data_is_refused(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    read_program(content, LINE)
    monkeypatch.setattr(exported, "_MOST_SECONDS", 0.0)
    with pytest.raises(InputError, match="more than 0 s on made data"):
        read_program(content, LINE)


def test_a_graph_runs_on_one_record_before_a_silo_runs_it(content: bytes) -> None:
    """As it does where records are alone: in the process that tries it, what ends a process ends that one. The control:
    of what there is of one record too."""

    def picks(row: int) -> Callable[[Any], None]:
        return lambda t: t["evaluate"]["nodes"].append(
            ["aten.select.int", [{"at": t["evaluate"]["inputs"] - 1}, 0, row], {}]
        )

    assert read_program(altered(content, picks(0)), LINE)
    with pytest.raises(InputError, match=r"not valid \(IndexError\)"):
        read_program(altered(content, picks(1)), LINE)


def test_sizes_stay_bounded_on_a_silos_own_rows(content: bytes) -> None:
    """Squared in turn, the number of rows less two is 0 or 1 on made data."""

    def bomb(table: Any) -> None:
        graph = table["evaluate"]
        graph["nodes"].append(["aten.sym_numel.default", [{"at": graph["inputs"] - 1}], {}])
        graph["nodes"].append(["size.sub", [{"at": graph["inputs"] + len(graph["nodes"]) - 1}, 2], {}])
        for _ in range(60):
            at = {"at": graph["inputs"] + len(graph["nodes"]) - 1}
            graph["nodes"].append(["size.mul", [at, at], {}])

    program = read_program(altered(content, bomb), LINE)
    rows = LINE.dummy_rows(50)
    start = [*program.start[:2], torch.zeros(50, 0), *(program.start.theta[n] for n in sorted(program.start.theta))]
    with pytest.raises(InputError, match="a size past all data"):
        program.evaluate([*start, *(rows[n] for n in sorted(rows))], torch.device("cpu"))


def _by_values(how: str) -> Callable[[Any], None]:
    """A start that adds up a million ones for each row above 50, whose number a mask, or a tensor, says."""

    def change(table: Any) -> None:
        graph = table["recentre"]

        def add(*node: Any, **options: Any) -> dict[str, int]:
            graph["nodes"].append([*node, options])
            return {"at": graph["inputs"] + len(graph["nodes"]) - 1}

        y = {"at": graph["inputs"] - 1}
        mask = add("aten.gt.Scalar", [y, 50.0])
        if how == "number":
            size = add("aten.mul.Scalar", [add("aten.sum.default", [mask]), 1_000_000])
        elif how == "shape":
            size = add("size.mul", [add("aten.sym_numel.default", [y]), 1_000_000])
        else:
            chosen = add("aten.index.Tensor", [y, [mask]]) if how == "mask" else add("aten.where.default", [mask])
            chosen = chosen if how == "mask" else add("size.getitem", [chosen, 0])
            size = add("size.mul", [add("aten.sym_numel.default", [chosen]), 1_000_000])
        ones = add("aten.ones.default", [[size]], dtype={"dtype": "torch.float64"})
        first = {"at": graph["outputs"][0]}
        graph["outputs"][0] = add("aten.add.Tensor", [first, add("aten.sum.default", [ones])])["at"]

    return change


class Altered(Traced):
    """A traced program whose author has written its graph himself."""

    def __init__(self, model: FederatedModel, change: Callable[[Any], None]) -> None:
        super().__init__(model)
        self._change = change

    def exported(self, schema: Schema, dtype: torch.dtype) -> Program:
        return read_program(altered(export(self._model, schema, dtype), self._change), schema)


@pytest.mark.parametrize("how", ["mask", "places", "number", "shape"])
def test_no_value_decides_what_a_start_takes_under_privacy(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start is worked out on all records at once as a silo joins, and how long that takes, or whether there is memory
    for it, is seen without noise. The controls: what shapes decide on, and where nobody looks at the start."""
    model = Altered(FederatedModel(plain), _by_values(how))
    dp = sf.RecordDP(epsilon=1.0, noise="silo")

    def started(last: float) -> float:
        silos = [{"y": torch.tensor([0.5, 0.7, last])}, {"y": torch.tensor([0.1, 0.2])}]
        _, engine, _ = build_parties(model, silos, sf.SFVI(iterations=2), sf.Plain(), privacy=dp)
        return float(engine.silos["silo-1"].view.start.z_global)

    if how == "shape":
        assert started(99.0) == started(0.9) == 4e6  # with the spare row
        return
    with pytest.raises(InputError, match="values of the data, which decide on shapes"):
        started(99.0)
    monkeypatch.setattr(GraphDensity, "check_sites", lambda *_: None)
    assert (started(0.9), started(99.0)) == (0.0, 1e6)


def _enlarged(table: Any) -> None:
    """An image of bytes, scaled by 0.75 with up to three rows, and by 400^-8 of that with 402."""
    graph = table["evaluate"]

    def add(*node: Any) -> dict[str, int]:
        graph["nodes"].append([*node, {}])
        return {"at": graph["inputs"] + len(graph["nodes"]) - 1}

    image = add("aten.full.default", [[1, 1, 4, 4], 7])
    graph["nodes"][-1][2] = {"dtype": {"dtype": "torch.uint8"}}
    past = add("size.sym_max", [add("size.sub", [add("aten.sym_numel.default", [{"at": graph["inputs"] - 1}]), 2]), 1])
    scale: Any = 0.75
    for _ in range(8):
        scale = add("size.truediv", [scale, past])
    add("aten.upsample_nearest2d.default", [image, [3, 3], scale, scale])


@pytest.mark.parametrize("held", [True, False], ids=["", "control"])
def test_a_graph_reads_no_memory_but_its_tensors(content: bytes, monkeypatch: pytest.MonkeyPatch, held: bool) -> None:
    """PyTorch's `upsample_nearest2d` believes its scales. The control ends the process with a silo's rows, and not with
    made ones, on which a graph is tried."""
    if not held:
        monkeypatch.delitem(exported._TOTAL, "upsample_nearest2d.default")
    program = read_program(altered(content, _enlarged), LINE)
    rows = LINE.dummy_rows(402)
    start = [*program.start[:2], torch.zeros(402, 0), *(program.start.theta[n] for n in sorted(program.start.theta))]
    flat = [*start, *(rows[n] for n in sorted(rows))]
    child = os.fork()
    if not child:
        faulthandler.disable()
        said = 0
        try:
            program.evaluate(flat, torch.device("cpu"))
        except InputError:
            said = 3
        finally:
            os._exit(said)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (3 if held else -signal.SIGSEGV)
