"""Pictures of the workflows in ComfyUI's real UI: a thumbnail beside each workflow file, and those in docs/screenshots.

    python -m comfy_ttt.tools.screenshots --comfyui ~/comfy/ComfyUI

Runs those that need no SD3.5 to show their results. Needs Playwright and a Chromium (see browser.py).
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
HELP_PICTURES = {"TTTCompare": "Chart", "TTTInspect": "What one token depends on"}  # node: title of the node that shows the picture
SHOWN = (("quickstart_cpu", "TTTCompare"), ("inspect_cpu", "TTTInspect"))  # workflow, the node that does the work
MARGIN = 12  # pixels around the graph in a thumbnail
PANEL = (70, 90, 20, 70)  # left, top, right, bottom that the UI's own bars take


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


def run_open_graph(browser: Browser, node: str, seconds: float = 900, on_progress=None) -> None:
    """Presses Run and waits until every node that shows pictures has some; node: class of the one that does the work."""
    browser.page.get_by_test_id("queue-button").click()
    wanted = {n["type"] for n in browser.nodes()} & {"SaveImage", "PreviewImage"} | {node}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(1)
        if on_progress is not None:
            on_progress()
        if failure := browser.failure():
            raise RuntimeError(f"the workflow failed: {failure}")
        if wanted <= {n["type"] for n in browser.nodes() if n["images"]} and not browser.is_running():
            time.sleep(2)
            return
    raise TimeoutError(f"the workflow was not done within {seconds:.0f} seconds")


def show_help(browser: Browser, node: str) -> None:
    """Selects the first node of this class in the open graph and opens its help beside it."""
    browser.page.evaluate("type => app.canvas.selectNode(app.graph._nodes.find(n => n.type === type))", node)
    browser.page.get_by_test_id("info-button").click()
    time.sleep(2)


def help_picture(browser: Browser, node: str) -> None:
    """Keeps what the last run showed for this class of node as web/docs/<node>.jpg, for its help."""
    from PIL import Image

    shower = next(str(n["id"]) for n in browser.nodes() if n["title"] == HELP_PICTURES[node])
    entry = list(browser.server.get("/history").values())[-1]
    (shown,) = entry["outputs"][shower]["images"]
    picture = Image.open(browser.server.base / shown["type"] / shown["subfolder"] / shown["filename"]).convert("RGB")
    picture.thumbnail((900, 900), Image.LANCZOS)
    picture.save(PACK / "web" / "docs" / f"{node}.jpg", quality=80, optimize=True)


def ui_file(name: str, **widgets) -> dict:
    """A shipped workflow, with other values for the first widgets of these names in TTT Compare."""
    workflow = json.loads((PACK / "workflows" / f"{name}.json").read_text(encoding="utf-8"))
    for node in workflow["nodes"]:
        if node["type"] == "TTTCompare":
            names = [i["name"] for i in node["inputs"] if "widget" in i]
            names.insert(names.index("seed") + 1, "control")  # the UI keeps one more value behind the seed
            for widget, value in widgets.items():
                node["widgets_values"][names.index(widget)] = value
    return workflow


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--comfyui", type=Path, required=True, help="a ComfyUI whose requirements are installed")
    parser.add_argument("--out", type=Path, default=PACK / "docs" / "screenshots")
    parser.add_argument("--thumbnails", type=Path, default=PACK / "workflows")
    parser.add_argument("--only-thumbnails", action="store_true", help="run nothing")
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
            for name, node in SHOWN if not options.only_thumbnails else ():
                browser.open(ui_file(name))
                browser.fit()
                run_open_graph(browser, node)
                browser.fit()
                browser.screenshot(options.out / f"{name}.jpg")
                print(options.out / f"{name}.jpg", flush=True)
                thumbnail(browser, options.thumbnails / f"{name}.jpg")
                help_picture(browser, node)
            if not options.only_thumbnails:
                browser.fit()
                show_help(browser, node)
                browser.screenshot(options.out / "help.jpg")
                print(options.out / "help.jpg", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
