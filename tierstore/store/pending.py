"""A commit that is being written while its caller goes on."""

from concurrent.futures import Future

__all__ = ["PendingCommit"]


class PendingCommit(Future[int]):
    """The future of ``Store.commit_async``; its result is the version's number.

    Knows whether anybody has looked at how it ended: an error that nobody saw must not be lost.

    Attributes:
        version: the number that the version will have.
    """

    def __init__(self, version: int) -> None:
        super().__init__()
        self.version = version
        self._was_seen = False

    def result(self, timeout: float | None = None) -> int:
        """Wait until the version is durable; its number.

        Raises:
            TimeoutError: it is not, after ``timeout`` seconds.
            DiskFullError: the last version stands, and the rows are still in memory, part of the next commit.
        """
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the version is durable, or has failed; the error, if there was one."""
        error = super().exception(timeout)
        self._was_seen = True
        return error

    def unseen_error(self) -> BaseException | None:
        """Wait for the end; the error, if there was one that nobody has seen. Asked again, it has been seen."""
        seen, error = self._was_seen, self.exception()
        return None if seen else error
