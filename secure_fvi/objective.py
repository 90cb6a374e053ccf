"""Gradients of the federated bound, at a silo and at the server.

For every record the bound is log (1/K) sum_k w_k with w_k = p(y_i, Z_ik | Z_G) / q(Z_ik | Z_G); K = 1 is the
ELBO. Gradients are sticking the landing for K = 1 (Roeder et al. 2017; Hassan et al. 2023, eqs. S4 to S8) and
doubly reparametrised for K > 1 (Tucker et al. 2019): with normalised weights v_k,

- direct derivatives of log p(y, Z_k | Z_G) in Z_G, Z_S and theta are weighted by v_k;
- derivatives along the paths through Z_k by v_k^2, log q's own parameters held fixed;
- -(1/K) sum_k d/dZ_G log q(Z_k | Z_G), whose mean is zero, is kept as a control variate: with it K = 1 is
  exactly sticking the landing.

What a silo contributes about Z_G are two vectors of length n_global, not a gradient in eta_G of length
n (n + 3) / 2: the server knows eps_G and pulls them back through f_G itself (docs/decisions/0001).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from secure_fvi.density import LogDensity
from secure_fvi.families import GlobalFamily, LocalFamily, Params
from secure_fvi.families import conditional as gaussian_rows
from secure_fvi.families.gaussian import from_lower, lower


def vjp(fn: Callable[..., Any], *args: Any) -> tuple[Any, Callable[..., Any]]:
    """fn(*args), and the function that pulls a cotangent of it back to the arguments."""
    value, pull_back = torch.func.vjp(fn, *args)[:2]
    return value, pull_back


class SiloGradient(NamedTuple):
    """One silo's terms. The first four are summed over silos; `local` and `silo` stay."""

    value: Tensor  # () the silo's part of the bound, nats
    direct: Tensor  # (n_global,) gradient in Z_G with Z_L, Z_S held fixed
    path: Tensor  # (n_global,) gradient in d = Z_G - mu_G, along Z_L and Z_S
    theta: Params
    local: Params  # gradient of the record-level variational parameters
    silo: Params  # gradient of the silo-level variational parameters


SiloFunction = Callable[..., SiloGradient]


def silo_gradient(
    density: LogDensity, local: LocalFamily, silo: LocalFamily, importance_samples: int, of_silo: bool = True
) -> SiloFunction:
    """A pure function for one model and family.

    It takes Z_G (n_global,), d = Z_G - mu_G (n_global,), theta, local and silo parameters, the rows of N
    records, their weights (N,) (0 for padding, 1/q in a minibatch), eps_L (K, N, n_record) and eps_S (1, n_silo).
    of_silo: with the terms that depend on no record, prior and entropy of Z_S.
    """
    samples = importance_samples

    def run(
        z_global: Tensor,
        shift: Tensor,
        theta: Params,
        local_params: Params,
        silo_params: Params,
        rows: Params,
        weights: Tensor,
        eps_local: Tensor,
        eps_silo: Tensor,
    ) -> SiloGradient:
        def draw(params: Params, theta: Params, z_global: Tensor, shift: Tensor, silo_shift: Tensor) -> Tensor:
            moments = local.moments(params, theta, rows, z_global, torch.cat([shift, silo_shift]))
            return gaussian_rows.transform(moments, eps_local)

        def draw_silo(params: Params, shift: Tensor) -> Tensor:
            return gaussian_rows.transform(silo.moments(params, {}, {}, z_global, shift), eps_silo)

        def log_joint(z_global: Tensor, z_silo: Tensor, z_local: Tensor, theta: Params) -> tuple[Tensor, Tensor]:
            def one(z: Tensor) -> tuple[Tensor, Tensor]:
                terms = density.evaluate(z_global, z_silo[0], z, theta, rows)
                return terms.records, terms.silo

            if samples == 1:
                records, silo_term = one(z_local[0])
                return records.unsqueeze(0), silo_term
            records, silo_terms = vmap(one)(z_local)
            return records, silo_terms[0]

        def log_local(z_local: Tensor, z_global: Tensor, shift: Tensor, silo_shift: Tensor) -> Tensor:
            moments = local.moments(local_params, theta, rows, z_global, torch.cat([shift, silo_shift]))
            return gaussian_rows.log_prob(moments, z_local)

        def log_silo(z_silo: Tensor, shift: Tensor) -> Tensor:
            return gaussian_rows.log_prob(silo.moments(silo_params, {}, {}, z_global, shift), z_silo).sum()

        # What a model has no latents for is left out: it would be nothing, in half of all operations.
        z_silo, z_local, silo_shift = shift.new_zeros(1, 0), eps_local, shift.new_zeros(0)
        if silo_params:
            z_silo, draw_silo_vjp = vjp(draw_silo, silo_params, shift)
            silo_shift = z_silo[0] - silo_params["loc"][0]
        if has_records := z_local.shape[-1] > 0:
            z_local, draw_vjp = vjp(draw, local_params, theta, z_global, shift, silo_shift)
        (log_p, log_p_silo), joint_vjp = vjp(log_joint, z_global, z_silo, z_local, theta)
        once = torch.full_like(log_p_silo, float(of_silo))
        log_w = log_p
        if has_records:
            log_q, log_q_vjp = vjp(log_local, z_local, z_global, shift, silo_shift)
            log_w = log_p - log_q
        share, bound = torch.softmax(log_w, 0), torch.logsumexp(log_w, 0) - math.log(samples)
        p_global, p_silo, p_local, p_theta = joint_vjp((share * weights, once))
        value, direct, path = (weights * bound).sum() + once * log_p_silo, p_global, torch.zeros_like(shift)
        of_theta, of_local, of_silo_params = dict(p_theta), dict[str, Tensor](), dict[str, Tensor]()
        if has_records:
            q_local, q_global, q_shift, q_silo_in_local = log_q_vjp(share.square() * weights)
            if samples > 1:
                _, q_global, q_shift, q_silo_in_local = log_q_vjp((weights / samples).expand_as(log_q))
            of_local, path_theta, path_global, path, path_local_silo = draw_vjp(share.unsqueeze(-1) * p_local - q_local)
            direct = direct + path_global - q_global - q_shift
            of_theta = {name: p_theta[name] + path_theta[name] for name in theta}
            # To the records Z_S is what Z_G is: along Z_L it moves with all its parameters but the mean.
            p_silo = p_silo - q_silo_in_local + path_local_silo
        if silo_params:
            log_q_silo, log_q_silo_vjp = vjp(log_silo, z_silo, shift)
            q_silo, q_silo_shift = log_q_silo_vjp(once)
            of_silo_params, path_silo = draw_silo_vjp(p_silo - q_silo)
            if has_records:
                of_silo_params["loc"] = of_silo_params["loc"] - path_local_silo
            value, direct, path = value - once * log_q_silo, direct - q_silo_shift, path + path_silo
        return SiloGradient(value, direct, path, of_theta, of_local, of_silo_params)

    return run


