"""The service: answers people who ask after their orders. It knows nothing of training."""

import os

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

client = AsyncOpenAI(
    base_url=os.environ.get("TRACEGRAD_URL", "http://127.0.0.1:4141") + "/v1",
    api_key="not-needed",
)


async def reply(conversation: list[ChatCompletionMessageParam]) -> tuple[str, str]:
    """The next message of the conversation, and the response's id, which a thumb is given to."""
    completion = await client.chat.completions.create(
        model="assistant", messages=conversation, temperature=1.0, max_tokens=40
    )
    return completion.choices[0].message.content or "", completion.id
