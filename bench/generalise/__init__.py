"""Parts of ``python -m bench.generalisation``."""
