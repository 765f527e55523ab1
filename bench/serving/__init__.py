"""Parts of ``bench.serve`` and ``bench.plan``: processes of servers and trainers, requests made beforehand, load."""
