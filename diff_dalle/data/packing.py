"""Packing a folder of captioned images into shards, with a report of every file that was skipped and why."""

from __future__ import annotations

import io
import itertools
import json
import os
import posixpath
import re
from collections.abc import Iterator

from PIL import Image
from tqdm import tqdm

from .. import storage
from ..config import Fault, InputError, named, option, settings
from ..config.bounds import MAX_SIDE
from ..images.decode import ALL_FORMATS, ALL_KINDS, MAX_PIXELS, BrokenSample, Facts, decode_image, picture_facts
from ..images.output import png_bytes
from .accounting import REPORT, Account, Reason, Skipped, printable, report_lines
from .captions import read_caption, usable_caption
from .collection import MAX_BYTES, MAX_OTHER
from .shard_table import IMAGE
from .source_folder import Belongings, SourceFolder
from .tar import write_tar

JPEG_QUALITY = 95
KEPT = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}  # formats whose files become members as they are
BY_NAME = "captioned by the words of their names"
#: What cameras, phones and programs call pictures.
NO_WORDS = {"img", "image", "dsc", "dscn", "dscf", "pxl", "mvimg", "pano", "photo", "picture", "screenshot", "untitled"}
OBLONG = 5 / 4  # ratio of the sides above which the report says that training crops a picture
CROPPED = "longer than 5:4: training crops them to squares, unless multi_aspect_ratio is set"
SEVERAL = 'several captions: the first is the txt, and caption_field ["json", "captions"] draws one of them'


@settings
class PackingConfig:
    """Packing a folder"""

    source: str = option(
        "",
        "folder of images (searched recursively), each with a caption: a .txt of the same name beside it, or a row "
        "with its file_name in a metadata.jsonl or metadata.csv in its folder or above",
    )
    out_dir: str = option("", "new or empty folder for the shards, local or remote")
    caption_column: str = option("caption", "field of the metadata that holds a caption or a list of captions")
    captions: bool = option(True, "skip images without a caption")
    name_captions: bool = option(
        False,
        "caption an image without one by the words of its file name (a red barn for a_red-barn_02.png), or of its "
        "folder if a camera named it",
    )
    resize: int = option(
        0, "shorter side in pixels to which larger images are downsampled; 0 = keep the files", least=0, most=MAX_SIDE
    )
    samples_per_shard: int = option(1000, "maximum number of images per shard", least=1)
    max_pixels: int = option(MAX_PIXELS, "maximum width × height of an image; larger ones are skipped")


def pack_folder(config: PackingConfig) -> dict:
    """Write the images of ``source`` as ``00000.tar``, ``00001.tar``, … and ``report.json`` into ``out_dir``.

    Each sample has its image, its caption as ``txt``, and a ``json`` with the file name, the size in pixels and all
    other metadata; several captions are the list ``captions`` there. A jpeg, png or webp is the file's own bytes unless
    it is downsampled; the first frame of an animation and pictures of other formats become png files. The same folder
    gives the same bytes. Links that lead out of the folder are not followed. Returns the report. Raises InputError when
    there is nothing to pack or something would be overwritten.
    """
    source = storage.local_path(config.source)
    if not config.source or not os.path.isdir(source):
        raise InputError(Fault("source", f"{config.source or '(not set)'} is not a folder"))
    if not config.out_dir:
        raise InputError(Fault("out_dir", "is not set: name a new folder for the shards"))
    if storage.exists(config.out_dir) and storage.list_files(config.out_dir, recursive=True):
        raise InputError(Fault("out_dir", f"{config.out_dir} is not empty; choose another, nothing is overwritten"))
    account = Account()
    folder = SourceFolder(source, config.caption_column, account)
    if not folder.pictures:
        found = "; ".join(report_lines(account.report([])))
        raise InputError(Fault("source", f"{config.source} holds no images ({', '.join(ALL_KINDS)}): {found}"))
    storage.make_dirs(config.out_dir)
    sizes: list[int] = []
    names = tqdm(list(folder.pictures), desc="packing", unit="image", disable=None)
    samples = _Packer(config, folder, account).samples(names)
    while first := next(samples, None):
        path = storage.join(config.out_dir, f"{len(sizes):05d}.tar")
        write_tar(path, itertools.chain([first], itertools.islice(samples, config.samples_per_shard - 1)))
        sizes.append(storage.size_and_tag(path)[0])
    _settle(folder, account)
    report = account.report(sizes)
    storage.write_bytes(storage.join(config.out_dir, REPORT), json.dumps(report, indent=1, ensure_ascii=False).encode())
    if not report["written"]:
        found = "; ".join(report_lines(report))
        raise InputError(
            f"none of the {len(folder.pictures)} images in {named('source')} {config.source} can be packed: {found}"
        )
    return report


def _settle(folder: SourceFolder, account: Account) -> None:
    """Say of the texts and the metadata that no packed picture uses why."""
    texts = {text: name for name, found in folder.pictures.items() for text in found.texts}
    for text in folder.texts:
        if text not in account.packed:
            packed = texts.get(text) in account.packed
            unused = Reason.CAPTION_UNUSED if packed else Reason.CAPTION_LOST
            account.skipped[text] = Skipped(unused if text in texts else Reason.CAPTION_ALONE)
    for name in folder.metadata:
        if name not in account.packed:
            account.skipped[name] = Skipped(Reason.METADATA_UNUSED)


