"""Errors and warnings that a user of the library meets; each names what is wrong and what would be right."""

import re


class SecureFVIError(Exception):
    """Any failure the library raises on purpose. The command line exits 1."""

    exit_code = 1


class InputError(SecureFVIError, ValueError):
    """Bad input: a file, an option, a model or data that cannot be used as given. The command line exits 2."""

    exit_code = 2


class DataError(InputError):
    """One silo's data that cannot be read, or do not fit the model. The message counts rows and names files: it is for
    that silo alone, and a server, as the site's paper trail, is told `TOLD` instead."""

    TOLD = "its data do not fit the model"


class JobError(InputError):
    """A job whose options and model do not go together, whatever anybody's data are: who offers it may hear why."""


class UntestedOperation(InputError):
    """A program uses an operation of which no test says that it keeps rows apart where they are mapped."""


class ProtocolError(SecureFVIError):
    """A message that the protocol refuses: forged, replayed, malformed, out of turn. Nothing was released."""


class HomeError(ProtocolError):
    """A site's own roster, keys or other files that do not fit each other. The message names them: it is for that site
    alone, and who is at the other end is told `TOLD` instead."""

    TOLD = "its own files are not in order; its log says more"


class SessionLost(SecureFVIError):
    """A silo has lost its share of the session (a restart of its machine): the session has to be opened anew."""


class AggregationError(SecureFVIError):
    """A secure sum that cannot be completed: too few survivors, a value outside its bound."""


class BoundError(AggregationError):
    """A silo's contribution that is past what was declared, or no number. It stays at that silo, and so does this."""

    #: Whether a column there lies so far from 0, in its sds, that no algorithm moves an intercept and its slope.
    uncentred = False


class BudgetError(SecureFVIError):
    """A privacy budget that would be exceeded. Nothing was released or charged. The command line exits 3."""

    exit_code = 3


class RecordError(SecureFVIError, OSError):
    """A party's own store, ledger or log that cannot be written or read: its disk is full, say. Nothing was released,
    and nobody's data were why."""


class PolicyError(SecureFVIError):
    """A job that a site's policy does not allow, whoever asks for it. Nothing ran. The command line exits 2. told: what
    the server and the paper trail hear, where the message names what else the site has."""

    exit_code = 2

    def __init__(self, message: str, told: str | None = None) -> None:
        super().__init__(message)
        self.told = message if told is None else told


def told(error: Exception) -> str:
    """What of a refusal the other end may hear, and who reads a paper trail: of what this site has nothing but what was
    asked for. An InputError may name its files, as a ledger that cannot be read."""
    if isinstance(error, PolicyError):
        return error.told
    if isinstance(error, JobError):
        return str(error)
    return HomeError.TOLD if isinstance(error, HomeError | InputError) else str(error)


def visible(text: str) -> str:
    """What others wrote, as a terminal or a log may show it: it moves no cursor and begins no line of its own."""
    return "".join(c if c.isprintable() else "?" for c in text)


def without_colours(text: str) -> str:
    """Without the codes by which a terminal changes colours."""
    return re.sub(r"\x1b\[[^m]*m?", "", text)


def one_line(error: BaseException) -> str:
    """What another's error says, in one line without colours; nothing where it fails at saying it."""
    try:
        return " ".join(without_colours(str(error)).split())[:200]
    except Exception:
        return ""


#: What the command line exits with after a run that ended without converging; its results are written all the same.
NOT_CONVERGED = 4


class SecureFVIWarning(UserWarning):
    """A result that exists but deserves less trust than usual, such as a run that did not converge."""
