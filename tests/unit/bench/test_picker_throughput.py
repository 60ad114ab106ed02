"""What the picker's benchmark says of its rounds."""

from __future__ import annotations

from picker_throughput import SHAPES, summary


def test_the_ratio_is_that_of_the_two_rates_in_its_row() -> None:
    # The median of the rounds' own ratios is 0.5.
    rates = {"bare": [1000.0, 2000.0, 4000.0], "epp": [900.0, 1000.0, 600.0]}
    assert summary(SHAPES[0], rates, {"bare": [100.0, 300.0, 200.0], "epp": [500.0, 400.0, 600.0]}) == {
        "shape": "short turn",
        "requests_per_second": {"bare": 2000.0, "epp": 900.0},
        "cpu_microseconds": {"bare": 200.0, "epp": 500.0},
        "ratio": 0.45,
    }
