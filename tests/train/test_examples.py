"""The example run files."""

from pathlib import Path

import pytest

from tierstore.plan import plan_file
from tierstore.train import train
from tierstore.train.config import Override, load

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PLAN = EXAMPLES / "plan.toml"


def test_the_example_of_a_plan_is_valid():
    asked = plan_file.load(PLAN)
    assert asked.target.samples_per_s > 0
    assert not asked.is_fixed


@pytest.mark.parametrize("path", sorted(set(EXAMPLES.glob("*.toml")) - {PLAN}), ids=lambda path: path.name)
def test_every_example_is_a_valid_run_file(path):
    assert load(path).data.train_rows > 0


@pytest.mark.slow
def test_criteo_with_five_percent_in_memory_reaches_its_auc_in_the_bits_of_the_in_memory_run(criteo_path, tmp_path):
    def run(name, **store):
        overrides = [
            Override(section, key, value, key)
            for section, key, value in [
                ("data", "path", str(criteo_path)),
                ("store", "path", str(tmp_path / name)),
                *(("store", key, value) for key, value in store.items()),
            ]
        ]
        return train(load(EXAMPLES / "criteo.toml", overrides), bits=True)

    tiered = run("tiered")
    assert tiered.test.auc >= 0.770
    assert tiered.tiers.ddr.bytes < 0.05 * 630_200 * 128
    assert tiered.tiers.ddr.evictions > 0
    in_memory = run("in memory", ddr="256MiB")
    assert in_memory.tiers.ddr.evictions == 0
    assert tiered.bits == in_memory.bits
