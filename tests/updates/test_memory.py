"""However much a small file inflates to, whoever applies it takes little memory, or refuses it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tests.children import run
from tests.updates.support import change, edited, table_config
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.updates import write_update
from tierstore.updates.apply import _Sent
from tierstore.updates.chunks import MAX_CHUNK_BYTES
from tierstore.updates.header import MAX_PAYLOAD_BYTES

ROWS = 1_000_000
DENSE_MIB = 64
APPLY = """
    from tierstore.updates import apply_update

    def limited(number, file, allowed_mib):
        limit_data(int(allowed_mib) << 20)
        return apply_update(work / f"replica-{number}", file)

    work = Path(sys.argv[1])
    apply_update(work / "tiny replica", sys.argv[2])  # after which everything is loaded and compiled
    for number in range(3, len(sys.argv), 2):
        forked(limited, number, *sys.argv[number : number + 2])
    """


def bomb(folder: Path, name: str, *, rows: int, dense_mib: int) -> Path:
    """An update of as many equal rows, and of as many zeros."""
    source = folder / f"source of {name}"
    with tierstore.open(source, ddr="256MiB") as store:
        table = store.create_table(tierstore.TableConfig(name="t", num_embeddings=rows, embedding_dim=16))
        for ids in torch.arange(rows).split(1 << 18):
            table.write(ids, torch.ones(len(ids), 16))
        store.commit(tensors={"w": torch.zeros(dense_mib << 18)})
    update = write_update(source, folder / name)
    assert update.size_bytes < 1 << 20 < sum(chunk.raw_bytes for chunk in update.header.chunks) >> 5
    return update.path


def with_payload_of(num_bytes: int) -> Any:
    def edit(own: Any, parts: list[bytes]) -> None:
        import zlib

        import xxhash

        data = zlib.compress(bytes(MAX_CHUNK_BYTES))
        for _ in range(num_bytes // MAX_CHUNK_BYTES):
            own["chunks"].insert(1, [-1, 0, MAX_CHUNK_BYTES, xxhash.xxh64_hexdigest(data)])
            parts.insert(1, data)

    return edit


def with_extra_of(num_bytes: int) -> Any:
    """JSON that takes many times its size once it is read."""

    def edit(own: Any, parts: list[bytes]) -> None:
        import zlib

        import xxhash

        raw = b'{"tables": {}, "extra": {"x": [%s{}]}}' % (b"{}," * (num_bytes // 3))
        raw = len(raw).to_bytes(8, "little") + raw
        cut = [raw[start : start + MAX_CHUNK_BYTES] for start in range(0, len(raw), MAX_CHUNK_BYTES)]
        parts[:1] = [zlib.compress(each) for each in cut]
        own["chunks"][:1] = [
            [-1, 0, len(each), xxhash.xxh64_hexdigest(part)] for each, part in zip(cut, parts, strict=False)
        ]

    return edit


@pytest.mark.skipif(not JIT_ENABLED, reason="plain Python takes long for so many rows")
def test_an_update_takes_as_much_memory_as_it_may_or_is_refused(tmp_path: Path) -> None:
    change(tmp_path / "store", 1)
    small = write_update(tmp_path / "store", tmp_path / "update")
    rows, dense = bomb(tmp_path, "rows", rows=ROWS, dense_mib=1), bomb(tmp_path, "dense", rows=9, dense_mib=DENSE_MIB)
    hostile = {
        "too much": with_payload_of(MAX_PAYLOAD_BYTES),
        "far too much": with_payload_of(4 << 30),
        "extra": with_extra_of(32 << 20),
    }
    files = [edited(small, tmp_path / name, edit) for name, edit in hostile.items()]
    assert max(file.stat().st_size for file in files) < 8 << 20
    cases: list[object] = [rows, 64, dense, 64 + 2 * DENSE_MIB, *(word for file in files for word in (file, 136))]
    applied, dense_applied, *refused = run(APPLY, tmp_path, small.path, *cases).splitlines()
    assert applied == f"ok Applied(version=1, rows={ROWS}, was_there=False)"
    assert dense_applied == "ok Applied(version=1, rows=9, was_there=False)"
    for said, words in zip(refused, ("a payload of", "a payload of", "extra of"), strict=True):
        assert said.startswith("FormatError"), said
        assert words in said


def test_a_source_that_no_update_can_hold_is_told_before_its_rows_are_read(tmp_path: Path) -> None:
    with tierstore.open(tmp_path / "source", ddr="4MiB") as store:
        store.create_table(table_config("item")).write(torch.tensor([1]), torch.ones(1, 6))
        store.commit(extra={"x": ["y" * 1000] * 5000})
    with pytest.raises(ValueError, match=r"a version with extra of 50.* bytes; an update holds at most"):
        write_update(tmp_path / "source", tmp_path / "update")


class Chunks:
    """An update with these rows."""

    def __init__(self, chunks: list[Any]) -> None:
        self.chunks = chunks

    def rows(self, _table: int) -> Iterator[Any]:
        for chunk in self.chunks:
            yield chunk, None


def test_rows_that_an_update_lacks_are_found_with_one_chunk_in_memory() -> None:
    choice = np.random.default_rng(1)
    for _ in range(200):
        sent = np.flatnonzero(choice.random(100) < choice.random())
        stored = np.flatnonzero(choice.random(100) < choice.random())
        chunks = [part for part in np.array_split(sent, choice.integers(1, 9)) if len(part)]
        asked = [part for part in np.array_split(stored, choice.integers(1, 9)) if len(part)]
        update: Any = Chunks(chunks)
        found = _Sent(update, 0)
        missing = []
        for part in asked:
            missing += found.missing(part).tolist()
            assert len(found._rows) <= max(map(len, chunks), default=0)
        assert missing == sorted(set(stored.tolist()) - set(sent.tolist()))
