"""A Pyro program read as a federated model: which of its sites are global, a silo's, or a record's.

The program is an ordinary Pyro function of a silo's data. Sites inside the record plate belong to one record,
the named silo sites to one silo, all other latent sites to everybody (Hassan et al. 2023, eqs. 1 to 3);
`pyro.param`s are theta, fitted by empirical Bayes. Nothing in the program knows about federation.
"""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from secure_fvi.errors import DataError, InputError, SecureFVIWarning

#: A silo's data: tensors or arrays by argument name, the record first, or a pandas or polars frame of such columns.
Data = Mapping[str, Any]
#: From how many on a file in which every row occurs twice is taken for a mistake; a table's column of ids.
_DIFFERENT_ROWS, _RECORD_ID = 10, "record_id"
_INDEXED = re.compile(r"(?P<name>[^\[\]]+)\[(?P<index>\d+)\]")


@dataclass(frozen=True, eq=False)
class Shared:
    """A tensor that every silo passes to the program unchanged (a design constant, a grid), not one row a record."""

    tensor: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, Tensor):
            object.__setattr__(self, "tensor", as_tensor(self.tensor, "sf.Shared"))


@dataclass(frozen=True)
class SiloEncoder:
    """What a silo infers of its own latents from records without labels: q(Z_S | records) = N(loc, diag(scale^2)).

    `fn(values, present, **fields)` gives loc and scale, (n_silo,) each, of the silo sites in unconstrained space, in
    the order in which the program samples them. values: the global sites and pyro.params in the model's own space, by
    name. present (N,): 1 for a record, 0 for a row that is none and must not count. fields: the tensors that `fields`
    names, of N records; a label must not be among them. noise: optional arguments of `fn` and of the program itself,
    by name, and their shape a record, which get numbers uniform in (0, 1) in training and are left out otherwise; `fn`
    draws none itself.
    """

    fn: Callable[..., tuple[Tensor, Tensor]]
    fields: tuple[str, ...]
    noise: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class FederatedModel:
    """A Pyro function with the roles of its sites.

    `fn(**data)` is called with a silo's data. `record_plate` names the plate whose size is the number of
    records. `silo_sites` are latent sites outside that plate of which each silo has its own copy. `encoder` infers them
    from a silo's records, for FedVI. `start`: where the means of q begin, in the program's own space, by name of latent
    site, of its shape or broadcast to it; for the other sites that is the centre of the prior. Partitioned VI begins at
    the prior whatever it says.

    `group`: the column by which rows are one record, of any number (visits of a patient). `fn` then gets every other
    column as (N, M, ...), 0 where there is no row, and `present` (N, M), 1 where there is one and 0 elsewhere, with
    which it masks what it observes. M: `most_rows`, or that of the largest record where all silos are in one process
    and nothing is private.
    """

    fn: Callable[..., Any]
    record_plate: str = "records"
    silo_sites: tuple[str, ...] = ()
    encoder: SiloEncoder | None = None
    start: Mapping[str, float | Tensor] = field(default_factory=dict, hash=False)
    group: str | None = None
    most_rows: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise InputError(f"FederatedModel needs a Pyro function, not {type(self.fn).__name__}")
        if isinstance(self.silo_sites, str):
            raise InputError(f"silo_sites is a tuple of site names; write ('{self.silo_sites}',)")
        object.__setattr__(self, "silo_sites", tuple(self.silo_sites))

    @property
    def default_algorithm(self) -> Any:
        """What fits it where nobody says otherwise; None: as `fit` has it."""
        return None

    @property
    def concave(self) -> bool:
        """Whether log p(y, Z_S | Z_G) is concave in the latents of `silo_sites`, unconstrained, whatever Z_G and the
        data are: they have one mode then, around which they may be integrated out."""
        return False

    @property
    def edgeless(self) -> bool:
        """Whether log p is known to have no edge, off which it falls without a gradient that tells."""
        return False

    @property
    def own_slopes(self) -> bool:
        """Whether the program says what its functions' derivatives are, in fewer operations than PyTorch makes of
        theirs: a graph of it would not."""
        return False

    @property
    def record(self) -> str:
        """What one record is, for the claim of a private run."""
        label = self.record_label
        return "one row of the data" if label is None else f"all rows of one '{label}' at one silo"

    @property
    def record_label(self) -> str | None:
        """By what rows are one record; None where each is one."""
        return self.group

    @property
    def undeclared(self) -> str | None:
        """The option by which shapes would be said that are taken from data otherwise; None where there are none."""
        return "most_rows=M" if self.group is not None and self.most_rows is None else None

    @property
    def numbered_by_data(self) -> str | None:
        """Groups of a silo whose latents are numbered by which groups are in its data, so that a record of a new one
        renumbers those of all others; None where there are none."""
        return None

    def check_declared(self, privacy: object) -> None:
        """Raise InputError where a private run would take a shape from data: who sees it in a message or in a result
        can tell whether the record with most rows is there."""
        if privacy is not None and (option := self.undeclared) is not None:
            raise InputError(
                f"under privacy the numbers of rows and groups that shapes follow from are said beforehand, not looked "
                f"up in the data: give the model {option}, as large as they may become"
            )

    def prepared(self, silos: Mapping[str, Any]) -> dict[str, Any]:
        """Each silo's data as `fn` takes them: records that are groups of rows laid out. Raises DataError."""
        if self.group is None or all(isinstance(data, Laid) for data in silos.values()):
            return dict(silos)
        read = {silo: _ragged(data, self.group, silo) for silo, data in silos.items()}
        most = max(int(np.bincount(record).max()) for record, _ in read.values())
        most = most if self.most_rows is None else self.most_rows
        return {silo: _laid(record, columns, most, silo) for silo, (record, columns) in read.items()}

    @property
    def identity(self) -> dict[str, str] | None:
        """What a saved result says of its model, and `sf.load` holds the model that it is given against; None: sites
        and moments have to do."""
        return None

    def readable(self, draws: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Draws (S, ...) of the global sites under the names and in the units that users read; None: the sites' own."""
        return None

    def called(self, site: str, at: Sequence[int]) -> str | None:
        """What users read in place of this number of a global site, with the values of other columns at which it is
        that where the table's is not; None: the site's own name."""
        return None

    @property
    def numbers(self) -> int:
        """How many numbers of a silo's table a predictive check adds up; 0: tables are not compared."""
        return 0

    def replicated(self, problem: Any, z: Tensor, rows: Mapping[str, Tensor], seed: int) -> Tensor:
        """(1 + S, `numbers`) of a silo's rows as `fn` takes them, and of a replicate of them at each z (S, n). Never
        leaves the silo but hidden among all silos'."""
        raise NotImplementedError

    def told(self, result: Any) -> dict[str, Any]:
        """What result.json says of a result besides, for reports; of totals alone."""
        return {}

    def for_new(self, data: Any, scored: bool) -> tuple[FederatedModel, Any, Callable[[dict[str, Tensor]], Any]]:
        """For new records: the program to run, `data` as it takes them, and what makes of its draws what users read.
        scored: whether their density is asked for, and not draws."""
        return self, data, lambda draws: draws


class Laid(dict[str, Any]):
    """A silo's data as a program takes them, groups of rows laid out."""


def laid_out(values: npt.NDArray[Any], record: npt.NDArray[np.int64], most: int, fill: float = 0) -> npt.NDArray[Any]:
    """Rows (rows, ...) as (N, most, ...), in their order within each record; `fill` where there is none. `record`:
    whose row each is, 0 to N - 1, none of whom has more than `most`."""
    out = np.full((len(np.bincount(record)), most, *values.shape[1:]), fill, dtype=values.dtype)
    out[record, places(record)] = values
    return out


def places(record: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """(rows,) of each row, its place among those of its record."""
    counts = np.bincount(record)
    out = np.empty(len(record), dtype=np.int64)
    out[np.argsort(record, kind="stable")] = np.arange(len(record)) - np.repeat(np.cumsum(counts) - counts, counts)
    return out


def check_rows(record: npt.NDArray[np.int64], most: int, silo: str) -> None:
    """Raise DataError where a record has more rows than all parties know of."""
    counts = np.bincount(record)
    if bad := int((counts > most).sum()):
        raise DataError(
            f"silo '{silo}': {bad} of {len(counts)} records have more rows than the {most} that were agreed on"
        )


def _ragged(data: Any, group: str, silo: str) -> tuple[npt.NDArray[np.int64], dict[str, Any]]:
    columns = data_columns(data, silo)
    if group not in columns:
        raise InputError(f"silo '{silo}': no column '{group}', which says whose rows are one record")
    ids = columns.pop(group)
    ids = np.asarray(ids.to_numpy() if hasattr(ids, "to_numpy") else ids)
    if ids.ndim != 1 or not len(ids):
        raise InputError(f"silo '{silo}': '{group}' must be one id a row")
    if bad := int(np.sum([is_gap(i) for i in ids.tolist()])):
        raise DataError(f"silo '{silo}': '{group}' is missing in {bad} of {len(ids)} rows")
    if bad := int(rounded(ids).sum()):
        raise DataError(
            f"silo '{silo}': '{group}' holds floats of too many digits to be told apart in {bad} of {len(ids)} rows; "
            "give ids as whole numbers or text"
        )
    return np.unique(ids.astype(str) if ids.dtype.kind == "O" else ids, return_inverse=True)[1].reshape(-1), columns


def rounded(ids: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """(rows,) where an id is a float so large that another whole number may have become the same."""
    if ids.dtype.kind == "O":
        return np.array([isinstance(i, (float, np.floating)) and bool(rounded(np.asarray(i))) for i in ids])
    if ids.dtype.kind != "f":
        return np.zeros(ids.shape, dtype=bool)
    return np.abs(ids) >= 2.0 ** (np.finfo(ids.dtype).nmant + 1)


def _laid(record: npt.NDArray[np.int64], columns: Mapping[str, Any], most: int, silo: str) -> Laid:
    check_rows(record, most, silo)
    out = Laid(present=torch.from_numpy(laid_out(np.ones(len(record)), record, most)))
    for name, value in columns.items():
        if isinstance(value, Shared) or not (isinstance(value, Tensor) or is_array(value)):
            out[name] = value
            continue
        tensor = _whole(as_tensor(value, f"silo '{silo}': '{name}'"))
        if tensor.dim() == 0 or len(tensor) != len(record):
            raise InputError(f"silo '{silo}': '{name}' must have {len(record)} rows, as its group has")
        out[name] = torch.from_numpy(laid_out(tensor.numpy(), record, most))
    return out


class Schema(NamedTuple):
    """What all parties know of the data: names, shapes and types, never a value that is not shared."""

    fields: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]  # per record: name, shape of one record, dtype
    constants: dict[str, Any]  # values that every silo passes unchanged

    def dummy_rows(self, records: int) -> dict[str, Tensor]:
        """Made data of `records` rows, for tracing; integers are zero, so that they index safely."""
        return {
            name: torch.full((records, *shape), 1.0 if dtype.is_floating_point else 0, dtype=dtype)
            for name, shape, dtype in self.fields
        }

    def to(self, device: torch.device) -> Schema:
        """The same schema with its shared tensors on `device`."""
        move = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.constants.items()}
        return Schema(self.fields, move)


class Records(NamedTuple):
    """One silo's data, checked. Seen by that silo only."""

    rows: dict[str, Tensor]  # (N_j, ...) each
    size: int  # N_j


def read_data(data: Data, silo: str, dtype: torch.dtype) -> tuple[Schema, Records]:
    """Check a silo's data and tell its schema.

    Floating point numbers are cast to `dtype`, whole ones to int64 (images of eight bits stay). A message names the
    column and counts rows; it quotes no value. Raises InputError when first dimensions disagree, a column holds
    anything but finite numbers, or there is no record.
    """
    rows: dict[str, Tensor] = {}
    constants: dict[str, Any] = {}
    for name, value in data_columns(data, silo).items():
        if isinstance(value, Shared):
            # Nobody looks at arithmetic of what all know: it does not wrap round.
            constants[name] = _cast(value.tensor.long() if value.tensor.dtype == torch.uint8 else value.tensor, dtype)
        elif isinstance(value, Tensor) or is_array(value):
            rows[name] = _cast(as_tensor(value, f"silo '{silo}': '{name}'"), dtype)
        else:
            constants[name] = value
    if not rows:
        lists = [f"'{name}'" for name, value in constants.items() if isinstance(value, (list, tuple, range))]
        hint = f" ({', '.join(lists)}: a list is a shared value; use torch.tensor or numpy.array)" if lists else ""
        raise InputError(
            f"silo '{silo}': no tensor in its data; each record needs one row of at least one tensor{hint}"
        )
    for name, tensor in rows.items():
        if tensor.dim() == 0:
            raise InputError(f"silo '{silo}': '{name}' has no first dimension; wrap a shared value in sf.Shared")
    first = next(iter(rows))
    count = rows[first].shape[0]
    for name, tensor in rows.items():
        if tensor.shape[0] != count:
            raise InputError(
                f"silo '{silo}': '{name}' has {tensor.shape[0]} rows and '{first}' has {count}; "
                "the first dimension is the record (wrap tensors without it in sf.Shared)"
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).reshape(count, -1).any(1).sum())
            raise DataError(
                f"silo '{silo}': '{name}' holds NaN or infinite values in {bad} of {count} rows; "
                "remove or impute them first"
            )
    if count == 0:
        raise InputError(f"silo '{silo}' has no records; leave it out of the run")
    fields = tuple((n, tuple(t.shape[1:]), t.dtype) for n, t in sorted(rows.items()))
    return Schema(fields, constants), Records({n: rows[n] for n, _, _ in fields}, count)


