"""Checkpoints of a cascade's networks from files that hold them in another way."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from cascade_file_making import UNET, frozen_of, make_world, read, run, write_file
from latent_making import B, C
from open_clip_making import make_open_clip
from released_making import (
    BACKBONE,
    ENCODER,
    file_of,
    layer,
    previewer,
    stage_a,
    stage_b,
    stage_c,
    stand_in_torchvision,
)
from script_running import run as run_script

from diff_dalle.checkpoints.checkpoint import load_file
from diff_dalle.checkpoints.loading import open_network
from diff_dalle.commands import import_cascade as importing
from diff_dalle.commands.import_cascade import ImportConfig, import_cascade
from diff_dalle.config import InputError, to_dict
from diff_dalle.distributed.world import ALONE
from diff_dalle.models.latent import released
from diff_dalle.models.latent.semantic import SemanticAutoencoder, SemanticConfig
from diff_dalle.models.latent.stage_a import StageA, StageAConfig
from diff_dalle.models.latent.stages import StageB, StageC
from diff_dalle.sampling.clips import LatentClips
from diff_dalle.sampling.latent_stages import ReconstructionStage, SemanticStage

A = StageAConfig(width=8, bottleneck_blocks=1, codebook_size=20)
S = SemanticConfig(backbone="efficientnet_v2_s", semantic_channels=5, previewer_width=8)
MAKE = {
    "stage_a": (A, stage_a, StageA, released.LAYOUTS["stage_a"][0].read),
    "stage_b": (B, stage_b, StageB, released.LAYOUTS["stage_b"][0].read),
    "stage_c": (C, stage_c, StageC, released.LAYOUTS["stage_c"][0].read),
}
CPU = torch.device("cpu")
QUIET = ("loop.preview_samples", 0)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    sizes = {"stage_a": A, "semantic": S, "stage_b": B, "stage_c": C}
    monkeypatch.setattr(importing, "SIZES", {stage: {"released": size} for stage, size in sizes.items()})


@pytest.fixture
def _torchvision(monkeypatch):
    stand_in_torchvision(monkeypatch)


def imported(tmp_path, stage: str, *files, ending="safetensors") -> tuple[str, str]:
    """The checkpoint's path, and what was said."""
    paths = []
    for i, file in enumerate(files):
        path = tmp_path / f"{i}.{ending}"
        safetensors.torch.save_file(file, path) if ending == "safetensors" else torch.save(file, path)
        paths.append(str(path))
    out = str(tmp_path / "out.pt")
    return out, import_cascade(ImportConfig(stage, weights=tuple(paths), out=out))


@pytest.mark.parametrize(("stage", "ending"), [*((stage, "safetensors") for stage in MAKE), ("stage_b", "pt")])
def test_public_files_become_checkpoints(tmp_path, stage, ending):
    config, shapes, network, convert = MAKE[stage]
    file = file_of(shapes(config))
    given = {"state_dict": file} if ending == "pt" else file
    path, text = imported(tmp_path, stage, given, ending=ending)
    saved = open_network(path, stage)
    assert saved.settings.model == config and saved.step == 0 and f"{len(file)} tensors loaded" in text
    expected = convert(network(config), file).state
    found = saved.load(CPU).state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    left = set(found) - set(expected)
    assert left == ({"scale_factor", "quantizer.usage"} if stage == "stage_a" else set())
    if stage == "stage_a":
        assert found["scale_factor"].item() == pytest.approx(0.43) and "2 left at initial values: scale_factor" in text
    else:  # what the public networks read
        known = saved.settings.trained_with
        assert known.text_clip.model == "ViT-bigG-14/laion2b_s39b_b160k" and not known.text_clip.identity
        assert (known.image_clip is not None) == (stage == "stage_c")
        assert (known.stage_a_stride, known.semantic_stride) == (4, 32)
        assert {clip.outputs for clip in (known.text_clip, known.image_clip) if clip} == {"released"}


