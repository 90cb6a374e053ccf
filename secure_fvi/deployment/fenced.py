"""What the process in the fence (`fence.py`) runs: it forbids itself what it may not do, and traces a model's code to a
graph (`secure_fvi.exported`), or reads what another has traced. Never imported by a process that holds keys or data.

Limits of memory, files and time and a seccomp filter stand beside bubblewrap's namespaces. Python's audit hook only
keeps a list for the error message: code can get round it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
import os
import resource
import struct
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import torch
from pyro.distributions import Unit
from safetensors.torch import save
from torch import Tensor
from torch.distributions import biject_to, transform_to
from torch.fx import GraphModule, Node

from secure_fvi.algorithms.base import Problem
from secure_fvi.compiled import Calls, agree, flatten, trace_graph
from secure_fvi.density import LogTerms, Params, param_constraint, running
from secure_fvi.deployment.fence import CPU_SECONDS, MODEL, MOST_THREADS, call_filter, roles_of
from secure_fvi.deployment.session_messages import unpack_schema
from secure_fvi.discovery import Discovery, _discover, as_model, kind_of, read_layout, start_of
from secure_fvi.errors import InputError, SecureFVIWarning, one_line
from secure_fvi.exported import (
    SIZES,
    VERSION,
    GraphDensity,
    Program,
    constrained_names,
    operation,
    read_program,
    theta_names,
)
from secure_fvi.federated_model import FederatedModel, Schema
from secure_fvi.program_contract import check_program
from secure_fvi.program_density import ProgramDensity, bad_records, choice, has_no_density, outside, record_dim
from secure_fvi.program_sites import described, watched
from secure_fvi.runs.records import python_function

#: Memory as it was found would show what this process had there: a graph has zeros instead.
_WRITTEN_AS = {
    "aten.empty.memory_format": "aten.zeros.default",
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
}


def serve() -> None:
    """Answer the one request on the standard input, and end. Only `_python` starts this."""
    out, first, rest = _request()
    asked, schema = json.loads(first), unpack_schema(rest)
    _limit(asked["memory"], CPU_SECONDS, asked["threads"])
    tried: list[str] = []
    _listen(tried)
    forbid()
    try:
        path = Path(MODEL, "main", "model.py")
        fn = python_function(path, asked["function"], "model.function")
        model = FederatedModel(fn, start=asked["start"], **roles_of(asked["record_plate"], asked["silo_sites"]))
        answer = b"P" + export(model, schema, torch.float64 if asked["dtype"] == "float64" else torch.float32)
    except Exception as error:  # whatever an author's code raises
        words = str(error) if isinstance(error, InputError) else f"the model fails: {type(error).__name__}: {error}"
        if tried:
            words += f" (in the sandbox it tried {', '.join(tried[:3])}, and has only the files that its hash names)"
        answer = b"E" + words.encode(errors="replace")
    _respond(out, answer)


def serve_check(memory: int, seconds: int) -> None:
    """Read and run what was traced, on made data, and say whether it is a program. Only `_python` starts this."""
    out, schema, content = _request()
    _limit(memory, seconds)
    forbid()
    try:
        read_program(content, unpack_schema(schema))
        answer = b"P"
    except InputError as error:
        answer = b"E" + str(error).encode(errors="replace")
    _respond(out, answer)


def _request() -> tuple[BinaryIO, bytes, bytes]:
    """Where the answer goes, and the two parts of what was asked."""
    # What the first graph loads: before the limits, of which it would take a part, and before what is opened is noted.
    import torch._inductor.config

    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a program prints is no answer
    torch.set_num_threads(1)
    request = sys.stdin.buffer.read()
    length = int.from_bytes(request[:8], "big")
    return out, request[8 : 8 + length], request[8 + length :]


def _respond(out: BinaryIO, answer: bytes) -> NoReturn:
    out.write(answer)
    out.flush()
    os._exit(0)


def _limit(memory: int, seconds: int, threads: int = MOST_THREADS) -> None:
    """Of address space, since a limit of data counts neither shared memory nor pages that are made read-only. What it
    does not count, memory that a file or a segment holds and no process has mapped, `_FORBIDDEN` and `_command` bar.

    Linux counts threads from 5.14 on for the sandbox alone, before that for all that its user runs; root's, never.
    """
    major, minor = (int(part) for part in os.uname().release.split(".")[:2])
    counted = (major, minor) >= (5, 14)
    for what, most in (
        *([(resource.RLIMIT_NPROC, threads)] if counted else []),
        (resource.RLIMIT_AS, _mapped() + memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 1 << 28),
        (resource.RLIMIT_NOFILE, 1024),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def _mapped() -> int:
    """Bytes of address space of this process, to a MiB above: the least limit under which it may map another page.
    There is no `/proc` here to say it."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    low, high = 0, 1 << 47 if hard == resource.RLIM_INFINITY else hard
    while high - low > 1 << 20:
        middle = (low + high) // 2
        resource.setrlimit(resource.RLIMIT_AS, (middle, hard))
        try:
            mmap.mmap(-1, mmap.PAGESIZE).close()
            high = middle
        except (OSError, MemoryError):
            low = middle
    return high


