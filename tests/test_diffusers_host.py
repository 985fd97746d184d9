"""The diffusers host: names, loading, the same numbers as ComfyUI, and attaching TTT layers."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

diffusers = pytest.importorskip("diffusers")

from conftest import COMFYUI

from comfy_ttt.demo import digits
from comfy_ttt.ttt_core import AttentionId, TTTError, TTTSpec, TTTWeights, read_geometry
from comfy_ttt.ttt_core.hosts.diffusers import attach, load_linearized, load_transformer, transformer_config
from comfy_ttt.ttt_core.hosts.diffusers_names import PREFIX, to_diffusers, to_original

MEDIUM = dict(blocks=24, heads=24, self_blocks=tuple(range(13)), context=4096, pooled=2048, positions=384)
LARGE = dict(blocks=38, heads=38, self_blocks=(), context=4096, pooled=2048, positions=192)
TINY = dict(blocks=3, heads=2, self_blocks=(0, 1), context=12, pooled=10, positions=12)
TINY_PLAIN = dict(blocks=2, heads=2, self_blocks=(), context=12, pooled=10, positions=12)


def original_shapes(blocks, heads, self_blocks, context, pooled, positions):
    """{name: shape} of an SD3.5 file of this size, written out from the published layout."""
    c = heads * 64
    shapes = {"pos_embed": (1, positions**2, c), "x_embedder.proj.weight": (c, 16, 2, 2), "x_embedder.proj.bias": (c,)}

    def linear(name, rows, columns):
        shapes[name + ".weight"], shapes[name + ".bias"] = (rows, columns), (rows,)

    def attention(name, proj=True):
        linear(name + ".qkv", 3 * c, c)
        shapes[name + ".ln_q.weight"] = shapes[name + ".ln_k.weight"] = (64,)
        if proj:
            linear(name + ".proj", c, c)

    def mlp(name):
        linear(name + ".fc1", 4 * c, c)
        linear(name + ".fc2", c, 4 * c)

    linear("t_embedder.mlp.0", c, 256)
    linear("t_embedder.mlp.2", c, c)
    linear("y_embedder.mlp.0", c, pooled)
    linear("y_embedder.mlp.2", c, c)
    linear("context_embedder", c, context)
    linear("final_layer.linear", 64, c)
    linear("final_layer.adaLN_modulation.1", 2 * c, c)
    for i in range(blocks):
        last, dual = i == blocks - 1, i in self_blocks
        text, image = f"joint_blocks.{i}.context_block", f"joint_blocks.{i}.x_block"
        attention(text + ".attn", proj=not last)
        linear(text + ".adaLN_modulation.1", (2 if last else 6) * c, c)
        attention(image + ".attn")
        if dual:
            attention(image + ".attn2")
        linear(image + ".adaLN_modulation.1", (9 if dual else 6) * c, c)
        mlp(image + ".mlp")
        if not last:
            mlp(text + ".mlp")
    return {PREFIX + name: shape for name, shape in shapes.items()}


# ---------------------------------------------------------------- names

def test_medium_layout_has_the_published_665_tensors():
    shapes = original_shapes(**MEDIUM)
    assert len(shapes) == 665
    assert shapes[PREFIX + "joint_blocks.23.context_block.adaLN_modulation.1.weight"] == (3072, 1536)


@pytest.mark.parametrize("size", [MEDIUM, LARGE], ids=["medium", "large"])
def test_names_are_exactly_those_diffusers_wants(size):
    shapes = original_shapes(**size)
    meta = {n: torch.empty(s, device="meta") for n, s in shapes.items()}
    theirs = to_diffusers(meta)
    config = transformer_config({n.removeprefix(PREFIX): s for n, s in shapes.items()})
    with torch.device("meta"):
        wanted = diffusers.SD3Transformer2DModel(**config).state_dict()
    assert {n: t.shape for n, t in theirs.items()} == {n: t.shape for n, t in wanted.items()}
    assert {n: tuple(t.shape) for n, t in to_original(theirs).items()} == shapes


@pytest.mark.parametrize("size", [TINY, TINY_PLAIN], ids=["attn2", "plain"])
@pytest.mark.parametrize("prefix", [PREFIX, ""])
def test_round_trip_is_exact(size, prefix):
    generator = torch.Generator().manual_seed(0)
    tensors = {prefix + n.removeprefix(PREFIX): torch.randn(s, generator=generator) for n, s in original_shapes(**size).items()}
    back = to_original(to_diffusers(tensors), prefix)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[n], tensors[n]) for n in tensors)


def test_scale_and_shift_change_places():
    tensors = {n: torch.randn(s) for n, s in original_shapes(**TINY).items()}
    theirs = to_diffusers(tensors)
    for ours, name in (("final_layer", "norm_out"), ("joint_blocks.2.context_block", "transformer_blocks.2.norm1_context")):
        shift, scale = tensors[f"{PREFIX}{ours}.adaLN_modulation.1.bias"].chunk(2)
        assert torch.equal(theirs[f"{name}.linear.bias"], torch.cat([scale, shift]))


def test_a_part_of_a_model_is_renamed_as_in_the_whole():
    tensors = {n: torch.randn(s) for n, s in original_shapes(**TINY).items()}
    whole = to_diffusers(tensors)
    part = {n: t for n, t in tensors.items() if "context_block.adaLN" in n or "blocks.1.x_block.attn.qkv" in n}
    for name, tensor in to_diffusers(part, blocks=3).items():
        assert torch.equal(tensor, whole[name])


def test_foreign_tensors_are_named():
    with pytest.raises(KeyError, match="double_blocks.0.img_attn.qkv.weight"):
        to_diffusers({"double_blocks.0.img_attn.qkv.weight": torch.zeros(3, 1)})
    with pytest.raises(KeyError, match="down_blocks.0.weight"):
        to_original({"down_blocks.0.weight": torch.zeros(3, 1)})


# ---------------------------------------------------------------- loading

@pytest.fixture(scope="module")
def transformer():
    return load_transformer(digits.MODEL, dtype=torch.float32)


def test_file_type_is_kept_unless_asked(transformer):
    assert load_transformer(digits.MODEL).dtype == torch.float16
    assert transformer.dtype == torch.float32
    assert transformer.config.dual_attention_layers == (0, 1) and transformer.config.pos_embed_max_size == 48


def test_bad_files_are_one_sentence(tmp_path, transformer):
    with pytest.raises(TTTError, match="does not exist"):
        load_transformer(tmp_path / "none.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(digits.MODEL.read_bytes()[:-100])
    with pytest.raises(TTTError, match="truncated"):
        load_transformer(tmp_path / "cut.safetensors")
    save_file({"input_blocks.0.weight": torch.zeros(2)}, tmp_path / "unet.safetensors")
    with pytest.raises(TTTError, match="unet.safetensors.*not an MMDiT"):
        load_transformer(tmp_path / "unet.safetensors")
    tensors = load_file(digits.MODEL)
    del tensors[PREFIX + "y_embedder.mlp.0.weight"]
    save_file(tensors, tmp_path / "part.safetensors")
    with pytest.raises(TTTError, match="part.safetensors.*y_embedder"):
        load_transformer(tmp_path / "part.safetensors")


# ---------------------------------------------------------------- the same numbers as ComfyUI

COMFY = """
import sys
root, model, cases = sys.argv[1:4]
sys.path.insert(0, root)
sys.argv = sys.argv[:1]
import comfy.options
from comfy.cli_args import args
args.cpu = True
import torch, comfy.sd
from safetensors.torch import load_file, save_file
net = comfy.sd.load_diffusion_model(model, model_options={"dtype": torch.float32}).model.diffusion_model.to("cpu")
data = load_file(cases)
out = {}
with torch.no_grad():
    for name in sorted(n[2:] for n in data if n.startswith("x.")):
        out[name] = net(data["x." + name], data["t"], context=data["context"], y=data["pooled"]).contiguous()
