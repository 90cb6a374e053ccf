"""Tracing and compiling: the same numbers, for silos of every size, and a way out when a program resists."""

from __future__ import annotations

import functools
import os
import pickle  # noqa: TID251 - what an attacker would leave
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from programs import intercepts, make_intercepts
from torch import Tensor

import secure_fvi as sf
from secure_fvi import compiled
from secure_fvi.compiled import (
    TRACE_AFTER_CALLS,
    Traced,
    choose_mode,
    choose_threads,
    lean,
    over_draws,
    threads,
    trace_graph,
)
from secure_fvi.fitting import build_parties


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions are traced at their first call."""
    monkeypatch.setattr("secure_fvi.compiled.TRACE_AFTER_CALLS", 0)


def _eta(fn: object, mode: object, rounds: int = 5) -> tuple[Tensor, str]:
    model = sf.FederatedModel(fn, "person")  # type: ignore[arg-type]
    server, engine, _ = build_parties(
        model, make_intercepts().silos, sf.SFVI(iterations=9, schedule="linear"), sf.Plain(), compile=mode
    )  # type: ignore[arg-type]
    for _ in range(rounds):
        engine.run(server.round())
    return server.state.algorithm.eta["loc"], engine.silos["silo-1"].program._step.mode  # type: ignore[attr-defined]


@functools.cache
def _by_usual_means() -> Tensor:
    return _eta(intercepts, False)[0]


def _by_len(y: Tensor) -> None:
    """`len` turns a symbolic number of records into a fixed one."""
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    with pyro.plate("person", len(y)):
        b = pyro.sample("b", dist.Normal(torch.zeros(len(y)), 0.7))
        pyro.sample("y", dist.Normal(mu + b.unsqueeze(-1), 0.5 * torch.ones(3)).to_event(1), obs=y)


def _by_branch(y: Tensor) -> None:
    """Branches on the number of records, so one graph cannot serve all silos."""
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    extra = torch.zeros(()) if y.shape[0] < 20 else torch.ones(()) * 0.0
    with pyro.plate("person", y.shape[0]):
        b = pyro.sample("b", dist.Normal(0.0, 0.7))
        weight = torch.ones(3) * 0.5 * (1.0 + 0.0 * float(y.shape[0]))
        pyro.sample("y", dist.Normal(mu + b.unsqueeze(-1) + extra, weight).to_event(1), obs=y)


def _by_value(y: Tensor) -> None:
    """Branches on a datum: no graph can follow, so the program runs as it is."""
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    sign = 1.0 if float(y.sum()) > -1e9 else -1.0
    with pyro.plate("person", y.shape[0]):
        b = pyro.sample("b", dist.Normal(0.0, 0.7))
        pyro.sample("y", dist.Normal(sign * mu + b.unsqueeze(-1), 0.5 * torch.ones(3)).to_event(1), obs=y)


@pytest.mark.later
@pytest.mark.parametrize(
    ("fn", "mode"), [(intercepts, "traced"), (_by_len, "traced"), (_by_branch, "traced"), (_by_value, "eager")]
)
@pytest.mark.usefixtures("at_once")
def test_every_program_runs_and_gives_the_same_numbers(fn: object, mode: str) -> None:
    eta, got = _eta(fn, False)
    torch.testing.assert_close(eta, _by_usual_means(), rtol=1e-12, atol=1e-12)
    assert got == mode


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_compiled_equals_traced_up_to_rounding() -> None:
    traced, _ = _eta(_by_len, False)
    compiled, mode = _eta(_by_len, True)
    assert mode == "compiled"
    torch.testing.assert_close(compiled, traced, rtol=1e-10, atol=1e-12)


def test_a_broken_compiler_costs_speed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("no such compiler")

    monkeypatch.setattr("secure_fvi.compiled._compile", broken)
    traced, _ = _eta(intercepts, False)
    compiled, mode = _eta(intercepts, True)
    assert mode == "traced"
    torch.testing.assert_close(compiled, traced, rtol=0, atol=0)


def test_a_function_is_traced_once_it_has_been_called_often() -> None:
    """And to the last bit nobody notices; a trace of another shape begins to count anew."""
    calls = []

    def fn(x: Tensor) -> Tensor:
        calls.append(1)
        return x.softmax(1).log().sum(0)

    traced = Traced(fn, (None,), "traced", by_shape=True)
    for n in (5, 6):
        x = torch.randn(n, 3, generator=torch.Generator().manual_seed(n))
        found = [traced(x) for _ in range(TRACE_AFTER_CALLS + 10)]
        assert all(torch.equal(y, found[0]) for y in found)
    assert len(calls) == 2 * (TRACE_AFTER_CALLS + 2)  # of the two that trace, one is to compare


@pytest.mark.usefixtures("at_once")
def test_one_trace_serves_all_sizes() -> None:
    calls = []

    def fn(x: Tensor) -> Tensor:
        calls.append(x.shape[0])
        return (x * x.shape[0]).sum(0)

    traced = Traced(fn, (0,), "traced")
    for n in (5, 11, 300):
        x = torch.randn(n, 2)
        torch.testing.assert_close(traced(x), (x * n).sum(0))
    assert len(calls) == 2  # once as it is, once on the stand-in


@pytest.mark.later
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("by_shape", [False, True])
def test_a_loop_over_records_is_traced_for_their_own_number_alone(by_shape: bool) -> None:
    """Over stand-ins, of which there are ten thousand, a trace takes minutes, of what runs in milliseconds."""
    calls = [0]

    def fn(x: Tensor) -> Tensor:
        found = []
        for k in range(len(x)):
            found.append(x[k].exp() + 1)
            calls[0] += 1
        return torch.stack(found).sum(0)

    traced = Traced(fn, (0,), "traced", by_shape)
    for n in (5, 11, 300):
        x = torch.linspace(0, 1, n)[:, None]
        torch.testing.assert_close(traced(x), (x.exp() + 1).sum(0))
    assert traced.mode == "traced"
    assert calls[0] < 10_000


@pytest.mark.parametrize("symbolic", [False, True])
def test_many_arguments_are_no_loop_over_records(symbolic: bool) -> None:
    """The tracer looks at each of them some eighty times, which is none of the function's own calls."""
    at = [torch.randn(7) for _ in range(40)]
    graph = trace_graph(lambda *xs: [sum(xs).exp().sum()], at, [0] * len(at), symbolic, made=42)  # type: ignore[attr-defined]
    more = [torch.randn(11) for _ in at]
    torch.testing.assert_close(graph(*more)[0], sum(more).exp().sum())  # type: ignore[attr-defined]


