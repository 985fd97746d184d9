"""Kernels for the keys: statistics over all tokens, then key norm and convolution in one pass."""

import triton
import triton.language as tl

from .triton_common import cast, load_row, patch, slide, store_row

# Numbers that change from picture to picture: specialising on them would compile again for each size.
SIZES = ["tokens", "chunk", "splits", "text", "height", "width", "rows", "strips", "image_programs"]


@triton.jit(do_not_specialize=SIZES)
def stats_kernel(
    k, v, means, squares, peaks, tokens, chunk, splits, channels, k_batch, k_token, v_batch, v_token,
    T: tl.constexpr, CB: tl.constexpr, PEAK: tl.constexpr,
):
    """Mean and sum of squared deviations of one chunk of tokens, per channel.

    Grid (splits, C / CB, B). Each of T lanes runs Welford over every T-th token, then lanes are merged exactly: the
    usual E[x^2] - E[x]^2 loses everything when |mean| is large against the spread. Writes (B, splits, C) fp32 twice.
    PEAK: also the largest |v|, by which fp16 steps divide v so that no product can overflow.
    """
    split, block, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    column = block * CB + tl.arange(0, CB)
    begin = split * chunk
    stop = tl.minimum(begin + chunk, tokens)
    lane = tl.arange(0, T)
    base = k + batch.to(tl.int64) * k_batch + column[None, :]
    mean = tl.zeros([T, CB], tl.float32)
    square = tl.zeros([T, CB], tl.float32)
    values = v + batch.to(tl.int64) * v_batch + column[None, :]
    peak = tl.zeros([T, CB], tl.float32)
    seen = 0.0
    for start in range(begin, stop, T):
        token = start + lane
        inside = (token < stop)[:, None]
        x = tl.load(base + token.to(tl.int64)[:, None] * k_token, mask=inside, other=0.0).to(tl.float32)
        seen += 1.0
        delta = tl.where(inside, x - mean, 0.0)
        mean += delta * (1.0 / seen)
        square += delta * tl.where(inside, x - mean, 0.0)
        if PEAK:
            value = tl.load(values + token.to(tl.int64)[:, None] * v_token, mask=inside, other=0.0).to(tl.float32)
            peak = tl.maximum(peak, tl.abs(value))
    count = stop - begin
    mine = (count // T + tl.where(lane < count % T, 1, 0)).to(tl.float32)[:, None]
    total = tl.sum(mine * mean, 0) / count.to(tl.float32)
    gap = mean - total[None, :]
    spread = tl.sum(square, 0) + tl.sum(mine * gap * gap, 0)
    at = (batch.to(tl.int64) * splits + split) * channels + column
    tl.store(means + at, total)
    tl.store(squares + at, spread)
    if PEAK:
        tl.store(peaks + at, tl.max(peak, 0))


@triton.jit
def merge_stats(means, squares, tokens, chunk, splits, channels, epsilon):
    """All chunks merged in their order into (mean, 1 / sqrt(var + epsilon)); pointers are [D] of the first chunk."""
    mean = tl.load(means)
    square = tl.load(squares)
    seen = tl.minimum(chunk, tokens).to(tl.float32)
    for split in range(1, splits):
        mine = tl.minimum(chunk, tokens - split * chunk).to(tl.float32)
        delta = tl.load(means + split * channels) - mean
        both = seen + mine
        mean += delta * (mine / both)
        square += tl.load(squares + split * channels) + delta * delta * (seen * mine / both)
        seen = both
    return mean, 1.0 / tl.sqrt(square / seen + epsilon)


@triton.jit(do_not_specialize=SIZES)
def keys_kernel(
    k, means, squares, taps, bias, out, tokens, chunk, splits, text, height, width, rows, strips, image_programs,
    channels, k_batch, k_token, epsilon, T: tl.constexpr, D: tl.constexpr, CONV: tl.constexpr, EMULATE: tl.constexpr,
):
    """out = key norm, then x + conv(x) on the image tokens; (B, N, C) contiguous, in the type the dots will use.

    Grid (patches, heads, B). The channel's mean is subtracted before the taps (zero padding is zero after the norm),
    its scale is applied once to the finished sum.
    """
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    is_image, first, end, length, count, y0, x0 = patch(
        tl.program_id(0), text, height, width, rows, strips, image_programs, T
    )
    column = head * D + tl.arange(0, D)
    at = batch * splits * channels + column
    mean, scale = merge_stats(means + at, squares + at, tokens, chunk, splits, channels, epsilon)
    source = k + batch * k_batch + column[None, :]
    target = out + batch * tokens * channels + column[None, :]
    x = x0 + tl.arange(0, T)
    shift = tl.zeros([D], tl.float32)
    if CONV:
        limit = tl.where(is_image, channels, 0)
        shift = tl.load(bias + column, mask=column < limit, other=0.0).to(tl.float32)
        mine = taps + head * D
        here = tl.zeros([T, D], tl.float32)
        below = here
        done, here, below = slide(
            source, y0 - 1, x, first, end, length, count, k_token, mean, mine, channels, is_image, here, below
        )
        done, here, below = slide(
            source, y0, x, first, end, length, count, k_token, mean, mine, channels, is_image, here, below
        )
    for y in range(y0, tl.minimum(y0 + rows, count)):
        if CONV:
            done, here, below = slide(
                source, y + 1, x, first, end, length, count, k_token, mean, mine, channels, is_image, here, below
            )
        else:
            done = load_row(source, y, x, first, end, length, count, k_token, mean)
        value = cast(done * scale[None, :] + shift[None, :], out.dtype.element_ty, EMULATE)
        store_row(target, value, y, x, first, end, length, count, channels)
