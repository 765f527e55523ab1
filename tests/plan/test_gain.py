"""What tiers would save: both fleets are the cheapest of their kind, now, with more rows, and with an input off."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.data import ROOT
from tests.plan.commands import run
from tests.plan.hosts import SHOP_HOST, shop_workload
from tierstore.plan import plan_file
from tierstore.plan.accesses import accesses_of
from tierstore.plan.assumptions import Fleet
from tierstore.plan.demand import Demand
from tierstore.plan.gain import Case, Gain, Outcome, Scale, Span, figure_of, gain, saved, saved_share
from tierstore.plan.parts import write_host
from tierstore.plan.plan_file import PlanFile
from tierstore.plan.planning import plan
from tierstore.plan.presets import workload_toml
from tierstore.plan.report import describe_gain, gain_page_of
from tierstore.plan.traces import generate
from tierstore.settings.sections import ConfigError
from tierstore.trace import write_trace

TABLES = '[[table]]\nname = "item"\nnum_embeddings = 400_000\nembedding_dim = 64\npooling_factor = 4\n'
PAGE = (ROOT / "docs" / "planning.md").read_text()
Asked = Callable[..., PlanFile]
_FEW = ("search.memory_shares=[0.25, 1.0]", "search.row_shares=[0.8]", "search.drives=[1]", "setup.policy=lru")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A host of 512 MiB at most, 100 MiB of rows; its cheapest part is its memory."""
    found = tmp_path_factory.mktemp("gain")
    write_host(replace(SHOP_HOST, ddr=replace(SHOP_HOST.ddr, capacity_bytes=2.0**29)), found / "box.json")
    (found / "shop.toml").write_text('[workload]\nbatch_samples = 256\noptimizer = "sgd"\ndense_flops = 1\n' + TABLES)
    return found


@pytest.fixture(scope="module")
def asked(folder: Path) -> Asked:
    def ask(*overrides: str) -> PlanFile:
        path = folder / "plan.toml"
        path.write_text(
            f'[workload]\nfile = "{folder}/shop.toml"\n[host]\nfile = "{folder}/box.json"\n[target]\n'
            "samples_per_s = 5000\n"
        )
        return plan_file.load(path, [plan_file.parse_override(text) for text in overrides])

    return ask


@pytest.fixture(scope="module")
def found(asked: Asked) -> Gain:
    return gain(asked("pricing.spread=0.25"))


def test_fleets_are_those_that_plans_of_their_own_find(asked: Asked, found: Gain) -> None:
    for scale in found.scales:
        for fleet, in_memory in ((scale.own.memory, "true"), (scale.own.tiers, "false")):
            own = plan(asked(f"workload.scale={scale.times}", f"search.in_memory={in_memory}")).prediction
            assert fleet is not None
            assert (fleet.usd_a_month, fleet.watts, fleet.num_hosts) == (
                own.price.usd_a_month,
                own.price.watts,
                own.setup.num_hosts,
            )
            assert own.is_in_memory or in_memory == "false"
    assert [scale.times for scale in found.scales] == [1, 2, 10]
    assert found.scales[2].num_rows == 4_000_000


def test_all_in_memory_reads_no_drive_and_tiers_cost_no_more(asked: Asked, found: Gain) -> None:
    own = plan(asked("search.in_memory=true")).prediction
    assert {load.resource: load.seconds for load in own.loads}["ssd reads"] == 0
    assert own.setup.ddr_bytes > 400_000 * 64 * 4
    for scale in found.scales:
        for outcome in (scale.own, *(case.outcome for case in scale.cases)):
            usd = saved(lambda fleet: fleet.usd_a_month)(outcome)
            assert usd is not None
            assert usd >= 0
    assert saved(lambda fleet: fleet.usd_a_month)(found.scales[-1].own), "ten times the rows are worth tiers"


def test_each_assumption_and_price_is_off_both_ways_one_at_a_time(asked: Asked, found: Gain) -> None:
    prices = ("price of memory", "price of SSDs", "price of all other parts", "price of power")
    factors = {"skew": (0.5, 2.0)} | dict.fromkeys(prices, (0.75, 1.25))
    for scale in found.scales:
        assert [(case.what, case.factor) for case in scale.cases] == [
            (what, factor) for what, both in factors.items() for factor in both
        ]
    (dearer,) = (case for case in found.scales[1].cases if (case.what, case.factor) == ("price of power", 1.25))
    own = plan(asked("workload.scale=2", "pricing.usd_per_kwh=0.15")).prediction
    assert dearer.outcome.tiers is not None
    assert dearer.outcome.tiers.usd_a_month == own.price.usd_a_month
    (cheaper,) = (case for case in found.scales[0].cases if (case.what, case.factor) == ("price of memory", 0.75))
    assert cheaper.outcome.memory is not None
    now = found.scales[0].own.memory
    assert now is not None
    assert now.usd - cheaper.outcome.memory.usd == pytest.approx(0.25 * _memory_usd(asked))


def _memory_usd(asked: Asked) -> float:
    return plan(asked("search.in_memory=true")).prediction.setup.host.ddr.usd


