"""Short codes that people read to each other over the telephone, so that both know they look at the same bytes.

A code is 8 groups of 5 digits (132 bits), in the manner of messengers' safety numbers. Finding other bytes with a given
code takes 2^132 trials. Finding any two with the same code takes 2^66: that is what somebody between two sites needs
who shows each a roster of his own making, and each trial costs 16 MiB and some 50 ms of scrypt. A code is public.
"""

from __future__ import annotations

import hashlib
import re

from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

_SALT = b"secure-fvi/reading-code/1"
_GROUPS, _DIGITS = 8, 5


def reading_code(label: str, content: bytes) -> str:
    """The code of `content`, which is a `label`: "01234 56789 ..."."""
    digest = hashlib.sha256(label.encode() + b"\0" + content).digest()
    stretched = Scrypt(salt=_SALT, length=32, n=2**14, r=8, p=1).derive(digest)
    # 256 bits leave no bias that could be seen in 40 digits.
    digits = str(int.from_bytes(stretched, "big") % 10 ** (_GROUPS * _DIGITS)).zfill(_GROUPS * _DIGITS)
    return " ".join(digits[i : i + _DIGITS] for i in range(0, len(digits), _DIGITS))


def same_code(given: str, code: str) -> bool:
    """Whether somebody typed `code`, with whatever blanks or dashes between the digits."""
    return re.sub(r"[\s-]", "", given) == code.replace(" ", "")
