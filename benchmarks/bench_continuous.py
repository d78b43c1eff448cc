"""Continuous batching with adapters beside the bare model: throughput, many registered adapters, a soak.

python benchmarks/bench_continuous.py --parts base slots32 slots8
"""

import os
import sys

from hf_multilora.bench.continuous import main

if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a generation thread that hangs would keep the process
