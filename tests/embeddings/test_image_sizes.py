"""What is known of a CLIP before it is loaded."""

import json
import sys
import types

from checkpoint_making import make_classifier_file

from diff_dalle.embeddings.clip import is_local_file, known_image_size


def test_openais_models_are_known_by_name():
    assert known_image_size("openai", "ViT-L/14") == known_image_size("openai", "ViT-B/32:weights.pt") == 224
    assert known_image_size("openai", "ViT-L/14@336px") == known_image_size("openai", "ViT-L/14@336px:w.pt") == 336


def test_models_of_open_clip_are_known_from_its_files_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "open_clip"
    (package / "model_configs").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    for name, size in (("ViT-L-14-336", 336), ("odd", [192, 256])):
        (package / "model_configs" / f"{name}.json").write_text(json.dumps({"vision_cfg": {"image_size": size}}))
    (package / "model_configs" / "broken.json").write_text("[")
    monkeypatch.delitem(sys.modules, "open_clip", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    found = [known_image_size("open_clip", name) for name in ("ViT-L-14-336/openai", "ViT-L-14-336:w.pt", "odd/tag")]
    assert found == [336, 336, 256]
    assert known_image_size("open_clip", "unknown/tag") == known_image_size("open_clip", "broken/tag") == 0
    monkeypatch.setitem(sys.modules, "open_clip", types.ModuleType("open_clip"))  # without a spec
    assert known_image_size("open_clip", "ViT-L-14-336/openai") == 0


def test_checkpoints_of_ours_are_known_where_they_are_local_files(tmp_path):
    assert known_image_size("diff_dalle", make_classifier_file(tmp_path)) == 16
    assert known_image_size("diff_dalle", str(tmp_path / "none.pt")) == 0
    assert known_image_size("diff_dalle", "s3://bucket/clip.pt") == 0


def test_a_command_is_no_local_file(tmp_path, monkeypatch):
    """Even where a file has its name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipe:cat x").touch()
    assert is_local_file(str(tmp_path / "pipe:cat x")) and not is_local_file("pipe:cat x")
