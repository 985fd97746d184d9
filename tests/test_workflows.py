"""The shipped workflows: both files describe one graph, and every one runs in a real ComfyUI on the tiny model."""

import json

import numpy as np
import pytest
from conftest import COMFYUI, ROOT
from PIL import Image
from tiny_vae import write_vae

from comfy_ttt.demo.headless import ComfyServer

FOLDER = ROOT / "workflows"
NAMES = sorted(p.stem for p in FOLDER.glob("*.json"))
NOTES = {"Note", "MarkdownNote"}
BYPASS, MUTED = 4, 2
CONTROLS = {"fixed", "randomize", "increment", "decrement"}
TINY, LAYERS = "ttt_tiny_digits.safetensors", "ttt_tiny_digits_paper.safetensors"


def ui_file(name):
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def api_file(name):
    return json.loads((FOLDER / "api" / f"{name}.json").read_text(encoding="utf-8"))


def read_ui(workflow):
    """{id: (class, {input: value or [id, slot]})} from a UI file alone, knowing nothing of the nodes."""
    nodes = {n["id"]: n for n in workflow["nodes"] if n["type"] not in NOTES}
    links = {link[0]: link for link in workflow["links"]}

    def source(link_id):
        _, origin, slot, *_, kind = links[link_id]
        while nodes[origin]["mode"] == BYPASS:
            inner = next(i["link"] for i in nodes[origin]["inputs"] if i["type"] == kind and i["link"] is not None)
            _, origin, slot, *_ = links[inner]
        return [str(origin), slot]

    graph = {}
    for number, node in nodes.items():
        if node["mode"] in (BYPASS, MUTED):
            continue
        inputs, values = {}, list(node["widgets_values"])
        for slot in node["inputs"]:
            if "widget" in slot:
                inputs[slot["name"]] = values.pop(0)
                if "seed" in slot["name"] and values and values[0] in CONTROLS:
                    values.pop(0)
            if slot["link"] is not None:
                inputs[slot["name"]] = source(slot["link"])
        assert not values, f"{node['type']} {number} has {values} left over"
        graph[str(number)] = (node["type"], inputs)
    return graph


def test_what_is_shipped():
    expected = {"calibrate_and_save", "fine_tune", "inspect_cpu", "load_converted", "quickstart_cpu", "softmax_vs_ttt_1024", "softmax_vs_ttt_2048"}
    assert set(NAMES) == expected
    assert sorted(p.stem for p in (FOLDER / "api").glob("*.json")) == NAMES
    for name in NAMES:
        assert 3_000 < (FOLDER / f"{name}.jpg").stat().st_size < 150_000


@pytest.mark.parametrize("name", NAMES)
def test_both_files_describe_the_same_graph(name):
    twin = {number: (n["class_type"], n["inputs"]) for number, n in api_file(name).items()}
    assert read_ui(ui_file(name)) == twin


@pytest.mark.parametrize("name", NAMES)
def test_links_are_whole_and_nodes_do_not_overlap(name):
    workflow = ui_file(name)
    nodes = {n["id"]: n for n in workflow["nodes"]}
    for link, origin, out, target, into, kind in workflow["links"]:
        output, target_slot = nodes[origin]["outputs"][out], nodes[target]["inputs"][into]
        assert link in output["links"] and target_slot["link"] == link and output["type"] == kind and target_slot["type"] in (kind, "*")
    boxes = [(n["pos"][0], n["pos"][1] - 30, n["pos"][0] + n["size"][0], n["pos"][1] + n["size"][1]) for n in nodes.values()]
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            assert a[0] >= b[2] or b[0] >= a[2] or a[1] >= b[3] or b[1] >= a[3]
    for x, y, right, bottom in boxes:
        inside = [g for g in workflow["groups"] if g["bounding"][0] <= x and g["bounding"][1] <= y]
        assert any(g["bounding"][0] + g["bounding"][2] >= right and g["bounding"][1] + g["bounding"][3] >= bottom for g in inside)


@pytest.mark.parametrize("name", NAMES)
def test_only_nodes_of_core_and_ours_and_words_about_the_files(name):
    workflow = ui_file(name)
    for node in workflow["nodes"]:
        assert node["type"] in NOTES or node["type"].startswith("TTT") or node["properties"]["cnr_id"] == "comfy-core"
    notes = " ".join(n["widgets_values"][0] for n in workflow["nodes"] if n["type"] in NOTES)
    assert "T5" not in notes.replace("T5-XXL", "")
    for graph_node in api_file(name).values():
        for value in graph_node["inputs"].values():
            if isinstance(value, str) and value.endswith(".safetensors") and not name.endswith("_cpu"):
                assert value.removesuffix(".safetensors") in notes, f"no word on where {value} comes from"


