"""A Hugging Face folder: config.json, one or several safetensors files, tokenizer.json. Floor 3."""
from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np

from refengine.checkpoint import Checkpoint
from refengine.config import read_config
from refengine.config_reader import read_json
from refengine.errors import CheckpointError
from refengine.safetensors_file import SafetensorsFile
from refengine.tokenizer import Tokenizer, load_folder_tokenizer


class FolderCheckpoint(Checkpoint):
    """config.json, one or several safetensors files, tokenizer.json."""

    def __init__(self, folder: Path, source: str | None = None):
        self.folder, self.source = folder, source or str(folder)
        self.config = read_config(folder)
        self._files: dict[str, tuple[SafetensorsFile, str]] = {}  # by tensor: where it is, and its name there
        for file in self._open():
            for stored in file.entries:
                name = stored
                if self.config.delta:  # beside the text model may stand one that sees, and one that predicts further tokens
                    if stored.startswith(("model.visual.", "mtp.")):
                        continue
                    name = re.sub(r"^model\.language_model\.", "model.", stored)
                if name in self._files:
                    raise CheckpointError(f"{name} is in {self._files[name][0].path.name} and in {file.path.name}")
                self._files[name] = file, stored

    def _open(self) -> Iterator[SafetensorsFile]:
        index = self.folder / "model.safetensors.index.json"
        if not index.is_file():
            found = sorted(self.folder.glob("*.safetensors"))
            if len(found) != 1:
                names = ", ".join(path.name for path in found) or "none"
                raise CheckpointError(f"{self.folder}: one .safetensors file or {index.name} is needed; found {names}")
            yield SafetensorsFile(self._inside(found[0], found[0].name))
            return
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise CheckpointError(f"{index}: weight_map is not an object of file names")
        for shard in sorted(set(weight_map.values())):
            file = SafetensorsFile(self._inside(index, shard))
            listed = {name for name, where in weight_map.items() if where == shard}
            if listed != set(file.entries):
                raise CheckpointError(f"{index} and {shard} disagree on {', '.join(sorted(listed ^ set(file.entries))[:8])}")
            yield file

    def _inside(self, index: Path, shard: str) -> Path:
        """The path of a shard. A name that leads out of the folder is refused before anything is opened."""
        path = self.folder / shard
        if PurePosixPath(shard).name != shard or "\\" in shard or "\0" in shard or shard in ("", ".", ".."):
            raise CheckpointError(f"{index}: {shard!r} is not a plain file name")
        if not path.exists():
            raise CheckpointError(f"{index}: {shard} does not exist")
        roots = [self.folder.resolve()]
        if self.folder.parent.name == "snapshots":  # the hub's cache links snapshots to its own blobs
            roots.append(self.folder.parent.parent.resolve() / "blobs")
        if not any(path.resolve().is_relative_to(root) for root in roots):
            raise CheckpointError(f"{index}: {shard} is a link that leaves the folder")
        return path

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: file.entries[stored][1] for name, (file, stored) in self._files.items()}

    def raw(self, name: str) -> np.ndarray:
        file, stored = self._files[name]
        return file.raw(stored)

    def tensor(self, name: str, rows=slice(None)) -> np.ndarray:
        file, stored = self._files[name]
        return file.tensor(stored, rows)

    def _tokenizer(self) -> Tokenizer:
        return load_folder_tokenizer(self.folder, self.config.stop_ids)
