"""elastic-coord: the coordinator's machine under an asyncio driver, with a journal and a server."""
