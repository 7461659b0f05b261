"""Low-rank adapters: what they select, that they begin as the identity, and merging."""

import pytest
import torch
from network_making import captions, make_generator, noisy, randomize, seeded
from refusing import refused
from torch import nn
from torch.testing import assert_close

from diff_dalle.models.adapters.lora import Adapted, add_low_rank, merge_low_rank, select_modules
from diff_dalle.models.noised_clip import NoisedClip, NoisedClipConfig
from diff_dalle.training.optim import OptimConfig, build_optimizer


class Layers(nn.Module):
    """One layer of every kind that can be adapted."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 8)
        self.words = nn.Conv1d(8, 8, 3, padding=1)
        self.point, self.conv = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up, self.norm = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.LayerNorm(8)

    def forward(self, x):
        h = self.norm(self.linear(x))
        h = self.words(h.transpose(1, 2)).unflatten(2, (2, 2))
        return self.up(self.depthwise(self.conv(self.point(h))))


NAMES = ["linear", "words", "point", "conv", "depthwise", "up"]
INPUT = seeded(2, 4, 6, seed=1)


def pairs_of(adapted: Adapted) -> dict[str, torch.Tensor]:
    return {name.removeprefix("lora."): value for name, value in adapted.state_dict().items()}


def test_every_kind_of_layer_is_adapted_and_nothing_changes_before_training():
    before = Layers()(INPUT)
    adapted = Adapted(Layers(), [""], rank=2, alpha=3.0)
    assert set(pairs_of(adapted)) == {f"{name}.{part}" for name in NAMES for part in ("lora_down", "lora_up")}
    assert torch.equal(adapted(INPUT), before)
    adapted(INPUT).square().sum().backward()
    for name, parameter in adapted.named_parameters():
        assert parameter.grad is not None and parameter.dtype is torch.float32
        assert parameter.grad.any() == name.endswith("up")  # up is 0, so that down has no effect yet
    assert all(p.grad is None for n, p in adapted.base.named_parameters() if "lora" not in n)


def test_the_published_recipe_begins_with_up():
    """up N(0, 1), down 0: the identity too, whose first updates are those of down."""
    adapted = Adapted(Layers(), [""], rank=400, alpha=1.0, recipe="published")
    assert torch.equal(adapted(INPUT), Layers()(INPUT))
    ups = torch.cat([value.flatten() for name, value in pairs_of(adapted).items() if name.endswith("up")])
    assert ups.mean().abs() < 0.02 and (ups.std() - 1).abs() < 0.02
    adapted(INPUT).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() == name.endswith("down") for name, p in adapted.named_parameters())


@pytest.mark.parametrize("name", NAMES)
def test_merging_equals_the_adapter_and_can_be_undone(name):
    adapted = randomize(Adapted(Layers(), [name], rank=2, alpha=3.0))
    with torch.no_grad():
        changed, plain = adapted(INPUT), Layers()
        before = plain(INPUT)
        merge_low_rank(plain, pairs_of(adapted), 3.0 / 2)
        assert (changed - before).abs().max() > 1e-3
        assert_close(plain(INPUT), changed, rtol=1e-5, atol=1e-6)
        merge_low_rank(plain, pairs_of(adapted), -3.0 / 2)
        assert_close(plain(INPUT), before, rtol=1e-5, atol=1e-6)


def test_the_change_is_alpha_by_rank_times_up_times_down():
    adapted = randomize(Adapted(Layers(), ["conv"], rank=2, alpha=5.0))
    pairs, plain = pairs_of(adapted), Layers().conv.weight
    expected = plain + 2.5 * (pairs["conv.lora_up"] @ pairs["conv.lora_down"]).view(8, 8, 3, 3)
    assert_close(adapted.base.conv.weight, expected)


def test_the_pairs_stay_in_fp32_over_a_base_in_half_precision_and_under_autocast():
    base = Layers().bfloat16()
    adapted = randomize(Adapted(base, ["linear"], rank=2, alpha=2.0))
    assert {p.dtype for p in adapted.parameters()} == {torch.float32}
    pairs = pairs_of(adapted)
    change = pairs["linear.lora_up"] @ pairs["linear.lora_down"]
    expected = (Layers().linear.weight.bfloat16().float() + change).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(base.linear.weight, expected)


def test_several_merge_in_any_order_with_weights():
    first, second = (pairs_of(randomize(Adapted(Layers(), [""], rank=2, alpha=2.0), seed)) for seed in (1, 2))
    one, other, none = Layers(), Layers(), Layers()
    merge_low_rank(one, first, 0.8)
    merge_low_rank(one, second, 0.3)
    merge_low_rank(other, second, 0.3)
    merge_low_rank(other, first, 0.8)
    with torch.no_grad():
        assert_close(one(INPUT), other(INPUT), rtol=1e-5, atol=1e-6)
        assert (one(INPUT) - none(INPUT)).abs().max() > 1e-3


def test_filters_select_by_parts_of_dotted_names():
    network = make_generator()
    names = select_modules(network, [".text_attention", "time_emb.0"])
    assert "unet.encoder.time_emb.0" in names and "unet.encoder.time_emb.2" not in names
    assert any(name.endswith("text_attention.kv") for name in names)
    assert not any("text_encoder" in name for name in names)


@pytest.mark.parametrize(
    ("text", "nearest"), [("atention", "attention"), (".text_atention", ".text_attention"), ("token_emb", "")]
)
def test_a_filter_that_hits_nothing_is_refused_with_the_nearest_name(text, nearest):
    with refused(f"module_filters has '{text}'.*did you mean {nearest}"):
        select_modules(make_generator(), ["attention", text])


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ({"liner.lora_down": (2, 6), "liner.lora_up": (8, 2)}, "it adapts liner; did you mean linear"),
        ({"linear.lora_down": (2, 6)}, "it adapts linear"),
        ({"linear.lora_down": (2, 5), "linear.lora_up": (8, 2)}, r"weight 8×6 of linear it has \(8, 2\) times \(2, 5"),
        ({"linear.lora_down": (3, 6), "linear.lora_up": (8, 2)}, "weight 8×6 of linear"),
    ],
)
def test_pairs_of_another_network_are_refused(pairs, words):
    with refused(words):
        merge_low_rank(Layers(), {name: torch.zeros(shape) for name, shape in pairs.items()}, 1.0)


def test_the_base_is_frozen_without_dropout_and_without_a_place_in_the_optimizer():
    base = make_generator(dropout=0.5)
    adapted = Adapted(base.train(), ["attention"], rank=2, alpha=2.0).train()
    assert not base.training and not any(p.requires_grad for n, p in base.named_parameters() if "lora" not in n)
    optimizer = build_optimizer(OptimConfig(weight_decay=0.1), adapted)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in adapted.parameters()}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1]
    x, t = noisy(2)
    adapted(x, t, cond=captions((3, 7))).square().mean().backward()
    optimizer.step()
    assert sum(len(state) > 0 for state in optimizer.state.values()) == len(list(adapted.parameters()))
    assert all(p.grad is None for n, p in base.named_parameters() if "lora" not in n)


def test_an_adapted_classifier_has_the_methods_of_its_base():
    config = NoisedClipConfig(16, 8, 1, (1, 2), (8,), 2, classifier_enc_attn_dim=12, classifier_enc_depth=1,
                              classifier_enc_heads=2, text_length=8)  # fmt: skip
    torch.manual_seed(0)
    clip = NoisedClip(config, 50)
    x, t = noisy(2)
    before = clip.encode_image(x, t)
    adapted = Adapted(clip, ["image_tower", "pool"], 2, 2.0)
    assert torch.equal(adapted.encode_image(x, t), before) and adapted.config is config
    randomize(adapted)
    assert not torch.allclose(adapted.encode_image(x, t), before, atol=1e-3)
    with pytest.raises(AttributeError, match="encode_sound"):
        adapted.encode_sound  # noqa: B018


def test_nothing_is_adapted_twice_by_two_filters_that_hit_the_same():
    assert len(add_low_rank(Layers(), ["linear", "lin"], 1, 1.0)) == 1
