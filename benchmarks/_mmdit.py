"""A Stable-Diffusion-3.5-shaped stack of MMDiT-X blocks with random weights, for timing only: plain torch, no files.

Shapes as SD3.5-Medium: 24 blocks, width 1536, 24 heads of 64, RMS norm on q and k, a second image-only attention in
blocks 0-12, and a last block that only reads its text. Softmax or TTT in each attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import _path  # noqa: F401
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comfy_ttt.kernels import ttt_swiglu


@dataclass(frozen=True)
class Shape:
    depth: int = 24
    heads: int = 24
    head_dim: int = 64
    dual: int = 13  # blocks 0 .. dual-1 have the second attention
    text_width: int = 4096

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


def chosen(preset: str, shape: Shape) -> set[tuple[str, int]]:
    """(kind, block) of the attentions a preset replaces: paper's are the image-only ones and the last five joint ones."""
    own = {("self", i) for i in range(shape.dual)}
    joint = [("joint", i) for i in range(shape.depth)]
    late = set(joint[-max(1, round(shape.depth * 5 / 24)) :])
    return {"none": set(), "self": own, "paper": own | late, "all": own | set(joint)}[preset]


class Attention(nn.Module):
    """The inherited projections are the block's; this is what happens between them."""

    def __init__(self, shape: Shape, ttt: bool):
        super().__init__()
        self.heads, self.dim, self.ttt, self.backend = shape.heads, shape.head_dim, ttt, "auto"
        if ttt:
            for name in ("w1", "w2", "w3"):
                self.register_parameter(name, nn.Parameter(torch.randn(shape.heads, self.dim, self.dim) * self.dim**-0.5))
            for name in ("q", "k"):
                self.register_parameter(f"{name}_weight", nn.Parameter(torch.randn(shape.width, 1, 3, 3) * 0.1))
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.zeros(shape.width)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], text: int) -> Tensor:
        if self.ttt:
            return ttt_swiglu(
                q, k, v, self.w1, self.w2, self.w3, (self.q_weight, self.q_bias), (self.k_weight, self.k_bias),
                grid=grid, text_tokens=text, backend=self.backend,
            )
        q, k, v = (x.unflatten(2, (self.heads, self.dim)).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Stream(nn.Module):
    """One side of a block, image or text: modulation, qkv with normed q and k, projection, MLP."""

    def __init__(self, shape: Shape, attentions: int, only_read: bool = False):
        super().__init__()
        c, self.shape, self.only_read = shape.width, shape, only_read
        self.modulation = nn.Linear(c, c * (2 if only_read else 3 + 3 * attentions))
        self.qkv = nn.ModuleList(nn.Linear(c, 3 * c) for _ in range(attentions))
        self.norms = nn.ModuleList(nn.RMSNorm(shape.head_dim) for _ in range(2 * attentions))
        if not only_read:
            self.out = nn.ModuleList(nn.Linear(c, c) for _ in range(attentions))
            self.up, self.down = nn.Linear(c, 4 * c), nn.Linear(4 * c, c)

    def read(self, x: Tensor, shift: Tensor, scale: Tensor, which: int) -> tuple[Tensor, Tensor, Tensor]:
        x = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        q, k, v = self.qkv[which](x).chunk(3, dim=-1)
        heads = (self.shape.heads, self.shape.head_dim)
        q = self.norms[2 * which](q.unflatten(2, heads)).flatten(2)
        k = self.norms[2 * which + 1](k.unflatten(2, heads)).flatten(2)
        return q, k, v

    def mlp(self, x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        y = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        return x + gate * self.down(F.gelu(self.up(y), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, shape: Shape, index: int, replaced: set[tuple[str, int]]):
        super().__init__()
        self.dual, self.last = index < shape.dual, index == shape.depth - 1
        self.image, self.text = Stream(shape, 2 if self.dual else 1), Stream(shape, 1, self.last)
        self.attn = Attention(shape, ("joint", index) in replaced)
        self.attn2 = Attention(shape, ("self", index) in replaced) if self.dual else None

    def forward(self, x: Tensor, text: Tensor, c: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        m = self.image.modulation(F.silu(c))[:, None].chunk(9 if self.dual else 6, dim=-1)
        t = self.text.modulation(F.silu(c))[:, None].chunk(2 if self.last else 6, dim=-1)
        m_text = text.shape[1]
        both = [torch.cat(pair, 1) for pair in zip(self.text.read(text, t[0], t[1], 0), self.image.read(x, m[0], m[1], 0))]
        a = self.attn(*both, grid, m_text)
        own = self.attn2(*self.image.read(x, m[6], m[7], 1), grid, 0) if self.dual else None
        x = x + m[2] * self.image.out[0](a[:, m_text:])
        if own is not None:
            x = x + m[8] * self.image.out[1](own)
        x = self.image.mlp(x, m[3], m[4], m[5])
        if not self.last:
            text = text + t[2] * self.text.out[0](a[:, :m_text])
            text = self.text.mlp(text, t[3], t[4], t[5])
        return x, text


class MMDiT(nn.Module):
    """latent (B, 16, 2h, 2w), text (B, M, text width), condition (B, width) -> (B, h*w, 64)."""

    def __init__(self, shape: Shape, preset: str):
        super().__init__()
        self.patch = nn.Conv2d(16, shape.width, 2, 2)
        self.embed_text = nn.Linear(shape.text_width, shape.width)
        replaced = chosen(preset, shape)
        self.blocks = nn.ModuleList(Block(shape, i, replaced) for i in range(shape.depth))
        self.modulation = nn.Linear(shape.width, 2 * shape.width)
        self.head = nn.Linear(shape.width, 64)

    def forward(self, latent: Tensor, text: Tensor, c: Tensor) -> Tensor:
        x = self.patch(latent)
        grid = x.shape[2], x.shape[3]
        x, text = x.flatten(2).transpose(1, 2), self.embed_text(text)
        for block in self.blocks:
            x, text = block(x, text, c, grid)
        shift, scale = self.modulation(F.silu(c))[:, None].chunk(2, dim=-1)
        return self.head(F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift)
