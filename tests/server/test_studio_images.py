"""Images on the page, in a real browser: dropped, chosen, pasted; words and cells that look at them."""
# ruff: noqa: F811 (fixtures are imported)

import base64
import json
import re

import pytest
import torch
from images import animated, image_run, saved, scene
from test_studio import browser, page, served  # noqa: F401
from test_studio import pytestmark as marks

import regard
from regard.data.examples import Image
from regard.explain.overlays import spread
from regard.server.settings import ServeSettings

expect = pytest.importorskip("playwright.sync_api").expect
pytestmark = marks

DROP = """([kind, data]) => {
  const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0)), files = new DataTransfer();
  files.items.add(new File([bytes], "scene.png", { type: "image/png" }));
  const options = kind === "paste" ? { clipboardData: files } : { dataTransfer: files };
  const Kind = kind === "paste" ? ClipboardEvent : DragEvent;
  document.body.dispatchEvent(new Kind(kind, { ...options, bubbles: true, cancelable: true }));
}"""
PIXELS = """() => {
  const canvas = document.querySelector(".overlay canvas"), { width, height } = canvas;
  return Array.from(canvas.getContext("2d").getImageData(0, 0, width, height).data.filter((_, at) => at % 4 === 0));
}"""


@pytest.fixture(scope="module")
def predictors(tmp_path_factory, tiny_run):
    folder = tmp_path_factory.mktemp("runs")
    captions = image_run(
        folder / "captions", "shapes", "model.self_attention=[1]", "decode.min_length=4", "decode.beam_size=2"
    )
    for name, weight in captions.model.named_parameters():
        if name.startswith("decoder.attention"):
            weight.data.mul_(4)  # as of a model that has learned to look: maps are sent as bytes
    blind = image_run(folder / "blind", "shapes", "model.spatial_attention=none")
    digits = image_run(folder / "digits", "digits")
    return {"captions": captions, "blind": blind, "digits": digits, "text": regard.load(tiny_run, device="cpu")}


@pytest.fixture(scope="module")
def url(predictors):
    url, stop = served(predictors, ServeSettings(threads=1, max_image=50_000))
    yield url
    stop()


DATA = saved(scene((60, 40)))


def drop(page, data=DATA, kind="drop"):
    page.evaluate(DROP, [kind, base64.b64encode(data).decode()])


def open_studio(page, url, model="captions"):
    page.goto(f"{url}/#model={model}")
    page.wait_for_selector("#field-image")


def shown(page):
    """The caption that is shown."""
    page.wait_for_selector(".overlay canvas")
    words = page.locator('.line[data-of="query"] .token:not(.special)').all_inner_texts()
    return " ".join(word.strip() for word in words)


@pytest.mark.parametrize("way", ["drop", "paste", "choose"])
def test_an_image_is_described_however_it_comes(page, url, predictors, way):
    open_studio(page, url)
    if way == "choose":
        page.set_input_files("#field-image", {"name": "scene.png", "mimeType": "image/png", "buffer": DATA})
    else:
        drop(page, kind=way)
    assert shown(page) == predictors["captions"].predict([Image("image", data=DATA)])[0][0].text
    assert page.locator(".drop img").is_visible()
    assert "base64" not in page.url
    assert len(page.url) < 500
    assert page.wrong == []


def test_a_word_that_is_clicked_lights_up_where_it_looked(page, url, predictors):
    found = regard.look(predictors["captions"], Image("image", data=DATA))  # before the server's thread uses the model
    weights, rows, _ = found.label()
    open_studio(page, url)
    drop(page)
    assert shown(page) == found.answer.text
    pictures = []
    for row in (0, len(rows) - 1):
        page.locator('.line[data-of="query"] .token').nth(row).click()
        page.mouse.move(5, 5)
        expect(page.locator("select[name=row]")).to_have_value(str(row))
        share = 100 * float(weights[row].max())
        shares = "|".join(str(round(share + more)) for more in (-0.5, 0, 0.5))  # of a byte, in whole percents
        said = re.compile(rf"‘{re.escape(rows[row])}’ looks.*\b({shares}) %")  # another row may have the same word
        expect(page.locator(".overlay figcaption")).to_contain_text(said)
        pictures.append(torch.tensor(page.evaluate(PIXELS)).view(341, 512)[20:-20, 20:-20].float())
        light = spread(weights[row][None], (3, 3), 341, 512)[0][20:-20, 20:-20]
        white = torch.zeros(341, 512, dtype=torch.bool)
        white[215:, 280:] = True  # a part of the scene that is white
        seen, wanted = (part[white[20:-20, 20:-20]] for part in (pictures[-1], light))
        assert torch.corrcoef(torch.stack([seen, wanted]))[0, 1] > 0.9  # apart from the lines of the grid
    assert not torch.equal(*pictures)


