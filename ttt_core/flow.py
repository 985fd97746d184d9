"""The rectified-flow loss: noise levels, noisy latents, what the model should answer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .errors import TTTError
from .trajectory import shifted

TIMESTEPS = ("logit_normal", "mode", "uniform")
_MODE_SCALE = 1.29  # SD3 paper, section 3.1: the best of its mode samplings


def draw_sigmas(count: int, kind: str, shift: float, generator: torch.Generator) -> Tensor:
    """(count,) noise levels in (0, 1), under the model's time shift.

    ``logit_normal``: sigmoid of a standard normal, SD3's choice (arXiv 2403.03206, section 3.1), middle levels most.
    ``mode``: the same paper's mode sampling, scale 1.29, with more weight at both ends. ``uniform``: even in u.
    """
    if kind == "logit_normal":
        u = torch.sigmoid(torch.randn(count, generator=generator))
    elif kind == "mode":
        u = torch.rand(count, generator=generator)
        u = 1 - u - _MODE_SCALE * (torch.cos(math.pi / 2 * u).square() - 1 + u)
    elif kind == "uniform":
        u = torch.rand(count, generator=generator)
    else:
        raise TTTError(f"Timestep sampling '{kind}' is not known; choose one of {', '.join(TIMESTEPS)}.")
    return shifted(u.clamp(1e-5, 1 - 1e-5), shift)


def noisy(latents: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """(1 - sigma) latents + sigma noise; latents and noise (B, C, h, w), sigma (B,)."""
    s = sigma.to(latents)[:, None, None, None]
    return (1 - s) * latents + s * noise


def flow_loss(velocity: Tensor, latents: Tensor, noise: Tensor) -> Tensor:
    """Mean squared error of the velocity against noise - latents, unweighted: the density of the levels is the weighting."""
    return (velocity - (noise - latents)).square().mean()
