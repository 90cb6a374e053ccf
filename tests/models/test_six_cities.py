"""The shipped data are the published ones, and the program is the model of the paper's S3.1."""

import csv
import os
from collections import Counter, defaultdict
from pathlib import Path

import pyro
import pytest
import torch
from pyro import poutine

from secure_fvi.errors import InputError
from secure_fvi.models.base import MODULES, Dataset, data_folder, program


def kinds(dataset: Dataset) -> Counter[tuple[int, ...]]:
    columns = torch.cat([dataset.records["smoke"].unsqueeze(1), dataset.records["wheeze"]], dim=1)
    return Counter(tuple(int(v) for v in row) for row in columns.tolist())


def test_shipped_counts_are_those_of_the_published_table() -> None:
    folder = os.environ.get("SECURE_FVI_DATA")
    path = Path(folder or "") / "six_cities_wheeze" / "ohio.csv"
    if not folder or not path.exists():
        pytest.skip("SECURE_FVI_DATA holds no six_cities_wheeze/ohio.csv")
    visits: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            visits[row["id"]][int(row["age"])] = (int(row["smoke"]), int(row["resp"]))
    published = Counter((v[0][0], *(v[age][1] for age in (-2, -1, 0, 1))) for v in visits.values())
    assert kinds(program("six-cities").load()) == published


def test_children_are_written_out_in_the_documented_order() -> None:
    data = program("six-cities").load()
    smoke, wheeze = data.records["smoke"], data.records["wheeze"]
    assert len(data) == 537
    assert wheeze.shape == (537, 4)
    assert int(wheeze.sum()) == 326
    assert int(smoke.sum()) == 187
    assert torch.equal(data.record_ids, torch.arange(537))
    keys = [tuple(row) for row in torch.cat([smoke.unsqueeze(1), wheeze], dim=1).tolist()]
    assert keys == sorted(keys)


def test_log_density_is_the_one_of_the_paper() -> None:
    data = {k: v[345:355] for k, v in program("six-cities").load().records.items()}
    torch.manual_seed(0)
    beta, omega, b = torch.randn(4).double(), torch.tensor(0.3).double(), torch.randn(10).double()
    given = poutine.condition(program("six-cities").model.fn, {"beta": beta, "omega": omega, "b": b})
    ours = poutine.trace(given).get_trace(**data).log_prob_sum()

    normal = torch.distributions.Normal
    expected = normal(0.0, 10.0).log_prob(torch.cat([beta, omega.reshape(1)])).sum()
    expected = expected + normal(0.0, torch.exp(-omega)).log_prob(b).sum()
    for child in range(10):
        x = data["smoke"][child]
        for visit, age in enumerate((-2, -1, 0, 1)):
            logit = beta[0] + beta[1] * x + beta[2] * age + beta[3] * x * age + b[child]
            p = torch.sigmoid(logit)
            expected = expected + torch.log(p if data["wheeze"][child, visit] == 1 else 1 - p)
    torch.testing.assert_close(ours, expected)
    pyro.clear_param_store()


@pytest.mark.parametrize("name", sorted(MODULES))
def test_each_program_is_registered_under_its_own_name(name: str) -> None:
    assert program(name).name == name


def test_an_unknown_program_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match="did you mean 'six-cities'"):
        program("six_citys")


def test_a_dataset_refuses_records_and_ids_that_disagree() -> None:
    with pytest.raises(InputError, match="'x' has shape"):
        Dataset({"x": torch.zeros(3)}, torch.arange(4))
    with pytest.raises(InputError, match="different"):
        Dataset({"x": torch.zeros(2)}, torch.tensor([1, 1]))


def test_a_missing_data_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="SECURE_FVI_DATA"):
        data_folder("mnist", None)
    with pytest.raises(InputError, match="no folder 'mnist'"):
        data_folder("mnist", tmp_path)
