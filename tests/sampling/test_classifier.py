"""Classifiers: loading, compatibility with a generator, guidance, and retrieval by noise level."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cascade_making import random_images
from checkpoint_making import make_classifier_file, sample
from checkpoint_making import make_file as make_generator_file
from operation_counting import parameter_conversions

from diff_dalle.config import InputError, expectations
from diff_dalle.diffusion import GuidanceConfig
from diff_dalle.diffusion.guidance import similarity_gradient
from diff_dalle.diffusion.sampling import SamplerConfig
from diff_dalle.images.signal import PixelSignal, from_uint8
from diff_dalle.models.noised_clip import NoisedClipConfig
from diff_dalle.sampling import stage
from diff_dalle.sampling.classifier import load_classifier
from diff_dalle.sampling.pipeline import load
from diff_dalle.sampling.stage_settings import StageSettings

PROMPTS = ["a red circle", "two blue squares", "", "a star", "a ring"]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return load_classifier(make_classifier_file(tmp_path_factory.mktemp("classifier")), device="cpu")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    return load(make_generator_file(tmp_path_factory.mktemp("generator")), device="cpu")


def test_a_classifier_is_loaded_from_its_checkpoint_alone(classifier):
    assert (classifier.step, classifier.noised, classifier.model.config.classifier_width) == (7, True, 16)
    assert classifier.diffusion.diffusion_steps == 50 and not classifier.model.training
    text, images = classifier.encode_text(PROMPTS), classifier.encode_image(random_images(5, 16, 16), batch_size=2)
    assert text.shape == images.shape == (5, 16)
    torch.testing.assert_close(images.norm(dim=1), torch.ones(5))
    expected = classifier.model.encode_image(from_uint8(random_images(5, 16, 16)), torch.zeros(5, dtype=torch.int64))
    torch.testing.assert_close(images, expected)


def test_a_classifier_must_fit_the_generator(classifier):
    fits, tokenizer = classifier.check_fits, classifier.tokenizer
    rgb = PixelSignal(3)
    fits((16, 16), rgb, tokenizer)
    fits((16, 16), rgb, None)
    with pytest.raises(InputError, match="on 16×16 images and cannot guide 32×16 images"):
        fits((16, 32), rgb, tokenizer)
    with pytest.raises(InputError, match="on images with 3 channels, but the generator's have 1: leave"):
        fits((16, 16), PixelSignal(1), tokenizer)
    with pytest.raises(InputError, match="the classifier's vocabulary is .*, the generator's other-1:0"):
        fits((16, 16), rgb, SimpleNamespace(identity="other-1:0", base_identity="other-1:0"))


def test_sampling_refuses_what_does_not_fit(classifier, pipeline, tmp_path):
    sample(pipeline, "a star", size=(8, 24), classifier=classifier, classifier_scale=0.0)  # off: it need not fit
    path = make_generator_file(tmp_path)
    with pytest.raises(InputError, match="holds a generator, but a classifier or a vit_clip is required"):
        load_classifier(path)


def test_a_classifier_of_other_noise_guides_at_the_nearest_levels(classifier, tmp_path, caplog, monkeypatch):
    """With one warning in a process, which names both schedules."""
    warned, noise = "linear schedule of 50 steps, .* on the cosine schedule of 100 steps", []
    other = load(make_generator_file(tmp_path, noise_schedule="cosine", diffusion_steps=100), device="cpu")
    encode = classifier.model.encode_image
    monkeypatch.setattr(classifier.model, "encode_image", lambda x, t: noise.append(int(t[0])) or encode(x, t))
    options = {"seed": 3, "sampler": "ancestral", "steps": 5, "classifier_scale": 3.0}
    guided = [sample(other, PROMPTS[:2], classifier=classifier, **options) for _ in range(2)][-1]
    assert len([each for each in caplog.messages if re.search(warned, each)]) == len(caplog.messages) == 1
    assert (guided != sample(other, PROMPTS[:2], **options)).any()
    caplog.clear()
    flow = load(make_generator_file(tmp_path, noise_schedule="flow", diffusion_steps=1000), device="cpu")
    sample(flow, PROMPTS[:2], classifier=classifier, **options)
    (warning,) = caplog.messages
    assert "on the straight path of a flow" in warning and warning.endswith("nearest noise levels")
    own, levels = classifier.process.snr, other.stages[0].process(StageSettings(SamplerConfig(steps=5))).snr
    assert noise[:5] == [int(np.abs(np.log(own / level)).argmin()) for level in reversed(levels)]


def test_the_form_of_guidance_reaches_the_sampler(classifier, pipeline, monkeypatch):
    """With steps in Guided-Diffusion's form, the image is limited where Guided-Diffusion limits it."""
    guides, draw = [], stage.sample_batch
    monkeypatch.setattr(stage, "sample_batch", lambda *given: guides.append(given[5]) or draw(*given))
    for options, found in (
        ({"sampler": SamplerConfig("ancestral", 2)}, ("mean", False)),
        ({"sampler": SamplerConfig("ancestral", 2), "classifier_form": "score"}, ("score", False)),
        ({"sampler": SamplerConfig("heun", 2)}, ("score", False)),
        ({"sampler": SamplerConfig("ddim", timestep_respacing="2")}, ("score", True)),
        ({"sampler": SamplerConfig(timestep_respacing="2")}, ("mean", True)),
    ):
        sample(pipeline, "a star", classifier=classifier, **options)
        assert (guides[-1].form, guides[-1].limit_first) == found and guides[-1].process is None


