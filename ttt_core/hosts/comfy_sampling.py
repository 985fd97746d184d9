"""Sampling ComfyUI MODELs for a comparison, the way KSampler does it, but timed and never cached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...kernels import backends
from ..compare import Arm, compare, runs_of
from ..compare_series import Series, parse_sizes
from ..cost import count, explain
from ..errors import TTTError
from .comfy import attached, check_position_table, with_bookkeeping

_COMPILE_KEY = "torch.compile"  # what core's and others' compile nodes call their wrapper


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


def results_folder() -> Path:
    """Where the numbers of a comparison are written: output/ttt_compare."""
    import folder_paths

    return Path(folder_paths.get_output_directory()) / "ttt_compare"


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
    models: Sequence[tuple[str, object]],
    settings: Settings,
    positive,
    negative,
    latent: dict,
    *,
    sizes: str = "",
    repeats: int = 3,
    warmup: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> Series:
    """Times (label, MODEL) pairs, 2 to 4 of which the first is the base, against each other, at one or several sizes.

    Warm-up loads them all, and every block that is replaced in one arm passes through an empty replacement in the others.
    sizes: as parse_sizes reads it; nothing means the latent's own. Can be cancelled at every step and moves the node's
    progress bar. Raises TTTError for settings that cannot be compared.
    """
    import comfy.model_management as management
    import comfy.utils

    if settings.steps < 1 or repeats < 1:
        raise TTTError("TTT Compare needs at least 1 step and 1 repeat.")
    labels, chosen = zip(*models, strict=True)
    labels, chosen = _distinct(labels), _same_bookkeeping(chosen)
    latents = _latents(latent, sizes, chosen)
    compiled = [_is_compiled(m) for m in chosen]

    def arm(label: str, model, start: dict, renew) -> Arm:
        return Arm(label, lambda on_step: sample(model, settings, positive, negative, start, on_step), renew)

    every = [
        [
            arm(label, m, start, torch._dynamo.reset if c and sum(compiled) > 1 else None)
            for label, m, c in zip(labels, chosen, compiled, strict=True)
        ]
        for start in latents
    ]
    progress = comfy.utils.ProgressBar(settings.steps * sum(runs_of(arms, repeats, warmup) for arms in every))

    def on_progress():
        management.throw_exception_if_processing_interrupted()
        progress.update(1)

    comparisons = []
    for arms, start in zip(every, latents, strict=True):
        if any(compiled):
            # Core's compile node drops the guards that would notice other attentions, so older code may still answer.
            torch._dynamo.reset()
        batch, (height, width) = start["samples"].shape[0], (8 * s for s in start["samples"].shape[-2:])
        tokens = _image_tokens(start, chosen[0])
        size = f"{width} x {height}" + (f", batch {batch}" if batch > 1 else "")
        say(f"TTT Compare: {size}, {len(arms)} models")
        comparisons.append(
            compare(
                arms, size=size, device=chosen[0].load_device, repeats=repeats, warmup=warmup, settings=str(settings), tokens=tokens,
                reason=_reason(chosen, labels, tokens, positive), on_progress=on_progress,
            )  # fmt: skip
        )
    return Series(comparisons, _notes(chosen, labels, compiled, warmup))


def _distinct(labels: tuple[str, ...]) -> list[str]:
    """Equal labels told apart by the letter of their input."""
    often = Counter(labels)
    return [f"{label} ({letter})" if often[label] > 1 else label for label, letter in zip(labels, "abcd", strict=False)]


def _own_blocks(model) -> set[int]:
    found = attached(model)
    return {a.block for a in found.weights.layers} if found else set()


def _same_bookkeeping(models) -> list:
    union = set().union(*(_own_blocks(m) for m in models))
    return [with_bookkeeping(m, union - _own_blocks(m)) if union - _own_blocks(m) else m for m in models]


def _latents(latent: dict, sizes: str, models) -> list[dict]:
    wanted = parse_sizes(sizes)
    samples = latent["samples"]
    if not wanted:
        result = [latent]
    elif float(samples.min()) != float(samples.max()) or "noise_mask" in latent:
        raise TTTError("TTT Compare: 'sizes' needs an empty latent to start from; connect Empty SD3 Latent Image, or leave 'sizes' empty.")
    else:
        result = [{**latent, "samples": samples[..., :1, :1].expand(*samples.shape[:-2], h // 8, w // 8).clone()} for w, h in wanted]
    for start in result:
        check_position_table(start["samples"].shape[-2:], models[0])
    return result


def _image_tokens(latent: dict, model) -> int:
    patch = getattr(model.model.diffusion_model, "patch_size", 2)
    height, width = latent["samples"].shape[-2:]
    return -(-height // patch) * -(-width // patch)


def _is_compiled(model) -> bool:
    import comfy.patcher_extension

    return bool(model.wrappers.get(comfy.patcher_extension.WrappersMP.APPLY_MODEL, {}).get(_COMPILE_KEY))


def _reason(models, labels, tokens: int, positive) -> str:
    """What can be said beforehand about the gain at this size: counted operations, and a slow backend."""
    if attached(models[0]) and attached(models[0]).weights.layers:
        return ""  # the base of the comparison is no softmax model
    sentences = []
    for model, label in zip(models, labels, strict=True):
        found = attached(model)
        if not found or not found.weights.layers:
            continue
        weights = found.weights
        text = positive[0][0].shape[1] if positive else 0
        cost = count(weights.geometry, weights.layers, tokens, text, weights.spec.inner_model)
        sentences.append(f"{label}: {explain(cost, tokens)}")
        triton = next((b for b in backends() if b.name == "triton"), None)
        if found.backend == "torch" or triton is None or not triton.available:
            why = "it was asked for" if found.backend == "torch" else f"triton cannot run here: {triton.reason if triton else 'not built in'}"
            sentences.append(f"{label} runs in plain PyTorch, not in fused kernels ({why.rstrip('.')}).")
    return " ".join(sentences)


def _notes(models, labels, compiled, warmup: int) -> list[str]:
    import comfy.ldm.modules.attention as attention

    notes = [f"softmax attention: {getattr(attention.optimized_attention, '__name__', attention.optimized_attention)}"]
    if warmup == 0:
        notes.append("No warm-up: loading and compiling are part of the first run's time.")
    if sum(compiled) > 1:
        names = ", ".join(n for n, c in zip(labels, compiled, strict=True) if c)
        notes.append(
            f"Compiled: {names}. ComfyUI's compile node does not notice that attentions were exchanged and can answer with another arm's "
            "code, so the compiled code was thrown away and rebuilt, untimed, before each of these runs."
        )
    partly = [n for n, m in zip(labels, models, strict=True) if m.load_device.type == "cuda" and m.loaded_size() < 0.99 * m.model_size()]
    if partly:
        notes.append(f"NOT A FAIR TIMING: {', '.join(partly)} did not fit into GPU memory, so weights were moved during sampling.")
    return notes
