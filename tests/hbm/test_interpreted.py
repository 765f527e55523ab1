"""The whole tier with its Triton kernels, on the CPU under Triton's interpreter: the bits of the plain CPU path.

Without prefetching: the interpreter runs one kernel at a time, whatever the threads.
"""

import os
from pathlib import Path

import pytest
import torch

from tests.hbm import test_order
from tierstore.hbm import base, cache, cache_triton, grouping, grouping_triton, rows_triton
from tierstore.store import arguments

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 when kernels are defined"
)


@pytest.mark.parametrize(
    ("policy", "budget", "is_there"), [("lru", "12KiB", False), ("lfu", "12KiB", True), ("lru", "64KiB", True)]
)
def test_training_with_triton_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, budget: str, is_there: bool
) -> None:
    expected = test_order.train(tmp_path / "plain", depth=0, steps=4)
    monkeypatch.setattr(cache, "_kernels_for", lambda _: cache_triton)
    monkeypatch.setattr(grouping, "_kernels_for", lambda _: grouping_triton)
    monkeypatch.setattr(base, "_kernels_for", lambda _: rows_triton)
    monkeypatch.setattr(arguments, "is_there", lambda *_: is_there)
    ended = test_order.train(tmp_path / policy, depth=0, steps=4, hbm=budget, policy=policy)
    assert torch.equal(ended, expected)
