"""Floors of the tables of accuracy: the same networks and splits, fitted as points, without a posterior.

Each silo alone, FedAvg (McMahan et al. 2017), FedAvg with steps of each silo on its own images at the end, and one fit
to the pooled images, in as many rounds and steps as the lines that they stand beside. Steps are Adam's at one rate,
which falls to nothing; nothing was tuned. All silos step at once in one process, without messages or sums.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import cos, pi
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional

from secure_fvi.compiled import threads
from secure_fvi.models import bnn, convolutional, multinomial, uci_adult, writers
from secure_fvi.models.fedvi import common_logits
from secure_fvi.models.fedvi import start as fedvi_start
from secure_fvi.models.heart import load as load_heart
from secure_fvi.models.mnist import load
from secure_fvi_lab.experiments import (
    Experiment,
    Request,
    Row,
    fedvi,
    heart,
    lines_of,
    panels,
    pvi_mnist,
    sfvi_mnist,
    spread,
    with_sd,
)
from secure_fvi_lab.experiments.partitions import evenly, take
from secure_fvi_lab.experiments.sfvi_mnist import each_seed

Weights = dict[str, Tensor]
#: Log probabilities (N, classes), up to a constant a row, of records by one network's weights.
Predict = Callable[[Weights, Tensor], Tensor]
_RATE = 0.005
#: As `bench privacy` has them, whose 400 steps on 5% of a silo are 20 rounds of 20 here.
_ADULT_SILOS = 10


class Task(NamedTuple):
    """What is fitted: J silos of equal size, and what each silo is scored on."""

    predict: Predict
    start: Weights
    x: Tensor  # (J, N, ...)
    y: Tensor  # (J, N)
    tests: Sequence[tuple[Tensor, Tensor]]  # of each silo, or one that is everybody's


class Plan(NamedTuple):
    table: str  # the experiment beside whose lines these stand
    name: str
    make: Callable[[Path | None, int], Task]
    rounds: int
    local_steps: int
    batch: int  # records of a silo in a step
    methods: tuple[str, ...] = ("silo alone", "FedAvg", "pooled")
    own_steps: int = 0
    seeds: int = 1

    @property
    def setting(self) -> str:
        return f"{self.table}: {self.name}"


def _hbnn(size: sfvi_mnist.Size, folder: Path | None, seed: int) -> Task:
    data = sfvi_mnist.split(folder, size, seed)
    start = _glorot({"first": (196, 64), "last": (64, 10)}, seed)
    tests = [_pair(silo) for silo in data.test]
    return Task(lambda w, x: torch.relu(x @ w["first"]) @ w["last"], start, *_stacked(data.train), tests)


def _multinomial(size: sfvi_mnist.Half, folder: Path | None, seed: int) -> Task:
    data = sfvi_mnist.images(folder, size, seed)
    start = {"weights": torch.zeros(784, 10), "bias": torch.zeros(10)}
    return Task(_drawn_once(multinomial.class_log_probs), start, *_stacked(data.silos), [data.test])


def _dense(split: str, silos: int, images: int, folder: Path | None, seed: int) -> Task:
    data = pvi_mnist.images(folder, images, seed)
    start = _glorot({"hidden_weights": (196, 32), "output_weights": (32, 10)}, seed)
    start |= {"hidden_bias": torch.zeros(32), "output_bias": torch.zeros(10)}
    parts = pvi_mnist.SPLITS[split](data.train, silos, seed)
    return Task(_drawn_once(bnn.class_log_probs), start, *_stacked(parts), [(data.x, data.y)])


def _convolutional(size: pvi_mnist.Size, folder: Path | None, seed: int) -> Task:
    test = load(folder, "test").records
    parts = pvi_mnist.SPLITS[size.split](load(folder, count=size.images, seed=seed), size.silos, seed)
    shapes = {"first_filters": (8, 1, 5, 5), "second_filters": (16, 8, 5, 5), "output_weights": (256, 10)}
    start = _glorot(shapes, seed) | {"first_bias": torch.zeros(8), "second_bias": torch.zeros(16)}
    start["output_bias"] = torch.zeros(10)
    return Task(_drawn_once(convolutional.class_log_probs), start, *_stacked(parts), [_pair(test)])


def _adult(folder: Path | None, seed: int) -> Task:
    train, test = uci_adult.load(folder, "train"), uci_adult.load(folder, "test").records
    x, y = _stacked(take(train, evenly(len(train), _ADULT_SILOS, seed))[0])
    start = {"weights": torch.zeros(x.shape[-1], 1)}
    predict = lambda w, x: functional.pad(x @ w["weights"], (1, 0))  # noqa: E731
    return Task(predict, start, x, y.long(), [(test["x"].float(), test["y"].long())])


def _heart(folder: Path | None, assignments: int) -> list[Row]:
    """Logistic regression on the columns of one silo, and of both; the response is known to each."""
    torch.set_num_threads(1)
    found = []
    for marked, name in ((False, ""), (True, ", marked")):
        data = load_heart(folder, marked)
        folds = heart.make_folds(data.y, assignments)
        of = {f"silo {j + 1} alone": data._replace(x=(data.x[j],), numeric=(data.numeric[j],)) for j in range(2)}
        for method, held in (of | {"pooled": data}).items():
            began = time.monotonic()
            right = heart.by_fold(heart.logistic(held, folds), data.y, folds.test)[0].reshape(assignments, -1).mean(1)
            seconds = round((time.monotonic() - began) / assignments, 1)
            found += [
                {"setting": "heart: logistic", "method": method + name, "seed": s, "test": share, "seconds": seconds}
                for s, share in enumerate((right / 100).tolist())
            ]
    return found


def _writers(new: bool, folder: Path | None, seed: int) -> Task:
    plan = fedvi.writers_plan(quick=False)
    clients = writers.write(folder, plan.taking_part + plan.new, seed=seed)
    clients = clients[plan.taking_part :] if new else clients[: plan.taking_part]
    network = replace(plan.network, seed=seed)
    tests = [(c.test_x, c.test_y) for c in clients]
    x, y = (torch.stack([getattr(c, name) for c in clients]) for name in ("x", "y"))
    return Task(partial(common_logits, network), fedvi_start(network, personal=False), x, y, tests)


def plans(quick: bool) -> Iterator[Plan]:
    """The lines, in the order in which they are run."""
    if quick:
        size = sfvi_mnist.NETWORKS_QUICK[0]
        yield Plan("hbnn-mnist", size.name, partial(_hbnn, size), 3, 10, 108, own_steps=20)
        return
    for size in sfvi_mnist.NETWORKS:
        yield Plan(
            "hbnn-mnist", size.name, partial(_hbnn, size), size.rounds, size.local_steps, 108,
            ("silo alone", "FedAvg", "FedAvg, own steps", "pooled"), own_steps=200,
        )  # fmt: skip
    for part in sfvi_mnist.MULTINOMIAL:
        batch = round(part.sampling_rate * part.images)
        yield Plan("multinomial-mnist", part.name, partial(_multinomial, part), part.rounds, part.local_steps, batch)
    shards = pvi_mnist.SHARDS
    for split, silos, name in (
        ("two digits", shards.silos, "100 silos, label shards"),
        ("alike", shards.alike, "10 silos, alike"),
    ):
        batch = round((0.25 if silos > shards.alike else 0.1) * shards.images / silos)
        make = partial(_dense, split, silos, shards.images)
        yield Plan("pvi-mnist-shards", name, make, shards.rounds, shards.local_steps, batch)
    yield Plan("bench privacy", f"adult, {_ADULT_SILOS} silos", _adult, 20, 20, 163)
    for new in (False, True):
        name = "new writers" if new else "writers taking part"
        methods = ("silo alone",) if new else ("silo alone", "pooled")
        yield Plan("fedvi-writers", name, partial(_writers, new), 100, 1, 40, methods)
    conv = pvi_mnist.FULL[0]  # pooled, the other split is the same images
    make = partial(_convolutional, conv)
    yield Plan("pvi-mnist", conv.name, make, conv.rounds, conv.local_steps, conv.batch // conv.silos, ("pooled",))


def _floors(request: Request) -> tuple[Row, Figure]:
    rows = []
    for plan, seed in each_seed(list(plans(request.quick))):
        said = f"{plan.setting}, seed {seed}"
        rows += request.once(said, plan[3:-1], partial(_rows, plan, request.data, seed))
    if not request.quick:
        rows += request.once("heart", 3, partial(_heart, request.data, 3))
    groups: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        groups.setdefault((row["setting"], row["method"]), []).append(100 * row["test"])
    lines = [{"setting": key[0], "method": key[1], **spread(tests)} for key, tests in groups.items()]
    first = lines[0]
    content = {
        "paper": "none",
        "ours": {
            **{k: first[k] for k in ("mean", "sd", "seeds")},
            "what": f"accuracy, %, {first['setting']}, silo alone",
        },
        "lines": lines,
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "bytes": 0,
        "setting": f"points fitted by Adam at {_RATE}, falling to 0, no prior, in the rounds, local steps and batches "
        "of the table that is named (writers: 100 steps on 40 digits each); alone and pooled: as many steps in all, "
        "pooled on as many records as all silos together; heart: logistic regression on a silo's columns, the response "
        "known to it; no messages, hence no bytes; test: as in that table",
        "rows": rows,
    }
    return content, plot(lines)


def _rows(plan: Plan, folder: Path | None, seed: int) -> list[Row]:
    task, found = plan.make(folder, seed), []
    with threads(1):
        for method in plan.methods:
            began = time.monotonic()
            test = accuracy(task, fitted(task, plan, method, torch.Generator().manual_seed(seed)))
            seconds = round(time.monotonic() - began, 1)
            found.append({"setting": plan.setting, "method": method, "seed": seed, "test": test, "seconds": seconds})
    return found


def fitted(task: Task, plan: Plan, method: str, rng: torch.Generator) -> Weights:
    """Weights of each silo's network, (J, ...) each, or one for all, (1, ...)."""
    silos, rounds = len(task.x), plan.rounds
    steps = rounds * plan.local_steps
    if method == "pooled":
        whole = task._replace(x=task.x.flatten(0, 1)[None], y=task.y.flatten()[None])
        return _descended(whole, _repeated(task.start, 1), steps, silos * plan.batch, rng)
    own = _repeated(task.start, silos)
    if method == "silo alone":
        return _descended(task, own, steps + plan.own_steps, plan.batch, rng)
    for k in range(rounds):
        rates = (_falling(k, rounds), _falling(k + 1, rounds))
        own = _descended(task, own, plan.local_steps, plan.batch, rng, rates)
        own = {name: v.mean(0, keepdim=True).expand_as(v).clone() for name, v in own.items()}
    if method == "FedAvg, own steps":
        return _descended(task, own, plan.own_steps, plan.batch, rng)
    return {name: v[:1] for name, v in own.items()}


