"""Record alignment: silos that hold different columns of the same people find the records they share.

    silo      `prepare`: tag = HMAC-SHA256(key of the job, normalised id); sends its tags, sorted
    matcher   `match`: the tags that all silos hold, in sorted order, and counts; any party, usually the server
    silo      `adopt`: its rows in that order, or an error; then record i is the same person at every silo

The key is shared by the silos and unknown to the matcher. The job's name enters it, so that tags of two jobs cannot be
linked. Whatever is not certain is left out and counted, never guessed: ids that are missing, ids that stand twice, ids
that another silo lacks. Silos that normalise differently, or hold different keys, are refused before anything is
matched. What all this reveals, and to whom, is in docs/vertical-alignment.md.
"""

from __future__ import annotations

import hmac
import itertools
import re
import secrets
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.hmac import HMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from secure_fvi import wire
from secure_fvi.errors import InputError, ProtocolError

LABEL = b"secure-fvi/alignment/1/"
KEY_BYTES = TAG_BYTES = 32
_MOST_TAGS = 1 << 26
_MESSAGE = wire.Named(
    silo=wire.text(1000),
    job=wire.text(1000),
    check=wire.binary(TAG_BYTES),
    tags=wire.Listed(wire.binary(TAG_BYTES)),
    missing=wire.whole(),
    duplicated=wire.whole(),
)
_FORMS = ("NFC", "NFD", "NFKC", "NFKD")


@dataclass(frozen=True)
class Normalisation:
    """How an id is written before it is tagged; all silos must use the same.

    Unicode form, white space at the ends, case, and characters to drop wherever they stand ("-. " in telephone
    numbers, say). Leading zeros stay: whether "007" is "7" is for the data's owners to decide.
    """

    unicode_form: Literal["NFC", "NFD", "NFKC", "NFKD"] = "NFKC"
    strip: bool = True
    casefold: bool = True
    drop: str = ""

    def __post_init__(self) -> None:
        if self.unicode_form not in _FORMS:
            raise InputError(f"unicode_form '{self.unicode_form}' is unknown; choose {', '.join(_FORMS)}")

    def apply(self, identity: str) -> str:
        text = unicodedata.normalize(self.unicode_form, identity)
        text = text.casefold() if self.casefold else text
        text = "".join(c for c in text if c not in self.drop) if self.drop else text
        # Case folding can undo a normal form.
        text = unicodedata.normalize(self.unicode_form, text)
        return text.strip() if self.strip else text

    def text(self) -> str:
        """The same at two silos exactly when they normalise alike."""
        return repr((self.unicode_form, self.strip, self.casefold, "".join(sorted(set(self.drop)))))


class AlignmentKey:
    """32 secret bytes that the silos share and nobody else holds; never shown."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) != KEY_BYTES:
            raise InputError(f"an alignment key has {KEY_BYTES} random bytes, not {len(secret)}; a password is no key")
        self._secret = secret

    @classmethod
    def generate(cls) -> AlignmentKey:
        """A fresh key, for one silo to make and to hand to the others."""
        return cls(secrets.token_bytes(KEY_BYTES))

    def __repr__(self) -> str:
        return "AlignmentKey(...)"

    def derive(self, job: str, purpose: bytes) -> bytes:
        """A 32-byte key for one job and purpose."""
        info = LABEL + purpose + b"/" + job.encode()
        return HKDF(hashes.SHA256(), KEY_BYTES, None, info).derive(self._secret)


class Prepared(NamedTuple):
    """One silo's side. `message` is for the matcher; the rest never leaves the silo."""

    message: bytes
    rows: dict[bytes, int]  # tag to row
    ids: dict[bytes, str]  # tag to normalised id, for hints
    missing: int  # rows without an id
    duplicated: int  # rows whose normalised id stands more than once


class Match(NamedTuple):
    """What the matcher sends back to every silo."""

    tags: tuple[bytes, ...]  # common to all silos, sorted
    records: dict[str, int]  # rows by silo
    unmatched: dict[str, int]  # usable ids by silo that not all others hold
    missing: dict[str, int]
    duplicated: dict[str, int]


class Alignment(NamedTuple):
    """A silo's rows, in the common order, and what happened; `hints` never leave the silo."""

    rows: npt.NDArray[np.int64]  # (N,) positions in the silo's own table
    matched: int
    unmatched: int
    missing: int
    duplicated: int
    hints: dict[str, int]  # of the unmatched ids, how many look as if written differently elsewhere


