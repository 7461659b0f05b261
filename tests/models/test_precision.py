import pytest
import torch

from diff_dalle.models.precision import resolve_precision, training_precision


@pytest.mark.parametrize(
    ("amx", "avx512_bf16", "cpu_name", "expected"),
    [
        (True, True, "Intel(R) Xeon(R) Processor", "bf16"),
        (False, True, "AMD EPYC", "bf16"),
        (False, False, "AMD EPYC", "fp32"),
        (False, True, "Intel(R) Xeon(R) Processor", "fp32"),
    ],
)
def test_auto_is_half_precision_in_training_where_the_cpu_is_faster_in_it(
    monkeypatch, amx, avx512_bf16, cpu_name, expected
):
    capabilities = {"avx512_bf16": avx512_bf16, "cpu_name": cpu_name}
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    cpu = torch.device("cpu")
    assert training_precision("auto", cpu) == expected
    assert training_precision("fp32", cpu) == resolve_precision("auto", cpu) == "fp32"
