from diff_dalle.commands.examples import command_page


def test_every_command_has_its_description_and_examples():
    page = command_page(["sample", "watch"])
    assert "* [`sample.py`](#samplepy)\n* [`watch.py`](#watchpy)" in page
    assert (
        "## `sample.py`\n\nSample images from a generator's checkpoint.\n\n```bash\npython scripts/sample.py " in page
    )
    assert page.endswith("\n```\n") and page.count("```") == 4
