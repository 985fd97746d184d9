"""The reference against an independent slow loop, in fp64; and what it promises about types and bad shapes."""

import pytest
import torch

from comfy_ttt.kernels import BackendUnavailable, backends, ttt_mlp2, ttt_swiglu
from comfy_ttt.kernels.reference import KEY_NORMS, normalise_keys
from comfy_ttt.ttt_core.spec import KEY_NORMS as SPEC_KEY_NORMS

from slow_loop import slow_ttt

OPS = {"swiglu": (ttt_swiglu, 3), "mlp2": (ttt_mlp2, 2)}


def make(batch, heads, dim, grid, text, inner, dtype=torch.float64, seed=0, conv=True):
    g = torch.Generator().manual_seed(seed)

    def rand(*shape, scale=1.0):
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale).to(dtype)

    n, c = text + grid[0] * grid[1], heads * dim
    q, k, v = rand(batch, n, c), rand(batch, n, c) + 2 * rand(1, 1, c), rand(batch, n, c)
    weights = [rand(heads, dim, dim, scale=0.2) for _ in range(OPS[inner][1])]
    convs = [(rand(c, 1, 3, 3, scale=0.2), rand(c, scale=0.2)) if conv else None for _ in range(2)]
    return q, k, v, weights, convs


@pytest.mark.parametrize("inner", OPS)
@pytest.mark.parametrize(
    "batch, heads, dim, grid, text",
    [(2, 2, 64, (3, 4), 0), (1, 1, 128, (2, 5), 3), (3, 1, 64, (1, 7), 2), (1, 2, 64, (7, 1), 0), (1, 1, 64, (1, 1), 0), (1, 1, 64, (1, 1), 1)],
)
def test_equals_the_slow_loop(inner, batch, heads, dim, grid, text):
    q, k, v, weights, (qc, kc) = make(batch, heads, dim, grid, text, inner)
    out, updated = OPS[inner][0](q, k, v, *weights, qc, kc, grid=grid, text_tokens=text, return_fast_weights=True)
    slow, slow_updated = slow_ttt(q, k, v, weights, qc, kc, grid, text, inner)
    torch.testing.assert_close(out, slow, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(updated, slow_updated, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_without_locality_equals_zero_convolution():
    q, k, v, weights, _ = make(2, 1, 64, (3, 5), 2, "swiglu")
    zero = (torch.zeros(64, 1, 3, 3, dtype=q.dtype), torch.zeros(64, dtype=q.dtype))
    plain = ttt_swiglu(q, k, v, *weights, grid=(3, 5), text_tokens=2)
    assert torch.equal(plain, ttt_swiglu(q, k, v, *weights, zero, zero, grid=(3, 5), text_tokens=2))


def test_instance_norm_ignores_a_common_shift_and_none_does_not():
    q, k, v, weights, _ = make(1, 1, 64, (4, 4), 0, "swiglu")
    shift = torch.randn(64, dtype=k.dtype) * 5

    def gap(norm):
        a, b = (ttt_swiglu(q, x, v, *weights, grid=(4, 4), key_norm=norm) for x in (k, k + shift))
        return float((a - b).norm() / a.norm())

    assert gap("instance") < 1e-12 and gap("center") < 1e-12
    assert gap("none") > 0.1 and gap("scale") > 0.1


def test_instance_norm_is_center_then_scale():
    k = torch.randn(2, 9, 3, 8, dtype=torch.float64) * 4 + 3
    both = normalise_keys(normalise_keys(k, "center"), "scale")
    torch.testing.assert_close(normalise_keys(k, "instance"), both)
    assert set(KEY_NORMS) == set(SPEC_KEY_NORMS)


@pytest.mark.parametrize("inner", OPS)
def test_gradcheck_of_everything(inner):
    q, k, v, weights, (qc, kc) = make(1, 1, 4, (2, 3), 1, inner)
    inputs = [x.requires_grad_() for x in (q, k, v, *weights, *qc, *kc)]
    n = len(weights)

    def run(q, k, v, *rest):
        ws, (qw, qb, kw, kb) = rest[:n], rest[n:]
        return OPS[inner][0](q, k, v, *ws, (qw, qb), (kw, kb), grid=(2, 3), text_tokens=1)

    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 1e-3), (torch.bfloat16, 6e-3)])
def test_half_types_round_only_inputs_and_output(dtype, tolerance):
    q, k, v, weights, (qc, kc) = make(2, 2, 64, (5, 7), 3, "swiglu")
    low = [x.to(dtype) for x in (q, k, v)]
    out, updated = ttt_swiglu(*low, *weights, qc, kc, grid=(5, 7), text_tokens=3, return_fast_weights=True)
    exact = ttt_swiglu(*(x.double() for x in low), *weights, qc, kc, grid=(5, 7), text_tokens=3)
    assert out.dtype == dtype and updated[0].dtype == torch.float32
    assert float((out.double() - exact).norm() / exact.norm()) < tolerance


def test_strided_inputs_as_the_hosts_give_them():
    q, k, v, weights, (qc, kc) = make(2, 2, 64, (3, 4), 0, "swiglu")
    fused = torch.cat((q, k, v), dim=-1)
    views = fused.chunk(3, dim=-1)
    assert not views[0].is_contiguous()
    assert torch.equal(ttt_swiglu(*views, *weights, qc, kc, grid=(3, 4)), ttt_swiglu(q, k, v, *weights, qc, kc, grid=(3, 4)))


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(grid=(3, 3)), "do not equal"),
        (dict(text_tokens=-1, grid=(13, 1)), "do not equal"),
        (dict(backend="cuda"), "Unknown TTT backend 'cuda'"),
    ],
)
def test_bad_calls_are_refused_in_words(change, words):
    q, k, v, weights, _ = make(1, 1, 64, (3, 4), 0, "swiglu")
    with pytest.raises((ValueError, BackendUnavailable), match=words):
        ttt_swiglu(q, k, v, *weights, **{"grid": (3, 4), **change})


def test_shapes_that_do_not_fit_are_refused():
    q, k, v, weights, _ = make(1, 1, 64, (3, 4), 0, "swiglu")
    with pytest.raises(ValueError, match="share one shape"):
        ttt_swiglu(q, k[:, 1:], v, *weights, grid=(3, 4))
    with pytest.raises(ValueError, match="channels"):
        ttt_swiglu(q[..., :32], k[..., :32], v[..., :32], *weights, grid=(3, 4))


def test_backend_table_gives_a_reason_for_everything_unavailable():
    rows = backends()
    assert [r.name for r in rows][-1] == "torch" and rows[-1].available
    assert all(r.available or r.reason for r in rows)
