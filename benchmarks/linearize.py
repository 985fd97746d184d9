"""Linearizing a full-size SD3.5-Medium: seconds and memory of selecting, making the layers and writing their file.

    python benchmarks/linearize.py                        from the file alone, no host
    python benchmarks/linearize.py --comfyui ~/comfy/ComfyUI   on a MODEL loaded in ComfyUI (CPU)

The checkpoint has random fp16 weights under SD3.5-Medium's real tensor names and shapes (tests/shapes). What counts is
the growth of memory over the loaded base: a second copy of it would show as gigabytes. Appends to results.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from _measure import machine

HERE = Path(__file__).resolve().parent


def write_checkpoint(path: Path) -> None:
    rows = (HERE.parent / "tests" / "shapes" / "sd35_medium.tsv").read_text().splitlines()[1:]
    noise = (torch.randn(2**22, generator=torch.Generator().manual_seed(0)) * 0.02).half()
    tensors = {}
    for name, shape in (row.split("\t") for row in rows):
        size = [int(s) for s in shape.split("x")]
        count = int(torch.tensor(size).prod())
        tensors[name] = noise.repeat(-(-count // noise.numel()))[:count].reshape(size).clone()
    save_file(tensors, path)


def from_file(path: Path, out: Path) -> dict:
    """Shapes and the sketch's few tensors are read; the base never is."""
    from comfy_ttt.ttt_core import TTTSpec, TTTWeights, read_geometry
    from comfy_ttt.ttt_core.fingerprint import sketch
    from comfy_ttt.ttt_core.measure import PeakMemory
    from comfy_ttt.ttt_core.weights import read_tensor_shapes

    with PeakMemory(torch.device("cpu")) as memory:
        start = time.perf_counter()
        geometry = read_geometry(read_tensor_shapes(path))
        with safe_open(path, "pt") as file:
            used = {n: file.get_tensor(n) for n in file.keys() if n.endswith("x_block.attn.qkv.weight")}
            base_sketch = sketch(used)
            del used
        weights = TTTWeights.new(geometry, TTTSpec("paper"), base_sketch=base_sketch)
        weights.save(out)
        seconds = time.perf_counter() - start
    return {"host": "file only", "seconds": seconds, "growth_mib": memory.peak / 2**20, "selection": weights.selection}


def in_comfyui(path: Path, out: Path, root: Path) -> dict:
    sys.path.insert(0, str(root))
    import comfy.options

    comfy.options.enable_args_parsing(False)
    from comfy.cli_args import args

    args.cpu = True
    import comfy.sd
    import psutil

    from comfy_ttt.ttt_core import TTTSpec
    from comfy_ttt.ttt_core.hosts.comfy import attached, linearize
    from comfy_ttt.ttt_core.measure import PeakMemory

    with torch.inference_mode():
        start = time.perf_counter()
        model = comfy.sd.load_diffusion_model(str(path), model_options={"dtype": torch.float16})
        for parameter in model.model.parameters():  # the file is mapped lazily; touch it, so that its memory counts from here on
            parameter.flatten()[:: 2048].sum()
        load_seconds = time.perf_counter() - start
        base_mib = sum(p.numel() * p.element_size() for p in model.model.diffusion_model.state_dict().values()) / 2**20
        resident = psutil.Process().memory_info().rss / 2**20
        with PeakMemory(torch.device("cpu")) as memory:
            start = time.perf_counter()
            ttt = linearize(model, TTTSpec("paper"))
            weights = attached(ttt).weights
            weights.save(out)
            seconds = time.perf_counter() - start
    version = (root / "comfyui_version.py").read_text().split('"')[1]
    return {
        "host": f"ComfyUI {version}", "seconds": seconds, "growth_mib": memory.peak / 2**20, "selection": weights.selection,
        "load_seconds": load_seconds, "base_mib": base_mib, "resident_with_base_mib": resident,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--comfyui", type=Path)
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "medium.safetensors", Path(folder) / "ttt.safetensors"
        # In a process of its own, so that making the checkpoint leaves no memory behind to reuse.
        code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import linearize; linearize.write_checkpoint(linearize.Path({str(path)!r}))"
        subprocess.run([sys.executable, "-c", code], check=True)
        record = in_comfyui(path, out, options.comfyui.resolve()) if options.comfyui else from_file(path, out)
        record |= {"file_mib": out.stat().st_size / 2**20, "checkpoint_mib": path.stat().st_size / 2**20}
    record = {
        "benchmark": "linearize", **{k: round(v, 2) if isinstance(v, float) else v for k, v in record.items()},
        **machine(torch.device("cpu")),
    }  # fmt: skip
    with options.results.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