def _falling(step: int, steps: int) -> float:
    return 0.5 * (1 + cos(pi * step / steps))


def _descended(
    task: Task, start: Weights, steps: int, batch: int, rng: torch.Generator, rates: tuple[float, float] = (1.0, 0.0)
) -> Weights:
    """Steps of all silos at once, on `batch` of each silo's records; the rate goes from one share to the other."""
    moving = {name: v.clone().requires_grad_() for name, v in start.items()}
    adam = torch.optim.Adam(moving.values(), lr=_RATE)
    silos, records = task.y.shape
    at = torch.arange(silos)[:, None]
    for step in range(steps):
        rows = torch.randint(records, (silos, batch), generator=rng) if batch < records else torch.arange(records)[None]
        for group in adam.param_groups:
            group["lr"] = _RATE * (rates[0] + (rates[1] - rates[0]) * step / steps)
        scores = torch.func.vmap(task.predict)(moving, task.x[at, rows])
        loss = functional.cross_entropy(scores.flatten(0, 1), task.y[at, rows].flatten()) * silos
        adam.zero_grad()
        loss.backward()
        adam.step()
    return {name: v.detach() for name, v in moving.items()}


def accuracy(task: Task, weights: Weights) -> float:
    """Mean over silos of the share of test records that each silo's network names rightly."""
    networks, found = len(next(iter(weights.values()))), []
    with torch.no_grad():
        for j in range(max(networks, len(task.tests))):
            x, y = task.tests[j if len(task.tests) > 1 else 0]
            one = {name: v[j if networks > 1 else 0] for name, v in weights.items()}
            found.append(float((task.predict(one, x).argmax(-1) == y).double().mean()))
    return sum(found) / len(found)


