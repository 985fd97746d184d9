"""Every node and input has help, a tooltip and its texts in Chinese and Korean; read against the live schemas."""

import json
import re

import pytest
from conftest import ROOT

LANGUAGES = ("en", "zh", "ko")
SCRIPT = {"zh": re.compile(r"[\u4e00-\u9fff]"), "ko": re.compile(r"[\uac00-\ud7a3]")}
# What is written alike in every language.
INTERNATIONAL = {"MODEL", "CONDITIONING", "IMAGE", "LATENT", "VAE", "CFG", "EMA", "Latent", "Latent A", "Latent B", "Latent C", "Latent D"}
DEMO = ("TTTDemoPrompt", "TTTDemoPicture")


def help_of(node):
    return (ROOT / "web" / "docs" / f"{node}.md").read_text(encoding="utf-8")


def locale(language):
    return json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))


def without_encoder(text):
    return text.replace("T5-XXL", "").replace("t5xxl", "")


@pytest.fixture(scope="module")
def schemas(comfyui):
    from comfy_ttt.nodes import NODES

    return {s.node_id: s for s in (node.define_schema() for node in NODES)}


@pytest.mark.comfyui
def test_every_node_has_texts_and_every_input_a_tooltip(schemas):
    for node, schema in schemas.items():
        assert schema.display_name.startswith("TTT ") and schema.category in ("TTT", "TTT/demo") and len(schema.description) > 40, node
        if node not in DEMO and hasattr(schema, "search_aliases"):
            assert schema.search_aliases, node
        for port in (*schema.inputs, *schema.outputs):
            assert port.tooltip and len(port.tooltip) > 10, f"{node}.{port.id} has no tooltip"
            assert "T5" not in without_encoder(port.tooltip)


@pytest.mark.comfyui
def test_help_names_every_input_and_output(schemas):
    assert {p.stem for p in (ROOT / "web" / "docs").glob("*.md")} == set(schemas)
    for node, schema in schemas.items():
        text = help_of(node)
        for port in schema.inputs:
            assert f"`{port.id}`" in text, f"{node}.md does not explain the input {port.id}"
        for port in schema.outputs:
            name = port.display_name or port.id
            assert f"`{name}`" in text or re.search(rf"`{name[:-1]}a` \.\.\. `{name[:-1]}d`", text), f"{node}.md does not explain the output {name}"
        named = set(re.findall(r"^\| `(\w+)`", text, re.M))
        assert named <= {p.id for p in schema.inputs} | {p.display_name or p.id for p in schema.outputs}, f"{node}.md explains what is not there"


@pytest.mark.comfyui
@pytest.mark.parametrize("language", LANGUAGES)
def test_every_text_is_there_in_every_language(schemas, language):
    texts = locale(language)
    assert set(texts) == set(schemas)
    for node, schema in schemas.items():
        entry = texts[node]
        assert list(entry["inputs"]) and set(entry["inputs"]) == {p.id for p in schema.inputs}, f"{language}: inputs of {node}"
        assert set(entry["outputs"]) == {str(i) for i in range(len(schema.outputs))}, f"{language}: outputs of {node}"
        written = [entry["display_name"], entry["description"], *(t for part in ("inputs", "outputs") for e in entry[part].values() for t in (e["name"], e["tooltip"]))]
        for text in written:
            assert text.strip() and "T5" not in without_encoder(text)
            if language != "en" and text not in INTERNATIONAL:
                assert SCRIPT[language].search(text), f"{language}: '{text}' of {node} is not translated"


@pytest.mark.comfyui
def test_the_english_file_is_what_the_schemas_say(schemas):
    """Written by tools/build_locales.py; run it again when a text changes, and then look at the translations."""
    texts = locale("en")
    for node, schema in schemas.items():
        assert (texts[node]["display_name"], texts[node]["description"]) == (schema.display_name, schema.description)
        assert {k: v["tooltip"] for k, v in texts[node]["inputs"].items()} == {p.id: p.tooltip for p in schema.inputs}
        assert [v["tooltip"] for v in texts[node]["outputs"].values()] == [p.tooltip for p in schema.outputs]


@pytest.mark.parametrize("language", LANGUAGES)
def test_numbers_in_tooltips_are_the_same_in_every_language(language):
    """A translation that lost or changed a number would mislead."""
    for node, entry in locale("en").items():
        other = locale(language)[node]
        for part in ("inputs", "outputs"):
            for key, texts in entry[part].items():
                assert _numbers(other[part][key]["tooltip"]) >= _numbers(texts["tooltip"]), f"{language}: {node}.{key}"


def _numbers(text):
    return set(re.findall(r"\d[\d.]*\d|\d\d", text))  # of two digits and more: 'first' may be written 1


def test_help_stays_inside_what_it_may_say():
    for path in (ROOT / "web" / "docs").glob("*.md"):
        text = path.read_text(encoding="utf-8")
        assert text.startswith("# TTT ") and "## Inputs" in text and "## Messages and what to do" in text
        assert "T5" not in without_encoder(text)
        for target in re.findall(r"\]\((?!https?://)([^)]+)\)", text):
            assert (path.parent / target).is_file(), f"{path.name}: {target} is not there"
        for name in re.findall(r"Workflows?: (.+)\.$", text, re.M):
            for workflow in re.findall(r"`(\w+)`", name):
                assert (ROOT / "workflows" / f"{workflow}.json").is_file()
