"""Pieces shared by the Triton kernels: rounding, dot products, and the convolution that slides over grid rows.

Importing this imports Triton; triton_backend does so at first use and never earlier.
"""

import triton
import triton.language as tl


@triton.jit
def cast(x, dtype: tl.constexpr, EMULATE: tl.constexpr):
    """x rounded to dtype, to nearest even. EMULATE: the interpreter truncates bf16, so the bits are rounded here."""
    if x.dtype == dtype:
        return x
    x = x.to(tl.float32)
    if EMULATE and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr, EMULATE: tl.constexpr):
    """a @ b with fp32 sums. EMULATE: the interpreter multiplies the bit patterns of bf16, so it gets fp32 operands."""
    if EMULATE:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def load_weight(pointers, kind: tl.constexpr, SCALE: tl.constexpr, EMULATE: tl.constexpr):
    """A weight tile in `kind`. SCALE: divided by its largest magnitude, which is returned (1.0 otherwise)."""
    w = tl.load(pointers).to(tl.float32)
    largest = 1.0
    if SCALE:
        largest = tl.maximum(tl.max(tl.max(tl.abs(w), 1), 0), 1e-30)
        w = w / largest
    return cast(w, kind, EMULATE), largest


@triton.jit
def load_peak(peaks, splits, channels, least: tl.constexpr):
    """Largest of (splits, C) magnitudes over all splits and the [D] channels of the pointers, and at least `least`."""
    largest = tl.load(peaks)
    for split in range(1, splits):
        largest = tl.maximum(largest, tl.load(peaks + split * channels))
    return tl.maximum(tl.max(largest, 0), least)


@triton.jit
def sigmoid(z):
    r = tl.rsqrt(1.0 + tl.exp(-z))  # squared below: one special-function instruction, where a division takes eight
    return r * r


@triton.jit
def silu_and_slope(z, scale):
    """silu(z scale) / scale and silu'(z scale)."""
    s = sigmoid(z * scale)
    return z * s, s * (1.0 + z * scale * (1.0 - s))


@triton.jit
def patch(program, text, height, width, rows, strips, image_programs, T: tl.constexpr):
    """Which tokens a program of the keys and apply kernels owns: up to `rows` rows of T tokens.

    The first image_programs programs tile the (height, width) grid in strips T wide; the rest treat the text as rows
    of T tokens. Returns (is_image, first token, end token, row length, number of rows, first row, first column).
    """
    is_image = program < image_programs
    index = tl.where(is_image, program, program - image_programs)
    across = tl.where(is_image, strips, 1)
    y0 = (index // across) * rows
    x0 = (index % across) * T
    first = tl.where(is_image, text, 0)
    end = tl.where(is_image, text + height * width, text)
    length = tl.where(is_image, width, T)
    count = tl.where(is_image, height, tl.cdiv(text, T))
    return is_image, first, end, length, count, y0, x0


@triton.jit
def load_row(base, y, x, first, end, length, count, stride, centre):
    """Tokens (y, x) minus centre in fp32, zero outside of the grid (zero padding comes after the key norm). [T, D]"""
    row = y + tl.zeros_like(x)  # a tensor, as y may be a Python int in the interpreter
    token = first + row * length + x
    inside = (row >= 0) & (row < count) & (x >= 0) & (x < length) & (token < end)
    value = tl.load(base + token.to(tl.int64)[:, None] * stride, mask=inside[:, None], other=0.0).to(tl.float32)
    if centre is not None:
        value = tl.where(inside[:, None], value - centre[None, :], 0.0)
    return value


@triton.jit
def slide(base, y, x, first, end, length, count, stride, centre, taps, channels, is_image, here, below):
    """Feeds grid row y to the three output rows it touches and returns the finished row y - 1.

    `here` holds what rows y - 2 and y - 1 gave to output row y - 1, `below` what row y - 1 gave to output row y.
    taps points at this head's part of the (9, C) convolution weights, taken as zero for text.
    Three loads a row instead of nine; x itself (the residual) is added to the middle tap.
    """
    column = tl.arange(0, base.shape[1])
    keep = column < tl.where(is_image, channels, 0)
    left = load_row(base, y, x - 1, first, end, length, count, stride, centre)
    middle = load_row(base, y, x, first, end, length, count, stride, centre)
    right = load_row(base, y, x + 1, first, end, length, count, stride, centre)
    done = here
    done += tl.load(taps + 6 * channels + column, mask=keep, other=0.0).to(tl.float32)[None, :] * left
    done += tl.load(taps + 7 * channels + column, mask=keep, other=0.0).to(tl.float32)[None, :] * middle
    done += tl.load(taps + 8 * channels + column, mask=keep, other=0.0).to(tl.float32)[None, :] * right
    here = below + middle
    here += tl.load(taps + 3 * channels + column, mask=keep, other=0.0).to(tl.float32)[None, :] * left
    here += tl.load(taps + 4 * channels + column, mask=keep, other=0.0).to(tl.float32)[None, :] * middle
    here += tl.load(taps + 5 * channels + column, mask=keep, other=0.0).to(tl.float32)[None, :] * right
    below = tl.load(taps + column, mask=keep, other=0.0).to(tl.float32)[None, :] * left
    below += tl.load(taps + channels + column, mask=keep, other=0.0).to(tl.float32)[None, :] * middle
    below += tl.load(taps + 2 * channels + column, mask=keep, other=0.0).to(tl.float32)[None, :] * right
    return done, here, below


@triton.jit
def store_row(base, value, y, x, first, end, length, count, stride):
    row = y + tl.zeros_like(x)
    token = first + row * length + x
    inside = (row < count) & (x < length) & (token < end)
    tl.store(base + token.to(tl.int64)[:, None] * stride, value, mask=inside[:, None])
