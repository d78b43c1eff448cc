"""Quantisers' own GPU kernels under adapters: the tests of tests/quant, with models on the device."""

from __future__ import annotations

import pytest
from gpu_bed import DEVICE, MARKS, whole_fp32
from quant import quant_bed
from quant.quant_bed import KINDS, Kind
from quant.test_quantised import in_context, test_dequantised, test_dora, test_mixed

__all__ = ["in_context", "test_dequantised", "test_dora", "test_mixed", "whole_fp32"]
pytestmark = MARKS

REAL = ["bnb4", "bnb8", "ao_int8", "ao_int8_dynamic", "ao_fp8", "ct_w4", "ct_int8", "ct_fp8", "bitnet", "gguf"]


@pytest.fixture(params=REAL)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch, whole_fp32: None) -> None:
    monkeypatch.setattr(quant_bed, "DEVICE", DEVICE)
