"""The one place where data leaves a silo.

A contribution becomes a `Release` here and nowhere else, and only a release is handed to the secure sum. Without
privacy it is checked against the declared bounds. Under the terms of a job it is clipped, noised and charged to the
ledger, in one call that an algorithm cannot split: under record privacy the gate takes gradients a record at a time,
those of silo-level latents with them, and gives back nothing that has not been noised.

Every release draws its noise from a ChaCha20 generator of its own, keyed afresh by the operating system: there is no
state that a checkpoint could keep or a fork could copy, and `torch.manual_seed` has no say. A test may give a key
instead; noise under a key that anyone else knows protects nothing, and the report of such a run says so.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from randomgen import ChaCha
from torch import Tensor, nn

from secure_fvi.aggregation.base import BlockTable, FloatArray
from secure_fvi.compiled import threads
from secure_fvi.errors import AggregationError, BoundError, InputError, ProtocolError, RecordError
from secure_fvi.privacy.settings import RecordDP
from secure_fvi.privacy.terms import Terms

#: Binary logarithm of the grid's step over the noise's standard deviation, rounded down to a power of two.
_GRID_BITS = -20
#: What a report calls the source.
SYSTEM_SOURCE = "ChaCha20, keyed by the operating system for each release"
TEST_SOURCE = "TEST KEY: the noise can be replayed and protects nothing"
KEPT_SOURCE = "ChaCha20, keyed by a secret of the job and by what is released"


class NoiseSource:
    """Makes the generator of each release. `test_key` replaces the operating system's randomness, in tests only."""

    def __init__(self, test_key: bytes | None = None) -> None:
        self._test_key = test_key

    def __repr__(self) -> str:
        return f"NoiseSource({self.status!r})"

    @property
    def status(self) -> str:
        return SYSTEM_SOURCE if self._test_key is None else TEST_SOURCE

    def generator(self, party: str, number: int, *purpose: str) -> np.random.Generator:
        """A fresh generator; under a test key, the one of this party, number and purpose."""
        if self._test_key is None:
            key = os.urandom(32)
        else:
            key = hashlib.sha256(self._test_key + repr((party, number, *purpose)).encode()).digest()
        return np.random.Generator(ChaCha(key=int.from_bytes(key, "little"), rounds=20))


class KeptNoise(NoiseSource):
    """Noise that a party makes again as it was, where it was killed once a release was charged: it follows from a
    secret of 32 bytes, which the party keeps, and from the numbers to which it is added, so that others get others."""

    def __init__(self, secret: bytes) -> None:
        super().__init__(secret)
        self._key = secret
        #: Of the numbers named last; it tells nothing of them to who has not the secret.
        self.digest = b""

    @property
    def status(self) -> str:
        return KEPT_SOURCE

    def name(self, *values: Tensor) -> int:
        """The number under which `generator` is asked for noise of these: of numbers that follow from somebody's
        values, with all else that they follow from, so that whether two releases are equal says nothing of anybody.
        """
        found = hashlib.blake2b(key=self._key, digest_size=32, person=b"released")
        for value in values:
            found.update(repr((tuple(value.shape), value.dtype)).encode())
            found.update(value.detach().cpu().contiguous().numpy().tobytes())
        self.digest = found.digest()
        return int.from_bytes(self.digest, "big")


def skellam(generator: np.random.Generator, variance: float, size: int) -> npt.NDArray[np.int64]:
    """Independent symmetric Skellam integers, (size,): the difference of two Poisson variables of mean variance / 2.

    Sums of independent shares are Skellam again, with the variances added.
    """
    draws = generator.poisson(variance / 2, (2, size))
    difference: npt.NDArray[np.int64] = draws[0] - draws[1]
    return difference


