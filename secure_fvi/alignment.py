"""Private matching: silos that hold different columns of the same people find the people that all of them hold.

    silo      lists its identifiers, normalised, with 64 checks that every list holds, in a secret order; signs how many
    silo      `Blinded`: r H(x) for each of a batch, r fresh and its own; signed
    others    `Evaluated`: k_j r H(x), k_j silo j's key of this session; each place of a list once, and no more places
              than were signed for
    silo      S(x) = SHA-256(x, k_1 H(x), ..., k_n H(x)): r taken off, its own key applied. Sends F(x) = SHA-256(S(x))
              of all, sorted
    matcher   those that all silos sent; it has no key and sees no identifier; any party, usually the server
    silo      signs these with its place and the S(x) of them, which it can who lists them, and nobody who copied F(x)
    silo      its rows in that order, once all silos have signed so; its digest binds the job

F is n oblivious pseudorandom functions side by side (2HashDH: Jarecki, Kiayias, Krawczyk and Xu 2016; RFC 9497) in the
group Ristretto255 (RFC 9496). Without silo j's evaluation nobody, the matcher and all others together included, can
tell F(x) from random bytes. An owner asks each silo itself, and not one through the other: in a chain, whoever stands
in the middle could send points of its own in the owner's name. Group and hash to it are libsodium's (`rbcl`).

Whatever is not certain is left out and counted, never guessed: identifiers that are missing, that break their rule,
that stand twice, that another silo lacks. What each party learns is in docs/vertical-alignment.md.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import itertools
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from secure_fvi import wire
from secure_fvi.aggregation.base import Exchanges, carry
from secure_fvi.aggregation.messages import Codec
from secure_fvi.aggregation.prg import derive_key, digest
from secure_fvi.aggregation.roster import Identity, Roster
from secure_fvi.aggregation.session import number
from secure_fvi.aggregation.store import MemoryStore, Store
from secure_fvi.errors import AggregationError, InputError, ProtocolError

BATCH = 4096  # places of a list that are evaluated at once
CHECKS = 64  # known to all silos and in every list: whoever answers wrongly misses some of them
LARGEST = 1 << 20  # places in another silo's list, and so identifiers that it may test against this one's
_MOST = 1 << 26
_POINT = _OUTPUT = 32
_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_KINDS = "text, name, date, date-dmy, date-mdy, postcode, or a number that python-stdnum knows ('gb.nhs', 'luhn')"

Item = TypeVar("Item")
Message = TypeVar("Message", bound=tuple[Any, ...])


# ---- How identifiers are written ----


@dataclass(frozen=True)
class Normalisation:
    """How an identifier is written before it is matched; all silos must use the same.

    rules: one for each column that makes up the identifier.

    text        as the four fields below say: Unicode form, white space at the ends, case, and characters to drop
                wherever they stand ("-. " in telephone numbers, say). Leading zeros stay: whether "007" is "7" is for
                the data's owners to decide
    name        letters alone, without case and accents: "O'Brien-Łęcki" is "obrienlecki". "Müller" is "muller", and
                "Mueller" is another
    date        year, month and day in this order, as 2001-02-03; with midnight or nothing after it. date-dmy and
                date-mdy: also 3.2.2001 and 2/3/2001. A date that is none, or has two digits for a year, breaks the rule
    postcode    letters and digits, without case
    gb.nhs, ... a number of a form, length and check digit that python-stdnum knows (`stdnum.gb.nhs`), or `luhn`,
                `verhoeff`, `iso7064.mod_97_10` alone
    """

    rules: tuple[str, ...] = ("text",)
    unicode_form: Literal["NFC", "NFD", "NFKC", "NFKD"] = "NFKC"
    strip: bool = True
    casefold: bool = True
    drop: str = ""

    def __post_init__(self) -> None:
        if self.unicode_form not in _FORMS:
            raise InputError(f"unicode_form '{self.unicode_form}' is unknown; choose {', '.join(_FORMS)}")
        if not self.rules:
            raise InputError(f"rules: at least one is needed; choose {_KINDS}")
        _ = self._written

    @functools.cached_property
    def _written(self) -> tuple[Callable[[str], str | None], ...]:
        """By column, what makes one way of writing of all; None for what breaks the rule."""
        return tuple(self._text if rule == "text" else _RULES.get(rule) or _numbered(rule) for rule in self.rules)

    def apply(self, identifier: str | Sequence[str | None] | None) -> str | None:
        """The identifier as it is matched, of one column a text, of several a sequence of them: "" where one of them is
        missing, None where one breaks its rule. Raises InputError for what is no text."""
        parts = [identifier] if isinstance(identifier, str | None) else identifier
        if not isinstance(parts, list | tuple) or any(not isinstance(p, str | None) for p in parts):
            raise InputError("identifiers must be text, alike at all silos; convert numbers first, leading zeros too")
        if len(parts) != len(self.rules):
            raise InputError(
                f"an identifier of {len(parts)} columns, and {len(self.rules)} rules; one for each is needed"
            )
        written = [rule(part) if part else "" for rule, part in zip(self._written, parts, strict=True)]
        if any(w == "" for w in written):
            return ""
        if any(w is None for w in written):
            return None
        return written[0] if len(written) == 1 else "".join(f"{len(w or '')}:{w}" for w in written)

    def text(self) -> str:
        """The same at two silos exactly when they normalise alike."""
        drop = "".join(sorted(set(self.drop)))
        return repr((self.rules, self.unicode_form, self.strip, self.casefold, drop))

    def _text(self, text: str) -> str:
        text = unicodedata.normalize(self.unicode_form, text)
        text = text.casefold() if self.casefold else text
        text = "".join(c for c in text if c not in self.drop) if self.drop else text
        # Case folding can undo a normal form.
        text = unicodedata.normalize(self.unicode_form, text)
        return text.strip() if self.strip else text


_LETTERS = str.maketrans({"ø": "o", "æ": "ae", "œ": "oe", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "ı": "i"})


def _name(text: str) -> str:
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", text).casefold()).translate(_LETTERS)
    # Accents and vowel points go, by their combining class; signs without which a letter is another one stay.
    kept = (c for c in folded if c.isalpha() or (unicodedata.category(c)[0] == "M" and not _accent(c)))
    return unicodedata.normalize("NFC", "".join(kept))


def _accent(mark: str) -> bool:
    at = unicodedata.combining(mark)
    return 10 <= at <= 36 or at >= 200


_YMD = r"(?P<y>\d{4})(?P<s>[-/.]?)(?P<m>\d{2})(?P=s)(?P<d>\d{2})"
_DATES = {
    "date": [_YMD],
    "date-dmy": [_YMD, r"(?P<d>\d{1,2})(?P<s>[-/.])(?P<m>\d{1,2})(?P=s)(?P<y>\d{4})"],
    "date-mdy": [_YMD, r"(?P<m>\d{1,2})(?P<s>[-/.])(?P<d>\d{1,2})(?P=s)(?P<y>\d{4})"],
}


def _date(forms: Sequence[str], text: str) -> str | None:
    text = unicodedata.normalize("NFKC", text).strip()
    for form in forms:
        found = re.fullmatch(form + r"(?:[T ]00:00(?::00(?:\.0+)?)?)?", text, re.ASCII)
        if found:
            with contextlib.suppress(ValueError):
                return date(*(int(found[part]) for part in "ymd")).isoformat()
    return None if text else ""


def _postcode(text: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFKC", text).casefold() if c.isalnum())


_RULES: dict[str, Callable[[str], str | None]] = {
    "name": _name,
    "postcode": _postcode,
    **{rule: functools.partial(_date, forms) for rule, forms in _DATES.items()},
}


def _numbered(kind: str) -> Callable[[str], str | None]:
    """The rule for a number of python-stdnum's. Raises InputError where it knows none of this name."""
    from stdnum.exceptions import ValidationError
    from stdnum.util import clean

    try:
        if not re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)?", kind):
            raise ImportError
        module = importlib.import_module(f"stdnum.{kind}")
        valid: Callable[[str], bool] = module.is_valid
    except (ImportError, AttributeError):
        raise InputError(f"rule '{kind}' is unknown; choose {_KINDS}") from None
    compact: Callable[[str], str] = getattr(module, "compact", lambda text: clean(text, " -."))

    def written(text: str) -> str | None:
        try:
            found = compact(unicodedata.normalize("NFKC", text).strip())
        except ValidationError:
            return None
        return found if not found or valid(found) else None

    return written


