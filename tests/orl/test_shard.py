"""Several processes train what one trains: loss, gradients, tokens; a dead one ends the run. Real gloo processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dlmrt.checkpoint.save import save_checkpoint
from dlmrt.errors import UsageError
from dlmrt.models import qwen3
from dlmrt.models.config import MoeConfig, ResidualConfig
from dlmrt.models.families import family_of
from dlmrt.ops import eager as ops
from dlmrt.testing import free_port, tiny_config
from orl.pretrain import pretrain
from orl.ranks import TrainRanks, is_main_process, joined
from orl.recipe import dump_recipe
from orl.shard import ShardedParams
from orl.train import train
from orl.train_recipe import (
    EvalSection,
    KeepSection,
    PromptSection,
    RolloutSection,
    StatesSection,
    TrainRecipe,
    TrainRunSection,
    TuneSection,
    UpdateSection,
)

SRC = Path(__file__).parents[2] / "src"
pytestmark = pytest.mark.timeout(300)  # three processes that import torch, on a loaded machine

# Loss of two sequences, one a process, against both on one; prints the largest differences.
COMPARE = """
import torch, torch.distributed as dist
from dlmrt.models import qwen3
from dlmrt.testing import tiny_config
from orl.shard import ShardedParams, sharded_as, whole
from test_shard import loss_of, random_params
dist.init_process_group("gloo")
rank, config = dist.get_rank(), tiny_config()
plain = {name: tensor.requires_grad_() for name, tensor in random_params(config).items()}
expected = loss_of(plain, config, 0) + loss_of(plain, config, 1)
expected.backward()
for checkpoint_layers in (False, True):
    params = ShardedParams(random_params(config), checkpoint_layers=checkpoint_layers)
    loss = params.run(lambda p: loss_of(p, config, rank))
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    assert torch.allclose(total, expected.detach(), rtol=1e-6), (total, expected)
    for name, parameter in params.parameters().items():
        assert parameter.to_local().numel() < plain[name].numel(), name
        assert torch.allclose(whole(parameter.grad), plain[name].grad, rtol=1e-5, atol=1e-6), name
        back = whole(sharded_as(plain[name].detach(), parameter))
        assert torch.equal(back, plain[name]), name
print("equal", flush=True)
dist.destroy_process_group()
"""

# `orl`, with a line on stderr after each step: the test knows where the run is without waiting for a time.
TELLING_TRAINER = """
import sys
from orl.cli import main
from orl.run_folder import RunFolder
log = RunFolder.log
def tell(self, entry):
    log(self, entry)
    print("logged", entry["step"], file=sys.stderr, flush=True)
