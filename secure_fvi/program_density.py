"""The log density of a program in Python, by running it under Pyro: one effect handler an evaluation.

`secure_fvi.compiled` then removes Pyro from the loop by tracing. Where a program runs in a sandbox alone, and its graph
here, nothing of this is loaded.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from pyro.distributions import Delta, MaskedDistribution, Unit
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.distributions import Categorical, biject_to, transform_to
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from secure_fvi import compiled
from secure_fvi.density import Layout, LogDensity, LogTerms, Params, Role, Start, param_constraint, running
from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel, Schema
from secure_fvi.later import Later

if TYPE_CHECKING:
    from secure_fvi import data_contract, program_sites
else:  # which make one of these
    data_contract, program_sites = Later("secure_fvi.data_contract"), Later("secure_fvi.program_sites")

_LOG_2_PI = math.log(2 * math.pi)
_log = logging.getLogger(__name__)
#: Among a run's own terms that of all record sites together, where discrete ones are summed out; no site's name.
ALL_RECORDS = ""


class _AllIsThere(BaseException):
    """A run may end: no program takes it for an error of its own."""


class Evaluation(Messenger):  # type: ignore[misc]
    """Puts given unconstrained values into the latent sites and adds up the log densities by role.

    A latent that a mask takes out of log p is a standard normal of its own instead: q then has something to follow,
    and at the optimum the two cancel. `program_contract.py` refuses programs in which anything else depends on its
    value.
    """

    def __init__(
        self,
        model: FederatedModel,
        latents: Mapping[str, Tensor],
        theta: Mapping[str, Tensor],
        densities: bool = True,
        chosen: Mapping[str, int] | None = None,
    ) -> None:
        """densities: False for values alone, which more programs can be mapped over. chosen: which of its values each
        discrete site takes, in all records."""
        super().__init__()
        self.densities, self.chosen = densities, chosen or {}
        self.model, self.latents, self.theta = model, latents, theta
        self.constrained: Params = {}  # record sites with the record first
        self.terms: dict[Role, list[Tensor]] = {"global": [], "silo": [], "record": []}
        self.own: Params = {}  # each site's own term, summed; of records with discrete sites `ALL_RECORDS` alone
        self.in_records: set[str] = set()
        self.factors: set[str] = set()  # sites of pyro.factor
        self.values: Params = {}  # of discrete sites, the record first
        self.masks: Params = {}  # of latent sites that have one: where they count, in the shape of their term

    def _pyro_param(self, msg: Any) -> None:
        name = msg["name"]
        value = transform_to(param_constraint(msg))(self.theta[name])
        msg["value"] = self.constrained[name] = value

    def _postprocess_message(self, msg: Any) -> None:
        """Of values alone: what is left of the program, such as an integral over records' latents, gives none."""
        if not self.densities and len(self.constrained) == len(self.latents) + len(self.theta):
            raise _AllIsThere

    def _pyro_sample(self, msg: Any) -> None:
        fn, name = msg["fn"], msg["name"]
        if has_no_density(msg):
            return
        plate_dim = record_dim(msg, self.model.record_plate)
        if not self.densities and msg["is_observed"]:
            return
        if msg["is_observed"]:
            term = scale_and_mask(fn.log_prob(observed_value(msg)), msg["scale"], msg["mask"])
        elif name in self.chosen:
            msg["value"], msg["done"] = choice(fn, self.chosen[name]), True
            if not self.densities:
                return
            term = fn.log_prob(msg["value"])
            self.values[name] = msg["value"].movedim(plate_dim - fn.event_dim, 0)
        else:
            if name not in self.latents:
                raise InputError(
                    f"site '{name}' is there or not, as values of other latents will have it; a model has the same "
                    "sites always. Give them all, and choose between their values with torch.where"
                )
            transform, unconstrained = biject_to(fn.support), self.latents[name]
            value = transform(unconstrained)
            msg["value"], msg["done"] = value, True
            self.constrained[name] = value.movedim(plate_dim - fn.event_dim, 0) if plate_dim else value
            if not self.densities:
                return
            term = scale_and_mask(fn.log_prob(value), msg["scale"], msg["mask"])
            term = term + transform.log_abs_det_jacobian(unconstrained, value)
            mask = site_mask(msg)
            if mask is not None:
                alone = (-0.5 * (unconstrained.square() + _LOG_2_PI)).reshape((*fn.batch_shape, -1)).sum(-1)
                self.masks[name] = mask.to(term.device).expand(term.shape)
                term = torch.where(self.masks[name], term, alone)
        self.own[name] = term.sum()
        if isinstance(fn, Unit):
            self.factors.add(name)
        if plate_dim:
            self.in_records.add(name)
            self.terms["record"].append(term.movedim(plate_dim, 0).reshape(term.shape[plate_dim], -1).sum(1))
        else:
            self.terms["silo" if name in self.model.silo_sites else "global"].append(term.sum())


