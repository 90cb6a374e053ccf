"""Reading MessagePack: its shape is looked at before anything of it is built.

A few megabytes of empty arrays become gigabytes of objects, and no limit of MessagePack's own bounds their number. So
`decode` walks over the heads of what came, by the shape that is expected there, and refuses at the first head that is
out of it; lengths are bounded by what the receiver knows. What is built after that is no larger than what was sent.
Everything that reads MessagePack reads it here, tests apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from secure_fvi.errors import InputError, ProtocolError

if TYPE_CHECKING:
    from torch import Tensor

#: No message is longer, whatever else is known.
MAX_MESSAGE_BYTES = 1 << 31
#: Elements of a list or map of a message whose receiver knows no better bound.
MOST_ITEMS = 1 << 14
#: What is shorter is built at once: it cannot become many objects.
SHORT = 1 << 12
_LONGEST_HEADER = 1 << 20

Check = Callable[[Any], bool]
_INT, _FLOAT, _BOOL, _NIL, _TEXT, _BYTES, _ARRAY, _MAP, _EXT = range(9)


class Limit(NamedTuple):
    """What a receiver knows of a message before it comes. items: in any one of its lists and maps."""

    bytes: int = MAX_MESSAGE_BYTES
    items: int = MOST_ITEMS


class _Refused(Exception):
    """Not of the shape. Says nothing: what a message holds is quoted nowhere."""


class _Head(NamedTuple):
    """What a first byte says. width: bytes of the count that follows it; fixed: the count where none follows."""

    kind: int
    width: int
    fixed: int


def _heads() -> list[_Head | None]:
    heads: list[_Head | None] = [_Head(_INT, 0, 0)] * 0x80
    heads += [_Head(kind, 0, n) for kind, most in ((_MAP, 16), (_ARRAY, 16), (_TEXT, 32)) for n in range(most)]
    heads += [_Head(_NIL, 0, 0), None, _Head(_BOOL, 0, 0), _Head(_BOOL, 0, 0)]
    heads += [_Head(kind, width, 0) for kind in (_BYTES, _EXT) for width in (1, 2, 4)]
    heads += [_Head(_FLOAT, 0, 4), _Head(_FLOAT, 0, 8)]
    heads += [_Head(_INT, 0, n) for n in (1, 2, 4, 8)] * 2
    heads += [_Head(_EXT, 0, n) for n in (1, 2, 4, 8, 16)]
    heads += [_Head(_TEXT, width, 0) for width in (1, 2, 4)]
    heads += [_Head(kind, width, 0) for kind in (_ARRAY, _MAP) for width in (2, 4)]
    return heads + [_Head(_INT, 0, 0)] * 0x20


_HEADS = _heads()


class Walk:
    """A way over the heads of `data`; `at` is where the next one begins."""

    __slots__ = ("at", "data", "items")

    def __init__(self, data: memoryview, items: int) -> None:
        self.data, self.items, self.at = data, items, 0

    def head(self) -> tuple[int, int]:
        """Kind and count: elements of an array or map, else bytes. Whatever they are bytes of has to be there."""
        data, at = self.data, self.at
        if at >= len(data):
            raise _Refused
        head = _HEADS[data[at]]
        if head is None:
            raise _Refused
        kind, width, count = head
        at += 1
        if width:  # one that is cut off ends behind the data, as does whatever it states
            count = int.from_bytes(data[at : at + width], "big")
            at += width
        self.at = at
        if kind != _ARRAY and kind != _MAP:
            self.at += count + (kind == _EXT)
            if self.at > len(data):
                raise _Refused
        elif count * (1 + (kind == _MAP)) > len(data) - at:
            raise _Refused
        return kind, count


class Shape:
    """What may stand at one place. Called with a value, whether it is what should stand there."""

    def walk(self, walk: Walk) -> None:
        """Go over what stands here; raises for what is not of this shape."""
        raise NotImplementedError

    def walked_over(self, walk: Walk, count: int) -> bool:
        """Go over `count` of them at once where that can be seen to be right; False, and nothing is done, elsewhere."""
        return False

    def __call__(self, value: Any) -> bool:
        raise NotImplementedError

    def test(self) -> Check:
        """What says the same of a value, with as few calls as may be."""
        return self


class _Leaf(Shape):
    """Something that holds nothing else: of one of `kinds`, of `least` to `most` bytes, and as `test` says."""

    def __init__(self, kinds: Sequence[int], test: Check, least: int = 0, most: int = MAX_MESSAGE_BYTES) -> None:
        self._kinds, self._test, self._least, self._most = frozenset(kinds), test, least, most

    def walk(self, walk: Walk) -> None:
        kind, count = walk.head()
        if kind not in self._kinds or not self._least <= count <= self._most:
            raise _Refused

    def walked_over(self, walk: Walk, count: int) -> bool:
        length = self._most
        if length != self._least or length > 255 or _BYTES not in self._kinds:
            return False
        end, step = walk.at + count * (2 + length), 2 + length
        if end > len(walk.data) or any(
            bytes(walk.data[walk.at + i : end : step]) != bytes([b]) * count for i, b in ((0, 0xC4), (1, length))
        ):
            return False
        walk.at = end
        return True

    def __call__(self, value: Any) -> bool:
        return self._test(value)

    def test(self) -> Check:
        return self._test


class Listed(Shape):
    """A list of at most `most` elements, and of no more than the receiver expects."""

    def __init__(self, each: Check, most: int = MAX_MESSAGE_BYTES, least: int = 0) -> None:
        self._each, self._most, self._least = shape(each), most, least
        self._of_each = self._each.test()

    def walk(self, walk: Walk) -> None:
        kind, count = walk.head()
        if kind != _ARRAY or not self._least <= count <= min(self._most, walk.items):
            raise _Refused
        if not self._each.walked_over(walk, count):
            for _ in range(count):
                self._each.walk(walk)

    def __call__(self, value: Any) -> bool:
        return type(value) is list and self._least <= len(value) <= self._most and all(map(self._of_each, value))


class Row(Shape):
    """A list of exactly these elements."""

    def __init__(self, *fields: Check) -> None:
        self._fields = tuple(shape(f) for f in fields)

    def walk(self, walk: Walk) -> None:
        if walk.head() != (_ARRAY, len(self._fields)):
            raise _Refused
        for field in self._fields:
            field.walk(walk)

    def __call__(self, value: Any) -> bool:
        return (
            type(value) is list
            and len(value) == len(self._fields)
            and all(field(v) for field, v in zip(self._fields, value, strict=True))
        )


class Mapped(Shape):
    """A table of text keys, of no more entries than the receiver expects."""

    def __init__(self, each: Check, key: Check | None = None) -> None:
        self._each, self._key = shape(each), shape(key or text())

    def walk(self, walk: Walk) -> None:
        kind, count = walk.head()
        if kind != _MAP or count > walk.items:
            raise _Refused
        for _ in range(count):
            self._key.walk(walk)
            self._each.walk(walk)

    def __call__(self, value: Any) -> bool:
        return type(value) is dict and all(self._key(k) and self._each(v) for k, v in value.items())


class Anything(Shape):
    """Whatever it is, of at most `elements` parts in all, at most `depth` deep. For what this program wrote itself."""

    def __init__(self, elements: int, depth: int = 32, extended: bool = False) -> None:
        """extended: with MessagePack's own types of the program."""
        self._elements, self._depth, self._extended = elements, depth, extended

    def walk(self, walk: Walk) -> None:
        left, open_ = self._elements, [1]
        while open_:
            if not open_[-1]:
                open_.pop()
                continue
            open_[-1] -= 1
            left -= 1
            kind, count = walk.head()
            if left < 0 or (kind == _EXT and not self._extended):
                raise _Refused
            if kind in (_ARRAY, _MAP):
                open_.append(count * (1 + (kind == _MAP)))
                if len(open_) > self._depth:
                    raise _Refused

    def __call__(self, value: Any) -> bool:
        return True


