"""One TTT layer against softmax attention: fused, plain torch, torch.compile, and PyTorch's SDPA.

    python benchmarks/layer.py                                   on a GPU: N = 1024 to 65536, self and joint, B = 1, 2
    python benchmarks/layer.py --device cpu --tokens 1024 4096 16384

Refuses to print speed when a backend's numbers are wrong. Appends one JSON line per shape to results.jsonl. Bytes are
those that any implementation must move (k twice, as the statistics come first; v, q, out); the copy bandwidth and the
matrix rate they are shares of are measured in the same run.
"""

from __future__ import annotations

import argparse
import math
import sys

import _path  # noqa: F401
import torch
import torch.nn.functional as F
from _measure import append, copy_bandwidth, machine, matrix_rate, milliseconds, peak_mib

from comfy_ttt.kernels import backends, ttt_swiglu

HEADS, DIM = 24, 64
GATE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 8e-3}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def grid_of(image: int) -> tuple[int, int]:
    """The squarest grid of this many tokens."""
    h = next(h for h in range(math.isqrt(image), 0, -1) if image % h == 0)
    return h, image // h


def make(batch: int, image: int, text: int, dtype: torch.dtype, device: torch.device):
    """q, k, v as views of one fused projection, weights as after some training."""
    g = torch.Generator(device).manual_seed(0)
    c = HEADS * DIM

    def rand(*shape, scale=1.0):
        return torch.randn(*shape, generator=g, device=device) * scale

    fused = rand(batch, text + image, 3 * c).to(dtype)
    weights = [rand(HEADS, DIM, DIM, scale=DIM**-0.5) for _ in range(3)]
    convs = [(rand(c, 1, 3, 3, scale=0.2), rand(c, scale=0.2)) for _ in "qk"]
    return [*fused.chunk(3, dim=-1), *weights, *convs]


def softmax(q, k, v):
    q, k, v = (x.unflatten(2, (HEADS, DIM)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def calls(inputs, grid, text, kinds, compiled):
    def ttt(backend, function=ttt_swiglu):
        return lambda: function(*inputs, grid=grid, text_tokens=text, backend=backend)

    made = {
        "sdpa": lambda: softmax(*inputs[:3]),
        "torch": ttt("torch"),
        "compiled": ttt("torch", compiled),
        "fused": ttt("triton"),
    }
    return {kind: made[kind] for kind in kinds}


def gate(kinds, dtype, device, compiled) -> dict[str, float]:
    """Relative error of each kind against the reference in fp64 on an odd shape; raises SystemExit when one is wrong."""
    grid, text = (19, 21), 13
    inputs = make(2, grid[0] * grid[1], text, dtype, device)
    double = [tuple(y.double() for y in x) if isinstance(x, tuple) else x.double() for x in inputs]
    truth = ttt_swiglu(*double, grid=grid, text_tokens=text, backend="torch")
    errors = {}
    for kind, call in calls(inputs, grid, text, [k for k in kinds if k != "sdpa"], compiled).items():
        errors[kind] = float((call().double() - truth).norm() / truth.norm())
    wrong = {kind: error for kind, error in errors.items() if not error < GATE[dtype]}
    if wrong:
        sys.exit(f"The correctness gate failed, no speed is printed: relative errors {wrong}, allowed {GATE[dtype]}.")
    return errors


def exponent(points: dict[int, float]) -> float | None:
    """Slope of log time over log N, least squares."""
    if len(points) < 2:
        return None
    xs, ys = [math.log(n) for n in points], [math.log(t) for t in points.values()]
    mx, my = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mx) * (y - my) for x, y in zip(xs, ys)) / sum((x - mx) ** 2 for x in xs)


