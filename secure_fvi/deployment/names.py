"""Names, times and fixed-form text that the files of a deployment share."""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError

from secure_fvi.errors import InputError, visible
from secure_fvi.runs import wording
from secure_fvi.runs.wording import first_error

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_TIME = "%Y-%m-%dT%H:%M:%SZ"

Role = Literal["silo", "server", "holder"]
ROLES: tuple[Role, ...] = ("silo", "server", "holder")


def check_id(name: str) -> str:
    """`name` if it may name a member or a consortium. Plain letters and digits, dot, dash:
    no letter of another script passes for one (1 and l, O and 0 are for the reader to tell apart)."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"'{name}' must be 1 to 63 letters, digits, dots, dashes or underscores, and begin with a letter or digit"
        )
    return name


def _hex(length: int) -> Callable[[object], str]:
    """A pydantic check for bytes written as lowercase hexadecimal digits."""

    def check(text: object) -> str:
        if not isinstance(text, str) or not re.fullmatch(rf"[0-9a-f]{{{2 * length}}}", text):
            raise ValueError(f"must be {2 * length} hexadecimal digits")
        return text

    return check


Id = Annotated[str, AfterValidator(check_id)]
Hex32 = Annotated[str, AfterValidator(_hex(32))]
Bytes32 = Annotated[bytes, BeforeValidator(lambda text: bytes.fromhex(_hex(32)(text)))]
Bytes64 = Annotated[bytes, BeforeValidator(lambda text: bytes.fromhex(_hex(64)(text)))]


def _time(text: str) -> str:
    parse_time(text)
    return text


Time = Annotated[str, AfterValidator(_time)]


def parse_time(text: str) -> datetime.datetime:
    """A UTC time as files hold it."""
    try:
        return datetime.datetime.strptime(text, _TIME).replace(tzinfo=datetime.UTC)
    except ValueError:
        raise ValueError(f"'{text}' must be a time such as 2027-01-31T12:00:00Z") from None


def format_time(time: datetime.datetime) -> str:
    return time.astimezone(datetime.UTC).strftime(_TIME)


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def printable(text: str, most: int = 1000) -> str:
    """`text` as a log or a terminal may show it: no control characters, and no more than `most` characters."""
    shown = visible(text[: most + 1])
    return shown if len(text) <= most else shown[: most - 3] + "..."


class Table(BaseModel):
    """A table of a file: unknown keys are refused, values are never converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


T = TypeVar("T", bound=BaseModel)


def parse_table(content: bytes, model: type[T], source: str) -> T:
    """The table that TOML `content` holds. Raises InputError, prefixed with `source`, which names the key."""
    table = wording.read_toml(content, source)
    try:
        return model.model_validate(_tuples(table))
    except ValidationError as error:
        raise InputError(f"{source}: {first_error(error, table, allowed={'': model.model_fields})}") from None


def _tuples(value: Any) -> Any:
    # Strict pydantic takes no list for a tuple, and TOML has nothing but lists.
    if isinstance(value, list):
        return tuple(_tuples(v) for v in value)
    return {k: _tuples(v) for k, v in value.items()} if isinstance(value, dict) else value


# ----
# Short codes that people read to each other over the telephone, so that both know they look at the same bytes
#
# A code is 8 groups of 5 digits (132 bits), in the manner of messengers' safety numbers. Finding other bytes with a
# given
# code takes 2^132 trials. Finding any two with the same code takes 2^66: that is what somebody between two sites needs
# who shows each a roster of his own making, and each trial costs 16 MiB and some 50 ms of scrypt. A code is public.

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
