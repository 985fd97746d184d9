"""Finds a real ComfyUI, so that tests that need one run in it, or are skipped with the reason."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def find_comfyui() -> Path | None:
    """$COMFYUI_PATH, the ComfyUI around this pack, or comfy-cli's default; None when there is none."""
    places = [os.environ.get("COMFYUI_PATH"), ROOT.parent.parent, Path.home() / "comfy" / "ComfyUI"]
    return next((p for place in places if place and (p := Path(place)).joinpath("comfy", "model_patcher.py").is_file()), None)


COMFYUI = find_comfyui()


def why_no_comfyui() -> str | None:
    if COMFYUI is None:
        return "no ComfyUI at $COMFYUI_PATH, around the pack or at ~/comfy/ComfyUI"
    missing = [m for m in ("aiohttp", "transformers", "torchsde", "av") if importlib.util.find_spec(m) is None]
    return f"ComfyUI's own requirements are not installed here ({', '.join(missing)} missing)" if missing else None


def pytest_collection_modifyitems(items):
    reasons = {"comfyui": why_no_comfyui(), "gpu": why_no_gpu()}
    for item in items:
        for marker, reason in reasons.items():
            if reason and marker in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


def why_no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "no NVIDIA GPU"


def pytest_report_header():
    if COMFYUI is None:
        return "ComfyUI: none found"
    version = (COMFYUI / "comfyui_version.py").read_text().split('"')[1]
    return f"ComfyUI: {version} at {COMFYUI}"


@pytest.fixture(scope="session")
def comfyui(tmp_path_factory):
    """ComfyUI imported into this process, on the CPU, with its own empty model folders; gives its root."""
    sys.path.insert(0, str(COMFYUI))  # before the pack's folder, which has a package `nodes` too
    import comfy.options

    comfy.options.enable_args_parsing(False)
    from comfy.cli_args import args

    args.cpu = True
    import folder_paths

    base = tmp_path_factory.mktemp("comfyui")
    folder_paths.models_dir = str(base / "models")
    for name in list(folder_paths.folder_names_and_paths):
        _, extensions = folder_paths.folder_names_and_paths[name]
        folder_paths.folder_names_and_paths[name] = ([str(base / "models" / name)], extensions)
        (base / "models" / name).mkdir(parents=True, exist_ok=True)
    folder_paths.set_output_directory(str(base / "output"))
    folder_paths.set_temp_directory(str(base / "temp"))
    import nodes as comfy_nodes

    assert Path(comfy_nodes.__file__).parent == COMFYUI
    from comfy_ttt.nodes import TTTExtension

    TTTExtension()
    return COMFYUI


@pytest.fixture
def one_thread():
    """Small tensors are slower on several threads, and sums in another order are not bit-identical."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
