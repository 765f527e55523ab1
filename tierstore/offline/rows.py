"""What rows hold, and what differs between two versions. Stores are opened read-only, and may be trained on meanwhile.
Memory: 256 MiB for each, and up to 64 bytes for each row that is read."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import save

from ..ids.configs import LFU
from ..kernels.arrays import Int64s
from ..layout import KEY_ROW_BITS, ROW_MASK
from ..store import Store, Table, open_store

_CHUNK: Final = 65_536  # rows that are read at a time
_SHOWN: Final = 10  # ids that are listed
_NOT_COUNTED: Final = "not counted: only dynamic ids with LFU eviction count; record uses with tierstore train --record"


def _open(name: str) -> Store:
    """``DIR``, or ``DIR@VERSION`` for one of the versions that it keeps."""
    path, _, version = name.rpartition("@")
    if version.isdecimal() and not Path(name).exists():
        return open_store(path, mode="r", version=int(version), ddr="256MiB")
    return open_store(name, mode="r", ddr="256MiB")


def _written(table: Table) -> Int64s:
    return np.concatenate([np.empty(0, np.int64), *table.written()])


def _largest(ids: Int64s, sizes: Any) -> list[tuple[int, Any]]:
    """The ids of the largest sizes, and these; "nan", for what is not finite, is the largest."""
    first = np.argsort(-np.nan_to_num(sizes, nan=np.inf), kind="stable")[:_SHOWN]
    return [(int(ids[each]), sizes[each].item() if np.isfinite(sizes[each]) else "nan") for each in first]


def rows_of(name: str) -> dict[str, Any]:
    """Of each table, by name: counts of its rows, norms of those that are finite, and ids: those used most, and how
    often, where the store counts that; else a text that says how to."""
    with _open(name) as store:
        return {name: _of_rows(table) for name, table in store.tables.items()}


def _of_rows(table: Table) -> dict[str, Any]:
    ids, count = _written(table), table.config.num_embeddings
    parts = torch.split(torch.from_numpy(ids), _CHUNK)
    norms = torch.cat([torch.empty(0), *(table.read(part).double().norm(dim=1) for part in parts)]).numpy()
    bad, sound = ids[~np.isfinite(norms)], norms[np.isfinite(norms)]
    found: dict[str, Any] = {"rows": count, "never_trained": count - len(ids), "zero": int((norms == 0).sum())}
    found |= {"not_finite": len(bad), "not_finite_ids": bad[:_SHOWN].tolist(), "most_used": _NOT_COUNTED}
    if table.ids is not None and isinstance(getattr(table.config.ids, "eviction", None), LFU):
        found["most_used"] = _largest(ids, table.ids.scores_of(ids))
    quantiles = np.quantile(sound, (0, 0.5, 0.9, 0.99, 1)).tolist() if len(sound) else []
    return found | {"norms": dict(zip(("min", "p50", "p90", "p99", "max"), quantiles, strict=False))}


def diff(before: str, after: str) -> dict[str, Any]:
    """What differs between two versions, each ``DIR`` or ``DIR@VERSION``: weights of rows, bit by bit, tables and dense
    tensors. Tables of one store, or of copies of it, are compared by place, whatever their names are; others by name.
    If ``after`` was made from ``before``, of fixed ids only rows that were written since are read."""
    with _open(before) as old, _open(after) as new:
        a, b = (dict(sorted(each.tensors().items())) for each in (old, new))
        is_same, keys = old._catalog.manifest.store_id == new._catalog.manifest.store_id, None
        was, now = ({each.index if is_same else each.name: each for each in of.tables.values()} for of in (old, new))
        if is_same and old.version and old.commit_id(old.version) == new.commit_id(old.version) != "":
            cold: Any = new._cold
            with cold.changes(old.version) as changes:
                keys = changes.written
        found = {now[place].name: _difference(each, now[place], keys) for place, each in was.items() if place in now}
        return {
            "before": f"{old.directory}@{old.version}",
            "after": f"{new.directory}@{new.version}",
            "tables": {name: each for name, each in found.items() if any(each.values())},
            "tables_added": [each.name for place, each in now.items() if place not in was],
            "tables_dropped": [each.name for place, each in was.items() if place not in now],
            "tensors_changed": [name for name in a if name in b and save({"": a[name]}) != save({"": b[name]})],
            "tensors_added": [name for name in b if name not in a],
            "tensors_dropped": [name for name in a if name not in b],
        }


def _difference(old: Table, new: Table, keys: Int64s | None) -> dict[str, Any]:
    """``keys``: of the rows that may differ, of all tables; None for all that were ever written."""
    was, now = old.config.to_dict(), new.config.to_dict()
    config = {key: [was.get(key), now.get(key)] for key in sorted(was | now) if was.get(key) != now.get(key)}
    changed, sizes = [torch.empty(0, dtype=torch.int64)], [torch.empty(0)]
    if keys is None or new.ids is not None:
        ids, others = _written(old), _written(new)
    else:
        ids = others = keys[keys >> KEY_ROW_BITS == new.index] & ROW_MASK
    is_dynamic, least = (old.ids, new.ids) != (None, None), min(old.config.num_embeddings, new.config.num_embeddings)
    both = np.intersect1d(ids, others) if is_dynamic else (every := np.union1d(ids, others))[every < least]
    for part in torch.split(torch.from_numpy(both), _CHUNK) if "embedding_dim" not in config else ():
        rows, others_rows = old.read(part).float(), new.read(part).float()
        differ = (rows.view(torch.int32) != others_rows.view(torch.int32)).any(dim=1)
        changed.append(part[differ])
        sizes.append((others_rows[differ].double() - rows[differ].double()).norm(dim=1))
    added, removed = (len(others) - len(both), len(ids) - len(both)) if is_dynamic else (0, 0)
    found = {"config": config, "added": added, "removed": removed, "changed": sum(map(len, changed))}
    return found | {"largest_changes": _largest(torch.cat(changed).numpy(), torch.cat(sizes).numpy())}


def lines_of(found: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Such findings as text; what is empty is left out."""
    for name, value in found.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{name}"
            yield from lines_of(value, f"{indent}  ")
        elif value or value == 0:
            yield f"{indent}{name.replace('_', ' ')}: {format(value, '.6g') if isinstance(value, float) else value}"
