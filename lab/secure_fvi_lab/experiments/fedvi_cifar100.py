"""FedVI on CIFAR-100, clients by hierarchical LDA over coarse labels (Vedadi et al. 2023, Tables 1 and 2).

Made smaller: 16 x 16 pixels, two convolutions, and as many clients as the 20,000 images of the subset give, each image
beside its mirror image.
"""

from __future__ import annotations

from pathlib import Path

from secure_fvi.algorithms.fedavg import FedAvg
from secure_fvi.algorithms.fedvi import FedVI
from secure_fvi.models.cifar100 import deal, network, read_images
from secure_fvi.models.fedvi_data import Client
from secure_fvi_lab.experiments import Request
from secure_fvi_lab.experiments.fedvi_experiment import Plan, Row, Tuning, plot, run
from secure_fvi_lab.experiments.fedvi_experiment import table as table

#: Accuracy in per cent of clients that took part and that did not.
PAPER = {
    "FedAvg": (47.4, 47.1), "FedAvg+": (51.4, 50.8), "DITTO": (52.0, 52.1), "FedRep": (53.2, 53.5),
    "KNN-Per": (55.0, 56.1), "FedVI": (59.1, 58.7),
}  # fmt: skip


def plan(quick: bool) -> Plan:
    """Options were chosen on seed 100, for FedAvg as well: with more rounds it overfits."""
    part, new, rounds, baseline_rounds, share = (40, 10, 30, 30, 0.25) if quick else (160, 40, 600, 250, 0.1)
    common: Row = {"learning_rate": 0.25, "server_learning_rate": 1.0, "server_schedule": "cosine"}
    common["participation"] = share
    return Plan(
        name="fedvi-cifar100",
        network=network(),
        taking_part=part,
        new=new,
        fedvi=FedVI(rounds=rounds, **common, tau=1e-3),
        fedavg=FedAvg(rounds=baseline_rounds, **common, local_steps=1, server_momentum=0.9, tolerance=0.0, prior=False),
        tuning=Tuning(),
        seeds=(0,) if quick else (0, 1, 2, 3, 4),
        paper=PAPER,
        setting=(
            f"CIFAR-100, {part} clients take part, the first {new} are new, hierarchical LDA over coarse labels, 80 "
            "images to train on and 20 to test each, 16 x 16 pixels, mirrored, "
            f"{rounds} rounds of {round(share * part)} clients, one local step, {baseline_rounds} for FedAvg; plain "
            "sums"
        ),
    )


def reproduce(request: Request) -> tuple[Row, bytes]:
    """The content of fedvi-cifar100.json, and the plot as PNG. Raises InputError where --data holds neither file."""
    images = read_images(request.data)
    chosen = plan(request.quick)

    def make(folder: Path | None, seed: int) -> list[Client]:
        clients = deal(images, chosen.taking_part + chosen.new, seed=seed)
        # As in the paper, the first are new. The last get what classes are left, so that it matters which.
        clients = [*clients[chosen.new :], *clients[: chosen.new]]
        return [client.mirrored() for client in clients]

    content = run(chosen, make, request)
    return content, plot(content)
