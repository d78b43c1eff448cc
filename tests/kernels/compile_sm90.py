"""Compile every kernel for sm_90 as a few shapes would launch it, on a machine without a GPU; one JSON line each.

Run in a process of its own, `TRITON_INTERPRET=0 python compile_sm90.py [FOLDER for ttgir, ptx and cubin]`: Triton
decorates a kernel either for the interpreter or for the compiler.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_multilora.kernels import driver, embedding, expand, experts, finish, launch, shrink, table
from hf_multilora.kernels.tuning import Call, expand_tiling, shrink_tiling

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


def compile_launch(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What the jit would do at a launch with these arguments, tensors being aligned to 16 bytes."""
    signature, constants, attrs = {}, {}, {}
    for param, arg in zip(kernel.params, args, strict=True):
        if param.is_constexpr:
            signature[param.name], constants[param.name] = "constexpr", arg
        elif isinstance(arg, torch.Tensor):
            signature[param.name] = "*" + TYPES[arg.dtype]
            if not param.do_not_specialize_on_alignment:
                attrs[(param.num,)] = [["tt.divisibility", 16]]
        elif arg == 1 and not param.do_not_specialize:
            signature[param.name], constants[param.name] = "constexpr", 1
        else:
            signature[param.name] = "i32" if -(2**31) <= arg < 2**31 else "i64"
            if not param.do_not_specialize and arg % 16 == 0:
                attrs[(param.num,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def cases() -> Any:
    """(label, launch) for decode and prefill, dtypes, odd widths, groups of layers, rows that share slots."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    shapes = [
        (1, 1, 4096, (4096,), 16, bf16, bf16),
        (32, 1, 4096, (4096, 1024, 1024), 16, bf16, bf16),
        (32, 1, 4096, (1024,), 16, bf16, bf16),
        (32, 1, 4096, (14336, 14336), 64, bf16, bf16),
        (32, 1, 14336, (4096,), 64, bf16, bf16),
        (32, 1, 3072, (3072, 1024, 1024), 16, fp16, fp16),
        (32, 1, 33, (29,), 3, fp32, fp32),
        (8, 4, 4096, (4096,), 16, fp32, bf16),
        (16, 256, 4096, (4096,), 16, bf16, bf16),
        (16, 512, 4096, (4096, 1024, 1024), 16, bf16, bf16),
        (16, 512, 14336, (14336,), 64, bf16, bf16),
        (16, 512, 4096, (14336, 14336), 64, bf16, bf16),
        (16, 256, 4096, (4096, 1024), 16, fp16, fp16),
        (16, 256, 4096, (1024,), 64, fp32, fp32),
        (16, 256, 4096, (1024,), 64, fp16, bf16),
        (16, 256, 4096, (1024,), 128, fp32, bf16),
        (4, 40, 33, (29, 31), 3, bf16, bf16),
    ]
    for shape in shapes:
        yield from launches(*shape)
    for number in (1, 7, 8, 13):
        yield from launches(*shapes[number], starts=True)
    for rows, k, widths, rank in (
        (32, 4096, (4096, 1024, 1024), 16),
        (32, 14336, (4096,), 64),
        (128, 4096, (14336, 14336), 16),
        (128, 4096, (14336, 14336), 64),
        (128, 4096, (4096,), 128),
    ):
        yield from launches(rows, 1, k, widths, rank, bf16, bf16, adapters=8, table=True)
    yield from launches(64, 1, 3072, (3072, 1024, 1024), 16, fp16, fp16, adapters=8, table=True)
    for path in sorted(table.FOLDER.glob("*.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            shape = row["shape"]
            what = (shape["rows"], shape["n"] // shape["rows"], shape["k"], tuple(shape["widths"]), shape["max_rank"])
            with table.tried(row["kind"], shape, row["tiling"]):
                for label, launch in launches(*what, bf16, bf16, adapters=shape["adapters"], table=True):
                    yield f"{label} {path.stem} {row['tiling']}", launch
    ids, meta = empty(torch.int64, 4096), empty(torch.int64, 8, 1 << 10)
    for row_starts in (None, empty(torch.int32, 16)):
        common = (empty(torch.int32, 16), row_starts, empty(fp32, 1 << 20), empty(bf16, 1 << 20), meta, 16, 5)
        yield "ids=4096 r=64 bf16", embedding.prepare(ids, *common, 1 << 20, 64)
    for tile in (0, 16, 64):
        yield from experts_launches(tile, 2048, (768, 768), 1, 16, bf16, bf16)
        yield from experts_launches(tile, 2880, (2880, 2880), 2, 16, bf16, bf16)
        yield from experts_launches(tile, 768, (2048,), 1, 64, bf16, bf16)
        yield from experts_launches(tile, 768, (2048,), 1, 32, fp16, bf16)
        yield from experts_launches(tile, 2048, (768, 768), 1, 64, fp32, fp32)
        yield from experts_launches(tile, 33, (29, 29), 1, 3, fp16, fp16)


def experts_launches(
    tile: int, k: int, widths: tuple[int, ...], step: int, rank: int, act: torch.dtype, lora: torch.dtype
) -> Any:
    """Both launches of LoRA on experts: gate and up with rows of x per token, or down; tile 0: decode."""
    per_row, rows, top = 128 if tile else 1, 32, 8
    pairs = rows * per_row * top
    y, index = empty(act, pairs, sum(widths)), empty(torch.int64, pairs)
    x = empty(act, rows * per_row if len(widths) > 1 else pairs, k)
    data, meta, floats = empty(lora, 1 << 20), empty(torch.int64, 8, 1 << 10), empty(torch.float32, 1 << 20)
    arena = launch.Arena(data, meta, floats, meta, 1 << 20, rank)
    slots = launch.Rows(empty(torch.int32, rows), None, rows)
    firsts = (0, 1 if step == 2 else widths[0])
    projections = [(5 + i, firsts[i], step, width) for i, width in enumerate(widths)]
    buckets = experts.Buckets(index, empty(torch.int32, 3, 3000), tile) if tile else None
    x_rows = index if len(widths) > 1 else None
    call, shape = (index, index, arena, slots, rows * per_row), (128, buckets)
    label = f"experts tile={tile} K={k} N={widths} step={step} r={rank} {TYPES[act]} {TYPES[lora]}"
    planes, shrink = experts.prepare_shrink(x, x_rows, *call, [site for site, *_ in projections], *shape)
    yield label, shrink
    yield label, experts.prepare_expand(y, planes, *call, projections, *shape)


def launches(
    rows: int,
    per_row: int,
    k: int,
    widths: tuple[int, ...],
    rank: int,
    act: torch.dtype,
    lora: torch.dtype,
    starts: bool = False,
    adapters: int = 32,
    table: bool = False,
) -> Any:
    """Shrink and expand of one call, and at decode the delta and the finish, too."""
    n, slots, planes = rows * per_row, empty(torch.int32, rows), empty(torch.float32, 1 << 20)
    x, ys = empty(act, n, k), [empty(act, n, width) for width in widths]
    data, meta, floats = empty(lora, 1 << 20), empty(torch.int64, adapters, 1 << 10), empty(torch.float32, 1 << 20)
    call = Call(n, rows, k, widths, rank, adapters, act, act, lora, rows if table else None, starts, True)
    first, second = shrink_tiling(call), expand_tiling(call)
    common = (slots, slots if starts else None, planes, data, meta)
    label = f"rows={rows} tokens={per_row} K={k} N={widths} r={rank} {TYPES[act]} {TYPES[lora]}"
    label += " starts" * starts + " table" * table
    yield label, shrink.prepare(x, *common, slots, rows, 5, len(widths), 1 << 20, rank, first)
    tail = (rows, 5, floats, 1 << 20, rank, first, second)
    yield label, expand.prepare(ys, *common, *tail)
    if first.kind != "tiles" and not starts:
        d, alone = empty(torch.float32, n, sum(widths)), dataclasses.replace(first, pdl=False)
        yield label + " delta", shrink.prepare(x, *common, slots, rows, 5, len(widths), 1 << 20, rank, alone)
        tail = (rows, 5, floats, 1 << 20, rank, alone, second)
        yield label + " delta", expand.prepare(d.split(widths, 1), *common, *tail, True)
        yield label, finish.prepare(ys, slots, d, data, meta, rows, 5, floats, 1 << 20)


def resources(compiled: Any) -> dict[str, Any]:
    """Registers and spills from ptxas, shared memory, and how wide the global loads are."""
    ptx = compiled.asm["ptx"]
    loads = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.[bu](\d+)", ptx)
    widths: dict[int, int] = {}
    for vector, bits in loads:
        size = int(vector or 1) * int(bits) // 8
        widths[size] = widths.get(size, 0) + 1
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    dots = sorted(set(re.findall(r"(wgmma\.mma_async\S+|mma\.sync\S+)", ptx)))
    copies = len(re.findall(r"cp\.async\.cg\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x10", ptx))
    return {"shared": compiled.metadata.shared, "loads": widths, "copies": copies, **found, "dots": dots}


def parameters(compiled: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Bytes of the kernel's parameters: as a prepared launch passes them, and as the compiled kernel takes them."""
    passed = driver._parameters(compiled, args)
    entry = compiled.asm["ptx"].split(".entry", 1)[1].split("{", 1)[0]
    return {
        "passed": None if passed is None else [size for size, _ in passed],
        "taken": [int(bits) // 8 for bits in re.findall(r"\.param \.[a-z](\d+)", entry)],
    }


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    for number, (label, (kernel, grid, args, options)) in enumerate(cases()):
        compiled = compile_launch(kernel, args, options)
        name = kernel.fn.__name__
        print(
            json.dumps(
                {"kernel": name, "case": label, "grid": grid, **resources(compiled), **parameters(compiled, args)}
            ),
            flush=True,
        )
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            for kind in ("ttgir", "ptx"):
                (folder / f"{number:02}_{name}.{kind}").write_text(compiled.asm[kind])
            (folder / f"{number:02}_{name}.cubin").write_bytes(compiled.asm["cubin"])


if __name__ == "__main__":
    main()
