"""generate() and prefill beside the bare model and PEFT; `--help` lists the parts.

python benchmarks/bench_generate.py --parts static graphs mixes --batch 32 --adapters 0 1 8 32
"""

import sys

from hf_multilora.bench.generate import main

if __name__ == "__main__":
    sys.exit(main())
