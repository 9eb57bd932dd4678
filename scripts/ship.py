"""Put a trained checkpoint into the package: weights in bf16, decode defaults, and a card made of measured numbers.

    python scripts/ship.py runs/tiny_mask_orl/model dlmrt-tiny --recipe recipes/tiny_mask_orl.toml \
        --report benchmarks/results/tiny_mask_orl.json --set commit_rule=threshold --set threshold=0.99

Refuses a folder of more than 25 MB: the package must stay light.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import dlmrt
from dlmrt.checkpoint.load import load_params, open_checkpoint
from dlmrt.checkpoint.save import save_checkpoint
from orl.card import model_card
from orl.evaluate import Setting
from orl.recipe import PretrainRecipe, load_recipe, read_toml
from orl.train_recipe import TrainRecipe

EMBEDDED = Path(dlmrt.__file__).parent / "embedded"
MAX_BYTES = 25_000_000
HELD_OUT = "Prompts whose text hashes into the held-out share never enter training."
LIMITS = (
    "It knows the listed tasks in the wording of `orl tasks --show 3`, and nothing else: no chat, no knowledge.",
    "Numbers are small whole numbers of the size seen in the tasks; larger ones are answered wrongly and confidently.",
    "Text that its tokenizer splits into bytes (other languages, symbols) is outside of what it was trained on.",
    "A rate is measured on held-out prompts of the same generators, not on anybody's own questions.",
)


def main(arguments: list[str]) -> None:
    """Copy, describe, check the size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", type=Path, help="folder of the trained checkpoint")
    parser.add_argument("name", help="name it ships under")
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--report", type=Path, action="append", required=True, help="JSON of `orl evaluate`")
    parser.add_argument("--set", action="append", default=[], help="decode default, key=value")
    options = parser.parse_args(arguments)
    checkpoint = open_checkpoint(options.model)
    defaults = {"max_tokens": 256, **Setting.parse(",".join(options.set)).options}
    eos = list(checkpoint.config.eos_token_ids)
    target = EMBEDDED / options.name
    card = model_card(
        options.name,
        [json.loads(path.read_text(encoding="utf-8")) for path in options.report],
        summary=_summary(checkpoint.config, load_params(checkpoint)),
        training=f"{_training(options.recipe)} {HELD_OUT}",
        limits=LIMITS,
    )
    (target / "README.md").unlink(missing_ok=True)
    save_checkpoint(
        target, checkpoint.config, load_params(checkpoint, dtype="float32"), dtype="bfloat16",
        generation={"eos_token_id": eos, "pad_token_id": checkpoint.config.pad_token_id, "diffusion": defaults},
        tokenizer_files=options.model,
    )  # fmt: skip
    (target / "README.md").write_text(card, encoding="utf-8")
    num_bytes = sum(path.stat().st_size for path in target.iterdir())
    if num_bytes > MAX_BYTES:
        sys.exit(f"error: {target} holds {num_bytes:,} bytes, more than {MAX_BYTES:,}; train a smaller model")
    print(f"{target}: {num_bytes:,} bytes")


def _summary(config: dlmrt.models.config.ModelConfig, params: dict) -> str:
    diffusion = config.diffusion
    assert diffusion is not None
    num = sum(tensor.numel() for tensor in params.values())
    return (
        f"A {num / 1e6:.2f} M parameter diffusion language model: Qwen3 backbone ({config.num_layers} layers of width "
        f"{config.hidden_size}, vocabulary {config.vocab_size}), canvas of {diffusion.canvas_length}, "
        f"{diffusion.noise} noise, logit shift {diffusion.logit_shift}, residual pathway {diffusion.residual.kind}."
    )


def _training(path: Path) -> str:
    if "rollout" in read_toml(path):
        return _updates(load_recipe(path, TrainRecipe), path)
    recipe = load_recipe(path, PretrainRecipe)
    section = recipe.optim
    start = f", converted from the checkpoint of `{recipe.run.init}`" if recipe.run.init else ""
    return (
        f"`orl pretrain {path}`: objective `{recipe.objective.kind}`{start}; {section.steps} steps of "
        f"{section.bins_per_step} packed rows of {recipe.data.pack_tokens} tokens, Muon and AdamW, on verifiable tasks "
        "of reasoning-gym and generated Python functions."
    )


def _updates(recipe: TrainRecipe, path: Path) -> str:
    prompts, rollout = recipe.prompts, recipe.rollout
    return (
        f"`orl train {path}`: On-Policy Residual Learning from the checkpoint of `{recipe.run.init}`; "
        f"{recipe.optim.updates} updates, each from the verified ones of {prompts.per_update} x {rollout.responses} "
        f"answers of the model itself ({rollout.setting}), on verifiable tasks of reasoning-gym and generated Python "
        "functions."
    )


if __name__ == "__main__":
    main(sys.argv[1:])
