"""A small VAE of SD3's latents with random weights, in the two files that ComfyUI's Load VAE calls taesd3."""

import torch
from safetensors.torch import save_file
from torch import nn


def _conv(a, b, **kwargs):
    return nn.Conv2d(a, b, 3, padding=1, **kwargs)


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(_conv(64, 64), nn.ReLU(), _conv(64, 64), nn.ReLU(), _conv(64, 64))


def _stage(first):
    return [first, *(_Block() for _ in range(3))]


def write_vae(folder, channels=16, seed=0):
    """Writes taesd3_encoder.safetensors and taesd3_decoder.safetensors; pictures are 8 times the latent's size."""
    torch.manual_seed(seed)
    down = [m for _ in range(3) for m in _stage(_conv(64, 64, stride=2, bias=False))]
    encoder = nn.Sequential(_conv(3, 64), _Block(), *down, _conv(64, channels))
    up = [m for i in range(3) for m in (*(_Block() for _ in range(3)), nn.Identity(), _conv(64, 64, bias=False))]
    decoder = nn.Sequential(nn.Identity(), _conv(channels, 64), nn.ReLU(), *up, _Block(), _conv(64, 3))
    folder.mkdir(parents=True, exist_ok=True)
    for name, module in (("encoder", encoder), ("decoder", decoder)):
        save_file(module.state_dict(), folder / f"taesd3_{name}.safetensors")
