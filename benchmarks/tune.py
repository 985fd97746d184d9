"""Looks for better launch configurations on this GPU: python benchmarks/tune.py [--tokens 4096] [--head-dim 64]

Changes one field of the shipped configuration at a time and keeps what is at least 2 % faster; prints the row to put
into kernels/launch_configs.py, and writes nothing. Each candidate's result is compared with the shipped one's first.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import _path  # noqa: F401
import layer
import torch
from _measure import device_name, milliseconds

from comfy_ttt.kernels.triton_launch import fused_forward, launch_config

FIELDS = {
    "programs": (256, 512, 1024, 2048),
    "keys_tile": (16, 32, 64), "keys_warps": (4, 8),
    "step_tile": (32, 64, 128), "step_hidden": (16, 32, 64), "step_warps": (4, 8), "step_stages": (1, 2, 3),
    "apply_tile": (16, 32, 64), "apply_warps": (4, 8),
}


@torch.no_grad()
def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tokens", type=int, default=4096)
    p.add_argument("--text", type=int, default=0)
    p.add_argument("--batch", type=int, default=2)
    p.add_argument("--head-dim", type=int, default=64, choices=(64, 128))
    p.add_argument("--dtype", choices=layer.DTYPES, default="bf16")
    a = p.parse_args()
    device, dtype = torch.device("cuda"), layer.DTYPES[a.dtype]
    layer.DIM = a.head_dim
    q, k, v, *weights, q_conv, k_conv = layer.make(a.batch, a.tokens, a.text, dtype, device)
    grid = layer.grid_of(a.tokens)

    def run(config):
        return fused_forward(q, k, v, weights, q_conv, k_conv, grid, a.text, config)[0]

    best = launch_config(device, a.head_dim, dtype)
    truth, fastest = run(best).float(), milliseconds(lambda: run(best), device, 20)
    print(f"{device_name(device)}: shipped {fastest * 1e3:.1f} us, {best}")
    for field, values in FIELDS.items():
        for value in values:
            config = replace(best, **{field: value})
            if config == best:
                continue
            try:
                error = float((run(config).float() - truth).norm() / truth.norm())
                ms = milliseconds(lambda: run(config), device, 20)
            except Exception as problem:  # too much shared memory and the like: simply not a candidate
                print(f"{field}={value}: {type(problem).__name__}")
                continue
            print(f"{field}={value}: {ms * 1e3:.1f} us, differs by {error:.1e}")
            if error < layer.GATE[dtype] and ms < 0.98 * fastest:
                best, fastest = config, ms
    print(f"best {fastest * 1e3:.1f} us: {best}")


if __name__ == "__main__":
    main()
