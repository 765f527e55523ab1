"""One committed version, without its rows; packed into the payload of the cold tier's commit.

Layout: 8 bytes little-endian length of a JSON header, the header, then the named tensors in safetensors format.
"""

import contextlib
import copy
import json
import math
import re
import secrets
import time
from dataclasses import replace
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ..errors import DamagedError, FormatError
from ..system.checks import excerpt, require_int
from .manifest import Manifest

if TYPE_CHECKING:
    from torch import Tensor

MAX_ANCESTORS: Final = 256
_COMMIT_ID: Final = re.compile("[0-9a-f]{16}")
_MAX_VERSION: Final = 2**40
_MAX_SECONDS: Final = 2**37


class Ancestor(NamedTuple):
    version: int
    commit_id: str  # 16 hex digits


def is_commit_id(value: object) -> bool:
    return isinstance(value, str) and _COMMIT_ID.fullmatch(value) is not None


class Lineage(NamedTuple):
    """A commit's identity and the commits that it was made from.

    A store restored from a copy, or that lost its last commits, uses their numbers again for other rows. So a commit
    was made from another if and only if the other's number and identity are in its lineage.
    """

    commit_id: str = ""  # 8 random bytes in hex; "" if it is not known
    ancestors: tuple[Ancestor, ...] = ()  # the last ``MAX_ANCESTORS`` of them whose identity is known, ascending
    seconds: int = 0  # since 1970, by the clock of the machine that made it; 0 of one by an older release

    def following(self, version: int) -> "Lineage":
        """The lineage of the next commit, made from this one, whose number is ``version``."""
        own = (Ancestor(version, self.commit_id),) if self.commit_id else ()
        return Lineage(secrets.token_hex(8), (*self.ancestors, *own)[-MAX_ANCESTORS:], max(0, int(time.time())))

    def id_of(self, version: int) -> str:
        """The identity of the ancestor with this number; "" if there is none."""
        return next((each.commit_id for each in self.ancestors if each.version == version), "")

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.commit_id, "ancestors": [list(each) for each in self.ancestors], "seconds": self.seconds}

    @classmethod
    def from_dict(cls, fields: Any) -> "Lineage":
        """Inverse of ``to_dict``; None, of earlier releases, is ``NO_LINEAGE``. ValueError, TypeError, KeyError
        otherwise."""
        if fields is None:
            return NO_LINEAGE
        ancestors = tuple(Ancestor(*each) for each in fields["ancestors"])
        seconds = require_int(fields.get("seconds", 0), "seconds", 0, _MAX_SECONDS)
        if not is_commit_id(fields["id"]) or len(ancestors) > MAX_ANCESTORS:
            raise ValueError("no identity of a commit, or too many before it")
        before = 0
        for version, commit_id in ancestors:
            if type(version) is not int or not before < version < _MAX_VERSION or not is_commit_id(commit_id):
                raise ValueError("a commit before it has no number or no identity")
            before = version
        return cls(fields["id"], ancestors, seconds)


NO_LINEAGE: Final = Lineage()  # of version 0, and of a commit by a release without identities
ORIGIN_KEY: Final = "tierstore.update"  # in the ``extra`` of a replica's commits: whose rows they have
EVENT_TIME_KEY: Final = "event_time"  # in the ``extra`` of any commit: the greatest of what it was trained on
RANK_KEY: Final = "tierstore.dist"  # in the ``extra`` of a rank's commits: whose part it is, see ``dist.parts``
CHECKPOINT_NAME: Final = "tierstore.checkpoint"  # of the tensor, uint8 [n], that holds what ``nn.checkpoint`` wrote
_LENGTH_BYTES: Final = 8


class TableState(NamedTuple):
    """What a table's optimizer needs besides its rows."""

    step: int  # updates so far
    learning_rate: float

    @classmethod
    def checked(cls, step: Any, rate: Any) -> "TableState":
        if type(step) is not int or not 0 <= step < 2**63 or not 0 <= float(rate) < math.inf:
            raise ValueError("a table's step or learning rate is out of range")
        return cls(step, float(rate))


