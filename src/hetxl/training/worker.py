"""A process that works for this one, one thread, and ends with it."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch


class Worker:
    """A process that does one piece of work after the other; use it as a context.

    It is deaf to Ctrl-C, which is for the one who asks: that one ends it. Where the one who asks is gone it ends by
    itself, in the middle of its work: it would otherwise write into the directory of whoever takes that up again. (The
    executors of the standard library wait for work under way, and for ever if Ctrl-C reaches a process that has none.)

    Args:
        work: what it does with an item.
    """

    def __init__(self, work: Callable[..., Any]):
        # A new process, not a copy of this one: threads that torch has started here would be missing in a copy.
        context = multiprocessing.get_context("spawn")
        self._talk, talk = context.Pipe()
        life, self._life = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve, args=(work, talk, life))
        with _deaf():
            self._process.start()
        talk.close()
        life.close()

    def give(self, item: Any) -> Connection:
        """Something to do; gives what to wait for."""
        self._talk.send(item)
        return self._talk

    def take(self) -> Any:
        """What it found; raises what was raised there."""
        try:
            found, error, trace = self._talk.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            code = self._process.exitcode
            raise ChildProcessError(
                f"a process ended with code {code} before its work was done"
                + ("; something killed it: if memory ran out, take fewer jobs" if code == -signal.SIGKILL else "")
            ) from None
        if error is not None:
            raise error from ElsewhereError(trace)
        return found

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it, whatever it does."""
        self._process.terminate()
        self._process.join()
        self._process.close()
        self._talk.close()
        self._life.close()


class ElsewhereError(Exception):
    """Where in another process an error came from."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@contextmanager
def _deaf() -> Iterator[None]:
    """What is started while it lasts ignores Ctrl-C from its first moment on; only a main thread can see to that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(work: Callable[[Any], Any], talk: Connection, life: Connection) -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(life,), daemon=True).start()
    while True:
        item = talk.recv()
        try:
            answer = work(item), None, ""
        except Exception as error:
            answer = None, _as_sent(error), traceback.format_exc()
        talk.send(answer)


def _end_with(life: Connection) -> None:
    """Nothing is ever sent: it closes with the process at its other end."""
    with contextlib.suppress(EOFError, OSError):
        life.recv()
    os._exit(1)


def _as_sent(error: Exception) -> Exception:
    """The error, or where it cannot be sent one that says the same."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
