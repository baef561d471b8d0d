"""benchmarks/millions.py: a smoke run of the smallest setting."""

import torch


def test_both_heads_over_every_classifier(load):
    module = load("millions")
    for setting in module.QUICK:
        training = module.Training(setting)
        contexts, classes = torch.randint(module.BUCKETS, (50, 4)), torch.randint(setting.K, (50,))
        following = module.batches(contexts, classes, setting.B)
        before = training.classifier.weight.detach().clone()
        for name in training.heads:
            training.step(name, *following())
        moved = (training.classifier.weight != before).any(-1).sum()
        assert moved == setting.K if setting.kind == "linear" else moved > 0
        assert training.nll("het-xl", contexts, classes) > 0
        assert module.predicted(setting, "het-xl") > module.predicted(setting, "det") > 4 * before.numel()
