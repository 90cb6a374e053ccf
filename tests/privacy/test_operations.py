"""Each operation that a program may use under record privacy, mapped over a block of records.

PyTorch's own samples of its operations are run, and the calls of ATen that they make, their gradients' among them, are
made again with every choice of their tensors given a row a record: one row changed, spoilt with NaN, or moved to
another place changes no bit of another row; the mapped call is the single one within rounding; none raises at values.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from secure_fvi import exported
from secure_fvi.compiled import threads
from secure_fvi.errors import InputError
from secure_fvi.exported import (
    _INSTEAD,
    _MAPPED,
    _PURE,
    TensorGraph,
    _keeps_apart,
    _Node,
    _Ref,
    _unseen,
    is_mapped,
    operation,
    untested_operations,
)

ROWS = 64
#: Calls of one overload, tensors that have a row a record at once, and samples of one operation.
CALLS, AT_ONCE, SAMPLES = 12, 3, 6
#: Calls of one overload that are looked at, of which gradients are taken so often.
MOST = (CALLS, 3, 1)
#: Samples that call no operation of the lists that others do not.
ELSEWHERE = ("fft.", "sparse.", "masked.", "signal.", "stft", "istft", "_refs")
#: Of these no call is mapped: they give memory as it was found, or take no tensor.
MADE = {"empty", "empty_like", "new_empty", "new_empty_strided", "tril_indices", "triu_indices"}
MAPPED = frozenset(name for name in _PURE | _MAPPED if is_mapped(name))
ALLOWED = (_PURE | MAPPED) - MADE
aten = torch.ops.aten
Call = tuple[list[Any], dict[str, Any]]


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [_copied(v) for v in value] if isinstance(value, (list, tuple)) else value


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dim(), value.dtype
    return tuple(map(_kind, value)) if isinstance(value, (list, tuple)) else type(value)


class _Calls(TorchDispatchMode):
    """Calls by the overload's name, of arguments of different kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, dict[Any, Call]] = defaultdict(dict)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(func)
        if func._overloadpacket.__name__ not in ALLOWED or name.endswith("out") or len(self.found[name]) == CALLS:
            return func(*args, **kwargs)
        known = self.found[name]
        kind = (_kind(args), tuple((k, _kind(v)) for k, v in sorted(kwargs.items())))
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        plain = all(t.layout == torch.strided and t.numel() for t in tensors)  # of nothing nothing is told
        if plain and kind not in known:
            known[kind] = _copied(args), {k: _copied(v) for k, v in kwargs.items()}
        return func(*args, **kwargs)


def _of_pytorch() -> Sequence[Any]:
    """PyTorch's table of operations, with samples of their arguments."""
    absent: Any = types.ModuleType("expecttest")  # which that module imports, for tests of its own
    absent.TestCase = object
    sys.modules.setdefault("expecttest", absent)
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


def _by_hand() -> dict[str, Call]:
    """What none of the samples calls: composed of other operations, on whole numbers, or in place."""
    x = torch.linspace(-1.0, 2.0, 12, dtype=torch.float64).reshape(4, 3)
    whole = torch.arange(6)
    args: dict[str, list[Any]] = {name: [x] for name in ("argsort", "square", "isfinite", "lift_fresh_copy", "zero_")}
    args |= {name: [x, x + 1] for name in ("_euclidean_dist", "cdist", "cross", "copy_")}
    args["_linalg_det"] = [x[:3] + torch.eye(3)]  # of samples' first, of one row, no gradient raises
    pairs = ("bitwise_or.Tensor", "bitwise_xor.Tensor", "floor_divide", "remainder.Tensor", "fmod.Tensor")
    args |= {name: [whole, whole + 1] for name in pairs}
    named: dict[str, Call] = {
        f"aten.{name}" + ("" if "." in name else ".default"): (given, {}) for name, given in args.items()
    }
    return {**named, "aten.div.Tensor_mode": ([whole, whole + 1], {"rounding_mode": "trunc"})}


