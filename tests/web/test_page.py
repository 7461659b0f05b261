"""The page in a real browser, at the width of a desktop and of a phone."""

import asyncio
import io
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image
from web_making import Gate, inaccessible, make_service, needs_web

from diff_dalle.commands.serve import Limits
from diff_dalle.config import to_dict
from diff_dalle.sampling.stage_settings import BASE, UPSAMPLERS
from diff_dalle.web.models import Served
from diff_dalle.web.page import Visits, state_text, status
from diff_dalle.web.page_values import EDITS, read_wish, record, values_of
from diff_dalle.web.pictures import PictureFiles, Pictures
from diff_dalle.web.refusal import Refusal
from diff_dalle.web.wish import Wish
from diff_dalle.web.worker import Snapshot

pytestmark = needs_web
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
needs_browser = pytest.mark.skipif(not CHROMIUM, reason="there is no browser: apt-get install chromium")


@pytest.fixture(scope="module")
def service(files):
    models = f"one={files['base']},two={files['low']}"
    made = make_service(models, Limits(max_steps=6), upsampler_paths=f"two={files['middle']}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing")
    with playwright.sync_playwright() as driver:
        yield driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])


@pytest.fixture(params=WIDTHS)
def page(request, browser, address):
    """The page at each width. Nothing may come from elsewhere or fail in the console."""
    width, height = WIDTHS[request.param]
    context = browser.new_context(viewport={"width": width, "height": height})
    page, wrong = context.new_page(), []
    local = (address, "data:", "blob:")
    page.on("request", lambda sent: None if sent.url.startswith(local) else wrong.append(sent.url))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.goto(address)
    page.get_by_role("button", name="Sample", exact=True).wait_for()
    yield page
    assert not wrong
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    context.close()


def sample(page, prompt="a star"):
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_role("button", name="Sample", exact=True).click()
    page.get_by_text("Done in").wait_for()


@needs_browser
def test_an_image_is_sampled_by_keyboard_and_repeated(page, address):
    page.get_by_label("Prompt", exact=True).focus()
    page.keyboard.type("a 'red' circle")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.innerText") == "Sample"
    page.keyboard.press("Enter")
    page.get_by_text("Done in").wait_for()
    page.locator(".images img").nth(1).wait_for()  # the image, and its place in the history
    page.get_by_role("button", name="Repeat these images").click()
    page.get_by_text("--num_samples=1").wait_for()
    texts = page.locator(".cm-content").all_inner_texts()
    assert "diff-dalle sample" in texts[0] and "diff_dalle.load(" in texts[1] and '"seed": 0' in texts[2]


@needs_browser
def test_accessibility(page):
    assert not inaccessible(page)
    sample(page)
    page.get_by_role("button", name="Settings").first.click()  # not "More settings"
    page.get_by_label("Negative prompt").wait_for()
    assert not inaccessible(page)


def give_picture(page, path):
    """Give the editor a picture, again while it is not ready for one. Returns its canvas."""
    canvas = page.locator("canvas").first
    canvas.scroll_into_view_if_needed()
    for attempt in range(60):
        if attempt % 10 == 0:
            page.locator("input[type=file]").last.set_input_files(path)
        page.wait_for_timeout(300)
        shown = np.asarray(Image.open(io.BytesIO(canvas.screenshot())).convert("RGB"))
        height, width, _ = shown.shape
        if shown[height * 3 // 8 : height * 5 // 8, width * 3 // 8 : width * 5 // 8].std() > 30:
            return canvas
    raise AssertionError("the editor shows no picture")


@needs_browser
def test_the_part_that_is_drawn_is_inpainted(address, browser, tmp_path, service):
    """And again after it was chosen from the history, from which the picture and the drawing come back."""
    picture = np.random.default_rng(1).integers(0, 256, (128, 128, 3), dtype=np.uint8)
    picture[:] = picture[::8, ::8].repeat(8, 0).repeat(8, 1)  # as large as the model's images, each pixel eight times
    Image.fromarray(picture).save(tmp_path / "picture.png")
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.goto(address)
    page.get_by_role("button", name="Edit a picture").click()
    canvas = give_picture(page, tmp_path / "picture.png")
    page.get_by_role("button", name="Brush", exact=True).click()
    box = canvas.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x - 20, y)
    page.mouse.down()
    page.mouse.move(x + 20, y, steps=5)
    page.mouse.up()
    seen = []
    submit, service.submit = service.submit, lambda *given: seen.append(given) or submit(*given)
    try:
        sample(page)
        page.get_by_role("button", name="Repeat these images").click()
        page.get_by_text("--mask=mask.png").wait_for()
        assert all(page.get_by_label(f"{name}.png").count() for name in ("init_image", "mask"))
        page.get_by_role("button", name="Clear canvas").click()
        sample(page)
        past = page.locator(".images").last
        past.get_by_role("button", name="Thumbnail 2 of 2").first.click()
        page.get_by_text("--mask=mask.png").wait_for()
        sample(page)
        past.get_by_role("button", name="Thumbnail 3 of 3").first.wait_for()
    finally:
        service.submit = submit
    pictures, nothing, again = (each[1] for each in seen)
    assert not nothing.given()
    assert np.array_equal(pictures.init_image, picture[::8, ::8])
    drawn = pictures.mask[..., 0] == 255
    assert 0.002 < drawn.mean() < 0.5 and drawn[8, 8] and not drawn[[0, 0, -1, -1], [0, -1, 0, -1]].any()
    assert all(np.array_equal(again.given()[name], each) for name, each in pictures.given().items())