@pytest.mark.usefixtures("at_once")
def test_what_cannot_be_mapped_is_not_traced_a_draw_at_a_time() -> None:
    """A graph of each of many draws takes minutes, of what runs in milliseconds; the control is one that can be."""
    calls = [0]

    def fn(z: Tensor, mapped: bool) -> Tensor:
        def one(z: Tensor) -> Tensor:
            calls[0] += 1
            found = z.exp() if mapped else torch.zeros(3, dtype=z.dtype).add_(z)
            return found.sum()

        return over_draws(one, z)

    for mapped, mode, most in ((True, "traced", 10), (False, "eager", 2 * 500 + 10)):
        calls[0] = 0
        traced = Traced(functools.partial(fn, mapped=mapped), (None,), "traced")
        z = torch.randn(500, 3)
        torch.testing.assert_close(traced(z), (z.exp() if mapped else z).sum(1))
        assert traced.mode == mode
        assert calls[0] <= most


@pytest.mark.later
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_a_compiled_function_reads_slices_as_what_they_are() -> None:
    """Its code reads memory as that of its first example lies, and does not look: silos' latents in PVI were slices."""
    calls = []

    def fn(x: Tensor) -> Tensor:
        calls.append(1)
        return x.cumsum(0) * 2

    traced, x = Traced(fn, (None,), "compiled"), torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    traced(x[:, :2].contiguous())
    torch.testing.assert_close(traced(x[:, :2]), x[:, :2].cumsum(0) * 2)
    assert (traced.mode, len(calls)) == ("compiled", 2)


def test_what_the_compiler_computes_wrongly_runs_as_it_was_traced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("secure_fvi.compiled._compile", lambda graph, *_: lambda *x: [t + 1 for t in graph(*x)])
    traced = Traced(torch.exp, (None,), "compiled")
    for _ in range(2):
        assert torch.equal(traced(torch.zeros(2)), torch.ones(2))
    assert traced.mode == "traced"
    assert "not compiled (_OtherNumbers)" in caplog.text


