"""The weights file: what is written comes back, saving is atomic, and every bad file is refused in one sentence."""

import json
import os
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import random_tensors, shapes

import comfy_ttt
from comfy_ttt.ttt_core import TTTError, TTTSpec, TTTWeights, files, read_geometry
from comfy_ttt.ttt_core.fingerprint import distance, sketch
from comfy_ttt.ttt_core.version import VERSION
from comfy_ttt.ttt_core.weights import FORMAT, SPEC_KEY

GEOMETRY = read_geometry(shapes())
CHANGED = "model.diffusion_model.joint_blocks.0.x_block.attn2.proj.weight"


def make(spec=TTTSpec(), geometry=GEOMETRY, **kwargs):
    weights = TTTWeights.new(geometry, spec, **kwargs)
    weights.made = {"state": "calibrated", "steps": 7, "seed": 1}
    return weights


@pytest.fixture
def saved(tmp_path):
    return make().save(tmp_path / "good.safetensors")


def rewritten(path, change):
    """A copy of the file after change(tensors, header), recipe updated to match."""
    tensors = load_file(path)
    header = json.loads(bytes(tensors[SPEC_KEY].tolist()))
    change(tensors, header)
    if SPEC_KEY in tensors:
        tensors[SPEC_KEY] = torch.tensor(list(json.dumps(header).encode()), dtype=torch.uint8)
    out = path.with_name("changed.safetensors")
    save_file(tensors, out)
    return out


@pytest.mark.parametrize(
    "spec", [TTTSpec(), TTTSpec("self:1", "mlp2"), TTTSpec("all", locality="none"), TTTSpec("joint:0", key_norm="center")]
)
def test_round_trip(tmp_path, spec):
    weights = make(spec, base_sketch=sketch(random_tensors(shapes())))
    weights.base_changes = {CHANGED: torch.randn(192, 192, dtype=torch.float16)}
    back = TTTWeights.load(weights.save(tmp_path / "sub" / "w.safetensors"))
    assert (back.spec, back.geometry, back.made, back.base_sketch) == (spec, GEOMETRY, weights.made, weights.base_sketch)
    assert back.layers.keys() == weights.layers.keys() and back.trained
    for attention, layer in weights.layers.items():
        theirs = back.layers[attention].state_dict()
        assert all(torch.equal(t, theirs[n]) for n, t in layer.state_dict().items()) and len(theirs) == len(layer.state_dict())
        assert all(p.requires_grad for p in back.layers[attention].parameters())
    assert torch.equal(back.base_changes[CHANGED], weights.base_changes[CHANGED])


def test_names_and_readable_metadata(saved):
    with safe_open(saved, "pt") as file:
        names, meta = set(file.keys()), file.metadata()
    parts = ("w1", "w2", "w3", "q_conv.weight", "q_conv.bias", "k_conv.weight", "k_conv.bias")
    expected = {f"model.diffusion_model.joint_blocks.{i}.x_block.attn2.ttt.{p}" for i in (0, 1) for p in parts}
    expected |= {f"model.diffusion_model.joint_blocks.2.x_block.attn.ttt.{p}" for p in parts}
    assert names == expected | {SPEC_KEY}
    assert meta["ttt.attentions"] == "self:0-1 joint:2" and meta["ttt.pack"] == VERSION and '"steps": 7' in meta["ttt.made"]
    assert TTTSpec.from_json(meta["ttt.spec"]) == TTTSpec()


def test_others_may_read_the_file_as_any_other_new_file(saved):
    plain = saved.with_name("plain")
    plain.touch()
    assert saved.stat().st_mode == plain.stat().st_mode


def test_version_is_the_packages():
    from pathlib import Path

    text = (Path(comfy_ttt.__file__).parent / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.+)"$', text, re.M).group(1) == VERSION


def test_same_seed_same_layers_and_each_layer_its_own():
    a, b, c = make(seed=3), make(seed=3), make(seed=4)
    first, second = list(a.layers)[:2]
    assert torch.equal(a.layers[first].w1, b.layers[first].w1)
    assert not torch.equal(a.layers[first].w1, c.layers[first].w1)
    assert not torch.equal(a.layers[first].w1, a.layers[second].w1)
    assert 0.018 < float(a.layers[first].w1.detach().std()) < 0.022 and not a.layers[first].q_conv.weight.any()


def newer(_tensors, header):
    header["format"] = FORMAT + 1


def missing_layer(tensors, _header):
    for name in [n for n in tensors if "joint_blocks.1." in n]:
        del tensors[name]


def missing_tensor(tensors, _header):
    del tensors["model.diffusion_model.joint_blocks.1.x_block.attn2.ttt.w3"]


def wrong_inner(_tensors, header):
    header["spec"]["inner_model"] = "mlp2"


def unknown_inner(_tensors, header):
    header["spec"]["inner_model"] = "mlp9"


def extra_layer(_tensors, header):
    header["attentions"] = "self:0 joint:2"


def not_finite(tensors, _header):
    tensors["model.diffusion_model.joint_blocks.1.x_block.attn2.ttt.w2"][0, 0, 0] = float("nan")


def wrong_shape(tensors, _header):
    name = "model.diffusion_model.joint_blocks.1.x_block.attn2.ttt.w2"
    tensors[name] = tensors[name][:2].clone()


def no_recipe(tensors, _header):
    del tensors[SPEC_KEY]


