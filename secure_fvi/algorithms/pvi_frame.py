"""What both halves of PVI derive from the model: families, the blocks of a contribution, who is asked in a round."""

from __future__ import annotations

import torch
from torch import Tensor

from secure_fvi.aggregation.base import Block, BlockTable
from secure_fvi.algorithms import stationarity, weighing
from secure_fvi.algorithms.base import ROUND_PHASE, Problem, choose_cohort, form, one_phase
from secure_fvi.algorithms.local_fit_options import CLOSED_FORM, EXACT, NATURAL
from secure_fvi.algorithms.natural import Natural, packed_size, unpack
from secure_fvi.algorithms.pvi import FINISH, PVI
from secure_fvi.algorithms.pvi_schedule import after_turn, delays, first_turns, next_cohort
from secure_fvi.errors import InputError
from secure_fvi.families import global_family
from secure_fvi.families.conditional import ENCODER
from secure_fvi.optimizers import Optimizer
from secure_fvi.privacy.settings import RecordDP, SiloDP
from secure_fvi.privacy.terms import Extent, Terms, agree

#: The default rate of natural gradients of a full covariance of n dimensions is at most this over n + 1.
RATE_BY_SIZE = 2.0
#: How many times the bound of other numbers a change may take.
ROOM = 2.0**10
#: Largest power of two of a unit.
_MOST_UNITS = 200


