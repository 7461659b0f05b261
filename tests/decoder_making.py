"""Tiny decoders, and checkpoints of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from network_making import randomize
from torch import nn

from diff_dalle.batch import Conditioning
from diff_dalle.checkpoints.checkpoint import Identity, save_file
from diff_dalle.checkpoints.decoder import DecoderConfig
from diff_dalle.config import to_dict
from diff_dalle.models.decoder.config import DecoderUnetConfig

WIDTH, TEXT_WIDTH, TEXT_LENGTH = 6, 5, 4
UNET = DecoderUnetConfig(
    dim=8,
    dim_mults=(1, 2),
    image_embed_dim=WIDTH,
    cond_dim=8,
    attn_heads=2,
    attn_dim_head=4,
    resnet_groups=(4,),
    num_resnet_blocks=(1,),
    init_cross_embed=False,
    init_conv_kernel_size=3,
)
TINY = DecoderUnetConfig(
    dim=8,
    dim_mults=(1, 2),
    image_embed_dim=6,
    text_embed_dim=5,
    cond_on_text_encodings=True,
    cond_dim=4,
    attn_dim_head=4,
    attn_heads=2,
    max_text_len=7,
    resnet_groups=(4,),
    num_resnet_blocks=(1,),
)
TEXT_UNET = replace(UNET, cond_on_text_encodings=True, text_embed_dim=TEXT_WIDTH, max_text_len=TEXT_LENGTH)


def make_decoder(count: int = 1, unet: DecoderUnetConfig = UNET, **settings) -> DecoderConfig:
    """A decoder of ``count`` U-Nets: 8 pixels, 16, 32."""
    sizes = tuple(8 * 2**i for i in range(count))
    return DecoderConfig(**{"unets": (unet,) * count, "image_sizes": sizes, "timesteps": 50, **settings})


def decoder_conditions(config: DecoderUnetConfig = TINY, n: int = 3, seed: int = 2, size=(16, 16)) -> Conditioning:
    """All conditions; texts of several lengths; the last sample of several has neither embedding nor text."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator)
    full = Conditioning(
        image_embedding=draw(n, config.image_embed_dim),
        text_states=draw(n, 5, config.text_embed_dim),
        mask=torch.arange(5) < torch.tensor([3, 5, 4] * n)[:n, None],
        low_res=draw(n, config.channels, *(side // 2 for side in size)),
        low_res_level=torch.linspace(0.1, 0.5, n),
        extra={"self_cond": draw(n, config.channels, *size)},
    )
    return full.drop(torch.arange(n) == n - 1) if n > 1 else full


def make_network(decoder: DecoderConfig, i: int = 0) -> nn.Module:
    """U-Net ``i`` with random weights in all layers."""
    torch.manual_seed(i)
    return randomize(decoder.stage(i).build(), seed=i).eval()


def identity(decoder: DecoderConfig) -> Identity:
    return Identity("decoder", {"decoder": to_dict(decoder)})


def save_unet(path, decoder: DecoderConfig, i: int = 0) -> str:
    """A checkpoint of one U-Net, as training writes it."""
    state = make_network(decoder, i).state_dict()
    save_file(str(path), "ema", identity(decoder), 10 + i, 100, state, decoder.names[i])
    return str(path)


def save_decoder(path, decoder: DecoderConfig, gain: float = 1.0) -> str:
    """A checkpoint of all U-Nets together. gain: of the weights that embeddings and texts meet first."""
    networks = nn.ModuleDict({name: make_network(decoder, i) for i, name in enumerate(decoder.names)})
    with torch.no_grad():
        for name, parameter in networks.named_parameters():
            if ".image." in name or ".text." in name:
                parameter *= gain
    save_file(str(path), "ema", identity(decoder), 10, 100, networks.state_dict())
    return str(path)
