"""What the compiler makes of the ops: the adapters' part begins before the base layers and ends behind them."""

from __future__ import annotations

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from hf_multilora.kernels import custom
from hf_multilora.kernels.ops import LinearOp, Workspace

WIDTHS = (48, 16, 16)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops' device part, on a CPU: ones for deltas; what ran, in order."""
    events: list[str] = []

    def begin(x: torch.Tensor, op: LinearOp, row_slots: torch.Tensor, rows: int) -> torch.Tensor:
        events.append("delta")
        return torch.ones(x.shape[0], op.out_features)

    monkeypatch.setattr(custom, "begin", begin)
    monkeypatch.setattr(custom, "join", lambda *args: events.append("join"))
    return events


def test_base_layers_run_between_delta_and_join(recorded: list[str]) -> None:
    weights = [torch.randn(width, 32) for width in WIDTHS]
    table = torch.zeros(8, dtype=torch.int32)
    data, meta = torch.zeros(64), torch.zeros(1, 32, dtype=torch.int64)
    op = LinearOp(data, meta, data, 64, 0, 0, 32, WIDTHS, 8, Workspace(), WIDTHS)

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.rms_norm(x, (32,))
        h = custom.delta(x, table, op.key, 4)
        ys = [torch.nn.functional.linear(x, weight) for weight in weights]
        custom.join_(h, x, ys, table, op.key, 4)
        q, k, v = ((y + d).relu() for y, d in zip(ys, h.split(WIDTHS, -1), strict=True))
        return torch.cat([q, k, v, x], -1)

    x = torch.randn(4, 1, 32)
    with torch.no_grad():
        want = forward(x)
        recorded.clear()
        torch._dynamo.reset()
        with torch._inductor.config.patch(force_disable_caches=True):
            got, code = run_and_get_code(torch.compile(forward, fullgraph=True), x)
    torch.testing.assert_close(got, want)
    assert recorded == ["delta", "join"]
    source = code[0][code[0].index("def call(") :]
    found = re.findall(
        r"hf_multilora\.lora_(delta|join_)\.default\(|extern_kernels\.(mm|addmm)\(|(clone|copy_)\(", source
    )
    names = ["".join(match) for match in found]
    assert names == ["delta", "mm", "mm", "mm", "join_"], names
    torch._dynamo.reset()
