"""Cost models, against laws they are to find, and their files."""

import json
from pathlib import Path

import numpy as np
import pytest

from tierstore.plan.placement import (
    LearnedCost,
    LinearCost,
    LookupShape,
    Measurement,
    Timing,
    accuracy,
    fit_cost,
    read_cost,
    read_measurements,
    write_cost,
    write_measurements,
)
from tierstore.plan.placement.timing import designed_shapes

SHAPES = designed_shapes(Timing(count=120, seed=4))


def linear_law(shape: LookupShape) -> float:
    return 3e-6 + shape.lookups * shape.weight_bytes / 5e9


def power_law(shape: LookupShape) -> float:
    """What no line fits: tables beyond a cache's size cost more a byte, the smoother the larger."""
    beyond = shape.num_embeddings * shape.weight_bytes / 2e6
    return 1e-9 * shape.lookups**0.9 * shape.weight_bytes**0.7 * (1 + beyond) ** 0.3 * shape.batch_samples**0.1


def measured(law: object, noise: float = 0.0) -> list[Measurement]:
    generator = np.random.default_rng(0)
    found = []
    for shape in SHAPES:
        seconds = law(shape) * float(np.exp(noise * generator.standard_normal()))  # type: ignore[operator]
        found.append(Measurement(shape, 0.4 * seconds, 0.6 * seconds))
    return found


def test_linear_cost_by_hand() -> None:
    shape = LookupShape(1000, 16, 2.0, 8, 1.0, 64)
    cost = LinearCost(bytes_per_s=1024.0, table_s=0.5, link_bytes_per_s=64.0)
    # 16 ids of 64 bytes; 128 bytes of ids and 512 of results over the link.
    assert cost.seconds([shape]).tolist() == [1.0 + 0.5 + 10.0]
    assert cost.seconds([]).tolist() == []


def test_a_line_is_found() -> None:
    cost = LinearCost.fit(measured(linear_law))
    assert cost.bytes_per_s == pytest.approx(5e9)
    assert cost.table_s == pytest.approx(3e-6)


def test_a_line_has_no_negative_start() -> None:
    def late(shape: LookupShape) -> float:
        return (shape.lookups * shape.weight_bytes) ** 1.2

    cost = LinearCost.fit(measured(late))
    assert cost.table_s == 0
    assert cost.bytes_per_s > 0


def test_the_learned_cost_finds_what_a_line_cannot() -> None:
    train, test = measured(power_law)[:80], measured(power_law)[80:]
    shapes = [each.shape for each in test]
    seconds = np.array([each.seconds for each in test])
    learned = accuracy(fit_cost(train).seconds(shapes), seconds)
    line = accuracy(LinearCost.fit(train).seconds(shapes), seconds)
    assert learned.median < 0.05
    assert learned.median < line.median / 5


def test_noise_is_not_learned() -> None:
    """The penalty keeps a fit to noisy times near the law; cross-validation tells the error that new ones have."""
    noisy = measured(power_law, noise=0.1)
    cost = fit_cost(noisy)
    truth = np.array([power_law(shape) for shape in SHAPES])
    assert accuracy(cost.seconds(SHAPES), truth).median < 0.08
    assert 0.04 < cost.cross_validated.median < 0.15


def test_accuracy_by_hand() -> None:
    found = accuracy(np.array([1.1, 1.0, 0.5]), np.array([1.0, 1.0, 1.0]))
    assert found.median == pytest.approx(0.1)
    assert found.worst == pytest.approx(0.5)
    assert found.bias == pytest.approx(2.6 / 3 - 1)


def test_far_outside_it_stays_near_the_edge() -> None:
    cost = fit_cost(measured(power_law))
    huge = LookupShape(1 << 40, 1 << 14, 1e4, 1 << 20, 9.0, 1 << 16)
    assert not cost.is_known(huge)
    assert cost.is_known(SHAPES[0])
    assert np.isfinite(cost.seconds([huge])).all()
    assert cost.seconds([huge])[0] > 0
    assert cost.seconds([]).tolist() == []


def test_the_link_adds() -> None:
    shape = SHAPES[0]
    near, far = (fit_cost(measured(power_law), link_bytes_per_s=rate) for rate in (1e18, 1e3))
    link = (8 * shape.lookups + 4 * shape.embedding_dim * shape.batch_samples) / 1e3
    assert (far.seconds([shape]) - near.seconds([shape]))[0] == pytest.approx(link)


def test_files_hold_all(tmp_path: Path) -> None:
    measurements = tuple(measured(power_law))
    write_measurements(measurements, tmp_path / "times.json")
    assert read_measurements(tmp_path / "times.json") == measurements
    cost = fit_cost(measurements)
    write_cost(cost, tmp_path / "cost.json")
    again = read_cost(tmp_path / "cost.json")
    assert again.seconds(SHAPES).tolist() == cost.seconds(SHAPES).tolist()
    assert again.cross_validated == cost.cross_validated
    assert again.to_dict() == cost.to_dict() == LearnedCost.from_dict(cost.to_dict()).to_dict()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"kind": "x"}', b"\xff", b"[" * 100_000])
def test_files_that_hold_something_else(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    for read in (read_cost, read_measurements):
        with pytest.raises(ValueError, match=r"file\.json"):
            read(path)


@pytest.mark.parametrize("change", [{"weights": [1.0]}, {"scale": None}, {"features": ["rows"]}, {"penalty": "high"}])
def test_a_changed_cost_file(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "cost.json"
    write_cost(fit_cost(measured(power_law)), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=r"cost\.json"):
        read_cost(path)


@pytest.mark.parametrize("row", [[1] * 8, [1, 1, 1, 1, 1, 1, 1, 1, "x"], [0] * 9, [True] * 9, [1] * 8 + [-1], "x"])
def test_a_changed_file_of_measurements(tmp_path: Path, row: object) -> None:
    path = tmp_path / "times.json"
    write_measurements(measured(linear_law), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rows": [row]}))
    with pytest.raises(ValueError, match="rows must be lists of 9 numbers"):
        read_measurements(path)


def test_what_a_call_takes_is_not_the_tables() -> None:
    """Times of a law on top of a call's are fitted to the law; those hardly above it count little."""
    call = 2e-4
    jitter = np.random.default_rng(1).uniform(0.9, 1.1, len(SHAPES)) * 1e-5
    laid_on = [
        each._replace(forward_s=each.forward_s + call + extra, call_s=call)
        for each, extra in zip(measured(power_law), jitter.tolist(), strict=True)
    ]
    assert laid_on[0].seconds == pytest.approx(power_law(SHAPES[0]) + jitter[0])
    assert Measurement(SHAPES[0], 1e-4, 0.0, 2e-4).seconds == 1e-6
    large = [shape for shape in SHAPES if power_law(shape) > call]
    truth = np.array([power_law(shape) for shape in large])
    assert accuracy(fit_cost(laid_on).seconds(large), truth).median < 0.08
    line = [each._replace(forward_s=each.forward_s + call, call_s=call) for each in measured(linear_law)]
    assert LinearCost.fit(line).bytes_per_s == pytest.approx(5e9)


def test_too_few_or_wrong_measurements() -> None:
    with pytest.raises(ValueError, match="9 measurements; at least 10"):
        fit_cost(measured(linear_law)[:9])
    with pytest.raises(ValueError, match="above 0"):
        fit_cost([Measurement(shape, 0.0, 0.0) for shape in SHAPES])
