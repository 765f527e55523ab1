"""What is counted: the exposition as Prometheus's own parser reads it, against an independent count."""

import math
import random
import sys
import threading
import time
from collections import Counter

import numpy as np
import orjson
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.monitored import Clock, FakeSource
from tierstore.pool.stats import Stats, TierStats
from tierstore.serve.messages import Status
from tierstore.serve.monitoring.metrics import Metrics
from tierstore.serve.monitoring.status import snapshot
from tierstore.serve.monitoring.window import Latencies, Window, summarize
from tierstore.serve.source import StateCollector

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def series(metrics: Metrics) -> Series:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.expose().decode())
        for sample in family.samples
    }


def value(found: Series, name: str, **labels: str) -> float:
    return found[name, frozenset({"worker": "0", **labels}.items())]


def assert_histogram(found: Series, name: str, values: list[float], **labels: str) -> None:
    """The count of each bucket and the sum are those of ``values``."""
    assert value(found, f"{name}_count", **labels) == len(values)
    assert value(found, f"{name}_sum", **labels) == pytest.approx(math.fsum(values))
    wanted = {("worker", "0"), *labels.items()}
    bounds = {
        dict(pairs)["le"]: count
        for (each, pairs), count in found.items()
        if each == f"{name}_bucket" and wanted <= pairs
    }
    assert "+Inf" in bounds
    for bound, count in bounds.items():
        assert count == sum(each <= float(bound) for each in values), (name, bound)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> Metrics:
    return Metrics(["dlrm", "items"], clock=clock)


def test_requests_are_counted_by_model_protocol_and_status(metrics: Metrics) -> None:
    chance = random.Random(1)
    told: dict[tuple[str, str, str], list[float]] = {}
    for _ in range(3000):
        model, protocol = chance.choice(["dlrm", "items"]), chance.choice(["http", "grpc"])
        status = chance.choice([None, None, *Status])
        # Bounds themselves too: a bucket holds what is at most its bound.
        seconds = chance.choice([0.001, 0.064, 10.0, chance.lognormvariate(-5, 2)])
        metrics.answered(model, protocol, status, seconds)
        told.setdefault((model, protocol, status.name.lower() if status else "ok"), []).append(seconds)
    found = series(metrics)
    for (model, protocol, status_name), seconds_told in told.items():
        labels = {"model": model, "protocol": protocol, "status": status_name}
        assert_histogram(found, "tierstore_request_seconds", seconds_told, **labels)
    assert len(told) == 2 * 2 * (1 + len(Status))


def test_batches_are_counted_by_model(metrics: Metrics) -> None:
    chance = random.Random(2)
    queries, samples, waits, computes = [], [], [], []
    for _ in range(200):
        queries.append(chance.randrange(1, 100))
        samples.append(chance.randrange(1, 5000))
        computes.append(chance.lognormvariate(-5, 1))
        waited = [chance.lognormvariate(-6, 1) for _ in range(queries[-1])]
        waits += waited
        metrics.batched("dlrm", queries[-1], samples[-1], waited, computes[-1])
    found = series(metrics)
    for name, told in (("batch_queries", queries), ("batch_samples", samples)):
        assert value(found, f"tierstore_{name}_count", model="dlrm") == len(told)
        assert value(found, f"tierstore_{name}_sum", model="dlrm") == sum(told)
        assert value(found, f"tierstore_{name}_count", model="items") == 0
    assert_histogram(found, "tierstore_queue_seconds", waits, model="dlrm")
    assert_histogram(found, "tierstore_compute_seconds", computes, model="dlrm")
    assert not any(("model", "items") in labels for name, labels in found if "_seconds" in name)


def test_the_rest_is_counted(metrics: Metrics) -> None:
    metrics.refused("http", Status.INVALID)
    metrics.refused("http", Status.INVALID)
    metrics.refused("grpc", Status.TOO_LARGE)
    metrics.updated(8, 0.5)
    metrics.updated(9, 1.5)
    metrics.update_failed()
    metrics.out_of_range("dlrm", 3)
    metrics.out_of_range("dlrm", 4)
    found = series(metrics)
    assert value(found, "tierstore_refused_requests_total", protocol="http", status="invalid") == 2
    assert value(found, "tierstore_refused_requests_total", protocol="grpc", status="too_large") == 1
    assert_histogram(found, "tierstore_update_seconds", [0.5, 1.5])
    assert value(found, "tierstore_update_failures_total") == 1
    assert value(found, "tierstore_ids_out_of_range_total", model="dlrm") == 7
    assert value(found, "tierstore_ids_out_of_range_total", model="items") == 0
    assert metrics.last_update is not None
    assert metrics.last_update[:2] == (9, 1.5)