def with_gaussian(values: FloatArray, generator: np.random.Generator, sd: float) -> FloatArray:
    """`values` (n,) with independent normals of this sd, rounded to a power of two of 2^-21 to 2^-20 sd.

    Normals made in floating point have gaps and favoured numbers in their last bits, which tell 0 + noise from 1e-9 +
    noise (Mironov 2012). A cell of the grid holds 6e8 of the sampler's points, so that the last bits are nowhere to be
    seen, and rounding is post-processing of the noised numbers.
    """
    if sd == 0:  # of an audit's control
        return values.copy()
    step = math.ldexp(1.0, math.floor(math.log2(sd)) + _GRID_BITS)
    noised: FloatArray = np.rint((values + generator.standard_normal(len(values)) * sd) / step) * step
    return noised


# ----
# The aggregator's part in privacy: it reads totals off the lattice and, where it is trusted to, adds the noise


def curated(total: FloatArray, terms: Terms, clip: float, noise: NoiseSource, index: int) -> FloatArray:
    """The total (table.size,) of sum `index` in natural units. With noise = "server" nobody else may see `total`."""
    values = total.copy()
    if terms.settings.noise == "server":
        noised = terms.extent.shared + terms.extent.side
        sd = terms.noise_multiplier * clip
        values[:noised] = with_gaussian(values[:noised], noise.generator("server", index), sd)
    return terms.in_clear(values, clip)


# ---- What leaves ----

#: Charges one release to the ledger, by phase and sum index, before it leaves; raises BudgetError past the budget.
Charge = Callable[[str, int], None]
#: Rows at most that are evaluated together, a power of two, so that no vectorised loop ends within one.
MOST_ROWS = 512
#: Rows, columns and outputs of products that are looked at; places by which rows move.
_PRODUCTS = [(n, k, m) for n in (64, MOST_ROWS) for k in (3, 8, 16, 33) for m in (1, 3, 5, 16)]
_MOVED = (1, 3)


class Release(NamedTuple):
    """What may leave the silo: `values` (table.size,)."""

    sum_index: int
    values: FloatArray


#: Gives the noised sum over records (n,), on the CPU, of matrices of their gradients (B, n), each clipped.
NoisedSum = Callable[[Iterable[Tensor]], Tensor]


class RecordRelease(NamedTuple):
    release: Release
    hidden: Tensor  # (extent.hidden,) float64: noised sum of gradients of silo-level latents, for the silo's own step


