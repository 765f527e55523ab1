"""Training with a twentieth of the rows in host memory and the rest on SSD: a step against its roofline.

The roofline is the longer of two: the step with all rows in device memory, and its page reads at the rate of the
device's own random reads.
"""

import contextlib
import shutil
import statistics
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

import tierstore
from tierstore.io.files import ROW_FILE_NAME
from tierstore.plan.measure import READ_BYTES, direct_reader, page_cache

from .. import device
from ..common import Report, Table, fresh_folder
from ..workload import make_store
from .rig import Rig
from .stores import Batch, Trainer, draw_batches, hbm_bytes

_SPARE: Final = 1.6


def measure(rig: Rig, config: dict[str, Any], folder: Path) -> dict[str, Any]:
    sizes = [max(3, int(rows * config["scale"])) for rows in config["table_sizes"]]
    row_bytes, rounds, device = 4 * config["dim"] + 8, config["repetitions"] + 1, str(rig.device)
    batches = draw_batches(rig, sizes, config["exponent"], config["batch"], rounds * config["steps"])
    parts = [batches[number * config["steps"] : (number + 1) * config["steps"]] for number in range(rounds)]
    rule, all_rows = tierstore.optim.RowWiseAdagrad(lr=0.02), hbm_bytes(_SPARE * sum(sizes), row_bytes)
    shape = {"rows": sizes, "dim": config["dim"], "ddr": config["build_ddr"], "optimizer": rule}
    with fresh_folder(folder / "gpu-ssd") as path:
        with make_store(path, hbm=all_rows, device=device, **shape) as store:
            trainer = Trainer(rig, store, config, depth=config["depth"])
            for part in parts:
                trainer.take_steps(part)
            compute = statistics.median(trainer.take_steps(part) / len(part) for part in parts[1:])
        shutil.rmtree(path)
        make_store(path, value=0.01, **shape).close()  # every row written, so that all of them are on SSD
        ddr = int(config["ddr_share"] * sum(sizes) * (row_bytes + 44)) + config["ddr_fixed_bytes"]
        hbm = hbm_bytes(config["hbm_share"] * sum(sizes), row_bytes)
        with tierstore.open(path, ddr=ddr, hbm=hbm, device=device) as store:
            trainer = Trainer(rig, store, config, depth=config["depth"])
            trainer.take_steps(parts[0])
            measured = [_cold_round(trainer, path / ROW_FILE_NAME, part) for part in parts[1:]]
        reads_per_s = _device_reads(path / ROW_FILE_NAME, config)
    told = {name: config[name] for name in ("dim", "ddr_share", "hbm_share", "steps")}
    return {"rounds": measured, "compute_step_s": compute, "reads_per_s": reads_per_s, "rows": sum(sizes), **told}


def _cold_round(trainer: Trainer, path: Path, batches: list[Batch]) -> dict[str, float]:
    """A step's seconds and bytes, the row file out of the page cache at first but for a share that stayed."""
    trainer.store.commit()
    page_cache.drop(path)
    stayed, before = device.resident_share(path), trainer.store.stats().ssd
    seconds = trainer.take_steps(batches)
    after = trainer.store.stats().ssd
    return {
        "step_s": seconds / len(batches),
        "stayed_share": stayed,
        "read_bytes": (after.bytes_read - before.bytes_read) / len(batches),
        "written_bytes": (after.bytes_written - before.bytes_written) / len(batches),
    }


def _device_reads(path: Path, config: dict[str, Any]) -> float:
    """Direct random reads of READ_BYTES a second; 0 where the file system has none."""
    with contextlib.suppress(OSError), direct_reader(path, config["queue_depth"]) as reader:
        generator = np.random.default_rng(1)
        seconds = []
        for _ in range(3):
            offsets = reader.random_offsets(generator, config["limit_reads"])
            start = time.perf_counter()
            reader.read(offsets)
            seconds.append(time.perf_counter() - start)
        return float(config["limit_reads"] / statistics.median(seconds))
    return 0.0


def tell(found: dict[str, Any]) -> Report:
    step, read, written = (
        statistics.median(each[name] for each in found["rounds"]) for name in ("step_s", "read_bytes", "written_bytes")
    )
    compute, rate = found["compute_step_s"], found["reads_per_s"]
    reading = read / READ_BYTES / rate if rate else 0.0
    limit = f"{rate:,.0f} reads/s" if rate else "the file system has no direct reads"
    rows = [
        ["a step", f"{step * 1e3:.2f}"],
        ["limit: with all rows in device memory", f"{compute * 1e3:.2f}"],
        [f"limit: {read / READ_BYTES:,.0f} page reads, {limit}", f"{reading * 1e3:.2f}"],
        ["a step over the longer of the two", f"{step / max(compute, reading):.2f}"],
    ]
    title = (
        f"DLRM, {found['rows']:,} rows of {found['dim']}, all on SSD; {found['ddr_share']:.0%} of them in host memory, "
        f"{found['hbm_share']:.0%} in device memory"
    )
    note = (
        f"From SSD: {len(found['rounds'])} rounds of {found['steps']} steps on batches never seen, the row file put "
        f"out of the page cache before each, but for {max(each['stayed_share'] for each in found['rounds']):.0%} of it "
        "(pages read twice in a round come from it the second time); a step also wrote "
        f"{written / 2**20:.1f} MiB of evicted rows."
    )
    return Report([Table(title, ["", "ms/step"], rows)], notes=[note])
