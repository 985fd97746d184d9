"""The demo command's inside: the quickstart workflow in a real ComfyUI, or without one the same comparison in diffusers.

    python -m comfy_ttt.demo.quickstart --comfyui ~/comfy/ComfyUI --out output
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

from .headless import PACK, ComfyServer, WorkflowError

WORKFLOW = PACK / "workflows" / "api" / "quickstart_cpu.json"
BASE, LAYERS = "ttt_tiny_digits.safetensors", "ttt_tiny_digits_paper.safetensors"


def find_node(workflow: dict, kind: str, prefix: str | None = None) -> str:
    """Id of the node of this class (and filename prefix) in an API workflow."""
    for node, data in workflow.items():
        if data["class_type"] == kind and (prefix is None or data["inputs"].get("filename_prefix", "").endswith(prefix)):
            return node
    raise KeyError(kind)


def in_comfyui(root: Path, size: int, out: Path) -> tuple[Path, Path, str]:
    """Runs the workflow in the ComfyUI at root; (A/B picture, chart, table)."""
    import torch

    workflow = json.loads(WORKFLOW.read_text())
    latent = workflow[find_node(workflow, "EmptySD3LatentImage")]["inputs"]
    latent["width"] = latent["height"] = size
    arguments = () if torch.cuda.is_available() else ("--cpu",)
    print("starting ComfyUI without a screen ...", flush=True)
    started, said = time.monotonic(), 0.0

    def on_wait():
        nonlocal said
        if time.monotonic() - said > 10:
            said = time.monotonic()
            print(f"  running, {said - started:.0f} s", flush=True)

    with ComfyServer(root, out / "comfyui", arguments) as server:
        shown = server.run(workflow, on_wait=on_wait)
    table = shown[find_node(workflow, "TTTCompare")]["text"][0]
    saved = [shown[find_node(workflow, "SaveImage", name)]["images"][0] for name in ("softmax_left_ttt_right", "chart")]
    picture, chart = (Path(shutil.copy(s, out / f"{n}.png")) for s, n in zip(saved, ("softmax_left_ttt_right", "chart"), strict=True))
    return picture, chart, table


def without_ui(size: int, out: Path, repeats: int = 3, steps: int = 20, cfg: float = 3.0, digit: int = 3) -> tuple[Path, Path, str]:
    """The same model, settings and comparison in diffusers, for a machine without ComfyUI; (A/B picture, chart, table)."""
    import torch
    from matplotlib.image import imsave

    from ..ttt_core import TTTWeights
    from ..ttt_core.compare import Arm, compare
    from ..ttt_core.hosts.diffusers import attach, load_transformer
    from ..ttt_core.pictures import side_by_side
    from ..ttt_core.plots import comparison_chart
    from . import digits

    transformer = load_transformer(PACK / "demo" / "models" / BASE, dtype=torch.float32)
    layers = TTTWeights.load(PACK / "demo" / "ttt" / LAYERS).layers

    def arm(label: str, chosen: dict) -> Arm:
        def sample(on_step):
            attachment, step = attach(transformer, chosen), 0

            def velocity(x, t, context, pooled):
                nonlocal step
                out = transformer(x, context, pooled, t).sample
                if on_step is not None:
                    on_step(step)
                step += 1
                return out

            try:
                return digits.sample(velocity, [digit], size // 2, size // 2, steps=steps, cfg=cfg)
            finally:
                attachment.detach()

        return Arm(label, sample)

    settings = f"diffusers, euler, {steps} steps, cfg {cfg:g}, seed 0"
    arms = [arm("softmax", {}), arm("TTT", layers)]
    outcome = compare(arms, size=f"{size} x {size}", device=torch.device("cpu"), repeats=repeats, settings=settings)
    pictures = [digits.samples_to_picture(a.latent)[0].numpy() for a in outcome.arms]
    files = out / "softmax_left_ttt_right.png", out / "chart.png"
    imsave(files[0], side_by_side(pictures, [a.label for a in outcome.arms]))
    imsave(files[1], comparison_chart(outcome))
    return *files, outcome.table()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--comfyui", type=Path, help="a ComfyUI whose requirements are installed; without it the run has no UI")
    parser.add_argument("--size", type=int, default=512, help="width and height of the latent's nominal picture, a multiple of 16")
    parser.add_argument("--out", type=Path, default=Path("output"), help="folder for the pictures")
    options = parser.parse_args(argv)
    if options.size % 16 or not 64 <= options.size <= 768:
        parser.error(f"--size must be a multiple of 16 from 64 to 768 (the tiny model's position table ends there), got {options.size}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        parser.error(f"--out '{options.out}' cannot be made a folder ({e.strerror}); choose another")
    if options.comfyui is None:
        print("No ComfyUI: running the same tiny model and comparison in diffusers, without a UI.", flush=True)
        picture, chart, table = without_ui(options.size, options.out)
    else:
        try:
            picture, chart, table = in_comfyui(options.comfyui, options.size, options.out)
        except WorkflowError as e:
            print(f"The demo failed in ComfyUI: {e}", file=sys.stderr)
            return 1
    print(f"\n{table}\n\nA/B picture: {picture.resolve()}\nchart:       {chart.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
