"""The estimator's numbers for SD3.5-Medium at 1024 pixels, bf16, preset paper, batch 1, as the README quotes them.

    python benchmarks/memory.py
"""

from __future__ import annotations

from pathlib import Path

import _path  # noqa: F401  makes comfy_ttt importable without an installation
from comfy_ttt.ttt_core import TTTSpec
from comfy_ttt.ttt_core.calibrate import CalibrationSettings
from comfy_ttt.ttt_core.finetune import FineTuneSettings
from comfy_ttt.ttt_core.memory import estimate_calibration, estimate_finetuning

SHAPES = Path(__file__).resolve().parent.parent / "tests" / "shapes" / "sd35_medium.tsv"


def main() -> None:
    rows = (line.split("\t") for line in SHAPES.read_text().splitlines()[1:])
    shapes = {name: tuple(int(s) for s in size.split("x")) for name, size in rows}
    spec, size = TTTSpec("paper"), (128, 128)
    print(estimate_calibration(shapes, spec, CalibrationSettings(), size).text())
    for mode in ("ttt", "attention", "full"):
        for options in ({}, {"checkpointing": True}, {"checkpointing": True, "optimizer": "adamw8bit"})[: 3 if mode == "full" else 2]:
            settings = FineTuneSettings(mode=mode, batch=1, **options)
            print(", ".join(options) or "plain", "-", estimate_finetuning(shapes, spec, settings, size).text())


if __name__ == "__main__":
    main()
