"""The training loop: megatron-core's schedule, DDP and optimizer, one run from a fresh seed to its held-out loss."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func

import megatron_compress
from megatron_compress.hooks.active import get_active
from megatron_compress.sample_memory import Samples
from megatron_compress.training import checkpoint, state
from megatron_compress.training.config import ArmConfig, Experiment, num_microbatches
from megatron_compress.training.data import Corpus, sample_ids
from megatron_compress.training.distributed import device, is_first_rank, seed_everything
from megatron_compress.training.identity import identity
from megatron_compress.training.metrics import HeldOutRecord, RunLog, StepRecord
from megatron_compress.training.model import build_model, params_dtype
from megatron_compress.training.prepared import Blend
from megatron_compress.training.step_traffic import Counts, step_traffic


@dataclass
class RunResult:
    """What a run leaves behind, the same on every rank. `report` is the hooks' report; None for plain Megatron.

    Of a resumed run the first rank has all records, the others those since.
    """

    steps: list[StepRecord] = field(default_factory=list)
    held_out: list[HeldOutRecord] = field(default_factory=list)
    report: object | None = None
    peak_memory_gib: float | None = None  # of this rank's GPU; None without one

    def add(self, record: StepRecord | HeldOutRecord) -> None:
        (self.steps if isinstance(record, StepRecord) else self.held_out).append(record)


def train(experiment: Experiment, data: Corpus | Blend, arm: ArmConfig, out: Path) -> RunResult:
    """Train a new model as `arm` says and log each step to `out`/NAME.jsonl. Called by every rank."""
    result = RunResult()
    with _compression(experiment.compress_file(arm)):
        trainer = Trainer(experiment, data)
        log = RunLog(out / f"{arm.name}.jsonl", arm.name, arm.steps or experiment.train.run.steps, is_first_rank())
        with log:
            _run(trainer, arm, result, log)
        if arm.compress is not None:
            result.report = megatron_compress.report().gather()
    return result


def pretrain(experiment: Experiment, data: Corpus | Blend, arm: ArmConfig, out: Path, resume: bool) -> RunResult:
    """As `train`, with checkpoints in `out`/checkpoints, and TensorBoard. Called by every rank.

    Args:
        resume: go on from the newest checkpoint, if there is one.

    Raises:
        CheckpointError: a checkpoint could not be written or read, or there are some and `resume` is False.
    """
    result = RunResult()
    folder = out / "checkpoints"
    newest = checkpoint.latest(folder)
    if newest is not None and not resume:
        raise checkpoint.CheckpointError(f"{folder} has checkpoints; add --resume to go on, or give another --out")
    with _compression(experiment.compress_file(arm)):
        trainer = Trainer(experiment, data)
        done = 0
        if newest is not None:
            done, remarks = state.load(trainer, newest)
            _say([f"resumed from {newest}", *remarks])
        log = RunLog(out / f"{arm.name}.jsonl", arm.name, experiment.train.run.steps, is_first_rank(), done, out)
        for record in log.before:
            result.add(record)
        with log:
            _run(trainer, arm, result, log, done, folder)
        if arm.compress is not None:
            result.report = megatron_compress.report().gather()
    return result


def _say(lines: list[str]) -> None:
    if is_first_rank():
        print("\n".join(lines), file=sys.stderr, flush=True)


def _run(trainer: Trainer, arm: ArmConfig, result: RunResult, log: RunLog, done: int = 0, folder: Path | None = None):
    """Steps `done` + 1 to the last, with evaluation, and with checkpoints if there is a `folder` for them."""
    run = trainer.experiment.train.run
    steps = arm.steps or run.steps
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    for step in range(done + 1, steps + 1):
        records = [trainer.step(step)]
        if step % (run.evaluate_every or steps) == 0 or step == steps:
            records.append(trainer.evaluate(step))
        for record in records:
            result.add(record)
            log.write(record)
        if folder and run.save_every and (step % run.save_every == 0 or step == steps):
            state.save(trainer, step, folder, run.keep_checkpoints)
    if torch.cuda.is_available():
        result.peak_memory_gib = torch.cuda.max_memory_allocated() / 2**30


@contextlib.contextmanager
def _compression(file: Path | None) -> Iterator[None]:
    if file is None:
        yield
        return
    megatron_compress.install(file)
    try:
        yield
    finally:
        megatron_compress.uninstall()


class Trainer:
    """A model, its optimizer and its data at one point of a run."""

    def __init__(self, experiment: Experiment, data: Corpus | Blend):
        self.experiment = experiment
        self.identity = identity(experiment, data)
        self._config = experiment.train
        self._data = data
        self._dp_rank = parallel_state.get_data_parallel_rank()
        self._dp_size = parallel_state.get_data_parallel_world_size()
        self._num_microbatches = num_microbatches(experiment.train, self._dp_size)
        self._held_out = self._my_held_out_microbatches()
        seed_everything(self._config.run.seed)
        self.chunks = build_model(experiment)
        if self._config.init is not None:
            first = experiment.file(self._config.init)
            state.load_weights(self.chunks, checkpoint.latest(first) or first)
        self.optimizer = _build_optimizer(experiment, self.chunks)
        self.scheduler = _build_scheduler(experiment, self.optimizer)

    def step(self, step: int) -> StepRecord:
        """Run training step `step`, counted from 1.

        Raises:
            FloatingPointError: the loss is no longer finite.
        """
        start = time.perf_counter()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        sent = _sent()
        self._tell_samples(step)
        loss = self._forward_backward(self._microbatches(step), forward_only=False)
        self.scheduler.step(1)
        _, grad_norm, _ = self.optimizer.step()
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss of step {step} is {loss}, the gradient norm {grad_norm}")
        seconds = time.perf_counter() - start
        lr = self.optimizer.param_groups[0]["lr"]
        tokens = self._config.data.global_batch_size * self._config.data.sequence_length
        record = StepRecord(step, loss, loss.hex(), float(grad_norm), lr, seconds, tokens / seconds)
        return record if sent is None else record.with_traffic(step_traffic(sent, _sent()))

    @torch.no_grad()
    def evaluate(self, step: int) -> HeldOutRecord:
        """Mean loss over the held-out windows, the same windows every time, after `step` updates."""
        for chunk in self.chunks:
            chunk.eval()
        loss = self._forward_backward(self._held_out, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        return HeldOutRecord(step, loss, loss.hex())

    def _microbatches(self, step: int) -> list[torch.Tensor]:
        """This rank's part of the global batch; ranks of one model-parallel group have the same part."""
        first = self._dp_rank * self._num_microbatches
        return [self._data.microbatch(self._config, step, first + i) for i in range(self._num_microbatches)]

    def _tell_samples(self, step: int) -> None:
        """Let compressors that remember samples know which ones the step is of."""
        active, data = get_active(), self._config.data
        if active is not None and data.epoch_windows:
            first = self._dp_rank * self._num_microbatches
            ids = [tuple(sample_ids(data, step, first + i)) for i in range(self._num_microbatches)]
            active.session.samples = Samples(tuple(ids), data.epoch_windows // self._dp_size)

    def _my_held_out_microbatches(self) -> list[torch.Tensor]:
        return self._data.held_out_microbatches(self._config)[self._dp_rank :: self._dp_size]

    def _forward_backward(self, microbatches: list[torch.Tensor], forward_only: bool) -> float:
        """Run Megatron's schedule; the mean loss over the microbatches of all data-parallel ranks."""
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[iter(microbatches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(microbatches),
            seq_length=self._config.data.sequence_length,
            micro_batch_size=self._config.data.micro_batch_size,
            forward_only=forward_only,
        )
        return _mean_over_ranks(losses, len(microbatches) * self._dp_size)


def _sent() -> Counts | None:
    """What this rank has sent on the compressed axes; None for plain Megatron, where nobody counts."""
    active = get_active()
    return None if active is None else active.session.traffic.by_direction()


def _forward_step(microbatches: Iterator[torch.Tensor], model: torch.nn.Module):
    """Forward one microbatch, int64 [b, s + 1]. The last stage returns losses [b, s], the others activations."""
    tokens = next(microbatches).to(device(), non_blocking=True)
    positions = torch.arange(tokens.size(1) - 1, device=tokens.device).expand(tokens.size(0), -1)
    return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]), _mean_loss


def _mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss = losses.float().mean()
    return loss, loss.detach().clone()  # Megatron scales the first in place


def _mean_over_ranks(losses: list[torch.Tensor], count: int) -> float:
    """The last stage has the losses, one copy a tensor-parallel rank. They are summed in float64, on every rank."""
    total = torch.zeros(1, dtype=torch.float64, device=device())
    if losses and parallel_state.get_tensor_model_parallel_rank() == 0:
        total += torch.stack(losses).double().sum()
    torch.distributed.all_reduce(total)
    return total.item() / count


def _build_optimizer(experiment: Experiment, chunks: list):
    settings, parallel, run = experiment.train.optimizer, experiment.train.parallel, experiment.train.run
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        clip_grad=settings.clip_grad,
        bf16=run.precision == "bf16",
        params_dtype=params_dtype(experiment),
        use_distributed_optimizer=parallel.distributed_optimizer,
    )
    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)


def _build_scheduler(experiment: Experiment, optimizer) -> OptimizerParamScheduler:
    settings, steps = experiment.train.optimizer, experiment.train.run.steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=steps,
        lr_decay_style=settings.decay,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
    )
