"""Demo only: prompt and look at the tiny digits model, which has no text encoders and no VAE."""

from comfy_api.latest import io

from ..demo import digits
from .common import schema

CATEGORY = "TTT/demo"


class TTTDemoPrompt(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            node_id="TTTDemoPrompt",
            display_name="TTT Demo Prompt (digits)",
            category=CATEGORY,
            description="DEMO ONLY: the prompt of the tiny digits model that ships with SD3.5-TTT. For SD3.5 use CLIP Text Encode.",
            inputs=[io.String.Input("digit", default="3", tooltip="A digit from 0 to 9, or nothing for the empty (negative) prompt.")],
            outputs=[io.Conditioning.Output("conditioning", display_name="CONDITIONING", tooltip="Prompt of the tiny digits model.")],
        )

    @classmethod
    def execute(cls, digit):
        context, pooled = digits.encode_prompt(digit)
        return io.NodeOutput([[context, {"pooled_output": pooled}]])


class TTTDemoPicture(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            node_id="TTTDemoPicture",
            display_name="TTT Demo Picture (digits)",
            category=CATEGORY,
            description="DEMO ONLY: turns a latent of the tiny digits model into a grey picture, half as wide and high as the latent's nominal "
            "size. For SD3.5 use VAE Decode.",
            inputs=[io.Latent.Input("latent", tooltip="A latent sampled with the tiny digits model.")],
            outputs=[io.Image.Output("image", display_name="IMAGE", tooltip="Grey pictures.")],
        )

    @classmethod
    def execute(cls, latent):
        return io.NodeOutput(digits.samples_to_picture(latent["samples"]))
