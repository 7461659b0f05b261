"""Evaluation of a cascade: which evaluators run, what they measure, and that nothing is sampled twice."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import eval_making
import numpy as np
import pytest
import torch
from cascade_making import NO_TEXT, make_stage
from checkpoint_making import make_classifier_file, make_file
from control_making import make_controlnet
from decoder_making import UNET, make_decoder, save_decoder
from latent_file_making import B, Files, make_cascade
from lora_making import make_lora

from diff_dalle.checkpoints.decoder import ClipConfig
from diff_dalle.commands.command_line import parse
from diff_dalle.commands.evaluate import EvaluateRun, Evaluation
from diff_dalle.config import InputError, as_flag
from diff_dalle.diffusion.guidance import GuidanceConfig
from diff_dalle.distributed.world import ALONE
from diff_dalle.embeddings.clip import load_clip
from diff_dalle.evaluation.metrics import METRICS, inception_score
from diff_dalle.evaluation.pretrained import Lpips
from diff_dalle.evaluators.context import renders_of
from diff_dalle.evaluators.editing import VARIATIONS, object_mask, replacements
from diff_dalle.images.signal import from_uint8
from diff_dalle.sampling.control import Control
from diff_dalle.sampling.pipeline import Pipeline, load
from diff_dalle.sampling.stage_settings import GivenGuidance
from diff_dalle.worlds.shapes.render import render
from diff_dalle.worlds.shapes.scenes import ShapesConfig
from diff_dalle.worlds.shapes.shards import write_shapes

CONFIG = ShapesConfig(image_size=32, train_samples=8, val_samples=12, samples_per_shard=12)
NOISE = {"text_length": 24, "diffusion_steps": 8, "noise_schedule": "cosine"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A shapes world, generators of 16 and 16 → 32 pixels, the latter also without text, and a classifier."""
    folder = tmp_path_factory.mktemp("evaluate")
    write_shapes(CONFIG, str(folder / "world"))
    make_stage(folder / "base.pt", image_size=16, sample_interval=0, **NOISE)
    make_stage(folder / "up.pt", image_size=32, text_length=24, small_size=16, low_res_skip=True)
    make_stage(folder / "no_text.pt", image_size=32, small_size=16, **NO_TEXT)
    make_stage(folder / "gray.pt", image_size=32, small_size=16, image_channels=1, **NO_TEXT)
    make_classifier_file(folder, **NOISE)  # best.pt
    (folder / "progress.csv").write_text("step,held_out/loss_q0\n1,0.5\n2,0.4\n")
    return folder


def make_run(folder, **flags):
    """A run with the upsampler, on the shapes world; flags that are None are left out."""
    usual = {"shapes_dir": folder / "world", "report_dir": folder / "report", "prompts_per_task": 2}
    usual |= {"upsampler_paths": folder / "up.pt", "upsampler_steps": 2, "upsampler_batch_size": 8}
    if "model_path" in flags:
        usual["steps"] = 2
    flags = {**usual, **flags}
    return parse(EvaluateRun, [str(part) for name, v in flags.items() for part in (f"--{name}", v) if v is not None])


def evaluation(folder, **flags):
    return Evaluation(make_run(folder, **flags), ALONE)


def test_a_file_of_settings_with_an_earlier_name_is_read(tmp_path):
    (tmp_path / "run.yaml").write_text("what: {model_path: ema.pt, shapes_dir: world, prompts_per_task: 3}\n")
    assert parse(EvaluateRun, ["--config", str(tmp_path / "run.yaml")]).evaluation.prompts_per_task == 3


def base_and_classifier(folder, **flags):
    no_upsamplers = {"upsampler_paths": None, "upsampler_steps": None, "upsampler_batch_size": None}
    models = {"model_path": folder / "base.pt", "classifier_path": folder / "best.pt", "classifier_scale": "0,2"}
    return {**no_upsamplers, **models, **flags}


def on_shards(folder, count=5):
    return {"shapes_dir": None, "data_dir": folder / "world" / "val", "num_samples": count, "prompts_per_task": None}


