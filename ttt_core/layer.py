"""The TTT layer as a module: the parameters, and one call into kernels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..kernels import ttt_mlp2, ttt_swiglu
from .spec import TTTSpec

INIT_STD = 0.02  # paper: truncated normal; everything else of the layer is inherited or zero


class _DepthwiseConv(nn.Module):
    """Holder of a depthwise 3x3's weight (C, 1, 3, 3) and bias (C,); the convolution itself runs in the kernel."""

    def __init__(self, channels: int, device=None, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, 3, 3, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))


class TTTAttention(nn.Module):
    """Replaces the softmax attention between the inherited q/k/v projections and the output projection.

    Parameters: w1, w2 and (swiglu) w3 of shape (heads, d, d); with locality dwc_qk also q_conv and k_conv, zero at
    first, so that a new layer starts as the plain one. Parameters are kept in fp32 unless told otherwise and are
    moved to the input's device at use, so a host may leave them offloaded.
    """

    def __init__(self, num_heads: int, head_dim: int, spec: TTTSpec, *, device=None, dtype=None, seed: int | None = None):
        super().__init__()
        self.num_heads, self.head_dim, self.spec = num_heads, head_dim, spec
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        for name in ("w1", "w2", "w3") if spec.inner_model == "swiglu" else ("w1", "w2"):
            weight = torch.empty(num_heads, head_dim, head_dim, device=device, dtype=dtype)
            if weight.device.type != "meta":
                nn.init.trunc_normal_(weight, std=INIT_STD, generator=generator)
            self.register_parameter(name, nn.Parameter(weight))
        if spec.locality == "dwc_qk":
            self.q_conv = _DepthwiseConv(num_heads * head_dim, device, dtype)
            self.k_conv = _DepthwiseConv(num_heads * head_dim, device, dtype)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], text_tokens: int = 0, backend: str = "auto"
    ) -> Tensor:
        """q, k, v (B, text_tokens + h*w, heads*d), text first -> out of the same shape and dtype.

        grid: (h, w) of the image tokens. backend: auto, triton or torch. Raises as kernels.ttt_swiglu does.
        """
        convs = (None, None)
        if self.spec.locality == "dwc_qk":
            convs = tuple((c.weight.to(q.device), c.bias.to(q.device)) for c in (self.q_conv, self.k_conv))
        options = dict(grid=grid, text_tokens=text_tokens, key_norm=self.spec.key_norm, backend=backend)
        w1, w2 = self.w1.to(q.device), self.w2.to(q.device)
        if self.spec.inner_model == "swiglu":
            return ttt_swiglu(q, k, v, w1, w2, self.w3.to(q.device), *convs, **options)
        return ttt_mlp2(q, k, v, w1, w2, *convs, **options)
