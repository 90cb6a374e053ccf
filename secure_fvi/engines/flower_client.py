"""The ClientApp: a site's part under Flower. `session` stays for a whole job on the stream; `letter` answers one
message of carrier `messages`, from what the site's folder holds, since a ClientApp's memory ends with its message.

Which site it is, and its data, are the SuperNode's own configuration (`--node-config`), never the server's.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from secure_fvi.deployment.certificates import pem_of
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.names import now, printable
from secure_fvi.deployment.site import Site, client_of
from secure_fvi.deployment.site_job import Local
from secure_fvi.engines.flower_letters import Letter, read_letter, write_letter
from secure_fvi.engines.stream_client import answered
from secure_fvi.engines.stream_messages import MESSAGE
from secure_fvi.errors import InputError, SecureFVIError
from secure_fvi.logs import start_log

_log = logging.getLogger(__name__)

#: Seconds without a connection after which a session is given up, so that the SuperNode is free for the next run.
GIVE_UP = 60.0

app = ClientApp()


def site_of(node: Any) -> tuple[Home, Local]:
    """The site of a SuperNode's configuration. Raises InputError where it names none."""
    home = node.get("secure-fvi-home")
    if not home:
        raise InputError("the SuperNode's --node-config names no secure-fvi-home")
    data, data_dir = node.get("secure-fvi-data"), node.get("secure-fvi-data-dir")
    data_dir = data_dir or os.environ.get("SECURE_FVI_DATA")
    local = Local(Path(data) if data else None, Path(data_dir) if data_dir else None)
    return Home(Path(home)), local._replace(repeatable=bool(node.get("secure-fvi-repeatable", False)))


def stay(address: str, token: bytes, node: Any) -> str:
    """Take part in the job at `address` to its end: why it ended before, or nothing."""
    try:
        home, local = site_of(node)
        site = Site(home, local, lambda job, path: client.stop())
        try:
            server = home.roster(now()).of_role("server")[0].id
            client = client_of(home, address, server, site.handle)
            client.token, client.give_up, client.longest = token, GIVE_UP, site.longest
            client.run()
        finally:
            site.close()
    except SecureFVIError as error:
        _log.warning("the session ended: %s", error)
        return printable(str(error))
    except Exception as error:
        # What else goes wrong may tell of data, and Flower would send it: it stays at the site.
        _log.exception("the session ended")
        return f"{type(error).__name__}; the site's log says more"
    return ""


def answer(pieces: dict[str, bytes], node: Any) -> dict[str, bytes]:
    """The answer to one letter from the server. Raises SecureFVIError where it is not for this site, or forged."""
    home, local = site_of(node)
    received = read_letter(pieces, home, ["server"])
    asked = received.letter
    status, body = MESSAGE, b""
    if asked.receiver == home.id:
        site = Site(home, local)
        try:
            status, body = answered(site.handle, asked.job, asked.body)
        finally:
            site.close()
    elif asked.receiver:
        raise InputError(f"a letter for '{asked.receiver}', and this is '{home.id}'")
    identity = home.identity_in(home.roster(now()))
    reply = Letter(pem_of(home.certificate()), asked.job, received.sender, received.digest, status, body)
    return write_letter(reply, identity)[0]


def _session(message: Message, context: Context) -> Message:
    start_log(False, "text")
    asked = message.content["session"]
    why = stay(str(asked["address"]), bytes(asked["token"]), context.node_config)
    return Message(RecordDict({"session": ConfigRecord({"ended": why})}), reply_to=message)


def _letter(message: Message, context: Context) -> Message:
    start_log(False, "text")
    try:
        pieces = {name: bytes(record["piece"]) for name, record in message.content.items()}
        content = {name: ConfigRecord({"piece": piece}) for name, piece in answer(pieces, context.node_config).items()}
    except SecureFVIError as error:
        _log.warning("a letter was not answered: %s", error)
        content = {"error": ConfigRecord({"reason": printable(str(error))})}
    except Exception as error:
        _log.exception("a letter was not answered")
        content = {"error": ConfigRecord({"reason": f"{type(error).__name__}; the site's log says more"})}
    return Message(RecordDict(content), reply_to=message)


app.query("session")(_session)
app.query("letter")(_letter)
