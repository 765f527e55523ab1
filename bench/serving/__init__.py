"""Parts of ``bench.serve`` and ``bench.rmc``: processes of servers and trainers, requests made beforehand, load."""
