"""What is in a trace, counted in plain Python."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from tests.packed import random_trace
from tierstore.plan.traces import describe
from tierstore.trace import TableTrace, Trace

TRACE = random_trace({"item": 300, "user": 40}, seed=5)


def counted(ids: list[int]) -> tuple[int, int, float, int]:
    """(accesses, rows, share of the top hundredth, used once)."""
    uses = Counter(ids)
    top = sum(count for _, count in uses.most_common(math.ceil(len(uses) / 100)))
    return len(ids), len(uses), top / len(ids), sum(count == 1 for count in uses.values())


def traced(tables: dict[str, list[int]], **more: Any) -> Trace:
    """All of a table's ids in one sample."""
    found = {name: TableTrace(np.array(ids, np.int64), np.array([0, len(ids)])) for name, ids in tables.items()}
    return Trace(tables=found, batch_samples=1, **more)


def test_each_table_is_counted() -> None:
    found = describe(TRACE)
    for table, name in zip(found.tables, TRACE.tables, strict=True):
        ids = TRACE.tables[name].ids.tolist()
        assert table.name == name
        assert (table.accesses, table.rows, table.top_share, table.used_once) == counted(ids)
        assert table.ids_a_sample == len(ids) / TRACE.num_samples
    assert found.batches == math.ceil(TRACE.num_samples / TRACE.batch_samples)
    assert found.samples == TRACE.num_samples


def test_text() -> None:
    lines = describe(traced({"item": [0, 0, 0, 1], "\x1b[31muser": [0]})).text().splitlines()
    assert lines[0] == "5 accesses of 3 rows; tables: 2, batches: 1, samples: 1"
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:] if line}
    assert rows["table"] == ["accesses", "rows", "ids/sample", "top", "1", "%", "used", "once"]
    assert rows["item"] == ["4", "2", "4", "75.0", "%", "50.0", "%"]
    assert rows["all"] == ["5", "3", "5", "60.0", "%", "66.7", "%"]
    assert not any("\x1b" in line for line in lines)
    assert max(map(len, lines)) <= 100


def test_a_sample_that_says_how_much_was_looked_up_in_all() -> None:
    sampled = replace(TRACE, sampling_rate=0.1, all_lookups=(1_234_567_890, 400))
    found = describe(sampled)
    assert [each.all_accesses for each in (*found.tables, found.total)] == [1_234_567_890, 400, 1_234_568_290]
    assert found.total.accesses == sampled.num_lookups
    lines = found.text().splitlines()
    assert lines[1].endswith(", and 1,234,568,290 accesses")
    rows = {line.split()[0]: line.split() for line in lines[2:] if line}
    assert rows["table"][-2:] == ["all", "accesses"]
    assert (rows["user"][1], rows["user"][-1]) == (f"{len(TRACE.tables['user'].ids):,}", "400")
    assert max(map(len, lines)) <= 100
    assert describe(TRACE).total.all_accesses == TRACE.num_lookups
    assert describe(replace(sampled, all_lookups=None)).total.all_accesses is None