def has_no_density(msg: Any) -> bool:
    """Whether a sample statement is a plate, a `pyro.deterministic` or what `poutine.reparam` puts in a latent site's
    place (a masked Delta, whose value follows from another site), which add nothing to log p."""
    fn = msg["fn"]
    follows = isinstance(fn, MaskedDistribution) and fn._mask is False and isinstance(fn.base_dist, Delta)
    return isinstance(fn, _Subsample) or follows or bool((msg["infer"] or {}).get("_deterministic"))


def choice(fn: Any, k: int) -> Tensor:
    """The k-th value of a discrete distribution, in its shape."""
    value: Tensor = fn.enumerate_support(expand=False)[k].expand(fn.batch_shape + fn.event_shape)
    return value


def site_mask(msg: Any) -> Tensor | None:
    """Where a site counts, by `poutine.mask` and `.mask()` together, in its batch shape; None: everywhere."""
    found = [msg["mask"]]
    if isinstance(msg["fn"], MaskedDistribution):
        found.append(msg["fn"]._mask)
    masks = [torch.as_tensor(m) for m in found if m is not None and m is not True]
    return masks[0].logical_and(masks[-1]) if masks else None


def outside(msg: Any) -> Tensor | None:
    """Where a site's value is out of the support of its distribution, in its batch shape and parts of an event; None
    where that has none."""
    fn, value = msg["fn"], msg["value"]
    try:
        inside: Tensor = fn.support.check(value)
        if "multinomial" in str(fn.support).lower():
            inside = inside & (value % 1 == 0).all(-1)
    except Exception:  # a distribution of the user's own
        return None
    return ~inside


def bad_records(msg: Any, bad: Tensor, dim: int) -> Tensor:
    """(N,) which records of the plate at `dim` have anything bad at a site, in what is not masked. bad: in its batch
    shape, and parts of an event."""
    fn, mask = msg["fn"], site_mask(msg)
    extra = max(0, bad.dim() - len(fn.batch_shape))
    batch = bad.reshape((*bad.shape[: bad.dim() - extra], -1)).any(-1) if extra else bad
    batch = batch.expand(torch.broadcast_shapes(batch.shape, fn.batch_shape))
    if mask is not None:
        batch = batch & mask.to(batch.device)
    return batch.movedim(dim, 0).reshape(batch.shape[dim], -1).any(1)


def observed_value(msg: Any) -> Tensor:
    """What is observed at a site, as its density takes it: whole numbers and truth values as floating point ones,
    except where they are labels, and a value inside the support where a mask says that there is none: a code such as -9
    has no density, and its gradient would not be a number."""
    fn, value, mask = msg["fn"], msg["value"], site_mask(msg)
    inner = fn
    while hasattr(inner, "base_dist"):
        inner = inner.base_dist
    shipped = type(inner).__module__.startswith(("torch.distributions", "pyro.distributions"))
    if shipped and not value.is_floating_point() and not isinstance(inner, Categorical):
        value = value.to(torch.get_default_dtype())
    if mask is None or not shipped or mask.dim() == 0:
        return value
    if inner.support.is_discrete:
        inside: Tensor = torch.zeros_like(value)
    else:
        transform = biject_to(fn.support)
        inside = transform(value.new_zeros(transform.inverse_shape(value.shape)))
    return torch.where(mask.reshape(mask.shape + (1,) * fn.event_dim), value, inside)


