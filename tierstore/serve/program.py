"""A server's process: its ports, its signals, from start to end; and several that share the ports."""

import asyncio
import contextlib
import gc
import logging
import math
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import grpc
import numpy as np
import torch
import uvloop
from starlette.types import ASGIApp

from ..errors import TierstoreError
from ..system.processes import address
from ..system.signals import Flag, end_with, handlers_restored
from ..updates.fetch import Source
from ..updates.listing import MIN_REQUESTS, Canary, Measures
from .admin import admin_app, admin_routes, metrics_route, read_only_route
from .config import ServeConfig
from .credentials import Tls
from .grpc.codec import HEALTH_SERVICE
from .grpc.server import GrpcServer
from .limits import Limits
from .logs import configure, flush
from .messages import ServeError, Status
from .metrics import Metrics, StateCollector
from .replica import Replica
from .repository import Repository
from .rest.app import RestApp
from .rest.server import HttpServer, listen

_LOG: Final = logging.getLogger("tierstore.serve")
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_START_END_SECONDS: Final = 2.0
_POLL_SECONDS: Final = 0.2

_OWN: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_ANSWER_SECONDS: Final = 30.0
_ADMIN_CONNECTIONS: Final = 200
_OTHER_FILES: Final = 256 + 2 * _ADMIN_CONNECTIONS
"""Files that a server has open besides clients' connections."""


class Ports(NamedTuple):
    """What a server listens on; -1 for what it does not."""

    rest: int
    grpc: int
    admin: int


