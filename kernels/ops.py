"""The public operation, one function per inner model. Checks shapes, picks the backend, calls it."""

from __future__ import annotations

from torch import Tensor

from .registry import Call, choose

Conv = tuple[Tensor, Tensor]


def _check(q: Tensor, k: Tensor, v: Tensor, weights: tuple[Tensor, ...], grid: tuple[int, int], text_tokens: int) -> None:
    if not (q.shape == k.shape == v.shape) or q.dim() != 3:
        raise ValueError(f"q, k and v must share one shape (B, N, C), got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}.")
    heads, dim = weights[0].shape[0], weights[0].shape[1]
    if any(w.shape != (heads, dim, dim) for w in weights):
        raise ValueError(f"Inner weights must all be (heads, d, d), got {[tuple(w.shape) for w in weights]}.")
    if q.shape[2] != heads * dim:
        raise ValueError(f"q has {q.shape[2]} channels, but the layer has {heads} heads of size {dim}.")
    h, w = grid
    if text_tokens < 0 or h < 1 or w < 1 or text_tokens + h * w != q.shape[1]:
        raise ValueError(f"{q.shape[1]} tokens do not equal {text_tokens} text tokens plus a grid of {h} x {w} image tokens.")


def _run(q, k, v, weights, q_conv, k_conv, grid, text_tokens, inner_model, key_norm, backend, return_fast_weights):
    _check(q, k, v, weights, grid, text_tokens)
    call = Call(q.device, q.dtype, weights[0].shape[1], inner_model, key_norm, q_conv is not None, q.dtype == k.dtype == v.dtype)
    chosen = choose(call, backend)
    out, updated = chosen.run(q, k, v, weights, q_conv, k_conv, grid, text_tokens, inner_model, key_norm)
    return (out, updated) if return_fast_weights else out


def ttt_swiglu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    q_conv: Conv | None = None,
    k_conv: Conv | None = None,
    *,
    grid: tuple[int, int],
    text_tokens: int = 0,
    key_norm: str = "instance",
    backend: str = "auto",
    return_fast_weights: bool = False,
):
    """TTT layer with the SwiGLU inner model and the inner-product loss (paper section 3.1).

    q, k, v: (B, N, heads*d), text tokens first, N = text_tokens + h*w. w1, w2, w3: (heads, d, d).
    q_conv, k_conv: (weight (heads*d, 1, 3, 3), bias (heads*d,)) or None for no locality.
    Returns out (B, N, heads*d) in q's dtype, or (out, (w1', w2', w3')) with the updated weights (B, heads, d, d)
    in fp32. Raises ValueError for shapes that do not fit, BackendUnavailable for a backend that cannot run the call.
    """
    return _run(
        q, k, v, (w1, w2, w3), q_conv, k_conv, grid, text_tokens, "swiglu", key_norm, backend, return_fast_weights
    )


def ttt_mlp2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    q_conv: Conv | None = None,
    k_conv: Conv | None = None,
    *,
    grid: tuple[int, int],
    text_tokens: int = 0,
    key_norm: str = "instance",
    backend: str = "auto",
    return_fast_weights: bool = False,
):
    """TTT layer with the two-layer inner model and the squared-error loss (the paper's DiT variant).

    Arguments, results and errors as in ttt_swiglu, with two inner weights.
    """
    return _run(q, k, v, (w1, w2), q_conv, k_conv, grid, text_tokens, "mlp2", key_norm, backend, return_fast_weights)
