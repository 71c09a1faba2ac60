"""Jobs in several processes: what they return and report, and how they end."""

from __future__ import annotations

import math
import os
import signal
import time

import pytest
import torch

from cumulant.core.errors import GroupError
from cumulant.lab import workers
from cumulant.lab.workers import Workers, cores, duration


def threads(_):
    return torch.get_num_threads(), signal.getsignal(signal.SIGINT) == signal.SIG_IGN, os.getpid()


def reporting(number):
    workers.report(number)
    return number


def until_stopped(path):
    while not workers.stopping():
        time.sleep(0.01)
    path.write_text("saved")


def failing(number):
    raise ValueError(f"no {number}")


def test_what_jobs_return_and_report():
    told = []
    with Workers(2) as both:
        assert sorted(both.each(math.sqrt, [16, 4, 9])) == [2, 3, 4]
        assert sorted(both.each(reporting, range(5), told=told.append)) == [0, 1, 2, 3, 4]
        facts = list(both.each(threads, range(4)))
    assert sorted(told) == [0, 1, 2, 3, 4]
    assert {(count, deaf) for count, deaf, _ in facts} == {(1, True)}
    assert os.getpid() not in {process for *_, process in facts}


def test_jobs_begin_in_the_order_given():
    with Workers(1) as one:
        assert list(one.each(math.sqrt, [16, 4, 9])) == [4, 2, 3]


def test_an_error_is_that_of_the_job():
    with pytest.raises(ValueError, match="no 3"), Workers(2) as both:
        list(both.each(failing, [3]))


def test_a_process_that_dies_is_told():
    with pytest.raises(GroupError, match=r"worker process died.*with fewer"), Workers(2) as both:
        list(both.each(os._exit, [3]))


def interrupt():
    raise KeyboardInterrupt


def test_an_interruption_ends_jobs_at_once():
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Workers(1) as one:
        list(one.each(time.sleep, [600], waiting=interrupt))
    assert time.monotonic() - begun < 120


def test_jobs_that_save_are_given_the_time(tmp_path):
    path = tmp_path / "state"
    with pytest.raises(KeyboardInterrupt), Workers(1, grace=120) as one:
        list(one.each(until_stopped, [path], waiting=interrupt))
    assert path.read_text() == "saved"


def test_durations_and_cores():
    assert [duration(x) for x in (40, 400, 9000)] == ["40 s", "7 min", "2.5 h"]
    assert 1 <= cores() <= (os.cpu_count() or 1)