def test_a_cascade_is_scored_at_both_sizes_and_its_images_are_edited(folder):
    result = evaluation(folder, model_path=folder / "base.pt", edits=2, progress=folder / "progress.csv")
    tables = result.run()
    report = result.write()
    assert tables.count("all attributes") == 2 and "bicubic" in tables
    text = Path(report).read_text(encoding="utf-8")
    for name in ("grid", "grid_upsampled", "upsampling", "inpainting", "image_to_image", "variations", "loss"):
        assert (folder / "report" / f"{name}.png").exists() and f"({name}.png)" in text
    scores = json.loads((folder / "report" / "scores.json").read_text())
    assert set(scores) == {"step", "scores", "scores upsampled", "upsampling", "editing"}
    assert "color" in scores["scores"] and scores["step"] == 7
    assert scores["upsampling"]["n"] == 2 and scores["upsampling"]["ours"]["consistency"]["value"] > 0
    assert scores["editing"]["inpainting"]["unmasked_identical"] is True
    assert set(scores["editing"]["variation"]) == {f"variation {v:g}" for v in VARIATIONS}


def test_upsamplers_alone_are_evaluated_on_real_images_with_and_without_text(folder):
    for name in ("up.pt", "no_text.pt"):
        result = evaluation(folder, upsampler_paths=folder / name)
        assert "all attributes" not in result.run() and "upsampling" in result.report.scores
    shards = evaluation(folder, **on_shards(folder))
    shards.run()
    assert shards.report.scores["upsampling"]["n"] == 5


def test_a_controlnet_is_compared_with_its_base(folder, tmp_path):
    """Alone and beside the other evaluators; the samples without it are those that the others see."""
    params = '{"resize": 0}'
    controlnet = make_controlnet(str(folder / "base.pt"), tmp_path / "control.pt", params=params)
    base = base_and_classifier(folder, classifier_path=None, classifier_scale=None)
    result = evaluation(folder, **base, controlnet=controlnet, prompts_per_task=4, report_dir=tmp_path)
    assert [*result.evaluators] == ["shapes", "control"]
    assert "Agreement of edges" in result.run() and Path(result.write()).exists()
    assert (tmp_path / "control.png").exists()
    scores = result.report.scores["control"]
    assert scores["edges"]["with"] != scores["edges"]["without"] and scores["with"]["color"]["n"] == 4


def test_both_halves_of_the_comparison_have_the_loras(folder, tmp_path):
    """Which is what a control of strength 0 shows. A base with other weights is refused unless it is accepted."""
    prompts, pictures = ["a red circle", "two blue squares"], np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3))
    adapters = {"controlnet": make_controlnet(str(folder / "base.pt"), tmp_path / "control.pt", params='{"resize": 0}')}
    adapters["lora"] = make_lora(tmp_path / "lora.safetensors", str(folder / "base.pt"))
    usual = base_and_classifier(folder, classifier_path=None, classifier_scale=None)
    context = evaluation(folder, **usual, **adapters).context
    without, steered = (
        context.steer(prompts, control) for control in (None, Control(list(pictures.astype(np.uint8)), scale=0.0))
    )
    alone = evaluation(folder, **usual).context.steer(prompts, None)
    assert np.array_equal(without, steered) and not np.array_equal(without, alone)
    content = torch.load(folder / "base.pt", weights_only=True)
    content["state"] = {name: value + 0.01 for name, value in content["state"].items()}
    torch.save(content, tmp_path / "changed.pt")
    changed = {**usual, "model_path": tmp_path / "changed.pt", **adapters}
    with pytest.raises(InputError, match="accept_changed_base True"):
        evaluation(folder, **changed)
    accepted = evaluation(folder, **changed, accept_changed_base=True).context
    assert accepted.steering is not None


def test_a_grayscale_upsampler_is_compared_with_grayscale_images(folder):
    result = evaluation(folder, upsampler_paths=folder / "gray.pt")
    real, _ = result.context.real_images()
    assert (real == real[..., :1]).all() and real.std() > 10
    result.run()
    assert result.report.scores["upsampling"]["real images"]["consistency"]["value"] == 60.0


