"""What is counted: the exposition as Prometheus's own parser reads it, against an independent count."""

import math
import random
from collections import Counter, defaultdict

import numpy as np
import orjson
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.monitored import Clock, FakeSource
from tierstore.serve.messages import Status
from tierstore.serve.monitoring.app import snapshot
from tierstore.serve.monitoring.metrics import Metrics, StateCollector, Window, summarize

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def series(metrics: Metrics) -> Series:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.expose().decode())
        for sample in family.samples
    }


def value(found: Series, name: str, **labels: str) -> float:
    return found[f"tierstore_{name}", frozenset({"worker": "0", **labels}.items())]


def require_histogram(found: Series, name: str, values: list[float], **labels: str) -> None:
    """The count of each bucket and the sum are those of ``values``."""
    assert value(found, f"{name}_count", **labels) == len(values)
    assert value(found, f"{name}_sum", **labels) == pytest.approx(math.fsum(values))
    wanted = {("worker", "0"), *labels.items()}
    for (each, pairs), count in found.items():
        if each == f"tierstore_{name}_bucket" and wanted <= pairs:
            assert count == sum(each <= float(dict(pairs)["le"]) for each in values), (name, pairs)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> Metrics:
    return Metrics(["dlrm", "items"], clock=clock)


def test_all_that_happens_is_counted(metrics: Metrics, clock: Clock) -> None:
    """And clients cannot make up series: models that are none are counted as one."""
    chance = random.Random(1)
    seconds_of: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    batches: dict[str, list[tuple[int, int, list[float], float]]] = defaultdict(list)
    refused: Counter[tuple[str, str]] = Counter()
    ids: Counter[str] = Counter()
    updates: list[float] = []
    for number in range(1000):
        name = chance.choice(["dlrm", "items", f"made up {number}"])
        model, protocol = "other" if name[0] == "m" else name, chance.choice(["http", "grpc"])
        status = chance.choice([None, None, *Status])
        # Bounds themselves too: a bucket holds what is at most its bound.
        seconds = chance.choice([0.001, 0.064, 10.0, chance.lognormvariate(-5, 2)])
        metrics.answered(name, protocol, status, seconds)
        seconds_of[model, protocol, status.name.lower() if status else "ok"].append(seconds)
        if number % 10 == 0 and model != "items":
            batch = (chance.randrange(1, 9), chance.randrange(1, 5000), [seconds, 0.1], seconds / 2)
            metrics.batched(name, *batch)
            batches[model].append(batch)
            metrics.out_of_range(name, number)
            ids[model] += number
        if number % 20 == 0:
            metrics.refused(protocol, Status.INVALID)
            refused[protocol, "invalid"] += 1
            metrics.updated(number, seconds)
            updates.append(seconds)
            metrics.update_failed()
    found = series(metrics)
    for (model, protocol, status_name), told in seconds_of.items():
        require_histogram(found, "request_seconds", told, model=model, protocol=protocol, status=status_name)
    assert not any(value.startswith("made up") for _, labels in found for _, value in labels)
    for model, told in batches.items():
        queries, samples, waits, computes = zip(*told, strict=True)
        for name, numbers in (("batch_queries", queries), ("batch_samples", samples)):
            assert value(found, f"{name}_count", model=model) == len(numbers)
            assert value(found, f"{name}_sum", model=model) == sum(numbers)
        require_histogram(found, "queue_seconds", [each for part in waits for each in part], model=model)
        require_histogram(found, "compute_seconds", list(computes), model=model)
        assert value(found, "ids_out_of_range_total", model=model) == ids[model]
    assert value(found, "batch_queries_count", model="items") == 0
    for (protocol, status_name), count in refused.items():
        assert value(found, "refused_requests_total", protocol=protocol, status=status_name) == count
    require_histogram(found, "update_seconds", updates)
    assert value(found, "update_failures_total") == len(updates)
    clock.now += 2
    about = snapshot(metrics, FakeSource())  # which says the same
    assert [model["name"] for model in about["models"]] == ["dlrm", "items", "other"]
    for model in about["models"]:
        told = {key: each for key, each in seconds_of.items() if key[0] == model["name"]}
        num_failed = sum(len(each) for key, each in told.items() if key[2] != "ok")
        assert (model["total"], model["failed"]) == (sum(map(len, told.values())), num_failed)
        assert model["ids_out_of_range"] == ids[model["name"]]
    assert about["requests"]["total"] == 1000
    assert {(each["protocol"], each["status"]): each["count"] for each in about["requests"]["refused"]} == refused
    assert about["version"]["last_update"]["age_seconds"] == about["server"]["uptime_seconds"] == 2
    assert (about["tiers"][0]["hit_rate"], about["tiers"][1]["hit_rate"]) == (None, 0.75)
    assert orjson.loads(orjson.dumps(about)) == about