class _Planted:
    """What somebody else has put where the compiler looks: who unpickles it runs it."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> Any:
        return open, (self._path, "w")


def _writable(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    folder.chmod(0o777)
    (folder / "fxgraph").mkdir()


def _link(folder: Path) -> None:
    mine = folder.with_name("mine")
    mine.mkdir(mode=0o700)
    folder.symlink_to(mine)


def _moved(folder: Path) -> None:
    folder.parent.chmod(0o777)


def _anothers(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    os.chown(folder, os.geteuid() + 1, -1)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the compiler keeps what it made, in a folder for temporary files as a machine has it."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # which the compiler sets, so that it is put back
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    return Path(default_cache_dir())


@pytest.mark.parametrize("make", [_writable, _link, _moved, _anothers])
@pytest.mark.parametrize("named", [False, True])
def test_nothing_is_compiled_where_others_of_the_machine_may_write(
    make: Any, named: bool, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    if make is _anothers and os.geteuid() != 0:
        pytest.skip("who is not root gives no folder away")
    if named:  # the one that is named holds the most, and the other some of it
        kept = tmp_path / "named" / "cache"
        kept.parent.mkdir()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(kept))
    make(kept)
    traced = Traced(torch.exp, (None,), "compiled")
    assert torch.equal(traced(torch.zeros(2)), torch.ones(2))
    assert traced.mode == "traced"
    assert "not compiled (InputError: '" in caplog.text
    assert "TMPDIR" in caplog.text


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_what_another_user_left_for_the_compiler_does_not_run(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"

    def run() -> str:
        traced = Traced(torch.exp, (None,), "compiled")
        assert torch.equal(traced(torch.zeros(2)), torch.ones(2))
        return traced.mode

    kept.mkdir()
    kept.chmod(0o775)  # as PyTorch makes it under some umasks, and nothing is in it
    assert run() == "compiled"
    assert kept.stat().st_mode & 0o777 == 0o700
    for path in (p for p in kept.glob("*graph*/**/*") if p.is_file()):
        path.write_bytes(pickle.dumps(_Planted(ran)))
    kept.chmod(0o777)
    assert run() == "traced"
    assert not ran.exists()
    monkeypatch.setattr("secure_fvi.compiled._check_kept", lambda: None)
    run()
    assert ran.exists()


def _by_secret(x: Tensor) -> Tensor:
    if float(x.sum()) > 12345.0:
        x = x + 1
    return x


@pytest.mark.usefixtures("at_once")
def test_why_a_program_is_not_traced_is_said_with_its_line_and_without_a_value(
    caplog: pytest.LogCaptureFixture,
) -> None:
    traced = Traced(_by_secret, (None,), "traced")
    assert traced(torch.full((2,), 777.25)).tolist() == [777.25, 777.25]
    assert traced.mode == "eager"
    assert "of test_compiled.py, `if float(x.sum()) > 12345.0:`; write tensor operations" in caplog.text
    assert "777" not in caplog.text


@pytest.mark.usefixtures("at_once")
def test_a_program_that_remembers_is_not_traced(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def fn(x: Tensor) -> Tensor:
        calls.append(1)
        return x + len(calls)

    Traced(fn, (None,), "traced")(torch.zeros(1))
    assert "its graph gives other numbers than the program does" in caplog.text


def test_auto_compiles_long_runs_only() -> None:
    assert choose_mode("auto", 100, 1000) == "traced"
    assert choose_mode(True, 1, 1) == "compiled"
    assert choose_mode(False, 10**9, 10**9) == "traced"


def test_small_work_takes_one_thread_and_gives_the_others_back() -> None:
    before = torch.get_num_threads()
    with threads(2):
        assert choose_threads(1000) == 1
        assert choose_threads(10**9) == 2
        with threads(1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == before


def _wasteful(x: Tensor) -> Tensor:
    scale = torch.full((len(x),), 0.1).exp() + torch.tensor(2.0).log()
    return (x.exp() + scale) * (x.exp() - torch.tensor(3.0).log()).sum()


def test_a_lean_graph_gives_the_same_bits() -> None:
    """Twice the same, and what depends on no input, once; silos of other sizes than the traced one's go through it."""
    graph = trace_graph(lambda x: [_wasteful(x)], [torch.ones(5)], [0])
    before = len(graph.graph.nodes)
    small = lean(graph)
    assert len(small.graph.nodes) < before - 3
    for n in (5, 9):
        x = torch.randn(n, generator=torch.Generator().manual_seed(n))
        assert torch.equal(small(x)[0], _wasteful(x))


def test_an_optimisers_step_writes_into_no_tensor() -> None:
    """To the last bit; a constant that it wrote into is the same in the next call."""

    def step(x: Tensor) -> list[Tensor]:
        count, mean, square, y = torch.tensor(1.0), torch.zeros_like(x), x.clone(), x + 1
        before = square.sum()
        mean.lerp_(x, 0.1)
        square.mul_(0.9).addcmul_(x, x, value=0.1)
        y.add_(mean).addcdiv_(mean, square.sqrt() + 1, value=-0.5)
        spread = torch.zeros(len(x)).index_put_((torch.tensor([0, 2]),), x[:2])
        return [before, count.add_(x.sum()), mean, square, y, spread]

    graph = lean(trace_graph(step, [torch.ones(3)], [None]))
    assert not any(getattr(n.target, "_schema", None) and n.target._schema.is_mutable for n in graph.graph.nodes)
    for _ in range(2):
        x = torch.randn(3, generator=torch.Generator().manual_seed(0)).abs()
        assert all(torch.equal(got, expected) for got, expected in zip(graph(x), step(x), strict=True))


