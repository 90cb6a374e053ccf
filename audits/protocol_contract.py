"""What a protocol audit needs of a secure sum, and how attempts at it become rows.

An implementation is wrapped once and met by every probe that its wrapper can serve:

    Session         contributions and totals: uniformity, repeated masks, broadcasts shown twice
    MaskedInside    also what is left of a contribution once all other silos collude: seeds of few bits
    CheatedServer   also a server that asks for shares as it likes: both secrets of a silo
    Impersonated    also keys of the server's own in place of the other silos'

The auditor holds all parties, so a wrapper may play any of them. Each probe runs against the implementation and against
a copy of it that lacks what the probe is after (`protocol_weak` has ours); a row counts only if the copy is caught.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from secure_fvi.aggregation.base import BlockTable, FloatArray
from secure_fvi.audits.base import CONTROL_CONFIDENCE, AuditRow, Control, judge
from secure_fvi.audits.scores import proportion
from secure_fvi.errors import AggregationError, InputError, ProtocolError

Words = npt.NDArray[np.uint64]
#: Where the signatures on a survivor set come from: asked of the silos; one too few; those of an earlier sum.
Signatures = Literal["asked", "short", "old"]
#: How a server dresses up keys of its own: unsigned; signed by a colluder; adverts of an earlier session or of an
#: earlier set-up of this one, whose keys it has; under another roster, shown to the silo when it is started anew.
Forgery = Literal["forged", "borrowed", "old session", "old set-up", "other roster"]
#: What refuses: a party that raises one of these released nothing.
REFUSALS = (ProtocolError, AggregationError, InputError)

#: Of numbers read off, in units of their block's bound: uniform words come this close with chance 1e-9 a number.
_CLOSE = 1e-9


class Session(Protocol):
    """One session of a secure sum, set up, in the auditor's process or carried by an engine."""

    @property
    def silos(self) -> tuple[str, ...]: ...

    @property
    def table(self) -> BlockTable:
        """The blocks of every contribution; the first is one integer of bound 1e6."""
        ...

    @property
    def modulus(self) -> int:
        """Words lie in 0 .. modulus - 1."""
        ...

    def prepare(self, index: int) -> None:
        """All that the server exchanges before contributions to sum `index`."""
        ...

    def contribute(self, silo: str, index: int, values: FloatArray, context: bytes) -> bytes:
        """What `silo` sends for the broadcast whose SHA-256 is `context`. Raises ProtocolError where it refuses."""
        ...

    def words(self, message: bytes) -> Words:
        """The ring elements (table.size,) of a contribution, as server or key holder sees them."""
        ...

    def decode(self, words: Words) -> FloatArray:
        """The numbers that unmasked ring elements stand for."""
        ...

    def total(self, index: int, messages: Mapping[str, bytes], context: bytes) -> FloatArray:
        """The sum as an honest server works it out. Raises AggregationError where there is none."""
        ...

    def restart(self, silo: str) -> None:
        """`silo` is killed and started again over what it stored."""
        ...

    def backup(self) -> Any:
        """What all silos have stored."""
        ...

    def restore(self, backup: Any, silos: Collection[str]) -> None:
        """`silos` are killed and started again over what they had stored at `backup`."""
        ...


class MaskedInside(Session, Protocol):
    """A sum whose contributions carry one mask per pair of silos and one of the silo's own."""

    def left(self, victim: str, index: int, message: bytes, context: bytes) -> Words:
        """`words(message)` less all masks that the other silos know: the input plus the victim's own mask."""
        ...


class CheatedServer(Session, Protocol):
    """A sum under a server that asks for shares as it likes and keeps all that comes."""

    @property
    def colluders(self) -> Collection[str]:
        """Silos that sign and reveal whatever the server asks."""
        ...

    def ask(
        self,
        index: int,
        survivors: Sequence[str],
        context: bytes,
        signatures: Signatures = "asked",
        holders: Collection[str] | None = None,
    ) -> list[str]:
        """Have `holders` (None: all silos) sign and reveal for `survivors`; the refusals, in words."""
        ...

    def ask_both(self, index: int, victim: str, context: bytes) -> list[str]:
        """The best single message that asks for both secrets of `victim`, to every silo; the refusals."""
        ...

    def open(
        self, victim: str, index: int, message: bytes, context: bytes, colluders: Collection[str] = ()
    ) -> FloatArray | None:
        """The victim's numbers from the shares got together and from what `colluders` know, or None."""
        ...


