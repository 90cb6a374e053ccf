"""ProdLDA on 20 Newsgroups: section 4.2 and Figure 4.2 of Hassan et al. (2023), made smaller."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import pyro
import torch
from matplotlib.figure import Figure
from pyro.distributions import Multinomial, Normal, constraints
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.optim import ClippedAdam
from torch import Tensor, nn

import secure_fvi as sf
from secure_fvi.aggregation import Plain
from secure_fvi.algorithms.base import FINISH, Algorithm
from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.algorithms.sfvi_avg import COUNT, MERGE, SFVIAvg
from secure_fvi.compiled import threads
from secure_fvi.errors import InputError
from secure_fvi.families import Conditional
from secure_fvi.models.newsgroups import Corpus, corpus
from secure_fvi.models.prodlda import SCALE, Words, prodlda
from secure_fvi_lab.experiments import Experiment, Request, Row, Tell, lines_of, panels, spread, with_sd
from secure_fvi_lab.references import seeded

# ----
# Pooled ProdLDA as a user of Pyro would fit it: the same model by Pyro's SVI, and the network of Pyro's tutorial


class Topics(NamedTuple):
    topics: Tensor  # (V, K) whose largest entries name a topic's words
    logits: Tensor  # (V, K) of words, by which a document's shares mix them; the same but for batch normalisation


class Training(NamedTuple):
    steps: int
    batch: int
    learning_rate: float
    last_rate: float = 1.0  # the rate falls to this share of itself
    start_spread: float = 0.0  # sd of the draw at which the means of the topics begin


def same_model(counts: Tensor, topics: int, training: Training, seed: int, tell: Tell) -> Topics:
    """Posterior means of the model of `prodlda(topics)` on all documents `counts` (N, V), by a guide of
    independent Gaussians with parameters for every document, on minibatches."""
    (documents, words), local = counts.shape, (len(counts), topics)

    def model() -> None:
        t = pyro.sample("topics", Normal(counts.new_zeros(words, topics), SCALE).to_event(2))
        with pyro.plate("document", documents, subsample_size=training.batch) as rows:
            w = pyro.sample("weights", Normal(counts.new_zeros(topics), SCALE).to_event(1))
            pyro.sample("counts", Words(torch.softmax(w, -1), t), obs=counts[rows])

    def guide() -> None:
        loc = pyro.param("topics_loc", lambda: training.start_spread * counts.new_zeros(words, topics).normal_())
        scale = pyro.param("topics_scale", lambda: counts.new_full((words, topics), 0.1), constraints.positive)
        pyro.sample("topics", Normal(loc, scale).to_event(2))
        means = pyro.param("weights_loc", lambda: counts.new_zeros(local))
        scales = pyro.param("weights_scale", lambda: counts.new_full(local, 0.1), constraints.positive)
        with pyro.plate("document", documents, subsample_size=training.batch) as rows:
            pyro.sample("weights", Normal(means[rows], scales[rows]).to_event(1))

    with seeded(seed), pyro.validation_enabled(False), pyro.get_param_store().scope():
        svi = SVI(model, guide, _optimiser(training), Trace_ELBO())
        _train(svi.step, training.steps, float(counts.sum()), tell)
        found = pyro.param("topics_loc").detach()
        return Topics(found, found)


def tutorial(counts: Tensor, topics: int, training: Training, seed: int, tell: Tell) -> Topics:
    """That of https://pyro.ai/examples/prodlda.html on `counts` (N, V): an amortised guide, batch
    normalisation and dropout, topics as weights without a prior. Its options: 50 epochs of 32 documents, rate 0.001."""
    documents, words = counts.shape
    with seeded(seed), pyro.validation_enabled(False), pyro.get_param_store().scope():
        encoder, decoder = _Encoder(words, topics).to(counts), _Decoder(words, topics).to(counts)

        def model(rows: Tensor) -> None:
            pyro.module("decoder", decoder)
            with pyro.plate("document", len(rows)):
                w = pyro.sample("weights", Normal(rows.new_zeros(topics), 1.0).to_event(1))
                p = decoder(torch.softmax(w, -1))
                pyro.sample("counts", Multinomial(int(rows.sum(-1).max()), p), obs=rows)

        def guide(rows: Tensor) -> None:
            pyro.module("encoder", encoder)
            loc, scale = encoder(rows)
            with pyro.plate("document", len(rows)):
                pyro.sample("weights", Normal(loc, scale).to_event(1))

        svi = SVI(model, guide, _optimiser(training), TraceMeanField_ELBO())

        def step() -> float:
            loss: float = svi.step(counts[torch.randint(documents, (training.batch,))])
            return loss

        _train(step, training.steps, float(counts.sum()) * training.batch / documents, tell)
        return decoder.found()


class _Encoder(nn.Module):
    def __init__(self, words: int, topics: int, hidden: int = 100, dropout: float = 0.2) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(words, hidden), nn.Softplus(), nn.Linear(hidden, hidden), nn.Softplus(), nn.Dropout(dropout)
        )
        self.loc = nn.Sequential(nn.Linear(hidden, topics), nn.BatchNorm1d(topics, affine=False))
        self.log_variance = nn.Sequential(nn.Linear(hidden, topics), nn.BatchNorm1d(topics, affine=False))

    def forward(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(counts)
        return self.loc(h), (0.5 * self.log_variance(h)).exp()


class _Decoder(nn.Module):
    def __init__(self, words: int, topics: int, dropout: float = 0.2) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.topics = nn.Linear(topics, words, bias=False)
        self.norm = nn.BatchNorm1d(words, affine=False)

    def forward(self, weights: Tensor) -> Tensor:
        return torch.softmax(self.norm(self.topics(self.dropout(weights))), -1)

    def found(self) -> Topics:
        """Shares sum to 1, so that the mean that is taken off the logits can be taken off each topic."""
        topics, norm = self.topics.weight.detach(), self.norm
        assert norm.running_mean is not None
        assert norm.running_var is not None
        sd = (norm.running_var + norm.eps).sqrt()
        return Topics(topics, (topics - norm.running_mean.unsqueeze(-1)) / sd.unsqueeze(-1))


def _optimiser(training: Training) -> ClippedAdam:
    return ClippedAdam({"lr": training.learning_rate, "lrd": training.last_rate ** (1 / training.steps)})


def _train(step: Callable[[], float], count: int, tokens: float, tell: Tell) -> None:
    """So many steps; tells the bound in nats a word. `tokens`: words of which `step` returns the loss."""
    losses: list[float] = []
    for _ in range(count):
        losses.append(step() / tokens)
        if not len(losses) % max(1, count // 5):
            tell(f"    step {len(losses)} of {count}: {-statistics.mean(losses[-count // 10 :]):.4f} nats a word")


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


def _prodlda(request: Request) -> tuple[Row, Figure]:
    content = run(QUICK if request.quick else FULL, request)
    return content, plot(content)


def run(plan: Plan, request: Request) -> Row:
    """The content of prodlda-20news.json. What has been fitted is kept in `request.keep`, so that a run that was
    stopped goes on."""
    request.tell("reading the posts")
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
        "paper": PAPER,
        "ours": {
            **summary["coherence"]["SFVI"],
            "what": "mean UMass coherence of SFVI's topics in the training posts",
            **summary,
        },
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "bytes": sfvi[0]["bytes_up"] + sfvi[0]["bytes_down"],
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
    run = sf.run(
        prodlda(plan.topics), silos, algorithm, Plain(), seed=seed, dtype=torch.float32, compile=False, threads=1
    )
    server, engine = run.server, run.engine
    tokens = sum(float(silo["counts"].sum()) for silo in silos)
    rounds = server.program.most_rounds
    steps, every, bounds = plan.steps // rounds, max(1, rounds // 10), list[float]()
    curve: list[tuple[int, float]] = []

    for progress in run:
        if progress.phase == COUNT:
            continue
        bounds.append(progress.objective / tokens)
        if len(bounds) % every == 0 or progress.phase == FINISH:
            before = progress.phase == MERGE  # the bound of the round is at what the silos were sent
            curve.append(((progress.round - before) * steps, round(statistics.mean(bounds[-every:]), 4)))
            tell(f"    round {progress.round} of {rounds}: {curve[-1][1]} nats a word")
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


# ----
# How well the words of a topic go together: UMass coherence (Mimno, Wallach, Talley, Leenders and McCallum 2011)


def top_words(topics: Tensor, count: int = 10) -> Tensor:
    """(K, count) int64: the words of largest logit in each column of `topics` (V, K), the largest first."""
    if not 2 <= count <= len(topics):
        raise InputError(f"count = {count}: must lie between 2 and the {len(topics)} words")
    return topics.topk(count, dim=0).indices.T


def umass(tops: Tensor, counts: Tensor) -> Tensor:
    """(K,) coherence of the words `tops` (K, M) of each topic in documents `counts` (N, V); at most about 0, larger is
    better.

    The mean over pairs m > l of log (D(v_m, v_l) + 1) / D(v_l), with v_1 a topic's first word and D the number of
    documents that have the words. Mimno et al. take the sum, M (M - 1) / 2 times as much; gensim the mean. Raises
    InputError where no document has one of the words.
    """
    size = tops.shape[1]
    used, place = tops.unique(return_inverse=True)
    has = (counts[:, used] > 0).double()
    together = has.T @ has
    alone = together.diagonal()
    if not bool((alone > 0).all()):
        raise InputError(f"no document has {int((alone == 0).sum())} of the topics' words")
    later, earlier = torch.tril_indices(size, size, -1)
    pairs = (together[place[:, later], place[:, earlier]] + 1) / alone[place[:, earlier]]
    return pairs.log().mean(1)


def diversity(tops: Tensor) -> float:
    """Share of different words among the topics' words `tops` (K, M): 1 where topics share none, 1/K where all are
    alike (Dieng, Ruiz and Blei 2020). Alike topics of common words have a high coherence: read the two together."""
    return len(tops.unique()) / tops.numel()


# ----
# How well topics predict: the second half of a document's words from the first (Wallach et al. 2009, section 5)

_STEPS, _RATE = 150, 0.1


def completion(topics: Tensor, counts: Tensor, seed: int = 0) -> float:
    """Mean log probability, nats a word, of one half of the words of documents `counts` (N, V) under logits of words
    `topics` (V, K), each document's weights being the most probable given the other half.

    Every occurrence of a word falls into either half by a fair coin of `seed`. Topics that are all alike predict
    no better than frequencies of words, whatever their coherence.
    """
    topics = topics.to(counts)
    seen = torch.binomial(counts, torch.full_like(counts, 0.5), generator=torch.Generator().manual_seed(seed))
    weights = counts.new_zeros(len(counts), topics.shape[1], requires_grad=True)
    optimiser = torch.optim.Adam([weights], lr=_RATE)
    for _ in range(_STEPS):
        optimiser.zero_grad()
        loss = (weights / SCALE).square().sum() / 2 - Words(torch.softmax(weights, -1), topics).log_prob(seen).sum()
        loss.backward()
        optimiser.step()
    held_out = counts - seen
    with torch.no_grad():
        return float(Words(torch.softmax(weights, -1), topics).log_prob(held_out).sum() / held_out.sum())


# ---- The table of ProdLDA's topics by method for a terminal, and the plot that mirrors the paper's Figure 4.2 ----

#: Figures of a method, and their names in the table.
_KEYS = {
    "coherence": "coherence", "test_coherence": "in test posts", "diversity": "diversity", "completion": "completion",
}  # fmt: skip
_COLOURS = ("#2563eb", "#0d9488", "#94a3b8", "#d97706", "#b45309")


def table(content: Row) -> str:
    """A line a method: coherence in training and test posts, diversity, completion in nats a word; some topics."""
    ours, rows = content["ours"], content["rows"]
    cells = []
    for method in ours["coherence"]:
        own = [row for row in rows if row["method"] == method]
        seconds = sum(row["seconds"] for row in own) / len(own)
        megabytes = (own[0]["bytes_up"] + own[0]["bytes_down"]) / 1e6
        found = (with_sd(ours[key][method], digits=3) for key in _KEYS)
        cells.append((method, *found, f"{seconds:.0f}", f"{megabytes:.0f}" if megabytes else ""))
    lines = lines_of(("method", *_KEYS.values(), "s a seed", "MB a silo"), cells)
    first = next(row for row in rows if row["method"] == "SFVI")
    best = sorted(zip(first["coherence"], first["words"], strict=True), reverse=True)
    lines += [f"SFVI, seed {first['seed']}: {value:.2f} {words}" for value, words in (*best[:3], best[-1])]
    lines += [f"mean (sd) over {ours['seeds']} seeds; {content['seconds']} s on {content['machine']}"]
    return "\n".join([*lines, f"paper: {content['paper']}", content["setting"]])


def plot(content: Row) -> Figure:
    """Coherence of all topics of all seeds by method; the bound by steps, a line a seed."""
    figure, (left, right) = panels(1, 2, 10, 3.8)
    rows, methods = content["rows"], list(content["ours"]["coherence"])
    values = [[v for row in rows if row["method"] == method for v in row["coherence"]] for method in methods]
    boxes = left.boxplot(values, patch_artist=True, widths=0.6, medianprops={"color": "black"})
    for box, colour in zip(boxes["boxes"], _COLOURS, strict=True):
        box.set_facecolor(colour)
    left.set_xticks(
        range(1, len(methods) + 1), [m.replace(", ", ",\n").replace(" tut", "\ntut") for m in methods], fontsize=7
    )
    left.set(ylabel="UMass coherence of a topic")
    for method, colour in zip(methods, _COLOURS, strict=True):
        for row in rows:
            if row["method"] == method and row["curve"]:
                label = method if row["seed"] == rows[0]["seed"] else None
                right.plot(*zip(*row["curve"], strict=True), color=colour, lw=1.2, label=label)
    right.set(xlabel="steps", ylabel="bound, nats a word")
    right.legend(frameon=False, fontsize=8)
    return figure


EXPERIMENTS = {"prodlda-20news": Experiment(_prodlda, table)}