def prepare(
    ids: Sequence[str | None], key: AlignmentKey, job: str, silo: str, normalisation: Normalisation | None = None
) -> Prepared:
    """At a silo: its tags. `ids` are texts; None and what normalises to nothing count as missing.

    Raises InputError for ids that are not text: 7 and 7.0 would be written differently at two silos.
    """
    rule = normalisation or Normalisation()
    if any(i is not None and not isinstance(i, str) for i in ids):
        raise InputError("ids must be text, written alike at all silos; convert numbers first, leading zeros included")
    texts = [rule.apply(i) if i is not None else "" for i in ids]
    counts = Counter(t for t in texts if t)
    tag_key = key.derive(job, b"tag")
    unique = {row: t for row, t in enumerate(texts) if t and counts[t] == 1}
    tags = {row: tag(tag_key, t) for row, t in unique.items()}
    missing = sum(not t for t in texts)
    duplicated = len(texts) - missing - len(unique)
    check = tag(key.derive(job, b"check"), rule.text())
    counted = {"missing": missing, "duplicated": duplicated}
    message = {"silo": silo, "job": job, "check": check, "tags": sorted(tags.values()), **counted}
    by_tag = {t: row for row, t in tags.items()}
    return Prepared(msgpack.packb(message), by_tag, {tags[r]: t for r, t in unique.items()}, missing, duplicated)


def match(messages: Sequence[bytes]) -> Match:
    """At the matcher: the tags that every silo holds.

    Raises ProtocolError for a malformed message, InputError when silos disagree on job, key or normalisation.
    """
    parsed = [_read(m) for m in messages]
    if len(parsed) < 2:
        raise InputError("alignment needs the tags of at least two silos")
    silos = [p["silo"] for p in parsed]
    if len(set(silos)) != len(silos):
        raise ProtocolError("two messages come from one silo")
    first = parsed[0]
    for other in parsed[1:]:
        if other["job"] != first["job"]:
            raise InputError(f"silos '{first['silo']}' and '{other['silo']}' align for different jobs")
        if not hmac.compare_digest(other["check"], first["check"]):
            raise InputError(
                f"silos '{first['silo']}' and '{other['silo']}' hold different keys or normalise ids differently; "
                "agree on both before aligning"
            )
    common = frozenset.intersection(*(frozenset(p["tags"]) for p in parsed))
    return Match(
        tuple(sorted(common)),
        {p["silo"]: len(p["tags"]) + p["missing"] + p["duplicated"] for p in parsed},
        {p["silo"]: len(p["tags"]) - len(common) for p in parsed},
        {p["silo"]: p["missing"] for p in parsed},
        {p["silo"]: p["duplicated"] for p in parsed},
    )


def adopt(prepared: Prepared, tags: Sequence[bytes], complete: bool = False) -> Alignment:
    """At a silo: its rows in the common order.

    Raises ProtocolError for tags that the silo never sent, or out of order; with `complete`, InputError unless every
    row of this silo found its partners.
    """
    if list(tags) != sorted(set(tags)):
        raise ProtocolError("common tags must be sorted, each once")
    if any(t not in prepared.rows for t in tags):
        raise ProtocolError("the matcher returned a tag that this silo never sent")
    common = set(tags)
    left = [text for t, text in prepared.ids.items() if t not in common]
    found = Alignment(
        np.array([prepared.rows[t] for t in tags], np.int64),
        len(tags),
        len(left),
        prepared.missing,
        prepared.duplicated,
        _hints(left),
    )
    if complete and found.unmatched + found.missing + found.duplicated:
        raise InputError(
            f"of {len(prepared.rows) + found.missing + found.duplicated} rows {found.unmatched} lack a partner, "
            f"{found.missing} have no id and {found.duplicated} share one; mend the ids or align without `complete`"
        )
    return found


def tag(key: bytes, text: str) -> bytes:
    """HMAC-SHA256, 32 bytes."""
    code = HMAC(key, hashes.SHA256())
    code.update(text.encode())
    return code.finalize()


def _hints(texts: Sequence[str]) -> dict[str, int]:
    """Ways of writing that often differ between tables, counted among ids that found no partner."""
    tests: Mapping[str, Any] = {
        "leading zeros": lambda t: re.match(r"0\d", t),
        "punctuation or inner spaces": lambda t: re.search(r"[^\w]|_", t),
        "ends in .0": lambda t: t.endswith(".0"),
        "letters with accents": lambda t: unicodedata.normalize("NFD", t) != t,
    }
    counts = {name: sum(bool(test(t)) for t in texts) for name, test in tests.items()}
    return {name: count for name, count in counts.items() if count}


def _read(message: bytes) -> dict[str, Any]:
    """A checked message; sizes and types are all that is trusted of it."""
    found: dict[str, Any] = wire.decode(message, _MESSAGE, wire.Limit(items=_MOST_TAGS), "an alignment message")
    tags = found["tags"]
    if any(a >= b for a, b in itertools.pairwise(tags)):
        raise ProtocolError("alignment tags must be 32 bytes each, sorted, each once")
    return found
