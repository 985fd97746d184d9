"""Pictures put together from pictures: a labelled row, and a sentence where a picture cannot be had. (H, W, 3) float32 in 0..1."""

from __future__ import annotations

import textwrap

import numpy as np
from PIL import Image, ImageDraw, ImageFont

MINIMUM = 256  # pixels; smaller pictures are enlarged without smoothing, so that a label fits and pixels stay visible
_INK, _PAPER = (30, 32, 36), (255, 255, 255)


def side_by_side(pictures: list[np.ndarray], labels: list[str], gap: int = 8) -> np.ndarray:
    """Pictures (H, W, 3) in 0..1 of one size, at that size, each under its label, as one picture of the same kind."""
    shown = [_enlarged(p) for p in pictures]
    height, width = shown[0].shape[:2]
    strip = max(24, height // 24)
    row = Image.new("RGB", (len(shown) * width + gap * (len(shown) - 1), height + strip), _PAPER)
    pen = ImageDraw.Draw(row)
    for i, (picture, label) in enumerate(zip(shown, labels, strict=True)):
        left = i * (width + gap)
        row.paste(Image.fromarray(np.round(picture * 255).astype(np.uint8)), (left, strip))
        pen.text((left + width / 2, strip / 2), _fitting(pen, label, width, strip), fill=_INK, anchor="mm", font=_font(strip))
    return _floats(row)


def message(text: str, width: int = 512) -> np.ndarray:
    """A sentence as a picture, for an output that has no picture to give."""
    lines = textwrap.wrap(text, 56)
    page = Image.new("RGB", (width, 24 * len(lines) + 32), _PAPER)
    ImageDraw.Draw(page).multiline_text((16, 16), "\n".join(lines), fill=_INK, font=_font(24), spacing=8)
    return _floats(page)


def _enlarged(picture: np.ndarray) -> np.ndarray:
    times = -(-MINIMUM // picture.shape[1])
    return np.clip(picture, 0, 1).repeat(times, axis=0).repeat(times, axis=1)


def _font(strip: int):
    return ImageFont.load_default(strip * 0.62)


def _fitting(pen: ImageDraw.ImageDraw, label: str, width: int, strip: int) -> str:
    if pen.textlength(label, font=_font(strip)) <= width:
        return label
    while label and pen.textlength(label + "...", font=_font(strip)) > width:
        label = label[:-1]
    return label + "..."


def _floats(picture: Image.Image) -> np.ndarray:
    return np.asarray(picture).astype(np.float32) / 255