def test_by_default_all_evaluators_run_whose_needs_are_met(folder):
    def names(**flags):
        return [*evaluation(folder, **flags).evaluators]

    models = base_and_classifier(folder)
    assert names() == ["upsampling"]
    assert names(progress="p.csv") == ["upsampling", "training_curves"]
    assert names(**models) == ["shapes", "guidance", "retrieval"]
    assert names(**models, **on_shards(folder)) == ["captions", "guidance", "similarity", "retrieval"]
    everything = {"upsampler_paths": folder / "up.pt", "edits": 2, "progress": "p.csv"}
    ran = names(**{**models, **everything})
    assert ran == ["shapes", "guidance", "retrieval", "upsampling", "editing", "training_curves"]
    assert names(**models, evaluators="retrieval,shapes") == ["shapes", "retrieval"]  # in the order of the table


@pytest.fixture()
def sampled(monkeypatch):
    """What is sampled during a test: (number of stages, prompts, settings of the first stage) of every call."""
    calls, sample_stages = [], Pipeline.sample_stages

    def recording(self, request, settings, **options):
        first = settings[0]
        key = (len(self.stages), tuple(request.prompts), tuple(request.classifier_prompts or ()))
        calls.append((*key, first.guidance.guidance_scale, first.classifier_scale))
        return sample_stages(self, request, settings, **options)

    monkeypatch.setattr(Pipeline, "sample_stages", recording)
    return calls


def test_all_of_the_guidance_is_that_of_the_checkpoint(folder, tmp_path, monkeypatch):
    """But for what is given; by default its scale is 3."""
    assert evaluation(folder, **base_and_classifier(folder)).context.default_guidance.guidance_scale == 3.0
    seen, sample_stages = [], Pipeline.sample_stages

    def recording(self, request, settings, **options):
        seen.append(settings[0].guidance)
        return sample_stages(self, request, settings, **options)

    monkeypatch.setattr(Pipeline, "sample_stages", recording)
    path = make_file(tmp_path, guidance_scale=2, perturbed_attention_scale=4, guidance_rescale=0.5)
    models = {**base_and_classifier(folder), "model_path": path}
    context = evaluation(folder, **models, guidance_rescale=0.25).context
    context.sample(["a star"], context.default_guidance)
    assert seen == [GuidanceConfig(2.0, guidance_rescale=0.25, perturbed_attention_scale=4.0)]
    assert evaluation(folder, **models, guidance_scale=5).context.default_guidance.guidance_scale == 5.0


def test_equal_samples_are_made_once_and_shared_between_evaluators(folder, sampled):
    """On shards five evaluators read the same samples: one call for each of the six guidance settings."""
    names = "captions,guidance,similarity,retrieval,feature_metrics"
    flags = base_and_classifier(folder, **on_shards(folder, 12), evaluators=names)
    result = evaluation(folder, **flags)
    result.run()
    assert len(sampled) == len(set(sampled)) == 6
    assert len(result.report.scores["similarity"]) == 7 and len(result.report.scores["guidance"]) == 6
    assert {"real images", "retrieval", "feature_metrics"} <= set(result.report.scores)


def test_feature_metrics_read_the_samples_of_shape_eval(folder, sampled):
    """In the shapes world too, also when ShapeEval sampled the whole cascade; none but ShapeEval's are made."""
    upsampler = {"upsampler_paths": folder / "up.pt", "upsampler_steps": 2}
    flags = base_and_classifier(folder, **upsampler, evaluators="shapes,feature_metrics")
    result = evaluation(folder, **flags)
    result.run()
    assert [call[0] for call in sampled] == [2] and result.report.scores["feature_metrics"]["n"] == 16