class Gate:
    """One silo's gate, with the blocks of each phase and its terms. No terms: no differential privacy."""

    def __init__(
        self,
        silo: str,
        tables: Mapping[str, BlockTable],
        terms: Mapping[str, Terms] | None = None,
        charge: Charge | None = None,
        noise: NoiseSource | None = None,
        *,
        silos: Sequence[str] = (),
        rows_of_silos: bool = False,
    ) -> None:
        """silos: all of the job, sorted, which tells a block of presence this silo's own row. rows_of_silos: the job
        discloses each silo's own values in a row of the total, as its algorithm declares and this silo's policy
        allows. Raises AggregationError where a table shows more, InputError where records would not stay apart."""
        if bool(terms) != (charge is not None):
            raise AggregationError(f"silo '{silo}': a job under privacy needs its ledger")
        if terms and not set(terms) >= set(tables):
            raise AggregationError(f"silo '{silo}': under privacy every phase needs its terms")
        for table in tables.values():
            for block in table.blocks:
                if block.rows == "silo" and not rows_of_silos:
                    raise AggregationError(
                        f"silo '{silo}': block '{block.name}' has a row a silo, and this job discloses none"
                    )
                if block.rows == "presence" and (block.shape != (len(silos),) or silo not in silos):
                    raise AggregationError(f"silo '{silo}': block '{block.name}' must have a row for each silo")
        if any(isinstance(one.settings, RecordDP) for one in (terms or {}).values()):
            check_machine()
        self.silo, self._silos = silo, tuple(silos)
        self._tables, self._terms = tables, dict(terms or {})
        self._charge, self._noise = charge, noise or NoiseSource()
        self._index, self._phase, self._clip, self._turn = -1, next(iter(tables)), 0.0, 0
        #: Records or contributions that were not finite and counted as zero, so far. For the silo's own eyes.
        self.dropped = 0
        self._public = list[float]()  # of the last sum over records
        #: Whether no record is looked at in a fit by noised steps: each of its sums is noise alone.
        self.deaf = False
        #: Releases that were paid for, so far.
        self.paid = 0

    @property
    def phases(self) -> tuple[str, ...]:
        """Those that send something."""
        return tuple(self._tables)

    @property
    def table(self) -> BlockTable:
        """Of the phase that was begun."""
        return self._tables[self._phase]

    @property
    def terms(self) -> Terms | None:
        """Of the phase that was begun; None without privacy."""
        return self._terms.get(self._phase)

    def begin(
        self, index: int, phase: str, cohort: int = 0, clip: float | None = None, turn: int | None = None
    ) -> None:
        """Expect the one release of sum `index`, by `cohort` silos, clipped to `clip` where the norm adapts.

        turn: the silo's own count, which names its noise; the index itself for a party that names the index.
        """
        if phase not in self._tables:
            raise ProtocolError(f"silo '{self.silo}': the algorithm has no phase of the given name")
        self._index, self._phase, self._turn = index, phase, index if turn is None else turn
        if self.terms is not None:
            self._clip = clip if clip is not None and self.terms.adaptive else self.terms.settings.clipping_norm
            if not self.terms.clips_to(self._clip):
                raise ProtocolError(
                    f"silo '{self.silo}': the server's clipping norm is no number that the agreed one can arrive at"
                )
            if cohort != self.terms.cohort:
                raise ProtocolError(
                    f"silo '{self.silo}': a cohort of {cohort} where the noise was planned for {self.terms.cohort}"
                )

    def release(self, values: FloatArray) -> Release:
        """The whole contribution (table.size,), a silo's own sum: for jobs without privacy, or whose unit is the silo.

        Raises AggregationError for a wrong length; without privacy also for an element past its bound, naming
        the block and the bound, never the value; under record privacy always, since the gate has to see records.
        """
        index = self._once()
        terms = self.terms
        if terms is None:
            return Release(index, self._within_bounds(values))
        if terms.settings.unit == "record":
            raise AggregationError(
                f"silo '{self.silo}': under record privacy a contribution passes the gate a record at a time"
            )
        shared = terms.extent.shared
        self._check_length(values, shared)
        main, side = terms.norms(self._clip)
        flat = torch.from_numpy(values).double().reshape(1, shared)
        parts, sizes, norms = [flat], [shared], [main]
        if terms.extent.side:
            below = bool(flat.norm() <= main)
            parts.append(torch.full((1, 1), side if below else -side, dtype=torch.float64))
            sizes, norms = [*sizes, 1], [*norms, side]
        noised, dropped = noisy_clipped_sum([parts], sizes, norms, self._noiser(0))
        return self._out(index, noised.numpy(), dropped)

    def release_records(
        self, chunks: Iterable[tuple[Tensor, Tensor]], data_free: Tensor | None, public: Sequence[float]
    ) -> RecordRelease:
        """A sum over records, each clipped, noise added.

        Each chunk is a matrix of gradients (B, shared + hidden) and the records' terms of the objective (B,), which
        are used where the terms release them. `data_free` (shared,), with one more entry where the objective is
        released, is added to the clipped sum: it must not depend on records other than through noised state. `public`
        are the values of the blocks declared public.
        """
        index, self._public = self._once(), list(public)
        terms = self.terms
        if terms is None or terms.settings.unit != "record" or terms.steps:
            raise AggregationError(f"silo '{self.silo}': only a job under record privacy takes records one by one")
        shared, hidden, with_side = terms.extent
        main, side = terms.norms(self._clip)
        sizes, norms = ([hidden + shared, 1], [main, side]) if with_side else ([hidden + shared], [main])

        def parts() -> Iterable[list[Tensor]]:
            for rows, objective in chunks:
                if rows.shape[1] != hidden + shared:
                    raise AggregationError(f"silo '{self.silo}': {rows.shape[1]} gradients for {hidden + shared}")
                # Hidden coordinates first, so that what is shared lies together.
                ordered = [torch.cat([rows[:, shared:], rows[:, :shared]], 1).double()]
                if with_side:
                    bound = terms.side_bound
                    ordered.append((objective.double().clamp(-bound, bound) * (side / bound)).unsqueeze(1))
                yield ordered

        free = np.zeros(shared + with_side)
        if data_free is not None:
            free = data_free.double().cpu().numpy() / terms.step(self._clip)
            if with_side:
                free[shared:] *= side / terms.side_bound
            if not np.isfinite(free).all():  # no record has a say in that, and none was looked at
                raise ProtocolError(
                    f"silo '{self.silo}': what its own latents add, whatever its records are, is no number at what the "
                    "server named; where the fit ran off, lower learning_rate or local_learning_rate"
                )
        noiser = self._noiser(hidden, np.rint(free)) if terms.resolution else self._noiser(hidden)
        noised, dropped = noisy_clipped_sum(parts(), sizes, norms, noiser)
        self.dropped += dropped
        shown = noised[hidden:].numpy().copy()
        if not terms.resolution:
            shown += free
        bounds = self.table.bounds[: len(shown)]
        values = np.concatenate([np.clip(shown, -bounds, bounds), np.asarray(public, np.float64)])
        self._check_length(values, self.table.size)
        self._pay(self._phase, index)
        return RecordRelease(Release(index, values), noised[:hidden] * terms.step(self._clip))

    def release_change(self, changes: Tensor) -> Release:
        """What the silo's records arrived at, summed and noised: parameter perturbation.

        changes: (shared,), of all records together; or (parts, shared), a row for each of disjoint parts of them. A
        part's row must follow from its own records and from what is public alone, to the last bit, and which part a
        record is in must not follow from others. Every record counts: there is no amplification by sampling. A record
        that joins or leaves may turn its part's change into any other, not into zero, so that each is clipped to half
        the norm.
        """
        index = self._once()
        terms = self.terms
        whole = terms is not None and terms.sampling_rate == 1 and terms.extent[1:] == (0, 0) and not terms.steps
        if terms is None or terms.settings.unit != "record" or not whole:
            raise AggregationError(f"silo '{self.silo}': the terms of this phase are not those of one change")
        rows = torch.atleast_2d(changes).double()
        self._check_length(np.empty(rows.shape[1:]), terms.extent.shared)
        noised, dropped = noisy_clipped_sum(
            [[rows]], [terms.extent.shared], [terms.norms(self._clip)[0] / 2], self._noiser(0)
        )
        return self._out(index, noised.numpy(), dropped)

    def release_fit(self, fit: Callable[[NoisedSum], FloatArray]) -> Release:
        """What a fit by noised steps arrives at (shared,), without noise of its own: it follows from sums that have all
        of the noise here, from what is public and from coins.

        fit: is given what makes those sums, `terms.steps` times at most, of records that a Poisson sample of the agreed
        rate chose. Nothing else that it does may follow from records. Charged whole, however many it made; so is a
        fit that fails after the first, since that it does follows from them and is seen outside.
        """
        index, terms = self._once(), self.terms
        if terms is None or terms.settings.unit != "record" or not terms.steps:
            raise AggregationError(
                f"silo '{self.silo}': the terms of this phase are not those of a fit by noised steps"
            )
        made, done = 0, False

        def noised_sum(chunks: Iterable[Tensor]) -> Tensor:
            nonlocal made
            if done or made >= terms.steps:
                raise AggregationError(f"silo '{self.silo}': a fit of {terms.steps} noised steps asks for another")
            made += 1
            return self._step(chunks, terms, made)

        try:
            values = fit(noised_sum)
            self._check_length(values, terms.extent.shared)
        except Exception:
            if made:
                self._pay(self._phase, index)
            raise
        finally:
            done = True
        return self._out(index, values, 0)

    def _step(self, chunks: Iterable[Tensor], terms: Terms, number: int) -> Tensor:
        """The noised sum of one step of a fit, (hidden,)."""
        hidden = terms.extent.hidden

        def parts() -> Iterable[list[Tensor]]:
            for rows in () if self.deaf else chunks:
                if rows.shape[1] != hidden:
                    raise AggregationError(f"silo '{self.silo}': {rows.shape[1]} gradients for {hidden}")
                yield [rows.double()]

        noiser = self._noiser(hidden, purpose=("step", str(number)))
        noised, dropped = noisy_clipped_sum(parts(), [hidden], [terms.norms(self._clip)[0]], noiser)
        self.dropped += dropped
        return noised

    def release_nothing(self) -> Release:
        """Zero, noised and charged like any other contribution, in place of one that could not be computed.

        Where all of the contribution is the unit's; a sum over records leaves out the records that failed. A fit by
        noised steps has no such zero, since none of its records makes it fail: raises AggregationError.
        """
        terms = self.terms
        assert terms is not None
        if terms.steps:
            raise AggregationError(f"silo '{self.silo}': a fit by noised steps could not be made")
        self.dropped += 1
        nothing = np.zeros(terms.extent.shared)
        if terms.settings.unit == "silo":
            return self.release(nothing)
        if terms.sampling_rate == 1 and terms.extent[1:] == (0, 0):
            return self.release_change(torch.from_numpy(nothing))
        extent = terms.extent
        public = self._public or [0.0] * (self.table.size - extent.shared - extent.side)
        return self.release_records((), None, public).release

    def release_rows(self, rows: Tensor) -> Release:
        """One row a record, noised: what each person adds stays a row of its own (vertical runs). rows (N, C).

        Replacing a person's values turns its row into another one, so that each row is clipped to half the norm. How
        other rows depend on this person must have been noised before (`hidden_sum`).
        """
        index = self._once()
        terms = self.terms
        if terms is None or terms.sampling_rate != 1 or terms.extent != (rows.numel(), 0, 0):
            raise AggregationError(f"silo '{self.silo}': the terms of this phase are not those of a row a record")
        clipped, dropped = _clipped(rows.double(), terms.norms(self._clip)[0] / 2)
        noised = self._noiser(0)(clipped.reshape(-1).cpu())
        return self._out(index, noised.numpy(), dropped)

    def hidden_sum(self, phase: str, rows: Tensor) -> Tensor:
        """A sum over records for the holder's own next step: noised in full and charged to `phase`, never sent.

        rows (N, n): a person whose values are replaced changes its row alone, which is clipped to half the norm. Call
        it after `begin` and before the release of the sum index; float64 (n,).
        """
        terms, index = self._terms.get(phase), self._index
        if terms is None or index < 0 or terms.resolution or terms.sampling_rate != 1 or terms.steps:
            raise AggregationError(f"silo '{self.silo}': the terms of '{phase}' are not those of a sum that stays")
        clipped, dropped = _clipped(rows.double(), self._clip / 2)
        sd = terms.noise_multiplier * self._clip
        noised = with_gaussian(clipped.sum(0).cpu().numpy(), self._noise.generator(self.silo, self._turn, phase), sd)
        self.dropped += dropped
        self._pay(phase, index)
        return torch.from_numpy(noised)

    def _out(self, index: int, values: FloatArray, dropped: int) -> Release:
        """Noised values leave: charged first."""
        self.dropped += dropped
        self._pay(self._phase, index)
        return Release(index, np.clip(values, -self.table.bounds, self.table.bounds))

    def _noiser(
        self, hidden: int, free: FloatArray | float = 0.0, purpose: tuple[str, ...] = ()
    ) -> Callable[[Tensor], Tensor]:
        """Noise for a clipped sum whose first `hidden` coordinates stay: they get all of it whatever the placement.

        free (shared + side,): what follows from no record, in steps of the lattice. It is added to the other
        coordinates before their shares of the noise, and cut with them to the room: a number that was cut later would
        have no share in it, and at a point where all silos' numbers but one's pass the bound the total had one share.
        """
        terms, clip = self.terms, self._clip
        assert terms is not None
        generator = self._noise.generator(self.silo, self._turn, *purpose)

        def on_lattice(total: Tensor) -> Tensor:
            units = np.rint(np.clip(total.numpy() / terms.step(clip), -terms.room, terms.room))
            units[hidden:] = np.clip(units[hidden:] + free, -terms.room, terms.room)
            units[:hidden] += skellam(generator, terms.full_variance, hidden)
            units[hidden:] += skellam(generator, terms.share_variance, len(units) - hidden)
            return torch.from_numpy(units)

        def in_reals(total: Tensor) -> Tensor:
            values = np.clip(total.numpy(), -terms.room, terms.room)
            at_silo = len(values) if terms.settings.noise == "silo" else hidden
            values[:at_silo] = with_gaussian(values[:at_silo], generator, terms.noise_multiplier * clip)
            return torch.from_numpy(values)

        return on_lattice if terms.resolution else in_reals

    def _once(self) -> int:
        if self._index < 0:
            raise ProtocolError(f"silo '{self.silo}': a sum index releases once")
        index, self._index = self._index, -1
        return index

    def _pay(self, phase: str, index: int) -> None:
        """Spend before release: nothing has left yet, and nothing does where this raises. A ledger that cannot be used,
        as where a clock was set back or a file may not be opened, is a RecordError: another error would be taken for a
        fault of the data, whose program may raise it."""
        assert self._charge is not None
        try:
            self._charge(phase, index)
        except (InputError, OSError) as error:
            raise RecordError(str(error)) from error
        self.paid += 1

    def _check_length(self, values: FloatArray, length: int) -> None:
        if values.shape != (length,):
            raise AggregationError(f"silo '{self.silo}': a contribution of {values.shape} where {length} were declared")

    def _within_bounds(self, values: FloatArray) -> FloatArray:
        self._check_length(values, self.table.size)
        within = np.abs(values) <= self.table.bounds  # false for NaN
        if within.all():
            self._check_presence(values)
            return values
        for name, inside in self.table.split(within.astype(np.float64)).items():
            if not inside.all():
                bound = next(b.bound for b in self.table.blocks if b.name == name)
                raise BoundError(
                    f"silo '{self.silo}': its part of '{name}' is not finite or exceeds the declared bound {bound:g}; "
                    "scale the data, lower learning_rate, or declare a larger bound"
                )
        raise AssertionError("unreachable")

    def _check_presence(self, values: FloatArray) -> None:
        """A block of presence says that this silo is there, and nothing of its data."""
        marked = [block.name for block in self.table.blocks if block.rows == "presence"]
        if not marked:
            return
        parts, own = self.table.split(values), [float(name == self.silo) for name in self._silos]
        for name in marked:
            if not np.array_equal(parts[name], own):
                raise AggregationError(f"silo '{self.silo}': its part of '{name}' must be a one in its own row alone")


