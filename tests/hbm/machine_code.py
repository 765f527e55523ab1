"""What Triton's compiler makes of the HBM tier's kernels for an H100 or H200, as JSON; it needs no GPU.

    python -m tests.hbm.machine_code > machine_code.json

A program of its own: Triton's interpreter, where it is on, takes the place of the compiler for a whole process. The
tier's own functions are called on the CPU, with a ``launch`` that only notes kernel, arguments and options. So what is
compiled is what is launched.
"""

import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

MODULES: Final = tuple(f"tierstore.hbm.{name}_triton" for name in ("cache", "rows"))
"""Every module with Triton kernels."""

_TYPES: Final = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16",
    torch.int8: "*i8", torch.uint8: "*u8",
}  # fmt: skip
ROW_KERNELS: Final = {"pool_bags", "dot_positions", "sum_runs", "sum_super_runs", "update_tile"}
"""Those with loops over rows, whose instructions are looked at."""
_INSTRUCTION: Final = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ +)?(?P<text>[A-Z][^;]*)")
_LABEL: Final = re.compile(r"^(\.L_x_\d+):")
_BRANCH: Final = re.compile(r"BRA\b.*`\((\.L_x_\d+)\)")


class Launch(NamedTuple):
    """A kernel as it is launched, with positional arguments and named constants and options."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def kernels() -> set[str]:
    from triton.runtime.jit import JITFunction

    made = [each for name in MODULES for each in vars(sys.modules[name]).values() if isinstance(each, JITFunction)]
    text = "\n".join({each.src for each in made})
    return {each.fn.__name__ for each in made if not re.search(rf"(?<!def )\b{each.fn.__name__}\(", text)}


def _row_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Tables of 16, 64 and 100 columns, by all modes and rules."""
    from tierstore import optim
    from tierstore.hbm import launches
    from tierstore.hbm.kernel_types import Bags, DeviceIds, Groups
    from tierstore.kernels import slots as kernels
    from tierstore.optim.configs import NUM_HYPER
    from tierstore.optim.rules import SUPER_RUN

    length = SUPER_RUN + 1
    numbers, long = torch.zeros(length, dtype=torch.int32), torch.zeros(length, dtype=torch.int64)
    groups = Groups(long, numbers, numbers[:1], numbers)

    def bags(dim: int, *, scaled: bool) -> Bags:
        scale = torch.zeros(length) if scaled else None
        return Bags(numbers[:5], numbers, numbers[:2], numbers[:2], 2, scale, 4 if dim % 4 == 0 else 1)

    def maxima(dim: int) -> torch.Tensor:
        return torch.zeros((4, dim), dtype=torch.int32)

    def pool(dim: int, weights: torch.Tensor, mode: int, *, scaled: bool = False, by_row: bool = True) -> None:
        launches.pool_rows(
            bags(dim, scaled=scaled), numbers, numbers if by_row else None, int(mode == kernels.MAX), length, mode=mode,
            weights=weights, dim=dim, out=torch.zeros(2, 2 * dim), arg_max=maxima(dim) if mode == kernels.MAX else None,
        )  # fmt: skip

    def update(dim: int, weights: torch.Tensor, *rules: Any, maxed: bool = False, mean: bool = False) -> None:
        codes = tuple(rule.code for rule in rules)
        launches.update_rows(
            bags(dim, scaled=len(codes) > 1), groups, numbers, 0, grad_out=torch.zeros(2, 2 * dim),
            arg_max=maxima(dim) if maxed else None, mean=mean, codes=codes, code_of=numbers,
            hyper=torch.zeros(len(codes), NUM_HYPER), weights=weights,
            state=torch.zeros(4, max(rule().state_dim(dim) for rule in rules) + 2), dim=dim,
            dirty=torch.zeros(4, dtype=torch.uint8) if len(codes) == 1 else None,
        )  # fmt: skip

    narrow, middle, wide = torch.zeros(4, 16), torch.zeros(4, 64), torch.zeros(4, 104, dtype=torch.bfloat16)
    yield "number", lambda: launches.number_bags(numbers[:5], numbers)
    yield "pool sum of 16", lambda: pool(16, narrow, kernels.SUM, by_row=False)
    yield "pool mean of 100", lambda: pool(100, wide, kernels.MEAN, scaled=True)
    yield "pool max of 16", lambda: pool(16, narrow.half(), kernels.MAX)
    yield "dot of 16", lambda: launches.dot_rows(
        bags(16, scaled=True), numbers, numbers, 0, length, weights=narrow, dim=16, grad_out=torch.zeros(2, 32),
        grad_scale=torch.zeros(length),
    )  # fmt: skip
    buffers = tuple(torch.zeros((64, width), dtype=torch.int64) for width in (8, 1))
    yield "move", lambda: launches.move_rows(buffers, buffers, numbers[:64], up=True)
    yield "rowwise_adagrad of 64, mean", lambda: update(64, middle, optim.RowWiseAdagrad, mean=True)
    yield "sgd of 16, max", lambda: update(16, narrow, optim.SGD, maxed=True)
    yield "adam and adagrad of 100, scaled", lambda: update(100, wide, optim.Adam, optim.Adagrad)
    for name, rows, scale in (("slots", numbers[:64], None), ("keys", long[:64], torch.zeros(64))):
        given, some = DeviceIds(long[:64], long[:5], scale), bags(16, scaled=False)._replace(scale=scale)
        yield (
            f"join to {name}",
            partial(launches.join_ids, given, long[:2], long[:2], some, rows, numbers[:1], long[:3]),
        )


