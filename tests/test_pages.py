"""The documentation: its figures are those of the committed results, its links lead somewhere, first snippets of pages
run for a newcomer, and docs/limits.md says what the code holds to."""

import contextlib
import os
import re
import shlex
import signal
import struct
import subprocess
import sysconfig
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import tierstore
from bench import redis_server
from bench.data import ROOT, examples
from docs import reference
from docs.generate import load_results, pages, stale_plots
from docs.headline import headline
from tests.children import run
from tests.conformance.cold_tier import WIDE, keys_of, write_rows
from tests.io.support import open_tier
from tests.serve.loops import wait_for
from tierstore import config, layout
from tierstore.cache import base as host
from tierstore.cli import main
from tierstore.dist.plan import MAX_RANKS, Plan
from tierstore.hbm import cache as device_cache
from tierstore.io import meta, records
from tierstore.layout import RowLayout
from tierstore.store import manifest, version
from tierstore.train import load, row_ids
from tierstore.updates.update_file import MAX_PAYLOAD_BYTES

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
EVERY_PAGE = [*ROOT.glob("*.md"), ROOT / "examples" / "README.md", *PAGES]
_LAST_LINE = 12
_OF_THE_SHELL = set("|&;<>$`*")  # commands with one of these are for sh, not for ``main``
_SHORTER = {"sweep.md": ("=64,256 --seeds 2", "=256 --seeds 1")}  # each run is a process of its own


def test_pages_plots_and_results_belong_together():
    stale = [path.name for path, text in pages().items() if path.read_text() != text]
    assert not stale, "run make docs and commit what it writes"
    assert [path.name for path, _, _ in stale_plots()] == [], "run make docs and commit what it draws"
    for name, found in load_results().items():
        assert found["benchmark"] == name
        assert found["machine"]["cpu"]
        assert (ROOT / "bench" / f"{name}.toml").is_file()


def test_the_readme_is_short_opens_with_the_two_commands_and_has_a_table_of_the_figures():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 120
    assert [line.split()[:2] for line in lines[2:4]] == [["make", "demo"], ["make", "test"]]
    columns, *rows = headline(load_results())
    assert len(rows) == 5
    for row in rows:
        ours, theirs = (float(cell.split()[0].replace(",", "")) for cell in (row[1], row[3]))
        assert float(row[4]) == pytest.approx(ours / theirs, rel=0.03)
    assert headline({}) == [columns]


def test_the_reference_is_built_without_warnings_and_describes_all_that_is_public(tmp_path):
    reference.build(tmp_path)
    made = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.html")}
    assert made >= {"index.html", "tierstore.html", "tierstore/optim.html", "tierstore/train/readers.html"}
    assert "TieredEmbeddingBagCollection" in (tmp_path / "tierstore.html").read_text()
    assert reference.undocumented() == []


def test_links_between_pages_lead_somewhere_and_the_index_leads_to_every_page():
    for path in EVERY_PAGE:
        targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text())
        assert [target for target in targets if not (path.parent / target).exists()] == [], path
    index = re.findall(r"\]\(([a-z/-]+\.md)\)", (DOCS / "index.md").read_text())
    assert {*index} == {str(page.relative_to(DOCS)) for page in PAGES} - {"index.md"}


def test_the_first_examples_of_pages_may_be_run_in_one_folder():
    """Each makes a store of a name of its own."""
    names = [
        name
        for page in EVERY_PAGE
        for first in examples(str(page.relative_to(ROOT)))[:1]
        for name in {*re.findall(r'(?:open|open_sharded|path)[(=]"([^"]+)"', first)}
    ]
    assert len(names) > 10
    assert len(names) == len({*names}), sorted(names)


