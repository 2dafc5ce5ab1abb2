"""From a validated body of POST /v1/responses to a running generation, and the form that its answer gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster.api_error import ApiError
from cluster.openai.responses.chat_fields import chat_request
from cluster.openai.responses.response_events import ResponseEvents, whole_response
from cluster.openai.responses.response_object import ResponseObject, response_object
from cluster.text.length import size_up_to
from cluster.text.work_threads import LONG

if TYPE_CHECKING:
    from cluster.config.limits import LimitsConfig
    from cluster.monitoring.request_timer import RequestTimer
    from cluster.openai.caller import Caller
    from cluster.openai.generation_service import GenerationService
    from cluster.openai.response import Answer
    from cluster.openai.responses.request import ResponsesBody
    from cluster.openai.sampling_defaults import SamplingDefaults
    from cluster.text.generation import TextGeneration
    from cluster.text.work_threads import WorkThreads


@dataclass(frozen=True, slots=True)
class RunningResponse:
    """A RunningAnswer. answer: of the chat completion that the response is made of."""

    generation: TextGeneration
    response: ResponseObject
    answer: Answer

    def events(self) -> ResponseEvents:
        return ResponseEvents(self.response, self.answer, lambda: self.generation.usage)

    async def whole(self) -> tuple[dict[str, Any], list[str]]:
        return await whole_response(self.generation, self.events())


class ResponsesService:
    """One per ingress replica. Stateless: no response is kept."""

    def __init__(
        self, chat: GenerationService, limits: LimitsConfig, threads: WorkThreads, defaults: SamplingDefaults
    ) -> None:
        self._chat, self._limits, self._threads, self._defaults = chat, limits, threads, defaults

    async def start(self, body: ResponsesBody, timer: RequestTimer, caller: Caller) -> RunningResponse:
        """caller: as in GenerationService.chat. Raises ApiError 4xx, about the fields of this body."""
        tools = [tool.parameters for tool in body.tools]
        size = size_up_to([[vars(item) for item in body.input], tools, body.model_extra], LONG)
        request = await self._threads.run(size, chat_request, body, self._limits)
        try:
            generation, answer = await self._chat.chat(request.body, timer, caller)
        except ApiError as error:
            raise request.names.error(error) from None
        response = response_object(body, self._defaults.complete(request.body), answer.model, answer.created)
        return RunningResponse(generation, response, answer)