def _listen(tried: list[str]) -> None:
    """Note what a program asks for that the fence does not have, for the message. A note, no protection."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        with contextlib.suppress(Exception):
            if event == "open" and _missing(args[0]):
                tried.append(f"to open '{args[0]}'")
            elif event in ("socket.connect", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
                tried.append(event)

    sys.addaudithook(hook)


def _missing(path: Any) -> bool:
    return isinstance(path, str) and "__pycache__" not in path and not Path(path).exists()


def forbid() -> None:
    """From now on this process, all of its threads, starts no process and opens no socket."""
    program, seccomp = call_filter()
    if not program:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    kept = ctypes.create_string_buffer(program, len(program))
    pointed = struct.pack("@HP", len(program) // 8, ctypes.addressof(kept))
    held = ctypes.create_string_buffer(pointed, len(pointed))
    if libc.prctl(38, 1, 0, 0, 0) or libc.syscall(
        ctypes.c_long(seccomp), ctypes.c_long(1), ctypes.c_long(1), ctypes.c_void_p(ctypes.addressof(held))
    ):  # no new privileges; filter
        raise InputError(f"the sandbox takes no system call filter ({os.strerror(ctypes.get_errno())})")


# ---- from a program to a graph: the author's code runs here ----


class _Recentre(Discovery):
    """A discovery that can be traced: how each site's centre is found is decided beforehand, on made data.

    It also says which rows lie in the support of what is observed, (N,) a site.
    """

    def __init__(self, model: FederatedModel, rows: Params, dtype: torch.dtype, known: _Centres | None = None) -> None:
        some = next(iter(rows.values()))
        super().__init__(model, some.shape[0], dtype, some.device)
        self.known = known  # None: find out
        self.found = _Centres(self.how, {}, {})
        self.inside: Params = {}

    def _pyro_param(self, msg: Any) -> None:
        if self.known is None:
            super()._pyro_param(msg)
            return
        self.theta[msg["name"]] = value = self.known.theta[msg["name"]]
        msg["value"] = transform_to(param_constraint(msg))(value)

    def _pyro_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        if self.known is None:
            super()._pyro_sample(msg)
        elif not has_no_density(msg) and not msg["is_observed"]:
            if fn.has_enumerate_support:
                msg["value"], msg["done"] = choice(fn, 0), True
                return
            value = self._value(name, fn).to(self.dtype)
            self.values[name] = biject_to(fn.support).inv(value)
            msg["value"], msg["done"] = value, True
        dim = record_dim(msg, self.model.record_plate)
        if not has_no_density(msg) and msg["is_observed"] and not isinstance(fn, Unit) and dim:
            if (bad := outside(msg)) is not None:
                self.inside[name] = ~bad_records(msg, bad, dim)
                self.found.words[name] = f"{kind_of(fn)} takes {described(fn.support)}"
        elif self.known is None and self.how.get(name) == "draws":
            if dim:
                raise _untraceable(f"record site '{name}' has a prior without mean and quantiles; give its start")
            self.found.fixed[name] = msg["value"]

    def _value(self, name: str, fn: Any) -> Tensor:
        assert self.known is not None
        how = self.known.how[name]
        if how == "given":
            given = self.model.start[name]
            return torch.as_tensor(given, dtype=torch.float64).detach().expand(fn.shape()).clone()
        if how == "draws":
            return self.known.fixed[name].expand(fn.shape())
        if how == "nowhere":
            transform = biject_to(fn.support)
            middle: Tensor = transform(torch.zeros(transform.inverse_shape(fn.shape()), dtype=self.dtype))
            return middle
        found: Tensor = fn.mean if how == "mean" else fn.icdf(torch.full(fn.shape(), 0.5))
        return found.detach().expand(fn.shape()).clone()


class _Centres(NamedTuple):
    """What a discovery on made data found. how: each site's centre is found; fixed: those that a graph cannot make."""

    how: dict[str, str]
    fixed: Params
    words: dict[str, str]  # of each observed site: what it takes
    theta: Params = {}  # noqa: RUF012