class Prepared(NamedTuple):
    """A silo's identifiers as they are matched. It never leaves the silo."""

    rows: dict[str, int]  # normalised identifier to row
    missing: int  # rows without an identifier
    invalid: int  # rows whose identifier breaks its rule: no date, a wrong check digit
    duplicated: int  # rows whose normalised identifier stands more than once
    rule: str  # `Normalisation.text`
    hinted: bool  # one text as it was written, of which hints can be given

    def __repr__(self) -> str:
        return f"Prepared({len(self.rows)} identifiers)"


def prepare(ids: Sequence[str | Sequence[str | None] | None], normalisation: Normalisation | None = None) -> Prepared:
    """At a silo: what is to be matched. `ids`: a row's identifier, of one column or of several; None for a gap.

    Raises InputError for identifiers that are not text: 7 and 7.0 would be written differently at two silos.
    """
    rule = normalisation or Normalisation()
    texts = [rule.apply(i) for i in ids]
    counts = Counter(texts)
    rows = {t: row for row, t in enumerate(texts) if t and counts[t] == 1}
    missing, invalid = counts[""], counts[None]
    return Prepared(
        rows, missing, invalid, len(texts) - missing - invalid - len(rows), rule.text(), rule.rules == ("text",)
    )


def sorted_order(prepared: Prepared, bound: bytes = b"") -> bytes:
    """The digest of the order of a table that is sorted already: 32 bytes, of its identifiers, its rules and `bound`.

    Every row needs an identifier, each its own, and they have to rise as they are matched (by code points). Whoever
    guesses all of them can tell that the guess is right. Raises InputError, which counts rows.
    """
    for count, what in (
        (prepared.missing, "have no identifier"),
        (prepared.invalid, "have one that breaks its rule"),
        (prepared.duplicated, "share theirs with another"),
    ):
        if count:
            raise InputError(f"{count} rows {what}; files that are aligned already need one for each row")
    texts = list(prepared.rows)
    falls = sum(a >= b for a, b in itertools.pairwise(texts))
    if falls:
        raise InputError(f"rows are not sorted by their identifier: {falls} stand before a smaller one")
    return digest(b"sorted-order", bound, prepared.rule.encode(), number(len(texts)), *(t.encode() for t in texts))


