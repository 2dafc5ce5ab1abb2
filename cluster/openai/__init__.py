"""OpenAI's objects: requests as they come, answers as they go."""
