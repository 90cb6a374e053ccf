"""A formula of a mixed model, and its design: which columns it has follows from the job's dictionary, never from rows.

    wheeze ~ smoke * age + (1 | child)           r | trials(n) ~ dose + offset(log(hours)) + (1 + dose || ward)

Fixed effects are formulaic's (interactions, `C()`, `poly()`, `bs()`); random terms, offsets, trials and weights are
lme4's and brms'. A silo that lacks a level, or half of a range, gets the same columns as every other: what a transform
learns (knots, orthogonal polynomials, centres) is learnt from a made table that spans the dictionary's levels and
ranges, the same everywhere. No Python but a list of functions runs.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from secure_fvi.dictionary import MEASURED, NUMBER, Column, Dictionary
from secure_fvi.errors import InputError, without_colours
from secure_fvi.runs.config import RECORD_ID
from secure_fvi.runs.wording import nearest

if TYPE_CHECKING:
    import pandas as pd

Floats = npt.NDArray[np.float64]
#: A table's columns as the dictionary codes them: numbers as float64, levels and groups as int64 codes.
Frame = Mapping[str, npt.NDArray[Any]]

_OPEN, _CLOSE = "([{", ")]}"
ADDITIONS = ("trials", "weights")
#: Rows of the made table, at least.
_MADE_ROWS = 1024
#: Of a standardised coefficient's prior, so much that another has to add for both to be told apart.
_MOVED = 0.01
#: Rows of a design that are made at once.
_AT_ONCE = 65_536
#: Characters, random terms, terms of fixed effects and columns of a design: a formula may come from a server, and past
#: these nothing is made of it.
_LONGEST, _MOST_RANDOM, _MOST_TERMS, _MOST_COLUMNS = 4000, 20, 1000, 1000
_MOST_DEGREE = 40
#: Records of one site under which what they alone have is warned of; so many such things are named.
FEW, _FEW_NAMED = 10, 12
#: Which share of a sum of squares is nearly all of it.
_NEARLY = 0.95
_STATEFUL = ("bs", "center", "poly", "scale", "standardize")
_ROWWISE = ("C", "I", "abs", "exp", "log", "log10", "log1p", "log2", "sqrt")
_REFUSED = {
    **dict.fromkeys(("cc", "cr", "cs"), "its knots are quantiles of the data; bs() takes them from the dictionary"),
    "lag": "it depends on other rows",
    "hashed": "it has no level by name",
}
#: How a factor is coded here, and what stands in place of functions and codings of R, brms and patsy, in small letters.
_CODING = (
    "a coding is C(x, contr.treatment('b')) with the level to compare with, C(x, contr.sum), or contr.helmert, "
    "contr.diff, contr.poly or contr.SAS likewise"
)
_INSTEAD = {
    **dict.fromkeys(("treatment", "sum", "helmert", "diff", "poly", "sas", "relevel", "contrasts"), _CODING),
    **dict.fromkeys(("factor", "as.factor", "ordered", "mo"), "write C(x), with levels from the dictionary"),
    **dict.fromkeys(
        ("s", "ns", "rcs", "te", "ti", "t2", "gp", "smooth"), "a smooth curve is bs(x, df=4) or poly(x, 2)"
    ),
    **dict.fromkeys(("pow", "square"), "a power is I(x**2)"),
    "ln": "write log(x)",
    "interaction": "write a:b",
    "q": "a name that is no word stands in quotes of the other kind, `a b`",
}


# ---- text ----


class Random(NamedTuple):
    """`(design | group)`. `group`: the columns that name it, `("hospital", "ward")` for wards of hospitals."""

    design: str
    group: tuple[str, ...]
    correlated: bool

    @property
    def label(self) -> str:
        return ":".join(self.group)


class Parsed(NamedTuple):
    """A formula in its parts."""

    text: str
    response: str
    additions: Mapping[str, str]  # expressions of "trials" and "weights", where given
    fixed: str  # for formulaic
    offsets: tuple[str, ...]
    random: tuple[Random, ...]


def parse(text: str) -> Parsed:
    """The parts of a formula. Raises InputError that marks the character at which it does not parse."""
    if not isinstance(text, str) or not text.strip():
        raise InputError("formula: write one such as 'wheeze ~ smoke * age + (1 | child)'")
    if len(text) > _LONGEST:
        raise InputError(f"formula: it may have {_LONGEST} characters")
    for at, char in enumerate(text):
        if not (char.isprintable() or char in "\n\t"):
            blank = "it is a blank of another kind, write a plain one," if char.isspace() else "it cannot be read"
            raise _error(text.replace("\n", " "), at, f"U+{ord(char):04X} is no character of a formula: {blank}")
    _check_letters(text)
    tildes = [at for at, char in _outside(text) if char == "~"]
    if len(tildes) != 1:
        raise _error(text, tildes[1] if tildes else len(text), "a formula has one '~', after its response")
    _check_once(text, tildes[0] + 1)
    response, additions = _left(text, tildes[0])
    fixed, offsets, random = [], [], []
    for sign, begin, end in _summands(text, tildes[0] + 1):
        term = text[begin:end].strip()
        begin = text.index(term, begin)
        bars = [at for at, char in _outside(text, begin, end, depth=1) if char == "|"]
        if bars and not _wraps(text, begin, begin + len(term)):
            raise _error(text, bars[0], "a random term stands by itself, as in + (1 | child),")
        if (bars or term.startswith("offset(")) and sign == "-":
            raise _error(text, begin, "only fixed effects can be taken out")
        if bars:
            random += _random(text, begin, bars, begin + len(term))
        elif term.startswith("offset(") and _wraps(text, begin + 6, begin + len(term)):
            if not term[7:-1].strip():
                raise _error(text, begin, "offset() takes a column, or an expression of columns,")
            offsets.append(term[7:-1].strip())
        else:
            fixed.append(f"{sign} {term}")
    if len(random) > _MOST_RANDOM:
        raise InputError(f"formula: {len(random)} random terms; at most {_MOST_RANDOM}")
    if len({(r.design, r.group) for r in random}) < len(random):
        raise InputError(f"formula: the same random term stands twice: {text}")
    return Parsed(text, response, additions, " ".join(fixed).removeprefix("+ ") or "1", tuple(offsets), tuple(random))


def _place(part: str, formula: str) -> int:
    """Where a part stands, which formulaic may have written with other blanks and quotes: behind ~ rather than before
    it, a word rather than a part of one, on its own rather than within a call; the beginning where it is not found."""
    letters = [re.escape("'" if char == '"' else char) for char in part if not char.isspace()]
    pattern = r"\s*".join(letter.replace("'", "['\"]") for letter in letters)
    head, tail = r"(?<!\w)" * (part[:1].isalnum() or part[:1] == "_"), r"(?!\w)" * part[-1:].isalnum()
    found = None
    try:
        alone = {at for at, _ in _outside(formula)}
    except InputError:
        alone = set()
    for begin in (formula.find("~") + 1, 0):
        matches = list(re.compile(f"{head}{pattern}{tail}").finditer(formula, begin)) if letters else []
        found = found or next((m for m in matches if m.start() in alone), matches[0] if matches else None)
    if found is None and (call := re.match(r"\w+\(", part)):  # written out otherwise: a call by its name
        found = re.compile(rf"(?<!\w){re.escape(call[0][:-1])}\s*\(").search(formula)
    return found.start() if found else 0


def _error(text: str, at: int, why: str) -> InputError:
    why = why.removesuffix(",") if why.endswith("?,") else why
    return InputError(f"formula: {why} at character {at + 1}: {text[:at]}»{text[at:]}")


def _outside(text: str, begin: int = 0, end: int | None = None, depth: int = 0) -> Iterator[tuple[int, str]]:
    """Characters outside of quotes in at most so many brackets, with their places. Raises InputError for brackets that
    do not match and quotes that stay open."""
    opened: list[int] = []
    quote = -1
    for at in range(begin, len(text) if end is None else end):
        char = text[at]
        if quote >= 0:
            quote = -1 if char == text[quote] else quote
            continue
        if char in "'\"`":
            quote = at
        elif char in _OPEN:
            opened.append(at)
        elif char in _CLOSE:
            if not opened or _OPEN.index(text[opened[-1]]) != _CLOSE.index(char):
                raise _error(text, at, f"'{char}' closes nothing")
            opened.pop()
        elif len(opened) <= depth:
            yield at, char
    if quote >= 0 or opened:
        at = quote if quote >= 0 else opened[-1]
        raise _error(text, at, f"'{text[at]}' is not closed")


def marked(formula: str, part: str, why: str) -> InputError:
    """An error of a part of a formula, at its character."""
    return _error(formula, _place(part, formula), why)


#: What has a meaning to Python or to formulaic that a formula has no need of: where they read it differently, what was
#: checked is not what is evaluated.
_NO_LETTER = {"{": "write I(...)", "}": "write I(...)"}
_RENAMED = '; rename the column by a query, SELECT * RENAME ("..." AS age) FROM data, and in the dictionary,'
_IN_QUOTES = re.compile(r"[\w \-.,:;+*/%&<>=!?°²³µ]*")


def _check_letters(text: str) -> None:
    """Refuse letters outside of quotes that no formula needs, and in quotes all that could end them or open another."""
    quote = -1
    for at, char in enumerate(text):
        if quote >= 0:
            if char == text[quote]:
                if not _IN_QUOTES.fullmatch(text, quote + 1, at):
                    said = "quotes hold letters, digits, blanks and - . , : ; + * / % & < > = alone"
                    hint = _RENAMED if char == "`" else ""
                    raise _error(text, quote, said + hint)
                if char == "`" and not text[quote + 1 : at].strip():
                    raise _error(text, quote, "no column stands in these quotes,")
                if char == "`" and text[quote + 1 : at].strip() == "1":  # which formulaic takes for the intercept
                    raise _error(
                        text, quote, "a column named 1 cannot be told from an intercept: rename it in the query"
                    )
                quote = -1
        elif char in "'\"`":
            quote = at
        elif char == "[" and text[:at].rstrip()[-1:] not in ("(", ",", "="):
            raise _error(text, at, "'[' is not read: a list stands in C(x, levels=[...]) or bs(x, knots=[...]) alone,")
        elif not (char.isalnum() or char.isspace() or char in "_~+-*/^:|()[],.=<>!%"):
            raise _error(text, at, f"no '{char}' is read{', ' * (char in '{}')}{_NO_LETTER.get(char, '')}")


_TERM = r"(?<!\w)(?P<base>[^\W\d]\w*|\(\s*[^\W\d]\w*\s*\))\s*"
_POWER = re.compile(_TERM + r"(\*\*|\^)\s*(?P<power>-?\d*\.?\d*)")
_PRODUCT = re.compile(_TERM + r"(\*(?!\*)|:)\s*(?P=base)(?!\w)")
#: Letters that stand for other characters, so that a call is one word.
_WORD = 0x4E00


def _check_once(text: str, begin: int) -> None:
    """Refuse a power of one term and a product of a term with itself, which in a formula are that term alone."""
    own, opened, quote = list(text), [False], ""
    for at in range(begin, len(text)):
        char = text[at]
        if quote or char in "'\"`":
            inner, quote = True, ("" if char == quote else quote or char)
        else:
            if char in _OPEN:
                opened.append(any(opened) or char != "(" or text[at - 1].isalnum() or text[at - 1] in "_.")
            inner = any(opened) or char == "."
            if char in _CLOSE:
                opened.pop()
        if inner:
            own[at] = char if char.isalnum() else chr(_WORD + ord(char))
    for pattern in (_POWER, _PRODUCT):
        if found := pattern.search("".join(own), begin):
            base, said = text[slice(*found.span("base"))], text[slice(*found.span())]
            base = base[1:-1].strip() if base[0] == "(" else f"({base[1:-1].strip()})" if base[0] == "{" else base
            power = found.groupdict().get("power") or 2
            cure = "leave that out" if base.startswith("C(") else f"of a number the power is I({base}**{power})"
            why = f"'{said}' is '{base}' itself in a formula, as in R; {cure},"
            raise _error(text, found.start(), why)


def _wraps(text: str, begin: int, end: int) -> bool:
    """Whether one pair of brackets is around all of it."""
    if text[begin] != "(" or text[end - 1] != ")":
        return False
    return not any(True for _ in _outside_of_first(text, begin, end))


def _outside_of_first(text: str, begin: int, end: int) -> Iterator[int]:
    depth = 0
    for at in range(begin, end):
        depth += (text[at] in _OPEN) - (text[at] in _CLOSE)
        if depth == 0 and at < end - 1:
            yield at


def _left(text: str, tilde: int) -> tuple[str, dict[str, str]]:
    """Response, and what it is said to be out of and to weigh: `r | trials(n) + weights(w)`."""
    bar = next((at for at, char in _outside(text, 0, tilde) if char == "|"), tilde)
    response = text[:bar].strip()
    if not response:
        raise _error(text, 0, "the response is missing")
    if response.startswith("cbind("):
        raise _error(text, 0, "write successes | trials(n) in place of cbind()")
    additions: dict[str, str] = {}
    for _, begin, end in _summands(text[:tilde], bar + 1) if bar < tilde else ():
        term = text[begin:end].strip()
        name, bracket, rest = term.partition("(")
        if name.strip() not in ADDITIONS or not bracket or not rest.endswith(")"):
            raise _error(
                text,
                text.index(term, begin),
                f"after '|' stand {' and '.join(f'{a}(...)' for a in ADDITIONS)}, joined by '+', not '{term}',",
            )
        if name.strip() in additions:
            raise _error(text, text.rindex(term, begin), f"{name.strip()}(...) stands twice,")
        if "|" in term or not rest[:-1].strip():
            raise _error(
                text, text.index(term, begin), f"'{term}' must be {name.strip()}(...) of a column; '+' joins two,"
            )
        additions[name.strip()] = rest[:-1].strip()
    return _plain(response), additions


def _summands(text: str, begin: int) -> list[tuple[str, int, int]]:
    """Sign, beginning and end of each; raises InputError where one is empty."""
    cuts = [(at, char) for at, char in _outside(text, begin) if char in "+-"]
    bounds = [(begin - 1, "+"), *cuts, (len(text), "")]
    found = [(sign, at + 1, after) for (at, sign), (after, _) in pairwise(bounds)]
    if len(found) > 1 and not text[found[0][1] : found[0][2]].strip():
        found.pop(0)  # a sign before the first
    for _, first, after in found:
        if not text[first:after].strip():  # at the sign after it, or the end
            raise _error(text, first, "a term is missing")
    return found


def _random(text: str, begin: int, bars: list[int], end: int) -> list[Random]:
    """One term a level of the nest: `(1 | a / b)` is `(1 | a) + (1 | a:b)`."""
    double = len(bars) == 2 and bars[1] == bars[0] + 1
    if len(bars) > 2 or (len(bars) == 2 and not double):
        raise _error(text, bars[1], "a random term has one '|' or '||'")
    design, group = text[begin + 1 : bars[0]].strip(), text[bars[-1] + 1 : end - 1].strip()
    if not design:
        raise _error(text, begin + 1, "the random term varies nothing: write 1 for an intercept,")
    nest = [[name.strip() for name in _split(level, ":")] for level in _split(group, "/")]
    for name in (name for level in nest for name in level):
        quoted = len(name) > 2 and name[0] == name[-1] == "`"
        if not name or not (quoted or all(c.isidentifier() or c in " .0123456789" for c in name)):
            begin = text.index(name, bars[-1]) if name else bars[-1] + 1
            other = "; another name stands in quotes, as `a-b`" if re.fullmatch(r"[\w.-]+", name) else ""
            raise _error(text, begin, f"a group is a column, a:b, or a / b for b within a{other},")
        if quoted and {*":/"} & {*name}:
            raise _error(
                text, text.index(name, bars[-1]), "a group's name has no : or /: rename the column in the query,"
            )
    nest = [[_plain(name) for name in level] for level in nest]
    groups = [tuple(name for level in nest[: k + 1] for name in level) for k in range(len(nest))]
    return [Random(design, g, not double) for g in groups]


def _split(text: str, by: str) -> list[str]:
    """At each such character outside of quotes and brackets."""
    cuts = [-1, *(at for at, char in _outside(text) if char == by), len(text)]
    return [text[begin + 1 : end] for begin, end in pairwise(cuts)]


def _plain(name: str) -> str:
    name = name.strip()
    return name[1:-1] if len(name) > 2 and name[0] == name[-1] == "`" else name


# ---- families ----


class Family(NamedTuple):
    """What a response is given its linear predictor. `kinds`: of its column; `needs`: what the response must be."""

    link: str  # of the mean, for summaries
    ratio: str  # what exp of a coefficient is; "" for none
    kinds: tuple[str, ...]
    needs: str


FAMILIES = {
    "gaussian": Family("identity", "", ("number", "integer", "date"), "a number"),
    "student": Family("identity", "", ("number", "integer", "date"), "a number"),
    "bernoulli": Family("logit", "odds ratio", ("boolean", "category", "integer"), "a boolean, a category of two "
                        "levels, or an integer from 0 to 1"),
    "binomial": Family("logit", "odds ratio", ("integer",), "an integer, successes | trials(n)"),
    "poisson": Family("log", "rate ratio", ("integer",), "an integer of at least 0"),
    "negbinomial": Family("log", "rate ratio", ("integer",), "an integer of at least 0"),
    "ordinal": Family("logit", "odds ratio", ("category", "integer"), "a category whose levels are in order, or an "
                      "integer with low and high"),
}  # fmt: skip
_OTHER_NAMES = {"normal": "gaussian", "logistic": "bernoulli", "negative_binomial": "negbinomial",
                "nbinom": "negbinomial", "student_t": "student", "cumulative": "ordinal"}  # fmt: skip


#: What comes near a family that is not there.
_NO_FAMILY = {
    **dict.fromkeys(("multinomial", "categorical"), "levels that are in order are family ordinal"),
    **dict.fromkeys(("gamma", "lognormal"), "of a logarithm that the query works out there is gaussian"),
    **dict.fromkeys(
        ("quasipoisson", "zip", "zero_inflated_poisson"), "counts with a spread of their own are negbinomial"
    ),
}


class Response(NamedTuple):
    """The response as the fit has it: y = (column - centre) / scale, or codes from `low` on."""

    name: str
    centre: float = 0.0
    scale: float = 1.0
    low: int = 0
    levels: tuple[str, ...] = ()  # of an ordinal


def response_of(parsed: Parsed, family: str, dictionary: Dictionary) -> Response:
    """Raises InputError where the family does not fit the column, and says what it needs."""
    name, of = parsed.response, FAMILIES[family]
    try:
        column = dictionary[name]
    except InputError as error:
        sums = re.search(r"[^\w. ]", name) is not None
        cure = (
            "a response is a column: work it out in the query, under a name that the dictionary has"
            if sums
            else str(error)
        )
        if parts := re.fullmatch(r"(\w+)\s*/\s*(\w+)", name):
            cure = f"of proportions write '{parts[1]} | trials({parts[2]})', family binomial"
        raise _error(parsed.text, _place(name, parsed.text.partition("~")[0]), f"the response: {cure},") from None
    needs = f"family {family} needs {of.needs}; the response '{name}' is"
    single = family == "binomial" and (
        column.kind == "boolean" or len(column.levels) == 2 or (column.low, column.high) == (0, 1)
    )
    if single and column.kind in FAMILIES["bernoulli"].kinds and "trials" not in parsed.additions:
        raise InputError(f"{needs} one of two values in each row: that is family bernoulli")
    if column.kind not in of.kinds:
        cure = ""
        if column.kind == "number" and "integer" in of.kinds:
            cure = ": where all of them are whole, kind = 'integer' says so in the dictionary"
            if family == "binomial":
                cure += (
                    "; of proportions p of n trials the query has the successes, SELECT *, round(p * n) AS successes "
                    "FROM data"
                )
        raise InputError(f"{needs} of kind {column.kind}{cure}")
    if family == "binomial" and "trials" not in parsed.additions:
        raise InputError(
            f"family binomial needs to know out of how many: write '{name} | trials(n) ~ ...', where n is the column "
            "that says so in each row"
        )
    if family != "binomial" and "trials" in parsed.additions:
        raise InputError(f"trials(...) go with family binomial, and this is family {family}: leave one of them out")
    if family in ("gaussian", "student"):
        centre, scale = standard(name, column)
        return Response(name, centre, scale)
    if family == "bernoulli":
        if column.kind == "category" and len(column.levels) != 2:
            raise InputError(f"{needs} a category of {len(column.levels)} levels")
        if column.kind == "integer" and (column.low, column.high) != (0, 1):
            raise InputError(f"{needs} an integer from {_said(column.low)} to {_said(column.high)}")
    if family == "ordinal":
        levels = column.levels
        if column.kind == "integer":
            if column.low is None or column.high is None:
                raise InputError(f"{needs} an integer without low and high")
            count = int(column.high) - int(column.low) + 1
            if count > _MOST_COLUMNS:
                raise InputError(f"{needs} one of {count:g} levels; at most {_MOST_COLUMNS}")
            levels = tuple(str(int(column.low) + k) for k in range(count))
        if len(levels) < 3:
            raise InputError(f"{needs} one of {len(levels)} levels, for which family bernoulli is there")
        return Response(name, low=int(column.low or 0), levels=levels)
    return Response(name)


def family_named(name: Any) -> str:
    """Its own name. Raises InputError for what is none."""
    family = _OTHER_NAMES.get(str(name), str(name))
    if family not in FAMILIES:
        cure = _NO_FAMILY.get(family.lower(), nearest(family, FAMILIES).removeprefix("; "))
        raise InputError(
            f"family '{family}' is not there{cure and f'; {cure}'} (there are: {', '.join(FAMILIES)}; any other is a "
            "program of Pyro's)"
        )
    return family


def _said(value: float | None) -> str:
    return "nowhere" if value is None else f"{value:g}"


# ---- designs ----


@functools.cache
def _formulaic() -> Any:
    try:
        import formulaic
    except ModuleNotFoundError as error:
        raise InputError(f"formulas need {error.name}: pip install '.[formula]' in a checkout") from error
    return formulaic


def _made_of(dictionary: Dictionary, names: Sequence[str]) -> Frame:
    """A made table that spans what the dictionary says of some columns: what every party makes alike."""
    values = {name: _span(name, dictionary[name]) for name in sorted(names)}
    rows = max([_MADE_ROWS, *(2 * len(v) for v in values.values())])
    at = np.arange(rows)
    prime = (n for n in range(2, 8000) if all(n % k for k in range(2, math.isqrt(n) + 1)))
    primes = [*islice(prime, len(values))]
    # Columns in orders that have nothing to do with each other, by arithmetic: the same wherever it is made.
    orders = [np.argsort(at * math.sqrt(primes[k % len(primes)]) % 1.0) for k in range(len(values))]
    return {n: np.resize(v, rows)[o] for (n, v), o in zip(values.items(), orders, strict=True)}


def _span(name: str, column: Column) -> npt.NDArray[Any]:
    """Values from one end to the other, or every level."""
    if column.kind == "id":
        raise InputError(f"formula: '{name}' is an id: it names groups, as in (1 | {name}), and is no covariate")
    if column.kind == "category" and len(column.levels) == 1:
        raise InputError(
            f"formula: '{name}' has one level in the dictionary, '{column.levels[0]}', which tells no rows apart: list "
            "all levels that occur at any silo, or leave the column out"
        )
    if column.kind in ("category", "boolean"):
        return np.arange(max(2, len(column.levels)))
    low, high = _range(name, column)
    if column.kind == "integer" and high - low < _MADE_ROWS:
        return np.arange(math.ceil(low), math.floor(high) + 1)
    grid = np.linspace(low, high, _MADE_ROWS)
    return np.unique(np.rint(grid)) if column.kind == "integer" else grid


def _range(name: str, column: Column) -> tuple[float, float]:
    if column.low is not None and column.high is not None:
        return column.low, column.high
    centre, scale = standard(name, column)
    return (
        column.low if column.low is not None else centre - 2 * scale,
        column.high if column.high is not None else centre + 2 * scale,
    )


def standard(name: str, column: Column) -> tuple[float, float]:
    """Centre and scale of a numeric column: the dictionary's, or the middle and a quarter of its range."""
    if column.kind in ("boolean", "category", "id"):
        return 0.0, 1.0
    low, high = column.low, column.high
    ranged = low is not None and high is not None
    if column.scale is None and not ranged:
        raise InputError(
            f"the dictionary says no scale of '{name}': give centre and scale, or low and high, by which priors are "
            "scaled; they are never taken from data"
        )
    scale = column.scale if column.scale is not None else (high - low) / 4 or 1.0  # type: ignore[operator]
    centre = column.centre if column.centre is not None else (low + high) / 2 if ranged else 0.0  # type: ignore[operator]
    return centre, scale