def data_columns(data: Any, silo: str) -> dict[str, Any]:
    """Columns by argument name. Those of a frame called `x[0]`, `x[1]`, ... are one array (N, k), as in a CSV."""
    if isinstance(data, Mapping):
        named = dict(data)
        check_aligned(named.values(), f"silo '{silo}': ")
    elif hasattr(data, "collect") or hasattr(data, "column_names"):  # polars' lazy frames, Arrow's tables
        raise InputError(
            f"silo '{silo}': its data must be a dict of arrays or a frame in memory, not a {type(data).__name__}; "
            "collect() or to_pandas() makes one"
        )
    elif hasattr(data, "columns") and hasattr(data, "__getitem__"):
        named = {name: data[name] for name in data.columns}
        if len(named) < len(data.columns):
            raise InputError(f"silo '{silo}': two columns of its frame have the same name")
    else:
        raise InputError(
            f"silo '{silo}': its data must be a dict of tensors or arrays by argument name, or a frame, "
            f"not {type(data).__name__}"
        )
    for name in named:
        if not isinstance(name, str):
            raise InputError(f"silo '{silo}': columns are named by the model function's arguments, not by {name!r}")
    if isinstance(data, Mapping):
        return named
    return side_by_side(named, f"silo '{silo}'")


def side_by_side(named: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Columns called `x[0]`, `x[1]`, ... as one tensor `x` (N, k), the others as they are. `where` is who has them."""
    single = dict(named)
    groups: dict[str, dict[int, Tensor]] = {}
    for name in named:
        match = _INDEXED.fullmatch(name)
        if match is not None:
            column = as_tensor(single.pop(name), f"{where}: '{name}'")
            groups.setdefault(match["name"], {})[int(match["index"])] = column
    for name, parts in groups.items():
        if name in single or sorted(parts) != list(range(len(parts))):
            raise InputError(f"{where}: columns of '{name}' must be {name}[0], {name}[1], ... without a gap")
        single[name] = torch.stack([parts[i] for i in range(len(parts))], 1)
    return single


def is_array(value: Any) -> bool:
    """NumPy's arrays, and the columns of pandas and polars, none of which is imported for it."""
    return isinstance(value, np.ndarray) or hasattr(value, "to_numpy")


def as_tensor(value: Any, where: str) -> Tensor:
    """A tensor of numbers. Raises DataError, which counts rows, for text, dates and empty entries."""
    if isinstance(value, Tensor) and value.dtype != torch.uint64:
        odd = value.is_complex() or value.is_meta or value.is_quantized or value.is_nested
        if odd or value.layout != torch.strided:
            kind = "nested" if value.is_nested else f"{value.dtype}, {value.layout}"
            raise InputError(f"{where} is a tensor of {kind}; give plain dense numbers")
        return value.detach()
    if np.ma.is_masked(value):
        bad = int(np.ma.getmaskarray(value).reshape(len(value), -1).any(1).sum())
        raise DataError(f"{where} is masked in {bad} of {len(value)} rows; remove or impute them first")
    array = np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value)
    if array.dtype.kind == "O":  # numbers with gaps, as frames keep them, or text
        array = _numbers(array, where)
    if array.dtype.kind not in "biuf":
        kinds = {"U": "text", "S": "text", "M": "dates", "m": "times", "c": "complex numbers"}
        kind, rows = kinds.get(array.dtype.kind, "several fields a row"), len(array) if array.ndim else 1
        raise DataError(f"{where} holds {kind} in {rows} of {rows} rows; code it as numbers")
    if array.dtype.kind == "u" and array.dtype.itemsize == 8:  # to be whole numbers with a sign, which end at 2^63
        _refuse_entries(array >= 2**63, where, "whole numbers of 2^63 and more")
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))


