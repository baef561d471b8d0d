import torch

from hetxl.functional import Affine, GaussianNoise, LogitDistribution
from hetxl.functional.engine.inputs import gather_inputs
from hetxl.functional.engine.setup import fusable, plan_for, product_precision
from support.cases import make, normals


def inputs_of(variant, **options):
    head = make(variant, 6, 9, **options)
    distribution = head.logit_distribution(torch.randn(4, 6, dtype=head.classifier.weight.dtype))
    z = None if distribution.noise is None else normals(head, 4, samples=8)
    return gather_inputs(distribution, z, 1.0)


def test_the_plan_has_the_sizes_of_the_inputs():
    assert plan_for(inputs_of("het-xl"), "softmax").sizes == {"B": 4, "D": 6, "K": 9, "N": 6, "Q": 3, "S": 8}
    assert plan_for(inputs_of("het"), "softmax").sizes == {"B": 4, "D": 6, "K": 9, "N": 9, "Q": 3, "S": 8}
    assert plan_for(inputs_of("det"), "softmax").rows == 1


def test_the_precision_of_products():
    inputs = inputs_of("het-xl", dtype=torch.float32)
    assert product_precision(inputs) == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert product_precision(inputs) == torch.bfloat16
        assert product_precision(inputs_of("het-xl")) == torch.float64  # which autocast leaves alone
    assert product_precision(inputs_of("det", dtype=torch.bfloat16)) == torch.bfloat16


def test_what_is_left_to_the_plain_evaluation():
    features, noise = torch.randn(2, 3), GaussianNoise(None, None, torch.ones(2, 3))
    classifier = Affine(torch.randn(5, 3))
    z = torch.randn(4, 1)
    assert fusable(LogitDistribution(features, classifier), None)
    assert not fusable(LogitDistribution(features, classifier, noise), z)  # noise through an opaque classifier
    head = make("het", 3, 5)
    distribution = head.logit_distribution(features.double())
    assert fusable(distribution, normals(head, 2))
    assert not fusable(distribution, normals(head, 2).requires_grad_())