class Design:
    """The columns of one side of a formula, coded from the dictionary, and as the fit has them: standardised.

    `names`: of the columns in the user's units. `to_user` (p, p): coefficients of the user's columns from those of the
    standardised ones. `scales` (p,): by which each standardised column was divided. `columns`: of the table.
    """

    def __init__(self, text: str, formula: str, dictionary: Dictionary, centred: bool = True) -> None:
        """centred: numbers are centred where the columns span the same either way. Raises InputError."""
        self.dictionary = dictionary
        terms = _terms(text, formula)
        self._factors = {f.expr: f for term in terms for f in term.factors if _kind(f) != "literal"}
        self.columns = tuple(sorted({n for f in self._factors.values() for n in _columns_of(f, dictionary, formula)}))
        columns = sum(math.prod(_width(f, dictionary) for f in term.factors) for term in terms)
        if columns > _MOST_COLUMNS:
            said = f"a design of some {columns:g} columns, of {_MOST_COLUMNS} at most,"
            raise _error(formula, _place(text.lstrip("+ "), formula), said)
        made = _made_of(dictionary, self.columns)
        frame = _pandas(made, dictionary)
        try:
            first = _matrix(_again(terms, {}), frame, _context(self.dictionary))
        except InputError:
            raise
        except Exception:
            raise _error(formula, _place(text.lstrip("+ "), formula), f"'{text}' cannot be worked out,") from None
        self._spec = first.model_spec
        self.names = tuple("(Intercept)" if n == "Intercept" else str(n) for n in self._spec.column_names)
        x = np.asarray(first, dtype=np.float64)
        if not np.isfinite(x).all():
            bad = [n for n, column in zip(self.names, x.T, strict=True) if not np.isfinite(column).all()]
            of = ", ".join(f"'{name}'" for name in self.columns if name in bad[0]) or "its columns"
            said = (
                f"'{bad[0]}' is not finite somewhere between low and high of {of} in the dictionary (a logarithm needs "
                "more than 0 there),"
            )
            raise _error(formula, _place(re.sub(r"\[\d+\]$", "", bad[0]), formula), said)
        self._check_independent(x, formula)
        self.to_user, self.scales = self._standardised(terms, made, x, centred)

    @property
    def size(self) -> int:
        return len(self.names)

    @property
    def intercept(self) -> int | None:
        return self.names.index("(Intercept)") if "(Intercept)" in self.names else None

    @property
    def constant(self) -> bool:
        """Whether it is an intercept alone."""
        return self.names == ("(Intercept)",)

    def matrix(self, frame: Frame, rows: int) -> Floats:
        """(rows, p) standardised. Raises InputError naming a column that is not finite, with the number of rows."""
        out = np.empty((rows, self.size))
        for begin in range(0, rows, _AT_ONCE):
            part = slice(begin, min(begin + _AT_ONCE, rows))
            some = _pandas({name: frame[name][part] for name in self.columns}, self.dictionary, part.stop - begin)
            try:
                made = np.asarray(_matrix(self._spec, some, _context(self.dictionary)), dtype=np.float64)
            except Exception as error:  # whose text may hold cells
                raise InputError(
                    f"the formula cannot be worked out on the rows ({type(error).__name__}): do bounds in it, of bs(), "
                    "span what the dictionary allows?"
                ) from None
            _multiplied(made, self.to_user, out[part])
        bad = (~np.isfinite(out)).sum(0)
        if bad.any():
            at = int(bad.argmax())
            raise _not_finite(self.names[at], ~np.isfinite(out[:, at]))
        return out

    def _check_independent(self, x: Floats, formula: str) -> None:
        """Refuse columns that others make up wherever the dictionary's ranges reach: priors alone would tell their
        coefficients apart. x (rows, p): of the made table."""
        size = np.abs(x).max(0)
        x = x / np.where(size > 0, size, 1.0)
        for at in range(1, self.size):
            others, *_ = np.linalg.lstsq(x[:, :at], x[:, at], rcond=None)
            if np.abs(x[:, :at] @ others - x[:, at]).max() < 1e-9:
                named = ", ".join(f"'{n}'" for n, by in zip(self.names, others, strict=False) if abs(by) > 1e-6)
                why = f"says nothing beside {named}: leave one out" if named else "is 0 whatever the dictionary allows"
                term = re.sub(r"\[[^\[\]]*\]$", "", self.names[at])
                raise _error(formula, _place(term, formula), f"'{self.names[at]}' {why},")

    def _standardised(self, terms: Any, made: Frame, x: Floats, centred: bool) -> tuple[Floats, Floats]:
        """`to_user` and `scales`. A column of plain columns is standardised through these, and so is an interaction; a
        transform's by its spread over the made table."""
        plain = [e for e, f in self._factors.items() if _kind(f) == "lookup"]
        known = {e: standard(e, self.dictionary[e]) for e in plain}
        scales = np.array([math.prod((known[f][1] for f in self._plain_of(j)), start=1.0) for j in range(self.size)])
        to_user = np.diag(1 / scales)
        if centred and self.size:
            found = self._centred(terms, made, x, known)
            to_user = to_user if found is None else found
        for at in self._transformed():
            z = x @ to_user[:, at]
            spread = float(z.std()) or 1.0
            to_user[:, at] /= spread
            scales[at] *= spread
            if centred and self.intercept is not None and len(self._term_of(at).factors) == 1:
                to_user[self.intercept, at] -= float(z.mean()) / spread
        return to_user, scales

    def _centred(self, terms: Any, made: Frame, x: Floats, known: Mapping[str, tuple[float, float]]) -> Floats | None:
        """`to_user` where every number is centred and scaled first; None where that would be another model, as without
        an intercept, or with an interaction and not its parts."""
        moved = {e: f"_{k}" for k, e in enumerate(known) if self.dictionary[e].kind in MEASURED}
        frame = _pandas(made, self.dictionary)
        for name, alias in moved.items():
            frame[alias] = (made[name] - known[name][0]) / known[name][1]
        z = np.asarray(_matrix(_again(terms, moved), frame, _context(self.dictionary)), dtype=np.float64)
        if z.shape != x.shape:
            return None
        size = np.abs(x).max(0)
        size[size == 0] = 1.0
        found, _, rank, _ = np.linalg.lstsq(x / size, z, rcond=None)
        same = np.allclose(x / size @ found, z, atol=1e-7 * max(1.0, float(np.abs(z).max())))
        if not same or rank != np.linalg.matrix_rank(z):
            return None
        found = found / size[:, None]
        found[np.abs(found) < 1e-12 * np.abs(found).max()] = 0.0
        return found

    def centres_of(self, at: int) -> dict[str, float]:
        """By name of a column, or text of a transform, the centres in the table's units where others have to be for the
        coefficient of column `at` to be that of the standardised columns; none where it is that wherever they are."""
        by = np.abs(self.to_user[at] * self.scales[at])
        by[at] = 0.0
        own, found = {f.expr for f in self._term_of(at).factors}, dict[str, float]()
        for j in np.flatnonzero(by > _MOVED):
            plain = [e for e in self._plain_of(int(j)) if self.dictionary[e].kind in MEASURED]
            found |= {e: standard(e, self.dictionary[e])[0] for e in plain if e not in own}
            if not plain:  # a transform's own mean, which the intercept takes up
                found[str(self._term_of(int(j)))] = float(-self.to_user[at, j] / self.to_user[j, j])
        return dict(sorted(found.items()))

    def _term_of(self, at: int) -> Any:
        ends = np.cumsum([len(s.columns) for s in self._spec.structure])
        return self._spec.structure[int(np.searchsorted(ends, at, side="right"))].term

    def _plain_of(self, at: int) -> list[str]:
        return [f.expr for f in self._term_of(at).factors if _kind(f) == "lookup"]

    def measures(self, at: int) -> bool:
        """Whether a number of the table stands in column `at`: its scale follows from the dictionary's range."""
        numbers = any(self.dictionary[name].kind in MEASURED for name in self._plain_of(at))
        return numbers or at in self._transformed()

    def _transformed(self) -> list[int]:
        """Columns in which a transform stands that is more than a coding of levels."""
        found = []
        for at in range(self.size):
            python = [f.expr for f in self._term_of(at).factors if _kind(f) == "python"]
            if any(not expr.startswith("C(") for expr in python):
                found.append(at)
        return found


