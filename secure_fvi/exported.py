"""A program as a graph of tensor operations: data that can be sent, checked and run, not code.

`secure_fvi.deployment.fenced` makes it, where the author's code runs. `read_program` reads it, and executes nothing of
what it reads: each node names an operation of a fixed list (`_PURE`), all of them functions of their arguments that
change none, draw no random numbers, open no file and return no memory that they have not written. Constants are
safetensors.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import operator
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from safetensors.torch import load
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from secure_fvi.algorithms.base import Problem
from secure_fvi.compiled import Calls, flatten
from secure_fvi.density import (
    Layout,
    LogDensity,
    Params,
    Role,
    Site,
    Start,
    running,
)  # fmt: skip
from secure_fvi.errors import DataError, InputError
from secure_fvi.federated_model import FederatedModel, Schema
from secure_fvi.program_contract import check_parts

VERSION = 1
#: Of a graph: its operations, its text, and on made data, of two and three records, elements of one result, of all
#: results, and seconds. A program that loops over a thousand steps has some ten thousand operations.
_MOST_NODES, _MOST_TEXT = 20_000, 1 << 24
_MOST_ELEMENTS, _MOST_IN_ALL, _MOST_SECONDS = 1 << 25, 1 << 27, 60.0
_MOST_BYTES = 1 << 28


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Operations of ATen that a graph may name: pure, deterministic, and bounded by the tensors that they are given.
#: Not among them, with reason: in-place and `out=` forms, `empty` (it shows old memory), `as_strided` (it reads around
#: its argument), `linalg_matrix_exp` (its time follows from values), `linalg_lu_solve` and `native_group_norm` (they
#: believe the sizes and places that they are told), `from_file`, random numbers,
#: `index_fill` (mapped over records it writes all of them into one buffer), `roll` (of a number it rolls the records,
#: which shows where it is by no multiple of how many there are), `linalg_eigh`
#: (it raises where it does not converge), and whatever is new in another version of PyTorch.
_PURE = _words(
    """
    abs acos acosh add addbmm addcdiv addcmul addmm addmv addr alias all amax amin aminmax any arange argmax
    argmin argsort asin asinh atan atan2 atanh baddbmm binary_cross_entropy bitwise_and bitwise_not bitwise_or
    bitwise_xor bmm bucketize cat ceil celu cholesky cholesky_inverse cholesky_solve clamp clamp_max clamp_min
    clone constant_pad_nd convolution copysign cos cosh cross cummax cummin cumprod cumsum deg2rad detach
    diag_embed diagonal diagonal_scatter digamma dist div dot elu embedding eq erf erfc erfinv exp exp2 expand
    expm1 eye fill flip floor floor_divide fmax fmin fmod frac full full_like gather ge gelu glu gt hardsigmoid
    hardswish hardtanh heaviside hypot i0 igamma igammac index index_add index_copy index_put
    index_select isfinite isinf isnan kthvalue le leaky_relu lerp lgamma lift_fresh lift_fresh_copy
    linalg_cholesky_ex linalg_cross linalg_householder_product linalg_inv_ex linalg_lu
    linalg_lu_factor_ex linalg_qr linalg_solve_triangular linalg_vector_norm
    linspace log log10 log1p log2 log_sigmoid_forward logaddexp logaddexp2 logcumsumexp logical_and logical_not
    logical_or logical_xor logit logspace logsumexp lt masked_fill masked_scatter max max_pool2d_with_indices
    maximum mean median min minimum mish mm mode mse_loss mul mv mvlgamma nan_to_num
    native_layer_norm ne neg new_full new_ones new_zeros nextafter nonzero_static norm ones ones_like permute
    polar polygamma pow prod rad2deg reciprocal relu remainder repeat round rsqrt rsub scalar_tensor
    scatter scatter_add scatter_reduce select select_scatter sgn sigmoid sign signbit silu sin sinc sinh slice
    slice_scatter smooth_l1_loss softplus softshrink sort special_bessel_j0 special_bessel_j1 special_entr
    special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_ndtri special_xlog1py special_zeta
    split split_with_sizes sqrt square squeeze stack std std_mean sub sum t tan tanh topk trace transpose
    triangular_solve tril triu trunc unbind unfold unsqueeze upsample_nearest2d var var_mean vdot view
    view_as_real where xlogy zeros zeros_like avg_pool2d _adaptive_avg_pool2d _linalg_check_errors _linalg_det
    _linalg_slogdet _linalg_solve_ex _log_softmax _softmax _to_copy _unsafe_view cdist _cdist_forward
    _euclidean_dist
    """
)
#: What is mapped over records under record privacy, of programs, graphs and their gradients: of `_PURE` what PyTorch
#: tags as worked out number by number, and these, of which a word says why records stay apart. They are numbers by
#: themselves as well; what shapes alone give a place; sums and products along an axis; a matrix a record; and places
#: along one axis, looked at before they are read, of which the record is another axis. All else is worked out record
#: by record: rules that lay all records' rows, places or parameters in one tensor of no more axes and count through
#: it (the place behind a table's end, of `embedding`, is the next record's), or that go by how many axes they are
#: given.
_MAPPED = _words(
    """
    elu_backward floor_divide gelu_backward hardsigmoid_backward hardswish hardswish_backward hardtanh_backward
    leaky_relu_backward log_sigmoid_backward log_sigmoid_forward logit_backward mish_backward sigmoid_backward
    silu_backward softplus_backward softshrink_backward tanh_backward threshold_backward

    _linalg_check_errors _local_scalar_dense _reshape_alias _to_copy _unsafe_view alias arange cat constant_pad_nd
    copy_ detach diag_embed diagonal diagonal_backward diagonal_scatter empty empty_like expand eye fill flip full
    full_like lift_fresh lift_fresh_copy linspace new_empty new_empty_strided new_full new_ones new_zeros ones
    ones_like permute repeat scalar_tensor select select_backward select_scatter slice slice_backward slice_scatter
    split split_with_sizes squeeze stack t transpose tril tril_indices triu triu_indices unbind unsqueeze view zero_
    zeros zeros_like

    _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data all amax amin any argmax argmin cumprod
    cumsum linalg_vector_norm logcumsumexp logsumexp max mean min prod std std_mean sum var var_mean

    addmm addmv baddbmm bmm dot linalg_cholesky_ex linalg_solve_triangular mm mv trace

    gather index index_add index_put index_select scatter scatter_add
    """
)
#: Arithmetic of sizes, which a graph holds as whole numbers.
SIZES: Mapping[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "truediv": operator.truediv,
    "mod": operator.mod,
    "neg": operator.neg,
    "sym_float": torch.sym_float,
    "sym_int": torch.sym_int,
    "sym_max": torch.sym_max,
    "sym_min": torch.sym_min,
    "getitem": operator.getitem,
}
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
#: The most axes of `mvlgamma`, which makes one element for each of them.
_MOST_AXES = 1000
#: Sizes and what is reckoned with them stay below this: whole numbers of Python's own grow without end.
_MOST_SIZE = 2**53
#: Of a run of a graph: whether an operation failed, () each. It then gives NaN, as it would else raise: a record under
#: record privacy must not change how the others are evaluated, nor how long that takes.
_failures: ContextVar[list[Tensor] | None] = ContextVar("failures", default=None)


def _fails(where: Tensor) -> Tensor:
    """`where`, noted as a failure of the graph if it holds anywhere."""
    noted = _failures.get()
    if noted is not None:
        noted.append(where.any())
    return where


def _within(index: Tensor, size: int, lowest: int = 0) -> Tensor:
    """Places from `lowest` to below `size`; 0 for others."""
    return torch.where(_fails((index < lowest) | (index >= size)), 0, index)


def _at(run: Callable[..., Any], x: Tensor, dim: int, index: Tensor, *args: Any, **kwargs: Any) -> Any:
    return run(x, dim, _within(index, x.shape[dim] if x.dim() else 1), *args, **kwargs)


def _embedding(weight: Tensor, index: Tensor, padding_idx: int = -1, by_count: bool = False, _: bool = False) -> Tensor:
    """As places along the first axis: mapped, PyTorch's own counts through all records' tables as one."""
    _need(not by_count, "an embedding whose gradient goes by how often a row is read")
    found = torch.ops.aten.index(weight, [_within(index, weight.shape[0])])
    return found if padding_idx < 0 else torch.where((index == padding_idx)[..., None], found.detach(), found)


def _at_several(run: Callable[..., Any], x: Tensor, places: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    if any(p is not None and not p.dtype.is_signed for p in places):  # masks: as many as there are, or refused
        return run(x, places, *args, **kwargs)
    return run(
        x, [p if p is None else _within(p, n, -n) for p, n in zip(places, x.shape, strict=False)], *args, **kwargs
    )


def _masked_scatter(run: Callable[..., Any], x: Tensor, mask: Tensor, source: Tensor) -> Any:
    return run(
        x, mask & ~_fails(mask.expand(torch.broadcast_shapes(mask.shape, x.shape)).sum() > source.numel()), source
    )


def _bce(run: Callable[..., Any], x: Tensor, to: Tensor, *args: Any, **kwargs: Any) -> Any:
    found = (torch.where(_fails(~((t >= 0) & (t <= 1))), 0.5, t) for t in (x, to))
    return run(*found, *args, **kwargs)


def _whole_division(run: Callable[..., Any], x: Any, by: Any, *args: Any, **kwargs: Any) -> Any:
    """Of whole numbers: none by 0, nor of the lowest by -1, which the processor traps."""
    kind = torch.result_type(x, by)
    if kind.is_floating_point or kind.is_complex or kind == torch.bool or kwargs.get("rounding_mode", "") is None:
        return run(x, by, *args, **kwargs)
    lowest = False if not kind.is_signed else (torch.as_tensor(x).to(kind) == torch.iinfo(kind).min) & (by == -1)
    if isinstance(by, Tensor):
        by = torch.where(_fails((by == 0) | lowest), 1, by)
    elif isinstance(lowest, Tensor):
        x = torch.where(_fails(lowest), 0, x)
    return run(x, by, *args, **kwargs)


def _unchecked(run: Callable[..., Any], *args: Any, check_errors: bool = False, **kwargs: Any) -> Any:
    """A factorisation that says in its last result where it fails."""
    found = run(*args, **kwargs)
    if check_errors:
        _fails(found[-1] != 0)
    return found


def _cholesky(run: Callable[..., Any], x: Tensor, upper: bool = False) -> Any:
    found, info = torch.ops.aten.linalg_cholesky_ex(x, upper=upper)
    _fails(info != 0)
    return found


def _regular(run: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Of a matrix x by which, and by whose transpose, the gradient solves: where that fails it raises, whatever the
    operation itself was told."""
    known = x.detach()
    infos = [torch.ops.aten.linalg_lu_factor_ex(a)[2] != 0 for a in (known, known.mT)]
    return run(_or_identity(x, infos[0] | infos[1]), *args, **kwargs)


