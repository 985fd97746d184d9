"""The training examples and the order in which they are met: resolution buckets, reshuffled every epoch.

The order follows from (seed, number of the batch) alone, so resuming needs no saved random state.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import TTTError
from .trainable import Conditioning, TrainableModel, normal

_MIX = 0x9E3779B97F4A7C15  # splitmix64's increment: spreads neighbouring numbers over all seeds


@dataclass(frozen=True)
class Example:
    """latent: (channels, h, w) in the model's latent space, clean. conditioning: of one sample."""

    latent: Tensor
    conditioning: Conditioning


def generator_for(seed: int, *numbers: int) -> torch.Generator:
    """A generator that depends on these numbers only."""
    state = seed
    for number in numbers:
        state = (state ^ (number + 1)) * _MIX & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return torch.Generator().manual_seed(state & 0x7FFFFFFFFFFFFFFF)


class Examples:
    """Examples in buckets of one latent size each; `batch(number)` is the same whenever it is asked for.

    Raises TTTError for no examples, and for latents the model cannot take or that are not finite.
    """

    def __init__(self, examples: Sequence[Example], model: TrainableModel, batch: int, seed: int):
        if not examples:
            raise TTTError("Fine-tuning: there are no examples; connect a dataset of at least one latent with its conditioning.")
        self.examples = [Example(normal(e.latent.detach()).to("cpu", torch.float32), e.conditioning) for e in examples]
        self._batch, self._seed = batch, seed
        self._buckets: dict[tuple, list[int]] = defaultdict(list)
        for index, example in enumerate(self.examples):
            shape = tuple(example.latent.shape)
            if len(shape) != 3 or shape[0] != model.latent_channels or any(side % model.latent_multiple for side in shape[1:]):
                raise TTTError(
                    f"Fine-tuning: latent {index + 1} has shape {shape}; the model takes ({model.latent_channels}, h, w)"
                    f"{f' with h and w multiples of {model.latent_multiple}' if model.latent_multiple > 1 else ''}. "
                    "Encode the pictures with this model's VAE and resize them first."
                )
            if not bool(torch.isfinite(example.latent).all()):
                raise TTTError(f"Fine-tuning: latent {index + 1} holds NaN or infinity; encode its picture again or leave it out.")
            self._buckets[shape].append(index)
        self._per_epoch = sum(-(-len(b) // batch) for b in self._buckets.values())
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def sizes(self) -> dict[tuple[int, int], int]:
        """{latent size (h, w): number of examples}."""
        return {shape[1:]: len(indices) for shape, indices in self._buckets.items()}

    @property
    def fingerprint(self) -> str:
        """Tells other latents apart: a hash of all shapes and of 64 values of each."""
        digest = hashlib.sha256()
        for example in self.examples:
            flat = example.latent.reshape(-1)
            digest.update(str(tuple(example.latent.shape)).encode())
            digest.update(flat[:: max(1, len(flat) // 64)].numpy().tobytes())
        return digest.hexdigest()[:16]

    def batch(self, number: int) -> list[Example]:
        """Batch `number`, from 0: examples of one size. A bucket's last batch of an epoch may be smaller."""
        epoch, place = divmod(number, self._per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = epoch, self._shuffle(epoch)
        return [self.examples[i] for i in self._epoch[1][place]]

    def _shuffle(self, epoch: int) -> list[list[int]]:
        generator = generator_for(self._seed, 1, epoch)
        batches = []
        for shape in sorted(self._buckets):
            indices = self._buckets[shape]
            order = [indices[i] for i in torch.randperm(len(indices), generator=generator).tolist()]
            batches += [order[i : i + self._batch] for i in range(0, len(order), self._batch)]
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
