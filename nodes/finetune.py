"""TTT Fine-Tune: trains the TTT layers (and, if asked, base weights) of a MODEL on latents with their conditioning."""

from comfy_api.latest import io

from ..ttt_core.finetune import FineTuneSettings
from ..ttt_core.flow import TIMESTEPS
from ..ttt_core.hosts import comfy as host
from ..ttt_core.hosts import comfy_tuning as tuning
from ..ttt_core.optimizer import OPTIMIZERS
from ..ttt_core.report import describe_weights
from ..ttt_core.trainable import MODES
from .common import report_output, result, say_on, schema

DEFAULTS = FineTuneSettings()


class TTTFineTune(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            node_id="TTTFineTune",
            display_name="TTT Fine-Tune",
            search_aliases=["train ttt", "finetune", "rectified flow training"],
            description="Trains a linearized model with the rectified-flow loss on your own pictures. Calibrate first: it starts much nearer. "
            "Can be cancelled and resumed; the state is in output/ttt_training, the result in models/ttt. The connected MODEL stays as it is.",
            is_input_list=True,
            inputs=[
                io.Model.Input("model", tooltip="A model with TTT layers, best a calibrated one."),
                io.Latent.Input("latents", tooltip="Encoded pictures: one LATENT with a batch, or a list as ComfyUI's training dataset nodes give it."),
                io.Conditioning.Input("positive", tooltip="One conditioning for each picture, or a single one for all."),
                io.String.Input("filename", default="sd35_ttt_tuned", tooltip="Name of the small file in models/ttt and of the state of the run."),
                io.Int.Input("steps", default=DEFAULTS.steps, min=1, max=10_000_000, tooltip="Optimizer steps in all. The paper trained 3000 with batch 64."),
                io.Int.Input("batch_size", default=DEFAULTS.batch, min=1, max=4096, tooltip="Pictures of one size in each forward pass."),
                io.Int.Input("grad_accumulation_steps", default=1, min=1, max=4096, tooltip="Forward passes summed up for one step; effective batch = batch_size x this."),
                io.Float.Input("learning_rate", default=DEFAULTS.rate, min=0.0, max=1.0, step=1e-6, round=1e-8,
                               tooltip="Rate for base weights; new TTT layers get new_layer_factor times it."),
                io.Combo.Input("train", options=list(MODES), default=DEFAULTS.mode,
                               tooltip="ttt: only the new layers. attention: also q, k, v, o of the replaced attentions. full: everything."),
                io.Int.Input("seed", default=0, min=0, max=2**31 - 1, control_after_generate=False, tooltip="Seed of order, noise, noise levels and dropped prompts."),
                io.Boolean.Input("resume", default=True, tooltip="Go on from the state file of this name if there is one. Off: start anew and keep the old one aside."),
                io.Conditioning.Input("negative", optional=True, tooltip="The conditioning of an empty prompt, for dropped prompts; without it an all-zero one."),
                io.Vae.Input("vae", optional=True, tooltip="Decodes the sample pictures; without it they are shown in preview colours."),
                io.Int.Input("sample_every", default=0, min=0, max=1_000_000, optional=True,
                             tooltip="Steps between sample pictures (softmax beside TTT, same seed) in output/ttt_training. 0: none."),
                io.Int.Input("save_every", default=100, min=1, max=1_000_000, optional=True, tooltip="Steps between saves of the state file."),
                io.Float.Input("new_layer_factor", default=DEFAULTS.new_rate_factor, min=0.0, max=10_000.0, step=1.0, optional=True,
                               tooltip="How many times the learning rate new TTT layers get; 20 in the paper."),
                io.Float.Input("teacher_velocity", default=0.0, min=0.0, max=1000.0, step=0.1, optional=True,
                               tooltip="Weight of the distance to the original model's prediction; one more forward pass a step. 0: off."),
                io.Float.Input("teacher_attention", default=0.0, min=0.0, max=1000.0, step=0.1, optional=True,
                               tooltip="Weight of the distance to the original model's attention outputs; one more forward pass a step. 0: off."),
                io.Float.Input("ema", default=DEFAULTS.ema, min=0.0, max=0.9999, step=0.001, round=0.0001, optional=True,
                               tooltip="Decay of the averaged weights that are saved; 0: save the last ones."),
                io.Float.Input("prompt_dropout", default=DEFAULTS.drop, min=0.0, max=1.0, step=0.01, optional=True,
                               tooltip="Share of samples trained without their prompt, so that guidance keeps working."),
                io.Combo.Input("timesteps", options=list(TIMESTEPS), default=DEFAULTS.timesteps, optional=True,
                               tooltip="Which noise levels are trained most. logit_normal: SD3's choice."),
                io.Combo.Input("optimizer", options=list(OPTIMIZERS), default=DEFAULTS.optimizer, optional=True,
                               tooltip="adamw, or its 8-bit form, which needs a library that has it and saves memory in mode full."),
                io.Boolean.Input("gradient_checkpointing", default=True, optional=True,
                                 tooltip="Recompute each block in the backward pass: much less memory, about a third more time."),
            ],
            advanced=["save_every", "new_layer_factor", "teacher_velocity", "teacher_attention", "ema", "prompt_dropout", "timesteps", "optimizer", "gradient_checkpointing"],
            outputs=[
                io.Model.Output("ttt_model", display_name="MODEL", tooltip="The model with trained layers."),
                io.Custom("LOSS_MAP").Output("loss", tooltip="The losses, for ComfyUI's Loss Graph node."),
                io.Image.Output("picture", tooltip="The last sample pictures, or the loss curve when none were asked for."),
                report_output(),
            ],
            is_output_node=True,
        )  # fmt: skip

    @classmethod
    def execute(cls, model, latents, positive, filename, **options):
        value = {name: given[0] for name, given in options.items() if given}  # is_input_list: everything comes as a list
        settings = FineTuneSettings(
            mode=value["train"], steps=value["steps"], batch=value["batch_size"], accumulation=value["grad_accumulation_steps"],
            rate=value["learning_rate"], seed=value["seed"], new_rate_factor=value.get("new_layer_factor", DEFAULTS.new_rate_factor),
            teacher_velocity=value.get("teacher_velocity", 0.0), teacher_attention=value.get("teacher_attention", 0.0),
            ema=value.get("ema", DEFAULTS.ema), drop=value.get("prompt_dropout", DEFAULTS.drop),
            timesteps=value.get("timesteps", DEFAULTS.timesteps), optimizer=value.get("optimizer", DEFAULTS.optimizer),
            checkpointing=value.get("gradient_checkpointing", True),
        )  # fmt: skip
        out, run, path, picture = tuning.fine_tune_model(
            model[0], latents, positive, settings, negative=value.get("negative"), filename=filename[0], resume=value["resume"],
            save_every=value.get("save_every", 100), sample_every=value.get("sample_every", 0), vae=value.get("vae"), say=say_on(cls),
        )  # fmt: skip
        found = host.attached(out)
        report = f"Saved {path}\n{_what_was_done(run)}\nloss {run.losses[0]:.4f} at step 1, {run.losses[-1]:.4f} at step {run.done}\n"
        return result(cls, out, {"loss": run.losses}, picture, report=report + describe_weights(found.weights, found.backend))


def _what_was_done(run) -> str:
    if run.resumed and run.done == run.resumed:
        return f"already at step {run.done} of {run.settings.steps}: nothing was trained. Set more steps, turn resume off, or choose another filename."
    return f"trained steps {run.resumed + 1} to {run.done}" + (f", going on from the state of step {run.resumed}" if run.resumed else "")
