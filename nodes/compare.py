"""TTT Compare: up to four MODELs sampled with the same settings, timed fairly, at one size or several."""

import torch
from comfy_api.latest import io, ui
from comfy_execution.graph_utils import ExecutionBlocker

from ..ttt_core.hosts import comfy_sampling as sampling
from ..ttt_core.pictures import message, side_by_side
from ..ttt_core.plots import difference_map, series_chart
from .common import say_on, schema

NO_VAE = "No VAE is connected to TTT Compare, so there is no picture here. Connect one, or decode the latents."


class TTTCompare(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        samplers, schedulers = sampling.sampler_names()
        return schema(
            node_id="TTTCompare",
            display_name="TTT Compare",
            search_aliases=["benchmark", "speed test", "softmax vs ttt"],
            description="Samples two to four models with the same seed and settings and measures seconds and memory: all loaded first, warm-up "
            "apart, runs interleaved, medians. Sampling happens inside this node, so nothing is served from the cache. Says so when TTT is "
            "not faster, and why. Writes the numbers to output/ttt_compare.",
            inputs=[
                io.Model.Input("model_a", tooltip="First model, usually the plain one (softmax); speed-ups are relative to it."),
                io.Model.Input("model_b", tooltip="Second model, usually the one with TTT layers."),
                io.Conditioning.Input("positive", tooltip="What the picture should show; used for every model."),
                io.Conditioning.Input("negative", tooltip="What it should not show; used for every model."),
                io.Latent.Input("latent", tooltip="The latent to start from, usually an Empty SD3 Latent Image; its size is the picture size."),
                io.String.Input("label_a", default="softmax", tooltip="Name of the first model in the chart and the table."),
                io.String.Input("label_b", default="TTT", tooltip="Name of the second model in the chart and the table."),
                io.Int.Input(
                    "seed", default=0, min=0, max=2**64 - 1, control_after_generate=True, tooltip="Seed of the noise, the same for every model."
                ),
                io.Int.Input("steps", default=20, min=1, max=1000, tooltip="Sampling steps of each run."),
                io.Float.Input("cfg", default=4.5, min=0.0, max=100.0, step=0.1, tooltip="Guidance scale; 1 samples without the negative prompt."),
                io.Combo.Input("sampler_name", options=samplers, default="euler", tooltip="Sampler, the same for every model."),
                io.Combo.Input("scheduler", options=schedulers, default="simple", tooltip="Noise schedule, the same for every model."),
                io.Int.Input("repeats", default=3, min=1, max=50, tooltip="Timed runs of each model and size; the median counts. 3 or more show the noise."),
                io.Int.Input(
                    "warmup",
                    default=1,
                    min=0,
                    max=10,
                    tooltip="Untimed runs of each model and size before the clock starts; 0 counts loading and compiling in.",
                ),
                io.Model.Input("model_c", optional=True, tooltip="A third model, for example softmax with another attention backend."),
                io.Model.Input("model_d", optional=True, tooltip="A fourth model; each arm costs as many runs as the others."),
                io.Vae.Input("vae", optional=True, tooltip="Decodes the results for side_by_side and difference; not timed. Without it the difference is that of the latents."),
                io.String.Input("label_c", default="third", optional=True, tooltip="Name of the third model in the chart and the table."),
                io.String.Input("label_d", default="fourth", optional=True, tooltip="Name of the fourth model in the chart and the table."),
                io.String.Input(
                    "sizes",
                    default="",
                    optional=True,
                    tooltip="Sizes in pixels to measure one after the other, multiples of 16, such as: 512 768 1024x1536. Empty: the latent's "
                    "size. With several, the chart shows curves and the break-even point, and the latents are those of the last size.",
                ),
            ],
            advanced=["warmup", "label_c", "label_d"],
            outputs=[
                io.Latent.Output("latent_a", tooltip="What the first model sampled."),
                io.Latent.Output("latent_b", tooltip="What the second model sampled."),
                io.Image.Output("chart", tooltip="Seconds per step, total and memory; with several sizes as curves over tokens."),
                io.Float.Output("speedup", tooltip="Total seconds of the first model over the second's; above 1 the second is faster."),
                io.String.Output("table", tooltip="The numbers as text."),
                io.Image.Output("side_by_side", tooltip="The first picture of each model under its label; needs the VAE."),
                io.Image.Output("difference", tooltip="Absolute difference to the first model's picture, as a heat map; of the latents without a VAE."),
                io.Latent.Output("latent_c", tooltip="What the third model sampled; nothing runs behind it when there is none."),
                io.Latent.Output("latent_d", tooltip="What the fourth model sampled; nothing runs behind it when there is none."),
                io.Float.Output("seconds_a", tooltip="Median seconds of a whole run of the first model, at the last size."),
                io.Float.Output("seconds_b", tooltip="Median seconds of a whole run of the second model, at the last size."),
                io.Float.Output("break_even", tooltip="Image tokens from which the second model is as fast as the first; 0 when the sizes do not show it."),
            ],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **_):
        return float("nan")  # never cached: a measurement served from the cache is none

    @classmethod
    def execute(
        cls, model_a, model_b, positive, negative, latent, label_a, label_b, seed, steps, cfg, sampler_name, scheduler, repeats=3, warmup=1,
        model_c=None, model_d=None, vae=None, label_c="third", label_d="fourth", sizes="",
    ):  # fmt: skip
        arms = (("a", label_a, model_a), ("b", label_b, model_b), ("c", label_c, model_c), ("d", label_d, model_d))
        arms = [(letter, label.strip() or letter, model) for letter, label, model in arms if model is not None]
        settings = sampling.Settings(seed, steps, cfg, sampler_name, scheduler)
        series = sampling.compare_models(
            [a[1:] for a in arms], settings, positive, negative, latent, sizes=sizes, repeats=repeats, warmup=warmup, say=say_on(cls)
        )
        series.notes.append(_save(series))
        results = series.last.arms
        latents = {letter: {**latent, "samples": r.latent} for (letter, *_), r in zip(arms, results, strict=True)}
        c, d = (latents.get(letter, ExecutionBlocker(None)) for letter in "cd")
        chart, table = _image(series_chart(series)), series.table()
        pictures, difference = (_image(p) for p in _pictures(results, vae))
        say_on(cls)(series.verdict())
        shown = {**ui.PreviewText(table).as_dict(), **ui.PreviewImage(chart).as_dict()}
        numbers = results[0].total, results[1].total, series.break_even() or 0.0
        return io.NodeOutput(
            latents["a"], latents["b"], chart, series.last.speedup, table, pictures, difference, c, d, *numbers, ui=shown
        )


def _save(series) -> str:
    """Where the numbers are, or why they could not be written: a measurement is shown all the same."""
    try:
        return "numbers: " + " and ".join(f"{p.parent.name}/{p.name}" for p in series.save(sampling.results_folder())) + " in the output folder"
    except OSError as e:
        return f"numbers could not be written to {sampling.results_folder()}: {e.strerror or e}"


def _pictures(results, vae):
    """(side by side, difference) of the first picture of each model."""
    labels = [r.label for r in results]
    if vae is None:
        fields = [r.latent[0].float().cpu().movedim(0, -1).numpy() for r in results]
        return message(NO_VAE), difference_map(fields[0], fields[1:], labels, "latent values")
    decoded = [vae.decode(r.latent[:1])[0].float().cpu().numpy() for r in results]
    return side_by_side(decoded, labels), difference_map(decoded[0], decoded[1:], labels, "pixel values, 0 to 1")


def _image(picture) -> torch.Tensor:
    return torch.from_numpy(picture)[None]
