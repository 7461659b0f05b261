"""The models that are served, and what goes with each."""

import pytest
from checkpoint_making import make_classifier_file, make_file
from lora_making import make_lora

from diff_dalle.checkpoints.model_folder import ModelFolder, trained_models
from diff_dalle.commands.serve import ModelsConfig
from diff_dalle.config import InputError
from diff_dalle.web.models import Models, _examples


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    base, loras = make_file(folder), []
    for name in ("a", "b"):
        (folder / name).mkdir()
        loras.append(make_lora(folder / name / "lora000002.safetensors", base))
    return {"base": base, "classifier": make_classifier_file(folder), "loras": loras}


def models(paths, **given):
    return Models(ModelsConfig(tuple(paths), precision="fp32", **given), "cpu")


def test_loras_are_named(files):
    """By their files or as is said, for each model apart; what looks like a name in a path is none."""
    first, second = files["loras"]
    only = models([files["base"]], lora=(f"early={first}", second)).served["ema"]
    assert only.loras == {"early": first, "lora000002": second}
    both = models([f"one={files['base']}", f"two={files['base']}"], lora=(f"one=early={first}", f"two={first}"))
    assert [model.loras for model in both.served.values()] == [{"early": first}, {"lora000002": first}]


def test_examples_are_those_of_the_demo_or_the_card(tmp_path):
    (tmp_path / "README.md").write_text("sample.py --prompts 'it is red'\nsample.py --prompts other")
    assert _examples(ModelFolder(str(tmp_path), {})) == ["it is red"] and _examples(None) == []
    assert all(len(_examples(model)) > 3 for model in trained_models().values())


@pytest.mark.parametrize(
    ("flag", "name", "sentence"),
    [
        ("lora", "loras", "lora has two of the name lora000002 for the model ema: name one of them, as NAME=PATH"),
        ("classifier_path", "classifier", "classifier_path has several files for the model ema, but may have one"),
        ("controlnet", "classifier", "controlnet has several files for the model ema, but may have one"),
    ],
)
def test_nothing_is_left_out_in_silence(flag, name, sentence, files):
    given = files[name] if name == "loras" else [files[name]] * 2
    with pytest.raises(InputError) as error:
        models([files["base"]], **{flag: tuple(given)})
    assert str(error.value) == sentence
