"""The contract of every secure sum: what goes in, what comes out, who holds which half.

One sum of J silos, as the driver sees it (all messages are bytes; `Exchanges` is one request to each silo and
one reply from each that answered):

    server half                          silo half (one per silo)
    prepare(index)        <- exchanges -> handle(message)            set-up, refill of one-time secrets
                                         contribute(index, ...)      the only step that sees a value
    total(index, ...)     <- exchanges -> handle(message)            agree on survivors, unmask, add

The server half learns the survivors and their total, nothing else; which adversary that holds against is the
business of each kind (docs/threat-model.md).
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeVar

import msgpack
import numpy as np
import numpy.typing as npt

from secure_fvi import wire
from secure_fvi.errors import InputError, ProtocolError

if TYPE_CHECKING:
    from secure_fvi.aggregation.masked import Masked
    from secure_fvi.aggregation.roster import Identity, Roster
    from secure_fvi.aggregation.store import Store

T = TypeVar("T")

FloatArray = npt.NDArray[np.float64]
#: Yields one message per silo id, is sent the replies of those that answered, returns T.
Exchanges = Generator[Mapping[str, bytes], Mapping[str, bytes], T]


def carry(exchanges: Exchanges[T], exchange: Callable[[Mapping[str, bytes]], Mapping[str, bytes]]) -> T:
    """Drive a server's generator to its result; `exchange` takes messages by silo and brings back the replies."""
    try:
        messages = next(exchanges)
        while True:
            messages = exchanges.send(exchange(messages))
    except StopIteration as stop:
        result: T = stop.value
        return result


@dataclass(frozen=True)
class Block:
    """One named part of a contribution.

    `bound` is the largest absolute value that one element of one silo's contribution may take. Ring range,
    clipping norm, sensitivity and ledger event all derive from it. `integer` blocks are summed exactly.
    `rows` says whether the total is symmetric in the silos: "all", every element is a sum over silos; "silo", a row
    belongs to one silo and is zero in the others' contributions, so that the total shows that silo's own values;
    "presence", a silo's own row is one and its others zero, which tells no more than who is in the total; "some", a
    total is one where some silo's element is not zero, and zero else: whoever has one there sends it uniform over the
    ring, so that a masked total does not say how many did, or which.
    """

    name: str
    shape: tuple[int, ...]
    bound: float
    integer: bool = False
    rows: Literal["all", "silo", "presence", "some"] = "all"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bound) and self.bound > 0):
            raise InputError(f"block '{self.name}': bound must be positive and finite, not {self.bound}")
        if self.rows == "some" and not self.integer:
            raise InputError(f"block '{self.name}': whether some silo's is not zero is asked of whole numbers")

    @property
    def size(self) -> int:
        return math.prod(self.shape)


#: In every sum without differential privacy, zeros: of a silo whose data cannot answer all that it sends is uniform
#: over the ring, this too, which the few numbers of a small sum might not show.
UNABLE = Block("unable", (2,), 1.0)


@dataclass(frozen=True)
class BlockTable:
    """The blocks of one phase, in order. Every party derives the same table; its digest enters mask keys."""

    blocks: tuple[Block, ...]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        names = [b.name for b in self.blocks]
        if len(set(names)) != len(names):
            raise InputError(f"block names must differ, got {names}")
        object.__setattr__(self, "size", sum(b.size for b in self.blocks))

    @cached_property
    def packed(self) -> bytes:
        """Names, shapes, bounds, kinds and whose rows they have: for who has no table and is shown its digest."""
        return bytes(msgpack.packb([[b.name, list(b.shape), float(b.bound), b.integer, b.rows] for b in self.blocks]))

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over `packed`: 32 bytes."""
        return table_digest(self.packed)

    @cached_property
    def bounds(self) -> FloatArray:
        """Bound of each element, shape (size,)."""
        return np.repeat([b.bound for b in self.blocks], [b.size for b in self.blocks]).astype(np.float64)

    @cached_property
    def some(self) -> npt.NDArray[np.bool_]:
        """(size,) which elements say of a total whether some silo's is not zero, and no more."""
        return np.repeat([b.rows == "some" for b in self.blocks], [b.size for b in self.blocks]).astype(bool)

    def told(self, sum_: FloatArray) -> FloatArray:
        """What a total says, of the sum over silos; both (size,)."""
        return np.where(self.some, (sum_ != 0).astype(np.float64), sum_) if self.some.any() else sum_

    def split(self, flat: FloatArray) -> dict[str, FloatArray]:
        """Views of `flat` (size,) by block name, in each block's shape."""
        out, start = {}, 0
        for block in self.blocks:
            out[block.name] = flat[start : start + block.size].reshape(block.shape)
            start += block.size
        return out


def table_digest(packed: bytes) -> bytes:
    """`BlockTable.digest` of what is `BlockTable.packed`."""
    return hashlib.sha256(b"secure-fvi/block-table/2" + packed).digest()


#: `BlockTable.packed`: of each block its name, shape, bound, whether it is of whole numbers, and whose rows it has.
_PACKED = wire.Listed(wire.Row(wire.text(1 << 12), wire.Listed(wire.whole(), 64), wire.real, wire.flag, wire.text(16)))


def size_of(packed: bytes, digest: bytes) -> int:
    """How many values the table has that is named by `digest`. Raises ProtocolError where `packed` is another's."""
    if table_digest(packed) != digest:
        raise ProtocolError("the blocks are not those of the table that was signed")
    return sum(math.prod(shape) for _, shape, *_ in wire.decode(packed, _PACKED, what="a block table"))


