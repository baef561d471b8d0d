from hetxl.studies.flops import STUDY


def test_the_page(studied):
    text, summary = studied("flops")
    assert summary["counts"] == summary["predicted"]
    assert "up to S = 2.9" in text
    assert "3DK + 3KS + KRS" in text
    assert "| logits | O(DK + KS) | O(DS + DKS) |" in text
    assert summary["crossing_factors"] is None
    assert "holds here" in text


def test_the_conclusion_follows_the_numbers(studied):
    _, summary = studied("flops")
    counts = {name: dict.fromkeys(found, 1) for name, found in summary["counts"].items()}
    text = STUDY.conclusion({**summary, "counts": counts, "crossing_ours": None, "crossing_factors": 7.0})
    assert "does not hold here" in text
    assert "they cross at S = 7.0" in text
    assert "up to S = –" in text