def export(model: FederatedModel, schema: Schema, dtype: torch.dtype) -> bytes:
    """Run the program on made data, trace it, and write down what `read_program` reads.

    Raises InputError for what cannot be federated, and for a program that cannot be traced: one that looks at values
    to decide what to compute, draws random numbers itself or uses an operation that is not in the list.
    """
    if model.encoder is not None:
        raise InputError("a program with an encoder cannot be exported")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with watched(model):
            model = as_model(model, schema, dtype)
            layout, start = read_layout(model, schema, dtype)
            density = ProgramDensity(model, layout, schema)
            cpu = start.z_global.device
            check_program(Problem(model, schema, layout, density, start, ("silo",), 0, dtype, cpu, "eager"))
    names = [name for name, _, _ in schema.fields]

    def evaluate(*flat: Tensor) -> list[Tensor]:
        z_global, z_silo, z_record = flat[:3]
        theta = dict(zip(theta_names(layout), flat[3:], strict=False))
        rows = dict(zip(sorted(names), flat[3 + len(theta) :], strict=True))
        run = density._run(z_global, z_silo, z_record, theta, rows)
        zero = z_global.new_zeros(())
        terms = LogTerms(
            sum(run.terms["global"], zero),
            sum(run.terms["silo"], zero),
            sum(run.terms["record"], zero.expand(z_record.shape[-2])),
        )
        return [*terms, *(run.constrained[n] for n in constrained_names(layout))]

    def recentre(*flat: Tensor) -> list[Tensor]:
        rows = dict(zip(sorted(names), flat, strict=True))
        again = _Recentre(model, rows, dtype, known)
        again.sites = list(layout.sites)
        with running(dtype, flat[0].device), torch.no_grad(), again as run:
            model.fn(**rows, **schema.constants)
        found = [run.flat("global"), run.flat("silo"), run.flat("record")]
        return [*found, *(run.inside[n] for n in sorted(known.words))]

    rows = schema.dummy_rows(2)
    with running(dtype, start.z_global.device), torch.no_grad(), _Recentre(model, rows, dtype) as run:
        model.fn(**rows, **schema.constants)
    known = run.found._replace(theta=start.theta)
    shapes = [(layout.size("global"),), (layout.size("silo"),)]
    rng = torch.Generator().manual_seed(0)

    def inputs(records: int) -> list[Tensor]:
        z = [torch.randn(s, generator=rng, dtype=dtype) * 0.3 for s in [*shapes, (records, layout.size("record"))]]
        theta = [start.theta[n] + 0.1 * torch.randn(start.theta[n].shape, generator=rng, dtype=dtype)
                 for n in theta_names(layout)]  # fmt: skip
        return [*z, *theta, *_made(schema, records, rng)]

    fixed_axes: list[int | None] = [None, None, 0, *[None] * len(layout.theta), *[0] * len(names)]
    constants: Params = {}
    structure_of = {
        "version": VERSION,
        "sites": [[*site[:2], list(site.shape), *site[3:]] for site in layout.sites],
        "theta": [[name, list(shape)] for name, shape in layout.theta],
        "dtype": str(dtype),
        "observed": [[name, known.words[name]] for name in sorted(known.words)],
        "warnings": [str(w.message) for w in said if issubclass(w.category, SecureFVIWarning)],
        "evaluate": _written("evaluate", evaluate, inputs(3), fixed_axes, constants),
        "recentre": _written("recentre", recentre, _made(schema, 3, rng), [0] * len(names), constants),
    }
    kept = {f"start/{i}": t for i, t in enumerate([*start[:3], *(start.theta[n] for n in theta_names(layout))])}
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in (constants | kept).items()}
    content = _framed(structure_of, tensors)
    _compare(read_program(content, schema), evaluate, inputs, model, schema, dtype)
    return content


def _made(schema: Schema, records: int, rng: torch.Generator) -> list[Tensor]:
    """Made rows that differ, floats between 0.5 and 1.5 and whole numbers 0, by sorted name."""
    rows = schema.dummy_rows(records)
    for name, value in rows.items():
        if value.is_floating_point():
            rows[name] = value * (0.5 + torch.rand(value.shape, generator=rng, dtype=value.dtype))
    return [rows[name] for name in sorted(rows)]


def _untraceable(why: str) -> InputError:
    return InputError(f"the model cannot be traced: {why}")


