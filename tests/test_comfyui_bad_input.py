"""What a user of the nodes can get wrong, each with its one sentence, in a real ComfyUI."""

import dataclasses
from pathlib import Path

import pytest
import torch
from comfy_helpers import load, run_node, trained
from safetensors.torch import save_file
from tiny import random_tensors, shapes, write_checkpoint

from comfy_ttt.ttt_core import TTTError, TTTSpec, TTTWeights, read_geometry

pytestmark = pytest.mark.comfyui


@pytest.fixture(scope="module")
def base(comfyui, tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "tiny.safetensors"
    write_checkpoint(path)
    return load(path)


@pytest.fixture(scope="module")
def folder(comfyui):
    import folder_paths

    return lambda category: Path(folder_paths.get_folder_paths(category)[0])


@pytest.fixture
def node():
    from comfy_ttt.nodes import NODES

    return lambda name: next(n for n in NODES if n.define_schema().node_id == name)


def flux_model():
    import comfy.ldm.flux.model
    import comfy.model_patcher
    import comfy.supported_models

    config = {
        "image_model": "flux", "in_channels": 16, "vec_in_dim": 64, "context_in_dim": 64, "hidden_size": 128, "mlp_ratio": 4.0,
        "num_heads": 2, "depth": 1, "depth_single_blocks": 1, "axes_dim": [16, 24, 24], "theta": 10000, "qkv_bias": True,
        "guidance_embed": False, "patch_size": 2, "out_channels": 16, "txt_ids_dims": [],
    }  # fmt: skip
    known = {f.name for f in dataclasses.fields(comfy.ldm.flux.model.FluxParams)} | {"image_model"}  # versions differ
    config = {k: v for k, v in config.items() if k in known}
    model = comfy.supported_models.Flux(config).get_model({}, "")
    return comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


def sd15_model():
    import comfy.model_patcher
    import comfy.supported_models

    config = {
        "image_size": 32, "out_channels": 4, "in_channels": 4, "model_channels": 32, "num_res_blocks": [1, 1], "channel_mult": [1, 2],
        "transformer_depth": [1, 0], "transformer_depth_middle": 1, "transformer_depth_output": [1, 1, 0, 0], "use_spatial_transformer": True,
        "context_dim": 64, "num_heads": 2, "num_head_channels": -1, "use_linear_in_transformer": False, "use_temporal_attention": False,
        "adm_in_channels": None, "legacy": False,
    }  # fmt: skip
    model = comfy.supported_models.SD15(config).get_model({}, "")
    return comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


@pytest.mark.parametrize("make, name", [(flux_model, "Flux"), (sd15_model, "BaseModel")])
def test_not_an_mmdit(comfyui, node, make, name):
    model = make()
    with pytest.raises(TTTError, match=f"not an MMDiT.*The connected MODEL is {name}"):
        run_node(node("TTTLinearize"), model=model, attentions="paper")


@pytest.mark.parametrize(
    "attentions, words", [("self:5", "asks for self:5.*blocks 0 to 1"), ("everything", "Cannot read 'everything'"), ("", "is empty")]
)
def test_bad_selection(base, node, attentions, words):
    with pytest.raises(TTTError, match=words):
        run_node(node("TTTLinearize"), model=base, attentions=attentions)


def test_self_without_attn2(comfyui, node, tmp_path):
    write_checkpoint(tmp_path / "large.safetensors", self_blocks=())
    with pytest.raises(TTTError, match="Preset 'self'.*has none"):
        run_node(node("TTTLinearize"), model=load(tmp_path / "large.safetensors"), attentions="self")


def test_backend_that_cannot_run_is_refused_with_its_reason(base, node):
    from comfy_ttt.kernels import backends

    if any(b.name == "triton" and b.available for b in backends()):
        pytest.skip("Triton can run here")
    with pytest.raises(TTTError, match="TTT backend 'triton' cannot run here: .*Choose 'auto' or 'torch'"):
        run_node(node("TTTLinearize"), model=base, attentions="paper", backend="triton")


def test_small_file_for_another_base(base, node, folder):
    other = TTTWeights.new(read_geometry(shapes(depth=4)), TTTSpec())
    other.save(folder("ttt") / "other.safetensors")
    with pytest.raises(TTTError, match="'other.safetensors' was made for .*4 blocks"):
        run_node(node("TTTLoadWeights"), model=base, weights_name="other.safetensors")


def test_other_fine_tune_of_the_family_loads_with_a_warning(base, node, folder, tmp_path):
    from comfy_ttt.ttt_core.hosts.comfy import attached

    write_checkpoint(tmp_path / "tuned.safetensors", seed=8)
    model = run_node(node("TTTLinearize"), model=load(tmp_path / "tuned.safetensors"), attentions="paper")[0]
    trained(attached(model).weights).save(folder("ttt") / "tuned.safetensors")
    out, report = run_node(node("TTTLoadWeights"), model=base, weights_name="tuned.safetensors")
    assert attached(out) is not None and "WARNING" in report and "another base" in report


def test_another_inner_model_than_the_one_present(base, node, folder):
    TTTWeights.new(read_geometry(shapes()), TTTSpec(inner_model="mlp2")).save(folder("ttt") / "mlp2.safetensors")
    model = run_node(node("TTTLinearize"), model=base, attentions="paper")[0]
    with pytest.raises(TTTError, match="'mlp2.safetensors' holds mlp2/instance/dwc_qk layers.*already carries swiglu"):
        run_node(node("TTTLoadWeights"), model=model, weights_name="mlp2.safetensors")


def test_saving_a_plain_model_and_bad_names(base, node):
    with pytest.raises(TTTError, match="TTT Save Weights: the connected MODEL has no TTT layers"):
        run_node(node("TTTSaveWeights"), model=base, filename="x")
    model = run_node(node("TTTLinearize"), model=base, attentions="paper")[0]
    for name in ("", "../../escape", "/tmp/escape", "a:b", ".", "./", "dir/.", "x" * 300):
        with pytest.raises(TTTError, match="is not a usable file name"):
            run_node(node("TTTSaveWeights"), model=model, filename=name)


def test_a_file_that_is_gone(base, node):
    with pytest.raises(TTTError, match="'gone.safetensors' is not in .*refresh"):
        run_node(node("TTTLoadWeights"), model=base, weights_name="gone.safetensors")


def write(path, kind):
    weights = TTTWeights.new(read_geometry(shapes()), TTTSpec())
    full = {**random_tensors(shapes()), **weights.layer_tensors()}
    if kind == "plain":
        full = random_tensors(shapes())
    elif kind == "small":
        full = weights.layer_tensors("weights")
    elif kind == "no recipe":
        full = {n: t for n, t in full.items() if not n.endswith("ttt.spec")}
    elif kind == "missing layer":
        full = {n: t for n, t in full.items() if "joint_blocks.1.x_block.attn2.ttt" not in n}
    elif kind == "nan":
        full["model.diffusion_model.joint_blocks.1.x_block.attn2.ttt.w1"][0, 0, 0] = float("nan")
    elif kind == "other family":
        full = {**random_tensors(shapes(self_blocks=(0,))), **weights.layer_tensors()}
    save_file(full, path)
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:-1000])
    if kind == "pickle":
        torch.save(full, path)


@pytest.mark.parametrize(
    "kind, words",
    [
        ("plain", "has no TTT layers.*Load Diffusion Model"),
        ("small", "small TTT file.*TTT Load Weights"),
        ("no recipe", "no recipe"),
        ("missing layer", "lacks .* of the TTT layer self:1"),
        ("nan", "holds NaN or infinity"),
        ("other family", "was made for .*2 image self-attentions.*is .*1 image self-attentions"),
        ("truncated", "truncated or not a safetensors file"),
        ("pickle", "Python pickle"),
    ],
)
def test_full_model_files(comfyui, node, folder, kind, words):
    name = f"full_{kind.replace(' ', '_')}.safetensors"
    write(folder("diffusion_models") / name, kind)
    with pytest.raises(TTTError, match=words) as info:
        run_node(node("TTTLoadModel"), model_name=name)
    assert name in str(info.value)


@pytest.mark.parametrize("digit", ["12", "x", "-1", "\u0663"])
def test_demo_prompt(comfyui, node, digit):
    with pytest.raises(ValueError, match="digit 0-9"):
        run_node(node("TTTDemoPrompt"), digit=digit)