def event_time_of(extra: dict[str, Any]) -> float | None:
    """The greatest event time of what was trained by the commit with this ``extra``, in Unix seconds; None: unknown."""
    found = extra.get(EVENT_TIME_KEY)
    return float(found) if isinstance(found, int | float) else None


class Version(NamedTuple):
    """Number, tables' states, the caller's ``extra``, its tensors as safetensors bytes, and what it was made from. The
    states are in the order of the tables' places, by the names that the tables had. The tensors are a part of the
    payload that the version was unpacked from, and keep it."""

    number: int
    tables: dict[str, TableState]
    extra: dict[str, Any]
    tensors: bytes | memoryview
    lineage: Lineage = NO_LINEAGE

    @property
    def has_checkpoint(self) -> bool:
        """Whether ``tierstore.checkpoint.save`` committed it; False if that cannot be read."""
        with contextlib.suppress(DamagedError):
            return CHECKPOINT_NAME in tensor_sizes(self)
        return False

    def manifest_of(self, manifest: Manifest) -> Manifest:
        """The store's manifest with the tables that readers of this version are shown: all, but in a replica only those
        that the version names, as an update that failed may have left others behind them."""
        if ORIGIN_KEY not in self.extra:
            return manifest
        return replace(manifest, tables=manifest.tables[: len(self.tables)])

    def require_of(self, manifest: Manifest) -> None:
        """FormatError unless all its tables are among the manifest's, and it has the rows of those that were moved."""
        tables, known = manifest.tables, len(self.tables)
        if known > len(tables):
            name = list(self.tables)[len(tables)]
            raise FormatError(f"version {self.number} has a table {name!r} that the manifest does not know")
        if moved := [each.name for each in tables[known:] if each.init.place is not None and not each.is_dropped]:
            raise FormatError(
                f"version {self.number} is older than table {moved[0]!r}, which was given another optimizer: open the "
                "store again; if that fails, restore all its files from one copy"
            )


