"""ComfyUI's real web UI in headless Chromium, for tests and for the pictures in this repository.

Needs Playwright (pip install playwright) and a Chromium or Chrome of the system; nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import time
from pathlib import Path

from ..demo.headless import ComfyServer

ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
)  # fmt: skip
READY = "() => window.app?.graph && Object.keys(window.LiteGraph?.registered_node_types ?? {}).length > 100"
FIT = """([left, top, right, bottom]) => {
    const box = [1e9, 1e9, -1e9, -1e9]
    const shapes = [...app.graph._groups.map(g => [...g._bounding]), ...app.graph._nodes.map(n => [n.pos[0], n.pos[1] - 30, n.size[0], n.size[1] + 30])]
    for (const [x, y, w, h] of shapes) {
        box[0] = Math.min(box[0], x); box[1] = Math.min(box[1], y); box[2] = Math.max(box[2], x + w); box[3] = Math.max(box[3], y + h)
    }
    const ds = app.canvas.ds, scale = Math.min((right - left) / (box[2] - box[0]), (bottom - top) / (box[3] - box[1]))
    ds.scale = scale
    ds.offset = [left / scale - box[0], top / scale - box[1]]
    app.canvas.setDirty(true, true)
}"""


def find_chromium() -> str | None:
    """$CHROMIUM, or the system's; None when there is none."""
    names = (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome", "chrome")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def why_no_browser() -> str | None:
    if importlib.util.find_spec("playwright") is None:
        return "Playwright is not installed (pip install playwright)"
    if find_chromium() is None:
        return "no Chromium found ($CHROMIUM or on the path)"
    return None


def ui_server(root: Path, base: Path, *extra: str, language: str = "en") -> ComfyServer:
    """A ComfyUI on the CPU that serves the installed frontend, its first-start dialogs put away; to be entered."""
    arguments = ["--cpu"]
    if importlib.util.find_spec("comfyui_workflow_templates") is None:  # large, and not needed here
        frontend = Path(importlib.util.find_spec("comfyui_frontend_package").submodule_search_locations[0]) / "static"
        arguments += ["--front-end-root", str(frontend)]
    settings = base / "user" / "default" / "comfy.settings.json"
    settings.parent.mkdir(parents=True, exist_ok=True)
    known = {"Comfy.TutorialCompleted": True, "Comfy.Locale": language, "Comfy.Minimap.Visible": False, "Comfy.Graph.CanvasInfo": False}
    known["LiteGraph.Canvas.MinFontSizeForLOD"] = 0  # texts are drawn however small the graph is shown
    settings.write_text(json.dumps(known))
    return ComfyServer(root, base, (*arguments, *extra))


class Browser:
    """Context manager: one page of ComfyUI's UI. errors: what the page wrote to the console as errors, newest last."""

    def __init__(self, server: ComfyServer, width: int = 1600, height: int = 900):
        self.server, self.size, self.errors = server, (width, height), []

    def __enter__(self) -> Browser:
        from playwright.sync_api import sync_playwright

        self._playwright = sync_playwright().start()
        self._chromium = self._playwright.chromium.launch(executable_path=find_chromium(), args=list(ARGUMENTS))
        self.page = self._chromium.new_page(viewport=dict(zip(("width", "height"), self.size, strict=True)))
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))
        self.page.goto(f"http://127.0.0.1:{self.server.port}/")
        self._wait()
        return self

    def _wait(self) -> None:
        self.page.wait_for_function(READY, timeout=180_000)
        time.sleep(3)  # extensions finish setting up

    def speak(self, language: str) -> None:
        """Sets the UI's language and loads the page anew."""
        self.page.evaluate("async language => { await app.extensionManager.setting.set('Comfy.Locale', language) }", language)
        time.sleep(1)
        self.page.reload()
        self._wait()

    def __exit__(self, *_):
        self._chromium.close()
        self._playwright.stop()

    def open(self, workflow: dict) -> None:
        """Opens a workflow in UI format and waits until it is drawn."""
        self.page.evaluate("async g => { await app.loadGraphData(g, true, true, null) }", workflow)
        time.sleep(1.5)

    def as_prompt(self) -> dict:
        """What the frontend would queue for the open graph: {id: {class_type, inputs}}."""
        return self.page.evaluate("async () => (await app.graphToPrompt()).output")

    def nodes(self) -> list[dict]:
        """Of every node: id, type, title, place and size, the least size it needs, and whether its class is unknown."""
        return self.page.evaluate(
            "() => app.graph._nodes.map(n => ({id: n.id, type: n.type, title: n.title, pos: [...n.pos], size: [...n.size], least: [...n.computeSize()],"
            " unknown: !LiteGraph.registered_node_types[n.type], images: n.imgs?.length ?? 0, red: !!n.has_errors}))"
        )

    def bad_links(self) -> list:
        """Links that lead from or to a slot that is not there, or whose types do not fit."""
        return self.page.evaluate(
            """() => [...app.graph.links.values()].filter(l => {
                const a = app.graph.getNodeById(l.origin_id)?.outputs?.[l.origin_slot], b = app.graph.getNodeById(l.target_id)?.inputs?.[l.target_slot]
                return !a || !b || b.link !== l.id || !LiteGraph.isValidConnection(a.type, b.type)
            }).map(l => [l.id, l.origin_id, l.origin_slot, l.target_id, l.target_slot])"""
        )

    def add_from_search(self, text: str, at: tuple[int, int]) -> int:
        """Double-clicks the empty canvas at these pixels, types into the search box, takes the first hit; the new node's id."""
        before = {n["id"] for n in self.nodes()}
        self.page.mouse.dblclick(*at)
        box = self.page.locator("input:focus")
        box.wait_for(timeout=20_000)
        self.page.keyboard.type(text, delay=30)
        time.sleep(1.5)
        self.page.keyboard.press("Enter")
        self.page.wait_for_function("count => app.graph._nodes.length > count", arg=len(before), timeout=20_000)
        time.sleep(0.5)
        self.page.mouse.click(at[0], at[1] + 300)  # some versions let the new node follow the mouse until a click
        self.page.keyboard.press("Escape")
        return next(n["id"] for n in self.nodes() if n["id"] not in before)

    def slot_at(self, node: int, is_input: bool, slot: int) -> tuple[float, float]:
        """Where on the page a slot of a node is drawn."""
        return tuple(
            self.page.evaluate(
                """([id, isInput, slot]) => {
                    const node = app.graph.getNodeById(id), ds = app.canvas.ds, box = app.canvas.canvas.getBoundingClientRect()
                    const [x, y] = isInput ? node.getInputPos(slot) : node.getOutputPos(slot)
                    return [(x + ds.offset[0]) * ds.scale + box.left, (y + ds.offset[1]) * ds.scale + box.top]
                }""",
                [node, is_input, slot],
            )
        )

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.page.mouse.move(*start)
        self.page.mouse.down()
        self.page.mouse.move(*end, steps=12)
        self.page.mouse.up()
        time.sleep(0.5)

    def is_running(self) -> bool:
        """Whether a prompt is queued or running."""
        queue = self.server.get("/queue")
        return bool(queue["queue_running"] or queue["queue_pending"])

    def failure(self) -> str | None:
        """What the last prompt that ended failed with, or None."""
        entries = list(self.server.get("/history").values())
        messages = entries[-1]["status"]["messages"] if entries else []
        return next((f"{m['node_type']}: {m['exception_message'].strip()}" for kind, m in messages if kind == "execution_error"), None)

    def fit(self, margin: tuple[int, int, int, int] = (70, 100, 20, 20)) -> None:
        """Scales the view so that the whole graph shows; margin: left, top, right, bottom in pixels."""
        (width, height), (left, top, right, bottom) = self.size, margin
        self.page.evaluate(FIT, [left, top, width - right, height - bottom])
        time.sleep(1)

    def screenshot(self, path: Path, quality: int = 80, clip: dict | None = None) -> None:
        """A picture of the page, JPEG or PNG by its name."""
        path.parent.mkdir(parents=True, exist_ok=True)
        jpeg = path.suffix == ".jpg"
        self.page.screenshot(path=str(path), clip=clip, **({"type": "jpeg", "quality": quality} if jpeg else {}))
