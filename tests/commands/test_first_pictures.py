"""What the demo opens with."""

from pathlib import Path

from diff_dalle.checkpoints.model_folder import trained_models
from diff_dalle.commands.demo import first_pictures
from diff_dalle.commands.demo.contract import Demo


def test_every_model_that_comes_along_is_asked_for_something():
    assert set(trained_models()) <= set(first_pictures.PROMPTS)


def test_the_demo_samples_from_each(monkeypatch):
    commands = []
    monkeypatch.setattr(Demo, "run", lambda self, *command: commands.append([*map(str, command)]))
    monkeypatch.setattr(first_pictures, "trained_models", lambda: {"emoji": None})
    first_pictures.show_first_pictures(Demo(Path("home"), True, Path()))
    (command,) = commands
    assert command[:3] == ["sample.py", "--model_path", "emoji"]
    assert command[command.index("--logdir") + 1] == "home/first_pictures/emoji"
