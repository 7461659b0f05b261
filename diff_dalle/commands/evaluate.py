"""What ``evaluate.py`` is set by, and how a generator, with or without a classifier, becomes a report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .. import storage
from ..batch import Conditioning
from ..config import option, section
from ..data.loader import DataConfig, Loader
from ..diffusion.guidance import GuidanceConfig
from ..diffusion.sampling import SamplerConfig
from ..distributed.launch import DistributedConfig
from ..distributed.world import World
from ..errors import InputError
from ..evaluation.guidance_report import Score, Way, guidance_sections, to_dict, ways
from ..evaluation.intervals import wilson
from ..evaluation.report import Section, markdown_table, write_report
from ..evaluation.retrieval import RetrievalTable, retrieval, same_captions
from ..images.grid import image_grid
from ..images.pixels import to_uint8
from ..sampling.classifier import Classifier, ClassifierConfig
from ..sampling.pipeline import Pipeline, load
from ..sampling.request import PictureEdit, UpsamplersConfig
from ..shapes.editing import edited
from ..shapes.prompts import shape_prompts
from ..shapes.render import render
from ..shapes.report import picture_section, score_section, training_sections
from ..shapes.scenes import ShapesConfig
from ..shapes.shape_eval import evaluate_shapes
from ..shapes.shards import read_shapes_config
from .evaluate_upsampling import judge_upsampling

CURVE = (1.0, 4.0, 16.0)  # classifier scales that are tried when none are given
INVERSION_STEPS = 100
DISTRACTORS = 64  # captions, the right one among them, that a picture's is to be told from


@dataclass(frozen=True)
class EvaluateConfig:
    """Evaluation"""

    model_path: str = option("", "checkpoint of a base generator; empty = up-samplers alone are judged")
    shapes_dir: str = option(
        "", "folder of the shapes world it was trained on: its pictures are then judged by ShapeEval"
    )
    data_dir: tuple[str, ...] = option((), "captioned shards instead, named as for training: pictures of their "
                                           "captions are then judged by the classifier")  # fmt: skip
    caption_field: str = option("txt", "where captions are in data_dir: the ending of a text member, or json:FIELD")
    num_samples: int = option(256, "captions of data_dir that are drawn; fewer if there are fewer")
    progress: str = option("", "progress.csv of its training, to plot; empty = no plots")
    report_dir: str = option("runs/report", "folder for report.md, scores.json and pictures")
    prompts_per_task: int = option(64, "captions for each of ShapeEval's tasks")
    edits: int = option(0, "pictures of the shapes world that are changed in each way: inpainting, image to image, "
                           "variations; 0 = none")  # fmt: skip
    guidance_prompts: int = option(0, "captions on which ways of guiding are compared; 0 = prompts_per_task")
    batch_size: int = option(64, "pictures made at once by each process")
    seed: int = option(0, "picture i follows from seed + i alone")

    def __post_init__(self):
        if bool(self.shapes_dir) == bool(self.data_dir):
            raise InputError("either --shapes_dir or --data_dir is needed: whose captions are to be drawn")
        if self.edits < 0 or self.edits == 1 or (self.edits and not (self.shapes_dir and self.model_path)):
            raise InputError(f"edits is {self.edits}, but must be 0, or at least 2 where a base generator of the "
                             "shapes world is judged")  # fmt: skip
        if self.num_samples < 2 or self.batch_size < 1:
            raise InputError(f"num_samples is {self.num_samples} and batch_size {self.batch_size}, but they must be at "
                             "least 2 and 1")  # fmt: skip


@dataclass(frozen=True)
class EvaluateRun:
    """All settings of ``evaluate.py``."""

    what: EvaluateConfig = section(EvaluateConfig)
    sampler: SamplerConfig = section(SamplerConfig)
    guidance: GuidanceConfig = section(GuidanceConfig)
    upsamplers: UpsamplersConfig = section(UpsamplersConfig)
    classifier: ClassifierConfig = section(ClassifierConfig)
    distributed: DistributedConfig = section(DistributedConfig)

    def __post_init__(self):
        if not self.what.model_path and not self.upsamplers.upsampler_paths:
            raise InputError("--model_path or --upsampler_paths is needed: what is to be judged")
        if self.upsamplers != UpsamplersConfig() and not self.upsamplers.upsampler_paths:
            raise InputError("settings of up-samplers are given, but none of these: give them with --upsampler_paths")
        if self.classifier.classifier_path and not self.what.model_path:
            raise InputError("--classifier_path is given, but what it judges is a base generator's pictures: give that "
                             "with --model_path")  # fmt: skip
        if self.what.data_dir and self.what.model_path and not self.classifier.classifier_path:
            raise InputError("--data_dir needs --classifier_path: pictures of any captions are judged by a noised CLIP")


class Evaluation:
    """An evaluation under way: what it samples with, and the report that grows. ``scores`` end in scores.json."""

    def __init__(self, run: EvaluateRun, world: World):
        self.run, self.what, self.world = run, run.what, world
        paths = run.upsamplers.upsampler_paths
        self.pipeline: Pipeline = load(self.what.model_path, world.device, upsampler_paths=paths)
        self.classifier: Classifier | None = run.classifier.load(world.device)
        if world.is_main:
            storage.make_dirs(self.what.report_dir)  # a folder that cannot be written is better found out now
        self.sections: list[Section] = []
        self.scores: dict = {"step": self.pipeline.step}

    def judge(self) -> str:
        """Judge what there is to judge. Returns a table to print."""
        tables = []
        if self.pipeline.has_base:
            tables.append(self.shapes() if self.what.shapes_dir else self.captions())
        if self.run.upsamplers.upsampler_paths:
            tables.append(self.upsampling())
        if self.what.edits:
            self.editing()
        if self.what.progress:
            self.sections += training_sections(self.what.progress)
        return "\n\n".join(tables)

    @property
    def base(self) -> Pipeline:
        return Pipeline(self.pipeline.stages[:1])

    def sample(self, prompts: Sequence[str], way: Way) -> np.ndarray:
        """Pictures of ``prompts``, guided this way, as the base makes them: uint8 [N, H, W, 3]."""
        return self._sample(self.base, prompts, way)[0]

    def _sample(self, pipeline: Pipeline, prompts: Sequence[str], way: Way, **options) -> list[np.ndarray]:
        """Every stage's pictures. options: further arguments of ``Pipeline.sample_stages``."""
        return pipeline.sample_stages(
            prompts if way.told else [""] * len(prompts),
            self.what.seed,
            batch_size=self.what.batch_size,
            guidance=replace(self.run.guidance, guidance_scale=way.guidance_scale),
            classifier=self.classifier,
            classifier_prompts=prompts,
            classifier_scale=way.classifier_scale,
            classifier_gradient=self.run.classifier.classifier_gradient,
            upsampling=self.run.upsamplers.settings() if len(pipeline.stages) > 1 else None,
            world=self.world,
            **{"sampler": self.run.sampler, **options},
        )

    def ways(self) -> list[Way]:
        scales = self.run.classifier.classifier_scale or CURVE
        return ways(self.run.guidance.guidance_scale, scales, self.pipeline.tokenizer is not None)

    def shapes(self) -> str:
        """ShapeEval of the base's pictures, of the last up-sampler's, and, with a classifier, of what guidance adds.
        Returns tables to print."""
        config = read_shapes_config(self.what.shapes_dir)
        prompts = shape_prompts(self.what.prompts_per_task, self.what.seed, config)
        stages = self._sample(self.pipeline, [prompt.text for prompt in prompts], self.usual)
        tables = []
        for key, size, images in (("scores", "", stages[0]), ("scores enlarged", " enlarged", stages[-1])):
            if size and len(stages) == 1:
                break
            report = evaluate_shapes(images, prompts)
            self.scores[key] = report.to_dict()
            self.sections += [picture_section(images, prompts, size), score_section(report, size)]
            tables.append(report.table())
        if self.classifier:
            self._shapes_guidance(config)
        return "\n\n".join(tables)

    @property
    def usual(self) -> Way:
        """Classifier-free guidance alone, as the settings have it."""
        return Way(self.run.guidance.guidance_scale, 0.0)

    def upsampling(self) -> str:
        """How near the up-samplers come to real pictures that were made small. Returns a table to print."""
        real, captions = self._real_pictures(self.pipeline.image_size)
        settings = self.run.upsamplers.settings()
        report, sections = judge_upsampling(self.pipeline, settings, real, captions, self.what.seed, self.world)
        self.scores["upsampling"] = report.to_dict()
        self.sections += sections
        return report.table()

    def _real_pictures(self, size: int) -> tuple[np.ndarray, list[str]]:
        """Pictures uint8 [N, size, size, 3] and captions that training has not seen."""
        if self.what.shapes_dir:
            config = read_shapes_config(self.what.shapes_dir)
            prompts = shape_prompts(self.what.prompts_per_task, self.what.seed, config, ("held-out pairs",))
            return np.stack([render(prompt.scene, size) for prompt in prompts]), [prompt.text for prompt in prompts]
        stage = self.pipeline.stages[-1]
        config = DataConfig(data_dir=self.what.data_dir, caption_field=self.what.caption_field)
        data = Loader(config, size, stage.tokenizer, stage.config.text.text_length, shuffle=False)
        batch = data.batch_at(range(min(self.what.num_samples, data.samples)))
        rows = [] if stage.tokenizer is None else batch.cond.tokens.tolist()
        captions = [stage.tokenizer.decode(row) for row in rows] or [""] * len(batch)
        return to_uint8(batch.images).numpy(), captions

    def editing(self) -> None:
        """What comes of pictures of the shapes world that are changed."""
        config, size = read_shapes_config(self.what.shapes_dir), self.pipeline.image_size

        def sample(prompts: Sequence[str], edit: PictureEdit) -> np.ndarray:
            way, options = self.usual, {}
            if edit.config.variation is not None:  # a picture is only found again without guidance, in small steps
                steps = min(INVERSION_STEPS, self.base.stages[0].diffusion.diffusion_steps)
                way, options = Way(1.0, 0.0), {"sampler": SamplerConfig("ddim", str(steps))}
            return self._sample(self.pipeline, prompts, way, edit=edit, **options)[-1]

        self.scores["editing"], sections = edited(sample, size, self.what.edits, self.what.seed, config)
        self.sections += sections

    def _shapes_guidance(self, config: ShapesConfig) -> None:
        count = self.what.guidance_prompts or self.what.prompts_per_task
        prompts = shape_prompts(count, self.what.seed, config, ("attributes",))
        texts = [prompt.text for prompt in prompts]
        pictures = {way: self.sample(texts, way) for way in self.ways()}
        scored = {}
        for way, images in pictures.items():
            row = evaluate_shapes(images, prompts)["all attributes"]
            scored[way] = Score(row.score, row.low, row.high, row.n)
        text = ("Single objects of which colour, size and position are said: fraction in which these, the shape and "
                "the number are right, judged from the pixels alone. Where the caption is not told, the generator "
                "draws anything, and only the classifier steers.")  # fmt: skip
        self._add_guidance(text, scored, pictures, texts)
        many = shape_prompts(4 * DISTRACTORS, self.what.seed, config, ("attributes",))
        once = {prompt.text: prompt for prompt in many}  # then no two captions are true of the same picture
        real = np.stack([render(prompt.scene, self.base.image_size) for prompt in once.values()])
        self._add_retrieval(self.classifier.retrieval(real, list(once), DISTRACTORS))

    def captions(self) -> str:
        """How well the classifier finds the captions of ``data_dir`` in pictures made for them. Returns a table."""
        size, tokenizer = self.base.image_size, self.classifier.tokenizer
        config = DataConfig(data_dir=self.what.data_dir, caption_field=self.what.caption_field)
        data = Loader(config, size, tokenizer, self.classifier.model.config.text_length, shuffle=False)
        batch = data.batch_at(range(min(self.what.num_samples, data.samples)))
        texts, real = [tokenizer.decode(row) for row in batch.cond.tokens.tolist()], to_uint8(batch.images).numpy()
        pictures = {way: self.sample(texts, way) for way in self.ways()}
        seen = {way.name: self.classifier.encode_image(images) for way, images in pictures.items()}
        seen["real pictures"] = self.classifier.encode_image(real)
        text = self.classifier.encode_text(texts)
        scores = _found(seen, text, batch.cond)
        scored, ceiling = {way: scores[way.name] for way in pictures}, scores["real pictures"]
        self.scores["real pictures"] = asdict(ceiling)
        explained = (
            f"Fraction of pictures whose caption the classifier finds among {min(DISTRACTORS, len(texts))}; in the "
            f"real pictures it finds {ceiling.value:.3f} ({ceiling.low:.3f} – {ceiling.high:.3f}). A classifier is no "
            "impartial judge of pictures that it guided: compare ways that it did not."
        )
        shown = min(8, len(real))
        grid = image_grid(real[:shown], texts[:shown], shown, max(1, 64 // size))
        self.sections.append(Section("Real pictures", "Of the first captions.", grid, "real.png"))
        self._add_guidance(explained, scored, pictures, texts)
        self._add_similarity(seen, text)
        table = self.classifier.retrieval(real, texts, DISTRACTORS)
        self._add_retrieval(table)
        return table.text()

    def _add_similarity(self, seen: dict[str, Tensor], text: Tensor) -> None:
        """The noised-CLIP score of pictures: mean cosine with their own captions, and with each other's."""
        scores = {}
        for name, image in seen.items():
            own, other = ((image * each).sum(1).mean().item() for each in (text, text.roll(1, 0)))
            scores[name] = {"own caption": own, "another's caption": other}
        self.scores["similarity"] = scores
        rows = [[name, *(f"{value:.3f}" for value in row.values())] for name, row in scores.items()]
        table = markdown_table(["guidance", "own caption", "another's caption"], rows)
        explained = "Mean cosine of pictures and captions, from -1 to 1, in the classifier's eyes."
        self.sections.append(Section("Noised-CLIP score", f"{explained}\n\n{table}"))

    def _add_guidance(self, text: str, scored: dict[Way, Score], pictures: dict[Way, np.ndarray], captions) -> None:
        self.scores["guidance"] = to_dict(scored)
        self.sections += guidance_sections("What does guidance add?", text, scored, pictures, captions)

    def _add_retrieval(self, table: RetrievalTable) -> None:
        self.scores["retrieval"] = {str(t): dict(row) for t, row in table.found.items()}
        text = "How often the classifier matches real pictures and captions: where it is at chance, it cannot guide."
        self.sections.append(Section("What does the classifier see through the noise?", f"{text}\n\n{table.text()}",
                                     table.plot(), "retrieval.png"))  # fmt: skip

    def write(self) -> str:
        """Write the report and scores.json; returns the report's path."""
        path = storage.join(self.what.report_dir, "report.md")
        write_report(path, f"After {self.pipeline.step:,} steps", self.sections)
        scores = json.dumps(self.scores, indent=1).encode()
        storage.write_bytes(storage.join(self.what.report_dir, "scores.json"), scores)
        return path


def _found(seen: dict[str, Tensor], text: Tensor, captions: Conditioning) -> dict[str, Score]:
    """By name, how many pictures find their captions among DISTRACTORS (or all, if fewer); an incomplete last block is
    left out.

    seen: features [N, D] of the pictures; text: [N, D] of the captions; captions: their tokens and mask.
    """
    block = min(DISTRACTORS, len(text))
    parts = [slice(start, start + block) for start in range(0, len(text) - block + 1, block)]
    alike = [same_captions(captions.tokens[part], captions.mask[part]).to(text.device) for part in parts]
    scores = {}
    for name, image in seen.items():
        found = [retrieval(image[part], text[part], same) for part, same in zip(parts, alike, strict=True)]
        hits = torch.cat([values["image_to_text_at_1"] for values in found])
        scores[name] = Score(float(hits.mean()), *wilson(float(hits.sum()), len(hits)), len(hits))
    return scores