def first_block(page: Path) -> tuple[str, str]:
    """Language and text of a page's first fenced block, which begins within its first lines."""
    found = re.search(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found, "no fenced block"
    begins = found.string.count("\n", 0, found.start()) + 1
    assert begins <= _LAST_LINE, f"the first block begins in line {begins}; a reader wants it within {_LAST_LINE}"
    return found[1], found[2]


def commands(text: str) -> list[str]:
    return re.findall(r"^    (tierstore .*)$", text, re.MULTILINE)


def run_python(block: str, name: str, **names: Any) -> dict[str, Any]:
    exec(compile(block, name, "exec"), names := {"__name__": "__main__", **names})
    return names


@contextlib.contextmanager
def shell(block: str, **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """A shell that runs it; in the end what it left is killed."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = ["sh", "-e", "-c", block]
    with subprocess.Popen(command, env=environment, start_new_session=True, text=True, **options) as running:
        try:
            yield running
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)


def run_shell(block: str) -> None:
    """Commands of ours at the end run in this process: to start one takes longer than most of them do."""
    lines, own = block.replace("\\\n", " ").splitlines(), list[str]()
    while lines and lines[-1].startswith("tierstore ") and not _OF_THE_SHELL & set(lines[-1].partition(" #")[0]):
        own.append(lines.pop())
    if lines:
        with shell("\n".join(lines), stdin=subprocess.DEVNULL) as running:
            assert running.wait() == 0
    for line in reversed(own):
        assert main(shlex.split(line, comments=True)[1:]) == 0, line


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_first_snippet_runs_in_an_empty_folder(page, tmp_path, monkeypatch):
    """Of pages on planning and sweeps: where the checkout's examples/ is, and run.toml of docs/train.md."""
    language, block = first_block(page)
    assert language in {"sh", "python"}
    monkeypatch.chdir(tmp_path)
    if page.name in ("planning.md", "sweep.md") or page.parent.name == "planning":
        Path("examples").symlink_to(ROOT / "examples")
        if " run.toml" in block:
            run_shell(first_block(DOCS / "train.md")[1].partition("tierstore train")[0])
    if language == "python":
        run_python(block, page.name)
        return
    if page.name in _SHORTER:
        old, new = _SHORTER[page.name]
        assert old in block
        block = block.replace(old, new)
    run_shell(block)


def test_example_in_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_python(*examples("README.md"), "README.md")
    with names["tierstore"].open("shop", mode="r", ddr="64MiB") as store:
        assert store.extra == {"step": 1}
        furthest = store["item"].read(torch.tensor([3, 17, 999_999_999, 5])).abs().amax(dim=1)
        # Rows begin within 0.01 of zero. Row 5 was never looked up; the first step moves the others by more.
        assert (furthest > 0.01).tolist() == [True, True, True, False]


def test_the_run_from_the_command_line_follows_that_in_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = DOCS / "data.md"
    text = page.read_text().partition("\n## ")[0]
    (toml,) = re.findall(r"^```toml\n# (.*?)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    run_python(first_block(page)[1], page.name)
    Path(toml[0]).write_text(toml[1])
    first, resumed = commands(text)
    run_shell(first)
    with tierstore.open("visits", mode="r") as python, tierstore.open("visits-2", mode="r") as shell:
        assert torch.equal(*(store["city"].read(torch.arange(1_000)) for store in (python, shell)))
    run_shell(resumed)
    with tierstore.open("visits-2", mode="r") as shell:
        assert shell.version == 2


def four_commands(folder):
    """Those of docs/online.md: a row that a file brings is in all of them, with the same bits."""
    import redis

    Path("examples").symlink_to(ROOT / "examples")
    text, block = (DOCS / "online.md").read_text().partition("\n## ")[0], first_block(DOCS / "online.md")[1]
    train, publish, feed, index = re.findall(r"^    (\w+ .*)$", text, re.MULTILINE)
    run_shell(block)
    Path("clicks/_END").unlink()
    row = row_ids(load("run.toml"), "item", [1500]).item()
    with contextlib.ExitStack() as held:
        url = held.enter_context(redis_server.running(folder))
        client = held.enter_context(redis.Redis.from_url(url))
        asked = held.enter_context(shell(index, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        others = train.replace("run.toml", "run.toml --resume"), feed.replace("redis://127.0.0.1:6379/0", url)
        for command in (*publish.split("&"), *others):
            child = ForkProcess(target=main, args=[shlex.split(command, comments=True)[1:]])  # has imported all
            child.start()
            held.callback(child.kill)

        def served():
            time.sleep(0.1)
            inputs = [{"name": "ids", "datatype": "INT64", "shape": [1], "data": [row]}]
            try:
                answer = httpx.post("http://127.0.0.1:8000/v2/models/rows.item/infer", json={"inputs": inputs})
                return np.array(answer.json()["outputs"][0]["data"], "<f4").tobytes()
            except (httpx.TransportError, KeyError):  # it begins, or has no table yet
                return None

        def is_found():
            print(row, file=asked.stdin, flush=True)
            return bool(asked.stdout.readline().strip())

        wait_for(lambda: served() and client.exists("live#position"))
        assert (client.get(f"live:item:{row}"), is_found()) == (None, False)
        lines = "".join(f"{1.8e9 + 2000 + number},1,5,1500\n" for number in range(256))
        Path("clicks/.2.csv").write_text(f"time,clicked,user,item\n{lines}")
        Path("clicks/.2.csv").rename("clicks/2.csv")
        wait_for(lambda: is_found() and served() == client.get(f"live:item:{row}"))


def test_four_commands_keep_a_model_a_replica_a_redis_and_an_index_fresh():
    pytest.importorskip("redis", reason="needs redis-py: pip install redis")
    pytest.importorskip("usearch", reason="needs usearch: pip install usearch")
    if redis_server.COMMAND is None:
        pytest.skip("needs a redis-server, as of apt-get install redis-server")
    with tempfile.TemporaryDirectory(prefix="four-") as folder:  # short, for a socket
        run(
            "import os; os.chdir(sys.argv[1]); from tests.test_pages import *; four_commands(Path(sys.argv[1]))", folder
        )


@pytest.mark.parametrize("rule", [torch.optim.SparseAdam, torch.optim.Adam])
def test_adams_state_moves_as_the_page_says(rule, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bag = torch.nn.EmbeddingBag(10, 4, sparse=rule is torch.optim.SparseAdam)
    optimizer = rule(bag.parameters(), lr=0.01)  # type: ignore[call-arg]
    bag(torch.tensor([[3, 9]])).square().sum().backward()
    optimizer.step()
    run_python(examples("docs/coming-from-embedding-bag.md")[1], "Adam", torch=torch, bag=bag, optimizer=optimizer)
    text = (DOCS / "coming-from-embedding-bag.md").read_text()
    run_shell("\n".join(line for line in commands(text) if "-of-ada" in line))
    with tierstore.open("bags-of-adam", ddr="8MiB") as store:
        optimizer.zero_grad()
        for each in (bag, tierstore.TieredEmbeddingBag(store["item"])):
            each(torch.tensor([[3, 9]])).square().sum().backward()
        optimizer.step()
        touched = torch.tensor([3, 9])
        torch.testing.assert_close(store["item"].read(touched), bag.weight.detach()[touched])
    with tierstore.open("bags-of-adagrad", mode="r") as store:
        assert store["item"].config.optimizer == tierstore.optim.RowWiseAdagrad(lr=0.05)
        assert store["item"].config.pooling == "mean"


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_a_checkpoint_of_torchrec_with_a_prefix_loads_as_the_page_says(tmp_path):
    weight = torch.rand(10, 4)
    saved = {"model": {"sparse.ebc.embedding_bags.product.weight": weight, "over.weight": torch.rand(2)}}
    dcp.save(saved, checkpoint_id=tmp_path)
    text = (DOCS / "coming-from-torchrec.md").read_text()
    (snippet,) = re.findall(r"^  ```python\n(.*?)^  ```$", text, re.MULTILINE | re.DOTALL)
    with tierstore.open(cold="memory", ddr="8MiB") as store:
        store.create_table(tierstore.TableConfig(name="product", num_embeddings=10, embedding_dim=4))
        run_python(textwrap.dedent(snippet), "prefix", tierstore=tierstore, dcp=dcp, store=store, path=tmp_path)
        assert torch.equal(store["product"].read(torch.arange(10)), weight)


_PAGE = 4096
_MIB = 2**20
_WIDEST = (layout.MAX_PAGES_PER_BLOCK * _PAGE // 8 - layout.BLOCK_HEADER_WORDS - layout.PAIR_WORDS) * 2  # columns


def _power(value: int, less: int = 0) -> str:
    assert (value + less) & (value + less - 1) == 0
    return f"2^{(value + less).bit_length() - 1}" + (f" - {less}" if less else "")


def test_the_page_has_the_numbers_of_the_code() -> None:
    text = (ROOT / "docs" / "limits.md").read_text()
    said = dict(re.findall(r"^\| (.+?) \| (.+?) \|", text, re.MULTILINE))
    most = layout.MAX_PAGES_PER_BLOCK * _PAGE - layout.BLOCK_HEADER_WORDS * layout.WORD_BYTES
    expected = {
        "rows of a table": _power(layout.MAX_ROWS),
        "columns": _power(config._MAX_DIM),
        "bytes of a stored row, with its key and checksum": f"{most:,}: {layout.MAX_PAGES_PER_BLOCK} pages of 4 KiB",
        "characters of a name": str(config._MAX_NAME),
        "tables": _power(layout.MAX_TABLES),
        "bytes of the manifest": f"{manifest._MAX_BYTES // _MIB} MiB",
        "pages of the file": f"{_power(meta.MAX_PAGES)}: {meta.MAX_PAGES * _PAGE // 2**40} TiB",
        "pages of a segment": str(layout.SEGMENT_PAGES),
        "versions kept": f"{config.MAX_KEPT_VERSIONS:,}",
        "number of a version": _power(records.MAX_VERSION, 1),
        "bytes of a commit's `extra` and tensors": f"{-(-records.MAX_PAYLOAD_BYTES // 2**40)} TiB; "
        f"{MAX_PAYLOAD_BYTES // _MIB} MiB in an update file",
        "ancestors that a commit names": str(version.MAX_ANCESTORS),
        "threads of a store": "1,024",
        "ranks of a sharded store": f"{MAX_RANKS:,}",
        "rows in memory, of a layout": _power(host.CAPACITY_MAX, 2),
        "rows in device memory, of a layout": _power(device_cache.CAPACITY_MAX, 64),
    }
    assert {name: said[name][: len(text)] for name, text in expected.items()} == expected


@pytest.mark.parametrize(
    ("make", "last", "named"),
    [
        (lambda count: tierstore.TableConfig(name="t", num_embeddings=count, embedding_dim=4), 2**40, "num_embeddings"),
        (lambda count: tierstore.TableConfig(name="t", num_embeddings=9, embedding_dim=count), 2**20, "embedding_dim"),
        (lambda count: tierstore.TableConfig(name="n" * count, num_embeddings=9, embedding_dim=4), 200, "name"),
        (lambda count: RowLayout(dim=count).pages_per_block, _WIDEST, "Split the table by columns"),
        (lambda count: tierstore.open(cold="memory", threads=count, ddr="4MiB").close(), 1024, "threads"),
        (lambda count: tierstore.open(cold="memory", keep=count, ddr="4MiB").close(), 1000, "keep"),
    ],
    ids=["rows", "columns", "name", "bytes of a row", "threads", "versions kept"],
)
def test_the_last_that_is_taken_and_the_first_that_is_not(make: Callable[[int], Any], last: int, named: str) -> None:
    make(last)
    with pytest.raises(ValueError, match=named):
        make(last + 1)


def test_the_last_version(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.set_tables({0: (WIDE, 10)})
    tier.commit(b"", records.MAX_VERSION - 1)
    write_rows(tier, WIDE, keys_of(0, [1]), 1)
    tier.commit(b"", records.MAX_VERSION)
    for use in (lambda: write_rows(tier, WIDE, keys_of(0, [1]), 1), lambda: tier.commit(b"", tier.last_version + 1)):
        with pytest.raises(ValueError, match=str(records.MAX_VERSION)):
            use()
    tier.close()
    tier = open_tier(tmp_path)
    assert tier.version == records.MAX_VERSION
    tier.close()


def test_a_plan_of_too_many_ranks_and_a_file_of_too_many_pages(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    Plan(MAX_RANKS, {}).save(path)
    assert Plan.load(path).world_size == MAX_RANKS
    Plan(MAX_RANKS + 1, {}).save(path)
    with pytest.raises(ValueError, match="world_size"):
        Plan.load(path)
    page = bytearray(meta.META_READ_BYTES)
    struct.pack_into("<H", page, 10, 8)
    struct.pack_into("<IIQQ", page, 16, meta.MAGIC, 1, 0, 0)
    struct.pack_into("<IHH5Q", page, 40, _PAGE, 8, 0, 0, 0, 0, 0, meta.NO_ROOT)
    struct.pack_into("<IHH5Q", page, 88, 0, 0, 0, 0, 0, 0, 0, meta.NO_ROOT)
    for last, fits in ((meta.MAX_PAGES - 1, True), (meta.MAX_PAGES, False)):
        struct.pack_into("<QQ", page, 136, last, 1)
        assert isinstance(meta.parse_meta(bytes(page)), meta.Meta) == fits
