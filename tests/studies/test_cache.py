import dataclasses
import json
import threading
import time

import pytest

from hetxl.studies.cache import DIVERGED, Cache, Training
from hetxl.training.config import TrainConfig
from hetxl.training.files import write_json
from hetxl.training.run import start_run

CONFIG = TrainConfig(data="synthetic:rows=100", head="het-xl", seed=3)


def changed(**options):
    return Training(dataclasses.replace(CONFIG, **options))


def test_the_name_of_a_training_is_that_of_its_options():
    first = Training(CONFIG)
    assert first.key.startswith("synthetic-het-xl-seed3-")
    # Where it goes and how many processes read its data changes nothing.
    assert changed(out="elsewhere", workers=0, log_every=7).key == first.key
    others = [changed(rank=2), changed(seed=4), changed(head="det"), changed(steps=5), Training(CONFIG, "known:5")]
    assert len({one.key for one in (first, *others)}) == 6
    assert first.title == "synthetic:rows=100 HET-XL seed 3"


def test_an_option_at_its_default_is_not_in_the_name():
    """So that a new option, which all old trainings have at its default, changes no name."""
    spec = next(field for field in dataclasses.fields(TrainConfig) if field.name == "rank")
    assert changed(rank=spec.default).key == Training(CONFIG).key


def test_trainings_of_the_same_data_share_it():
    assert changed(rank=2, seed=9, workers=0).source == Training(CONFIG).source
    assert changed(data_seed=1).source != Training(CONFIG).source
    assert Training(CONFIG, "known:5").source != Training(CONFIG).source


def test_a_view_that_does_not_exist_is_told_at_once():
    with pytest.raises(ValueError, match="view must be"):
        Training(CONFIG, "half")


def test_results(tmp_path):
    cache, training = Cache(tmp_path), Training(CONFIG)
    assert not cache.done(training)
    with pytest.raises(FileNotFoundError, match=r"no result\.json.*run the study again"):
        cache.result(training)
    place = cache.place(training)
    place.mkdir()
    (place / DIVERGED).write_text(json.dumps({"message": "the loss is nan"}))
    assert cache.done(training)
    assert cache.result(training) is None
    (place / "result.json").write_text('{"steps": 3}')
    assert cache.result(training) == {"steps": 3}


def test_a_run_with_other_options_in_its_place_is_an_error(tmp_path):
    """As when a default was another one then: the name has only what differs from the defaults."""
    cache, training = Cache(tmp_path), Training(CONFIG)
    start_run(CONFIG, cache.place(training))
    (cache.place(training) / "result.json").write_text("{}")
    assert cache.done(training)
    write_json(cache.place(training) / "config.json", dataclasses.replace(CONFIG, train_samples=99).to_dict())
    with pytest.raises(ValueError, match="train_samples 99 there"):
        cache.done(training)


def test_two_take_turns(tmp_path):
    cache, training, order = Cache(tmp_path), Training(CONFIG), []

    def other():
        with cache.turn(training):
            order.append("second")

    with cache.turn(training):
        thread = threading.Thread(target=other)
        thread.start()
        time.sleep(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