class Alignment(NamedTuple):
    """A silo's rows, in the common order, and what happened; `hints` never leave the silo."""

    rows: npt.NDArray[np.int64]  # (N,) positions in the silo's own table
    matched: int
    unmatched: int
    missing: int
    invalid: int
    duplicated: int
    order: bytes  # 32 bytes, the same at all silos and for no other session, sizes or order: it binds a job
    hints: dict[str, int]  # of the unmatched identifiers, how many look as if written differently elsewhere


def _hints(texts: Sequence[str]) -> dict[str, int]:
    """Ways of writing that often differ between tables, counted among identifiers that found no partner."""
    tests: Mapping[str, Any] = {
        "leading zeros": lambda t: re.match(r"0\d", t),
        "punctuation or inner spaces": lambda t: re.search(r"[^\w]|_", t),
        "ends in .0": lambda t: t.endswith(".0"),
        "letters with accents": lambda t: unicodedata.normalize("NFD", t) != t,
    }
    counts = {name: sum(bool(test(t)) for t in texts) for name, test in tests.items()}
    return {name: count for name, count in counts.items() if count}


# ---- The group ----


@functools.cache
def _group() -> Any:
    """libsodium's Ristretto255. `rbcl` writes the library to the temporary folder to load it and leaves it there: it
    is taken away. Raises InputError where that folder lets nothing be loaded."""
    try:
        import rbcl
        from rbcl import _sodium as library
    except OSError as error:
        raise InputError(
            "private matching cannot load libsodium from the temporary folder "
            f"({error.strerror or 'no program may run there'}); set TMPDIR to one from which programs may be loaded"
        ) from None
    with contextlib.suppress(OSError, AttributeError):  # loaded by now; Windows keeps what is in use
        os.unlink(importlib.import_module("rbcl._sodium").lib_path)  # noqa: PTH108 - a text
    assert library is not None
    return rbcl


def _scalar(key: bytes, data: bytes) -> bytes:
    """A scalar that is random to whoever does not know `key`, of 64 bytes reduced."""
    wide = hashlib.blake2b(data, key=key, digest_size=64).digest()
    return _group().crypto_core_ristretto255_scalar_reduce(wide)


def hashed(element: bytes) -> bytes:
    """H(x): a point of which nobody knows the logarithm."""
    return _group().crypto_core_ristretto255_from_hash(hashlib.sha512(b"secure-fvi/matching/1/" + element).digest())


def _times(scalar: bytes, point: bytes) -> bytes:
    """Raises ProtocolError where `point` encodes none, or the identity."""
    try:
        return _group().crypto_scalarmult_ristretto255(scalar, point)
    except RuntimeError:
        raise ProtocolError("a point of a matching is no point of the group, or its identity") from None


def _is_point(point: bytes) -> bool:
    """Whether this encodes a point other than the identity."""
    return point != bytes(_POINT) and _group().crypto_core_ristretto255_is_valid_point(point)


def secret_of(element: bytes, points: Sequence[bytes]) -> bytes:
    """S(x) from k_j H(x) in the roster's order: 32 bytes, which never leave a silo."""
    return digest(b"matching-secret", element, *points)


def output(secret: bytes) -> bytes:
    """F(x) from S(x): 32 bytes."""
    return digest(b"matching-output", secret)


def _split(data: bytes) -> list[bytes]:
    return [data[at : at + _POINT] for at in range(0, len(data), _POINT)]


