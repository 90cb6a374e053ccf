"""Membership inference as rows of an audit: the posterior that a run released, with and without record privacy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from secure_fvi.aggregation import Masked, Plain
from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.audits.base import CONTROL_CONFIDENCE, AuditRow, Control, judge
from secure_fvi.audits.membership import Membership
from secure_fvi.audits.scores import auc, tpr_at_fpr
from secure_fvi.audits.vertical import auc_bound
from secure_fvi.audits.worlds import Data
from secure_fvi.federated_model import FederatedModel
from secure_fvi.fitting import fit
from secure_fvi.privacy.settings import DP

_REFERENCES = 16
_ROUNDS = 600  # of the audited fit, as many as the references have steps
_SILOS = 3
#: How often each member counts in the positive control's posterior.
_COPIES = 10
_FPR = 0.1


def membership_rows(
    model: FederatedModel,
    pool: Data,
    private: Sequence[tuple[str, DP]] = (),
    *,
    seed: int = 9,
    told: Callable[[str], None] = lambda what: None,
) -> list[AuditRow]:
    """LiRA and RMIA on a posterior that was fitted to those of `pool` that coins chose, without privacy and under each
    `private` (name, settings). Sums that only hide messages release the same posterior, so they have no rows.

    Positive control: a posterior to which each member counts ten times, as a model that overfits has it. Negative:
    memberships drawn again.
    """
    attack = Membership(model, pool)
    told("reference posteriors")
    references = attack.fit(attack.halves(_REFERENCES))
    signals = attack.signals(attack.family, references.eta)
    rng = np.random.default_rng(seed)
    # By independent coins: so far as others' go, a record is added or not, which is what privacy speaks of.
    member = rng.random(attack.size) < 0.5
    told("a posterior that overfits")
    heavy = attack.fit(member[None] * np.int64(_COPIES))  # type: ignore[arg-type]  # a record counts so many times
    caught = attack.signals(attack.family, heavy.eta)[0]
    again = rng.permutation(member)
    people = np.arange(attack.size)
    attacks: dict[str, Callable[[FloatArray], FloatArray]] = {
        "LiRA": lambda seen: attack.lira(seen, references, signals),
        "RMIA": lambda seen: attack.rmia(seen, references, signals),
    }
    rows = []
    for name, privacy in (("none", None), *private):
        told(f"{name}: a released posterior")
        bound = (
            {} if privacy is None or privacy.epsilon is None else {"bound": auc_bound(privacy.epsilon, privacy.delta)}
        )
        released = _released(model, pool, member, privacy, attack)
        for kind, guesses in attacks.items():
            truth, scores = member.astype(np.float64), guesses(released)
            rows.append(
                judge(
                    f"members by {kind}: released posterior",
                    name,
                    "AUC",
                    auc(truth, scores, people),
                    Control(auc(truth, guesses(caught), people), f"each member counts {_COPIES} times"),
                    Control(auc(again.astype(np.float64), scores, people, CONTROL_CONFIDENCE), "members drawn again"),
                    0.5,
                    records=attack.size,
                    references=_REFERENCES,
                    **bound,
                    **{f"tpr_at_fpr_{_FPR:g}": list(tpr_at_fpr(truth, scores, _FPR).rate)},
                )
            )
    return rows


def _released(
    model: FederatedModel, pool: Data, member: npt.NDArray[np.bool_], privacy: DP | None, attack: Membership
) -> FloatArray:
    """(N,) signals under the posterior of a run over three silos that share the members."""
    at = np.flatnonzero(member)
    silos = [{name: v[at[j::_SILOS]] for name, v in pool.items()} for j in range(_SILOS)]
    config = SFVI(family="diagonal", iterations=_ROUNDS, schedule="linear")
    return attack.released(fit(model, silos, config, Plain() if privacy is None else Masked(), privacy).variational)