def _numbers(array: npt.NDArray[Any], where: str) -> npt.NDArray[Any]:
    """An array of Python objects as numbers: truth values or whole numbers where all are; what is missing is NaN,
    which `read_data` counts."""

    def number(entry: Any) -> Any:
        if is_gap(entry):
            return math.nan
        if isinstance(entry, Decimal):
            return float(entry)
        return entry if isinstance(entry, (int, float, np.number, np.bool_)) else None

    flat = [number(entry) for entry in array.reshape(-1)]
    _refuse_entries(
        np.array([entry is None for entry in flat]).reshape(array.shape), where, "entries that are no numbers"
    )
    large = [isinstance(entry, int) and not -(2**63) <= entry < 2**63 for entry in flat]
    _refuse_entries(np.array(large).reshape(array.shape), where, "whole numbers of 2^63 and more")
    return np.array(flat).reshape(array.shape)


def _refuse_entries(bad: npt.NDArray[np.bool_], where: str, what: str) -> None:
    """bad: by entry (N, ...)."""
    if bad.any():
        count = int(bad.reshape(len(bad), -1).any(1).sum())
        raise DataError(f"{where} holds {what} in {count} of {len(bad)} rows; code them as numbers")


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.is_floating_point():
        return tensor.to(dtype)
    return _whole(tensor)


