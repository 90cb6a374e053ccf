"""Empirical epsilon of a configuration: what canaries prove, beside what its accountant claims, as rows of an audit.

A row's value is a lower bound on epsilon at the job's delta, its upper end the claim. The finding is "leaks" where the
bound exceeds the claim: then the claim is false, with the row's confidence. The positive control is the same attack
where noise is missing behind the accountant's back, which must be found out; the negative one tosses the coins again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.audits.base import CONFIDENCE, CONTROL_CONFIDENCE, AuditRow, Control, Estimate, judge
from secure_fvi.audits.canaries import Setting
from secure_fvi.audits.canary_games import InOrOut, Kind, OneRunGame, Scores
from secure_fvi.audits.several_runs import Method, bound
from secure_fvi.audits.worlds import Data
from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel
from secure_fvi.privacy.settings import DP

#: The attack's name on the command line, and its score in audit.json.
NAME, SCORE = "epsilon", "epsilon (lower bound)"
#: Canaries and guesses on either side, by unit. Canary silos are parties of their own and cost as much.
ONE_RUN = {"record": (5000, 50), "silo": (100, 25)}
ONE_RUN_ROUNDS, ROUNDS = 12, 3
_KINDS: tuple[Kind, ...] = ("dirac", "real")
_METHODS: dict[Method, str] = {"clopper-pearson": "Clopper-Pearson", "gaussian": "Gaussian DP"}
Told = Callable[[str], None]


def work(runs: int) -> int:
    """How often `told` will be called."""
    return 2 + 2 * len(_KINDS) * runs


def epsilon_rows(
    model: FederatedModel,
    algorithm: Any,
    silos: Sequence[Data],
    privacy: DP,
    *,
    simulated: bool,
    real_data: bool = False,
    runs: int = 400,
    rounds: int = ROUNDS,
    told: Told = lambda what: None,
) -> list[AuditRow]:
    """Rows of the attack for SFVI under `privacy`, noise planned for `rounds` rounds without retries.

    runs: of each game with one canary, half of them with it. Raises InputError for other algorithms, for fewer than 20
    runs, and for data that are neither made nor released for an audit.
    """
    if not isinstance(algorithm, SFVI):
        raise InputError(f"attack '{NAME}' audits sfvi under privacy, not {algorithm.name}")
    if runs < 20:
        raise InputError(f"attack '{NAME}' needs at least 20 runs, not {runs}")
    if not simulated and not real_data:
        raise InputError(
            "an audit of runs on real data handles single records; say so with real_data = True (--real-data) after "
            "the institutions have agreed, or audit a run on simulated data"
        )
    settings = Setting(model, algorithm, silos, replace(privacy, retries=0), simulated, rounds)
    rows = [_one_run_row(replace(settings, rounds=max(rounds, ONE_RUN_ROUNDS)), told)]
    for kind in _KINDS:
        rows += _several_runs_rows(settings, kind, runs, told)
    return rows


def _one_run_row(setting: Setting, told: Told) -> AuditRow:
    canaries, each_side = ONE_RUN[setting.privacy.unit]
    game = OneRunGame(setting, canaries)
    missing = 0.25 if setting.privacy.unit == "record" else 0.0
    told(f"{canaries} canaries in one run")
    found, nothing = game.play(1, each_side)
    told(f"{canaries} canaries in one run, {_words(missing)}")
    caught, _ = game.play(2, each_side, missing)
    return _row(
        f"Dirac {setting.privacy.unit}s in one run",
        setting,
        game.claim,
        (found.epsilon, caught.epsilon, nothing.epsilon),
        missing,
        method="one run",
        assumption="none",
        canaries=canaries,
        guesses=found.guesses,
        right=found.correct,
    )


def _several_runs_rows(setting: Setting, kind: Kind, runs: int, told: Told) -> list[AuditRow]:
    game = InOrOut(setting, kind)
    what = f"{'Dirac' if kind == 'dirac' else 'real'} {setting.privacy.unit} in or out"
    found = game.scores(range(runs), each=lambda: told(what))
    control = game.scores(range(runs), 0.0, lambda: told(f"{what}, {_words(0.0)}"))
    delta, out = setting.privacy.delta, []
    # A sampled Gaussian has another trade-off curve, for which the second method proves nothing.
    sampled = setting.privacy.unit == "record" and setting.algorithm.sampling_rate < 1
    for method, name in _METHODS.items():
        if method == "gaussian" and sampled:
            continue

        def proven(scores: Scores, confidence: float = CONFIDENCE, method: Method = method) -> Any:
            return bound(*scores, delta, method, confidence)

        best = proven(found)
        out.append(
            _row(
                f"{what}, {name}",
                setting,
                game.claim,
                (best.epsilon, proven(control).epsilon, proven(found.shuffled(), CONTROL_CONFIDENCE).epsilon),
                0.0,
                method=method,
                assumption=best.assumption,
                runs=runs,
                rates=best.rates._asdict(),
                **({} if best.mu is None else {"mu": best.mu}),
            )
        )
    return out


def _row(
    attack: str,
    setting: Setting,
    claim: Mapping[str, Any],
    epsilons: tuple[float, float, float],
    missing: float,
    **detail: Any,
) -> AuditRow:
    claimed = float(claim["epsilon"])
    found, caught, nothing = (Estimate(e, e, max(e, claimed)) for e in epsilons)
    shown = {
        k: claim[k] for k in ("unit", "delta", "accountant", "noise", "mechanism", "noise_multiplier", "colluders")
    }
    row = judge(
        attack,
        protection(setting.privacy),
        SCORE,
        found,
        Control(caught, f"the same attack, {_words(missing)}"),
        Control(nothing, "the same scores, with the coins tossed again"),
        claimed,
        claim=claimed,
        rounds=setting.rounds,
        **shown,
        **detail,
    )
    if caught.low <= claimed:
        row.detail["why_invalid"] = (
            f"an attack of this size proves {caught.low:.3g} where noise is missing and cannot contradict a claim of "
            f"{claimed:.3g}; give it more runs, or audit a smaller epsilon"
        )
    return row


def protection(privacy: DP) -> str:
    """As the table of an audit names it."""
    size = f"noise {privacy.noise_multiplier:g}" if privacy.epsilon is None else f"{privacy.epsilon:g}"
    return f"{'silo ' if privacy.unit == 'silo' else ''}DP {size}"


def _words(missing: float) -> str:
    return "noise off" if missing == 0 else f"noise times {missing:g}"
