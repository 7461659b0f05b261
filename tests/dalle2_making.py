"""U-Nets and decoders in the layout of DALLE2-pytorch, written after its description."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F


class Norm(nn.Module):
    """Over the channels of tokens, or of feature maps."""

    def __init__(self, width, maps=False):
        super().__init__()
        self.dim = 1 if maps else -1
        self.g = nn.Parameter(torch.ones(1, width, 1, 1) if maps else torch.ones(width))

    def forward(self, x):
        centered = x - x.mean(self.dim, keepdim=True)
        return centered / (centered.square().mean(self.dim, keepdim=True) + 1e-5).sqrt() * self.g


class Attention(nn.Module):
    """To a context with as many heads, or of tokens to themselves with one head of keys, scaled twice."""

    def __init__(self, width, context, heads, head, cosine):
        super().__init__()
        self.heads, self.cosine, self.own = heads, cosine, context is None
        self.norm, self.null_kv = Norm(width), nn.Parameter(torch.randn(2, head))
        self.to_q = nn.Linear(width, heads * head, bias=False)
        self.to_kv = nn.Linear(context or width, 2 * head * (1 if self.own else heads), bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * head, width, bias=False), Norm(width))

    def forward(self, x, context=None):
        x = self.norm(x)
        q, (k, v) = self.to_q(x), self.to_kv(x if self.own else context).chunk(2, -1)
        q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (each.unflatten(-1, (1 if self.own else self.heads, -1)).transpose(1, 2) for each in (k, v))
        k, v = (
            torch.cat([null.expand(*each.shape[:2], 1, -1), each], 2)
            for null, each in zip(self.null_kv, (k, v), strict=True)
        )
        scale = 16.0 if self.cosine else q.shape[-1] ** (-1.0 if self.own else -0.5)
        if self.cosine:
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        weights = (scale * q @ k.transpose(-1, -2)).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


class Sequence(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, x.shape[2:])


class Residual(Sequence):
    def forward(self, x):
        return x + self.fn(x)


class Linear(nn.Module):
    def __init__(self, width, heads, head):
        super().__init__()
        self.heads, self.norm = heads, Norm(width, True)
        self.to_qkv = nn.Conv2d(width, 3 * heads * head, 1, bias=False)
        self.to_out = nn.Sequential(nn.Conv2d(heads * head, width, 1, bias=False), Norm(width, True))

    def forward(self, x):
        q, k, v = (
            each.unflatten(1, (self.heads, -1)).flatten(3).transpose(2, 3)
            for each in self.to_qkv(self.norm(x)).chunk(3, 1)
        )
        count = k.shape[2]
        q, k, v = q.softmax(-1) * q.shape[-1] ** -0.5, k.softmax(2) / count**0.5, F.normalize(v, dim=-1) / count**0.5
        out = (q @ (k.transpose(2, 3) @ v)).transpose(2, 3).flatten(1, 2).unflatten(2, x.shape[2:])
        return self.to_out(F.gelu(out))


class Half(nn.Module):
    def __init__(self, channels, out, groups):
        super().__init__()
        self.project, self.norm = nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(groups, out)

    def forward(self, x, scale=0.0, shift=0.0):
        return F.silu(self.norm(self.project(x)) * (scale + 1) + shift)


class Block(nn.Module):
    def __init__(self, channels, out, emb, groups, context=None, cosine=False):
        super().__init__()
        self.time_mlp = nn.Sequential(nn.SiLU(), nn.Linear(emb, 2 * out))
        self.cross_attn = Attention(out, context, 8, 64, cosine) if context else None
        self.block1, self.block2 = Half(channels, out, groups), Half(out, out, groups)
        self.res_conv = nn.Identity() if channels == out else nn.Conv2d(channels, out, 1)

    def forward(self, x, t, cond=None):
        scale, shift = self.time_mlp(t)[..., None, None].chunk(2, 1)
        h = self.block1(x, scale, shift)
        if self.cross_attn is not None:
            tokens = h.flatten(2).transpose(1, 2)
            h = (tokens + self.cross_attn(tokens, cond)).transpose(1, 2).unflatten(2, h.shape[2:])
        return self.block2(h) + self.res_conv(x)


class Waves(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.half = width // 2

    def forward(self, t):
        rates = torch.exp(torch.arange(self.half) * (-math.log(10000) / (self.half - 1)))
        return torch.cat([(t[:, None] * rates).sin(), (t[:, None] * rates).cos()], 1)


class Cross(nn.Module):
    def __init__(self, channels, out, sizes, stride):
        super().__init__()
        widths = [out // 2**i for i in range(1, len(sizes))]
        self.convs = nn.ModuleList(
            nn.Conv2d(channels, width, size, stride, (size - stride) // 2)
            for size, width in zip(sizes, [*widths, out - sum(widths)], strict=True)
        )

    def forward(self, x):
        return torch.cat([conv(x) for conv in self.convs], 1)


class Shuffle(nn.Module):
    def __init__(self, channels, out):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(channels, 4 * out, 1), nn.SiLU(), nn.PixelShuffle(2))

    def forward(self, x):
        return self.net(x)


class OtherUnet(nn.Module):
    """c: a ``DecoderUnetConfig``. embeds, low_res, level: what conditions it. variance: whether it is learned."""

    def __init__(self, c, embeds=True, low_res=False, level=False, variance=False):
        super().__init__()
        self.c, self.low_res, emb, width = c, low_res, 4 * c.dim, c.cond_dim or c.dim
        images = c.channels * (1 + low_res + c.self_cond)
        if c.init_cross_embed:
            self.init_conv = Cross(images, c.dim, c.init_cross_embed_kernel_sizes, 1)
        else:
            size = c.init_conv_kernel_size
            self.init_conv = nn.Conv2d(images, c.dim, size, padding=size // 2)
        self.to_time_hiddens = nn.Sequential(Waves(c.dim), nn.Linear(c.dim, emb), nn.GELU())
        self.to_time_tokens = nn.Sequential(nn.Linear(emb, width * c.num_time_tokens), nn.Unflatten(1, (-1, width)))
        self.to_time_cond = nn.Sequential(nn.Linear(emb, emb))
        if embeds:
            to_tokens = nn.Linear(c.image_embed_dim, width * c.num_image_tokens)
            self.image_to_tokens = nn.Sequential(to_tokens, nn.Unflatten(1, (-1, width)))
            if c.add_image_embeds_to_time:
                self.to_image_hiddens = nn.Sequential(nn.Linear(c.image_embed_dim, emb), nn.GELU())
        self.norm_cond, self.norm_mid_cond = nn.LayerNorm(width), nn.LayerNorm(width)
        if c.cond_on_text_encodings:
            self.text_to_cond = nn.Linear(c.text_embed_dim, width)
        if level:
            layers = nn.Linear(c.dim, emb), nn.GELU(), nn.Linear(emb, emb)
            self.to_lowres_noise_cond = nn.Sequential(Waves(c.dim), *layers)
        self.null_image_embed = nn.Parameter(torch.randn(1, c.num_image_tokens, width))
        self.null_image_hiddens = nn.Parameter(torch.randn(1, emb))
        self.null_text_embed = nn.Parameter(torch.randn(1, c.max_text_len, width))
        groups, cosine = c.resnet_groups[0], c.cosine_sim_cross_attn

        def over(kind, channels):
            if kind == "linear":
                return Residual(Linear(channels, c.attn_heads, c.attn_dim_head))
            own = Attention(channels, None, c.attn_heads, c.attn_dim_head, c.cosine_sim_self_attn)
            return Sequence(Residual(own)) if kind else nn.Identity()

        def down(channels, out):
            if c.cross_embed_downsample:
                return Cross(channels, out, c.cross_embed_downsample_kernel_sizes, 2)
            return nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(4 * channels, out, 1))

        def up(channels, out):
            if c.pixel_shuffle_upsample:
                return Shuffle(channels, out)
            return nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(channels, out, 3, padding=1))

        stages, early = c.stages, c.memory_efficient
        self.init_resnet_block = Block(c.dim, c.dim, emb, groups) if early else None
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        for i, s in enumerate(stages):
            last, context = i == len(stages) - 1, width if i else None
            blocks = nn.ModuleList(Block(s.width, s.width, emb, groups, context, cosine) for _ in range(s.blocks))
            start = down(s.in_width, s.out_width) if early else None
            end = nn.Conv2d(s.width, s.out_width, 1) if last or early else down(s.width, s.out_width)
            first = Block(s.width, s.width, emb, groups)
            self.downs.append(nn.ModuleList([start, first, blocks, over(s.attention, s.width), end]))
        middle = stages[-1].out_width
        self.mid_block1, self.mid_block2 = (Block(middle, middle, emb, groups, width, cosine) for _ in range(2))
        self.mid_attn = over("self", middle)
        for i, s in reversed(list(enumerate(stages))):
            context = width if i else None
            make = [
                Block(s.out_width + s.width, s.out_width, emb, groups, context, cosine) for _ in range(s.blocks + 1)
            ]
            end = up(s.out_width, s.in_width) if i or early else nn.Identity()
            self.ups.append(nn.ModuleList([make[0], nn.ModuleList(make[1:]), over(s.attention, s.out_width), end]))
        self.final_resnet_block = Block(2 * c.dim, c.dim, emb, groups)
        out, size = c.channels * (1 + variance), c.final_conv_kernel_size
        self.to_out = nn.Conv2d(c.dim + c.channels * low_res, out, size, padding=size // 2)

    def forward(self, x, t, embed=None, text=None, low_res=None, level=None, kept=None):
        """kept: of which samples the conditions are not dropped."""
        c, kept = self.c, torch.ones(len(x), dtype=torch.bool) if kept is None else kept
        images = [x, *([torch.zeros_like(x)] if c.self_cond else []), *([low_res] if self.low_res else [])]
        h = start = self.init_conv(torch.cat(images, 1))
        hidden = self.to_time_hiddens(t)
        t, tokens = self.to_time_cond(hidden), self.to_time_tokens(hidden)
        if level is not None:
            t = t + self.to_lowres_noise_cond(level)
        if embed is not None:
            if c.add_image_embeds_to_time:
                t = t + torch.where(kept[:, None], self.to_image_hiddens(embed), self.null_image_hiddens)
            own = torch.where(kept[:, None, None], self.image_to_tokens(embed), self.null_image_embed)
            tokens = torch.cat([tokens, own], 1)
        middle = tokens
        if text is not None:
            real = F.pad((text != 0).any(-1), (0, c.max_text_len - text.shape[1])) & kept[:, None]
            own = F.pad(self.text_to_cond(text), (0, 0, 0, c.max_text_len - text.shape[1]))
            middle = torch.cat([tokens, torch.where(real[..., None], own, self.null_text_embed)], 1)
        tokens, middle = self.norm_cond(tokens), self.norm_mid_cond(middle)
        h = h if self.init_resnet_block is None else self.init_resnet_block(h, t)
        skips = []
        for before, first, blocks, attention, after in self.downs:
            h = first(h if before is None else before(h), t)
            for block in blocks:
                h = block(h, t, tokens)
                skips.append(h)
            h = attention(h)
            skips.append(h)
            h = after(h)
        h = self.mid_block2(self.mid_attn(self.mid_block1(h, t, middle)), t, middle)
        scale = 2**-0.5 if c.scale_skip_connection else 1.0
        for first, blocks, attention, after in self.ups:
            for block in (first, *blocks):
                h = block(torch.cat([h, scale * skips.pop()], 1), t, tokens)
            h = after(attention(h))
        h = self.final_resnet_block(torch.cat([h, start], 1), t)
        return self.to_out(torch.cat([h, low_res], 1) if self.low_res else h)


def tables(schedule, steps):
    """Of the buffers of a noise schedule those that matter here; schedule: cosine or linear."""
    if schedule == "linear":
        betas = torch.linspace(0.1 / steps, 20 / steps, steps, dtype=torch.float64)
    else:
        times = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
        kept = torch.cos((times + 0.008) / 1.008 * math.pi / 2) ** 2
        betas = (1 - kept[1:] / kept[:-1]).clamp(0, 0.999)
    kept = (1 - betas).cumprod(0)
    return {
        "betas": betas.float(),
        "alphas_cumprod": kept.float(),
        "log_one_minus_alphas_cumprod": (1 - kept).log().float(),
    }


def decoder_file(unets, schedules, steps):
    """The weights of a decoder of these U-Nets."""
    found = {}
    for i, (unet, schedule) in enumerate(zip(unets, schedules, strict=True)):
        found |= {f"unets.{i}.{name}": value for name, value in unet.state_dict().items()}
        found |= {f"noise_schedulers.{i}.{name}": value for name, value in tables(schedule, steps).items()}
    return found


def trainer_file(unets, averaged, schedules, steps):
    """What the trainer saves. averaged: the U-Nets with EMA weights."""
    ema = {}
    for i, (unet, own) in enumerate(zip(averaged, unets, strict=True)):
        ema |= {f"{i}.ema_model.{name}": value for name, value in unet.state_dict().items()}
        ema |= {f"{i}.online_model.{name}": value for name, value in own.state_dict().items()}
        ema |= {f"{i}.initted": torch.tensor([True]), f"{i}.step": torch.tensor([3])}
    model = decoder_file(unets, schedules, steps)
    return {"model": model, "version": "1.10.0", "step": 3.0, "optim0": {"state": {}, "param_groups": []}, "ema": ema}