RunFolder.log = tell
main()
"""


def random_params(config) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = family_of(config).tensor_shapes(config)
    return {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}


def loss_of(params, config, seed: int) -> torch.Tensor:
    """A loss that every parameter moves."""
    ids = torch.randint(0, 200, (1, 8), generator=torch.Generator().manual_seed(seed))
    visible, family = torch.ones(8, 8, dtype=torch.bool), family_of(config)
    hidden = family.forward(ops, params, config, ids, torch.arange(8).expand(1, 8), ops.MaskedAttention(visible))
    return family.head(ops, params, config, hidden).log_softmax(-1)[..., 0].square().sum()


def two_processes(*arguments: object) -> list[str]:
    """Run `python *arguments` twice with what torchrun would tell them; what each wrote to stdout."""
    environment = os.environ | {
        "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    found = []
    for process in processes:
        stdout, stderr = process.communicate(timeout=280)
        assert process.returncode == 0, stderr[-3000:]
        found.append(stdout)
    return found


@pytest.mark.parametrize("checkpoint_layers", [False, True])
def test_one_process_computes_what_plain_parameters_do(checkpoint_layers: bool):
    config = tiny_config(residual=ResidualConfig(kind="gated_mlp", intermediate_size=16))
    plain = {name: tensor.requires_grad_() for name, tensor in random_params(config).items()}
    loss_of(plain, config, 0).backward()
    params = ShardedParams(
        random_params(config), trained=lambda name: "q_proj" not in name, checkpoint_layers=checkpoint_layers
    )
    assert set(params) == set(plain)
    loss = params.run(lambda p: loss_of(p, config, 0))
    loss.backward()
    for name, parameter in params.parameters().items():
        if "q_proj" in name or name.startswith(qwen3.ADAPTER):
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, plain[name].grad), name


def test_experts_computed_again_in_backward_are_chosen_again():
    """K58: routing is part of what is recomputed; the gradients of a mixture of experts are those of a plain run."""
    moe = MoeConfig(
        num_experts=4, num_experts_per_token=2, intermediate_size=16, shared_intermediate_size=16, num_dense_layers=1,
        num_groups=2, num_kept_groups=1, scaling_factor=2.5,
    )  # fmt: skip
    config = tiny_config(architecture="LLaDA2MoeModelLM", moe=moe, tie_word_embeddings=False)
    plain = {name: tensor.requires_grad_() for name, tensor in random_params(config).items()}
    loss_of(plain, config, 0).backward()
    params = ShardedParams(random_params(config), trained=lambda name: True, checkpoint_layers=True)
    params.run(lambda p: loss_of(p, config, 0)).backward()
    moved = {name for name, parameter in params.parameters().items() if parameter.grad is not None}
    assert any(".experts." in name for name in moved)
    for name in moved:
        torch.testing.assert_close(params.parameters()[name].grad, plain[name].grad, rtol=1e-6, atol=1e-6)


def test_layers_are_computed_again_in_backward_only_when_asked():
    config, calls = tiny_config(), []

    def layer(params, x: torch.Tensor) -> torch.Tensor:
        calls.append(len(params))
        return x * params["model.layers.0.input_layernorm.weight"]

    for checkpoint_layers, expected in ((False, 1), (True, 2)):
        params = ShardedParams(random_params(config), checkpoint_layers=checkpoint_layers)
        params.run(lambda p: p.run_layer(0, layer, torch.ones(32, requires_grad=True)).sum()).backward()
        assert len(calls) == expected
        calls.clear()


def test_rounds_deal_every_item_once_and_as_many_to_each_rank():
    for size in (1, 2, 3):
        dealt = [list(TrainRanks(rank=rank, size=size).rounds("abcde")) for rank in range(size)]
        assert len({len(part) for part in dealt}) == 1
        assert sorted(item for part in dealt for item, is_own in part if is_own) == list("abcde")


def test_what_torchrun_says_is_read_once_for_the_command_and_the_run(monkeypatch):
    """A rank without a size is one process for both; what is no number is a usage error for both, not a traceback."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    assert is_main_process()
    with joined() as ranks:
        assert ranks == TrainRanks()
    for size, rank in (("x", "0"), ("2", "2")):
        monkeypatch.setenv("WORLD_SIZE", size)
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(UsageError, match="torchrun"):
            is_main_process()
        with pytest.raises(UsageError, match="torchrun"), joined():
            pass
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not is_main_process()


def test_two_processes_have_the_loss_and_gradients_of_one(tmp_path: Path):
    """Also with activations recomputed; each holds a part of every parameter."""
    (tmp_path / "compare.py").write_text(COMPARE)
    (tmp_path / "test_shard.py").write_text(Path(__file__).read_text())
    assert two_processes(tmp_path / "compare.py") == ["equal\n", "equal\n"]