def _spread(function: Callable[[Item], bytes], items: Sequence[Item], workers: int) -> bytes:
    """`function` of each item, joined, in threads: libsodium's calls do not hold Python's lock."""
    size = max(-(-len(items) // workers), 64)
    parts = [items[at : at + size] for at in range(0, len(items), size)]
    if len(parts) < 2:
        return b"".join(map(function, items))
    with ThreadPoolExecutor(len(parts)) as pool:
        return b"".join(pool.map(lambda part: b"".join(map(function, part)), parts))


# ---- Messages ----


class SizeRequest(NamedTuple):
    """Matcher to silo: say how long the list is."""


class Size(NamedTuple):
    """Silo to matcher: places in its list, checks included, and the digest of its rules; signed."""

    size: int
    rule: bytes
    signature: bytes


class Sizes(NamedTuple):
    """Matcher to silo: all silos' sizes and signatures, in the roster's order."""

    sizes: list[int]
    signatures: list[bytes]


class Ready(NamedTuple):
    """Silo to matcher: batches of its own list for which it has F(x)."""

    done: int


class BlindRequest(NamedTuple):
    """Matcher to silo: blind a batch of the list."""

    batch: int


class Blinded(NamedTuple):
    """Silo to matcher: r H(x), 32 bytes each; signed."""

    points: bytes
    signature: bytes


class EvaluateRequest(NamedTuple):
    """Matcher to silo: what other silos (places in the roster) blinded of one batch, and their signatures."""

    batch: int
    owners: list[int]
    points: list[bytes]
    signatures: list[bytes]


class Evaluated(NamedTuple):
    """Silo to matcher: the same, times the silo's key, and signed, by owner."""

    points: list[bytes]
    signatures: list[bytes]


class Evaluations(NamedTuple):
    """Matcher to silo: what all others, in the roster's order, made of its batch."""

    batch: int
    points: list[bytes]
    signatures: list[bytes]


class OutputsRequest(NamedTuple):
    """Matcher to silo: send F(x) of the whole list."""


class Outputs(NamedTuple):
    """Silo to matcher: its F(x), sorted; signed."""

    outputs: bytes
    signature: bytes


class Common(NamedTuple):
    """Matcher to silo: the F(x) that all silos hold, sorted."""

    outputs: bytes


class Ordered(NamedTuple):
    """Silo to matcher: its signature on the common order, and on what only a silo knows that lists all of it."""

    signature: bytes


class Agreed(NamedTuple):
    """Matcher to silo: all silos' signatures on the common order."""

    signatures: list[bytes]


_place, _signature, _points = wire.whole(1 << 16), wire.binary(64), wire.binary()
_batch, _signatures = wire.whole(_MOST), wire.Listed(_signature)
_CODEC = Codec(
    {
        SizeRequest: (1, ()),
        Size: (2, (wire.whole(_MOST), wire.binary(32), _signature)),
        Sizes: (3, (wire.Listed(wire.whole(_MOST)), _signatures)),
        Ready: (4, (_batch,)),
        BlindRequest: (5, (_batch,)),
        Blinded: (6, (_points, _signature)),
        EvaluateRequest: (7, (_batch, wire.Listed(_place), wire.Listed(_points), _signatures)),
        Evaluated: (8, (wire.Listed(_points), _signatures)),
        Evaluations: (9, (_batch, wire.Listed(_points), _signatures)),
        OutputsRequest: (10, ()),
        Outputs: (11, (_points, _signature)),
        Common: (12, (_points,)),
        Ordered: (13, (_signature,)),
        Agreed: (14, (_signatures,)),
    }
)


class _Session:
    """What all parties know once sizes are agreed, and what is signed under it."""

    def __init__(self, roster: Roster, rule: bytes, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.digest = digest(b"matching-session", roster.hash, rule, *map(number, sizes))

    def count(self, place: int, batch: int) -> int:
        """Places of a batch of silo `place`'s list; 0 behind its end."""
        return max(min(BATCH, self.sizes[place] - batch * BATCH), 0)

    def batches(self, place: int) -> int:
        return -(-self.sizes[place] // BATCH)

    def blinded(self, owner: int, batch: int, points: bytes) -> bytes:
        return digest(b"matching-blinded", self.digest, number(owner), number(batch), points)

    def evaluated(self, silo: int, blinded: bytes, points: bytes) -> bytes:
        """blinded: the statement on what was evaluated."""
        return digest(b"matching-evaluated", self.digest, number(silo), blinded, points)

    def outputs(self, owner: int, outputs: bytes) -> bytes:
        return digest(b"matching-outputs", self.digest, number(owner), outputs)

    def order(self, common: bytes) -> bytes:
        return digest(b"matching-order", self.digest, common)

    def held(self, silo: int, common: bytes, secrets: bytes) -> bytes:
        """That a silo lists them all; secrets: S(x) of each. Nobody else can say what it would sign."""
        return digest(b"matching-held", self.order(common), number(silo), secrets)


def _size_statement(roster: Roster, place: int, size: int, rule: bytes) -> bytes:
    return digest(b"matching-size", roster.hash, number(place), number(size), rule)


def _evaluated_slot(owner: int, batch: int) -> str:
    return f"matching/evaluated/{owner}/{batch}"


def _rising(data: bytes) -> bool:
    """Whether these are outputs of 32 bytes, sorted, each once."""
    return len(data) % _OUTPUT == 0 and all(a < b for a, b in itertools.pairwise(_split(data)))


# ---- Parties ----


class _Blinding(NamedTuple):
    """One batch of a silo's list on its way."""

    elements: list[bytes]
    hashed: list[bytes]  # H(x)
    points: bytes  # r H(x), and what the silo signs of them
    statement: bytes

    def __repr__(self) -> str:
        return f"_Blinding({len(self.elements)} places)"


class MatchingSilo:
    """One silo. `handle` answers the matcher's messages or raises ProtocolError; `alignment` is there at the end.

    With a durable store, sealed by its caller, a new object over the same store and the same identifiers goes on where
    the old one was killed. The key lies beside the count of what was evaluated with it: whoever loses the store has
    lost both. One that was restored from a backup must not be used: it has forgotten evaluations.
    """

    def __init__(
        self,
        roster: Roster,
        silo_id: str,
        identity: Identity,
        prepared: Prepared,
        store: Store | None = None,
        largest: int = LARGEST,
        secret: bytes | None = None,
        workers: int | None = None,
    ) -> None:
        """largest: places that another silo's list may have, and so the identifiers that it may test against this one.
        secret: 32 bytes from which key, blinds and order follow, of this session alone; drawn unless given. workers:
        threads, by default one a core. Raises InputError for what does not fit the roster, or other identifiers than
        the store was begun with."""
        if silo_id not in roster.places:
            raise InputError(f"silo '{silo_id}' is not in the roster")
        self._me = roster.places[silo_id]
        if roster.members[self._me][1] != identity.public_key:
            raise InputError(f"the roster holds another identity key for silo '{silo_id}'")
        self.silo_id, self._roster, self._identity, self._prepared = silo_id, roster, identity, prepared
        self._store = MemoryStore() if store is None else store
        self._largest, self._workers = largest, workers or os.cpu_count() or 1
        secret = self._store.claim("matching/secret", secret or os.urandom(32))
        self._key = _scalar(derive_key(secret, b"matching-key", roster.hash), b"")
        self._blinds = derive_key(secret, b"matching-blinds", roster.hash)
        self._list = self._ordered(derive_key(secret, b"matching-list", roster.hash))
        self._rule = digest(b"matching-rule", prepared.rule.encode())
        self._session: _Session | None = None
        self._latest: tuple[int, _Blinding] | None = None
        self._evaluated = 0  # batches of its list that were seen to be done
        self._limit = wire.Limit(4096 + _POINT * max(roster.size * (BATCH + 8), len(self._list)), roster.size)
        self._handlers: dict[type, Callable[[Any], tuple[Any, ...]]] = {
            SizeRequest: self._on_size,
            Sizes: self._on_sizes,
            BlindRequest: self._on_blind,
            EvaluateRequest: self._on_evaluate,
            Evaluations: self._on_evaluations,
            OutputsRequest: self._on_outputs,
            Common: self._on_common,
            Agreed: self._on_agreed,
        }

    def __repr__(self) -> str:
        return f"MatchingSilo({self.silo_id!r})"

    def _ordered(self, key: bytes) -> list[bytes]:
        """The list: byte strings in an order that only `key` knows; checks and identifiers cannot meet."""
        elements = [*(b"\0" + number(i) for i in range(CHECKS)), *(b"\1" + t.encode() for t in self._prepared.rows)]
        if len(elements) >= _MOST:
            raise InputError(f"silo '{self.silo_id}': at most {_MOST - CHECKS} identifiers can be matched")
        placed = sorted((hashlib.blake2b(e, key=key, digest_size=16).digest(), e) for e in elements)
        named = digest(b"matching-list", self._prepared.rule.encode(), *(place for place, _ in placed))
        if self._store.claim("matching/list", named) != named:
            raise InputError(
                f"silo '{self.silo_id}': its store was begun with other identifiers, other rules or another session; a "
                "new session, in which all silos have new keys, needs a new store"
            )
        return [element for _, element in placed]

    def handle(self, message: bytes) -> bytes:
        """Answer one message of the matcher. The same message gets the same answer."""
        request = _CODEC.unpack_any(message, self._limit)
        handler = self._handlers.get(type(request))
        if handler is None:
            raise ProtocolError(f"a silo does not take {type(request).__name__}")
        return _CODEC.pack(handler(request))

    def alignment(self) -> Alignment:
        """This silo's rows in the common order. Raises ProtocolError before all silos have signed it."""
        common = self._store.get("matching/common")
        if self._store.get("matching/agreed") is None or common is None:
            raise ProtocolError(f"silo '{self.silo_id}': the silos have not agreed on an order yet")
        elements = self._by_output()
        met = [elements[o][1:].decode() for o in _split(common) if elements[o][0] == 1]
        rows, prepared = self._prepared.rows, self._prepared
        left = rows.keys() - set(met)
        return Alignment(
            np.array([rows[text] for text in met], np.int64),
            len(met),
            len(left),
            prepared.missing,
            prepared.invalid,
            prepared.duplicated,
            self._agreed_session().order(common),
            _hints(sorted(left)) if prepared.hinted else {},
        )

    # ---- sizes ----

    def _on_size(self, _: SizeRequest) -> Size:
        size = len(self._list)
        return Size(size, self._rule, self._sign(_size_statement(self._roster, self._me, size, self._rule)))

    def _on_sizes(self, request: Sizes) -> Ready:
        """Once taken, sizes hold for the session: for another one there is another digest, under which nobody signs."""
        if not len(request.sizes) == len(request.signatures) == self._roster.size:
            raise ProtocolError("sizes and signatures of all silos of the roster are needed")
        for place, (size, signature) in enumerate(zip(request.sizes, request.signatures, strict=True)):
            statement = _size_statement(self._roster, place, size, self._rule)
            self._verify(place, signature, statement, "the size of its list under these rules")
            if place != self._me and size > self._largest:
                raise ProtocolError(
                    f"silo '{self._roster.ids[place]}' has a list of {size} places and could test as many identifiers; "
                    f"silo '{self.silo_id}' allows {self._largest}"
                )
        kept = b"".join(map(number, request.sizes))
        if self._store.claim("matching/sizes", kept) != kept:
            raise ProtocolError("other sizes were agreed for this session")
        return Ready(self._done())

    def _agreed_session(self) -> _Session:
        if self._session is None:
            kept = self._store.get("matching/sizes")
            if kept is None:
                raise ProtocolError("no sizes were agreed yet")
            sizes = [int.from_bytes(kept[at : at + 8], "big") for at in range(0, len(kept), 8)]
            self._session = _Session(self._roster, self._rule, sizes)
        return self._session

    def _done(self) -> int:
        """Batches of this silo's list that have their outputs; one after the other, so that the first gap ends them."""
        batches = self._agreed_session().batches(self._me)
        while self._evaluated < batches and self._store.get(f"matching/secrets/{self._evaluated}") is not None:
            self._evaluated += 1
        return self._evaluated

    # ---- evaluations ----

    def _batch(self, batch: int) -> list[bytes]:
        if not self._agreed_session().count(self._me, batch):
            raise ProtocolError(f"the list of silo '{self.silo_id}' has no batch {batch}")
        return self._list[batch * BATCH : (batch + 1) * BATCH]

    def _blind(self, batch: int) -> _Blinding:
        """The same whenever it is asked for; the latest is kept until its evaluations come."""
        if self._latest is None or self._latest[0] != batch:
            elements = self._batch(batch)
            at = _split(_spread(hashed, elements, self._workers))
            rows = list(zip(elements, at, strict=True))
            points = _spread(lambda row: _times(_scalar(self._blinds, row[0]), row[1]), rows, self._workers)
            statement = self._agreed_session().blinded(self._me, batch, points)
            self._latest = batch, _Blinding(elements, at, points, statement)
        return self._latest[1]

    def _on_blind(self, request: BlindRequest) -> Blinded:
        blinding = self._blind(request.batch)
        return Blinded(blinding.points, self._sign(blinding.statement))

    def _on_evaluate(self, request: EvaluateRequest) -> Evaluated:
        batch, session = request.batch, self._agreed_session()
        if not len(set(request.owners)) == len(request.owners) == len(request.points) == len(request.signatures):
            raise ProtocolError("a batch needs owners, each once, and points and a signature of each")
        asked = list(zip(*request[1:], strict=True))
        statements = [self._admitted(batch, owner, points, signature) for owner, points, signature in asked]
        answers = [self._evaluate(batch, owner, points) for owner, points, _ in asked]
        for owner, statement in zip(request.owners, statements, strict=True):
            # Before anything leaves: these places have had their evaluation, whatever happens to this process.
            if self._store.claim(_evaluated_slot(owner, batch), statement) != statement:
                raise self._evaluated_before(batch, owner)
        signed = (session.evaluated(self._me, s, a) for s, a in zip(statements, answers, strict=True))
        return Evaluated(answers, [self._sign(statement) for statement in signed])

    def _admitted(self, batch: int, owner: int, points: bytes, signature: bytes) -> bytes:
        """What `owner` signed: the one batch of points for these places of its list."""
        session = self._agreed_session()
        if owner >= self._roster.size or owner == self._me:
            raise ProtocolError(f"silo '{self.silo_id}' evaluates for the other silos of the roster alone")
        whose = f"silo '{self._roster.ids[owner]}', batch {batch}"
        if not points or len(points) != _POINT * session.count(owner, batch):
            raise ProtocolError(f"{whose}: not as many points as its list has there by the size that it signed")
        blinded = session.blinded(owner, batch, points)
        self._verify(owner, signature, blinded, f"batch {batch}")
        if len(set(_split(points))) * _POINT != len(points):
            raise ProtocolError(f"{whose}: a point stands twice; its blinds were not drawn at random")
        if self._store.get(_evaluated_slot(owner, batch)) not in (None, blinded):
            raise self._evaluated_before(batch, owner)
        return blinded

    def _evaluated_before(self, batch: int, owner: int) -> ProtocolError:
        whose = f"silo '{self._roster.ids[owner]}', batch {batch}"
        return ProtocolError(f"{whose}: other points were evaluated for these places; there is one evaluation a place")

    def _evaluate(self, batch: int, owner: int, points: bytes) -> bytes:
        """The silo's key times each point."""
        try:
            return _spread(lambda point: _times(self._key, point), _split(points), self._workers)
        except ProtocolError as error:
            raise ProtocolError(f"silo '{self._roster.ids[owner]}', batch {batch}: {error}") from None

    def _on_evaluations(self, request: Evaluations) -> Ready:
        session, slot = self._agreed_session(), f"matching/secrets/{request.batch}"
        others = [place for place in range(self._roster.size) if place != self._me]
        if not len(request.points) == len(request.signatures) == len(others):
            raise ProtocolError("the evaluations of all other silos are needed")
        self._batch(request.batch)
        if self._store.get(slot) is None:
            blinding = self._blind(request.batch)
            for place, points, signature in zip(others, request.points, request.signatures, strict=True):
                self._verify(place, signature, session.evaluated(place, blinding.statement, points), "its evaluation")
                if len(points) != len(blinding.points):
                    raise ProtocolError(f"silo '{self._roster.ids[place]}' evaluated another number of points")
            rows = list(zip(blinding.elements, blinding.hashed, *map(_split, request.points), strict=True))
            try:
                self._store.put({slot: _spread(self._secret, rows, self._workers)})
            except ProtocolError as error:
                bad = (
                    p
                    for p, points in zip(others, request.points, strict=True)
                    if not all(map(_is_point, _split(points)))
                )
                names = ", ".join(f"'{self._roster.ids[place]}'" for place in bad)
                raise ProtocolError(f"from silo {names}: {error}") from None
            self._latest = None
        return Ready(self._done())

    def _secret(self, row: tuple[bytes, ...]) -> bytes:
        """S(x) of an element from H(x) and the other silos' evaluations."""
        element, at, *evaluated = row
        unblind = _group().crypto_core_ristretto255_scalar_invert(_scalar(self._blinds, element))
        points = [_times(unblind, point) for point in evaluated]
        points.insert(self._me, _times(self._key, at))
        return secret_of(element, points)

    # ---- the common order ----

    def _secrets(self) -> list[bytes]:
        """S(x) of the whole list."""
        session = self._agreed_session()
        kept = [self._store.get(f"matching/secrets/{b}") for b in range(session.batches(self._me))]
        if any(k is None for k in kept):
            raise ProtocolError(f"the list of silo '{self.silo_id}' is not evaluated to its end")
        return _split(b"".join(k for k in kept if k))

    def _by_output(self) -> dict[bytes, bytes]:
        """The list's elements by F(x)."""
        return dict(zip(map(output, self._secrets()), self._list, strict=True))

    def _held(self, common: bytes) -> Callable[[int], bytes]:
        """What a silo signs that lists all of `common`, by its place."""
        secrets = {output(s): s for s in self._secrets()}
        of_all = b"".join(secrets[o] for o in _split(common))
        return lambda place: self._agreed_session().held(place, common, of_all)

    def _on_outputs(self, _: OutputsRequest) -> Outputs:
        outputs = b"".join(sorted(self._by_output()))
        return Outputs(outputs, self._sign(self._agreed_session().outputs(self._me, outputs)))

    def _on_common(self, request: Common) -> Ordered:
        elements, common = self._by_output(), _split(request.outputs)
        if not _rising(request.outputs):
            raise ProtocolError("common outputs must be 32 bytes each, sorted, each once")
        if any(o not in elements for o in common):
            raise ProtocolError("the matcher returned an output that this silo never sent")
        lost = CHECKS - sum(elements[o][0] == 0 for o in common)
        if lost:
            raise ProtocolError(
                f"{lost} of the {CHECKS} checks, which every silo holds, are not common: a silo evaluated with more "
                "than one key, or the matcher left some out; nothing is aligned"
            )
        if self._store.claim("matching/common", request.outputs) != request.outputs:
            raise ProtocolError("another common order was signed in this session")
        return Ordered(self._sign(self._held(request.outputs)(self._me)))

    def _on_agreed(self, request: Agreed) -> Ready:
        common = self._store.get("matching/common")
        if common is None or len(request.signatures) != self._roster.size:
            raise ProtocolError("the signatures of all silos on an order that was named before are needed")
        held = self._held(common)
        for place, signature in enumerate(request.signatures):
            self._verify(place, signature, held(place), "this order, as who lists all of these people can")
        self._store.put({"matching/agreed": b"\1"})
        return Ready(self._done())

    def _sign(self, statement: bytes) -> bytes:
        return self._identity.sign(statement)

    def _verify(self, place: int, signature: bytes, statement: bytes, what: str) -> None:
        if not self._roster.verify(place, signature, statement):
            who = self._roster.ids[place]
            raise ProtocolError(f"silo '{who}' did not sign {what}, or the matcher, which carried that, altered it")


class Match(NamedTuple):
    """What the matcher knows at the end."""

    matched: int  # people that all silos hold
    sizes: dict[str, int]  # identifiers by silo
    order: bytes  # see `Alignment`


class Matcher:
    """Carries batches between silos and finds what all sent. It holds no secret and keeps nothing: when it is started
    again the silos say where they are."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def match(self, progress: Callable[[int, int], None] | None = None) -> Exchanges[Match]:
        """progress: told of places that have their output, and of all. Raises InputError where silos normalise
        differently, AggregationError where one does not answer, ProtocolError for an answer that is out of form."""
        everyone = range(self._roster.size)
        said = yield from self._ask({p: SizeRequest() for p in everyone}, Size)
        for place in everyone:
            if said[place].rule != said[0].rule:
                pair = f"'{self._roster.ids[0]}' and '{self._roster.ids[place]}'"
                raise InputError(f"silos {pair} normalise identifiers differently; agree on the rules before matching")
        sizes = [said[p].size for p in everyone]
        session = _Session(self._roster, said[0].rule, sizes)
        agreed = Sizes(sizes, [said[p].signature for p in everyone])
        ready = yield from self._ask(dict.fromkeys(everyone, agreed), Ready)
        for batch in range(max(map(session.batches, everyone))):
            owners = [p for p in everyone if ready[p].done <= batch < session.batches(p)]
            yield from self._evaluate(batch, owners)
            if progress is not None:
                progress(sum(min(s, (batch + 1) * BATCH) for s in sizes), sum(sizes))
        sent = yield from self._ask({p: OutputsRequest() for p in everyone}, Outputs, _POINT * max(sizes))
        for place in everyone:
            name, (outputs, signature) = self._roster.ids[place], sent[place]
            if len(outputs) != _OUTPUT * sizes[place] or not _rising(outputs):
                raise ProtocolError(f"silo '{name}': as many outputs as it signed for are needed, sorted, each once")
            if not self._roster.verify(place, signature, session.outputs(place, outputs)):
                raise ProtocolError(f"silo '{name}' did not sign its outputs")
        met = set(_split(sent[0].outputs))
        for place in everyone[1:]:
            met &= set(_split(sent[place].outputs))
        common = b"".join(sorted(met))
        signed = yield from self._ask(dict.fromkeys(everyone, Common(common)), Ordered)
        yield from self._ask(dict.fromkeys(everyone, Agreed([signed[p].signature for p in everyone])), Ready)
        named = {n: size - CHECKS for n, size in zip(self._roster.ids, sizes, strict=True)}
        return Match(len(common) // _OUTPUT - CHECKS, named, session.order(common))

    def _evaluate(self, batch: int, owners: Sequence[int]) -> Exchanges[None]:
        """One batch of these silos' lists, from their blinds to their outputs."""
        room, everyone = self._roster.size * _POINT * (BATCH + 8), range(self._roster.size)
        blinded = yield from self._ask({p: BlindRequest(batch) for p in owners}, Blinded, room)
        others = {p: [o for o in owners if o != p] for p in everyone}
        asked = {
            p: EvaluateRequest(batch, of, [blinded[o].points for o in of], [blinded[o].signature for o in of])
            for p, of in others.items()
            if of
        }
        answered = yield from self._ask(asked, Evaluated, room)
        for p, (points, signatures) in answered.items():
            if not len(points) == len(signatures) == len(others[p]):
                raise ProtocolError(f"silo '{self._roster.ids[p]}' did not evaluate for each that asked")
        back = {}
        for owner in owners:
            parts = [(p, others[p].index(owner)) for p in everyone if p != owner]
            points, signatures = ([answered[p][field][at] for p, at in parts] for field in (0, 1))
            back[owner] = Evaluations(batch, points, signatures)
        yield from self._ask(back, Ready)

    def _ask(
        self, messages: Mapping[int, tuple[Any, ...]], kind: type[Message], room: int = 0
    ) -> Exchanges[dict[int, Message]]:
        """One message to each silo, by place, and the answer of `kind` of each; room: bytes of points in one."""
        if not messages:
            return {}
        ids = self._roster.ids
        replies = yield {ids[place]: _CODEC.pack(message) for place, message in messages.items()}
        missing = [ids[place] for place in messages if ids[place] not in replies]
        if missing:
            raise AggregationError(f"matching needs all silos; no answer from {', '.join(missing)}; match again")
        limit = wire.Limit(4096 + room, self._roster.size)
        found = {}
        for place in messages:
            try:
                found[place] = _CODEC.unpack(replies[ids[place]], kind, limit)
            except ProtocolError as error:
                raise ProtocolError(f"silo '{ids[place]}': {error}") from None
        return found


def align(
    ids: Mapping[str, Sequence[str | Sequence[str | None] | None]],
    normalisation: Normalisation | None = None,
    secret: bytes | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Alignment]:
    """All parties in this process: what each silo learns, from each silo's identifiers (`prepare`).

    secret: 32 bytes from which all keys follow, so that the common order repeats; drawn unless given.
    """
    if len(ids) < 2:
        raise InputError("alignment needs the identifiers of at least two silos")
    secret = secret or os.urandom(32)

    def own(name: str, what: bytes) -> bytes:
        return derive_key(secret, b"matching-here", what, name.encode())

    identities = {n: Identity(Ed25519PrivateKey.from_private_bytes(own(n, b"identity"))) for n in sorted(ids)}
    members = tuple((n, identity.public_key) for n, identity in identities.items())
    roster = Roster(own("", b"session"), members, min_cohort=2)
    silos = {
        n: MatchingSilo(roster, n, identity, prepare(ids[n], normalisation), largest=_MOST, secret=own(n, b"silo"))
        for n, identity in identities.items()
    }
    carry(Matcher(roster).match(progress), lambda messages: {n: silos[n].handle(m) for n, m in messages.items()})
    return {n: silo.alignment() for n, silo in silos.items()}
