"""``thunderagent simulate-worker``: its options, and how it fails. `thunderagent_epp.cli` adds it to the program.

What runs is imported when the command runs, so that the other commands start as quickly without it.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from thunderagent_sim.worker_role import WorkerRole

DEFAULT_CAPACITY_TOKENS = 65536


def simulate_worker(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    model: Annotated[str, typer.Option(help="Name of the served model.")] = "simulated",
    capacity_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Size of the KV cache in tokens, whole blocks.", show_default=str(DEFAULT_CAPACITY_TOKENS)
        ),
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(min=1, help="Size of the KV cache in blocks, instead of --capacity-tokens.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 16,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=1, help="Longest prompt plus answer, in tokens.", show_default="what the KV cache holds"),
    ] = None,
    prefill_tokens_per_second: Annotated[
        float, typer.Option(help="Prompt tokens computed per second, by the whole worker, one request after another.")
    ] = 8000.0,
    decode_tokens_per_second: Annotated[
        float, typer.Option(help="Tokens generated per second, by each request.")
    ] = 50.0,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests running at once; more wait.")] = 256,
    startup_delay: Annotated[
        float, typer.Option(min=0, help="Seconds it listens before it is healthy and knows its capacity.")
    ] = 0.0,
    role: Annotated[
        WorkerRole | None,
        typer.Option(
            help="Run one leg of disaggregated serving; decode asks the worker in x-prefiller-host-port for the other.",
            show_default="both, by itself",
        ),
    ] = None,
    step: Annotated[float, typer.Option(help="Seconds between two pieces of a streamed answer.")] = 0.02,
) -> None:
    """Run a simulated inference worker: vLLM's interface, a KV cache with prefix reuse, no GPU.

    Serves /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages.

    Answers are filler text of the length asked for, and take as long as the rates below say.
    """
    from thunderagent_sim.engine import EngineOptions
    from thunderagent_sim.worker import WorkerOptions, run_worker

    if capacity_tokens is not None and blocks is not None:
        raise typer.BadParameter("give --capacity-tokens or --blocks, not both")
    if blocks is None:
        blocks = (capacity_tokens or DEFAULT_CAPACITY_TOKENS) // block_size
        if blocks == 0:
            raise typer.BadParameter(f"--capacity-tokens {capacity_tokens} is less than one block of {block_size}")
    try:
        options = WorkerOptions(
            engine=EngineOptions(
                blocks=blocks,
                block_size=block_size,
                prefill_tokens_per_second=prefill_tokens_per_second,
                decode_tokens_per_second=decode_tokens_per_second,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
            ),
            host=host,
            port=port,
            model=model,
            startup_delay_seconds=startup_delay,
            step_seconds=step,
            role=role,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        asyncio.run(run_worker(options, typer.echo))
    except OSError as error:
        typer.echo(f"simulate-worker: cannot listen on {host}:{port}: {error.strerror or error}", err=True)
        raise typer.Exit(1) from error
