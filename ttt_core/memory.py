"""How much memory calibrating or fine-tuning will take, before it starts, and what would fit instead.

Weights, gradients and optimizer are counted exactly from the shapes. Activations are counted as tensors of
(tokens, hidden) that the backward pass keeps, per kind of block; the counts below were measured operation by operation
on a small model of the same architecture and do not depend on its sizes. tests/test_memory.py holds a measured run against it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from .calibrate import FEWEST_SAMPLES, CalibrationSettings
from .finetune import FineTuneSettings
from .geometry import AttentionId, Geometry, read_geometry
from .layer import TTTAttention
from .records import sample_bytes
from .select import select_attentions
from .spec import TTTSpec
from .trainable import select_base_tensors


@dataclass(frozen=True)
class _Counts:
    """Tensors of (tokens, hidden) in the activation type that are kept for the backward pass.

    block: of a whole block, image and text alike. dual: more for an image self-attention. last_text: of the text side
    of the last block. first, first_text: of the block of the first TTT layer, what comes after it. ends: outside the
    blocks. trained_first, trained_more: more for the first and for each other attention whose projections are trained.
    """

    block: float
    dual: float
    last_text: float
    first: float = 0.0
    first_text: float = 0.0
    ends: float = 0.0
    trained_first: float = 0.0
    trained_more: float = 0.0


# {bytes of the activation type: counts}: half precision keeps fp32 copies of what the norms see.
_FROZEN = {4: _Counts(12, 6, 4, first=7.4, first_text=9, trained_first=7, trained_more=2), 2: _Counts(16.1, 10.1, 4, first=4.7, first_text=10, trained_first=14, trained_more=2)}
_FULL = {4: _Counts(24.8, 10, 10.7, ends=4.1), 2: _Counts(28.6, 14, 14.6, ends=5.6)}
_TTT_TENSORS = 24  # fp32 (tokens, hidden) kept by one TTT layer more than softmax keeps
_TTT_CAST = 4  # and in half precision the casts of q, k, v and the output
_TTT_STATE = 6  # fp32 (batch, hidden, head_dim): the updated inner weights and their gradients' parts
_TTT_WORK = 8  # fp32 (tokens, hidden) at work in one TTT layer's backward
_WORK = 3  # (tokens, hidden) at work elsewhere
_INFERENCE = 16  # (tokens, hidden) alive at once in a call without gradients


@dataclass(frozen=True)
class MemoryEstimate:
    """parts: {what, for people: bytes}, on the device; host: bytes of main memory besides. alternatives: (what to change,
    total bytes then), mildest first."""

    what: str
    parts: dict[str, int]
    host: int = 0
    alternatives: tuple[tuple[str, int], ...] = ()

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def text(self) -> str:
        """One line, e.g. 'about 17.2 GiB: base weights 4.6, activations 9.8, ...'."""
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in self.parts.items() if size >= 2**20)
        more = f"; besides {_gib(self.host)} GiB of main memory for samples" if self.host else ""
        return f"{self.what}: about {_gib(self.total)} GiB ({parts}){more}"

    def refusal(self, available: int) -> str | None:
        """None when it fits into `available` bytes, else one or two sentences that say what would fit."""
        if self.total <= available:
            return None
        head = f"{self.what} needs about {_gib(self.total)} GiB, and {_gib(available)} GiB are free. "
        fits = next(((how, size) for how, size in self.alternatives if size <= available), None)
        if fits is not None:
            return head + f"{fits[0][0].upper()}{fits[0][1:]} would need about {_gib(fits[1])} GiB."
        if not self.alternatives:
            return head + "Free memory, choose a smaller size, or use a device with more."
        how, size = min(self.alternatives, key=lambda a: a[1])
        return head + f"Even {how} would need about {_gib(size)} GiB; choose a smaller size or a device with more memory."


def estimate_finetuning(
    shapes: Mapping[str, Iterable[int]], spec: TTTSpec, settings: FineTuneSettings, size: tuple[int, int], *, text_tokens: int = 154,
    dtype: torch.dtype = torch.bfloat16,
) -> MemoryEstimate:
    """Peak device memory of FineTune.

    shapes: {SD3.5 name with prefix: shape} of the base. size: largest latent (h, w) of the data. text_tokens: of a prompt.
    dtype: of the base weights and activations. Raises TTTError for a selection the model does not have.
    """
    estimate = _finetuning(shapes, spec, settings, size, text_tokens, dtype)
    changes = []
    if not settings.checkpointing:
        changes.append(("checkpointing", {"checkpointing": True}))
    if settings.batch > 1:
        changes.append((f"batch 1 with accumulation {settings.batch * settings.accumulation}", {"batch": 1, "accumulation": settings.batch * settings.accumulation}))
    if settings.optimizer == "adamw" and settings.mode != "ttt":
        changes.append(("optimizer adamw8bit", {"optimizer": "adamw8bit"}))
    if settings.mode == "full":
        changes.append(("mode attention", {"mode": "attention"}))
    if settings.mode != "ttt":
        changes.append(("mode ttt", {"mode": "ttt"}))
    options, names, changed = [], [], settings
    for name, change in changes:  # each on top of the former: the mildest set that fits is named
        changed = replace(changed, **change)
        names = [n for n in names if not n.startswith("mode ")] if name.startswith("mode ") else names
        names.append(name)
        options.append((" and ".join(names), _finetuning(shapes, spec, changed, size, text_tokens, dtype).total))
    return replace(estimate, alternatives=tuple(options))


def _finetuning(shapes, spec: TTTSpec, settings: FineTuneSettings, size, text_tokens: int, dtype: torch.dtype) -> MemoryEstimate:
    geometry, chosen = read_geometry(shapes), select_attentions(shapes, spec.attentions)
    width = dtype.itemsize
    layers = len(chosen) * _layer_parameters(geometry, spec)
    base = sum(math.prod(s) for s in shapes.values())
    trained_base = sum(math.prod(shapes[n]) for n in select_base_tensors(shapes, settings.mode, chosen))
    trained = layers + trained_base
    gradients = 4 * trained
    kept = activations(geometry, chosen, settings.mode, settings.batch, size, text_tokens, width, settings.checkpointing)
    # Kept tensors go while gradients come. With accumulation the gradients of the former part are there from the start,
    # with checkpointing nearly all of them are when the first block is computed again.
    together = settings.accumulation > 1 or settings.checkpointing
    at_once = kept + gradients if together else max(kept, gradients)
    parts = {
        "base weights": base * width,
        "trained weights in fp32": 4 * trained,
        "optimizer": trained * (8 if settings.optimizer == "adamw" else 2),
        "averaged weights": 4 * trained if settings.ema else 0,
        "trained weights in half": trained_base * width if width < 4 else 0,
        "activations and gradients": at_once,
    }
    return MemoryEstimate(f"Fine-tuning ({settings.mode}, batch {settings.batch}, latent {size[0]} x {size[1]})", parts)


def activations(
    geometry: Geometry, chosen: Iterable[AttentionId], mode: str, batch: int, size: tuple[int, int], text_tokens: int, width: int,
    checkpointing: bool,
) -> int:
    """Bytes kept for the backward pass at its start, and what one layer's backward needs besides. width: bytes per activation."""
    chosen = set(chosen)
    counts = (_FULL if mode == "full" else _FROZEN)[width]
    image, text, unit = batch * (size[0] // 2) * (size[1] // 2), batch * text_tokens, geometry.hidden
    first = min((a.block for a in chosen), default=0) if mode != "full" else -1
    trained = 0
    blocks = []
    for block in range(max(first, 0), geometry.blocks):
        kept = _block(geometry, counts, chosen, block, block == first, image, text) * width
        for attention in sorted(a for a in chosen if a.block == block):
            tokens = image + (text if attention.kind == "joint" else 0)
            kept += tokens * (_TTT_TENSORS * 4 + (_TTT_CAST * 2 if width == 2 else 0)) + batch * geometry.head_dim * _TTT_STATE * 4
            if mode == "attention":
                kept += tokens * (counts.trained_more if trained else counts.trained_first) * width
                trained += 1
        blocks.append(kept)
    ends = counts.ends * image * width
    if checkpointing:  # the block at work, the inputs of all others
        kept = max(blocks, default=0) + len(blocks) * (image + text) * width
    else:
        kept = sum(blocks)
    work = max(image * _TTT_WORK * 4 if chosen and mode != "full" else 0, image * _WORK * width)
    return int((kept + ends + work) * unit)


def _block(geometry: Geometry, counts: _Counts, chosen: set[AttentionId], block: int, first: bool, image: int, text: int) -> float:
    """Tensors of one channel that a block keeps, TTT layers apart."""
    last = block == geometry.blocks - 1
    if first:  # only what comes after its first TTT layer has a graph
        joint = AttentionId("joint", block) in chosen
        return counts.first * image + (counts.first_text * text if joint and not last else 0)
    dual = counts.dual if block in geometry.self_blocks else 0.0
    return (counts.block + dual) * image + (counts.last_text if last else counts.block) * text


def _layer_parameters(geometry: Geometry, spec: TTTSpec) -> int:
    layer = TTTAttention(geometry.heads, geometry.head_dim, spec, device="meta")
    return sum(p.numel() for p in layer.parameters())


def estimate_calibration(
    shapes: Mapping[str, Iterable[int]], spec: TTTSpec, settings: CalibrationSettings, size: tuple[int, int], *, text_tokens: int = 154,
    dtype: torch.dtype = torch.bfloat16,
) -> MemoryEstimate:
    """Peak device and main memory of calibrate(); arguments as of estimate_finetuning."""
    estimate = _calibration(shapes, spec, settings, size, text_tokens, dtype)
    options = [(f"batch {b}", _calibration(shapes, spec, replace(settings, batch=b), size, text_tokens, dtype).total) for b in (2, 1) if b < settings.batch]
    return replace(estimate, alternatives=tuple(options))


def _calibration(shapes, spec: TTTSpec, settings: CalibrationSettings, size, text_tokens: int, dtype: torch.dtype) -> MemoryEstimate:
    geometry, chosen = read_geometry(shapes), select_attentions(shapes, spec.attentions)
    joint = any(a.kind == "joint" for a in chosen)
    image = (size[0] // 2) * (size[1] // 2)
    tokens = image + (text_tokens if joint else 0)
    batch = max(1, min(settings.batch, 16384 // tokens))
    layer = 4 * _layer_parameters(geometry, spec)
    fitting = batch * tokens * geometry.hidden * 4 * (_TTT_TENSORS + 4 + _TTT_WORK) + batch * geometry.hidden * geometry.head_dim * _TTT_STATE * 4
    sampling = (2 if settings.cfg != 1 else 1) * (image + text_tokens) * geometry.hidden * _INFERENCE * dtype.itemsize
    one = sample_bytes(tokens, geometry.hidden, settings.target_tokens)
    budget = int(settings.memory_gb * 2**30)
    samples = min(settings.samples, max(FEWEST_SAMPLES, budget // one))
    parts = {
        "base weights": sum(math.prod(s) for s in shapes.values()) * dtype.itemsize,
        "one TTT layer with gradients and optimizer": 5 * layer,
        "activations": max(fitting, sampling),
    }
    host = min(budget, samples * one * len(chosen)) + len(chosen) * layer
    return MemoryEstimate(f"Calibrating (latent {size[0]} x {size[1]})", parts, host)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}" if size >= 2**30 / 10 else f"{size / 2**30:.3f}"