class Total(NamedTuple):
    """What the server half ends with."""

    values: FloatArray  # (size,) the sum over survivors, decoded
    survivors: tuple[str, ...]  # silo ids, sorted


class SumSilo(Protocol):
    """A silo's half. It never opens a connection; the engine carries its bytes. What is said here of signatures holds
    of sums in clear, which have none."""

    def contribute(
        self,
        index: int,
        cohort: Sequence[str],
        table: BlockTable,
        values: FloatArray,
        context: bytes,
        question: bytes = b"",
        most_missing: int | None = None,
        past: Mapping[str, bytes] | None = None,
        spoiled: bool = False,
    ) -> bytes:
        """Protect `values` (table.size,) for sum `index`.

        `cohort` are the ids asked to contribute; `context` (32 bytes) is the SHA-256 of the broadcast that
        the values answer, so that a server which shows two silos different broadcasts gets noise. `question` (32 bytes,
        or none) names what is asked, whatever the index: of all sums of one question a silo signs one set of survivors,
        since two totals of the same values over two sets would give the difference away. `most_missing`: how many
        of the cohort this silo lets be missing from the total, where that is fewer than it lets in general. `past`: by
        silo id, 32 bytes that name all that this silo and that one were asked together before, or nothing; a whole sum
        (`whole`) with one of another account is noise. An index is used at most once. `spoiled`: whatever the values
        are, the total is uniform over the ring, and nobody can tell whose contribution made it so; where `spoils`.
        Raises AggregationError for a value that is not finite or past its bound,
        ProtocolError for a used index or a cohort under the minimum; nothing is revealed then.
        """
        ...

    @property
    def spoils(self) -> bool:
        """Whether a contribution may be `spoiled`: not where others see it, or decrypt totals, without masks."""
        return False

    @property
    def whole(self) -> bool:
        """Whether a total is of its whole cohort or there is none, so that no sum is signed, and a question that was
        answered is asked again until there is its total."""
        return False

    @property
    def keys(self) -> bytes:
        """What names the keys under which whole sums are masked: session, roster and key set. Empty where sums are not
        whole, or before the keys are agreed on."""
        return b""

    def absent_from(self, question: bytes) -> tuple[str, ...] | None:
        """Whom of its cohort the survivors lacked that this silo signed for `question`, or was shown; None if none."""
        return None

    def shown(self, question: bytes) -> bool | None:
        """Whether enough silos' signatures came in on a sum of this very `question` with this silo's term in it, so
        that what all of them answered was one question; None for sums that are not signed."""
        return None

    def left_out(self, question: bytes) -> bool | None:
        """Whether enough silos' signatures came in on survivors of this very `question` without this silo, so that its
        answer is in no total of it; None for sums that are not signed."""
        return None

    def handle(self, message: bytes) -> bytes:
        """Answer one message of `prepare` or `total`. Raises ProtocolError for what the protocol refuses."""
        ...


class SumServer(Protocol):
    """The server's half, as generators over exchanges; a silo missing from the replies has dropped out."""

    def prepare(self, index: int) -> Exchanges[None]:
        """Put in place what sum `index` needs (keys, one-time secrets); usually no exchange at all."""
        ...

    def total(
        self,
        index: int,
        cohort: Sequence[str],
        table: BlockTable,
        contributions: Mapping[str, bytes],
        context: bytes,
        question: bytes | None = None,
    ) -> Exchanges[Total]:
        """Add the contributions that arrived. Raises AggregationError when too few survive. `question`: what silos were
        asked (see `SumSilo.contribute`), so that who names another is known; where None, most of them have to agree."""
        ...


#: Kinds of sums; the two long names are their weaker forms, which a site has to allow by name.
Form = Literal["plain", "masked", "homomorphic", "masked-unchecked", "homomorphic-unmasked"]


class Codec(Protocol):
    """What encodes the contributions to one block table."""

    @property
    def resolution(self) -> FloatArray:
        """The step of each element, shape (size,)."""
        ...


class Seat(NamedTuple):
    """A silo's place in a session's sums; see `MaskedSilo`. roster: None where nothing lies `beneath` them."""

    roster: Roster | None
    silo: str
    identity: Identity
    store: Store
    min_cohort: int
    max_missing: int | None = None
    questions: Store | None = None


class SecureSum(Protocol):
    """A kind of sum, as the user configures it (`sf.Plain()`, `sf.Masked(min_cohort=3)`, ...) and a silo needs it; all
    parties of one are in `aggregation.parties`."""

    @property
    def kind(self) -> str: ...

    @property
    def form(self) -> Form:
        """The kind; its weaker form has a name of its own."""
        ...

    def codec(self, silos: int) -> Callable[[BlockTable], Codec] | None:
        """What encodes contributions of `silos` silos, by table; it raises InputError for blocks that the sums cannot
        carry. None where values travel as they are."""
        ...

    def beneath(self, bits: Literal[32, 64]) -> Masked | None:
        """The masked sums whose keys, graph and signatures these use; None where there are none."""
        ...

    def at_silo(self, seat: Seat) -> SumSilo:
        """One silo's half."""
        ...


def check_silo_ids(silo_ids: Iterable[str]) -> tuple[str, ...]:
    """The ids, sorted; raises InputError when one is empty, no text, or stands twice."""
    ids = sorted(silo_ids)
    if not ids:
        raise InputError("a secure sum needs at least one silo")
    for a, b in itertools.pairwise(ids):
        if a == b:
            raise InputError(f"two silos have the id '{a}'; ids must differ")
    if "" in ids:
        raise InputError("a silo id is empty")
    for name in ids:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InputError(f"silo id {name!a} is no text: it holds half of a character") from None
    return tuple(ids)