def _multiplied(rows: Floats, by: Floats, out: Floats) -> None:
    """rows (N, p) @ by (p, q) into `out`, column by column, so that a row's last bits follow from it alone. BLAS rounds
    a row by how many there are, and a record that joins would change another's."""
    out[:] = 0.0
    for j in range(by.shape[1]):
        for k in np.flatnonzero(by[:, j]):
            out[:, j] += rows[:, k] * by[k, j]


class Expression:
    """An offset, a weight or a number of trials: one number a row, without a state."""

    def __init__(self, text: str, formula: str, dictionary: Dictionary) -> None:
        terms = _terms("0 + {" + text + "}", formula)
        self.text, self.dictionary = text, dictionary
        self.columns = tuple(sorted({n for t in terms for f in t.factors for n in _columns_of(f, dictionary, formula)}))
        calls = [n.func for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)]
        self.calls = {f.id for f in calls if isinstance(f, ast.Name)}
        kinds = {dictionary[name].kind for name in self.columns}
        if self.calls & {*_STATEFUL, "C"} or kinds & {"category", "id"} or not self.columns:
            cure = ""
            if not self.columns:
                cure = f"; the same for all rows it is one of the query's, SELECT *, {text} AS n FROM data"
            said = f"'{text}' must be one number a row, of numeric columns{cure},"
            raise _error(formula, _place(text, formula), said)
        self._formula = _again(terms, {})

    def __call__(self, frame: Frame, rows: int) -> Floats:
        """(rows,). Raises InputError where it is not finite."""
        some = _pandas({name: frame[name] for name in self.columns}, self.dictionary, rows)
        out: Floats = np.asarray(_matrix(self._formula, some, _context(self.dictionary)), dtype=np.float64)[:, 0]
        if not np.isfinite(out).all():
            raise _not_finite(self.text, ~np.isfinite(out))
        return out


