"""Calibrating and fine-tuning a MODEL inside ComfyUI: progress on the node, cancel, and a file on disk before "done"."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..calibrate import CalibrationReport, CalibrationSettings, calibrate
from ..compare_series import parse_sizes
from ..errors import TTTError
from ..files import check_writable
from ..finetune import FineTune, FineTuneSettings, StepReport
from ..loss_curve import loss_curve
from ..memory import MemoryEstimate, estimate_calibration, estimate_finetuning
from ..pictures import side_by_side
from ..progress import Progress
from ..trajectory import euler
from ..weights import TTTWeights
from .comfy import attach, require_attached
from .comfy_files import check_name, new_file
from .comfy_training import ComfyTrainable, clone_entries, examples_from

Say = Callable[[str], None]  # shows a line of text on the node
_REDRAW = 2.0  # seconds between two pictures of the loss curve


def calibrate_model(
    model, positive: list, latent: dict, settings: CalibrationSettings, *, negative: list | None = None, sizes: str = "", filename: str, say: Say
) -> tuple[object, CalibrationReport, Path]:
    """(MODEL with fitted layers, report, the small file written). The MODEL that goes in is not changed.

    sizes: picture sizes such as "1024x1024 832x1216", empty for the latent's. Cancelled by the user, what was fitted so
    far is saved as <filename>_partial and ComfyUI's own interruption follows. Raises TTTError.
    """
    import comfy.model_management as management
    import comfy.utils

    found = require_attached(model, "TTT Calibrate")
    check_writable(new_file(filename))  # what cannot be saved is refused now and not after the work
    trainable = ComfyTrainable(model, null=first_entry(negative), backend=found.backend)
    shapes = [(h // 8, w // 8) for w, h in parse_sizes(sizes)] or [tuple(latent["samples"].shape[-2:])]
    bar, shown = comfy.utils.ProgressBar(1000), _Curve()

    largest = max(shapes, key=lambda s: s[0] * s[1])
    estimate = estimate_calibration(
        base_shapes(trainable), found.weights.spec, settings, largest, text_tokens=_longest(positive, negative), dtype=_estimated_type(trainable)
    )
    _check_memory(estimate, trainable, say)

    def progress(now: Progress) -> None:
        shown.add(now.loss)
        bar.update_absolute(now.done * 1000 // now.total, 1000, shown.preview("relative error"))
        shown.line(say, f"{now.stage}" + (f", error {now.loss:.1%}" if now.loss is not None else "") + _left(now.seconds_left))

    with torch.inference_mode(False):
        entries = clone_entries(positive)
    weights, report = calibrate(
        trainable, found.weights, entries, shapes, settings, progress=progress, cancel=management.processing_interrupted,
        interruptions=(management.InterruptProcessingException,),
    )  # fmt: skip
    if report.cancelled:
        management.interrupt_current_processing(False)  # taken note of; it must not stop whatever runs next
    if report.cancelled and not report.fitted:
        raise management.InterruptProcessingException
    path = weights.save(new_file(filename + "_partial" if report.cancelled else filename))
    if report.cancelled:
        say(f"cancelled; what was fitted is in {path}")
        raise management.InterruptProcessingException
    return attach(model, weights, found.backend), report, path


def fine_tune_model(
    model,
    latents: Sequence[dict],
    positive: Sequence[list],
    settings: FineTuneSettings,
    *,
    negative: list | None = None,
    filename: str,
    resume: bool = True,
    save_every: int = 100,
    sample_every: int = 0,
    vae=None,
    say: Say,
) -> tuple[object, FineTune, Path, torch.Tensor]:
    """(MODEL with trained layers, the run, the small file written, pictures (n, H, W, 3) of the last samples or the curve).

    The state of the run is kept in output/ttt_training/<filename>.state.safetensors; with resume an existing one is gone
    on from, bit for bit as if it had not been interrupted. Cancelled, the state is saved and ComfyUI's own interruption
    follows. Raises TTTError.
    """
    import comfy.model_management as management
    import comfy.utils

    found = require_attached(model, "TTT Fine-Tune")
    check_writable(new_file(filename))
    trainable = ComfyTrainable(model, null=first_entry(negative), backend=found.backend)
    if settings.mode != "ttt" and trainable.has_patches:
        raise TTTError(
            f"TTT Fine-Tune in mode '{settings.mode}' would bake the LoRA or patch on this MODEL into the trained base weights; "
            "connect the model without it, or choose mode 'ttt'."
        )
    folder = _training_folder()
    state = folder / f"{check_name(filename)}.state.safetensors"
    check_writable(state)
    with torch.inference_mode(False):
        tuning = FineTune(trainable, found.weights, examples_from(trainable, latents, positive), settings)
    largest = max(tuning.examples.sizes, key=lambda s: s[0] * s[1])
    prompts = [e for conditioning in positive for e in conditioning]
    estimate = estimate_finetuning(
        base_shapes(trainable), found.weights.spec, settings, largest, text_tokens=_longest(prompts, negative), dtype=_estimated_type(trainable)
    )
    _check_memory(estimate, trainable, say)
    if state.is_file():
        if resume:
            tuning.resume(state)
            say(f"going on from step {tuning.done} of {settings.steps} ({state.name})")
        else:
            state.replace(state.with_name(f"{state.stem}.{time.strftime('%Y%m%d-%H%M%S')}.old.safetensors"))
    bar, shown = comfy.utils.ProgressBar(settings.steps), _Curve(tuning.losses)
    pictures: list[torch.Tensor] = []

    def on_step(now: StepReport) -> None:
        shown.add(now.loss)
        bar.update_absolute(now.step, now.total, shown.preview("loss"))
        shown.line(say, f"step {now.step} of {now.total}, loss {now.loss:.4f}{_left(now.seconds_left)}")
        management.throw_exception_if_processing_interrupted()

    def on_sample(run: FineTune, step: int) -> None:
        pictures[:] = [sample_pair(trainable, run, vae)]
        _save_picture(pictures[0], folder / f"{check_name(filename)}_step_{step:06}.png")

    weights = tuning.run(path=state, save_every=save_every, on_step=on_step, on_sample=on_sample, sample_every=sample_every)
    path = weights.save(new_file(filename))
    picture = pictures[0] if pictures else torch.from_numpy(loss_curve(tuning.losses, "loss"))
    return attach(model, weights, found.backend), tuning, path, picture[None]


def sample_pair(model: ComfyTrainable, run: FineTune, vae=None, steps: int = 12, cfg: float = 3.0) -> torch.Tensor:
    """Softmax beside TTT, same seed and prompt (the first example's), as one picture (H, W, 3).

    Decoded by `vae`, or without one shown as ComfyUI's preview colours.
    """
    example = run.examples.examples[0]
    noise = torch.randn(1, *example.latent.shape, generator=torch.Generator().manual_seed(0))
    empty = model.null_conditioning(example.conditioning)

    def sample() -> torch.Tensor:
        for _, x, _ in euler(model, noise, [example.conditioning], [empty], steps=steps, cfg=cfg):
            last = x
        return last

    with model.running({}):
        softmax = sample()
    with run.sampling():
        ours = sample()
    shown = [_decode(model, x, vae) for x in (softmax, ours)]
    return torch.from_numpy(side_by_side([p.numpy() for p in shown], ["softmax", f"TTT, step {run.done}"]))


def _decode(model: ComfyTrainable, latent: torch.Tensor, vae) -> torch.Tensor:
    """A model latent (1, C, h, w) as a picture (H, W, 3) in 0..1."""
    samples = model.from_model_latent(latent)
    if vae is not None:
        with torch.inference_mode():
            return vae.decode(samples.clone())[0].float().cpu().clamp(0, 1)
    return model.preview(latent[0])


def first_entry(conditioning: list | None) -> list | None:
    """The first entry of an optional CONDITIONING, as tensors that training may touch."""
    if not conditioning:
        return None
    with torch.inference_mode(False):
        return clone_entries(conditioning[:1])[0]


def base_shapes(model: ComfyTrainable) -> dict[str, tuple[int, ...]]:
    return {n: tuple(t.shape) for n, t in model.base_tensors().items()}


def _estimated_type(model: ComfyTrainable) -> torch.dtype:
    """The estimator counts base and activations in one type; an 8-bit base is counted as half precision, on the safe side."""
    return torch.float32 if model.dtype == torch.float32 else torch.bfloat16


def _longest(positive: Sequence[list], negative: list | None) -> int:
    return max(context.shape[1] for context, _ in [*positive, *(negative or [])])


def _check_memory(estimate: MemoryEstimate, model: ComfyTrainable, say: Say) -> None:
    """Says what will be needed; raises TTTError with what would fit instead when it is more than there is."""
    import comfy.model_management as management

    loaded = sum(t.numel() * t.element_size() for t in model.base_tensors().values())  # there already, and in the estimate too
    if refusal := estimate.refusal(int(management.get_free_memory(model.device)) + loaded):
        raise TTTError(refusal)
    say(estimate.text())


def _training_folder() -> Path:
    import folder_paths

    return Path(folder_paths.get_output_directory()) / "ttt_training"


def _save_picture(picture: torch.Tensor, path: Path) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((picture.clamp(0, 1) * 255).byte().numpy()).save(path)


def _left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, seconds = divmod(round(seconds), 60)
    return f", {minutes}:{seconds:02} left"


class _Curve:
    """The losses so far, redrawn at most every few seconds as ComfyUI's preview picture."""

    def __init__(self, losses: Sequence[float] = ()):
        self._losses, self._drawn, self._said, self._picture = list(losses), 0.0, 0.0, None

    def add(self, loss: float | None) -> None:
        if loss is not None:
            self._losses.append(loss)

    def line(self, say: Say, text: str) -> None:
        if time.monotonic() - self._said > 0.5:
            self._said = time.monotonic()
            say(text)

    def preview(self, label: str):
        """("JPEG", PIL image, largest side) as ProgressBar takes it, or None while there is nothing new to show."""
        if len(self._losses) < 2 or time.monotonic() - self._drawn < _REDRAW:
            return None
        from PIL import Image

        self._drawn = time.monotonic()
        return ("JPEG", Image.fromarray((loss_curve(self._losses, label) * 255).astype("uint8")), 512)
