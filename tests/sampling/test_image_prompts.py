"""Pictures and prompts in place of embeddings: variations, mixtures, interpolations, texts, and the decoder's CLIP."""

import functools
import shutil
from dataclasses import replace

import numpy as np
import pytest
from cascade_making import random_images, watching
from checkpoint_making import TINY_CLASSIFIER, make_file, make_run, save_model
from decoder_making import TEXT_UNET, UNET, make_decoder, save_decoder, save_unet
from PIL import Image

import diff_dalle
from diff_dalle import ImageEdit
from diff_dalle.checkpoints.decoder import ClipConfig
from diff_dalle.config import InputError
from diff_dalle.diffusion.editing import EditConfig
from diff_dalle.embeddings.clip import load_clip
from diff_dalle.images.signal import from_uint8
from diff_dalle.images.transforms import center_crop
from diff_dalle.recipes.classifier import ClassifierRun
from diff_dalle.sampling import clips, image_prompts
from diff_dalle.sampling.image_prompts import ImagePrompts, mixed, slerp

FAST = {"sample_timesteps": (3,)}
PICTURES = [
    np.full((20, 24, 3), (255, 0, 0), dtype=np.uint8),
    random_images(1, 16, 16)[0],
    np.full((40, 18, 3), (0, 0, 255), dtype=np.uint8),
]


def make_clip_file(folder, **settings):
    """Large weights: with small ones all embeddings are nearly the same."""
    return save_model(make_run(ClassifierRun, TINY_CLASSIFIER, noised=False, **settings), folder / "clip.pt", 3.0, 0.1)


