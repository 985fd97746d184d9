"""What every node shares: a schema that older ComfyUI accepts too, common inputs, and text shown on the node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from comfy_api.latest import io, ui

CATEGORY = "TTT"
BACKENDS = ["auto", "triton", "torch"]


def schema(inputs: list[io.Input], advanced: Sequence[str] = (), **values) -> io.Schema:
    """io.Schema without the fields this ComfyUI does not know yet (search_aliases, for one).

    advanced: ids of rarely used inputs, folded away where the host can; a backend input always is.
    """
    for item in inputs:
        if item.id in (*advanced, "backend"):
            # Not by an argument: older ComfyUI has none. It ignores the key.
            item.extra_dict = {**(item.extra_dict or {}), "advanced": True}
    known = {f.name for f in fields(io.Schema)}
    values.setdefault("category", CATEGORY)
    return io.Schema(inputs=inputs, hidden=[io.Hidden.unique_id], **{k: v for k, v in values.items() if k in known})


def backend_input() -> io.Combo.Input:
    return io.Combo.Input(
        "backend",
        options=BACKENDS,
        default="auto",
        tooltip="What computes the TTT layers. auto: the fastest one that can run here. triton: fused GPU kernels, refused with the reason "
        "where they cannot run. torch: plain PyTorch, runs everywhere, slower and with more memory.",
    )


def report_output() -> io.String.Output:
    return io.String.Output("report", tooltip="What was done, as text; connect Preview as Text to keep it in view.")


def say_on(node: type[io.ComfyNode]):
    """A function that shows a line of text on the running node; does nothing where there is no server to show it."""
    try:
        from server import PromptServer

        server, node_id = PromptServer.instance, node.hidden.unique_id
    except (ImportError, AttributeError):
        return lambda text: None  # a script or a test
    return lambda text: server.send_progress_text(text, node_id)


def result(node: type[io.ComfyNode], *outputs, report: str) -> io.NodeOutput:
    """The outputs followed by the report, which is also shown on the node itself."""
    say_on(node)(report)
    return io.NodeOutput(*outputs, report, ui=ui.PreviewText(report))