def test_a_source_is_read_at_each_scrape(metrics: Metrics) -> None:
    source = FakeSource()
    metrics.add(StateCollector(source))
    found = series(metrics)
    for tier, stats in source.tiers._asdict().items():
        for field in ("lookups", "hits", "misses", "evictions", "bytes_read"):
            assert value(found, f"tierstore_tier_{field}_total", tier=tier) == getattr(stats, field)
        for field in ("bytes", "capacity_rows"):
            assert value(found, f"tierstore_tier_{field}", tier=tier) == getattr(stats, field)
    assert value(found, "tierstore_version") == 7
    assert value(found, "tierstore_newest_version") == 9
    assert value(found, "tierstore_staleness_seconds") == 2.5
    assert value(found, "tierstore_queued_samples", model="dlrm") == 17
    assert (value(found, "tierstore_live"), value(found, "tierstore_ready")) == (1, 1)

    source.tiers = Stats(TierStats(hits=5), TierStats(), TierStats())
    source.version, source.is_ready = 8, False
    found = series(metrics)
    assert value(found, "tierstore_tier_hits_total", tier="hbm") == 5
    assert value(found, "tierstore_version") == 8
    assert value(found, "tierstore_ready") == 0


def test_the_exposition_stays_small_with_many_models() -> None:
    """26 tables with their rows and bags, "ranking", "pooled" and "rows": unasked, and all asked over one protocol."""
    names = [f"{kind}.C{index}" for kind in ("pooled", "rows") for index in range(26)] + ["ranking", "pooled", "rows"]
    metrics = Metrics(names)
    idle = len(metrics.expose().splitlines())
    assert idle < 400
    for name in names:
        metrics.answered(name, "http", None, 0.1)
        metrics.batched(name, 1, 1, [0.1], 0.1)
    assert len(metrics.expose().splitlines()) - idle == len(names) * 3 * 19


def test_names_follow_the_conventions(metrics: Metrics) -> None:
    metrics.add(StateCollector(FakeSource()))
    metrics.answered("dlrm", "http", None, 0.1)
    text = metrics.expose().decode()
    families = list(text_string_to_metric_families(text))
    assert len(families) > 25
    for family in families:
        assert family.name.startswith(("tierstore_", "process_")), family.name
        assert family.documentation
        assert family.type in ("counter", "gauge", "histogram", "summary")
        assert not family.name.endswith(("_ms", "_us", "_milliseconds", "_mib"))
        assert family.type != "counter" or all(sample.name.endswith("_total") for sample in family.samples)
    assert "_created" not in text


def test_every_series_tells_its_worker() -> None:
    metrics = Metrics(["dlrm"], worker=3)
    metrics.add(StateCollector(FakeSource()))
    metrics.answered("dlrm", "http", None, 0.1)
    found = series(metrics)
    assert all(("worker", "3") in labels for _, labels in found)
    resident = found["process_resident_memory_bytes", frozenset({("worker", "3")})]
    assert resident > 10 << 20
    assert found["process_start_time_seconds", frozenset({("worker", "3")})] <= time.time()


def test_clients_cannot_make_up_series(metrics: Metrics) -> None:
    metrics.answered("made up", "http", None, 0.1)
    metrics.batched("made up", 1, 1, [0.1], 0.1)
    metrics.out_of_range("made up", 1)
    before = set(series(metrics))
    for index in range(500):
        metrics.answered(f"name {index}", "http", None, 0.1)
        metrics.batched(f"name {index}", 1, 1, [0.1], 0.1)
        metrics.out_of_range(f"name {index}", 1)
    found = series(metrics)
    assert set(found) == before
    assert value(found, "tierstore_request_seconds_count", model="other", protocol="http", status="ok") == 501
    assert value(found, "tierstore_ids_out_of_range_total", model="other") == 501


def test_registries_are_apart(metrics: Metrics) -> None:
    metrics.answered("dlrm", "http", None, 0.1)
    assert not any(name.startswith("tierstore_request") for name, _ in series(Metrics(["dlrm"])))
    assert b"tierstore" not in prometheus_client.generate_latest()


def test_no_count_is_lost_between_threads() -> None:
    metrics = Metrics(["dlrm"])
    per_thread, interval = 3000, sys.getswitchinterval()

    def work() -> None:
        for _ in range(per_thread):
            metrics.answered("dlrm", "http", None, 0.5)
            metrics.batched("dlrm", 1, 2, [0.5], 0.5)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    found = series(metrics)
    assert value(found, "tierstore_request_seconds_sum", model="dlrm", protocol="http", status="ok") == 2 * per_thread
    assert value(found, "tierstore_batch_samples_sum", model="dlrm") == 8 * per_thread
    assert value(found, "tierstore_queue_seconds_count", model="dlrm") == 4 * per_thread


# The last minute


