import json
import os
import signal

import pytest

from hetxl.tuning import worker
from hetxl.tuning.trial import Trial
from hetxl.tuning.worker import answer, as_request, forked, trial_of
from support.training import small


def request(tmp_path, **options):
    trial = Trial("one", small(tmp_path / "one", temperature="0.5", steps=1, **options), "whole")
    return trial, as_request(trial, str(tmp_path / "one.txt"), 1)


def test_a_request_goes_through_json(tmp_path):
    trial, asked = request(tmp_path)
    assert trial_of(json.loads(json.dumps(asked))["trial"]) == trial


def test_answers(tmp_path):
    trial, asked = request(tmp_path)
    assert answer(asked | {"measure": True})["bytes"] > 0
    assert not trial.path.exists()
    assert answer(asked) == {"error": None}
    assert trial.finished


def test_an_error_is_an_answer(tmp_path, capsys):
    _, asked = request(tmp_path, validation="nowhere.npz")
    found = answer(asked)["error"]
    assert found.startswith("ValueError") or "nowhere" in found
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("does", "told"),
    [
        (lambda asked: os.kill(os.getpid(), signal.SIGKILL), "its process was ended by signal 9"),
        (lambda asked: os._exit(3), "its process ended with code 3"),
        (lambda asked: {"error": None}, None),
    ],
)
def test_however_a_child_ends_there_is_an_answer(tmp_path, monkeypatch, does, told):
    monkeypatch.setattr(worker, "answer", does)
    monkeypatch.setattr(worker, "_end_with_asker", lambda: None)  # the input of a test is closed
    assert forked({"log": str(tmp_path / "log.txt")})["error"] == told
