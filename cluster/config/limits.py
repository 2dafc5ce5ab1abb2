"""What one HTTP request may ask for."""

from __future__ import annotations

from pydantic import Field

from cluster.config.section import Seconds, Section


class LimitsConfig(Section):
    """What one HTTP request may ask for. Beyond: status 400, or 413 for the body."""

    max_body_bytes: int = Field(default=4 * 1024**2, ge=1_024, le=1024**3, description="Largest request body")
    body_timeout_s: Seconds = Field(
        default=30.0, description="Longest time in which a request's body must have come. Beyond: status 408"
    )
    max_body_values: int = Field(
        default=65_536,
        ge=1_024,
        description="Most strings (keys included), objects and arrays in a request body, of numbers 16 times as many. "
        "Counted before the body is parsed, which would take long",
    )
    max_prompts: int = Field(default=32, ge=1, le=4_096, description="Most prompts in one completion request")
    max_choices: int = Field(
        default=8,
        ge=1,
        le=128,
        description="Largest n and best_of, choices of one prompt; at most pools.decode.max_running_sequences",
    )
    max_tokens_default_chat: int | None = Field(
        default=None,
        ge=1,
        description="max_tokens of a chat request that gives none; null: max_new_tokens of the checkpoint's "
        "generation_config.json (model.sampling_defaults), else the rest of model.max_model_len, as OpenAI",
    )
    max_tokens_default_completions: int = Field(
        default=16, ge=1, description="max_tokens of a completion request that gives none; OpenAI's is 16"
    )
    max_stop_strings: int = Field(default=4, ge=0, le=64, description="Most stop strings in a request; OpenAI's is 4")
    max_stop_string_chars: int = Field(
        default=256, ge=1, le=4_096, description="Longest stop string or bad word, in characters"
    )
    max_stop_token_ids: int = Field(default=128, ge=0, le=4_096, description="Most stop token ids in a request")
    max_logprobs: int = Field(
        default=5, ge=0, le=128, description="Largest logprobs of a completion request; OpenAI's is 5"
    )
    max_top_logprobs: int = Field(
        default=20,
        ge=0,
        le=128,
        description="Largest top_logprobs of a chat request, and largest prompt_logprobs; OpenAI's is 20",
    )
    max_logit_bias: int = Field(default=300, ge=0, le=4_096, description="Most token ids in a request's logit_bias")
    max_bad_words: int = Field(default=64, ge=0, le=1_024, description="Most bad words in a request")
    max_allowed_token_ids: int = Field(
        default=1_024, ge=1, le=65_536, description="Most token ids in a request's allowed_token_ids"
    )
    max_grammar_bytes: int = Field(
        default=65_536,
        ge=64,
        le=1024**2,
        description="Largest JSON schema, regular expression, list of choices or grammar that an answer shall follow",
    )
    max_grammar_depth: int = Field(
        default=32, ge=1, le=100, description="Deepest nesting of objects and arrays in a JSON schema"
    )
    max_schema_properties: int = Field(
        default=500, ge=1, le=5_000, description="Most properties in a JSON schema, of all objects together"
    )
    max_grammar_patterns: int = Field(
        default=64, ge=0, le=1_024, description="Most regular expressions in a JSON schema"
    )
    max_enum_values: int = Field(
        default=1_000, ge=1, le=20_000, description="Most enum values in a JSON schema, and most choices in a list"
    )
    max_grammar_seconds: float = Field(
        default=0.5,
        ge=0.01,
        le=60.0,
        description="CPU time that it may take to compile a schema or grammar, which is mostly milliseconds. Beyond: "
        "it is refused",
    )
    max_generated_tokens: int = Field(
        default=262_144,
        ge=1,
        description="Most tokens one request may cause: prompts times choices (n, best_of or beams) times max_tokens",
    )
    max_text_chars: int = Field(
        default=524_288,
        ge=1,
        description="Longest text, in characters, that is tokenized though it need not fit into the model's context: "
        "for /tokenize and truncate_prompt_tokens. Also the most token ids of a prompt, and for /detokenize",
    )
    max_reported_logprobs: int = Field(
        default=200_000,
        ge=1,
        le=1_000_000,  # more would not fit into one reply (replicas.channels.wire.MAX_MESSAGE_BYTES)
        description="Most log-probabilities of prompt tokens that one answer reports, of all prompts and choices",
    )
    min_priority: int = Field(
        default=0,
        ge=-1_000,
        le=0,
        description="Smallest priority a request may give, which is the most important: smaller ones go first",
    )
    max_priority: int = Field(
        default=100, ge=0, le=1_000, description="Largest priority a request may give, the least important"
    )
