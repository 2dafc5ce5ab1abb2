"""The metrics of one ingress: what clients see, and what the router decides."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.monitoring.throughput import WorkDone
from replicas.metrics import metric_buckets
from replicas.metrics.metric_set import MetricSet

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
OUTCOMES = ("ok", "client_error", "server_error", "cancelled", "rejected", "timeout")
FINISH_REASONS = ("stop", "length", "tool_calls")
CALL_PARSERS = (
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "mistral",
    "mistral_named",
    "deepseek_r1",
    "deepseek_v31",
    "response_template",
)
CALL_RESULTS = ("valid", "malformed")
REJECTIONS = ("queue_full", "queue_timeout", "no_capacity", "too_long", "auth", "draining", "quarantined")
DECISIONS = (
    "local",
    "remote",
    "fallback_aggregated",
    "local_cached",
    "local_mixed",
    "local_busy_prefill",
    "local_slow_pair",
    "local_failed_pair",
    "local_suspect",
)
PROMPT_ROUTES = ("local", "remote")
RETRY_STAGES = ("queue", "prefill", "transfer", "decode", "frames")
MOVE_CAUSES = ("leaving", "memory")
MOVE_OUTCOMES = ("moved", "refused", "lost")
POOLS = ("prefill", "decode", "ingress")
ENGINE_POOLS = ("prefill", "decode")
ROLES = ("prefill", "decode")
LOSSES = ("dead", "unreachable", "frozen", "leaving")
UNLIKENESS = ("tokenizer", "no_partner")
PREFIX_TOKENS = ("predicted", "found")
OBJECTIVES = ("ttft", "tpot", "e2e", "any")
SPAN_ENDS = ("ended", "exported", "failed")
GRAMMAR_CHECKS = ("known", "new")
GRAMMAR_REFUSALS = ("refused", "too_much_work", "unavailable", "waited_too_long")


class IngressMetrics(MetricSet):
    """One per ingress replica. Any thread may update."""

    def __init__(self, model_name: str, version: str, ray_version: str, policy: str = "memory_then_queue") -> None:
        """policy: the name of the routing policy."""
        super().__init__(model_name, "ingress", version, ray_version, engine="none")
        self.work = WorkDone()  # for the log
        self._add_outcomes()
        self._add_decisions(policy)
        self._add_latencies()
        self._add_tokens()
        self._add_objectives()
        self._add_scaling()
        self._add_grammars()

    def routed(self, result: str) -> None:
        """A prompt was routed; result: one of DECISIONS."""
        self.router_decisions.add(result=result)

    def played(self, of_pool: str, role: str) -> None:
        """A replica of this pool was given a part of a request; role: one of ROLES."""
        self.roles_played.add(of_pool=of_pool, role=role)

    def retried(self, stage: str) -> None:
        """Something is tried again; stage: one of RETRY_STAGES."""
        self.retries.add(stage=stage)

    def migrated(self, cause: str, outcome: str) -> None:
        """A running request was to go on at another decode replica; one of MOVE_CAUSES and of MOVE_OUTCOMES."""
        self.migrations.add(cause=cause, outcome=outcome)

    def moved(self, gap_s: float, num_tokens: int) -> None:
        """One does, so long after its old replica was told to stop; so many tokens were not computed again."""
        self.migration_time.observe(gap_s)
        self.migrated_tokens.add(num_tokens)

    def replica_lost(self, of_pool: str, reason: str) -> None:
        """A replica is not chosen any more, though Serve still lists it; reason: one of LOSSES."""
        self.replica_losses.add(of_pool=of_pool, reason=reason)

    def unlike(self, of_pool: str, reason: str, number: int) -> None:
        """So many replicas of a pool are unlike this ingress or the other pool now; reason: one of UNLIKENESS."""
        self.unlike_replicas.set(number, of_pool=of_pool, reason=reason)

    def prefix_found(self, of_pool: str, num_expected: int, num_found: int) -> None:
        """A replica had so many tokens of a prompt in its prefix cache, and so many had been expected; of_pool: one of
        ENGINE_POOLS."""
        self.prefix_tokens.add(num_expected, of_pool=of_pool, what="predicted")
        self.prefix_tokens.add(num_found, of_pool=of_pool, what="found")

    def on_their_way(self, pool: str, num_replicas: int, start_s: float) -> None:
        """So many replicas were ordered and have not come, and a start takes so long; pool: one of ENGINE_POOLS."""
        self.replicas_ordered.set(num_replicas, pool=pool)
        self.replica_start.set(start_s, pool=pool)

    def rejected(self, reason: str) -> None:
        """A request was turned away; reason: one of REJECTIONS."""
        self.rejections.add(reason=reason)

    def prompt_found(self, route: str, num_tokens: int, num_cached: int) -> None:
        """A prompt of a finished request, of which so many tokens were in a prefix cache; route: one of
        PROMPT_ROUTES."""
        self.routed_prompt_tokens.add(num_tokens, route=route)
        self.cached_prompt_tokens.add(num_cached, route=route)

    def judged(self, met: Mapping[str, bool]) -> None:
        """A request has ended; met: by objective, what cluster.monitoring.slo_verdict says of it."""
        for objective, is_met in met.items():
            self.slo_requests.add(slo=objective)
            if not is_met:
                self.slo_violations.add(slo=objective)

    def _add_outcomes(self) -> None:
        self.requests = self.counter(
            "splitserve_requests", "Generation requests ended", {"endpoint": ENDPOINTS, "outcome": OUTCOMES}
        )
        self.successes = self.counter(
            "splitserve_request_success", "Choices generated to their end", {"finish_reason": FINISH_REASONS}
        )
        self.tool_calls = self.counter(
            "splitserve_tool_calls",
            "Calls of tools in answers, and what began as one and was none",
            {"parser": CALL_PARSERS, "result": CALL_RESULTS},
        )
        self.unseen_tools = self.counter(
            "splitserve_unseen_tools", "Requests with tools that the model's chat template does not show to it"
        )
        self.unenforced_tools = self.counter(
            "splitserve_unenforced_tools", "Tools, not strict, whose parameters no grammar can be made of"
        )
        self.rejections = self.counter(
            "splitserve_request_rejections", "Requests turned away", {"reason": REJECTIONS}, fixed=self.of_pool
        )

        self.slow_readers = self.counter(
            "splitserve_slow_readers",
            "Clients cut as they did not read their answers; behind Serve's own proxy see its Ray metric "
            "splitserve_proxy_slow_readers",
        )

    def _add_decisions(self, policy: str) -> None:
        self.router_decisions = self.counter(
            "splitserve_router_decisions",
            "Where prompts were prefilled",
            {"result": DECISIONS},
            fixed={"policy": policy},
        )
        self.roles_played = self.counter(
            "splitserve_router_roles",
            "Parts of requests given to replicas of a pool: a prompt to compute, or tokens to generate",
            {"of_pool": ENGINE_POOLS, "role": ROLES},
        )
        self.retries = self.counter("splitserve_retries", "Attempts made again", {"stage": RETRY_STAGES})
        self.migrations = self.counter(
            "splitserve_migrations",
            "Running requests that were to go on at another decode replica with their KV; refused: they stayed, lost: "
            "they were replayed",
            {"cause": MOVE_CAUSES, "outcome": MOVE_OUTCOMES},
        )
        self.migration_time = self.histogram(
            "splitserve_migration_seconds",
            "From the order to stop at the old replica to the first token from the new one",
            metric_buckets.FIRST_TOKEN_S,
        )
        self.migrated_tokens = self.counter(
            "splitserve_migrated_tokens", "Tokens of moved requests whose KV was read instead of computed again"
        )
        self.replica_losses = self.counter(
            "splitserve_replica_losses",
            "Replicas that this ingress found dead, frozen or leaving before Serve told it",
            {"of_pool": POOLS, "reason": LOSSES},
        )
        self.unlike_replicas = self.gauge(
            "splitserve_unlike_replicas",
            "Replicas whose model differs from this ingress's tokenizer, or from all of the other pool",
            {"of_pool": ENGINE_POOLS, "reason": UNLIKENESS},
        )
        self.slow_transfers = self.gauge(
            "splitserve_slow_transfers",
            "Decode replicas that read the KV of some prefill replica slower than prompts are computed",
        )
        self.prefix_tokens = self.counter(
            "splitserve_router_prefix_tokens",
            "Prompt tokens in the prefix caches of the replicas to which prompts were sent: as was predicted, and as "
            "their answers say",
            {"of_pool": ENGINE_POOLS, "what": PREFIX_TOKENS},
        )
        self.scrape_failures = self.counter(
            "splitserve_metrics_scrape_failures", "Replicas that did not answer a scrape in time", {"of_pool": POOLS}
        )

    def _add_latencies(self) -> None:
        self.time_to_first_token = self.histogram(
            "splitserve_time_to_first_token_seconds", "From request to first token", metric_buckets.FIRST_TOKEN_S
        )
        self.inter_token_latency = self.token_histogram(
            "splitserve_inter_token_latency_seconds",
            "Between tokens of one choice as they are sent",
            metric_buckets.PER_TOKEN_S,
        )
        self.time_per_output_token = self.histogram(
            "splitserve_request_time_per_output_token_seconds",
            "Mean time per token of a request, after its first",
            metric_buckets.PER_TOKEN_S,
        )
        self.request_latency = self.histogram(
            "splitserve_e2e_request_latency_seconds",
            "From request to end of response, of those answered in full",
            metric_buckets.REQUEST_S,
        )

    def _add_scaling(self) -> None:
        self.cold_start_wait = self.histogram(
            "splitserve_cold_start_wait_seconds",
            "Waits for the first replica of a pool that autoscaling had emptied, or that had lost all it had",
            metric_buckets.REQUEST_S,
        )
        self.desired_replicas = self.gauge(
            "splitserve_autoscaler_desired_replicas",
            "Replicas that a pool is to have, by the autoscaler or fixed",
            {"pool": ENGINE_POOLS},
        )
        self.prefill_decode_ratio = self.gauge(
            "splitserve_autoscaler_prefill_decode_ratio", "Prefill replicas to have for each decode replica to have"
        )

        self.replicas_ordered = self.gauge(
            "splitserve_replicas_ordered", "Replicas that were ordered and have not come yet", {"pool": ENGINE_POOLS}
        )
        self.replica_start = self.gauge(
            "splitserve_replica_start_seconds",
            "How long a start is taken to take: the longest of the last ones, or the config's guess",
            {"pool": ENGINE_POOLS},
        )
        self.queue_moves = self.counter(
            "splitserve_queue_moves", "Requests that waited at a replica and were sent to another that had room"
        )

    def _add_grammars(self) -> None:
        self.grammar_checks = self.counter(
            "splitserve_grammar_checks",
            "Requests whose answers shall follow a schema or grammar; known: compiled before",
            {"result": GRAMMAR_CHECKS},
        )
        self.grammar_refusals = self.counter(
            "splitserve_grammar_refusals", "Those that were refused for it", {"reason": GRAMMAR_REFUSALS}
        )
        self.grammar_check_time = self.histogram(
            "splitserve_grammar_check_seconds",
            "Compiling a new schema or grammar, the wait for its turn included",
            metric_buckets.FIRST_TOKEN_S,
        )

    def _add_tokens(self) -> None:
        self.prompt_tokens = self.counter("splitserve_prompt_tokens", "Prompt tokens of finished requests")
        self.routed_prompt_tokens = self.counter(
            "splitserve_routed_prompt_tokens",
            "Those of finished requests by who computes prompts: local, decode; remote, prefill",
            {"route": PROMPT_ROUTES},
        )
        self.cached_prompt_tokens = self.counter(
            "splitserve_cached_prompt_tokens",
            "Of splitserve_routed_prompt_tokens, those that were found in a prefix cache",
            {"route": PROMPT_ROUTES},
        )
        self.generation_tokens = self.counter("splitserve_generation_tokens", "Tokens generated and billed")
        self.request_prompt_tokens = self.histogram(
            "splitserve_request_prompt_tokens", "Prompt length of a request", metric_buckets.TOKENS
        )
        self.request_generation_tokens = self.histogram(
            "splitserve_request_generation_tokens", "Tokens generated for a request", metric_buckets.TOKENS
        )

    def _add_objectives(self) -> None:
        self.slo_requests = self.counter(
            "splitserve_slo_requests",
            "Requests that an objective of the config's slo could be judged by; any: by all together",
            {"slo": OBJECTIVES},
        )
        self.slo_violations = self.counter(
            "splitserve_slo_violations", "Those that missed it; any: missed one, or failed", {"slo": OBJECTIVES}
        )
        self.trace_spans = self.counter(
            "splitserve_trace_spans",
            "Spans of traces; ended and neither exported nor failed: lost",
            {"result": SPAN_ENDS},
        )