def test_what_is_given_has_no_range(asked: Asked, folder: Path) -> None:
    (folder / "given.toml").write_text((folder / "shop.toml").read_text() + "exponent = 1.05\n")
    found = gain(asked(f"workload.file={folder}/given.toml"))
    assert all(not scale.cases for scale in found.scales)
    text = describe_gain(found)
    assert "ranges: none, as all inputs are given" in " ".join(text.split())
    assert " to " not in text[text.index("Cheapest fleets") : text.index("Their machines")]
    assert "What is saved a month if an input is off" not in gain_page_of(found)


def test_a_trace_is_stretched_to_more_rows(asked: Asked, folder: Path) -> None:
    (folder / "traced.toml").write_text(workload_toml(shop_workload()))
    trace = generate(shop_workload(), samples=256 * 30, seed=0)
    write_trace(trace, folder / "t.npz")
    found = gain(asked(f"workload.file={folder}/traced.toml", f"trace.path={folder}/t.npz", *_FEW))
    assert found.has_trace
    once = Demand.from_accesses(shop_workload(), accesses_of(trace), "lru").pools[0]
    more = Demand.from_accesses(shop_workload(), accesses_of(trace), "lru").stretched(10).pools[0]
    for rows in (10, 1000, 30_000):
        assert more.curve.miss_ratio(10 * rows) == pytest.approx(once.curve.miss_ratio(rows))
    assert (more.num_rows, more.unique, more.cold_log) == (10 * once.num_rows, once.unique, None)


def test_a_span_is_over_what_is_known() -> None:
    def fleet(usd: float) -> Fleet:
        return Fleet("1 x box", 1, 0.0, usd, 100.0, 1.0, None, "model")

    cases = (
        Case("skew", 0.5, Outcome(fleet(40.0), fleet(10.0))),
        Case("skew", 2.0, Outcome(None, fleet(50.0), "no fleet")),
    )
    scale = Scale(1, 10, 10, Outcome(fleet(20.0), fleet(15.0)), cases)

    def month(fleet: Fleet) -> float:
        return fleet.usd_a_month

    assert scale.span(figure_of("memory", month)) == Span(20.0, 20.0, 40.0)
    assert scale.span(figure_of("tiers", month)) == Span(10.0, 15.0, 50.0)
    assert scale.span(saved(month)) == Span(5.0, 5.0, 30.0)
    assert scale.span(saved_share(month)) == Span(0.25, 0.25, 0.75)
    assert scale._replace(own=Outcome(None, fleet(15.0), "no fleet")).span(saved(month)) is None


def test_rows_that_no_fleet_has_memory_for_are_told(asked: Asked) -> None:
    found = gain(asked("search.hosts=[1]", "pricing.years=1"))
    assert found.scales[0].own.memory is not None
    assert found.scales[2].own.memory is None
    text = " ".join(describe_gain(found).split())
    assert "With 10 times the rows, only a tiered fleet meets the target." in text
    assert "all in memory: no such fleet: no setup meets the target;" in text
    assert "rows of a host are wanted in it" in text
    assert "only a tiered fleet meets" in gain_page_of(found)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["target.samples_per_s=0"], r"target\.samples_per_s = 0: fleets are compared at one rate; give it, or"),
        (["setup.ddr=1MiB"], r"setup\.ddr = '1MiB': both fleets are searched for; leave it out"),
        (["target.samples_per_s=1e12"], r"no setup meets the target"),
    ],
)
def test_what_cannot_be_compared_is_told(asked: Asked, overrides: list[str], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        gain(asked(*overrides))


def test_queries_are_compared_at_their_rate_and_latency(asked: Asked) -> None:
    found = gain(
        asked(
            "workload.optimizer=none", "target.samples_per_s=0", "target.queries_per_s=200", "target.p99_ms=20",
            "search.workers=[1]",
        )
    )  # fmt: skip
    for outcome in (scale.own for scale in found.scales):
        for fleet in (outcome.memory, outcome.tiers):
            assert fleet is not None
            assert fleet.p99_s is not None
            assert fleet.p99_s <= 0.02


def test_the_command_prints_and_writes_it(
    asked: Asked, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = gain(asked())
    html, figures = tmp_path / "gain.html", tmp_path / "gain.json"
    assert run("gain", folder / "plan.toml", "--html", html, "--json", figures) == 0
    assert capsys.readouterr().out == f"{describe_gain(found)}\n\nthe page: {html}\n"
    assert json.loads(figures.read_text()) == json.loads(json.dumps(found.to_dict()))
    assert html.read_text() == gain_page_of(found)
    with pytest.raises(FileExistsError):
        run("gain", folder / "plan.toml", "--html", html)


def test_the_gain_of_the_first_question_is_as_the_page_says(tmp_path: Path) -> None:
    toml = re.findall(r"^```toml\n(# 26 tables.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0]
    output = re.findall(r"^    tierstore plan gain ads.*?^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0]
    (tmp_path / "ads.toml").write_text(toml)
    assert describe_gain(gain(plan_file.load(tmp_path / "ads.toml"))) == output.rstrip()
