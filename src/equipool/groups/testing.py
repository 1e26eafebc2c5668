"""Measure and assert equivariance of any map, ours or yours."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from equipool.groups.action import CovariateAction
from equipool.groups.tau import FrameTau

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}


def random_latents(
    n_samples: int, n: int, *, tau: FrameTau | None = None, span: float = 1.0, seed: int = 0
) -> Tensor:
    """Draw points of the sphere in float64, uniformly or, with ``tau``, as a trained encoder places them.

    With ``tau``, the phases of the designated planes encode covariates in [−span, span], and these planes
    have the length that :meth:`FrameTau.to_sphere` reserves.
    """
    generator = torch.Generator().manual_seed(seed)
    x = nn.functional.normalize(torch.randn(n_samples, n, generator=generator, dtype=torch.float64), dim=-1)
    if tau is None:
        return x
    x = tau.to_sphere(x)
    c = torch.rand(n_samples, tau.action.n_covariates, generator=generator, dtype=torch.float64)
    # Undo the random phases of the designated planes, then turn everything to the covariates drawn.
    return tau.action(span * (2 * c - 1) - FrameTau(tau.action, tau.planes).covariate(x)).apply(x)


def equivariance_error(
    f: Callable[[Tensor], Tensor],
    action: CovariateAction,
    *,
    out: CovariateAction | None = None,
    inputs: Tensor | None = None,
    elements: Tensor | None = None,
    span: float = 1.0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> float:
    """Return the largest ‖f(ρ(t)x) − ρ(t)f(x)‖ / ‖f(x)‖ over a sample: 0 means equivariant.

    f maps (N, n) to (N, m); ρ is ``action`` on its inputs and ``out`` on its outputs (default: ``action``).
    The ``inputs`` x, (N, n), are by default uniform on the sphere; where τ is exact only as long as no phase
    wraps around, pass :func:`random_latents` with that τ. The ``elements`` t, (N, K), are by default uniform
    in [−span, span]. f is evaluated in ``dtype``; rotations are float64, so that the measurement adds no
    error.
    """
    out, device = out or action, action.frequencies.device
    x = random_latents(256, action.n, seed=seed) if inputs is None else inputs
    x = x.to(device=device, dtype=dtype)
    if elements is None:
        generator = torch.Generator().manual_seed(seed + 1)
        uniform = torch.rand(len(x), action.n_covariates, generator=generator, dtype=torch.float64)
        elements = span * (2 * uniform - 1)
    t = action.covariates(elements.to(device))
    with torch.no_grad():
        expected = out(t).apply(f(x).double())
        # The moved input is rounded once to the dtype under test, as any input of that dtype is.
        measured = f(action(t).apply(x.double()).to(dtype)).double()
    scale = torch.linalg.vector_norm(expected, dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
    error = (torch.linalg.vector_norm(measured - expected, dim=-1) / scale).max().item()
    return math.inf if math.isnan(error) else error


def assert_equivariant(
    f: Callable[[Tensor], Tensor],
    action: CovariateAction,
    *,
    dtype: torch.dtype = torch.float64,
    atol: float | None = None,
    **sample: Any,
) -> None:
    """Raise an ``AssertionError`` unless f is equivariant to rounding.

    The tolerance defaults to 1e-12 in float64 and 1e-5 in float32; the other arguments are those of
    :func:`equivariance_error`.
    """
    atol = TOLERANCES.get(dtype, 1e-2) if atol is None else atol
    error = equivariance_error(f, action, dtype=dtype, **sample)
    if not error <= atol:
        raise AssertionError(
            f"Not equivariant: the relative error is {error:.2e}, allowed is {atol:.0e} in {dtype}. "
            "If f uses a FrameTau that is not exact everywhere, pass inputs=random_latents(..., tau=tau)."
        )