@pytest.fixture(scope="module")
def clip_path(tmp_path_factory):
    return make_clip_file(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def clip(clip_path):
    return load_clip("diff_dalle", clip_path, "cpu")


@pytest.fixture(scope="module")
def make(tmp_path_factory, clip, clip_path):
    """Load a decoder trained with the CLIP, once; ``text`` = one that reads text too."""

    @functools.cache
    def loaded(decoder, **options):
        path = tmp_path_factory.mktemp("decoder") / "decoder.pt"
        return diff_dalle.load(save_decoder(path, decoder, gain=10), "cpu", **options)

    def made(count=1, text=False, named=None, options=None, width=clip.embed_dim, **settings):
        unet = replace(TEXT_UNET if text else UNET, image_embed_dim=width)
        if text:
            unet = replace(unet, text_embed_dim=clip.text_width)
        named = ClipConfig("diff_dalle", clip_path, clip.identity) if named is None else named
        decoder = make_decoder(count, unet, **{"clip": named or None, **FAST, **settings})
        return loaded(decoder, **(options or {}))

    return made


def sample(pipeline, *arguments, **options):
    return pipeline.sample(*arguments, progress=False, **options).astype(int)


def embeddings_of(clip, pictures):
    """As ``prepare_data.py embeddings`` makes them."""
    size = (clip.image_size,) * 2
    crops = [center_crop(Image.fromarray(picture), picture.shape[:2], size) for picture in pictures]
    return clip.encode_images(from_uint8(np.stack(crops))).numpy()


def test_a_picture_stands_for_its_embedding(make, clip):
    """Of any size; several images of each, in turn, each with its own seed."""
    pipeline, embeddings = make(2, options={"keep_loaded": True}), embeddings_of(clip, PICTURES)
    images = sample(pipeline, images=PICTURES, seed=3)
    assert images.shape == (3, 16, 16, 3)
    same_noise = sample(pipeline, images=PICTURES, seeds=[3] * 3)
    assert all(np.abs(same_noise[i] - same_noise[0]).mean() > 3 for i in (1, 2))  # they follow their pictures
    assert np.array_equal(images, sample(pipeline, embeddings=embeddings, seed=3))
    more = sample(pipeline, images=PICTURES, seed=3, num_samples=7)
    assert np.array_equal(more, sample(pipeline, embeddings=embeddings[[0, 1, 2] * 2 + [0]], seed=3))


def test_the_clip_sees_what_the_decoder_makes(make, clip):
    """Gray pictures, where that is what it is trained on."""
    pipeline = make(channels=1)
    seen = pipeline.stages[0].signal.from_pixels(np.stack([PICTURES[1]]))
    assert seen.shape[1] == 1
    expected = sample(pipeline, embeddings=clip.encode_images(seen).numpy())
    assert np.array_equal(sample(pipeline, images=PICTURES[1:2]), expected)


def test_many_pictures_are_embedded_in_batches_and_read_one_at_a_time(make, clip, monkeypatch):
    """Those that are not used are not read."""

    class Files(list):
        def __getitem__(self, i):
            read.append(i)
            return super().__getitem__(i)

    read, embeddings = [], embeddings_of(clip, PICTURES)
    monkeypatch.setattr(image_prompts, "BATCH", 2)
    given = ImagePrompts(Files(PICTURES))
    signal = make().stages[0].signal
    np.testing.assert_allclose(given.embed(clip, signal, 4), embeddings[[0, 1, 2, 0]], atol=1e-4)
    assert read == [0, 1, 2]
    read.clear()
    assert given.embed(clip, signal, 2).shape == (2, clip.embed_dim) and read == [0, 1]


# ----------------------------------------------------------------------------------------- mixtures and interpolations


def test_a_mixture_is_a_single_embedding_of_unit_norm(make, clip):
    a, b, _ = embeddings_of(clip, PICTURES)
    pipeline, total = make(), 0.7 * a + 0.3 * b
    expected = sample(pipeline, embeddings=np.stack([total / np.linalg.norm(total)] * 2), seed=5)
    two = {"images": PICTURES[:2], "num_samples": 2, "seed": 5}
    assert np.array_equal(sample(pipeline, image_weights=(0.7, 0.3), **two), expected)
    assert np.array_equal(sample(pipeline, image_weights=(7, 3), **two), expected)  # only their ratio matters
    assert not np.array_equal(expected[0], expected[1])
    assert not np.array_equal(sample(pipeline, image_weights=(0.3, 0.7), **two), expected)
    np.testing.assert_allclose(mixed(np.stack([a, b]), (1, 0)), a, atol=1e-6)
    assert mixed(np.stack([a, b]), (2, -1)) @ b < a @ b
    with pytest.raises(InputError, match="image_weights is 0.5,-0.5, with which the embeddings cancel out"):
        mixed(np.stack([a, a]), (0.5, -0.5))


def test_spherical_interpolation_goes_at_equal_angles():
    generator = np.random.default_rng(0)
    a, b = (each / np.linalg.norm(each) for each in generator.normal(size=(2, 9)))
    steps = slerp(a, b, np.linspace(0, 1, 5))
    np.testing.assert_allclose(np.linalg.norm(steps, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(steps[[0, -1]], np.stack([a, b]), atol=1e-7)
    angles = np.arccos((steps[1:] * steps[:-1]).sum(1))
    np.testing.assert_allclose(angles, np.arccos(a @ b) / 4, rtol=1e-5)
    np.testing.assert_allclose(slerp(a, a, np.linspace(0, 1, 3)), np.stack([a] * 3), atol=1e-7)
    close = (a + 1e-6 * b) / np.linalg.norm(a + 1e-6 * b)
    np.testing.assert_allclose(slerp(a, close, np.array([0.5]))[0], a, atol=1e-6)
    with pytest.raises(InputError, match="opposite embeddings"):
        slerp(a, -a, np.linspace(0, 1, 3))


def test_an_interpolation_goes_from_one_picture_to_the_other_with_the_same_noise(make, clip):
    pipeline, two = make(), {"images": PICTURES[:2], "interpolate": 4}
    ends = embeddings_of(clip, PICTURES[:2])
    strip = sample(pipeline, **two, seed=6)
    assert strip.shape[0] == 4
    assert np.array_equal(strip[[0, 3]], sample(pipeline, embeddings=ends, seeds=[6, 6]))
    between = slerp(*ends, np.array([1 / 3, 2 / 3]))
    assert np.array_equal(strip[1:3], sample(pipeline, embeddings=between, seeds=[6, 6]))
    more = sample(pipeline, **two, seed=6, num_samples=8)
    assert np.array_equal(more[:4], strip)
    assert np.array_equal(more[4:], sample(pipeline, **two, seed=7)) and not np.array_equal(more[4:], strip)


def test_layouts_and_captions_say_what_an_image_is_made_from():
    names = ("a.png", "b.png")
    plain = ImagePrompts(PICTURES[:2], names=names)
    assert plain.rows(5) == [((0,), range(0, 5, 2), ()), ((1,), range(1, 5, 2), ())]
    assert plain.rows(1) == [((0,), range(1), ())] and plain.captions(3) == ["a.png", "b.png", "a.png"]
    mixture = ImagePrompts(PICTURES[:2], (0.75, -1), names=names)
    assert mixture.rows(3) == [(range(2), range(3), ())] and mixture.captions(2) == ["0.75 a.png + -1 b.png"] * 2
    strip = ImagePrompts(PICTURES[:2], interpolate=2)
    assert strip.rows(4) == [((0,), range(2), (1,)), ((0,), range(2, 4), (1,))]
    assert strip.captions(3) == ["image 1 → image 2 1/2", "image 1 → image 2 2/2", "image 1 → image 2 1/2"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"images": []}, "there is no picture to vary: give at least one"),
        ({"weights": (1, 2), "interpolate": 3}, "image_weights and interpolate exclude each other"),
        ({"weights": (1,)}, "image_weights has 1 value for 2 images: give one for each"),
        ({"images": PICTURES, "interpolate": 3}, "interpolate is between 2 images, but there are 3"),
        ({"images": PICTURES[:1], "interpolate": 3}, "interpolate is between 2 images, but there is 1"),
        ({"interpolate": 1}, "interpolate is 1, but must be at least 2"),
        ({"interpolate": -2}, "interpolate is -2, but must be at least 2"),
    ],
)
def test_impossible_pictures_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        ImagePrompts(**{"images": PICTURES[:2], **settings})


