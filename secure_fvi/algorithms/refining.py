"""From q to the posterior: draws of a wider distribution near q, weighed by the likelihood of all records.

Where `weighing` shows that q is off, the weights that show it can put it right. So the sum is asked again, at draws of
a proposal that matches the last weighted moments, up to `SUMS` times:

    proposal     a mixture of up to `PARTS` normals: one of the weighted mean and covariance; where the final sum found
                 other modes one more at each; after a sum that was not enough, such as fit best the draws as the
                 posterior and its squares weigh them (`aimed`, at the server; Cappe et al. 2008). Of three widths each
                 (`WIDTHS`), so that tails of the posterior are heavier than its own nowhere near; of more than
                 `JOINTLY` dimensions the widest is so along one of them at a time, all alike: with the others' it
                 would be hardly wider
    draws        Sobol's sequence, shifted by a public hash of the broadcast. A silo answers a proposal alone whose
                 normals are near q, near a mirror image of it or near a point of the final sum (`allowed`): a server
                 chooses where q and the proposal lie, and with that, roughly, where draws are
    a silo adds  log p(y_j | z), its own latents integrated out, relative to that at q's mean; that there, once; and,
                 where it has latents, a quarter of the draws again on other nodes
    weights      p(y, z) / mixture of all proposals so far (Owen and Zhou 2000), Pareto-smoothed (Vehtari et al. 2024)
    more sums    up to `MORE`, where the weights are sound and only too few for the largest error of many means

The weighted draws are the answer where k-hat, the effective sample size, standard errors and the error of integration
say that they are (`refining_server.Found.against`). All of that is necessary, none sufficient: where no draw lies, no
weight tells of it. So the points of the final sum are looked at again: no mode that they found may be without draws as
likely, none of the posterior's mass may be with scouts alone, and draws may lie no farther from a mode than others were
looked for. Where the prior is a funnel (scales of groups that silos share) its neck may be in no draw: there draws are
tried on a posterior of which the server knows all, the prior, exactly, and a normal fitted to the likelihoods told so
far. Where they miss a part of that they are no answer, and proposals follow it (`refining_server.StandIn`). A q that
was close to begin with is asked for one such sum too, and stays the answer where the wider draws agree.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation.base import Block, FloatArray
from secure_fvi.algorithms import hiding
from secure_fvi.algorithms.base import ITERATION, Broadcast, Phase, Problem, SiloView
from secure_fvi.algorithms.kit import Sum
from secure_fvi.algorithms.natural import Natural
from secure_fvi.algorithms.weighing import (
    UP_TO_NATS,
    Part,
    Weigher,
    mirrored_near,
    points,
    q_part,
    sds_from,
)
from secure_fvi.disclosure import Sums
from secure_fvi.errors import ProtocolError
from secure_fvi.families import Params
from secure_fvi.families.gaussian import from_lower, lower
from secure_fvi.randomness import LARGEST, server_draws

#: The phase after the final sum, and what a silo adds in it.
REFINE, REFINED = "refine", "refined"
#: The tensor of its broadcast that says where draws are from: see `packed`.
PROPOSAL = "proposal"
#: Sums at most; where draws are all that is missing; draws of each, and each how many-eth is evaluated again.
SUMS, MORE, DRAWS, AGAIN = 3, 6, 1024, 4
#: Normals of a proposal at most.
PARTS = 6
_DISCLOSED = (
    f"the log-likelihood at q's mean, and, relative to that, at {DRAWS} draws of wider distributions near q, or near "
    "points of the final sum, which all parties derive from the broadcast; of numbers out of range, that they are"
)
#: Shares of the draws, and by how much these are wider than the proposal, in one dimension.
WIDTHS = ((0.5, 0.0), (0.3, 1.2), (0.2, 3.0))
#: Dimensions up to which the last of these is all dimensions'.
JOINTLY = 9
#: Nodes of latents are the same in all sums, so that their error is nearly one constant; the numbers of their draws.
_NODES = LARGEST - 2
#: How far from q's mean the refined one may lie, in sds of q, and how many times as wide or narrow: beyond, nobody has
#: looked for other modes.
MOVED, WIDENED = 4.0, 5.0
#: How far from q's mean a proposal may lie, in sds of q, and how many times as wide or narrow as q in any direction. A
#: silo answers no other; and where that q may lie, `Silo` and `PVI` say.
FROM_Q, LIKE_Q = 2 * MOVED, 10.0


def declared(silos: int) -> Sums:
    """The sums, as an algorithm declares them."""
    return Sums(REFINE, MORE, f"{_DISCLOSED}; its number of records", silos, besides=True, likelihood=True)


def near(part: Part, at: Part) -> bool:
    """Whether a normal is where and as wide as refining a posterior near `at` needs it."""
    if not bool(part.mean.isfinite().all() & part.factor.isfinite().all()) or bool((part.factor.diagonal() <= 0).any()):
        return False
    like = torch.linalg.svdvals(torch.linalg.solve_triangular(at.factor, part.factor, upper=False))
    return (
        float(sds_from([at], part.mean[None])) <= FROM_Q
        and bool(like.max() <= LIKE_Q)
        and bool(like.min() >= 1 / LIKE_Q)
    )


def allowed(problem: Problem, q: Natural, proposal: Tensor) -> bool:
    """Whether a silo answers a proposal (`mixture`): each of its normals is near q, near a mirror image of what one
    before it is near, or near a point of the final sum, where the likelihood was asked for already."""
    shares = proposal[:, 0]
    if not bool(proposal.isfinite().all() & (shares >= 0).all()) or not 0 < float(shares.sum()) <= 2:
        return False
    own = q_part(q)
    images, at = [own], points(problem, q)
    for _, part in unmixed(proposal, q.n):
        if any(near(part, image) for image in images):
            continue
        mirrored = (i for j in images for i in mirrored_near(at.mirrors, j, part.mean, FROM_Q))
        image = next((i for i in mirrored if near(part, i)), None)
        if image is None:
            told = torch.cat([*at.lines, at.scouts])
            nearest = sds_from([part._replace(factor=own.factor)], told).argmin()
            image = own._replace(mean=told[nearest])
            if not near(part, image):
                return False
        images.append(image)
    return True


class Refiner:
    """What all parties know of these sums, and a silo's half, for one problem; it holds no data."""

    def __init__(self, problem: Problem, weigher: Weigher) -> None:
        self.problem, self.weigher, self.n = problem, weigher, problem.layout.size("global")
        # A node of a record's latents for each of the silo's: minutes a sum of thousands of records, of several latents
        # of either hours.
        self.nested = weigher.n_record > 0 and weigher.n_silo > 0
        self.fits = not self.nested or weigher.n_record == weigher.n_silo == 1
        self.again = DRAWS // AGAIN if weigher.n_record or weigher.n_silo else 0
        self.block: Block = hiding.block(REFINED, (1 + DRAWS + self.again,), UP_TO_NATS / len(problem.silos))

    def sum(self, rounds: range, sent: Mapping[str, Tensor | tuple[int, ...]], *others: Block) -> Sum:
        """Of the phase that follows the final sum, whose broadcast is `sent`."""
        when = Phase(rounds, range(MORE), ends=True)
        shape = PARTS, 1 + self.n + self.n * (self.n + 1) // 2
        return Sum((self.block, *others), when, {**sent, PROPOSAL: shape}, scalars=(ITERATION,))

    # ---- silo ----

    def nats(
        self, message: Broadcast, q: Natural, theta: Params, record: Params, silo: Params, view: SiloView
    ) -> FloatArray:
        """A silo's log p(y_j | z) at q's mean and all draws, and at some again, for `told`. record, silo: parameters
        around q's mean."""
        if not allowed(self.problem, q, message.tensors[PROPOSAL].to("cpu", torch.float64)):
            raise ProtocolError(
                f"silo '{view.silo}': the draws that the server names are not near q, nor near where it was asked "
                f"before: they are more than {FROM_Q:.0f} sds off, or more than {LIKE_Q:.0f} times as wide or narrow"
            )
        z = self.draws(message)

        def over(z: Tensor, which: int) -> Tensor:
            return self.weigher.at(q, z, which, _NODES + which, theta, record, silo, view)

        found = over(torch.cat([q.mean()[None], z]), 0)
        return torch.cat([found, over(z[::AGAIN], 1)] if self.again else [found]).numpy()

    def told(self, nats: FloatArray, view: SiloView) -> FloatArray:
        """As they leave: relative to those at q's mean, which come first; if one is out of range, or was in an
        earlier answer, all are hidden."""
        with np.errstate(invalid="ignore"):
            relative = np.append(nats[:1], nats[1:] - nats[0])
        return hiding.all_or_none(relative, self.block, view, hiding.uniforms(view, 2 * len(nats)))

    # ---- all ----

    def draws(self, message: Broadcast) -> Tensor:
        """(DRAWS, n) of the proposal that `message` names, the same at all parties."""
        parts = unmixed(message.tensors[PROPOSAL].to("cpu", torch.float64), self.n)
        return drawn(parts, DRAWS, _seed(self.problem.seed, message))


