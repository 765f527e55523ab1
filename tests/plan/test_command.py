"""The commands of ``tierstore plan``: their help is frozen here; each runs, and its errors are one line."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plan.hosts import SHOP_HOST, shop_workload
from tests.plan.placement.support import costs_of
from tierstore.cli import entry as cli
from tierstore.plan import plan_file, planning
from tierstore.plan.parts import write_host
from tierstore.plan.plan_file import PlanFile
from tierstore.plan.presets import load_workload, preset, workload_toml

HELP = {
    "plan": """
        usage: tierstore plan [-h] COMMAND ...
        Say what machines a workload needs, before they are bought: memory, drives, hosts, speed, latency and cost.
        options:
          -h, --help  show this help message and exit
        commands:
          COMMAND
            run       answer a plan file
            curve     say how often memory of any size misses
            measure   measure this machine
            measure-ranks
                      measure what steps over ranks cost
            place     decide which rank gets which tables
            parts     list the parts and hosts that plans know
            presets   list the workloads that plans know
            trace     make and describe traces
        examples:
          tierstore plan plan.toml --html plan.html     # short for: tierstore plan run plan.toml --html plan.html
          tierstore plan COMMAND --help
    """,
    "plan run": """
        usage: tierstore plan run [-h] [--html OUT.html] [--json OUT.json] [--force] [--set SECTION.KEY=VALUE] [--keys]
                                  [--traceback]
                                  [FILE.toml]
        Predict the setup of a plan file, or find the cheapest that reaches its target, and say what supports that.
        positional arguments:
          FILE.toml             the plan file
        options:
          -h, --help            show this help message and exit
          --html OUT.html       write the report, one page that needs no network
          --json OUT.json       write all figures of the answer
          --force               replace these files if they exist
          --set SECTION.KEY=VALUE
                                set any key, as setup.ddr=64GiB
          --keys                print every key with its default, and exit
          --traceback           show where in the code an error arose
        examples:
          tierstore plan run --keys > plan.toml
          tierstore plan run plan.toml --html plan.html --json plan.json
          tierstore plan run plan.toml --set setup.ddr=64GiB --set setup.hosts=2
    """,
    "plan curve": """
        usage: tierstore plan curve [-h] [--policy NAMES] [--sizes ROWS] [--sampling-rate R] [--once-a-batch]
                                    [--prefetch-depth N] [--by-table] [--json PATH]
                                    [--force] [--traceback] TRACE
        Miss-ratio curves of a trace, exactly or from a sample of its rows.
        positional arguments:
          TRACE              a trace, of tierstore trace or a recording
        options:
          -h, --help         show this help message and exit
          --policy NAMES     some of auto, lru, lfu, tinylfu, with commas between (default: lru)
          --sizes ROWS       sizes of caches, with commas between, as 1000,20000,5%
          --sampling-rate R  let this share of the rows stand for all (default: 1, every row)
          --once-a-batch     count a row once a batch, as the tiers of a store do
          --prefetch-depth N
                             batches brought in ahead, whose rows lfu and tinylfu cannot evict (default: 0)
          --by-table         a cache for each table, not one for all
          --json PATH        also write the curves to a file
          --force            replace that file if it exists
          --traceback        show where in the code an error arose
        examples:
          tierstore plan curve run.npz
          tierstore plan curve run.npz --policy lru,lfu --by-table
    """,
    "plan measure": """
        usage: tierstore plan measure [-h] [--dir DIR] [--json PATH] [--seconds N] [--device NAME] [--force]
                                      [--traceback]
        Measure this machine's memory, drive and cores, and tierstore's own work on it, in about a minute.
        options:
          -h, --help     show this help message and exit
          --dir DIR      a folder on the SSD to be measured (default: .)
          --json PATH    where the host goes, .json or .toml (default: host.json)
          --seconds N    time to spend, about (default: 50)
          --device NAME  cpu (default), or cuda for all GPUs, or cuda:1
          --force        replace PATH if it exists
          --traceback    show where in the code an error arose
        example:
          tierstore plan measure --dir . --json host.json
    """,
    "plan measure-ranks": """
        usage: tierstore plan measure-ranks [-h] [--json PATH] [--optimizer NAME] [--seconds N] [--force]
                                            [--traceback]
        Time steps of sharded tables over the ranks that torchrun starts, for tierstore plan place.
        options:
          -h, --help        show this help message and exit
          --json PATH       where they go (default: ranks.json)
          --optimizer NAME  of the tables: sgd, rowwise_adagrad (default), adagrad or adam
          --seconds N       of steps, about, beside some 30 to make tables (default: 60)
          --force           replace PATH if it exists
          --traceback       show where in the code an error arose
        example:
          torchrun --nproc-per-node 2 -m tierstore plan measure-ranks --json ranks.json
    """,
    "plan place": """
        usage: tierstore plan place [-h] --costs FILE [--trace TRACE] [--room SIZE] [--force] [--traceback]
                                    WORKLOAD PLAN.json
        Find how to shard a workload's tables over ranks, so that a training step takes the least time.
        positional arguments:
          WORKLOAD      a preset, or a workload file; its batch is that of all ranks
          PLAN.json     the plan that is written, for open_sharded and ranks.plan
        options:
          -h, --help    show this help message and exit
          --costs FILE  of the ranks, by tierstore plan measure-ranks
          --trace TRACE what is looked up (default: Zipf's law, as the workload says)
          --room SIZE   of each rank, for rows and optimizer state (default: no limit)
          --force       replace PLAN.json if it exists
          --traceback   show where in the code an error arose
        examples:
          tierstore plan place rmc2 plan.json --costs ranks.json
          tierstore plan place mine.toml plan.json --costs ranks.json --trace run.npz --room 8GiB
    """,
    "plan parts": """
        usage: tierstore plan parts [-h] [--sources] [--traceback]
        List processors, memory, GPUs, drives, links and hosts, each figure with its source.
        options:
          -h, --help   show this help message and exit
          --sources    say with each figure where it comes from
          --traceback  show where in the code an error arose
    """,
    "plan presets": """
        usage: tierstore plan presets [-h] [--traceback] [NAME]
        List published models by name, or print one as a workload file.
        positional arguments:
          NAME         print this one as a workload file, to be changed
        options:
          -h, --help   show this help message and exit
          --traceback  show where in the code an error arose
        examples:
          tierstore plan presets
          tierstore plan presets rmc1 > mine.toml
    """,
    "plan trace": """
        usage: tierstore plan trace [-h] COMMAND ...
        Make and describe traces.
        options:
          -h, --help  show this help message and exit
        commands:
          COMMAND
            generate  draw a trace of a workload
            describe  say what is in a trace
    """,
    "plan trace generate": """
        usage: tierstore plan trace generate [-h] --samples N [--seed N] [--scale X] [--force]
                                             [--traceback]
                                             WORKLOAD OUT.npz
        Draw ids as the workload's tables say: Zipf's law of their exponents, ids a sample.
        positional arguments:
          WORKLOAD       a preset, or a workload file in TOML
          OUT.npz        file to write; it appears when it is complete
        options:
          -h, --help     show this help message and exit
          --samples N    samples to draw
          --seed N       another seed, other ids (default: 0)
          --scale X      of the tables' rows (default: 1)
          --force        replace OUT.npz if it exists
          --traceback    show where in the code an error arose
        example:
          tierstore plan trace generate rmc1 rmc1.npz --samples 100000 --scale 0.01
    """,
    "plan trace describe": """
        usage: tierstore plan trace describe [-h] [--json PATH] [--force] [--traceback] TRACE
        Count accesses and rows by table, and say how uneven they are.
        positional arguments:
          TRACE               the trace to read
        options:
          -h, --help          show this help message and exit
          --json PATH         write it to a file
          --force             replace that file if it exists
          --traceback         show where in the code an error arose
        example:
          tierstore plan trace describe run.npz
    """,
}


def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return found[0] if found else {}


def parsers(*words: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """A command's parser, and those of the commands in it."""
    parser = cli.build_parser(words)
    for word in words:
        parser = commands(parser)[word]
    yield " ".join(words), parser
    for child in commands(parser):
        yield from parsers(*words, child)


ALL = dict(parsers())


@pytest.mark.parametrize("name", HELP)
def test_help_is_frozen(name: str) -> None:
    # Python's versions break lines differently.
    assert ALL[name].format_help().split() == HELP[name].split()


def test_every_command_is_frozen_here() -> None:
    assert [name for name in ALL if name.split(" ")[0] == "plan"] == list(HELP)


@pytest.fixture
def plan_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan file that can be answered, in a folder of its own with what it names."""
    monkeypatch.chdir(tmp_path)
    write_host(SHOP_HOST, tmp_path / "box.json")
    (tmp_path / "shop.toml").write_text(workload_toml(shop_workload()))
    path = tmp_path / "plan.toml"
    path.write_text('[workload]\nfile = "shop.toml"\n[host]\nfile = "box.json"\n[setup]\nddr = "8MiB"\n')
    return path


def test_a_plan_is_printed_and_written(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "run", "plan.toml", "--html", "plan.html", "--json", "plan.json"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Asked\n  shop: 2 tables")
    assert said.endswith("the report: plan.html\n")
    assert "\x1b" not in said
    page = plan_path.with_suffix(".html").read_text(encoding="utf-8")
    assert "<title>shop: a plan</title>" in page
    found = json.loads(plan_path.with_suffix(".json").read_text())
    assert found["asked"]["setup"]["ddr"] == "8MiB"
    assert f"{found['prediction']['samples_per_s']:,.0f} samples/s" in said


def test_files_that_are_there_are_kept_unless_forced(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = plan_path.with_suffix(".json")
    kept.write_text("mine")
    assert cli.main(["plan", "run", "plan.toml", "--json", "plan.json"]) == 1
    assert capsys.readouterr().err == (
        "tierstore: plan.json exists; choose another name, or overwrite it with --force\n"
    )
    assert kept.read_text() == "mine"
    assert cli.main(["plan", "run", "plan.toml", "--json", "plan.json", "--force", "--set", "setup.ddr=16MiB"]) == 0
    assert json.loads(kept.read_text())["asked"]["setup"]["ddr"] == "16MiB"


def test_what_prevents_files_is_told_before_the_work(
    plan_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "plan", None)
    assert cli.main(["plan", "run", "plan.toml", "--html", ".", "--force"]) == 1
    assert capsys.readouterr().err == "tierstore: . is a directory; choose the name of a file\n"
    assert cli.main(["plan", "run", "plan.toml", "--html", "out", "--json", f"{plan_path.parent}/out", "--force"]) == 2
    assert "--html and --json are both" in capsys.readouterr().err


def test_what_is_read_is_not_written_over(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "trace", "generate", "shop.toml", "shop.npz", "--samples", "2000"]) == 0
    capsys.readouterr()
    costs_of(2, optimizer=shop_workload().optimizer).save("ranks.json")
    place = ["place", "--costs", "ranks.json", "shop.toml"]
    for words in (
        ["curve", "shop.npz", "--json", "shop.npz"],
        [*place, "shop.toml"],
        [*place, "./ranks.json"],
        ["trace", "generate", "--samples", "5", "shop.toml", "shop.toml"],
        ["trace", "describe", "shop.npz", "--json", "shop.npz"],
        ["run", "plan.toml", "--json", "plan.toml"],
        ["run", "plan.toml", "--html", "shop.toml"],
        ["run", "plan.toml", "--json", "box.json"],
    ):
        before = Path(words[-1]).read_bytes()
        for force in ([], ["--force"]):
            assert cli.main(["plan", *words, *force]) == 1
            assert capsys.readouterr().err == f"tierstore: {Path(words[-1])} is read; choose another name to write to\n"
            assert Path(words[-1]).read_bytes() == before


def test_what_is_there_is_replaced_by_force_alone(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "trace", "generate", "shop.toml", "shop.npz", "--samples", "2000"]) == 0
    out = plan_path.parent / "out.json"
    costs_of(2, optimizer=shop_workload().optimizer).save("ranks.json")
    for words in (["curve", "shop.npz", "--json"], ["place", "--costs", "ranks.json", "shop.toml"]):
        out.write_text("before")
        assert cli.main(["plan", *words, "out.json"]) == 1
        assert "overwrite it with --force" in capsys.readouterr().err
        assert out.read_text() == "before"
        assert cli.main(["plan", *words, "out.json", "--force"]) == 0
        json.loads(out.read_text())


def test_keys_print_a_plan_file_of_all_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "run", "--keys"]) == 0
    path = tmp_path / "plan.toml"
    path.write_text(capsys.readouterr().out)
    assert plan_file.load(path) == PlanFile()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["rnu"], 2, "tierstore: unknown plan command 'rnu'; did you mean 'run'?\n"),
        (["nosuch.toml"], 2, "tierstore: nosuch.toml: there is no such plan file\n"),
        (["trace", "x"], 2, "tierstore: unknown trace command 'x'; trace commands are generate, describe\n"),
        (["run"], 2, "tierstore: give a plan file: tierstore plan run FILE.toml; --keys prints one with all keys\n"),
        (["run", "nosuch.toml"], 2, "tierstore: nosuch.toml: there is no such plan file\n"),
        (
            ["run", "plan.toml", "--set", "setup.dr=1"],
            2,
            'tierstore: --set setup.dr=1: unknown key "dr" in [setup]; did',
        ),
        (
            ["run", "plan.toml", "--html", "nosuch/plan.html"],
            1,
            "tierstore: nosuch is not a directory; make it first\n",
        ),
        (["presets", "rcm1"], 2, "tierstore: there is no preset 'rcm1'; did you mean 'rmc1'?\n"),
        (
            ["trace", "generate", "shop.toml", "x.npz", "--samples", "0"],
            2,
            "tierstore: --samples 0: expected 1 or more\n",
        ),
        (["trace", "describe", "nosuch.npz"], 1, "tierstore: "),
        (["trace", "describe", "plan.toml"], 2, "tierstore: "),
        (["curve", "nosuch.npz"], 1, "tierstore: "),
        (
            ["place", "shop.toml", "plan.json", "--costs", "shop.toml"],
            2,
            "tierstore: shop.toml: Expecting value: ",
        ),
    ],
)
def test_errors_are_one_line_with_a_status(
    plan_path: Path, arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *arguments]) == status
    errors = capsys.readouterr().err
    assert errors.startswith(message)
    assert errors.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["trace"]])
def test_a_group_alone_prints_its_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *words]) == 2
    assert f"usage: tierstore {' '.join(['plan', *words])}" in capsys.readouterr().out


def test_presets_are_listed_and_printed_as_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "presets"]) == 0
    assert capsys.readouterr().out.startswith("rmc1: 8 tables, 32,000,000 rows of 32 columns, ")
    assert cli.main(["plan", "presets", "RMC1"]) == 0
    path = tmp_path / "mine.toml"
    path.write_text(capsys.readouterr().out)
    assert load_workload(path) == preset("rmc1")


def test_parts_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "parts"]) == 0
    assert "server-2s" in capsys.readouterr().out


def test_traces_are_generated_and_described(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate = ["plan", "trace", "generate", "shop.toml", "shop.npz", "--samples", "500", "--scale", "0.1"]
    assert cli.main(generate) == 0
    assert capsys.readouterr().out == "shop.npz: 4,000 lookups of 2 tables in 500 samples\n"
    assert cli.main(generate) == 1
    assert "--force" in capsys.readouterr().err
    assert cli.main(["plan", "trace", "describe", "shop.npz", "--json", "found.json"]) == 0
    assert "4,000 accesses of " in capsys.readouterr().out
    assert json.loads((plan_path.parent / "found.json").read_text())["batches"] == 2


def test_a_plan_of_a_generated_trace(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "trace", "generate", "shop.toml", "shop.npz", "--samples", "5000"]) == 0
    assert cli.main(["plan", "plan.toml", "--set", "trace.path=shop.npz"]) == 0
    assert "accesses: shop.npz, 40,000 in 20 batches" in " ".join(capsys.readouterr().out.split())
