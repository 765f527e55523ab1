"""Parts of ``bench.serve``: a server and a trainer in processes of their own, requests made beforehand, load, and what is asked of them."""