@torch.no_grad()
def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--dtype", choices=DTYPES)
    p.add_argument("--tokens", type=int, nargs="+", help="image tokens")
    p.add_argument("--text", type=int, nargs="+", default=None, help="text tokens; 0 is a self-attention")
    p.add_argument("--batch", type=int, nargs="+")
    p.add_argument("--kinds", nargs="+", choices=["sdpa", "torch", "compiled", "fused"])
    p.add_argument("--repeats", type=int)
    p.add_argument("--no-write", action="store_true", help="print only")
    a = p.parse_args()
    device = torch.device(a.device)
    gpu = device.type == "cuda"
    dtype = DTYPES[a.dtype or ("bf16" if gpu else "fp32")]
    kinds = a.kinds or ["sdpa", "torch", "compiled"] + (["fused"] if gpu else [])
    for status in backends():
        print(f"backend {status.name}: {'available' if status.available else status.reason}")
    # a shape per compilation, as the plain torch layer gets its best code then
    compiled = torch.compile(ttt_swiglu, dynamic=False, fullgraph=True) if "compiled" in kinds else None
    errors = gate(kinds, dtype, device, compiled)
    bandwidth, rate = copy_bandwidth(device), matrix_rate(device, dtype)
    here = machine(device)
    print(f"{here['device']}, torch {here['torch']}: copy {bandwidth:.0f} GB/s, matrix {rate:.3f} TFLOP/s, errors {errors}")
    series: dict[tuple, dict[str, dict[int, float]]] = {}
    for batch in a.batch or ((1, 2) if gpu else (1,)):
        for text in a.text if a.text is not None else ((0, 333) if gpu else (0,)):
            for image in a.tokens or (1024, 4096, 16384, 65536) if gpu else a.tokens or (1024, 4096):
                n = image + text
                inputs = make(batch, image, text, dtype, device)
                run = calls(inputs, grid_of(image), text, kinds, compiled)
                repeats = a.repeats or (20 if gpu and n < 50000 else 5 if gpu else 3 if n < 8000 else 1)
                ms = dict.fromkeys(kinds, 0.0)
                if gpu:
                    ms = {kind: milliseconds(call, device, repeats) for kind, call in run.items()}
                else:  # alternating, so that a neighbour's load does not fall on one kind alone
                    for call in run.values():
                        if call is not run.get("sdpa"):
                            call()
                    rounds = [{k: milliseconds(call, device, 1) for k, call in run.items()} for _ in range(repeats)]
                    ms = {k: sorted(r[k] for r in rounds)[len(rounds) // 2] for k in kinds}
                gigabytes = 5 * batch * n * HEADS * DIM * inputs[0].element_size() / 1e9
                teraflop = 18 * batch * n * HEADS * DIM**2 / 1e12
                record = {
                    "benchmark": "layer", "batch": batch, "image_tokens": image, "text_tokens": text, "heads": HEADS,
                    "head_dim": DIM, "dtype": str(dtype).removeprefix("torch."), "repeats": repeats,
                    "ms": {k: round(t, 4) for k, t in ms.items()},
                    "peak_mib": {k: m if m is None else round(m, 1) for k, m in ((k, peak_mib(c, device)) for k, c in run.items())}
                    if gpu else None,
                    "copy_share": {k: round(gigabytes / ms[k] * 1e3 / bandwidth, 4) for k in kinds if k != "sdpa"},
                    "matrix_share": {k: round(teraflop / ms[k] * 1e3 / rate, 4) for k in kinds if k != "sdpa"},
                    "copy_gbps": round(bandwidth, 1), "matrix_tflops": round(rate, 3), "errors": errors, **here,
                }
                for kind, t in ms.items():
                    series.setdefault((batch, text), {}).setdefault(kind, {})[n] = t
                ratios = ", ".join(f"SDPA / {k} {ms['sdpa'] / ms[k]:.2f}" for k in kinds if k != "sdpa" and "sdpa" in kinds)
                print(f"B={batch} N={image}+{text}: " + ", ".join(f"{k} {t:.3f} ms" for k, t in ms.items()) + "; " + ratios)
                if not a.no_write:
                    append(record)
    for (batch, text), kinds_series in series.items():
        slopes = {k: round(s, 2) for k, points in kinds_series.items() if (s := exponent(points)) is not None}
        print(f"B={batch} text={text}: growth exponents {slopes}")
        if slopes and not a.no_write:
            sizes = sorted(next(iter(kinds_series.values())))
            append({"benchmark": "layer growth", "batch": batch, "text_tokens": text, "tokens": sizes, "exponent": slopes, **here})


if __name__ == "__main__":
    main()
