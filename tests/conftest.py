"""Shared settings of the tests."""

from __future__ import annotations

import torch

torch.set_default_dtype(torch.float64)
# Small kernels on few cores: more threads only wait for each other.
torch.set_num_threads(1)