# -------------------------------------------------------------------------------------------------------------- prompts

TEXTS = ["a red circle", "two blue squares"]


def test_a_prompt_is_encoded_for_a_decoder_with_text(make, clip):
    """Its token states; an empty one is no text, as where training drops it."""
    pipeline = make(text=True)
    embeddings, (_, states, mask) = embeddings_of(clip, PICTURES[:2]), clip.encode_text(TEXTS)
    expected = sample(pipeline, embeddings=embeddings, text_states=(states.numpy(), mask.numpy()))
    assert np.array_equal(sample(pipeline, TEXTS, embeddings=embeddings), expected)
    one = sample(pipeline, [TEXTS[0], ""], images=PICTURES[:2])
    assert np.array_equal(one[0], expected[0]) and not np.array_equal(one[1], expected[1])
    assert np.array_equal(one[1], sample(pipeline, embeddings=embeddings)[1])
    with watching(pipeline.stages[0]) as seen:
        sample(pipeline, [TEXTS[0], ""], images=PICTURES[:2], guidance=diff_dalle.GuidanceConfig(guidance_scale=1.0))
    states, mask = seen[0][1].text_states, seen[0][1].mask
    assert mask.sum(1).tolist() == [5, 0] and not states[1].any()


def test_the_embedding_of_a_prompt_stands_in_for_that_of_a_picture(make, clip):
    embedding, states, mask = (each.numpy() for each in clip.encode_text(TEXTS))
    for text in (False, True):
        pipeline, given = make(text=text), {"text_states": (states, mask)} if text else {}
        expected = sample(pipeline, embeddings=embedding, seed=2, **given)
        assert np.array_equal(sample(pipeline, TEXTS, seed=2), expected)
    pipeline, own = make(text=True), (np.flip(states, 0).copy(), np.flip(mask, 0).copy())
    expected = sample(pipeline, embeddings=embedding, text_states=own)
    assert np.array_equal(sample(pipeline, TEXTS, text_states=own), expected)  # states that are given stay
    with pytest.raises(
        InputError, match="prompts are given, but this decoder reads no text beside images, embeddings or"
    ):
        pipeline.sample(TEXTS, embeddings=embedding, text_states=own)
    with pytest.raises(InputError, match="prompt 2 is empty, but has to stand in for an image: give a text, or images"):
        make().sample(["a", ""])


def test_many_prompts_are_encoded_once_each_and_in_batches(make, clip, monkeypatch):
    monkeypatch.setattr(clips, "BATCH", 2)
    prompts, seen = ["a", "b", "a", "c", "b"], []
    plain = type(clip).encode_text
    monkeypatch.setattr(type(clip), "encode_text", lambda self, texts: seen.append(list(texts)) or plain(self, texts))
    found, states, mask = clips.encoded(clip, prompts)
    assert seen == [["a", "b"], ["c"]]
    expected = [each.numpy() for each in plain(clip, prompts)]
    np.testing.assert_allclose(found, expected[0], atol=1e-6)
    np.testing.assert_allclose(states, expected[1], atol=1e-6)
    assert np.array_equal(mask, expected[2])


