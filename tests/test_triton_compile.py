"""The shipped launch configurations compile for every GPU family without spilling, on a machine without a GPU.

By default swiglu in bf16 for all six families; SD35_TTT_COMPILE_ALL=1 adds fp16, mlp2 and the small update kernel.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from comfy_ttt.kernels.launch_configs import FAMILIES, SHARED_LIMIT, config_for, strip_width  # noqa: E402
from comfy_ttt.kernels.triton_launch import specialise  # noqa: E402

ALL = os.environ.get("SD35_TTT_COMPILE_ALL") == "1"
SPILLS = {64: 0, 128: 128}  # bytes a kernel may spill in a half type; fp32 is no path for pictures and is not limited


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16] if ALL else [torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"sm_{f[0]}{f[1]}")
def test_no_spills_and_shared_memory_fits(family, head_dim, dtype):
    from offline import compile_for, kernels

    for inner in ("swiglu", "mlp2") if ALL else ("swiglu",):
        for name, launch in kernels(family, head_dim, dtype, inner == "swiglu").items():
            if name == "update" and not ALL:
                continue
            used = compile_for(launch, family, dtype)
            assert used.stack <= SPILLS[head_dim], (inner, name, str(used))
            assert used.shared <= SHARED_LIMIT[family], (inner, name, str(used))


def test_narrow_pictures_and_layers_without_locality_compile_without_spills():
    from offline import compile_for

    c = config_for((8, 6), 64, False)
    for conv, tile in ((True, 16), (False, c.apply_tile)):
        made = specialise(c, 64, torch.bfloat16, True, conv, tile, tile)
        for name in ("keys", "apply"):
            assert compile_for(made[name], (8, 6), torch.bfloat16).stack == 0, (conv, tile, name)


def test_fp32_compiles_within_shared_memory():
    from offline import compile_for, kernels

    family = (8, 6)  # the smallest limit
    for name in ("step", "apply"):
        assert compile_for(kernels(family, 64, torch.float32)[name], family, torch.float32).shared <= SHARED_LIMIT[family]


def test_every_capability_finds_a_configuration():
    assert config_for((8, 7), 64, False) == config_for((8, 6), 64, False)
    assert config_for((10, 3), 64, False) == config_for((10, 0), 64, False)
    assert config_for((13, 0), 128, True) == config_for((12, 0), 128, True)
    assert config_for(None, 64, False) == config_for((8, 0), 64, False)


def test_strips_waste_little():
    assert [strip_width(w, 32) for w in (64, 52, 76, 100, 40, 7, 1)] == [32, 32, 32, 32, 16, 16, 16]
    assert strip_width(100, 16) == 16