def _not_finite(text: str, bad: npt.NDArray[np.bool_]) -> InputError:
    """bad (rows,): of those that are used."""
    return InputError(
        f"'{text}' of the formula is not finite in {int(bad.sum())} of {len(bad)} rows (the first of those that are "
        f"used is {int(bad.argmax()) + 1}): correct them, or leave such rows out by a query"
    )


def columns_of(formula: str, dictionary: Dictionary) -> list[str]:
    """The table's columns that a formula reads, whatever its options, and records' own ids, if there are any. Raises
    InputError."""
    parsed = parse(formula)
    names = {parsed.response, *(c for r in parsed.random for c in r.group)}
    for text in (parsed.fixed, *(r.design for r in parsed.random)):
        names.update(Design(text, formula, dictionary).columns)
    for text in (*parsed.offsets, *parsed.additions.values()):
        names.update(Expression(text, formula, dictionary).columns)
    return sorted(names | {RECORD_ID}.intersection(dictionary.all_different))


def few_records(
    formula: str, dictionary: Dictionary, columns: Frame, record: str | None, shared: Sequence[str] = (),
    graded: bool = False,
) -> list[str]:  # fmt: skip
    """What of a formula fewer than `FEW` records of one site have, in words, with their number: a level of a category,
    a group of those `shared`, which span sites, and whatever else sets a column of a design to another value than most
    have, in all rows or in those of such a group; two levels together, where an effect is of both; weights or trials
    above 0, and nearly all of the squares of such a column or expression. For that site alone.

    Where no other site has such rows, that coordinate of a total without differential privacy is these records' own.
    `columns` (N,) each: coded by the dictionary. record: the group of which each is a record, None where a row is.
    graded: whether whole numbers of the response are levels, as of an ordinal one."""
    parsed = parse(formula)
    rows = len(next(iter(columns.values())))
    keys = [
        np.unique(np.stack([columns[name] for name in term.group], 1), axis=0, return_inverse=True)[1].reshape(-1)
        for term in parsed.random
    ]
    whose = next((key for term, key in zip(parsed.random, keys, strict=True) if term.label == record), np.arange(rows))
    found: dict[frozenset[int], str] = {}

    def look(what: str, where: npt.NDArray[Any]) -> None:
        of = frozenset(np.unique(whose[where])[:FEW].tolist())
        if 0 < len(of) < FEW:
            found.setdefault(of, f"{what} ({len(of)})")

    def weigh(what: str, values: npt.NDArray[Any]) -> None:
        sizes = np.abs(values.astype(float))
        own = np.bincount(whose, (sizes / max(sizes.max(), np.finfo(float).tiny)) ** 2)
        order = own.argsort()[::-1]
        most = order[: 1 + int((own[order].cumsum() < _NEARLY * own.sum()).sum())]
        if sizes.any() and 2 * len(most) <= len(own):
            look(f"nearly all of {what}", np.isin(whose, most))

    counts_for = np.ones(rows)
    if rows:
        look("rows at all", np.ones(rows, bool))
        for name, text in parsed.additions.items():
            expression = Expression(text, formula, dictionary)(columns, rows)
            look(f"{name}({text}) above 0", expression > 0)
            weigh(f"{name}({text})", expression)
            counts_for = counts_for * expression
        for text in parsed.offsets:
            weigh(f"offset({text})", Expression(text, formula, dictionary)(columns, rows))
        if dictionary[parsed.response].kind not in ("category", "boolean"):
            weigh(f"the response '{parsed.response}'", columns[parsed.response])
    designs = [Design(text, formula, dictionary) for text in (parsed.fixed, *(r.design for r in parsed.random))]
    # Of the response too: a category's cuts are learned, and a total at a far intercept is of either value's rows.
    levels = {
        name: dictionary[name].levels or ("false", "true")
        for name in sorted({parsed.response} | {name for design in designs for name in design.columns})
        if dictionary[name].kind in ("category", "boolean")
    }
    for name, called in levels.items():
        for code, level in enumerate(called):
            look(f"'{name}' = {level}", columns[name] == code)
    for level in np.unique(columns[parsed.response]) if graded and parsed.response not in levels else ():
        look(f"'{parsed.response}' = {level:g}", columns[parsed.response] == level)
    effects = {frozenset(part.split("[")[0] for part in name.split(":")) for design in designs for name in design.names}
    for a, b in combinations(levels, 2):
        if any({a, b} <= effect for effect in effects):
            for i, j in np.unique(np.stack([columns[a], columns[b]], 1).astype(int), axis=0):
                which = (columns[a] == i) & (columns[b] == j)
                look(f"'{a}' = {levels[a][i]} with '{b}' = {levels[b][j]}", which)
    every = [("", np.arange(rows))] if rows else []
    within = [every]
    for term, key in zip(parsed.random, keys, strict=True):  # of whose groups the term's own columns are effects
        by_group = np.split(np.argsort(key, kind="stable"), np.cumsum(np.bincount(key))[:-1])
        sizes = [len(np.unique(whose[group])) for group in by_group] if rows and term.label in shared else []
        if small := [size for size in sizes if size < FEW]:
            found[frozenset({-1 - len(found)})] = f"a group of '{term.label}' ({', '.join(map(str, small[:FEW]))})"
        many = [group for group, size in zip(by_group, sizes, strict=False) if size >= FEW]
        within.append([*every, *((f" in a group of '{term.label}'", group) for group in many)])
    for design, groups in zip(designs, within, strict=True):
        for name, values in zip(design.names, design.matrix(columns, rows).T, strict=True):
            for where, group in groups:
                different, counts = np.unique(values[group], return_counts=True)
                if len(different) > 1:
                    others = group[values[group] != different[counts.argmax()]]
                    look(f"another value of '{name}' than most{where}", others)
            if rows:
                weigh(f"'{name}'{' as weighed' if parsed.additions else ''}", (values - np.median(values)) * counts_for)
    return list(found.values())


