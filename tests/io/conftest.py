"""A store that the tests of this folder damage."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.conformance.cold_tier import NARROW, WIDE, commit, keys_of, write_rows

from .support import opened


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A closed, committed store: tables 0 and 1 full."""
    with closing(opened(tmp_path)) as tier:
        write_rows(tier, WIDE, keys_of(0, np.arange(1000)), 1)
        write_rows(tier, NARROW, keys_of(1, np.arange(5000)), 1)
        commit(tier, b"payload" * 1000)
    return tmp_path