def test_text_alone_conditions_a_decoder_without_embeddings(make, clip):
    pipeline, (_, states, mask) = make(text=True, unconditional=True), clip.encode_text(TEXTS)
    expected = sample(pipeline, [""] * 2, text_states=(states.numpy(), mask.numpy()))
    assert np.array_equal(sample(pipeline, TEXTS), expected)
    with pytest.raises(InputError, match="images are given, but no stage is conditioned on image embeddings"):
        pipeline.sample(TEXTS, images=PICTURES[:2])


# ------------------------------------------------------------------------------------------------------------- the CLIP


def test_the_clip_of_the_training_is_found_or_given(make, clip, clip_path, tmp_path):
    expected = sample(make(), images=PICTURES)
    moved = str(shutil.copy(clip_path, tmp_path / "moved.pt"))
    gone = ClipConfig("diff_dalle", str(tmp_path / "gone.pt"), clip.identity)
    assert np.array_equal(sample(make(named=gone, options={"clip_path": moved}), images=PICTURES), expected)
    assert np.array_equal(sample(make(named=False, options={"clip_path": moved}), images=PICTURES), expected)
    both = {"clip_path": moved, "clip_make": "diff_dalle"}
    elsewhere = ClipConfig("open_clip", "ViT-B-32/openai")
    assert np.array_equal(sample(make(named=elsewhere, options=both), images=PICTURES), expected)
    with pytest.raises(InputError, match=r"decoder.pt was trained with is not at .*gone.pt: give its place with clip"):
        make(named=gone).sample(images=PICTURES)
    with pytest.raises(InputError, match="decoder.pt does not say which CLIP it was trained with: give it with clip"):
        make(named=False).sample(images=PICTURES)


@pytest.mark.parametrize("keep", [True, False])
def test_the_clip_is_kept_as_the_networks_are(make, monkeypatch, keep):
    pipeline, loads = make(options={"keep_loaded": keep, "precision": "bf16"}), []
    plain = clips.load_clip
    monkeypatch.setattr(clips, "load_clip", lambda *given: loads.append(given) or plain(*given))
    one, two = (sample(pipeline, images=PICTURES) for _ in range(2))
    assert np.array_equal(one, two) and len(loads) == (1 if keep else 2)
    assert {(str(device), *rest) for _, _, device, *rest in loads} == {("cpu", "bf16", "unit")}


def test_a_clip_without_token_states_cannot_encode_text(make, monkeypatch):
    """As of some models of open_clip; images are not affected."""
    pipeline = make(text=True)
    clip = pipeline.clip.load()
    monkeypatch.setattr(clip, "text_width", 0)
    with pytest.raises(InputError, match="the CLIP diff_dalle .* has no states of text tokens to condition on: leave"):
        pipeline.sample(TEXTS, images=PICTURES[:2])
    assert len(sample(pipeline, images=PICTURES)) == 3


