"""A table several times larger than what an export or import may take."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch, tierstore
from safetensors.torch import load_file
from pathlib import Path
from tierstore.exchange import export_store, import_files

work, large = Path(sys.argv[1]), int(sys.argv[2])
peak = 0

def private():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def watch(done, total):
    global peak
    peak = max(peak, private())

def make(directory, rows):
    config = tierstore.TableConfig(
        name="item", num_embeddings=rows, embedding_dim=64, optimizer=tierstore.optim.RowWiseAdagrad()
    )
    with tierstore.open(directory, ddr="8MiB") as store:
        table = store.create_table(config)
        for start in range(0, rows, 10_000):
            ids = torch.arange(start, min(start + 10_000, rows))
            table.write(ids, ids[:, None] + torch.arange(64) / 64)
        store.commit()

def measure(rows, form):
    global peak
    file, copy = work / f"file{rows}.safetensors", work / f"copy{rows}.{form}"
    base, peak = private(), 0
    export_store(work / str(rows), file, state=True, ddr="8MiB", progress=watch, force=True)
    exported = peak - base
    if form == "torch":
        torch.save(load_file(file), file.with_suffix(".pt"))
        file = file.with_suffix(".pt")
    base, peak = private(), 0
    report = import_files(copy, [file], ddr="8MiB", progress=watch)
    imported = peak - base
    with tierstore.open(copy, mode="r", ddr="8MiB") as store:
        last = store["item"].read(torch.tensor([rows - 1]))
    assert torch.equal(last[0], rows - 1 + torch.arange(64) / 64)
    return file.stat().st_size, report.tables[0].changed_rows, exported, imported

for rows in (1000, large):  # the first compiles kernels
    make(work / str(rows), rows)
    found = [measure(rows, form) for form in ("safetensors", "torch")]
for each in found:
    print(*each)
"""


def test_memory_does_not_grow_with_the_table(tmp_path):
    rows = 300_000
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(rows)], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    measured = [list(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(measured) == 2
    for size, changed, exported, imported in measured:
        assert changed == rows
        assert size == pytest.approx(260 * rows, rel=0.01)
        # The budget and 64 MiB, as promised: less than the tensors take.
        assert exported < 72 * 2**20 < size
        assert imported < 72 * 2**20 < size