def _whole(tensor: Tensor) -> Tensor:
    """Whole numbers of any size as int64. Labels of eight bits would index as a mask does, and their differences wrap
    round; images of eight bits stay as small as they are (`data_contract` looks at their arithmetic)."""
    small = tensor.dtype == torch.uint8 and tensor.dim() > 1
    if tensor.is_floating_point() or tensor.dtype == torch.bool or small:
        return tensor
    return tensor.to(torch.int64)


# ---- What columns in memory have in common, whoever's they are: NumPy's, those of pandas and polars, lists ----


def is_gap(cell: Any) -> bool:
    """Whether a cell holds nothing: None, NaN, and pandas' NA and NaT, which are equal to nothing either."""
    if cell is None or type(cell).__name__ in ("NAType", "NaTType"):
        return True
    different = cell != cell
    return isinstance(different, (bool, np.bool_)) and bool(different)  # an array in a cell is none


def check_aligned(columns: Iterable[Any], where: str = "") -> None:
    """Raise InputError for columns with row labels, as pandas' series have them, that are not the same: taken by place,
    rows of different people would be one."""
    indexes = [column.index for column in columns if hasattr(column, "to_numpy") and hasattr(column, "index")]
    if any(not index.equals(indexes[0]) for index in indexes):
        raise InputError(
            f"{where}its columns have different indexes, or the same in another order: align them, as by "
            "pandas.DataFrame(columns), or give arrays, which are taken by place"
        )