def test_the_pages_interpolation_is_ours(page, url):
    page.goto(url)
    torch.manual_seed(2)
    for grid, height, width in (((3, 5), 17, 13), ((1, 1), 4, 7), ((7, 2), 5, 11)):
        weights = torch.rand(grid[0] * grid[1])
        code = "([weights, grid, height, width]) => Array.from(RegardImage.spread(weights, grid, height, width))"
        found = torch.tensor(page.evaluate(code, [weights.tolist(), list(grid), height, width]))
        torch.testing.assert_close(found.view(height, width), spread(weights[None], grid, height, width)[0])


def test_cells_are_chosen_by_mouse_and_by_keys(page, url, predictors):
    """The map of self-attention inside the CNN, for any pixel."""
    open_studio(page, url)
    drop(page)
    shown(page)
    page.select_option("select[name=map]", label="The image looks at itself · Layer 2")
    canvas = page.locator(".overlay canvas")
    box = canvas.bounding_box()
    canvas.click(position={"x": box["width"] * 0.9, "y": box["height"] * 0.4})  # row 2, column 5 of 6 x 6
    assert page.locator("select[name=row]").input_value() == str(2 * 6 + 5)
    page.mouse.move(5, 5)
    expect(page.locator(".overlay figcaption")).to_contain_text("cell ‘2,5’")
    before = page.evaluate(PIXELS)
    canvas.focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowLeft"):
        canvas.press(key)
    assert "cell ‘3,4’" in page.locator(".overlay figcaption").inner_text()
    assert page.evaluate(PIXELS) != before
    canvas.press("Enter")
    assert page.locator("select[name=row]").input_value() == str(3 * 6 + 4)
    assert page.wrong == []


def test_a_cell_that_is_pointed_at_lights_up_the_words_that_look_there(page, url):
    open_studio(page, url)
    drop(page)
    shown(page)
    page.wait_for_load_state("networkidle")  # what comes later would draw the canvas again
    page.locator(".overlay canvas").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator(".looks h3")).to_contain_text("‘1,0’")
    page.keyboard.press("Tab")
    expect(page.locator(".looks h3")).not_to_contain_text("‘1,0’")


def test_what_is_wrong_with_an_image_is_said(page, url):
    open_studio(page, url)
    drop(page, b"hello")
    page.wait_for_selector("#error:not([hidden])")
    assert "is not an image" in page.locator("#error").inner_text()
    assert not page.locator(".drop img").is_visible()
    page.wrong.clear()  # the browser logs the status
    drop(page, DATA + b"\0" * 60_000)
    expect(page.locator("#error")).to_contain_text("bytes")
    page.wrong.clear()
    drop(page, animated())
    page.wait_for_selector(".flags")
    assert "several frames" in page.locator(".flags").inner_text()
    assert page.locator("#error").is_hidden()
    assert page.wrong == []


def test_runs_of_texts_and_of_images_can_be_changed(page, url):
    open_studio(page, url)
    drop(page)
    shown(page)
    page.select_option("#model", "text")
    page.fill("#field-text", "abc")
    page.wait_for_selector('.line[data-of="query"]')
    assert page.locator("#field-image").count() == 0
    page.select_option("#model", "digits")  # the image is still there
    page.wait_for_selector(".overlay canvas")
    assert "probability" in page.content() or page.locator(".others .gauge").count() > 0
    page.select_option("#model", "text")
    assert page.locator("#field-text").input_value() == "abc"
    page.select_option("#language", "ko")
    page.select_option("#model", "captions")
    assert page.locator("label[for=field-image]").inner_text() == "그림"
    assert "끌어다" in page.locator("#hint").inner_text()
    assert page.wrong == []


def test_a_model_without_attention_shows_the_image(page, url):
    open_studio(page, url, "blind")
    drop(page)
    page.wait_for_selector(".overlay canvas")
    assert max(page.evaluate(PIXELS)) == 255
    assert page.wrong == []


def test_a_file_that_stands_alone(page, predictors, tmp_path):
    regard.look(predictors["captions"], Image("a scene", data=DATA)).save(tmp_path / "why.html")
    page.goto(f"file://{tmp_path / 'why.html'}")
    page.wait_for_selector(".overlay canvas")
    expect(page.locator(".overlay figcaption")).to_contain_text("‘")
    tree = json.loads(page.locator("#tree").text_content())
    assert set(tree["image"]["grids"]) == {"key", "6x6"}
    assert [one for one in page.asked if not one.startswith(("file:", "data:"))] == []
    assert page.wrong == []
