"""The backend table: constraints before the call, reasons in words, nothing at import."""

import os
import subprocess
import sys

import pytest
import torch

from comfy_ttt.kernels import BackendUnavailable, Call, backends, explain, registry, triton_backend, ttt_swiglu
from comfy_ttt.kernels.registry import choose

GPU = torch.device("cuda", 0)


def call(**changes):
    made = dict(
        device=GPU, dtype=torch.bfloat16, head_dim=64, inner_model="swiglu", key_norm="instance", locality=True
    )
    return Call(**{**made, **changes})


@pytest.fixture
def a_gpu(monkeypatch):
    """As if this machine had a GPU on which the self-test passes; returns the list of self-tests asked for."""
    asked = []
    monkeypatch.setattr(triton_backend, "interpreting", lambda: False)
    monkeypatch.setattr(triton_backend, "_missing", lambda: None)
    monkeypatch.setattr(triton_backend, "_device_refuses", lambda *key: asked.append(key))
    return asked


def test_import_touches_neither_triton_nor_a_gpu():
    code = (
        "import sys, comfy_ttt.ttt_core, comfy_ttt.kernels, torch; "
        "assert 'triton' not in sys.modules and 'torch._dynamo' not in sys.modules; "
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TRITON_INTERPRET": "0"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.skipif(triton_backend.interpreting(), reason="about machines without the interpreter")
def test_without_a_gpu_auto_takes_torch_and_triton_says_why_not():
    triton, plain = backends()
    assert (triton.name, triton.available) == ("triton", False) and triton.reason
    assert (plain.name, plain.available, plain.reason) == ("torch", True, "")
    assert choose(call(device=torch.device("cpu"))).name == "torch"
    x = torch.zeros(1, 4, 64)
    with pytest.raises(BackendUnavailable, match="'triton' cannot run here: .*(GPU|Triton).* Choose 'auto' or 'torch'"):
        ttt_swiglu(x, x, x, *[torch.zeros(1, 64, 64)] * 3, grid=(2, 2), backend="triton")


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(dtype=torch.float64), "bf16, fp16 or fp32, and the input is float64"),
        (dict(same_dtype=False), "one dtype"),
        (dict(head_dim=96), "64 and 128, and the layer has 96"),
        (dict(key_norm="rms"), "key norm 'instance' only, and the layer has 'rms'"),
        (dict(device=torch.device("cpu")), "needs a GPU, and the input is on 'cpu'"),
    ],
)
def test_each_constraint_has_its_reason_and_auto_goes_on(a_gpu, change, words):
    with pytest.raises(BackendUnavailable, match=words):
        choose(call(**change), "triton")
    assert choose(call(**change)).name == "torch"


def test_auto_prefers_triton_and_each_kind_of_layer_is_tested_once(a_gpu):
    assert choose(call()).name == "triton"
    assert choose(call(head_dim=128, dtype=torch.float16, inner_model="mlp2")).name == "triton"
    assert set(a_gpu) == {
        (None, torch.bfloat16, 64, "swiglu"),
        (0, torch.bfloat16, 64, "swiglu"),
        (0, torch.float16, 128, "mlp2"),
    }


def test_explain_names_what_runs_and_why(a_gpu):
    assert explain(call()) == ("triton", "")
    name, reason = explain(call(key_norm="rms"))
    assert name == "torch" and reason.startswith("triton: It knows key norm 'instance' only")
    assert explain(call(), "torch") == ("torch", "")
    with pytest.raises(BackendUnavailable):
        explain(call(key_norm="rms"), "triton")


def test_old_gpus_and_failed_self_tests_become_reasons(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
    key = (0, torch.bfloat16, 64, "swiglu")
    if torch.version.hip is None:
        assert triton_backend._device_refuses(*key) == "Some GPU has compute capability 7.5, and 8.0 or newer is needed."
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(triton_backend, "_self_test", lambda *key: "The self-test did not run (X).")
    assert triton_backend._device_refuses(*key) == "The self-test did not run (X)."


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the self-test to fail")
def test_a_self_test_that_cannot_run_says_so():
    triton_backend._self_test.cache_clear()
    reason = triton_backend._self_test(torch.device("cuda", 0), torch.bfloat16, 64, "swiglu")
    assert reason.startswith("The self-test did not run (")
    triton_backend._self_test.cache_clear()


def test_the_table_ends_with_torch_which_takes_everything():
    table = registry._table()
    assert [b.name for b in table] == ["triton", "torch"]
    assert table[-1].unavailable() is None and table[-1].refuses(call(dtype=torch.float64, head_dim=7)) is None


def test_autocast_leaves_the_reference_in_fp32():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 12, 64, generator=g) for _ in range(3))
    weights = [torch.randn(1, 64, 64, generator=g) * 0.1 for _ in range(3)]
    plain = ttt_swiglu(q, k, v, *weights, grid=(3, 4), backend="torch")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ttt_swiglu(q, k, v, *weights, grid=(3, 4), backend="torch"), plain)