def full_model(_tensors, header):
    header["kind"] = "model"


def no_geometry(_tensors, header):
    del header["geometry"]


@pytest.mark.parametrize(
    "change, words",
    [
        (newer, rf"TTT format {FORMAT + 1}.*update SD3.5-TTT"),
        (missing_layer, r"lacks .*w1.*self:1"),
        (missing_tensor, r"lacks w3 of the TTT layer self:1"),
        (wrong_inner, r"says inner model 'mlp2'.*also holds w3"),
        (unknown_inner, r"inner_model 'mlp9' is not known"),
        (extra_layer, r"does not name \(self:1\)"),
        (not_finite, r"attn2.ttt.w2 holds NaN or infinity"),
        (wrong_shape, r"self:1 w2 has shape \(2, 64, 64\), expected \(3, 64, 64\)"),
        (no_recipe, r"TTT layers but no recipe"),
        (full_model, r"full converted model.*TTT Load Model"),
        (no_geometry, r"incomplete TTT recipe"),
    ],
)
def test_bad_files_get_one_sentence_with_the_files_name(saved, change, words):
    path = rewritten(saved, change)
    with pytest.raises(TTTError, match=words) as info:
        TTTWeights.load(path)
    assert path.name in str(info.value) and "\n" not in str(info.value)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file(saved, keep):
    data = saved.read_bytes()
    saved.write_bytes(data[:keep] if keep >= 0 else data[:-1])
    with pytest.raises(TTTError, match="good.safetensors.*truncated or not a safetensors file"):
        TTTWeights.load(saved)


def test_a_length_that_starts_like_a_pickle_is_still_truncated(tmp_path):
    path = tmp_path / "cut.safetensors"
    path.write_bytes((0x0C80).to_bytes(8, "little") + b'{"a":')
    with pytest.raises(TTTError, match="truncated"):
        TTTWeights.load(path)


def test_pickle_named_safetensors(tmp_path):
    path = tmp_path / "sneaky.safetensors"
    torch.save({"w": torch.zeros(3)}, path)
    with pytest.raises(TTTError, match="sneaky.safetensors' is a Python pickle"):
        TTTWeights.load(path)


def test_missing_file(tmp_path):
    with pytest.raises(TTTError, match="does not exist"):
        TTTWeights.load(tmp_path / "nowhere.safetensors")


def test_plain_model_is_not_a_ttt_file(tmp_path):
    path = tmp_path / "plain.safetensors"
    save_file(random_tensors(shapes(depth=1, self_blocks=(), table=4)), path)
    with pytest.raises(TTTError, match="holds no TTT layers"):
        TTTWeights.load(path)


def test_saving_refuses_non_finite_and_writes_nothing(tmp_path):
    weights = make()
    with torch.no_grad():
        next(iter(weights.layers.values())).w1[0, 0, 0] = float("inf")
    with pytest.raises(TTTError, match="holds NaN or infinity.*nothing was written"):
        weights.save(tmp_path / "bad.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TTTError, match="Cannot write .*Choose a folder"):
        make().save(tmp_path / "file" / "w.safetensors")


@pytest.mark.skipif(os.geteuid() == 0 if hasattr(os, "geteuid") else True, reason="root may write anywhere")
def test_a_read_only_folder(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(TTTError, match="Cannot write"):
        make().save(tmp_path / "w.safetensors")


def test_failure_while_writing_keeps_the_older_file(saved, monkeypatch):
    before = saved.read_bytes()

    def dies_halfway(_tensors, path, metadata=None):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("comfy_ttt.ttt_core.weights.save_file", dies_halfway)
    with pytest.raises(KeyboardInterrupt):
        make(seed=9).save(saved)
    assert saved.read_bytes() == before and [p.name for p in saved.parent.iterdir()] == [saved.name]


def test_a_full_disk_is_said_in_a_sentence(tmp_path):
    with pytest.raises(TTTError, match="No space left.*Free some space"), files.atomic_write(tmp_path / "x"):
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_another_architecture_is_refused_and_another_fine_tune_warned_of():
    base = random_tensors(shapes())
    weights = make(base_sketch=sketch(base))
    with pytest.raises(TTTError, match=r"'w' was made for .*3 blocks.*but the connected model is .*4 blocks"):
        weights.check_base(read_geometry(shapes(depth=4)), "", "w")
    assert weights.check_base(GEOMETRY, sketch(base), "w") == ""
    assert weights.check_base(GEOMETRY, sketch({n: t.to(torch.bfloat16) for n, t in base.items()}), "w") == ""
    other = weights.check_base(GEOMETRY, sketch(random_tensors(shapes(), seed=1)), "w")
    assert "another base" in other and "calibrate again" in other
    tuned = {n: t + 0.03 * t.std() * torch.randn_like(t) if t.dim() > 1 else t for n, t in base.items()}
    assert "another base" in weights.check_base(GEOMETRY, sketch(tuned), "w")


def test_sketch_distances_are_what_the_texts_say():
    base = random_tensors(shapes())
    fp8 = {n: t.to(torch.float8_e4m3fn) for n, t in base.items()}
    assert 0.02 < distance(sketch(base), sketch(fp8)) < 0.035
    assert 1.2 < distance(sketch(base), sketch(random_tensors(shapes(), seed=1))) < 1.6
    assert distance(sketch(base), sketch(random_tensors(shapes(depth=1, self_blocks=())))) == float("inf")
