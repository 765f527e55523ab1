"""The benchmark's own peer in CUDA C++: valid for a GPU, and right as 32 threads on the CPU."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.gpu.rig import Rig
from bench.gpu.tables_peer import _SEGMENT, SOURCE, source_for, tables_missing

_LAUNCHERS = """
extern "C" void run_forward(
    int warps, const float* weights, const int* rows, const int* offsets, float* out, int bags, int batch, int tables
) {
    launch(warps, forward, weights, rows, offsets, out, bags, batch, tables);
}
extern "C" void run_backward(
    int warps, const int* sorted, const long long* order, const int* bag_of, const float* grad_out, float* weights,
    float* state, float* partial, int count, int batch, int tables, double lr, double eps, int adagrad
) {
    launch(warps, backward, sorted, order, bag_of, grad_out, weights, state, partial, count, batch, tables, lr, eps,
           adagrad);
    launch((count + SEGMENT - 1) / SEGMENT, finish, sorted, partial, weights, state, count, lr, eps, adagrad);
}
"""
BATCH, TABLES, ROWS, LR, EPS = 12, 3, 90, 0.5, 1e-3


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("dim", [16, 128])
def test_it_compiles_for_a_gpu_without_spills(dim: int, tmp_path: Path) -> None:
    path = tmp_path / "tables.cu"
    path.write_text(source_for(dim))
    command = ["nvcc", "-arch=sm_90", "-Xptxas", "-v,-Werror", "-Werror", "all-warnings", "-cubin", "-o", "out"]
    done = subprocess.run([*command, path], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    assert re.findall(r"(\d+) bytes spill", done.stderr) == ["0"] * 6


def test_segments_are_as_long_as_its_caller_thinks() -> None:
    assert f"SEGMENT = {_SEGMENT};" in SOURCE.read_text()


@pytest.mark.gpu
def test_it_is_right_on_a_gpu() -> None:
    assert tables_missing(Rig("cuda")) == ""


@pytest.fixture(scope="module", params=[8, 64])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Any]:
    """(width, the kernels on the CPU)."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    folder, dim = tmp_path_factory.mktemp("tables"), request.param
    header = Path(__file__).with_name("warp.h").read_text()
    # Short segments, so that few positions have many.
    source = source_for(dim).replace(f"SEGMENT = {_SEGMENT}", "SEGMENT = 8")
    (folder / "tables.cpp").write_text(header + source + _LAUNCHERS)
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-o", "tables.so", "tables.cpp"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if "std=c++20" in done.stderr:
        pytest.skip("needs a compiler of C++20")
    assert not done.returncode, done.stderr
    return dim, ctypes.CDLL(str(folder / "tables.so"))


def pointer(values: NDArray[Any]) -> ctypes.c_void_p:
    assert values.flags.c_contiguous
    return values.ctypes.data_as(ctypes.c_void_p)


@pytest.mark.parametrize("is_adagrad", [False, True])
def test_it_is_right_on_the_cpu(library: tuple[int, Any], is_adagrad: bool) -> None:
    dim, kernels = library
    generator = np.random.default_rng(dim)
    lengths = generator.integers(0, 20, BATCH * TABLES)
    lengths[5] = 0
    bags, count = len(lengths), int(lengths.sum())
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    # Some rows fill several segments, most do not fill one.
    rows = (ROWS * generator.random(count) ** 6).astype(np.int32)
    bag_of = np.repeat(np.arange(bags, dtype=np.int32), lengths)
    weights = generator.random((ROWS, dim), np.float32)
    gradient = generator.standard_normal((BATCH, TABLES * dim)).astype(np.float32)
    own = gradient.reshape(BATCH, TABLES, dim).transpose(1, 0, 2).reshape(bags, dim)[bag_of].astype(np.float64)

    out = np.full_like(gradient, np.nan)
    kernels.run_forward(bags, pointer(weights), pointer(rows), pointer(starts), pointer(out), bags, BATCH, TABLES)
    pooled = np.zeros((bags, dim))
    np.add.at(pooled, bag_of, weights[rows])
    assert np.allclose(out, pooled.reshape(TABLES, BATCH, dim).transpose(1, 0, 2).reshape(BATCH, -1), rtol=1e-5)

    summed = np.zeros((ROWS, dim))
    np.add.at(summed, rows, own)
    state = generator.random(ROWS, np.float32)
    squares = state + (summed**2).mean(1)
    touched = np.isin(np.arange(ROWS), rows)
    rate = LR / (np.sqrt(squares) + EPS) if is_adagrad else np.full(ROWS, LR)
    expected = weights - rate[:, None] * summed
    order = np.argsort(rows, kind="stable")
    ordered, partial = rows[order], np.zeros((count, dim), np.float32)
    before = state.copy()
    kernels.run_backward(
        count, pointer(ordered), pointer(order), pointer(bag_of), pointer(gradient), pointer(weights), pointer(state),
        pointer(partial), count, BATCH, TABLES, ctypes.c_double(LR), ctypes.c_double(EPS), int(is_adagrad),
    )  # fmt: skip
    assert np.allclose(weights, expected, rtol=1e-4, atol=1e-4)
    assert np.allclose(state, np.where(touched, squares, before) if is_adagrad else before, rtol=1e-4)
