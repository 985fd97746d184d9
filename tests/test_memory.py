"""The memory estimate against runs measured operation by operation, and what it says when something does not fit."""

from pathlib import Path

import pytest
import tiny
import torch
from live_memory import LiveMemory

from comfy_ttt.ttt_core import TTTSpec, TTTWeights
from comfy_ttt.ttt_core.calibrate import CalibrationSettings, calibrate
from comfy_ttt.ttt_core.finetune import FineTune, FineTuneSettings
from comfy_ttt.ttt_core.examples import Example
from comfy_ttt.ttt_core.memory import estimate_calibration, estimate_finetuning

TEXT = 12
FP32, BF16 = torch.float32, torch.bfloat16
MEDIUM = {
    "model.diffusion_model." + name.removeprefix("model.diffusion_model."): tuple(int(s) for s in shape.split("x"))
    for name, shape in (row.split("\t")[:2] for row in (Path(__file__).parent / "shapes" / "sd35_medium.tsv").read_text().splitlines()[1:])
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{dtype: a random tiny model}."""
    pytest.importorskip("diffusers")
    from comfy_ttt.ttt_core.hosts.diffusers import load_transformer
    from comfy_ttt.ttt_core.hosts.diffusers_training import DiffusersTrainable

    path = tmp_path_factory.mktemp("model") / "tiny.safetensors"
    tiny.write_checkpoint(path)
    return {dtype: DiffusersTrainable(load_transformer(path, dtype=dtype)) for dtype in (FP32, BF16)}


pytestmark = pytest.mark.usefixtures("one_thread")


def conditioning():
    return torch.randn(TEXT, 64), torch.randn(64)


def shapes_of(model):
    return {n: tuple(t.shape) for n, t in model.base_tensors().items()}


def base_bytes(model):
    return sum(t.numel() * t.itemsize for t in model.transformer.state_dict().values())


@pytest.mark.parametrize(
    "dtype, selection, mode, more",
    [
        (FP32, "paper", "ttt", {}),
        (FP32, "all", "ttt", {"checkpointing": True}),
        (FP32, "joint:1", "ttt", {}),
        (FP32, "paper", "attention", {}),
        (FP32, "paper", "full", {}),
        (FP32, "paper", "full", {"checkpointing": True}),
        (FP32, "paper", "full", {"accumulation": 2}),
        (BF16, "paper", "ttt", {}),
        (BF16, "paper", "full", {"checkpointing": True}),
    ],
    ids=str,
)
def test_finetuning_takes_what_was_estimated(models, dtype, selection, mode, more):
    model, size, batch = models[dtype], (16, 24), 2
    settings = FineTuneSettings(mode=mode, batch=batch, **more)
    estimate = estimate_finetuning(shapes_of(model), TTTSpec(selection), settings, size, text_tokens=TEXT, dtype=model.dtype)
    weights = TTTWeights.new(model.geometry, TTTSpec(selection))
    examples = [Example(torch.randn(16, *size), conditioning())] * batch * settings.accumulation
    with LiveMemory() as memory:
        tuning = FineTune(model, weights, examples, settings)
        tuning.step()
        tuning.step()
    measured = memory.peak + base_bytes(model)
    assert estimate.total == pytest.approx(measured, rel=0.15), estimate.text()


def test_calibration_takes_what_was_estimated(models):
    model = models[FP32]
    size, settings = (16, 24), CalibrationSettings(steps=2, samples=24, sampling_steps=4, batch=4, target_tokens=64)
    estimate = estimate_calibration(shapes_of(model), TTTSpec("paper"), settings, size, text_tokens=TEXT, dtype=model.dtype)
    weights = TTTWeights.new(model.geometry, TTTSpec("paper"))
    with LiveMemory() as memory:
        calibrate(model, weights, [conditioning()], [size], settings)
    measured = memory.peak + base_bytes(model)  # on the CPU the samples and the work share one memory
    assert estimate.total + estimate.host == pytest.approx(measured, rel=0.15), estimate.text()


def test_the_refusal_says_what_would_fit():
    settings = FineTuneSettings(mode="full", batch=8)
    estimate = estimate_finetuning(MEDIUM, TTTSpec("paper"), settings, (128, 128))
    assert estimate.parts["base weights"] == pytest.approx(4.6 * 2**30, rel=0.05)  # 2.47 B parameters in bf16
    assert estimate.refusal(1000 * 2**30) is None
    text = estimate.refusal(60 * 2**30)
    assert "Fine-tuning (full, batch 8, latent 128 x 128) needs about" in text and "60.0 GiB are free" in text
    assert "Checkpointing" in text and "would need about" in text
    assert "Even checkpointing and batch 1 with accumulation 8" in estimate.refusal(2 * 2**30)


def test_each_milder_choice_takes_less_for_full_size_medium():
    totals = {
        mode: estimate_finetuning(MEDIUM, TTTSpec("paper"), FineTuneSettings(mode=mode, batch=1, checkpointing=True), (128, 128)).total / 2**30
        for mode in ("ttt", "attention", "full")
    }
    assert 5 < totals["ttt"] < 12 < 0.5 * totals["full"] and totals["ttt"] < totals["attention"] < totals["full"]
    calibrating = estimate_calibration(MEDIUM, TTTSpec("paper"), CalibrationSettings(), (128, 128))
    assert calibrating.total < 12 * 2**30 and calibrating.host < 8.2 * 2**30
