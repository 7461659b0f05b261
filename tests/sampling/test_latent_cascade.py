"""The latent cascade C → B → A: sizes, conditions, editing, reconstruction, memory, what does not fit."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from cascade_making import random_images, watching
from checkpoint_making import make_classifier_file, make_file
from latent_file_making import A, B, C, make, make_cascade, with_clip

import diff_dalle
from diff_dalle.batch import Conditioning
from diff_dalle.checkpoints.loading import SavedNetwork, open_network
from diff_dalle.config import InputError
from diff_dalle.diffusion import GuidanceConfig, LogSnrProcess
from diff_dalle.diffusion.editing import EditConfig
from diff_dalle.diffusion.sampling import SampleBatch, SamplerConfig, sample_batch
from diff_dalle.embeddings.clip import load_clip
from diff_dalle.images.files import fit_image
from diff_dalle.images.signal import PixelSignal, from_uint8, to_uint8
from diff_dalle.sampling.latent_stages import Autoencoder
from diff_dalle.sampling.pipeline import load
from diff_dalle.sampling.request import ImageEdit, Request
from diff_dalle.sampling.stage_settings import StageSettings
from diff_dalle.text.tokenizer import load_tokenizer

PROMPTS = ["a red circle", "", "two blue squares"]
UNGUIDED = GuidanceConfig(guidance_scale=1.0, thresholding="none")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cascade(latent):
    return load(latent.c, "cpu", **latent.rest, semantic=latent.semantic, keep_loaded=True)


@pytest.fixture(scope="module")
def decoders(latent):
    """Stages B and A alone."""
    return load("", "cpu", **latent.rest, semantic=latent.semantic, keep_loaded=True)


def sample(pipeline, *arguments, **options) -> np.ndarray:
    return pipeline.sample(*arguments, progress=False, **options)


def distance(one, other) -> float:
    return float(np.abs(one.astype(float) - other).mean())


def close(one, other) -> bool:
    """The same up to the rounding of another batch."""
    return one.shape == other.shape and np.abs(one.astype(int) - other).max() <= 1


def stages(pipeline, request, **changed) -> list[np.ndarray]:
    settings = [replace(stage.defaults, **changed) for stage in pipeline.stages]
    return pipeline.sample_stages(request, settings, progress=False)


# ------------------------------------------------------------------------------------------------------- text to image


def _caption(texts):
    tokens, mask = load_tokenizer("")(texts, 12)
    return Conditioning(tokens=tokens, mask=mask)


def test_a_picture_is_what_the_networks_make_one_after_another(latent, cascade):
    """With each checkpoint's sampler, steps, shift and scale; unconditional = an empty caption and zeros as the map."""
    networks = {
        kind: open_network(path, kind).load(CPU)
        for kind, path in (("stage_c", latent.c), ("stage_b", latent.b), ("stage_a", latent.a))
    }
    cond, null = _caption(PROMPTS[:2]), _caption(["", ""])
    guidance = GuidanceConfig(guidance_scale=3.0, guidance_rescale=0.7, thresholding="none")
    batch = SampleBatch(cascade.stages[0].signal, (6, 6), [7, 8], cond, null)
    steps = LogSnrProcess(C.diffusion).steps(4, 2.0)
    semantic = sample_batch(networks["stage_c"], steps, batch, SamplerConfig("ancestral", 4), guidance)

    cond, null = replace(cond, semantic=semantic), replace(null, semantic=torch.zeros_like(semantic))
    batch = SampleBatch(cascade.stages[1].signal, (16, 16), [7, 8], cond, null, stage=1)
    steps, guidance = LogSnrProcess(B.diffusion).steps(3), replace(guidance, guidance_scale=1.5)
    latents = sample_batch(networks["stage_b"], steps, batch, SamplerConfig("ancestral", 3), guidance)
    expected = to_uint8(networks["stage_a"].decode(latents)).numpy()
    assert expected.std() > 5 and close(sample(cascade, PROMPTS[:2], seed=7), expected)


