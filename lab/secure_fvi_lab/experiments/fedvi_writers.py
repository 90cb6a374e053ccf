"""FedVI on simulated writers, in place of FEMNIST: Tables 1 and 2 of Vedadi et al. (2023), made smaller.

MNIST digits redrawn by made-up people whose habits conflict (`models.writers`): no real writer is behind the numbers,
and they stand beside the paper's for FEMNIST only to show the margin between FedVI and FedAvg.
"""

from __future__ import annotations

from pathlib import Path

from secure_fvi.algorithms.fedavg import FedAvg
from secure_fvi.algorithms.fedvi import FedVI
from secure_fvi.models.fedvi_data import Client
from secure_fvi.models.writers import network, write
from secure_fvi_lab.experiments import Request
from secure_fvi_lab.experiments.fedvi_experiment import Plan, Row, Tuning, plot, run
from secure_fvi_lab.experiments.fedvi_experiment import table as table

#: Accuracy in per cent of clients that took part and that did not, of FEMNIST.
PAPER = {
    "FedAvg": (83.4, 83.1), "FedAvg+": (84.3, 84.2), "DITTO": (84.3, 83.9), "FedRep": (85.3, 85.4),
    "KNN-Per": (88.2, 88.1), "FedVI": (90.3, 90.6),
}  # fmt: skip


def plan(quick: bool) -> Plan:
    """Options were chosen on seed 100."""
    part, new, rounds = (40, 10, 60) if quick else (100, 40, 300)
    return Plan(
        name="fedvi-writers",
        network=network(),
        taking_part=part,
        new=new,
        fedvi=FedVI(rounds=rounds, participation=0.15, learning_rate=0.1, tau=1e-3),
        fedavg=FedAvg(
            rounds=rounds, local_steps=1, participation=0.15, learning_rate=0.1, server_momentum=0.9, tolerance=0.0,
            prior=False,
        ),
        tuning=Tuning(),
        seeds=(0,) if quick else (0, 1, 2, 3, 4),
        paper=PAPER,
        setting=(
            f"simulated writers on MNIST, three conflicting habits; {part} writers take part, {new} are new, 80 digits "
            f"of 14 x 14 pixels to train on and 20 to test each; {rounds} rounds of {round(0.15 * part)}, one local "
            "step; plain sums; the paper's numbers are of FEMNIST"
        ),
    )  # fmt: skip


def reproduce(request: Request) -> tuple[Row, bytes]:
    """The content of fedvi-writers.json, and the plot as PNG. Raises InputError where --data holds no `mnist`."""
    chosen = plan(request.quick)

    def make(folder: Path | None, seed: int) -> list[Client]:
        return write(folder, chosen.taking_part + chosen.new, seed=seed)

    content = run(chosen, make, request)
    return content, plot(content)
