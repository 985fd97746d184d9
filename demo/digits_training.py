"""The digit demo as training material: its model, its prompts and its pictures, for calibrating and fine-tuning."""

from __future__ import annotations

from pathlib import Path

import torch

from ..ttt_core.examples import Example
from ..ttt_core.hosts.diffusers import load_transformer
from ..ttt_core.hosts.diffusers_training import DiffusersTrainable
from . import digits

SIZES = ((16, 16), (32, 32), (24, 24), (24, 32), (32, 24))  # latent (h, w); 32 x 32 is a picture of 128 x 128


def load_model(path: Path = digits.MODEL) -> DiffusersTrainable:
    """The tiny softmax model in fp32 on the CPU. Raises TTTError for an unreadable file."""
    return DiffusersTrainable(load_transformer(path, dtype=torch.float32), flow_shift=digits.FLOW_SHIFT)


def conditioning(digit: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """One digit's conditioning for DiffusersTrainable; None is no prompt."""
    context, pooled = digits.encode_digits([digit])
    return context[0], pooled[0]


def prompts() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The ten digits, in an order that puts unlike ones side by side."""
    return [conditioning(d) for d in (0, 5, 1, 6, 2, 7, 3, 8, 4, 9)]


def examples(height: int = 64, width: int = 64, *, hold_out: bool = False, limit: int | None = None) -> list[Example]:
    """scikit-learn's digits drawn at this many pixels, as clean model latents with their prompt. Raises TTTError."""
    cells, labels = digits.load_digits(hold_out)
    latents = digits.grey_to_model(digits.draw(cells[:limit], height, width))
    by_digit = [conditioning(d) for d in range(10)]
    return [Example(latent, by_digit[label]) for latent, label in zip(latents, labels[:limit].tolist(), strict=True)]
