"""The fused kernels on a real GPU. Needs torch, Triton and pytest only, and an NVIDIA or AMD GPU."""

import pytest
import torch

pytest.importorskip("triton")

from triton_checks import OPS, assert_close_to_exact, check_gradients, inputs, relative  # noqa: E402

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [  # batch, heads, head size, grid, text
    (1, 24, 64, (64, 64), 154),  # SD3.5 at 1024, joint: N = 4250
    (2, 24, 64, (52, 76), 0),
    (3, 2, 64, (40, 25), 0),  # N = 1000
    (1, 2, 64, (9, 7), 0),
    (1, 3, 64, (1, 63), 5),
    (2, 1, 64, (7, 7), 2),
    (1, 1, 64, (1, 1), 0),
    (2, 2, 128, (31, 33), 154),
    (1, 2, 128, (9, 7), 3),
]


def layer(inner, q, k, v, weights, convs, grid, text, backend="triton", fast=False):
    return OPS[inner][0](
        q, k, v, *weights, *convs, grid=grid, text_tokens=text, backend=backend, return_fast_weights=fast
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner", OPS)
@pytest.mark.parametrize("batch, heads, dim, grid, text", SHAPES)
def test_equals_the_reference(inner, dtype, batch, heads, dim, grid, text):
    made = inputs(batch, heads, dim, grid, text, inner, dtype, device="cuda")
    with torch.no_grad():
        out, updated = layer(inner, *made, grid, text, fast=True)
    assert_close_to_exact(out, torch.stack(updated), *made, grid, text, inner)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_locality(dtype):
    made = inputs(2, 2, 64, (31, 33), 5, "swiglu", dtype, conv=False, device="cuda")
    out, updated = layer("swiglu", *made, (31, 33), 5, fast=True)
    assert_close_to_exact(out, torch.stack(updated), *made, (31, 33), 5, "swiglu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_runs_are_the_same_bits(dtype):
    made = inputs(2, 24, 64, (52, 76), 0, "swiglu", dtype, device="cuda")
    first, again = (layer("swiglu", *made, (52, 76), 0) for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize("inner", OPS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float16, 1e-3), (torch.bfloat16, 6e-3)], ids=str)
def test_every_gradient(inner, dtype, tolerance):
    check_gradients(inner, dtype, 2, 2, 64, (9, 7), 5, True, device="cuda", tolerance=tolerance)


def test_long_sequences_use_64_bit_addresses():
    """B * N * C above 2^31 elements; only the last image is looked at."""
    batch, side = 22, 256
    need = 5 * batch * side * side * 1536 * 2
    if torch.cuda.mem_get_info()[0] < need + 2**30:
        pytest.skip(f"needs {need / 2**30:.0f} GiB of free GPU memory")
    _, _, _, weights, convs = inputs(1, 24, 64, (1, 1), 0, "swiglu", torch.bfloat16, device="cuda")
    g = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(3, 1, side * side, 1536, generator=g, device="cuda").bfloat16()
    q, k, v = (x.expand(batch, -1, -1).contiguous() for x in qkv)
    out = layer("swiglu", q, k, v, weights, convs, (side, side), 0)
    assert q.numel() > 2**31
    alone = layer("swiglu", *(x for x in qkv), weights, convs, (side, side), 0)
    assert relative(out[-1:], alone) < 1e-3


def test_no_compilation_for_another_size():
    from comfy_ttt.kernels.triton_apply import apply_kernel
    from comfy_ttt.kernels.triton_keys import keys_kernel, stats_kernel
    from comfy_ttt.kernels.triton_step import step_kernel, update_kernel

    kernels = (stats_kernel, keys_kernel, step_kernel, update_kernel, apply_kernel)

    def compiled():
        return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())

    def run(grid, text):
        layer("swiglu", *inputs(1, 2, 64, grid, text, "swiglu", torch.bfloat16, device="cuda"), grid, text)

    run((64, 64), 154)
    before = compiled()
    for grid, text in (((64, 32), 154), ((61, 96), 77), ((1, 31), 1)):
        run(grid, text)
    assert compiled() == before


def test_compiles_into_one_graph():
    import torch._dynamo
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for grid, text in (((9, 7), 5), ((16, 16), 3)):
        made = inputs(1, 2, 64, grid, text, "swiglu", torch.bfloat16, device="cuda")
        with torch.no_grad():
            assert relative(compiled("swiglu", *made, grid, text), layer("swiglu", *made, grid, text)) < 1e-6
    assert counter.frame_count == 1
