"""Conversation: messages to token ids, replies to messages, calls to rows."""