save_file(out, cases)
"""
SIZES = {"square": (16, 16), "wide": (24, 32), "tall": (44, 26), "row": (2, 40), "odd": (25, 43), "odd_both": (17, 13)}


@pytest.mark.comfyui
def test_velocity_equals_comfyuis(tmp_path, transformer):
    generator = torch.Generator().manual_seed(0)
    latents = {n: torch.randn(2, 16, *size, generator=generator) for n, size in SIZES.items()}
    context, pooled = digits.encode_digits([3, None])
    t = torch.tensor([900.0, 130.5])
    cases = tmp_path / "cases.safetensors"
    save_file({**{"x." + n: x for n, x in latents.items()}, "context": context, "pooled": pooled, "t": t}, cases)
    run = subprocess.run([sys.executable, "-c", COMFY, str(COMFYUI), str(digits.MODEL), str(cases)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    theirs = load_file(cases)
    for name, x in latents.items():
        h, w = x.shape[-2:]
        # diffusers takes even latents only; ComfyUI pads odd ones around the edge and crops the result.
        padded = torch.nn.functional.pad(x, (0, w % 2, 0, h % 2), mode="circular")
        with torch.no_grad():
            ours = transformer(padded, context, pooled, t).sample[..., :h, :w]
        assert torch.isfinite(ours).all() and ours.std() > 0.1, name
        assert (ours - theirs[name]).abs().max() < 1e-4, name


# ---------------------------------------------------------------- TTT layers

def new_weights(selection="all", **options):
    geometry = read_geometry({n: tuple(t.shape) for n, t in load_file(digits.MODEL).items()})
    weights = TTTWeights.new(geometry, TTTSpec(attentions=selection, **options), seed=1)
    generator = torch.Generator().manual_seed(2)
    for layer in weights.layers.values():  # convolutions start at zero; give them something to show
        for name, parameter in layer.named_parameters():
            if "conv" in name:
                parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return weights


def run(transformer, size=(16, 24), **extra):
    x = torch.randn(2, 16, *size, generator=torch.Generator().manual_seed(3))
    context, pooled = digits.encode_digits([3, None])
    with torch.no_grad():
        return transformer(x, context, pooled, torch.tensor([700.0, 200.0]), **extra).sample


def test_attach_changes_and_detach_restores_bit_for_bit(transformer):
    before, names = run(transformer), set(transformer.state_dict())
    attachment = attach(transformer, new_weights().layers, backend="torch")
    changed = run(transformer)
    assert torch.isfinite(changed).all() and (changed - before).abs().max() > 1e-2
    assert set(transformer.state_dict()) == names  # nothing of ours would be saved as the base model's
    assert not torch.equal(run(transformer, size=(24, 16)).transpose(-1, -2), changed)
    attachment.detach()
    attachment.detach()
    assert torch.equal(run(transformer), before)


def test_no_layers_is_the_original(transformer):
    before = run(transformer)
    attachment = attach(transformer, {})
    assert torch.equal(run(transformer), before)
    attachment.detach()


@pytest.mark.parametrize("selection", ["self:0", "joint:0", "joint:2"])
def test_layer_gets_what_softmax_got_text_first(transformer, selection):
    """With softmax itself in the layer's place, the model must not change: order, split and grid are right."""
    weights = new_weights(selection)
    (attention, layer), = weights.layers.items()
    seen = {}

    def softmax(q, k, v, grid, text_tokens=0, backend="auto"):
        seen.update(grid=grid, text=text_tokens, tokens=q.shape[1])
        heads = [t.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for t in (q, k, v)]
        return torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2)

    layer.forward = softmax
    before = run(transformer, size=(10, 24))
    attachment = attach(transformer, weights.layers)
    after = run(transformer, size=(10, 24))
    attachment.detach()
    text = 0 if attention.kind == "self" else digits.TOKENS
    assert seen == {"grid": (5, 12), "text": text, "tokens": text + 60}
    assert (after - before).abs().max() < 1e-5


