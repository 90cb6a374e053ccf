"""The split log density: equal to Pyro's own, part by part, in the right layout."""

from __future__ import annotations

import functools
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from programs import clinics
from pyro import poutine
from torch import Tensor
from torch.distributions import biject_to

import secure_fvi as sf
from secure_fvi.compiled import TRACE_AFTER_CALLS
from secure_fvi.density import LogDensity, Start
from secure_fvi.discovery import read_layout
from secure_fvi.errors import InputError, SecureFVIWarning
from secure_fvi.federated_model import read_data
from secure_fvi.program_density import ProgramDensity


def _rich(x: Tensor, label: Tensor, levels: int, grid: Tensor) -> None:
    """Constrained globals, a simplex a record, a plate to the left of the record plate, theta, shared values."""
    strength = pyro.param("strength", torch.tensor(2.0), constraint=dist.constraints.positive)
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("levels", levels):
        level = pyro.sample("level", dist.Normal(0.0, scale))
    with pyro.plate("row", x.shape[0], dim=-1):
        share = pyro.sample("share", dist.Dirichlet(strength * torch.ones(3)))
        with pyro.plate("twice", 2, dim=-2):
            shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
        mean = level[label] + shift.sum(0) + (share * grid).sum(-1)
        pyro.sample("x", dist.Normal(mean, scale), obs=x)


def _density(model: sf.FederatedModel, data: dict[str, Any]) -> tuple[LogDensity, dict[str, Tensor]]:
    schema, records = read_data(data, "here", torch.float64)
    layout, _ = read_layout(model, schema, torch.float64)
    return ProgramDensity(model, layout, schema), records.rows


def _pyro_log_joint(fn: Any, data: dict[str, Any], latents: dict[str, Tensor], params: dict[str, Tensor]) -> Tensor:
    """log p(y, z) by Pyro's own trace, plus the log Jacobians, at unconstrained latents."""
    pyro.clear_param_store()
    for name, value in params.items():
        pyro.param(name, value)
    spied = poutine.trace(fn).get_trace(**data)
    values = {n: biject_to(spied.nodes[n]["fn"].support)(u) for n, u in latents.items()}
    trace = poutine.trace(poutine.condition(fn, values)).get_trace(**data)
    total = trace.log_prob_sum()
    for name, u in latents.items():
        total = total + biject_to(trace.nodes[name]["fn"].support).log_abs_det_jacobian(u, values[name]).sum()
    return total


def test_parts_add_up_to_pyros_log_joint() -> None:
    torch.manual_seed(0)
    data = {"x": torch.randn(6), "label": torch.tensor([0, 1, 2, 0, 1, 2]), "levels": 3, "grid": torch.arange(3.0)}
    model = sf.FederatedModel(_rich, "row")
    density, rows = _density(model, {**data, "grid": sf.Shared(data["grid"])})
    layout = density.layout
    assert (layout.size("global"), layout.size("silo"), layout.size("record")) == (4, 0, 4)
    z_global, z_record = torch.randn(4), torch.randn(6, 4)
    theta = {"strength": torch.tensor(0.4)}
    terms = density.evaluate(z_global, torch.zeros(0), z_record, theta, rows)
    latents = {
        "scale": z_global[0],
        "level": z_global[1:],
        "share": z_record[:, :2],
        "shift": z_record[:, 2:].T,
    }
    expected = _pyro_log_joint(_rich, data, latents, {"strength": torch.tensor(0.4).exp()})
    torch.testing.assert_close(terms.shared + terms.silo + terms.records.sum(), expected)
    torch.testing.assert_close(density.log_prior(z_global, theta), terms.shared)


def test_each_record_has_its_own_term() -> None:
    """Changing one record's latents changes its own term and no other."""
    torch.manual_seed(0)
    data = {
        "x": torch.randn(5),
        "label": torch.zeros(5, dtype=torch.long),
        "levels": 1,
        "grid": sf.Shared(torch.ones(3)),
    }
    density, rows = _density(sf.FederatedModel(_rich, "row"), data)
    z_record = torch.randn(5, 4)
    theta = {"strength": torch.tensor(0.0)}
    before = density.evaluate(torch.zeros(2), torch.zeros(0), z_record, theta, rows).records
    z_record[3] += 1.0
    after = density.evaluate(torch.zeros(2), torch.zeros(0), z_record, theta, rows).records
    assert (before != after).tolist() == [False, False, False, True, False]


