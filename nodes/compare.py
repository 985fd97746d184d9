"""TTT Compare: two MODELs sampled with the same settings, timed fairly."""

import torch
from comfy_api.latest import io

from ..ttt_core.hosts import comfy_sampling as sampling
from ..ttt_core.plots import comparison_chart
from .common import ADVANCED, result, schema


class TTTCompare(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        samplers, schedulers = sampling.sampler_names()
        return schema(
            node_id="TTTCompare",
            display_name="TTT Compare",
            search_aliases=["benchmark", "speed test", "softmax vs ttt"],
            description="Samples two models with the same seed and settings and measures seconds and memory: warm-up apart, runs interleaved, "
            "medians. Sampling happens inside this node, so nothing is served from the cache. Says so when TTT is not faster.",
            inputs=[
                io.Model.Input("model_a", tooltip="First model, usually the plain one (softmax)."),
                io.Model.Input("model_b", tooltip="Second model, usually the one with TTT layers."),
                io.Conditioning.Input("positive", tooltip="What the picture should show; used for both."),
                io.Conditioning.Input("negative", tooltip="What it should not show; used for both."),
                io.Latent.Input("latent", tooltip="The latent to start from, usually an Empty SD3 Latent Image; its size is the picture size."),
                io.String.Input("label_a", default="softmax", tooltip="Name of the first model in the chart and the table."),
                io.String.Input("label_b", default="TTT", tooltip="Name of the second model in the chart and the table."),
                io.Int.Input(
                    "seed", default=0, min=0, max=2**64 - 1, control_after_generate=True, tooltip="Seed of the noise, the same for both models."
                ),
                io.Int.Input("steps", default=20, min=1, max=1000, tooltip="Sampling steps of each run."),
                io.Float.Input("cfg", default=4.5, min=0.0, max=100.0, step=0.1, tooltip="Guidance scale; 1 samples without the negative prompt."),
                io.Combo.Input("sampler_name", options=samplers, default="euler", tooltip="Sampler, the same for both models."),
                io.Combo.Input("scheduler", options=schedulers, default="simple", tooltip="Noise schedule, the same for both models."),
                io.Int.Input("repeats", default=3, min=1, max=50, tooltip="Timed runs of each model; the median counts."),
                io.Int.Input(
                    "warmup",
                    default=1,
                    min=0,
                    max=10,
                    tooltip="Untimed runs of each model before the clock starts; 0 counts loading and compiling in.",
                    extra_dict=ADVANCED,
                ),
            ],
            outputs=[
                io.Latent.Output("latent_a", tooltip="What the first model sampled."),
                io.Latent.Output("latent_b", tooltip="What the second model sampled."),
                io.Image.Output("chart", tooltip="Seconds per step, total and memory of both."),
                io.Float.Output("speedup", tooltip="Total seconds of the first model over the second's; above 1 the second is faster."),
                io.String.Output("table", tooltip="The numbers as text."),
            ],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **_):
        return float("nan")  # never cached: a measurement served from the cache is none

    @classmethod
    def execute(
        cls, model_a, model_b, positive, negative, latent, label_a, label_b, seed, steps, cfg, sampler_name, scheduler, repeats=3, warmup=1
    ):
        settings = sampling.Settings(seed, steps, cfg, sampler_name, scheduler)
        outcome = sampling.compare_models(model_a, model_b, (label_a, label_b), settings, positive, negative, latent, repeats, warmup)
        latents = [{**latent, "samples": arm.latent} for arm in outcome.arms]
        chart = torch.from_numpy(comparison_chart(outcome))[None]
        return result(cls, *latents, chart, outcome.speedup, report=outcome.table())
