"""Compile every Triton kernel over rows for an H100 or H200, which needs no GPU, and print its PTX as JSON.

A program of its own: Triton's interpreter, where it is on, takes the place of the compiler for a whole process.
"""

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tierstore.hbm import rows_triton
from tierstore.optim import SGD, Adagrad, Adam, RowWiseAdagrad

POINTERS = {
    "*i64": ("bag_starts", "starts"),
    "*i32": ("columns", "slots", "arg_max", "bag_of", "order", "table_of", "code_of"),
    "*fp32": ("scale", "out", "grad_out", "grad_scale", "runs", "hyper", "state"),
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names}


def compile_ptx(kernel: Any, weights: str, constants: dict[str, Any]) -> str:
    """PTX of ``kernel`` with the options of a launch; tensors are aligned, scalars are int32."""
    names = kernel.arg_names
    types = {name: TYPES.get(name, "i32") for name in names}
    types |= {"weights": weights} if "weights" in names else {}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        kernel,
        types,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if types[name][0] == "*"},
    )
    options = rows_triton.LAUNCH | {"num_warps": 2}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return str(compiled.asm["ptx"])


def main() -> None:
    narrow = {"DIM": 16, "WIDTH": 16, "WEIGHT_STRIDE": 16, "STEP": 4, "BFLOAT16": False}
    wide = {"DIM": 100, "WIDTH": 128, "WEIGHT_STRIDE": 104, "STEP": 1, "BFLOAT16": True}
    unweighted = {"DIM": 64, "WIDTH": 64, "STEP": 4}
    found = {
        "pool sum": compile_ptx(rows_triton.pool_bags, "*fp32", narrow | {"MODE": 0, "HAS_SCALE": True, "BAGS": 16}),
        "pool mean": compile_ptx(rows_triton.pool_bags, "*i16", wide | {"MODE": 1, "HAS_SCALE": True, "BAGS": 2}),
        "pool max": compile_ptx(rows_triton.pool_bags, "*fp16", narrow | {"MODE": 2, "HAS_SCALE": False, "BAGS": 16}),
        "dot": compile_ptx(rows_triton.dot_positions, "*fp32", narrow | {"ROWS": 16}),
        "dot wide": compile_ptx(rows_triton.dot_positions, "*i16", wide | {"ROWS": 2}),
        "runs": compile_ptx(rows_triton.sum_later_runs, "", unweighted | {"SOURCE": 1, "ROWS": 4}),
    }
    for source, rule in enumerate((SGD, RowWiseAdagrad, Adagrad, Adam)):
        constants = {"CODE": rule.code, "MIXED": True, "HOT": True, "SOURCE": source, "STATE_STRIDE": 200}
        found[rule.kind] = compile_ptx(rows_triton.update_tile, "*fp32", narrow | {"ROWS": 16} | constants)
    constants = {"CODE": Adam.code, "MIXED": False, "HOT": False, "SOURCE": 2, "STATE_STRIDE": 200}
    found["adam wide"] = compile_ptx(rows_triton.update_tile, "*i16", wide | {"ROWS": 2} | constants)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
