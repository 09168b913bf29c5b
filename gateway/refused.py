"""Parameters of OpenAI's and vLLM's that the engine does not serve. They are known by name, so that a request which
uses one is told so; a value that asks for nothing is let through."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from gateway.errors import ApiError


def _only(*neutral: Any) -> Any:
    """A field that may hold these values alone, null among them."""
    shown = ", ".join("null" if value is None else str(value) for value in (None, *neutral))
    return Field(None, description=f"not supported: only {shown}", json_schema_extra={"neutral": list(neutral)})


class Unsupported(BaseModel):
    """Mixed into the request models. Support for a parameter begins with its removal from here."""

    length_penalty: Any = _only(1)
    guided_grammar: Any = _only()
    tool_choice: Any = _only("none", "auto")
    functions: Any = _only([])
    function_call: Any = _only("none", "auto")
    best_of: Any = _only(1)
    use_beam_search: Any = _only(False)
    suffix: Any = _only("")
    store: Any = _only(False)
    modalities: Any = _only(["text"])
    audio: Any = _only()
    prediction: Any = _only()
    reasoning_effort: Any = _only("none")
    web_search_options: Any = _only()
    skip_special_tokens: Any = _only(True)
    spaces_between_special_tokens: Any = _only(True)
    truncate_prompt_tokens: Any = _only()
    allowed_token_ids: Any = _only()
    bad_words: Any = _only([])
    continue_final_message: Any = _only(False)
    chat_template: Any = _only()
    documents: Any = _only([])
    lora_request: Any = _only()


def check(body: Unsupported) -> None:
    """Raises ApiError(400) naming the first parameter whose value asks for what is not there."""
    for name in body.model_fields_set & set(Unsupported.model_fields):
        value = getattr(body, name)
        extra = Unsupported.model_fields[name].json_schema_extra
        assert isinstance(extra, dict)
        neutral = extra["neutral"]
        assert isinstance(neutral, list)
        if value is not None and not any(_same(value, other) for other in neutral):
            raise ApiError(400, f"{name} is not supported", param=name, code="unsupported_parameter")


def _same(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
