"""Compile every kernel for sm_90 as a few shapes would launch it, on a machine without a GPU; one JSON line each.

Run in a process of its own, `TRITON_INTERPRET=0 python compile_sm90.py [FOLDER for ttgir, ptx and cubin]`: Triton
decorates a kernel either for the interpreter or for the compiler.
"""

from __future__ import annotations

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

from hf_multilora.kernels import embedding, expand, shrink
from hf_multilora.kernels.tuning import expand_tiling, shrink_tiling

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


def compile_launch(kernel: Any, args: tuple[Any, ...], options: dict[str, int]) -> Any:
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


def cases() -> Any:
    """(label, launch) for decode and prefill, dtypes, odd widths, slices."""

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    shapes = [
        (1, 1, 4096, (4096,), 16, bf16, bf16),
        (32, 1, 4096, (4096,), 16, bf16, bf16),
        (32, 1, 4096, (1024,), 16, bf16, bf16),
        (32, 1, 4096, (14336,), 64, bf16, bf16),
        (32, 1, 14336, (4096,), 64, bf16, bf16),
        (32, 1, 3072, (3072, 1024, 1024), 16, fp16, fp16),
        (32, 1, 33, (29,), 3, fp32, fp32),
        (8, 4, 4096, (4096,), 16, fp32, bf16),
        (16, 256, 4096, (4096,), 16, bf16, bf16),
        (16, 512, 14336, (14336,), 64, bf16, bf16),
        (16, 256, 4096, (4096, 1024), 16, fp16, fp16),
        (16, 256, 4096, (1024,), 64, fp32, fp32),
        (16, 256, 4096, (1024,), 64, fp16, bf16),
        (16, 256, 4096, (1024,), 128, fp32, bf16),
        (4, 40, 33, (29, 31), 3, bf16, bf16),
    ]
    with_starts = [shapes[1], shapes[7], shapes[8], shapes[11]]
    for number, shape in enumerate([*shapes, *with_starts]):
        rows, per_row, k, widths, rank, act, lora = shape
        starts = number >= len(shapes)
        n = rows * per_row
        x, y = empty(act, n, k), empty(act, n, sum(widths))
        data, meta = empty(lora, 1 << 20), empty(torch.int64, 8, 1 << 10)
        first = shrink_tiling(n, rows, k, rank, act, lora)
        second = expand_tiling(n, rows, max(widths), rank, act, lora)
        slots, floats = empty(torch.int32, rows), empty(fp32, 1 << 20)
        common = (slots, slots if starts else None, empty(fp32, 1 << 20), data, meta, rows, 5)
        label = f"rows={rows} tokens={per_row} K={k} N={widths} r={rank} {TYPES[act]} {TYPES[lora]}"
        label += " starts" if starts else ""
        yield label, shrink.prepare(x, *common, len(widths), 1 << 20, rank, first)
        yield label, expand.prepare(y, *common, floats, widths, 1 << 20, rank, first.split, second)
    ids = empty(torch.int64, 4096)
    for row_starts in (None, slots):
        common = (slots, row_starts, empty(fp32, 1 << 20), empty(bf16, 1 << 20), meta, 16, 5)
        yield "ids=4096 r=64 bf16", embedding.prepare(ids, *common, 1 << 20, 64)


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


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    for number, (label, (kernel, grid, args, options)) in enumerate(cases()):
        compiled = compile_launch(kernel, args, options)
        name = kernel.fn.__name__
        print(json.dumps({"kernel": name, "case": label, "grid": grid, **resources(compiled)}), flush=True)
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            for kind in ("ttgir", "ptx"):
                (folder / f"{number:02}_{name}.{kind}").write_text(compiled.asm[kind])
            (folder / f"{number:02}_{name}.cubin").write_bytes(compiled.asm["cubin"])


if __name__ == "__main__":
    main()
