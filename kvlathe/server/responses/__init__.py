"""The OpenAI API's /v1/responses: requests become chats, and their answers items."""
