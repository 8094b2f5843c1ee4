"""Rates and time left go by tokens; seconds are counted once and under their name."""

import threading

import pytest

from layertap.progress import Clock, Rate, format_duration


class Ticking:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_eta_goes_by_tokens() -> None:
    clock = Ticking()
    rate = Rate(clock=clock)
    rate.update(0, 0)
    clock.now = 10.0
    rate.update(5_000, 2)
    assert rate.tokens_per_s == pytest.approx(500)
    assert rate.samples_per_s == pytest.approx(0.2)
    assert rate.eta_s(1_000) == pytest.approx(2)


def test_rate_forgets_what_lies_before_its_window() -> None:
    clock = Ticking()
    rate = Rate(window_s=60, clock=clock)
    for second, tokens in ((0, 0), (10, 100_000), (70, 100_000), (80, 100_100), (130, 100_600)):
        clock.now = second
        rate.update(tokens, 0)
    assert rate.tokens_per_s == pytest.approx(600 / 60)


def test_nothing_moving_has_no_eta() -> None:
    clock = Ticking()
    rate = Rate(clock=clock)
    assert rate.eta_s(10) is None
    rate.update(0, 0)
    clock.now = 5.0
    rate.update(0, 0)
    assert rate.eta_s(10) is None
    assert rate.eta_s(0) == 0.0


def test_a_token_count_that_falls_back_is_no_negative_rate() -> None:
    clock = Ticking()
    rate = Rate(clock=clock)
    rate.update(900, 9)
    clock.now = 10.0
    rate.update(100, 1)  # a lane died and its shard starts again
    assert rate.tokens_per_s == 0.0


def test_clock_counts_what_raises_and_every_thread() -> None:
    clock = Clock()
    with pytest.raises(RuntimeError), clock.spent("forward"):
        raise RuntimeError
    assert clock.seconds["forward"] > 0
    threads = [
        threading.Thread(target=lambda: [clock.add("other", 1.0) for _ in range(100)]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clock.seconds["other"] == pytest.approx(800)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "unknown"), (12.4, "12 s"), (250, "4 min 10 s"), (3900, "1 h 05 min"), (59.9, "1 min 00 s")],
)
def test_durations_read_well(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text
