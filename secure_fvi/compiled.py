"""Pyro out of the loop: a pure function of tensors is traced once it has been called often and, when it pays, compiled.

`make_fx` records the tensor operations of one call, Pyro's handlers and PyTorch's transforms included, with the
number of records left symbolic, so that one graph serves silos of every size. The graph computes the same
numbers to the last bit; `torch.compile` then fuses it (equal up to float rounding).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import operator
import os
import re
import shutil
import stat
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from greenlet import getcurrent
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.passes.dialect.common.cse_pass import CSEPass
from torch.overrides import TorchFunctionMode

from secure_fvi.errors import InputError
from secure_fvi.files import make_private

Mode = Literal["compiled", "traced", "eager", "alone"]

#: Calls from which compilation repays its 5 to 20 s, for small work: a call then saves about a millisecond.
COMPILE_FROM_CALLS = 20_000
#: Calls that are made as they are before a function is traced: it takes a second, and a call then saves 10 to 30 ms.
TRACE_AFTER_CALLS = 20
#: Numbers a call works on that double what it saves.
_SAVING_DOUBLES_AT = 20_000
_PRIMES = (10007, 10009, 10037, 10039, 10061, 10067, 10069, 10079)
#: Operators by name, and functions of PyTorch that take their arguments as they are.
_CHEAPER: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in (
        "abs", "add", "addcdiv", "addcmul", "bmm", "cat", "clamp", "clone", "cumsum", "digamma", "div", "exp", "expm1",
        "gather", "ge", "gt", "le", "lerp", "lgamma", "log", "log1p", "logsumexp", "lt", "mean", "mm", "mul", "mv",
        "neg", "permute", "pow", "reciprocal", "rsqrt", "rsub", "select", "sigmoid", "split_with_sizes", "sqrt", "sub",
        "sum", "tanh", "transpose", "tril", "unsqueeze", "where",
    )},
    **{name: getattr(torch.Tensor, name) for name in ("expand", "view")},
}  # fmt: skip
#: What gives in a new tensor what an operator writes into its first argument.
_ANEW: dict[Any, Callable[..., Any]] = {
    getattr(getattr(torch.ops.aten, f"{name}_"), kind): getattr(getattr(torch.ops.aten, name), kind)
    for name, kind in (
        ("add", "Tensor"), ("addcdiv", "default"), ("addcmul", "default"), ("index_put", "default"), ("lerp", "Scalar"),
        ("masked_fill", "Scalar"), ("mul", "Tensor"),
    )
}  # fmt: skip
#: Files of whoever calls a program, or is called by it.
_NOT_OF_A_PROGRAM = re.compile(r"[/\\]site-packages[/\\]|[/\\]secure_fvi[/\\](?!models[/\\])|[/\\]lib[/\\]python|^<")
#: The axis that counts records of all tensors in an argument, or of those in each field of one that is a tuple.
Axes = int | None | tuple["Axes", ...]
_Run = Callable[..., Sequence[Tensor]]
_Build = Callable[[Iterator[Tensor]], Any]
_log = logging.getLogger(__name__)


def choose_mode(requested: bool | Literal["auto"], calls: int, numbers: int) -> Mode:
    """ "auto" compiles when there is a C++ compiler and the run is long enough to pay for it."""
    if requested == "auto":
        pays = calls * (1 + numbers / _SAVING_DOUBLES_AT) >= COMPILE_FROM_CALLS
        return "compiled" if pays and shutil.which("c++") else "traced"
    return "compiled" if requested else "traced"


class Traced:
    """A pure function over nested dicts, tuples and tensors, traced after `TRACE_AFTER_CALLS` calls: the numbers are
    the same. A compiled function's are not, so that it is compiled at its first call.

    `record_axis[i]` is the axis of argument i's tensors that counts records, or None, or one for each field of a tuple;
    other sizes are fixed by the call that is traced, or, with `by_shape`, there is a trace for each, after so many
    calls of that shape. Where tracing fails (Python control flow on values, say) the function runs as it is, and `mode`
    says so: "eager". "alone" besides runs no call together with another's, so that none follows from another's numbers.
    """

    def __init__(self, fn: Callable[..., Any], record_axis: Sequence[Axes], mode: Mode, by_shape: bool = False) -> None:
        self.fn, self.record_axis, self.mode, self.by_shape = fn, tuple(record_axis), mode, by_shape
        self._traces: dict[tuple[torch.Size, ...], tuple[_Run, _Build]] = {}
        self._calls: Counter[tuple[torch.Size, ...]] = Counter()  # by what a trace would be for
        self._maps: dict[tuple[torch.Size, ...], bool] = {}
        #: Calls of equal shapes as one: of `engines.local`, and here since it lives as long.
        self.mapped: Callable[[list[tuple[Any, ...]]], list[Any]] | None = None

    def __call__(self, *args: Any) -> Any:
        wait = None if self.mode == "alone" else waiting(self)
        return self.alone(*args) if wait is None else wait(*args)

    @property
    def name(self) -> str:
        """Of the function, for messages."""
        return getattr(self.fn, "__qualname__", "model")

    def shapes(self, args: tuple[Any, ...]) -> tuple[torch.Size, ...]:
        """Of all tensors: calls of equal shapes can run together."""
        return tuple(t.shape for t in flatten(args))

    def alone(self, *args: Any) -> Any:
        """One call, at once."""
        if self.mode in ("eager", "alone"):
            return self.fn(*args)
        flat = flatten(args)
        key = tuple(t.shape for t in flat) if self.by_shape else ()
        known = self._traces.get(key)
        if known is None:
            self._calls[key] += 1
            often = self.mode == "compiled" or self._calls[key] > TRACE_AFTER_CALLS
            return self._trace(key, args, flat) if often else self.fn(*args)
        run, build = known
        return build(iter(run(*flat)))

    def graph(self, *args: Any, mapped: Sequence[int]) -> Callable[..., Any]:
        """What stands for the function where it is mapped over the arguments at `mapped`: its trace, made at once, with
        arguments of these shapes; or the function itself where there is none, or none that PyTorch can map."""
        flat = flatten(args)
        key = tuple(t.shape for t in flat) if self.by_shape else ()
        if self.mode not in ("eager", "alone") and key not in self._traces:
            self._trace(key, args, flat)
            key = tuple(t.shape for t in flat) if self.by_shape else ()
        if self.mode in ("eager", "alone"):
            return self.fn
        run, build = self._traces[key]

        def graph(*args: Any) -> Any:
            return build(iter(run(*flatten(args))))

        if key not in self._maps:
            self._maps[key] = _maps(graph, args, mapped)
        return graph if self._maps[key] else self.fn

    def _trace(self, key: tuple[torch.Size, ...], args: Sequence[Any], flat: list[Tensor]) -> Any:
        """One call: trace, compare with the function itself, keep the graph only if they agree."""
        with Calls() as calls:
            result = self.fn(*args)
        expected = flatten(result)
        rebuild = [structure(a) for a in args]

        def on_flat(*tensors: Tensor) -> list[Tensor]:
            supply = iter(tensors)
            return flatten(self.fn(*(build(supply) for build in rebuild)))

        named = [axis for arg, axes in zip(args, self.record_axis, strict=True) for axis in _of_each(arg, axes)]
        # A number among arrays, such as an optimiser's step count, has no axis of records.
        axes = [axis if axis is not None and axis < t.dim() else None for axis, t in zip(named, flat, strict=True)]
        fixed: list[int | None] = [None] * len(axes)
        # First with sizes that are numbers, in half the time: what is wrong then is wrong at this size too.
        attempts: list[tuple[list[int | None], bool]] = [(axes, True), (fixed, True)]
        if not self.by_shape:
            attempts = [*([(axes, False)] if self.mode == "traced" else []), (axes, True), (fixed, True)]
        why = ""
        for attempt, symbolic in attempts:
            try:
                run, got = self._attempt(on_flat, flat, attempt, expected, symbolic, calls.made)
            except Exception as error:  # whatever a user's program does that a tracer cannot follow
                _log.debug("tracing failed", exc_info=True)
                why = reason(error)
                continue
            if attempt is not axes:  # the graph holds for this number of records only
                self.by_shape, key = True, tuple(t.shape for t in flat)
            build = structure(result)
            self._traces[key] = (run, build)
            return build(iter(got))
        _log.warning("%s cannot be traced and runs as it is, slowly: %s", self.name, why)
        self.mode = "eager"
        return result

    def _attempt(
        self, fn: Callable[..., list[Tensor]], flat: Sequence[Tensor], axes: Sequence[int | None],
        expected: Sequence[Tensor], symbolic: bool, made: int,
    ) -> tuple[_Run, Sequence[Tensor]]:  # fmt: skip
        """A graph and what it gives, which is `expected`. Raises whatever keeps it from that."""
        graph = trace_graph(fn, flat, axes, symbolic, made)
        if self.mode == "compiled":
            try:
                run = _compile(graph, flat, axes)
                return run, _agreed(run(*flat), expected)
            except Exception as error:  # a compiler that is missing, broken or wrong costs speed, not the run
                from torch._inductor.exc import InductorError

                said = type(error).__name__
                if isinstance(error, InductorError | InputError):  # it has met stand-ins alone, and no data
                    said += f": {str(error).splitlines()[0]}"
                _log.warning("not compiled (%s); the traced graph runs instead", said)
                self.mode = "traced"
        run = lean(graph).forward
        return run, _agreed(run(*flat), expected, 1e-3 if symbolic else exactly(flat[0].dtype))


def _maps(graph: Callable[..., Any], args: Sequence[Any], mapped: Sequence[int]) -> bool:
    """Whether a graph can be mapped over some of its arguments, and gives the same numbers: an operation that writes
    into a tensor can not if that is one for all."""

    def twice(value: Any) -> Any:
        return structure(value)(iter([torch.stack([t, t]) for t in flatten(value)]))

    both = [twice(arg) if k in mapped else arg for k, arg in enumerate(args)]
    try:
        found = torch.func.vmap(graph, tuple(0 if k in mapped else None for k in range(len(args))))(*both)
    except RuntimeError:
        return False
    return agree([t[1] for t in flatten(found)], flatten(graph(*args)))


class TracedOnMade(Traced):
    """A traced function of records under record privacy: the data decide neither on whether it is traced nor on what
    is. It is never compiled, which would choose its own order of sums, nor mapped over silos.

    `made` is told what it was called with and gives arguments of the same shapes without the data of records.
    """

    def __init__(self, fn: Callable[..., Any], made: Callable[..., tuple[Any, ...]], mode: Mode) -> None:
        super().__init__(fn, (), "traced" if mode == "compiled" else mode, by_shape=True)
        self._made = made

    @property
    def traced(self) -> bool:
        return bool(self._traces)

    def __call__(self, *args: Any) -> Any:
        return self.alone(*args)

    def alone(self, *args: Any) -> Any:
        """One call, at once."""
        return self.ready(*args)(*args)

    def ready(self, *args: Any) -> Callable[..., Any]:
        """What to call with arguments of these shapes, as often as the data ask for it: counted once. After
        `TRACE_AFTER_CALLS` the function is traced, on what is made."""
        self._calls[()] += 1
        if self.mode != "eager" and not self._traces and self._calls[()] > TRACE_AFTER_CALLS:
            made = self._made(*args)
            self.record_axis = (None,) * len(made)
            try:
                with Calls() as calls:
                    self._trace((), made, flatten(made))
                if calls.failed and self._traces:  # they were caught: it may go another way where it is traced
                    raise _OtherNumbers
            except Exception as error:  # the program fails on what is made
                _log.warning("%s is not traced and runs as it is, slowly: %s", self.name, reason(error))
                self.mode = "eager"
                self._traces.clear()
        if not self._traces:
            return self.fn
        run, build = self._traces[()]
        return lambda *args: build(iter(run(*flatten(args))))


def trace_graph(
    fn: Callable[..., list[Tensor]], flat: Sequence[Tensor], axes: Sequence[int | None], symbolic: bool = True,
    made: float = math.inf,
) -> GraphModule:  # fmt: skip
    """Trace on stand-ins whose record axis has a length that no other axis has, so that it alone is symbolic.

    Without `symbolic` that length is a number in all that is computed, and what is left of it in the graph stands for
    the number of records; a function of it that is no multiple (a mean's divisor, say, as a fraction) stays as it was.
    The caller compares, `exactly`.

    made: calls of PyTorch that `fn` makes of `flat`. One that makes far more of the stand-ins has a loop over records,
    whose trace takes minutes and holds for their number alone: raises an error.
    """
    lengths = {size for tensor in flat for size in tensor.shape}
    records = next(p for p in _PRIMES if p not in lengths)
    examples = []
    for tensor, axis in zip(flat, axes, strict=True):
        shape = list(tensor.shape)
        if axis is not None:
            shape[axis] = records
        examples.append(tensor.new_zeros(shape))
    known = next(((i, axis) for i, axis in enumerate(axes) if axis is not None), None)
    mode: Literal["fake", "symbolic"] = "symbolic" if symbolic and known is not None else "fake"

    def counted(*tensors: Tensor) -> list[Tensor]:
        with Calls(math.inf if known is None else 1000 + 2 * made):  # not of what the tracer looks at in each tensor
            return fn(*tensors)

    module = make_fx(counted, tracing_mode=mode, _allow_non_fake_inputs=True)(*examples)
    for node in reversed(module.graph.nodes):
        # Optimisers mark their steps for the profiler; the marks cannot be compiled and cost time.
        if "_record_function" in str(node.target):
            module.graph.erase_node(node)
    _state_dtypes(module.graph)
    if known is not None:
        _free_record_count(module.graph, records, *known)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


class Calls(TorchFunctionMode):
    """Counts calls of PyTorch, ends what makes more than `most`, and notes those that fail, caught or not."""

    def __init__(self, most: float = math.inf) -> None:
        super().__init__()
        self.made, self.most = 0, most
        self.failed = set[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made += 1
        if self.made > self.most:
            raise _TooLong
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.failed.add(getattr(func, "__name__", "a call"))
            raise


def lean(module: GraphModule, merged: bool = True) -> GraphModule:
    """The same numbers in fewer and cheaper calls: what is there twice (where it is `merged`: derivatives add up in
    another order then), or depends on no input, is computed once, and PyTorch's functions, whose arguments are read in
    C++, stand for operators. A graph that writes into its tensors stays as it is, but where these are its own, as those
    of an optimiser's step are."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int):
        node.target = torch.Tensor.size  # which vmap knows
    _fill_anew(graph)
    if any(getattr(node.target, "_schema", None) and node.target._schema.is_mutable for node in graph.nodes):
        module.recompile()
        return module
    found = CSEPass()(module) if merged else None
    module = module if found is None else found.graph_module
    graph = module.graph
    constants: dict[Node, Any] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr":
            constants[node] = functools.reduce(getattr, node.target.split("."), module)
        elif node.op == "call_function":
            if node.all_input_nodes and all(before in constants for before in node.all_input_nodes):
                values = torch.fx.map_arg((node.args, node.kwargs), constants.__getitem__)
                constants[node] = node.target(*values[0], **values[1])
            name = str(getattr(getattr(node.target, "_schema", None), "name", "")).removeprefix("aten::")
            node.target = _CHEAPER.get(name, node.target)
    for k, (node, value) in enumerate(constants.items()):
        if node.op == "call_function" and isinstance(value, Tensor):
            module.register_buffer(f"folded_{k}", value)
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.get_attr(f"folded_{k}"))
    graph.eliminate_dead_code()
    module.recompile()
    return module


