"""/v1/responses: OpenAI's newer form of a conversation, in items, which the server may keep."""
