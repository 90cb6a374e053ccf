"""ProdLDA on 20 Newsgroups: section 4.2 and Figure 4.2 of Hassan et al. (2023), made smaller."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secure_fvi.aggregation import Plain
from secure_fvi.algorithms.base import Algorithm
from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.algorithms.sfvi_avg import COUNT, FINISH, MERGE, SFVIAvg
from secure_fvi.compiled import threads
from secure_fvi.driving import Progress, drive
from secure_fvi.families import Conditional
from secure_fvi.fitting import build_parties
from secure_fvi.models.newsgroups import Corpus, corpus
from secure_fvi.models.prodlda import prodlda
from secure_fvi_lab.experiments import Request, Tell
from secure_fvi_lab.experiments.coherence import diversity, top_words, umass
from secure_fvi_lab.experiments.completion import completion
from secure_fvi_lab.experiments.prodlda_pyro import Topics, Training, same_model, tutorial
from secure_fvi_lab.experiments.prodlda_report import plot
from secure_fvi_lab.experiments.prodlda_report import table as table
from secure_fvi_lab.experiments.spread import spread
from secure_fvi_lab.machine import machine

Row = dict[str, Any]
SILOS = 3
#: Words of a topic that its coherence is of.
TOP = 10
#: Test posts, about, of which half the words are predicted.
TESTED = 1000
PAPER = (
    "Figure 4.2 (a), which gives no numbers: topics of SFVI-Avg (100 rounds of 1000 steps) are the most coherent, then "
    "those of SFVI, then those of each silo on its own"
)


class Plan(NamedTuple):
    """One experiment."""

    words: int
    topics: int
    steps: int  # of each method, of which SFVI-Avg makes some in every round
    rounds: int  # of SFVI-Avg
    share: float  # of the posts in a step's minibatch
    epochs: int  # of the network of Pyro's tutorial
    seeds: tuple[int, ...]  # none of them the one that options were chosen on


#: Options of SFVI, and the rate of the same model in Pyro, were chosen on seed 100.
FULL = Plan(words=2000, topics=21, steps=1000, rounds=10, share=0.05, epochs=50, seeds=(0, 1, 2, 3, 4))
QUICK = Plan(words=500, topics=21, steps=100, rounds=2, share=0.05, epochs=2, seeds=(0,))


class Fitted(NamedTuple):
    """Topics, one set for each federation, and what they cost."""

    topics: list[Topics]
    curve: list[tuple[int, float]]  # steps, bound in nats a word: mean over the steps since the point before
    seconds: float  # of the processor: one thread
    bytes_up: int  # of the silo that sent most
    bytes_down: int


def reproduce(request: Request) -> tuple[Row, bytes]:
    """The content of prodlda-20news.json, and the plot as PNG. Raises InputError where --data holds no `20newsgroups`.

    What has been fitted is kept in `request.keep`, so that a run that was stopped goes on.
    """
    content = run(QUICK if request.quick else FULL, request)
    return content, plot(content)


def run(plan: Plan, request: Request) -> Row:
    """The content of prodlda-20news.json."""
    request.tell("reading the posts")
    began = time.monotonic()
    train = corpus(request.data, "train", plan.words)
    test = corpus(request.data, "test", train.words)
    same = plan._replace(seeds=())  # more seeds make no other fit anew

    def made(method: str, seed: int) -> Row:
        with threads(1):
            found = _row(METHODS[method](plan, train, seed, request.tell), train, test)
        request.tell(f"    coherence {statistics.mean(found['coherence']):.3f}, {found['seconds']} s")
        return {"method": method, "seed": seed} | found

    rows: list[Row] = [
        request.once(f"seed {seed}: {method}", same, partial(made, method, seed))
        for seed in plan.seeds
        for method in METHODS
    ]
    sfvi = [row for row in rows if row["method"] == "SFVI"]
    summary = {key: _over_seeds(rows, key) for key in ("coherence", "test_coherence", "diversity", "completion")}
    return {
        "name": "prodlda-20news",
        "paper": PAPER,
        "ours": {
            **summary["coherence"]["SFVI"],
            "what": "mean UMass coherence of SFVI's topics in the training posts",
            **summary,
        },
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "seconds_since_start": round(time.monotonic() - began, 1),
        "bytes": sfvi[0]["bytes_up"] + sfvi[0]["bytes_down"],
        "machine": machine(),
        "setting": (
            f"{len(train.counts)} training posts in {SILOS} random silos, {plan.words} words, {plan.topics} topics; "
            f"{plan.steps} steps on {plan.share:.0%} of the posts for each method, SFVI-Avg's in {plan.rounds} rounds, "
            f"Pyro's tutorial {plan.epochs} epochs of 32 posts; a seed is one random split and one start; plain sums, "
            "float32; seconds are the processor's, one thread"
        ),
        "rows": rows,
    }


def _row(fitted: Fitted, train: Corpus, test: Corpus) -> Row:
    tops = [top_words(found.topics, TOP) for found in fitted.topics]
    posts = test.counts[:: max(1, len(test.counts) // TESTED)]
    return {
        "coherence": _rounded(torch.cat([umass(top, train.counts) for top in tops])),
        "test_coherence": _rounded(torch.cat([umass(top, test.counts) for top in tops])),
        "completion": round(statistics.mean(completion(found.logits, posts) for found in fitted.topics), 4),
        "diversity": round(statistics.mean(diversity(top) for top in tops), 4),
        "words": [" ".join(train.words[v] for v in top) for top in tops[0].tolist()],
        "curve": fitted.curve,
        "seconds": round(fitted.seconds, 1),
        "bytes_up": fitted.bytes_up,
        "bytes_down": fitted.bytes_down,
    }


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


def _over_seeds(rows: Sequence[Row], key: str) -> Row:
    found: dict[str, list[float]] = {}
    for row in rows:
        value = row[key]
        found.setdefault(row["method"], []).append(statistics.mean(value) if isinstance(value, list) else value)
    return {method: spread(values) for method, values in found.items()}


# ---- methods ----


def _options(plan: Plan) -> Row:
    return {
        "family": "diagonal", "sampling_rate": plan.share, "learning_rate": 0.1, "local_learning_rate": 0.4,
        "optimizer_options": {"betas": (0.5, 0.99)}, "start_spread": 0.5,
        "local_family": Conditional(scale="diagonal", coupling=False),
    }  # fmt: skip


def sfvi(plan: Plan) -> SFVI:
    """One round a step."""
    return SFVI(iterations=plan.steps, schedule="cosine", **_options(plan))


def sfvi_avg(plan: Plan) -> SFVIAvg:
    """As many steps in few rounds."""
    return SFVIAvg(rounds=plan.rounds, local_steps=plan.steps // plan.rounds, tolerance=0.0, **_options(plan))


def silos_of(train: Corpus, seed: int) -> list[dict[str, Tensor]]:
    """Random parts of nearly equal size."""
    order = torch.randperm(len(train.counts), generator=torch.Generator().manual_seed(seed))
    return [{"counts": train.counts[rows]} for rows in order.chunk(SILOS)]


def fit(plan: Plan, silos: Sequence[dict[str, Tensor]], algorithm: Algorithm, seed: int, tell: Tell) -> Fitted:
    """Topics of one federation: the posterior means."""
    began = time.process_time()
    server, engine, guards = build_parties(
        prodlda(plan.topics), silos, algorithm, Plain(), seed, dtype=torch.float32, compile=False
    )
    tokens = sum(float(silo["counts"].sum()) for silo in silos)
    steps = plan.steps // algorithm.most_rounds
    every, bounds = max(1, algorithm.most_rounds // 10), list[float]()
    curve: list[tuple[int, float]] = []

    def look(progress: Progress) -> None:
        if progress.phase == COUNT:
            return
        bounds.append(progress.objective / tokens)
        if len(bounds) % every == 0 or progress.phase == FINISH:
            before = progress.phase == MERGE  # the bound of the round is at what the silos were sent
            curve.append(((progress.round - before) * steps, round(statistics.mean(bounds[-every:]), 4)))
            tell(f"    round {progress.round} of {algorithm.most_rounds}: {curve[-1][1]} nats a word")

    drive(server, engine, guards, algorithm, False, 1, None, False, look, time.monotonic())
    topics = server.program.posterior(server.state.algorithm).eta["loc"].reshape(plan.words, plan.topics)
    up, down = max(engine.bytes_up.values()), max(engine.bytes_down.values())
    return Fitted([Topics(topics, topics)], curve, time.process_time() - began, up, down)


def _sfvi(plan: Plan, train: Corpus, seed: int, tell: Tell) -> Fitted:
    return fit(plan, silos_of(train, seed), sfvi(plan), seed, tell)


def _sfvi_avg(plan: Plan, train: Corpus, seed: int, tell: Tell) -> Fitted:
    return fit(plan, silos_of(train, seed), sfvi_avg(plan), seed, tell)


def _alone(plan: Plan, train: Corpus, seed: int, tell: Tell) -> Fitted:
    """Each silo is a federation of its own."""
    found = [fit(plan, [silo], sfvi(plan), seed, tell) for silo in silos_of(train, seed)]
    return Fitted([one.topics[0] for one in found], [], sum(one.seconds for one in found), 0, 0)


def _pyro(train_by: Callable[..., Topics]) -> Callable[[Plan, Corpus, int, Tell], Fitted]:
    def fit(plan: Plan, train: Corpus, seed: int, tell: Tell) -> Fitted:
        began, posts = time.process_time(), len(train.counts)
        if train_by is tutorial:
            training = Training(plan.epochs * posts // 32, 32, 0.001)
        else:
            training = Training(plan.steps, round(plan.share * posts), 0.05, last_rate=0.1, start_spread=0.5)
        topics = train_by(train.counts, plan.topics, training, seed, tell)
        return Fitted([topics], [], time.process_time() - began, 0, 0)

    return fit


METHODS: dict[str, Callable[[Plan, Corpus, int, Tell], Fitted]] = {
    "SFVI": _sfvi,
    "SFVI-Avg": _sfvi_avg,
    "silos alone": _alone,
    "Pyro, pooled": _pyro(same_model),
    "Pyro's tutorial, pooled": _pyro(tutorial),
}
