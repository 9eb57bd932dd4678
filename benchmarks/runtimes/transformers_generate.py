"""transformers as a benchmark runtime: `transformers_generate.py MODEL DTYPE THREADS`.

  answer REPEATS MAX N_END END... ID...     greedy `generate` with its cache: ids and seconds, each repeat

Source: ours; transformers 5.24.0.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from child import Channel


def main() -> None:
    """Load, serve."""
    channel = Channel()
    folder, dtype, num_threads = sys.argv[1:]
    torch.set_num_threads(int(num_threads))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def answer(repeats: str, most: str, num_ends: str, *words: str) -> dict[str, Any]:
        ids = torch.tensor([[int(word) for word in words[int(num_ends) :]]])
        # -1 is no id: with it, only the length ends an answer.
        ends = [int(word) for word in words[: int(num_ends)]] or [-1]
        seconds = []
        for _ in range(int(repeats)):
            began = time.perf_counter()
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=int(most), do_sample=False, eos_token_id=ends,
                pad_token_id=0,
            )  # fmt: skip
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds, "ids": out[0, ids.shape[1] :].tolist()}

    channel.serve({"answer": answer}, torch=torch.__version__)


if __name__ == "__main__":
    main()
