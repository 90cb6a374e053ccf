"""One contract for all algorithms: masks change nothing, a lost silo costs its term alone, a run that was stopped ends
as one that was not, and under differential privacy nothing leaves a silo but under noise."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from programs import ENCODED, make_clinics, make_intercepts
from torch import Tensor

import secure_fvi as sf
from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms.vertical import Bernoulli, Vertical
from secure_fvi.algorithms.vertical.soul import Soul
from secure_fvi.checkpoints import Checkpoints
from secure_fvi.compiled import flatten
from secure_fvi.driving import Parties as Built
from secure_fvi.driving import Run
from secure_fvi.errors import AggregationError, InputError
from secure_fvi.fitting import build_parties
from secure_fvi.messages import ROUND
from secure_fvi.runs.config import ALGORITHMS

ROUNDS, KEY = 3, b"k" * 32
RECORD = sf.RecordDP(noise_multiplier=2.0, clipping_norm=1.0, noise="silo", retries=0)
SILO = sf.SiloDP(noise_multiplier=2.0, clipping_norm=1.0, noise="silo", retries=0)

pytestmark = [
    pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning"), pytest.mark.usefixtures("untraced")
]  # fmt: skip


class Parties(NamedTuple):
    server: Any
    engine: Any
    guards: Any

    def state(self) -> list[Tensor]:
        """All numbers of the server's state."""
        return [v.nan_to_num(nan=-12345.0, posinf=1e9, neginf=-1e9) for v in _numbers(self.server.state.algorithm)]

    def run(self, rounds: int = 10**6) -> Parties:
        for _ in range(rounds):
            if self.engine.run(self.server.round()).finished:
                break
        return self


def _numbers(state: Any) -> list[Tensor]:
    return [v.detach().double().clone() for v in flatten(_plain(state) or ())]


