"""What FLARE loads in its own processes, at the server and at each site: two classes of the installed package."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from secure_fvi.engines.flare import (
    BUSY,
    LETTER,
    REPLY,
    Ended,
    Post,
    SiteParty,
    home_of_environment,
    left,
    local_of_environment,
    serve,
)
from secure_fvi.engines.remote import shown
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
    """A site's party in a job of FLARE. Which site it is, and its data, are said by the site's own environment."""

    def __init__(self) -> None:
        super().__init__()
        self._party: SiteParty | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            self._party = SiteParty(home_of_environment(), local_of_environment())
            fl_ctx.get_engine().register_aux_message_handler(TOPIC, self._answer)
        elif event_type == EventType.END_RUN and self._party is not None:
            self._party.close()
            self._party = None

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Refused: jobs of ours have no tasks."""
        return make_reply(ReturnCode.TASK_UNKNOWN)

    def _answer(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        content, party = request.get(LETTER), self._party
        if not isinstance(content, bytes) or party is None:
            return make_reply(ReturnCode.BAD_REQUEST_DATA)
        try:
            answer = party.answer(content)
        except SecureFVIError as error:
            _log.warning("a letter was refused: %s", shown(str(error).encode()))
            return make_reply(ReturnCode.BAD_REQUEST_DATA)
        except Exception:  # its kind may tell of data: it stays at the site
            _log.exception("a letter could not be answered")
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        reply = make_reply(ReturnCode.OK)
        reply.update({LETTER: answer} if answer is not None else {BUSY: True})
        return reply