def _clipped(rows: Tensor, norm: float) -> tuple[Tensor, int]:
    """Rows scaled to an L2 norm of at most `norm`, those with an entry that is not finite set to zero; their number."""
    finite = torch.isfinite(rows).all(1)
    kept = torch.where(finite.unsqueeze(1), rows, 0.0)
    factor = (norm / kept.norm(dim=1, keepdim=True).clamp(min=1e-300)).clamp(max=1.0)
    return kept * factor, int((~finite).sum())


# ---- Clipped sums by Opacus, with noise that is ours ----
#
# Opacus' per-layer optimiser clips each record's gradient, accumulates over chunks of a batch and calls for noise once;
# only where that noise comes from is replaced (its own replays from torch's seed).


@functools.lru_cache(maxsize=1)
def _optimizer() -> Any:
    """The class. Importing Opacus takes a second, for those alone who need it."""
    from opacus.optimizers.perlayeroptimizer import DPPerLayerOptimizer

    class Noised(DPPerLayerOptimizer):  # type: ignore[misc]
        def __init__(self, parts: Sequence[nn.Parameter], norms: Sequence[float], noise: Callable[[Tensor], Tensor]):
            super().__init__(
                torch.optim.SGD(parts, lr=1.0),
                noise_multiplier=0.0,
                max_grad_norm=list(norms),
                expected_batch_size=None,
                loss_reduction="sum",
            )
            self._noise = noise

        def add_noise(self) -> None:
            total = torch.cat([p.summed_grad.reshape(-1) for p in self.params])
            together = self._noise(total.cpu()).to(total.device)  # noise is drawn on the CPU
            for p, noised in zip(self.params, together.split([p.numel() for p in self.params]), strict=True):
                p.grad = noised.view_as(p)

    return Noised


