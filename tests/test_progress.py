"""Rates and time left go by tokens; seconds are counted once and under their name."""

import threading
import time
from contextlib import AbstractContextManager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layertap.progress import SPENT_ON, Clock, Rate, SpentOn, bottleneck, format_duration


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


@given(st.lists(st.tuples(st.sampled_from(SPENT_ON), st.integers(0, 9), st.integers(1, 9)), max_size=8))
def test_every_second_counts_once_under_the_first_name_that_is_true_of_it(
    blocks: list[tuple[SpentOn, int, int]],
) -> None:
    now = Ticking()
    clock = Clock(now)
    expected = dict.fromkeys(SPENT_ON, 0.0)
    open_blocks: dict[int, AbstractContextManager[None]] = {}
    for second in range(20):
        now.now = float(second)
        for k, (on, begin, lasts) in enumerate(blocks):
            if second == begin:
                open_blocks[k] = clock.spent(on)
                open_blocks[k].__enter__()
            if second == begin + lasts:
                open_blocks.pop(k).__exit__(None, None, None)
        expected[next((on for on in SPENT_ON if on in {blocks[k][0] for k in open_blocks}), "other")] += 1
    now.now = 20.0
    assert clock.seconds == {on: spent_s for on, spent_s in expected.items() if spent_s}


def test_the_oldest_open_block_is_the_oldest_even_if_there_was_one_all_along() -> None:
    now = Ticking()
    clock = Clock(now)
    blocks = [clock.spent("copying to the host") for _ in range(10)]
    for second, block in enumerate(blocks):  # each begins before the last one ends
        block.__enter__()
        now.now = second + 1.0
        if second:
            blocks[second - 1].__exit__(None, None, None)
    assert clock.open_s("copying to the host") == 1.0
    assert clock.mean_s("copying to the host") == 2.0


def test_a_block_that_raises_is_counted_and_left() -> None:
    now = Ticking()
    clock = Clock(now)
    with pytest.raises(RuntimeError), clock.spent("forward"):
        now.now = 2.0
        raise RuntimeError
    now.now = 5.0
    assert clock.seconds == {"forward": 2.0, "other": 3.0}


def test_seconds_of_many_threads_add_up_to_those_that_passed() -> None:
    before = time.perf_counter()
    clock = Clock()
    after = time.perf_counter()

    def spend(on: SpentOn) -> None:
        for _ in range(500):
            with clock.spent(on), clock.spent("compiling"):
                pass

    threads = [threading.Thread(target=spend, args=(on,)) for on in SPENT_ON]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    least_s = time.perf_counter() - after
    assert least_s - 1e-6 <= sum(clock.seconds.values()) <= time.perf_counter() - before + 1e-6


@pytest.mark.parametrize(
    ("seconds", "sentence"),
    [
        ({}, "not at work yet"),
        (
            {"loading": 40, "forward": 980, "waiting for the store": 20},
            "bound by the GPU: 98 % of the time in the forward pass",
        ),
        (
            {"forward": 55, "waiting for the store": 41, "other": 4},
            "bound by the store: 41 % of the time waiting for it; "
            "more upload bandwidth or fewer lanes on it would speed it up",
        ),
        (
            {"forward": 70, "waiting for data": 25, "waiting for the store": 5},
            "bound by the data: 25 % of the time waiting for it; "
            "a faster way from the store to this host, or fewer other processes on its cores would "
            "speed it up",
        ),
        (
            {"forward": 20, "copying to the host": 80},
            "bound by the copying to the host: 80 % of the time waiting for it; "
            "a faster link between GPU and host, or fewer layers to store would speed it up",
        ),
        (
            {"forward": 60, "other": 40},
            "bound by none of GPU, data and store: 40 % of the time elsewhere; "
            "the lane had no shard, or one that waited for another try",
        ),
        (
            {"loading": 30, "compiling": 40, "self-check": 10, "forward": 20},
            "bound by its start: 80 % of 1 min 40 s gone before the work, most of it in compiling; "
            "a longer plan or fewer lanes would spread it",
        ),
    ],
)
def test_the_bottleneck_is_named(seconds: dict[str, float], sentence: str) -> None:
    assert bottleneck(seconds, device="GPU") == sentence


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "unknown"), (12.4, "12 s"), (250, "4 min 10 s"), (3900, "1 h 05 min"), (59.9, "1 min 00 s")],
)
def test_durations_read_well(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text