class _Checked(Anything):
    """A check that knows no shape: a value, or a list of values."""

    def __init__(self, check: Check) -> None:
        super().__init__(4 * MOST_ITEMS, 3)
        self._check = check

    def __call__(self, value: Any) -> bool:
        return self._check(value)


def shape(check: Check) -> Shape:
    """`check` as a shape."""
    return check if isinstance(check, Shape) else _Checked(check)


#: Versions of the protocol that this release speaks, oldest first: all that parties say to each other once they have
#: greeted. A change of the bytes of a message is a new one (`tests/wire/`). One stands here as long as this release
#: writes and reads each of its messages in that version's form.
PROTOCOLS = (10,)


def agreed(spoken: Mapping[str, Sequence[int]]) -> int:
    """The highest protocol version that all parties speak. Raises ProtocolError, which names who speaks which."""
    common = set.intersection(*(set(versions) for versions in spoken.values()))
    if not common:
        told = ", ".join(f"{who} {' or '.join(map(str, sorted(of)))}" for who, of in spoken.items())
        raise ProtocolError(f"no version of the protocol that all speak ({told}); upgrade secure-fvi where it is older")
    return max(common)


def whole(below: int = 2**63, least: int = 0) -> Shape:
    """A whole number, least <= n < below."""
    return _Leaf([_INT], lambda v: type(v) is int and least <= v < below)


def one_of(*values: int | bytes) -> Shape:
    """One of these numbers or byte strings: of no other type, equal or not."""
    kinds = {_BYTES if isinstance(v, bytes) else _INT for v in values}
    longest = max(len(v) if isinstance(v, bytes) else 0 for v in values)
    return _Leaf(sorted(kinds), lambda v: type(v) in (int, bytes) and v in values, 0, longest)