def test_feature_metrics_are_those_of_the_classifiers_features(folder, tmp_path):
    flags = base_and_classifier(folder, **on_shards(folder, 12), evaluators="feature_metrics")
    result = evaluation(folder, **flags)
    result.run()
    context, found = result.context, result.report.scores["feature_metrics"]
    images = context.sample(context.captioned.captions, context.default_guidance)[0]
    real, fake = (context.classifier.encode_image(x) for x in (context.captioned.images, images))
    expected = {name: value for metric in METRICS.values() for name, value in metric(real, fake).items()}
    assert found["generated"] == pytest.approx(expected) and set(found["real halves"]) == set(expected)
    assert "best.pt at t = 0" in found["features"] and found["dimensions"] == real.shape[1] == 16
    assert "best.pt" in result.report.sections[0].text and "frechet_distance" in result.report.sections[0].text
    with pytest.raises(InputError, match="num_samples is 11, but the evaluator feature_metrics needs at least 12"):
        make_run(folder, **{**flags, "num_samples": 11})
    write_shapes(replace(CONFIG, val_samples=4), str(tmp_path))
    with pytest.raises(InputError, match="--data_dir has 4 images, but feature_metrics needs at least 12"):
        evaluation(folder, **{**flags, "data_dir": tmp_path / "val"}).run()


def test_missing_matplotlib_is_found_before_anything_is_sampled_and_only_if_plots_are_drawn(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match="diff_dalle.plot"):
        evaluation(folder, **base_and_classifier(folder))
    assert evaluation(folder, **base_and_classifier(folder), evaluators="shapes").evaluators


def test_a_replacement_has_the_size_and_position_of_the_object_but_another_color_and_shape():
    found = replacements(6, 0, CONFIG, "edits", "")
    assert len(found) == 6
    for replacement in found:
        before, after = replacement.before.scene.objects[0], replacement.after.scene.objects[0]
        assert (before.size, before.position) == (after.size, after.position)
        assert before.color != after.color and before.shape != after.shape
    scenes = [prompt.scene for replacement in found for prompt in (replacement.before, replacement.after)]
    assert len(set(scenes)) == len(scenes)


def test_the_mask_covers_the_object():
    for replacement in replacements(6, 1, CONFIG, "edits", ""):
        scene = replacement.before.scene
        empty = render(scene.__class__(**{**vars(scene), "objects": ()}), 32).astype(int)
        drawn = np.abs(render(scene, 32).astype(int) - empty).max(2) > 0
        mask = object_mask(scene.objects[0], 32)
        assert drawn.any() and not (drawn & ~mask).any() and mask.mean() < 0.6


# ---------------------------------------------------------------------------------------------- distances of features


def mean_colors():
    """A feature network: the means of the four quarters of an image, of each color."""
    return lambda images: torch.nn.functional.adaptive_avg_pool2d(images.float(), 2).flatten(1)


def flat():
    return lambda images: images.float()


