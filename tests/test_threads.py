# SPDX-License-Identifier: Apache-2.0
"""Threads of one process that compile at the same time."""

from processes import python

FIRST = """
import threading
import torch

barrier, errors = threading.Barrier(4), []

def look_up():
    barrier.wait()
    try:
        torch.compile(torch.nn.Linear(2, 2), backend="coda")
    except Exception as error:
        errors.append(repr(error))

threads = [threading.Thread(target=look_up) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(errors)
"""


def test_threads_that_compile_first_register_the_backend_once():
    assert python("-c", FIRST).stdout.strip() == "[]"