def test_keyword_latent_and_other_sizes_give_the_grid_of_each_call(transformer):
    attachment = attach(transformer, new_weights("self").layers, backend="torch")
    run(transformer, size=(6, 40))
    assert attachment.grid == (3, 20)
    context, pooled = digits.encode_digits([1])
    with torch.no_grad():
        transformer(hidden_states=torch.zeros(1, 16, 8, 8), encoder_hidden_states=context, pooled_projections=pooled,
                    timestep=torch.tensor([1.0]))
    assert attachment.grid == (4, 4)
    attachment.detach()


def test_gradients_reach_every_ttt_parameter(transformer):
    weights = new_weights()
    attachment = attach(transformer, weights.layers, backend="torch")
    context, pooled = digits.encode_digits([3, None])
    x = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(3))
    transformer.requires_grad_(False)
    transformer(x, context, pooled, torch.tensor([700.0, 200.0])).sample.square().mean().backward()
    attachment.detach()
    transformer.requires_grad_(True)
    for attention, layer in weights.layers.items():
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, f"{attention} {name}"


def test_base_changes_come_and_go(transformer):
    tensors = load_file(digits.MODEL)
    changes = {n: t.float() * 1.1 for n, t in tensors.items() if "2.context_block.adaLN" in n or "0.x_block.attn.qkv" in n}
    before = run(transformer)
    attachment = attach(transformer, {}, base_changes=changes)
    changed = run(transformer)
    attachment.detach()
    assert (changed - before).abs().max() > 1e-3
    assert torch.equal(run(transformer), before)


