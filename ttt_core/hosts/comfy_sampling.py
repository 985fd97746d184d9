"""Sampling two ComfyUI MODELs for a comparison, the way KSampler does it, but timed and never cached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..compare import Arm, Comparison, compare
from ..errors import TTTError
from .comfy import attached, with_bookkeeping


@dataclass(frozen=True)
class Settings:
    """KSampler's settings, the same for every arm."""

    seed: int
    steps: int
    cfg: float
    sampler: str
    scheduler: str

    def __str__(self) -> str:
        return f"{self.sampler}/{self.scheduler}, {self.steps} steps, cfg {self.cfg:g}, seed {self.seed}"


def sampler_names() -> tuple[list[str], list[str]]:
    """(samplers, schedulers) that this ComfyUI offers."""
    import comfy.samplers

    return list(comfy.samplers.KSampler.SAMPLERS), list(comfy.samplers.KSampler.SCHEDULERS)


def sample(model, settings: Settings, positive, negative, latent: dict, on_step: Callable[[int], None] | None = None) -> torch.Tensor:
    """Samples once and returns the latent samples; on_step(i) after step i. No preview is made."""
    import comfy.sample

    start = comfy.sample.fix_empty_latent_channels(model, latent["samples"])
    noise = comfy.sample.prepare_noise(start, settings.seed, latent.get("batch_index"))
    callback = (lambda step, *_: on_step(step)) if on_step else None
    return comfy.sample.sample(
        model, noise, settings.steps, settings.cfg, settings.sampler, settings.scheduler, positive, negative, start,
        noise_mask=latent.get("noise_mask"), callback=callback, disable_pbar=True, seed=settings.seed,
    )  # fmt: skip


def compare_models(
    model_a, model_b, labels: tuple[str, str], settings: Settings, positive, negative, latent: dict, repeats: int = 3, warmup: int = 1
) -> Comparison:
    """Times MODEL a against MODEL b. Both are loaded first; a plain arm gets the same block bookkeeping as the TTT arm.

    Can be cancelled at every step and moves the node's progress bar. Raises TTTError for settings that cannot be compared.
    """
    import comfy.model_management as management
    import comfy.utils

    if settings.steps < 1 or repeats < 1:
        raise TTTError("TTT Compare needs at least 1 step and 1 repeat.")
    if labels[0] == labels[1]:
        labels = (f"{labels[0]} (a)", f"{labels[1]} (b)")
    models = [model_a, model_b]
    blocks = {a.block for m in models if (found := attached(m)) for a in found.weights.layers}
    models = [m if attached(m) and attached(m).weights.layers else with_bookkeeping(m, blocks) for m in models]
    progress = comfy.utils.ProgressBar(settings.steps * 2 * (repeats + warmup))

    def on_progress():
        management.throw_exception_if_processing_interrupted()
        progress.update(1)

    def arm(label, model):
        return Arm(label, lambda on_step: sample(model, settings, positive, negative, latent, on_step))

    height, width = (8 * s for s in latent["samples"].shape[-2:])
    count = latent["samples"].shape[0]
    return compare(
        [arm(label, m) for label, m in zip(labels, models, strict=True)],
        size=f"{width} x {height}" + (f", batch {count}" if count > 1 else ""),
        device=model_a.load_device,
        repeats=repeats,
        warmup=warmup,
        settings=str(settings),
        on_progress=on_progress,
    )