def _seen_by_a_view(x: Tensor) -> list[Tensor]:
    y = x + 1
    seen = y.view(-1)
    y.mul_(2.0 * x)
    return [seen, y]


def _of_a_shorter_type(x: Tensor) -> list[Tensor]:
    return [(x + 1).float().add_(x)]


@pytest.mark.parametrize("fn", [_seen_by_a_view, _of_a_shorter_type])
def test_a_graph_that_writes_into_what_others_see_stays_as_it_is(fn: Any) -> None:
    graph = trace_graph(fn, [torch.ones(3)], [None])
    assert lean(graph) is graph
    x = torch.randn(3, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        for got, expected in zip(graph(x), fn(x), strict=True):
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected)


def test_a_tensor_that_is_filled_in_place_is_a_new_one() -> None:
    """As in the density of a half-Cauchy. What read it before it was filled reads what it read; where it is a view of
    an argument, that is filled, as it would be."""

    def fills(x: Tensor) -> list[Tensor]:
        y = x + 1
        before = y * 2
        y.masked_fill_(x < 0, -7.0)
        return [before, y.exp(), y]

    def fills_an_argument(x: Tensor) -> list[Tensor]:
        return [x.view(-1).masked_fill_(x > 0, -7.0)]

    x = torch.randn(6, generator=torch.Generator().manual_seed(0))
    graph = trace_graph(fills, [x], [0])
    small = lean(graph)
    assert "aten.masked_fill_" not in small.code
    for got, expected in zip(small(x), fills(x), strict=True):
        assert torch.equal(got, expected)
    graph, written = trace_graph(fills_an_argument, [x], [0]), x.clone()
    assert lean(graph) is graph
    assert torch.equal(graph(written)[0], written)
    assert not torch.equal(written, x)


def test_a_graph_keeps_the_precision_that_it_was_traced_in() -> None:
    """A program's own numbers are of the fit's type; the process' default is another one once the graph runs."""
    x = torch.randn(4, generator=torch.Generator().manual_seed(0))
    graph = lean(trace_graph(lambda x: [_wasteful(x)], [x], [0]))
    expected = _wasteful(x)
    try:
        torch.set_default_dtype(torch.float32)
        assert torch.equal(graph(x)[0], expected)
        assert float((_wasteful(x) - expected).abs().max()) > 1e-9  # the control
    finally:
        torch.set_default_dtype(torch.float64)


def test_a_graph_stands_for_its_function_where_that_is_mapped() -> None:
    """Of any number of records, with the same bits; where nothing can be traced it is the function itself."""
    rows, points = torch.randn(9, 3).double(), torch.randn(4, 3).double()

    def log_density(z: Tensor, x: Tensor) -> Tensor:
        return -torch.ones(len(x)).to(x) * (x @ z).square()

    traced = Traced(log_density, (None, 0), "traced")
    graph = traced.graph(points[0], rows, mapped=(0,))
    assert graph is not log_density
    for some in (rows, rows[:2], torch.cat([rows, rows])):
        own, its = (torch.func.vmap(lambda z, fn=fn, x=some: fn(z, x))(points) for fn in (log_density, graph))
        assert torch.equal(own, its)

    def by_value(z: Tensor, x: Tensor) -> Tensor:
        return x @ z if z.sum() > 0 else x @ -z

    assert Traced(by_value, (None, 0), "traced").graph(points[0], rows, mapped=(0,)) is by_value


@pytest.mark.parametrize("reads_one", [False, True])
def test_a_graph_that_cannot_be_mapped_stands_for_nothing(reads_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that reads a value, say. The control: it stands for its function where nothing reads one."""

    def log_density(z: Tensor, x: Tensor) -> Tensor:
        return x @ z

    def reads(module: torch.fx.GraphModule) -> Any:
        return SimpleNamespace(forward=lambda *args: [t + 0 * float(t.sum()) for t in module(*args)])

    if reads_one:
        monkeypatch.setattr(compiled, "lean", reads)
    found = Traced(log_density, (None, 0), "traced").graph(torch.ones(3), torch.ones(4, 3), mapped=(0,))
    assert (found is log_density) == reads_one
