"""The pack in ComfyUI's real web UI, in headless Chromium: workflows open cleanly and run, nodes can be added and wired.

$TTT_SCREENSHOTS names a folder for pictures of what was seen.
"""

import json
import os
import re
import urllib.request
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from conftest import COMFYUI, ROOT

from comfy_ttt.tools.browser import Browser, ui_server, why_no_browser
from comfy_ttt.tools.screenshots import placeholders, run_open_graph, show_help, ui_file



def why_not_here():
    """No browser, or a UI that does not belong to this ComfyUI: what it would show is nobody's to fix."""
    if (reason := why_no_browser()) or COMFYUI is None:
        return reason
    try:
        installed = version("comfyui-frontend-package")
    except PackageNotFoundError:
        return "ComfyUI's UI (comfyui-frontend-package) is not installed"
    wanted = re.search(r"comfyui-frontend-package==([\w.]+)", (COMFYUI / "requirements.txt").read_text())
    return None if wanted is None or wanted[1] == installed else f"the installed UI is {installed}, and this ComfyUI wants {wanted[1]}"


pytestmark = [pytest.mark.comfyui, pytest.mark.skipif(why_not_here() is not None, reason=str(why_not_here()))]
NAMES = sorted(p.stem for p in (ROOT / "workflows").glob("*.json"))
NETWORK = "Failed to load resource"  # the UI's own requests to the outside; what of ours is missing is asked for directly


def workflow(name):
    return json.loads((ROOT / "workflows" / f"{name}.json").read_text(encoding="utf-8"))


def kind_of(error):
    """An error's first line without ports and the hashes in file names, so that two runs can be compared."""
    return re.sub(r":\d{4,5}|-[\w-]{8}(?=\.js)", "", error.split("\n")[0])


def picture(browser, name):
    if folder := os.environ.get("TTT_SCREENSHOTS"):
        browser.screenshot(Path(folder) / f"{name}.jpg")


@pytest.fixture(scope="module")
def usual_errors(tmp_path_factory):
    """What the UI itself writes to the console, with no custom node there."""
    server = ui_server(COMFYUI, tmp_path_factory.mktemp("plain"), "--disable-all-custom-nodes")
    with server, Browser(server) as browser:
        browser.open({"nodes": [], "links": [], "version": 0.4})
        return {kind_of(e) for e in browser.errors}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    base = tmp_path_factory.mktemp("ui")
    placeholders(base)
    with ui_server(COMFYUI, base) as running:
        yield running


@pytest.fixture(scope="module")
def browser(server, usual_errors):  # one after the other: Playwright allows one at a time
    with Browser(server, 1920, 1080) as opened:
        yield opened


@pytest.mark.parametrize("name", NAMES)
def test_a_workflow_opens_without_a_missing_node_or_a_red_link(browser, name):
    browser.open(workflow(name))
    browser.fit()
    picture(browser, name)
    nodes = browser.nodes()
    assert len(nodes) == len(workflow(name)["nodes"])
    assert not [n["type"] for n in nodes if n["unknown"] or n["red"]]
    assert browser.bad_links() == []
    assert not browser.page.get_by_test_id("error-overlay").is_visible()


@pytest.mark.parametrize("name", NAMES)
def test_every_node_is_as_large_as_its_contents_need(browser, name):
    browser.open(workflow(name))
    assert not [(n["type"], n["size"], n["least"]) for n in browser.nodes() if n["least"][1] > n["size"][1] + 1 or n["least"][0] > n["size"][0] + 1]


@pytest.mark.parametrize("name", NAMES)
def test_the_ui_queues_exactly_the_api_twin(browser, name):
    browser.open(workflow(name))
    twin = json.loads((ROOT / "workflows" / "api" / f"{name}.json").read_text(encoding="utf-8"))
    queued = browser.as_prompt()
    for node in queued.values():
        if node["class_type"] == "PreviewAny":  # some versions of the UI send what its own text field shows, too
            node["inputs"] = {k: v for k, v in node["inputs"].items() if k == "source"}
    assert {n: (d["class_type"], d["inputs"]) for n, d in queued.items()} == {n: (d["class_type"], d["inputs"]) for n, d in twin.items()}