def _finite(run: Callable[..., Any], x: Tensor) -> Any:
    """Of a matrix x whose singular values the gradient takes, which raises where they are none."""
    return run(_or_identity(x, ~x.detach().isfinite().all(-1).all(-1)))


def _cholesky_inverse(run: Callable[..., Any], x: Tensor, *args: Any) -> Any:
    return run(_or_identity(x, (x.detach().diagonal(0, -2, -1) == 0).any(-1)), *args)


def _or_identity(x: Tensor, fails: Tensor) -> Tensor:
    """Matrices x, the identity in place of those of which an operation `fails`."""
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return torch.where(_fails(fails)[..., None, None], eye, x)


def _check_errors(run: Callable[..., Any], info: Tensor, *args: Any, **kwargs: Any) -> None:
    _fails(info != 0)


def _mvlgamma(run: Callable[..., Any], x: Tensor, p: int) -> Any:
    _need(type(p) is int and p <= _MOST_AXES, f"more than {_MOST_AXES} axes of mvlgamma")
    return run(x, p)


def _upsampled(run: Callable[..., Any], x: Tensor, size: Sequence[int], *scales: float | None) -> Any:
    """With a scale that is not that of the sizes PyTorch reads memory that is not the tensor's."""
    for old, new, scale in zip(x.shape[-2:], size, scales, strict=False):
        _need(scale is None or new <= old * scale < new + 1, "a scale that is not that of its sizes")
    return run(x, size, *scales)


