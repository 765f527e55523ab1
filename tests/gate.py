"""The thread of a commit, stopped at a named point."""

import threading


class Gate:
    """Stops the commit thread at a point until it is let go."""

    def __init__(self) -> None:
        self.point = ""
        self.reached, self.go_on = threading.Event(), threading.Event()

    def close(self, point: str) -> None:
        self.point = point
        self.reached.clear()
        self.go_on.clear()

    def hook(self, name: str) -> None:
        if name == self.point and threading.current_thread().name.startswith("tierstore-commit"):
            self.reached.set()
            assert self.go_on.wait(60)

    def open(self) -> None:
        self.point = ""
        self.go_on.set()