def test_a_batchs_time_counts_for_each_of_its_requests(metrics: Metrics) -> None:
    metrics.batched("dlrm", 3, 50, [0.25, 0.5, 1.0], 2.0)
    metrics.batched("dlrm", 1, 7, [0.25], 4.0)
    metrics.answered("dlrm", "http", None, 3.0)
    metrics.answered("dlrm", "grpc", None, 5.0)
    metrics.answered("dlrm", "grpc", Status.DEADLINE, 7.0)
    found = metrics.statistics("dlrm")
    assert (found["inference_count"], found["execution_count"]) == (2, 2)
    spent = {"success": (2, 8), "fail": (1, 7), "queue": (4, 2), "compute_infer": (4, 10)}
    spent |= {"compute_input": (4, 0), "compute_output": (4, 0), "cache_hit": (0, 0), "cache_miss": (0, 0)}
    wanted = {name: {"count": count, "ns": seconds * 10**9} for name, (count, seconds) in spent.items()}
    assert found["inference_stats"] == wanted
    assert found["last_inference"] > 1.7e12
    assert metrics.statistics("items")["last_inference"] == 0


def test_the_exposition_stays_small_with_many_models_and_every_series_tells_its_worker() -> None:
    """26 tables with their rows and bags, "ranking", "pooled" and "rows": unasked, and all asked over one protocol."""
    names = [f"{kind}.C{index}" for kind in ("pooled", "rows") for index in range(26)] + ["ranking", "pooled", "rows"]
    metrics = Metrics(names, worker=3)
    metrics.add(StateCollector(FakeSource()))
    idle = len(metrics.expose().splitlines())
    assert idle < 440
    for name in names:
        metrics.answered(name, "http", None, 0.1)
        metrics.batched(name, 1, 1, [0.1], 0.1)
    assert len(metrics.expose().splitlines()) - idle == len(names) * 3 * 19
    found = series(metrics)
    assert all(("worker", "3") in labels for _, labels in found)
    assert found["process_resident_memory_bytes", frozenset({("worker", "3")})] > 10 << 20
    assert not any(name.startswith("tierstore_request") for name, _ in series(Metrics(["dlrm"])))
    assert b"tierstore" not in prometheus_client.generate_latest(), "registries are apart"


def test_only_the_last_minute_counts_and_its_quantiles_are_exact(clock: Clock) -> None:
    window, chance = Window(clock), random.Random(4)
    told: dict[int, list[float]] = defaultdict(list)
    for _ in range(400):
        for _ in range(chance.randrange(4)):
            told[int(clock.now)].append(chance.lognormvariate(-5, 1.5))
            window.add("dlrm", told[int(clock.now)][-1], failed=False)
        clock.now += chance.choice([0.3, 0.7, 1.0, 1.0, 5.0, 70.0 if chance.random() < 0.05 else 0.5])
        now = int(clock.now)
        expected = [told[each] for each in range(max(now - 60, 1000), now)]
        found = [second.get("dlrm", np.empty(0)) for second in window.seconds()]
        assert [len(each) for each in found] == [len(each) for each in expected]
        latencies = [seconds for each in expected for seconds in each]
        assert summarize(found)[:2] == (len(latencies) / (len(expected) or 1), 0)
        for fraction, quantile in zip((0.5, 0.95, 0.99), summarize(found)[2:], strict=True):
            assert quantile == (np.quantile(latencies, fraction, method="inverted_cdf") if latencies else None)