@pytest.mark.parametrize("place", ["pipe:touch made", "https://127.0.0.1:9/clip.pt", "folder"])
def test_a_place_in_a_checkpoint_is_only_opened_if_it_is_a_file(make, tmp_path, place, monkeypatch):
    """It may be a command, also where a file has its name, or tell somebody that the checkpoint is used."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "pipe:touch made").write_bytes(b"")
    named = ClipConfig("diff_dalle", place)
    with pytest.raises(InputError, match="was trained with is not at .* give its place with clip_path"):
        make(named=named).sample(images=PICTURES)
    assert not (tmp_path / "made").exists()


def test_another_clip_is_refused(make, clip, clip_path, tmp_path):
    other = make_clip_file(tmp_path, classifier_enc_heads=1)
    pipeline = make(options={"clip_path": other})
    with pytest.raises(
        InputError, match=r"the CLIP is diff_dalle .*clip.pt \(diff_dalle:\w+\), but .* trained with diff"
    ):
        pipeline.sample(images=PICTURES)
    narrow = make(named=False, options={"clip_path": clip_path}, width=7)
    with pytest.raises(InputError, match="the embeddings have width 16, but this decoder's have width 7"):
        narrow.sample(images=PICTURES)


def test_networks_with_different_clips_are_given_embeddings(clip, clip_path, tmp_path):
    """Of one the image embedding, of the other the text."""
    unets = (
        replace(UNET, image_embed_dim=clip.embed_dim),
        replace(TEXT_UNET, text_embed_dim=clip.text_width, image_embed_dim=clip.embed_dim),
    )
    own, other = ClipConfig("diff_dalle", clip_path, clip.identity), ClipConfig("openai", "ViT-L/14", "another")
    paths = [
        save_unet(tmp_path / f"{i}.pt", make_decoder(2, unets=unets, clip=each, **FAST), i)
        for i, each in enumerate((own, other))
    ]
    pipeline = diff_dalle.load(paths, "cpu")
    with pytest.raises(
        InputError, match=r"0.pt was trained with diff_dalle .*, but .*1.pt with openai ViT-L/14 .another"
    ):
        pipeline.sample(images=PICTURES)
    assert sample(pipeline, embeddings=embeddings_of(clip, PICTURES)).shape == (3, 16, 16, 3)


def test_what_has_no_effect_is_refused(make, clip_path, tmp_path):
    for arguments, message in (
        ({"images": PICTURES, "embeddings": np.zeros((1, 16), np.float32)}, "images and embeddings excl"),
        ({"image_weights": (1, 2)}, "image_weights and interpolate are about images, but there are none"),
        ({"images": [PICTURES[0].astype(float)]}, r"an image prompt .* is float64 of shape \[20, 24, 3\]"),
        ({"images": PICTURES[0]}, r"an image prompt .* is uint8 of shape \[24, 3\], but must be uint8 \[H, W"),
    ):
        with pytest.raises(InputError, match=message):
            sample(make(), **arguments)
    with pytest.raises(InputError, match="clip_path is .*, but no network is conditioned on embeddings or text enc"):
        diff_dalle.load(make_file(tmp_path), "cpu", clip_path=clip_path)
    with pytest.raises(InputError, match="clip_make is 'openai', but clip_path is missing"):
        make(options={"clip_make": "openai"})


# -------------------------------------------------------------------------------------------------------------- editing


def test_the_request_of_a_sample_call(make, monkeypatch):
    pipeline, requests = make(), []
    monkeypatch.setattr(pipeline, "sample_stages", lambda request, *rest, **more: requests.append(request) or [None])
    each = {"labels": [4, 5], "classifier_prompts": ["x", "y"]}
    pipeline.sample(["a", "b"], 3, images=PICTURES, num_samples=3, **each)
    request = requests.pop()
    assert (request.prompts, request.labels, request.classifier_prompts) == (
        ["a", "b", "a"],
        [4, 5, 4],
        ["x", "y", "x"],
    )
    assert list(request.seeds) == [3, 4, 5] and request.images.images is PICTURES
    pipeline.sample(["a", "b"], embeddings=np.arange(3, dtype=np.float32)[:, None], num_samples=5)
    assert requests[-1].embeddings.ravel().tolist() == [0, 1, 2, 0, 1] and requests.pop().prompts == [*"ababa"]
    pipeline.sample(images=PICTURES, seeds=[7, 8, 9])
    assert list(requests.pop().seeds) == [7, 8, 9]
    pipeline.sample(num_samples=4, seed=2)
    assert requests[-1].prompts == [""] * 4 and list(requests.pop().seeds) == [2, 3, 4, 5]
    for prompts, used in (("a", "aaa"), ("ab", "aba"), ("abcd", "abcd")):
        pipeline.sample([*prompts], images=PICTURES)
        assert requests.pop().prompts == [*used]
    with pytest.raises(InputError, match="classifier_prompts has 1 value for 3 prompts"):
        pipeline.sample(images=PICTURES, classifier_prompts=["a"])


def test_a_low_strength_preserves_the_picture(make):
    picture = random_images(1, 16, 16, seed=9)[0]
    near, far = (
        sample(
            make(sample_timesteps=(None,)), images=PICTURES, edit=ImageEdit([picture], None, EditConfig(strength=part))
        )
        for part in (0.1, 0.9)
    )
    small = np.array(Image.fromarray(picture).resize((8, 8), Image.Resampling.BOX)).astype(int)
    assert np.abs(near - small).mean() < np.abs(far - small).mean()
