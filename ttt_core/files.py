"""Writing and reading files so that nothing half-written is ever left and every failure is one sentence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import TTTError


@contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary path beside `path`; on success it is flushed to disk and renamed over `path`.

    On any failure the temporary file goes and an older `path` stays as it was. Raises TTTError when the folder
    cannot be made or written.
    """
    path = Path(path)
    temporary = _temporary(path)
    mode = temporary.stat().st_mode
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, mode)  # safetensors makes its files readable by the owner alone
        os.replace(temporary, path)
    except OSError as e:
        raise TTTError(f"Cannot write '{path}': {e.strerror or e}. Free some space or choose another folder, then save again.") from e
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: str | os.PathLike) -> None:
    """Raises TTTError when `path` could not be written: before hours of work, not after."""
    _temporary(Path(path)).unlink()


def _temporary(path: Path) -> Path:
    """A new empty file beside `path`, its folder made if need be."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
    except OSError as e:
        raise TTTError(f"Cannot write '{path}': {e.strerror or e}. Choose a folder that exists and can be written, then save again.") from e
    return temporary


def explain_unreadable(path: str | os.PathLike, error: Exception) -> TTTError:
    """Why a file is not a readable safetensors file, as a TTTError to raise."""
    path = Path(path)
    if not path.is_file():
        return TTTError(f"The file '{path}' does not exist; check the name or put the file there.")
    with open(path, "rb") as file:
        start = file.read(9)
    # A safetensors file starts with eight bytes of length and then "{"; the first of them may look like a pickle's.
    if start[8:9] != b"{" and (start[:4] == b"PK\x03\x04" or (start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"))):
        return TTTError(
            f"'{path.name}' is a Python pickle (a .ckpt or .pt file) named .safetensors; only real safetensors files are read, "
            "because a pickle can run code. Convert it to safetensors first."
        )
    size = path.stat().st_size
    return TTTError(f"'{path.name}' ({size:,} bytes) is truncated or not a safetensors file ({error}); download or save it again.")
