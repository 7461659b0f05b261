"""The transformer: a denoiser on large patches of pixels, in place of the U-Net (Li & He 2025, JiT)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batch import Conditioning
from ..config import Fault, faults_of, named, option, settings
from ..randomness import splitmix64
from .attention import themselves
from .dropout import number_dropouts
from .layers import to_image, to_tokens, zero_init
from .options import blocks_option, width_option
from .precision import autocast_disabled
from .transformer_blocks import SIGNALS, TransformerBlock, modulated_norm, turns
from .unet import Embedded, UNetConfig, check_control

IN_TRANSFORMER = ("network", "transformer")
ROUTED = ("route_share",)


@settings
class DenoiserConfig(UNetConfig):
    """Network"""

    network: str = option(
        "unet",
        "architecture: the U-Net, or a transformer on patches of patch_size pixels (JiT), whose width is num_channels",
        choices=("unet", "transformer"),
    )
    depth: int = blocks_option(12, "blocks of the transformer", needs=IN_TRANSFORMER)
    separate_blocks: int = blocks_option(
        0,
        "number of first transformer blocks with separate weights for image and text tokens (MM-DiT); later ones share",
        least=0,
        needs=IN_TRANSFORMER,
    )
    patch_channels: int = width_option(
        0,
        "bottleneck channels of the transformer's patch embedding; 0 = none (JiT: 128)",
        least=0,
        needs=IN_TRANSFORMER,
    )
    position_patches: int = width_option(
        0,
        "patches per side for which the transformer's positions were trained: other image sizes are rescaled to it, "
        "by the geometric mean of both sides; 0 = not rescaled",
        least=0,
        needs=IN_TRANSFORMER,
    )

    route_share: float = option(
        0.0,
        "share of image tokens that skip some transformer blocks in training, redrawn for each sample and update "
        "(TREAD: 0.5); 0 = none",
        least=0,
        below=1,
        needs=IN_TRANSFORMER,
    )
    route_blocks: tuple[int, ...] = blocks_option(
        (),
        "FIRST,END of the blocks they skip, counted from 0, END excluded; empty = all but the first 2 and the last 4",
        least=0,
        length=2,
        needs=ROUTED,
    )
    route_until: float = option(
        1.0,
        "share of the run's iterations or samples after which all tokens take all blocks; 1 = never",
        above=0,
        most=1,
        needs=ROUTED,
    )

    def faults(self) -> Iterator[Fault]:
        if not self.is_transformer:
            yield from super().faults()
            return
        yield from faults_of(lambda: self.check_size(self.image_size, self.image_size))
        if self.separate_blocks and self.separate_blocks >= self.steered:  # the last one's text would go nowhere
            rule = f"must be below half of {named('depth')} ({self.depth}), of the blocks that a ControlNet copies"
            yield Fault.of(self, "separate_blocks", rule)
        first, end = self.routed
        if self.route_share and not first < end < self.depth:
            rule = f"must be two increasing numbers below {named('depth')} ({self.depth})"
            yield Fault("route_blocks", rule, f"{first},{end}")
        width = self.num_channels / self.heads(self.num_channels)
        if width % 4:
            name = "num_heads" if self.num_head_channels == -1 else "num_head_channels"
            rule = f"must give heads of a multiple of 4 channels, for positions of rows and columns, not of {width:g}"
            yield Fault.of(self, name, rule)

    @property
    def is_transformer(self) -> bool:
        return self.network == "transformer"

    @property
    def steered(self) -> int:
        """How many of the transformer's blocks a ControlNet copies and steers, from the first on."""
        return (self.depth + 1) // 2

    @property
    def routed(self) -> tuple[int, int]:
        """The first block that tokens skip, and the one before which they return."""
        first, end = self.route_blocks or (2, self.depth - 4)
        return first, end

    @property
    def emb_width(self) -> int:
        return self.num_channels if self.is_transformer else super().emb_width

    @property
    def divisor(self) -> int:
        levels = 1 if self.is_transformer else self.levels
        return self.patch_size * 2 ** (levels - 1)  # not the property of super(), which torch.compile cannot trace

    @property
    def _divisor_rule(self) -> str:
        if not self.is_transformer:
            return super()._divisor_rule
        return f"{named('patch_size')} ({self.patch_size}); change one of them"


