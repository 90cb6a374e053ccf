"""Vertical jobs over made-up files of the same people, and what one process makes of them."""

from __future__ import annotations

import csv
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from consortium_run import SILOS, Job
from deployment_world import World
from safetensors.torch import load_file

from secure_fvi.models.vertical_programs import load_adult
from secure_fvi.runs.config import Alignment
from secure_fvi.runs.directory import read_json

PEOPLE = 40
VERTICAL = {"name": "vertical", "response": "private", "rounds": 8, "rho": 0.5}
SHARED = {**VERTICAL, "response": "shared"}
SORTED = {"column": "person", "how": "sorted"}
MATCHED = {"column": "person", "drop": "- "}
MASKED, PLAIN, TWO = {"kind": "masked"}, {"kind": "plain"}, {"options": {"columns": 2}}


def write(path: Path, header: list[str], rows: list[list[Any]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def tables(folder: Path, people: int = PEOPLE) -> dict[str, Path]:
    """Of each silo two columns, and the outcome, of the same people in the order of their ids."""
    rng = torch.Generator().manual_seed(5)
    x = torch.randn(people, 6, generator=rng).double()
    y = torch.bernoulli(torch.sigmoid(2 * x[:, 0] - 2 * x[:, 3]), generator=rng)
    ids = [f"P-{1000 + i}" for i in range(people)]
    found = {s: folder / f"{s}.csv" for s in (*SILOS, "response")}
    for j, silo in enumerate(SILOS):
        write(
            found[silo],
            ["person", "a", "b"],
            [[i, *map(float, r)] for i, r in zip(ids, x[:, 2 * j : 2 * j + 2], strict=True)],
        )
    write(found["response"], ["person", "died"], [[i, int(v)] for i, v in zip(ids, y, strict=True)])
    return found


#: The response lies at a silo, and silos alone know it.
AT_SILO: dict[str, Any] = {
    "response": {"silo": "east", "column": "died"},
    "algorithm": {**VERTICAL, "response": "silos"},
}


def outcome_at(files: dict[str, Path], silo: str) -> None:
    """The outcome's file becomes a column of this silo's."""
    with files.pop("response").open(newline="") as outcome, files[silo].open(newline="") as own:
        rows = [[*a, b[1]] for a, b in zip(csv.reader(own), csv.reader(outcome), strict=True)]
    write(files[silo], rows[0], rows[1:])


class ColumnsJob(Job):
    """A vertical job over files, in a world whose policies allow it."""

    def __init__(self, world: World, folder: Path, allow: bool = True, **changes: Any) -> None:
        self.files = tables(folder)
        table = {
            "model": {"likelihood": "bernoulli"},
            "partition": None,
            "silo": [{"id": s, "data": str(self.files[s])} for s in SILOS],
            "response": {"data": str(self.files["response"]), "column": "died"},
            "alignment": SORTED,
            "algorithm": VERTICAL,
            **changes,
        }
        self.holder = table["response"].get("silo")
        if self.holder is not None:
            outcome_at(self.files, self.holder)
        super().__init__(world, folder, allow, **table)

    def allow(self, site: str, rule: dict[str, Any] | None = None, **changes: Any) -> None:
        """rule: of the data set, beside or in place of what this job needs."""
        if site in self.files:
            assert self.config.alignment is not None
            alignment = self.config.alignment.model_dump(mode="json")
            data = {"id": "data", "path": str(self.files[site]), "alignment": alignment, "fewest": PEOPLE // 2}
            data |= {"response": ["died"]} if site == self.holder else {}
            data |= rule or {}
            changes = {
                "data": [{k: v for k, v in data.items() if v is not None}],
                "disclosures": ["person_rows"],
                **changes,
            }
        super().allow(site, **changes)


def census(folder: Path, **algorithm: Any) -> dict[str, Any]:
    """A job of 30,000 people of the census, columns at five silos in files of their own, the outcome at the server."""
    data = os.environ.get("SECURE_FVI_DATA")
    if data is None or not (Path(data) / "uci_adult").is_dir():
        pytest.skip("SECURE_FVI_DATA holds no uci_adult")
    adult = load_adult(Path(data), records=30_000)
    for name, table in (*((s, rows["x"]) for s, rows in adult.silos.items()), ("outcome", adult.response[:, None])):
        columns = [f"c{i}" for i in range(table.shape[1])] if name != "outcome" else ["rich"]
        rows = [[f"P-{at:05}", *map(float, row)] for at, row in enumerate(table)]
        write(folder / f"{name}.csv", ["person", *columns], rows)
    return {
        "seed": 3,
        "model": {"likelihood": "bernoulli"},
        "silo": [{"id": s, "data": str(folder / f"{s}.csv")} for s in sorted(adult.silos)],
        "response": {"data": str(folder / "outcome.csv"), "column": "rich"},
        "alignment": SORTED,
        "algorithm": {**VERTICAL, "rho": 0.1, "learning_rate": 0.02, **algorithm},
        "run": {"compile": False, "threads": 1},
    }


def owned(job: Job, world: World) -> dict[str, dict[str, torch.Tensor]]:
    """What each silo kept of its own, by silo; and that it is what one process has in the silo's file."""
    found, id_ = {}, read_json(job.folder / "remote" / "run.json")["job"]
    files = sorted((job.folder / "local" / "silos").glob("*.safetensors"))
    for silo, file in zip(SILOS, files, strict=True):
        kept = world.homes[silo].path / "results" / f"{id_}.safetensors"
        found[silo], alone = load_file(kept), load_file(file)
        assert all(torch.equal(found[silo][f"own/{name}"], value) for name, value in alone.items())
    return found


def aligned(job: ColumnsJob, matched: Mapping[str, npt.NDArray[np.int64]]) -> bytes:
    """The posterior of one process over the files' rows in the order in which they were matched."""
    folder = job.folder / "aligned"
    folder.mkdir()
    for name, rows in matched.items():
        with job.files[name].open(newline="") as file:
            header, *table = csv.reader(file)
        write(folder / f"{name}.csv", header, [[f"{at:05}", *table[row][1:]] for at, row in enumerate(rows)])
    silos = tuple(s.model_copy(update={"data": str(folder / f"{s.id}.csv")}) for s in job.config.silo)
    response = job.config.response
    assert response is not None
    if response.data is not None:
        response = response.model_copy(update={"data": str(folder / "response.csv")})
    alignment = Alignment(column="person", how="sorted")
    job.config = job.config.model_copy(update={"silo": silos, "response": response, "alignment": alignment})
    return job.local()


def shuffled(job: ColumnsJob) -> None:
    """Files in orders of their own, each with people that no other has, and without one that all others have; ids are
    written in two ways."""
    for at, path in enumerate(job.files.values()):
        with path.open(newline="") as file:
            header, *rows = csv.reader(file)
        own = [[f"P-{2000 + 10 * at + i}", *rows[i][1:]] for i in range(at + 1)]
        rows = [row for i, row in enumerate(rows) if i != at] + own
        random.Random(at).shuffle(rows)
        write(path, header, [[r[0].lower().replace("-", " ") if at % 2 else r[0], *r[1:]] for r in rows])


def in_order(job: ColumnsJob) -> bytes:
    """The posterior of one process over the people of `shuffled` files, in the order of their ids."""

    def people(path: Path) -> dict[str, int]:
        with path.open(newline="") as file:
            return {row[0].upper().replace("-", " "): at for at, row in enumerate(list(csv.reader(file))[1:])}

    found = {name: people(path) for name, path in job.files.items()}
    common = sorted(set.intersection(*(set(ids) for ids in found.values())))
    return aligned(job, {name: np.array([ids[p] for p in common]) for name, ids in found.items()})
