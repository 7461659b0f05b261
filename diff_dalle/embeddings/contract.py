"""The contract of a frozen CLIP: pictures and texts in, embeddings out."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import Fault, InputError
from ..models.adapters.lora import AdaptedEmbedding
from ..models.precision import DTYPES, autocast, autocast_disabled, for_inference
from ..text.trained_tokens import Extensible, TrainedTokens

Tokenize = Callable[[Sequence[str], int], tuple[Tensor, Tensor]]


class Clip(nn.Module, ABC):
    """A frozen CLIP on the device of its network.

    A module, so that a task can have it as a companion, which no checkpoint saves. A subclass says how its network
    encodes; resizing, precision, normalization and padding are the same for all.

    network:       the network in fp32, which is converted to ``precision`` (fp32, bf16 or fp16).
    name:          for people: where it is from.
    identity:      the same for the same weights and arithmetic, wherever they are from. Checkpoints and folders of
                   embeddings record it.
    image_size:    width and height in pixels of the pictures that its network sees.
    tokenize:      ``tokenize(texts, length) -> (tokens, mask)`` [N, length]; mask True = a real token. Can be sent to
                   another process.
    text_length:   tokens of a text, the only length that ``encode_tokens`` takes.
    embed_dim:     width of the embeddings of pictures and of texts.
    text_width:    width of the token states; 0 = its text tower has none to give.
    outputs:       "unit": embeddings have norm 1, and states are those after the last norm, zeros at padding;
                   "released": embeddings are as projected, and states those before that norm, also at padding, which
                   the released stages of the latent cascade read.
    interpolation: with which pictures of another size are resized, "bicubic" or "bilinear"; antialiased.
    """

    def __init__(
        self,
        network: nn.Module,
        name: str,
        identity: str,
        image_size: int,
        tokenize: Tokenize,
        text_length: int,
        precision: str = "fp32",
        outputs: str = "unit",
        interpolation: str = "bicubic",
    ):
        super().__init__()
        self.name, self.identity, self.image_size = name, identity, image_size
        self.tokenize, self.text_length = tokenize, text_length
        self.precision, self.outputs, self.interpolation = precision, outputs, interpolation
        self.trains_tokens = False
        self.network = for_inference(network, precision).eval().requires_grad_(False)
        embedding, states, _ = self.encode_text([""])
        self.embed_dim, self.text_width = embedding.shape[1], states.shape[2]
        self.eval()

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @abstractmethod
    def image_features(self, images: Tensor) -> Tensor:
        """[N, 3, image_size, image_size] float32 in [-1, 1] → [N, embed_dim], of any norm."""

    @abstractmethod
    def text_features(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and mask [N, text_length] → [N, embed_dim], of any norm, and the states of the tokens before the
        projection that ``outputs`` asks for: [N, text_length, text_width]. States at padding may be anything."""

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        """Pictures [N, C, H, W] in [-1, 1] of any size → [N, embed_dim] float32, as ``outputs`` says.

        Another size is resized so that the shorter side fits, and its center cropped. C = 1 is gray. InputError for
        another number of channels.
        """
        images = fit_images(images.to(self.device).float(), self.image_size, self.interpolation)
        with self._precision():
            features = self.image_features(images)
        return self._embedding(features)

    @property
    def tokenizer(self) -> Extensible:
        """``tokenize``, where tokens can be added. InputError for a CLIP to which none can."""
        rule = f"is set, but the text tower of the CLIP {self.name} is another library's: leave it out"
        raise InputError(Fault("train_tokens", rule))

    def token_table(self) -> tuple[nn.Module, str]:
        """The module with the embedding of tokens of a CLIP that has a ``tokenizer``, and the name of it there."""
        raise NotImplementedError

    def take_tokens(self, tokens: TrainedTokens[Any]) -> AdaptedEmbedding:
        """Have these tokens, which were found in its ``tokenizer``, in ``tokenize`` and in the embedding of tokens,
        which is returned: its ``deltas`` then have a gradient in ``encode_tokens``. All else stays frozen."""
        owner, name = self.token_table()
        embedding = AdaptedEmbedding(getattr(owner, name), tokens.tokenizer.vocab_size, tokens.ids, tokens.sources)
        setattr(owner, name, embedding)
        self.tokenize, self.trains_tokens = tokens.tokenizer, True
        return embedding

    def encode_tokens(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and mask [N, text_length], made by ``tokenize`` → [N, embed_dim] and the states [N, text_length,
        text_width], float32, as ``outputs`` says. InputError for another length."""
        if tokens.shape[1] != self.text_length:
            raise InputError(
                f"{self.name} reads texts of {self.text_length} tokens, but they have {tokens.shape[1]}: tokenize them "
                "to that length"
            )
        mask = mask.to(self.device)
        with torch.set_grad_enabled(self.trains_tokens and torch.is_grad_enabled()):
            with self._precision():
                features, states = self.text_features(tokens.to(self.device), mask)
            padding = ~self.states_mask(mask)
            return self._embedding(features), states.float().masked_fill(padding[:, :, None], 0.0)

    def states_mask(self, mask: Tensor) -> Tensor:
        """Which states of a text with this mask are read: True = this one."""
        return torch.ones_like(mask) if self.outputs == "released" else mask

    def _embedding(self, features: Tensor) -> Tensor:
        return features.float() if self.outputs == "released" else F.normalize(features.float(), dim=1)

    def encode_text(self, texts: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
        """Texts → embeddings and states as ``encode_tokens`` gives them, and the mask [N, text_length] bool of the
        states; longer texts are truncated."""
        tokens, mask = self.tokenize(list(texts), self.text_length)
        return *self.encode_tokens(tokens, mask), self.states_mask(mask.to(self.device))

    def _precision(self):
        """Its own precision, whatever that of the training around it is."""
        half = self.precision in DTYPES
        return autocast(self.precision, self.device) if half else autocast_disabled(self.device)


def fit_images(images: Tensor, size: int, interpolation: str = "bicubic") -> Tensor:
    """Pictures [N, 1 or 3, H, W] in [-1, 1] → [N, 3, size, size] in [-1, 1], as ``Clip.encode_images`` says."""
    channels, height, width = images.shape[1:]
    if channels not in (1, 3):
        raise InputError(f"pictures have {channels} channels, but a CLIP sees 3 (RGB) or 1 (gray)")
    if (height, width) != (size, size):
        short = min(height, width)
        covering = max(size, round(height * size / short)), max(size, round(width * size / short))
        images = F.interpolate(images, covering, mode=interpolation, antialias=True).clamp(-1, 1)
        top, left = (covering[0] - size) // 2, (covering[1] - size) // 2
        images = images[:, :, top : top + size, left : left + size]
    return images.expand(-1, 3, -1, -1)


def weights_digest(weights: Mapping[str, Tensor], arithmetic: str = "") -> str:
    """16 hexadecimal digits that are the same for the same weights and the same text about what is done with them."""
    found = hashlib.sha256(arithmetic.encode())
    for name, value in sorted(weights.items()):
        found.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]