@pytest.mark.parametrize("data", ["shapes", "shards"])
def test_metrics_of_any_network_are_asked_for_by_name(folder, data):
    """Without a classifier, and on shards without naming the evaluator."""
    flags = base_and_classifier(folder, metrics="kid,fid", feature_network=f"{__name__}:mean_colors")
    flags |= {"classifier_path": None, "classifier_scale": None}
    flags |= on_shards(folder, 12) if data == "shards" else {"evaluators": "feature_metrics", "prompts_per_task": 4}
    result = evaluation(folder, **flags)
    result.run()
    assert [*result.evaluators] == ["feature_metrics"]
    context, found = result.context, result.report.scores["feature_metrics"]
    if data == "shards":
        captions, real = context.captioned.captions, context.captioned.images
        assert len(captions) == 12 and all(captions)
    else:
        prompts = context.shape_prompts()
        captions, real = [prompt.text for prompt in prompts], renders_of(prompts, 16)
    pair = [real, context.sample(captions, context.default_guidance)[0]]
    features = [mean_colors()(torch.from_numpy(images).permute(0, 3, 1, 2)) for images in pair]
    expected = METRICS["fid"](*features) | METRICS["kid"](*features)
    assert found["generated"] == pytest.approx(expected) and found["dimensions"] == 12
    assert found["features"] == f"{__name__}:mean_colors"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"metrics": "fid", "evaluators": "retrieval"}, "metrics is for the evaluator feature_metrics: add it to"),
        ({"metrics": "fid", "feature_network": "numpy"}, "must be inception or PACKAGE.MODULE:FUNCTION"),
        ({"metrics": "is"}, "metrics has is, which needs the classes of a network: set --feature_network to inception"),
        (
            {"metrics": "lpips", "lpips_weights": ""},
            "weights are not in torch's cache, .* give the file as --lpips_weights, or put it",
        ),
        ({"metrics": "lpips", "lpips_weights": "no.pth"}, "--lpips_weights is no.pth, which is not a local file"),
        ({"metrics": "fid", "lpips_weights": "no.pth"}, "--lpips_weights has no effect while metrics is fid"),
        ({"metrics": "is", "feature_network": "inception:no.pth"}, "inception:FILE is no.pth, which is not a local"),
        ({"metrics": "fid", "feature_network": "numpy:nothing"}, "numpy:nothing cannot be imported"),
        ({"metrics": "fid", "feature_network": "no_such:f"}, "no_such:f cannot be imported"),
        ({"metrics": "fid", "feature_network": f"{__name__}:flat"}, r"returned \[12, 3, 16, 16\] for 12 images"),
    ],
)
def test_metrics_that_cannot_be_had_are_refused(folder, tmp_path, monkeypatch, flags, words):
    eval_making.install(monkeypatch, tmp_path)
    named = {"evaluators": "feature_metrics"} if {"feature_network", "lpips_weights"} & set(flags) else {}
    with pytest.raises(InputError, match=words):
        evaluation(folder, **base_and_classifier(folder, **on_shards(folder, 12)) | named | flags).run()


def test_inception_and_perceptual_metrics_have_networks_of_their_own(folder, tmp_path, monkeypatch):
    """FID and IS of one Inception, LPIPS of the pairs; the reference compares unequal halves."""
    eval_making.install(monkeypatch, tmp_path)
    eval_making.save_inception(tmp_path / "inception.pth")
    eval_making.save_lpips(tmp_path / "alex.pth", "alex")
    network = f"inception:{tmp_path / 'inception.pth'}"
    given = {"metrics": "is,fid,lpips", "feature_network": network, "lpips_weights": tmp_path / "alex.pth"}
    given |= {"classifier_path": None, "classifier_scale": None, "evaluators": "feature_metrics"}
    write_shapes(replace(CONFIG, val_samples=13, samples_per_shard=13), str(tmp_path / "world"))
    make_stage(tmp_path / "base.pt", image_size=32, sample_interval=0, **NOISE)  # AlexNet needs 31 pixels
    given |= on_shards(tmp_path, 13) | {"model_path": tmp_path / "base.pt"}
    result = evaluation(folder, **base_and_classifier(folder) | given)
    monkeypatch.setattr(result.context, "sample", lambda *_: [generated])
    real = torch.from_numpy(result.context.captioned.images)
    generated = np.random.default_rng(0).integers(0, 256, real.shape, dtype=np.uint8)
    result.run()
    found = result.report.scores["feature_metrics"]["generated"]
    assert list(found) == ["inception_score", "frechet_distance", "lpips"]
    sides = [each.permute(0, 3, 1, 2) for each in (real, torch.from_numpy(generated))]
    pooled, logits = (
        [eval_making.Inception("", [name], tmp_path / "inception.pth")(side).detach() for side in sides]
        for name in ("2048", "logits_unbiased")
    )
    assert found["frechet_distance"] == pytest.approx(METRICS["fid"](*pooled)["frechet_distance"], rel=1e-6)
    assert found["inception_score"] == pytest.approx(inception_score(logits[1], 1)[0], rel=1e-9)
    distances = Lpips("alex", str(tmp_path / "alex.pth"), torch.device("cpu"), "")(*(s / 127.5 - 1 for s in sides))
    assert found["lpips"] == pytest.approx(float(distances.mean()), rel=1e-6)
    assert result.report.scores["feature_metrics"]["real halves"]["lpips"] > 0


# ------------------------------------------------------------------------------------------------------------- decoders


