"""The convolutional network: its logits against PyTorch's own layers, its sites, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from secure_fvi.errors import InputError
from secure_fvi.models.convolutional import SITES, class_log_probs, convolutional_network


def test_it_is_the_network_that_pytorch_makes_of_its_layers() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(1, 3, 5, 2), nn.ReLU(), nn.Conv2d(3, 4, 5, 2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10)
    )
    values = [p.detach() for p in layers.parameters()]
    values[4] = values[4].T
    x = torch.rand(6, 784)
    found = class_log_probs({name: v.unsqueeze(0) for name, v in zip(SITES, values, strict=True)}, x)
    wanted = layers(x.reshape(6, 1, 28, 28)).log_softmax(-1)
    torch.testing.assert_close(found, wanted.detach())


@pytest.mark.parametrize(
    ("options", "said"),
    [({"side": 12}, "13 is the least"), ({"filters": (8, 0)}, "filters"), ({"scale": 0.0}, "scale")],
)
def test_what_it_refuses(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        convolutional_network(**options)