def test_pretraining_in_two_processes_is_that_of_one_and_goes_on(make_recipe, tmp_path: Path):
    """Steps, problems, loss, norm; an odd number of micro-batches, with and without a first pass; resumed."""
    recipe = make_recipe(optim={"steps": 4, "bins_per_step": 6}, run={"save_every_s": 0, "eval_every_steps": 100})
    pretrain(recipe, tmp_path / "one")
    path = tmp_path / "recipe.toml"
    path.write_text(dump_recipe(recipe))
    for _ in range(2):
        arguments = ("pretrain", path, "--run-dir", tmp_path / "two", "--quiet", "--stop-after", "0")
        assert two_processes("-m", "orl", *arguments) == [f"{tmp_path / 'two' / 'model'}\n", ""]
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert [line["step"] for line in two] == [1, 2]
    for ours, theirs in zip(one, two, strict=False):
        assert (ours["problems"], ours["denominator"]) == (theirs["problems"], theirs["denominator"])
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert ours["canvas_acc"] == pytest.approx(theirs["canvas_acc"], abs=1e-3)
    assert (
        load_file(tmp_path / "two/model/model.safetensors").keys()
        == load_file(tmp_path / "one/model/model.safetensors").keys()
    )


def test_orl_training_in_two_processes_is_that_of_one(make_model, tokenizer_dir: Path, make_recipe, tmp_path: Path):
    """Problems, answers, states, loss, norms over two updates; low-rank factors, layers computed again in backward.

    Three prompts, so the processes have unequal shares. Gold answers: a random model verifies none of its own.
    """
    config, params = make_model(make_recipe())
    plain = {name: tensor.detach() for name, tensor in params.items()}
    save_checkpoint(tmp_path / "start", config, plain, dtype="float32", tokenizer_files=tokenizer_dir)
    recipe = TrainRecipe(
        prompts=PromptSection(tasks=("chain_sum",), per_update=3),
        rollout=RolloutSection(source="gold", executor="eager", responses=1),
        keep=KeepSection(max_per_prompt=1), states=StatesSection(per_block=1),
        optim=UpdateSection(updates=2, lr=1e-3, warmup_updates=0, rows_per_micro=200),
        tune=TuneSection(what="lora", lora_rank=2, lora_alpha=4.0, checkpoint_layers=True),
        eval=EvalSection(every_updates=2, problems=1, settings=("threshold=0.5,max_tokens=4",)),
        run=TrainRunSection(init=str(tmp_path / "start"), dtype="float32", num_threads=1),
    )  # fmt: skip
    train(recipe, tmp_path / "one")
    path = tmp_path / "recipe.toml"
    path.write_text(dump_recipe(recipe))
    main, other = two_processes("-m", "orl", "train", path, "--run-dir", tmp_path / "two", "--quiet")
    assert (main.startswith(str(tmp_path / "two")), other) == (True, "")
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for ours, theirs in zip(one, two, strict=True):
        if "loss" in ours:
            assert (ours["num_states"], ours["policy_version"]) == (theirs["num_states"], theirs["policy_version"])
            for key in ("loss", "ce", "kl", "backbone_grad_norm", "residual_grad_norm"):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-7), key
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name].float(), tensor.float(), rtol=1e-2, atol=1e-3)


def test_a_dead_process_ends_the_run_within_seconds_and_is_named(start_python, make_recipe, tmp_path: Path):
    """K60: SIGKILL of one rank."""
    recipe = make_recipe(optim={"steps": 100_000}, run={"eval_every_steps": 100_000})
    path, trainer = tmp_path / "recipe.toml", tmp_path / "trainer.py"
    path.write_text(dump_recipe(recipe))
    trainer.write_text(TELLING_TRAINER)
    process = start_python(
        "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port",
        str(free_port()), str(trainer), "pretrain", str(path), "--run-dir", str(tmp_path / "run"), "--quiet",
    )  # fmt: skip
    try:
        assert process.stderr is not None
        assert any(line == "logged 2\n" for line in process.stderr)
        os.kill(child_of_rank(process.pid, 1), signal.SIGKILL)
        _, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode not in (0, None)
    assert "local_rank: 1" in stderr
    assert "Signal 9" in stderr


def child_of_rank(parent: int, rank: int) -> int:
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if f"\0RANK={rank}\0" in Path(f"/proc/{child}/environ").read_text():
            return int(child)
    raise AssertionError(f"no process of rank {rank}")