def _in_place(name: str) -> str | None:
    """The form of an operation that writes into its first argument, where there is one."""
    packet, overload = name.split(".")[1:]
    found = getattr(getattr(aten, f"{packet}_", None), overload, None)
    return str(found) if packet in _PURE and isinstance(found, torch._ops.OpOverload) else None


def _forth_and_back(found: Any) -> None:
    results = found if isinstance(found, (tuple, list)) else [found]
    ends = [t.sum() for t in results if isinstance(t, Tensor) and t.requires_grad and not t.is_complex()]
    if ends:
        torch.stack(ends).sum().backward()


def _of_another_number(name: str, call: Call) -> bool:
    """The gradient of a softmax of one number, which is 1: at other numbers, as are made here, it is none."""
    return name == "aten._softmax_backward_data.default" and not call[0][0].dim()


@functools.cache
def calls() -> dict[str, list[Call]]:
    """By overload, of those operations that a program may use."""
    seen, table = _Calls(), _of_pytorch()
    from torch.testing._internal.common_utils import set_rng_seed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in table:
            if torch.float64 not in op.dtypes or op.name.startswith(ELSEWHERE):
                continue
            try:
                # `op.sample_inputs` would look through the whole stack, below pytest, for a test of PyTorch's own.
                set_rng_seed(0)
                samples = op.sample_inputs_func(op, "cpu", torch.float64, op.supports_autograd)
                some = (s for s in samples if not isinstance(s.input, Tensor) or s.input.numel())
                for sample in itertools.islice(some, SAMPLES):
                    with seen:
                        _forth_and_back(op(sample.input, *sample.args, **sample.kwargs))
            except Exception:
                continue  # what it wants is not here; `test_every_operation_is_looked_at` counts
    allowed = _PURE | MAPPED
    for name, call in _by_hand().items():
        seen.found[name]["by hand"] = call
    return {
        name: [call for call in known.values() if not _of_another_number(name, call)]
        for name, known in seen.found.items()
        if name.startswith("aten.") and name.split(".")[1] in allowed and not name.endswith("out")
    }


def mapped() -> dict[str, list[Call]]:
    """Of those, what is mapped over records."""
    return {name: known for name, known in calls().items() if is_mapped(name.split(".")[1])}


def runs(name: str) -> Callable[..., Any]:
    """As a graph runs it, where one may name it."""
    packet, overload = name.split(".")[1:]
    written = getattr(getattr(aten, packet), overload)
    if packet in _PURE or name in _INSTEAD:
        return operation(name)[0]
    if not written._schema.is_mutable:
        return partial(written)
    return lambda x, *args, **kwargs: written(x.clone(), *args, **kwargs)


def _tensors(value: Any) -> list[Tensor]:
    found = [t for t in tree_flatten(value)[0] if isinstance(t, Tensor)]
    return [torch.view_as_real(t) if t.is_complex() else t for t in found]


def _rows(value: Tensor, rng: torch.Generator) -> Tensor:
    shape = (ROWS, *value.shape)
    if value.is_floating_point():
        return value * (1 + 0.1 * torch.randn(shape, generator=rng, dtype=value.dtype))
    if value.dtype == torch.bool:
        return torch.rand(shape, generator=rng) < 0.5
    found = value.expand(shape).clone()
    if value.dim():
        found[::2] = found[::2].flip(-1)  # other places, and none out of range
    return found


def _changed(row: Tensor, spoilt: bool) -> Tensor:
    if row.is_floating_point():
        return torch.full_like(row, math.nan) if spoilt else row * -0.7 + 0.3
    return ~row if row.dtype == torch.bool else row.flip(-1) if row.dim() else row


def _mapped(name: str, call: Call, dtype: torch.dtype) -> Iterator[tuple[Callable[..., list[Tensor]], list[Tensor]]]:
    """The call as a function of those of its tensors that have a row a record, and these, for every choice of them."""
    rng, run = torch.Generator().manual_seed(0), runs(name)
    flat, spec = tree_flatten(call)
    flat = [v.to(dtype) if isinstance(v, Tensor) and v.dtype == torch.float64 else v for v in flat]
    places = [i for i, v in enumerate(flat) if isinstance(v, Tensor) and not v.is_complex()]
    for count in range(1, min(len(places), AT_ONCE) + 1):
        for some in itertools.combinations(places, count):

            def of_rows(*rows: Tensor, some: tuple[int, ...] = some) -> list[Tensor]:
                filled = list(flat)
                for i, row in zip(some, rows, strict=True):
                    filled[i] = row
                args, kwargs = tree_unflatten(filled, spec)
                return _tensors(run(*args, **kwargs))

            yield of_rows, [_rows(flat[i], rng) for i in some]