def test_full_converted_file(tmp_path, transformer):
    weights = new_weights("paper")
    save_file({**load_file(digits.MODEL), **weights.layer_tensors()}, tmp_path / "full.safetensors")
    with pytest.raises(TTTError, match="full.safetensors.*load_linearized"):
        load_transformer(tmp_path / "full.safetensors")
    linear, attachment = load_linearized(tmp_path / "full.safetensors", dtype=torch.float32, backend="torch")
    live = attach(transformer, weights.layers, backend="torch")
    expected = run(transformer)
    live.detach()
    assert torch.equal(run(linear), expected)
    attachment.detach()
    assert torch.equal(run(linear), run(transformer))


def test_attach_refuses_before_changing_anything(transformer):
    before = run(transformer)
    weights = new_weights()
    layer = next(iter(weights.layers.values()))
    with pytest.raises(TTTError, match="no attention self:2"):
        attach(transformer, {**weights.layers, AttentionId("self", 2): layer})
    with pytest.raises(TTTError, match="no attention joint:7"):
        attach(transformer, {AttentionId("joint", 7): layer})
    with pytest.raises(TTTError, match="does not have"):
        attach(transformer, weights.layers, base_changes={PREFIX + "joint_blocks.2.x_block.attn2.qkv.weight": torch.zeros(3, 3)})
    with pytest.raises(TTTError, match=r"y_embedder|text_embedder"):
        attach(transformer, weights.layers, base_changes={PREFIX + "y_embedder.mlp.0.weight": torch.zeros(3, 3)})
    assert torch.equal(run(transformer), before)
    attachment = attach(transformer, weights.layers)
    with pytest.raises(TTTError, match="already"):
        attach(transformer, weights.layers)
    attachment.detach()


def test_masks_are_refused(transformer):
    attachment = attach(transformer, new_weights("self:0").layers)
    module = transformer.transformer_blocks[0].attn2
    with pytest.raises(TTTError, match="mask"):
        module(torch.zeros(1, 4, 192), attention_mask=torch.ones(1, 1, 4, 4))
    attachment.detach()


# ---------------------------------------------------------------- the model is what it says

def test_shipped_model_draws_the_digit_asked_for(transformer):
    pytest.importorskip("sklearn")
    wanted = [d for d in range(10) for _ in range(2)]
    velocity = lambda x, t, context, pooled: transformer(x, context, pooled, t).sample
    samples = digits.sample(velocity, wanted, 64, 64, steps=12, cfg=3.0, seed=5)
    read = digits.recogniser()(digits.samples_to_picture(samples))
    assert (read == torch.tensor(wanted)).float().mean() >= 0.8
