"""Damage anywhere in a small store ends in the right rows or in an error of ours that names the file.

A sample of places in every run; ``pytest -m soak`` tries a bit of every byte of the row file.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.damage import PAGE, Case, Outcome, Sample, flips, make_aged, make_sample, mixes, page_damage, row_file, sweep
from tests.io.support import manifest_format, rows_format
from tierstore.errors import DamagedError, FormatError


@pytest.fixture(scope="module", params=[make_sample, make_aged], ids=["new", "aged"])
def samples(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    folders = [tmp_path_factory.mktemp("sample") / "store" for _ in range(2)]
    return [request.param(folder, seed) for seed, folder in enumerate(folders, 1)]


def _failures(cases: Sequence[Case], samples: list[Sample], **how: Any) -> list[Outcome]:
    outcomes = sweep(cases, samples, **how)
    assert sorted(outcome.case for outcome in outcomes) == sorted(cases)
    return [outcome for outcome in outcomes if outcome.failures]


def test_bytes_of_the_row_file(samples: list[Sample]) -> None:
    cases = [*flips(samples[0], all_bits=False, stride=809, files=["rows.lmdb"])]
    cases += flips(samples[0], all_bits=True, stride=1999, files=["rows.lmdb"])
    assert _failures(cases, samples, prepare=row_file) == []


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_byte_of_the_row_file(samples: list[Sample]) -> None:
    cases = [*flips(samples[0], all_bits=False, files=["rows.lmdb"])]
    assert _failures(cases, samples, prepare=row_file) == []
    assert _failures(list(flips(samples[0], all_bits=False, stride=101)), samples) == []
    assert _failures(list(page_damage(samples[0])), samples) == []


def test_bytes_that_lmdb_believes(samples: list[Sample]) -> None:
    data = samples[0].files["rows.lmdb"]
    trees = [
        at
        for at in range(2 * PAGE, len(data), PAGE)
        if data[at + 10] & 3 and int.from_bytes(data[at : at + 8], "little") == at // PAGE
    ]
    places = [*range(0, 152, 5), *range(PAGE, PAGE + 152, 5)]
    places += [
        at + offset for at in trees[:: max(1, len(trees) // 8)] for offset in (0, 10, 12, 14, 17, PAGE - 20, PAGE - 9)
    ]
    assert _failures([Case("flip", "rows.lmdb", at, 1 << at % 8) for at in places], samples) == []


def test_an_older_tree_that_calls_itself_the_newest(tmp_path: Path) -> None:
    """The older meta page numbered as if it came after the newer one: its tree is whole, and lacks the last commit."""
    with tierstore.open(tmp_path, ddr="1MiB", threads=1) as store:
        store.create_table(tierstore.TableConfig(name="item", num_embeddings=100, embedding_dim=8))
        store["item"].write(torch.arange(100), torch.ones(100, 8))
        store.commit()
    data = bytearray((tmp_path / "rows.lmdb").read_bytes())
    numbers = [int.from_bytes(data[page * PAGE + 144 : page * PAGE + 152], "little") for page in (0, 1)]
    older = int(numbers[1] < numbers[0])
    data[older * PAGE + 144 : older * PAGE + 152] = (numbers[older] + 2).to_bytes(8, "little")
    (tmp_path / "rows.lmdb").write_bytes(data)
    (tmp_path / "rows.anchor").unlink()  # it holds both pages as they were
    for mode in ("r", "w"):
        with pytest.raises(DamagedError, match=rf"rows\.lmdb: page {older} of its tree is damaged \(BAD_TOTALS\)"):
            tierstore.open(tmp_path, mode=mode)


def test_pages_cut_off_zeroed_and_swapped(samples: list[Sample]) -> None:
    cases = list(page_damage(samples[0]))
    assert _failures(cases[:: max(1, len(cases) // 60)], samples) == []


def test_files_of_two_stores_empty_and_missing(samples: list[Sample]) -> None:
    assert _failures(list(mixes(samples[0])), samples) == []


Change = Callable[[dict[str, bytes], int], dict[str, bytes]]


@pytest.mark.parametrize("mode", ["r", "w"])
@pytest.mark.parametrize(
    ("change", "version"),
    [(change, version) for change in (rows_format, manifest_format) for version in (0, 3, 6)],
)
def test_other_format_versions(samples: list[Sample], tmp_path: Path, change: Change, version: int, mode: str) -> None:
    for name, content in change(samples[0].files, version).items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(FormatError, match=rf"format version {version}\b") as caught:
        tierstore.open(tmp_path, mode=mode)  # type: ignore[arg-type]
    assert "this release reads 4 and 5" in str(caught.value)
