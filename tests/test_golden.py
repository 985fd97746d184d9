"""Our layer against the authors' published one: outputs and every gradient, from files computed in float64."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from comfy_ttt.ttt_core import TTTAttention, TTTSpec

FILES = sorted((Path(__file__).parent / "golden").glob("*.safetensors"))


def relative(ours, theirs):
    ours = ours.detach()
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matches_the_authors_layer(path, dtype):
    with safe_open(path, "pt") as file:
        meta = file.metadata()
        data = {n: file.get_tensor(n).to(dtype) for n in file.keys()}
    heads, dim = int(meta["heads"]), int(meta["dim"])
    grid = int(meta["height"]), int(meta["width"])
    inner = "swiglu" if meta["inner_model"] == "swiglu" else "mlp2"
    layer = TTTAttention(heads, dim // heads, TTTSpec(inner_model=inner), dtype=dtype)
    names = [n for n in ("w1", "w2", "w3") if f"param.{n}" in data]
    state = {n: data[f"param.{n}"][0] for n in names}
    for side in ("q", "k"):
        for part in ("weight", "bias"):
            state[f"{side}_conv.{part}"] = data[f"param.{side}_conv2d.{part}"]
    layer.load_state_dict(state)
    x = data["x"].requires_grad_()
    qkv_bias = data["param.qkv.bias"].requires_grad_()
    q, k, v = F.linear(x, data["param.qkv.weight"], qkv_bias).chunk(3, dim=-1)
    out = layer(q, k, v, grid=grid)
    y = F.linear(out, data["param.proj.weight"], data["param.proj.bias"])
    (y * data["cotangent"]).sum().backward()

    tolerance = 1e-5
    assert relative(out, data["attention_output"]) < tolerance
    assert relative(y, data["y"]) < tolerance
    grads = {"x": x.grad, "qkv.bias": qkv_bias.grad, **{n: getattr(layer, n).grad[None] for n in names}}
    for side in ("q", "k"):
        conv = getattr(layer, f"{side}_conv")
        grads |= {f"{side}_conv2d.weight": conv.weight.grad, f"{side}_conv2d.bias": conv.bias.grad}
    wrong = {n: r for n, g in grads.items() if (r := relative(g, data[f"grad.{n}"])) >= tolerance}
    assert not wrong
    assert set(grads) == {n.removeprefix("grad.") for n in data if n.startswith("grad.")}
