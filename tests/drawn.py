"""Values of every option of every public configuration, for programs that hypothesis draws."""

from typing import Any, Final

from hypothesis import strategies as st

import tierstore
from tierstore import init, optim
from tierstore.cache.ddr import POLICIES
from tierstore.ids import LFU, LRU, TTL, DynamicIds, Frequency, Probability

_SEEDS: Final = st.integers(-(2**63), 2**64 - 1)
_RATES: Final = st.sampled_from([0.0, 0.125, 0.5])
_OF_OPTIMIZERS: Final = {"lr": _RATES, "weight_decay": st.sampled_from([0.0, 0.25]), "decoupled": st.booleans()}
_NEAREST: Final = {"rounding": st.just("nearest")}
_OF_RANDOM: Final = {"seed": _SEEDS, "first_column": st.sampled_from([0, 2])}
_OF_ADAGRAD: Final = {"eps": st.sampled_from([1e-8, 0.5]), "initial_accumulator_value": _RATES}

OPTIONS: Final[dict[Any, dict[str, Any]]] = {
    Frequency: {"times": st.integers(2, 4), "candidates": st.none() | st.integers(1, 40)},
    Probability: {"share": st.sampled_from([0.1, 0.5, 0.9]), "seed": _SEEDS},
    LRU: {},
    LFU: {"half_life_steps": st.none() | st.integers(1, 5)},
    TTL: {"steps": st.integers(1, 20), "minutes": st.integers(1, 40)},
    optim.SGD: _OF_OPTIMIZERS,
    optim.Adagrad: _OF_OPTIMIZERS | _OF_ADAGRAD,
    optim.RowWiseAdagrad: _OF_OPTIMIZERS | _OF_ADAGRAD,
    optim.Adam: _OF_OPTIMIZERS | {"betas": st.sampled_from([(0.9, 0.999), (0.0, 0.5)]), "eps": st.just(1e-8)},
    init.Constant: {"value": st.sampled_from([0.0, -1.5])},
    init.Uniform: {"low": st.just(-0.5), "high": st.sampled_from([0.0, 0.5])} | _OF_RANDOM,
    init.Normal: {"mean": st.sampled_from([0.0, 0.25]), "std": st.just(0.5)} | _OF_RANDOM,
}


def drawn(*kinds: Any) -> Any:
    """One of these, with any options that go together."""
    parts = {kind: [OPTIONS[kind]] for kind in kinds}
    if TTL in parts:
        parts[TTL] = [{name: values} for name, values in OPTIONS[TTL].items()]
    if tierstore.TableConfig in parts:
        halfs = {"dtype": st.sampled_from(["float16", "bfloat16"])}
        parts[tierstore.TableConfig] = [OPTIONS[tierstore.TableConfig] | each for each in (halfs, _NEAREST)]
    return st.one_of([st.builds(kind, **options) for kind, each in parts.items() for options in each])


OPTIONS[DynamicIds] = {
    "admission": st.none() | drawn(Frequency, Probability),
    "eviction": drawn(LRU, LFU, TTL),
    "unseen": st.sampled_from(["zeros", "error", "init"]),
}
OPTIONS[tierstore.TableConfig] = {
    "name": st.sampled_from(["item", "\N{SNOWMAN} shop"]),
    "num_embeddings": st.integers(1, 60),
    "embedding_dim": st.sampled_from([1, 5, 33]),
    "dtype": st.sampled_from(["float32", "float16", "bfloat16"]),
    "rounding": st.sampled_from(["nearest", "stochastic"]),
    "feature_names": st.sampled_from([(), ("a",), ("a", "b")]),
    "pooling": st.sampled_from(["sum", "mean", "max"]),
    "init": drawn(init.Constant, init.Uniform, init.Normal),
    "optimizer": drawn(optim.SGD, optim.Adagrad, optim.RowWiseAdagrad, optim.Adam),
    "ids": st.none() | drawn(DynamicIds),
}
OPTIONS[tierstore.open] = {
    "cold": st.sampled_from(["lmdb", "lmdb", "memory"]),
    "mode": st.sampled_from(["w", "w", "r"]),
    "version": st.none() | st.integers(0, 9),  # place among those that are kept
    "keep": st.integers(1, 4),
    "slack": st.sampled_from([1.1, 3]),
    "ddr": st.sampled_from(["2MiB", "5% of tables", "8MiB"]),
    "hbm": st.sampled_from([0, 0, "1MiB"]),
    "device": st.just("cpu"),
    "policy": st.sampled_from(POLICIES),
    "threads": st.none() | st.integers(1, 3),
    "dtype": st.none() | st.sampled_from(["stored", "float16"]),
    "check_finite": st.sampled_from([None, "log", "error"]),
}
