"""Where TTT files live in ComfyUI's model folders, and full converted models through ComfyUI's own loader."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from ..errors import TTTError
from ..files import explain_unreadable
from ..weights import SPEC_KEY, TTTWeights, file_kind, split_full_model
from .comfy import attach, model_geometry, model_sketch

CATEGORY = "ttt"
WEIGHT_DTYPES = ("default", "fp8_e4m3fn", "fp8_e5m2")


def register_folders(demo: Path) -> None:
    """Makes models/ttt a category and shows the demo's files in the loaders. Called once, when the pack is loaded."""
    import folder_paths

    folder_paths.add_model_folder_path(CATEGORY, str(Path(folder_paths.models_dir) / "ttt"), is_default=True)
    folder_paths.add_model_folder_path(CATEGORY, str(demo / "ttt"))
    folder_paths.add_model_folder_path("diffusion_models", str(demo / "models"))


def list_files(category: str = CATEGORY) -> list[str]:
    """Names of the safetensors files of a category, as the loaders show them."""
    import folder_paths

    return [n for n in folder_paths.get_filename_list(category) if n.endswith(".safetensors")]


def find_file(name: str, category: str = CATEGORY) -> Path:
    """Full path of a listed file. Raises TTTError when it is not there."""
    import folder_paths

    path = folder_paths.get_full_path(category, name)
    if path is None:
        folders = " or ".join(folder_paths.get_folder_paths(category))
        raise TTTError(f"'{name}' is not in {folders}; put the file there and refresh the page (press R).")
    return Path(path)


def new_file(name: str) -> Path:
    """The next free path for a small file called `name` in models/ttt. Raises TTTError for a name that leaves it."""
    import folder_paths

    path = Path(folder_paths.get_folder_paths(CATEGORY)[0]) / check_name(name)
    number = 1
    while (numbered := path.with_name(f"{path.name}_{number:05}.safetensors")).exists():
        number += 1
    return numbered


def check_name(name: str) -> str:
    """The file name without extension, subfolders allowed. Raises TTTError for one that is empty or leaves its folder."""
    name = name.strip().removesuffix(".safetensors").replace("\\", "/")
    parts = name.split("/")
    if not all(p.strip(". ") for p in parts) or len(parts[-1]) > 120 or re.search(r'[<>:"|?*\x00-\x1f]', name):
        raise TTTError(f"'{name}' is not a usable file name; write a plain name such as 'sd35m_paper', without '..' or a drive, of at most 120 characters.")
    return name


def load_full_model(path: Path, weight_dtype: str = "default", backend: str = "auto"):
    """(MODEL, its TTT weights) from a full converted file. Raises TTTError, naming the file, when it is not one."""
    import comfy.sd
    import comfy.utils

    try:
        tensors, metadata = comfy.utils.load_torch_file(str(path), return_metadata=True)
    except Exception as e:
        # ComfyUI wraps reader errors in several types; whichever it is, the file could not be read.
        raise explain_unreadable(path, e) from e
    ttt = split_full_model(tensors)
    if not ttt:
        raise TTTError(f"'{path.name}' has no TTT layers, it is a plain model; load it with Load Diffusion Model and add TTT Linearize.")
    if SPEC_KEY not in ttt:
        raise TTTError(f"'{path.name}' holds TTT layers but no recipe ({SPEC_KEY}); save it again from a TTT model.")
    if file_kind(ttt[SPEC_KEY], path.name) == "weights":
        raise TTTError(f"'{path.name}' is a small TTT file, not a full model; load its base and add TTT Load Weights.")
    weights = TTTWeights.from_tensors(ttt, path.name)
    options = {"metadata": metadata, "model_options": _model_options(weight_dtype)}
    known = inspect.signature(comfy.sd.load_diffusion_model_state_dict).parameters
    model = comfy.sd.load_diffusion_model_state_dict(tensors, **{k: v for k, v in options.items() if k in known})
    if model is None:
        raise TTTError(f"ComfyUI does not recognise the base model in '{path.name}'; update ComfyUI or convert the model again.")
    weights.check_base(model_geometry(model), "", path.name)
    # The base may hold fine-tuned weights by now, so its own sketch is the one to compare with later.
    weights.base_sketch = model_sketch(model)
    return attach(model, weights, backend), weights


def _model_options(weight_dtype: str) -> dict:
    import torch

    return {} if weight_dtype == "default" else {"dtype": getattr(torch, {"fp8_e4m3fn": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}[weight_dtype])}
