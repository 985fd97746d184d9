"""The nodes: each a V3 schema and one call into ttt_core. Imported by ComfyUI only (through comfy_entrypoint)."""

from pathlib import Path

from comfy_api.latest import ComfyExtension, io

from ..ttt_core.hosts.comfy_files import register_folders
from .calibrate import TTTCalibrate
from .compare import TTTCompare
from .demo import TTTDemoPicture, TTTDemoPrompt
from .finetune import TTTFineTune
from .inspect import TTTInspect
from .linearize import TTTLinearize
from .load import TTTLoadModel, TTTLoadWeights
from .save import TTTSaveWeights

NODES: list[type[io.ComfyNode]] = [
    TTTLinearize,
    TTTLoadModel,
    TTTLoadWeights,
    TTTSaveWeights,
    TTTCalibrate,
    TTTFineTune,
    TTTCompare,
    TTTInspect,
    TTTDemoPrompt,
    TTTDemoPicture,
]


class TTTExtension(ComfyExtension):
    def __init__(self):
        # Here and not later: the loaders' lists are read as soon as the nodes are known.
        register_folders(Path(__file__).resolve().parent.parent / "demo")

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES
