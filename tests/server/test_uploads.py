"""Images over HTTP: as files and in base64, what is refused and with which status, and that no path is opened."""

import base64
import threading

import httpx
import pytest
from images import animated, huge_png, image_run, saved, scene
from serving import live

import regard
from regard.data.examples import Image
from regard.data.images import pixels


@pytest.fixture(scope="module")
def captioner(tmp_path_factory):
    return image_run(tmp_path_factory.mktemp("runs") / "captions", "shapes")


@pytest.fixture(scope="module")
def server(captioner, tmp_path_factory, tiny_run):
    digits = image_run(tmp_path_factory.mktemp("runs") / "digits", "digits")
    models = {"captions": captioner, "digits": digits, "text": regard.load(tiny_run, device="cpu")}
    with live(models, max_image=20_000, max_body=3000, max_pixels=1_000_000) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def refused(response, status, words):
    """Whether a response is an error in our form."""
    assert (response.status_code, list(response.json())) == (status, ["error"]), response.text
    assert words in response.json()["error"]
    return True


def send(client, data, path="/v1/predict", **fields):
    """An image as the file of a form."""
    return client.post(path, files={"image": ("photo", data)}, data=fields)


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"])
def test_the_answer_is_that_of_the_library_however_the_image_comes(client, captioner, kind):
    data = saved(scene(), kind)
    wanted = [answer.text for answer in captioner.predict([Image("image", data=data)], best=2)[0]]
    text = base64.b64encode(data).decode()
    bodies = [{"image": text, "best": 2}, {"image": f"data:image/png;base64,{text}", "best": 2}]
    found = [client.post("/v1/predict", json=body) for body in bodies] + [send(client, data, best="2")]
    for response in found:
        assert [answer["text"] for answer in response.json()["answers"][0]] == wanted
        assert response.json()["answers"][0][0]["flags"] == []


def test_other_fields_of_a_form(client):
    answers = send(client, saved(scene((8, 8))), model="digits", best="3", logprobs="false").json()
    assert answers["model"] == "digits"
    (found,) = answers["answers"]
    assert len(found) == 3
    assert found[0]["probability"] >= found[1]["probability"]
    whole = send(client, saved(scene()), settings='{"max_extra": 1, "max_ratio": 0, "beam_size": 2}')
    assert whole.status_code == 200
    tree = send(client, saved(scene()), "/v1/look", target="a red square", packed="false").json()
    assert tree["text"]["target"] == "a red square"
    assert refused(send(client, saved(scene()), best="many"), 422, "best is 'many', expected JSON.")
    assert refused(send(client, saved(scene()), best="0"), 422, "best: ")
    assert refused(send(client, saved(scene()), bset="1"), 422, "unknown field bset. Did you mean best?")
    assert refused(send(client, saved(scene()), model="kaptions"), 404, "Did you mean captions?")


@pytest.mark.parametrize("model", ["captions", "digits"])
@pytest.mark.parametrize("path", ["/v1/predict", "/v1/look"])
def test_of_an_animation_the_first_frame_is_taken_and_the_answer_says_so(client, model, path):
    note = "image has several frames: the first is taken."
    found = send(client, animated(), path, model=model).json()
    still = send(client, saved(scene(), "GIF"), path, model=model).json()
    if path == "/v1/look":
        assert (found["flags"], still["flags"]) == ([note], [])
        assert found["text"]["target"] == still["text"]["target"]
    else:
        moving, standing = found["answers"][0][0], still["answers"][0][0]
        assert (moving.pop("flags"), standing.pop("flags")) == ([note], [])
        assert moving == standing


def test_an_image_is_decoded_once(client, monkeypatch):
    decoded = []
    turn = pixels.turn
    monkeypatch.setattr(pixels, "turn", lambda image: decoded.append(1) or turn(image))
    for number, path in enumerate(("/v1/predict", "/v1/look"), 1):
        assert send(client, saved(scene((31, 20 + number))), path).status_code == 200
        assert len(decoded) == number


def test_images_that_come_together_are_decoded_once_each(client, monkeypatch):
    decoded = []
    turn = pixels.turn
    monkeypatch.setattr(pixels, "turn", lambda image: decoded.append(1) or turn(image))
    files = [saved(scene((40, 30 + number))) for number in range(8)]
    threads = [threading.Thread(target=send, args=(client, data)) for data in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(decoded) == len(files)


# --- what is refused -------------------------------------------------------------------------------------------------

NOISE = bytes(range(256)) * 70
BAD = {
    "no image": (b"hello, this is a text", 415, "image is not an image, expected JPEG, PNG, GIF, BMP, WebP or TIFF."),
    "vector graphics": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 415, "is not an image"),
    "truncated JPEG": (saved(scene((60, 60)), "JPEG")[:-200], 422, "image is cut short or damaged"),
    "truncated PNG": (saved(scene((300, 300)))[:-60], 422, "image is cut short or damaged"),
    "truncated GIF": (saved(scene((300, 300)), "GIF")[:-60], 422, "image is cut short or damaged"),
    "huge": (huge_png(), 413, "image is too large, expected at most 1,000,000 pixels. Shrink it."),
    "large": (huge_png(1001, 1000), 413, "image has 1,001 x 1,000 pixels, expected at most 1,000,000 in all."),
    "empty": (b"", 422, "empty (0 bytes), expected the bytes of an image's file."),
    "long": (NOISE + b"\0" * 3000, 413, "image has 20,920 bytes, at most 20,000 are taken. Shrink it."),
    "very long": (NOISE * 2, 413, "the body has more than 29,666 bytes, which is the most that is taken."),
}


