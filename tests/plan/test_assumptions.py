"""What a plan assumes is told before its answer, with what the answer becomes if it is off by two."""

import re
from pathlib import Path

import pytest

from bench.data import ROOT
from tests.plan.hosts import SHOP_HOST
from tierstore.plan import plan_file
from tierstore.plan.parts import write_host
from tierstore.plan.plan_file import PlanFile, workload_of
from tierstore.plan.planning import plan
from tierstore.plan.prediction import Prediction
from tierstore.plan.presets import load_workload
from tierstore.plan.report import describe
from tierstore.plan.traces import generate
from tierstore.plan.what_if import FACTORS
from tierstore.trace import write_trace

TABLES = '[[table]]\nname = "item"\nnum_embeddings = 40_000\nembedding_dim = 16\n'
PAGE = (ROOT / "docs" / "planning.md").read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_host(SHOP_HOST, tmp_path / "box.json")
    (tmp_path / "bare.toml").write_text('[workload]\nbatch_samples = 256\noptimizer = "sgd"\n' + TABLES)
    return tmp_path


def asked(folder: Path, *overrides: str) -> PlanFile:
    path = folder / "plan.toml"
    path.write_text(f'[workload]\nfile = "{folder}/bare.toml"\n[host]\nfile = "{folder}/box.json"\n')
    return plan_file.load(path, [plan_file.parse_override(text) for text in overrides])


@pytest.mark.parametrize("target", ["setup.ddr=1MiB", "target.samples_per_s=1000"])
def test_each_is_told_with_the_answers_to_half_and_twice_of_it(folder: Path, target: str) -> None:
    keys = [target, "search.memory_shares=[0.001, 0.01]"]
    found = plan(asked(folder, *keys))
    assert [each.figure for each in found.assumptions] == ["dense_flops", "pooling_factor", "exponent"]
    assert next(iter(found.to_dict())) == "assumptions"
    for each in found.assumptions:
        for factor, then in zip(FACTORS, each.what_if, strict=True):
            if each.figure == "dense_flops":
                own = plan(asked(folder, *keys, f"workload.dense_flops={factor * each.value}")).prediction
            else:
                own = _with_key(folder, keys, each.figure, factor * each.value)
            assert then.prediction is not None
            assert (then.prediction.samples_per_s, then.prediction.price) == (own.samples_per_s, own.price)
            assert then.prediction.bottleneck == own.bottleneck


def _with_key(folder: Path, keys: list[str], figure: str, value: float) -> Prediction:
    text = (folder / "bare.toml").read_text()
    (folder / "bare.toml").write_text(f"{text}{figure} = {value}\n")
    result = plan(asked(folder, *keys))
    (folder / "bare.toml").write_text(text)
    assert figure not in [each.figure for each in result.assumptions]
    return result.prediction


def test_what_is_given_or_in_a_trace_is_not_assumed(folder: Path) -> None:
    write_trace(generate(load_workload(folder / "bare.toml"), samples=256 * 3, seed=0), folder / "t.npz")
    traced = plan(asked(folder, "setup.ddr=1MiB", f"trace.path={folder}/t.npz"))
    assert [each.figure for each in traced.assumptions] == ["dense_flops"]
    (folder / "bare.toml").write_text(TABLES + "pooling_factor = 2\nexponent = 0\n")
    given = plan(asked(folder, "setup.ddr=1MiB", "workload.dense_flops=1"))
    assert given.assumptions == ()
    assert "Assumed" not in describe(given)


def test_flops_that_are_given_are_those_of_no_known_layers(folder: Path) -> None:
    (folder / "bare.toml").write_text("[workload]\ndense_flops = 5\ndense_products = 9\ndense_values = 70\n" + TABLES)
    assert workload_of(asked(folder)).dense == (5, 9, 70)
    assert workload_of(asked(folder, "workload.dense_flops=6")).dense == (6, 0, 0)


def test_a_target_that_is_not_met_tells_what_was_assumed(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no setup meets the target; .*; assumed: dense model: .* pooling factor: 1 id"
    ):
        plan(asked(folder, "target.samples_per_s=1e12", "search.memory_shares=[0.01]"))


def test_the_first_question_of_the_page_is_answered_as_the_page_says(tmp_path: Path) -> None:
    toml, output = re.findall(
        r"^```toml\n(# 26 tables.*?)^```\n.*?^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL
    )[0]
    (tmp_path / "ads.toml").write_text(toml)
    text = describe(plan(plan_file.load(tmp_path / "ads.toml")))
    assert output in text
    assert output.startswith("Asked")
    assert "<- bottleneck" in output