class Impersonated(Session, Protocol):
    """A sum under a server that stands between a silo and all others."""

    def impersonate(self, victim: str, how: Forgery, values: FloatArray, context: bytes) -> FloatArray:
        """Set-up and one contribution of `victim`, whose peers are all the server; what the server reads.

        Raises one of `REFUSALS` where the victim refuses.
        """
        ...


S_co = TypeVar("S_co", bound=Session, covariant=True)


class Subject(Protocol[S_co]):
    """An implementation under audit, or its weak copy."""

    @property
    def name(self) -> str:
        """The row's protection; of a weak copy, what is wrong with it."""
        ...

    def open(self) -> S_co:
        """A fresh session, set up, sum 0 prepared."""
        ...


class Attempt(NamedTuple):
    """One try at numbers that the protocol is to hide."""

    read: FloatArray | None  # what the adversary has; None where it was refused or cannot tell
    truth: FloatArray
    decoy: FloatArray  # drawn like `truth`, never put in
    refusal: str = ""


class Tally(NamedTuple):
    hits: int
    false: int
    attempts: int
    refusals: Counter[str]


def matches(read: FloatArray | None, truth: FloatArray, bounds: FloatArray) -> bool:
    """Whether the adversary has all numbers."""
    return read is not None and bool((np.abs(read - truth) <= _CLOSE * bounds).all())


def tally(attempts: Sequence[Attempt], bounds: FloatArray) -> Tally:
    """How many attempts read the truth, and how many what was never there."""
    return Tally(
        sum(matches(a.read, a.truth, bounds) for a in attempts),
        sum(matches(a.read, a.decoy, bounds) for a in attempts),
        len(attempts),
        Counter(a.refusal for a in attempts if a.refusal),
    )


def rate_row(
    attack: str, protection: str, found: Tally, weak: Tally, copy: str, negative: Control, **detail: Any
) -> AuditRow:
    """The row of a share of attempts; `copy` says what the weak copy lacks."""
    positive = Control(proportion(weak.hits, weak.attempts), f"the same against a copy with {copy}")
    detail |= {"attempts": found.attempts, "refusals": dict(found.refusals)}
    estimate = proportion(found.hits, found.attempts)
    return judge(attack, protection, "share of attempts that succeeded", estimate, positive, negative, **detail)


def misread(found: Tally, weak: Tally, what: str) -> Control:
    """How often attempts at either gave what was never there."""
    false, attempts = found.false + weak.false, found.attempts + weak.attempts
    return Control(proportion(false, attempts, CONTROL_CONFIDENCE), what)


S = TypeVar("S", bound=Session)


def attempts_row(
    attack: str,
    subject: Subject[S],
    weak: Subject[S],
    play: Callable[[Subject[S]], tuple[list[Attempt], FloatArray]],
    **detail: Any,
) -> AuditRow:
    """Play an attack against both; `play` gives the attempts and the bounds of their numbers."""
    found, against = (tally(*play(one)) for one in (subject, weak))
    negative = misread(found, against, "the numbers read, compared with numbers that were never put in")
    return rate_row(attack, subject.name, found, against, weak.name, negative, **detail)


def random_values(rng: np.random.Generator, table: BlockTable) -> FloatArray:
    """Numbers within the bounds of `table`, whole where they must be."""
    values = rng.uniform(-1, 1, table.size) * table.bounds
    whole = np.repeat([b.integer for b in table.blocks], [b.size for b in table.blocks])
    return np.asarray(np.where(whole, np.rint(values), values), dtype=np.float64)