def test_the_template_browser_lists_the_workflows(server):
    templates = server.get("/workflow_templates")
    assert sorted(templates["sd35_ttt"]) == NAMES


def test_the_quickstart_runs_by_its_button(browser):
    graph = ui_file("quickstart_cpu", steps=6)  # smaller and shorter than shipped, for the test's sake
    next(n for n in graph["nodes"] if n["type"] == "EmptySD3LatentImage")["widgets_values"][:2] = [192, 192]
    browser.open(graph)
    browser.fit()
    seen = []

    def watch():
        seen.extend(browser.page.evaluate("() => app.graph._nodes.filter(n => n.type === 'TTTCompare' && n.progress > 0 && n.progress < 1).map(n => n.progress)"))
        if seen and len(seen) == 3:
            picture(browser, "quickstart_running")

    run_open_graph(browser, "TTTCompare", on_progress=watch)
    picture(browser, "quickstart_done")
    assert seen == sorted(seen) and seen, "no progress was drawn on the node"
    with_pictures = [n["type"] for n in browser.nodes() if n["images"]]
    assert sorted(with_pictures) == ["SaveImage", "SaveImage", "TTTCompare"]
    texts = browser.page.evaluate("() => app.graph._nodes.filter(n => n.type === 'PreviewAny').map(n => String(n.widgets.map(w => w.value)))")
    assert "speed-up" in texts[0] and "192 x 192" in texts[0]
    on_node = browser.page.evaluate("() => app.graph._nodes.filter(n => n.type === 'TTTCompare').map(n => String(n.widgets.map(w => w.value)))")
    assert "192 x 192: " in on_node[0]


def test_ttt_linearize_is_found_in_the_search_box_and_wired_by_hand(browser):
    browser.open({"nodes": [], "links": [], "version": 0.4})
    browser.page.evaluate("() => { app.canvas.ds.scale = 1; app.canvas.ds.offset = [0, 0]; app.canvas.setDirty(true, true) }")
    loader = browser.add_from_search("Load Diffusion Model", (250, 300))
    linearize = browser.add_from_search("TTT Linearize", (800, 300))
    types = {n["id"]: n["type"] for n in browser.nodes()}
    assert (types[loader], types[linearize]) == ("UNETLoader", "TTTLinearize")
    browser.page.evaluate("([a, b]) => { app.graph.getNodeById(a).pos = [150, 200]; app.graph.getNodeById(b).pos = [700, 200] }", [loader, linearize])
    browser.drag(browser.slot_at(loader, False, 0), browser.slot_at(linearize, True, 0))
    picture(browser, "search_and_wire")
    assert browser.as_prompt()[str(linearize)]["inputs"]["model"] == [str(loader), 0] and browser.bad_links() == []


def test_help_opens_beside_the_node(browser):
    browser.open(workflow("quickstart_cpu"))
    browser.fit()
    show_help(browser, "TTTCompare")
    browser.page.get_by_role("heading", name="How it measures").wait_for(timeout=20_000)
    picture(browser, "help")


@pytest.mark.parametrize("language", ["zh", "ko"])
def test_the_node_speaks_the_users_language(browser, language):
    texts = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))["TTTLinearize"]
    try:
        browser.speak(language)
        node = browser.page.evaluate("() => { const n = LiteGraph.createNode('TTTLinearize'); return {title: n.title, labels: n.widgets.map(w => w.label)} }")
        assert node["title"] == texts["display_name"]
        assert node["labels"] == [texts["inputs"][name]["name"] for name in ("attentions", "inner_model", "key_norm", "locality", "seed", "backend")]
    finally:
        browser.speak("en")


def test_no_console_error_of_ours(browser, usual_errors):
    """Last of those that use the page: everything above wrote into one list."""
    new = [e for e in browser.errors if kind_of(e) not in usual_errors and NETWORK not in e]
    assert new == []


@pytest.mark.parametrize("node", sorted(p.stem for p in (ROOT / "web" / "docs").glob("*.md")))
def test_help_is_served_where_the_ui_asks_for_it(server, node):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/extensions/sd35_ttt/docs/{node}.md", timeout=30) as answer:
        assert answer.status == 200 and answer.read().decode() == (ROOT / "web" / "docs" / f"{node}.md").read_text(encoding="utf-8")