def _drawn_once(probs: Callable[[Mapping[str, Tensor], Tensor], Tensor]) -> Predict:
    """A model's predictions from one draw of its weights, which are these."""
    return lambda w, x: probs({name: v.unsqueeze(0) for name, v in w.items()}, x)


def _glorot(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Weights:
    """Normal draws of variance 2 / (inputs + outputs); filters are (outputs, inputs, height, width)."""
    rng = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=rng, dtype=torch.float32)
        * (2 / ((shape[0] + shape[1]) * torch.Size(shape[2:]).numel())) ** 0.5
        for name, shape in shapes.items()
    }


def _repeated(weights: Weights, silos: int) -> Weights:
    return {name: v.expand(silos, *v.shape).clone() for name, v in weights.items()}


def _pair(records: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return records["x"].float(), records["y"]


def _stacked(silos: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """(J, N, ...) and (J, N) of silos of equal size."""
    return torch.stack([silo["x"] for silo in silos]).float(), torch.stack([silo["y"] for silo in silos])


def table(content: Row) -> str:
    rows = []
    for line in content["lines"]:
        found = with_sd(line) if line["seeds"] > 1 else f"{line['mean']:.1f}"
        rows.append((line["setting"], line["method"], found, line["seeds"]))
    lines = lines_of(("beside", "method", "test, %", "seeds"), rows, left=2)
    lines.append(f"mean (sd) over seeds; {content['seconds']} s on {content['machine']}")
    return "\n".join([*lines, content["setting"]])


def plot(lines: Sequence[Row]) -> Figure:
    figure, axes = panels(1, 1, 9, 1 + 0.28 * len(lines))
    at = range(len(lines), 0, -1)
    axes.barh(at, [line["mean"] for line in lines], xerr=[line["sd"] for line in lines], color="#6b7280")
    axes.set_yticks(at, [f"{line['setting']}, {line['method']}" for line in lines], fontsize=7)
    axes.set(xlabel="test accuracy, %", xlim=(0, 100))
    return figure


EXPERIMENTS = {"floors": Experiment(_floors, table)}
