"""Parties killed at random moments: a campaign over many short jobs, each checked once it has ended."""

from __future__ import annotations

import itertools
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from safetensors.torch import load

from secure_fvi.deployment.job import silo_ids
from secure_fvi.deployment.trail import EXCHANGE, read_exchange
from secure_fvi.deployment.trail_verify import compare, rows, verify
from secure_fvi.engines.flare_kits import check_flare
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.privacy.ledger_account import verify as verify_ledger
from secure_fvi.runs.config import parse
from secure_fvi.runs.directory import read_json
from secure_fvi_lab.bench.world import HOLDER, HUB, Parties, answered, posterior
from secure_fvi_lab.machine import machine

_PER_JOB = 20
_PATIENCE = 300.0  # seconds in which a job has to end
_DEADLINE = 1.0  # under "drop"
_ENDED = (0, 4)  # exit codes of a job that ended, and of one that says that it has not converged


def command(
    as_json: bool,
    kills: int,
    on_loss: str,
    seed: int,
    kinds: tuple[str, ...],
    folder: Path | None,
    each: bool,
    engine: str = "stream",
) -> bool:
    """Run the campaign and print it; whether every job was as it should. Raises InputError for what does not go
    together, or where FLARE is missing."""
    if engine == "flare":
        check_flare()
        if on_loss != "wait" or kinds or each:
            raise InputError("--engine flare kills so many of each process of one kind of job: leave the others out")
    with tempfile.TemporaryDirectory() as made:
        root, told = folder or Path(made), lambda text: click.echo(text, err=True)
        if engine == "flare":
            from secure_fvi_lab.bench.flare import campaign as of_flare

            found = of_flare(root, kills, seed, told)
        else:
            found = campaign(root, kills, on_loss, seed, kinds, told, each)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        for row in found["kills"]:
            click.echo(
                f"{row['role']:14} {row['kills']:4} kills   back after {_seconds(row['median'])} median, "
                f"{_seconds(row['longest'])} at most ({row['timed']} timed)"
            )
        if each:
            click.echo("of each party: " + ", ".join(f"{name} {count}" for name, count in found["parties"].items()))
        for row in found["jobs"]:
            click.echo(f"{row['kind']:24} {row['jobs']:3} jobs {row['kills']:4} kills   {row['right']} right")
        for fault in found["faults"]:
            click.echo(f"! {fault}")
    return not found["faults"]


