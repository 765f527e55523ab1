"""From a plan file and its commands to the answer, as text and as JSON."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bench.data import ROOT
from tests.dist.placement.support import costs_of
from tests.plan.hosts import DDR, GPU, HOSTILE, SHOP_HOST, planned, served, shop_plan, shop_workload
from tierstore.cli import entry as cli
from tierstore.plan import planning
from tierstore.plan.demand import Demand
from tierstore.plan.host import REQUEST_BATCHES, example_hosts, write_host
from tierstore.plan.model import Prediction, predict
from tierstore.plan.planning import PlanFile, PlanResult, load, parse_override, plain, plan, setup_of
from tierstore.plan.report import count, describe, duration, money, sections_of, share, significant, watts
from tierstore.plan.traces import accesses_of, generate
from tierstore.plan.workload import (
    MLPERF_LAYERS,
    DenseWork,
    dlrm_work,
    load_workload,
    workload_of,
    workload_toml,
)
from tierstore.settings.sections import to_toml
from tierstore.trace import write_trace

Asked = Callable[..., PlanFile]
BARE = """[workload]
batch_samples = 256
optimizer = "sgd"
tables = [{ name = "item", num_embeddings = 40_000, embedding_dim = 16 }]
"""


def answer(result: PlanResult) -> Prediction:
    assert result.prediction is not None
    return result.prediction


def predicted(asked: PlanFile) -> Prediction:
    return answer(plan(asked))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("plans")
    write_host(replace(SHOP_HOST, name="gpu box", accelerators=(GPU,)), found / "gpu.json")
    worn = tuple(replace(drive, drive_writes_a_day=0.01) for drive in SHOP_HOST.storage)
    write_host(replace(SHOP_HOST, storage=worn), found / "worn.json")
    (found / "bare.toml").write_text(BARE)
    write_trace(generate(shop_workload(), samples=256 * 30, seed=0), found / "shop.npz")
    return found


@pytest.fixture(scope="module")
def asked(folder: Path) -> Asked:
    return partial(shop_plan, folder)


def test_a_given_setup_is_predicted_as_it_is_and_a_missed_target_is_a_warning(asked: Asked) -> None:
    given, again = (plan(asked("setup.ddr=8MiB", "setup.policy=lru", "target.samples_per_s=1e9")) for _ in range(2))
    setup = setup_of(given.asked, shop_workload(), SHOP_HOST)
    assert (setup.ddr_bytes, setup.hosts, setup.threads) == (2**23, 1, 4)
    assert given.prediction == predict(setup, Demand.analytic(shop_workload()))
    assert len(given.attempts) == 1
    assert json.dumps(again.to_dict(), allow_nan=False) == json.dumps(given.to_dict(), allow_nan=False)
    (missed,) = [text for text in given.warnings if "missed" in text]
    assert "of 1,000,000,000 samples/s" in missed


def test_ranks_that_share_the_host_are_planned_by_what_was_measured_of_them(asked: Asked, tmp_path: Path) -> None:
    costs_of(2).save(tmp_path / "ranks.json")
    ranks = f"setup.rank_costs={tmp_path}/ranks.json"
    found = predicted(asked("setup.ddr=4MiB", ranks))
    assert found.bottleneck == "lookups"
    assert found.step_s > 4.0, "seconds of a group, of those costs"
    assert found.price == predicted(asked("setup.ddr=4MiB")).price, "one host"
    with pytest.raises(ValueError, match=r"setup\.rank_costs = 'a': .* No such file .*; or leave setup"):
        plan(asked("setup.ddr=4MiB", "setup.rank_costs=a"))
    with pytest.raises(ValueError, match="rank_costs are of 2 ranks, 2 on a host, and hosts is 3"):
        plan(asked("setup.ddr=4MiB", ranks, "setup.hosts=3"))


def test_worn_drives_and_tight_memory_are_warnings(asked: Asked, folder: Path) -> None:
    many = plan(asked("setup.ddr=420KiB", f"host.file={folder}/worn.json"))
    written = answer(many).wear.writes_a_day
    assert any(f"are written {written:.3g} times a day, rated for 0.01, and last " in text for text in many.warnings)
    assert not plan(asked("setup.ddr=1GiB")).warnings
    assert any("rows leave and come back within a batch" in text for text in many.warnings)
    full = plan(asked("setup.ddr=12GiB", "setup.page_cache=3GiB"))
    assert any("little is left for the system" in text for text in full.warnings)


def test_a_trace_gives_the_curve_of_the_plan(asked: Asked, folder: Path) -> None:
    result = plan(asked("setup.ddr=8MiB", f"trace.path={folder}/shop.npz"))
    accesses = accesses_of(generate(shop_workload(), samples=256 * 30, seed=0))
    ahead = Demand.from_accesses(shop_workload(), accesses, "auto", prefetch_depth=2)
    assert result.prediction == predict(setup_of(result.asked, shop_workload(), SHOP_HOST), ahead)
    assert any(text.startswith("accesses: ") and "in 30 batches" in text for text in result.sources)


def test_gpus_are_for_training_on_one_host(asked: Asked, folder: Path) -> None:
    host = f"host.file={folder}/gpu.json"
    found = predicted(asked(host, "setup.ddr=1GiB", "setup.hbm=1GiB"))
    assert found.tiers[0].tier == "hbm"
    for keys, why in (
        (("workload.optimizer=none",), "tierstore serve has rows in DDR and computes on cores"),
        (("setup.hosts=2",), "tables over 2 hosts or ranks are in DDR, as they are not sharded over GPUs"),
        ((f"host.file={folder}/worn.json",), "a store uses one GPU, host 'box' has 0: give a host file with one"),
        ((f"host.file={folder}/worn.json", "setup.hbm=50%"), "a store uses one GPU, host 'box' has 0"),
    ):
        with pytest.raises(ValueError, match=why):
            plan(asked(host, "setup.ddr=1GiB", "setup.hbm=1GiB", *keys))


def test_the_workload_may_be_changed_scaled_or_written_in_the_file(asked: Asked, tmp_path: Path) -> None:
    changed = workload_of(asked("workload.name=mine", "workload.dtype=float16", "workload.scale=0.5").workload)
    assert (changed.name, changed.dtype, changed.tables[0].num_embeddings) == ("mine", "float16", 200_000)
    path = tmp_path / "own.toml"
    path.write_text("[[workload.tables]]\ncount = 26\nembedding_dim = 128\n")
    alike = workload_of(load(path).workload)
    assert [table.name for table in alike.tables[::25]] == ["table0", "table25"]
    assert alike.dense_flops == load_workload("mlperf-dlrm-v2").dense_flops, "layers as MLPerf has them"
    assert {(table.pooling_factor, table.exponent) for table in alike.tables} == {(1.0, 1.05)}


def test_what_is_not_given_nor_in_a_trace_is_assumed_and_told_with_its_value(asked: Asked, folder: Path) -> None:
    write_trace(generate(load_workload(folder / "bare.toml"), samples=256 * 3, seed=0), folder / "bare.npz")
    bare = (f"workload.file={folder}/bare.toml", "setup.ddr=1MiB")
    found, traced = plan(asked(*bare)), plan(asked(*bare, f"trace.path={folder}/bare.npz"))
    dense = [f"workload.{name}" for name in DenseWork._fields]
    for result, keys in ((found, ["workload.pooling_factor", "workload.exponent", *dense]), (traced, dense)):
        assert [each.key for each in result.assumptions if each.key.startswith("workload.")] == keys
        values = workload_of(result.asked.workload)
        for name in DenseWork._fields:
            assert f" {getattr(values, name):,.0f} " in " ".join(text for _, text in result.assumptions)
        text = " ".join(describe(result).split())
        assert all(f"{key} {what}" in text for key, what in result.assumptions)
    given = {"pooling_factor": 2.0, "exponent": 0.5, "dense_flops": 6e6, "dense_products": 3.0, "dense_values": 7.0}
    for name, value in given.items():
        own = plan(asked(*bare, f"workload.{name}={value}"))
        assert f"workload.{name}" not in {each.key for each in own.assumptions}
        workload = own.attempts[0].setup.workload
        assert value == getattr(workload, name, getattr(workload.tables[0], name, None)), name
    assert workload_of(asked("workload.dense_flops=1").workload).dense == (1, 0, 0), "tables alone"


def test_a_dense_model_takes_as_long_however_its_flops_are_told(asked: Asked, tmp_path: Path) -> None:
    """By a preset, by a file that has its flops, or by a key: products and values are those of MLPerf's layers, made as
    wide as the flops."""
    whole = load_workload("mlperf-dlrm-v2")
    (tmp_path / "own.toml").write_text(workload_toml(replace(whole, name="mlperf-dlrm-v2")))
    sections = ("workload.preset=mlperf-dlrm-v2", f"workload.file={tmp_path}/own.toml", "workload.rows=1000000")
    flops = f"workload.dense_flops={whole.dense_flops}"
    found = [workload_of(load(None, [parse_override(each), parse_override(flops)]).workload) for each in sections]
    assert {each.dense for each in found} == {whole.dense}
    work = dlrm_work([128] * 26, **MLPERF_LAYERS)
    assert whole.dense[1:] == pytest.approx(work[1:])
    narrow = workload_of(asked(f"workload.dense_flops={work.dense_flops / 4}").workload)
    layers = dlrm_work([16] * 2, **MLPERF_LAYERS)
    width = math.sqrt(work.dense_flops / 4 / layers.dense_flops)
    assert narrow.dense[1:] == pytest.approx((layers.dense_products, layers.dense_values * width))


QUESTION = ["plan", "--bytes", "300GB", "--queries", "20000", "--p99", "20ms"]


def test_a_question_of_one_line_tries_all_examples_and_is_answered_in_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.toml").write_text('workload.bytes = "300GB"\ntarget.queries_per_s = 20_000\ntarget.p99_ms = 20\n')
    assert cli.main([*QUESTION, "--json", "plan.json"]) == 0
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "plan.json").read_text())
    hosts = [name for name, host in example_hosts().items() if not host.accelerators]
    assert sorted(each["setup"].split()[2] for each in found["attempts"]) == sorted(hosts)
    assert plain(load("q.toml")) == found["asked"]
    text = said.partition("Machines")[2]
    for name in (*hosts, "workload.batch_samples", "workload.dense_flops", "pricing.years", "bound by"):
        assert name in text
    rows = sum(each["num_embeddings"] for each in found["prediction"]["setup"]["workload"]["tables"])
    assert rows * 128 * 4 == pytest.approx(300e9, rel=1e-6)
    assert cli.main([*QUESTION[:-1], "0.001ms"]) == 1
    missed = capsys.readouterr().out
    assert missed.startswith("Answer\n  no setup meets the target; the nearest, ")
    assert all(re.search(rf"! \d+ x {name}: .* not 0\.001 ms", missed) for name in hosts)
    assert "workload.dense_flops" in missed
    assert (
        cli.main(["plan", "--rows", "1000000000", "--dim", "64", "--samples", "1e5", "--set", "host.name=server-2s"])
        == 0
    )
    assert "training with rowwise_adagrad" in capsys.readouterr().out


@pytest.mark.parametrize("cores", [3, 13, 48])
def test_workers_are_as_many_as_the_cores_and_a_core_more_is_worth_something(folder: Path, cores: int) -> None:
    """Queries that take a core for most of a millisecond, of which nearly as many come."""
    host = replace(SHOP_HOST, processor=replace(SHOP_HOST.processor, cores=cores), ddr=DDR)
    keys = ("workload.optimizer=none", "workload.batch_samples=1", "workload.dense_flops=1", "target.p99_ms=50")
    rate = 0.8 * cores / REQUEST_BATCHES / 100e-6
    found = plan(shop_plan(folder, *keys, f"target.queries_per_s={rate}", "setup.hosts=1", host=host))
    assert not found.missed
    assert (answer(found).setup.workers, answer(found).bottleneck) == (cores, "requests")
    (gain,) = [each.samples_per_s for each in found.marginals if each.resource == "cores"]
    assert gain == pytest.approx(answer(found).samples_per_s / cores, rel=0.01)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"{ROOT}/examples/criteo.toml", r"is a run file of tierstore train; tierstore plan --set workload\.file="),
        ("--bytes 1GB", r"target\.queries_per_s = 0, .* give a rate, as --queries 20000 --p99 20ms or --samples"),
        ("--queries 5", r"workload\.bytes = '': give the size of all tables, as --bytes 300GB"),
        ("--p99 5ms", r"--p99: target\.p99_ms=5\.0: needs queries_per_s"),
        ("--bytes 1GB --queries -5", r"--queries: target\.queries_per_s=-5\.0: expected a number from 0"),
        ("--bytes 1GB --queries nan", r"--queries: target\.queries_per_s=nan: expected a number from 0"),
        ("--bytes 0 --queries 5", r"workload\.bytes = '0': 0 rows of 128 columns, .* give bytes, as 300GB"),
        ("--bytes 50% --queries 5", r"workload\.bytes = '50%': 0 rows of 128 columns"),
        ("--bytes 900000TB --samples 5", r"workload\.bytes = '900000TB': .* and 26 tables have 1 to"),
        ("--bytes many --samples 5", r"workload\.bytes='many' is not a size"),
        ("--bytes 1GB --rows 9 --samples 5", r"workload\.rows = 9: bytes is given too"),
        ("--bytes 1GB --samples 5 --set workload.scale=0", r"scale = 0: expected a number above 0"),
        ("--bytes 1GB --samples 5 --set search.hosts=[99999]", r"search\.hosts=\(99999,\): expected counts from 1"),
        ("--bytes 1GB --samples 5 --set trace.path=a.npz", r"trace\.path = 'a\.npz': .* no such .*; or leave trace"),
        ("--samples 5 --set workload.preset=rmc1", r"target\.samples_per_s = 5: .* rows are looked up only"),
        ("--queries 5 --set workload.preset=criteo-kaggle", r"target\.queries_per_s = 5: .* trains, with sgd"),
        ("--dim 64 --samples 5 --set workload.preset=rmc1", r"workload\.embedding_dim = 64: of workload\.bytes"),
        ("--samples 5 --set workload.file=none.toml", r"workload\.file = 'none\.toml': .* no such workload file"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_the_cure(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *words.split()]) > 0
    assert re.search(said, capsys.readouterr().err)


def test_what_is_given_in_vain_or_left_out_is_said(asked: Asked, folder: Path) -> None:
    alone = plan(asked("setup.ddr=8MiB", "host.others=['server-2s']", "search.hosts=[2]", "pricing.pue=2"))
    assert alone.hosts == ("box",)
    assert [text.split(" is not heeded")[0] for text in alone.warnings] == ["host.others", "[search]"]
    assert [each.key for each in alone.assumptions if "pricing" in each.key] == ["pricing.years", "pricing.usd_per_kwh"]
    traced = plan(asked("setup.ddr=8MiB", f"trace.path={folder}/shop.npz", "workload.batch_samples=64"))
    assert any("batches have 256 samples, the workload's 64" in text for text in traced.warnings)
    keys = ("setup.ddr=8MiB", "workload.optimizer=none", "target.queries_per_s=5", "setup.workers=2")
    found = plan(asked(*keys))
    assert "target.p99_ms" in {each.key for each in found.assumptions}
    assert answer(found).setup.threads == 1, "of four cores one is left for others"
    assert "a query; bound by" in " ".join(describe(plan(asked(*keys[:2]))).split())


def test_the_first_question_of_the_page_is_answered_as_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "planning.md").read_text()
    found = re.findall(r"^```toml\n(# 26 tables.*?)^```\n.*?^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "ads.toml").write_text(found[0][0])
    assert found[0][1] in describe(plan(load(tmp_path / "ads.toml")))
    assert "<- bottleneck" in found[0][1]


def test_ten_questions_of_the_page_are_asked_as_it_says(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = re.findall(r"^    (tierstore plan --[^#\n]+)#", (ROOT / "docs" / "planning.md").read_text(), re.MULTILINE)
    assert len(lines) == 10
    read = list[PlanFile]()
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(planning, "plan", lambda asked, **_: read.append(asked) or shown)
    shown = planned()
    for line in lines:
        assert cli.main(line.split()[1:]) == 0
        assert read[-1].workload != PlanFile().workload
        assert read[-1].is_fixed or read[-1].target != PlanFile().target
    assert len(read) == 10


def test_an_empty_file_is_all_defaults_and_keys_print_one(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    for text in ("", to_toml(PlanFile(), with_help=True)):
        path.write_text(text)
        assert load(path) == PlanFile()


@pytest.fixture
def plan_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shop_plan(tmp_path)
    path = tmp_path / "plan.toml"
    path.write_text('[workload]\nfile = "shop.toml"\n[host]\nfile = "box.json"\n[setup]\nddr = "8MiB"\n')
    return path


def test_a_plan_is_printed_and_written(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "plan.toml", "--html", "plan.html", "--json", "plan.json"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Answer\n  1 x box (")
    assert said.endswith("the report: plan.html\n")
    assert "\x1b" not in said
    page = plan_path.with_suffix(".html").read_text(encoding="utf-8")
    assert "<title>shop: a plan</title>" in page
    assert "How often memory misses a row" in page
    assert page.count("<polyline") == 2, "the curve, and the plan on it"
    found = json.loads(plan_path.with_suffix(".json").read_text())
    assert found["asked"]["setup"]["ddr"] == "8MiB"
    assert f"{found['prediction']['samples_per_s']:,.0f} samples/s" in said


def test_what_prevents_files_is_told_before_the_work(
    plan_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "plan", None)
    for words, status, said in (
        (["run", "plan.toml", "--html", ".", "--force"], 1, ". is a directory; choose the name of a file\n"),
        (["run", "plan.toml", "--json", "nosuch/a"], 1, "nosuch is not a directory; make it first\n"),
        (["presets", "rcm1"], 2, "'rcm1' is neither a preset nor a workload file; did you mean 'rmc1'?\n"),
    ):
        assert cli.main(["plan", *words]) == status
        assert capsys.readouterr().err.startswith(f"tierstore: {said}")


def test_what_is_read_is_not_written_over(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", "generate", "shop.toml", "shop.npz", "--samples", "2000"]) == 0
    capsys.readouterr()
    for words in (
        ["curve", "shop.npz", "--json", "shop.npz"],
        ["run", "plan.toml", "--json", "plan.toml"],
        ["run", "plan.toml", "--html", "shop.toml"],
        ["run", "plan.toml", "--json", "box.json"],
    ):
        before = Path(words[-1]).read_bytes()
        assert cli.main(["plan", *words, "--force"]) == 1
        assert capsys.readouterr().err == f"tierstore: {words[-1]} is read; choose another name to write to\n"
        assert Path(words[-1]).read_bytes() == before


def test_setups_are_compared_in_one_table() -> None:
    result, text = planned(), describe(planned())
    memory = result.in_memory
    assert memory is not None
    assert max(map(len, text.splitlines())) <= 100
    (table,) = [each.table for each in sections_of(result) if each.title == "Machines"]
    assert len(table) == 2 + len(result.attempts)
    for row, each in zip(table[1:], (*result.attempts, memory), strict=True):
        assert each.prediction is not None
        assert row[4:6] == [money(each.prediction.price.usd), watts(each.prediction.price.watts)]
    assert table[-1][-1].endswith(", all in memory")
    missed = memory._replace(reason="too small")
    assert "all rows in DDR or HBM: too small" in describe(replace(result, in_memory=missed))
    unfit = describe(replace(result, attempts=(missed._replace(prediction=None),), missed="nothing fits"))
    assert "does not fit" in unfit
    assert "Machines" not in describe(served())


def test_serving_tells_latency() -> None:
    latency, text = answer(served()).latency, describe(served())
    assert latency is not None
    assert f"50.0 queries/s, half of them within {duration(latency.p50_s)}, 99 % within " in " ".join(text.split())
    assert "! the target is missed: 99 % of queries within" in text


def test_lines_have_100_columns_and_nothing_that_a_terminal_obeys() -> None:
    text = describe(planned(HOSTILE))
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text
    assert "\x07" not in text


def test_figures_as_people_read_them() -> None:
    words: list[tuple[Callable[[float], str], dict[float, str]]] = [
        (significant, {0: "0", 1234.5: "1,230", 0.012345: "0.0123", math.inf: "unbounded", math.nan: "unknown"}),
        (count, {7: "7.00", 0: "0", 123.4: "123", 56_143.2: "56,143", 12_345_678: "12.3 M", math.inf: "unbounded"}),
        (duration, {0: "0 s", 1.5: "1.50 s", 0.00123: "1.23 ms", 3e-9: "3.00 ns", math.inf: "unbounded"}),
        (share, {0.1234: "12.3 %"}),
        (money, {1234.5: "$1,234", 3.5: "$3.50"}),
        (watts, {560: "560 W", 56_000: "56.0 kW"}),
    ]
    for shown, texts in words:
        assert {value: shown(value) for value in texts} == texts