def pack(tables: dict[str, TableState], extra: dict[str, Any], tensors: dict[str, "Tensor"], lineage: Lineage) -> bytes:
    """Payload for ``ColdTier.commit``; ``NO_LINEAGE`` for one that is sent elsewhere. TypeError: ``extra`` is not a
    dict that JSON can hold exactly, or ``tensors`` not a dict of tensors."""
    import safetensors.torch
    import torch

    if not isinstance(extra, dict):
        raise TypeError(f"extra must be a dict, not {type(extra).__name__}")
    try:
        kept = plain(extra)
        if found := _no_json(kept, "extra"):
            raise TypeError(
                f"{found}, but extra must hold only what JSON gives back as it was: dicts with str keys, lists, str, "
                "numbers, bool and None. Lists go in for tuples, and tensors go into tensors= of Store.commit"
            )
        framed = _framed(tables, kept, lineage)
    except (ValueError, RecursionError) as error:
        raise TypeError(f"extra must hold only what JSON can hold: {error}") from None
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"tensors must have names that are str, not {type(name).__name__}")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensors[{name!r}] must be a Tensor, not {type(tensor).__name__}")
    try:
        # A file in safetensors format, without a copy of what lies in host memory in one piece. What the format calls
        # the dtypes, and in which order it has tensors, is in a file of empty ones.
        own = {name: each.detach().cpu().contiguous().resolve_conj().resolve_neg() for name, each in tensors.items()}
        empty = safetensors.torch.save({name: tensor.new_empty(0) for name, tensor in own.items()})
        if (names := safetensors.torch.load(empty).keys()) != own.keys():
            raise TypeError(f"tensors cannot be stored under the names {sorted(own.keys() - names)}")
        described: dict[str, dict[str, Any]] = json.loads(empty[_LENGTH_BYTES:])
        end = 0
        for name, fields in described.items():
            start, end = end, end + own[name].nbytes
            fields["shape"], fields["data_offsets"] = list(own[name].shape), [start, end]
        text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _LENGTH_BYTES)
        views = [own[name].reshape(-1).view(torch.uint8).numpy().data for name in described]
    except (RuntimeError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise TypeError(f"tensors cannot be stored in safetensors format: {error}") from error
    return b"".join([framed, len(text).to_bytes(_LENGTH_BYTES, "little"), text, *views])


def _framed(tables: dict[str, TableState], extra: dict[str, Any], lineage: Lineage) -> bytes:
    fields: dict[str, Any] = {"extra": extra, "tables": {name: list(state) for name, state in tables.items()}}
    if lineage.commit_id:
        fields["commit"] = lineage.to_dict()
    header = json.dumps(fields).encode()
    return len(header).to_bytes(_LENGTH_BYTES, "little") + header


def _split(data: bytes | memoryview) -> tuple[bytes | memoryview, bytes | memoryview]:
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    return data[_LENGTH_BYTES:end], data[end:]


def repack(version: Version, lineage: Lineage) -> bytes:
    """The payload of a version as that of another commit; its tensors need not be readable."""
    return _framed(version.tables, version.extra, lineage) + version.tensors


def plain(value: Any) -> Any:
    """The value with numpy's scalars as Python's numbers, all the way down in dicts, lists and tuples."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        made = copy.copy(value)  # of its class, with its attributes
        for key, each in value.items():
            made[key] = plain(each)
        return made
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def _no_json(value: Any, place: str) -> str:
    """What JSON does not give back as it was, where it is and its type; "" if all is."""
    if type(value) is dict:
        for key, each in value.items():
            if type(key) is not str:
                return f"{place} has a key {excerpt(str(key))} of type {type(key).__name__}"
            if found := _no_json(each, f"{place}[{key!r}]"):
                return found
    elif type(value) is list:
        return next(filter(None, (_no_json(each, f"{place}[{at}]") for at, each in enumerate(value))), "")
    elif type(value) not in (str, bool, int, float, NoneType):
        return f"{place} is a {type(value).__name__}"
    return ""


def unpack(number: int, payload: bytes) -> Version:
    """Inverse of ``pack``; an empty payload is version 0, of which nothing was committed."""
    if not payload:
        return Version(number, {}, {}, b"")
    try:
        text, tensors = _split(memoryview(payload))
        header = json.loads(bytes(text))
        tables = {name: TableState.checked(*fields) for name, fields in header["tables"].items()}
        if not isinstance(header["extra"], dict):
            raise TypeError("extra is no object")
        lineage = Lineage.from_dict(header.get("commit"))
        if lineage.ancestors and lineage.ancestors[-1].version >= number:
            raise ValueError("it was made from a later version")
        return Version(number, tables, header["extra"], tensors, lineage)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedError(f"the payload of version {number} cannot be read: {excerpt(str(error))}") from error


def json_bytes(payload: "bytes | memoryview") -> tuple[int, int]:
    """How many bytes of JSON ``unpack`` and ``unpack_tensors`` read of a payload."""
    own = int.from_bytes(payload[:_LENGTH_BYTES], "little")
    tensors = payload[_LENGTH_BYTES + own :]
    return own, int.from_bytes(tensors[:_LENGTH_BYTES], "little")


def tensor_sizes(version: Version) -> dict[str, int]:
    """Bytes of a version's tensors, by name, from their header alone; DamagedError if that cannot be read."""
    try:
        header = json.loads(bytes(_split(version.tensors)[0]) or b"{}")
        places = {name: each["data_offsets"] for name, each in header.items() if name != "__metadata__"}
        size = len(version.tensors)
        return {name: require_int(stop - start, "size", 0, size) for name, (start, stop) in places.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"the tensors of version {version.number} cannot be read: {excerpt(str(error))}") from error


def unpack_tensors(version: Version) -> "dict[str, Tensor]":
    """The tensors of a version, on the CPU; DamagedError if they are not in safetensors format."""
    import safetensors.torch

    if not version.tensors:
        return {}
    try:
        return safetensors.torch.load(bytes(version.tensors))
    except (RuntimeError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise DamagedError(f"the tensors of version {version.number} cannot be read: {excerpt(str(error))}") from error
