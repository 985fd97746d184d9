"""The pack in a real ComfyUI server: it loads as a custom node, and the shipped workflows run through the HTTP API."""

import json
import time

import pytest
from conftest import COMFYUI, ROOT

from comfy_ttt.demo.headless import ComfyServer, WorkflowError
from comfy_ttt.demo.quickstart import find_node

pytestmark = pytest.mark.comfyui


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with ComfyServer(COMFYUI, tmp_path_factory.mktemp("server"), ("--cpu",)) as running:
        yield running


def workflow(name):
    return json.loads((ROOT / "workflows" / "api" / f"{name}.json").read_text())


def test_all_nodes_are_there_and_the_pack_loaded_without_complaint(server):
    info = server.get("/object_info")
    expected = {"TTTLinearize", "TTTLoadModel", "TTTLoadWeights", "TTTSaveWeights", "TTTCompare"}
    assert expected <= {n for n, d in info.items() if d["category"] == "TTT"}
    assert {n for n, d in info.items() if d["category"] == "TTT/demo"} == {"TTTDemoPrompt", "TTTDemoPicture"}
    assert "IMPORT FAILED" not in server.log.read_text()
    assert "ttt_tiny_digits.safetensors" in info["UNETLoader"]["input"]["required"]["unet_name"][0]


def test_every_input_and_output_has_a_tooltip_and_never_says_t5(server):
    for name, data in server.get("/object_info").items():
        if not data["category"].startswith("TTT"):
            continue
        assert len(data["description"]) > 40, name
        for group in ("required", "optional"):
            for key, value in data["input"].get(group, {}).items():
                assert len(value[1].get("tooltip", "")) > 15, f"{name}.{key} has no tooltip"
        assert all(data["output_tooltips"]), name
        assert "T5" not in json.dumps(data).replace("T5-XXL", "")


def test_quickstart(server):
    graph = workflow("quickstart_cpu")
    graph[find_node(graph, "EmptySD3LatentImage")]["inputs"].update(width=128, height=192)
    graph[find_node(graph, "TTTCompare")]["inputs"].update(steps=3, repeats=1)
    shown = server.run(graph)
    table = shown[find_node(graph, "TTTCompare")]["text"][0]
    assert "128 x 192" in table and "softmax" in table and "speed-up" in table
    for name in ("softmax_left_ttt_right", "chart"):
        (picture,) = shown[find_node(graph, "SaveImage", name)]["images"]
        assert picture.is_file() and picture.stat().st_size > 500


def test_the_untrained_text_reaches_the_user(server):
    graph = {
        "1": {"class_type": "UNETLoader", "inputs": {"unet_name": "ttt_tiny_digits.safetensors", "weight_dtype": "default"}},
        "2": {"class_type": "TTTLinearize", "inputs": {"model": ["1", 0], "attentions": "paper"}},
        "3": {"class_type": "TTTSaveWeights", "inputs": {"model": ["2", 0], "filename": "from_server"}},
    }
    for key, value in dict(inner_model="swiglu", key_norm="instance", locality="dwc_qk", seed=0, backend="auto").items():
        graph["2"]["inputs"][key] = value
    text = server.run(graph)["3"]["text"][0]
    assert "UNTRAINED" in text and (server.base / "models" / "ttt" / "from_server_00001.safetensors").is_file()
    names = server.get("/object_info/TTTLoadWeights")["TTTLoadWeights"]["input"]["required"]["weights_name"][1]["options"]
    assert "from_server_00001.safetensors" in names


def test_bad_input_comes_back_as_the_sentence(server):
    graph = workflow("quickstart_cpu")
    loader = find_node(graph, "TTTLoadWeights")
    graph[loader] = {
        "class_type": "TTTLinearize",
        "inputs": {"model": ["1", 0], "attentions": "joint:7", "inner_model": "swiglu", "key_norm": "instance", "locality": "dwc_qk", "seed": 0, "backend": "auto"},
    }
    with pytest.raises(WorkflowError, match="TTTLinearize: .*asks for joint:7.*blocks 0 to 2"):
        server.run(graph)


def test_interrupt_stops_a_comparison(server):
    graph = workflow("quickstart_cpu")
    graph[find_node(graph, "TTTCompare")]["inputs"].update(steps=200, repeats=20)
    prompt = server.queue(graph)
    time.sleep(8)
    server.post("/interrupt", {})
    with pytest.raises(WorkflowError, match="interrupted"):
        server.wait(prompt, seconds=60)