@needs_browser
def test_stop_ends_the_job_and_a_full_queue_is_told(page, service):
    gates = [Gate() for _ in range(1 + service.limits.max_queue)]
    jobs = [service.worker.submit(gates[0])]
    assert gates[0].started.wait(10)
    page.get_by_role("button", name="Sample", exact=True).click()
    page.get_by_text("Waiting: 1 before this one").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Canceled").wait_for()
    jobs += [service.worker.submit(gate) for gate in gates[1:]]
    page.get_by_role("button", name="Sample", exact=True).click()
    page.get_by_text("Busy, try again").wait_for()
    for job in jobs:
        job.cancel()
    sample(page)


# --------------------------------------------------------------------------------------------------- without a browser


def test_a_visitor_that_leaves_ends_the_job(service):
    gate = Gate()
    first = service.worker.submit(gate)
    assert gate.started.wait(10)

    async def visit(visits):
        snapshots = visits.sample("someone", Wish(steps=2), PictureFiles())
        now = await anext(snapshots)
        job = visits.jobs["someone"]
        await snapshots.aclose()
        return now, job

    visits = Visits(service)
    with ThreadPoolExecutor() as others:  # the browser's driver has this thread's event loop
        now, job = others.submit(asyncio.run, visit(visits)).result()
    assert now.ahead == 1 and job.over and not visits.jobs
    first.cancel()


def test_every_step_can_be_shown(service):
    seen = []
    pipeline = service.models.pipeline("two")
    images = pipeline.sample("a star", num_samples=2, progress=False, watch=seen.append)
    totals = [stage.process(stage.defaults).num_timesteps for stage in pipeline.stages]
    assert [each.step for each in seen] == [n for total in totals for n in range(1, total + 1)]
    assert all(each.steps == totals[pipeline.stages.index(each.stage)] for each in seen)
    assert [seen[0].pixels().shape, seen[-1].pixels().shape] == [(2, 8, 8, 3), (2, 16, 16, 3)]
    last = seen[-1].pixels().astype(int)
    assert np.abs(last - images).max() <= 1  # the last step of this sampler ends at the expected image
    assert state_text(Snapshot(False, 0, seen[0], None, None, 1.0), 2).count("Sampling: step 1 of")


@pytest.mark.parametrize(
    "asked",
    [
        {"label": 0, "guidance_scale": 0.0},
        {"label": 2, "guidance_scale": 4.5, "classifier_scale": 1.5, "negative_prompt": "dark"},
        {"label": 1, "guidance_scale": 1.0, "lora": ("a:0.5", "b:0.5"), "num_images": 3, "control_scale": 0.7},
        {"label": 1, "guidance_scale": 1.0, "strength": 0.3},
        {"label": 1, "guidance_scale": 1.0, "variation": 0.9},
        {"label": 1, "guidance_scale": 2.0, "guidance_rescale": 0.0, "thresholding": "none", "spacing": "leading"}
        | {"guidance_interval": (0.1, 0.9), "upsampler_thresholding": ("none",), "upsampler_sampler": ("ddim", "heun")},
    ],
)
def test_the_settings_of_a_wish_come_back(asked):
    """What the history restores is read as the same wish."""
    model = Served("m", "", classifier="c", loras={"a": "", "b": ""}, controlnet="n", has_text=True, num_classes=3)
    model.guidable, model.kinds = True, (BASE, UPSAMPLERS, UPSAMPLERS)
    wish = Wish(model="m", prompt="a star", seed=7, sampler="ddim", steps=3, **asked)
    picture = {"path": "picture.png"}
    others = {"lora_factor": 1.0, "edit": next(iter(EDITS)), "amount": 0.5, "control_scale": 1.0, "loras": []}
    editor = {"background": picture, "layers": []} if wish.strength or wish.variation else None
    given = {**others, **values_of(to_dict(wish)), "control_image": picture, "init_image": editor}
    assert read_wish(given, model)[0] == wish


def test_each_image_has_an_entry_that_repeats_it(service):
    images = np.zeros((2, 16, 16, 3), np.uint8)
    first, second = record(service, Wish("one", "a star", seed=7, num_images=2), Pictures(), images)
    assert [(each["wish"]["seed"], each["wish"]["num_images"]) for each in (first, second)] == [(7, 1), (8, 1)]
    assert "--seed=8 --num_samples=1" in second["command"] and "seed=8" in second["python"]


def test_texts_are_escaped():
    assert "&lt;b&gt;" in status("<b>") and "<b>" not in state_text(
        Snapshot(True, 0, None, None, Refusal(400, "<b>"), 0), 1
    )
