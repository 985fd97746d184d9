"""TTT Save Weights: the TTT layers of a MODEL as a small file in models/ttt."""

from comfy_api.latest import io

from ..ttt_core.hosts import comfy as host
from ..ttt_core.hosts import comfy_files as files
from ..ttt_core.report import describe_weights
from .common import report_output, result, schema


class TTTSaveWeights(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            node_id="TTTSaveWeights",
            display_name="TTT Save Weights",
            search_aliases=["save ttt", "export ttt layers"],
            description="Writes only the TTT layers (and base tensors that fine-tuning changed) as a small safetensors file into models/ttt, "
            "for TTT Load Weights. Nothing is overwritten: a number is added to the name.",
            inputs=[
                io.Model.Input("model", tooltip="A model with TTT layers."),
                io.String.Input("filename", default="sd35_ttt", tooltip="Name of the file, without number or extension; subfolders are allowed."),
            ],
            outputs=[report_output()],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, model, filename):
        found = host.require_attached(model, "TTT Save Weights")
        path = found.weights.save(files.new_file(filename))
        report = f"Saved {path} ({path.stat().st_size / 2**20:.1f} MiB)\n{describe_weights(found.weights, found.backend)}"
        return result(cls, report=report)
