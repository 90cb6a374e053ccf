"""FedVI's network (Vedadi et al. 2023, Figure 2 and Appendix D) as a Pyro program with an encoder.

    h(x): convolutions, pooling, a dense layer          embedding; its first 80% are global features, the rest local
    g(h_global): three dense layers                     posterior constructor, from unlabelled records
    y ~ Categorical(W h_global(x) + b + beta_1 h_local(x) + beta_0)

Global sites are all weights, N(w_0, s^2) around where they start: with gamma = 0 the prior says nothing but where to
start. beta, of the client, has a row a class: as many weights as local features, and a bias. The text's equations (24)
to (29) swap global and local features; its bias has no posterior of its own, here it is a column of beta like the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyro
import torch
from pyro.distributions import Categorical, Normal
from torch import Tensor
from torch.nn import functional

from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel, SiloEncoder
from secure_fvi.models.base import Dataset

Weights = Mapping[str, Tensor]
BETA = "beta"
#: The paper's (28): how far the constructor's outputs move q(beta)'s scale from r(beta)'s.
_SCALE_SHARE, _LEAST_SCALE = 0.01, 1e-5


@dataclass(frozen=True)
class Network:
    """Sizes. `image`: (channels, height, width) of 0 to 255. strided: convolutions with steps of two pixels in place of
    the pooling at the end, for small machines. dropout: shares dropped after the convolutions and after the dense
    layer, in training with FedVI. loc_share: what q(beta)'s mean is of the constructor's output. mean, sd: of a pixel
    over 255, public. prior_scale: s above. seed: of w_0.
    """

    classes: int
    image: tuple[int, int, int]
    convolutions: tuple[int, ...] = (32, 64)
    features: int = 128
    hidden: int = 256
    strided: bool = False
    padding: int = 0
    dropout: tuple[float, float] = (0.25, 0.5)
    global_share: float = 0.8
    loc_share: float = 0.1
    mean: float = 0.0
    sd: float = 1.0
    prior_scale: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.flat < 1:
            raise InputError(f"{len(self.convolutions)} convolutions leave nothing of an image of {self.image}")
        if not 0 < self.n_global < self.features:
            raise InputError(f"global_share = {self.global_share} leaves no global or no local feature")

    @property
    def n_global(self) -> int:
        """Global features: the first 80%; 102 of 128."""
        return math.floor(self.global_share * self.features)

    @property
    def n_local(self) -> int:
        return self.features - self.n_global

    @property
    def beta_scale(self) -> float:
        """sigma_0 of r(beta), Glorot's."""
        return math.sqrt(2 / (self.n_local + self.classes))

    @property
    def flat(self) -> int:
        """Numbers that the convolutions leave."""
        height, width = self.image[1:]
        stride = 2 if self.strided else 1
        for _ in self.convolutions:
            height, width = ((n - 3 + 2 * self.padding) // stride + 1 for n in (height, width))
        if not self.strided:
            height, width = height // 2, width // 2
        return self.convolutions[-1] * max(height, 0) * max(width, 0)

    def shapes(self, personal: bool = True) -> dict[str, tuple[int, ...]]:
        """Of the weights, by name, in the order in which they are sampled; without a personal part all features are
        global."""
        out: dict[str, tuple[int, ...]] = {}
        inputs = self.image[0]
        for k, channels in enumerate(self.convolutions):
            out |= {f"conv{k}_weight": (channels, inputs, 3, 3), f"conv{k}_bias": (channels,)}
            inputs = channels
        dense = [("embedding", self.flat, self.features)]
        if personal:
            dense += [
                ("constructor0", self.n_global, self.hidden),
                ("constructor1", self.hidden, self.hidden),
                ("constructor2", self.hidden, 2 * (self.n_local + 1) * self.classes),
            ]
        dense.append(("head", self.n_global if personal else self.features, self.classes))
        for name, size, units in dense:
            out |= {f"{name}_weight": (units, size), f"{name}_bias": (units,)}
        return out


def start(network: Network, personal: bool = True) -> dict[str, Tensor]:
    """w_0: Glorot's uniform draws, and biases of zero, from the network's seed."""
    rng, out = torch.Generator().manual_seed(network.seed), {}
    for name, shape in network.shapes(personal).items():
        if len(shape) == 1:
            out[name] = torch.zeros(shape, dtype=torch.float32)
            continue
        area = math.prod(shape[2:])
        limit = math.sqrt(6 / (area * (shape[0] + shape[1])))
        out[name] = limit * (2 * torch.rand(shape, generator=rng, dtype=torch.float32) - 1)
    return out


def embed(network: Network, w: Weights, x: Tensor, kept: Tensor | None = None, kept2: Tensor | None = None) -> Tensor:
    """h(x) (N, features) of images (N, C, H, W), 0 to 255. kept (N, flat), kept2 (N, features): uniform numbers, one
    for each that dropout may drop; None: nothing is dropped."""
    h = (x.to(w["embedding_weight"]) / 255 - network.mean) / network.sd
    stride = 2 if network.strided else 1
    for k in range(len(network.convolutions)):
        h = functional.conv2d(h, w[f"conv{k}_weight"], w[f"conv{k}_bias"], stride, network.padding).relu()
    h = h if network.strided else functional.max_pool2d(h, 2)
    h = _dropped(h.flatten(1), kept, network.dropout[0])
    h = functional.linear(h, w["embedding_weight"], w["embedding_bias"]).relu()
    return _dropped(h, kept2, network.dropout[1])


def _dropped(h: Tensor, kept: Tensor | None, share: float) -> Tensor:
    return h if kept is None or share == 0 else h * (kept >= share) / (1 - share)


def infer(network: Network, w: Weights, present: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """loc and scale of q(beta), (classes x (local features + 1),) each, from embedded records (N, features) of which
    present (N,) says which count: equations (26) to (29), on the global features. The mean over records comes ahead of
    the last layer, which is linear, so that one row goes through it and not N."""
    g = h[:, : network.n_global]
    for k in range(2):
        g = functional.linear(g, w[f"constructor{k}_weight"], w[f"constructor{k}_bias"]).relu()
    mean = (present.unsqueeze(1) * g).sum(0) / present.sum()
    loc, log_scale = functional.linear(mean, w["constructor2_weight"], w["constructor2_bias"]).chunk(2)
    return network.loc_share * loc, _LEAST_SCALE + network.beta_scale * (_SCALE_SHARE * log_scale).exp()


def logits(network: Network, w: Weights, beta: Tensor, h: Tensor) -> Tensor:
    """(N, classes) from embedded records (N, features) and beta (classes, local features + 1)."""
    shared = functional.linear(h[:, : network.n_global], w["head_weight"], w["head_bias"])
    return shared + functional.linear(h[:, network.n_global :], beta[:, :-1], beta[:, -1])


def common_logits(network: Network, w: Weights, x: Tensor) -> Tensor:
    """(N, classes) of images, by one head on all features."""
    return functional.linear(embed(network, w, x), w["head_weight"], w["head_bias"])


def personal_log_probs(network: Network, w: Weights, unlabelled: Tensor, x: Tensor, draws: int = 20) -> Tensor:
    """Log probabilities (draws, N, classes) of images `x` for the client whose images `unlabelled` are, under fixed
    draws of beta from q(beta | unlabelled)."""
    loc, scale = infer(network, w, torch.ones(len(unlabelled)).to(w["head_bias"]), embed(network, w, unlabelled))
    eps = torch.randn(draws, len(loc), generator=torch.Generator().manual_seed(0)).to(loc)
    betas = (loc + scale * eps).reshape(draws, network.classes, network.n_local + 1)
    h = embed(network, w, x)
    return torch.stack([torch.log_softmax(logits(network, w, beta, h), -1) for beta in betas])


def personal_classifier(network: Network) -> FederatedModel:
    """Data: `x` (N, C, H, W) uint8, `y` (N,) int64. Silo site `beta` (classes, local features + 1)."""
    first = start(network)

    def program(x: Tensor, y: Tensor, kept: Tensor | None = None, kept2: Tensor | None = None) -> None:
        w = _sampled(first, network.prior_scale)
        like = w["head_bias"]
        zero = like.new_zeros(network.classes, network.n_local + 1)
        beta = pyro.sample(BETA, Normal(zero, network.beta_scale).to_event(2))
        with pyro.plate("image", len(y)):
            pyro.sample("y", Categorical(logits=logits(network, w, beta, embed(network, w, x, kept, kept2))), obs=y)

    def encoder(
        w: Weights, present: Tensor, x: Tensor, kept: Tensor | None = None, kept2: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return infer(network, w, present, embed(network, w, x, kept, kept2))

    shares = {"kept": (network.dropout[0], network.flat), "kept2": (network.dropout[1], network.features)}
    noise = {name: (size,) for name, (share, size) in shares.items() if share > 0}
    return FederatedModel(program, "image", (BETA,), SiloEncoder(encoder, ("x",), noise))


def common_classifier(network: Network) -> FederatedModel:
    """The same embedding under one head for all: what FedAvg fits. Same data; no silo site."""
    first = start(network, personal=False)

    def program(x: Tensor, y: Tensor) -> None:
        w = _sampled(first, network.prior_scale)
        with pyro.plate("image", len(y)):
            pyro.sample("y", Categorical(logits=common_logits(network, w, x)), obs=y)

    return FederatedModel(program, "image")


def _sampled(first: Weights, scale: float) -> dict[str, Tensor]:
    default = torch.get_default_dtype()
    return {
        name: pyro.sample(name, Normal(value.to(torch.zeros(()).device, default), scale).to_event(value.dim()))
        for name, value in first.items()
    }


# ---- Images of many clients: what the loaders for FedVI return, and how one pool of images is dealt out ----


class Client(NamedTuple):
    """One client's images. `x` (N, C, H, W) uint8, `y` (N,) int64; `test_x`, `test_y` likewise, not trained on."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor

    @property
    def train(self) -> dict[str, Tensor]:
        """What `fit` takes."""
        return {"x": self.x, "y": self.y}


def split_off(x: Tensor, y: Tensor, test_share: float) -> Client:
    """The first records to train on, the last round(test_share x N) to test."""
    kept = len(y) - round(test_share * len(y))
    return Client(x[:kept], y[:kept], x[kept:], y[kept:])


def as_dataset(clients: Sequence[Client], split: str) -> Dataset:
    """The clients' "train" or "test" records one after the other, with the client of each."""
    if split not in ("train", "test"):
        raise InputError(f"split = '{split}' is unknown; choose train, test")
    chosen = [(c.x, c.y) if split == "train" else (c.test_x, c.test_y) for c in clients]
    owner = torch.cat([torch.full((len(y),), k) for k, (_, y) in enumerate(chosen)])
    x, y = (torch.cat([pair[i] for pair in chosen]) for i in range(2))
    return Dataset({"x": x, "y": y}, torch.arange(len(y)), owner)


def pooled(images: npt.NDArray[np.uint8], pool: int) -> npt.NDArray[np.uint8]:
    """(N, C, H, W) to (N, C, H / pool, W / pool), means of squares, rounded."""
    n, channels, height, width = images.shape
    if type(pool) is not int or pool < 1 or height % pool or width % pool:
        raise InputError(f"pool = {pool!r}: must divide the {height} x {width} pixels of an image")
    if pool == 1:
        return images
    squares = images.reshape(n, channels, height // pool, pool, width // pool, pool)
    return np.rint(squares.mean((3, 5))).astype(np.uint8)