def campaign(
    root: Path,
    kills: int,
    on_loss: str,
    seed: int,
    kinds: tuple[str, ...] = (),
    tell: Callable[[str], None] = print,
    each: bool = False,
) -> dict[str, Any]:
    """Jobs, one kind after the other, until `kills` kills are done, of each party where `each`. The parties' folders
    are made in `root`.

    Raises InputError for an unknown kind.
    """
    unknown = sorted(set(kinds) - KINDS.keys())
    if unknown:
        raise InputError(f"--kind '{unknown[0]}': must be one of {', '.join(KINDS)}")
    rng = random.Random(seed)
    names = kinds or tuple(n for n, k in KINDS.items() if on_loss == "wait" or not (k.privacy or k.columns))
    roles = {"server", "silo"} | ({"holder"} if any(KINDS[n].holder for n in names) else set())
    outcomes: list[Outcome] = []
    killed = Counter[str]()
    choose = one_by_one(rng, kills, killed) if each else quota(rng, dict.fromkeys(roles, -(-kills // 4)))
    parties = {HUB, *_silos(on_loss), *([HOLDER] if "holder" in roles else [])}

    @cache
    def reference(name: str) -> bytes:
        return posterior(parse(table(KINDS[name], "wait", 1.0, root / "columns"), "reference"))

    for number, name in enumerate(_in_turn(names)):
        left = sum(max(0, kills - killed[p]) for p in parties) if each else kills - killed.total()
        if left <= 0 or len(outcomes) > 10 + kills * (len(parties) if each else 1):
            break
        found = run_job(
            root / f"job-{number}", name, min(left, _PER_JOB), rng, choose, on_loss, _DEADLINE, _PATIENCE, reference
        )
        outcomes.append(found)
        killed.clear()  # of those chosen, some came too late
        killed.update(k.party for o in outcomes for k in o.kills)
        by = ", ".join(f"{sum(k.role == role for k in found.kills)} {role}" for role in sorted(roles))
        tell(f"{name}: kills of {by}; {found.seconds:.0f} s, {found.fault or 'right'}")
    return {
        "machine": machine(),
        "on_loss": on_loss,
        "seed": seed,
        "kills": [_of_role(role, outcomes) for role in sorted(roles)],
        "parties": dict(sorted(killed.items())),
        "jobs": [_of_kind(name, outcomes) for name in names],
        "faults": [f"job {i}, {o.kind}: {o.fault}" for i, o in enumerate(outcomes) if o.fault],
        "seconds": sum(o.seconds for o in outcomes),
    }


def _in_turn(names: tuple[str, ...]) -> Iterator[str]:
    """One kind after the other; where there is one with a key holder, it is every third, since no other has one."""
    held = [name for name in names if KINDS[name].holder]
    others = [name for name in names if name not in held]
    if not held or not others:
        yield from itertools.cycle(names)
    plain, keyed = itertools.cycle(others), itertools.cycle(held)
    while True:
        yield from (next(plain), next(plain), next(keyed))


def _of_role(role: str, outcomes: list[Outcome]) -> dict[str, Any]:
    kills = [k for o in outcomes for k in o.kills if k.role == role]
    times = [k.seconds for k in kills if k.seconds is not None]
    return {
        "role": role,
        "kills": len(kills),
        "timed": len(times),
        "median": statistics.median(times) if times else None,
        "longest": max(times, default=None),
    }


def _of_kind(name: str, outcomes: list[Outcome]) -> dict[str, Any]:
    of = [o for o in outcomes if o.kind == name]
    return {
        "kind": name,
        "jobs": len(of),
        "kills": sum(len(o.kills) for o in of),
        "right": sum(not o.fault for o in of),
        "left_out": sum(o.left_out for o in of),
        "seconds": sum(o.seconds for o in of),
    }


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


# ----
# One job of a campaign of kills: what it runs, when its parties are killed, and what has to hold afterwards

_SEED = 3
#: Longest time for a silo that is kept away, as a multiple of the deadline under "drop".
_AWAY = 3.0


class Kind(NamedTuple):
    """A sort of job. rounds: of the server."""

    algorithm: Mapping[str, Any]
    aggregation: Mapping[str, Any]
    rounds: int
    privacy: Mapping[str, Any] | None = None

    @property
    def holder(self) -> bool:
        return self.aggregation["kind"] == "homomorphic"

    @property
    def columns(self) -> bool:
        """Whether silos hold different columns of the same people."""
        return bool(self.algorithm["name"] == "vertical")


_SFVI = {"name": "sfvi", "iterations": 150, "family": "diagonal"}
_AVG = {"name": "sfvi-avg", "rounds": 60, "local_steps": 5}
_DP = {"unit": "record", "epsilon": 8.0, "delta": 1e-5, "noise": "distributed", "data_set": "data", "retries": 100}
KINDS = {
    "private SFVI": Kind({**_SFVI, "sampling_rate": 0.5}, {"kind": "masked"}, 150, _DP),
    "masked SFVI": Kind(_SFVI, {"kind": "masked"}, 150),
    "homomorphic SFVI-Avg": Kind({**_AVG, "rounds": 30}, {"kind": "homomorphic"}, 30),
    "masked SFVI-Avg": Kind(_AVG, {"kind": "masked"}, 60),
    "masked PVI": Kind({"name": "pvi", "rounds": 60, "local_steps": 5}, {"kind": "masked"}, 60),
    "plain SFVI": Kind(_SFVI, {"kind": "plain"}, 150),
    "vertical": Kind({"name": "vertical", "rounds": 60, "response": "silos"}, {"kind": "masked"}, 60),
    "private vertical": Kind({"name": "vertical", "rounds": 60, "response": "private"}, {"kind": "masked"}, 60, _DP),
}


#: The next victim, of a job's parties with their roles.
Choose = Callable[[Mapping[str, str]], str]


class Kill(NamedTuple):
    """seconds: until the server had done another round; None where another kill or the end of the job came first."""

    party: str
    role: str
    round: int
    seconds: float | None = None


class Outcome(NamedTuple):
    """A job that is over. fault: what was wrong, "" for nothing."""

    kind: str
    kills: tuple[Kill, ...]
    seconds: float
    fault: str = ""
    left_out: int = 0  # answers that were not waited for, under "drop"


def table(kind: Kind, on_loss: str, deadline: float, folder: Path | None = None) -> dict[str, Any]:
    """The configuration of a job on six cities: three silos, or four where one may be lost. Of columns it is of made-up
    people, whose files are written into `folder`: the outcome lies at a silo, or at the server, whose own ledger guards
    it."""
    silos = _silos(on_loss)
    sizes = [200, 180, 157] if on_loss == "wait" else [150, 140, 130, 117]
    found: dict[str, Any] = {
        "seed": _SEED,
        "model": {"program": "six-cities"},
        "partition": {"ids": silos, "sizes": sizes},
        "algorithm": dict(kind.algorithm),
        "aggregation": dict(kind.aggregation),
        "run": {"compile": False, "threads": 1},
        "engine": {"on_loss": on_loss, "deadline": deadline},
    }
    if kind.columns:
        assert folder is not None
        del found["partition"]
        at_server = kind.privacy is not None
        found["model"], found["silo"] = {"likelihood": "bernoulli"}, _column_files(folder, silos, at_server)
        found["response"] = {"data": str(folder / "outcome.csv")} if at_server else {"silo": silos[0]}
        found["alignment"] = {"column": "person", "how": "matching" if at_server else "sorted"}
    if on_loss == "drop" and kind.aggregation.get("kind") != "plain":
        found["aggregation"] |= {"max_missing": 1, "max_differences": 10**6}
    return found if kind.privacy is None else {**found, "privacy": dict(kind.privacy)}


def _silos(on_loss: str) -> list[str]:
    return ["east", "north", "south"] if on_loss == "wait" else ["east", "north", "south", "west"]


def _column_files(folder: Path, silos: list[str], at_server: bool) -> list[dict[str, str]]:
    """Tables of the same 60 people, the same whenever they are written; the first, or a file of its own, has the
    outcome."""
    folder.mkdir(exist_ok=True)
    x = torch.randn(60, len(silos), generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64)
    y = (x.sum(1) > 0).int()
    for at, silo in enumerate(silos):
        told = not at and not at_server
        rows = [f"P-{100 + i},{float(x[i, at]):.6f}{f',{y[i]}' if told else ''}" for i in range(len(x))]
        (folder / f"{silo}.csv").write_text("\n".join(["person,x" + (",y" if told else ""), *rows]) + "\n")
    outcome = [f"P-{100 + i},{y[i]}" for i in range(len(x))]
    (folder / "outcome.csv").write_text("\n".join(["person,y", *outcome]) + "\n")
    return [{"id": silo, "data": str(folder / f"{silo}.csv")} for silo in silos]


def run_job(
    folder: Path,
    name: str,
    kills: int,
    rng: random.Random,
    choose: Choose,
    on_loss: str,
    deadline: float,
    patience: float,
    reference: Callable[[str], bytes],
) -> Outcome:
    """A job with up to `kills` kills, checked. choose: the next victim. patience: seconds in which it has to
    end. reference: the posterior without kills, by the name of the kind."""
    kind, began = KINDS[name], time.monotonic()
    job = table(kind, on_loss, deadline, folder.parent / "columns")
    parties = Parties(folder, job, silo_ids(parse(job, "job")) or (), kind.holder)
    done: list[Kill] = []
    try:
        for party in parties.homes:
            parties.start(party)
        done.extend(_kill(parties, kind.rounds, kills, rng, choose, deadline if on_loss == "drop" else 0.0, patience))
        left = parties.wait(HUB, patience)
        time.sleep(1.0)  # the silos close the job once the server has its last answers
    finally:
        parties.stop()
    try:
        if left not in _ENDED:
            what = "hung" if left is None else "failed"
            raise ProtocolError(f"{what}: {' '.join(parties.log(HUB).split())[-300:]}")
        lost = _check(parties, name, on_loss, reference)
    except ProtocolError as error:
        return Outcome(name, tuple(done), time.monotonic() - began, str(error))
    return Outcome(name, tuple(done), time.monotonic() - began, "", lost)


def _kill(
    parties: Parties,
    rounds: int,
    wanted: int,
    rng: random.Random,
    choose: Choose,
    deadline: float,
    patience: float,
) -> Iterator[Kill]:
    """Kill and start again until `wanted` kills are done or the job is over."""
    roles = {p: parties.role(p) for p in parties.homes}
    killed: Kill | None = None
    at = 0.0
    for number in range(wanted):
        last = number == wanted - 1
        # Mostly once the job goes on, now and then before the party is back, at last around the end of the job.
        settled = rng.random() < 0.75
        goal = rounds if last and settled else (killed.round if killed else 0) + 1
        if settled:
            if not parties.wait_for_rounds(goal, patience):
                break
            if killed is not None and not last:
                killed = killed._replace(seconds=time.monotonic() - at)
        time.sleep(rng.uniform(0.0, 0.4 if settled else 1.5))
        if killed is not None:
            yield killed
            killed = None
        victim = choose(roles)
        role = roles[victim]
        before = parties.rounds()
        if parties.left(HUB) is not None or not parties.kill(victim):
            break  # the job is over, or has failed: its exit code tells
        killed, at = Kill(victim, role, before), time.monotonic()
        if role == "silo" and deadline:
            time.sleep(rng.choice([0.0, rng.uniform(0.0, _AWAY * deadline)]))
        parties.start(victim)
    if killed is not None:
        yield killed


def _check(parties: Parties, name: str, on_loss: str, reference: Callable[[str], bytes]) -> int:
    """What has to hold once a job has ended; the number of answers that were left out. Raises ProtocolError."""
    kind, hub = KINDS[name], parties.homes[HUB]
    found = (parties.out / "posterior.safetensors").read_bytes()
    keys = {m: parties.homes[m].identity().public_key for m in parties.homes}
    for member, home in parties.homes.items():
        verify(home.log_file, keys[member])
        if member != HUB:
            compare(home.log_file, hub.log_file)
    answers = answered(hub.log_file)
    if kind.privacy is not None:
        _check_private(parties, found)
        if kind.columns:
            _check_response(parties, kind.rounds)
    elif on_loss == "wait":
        if found != reference(name):
            raise ProtocolError("the posterior is not that of a job without kills")
    elif found != posterior(parse(table(kind, on_loss, 1.0), "replay"), answers):
        raise ProtocolError("the posterior is not that of the silos that answered")
    for silo in parties.silos if on_loss == "wait" else ():
        if not list((parties.homes[silo].path / "results").glob("*.safetensors")):
            raise ProtocolError(f"silo '{silo}' has not kept its own posterior")
    return sum(len(parties.silos) - len(who) for who in answers.values())


def _check_private(parties: Parties, found: bytes) -> None:
    """Noise is secret, so the posterior differs from job to job: it is finite, and all that left was charged."""
    if not all(bool(torch.isfinite(v).all()) for v in load(found).values()):
        raise ProtocolError("the posterior is not finite")
    job = str(read_json(parties.out / "run.json")["job"])
    for silo in parties.silos:
        home = parties.homes[silo]
        (chain,) = verify_ledger(home.ledger_file, silo)
        charged = sum(n for phase, n in chain.jobs[job].released.items() if phase != "hidden")  # that does not leave
        left, sessions = released(home.log_file), different(home.log_file, "open")
        # In a new session what was released is masked anew: other bytes, and no other release.
        if not left <= charged + sessions - 1:
            raise ProtocolError(f"silo '{silo}' released {left} sums, and its ledger has {charged}")


def _check_response(parties: Parties, rounds: int) -> None:
    """The server's own ledger has each round's two releases of the response once, however often it was killed."""
    hub, job = parties.homes[HUB], str(read_json(parties.out / "run.json")["job"])
    (chain,) = verify_ledger(hub.ledger_file, HUB)
    charged = dict(chain.jobs[job].released)
    if charged != {"pull": rounds, "hidden": rounds}:
        raise ProtocolError(f"the server's ledger has {charged}, of {rounds} rounds")


def released(log: Path) -> int:
    """Different answers to broadcasts that left a site, by its own log."""
    return different(log, "broadcast")


def different(log: Path, step: str) -> int:
    """Different answers of one step that left a site, by its own log."""
    seen = (read_exchange(row.fields()) for row in rows(log)[1] if row.kind == EXCHANGE)
    return len({e.sent.digest for e in seen if e.step == step and e.sent is not None})


def quota(rng: random.Random, least: Mapping[str, int]) -> Choose:
    """Whom to kill: a role by chance, those with most kills still due the likeliest; one of its parties by chance."""
    done: Counter[str] = Counter()

    def choose(parties: Mapping[str, str]) -> str:
        roles = sorted(set(parties.values()))
        weights = [(1 + max(0, least.get(role, 0) - done[role])) ** 3 for role in roles]
        (role,) = rng.choices(roles, weights)
        done[role] += 1
        return rng.choice([p for p in parties if parties[p] == role])

    return choose


def one_by_one(rng: random.Random, each: int, killed: Counter[str]) -> Choose:
    """Whom to kill, so that each party is `each` times: of those with most kills still due one by chance. killed: so
    far, by party; counts the victim."""

    def choose(parties: Mapping[str, str]) -> str:
        most = max(each - killed[p] for p in parties)
        victim = rng.choice([p for p in sorted(parties) if each - killed[p] == most])
        killed[victim] += 1
        return victim

    return choose