def _plain(value: Any) -> Any:
    """Tuples and dicts of tensors alone."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if _plain(v) is not None}
    if isinstance(value, tuple | list):
        return tuple(p for p in map(_plain, value) if p is not None)
    if isinstance(value, bool | int | float):
        return torch.tensor(float(value))
    return value if isinstance(value, Tensor) else None


Build = Callable[..., Parties]


class Case(NamedTuple):
    """build(aggregation, privacy, values of silo 1 times `scale`, key of the noise)."""

    name: str
    build: Build
    privacies: tuple[Any, ...]
    one_by_one: bool = False  # what visits one silo after the other reveals each, so no secret sum takes it


def _regression(x: Tensor, y: Tensor) -> None:
    beta = pyro.sample("beta", dist.Normal(0.0, 0.5))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Normal(x * beta, 1.0), obs=y)


def _rows() -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(n, generator=rng), "y": torch.randn(n, generator=rng)} for n in (20, 15, 12, 9)]


def _four(make: Any) -> tuple[Any, list[dict[str, Tensor]]]:
    problem = make()
    return problem.model, [*problem.silos, {"y": problem.silos[1]["y"][:5] + 0.1}]


def _flat(model: Any, silos: list[dict[str, Tensor]], algorithm: Any) -> Build:
    def build(aggregation: Any, privacy: Any = None, scale: float = 1.0, key: bytes = KEY) -> Parties:
        data = [{k: v * scale for k, v in silos[0].items()}, *silos[1:]]
        return Parties(
            *build_parties(model, data, algorithm, aggregation, compile=False, privacy=privacy, noise_key=key)
        )

    return build


def _vertical(algorithm: Any) -> Build:
    def build(aggregation: Any, privacy: Any = None, scale: float = 1.0, key: bytes = KEY) -> Parties:
        rng = torch.Generator().manual_seed(3)
        x, y = torch.randn(30, 4, generator=rng), torch.bernoulli(torch.full((30,), 0.5), generator=rng)
        silos = [{"x": x[:, :1] * scale}, *({"x": x[:, i : i + 1]} for i in (1, 2, 3))]
        made = build_parties(
            sf.Columns(Bernoulli(), y), silos, algorithm, aggregation, privacy=privacy, compile=False, noise_key=key
        )
        return Parties(made.server, made.engine, made.guards)

    return build


def _sfvi_avg(**options: Any) -> Any:
    return sf.SFVIAvg(rounds=ROUNDS, local_steps=3, family="diagonal", tolerance=0.0, **options)


PLAIN_ROWS = sf.FederatedModel(_regression, "row")
PUBLIC = {"weights": "equal", "total_records": 56}
CASES = [
    Case("sfvi", _flat(*_four(make_intercepts), sf.SFVI(iterations=ROUNDS, learning_rate=0.1)), (RECORD, SILO)),
    Case("sfvi", _flat(*_four(make_clinics), sf.SFVI(iterations=ROUNDS, sampling_rate=0.5)), (RECORD, SILO)),
    Case("sfvi-avg", _flat(*_four(make_intercepts), _sfvi_avg(weights="equal", total_records=65)), (SILO,)),
    Case("sfvi-avg", _flat(*_four(make_intercepts), _sfvi_avg()), ()),
    Case("pvi", _flat(*_four(make_intercepts), sf.PVI(rounds=ROUNDS, damping=0.3, local_steps=2)), (RECORD, SILO)),
    Case("pvi", _flat(PLAIN_ROWS, _rows(), sf.PVI(rounds=ROUNDS, virtual_clients=2, local_steps=2)), (RECORD, SILO)),
    Case("fedavg", _flat(PLAIN_ROWS, _rows(), sf.FedAvg(rounds=ROUNDS, local_steps=2, **PUBLIC)), (SILO,)),
    Case("fedavg", _flat(PLAIN_ROWS, _rows(), sf.FedAvg(rounds=ROUNDS, local_steps=2)), ()),
    Case("fedvi", _flat(ENCODED, _rows(), sf.FedVI(rounds=ROUNDS, batch_size=8, **PUBLIC)), (SILO,)),
    Case("bcm", _flat(PLAIN_ROWS, _rows(), sf.BCM(local_steps=3)), (SILO,)),
    Case("vcl", _flat(PLAIN_ROWS, _rows(), sf.VCL(local_steps=3, reveal_changes=True)), (SILO,), True),
    Case("streaming-vb", _flat(PLAIN_ROWS, _rows(), sf.StreamingVB(local_steps=3, reveal_changes=True)), (SILO,), True),
    Case("vertical", _vertical(Vertical(response="private", rounds=ROUNDS, family="diagonal")), (RECORD,)),
    Case("vertical", _vertical(Vertical(response="shared", rounds=ROUNDS, family="diagonal")), (RECORD,)),
    Case("soul", _vertical(Soul(rounds=ROUNDS)), ()),
]


def cases(privacies: bool = False, secret: bool = False) -> Any:
    """Those of the list, each with each privacy that it takes, or those alone that a secret sum takes."""
    chosen = [c for c in CASES if not (secret and c.one_by_one)]
    if not privacies:
        return pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in chosen])
    rows = [pytest.param(c, p, id=f"{c.name}-{type(p).__name__}") for c in chosen for p in c.privacies]
    return pytest.mark.parametrize(("case", "privacy"), rows)


def test_no_algorithm_is_left_out() -> None:
    assert {c.name for c in CASES} == set(ALGORITHMS)


@cases()
def test_privacy_that_is_not_tested_here_is_refused(case: Case) -> None:
    for privacy in {RECORD, SILO} - {p for c in CASES if c.name == case.name for p in c.privacies}:
        with pytest.raises(InputError):
            case.build(sf.Plain(), privacy)


class Ended(NamedTuple):
    """A whole run, looked at by several tests."""

    parties: Parties
    sent: list[FloatArray]  # what silo 1 handed to its half of the sum, sum by sum


@functools.cache
def ended(at: int, sums: str, privacy: Any, scale: float = 1.0, key: bytes = KEY) -> Ended:
    """Case `at`, run to its end under sums of this kind."""
    parties, sent = CASES[at].build({"plain": sf.Plain(), "masked": sf.Masked()}[sums], privacy, scale, key), []
    half = parties.engine.silos[sorted(parties.engine.silos)[0]]._sum
    contribute = half.contribute
    half.contribute = lambda i, cohort, table, values, *rest: (
        sent.append(np.array(values)) or contribute(i, cohort, table, values, *rest)
    )
    return Ended(parties.run(ROUNDS), sent)


def _apart(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float(((a - b).abs() / (1 + a.abs())).max()) for a, b in zip(one, other, strict=True) if a.numel())


@cases(secret=True)
@pytest.mark.later("pvi1", "sfvi-avg1")
def test_masks_change_nothing(case: Case) -> None:
    """But for the rounding of what is sent. The control: other data at one silo do."""
    plain, masked, other = (
        ended(CASES.index(case), *how).parties.state()
        for how in (("plain", None), ("masked", None), ("masked", None, 1.5))
    )
    assert _apart(plain, masked) < 5e-5
    assert _apart(plain, other) > 1e-4


@pytest.mark.parametrize("name", ["sfvi", "pvi"])
def test_sums_that_recover_end_as_whole_ones(name: str) -> None:
    """To the last digit. A whole sum takes one exchange; they take two more, and some for each batch."""
    at = next(at for at, case in enumerate(CASES) if case.name == name)
    whole = ended(at, "masked", None).parties
    most = CASES[at].build(sf.Masked(max_missing=1)).run(ROUNDS)
    assert all(torch.equal(one, other) for one, other in zip(whole.state(), most.state(), strict=True))
    sums = whole.server.state.last_index
    assert whole.engine.exchanges == sums + 2
    assert most.engine.exchanges >= 3 * sums + 5


def _lose(parties: Parties, silo: str) -> tuple[str, ...]:
    """One round in which the answer of `silo` is lost; who is in the total."""
    exchanges, survivors = parties.server.round(), []

    class Heard:
        def total(self, index: int, total: Any) -> None:
            survivors.append(total.survivors)

        def released(self, index: int, values: Any) -> None: ...

    parties.server.observe(Heard())
    messages = next(exchanges)
    with contextlib.suppress(StopIteration):
        while True:
            replies = parties.engine.exchange(messages)
            if next(iter(messages.values()))[:1] == ROUND:
                del replies[silo]
            messages = exchanges.send(replies)
    return tuple(survivors[0])


#: Own latents stay where the last fit left them; that a lost change is in no site is in tests/algorithms.
WARM = {"pvi", "bcm", "vcl", "streaming-vb"}
#: A sum that lacks a silo's columns predicts nobody.
ALL_NEEDED = {"vertical", "soul"}


@pytest.mark.usefixtures("few_draws")
@cases(secret=True)
@pytest.mark.later("pvi1", "sfvi-avg1")
def test_a_lost_answer_leaves_its_silo_as_it_was(case: Case) -> None:
    """The total lacks its term, masked or not, and it goes on from the state before; by default no sum does without."""
    ends = []
    with pytest.raises(InputError, match="predicts nobody") if case.name in ALL_NEEDED else contextlib.nullcontext():
        case.build(sf.Masked(max_missing=1))
    for sums in (sf.Plain(), sf.Masked(max_missing=int(case.name not in ALL_NEEDED))):
        parties = case.build(sums)
        lost, silo = sorted(parties.engine.silos)[1], parties.engine.silos[sorted(parties.engine.silos)[1]]
        if case.name != "bcm":  # whose only round is the one that is lost
            parties.engine.run(parties.server.round())
            silo.settle(parties.server.state.accepted)
        local, state = _numbers(silo.local), parties.state()
        if case.name in ALL_NEEDED:
            with pytest.raises(AggregationError, match=r"did not answer|max_missing = 0"):
                _lose(parties, lost)
            assert _apart(state, parties.state()) == 0
        else:
            assert _lose(parties, lost) == tuple(s for s in sorted(parties.engine.silos) if s != lost)
            silo.settle(parties.server.state.accepted)
        if case.name not in WARM:
            assert all(torch.equal(a, b) for a, b in zip(local, _numbers(silo.local), strict=True))
        ends.append(parties.run(0 if case.name == "bcm" else ROUNDS).state())
    assert all(torch.isfinite(v).all() for v in ends[0])
    assert _apart(*ends) < 1e-4  # the final sum has steps of 2^-17 nats a silo
    alone = case.build(sf.Masked())
    with pytest.raises(AggregationError, match="max_missing = 0"):
        _lose(alone, lost)


@cases()
@pytest.mark.later("pvi1", "sfvi-avg0")
def test_a_run_that_was_stopped_ends_as_one_that_was_not(case: Case, tmp_path: Path) -> None:
    for at, privacy in enumerate((None, *case.privacies[:1])):
        whole = ended(CASES.index(case), "plain", privacy).parties
        first, again = case.build(sf.Plain(), privacy), case.build(sf.Plain(), privacy)
        kept = Checkpoints(tmp_path / str(at), 0.0)
        next(Run(Built(*first), lambda _: None, kept))
        rest = Run(Built(*again), lambda _: None, kept, resume=True)
        while again.server.state.last_index < whole.server.state.last_index:
            next(rest)
        for one, other in zip(whole.state(), again.state(), strict=True):
            assert torch.equal(one, other)


def _bare(case: Case, privacy: Any) -> int:
    """Numbers that follow a silo's data and no noise: equal under two keys of the noise, other with other data."""
    one, other, moved = (
        ended(CASES.index(case), "plain", privacy, *how).sent for how in ((), (1.0, b"o" * 32), (1.5,))
    )
    return sum(int(((a == b) & (a != c)).sum()) for a, b, c in zip(one, other, moved, strict=True))