class Server:
    """Everything of one process, in one event loop; ``worker`` is its number among those that share the ports."""

    def __init__(self, config: ServeConfig, *, worker: int = 0) -> None:
        self._config = config
        self._worker = worker
        self._token = config.token
        self.tls = tls = Tls(Path(config.tls_certificate), Path(config.tls_key)) if config.tls_certificate else None
        self.metrics = Metrics([], worker=worker)
        self.repository = Repository(config, self.metrics)
        self.metrics.add(StateCollector(self.repository.state))
        limits = Limits(
            bodies_bytes=max(Limits().bodies_bytes, config.grpc_body_bytes),
            connections=config.connections,
            idle_seconds=config.idle_seconds,
        )
        self._http = HttpServer(
            RestApp(self.repository, limits=limits, token=self._token),
            limits=limits,
            tls=tls,
            on_refused=partial(self.repository.note_refused, "http"),
        )
        self._replica: Replica | None = None
        self._admin = HttpServer(self._admin_app(), limits=Limits(connections=_ADMIN_CONNECTIONS), tls=tls)
        self._grpc = GrpcServer(
            self.repository,
            replace(limits, body_bytes=config.grpc_body_bytes),
            host=config.host,
            port=max(config.grpc_port, 0),
            reuse_port=config.workers > 1,
            token=self._token,
            tls=tls,
        )
        self._background: list[asyncio.Task[None]] = []

    def _admin_app(self) -> ASGIApp:
        engine, token = self.repository, self._config.admin_token
        routes = [metrics_route(self.metrics)]

        async def refuse_rollback() -> int:
            way_out = "go back there, with tierstore rollback, and it follows"
            raise ServeError(Status.INVALID, f"this server follows its trainer: {way_out}")

        if (config := self._config).sources:
            bounds = {name: getattr(config, f"canary_{name}") for name in Canary._fields}
            self._replica = Replica(
                Path(config.store), [Source(url, token) for url in config.sources], extra=engine.only.extra,
                refresh=engine.refresh, lookups=engine.only.row_counts.top,
                canary=Canary(**bounds) if config.canary else None, measure=self._measure,
            )  # fmt: skip
            routes += self._replica.routes()
        if token is None:
            routes.append(read_only_route())
        else:
            rollback = self._replica.roll_back if self._replica else refuse_rollback
            routes += admin_routes(refresh=engine.refresh, rollback=rollback)
        return admin_app(routes, token=token)

    async def start(self) -> Ports:
        """Listen, open the store, and be ready. Workers open the store first: a shared port has no unready ones.
        OSError: a port is taken. Or as ``StoreEngine.start``. Nothing is left open then."""
        config, is_shared = self._config, self._config.workers > 1
        rest, grpc_port, admin = -1, -1, -1
        try:
            if config.admin_port >= 0:
                port = config.admin_port and config.admin_port + self._worker
                admin = await self._admin.start(listen(config.admin_host, port))
            if is_shared:
                await self.repository.start()
            rest = await self._http.start(listen(config.host, config.port, reuse_port=is_shared))
            if config.grpc_port >= 0:
                grpc_port = await self._grpc.start()
            _LOG.info("listening: REST on %s:%d, gRPC on %d, admin on %d", config.host, rest, grpc_port, admin)
            if not is_shared:
                await self.repository.start()
            if self.tls is None:
                await self._require_answers(rest, grpc_port)
        except BaseException:
            await self.stop()
            raise
        # What is there now stays: the collector need not look at it again while requests wait.
        gc.collect()
        gc.freeze()
        engines, only = self.repository.engines.values(), self.repository.only
        tasks = [(each, "following", each.follow()) for each in engines]
        tasks += [(each, "keeping hot rows", each.keep_hot_rows()) for each in engines]
        tasks += [(each, "watching the loss", each.watch_loss()) for each in engines]
        if self._replica is not None:
            tasks.append((only, "following sources", self._replica.run()))
        if self.tls is not None:
            tasks.append((only, "watching the certificate", self.tls.watch()))
        for engine, name, task in tasks:
            self._background.append(asyncio.create_task(task, name=name))
            self._background[-1].add_done_callback(engine.note_ended)
        return Ports(rest, grpc_port, admin)

    def _measure(self, seconds: int, commit_id: str) -> Measures | None:
        """How the server fared in the last seconds; None while its watch has no loss of the commit. For any thread."""
        loss, every = None, self.metrics.window.latencies(seconds)
        if (watched := self.repository.only.watched) is not None:
            if watched.last is None or watched.last.commit_id != commit_id:
                return None
            loss = watched.last.log_loss if math.isfinite(watched.last.log_loss) else sys.float_info.max
        if len(every) < MIN_REQUESTS:
            return Measures(loss)
        good = every[~np.isnan(every)]
        p99 = float(np.quantile(good, 0.99, method="inverted_cdf")) if len(good) else None
        return Measures(loss, 1 - len(good) / len(every), p99)

    async def _require_answers(self, rest: int, grpc_port: int) -> None:
        """TierstoreError unless both protocols answer: private parts of uvicorn and grpcio are used."""
        host = _OWN.get(self._config.host, self._config.host)
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                reader, writer = await asyncio.open_connection(host, rest)
                writer.write(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                answer = await reader.read()
                writer.close()
                if not answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 503 ")):
                    raise OSError(f"REST answers {answer[:100]!r}")
                if grpc_port >= 0:
                    options = [("grpc.enable_http_proxy", 0)]
                    async with grpc.aio.insecure_channel(address(host, grpc_port), options=options) as channel:
                        await channel.unary_unary(f"/{HEALTH_SERVICE}/Check")(b"")
        except Exception as error:
            message = f"the server does not answer itself ({type(error).__name__}: {error}); its log may say why"
            raise TierstoreError(f"{message}. Is it with this release's versions of uvicorn and grpcio?") from error

    async def stop(self) -> None:
        """Take no more requests, answer those that came, within the time that the configuration gives, and close."""
        await self.repository.begin_to_stop()
        grace = self._config.grace_seconds
        await asyncio.gather(self._http.stop(grace), self._grpc.stop(grace))
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.repository.stop()
        await self._admin.stop(1.0)
        gc.unfreeze()


def run(config: ServeConfig, *, on_ready: Callable[[Ports], Any], worker: int = 0) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit status. Handlers of signals are left that do nothing.
    ``on_ready`` is called with the ports once requests are taken, or a replica waits for its first update."""
    configure(config.log_level.upper())
    for each in _SIGNALS:  # they end the process, until the loop sees to them
        signal.signal(each, signal.SIG_DFL)
    torch.set_num_threads(config.num_threads)
    _make_room_for(config.connections)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, worker, on_ready))
    return 0


def _make_room_for(connections: int) -> None:
    """Raise this process's limit of open files to what connections need, if it may; else tell."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 3 * connections + _OTHER_FILES  # REST has twice as many, as those beyond the limit are told so
    if soft != resource.RLIM_INFINITY and soft < wanted:
        found = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (found, hard))
        if found < wanted:
            message = "ulimit -n is %d, and %d connections of each protocol want %d: raise it, or lower --connections"
            _LOG.warning(message, found, connections, wanted)


