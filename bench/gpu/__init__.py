"""How near does the GPU tier come to its device's limits, in kernels, in training and in lookups?

``python -m bench.gpu --json gpu.json`` on any machine with an NVIDIA GPU runs every part, in under 8 minutes. It needs
torch built for CUDA (which brings Triton), some 40 GiB of GPU memory, 32 GiB of host memory and a C compiler for
Triton's launchers, and no network. ``--only rows,training`` runs some parts only, ``--dir`` says where stores are
built. Sizes and each part's time are those of ``bench/gpu.toml``: for a smaller GPU, copy it, make ``rows`` or
``table_sizes`` smaller, and give it with ``--config``. The report is written again after every part. Without a CUDA
device it says so and writes nothing; with ``--quick`` every part then runs on the CPU at tiny sizes, to see that it
works.
"""
