"""Train the model of this folder.

    python -m examples.shapes.train WORK [--write]

WORK is a folder for checkpoints, outside the repository. A run that was interrupted goes on from the last one: at most
a minute is lost, and the weights become the same. At the end the model lies in WORK/model; with --write it also
replaces the one in this folder.

Each process has one thread and its share of each batch, and they add up their gradients. The model computes in
bfloat16, as a server does; the optimizers keep the weights in float32.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import Qwen3VLForConditionalGeneration

from examples.shapes.batches import IGNORED, Prompts, random_batch
from examples.shapes.files import MODEL, build_config, build_tokenizer, write_files
from examples.shapes.quick import quicken

if TYPE_CHECKING:
    from examples.shapes.batches import Batch

WARM_UP = 60
SAVE_SECONDS = 60
LOG_STEPS = 50


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--until", type=int, help="stop at this step; a later run goes on")
    parser.add_argument("--rows", type=int, default=64, help="chats in a batch")
    parser.add_argument("--rate", type=float, default=0.02, help="Muon's learning rate")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    return parser.parse_args()


class Trainer:
    """The model in bfloat16, its weights in float32, and how far they are."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self.args, self.rank = args, rank
        self.tokenizer = build_tokenizer()
        self.prompts = Prompts(self.tokenizer)
        torch.manual_seed(args.seed)
        self.model = Qwen3VLForConditionalGeneration(build_config(self.tokenizer))
        self.weights = [_flat(p.detach()).clone() for p in self.model.parameters()]
        self.model.to(torch.bfloat16).train()
        quicken(self.model)
        # Muon is for matrices that map states to states.
        names = [name for name, _ in self.model.named_parameters()]
        maps = [
            w.ndim == 2 and "embed" not in n.replace("patch_embed", "")
            for n, w in zip(names, self.weights, strict=True)
        ]
        matrices = [weight for weight, is_map in zip(self.weights, maps, strict=True) if is_map]
        others = [weight for weight, is_map in zip(self.weights, maps, strict=True) if not is_map]
        self.optimizers: dict[torch.optim.Optimizer, float] = {
            torch.optim.Muon(matrices, weight_decay=0.02): args.rate,
            torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0): 0.15 * args.rate,
        }
        self.step, self.wall, self.cpu = 0, 0.0, 0.0

    def resume(self) -> None:
        """Go on from the last checkpoint, if there is one."""
        file = self.args.work / "checkpoint.pt"
        if file.exists():
            saved = torch.load(file, weights_only=True)
            for weight, value in zip(self.weights, saved["weights"], strict=True):
                weight.copy_(value)
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.step, self.wall, self.cpu = saved["step"], saved["wall"], saved["cpu"]
        self.publish()

    def save(self) -> None:
        """Write a checkpoint, whole or not at all."""
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        clocks = {"step": self.step, "wall": self.wall, "cpu": self.cpu}
        new = self.args.work / "checkpoint.new"
        torch.save({"weights": self.weights, "optimizers": optimizers, **clocks}, new)
        new.replace(self.args.work / "checkpoint.pt")

    @torch.no_grad()
    def publish(self) -> None:
        """Give the model its weights."""
        for parameter, weight in zip(self.model.parameters(), self.weights, strict=True):
            parameter.copy_(weight.view_as(parameter))

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the mean over the tokens of answers."""
        logits = self.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            pixel_values=batch.pixel_values,
            image_grid_thw=batch.image_grid_thw,
            use_cache=False,
        ).logits
        wanted = batch.labels[:, 1:]
        known = wanted != IGNORED
        return F.cross_entropy(logits[:, :-1][known].float(), wanted[known])

    def train(self) -> float:
        """Do one step; return the loss of this process."""
        seed = f"train {self.args.seed} {self.step} {self.rank}"
        loss = self.loss(random_batch(seed, self.prompts, self.args.rows // self.args.processes))
        self.model.zero_grad()
        torch.autograd.backward(loss)
        grads = torch.cat([p.grad.flatten().float() for p in self.model.parameters()]) / self.args.processes
        dist.all_reduce(grads)
        grads *= min(1.0, 1.0 / (grads.norm().item() + 1e-6))
        for weight, grad in zip(self.weights, grads.split([w.numel() for w in self.weights]), strict=True):
            weight.grad = grad.view_as(weight)
        for optimizer, rate in self.optimizers.items():
            optimizer.param_groups[0]["lr"] = rate * self.pace()
            optimizer.step()
        self.publish()
        self.step += 1
        return loss.item()

    def pace(self) -> float:
        """Return the share of the learning rate at this step: a warm-up, then a cosine that falls from 1 to 0."""
        return min(1.0, (self.step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * self.step / self.args.steps))

    def run(self) -> None:
        """Train to the last step; the first process writes checkpoints and a log."""
        saved = time.monotonic()
        wall, cpu = self.wall - saved, self.cpu - self.seconds_of_all()
        losses: list[float] = []
        until = min(self.args.steps, self.args.until or self.args.steps)
        while self.step < until:
            losses.append(self.train())
            self.wall, self.cpu = wall + time.monotonic(), cpu + self.seconds_of_all()
            if self.rank == 0 and self.step % LOG_STEPS == 0:
                self.log(sum(losses) / len(losses))
                losses.clear()
            if self.rank == 0 and (time.monotonic() - saved > SAVE_SECONDS or self.step == until):
                saved = time.monotonic()
                self.save()

    def seconds_of_all(self) -> float:
        """Return the CPU seconds of all processes so far."""
        spent = torch.tensor([time.process_time()], dtype=torch.float64)
        dist.all_reduce(spent)
        return spent.item()

    def log(self, loss: float) -> None:
        line = {"step": self.step, "loss": round(loss, 4), "wall_s": round(self.wall), "cpu_s": round(self.cpu)}
        print(line, flush=True)
        with (self.args.work / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def export(self) -> None:
        """Write the model's directory."""
        folder = self.args.work / "model"
        shutil.rmtree(folder, ignore_errors=True)
        self.model.save_pretrained(folder)
        write_files(folder, self.tokenizer)
        if self.args.write:
            shutil.copytree(folder, MODEL, dirs_exist_ok=True)


def _flat(weight: torch.Tensor) -> torch.Tensor:
    """Return a convolution's weight as a matrix, and any other as it is."""
    return weight.flatten(1) if weight.ndim > 2 else weight


def work(rank: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{args.work.resolve()}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=args.processes)
    trainer = Trainer(args, rank)
    trainer.resume()
    trainer.run()
    if rank == 0:
        trainer.export()
    dist.destroy_process_group()


def main() -> None:
    args = arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    (args.work / "meeting").unlink(missing_ok=True)
    if args.processes == 1:
        work(0, args)
    else:
        with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
            list(pool.map(work, range(args.processes), [args] * args.processes))


if __name__ == "__main__":
    main()
