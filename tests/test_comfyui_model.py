"""TTT on a MODEL in a real ComfyUI: no leak into softmax, chaining, sizes, saving, memory management."""

import pytest
import torch
from comfy_helpers import conditioning, empty_latent, load, run_node, sample, trained
from safetensors import safe_open
from tiny import write_checkpoint

from comfy_ttt.ttt_core import TTTError, TTTSpec, TTTWeights

pytestmark = pytest.mark.comfyui

SIZES = [(256, 192, 1), (200, 344, 1), (128, 96, 2), (136, 104, 1)]


@pytest.fixture(scope="module")
def checkpoint(comfyui, tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "tiny.safetensors"
    write_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def base(checkpoint):
    return load(checkpoint)


def linearize(model, attentions="paper", **kwargs):
    from comfy_ttt.nodes.linearize import TTTLinearize
    from comfy_ttt.ttt_core.hosts import comfy as host

    out = run_node(TTTLinearize, model=model, attentions=attentions, **kwargs)[0]
    trained(host.attached(out).weights)
    return out


@pytest.mark.parametrize("width, height, batch", SIZES)
@pytest.mark.parametrize("cfg", [1.0, 5.0])
def test_softmax_is_bit_identical_before_between_and_after(base, width, height, batch, cfg):
    options = dict(width=width, height=height, batch=batch, cfg=cfg)
    before = sample(base, **options)
    ttt = linearize(base)
    first = sample(ttt, **options)
    between = sample(base, **options)
    second = sample(ttt, **options)
    after = sample(base, **options)
    assert torch.equal(before, between) and torch.equal(before, after)
    assert torch.equal(first, second)
    assert not torch.allclose(before, first, atol=1e-3)


def test_two_different_ttt_models_of_one_base_do_not_mix(base):
    a, b = linearize(base, "self"), linearize(base, "joint:2")
    out_a, out_b = sample(a), sample(b)
    assert not torch.equal(out_a, out_b)
    assert torch.equal(sample(a), out_a) and torch.equal(sample(b), out_b)


@pytest.mark.parametrize("attentions", ["none"])
def test_nothing_selected_is_the_original(base, attentions):
    assert torch.equal(sample(linearize(base, attentions), cfg=4.0), sample(base, cfg=4.0))


def test_empty_bookkeeping_changes_nothing(base):
    from comfy_ttt.ttt_core.hosts.comfy import with_bookkeeping

    assert torch.equal(sample(with_bookkeeping(base, [0, 1, 2]), cfg=4.0), sample(base, cfg=4.0))


def test_every_selected_attention_is_really_replaced(base):
    """What runs is the TTT layer of that attention and nothing else, with the grid of this very call."""
    from comfy_ttt.ttt_core.hosts import comfy as host

    model = linearize(base, "all")
    calls = []
    for attention, layer in host.attached(model).weights.layers.items():
        layer.register_forward_hook(
            lambda _m, args, kw, _o, a=attention: calls.append((str(a), args[0].shape[1], kw["grid"], kw["text_tokens"])), with_kwargs=True
        )
    sample(model, width=200, height=136, steps=1)
    h, w = 17 // 2 + 1, 25 // 2 + 1
    expected = [("joint:0", 8), ("self:0", 0), ("joint:1", 8), ("self:1", 0), ("joint:2", 8)]
    assert calls == [(name, h * w + text, (h, w), text) for name, text in expected]


def test_node_order_with_another_attention_override_does_not_matter(base):
    def halve(func, *args, **kwargs):
        return func(*args, **kwargs) * 0.5

    def with_override(model):
        model = model.clone()
        model.model_options["transformer_options"]["optimized_attention_override"] = halve
        return model

    plain = sample(with_override(base))
    assert not torch.equal(plain, sample(base))
    assert torch.equal(sample(with_override(linearize(base, "none"))), plain)
    torch.manual_seed(0)
    before, after = sample(linearize(with_override(base), "self:0")), sample(with_override(linearize(base, "self:0")))
    assert torch.equal(before, after)
    assert not torch.equal(before, sample(linearize(base, "self:0")))  # the kept attentions went through the override


def test_an_override_that_wraps_attention_itself_does_not_meet_ours_again(base):
    def wraps(func, q, k, v, heads, transformer_options=None, **kwargs):
        from comfy.ldm.modules.attention import optimized_attention

        return optimized_attention(q, k, v, heads, transformer_options={k: v for k, v in transformer_options.items() if "override" not in k})

    model = linearize(base, "self:0")
    expected = sample(model)
    model.model_options["transformer_options"]["optimized_attention_override"] = wraps
    assert torch.equal(sample(model), expected)


def test_block_replacements_of_other_packs_are_chained(base):
    seen = []

    def patch(args, extra):
        seen.append(extra)
        out = extra["original_block"](args)
        return {"img": out["img"] * 1.5, "txt": out["txt"]}

    def patched(model):
        model = model.clone()
        model.set_model_patch_replace(patch, "dit", "double_block", 0)
        return model

    assert torch.equal(sample(patched(linearize(base, "none"))), sample(patched(base)))
    one, two = sample(patched(linearize(base))), sample(linearize(patched(base)))
    assert seen and torch.equal(one, two)
    assert not torch.equal(one, sample(linearize(base)))


def test_skip_layer_guidance(base):
    from comfy_extras.nodes_sd3 import SkipLayerGuidanceSD3

    def slg(model):
        if hasattr(SkipLayerGuidanceSD3, "execute"):
            return SkipLayerGuidanceSD3.execute(model, "0, 1", 3.0, 0.0, 1.0).args[0]
        return SkipLayerGuidanceSD3().skip_guidance_sd3(model, "0, 1", 3.0, 0.0, 1.0)[0]

    assert torch.equal(sample(slg(linearize(base, "none")), cfg=4.0), sample(slg(base), cfg=4.0))
    assert torch.equal(sample(slg(linearize(base)), cfg=4.0), sample(linearize(slg(base)), cfg=4.0))


def lora_onto(model, strength=1.0):
    import comfy.sd

    name = "diffusion_model.joint_blocks.0.x_block.attn2.qkv"
    g = torch.Generator().manual_seed(3)
    lora = {f"{name}.lora_up.weight": torch.randn(576, 4, generator=g) * 0.3, f"{name}.lora_down.weight": torch.randn(4, 192, generator=g) * 0.3}
    with torch.inference_mode():
        return comfy.sd.load_lora_for_models(model, None, lora, strength, 0)[0]


def test_lora_before_or_after_and_gone_afterwards(base):
    plain = sample(base)
    with_lora = sample(lora_onto(base))
    assert not torch.equal(plain, with_lora)
    assert torch.equal(sample(lora_onto(linearize(base, "none"))), with_lora)
    assert torch.equal(sample(lora_onto(linearize(base))), sample(linearize(lora_onto(base))))
    assert torch.equal(sample(base), plain)


def test_sketch_is_of_the_base_even_while_a_lora_is_patched_in(base):
    from comfy_ttt.ttt_core.hosts.comfy import model_sketch

    def joint_lora(model):
        patch = {"diffusion_model.joint_blocks.0.x_block.attn.qkv.weight": ("diff", (torch.ones(576, 192),))}
        model = model.clone()
        model.add_patches(patch)
        return model

    before = model_sketch(base)
    sample(joint_lora(base))
    assert model_sketch(base) == before


def test_area_conditioning_gives_each_call_its_own_grid(base):
    area = [[c, {**d, "area": (6, 8, 2, 2), "strength": 1.0}] for c, d in conditioning(3)]
    assert sample(linearize(base, "all"), positive=conditioning(1) + area).isfinite().all()


def controlnet():
    """A small SD3 ControlNet with random weights, applied as the core node does."""
    import comfy.cldm.mmdit
    import comfy.controlnet
    import comfy.ops

    config = dict(
        depth=3, in_channels=16, patch_size=2, adm_in_channels=64, num_patches=48 * 48, pos_embed_max_size=48, qk_norm="rms",
        context_embedder_config={"target": "torch.nn.Linear", "params": {"in_features": 64, "out_features": 192}},
    )  # fmt: skip
    module = comfy.cldm.mmdit.ControlNet(num_blocks=1, control_latent_channels=3, operations=comfy.ops.disable_weight_init, **config)
    g = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=g) * 0.1)
    module.dtype = torch.float32
    return comfy.controlnet.ControlNet(module, compression_ratio=1, load_device=torch.device("cpu"))


