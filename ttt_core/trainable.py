"""What calibrating and fine-tuning need of a model, whatever host it lives in.

A host (hosts/diffusers_training.py, hosts/comfy_training.py) implements `TrainableModel`; calibrate.py and finetune.py
know nothing else of it. The model itself is never changed: layers and trained base tensors are put in its place for
the time of a `with running(...)`, so the original stays at hand as the teacher at no cost in memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import TTTError
from .geometry import PREFIX, AttentionId, Geometry, attention_blocks
from .layer import TTTAttention

Conditioning = Any  # one sample's conditioning, in whatever form the host takes it; the core only passes it on
MODES = ("ttt", "attention", "full")


@dataclass(frozen=True)
class Record:
    """One attention in one model call, just before its output projection.

    q, k, v, out: (B, text_tokens + h*w, heads*d), text tokens first; q and k after the model's own qk norm. out: what
    the attention gave, softmax's output or, where a TTT layer runs in its place, that layer's. grid: (h, w) of the
    image tokens. The tensors are those of the call, still in its graph when gradients are on: detach what you keep.
    elements: which of the conditionings given to `velocity` this call is for, when prompts of unequal length had to be
    run apart; None for all of them.
    """

    attention: AttentionId
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    grid: tuple[int, int]
    text_tokens: int
    elements: tuple[int, ...] | None = None


class TrainableModel(ABC):
    """A rectified-flow MMDiT: x = (1 - sigma) data + sigma noise, velocity = noise - data, sigma in (0, 1].

    geometry, base_sketch: as TTTWeights holds them. device: where calls run. dtype: of the activations in a call.
    latent_channels: 16 for SD3.5. latent_multiple: h and w of a latent must be multiples of it (1: any size).
    flow_shift: the sampler's time shift (3.0 for SD3.5).
    """

    geometry: Geometry
    base_sketch: str
    device: torch.device
    dtype: torch.dtype
    latent_channels: int = 16
    latent_multiple: int = 1
    flow_shift: float = 3.0

    @abstractmethod
    def velocity(self, x: Tensor, sigma: Tensor, conditionings: Sequence[Conditioning]) -> Tensor:
        """x (B, channels, h, w) in the model's latent space, sigma (B,), B conditionings -> velocity like x, fp32.

        Differentiable in the layers and base tensors given to `running`, if gradients are on. x and sigma are normal
        (not inference) tensors, on any device. Raises TTTError for conditionings that cannot share a batch.
        """

    @abstractmethod
    def null_conditioning(self, like: Conditioning) -> Conditioning:
        """The 'no prompt' conditioning that goes with `like`, for conditioning dropout and for cfg without a negative."""

    @abstractmethod
    def base_tensors(self) -> dict[str, Tensor]:
        """{SD3.5 name with prefix: tensor} of the base as it is now; for reading only, copy what you keep."""

    @abstractmethod
    def running(
        self,
        layers: Mapping[AttentionId, TTTAttention],
        base: Mapping[str, Tensor] | None = None,
        *,
        checkpointing: bool = False,
    ) -> AbstractContextManager[None]:
        """While inside, calls use these TTT layers and these tensors for the base tensors of the same names.

        base: SD3.5 names with prefix, tensors on the model's device and of a type its own tensors can be replaced by;
        they may require grad or be part of a graph. Everything is restored on exit, also after an exception; the
        model's own tensors are never written, and none of them asks for gradients inside. With checkpointing each block is
        recomputed in the backward pass, so call backward inside too. Contexts of one model do not nest, except that
        `recording` may be inside or around. Raises TTTError, before anything changes, for layers or names that the model lacks.
        """

    @abstractmethod
    def recording(self, attentions: Iterable[AttentionId], sink: Callable[[Record], None]) -> AbstractContextManager[None]:
        """While inside, every call hands a Record of each of these attentions to `sink`, during the call.

        With checkpointing call backward inside this context too; the sink is then called once more for each block, and
        the core ignores those calls.
        """


def select_base_tensors(names: Iterable[str], mode: str, attentions: Iterable[AttentionId]) -> tuple[str, ...]:
    """Names of the base tensors that `mode` trains, sorted; names: those of `TrainableModel.base_tensors`.

    ``ttt``: none. ``attention``: qkv and output projection of the replaced attentions, on the text side too for a joint
    one. ``full``: all but the fixed position table and what gets no gradient. Raises TTTError for an unknown mode.
    """
    if mode not in MODES:
        raise TTTError(f"What to train is '{mode}', which is not known; choose one of {', '.join(MODES)}.")
    if mode == "ttt":
        return ()
    if mode == "full":
        names = set(names)
        # The last block's text side puts nothing out, so the norm of its queries never gets a gradient.
        last = max(attention_blocks(names)[0])
        return tuple(sorted(names - {PREFIX + "pos_embed", f"{PREFIX}joint_blocks.{last}.context_block.attn.ln_q.weight"}))
    modules = set()
    for attention in attentions:
        modules.add(attention.path)
        if attention.kind == "joint":
            modules.add(attention.path.replace("x_block", "context_block"))
    wanted = {f"{PREFIX}{m}.{part}.{leaf}" for m in modules for part in ("qkv", "proj") for leaf in ("weight", "bias")}
    return tuple(sorted(wanted & set(names)))


@contextmanager
def training_mode():
    """Gradients on and inference mode off: ComfyUI runs its nodes in inference mode, where nothing can be trained."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def normal(tensor: Tensor) -> Tensor:
    """The same values as a tensor that autograd accepts: a clone of an inference tensor, anything else as it is."""
    return tensor.clone() if tensor.is_inference() else tensor
