"""What layers cost: counted on their computation, not recited."""

import pytest
import torch

from regard.errors import InputError
from regard.evaluation.cost import (
    LAYERS,
    SMALL,
    Cost,
    Sizes,
    count_layers,
    count_steps,
    exceeds,
    find_crossing,
    fit_exponent,
    measure_costs,
    measure_memory,
)


def test_only_a_recurrent_layer_waits_for_every_token():
    steps = {name: [count_steps(name, n, SMALL) for n in (32, 64)] for name in LAYERS}
    assert all(len(set(counts)) == 1 for name, counts in steps.items() if name != "recurrent")
    first, second = steps["recurrent"]
    assert 1.9 < second / first < 2.1


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("recurrent", 1),
        ("convolution", 21),  # of 63 steps, 3 a layer
        ("window", 8),  # of 63 steps, 8 a layer
        ("self-attention", 1),
        ("linformer", 1),
        ("bigbird", 2),  # by way of a global block
    ],
)
def test_how_many_layers_it_takes_to_see_everything(name, layers):
    assert count_layers(name, 64, SMALL) == layers


def test_memory_is_that_of_tensors_that_are_alive_together():
    class Plain(torch.nn.Module):
        def forward(self, x):
            weights = (x @ x.mT).softmax(-1)  # scores and weights of 64 x 64, alive together
            return weights @ x

    x = torch.randn(1, 64, 4, requires_grad=True)
    assert 2 * 64 * 64 * 4 <= measure_memory(Plain(), x) <= 5 * 64 * 64 * 4
    sparse = LAYERS["bigbird"].make(SMALL, 2048)
    x = torch.randn(1, 2048, 8, requires_grad=True)
    assert measure_memory(sparse, x) < 2048 * 2048 * 4


def test_exponents_and_crossings():
    assert fit_exponent([10, 20, 40], [3.0, 12.0, 48.0]) == pytest.approx(2.0)
    costs = [Cost("self-attention", n, 0.0, n * n / 1e6, 0) for n in (100, 200, 400, 800)]
    costs += [Cost("window", n, 0.0, n * 3e-4, 0) for n in (100, 200, 400, 800)]
    assert find_crossing(costs, "window") == 400
    assert find_crossing([*costs[:4], Cost("window", 100, 0.0, 9.0, 0)], "window") is None


def test_what_would_take_too_long_or_too_much_is_said():
    before = Cost("self-attention", 100, 0.1, 1.0, 10**9)
    assert exceeds(before, 400, 10.0, 10**12) == "16 seconds expected, 10 allowed (--limit)"
    assert exceeds(before, 400, 99.0, 2 * 10**9) == "4.0 GB expected, 2.0 free"
    assert not exceeds(before, 400, 99.0, 10**12)
    found = list(measure_costs([64, 128, 256], SMALL, ["window"], 1e-9, 10**12))
    assert [getattr(one, "n", None) for one in found] == [64, None]
    with pytest.raises(InputError, match="unknown layer 'gru', expected recurrent, conv"):
        list(measure_costs([64], Sizes(), ["gru"], 1.0, 10**12))
