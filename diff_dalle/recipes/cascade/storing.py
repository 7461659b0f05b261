"""Storing what frozen networks make of every sample of stage B or C: ``prepare_data.py latents``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...config import Fault, InputError, named, option, settings
from ...config.bounds import MAX_BATCH
from ...data.captions import is_drawn
from ...data.collection import Raw
from ...data.loader import Loader
from ...data.samples import Samples
from ...data.spec import SampleSpec
from ...distributed.world import World
from ...embeddings.computing import make_embeddings
from ...embeddings.material import EmbeddingsConfig, Material
from ...embeddings.sources import NAMES
from ...images.signal import from_uint8
from ...models.precision import autocast, training_precision
from ..recipe import spelled_as_in_file
from .file import PRECISIONS, data_of
from .session import sample_spec
from .stages import LatentRun, with_frozen
from .stored import DTYPE, SETTING, Condition, is_text


@settings
class LatentsConfig:
    """Computing latents"""

    run: str = option(
        "", f"file of train_cascade.py for a stage B or C, with {SETTING}, the output folder, local or remote"
    )
    what: tuple[str, ...] = option(
        (),
        "what to compute: latents (stage_a, semantic), caption embeddings (text, text_states), image embeddings "
        "(image); none = all that the run needs and that are the same in every epoch",
        choices=NAMES,
    )
    dtype: str = option(DTYPE, "data type of the files", choices=("float16", "float32"))
    batch_size: int = option(EmbeddingsConfig.batch_size, "samples to encode at once", least=1, most=MAX_BATCH)

    def faults(self) -> Iterator[Fault]:
        if not self.run:
            yield Fault("run", "is not set: name the file of a run")


def compute_latents(config: LatentsConfig, run: LatentRun, world: World) -> list[str]:
    """Write what the run's frozen networks make of its training samples into ``latents_path``, a folder for each kind
    as ``embeddings.computing.compute_embeddings`` writes embeddings, and goes on like that. Every rank calls it.
    Returns lines about what was made.

    Raises InputError for a run without ``latents_path``, or that nothing can be stored for.
    """
    with spelled_as_in_file(type(run)):
        if not run.latents_path:
            raise InputError(Fault(SETTING, "is not set: name the folder for what is to be stored"))
        run, frozen = with_frozen(run, world)
        conditions = {each.what: each for each in run.storable(frozen)}
    if absent := [what for what in config.what if what not in conditions]:
        rule = f"has {absent[0]}, but of this run only {', '.join(conditions)} can be stored: leave it out"
        raise InputError(Fault("what", rule))
    chosen = [each for what, each in conditions.items() if what in (config.what or conditions)]
    if left := [what for what in run.needed if what not in {each.what for each in chosen}]:
        world.print(f"Not stored, and made in every step: {', '.join(left)}.")
    with spelled_as_in_file(type(run)):
        spec = sample_spec(run, frozen.text_clip, run.recipe(world.size).tokenizer())
        material = _Conditions(config, run, spec, chosen, world)
    return make_embeddings(material, world)


class _Conditions(Material):
    """The samples of a run as training reads them, of which nothing may be random."""

    one = "an image or a caption"
    place = f"{SETTING} in the file of the run"
    apart = "give the shards different names"
    finer = f"set {named('dtype')} float32, or float32 as dtype in the file of the run"

    def __init__(
        self, config: LatentsConfig, run: LatentRun, spec: SampleSpec, conditions: Sequence[Condition], world: World
    ):
        texts = [each for each in conditions if is_text(each.what)]
        self.conditions, self.has_text, self.device = conditions, bool(texts), world.device
        assert spec.image is not None
        spec = replace(spec, image=replace(spec.image, read=len(texts) < len(conditions)))
        loader = Loader(data_of(run), spec, run.loop.seed, device=world.device, world=world)
        self.samples = Samples(loader.collection, loader.order, replace(loader.dataset.recipe, augment=False))
        precision = training_precision(PRECISIONS[run.dtype] if run.dtype else "auto", world.device)
        records = {each.what: replace(each.record, dtype=config.dtype) for each in conditions}
        out_dir, size = run.latents_path or "", config.batch_size
        super().__init__(out_dir, size, loader.collection, records, precision, world.device)

    def ordered(self, shard: int, members: list[int]) -> list[int]:
        """By the sizes of their images, so that a batch has few."""
        return sorted(members, key=lambda member: self.samples.size_of(shard, member))

    def read(self, shard: int, member: int, raw: Raw) -> tuple[np.ndarray, str]:
        """Pixels and caption. InputError for a caption that each epoch draws anew."""
        kind, field = self.samples.caption_kind, self.samples.recipe.config.caption_field
        if self.has_text and is_drawn(raw.members[kind], field):
            rule = f"{self.collection.describe(shard, member)} has several captions, of which each epoch draws one"
            raise InputError(f"{rule}: leave the text out, by {named('what')}")
        return self.samples.unaugmented(shard, member, raw)

    def encode(self, parts: Sequence[tuple[np.ndarray, str]]) -> Mapping[str, np.ndarray]:
        groups = [list(group) for _, group in itertools.groupby(parts, lambda part: part[0].shape)]
        found = [self._encoded(group) for group in groups]
        return {what: np.concatenate([each[what] for each in found]) for what in self.records}

    @torch.no_grad()
    def _encoded(self, parts: Sequence[tuple[np.ndarray, str]]) -> dict[str, np.ndarray]:
        """Of images of one size."""
        images = from_uint8(torch.from_numpy(np.stack([pixels for pixels, _ in parts])).to(self.device))
        texts, found = [text for _, text in parts], dict[str, Tensor]()
        with autocast(self.precision, self.device):
            for make, each in {each.make: each for each in self.conditions}.items():
                found |= make(texts if is_text(each.what) else images)
        values = {}
        for each in self.conditions:
            value = found[each.what].float().cpu().numpy()
            values[each.what] = each.grid.packed(value, each.record.shape[0]) if each.grid else value
        return values