@pytest.fixture(scope="module")
def decoder(folder):
    """Of 8 and 16 pixels, whose embeddings are from the classifier."""
    clip = load_clip("diff_dalle", str(folder / "best.pt"), "cpu")
    unet = replace(UNET, image_embed_dim=clip.embed_dim)
    identity = ClipConfig("diff_dalle", str(folder / "best.pt"), clip.identity)
    return save_decoder(folder / "decoder.pt", make_decoder(2, unet, clip=identity, sample_timesteps=(2,)))


def decoder_run(folder, path, **flags):
    usual = {"decoder_path": path, "upsampler_paths": None, "upsampler_steps": None}
    return make_run(folder, **{**usual, "upsampler_batch_size": None, **flags})


def test_variations_of_a_decoder_are_scored_beside_what_its_clip_carries(folder, decoder, tmp_path):
    run = decoder_run(folder, decoder, report_dir=tmp_path)
    found = Evaluation(run, ALONE)
    assert [*found.evaluators] == ["image_variations"]
    assert "| color " in found.run()
    found.write()
    scores = json.loads((tmp_path / "scores.json").read_text())["image_variations"]
    assert set(scores) == {"color", "position", "size", "shape", "all attributes", "held-out pairs"}
    assert all(0 <= scores[name]["probe"] <= 1 for name in ("color", "position", "size", "shape"))
    assert (tmp_path / "image_variations.png").exists()


def test_a_decoder_is_no_generator_nor_the_reverse(folder, decoder):
    given = {"shapes_dir": None, "prompts_per_task": None}
    given |= {"data_dir": folder, "metrics": "fid", "feature_network": "a:b"}
    for wrong, path, kind, right in (
        ("model_path", decoder, "decoder", "decoder_path"),
        ("decoder_path", folder / "base.pt", "generator", "model_path"),
    ):
        with pytest.raises(InputError) as error:
            Evaluation(decoder_run(folder, None, **{**given, wrong: path}), ALONE)
        said = f"--{wrong} is {path}, which holds a {kind}: give it with --{right}"
        assert error.value.message(as_flag) == said


def test_variations_are_of_the_embeddings_and_as_the_checkpoint_says(folder, decoder):
    found = Evaluation(decoder_run(folder, decoder), ALONE).context
    pictures = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), np.uint8)
    embeddings = found.embed(pictures)
    assert torch.equal(embeddings, found.clip.encode_images(from_uint8(pictures)))
    stages = found.vary(embeddings)
    assert [images.shape for images in stages] == [(3, 8, 8, 3), (3, 16, 16, 3)]
    plain = found.pipeline.sample(embeddings=embeddings.numpy(), progress=False)
    assert np.array_equal(stages[-1], plain)
    guided = replace(found.run, guidance=GivenGuidance(guidance_scale=1.0))
    found.run = guided
    assert not np.array_equal(found.vary(embeddings)[-1], plain)


def test_samples_are_compared_with_the_pictures_of_their_embeddings(folder, decoder, tmp_path, monkeypatch):
    """Those of shards."""
    compared = {**on_shards(folder, 12), "metrics": "fid,kid", "feature_network": f"{__name__}:mean_colors"}
    found = Evaluation(decoder_run(folder, decoder, **compared, report_dir=tmp_path), ALONE)
    pipeline, given = found.context.pipeline, []
    sample = pipeline.sample_stages

    def recorded(request, *arguments, **options):
        given.append(request)
        return sample(request, *arguments, **options)

    monkeypatch.setattr(pipeline, "sample_stages", recorded)
    found.run()
    found.write()
    scores = json.loads((tmp_path / "scores.json").read_text())["feature_metrics"]
    assert scores["n"] == 12 and scores["generated"]["frechet_distance"] > 0
    assert given[0].embeddings.shape == (12, 16) and "same embeddings" in (tmp_path / "report.md").read_text()


def test_a_decoder_in_the_place_of_a_generator_and_the_reverse_are_refused(folder, decoder):
    base = base_and_classifier(folder, model_path=decoder)
    with pytest.raises(InputError, match="model_path is .*, which holds a decoder: give it with (--)?decoder_path"):
        evaluation(folder, **base)
    with pytest.raises(InputError, match="decoder_path is .*, which holds a generator: give it with (--)?model_path"):
        Evaluation(decoder_run(folder, folder / "base.pt"), ALONE)


