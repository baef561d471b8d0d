"""benchmarks/top_classes.py: its rows on small heads."""

import torch

from hetxl import HetXLHead


@torch.no_grad()
def test_rows_compare_the_top_classes_with_det_and_with_all_classes(load):
    module = load("top_classes")
    torch.manual_seed(0)
    head, features = HetXLHead(8, 1500, rank=2).eval(), torch.randn(16, 8)
    row = module.top_k_row("small", module.Bar(5), head, features, module.QUICK)
    assert row.measured > 0
    assert row.name == "small: predict(top_k=5), S = 256, D = 8, K = 1,500, B = 16: time over DET's"
    distance = module.distance_row("small", head, features)
    assert 0 <= distance.measured <= 1e-3
    assert distance.verdict in ("pass", "stretch")
    made_up = module.made_up_row("made-up", module.Bar(2), (1501, 8, 4), module.QUICK)
    assert "K = 1,501" in made_up.name
