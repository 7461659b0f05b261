"""ControlNets, LoRAs and networks in the layout of Stable Cascade: read, used, and written again bit for bit."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from latent_making import B, C, make
from marks import slow
from open_clip_making import END, make_open_clip
from released_making import file_of, previewer, stage_a, stage_b, stage_c, stand_in_torchvision
from stable_cascade_making import OtherControlNet, make_lora

from diff_dalle.checkpoints.cascade import SemanticSettings, StageCSettings, TrainedWith
from diff_dalle.checkpoints.checkpoint import Identity, load_file, save_file
from diff_dalle.checkpoints.decoder import ClipConfig
from diff_dalle.checkpoints.foreign import stable_cascade
from diff_dalle.checkpoints.loading import open_network
from diff_dalle.checkpoints.lora_file import WeightedLora, merge_loras, read_lora, write_lora
from diff_dalle.checkpoints.safetensors import read_safetensors
from diff_dalle.commands import import_cascade as importing
from diff_dalle.commands.convert import ConvertConfig, convert
from diff_dalle.commands.import_cascade import ImportConfig, import_cascade
from diff_dalle.config import InputError, to_dict
from diff_dalle.models.latent.released import LAYOUTS
from diff_dalle.models.latent.semantic import SemanticAutoencoder, SemanticConfig
from diff_dalle.models.latent.stage_a import StageAConfig
from diff_dalle.models.latent.stages import StageC
from diff_dalle.sampling.lora import parse_lora_paths, with_loras

CPU = torch.device("cpu")
A = StageAConfig(width=8, bottleneck_blocks=1, codebook_size=20)
WIDTH = 10  # of the token embeddings of the stand-in for open_clip


@pytest.fixture
def base(tmp_path) -> str:
    """A stage C of ours whose text the stand-in for open_clip encodes."""
    clip = ClipConfig("open_clip", "ViT-B-32/laion2b_s34b_b79k", outputs="released")
    settings = StageCSettings(model=C, trained_with=TrainedWith(64, text_clip=clip))
    path = str(tmp_path / "base.pt")
    save_file(path, "model", Identity("stage_c", to_dict(settings)), 0, 0, make(C).state_dict())
    return path


def write(path: Path, tensors) -> str:
    safetensors.torch.save_file({name: value.detach().contiguous() for name, value in tensors.items()}, path)
    return str(path)


def taken(adapter: str, path: str, base: str, **flags) -> str:
    """The file of ours of one of theirs."""
    out = f"{path}_own{'.safetensors' if adapter == 'lora' else '.pt'}"
    import_cascade(ImportConfig(adapter, weights=(path,), base=base, out=out, **flags))
    return out


def given_back(path: str, out: Path, **flags) -> dict[str, torch.Tensor]:
    convert(ConvertConfig(path, str(out), to="stable_cascade", **flags))
    return read_safetensors(str(out))[0]


def same(found, expected) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], each) for name, each in expected.items())


# ---------------------------------------------------------------------------------------------------------- ControlNets


@pytest.mark.parametrize(
    ("mode", "channels", "filter_name"),
    [("effnet", 1, "canny"), ("effnet", 3, "sr"), ("effnet", 4, "inpaint"), ("simple", 3, "sr"), ("large", 3, "sr")],
)
def test_controlnets_compute_what_they_do_there(tmp_path, monkeypatch, base, mode, channels, filter_name):
    stand_in_torchvision(monkeypatch, strided=True)
    torch.manual_seed(0)
    blocks = (4, 0, 2)  # projections are numbered in this order
    other = OtherControlNet(mode, channels, C.residual_widths, blocks).eval()
    theirs = write(tmp_path / "theirs.safetensors", other.state_dict())
    own = taken("controlnet", theirs, base, controlnet_blocks=blocks, controlnet_filter=filter_name)
    saved = open_network(own, "stage_c_controlnet")
    control = torch.rand(1, channels, 96, 64)
    network = saved.load(CPU).eval()
    with torch.no_grad():
        found, expected = network(network.encode(control), *[None] * 3), other(control)
    assert len(found) == 5 and [each is None for each in found] == [each is None for each in expected]
    for value, wanted in zip(found, expected, strict=True):
        if value is not None:
            torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5)
    assert same(given_back(own, tmp_path / "again.safetensors"), other.state_dict())
    record = saved.settings.base
    assert record.identity and record.image_size == 64 and saved.settings.model == C


def test_published_controlnets_are_known_by_their_shapes(tmp_path, monkeypatch):
    """Where a checkpoint is asked for; of others the next step is said."""
    monkeypatch.setitem(stable_cascade.STAGE_C_SIZES, "3.6B", C)
    rows = [{"mode": "simple", "channels": 3, "filter": "SRFilter", "params": {"scale": 0.5}, "blocks": [0, 2]}]
    monkeypatch.setitem(stable_cascade.TABLES, "controlnets", rows)
    theirs = write(
        tmp_path / "theirs.safetensors", OtherControlNet("simple", 3, C.residual_widths, (0, 2)).state_dict()
    )
    with pytest.warns(UserWarning, match=r'is taken with the filter SRFilter \{"scale": 0.5\} on the blocks 0, 2'):
        saved = open_network(theirs, "stage_c_controlnet")
        assert saved.settings.control.channels == 3 and saved.settings.base.identity == ""
        saved.load(CPU)
    odd = write(tmp_path / "odd.safetensors", OtherControlNet("simple", 1, C.residual_widths, (0, 2)).state_dict())
    message = "none of the published ones .mode simple, channels 1, projections 2.: give controlnet_blocks and controln"
    with pytest.raises(InputError, match=f"{message}.* diff-dalle import_cascade --stage controlnet --base"):
        load_file(odd)


def test_a_threshold_without_effect_is_said(tmp_path, base):
    """By the name that their files have."""
    state = OtherControlNet("simple", 4, C.residual_widths, (0, 2)).state_dict()
    theirs, out = write(tmp_path / "theirs.safetensors", state), tmp_path / "own.pt"
    flags = {"weights": (theirs,), "base": base, "controlnet_blocks": (0, 2), "controlnet_filter": "InpaintFilter"}
    for params, said in (('{"thresold": [0.04, 0.4]}', True), ('{"p_outpaint": 0.4}', False)):
        text = import_cascade(ImportConfig("controlnet", out=str(out), controlnet_filter_params=params, **flags))
        assert ("controlnet_filter_params has a threshold of saliency, which has no effect" in text) is said
        out.unlink()


@pytest.mark.parametrize("row", stable_cascade.TABLES["controlnets"], ids=lambda row: row["mode"] + row["filter"])
def test_the_published_rows_are_possible(row):
    """Filters with these parameters and channels, and blocks of the stage C of 3.6B."""
    base = stable_cascade.STAGE_C_SIZES["3.6B"]
    config = stable_cascade.LatentControlConfig(tuple(row["blocks"]), row["mode"])
    config.check_blocks(base)
    kind = stable_cascade.ControlConfig(row["filter"]).filter_class
    params = stable_cascade.json.dumps(row["params"])
    stable_cascade.ControlConfig(row["filter"], params).params_of(kind)
    if isinstance(getattr(kind, "channels", None), int):
        assert kind.channels == row["channels"]


@pytest.mark.parametrize(
    ("params", "form"), [("{}", "square"), ('{"resize": 64}', "square"), ('{"resize_form": "ratio"}', "ratio")]
)
def test_edges_are_squashed_as_there(tmp_path, monkeypatch, base, params, form):
    """Which the file does not say; and what ours has otherwise is said when it goes out."""
    theirs = write(
        tmp_path / "theirs.safetensors", OtherControlNet("simple", 1, C.residual_widths, (0, 2)).state_dict()
    )
    flags = {"controlnet_blocks": (0, 2), "controlnet_filter": "CannyFilter", "controlnet_filter_params": params}
    own = taken("controlnet", theirs, base, **flags)
    control = open_network(own, "stage_c_controlnet").settings.control
    assert control.params_of(control.filter_class).resize_form == form
    text = convert(ConvertConfig(own, str(tmp_path / "again.safetensors"), to="stable_cascade"))
    assert ("Its code has other settings than resize_form ratio" in text) is (form == "ratio")


def test_wrong_controlnets_are_refused(tmp_path, base):
    state = OtherControlNet("simple", 3, C.residual_widths, (0, 2)).state_dict()
    for changes, flags, message in (
        ({}, {"controlnet_blocks": (0,)}, "has 2 projections, but controlnet_blocks lists 1"),
        ({"more.weight": torch.zeros(1)}, {}, "has an extra more.weight, which a ControlNet simple lacks"),
        ({"projections.1.2.weight": torch.zeros(9, 3, 1, 1)}, {}, "projections.1.2.weight has the shape"),
        ({}, {"controlnet_filter": "cany"}, "canny"),
    ):
        theirs = write(tmp_path / "theirs.safetensors", {**state, **changes})
        with pytest.raises(InputError, match=message):
            taken("controlnet", theirs, base, **{"controlnet_blocks": (0, 2), "controlnet_filter": "sr", **flags})
    for flags, message in (
        ({"base": ""}, "base is required"),
        ({"weights": ()}, "weights names 0 files, but must name the one of"),
    ):
        with pytest.raises(InputError, match=message):
            ImportConfig("controlnet", **{"base": base, "weights": ("x",), "out": "y", **flags})


# ---------------------------------------------------------------------------------------------------------------- LoRAs


@pytest.mark.parametrize(
    "filters",
    [
        (".attn",),
        ("depthwise", "channelwise", "mapper", "clip_txt"),
        slow(("attention", "scalers", "clf", "emb")),
    ],
)
def test_loras_change_what_they_change_there(tmp_path, base, filters):
    state = {name: value.float() for name, value in file_of(stage_c(C)).items()}
    file, merged = make_lora(state, filters, 2, width=C.text_width)
    theirs = write(tmp_path / "theirs.safetensors", file)
    network, (layout,) = StageC(C), LAYOUTS["stage_c"]
    network.load_state_dict(layout.read(network, state).state)
    save_file(base, "model", load_identity(base), 0, 0, network.state_dict())
    own = taken("lora", theirs, base, module_filters=filters)
    lora = read_lora(own)
    assert lora.about.alpha == 1 and lora.about.rank == 2 and not lora.about.train_tokens
    merge_loras(network, None, [WeightedLora(lora)])
    expected = layout.read(network, merged).state
    found = network.state_dict()
    changed = [
        name for name, value in expected.items() if not torch.equal(value, layout.read(network, state).state[name])
    ]
    assert len(changed) == len(lora.pairs) // 2 > 3
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    assert same(given_back(own, tmp_path / "again.safetensors", base=base), file)
    if filters == (".attn",):  # of the documented training: in sampling as it is
        with pytest.warns(UserWarning, match="is a LoRA of Stable Cascade, and is taken with module_filters .attn"):
            loras = parse_lora_paths([f"{theirs}:1"])
        (adapted,) = with_loras([open_network(base, "stage_c")], loras)
        assert same(adapted.load(CPU).state_dict(), found)


def load_identity(path: str) -> Identity:
    return Identity("stage_c", load_file(path)["config"])


def test_tokens_are_matched_with_their_ids(tmp_path, monkeypatch, base):
    """New tokens are the last ones there, and have names only in the file of the training."""
    monkeypatch.setitem(sys.modules, "open_clip", make_open_clip(""))
    state = {name: value.float() for name, value in file_of(stage_c(C)).items()}
    new = END + 1
    file, _ = make_lora(state, (".attn",), 2, (new, 38, 40, new + 1), WIDTH)
    theirs = write(tmp_path / "theirs.safetensors", file)
    tokens = ('["[one]", "^a"]', '["^[ac]</w>", null]', '["[two]", null]')
    own = taken("lora", theirs, base, train_tokens=tokens)
    lora = read_lora(own)
    rows = file["embeddings.embeddings"]
    assert torch.equal(lora.deltas, rows[[1, 2, 0, 3]]) and lora.about.clip and lora.about.train_tokens == tokens
    again = given_back(own, tmp_path / "again.safetensors", base=base)
    assert again["embeddings.indices"].tolist() == [38, 40, new, new + 1]
    assert torch.equal(again["embeddings.embeddings"], rows[[1, 2, 0, 3]])
    assert taken_again(tmp_path, base, again, tokens).tensors.keys() == lora.tensors.keys()
    for wrong, message in (
        ((), r"trains 4 tokens \(ids 64, 38, 40, 65\), whose names it does not say: give train_tokens"),
        (tokens[:2], "ids 38, 40, 64, 65, but train_tokens finds 38, 40, 64"),
    ):
        Path(own).unlink(missing_ok=True)
        with pytest.raises(InputError, match=message):
            taken("lora", theirs, base, train_tokens=wrong)


def taken_again(folder, base, file, tokens):
    return read_lora(taken("lora", write(folder / "again2.safetensors", file), base, train_tokens=tokens))


def test_what_is_no_lora_of_theirs_is_refused(tmp_path, base):
    state = {name: value.float() for name, value in file_of(stage_c(C)).items()}
    file, _ = make_lora(state, (".attn",), 2, width=C.text_width)
    theirs = write(tmp_path / "theirs.safetensors", file)
    for read in (read_lora, load_file):
        with pytest.raises(InputError, match="is a LoRA of Stable Cascade, .* diff-dalle import_cascade --stage lora"):
            read(theirs)
    with pytest.raises(InputError, match="adapts 8 modules, but kv_mapper selects 4: give the module_filters"):
        taken("lora", theirs, base, module_filters=("kv_mapper",))
    with pytest.raises(InputError, match="out is 'lora.pt', but a LoRA is written as safetensors"):
        ImportConfig("lora", weights=("x",), base=base, out="lora.pt")
    own = taken("lora", theirs, base)
    with pytest.raises(InputError, match="is a LoRA: give the checkpoint of its stage C with --base"):
        given_back(own, tmp_path / "again.safetensors")
    lora, out = read_lora(own), tmp_path / "odd.safetensors"
    conv = {
        "down_blocks.0.0.depthwise.lora_down": torch.rand(2, 9),
        "down_blocks.0.0.depthwise.lora_up": torch.rand(8, 2),
    }
    for about, tensors, message in (
        (replace(lora.about, module_filters=("depth",)), conv, "positions of the kernel of down_blocks.0.0.depthwise"),
        (replace(lora.about, kind="stage_b"), lora.tensors, "is a LoRA of a stage_b, but Stable Cascade has"),
    ):
        with open(out, "wb") as each:
            write_lora(each, about, tensors)
        with pytest.raises(InputError, match=message):
            given_back(str(out), tmp_path / "again.safetensors", base=base)


# ------------------------------------------------------------------------------------------------------------- Networks


def test_networks_go_out_as_they_came(tmp_path, monkeypatch):
    stand_in_torchvision(monkeypatch)
    config = SemanticConfig(backbone="efficientnet_v2_s", semantic_channels=5, previewer_width=8)
    sizes = {"stage_a": A, "stage_b": B, "stage_c": C}
    monkeypatch.setattr(importing, "SIZES", {stage: {"released": size} for stage, size in sizes.items()})
    for stage, shapes in (("stage_a", stage_a(A)), ("stage_b", stage_b(B)), ("stage_c", stage_c(C))):
        file = file_of(shapes, torch.float32)
        theirs, own = write(tmp_path / f"{stage}.safetensors", file), str(tmp_path / f"{stage}.pt")
        import_cascade(ImportConfig(stage, weights=(theirs,), out=own))
        assert same(given_back(own, tmp_path / f"{stage}_again.safetensors"), file)
    torch.manual_seed(0)
    network, path = SemanticAutoencoder(config), str(tmp_path / "semantic.pt")
    save_file(path, "model", Identity("semantic", to_dict(SemanticSettings(config))), 0, 0, network.state_dict())
    encoder = given_back(path, tmp_path / "s.safetensors")
    previewer = read_safetensors(str(tmp_path / "s_previewer.safetensors"))[0]
    layouts = LAYOUTS["semantic"]
    for layout, file in zip(layouts[:2], (encoder, previewer), strict=True):
        assert layout.mark in file and not layout.read(network, file).unused
        assert same(layout.read(network, file).state, {n: network.state_dict()[n] for n in layout.names(network)})


def test_where_a_checkpoint_is_required_the_command_that_makes_one_is_said(tmp_path):
    shapes = {"stage_a": stage_a(A), "stage_b": stage_b(B), "stage_c": stage_c(C), "semantic": previewer(5, 8)}
    for stage, each in shapes.items():
        theirs = write(tmp_path / f"{stage}.safetensors", file_of(each))
        with pytest.raises(InputError, match=f"weights of a {stage} of Stable Cascade: .*--stage {stage}.* {theirs} "):
            load_file(theirs)


def test_networks_without_a_place_there_are_refused(tmp_path, base):
    path, out = str(tmp_path / "own.pt"), tmp_path / "x.safetensors"
    settings = StageCSettings(model=replace(C, coordinates=True))
    save_file(path, "model", Identity("stage_c", to_dict(settings)), 0, 0, make(settings.model).state_dict())
    with pytest.raises(InputError, match="own.pt has coordinates True, which networks of Stable Cascade cannot have"):
        given_back(path, out)
    with pytest.raises(InputError, match="base is set, but .* is no LoRA"):
        given_back(base, out, base=base)
    for given in ({"num_heads": 2}, {"bpe_path": "clip"}):
        with pytest.raises(InputError, match=f"{min(given)} is set, but a checkpoint of ours says it"):
            given_back(base, out, **given)
    with pytest.raises(InputError, match="out is 'x.pt', but Stable Cascade's files are safetensors"):
        ConvertConfig(base, "x.pt", to="stable_cascade")
    odd = StageCSettings(model=C, diffusion=replace(settings.diffusion, prediction="v"))
    save_file(path, "model", Identity("stage_c", to_dict(odd)), 0, 0, make(C).state_dict())
    assert "Its code has other settings than prediction v" in convert(ConvertConfig(path, str(out), "stable_cascade"))
