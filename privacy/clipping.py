"""Clipped sums by Opacus, with noise that is ours.

Opacus' per-layer optimiser clips each record's gradient, accumulates over chunks of a batch and calls for noise once;
only where that noise comes from is replaced (its own replays from torch's seed).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch
from opacus.optimizers.perlayeroptimizer import DPPerLayerOptimizer
from torch import Tensor, nn


class _Optimizer(DPPerLayerOptimizer):  # type: ignore[misc]
    def __init__(self, parts: Sequence[nn.Parameter], norms: Sequence[float], noise: Callable[[Tensor], Tensor]):
        super().__init__(
            torch.optim.SGD(parts, lr=1.0),
            noise_multiplier=0.0,
            max_grad_norm=list(norms),
            expected_batch_size=None,
            loss_reduction="sum",
        )
        self._noise = noise

    def add_noise(self) -> None:
        total = torch.cat([p.summed_grad.reshape(-1) for p in self.params])
        together = self._noise(total.cpu()).to(total.device)  # noise is drawn on the CPU
        for p, noised in zip(self.params, together.split([p.numel() for p in self.params]), strict=True):
            p.grad = noised.view_as(p)


def noisy_clipped_sum(
    chunks: Iterable[Sequence[Tensor]], sizes: Sequence[int], norms: Sequence[float], noise: Callable[[Tensor], Tensor]
) -> tuple[Tensor, int]:
    """Sum over records of parts clipped to L2 `norms`, plus noise; and how many records were dropped.

    Each chunk holds one float64 tensor (B, sizes[i]) a part, on any device; the result is on the CPU. A record with any
    entry that is not finite counts as zero. `noise` maps the clipped sum (sum(sizes),) to the noised one and is called
    exactly once, also where there are no records. The count of dropped records is for the silo's own eyes.
    """
    chunks = iter(chunks)
    first = next(chunks, None)
    device = first[0].device if first is not None else torch.device("cpu")
    parts = [nn.Parameter(torch.zeros(size, dtype=torch.float64, device=device)) for size in sizes]
    optimizer = _Optimizer(parts, norms, noise)
    dropped = 0
    for part in parts:  # a sum over no records is zero, and noised like any other
        part.summed_grad = torch.zeros_like(part.data)  # type: ignore[attr-defined]
    for chunk in itertools.chain([] if first is None else [first], chunks):
        finite = torch.isfinite(torch.stack([rows.sum(1) for rows in chunk]).sum(0))
        if not finite.all():  # a sum of finite entries may overflow, so look at each
            finite = torch.stack([torch.isfinite(rows).all(1) for rows in chunk]).all(0)
        dropped += int((~finite).sum())
        for part, rows in zip(parts, chunk, strict=True):
            part.grad_sample = torch.where(finite[:, None], rows, 0.0)  # type: ignore[attr-defined]
        optimizer.clip_and_accumulate()
        for part in parts:
            part.grad_sample = None  # type: ignore[attr-defined]
    optimizer.add_noise()
    return torch.cat([part.grad.cpu() for part in parts if part.grad is not None]).detach(), dropped
