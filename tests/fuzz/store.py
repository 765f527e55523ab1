"""A whole store with a damaged row file, through the public API: the rows that were committed, or a clear error."""

import shutil

import torch

import tierstore
from tierstore.errors import TierstoreError

from .image import EXTRA, TENSORS, WIDE, build_store, edited, metadata_pages, some_edits, wide_rows
from .target import FindingError, Target, scratch_folder

_FOLDER = scratch_folder()
build_store(_FOLDER / "whole")
_CONTENT = (_FOLDER / "whole" / "rows.lmdb").read_bytes()
_PAGES = metadata_pages(_CONTENT)
_ROWS, _IDS = wide_rows(), torch.arange(WIDE.num_embeddings)


def run(data: bytes) -> None:
    image = edited(_CONTENT, _PAGES, data)
    for mode in ("r", "w"):
        shutil.rmtree(_FOLDER / "copy", ignore_errors=True)
        shutil.copytree(_FOLDER / "whole", _FOLDER / "copy")
        (_FOLDER / "copy" / "rows.lmdb").write_bytes(image)
        try:
            _use(mode)
        except TierstoreError as error:
            if str(_FOLDER / "copy") not in str(error):
                raise FindingError("an error that names no file") from error


def _use(mode: str) -> None:
    with tierstore.open(_FOLDER / "copy", mode=mode, ddr="4MiB", threads=1) as store:  # type: ignore[arg-type]
        rows = _ROWS
        _check(store, rows)
        if mode == "w":
            store["wide"].write(_IDS[:100], torch.zeros(100, WIDE.embedding_dim))
            store["wide"].write(_IDS[-1:], torch.zeros(1, WIDE.embedding_dim))
            store.commit(extra=EXTRA, tensors=TENSORS)
            rows = rows.clone()
            rows[:100] = rows[-1:] = 0.0
            _check(store, rows)
    if mode == "w":
        with tierstore.open(_FOLDER / "copy", mode="r", ddr="4MiB", threads=1) as store:
            _check(store, rows)


def _check(store: tierstore.Store, rows: torch.Tensor) -> None:
    if not torch.equal(store["wide"].read(_IDS), rows):
        raise FindingError("wrong rows")
    if store.extra != EXTRA or not torch.equal(store.tensors()["w"], TENSORS["w"]):
        raise FindingError("wrong extra or tensors")
    store.verify()


TARGET = Target(run=run, seeds=lambda: some_edits(13), plain=False, mutations=15)
