"""Perturbed attention: where ``Conditioning.perturbed`` is True, each position attends to itself alone."""

from dataclasses import replace

import pytest
import torch
from latent_making import B, C, conditioning, latents, own_text
from latent_making import make as make_latent
from network_making import TRANSFORMER, captions, make_generator, noisy, randomize, seeded
from torch.testing import assert_close

from diff_dalle.batch import Conditioning
from diff_dalle.models.attention import SelfAttention
from diff_dalle.models.decoder.blocks import LinearAttention, MultiQueryAttention
from diff_dalle.models.decoder.config import DecoderUnetConfig
from diff_dalle.models.decoder.unet import DecoderUnet
from diff_dalle.models.latent.blocks import JointAttention

PERTURBED = torch.tensor([True, False, True])
CONTEXT = seeded(3, 4, 6, seed=3)
CONTEXT_MASK = torch.tensor([[True] * 4, [True] * 4, [True, True, False, False]])


def joint(layer, x, perturbed=None):
    mask = torch.cat([torch.ones(x.shape[:2], dtype=torch.bool), CONTEXT_MASK], 1)
    return layer(x, mask, CONTEXT, perturbed)


LAYERS = {
    "self": (lambda: SelfAttention(8, 2), lambda layer, x, perturbed=None: layer(x, perturbed=perturbed)),
    "with context": (lambda: SelfAttention(8, 2, context_width=6), joint),
    "multi-query": (lambda: MultiQueryAttention(8, 3, 5, cosine=False), lambda layer, *given: layer(*given)),
    "cosine": (lambda: MultiQueryAttention(8, 3, 5, cosine=True), lambda layer, *given: layer(*given)),
    "linear": (lambda: LinearAttention(8, 2, 5), lambda layer, *given: layer(*given)),
    "latent": (lambda: JointAttention(8, 2), lambda layer, x, *given: layer(x, None, *given)),
    "latent, joint": (lambda: JointAttention(6, 2), lambda layer, x, *given: layer(x[..., :6], CONTEXT, *given)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_position_attends_to_itself_alone(name):
    """As if it were the only one; of a sample that is not perturbed, to all as ever."""
    torch.manual_seed(0)
    make, call = LAYERS[name]
    layer, x = randomize(make()), torch.randn(3, 5, 8)
    found, plain = call(layer, x, PERTURBED), call(layer, x)
    alone = torch.cat([call(layer, x[:, i : i + 1]) for i in range(5)], 1)
    assert_close(found[PERTURBED], alone[PERTURBED])
    assert_close(found[~PERTURBED], plain[~PERTURBED])
    assert (alone - plain).abs().amax((1, 2)).min() > 1e-2


DECODER = DecoderUnetConfig(dim=8, dim_mults=(1, 2), attn_heads=2, attn_dim_head=4, resnet_groups=(4,), cond_dim=8)
BARE = {"attend_at_middle": False}


def decoder(**settings):
    network = randomize(DecoderUnet(replace(DECODER, **settings), image_embedding=False))
    return network, *noisy(), Conditioning()


def generator(**settings):
    return make_generator(**settings), *noisy(), captions()


def latent(config):
    return make_latent(config), *latents(config), conditioning(config)


NETWORKS = {
    "generator": generator,
    "generator, joint": lambda: generator(text_attention="joint"),
    "generator, middle only": lambda: generator(attention_resolutions=()),
    "generator, checkpointed": lambda: generator(use_checkpoint=True),
    "generator, transformer": lambda: generator(**TRANSFORMER),
    "generator, transformer, checkpointed": lambda: generator(**TRANSFORMER, use_checkpoint=True),
    "decoder": lambda: decoder(self_attn=(False, True)),
    "decoder, linear": lambda: decoder(sparse_attn=(True,), **BARE),
    "decoder, on the way down and up": lambda: decoder(self_attn=(True, False), **BARE),
    "decoder, middle only": decoder,
    "decoder, checkpointed": lambda: decoder(checkpoint_during_training=True),
    "stage B": lambda: latent(own_text(B)),
    "stage C": lambda: latent(C),
    "stage C, checkpointed": lambda: latent(replace(C, use_checkpoint=True)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_perturbs_the_samples_that_it_is_told_to(name):
    """And those alone; the gradient follows."""
    network, x, t, cond = NETWORKS[name]()
    assert getattr(network.config, "unet", network.config).has_self_attention
    plain, x = network(x, t, cond), x.requires_grad_()
    found = network(x, t, replace(cond, perturbed=PERTURBED))
    change = (found - plain).abs().amax((1, 2, 3))
    assert change[PERTURBED].min() > 1e-3 and change[~PERTURBED].max() < 1e-5
    assert_close(network(x, t, replace(cond, perturbed=~PERTURBED))[PERTURBED], plain[PERTURBED])
    assert torch.autograd.grad(found.square().sum(), x)[0].abs().amax((1, 2, 3)).min() > 0


def test_networks_without_self_attention_say_so_and_are_not_changed():
    network, x, t, cond = decoder(**BARE)
    config = replace(C, levels=("C", "C"))
    assert not network.config.has_self_attention and not config.has_self_attention
    assert torch.equal(network(x, t, cond), network(x, t, replace(cond, perturbed=PERTURBED)))
