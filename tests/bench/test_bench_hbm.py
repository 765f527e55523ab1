"""Counting what a GPU would be asked for: whether what is counted happened."""

import json
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import hbm, hbm_worker
from bench.common import Run
from bench.data import ROOT

CONFIG = tomllib.loads((ROOT / "bench" / "hbm.toml").read_text())
QUICK = CONFIG.pop("quick")


def test_quick_sizes_have_the_keys_of_the_whole_ones() -> None:
    for name, small in QUICK.items():
        assert set(small) == set(CONFIG[name]), name


def test_launches_waits_and_bytes_are_counted() -> None:
    pytest.importorskip("triton", minversion="3.3")
    count, here = hbm_worker._Count(), torch.device("cpu")
    with hbm_worker._watching(count):
        ids = torch.arange(10, dtype=torch.int32).to(here, non_blocking=True)  # made, and sent
        view = ids.view(2, 5)[0]
        total = view.sum()
        assert count.launches == ["arange", "copy", "sum"]
        assert (count.waits, count.sent_bytes) == ([], 40)
        mark = count.mark()
        assert not mark.query()
        assert int(total) == 10
        assert (count.waits, mark.query()) == (["_local_scalar_dense"], True)
        mark.synchronize()  # nothing is under way
        ids.cpu()
        torch.nonzero(ids)
        ids[ids > 3]
        assert count.waits[1:] == ["cpu", "nonzero", "index"]
        torch.empty(8, dtype=torch.uint8, pin_memory=True).copy_(torch.zeros(8, dtype=torch.uint8))
        assert count.sent_bytes == 48
        with count.silent():
            ids.cpu()
        assert len(count.waits) == 4


def test_the_device_is_taken_out_of_a_step() -> None:
    def event(name: str, us: float, above: Any = None) -> Any:
        return SimpleNamespace(name=name, cpu_parent=above, time_range=SimpleNamespace(elapsed_us=lambda: us))

    node = event("autograd::engine::evaluate_function", 100)
    sort = event("aten::sort", 20, node)
    twin = event("device plan", 30, node)
    events = [node, sort, event("aten::copy_", 5, sort), twin, event("aten::index", 9, twin)]
    # Views and allocations are the host's.
    events += [event("aten::view", 3, node), event("aten::empty_like", 4, node), event("aten::sum", 1)]
    assert hbm_worker._device_us(events) == 20 + 1  # a twin's time is taken where it is called


def test_without_the_earlier_commit_there_is_no_before(tmp_path: Path) -> None:
    roots, missing = hbm._roots(Run(config={"earlier": "0000000"}, quick=True, folder=tmp_path))
    assert list(roots) == ["now"]
    assert "no commit 0000000" in missing
    counts = {kind: {"now": {"launches": ["a"], "waits": []}} for kind in hbm._KINDS}
    cases = [{"kind": "all", "batch": 2, "now": {"sent_bytes_a_position": 8.0, "host_us_least": 5.0}}]
    goals = hbm._goals(counts, cases, has_before=False)
    assert [goal.met for goal in goals] == [True] * 6


def test_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", minversion="3.3")
    # What machine_code.py finds has tests of its own, and takes long.
    found = {"registers": 40, "spills": 0, "shared_bytes": 8, "occupancy": 0.5, "loops": [{"barriers": 1}]}
    compiled = {"a": {"kernel": "k"} | found, "b": {"kernel": "k"} | found | {"registers": 50, "loops": []}}
    monkeypatch.setattr(hbm, "_compiled", lambda: compiled)
    report = hbm.run(Run(config=CONFIG | QUICK, quick=True, folder=tmp_path))
    for table in report.tables:
        assert all(len(row) == len(table.columns) for row in table.rows)
    json.dumps(report.figures, allow_nan=False)
    assert report.tables[1].rows == [["k", "2", "40 to 50", "0", "8", "50", "1"]]
    counts = report.figures["counts"]
    assert len(counts["all"]["now"]["launches"]) <= hbm._LAUNCHES_MAX["all"]
    assert counts["all"]["now"]["waits"] == []
    assert all(case["now"]["host_us_least"] > 0 for case in report.figures["cases"])
