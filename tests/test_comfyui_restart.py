"""Calibrate, fine-tune and save in one ComfyUI server; load and sample in the next: the same picture."""

import pytest
from conftest import COMFYUI
from PIL import Image, ImageChops

from comfy_ttt.demo.headless import ComfyServer

pytestmark = pytest.mark.comfyui


def node(kind, **inputs):
    return {"class_type": kind, "inputs": inputs}


def common():
    return {
        "base": node("UNETLoader", unet_name="ttt_tiny_digits.safetensors", weight_dtype="default"),
        "three": node("TTTDemoPrompt", digit="3"),
        "empty": node("TTTDemoPrompt", digit=""),
        "size": node("EmptySD3LatentImage", width=128, height=192, batch_size=2),
    }


def sampled(name, model):
    """Nodes that sample `model` and save the picture."""
    settings = dict(seed=4, steps=6, cfg=3.0, sampler_name="euler", scheduler="simple", denoise=1.0)
    links = dict(model=model, positive=["three", 0], negative=["empty", 0], latent_image=["size", 0])
    return {
        f"{name}_sample": node("KSampler", **settings, **links),
        f"{name}_picture": node("TTTDemoPicture", latent=[f"{name}_sample", 0]),
        f"{name}_save": node("SaveImage", images=[f"{name}_picture", 0], filename_prefix=name),
    }


def difference(a, b):
    """Largest difference of two pictures, 0 to 255."""
    extrema = ImageChops.difference(Image.open(a).convert("L"), Image.open(b).convert("L")).getextrema()
    return extrema[1]


def test_calibrate_fine_tune_save_restart_load_sample(tmp_path):
    graph = common() | {
        "linear": node("TTTLinearize", model=["base", 0], attentions="paper", inner_model="swiglu", key_norm="instance", locality="dwc_qk", seed=0, backend="auto"),
        "fitted": node(
            "TTTCalibrate", model=["linear", 0], positive=["three", 0], latent=["size", 0], filename="fitted", steps=10, samples=8, seed=0, sampling_steps=8
        ),
        "tuned": node(
            "TTTFineTune", model=["fitted", 0], latents=["size", 0], positive=["three", 0], filename="tuned", steps=20, batch_size=1,
            grad_accumulation_steps=1, learning_rate=1e-4, train="attention", seed=0, resume=True, sample_every=10,
        ),
        "graph": node("LossGraphNode", loss=["tuned", 1], filename_prefix="loss"),
        **sampled("softmax", ["base", 0]),
        **sampled("live", ["tuned", 0]),
    }  # fmt: skip
    with ComfyServer(COMFYUI, tmp_path, ("--cpu",)) as server:
        shown = server.run(graph)
        live, softmax = (shown[f"{name}_save"]["images"] for name in ("live", "softmax"))
        report = shown["tuned"]["text"][0]
        assert "tuned_00001.safetensors" in report and "fine-tuned, mode attention, steps 20" in report and "UNTRAINED" not in report
    assert (tmp_path / "output" / "ttt_training" / "tuned.state.safetensors").is_file()
    assert (tmp_path / "output" / "ttt_training" / "tuned_step_000020.png").is_file()

    graph = common() | {
        "loaded": node("TTTLoadWeights", model=["base", 0], weights_name="tuned_00001.safetensors", backend="auto"),
        **sampled("again", ["loaded", 0]),
    }
    with ComfyServer(COMFYUI, tmp_path, ("--cpu",)) as server:
        again = server.run(graph)["again_save"]["images"]
    assert len(live) == len(again) == 2
    assert all(difference(a, b) == 0 for a, b in zip(live, again, strict=True))
    assert difference(live[0], softmax[0]) > 3
