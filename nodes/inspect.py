"""TTT Inspect: which attentions suit TTT, how well each layer fits, and what a token looks at."""

import torch
from comfy_api.latest import io, ui

from ..ttt_core.hosts import comfy_inspect
from ..ttt_core.inspect import InspectSettings
from ..ttt_core.inspect_plots import inspection_chart, inspection_maps
from .common import report_output, say_on, schema


class TTTInspect(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            node_id="TTTInspect",
            display_name="TTT Inspect",
            search_aliases=["attention map", "key shift", "analyse attention"],
            description="Looks into the attentions of a model in the middle of a sampling run: key shift of each, how well each TTT layer fits the "
            "softmax it replaces, how much the prediction changes when only that one is replaced, and what a chosen token depends on. "
            "Samples nothing to the end and changes nothing.",
            inputs=[
                io.Model.Input("model", tooltip="A model with TTT layers, or a plain SD3.5 one (then only key shift and softmax's maps)."),
                io.Conditioning.Input("positive", tooltip="The prompt of the run; its first entry is used."),
                io.Latent.Input("latent", tooltip="Its size is the picture size to look at. The content does not matter."),
                io.Int.Input("steps", default=8, min=1, max=100, tooltip="Steps of the run (Euler, no guidance). Only those up to the place looked at are computed."),
                io.Float.Input("at", default=0.5, min=0.0, max=1.0, step=0.05, tooltip="Place in the run to look at: 0 pure noise, 1 the last step."),
                io.Float.Input("token_right", default=0.5, min=0.0, max=1.0, step=0.05, tooltip="The token to look from: 0 left edge, 1 right edge of the picture."),
                io.Float.Input("token_down", default=0.5, min=0.0, max=1.0, step=0.05, tooltip="The token to look from: 0 top edge, 1 bottom edge of the picture."),
                io.String.Input(
                    "maps",
                    default="",
                    tooltip="Attentions to draw, at most 6, such as: self:0,6,12 joint:23. Empty: up to four of those that are TTT.",
                ),
                io.Boolean.Input(
                    "importance",
                    default=True,
                    tooltip="Try every TTT layer alone: one model call for each. Off: no column 'change', and less time.",
                ),
                io.Int.Input(
                    "seed", default=0, min=0, max=2**31 - 1, control_after_generate=False, tooltip="Seed of the starting noise."
                ),
            ],
            advanced=["seed"],
            outputs=[
                io.Image.Output("chart", tooltip="Key shift, fit error and change of the prediction of every attention."),
                io.Image.Output("attention_maps", tooltip="What the chosen token depends on: softmax above, TTT below."),
                report_output(),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, model, positive, latent, steps=8, at=0.5, token_right=0.5, token_down=0.5, maps="", importance=True, seed=0):
        settings = InspectSettings(steps, at, (token_down, token_right), maps, importance, seed)
        found = comfy_inspect.inspect(model, positive, latent, settings)
        chart, drawn = (torch.from_numpy(p)[None] for p in (inspection_chart(found), inspection_maps(found)))
        say_on(cls)(found.text())
        shown = {**ui.PreviewText(found.text()).as_dict(), **ui.PreviewImage(chart).as_dict()}
        return io.NodeOutput(chart, drawn, found.text(), ui=shown)