class Route:
    """The image tokens that take a span of blocks: a random share of them, with the text; the others skip it and keep
    what they are (Krause et al. 2025, TREAD).

    keys: [N] int64; images: the number of image tokens; share: of those that skip.
    """

    def __init__(self, keys: Tensor, images: int, share: float):
        self.images, self.kept = images, max(1, round((1 - share) * images))
        order = splitmix64(keys, images).argsort(1)
        self.index = order[:, : self.kept].sort(1).values[:, :, None]

    def taken(self, tokens: Tensor) -> Tensor:
        """[N, T + S, C] → [N, kept + S, C]."""
        found = tokens.gather(1, self.index.expand(-1, -1, tokens.shape[2]))
        return torch.cat([found, tokens[:, self.images :]], 1)

    def turns(self, turn: Tensor) -> Tensor:
        """[2, T + S, D] → [2, N, kept + S, D]; see ``turned_norm``."""
        return torch.stack([self.taken(each.expand(len(self.index), -1, -1)) for each in turn])

    def mask(self, mask: Tensor | None) -> Tensor | None:
        """[N, T + S] → [N, kept + S]: every image token is attended to."""
        return None if mask is None else mask[:, self.images - self.kept :]

    def returned(self, tokens: Tensor, before: Tensor) -> Tensor:
        """The image tokens that took the span in their places, and those of ``before`` in theirs: [N, T, C]."""
        index = self.index.expand(-1, -1, tokens.shape[2])
        return before[:, : self.images].scatter(1, index, tokens[:, : self.kept])


class TransformerTrunk(Embedded):
    """Patch embedding and blocks. Arguments: see ``UNetEncoder``.

    depth: how many of the config's blocks it has; 0 = all.

    Attributes: ``channels``, output channels; ``skip_channels``, channels of each earlier feature map.
    """

    full_precision = (*Embedded.full_precision, "modulation")
    config: DenoiserConfig

    def __init__(
        self,
        config: DenoiserConfig,
        in_channels: int = 3,
        text_width: int = 0,
        cond_emb: nn.Module | None = None,
        depth: int = 0,
    ):
        super().__init__(config, text_width, cond_emb)
        self.channels = config.num_channels
        width, heads, patch = self.channels, config.heads(self.channels), in_channels * config.patch_size**2
        self.head_channels = width // heads
        if config.patch_channels:
            bottleneck = nn.Linear(patch, config.patch_channels, bias=False)
            self.patch_emb: nn.Module = nn.Sequential(bottleneck, nn.Linear(config.patch_channels, width))
        else:
            self.patch_emb = nn.Linear(patch, width)
        self.token_emb = nn.Linear(text_width, width) if text_width else None
        self.modulation = zero_init(nn.Linear(config.emb_width, SIGNALS * width))
        depth, separate = depth or config.depth, config.separate_blocks if text_width else 0
        self.skip_channels = [width] * (depth - 1)
        self.blocks = nn.ModuleList(
            TransformerBlock(width, heads, config.dropout, i < separate, config.use_checkpoint) for i in range(depth)
        )
        self.maps = nn.ModuleList(nn.Identity() for _ in self.blocks)  # the blocks' outputs for the image, to be hooked
        for block in self.blocks.modules():
            if isinstance(block, nn.Linear):
                nn.init.xavier_uniform_(block.weight)
                nn.init.zeros_(block.bias)
        number_dropouts(self)

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        cond: Conditioning,
        hint: Tensor | None = None,
        control: Sequence[Tensor | None] | None = None,
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """x: [N, in_channels, H, W]; t: [N]; hint: added to the embedded patches; control: what is added to the image
        tokens after each of the first blocks.

        Returns the output [N, channels, H / patch_size, W / patch_size], the feature maps after all earlier blocks, and
        the embedding. Errors: see ``UNetEncoder``.
        """
        config = self.config
        config.check_size(*x.shape[2:])
        emb = self.embed(t, cond)
        x = F.pixel_unshuffle(x, config.patch_size)
        size = x.shape[2:]
        tokens = self.patch_emb(to_tokens(x))
        if hint is not None:
            tokens = tokens + to_tokens(hint).to(tokens.dtype)
        images, turn = tokens.shape[1], turns(self._positions(size, x.device), self.head_channels)
        if self.token_emb is not None:
            text = self.token_emb(cond.text_states)
            tokens = torch.cat([tokens, text.to(tokens.dtype)], 1)
            turn = F.pad(turn, (0, 0, 0, text.shape[1]))
            turn[0, images:] = 1  # text is not turned: its encoder knows the positions
        with autocast_disabled(x.device):
            common = self.modulation(emb).unflatten(1, (SIGNALS, -1))
        mask, maps = self._mask(images, cond), []
        if control is not None:
            shape = len(x), self.channels, *size
            check_control(control, [shape] * config.steered, "one for each block of the first half")
        first, end = (-1, -1) if cond.routing_keys is None else config.routed
        whole, route, image = (images, turn, mask), None, tokens
        place = whole
        for i, (block, named_map, added) in enumerate(itertools.zip_longest(self.blocks, self.maps, control or ())):
            if i == first and cond.routing_keys is not None:
                route, before = Route(cond.routing_keys, images, config.route_share), tokens
                tokens, place = route.taken(tokens), (route.kept, route.turns(turn), route.mask(mask))
            elif i == end and route is not None:
                tokens, place, route = torch.cat([image, tokens[:, route.kept :]], 1), whole, None
            tokens = block(tokens, place[0], common, place[1], place[2], cond.dropout_keys)
            if added is not None:
                tokens = tokens + F.pad(to_tokens(added).to(tokens.dtype), (0, 0, 0, tokens.shape[1] - images))
            image = tokens[:, :images] if route is None else route.returned(tokens, before)
            maps.append(named_map(to_image(image, size)))
        return maps[-1], maps[:-1], emb

    def _positions(self, size: Sequence[int], device: torch.device) -> Tensor:
        """[T, 2], row and column of each patch from the image's center, as many as ``position_patches`` says."""
        scale = self.config.position_patches / (size[0] * size[1]) ** 0.5 if self.config.position_patches else 1
        axes = (scale * (torch.arange(length, device=device) - (length - 1) / 2) for length in size)
        return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, 1)

    def _mask(self, images: int, cond: Conditioning) -> Tensor | None:
        """Which keys tokens attend to, as in ``attend``: where ``cond.perturbed``, patches to themselves and the text,
        and text to the text."""
        real = None if self.token_emb is None else cond.states_mask
        keys = None if real is None else F.pad(real, (images, 0), value=True)
        if cond.perturbed is None:
            return keys
        texts = 0 if real is None else real.shape[1]
        own = themselves(cond.perturbed, images, texts)
        if real is None or keys is None:
            return own
        of_text = F.pad(~cond.perturbed[:, None, None].expand(-1, texts, images), (0, texts), value=True)
        return torch.cat([own, of_text], 1) & keys[:, None]


