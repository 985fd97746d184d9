"""Operations of one model call, counted: what TTT can gain at a size, before anything is measured.

Matrix products only, two operations a multiply-add; no memory traffic and no launch costs, so the bound is what TTT
could give at best on a machine that is limited by arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .geometry import AttentionId, Geometry

# Products of (N, d) by (d, d) in one TTT layer, for each head: keys forward, gradients, queries forward.
_PRODUCTS = {"swiglu": 2 + 4 + 3, "mlp2": 2 + 3 + 2}


@dataclass(frozen=True)
class Cost:
    """Operations of one call on one sample: linear layers, softmax attentions that could be replaced, and TTT in their place."""

    linear: float
    kept: float
    replaced: float
    ttt: float

    @property
    def share(self) -> float:
        """Share of the softmax model's operations that lies in the attentions to replace."""
        return self.replaced / (self.linear + self.kept + self.replaced)

    @property
    def bound(self) -> float:
        """Speed-up by operation counts alone; below 1 TTT does more work than softmax at this size."""
        return (self.linear + self.kept + self.replaced) / (self.linear + self.kept + self.ttt)


def count(geometry: Geometry, replaced: Iterable[AttentionId], image: int, text: int, inner_model: str = "swiglu") -> Cost:
    """Cost of a model call with `image` image tokens and `text` text tokens, these attentions being TTT or softmax."""
    chosen, c = set(replaced), geometry.hidden
    linear = geometry.blocks * 2 * (image + text) * c * c * (4 + 8) + len(geometry.self_blocks) * 2 * image * c * c * 4
    kept = gone = ttt = 0.0
    for attention in geometry.attentions:
        tokens = image if attention.kind == "self" else image + text
        softmax = 4 * tokens * tokens * c
        if attention in chosen:
            gone += softmax
            ttt += 2 * _PRODUCTS[inner_model] * tokens * geometry.head_dim * c
        else:
            kept += softmax
    return Cost(float(linear), kept, gone, ttt)


def explain(cost: Cost, image: int) -> str:
    """One sentence for a user who asks why TTT gains little or much at this size."""
    head = f"By counted operations, at {image:,} image tokens the replaced attentions are {cost.share:.0%} of the softmax model's work"
    if cost.bound <= 1.02:
        return f"{head}, so TTT has nothing to gain here; it pays off at larger sizes."
    return f"{head}, so at most {cost.bound:.2f}x could be gained."
