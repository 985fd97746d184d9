"""torch.compile: no graph break, one compilation for all sizes; the reference and the fused operator alike."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from comfy_ttt.kernels import registry, triton_backend, ttt_swiglu

from test_reference import make

SIZES = ((3, 4, 2), (5, 4, 3), (4, 6, 2), (7, 3, 5))  # height, width, text


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layer(q, k, v, weights, convs, h, w, text, backend):
    return ttt_swiglu(q, k, v, *weights, *convs, grid=(h, w), text_tokens=text, backend=backend)


def run_all_sizes(compiled, backend, grad):
    for h, w, text in SIZES:
        q, k, v, weights, convs = make(2, 1, 64, (h, w), text, "swiglu", torch.float32)
        if grad:
            for x in (q, k, v, *weights, *convs[0], *convs[1]):
                x.requires_grad_()
        ours = compiled(q, k, v, weights, convs, h, w, text, backend)
        plain = layer(q, k, v, weights, convs, h, w, text, "torch")
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
        if grad:
            leaves = (q, k, v, *weights, *convs[0], *convs[1])
            for a, b in zip(torch.autograd.grad(ours.sum(), leaves), torch.autograd.grad(plain.sum(), leaves), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiler, grad", [("eager", False), ("aot_eager", True)])
def test_the_reference_compiles_once_without_a_break(compiler, grad):
    counter = CompileCounterWithBackend(compiler)
    run_all_sizes(torch.compile(layer, backend=counter, fullgraph=True, dynamic=True), "torch", grad)
    assert counter.frame_count == 1


def test_auto_decides_while_compiling():
    counter = CompileCounterWithBackend("eager")
    run_all_sizes(torch.compile(layer, backend=counter, fullgraph=True, dynamic=True), "auto", False)
    assert counter.frame_count == 1


@pytest.fixture
def fused_on_the_cpu(monkeypatch):
    """The real operator with the plain layer in the kernels' place, so that its graph can be tested without a GPU."""
    triton_op = pytest.importorskip("comfy_ttt.kernels.triton_op")

    def plain(q, k, v, weights, q_conv, k_conv, grid, text):
        inner = "swiglu" if len(weights) == 3 else "mlp2"
        out, updated = triton_op.ttt_reference(q, k, v, tuple(weights), q_conv, k_conv, grid, text, inner, "instance")
        return out.contiguous(), torch.stack(updated)

    monkeypatch.setattr(triton_op, "fused_forward", plain)
    row = registry.Backend("triton", triton_backend.run, lambda: None, lambda call: None)
    monkeypatch.setattr(registry, "_TRITON", row)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_the_operator_compiles_once_without_a_break(fused_on_the_cpu, compiler, grad):
    counter = CompileCounterWithBackend(compiler)
    run_all_sizes(torch.compile(layer, backend=counter, fullgraph=True, dynamic=True), "triton", grad)
    assert counter.frame_count == 1
    assert any("sd35_ttt" in str(node.target) for node in counter.graphs[0].graph.nodes)


def test_the_operator_keeps_its_promises(fused_on_the_cpu):
    """PyTorch's own check of schema, fake implementation, autograd registration and dynamic shapes."""
    from comfy_ttt.kernels.triton_op import ttt_forward

    q, k, v, weights, (qc, kc) = make(1, 1, 64, (3, 4), 2, "swiglu", torch.float32)
    for x in (q, *weights, *qc):
        x.requires_grad_()
    torch.library.opcheck(ttt_forward, (q, k, v, weights, [*qc, *kc], 3, 4, 2))
    torch.library.opcheck(ttt_forward, (q, k, v, weights, [], 3, 4, 2))


def test_inductor_compiles_the_reference():
    q, k, v, weights, convs = make(1, 1, 64, (3, 4), 2, "swiglu", torch.float32)
    with torch.no_grad():
        ours = torch.compile(layer, fullgraph=True)(q, k, v, weights, convs, 3, 4, 2, "torch")
    torch.testing.assert_close(ours, layer(q, k, v, weights, convs, 3, 4, 2, "torch"), rtol=1e-4, atol=1e-5)