def few_said(found: Sequence[str]) -> str:
    """What `few_records` found, as a warning; empty where it found nothing."""
    if not found:
        return ""
    more = f", and {len(found) - _FEW_NAMED} more" if len(found) > _FEW_NAMED else ""
    return (
        f"warning: fewer than {FEW} records here have {', '.join(found[:_FEW_NAMED])}{more}. Where no other site has "
        "any, totals without differential privacy show these records' own part, one patient's where one has it: merge "
        "rare levels in the dictionary that all agree to, leave such rows out by a query, or use differential privacy"
    )


def _terms(text: str, formula: str) -> Any:
    """formulaic's terms. Raises InputError that marks where it does not parse, or names what is not run."""
    library = _formulaic()
    if any(char == "." and (at == 0 or not text[at - 1].isalnum()) and not text[at + 1 : at + 2].isdigit()
           for at, char in _outside(text)):  # fmt: skip
        raise _error(formula, max(formula.find("."), 0), "'.' stands for no column: name them")
    try:
        tree = library.parser.DefaultFormulaParser().get_ast(text)
        _check_literals(tree, formula)
        count = _count(tree)
        found = library.Formula(text) if count <= _MOST_TERMS else []
    except RecursionError:
        raise InputError(f"formula: too many terms: {formula[:200]}") from None
    except InputError:
        raise
    except Exception as error:
        raise _marked(error, text, formula) from None
    if count > _MOST_TERMS:
        said = f"some {count:g} terms, of {_MOST_TERMS} at most,"
        raise _error(formula[:200], _place(text.lstrip("+ "), formula[:200]), said)
    if not hasattr(found, "__iter__") or type(found).__name__ != "SimpleFormula":
        raise _error(formula, max(formula.find("|"), 0), "'|' stands in brackets, as in (1 | child),")
    return list(found)


