import pytest

from diff_dalle.text.cleaning import clean, split_words


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("  Two\twords\n\n ", "two words"),
        ("caf&eacute; &amp;amp; bar", "café & bar"),
        ("&lt;b&gt; 1 &amp;lt; 2", "<b> 1 < 2"),
        ("schÃ¶n â€“ â€œokâ€\x9d", 'schön – "ok"'),
        ("e\u0301", "é"),
        ("ÀÉ\u00a0ΑΣ", "àé ας"),
        ("a\ud83d\ude00b\ud800", "a😀b\ufffd"),
        ("\x00\u2028 ", ""),
    ],
)
def test_clean(text, cleaned):
    assert clean(text) == cleaned


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("it's we'll o'clock", ["it", "'s", "we", "'ll", "o", "'", "clock"]),
        ("3.14 km²", ["3", ".", "1", "4", "km", "²"]),
        ("日本語 ☃️!", ["日本語", "☃️!"]),
        ("", []),
    ],
)
def test_split_words(text, words):
    assert split_words(text) == words
