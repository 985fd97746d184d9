"""What the fused kernels are compared with and how; shared by the interpreter's and the GPU's tests."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import _path  # noqa: E402, F401  (a machine that only lends its GPU has nothing installed)

from comfy_ttt.kernels import ttt_mlp2, ttt_swiglu  # noqa: E402
from comfy_ttt.kernels.reference import ttt_reference  # noqa: E402

OPS = {"swiglu": (ttt_swiglu, 3), "mlp2": (ttt_mlp2, 2)}

# Relative norms. fp16: its own rounding of the output is 3e-4 and of the products 5e-4. bf16: its rounding of the
# output is 1.7e-3, and the step's dots are in bf16.
OUT_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
WEIGHT_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def inputs(batch, heads, dim, grid, text, inner, dtype, *, conv=True, device="cpu", seed=0):
    """q, k, v as strided views of one fused projection, as the hosts give them; weights and convolutions fp32."""
    g = torch.Generator().manual_seed(seed)
    n, c = text + grid[0] * grid[1], heads * dim
    fused = torch.randn(batch, n, 3 * c, generator=g)
    fused[..., c : 2 * c] += 2 * torch.randn(c, generator=g)
    weights = [torch.randn(heads, dim, dim, generator=g) * 0.2 for _ in range(OPS[inner][1])]
    convs = [(torch.randn(c, 1, 3, 3, generator=g) * 0.2, torch.randn(c, generator=g) * 0.2) for _ in "qk"]
    q, k, v = fused.to(device, dtype).chunk(3, dim=-1)
    convs = [tuple(x.to(device) for x in pair) for pair in convs] if conv else [None, None]
    return q, k, v, [w.to(device) for w in weights], convs


def exact(q, k, v, weights, convs, grid, text, inner):
    """The reference in fp64 on the same rounded inputs: (out, updated weights (n, B, H, d, d))."""
    convs = [None if pair is None else tuple(x.double() for x in pair) for pair in convs]
    wide = [x.double() for x in (q, k, v)], tuple(w.double() for w in weights)
    out, updated = ttt_reference(*wide[0], wide[1], *convs, grid, text, inner, "instance")
    return out, torch.stack(updated)


def relative(ours, truth):
    ours, truth = ours.detach().double(), truth.detach().double()
    return float((ours - truth).norm() / truth.norm())


def assert_close_to_exact(out, updated, q, k, v, weights, convs, grid, text, inner):
    truth, truth_updated = exact(q, k, v, weights, convs, grid, text, inner)
    assert out.dtype == q.dtype and updated.dtype == torch.float32
    assert relative(out, truth) < OUT_TOLERANCE[q.dtype]
    for ours, theirs in zip(updated, truth_updated, strict=True):
        assert relative(ours, theirs) < WEIGHT_TOLERANCE[q.dtype]


def gradients(run, tensors, cotangents):
    """Gradients of every tensor for the outputs' cotangents; run(*tensors) -> (out, updated)."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    outputs = run(*leaves)
    return torch.autograd.grad(outputs, leaves, [c.to(o.dtype) for c, o in zip(cotangents, outputs, strict=True)])


def check_gradients(inner, dtype, batch, heads, dim, grid, text, conv, *, device="cpu", tolerance):
    """Every gradient of backend triton against the reference's in fp64, cotangents on output and fast weights."""
    q, k, v, weights, convs = inputs(batch, heads, dim, grid, text, inner, dtype, conv=conv, device=device)
    n = len(weights)
    flat = [q, k, v, *weights, *(x for pair in convs if pair for x in pair)]
    g = torch.Generator().manual_seed(1)
    shapes = q.shape, (n, batch, heads, dim, dim)
    cotangents = [torch.randn(shape, generator=g).to(dtype).double().to(device) for shape in shapes]

    def split(rest):
        pairs = rest[n:]
        return list(rest[:n]), [tuple(pairs[:2]), tuple(pairs[2:])] if pairs else [None, None]

    def fused(q, k, v, *rest):
        weights, convs = split(rest)
        out, updated = OPS[inner][0](
            q, k, v, *weights, *convs, grid=grid, text_tokens=text, backend="triton", return_fast_weights=True
        )
        return out, torch.stack(updated)

    def truth(q, k, v, *rest):
        return exact(q, k, v, *split(rest), grid, text, inner)

    ours = gradients(fused, flat, cotangents)
    theirs = gradients(truth, [x.double() for x in flat], cotangents)
    wrong = {i: r for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if (r := relative(a, b)) >= tolerance}
    assert not wrong, wrong
    assert all(a.dtype == x.dtype for a, x in zip(ours, flat, strict=True))
