"""benchmarks/serve.py: every request of the clients is answered, several of them together."""

import pytest


@pytest.mark.parametrize(
    "options",
    [
        {"classes": 50, "features": 8, "samples": 8, "requests": 64, "clients": 4, "rounds": 2},
        pytest.param({}, marks=pytest.mark.slow, id="a thousand of sixteen clients"),
    ],
)
def test_all_requests_are_answered_in_fewer_batches(load, tmp_path, options):
    serve = load("serve")
    row = serve.measure(tmp_path, serve.Load(**options))  # raises at a refusal, or a batch for each request
    print(row.cells())
    assert row.measured > 0
    assert row.bar.value == 3
    assert "batches" in row.detail
