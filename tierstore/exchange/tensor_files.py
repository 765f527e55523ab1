"""Files of tensors: what a table's tensors are called, safetensors written, safetensors and torch checkpoints read.

Tables have TorchRec's keys by default; optimizer state has torch.optim's names. Of a file that is read, names, dtypes
and shapes are known at once, and rows are read as asked for. No code in a file can run.
"""

import json
import math
import pickle
import re
import stat
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import safetensors
import torch
from torch import Tensor

from ..config import TableConfig
from ..errors import FormatError
from ..optim import Optimizer
from ..store.version import TableState
from ..system.checks import excerpt
from ..system.files import write_all

DEFAULT_KEY: Final = "embedding_bags.{table}.weight"
STATE_NAMES: Final = ("sum", "exp_avg", "exp_avg_sq", "step")
"""Names that may lie alongside a table's weights."""
IDS: Final = "ids"
SCORES: Final = "scores"
"""Of dynamic ids, alongside the weights: int64 [rows] each."""
METADATA_KEY: Final = "tierstore"
"""Where in the header's ``__metadata__`` our own stands, as JSON."""
DTYPES: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_TORCHREC: Final = re.compile(r"(?:.*\.)?embedding_bags\.(?P<table>.+)\.weight")
_FORMAT: Final = 1
_ALIGN: Final = 64
"""Of the data's beginning; the format asks for 8."""
_ZIP_MAGIC: Final = b"PK\x03\x04"
_PICKLE_MAGICS: Final = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_MAX_DEPTH: Final = 16
_READ: Final = {name: dtype for dtype, name in DTYPES.items() if dtype.is_floating_point or dtype is torch.int64}


def weight_keys(template: str, tables: Iterable[str]) -> dict[str, str]:
    """The key of each table's weights; ``{table}`` in the template stands for its name. ValueError: one key twice."""
    keys = {table: template.replace("{table}", table) for table in tables}
    owners: dict[str, str] = {}
    for table, key in keys.items():
        if (other := owners.setdefault(key, table)) != table:
            raise ValueError(
                f"key {template!r} names both {other!r} and {table!r} {key!r}; put {{table}} in it, or choose one table"
            )
    return keys


def state_key(weight_key: str, state: str) -> str:
    """The key of an optimizer state alongside its weights: ``a.weight`` and ``sum`` give ``a.sum``."""
    head, dot, last = weight_key.rpartition(".")
    return f"{head}{dot}{state}" if last == "weight" else f"{weight_key}.{state}"


def table_of(key: str, known: Mapping[str, str]) -> str | None:
    """The table that a key's tensor is the weights of, or None; ``known``: those that the file itself names."""
    found = _TORCHREC.fullmatch(key)
    return known.get(key) or (found["table"] if found else None)


class StateTensor(NamedTuple):
    """Columns ``[first, last)`` of a row's state: a tensor [rows] of one value a row, else [rows, last - first]."""

    name: str
    first: int
    last: int
    per_row: bool

    def shape(self, rows: int) -> tuple[int, ...]:
        return (rows,) if self.per_row else (rows, self.last - self.first)


def state_tensors(optimizer: Optimizer, dim: int) -> tuple[StateTensor, ...]:
    """The state tensors of a table with ``dim`` columns, in order of their columns; float32 all of them."""
    if optimizer.kind == "adam":
        return StateTensor("exp_avg", 0, dim, False), StateTensor("exp_avg_sq", dim, 2 * dim, False)
    columns = optimizer.state_dim(dim)
    return (StateTensor("sum", 0, columns, optimizer.kind == "rowwise_adagrad"),) if columns else ()


