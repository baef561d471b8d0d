"""The server: real requests to a real socket give what `hetxl predict` writes, and harmful ones are refused."""

import asyncio
import base64
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import numpy as np
import pandas as pd
import pytest
import torch
import uvicorn

from hetxl_train.prediction import Predictor, predict
from hetxl_train.serve import Batcher, Limits, RequestError, build_app, features_tensor
from hetxl_train.similar_examples import SimilarExamples
from hetxl_train.training import train
from support.browser import Browser, needs_browser
from support.texts import table, tiny_bert
from support.training import QUIET, small, write_images

DETERMINISTIC = {"method": "deterministic", "device": "cpu"}


@contextmanager
def served(run, limits=None, *, demo=False, **options):
    """A server in a thread; yields a client of it."""
    predictor = Predictor(run, **DETERMINISTIC | options)
    neighbours = SimilarExamples.of_run(predictor, QUIET) if demo else None
    app = build_app(predictor, limits, demo=demo, neighbours=neighbours)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=30) as client:
                while not server.started:
                    time.sleep(0.01)
                yield client
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def features():
    return 3 * np.random.default_rng(0).standard_normal((20, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def client(finished):
    with served(finished, Limits(rows=50, megabytes=0.05)) as client:
        yield client


@pytest.fixture(scope="module")
def image_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("images")
    write_images(directory / "data")
    config = small(directory / "run", data=str(directory / "data"), backbone="cnn", image_size=16, steps=4)
    return train(config, console=QUIET).path, directory / "data"


def test_answers_are_those_of_predict(client, finished, features, tmp_path):
    np.save(tmp_path / "inputs.npy", features)
    predict(finished, str(tmp_path / "inputs.npy"), tmp_path / "out.jsonl", console=QUIET, **DETERMINISTIC)
    expected = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    response = client.post("/predict", json={"features": features.tolist()})
    assert response.status_code == 200
    records = response.json()["predictions"]
    assert [record["row"] for record in records] == list(range(20))
    for record, other in zip(records, expected, strict=True):
        assert [name for name, _ in record["top"]] == [name for name, _ in other["top"]]
        np.testing.assert_allclose([p for _, p in record["top"]], [p for _, p in other["top"]], atol=2e-6)
        assert record["entropy"] == pytest.approx(other["entropy"], abs=2e-5)


def test_the_same_input_gets_the_same_answer_in_any_batch(finished, features):
    with served(finished, method="mc") as client:
        together = client.post("/predict", json={"features": features.tolist()}).json()["predictions"]
        for row in (0, 7, 7):
            alone = client.post("/predict", json={"features": features[row : row + 1].tolist()}).json()["predictions"]
            np.testing.assert_allclose([p for _, p in alone[0]["top"]], [p for _, p in together[row]["top"]], atol=2e-6)


def test_images_are_read_from_bodies_and_base64(image_run):
    run, data = image_run
    path = next(data.rglob("*.png"))
    with served(run) as client:
        single = client.post("/predict/image", content=path.read_bytes()).json()["predictions"]
        encoded = base64.b64encode(path.read_bytes()).decode()
        several = client.post("/predict", json={"images": [encoded, f"data:image/png;base64,{encoded}"]}).json()
        assert [record["top"] for record in several["predictions"]] == 2 * [single[0]["top"]]
        for content in (b"", b"no image", path.read_bytes()[:40]):
            refused = client.post("/predict/image", content=content)
            assert refused.status_code == 422
            assert "image 0 could not be read" in refused.json()["detail"]
        wrong = client.post("/predict", json={"images": ["%%%"]})
        assert (wrong.status_code, wrong.json()["detail"]) == (422, "images must be image files encoded in base64")
        assert "takes images" in client.post("/predict", json={"features": [[1.0]]}).json()["detail"]


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("texts")
    table().to_json(directory / "topics.jsonl", orient="records", lines=True)
    options = {"data": str(directory / "topics.jsonl"), "backbone": f"hf:{tiny_bert(directory / 'bert')}"}
    options |= {"label_column": "topic", "workers": 0, "learning_rate": 2e-2, "steps": 8}
    return train(small(directory / "run", **options), console=QUIET).path


TEXTS = ["it swims", "it flies wings nest", ""]


def test_texts_of_any_length_are_answered_together(text_run, tmp_path):
    predict(text_run, pd.DataFrame({"text": TEXTS}), tmp_path / "out.jsonl", console=QUIET, **DETERMINISTIC)
    expected = [json.loads(line)["top"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    with served(text_run, Limits(wait=0.2)) as client, ThreadPoolExecutor(3) as pool:
        for top in (
            expected,
            [
                each.json()["predictions"][0]["top"]
                for each in pool.map(lambda text: client.post("/predict", json={"texts": [text]}), TEXTS)
            ],
        ):
            assert [[name for name, _ in row] for row in top] == [[name for name, _ in row] for row in expected]
            shares = [[[share for _, share in row] for row in each] for each in (top, expected)]
            np.testing.assert_allclose(*shares, atol=2e-5)
        for body in ({"tokens": [[1, 2]]}, {"features": [[1.0]]}, {"texts": ["a"], "tokens": [[1]]}, {}):
            refused = client.post("/predict", json=body)
            assert (refused.status_code, "takes texts" in refused.json()["detail"]) == (422, True)
        assert client.post("/predict", json={"texts": [1]}).status_code == 422
        assert "1 to 256 examples" in client.post("/predict", json={"texts": []}).json()["detail"]
        assert "takes texts, not images" in client.post("/predict/image", content=b"x").json()["detail"]


def test_an_input_that_overflows_harms_no_other(tmp_path, features):
    run = train(small(tmp_path / "run", backbone="mlp", width=8, steps=1), console=QUIET).path
    with served(run, Limits(wait=0.2)) as client, ThreadPoolExecutor(2) as pool:
        rows = [features[:1].tolist(), [[3e38, -3e38, 3e38, 3e38]]]
        good, bad = pool.map(lambda row: client.post("/predict", json={"features": row}), rows)
        assert (good.status_code, bad.status_code) == (200, 422)
        assert bad.json()["detail"] == "features or probabilities of row 0 are NaN or infinite"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"features": [[1.0, 2.0]]}, r"features must have shape \[n, 4\], found \[1, 2\]"),
        ({"features": []}, "1 to 50 examples, found 0"),
        ({"features": [[0.0] * 4] * 51}, "1 to 50 examples, found 51"),
        ({"features": [[0, 0, 0, 1e300]]}, "finite in float32, row 0"),
        ({"tokens": [[1, 2, 3, 4]]}, "the run takes features"),
        ({"features": [[0.0] * 4], "tokens": [[1]]}, "and nothing else"),
    ],
)
def test_malformed_requests_are_refused_in_one_line(client, body, message):
    response = client.post("/predict", json=body)
    assert response.status_code == 422
    assert re.search(message, response.json()["detail"])


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[[[", b'{"features": [[1, 2, 3, NaN]]}', b'{"features": "x"}', b'{"x": 1}']
)
def test_bodies_that_are_no_inputs_are_refused(client, body):
    response = client.post("/predict", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 422
    assert client.get("/health").json() == {"status": "ok"}


def test_oversized_requests_are_refused_before_they_are_read(client):
    body = json.dumps({"features": [[0.0] * 4] * 20_000}).encode()
    assert client.post("/predict", content=body).status_code == 413
    assert client.post("/predict", content=iter([body[:30_000], body[30_000:]])).status_code == 413  # of unknown length
    assert client.get("/health").status_code == 200


def test_slow_requests_are_refused(finished):
    with served(finished, Limits(seconds=0.3)) as client:
        with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
            head = "POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
            connection.sendall(head.encode())
            connection.settimeout(10)
            assert connection.recv(100).startswith(b"HTTP/1.1 408")
        assert client.get("/health").status_code == 200


def test_information_about_the_model_and_counts_of_requests(client, finished):
    about = client.get("/model").json()
    assert (about["run"], about["head"], about["input"]) == (
        finished.name,
        "het-xl",
        {"kind": "features", "shape": [4]},
    )
    client.post("/predict", json={"features": [[0.0] * 4] * 3})
    lines = client.get("/metrics").text.splitlines()
    counts = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert int(counts['hetxl_requests_total{status="200"}']) >= 2
    assert int(counts["hetxl_examples_total"]) >= 3


def test_openapi_describes_requests_answers_and_refusals(client):
    about = client.get("/openapi.json").json()
    paths, schemas = about["paths"], about["components"]["schemas"]
    assert {"/predict", "/predict/image", "/health", "/metrics", "/model"} <= set(paths)
    for path in ("/predict", "/predict/image"):
        assert {"200", "408", "413", "422", "503"} <= set(paths[path]["post"]["responses"])
    assert "image/*" in paths["/predict/image"]["post"]["requestBody"]["content"]
    record = client.post("/predict", json={"features": [[0.0] * 4]}).json()["predictions"][0]
    assert set(schemas["Record"]["properties"]) <= set(record)
    assert set(schemas["Inputs"]["properties"]) == {"features", "tokens", "texts", "images"}


def test_requests_that_come_together_are_computed_together():
    sizes = []

    def compute(inputs):
        sizes.append(len(inputs))
        return inputs[:, 0].tolist()

    async def run():
        batcher = Batcher(compute, Limits(batch=8, wait=0.05))
        task = asyncio.create_task(batcher.run())
        parts = [torch.full((1 + number % 3, 2), float(number)) for number in range(9)]
        results = await asyncio.gather(*map(batcher, parts))
        task.cancel()
        return results

    results = asyncio.run(run())
    assert results == [[float(number)] * (1 + number % 3) for number in range(9)]
    assert sum(sizes) == 18
    assert max(sizes) <= 8
    assert len(sizes) < 9


def test_a_failed_batch_is_the_answer_to_its_requests_alone():
    def compute(inputs):
        if bool(inputs.isnan().any()):
            raise ValueError("no number")
        return [0] * len(inputs)

    async def run():
        batcher = Batcher(compute, Limits(batch=1, wait=0.0, queue=3))
        task = asyncio.create_task(batcher.run())
        results = await asyncio.gather(
            batcher(torch.full((1, 1), torch.nan)), batcher(torch.ones(1, 1)), batcher(torch.ones(1, 1)),
            batcher(torch.ones(1, 1)), return_exceptions=True,
        )  # fmt: skip
        task.cancel()
        return results

    failed, *good, refused = asyncio.run(run())
    assert (failed.status, failed.reason) == (500, "ValueError: no number")
    assert good == [[0], [0]]
    assert refused.status == 503


def test_tokens_outside_the_vocabulary_are_refused():
    from hetxl_train.data.dataset import InputSpec

    spec = InputSpec("tokens", (2,), vocabulary=5)
    assert features_tensor([[0, 4]], spec, Limits()).tolist() == [[0, 4]]
    for wrong in ([[0, 5]], [[-1, 0]]):
        with pytest.raises(RequestError, match="from 0 to 4"):
            features_tensor(wrong, spec, Limits())


def test_nearest_training_examples_are_those_of_the_smallest_angle(finished):
    predictor = Predictor(finished, **DETERMINISTIC)
    neighbours = SimilarExamples.of_run(predictor, QUIET)
    row = 7
    features = predictor.trained.model.backbone(neighbours.split.fetch(np.array([row])).inputs)
    (nearest,) = neighbours.nearest(features, count=3)
    assert (nearest[0]["row"], nearest[0]["similarity"]) == (row, pytest.approx(1.0, abs=1e-4))
    assert [entry["similarity"] for entry in nearest] == sorted((e["similarity"] for e in nearest), reverse=True)


def test_many_clients_get_their_own_answers(client, features):
    expected = client.post("/predict", json={"features": features.tolist()}).json()["predictions"]

    def ask(number):
        response = client.post("/predict", json={"features": features[number % 20 : number % 20 + 1].tolist()})
        return response.status_code, response.json()["predictions"][0]["top"]

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(200)))
    assert {status for status, _ in answers} == {200}
    assert [top[0][0] for _, top in answers] == [expected[number % 20]["top"][0][0] for number in range(200)]


@needs_browser
@pytest.mark.parametrize(
    ("width", "dark", "kind"), [(1200, False, "image"), (390, True, "image"), (390, False, "text")]
)
def test_the_demo_page_shows_an_answer(image_run, text_run, tmp_path, width, dark, kind):
    run, data = image_run if kind == "image" else (text_run, None)
    with served(run, demo=True) as client, Browser() as browser:
        tab = browser.open(str(client.base_url), width=width, dark=dark)
        script = "find('typed').value = 'it swims gills'; askTyped()"
        if data is not None:
            encoded = base64.b64encode(next(data.rglob("*.png")).read_bytes()).decode()
            script = (
                f"askImage(new Blob([Uint8Array.from(atob('{encoded}'), c => c.charCodeAt(0))], {{type: 'image/png'}}))"
            )
        tab.evaluate(f"window.done = false; {script}.then(() => window.done = true); 0")
        deadline = time.monotonic() + 20
        while not tab.evaluate("window.done") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert tab.evaluate("document.querySelectorAll('#top li').length") > 1
        assert tab.evaluate("document.querySelectorAll('#neighbours .card').length") == 5
        assert "nats" in str(tab.evaluate("document.getElementById('doubt').textContent"))
        assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        if kind == "image":  # of 28 × 24 pixels, and shown larger
            assert tab.evaluate("document.getElementById('shown').getBoundingClientRect().width") == 112
        doubts = {0.95: "Sure.", 0.75: "Fairly sure.", 0.58: "Unsure."}  # of two classes
        for share, words in doubts.items():
            record = {"top": [["a", share], ["b", 1 - share]], "entropy": 0.5, "from_noise": 0.1, "confused_with": "b"}
            assert str(tab.evaluate(f"doubt({json.dumps(record)})")).startswith(words)
        assert tab.problems() == []
        tab.screenshot(tmp_path / "demo.png")
