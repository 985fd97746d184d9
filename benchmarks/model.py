"""A whole SD3.5-Medium-shaped forward: softmax against the presets paper, self and all, eager and compiled.

    python benchmarks/model.py            on a GPU: 1024, 2048 and 4096 pixels, two images (guidance) at once
    python benchmarks/model.py --device cpu   a scaled-down one

Random weights, so it says nothing about pictures. Refuses to print speed when the fused and the plain model disagree.
Appends one JSON line per size, preset and mode to results.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import _path  # noqa: F401
import torch
from _measure import append, machine, milliseconds, peak_mib
from _mmdit import MMDiT, Shape

from comfy_ttt.kernels import backends

PRESETS = ("none", "self", "paper", "all")
SMALL = Shape(depth=6, heads=4, head_dim=64, dual=3, text_width=256)


def build(shape: Shape, preset: str, dtype: torch.dtype, device: torch.device, backend: str) -> MMDiT:
    """Projections in `dtype`, the TTT layers' own parameters in fp32; the same weights for the same preset."""
    torch.manual_seed(0)
    with torch.device(device):
        model = MMDiT(shape, preset).eval().requires_grad_(False)
    for module in model.modules():
        if getattr(module, "ttt", None) is not None:
            module.backend = backend
        else:
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, torch.nn.Parameter(parameter.to(dtype), requires_grad=False))
    return model


def inputs(shape: Shape, pixels: tuple[int, int], batch: int, text: int, dtype: torch.dtype, device: torch.device):
    g = torch.Generator(device).manual_seed(1)
    sizes = (batch, 16, pixels[0] // 8, pixels[1] // 8), (batch, text, shape.text_width), (batch, shape.width)
    return [torch.randn(s, generator=g, device=device).to(dtype) for s in sizes]


def gate(shape: Shape, dtype: torch.dtype, device: torch.device, backend: str, text: int) -> float:
    """Fused against plain, preset all, an odd size. 24 bf16 blocks multiply rounding: 5e-2 is far below any fault."""
    made = inputs(shape, (208, 304), 2, text, dtype, device)
    outs = [build(shape, "all", dtype, device, b)(*made).double() for b in (backend, "torch")]
    error = float((outs[0] - outs[1]).norm() / outs[1].norm())
    if not error < 5e-2:
        sys.exit(f"The correctness gate failed, no speed is printed: fused and plain model differ by {error:.1e}.")
    return error


def measure(shape, presets, mode, made, dtype, device, backend, repeats):
    """(milliseconds, peak MiB) of each preset. On the CPU presets alternate, so that a neighbour's load hits all alike;
    on a GPU they come one after the other, as two models at once would disturb the peak."""
    times: dict[str, list[float]] = {}
    peaks: dict[str, float | None] = {}
    models: dict[str, MMDiT] = {}
    for preset in presets:
        model = build(shape, preset, dtype, device, backend)
        if mode == "compiled":  # block by block, as hosts do: three kinds of block instead of 24 of them
            for block in model.blocks:
                block.compile()
        model(*made)
        peaks[preset] = peak_mib(lambda: model(*made), device)
        if device.type == "cuda":
            times[preset] = [milliseconds(lambda: model(*made), device, repeats)]
            del model
        else:
            models[preset] = model
    for _ in range(repeats if models else 0):
        for preset, model in models.items():
            times.setdefault(preset, []).append(milliseconds(lambda: model(*made), device, 1))
    return {preset: statistics.median(t) for preset, t in times.items()}, peaks


@torch.no_grad()
def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--pixels", type=int, nargs="+")
    p.add_argument("--presets", nargs="+", choices=PRESETS, default=PRESETS)
    p.add_argument("--modes", nargs="+", choices=["eager", "compiled"])
    p.add_argument("--batch", type=int, default=2)
    p.add_argument("--text", type=int, default=333)
    p.add_argument("--repeats", type=int)
    p.add_argument("--no-write", action="store_true", help="print only")
    a = p.parse_args()
    device = torch.device(a.device)
    gpu = device.type == "cuda"
    shape, dtype = (Shape(), torch.bfloat16) if gpu else (SMALL, torch.float32)
    for status in backends():
        print(f"backend {status.name}: {'available' if status.available else status.reason}")
    backend = "triton" if backends()[0].available else "torch"
    error, here = gate(shape, dtype, device, backend, a.text), machine(device)
    print(f"{here['device']}, torch {here['torch']}, {shape}, backend {backend}, error {error:.1e}")
    for pixels in a.pixels or ((1024, 2048, 4096) if gpu else (256, 512)):
        made = inputs(shape, (pixels, pixels), a.batch, a.text, dtype, device)
        repeats = a.repeats or (10 if gpu and pixels <= 1024 else 3)
        for mode in a.modes or (("eager", "compiled") if gpu else ("eager",)):
            times, peaks = measure(shape, a.presets, mode, made, dtype, device, backend, repeats)
            for preset, ms in times.items():
                ratio = times["none"] / ms if "none" in times else None
                peak = peaks[preset]
                record = {
                    "benchmark": "model", "pixels": pixels, "preset": preset, "mode": mode, "batch": a.batch,
                    "text_tokens": a.text, "depth": shape.depth, "width": shape.width, "backend": backend,
                    "dtype": str(dtype).removeprefix("torch."), "ms": round(ms, 3),
                    "speedup": ratio and round(ratio, 3), "peak_mib": peak and round(peak, 1), "error": error, **here,
                }
                note = "" if ratio is None else f", {ratio:.2f} of softmax's speed"
                print(f"{pixels} px {preset} {mode}: {ms:.2f} ms{note}" + (f", peak {peak:.0f} MiB" if peak else ""))
                if not a.no_write:
                    append(record)


if __name__ == "__main__":
    main()
