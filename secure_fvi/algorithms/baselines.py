"""What partitioned VI is compared with (Ashman et al. 2022, sections 4.3 and 5), in the same frame: no site is kept.

    q(Z_G) <- q(Z_G) x product over the silos asked of q_j(Z_G) / c_j(Z_G)

where silo j fits q_j to c_j x its own likelihood, by the local fit of PVI, and contributes the change from c_j to q_j:

    BCM, same       all silos at once     c_j = prior                the committee machine of Tresp (2000)
    BCM, split      all silos at once     c_j = prior^(N_j / N)
    VCL             one after the other   c_j = q                    Nguyen et al. (2018)
    streaming VB    the same, in passes   c_j = q, with j's own data in it from the second pass on

Without sites nothing lets the silos' approximations come to an agreement, and more passes count the records again: use
PVI. A prior that is not Gaussian in unconstrained space enters as its Gaussian approximation, which is not refitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from secure_fvi.algorithms.local_fit_options import FIRST_FIT, LocalFitOptions
from secure_fvi.disclosure import Declaration, Sums
from secure_fvi.errors import InputError

if TYPE_CHECKING:
    from secure_fvi.algorithms.base import Problem
    from secure_fvi.algorithms.baselines_server import BaselineServer
    from secure_fvi.algorithms.baselines_silo import BaselineSilo


#: The phases: COUNT once, before a split of the prior whose N is not public; ROUND.
COUNT, ROUND = "count", "round"
_WHAT = "the change of q by its own fit, in natural parameters, its number of records, and whether it could fit"
_KEEPS = "its own latents' posterior"


@dataclass(frozen=True, kw_only=True)
class Baseline(LocalFitOptions):
    """The halves that all baselines share; the options are those of the local fit. Use BCM, VCL or StreamingVB."""

    name: ClassVar[str]

    @property
    def most_rounds(self) -> int:
        """Visits to each silo; the server's half knows the rounds, since it knows the silos."""
        return 1

    @property
    def expected_calls(self) -> int:
        return self.traced_calls(self.most_rounds + FIRST_FIT - 1)

    def declare(self, silos: int, private: bool) -> Declaration:
        """Of what visits one silo after the other: a visit is a round, and a sum of one silo."""
        rounds = self.most_rounds * silos
        sums = (Sums(ROUND, rounds, _WHAT, 1, "sequential"),)
        return Declaration(rounds, sums, _KEEPS, False, self.fitted_share, "reveal_changes = true")

    def server(self, problem: Problem) -> BaselineServer:
        """The server's half. Raises InputError for what the model or its privacy do not allow."""
        from secure_fvi.algorithms.baselines_server import BaselineServer

        return BaselineServer(self, problem)

    def silo(self, problem: Problem) -> BaselineSilo:
        """The silos' half; it holds no data, so that all silos of a process share its traces."""
        from secure_fvi.algorithms.baselines_silo import BaselineSilo

        return BaselineSilo(self, problem)


@dataclass(frozen=True, kw_only=True)
class BCM(Baseline):
    """Bayesian committee machine: one secure sum, no damping and no safeguard.

    prior: "same", every silo has the whole prior, which is taken out of the product again; "split", silo j has the
    prior to the power N_j / N. Where the product is improper the run fails.
    total_records: N for "split", where it is public; otherwise it is counted by one more secure sum.
    """

    prior: Literal["same", "split"] = "same"
    total_records: int | None = None

    name = "bcm"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prior not in ("same", "split"):
            raise InputError(f"prior '{self.prior}' is unknown; choose same or split")
        self.check_counts("total_records", optional=True)
        if self.total_records is not None and self.prior == "same":
            raise InputError("total_records is what prior = 'split' divides the prior by; leave it out")

    def declare(self, silos: int, private: bool) -> Declaration:
        sums = [Sums(ROUND, 1, _WHAT, silos)]
        if self.prior == "split" and self.total_records is None and not private:
            sums.insert(0, Sums(COUNT, 1, "its number of records", silos))
        return Declaration(1, tuple(sums), _KEEPS, share=self.fitted_share)


@dataclass(frozen=True, kw_only=True)
class VCL(Baseline):
    """Variational continual learning: one pass over the silos, each with the last one's q for a prior.

    The server sees each silo's change of q, its posterior alone: it needs `reveal_changes = True` and a plain sum,
    since any other would hide it in name only. A visit is a round.
    """

    reveal_changes: bool = False

    name = "vcl"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_revealed(self.name, self.reveal_changes)


@dataclass(frozen=True, kw_only=True)
class StreamingVB(Baseline):
    """Streaming variational Bayes: `passes` of VCL, which count every record so many times.

    What the server sees is as in `VCL`. A visit is a round.
    """

    passes: int = 10
    reveal_changes: bool = False

    name = "streaming-vb"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_counts("passes")
        _check_revealed(self.name, self.reveal_changes)

    @property
    def most_rounds(self) -> int:
        return self.passes


def _check_revealed(name: str, reveal_changes: bool) -> None:
    if not reveal_changes:
        raise InputError(
            f"{name} visits one silo after the other and shows the server each one's change of q, from which it can "
            "compute that silo's own posterior; say reveal_changes = true to accept this, or use pvi or bcm"
        )