#: In place of ATen's own: a size as Python sees it holds under `vmap` too; a view that memory forbids becomes a copy.
_INSTEAD: Mapping[str, Callable[..., Any]] = {
    "aten.sym_size.int": lambda x, axis: x.shape[axis],
    "aten.sym_numel.default": lambda x: x.numel(),
    "aten.view.default": torch.reshape,
    "aten._unsafe_view.default": torch.reshape,
    "aten.embedding.default": _embedding,
    "aten.copy.default": lambda to, source, non_blocking=False: source.to(to.dtype).expand_as(to),
    "aten.lift_fresh_copy.default": lambda x: x,
    "aten.lift_fresh.default": lambda x: x,
}
#: Operations that raise at some values, as functions that do not. What they give is then of no use (`_fails`). And such
#: as believe what they are told, held to it.
_TOTAL: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(_words("gather index_add index_copy index_select scatter scatter_add scatter_reduce"), _at),
    **dict.fromkeys(_words("index index_put"), _at_several),
    **dict.fromkeys(_words("div.Tensor_mode div.Scalar_mode floor_divide fmod remainder"), _whole_division),
    **dict.fromkeys(_words("linalg_cholesky_ex linalg_inv_ex linalg_lu_factor_ex"), _unchecked),
    **dict.fromkeys(_words("_linalg_slogdet _linalg_solve_ex"), _regular),
    "_linalg_check_errors": _check_errors,
    "_linalg_det": _finite,
    "binary_cross_entropy": _bce,
    "cholesky": _cholesky,
    "cholesky_inverse": _cholesky_inverse,
    "masked_scatter": _masked_scatter,
    "mvlgamma": _mvlgamma,
    "upsample_nearest2d.default": _upsampled,
}
_DTYPES = {str(d): d for d in (torch.float64, torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool)}
_MEMORY = {str(m): m for m in (torch.contiguous_format, torch.preserve_format)}
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_CPU = torch.device("cpu")
_PACKAGE = f"{__name__.partition('.')[0]}."
_ROLES: tuple[Role, ...] = ("global", "silo", "record")


@runtime_checkable
class Elsewhere(Protocol):
    """A program whose code is not to run in this process."""

    @property
    def roles(self) -> FederatedModel:
        """Plate and silo sites; its function refuses to be called."""
        ...

    def exported(self, schema: Schema, dtype: torch.dtype) -> Program:
        """Raises InputError for what cannot be federated or traced."""
        ...


class _Ref(NamedTuple):
    """The result of an earlier node."""

    at: int


class _Const(NamedTuple):
    name: str


class _Node(NamedTuple):
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    makes: bool  # takes the device on which it makes a tensor

    def options(self, values: Sequence[Any], constants: Params, device: torch.device) -> dict[str, Any]:
        found = {name: _filled(value, values, constants) for name, value in self.kwargs.items()}
        return {**found, "device": device} if self.makes else found