def _check_literals(node: Any, formula: str) -> None:
    """Refuse a number beside * / or :, which formulaic reads as another model than arithmetic: 1/x as x."""
    if not hasattr(node, "args"):
        return
    name = str(node.operator.symbol)
    if name == "in":  # %in%, which formulaic reads otherwise than R
        raise _error(formula, max(formula.find("%in%"), 0), "'%in%' is not read: write a:b, or a / b for b within a,")
    for arg in node.args:
        if name in ("*", "/", ":") and not hasattr(arg, "args") and re.fullmatch(NUMBER, str(arg)):
            said = f"{arg} stands beside '{name}', which joins terms in a formula, as in R; arithmetic is I(...), as in"
            shown = [str(a) for a in node.args] if not any(hasattr(a, "args") for a in node.args) else ["1", "x"]
            sign = name if name in "*/" else "*"
            at = re.search(rf"(?<![\w.]){re.escape(str(arg))}(?![\w.])", formula[formula.find("~") + 1 :])
            begin = at.start() + formula.find("~") + 1 if at else 0
            raise _error(formula, begin, f"{said} I({shown[0]}{sign}{shown[-1]}),")
        _check_literals(arg, formula)


def _count(node: Any) -> float:
    """At most so many terms stand below a node of formulaic's syntax tree, which may make all of them to see."""
    if not hasattr(node, "args"):
        return 1.0
    counts = [_count(arg) for arg in node.args]
    name = str(node.operator.symbol)
    if name in ("**", "^"):
        power = str(node.args[1])
        small = power.isdigit() and len(power) < 3 and int(power) <= _LARGEST_POWER
        return min(1e12, counts[0] ** int(power)) if small else 1e12
    joined = math.prod(counts) if name in ("*", "/", ":") else 0.0
    return min(1e12, joined + sum(counts))


def _width(factor: Any, dictionary: Dictionary) -> float:
    """About how many columns a factor that was checked (`_columns_of`) comes to, rather more than less."""
    if _kind(factor) == "literal":
        return 1.0
    if _kind(factor) == "lookup":
        return float(len(dictionary[factor.expr].levels) or 1)
    found = 1.0
    for node in ast.walk(ast.parse(str(factor.expr).strip(), mode="eval")):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id in ("bs", "poly"):
            given = [*node.args[1:], *(k.value for k in node.keywords if k.arg in ("df", "degree", "knots"))]
            sizes = [n.value for n in given if isinstance(n, ast.Constant) and isinstance(n.value, int | float)]
            knots = sum(len(n.elts) for n in given if isinstance(n, ast.List | ast.Tuple))
            found *= sum(sizes) + knots + 4 if max(sizes, default=0) <= _MOST_DEGREE else math.inf
        for n in ast.walk(node) if node.func.id == "C" else ():
            if isinstance(n, ast.Name) and n.id in dictionary.columns:
                column = dictionary[n.id]
                found *= len(column.levels) or (2 if column.kind == "boolean" else len(_span(n.id, column)))
    return found


#: formulaic's words for what does not parse, and ours.
_WORDS = (
    (r"Operator `(.+?)` .*", r"'\1' needs a term on each side"),
    (r"Missing operator between `(.+?)` and `(.+?)`.*", r"an operator is missing between '\1' and '\2'"),
    (r"Unknown operator '(.+?)'.*", r"'\1' joins no terms: arithmetic and comparisons stand in I(...)"),
    (r"Numeric literals.*", "a number is no term, but for 0 and 1: arithmetic stands in I(...)"),
    (r"Formula ended before quote.*: (.).*", r"'\1' joins no terms: arithmetic and comparisons stand in I(...)"),
)


def _marked(error: Exception, text: str, formula: str) -> InputError:
    """What formulaic says, in our words, at the character that it marks."""
    said = without_colours(str(error))
    reason, _, shown = said.partition("\n\n")
    why = next((re.sub(by, ours, reason, flags=re.DOTALL) for by, ours in _WORDS if re.match(by, reason)), "")
    at = _place(text.lstrip("+ ").removeprefix("0 + {").removesuffix("}"), formula)
    if "⧛" in shown:
        begin = shown.index("⧛")
        token = shown[begin + 1 : shown.index("⧚")]
        before = formula.find(text)
        at = begin + before if before >= 0 else formula.find(token, formula.find("~") + 1)
    if found := re.search(r"(?<![\w.])as\.\w+(?=\s*\()", formula):  # where Python has a word of its own
        at, why = found.start(), f"there is no function '{found[0]}': {_INSTEAD['factor']}"
    return _error(formula, max(at, 0), f"{why or 'it does not parse'},")


def _kind(factor: Any) -> str:
    return str(factor.eval_method).rpartition(".")[2].lower()


def _again(terms: Any, aliases: Mapping[str, str]) -> Any:
    """formulaic's formula of terms whose factors were checked, plain columns under other names. It goes through text,
    so it is refused if a factor is read back that was not checked."""
    made = _formulaic().Formula(_written(terms, aliases))
    checked = {(_kind(f), aliases.get(f.expr, f.expr)) for term in terms for f in term.factors}
    literals = {("literal", "0"), ("literal", "1")}
    found = {(_kind(f), f.expr) for term in made for f in term.factors}
    if not found <= checked | literals:
        raise InputError(f"formula: it is read as another when it is written again: {_written(terms, {})}")
    return made


def _written(terms: Any, aliases: Mapping[str, str]) -> str:
    """Terms as text that formulaic reads back, plain columns under other names."""
    out = ["1" if any(str(t) == "1" for t in terms) else "0"]
    for term in terms:
        if str(term) != "1":
            out.append(":".join(_factor_text(f, aliases) for f in term.factors))
    return " + ".join(out)


def _factor_text(factor: Any, aliases: Mapping[str, str]) -> str:
    if _kind(factor) == "lookup":
        return f"`{aliases.get(factor.expr, factor.expr)}`"
    return factor.expr if _kind(factor) == "literal" else "{" + factor.expr + "}"


_NODES = (
    ast.Expression, ast.Call, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Add, ast.Sub, ast.Mult,
    ast.Div, ast.Pow, ast.USub, ast.UAdd, ast.keyword, ast.List, ast.Tuple, ast.Attribute, ast.Compare, ast.Lt, ast.Gt,
    ast.LtE, ast.GtE, ast.Eq, ast.NotEq,
)  # fmt: skip


