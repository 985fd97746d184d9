"""When the fused Triton kernels may run: declared constraints, and one small self-test at first use.

Nothing here imports Triton or touches a GPU before it is asked. No platform is ruled out by its name: Windows
(triton-windows) and ROCm count if Triton imports, a device is there, and the self-test's numbers are right.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

HEAD_SIZES = (64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KEY_NORM = "instance"
NVIDIA_MINIMUM = (8, 0)
SELF_TEST_TOLERANCE = 2e-2  # bf16 dots against fp32: about 3e-3 on such a small picture


def interpreting() -> bool:
    """Triton's interpreter computes on CPU tensors; for tests only, it is thousands of times too slow for pictures."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def unavailable() -> str | None:
    """Why no call at all can run on this machine, or None; runs the self-test on the current device."""
    if reason := _missing():
        return reason
    if interpreting():
        return None
    return _device_refuses(None, torch.bfloat16, HEAD_SIZES[0], "swiglu")


def refuses(call) -> str | None:
    """Why this call (registry.Call) cannot run, or None. Cheap reasons first, the self-test of its kind last."""
    if call.dtype not in DTYPES:
        return f"It computes in bf16, fp16 or fp32, and the input is {str(call.dtype).removeprefix('torch.')}."
    if not call.same_dtype:
        return "q, k and v must have one dtype."
    if call.head_dim not in HEAD_SIZES:
        return f"It knows head sizes 64 and 128, and the layer has {call.head_dim}."
    if call.key_norm != KEY_NORM:
        return f"It knows key norm '{KEY_NORM}' only, and the layer has '{call.key_norm}'."
    if interpreting():
        return None if call.device.type == "cpu" else "TRITON_INTERPRET=1 is set, which runs CPU tensors only."
    if call.device.type != "cuda":
        return f"It needs a GPU, and the input is on '{call.device.type}'."
    head_dim = 64 if call.head_dim == 64 else 128  # a plain number also where the compiler has a symbol
    return _device_refuses(call.device.index, call.dtype, head_dim, call.inner_model)


def _constant(function):
    """Tells torch.compile to call the function once while compiling and to take its result, not to trace into it.

    What torch.compiler.assume_constant_result does, without importing the compiler with the node pack.
    """
    function._dynamo_marked_constant = True
    return function


@_constant
def _missing() -> str | None:
    return _import_problem()


@functools.cache
def _import_problem() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton; on Windows triton-windows)."
    if not interpreting() and not torch.cuda.is_available():
        return "PyTorch sees no NVIDIA or AMD GPU."
    try:
        import triton  # noqa: F401
    except Exception as error:  # a broken installation must not take the node pack down with it
        return f"Triton does not import ({_first_line(error)})."
    return None


@_constant
def _device_refuses(index: int | None, dtype: torch.dtype, head_dim: int, inner_model: str) -> str | None:
    index = torch.cuda.current_device() if index is None else index
    if torch.version.hip is None:
        capability = torch.cuda.get_device_capability(index)
        if capability < NVIDIA_MINIMUM:
            name = torch.cuda.get_device_name(index)
            return f"{name} has compute capability {capability[0]}.{capability[1]}, and 8.0 or newer is needed."
    return _self_test(torch.device("cuda", index), dtype, head_dim, inner_model)


@functools.cache
def _self_test(device: torch.device, dtype: torch.dtype, head_dim: int, inner_model: str) -> str | None:
    """Compiles and runs one tiny layer of this kind and compares it with the reference. Its kernels stay compiled."""
    from .reference import ttt_reference

    try:
        from .triton_launch import fused_forward

        with torch.no_grad():
            g = torch.Generator().manual_seed(0)
            grid = (3, 31)  # odd, and wide enough for the tiles that pictures use, so that those are compiled here
            tokens, parts = 3 + grid[0] * grid[1], 3 if inner_model == "swiglu" else 2
            q, k, v = (torch.randn(1, tokens, head_dim, generator=g) for _ in range(3))
            weights = [torch.randn(1, head_dim, head_dim, generator=g) * head_dim**-0.5 for _ in range(parts)]
            convs = [(torch.randn(head_dim, 1, 3, 3, generator=g) / 3, torch.randn(head_dim, generator=g)) for _ in "qk"]
            low = [x.to(dtype) for x in (q, k, v)]
            expected, _ = ttt_reference(*(x.float() for x in low), weights, *convs, grid, 3, inner_model, KEY_NORM)
            moved = [tuple(x.to(device) for x in conv) for conv in convs]
            args = [*(x.to(device) for x in low), [w.to(device) for w in weights], *moved]
            out = fused_forward(*args, grid, 3)[0].float().cpu()
    except Exception as error:  # whatever the compiler or driver says becomes the reason, and auto takes torch
        return f"The self-test did not run ({_first_line(error)})."
    difference = float((out - expected).norm() / expected.norm())
    if not difference < SELF_TEST_TOLERANCE:
        return f"The self-test's result differs from the reference by {difference:.1e}."
    return None


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def run(*args):
    """Arguments and results as reference.ttt_reference."""
    from .triton_op import run_triton

    return run_triton(*args)