class PVIFrame:
    """A configuration bound to a problem. Every party builds the same one."""

    def __init__(self, config: PVI, problem: Problem) -> None:
        self.config, self.problem = config, problem
        layout, samples = problem.layout, config.importance_samples
        self.n, self.n_record, self.n_silo = (layout.size(r) for r in ("global", "record", "silo"))
        self.family = global_family(config.family, self.n)
        self.full = self.family.name == "full"
        self.local_family = config.local_family.build(self.n_record, self.n + self.n_silo, samples, marginal=True)
        self.silo_family = config.silo_family.build(self.n_silo, self.n, 1, marginal=True)
        self.samples = samples if self.n_record else 1
        self.local_optimizer = Optimizer("adam", config.local_learning_rate)
        self.by_row = config.sampling_rate < 1
        self.theta_start = dict(problem.start.theta)
        self.delays = delays(len(problem.silos), config.delay, problem.seed)
        self._check()
        self.packed = packed_size(self.n, self.full)
        shapes: dict[str, tuple[int, ...]] = {"change": (self.packed,)}
        shapes |= {f"theta/{name}": tuple(v.shape) for name, v in sorted(self.theta_start.items())}
        # First changes on raw scales are large; a silo does not send a share of one that it alone knows.
        bounds = {"change": config.bound * (ROOM if problem.privacy is None else 1.0)}
        self.released = tuple(Block(name, s, bounds.get(name, config.bound)) for name, s in shapes.items())
        #: Whether a silo's change is protected as one vector that a record may turn into any other.
        self.by_record = isinstance(problem.privacy, RecordDP)
        self.terms = self._terms()
        self.terms_by_phase = {ROUND_PHASE: self.terms} if self.terms is not None else {}
        self.table = self._table()
        self.tables = {ROUND_PHASE: self.table}
        if self.terms is None:
            final = stationarity.blocks(self.n, self.full, config.bound)
            if config.rounds is None:
                final += weighing.blocks(problem, self.family.name, self.local_family)
            self.tables[FINISH] = BlockTable((*final, self._present, Block("records", (), 2.0**31, integer=True)))
        self._turns, self._by_turn = first_turns(len(problem.silos)), list[tuple[str, ...]]()
        each = (len(problem.silos),)
        sent: dict[str, Tensor | tuple[int, ...]] = {
            "q": (self.packed,), "units": (self.n,), "sums": each, "dampings": each,
        }  # fmt: skip
        sent |= {f"theta/{name}": value for name, value in self.theta_start.items()}
        forms = {ROUND_PHASE: form(sent, terms=self.terms), FINISH: form(sent)}
        self.order = one_phase(
            ROUND_PHASE, config.most_rounds, self.cohort, forms,
            last={FINISH} & self.tables.keys(), silos=problem.silos,
        )  # fmt: skip

    def _check(self) -> None:
        config, privacy = self.config, self.problem.privacy
        if any(name.startswith(ENCODER) for name in self.problem.start.theta):
            raise InputError(f"no pyro.param may start with '{ENCODER}'")
        if isinstance(privacy, RecordDP) and privacy.objective_share:
            raise InputError("PVI under RecordDP releases no objective; use objective_share = 0")
        if isinstance(privacy, RecordDP) and config.virtual_clients > 1:
            raise InputError(
                "virtual_clients under record privacy: one record would move the states of all parts, which no "
                "noise covers; use virtual_clients = 1, or unit = 'silo'"
            )
        if config.virtual_clients > 1 and (self.n_record or self.n_silo):
            raise InputError("virtual_clients are for models without local latents; use virtual_clients = 1")
        if privacy is not None and config.rounds is None:
            raise InputError("under differential privacy give rounds: a job is charged for all its rounds beforehand")
        if self.local_family.couples_records and self.by_row:
            raise InputError(
                "a dense local scale couples all records of a silo; use sampling_rate = 1 or another scale"
            )
        if config.local_optimizer in EXACT and (self.n_record or self.n_silo):
            raise InputError(
                f"local_optimizer = '{config.local_optimizer}' is for models without local latents; use '{NATURAL}'"
            )
        if config.local_optimizer == CLOSED_FORM and self.theta_start:
            raise InputError(f"local_optimizer = '{CLOSED_FORM}' learns no pyro.param; use '{NATURAL}'")
        if self.cohort_size > len(self.problem.silos):
            raise InputError(f"buffer = {config.buffer} of {len(self.problem.silos)} silos")

    @property
    def first_rate(self) -> float:
        """Of natural gradients. By default less for a full covariance of many dimensions: a step from one draw has n
        noisy directions for each that it learns."""
        given = self.config.learning_rate
        return self.config.first_rate if given is not None or not self.full else min(0.3, RATE_BY_SIZE / (self.n + 1))

    @property
    def cohort_size(self) -> int:
        """Silos asked in a round."""
        by_schedule = {"synchronous": len(self.problem.silos), "sequential": 1, "asynchronous": self.config.buffer}
        return by_schedule[self.config.schedule]

    def cohort(self, round_: int) -> tuple[str, ...]:
        """The silos asked in a round. Under delays they follow from the rounds before, which all parties can replay."""
        silos, config = self.problem.silos, self.config
        if config.schedule == "sequential":
            return (silos[round_ % len(silos)],)
        while config.delay and len(self._by_turn) <= round_:
            at = len(self._by_turn)
            chosen = next_cohort(self._turns, self.cohort_size, self.problem.seed, at)
            self._turns = after_turn(self._turns, chosen, self.delays, at)
            self._by_turn.append(tuple(silos[j] for j in chosen))
        if config.delay:
            return self._by_turn[round_]
        return choose_cohort(silos, self.cohort_size / len(silos), self.problem.seed, round_)

    def _terms(self) -> Terms | None:
        privacy = self.problem.privacy
        if privacy is None:
            return None
        side = int(isinstance(privacy, SiloDP) and privacy.target_quantile is not None)
        extent = Extent(sum(b.size for b in self.released), 0, side)
        return agree(privacy, self.cohort_size, 1.0, self.config.most_rounds, extent)

    def _table(self) -> BlockTable:
        if self.terms is not None:
            return self.terms.table(self.released, [])
        counts = (
            Block("records", (), 2.0**31, integer=True),
            Block("skipped", (), 1.0, integer=True),  # silos whose fit failed, so that they left their site alone
            Block("tempered", (), 1.0, integer=True),  # silos that fitted against a tempered cavity
            Block("moving", (), 1.0, integer=True),  # silos whose own change, undamped, moves q past the tolerance
            self._present,
        )
        return BlockTable((*self.released, Block("objective", (), self.config.bound), *counts))

    @property
    def _present(self) -> Block:
        """Who is in the total: the secure sum shows the server that anyway, and a silo has to know whether its change
        was used."""
        return Block("present", (len(self.problem.silos),), 1.0, integer=True, rows="presence")

    def unpack(self, flat: Tensor) -> Natural:
        return unpack(flat.to("cpu", torch.float64), self.n, self.full)

    def units(self, q: Natural) -> Tensor:
        """(n,) the units in which silos state changes of Z_G: powers of two near q's sds, so that nothing is rounded.

        A sum has a bound and a resolution, and parameters on raw scales have precisions of 1e10 beside others of 1e-8.
        Ones under differential privacy, where changes are clipped as they are.
        """
        if self.terms is not None:
            return torch.ones(self.n, dtype=torch.float64)
        return torch.exp2(q.stddev().log2().round().clamp(-_MOST_UNITS, _MOST_UNITS))

    def per_unit(self, units: Tensor) -> Tensor:
        """(packed,) factors of a packed factor of z that make it one of z / units."""
        rows, cols = torch.tril_indices(self.n, self.n) if self.full else torch.arange(self.n).expand(2, -1)
        return torch.cat([units, units[rows] * units[cols]])

    def move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.problem.device, self.problem.dtype)

    def scalar(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=self.problem.dtype, device=self.problem.device)
