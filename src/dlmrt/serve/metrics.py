"""Prometheus metrics: vLLM's names under the prefix `dlmrt:`, so that dashboards need one replacement.

Three counters also carry vLLM's own prefix, because the client of `vllm bench serve` reads them. From their differences
it derives block = positions / steps, canvases = committed / block, denoising steps = steps - canvases; so each finished
block adds its denoising steps and one more, whether a commit forward ran or not, and committed tokens are whole blocks.
`dlmrt:` counters are literal.

prometheus_client is imported when a registry is made: it belongs to the extra `serve`.

Source: ours; names and the client's arithmetic from vllm 0.33.0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dlmrt.types import GenerateResult

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)
_TPF = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)

_COUNTERS = {
    "prompt_tokens": "Prompt tokens of finished requests.",
    "generation_tokens": "Completion tokens, stop tokens included.",
    "prefix_cache_queries": "Prompt tokens looked up for reuse.",
    "prefix_cache_hits": "Prompt tokens reused.",
    "blocks": "Blocks denoised.",
    "edits": "Decided positions that a later step changed.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the end of the first block.", _SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the last event.", _SECONDS),
    "request_queue_time_seconds": ("Waiting for the slot.", _SECONDS),
    "request_prefill_time_seconds": ("Prefill.", _SECONDS),
    "request_decode_time_seconds": ("Denoising and commits.", _SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("Completion tokens of a request.", _TOKENS),
    "tokens_per_forward": ("Completion tokens per denoise and commit forward.", _TPF),
}
_VLLM = ("num_denoising_steps", "num_canvas_positions", "num_committed_tokens")


class Metrics:
    """All metrics of one server, labelled with the model's served name."""

    def __init__(self, model_name: str) -> None:
        import prometheus_client as prometheus

        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._prometheus = prometheus
        self._registry = registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=registry)
        self._model = model_name
        label = ["model_name"]
        gauges = {
            "num_requests_running": "Requests that the engine works on: 0 or 1.",
            "num_requests_waiting": "Requests in the queue.",
            "kv_cache_usage_perc": "Share of the context that the running request may fill, 0 to 1.",
        }
        self._gauges = {
            name: prometheus.Gauge(f"dlmrt:{name}", says, label, registry=registry).labels(model_name)
            for name, says in gauges.items()
        }
        self._counters = {
            name: prometheus.Counter(f"dlmrt:{name}", says, label, registry=registry).labels(model_name)
            for name, says in _COUNTERS.items()
        }
        self._histograms = {
            name: prometheus.Histogram(f"dlmrt:{name}", says, label, buckets=buckets, registry=registry).labels(
                model_name
            )
            for name, (says, buckets) in _HISTOGRAMS.items()
        }
        self._vllm = {
            name: prometheus.Counter(
                f"vllm:diffusion_{name}", "As the client of vllm bench serve counts.", label, registry=registry
            ).labels(model_name)
            for name in _VLLM
        }
        self._forwards = prometheus.Counter("dlmrt:forwards", "Forwards.", [*label, "kind"], registry=registry)
        self._success = prometheus.Counter(
            "dlmrt:request_success", "Answers by end.", [*label, "finished_reason"], registry=registry
        )
        self._failures = prometheus.Counter(
            "dlmrt:request_failures", "Requests without an answer.", [*label, "reason"], registry=registry
        )
        for kind in ("prefill", "denoise", "commit"):
            self._forwards.labels(model_name, kind)
        for reason in ("stop", "length", "tool_calls", "abort"):
            self._success.labels(model_name, reason)

    def render(self, *, num_running: int, num_waiting: int, context_share: float) -> tuple[bytes, str]:
        """The text of all metrics and its content type."""
        self._gauges["num_requests_running"].set(num_running)
        self._gauges["num_requests_waiting"].set(num_waiting)
        self._gauges["kv_cache_usage_perc"].set(context_share)
        return self._prometheus.generate_latest(self._registry), self._prometheus.CONTENT_TYPE_LATEST

    def failed(self, reason: str) -> None:
        """Count a request that ends with an error."""
        self._failures.labels(self._model, reason).inc()

    def answered(
        self, results: Sequence[GenerateResult], *, finish_reason: str, queue_s: float, total_s: float
    ) -> None:  # fmt: skip
        """Count an answered (or cut) request with all its choices.

        Args:
            finish_reason: of the last choice, or "abort".
            queue_s: waiting time.
            total_s: from arrival to the last event.
        """
        self._success.labels(self._model, finish_reason).inc()
        self._histograms["request_queue_time_seconds"].observe(queue_s)
        self._histograms["e2e_request_latency_seconds"].observe(total_s)
        if results and results[0].usage.num_blocks:
            first_block_s = queue_s + results[0].usage.time_to_first_block_s
            self._histograms["time_to_first_token_seconds"].observe(first_block_s)
        for result in results:
            self._count(result)

    def _count(self, result: GenerateResult) -> None:
        usage, record = result.usage, result.record
        for name, amount in {
            "prompt_tokens": usage.prompt_tokens,
            "generation_tokens": usage.completion_tokens,
            "prefix_cache_queries": usage.prompt_tokens,
            "prefix_cache_hits": record.num_cached_prompt_tokens,
            "blocks": usage.num_blocks,
            "edits": usage.num_edits,
        }.items():
            self._counters[name].inc(amount)
        for name, value in {
            "request_prefill_time_seconds": max(0.0, usage.prefill_s),
            "request_decode_time_seconds": usage.decode_s,
            "request_prompt_tokens": usage.prompt_tokens,
            "request_generation_tokens": usage.completion_tokens,
            "tokens_per_forward": usage.tpf_total,
        }.items():
            self._histograms[name].observe(value)
        for forward in record.forwards:
            self._forwards.labels(self._model, forward.kind).inc()
        steps = Counter(forward.block_idx for forward in record.forwards if forward.kind == "denoise")
        length = record.settings["canvas_length"]
        num_steps = sum(count + 1 for count in steps.values())
        self._vllm["num_denoising_steps"].inc(num_steps)
        self._vllm["num_canvas_positions"].inc(num_steps * length)
        self._vllm["num_committed_tokens"].inc(len(steps) * length)
