"""The fused forward: five Triton launches (six for mlp2) and the scratch memory between them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from .launch_configs import STATS_CHANNELS, STATS_TILE, STATS_WARPS, Config, config_for, strip_width
from .reference import INSTANCE_EPS
from .triton_apply import apply_kernel
from .triton_keys import keys_kernel, stats_kernel
from .triton_step import error_kernel, step_kernel, update_kernel

# fused multiply-add is asked for explicitly: without it the kernels grow by an eighth, and Triton 3.10 turns it off
_FUSE = dict(enable_fp_fusion=True)


def interpreted() -> bool:
    """True when Triton's interpreter runs the kernels (TRITON_INTERPRET=1 before the first use), so CPU tensors do."""
    return not hasattr(stats_kernel, "device_caches") and type(stats_kernel).__name__ == "InterpretedFunction"


@dataclass(frozen=True)
class _Patches:
    """How the keys and apply kernels tile a picture of (height, width) after `text` tokens."""

    text: int
    height: int
    width: int
    rows: int
    strips: int
    image_programs: int
    programs: int


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _patches(text: int, height: int, width: int, tile: int, planes: int, wanted: int) -> _Patches:
    """Rows per program: as many as leave `wanted` programs, for each program reads two rows more than it writes."""
    strips = _cdiv(width, tile) if height * width else 0
    rows = max(1, min(16, height * strips * planes // wanted)) if strips else 8
    image = strips * _cdiv(height, rows)
    return _Patches(text, height, width, rows, strips, image, image + _cdiv(_cdiv(text, tile), rows))


def _splits(tokens: int, tile: int, planes: int, wanted: int) -> tuple[int, int]:
    """(number of chunks, tokens per chunk, a multiple of the tile), from shapes alone so that sums keep their order."""
    chunks = max(1, min(_cdiv(wanted, planes), _cdiv(tokens, tile), 64))
    chunk = _cdiv(_cdiv(tokens, chunks), tile) * tile
    return _cdiv(tokens, chunk), chunk


def _taps(conv: tuple[Tensor, Tensor] | None, empty: Tensor) -> tuple[Tensor, Tensor]:
    """(C, 1, 3, 3) -> (9, C): a warp then reads neighbouring channels of one tap."""
    if conv is None:
        return empty, empty
    weight, bias = conv
    return weight.reshape(weight.shape[0], 9).t().contiguous(), bias.contiguous()


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _device(x: Tensor):
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def launch_config(device: torch.device, head_dim: int, dtype: torch.dtype) -> Config:
    nvidia = device.type == "cuda" and torch.version.hip is None
    return config_for(torch.cuda.get_device_capability(device) if nvidia else None, head_dim, dtype == torch.float32)


def fused_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: list[Tensor],
    q_conv: tuple[Tensor, Tensor] | None,
    k_conv: tuple[Tensor, Tensor] | None,
    grid: tuple[int, int],
    text_tokens: int,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """The layer with instance key norm; swiglu with three weights, mlp2 with two.

    q, k, v (B, N, C) fp32, fp16 or bf16, last dimension contiguous (else copied), other strides free; weights
    (H, d, d). Returns out (B, N, C) in q's type and the updated weights (n, B, H, d, d) in fp32.

    The step keeps keys and takes dots in the inputs' type (fp16 scaled, see triton_step), the apply in scaled fp16 for
    both half types, as bf16 would lose the update. fp32: three tf32 products stand for each fp32 one.
    """
    q, k, v = _rows(q), _rows(k), _rows(v)
    weights = [w.contiguous() for w in weights]
    batch, tokens, channels = q.shape
    heads, dim = weights[0].shape[0], weights[0].shape[1]
    parts, swiglu = len(weights), len(weights) == 3
    fp32 = q.dtype == torch.float32
    c = config or launch_config(q.device, dim, q.dtype)
    emulate = interpreted()
    precision = ("tf32x3" if torch.version.hip is None else "ieee") if fp32 else "tf32"
    scale = q.dtype == torch.float16
    dots = dict(PRECISION=precision, EMULATE=emulate)
    conv = q_conv is not None
    text, (height, width) = (text_tokens, grid) if conv else (tokens, (0, 0))
    w1, w2, w3 = weights[0], weights[1], weights[-1]
    k_taps, k_bias = _taps(k_conv, w1)
    q_taps, q_bias = _taps(q_conv, w1)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=q.device, dtype=dtype)

    with _device(q):
        block = min(STATS_CHANNELS, dim)
        splits, chunk = _splits(tokens, STATS_TILE, batch * channels // block, c.programs)
        means, squares = empty(batch, splits, channels), empty(batch, splits, channels)
        peaks, peak_splits = empty(batch, splits, channels) if scale else means, splits
        stats_kernel[splits, channels // block, batch](
            k, v, means, squares, peaks, tokens, chunk, splits, channels,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            T=STATS_TILE, CB=block, PEAK=scale, num_warps=STATS_WARPS, num_stages=1, **_FUSE,
        )

        tile = strip_width(width or tokens, c.keys_tile)
        p = _patches(text, height, width, tile, batch * heads, c.programs)
        keys = empty(batch, tokens, channels, dtype=q.dtype)
        keys_kernel[p.programs, heads, batch](
            k, means, squares, k_taps, k_bias, keys, tokens, chunk, splits, p.text, p.height, p.width, p.rows, p.strips,
            p.image_programs, channels, k.stride(0), k.stride(1), INSTANCE_EPS,
            T=tile, D=dim, CONV=conv, EMULATE=emulate, num_warps=c.keys_warps, num_stages=1, **_FUSE,
        )

        values = v
        if not swiglu:
            values = torch.empty_like(keys)
            error_kernel[_cdiv(tokens, c.step_tile), heads, batch](
                keys, v, w1, w2, peaks, values, tokens, peak_splits, channels, v.stride(0), v.stride(1),
                T=c.step_tile, D=dim, HB=c.step_hidden, SCALE=scale, **dots, num_warps=c.step_warps, num_stages=1, **_FUSE,
            )

        pieces = heads * (dim // c.step_hidden)
        splits, chunk = _splits(tokens, c.step_tile, batch * pieces, c.programs)
        partial = empty(batch, heads, splits, parts, dim, dim)
        step_kernel[splits, pieces, batch](
            keys, values, w1, w2, w3, peaks, partial, tokens, chunk, peak_splits, channels, values.stride(0), values.stride(1),
            T=c.step_tile, D=dim, HB=c.step_hidden, SWIGLU=swiglu, SCALE=scale, **dots,
            num_warps=c.step_warps, num_stages=c.step_stages, **_FUSE,
        )

        updated = empty(parts, batch, heads, dim, dim)
        packed = updated if fp32 else torch.empty_like(updated, dtype=torch.float16)
        scales = empty(parts, batch, heads)
        rate = (1.0 if swiglu else -1.0) * dim**-0.5 / tokens
        update_kernel[parts, heads, batch](
            partial, w1, w2, w3, updated, packed, scales, splits, rate,
            D=dim, N=parts, PACK=not fp32, num_warps=4 if dim == 64 else 8, num_stages=1, **_FUSE,
        )

        tile = strip_width(width or tokens, c.apply_tile)
        p = _patches(text, height, width, tile, batch * heads, c.programs)
        out = empty(batch, tokens, channels, dtype=q.dtype)
        apply_kernel[p.programs, heads, batch](
            q, q_taps, q_bias, packed, scales, out, tokens, p.text, p.height, p.width, p.rows, p.strips,
            p.image_programs, channels, q.stride(0), q.stride(1),
            T=tile, D=dim, HB=c.apply_hidden, CONV=conv, SWIGLU=swiglu, HALF=not fp32, **dots,
            num_warps=c.apply_warps, num_stages=1, **_FUSE,
        )
    return out, updated
