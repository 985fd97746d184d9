"""Calibrating and fine-tuning a MODEL in a real ComfyUI."""

from pathlib import Path

import pytest
import torch
from comfy_helpers import conditioning, empty_latent, load, run_node, sample
from tiny import write_checkpoint

from comfy_ttt.ttt_core import AttentionId, TTTError, TTTSpec, TTTWeights
from comfy_ttt.ttt_core.finetune import FineTune, FineTuneSettings

pytestmark = pytest.mark.comfyui


@pytest.fixture(scope="module")
def checkpoint(comfyui, tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "tiny.safetensors"
    write_checkpoint(path)
    return path


@pytest.fixture
def base(checkpoint):
    return load(checkpoint)


def linearize(model, attentions="paper"):
    from comfy_ttt.nodes.linearize import TTTLinearize

    return run_node(TTTLinearize, model=model, attentions=attentions)[0]


def node(name):
    from comfy_ttt.nodes import NODES

    return next(n for n in NODES if n.define_schema().node_id == name)


def values(model):
    return {n: t.clone() for n, t in model.model.diffusion_model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def entries(*seeds, tokens=8):
    return [conditioning(s, tokens=tokens)[0] for s in seeds]


def trainable(model):
    from comfy_ttt.ttt_core.hosts.comfy_training import ComfyTrainable

    return ComfyTrainable(model)


def test_velocity_is_what_comfyui_computes(base):
    model = trainable(base)
    x, sigma = torch.randn(2, 16, 13, 10), torch.tensor([0.9, 0.4])
    prompts = entries(1, 2)
    ours = model.velocity(x, sigma, prompts)
    context, pooled = (torch.cat([c[0] for c in prompts]), torch.cat([c[1]["pooled_output"] for c in prompts]))
    denoised = base.model.apply_model(x, sigma, c_crossattn=context, y=pooled, transformer_options={})
    theirs = (x - denoised) / sigma[:, None, None, None]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_prompts_of_unequal_length_share_a_batch_and_are_recorded_each(base):
    model = trainable(base)
    x, sigma = torch.randn(3, 16, 8, 8), torch.tensor([0.9, 0.4, 0.7])
    prompts = [*entries(1), *entries(2, tokens=5), *entries(3)]
    seen = []
    with model.recording([AttentionId("joint", 1)], seen.append):
        together = model.velocity(x, sigma, prompts)
    apart = torch.cat([model.velocity(x[i : i + 1], sigma[i : i + 1], prompts[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)
    assert [(r.elements, r.text_tokens, r.grid, r.q.shape[0]) for r in seen] == [((0, 2), 8, (4, 4), 2), ((1,), 5, (4, 4), 1)]


def test_records_are_the_softmax_attention_and_running_puts_layers_in_its_place(base):
    model = trainable(base)
    weights = TTTWeights.new(model.geometry, TTTSpec("self:0 joint:2"))
    x, sigma, prompts = torch.randn(1, 16, 8, 8), torch.tensor([0.5]), entries(1)
    plain = model.velocity(x, sigma, prompts)
    seen = []
    with model.recording(weights.layers, seen.append):
        assert torch.equal(model.velocity(x, sigma, prompts), plain)
    assert [str(r.attention) for r in seen] == ["self:0", "joint:2"]
    for r in seen:
        q, k, v = (t.unflatten(2, (3, 64)).transpose(1, 2) for t in (r.q, r.k, r.v))
        softmax = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        torch.testing.assert_close(r.out, softmax, rtol=1e-4, atol=1e-4)
    with model.running(weights.layers):
        changed = model.velocity(x, sigma, prompts)
    assert not torch.allclose(changed, plain, atol=1e-3)
    assert torch.equal(model.velocity(x, sigma, prompts), plain)


def test_running_swaps_base_tensors_and_restores_them(base):
    model = trainable(base)
    name = "model.diffusion_model.joint_blocks.1.x_block.attn.qkv.weight"
    x, sigma, prompts = torch.randn(1, 16, 8, 8), torch.tensor([0.5]), entries(1)
    before, plain = values(base), model.velocity(x, sigma, prompts)
    swapped = (model.base_tensors()[name].clone() * 1.5).requires_grad_()
    with model.running({}, {name: swapped}):
        out = model.velocity(x, sigma, prompts)
        out.square().mean().backward()
    assert float(swapped.grad.abs().sum()) > 0 and not torch.allclose(out, plain, atol=1e-4)
    assert torch.equal(model.velocity(x, sigma, prompts), plain) and same(before, values(base))
    with pytest.raises(TTTError, match="no tensor .*another model"), model.running({}, {name: swapped[:3]}):
        pass


def calibrate(model, **options):
    given = dict(positive=[*conditioning(1), *conditioning(2)], latent=empty_latent(128, 96), steps=40, samples=16, sampling_steps=8, cfg=2.0)
    return run_node(node("TTTCalibrate"), model=model, **{**given, "filename": "cal", **options})


def test_calibrate_fits_saves_and_leaves_the_model_alone(base):
    from comfy_ttt.ttt_core.hosts import comfy as host

    before, softmax = values(base), sample(base, steps=4)
    linear = linearize(base)
    untrained = sample(linear, steps=4)
    out, curve, report = calibrate(linear, sizes="128x96 96x160")
    ours = sample(out, steps=4)
    assert float((ours - softmax).norm()) < 0.85 * float((untrained - softmax).norm())
    assert same(before, values(base)) and torch.equal(sample(base, steps=4), softmax) and torch.equal(sample(linear, steps=4), untrained)
    path = Path(report.splitlines()[0].removeprefix("Saved "))
    assert path.is_file() and "UNTRAINED" not in report and "calibrated, steps 40" in report and curve.shape[-1] == 3
    loaded, _ = host.apply_weights(base, TTTWeights.load(path), path.name)
    assert torch.equal(sample(loaded, steps=4), ours)


def test_a_long_negative_prompt_calibrates_too(base):
    _, _, report = calibrate(linearize(base, "joint:2"), negative=conditioning(4, tokens=21), steps=5, filename="long")
    assert "calibrated" in report


def interrupt_after(monkeypatch, count, words=""):
    """ComfyUI's cancel, pressed when a progress text with these words is shown for the `count`-th time."""
    import comfy.model_management as management

    from comfy_ttt.ttt_core.hosts import comfy_tuning

    seen = []

    def line(self, say, text):
        seen.extend([text] if words in text else [])
        if len(seen) == count:
            management.interrupt_current_processing()

    monkeypatch.setattr(comfy_tuning._Curve, "line", line)
    return management.InterruptProcessingException


def test_cancelled_calibration_keeps_what_is_fitted(base, monkeypatch):
    from comfy_ttt.ttt_core.hosts import comfy_files as files

    interrupted = interrupt_after(monkeypatch, 10, "fitting self:1")  # the second attention, part of the way
    with pytest.raises(interrupted):
        calibrate(linearize(base), filename="stopped")
    weights = TTTWeights.load(files.find_file("stopped_partial_00001.safetensors"))
    assert weights.made["attentions"] == "self:0" and not [n for n in files.list_files() if n.startswith("stopped_0")]


@pytest.mark.parametrize("call, kept", [(3, ""), (0, "self:0")])
def test_calibration_cancelled_inside_the_model_keeps_what_is_fitted(base, monkeypatch, call, kept):
    """ComfyUI raises its interruption out of any operation of the model; recording in two passes, the second is hit."""
    import comfy.model_management as management

    from comfy_ttt.ttt_core import calibrate as core
    from comfy_ttt.ttt_core.hosts import comfy_files as files
    from comfy_ttt.ttt_core.hosts.comfy_training import ComfyTrainable

    calls, velocity, record = [], ComfyTrainable.velocity, core._record

    def interrupted(self, *args):
        calls.append(1)
        if len(calls) == call or (kept and core._passes == 2):
            raise management.InterruptProcessingException
        return velocity(self, *args)

    def counted(*args, **kwargs):
        core._passes = getattr(core, "_passes", 0) + 1
        return record(*args, **kwargs)

    monkeypatch.setattr(core, "_passes", 0, raising=False)
    monkeypatch.setattr(core, "_record", counted)
    monkeypatch.setattr(ComfyTrainable, "velocity", interrupted)
    name = f"inside_{call}"
    with pytest.raises(management.InterruptProcessingException):
        calibrate(linearize(base), filename=name, steps=5, memory_gb=0.008)
    found = [n for n in files.list_files() if n.startswith(name)]
    assert found == ([f"{name}_partial_00001.safetensors"] if kept else [])
    if kept:
        assert TTTWeights.load(files.find_file(found[0])).made["attentions"] == "self:0"


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(sizes="4096"), "larger than this model's position table"),
        (dict(sizes="100x100"), "not a multiple of 16"),
        (dict(sizes="big"), "Cannot read the size 'big'"),
        (dict(filename="../x"), "not a usable file name"),
        (dict(samples=2), "samples is 2"),
        (dict(positive=[[torch.zeros(1, 8, 64), {}]]), "no pooled output"),
    ],
)
def test_bad_calibration_input(base, options, words):
    with pytest.raises(TTTError, match=words):
        calibrate(linearize(base), **options)


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(base):
    import folder_paths

    (Path(folder_paths.get_folder_paths("ttt")[0]) / "wall").write_text("in the way")
    with pytest.raises(TTTError, match="Cannot write .*wall.*Choose a folder"):
        calibrate(linearize(base), filename="wall/x", steps=100_000, samples=10_000)
    with pytest.raises(TTTError, match="Cannot write .*wall.*Choose a folder"):
        fine_tune(linearize(base), "wall/x", steps=100_000)


def test_training_nodes_refuse_a_plain_model(base):
    with pytest.raises(TTTError, match="TTT Calibrate: the connected MODEL has no TTT layers"):
        calibrate(base)
    with pytest.raises(TTTError, match="TTT Fine-Tune: the connected MODEL has no TTT layers"):
        fine_tune(base)


def dataset(count=4):
    g = torch.Generator().manual_seed(9)
    latents = [{"samples": torch.randn(1, 16, 12, 16, generator=g)} for _ in range(count)]
    with torch.inference_mode():  # as they arrive in ComfyUI
        return [{"samples": x["samples"].clone()} for x in latents], [conditioning(s) for s in range(count)]


def fine_tune(model, filename="tuned", **options):
    latents, positive = options.pop("data", None) or dataset()
    given = dict(steps=4, batch_size=2, grad_accumulation_steps=1, learning_rate=1e-3, train="ttt", seed=0, resume=True)
    lists = {name: [value] for name, value in {**given, **options}.items()}
    return run_node(node("TTTFineTune"), model=[model], latents=latents, positive=positive, filename=[filename], **lists)


@pytest.mark.parametrize("mode", ["ttt", "attention", "full"])
def test_fine_tune_each_mode(base, mode, checkpoint):
    from comfy_ttt.ttt_core.hosts import comfy as host

    before, softmax = values(base), sample(base)
    out, loss, picture, report = fine_tune(linearize(base), f"tuned_{mode}", train=mode, sample_every=2)
    assert len(loss["loss"]) == 4 and all(v > 0 for v in loss["loss"]) and picture.dim() == 4
    assert same(before, values(base)) and torch.equal(sample(base), softmax)
    weights = TTTWeights.load(Path(report.splitlines()[0].removeprefix("Saved ")))
    changed = weights.base_changes
    assert bool(changed) == (mode != "ttt") and weights.made["state"] == "fine-tuned"
    if mode == "attention":
        assert all(".attn" in n and (".qkv." in n or ".proj." in n) for n in changed)
        assert not any("joint_blocks.0.context_block" in n for n in changed)  # block 0's joint attention stays softmax
    loaded, warning = host.apply_weights(load(checkpoint), weights, "tuned")
    assert not warning and torch.equal(sample(loaded), sample(out))
    assert not torch.equal(sample(out), sample(linearize(base)))


def test_cancelled_and_resumed_equals_uninterrupted(base, monkeypatch):
    linear = linearize(base)
    whole = sample(fine_tune(linear, "whole", steps=5)[0])
    with monkeypatch.context() as patch, pytest.raises(interrupt_after(patch, 2)):
        fine_tune(linear, "parts", steps=5)
    out, loss, _, report = fine_tune(linear, "parts", steps=5)
    assert torch.equal(sample(out), whole) and len(loss["loss"]) == 5 and "steps 5" in report


def test_starting_anew_keeps_the_old_state_aside(base):
    import folder_paths

    linear = linearize(base)
    fine_tune(linear, "anew", steps=2)
    _, loss, _, _ = fine_tune(linear, "anew", steps=1, resume=False)
    folder = Path(folder_paths.get_output_directory()) / "ttt_training"
    assert len(loss["loss"]) == 1 and len(list(folder.glob("anew.state*"))) == 2


def test_a_lora_is_not_baked_into_trained_base_weights(base):
    model = base.clone()
    model.add_patches({"diffusion_model.joint_blocks.0.x_block.attn.qkv.bias": ("diff", (torch.ones(576),))})
    with pytest.raises(TTTError, match="would bake the LoRA"):
        fine_tune(linearize(model), "baked", train="attention")
    fine_tune(linearize(model), "fine", steps=1)


def test_counts_that_do_not_match(base):
    latents, positive = dataset()
    with pytest.raises(TTTError, match="4 latents and 3 conditionings"):
        fine_tune(linearize(base), "counts", data=(latents, positive[:3]))


def test_gradients_reach_every_trained_parameter_and_no_other(base):
    from comfy_ttt.ttt_core.hosts import comfy as host
    from comfy_ttt.ttt_core.hosts.comfy_training import examples_from

    linear = linearize(base)
    model = trainable(linear)
    run = FineTune(model, host.attached(linear).weights, examples_from(model, *dataset()), FineTuneSettings(mode="full", drop=0.5))
    seen = {}
    step = run.optimizer.step
    run.optimizer.step = lambda: (seen.update({n: float(t.grad.abs().sum()) if t.grad is not None else 0.0 for n, t in run.trained.items()}), step())
    run.step()
    silent = [n for n, g in seen.items() if not g > 0]
    assert not silent
    assert all(p.grad is None and not p.requires_grad for p in base.model.diffusion_model.parameters())


def test_what_cannot_fit_is_refused_before_the_first_step_with_what_would(base, monkeypatch):
    import comfy.model_management as management

    said = []
    monkeypatch.setattr("comfy_ttt.nodes.finetune.say_on", lambda node: said.append)
    fine_tune(linearize(base), "fits", steps=1)
    assert any("Fine-tuning (ttt, batch 2, latent 12 x 16): about 0." in line for line in said)
    monkeypatch.setattr(management, "get_free_memory", lambda *_: 12 * 2**20)
    with pytest.raises(TTTError, match=r"Fine-tuning \(full.* needs about .* GiB, and .* are free.*would need about"):
        fine_tune(linearize(base), "full", train="full", gradient_checkpointing=False)
    with pytest.raises(TTTError, match="Calibrating .* needs about"):
        calibrate(linearize(base), sizes="1024x1024")
