"""Calibrate the embedded digit model and write the small TTT file that the demo workflows load.

    python -m comfy_ttt.demo.calibrate_digits

Some ten minutes on two CPU cores. For each chosen attention it prints how far the TTT layer is from softmax, before and after, and
at the end the flow loss on digits that nothing was trained on.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ..ttt_core import TTTSpec, TTTWeights
from ..ttt_core.calibrate import CalibrationSettings, calibrate
from ..ttt_core.progress import Progress
from .digits_training import SIZES, load_model, prompts
from .train_digits import hold_out_loss

# A layer fits the sizes it was calibrated at: with small ones alone the error of self:0 is 5 % there and 83 % at 64 x 64.
LARGE = ((48, 48), (64, 64))
OUT = Path(__file__).parent / "ttt" / "ttt_tiny_digits_{preset}.safetensors"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--attentions", default="paper", help="preset or written list (default paper)")
    parser.add_argument("--steps", type=int, default=500, help="Adam steps per layer (default 500)")
    parser.add_argument("--samples", type=int, default=240, help="recorded samples per attention (default 240)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="default demo/ttt/ttt_tiny_digits_<attentions>.safetensors")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)

    model = load_model()
    weights = TTTWeights.new(model.geometry, TTTSpec(args.attentions), seed=args.seed, base_sketch=model.base_sketch)
    settings = CalibrationSettings(steps=args.steps, samples=args.samples, cfg=3.0, seed=args.seed)

    def show(p: Progress) -> None:
        if p.done % 100 == 0:
            loss = "" if p.loss is None else f", error {p.loss:.1%}"
            print(f"{p.stage}{loss}, about {p.seconds_left:.0f} s left", flush=True)

    weights_out, report = calibrate(model, weights, prompts(), (*SIZES, *LARGE), settings, progress=show)
    print(report.text())
    for name, layers in (("softmax", {}), ("TTT untrained", weights.layers), ("TTT calibrated", weights_out.layers)):
        with model.running(layers):
            print(f"hold-out flow loss, {name}: {hold_out_loss(model.transformer):.4f}")
    path = args.out or Path(str(OUT).format(preset=args.attentions))
    print(f"wrote {weights_out.save(path)}")


if __name__ == "__main__":
    main()
