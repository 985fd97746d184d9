"""The fused kernels in Triton's interpreter, on the CPU, against the fp64 reference.

Triton decides when a kernel's module is imported whether the interpreter runs it, so these tests need a process of
their own: without TRITON_INTERPRET=1 the one test here starts it, with it the real tests are here. bf16 runs too: the
kernels round it themselves where the interpreter would truncate (triton_common.cast, EMULATE).
"""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

INSIDE = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

if not INSIDE:

    def test_in_the_interpreter():
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", __file__]
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]

else:
    from torch.utils._python_dispatch import TorchDispatchMode

    from comfy_ttt.kernels import BackendUnavailable, backends, reference, registry, triton_launch
    from comfy_ttt.kernels.launch_configs import config_for
    from triton_checks import OPS, assert_close_to_exact, check_gradients, exact, inputs, relative

    def few_programs(dim, dtype, **changes):
        """The shipped tiles with as few programs as possible: each then loops, and the interpreter starts fewer."""
        return replace(config_for(None, dim, dtype == torch.float32), **{"programs": 1, **changes})

    def fused(q, k, v, weights, convs, grid, text, config):
        return triton_launch.fused_forward(q, k, v, weights, *convs, grid, text, config)

    @pytest.fixture(autouse=True)
    def few_programs_everywhere(monkeypatch):
        monkeypatch.setattr(triton_launch, "launch_config", lambda device, dim, dtype: few_programs(dim, dtype))

    @pytest.fixture(autouse=True)
    def empty_memory_is_nan(monkeypatch):
        """Whatever a kernel reads before it was written shows."""
        real = torch.empty

        def poisoned(*args, **kwargs):
            x = real(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        monkeypatch.setattr(torch, "empty", poisoned)
        monkeypatch.setattr(torch, "empty_like", lambda x, **kwargs: poisoned(x.shape, **{"dtype": x.dtype, **kwargs}))

    def test_it_is_the_interpreter():
        assert triton_launch.interpreted()

    SHAPES = [  # batch, heads, head size, grid, text: N = 63, text 2 to 5, a row, a column, single tokens
        (1, 1, 64, (9, 7), 0),
        (3, 1, 64, (4, 4), 2),
        (1, 3, 64, (1, 7), 5),
        (1, 2, 64, (7, 7), 3),
        (1, 1, 64, (9, 1), 0),
        (1, 1, 64, (1, 1), 0),
        (1, 1, 64, (1, 1), 3),
        (2, 1, 128, (4, 3), 4),
    ]

    @pytest.mark.parametrize(
        "inner, batch, heads, dim, grid, text",
        [("swiglu", *shape) for shape in SHAPES] + [("mlp2", *SHAPES[i]) for i in (2, 6, 7)],
    )
    def test_fp32_equals_the_reference(inner, batch, heads, dim, grid, text):
        made = inputs(batch, heads, dim, grid, text, inner, torch.float32)
        out, updated = fused(*made, grid, text, few_programs(dim, torch.float32))
        assert_close_to_exact(out, updated, *made, grid, text, inner)

    @pytest.mark.parametrize(
        "inner, dtype, batch, heads, dim, grid, text",
        [
            ("swiglu", torch.float16, *SHAPES[0]),
            ("swiglu", torch.bfloat16, *SHAPES[0]),
            ("swiglu", torch.bfloat16, *SHAPES[7]),
            ("mlp2", torch.float16, *SHAPES[7]),
            ("mlp2", torch.bfloat16, *SHAPES[1]),
        ],
    )
    def test_half_types_equal_the_reference(inner, dtype, batch, heads, dim, grid, text):
        made = inputs(batch, heads, dim, grid, text, inner, dtype)
        out, updated = fused(*made, grid, text, few_programs(dim, dtype))
        assert_close_to_exact(out, updated, *made, grid, text, inner)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_without_locality(dtype):
        made = inputs(2, 1, 64, (5, 7), 3, "swiglu", dtype, conv=False)
        out, updated = fused(*made, (5, 7), 3, few_programs(64, dtype))
        assert_close_to_exact(out, updated, *made, (5, 7), 3, "swiglu")

    def test_results_do_not_depend_on_tiles_and_repeat_bit_for_bit():
        made = inputs(1, 1, 64, (3, 35), 21, "swiglu", torch.float32)
        base = few_programs(64, torch.float32)
        first = fused(*made, (3, 35), 21, base)
        again = fused(*made, (3, 35), 21, base)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        for changes in (
            dict(keys_tile=64, step_tile=32, step_hidden=32, apply_tile=32, apply_hidden=32),
            dict(keys_tile=16, step_tile=64, step_hidden=64, apply_tile=64, apply_hidden=16),
            dict(programs=20),
        ):
            out, updated = fused(*made, (3, 35), 21, replace(base, **changes))
            assert relative(out, first[0]) < 2e-6 and relative(updated, first[1]) < 2e-6

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_keys_far_from_zero(dtype):
        """|mean| = 100 standard deviations: E[x^2] - E[x]^2 would be noise."""
        q, k, v, weights, convs = inputs(1, 1, 64, (3, 7), 2, "swiglu", dtype)
        k = ((k.float() - k.float().mean(1, keepdim=True)) + 100).to(dtype)
        made = q, k, v, weights, convs
        out, updated = fused(*made, (3, 7), 2, few_programs(64, dtype, programs=4))
        assert_close_to_exact(out, updated, *made, (3, 7), 2, "swiglu")

    @pytest.mark.parametrize("inner", OPS)
    @pytest.mark.parametrize(
        "name, size, gain", [("q", 2e4, 0.01), ("k", 2e4, 1), ("v", 6e4, 0.01), ("v", 1e-4, 1), ("k", 1, 5), ("all", 300, 0.1)]
    )
    def test_fp16_is_finite_wherever_the_truth_is(inner, name, size, gain):
        """Largest magnitude `size` for one input or all, weights of deviation 0.2 * gain."""
        q, k, v, weights, convs = inputs(1, 1, 64, (3, 5), 2, inner, torch.float16)

        def scaled(x):
            return (x.float() / x.float().abs().max() * size).half()

        q, k, v = (scaled(x) if name in (n, "all") else x for n, x in (("q", q), ("k", k), ("v", v)))
        weights = [w * gain for w in weights]
        made = q, k, v, weights, convs
        out, updated = fused(*made, (3, 5), 2, few_programs(64, torch.float16))
        truth, truth_updated = exact(*made, (3, 5), 2, inner)
        fits = truth.abs() < 65000
        assert fits.any() and torch.isfinite(out[fits]).all() and torch.isfinite(updated).all()
        assert relative(updated, truth_updated) < 2e-3
        assert relative(out[fits], truth[fits]) < 1e-2

    @pytest.mark.parametrize(
        "inner, dtype, batch, heads, dim, grid, text, conv, tolerance",
        [
            ("swiglu", torch.float32, 2, 2, 64, (2, 3), 2, True, 1e-5),
            ("mlp2", torch.float32, 1, 1, 128, (2, 3), 0, True, 1e-5),
            ("swiglu", torch.float32, 1, 1, 64, (1, 5), 1, False, 1e-5),
            ("swiglu", torch.float16, 1, 1, 64, (3, 5), 2, True, 1e-3),
            ("mlp2", torch.bfloat16, 1, 1, 64, (3, 5), 2, True, 6e-3),
        ],
    )
    def test_every_gradient(inner, dtype, batch, heads, dim, grid, text, conv, tolerance):
        check_gradients(inner, dtype, batch, heads, dim, grid, text, conv, tolerance=tolerance)

    def test_strides_are_followed_and_nothing_is_copied(monkeypatch):
        q, k, v, weights, convs = inputs(2, 1, 64, (2, 3), 1, "swiglu", torch.float32)
        assert not v.is_contiguous() and v.stride(2) == 1
        config = few_programs(64, torch.float32)
        plain = fused(q.contiguous(), k.contiguous(), v.contiguous(), weights, convs, (2, 3), 1, config)
        copied = []
        real = torch.Tensor.contiguous
        monkeypatch.setattr(torch.Tensor, "contiguous", lambda x: (copied.append(x.shape), real(x))[1])
        views = fused(q, k, v, weights, convs, (2, 3), 1, config)
        assert q.shape not in copied
        assert all(torch.equal(a, b) for a, b in zip(plain, views, strict=True))
        one_for_all = k[:1].expand(2, -1, -1)  # batch stride 0
        token_last = v.transpose(1, 2).contiguous().transpose(1, 2)  # last dimension not contiguous: copied, not refused
        shared = fused(q, one_for_all, token_last, weights, convs, (2, 3), 1, config)
        truth, _ = exact(q, one_for_all, v, weights, convs, (2, 3), 1, "swiglu")
        assert relative(shared[0], truth) < 1e-5

    class OperatorLog(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    @pytest.mark.parametrize("backend", ["triton", "auto"])
    def test_triton_never_silently_runs_torch(backend, monkeypatch):
        def poisoned(*_):
            raise AssertionError("the reference ran")

        made = inputs(1, 1, 64, (2, 3), 1, "swiglu", torch.float32)
        q, k, v, weights, convs = made
        truth, _ = exact(*made, (2, 3), 1, "swiglu")
        monkeypatch.setattr(registry, "ttt_reference", poisoned)
        monkeypatch.setattr(reference, "swiglu_apply", poisoned)
        with OperatorLog() as log, torch.no_grad():
            out = OPS["swiglu"][0](q, k, v, *weights, *convs, grid=(2, 3), text_tokens=1, backend=backend)
        assert relative(out, truth) < 1e-5
        assert [n for n in log.names if n.startswith("sd35_ttt")] == ["sd35_ttt.forward.default"]
        with pytest.raises(AssertionError, match="the reference ran"):
            OPS["swiglu"][0](q, k, v, *weights, *convs, grid=(2, 3), text_tokens=1, backend="torch")

    def test_training_saves_the_inputs_and_nothing_else():
        """At N = 4096, 24 heads of 64, bf16 the three inputs are 36 MiB; the limit is 40."""
        q, k, v, weights, convs = inputs(1, 2, 64, (3, 5), 2, "swiglu", torch.bfloat16)
        weights = [w.requires_grad_() for w in weights]
        saved = {}

        def pack(x):
            saved[x.data_ptr(), x.shape] = x.numel() * x.element_size()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = OPS["swiglu"][0](q, k, v, *weights, *convs, grid=(3, 5), text_tokens=2, backend="triton")
        parameters = sum(x.numel() * 4 for x in (*weights, *convs[0], *convs[1]))
        assert out.requires_grad and sum(saved.values()) <= 3 * q.numel() * q.element_size() + parameters
        assert 3 * 4096 * 24 * 64 * 2 <= 40 * 2**20

    def test_refusals_are_readable():
        assert [b.name for b in backends()] == ["triton", "torch"]
        for change, words in (
            (dict(dtype=torch.float64), "bf16, fp16 or fp32"),
            (dict(dim=32), "head sizes 64 and 128"),
            (dict(key_norm="rms"), "key norm 'instance'"),
        ):
            q, k, v, weights, convs = inputs(
                1, 1, change.pop("dim", 64), (2, 3), 0, "swiglu", change.pop("dtype", torch.float32)
            )
            with pytest.raises(BackendUnavailable, match=words):
                OPS["swiglu"][0](q, k, v, *weights, *convs, grid=(2, 3), backend="triton", **change)
            OPS["swiglu"][0](q, k, v, *weights, *convs, grid=(2, 3), **change)  # auto takes torch
