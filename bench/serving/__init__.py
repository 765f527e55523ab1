"""Parts of ``bench.serve``: a server and a trainer in their own processes, requests made beforehand, load."""