def clip_of(run):
    return Evaluation(run, ALONE).context.clip


def test_the_clip_of_a_decoder_may_have_moved_but_must_be_its_own(folder, decoder, tmp_path):
    moved, other = tmp_path / "moved.pt", tmp_path / "other"
    run = decoder_run(folder, decoder)
    gone = replace(run, evaluation=replace(run.evaluation, clip_path=str(moved)))
    with pytest.raises(InputError, match="moved.pt"):
        clip_of(gone)
    moved.write_bytes((folder / "best.pt").read_bytes())
    assert clip_of(gone).name == f"diff_dalle {moved}"
    other.mkdir()
    wrong = make_classifier_file(other, **{**NOISE, "classifier_width": 24})
    another = replace(run, evaluation=replace(run.evaluation, clip_path=wrong))
    with pytest.raises(InputError, match="the CLIP is diff_dalle .*, but .* was trained with diff_dalle"):
        clip_of(another)


# ------------------------------------------------------------------------------------------------------ latent cascades


@pytest.fixture(scope="module")
def latent(tmp_path_factory):
    """Its stages B and A could also make pictures of 88×44 pixels, which no bucket has."""
    return make_cascade(tmp_path_factory.mktemp("latent"), replace(B, model=replace(B.model, patch_size=1)))


def latent_run(folder, files, **flags):
    usual = {"model_path": files.c, "upsampler_paths": None, "upsampler_steps": None}
    usual |= {"upsampler_batch_size": None, "steps": None, "semantic": files.semantic, **files.rest}
    return make_run(folder, **{**usual, **flags})


def test_a_latent_cascade_is_scored_at_each_aspect_ratio(folder, latent, tmp_path):
    """Its samples, and what stages B and A make of pictures again."""
    run = latent_run(folder, latent, aspect_ratios="1/1,2/1", report_dir=tmp_path)
    found = Evaluation(run, ALONE)
    assert [*found.evaluators] == ["latent_cascade"]
    table = found.run()
    assert "ShapeEval, 64×64:" in table and "Reconstructions 88×40:" in table
    report = Path(found.write()).read_text()
    scores = json.loads((tmp_path / "scores.json").read_text())
    names = {f"{what} {size}" for what in ("scores", "reconstructions") for size in ("64×64", "88×40")}
    assert set(scores) == {"step", *names}
    assert set(scores["reconstructions 88×40"]) == {
        "empty", "color", "shape", "size", "position", "all attributes", "held-out pairs"
    }  # fmt: skip
    for size in ("64×64", "88×40"):
        assert f"grid_{size}.png" in report and (tmp_path / f"reconstructions_{size}.png").exists()


def test_a_latent_cascade_samples_and_reconstructs_as_its_files_say(folder, latent):
    found = Evaluation(latent_run(folder, latent), ALONE).context
    samples = found.sample_cascade(["a red circle", "a ring"], (40, 88))
    plain = found.pipeline.sample(["a red circle", "a ring"], seed=found.settings.seed, size=(40, 88), progress=False)
    assert samples.shape == (2, 40, 88, 3) and np.array_equal(samples, plain)
    pictures = np.random.default_rng(0).integers(0, 256, (2, 40, 88, 3), np.uint8)
    again = found.reconstruct(pictures)
    alone = load("", "cpu", semantic=latent.semantic, **latent.rest)
    expected = alone.sample(reconstruct=list(pictures), seed=found.settings.seed, size=(40, 88), progress=False)
    assert np.array_equal(again, expected)


def test_own_settings_of_a_latent_cascade_are_used(folder, latent):
    def sampled(**flags):
        context = Evaluation(latent_run(folder, latent, **flags), ALONE).context
        return context.sample_cascade(["a red circle", "a ring"], (64, 64)).tobytes()

    settings = {"guidance_scale": 1.0, "shift": 5.0, "t_start": 0.8, "stage_b_shift": 4.0}
    settings |= {"stage_b_steps": 2}
    assert len({sampled(), *(sampled(**{name: value}) for name, value in settings.items())}) == 6