def _written(
    what: str, fn: Callable[..., list[Tensor]], flat: list[Tensor], axes: list[int | None], constants: Params
) -> dict[str, Any]:
    """The graph of `fn` as lists and numbers; tensors that it holds go to `constants`."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    functional = torch.func.functionalize(fn)
    why = ""
    with Calls() as calls:
        fn(*flat)
    for attempt in (fn, functional):  # where the program writes into its own tensors, the second has no such writes
        try:
            return _encode(what, trace_graph(attempt, flat, axes, made=calls.made), constants)
        except InputError as error:
            why = str(error)
        except GuardOnDataDependentSymNode:
            why = "values decide on what it computes (.item(), `if` on a latent or on data); use torch.where"
        except Exception as error:  # whatever a program does that a tracer cannot follow
            why = f"{type(error).__name__}: {one_line(error)}"
    raise _untraceable(why)


def _encode(what: str, module: GraphModule, constants: Params) -> dict[str, Any]:
    at: dict[Node, int] = {}
    held: dict[Node, str] = {}
    nodes: list[list[Any]] = []
    outputs: list[Any] = []
    inputs = 0

    def value(arg: Any) -> Any:
        if isinstance(arg, Node):
            return {"const": held[arg]} if arg in held else {"at": at[arg]}
        if isinstance(arg, (list, tuple)):
            return [value(a) for a in arg]
        if isinstance(arg, torch.dtype):
            return {"dtype": str(arg)}
        if isinstance(arg, torch.memory_format):
            return {"memory": str(arg)}
        if isinstance(arg, float) and not math.isfinite(arg):
            return {"float": str(arg)}
        if arg is None or type(arg) in (bool, int, float, str):
            return arg
        raise InputError(f"an argument of type {type(arg).__name__}")

    for node in module.graph.nodes:
        if node.op == "placeholder":
            at[node] = inputs
            inputs += 1
        elif node.op == "get_attr":
            held[node] = f"{what}/{node.target}"
            constants[held[node]] = getattr(module, node.target)
        elif node.op == "output":
            outputs = [value(a) for a in node.args[0]]
        else:
            name = _name(node.target)
            name, without = _WRITTEN_AS.get(name, name), "memory_format" if name in _WRITTEN_AS else ""
            operation(name)
            left_out = ("device", "layout", "pin_memory", without)
            kwargs = {k: value(v) for k, v in node.kwargs.items() if k not in left_out}
            at[node] = inputs + len(nodes)
            nodes.append([name, value(list(node.args)), kwargs])
    # An output that is a constant needs a node of its own.
    for i, found in enumerate(outputs):
        if "const" in found:
            nodes.append(["aten.lift_fresh_copy.default", [found], {}])
            outputs[i] = {"at": inputs + len(nodes) - 1}
    return {"inputs": inputs, "nodes": nodes, "outputs": [found["at"] for found in outputs]}


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return next((f"size.{name}" for name, fn in SIZES.items() if fn is target), f"the function {target}"[:100])


def _compare(
    program: Program, fn: Callable[..., list[Tensor]], inputs: Callable[[int], list[Tensor]], model: FederatedModel,
    schema: Schema, dtype: torch.dtype,
) -> None:  # fmt: skip
    """Raises InputError where the graph and the program differ in value, gradient or start, at 1, 2 and 5 records."""

    def total(values: Sequence[Tensor]) -> Tensor:
        return values[0] + values[1] + (values[2] * torch.linspace(0.5, 1.5, len(values[2]), dtype=dtype)).sum()

    cpu = torch.device("cpu")
    for records in (1, 2, 5):
        flat = inputs(records)
        leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in flat]
        wanted = [t for t in leaves if t.requires_grad]
        with running(dtype, cpu):
            try:
                found = program.evaluate(leaves, cpu)
                expected = fn(*leaves)
            except Exception as error:
                raise _untraceable(f"with {records} records: {type(error).__name__}") from None
            pairs = [(found, expected)]
            if total(expected).requires_grad and total(found).requires_grad:
                grads = [torch.autograd.grad(total(v), wanted, allow_unused=True) for v in (found, expected)]
                pairs.append(([_zero(g) for g in grads[0]], [_zero(g) for g in grads[1]]))
        for got, want in pairs:
            if not agree([g.detach() for g in got], [w.detach() for w in want]):
                raise _untraceable(f"its graph computes something else for {records} records")
    rows = dict(zip(sorted(f[0] for f in schema.fields), inputs(4)[-len(schema.fields) :], strict=True))
    here, _ = GraphDensity(program, model, schema).centre(rows, "made data")
    there = start_of(_discover(model, rows, schema.constants, dtype))
    if not agree(here, list(there[:3])) or not agree(flatten(program.start.theta), flatten(there.theta)):
        raise _untraceable("its start depends on values of the data")


def _zero(gradient: Tensor | None) -> Tensor:
    return torch.zeros(()) if gradient is None else gradient


def _framed(table: Any, tensors: Params) -> bytes:
    text = json.dumps(table, allow_nan=False).encode()
    return len(text).to_bytes(8, "big") + text + save(tensors)