class Transformer(nn.Module):
    """A transformer on patches with text tokens joined, a denoiser whose output is 0 at initialization.

    RMS norms, queries and keys with norms, rotary positions of rows and columns, SwiGLU (Li & He 2025, JiT).
    Arguments: see ``UNetEncoder``.
    """

    full_precision = ("out_modulation", "out", "pixel_conv")  # see ``for_inference``

    def __init__(
        self,
        config: DenoiserConfig,
        in_channels: int = 3,
        out_channels: int = 3,
        text_width: int = 0,
        cond_emb: nn.Module | None = None,
    ):
        super().__init__()
        self.config = config
        self.middle_block = f"encoder.maps.{config.steered - 1}"  # a dotted name; see ``tasks.alignment``
        self.encoder = TransformerTrunk(config, in_channels, text_width, cond_emb)
        width, channels = config.num_channels, config.output_conv
        self.out_modulation = zero_init(nn.Linear(config.emb_width, 2 * width))
        self.out = nn.Linear(width, (channels or out_channels) * config.patch_size**2)
        self.pixel_conv = zero_init(nn.Conv2d(channels, out_channels, 3, padding=1)) if channels else None
        if self.pixel_conv is None:
            zero_init(self.out)
        number_dropouts(self)

    def forward(
        self, x: Tensor, t: Tensor, cond: Conditioning | None = None, control: Sequence[Tensor | None] | None = None
    ) -> Tensor:
        """x: [N, in_channels, H, W]; t: [N]. Returns [N, out_channels, H, W] float32. Errors: see ``UNetEncoder``.

        control: what is added to the image tokens after each of the first blocks, as feature maps; None = nothing.
        """
        h, _, emb = self.encoder(x, t, cond or Conditioning(), None, control)
        size = h.shape[2:]
        with autocast_disabled(h.device):  # at low noise the prediction needs full precision
            scale, shift = self.out_modulation(emb)[:, None].chunk(2, -1)
            out = self.out(modulated_norm(to_tokens(h).float(), scale, shift))
            out = F.pixel_shuffle(to_image(out, size), self.config.patch_size)
            return out if self.pixel_conv is None else self.pixel_conv(F.silu(out))
