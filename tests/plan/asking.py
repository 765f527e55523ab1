"""Plan files of the small workload on the small host, their answers, and commands without the shell around them."""

import argparse
import functools
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.plan.hosts import SHOP_HOST, shop_workload
from tierstore.cli.plan import COMMANDS
from tierstore.plan import Host, TableShape, Workload
from tierstore.plan.host import write_host
from tierstore.plan.planning import PlanFile, PlanResult, load, parse_override, plan
from tierstore.plan.presets import workload_toml
from tierstore.plan.workload import Assumed

HOSTILE = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">\x1b[2J\x07"


def run(name: str, *words: object) -> int:
    """A command's exit status; its errors are raised."""
    parser = argparse.ArgumentParser()
    COMMANDS[name].add_arguments(parser)
    return COMMANDS[name].run(parser.parse_args([str(word) for word in words]))


def shop_plan(folder: Path, *overrides: str, host: Host = SHOP_HOST, workload: Workload | None = None) -> PlanFile:
    """Of files in the folder: plan.toml, shop.toml and box.json."""
    write_host(host, folder / "box.json", force=True)
    (folder / "shop.toml").write_text(workload_toml(workload or shop_workload()))
    path = folder / "plan.toml"
    path.write_text(f'[workload]\nfile = "{folder}/shop.toml"\n[host]\nfile = "{folder}/box.json"\n')
    return load(path, [parse_override(text) for text in overrides])


@functools.cache
def planned(name: str = "shop", *overrides: str) -> PlanResult:
    """Of training at a rate, by a search; a host and a table have that name."""
    tables = (TableShape(name=name, num_embeddings=400_000, embedding_dim=16, pooling_factor=4.0),)
    workload = shop_workload(name=name, tables=tables, optimizer="sgd", assumed=(Assumed("exponent", (name,)),))
    asked = overrides or ("target.samples_per_s=20000", "search.memory_shares=[0.001, 0.01]", "search.runners_up=3")
    with tempfile.TemporaryDirectory() as folder:
        return plan(shop_plan(Path(folder), *asked, host=replace(SHOP_HOST, name=name), workload=workload))


def served() -> PlanResult:
    """Of a given setup that serves at a rate, slower than asked for."""
    keys = ("setup.ddr=8MiB", "workload.optimizer=none", "target.queries_per_s=50", "target.p99_ms=1e-6")
    return planned("shop", *keys)
