"""FedVI on FEMNIST in the paper's setting (Vedadi et al. 2023, Tables 1 and 2): 3,400 writers, 1,500 rounds."""

from __future__ import annotations

from pathlib import Path

import torch

from secure_fvi.algorithms.fedavg import FedAvg
from secure_fvi.algorithms.fedvi import FedVI
from secure_fvi.errors import InputError
from secure_fvi.models.fedvi_data import Client
from secure_fvi.models.femnist import network, read_clients
from secure_fvi_lab.experiments import Request
from secure_fvi_lab.experiments.fedvi_experiment import Plan, Row, Tuning, plot, run
from secure_fvi_lab.experiments.fedvi_experiment import table as table

#: Accuracy in per cent of clients that took part and that did not.
PAPER = {
    "FedAvg": (83.4, 83.1), "FedAvg+": (84.3, 84.2), "DITTO": (84.3, 83.9), "FedRep": (85.3, 85.4),
    "KNN-Per": (88.2, 88.1), "FedVI": (90.3, 90.6),
}  # fmt: skip
#: The paper holds out the first writers.
NEW = 20


def plan(clients: int, quick: bool) -> Plan:
    """The paper's: 100 writers a round, batches of 256, client rate 0.02, server rate 3, momentum 0.9, tau 1e-9."""
    rounds, part = (20, min(clients - NEW, 60)) if quick else (1500, clients - NEW)
    share = min(1.0, (10 if quick else 100) / part)
    common: Row = {"rounds": rounds, "participation": share, "learning_rate": 0.02, "server_learning_rate": 3.0}
    return Plan(
        name="fedvi-femnist",
        network=network(),
        taking_part=part,
        new=NEW,
        fedvi=FedVI(**common, tau=1e-9),
        fedavg=FedAvg(**common, local_steps=1, server_momentum=0.9, tolerance=0.0, prior=False),
        tuning=Tuning(),
        seeds=(0,) if quick else (0, 1, 2, 3, 4),
        device="cuda" if torch.cuda.is_available() else "cpu",
        paper=PAPER,
        setting=f"FEMNIST, {part} writers take part, {NEW} are new; {rounds} rounds; plain sums",
    )


def reproduce(request: Request) -> tuple[Row, bytes]:
    """The content of fedvi-femnist.json, and the plot as PNG. Raises InputError where --data holds no `femnist`."""
    clients = read_clients(request.data)
    if len(clients) <= NEW:
        raise InputError(f"{len(clients)} writers; more than {NEW} are needed")
    chosen = plan(len(clients), request.quick)

    def make(folder: Path | None, seed: int) -> list[Client]:
        return [*clients[NEW : NEW + chosen.taking_part], *clients[:NEW]]

    content = run(chosen, make, request)
    return content, plot(content)
