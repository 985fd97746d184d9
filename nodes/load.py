"""TTT Load Model (full converted file) and TTT Load Weights (small file onto a base)."""

from comfy_api.latest import io

from ..ttt_core import TTTWeights
from ..ttt_core.hosts import comfy as host
from ..ttt_core.hosts import comfy_files as files
from ..ttt_core.report import describe_weights
from .common import backend_input, report_output, result, schema


class TTTLoadModel(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            node_id="TTTLoadModel",
            display_name="TTT Load Model",
            search_aliases=["load converted model", "linearized model"],
            description="Loads a full SD3.5 model that was saved with its TTT layers (by Save Model behind a TTT model). Use this node and not "
            "Load Diffusion Model for such a file: the core loader drops the TTT layers with only a line in the log.",
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=files.list_files("diffusion_models"),
                    tooltip="A converted model in models/diffusion_models (or output/diffusion_models, where Save Model writes).",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=list(files.WEIGHT_DTYPES),
                    default="default",
                    tooltip="Type in which the base weights are kept: default, or an 8-bit one to save memory. TTT layers stay fp32.",
                ),
                backend_input(),
            ],
            advanced=["weight_dtype"],
            outputs=[io.Model.Output("ttt_model", display_name="MODEL", tooltip="The converted model."), report_output()],
        )

    @classmethod
    def execute(cls, model_name, weight_dtype="default", backend="auto"):
        path = files.find_file(model_name, "diffusion_models")
        model, weights = files.load_full_model(path, weight_dtype, backend)
        return result(cls, model, report=describe_weights(weights, backend))


class TTTLoadWeights(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            node_id="TTTLoadWeights",
            display_name="TTT Load Weights",
            search_aliases=["load ttt", "ttt layers"],
            description="Puts trained TTT layers from a small file onto the base model they were made for. The connected MODEL stays as it is.",
            inputs=[
                io.Model.Input("model", tooltip="The base model the file was made for. It is not changed."),
                io.Combo.Input("weights_name", options=files.list_files(), tooltip="A TTT file in models/ttt."),
                backend_input(),
            ],
            outputs=[io.Model.Output("ttt_model", display_name="MODEL", tooltip="The base with the file's TTT layers."), report_output()],
        )

    @classmethod
    def execute(cls, model, weights_name, backend="auto"):
        weights = TTTWeights.load(files.find_file(weights_name))
        out, warning = host.apply_weights(model, weights, weights_name, backend)
        return result(cls, out, report=describe_weights(weights, backend, warning))