def test_silo_sites_have_a_term_of_their_own() -> None:
    density, rows = _density(sf.FederatedModel(clinics, "person", ("u",)), {"y": torch.randn(4)})
    terms = density.evaluate(torch.tensor([0.3]), torch.tensor([0.2]), torch.zeros(4, 1), {}, rows)
    torch.testing.assert_close(terms.silo, dist.Normal(0.0, 0.6).log_prob(torch.tensor(0.2)))
    torch.testing.assert_close(terms.shared, dist.Normal(0.0, 10.0).log_prob(torch.tensor(0.3)))


def test_constrain_maps_sites_and_theta_to_the_models_space() -> None:
    data = {
        "x": torch.randn(3),
        "label": torch.zeros(3, dtype=torch.long),
        "levels": 2,
        "grid": sf.Shared(torch.ones(3)),
    }
    density, _ = _density(sf.FederatedModel(_rich, "row"), data)
    sites, theta = density.constrain(torch.tensor([0.5, 1.0, 2.0]), {"strength": torch.tensor(-1.0)})
    torch.testing.assert_close(sites["scale"], torch.tensor(0.5).exp())
    assert sites["level"].tolist() == [1.0, 2.0]
    torch.testing.assert_close(theta["strength"], torch.tensor(-1.0).exp())


def _leaks_into_prior(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(y.mean(), 1.0))
    with pyro.plate("person", len(y)):
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def _no_plate(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(mu, 1.0).expand([len(y)]).to_event(1), obs=y)


def _local_outside(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([len(y)]).to_event(1))
    with pyro.plate("person", len(y)):
        pyro.sample("y", dist.Normal(mu + b, 1.0), obs=y)