def test_stage_c_makes_as_many_positions_as_stage_b_reads_of_a_picture(tmp_path):
    """24 × 24 for 1024 pixels: C was trained at 768 pixels, B at 1024, both with an encoder of stride 32."""
    found = []
    for kind, stage in (("stage_c", SemanticStage), ("stage_b", ReconstructionStage)):
        (tmp_path / kind).mkdir()
        path, _ = imported(tmp_path / kind, kind, file_of(MAKE[kind][1](MAKE[kind][0])))
        found.append(stage(open_network(path, kind), CPU))
    before, after = found
    assert [after.size_before(size, before) for size in ((256, 256), (384, 160))] == [(24, 24), (36, 15)]
    assert after.size_before((384, 160), SimpleNamespace(image_size=24, divisor=2)) == (36, 16)
    sizes = []

    class Encoder:
        def encode(self, pictures):
            sizes.append(tuple(pictures.shape[2:]))
            return torch.zeros(1, after.config.semantic_channels, 1, 1)

    after.attach(LatentClips(None), None, None)
    after.read = replace(after.read, encode=Encoder().encode)
    after.from_low_res(np.zeros((1, 1024, 640, 3), dtype=np.uint8))
    assert sizes == [(768, 480)]


def test_a_run_reads_a_clip_as_its_initial_weights_were_trained(tmp_path, world, frozen, monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip", make_open_clip(""))
    own = {**UNET, "micro_conditions": [], "text": {"enc_attn_dim": 0, "text_length": 9}}
    own |= {"text_width": 10, "pooled_width": 6, "image_width": 0}
    changes = [*frozen_of("stage_c", frozen), ("model", own), ("clip_text_model_name", "ViT-B-32/openai")]
    changes += [("updates", 1), QUIET]
    run("stage_c", tmp_path / "a", world, *changes, ("clip_outputs", "released"))
    first = str(tmp_path / "a" / "run" / "model000001.pt")
    found = {}
    for name, more in {"none": [], "same": [first], "unit": [first, "unit"]}.items():
        keys = ("generator_checkpoint_path", "clip_outputs")
        session = read("stage_c", tmp_path / name, world, *changes, *zip(keys, more, strict=False)).recipe().open(ALONE)
        found[name] = session.settings.trained_with.text_clip.outputs
        assert session.text_clip.outputs == found[name]
    assert found == {"none": "unit", "same": "released", "unit": "unit"}
    with pytest.raises(InputError, match="clip_text_model_name is ViT-B-32/openai, whose weights are .*, but the run"):
        again = [("trained_with", to_dict(open_network(first, "stage_c").settings.trained_with))]
        read("stage_c", tmp_path / "b", world, *changes, *again).recipe().open(ALONE)


@pytest.mark.usefixtures("_torchvision")
def test_a_semantic_encoder_comes_in_two_files(tmp_path):
    encoder, decoder = file_of(ENCODER), file_of(previewer(5, 8), seed=1)
    path, _ = imported(tmp_path, "semantic", decoder, encoder)
    found = open_network(path, "semantic").load(CPU).state_dict()
    assert torch.equal(found["mapper.weight"], encoder["mapper.0.weight"].float())
    assert torch.equal(found["previewer.out_conv.bias"], decoder["blocks.24.bias"].float())
    assert torch.equal(found["latent_std"], torch.ones(5))


@pytest.mark.usefixtures("_torchvision")
def test_weights_of_torchvision_begin_a_semantic_encoder(tmp_path):
    """Only the projection and the previewer are trained."""
    backbone = file_of({f"features.{name}": shape for name, shape in BACKBONE.items()} | layer("classifier.1", 3, 1280))
    backbone["features.0.1.running_var"].abs_()
    path, text = imported(tmp_path, "semantic", backbone, ending="pth")
    assert "2 of the file not used: classifier.1.weight" in text and "left at initial values: latent_mean" in text
    world = make_world(tmp_path / "shards")
    changes = [("model", dict(vars(S))), ("image_size", 64), QUIET, ("updates", 1)]
    with pytest.raises(InputError, match="there are no weights for it: write a checkpoint with them by import_cascade"):
        read("semantic", tmp_path, world, *changes).recipe().open(ALONE)
    run("semantic", tmp_path, world, *changes, ("generator_checkpoint_path", path))
    start, end = (load_file(str(each))["state"] for each in (path, tmp_path / "run" / "model000001.pt"))
    moved = {name.partition(".")[0] for name in start if not torch.equal(start[name], end[name])}
    assert moved == {"mapper", "norm", "previewer", "latent_std"}  # after one batch, the norm alone makes means 0
    assert torch.equal(end["backbone.features.0.0.weight"], backbone["features.0.0.weight"].float())


def test_what_is_not_meant_is_refused(tmp_path):
    file = file_of(stage_c(C))
    with pytest.raises(InputError, match="holds no weights of a stage_a: names look like clf.1.bias"):
        imported(tmp_path, "stage_a", file)
    with pytest.raises(InputError, match="is not a file of named tensors"):
        imported(tmp_path, "stage_c", {"clf.1.weight": "text"}, ending="pt")
    (tmp_path / "bad.safetensors").write_bytes(b"123")
    bad = ImportConfig("stage_c", weights=(str(tmp_path / "bad.safetensors"),), out=str(tmp_path / "new.pt"))
    for changes, message in (
        ({}, "bad.safetensors is damaged or no safetensors file: .*header too small"),
        ({"weights": (str(tmp_path / "none.safetensors"),)}, "none.safetensors does not exist"),
        ({"model_version": "9B"}, "model_version is '9B', but must be one of released"),
        ({"out": ""}, "out is required: the file to write"),
        ({"out": bad.weights[0]}, "bad.safetensors exists already"),
    ):
        with pytest.raises(InputError, match=message):
            import_cascade(replace(bad, **changes))
    with pytest.raises(InputError, match="joint_run holds a semantic encoder and its weights: leave out stage, mod"):
        ImportConfig("stage_c", joint_run="opt.pt")
    assert not (tmp_path / "new.pt").exists()


# ----------------------------------------------------------------------------- an encoder that is trained with stage B


@pytest.fixture(scope="module")
def files(tmp_path_factory, world, frozen):
    """Those of a stage B whose encoder is trained along, after two updates."""
    folder = tmp_path_factory.mktemp("joint")
    run("stage_b", folder, world, *frozen_of("stage_b", frozen), ("train_encoder", True), ("updates", 2))
    return folder / "run"


def test_the_encoder_is_trained_and_taken_out(tmp_path, world, frozen, files):
    """For stage C and for sampling."""
    config = ImportConfig(joint_run=str(files / "opt000002.pt"), out=str(tmp_path / "s.pt"))
    assert "the semantic encoder after 2 steps with stage B" in import_cascade(config)
    start, end = open_network(frozen["effnet_checkpoint_path"], "semantic"), open_network(config.out, "semantic")
    assert end.settings == start.settings and end.step == 2
    before, after = start.load(CPU), end.load(CPU)
    same = [name for name, p in after.named_parameters() if torch.equal(p, before.get_parameter(name))]
    assert same == []
    assert not torch.equal(before.latent_std, after.latent_std)
    known = open_network(str(files / "model000002.pt"), "stage_b").settings.trained_with
    assert known.semantic == "" and known.encoder == start.settings.model and known.semantic_stride == 8
    run("stage_c", tmp_path / "c", world, ("effnet_checkpoint_path", config.out), ("updates", 1))
    frozen_run = {**frozen, "effnet_checkpoint_path": config.out}
    changes = [("generator_checkpoint_path", str(files / "model000002.pt")), ("updates", 1)]
    run("stage_b", tmp_path / "b", world, *frozen_of("stage_b", frozen_run), *changes)


@pytest.mark.slow
def test_processes_share_the_encoder_that_is_trained(tmp_path, world, frozen, files):
    changes = [*frozen_of("stage_b", frozen), ("train_encoder", True), QUIET, ("updates", 2)]
    run_script("train_cascade.py", write_file("stage_b", tmp_path, world, *changes), ranks=2)
    one, two = (
        load_file(str(folder / "opt000002.pt"), ("optimizer",))["state"] for folder in (files, tmp_path / "run")
    )
    for name, value in one["modules"]["semantic"].items():
        torch.testing.assert_close(value, two["modules"]["semantic"][name], rtol=0, atol=1e-5)


def test_only_a_joint_run_has_an_encoder(tmp_path, world, frozen):
    run("stage_b", tmp_path, world, *frozen_of("stage_b", frozen), ("updates", 1), QUIET)
    config = ImportConfig(joint_run=str(tmp_path / "run" / "opt000001.pt"), out=str(tmp_path / "s.pt"))
    with pytest.raises(InputError, match="opt000001.pt holds no semantic encoder: give the opt….pt of a stage B"):
        import_cascade(config)


def test_thawing_leaves_the_backbone_of_torchvision(monkeypatch):
    stand_in_torchvision(monkeypatch)
    network = SemanticAutoencoder(S).requires_grad_(False).thaw()
    kept = {name.partition(".")[0] for name, p in network.named_parameters() if not p.requires_grad}
    assert kept == {"backbone"} and network.mapper.weight.requires_grad
