"""A lock has one holder in every kind of store, and a dead holder loses it."""

import threading
import time

import pytest

from precision_time.storage.errors import StorageError
from precision_time.storage.exclusive import hold_exclusively
from precision_time.storage.filesystem import open_store

LOCK = "name/.lock"


def test_of_several_writers_one_at_a_time_is_inside(store_url: str) -> None:
    inside, most, done = 0, 0, []

    def work(token: str) -> None:
        nonlocal inside, most
        with hold_exclusively(open_store(store_url), LOCK, token=token, stale_after_s=60, wait_s=60):
            inside += 1
            most = max(most, inside)
            time.sleep(0.02)
            inside -= 1
            done.append(token)

    threads = [threading.Thread(target=work, args=(f"run {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(done) == [f"run {number}" for number in range(4)]
    assert most == 1
    assert not open_store(store_url).exists(LOCK)


def test_the_lock_of_a_dead_holder_is_taken_over_and_that_of_a_living_one_waited_for(store_url: str) -> None:
    store = open_store(store_url)
    store.create_bytes(LOCK, b"a run that was killed")
    began = time.monotonic()
    with hold_exclusively(store, LOCK, token="next", stale_after_s=0.3, wait_s=60) as held_until:
        assert time.monotonic() - began > 0.3
        assert began + 0.3 < held_until <= time.monotonic() + 0.3
        with (
            pytest.raises(StorageError, match="another run holds this lock"),
            hold_exclusively(store, LOCK, token="third", stale_after_s=60, wait_s=0.2),
        ):
            pytest.fail("two inside")
    assert not store.exists(LOCK)


def test_the_same_holder_gets_in_again_at_once_and_only_the_holder_removes_the_file(store_url: str) -> None:
    store = open_store(store_url)
    store.create_bytes(LOCK, b"night-1 of its first attempt")
    with hold_exclusively(store, LOCK, token="night-1", stale_after_s=60, wait_s=0.5):
        store.write_bytes(LOCK, b"somebody took it over")
    assert store.read_bytes(LOCK) == b"somebody took it over"
