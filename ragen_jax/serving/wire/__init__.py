"""Wire: request JSON of the OpenAI-compatible endpoints to `CallSpec`, replies to JSON objects and events."""
