"""Score a generator of the shapes world: sample ShapeEval's prompts, judge the pictures, write a report."""

import json
from dataclasses import dataclass

from diff_dalle import storage
from diff_dalle.command_line import parse
from diff_dalle.config import option, section
from diff_dalle.data.shapes_shards import read_shapes_config
from diff_dalle.diffusion.guidance import GuidanceConfig
from diff_dalle.diffusion.sampling import SamplerConfig
from diff_dalle.distributed import DistributedConfig, launch, run_script
from diff_dalle.errors import InputError
from diff_dalle.evaluation.report import write_report
from diff_dalle.evaluation.shape_eval import evaluate_shapes
from diff_dalle.evaluation.shape_prompts import shape_prompts
from diff_dalle.evaluation.shape_report import picture_section, score_section, training_sections
from diff_dalle.pipeline import load


@dataclass(frozen=True)
class EvaluateConfig:
    """Evaluation"""

    model_path: str = option("", "checkpoint of a generator trained on the shapes world")
    shapes_dir: str = option("", "folder of the shapes world it was trained on")
    progress: str = option("", "progress.csv of its training, to plot; empty = no plots")
    report_dir: str = option("runs/report", "folder for report.md, scores.json and pictures")
    prompts_per_task: int = option(64, "captions for each of ShapeEval's tasks")
    batch_size: int = option(64, "pictures made at once by each process")
    seed: int = option(0, "picture i follows from seed + i alone")

    def __post_init__(self):
        if not (self.model_path and self.shapes_dir):
            raise InputError("--model_path and --shapes_dir are needed: a checkpoint, and the data it was trained on")


@dataclass(frozen=True)
class EvaluateRun:
    what: EvaluateConfig = section(EvaluateConfig)
    sampler: SamplerConfig = section(SamplerConfig)
    guidance: GuidanceConfig = section(GuidanceConfig)
    distributed: DistributedConfig = section(DistributedConfig)


def main():
    run = parse(EvaluateRun, description=__doc__)
    what = run.what
    with launch(run.distributed) as world:
        pipeline = load(what.model_path, world.device)
        prompts = shape_prompts(what.prompts_per_task, what.seed, read_shapes_config(what.shapes_dir))
        texts = [prompt.text for prompt in prompts]
        images = pipeline.sample(texts, what.seed, batch_size=what.batch_size, sampler=run.sampler,
                                 guidance=run.guidance, world=world)  # fmt: skip
        if world.is_main:
            report = evaluate_shapes(images, prompts)
            sections = [picture_section(images, prompts), score_section(report)]
            sections += training_sections(what.progress) if what.progress else []
            path = storage.join(what.report_dir, "report.md")
            write_report(path, f"Shapes world after {pipeline.step:,} steps", sections)
            scores = json.dumps({"step": pipeline.step, "scores": report.to_dict()}, indent=1)
            storage.write_bytes(storage.join(what.report_dir, "scores.json"), scores.encode())
            print(report.table(), f"\nReport and pictures: {path}", sep="\n")


if __name__ == "__main__":
    run_script(main)