def _fill_anew(graph: Graph) -> None:
    """A new tensor for each that is written in place, where nothing else shares its memory."""

    def new(node: Node) -> bool:
        schema = getattr(node.target, "_schema", None)
        return schema is not None and not schema.is_mutable and not any(r.alias_info for r in schema.returns)

    def reads(user: Node, node: Node) -> bool:
        schema = getattr(user.target, "_schema", None)
        if schema is None or node in user.kwargs.values():
            return user.op == "output"
        given = zip(schema.arguments, user.args, strict=False)
        return all(a.alias_info is None for a, v in given if v is node or (isinstance(v, Sequence) and node in v))

    for node in list(graph.nodes):
        filled = node.args[0] if node.target in _ANEW else None
        if not isinstance(filled, Node) or not new(filled):
            continue
        types = {getattr(of.meta.get("val"), "dtype", torch.int64) for of in node.all_input_nodes}
        # Of two types a new tensor might have the other's. Values that are put into a tensor have its own.
        alike = len([t for t in types if t.is_floating_point]) == 1 or node.target is torch.ops.aten.index_put_.default
        if alike and all(reads(user, filled) for user in filled.users if user is not node):
            node.target = _ANEW[node.target]
            for user in [user for user in filled.users if user > node]:
                user.replace_input_with(filled, node)


