"""Processes that the package starts."""

import re
import subprocess
import sys
from pathlib import Path

from tierstore.system import processes

PACKAGE = Path(processes.__file__).parents[1]
STARTED = """
import os, subprocess, sys, tempfile
os.chdir(folder := tempfile.mkdtemp())
from tierstore.system.processes import child_options
os.rmdir(folder)
code = "import os, sys, numpy, tierstore.system.processes as found; print(os.getcwd(), found.__file__, '' in sys.path)"
print(subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, **child_options()).stdout)
"""


def test_a_child_runs_this_package_though_the_folder_of_the_start_is_gone() -> None:
    done = subprocess.run([sys.executable, "-c", STARTED], capture_output=True, text=True, **{
        **processes.child_options(), "cwd": None,
    })  # fmt: skip
    assert done.stdout.split() == ["/", processes.__file__, "False"], done.stderr


def test_all_children_are_started_so() -> None:
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        started = re.findall(r"subprocess\.(?:Popen|run|call|check_\w+)\(", text)
        assert len(started) == text.count("**child_options("), path
