"""The upsamplers alone, on real images downsampled by the area filter."""

from __future__ import annotations

from ...evaluation.fidelity import average_pool_uint8
from ...evaluation.upsampling_report import evaluate_upsampling, upsampling_sections
from .context import Context
from .contract import UPSAMPLERS, Evaluator, Findings


def run(context: Context) -> Findings:
    real, captions = context.real_images()
    low_res = average_pool_uint8(real, context.upsamplers.factor)
    ours = context.upsample(captions, low_res)
    report = evaluate_upsampling(low_res, ours, real)
    sections = upsampling_sections(report, low_res, ours, real, captions)
    return Findings(sections, {"upsampling": report.to_dict()}, report.table())


UPSAMPLING = Evaluator("upsampling", (UPSAMPLERS,), run)
