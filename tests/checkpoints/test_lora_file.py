"""LoRA files: their form, what is refused, and networks with several LoRAs."""

import io
import json
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from network_making import randomize
from refusing import damaged, refused

from diff_dalle.checkpoints.content import DamagedError
from diff_dalle.checkpoints.lora_file import (
    LoraAbout,
    WeightedLora,
    extended_tokenizer,
    merge_loras,
    read_lora,
    write_lora,
)
from diff_dalle.checkpoints.safetensors import read_safetensors, tensor_names, write_safetensors
from diff_dalle.models.text_encoder import TextEncoder, TextEncoderConfig
from diff_dalle.text.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer()
ABOUT = LoraAbout("generator", "", "00ff", 2, 3.0, ("mlp_in",), ('["[star]", "^circle</w>"]', "^triangle"))


def encoder() -> TextEncoder:
    torch.manual_seed(0)
    return TextEncoder(TextEncoderConfig(8, 1, 2, 8), TOKENIZER.vocab_size).eval()


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"blocks.0.mlp_in.lora_down": (2, 8), "blocks.0.mlp_in.lora_up": (32, 2), "tokens.deltas": (3, 8)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(path, about=ABOUT, values=None) -> str:
    with open(path, "wb") as file:
        write_lora(file, about, tensors() if values is None else values)
    return str(path)


def test_a_file_says_all_about_itself(tmp_path):
    path = write(tmp_path / "a.safetensors")
    lora = read_lora(path)
    assert lora.about == ABOUT and set(lora.pairs) == {*tensors()} - {"tokens.deltas"}
    assert all(torch.equal(lora.tensors[name], value) for name, value in tensors().items())
    data = (tmp_path / "a.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["tokens.deltas"]["dtype"] == "F32" and header["tokens.deltas"]["shape"] == [3, 8]
    assert {type(value) for value in header["__metadata__"].values()} == {str}
    assert int.from_bytes(data[:8], "little") % 8 == 0
    assert header["__metadata__"]["rank"] == "2" and header["__metadata__"]["base"] == "00ff"


def test_the_format_is_that_of_other_readers(tmp_path):
    file = io.BytesIO()
    write_safetensors(file, {"x": torch.arange(6.0).view(2, 3)}, {"a": "b"})
    found = safetensors.torch.load(file.getvalue())
    assert found.keys() == {"x"} and torch.equal(found["x"], torch.arange(6.0).view(2, 3))
    again = io.BytesIO()
    write_safetensors(again, {"x": torch.arange(6.0).view(2, 3)}, {"a": "b"})
    assert again.getvalue() == file.getvalue()


def made(tmp_path, header: dict, body: bytes) -> str:
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return str(path)


def test_half_precision_is_read(tmp_path):
    values = torch.tensor([1.5, -2.0])
    for name, dtype in (("F16", torch.float16), ("BF16", torch.bfloat16)):
        body = values.to(dtype).view(torch.uint8).numpy().tobytes()
        path = made(tmp_path, {"x": {"dtype": name, "shape": [2], "data_offsets": [0, 4]}}, body)
        assert torch.equal(read_safetensors(path)[0]["x"], values)


def test_whole_numbers_stay_whole(tmp_path):
    """The counts of norms beside weights in half precision; a LoRA has none."""
    given = {"count": torch.tensor(2**40 + 1), "steps": torch.arange(3), "weight": torch.ones(2, 3)}
    given["none"] = torch.ones(0)
    path = tmp_path / "x.safetensors"
    with open(path, "wb") as file:
        write_safetensors(file, given, {}, torch.float16)
    found = read_safetensors(str(path))[0]
    assert found.keys() == given.keys() == set(tensor_names(str(path)))
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in given.items())
    theirs = safetensors.torch.load_file(path)
    assert theirs["weight"].dtype == torch.float16 and torch.equal(theirs["steps"], given["steps"])
    with damaged("its tokens.deltas has whole numbers"):
        read_lora(write(tmp_path / "a.safetensors", values={"tokens.deltas": torch.arange(3)}))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}, "x is F64, but only F32, F16, I64, BF16 are known"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "invalid shape"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "invalid JSON"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}, "invalid offset for tensor `x`"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "file not fully covered"),
        ({"dtype": "F32", "shape": [2**47, 2**47, 0], "data_offsets": [0, 0]}, "overflow"),
        ({"dtype": "F32", "shape": [0, 2**47, 2**47], "data_offsets": [0, 0]}, "x has the shape .*, which no weight"),
        ({"dtype": "F32", "shape": [2, *[1] * 10**5], "data_offsets": [0, 8]}, "x has the shape .*, which no weight"),
        ({"dtype": "F32", "shape": [0, *[10**14] * 10**5], "data_offsets": [0, 0]}, "x has the shape .*, which no"),
        ({"dtype": "F32", "shape": [10**400], "data_offsets": [0, 8]}, "invalid JSON"),
        ("text", "invalid JSON"),
    ],
)
def test_malformed_files_are_refused(tmp_path, entry, words):
    body = b"" if entry != "text" and entry["data_offsets"] == [0, 0] else bytes(8)
    with pytest.raises(DamagedError, match=words) as error:
        read_safetensors(made(tmp_path, {"x": entry}, body))
    assert len(str(error.value)) < 500


