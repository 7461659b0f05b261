"""The bar of a stage's steps: what it shows, and where."""

import io
from types import SimpleNamespace

import pytest
from checkpoint_making import make_file, sample

import diff_dalle
from diff_dalle.sampling import telling
from diff_dalle.sampling.telling import StepsBar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def stderr(monkeypatch):
    """A terminal in place of stderr, whose bars are drawn at every step."""
    terminal, drawn = Terminal(), telling.tqdm
    monkeypatch.setattr(telling, "sys", SimpleNamespace(stderr=terminal, modules={}))
    wide = {"dynamic_ncols": False, "ncols": 200, "mininterval": 0}
    monkeypatch.setattr(telling, "tqdm", lambda **given: drawn(**{**given, **wide}, file=terminal))
    return terminal


def test_steps_are_shown_within_a_batch(tmp_path, stderr):
    """Five images in batches of two, with four steps each; the last batch is smaller."""
    pipeline, seen = diff_dalle.load(make_file(tmp_path)), []
    images = sample(pipeline, num_samples=5, batch_size=2, progress=True, watch=lambda each: seen.append(each.step))
    assert seen == [1, 2, 3, 4] * 3 and images.shape[0] == 5
    text = stderr.getvalue()
    assert all(f" {n}/12 " in text for n in range(1, 13)) and ("step/s" in text or "s/step" in text)
    shown = [line.rpartition(" images")[0].rpartition(", ")[2] for line in text.split("\r") if " images" in line]
    assert list(dict.fromkeys(shown)) == ["0 of 5", "2 of 5", "4 of 5", "5 of 5"]


def test_there_is_no_bar_without_a_terminal_or_wish(tmp_path, stderr, monkeypatch):
    pipeline = diff_dalle.load(make_file(tmp_path))
    sample(pipeline, progress=False)
    monkeypatch.setattr(telling.sys, "stderr", io.StringIO())
    sample(pipeline, progress=True)
    assert stderr.getvalue() == ""
    monkeypatch.setitem(telling.sys.modules, "ipykernel", None)  # in a notebook
    sample(pipeline, progress=True)
    assert "1 of 1 images" in stderr.getvalue()


def test_batches_without_steps_count_as_one_each(stderr):
    with StepsBar("Decoding", 3, 2, shown=True) as bar:
        bar.batch(2)
        assert bar.bar.n == 1
        bar.batch(2)
    assert (bar.bar.n, bar.bar.total, bar.made) == (2, 2, 3)


def test_more_steps_than_planned_do_not_exceed_the_total(stderr):
    with StepsBar("Sampling", 2, 2, shown=True) as bar:
        for steps in (6, 4):  # of 5
            for step in range(1, steps + 1):
                bar.step(SimpleNamespace(step=step, steps=5))
                assert bar.bar.n <= bar.bar.total == 10
            bar.batch(1)
    assert bar.bar.n == 10
