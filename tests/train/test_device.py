"""Training with rows in device memory: on the CPU the same bits as without; on a GPU the same bits for every budget."""

import pytest
import torch

from tierstore.cli import entry as cli
from tierstore.settings.sections import to_toml
from tierstore.train import train

from .runs import config_of

FEW, ALL = 26_000, "1MiB"
"""Device memory for about a batch's rows, and for all there are."""


@pytest.fixture(scope="module")
def plain(folder):
    """The run without device memory, on the CPU."""
    return train(config_of(folder, "plain"), bits=True)


@pytest.mark.parametrize(("first", "then", "depth"), [(FEW, FEW, 0), (0, FEW, 5), (ALL, 0, 2)])
def test_rows_in_device_memory_and_another_budget_change_no_bit(run, plain, first, then, depth):
    begun = run(store__hbm=first, train__prefetch_depth=depth, train__epochs=1, train__commit_every=7)
    summary = run(store__hbm=then, train__prefetch_depth=depth, resume=True)
    assert (summary.bits, summary.test) == (plain.bits, plain.test)
    assert begun.bits != plain.bits
    assert (begun.tiers.hbm.evictions > 0) == (first == FEW)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_machine_without_cuda_says_so(folder, tmp_path, capsys):
    run_file = tmp_path / "run.toml"
    run_file.write_text(to_toml(config_of(folder, "never")))
    assert cli.main(["train", str(run_file), "--hbm", "1MiB", "--set", "store.device=cuda:0"]) == 2
    assert cli.main(["demo", "--dir", str(tmp_path / "demo"), "--device", "cuda"]) == 2
    train_error, demo_error = capsys.readouterr().err.splitlines()
    for error in (train_error, demo_error):
        assert error.startswith("tierstore: device='cuda")
        assert "CUDA" in error
    assert not (tmp_path / "demo").exists()


@pytest.mark.gpu
def test_on_a_gpu_budgets_and_depths_change_no_bit(run):
    whole = run("whole", store__device="cuda", store__hbm=ALL, train__prefetch_depth=0)
    for depth in (0, 2, 5):
        summary = run(f"few {depth}", store__device="cuda", store__hbm=FEW, train__prefetch_depth=depth)
        assert (summary.bits, summary.test, summary.loss) == (whole.bits, whole.test, whole.loss)
        assert whole.tiers.hbm.evictions == 0 < summary.tiers.hbm.evictions
