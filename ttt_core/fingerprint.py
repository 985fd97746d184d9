"""A small sketch of a base model's weights, to tell which base a TTT file was made from.

A hash would change with every fp16 or bf16 copy of the same model. The sketch is a few hundred sampled weights, so
two copies of one model differ by rounding only, a fine-tune by more, and another model by about 1.4.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from .geometry import attention_blocks

SAME_BASE = 0.01  # relative distance: bf16 rounding gives 0.002, an fp8 copy 0.025, another model 1.4
_BLOCKS, _SAMPLES = 8, 64


def sketch(tensors: Mapping[str, Tensor]) -> str:
    """Base64 of at most 512 fp16 weights, sampled from the joint qkv projections of 8 blocks spread over the depth.

    "" for a base in a packed integer format (GGUF), whose stored numbers are not the weights.
    """
    joint, _ = attention_blocks(tensors)
    names = {n.split("joint_blocks.")[1]: n for n in tensors if ".x_block.attn.qkv.weight" in n}
    picked = sorted({joint[round(i * (len(joint) - 1) / max(1, _BLOCKS - 1))] for i in range(_BLOCKS)})
    values = []
    for block in picked:
        flat = tensors[names[f"{block}.x_block.attn.qkv.weight"]].detach().reshape(-1)
        if not flat.is_floating_point():
            return ""
        step = torch.linspace(0, flat.numel() - 1, _SAMPLES, dtype=torch.float64).long()
        values.append(flat[step.to(flat.device)].float().cpu())
    return base64.b64encode(torch.cat(values).numpy().astype("<f2").tobytes()).decode()


def distance(a: str, b: str) -> float:
    """Relative distance of two sketches: 0 for the same weights, about 1.4 for unrelated ones, inf if not comparable."""
    x, y = (np.frombuffer(base64.b64decode(s), "<f2").astype(np.float64) for s in (a, b))
    if x.shape != y.shape:
        return math.inf
    return float(np.linalg.norm(x - y) / max(np.sqrt(np.linalg.norm(x) * np.linalg.norm(y)), 1e-12))


def short_id(text: str) -> str:
    """Eight hex digits of a sketch, for people to compare by eye."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]
