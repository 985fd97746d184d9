"""Exponential moving average of the trained tensors: what is sampled from and saved."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class EMA:
    """average <- decay average + (1 - decay) value, with a smaller decay at first, so that short runs count too."""

    def __init__(self, values: Mapping[str, Tensor], decay: float):
        self.decay = decay
        self.average = {name: value.detach().clone() for name, value in values.items()}

    @torch.no_grad()
    def update(self, values: Mapping[str, Tensor], step: int) -> None:
        """step: optimizer steps done, from 1."""
        decay = min(self.decay, step / (step + 9))
        average = list(self.average.values())
        torch._foreach_lerp_(average, [values[name].detach() for name in self.average], 1 - decay)
