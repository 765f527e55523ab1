"""Files to import from: names, dtypes and shapes at once, rows as asked for. No code in a file can run."""

import json
import pickle
import stat
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import safetensors
import torch
from torch import Tensor

from ..config import TableConfig
from ..errors import FormatError
from ..store.version import TableState
from ..system.excerpt import excerpt
from .tensor_file import DTYPES, METADATA_ENTRY, METADATA_KEY

_FORMAT: Final = 1


class TableMetadata(NamedTuple):
    """One table of an export; the key is that of its weights."""

    key: str
    config: TableConfig
    state: TableState


class Metadata(NamedTuple):
    version: int
    tables: tuple[TableMetadata, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; ``from_dict`` reads it back."""
        tables = [
            {"key": table.key, "config": table.config.to_dict(), **table.state._asdict()} for table in self.tables
        ]
        return {"format_version": _FORMAT, "store_version": self.version, "tables": tables}

    @classmethod
    def from_dict(cls, fields: Any, where: str) -> "Metadata":
        """Inverse of ``to_dict``; FormatError, which names ``where``, for anything that it did not write."""
        try:
            if fields["format_version"] != _FORMAT:
                raise ValueError(f"format version {fields['format_version']}; this release reads version {_FORMAT}")
            tables = [
                TableMetadata(
                    str(table["key"]),
                    TableConfig.from_dict(table["config"]),
                    TableState.checked(table["step"], table["learning_rate"]),
                )
                for table in fields["tables"]
            ]
            return cls(int(fields["store_version"]), tuple(tables))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise FormatError(
                f"{where}: its tierstore metadata cannot be read ({excerpt(str(error), 200)}); export it again"
            ) from error


_ZIP_MAGIC: Final = b"PK\x03\x04"
_PICKLE_MAGICS: Final = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_MAX_METADATA_BYTES: Final = 64 * 2**20
_MAX_DEPTH: Final = 16
_DTYPES: Final = {name: dtype for dtype, name in DTYPES.items() if dtype.is_floating_point or dtype is torch.int64}


class TensorInfo(NamedTuple):
    """What is known of a tensor before any of it is read; a dtype of None is one that nothing of a table can have."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]


class Source(NamedTuple):
    """An open file; its metadata if it is an export of ours; ``others``: what else lies in it, numbers, and None for
    the rest."""

    path: Path
    tensors: dict[str, TensorInfo]
    metadata: Metadata | None
    part_of: Callable[[str], Any]
    """What gives rows of a tensor when it is sliced."""
    others: Mapping[str, float | None] = MappingProxyType({})

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Rows ``[start, stop)`` of a tensor, which keep no more of the file in memory than that."""
        rows: Tensor = self.part_of(key)[start:stop]
        return rows


def open_source(path: Path) -> Source:
    """The file, by what it begins with. FileNotFoundError, IsADirectoryError. FormatError: it is neither kind of
    file."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; give a safetensors file or a torch checkpoint")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; give a safetensors file or a torch checkpoint")
    if not stat.S_ISREG(path.stat().st_mode):
        raise FormatError(f"{path} is no plain file; give a safetensors file or a torch checkpoint")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == _ZIP_MAGIC:
        return _of_torch(path)
    if magic[:2] in _PICKLE_MAGICS:
        raise FormatError(
            f"{path} looks like a torch checkpoint of the format before 1.6, which cannot be read in parts; "
            "load it and save it again with torch.save"
        )
    return _of_safetensors(path)


def _of_safetensors(path: Path) -> Source:
    try:
        file: Any = safetensors.safe_open(path, framework="pt", device="cpu")
        parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - no mapping
        tensors = {
            key: TensorInfo(_DTYPES.get(part.get_dtype()), tuple(part.get_shape())) for key, part in parts.items()
        }
        text = (file.metadata() or {}).get(METADATA_KEY)
    except (safetensors.SafetensorError, ValueError, OverflowError) as error:
        raise FormatError(f"{path} is neither a safetensors file nor a torch checkpoint ({error})") from error
    metadata = None if text is None else Metadata.from_dict(_parse(text, path), str(path))
    return Source(path, tensors, metadata, file.get_slice)


def _of_torch(path: Path) -> Source:
    """A dict of tensors, or of such dicts, whose names are then joined by dots."""
    entries = dict(_flatten(_load(path), ""))
    found = {key: value.detach() for key, value in entries.items() if isinstance(value, Tensor)}
    tensors = {key: TensorInfo(_dtype(tensor), tuple(tensor.shape)) for key, tensor in found.items()}
    others = {key: _number(value) for key, value in entries.items() if key not in found}
    return Source(path, tensors, _read_metadata(path), found.__getitem__, others)


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _load(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise FormatError(
            f"{path} holds more than tensors and plain values, and is not read, because doing so could run code; "
            f"save its state dict alone ({str(error).splitlines()[0]})"
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # what a damaged archive makes torch raise is not written down anywhere
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise FormatError(f"{path} is not a torch checkpoint that can be read: {said}") from error


def _flatten(value: Any, prefix: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or depth > _MAX_DEPTH:
        return
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _flatten(inner, f"{prefix}{name}.", depth + 1)
        else:
            yield f"{prefix}{name}", inner


def _dtype(tensor: Tensor) -> torch.dtype | None:
    """Its dtype; None if it is no plain tensor of real numbers whose elements all are in the file."""
    plain = tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type == "cpu"
    if not plain or tensor.dtype not in _DTYPES.values():
        return None
    # A stride of 0 makes a few bytes look like a table of any size.
    return tensor.dtype if tensor.numel() * tensor.itemsize <= tensor.untyped_storage().nbytes() else None


def _read_metadata(path: Path) -> Metadata | None:
    try:
        with zipfile.ZipFile(path) as archive:
            if METADATA_ENTRY not in archive.namelist():
                return None
            info = archive.getinfo(METADATA_ENTRY)
            if info.file_size > _MAX_METADATA_BYTES or info.compress_type != zipfile.ZIP_STORED:
                raise zipfile.BadZipFile(f"{METADATA_ENTRY} is not as an export writes it")
            text = archive.read(info)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        raise FormatError(f"{path}: its tierstore metadata cannot be read ({error}); export it again") from error
    return Metadata.from_dict(_parse(text, path), str(path))


def _parse(text: str | bytes, path: Path) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: its tierstore metadata is not JSON ({error}); export it again") from error
