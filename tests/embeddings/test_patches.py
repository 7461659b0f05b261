"""Encoders of patches: DINOv2's forward pass, which files are encoders, sizes."""

import clip_making
import pytest
import torch
from checkpoint_making import make_classifier_file, make_file
from dinov2_making import PATCH, WIDTH, make_state, reference
from network_making import pixels, seeded
from refusing import refused
from torch.testing import assert_close

from diff_dalle.checkpoints.loading import open_network
from diff_dalle.checkpoints.safetensors import write_safetensors
from diff_dalle.embeddings.patches import PatchEncoder, open_encoder
from diff_dalle.models.layers import to_tokens
from diff_dalle.models.vit_clip import VitClip, VitClipConfig

CPU = torch.device("cpu")


def save(folder, state, name="dino.pth"):
    path = folder / name
    if name.endswith(".safetensors"):
        with open(path, "wb") as file:
            write_safetensors(file, state, {})
    else:
        torch.save(state, path)
    return str(path)


def opened(path, size=0, image_size=16):
    return open_encoder(path, CPU, "alignment_path", image_size, size)


@pytest.mark.parametrize("name", ["dino.pth", "dino.safetensors"])
@pytest.mark.parametrize("registers", [0, 2])
@pytest.mark.parametrize("gated", [False, True], ids=["MLP", "SwiGLU"])
@pytest.mark.parametrize("size", [(12, 12), (20, 12)])
def test_dinov2_is_the_published_network(tmp_path, name, registers, gated, size):
    """Every tensor of the file counts, also where positions are interpolated."""
    state = make_state(registers, gated)
    encoder = opened(save(tmp_path, state, name), size=12)
    images = pixels(2, 3, *size)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    normalized = ((images + 1) / 2 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    found = encoder(images)
    assert found.shape == (2, WIDTH, size[0] // PATCH, size[1] // PATCH)
    assert_close(to_tokens(found), reference(state, normalized), atol=2e-5, rtol=1e-4)
    for changed in set(state) - {"mask_token"}:
        other = {**state, changed: state[changed] + 0.1 * seeded(*state[changed].shape, seed=1)}
        assert not torch.allclose(reference(other, normalized), to_tokens(found), atol=1e-3), changed


def test_what_is_no_dinov2_is_named(tmp_path):
    state = make_state()
    with refused("has an extra head.weight"):
        opened(save(tmp_path, {**state, "head.weight": torch.zeros(2)}))
    with refused("has no norm.bias"):
        opened(save(tmp_path, {name: value for name, value in state.items() if name != "norm.bias"}))
    with refused("has blocks.1.ls1.gamma of shape"):
        opened(save(tmp_path, {**state, "blocks.1.ls1.gamma": torch.zeros(3)}))
    with refused("no multiple of 64"):
        narrow = {"patch_embed.proj.weight": torch.zeros(8, 3, 4, 4), "blocks.0.mlp.fc2.weight": torch.zeros(8, 8)}
        opened(save(tmp_path, {"pos_embed": torch.zeros(1, 10, 8), **narrow}))
    with refused("has blocks.0.mlp.fc1.weight of shape"):  # no memory is needed for what it says
        opened(save(tmp_path, {**state, "blocks.0.mlp.fc2.weight": torch.zeros(0, 2**39)}))
    with refused("describe many more weights than the"):
        opened(save(tmp_path, {**state, **{f"blocks.{i}.x": torch.zeros(0) for i in range(2000)}}))
    with refused("which is no tensor of plain values"):
        opened(save(tmp_path, {**state, "norm.bias": torch.zeros(1).expand(10**6, 10**6)}))
    with refused("images of 3 pixels are smaller than one patch of .*dino.pth, which has 4.*alignment_image_size"):
        opened(save(tmp_path, state), size=3)
    with refused("which has 4: give another encoder as perceptual_path"):
        open_encoder(save(tmp_path, state), CPU, "perceptual_path", 16, size=3)
    with refused("holds a generator, but a classifier, a vit_clip or a semantic is required"):
        opened(make_file(tmp_path))


def test_a_classifier_gives_what_it_pools_at_t_0(tmp_path):
    path = make_classifier_file(tmp_path)
    encoder, clip = opened(path), open_network(path, "classifier").load(CPU)
    images, t = pixels(2, 3, 16, 16), torch.zeros(2)
    found, pooled = encoder(images), []
    clip.pool.register_forward_pre_hook(lambda module, inputs: pooled.append(inputs[0]))
    clip.encode_image(images, t)
    assert torch.equal(found, pooled[0]) and found.shape[1] == encoder.channels == 32
    clip.encode_image(images, t + 9)
    assert not torch.allclose(found, pooled[1])
    assert encoder(pixels(2, 3, 24, 24)).shape == encoder(pixels(2, 1, 40, 24)).shape == found.shape
    with refused("alignment_image_size is 8, but .* takes images of 16 pixels alone: leave it out"):
        opened(path, size=8)


def test_encoders_are_frozen_and_pass_gradients_on_to_images():
    torch.manual_seed(0)
    shape = {"image_width": 16, "image_heads": 2, "text_width": 16, "text_heads": 2, "image_depth": 2, "text_depth": 1}
    vit = VitClip(VitClipConfig(image_size=8, patch_size=4, timesteps=5, dim=8, token_rows=20, **shape))
    for network in (clip_making.make_clip(classifier_dropout=0.5), vit):
        encoder = PatchEncoder(network.train(), 8, 8, square=True)
        images = pixels(2, 3, 16, 8).requires_grad_()
        encoder(images).square().sum().backward()
        assert images.grad.any() and not any(each.training for each in encoder.network.modules())
        assert all(p.grad is None and not p.requires_grad for p in encoder.parameters())
        assert torch.equal(encoder(images), encoder(images))
    states = vit.image_tower.states(pixels(2, 3, 8, 8), torch.zeros(2))
    assert_close(to_tokens(vit.feature_map(pixels(2, 3, 8, 8))), states[:, 1:])
    assert_close(vit.image_tower(pixels(2, 3, 8, 8), torch.zeros(2)), vit.image_tower.proj(states[:, 0]))


def test_the_identity_is_that_of_the_weights(tmp_path):
    state = make_state()
    one, same = opened(save(tmp_path, state)), opened(save(tmp_path, state, "b.safetensors"))
    other = opened(save(tmp_path, {**state, "cls_token": state["cls_token"] + 1}, "c.pth"))
    assert one.identity == same.identity != other.identity
