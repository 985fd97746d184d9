"""TTT Calibrate: fits the TTT layers of a MODEL to the softmax attentions they replace, in minutes."""

import torch
from comfy_api.latest import io

from ..ttt_core.calibrate import CalibrationSettings
from ..ttt_core.hosts import comfy as host
from ..ttt_core.hosts import comfy_tuning as tuning
from ..ttt_core.loss_curve import loss_curve
from ..ttt_core.report import describe_weights
from .common import report_output, result, say_on, schema

DEFAULTS = CalibrationSettings()


class TTTCalibrate(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            node_id="TTTCalibrate",
            display_name="TTT Calibrate",
            search_aliases=["calibration", "distill attention", "train ttt"],
            description="Fits each TTT layer to the softmax attention it replaces, on sampling runs of your prompts. No gradient passes through "
            "the model, so it runs in about the memory of sampling. The result is saved in models/ttt. The connected MODEL stays as it is.",
            inputs=[
                io.Model.Input("model", tooltip="A model with TTT layers, from TTT Linearize (new layers) or TTT Load Weights (to go on)."),
                io.Conditioning.Input("positive", tooltip="Prompts to sample while recording; combine several with Conditioning (Combine), they take turns."),
                io.Latent.Input("latent", tooltip="Its size is the picture size to calibrate at. The content does not matter."),
                io.String.Input("filename", default="sd35_ttt_calibrated", tooltip="Name of the small file in models/ttt; a number is added."),
                io.Int.Input("steps", default=DEFAULTS.steps, min=1, max=100_000, tooltip="Optimizer steps for each layer. 400 is the default; 150 gives a quick look."),
                io.Int.Input(
                    "samples", default=DEFAULTS.samples, min=8, max=100_000,
                    tooltip="Recorded samples of each attention, spread over prompts, sizes and noise levels.",
                ),
                io.Int.Input("seed", default=0, min=0, max=2**31 - 1, control_after_generate=False, tooltip="Seed of the sampling runs and of the order of the samples."),
                io.Conditioning.Input("negative", optional=True, tooltip="Negative prompt of the sampling runs; without it an all-zero one."),
                io.String.Input(
                    "sizes", default="", optional=True,
                    tooltip="Several picture sizes in pixels, such as 1024x1024 832x1216; layers fit the sizes they were calibrated at, so name all you sample. Empty: the latent's size.",
                ),
                io.Float.Input("learning_rate", default=DEFAULTS.rate, min=1e-6, max=1.0, step=1e-4, round=1e-6, optional=True,
                               tooltip="Adam's rate at the start; it falls to 0 along a cosine."),
                io.Float.Input("memory_gb", default=DEFAULTS.memory_gb, min=0.05, max=1024.0, step=0.5, optional=True,
                               tooltip="GiB of main memory for the recorded samples. With less, attentions take turns and sampling is repeated."),
                io.Int.Input("sampling_steps", default=DEFAULTS.sampling_steps, min=1, max=1000, optional=True,
                             tooltip="Steps of each sampling run that is recorded."),
                io.Float.Input("cfg", default=DEFAULTS.cfg, min=1.0, max=100.0, step=0.1, optional=True,
                               tooltip="Guidance scale of the sampling runs; use the one you sample with."),
            ],
            advanced=["sizes", "learning_rate", "memory_gb", "sampling_steps", "cfg"],
            outputs=[
                io.Model.Output("ttt_model", display_name="MODEL", tooltip="The model with fitted TTT layers."),
                io.Image.Output("curve", tooltip="Relative error along the steps, averaged over the attentions."),
                report_output(),
            ],
            is_output_node=True,
        )  # fmt: skip

    @classmethod
    def execute(
        cls, model, positive, latent, filename, steps=DEFAULTS.steps, samples=DEFAULTS.samples, seed=0, negative=None, sizes="",
        learning_rate=DEFAULTS.rate, memory_gb=DEFAULTS.memory_gb, sampling_steps=DEFAULTS.sampling_steps, cfg=DEFAULTS.cfg,
    ):  # fmt: skip
        settings = CalibrationSettings(
            steps=steps, rate=learning_rate, samples=samples, memory_gb=memory_gb, sampling_steps=sampling_steps, cfg=cfg, seed=seed
        )
        out, report, path = tuning.calibrate_model(
            model, positive, latent, settings, negative=negative, sizes=sizes, filename=filename, say=say_on(cls)
        )
        found = host.attached(out)
        curve = torch.from_numpy(loss_curve(report.losses, "relative error"))[None]
        return result(cls, out, curve, report=f"Saved {path}\n{report.text()}\n{describe_weights(found.weights, found.backend)}")
