"""What holds for every system of stages: a generator, a cascade, upsamplers alone, a latent cascade, a decoder."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from cascade_making import PROMPTS, Share, close, different, edited, random_images
from decoder_making import WIDTH, make_decoder, save_decoder

from diff_dalle.diffusion import SAMPLERS
from diff_dalle.diffusion.sampling import SamplerConfig
from diff_dalle.sampling.pipeline import load
from diff_dalle.sampling.request import Request

EMBEDDINGS = np.random.default_rng(0).normal(size=(3, WIDTH)).astype(np.float32)
ROWS = {"upsamplers": {"low_res": random_images(3, 8, 8)}, "decoder": {"embeddings": EMBEDDINGS}}


@pytest.fixture(scope="module")
def sample(stage_files, latent, cascade, upsamplers_only, tmp_path_factory):
    """Sample some of three rows with a system: each stage's images, as signed integers."""
    decoder = save_decoder(tmp_path_factory.mktemp("systems") / "decoder.pt", make_decoder(2))
    systems = {
        "generator": load(stage_files["base"], "cpu"),
        "cascade": cascade,
        "upsamplers": upsamplers_only,
        "latent": load(latent.c, "cpu", **latent.rest, semantic=latent.semantic, keep_loaded=True),
        "decoder": load(decoder, "cpu", keep_loaded=True),
    }

    def sampled(name, rows=(0, 1, 2), first=5, world=None, edit=None, **changed):
        changed.setdefault("sampler", SamplerConfig(steps=3))
        prompts = ["" if name == "decoder" else PROMPTS[i] for i in rows]
        given = {key: value[list(rows)] for key, value in ROWS.get(name, {}).items()}
        settings = [replace(stage.defaults, **changed) for stage in systems[name].stages]
        request = Request(prompts, [first + i for i in rows], edit=edit, **given)
        return [x.astype(int) for x in systems[name].sample_stages(request, settings, world=world, progress=False)]

    return sampled


@pytest.mark.parametrize(
    ("name", "sampler"),
    [(name, "dpm++2m") for name in ("generator", "cascade", "upsamplers", "latent", "decoder")]
    + [("generator", sampler) for sampler in ("ancestral", "ddim", "unipc", "heun")],
)
def test_an_image_depends_on_its_row_and_seed_alone(sample, name, sampler):
    """Through all stages, in any batch."""
    chosen = {"sampler": SamplerConfig(sampler, 3, eta=0.7 if sampler == "ddim" else 0.0)}
    together = sample(name, batch_size=2, **chosen)
    last = range(len(together))
    assert close(together, sample(name, batch_size=3, **chosen))
    for i in (1, 2):
        assert close([images[i : i + 1] for images in together], sample(name, [i], **chosen))
    assert different(together, sample(name, first=6, **chosen), last)
    assert different([x[:1] for x in together], [x[1:2] for x in together], last)


@pytest.mark.parametrize(("name", "count"), [("cascade", 3), ("cascade", 1), ("upsamplers", 3), ("latent", 1)])
def test_processes_share_the_images_and_each_gets_all(sample, name, count):
    """Even if there is no image for one of them."""
    options = edited(count=2, mask=np.eye(16, dtype=bool)) if name == "cascade" else {}
    found = {}

    def work(rank):
        found[rank] = sample(name, range(count), world=Share(rank), **options)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = sample(name, range(count), **options)
    assert close(found[0], expected) and close(found[1], expected)


@pytest.mark.parametrize("name", ["latent", "decoder"])
def test_every_sampler(sample, name):
    """In both kinds of processes."""
    usual = sample(name, [0], sampler=SamplerConfig("ancestral", 4))[-1]
    for sampler in SAMPLERS:
        images = sample(name, [0], sampler=SamplerConfig(sampler, 3))[-1]
        assert images.std() > 5 and np.abs(images - usual).mean() > (0.5 if name == "latent" else 0), sampler