def test_controlnet(base):
    import nodes

    hint = torch.rand(1, 96, 128, 3, generator=torch.Generator().manual_seed(7))
    prompt, _ = nodes.ControlNetApplyAdvanced().apply_controlnet(conditioning(1), conditioning(2), controlnet(), hint, 1.0, 0.0, 1.0)
    alone, plain = sample(base, positive=prompt), sample(base)
    assert not torch.allclose(alone, plain, atol=1e-3)
    assert torch.equal(sample(linearize(base, "none"), positive=prompt), alone)
    ttt = linearize(base)
    assert not torch.allclose(sample(ttt, positive=prompt), sample(ttt), atol=1e-3)
    assert torch.equal(sample(base, positive=prompt), alone) and torch.equal(sample(base), plain)


def test_layers_are_under_comfyuis_memory_management(base):
    import comfy.model_management as management

    from comfy_ttt.ttt_core.hosts.comfy import KEY, TTTStack

    management.unload_all_models()
    model = linearize(base, "all")
    sample(model)
    stacks = [m.model for m in management.loaded_models() if isinstance(m.model, TTTStack)]
    assert len(stacks) == 1
    bytes_used = sum(p.numel() * p.element_size() for p in stacks[0].parameters())
    assert model.get_additional_models_with_key(KEY)[0].model_size() == bytes_used > 0
    management.unload_all_models()
    assert not management.loaded_models()


