"""Train `tiny`, resumably.

    python training/train_tiny.py --corpus BUILD --run RUN --steps N --decay-steps M
    python training/train_tiny.py --corpus BUILD --run RUN --finish-by 09:15

The learning rate warms up, stays, and decays linearly to zero: over the last --decay-steps steps,
or, with --finish-by (UTC), over the last --decay-minutes before that time. The same command again
goes on from RUN/checkpoint.pt.
"""

import argparse
import json
import os
import signal
import threading
import time
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch
from data import TrainingWindows
from evaluate import evaluate
from model import Config, Olmoe, compile_pieces

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True, help="checkpoints and log go here")
    parser.add_argument("--steps", type=int, help="steps in all")
    parser.add_argument("--decay-steps", type=int, default=500)
    parser.add_argument("--finish-by", help="HH:MM in UTC, instead of --steps")
    parser.add_argument("--decay-minutes", type=float, default=20.0)
    parser.add_argument("--length", type=int, default=512, help="tokens in a window")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--warmup-steps", type=int, default=60)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--balance", type=float, default=0.03, help="weight of the balance loss")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of matrix products")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--threads", type=int, default=2, help="at most; 1 while others compute")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-every", type=float, default=120.0, help="seconds")
    parser.add_argument("--evaluate-every", type=int, default=200, help="steps")
    args = parser.parse_args()
    if (args.steps is None) == (args.finish_by is None):
        parser.error("give either --steps or --finish-by")
    return args


def finish_time(text: str) -> float:
    now = datetime.now(UTC)
    hour, minute = map(int, text.split(":"))
    finish = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return (finish + timedelta(days=finish < now)).timestamp()


class Schedule:
    """Learning rate as a share of its peak; None when training is over."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.finish = finish_time(args.finish_by) if args.finish_by else None

    def decay(self, step: int) -> float:
        if self.finish is None:
            return (self.args.steps - step) / max(self.args.decay_steps, 1)
        return (self.finish - time.time()) / (60 * self.args.decay_minutes)

    def __call__(self, step: int) -> float | None:
        decay = self.decay(step)
        if decay <= 0:
            return None
        return min(decay, 1.0, (step + 1) / self.args.warmup_steps)


class ThreadCount:
    """All threads while the machine is idle, one while others compute.

    Two threads that wait for each other thousands of times a step waste much of a busy machine.
    """

    def __init__(self, most: int):
        self.most, self.others = most, float(most)

    def update(self) -> int:
        """Called once a step, from one running thread."""
        running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
        self.others += 0.2 * (running - 1 - self.others)
        count = self.most if self.others < 0.5 else 1
        if count != torch.get_num_threads():
            torch.set_num_threads(count)
        return count


def make_optimizer(model: Olmoe, args: argparse.Namespace) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95), fused=True)


def save_atomically(state: dict, path: Path) -> None:
    temporary = path.with_suffix(".part")
    torch.save(state, temporary)
    temporary.replace(path)


def main() -> None:
    args = parse_arguments()
    args.run.mkdir(parents=True, exist_ok=True)
    (args.run / "pid").write_text(f"{os.getpid()}\n")
    threads = ThreadCount(args.threads)
    torch.manual_seed(args.seed)
    dtype = DTYPES[args.dtype]
    if args.compile:
        compile_pieces()
    model = Olmoe(Config())
    optimizer = make_optimizer(model, args)
    step, tokens, busy_s, decay_step = 0, 0, 0.0, None
    windows_state = {}
    checkpoint = args.run / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        step, tokens, busy_s = state["step"], state["tokens"], state["busy_s"]
        decay_step = state["decay_step"]
        windows_state = state["windows"]
        if state["length"] != args.length:  # positions count windows, so a new epoch starts
            windows_state = {"epoch": windows_state["epoch"] + 1}
    windows = TrainingWindows(args.corpus, args.length, args.seed, **windows_state)
    schedule = Schedule(args)
    log_file = (args.run / "log.jsonl").open("a", buffering=1)

    def log(**entry) -> None:
        log_file.write(json.dumps(entry) + "\n")

    def save(path: Path) -> None:
        state = {
            "config": asdict(model.config),
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "windows": {"epoch": windows.epoch, "position": windows.position},
            "length": args.length,
            "step": step,
            "tokens": tokens,
            "busy_s": busy_s,
            "decay_step": decay_step,
        }
        save_atomically(state, path)

    log(event="start", step=step, arguments={k: str(v) for k, v in vars(args).items()})
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    saved_at = time.time()
    logged_at, logged_tokens, losses = time.time(), tokens, []
    cpu_s = time.process_time()
    while (scale := schedule(step)) is not None and not stopped.is_set():
        if decay_step is None and schedule.decay(step) < 1.0:
            decay_step = step
            save(args.run / "before_decay.pt")
        started = time.time()
        threads.update()
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * scale
        batch = windows.next_batch(args.batch_tokens // args.length)
        hidden, balance, _ = model(batch[:, :-1], dtype)
        loss = model.loss(hidden, batch[:, 1:], dtype)
        (loss + args.balance * balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        tokens += args.batch_tokens
        busy_s += time.time() - started
        losses.append(loss.item())
        if step % 20 == 0:
            log(
                step=step,
                tokens=tokens,
                loss=sum(losses) / len(losses),
                balance=balance.item(),
                norm=norm.item(),
                scale=scale,
                tps=round((tokens - logged_tokens) / (time.time() - logged_at)),
                threads=torch.get_num_threads(),
                cpu_s=round(time.process_time() - cpu_s, 1),
                time=time.strftime("%H:%M:%S"),
            )
            logged_at, logged_tokens, losses = time.time(), tokens, []
        if step % args.evaluate_every == 0 or step == 50:
            count = 4096 // args.length  # windows of each domain, in one batch
            figures = evaluate(model, args.corpus, args.length, count, count, dtype)
            log(event="held out", step=step, **figures)
            logged_at, logged_tokens, losses = time.time(), tokens, []
        if time.time() - saved_at > args.checkpoint_every:
            save(checkpoint)
            saved_at = time.time()
    save(checkpoint)
    log(event="stopped" if stopped.is_set() else "done", step=step, tokens=tokens, busy_s=busy_s, decay_step=decay_step)


if __name__ == "__main__":
    main()
