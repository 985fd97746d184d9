"""Pictures of the workflows in ComfyUI's real UI: a thumbnail beside each workflow file, and those in docs/screenshots.

    python -m comfy_ttt.tools.screenshots --comfyui ~/comfy/ComfyUI

Runs the quickstart to show its results. Needs Playwright and a Chromium (see browser.py).
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
import time
from pathlib import Path

from ..demo.headless import PACK
from .browser import Browser, ui_server, why_no_browser

THUMBNAIL = (640, 360)
MARGIN = 12  # pixels around the graph in a thumbnail
PANEL = (70, 90, 20, 20)  # left, top, right, bottom that the UI's own bars take


def placeholders(base: Path) -> None:
    """Empty files under the names that the workflows load, so that the UI does not mark them as missing."""
    for path in sorted((PACK / "workflows" / "api").glob("*.json")):
        for node in json.loads(path.read_text(encoding="utf-8")).values():
            folder = {
                "CheckpointLoaderSimple": "checkpoints", "TripleCLIPLoader": "text_encoders", "TTTLoadWeights": "ttt", "TTTLoadModel": "diffusion_models",
            }.get(node["class_type"])  # fmt: skip
            for value in node["inputs"].values() if folder else ():
                if isinstance(value, str) and value.endswith(".safetensors") and "tiny" not in value:
                    file = base / "models" / folder / value
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.touch()
    (base / "input" / "sd35_training").mkdir(parents=True, exist_ok=True)


def thumbnail(browser: Browser, path: Path) -> None:
    """The open graph alone, small, as JPEG."""
    from PIL import Image

    left, top, right, bottom = PANEL
    browser.fit((left + MARGIN, top + MARGIN, right + MARGIN, bottom + MARGIN))
    width, height = browser.size
    picture = browser.page.screenshot(clip={"x": left, "y": top, "width": width - left - right, "height": height - top - bottom})
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.thumbnail(THUMBNAIL, Image.LANCZOS)
    image.save(path, quality=82, optimize=True)


def run_quickstart(browser: Browser, seconds: float = 900, on_progress=None) -> None:
    """Presses Run and waits until the last picture is there."""
    browser.page.get_by_test_id("queue-button").click()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(1)
        if on_progress is not None:
            on_progress()
        if failure := browser.failure():
            raise RuntimeError(f"the quickstart failed: {failure}")
        with_pictures = {n["type"] for n in browser.nodes() if n["images"]}
        if {"SaveImage", "TTTCompare"} <= with_pictures and not browser.is_running():
            return
    raise TimeoutError(f"the quickstart was not done within {seconds:.0f} seconds")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--comfyui", type=Path, required=True, help="a ComfyUI whose requirements are installed")
    parser.add_argument("--out", type=Path, default=PACK / "docs" / "screenshots")
    parser.add_argument("--thumbnails", type=Path, default=PACK / "workflows")
    parser.add_argument("--only-thumbnails", action="store_true", help="do not run the quickstart")
    options = parser.parse_args(argv)
    if reason := why_no_browser():
        parser.error(reason)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        placeholders(base)
        with ui_server(options.comfyui, base) as server, Browser(server, 1920, 1080) as browser:
            for path in sorted((PACK / "workflows").glob("*.json")):
                browser.open(json.loads(path.read_text(encoding="utf-8")))
                thumbnail(browser, options.thumbnails / f"{path.stem}.jpg")
                print(options.thumbnails / f"{path.stem}.jpg", flush=True)
            if not options.only_thumbnails:
                browser.open(json.loads((PACK / "workflows" / "quickstart_cpu.json").read_text(encoding="utf-8")))
                browser.fit()
                run_quickstart(browser)
                time.sleep(2)
                browser.fit()
                browser.screenshot(options.out / "quickstart.jpg")
                thumbnail(browser, options.thumbnails / "quickstart_cpu.jpg")
                print(options.out / "quickstart.jpg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