def _equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(7.25), b.nan_to_num(7.25)) for a, b in zip(found, expected, strict=True))


def faults(name: str, call: Call, dtype: torch.dtype) -> set[str]:
    """What a call does wrong when it is mapped. A choice of tensors that it refuses to map counts as none."""
    found = set[str]()
    for run, rows in _mapped(name, call, dtype):
        try:
            single = [run(*(r[i] for r in rows)) for i in (0, 5, ROWS - 1)]
            together = torch.vmap(run)(*rows)
        except Exception:
            continue
        rounding = 1e-8 if dtype == torch.float64 else 1e-3
        for i, alone in zip((0, 5, ROWS - 1), single, strict=True):
            if not all(torch.allclose(t[i], a, rounding, rounding, True) for t, a in zip(together, alone, strict=True)):
                found.add("another number")
        for at, spoilt in ((5, True), (ROWS - 1, False)):
            one_changed, others = [r.clone() for r in rows], torch.arange(ROWS) != at
            for r in one_changed:
                r[at] = _changed(r[at], spoilt)
            try:
                again = torch.vmap(run)(*one_changed)
            except Exception as error:
                found.add(f"raises: {error}")
                continue
            if not _equal([t[others] for t in again], [t[others] for t in together]):
                found.add("mixes")
        for by in (1, 13):
            moved = torch.vmap(run)(*(torch.empty_like(r).copy_(r.roll(by, 0)) for r in rows))  # of the same strides
            if not _equal([t.roll(-by, 0) for t in moved], together):
                found.add("the place matters")
    return found


