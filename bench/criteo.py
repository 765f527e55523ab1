"""Does a DLRM on real data learn as much with 5 % of its tables in memory, and end in the same bits?

Trains examples/criteo.toml on 64,000 rows of Criteo and tests on the next 16,000, once with DDR for 5 % of the tables'
bytes, once with everything in memory, and in other ways that must not change a bit.
"""

import sys

from .common import Goal, Report, Run, program
from .data import ROOT, require_criteo
from .training import equal_bits, outcome_table, run_all

__all__ = ["run"]


def run(request: Run) -> Report:
    config = request.config
    common = [f'data.path="{require_criteo()}"', *config["set"]]
    outcomes = run_all(ROOT / config["run_file"], config["runs"], common, request.folder, config["repetitions"])
    first = outcomes[0].summary
    return Report(
        question="Does a DLRM on real data learn as much with 5 % of its tables in memory, and end in the same bits?",
        tables=[outcome_table(f"{config['run_file']}: {first['rows']:,} rows trained, one epoch", outcomes)],
        figures={
            each.name: {"summary": each.summary, "samples_per_s": each.samples_per_s.median, "bits": sorted(each.bits)}
            for each in outcomes
        },
        goals=[
            Goal(name="test AUC", value=round(first["test"]["auc"], 4), at_least=config["auc"]),
            equal_bits(outcomes),
        ],
        notes=[
            f"Tested on the {first['test']['rows']:,} rows that follow in time; logistic regression reaches an AUC of "
            f"0.764 there. {config['repetitions']} repetitions in turns, each in a process of its own. Bits: digest of "
            "all rows of all tables and the dense weights after training."
        ],
    )


if __name__ == "__main__":
    sys.exit(program("criteo", run))