@pytest.mark.parametrize("path", ["/v1/predict", "/v1/look"])
@pytest.mark.parametrize("name", BAD)
def test_bad_images(client, name, path):
    data, status, words = BAD[name]
    assert refused(send(client, data, path), status, words)
    response = client.post(path, json={"image": base64.b64encode(data).decode()})
    assert refused(response, status, words)


@pytest.mark.parametrize("charset", ["punycode", "raw_unicode_escape"])
def test_a_form_of_another_character_set_is_refused_unread(client, charset):
    """punycode would take time with the square of the length."""
    body = b'--B\r\nContent-Disposition: form-data; name="text"\r\n\r\n' + b"a" * 2000 + b"\r\n--B--\r\n"
    kind = f"multipart/form-data; boundary=B; charset={charset}"
    for path in ("/v1/predict", "/translate"):
        response = client.post(path, content=body, headers={"Content-Type": kind})
        assert (response.status_code, "UTF-8" in response.text) == (400, True)


def test_forms_of_deep_json_or_of_many_fields(client):
    assert refused(send(client, saved(scene()), settings="[" * 2500), 422, "expected JSON.")
    many = {f"field{number}": "1" for number in range(30)}
    assert refused(send(client, saved(scene()), **many), 400, "the form cannot be read: Too many fields")


def test_what_is_too_large_is_refused_before_it_is_decoded(client, monkeypatch):
    monkeypatch.setattr(pixels, "turn", None)  # the first that asks for pixels
    assert refused(send(client, huge_png()), 413, "too large")


def test_only_requests_with_images_may_be_larger(server, client):
    words = "the body has more than 3,000 bytes"
    assert refused(client.post("/translate", json={"q": "a" * 3000}), 413, words)
    with live({"text": server.service.predictors["text"]}, max_body=3000) as other:
        response = httpx.post(f"{other.url}/v1/predict", json={"image": "a" * 3000})
        assert refused(response, 413, "the body has more than 3,000 bytes, which is the most that is taken. Split it.")


def test_a_bad_image_does_not_disturb_others(client):
    """Neither those that come with it, nor those after it."""
    good, bad = saved(scene()), BAD["truncated GIF"][0]
    alone = send(client, good).json()
    found = {}

    def ask(number):
        found[number] = send(client, bad if number % 2 else good)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, response in found.items():
        if number % 2:
            assert refused(response, 422, "cut short or damaged")
        else:
            assert response.json()["answers"][0][0]["text"] == alone["answers"][0][0]["text"]


def test_texts_and_images_are_not_mixed_up(client):
    for path in ("/v1/predict", "/v1/look"):
        words = "text came, but this model reads images: send image, a file."
        assert refused(client.post(path, json={"text": "a dog"}), 400, words)
        response = send(client, saved(scene()), path, text="a dog")
        assert refused(response, 400, "text and image came, but this model reads images")
        response = send(client, saved(scene()), path, model="text")
        assert refused(response, 400, "image came, but this model's task is to translate: send text.")
        assert refused(client.post(path, json={}), 422, "or an image, to one that reads images")
    response = client.post("/v1/predict", json={"texts": ["a.png", "b.png"]})
    assert refused(response, 400, "text came, but this model reads images")


def test_no_client_opens_a_file_of_the_servers(client, tmp_path, monkeypatch):
    """Whatever is sent: a path is no image."""
    (tmp_path / "image").write_bytes(saved(scene()))  # what an upload is called inside
    secret = tmp_path / "secret.png"
    secret.write_bytes(saved(scene()))
    monkeypatch.chdir(tmp_path)
    for name in (str(secret), "secret.png", f"file://{secret}", "image", "../secret.png"):
        assert client.post("/v1/predict", json={"image": name}).status_code in (415, 422)
        assert client.post("/v1/predict", files={"image": (None, name)}).status_code in (415, 422)
        assert client.post("/v1/predict", json={"text": name}).status_code == 400
        assert client.post("/v1/predict", files={"image": (name, b"")}).status_code == 422
        assert send(client, name.encode()).status_code == 415


def test_wrong_forms(client):
    two = client.post("/v1/predict", files=[("image", b"a"), ("image", b"b")])
    assert refused(two, 400, "the form cannot be read: Too many files.")
    twice = client.post("/v1/predict", data={"best": ["1", "2"]}, files={"image": saved(scene())})
    assert refused(twice, 400, "'best' stands twice")
    assert refused(client.post("/v1/predict", files={"text": b"a"}), 422, "text is a file; the only one that is taken")
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    part = b'--x\r\nContent-Disposition: form-data; name="text"\r\n\r\n'
    assert refused(client.post("/v1/predict", content=part + b"abc", headers=kind), 400, "the form breaks off")
    latin = part + b"\xe4\r\n--x--\r\n"
    assert refused(client.post("/v1/predict", content=latin, headers=kind), 400, "the form is not UTF-8")
    response = client.post("/v1/predict", content=saved(scene()), headers={"Content-Type": "image/png"})
    assert refused(response, 422, "An image may also come as the file of a form.")
    assert refused(client.post("/v1/predict", json={"image": "not base64!"}), 422, "image: not base64.")
    assert refused(client.post("/v1/predict", json={"image": 7}), 422, "image: ")
