def test_both_loops_train(load, tmp_path):
    row = load("train").measure(tmp_path, rows=400, features=4, classes=10, steps=2, rounds=1)
    assert row.measured > 0
    assert "steps/s" in row.detail
    assert row.bar.value == 0.9
