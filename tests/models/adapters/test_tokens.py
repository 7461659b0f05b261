"""New and existing tokens with trained embeddings."""

import torch
from network_making import randomize
from refusing import refused
from torch.testing import assert_close

from diff_dalle.models.adapters.lora import Adapted, merge_tokens
from diff_dalle.models.text_encoder import TextEncoder, TextEncoderConfig
from diff_dalle.text.tokenizer import load_tokenizer
from diff_dalle.text.trained_tokens import find_tokens, parse_token

TOKENIZER = load_tokenizer()
LENGTH = 12
CONFIG = TextEncoderConfig(enc_attn_dim=8, enc_depth=1, enc_heads=2, text_length=LENGTH)


def encoder(summary="mean") -> TextEncoder:
    torch.manual_seed(0)
    return TextEncoder(CONFIG, TOKENIZER.vocab_size, summary).eval()


def found(*entries: str):
    return find_tokens(TOKENIZER, [parse_token(entry) for entry in entries])


STAR = '["[star]", "^circle</w>"]'


def test_a_new_token_begins_as_the_mean_of_those_that_a_pattern_finds():
    base = encoder()
    (circle,), red = found("^circle</w>").ids, found("^red").ids
    assert len(red) > 1
    table = base.token_emb.weight.clone()
    tokens = found(STAR, '["[reds]", "^red"]', '["[zero]", null]')
    adapted = Adapted(base, [], 1, 1.0, tokens)
    star, reds, zero = (adapted.token_emb(torch.tensor([[i]]))[0, 0] for i in tokens.ids)
    assert torch.equal(star, table[circle]) and not zero.any()
    assert_close(reds, table[list(red)].mean(0))
    assert tokens.ids == tuple(range(TOKENIZER.vocab_size, TOKENIZER.vocab_size + 3))


def test_only_the_differences_of_the_trained_tokens_train():
    tokens = found(STAR, "^triangle")
    assert TOKENIZER.decode(tokens.ids[:-1]).split() == ["triangle", "triangles"]
    adapted = Adapted(encoder(), [], 1, 1.0, tokens)
    assert {name: tuple(value.shape) for name, value in adapted.state_dict().items()} == {"lora.tokens.deltas": (3, 8)}
    batch, mask = tokens.tokenizer(["a [star]", "a triangle"], LENGTH)
    plain, _ = TOKENIZER(["a circle", "a triangle"], LENGTH)
    assert torch.equal(adapted(batch, mask)[0], encoder()(plain, mask)[0])  # [star] is one token, as circle is
    adapted(batch, mask)[1].sum().backward()
    (deltas,) = adapted.parameters()
    used = {TOKENIZER.encode("triangle")[1], tokens.tokenizer.token_id("[star]")}
    assert [i for i, row in zip(tokens.ids, deltas.grad, strict=True) if row.any()] == sorted(used)
    assert adapted.base.token_emb.base.weight.grad is None


def test_pooling_stays_at_the_end_token_though_the_new_ids_are_larger():
    tokens = found(STAR)
    adapted = Adapted(encoder("end"), [], 1, 1.0, tokens)
    batch, mask = tokens.tokenizer(["a [star] on white"], LENGTH)
    plain, _ = TOKENIZER(["a circle on white"], LENGTH)
    assert torch.equal(adapted(batch, mask)[1], encoder("end")(plain, mask)[1])


def test_merged_tokens_are_those_of_the_adapters():
    tokens, more = found(STAR, "^triangle"), found("^triangle</w>")
    adapted = randomize(Adapted(encoder(), [], 1, 1.0, tokens))
    deltas, extra = adapted.state_dict()["lora.tokens.deltas"], torch.full((1, 8), 0.5)
    plain = encoder()
    changes = [(tokens.ids, tokens.sources, deltas, 1.0), (more.ids, more.sources, extra, 0.5)]
    merge_tokens(plain, tokens.tokenizer.vocab_size, changes)
    batch, mask = tokens.tokenizer(["a [star] and triangles"], LENGTH)
    assert torch.equal(plain(batch, mask)[0], adapted(batch, mask)[0])
    (triangle,) = more.ids
    table = encoder().token_emb.weight
    assert_close(plain.token_emb.weight[triangle], table[triangle] + deltas[0] + 0.25)
    assert torch.equal(plain.token_emb.weight[: min(more.ids)], table[: min(more.ids)])
    with refused(r"token embeddings are \(2, 8\), but must be \(3, 8\)"):
        merge_tokens(plain, tokens.tokenizer.vocab_size, [(tokens.ids, tokens.sources, deltas[:2], 1.0)])


def test_a_network_without_text_has_no_tokens_to_train():
    with refused("train_tokens is set, but the network has no text encoder"):
        Adapted(torch.nn.Linear(2, 2), [], 1, 1.0, found(STAR))
