"""The package's own functions: a cache by the name of its policy."""

import subprocess
import sys

import pytest

import tierstore.cache
import tierstore.kernels
from tierstore.cache import capacity_for


@pytest.mark.parametrize("policy", ["lru", "lfu", "tinylfu", "lookahead"])
def test_twins_have_one_capacity(policy: str) -> None:
    fast = capacity_for(policy, 123_456, weight_words=16, state_words=2)
    assert fast == capacity_for(f"reference-{policy}", 123_456, weight_words=16, state_words=2) > 0


def test_the_reference_shares_no_code_with_the_fast_cache() -> None:
    # Empty packages in place of the real ones, so that only what the reference itself imports is imported.
    code = """if True:
        import sys, types
        for name, path in zip(("tierstore", "tierstore.cache", "tierstore.kernels"), sys.argv[1:], strict=True):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [path]
        import tierstore.cache.reference
        print(sorted(name for name in sys.modules if name.startswith("tierstore.")))
    """
    paths = [package.__path__[0] for package in (tierstore, tierstore.cache, tierstore.kernels)]
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True)
    own = [f"tierstore.cache{part}" for part in ("", ".base", ".reference", ".reference_policies")]
    assert done.stdout.strip() == str([*own, "tierstore.kernels", "tierstore.kernels.arrays"])
