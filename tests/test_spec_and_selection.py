"""The recipe and the selection grammar, on the real models' tensor names, and what is refused in which words."""

from pathlib import Path

import pytest

from comfy_ttt.ttt_core import AttentionId, TTTError, TTTSpec, read_geometry, select_attentions
from comfy_ttt.ttt_core.select import describe

HERE = Path(__file__).parent


def model_shapes(name):
    rows = (HERE / "shapes" / f"{name}.tsv").read_text().splitlines()[1:]
    return {n: tuple(map(int, s.split("x"))) for n, s in (row.split("\t") for row in rows)}


MEDIUM, LARGE = model_shapes("sd35_medium"), model_shapes("sd35_large")


def test_geometry_of_the_real_models():
    medium, large = read_geometry(MEDIUM), read_geometry(LARGE)
    assert (medium.blocks, medium.self_blocks, medium.hidden, medium.heads, medium.head_dim) == (24, tuple(range(13)), 1536, 24, 64)
    assert (large.blocks, large.self_blocks, large.hidden, large.heads, large.head_dim) == (38, (), 2432, 38, 64)
    assert medium.name.startswith("SD3.5-Medium") and large.name.startswith("SD3.5-Large")
    assert len(medium.attentions) == 37


@pytest.mark.parametrize(
    "shapes, selection, expected",
    [
        (MEDIUM, "paper", "self:0-12 joint:19-23"),
        (MEDIUM, "self", "self:0-12"),
        (MEDIUM, "joint", "joint:0-23"),
        (MEDIUM, "all", "self:0-12 joint:0-23"),
        (MEDIUM, "none", "none"),
        (MEDIUM, " joint:19-23   self:0-12 ", "self:0-12 joint:19-23"),
        (MEDIUM, "self:3,1,2 joint:0,5-6,6", "self:1-3 joint:0,5-6"),
        (LARGE, "paper", "joint:19-37"),
        (LARGE, "all", "joint:0-37"),
    ],
)
def test_selection(shapes, selection, expected):
    chosen = select_attentions(shapes, selection)
    assert describe(chosen) == expected
    assert select_attentions(shapes, expected) == chosen


def test_paper_is_half_of_the_attentions_of_medium():
    chosen = select_attentions(MEDIUM, "paper")
    assert len(chosen) == 18 and chosen[0] == AttentionId("self", 0) and chosen[0].path == "joint_blocks.0.x_block.attn2"


def test_names_without_prefix_work_too():
    bare = [n.removeprefix("model.diffusion_model.") for n in MEDIUM]
    assert select_attentions(bare, "paper") == select_attentions(MEDIUM, "paper")


@pytest.mark.parametrize(
    "shapes, selection, words",
    [
        ({"input_blocks.1.1.attn1.to_q.weight": (320, 320)}, "paper", "not an MMDiT"),
        ({"double_blocks.0.img_attn.qkv.weight": (9216, 3072)}, "paper", "not an MMDiT"),
        (LARGE, "self", "Preset 'self'.*has none"),
        (MEDIUM, "self:0-13", "asks for self:13.*blocks 0 to 12"),
        (MEDIUM, "joint:24", "asks for joint:24.*blocks 0 to 23"),
        (LARGE, "self:0", "asks for self:0.*none"),
        (MEDIUM, "joint:5-3", "runs backwards; write '3-5'"),
        (MEDIUM, "self:0-", "Cannot read 'self:0-'"),
        (MEDIUM, "cross:1", "Cannot read 'cross:1'"),
        (MEDIUM, "papers", "Cannot read 'papers'"),
        (MEDIUM, "self:0, joint:1", "Cannot read 'self:0,'"),
        (MEDIUM, "self: 0", "Cannot read 'self:'"),
        (MEDIUM, "  ", "is empty"),
    ],
)
def test_bad_selections_get_one_sentence(shapes, selection, words):
    with pytest.raises(TTTError, match=words) as info:
        select_attentions(shapes, selection)
    assert "\n" not in str(info.value)


def test_incomplete_model_is_refused():
    shapes = {n: s for n, s in MEDIUM.items() if "joint_blocks.3." not in n}
    with pytest.raises(TTTError, match="some are missing"):
        read_geometry(shapes)


def test_spec_goes_through_json_and_is_frozen():
    spec = TTTSpec("self:0-3", "mlp2", "center", "none")
    assert TTTSpec.from_json(spec.to_json()) == spec
    with pytest.raises(AttributeError):
        spec.inner_model = "swiglu"


@pytest.mark.parametrize("field, value", [("inner_model", "mlp3"), ("key_norm", "batch"), ("locality", "cpe")])
def test_unknown_values_of_a_spec_are_refused(field, value):
    with pytest.raises(TTTError, match=f"TTT {field} '{value}' is not known; choose one of"):
        TTTSpec(**{field: value})


@pytest.mark.parametrize("text", ["{", "[]", '{"inner_mode": "swiglu"}', '"x"', '{"attentions": 3}'])
def test_text_that_is_no_spec_is_refused(text):
    with pytest.raises(TTTError):
        TTTSpec.from_json(text)