# --------------------------------------------------------------------------------------------------- what is refused

SHARDS = {"shapes_dir": None, "prompts_per_task": None, "data_dir": "shards"}
NOTHING = {"classifier_path": None, "classifier_scale": None}
NO_B = {"stage_b": None, "stage_a": None}
ONE, AS_IT_IS = "evaluate one of them at a time", "samples as its checkpoint says"


@pytest.mark.parametrize(
    ("kind", "flags", "words"),
    [
        ("", {"guidance_prompts": 1}, "guidance_prompts is 1, but must be at least 2"),
        ("", {"guidance_prompts": -1}, "guidance_prompts is -1, but must be at least 0"),
        ("", {"edits": 1, "model_path": "base.pt"}, "edits is 1"),
        ("", {"upsampler_paths": None, "model_path": "base.pt"}, "settings of upsamplers are given, but no upsamplers"),
        ("", {"guidance_scale": 1, "guidance_scale_end": 2}, "guidance_scale is 1, no guidance in evaluation"),
        ("", {"classifier_path": "c.pt"}, "--classifier_path is given, but it only scores and guides"),
        ("", {"evaluators": "shapes"}, r"shapes needs a base generator \(--model_path\): set it, or remove shapes"),
        ("", {"evaluators": "similarity"}, r"\(--model_path\) and a noised CLIP \(.*\) and captioned shards"),
        ("", {"evaluators": "upsampling,editing", "model_path": "b.pt"}, r"editing needs a number .* \(--edits\)"),
        ("", {"controlnet": "c.pt"}, r"control needs a base .* \(--model_path\): set it, or leave --controlnet out"),
        ("", {"controlnet": "c.pt", "model_path": "b.pt", "evaluators": "shapes"}, "add it to --evaluators"),
        ("base", {"metrics": "fid"}, "feature_metrics needs a noised CLIP or another network.*leave --metrics out"),
        (
            "base",
            {**SHARDS, "feature_network": f"{__name__}:mean_colors"},
            "no evaluator applies .* the report would be empty: set --metrics$",
        ),
        ("decoder", {"model_path": "base.pt"}, ONE),
        ("decoder", {"upsampler_paths": "up.pt"}, ONE),
        ("decoder", {**SHARDS, "metrics": "fid"}, "set --shapes_dir, or --data_dir, --metrics and --feature_n"),
        ("decoder", {**SHARDS, "feature_network": "a:b"}, "the report would be empty: set --metrics"),
        ("decoder", {"classifier_path": "best.pt"}, "--classifier_path is given, .*: leave it out"),
        ("decoder", {"evaluators": "guidance"}, "guidance needs a base generator"),
        ("decoder", {"steps": 3}, AS_IT_IS),
        ("decoder", {"thresholding": "dynamic"}, AS_IT_IS),
        ("latent", {"model_path": None, "upsampler_paths": "up.pt"}, "--stage_b needs stage C as --model_path"),
        ("latent", {"upsampler_paths": "up.pt"}, "needs stage C as --model_path, and no decoder, upsamplers"),
        ("latent", {"classifier_path": "best.pt"}, ONE),
        ("latent", SHARDS, "set --shapes_dir"),
        ("latent", {"steps": 3}, f"a latent cascade {AS_IT_IS}"),
        ("latent", NO_B, "settings of a latent cascade are given, but no stage B"),
        ("latent", {**NO_B, "semantic": None, "aspect_ratios": "2/1"}, "but no stage B"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_loaded(tmp_path, kind, flags, words):
    files = Files("a.pt", "semantic.pt", "b.pt", "c.pt")
    with pytest.raises(InputError, match=words):
        if kind == "decoder":
            decoder_run(tmp_path, "decoder.pt", **flags)
        elif kind == "latent":
            latent_run(tmp_path, files, **flags)
        else:
            make_run(tmp_path, **(base_and_classifier(tmp_path, **NOTHING) if kind else {}) | flags)