class RecordGradients(NamedTuple):
    """One silo's terms, a record at a time. They never leave the silo as they are."""

    #: (B, shared + hidden): direct, path and theta or `Curved.of`, `Lengths.of`, silo-level parameters, each flattened.
    rows: Tensor
    values: Tensor  # (B,) each record's part of the bound, nats
    local: Params  # (B, ...) gradient of each record's own variational parameters


#: Lengths over the norm to which gradients are cut, between which records are counted.
EDGES = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)


class Lengths(NamedTuple):
    """How a record's gradient, cut to a norm, is told with how long it was: a `unit` in one of the places between
    `EDGES`. What one record moves is the same whatever its length, so that counts by length cost what one count does.
    """

    gradient: float  # norm to which the gradient is cut
    unit: float

    @property
    def edges(self) -> tuple[float, ...]:
        """In the gradients' units."""
        return tuple(self.gradient * at for at in EDGES)

    def of(self, gradient: Tensor, there: Tensor) -> Tensor:
        """(len(EDGES) + 1,); zeros where there () is 0, as of what only fills a block up."""
        wide = gradient.double()
        edges = wide.new_tensor(EDGES)
        below = (wide @ wide <= (self.gradient * edges).square()).to(gradient)
        one = below.new_ones(1)
        return self.unit * there * (torch.cat([below, one]) - torch.cat([0 * one, below]))


class Curved(NamedTuple):
    """How a record's curvature is said beside its gradient, of models that have no latents but Z_G, nor parameters."""

    gradient: float  # norm to which the gradient is cut
    norm: float  # Frobenius norm to which the curvature of that cut gradient is
    unit: float  # by which that is multiplied

    def of(self, gradient: Callable[[Tensor], tuple[Tensor, Any]], at: Tensor) -> tuple[Tensor, Any]:
        """(n + n (n + 1) / 2,): the cut gradient, and minus its derivative, which is symmetric but for what is cut: its
        lower triangle, numbers off the diagonal times sqrt(2), so that the length is Frobenius'."""

        def cut(z: Tensor) -> tuple[Tensor, tuple[Tensor, Any]]:
            found, rest = gradient(z)
            found = shortened(found, self.gradient)
            return found, (found, rest)

        slope, (found, rest) = jacrev(cut, has_aux=True)(at)
        return torch.cat([found, self.unit * shortened(packed(-0.5 * (slope + slope.mT)), self.norm)]), rest

    def read(self, total: Tensor, n: int) -> Tensor:
        """The symmetric matrix (n, n) of a total (n (n + 1) / 2,)."""
        return from_lower(total / (self.unit * _lengths(n, total)), n, True)


def packed(matrix: Tensor) -> Tensor:
    """(n (n + 1) / 2,) of a symmetric matrix (n, n), as long as that."""
    return lower(matrix) * _lengths(len(matrix), matrix)


def shortened(vector: Tensor, norm: float) -> Tensor:
    """`vector`, or as long as `norm` where it is longer."""
    wide = vector.double()  # whose squares have room
    size = wide @ wide
    long = size > norm**2
    return (wide * torch.where(long, norm * torch.where(long, size, 1.0).rsqrt(), 1.0)).to(vector)