class TensorGraph:
    """A function of tensors, as nodes in the order in which they run."""

    def __init__(self, inputs: int, nodes: Sequence[_Node], outputs: Sequence[_Ref], constants: Params) -> None:
        self.inputs, self._nodes, self._outputs, self._constants = inputs, nodes, outputs, constants
        self._there: dict[torch.device, Params] = {}

    def __repr__(self) -> str:
        return f"TensorGraph({len(self._nodes)} operations)"

    def __call__(self, flat: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """The outputs for these inputs, on `device`; NaN where an operation failed. The caller has set the default type
        of numbers (`running`)."""
        if device not in self._there:
            self._there[device] = {name: value.to(device) for name, value in self._constants.items()}
        constants, values, failures = self._there[device], list[Any](flat), list[Tensor]()
        token = _failures.set(failures)
        try:
            for node in self._nodes:
                args, options = _filled(node.args, values, constants), node.options(values, constants, device)
                values.append(node.run(*args, **options))
        finally:
            _failures.reset(token)
        outputs = [values[ref.at] for ref in self._outputs]
        if not failures:
            return outputs
        once = torch.where(torch.stack(failures).any(), math.nan, 1.0)  # times NaN, gradients are NaN too
        return [found * once.to(found.dtype) if found.is_floating_point() else found for found in outputs]

    def check_work(self, flat: Sequence[Tensor]) -> None:
        """Raises InputError where these inputs, on the CPU, make it do more than a program may on made data. How large
        a result is follows from shapes, before it is computed."""
        values, elements, until = list[Any](flat), 0, time.monotonic() + _MOST_SECONDS
        for node in self._nodes:
            args, options = _filled(node.args, values, self._constants), node.options(values, self._constants, _CPU)
            size = _elements(node.run, args, options)
            elements += size
            _need(size <= _MOST_ELEMENTS and elements <= _MOST_IN_ALL, "results that are too large on made data")
            values.append(node.run(*args, **options))
            _need(time.monotonic() < until, f"more than {_MOST_SECONDS:g} s on made data")


def _filled(value: Any, values: Sequence[Any], constants: Params) -> Any:
    """An argument, or several, with what they stand for."""
    if isinstance(value, _Ref):
        return values[value.at]
    if isinstance(value, _Const):
        return constants[value.name]
    return [_filled(v, values, constants) for v in value] if type(value) in (list, tuple) else value


def _elements(run: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> int:
    """Of what `run` would give, by shapes alone; where a mask decides on it, the most that it can be."""
    with FakeTensorMode() as mode:

        def shape_of(value: Any) -> Any:
            if isinstance(value, Tensor):
                return mode.from_tensor(value)
            return [shape_of(v) for v in value] if isinstance(value, (list, tuple)) else value

        try:
            found = run(*map(shape_of, args), **{name: shape_of(v) for name, v in options.items()})
        except (DynamicOutputShapeException, DataDependentOutputException):
            sizes = [x.numel() for x in _tensors([*args, *options.values()])]
            # A choice by one mask is a part of what is there; several places are broadcast against each other.
            return max(sizes) if len(sizes) == 2 else math.prod(sizes)
    return sum(t.numel() for t in (found if isinstance(found, (tuple, list)) else (found,)) if isinstance(t, Tensor))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _tensors(v)


class Program(NamedTuple):
    """What a party needs of a program once it is traced. Everyone may see it: it was made without data."""

    layout: Layout
    start: Start  # from made data
    evaluate: TensorGraph  # Z_G, Z_S, Z_L, theta, rows -> shared, silo, records, constrained values
    recentre: TensorGraph  # rows -> where a fit begins, Z_G, Z_S, Z_L; which rows fit each observed site, (N,)
    observed: tuple[tuple[str, str], ...]  # those sites, and what each takes
    warnings: tuple[str, ...]  # what was to be said of the program


#: Whole numbers as columns may hold them beside those of 64 bits, and arithmetic of them that may go past these.
_SMALL, _PASSES = (torch.uint8, torch.bool), _words("add sub rsub mul neg pow square")


class _Columns(TorchFunctionMode):
    """Follows columns through a graph, as `data_contract` does through a program. Raises DataError where whole numbers
    of theirs are places before the first, which PyTorch counts from the end, or go past what their small type holds,
    which wraps round."""

    def __init__(self, rows: Params, size: int, silo: str) -> None:
        super().__init__()
        self._size, self._silo = size, silo
        self._names: Any = WeakTensorKeyDictionary()
        for name, value in rows.items():
            self._names[value] = frozenset([name])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, given = getattr(func, "__name__", "").partition(".")[0], list(_tensors([*args, *kwargs.values()]))
        names = frozenset[str]().union(*map(self._of, given))
        found = func(*args, **kwargs)
        if not names:
            return found
        if name in ("index", "index_put"):
            for place in _tensors(args[1]):
                if place.dtype.is_signed and (of := self._of(place)):
                    self._refuse(place < 0, of, "is an index, and less than 0,", "number groups from 0 on")
        elif name in _PASSES and isinstance(found, Tensor) and found.dtype in _SMALL:
            wide = func(*(a.long() if isinstance(a, Tensor) and a.dtype in _SMALL else a for a in args), **kwargs)
            past = f"goes past what whole numbers of eight bits, or truth values, hold, in {name},"
            self._refuse(found.long() != wide, names, past, "write .float() of them in the model")
        for made in _tensors([found] if isinstance(found, Tensor) else found):
            self._names[made] = names | self._of(made)
        return found

    def _of(self, value: Tensor) -> frozenset[str]:
        found: frozenset[str] = self._names.get(value, frozenset())
        return found

    def _refuse(self, bad: Tensor, names: frozenset[str], what: str, remedy: str) -> None:
        rows = bad.reshape(len(bad), -1).any(1)[: self._size] if bad.dim() and len(bad) > self._size else bad
        if count := int(rows.sum()):
            of = ", ".join(f"'{name}'" for name in sorted(names))
            raise DataError(f"silo '{self._silo}': {of} {what} in {count} of {self._size} rows; {remedy}")


class _Evaluated(NamedTuple):
    terms: dict[Role, list[Tensor]]
    constrained: Params


class GraphDensity(LogDensity):
    """`LogDensity` that runs a program's graph, never the program."""

    def __init__(self, program: Program, roles: FederatedModel, schema: Schema) -> None:
        super().__init__(roles, program.layout, schema)
        self.program = program

    def start_at(self, problem: Problem, rows: Params, size: int, silo: str) -> Start:
        """Without the program."""
        z, inside = self.centre(rows, silo)
        for (name, words), fits in zip(self.program.observed, inside, strict=True):
            count = int((~fits[:size]).sum())
            if count:
                raise DataError(f"silo '{silo}': the data do not fit site '{name}' in {count} of {size} rows: {words}")
        start = Start(z[0], z[1], z[2], {n: v.to(z[0].device) for n, v in self.program.start.theta.items()})
        with _Columns(rows, size, silo):
            terms = self.evaluate(*start[:3], start.theta, rows)
        count = int((~torch.isfinite(terms.records[:size])).sum())
        if count or not all(bool(torch.isfinite(t).all()) for t in flatten(start)):
            raise DataError(
                f"silo '{silo}': the log density is not finite at the start in {count} of {size} rows: values on the "
                "edge of what the model takes, or too large; correct or rescale them, or say where to begin with "
                "start={...}"
            )
        check_parts(problem, rows, size, silo)
        return start

    def centre(self, rows: Params, silo: str) -> tuple[list[Tensor], list[Tensor]]:
        """Z_G, Z_S and Z_L at the centre of the prior; and which rows fit each observed site."""
        device = next(iter(rows.values())).device
        try:
            with running(self.program.start.z_global.dtype, device), torch.no_grad():
                found = self.program.recentre([rows[n] for n in sorted(rows)], device)
        except Exception as error:  # whatever an operation says of the data stays here
            raise DataError(f"silo '{silo}': the model fails on its data ({type(error).__name__})") from None
        return found[:3], found[3:]

    def check_sites(self, point: Any, rows: Params) -> None:
        """Under differential privacy, that no shape in the start follows from values: it is worked out on all of a
        silo's records at once, and what memory and time that takes would tell of one, without noise. What is mapped
        over data sets has no such shapes. Of the density it is seen where records are mapped. Raises InputError."""
        if point.problem.privacy is None:
            return
        data, device = [rows[name].unsqueeze(0) for name in sorted(rows)], point.problem.device
        try:
            with running(point.problem.dtype, device), torch.no_grad():
                torch.func.vmap(lambda *one: tuple(self.program.recentre(one, device)))(*data)
        except Exception as error:
            raise InputError(
                "where the model's sites begin, or what they take, is worked out by values of the data, which decide "
                f"on shapes or cannot be mapped ({type(error).__name__}): under differential privacy the time that "
                "takes would tell of records. Write it without x[mask], by torch.where"
            ) from error

    def run(self, latents: Params, theta: Params, rows: Params, densities: bool = True) -> Any:
        raise InputError("a program's graph says what its sites add up to, not what each of them is")

    def _run(
        self, z_global: Tensor, z_silo: Tensor, z_record: Tensor, theta: Params, rows: Params, densities: bool = True
    ) -> Any:
        # A graph counts records by their latents, of which one row may stand for all.
        z_record = z_record.expand(len(next(iter(rows.values()))), -1)
        flat = [z_global, z_silo, z_record, *(theta[n] for n in sorted(theta)), *(rows[n] for n in sorted(rows))]
        with running(z_global.dtype, z_global.device):
            shared, silo, records, *rest = self.program.evaluate(flat, z_global.device)
        constrained = dict(zip(constrained_names(self.layout), rest, strict=True))
        return _Evaluated({"global": [shared], "silo": [silo], "record": [records]}, constrained)


def theta_names(layout: Layout) -> list[str]:
    return sorted(name for name, _ in layout.theta)


def constrained_names(layout: Layout) -> list[str]:
    return sorted([*(site.name for site in layout.sites), *theta_names(layout)])


# ---- from bytes to a graph: nothing of what is read is executed ----


def read_program(content: bytes, schema: Schema, *, checked: bool = False) -> Program:
    """The program in `content`, for data of this schema. Raises InputError for anything else.

    checked: another process has read these bytes without an error, so that nothing of them is run here. How much
    memory and time an operation takes before its size is known only the operating system limits: whoever holds keys or
    data lets a process without them read what comes from elsewhere first (`secure_fvi.deployment.fence`).
    """
    try:
        return _read(content, schema, checked)
    except InputError as error:
        raise InputError(f"what was traced of the model is not valid: {error}") from None
    except Exception as error:  # whatever malformed bytes make two parsers and PyTorch raise
        raise InputError(f"what was traced of the model is not valid ({type(error).__name__})") from None


def _read(content: bytes, schema: Schema, checked: bool) -> Program:
    _need(len(content) <= _MOST_BYTES, f"more than {_MOST_BYTES} bytes")
    length = int.from_bytes(content[:8], "big")
    _need(8 + length <= len(content), "cut short")
    _need(length <= _MOST_TEXT, f"more than {_MOST_TEXT} characters")
    table = json.loads(content[8 : 8 + length])
    tensors = load(content[8 + length :])
    wanted = {"version", "sites", "theta", "dtype", "observed", "warnings", "evaluate", "recentre"}
    _need(type(table) is dict and table.keys() == wanted, "other fields than those of a program")
    _need(table["version"] == VERSION, f"version {VERSION} is read here")
    dtype = _DTYPES[table["dtype"]]
    layout = Layout(tuple(_site(s) for s in table["sites"]), tuple((_text(n), _shape(s)) for n, s in table["theta"]))
    _need(len(set(constrained_names(layout))) == len(constrained_names(layout)), "a name stands twice")
    starts = [tensors.pop(f"start/{i}") for i in range(3 + len(layout.theta))]
    start = Start(starts[0], starts[1], starts[2], dict(zip(theta_names(layout), starts[3:], strict=True)))
    observed = tuple((_text(name), _text(words, 500)) for name, words in table["observed"])
    said = tuple(_text(words, 2000) for words in table["warnings"])
    evaluate, recentre = (_graph_of(table[name], tensors) for name in ("evaluate", "recentre"))
    program = Program(layout, start, evaluate, recentre, observed, said)
    if not checked:
        _check(program, schema, dtype)
    return program


def _check(program: Program, schema: Schema, dtype: torch.dtype) -> None:
    """The graphs run on made data of three sizes, one record as it is alone among them, and all that they give has the
    layout's shapes and the run's type."""
    layout, cpu = program.layout, torch.device("cpu")
    theta = dict(layout.theta)
    sizes = [layout.size(role) for role in _ROLES]
    _need(sizes[0] > 0, "no global site")

    def start_shapes(records: int) -> list[tuple[int, ...]]:
        return [(sizes[0],), (sizes[1],), (records, sizes[2]), *(theta[n] for n in theta_names(layout))]

    def agreed(found: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> bool:
        return len(found) == len(shapes) and all(
            isinstance(t, Tensor) and tuple(t.shape) == s and t.dtype == dtype
            for t, s in zip(found, shapes, strict=True)
        )

    _need(agreed(flatten_start(program.start, layout), start_shapes(2)), "a start of other shapes than the layout's")
    for records in (1, 2, 3):
        rows = schema.dummy_rows(records)
        data = [rows[n] for n in sorted(rows)]
        _need(program.recentre.inputs == len(data), "a start of other data")
        with running(dtype, cpu), torch.no_grad():
            flat = [torch.zeros(s, dtype=dtype) for s in start_shapes(records)] + data
            _need(program.evaluate.inputs == len(flat), "a density of other arguments")
            program.recentre.check_work(data)
            program.evaluate.check_work(flat)
            values = program.evaluate(flat, cpu)
            _need(agreed(values[:3], [(), (), (records,)]), "a density of other shapes")
            _need(len(values) == 3 + len(constrained_names(layout)), "values of other sites than the layout's")
            again = program.recentre(data, cpu)
            _need(agreed(again[:3], start_shapes(records)[:3]), "a start of other shapes")
            fits = all(t.dtype == torch.bool and tuple(t.shape) == (records,) for t in again[3:])
            _need(fits and len(again) == 3 + len(program.observed), "checks of other shapes")
        first = {s.name for s in layout.of("record")}
        for name, value in zip(constrained_names(layout), values[3:], strict=True):
            _need(isinstance(value, Tensor), f"no values of '{name}'")
            _need(name not in first or (value.dim() > 0 and value.shape[0] == records), f"'{name}' is of no records")


def flatten_start(start: Start, layout: Layout) -> list[Tensor]:
    """Z_G, Z_S, Z_L and theta by name."""
    return [*start[:3], *(start.theta[n] for n in theta_names(layout))]


def _graph_of(table: Any, tensors: Params) -> TensorGraph:
    _need(type(table) is dict and table.keys() == {"inputs", "nodes", "outputs"}, "a graph of other fields")
    inputs, nodes = _whole(table["inputs"]), table["nodes"]
    _need(type(nodes) is list and len(nodes) <= _MOST_NODES, f"more than {_MOST_NODES} operations")
    read = []
    for i, (name, args, kwargs) in enumerate(nodes):
        run, makes = operation(_text(name))

        def value(arg: Any, before: int = inputs + i, depth: int = 0) -> Any:
            return _value(arg, before, tensors, depth)

        _need(type(args) is list and type(kwargs) is dict, "arguments that are none")
        _need(
            not {"out", "device", "layout", "pin_memory", "generator"} & kwargs.keys(), "an argument that is not taken"
        )
        # Of sizes and numbers alone: Python's operators would also multiply lists, and format texts.
        _need(not name.startswith("size.") or not any(type(a) in (str, list) for a in args), "sizes that are none")
        read.append(_Node(run, tuple(value(a) for a in args), {_text(k): value(v) for k, v in kwargs.items()}, makes))
    outputs = [_Ref(_below(at, inputs + len(read))) for at in table["outputs"]]
    return TensorGraph(inputs, read, outputs, tensors)


def operation(name: str) -> tuple[Callable[..., Any], bool]:
    """What `name` stands for, and whether it is told a device. Raises InputError for what is not in the lists."""
    if name in _INSTEAD:
        return _INSTEAD[name], False
    space, _, rest = name.partition(".")
    if space == "size" and rest in SIZES:
        return partial(_reckoned, SIZES[rest]), False
    packet, _, overload = rest.partition(".")
    if space != "aten" or packet not in _PURE:
        raise InputError(f"it uses {name}, which is not among the operations that a traced model may use")
    found = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if not isinstance(found, torch._ops.OpOverload) or found._schema.is_mutable:
        raise InputError(f"it uses {name}, which PyTorch {torch.__version__} does not have, or which writes in place")
    if not all("Tensor" in str(given.type) for given in found._schema.returns):  # forms for lists, texts, devices
        raise InputError(f"it uses {name}, which gives no tensor")
    total = _TOTAL.get(rest) or _TOTAL.get(packet)
    return partial(total, found) if total else found, any(a.name == "device" for a in found._schema.arguments)


class _Seen(TorchDispatchMode):
    """Notes which operations are called; and, with `calls`, each call, of arguments that no call before it had."""

    def __init__(self, calls: bool = False) -> None:
        super().__init__()
        self._called, self._calls = set[Any](), calls
        self.calls = dict[Any, tuple[Any, list[Any], Any]]()  # an operation, what it was given and its form, by kind

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # or each operation goes through PyTorch's compiler
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._called.add(func._overloadpacket)
        if self._calls:
            self._note(func, *tree_flatten((args, kwargs or {})))
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, given: Sequence[Any], form: Any) -> None:
        key = str(func), str(form), *map(_kind, given)
        if key not in self.calls:
            known = key in _apart
            copies = [] if known else [v.detach().clone() if isinstance(v, Tensor) else v for v in given]
            self.calls[key] = func, copies, form

    @property
    def packets(self) -> set[str]:
        return set(map(_packet, self._called))


def _packet(called: Any) -> str:
    return str(called).removeprefix("aten.")


def _kind(value: Any) -> Any:
    return (value.dtype, value.shape) if isinstance(value, Tensor) else (type(value), str(value))


class _Rules(Calls):
    """Notes functions that bring a derivative of their own, but for this package's: mapped over records they go by a
    rule of their own, or of what they call, which sees all records at once. And calls that fail: a program may catch
    that and go another way."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        of = args[0] if args else None
        if isinstance(of, type) and issubclass(of, torch.autograd.Function) and not of.__module__.startswith(_PACKAGE):
            self.names.add(f"{of.__name__} (a torch.autograd.Function)")
        return super().__torch_function__(func, types, args, kwargs)


def untested_operations(call: Callable[[], Any]) -> list[str]:
    """The operations that `call` uses and that are not known to keep records apart when it is mapped over them
    (`_MAPPED`), or that do not with arguments such as it gives them; and what fails in it, since what else it would use
    is not known."""
    seen = _Seen(calls=True)
    packets, names = used_operations(call, seen)
    mixing = {f"{name} (as it is called)" for name in _mixing(seen)}
    return sorted({name for name in packets if not is_mapped(name)} | names | mixing)


@cache
def is_mapped(packet: str) -> bool:
    """Whether an operation of ATen, or its form in place, is mapped over records (`_MAPPED`)."""
    name = packet if packet in _MAPPED else packet.removesuffix("_")
    if name in _MAPPED:
        return True
    found = getattr(torch.ops.aten, name, None) if name in _PURE else None
    return found is not None and any(torch.Tag.pointwise in getattr(found, of).tags for of in found.overloads())


#: What was found of calls, by operation and form of what it is given: whether it keeps records apart.
_apart: dict[Any, bool] = {}
#: Records over which a call is mapped; of so many tensors each choice has a row of each, of more each one and all. And
#: what shows memory as it was.
_TRIED, _ALL_CHOICES = 4, 4
_OLD_MEMORY = _words("empty empty_like new_empty new_empty_strided")


def _mixing(seen: _Seen) -> Iterator[str]:
    """Operations that do not keep records apart as they were called. A rule by which PyTorch maps one may be right for
    all that it is tested with, and take the records for an axis of a tensor that has none."""
    for key, (func, given, form) in seen.calls.items():
        name = _packet(func._overloadpacket)
        if not is_mapped(name):
            continue
        if key not in _apart:
            with _unseen():
                _apart[key] = name in _OLD_MEMORY or _keeps_apart(func, given, form)
        if not _apart[key]:
            yield name


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """What is tried is no call of a program's, where somebody counts these; and no word on how fast PyTorch maps it."""
    functorch: Any = torch._C._functorch
    with torch._C.DisableTorchFunction(), _disable_current_modes(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        functorch._set_vmap_fallback_warning_enabled(False)
        try:
            yield
        finally:
            functorch._set_vmap_fallback_warning_enabled(True)


def _keeps_apart(func: Callable[..., Any], given: Sequence[Any], form: Any) -> bool:
    """Whether, mapped over records, each has what it has alone and none moves a bit of another's, by each choice of
    tensors that have a row a record. What fails for one record too is found where the program is mapped; what fails for
    several alone takes their number for that of an axis, and mixes where an axis is as long."""
    places = [i for i, value in enumerate(given) if isinstance(value, Tensor)]
    counts = range(1, len(places) + 1) if len(places) <= _ALL_CHOICES else (1, len(places))
    chosen = [c for n in counts for c in itertools.combinations(places, n)]

    def alone(row: Mapping[int, Tensor]) -> tuple[Tensor, ...]:
        values = [row.get(i, v).clone() if isinstance(v, Tensor) else v for i, v in enumerate(given)]
        args, kwargs = tree_unflatten(values, form)
        return tuple(_tensors([func(*args, **kwargs)]))

    def results(rows: Mapping[int, Tensor]) -> list[Tensor]:
        mapped = torch.func.vmap(lambda *row: alone(dict(zip(rows, row, strict=True))))
        return list(mapped(*(value.clone() for value in rows.values())))

    def otherwise(found: Sequence[Tensor], rows: Mapping[int, Tensor], at: int) -> bool:
        """Whether a record has other numbers than it has alone, or has some where it fails alone."""
        try:
            own = alone({i: value[at] for i, value in rows.items()})
            return not all(_same_number(a[at], b) for a, b in zip(found, own, strict=True))
        except Exception:
            return True

    for of in chosen:
        rows = {i: _rows_like(given[i], i) for i in of}
        try:
            found = results(rows)
        except Exception:
            with contextlib.suppress(Exception):
                results({i: value[:1] for i, value in rows.items()})
                return False
            continue
        if any(otherwise(found, rows, at) for at in range(_TRIED)):
            return False
        for whole in (False, True):  # a changed place may be one that there is not
            with contextlib.suppress(Exception):
                others = results({i: _last_changed(value, whole) for i, value in rows.items()})
                if not all(_same_bits(a[: _TRIED - 1], b[: _TRIED - 1]) for a, b in zip(found, others, strict=True)):
                    return False
        sizes = {n for i in places for n in given[i].shape} if any(map(_is_whole, rows.values())) else ()
        for size in sizes:  # a place behind a record's last may be the next one's
            behind = {i: _first_placed(value, size) for i, value in rows.items()}
            with contextlib.suppress(Exception):
                if otherwise(results(behind), behind, 0):
                    return False
    return True


def _rows_like(value: Tensor, seed: int) -> Tensor:
    """Rows of `_TRIED` records that are a little less than `value`, so that what lies in [0, 1], say, stays there."""
    rows = value.expand(_TRIED, *value.shape).clone()
    if not value.is_floating_point():
        return rows
    less = (0.37 * seed + 0.618034 * torch.arange(rows.numel(), dtype=torch.float64)).frac().reshape(rows.shape)
    return rows * (1 - 1e-3 * less).to(rows)  # drawn it would not be, within a function that is mapped


def _last_changed(rows: Tensor, whole: bool) -> Tensor:
    """The same, as it lies in memory, with another last one; of whole numbers if `whole`."""
    rows = rows.clone()
    if rows.is_floating_point():
        rows[-1] = rows[-1] / 2 + 0.25
    elif whole:
        rows[-1] = ~rows[-1] if rows.dtype == torch.bool else (rows[-1] == 0).to(rows)
    return rows


def _is_whole(rows: Tensor) -> bool:
    return not rows.is_floating_point() and rows.dtype != torch.bool


def _first_placed(rows: Tensor, place: int) -> Tensor:
    """The same, with this number in all of the first one's whole numbers."""
    if not _is_whole(rows):
        return rows
    rows = rows.clone()
    rows[0] = place
    return rows


def _same_number(one: Tensor, other: Tensor) -> bool:
    """But for how it is rounded."""
    near = 1e-3 if one.dtype in (torch.float32, torch.complex64) else 1e-8
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.allclose(one, other, near, near, equal_nan=True)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def used_operations(call: Callable[[], Any], seen: _Seen | None = None) -> tuple[set[str], set[str]]:
    """The operations that `call` uses; and the functions with a derivative of their own, and what fails. seen: notes
    the former."""
    seen = _Seen() if seen is None else seen

    def within(x: Tensor) -> Tensor:  # a transform, without which PyTorch calls such functions unseen
        call()
        return x

    with seen, _Rules() as rules:
        try:
            torch.func.vjp(within, torch.zeros(()))
        except Exception as error:  # what fails has used what it has used
            rules.failed = rules.failed or {f"what raises {type(error).__name__}"}
    return seen.packets, rules.names | {f"{name} (which fails on a made record)" for name in rules.failed}


def _reckoned(run: Callable[..., Any], *sizes: Any) -> Any:
    """Of numbers alone, and of a list its places: Python's operators would also repeat lists and join them."""
    numbers = sizes[1:] if run is operator.getitem and isinstance(sizes[0], list | tuple) else sizes
    _need(all(isinstance(n, _NUMBERS) for n in numbers), "sizes that are none")
    found = run(*sizes)
    _need(not isinstance(found, int | float) or abs(found) < _MOST_SIZE, "a size past all data")
    return found


def _value(arg: Any, before: int, tensors: Params, depth: int) -> Any:
    if arg is None or type(arg) in (bool, float) or (type(arg) is int and abs(arg) < 2**63):
        return arg
    if type(arg) is str:
        return _text(arg)
    if type(arg) is list:
        _need(depth < 4 and len(arg) <= _MOST_NODES, "lists too deep or too long")
        return [_value(a, before, tensors, depth + 1) for a in arg]
    _need(type(arg) is dict and len(arg) == 1, "an argument of no known kind")
    ((kind, what),) = arg.items()
    if kind == "at":
        return _Ref(_below(what, before))
    if kind == "const":
        _need(what in tensors, "a constant that is not there")
        return _Const(what)
    kinds: Mapping[str, Mapping[str, Any]] = {"dtype": _DTYPES, "memory": _MEMORY, "float": _FLOATS}
    _need(kind in kinds and what in kinds[kind], "an argument of no known kind")
    return kinds[kind][what]


def _site(fields: Any) -> Site:
    name, role, shape, event_dim, plate_dim, support = fields
    _need(role in _ROLES, "a site of no role")
    _need(type(event_dim) is int and type(plate_dim) is int and -64 < plate_dim <= 0 <= event_dim < 64, "a site")
    return Site(_text(name), role, _shape(shape), event_dim, plate_dim, _text(support, 2000))


def _shape(value: Any) -> tuple[int, ...]:
    _need(type(value) is list and len(value) < 32, "a shape that is none")
    return tuple(_whole(n) for n in value)


def _whole(value: Any) -> int:
    _need(type(value) is int and 0 <= value < 2**40, "a number that is none")
    return int(value)


def _below(value: Any, limit: int) -> int:
    _need(type(value) is int and 0 <= value < limit, "a value before it is there")
    return int(value)


def _text(value: Any, longest: int = 200) -> str:
    _need(type(value) is str and len(value) <= longest and value.isprintable(), "a name that is none")
    return str(value)


def _need(holds: bool, words: str) -> None:
    if not holds:
        raise InputError(words)