def binary(*lengths: int, most: int = MAX_MESSAGE_BYTES) -> Shape:
    """Bytes, of one of `lengths` where given."""
    least, most = (min(lengths), max(lengths)) if lengths else (0, most)
    if lengths:
        return _Leaf([_BYTES], lambda v: type(v) is bytes and len(v) in lengths, least, most)
    return _Leaf([_BYTES], lambda v: type(v) is bytes and len(v) <= most, least, most)


def text(most: int = 200, least: int = 0, printable: bool = False) -> Shape:
    """Text of `least` to `most` characters."""
    return _Leaf(
        [_TEXT],
        lambda v: type(v) is str and least <= len(v) <= most and (not printable or v.isprintable()),
        least,
        4 * most,
    )


#: A number.
real = _Leaf([_INT, _FLOAT], lambda v: type(v) in (int, float))
#: One of the types that a value without parts can have.
plain = _Leaf([_INT, _FLOAT, _BOOL, _NIL, _TEXT], lambda v: v is None or type(v) in (bool, int, float, str))
flag = _Leaf([_BOOL], lambda v: type(v) is bool)


def begun(data: Any, limit: Limit, what: str = "a message") -> Walk:
    """A walk over `data`. Raises ProtocolError for what is no bytes, or more than are expected."""
    if not isinstance(data, bytes | bytearray | memoryview) or len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"{what} must be bytes of at most 2 GiB")
    if len(data) > limit.bytes:
        raise ProtocolError(f"{what} of {len(data)} bytes, where at most {limit.bytes} are expected")
    return Walk(memoryview(data), limit.items)


def fits(walk: Walk, expected: Shape) -> bool:
    """Whether what stands next is of this shape; the walk is behind it then."""
    try:
        expected.walk(walk)
    except _Refused:
        return False
    return True


def ended(walk: Walk) -> bool:
    return walk.at == len(walk.data)


def array(walk: Walk) -> int | None:
    """How many elements the array has that stands next, its head gone over; None where none stands there."""
    try:
        kind, count = walk.head()
    except _Refused:
        return None
    return count if kind == _ARRAY else None


def built(data: bytes | memoryview, **options: Any) -> Any:
    """What `data` holds, whose shape was gone over. Raises ValueError for text that is no UTF-8 and the like."""
    return msgpack.unpackb(data, **options)


def decode(data: Any, expected: Shape, limit: Limit | None = None, what: str = "a message") -> Any:
    """What `data` holds, exactly of the shape `expected`. Raises ProtocolError, which quotes nothing of it."""
    walk = begun(data, limit or Limit(), what)
    if len(data) > SHORT and not (fits(walk, expected) and ended(walk)):
        raise ProtocolError(f"{what} is not of the form that is expected here")
    try:
        found = built(data)
    except (
        ValueError,
        RecursionError,
        TypeError,
    ):  # msgpack's own errors are ValueErrors too, and may hold the content
        raise ProtocolError(f"{what} is not well-formed MessagePack") from None
    if not expected(found):
        raise ProtocolError(f"{what} is not of the form that is expected here")
    return found


#: What this program wrote for itself may be as long as it is, and still nests no deeper than it writes.
OWN = Anything(1 << 26, 24)


def own(data: bytes, what: str, expected: Shape = OWN, **options: Any) -> Any:
    """What this party wrote for itself. Raises InputError, which calls it `what`, where that was damaged."""
    walk = Walk(memoryview(data), MAX_MESSAGE_BYTES)
    if fits(walk, expected) and ended(walk):
        try:
            found = built(data, strict_map_key=False, **options)
        except (ValueError, RecursionError, TypeError):
            found = None
        if found is not None and expected(found):
            return found
    raise InputError(f"{what} is damaged, or was written by another version; restore it from its newest copy")


def tensors(data: bytes, what: str, most: int = MOST_ITEMS) -> dict[str, Tensor]:
    """The safetensors in `data`, at most `most` of them. Raises ProtocolError for anything else.

    Its header is JSON of a length that it states itself: that is looked at first.
    """
    from safetensors.torch import load  # which loads torch: a ledger does without

    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, _LONGEST_HEADER):
        raise ProtocolError(f"{what} is no safetensors, or has too long a header")
    try:
        header = json.loads(bytes(data[8 : 8 + length]))
        if not isinstance(header, dict) or len(header) > most:
            raise ValueError
        found: dict[str, Tensor] = load(data)
    except Exception:  # whatever malformed bytes make two parsers raise
        raise ProtocolError(f"{what} is no safetensors of at most {most} tensors") from None
    return found


def same_form(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Whether two tables of tensors have the same names and shapes."""
    return {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in expected.items()}
