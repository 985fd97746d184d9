"""Plain Euler sampling with classifier-free guidance, to meet a model on the inputs it really sees."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .trainable import Conditioning, TrainableModel


def shifted(u: Tensor, shift: float) -> Tensor:
    """SD3's time shift of u in [0, 1]: shift u / (1 + (shift - 1) u)."""
    return shift * u / (1 + (shift - 1) * u)


def flow_sigmas(steps: int, shift: float) -> Tensor:
    """(steps + 1,) noise levels from 1 to 0, even in u before the shift."""
    return shifted(torch.linspace(1, 0, steps + 1), shift)


def euler(
    model: TrainableModel,
    noise: Tensor,
    positives: list[Conditioning],
    negatives: list[Conditioning],
    *,
    steps: int,
    cfg: float,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields (step, x, v) after each model call, before x moves; at last (steps, x at sigma 0, last v).

    noise (B, channels, h, w). Each call is one batch of the B positives and then, unless cfg is 1, the B negatives.
    Gradients are off inside each call; what the caller does between two steps is its own affair.
    """
    x, sigmas = noise.to(model.device, torch.float32), flow_sigmas(steps, model.flow_shift)
    guided = cfg != 1.0
    conditionings = [*positives, *negatives] if guided else list(positives)
    velocity = torch.zeros_like(x)
    for step in range(steps):
        with torch.no_grad():
            batch = torch.cat([x, x]) if guided else x
            velocity = model.velocity(batch, sigmas[step].expand(len(batch)), conditionings).to(x.device)
        if guided:
            positive, negative = velocity.chunk(2)
            velocity = negative + cfg * (positive - negative)
        yield step, x, velocity
        x = x + (sigmas[step + 1] - sigmas[step]).item() * velocity
    yield steps, x, velocity
