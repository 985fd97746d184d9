"""Attention inputs and outputs of real sampling runs, kept in bounded memory for calibrate.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import TTTError
from .geometry import AttentionId
from .trainable import Record

_LARGEST_HALF = 6e4


@dataclass(frozen=True)
class Sample:
    """One sample of one attention: q, k, v (N, C) whole, because the layer sums over all tokens; out (M, C) at the M
    tokens `picked`. Half precision, on the CPU. run: which sampling run it is from."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    picked: Tensor
    grid: tuple[int, int]
    text_tokens: int
    run: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """Samples of one shape can share a batch."""
        return (*self.grid, self.text_tokens)


def sample_bytes(tokens: int, channels: int, target_tokens: int) -> int:
    """Memory of one Sample of one attention."""
    return (3 * tokens + min(tokens, target_tokens)) * channels * 2


class Recorder:
    """The sink of TrainableModel.recording: keeps chosen elements of the batch of each call.

    `pick` says which, before each call. Raises TTTError, naming attention and call, when the model gives NaN or infinity.
    """

    def __init__(self, target_tokens: int, seed: int):
        self.samples: dict[AttentionId, list[Sample]] = defaultdict(list)
        self._target_tokens, self._generator = target_tokens, torch.Generator().manual_seed(seed)
        self._elements: list[int] = []
        self._where, self._run = "", 0

    def pick(self, elements: Iterable[int], where: str, run: int = 0) -> None:
        self._elements, self._where, self._run = list(elements), where, run

    @torch.no_grad()
    def __call__(self, record: Record) -> None:
        count = record.q.shape[1]
        present = range(len(record.q)) if record.elements is None else record.elements
        for element in (present.index(e) for e in self._elements if e in present):
            picked = torch.arange(count)
            if count > self._target_tokens:
                picked = torch.randperm(count, generator=self._generator)[: self._target_tokens].sort().values
            out = record.out[element].index_select(0, picked.to(record.out.device))
            parts = [_half(x) for x in (record.q[element], record.k[element], record.v[element], out)]
            if not all(bool(torch.isfinite(x).all()) for x in parts):
                raise TTTError(
                    f"The model gave NaN or infinity in attention {record.attention} at {self._where}, before anything was fitted; "
                    "try another weight dtype for the base (bf16 or default), or remove the last LoRA or patch."
                )
            self.samples[record.attention].append(Sample(*parts, picked, record.grid, record.text_tokens, self._run))


def _half(x: Tensor) -> Tensor:
    """bf16 stays; everything else becomes fp16 (8 times finer), or bf16 where fp16 would overflow."""
    fits = x.dtype != torch.bfloat16 and float(x.abs().amax()) < _LARGEST_HALF
    return x.detach().to("cpu", torch.float16 if fits else torch.bfloat16, copy=True)
