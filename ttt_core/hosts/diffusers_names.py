"""Tensor names of SD3-family transformers: the original files' and diffusers'.

Works by name and position only, for MMDiT (SD3, SD3.5-Large) and MMDiT-X
(SD3.5-Medium: a second image attention ``attn2`` in some blocks), any size.
Three things differ besides spelling:
- the originals hold q, k and v as one tensor ``qkv``, stacked in that order;
- where diffusers uses AdaLayerNormContinuous (the final layer, and the context of
  the last block) it keeps (scale, shift), the originals (shift, scale);
- the originals' last context block holds nothing behind its qkv ("pre-only").
Tensors are renamed, sliced or joined along dimension 0 and never computed with,
so a round trip is exact, on any device and type, meta included.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

PREFIX = "model.diffusion_model."

# Outside the blocks: original module -> diffusers module.
_TOP = {
    "x_embedder.proj": "pos_embed.proj",
    "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
    "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
    "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
    "context_embedder": "context_embedder",
    "final_layer.linear": "proj_out",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
}
# Inside a block; three targets stand for a fused qkv.
_BLOCK = {
    "x_block.adaLN_modulation.1": ("norm1.linear",),
    "x_block.attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "x_block.attn.ln_q": ("attn.norm_q",),
    "x_block.attn.ln_k": ("attn.norm_k",),
    "x_block.attn.proj": ("attn.to_out.0",),
    "x_block.attn2.qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
    "x_block.attn2.ln_q": ("attn2.norm_q",),
    "x_block.attn2.ln_k": ("attn2.norm_k",),
    "x_block.attn2.proj": ("attn2.to_out.0",),
    "x_block.mlp.fc1": ("ff.net.0.proj",),
    "x_block.mlp.fc2": ("ff.net.2",),
    "context_block.adaLN_modulation.1": ("norm1_context.linear",),
    "context_block.attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "context_block.attn.ln_q": ("attn.norm_added_q",),
    "context_block.attn.ln_k": ("attn.norm_added_k",),
    "context_block.attn.proj": ("attn.to_add_out",),
    "context_block.mlp.fc1": ("ff_context.net.0.proj",),
    "context_block.mlp.fc2": ("ff_context.net.2",),
}
_CONTEXT_ADALN = "context_block.adaLN_modulation.1"


def strip_prefix(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors without ``model.diffusion_model.``; tensors outside it (text encoders, VAE) are left out.

    A file without that prefix anywhere is taken to be the bare transformer.
    """
    if any(name.startswith(PREFIX) for name in tensors):
        return {name[len(PREFIX):]: t for name, t in tensors.items() if name.startswith(PREFIX)}
    return dict(tensors)


def to_diffusers(tensors: Mapping[str, torch.Tensor], blocks: int | None = None) -> dict[str, torch.Tensor]:
    """Original names (with or without ``model.diffusion_model.``) -> diffusers names.

    blocks: the model's number of joint blocks, needed only when ``tensors`` is a part
    of a model (without it, a context block with no output projection is the last).
    qkv tensors come out as views of the originals. Raises KeyError naming the
    first tensor that does not belong to an SD3-family transformer.
    """
    source = strip_prefix(tensors)
    result: dict[str, torch.Tensor] = {}
    for name, tensor in source.items():
        if name == "pos_embed":
            result["pos_embed.pos_embed"] = tensor
            continue
        module, _, leaf = name.rpartition(".")
        if module in _TOP:
            swap = module == "final_layer.adaLN_modulation.1"
            result[f"{_TOP[module]}.{leaf}"] = _swap_halves(tensor) if swap else tensor
            continue
        block, part = _split_block(module, "joint_blocks.")
        if part not in _BLOCK:
            raise KeyError(f"{name} is no tensor of an SD3-family transformer")
        targets = _BLOCK[part]
        if part == _CONTEXT_ADALN and _is_last(block, source, blocks):
            tensor = _swap_halves(tensor)
        for target, piece in zip(targets, tensor.chunk(len(targets), dim=0)):
            result[f"transformer_blocks.{block}.{target}.{leaf}"] = piece
    return result


def to_original(tensors: Mapping[str, torch.Tensor], prefix: str = PREFIX) -> dict[str, torch.Tensor]:
    """diffusers names -> original names under ``prefix``; the inverse of `to_diffusers`.

    Raises KeyError naming the first tensor that does not belong, or the missing
    part of a q, k, v triple.
    """
    top = {theirs: ours for ours, theirs in _TOP.items()}
    inside = {target: (part, targets) for part, targets in _BLOCK.items() for target in targets}
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name == "pos_embed.pos_embed":
            result[prefix + "pos_embed"] = tensor
            continue
        module, _, leaf = name.rpartition(".")
        if module in top:
            result[f"{prefix}{top[module]}.{leaf}"] = _swap_halves(tensor) if module == "norm_out.linear" else tensor
            continue
        block, target = _split_block(module, "transformer_blocks.")
        if target not in inside:
            raise KeyError(f"{name} is no tensor of diffusers' SD3Transformer2DModel")
        part, targets = inside[target]
        if target != targets[0]:
            continue  # joined where its q is met
        stem = f"transformer_blocks.{block}."
        if len(targets) > 1:
            tensor = torch.cat([tensors[f"{stem}{each}.{leaf}"] for each in targets], dim=0)
        if part == _CONTEXT_ADALN and f"{stem}attn.to_add_out.weight" not in tensors:
            tensor = _swap_halves(tensor)
        result[f"{prefix}joint_blocks.{block}.{part}.{leaf}"] = tensor
    return result


def _split_block(module: str, stem: str) -> tuple[str, str]:
    """("3", "x_block.attn.qkv") from "joint_blocks.3.x_block.attn.qkv"; ("", "") from anything else."""
    if not module.startswith(stem):
        return "", ""
    block, _, part = module[len(stem):].partition(".")
    return block, part


def _is_last(block: str, source: Mapping[str, torch.Tensor], blocks: int | None) -> bool:
    """Whether the context of this joint block is pre-only."""
    if blocks is not None:
        return int(block) == blocks - 1
    return f"joint_blocks.{block}.context_block.attn.proj.weight" not in source


def _swap_halves(tensor: torch.Tensor) -> torch.Tensor:
    """Exchange the two halves along dimension 0: (shift, scale) <-> (scale, shift)."""
    first, second = tensor.chunk(2, dim=0)
    return torch.cat([second, first], dim=0)