def test_settings_other_than_the_checkpoints_are_refused(classifier):
    expected = expectations(NoisedClipConfig, "Expected")
    classifier.check(expected(classifier_width=16))
    with pytest.raises(InputError, match=r"classifier_width \(32 given, 16 in the checkpoint\)"):
        classifier.check(expected(classifier_width=32))


@pytest.mark.parametrize("gradient", ["x_t", "x_start"])
def test_guidance_changes_images_independently_of_their_batch(classifier, pipeline, gradient):
    guidance = GuidanceConfig(guidance_scale=2.0)
    options = {"classifier": classifier, "classifier_gradient": gradient, "guidance": guidance}
    plain = sample(pipeline, PROMPTS, seed=3, guidance=guidance)
    guided = sample(pipeline, PROMPTS, seed=3, batch_size=2, classifier_scale=3.0, **options)
    assert all((plain[i] != guided[i]).any() for i in range(5))
    alone = sample(pipeline, [PROMPTS[3]], seeds=[6], classifier_scale=3.0, **options)
    assert np.abs(guided[3].astype(int) - alone[0]).max() <= 1
    assert np.array_equal(sample(pipeline, PROMPTS, seed=3, classifier_scale=0.0, **options), plain)
    opposite = sample(pipeline, PROMPTS, seed=3, batch_size=2, classifier_scale=-3.0, **options)
    score = [(classifier.encode_image(images) * classifier.encode_text(PROMPTS)).sum() for images in (opposite, guided)]
    assert score[0] < score[1]


def test_a_generator_without_text_is_guided_by_captions(classifier, tmp_path):
    blind = load(make_generator_file(tmp_path, enc_attn_dim=0, caption_dropout=0), "cpu")
    images = sample(blind, ["a star", "a red circle"], seeds=[1, 1], classifier=classifier, classifier_scale=5.0)
    assert (images[0] != images[1]).any()


def test_the_text_tower_runs_once_per_batch(classifier, pipeline, monkeypatch):
    sizes, encode = [], classifier.model.encode_text

    def counted(tokens, mask):
        sizes.append(len(tokens))
        return encode(tokens, mask)

    monkeypatch.setattr(classifier.model, "encode_text", counted)
    sample(pipeline, PROMPTS, batch_size=2, classifier=classifier)
    assert sizes == [2, 2, 1]


def test_a_classifier_of_clean_images_guides_through_x_start_only(pipeline, tmp_path):
    clean = load_classifier(make_classifier_file(tmp_path, noised=False), device="cpu")
    with pytest.raises(InputError, match="noised False.*classifier_gradient to x_start"):
        sample(pipeline, "a star", classifier=clean)
    assert sample(pipeline, "a star", classifier=clean, classifier_gradient="x_start").shape == (1, 16, 16, 3)
    assert list(clean.retrieval(random_images(2, 16, 16), ["a", "b"]).recall) == [0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_gradients_in_half_precision_have_the_same_direction(classifier, precision, monkeypatch):
    x, t = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 10, 20, 30, 49])
    gradients = []
    for name in ("fp32", precision):
        monkeypatch.setattr(classifier, "precision", name)
        similarity = classifier.guide(PROMPTS, None, 1.0, "x_t").similarity
        gradients.append(similarity_gradient(lambda x, similarity=similarity: similarity(x, t), x).flatten(1))
    assert gradients[1].dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(*gradients).min() > 0.99


def test_retrieval_discards_an_incomplete_block(classifier):
    images, prompts = random_images(7, 16, 16), [f"image {i}" for i in range(7)]
    table = classifier.retrieval(images, prompts, block=3)
    assert table.candidates == 3 and list(table.recall) == [*range(0, 50, 5), 49]
    assert table == classifier.retrieval(images[:6], prompts[:6], block=3)
    assert classifier.retrieval(images, prompts).candidates == 7
    for row in table.recall.values():
        assert all(value * 6 == pytest.approx(round(value * 6)) for value in row.values())
        assert row["image_to_text_at_5"] == row["text_to_image_at_5"] == 1.0


def test_retrieval_requires_two_images_of_the_right_size(classifier):
    with pytest.raises(InputError, match="requires at least 2 images"):
        classifier.retrieval(random_images(1, 16, 16), ["a star"])
    with pytest.raises(InputError, match="takes images of 16×16 pixels"):
        classifier.retrieval(random_images(2, 8, 8), ["a star", "a ring"])


def test_weights_are_converted_when_they_are_loaded_and_not_at_every_evaluation(tmp_path):
    pipeline = load(make_generator_file(tmp_path), "cpu", "bf16")
    classifier = load_classifier(make_classifier_file(tmp_path), "cpu", "bf16")

    def work():
        sample(pipeline, PROMPTS[:2], classifier=classifier)

    network = pipeline.stages[0].network()
    assert network.unet.output_blocks[0][0].in_conv.weight.dtype == torch.bfloat16
    assert parameter_conversions(network, work) == 0
    assert parameter_conversions(classifier.model, work) == 4  # position embeddings, in each of four evaluations
