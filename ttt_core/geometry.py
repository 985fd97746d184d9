"""The shape of an MMDiT or MMDiT-X, read from its tensor names and shapes alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .errors import TTTError

PREFIX = "model.diffusion_model."
_BLOCK = re.compile(r"(?:^|\.)joint_blocks\.(\d+)\.x_block\.(attn2?)\.qkv\.weight$")


@dataclass(frozen=True, order=True)
class AttentionId:
    """One attention of the model: ``self`` is attn2 (image tokens only), ``joint`` is attn (text and image)."""

    kind: str
    block: int

    @property
    def module(self) -> str:
        return "attn2" if self.kind == "self" else "attn"

    @property
    def path(self) -> str:
        """The module's name inside the diffusion model, e.g. joint_blocks.3.x_block.attn2."""
        return f"joint_blocks.{self.block}.x_block.{self.module}"

    def __str__(self) -> str:
        return f"{self.kind}:{self.block}"


@dataclass(frozen=True)
class Geometry:
    """blocks joint blocks, of which `self_blocks` have attn2; hidden = heads * head_dim channels."""

    blocks: int
    self_blocks: tuple[int, ...]
    hidden: int
    heads: int
    head_dim: int

    @property
    def attentions(self) -> tuple[AttentionId, ...]:
        joint = (AttentionId("joint", i) for i in range(self.blocks))
        return (*(AttentionId("self", i) for i in self.self_blocks), *joint)

    @property
    def name(self) -> str:
        family = {(24, 13, 1536): "SD3.5-Medium", (38, 0, 2432): "SD3.5-Large"}
        known = family.get((self.blocks, len(self.self_blocks), self.hidden))
        shape = f"{self.blocks} blocks, {len(self.self_blocks)} image self-attentions, {self.heads} heads of size {self.head_dim}"
        return f"{known} ({shape})" if known else f"an MMDiT with {shape}"


def attention_blocks(names: Iterable[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(blocks with a joint attention, blocks with an image self-attention), found by tensor names.

    Raises TTTError when the names are not those of an MMDiT.
    """
    found: dict[str, set[int]] = {"attn": set(), "attn2": set()}
    for name in names:
        if match := _BLOCK.search(name):
            found[match.group(2)].add(int(match.group(1)))
    if not found["attn"]:
        raise TTTError(
            "This model is not an MMDiT: it has no tensors named joint_blocks.*.x_block.attn.qkv.weight. "
            "TTT works with SD3.5-Medium, SD3.5-Large and their fine-tunes; load one of those."
        )
    return tuple(sorted(found["attn"])), tuple(sorted(found["attn2"]))


def read_geometry(shapes: Mapping[str, Iterable[int]]) -> Geometry:
    """Geometry of a model from {tensor name: shape}; names may carry a prefix such as model.diffusion_model.

    Raises TTTError when the model is not an MMDiT or its sizes do not fit together.
    """
    joint, self_blocks = attention_blocks(shapes)
    if joint != tuple(range(len(joint))):
        raise TTTError(f"The model's joint blocks are {list(joint)}; some are missing, so the file is incomplete. Load a whole model.")
    end = next(name for name in shapes if name.endswith("joint_blocks.0.x_block.attn.qkv.weight"))
    hidden = tuple(shapes[end])[0] // 3
    norm = end.removesuffix("qkv.weight") + "ln_q.weight"
    head_dim = tuple(shapes[norm])[0] if norm in shapes else 64  # without qk norm: SD3 has heads of 64
    if hidden % head_dim:
        raise TTTError(f"The model's hidden size {hidden} is not a multiple of its head size {head_dim}; this layout is not supported.")
    return Geometry(len(joint), self_blocks, hidden, hidden // head_dim, head_dim)
