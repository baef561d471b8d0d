import torch

from hetxl.functional._compile import not_compiled


def test_outside_of_compilation_it_is_the_function():
    def double(values):
        """Twice as much."""
        return 2 * values

    wrapped = not_compiled(double)
    assert (wrapped.__name__, wrapped.__doc__) == ("double", "Twice as much.")
    assert wrapped(3) == 6


def test_the_compiler_does_not_look_inside():
    seen = []

    @not_compiled
    def watched(values):
        seen.append(torch.compiler.is_compiling())
        return 2 * values

    graphs = []

    def backend(module, inputs):
        graphs.append([node.target for node in module.graph.nodes if node.op == "call_function"])
        return module.forward

    compiled = torch.compile(lambda values: watched(values + 1) - 3, backend=backend)
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2))
    assert seen == [False]
    assert len(graphs) == 2  # before and after it
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2))
    assert seen == [False, False]