def test_any_size_that_stage_b_divides(cascade):
    """Stage C has as many positions for a picture as in training, here 6 for 64 pixels, rounded up."""
    for (height, width), semantic in {(64, 64): (6, 6), (32, 72): (3, 7), (136, 16): (13, 2)}.items():
        with watching(cascade.stages[0]) as first, watching(cascade.stages[1]) as second:
            images = sample(cascade, ["a star"], size=(height, width))
        assert images.shape == (1, height, width, 3)
        assert {x.shape[2:] for x, _ in first} == {torch.Size(semantic)}
        assert {x.shape[2:] for x, _ in second} == {torch.Size((height // 4, width // 4))}
    assert (cascade.image_size, cascade.has_base) == (64, True)
    for height, width in ((60, 64), (64, 68), (0, 64)):
        with pytest.raises(InputError, match=f"size is {width}×{height}, .* must be multiples of 8"):
            sample(cascade, ["a star"], size=(height, width))


def test_stage_b_works_in_tiles(cascade):
    """Given in pixels of the picture; one that covers it changes nothing."""
    request, whole = Request(["a star"], [3]), None
    for tile, seen in ((72, (16, 16)), (64, (16, 16)), (32, (8, 8))):
        settings = [cascade.stages[0].defaults, replace(cascade.stages[1].defaults, tile_size=tile, tile_overlap=8)]
        with watching(cascade.stages[1]) as calls:
            images = cascade.sample_stages(request, settings, progress=False)[-1]
        assert {tuple(x.shape[2:]) for x, _ in calls} == {seen}
        whole = images if whole is None else whole
        assert (distance(images, whole) == 0) == (tile >= 64)
    wrong = [cascade.stages[0].defaults, replace(cascade.stages[1].defaults, tile_size=36)]
    with pytest.raises(InputError, match="(--)?tile_size is 36, but must be a multiple of 8"):
        cascade.sample_stages(request, wrong, progress=False)


def test_every_stage_is_shown_by_its_decoder(latent, cascade):
    """Stage C by the previewer, where there is one."""
    request = Request(PROMPTS, range(3))
    preview, images = stages(cascade, request)
    assert preview.shape == (3, 48, 48, 3) and images.shape == (3, 64, 64, 3) and preview.std() > 5
    alone = load(latent.c, "cpu", semantic=latent.semantic)
    assert close(sample(alone, PROMPTS), preview) and alone.image_size == 48
    assert sample(alone, ["a star"], size=(16, 40)).shape == (1, 16, 40, 3)
    unseen, same = stages(load(latent.c, "cpu", **latent.rest), request)
    assert unseen.shape == (3, 0, 0, 3) and close(same, images)


@pytest.fixture(scope="module")
def star(cascade):
    """Sample with settings of stages C and B in place of their own: the pictures of both, and the settings."""

    def sampled(stage=0, guidance=None, **changed):
        settings = [each.defaults for each in cascade.stages]
        guidance = replace(settings[stage].guidance, **(guidance or {}))
        settings[stage] = replace(settings[stage], guidance=guidance, **changed)
        return cascade.sample_stages(Request(["a star"], [1]), settings, progress=False)

    return sampled


@pytest.fixture(scope="module")
def plain(star):
    return star()


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(
    "changed",
    [
        {"shift": 3.0},
        {"t_start": 0.8},
        {"t_end": 0.2},
        {"seed": 5},
        {"guidance": {"guidance_scale": 1.0}},
        {"guidance": {"guidance_scale_end": 2.0}},
        {"guidance": {"guidance_interval": (0.5, 1.0)}},
        {"guidance": {"guidance_rescale": 0.0}},
        {"guidance": {"perturbed_attention_scale": 3.0}},
    ],
    ids=str,
)
def test_settings_of_a_stage_change_its_pictures_and_none_before(star, plain, stage, changed):
    found = star(stage, **changed)
    assert distance(plain[1], found[1]) > (0, 0.05)[stage] and np.array_equal(plain[0], found[0]) == (stage == 1)


def test_prompts_change_what_stage_c_makes(cascade):
    """Also negative ones."""
    wishes = ({}, {"prompts": ["a ring"]}, {"negative_prompt": "a ring"})
    assert len({sample(cascade, **{"prompts": ["a star"], **wish}).tobytes() for wish in wishes}) == 3


def test_the_range_of_steps_is_of_the_process(cascade):
    for stage in cascade.stages:
        chosen = replace(stage.defaults, t_start=0.9, t_end=0.1)
        count = chosen.sampler.steps
        np.testing.assert_allclose(stage.process(chosen).times, 0.1 + 0.8 * np.arange(1, count + 1) / count)
        spaced = replace(chosen, sampler=replace(chosen.sampler, spacing="log_snr"))
        levels = stage.process(spaced).alphas_cumprod
        np.testing.assert_allclose(np.diff(np.log(levels / (1 - levels)), 2), 0, atol=1e-6)  # even in log-SNR


def test_the_unconditional_half_has_no_map_and_no_caption(cascade):
    with watching(cascade.stages[1]) as seen:
        sample(cascade, ["a star"])
    for _, cond in seen:
        given, null = cond.semantic
        assert given.abs().max() > 0.1 and not null.any()
    with watching(cascade.stages[1]) as seen:
        sample(cascade, ["a star"], upsampling=replace(cascade.stages[1].defaults, guidance=UNGUIDED))
    assert {len(cond.semantic) for _, cond in seen} == {1}


def test_stage_b_is_guided_by_its_map_alone_where_it_reads_no_text(latent, tmp_path):
    text = replace(B.model.text, enc_attn_dim=0)
    b = replace(B, model=replace(B.model, text=text, pooled_width=0))
    wordless, _ = make(tmp_path / "b.pt", "stage_b", b)
    pipeline = load(latent.c, "cpu", stage_b=wordless, stage_a=latent.a)
    plain = pipeline.stages[1].defaults
    guided, free = (
        sample(pipeline, ["a star"], upsampling=replace(plain, guidance=replace(plain.guidance, guidance_scale=scale)))
        for scale in (2.0, 1.0)
    )
    assert guided.shape == (1, 64, 64, 3) and distance(guided, free) > 0.05
    alone = load("", "cpu", stage_b=wordless, stage_a=latent.a, semantic=latent.semantic)
    with pytest.raises(InputError, match="prompts are given, but this generator has no text encoder"):
        sample(alone, ["a star"], reconstruct=random_images(1, 64, 64))


def test_settings_come_from_the_checkpoints(cascade):
    c, b = (stage.defaults for stage in cascade.stages)
    guidance = GuidanceConfig(guidance_scale=3.0, guidance_rescale=0.7, thresholding="none")
    assert c == StageSettings(SamplerConfig("ancestral", 4), guidance, batch_size=4, shift=2.0)
    assert b == StageSettings(SamplerConfig("ancestral", 3), replace(guidance, guidance_scale=1.5), batch_size=4)


def test_half_precision(latent):
    pipeline = load(latent.c, "cpu", "bf16", **latent.rest, keep_loaded=True)
    images = sample(pipeline, ["a star"])
    assert images.shape == (1, 64, 64, 3) and images.std() > 5
    assert pipeline.stages[1].autoencoders[0]._loaded().down_blocks[1].weight.dtype == torch.bfloat16


def test_pictures_are_decoded_a_few_at_a_time(latent, cascade, monkeypatch):
    """So many that their pixels fit in the memory."""
    images, seen = sample(cascade, PROMPTS), []
    autoencoder = Autoencoder(latent.a, "stage_a", CPU)
    decode = autoencoder._loaded().decode
    autoencoder._loaded().decode = lambda latents: seen.append(len(latents)) or decode(latents)
    latents = torch.randn(5, 4, 16, 16)
    whole = autoencoder.decode(latents)
    monkeypatch.setattr("diff_dalle.sampling.latent_stages.PIXELS", 2 * 64 * 64)
    assert torch.allclose(autoencoder.decode(latents), whole, atol=1e-4) and seen == [5, 2, 2, 1]
    assert close(sample(cascade, PROMPTS), images)


# --------------------------------------------------------------------------------------------------- CLIPs of training


@pytest.fixture(scope="module")
def clip_path(tmp_path_factory):
    return make_classifier_file(tmp_path_factory.mktemp("clip"), noised=False)


@pytest.fixture(scope="module")
def conditioned(clip_path, tmp_path_factory):
    """Files of a cascade whose texts and image embeddings come from a CLIP."""
    clip = load_clip("diff_dalle", clip_path, "cpu")
    b, c = with_clip(clip_path, clip.identity, 16, 12)
    return make_cascade(tmp_path_factory.mktemp("conditioned"), b, c)


def test_text_comes_from_the_clip_of_the_training(conditioned, clip_path, monkeypatch):
    """States and pooled text; the unconditional half is an empty text's, not zeros. It is encoded once."""
    pipeline = load(conditioned.c, "cpu", **conditioned.rest, keep_loaded=True)
    with watching(pipeline.stages[0]) as first, watching(pipeline.stages[1]) as second:
        images = sample(pipeline, PROMPTS[:1], seed=1)
    pooled, states, mask = load_clip("diff_dalle", clip_path, "cpu").encode_text([PROMPTS[0], ""])
    for x, cond in first:
        assert len(x) == 2 and torch.allclose(cond.text_pooled, pooled, atol=1e-6)
        assert torch.allclose(cond.text_states, states, atol=1e-6) and torch.equal(cond.mask, mask)
        assert not cond.image_embedding.any()
    assert all(torch.allclose(cond.text_pooled, pooled, atol=1e-6) and cond.text_states is None for _, cond in second)
    assert distance(images, sample(pipeline, ["a ring"], seed=1)) > 0.05
    assert distance(images, sample(pipeline, PROMPTS[:1], seed=1, negative_prompt="a ring")) > 0.05
    loads = []
    monkeypatch.setattr("diff_dalle.sampling.clips.load_clip", lambda *given: loads.append(given))
    assert close(sample(pipeline, PROMPTS[:1], seed=1), images) and not loads  # kept, with the stages


def test_variations_of_a_picture(conditioned, clip_path):
    """By its embedding, without a caption; unconditional = zeros."""
    pipeline = load(conditioned.c, "cpu", **conditioned.rest)
    pictures = list(random_images(2, 20, 30))
    kept = load(conditioned.c, "cpu", **conditioned.rest, keep_loaded=True)
    with watching(kept.stages[0]) as seen:
        images = sample(kept, images=pictures)
    clip = load_clip("diff_dalle", clip_path, "cpu")
    expected = diff_dalle.sampling.image_prompts.ImagePrompts(pictures).embed(clip, PixelSignal(3), 2)
    for _, cond in seen:
        assert np.allclose(cond.image_embedding[:2], expected, atol=1e-6) and not cond.image_embedding[2:].any()
    assert images.shape == (2, 64, 64, 3) and close(sample(pipeline, images=pictures), images)
    assert close(sample(kept, embeddings=expected), images)
    assert distance(images, sample(kept, ["", ""])) > 0.05
    with pytest.raises(InputError, match=r"vectors of 5 elements, but .*c\.pt was trained with 16 \(model.image_width"):
        sample(kept, embeddings=np.zeros((1, 5), np.float32))


def test_the_place_of_a_clip_and_a_wrong_one(conditioned, clip_path, tmp_path):
    moved = load(conditioned.c, "cpu", **conditioned.rest, clip_path=clip_path)
    other = make_classifier_file(tmp_path, noised=False, classifier_enc_attn_dim=8)
    b, c = with_clip(clip_path, moved.stages[0].trained_with.text_clip.identity, 16, 12)
    gone = replace(c.trained_with.text_clip, model=str(tmp_path / "gone.pt"))
    two = replace(c.trained_with, text_clip=gone, image_clip=replace(gone, model=other, identity=""))
    both = make_cascade(
        tmp_path, replace(b, trained_with=replace(b.trained_with, text_clip=gone)), replace(c, trained_with=two)
    )
    with pytest.raises(InputError, match=r"the CLIP that .*c\.pt was trained with is not at .*gone\.pt: .* clip_path"):
        sample(load(both.c, "cpu", **both.rest), ["a star"])
    found = load(both.c, "cpu", **both.rest, clip_path=clip_path)  # of the texts; that of pictures is in its place
    assert sample(found, ["a star"]).std() > 5
    with pytest.raises(InputError, match=r"makes vectors of 8 elements, but .*c\.pt was trained with 16"):
        sample(found, ["a star"], images=list(random_images(1, 20, 20)))


# ------------------------------------------------------------------------------------------ editing and reconstruction


def test_image_to_image_starts_from_the_latents_of_the_picture(latent, cascade):
    """Little strength keeps them, through both stages."""
    picture, signal = random_images(1, 100, 80)[0], cascade.stages[0].signal
    edit, sampler = ImageEdit([picture], config=EditConfig(strength=0.1)), SamplerConfig("ddim", 20)
    latents = edit.at([0], (6, 6), signal).images
    network = open_network(latent.semantic, "semantic").load(CPU)
    assert torch.allclose(latents, network.encode(from_uint8(fit_image(picture, (48, 48))[None])), atol=1e-5)
    with watching(cascade.stages[0]) as seen:
        preview, image = cascade.sample_stages(
            Request(["a star"], [3], edit=edit),
            [StageSettings(sampler, UNGUIDED), cascade.stages[1].defaults],
            progress=False,
        )
    assert len(seen) == 2 and image.shape == (1, 64, 64, 3)  # 0.1 of 20 steps
    original, strong = signal.to_pixels(latents), ImageEdit([picture], config=EditConfig(strength=0.95))
    (other, _) = stages(cascade, Request(["a star"], [3], edit=strong), sampler=sampler, guidance=UNGUIDED)
    assert distance(preview, original) < distance(other, original) / 2


def test_inpainting_keeps_the_latents_outside_of_the_mask(cascade):
    """At both stages, as far as their decoders do."""
    picture, mask = random_images(1, 64, 64)[0], np.zeros((64, 64), dtype=bool)
    mask[:, 32:] = True
    edit = ImageEdit([picture], [mask])
    _, image = stages(cascade, Request(["a star"], [0], edit=edit))
    known = cascade.stages[1].signal
    kept = known.to_pixels(edit.at([0], (16, 16), known).images)
    assert distance(image[:, :, :24], kept[:, :, :24]) < 0.1 * distance(image[:, :, 40:], kept[:, :, 40:])


def test_reconstruction_from_the_semantic_latents_of_pictures(latent, decoders):
    pictures = [*random_images(1, 70, 100), *random_images(1, 64, 64, seed=1)]
    with watching(decoders.stages[0]) as seen:
        images = sample(decoders, reconstruct=pictures, seed=4)
    assert images.shape == (2, 64, 64, 3)
    network = open_network(latent.semantic, "semantic").load(CPU)
    expected = network.encode(from_uint8(pictures[1][None]))
    assert all(torch.allclose(cond.semantic[1:2], expected, atol=1e-5) for _, cond in seen if len(cond.semantic) > 1)
    assert close(sample(decoders, reconstruct=pictures[1:], seed=5)[0], images[1])
    assert distance(images[1], sample(decoders, reconstruct=[255 - pictures[1]], seed=5)[0]) > 0.05
    wide = sample(decoders, ["a", "b", "c"], reconstruct=pictures, size=(40, 72))  # 5 × 9 positions of the encoder
    assert wide.shape == (3, 40, 72, 3)
    assert not decoders.has_base and decoders.image_size == 64
    assert close(sample(decoders, low_res=np.stack(pictures[1:]), seed=5)[0], images[1])


def test_the_map_of_a_picture_whose_sides_the_encoder_does_not_divide_is_that_of_the_whole(latent):
    """Sizes that stage B takes and the encoder does not: with a stride of 16, 40 × 72 pixels have 3 × 5 positions."""
    stage = load("", "cpu", **latent.rest, semantic=latent.semantic).stages[0]
    seen = []
    stage.read = replace(stage.read, scale=16, encode=lambda pixels: seen.append(pixels) or pixels[:, :, ::16, ::16])
    images = random_images(2, 40, 72)
    assert stage.from_low_res(images).shape == (2, 3, 3, 5) and [x.shape for x in seen] == [(1, 3, 48, 80)] * 2
    assert abs(float(seen[0].mean()) - float(from_uint8(images[:1]).mean())) < 0.02


# ------------------------------------------------------------------------------------------------------------- memory


def test_one_network_is_in_memory_at_a_time(latent, monkeypatch):
    """Stage A and the previewer after their stages; nothing is left in the end."""
    pipeline = load(latent.c, "cpu", **latent.rest, semantic=latent.semantic)
    alive, order, original = [], [], SavedNetwork.load

    def loading(saved, device):
        assert not any(ref() for ref in alive), f"{saved.settings.name} was loaded beside another network"
        network = original(saved, device)
        alive.append(weakref.ref(network))
        order.append(saved.settings.name)
        return network

    monkeypatch.setattr(SavedNetwork, "load", loading)
    images = sample(pipeline, PROMPTS, batch_size=1)
    assert images.shape == (3, 64, 64, 3) and order == ["stage_c", "semantic", "stage_b", "stage_a"]
    assert not any(ref() for ref in alive)
    order.clear()
    sample(
        load("", "cpu", **latent.rest, semantic=latent.semantic, keep_loaded=False),
        reconstruct=random_images(2, 64, 64),
    )
    assert order[-3:] == ["semantic", "stage_b", "stage_a"] and not any(ref() for ref in alive)
    monkeypatch.undo()

    def ended(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(pipeline, ["a star"], edit=ImageEdit(list(random_images(1, 64, 64))), watch=ended)
    assert not any(each._network for stage in pipeline.stages for each in stage.autoencoders)


# ------------------------------------------------------------------------------------------------------ what is refused


def test_autoencoders_that_were_not_there_in_training_are_refused(latent, tmp_path):
    a, _ = make(tmp_path / "a.pt", "stage_a", A, seed=1)
    with pytest.raises(InputError, match=r"a\.pt has the weights \w+, but .*b\.pt was trained with \w+: .*stage_a"):
        load(latent.c, "cpu", stage_b=latent.b, stage_a=a)
    deep = replace(A, model=replace(A.model, levels=3))
    a, _ = make(tmp_path / "deep.pt", "stage_a", deep)
    with pytest.raises(InputError, match="4 channels with 8 pixels per position, but .* 4 channels and 4 pixels"):
        load(latent.c, "cpu", stage_b=latent.b, stage_a=a)
    other = make_cascade(tmp_path, seed=2)
    for first, options in ((latent.c, latent.rest), ("", latent.rest)):
        with pytest.raises(InputError, match=r"semantic\.pt has the weights .*semantic"):
            load(first, "cpu", **options, semantic=other.semantic)
    with pytest.raises(InputError, match="was trained with the semantic encoder .* give stages that were trained with"):
        load(other.c, "cpu", **latent.rest)


def test_files_that_do_not_make_a_cascade_are_refused(latent, tmp_path):
    generator = make_file(tmp_path)
    for options, message in (
        (
            {"path": latent.c},
            "c.pt makes latents, which become pictures by a previewer, .* semantic, or stages B and A",
        ),
        ({"path": latent.c, "stage_b": latent.b}, "b.pt makes latents, .* by stage A, .* with stage_a"),
        ({"path": latent.b}, "b.pt is an upsampler, not a base generator: give it with stage_b"),
        ({"path": latent.a}, "a.pt holds a stage_a, but"),
        (
            {"path": latent.c, "stage_b": latent.c, "stage_a": latent.a},
            "c.pt is a base generator, not an upsampler|must be a stage B",
        ),
        (
            {"path": latent.c, "stage_b": generator, "stage_a": latent.a},
            "must be a stage B of a latent cascade",
        ),
        ({"path": generator, **latent.rest}, "continues from a stage C, but .*ema.pt is none"),
        (
            {"path": generator, "stage_a": latent.a},
            "stage_a is .*a.pt', but no stage of the pipeline works with it",
        ),
        (
            {"path": generator, "semantic": latent.semantic},
            "semantic is .*, but no stage of the pipeline works with it",
        ),
        (
            {"path": latent.c, **latent.rest, "clip_path": "clip.pt"},
            "the cascade was trained without a CLIP",
        ),
        (
            {"path": latent.c, "stage_b": latent.b, "stage_a": latent.semantic},
            "holds a semantic, but a stage_a is required",
        ),
    ):
        with pytest.raises(InputError, match=message):
            load(options.pop("path"), "cpu", **options)


def test_requests_that_a_cascade_cannot_do_are_refused(latent, cascade, decoders):
    picture = random_images(1, 64, 64)
    blind = load(latent.c, "cpu", **latent.rest)
    for pipeline, options, message in (
        (
            cascade,
            {"sampler": SamplerConfig("ancestral", timestep_respacing="10,10,10")},
            "timestep_respacing is '10,10,10', but",
        ),
        (
            cascade,
            {"sampler": SamplerConfig("ddim", 4, spacing="leading")},
            "spacing is leading, but a process in log",
        ),
        (cascade, {"guidance": GuidanceConfig(guidance_scale=3.0)}, "c.pt: thresholding is static, but .* no limits"),
        (cascade, {"classifier": "clip.pt"}, "a classifier sees pictures, not the latents"),
        (
            cascade,
            {"upsampling": StageSettings(guidance=UNGUIDED, noise_level=0.1)},
            "noise_level is 0.1, but only upsamplers have it",
        ),
        (cascade, {"shift": 0.0}, "shift is 0, but must be above 0"),
        (cascade, {"t_start": 0.2, "t_end": 0.2}, "t_start and t_end are 0.2 and 0.2, but must have"),
        (cascade, {"reconstruct": list(picture)}, "pictures to reconstruct .* which stages B and A do alone"),
        (decoders, {}, "b.pt is a stage B alone, which reconstructs pictures: give them with reconstruct"),
        (decoders, {"reconstruct": list(picture), "size": (64, 60)}, "size is 60×64, .*of 8, .* change sample_size"),
        (decoders, {"reconstruct": list(picture[:, :, :, 0])}, "a picture to reconstruct"),
        (decoders, {"reconstruct": []}, "reconstruct has no picture"),
        (decoders, {"low_res": picture[:, :, :60]}, "low_res is 60×64, .* multiples of 8, .*: crop the images"),
        (blind, {"edit": ImageEdit(list(picture))}, "pictures become latents by a previewer, but there is none"),
        (
            load("", "cpu", **latent.rest),
            {"reconstruct": list(picture)},
            "there is no semantic encoder: give its checkp",
        ),
    ):
        with pytest.raises(InputError, match=message):
            sample(pipeline, ["a star"], **options)
