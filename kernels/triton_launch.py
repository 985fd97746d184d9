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


@dataclass(frozen=True)
class Launch:
    """One kernel with everything that is compiled into it."""

    kernel: object
    constants: dict
    warps: int
    stages: int = 1

    # asked for explicitly: without fused multiply-add the kernels grow by an eighth, and Triton 3.10 turns it off
    fusion = True

    def __call__(self, grid: tuple[int, ...], *args) -> None:
        self.kernel[grid](
            *args, **self.constants, num_warps=self.warps, num_stages=self.stages, enable_fp_fusion=self.fusion
        )


def specialise(
    c: Config, dim: int, dtype: torch.dtype, swiglu: bool, conv: bool, keys_tile: int, apply_tile: int, *,
    emulate: bool = False, hip: bool = False,
) -> dict[str, Launch]:
    """The kernels of one kind of layer; also what the offline compilation test and table compile."""
    fp32, scale = dtype == torch.float32, dtype == torch.float16
    dots = dict(PRECISION=("ieee" if hip else "tf32x3") if fp32 else "tf32", EMULATE=emulate)
    step = dict(T=c.step_tile, D=dim, HB=c.step_hidden, SCALE=scale, **dots)
    apply = dict(T=apply_tile, D=dim, HB=c.apply_hidden, CONV=conv, SWIGLU=swiglu, HALF=not fp32, **dots)
    return dict(
        stats=Launch(stats_kernel, dict(T=STATS_TILE, CB=STATS_CHANNELS, PEAK=scale), STATS_WARPS),
        keys=Launch(keys_kernel, dict(T=keys_tile, D=dim, CONV=conv, EMULATE=emulate), c.keys_warps),
        error=Launch(error_kernel, step, c.step_warps),
        step=Launch(step_kernel, dict(step, SWIGLU=swiglu), c.step_warps, c.step_stages),
        update=Launch(update_kernel, dict(D=dim, N=3 if swiglu else 2, PACK=not fp32), 4 if dim == 64 else 8),
        apply=Launch(apply_kernel, apply, c.apply_warps),
    )


def interpreted() -> bool:
    """True when Triton's interpreter runs the kernels (TRITON_INTERPRET=1 before the first use), so CPU tensors do."""
    return type(stats_kernel).__name__ == "InterpretedFunction"


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

    @property
    def arguments(self) -> tuple[int, ...]:
        return self.text, self.height, self.width, self.rows, self.strips, self.image_programs


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


def _steps(x: Tensor) -> tuple[int, int]:
    """Strides of batch and token."""
    return x.stride(0), x.stride(1)


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
    fp32, scale = q.dtype == torch.float32, q.dtype == torch.float16
    c = config or launch_config(q.device, dim, q.dtype)
    conv = q_conv is not None
    text, (height, width) = (text_tokens, grid) if conv else (tokens, (0, 0))
    keys_tile, apply_tile = (strip_width(width or tokens, largest) for largest in (c.keys_tile, c.apply_tile))
    run = specialise(
        c, dim, q.dtype, swiglu, conv, keys_tile, apply_tile,
        emulate=interpreted(), hip=torch.version.hip is not None,
    )
    w1, w2, w3 = weights[0], weights[1], weights[-1]
    k_taps, k_bias = _taps(k_conv, w1)
    q_taps, q_bias = _taps(q_conv, w1)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=q.device, dtype=dtype)

    with _device(q):
        blocks = channels // STATS_CHANNELS
        splits, chunk = _splits(tokens, STATS_TILE, batch * blocks, c.programs)
        means, squares = empty(batch, splits, channels), empty(batch, splits, channels)
        peaks, peak_splits = empty(batch, splits, channels) if scale else means, splits
        run["stats"](
            (splits, blocks, batch), k, v, means, squares, peaks, tokens, chunk, splits, channels, *_steps(k), *_steps(v)
        )

        p = _patches(text, height, width, keys_tile, batch * heads, c.programs)
        keys = empty(batch, tokens, channels, dtype=q.dtype)
        run["keys"](
            (p.programs, heads, batch), k, means, squares, k_taps, k_bias, keys, tokens, chunk, splits, *p.arguments,
            channels, *_steps(k), INSTANCE_EPS,
        )

        values = v
        if not swiglu:
            values = torch.empty_like(keys)
            run["error"](
                (_cdiv(tokens, c.step_tile), heads, batch), keys, v, w1, w2, peaks, values, tokens, peak_splits,
                channels, *_steps(v),
            )

        pieces = heads * (dim // c.step_hidden)
        splits, chunk = _splits(tokens, c.step_tile, batch * pieces, c.programs)
        partial = empty(batch, heads, splits, parts, dim, dim)
        run["step"](
            (splits, pieces, batch), keys, values, w1, w2, w3, peaks, partial, tokens, chunk, peak_splits, channels,
            *_steps(values),
        )

        updated = empty(parts, batch, heads, dim, dim)
        packed = updated if fp32 else torch.empty_like(updated, dtype=torch.float16)
        scales = empty(parts, batch, heads)
        rate = (1.0 if swiglu else -1.0) * dim**-0.5 / tokens
        run["update"]((parts, heads, batch), partial, w1, w2, w3, updated, packed, scales, splits, rate)
        del keys, values, partial  # their memory serves the output

        p = _patches(text, height, width, apply_tile, batch * heads, c.programs)
        out = empty(batch, tokens, channels, dtype=q.dtype)
        run["apply"](
            (p.programs, heads, batch), q, q_taps, q_bias, packed, scales, out, tokens, *p.arguments, channels, *_steps(q)
        )
    return out, updated