def _all_faults(most: int) -> dict[str, set[str]]:
    functorch: Any = torch._C._functorch
    functorch._set_vmap_fallback_warning_enabled(False)
    with threads(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {
            name: {f for c in known[:most] for dtype in (torch.float64, torch.float32) for f in faults(name, c, dtype)}
            for name, known in mapped().items()
        }
    return {name: what for name, what in found.items() if what}


def test_no_operation_mixes_records() -> None:
    assert not _all_faults(1)


@pytest.mark.slow
def test_no_operation_mixes_records_in_any_of_its_samples() -> None:
    assert not _all_faults(CALLS)


def test_an_operation_that_mixes_is_found() -> None:
    """The control: `index_fill`, which was in the list."""
    x = torch.linspace(0.1, 1.0, 4, dtype=torch.float64)
    with threads(1):
        found = faults("aten.index_fill.int_Tensor", ([x, 0, torch.tensor([0, 2]), x[0]], {}), torch.float64)
    assert {"mixes", "another number"} <= found


ONE, THREE = torch.tensor(0.3, dtype=torch.float64), torch.tensor([0.2, 0.5, 0.7], dtype=torch.float64)
NINE, TWO = THREE.outer(THREE), torch.tensor(2)


@pytest.mark.parametrize(
    ("call", "proper"),
    [
        (lambda: aten._euclidean_dist(THREE, NINE), lambda: aten._euclidean_dist(NINE, NINE)),
        (lambda: aten.smooth_l1_loss(ONE, THREE[:1], 1), lambda: aten.smooth_l1_loss(THREE, THREE, 1)),
        (lambda: aten.mse_loss(NINE, ONE, 2), lambda: aten.mse_loss(NINE, NINE, 2)),
        (lambda: aten.any.dims(THREE, []), lambda: aten.any.dims(THREE, [0])),
        (lambda: aten.index_select(THREE, 0, TWO), lambda: aten.index_select(THREE, 0, TWO[None])),
        (lambda: aten.embedding(NINE, TWO), lambda: aten.index(NINE, [TWO])),
        (lambda: aten.where(ONE > 0, ONE.float(), ONE), lambda: aten.where(THREE > 0, THREE.float(), THREE)),
    ],
    ids=["_euclidean_dist", "smooth_l1_loss", "mse_loss", "any", "index_select", "embedding", "where"],
)  # fmt: skip
def test_a_call_that_mixes_records_is_found(
    call: Any, proper: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As no sample calls it: of tensors without an axis, or of several numbers of them, or where so many records as
    an axis is long would be taken for it; that gives records other numbers than each has alone, of another type too, or
    one where there is none. So each would be, were it on the list. The control: as the samples have it."""
    monkeypatch.setattr(exported, "is_mapped", lambda name: True)
    found = untested_operations(call)
    assert found == [f"{request.node.callspec.id} (as it is called)"]
    assert untested_operations(call) == found  # also of a call that is known
    assert untested_operations(proper) == []


@pytest.mark.parametrize("most", [1, pytest.param(CALLS, marks=pytest.mark.slow)])
def test_no_call_of_the_samples_is_taken_for_one_that_mixes(most: int) -> None:
    def kept(name: str, call: Call) -> bool:
        packet, overload = name.split(".")[1:]
        given, form = tree_flatten(call)
        return _keeps_apart(getattr(getattr(aten, packet), overload), given, form)

    with threads(1), _unseen():
        assert not [name for name, known in mapped().items() if not all(kept(name, call) for call in known[:most])]


@pytest.mark.parametrize("of", [ONE, THREE], ids=["mixes", "control"])
def test_a_number_that_is_rolled_is_another_records(of: Tensor) -> None:
    """Why `roll` is not in the list, and why such calls are looked at."""
    assert untested_operations(lambda: of.roll(4)) == ["roll"]
    rows = torch.stack([of, 2 * of, 3 * of])
    rolled = torch.vmap(lambda row: row.roll(1))(rows)
    assert torch.equal(rolled, torch.stack([row.roll(1) for row in rows])) == (of is THREE)


#: Composed of others in the list before a graph is written, or without a tensor that could have a row a record.
WITHOUT_ROWS = {"arange", "eye", "full", "linspace", "logspace", "ones", "scalar_tensor", "zeros", "view_as_real"}


def test_every_operation_is_looked_at() -> None:
    seen = {name.split(".")[1] for name in calls()}
    assert seen >= _PURE - WITHOUT_ROWS
    assert seen | {"_local_scalar_dense", "_reshape_alias"} >= MAPPED - MADE - WITHOUT_ROWS


# ---- no value raises ----

SPOILT = {
    torch.float64: (0.0, -1.0, 1e30, math.inf, math.nan),
    torch.int64: (0, -1, 10**6, -(2**63)),
    torch.bool: (False, True),
}


def _spoilt(call: Call) -> Iterator[Call]:
    """The call, each of its tensors, or its first element, set to numbers of all kinds."""
    flat, spec = tree_flatten(call)
    for i, whole in itertools.product(range(len(flat)), (True, False)):
        for bad in SPOILT.get(flat[i].dtype, ()) if isinstance(flat[i], Tensor) else ():
            spoilt = flat[i].clone().contiguous()
            spoilt.view(-1)[: None if whole else 1] = bad
            yield tree_unflatten([*flat[:i], spoilt, *flat[i + 1 :]], spec)


def _slopes(run: Callable[..., Any], call: Call, times: int) -> None:
    """The gradient of what the call gives in the numbers that it is given, and the gradient's own."""
    flat, spec = tree_flatten(call)
    at = [i for i, v in enumerate(flat) if isinstance(v, Tensor) and v.dtype == torch.float64]

    def total(*numbers: Tensor) -> Tensor:
        filled = dict(zip(at, numbers, strict=True))
        args, kwargs = tree_unflatten([filled.get(i, v) for i, v in enumerate(flat)], spec)
        return sum((t.cos().sum() for t in _tensors(run(*args, **kwargs)) if t.is_floating_point()), torch.zeros(()))

    def slope(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
        some = tuple(range(len(at)))
        return lambda *numbers: sum((g.cos().sum() for g in torch.func.grad(of, some)(*numbers)), torch.zeros(()))

    for _ in range(times):
        total = slope(total)  # type: ignore[assignment]
    total(*(flat[i] for i in at))


def _raises(times: int) -> set[str]:
    """What raises at some values and at others does not, of operations, or of their gradients taken so often."""
    found = set[str]()
    with threads(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, known in calls().items():
            if name.split(".")[1] not in _PURE:
                continue
            for call in known[: MOST[times]]:
                try:
                    _slopes(runs(name), call, times)
                except Exception:
                    continue  # refused whatever the values
                for spoilt in _spoilt(call):
                    try:
                        _slopes(runs(name), spoilt, times)
                    except Exception as error:
                        found.add(f"{name}: {error}")
    return found


@pytest.mark.parametrize("times", [0, 1, 2])
def test_no_value_makes_an_operation_of_a_graph_raise(times: int) -> None:
    """Nor its gradient, nor, as released curvature asks for it, that one's."""
    assert not _raises(times)


def test_gradients_that_raise_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: PyTorch's own, which solve by a matrix that is singular, or take singular values of what is none."""
    of = ("_linalg_slogdet", "_linalg_solve_ex", "_linalg_det")
    some = {name: known for name, known in calls().items() if name.split(".")[1] in of}
    monkeypatch.setattr(sys.modules[__name__], "calls", lambda: some)
    monkeypatch.setattr("secure_fvi.exported._or_identity", lambda x, fails: x)
    assert {line.split(":")[0] for line in _raises(1)} == set(some)


def test_what_fails_is_nan_with_its_gradient_and_what_does_not_is_as_it_was() -> None:
    """A place out of range, in a graph mapped over records: that record alone is NaN."""
    gather = _Node(operation("aten.index.Tensor")[0], (_Ref(0), [_Ref(1)]), {}, False)
    graph, table = TensorGraph(2, [gather], [_Ref(2)], {}), torch.tensor([1.0, 2.0])
    places = torch.tensor([[0], [1], [2], [-3], [-1]])

    def value(table: Tensor, place: Tensor) -> Tensor:
        return graph([table, place], torch.device("cpu"))[0].sum()

    slopes, values = torch.vmap(torch.func.grad_and_value(value), (None, 0))(table, places)
    assert torch.equal(values.isnan(), torch.tensor([False, False, True, True, False]))
    assert values[[0, 1, 4]].tolist() == [1.0, 2.0, 2.0]
    assert torch.equal(slopes.isnan().any(1), values.isnan())
    with pytest.raises(IndexError):
        aten.index(table, [places[2]])  # the control


@pytest.mark.parametrize("by", [0, -1])
def test_whole_numbers_are_divided_by_nothing_that_the_processor_traps(by: int) -> None:
    run = operation("aten.div.Tensor_mode")[0]
    assert run(torch.tensor([-(2**63), 7]), torch.tensor([by, 2]), rounding_mode="trunc")[1] == 3
    assert operation("aten.div.Scalar_mode")[0](torch.tensor([-(2**63), 7]), -1, rounding_mode="trunc")[1] == -7


def test_an_embedding_is_read_by_its_rows() -> None:
    """In a graph, as places along an axis; with PyTorch's own numbers and gradients, padding's among them."""
    table = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).reshape(4, 3)
    places, run = torch.tensor([[1, 3], [0, 1]]), operation("aten.embedding.default")[0]
    for padding in (-1, 1):
        functions = [lambda w, f=f, p=padding: f(w, places, p).square().sum() for f in (run, aten.embedding)]
        (ours, value), (theirs, same) = (torch.func.grad_and_value(f)(table) for f in functions)
        assert torch.equal(value, same)
        assert torch.equal(ours, theirs)
        assert bool((ours[1] == 0).all()) == (padding == 1)
    assert run(table, torch.tensor([4, -1])).tolist() == table[[0, 0]].tolist()  # noted as failures (`_fails`)
    with pytest.raises(InputError, match="how often a row is read"):
        run(table, places, -1, True)
