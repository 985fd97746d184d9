"""Plain PyTorch reference of the TTT layer: the truth every other backend is tested against.

Shapes: B batch, N tokens (text first, then the h*w image tokens row by row), H heads, d head size, C = H*d.
Everything is computed in fp32 (fp64 for fp64 inputs) whatever the input type: statistics, the sum over tokens and
the updated weights lose the update itself when they are held in bf16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

INSTANCE_EPS = 1.0  # the paper's value: large on purpose, it also keeps constant channels from being blown up
TOKEN_EPS = 1e-6
KEY_NORMS = ("instance", "center", "scale", "rms", "layer", "none")


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def normalise_keys(k: Tensor, kind: str) -> Tensor:
    """Key norm without affine parameters, (B, N, H, d) -> same shape.

    ``instance`` (paper section 3.2) centres and scales each channel over all N tokens, biased variance, eps 1.0;
    ``center`` and ``scale`` are its two halves, ``rms`` and ``layer`` act inside each token and head. The latter
    four and ``none`` exist to repeat the paper's ablation.
    """
    if kind == "none":
        return k
    if kind == "rms":
        return k * torch.rsqrt(k.square().mean(-1, keepdim=True) + TOKEN_EPS)
    if kind == "layer":
        return F.layer_norm(k, k.shape[-1:], eps=TOKEN_EPS)
    var, mean = torch.var_mean(k, dim=1, correction=0, keepdim=True)
    if kind == "center":
        return k - mean
    rstd = torch.rsqrt(var + INSTANCE_EPS)
    if kind == "scale":
        return k * rstd
    if kind == "instance":
        return (k - mean) * rstd
    raise ValueError(f"Unknown key norm '{kind}'; choose one of {', '.join(KEY_NORMS)}.")


def add_depthwise_conv(x: Tensor, weight: Tensor | None, bias: Tensor | None, grid: tuple[int, int], text: int) -> Tensor:
    """x + DWC3x3(x) on the image tokens, text tokens unchanged; (B, N, C) -> (B, N, C).

    weight (C, 1, 3, 3), bias (C,), zero padding, over the (h, w) grid (paper section 3.3). None: no convolution.
    """
    if weight is None:
        return x
    h, w = grid
    image = x[:, text:].transpose(1, 2).unflatten(2, (h, w))
    conv = F.conv2d(image, weight.to(x.dtype), bias.to(x.dtype), padding=1, groups=x.shape[2])
    image = (image + conv).flatten(2).transpose(1, 2)
    return image if text == 0 else torch.cat((x[:, :text], image), dim=1)


def _silu_and_slope(z: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(z)
    return z * s, s * (1 + z * (1 - s))


def swiglu_step(k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One full-batch gradient step of f(x) = (silu(x w1) * (x w2)) w3 on -mean_i <f(k_i), v_i> d^-0.5.

    k, v (B, H, N, d); w (H, d, d); returns the updated weights, each (B, H, d, d). Design section 2, equations
    g1, g2, g3. The factor d^-0.5 / N is applied after the sums, where it cannot push small terms into subnormals.
    """
    rate = k.shape[-1] ** -0.5 / k.shape[-2]
    act, slope = _silu_and_slope(k @ w1)
    z2 = k @ w2
    da = v @ w3.transpose(-1, -2)
    kt = k.transpose(-1, -2)
    g1 = kt @ (da * z2 * slope)
    g2 = kt @ (da * act)
    g3 = (act * z2).transpose(-1, -2) @ v
    return w1 + rate * g1, w2 + rate * g2, w3 + rate * g3


def swiglu_apply(q: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """f(q) with the updated weights; q (B, H, N, d), w (B, H, d, d)."""
    return (F.silu(q @ w1) * (q @ w2)) @ w3


def mlp2_step(k: Tensor, v: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """One full-batch gradient step of f(x) = silu(x w1) w2 on mean_i |f(k_i) - v_i|^2 d^-0.5 / 2. Shapes as above."""
    rate = k.shape[-1] ** -0.5 / k.shape[-2]
    act, slope = _silu_and_slope(k @ w1)
    error = act @ w2 - v
    g1 = k.transpose(-1, -2) @ (error @ w2.transpose(-1, -2) * slope)
    g2 = act.transpose(-1, -2) @ error
    return w1 - rate * g1, w2 - rate * g2


def mlp2_apply(q: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """f(q) with the updated weights; q (B, H, N, d), w (B, H, d, d)."""
    return F.silu(q @ w1) @ w2


_INNER = {"swiglu": (swiglu_step, swiglu_apply), "mlp2": (mlp2_step, mlp2_apply)}


def ttt_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: tuple[Tensor, ...],
    q_conv: tuple[Tensor, Tensor] | None,
    k_conv: tuple[Tensor, Tensor] | None,
    grid: tuple[int, int],
    text_tokens: int,
    inner_model: str,
    key_norm: str,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The whole layer: key norm, convolution, inner step on (k, v), application to q.

    q, k, v (B, N, C); weights of shape (H, d, d) each; convs (weight (C, 1, 3, 3), bias (C,)) or None.
    Returns (out (B, N, C) in q's dtype, updated weights (B, H, d, d) in fp32 or fp64).
    """
    arguments = q, k, v, weights, q_conv, k_conv, grid, text_tokens, inner_model, key_norm
    if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):
        with torch.autocast(q.device.type, enabled=False):  # it would take the products in half precision again
            return _layer(*arguments)
    return _layer(*arguments)


def _layer(q, k, v, weights, q_conv, k_conv, grid, text_tokens, inner_model, key_norm):
    step, apply = _INNER[inner_model]
    dtype = compute_dtype(q)
    heads, dim = weights[0].shape[0], weights[0].shape[1]
    weights = tuple(w.to(dtype) for w in weights)

    def by_head(x: Tensor) -> Tensor:  # (B, N, C) -> (B, H, N, d)
        return x.unflatten(2, (heads, dim)).transpose(1, 2)

    k = normalise_keys(k.to(dtype).unflatten(2, (heads, dim)), key_norm).flatten(2)
    k = add_depthwise_conv(k, *(k_conv or (None, None)), grid, text_tokens)
    updated = step(by_head(k), by_head(v.to(dtype)), *weights)
    query = add_depthwise_conv(q.to(dtype), *(q_conv or (None, None)), grid, text_tokens)
    out = apply(by_head(query), *updated)
    return out.transpose(1, 2).flatten(2).to(q.dtype), updated
