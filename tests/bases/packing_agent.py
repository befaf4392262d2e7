"""An agent with a tool, by chat completions: what to take on a trip."""

import json
import urllib.request

PLACE = {"type": "object", "properties": {"place": {"type": "string"}}}
FORECAST = {"type": "function", "function": {"name": "forecast", "parameters": PLACE}}


def main(task, base_url, api_key):
    messages = [{"role": "user", "content": f"I travel to {task['city']}. What do I take?"}]
    for _ in range(4):
        body = json.dumps({"messages": messages, "tools": [FORECAST]}).encode()
        headers = {"Authorization": f"Bearer {api_key}"}
        request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as answer:
            reply = json.load(answer)["choices"][0]["message"]
        if not reply.get("tool_calls"):
            return reply["content"] == task["answer"]
        messages.append(reply)
        for call in reply["tool_calls"]:
            place = json.loads(call["function"]["arguments"]).get("place")
            content = task["weather"] if place == task["city"] else "unknown"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    return False