async def _serve(config: ServeConfig, worker: int, on_ready: Callable[[Ports], Any]) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    server = Server(config, worker=worker)  # which may compile kernels

    def stop() -> None:
        stopping.set()
        if config.workers > 1:  # a second signal may be the parent's, which passes each on
            return
        for each in _SIGNALS:  # a second one ends the process at once
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)

    for each in _SIGNALS:
        loop.add_signal_handler(each, stop)
    # By default SIGHUP ends a process.
    loop.add_signal_handler(signal.SIGHUP, server.tls.renew if server.tls is not None else int)
    starting = asyncio.create_task(server.start())
    waiting = asyncio.create_task(stopping.wait())
    await asyncio.wait((starting, waiting), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        await server.repository.begin_to_stop()  # the warm-up sees it and ends
        if not (await asyncio.wait((starting,), timeout=_START_END_SECONDS))[0]:  # a thread compiles kernels, perhaps
            _LOG.warning("stopped while it starts, before it took requests")
            flush()
            os._exit(0)
    ports = await starting
    if not stopping.is_set():
        on_ready(ports)
    await waiting
    _LOG.info("stopping: requests under way have %.0f s", config.grace_seconds)
    await server.stop()


# Several processes that share the ports, each with its own part of the memory.


def share_of(size: int | str, workers: int) -> int | str:
    """One worker's part of a budget, in the form it was given."""
    if isinstance(size, int):
        return size // workers
    text = size.strip()
    number = text[: len(text) - len(text.lstrip("0123456789._"))]
    return f"{float(number) / workers:.6f}{text[len(number) :]}"


def worker_config(config: ServeConfig, index: int) -> ServeConfig:
    """The settings of one of several processes: its part of each budget, and a file of its own to record in, of
    NAME.npz NAME.0.npz and so on."""
    if config.workers == 1:
        return config

    def part(each: Any) -> Any:
        stem, suffix = os.path.splitext(each.record)
        record = each.record and f"{stem}.{index}{suffix}"
        return replace(each, ddr=each.ddr and share_of(each.ddr, config.workers), record=record)

    return replace(cast(ServeConfig, part(config)), stores=tuple(map(part, config.stores)))


def recording_paths(config: ServeConfig) -> list[str]:
    """The file of each process, and of each store, to record in."""
    every = [each for index in range(config.workers) for each in worker_config(config, index).by_store().values()]
    return [each.record for each in every if each.record]


def run_workers(config: ServeConfig, *, on_ready: Callable[[Ports], Any]) -> int:
    """Serve with ``config.workers`` processes until SIGTERM or Ctrl-C; returns the exit status. If one ends by
    itself, all are stopped, and the status is 1: the supervisor of the command starts it again. OSError: a port
    is taken."""
    configure(config.log_level.upper())
    context = multiprocessing.get_context("spawn")
    stopping = Flag()
    processes: list[BaseProcess] = []
    waited_for = [context.Event() for _ in range(config.workers)]
    ended = 0
    for port in (config.port, config.grpc_port):
        if port >= 0:
            for listener in listen(config.host, port):  # alone: workers of two servers would share it, unseen
                listener.close()
    with _passed_on(stopping, processes):
        for index in range(config.workers):
            arguments = (worker_config(config, index), index, waited_for[index], os.getpid())
            processes.append(context.Process(target=_work, args=arguments, name=f"tierstore-worker-{index}"))
            processes[index].start()
        while not ended and not stopping.wait(_POLL_SECONDS):
            for index, process in enumerate(processes):
                if not process.is_alive():
                    ended = 1
                    _LOG.error("worker %d ended (exit status %s): all are stopped", index, process.exitcode)
            if waited_for and all(each.is_set() for each in waited_for):
                waited_for = []
                on_ready(Ports(config.port, config.grpc_port, config.admin_port))
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + config.grace_seconds + 10
        for process in processes:
            process.join(max(0.1, deadline - time.monotonic()))
            process.kill()
            process.join()
    return ended


def _work(config: ServeConfig, index: int, ready: Any, parent: int) -> None:
    end_with(parent, signal.SIGTERM)
    try:
        run(config, worker=index, on_ready=lambda _: ready.set())
    except (TierstoreError, ValueError, OSError) as error:
        _LOG.error("%s", error)
        sys.exit(1)


@contextlib.contextmanager
def _passed_on(stopping: Flag, processes: Sequence[BaseProcess]) -> Iterator[None]:
    def pass_on(number: int, _: object) -> None:
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    with handlers_restored(*_SIGNALS, signal.SIGHUP):
        for each in _SIGNALS:
            signal.signal(each, lambda *_: stopping.set())
        signal.signal(signal.SIGHUP, pass_on)
        yield
