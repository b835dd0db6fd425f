"""The OpenAI-compatible wire format: request JSON to `CallSpec`, replies to JSON objects and server-sent events."""
