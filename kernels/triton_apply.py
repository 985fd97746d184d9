"""Kernel for the queries: convolution and the updated inner model, in one pass."""

import triton
import triton.language as tl

from .triton_common import cast, dot, load_row, patch, sigmoid, slide, store_row


@triton.jit
def inner(x, w, scales, slots, D: tl.constexpr, HB: tl.constexpr, SWIGLU: tl.constexpr, HALF: tl.constexpr,
          PRECISION: tl.constexpr, EMULATE: tl.constexpr):
    """f(x) for x [T, D] fp32. w, scales: this head's first updated matrix; the next is `slots` matrices further on.

    HALF: fp16 dots that cannot overflow. Rows of x and the matrices come divided by their largest magnitude, so every
    scaled product stays below D^2 <= 16384; the factors return in fp32, before silu and at the end.
    """
    column = tl.arange(0, D)
    step = slots * D * D
    total = tl.zeros([x.shape[0], D], tl.float32)
    if HALF:
        row = tl.maximum(tl.max(tl.abs(x), 1), 1e-30)[:, None]  # [T, 1]
        s1 = row * tl.load(scales)
        xt = (x * (1.0 / row)).to(tl.float16)
    else:
        xt = x
    last: tl.constexpr = 2 if SWIGLU else 1
    for start in tl.static_range(0, D, HB):
        hidden = start + tl.arange(0, HB)
        enter = column[:, None] * D + hidden[None, :]
        leave = hidden[:, None] * D + column[None, :]
        z = dot(xt, tl.load(w + enter), PRECISION, EMULATE)
        if HALF:
            act = z * sigmoid(z * s1)
        else:
            act = z * sigmoid(z)
        if SWIGLU:
            act *= dot(xt, tl.load(w + step + enter), PRECISION, EMULATE)
        total += dot(act.to(xt.dtype), tl.load(w + last * step + leave), PRECISION, EMULATE)
    if HALF:
        factor = s1 * tl.load(scales + last * slots)
        if SWIGLU:
            factor *= row * tl.load(scales + slots)
        total *= factor
    return total


@triton.jit(do_not_specialize=["tokens", "text", "height", "width", "rows", "strips", "image_programs"])
def apply_kernel(
    q, taps, bias, w, scales, out, tokens, text, height, width, rows, strips, image_programs, channels, q_batch, q_token,
    T: tl.constexpr, D: tl.constexpr, HB: tl.constexpr, CONV: tl.constexpr, SWIGLU: tl.constexpr, HALF: tl.constexpr,
    PRECISION: tl.constexpr, EMULATE: tl.constexpr,
):
    """out = f(q + conv(q)) with the updated weights, (B, N, C) contiguous. Grid (patches, heads, B).

    w (n, B, H, D, D): fp16 divided by scales (n, B, H) when HALF, else fp32.
    """
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    is_image, first, end, length, count, y0, x0 = patch(
        tl.program_id(0), text, height, width, rows, strips, image_programs, T
    )
    column = head * D + tl.arange(0, D)
    source = q + batch * q_batch + column[None, :]
    target = out + batch * tokens * channels + column[None, :]
    slot = batch * tl.num_programs(1) + head
    slots = tl.num_programs(2).to(tl.int64) * tl.num_programs(1)
    x = x0 + tl.arange(0, T)
    if CONV:
        mine = taps + head * D
        limit = tl.where(is_image, channels, 0)
        here = tl.zeros([T, D], tl.float32)
        below = here
        done, here, below = slide(
            source, y0 - 1, x, first, end, length, count, q_token, None, mine, channels, is_image, here, below
        )
        done, here, below = slide(
            source, y0, x, first, end, length, count, q_token, None, mine, channels, is_image, here, below
        )
    for y in range(y0, tl.minimum(y0 + rows, count)):
        if CONV:
            done, here, below = slide(
                source, y + 1, x, first, end, length, count, q_token, None, mine, channels, is_image, here, below
            )
            done += tl.load(bias + column, mask=column < limit, other=0.0).to(tl.float32)[None, :]
        else:
            done = load_row(source, y, x, first, end, length, count, q_token, None)
        value = inner(
            done, w + slot * D * D, scales + slot, slots, D, HB, SWIGLU, HALF, PRECISION, EMULATE
        )
        store_row(target, cast(value, out.dtype.element_ty, EMULATE), y, x, first, end, length, count, channels)