def _lengths(n: int, like: Tensor) -> Tensor:
    return torch.where(lower(torch.eye(n)) == 1, 1.0, math.sqrt(2)).to(like)


def record_gradients(
    density: LogDensity,
    local: LocalFamily,
    silo: LocalFamily,
    samples: int,
    with_path: bool,
    mapped: bool = True,
    curved: Curved | None = None,
    lengths: Lengths | None = None,
) -> Callable[..., RecordGradients]:
    """`silo_gradient` for each record alone: what it adds to the silo's sum, silo-level terms aside.

    mapped: by `vmap`, where a row depends on no other record as far as PyTorch's rule for each operation keeps them
    apart (`exported.untested_operations`). Otherwise in a loop, where it cannot whatever the program does. curved: with
    the curvature in each row, after the gradient. lengths: with how long it was.
    """

    gradient = silo_gradient(density, local, silo, samples, of_silo=False)

    def run(
        z_global: Tensor, shift: Tensor, theta: Params, local_params: Params, silo_params: Params, rows: Params,
        weights: Tensor, eps_local: Tensor, eps_silo: Tensor,
    ) -> RecordGradients:  # fmt: skip
        def one(params: Params, row: Params, weight: Tensor, eps: Tensor) -> tuple[Tensor, Tensor, Params]:
            def found(z: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Params]]:
                g = gradient(
                    z, shift, theta, _as_batch(params), silo_params, _as_batch(row), weight.unsqueeze(0),
                    eps.unsqueeze(1), eps_silo,
                )  # fmt: skip
                flat = flat_gradient(g, with_path)
                told = flat[:0] if lengths is None else lengths.of(flat, (weight != 0).to(flat))
                return flat, (told, g.value, {name: v.squeeze(0) for name, v in g.local.items()})

            flat, (told, *rest) = found(z_global) if curved is None else curved.of(found, z_global)
            if lengths is None:
                return flat, *rest
            flat = shortened(flat, lengths.gradient) if curved is None else flat
            shared = len(flat) - sum(v.numel() for v in silo_params.values())
            return torch.cat([flat[:shared], told, flat[shared:]]), *rest

        if mapped:
            return RecordGradients(*vmap(one, in_dims=(0, 0, 0, 1))(local_params, rows, weights, eps_local))
        found = [
            one(_row(local_params, i), _row(rows, i), weights[i].clone(), eps_local[:, i].clone())
            for i in range(len(weights))
        ]
        gradients, values, local = zip(*found, strict=True)
        stacked = {name: torch.stack([part[name] for part in local]) for name in local_params}
        return RecordGradients(torch.stack(gradients), torch.stack(values), stacked)

    return run


def flat_gradient(g: SiloGradient, with_path: bool) -> Tensor:
    """direct, path where wanted, theta and silo-level gradients in one vector, names in sorted order."""
    parts = [g.direct, *([g.path] if with_path else [])]
    parts += [g.theta[name].reshape(-1) for name in sorted(g.theta)]
    return torch.cat(parts + [g.silo[name].reshape(-1) for name in sorted(g.silo)])


def _as_batch(params: Params) -> Params:
    return {name: value.unsqueeze(0) for name, value in params.items()}


def _row(params: Params, i: int) -> Params:
    """In memory of its own, around which there are no other rows to read (`as_strided`), nor a place to tell."""
    return {name: value[i].clone() for name, value in params.items()}


class ServerGradient(NamedTuple):
    """Gradients of the whole bound. Everyone may see them: they follow from broadcasts and the total."""

    value: Tensor  # () L0 = log p(Z_G) - log q(Z_G), nats
    eta: Params
    theta: Params


def server_gradient(density: LogDensity, family: GlobalFamily) -> Callable[..., ServerGradient]:
    """A pure function that adds L0 and pulls the silos' totals back to eta_G.

    It takes eta_G, theta, eps_G and the sums over silos of `direct`, `path` and `theta`. Z_G moves with every
    parameter of f_G, d = Z_G - mu_G with all but the mean, hence the correction of `loc`.
    """

    def run(
        eta: Params, theta: Params, eps: Tensor, direct: Tensor, path: Tensor, theta_total: Params
    ) -> ServerGradient:
        z_global, transform_vjp = vjp(lambda eta: family.transform(eta, eps), eta)
        log_p, prior_vjp = vjp(density.log_prior, z_global, theta)
        log_q, log_q_vjp = vjp(lambda z: family.log_prob(eta, z), z_global)
        one = torch.ones_like(log_q)
        prior_global, prior_theta = prior_vjp(one)
        (q_global,) = log_q_vjp(one)
        (eta_grad,) = transform_vjp(direct + path + prior_global - q_global)
        eta_grad["loc"] = eta_grad["loc"] - path
        theta_grad: dict[str, Any] = {name: theta_total[name] + prior_theta[name] for name in theta}
        return ServerGradient(log_p - log_q, eta_grad, theta_grad)

    return run
