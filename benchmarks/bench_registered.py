"""Throughput with 8 and with 2000 registered adapters, Zipf traffic, 8 slots.

python benchmarks/bench_registered.py --registered 8 2000
"""

import sys

from hf_multilora.bench.registered import main

if __name__ == "__main__":
    sys.exit(main())