def of_model(window: Window, model: str = "dlrm") -> list[Latencies]:
    return [second.get(model, np.empty(0)) for second in window.seconds()]


def test_quantiles_are_exact(clock: Clock) -> None:
    window = Window(clock)
    latencies = np.random.default_rng(3).lognormal(-5, 1.5, 4000)
    for seconds in latencies:
        window.add("dlrm", float(seconds), failed=False)
    window.add("dlrm", 1e6, failed=True)
    clock.now += 1
    recent = summarize(of_model(window))
    for fraction, found in ((0.5, recent.seconds_p50), (0.95, recent.seconds_p95), (0.99, recent.seconds_p99)):
        assert found == np.quantile(latencies, fraction, method="inverted_cdf")


def test_only_the_last_minute_counts(clock: Clock) -> None:
    window = Window(clock)
    told: Counter[int] = Counter()
    chance = random.Random(4)
    for _ in range(400):
        second = int(clock.now)
        for _ in range(chance.randrange(4)):
            window.add("dlrm", 0.01, failed=False)
            told[second] += 1
        clock.now += chance.choice([0.3, 0.7, 1.0, 1.0, 5.0, 70.0 if chance.random() < 0.05 else 0.5])
        now = int(clock.now)
        expected = [told[each] for each in range(max(now - 60, 1000), now)]
        assert [len(each) for each in of_model(window)] == expected
        assert not sum(map(len, of_model(window, "items")))
        assert len(window._told) <= 62


def test_rates_are_of_whole_seconds(clock: Clock) -> None:
    window = Window(clock)
    assert summarize(of_model(window)) == (0, 0, None, None, None)
    for failed in (True, False, False):
        window.add("dlrm", 0.01, failed=failed)
    assert len(window.seconds()) == 0
    clock.now += 2
    assert summarize(of_model(window))[:3] == (1.5, 0.5, 0.01)
    assert [summarize([each]) for each in of_model(window)] == [(3, 1, 0.01, 0.01, 0.01), (0, 0, None, None, None)]


# The status document


def test_snapshot_tells_what_was_recorded(metrics: Metrics, clock: Clock) -> None:
    for _ in range(30):
        metrics.answered("dlrm", "http", None, 0.004)
    for _ in range(10):
        metrics.answered("items", "grpc", Status.DEADLINE, 0.2)
    metrics.batched("dlrm", 2, 400, [0.001, 0.003], 0.02)
    metrics.updated(7, 0.25)
    metrics.refused("grpc", Status.TOO_LARGE)
    metrics.out_of_range("items", 6)
    clock.now += 2
    source = FakeSource()
    found = snapshot(metrics, source)
    dlrm, items = found["models"]
    assert (dlrm["name"], dlrm["total"], dlrm["failed"], dlrm["queued_samples"]) == ("dlrm", 30, 0, 17)
    assert (items["name"], items["total"], items["failed"], items["ids_out_of_range"]) == ("items", 10, 10, 6)
    assert dlrm["recent"]["requests_per_second"] == 15
    assert dlrm["recent"]["seconds_p99"] == 0.004
    assert items["recent"]["seconds_p99"] is None
    assert dlrm["history"]["requests"] == [30, 0]
    assert (dlrm["batch_samples_mean"], dlrm["queue_seconds_mean"]) == (400, 0.002)
    assert items["batch_samples_mean"] is None
    requests = found["requests"]
    assert (requests["total"], requests["failed"]) == (40, 10)
    assert requests["by_status"] == {"ok": 30, "deadline": 10}
    assert requests["refused"] == [{"protocol": "grpc", "status": "too_large", "count": 1}]
    assert requests["recent"]["failed_per_second"] == 5
    assert found["version"]["last_update"] == {"version": 7, "seconds": 0.25, "age_seconds": 2}
    assert found["tiers"][1]["hit_rate"] == 0.75
    assert found["tiers"][0]["hit_rate"] is None
    assert found["server"]["uptime_seconds"] == 2
    assert orjson.loads(orjson.dumps(found)) == found


def test_names_that_no_model_has_are_shown_once_asked_for(metrics: Metrics) -> None:
    source = FakeSource()
    assert [model["name"] for model in snapshot(metrics, source)["models"]] == ["dlrm", "items"]
    metrics.answered("made up", "http", Status.NOT_FOUND, 0.001)
    assert [model["name"] for model in snapshot(metrics, source)["models"]] == ["dlrm", "items", "other"]


def test_a_model_may_be_named_other() -> None:
    metrics, source = Metrics(["other"]), FakeSource()
    source.queued = {"other": 0}
    metrics.answered("other", "http", None, 0.1)
    metrics.answered("made up", "http", None, 0.1)
    (model,) = snapshot(metrics, source)["models"]
    assert model["total"] == 2