@cases(privacies=True)
@pytest.mark.later("pvi-SiloDP1", "sfvi-RecordDP1", "sfvi-SiloDP1")
def test_under_privacy_nothing_leaves_a_silo_but_under_noise(case: Case, privacy: Any) -> None:
    """Gradients, changes, counts and sides alike. The control: without privacy the same search finds them."""
    assert _bare(case, privacy) == 0
    assert _bare(case, None) > 0


def _few(state: list[Tensor]) -> list[float]:
    """Three numbers that a change of any element would change, of large ones as of small: of their inverse sinh."""
    every = torch.cat([v.flatten() for v in state]).double().asinh()
    at = torch.arange(len(every), dtype=torch.float64)
    return [float(every.sum()), float(every.abs().sum()), float(every @ torch.cos(at + 1))]


GOLDEN = Path(__file__).parent / "wire" / "runs.json"


def _runs(number: int) -> dict[str, list[float]]:
    case = CASES[number]
    kinds: dict[str, tuple[Any, ...]] = {"plain": ("plain", None)}
    if not case.one_by_one:
        kinds["masked"] = ("masked", None)
    kinds |= {type(p).__name__: ("plain", p) for p in case.privacies}
    return {f"{number} {case.name} {kind}": _few(ended(number, *how).parties.state()) for kind, how in kinds.items()}


@pytest.mark.parametrize("number", range(len(CASES)), ids=[c.name for c in CASES])
def test_a_short_run_ends_where_it_did(number: int) -> None:
    """To 6 digits, the rest being the processor's. SECURE_FVI_GOLDEN=write, with a reason, writes what it is now."""
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    found = _runs(number)
    if os.environ.get("SECURE_FVI_GOLDEN") == "write":
        kept = {k: v for k, v in golden.items() if k.split()[0] != str(number)} | found
        GOLDEN.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {v}" for k, v in sorted(kept.items())) + "\n}\n")
    assert {k for k in golden if k.split()[0] == str(number)} == set(found)
    for name, values in found.items():
        assert values == pytest.approx(golden[name], rel=1e-6, abs=1e-6), name
