"""The file a training run is resumed from: one safetensors file with everything, written atomically, no pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import TTTError
from .files import atomic_write, explain_unreadable

FORMAT = 1


def write(path: str | os.PathLike, parts: Mapping[str, Mapping[str, Tensor]], facts: dict) -> None:
    """parts: {part: {name: tensor}}, stored as "part|name". facts: JSON-able. An older file stays until the new one is whole.

    Raises TTTError when it cannot be written.
    """
    tensors = {
        f"{part}|{name}": tensor.detach().to("cpu", copy=True).contiguous()
        for part, named in parts.items() for name, tensor in named.items()
    }
    metadata = {"ttt.training": str(FORMAT), "facts": json.dumps(facts)}
    with atomic_write(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def read(path: str | os.PathLike) -> tuple[dict[str, dict[str, Tensor]], dict]:
    """(parts, facts) as they were written. Raises TTTError, naming the file, when it is not such a file."""
    name = Path(path).name
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            number = int(metadata.get("ttt.training", 0))
            if not 1 <= number <= FORMAT:
                what = f"a training state of format {number}; update SD3.5-TTT" if number else "not a TTT training state; choose the file that TTT Fine-Tune saved to resume from"
                raise TTTError(f"'{name}' is {what}.")
            parts: dict[str, dict[str, Tensor]] = {}
            for key in file.keys():
                part, _, rest = key.partition("|")
                parts.setdefault(part, {})[rest] = file.get_tensor(key)
            return parts, json.loads(metadata["facts"])
    except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as e:
        raise explain_unreadable(path, e) from e