def record_dim(msg: Any, record_plate: str) -> int:
    """The batch dimension (negative) of the record plate around a site, 0 when it is outside."""
    return next((frame.dim for frame in msg["cond_indep_stack"] if frame.name == record_plate), 0)


class _Graph:
    """A program's `evaluate` as tensor operations, for any number of records from two on: it gives the same numbers to
    the last bit, mapped over draws or not, and derivatives up to rounding."""

    def __init__(
        self, fn: Callable[..., LogTerms], z_global: Tensor, z_silo: Tensor, z_record: Tensor, theta: Params,
        rows: Params,
    ) -> None:  # fmt: skip
        """Raises whatever a tracer cannot follow."""
        self._theta, self._rows, self._like = sorted(theta), sorted(rows), z_global
        flat = self._flat(z_global, z_silo, z_record, theta, rows)

        def on_flat(*flat: Tensor) -> list[Tensor]:
            named, columns = flat[3 : 3 + len(theta)], flat[3 + len(theta) :]
            columns_by_name = dict(zip(self._rows, columns, strict=True))
            return list(fn(*flat[:3], dict(zip(self._theta, named, strict=True)), columns_by_name))

        axes = [None, None, 0, *[None] * len(theta), *[0] * len(rows)]
        with compiled.Calls() as calls:
            on_flat(*flat)
        graph = compiled.trace_graph(on_flat, flat, axes, False, calls.made)
        self._run = _to_map(compiled.lean(graph, False)).forward

    def __call__(self, *args: Any) -> LogTerms:
        return LogTerms(*self._run(*self._flat(*args)))

    def takes(self, z_global: Tensor, z_silo: Tensor, z_record: Tensor, theta: Params, rows: Params) -> bool:
        """Whether it was traced for such."""
        alike = z_global.dtype == self._like.dtype and z_global.device == self._like.device
        return alike and rows.keys() == set(self._rows) and len(rows[self._rows[0]]) > 1

    def equals(self, fn: Callable[..., LogTerms], *args: Any, also_slopes: bool) -> bool:
        """Whether `fn` gives the same, and has the same slope and curvature (not so where a program's own gradients are
        others than its operations', or are kept from PyTorch), here and at a place near by."""
        for away in (0.0, 0.3):
            at = [z + away * torch.linspace(-1, 1, z.numel()).to(z).reshape(z.shape) for z in args[:3]]
            theta, rows = args[3:]
            of = _slopes if also_slopes else _terms
            pairs = zip(of(self, at, theta, rows), of(fn, at, theta, rows), strict=True)
            if not all(torch.allclose(found, own, rtol=0, atol=0, equal_nan=True) for found, own in pairs):
                return False
        return True

    def _flat(self, z_global: Tensor, z_silo: Tensor, z_record: Tensor, theta: Params, rows: Params) -> list[Tensor]:
        columns = [rows[name] for name in self._rows]
        # One row of latents may stand for all.
        return [z_global, z_silo, z_record.expand(len(columns[0]), -1), *(theta[n] for n in self._theta), *columns]


def _terms(fn: Callable[..., LogTerms], z: Sequence[Tensor], theta: Params, rows: Params) -> list[Tensor]:
    with torch.no_grad():
        return list(fn(*z, theta, rows))


