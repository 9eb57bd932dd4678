"""`dlmrt serve`: the OpenAI-compatible server and the page.

Options of other servers are accepted where they mean something here, or change nothing; a value that would have to be
ignored is refused.

Source: ours; spellings as in vLLM 0.33.0, SGLang 0.5.23 and lmdeploy 0.18.0.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from dlmrt.cli import options
from dlmrt.cli.manners import set_up_logging
from dlmrt.cli.session import DEFAULT_MODEL, followed, notice, set_cuda_graph, start
from dlmrt.decode.aliases import RULE_ALIASES, canonical_settings
from dlmrt.errors import UsageError
from dlmrt.parallel.ranks import Ranks, chosen_executor
from dlmrt.types import DecodeConfig


@options.with_decode_options
def serve(
    model_argument: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help=f"Name, folder or hub id. [default: {DEFAULT_MODEL}]")
    ] = None,
    *,
    model: options.ModelOption = None,
    revision: options.RevisionOption = None,
    adapter: options.AdapterOption = None,
    host: Annotated[str | None, typer.Option("--host", help="Address. [default: DLMRT_HOST or 127.0.0.1]")] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="0: a free one. [default: DLMRT_PORT or 8000]")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", help="Key that /v1 asks for; better set DLMRT_API_KEY, which ps does not show."),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option("--served-model-name", help="Name that clients say; repeat it for more.")
    ] = None,
    max_queue: Annotated[int, typer.Option("--max-queue", min=0, help="Requests that may wait.")] = 32,
    request_timeout: Annotated[float, typer.Option("--request-timeout", min=0.1, help="Seconds for a request.")] = 600,
    step_timeout: Annotated[
        float, typer.Option("--step-timeout", min=0.1, help="Seconds after which a step that hangs ends the server.")
    ] = 120,
    grace: Annotated[float, typer.Option("--grace", min=0, help="Seconds a running answer has left at shutdown.")] = 30,
    max_body_bytes: Annotated[int, typer.Option("--max-body-bytes", min=1024, help="Largest body.")] = 4 << 20,
    body_timeout: Annotated[float, typer.Option("--body-timeout", min=0.1, help="Seconds for a body to arrive.")] = 30,
    root_path: Annotated[str, typer.Option("--root-path", help="Prefix under which a proxy shows the server.")] = "",
    cors_origin: Annotated[
        list[str] | None, typer.Option("--cors-origin", help="Origin whose pages may call; repeat it for more.")
    ] = None,
    ignore_unknown_fields: Annotated[
        bool, typer.Option("--ignore-unknown-fields", help="Log unknown request fields instead of refusing them.")
    ] = False,
    executor: options.ExecutorOption = None,
    dtype: options.DtypeOption = None,
    num_threads: options.ThreadsOption = None,
    cuda_graph: options.CudaGraphOption = None,
    decode_file: Annotated[
        Path | None,
        typer.Option("--decode-config", "--dllm-algorithm-config", help="TOML, YAML or JSON file of decode settings."),
    ] = None,
    diffusion_config: Annotated[
        str | None, typer.Option("--diffusion-config", "-dc", help="Decode settings as a JSON object.")
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option("--dllm-algorithm", "--dllm-unmasking-strategy", help="Commit rule by another engine's name."),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option("--max-model-len", "--context-length", min=1, help="Positions of prompt and answer at the most."),
    ] = None,
    generation_config: Annotated[
        str,
        typer.Option("--generation-config", help="Folder or file to read generation_config.json from."),
    ] = "auto",
    quantization: Annotated[
        str | None,
        typer.Option("--quantization", help="Refuse a checkpoint whose declared format has another name."),
    ] = None,
    no_graphs: Annotated[
        bool,
        typer.Option("--no-graphs", "--enforce-eager", help="No CUDA graphs, same tokens; as DLMRT_CUDA_GRAPH=off."),
    ] = False,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option("--tensor-parallel-size", "--tp", "--tp-size", min=1, help="As many as torchrun started, or 1."),
    ] = None,
    max_num_seqs: Annotated[
        int,
        typer.Option("--max-num-seqs", "--max-running-requests", min=1, max=1, help="Only 1."),
    ] = 1,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Accepted; no code of a checkpoint is ever run.")
    ] = False,
    quiet: options.QuietOption = False,
    debug: options.DebugOption = False,
    decode: dict[str, Any],
) -> None:
    """Serve a model over HTTP, with a page at / that shows the canvas."""
    environment = start(debug=debug, quiet=quiet)
    if not debug and not quiet and environment.log_level == "warning":
        set_up_logging("info")  # one line a request
    if model is not None and model_argument not in (None, model):
        raise UsageError(f"two models are named, {model_argument!r} and --model {model!r}; remove one")
    if trust_remote_code:
        notice("--trust-remote-code is never needed: no code of a checkpoint is run", quiet=quiet)
    if no_graphs and cuda_graph not in (None, "off"):
        raise UsageError(f"--no-graphs and --cuda-graph {cuda_graph!r} contradict each other; remove one")
    set_cuda_graph(cuda_graph, executor or environment.executor)
    if no_graphs:
        os.environ["DLMRT_CUDA_GRAPH"] = "off"  # the cuda executor reads it; others have none
    ranks = Ranks.read()
    if tensor_parallel_size not in (None, ranks.size):
        raise UsageError(
            f"--tensor-parallel-size {tensor_parallel_size} needs as many processes and there "
            f"{'is 1' if ranks.size == 1 else f'are {ranks.size}'}; start them with "
            f"torchrun --nproc-per-node {tensor_parallel_size} -m dlmrt serve ..."
        )
    name = model_argument or model or DEFAULT_MODEL
    names = served_model_name or [Path(name).resolve().name if Path(name).is_dir() else name]
    config = _decode_config(decode_file, diffusion_config, algorithm, decode)

    from dlmrt.serve.body import BodyLimits
    from dlmrt.serve.load import LoadConfig, load_engine, open_source
    from dlmrt.serve.run import serve as run
    from dlmrt.serve.service import ServeConfig

    settings = ServeConfig(
        model=names[0], aliases=tuple(names[1:]), host=host or environment.host,
        port=environment.port if port is None else port, api_key=api_key or environment.api_key, max_queue=max_queue,
        request_timeout_s=request_timeout, step_timeout_s=step_timeout, grace_s=grace,
        body=BodyLimits(max_bytes=max_body_bytes, timeout_s=body_timeout), root_path=_root_path(root_path),
        cors_origins=tuple(cors_origin or ()), ignore_unknown_fields=ignore_unknown_fields, decode=config,
    )  # fmt: skip
    source = LoadConfig(
        model=name, revision=revision, adapter=adapter,
        executor=chosen_executor(executor or environment.executor, ranks),
        dtype=dtype or environment.dtype, num_threads=num_threads or environment.num_threads,
        max_model_len=max_model_len, generation_config=generation_config, quantization=quantization,
        fault=environment.fault,
    )  # fmt: skip
    if followed(
        lambda: open_source(source), executor=source.executor, dtype=source.dtype, num_threads=source.num_threads
    ):
        return
    raise typer.Exit(run(settings, lambda: load_engine(source)))


def _decode_config(
    file: Path | None, text: str | None, algorithm: str | None, given: dict[str, Any]
) -> DecodeConfig:  # fmt: skip
    """Settings of the file, then of --diffusion-config, then of the options; one commit rule only."""
    config = options.decode_config(file, {})
    if text is not None:
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise UsageError(f"--diffusion-config is not valid JSON ({error}); quote it for the shell") from error
        if not isinstance(raw, dict):
            raise UsageError("--diffusion-config must be a JSON object, e.g. '{\"threshold\": 0.9}'")
        config = dataclasses.replace(config, **canonical_settings(raw, source="--diffusion-config"))
    rule = given.get("commit_rule")
    if algorithm is not None:
        named = RULE_ALIASES.get(algorithm, algorithm)
        if rule not in (None, named):
            raise UsageError(f"--commit-rule {rule!r} and --dllm-algorithm {algorithm!r} disagree; remove one")
        given = {**given, "commit_rule": named}
    return dataclasses.replace(config, **given)


def _root_path(path: str) -> str:
    if path and not path.startswith("/"):
        raise UsageError(f"--root-path {path!r} must begin with a slash")
    return path.rstrip("/")