def check_repeats(rows: Mapping[str, Tensor], silo: str, named: Iterable[str] | None = None) -> None:
    """Refuse a silo's records, without ids of their own, of which every one occurs several times: a file joined to
    itself. Only where measured numbers, with fractions, say that it is no coincidence. Of records that are groups of
    rows, their rows are looked at (`_check_rows_of_groups`). named: the columns that they were made of, as their owner
    knows them; with `record_id` among them, whose cells differ, records are not looked at."""
    if "present" in rows and rows["present"].shape[1:] > (1,):
        _check_rows_of_groups(rows, silo, named)
        return
    if _RECORD_ID in (named or ()):
        return
    columns = [value.reshape(len(value), -1).double() for value in rows.values()]
    if not any(bool((column % 1 != 0).any()) for column in columns):
        return
    marks = _marks(columns)
    different, counts = marks.unique(return_counts=True)
    if len(different) < _DIFFERENT_ROWS or int(counts.min()) < 2:
        return
    said = (
        f"silo '{silo}': {len(marks) - len(different)} of {len(marks)} rows repeat another one in all of "
        f"{', '.join(map(repr, named or rows))}"
    )
    times = math.gcd(*counts.tolist())
    if times > 1:
        column = f", or a column {_RECORD_ID}" + (" with unique = true in the dictionary" if named is not None else "")
        raise DataError(
            f"{said}: every record is there {times} times, or a multiple of it. Remove the copies, or give records ids "
            f"of their own (record_ids{column}) if they are different people"
        )
    warnings.warn(
        f"{said}, as of few doses and outcomes, or of a table joined to one with several rows for each of its own: "
        "each counts as a record of its own",
        SecureFVIWarning,
        stacklevel=2,
    )