class TensorSpec(NamedTuple):
    """One tensor of a file; its data is contiguous, little-endian."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """A safetensors file to be written: ``head``, then tensors, each in order; ``places``: where the next data of each
    goes. ValueError for a dtype that is not in ``DTYPES``."""

    def __init__(self, tensors: Sequence[TensorSpec], metadata: dict[str, Any]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt", METADATA_KEY: json.dumps(metadata)}}
        end = 0
        # Wide types first, so that each tensor is aligned without gaps, which the format forbids.
        for tensor in sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize):
            if tensor.dtype not in DTYPES:
                raise ValueError(f"tensor {tensor.name!r} is {tensor.dtype}, which an export to safetensors leaves out")
            begin, end = end, end + tensor.size_bytes
            about = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
            header[tensor.name] = about
        text = json.dumps(header, separators=(",", ":")).encode()
        text = text.ljust(-(-(len(text) + 8) // _ALIGN) * _ALIGN - 8)
        self.head = len(text).to_bytes(8, "little") + text
        self.places = {each.name: len(self.head) + header[each.name]["data_offsets"][0] for each in tensors}
        self.size_bytes = len(self.head) + end

    def append(self, descriptor: int, name: str, data: Any) -> None:
        raw = memoryview(data).cast("B") if data.size else memoryview(b"")
        write_all(descriptor, raw, self.places[name])
        self.places[name] += len(raw)


class ExportedTable(NamedTuple):
    config: TableConfig
    state: TableState


def metadata_of(version: int, tables: Mapping[str, ExportedTable]) -> dict[str, Any]:
    """What an export says of itself, for JSON; tables by the key of their weights."""
    said = [{"key": key, "config": each.config.to_dict(), **each.state._asdict()} for key, each in tables.items()]
    return {"format_version": _FORMAT, "store_version": version, "tables": said}


def _exported(text: str, path: Path) -> dict[str, ExportedTable]:
    """Inverse of ``metadata_of``; FormatError for anything that it did not give."""
    try:
        fields = json.loads(text)
        if fields["format_version"] != _FORMAT:
            raise ValueError(f"format version {fields['format_version']}; this release reads version {_FORMAT}")
        int(fields["store_version"])
        return {
            str(table["key"]): ExportedTable(
                TableConfig.from_dict(table["config"]), TableState.checked(table["step"], table["learning_rate"])
            )
            for table in fields["tables"]
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise FormatError(
            f"{path}: its tierstore metadata cannot be read ({excerpt(str(error), 200)}); export it again"
        ) from error


class FileTensor(NamedTuple):
    """A tensor of a file, of which nothing is read yet; a dtype of None is one that nothing of a table can have."""

    path: Path
    key: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    rows: Any
    """To be sliced; a slice keeps no more of the file in memory than its rows."""

    @property
    def place(self) -> str:
        return f"{self.path}, tensor {excerpt(self.key)}"


class TensorFiles(NamedTuple):
    """Files: their tensors, and numbers as such, by key; the tables of exports of ours by the key of their weights; and
    the names of what else lies in them."""

    paths: tuple[Path, ...]
    tensors: dict[str, FileTensor]
    exported: dict[str, ExportedTable]
    others: list[str]

    def __str__(self) -> str:
        return ", ".join(map(str, self.paths))

    def add(self, tensor: FileTensor) -> None:
        """ValueError: another file has one of that name."""
        other = self.tensors.get(tensor.key, tensor)
        if other.path != tensor.path:
            raise ValueError(
                f"both {other.path} and {tensor.path} have a tensor {excerpt(tensor.key)}; give one of the two files"
            )
        self.tensors[tensor.key] = tensor


def open_files(paths: Iterable[Path]) -> TensorFiles:
    """The files, each by what it begins with. FileNotFoundError, IsADirectoryError. FormatError: one is neither kind
    of file. ValueError: one tensor is in two."""
    files = TensorFiles(tuple(paths), {}, {}, [])
    for path in files.paths:
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file; give a safetensors file or a torch checkpoint")
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a directory; give a safetensors file or a torch checkpoint")
        if not stat.S_ISREG(path.stat().st_mode):
            raise FormatError(f"{path} is no plain file; give a safetensors file or a torch checkpoint")
        with path.open("rb") as file:
            magic = file.read(4)
        if magic[:2] in _PICKLE_MAGICS:
            raise FormatError(
                f"{path} looks like a torch checkpoint of the format before 1.6, which cannot be read in parts; "
                "load it and save it again with torch.save"
            )
        (_open_torch if magic == _ZIP_MAGIC else _open_safetensors)(path, files)
    return files


def _open_safetensors(path: Path, files: TensorFiles) -> None:
    try:
        file: Any = safetensors.safe_open(path, framework="pt", device="cpu")
        found = [(key, file.get_slice(key)) for key in file.keys()]  # noqa: SIM118 - no mapping
        tensors = [
            FileTensor(path, key, _READ.get(rows.get_dtype()), tuple(rows.get_shape()), rows) for key, rows in found
        ]
        text: str | None = (file.metadata() or {}).get(METADATA_KEY)
    except (safetensors.SafetensorError, ValueError, OverflowError) as error:
        raise FormatError(f"{path} is neither a safetensors file nor a torch checkpoint ({error})") from error
    for tensor in tensors:
        files.add(tensor)
    if text is not None:
        files.exported.update(_exported(text, path))


def _open_torch(path: Path, files: TensorFiles) -> None:
    """Add what the file has: a dict of tensors, or of such dicts, whose names are then joined by dots."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
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
    for key, value in _flatten(loaded, ""):
        if isinstance(value, Tensor):
            files.add(FileTensor(path, key, _dtype(value), tuple(value.shape), value.detach()))
        elif type(value) in (int, float):
            files.add(FileTensor(path, key, None, (), np.asarray(value)))
        else:
            files.others.append(key)


def _flatten(value: Any, prefix: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    for name, inner in value.items() if isinstance(value, dict) and depth <= _MAX_DEPTH else ():
        if isinstance(inner, dict):
            yield from _flatten(inner, f"{prefix}{name}.", depth + 1)
        else:
            yield f"{prefix}{name}", inner


def _dtype(tensor: Tensor) -> torch.dtype | None:
    """Its dtype; None if it is no plain tensor of real numbers whose elements all are in the file."""
    plain = tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type == "cpu"
    if not plain or tensor.dtype not in _READ.values():
        return None
    # A stride of 0 makes a few bytes look like a table of any size.
    return tensor.dtype if tensor.numel() * tensor.itemsize <= tensor.untyped_storage().nbytes() else None