def noisy_clipped_sum(
    chunks: Iterable[Sequence[Tensor]], sizes: Sequence[int], norms: Sequence[float], noise: Callable[[Tensor], Tensor]
) -> tuple[Tensor, int]:
    """Sum over records of parts clipped to L2 `norms`, plus noise; and how many records were dropped.

    Each chunk holds one float64 tensor (B, sizes[i]) a part, on any device; the result is on the CPU. A record with any
    entry that is not finite counts as zero. `noise` maps the clipped sum (sum(sizes),) to the noised one and is called
    exactly once, also where there are no records. The count of dropped records is for the silo's own eyes.
    """
    chunks = iter(chunks)
    first = next(chunks, None)
    device = first[0].device if first is not None else torch.device("cpu")
    parts = [nn.Parameter(torch.zeros(size, dtype=torch.float64, device=device)) for size in sizes]
    optimizer = _optimizer()(parts, norms, noise)
    dropped = 0
    for part in parts:  # a sum over no records is zero, and noised like any other
        part.summed_grad = torch.zeros_like(part.data)  # type: ignore[attr-defined]
    for chunk in itertools.chain([] if first is None else [first], chunks):
        finite = torch.isfinite(torch.stack([rows.sum(1) for rows in chunk]).sum(0))
        if not finite.all():  # a sum of finite entries may overflow, so look at each
            finite = torch.stack([torch.isfinite(rows).all(1) for rows in chunk]).all(0)
        dropped += int((~finite).sum())
        for part, rows in zip(parts, chunk, strict=True):
            part.grad_sample = torch.where(finite[:, None], rows, 0.0)  # type: ignore[attr-defined]
        optimizer.clip_and_accumulate()
        for part in parts:
            part.grad_sample = None  # type: ignore[attr-defined]
    optimizer.add_noise()
    return torch.cat([part.grad.cpu() for part in parts if part.grad is not None]).detach(), dropped


@functools.lru_cache(maxsize=1)
def check_machine() -> None:
    """Raise InputError where a matrix product rounds a row by where it stands, so that a record which joins would move
    the others: as MKL does on AMD's processors, unless `MKL_CBWR` is set before its first use (by `import secure_fvi`).
    """
    rng = torch.Generator().manual_seed(0)
    with threads(1):
        for (n, k, m), dtype in itertools.product(_PRODUCTS, (torch.float64, torch.float32)):
            rows, weights = torch.rand(n, k, generator=rng, dtype=dtype), torch.rand(k, m, generator=rng, dtype=dtype)
            ways = (lambda x, w=weights: x @ w, lambda x, w=weights: x @ w[:, 0], lambda x, w=weights: (w.mT @ x.mT).mT)
            for way, places in itertools.product(ways, _MOVED):
                if not torch.equal(way(rows.roll(places, 0)).roll(-places, 0), way(rows)):
                    raise InputError(
                        "record privacy: on this machine a matrix product rounds a row by its place among the others, "
                        "so that one record would change other records' numbers; set the environment variable "
                        "MKL_CBWR=COMPATIBLE before Python starts"
                    )