def cohort_digest(rows: Mapping[str, Tensor | npt.NDArray[Any]], key: bytes = b"") -> bytes:
    """32 bytes that stand for the rows in use, (N, ...) each, whatever their order; a row more, less or other changes
    them.

    Rows may be few and their columns narrow, so that whoever has a digest could try all tables: what leaves a site
    is made with a `key` (at most 64 bytes) that the site alone knows.
    """
    form, cells = [], []
    for name in sorted(rows):
        value = np.ascontiguousarray(rows[name])
        if value.dtype.kind == "f":
            value = value + 0.0  # one zero, not two
        form.append((name, str(value.dtype), value.shape[1:]))
        cells.append(value.reshape(len(value), -1).view(np.uint8))
    count, width = len(cells[0]), sum(c.shape[1] for c in cells)
    digests: list[bytes] = []
    for at in range(0, count, 65_536):
        block = memoryview(np.concatenate([c[at : at + 65_536] for c in cells], 1).tobytes())
        digests += [
            hashlib.blake2b(block[i : i + width], digest_size=32, key=key).digest() for i in range(0, len(block), width)
        ]
    total = hashlib.blake2b(repr((form, count)).encode(), digest_size=32, key=key, person=b"fvi cohort/1")
    total.update(b"".join(sorted(digests)))
    return total.digest()


def order_digest(rows: Mapping[str, Tensor | npt.NDArray[Any]]) -> str:
    """64 letters that stand for the rows in use, (N, ...) each, in their order: by its place is found what a silo keeps
    of a record from round to round."""
    found = hashlib.blake2b(digest_size=32, person=b"fvi order/1")
    for name in sorted(rows):
        value = np.ascontiguousarray(rows[name])
        value = value + 0.0 if value.dtype.kind == "f" else value  # one zero, not two
        found.update(repr((name, str(value.dtype), value.shape)).encode())
        found.update(value.tobytes())
    return found.hexdigest()


def _marks(columns: list[Tensor]) -> Tensor:
    """(N,) numbers, the same of rows that are the same in all columns (N, k), and others of others."""
    values = torch.cat(columns, 1)
    weights = torch.randn(values.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (values * weights.to(values.device)).sum(1)


def _check_rows_of_groups(rows: Mapping[str, Tensor], silo: str, named: Iterable[str] | None) -> None:
    """Of records that are groups of rows: refuse rows of which every one stands several times in its group, where a
    number with fractions that differs within groups says that it is no coincidence; warn of some, where the response,
    `y`, is such a number."""
    here = rows["present"] > 0
    inner = {name: v for name, v in rows.items() if v.shape[:2] == here.shape and name != "present"}
    measured = {
        name
        for name, v in inner.items()
        if bool((v.double() % 1 != 0)[here].any()) and bool((v != v[:, :1])[here].any())
    }
    if not measured:
        return
    columns = [v[here].reshape(int(here.sum()), -1).double() for v in inner.values()]
    group = torch.arange(len(here), device=here.device)[:, None].expand(here.shape)[here].double()
    marks = _marks(columns) + group * math.sqrt(2)
    different, counts = marks.unique(return_counts=True)
    if not (again := len(marks) - len(different)):
        return
    said = (
        f"silo '{silo}': {again} of {len(marks)} rows repeat another one of the same group in all of "
        f"{', '.join(map(repr, named or rows))}"
    )
    if (times := math.gcd(*counts.tolist())) > 1 and len(different) >= _DIFFERENT_ROWS:
        raise DataError(
            f"{said}: every row is there {times} times, or a multiple of it, as of a table joined to itself. Remove "
            "the copies, or have the formula read the column that tells them apart"
        )
    if "y" in measured:
        warnings.warn(f"{said}: each counts as one more measurement", SecureFVIWarning, stacklevel=2)
