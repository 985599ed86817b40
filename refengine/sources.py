"""Where a model comes from: a built-in name, a folder, a file, the hub. Floor 3."""
from __future__ import annotations

import os
import re
from importlib.resources import files
from pathlib import Path

from refengine.checkpoint import Checkpoint
from refengine.errors import CheckpointError
from refengine.folder_checkpoint import FolderCheckpoint

BUILT_IN = ("tiny", "tiny-hybrid", "small")


def open_checkpoint(source: str | os.PathLike) -> Checkpoint:
    """A Hugging Face folder, a .gguf file, a built-in name (BUILT_IN) or a hub id ("org/name"). Raises CheckpointError."""
    if source in BUILT_IN:
        return FolderCheckpoint(Path(str(files("refengine") / "data" / str(source))), str(source))
    path = Path(source)
    if path.is_dir():
        return FolderCheckpoint(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path}: not a folder and not a .gguf file; give the folder that holds config.json")
        from refengine.gguf_checkpoint import GGUFCheckpoint

        return GGUFCheckpoint(path)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)) and not str(source).startswith("."):
        return FolderCheckpoint(_download(str(source)), str(source))
    raise CheckpointError(f"{source}: no such folder or file, and not a hub id like Qwen/Qwen3-0.6B")


def _download(repo: str) -> Path:
    """The local snapshot of a hub repository, fetched when it is not there yet."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(repo, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except Exception as error:  # a dozen kinds, from four libraries
        raise CheckpointError(f"{repo}: no such folder here, and the hub did not give it ({type(error).__name__}: "
                              f"{str(error).splitlines()[0] if str(error) else 'no reason given'}). "
                              "Offline, give the path of a folder or a .gguf file") from error
