"""Silos that hold different columns of the same people: the model `Columns`, its parties in this process, its result.

Records must be aligned: row i is the same person at every silo (`secure_fvi.alignment`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from secure_fvi.aggregation.base import Block, BlockTable, SecureSum, carry
from secure_fvi.aggregation.parties import local_parties
from secure_fvi.algorithms.base import Posterior
from secure_fvi.algorithms.vertical.likelihoods import Likelihood
from secure_fvi.algorithms.vertical.predictors import (
    Program,
    check_predictor_at_silo,
    linear,
)
from secure_fvi.algorithms.vertical.soul import Soul
from secure_fvi.algorithms.vertical.vertical import (
    ColumnsProgram,
    Held,
    Vertical,
    VerticalProblem,
    VerticalView,
)
from secure_fvi.building import check_common, derived_secret, device_named, numbers_of, silo_secret, strong_enough
from secure_fvi.column_silo import (
    MOMENT_DRAWS,
    MOMENT_SEED,
    VerticalLocalPosterior,
    check_whole,
    columns_of,
    predictor_of,
    response_of,
    view_of,
)
from secure_fvi.compiled import choose_mode
from secure_fvi.disclosure import disclose
from secure_fvi.draws import SitePosterior, SitePosteriors, check_draws
from secure_fvi.driving import Options, Parties, Run, books_of, build_guards, goes_on
from secure_fvi.engines.local import LocalEngine
from secure_fvi.errors import InputError, SecureFVIWarning
from secure_fvi.federated_model import as_tensor
from secure_fvi.files import write_atomically
from secure_fvi.options import check
from secure_fvi.privacy.gate import Gate, NoiseSource
from secure_fvi.privacy.settings import DP
from secure_fvi.randomness import seeded
from secure_fvi.results import (
    ELSEWHERE,
    FORMAT,
    RunSummary,
    assessed,
    deep_copied,
    made_folder,
    number_or_none,
    revived,
    write_result,
)
from secure_fvi.server import Server, linked
from secure_fvi.silo import Silo
from secure_fvi.trees import Params, plain, to_numpy

#: The party that holds a private response, in the ledger.
RESPONSE_HOLDER = "response-holder"


@dataclass(frozen=True, eq=False)
class Columns:
    """A model of a response by the sum of predictors, each of one silo's own columns (Hassan et al. 2024).

        p(response | sum of the silos' predictors)

    likelihood: as in `algorithms.vertical.likelihoods`. response (N,), and offset (N,) where there is one: held by the
    server, under `algorithm.response = "shared"` by every silo too, and under "silos" by these alone. predictors: a
    Pyro program a silo, which takes the silo's columns and returns its predictor; `linear()` by default. A silo's data
    are the arguments of its program, row i the same person everywhere (`secure_fvi.alignment`), and `sf.Shared` values
    that its rows share. Under `RecordDP` one person's columns at one silo, and where it is private the label, are
    protected (adjacency: values replaced).
    """

    likelihood: Likelihood
    response: Tensor = field(repr=False)
    predictors: Sequence[Program] | None = None
    offset: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.likelihood, type) or not hasattr(self.likelihood, "columns"):
            raise InputError(f"likelihood must be one, such as Gaussian(), not {self.likelihood!r}")
        for name in ("response", "offset"):
            given = getattr(self, name)
            if not isinstance(given, Tensor) and (given is not None or name == "response"):
                object.__setattr__(self, name, _as_numbers(name, given))
        check(self)

    @property
    def default_algorithm(self) -> Vertical:
        return Vertical()


def _of_each(name: str, given: Any, s: Tensor) -> Tensor:
    """(N,) of the people whose predictors are s (n, N, C). Raises InputError: another shape would be stretched."""
    found = as_tensor(given, f"the {name}").to(s)
    if found.shape != s.shape[1:2] or not bool(torch.isfinite(found).all()):
        raise InputError(
            f"the {name} must be finite, one number a person, shape ({s.shape[1]},), not {tuple(found.shape)}"
        )
    return found


def _as_numbers(name: str, given: Any) -> Tensor:
    try:
        return torch.as_tensor(np.asarray(given))
    except (RuntimeError, TypeError, ValueError):
        raise InputError(f"the {name} must be a tensor (N,), not {type(given).__name__}") from None


def column_parties(
    model: Columns,
    names: Sequence[str],
    silos: Sequence[Mapping[str, Any]],
    algorithm: Vertical | Soul,
    aggregation: SecureSum,
    seed: int,
    privacy: DP | None,
    options: Options,
) -> Parties[LocalEngine]:
    """Server, engine and gates. Arguments as in `fit`; raises InputError and BudgetError as it does."""
    likelihood, ordered, dtype = model.likelihood, tuple(sorted(names)), options["dtype"]
    algorithm = algorithm.resolved(likelihood)
    disclosed = disclose(algorithm, aggregation, privacy, len(ordered))
    check_whole(aggregation)
    check_common(seed, dtype, options["device"], privacy)
    where = device_named(options["device"])
    found = {n: columns_of(n, data, dtype, where) for n, data in zip(names, silos, strict=True)}
    columns = {name: rows for name, (rows, _) in found.items()}
    programs = list(model.predictors) if model.predictors is not None else [linear(likelihood.columns)] * len(silos)
    if model.predictors is None:
        for name, rows in columns.items():
            if rows.keys() != {"x"} or rows["x"].dim() != 2:
                found_here = ", ".join(f"{key} {tuple(v.shape)}" for key, v in rows.items())
                raise InputError(
                    f"silo '{name}': the linear predictor takes one argument, x (N, D), not {found_here}; one column "
                    "is x (N, 1), several of a frame are x[0], x[1], ...; or give predictors of your own"
                )
    if len(programs) != len(silos):
        raise InputError(f"{len(programs)} predictors for {len(silos)} silos")
    programs = [
        functools.partial(p, **shared) if shared else p for p, (_, shared) in zip(programs, found.values(), strict=True)
    ]
    known = response_of(likelihood, model.response, model.offset, dtype, where)
    _check_aligned(columns, len(known.y))
    mode = choose_mode(options["compile"], algorithm.expected_calls * len(silos), numbers_of(silos))
    problem = VerticalProblem(
        likelihood, ordered, len(known.y), seed, dtype, where, mode, privacy, bool(known.offset.any())
    )
    bare, noise = algorithm.program(problem), NoiseSource(options["noise_key"])
    disclosed.of_program(bare.tables, {p: t for p, t in bare.terms.items() if p in bare.tables}, aggregation)
    server_sum, silo_sums = local_parties(strong_enough(aggregation, disclosed), ordered)
    views: dict[str, tuple[Any, VerticalView]] = {}
    shared: dict[Any, ColumnsProgram] = {}
    for name, program in zip(names, programs, strict=True):
        owner = b"silo/" + name.encode()
        secret = silo_secret(lambda o=owner: derived_secret(seed, o), bool(bare.terms), options["noise_key"])  # type: ignore[misc]
        seen = () if algorithm.response == "private" else known
        # Silos of one program and shape share its traces; it holds no data.
        rows = columns[name]
        key = (program, tuple((k, v.shape[1:], v.dtype) for k, v in rows.items()))
        if key not in shared:
            predictor = predictor_of(name, program, rows, likelihood, bool(bare.terms))
            shared[key] = algorithm.program(problem, predictor)
        if not bare.terms:
            check_predictor_at_silo(shared[key].predictor, rows, name)
        views[name] = shared[key], view_of(name, rows, seen, secret)
    books, on = books_of(options, bool(bare.terms)), goes_on(options)
    guards = build_guards(ordered, bare.tables, bare.terms, algorithm.name, books, noise, going_on=on)
    if bare.terms and algorithm.response == "private":
        holder = build_guards((RESPONSE_HOLDER,), *bare.of_holder(), algorithm.name, books, noise, going_on=on)
        guards = guards._replace(holder=holder)
    built = {n: Silo(n, *views[n], silo_sums[n], guards.gates[n], released=guards.released(n)) for n in ordered}
    gate = guards.holder.gates[RESPONSE_HOLDER] if guards.holder is not None else None
    held = Held(known if algorithm.server_knows else None, gate)
    server = Server(problem, algorithm.program(problem, held), server_sum, noise)
    return Parties(server, LocalEngine(built), guards)


def _check_aligned(columns: Mapping[str, Params], people: int) -> None:
    for name, rows in columns.items():
        size = len(next(iter(rows.values())))
        if size != people:
            raise InputError(
                f"silo '{name}' has {size} records, the response {people}: align them first, so that row i is "
                "the same person everywhere (docs/vertical-alignment.md)"
            )


# ----
# What a vertical fit returns: q(gamma), which everyone may see, and each silo's own q(theta_j), which is its own


@dataclass(frozen=True, repr=False, kw_only=True)
class VerticalResult(RunSummary):
    """A fitted vertical model. `posterior` is gamma's; each silo's coefficients are in `local`, for that silo alone."""

    problem: VerticalProblem = field(repr=False)
    config: Vertical | Soul = field(repr=False)
    secure_sum: SecureSum = field(repr=False)
    variational: Posterior = field(repr=False)
    local: Mapping[str, VerticalLocalPosterior]  # by silo, where the silos are in this process

    def sample(self, n: int, seed: int = 0) -> Params:
        """`n` draws of the shared parameters, (n, *shape), in the model's own space."""
        return self.problem.likelihood.constrain(self._gamma(n, seed))

    def predict(
        self, silos: Mapping[str, Mapping[str, Tensor]], offset: Tensor | None = None, n: int = 200, seed: int = 0
    ) -> Params:
        """Posterior predictive draws of the response of new people: {"y": (n, N)}. Arguments as in `log_predictive`."""
        s, gamma = self._predictors(silos, offset, n, seed)
        with seeded(seed):
            return {"y": self.problem.likelihood.distribution(s, gamma).sample()}

    def log_predictive(
        self,
        silos: Mapping[str, Mapping[str, Tensor]],
        response: Tensor,
        offset: Tensor | None = None,
        n: int = 200,
        seed: int = 0,
    ) -> Tensor:
        """Log predictive density of each new person's response, nats (N,): log of the mean over `n` draws.

        silos: each silo's columns of the new people, by id, aligned. The silos send draws of their predictors into one
        secure sum; its total, (n, N, C), is seen by who asks. The auxiliary noise of the model is part of the
        predictive. offset: of the new people, (N,); asked for where the fit had one. A privacy guarantee of the fit
        covers the people it was fitted to, not the columns of new ones.
        """
        s, gamma = self._predictors(silos, offset, n, seed)
        y = _of_each("response", response, s)
        self.problem.likelihood.check(y)
        found = self.problem.likelihood.distribution(s, gamma).log_prob(y)
        return torch.logsumexp(found, 0) - math.log(n)

    def save(self, directory: str | Path) -> None:
        """result.json and posterior.safetensors (q(gamma)); under silos/, a file of each silo's own posterior."""
        directory = made_folder(directory)
        own = directory / "silos"
        own.mkdir(mode=0o700, exist_ok=True)
        for number, (name, local) in enumerate(sorted(self.local.items())):
            sites = {s: {"mean": p.mean.tolist(), "sd": p.sd.tolist()} for s, p in local.posterior.items()}
            # The silo's name may be any text, so it goes into the file, not into its name.
            content = json.dumps({"silo": name, "posterior": sites}, indent=2).encode()
            write_atomically(own / f"{number:04d}.json", content)
            write_atomically(own / f"{number:04d}.safetensors", save(plain(local.q), {"silo": name}))
        write_result(directory, self)

    def to_json(self) -> dict[str, Any]:
        """The content of result.json: `RunSummary`'s, and what `sf.load` needs."""
        likelihood = self.problem.likelihood
        options: dict[str, Any] = dataclasses.asdict(likelihood) if dataclasses.is_dataclass(likelihood) else {}
        return super().to_json() | {
            "saved": {
                "format": FORMAT, "family": self.variational.family.name, "dtype": str(self.problem.dtype),
                "sites": [], "theta": [], "fields": [], "shared": [],
                "likelihood": {"kind": type(likelihood).__name__, "options": options},
            }
        }  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:
        """For `pickle`: without `local`, which holds silos' data."""
        return revived, (type(self), {**vars(self), "local": ELSEWHERE})

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return deep_copied(self, memo)

    def _gamma(self, n: int, seed: int) -> Tensor:
        check_draws(n)
        return self.variational.draws(n, seed)

    def _predictors(
        self, silos: Mapping[str, Mapping[str, Tensor]], offset: Tensor | None, n: int, seed: int
    ) -> tuple[Tensor, Tensor]:
        """Draws of s + offset (n, N, C), the auxiliary variables' noise included, and of gamma (n, n_gamma)."""
        names = self.problem.silos
        if set(silos) != set(names):
            raise InputError(f"give the new people's columns of each silo: {', '.join(names)}")
        if offset is None and self.problem.offset:
            raise InputError(
                "the fit had an offset (a log exposure, say), and new people have theirs: give offset=, zeros for none"
            )
        etas = {name: self.local[name].eta(silos[name], n, seed + j) for j, name in enumerate(names)}
        if len({e.shape for e in etas.values()}) > 1:
            raise InputError("all silos must give columns of the same number of people")
        s = sum_of_predictors(self.secure_sum, etas, self.config.bound)
        noisy = len(names) - 1 if self.config.is_power else len(names)
        rng = torch.Generator().manual_seed(seed)
        s = s + self.config.rho * math.sqrt(noisy) * torch.randn(s.shape, generator=rng, dtype=torch.float64).to(s)
        if offset is not None:
            s = s + _of_each("offset", offset, s).unsqueeze(-1)
        return s, self._gamma(n, seed)


def column_result(done: Run[Any], config: Vertical | Soul, aggregation: SecureSum) -> VerticalResult:
    """The result of a finished run. Warns with SecureFVIWarning where `assessed` does."""
    server, engine, problem = done.server, done.engine, done.server.problem
    state = server.state.algorithm
    variational = server.program.posterior(state)
    verdict = assessed(server.program.verdict(state), config.name, server.rounds)
    local = {name: VerticalLocalPosterior(silo) for name, silo in engine.silos.items()}
    for name, own in local.items():
        if own.wrong_sds:
            warnings.warn(f"silo '{name}': {own.wrong_sds}", SecureFVIWarning, stacklevel=3)
    gamma = variational.draws(MOMENT_DRAWS, MOMENT_SEED)
    draws = problem.likelihood.constrain(gamma)
    tail = np.array(done.objectives)
    return VerticalResult(
        algorithm=config.name,
        seed=problem.seed,
        silos=list(problem.silos),
        rounds=server.rounds,
        seconds=done.seconds,
        # What SOUL climbs is a joint density, not a bound.
        elbo=None if isinstance(config, Soul) else number_or_none(tail.mean()),
        **verdict,
        posterior=SitePosteriors({k: SitePosterior(v.mean(0), v.std(0)) for k, v in draws.items()}),
        theta={},
        metrics={
            "elbo_sd": number_or_none(tail.std()),
            **server.program.metrics(state),
            "records": problem.records,
            "execution": problem.mode,
        },
        aggregation={"kind": aggregation.kind, **engine.traffic},
        privacy=_claim(server, done.guards.holder is not None),
        problem=problem,
        config=config,
        secure_sum=aggregation,
        variational=variational,
        local=local,
    )


def _claim(server: Any, labels: bool) -> dict[str, Any] | None:
    """Each silo's guarantee for a person's columns, and whether the label has the same."""
    found: dict[str, Any] | None = server.claim()
    if found is not None:
        found["sds"] = {"count_noise": False, "because": "it is not worked out how far noise moves vertical runs"}
        found["protects"] = "a person's columns at one silo" + (", and the response" if labels else "")
        if labels and "linked" in found:
            held, whose = found["linked"]["records"] + 1, f"{found['linked']['whose']} and its response"
            found["linked"] = linked(found["epsilon"], found["delta"], held, whose)
    return found


# ---- One secure sum outside a fit: the silos' predictors of new people ----

_PHASE = "predict"


def sum_of_predictors(aggregation: SecureSum, etas: Mapping[str, Tensor], bound: float) -> Tensor:
    """The total of each silo's `etas`, all of one shape. Raises AggregationError past `bound`, as in a fit."""
    names = tuple(sorted(etas))
    first = etas[names[0]]
    table = BlockTable((Block("eta", tuple(first.shape), bound),))
    server, silos = local_parties(aggregation, names)
    context = hashlib.sha256(repr((_PHASE, tuple(first.shape))).encode()).digest()

    def answer(messages: Mapping[str, bytes]) -> dict[str, bytes]:
        return {name: silos[name].handle(message) for name, message in messages.items()}

    carry(server.prepare(1), answer)
    sent = {}
    for name in names:
        gate = Gate(name, {_PHASE: table})
        gate.begin(1, _PHASE)
        release = gate.release(to_numpy(etas[name]).reshape(-1))
        sent[name] = silos[name].contribute(release.sum_index, names, table, release.values, context)
    total = carry(server.total(1, names, table, sent, context), answer)
    return torch.from_numpy(total.values.reshape(first.shape)).to(first)