def _slopes(fn: Callable[..., LogTerms], z: Sequence[Tensor], theta: Params, rows: Params) -> list[Tensor]:
    """The terms, the gradient of all of them, records weighed each by its own, and its product with the Hessian."""
    with torch.enable_grad():
        at, named = [v.detach().requires_grad_() for v in z], {n: v.detach().requires_grad_() for n, v in theta.items()}
        terms, wanted = fn(*at, named, rows), [*at, *named.values()]
        each = torch.linspace(0.5, 1.5, len(terms.records)).to(terms.records)
        total = terms.shared + terms.silo + (each * terms.records).sum()
        first = torch.autograd.grad(total, wanted, create_graph=True, allow_unused=True)
        along = [g for g in first if g is not None and g.requires_grad]
        bent = sum(((g * torch.linspace(0.5, 1.5, g.numel()).to(g).reshape(g.shape)).sum() for g in along), total * 0)
        second = torch.autograd.grad(bent, wanted, allow_unused=True)
    found = zip([*first, *second], wanted * 2, strict=True)
    slopes = [torch.zeros_like(v) if g is None else g.detach() for g, v in found]
    return [*(t.detach() for t in terms), *slopes]


class _InPyTorch(TorchFunctionMode):
    """Refuses what reads the memory of a tensor, which one that is never written has not: PyTorch does not look."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.data_ptr):
            raise RuntimeError("Can't call numpy() on a tensor of a program that writes into its tensors")
        return func(*args, **(kwargs or {}))


class ProgramDensity(LogDensity):
    """`LogDensity` that runs the program, or, where it is evaluated often, a graph that was traced of it: by handlers
    an evaluation takes some milliseconds, mapped over draws and differentiated several times as many."""

    def __init__(self, model: FederatedModel, layout: Layout, schema: Schema) -> None:
        super().__init__(model, layout, schema)
        self._evaluations, self._seen = 0, set[int]()
        self._graph: _Graph | None = None
        self._writes: bool | None = None  # not known before the first run

    def __getstate__(self) -> dict[str, Any]:
        """For `pickle` and copies: without the graph, which is traced anew. PyTorch writes code for its own functions
        that Python does not read (`from torch._C import TensorBase.expand`)."""
        return {**vars(self), "_graph": None, "_evaluations": 0, "_seen": set()}

    def evaluate(self, z_global: Tensor, z_silo: Tensor, z_record: Tensor, theta: Params, rows: Params) -> LogTerms:
        args = z_global, z_silo, z_record, theta, rows
        if self._graph is not None and self._graph.takes(*args):
            return self._graph(*args)
        self._evaluations += 1
        return super().evaluate(*args)

    def often(self, start: Start, theta: Params, rows: Params) -> None:
        """Traces the program once it has been evaluated so often that a trace pays, and compares: to the last bit, as a
        run that is resumed has to go on, for each number of records, and for the first slope and curvature too. Where
        these differ it runs as it is."""
        size = len(next(iter(rows.values())))
        if self.model.own_slopes or self._evaluations <= compiled.TRACE_AFTER_CALLS or size in self._seen:
            return
        args = start.z_global, start.z_silo, start.z_record, theta, rows
        try:
            graph = self._graph if self._seen else _Graph(super().evaluate, *args)
            if graph is not None and not graph.equals(super().evaluate, *args, also_slopes=not self._seen):
                graph = None
        except Exception:  # whatever a user's program does that a tracer cannot follow
            _log.debug("tracing failed", exc_info=True)
            graph = None
        self._graph = graph
        self._seen.add(size)

    def start_at(self, problem: Any, rows: Params, size: int, silo: str) -> Start:
        return data_contract.read_at_silo(problem, rows, size, silo)

    def check_sites(self, point: Any, rows: Params) -> None:
        program_sites.check_sites(point, rows)

    def misplaced(self, problem: Any, z_global: Tensor | None = None, rows: Params | None = None) -> str:
        return program_sites.misplaced(problem, z_global, rows)

    def differing(self, point: Any, rows: Params, part: Tensor) -> set[str]:
        return program_sites.differing(point, rows, part)

    def run(self, latents: Params, theta: Params, rows: Params, densities: bool = True) -> Evaluation:
        """One run of the program at unconstrained latents by site, record sites with their plate where it wants it.

        Of a program with discrete sites one for each of their values together, whose record terms are summed out.
        """
        chosen = self.chosen()
        if not densities or len(chosen) == 1:
            return self._once(latents, theta, rows, densities, chosen[0])
        runs = [self._once(latents, theta, rows, densities, one) for one in chosen]
        found = runs[0]
        found.terms["record"] = [torch.stack([torch.stack(run.terms["record"]).sum(0) for run in runs]).logsumexp(0)]
        found.own = {name: term for name, term in found.own.items() if name not in found.in_records}
        found.own[ALL_RECORDS] = found.terms["record"][0].sum()
        return found

    def by_choice(
        self, z_global: Tensor, z_silo: Tensor, z_record: Tensor, theta: Params, rows: Params
    ) -> tuple[Tensor, list[Params]]:
        split = self.layout.split
        latents = {**split(z_global, "global"), **split(z_silo, "silo"), **split(z_record, "record")}
        runs = [self._once(latents, theta, rows, True, one) for one in self.chosen()]
        return torch.stack([torch.stack(run.terms["record"]).sum(0) for run in runs]), [run.values for run in runs]

    def _once(
        self, latents: Params, theta: Params, rows: Params, densities: bool, chosen: Mapping[str, int]
    ) -> Evaluation:
        some = next(iter(latents.values()))
        found = Evaluation(self.model, latents, theta, densities, chosen)

        def once(latents: Params, theta: Params) -> tuple[Any, ...]:
            found.latents, found.theta = latents, theta
            in_pytorch = _InPyTorch() if self._writes else contextlib.nullcontext()
            with contextlib.suppress(_AllIsThere), running(some.dtype, some.device), in_pytorch, found:
                self.model.fn(**rows, **self.schema.constants)
            return found.constrained, found.terms, found.own, found.values, found.masks

        if self._writes is None:
            self._writes = self._writes_for_all(some)
        if self._writes:
            each = torch.func.functionalize(once)(latents, theta)
            found.constrained, found.terms, found.own, found.values, found.masks = each
        else:
            once(latents, theta)
        return found

    def _writes_for_all(self, like: Tensor) -> bool:
        """Whether the program can be mapped over draws of its latents only if what it writes into a tensor of its own
        (`ll[late] = ...`), one for all draws, makes another tensor."""
        rows = {name: value.to(like.device) for name, value in self.schema.dummy_rows(2).items()}
        shapes = (self.layout.size("global"),), (self.layout.size("silo"),), (2, self.layout.size("record"))
        theta = {name: torch.zeros(shape, dtype=like.dtype, device=like.device) for name, shape in self.layout.theta}
        draws = [torch.zeros(1, *shape, dtype=like.dtype, device=like.device) for shape in shapes]

        def run(z_global: Tensor, z_silo: Tensor, z_record: Tensor) -> LogTerms:
            return LogDensity.evaluate(self, z_global, z_silo, z_record, theta, rows)

        for self._writes in (False, True):
            try:
                torch.func.vmap(run)(*draws)
                return self._writes
            except Exception as error:  # of a program that is mapped in neither way, or fails on what is made
                if "is not possible because there exists a Tensor" not in str(error):
                    break
        return False


def _to_map(module: GraphModule) -> GraphModule:
    """A `lean` graph that can be mapped and differentiated as the function can. Raises ValueError for one that writes
    into its tensors, or reads them by their memory."""
    for node in module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if (schema is not None and schema.is_mutable) or "as_strided" in str(node.target):
            raise ValueError(str(node.target))
        if node.op == "call_function":
            node.target = _MAPPED.get(str(node.target), torch.reshape if node.target is Tensor.view else node.target)
    module.recompile()
    return module


#: In place of ATen's own: a view that memory forbids becomes a copy.
_MAPPED: dict[str, Callable[..., Any]] = {
    "aten.view.default": torch.reshape,
    "aten._unsafe_view.default": torch.reshape,
}
