"""Kernels for the inner step: its gradient over token tiles, and the update of the fast weights.

SCALE (fp16): v comes divided by its largest magnitude and each weight tile by its own, so that products stay near one
whatever the inputs' size; the factors return in fp32. bf16 has the range of fp32 and needs none of it.
"""

import triton
import triton.language as tl

from .triton_common import cast, dot, load_peak, load_weight, sigmoid, silu_and_slope


@triton.jit(do_not_specialize=["tokens", "peak_splits"])
def error_kernel(
    keys, v, w1, w2, peaks, out, tokens, peak_splits, channels, v_batch, v_token,
    T: tl.constexpr, D: tl.constexpr, HB: tl.constexpr, SCALE: tl.constexpr,
    PRECISION: tl.constexpr, EMULATE: tl.constexpr,
):
    """mlp2 only: out = silu(k w1) w2 - v (divided by v's peak, if above 1, if SCALE), (B, N, C) contiguous; step_kernel's v.

    Grid (token tiles, heads, B). A pass of its own, as the error needs every hidden unit and step_kernel splits them.
    """
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * T + tl.arange(0, T)
    inside = (token < tokens)[:, None]
    token = token.to(tl.int64)[:, None]
    column = tl.arange(0, D)
    own = batch * tokens * channels + token * channels + head * D + column[None, :]
    kt = tl.load(keys + own, mask=inside, other=0.0)
    weight = head * D * D
    total = tl.zeros([T, D], tl.float32)
    for start in tl.static_range(0, D, HB):
        hidden = start + tl.arange(0, HB)
        w1t, s1 = load_weight(w1 + weight + column[:, None] * D + hidden[None, :], kt.dtype, SCALE, EMULATE)
        w2t, s2 = load_weight(w2 + weight + hidden[:, None] * D + column[None, :], kt.dtype, SCALE, EMULATE)
        z = dot(kt, w1t, PRECISION, EMULATE)
        act = cast(z * sigmoid(z * s1), kt.dtype, EMULATE)
        total += dot(act, w2t, PRECISION, EMULATE) * (s1 * s2)
    vt = tl.load(v + batch * v_batch + token * v_token + head * D + column[None, :], mask=inside, other=0.0)
    error = total - vt.to(tl.float32)
    if SCALE:
        error /= load_peak(peaks + batch * peak_splits * channels + head * D + column, peak_splits, channels, 1.0)
    tl.store(out + own, cast(error, kt.dtype, EMULATE), mask=inside)