@pytest.mark.parametrize("kind", ["inputs", "layer"])
def test_non_finite_values_stop_the_run_with_a_sentence(base, kind):
    from comfy_ttt.ttt_core.hosts import comfy as host

    model = linearize(base, "self")
    if kind == "layer":
        layer = list(host.attached(model).weights.layers.values())[1]
        with torch.no_grad():
            layer.w1.fill_(float("nan"))
        expected = r"TTT layer of attention self:1 produced NaN or infinity at step 1 of 2"
    else:
        model.add_patches({"diffusion_model.joint_blocks.0.x_block.attn.proj.bias": ("diff", (torch.full((192,), float("nan")),))})
        expected = r"the base model itself fails here"
    with pytest.raises(TTTError, match=expected):
        sample(model)


def test_small_file_round_trip(base, checkpoint):
    from comfy_ttt.nodes.load import TTTLoadWeights
    from comfy_ttt.nodes.save import TTTSaveWeights
    from comfy_ttt.ttt_core.hosts import comfy_files as files

    model = linearize(base, "self:0 joint:2")
    for expected in ("trip/mine_00001.safetensors", "trip/mine_00002.safetensors"):
        report = run_node(TTTSaveWeights, model=model, filename="trip/mine")[-1]
        assert expected in report
    assert "trip/mine_00001.safetensors" in files.list_files()
    again, report = run_node(TTTLoadWeights, model=load(checkpoint), weights_name="trip/mine_00001.safetensors")
    assert "calibrated" in report and "UNTRAINED" not in report and "WARNING" not in report
    assert torch.equal(sample(again), sample(model))


