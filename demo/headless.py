"""A real ComfyUI started without a screen, with this pack as its only custom node; standard library only.

Used by the demo command and by the tests: start the server, queue a workflow in API format, wait, read what it made.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

PACK = Path(__file__).resolve().parent.parent
PACK_NAME = "sd35_ttt"
CHECKPOINT_FOLDERS = ("diffusion_models", "ttt", "loras", "checkpoints", "vae", "text_encoders")


class WorkflowError(RuntimeError):
    """ComfyUI refused or failed a workflow; the text carries what it said."""


def link_folder(link: Path, target: Path) -> None:
    """Makes `link` show `target`: a symbolic link, or a junction on Windows, which needs no rights."""
    if link.exists() or link.is_symlink():
        return
    if os.name == "nt":
        import _winapi

        _winapi.CreateJunction(str(target), str(link))
    else:
        link.symlink_to(target, target_is_directory=True)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class ComfyServer:
    """Context manager: ComfyUI at `root`, with `base` as its folder for models, input, output and custom nodes.

    The user's own ComfyUI folders and custom nodes are not touched. `arguments` go to ComfyUI's command line.
    """

    def __init__(self, root: Path, base: Path, arguments: tuple[str, ...] = (), python: str = sys.executable):
        self.root, self.base, self.python = Path(root), Path(base), python
        self.arguments, self.port = arguments, _free_port()
        self.log = self.base / "comfyui.log"

    def __enter__(self) -> ComfyServer:
        for folder in ("custom_nodes", "input", "output", "temp", "user", *(f"models/{n}" for n in CHECKPOINT_FOLDERS)):
            (self.base / folder).mkdir(parents=True, exist_ok=True)
        link_folder(self.base / "custom_nodes" / PACK_NAME, PACK)
        command = [self.python, str(self.root / "main.py"), "--base-directory", str(self.base), "--port", str(self.port)]
        command += ["--disable-auto-launch", "--database-url", "sqlite:///:memory:", *self.arguments]
        self._log_file = open(self.log, "w", encoding="utf-8")
        self.process = subprocess.Popen(command, cwd=self.base, stdout=self._log_file, stderr=subprocess.STDOUT)
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log_file.close()

    def _wait_until_ready(self, seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise WorkflowError(f"ComfyUI at {self.root} stopped while starting. Its last words:\n{self.tail()}")
            try:
                self.get("/system_stats")
                self._refuse_failed_import()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise WorkflowError(f"ComfyUI at {self.root} did not answer within {seconds:.0f} seconds. Its last words:\n{self.tail()}")

    def _refuse_failed_import(self) -> None:
        log = self.log.read_text(encoding="utf-8", errors="replace")
        if any("IMPORT FAILED" in line and PACK_NAME in line for line in log.splitlines()):
            start = log.find("Traceback")
            raise WorkflowError(f"ComfyUI at {self.root} could not load this pack:\n{log[max(start, 0) :][:3000]}")

    def tail(self, lines: int = 25) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    def get(self, path: str):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return json.loads(answer.read())

    def post(self, path: str, data: dict):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(data).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                body = answer.read()
        except urllib.error.HTTPError as e:
            raise WorkflowError(f"ComfyUI refused the workflow: {e.read().decode(errors='replace')}") from e
        return json.loads(body) if body else {}

    def queue(self, workflow: dict) -> str:
        """Queues a workflow in API format; returns its prompt id."""
        return self.post("/prompt", {"prompt": workflow})["prompt_id"]

    def wait(self, prompt_id: str, seconds: float = 1800, on_wait=None) -> dict:
        """Waits for a prompt; returns its history entry. Raises WorkflowError with the node's own words when it failed."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            history = self.get(f"/history/{prompt_id}")
            if prompt_id in history:
                entry = history[prompt_id]
                for kind, message in entry["status"]["messages"]:
                    if kind == "execution_error":
                        raise WorkflowError(f"{message['node_type']}: {message['exception_message'].strip()}")
                    if kind == "execution_interrupted":
                        raise WorkflowError("interrupted")
                return entry
            if self.process.poll() is not None:
                raise WorkflowError(f"ComfyUI stopped in the middle of the workflow. Its last words:\n{self.tail()}")
            if on_wait is not None:
                on_wait()
            time.sleep(0.5)
        raise WorkflowError(f"The workflow did not end within {seconds:.0f} seconds.")

    def run(self, workflow: dict, **kwargs) -> dict:
        """Queues and waits; returns {node id: {"images": [paths], "text": [...]}} of what the nodes showed or saved."""
        entry = self.wait(self.queue(workflow), **kwargs)
        shown = {}
        for node, output in entry["outputs"].items():
            images = [self.base / i["type"] / i["subfolder"] / i["filename"] for i in output.get("images", [])]
            shown[node] = {"images": images, "text": list(output.get("text", []))}
        return shown
