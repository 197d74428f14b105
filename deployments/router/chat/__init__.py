"""Chat in no wire format: from messages to a prompt, and from text to messages."""
