"""What a silo's messages give away about the silo as a whole: how many records it has, and how they are mixed.

The adversary makes worlds of its own in which sizes and mixes are drawn, learns from them by a ridge regression, and
guesses those of others. Where counts are summed as well, a plain contribution holds the silo's own, masked ones leave
the total; in both, sums of gradients grow with the number of records and turn with their mix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from secure_fvi.audits.base import AuditRow
from secure_fvi.audits.features import from_messages, from_totals
from secure_fvi.audits.local_latents import OF_A_MEAN, OF_MEDIANS, Sample, rows_of
from secure_fvi.audits.workbench import MASKED, OWN, PLAIN, Each, Protection, Workbench, per_record, silent
from secure_fvi.audits.worlds import Data
from secure_fvi.errors import InputError

#: A silo has between half and one and a half times the mean number of records of the configuration's silos.
_SMALLEST, _LARGEST = 0.5, 1.5
#: Share of a silo's records whose `argument` lies above the pool's median.
_SHARES = (0.1, 0.9)


def draw(pool: Data, silos: int, mean_size: float, argument: str, seed: int) -> list[Data]:
    """Silos of random sizes whose mix of records by `argument` is random as well."""
    values = per_record(pool[argument])
    above = np.flatnonzero(values > np.median(values))
    below = np.flatnonzero(values <= np.median(values))
    if not len(above):  # more than half of the records have the largest value
        above, below = np.flatnonzero(values == values.max()), np.flatnonzero(values < values.max())
    if not len(below):
        raise InputError(f"'{argument}' is the same for all records, so there is no mix to guess")
    rng = np.random.default_rng([seed, 5])
    found = []
    for _ in range(silos):
        size = max(2, int(rng.integers(int(_SMALLEST * mean_size), int(_LARGEST * mean_size) + 1)))
        many = rng.binomial(size, rng.uniform(*_SHARES))
        rows = torch.from_numpy(np.concatenate([rng.choice(above, many), rng.choice(below, size - many)]))
        found.append({name: v[rows] for name, v in pool.items()})
    return found


def collect(
    bench: Workbench, protection: Protection, argument: str, first: int = 0, each: Each = silent
) -> dict[str, Sample]:
    """What is seen, for each property, on the same worlds: "size" in records, "mix" the mean of `argument`."""
    laboratory = bench.laboratory(protection)
    properties: dict[str, Callable[[Data], float]] = {
        "size": lambda data: float(len(data[argument])),
        "mix": lambda data: float(per_record(data[argument]).mean()),
    }
    messages, totals, world = [], [], []
    targets: dict[str, list[float]] = {name: [] for name in properties}
    for seed in range(first, first + bench.worlds):
        silos = draw(bench.pool, len(bench.sizes), bench.records / len(bench.sizes), argument, seed)
        transcript = laboratory.run(silos, seed).transcript
        where = {f"silo-{j + 1}": data for j, data in enumerate(silos)}
        messages.append(from_messages(transcript))
        totals.append(from_totals(transcript))
        for name, told in properties.items():
            targets[name] += [told(where[silo]) for silo in transcript.silos]
        world += [seed] * len(silos)
        each()
    seen, sums = np.concatenate(messages), np.concatenate(totals)
    raw = (seen.shape[1] - 1, sums.shape[1])  # without the mean length of messages
    return {n: Sample(seen, sums, np.array(t)[:, None], (), np.array(world), raw) for n, t in targets.items()}


def property_rows(
    bench: Workbench,
    argument: str,
    protections: Sequence[Protection] = (PLAIN, MASKED),
    each: Each = silent,
) -> list[AuditRow]:
    """Rows for both properties under each protection. Positive control: plain sums.

    `argument`: the model's argument whose mean is the mix. `each` is told when a world is done; there are
    `bench.worlds` of them for each protection, for the plain control and for the adversary's hint.
    """
    if argument not in bench.pool:
        raise InputError(f"the model has no argument '{argument}'; choose {', '.join(bench.pool)}")
    own = collect(bench, PLAIN, argument, OWN, each)
    plain = collect(bench, PLAIN, argument, 0, each)
    rows = []
    for protection in protections:
        found = plain if protection.name == PLAIN[0] else collect(bench, protection, argument, 0, each)
        for name in found:
            about = "size of a silo" if name == "size" else f"mean of '{argument}' in a silo"
            hinted, control = (s[name].hinted(own[name]) for s in (found, plain))
            rows += rows_of(
                about, protection.name, (*OF_A_MEAN, OF_MEDIANS), (hinted, control),
                "plain sums, with other worlds' silos to guess", silos=len(hinted.target), rounds=bench.rounds,
                standard_deviation=float(hinted.target.std()),
            )  # fmt: skip
    return rows