# ------------------------------------------------------------------------------------------ in a real ComfyUI


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    base = tmp_path_factory.mktemp("workflows")
    write_vae(base / "models" / "vae_approx")
    pictures = base / "input" / "sd35_training"
    pictures.mkdir(parents=True)
    for i in range(2):
        Image.fromarray(np.random.default_rng(i).integers(0, 255, (64, 64, 3), np.uint8)).save(pictures / f"{i}.png")
        (pictures / f"{i}.txt").write_text(str(i))
    with ComfyServer(COMFYUI, base, ("--cpu",)) as running:
        yield running


def on_tiny(graph):
    """The same graph on the tiny model: its loaders and demo prompts for SD3.5's, small sizes, few steps."""
    small = {
        "EmptySD3LatentImage": {"width": 128, "height": 96},
        "TTTCompare": {"steps": 2, "repeats": 1, "warmup": 0},
        "KSampler": {"steps": 2},
        "TTTCalibrate": {"steps": 3, "samples": 16, "sampling_steps": 4},
        "TTTFineTune": {"steps": 2, "batch_size": 1, "sample_every": 1},
    }
    changed, moved = {"base": _node("UNETLoader", unet_name=TINY, weight_dtype="default"), "vae": _node("VAELoader", vae_name="taesd3")}, {}
    for number, node in graph.items():
        kind, inputs = node["class_type"], dict(node["inputs"])
        if kind == "CheckpointLoaderSimple":
            moved |= {(number, 0): ["base", 0], (number, 2): ["vae", 0]}
        elif kind == "CLIPTextEncode":
            changed[number] = _node("TTTDemoPrompt", digit="3" if inputs["text"] else "")
        elif kind == "MakeTrainingDataset":
            changed["latents"] = _node("VAEEncode", pixels=inputs["images"], vae=inputs["vae"])
            changed["caption"] = _node("TTTDemoPrompt", digit="1")
            moved |= {(number, 0): ["latents", 0], (number, 1): ["caption", 0]}
        elif kind != "TripleCLIPLoader":
            if inputs.get("sizes"):
                inputs["sizes"] = " ".join(str(int(s) // 16) for s in inputs["sizes"].split())
            changed[number] = _node(kind, **inputs | small.get(kind, {}))
    for node in changed.values():
        for name, value in node["inputs"].items():
            if isinstance(value, list):
                node["inputs"][name] = moved.get(tuple(value), value)
    return changed


def _node(kind, **inputs):
    return {"class_type": kind, "inputs": inputs}


def run(server, name):
    graph = on_tiny(api_file(name))
    missing = {n["class_type"] for n in graph.values()} - set(server.get("/object_info"))
    if missing:
        assert missing <= {"LoadImageTextDataSetFromFolder"}, missing
        pytest.skip(f"this ComfyUI has no {', '.join(missing)} (the workflow says so)")
    shown = server.run(graph)
    for number, data in graph.items():
        if data["class_type"] in ("SaveImage", "PreviewImage"):
            for picture in shown[number]["images"]:
                assert np.asarray(Image.open(picture)).std() > 0, f"{name}: {data} is one flat colour"
            assert shown[number]["images"]
    return {graph[n]["class_type"]: data["text"][0] for n, data in shown.items() if data["text"]}


@pytest.fixture(scope="module")
def calibrated(server):
    """The others load what this workflow writes, under the names that their notes promise."""
    texts = run(server, "calibrate_and_save")
    assert (server.base / "models" / "ttt" / "sd35m_paper_00001.safetensors").is_file()
    assert (server.base / "output" / "diffusion_models" / "sd35m_ttt_00001_.safetensors").is_file()
    return texts


@pytest.mark.comfyui
def test_calibrate_and_save_runs(calibrated):
    assert "Saved" in calibrated["TTTCalibrate"] and "TTT, calibrated" in calibrated["TTTCompare"]


@pytest.mark.comfyui
@pytest.mark.parametrize(
    ("name", "node", "says"),
    [
        ("quickstart_cpu", "TTTCompare", "speed-up"),
        ("inspect_cpu", "TTTInspect", "reach of self:0"),
        ("softmax_vs_ttt_1024", "TTTCompare", "speed-up"),
        ("softmax_vs_ttt_2048", "TTTCompare", "64 x 64"),
        ("load_converted", "TTTLoadModel", "calibrated"),
        ("fine_tune", "TTTFineTune", "loss"),
    ],
)
def test_the_others_run(server, calibrated, name, node, says):
    assert says in run(server, name)[node]
