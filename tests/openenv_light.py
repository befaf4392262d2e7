"""OpenEnv's protocol without its library, which takes long to import: a walk to 3."""

from __future__ import annotations

import json
import os
from typing import Any

ABOUT = {
    "/metadata": {"name": "light", "description": "Walk to 3."},
    "/schema": {"action": {"properties": {"move": {"enum": ["left", "right"]}}}},
    "/health": {"status": "healthy"},
}


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """The ASGI application."""
    if scope["type"] == "http":
        kind = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        body = json.dumps(ABOUT.get(scope["path"], {})).encode()
        await send({"type": "http.response.body", "body": body})
    if scope["type"] != "websocket":
        return
    await receive()
    await send({"type": "websocket.accept"})
    place = 0
    while (event := await receive())["type"] == "websocket.receive":
        asked = json.loads(event["text"])
        if asked["type"] == "reset":
            place = asked["data"]["seed"] % 3 - 1
        else:
            place += 1 if asked["data"]["move"] == "right" else -1
        observation = {"text": f"You are at {place}.", "process": os.getpid()}
        data = {"observation": observation, "reward": float(place == 3), "done": abs(place) == 3}
        await send({"type": "websocket.send", "text": json.dumps({"type": "o", "data": data})})