class _Packer:
    """The samples of a folder, in order. The account is told of each picture, and of what is packed with it."""

    def __init__(self, config: PackingConfig, folder: SourceFolder, account: Account):
        self.config, self.folder, self.account = config, folder, account
        self.written = 0
        self.several = any(len(owned.captions) > 1 for owned in folder.pictures.values())

    def samples(self, names) -> Iterator[tuple[str, dict[str, bytes]]]:
        for name in names:
            try:
                members, notes = self._members(name)
            except Skipped as why:
                self.account.skipped[name] = why
            except BrokenSample as error:
                self.account.skipped[name] = Skipped.of(error)
            else:
                self.account.packed[name] = "picture"
                self.account.packed |= dict.fromkeys(self.folder.pictures[name].metadata, "metadata file")
                self.account.notes.update(notes)
                yield f"{self.written:08d}", members
                self.written += 1

    def _members(self, name: str) -> tuple[dict[str, bytes], list[str]]:
        """The members of a picture's sample, and notes about it."""
        if name != printable(name):
            raise Skipped(Reason.BAD_NAME)
        limit, owned = MAX_BYTES[IMAGE], self.folder.pictures[name]
        data = self.folder.read(name, limit)
        if not data:
            raise Skipped(Reason.EMPTY)
        facts = picture_facts(data, ALL_FORMATS)
        image, _ = decode_image(data, self.config.max_pixels, formats=ALL_FORMATS)
        kind, data, image, notes = self._stored(data, image, facts)
        if len(data) > limit:
            raise Skipped(Reason.TOO_LONG, f"{len(data):,} as a {kind}, more than {limit:,}")
        captions, texts = self._captions(name, owned)
        if max(image.size) > OBLONG * min(image.size):
            notes.append(CROPPED)
        if len(captions) > 1:
            notes.append(SEVERAL)
        members = {kind: data} | ({"txt": captions[0].encode()} if captions else {})
        members["json"] = self._record(name, image, owned, captions)
        self.account.packed |= dict.fromkeys(texts, "caption")
        return members, notes

    def _stored(self, data: bytes, image: Image.Image, facts: Facts) -> tuple[str, bytes, Image.Image, list[str]]:
        """What becomes the member: its kind, bytes and picture, and notes."""
        kind, notes = KEPT.get(facts.format), list(facts.notes)
        if kind is None:
            notes.append(f"{facts.format}, converted to PNG")
        if 0 < self.config.resize < min(image.size):
            image = _resized(image, self.config.resize)
            if kind in ("jpg", "webp") and not facts.animated:
                buffer = io.BytesIO()
                image.save(buffer, "JPEG", quality=JPEG_QUALITY)
                return "jpg", buffer.getvalue(), image, notes
        elif kind and not facts.animated:
            return kind, data, image, notes
        return "png", png_bytes(image), image, notes

    def _captions(self, name: str, owned: Belongings) -> tuple[list[str], list[str]]:
        """A picture's captions, and the files that they come from, other than metadata. Raises Skipped and BrokenSample
        where there is none that can be used."""
        given = [text for text in owned.captions if isinstance(text, str)]
        found = [usable_caption(text) for text in given if text.strip()]
        if found:
            return list(dict.fromkeys(found)), []
        reason = Reason.CAPTION_EMPTY if given else Reason.NO_CAPTION
        for text in owned.texts[:1]:
            data = self.folder.read(text, MAX_OTHER)
            if data.strip():
                return [read_caption(data, "txt")], [text]
            reason = Reason.CAPTION_EMPTY
        if self.config.name_captions and (
            words := words_of(posixpath.join(posixpath.basename(self.folder.root), name))
        ):
            self.account.notes.update([BY_NAME])
            return [words], []
        if self.config.captions:
            raise Skipped(reason)
        return [], []

    def _record(self, name: str, image: Image.Image, owned: Belongings, captions: list[str]) -> bytes:
        """The json member."""
        record = {**owned.row, "file_name": name, "width": image.width, "height": image.height}
        record["caption"] = captions[0] if captions else None
        if self.several and captions:  # then of every picture, so that one may be drawn
            record["captions"] = captions
        try:
            return json.dumps(record, ensure_ascii=False, sort_keys=True, allow_nan=False).encode()
        except UnicodeEncodeError:
            raise Skipped(Reason.METADATA_NOT_UTF8) from None


def words_of(name: str) -> str:
    """What the path of a picture says, as a caption: the words of letters in its file name, or else in the name of the
    nearest folder that has some; empty if none has."""
    parts = posixpath.splitext(name)[0].split("/")
    found = (re.findall(r"[^\W\d_]+(?:['’][^\W\d_]+)?", part) for part in reversed(parts))
    said = (words for words in found if any(len(word) > 1 and word.lower() not in NO_WORDS for word in words))
    return " ".join(next(said, []))


def _resized(image: Image.Image, short: int) -> Image.Image:
    scale = short / min(image.size)
    width, height = (max(short, round(length * scale)) for length in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0)
