"""One thread for each process: tests start up to eight ranks, and the workers of pytest-xdist run beside each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
