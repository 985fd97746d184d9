"""TTT Linearize: MODEL -> MODEL with new TTT layers."""

from comfy_api.latest import io

from ..ttt_core import TTTSpec
from ..ttt_core.hosts import comfy as host
from ..ttt_core.report import describe_weights
from ..ttt_core.spec import INNER_MODELS, KEY_NORMS, LOCALITIES
from .common import backend_input, report_output, result, schema


class TTTLinearize(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            node_id="TTTLinearize",
            display_name="TTT Linearize",
            search_aliases=["linear attention", "test-time training", "sd3.5 faster", "high resolution"],
            description="Replaces chosen softmax attentions of SD3.5 by TTT layers of linear cost. The connected MODEL stays as it is. "
            "The new layers are UNTRAINED: the picture is poor until they are calibrated, fine-tuned or loaded.",
            inputs=[
                io.Model.Input("model", tooltip="An SD3.5 model (Medium, Large or a fine-tune). It is not changed."),
                io.String.Input(
                    "attentions",
                    default="paper",
                    tooltip="Which attentions to replace. paper: all image self-attentions and the last 5 of 24 joint ones (18 of 37 in "
                    "SD3.5-Medium). self: the 13 image self-attentions. joint, all, none. Or a list such as: self:0-12 joint:19-23",
                ),
                io.Combo.Input(
                    "inner_model",
                    options=list(INNER_MODELS),
                    default="swiglu",
                    tooltip="swiglu: the paper's for SD3.5, 3 matrices a head. mlp2: the paper's for class-conditional DiT, 2 matrices a head.",
                ),
                io.Combo.Input(
                    "key_norm",
                    options=list(KEY_NORMS),
                    default="instance",
                    tooltip="instance: keys centred and scaled over the tokens, as in the paper. The others are for study; without centring "
                    "training can diverge.",
                ),
                io.Combo.Input(
                    "locality",
                    options=list(LOCALITIES),
                    default="dwc_qk",
                    tooltip="dwc_qk: a depthwise 3x3 convolution on queries and keys, as in the paper. none: for study.",
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=2**31 - 1,
                    control_after_generate=False,  # the UI would draw new layers, and calibrate anew, at every run
                    tooltip="Seed of the new layers' starting weights (normal, standard deviation 0.02).",
                ),
                backend_input(),
            ],
            advanced=["inner_model", "key_norm", "locality", "seed"],
            outputs=[io.Model.Output("ttt_model", display_name="MODEL", tooltip="The same model with TTT layers."), report_output()],
        )

    @classmethod
    def execute(cls, model, attentions, inner_model="swiglu", key_norm="instance", locality="dwc_qk", seed=0, backend="auto"):
        spec = TTTSpec(attentions.strip(), inner_model, key_norm, locality)
        out = host.linearize(model, spec, seed, backend)
        return result(cls, out, report=describe_weights(host.attached(out).weights, backend))
