"""SIGUSR1 asks a running command what it is at; the answer is one line of JSON on stderr."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colibri.llm import LLM


@contextmanager
def inspectable(llm: LLM) -> Iterator[None]:
    """Answer SIGUSR1 while the block runs, where the system has such a signal.

    A thread of its own answers: the signal may come while the interrupted code holds the very locks
    that the answer needs. It is woken by the byte that Python writes wherever the signal arrives; a
    handler would have to wait for the main thread, which may be reading its input.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not hasattr(signal, "SIGUSR1") or not is_main:
        yield
        return
    asked, ask = os.pipe()
    thread = threading.Thread(
        target=_answer, args=(llm, asked), name="colibri-inspection", daemon=True
    )
    thread.start()
    os.set_blocking(ask, False)
    woken = signal.set_wakeup_fd(ask, warn_on_full_buffer=False)
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.set_wakeup_fd(woken)
        os.close(ask)
        thread.join()
        os.close(asked)


def _answer(llm: LLM, asked: int) -> None:
    while arrived := os.read(asked, 1):
        if arrived[0] != signal.SIGUSR1:
            continue
        try:
            state = llm.inspect()
        except Exception as error:  # a look at what changes meanwhile ends nothing
            state = {"error": repr(error)}
        sys.stderr.write(f"{json.dumps(state)}\n")
        sys.stderr.flush()
