"""What the digit demo needs in place of text encoders and a VAE.

The tiny model is an SD3.5-shaped flow model whose 16 latent channels are a 4x4
pixel-unshuffle of a grey picture, so pictures and latents map onto each other
exactly, and whose prompt is one digit.

Two kinds of latent appear, as in ComfyUI:
- *model latent*: what the network sees; grey values in [-1, 1], pixel-unshuffled;
- *LATENT samples*: what travels between nodes, ``model / 1.5305 + 0.0609`` (the
  affine map of ComfyUI's SD3 latent format).
Both have shape (B, 16, H/4, W/4) for a picture of H x W pixels. ComfyUI's
EmptySD3LatentImage divides by 8, so "256 x 256" there is a 128 x 128 picture here.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.nn.functional as F

from ..ttt_core import trajectory
from ..ttt_core.errors import TTTError

MODEL = Path(__file__).parent / "models" / "ttt_tiny_digits.safetensors"
LATENT_CHANNELS = 16
UNSHUFFLE = 4                 # 4 x 4 pixels = 16 channels
SCALE, SHIFT = 1.5305, 0.0609  # ComfyUI's SD3 latent format
FLOW_SHIFT = 3.0              # ComfyUI's SD3 sampling shift
WIDTH = 64                    # width of the context and the pooled vector
TOKENS = 8                    # context tokens per prompt
CELLS, MARGIN = 8, 1          # digits are 8 x 8 cells, drawn with a margin of one cell
HOLD_OUT = 180                # the last pictures of the data set, never trained on


# ---------------------------------------------------------------- prompt

def parse_prompt(text: str) -> int | None:
    """The digit named by ``text``, or None for an empty prompt (no condition).

    Raises TTTError (a ValueError), in one sentence, for anything else.
    """
    word = text.strip()
    if not word:
        return None
    if len(word) == 1 and word in "0123456789":
        return int(word)
    raise TTTError(
        f"Demo prompt must be a digit 0-9 or empty, got {text!r}. "
        "The embedded demo model was trained on scikit-learn's digits and knows nothing else."
    )


@functools.lru_cache(maxsize=1)
def _walsh() -> torch.Tensor:
    """(64, 64) Walsh matrix of +-1 with orthogonal rows; needs no random numbers."""
    index = torch.arange(WIDTH)
    common = index[:, None] & index[None, :]
    parity = sum((common >> bit) & 1 for bit in range(6)) % 2
    return 1.0 - 2.0 * parity.float()


def encode_digits(digits: list[int | None]) -> tuple[torch.Tensor, torch.Tensor]:
    """Conditioning of a batch: context (B, 8, 64) and pooled (B, 64), float32.

    A digit owns one row of a Walsh matrix; each context token adds a row of its
    own, so that tokens differ. None (no condition) is all zeros, hence also what
    ComfyUI's ConditioningZeroOut gives.
    """
    rows = _walsh()
    context = torch.zeros(len(digits), TOKENS, WIDTH)
    pooled = torch.zeros(len(digits), WIDTH)
    for i, digit in enumerate(digits):
        if digit is not None:
            pooled[i] = rows[1 + digit]
            context[i] = (rows[1 + digit] + rows[16:16 + TOKENS]) * 0.5 ** 0.5
    return context, pooled


def encode_prompt(text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Conditioning of one prompt: context (1, 8, 64) and pooled (1, 64), float32."""
    return encode_digits([parse_prompt(text)])


# ---------------------------------------------------------------- pictures and latents

def model_to_samples(latent: torch.Tensor) -> torch.Tensor:
    """Model latent -> ComfyUI LATENT samples, any shape."""
    return latent / SCALE + SHIFT


def samples_to_model(samples: torch.Tensor) -> torch.Tensor:
    """ComfyUI LATENT samples -> model latent, any shape."""
    return (samples - SHIFT) * SCALE


def samples_to_picture(samples: torch.Tensor) -> torch.Tensor:
    """LATENT samples (B, 16, h, w) -> grey picture (B, 4h, 4w, 3) in [0, 1].

    Raises TTTError when the latent does not have 16 channels.
    """
    if samples.ndim != 4 or samples.shape[1] != LATENT_CHANNELS:
        raise TTTError(
            f"The demo decoder needs a latent of shape (B, {LATENT_CHANNELS}, h, w), got {tuple(samples.shape)}."
            " Use EmptySD3LatentImage and the embedded demo model."
        )
    grey = F.pixel_shuffle(samples_to_model(samples.float()), UNSHUFFLE)  # [B, 1, 4h, 4w]
    grey = ((grey + 1) / 2).clamp(0, 1)
    return grey[:, 0, :, :, None].expand(-1, -1, -1, 3).contiguous()


def grey_to_model(grey: torch.Tensor) -> torch.Tensor:
    """Grey pictures (B, 1, H, W) in [0, 1] -> model latent (B, 16, H/4, W/4)."""
    return F.pixel_unshuffle(grey * 2 - 1, UNSHUFFLE)