Mixture = list[tuple[float, Part]]


def mixture(parts: Mixture) -> Tensor:
    """(PARTS, 1 + n + n (n + 1) / 2,): a proposal, a row a normal: its share, mean, and the lower half of the factor of
    its covariance. Where there are fewer the last ones are the first, with no share."""
    filled = [*parts, *[(0.0, parts[0][1])] * (PARTS - len(parts))]
    return torch.stack([torch.cat([p.mean.new_tensor([share]), p.mean, lower(p.factor)]) for share, p in filled])


def unmixed(proposal: Tensor, n: int) -> Mixture:
    """Its normals, those without a share left out, and shares that add up to 1."""
    found = [(float(row[0]), Part(row[1 : 1 + n], from_lower(row[1 + n :], n))) for row in proposal]
    total = sum(share for share, _ in found)
    return [(share / total, part) for share, part in found if share > 0]


def drawn(parts: Mixture, count: int, seed: int) -> Tensor:
    """(count, n) of a mixture, each of its normals in all `WIDTHS`."""
    n = len(parts[0][1].mean)
    numbers = n + 1 + (n > JOINTLY)
    shift = torch.from_numpy(server_draws(seed).uniforms(0, numbers)[0])
    even = torch.quasirandom.SobolEngine(numbers).draw(count, dtype=torch.float64)
    u = ((even + shift) % 1.0).clamp(2.0**-53, 1 - 2.0**-53)
    chances = torch.tensor([of_part * share for of_part, _ in parts for share, _ in WIDTHS], dtype=torch.float64)
    kind = torch.bucketize(u[:, n].contiguous(), chances.cumsum(0)[:-1])
    width = torch.tensor(wider(n), dtype=torch.float64)[kind % len(WIDTHS)]
    mean, factor = (torch.stack(t)[kind // len(WIDTHS)] for t in zip(*(part for _, part in parts), strict=True))
    eps = torch.special.ndtri(u[:, :n])
    if n <= JOINTLY:
        return mean + (factor @ (width[:, None] * eps)[..., None])[..., 0]
    last = kind % len(WIDTHS) == len(WIDTHS) - 1
    way = factor[torch.arange(count), (u[:, -1] * n).long()]  # of one dimension: what it goes by
    way = way / way.norm(dim=1, keepdim=True)
    along = (width - 1)[:, None] * torch.where(last[:, None], (eps * way).sum(1, keepdim=True) * way, eps)
    return mean + (factor @ (eps + along)[..., None])[..., 0]


def wider(n: int) -> list[float]:
    return [1 + by / math.sqrt(1 if n > JOINTLY and by == WIDTHS[-1][1] else n) for _, by in WIDTHS]


def _seed(seed: int, message: Broadcast) -> int:
    """A hash of the job's seed and of all that the broadcast says of q and the proposal."""
    digest = hashlib.sha256(b"secure-fvi/refine/1" + seed.to_bytes(16, "big", signed=True))
    for name in sorted(message.tensors):
        digest.update(name.encode() + message.tensors[name].detach().to("cpu", torch.float64).numpy().tobytes())
    digest.update(int(message.scalars[ITERATION]).to_bytes(4, "big"))
    return int.from_bytes(digest.digest()[:15], "big")
