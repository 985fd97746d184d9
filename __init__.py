"""SD3.5-TTT: Test-Time Training layers for Stable Diffusion 3.5.

A ComfyUI custom node pack (found through `comfy_entrypoint`) and, installed with pip, the package `comfy_ttt`.
Importing it imports neither ComfyUI nor a GPU library.
"""

WEB_DIRECTORY = "./web"

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]


async def comfy_entrypoint():
    from .nodes import TTTExtension

    return TTTExtension()
