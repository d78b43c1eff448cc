"""Ray on a CPU with a tiny model: that nothing is lost, and where requests land. Times mean little here.

    data    rows for 20 adapters by two actors; the run is killed in the middle, and run again
    serve   Zipf traffic of 24 adapters over three replicas with room for eight each, by residency and at random;
            one replica is killed in the middle

python benchmarks/bench_ray.py
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "ray_cluster")]
sys.path[:0] = PATHS
os.environ["PYTHONPATH"] = os.pathsep.join(PATHS)
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}

import pyarrow.parquet as pq  # noqa: E402
import ray  # noqa: E402
from ray import serve  # noqa: E402
from ray_bed import in_one_process, rows, run_job, write_files  # noqa: E402
from serve_bed import App, text  # noqa: E402

from hf_multilora.bench.results import Results, default_folder  # noqa: E402

ADAPTERS, RESIDENT, CLIENTS = 24, 8, 12


def start(**more: Any) -> None:
    options = {"object_store_memory": 200 << 20, "include_dashboard": False, "log_to_driver": False}
    ray.init(address="local", num_cpus=4, **options, **more)
    ray.data.DataContext.get_current().enable_progress_bars = False


def data(results: Results, count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        files, out, asked = write_files(root), root / "out", rows(count)
        began = time.perf_counter()
        want = in_one_process(files, asked)
        results.add("rows by one process", count / (time.perf_counter() - began), "rows/s", rows=count)
        # A process of its own, with all that belongs to its cluster, killed once a quarter has been written.
        (root / "job.json").write_text(json.dumps([files, asked, str(out)]))
        first = subprocess.Popen([sys.executable, __file__, "--job", str(root / "job.json")], start_new_session=True)
        while len(list(out.rglob("*.parquet"))) < count // 160 and first.poll() is None:
            time.sleep(0.05)
        os.kill(first.pid, signal.SIGKILL)
        if first.wait() != -signal.SIGKILL:
            results.fail("the first run ended before it was killed")
        time.sleep(5)  # its actors see that it has gone
        kept = sum(pq.read_metadata(path).num_rows for path in whole(out))
        results.add("rows that the killed run had written", kept, "rows", rows=count)
        start()
        began = time.perf_counter()
        run_job(files, asked, out, concurrency=2)
        took = time.perf_counter() - began
        results.add("rows of the second run by two actors, start included", (count - kept) / took, "rows/s", actors=2)
        ray.shutdown()
        got = sorted(pq.read_table(out).to_pylist(), key=lambda row: row["id"])
        ids = Counter(row["id"] for row in got)
        results.add("rows missing", count - len(ids), "rows", goal=0)
        results.add("rows twice", sum(ids.values()) - len(ids), "rows", goal=0)
        results.add("rows that differ from one process", sum(a != b for a, b in zip(got, want)), "rows", goal=0)  # noqa: B905
        if got != want:
            results.fail("the answers are not those of one process")


def whole(out: Path) -> list[Path]:
    return [path for path in out.rglob("*.parquet") if path.read_bytes()[-4:] == b"PAR1"]


def replicas(results: Results, count: int, by_residency: bool) -> None:
    start()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "ERROR"})
    label = "by residency" if by_residency else "to any replica"
    try:
        with tempfile.TemporaryDirectory() as folder:
            app = App(Path(folder), port, ADAPTERS, max_loras=4, resident=RESIDENT, by_residency=by_residency)
            draw = random.Random(7)
            weights = [1 / (rank + 1) for rank in range(ADAPTERS)]
            asked = [(name, draw.randrange(40)) for name in draw.choices(range(ADAPTERS), weights, k=count)]
            hits, homes, wrong, took = traffic(app, asked)
            conditions = {"requests": count, "adapters": ADAPTERS, "resident": RESIDENT, "clients": CLIENTS, "zipf": 1}
            half = hits[count // 2 :]
            results.add(f"requests that found their adapter, {label}", sum(hits) / count, "share", **conditions)
            results.add(f"of the second half, {label}", sum(half) / len(half), "share", **conditions)
            most = sum(max(found.values()) for found in homes.values()) / count
            results.add(f"requests at their adapter's first replica, {label}", most, "share", **conditions)
            loads = Counter(replica for found in homes.values() for replica in found.elements())
            results.add(f"busiest replica, {label}", max(loads.values()) / count, "share", **conditions)
            results.add(f"requests a second, {label}", count / took, "1/s", **conditions)
            if wrong:
                results.fail(f"{wrong} answers are not generate()'s")
            if by_residency:
                killed(results, app, [(number % 8, number) for number in range(96)])
            app.http.close()
    finally:
        ray.shutdown()


def traffic(app: App, asked: list[tuple[int, int]]) -> tuple[list[bool], dict[int, Counter[str]], int, float]:
    """Whether each request found its adapter, how many of each adapter's each replica had, wrong answers, seconds."""
    hits, homes, wrong = [], defaultdict(Counter), 0
    began = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda pair: app.ask(f"a{pair[0]}", f"Say {pair[1]}"), asked))
    took = time.perf_counter() - began
    for answer, (adapter, prompt) in zip(answers, asked, strict=True):
        wrong += answer.json()["choices"][0]["text"] != text(f"Say {prompt}", adapter + 1)
        hits.append(answer.headers["x-multilora-resident"] == "true")
        homes[adapter][answer.headers["x-multilora-replica"]] += 1
    return hits, homes, wrong, took


def killed(results: Results, app: App, asked: list[tuple[int, int]]) -> None:
    victim = app.ask("a0", "Who?").headers["x-multilora-replica"]
    with ThreadPoolExecutor(len(asked)) as pool:
        waiting = [pool.submit(app.ask, f"a{adapter}", f"Say {prompt}", 200) for adapter, prompt in asked]
        time.sleep(0.5)
        under_way = sum(not future.done() for future in waiting)
        app.kill(victim)
        answers = [future.result() for future in waiting]
    right = sum(
        answer.status_code == 200 and answer.json()["choices"][0]["text"] == text(f"Say {prompt}", adapter + 1, 200)
        for answer, (adapter, prompt) in zip(answers, asked, strict=True)
    )
    results.add("under way when a replica was killed", under_way, "requests", requests=len(asked))
    results.add("answered rightly all the same", right, "requests", requests=len(asked))
    silent = sum(answer.status_code != 200 and "error" not in answer.json() for answer in answers)
    results.add("lost without an error", silent, "requests", goal=0, requests=len(asked))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("data", "serve"), default=["data", "serve"])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--out", default=default_folder())
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        files, asked, out = json.loads(Path(args.job).read_text())
        start()
        run_job(files, asked, Path(out), concurrency=2)
        return 0
    results = Results("ray", args.out, "cpu")
    results.settings(parts=args.parts, rows=args.rows, requests=args.requests, ray=ray.__version__)
    if "data" in args.parts:
        data(results, args.rows)
    if "serve" in args.parts:
        replicas(results, args.requests, by_residency=True)
        replicas(results, args.requests, by_residency=False)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
