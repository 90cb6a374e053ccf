"""Makes the three CSV files beside it. The patients are simulated: no real person is in them."""

import csv
from pathlib import Path

import numpy as np

HOSPITALS = {"north": (40, 3.0), "east": (60, -2.0), "south": (50, 0.5)}  # patients, mmHg above the common level
LEVEL, EFFECT, BETWEEN, WITHIN = 138.0, -9.0, 11.0, 6.0  # mmHg


def main() -> None:
    rng = np.random.default_rng(7)
    for name, (patients, offset) in HOSPITALS.items():
        treated = rng.integers(0, 2, patients)
        mean = LEVEL + offset + EFFECT * treated + rng.normal(0, BETWEEN, patients)
        pressure = mean[:, None] + rng.normal(0, WITHIN, (patients, 3))
        with Path(__file__).with_name(f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["treated", "pressure[0]", "pressure[1]", "pressure[2]"])
            writer.writerows([x, *(f"{p:.1f}" for p in row)] for x, row in zip(treated, pressure, strict=True))


if __name__ == "__main__":
    main()