def _cache_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    from tierstore.hbm import launches
    from tierstore.hbm.kernel_types import NUM_STATUSES, SUMMARY_ROWS, WAYS, CacheState, Plan

    keys, slots = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int32)
    cache_state = CacheState.empty(2 * WAYS, torch.device("cpu"))
    summary = torch.zeros((SUMMARY_ROWS, NUM_STATUSES), dtype=torch.int32)
    for name, lying, lfu in (("lru", None, False), ("lfu", slots, True)):
        plan = Plan(keys, slots, slots.to(torch.int8), summary)
        yield f"plan {name}", partial(launches.plan, cache_state, keys, slots[:1], lying, summary)
        yield f"commit {name}", partial(launches.commit, cache_state, plan, summary, 1, lfu, lfu)
    yield "list", partial(launches.list_keys, cache_state, plan, keys, 64, torch.stack([keys, keys]))
    yield "find", lambda: launches.find_sorted(keys, keys, keys, 64)
    yield "age", lambda: launches.age(cache_state.ranks)
    yield "edit", partial(launches.edit_flags, cache_state.flags, slots, 64, unpin=True, keep=-1, add=0)
    yield "mix", lambda: launches.mix_keys(keys)
    yield "place starts of keys", lambda: launches.place_starts(keys, keys, keys)
    yield "place starts of slots", lambda: launches.place_starts(slots, keys, None)


def launches() -> dict[str, Launch]:
    from tierstore.hbm import launches as module

    noted: dict[str, Launch] = {}
    case = ""

    def note(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
        assert programs, case
        name, given = kernel.fn.__name__, tuple(arguments[0] if each is None else each for each in arguments)
        count = sum(each.startswith(f"{case}: {name}") for each in noted)
        noted[f"{case}: {name}" + f" {count + 1}" * bool(count)] = Launch(kernel, given, options)

    module.launch = note  # type: ignore[assignment]
    for case, act in (*_row_cases(), *_cache_cases()):  # noqa: B007 - ``note`` reads it
        act()
    return noted


def _compiled(launch: Launch) -> Any:
    """For sm_90, as Triton would specialize the kernel for aligned tensors."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tierstore.hbm.launches import OPTIONS

    kernel, types, constants, attributes = launch.kernel, {}, {}, {}
    options = {key: value for key, value in launch.options.items() if key not in kernel.arg_names}
    for place, param in enumerate(kernel.params):
        value = launch.arguments[place] if place < len(launch.arguments) else launch.options[param.name]
        is_number = not isinstance(value, torch.Tensor)
        if param.is_constexpr or (is_number and value == 1 and not param.do_not_specialize):
            types[param.name], constants[(place,)] = "constexpr", value
        elif not is_number:
            types[param.name] = _TYPES[value.dtype]
            if not (param.do_not_specialize or param.do_not_specialize_on_alignment):
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            types[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, types, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS | options)


def _tool(name: str, *arguments: str) -> str:
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _loops(sass: str) -> list[dict[str, int]]:
    """Of the innermost loops of nvdisasm's text: from a label to a branch back to it, without another in between."""
    lines: list[str] = []
    places: dict[str, int] = {}
    branches: list[tuple[int, int]] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line.strip()):
            places[label[1]] = len(lines)
        if instruction := _INSTRUCTION.search(line):
            text = instruction["text"].strip()
            branch = _BRANCH.search(text)
            if branch and places.get(branch[1], len(lines)) < len(lines):
                branches.append((places[branch[1]], len(lines)))
            lines.append(text)
    inner = [one for one in branches if not any(one[0] <= two[0] and two[1] < one[1] for two in branches)]
    return [_loop(lines[first : last + 1]) for first, last in inner]


def _loop(lines: list[str]) -> dict[str, int]:
    """Its barriers, and how many loads of more than one number precede its first sum or comparison of float32."""
    loads = [place for place, text in enumerate(lines) if re.match(r"LDG\S*\.(64|128)\b", text)]
    sums = [place for place, text in enumerate(lines) if re.match(r"(FADD|FSETP|FMNMX)\b", text)]
    first = min(sums, default=len(lines))
    barriers = sum(text.startswith(("BAR.", "BAR ")) for text in lines)
    return {"barriers": barriers, "loaded_first": sum(place < first for place in loads)}


_NOTED: Final[dict[str, Launch]] = {}
"""What forked processes find here."""


def _found(name: str) -> dict[str, Any]:
    """Registers of a thread, bytes of those that did not fit, the innermost loops of a kernel over rows, and PTX."""
    kernel = _NOTED[name].kernel.fn.__name__
    compiled = _compiled(_NOTED[name])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", str(path))
        sass = _tool("nvdisasm", "-c", str(path)) if kernel in ROW_KERNELS else ""
    return {
        "kernel": kernel,
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "spills": sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage))),
        "shared_bytes": int(compiled.metadata.shared),
        "loops": _loops(sass),
        "ptx": compiled.asm["ptx"],
    }


def found() -> dict[str, Any]:
    """``launches``, what became of each; ``missing``, kernels that no launch is of; and ``twins``, modules of the CPU's
    kernels that came with those of the GPU."""
    _NOTED.update(launches())
    missing = kernels() - {each.kernel.fn.__name__ for each in _NOTED.values()}
    with multiprocessing.get_context("fork").Pool(2) as processes:
        made = processes.map(_found, _NOTED, chunksize=1)
    twins = [name for name in sys.modules if name.endswith(".twin")]
    return {"missing": sorted(missing), "twins": twins, "launches": dict(zip(_NOTED, made, strict=True))}


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    print(json.dumps(found(), indent=1))
