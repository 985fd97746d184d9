"""Kernel for the queries: convolution and the updated inner model, in one pass."""

import triton
import triton.language as tl

from .triton_common import cast, dot, load_row, patch, sigmoid, slide, store_row


@triton.jit
def load_part(w, step, start, D: tl.constexpr, HB: tl.constexpr, SWIGLU: tl.constexpr):
    """What belongs to HB hidden units of a head's updated matrices, `step` elements apart; mlp2 has no second gate."""
    column = tl.arange(0, D)
    hidden = start + tl.arange(0, HB)
    enter = column[:, None] * D + hidden[None, :]
    leave = hidden[:, None] * D + column[None, :]
    first = tl.load(w + enter)
    if SWIGLU:
        return first, tl.load(w + step + enter), tl.load(w + 2 * step + leave)
    else:
        return first, first, tl.load(w + step + leave)


@triton.jit
def through(x, first, gate, last, s1, SWIGLU: tl.constexpr, PRECISION: tl.constexpr, EMULATE: tl.constexpr):
    """silu(x first s1) / s1 * (x gate) @ last for one part of the hidden units; x [T, D] -> [T, D] fp32."""
    z = dot(x, first, PRECISION, EMULATE)
    act = z * sigmoid(z * s1)
    if SWIGLU:
        act *= dot(x, gate, PRECISION, EMULATE)
    return dot(act.to(x.dtype), last, PRECISION, EMULATE)


@triton.jit(do_not_specialize=["tokens", "text", "height", "width", "rows", "strips", "image_programs"])
def apply_kernel(
    q, taps, bias, w, scales, out, tokens, text, height, width, rows, strips, image_programs, channels, q_batch, q_token,
    T: tl.constexpr, D: tl.constexpr, HB: tl.constexpr, CONV: tl.constexpr, SWIGLU: tl.constexpr, HALF: tl.constexpr,
    PRECISION: tl.constexpr, EMULATE: tl.constexpr,
):
    """out = f(q + conv(q)) with the updated weights, (B, N, C) contiguous. Grid (patches, heads, B).

    w (n, B, H, D, D): fp16 divided by scales (n, B, H) when HALF, else fp32. HALF takes fp16 dots that cannot overflow:
    rows of q and the matrices come divided by their largest magnitude, so every product stays below D^2 <= 16384;
    the factors return in fp32, before silu and at the end.
    """
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    is_image, first_token, end, length, count, y0, x0 = patch(
        tl.program_id(0), text, height, width, rows, strips, image_programs, T
    )
    column = head * D + tl.arange(0, D)
    source = q + batch * q_batch + column[None, :]
    target = out + batch * tokens * channels + column[None, :]
    slot = batch * tl.num_programs(1) + head
    slots = tl.num_programs(2).to(tl.int64) * tl.num_programs(1)
    step = slots * D * D
    w += slot * D * D
    scales += slot
    s1, s2, s3 = 1.0, 1.0, 1.0
    if HALF:
        s1, s2, s3 = tl.load(scales), 1.0, tl.load(scales + slots)
        if SWIGLU:
            s2, s3 = s3, tl.load(scales + 2 * slots)
    if HB == D:  # read once; a head of 128 does not fit and reads its parts for each row
        first, gate, last = load_part(w, step, 0, D, HB, SWIGLU)
    x = x0 + tl.arange(0, T)
    if CONV:
        mine = taps + head * D
        limit = tl.where(is_image, channels, 0)
        here = tl.zeros([T, D], tl.float32)
        below = here
        done, here, below = slide(
            source, y0 - 1, x, first_token, end, length, count, q_token, None, mine, channels, is_image, here, below
        )
        done, here, below = slide(
            source, y0, x, first_token, end, length, count, q_token, None, mine, channels, is_image, here, below
        )
    for y in range(y0, tl.minimum(y0 + rows, count)):
        if CONV:
            done, here, below = slide(
                source, y + 1, x, first_token, end, length, count, q_token, None, mine, channels, is_image, here, below
            )
            done += tl.load(bias + column, mask=column < limit, other=0.0).to(tl.float32)[None, :]
        else:
            done = load_row(source, y, x, first_token, end, length, count, q_token, None)
        size = 1.0
        if HALF:
            size = tl.maximum(tl.max(tl.abs(done), 1), 1e-30)[:, None]
            query = (done * (1.0 / size)).to(tl.float16)
        else:
            query = done
        if HB == D:
            value = through(query, first, gate, last, size * s1, SWIGLU, PRECISION, EMULATE)
        else:
            value = tl.zeros([T, D], tl.float32)
            for start in tl.static_range(0, D, HB):
                first, gate, last = load_part(w, step, start, D, HB, SWIGLU)
                value += through(query, first, gate, last, size * s1, SWIGLU, PRECISION, EMULATE)
        if HALF:
            factor = size * s1 * s3
            if SWIGLU:
                factor *= size * s2
            value *= factor
        store_row(target, cast(value, out.dtype.element_ty, EMULATE), y, x, first_token, end, length, count, channels)