def test_tensors_are_counted_before_one_is_made(tmp_path, monkeypatch):
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    monkeypatch.setattr(torch.Tensor, "to", lambda *_, **__: pytest.fail("a tensor was read"))
    for header, words in (
        ({str(i): empty for i in range(20_001)}, "it has 20,001 tensors, more than 20,000"),
        ({"n" * 501: empty}, "whose name has more than 500 characters"),
        ({"x": empty, "__metadata__": {"a": "b" * 2**23}}, "its header has more than 8,388,608 bytes"),
    ):
        with damaged(words):
            read_safetensors(made(tmp_path, header, b""))


def test_truncated_and_foreign_files_are_refused(tmp_path):
    path = write(tmp_path / "a.safetensors")
    data = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(data[:-1])
    with damaged("cut.safetensors is damaged"):
        read_lora(str(tmp_path / "cut.safetensors"))
    for content in (b"no such file at all", b""):
        (tmp_path / "text.safetensors").write_bytes(content)
        for read in (read_lora, tensor_names):
            with damaged("is damaged or no safetensors file"):
                read(str(tmp_path / "text.safetensors"))
    with refused("is no LoRA of diff_dalle"):
        read_lora(made(tmp_path, {"__metadata__": {"format": "pt"}}, b""))
    metadata = {**json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]}
    del metadata["sha256"]  # of other elements
    with damaged("its metadata do not describe a LoRA"):
        read_lora(made(tmp_path, {"__metadata__": {**metadata, "rank": "x"}}, b""))
    for name, value, words in (
        ("rank", "0", "0, but must be a whole number above 0"),
        ("rank", "true", "True, but"),
        ("rank", "9" * 400, "a number of 2.63 or more, but"),
        ("alpha", "NaN", "nan, but must be a finite number"),
        ("alpha", "true", "True, but"),
        ("alpha", "1" * 400, "a number of 2.63 or more, but"),
        ("module_filters", '"attn"', "'attn', but must be a list of up to 1,000 texts"),
        ("module_filters", "[1]", "a list, but must be a list of up to 1,000 texts"),
        ("module_filters", json.dumps(["a"] * 1001), "a list, but must be"),
        ("train_tokens", '{"[star]": null}', "a dict, but must be"),
        ("train_tokens", json.dumps(["a" * 1000]), "a list, but must be"),
    ):
        with damaged(f"its {name} is {words}"):
            read_lora(made(tmp_path, {"__metadata__": {**metadata, name: value}}, b""))
    assert read_lora(path).about == ABOUT


def test_the_rank_is_that_of_the_pairs(tmp_path):
    path = write(tmp_path / "a.safetensors", replace(ABOUT, rank=3))
    with damaged(r"its rank is 3, but its blocks.0.mlp_in.lora_down is .* shape \(2, 8\)"):
        read_lora(path)


def test_several_loras_change_a_network_together(tmp_path):
    other = LoraAbout("generator", "", "00ff", 1, 1.0, ("mlp_in",), ('["[dog]", "^dog"]', "^triangle</w>"))
    values = {"blocks.0.mlp_in.lora_down": torch.ones(1, 8), "blocks.0.mlp_in.lora_up": torch.ones(32, 1)}
    values["tokens.deltas"] = torch.ones(2, 8)
    first = WeightedLora(read_lora(write(tmp_path / "a.safetensors")), 0.5)
    second = WeightedLora(read_lora(write(tmp_path / "b.safetensors", other, values)), 2.0)
    extended = extended_tokenizer(TOKENIZER, [first, second])
    assert extended.identity == f"{TOKENIZER.identity}+[star]+[dog]"
    network, plain = encoder(), encoder()
    merge_loras(network, TOKENIZER, [first, second])
    pairs = tensors()
    change = 0.5 * 1.5 * pairs["blocks.0.mlp_in.lora_up"] @ pairs["blocks.0.mlp_in.lora_down"] + 2.0
    torch.testing.assert_close(network.blocks[0].mlp_in.weight, plain.blocks[0].mlp_in.weight + change)
    table, old = network.token_emb.weight, plain.token_emb.weight
    (triangle,) = TOKENIZER.encode("triangle")[1:-1]
    deltas = pairs["tokens.deltas"]
    torch.testing.assert_close(table[triangle], old[triangle] + 0.5 * deltas[0] + 2.0)
    (circle,) = TOKENIZER.encode("circle")[1:-1]
    torch.testing.assert_close(table[extended.token_id("[star]")], old[circle] + 0.5 * deltas[2])
    tokens, mask = extended(["a [dog] and a [star]"], 8)
    assert network(tokens, mask)[0].isfinite().all() and not network.token_emb.weight.requires_grad


def test_what_does_not_fit_is_refused_with_the_file(tmp_path):
    loras = [WeightedLora(read_lora(write(tmp_path / "a.safetensors")))]
    with refused(r"a.safetensors: the token \[star\] exists already"):
        extended_tokenizer(TOKENIZER, loras * 2)
    with refused("a.safetensors trains tokens, but the network has no text encoder"):
        extended_tokenizer(None, loras)
    with refused("a.safetensors: the LoRA does not fit this network: it adapts blocks.0.mlp_in"):
        merge_loras(randomize(torch.nn.Sequential(torch.nn.Linear(2, 2))), TOKENIZER, loras)
    values = {name: value for name, value in tensors().items() if name != "tokens.deltas"}
    lora = read_lora(write(tmp_path / "b.safetensors", values=values))
    with damaged(r"b.safetensors is damaged: it has no tokens.deltas"):
        merge_loras(encoder(), TOKENIZER, [WeightedLora(lora)])
