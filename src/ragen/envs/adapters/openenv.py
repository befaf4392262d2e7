"""Environments on a server that speaks OpenEnv's protocol: JSON messages over a WebSocket.

A server is named by its URL. It describes itself at ``/metadata`` and ``/schema``. An environment
has one session at ``/ws``. After a call that failed, the next `reset` opens a new session. A server
that is slow or gone fails the episode.

A server whose actions are calls of tools (OpenEnv's `MCPEnvironment`) lists the tools in a step. A
server of `ragen serve` also tells what RAGEN needs to play as in this process
(`ragen.serving.sessions`).
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from ragen.config.keys import BUDGETS
from ragen.core.errors import RagenError
from ragen.core.pictures import Picture
from ragen.core.user_code import seconds_left
from ragen.envs.adapters.adapted import Adapted, Played, version_of
from ragen.envs.adapters.mcp import text_of
from ragen.envs.contract import Schema
from ragen.envs.tools import read_call, tool_schema
from ragen.web.security import token_in

CALL_S = 60.0
"""Seconds that a server may take to answer, unless the limit of the call is shorter."""
TOKEN = "OPENENV_TOKEN"
"""The environment variable of the token that a server asks for."""
CALL_FIELDS = {"type", "tool_name", "arguments"}
"""The fields of an action that is a call of a tool."""
URL_EXPECTED = (
    "the URL of a server is expected, as in openenv:http://host:8000; `uvicorn package.module:app` "
    "serves an application, `docker run -p 8000:8000 IMAGE` an image"
)
MOST_SAID = 200
"""The most characters of a refusal that are shown."""


class About(NamedTuple):
    """A server's description of itself, and a hash of the description, `digest`.

    `fields` has the JSON schemas of an action's fields, and `state` those of a state's fields.
    `tools` are as chat templates take them. `pictures` says that metadata has those of an
    observation. If there are no `fields`, every action is a call.
    """

    name: str
    description: str
    digest: str
    fields: dict[str, Any]
    state: dict[str, Any]
    tools: tuple[Schema, ...]
    pictures: bool


class OpenEnvEnv(Adapted):
    """An environment of an OpenEnv server, named by its URL.

    Observation: the server's text if that is its only field, else all fields by name. Actions: the
    names of an enumeration, else free text, which becomes the action's field, or is the whole
    action as a JSON object; calls of tools. Reward, Ends when: the server's. Success is what the
    metadata of the last observation say, else an end with a positive last reward. The level seed is
    the seed of the server's ``reset``. Random events follow from it, too, unless the server's state
    has a ``noise_seed``: then its ``reset`` takes one. Only an enumeration has random play.

    Parameters: `field`, the action's field for the answer, where it has several.
    """

    waits = "threads"

    def __init__(self, field: str | None = None) -> None:
        about = _about(self.target)
        self._token = token_in(TOKEN)
        self._fields = about.fields.keys()
        self._tools, self._rules = about.tools, about.description
        self.shows_pictures = about.pictures
        self._field = _field(self.name, about.fields, field) if self._fields else ""
        self._schema = about.fields.get(self._field, {})
        self.goal = self._rules.partition("\n")[0]
        names = self._schema.get("enum")
        self._actions = tuple(map(str, names)) if names and isinstance(names, list) else None
        self._takes_noise = "noise_seed" in about.state
        self._session: Any = None
        self._asked: Any = None  # the session that a thread waits for
        self.max_turns, self.actions_per_turn, self.max_actions = (
            _budget(about.state.get(each, {}), otherwise)
            for each, otherwise in zip(BUDGETS, (20, 1, 20), strict=True)
        )

    @classmethod
    def find(cls, target: str) -> tuple[str, ...]:
        _check_url(target)
        about = _about(target)
        return version_of("websockets"), f"{about.name} {about.digest}"

    @property
    def tools(self) -> tuple[Schema, ...]:
        return self._tools

    def begin(self, level_seed: int, noise_seed: int) -> str:
        seeds = {"seed": level_seed} | ({"noise_seed": noise_seed} if self._takes_noise else {})
        answer = self._ask("reset", seeds)
        metadata = _metadata(answer)
        if isinstance(metadata.get("goal"), str) and isinstance(metadata.get("rules"), str):
            self.goal, self._rules = metadata["goal"], metadata["rules"]
        if isinstance(metadata.get("actions"), list):
            self._schema = {**self._schema, "enum": metadata["actions"]}
            self._actions = tuple(map(str, metadata["actions"]))
        return self._look(answer["observation"])

    def play(self, action: str) -> Played:
        message = self._message(action)
        if message is None:
            names = ", ".join(each["function"]["name"] for each in self._tools)
            return Played(f"Error: call a tool; there are {names}", 0.0, False, False, False)
        answer = self._ask("step", message)
        reward, done = float(answer.get("reward") or 0.0), bool(answer.get("done"))
        metadata = _metadata(answer)
        truncated = done and metadata.get("truncated") is True
        success = metadata["success"] is True if "success" in metadata else reward > 0
        terminated = done and not truncated
        return Played(
            self._look(answer["observation"]), reward, terminated, truncated, terminated and success
        )

    def interrupt(self) -> None:
        if self._asked is not None:
            self._asked.close_socket()

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _look(self, observation: Any) -> str:
        if self.shows_pictures:
            files = map(b64decode, observation["metadata"]["pictures"])
            self._seen = tuple(map(Picture.of_png, files))
        return _shown(observation)

    def _message(self, action: str) -> dict[str, Any] | None:
        """An action in the server's form; ``None`` if it has to be a call and is not."""
        if not self._fields:
            call = read_call(action)
            if call is None:
                return None
            return {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
        if self.actions is not None:
            return {self._field: self._schema["enum"][self.action_index(action)]}
        try:
            value = json.loads(action)
        except ValueError:
            value = None
        # A single field takes every answer as it is, so that the server refuses none.
        several = len(self._fields) > 1
        if several and isinstance(value, dict) and {self._field} <= value.keys() <= self._fields:
            return value
        is_number = self._schema.get("type") in ("integer", "number")
        return {self._field: value if is_number and value is not None else action}

    def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """The server's answer to a message; a reset opens the session if there is none."""
        from websockets.exceptions import ConnectionClosed, WebSocketException

        try:
            session, self._session = self._session, None  # lost, if the call fails
            if session is None and kind == "reset":
                session = self._connect()
            if session is None:
                raise RuntimeError(f"{self.name}: the session has ended in an earlier call")
            self._asked = session
            try:
                with suppress(ConnectionClosed):  # the server's reason can still be read
                    session.send(json.dumps({"type": kind, "data": data}))
                answer = _read(session.recv(timeout=seconds_left(CALL_S)), self._token)
                if answer["type"] == "error":
                    raise RuntimeError(f"{self.name}: {_said(answer['data'])}")
                found: dict[str, Any] = answer["data"]
            except BaseException:  # a time limit, too: a late answer would be taken for the next
                session.close_socket()
                raise
        except WebSocketException as error:  # its text has what the server gives as the reason
            raise RuntimeError(f"{self.name}: {_masked(str(error), self._token)}") from None
        self._session = session
        return found

    def _connect(self) -> Any:
        from websockets.sync.client import connect

        return connect(
            f"ws{self.target.removeprefix('http').rstrip('/')}/ws",
            open_timeout=seconds_left(CALL_S),
            close_timeout=1,
            max_size=2**26,
            additional_headers=_credentials(self._token),
        )


def _credentials(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def _masked(text: str, token: str | None) -> str:
    return text if token is None else text.replace(token, "***")


def _read(text: str | bytes, token: str | None) -> Any:
    """The JSON that a server sends, with the token masked: answers are shown and recorded."""
    found = json.loads(text)
    if token is None:
        return found
    # The server may escape any character of the token; rewritten, it is escaped in one way only.
    return json.loads(_masked(json.dumps(found), json.dumps(token)[1:-1]))


def _check_url(target: str) -> None:
    """Refuse a URL that no server can have, or that may hold a secret."""
    try:
        url = urlsplit(target)
    except ValueError:
        raise RagenError(f"openenv:…: {URL_EXPECTED}") from None
    if "@" in url.netloc or url.query:
        raise RagenError(
            f"openenv:{url.scheme}://…: runs record the URL, so it may hold neither a password "
            f"nor a query; put a token into the environment variable {TOKEN}"
        )
    if url.scheme not in ("http", "https"):
        raise RagenError(f"openenv:{target}: {URL_EXPECTED}")


@lru_cache(maxsize=16)
def _about(target: str) -> About:
    """A server's description of itself; one that has answered is not asked again."""
    try:
        return _described(target)
    except (AttributeError, KeyError, TypeError, RecursionError):
        raise RagenError(f"openenv:{target}: what answers there is not an OpenEnv server") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == 401:
            raise RagenError(
                f"openenv:{target}: the server refuses the token; put its token into the "
                f"environment variable {TOKEN}"
            ) from None
        said = str(error) or type(error).__name__
        if isinstance(error, httpx.HTTPStatusError):
            reason = " ".join(error.response.text[:MOST_SAID].split())
            said = f"HTTP {error.response.status_code}: {reason}"
        said = _masked(said, token_in(TOKEN))
        raise RagenError(f"openenv:{target}: no OpenEnv server answers there ({said})") from None


def _described(target: str) -> About:
    metadata, schema = (_fetch(target, part) for part in ("metadata", "schema"))
    action, tools = schema.get("action", {}), schema.get("tools") or ()
    fields = {name: _whole(each, action) for name, each in action.get("properties", {}).items()}
    fields.pop("metadata", None)
    if "tools" not in schema and fields.keys() in (CALL_FIELDS, set()):
        listed = _fetch(target, "step", {"action": {"type": "list_tools"}})
        tools = [
            tool_schema(each["name"], each["description"], each["input_schema"])
            for each in listed["observation"]["tools"]
        ]
        fields = {}
    if not (fields or tools):
        raise RagenError(f"openenv:{target}: an action has no field, and there are no tools")
    name = str(metadata.get("name"))
    description = str(metadata.get("description") or metadata.get("name") or f"Play at {target}.")
    properties = schema.get("state", {}).get("properties", {})
    state = {name: dict(each) for name, each in properties.items()}
    everything = json.dumps([name, description, fields, state, *tools], sort_keys=True)
    digest = hashlib.blake2b(everything.encode(), digest_size=8).hexdigest()
    return About(name, description, digest, fields, state, tuple(tools), "pictures" in schema)


def _whole(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field, which may stand elsewhere in the schema of the action."""
    found = schema.get("$defs", {}).get(str(field.get("$ref")).removeprefix("#/$defs/"))
    return field if found is None else dict(found)


def _fetch(url: str, part: str, message: dict[str, Any] | None = None) -> dict[str, Any]:
    """A server's answer outside of a session. A message is posted."""
    address, token = f"{url.rstrip('/')}/{part}", token_in(TOKEN)
    with httpx.Client(timeout=CALL_S, follow_redirects=True) as client:
        method = "GET" if message is None else "POST"
        answer = client.request(method, address, json=message, headers=_credentials(token))
    found: dict[str, Any] = _read(answer.raise_for_status().content, token)
    return found


def _budget(schema: Any, otherwise: int) -> int:
    found = schema.get("default")
    return found if isinstance(found, int) and found >= 1 else otherwise


def _said(error: dict[str, Any]) -> str:
    """An error of a server in words, with the errors of each field if the server lists them."""
    details = f" {json.dumps(error['errors'])}" if error.get("errors") else ""
    return f"{error.get('message')}{details}"


def _metadata(answer: dict[str, Any]) -> dict[str, Any]:
    """The data beside the observation; older servers send them inside."""
    observation = answer["observation"]
    inside = observation.get("metadata") if isinstance(observation, dict) else None
    return answer.get("metadata") or inside or {}


def _field(name: str, fields: dict[str, Any], chosen: str | None) -> str:
    if chosen is None and len(fields) == 1:
        return next(iter(fields))
    if chosen in fields:
        return str(chosen)
    raise RagenError(
        f"{name}: choose the field of an action that holds the answer, env.params.field = one of "
        f"{', '.join(fields)}"
    )


def _shown(observation: Any) -> str:
    """An observation as text; if it has no field, its metadata as text."""
    if not isinstance(observation, dict):
        return str(observation)
    if "tool_name" in observation:
        return _result(observation)
    fields = {key: each for key, each in observation.items() if key != "metadata"}
    fields = fields or observation.get("metadata") or {}
    texts = [each for each in fields.values() if isinstance(each, str)]
    if len(fields) == len(texts) == 1:
        return texts[0]
    return "\n".join(
        f"{key}: {each if isinstance(each, str) else json.dumps(each)}"
        for key, each in fields.items()
        if each is not None
    )


def _result(observation: dict[str, Any]) -> str:
    if error := observation.get("error"):
        return f"Error: {error['message']}"
    result = observation.get("result")
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        return text_of(result["content"], result.get("structured_content"))
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