def _columns_of(factor: Any, dictionary: Dictionary, formula: str) -> set[str]:
    """The table's columns in a factor. Raises InputError for code that is no listed function of columns."""
    if _kind(factor) == "literal":
        return set()
    if _kind(factor) == "lookup":
        _known(factor.expr, dictionary, formula)
        _check_no_id(factor.expr, dictionary, formula)
        return {factor.expr}
    try:
        tree = ast.parse(str(factor.expr).strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        hint = "; a name in quotes stands by itself: rename the column in the query" if "`" in formula else ""
        raise _error(formula, _place(str(factor.expr), formula), f"'{factor.expr}' does not parse{hint}") from None
    functions = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    contrasts = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    coding = _contrasts(tree)
    names: set[str] = set()
    at = _place(str(factor.expr), formula)
    for node in ast.walk(tree):
        if isinstance(node, ast.BitXor):
            begin = max(formula.find("^", at), at)
            raise _error(formula, begin, f"'{factor.expr}': a power is written **, as in I(x**2),")
        if not isinstance(node, _NODES):
            raise _error(formula, at, f"'{factor.expr}' is more than functions and arithmetic of columns")
        if isinstance(node, ast.Attribute) and not (_is_contrast(node) and id(node) in coding):
            function = node.attr in (*_STATEFUL, *_ROWWISE)
            cure = f"write {node.attr}() by itself" if function else _CODING
            raise _error(formula, at, f"'{factor.expr}': no attribute is read, such as '.{node.attr}': {cure},")
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Name | ast.Attribute):
            raise _error(formula, at, f"'{factor.expr}': what is called is no function of the list")
        if (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Pow)
            and not (_is_literal(node.right) and abs(_folded(node.right)) <= _LARGEST_POWER)
        ):
            raise _error(formula, at, f"'{factor.expr}': an exponent is a number of at most {_LARGEST_POWER}")
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and abs(node.value) > _LARGEST:
            raise _error(formula, at, f"'{factor.expr}': a number in a formula is at most {_LARGEST:.0e}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            _check_call(node, node.func.id, dictionary, formula, at)
        elif isinstance(node, ast.Name) and id(node) not in functions and id(node) not in contrasts:
            _known(node.id, dictionary, formula)
            _check_no_id(node.id, dictionary, formula)
            names.add(node.id)
    _check_constants(tree, str(factor.expr), formula, at)
    _check_levels(tree, dictionary, str(factor.expr), formula, at)
    return names


#: Codings of a factor that a formula may name.
_CONTRASTS = frozenset({"treatment", "SAS", "sum", "helmert", "diff", "poly"})
_LARGEST_POWER, _LARGEST = 10, 1e12


def _contrasts(tree: ast.AST) -> set[int]:
    """Attributes that stand where C() is told its contrasts, by themselves or called."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "C"]
    given = [a for n in calls for a in (*n.args[1:], *(k.value for k in n.keywords if k.arg == "contr"))]
    return {id(a.func if isinstance(a, ast.Call) else a) for a in given}


def _is_contrast(node: ast.expr) -> bool:
    """Whether it is `contr.` and one of `_CONTRASTS`, and so nothing from which another name could be reached."""
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "contr"
        and node.attr in _CONTRASTS
    )


def _check_constants(tree: ast.AST, expr: str, formula: str, at: int) -> None:
    """Refuse what a few characters could make large: what constants compute is a number of at most `_LARGEST` at each
    step, lists and texts are no part of arithmetic, and arguments of a transform but the first are written out."""
    listed = {
        id(a) for n in ast.walk(tree) if isinstance(n, ast.Call) for a in (*n.args, *(k.value for k in n.keywords))
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple):
            if id(node) not in listed or not all(_is_literal(e) for e in node.elts):
                raise _error(formula, at, f"'{expr}': a list holds numbers and texts, and is an argument of C or bs")
        elif isinstance(node, ast.BinOp | ast.UnaryOp):
            parts = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.operand,)
            if any(isinstance(p, ast.Constant) and not isinstance(p.value, int | float) for p in parts):
                raise _error(formula, at, f"'{expr}': a text is no part of arithmetic")
            if not any(isinstance(n, ast.Name) for n in ast.walk(node)) and not abs(_folded(node)) <= _LARGEST:
                raise _error(formula, at, f"'{expr}': a number in a formula is at most {_LARGEST:.0e}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _STATEFUL:
            for given in (*node.args[1:], *(k.value for k in node.keywords)):
                if not (_is_literal(given) or isinstance(given, ast.List | ast.Tuple)):
                    raise _error(formula, at, f"'{expr}': the options of {node.func.id}() are numbers, written out")


def _is_literal(node: ast.expr) -> bool:
    return isinstance(node.operand if isinstance(node, ast.UnaryOp) else node, ast.Constant)


def _folded(node: ast.expr) -> float:
    """What numbers come to; infinity for what is none, or too large on the way."""
    try:
        if isinstance(node, ast.UnaryOp):
            return -_folded(node.operand) if isinstance(node.op, ast.USub) else _folded(node.operand)
        if isinstance(node, ast.BinOp):
            left, right = _folded(node.left), _folded(node.right)
            found = _ARITHMETIC[type(node.op)](left, right)
            return found if isinstance(found, float) and max(map(abs, (left, right, found))) <= _LARGEST else math.inf
        number = node.value if isinstance(node, ast.Constant) else None
        return float(number) if isinstance(number, int | float) else math.inf
    except (ArithmeticError, TypeError, ValueError):
        return math.inf


_ARITHMETIC: dict[type[ast.operator], Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}  # fmt: skip


def _check_call(node: ast.Call, name: str, dictionary: Dictionary, formula: str, at: int) -> None:
    if name in _REFUSED:
        raise _error(formula, at, f"{name}() is refused: {_REFUSED[name]},")
    if name not in (*_STATEFUL, *_ROWWISE):
        known = ", ".join(sorted((*_STATEFUL, *_ROWWISE)))
        instead = f"there are {known}; any other is worked out as a column in the query"
        raise _error(formula, at, f"there is no function '{name}': {_INSTEAD.get(name.lower(), instead)},")
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id in dictionary.columns:
            kind = dictionary.columns[inner.id].kind
            ends = dictionary.columns[inner.id].low, dictionary.columns[inner.id].high
            if name == "bs" and kind in MEASURED and None in ends:
                why = f"'{inner.id}' needs low and high in the dictionary, between which its splines lie,"
                raise _error(formula, at, f"bs({inner.id}): {why}")
            if name == "C" and kind in ("number", "date"):
                raise _error(formula, at, f"C({inner.id}): '{inner.id}' is a {kind} and has no levels")
            if name in (*_STATEFUL, "exp", "log", "sqrt", "log10", "log2", "log1p") and kind in ("category", "id"):
                raise _error(formula, at, f"{name}({inner.id}): '{inner.id}' is of kind {kind}, and no number")
    if name in _OPTIONS and not node.args:
        raise _error(formula, at, f"{name}() takes a column, and options,")
    if name in _OPTIONS and name != "C":
        _check_options(node.args[1:], node.keywords, name, formula, at)
    if name in (*_FUNCTIONS,) and (len(node.args) != 1 or node.keywords):
        raise _error(formula, at, f"{name}() takes one column, or one expression of columns,")
    if name == "C":
        _check_coding(node, dictionary, formula, at)
    if name in ("center", "scale", "standardize") and not (len(node.args) == 1 and isinstance(node.args[0], ast.Name)):
        raise _error(formula, at, f"{name}() takes a column of the dictionary, which has its centre and scale,")


#: What stands behind a function's column, in its order, and what each is.
_OPTIONS: dict[str, dict[str, str]] = {
    "bs": {
        "df": "a whole number", "knots": "a list of numbers", "degree": "a whole number",
        "include_intercept": "True or False", "lower_bound": "a number", "upper_bound": "a number",
        "extrapolation": "'raise', 'clip', 'na', 'zero' or 'extend'",
    },
    "poly": {"degree": "a whole number", "raw": "True or False"},
    "C": {"contr": "", "levels": "", "spans_intercept": "True or False"},
    "treatment": {"base": "a level"},
    "SAS": {"base": "a level"},
    "sum": {},
    "helmert": {"reverse": "True or False", "scale": "True or False"},
    "diff": {"backward": "True or False"},
    "poly of levels": {"scores": "a list of numbers"},
}  # fmt: skip


def _check_options(
    args: Sequence[ast.expr], keywords: Sequence[ast.keyword], name: str, formula: str, at: int
) -> dict[str, Any]:
    """By name, what a function is told beside its column. Raises InputError for what it does not know or take."""
    known = _OPTIONS[name]
    called = "contr.poly" if name == "poly of levels" else name if name in ("bs", "poly", "C") else f"contr.{name}"
    if len(args) > len(known):
        raise _error(formula, at, f"{called}() takes {len(known)} options at most: {', '.join(known) or 'none'},")
    given: dict[str, Any] = dict(zip(known, args, strict=False))
    for keyword in keywords:
        if keyword.arg not in known or keyword.arg in given:
            if name == "C" and keyword.arg not in known:
                said = f"C(): '{keyword.arg}' is no option (there are: {', '.join(known)}); {_CODING},"
                raise _error(formula, at, said)
            said = f"{called}(): '{keyword.arg}' is no option, or stands twice{nearest(keyword.arg, known)}"
            raise _error(formula, at, f"{said} (there are: {', '.join(known) or 'none'}),")
        given[str(keyword.arg)] = keyword.value
    for option, value in given.items():
        if known[option] and not (_is_literal(value) or isinstance(value, ast.List | ast.Tuple)):
            words = "written out, texts in quotes" if "a level" in known.values() else "numbers, written out"
            raise _error(formula, at, f"the options of {called}() are {words},")
        if known[option] and not _is_one(value, known[option]):
            raise _error(formula, at, f"{called}(): {option} is {known[option]},")
    least = int(name == "poly")
    if "degree" in given and not least <= _folded(given["degree"]) <= _MOST_DEGREE:
        raise _error(formula, at, f"{called}(): degree is at least {least} and at most {_MOST_DEGREE},")
    if name == "bs":
        if {"df", "knots"} <= given.keys():
            raise _error(formula, at, "bs() takes df or knots, not both,")
        intercept = given.get("include_intercept")
        degree = _folded(given["degree"]) if "degree" in given else 3
        least = int(degree) + bool(isinstance(intercept, ast.Constant) and intercept.value)
        if "df" in given and not least <= _folded(given["df"]) <= _MOST_COLUMNS:
            raise _error(formula, at, f"bs(): df is at least {least} (its degree, and one for an intercept in it),")
    return given


def _is_one(value: ast.expr, what: str) -> bool:
    """Whether what is written out is a whole number, say."""
    if isinstance(value, ast.List | ast.Tuple):
        return what == "a list of numbers" and all(math.isfinite(_folded(e)) for e in value.elts)
    plain = value.value if isinstance(value, ast.Constant) else None
    truth = isinstance(plain, bool)
    if what == "True or False":
        return truth
    if what in ("a number", "a whole number"):
        number = _folded(value)
        return not truth and math.isfinite(number) and (what == "a number" or number % 1 == 0)
    return what == "a level" or (isinstance(plain, str) and f"'{plain}'" in what)


def _check_coding(node: ast.Call, dictionary: Dictionary, formula: str, at: int) -> None:
    """Refuse a C() whose levels are not all that its column may have: formulaic takes rows of another for those of the
    level to compare with."""
    contrasts = [*node.args[1:], *(k.value for k in node.keywords if k.arg == "contr")]
    if (
        len(node.args) > 2
        or not node.args
        or any(isinstance(c, ast.Constant) and c.value is not None for c in contrasts)
    ):
        raise _error(formula, at, f"C() takes a column and its coding; {_CODING},")
    _check_options(node.args[1:], node.keywords, "C", formula, at)
    names = {n.id for n in ast.walk(node.args[0]) if isinstance(n, ast.Name) and n.id in dictionary.columns}
    for contrast in contrasts:
        _check_contrast(contrast, dictionary[next(iter(names))] if len(names) == 1 else None, formula, at)
    if len(names) > 1:
        raise _error(formula, at, "C() takes one column: which levels several have together no dictionary says,")
    given = next((k.value for k in node.keywords if k.arg == "levels"), None)
    if given is None:
        return
    if not (isinstance(node.args[0], ast.Name) and names and isinstance(given, ast.List | ast.Tuple)):
        raise _error(formula, at, "C(x, levels=[...]): x is a column, and levels are written out,")
    (name,) = names
    column = dictionary[name]
    every = list(column.levels) if column.kind == "category" else [float(v) for v in _span(name, column)]
    told = [e.value if isinstance(e, ast.Constant) else _folded(e) for e in given.elts]
    if len(told) != len(every) or set(told) != set(every):
        raise _error(
            formula, at, f"C({name}, levels=[...]) has to name each level that the dictionary has of '{name}', once, "
            "in whatever order: rows of others would count as the first one's. A query leaves rows out"
        )  # fmt: skip


def _check_contrast(told: ast.expr, column: Column | None, formula: str, at: int) -> None:
    """Refuse options of a coding that it does not take, or levels that are none."""
    call = told if isinstance(told, ast.Call) else None
    of = call.func if call is not None else told
    if not isinstance(of, ast.Attribute) or of.attr not in _CONTRASTS:
        return  # which is refused as such
    name = "poly of levels" if of.attr == "poly" else of.attr
    given = _check_options(call.args, call.keywords, name, formula, at) if call is not None else {}
    if column is None or column.kind != "category":
        return
    base, scores = given.get("base"), given.get("scores")
    if base is not None and not (isinstance(base, ast.Constant) and base.value in column.levels):
        raise _error(formula, at, f"contr.{of.attr}(): base is a level of the column, {', '.join(column.levels[:10])},")
    if scores is not None and len(scores.elts) != len(column.levels):
        raise _error(formula, at, f"contr.poly(): scores are {len(column.levels)} numbers, one a level,")


def _check_no_id(name: str, dictionary: Dictionary, formula: str) -> None:
    if dictionary[name].kind == "id":
        why = f"'{name}' is an id: it names groups, as in (1 | {name}), and is no covariate,"
        raise _error(formula, _place(name, formula), why)


def _check_levels(tree: ast.AST, dictionary: Dictionary, expr: str, formula: str, at: int) -> None:
    """Refuse what takes levels for numbers, or compares them with none of them."""
    coded = set[int]()  # names that stand where their levels are meant
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "C":
            coded |= {id(arg) for arg in node.args}
        if not isinstance(node, ast.Compare):
            continue
        if len(node.ops) > 1:
            raise _error(formula, at, f"'{expr}': write one comparison at a time, as in I((1 < x) * (x < 3)),")
        sides = (node.left, node.comparators[0])
        texts = [s.value for s in sides if isinstance(s, ast.Constant) and isinstance(s.value, str)]
        names = [s.id for s in sides if isinstance(s, ast.Name) and s.id in dictionary.columns]
        levels = [n for n in names if dictionary[n].kind == "category"]
        if not texts and not levels:
            continue
        if len(texts) != 1 or len(levels) != 1 or not isinstance(node.ops[0], ast.Eq | ast.NotEq):
            raise _error(formula, at, f"'{expr}': a text is compared by == or != with a column that has levels,")
        if texts[0] not in dictionary[levels[0]].levels:
            raise _error(
                formula,
                at,
                f"'{texts[0]}' is no level of '{levels[0]}'{nearest(texts[0], dictionary[levels[0]].levels)},",
            )
        coded |= {id(side) for side in sides}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name) or id(node) in coded or node.id not in dictionary.columns:
            continue
        if dictionary[node.id].kind == "category":
            raise _error(formula, at, f"'{expr}': '{node.id}' is of kind category, and no number,")


def _known(name: str, dictionary: Dictionary, formula: str) -> None:
    if name in dictionary.columns and name in _TAKEN:  # formulaic would find the column where the function is meant
        raise _error(formula, _place(name, formula), f"'{name}' is a function here: rename the column in the query")
    try:
        dictionary[name]
    except InputError as error:
        cure = f"; {_CODING}" if _INSTEAD.get(name.lower()) is _CODING else ""
        raise _error(formula, _place(name, formula), f"{error}{cure},") from None


#: Names of functions, which no column of a formula may have.
_TAKEN = frozenset({*_STATEFUL, *_ROWWISE, *_REFUSED, "contr", "Q"})
_FUNCTIONS: dict[str, Any] = {
    "I": lambda x: x, "abs": np.abs, "exp": np.exp, "log": np.log, "log10": np.log10, "log1p": np.log1p,
    "log2": np.log2, "sqrt": np.sqrt,
}  # fmt: skip


def _matrix(of: Any, frame: pd.DataFrame, context: Mapping[str, Any]) -> Any:
    """formulaic's matrix (rows, columns) of a formula or of what it has read, with a row for each of `frame`."""
    return of.get_model_matrix(frame, context=context, output="numpy", na_action="ignore")


def _context(dictionary: Dictionary) -> dict[str, Any]:
    """Functions of a formula, in place of formulaic's that would take their state from data."""

    def quiet(function: Any) -> Any:
        def call(x: Any) -> Any:
            with np.errstate(all="ignore"):
                return function(x)

        return call

    def center(x: Any) -> Any:
        return x - standard(x.name, dictionary[x.name])[0]

    def scale(x: Any) -> Any:
        centre, spread = standard(x.name, dictionary[x.name])
        return (x - centre) / spread

    functions = {name: quiet(function) for name, function in _FUNCTIONS.items()}
    return {**functions, "center": center, "scale": scale, "standardize": scale}


def _pandas(frame: Frame, dictionary: Dictionary, rows: int | None = None) -> pd.DataFrame:
    """As formulaic takes it: levels as pandas' categories, whole numbers whole."""
    _formulaic()
    import pandas as pd

    out: dict[str, Any] = {}
    for name, values in frame.items():
        column = dictionary[name]
        if column.kind == "category":
            out[name] = pd.Categorical.from_codes(values.astype(np.int64), categories=list(column.levels))
        elif column.kind == "integer":
            out[name] = values.astype(np.int64)
        else:
            out[name] = values.astype(np.float64)
    size = rows if rows is not None else len(next(iter(frame.values()))) if frame else _MADE_ROWS
    return pd.DataFrame(out, index=pd.RangeIndex(size))