def picture_to_samples(picture: torch.Tensor) -> torch.Tensor:
    """Picture (B, H, W, 3 or 1) in [0, 1] -> LATENT samples (B, 16, H/4, W/4).

    Colours are averaged to grey. Raises TTTError unless H and W are multiples of 4.
    """
    height, width = picture.shape[1:3]
    if height % UNSHUFFLE or width % UNSHUFFLE:
        raise TTTError(
            f"The demo encoder needs a height and a width that are multiples of {UNSHUFFLE}, got {width} x {height}."
            " Resize or crop the picture first."
        )
    grey = picture.float().mean(dim=-1)[:, None]
    return model_to_samples(grey_to_model(grey))


# ---------------------------------------------------------------- data set and recogniser

def load_digits(hold_out: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """scikit-learn's digits: pictures (n, 8, 8) in [0, 1] and labels (n,).

    The data set ships inside scikit-learn (1797 grey 8 x 8 pictures); nothing is
    downloaded. ``hold_out`` picks the last 180, which training never sees.
    Raises TTTError with the remedy when scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise TTTError("The demo data set needs scikit-learn: run `pip install scikit-learn`.") from error
    data = load()
    part = slice(-HOLD_OUT, None) if hold_out else slice(None, -HOLD_OUT)
    pictures = torch.from_numpy(data.images[part]).float() / 16
    return pictures, torch.from_numpy(data.target[part]).long()


def draw(cells: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Digits (n, 8, 8) in [0, 1] -> grey pictures (n, 1, height, width) in [0, 1].

    The digit, with a margin of one cell, fills the largest centred square;
    the rest is background (0).
    """
    side = min(height, width)
    cells = F.pad(cells[:, None], (MARGIN,) * 4)
    square = F.interpolate(cells, size=(side, side), mode="bicubic", align_corners=False).clamp(0, 1)
    left, top = (width - side) // 2, (height - side) // 2
    return F.pad(square, (left, width - side - left, top, height - side - top))


def undraw(picture: torch.Tensor) -> torch.Tensor:
    """Pictures (B, H, W, 3) in [0, 1] -> digits (B, 8, 8) in [0, 1], the inverse of `draw`."""
    grey = picture.float().mean(dim=-1)[:, None]
    height, width = grey.shape[-2:]
    side = min(height, width)
    left, top = (width - side) // 2, (height - side) // 2
    square = grey[:, :, top:top + side, left:left + side]
    whole = F.interpolate(square, size=(CELLS + 2 * MARGIN,) * 2, mode="area")
    return whole[:, 0, MARGIN:-MARGIN, MARGIN:-MARGIN]


def recogniser():
    """A function from pictures (B, H, W, 3) to the digits (B,) read in them.

    A support vector machine fitted on the training digits as they look after
    `draw` and `undraw`; about 96 % right on the hold-out digits.
    """
    from sklearn.svm import SVC

    cells, labels = load_digits(hold_out=False)
    seen = undraw(draw(cells, 64, 64)[:, 0, :, :, None])
    machine = SVC(gamma=0.2).fit(seen.flatten(1).numpy(), labels.numpy())
    return lambda picture: torch.from_numpy(machine.predict(undraw(picture).flatten(1).numpy()))


# ---------------------------------------------------------------- sampling without a UI

def flow_sigmas(steps: int, shift: float = FLOW_SHIFT) -> torch.Tensor:
    """(steps + 1,) noise levels from 1 to 0 under SD3's time shift."""
    return trajectory.flow_sigmas(steps, shift)


@torch.no_grad()
def sample(velocity, digits: list[int | None], height: int, width: int, *, steps: int = 20, cfg: float = 3.0,
           seed: int = 0) -> torch.Tensor:
    """Plain Euler sampling with classifier-free guidance; LATENT samples (B, 16, height/4, width/4).

    ``velocity(latent, timestep, context, pooled)`` is the model: model latent
    (B, 16, h, w), timestep (B,) = sigma * 1000, and the result shaped as the latent.
    ``height`` and ``width`` are the picture's, in pixels: multiples of 8 for a
    diffusers model, of 4 for one that pads odd latents itself, as ComfyUI's does.
    """
    context, pooled = encode_digits(digits)
    if cfg != 1.0:
        empty = encode_digits([None] * len(digits))
        context, pooled = torch.cat([context, empty[0]]), torch.cat([pooled, empty[1]])
    generator = torch.Generator().manual_seed(seed)
    shape = (len(digits), LATENT_CHANNELS, height // UNSHUFFLE, width // UNSHUFFLE)
    x = torch.randn(shape, generator=generator)
    sigmas = flow_sigmas(steps)
    for now, then in zip(sigmas[:-1], sigmas[1:]):
        batch = x if cfg == 1.0 else torch.cat([x, x])
        v = velocity(batch, now.expand(len(batch)) * 1000, context, pooled)
        if cfg != 1.0:
            cond, uncond = v.chunk(2)
            v = uncond + cfg * (cond - uncond)
        x = x + (then - now) * v
    return model_to_samples(x)