class _TooLong(Exception):
    """A function makes the more calls the more records there are."""


class _OtherNumbers(Exception):
    """A graph does not give what the function does."""


def _agreed(got: Sequence[Tensor], expected: Sequence[Tensor], within: float = 1e-3) -> Sequence[Tensor]:
    if not agree(got, expected, within):
        raise _OtherNumbers
    return got


def exactly(dtype: torch.dtype) -> float:
    """Within what a graph's numbers are those of the function, which they are to the last bit but where many are
    summed in another order."""
    return 1e-11 if dtype == torch.float64 else 1e-4


def reason(error: Exception) -> str:
    """Why tracing failed, for a log: the line of the program, and what to write instead. Of an error itself its type
    alone, since its text may hold a value."""
    instead = "write tensor operations, torch.where for `if`, and no .item(), float() or loop until a value is reached"
    if isinstance(error, _OtherNumbers):
        return (
            "its graph gives other numbers than the program does, which goes by values, by what it remembers from call "
            f"to call, or by chance; {instead}"
        )
    return f"{type(error).__name__}{in_program(error) or ' outside of the program'}; {instead}"


def in_program(error: Exception) -> str:
    """The line of a program that an error came from; empty where it came from none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _NOT_OF_A_PROGRAM.search(f.filename)]
    if not frames:
        return ""
    where = f" in line {frames[-1].lineno} of {Path(frames[-1].filename).name}"
    return where + (f", `{frames[-1].line}`" if frames[-1].line else "")


def _compile(graph: GraphModule, flat: Sequence[Tensor], axes: Sequence[int | None]) -> _Run:
    """Fuse a traced graph, the number of records symbolic and all other sizes fixed.

    The graph goes to PyTorch's compiler backend directly. `torch.compile` would analyse Python bytecode first, of
    which there is none here, and check its assumptions again in every call, at twice the cost of a small step.
    """
    # A second, for those alone who compile.
    import torch._inductor.config
    from torch._dynamo import lookup_backend
    from torch._dynamo.exc import RestartAnalysis

    _check_kept()
    for attempt in range(4):
        try:
            # The trace has been compared with the function: no need to assert sizes in every call.
            with torch.no_grad(), torch._inductor.config.patch(size_asserts=False):
                compiled: _Run = lookup_backend("inductor")(graph, _stand_ins(flat, axes))
            # It reads memory as that of the stand-ins lies, whose elements are in order, and does not look.
            return lambda *tensors: compiled(*(t.contiguous() for t in tensors))
        except RestartAnalysis:  # the backend has learned something and asks to begin again
            if attempt == 3:
                raise
    raise AssertionError("unreachable")


def _check_kept() -> None:
    """Raises InputError where others may write into a folder in which PyTorch's compiler keeps what it made. It
    unpickles what it finds there, and loads libraries, in this process, beside keys and data; by default the folder has
    a known name in `/tmp`, where any user of the machine may have made it first. That one is made where it is missing,
    and closed to others: what a silo's program computes stands in it."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    headers, by_others = default_cache_dir(), stat.S_IWGRP | stat.S_IWOTH  # it holds some, wherever the other lies
    for folder in (Path(headers), Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or headers).absolute()):
        with contextlib.suppress(OSError):
            if folder.lstat().st_mode & by_others:  # as PyTorch itself makes it under some umasks
                folder.rmdir()  # if nothing is in it
        if not os.path.lexists(folder):
            make_private(folder)
        for place, found, harmless in (
            (folder, folder.lstat(), 0),
            (folder.parent, folder.parent.stat(), stat.S_ISVTX),  # as `/tmp` is: there none renames what is another's
        ):
            others = found.st_mode & by_others and not found.st_mode & harmless
            if not stat.S_ISDIR(found.st_mode) or others or found.st_uid not in (os.geteuid(), 0):
                raise InputError(
                    f"'{place}', where PyTorch's compiler keeps what it made and runs what it finds, is no folder of "
                    "this user's that nobody else may write to; remove it, or set TMPDIR to a folder of one's own"
                )
    make_private(Path(headers))


