"""How covariates act on the latent sphere: ρ(c) = exp(Σ_k c_k A_k), all covariates in one torus of SO(n).

The generators A_k are skew and commute, so in one orthonormal basis all of them are rotations of ⌊n/2⌋
planes: plane p turns by the angle (Ω c)_p. Applying ρ(c) to N vectors costs O(N n) in plane coordinates and
O(N n²) in the ambient ones; no matrix exponential is taken.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equipool.exceptions import InputError
from equipool.groups.rotations import PlaneRotation, all_ones_basis, all_ones_frequencies


class CovariateAction(nn.Module):
    """The action ρ of K covariates on R^n: call it with covariates to get rotations.

    ``frequencies`` are Ω, (⌊n/2⌋, K), or (⌊n/2⌋,) for one covariate: the angle of each plane for a unit of
    each covariate, which :class:`equipool.data.Covariate` scales to a training range of [−1, 1]. n is the
    dimension of the space; default 2⌊n/2⌋. With one more, the last coordinate is fixed. Columns 2p and 2p + 1
    of the orthonormal ``basis`` (n, n) span plane p; ``None``: vectors are in plane coordinates. Both are
    float64; use ``.float()`` on devices without.

    Examples
    --------
    >>> rho = CovariateAction.spread(4)
    >>> age, x = torch.tensor([-1.0, 1.0]), torch.eye(4)[:2]
    >>> turned = rho(age) @ x
    >>> torch.allclose(rho(age).inverse @ turned, x)
    True
    >>> torch.allclose(rho.transport(turned, age, torch.zeros(2)), x)
    True
    """

    frequencies: Tensor
    basis: Tensor | None

    def __init__(self, frequencies: Any, *, n: int | None = None, basis: Tensor | None = None) -> None:
        super().__init__()
        omega = torch.as_tensor(frequencies, dtype=torch.float64)
        omega = omega.unsqueeze(-1) if omega.dim() == 1 else omega
        self.n = n = 2 * len(omega) if n is None else n
        if omega.dim() != 2 or omega.shape[1] == 0 or len(omega) != n // 2:
            raise InputError(
                f"frequencies must have shape (n // 2, covariates) = ({n // 2}, K). Got {tuple(omega.shape)}."
            )
        if not torch.isfinite(omega).all():
            raise InputError("frequencies must be finite numbers. Got NaN or infinity; remove them.")
        if basis is not None and basis.shape != (n, n):
            raise InputError(f"basis must have shape ({n}, {n}). Got {tuple(basis.shape)}.")
        gap = 0.0 if basis is None else (basis.mT @ basis - torch.eye(n).to(basis)).abs().max().item()
        if basis is not None and gap > 1e3 * torch.finfo(basis.dtype).eps:
            advice = "take the Q of torch.linalg.qr(basis)"
            raise InputError(f"basis must be orthonormal. Got columns off by {gap:.1e}; {advice}.")
        self.register_buffer("frequencies", omega)
        self.register_buffer("basis", None if basis is None else basis.double())

    @classmethod
    def all_ones(
        cls, n: int, n_covariates: int = 1, *, coordinates: Literal["planes", "ambient"] = "planes"
    ) -> CovariateAction:
        """Build the paper's action: the all-ones generator of so(n).

        One generator cannot distinguish two covariates, so the space is cut into K blocks, each with the
        all-ones generator of its size. In ``coordinates="ambient"`` the matrices are exactly exp(c·1_m);
        ``"planes"`` is the same action in the basis that makes it cheap.
        """
        sizes = [2 * planes for planes in _planes_per_covariate(n, n_covariates)]
        sizes[-1] += n % 2  # the fixed axis of odd n comes last, where plane coordinates have it
        omega = torch.block_diag(*[all_ones_frequencies(size)[:, None] for size in sizes])
        basis = torch.block_diag(*map(all_ones_basis, sizes)) if coordinates == "ambient" else None
        return cls(omega, n=n, basis=basis)

    @classmethod
    def spread(
        cls,
        n: int,
        n_covariates: int = 1,
        *,
        base: float = math.pi / 2,
        harmonics: int = 4,
        turning: int | None = None,
    ) -> CovariateAction:
        """Build an action with frequencies spread over 1 … ``harmonics`` whole multiples of ``base``.

        Whole multiples make τ equivariant for every rotation (see :attr:`FrameTau.exact_everywhere`). By
        default the training range [−1, 1] is half a turn of the slowest plane, which leaves half a turn for
        covariates outside it. Of each covariate's planes ``turning`` turn (default: all).
        """
        columns = []
        for planes in _planes_per_covariate(n, n_covariates):
            moving = planes if turning is None else min(turning, planes)
            multiples = torch.linspace(1, min(harmonics, moving), moving).round().double()
            columns.append(base * nn.functional.pad(multiples, (0, planes - moving))[:, None])
        return cls(torch.block_diag(*columns), n=n)

    @property
    def n_covariates(self) -> int:
        """K, the number of covariates."""
        return self.frequencies.shape[1]

    def covariates(self, c: Any) -> Tensor:
        """Return c as a tensor (..., K); one covariate may come as (...,)."""
        c = torch.as_tensor(c, device=self.frequencies.device)
        if self.n_covariates == 1 and (c.dim() < 2 or c.shape[-1] != 1):
            c = c.unsqueeze(-1)
        if c.dim() == 0 or c.shape[-1] != self.n_covariates:
            raise InputError(
                f"This action has {self.n_covariates} covariate(s), so c needs that many columns. "
                f"Got shape {tuple(c.shape)}."
            )
        return c.to(torch.promote_types(c.dtype, self.frequencies.dtype))

    def angles(self, c: Any) -> Tensor:
        """Return the angle of every plane, Ω c: shape (..., ⌊n/2⌋)."""
        c = self.covariates(c)
        return c @ self.frequencies.to(c.dtype).mT

    def forward(self, c: Any) -> PlaneRotation:
        """Return ρ(c). Rotations multiply vectors and one another by ``@``; ρ(a) @ ρ(b) is ρ(a + b)."""
        return PlaneRotation(self.angles(c), n=self.n, basis=self.basis)

    def transport(self, x: Tensor, source: Any, target: Any) -> Tensor:
        """Γ_{c→c'}: move latents x (..., n) from covariates ``source`` to ``target``, ρ(c' − c) x."""
        return self(self.covariates(target) - self.covariates(source)).apply(x)

    def generators(self) -> Tensor:
        """Return the commuting skew matrices A_k, shape (K, n, n): for inspection and tests."""
        planes = self.frequencies.new_zeros(self.n_covariates, self.n, self.n)
        even = torch.arange(0, 2 * len(self.frequencies), 2)
        planes[:, even + 1, even] = self.frequencies.mT
        planes = planes - planes.mT
        return planes if self.basis is None else self.basis @ planes @ self.basis.mT


def _planes_per_covariate(n: int, n_covariates: int) -> list[int]:
    """Share ⌊n/2⌋ planes among the covariates as evenly as possible, the larger shares last."""
    planes = n // 2
    if n_covariates < 1 or planes < n_covariates:
        raise InputError(
            f"Each covariate needs a plane of its own: {n_covariates} covariate(s) need "
            f"n >= {2 * max(n_covariates, 1)}. Got n={n}."
        )
    return [(planes + k) // n_covariates for k in range(n_covariates)]
