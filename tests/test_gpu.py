"""On a CUDA device: the same numbers as on the CPU, data and local state on the device."""

from __future__ import annotations

import pytest
import torch
from programs import make_clinics, make_slopes

import secure_fvi as sf
from secure_fvi.fitting import build_parties

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("compile_", [False, True])
@pytest.mark.parametrize("samples", [1, 4])
def test_cuda_equals_cpu(samples: int, compile_: bool) -> None:
    for make in (make_slopes, make_clinics):
        problem = make()
        ends = []
        for device in ("cpu", "cuda"):
            algorithm = sf.SFVI(iterations=50, importance_samples=samples)
            server, engine, _ = build_parties(
                problem.model, problem.silos, algorithm, sf.Masked(), device=device, compile=compile_
            )
            for _ in range(50):
                engine.run(server.round())
            assert engine.silos["silo-1"].view.rows["y"].device.type == device
            ends.append(server.state.algorithm.eta["loc"].cpu())
        torch.testing.assert_close(ends[0], ends[1], rtol=1e-8, atol=1e-8)


def test_batched_silos_on_cuda_equal_a_loop_on_cpu() -> None:
    problem = make_clinics()
    silos = [{"y": torch.linspace(-3.0, 1.0, 12, dtype=torch.float64) + j} for j in range(4)]
    ends = []
    for device, batched in (("cpu", False), ("cuda", True)):
        server, engine, _ = build_parties(
            problem.model, silos, sf.SFVI(iterations=30), sf.Masked(), device=device, batch_silos=batched
        )
        for _ in range(30):
            engine.run(server.round())
        ends.append(server.state.algorithm.eta["loc"].cpu())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-8, atol=1e-8)