def _stand_ins(flat: Sequence[Tensor], axes: Sequence[int | None]) -> list[Tensor]:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    fake = FakeTensorMode(shape_env=ShapeEnv())
    stand_ins: list[Tensor] = []
    for tensor, axis in zip(flat, axes, strict=True):
        shape = list(tensor.shape)
        kinds = [DimDynamic.STATIC] * len(shape)
        if axis is not None:
            shape[axis], kinds[axis] = _PRIMES[0], DimDynamic.DYNAMIC
        real = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
        stand_ins.append(fake.from_tensor(real, symbolic_context=context, source=ConstantSource(f"x{len(stand_ins)}")))
    return stand_ins


def _state_dtypes(graph: Graph) -> None:
    """What makes tensors by the default dtype, that of the fit while a program runs, says which: a graph runs under the
    process' own."""
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        named = {} if schema is None else {a.name: str(a.type) for a in schema.arguments}
        if "dtype" in named and "Tensor" not in named.values() and "dtype" not in node.kwargs:
            node.kwargs = {**node.kwargs, "dtype": node.meta["val"].dtype}


def _free_record_count(graph: Graph, records: int, position: int, axis: int) -> None:
    """Turn the number of records into a symbol where Python fixed it: `len(x)` is an int, even of a traced tensor.

    `records` is a prime that no other size has, so every multiple of it in the graph stands for a multiple of the
    number of records. The caller compares the graph with the function itself.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(inputs[-1]):
        count = graph.call_function(torch.ops.aten.sym_size.int, (inputs[position], axis))
    multiples: dict[int, Node] = {1: count}

    def free(value: Any) -> Any:
        if type(value) is int and value >= records and value % records == 0:
            factor = value // records
            if factor not in multiples:
                with graph.inserting_after(count):
                    multiples[factor] = graph.call_function(operator.mul, (count, factor))
            return multiples[factor]
        if isinstance(value, (list, tuple)):
            return type(value)(free(v) for v in value)
        return value

    for node in list(graph.nodes):
        if node.op == "call_function" and node is not count and node not in multiples.values():
            node.args = tuple(free(a) for a in node.args)
            node.kwargs = {k: free(v) for k, v in node.kwargs.items()}


def agree(got: Sequence[Tensor], expected: Sequence[Tensor], within: float = 1e-3) -> bool:
    """Whether two ways of computing the same differ by rounding at most."""

    def same(g: Tensor, e: Tensor) -> bool:
        finite = e[torch.isfinite(e)]
        scale = float(finite.abs().max()) if finite.numel() else 0.0
        return g.shape == e.shape and torch.allclose(g, e, rtol=within, atol=0.01 * within * scale, equal_nan=True)

    return len(got) == len(expected) and all(map(same, got, expected))


def flatten(value: Any) -> list[Tensor]:
    """The tensors of nested dicts, tuples and lists, in one order."""
    out: list[Tensor] = []
    _flatten(value, out)
    return out


def _flatten(value: Any, out: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        out.append(value)
    elif isinstance(value, dict):
        for key in sorted(value):
            _flatten(value[key], out)
    else:
        for item in value:
            _flatten(item, out)


def _of_each(value: Any, axes: Axes) -> list[int | None]:
    """The axis of each tensor of `flatten`."""
    if isinstance(axes, tuple):
        return [axis for field, own in zip(value, axes, strict=True) for axis in _of_each(field, own)]
    return [axes] * len(flatten(value))


def structure(value: Any) -> Callable[[Iterator[Tensor]], Any]:
    """A function that builds the same nesting from the tensors of `flatten`."""
    if isinstance(value, Tensor):
        return next
    if isinstance(value, dict):
        parts = [(key, structure(value[key])) for key in sorted(value)]
        return lambda supply: {key: build(supply) for key, build in parts}
    builders = [structure(item) for item in value]
    if hasattr(value, "_fields"):
        make = type(value)
        return lambda supply: make(*(build(supply) for build in builders))
    return lambda supply: tuple(build(supply) for build in builders)


#: Numbers a call works on, below which a second thread costs more in waiting than it saves.
_ONE_THREAD_BELOW = 2_000_000


def choose_threads(numbers: int) -> int:
    """One thread for small work, PyTorch's own choice for large.

    Threads of a small kernel mostly wait for each other: ten times slower on a machine that does other work as
    well. Sums depend on the number in their last bits, so a run that is resumed must keep it.
    """
    return 1 if numbers < _ONE_THREAD_BELOW else torch.get_num_threads()


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """PyTorch uses so many threads within an operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


