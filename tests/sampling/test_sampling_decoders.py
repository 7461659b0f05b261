"""Sampling with decoders: files, embeddings, guidance, defaults, every sampler, inpainting, self-conditioning."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from cascade_making import random_images, watching
from decoder_making import (
    TEXT_LENGTH,
    TEXT_UNET,
    TEXT_WIDTH,
    UNET,
    WIDTH,
    make_decoder,
    make_network,
    save_decoder,
    save_unet,
)

import diff_dalle
from diff_dalle import GuidanceConfig, ImageEdit, StageSettings
from diff_dalle.batch import SELF_COND
from diff_dalle.checkpoints.decoder import ClipConfig
from diff_dalle.checkpoints.loading import SavedNetwork
from diff_dalle.checkpoints.pixels import DecoderSettings
from diff_dalle.config import InputError, expectations
from diff_dalle.diffusion import DiffusionConfig
from diff_dalle.diffusion.editing import EditConfig
from diff_dalle.diffusion.sampling import SampleBatch, SamplerConfig, sample_steps
from diff_dalle.models.generator import GeneratorConfig
from diff_dalle.sampling.pipeline import Pipeline
from diff_dalle.sampling.pixel_stages import UnetStage

FAST = {"sample_timesteps": (4,)}
EMBEDDINGS = np.random.default_rng(0).normal(size=(3, WIDTH)).astype(np.float32)


@dataclass(frozen=True)
class InMemory(SavedNetwork):
    network: torch.nn.Module | None = None

    def load(self, device):
        return self.network


def pipeline_of(count=1, decoder=None, **settings) -> Pipeline:
    """A decoder that is in memory."""
    decoder = decoder or make_decoder(count, **(FAST | settings))
    saved = (DecoderSettings(decoder), None, 0)
    networks = [InMemory(name, *saved, name, network=make_network(decoder, i)) for i, name in enumerate(decoder.names)]
    return Pipeline([UnetStage(each, torch.device("cpu")) for each in networks])


def sample(pipeline, embeddings=EMBEDDINGS, **options):
    return pipeline.sample(embeddings=embeddings, progress=False, **options).astype(int)


def guided(scale, **settings):
    return {"guidance": GuidanceConfig(guidance_scale=scale, **settings)}


def texts(n=3, seed=1):
    states = np.random.default_rng(seed).normal(size=(n, TEXT_LENGTH, TEXT_WIDTH)).astype(np.float32)
    return states, np.ones((n, TEXT_LENGTH), dtype=bool)


# ---------------------------------------------------------------------------------------------------------------- files


def test_a_decoder_is_one_file_or_a_file_for_each_unet(tmp_path):
    """The same images from both, at the size of the last; the first U-Net alone gives its own."""
    decoder = make_decoder(3, **FAST)
    whole = diff_dalle.load(save_decoder(tmp_path / "decoder.pt", decoder), "cpu")
    paths = [save_unet(tmp_path / f"{i}.pt", decoder, i) for i in range(3)]
    images = sample(whole)
    assert images.shape == (3, 32, 32, 3) and images.std() > 5
    assert np.array_equal(images, sample(diff_dalle.load(paths, "cpu")))
    assert np.array_equal(images, sample(diff_dalle.load(paths[0], "cpu", upsampler_paths=paths[1:])))
    assert sample(diff_dalle.load(paths[0], "cpu")).shape == (3, 8, 8, 3)


def test_unets_must_be_trained_on_the_same_embeddings(tmp_path):
    every = replace(UNET, cond_on_image_embeds=True)

    def paths(**changed):
        other = {"unets": (every,) * 2, "clip": ClipConfig("open_clip", "a"), **FAST, **changed}
        first = make_decoder(2, unets=(every,) * 2, clip=ClipConfig("open_clip", "a"), **FAST)
        return [save_unet(tmp_path / "0.pt", first, 0), save_unet(tmp_path / "1.pt", make_decoder(2, **other), 1)]

    assert len(diff_dalle.load(paths(), "cpu").stages) == 2
    with pytest.raises(InputError, match=r"0.pt has image embeddings of width 6, but .*1.pt of width 7"):
        diff_dalle.load(paths(unets=(replace(every, image_embed_dim=7),) * 2), "cpu")
    assert len(diff_dalle.load(paths(unets=(UNET,) * 2, clip=ClipConfig()), "cpu").stages) == 2  # 1 reads none


def test_flags_of_a_network_are_compared_or_refused():
    pipeline = pipeline_of()
    pipeline.check(expectations(DiffusionConfig, "")(noise_schedule="cosine"))
    with pytest.raises(InputError, match=r"diffusion_steps \(3 given, 50 in the checkpoint\)"):
        pipeline.check(expectations(DiffusionConfig, "")(diffusion_steps=3))
    with pytest.raises(InputError, match=r"num_channels \(given, but the checkpoint has no such setting\)"):
        pipeline.check(expectations(GeneratorConfig, "")(num_channels=3))


# ---------------------------------------------------------------------------------------------- embeddings and guidance


def test_cond_scale_changes_images_and_one_turns_it_off():
    """Guidance goes from what is made without embedding to what is made with it, and beyond."""
    pipeline = pipeline_of()
    one, three = (sample(pipeline, **guided(scale)) for scale in (1.0, 3.0))
    assert np.abs(one - three).mean() > 2
    assert np.array_equal(three, sample(pipeline))  # the default
    nothing = sample(pipeline, **guided(0.0))
    assert np.abs(nothing - sample(pipeline, EMBEDDINGS[::-1].copy(), **guided(0.0))).max() <= 1
    with watching(pipeline.stages[0]) as seen:
        sample(pipeline, **guided(1.0))
        assert {len(x) for x, _ in seen} == {3}
        sample(pipeline, **guided(3.0))
    x, cond = seen[-1]
    assert len(x) == 6 and cond.embedding_mask.tolist() == [True] * 3 + [False] * 3


def test_every_unet_has_its_own_cond_scale():
    every = replace(UNET, cond_on_image_embeds=True)
    pipeline = pipeline_of(2, unets=(every, every))
    settings = [stage.defaults for stage in pipeline.stages]
    assert settings[0].guidance.guidance_scale is None and settings[1].guidance.guidance_scale == 1.0
    plain = sample(pipeline, **guided(1.0))
    upper = replace(settings[1], guidance=GuidanceConfig(guidance_scale=4.0))
    assert np.abs(plain - sample(pipeline, upsampling=upper, **guided(1.0))).mean() > 0.5
    assert np.array_equal(plain, sample(pipeline, upsampling=settings[1:], **guided(1.0)))


def test_text_and_embedding_both_count_and_are_both_dropped():
    pipeline, given = pipeline_of(unet=TEXT_UNET), texts()
    images = sample(pipeline, text_states=given, **guided(1.0))
    assert np.abs(images - sample(pipeline, text_states=texts(seed=2), **guided(1.0))).max() > 0
    assert np.abs(images - sample(pipeline, text_states=given, batch_size=2, **guided(1.0))).max() <= 1
    half = given[0], given[1] & (np.arange(TEXT_LENGTH) < 2)
    assert np.abs(images - sample(pipeline, text_states=half, **guided(1.0))).max() > 0
    with watching(pipeline.stages[0]) as seen:
        sample(pipeline, text_states=given, **guided(3.0))
    cond = seen[-1][1]
    assert not cond.embedding_mask[3:].any() and not cond.text_states[3:].any() and cond.text_states[:3].all()


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({}, {"embeddings": None}, "this decoder is conditioned on image embeddings: give images"),
        ({}, {"embeddings": EMBEDDINGS[:, :4]}, "the embeddings have width 4, but this decoder's have width 6"),
        ({}, {"embeddings": EMBEDDINGS.astype(float)}, r"embeddings is float64 of shape \[3, 6\], but must be float32"),
        ({}, {"embeddings": EMBEDDINGS[0]}, r"embeddings is float32 of shape \[6\], but must be float32 \[N, E\]"),
        ({}, {"embeddings": EMBEDDINGS * np.nan}, "embeddings has values that are not finite"),
        ({}, {"prompts": ["", ""]}, "embeddings has 3 rows for 2 prompts: give one for each"),
        ({}, {"prompts": ["a"] * 3}, "prompts are given, but this decoder reads no text beside images, embeddings"),
        ({}, {"text_states": texts()}, "text_states are given, but no stage is conditioned on text encodings"),
        ({"unconditional": True}, {}, "embeddings are given, but no stage is conditioned on image embeddings"),
        ({"unet": TEXT_UNET, "text_cond_drop_prob": 0.0}, {}, "trained without dropping its text .* give a text for"),
        ({"unet": TEXT_UNET}, {"text_states": (texts()[0], np.ones(3))}, "the mask of text_states is float64 of shape"),
        (
            {"unet": TEXT_UNET},
            {"text_states": (texts()[0][:, :, :2].copy(), texts()[1])},
            "the text encodings have width 2, but this decoder's have 5",
        ),
        (
            {"image_cond_drop_prob": 0.0},
            guided(3.0),
            "guidance_scale is 3, but this network was trained without dropping",
        ),
        (
            {"image_cond_drop_prob": 0.0},
            guided(1.0, guidance_scale_end=3.0),
            "guidance_scale_end is 3, but this network was trained without dropping",
        ),
        (
            {"unet": replace(UNET, attend_at_middle=False)},
            guided(1.0, perturbed_attention_scale=3.0),
            "perturbed_attention_scale is 3, but this network has no self-attention: set it to 0",
        ),
        ({}, {"size": (7, 7)}, "size is 7×7, but width and height must be multiples of 2"),
    ],
)
def test_what_does_not_fit_is_refused_before_sampling(settings, options, message):
    with pytest.raises(InputError, match=message):
        sample(pipeline_of(**settings), **options)


def test_without_dropping_in_training_there_is_no_guidance():
    pipeline = pipeline_of(image_cond_drop_prob=0.0)
    assert np.array_equal(sample(pipeline), sample(pipeline, **guided(1.0)))
    free = pipeline_of(unconditional=True)
    assert sample(free, None).shape == (1, 8, 8, 3)


# ------------------------------------------------------------------------------------------------ samplers and defaults


@pytest.mark.parametrize("name", ["ancestral", "heun"])
@pytest.mark.parametrize("prediction", [{}, {"predict_x_start": (True,)}, {"predict_v": (True,)}])
def test_samplers_work_with_every_prediction(name, prediction):
    images = sample(pipeline_of(**prediction), sampler=SamplerConfig(name, 3))
    assert images.shape == (3, 8, 8, 3) and images.std() > 5


@pytest.mark.parametrize("schedule", ["linear", "cosine", "quadratic", "jsd", "sigmoid"])
def test_every_schedule_samples_finite_images(schedule):
    for steps in ((None,), (7,)):
        stage = pipeline_of(beta_schedule=(schedule,), sample_timesteps=steps, clip_denoised=False).stages[0]
        process = stage.process(stage.defaults)
        assert np.isfinite(process.posterior_mean_coef1).all() and np.isfinite(process.log_betas).all()
    assert sample(pipeline_of(beta_schedule=(schedule,), sample_timesteps=(7,))).std() > 5


def test_sampling_steps_come_from_the_checkpoint():
    """Fewer steps than T = DDIM from T-1 to x_start; none = all T, ancestral."""
    pipeline = pipeline_of(2, sample_timesteps=(4, None), beta_schedule=("cosine",))
    base, upper = pipeline.stages
    times = base.process(base.defaults).timestep_map
    assert times[-1] == 49 and times[0] == 0 and len(times) == 4
    assert upper.process(upper.defaults).timestep_map == list(range(50))
    assert upper.defaults.sampler.sampler == "ancestral" and base.defaults.sampler.sampler == "ddim"
    steps = []
    handle = base.network().register_forward_pre_hook(lambda module, arguments: steps.append(int(arguments[1][0])))
    sample(pipeline, **guided(1.0))
    handle.remove()
    assert steps == [49, 33, 16, 0]


def test_thresholding_and_noise_come_from_the_checkpoint():
    dynamic = {"use_dynamic_thres": True, "dynamic_thres_percentile": 0.5}
    plain = sample(pipeline_of())
    assert np.abs(plain - sample(pipeline_of(**dynamic))).max() > 3
    limited = GuidanceConfig(thresholding="dynamic", dynamic_percentile=0.5)
    assert np.array_equal(sample(pipeline_of(**dynamic)), sample(pipeline_of(), guidance=limited))
    assert pipeline_of(clip_denoised=False).stages[0].defaults.guidance.thresholding == "none"
    noisy = {"use_noise_for_lowres_cond": (True,)}
    pipeline = pipeline_of(2, lowres_noise_sample_level=0.3, **noisy)
    assert [stage.defaults.noise_level for stage in pipeline.stages] == [0.0, 0.3]
    with watching(pipeline.stages[1]) as seen:
        sample(pipeline)
    assert seen[0][1].low_res_level[0] == pytest.approx(0.3)
    low_res = random_images(1, 8, 8)
    upper = Pipeline(pipeline.stages[1:])
    with watching(upper.stages[0]) as seen:
        upper.sample([""], low_res=low_res, progress=False)
    clean, shown = pipeline.stages[0].signal.from_pixels(low_res), seen[0][1].low_res
    assert (clean - shown).std() == pytest.approx(0.75, abs=0.15)  # level 0.3 of a linear schedule: alpha-bar 0.4


# ----------------------------------------------------------------------------------------------------------- inpainting


@pytest.mark.parametrize("self_cond", [False, True])
def test_known_pixels_stay_exactly(self_cond):
    """Through all U-Nets, with resampling; the rest follows the embedding."""
    pipeline = pipeline_of(2, unet=replace(UNET, self_cond=self_cond))
    picture, mask = random_images(1, 16, 16)[0], np.zeros((16, 16), dtype=bool)
    mask[:, 6:] = True  # new content
    edit = ImageEdit([picture], [mask], EditConfig(inpaint_resamples=3, inpaint_jump=2))
    images = sample(pipeline, edit=edit)
    assert all(np.array_equal(image[:, :6], picture[:, :6].astype(int)) for image in images)
    assert np.abs(images[0, :, 6:] - images[1, :, 6:]).max() > 3
    outpainted = sample(pipeline, edit=ImageEdit([picture], [~mask]))
    assert np.array_equal(outpainted[0][:, 6:], picture[:, 6:].astype(int))


# ---------------------------------------------------------------------------------------------------- self-conditioning


def test_a_unet_is_shown_its_latest_prediction():
    """The x_start after guidance and thresholding, the same to both halves of a guided batch; nothing at first."""
    pipeline = pipeline_of(unet=replace(UNET, self_cond=True), predict_x_start=(True,))
    stage, few, steps = pipeline.stages[0], SamplerConfig("ddim", 4), []
    cond = stage.conditioning(diff_dalle.Request([""] * 3, range(3), embeddings=EMBEDDINGS), range(3))
    batch = SampleBatch(stage.signal, (8, 8), range(3), cond, stage.negative_conditioning(cond, ""))
    process, guidance = stage.process(StageSettings(few)), GuidanceConfig(guidance_scale=3.0)
    with watching(stage) as seen, torch.no_grad():
        for step in sample_steps(stage.network(), process, batch, few, guidance):
            steps.append(step.x_start)
    shown = [cond.extra.get(SELF_COND) for _, cond in seen]
    assert shown[0] is None and len(shown) == 4
    for before, after in zip(steps, shown[1:], strict=False):
        assert torch.equal(after, before.repeat(2, 1, 1, 1)) and before.abs().max() <= 1
    plain = pipeline_of(predict_x_start=(True,))
    with watching(plain.stages[0]) as seen:
        sample(plain)
    assert all(SELF_COND not in cond.extra for _, cond in seen)


def test_self_conditioning_works_in_tiles():
    pipeline = pipeline_of(2, unet=replace(UNET, self_cond=True))
    upper = replace(pipeline.stages[1].defaults, tile_size=8, tile_overlap=4)
    with watching(pipeline.stages[1]) as seen:
        images = sample(pipeline, upsampling=upper)
    assert images.shape == (3, 16, 16, 3)
    assert {tuple(cond.extra[SELF_COND].shape[2:]) for _, cond in seen if SELF_COND in cond.extra} == {(8, 8)}