@triton.jit(do_not_specialize=["tokens", "chunk", "peak_splits"])
def step_kernel(
    keys, v, w1, w2, w3, peaks, partial, tokens, chunk, peak_splits, channels, v_batch, v_token,
    T: tl.constexpr, D: tl.constexpr, HB: tl.constexpr, SWIGLU: tl.constexpr, SCALE: tl.constexpr,
    PRECISION: tl.constexpr, EMULATE: tl.constexpr,
):
    """Gradient sums of one chunk of tokens for HB hidden units: partial (B, H, splits, n, D, D) fp32.

    Grid (splits, heads * D / HB, B). Hidden units are separable, so each program keeps n * D * HB sums in registers.
    keys (B, N, C) contiguous; v (B, N, C) strided, for mlp2 the error. The factor d^-0.5 / N waits for update_kernel.
    """
    split, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head, part = tl.program_id(1) // (D // HB), tl.program_id(1) % (D // HB)
    column = tl.arange(0, D)
    hidden = part * HB + tl.arange(0, HB)
    kind: tl.constexpr = keys.dtype.element_ty
    enter = column[:, None] * D + hidden[None, :]  # [D, HB]
    leave = hidden[:, None] * D + column[None, :]  # [HB, D]
    w1t, s1 = load_weight(w1 + head * D * D + enter, kind, SCALE, EMULATE)
    if SWIGLU:
        w2t, s2 = load_weight(w2 + head * D * D + enter, kind, SCALE, EMULATE)
        last, s_last = load_weight(w3 + head * D * D + leave, kind, SCALE, EMULATE)
        g2 = tl.zeros([D, HB], tl.float32)
    else:
        last, s_last = load_weight(w2 + head * D * D + leave, kind, SCALE, EMULATE)
    g1 = tl.zeros([D, HB], tl.float32)
    g_last = tl.zeros([HB, D], tl.float32)
    peak, shrink = 1.0, 1.0
    least: tl.constexpr = 1e-30 if SWIGLU else 1.0  # mlp2's error also holds f(k), which may be larger than v
    if SCALE:
        peak = load_peak(peaks + batch * peak_splits * channels + head * D + column, peak_splits, channels, least)
        shrink = 1.0 / peak
    own = keys + batch * tokens * channels + head * D + column[None, :]
    values = v + batch * v_batch + head * D + column[None, :]
    begin = split * chunk
    stop = tl.minimum(begin + chunk, tokens)
    for start in range(begin, stop, T):
        token = start + tl.arange(0, T)
        inside = (token < stop)[:, None]
        token = token.to(tl.int64)[:, None]
        kt = tl.load(own + token * channels, mask=inside, other=0.0)
        vt = tl.load(values + token * v_token, mask=inside, other=0.0)
        if SCALE and SWIGLU:
            vt = (vt.to(tl.float32) * shrink).to(kind)
        vt = cast(vt, kind, EMULATE)
        z1 = dot(kt, w1t, PRECISION, EMULATE)
        act, slope = silu_and_slope(z1, s1)
        back = dot(vt, tl.trans(last), PRECISION, EMULATE)
        if SWIGLU:
            z2 = dot(kt, w2t, PRECISION, EMULATE)
            g2 += dot(tl.trans(kt), cast(back * act, kind, EMULATE), PRECISION, EMULATE)
            g1 += dot(tl.trans(kt), cast(back * z2 * slope, kind, EMULATE), PRECISION, EMULATE)
            g_last += dot(tl.trans(cast(act * z2, kind, EMULATE)), vt, PRECISION, EMULATE)
        else:
            g1 += dot(tl.trans(kt), cast(back * slope, kind, EMULATE), PRECISION, EMULATE)
            g_last += dot(tl.trans(cast(act, kind, EMULATE)), vt, PRECISION, EMULATE)
    parts: tl.constexpr = 3 if SWIGLU else 2
    heads = tl.num_programs(1) // (D // HB)
    target = partial + ((batch * heads + head) * tl.num_programs(0) + split) * (parts * D * D)
    if SWIGLU:
        tl.store(target + D * D + enter, g2 * (s1 * s_last * peak))
        s_last, s1 = s2 * s_last, s1 * s2
    tl.store(target + enter, g1 * (s_last * peak))
    tl.store(target + (parts - 1) * D * D + leave, g_last * (s1 * peak))


@triton.jit(do_not_specialize=["splits"])
def update_kernel(
    partial, w1, w2, w3, updated, packed, scales, splits, rate, D: tl.constexpr, N: tl.constexpr, PACK: tl.constexpr
):
    """updated (n, B, H, D, D) fp32 = w + rate * (sum of the partials, in their order).

    Grid (n, heads, B). PACK: also packed = updated / max|updated| in fp16 with that maximum in scales (n, B, H):
    fp16 keeps the update (bf16 would lose a fifth of it), and the division keeps any size of weights in its range.
    """
    which, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    cell = tl.arange(0, D)[:, None] * D + tl.arange(0, D)[None, :]
    if which == 0:
        w = tl.load(w1 + head * D * D + cell).to(tl.float32)
    elif which == 1:
        w = tl.load(w2 + head * D * D + cell).to(tl.float32)
    else:
        w = tl.load(w3 + head * D * D + cell).to(tl.float32)
    source = partial + (batch * heads + head) * splits * (N * D * D) + which * D * D
    total = tl.zeros([D, D], tl.float32)
    for split in range(0, splits):
        total += tl.load(source + split * (N * D * D) + cell)
    w += rate * total
    slot = (which * tl.num_programs(2) + batch) * heads + head
    tl.store(updated + slot * D * D + cell, w)
    if PACK:
        largest = tl.maximum(tl.max(tl.max(tl.abs(w), 1), 0), 1e-30)
        tl.store(scales + slot, largest)
        tl.store(packed + slot * D * D + cell, (w / largest).to(tl.float16))
