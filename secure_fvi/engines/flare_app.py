"""What FLARE loads in its own processes, at the server and at each site: two classes of the installed package.

A site's has no part of the site in it: it carries letters to `flare.Door` and back.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from secure_fvi.engines.letters import ANSWERED, BUSY, DOOR_VARIABLE, LETTER, REFUSED, WORKING, Way
from secure_fvi.errors import SecureFVIError

_log = logging.getLogger(__name__)
TOPIC = "secure-fvi"


class ServerController(Controller):  # type: ignore[misc]
    """The workflow of a job: our server, whose exchanges FLARE carries."""

    def __init__(self, job: str) -> None:
        """job: its name in the server's own folder, which `SECURE_FVI_HOME` names."""
        super().__init__()
        self.job = job

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing: all is in `control_flow`."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing is held: what lasts is in the server's folder."""

    def process_result_of_unknown_task(self, *_: Any) -> None:
        """There are no tasks."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        from secure_fvi.engines.flare_server import REPLY, Ended, Post, home_of_environment, left, serve
        from secure_fvi.engines.remote import shown

        engine = fl_ctx.get_engine()

        def send(site: str, letter: bytes) -> Mapping[str, Any]:
            # One call a site: FLARE 2.9.0's own for many messages at once fails on an argument of its own.
            request = Shareable({LETTER: letter})
            found = engine.send_aux_request([site], TOPIC, request, REPLY, fl_ctx, optional=True) or {}
            reply: Mapping[str, Any] = found.get(site, {})
            return reply

        try:
            home = home_of_environment()
            post = Post(send, lambda: bool(abort_signal.triggered))
            serve(home, self.job, post.carrier)
        except SecureFVIError as error:
            text = shown(str(error).encode())
            _log.error("%s", text)
            left(self.job, str(fl_ctx.get_job_id()), isinstance(error, Ended), text)
            self.system_panic(text, fl_ctx)


class SiteExecutor(Executor):  # type: ignore[misc]
    """Brings what comes from the server to the site's door, and what the site says back."""

    def __init__(self) -> None:
        super().__init__()
        self._way: Way | None = None
        self._lock = threading.Lock()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            fl_ctx.get_engine().register_aux_message_handler(TOPIC, self._answer)
        elif event_type == EventType.END_RUN:
            with self._lock:
                self._leave()

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Refused: jobs of ours have no tasks."""
        return make_reply(ReturnCode.TASK_UNKNOWN)

    def _leave(self) -> None:
        if self._way is not None:
            self._way.close()
            self._way = None

    def _answer(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        content = request.get(LETTER)
        if not isinstance(content, bytes):
            return make_reply(ReturnCode.BAD_REQUEST_DATA)
        with self._lock:
            try:
                self._way = self._way or Way(Path(os.environ[DOOR_VARIABLE]))
                kind, answer = self._way.ask(content)
            except BlockingIOError:  # another job of FLARE is there, and this one has its turn after it
                kind, answer = WORKING, b""
            except (EOFError, OSError) as error:
                self._leave()
                _log.warning("the site's process is not there (%s)", type(error).__name__)
                return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        if kind not in (ANSWERED, WORKING):
            return make_reply(ReturnCode.BAD_REQUEST_DATA if kind == REFUSED else ReturnCode.EXECUTION_EXCEPTION)
        reply = make_reply(ReturnCode.OK)
        reply.update({LETTER: answer} if kind == ANSWERED else {BUSY: True})
        return reply