def _discrete(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    z = pyro.sample("z", dist.Bernoulli(0.5))
    with pyro.plate("person", len(y)):
        pyro.sample("y", dist.Normal(mu + z, 1.0), obs=y)


def _wrong_size(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("person", y.shape[0] + 1):
        pyro.sample("b", dist.Normal(mu, 1.0))


def _subsamples(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("person", len(y), subsample_size=1) as at:
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y[at])


def _no_globals(y: Tensor) -> None:
    with pyro.plate("person", len(y)):
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=y)


def _breaks(y: Tensor) -> None:
    raise RuntimeError("no such thing")


def _scattered(y: Tensor) -> None:
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("person", len(y)):
        own = pyro.sample("own", dist.Normal(0.0, scale))
        pyro.sample("y", dist.Normal(own, 1.0), obs=y)


@pytest.mark.later
@pytest.mark.usefixtures("few_draws", "untraced")
def test_a_fit_begins_where_the_model_says() -> None:
    """The prior's centre where it says nothing; global and record-level sites."""
    given = {"scale": 0.05, "own": 2.0}
    schema, _ = read_data({"y": torch.zeros(4)}, "here", torch.float64)
    for start, expected in (({}, (dist.HalfNormal(1.0).mean, 0.0)), (given, (0.05, 2.0))):
        _, found = read_layout(sf.FederatedModel(_scattered, "person", start=start), schema, torch.float64)
        assert float(found.z_global.exp()) == pytest.approx(float(expected[0]))
        assert found.z_record.flatten().tolist() == [expected[1]] * 2
    model = sf.FederatedModel(_scattered, "person", start=given)
    for algorithm in (sf.SFVI(iterations=1, learning_rate=1e-9), sf.SFVIAvg(1, 1, learning_rate=1e-9)):
        with pytest.warns(SecureFVIWarning, match="ended after 1 rounds"):
            result = sf.fit(model, [{"y": torch.randn(4)}] * 3, algorithm, sf.Plain())
        assert float(result.sample(4000)["scale"].median()) == pytest.approx(0.05, rel=0.2)


@pytest.mark.parametrize(
    ("fn", "options", "message"),
    [
        (_leaks_into_prior, {}, "the prior of a global site depends on the data"),
        (_no_plate, {}, "observed site 'y' is outside the record plate 'person'"),
        (_local_outside, {}, "latent site 'b' grows with the number of records"),
        (_discrete, {}, "latent site 'z' is discrete"),
        (_wrong_size, {}, "record plate 'person' has size 3 where the data has 2 records"),
        (_subsamples, {}, "plate 'person' subsamples"),
        (_no_globals, {}, "no global latent site"),
        (_breaks, {}, "_breaks fails on made data of the given shapes .RuntimeError: no such thing"),
        (clinics, {"silo_sites": ("v",)}, "silo site 'v' does not exist; latent sites: mu, u, b"),
        (clinics, {"silo_sites": ("b",)}, "silo site 'b' is inside the record plate"),
        (clinics, {"start": {"v": 1.0}}, "start names 'v', which is no latent site; these are: mu, u, b"),
        (clinics, {"start": {"mu": torch.zeros(2)}}, "start of site 'mu' cannot be given the site's shape"),
        (clinics, {"start": {"mu": torch.nan}}, "start of site 'mu' is outside its support"),
        (_scattered, {"start": {"scale": 0.0}}, "start of site 'scale' is outside its support"),
        (clinics, {"record_plate": "people"}, "observed site 'y' is outside the record plate 'people'"),
    ],
)
def test_models_that_cannot_be_federated(fn: Any, options: dict[str, Any], message: str) -> None:
    model = sf.FederatedModel(fn, **{"record_plate": "person", **options})
    with pytest.raises(InputError, match=message):
        sf.fit(model, [{"y": torch.randn(4)}] * 3, sf.SFVI(iterations=1))


@pytest.mark.parametrize(
    ("silos", "message"),
    [
        ([{"y": torch.tensor([1.0, torch.nan])}], "silo 'silo-1': 'y' holds NaN or infinite values"),
        ([{"y": torch.zeros(0)}], "silo 'silo-1' has no records"),
        ([{"y": torch.tensor(1.0)}], "'y' has no first dimension"),
        ([{}], "no tensor in its data"),
        ([{"y": torch.zeros(3), "x": torch.zeros(2)}], "has 3 rows and 'y' has|has 2 rows and 'y' has 3"),
        ([{"y": torch.zeros(3)}, {"z": torch.zeros(3)}], "hold different tensors"),
        ([{"y": torch.zeros(3)}, {"y": torch.zeros(3, 2)}], "'y' has shape .. a record"),
        ([{"w": torch.zeros(3)}], "does not take the data's names .'w'"),
    ],
)
def test_data_that_cannot_be_used(silos: list[dict[str, Tensor]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sf.fit(sf.FederatedModel(clinics, "person", ("u",)), silos, sf.SFVI(iterations=1), sf.Plain())


def test_errors_quote_no_datum() -> None:
    data = {"y": torch.tensor([123456.789, torch.inf])}
    with pytest.raises(InputError) as caught:
        sf.fit(sf.FederatedModel(clinics, "person", ("u",)), [data], sf.SFVI(iterations=1), sf.Plain())
    assert "123456" not in str(caught.value)


# ---- a graph in the program's place, where it is evaluated often ----


class _OwnGradient(torch.autograd.Function):
    """The identity, with twice its gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return 2 * slope


def _with(inner: Any) -> Any:
    """A program of effects of rows and of their silo, whose mean goes through `inner`."""

    def program(x: Tensor, y: Tensor) -> None:
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        own = pyro.sample("own", dist.Normal(0.0, scale))
        with pyro.plate("row", len(y)):
            effect = pyro.sample("effect", dist.StudentT(4.0, 0.0, scale))
            pyro.sample("y", dist.Normal(inner(x @ beta) + own + effect, 0.5), obs=y)

    return program


def _unfollowed(mean: Tensor) -> Tensor:
    with torch.no_grad():
        fixed = mean.exp()
    return mean * fixed


def _by_size(mean: Tensor) -> Tensor:
    return mean if len(mean) > 20 else 2 * mean


def _often(inner: Any, sizes: tuple[int, ...]) -> tuple[ProgramDensity, list[tuple[Any, ...]]]:
    """The density, evaluated often on tables of these sizes, and arguments for each."""
    rng = torch.Generator().manual_seed(3)
    random = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)  # noqa: E731
    model = sf.FederatedModel(_with(inner), "row", ("own",))
    args = [
        (random(3), random(1), random(n, 1), {}, {"x": random(n, 2), "y": random(n)}) for n in sizes
    ]  # fmt: skip
    density, _ = _density(model, args[0][-1])
    assert isinstance(density, ProgramDensity)
    for _ in range(TRACE_AFTER_CALLS + 1):
        density.evaluate(*args[0])
    for z_global, z_silo, z_record, theta, rows in args:
        density.often(Start(z_global, z_silo, z_record, theta), theta, rows)
    return density, args


def _total(density: ProgramDensity, args: tuple[Any, ...]) -> Any:
    """Of Z_G and Z_L."""
    _, z_silo, _, theta, rows = args
    return lambda z, latents: sum(t.sum() for t in density.evaluate(z, z_silo, latents, theta, rows))


def test_a_program_that_is_evaluated_often_runs_as_a_graph_and_gives_the_same() -> None:
    """To the last bit, whatever the number of rows, alone or mapped; curvature to rounding."""
    density, sizes = _often(torch.tanh, (30, 7, 2))
    assert density._graph is not None
    for args in sizes:
        for found, own in zip(density.evaluate(*args), LogDensity.evaluate(density, *args), strict=True):
            assert torch.equal(found, own)
        graph, density._graph = density._graph, None
        expected = torch.func.hessian(_total(density, args), argnums=(0, 1))(args[0], args[2])
        mapped = torch.func.vmap(_total(density, args), (0, None))(args[0].expand(4, 3), args[2])
        density._graph = graph
        found = torch.func.hessian(_total(density, args), argnums=(0, 1))(args[0], args[2])
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        again = torch.func.vmap(_total(density, args), (0, None))(args[0].expand(4, 3), args[2])
        torch.testing.assert_close(again, mapped, rtol=1e-14, atol=0)


@pytest.mark.parametrize("inner", [_OwnGradient.apply, _unfollowed, _by_size, lambda mean: mean * float(mean[0])])
def test_a_program_whose_graph_is_another_function_runs_as_it_is(inner: Any) -> None:
    """Gradients of its own, or kept from PyTorch, are in no graph, values that decide neither; and what goes by the
    number of rows shows at the first table that is on the other side."""
    density, sizes = _often(inner, (30, 7))
    assert density._graph is None
    for args in sizes:
        for found, own in zip(density.evaluate(*args), LogDensity.evaluate(density, *args), strict=True):
            assert torch.equal(found, own)


def _censored(x: Tensor, y: Tensor, picked: bool) -> None:
    """Rows by kind, written into a tensor of the program's own, or by torch.where."""
    a, scale = pyro.sample("a", dist.Normal(0.0, 1.0)), pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("row", len(y)):
        own = pyro.sample("own", dist.Normal(0.0, scale))
        late, far = x[:, 0] > 0, y - a - own
        if picked:
            term = torch.zeros(len(y))
            term[late] = -0.5 * far[late].square()
            term[~late] = torch.special.log_ndtr(-far[~late])
        else:
            term = torch.where(late, -0.5 * far.square(), torch.special.log_ndtr(-far))
        pyro.factor("term", term)


def test_rows_that_a_program_picks_and_writes_are_mapped_over_draws() -> None:
    """Which PyTorch refuses of a tensor that is one for all draws, as the control shows."""
    rows = {"x": torch.randn(9, 2).double(), "y": torch.randn(9).double()}
    z, z_record = torch.randn(5, 2).double(), torch.randn(5, 9, 1).double()
    found, priors = [], []
    for picked in (True, False):
        program = functools.partial(_censored, picked=picked)
        density, _ = _density(sf.FederatedModel(program, "row", ()), rows)

        def total(z: Tensor, z_record: Tensor, density: LogDensity = density) -> Tensor:
            return sum((t.sum() for t in density.evaluate(z, z.new_zeros(0), z_record, {}, rows)), z.new_zeros(()))

        slope = torch.func.vmap(torch.func.grad(total, argnums=(0, 1)))(z, z_record)
        bent = torch.func.vmap(torch.func.hessian(total))(z, z_record)
        found.append((torch.func.vmap(total)(z, z_record), *slope, bent))
        priors.append(torch.func.vmap(lambda z, density=density: density.log_prior(z, {}))(z))
        if picked:
            with pytest.raises(RuntimeError, match="index_put_"):
                torch.func.vmap(lambda z, program=program: _written_once(program, z, rows["x"], rows["y"]))(z)
            assert torch.equal(found[0][0][0], total(z[0], z_record[0]))
    for own, other in zip((*found[0], priors[0]), (*found[1], priors[1]), strict=True):
        torch.testing.assert_close(own, other)


def _written_once(program: Any, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The program's terms at Z_G, run by Pyro alone."""
    latents = {"a": z[0], "scale": z[1].exp(), "own": torch.zeros(9).double()}
    with pyro.validation_enabled(False):
        trace = poutine.trace(poutine.condition(program, latents)).get_trace(x, y)
    return trace.nodes["term"]["fn"].log_factor


def test_one_row_of_latents_stands_for_all_in_a_graph_too() -> None:
    density, (args,) = _often(torch.tanh, (9,))
    one = (*args[:2], args[2][:1], *args[3:])
    assert torch.equal(density.evaluate(*one).records, LogDensity.evaluate(density, *one).records)


def test_a_graph_is_not_asked_before_it_pays() -> None:
    """Nor of a single row, which a program may take for something else than a table."""
    model = sf.FederatedModel(_with(torch.tanh), "row", ("own",))
    rows = {"x": torch.ones(4, 2).double(), "y": torch.ones(4).double()}
    density, _ = _density(model, rows)
    assert isinstance(density, ProgramDensity)
    start = Start(torch.zeros(3).double(), torch.zeros(1).double(), torch.zeros(4, 1).double(), {})
    density.often(start, {}, rows)
    assert density._graph is None
    assert not density._seen
    density, _ = _often(torch.tanh, (9,))
    assert density._graph is not None
    assert not density._graph.takes(*start[:2], start.z_record[:1], {}, {name: v[:1] for name, v in rows.items()})