#: How many blocks `by_itself` is around now, and what PyTorch was told before, for all threads of a process.
_around, _before, _settings = [0], list[bool](), threading.Lock()


@contextlib.contextmanager
def by_itself() -> Iterator[None]:
    """What each record, or each part of them, gives by itself. In one thread: several would cut a block into parts at
    places of their own. Memory that nobody has written (`torch.empty`) holds NaN, or the largest whole number, where it
    would show what was worked out of other records: so PyTorch has it with deterministic algorithms."""
    with threads(1):
        with _settings:
            _around[0] += 1
            if _around[0] == 1:
                _before[:] = (
                    torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only(),
                    torch._C._get_deterministic_fill_uninitialized_memory(),
                )  # fmt: skip
                _set(True, not _before[0] or _before[1], True)
        try:
            yield
        finally:
            with _settings:
                _around[0] -= 1
                if _around[0] == 0:
                    _set(*_before)


def _set(deterministic: bool, warn_only: bool, filled: bool) -> None:
    """`torch.use_deterministic_algorithms` but for its import of a compiler, which takes a second."""
    torch._C._set_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch._C._set_deterministic_fill_uninitialized_memory(filled)


def over_draws(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn` of each draw along the first axis of all tensors in `args`, a tensor or a tuple or dict of them, mapped; one
    by one for a program that PyTorch cannot map. Raises its error within a trace, which would hold each draw anew."""
    try:
        return torch.func.vmap(fn)(*args)
    except RuntimeError:
        if get_proxy_mode() is not None:
            raise
        flat, build = flatten(args), structure(args)
        return _stacked([fn(*build(iter([t[k] for t in flat]))) for k in range(len(flat[0]))])


def _stacked(found: list[Any]) -> Any:
    if isinstance(found[0], dict):
        return {name: _stacked([one[name] for one in found]) for name in found[0]}
    if isinstance(found[0], tuple):
        return tuple(_stacked(list(parts)) for parts in zip(*found, strict=True))
    return torch.stack(found)


def waiting(fn: Traced) -> Callable[..., Any] | None:
    """Within a silo's work of `engines.local.run_together`: a function that waits until all call `fn`. Else None."""
    wait = getattr(getcurrent(), "wait_for", None)
    return None if wait is None else functools.partial(wait, fn)
