"""Writes workflows/<name>.json (for the UI) and workflows/api/<name>.json (for the API) from one description each.

    python -m comfy_ttt.tools.build_workflows --comfyui ~/comfy/ComfyUI

The node list comes from that ComfyUI, started for the purpose; --node-list takes a saved /object_info instead.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from ..demo.headless import PACK, ComfyServer
from .workflow_graph import Graph

BASE, TINY_BASE, TINY_LAYERS = "sd3.5_medium.safetensors", "ttt_tiny_digits.safetensors", "ttt_tiny_digits_paper.safetensors"
ENCODERS = ("clip_g.safetensors", "clip_l.safetensors", "t5xxl_fp8_e4m3fn.safetensors")
CALIBRATED, CONVERTED = "sd35m_paper_00001.safetensors", "sd35m_ttt_00001_.safetensors"
PROMPT = "a photograph of a red fox sitting in tall grass at sunset, sharp focus, soft light"
GREEN, PURPLE, BROWN = "#6bbf7f", "#a98ae0", "#d0a860"

FILES = """## Files for this workflow
Into `models/checkpoints`:
- `sd3.5_medium.safetensors` from [stabilityai/stable-diffusion-3.5-medium](https://huggingface.co/stabilityai/stable-diffusion-3.5-medium) (accept the licence there)

Into `models/text_encoders`, from [Comfy-Org/stable-diffusion-3.5-fp8](https://huggingface.co/Comfy-Org/stable-diffusion-3.5-fp8/tree/main/text_encoders):
- `clip_g.safetensors`, `clip_l.safetensors`, `t5xxl_fp8_e4m3fn.safetensors`

These three are CLIP-G, CLIP-L and T5-XXL, the text encoders of SD3.5. **TTT** (Test-Time Training layers) is something else: it replaces attentions inside the image model."""


def loaders(graph: Graph):
    """Checkpoint and text encoders of SD3.5-Medium; (MODEL, CLIP, VAE)."""
    with graph.group("1  Model files", column=0, width=420):
        graph.note(FILES)
        checkpoint = graph.add("CheckpointLoaderSimple", "SD3.5-Medium", ckpt_name=BASE)
        clip = graph.add("TripleCLIPLoader", "Text encoders", clip_name1=ENCODERS[0], clip_name2=ENCODERS[1], clip_name3=ENCODERS[2])
    return checkpoint["MODEL"], clip["CLIP"], checkpoint["VAE"]


def prompts(graph: Graph, clip, size: int, column: int = 1):
    """(positive, negative, empty latent)."""
    with graph.group("2  Prompt and size", column=column, width=400, color=GREEN):
        positive = graph.add("CLIPTextEncode", "Prompt", text=PROMPT, clip=clip)
        negative = graph.add("CLIPTextEncode", "Negative prompt", text="blurry, deformed", clip=clip)
        latent = graph.add("EmptySD3LatentImage", "Picture size", width=size, height=size)
    return positive["CONDITIONING"], negative["CONDITIONING"], latent["LATENT"]


def quickstart_cpu(graph: Graph) -> None:
    with graph.group("Start here", column=0, width=400, color=BROWN):
        graph.note(
            "# SD3.5-TTT in two minutes\n"
            "Press **Run**. Nothing has to be downloaded and no GPU is needed: a very small model with the layout of SD3.5, trained on "
            "pictures of digits, ships with the pack.\n\n"
            "It is sampled twice with one seed: once as it is (**softmax**) and once with some attentions replaced by **TTT** layers "
            "(Test-Time Training), which were calibrated to it.\n\n"
            "**What to expect**\n"
            "- two pictures of the digit you ask for, much alike;\n"
            "- a chart of seconds and memory, and a sentence that says which of the two is faster **here**, or that the difference is noise. "
            "On a CPU softmax is slow, so TTT can win early; on a GPU the gain needs many more tokens.\n\n"
            "**Try**: another digit; another size (256 to 512); `sizes` = `128 256 384 512` in TTT Compare for a curve with the break-even point."
        )
    with graph.group("1  The tiny model, plain and with TTT", column=1, width=360):
        base = graph.add("UNETLoader", "Load the tiny digits model (demo)", unet_name=TINY_BASE, weight_dtype="default")
        ttt = graph.add("TTTLoadWeights", "Put its calibrated TTT layers on it", model=base["MODEL"], weights_name=TINY_LAYERS)
    with graph.group("2  Prompt and size", column=1, width=360, color=GREEN):
        positive = graph.add("TTTDemoPrompt", "Prompt (demo): a digit", digit="3")
        negative = graph.add("TTTDemoPrompt", "Negative prompt (demo): empty", digit="")
        latent = graph.add("EmptySD3LatentImage", "Picture size", width=512, height=512)
    with graph.group("3  Sample both and compare", column=2, width=460, color=PURPLE):
        compare = graph.add(
            "TTTCompare", "Softmax and TTT, same seed", model_a=base["MODEL"], model_b=ttt["MODEL"], positive=positive["CONDITIONING"],
            negative=negative["CONDITIONING"], latent=latent["LATENT"], steps=20, cfg=3.0,
        )  # fmt: skip
    with graph.group("4  Pictures", column=3, width=420):
        left = graph.add("TTTDemoPicture", "Softmax picture (demo)", latent=compare["latent_a"])
        right = graph.add("TTTDemoPicture", "TTT picture (demo)", latent=compare["latent_b"])
        both = graph.add(
            "ImageStitch", "Softmax left, TTT right", image1=left["IMAGE"], image2=right["IMAGE"], direction="right", match_image_size=True,
            spacing_width=8, spacing_color="white",
        )  # fmt: skip
        graph.add("SaveImage", "A/B picture", images=both["IMAGE"], filename_prefix="ttt_demo/softmax_left_ttt_right")
    with graph.group("5  Numbers", column=4, width=560, color=PURPLE):
        graph.add("SaveImage", "Chart", images=compare["chart"], filename_prefix="ttt_demo/chart")
        graph.add("PreviewAny", "Table", source=compare["table"])


def inspect_cpu(graph: Graph) -> None:
    with graph.group("Start here", column=0, width=400, color=BROWN):
        graph.note(
            "# Looking into the attentions\n"
            "Press **Run**. The tiny digits model that ships with the pack is sampled half-way, and its attentions are looked at there.\n\n"
            "- **key shift**: how far the keys lie to one side; pretrained models have much of it, and TTT minds it, so keys are centred.\n"
            "- **fit error**: how well each TTT layer does what its softmax attention did.\n"
            "- **change**: how much the model's prediction changes when only this attention is TTT. Leave the largest out if a picture suffers.\n"
            "- **maps**: what the output of one image token depends on, softmax above, TTT below.\n\n"
            "**For SD3.5**: put *Load Checkpoint*, *TTT Load Weights* and *CLIP Text Encode* in place of the three loaders here."
        )
    with graph.group("1  The tiny model with TTT", column=1, width=360):
        base = graph.add("UNETLoader", "Load the tiny digits model (demo)", unet_name=TINY_BASE, weight_dtype="default")
        ttt = graph.add("TTTLoadWeights", "Put its calibrated TTT layers on it", model=base["MODEL"], weights_name=TINY_LAYERS)
        positive = graph.add("TTTDemoPrompt", "Prompt (demo): a digit", digit="3")
        latent = graph.add("EmptySD3LatentImage", "Picture size", width=512, height=512)
    with graph.group("2  Inspect", column=2, width=460, color=PURPLE):
        look = graph.add("TTTInspect", model=ttt["MODEL"], positive=positive["CONDITIONING"], latent=latent["LATENT"])
    with graph.group("3  Results", column=3, width=620, color=GREEN):
        graph.add("PreviewImage", "What one token depends on", images=look["attention_maps"], extra=420)
        graph.add("PreviewAny", "Table", source=look["report"])


def _softmax_vs_ttt(graph: Graph, size: int, sizes: str, expect: str) -> None:
    model, clip, vae = loaders(graph)
    positive, negative, latent = prompts(graph, clip, size)
    with graph.group("3  The TTT branch", column=1, width=400, color=PURPLE):
        graph.note(
            "`sd35m_paper_00001` is what the workflow **calibrate_and_save** writes into `models/ttt`.\n\n"
            "**No such file yet?** Speed does not depend on the weights: bypass *TTT Load Weights* (select it, Ctrl+B) and switch "
            "*TTT Linearize* on (the same keys). Its layers are untrained: right times, poor picture."
        )
        new = graph.add("TTTLinearize", "New, untrained TTT layers", bypassed=True, model=model)
        ttt = graph.add("TTTLoadWeights", "Calibrated TTT layers", model=new["MODEL"], weights_name=CALIBRATED)
    with graph.group("4  Sample both and compare", column=2, width=480, color=PURPLE):
        graph.note(expect)
        compare = graph.add(
            "TTTCompare", "Softmax and TTT, same seed", model_a=model, model_b=ttt["MODEL"], positive=positive, negative=negative, latent=latent,
            vae=vae, steps=28, cfg=4.5, sizes=sizes,
        )  # fmt: skip
    with graph.group("5  Pictures", column=3, width=520, color=GREEN):
        for letter, label in (("a", "softmax"), ("b", "TTT")):
            picture = graph.add("VAEDecode", f"Decode {label}", samples=compare[f"latent_{letter}"], vae=vae)
            graph.add("SaveImage", f"{label} picture", images=picture["IMAGE"], filename_prefix=f"ttt_compare/{label}_{size}")
    with graph.group("6  Comparison", column=4, width=620):
        graph.add("SaveImage", "Chart", images=compare["chart"], filename_prefix=f"ttt_compare/chart_{size}")
        graph.add("PreviewImage", "Side by side", images=compare["side_by_side"])
        graph.add("PreviewImage", "Difference", images=compare["difference"])
        graph.add("PreviewAny", "Table", source=compare["table"])


def softmax_vs_ttt_1024(graph: Graph) -> None:
    _softmax_vs_ttt(
        graph, 1024, "",
        "## 1024 x 1024: 4,096 image tokens\n"
        "Each model runs 1 + 3 times with 28 steps. The paper (arXiv 2605.02772) reports 25 s with softmax and 19 s with TTT on an H20 GPU, "
        "1.32x; your GPU, attention backend and settings give other numbers, and the table says so when TTT is not faster.",
    )  # fmt: skip


def softmax_vs_ttt_2048(graph: Graph) -> None:
    _softmax_vs_ttt(
        graph, 2048, "1024 1536 2048",
        "## 1024 to 2048: 4,096 to 16,384 image tokens\n"
        "`sizes` runs three sizes one after the other; the chart shows curves and the break-even. The paper reports 231 s and 157 s at "
        "2048 x 2048 on an H20 GPU, 1.47x.\n\n"
        "This takes long: 2 models x 4 runs x 3 sizes. For a first look set `steps` to 4 and `repeats` to 1. SD3.5-Medium was made for up "
        "to about 2 megapixels; at 2048 look at the time, less at the picture.",
    )  # fmt: skip


def load_converted(graph: Graph) -> None:
    with graph.group("1  Model files", column=0, width=420):
        graph.note(
            FILES + "\n\n`sd35m_ttt_00001_.safetensors` is a **converted model**: SD3.5-Medium with its TTT layers in one file, as *Save Model* "
            "writes it in the workflow **calibrate_and_save** (into `output/diffusion_models`). Load it with *TTT Load Model*: ComfyUI's own "
            "loader drops the TTT layers with only a line in the log."
        )
        model = graph.add("TTTLoadModel", "Converted model", model_name=CONVERTED)
        checkpoint = graph.add("CheckpointLoaderSimple", "For its VAE only", ckpt_name=BASE)
        clip = graph.add("TripleCLIPLoader", "Text encoders", clip_name1=ENCODERS[0], clip_name2=ENCODERS[1], clip_name3=ENCODERS[2])
    positive, negative, latent = prompts(graph, clip["CLIP"], 1024)
    with graph.group("3  Sample", column=2, width=420, color=PURPLE):
        graph.note("From here on it is an ordinary SD3.5 graph: LoRA, ControlNet, skip-layer guidance and other samplers work as always.")
        sampled = graph.add(
            "KSampler", model=model["MODEL"], steps=28, cfg=4.5, sampler_name="euler", scheduler="simple", positive=positive, negative=negative,
            latent_image=latent, seed=0,
        )  # fmt: skip
        picture = graph.add("VAEDecode", samples=sampled["LATENT"], vae=checkpoint["VAE"])
        graph.add("PreviewAny", "What was loaded", source=model["report"])
    with graph.group("4  Picture", column=3, width=520, color=GREEN):
        graph.add("SaveImage", images=picture["IMAGE"], filename_prefix="ttt_converted", extra=460)


def calibrate_and_save(graph: Graph) -> None:
    model, clip, vae = loaders(graph)
    texts = (PROMPT, "a portrait of an old fisherman, oil painting", "a street in a rainy city at night, neon signs", "a bowl of fruit on a wooden table")
    with graph.group("2  Prompts to calibrate on", column=1, width=400, color=GREEN):
        graph.note("The prompts take turns. Use ones like those you will sample with; four are a start, more are better. Memory does not grow with them.")
        entries = [graph.add("CLIPTextEncode", f"Prompt {i + 1}", text=t, clip=clip)["CONDITIONING"] for i, t in enumerate(texts)]
        negative = graph.add("CLIPTextEncode", "Negative prompt", text="", clip=clip)["CONDITIONING"]
    with graph.group("3  New layers, size, prompts in turn", column=2, width=360, color=PURPLE):
        new = graph.add("TTTLinearize", "New, untrained TTT layers", model=model)
        latent = graph.add("EmptySD3LatentImage", "Size to calibrate at", width=1024, height=1024)["LATENT"]
        combined = entries[0]
        for entry in entries[1:]:
            combined = graph.add("ConditioningCombine", conditioning_1=combined, conditioning_2=entry)["CONDITIONING"]
    with graph.group("4  Calibrate", column=3, width=420, color=PURPLE):
        graph.note(
            "Each TTT layer is fitted to the softmax attention it replaces. No gradient passes through the big model, so this needs about the "
            "memory of sampling.\n\nWritten when done: `models/ttt/sd35m_paper_00001.safetensors` (small, for *TTT Load Weights*)."
        )
        fitted = graph.add("TTTCalibrate", model=new["MODEL"], positive=combined, latent=latent, negative=negative, filename="sd35m_paper")
    with graph.group("5  Save the whole model (optional)", column=4, width=460):
        graph.note(
            "*Save Model* writes the base with its TTT layers as one file into `output/diffusion_models`, for *TTT Load Model* (workflow "
            "**load_converted**). It is as large as the base; remove the node if the small file is enough. A converted SD3.5 model stays under "
            "the Stability AI Community License."
        )
        graph.add("ModelSave", model=fitted["MODEL"], filename_prefix="diffusion_models/sd35m_ttt")
        graph.add("PreviewAny", "What was done", source=fitted["report"])
    with graph.group("6  Look at the result", column=5, width=560, color=GREEN):
        compare = graph.add(
            "TTTCompare", "Same seed, one run each", model_a=model, model_b=fitted["MODEL"], positive=entries[0], negative=negative, latent=latent, vae=vae,
            label_b="TTT, calibrated", steps=28, cfg=4.5, repeats=1, warmup=0,
        )  # fmt: skip
        graph.add("PreviewImage", "Softmax and TTT", images=compare["side_by_side"])
        graph.add("PreviewImage", "Error while fitting", images=fitted["curve"])


def fine_tune(graph: Graph) -> None:
    model, clip, vae = loaders(graph)
    with graph.group("2  Training pictures", column=1, width=420, color=GREEN):
        graph.note(
            "Make the folder `input/sd35_training` with pictures of one size (1024 x 1024 is what the paper used) and, beside each, a text file "
            "of the same name with its caption (`fox.png`, `fox.txt`). Restart or press R, and choose the folder.\n\n"
            "These two nodes come with ComfyUI 0.8 and newer."
        )
        pictures = graph.add("LoadImageTextDataSetFromFolder", "Pictures and captions", folder="sd35_training")
        data = graph.add("MakeTrainingDataset", "Encode them", images=pictures["images"], texts=pictures["texts"], vae=vae, clip=clip)
        empty = graph.add("CLIPTextEncode", "Empty prompt, for dropped captions", text="", clip=clip)
    with graph.group("3  Start from calibrated layers", column=2, width=400, color=PURPLE):
        graph.note(
            "`sd35m_paper_00001` is what the workflow **calibrate_and_save** writes. Fine-tuning from there starts much nearer than from new "
            "layers."
        )
        ttt = graph.add("TTTLoadWeights", "Calibrated TTT layers", model=model, weights_name=CALIBRATED)
        graph.note(
            "`train`: **ttt** trains only the new layers (least memory), **attention** also q, k, v, o of the replaced attentions, **full** "
            "everything, as the paper did (3000 steps, batch 64).\n\nCancel when you like: the state is kept in `output/ttt_training`, and the "
            "same file name goes on from it."
        )
    with graph.group("4  Fine-tune", column=3, width=440, color=PURPLE):
        tuned = graph.add(
            "TTTFineTune", model=ttt["MODEL"], latents=data["latents"], positive=data["conditioning"], negative=empty["CONDITIONING"], vae=vae,
            filename="sd35m_tuned", sample_every=50,
        )  # fmt: skip
    with graph.group("5  Loss and samples", column=4, width=520):
        graph.add("PreviewImage", "Last samples", images=tuned["picture"])
        graph.add("PreviewAny", "What was done", source=tuned["report"])


WORKFLOWS = (quickstart_cpu, inspect_cpu, softmax_vs_ttt_1024, softmax_vs_ttt_2048, calibrate_and_save, fine_tune, load_converted)


def build(node_list: dict, out: Path) -> list[Path]:
    """Writes every workflow in both formats below `out`; the paths."""
    written = []
    for describe in WORKFLOWS:
        graph = Graph(describe.__name__, node_list)
        describe(graph)
        for folder, data in ((out, graph.to_ui()), (out / "api", graph.to_api())):
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{graph.name}.json"
            path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            written.append(path)
    return written


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--comfyui", type=Path, help="a ComfyUI whose requirements are installed")
    source.add_argument("--node-list", type=Path, help="a saved answer of /object_info")
    parser.add_argument("--out", type=Path, default=PACK / "workflows")
    options = parser.parse_args(argv)
    if options.node_list:
        node_list = json.loads(options.node_list.read_text(encoding="utf-8"))
    else:
        with tempfile.TemporaryDirectory() as base, ComfyServer(options.comfyui, Path(base), ("--cpu",)) as server:
            node_list = server.get("/object_info")
    for path in build(node_list, options.out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