@pytest.mark.parametrize("with_lora", [False, True])
def test_core_model_save_keeps_the_layers_and_ours_loads_them(base, with_lora):
    import folder_paths
    from comfy_extras.nodes_model_merging import ModelSave

    from comfy_ttt.nodes.load import TTTLoadModel
    from comfy_ttt.ttt_core.hosts import comfy as host

    folder = folder_paths.get_output_directory() + "/diffusion_models"
    folder_paths.add_model_folder_path("diffusion_models", folder)
    name = f"full_{with_lora}"
    model = linearize(lora_onto(base) if with_lora else base)
    with torch.inference_mode():
        ModelSave().save(model, f"diffusion_models/{name}")
        ModelSave().save(base, f"diffusion_models/plain_{name}")
    with safe_open(f"{folder}/{name}_00001_.safetensors", "pt") as file:
        names = set(file.keys())
    with safe_open(f"{folder}/plain_{name}_00001_.safetensors", "pt") as file:
        plain_names = set(file.keys())
    added = names - plain_names
    assert "model.diffusion_model.ttt.spec" in added and not plain_names - names
    assert len(added) == 1 + 3 * 7 and all(".ttt." in n for n in added)
    loaded, report = run_node(TTTLoadModel, model_name=f"{name}_00001_.safetensors")
    assert torch.equal(sample(loaded), sample(model))
    assert host.attached(loaded).weights.spec == TTTSpec("paper")
    with torch.inference_mode():
        ModelSave().save(loaded, f"diffusion_models/again_{name}")
    with safe_open(f"{folder}/again_{name}_00001_.safetensors", "pt") as a, safe_open(f"{folder}/{name}_00001_.safetensors", "pt") as b:
        assert set(a.keys()) == names
        assert all(torch.equal(a.get_tensor(n), b.get_tensor(n)) for n in names if not n.endswith("ttt.spec"))


def test_changed_base_tensors_apply_under_a_lora_and_leave_the_base_alone(base):
    from comfy_ttt.ttt_core.hosts import comfy as host

    plain = sample(base)
    name = "model.diffusion_model.joint_blocks.0.x_block.attn2.qkv.weight"
    old = base.model.diffusion_model.state_dict()[name.removeprefix("model.diffusion_model.")]
    model = linearize(base, "joint:2")
    weights = host.attached(model).weights
    changed = TTTWeights(weights.spec, weights.geometry, weights.layers, {name: old.clone() + 0.05}, weights.made, weights.base_sketch)
    tuned, warning = host.apply_weights(base, changed, "tuned")
    assert not warning and not torch.equal(sample(tuned), sample(model))
    by_hand = model.clone()
    by_hand.add_patches({name.removeprefix("model."): ("diff", (torch.full_like(old, 0.05),))})
    torch.testing.assert_close(sample(tuned), sample(by_hand), rtol=1e-4, atol=1e-4)
    after, before = sample(lora_onto(tuned)), sample(host.apply_weights(lora_onto(base), changed, "tuned")[0])
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)  # sums in another order
    assert not torch.allclose(after, sample(tuned), atol=1e-2)
    assert torch.equal(sample(host.detach(tuned)), plain) and torch.equal(sample(base), plain)


def test_linearize_again_replaces_the_layers(base):
    once = linearize(base, "self:0")
    twice = linearize(linearize(base, "all"), "self:0")
    assert torch.equal(sample(twice), sample(once))


def test_layers_made_in_a_node_can_be_trained(base):
    from comfy_ttt.ttt_core.hosts import comfy as host

    layer = next(iter(host.attached(linearize(base)).weights.layers.values()))
    q = torch.randn(1, 6, 192)
    layer(q, q, q, grid=(2, 3)).sum().backward()
    assert not layer.w1.is_inference() and layer.w1.grad is not None


def test_untrained_says_so_and_trained_does_not(base):
    from comfy_ttt.nodes.linearize import TTTLinearize
    from comfy_ttt.ttt_core.hosts import comfy as host
    from comfy_ttt.ttt_core.report import describe_weights

    model, report = run_node(TTTLinearize, model=base, attentions="paper")
    assert "UNTRAINED" in report and "Calibrate" in report and "self:0-1 joint:2" in report
    assert "UNTRAINED" in TTTLinearize.define_schema().description
    trained(host.attached(model).weights)
    assert "UNTRAINED" not in describe_weights(host.attached(model).weights, "auto")
